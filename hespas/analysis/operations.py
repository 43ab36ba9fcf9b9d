"""What ran, and how far from the roof: operations by shape, their classes, and kernels.

An operation is what :func:`~hespas.converters.measured_ops.costed_ops` makes of device events: the host
operation that answers for them, with the FLOPs and bytes of the cost table. The roof is the roofline's: the
time of its arithmetic at the peak, or of its bytes at the bandwidth of the main memory: the longer one. Of
an operation that was faster, its operands were in a cache, and the roof is the least that the device can need
(:func:`~hespas.estimators.rates.roof_ns`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.analysis.recording import Kind, Recording
from hespas.analysis.table import Moments, Row, Table, listed, table_from_rows, table_of
from hespas.converters.measured_ops import CostedOps
from hespas.estimators.rates import peak_times, roof_ns
from hespas.files.documents import Count, Figure
from hespas.graph import DTYPES, UNKNOWN_DTYPE, OpClass, Profile
from hespas.graph.columns import FloatArray, IntArray, at_rows, distinct_rows
from hespas.graph.opgraph import timed_class_name
from hespas.hardware import Device
from hespas.operations import arithmetic_dtype, operations_of

__all__ = [
    "ClassRow",
    "KernelRow",
    "Measured",
    "OperationRow",
    "WinRow",
    "classes",
    "kernels",
    "measured_of",
    "operations",
    "product_dtype",
    "unclassified_share",
    "wins",
]

_BOUNDS = ("", "compute", "memory", "host link")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Measured:
    """The operations of one profile; columns of shape ``(operations,)``.

    ``busy_ns`` is 0 where no time is known. ``roof_ns`` is NaN where the device or the cost is unknown;
    ``bound`` is the place among ``_BOUNDS`` of what sets it: copies from and to the host are bound by the
    link there.
    """

    profile: Profile
    costed: CostedOps
    busy_ns: FloatArray
    roof_ns: FloatArray
    bound: NDArray[np.int8]


def measured_of(profile: Profile, costed: CostedOps, device: Device | None) -> Measured:
    """The operations of a profile with their roofs on a device. O(operations)."""
    graph = costed.graph
    busy = np.nan_to_num(costed.busy_ns)  # what has no time is told by who reads the recordings
    if device is None or not len(graph):
        nobody = np.full(len(graph), np.nan)
        return Measured(
            profile=profile, costed=costed, busy_ns=busy, roof_ns=nobody, bound=np.zeros(len(graph), np.int8)
        )
    ops = operations_of(graph)
    peaks = peak_times(ops, device, transcendental_weight=0.0)
    roofline = peaks.roofline_ns
    # what is faster than main memory had its operands in a cache: then that is the roof
    least = np.where(busy >= roofline, roofline, roof_ns(ops, device))
    arithmetic, memory = np.nan_to_num(peaks.arithmetic_ns), np.nan_to_num(peaks.memory_ns)
    bound = np.where(arithmetic >= memory, 1, 2)
    over_host = graph.op_class == OpClass.HOST
    link = device.link("pcie")
    moved = np.fmax(graph.bytes_read, graph.bytes_written)
    crossing = moved / link.bandwidth_bytes_per_s * 1e9 if link else np.full(len(graph), np.nan)
    least, bound = np.where(over_host, np.nan_to_num(crossing), least), np.where(over_host, 3, bound)
    known = costed.costed & (least > 0)
    nothing = costed.costed & (graph.flops == 0) & (moved == 0)  # beside a kernel that has the cost of all
    bound = np.where(known, bound, 0).astype(np.int8)
    return Measured(
        profile=profile,
        costed=costed,
        busy_ns=busy,
        roof_ns=np.where(known, least, np.where(nothing, 0.0, np.nan)),
        bound=bound,
    )


class OperationRow(Row, frozen=True, kw_only=True):
    """An operation with inputs of these shapes and types, on all ranks together; of a compiled program an
    instruction, and the ``program`` that it is of. ``share`` is of the device time (0..1). ``flops`` and
    ``bytes_moved`` are sums, as are ``total_ns`` and ``roof_ns``; ``roof_share`` is how much of the measured
    time the device needs at least (more than 1: that device cannot have run it, or the cost is not its own),
    ``bound`` what sets that for the longest. ``kernel`` is the one with most time.
    """

    operation: str
    program: str
    shapes: str
    dtypes: str
    op_class: str
    count: Count
    total_ns: Figure
    share: Figure
    mean_ns: Figure
    min_ns: Figure
    max_ns: Figure
    std_ns: Figure
    flops: Figure
    bytes_moved: Figure
    tflops_per_s: Figure
    gbytes_per_s: Figure
    roof_ns: Figure
    roof_share: Figure
    bound: str
    kernel: str


class ClassRow(Row, frozen=True, kw_only=True):
    """The operations of one class; columns as those of operations. ``costed_share`` is the share of their
    time whose FLOPs and bytes are known.
    """

    op_class: str
    count: Count
    total_ns: Figure
    share: Figure
    flops: Figure
    bytes_moved: Figure
    costed_share: Figure
    roof_ns: Figure


class KernelRow(Row, frozen=True, kw_only=True):
    """All runs of a kernel on all ranks. ``kind`` is compute, communication or memory; ``operation`` the one
    that launched most of its time.
    """

    kernel: str
    kind: str
    op_class: str
    operation: str
    count: Count
    total_ns: Figure
    share: Figure
    mean_ns: Figure
    min_ns: Figure
    max_ns: Figure
    std_ns: Figure


class WinRow(Row, frozen=True, kw_only=True):
    """Time that an operation took beyond its roof: ``win_ns`` = ``total_ns`` - ``roof_ns``. ``win_share`` is
    of the device time, ``cumulative_share`` that of this row and those before it.
    """

    operation: str
    program: str
    shapes: str
    dtypes: str
    op_class: str
    count: Count
    total_ns: Figure
    roof_ns: Figure
    win_ns: Figure
    win_share: Figure
    cumulative_share: Figure
    bound: str
    kernel: str


# --- Groups of one profile, then of all: texts are compared across files, numbers within one.


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Equal rows put together under ``keys``: their times, sums of other columns, and ``words`` of the row
    with most time, which took ``longest``.
    """

    keys: Sequence[tuple[str, ...]]
    moments: Moments
    sums: dict[str, FloatArray]
    words: dict[str, list[str]]
    longest: FloatArray


