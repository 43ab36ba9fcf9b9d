"""Operations by shape, operation classes and kernels, with their distance from the roofline.

Operations are made from device events by :func:`~hespas.converters.measured_ops.build.costed_ops`: the host
operation that launched them, with the FLOPs and bytes of the cost table. The roofline time is the longer of
the arithmetic at peak rate and the bytes at the bandwidth of main memory. If an operation was faster, its
operands were in a cache, and the roofline time is the least time that the device can need
(:func:`~hespas.estimators.rates.roof_ns`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.analysis.recording import DeviceEventKind, Recording
from hespas.analysis.table import AnalysisRow, GroupStatistics, RowTable, listed, table_from_rows, table_of
from hespas.converters.measured_ops.build import CostedOps
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
    "MeasuredOperations",
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
_BLANKS = re.compile(r"\s*([\[\],])\s*")
"""Blanks in JSON texts of lists, which differ between writers."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MeasuredOperations:
    """Measured operations of one profile, with their roofline times; columns of shape ``(operations,)``.

    ``busy_ns`` is the device time of an operation, 0 if unknown. ``roof_ns`` is NaN if the device or the cost
    of the operation is unknown. ``bound`` is the index in ``_BOUNDS`` of the resource that limits the
    operation. For copies between host and device this is the host link.
    """

    profile: Profile
    costed: CostedOps
    busy_ns: FloatArray
    roof_ns: FloatArray
    bound: NDArray[np.int8]


def measured_of(profile: Profile, costed: CostedOps, device: Device | None) -> MeasuredOperations:
    """Return the operations of a profile with their roofline times on a device. O(operations)."""
    graph = costed.graph
    busy = np.nan_to_num(costed.busy_ns)  # recordings_of reports events without a time
    if device is None or not len(graph):
        unknown = np.full(len(graph), np.nan)
        return MeasuredOperations(
            profile=profile, costed=costed, busy_ns=busy, roof_ns=unknown, bound=np.zeros(len(graph), np.int8)
        )
    ops = operations_of(graph)
    peaks = peak_times(ops, device, transcendental_weight=0.0)
    roofline = peaks.roofline_ns
    # operands of operations that are faster than main memory were in a cache
    least = np.where(busy >= roofline, roofline, roof_ns(ops, device))
    arithmetic, memory = np.nan_to_num(peaks.arithmetic_ns), np.nan_to_num(peaks.memory_ns)
    bound = np.where(arithmetic >= memory, 1, 2)
    over_host = graph.op_class == OpClass.HOST
    link = device.link("pcie")
    moved = np.fmax(graph.bytes_read, graph.bytes_written)
    crossing = moved / link.bandwidth_bytes_per_s * 1e9 if link else np.full(len(graph), np.nan)
    least, bound = np.where(over_host, np.nan_to_num(crossing), least), np.where(over_host, 3, bound)
    has_roof = costed.costed & (least > 0)
    is_free = costed.costed & (graph.flops == 0) & (moved == 0)  # another kernel has the whole cost
    bound = np.where(has_roof, bound, 0).astype(np.int8)
    return MeasuredOperations(
        profile=profile,
        costed=costed,
        busy_ns=busy,
        roof_ns=np.where(has_roof, least, np.where(is_free, 0.0, np.nan)),
        bound=bound,
    )


class OperationRow(AnalysisRow, frozen=True, kw_only=True):
    """Operation with inputs of certain shapes and types, over all ranks. In a compiled program it is an
    instruction, with its ``program``.

    ``share`` is relative to the device time (0 to 1). ``flops``, ``bytes_moved``, ``total_ns`` and
    ``roof_ns`` are sums. ``roof_share`` is roofline time / measured time. More than 1 is impossible on the
    device and means that the cost includes other operations. ``bound`` is the resource that limits the
    longest run, ``kernel`` the kernel with the most time.
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


class ClassRow(AnalysisRow, frozen=True, kw_only=True):
    """Operations of one class. Columns are as in :class:`OperationRow`. ``costed_share`` is the share of the
    time of the class for which FLOPs and bytes are known.
    """

    op_class: str
    count: Count
    total_ns: Figure
    share: Figure
    flops: Figure
    bytes_moved: Figure
    costed_share: Figure
    roof_ns: Figure


class KernelRow(AnalysisRow, frozen=True, kw_only=True):
    """All runs of a kernel on all ranks. ``kind`` is compute, communication or memory. ``operation`` is the
    operation whose launches of the kernel took most time.
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


class WinRow(AnalysisRow, frozen=True, kw_only=True):
    """Optimization opportunity: an operation that takes longer than its roofline time, by ``win_ns`` =
    ``total_ns`` - ``roof_ns``.

    ``win_share`` is relative to the device time. ``cumulative_share`` is the sum of these shares up to this
    row.
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


@dataclass(frozen=True, slots=True, eq=False)
class _RowGroups:
    """Sums over groups of table rows, for one profile. Groups of several profiles with equal ``keys`` are
    merged.

    ``moments`` has statistics of the times, ``sums`` the sums of other columns. ``labels`` are texts of the
    row with the most time in each group; ``longest`` is the time of that row.
    """

    keys: Sequence[tuple[str, ...]]
    moments: GroupStatistics
    sums: dict[str, FloatArray]
    labels: dict[str, list[str]]
    longest: FloatArray


def _heaviest(group: IntArray, weight: FloatArray, groups: int) -> IntArray:
    """Return for each group the row with the largest weight; of equal weights, the first row."""
    order = np.lexsort((-np.arange(len(group)), weight, group))
    heaviest = np.zeros(groups, np.int64)
    heaviest[group[order]] = order
    return heaviest


def _merged(parts: Sequence[_RowGroups]) -> _RowGroups:
    """Merge groups of rows with equal keys, as from several profiles, into one."""
    rows: dict[tuple[str, ...], int] = {}
    group = np.array([rows.setdefault(key, len(rows)) for part in parts for key in part.keys], np.int64)
    count = len(rows)
    moments = GroupStatistics(
        *(
            np.concatenate([getattr(part.moments, name) for part in parts])
            for name in ("count", "total", "least", "most", "squares")
        )
    ).merged(group, count)
    sums = {
        name: np.bincount(group, np.concatenate([part.sums[name] for part in parts]), count).astype(
            np.float64
        )
        for name in parts[0].sums
    }
    longest = np.concatenate([part.longest for part in parts])
    first = _heaviest(group, longest, count)
    labels: dict[str, list[str]] = {}
    for name in parts[0].labels:
        texts = [text for part in parts for text in part.labels[name]]
        labels[name] = [texts[row] for row in first.tolist()]
    return _RowGroups(list(rows), moments, sums, labels, longest[first])


def _operation_groups(measured: MeasuredOperations) -> _RowGroups:
    profile, costed = measured.profile, measured.costed
    graph, host = costed.graph, profile.host
    op = costed.host_op
    longest = costed.groups.longest
    of_program = profile.module_id[longest] > 0
    has_own_name = (profile.op_id[longest] > 0) & ((profile.host_event[longest] < 0) | of_program)
    own = np.where(has_own_name, profile.op_id[longest], profile.kernel_id[longest])
    name = np.where(op >= 0, at_rows(host.name_id, op, 0), own)
    shapes = np.where(op >= 0, at_rows(host.shapes_id, op, 0), profile.shapes_id[longest])
    dtypes = np.where(op >= 0, at_rows(host.dtype_id, op, 0), profile.dtype_id[longest])
    program = np.where(has_own_name & of_program & (op < 0), profile.module_id[longest], 0)
    distinct, group = distinct_rows(name, program, shapes, dtypes, graph.op_class)
    strings = profile.strings
    keys = [
        (
            strings[row],
            strings[module],
            *(_BLANKS.sub(r"\1", strings[text]) for text in (shape, dtype)),
            timed_class_name(code),
        )
        for row, module, shape, dtype, code in distinct
    ]
    columns = {
        "flops": graph.flops,
        "bytes_moved": graph.bytes_read + graph.bytes_written,
        "roof_ns": measured.roof_ns,
    }
    sums = {
        name: np.bincount(group, column, len(keys)).astype(np.float64) for name, column in columns.items()
    }
    moments = GroupStatistics.of(measured.busy_ns, group, len(keys))
    first = _heaviest(group, measured.busy_ns, len(keys))
    names = [strings[row] for row in profile.kernel_id[longest[first]].tolist()]
    bounds = [_BOUNDS[code] for code in listed(measured.bound[first])]
    return _RowGroups(keys, moments, sums, {"kernel": names, "bound": bounds}, measured.busy_ns[first])


def operations(measured: Sequence[MeasuredOperations]) -> RowTable[OperationRow]:
    """Return operations by name, program, shapes, types and class; most time first. O(n log n)."""
    parts = [_operation_groups(of_profile) for of_profile in measured if len(of_profile.costed.graph)]
    if not parts:
        return table_from_rows(OperationRow, [])
    merged = _merged(parts)
    moments, sums = merged.moments, merged.sums
    total = moments.total
    roof_ns = np.where(sums["roof_ns"] > 0, sums["roof_ns"], np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        table = table_of(
            OperationRow,
            operation=[key[0] for key in merged.keys],
            program=[key[1] for key in merged.keys],
            shapes=[key[2] for key in merged.keys],
            dtypes=[key[3] for key in merged.keys],
            op_class=[key[4] for key in merged.keys],
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
            bound=merged.labels["bound"],
            kernel=merged.labels["kernel"],
        )
    return table.largest("total_ns")


def classes(measured: Sequence[MeasuredOperations]) -> RowTable[ClassRow]:
    """Return operations by class, most time first; unknown figures are not in the sums. O(n)."""
    sums = np.zeros((6, len(OpClass)))
    for of_profile in measured:
        graph, busy = of_profile.costed.graph, of_profile.busy_ns
        columns = (
            np.ones(len(graph)),
            busy,
            np.where(of_profile.costed.costed, busy, 0.0),
            np.nan_to_num(graph.flops),
            np.nan_to_num(graph.bytes_read + graph.bytes_written),
            np.nan_to_num(of_profile.roof_ns),
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


def kernels(recordings: Sequence[Recording], measured: Sequence[MeasuredOperations]) -> RowTable[KernelRow]:
    """Return kernels of all ranks by name, most time first. O(n log n)."""
    class_of = _event_classes(measured)
    parts: list[_RowGroups] = []
    for recording in recordings:
        if not len(recording):
            continue
        profile, rows, time = recording.profile, recording.rows, recording.duration_ns
        strings = profile.strings
        distinct, kernel = distinct_rows(profile.kernel_id[rows], recording.kind)
        keys = [(strings[row], DeviceEventKind(kind).word) for row, kind in distinct]
        of_kernel = GroupStatistics.of(time, kernel, len(keys))
        # the operation and the class with most time of each kernel
        pairs, of_pair = distinct_rows(kernel, profile.op_id[rows], class_of[id(profile)][rows])
        weight = np.bincount(of_pair, time, len(pairs)).astype(np.float64)
        group = np.array([pair[0] for pair in pairs], np.int64)
        first = listed(_heaviest(group, weight, len(keys)))
        labels = {
            "operation": [strings[pairs[row][1]] for row in first],
            "op_class": [timed_class_name(pairs[row][2]) for row in first],
        }
        parts.append(_RowGroups(keys, of_kernel, {}, labels, of_kernel.total))
    if not parts:
        return table_from_rows(KernelRow, [])
    merged = _merged(parts)
    moments = merged.moments
    with np.errstate(invalid="ignore", divide="ignore"):
        table = table_of(
            KernelRow,
            kernel=[key[0] for key in merged.keys],
            kind=[key[1] for key in merged.keys],
            op_class=merged.labels["op_class"],
            operation=merged.labels["operation"],
            count=moments.count,
            total_ns=moments.total,
            share=moments.total / moments.total.sum(),
            mean_ns=moments.mean,
            min_ns=moments.least,
            max_ns=moments.most,
            std_ns=moments.deviation,
        )
    return table.largest("total_ns")


def unclassified_share(recordings: Sequence[Recording], measured: Sequence[MeasuredOperations]) -> float:
    """Return the share of the device time spent in kernels of unknown class (0 to 1), some of which may
    communicate.

    Operations of a run on a CPU are not counted, because their communication is always recognised.
    """
    class_of = _event_classes(measured)
    total = unknown = 0.0
    for recording in recordings:
        profile, rows = recording.profile, recording.rows
        on_cpu = np.array([name == "CPU" for name in profile.devices])
        unclassified = class_of[id(profile)][rows] == OpClass.UNKNOWN
        unclassified &= (recording.kind == DeviceEventKind.COMPUTE) & ~on_cpu[profile.device_index[rows]]
        total += float(recording.duration_ns.sum())
        unknown += float(recording.duration_ns[unclassified].sum())
    return unknown / total if total else 0.0


def _event_classes(measured: Sequence[MeasuredOperations]) -> dict[int, NDArray[np.integer]]:
    """Return the operation class of each device event, by the ``id()`` of its profile."""
    return {
        id(of_profile.profile): of_profile.costed.graph.op_class[of_profile.costed.node]
        for of_profile in measured
    }


def product_dtype(measured: Sequence[MeasuredOperations]) -> str:
    """Return the element type in which matmuls spend most of their time; empty if unknown."""
    time_ns = np.zeros(len(DTYPES))
    for of_profile in measured:
        graph = of_profile.costed.graph
        element = arithmetic_dtype(graph, UNKNOWN_DTYPE)
        products = (graph.op_class == OpClass.CONTRACTION) & (element != UNKNOWN_DTYPE)
        time_ns += np.bincount(element[products], of_profile.busy_ns[products], len(DTYPES))
    return DTYPES[int(time_ns.argmax())].name if time_ns.any() else ""


def wins(table: RowTable[OperationRow]) -> RowTable[WinRow]:
    """Return the optimization opportunities: operations sorted by their time above the roofline, largest
    first. Operations without a roofline time are left out.
    """
    known = table.take(np.isfinite(table["roof_ns"]))
    win = np.maximum(known["total_ns"] - known["roof_ns"], 0.0)
    known, win = known.take(np.argsort(-win, kind="stable")), -np.sort(-win, kind="stable")
    whole = float(table["total_ns"].sum()) or np.nan
    columns = (
        *("operation", "program", "shapes", "dtypes", "op_class"),
        *("count", "total_ns", "roof_ns", "bound", "kernel"),
    )
    return table_of(
        WinRow,
        win_ns=win,
        win_share=win / whole,
        cumulative_share=np.cumsum(win) / whole,
        **{name: known[name] for name in columns},
    )