def _grouped(
    keys: Sequence[tuple[str, ...]], place: IntArray, values: FloatArray, sums: dict[str, FloatArray]
) -> tuple[Moments, dict[str, FloatArray]]:
    found = {name: np.bincount(place, column, len(keys)).astype(np.float64) for name, column in sums.items()}
    return Moments.of(values, place, len(keys)), found


def _heaviest(place: IntArray, weight: FloatArray, groups: int) -> IntArray:
    """The row with the largest weight of each group, the first of equal ones."""
    order = np.lexsort((-np.arange(len(place)), weight, place))
    found = np.zeros(groups, np.int64)
    found[place[order]] = order
    return found


def _merged(parts: Sequence[_Groups]) -> _Groups:
    """Groups of equal keys put together."""
    rows: dict[tuple[str, ...], int] = {}
    place = np.array([rows.setdefault(key, len(rows)) for part in parts for key in part.keys], np.int64)
    count = len(rows)
    moments = Moments(
        *(
            np.concatenate([getattr(part.moments, name) for part in parts])
            for name in ("count", "total", "least", "most", "squares")
        )
    ).merged(place, count)
    sums = {
        name: np.bincount(place, np.concatenate([part.sums[name] for part in parts]), count).astype(
            np.float64
        )
        for name in parts[0].sums
    }
    longest = np.concatenate([part.longest for part in parts])
    first = _heaviest(place, longest, count)
    words: dict[str, list[str]] = {}
    for name in parts[0].words:
        said = [word for part in parts for word in part.words[name]]
        words[name] = [said[row] for row in first.tolist()]
    return _Groups(list(rows), moments, sums, words, longest[first])


def _operation_groups(measured: Measured) -> _Groups:
    profile, costed = measured.profile, measured.costed
    graph, host = costed.graph, profile.host
    op = costed.host_op
    longest = costed.groups.longest
    of_program = profile.module_row[longest] > 0
    stated = (profile.op_row[longest] > 0) & ((profile.host_event[longest] < 0) | of_program)
    own = np.where(stated, profile.op_row[longest], profile.kernel_row[longest])
    name = np.where(op >= 0, at_rows(host.name_row, op, 0), own)
    shapes = np.where(op >= 0, at_rows(host.shapes_row, op, 0), profile.shapes_row[longest])
    dtypes = np.where(op >= 0, at_rows(host.dtype_row, op, 0), profile.dtype_row[longest])
    program = np.where(stated & of_program & (op < 0), profile.module_row[longest], 0)
    distinct, place = distinct_rows(name, program, shapes, dtypes, graph.op_class)
    strings = profile.strings
    keys = [
        (strings[row], strings[of], _compact(strings[shape]), _compact(strings[kind]), timed_class_name(code))
        for row, of, shape, kind, code in distinct
    ]
    moved = graph.bytes_read + graph.bytes_written
    moments, sums = _grouped(
        keys,
        place,
        measured.busy_ns,
        {
            "flops": graph.flops,
            "bytes_moved": moved,
            "roof_ns": measured.roof_ns,
        },
    )
    first = _heaviest(place, measured.busy_ns, len(keys))
    names = [strings[row] for row in profile.kernel_row[longest[first]].tolist()]
    bounds = [_BOUNDS[code] for code in listed(measured.bound[first])]
    return _Groups(keys, moments, sums, {"kernel": names, "bound": bounds}, measured.busy_ns[first])


_BLANKS = re.compile(r"\s*([\[\],])\s*")


def _compact(text: str) -> str:
    """A JSON text of lists without its blanks, which writers set as they like."""
    return _BLANKS.sub(r"\1", text)


def operations(measured: Sequence[Measured]) -> Table[OperationRow]:
    """Operations of all profiles by name, program, shapes, types and class; most time first. O(n log n)."""
    parts = [_operation_groups(each) for each in measured if len(each.costed.graph)]
    if not parts:
        return table_from_rows(OperationRow, [])
    found = _merged(parts)
    moments, sums = found.moments, found.sums
    total = moments.total
    roof_ns = np.where(sums["roof_ns"] > 0, sums["roof_ns"], np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        table = table_of(
            OperationRow,
            operation=[key[0] for key in found.keys],
            program=[key[1] for key in found.keys],
            shapes=[key[2] for key in found.keys],
            dtypes=[key[3] for key in found.keys],
            op_class=[key[4] for key in found.keys],
            count=moments.count,
            total_ns=total,
            share=total / total.sum(),
            mean_ns=moments.mean,
            min_ns=moments.least,
            max_ns=moments.most,
            std_ns=moments.deviation,
            flops=sums["flops"],
            bytes_moved=sums["bytes_moved"],
            tflops_per_s=sums["flops"] / total / 1e3,
            gbytes_per_s=sums["bytes_moved"] / total,
            roof_ns=roof_ns,
            roof_share=roof_ns / total,
            bound=found.words["bound"],
            kernel=found.words["kernel"],
        )
    return table.largest("total_ns")


def classes(measured: Sequence[Measured]) -> Table[ClassRow]:
    """Operations by class, most time first; sums are of what is known. O(n)."""
    sums = np.zeros((6, len(OpClass)))
    for each in measured:
        graph, busy = each.costed.graph, each.busy_ns
        columns = (
            np.ones(len(graph)),
            busy,
            np.where(each.costed.costed, busy, 0.0),
            np.nan_to_num(graph.flops),
            np.nan_to_num(graph.bytes_read + graph.bytes_written),
            np.nan_to_num(each.roof_ns),
        )
        sums += np.array([np.bincount(graph.op_class, column, len(OpClass)) for column in columns])
    count, total, costed, flops, moved, roof = sums
    used: IntArray = np.flatnonzero(count)
    codes = listed(used)
    unknown = costed[used] == 0
    with np.errstate(invalid="ignore", divide="ignore"):
        table = table_of(
            ClassRow,
            op_class=[timed_class_name(code) for code in codes],
            count=count[used],
            total_ns=total[used],
            share=total[used] / total.sum(),
            flops=np.where(unknown, np.nan, flops[used]),
            bytes_moved=np.where(unknown, np.nan, moved[used]),
            costed_share=costed[used] / total[used],
            roof_ns=np.where(roof[used] > 0, roof[used], np.nan),
        )
    return table.largest("total_ns")


def _kernel_groups(recording: Recording, op_class: NDArray[np.integer]) -> _Groups:
    profile, strings = recording.profile, recording.profile.strings
    rows = recording.rows
    distinct, place = distinct_rows(profile.kernel_row[rows], recording.kind)
    keys = [(strings[row], Kind(kind).word) for row, kind in distinct]
    time = recording.duration_ns
    moments, sums = _grouped(keys, place, time, {})
    # the operation and the class with most time of each kernel
    pairs, of_pair = distinct_rows(place, profile.op_row[rows], op_class[rows])
    weight = np.bincount(of_pair, time, len(pairs)).astype(np.float64)
    group = np.array([pair[0] for pair in pairs], np.int64)
    first = listed(_heaviest(group, weight, len(keys)))
    words = {
        "operation": [strings[pairs[row][1]] for row in first],
        "op_class": [timed_class_name(pairs[row][2]) for row in first],
    }
    return _Groups(keys, moments, sums, words, moments.total)


def kernels(recordings: Sequence[Recording], measured: Sequence[Measured]) -> Table[KernelRow]:
    """Kernels of all ranks by name, most time first. O(n log n)."""
    class_of = {id(each.profile): each.costed.graph.op_class[each.costed.node] for each in measured}
    parts = [_kernel_groups(each, class_of[id(each.profile)]) for each in recordings if len(each)]
    if not parts:
        return table_from_rows(KernelRow, [])
    found = _merged(parts)
    moments = found.moments
    with np.errstate(invalid="ignore", divide="ignore"):
        table = table_of(
            KernelRow,
            kernel=[key[0] for key in found.keys],
            kind=[key[1] for key in found.keys],
            op_class=found.words["op_class"],
            operation=found.words["operation"],
            count=moments.count,
            total_ns=moments.total,
            share=moments.total / moments.total.sum(),
            mean_ns=moments.mean,
            min_ns=moments.least,
            max_ns=moments.most,
            std_ns=moments.deviation,
        )
    return table.largest("total_ns")


def unclassified_share(recordings: Sequence[Recording], measured: Sequence[Measured]) -> float:
    """The share of the device time of kernels of unknown class, 0..1. Operations of a run without a device do
    not count: what communicates is recorded there.
    """
    class_of = {id(each.profile): each.costed.graph.op_class[each.costed.node] for each in measured}
    total = unknown = 0.0
    for each in recordings:
        of_host = np.array([_is_of_host(each.profile, row) for row in range(len(each.profile.devices))])
        on_device = ~of_host[each.profile.device_index[each.rows]]
        vague = class_of[id(each.profile)][each.rows] == OpClass.UNKNOWN
        vague &= (each.kind == Kind.COMPUTE) & on_device
        total += float(each.duration_ns.sum())
        unknown += float(each.duration_ns[vague].sum())
    return unknown / total if total else 0.0


def product_dtype(measured: Sequence[Measured]) -> str:
    """Return the element type that matmuls computed in for most of their time; empty where none is known."""
    time_ns = np.zeros(len(DTYPES))
    for each in measured:
        graph = each.costed.graph
        element = arithmetic_dtype(graph, UNKNOWN_DTYPE)
        products = (graph.op_class == OpClass.CONTRACTION) & (element != UNKNOWN_DTYPE)
        time_ns += np.bincount(element[products], each.busy_ns[products], len(DTYPES))
    return DTYPES[int(time_ns.argmax())].name if time_ns.any() else ""


def _is_of_host(profile: Profile, device: int) -> bool:
    return profile.devices[device] == "CPU"


def wins(table: Table[OperationRow]) -> Table[WinRow]:
    """Where time would be won: operations by their distance from the roof, the largest first. Those of
    unknown roof are left out.
    """
    known = table.take(np.isfinite(table["roof_ns"]))
    win = np.maximum(known["total_ns"] - known["roof_ns"], 0.0)
    known, win = known.take(np.argsort(-win, kind="stable")), -np.sort(-win, kind="stable")
    whole = float(table["total_ns"].sum()) or np.nan
    kept = (
        *("operation", "program", "shapes", "dtypes", "op_class"),
        *("count", "total_ns", "roof_ns", "bound", "kernel"),
    )
    return table_of(
        WinRow,
        win_ns=win,
        win_share=win / whole,
        cumulative_share=np.cumsum(win) / whole,
        **{name: known[name] for name in kept},
    )
