"""The op graph of a profile's device work, with costs by the table of PyTorch's operations."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isnan, nan
from typing import NamedTuple

import msgspec
import numpy as np

from hespas.converters.measured_ops.groups import EventGroups, Role, collective_kind, group_events
from hespas.converters.measured_ops.owners import NOT_RECORDED
from hespas.costs.aten import aten_cost, find_aten_rule
from hespas.costs.aten.call import AtenCost
from hespas.costs.operation import Cost, Tensor
from hespas.graph import (
    CollectiveKind,
    Diagnostics,
    DType,
    GraphBuilder,
    NodeKind,
    OpClass,
    OpGraph,
    Profile,
    compress_groups,
    find_dtype,
)
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray

__all__ = ["CostedOps", "costed_ops"]

_LONGEST_PATH = 8
_LONGEST_NAME = 200
_LARGEST_INT64 = (1 << 63) - 1
_MOST_NAMED = 10


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CostedOps:
    """Device work as a graph, and how its nodes and the profile's events belong together.

    ``node`` is the node of each event, shape ``(events,)``. Per node: ``host_op``, the row of the profile's
    host operations that answers for it (-1 none); ``busy_ns``, the sum over its events, which adds up to the
    device time of the profile but for events of less than no time; ``costed``, whether FLOPs and bytes are
    both known. The graph's ``duration_ns`` is the time during which any of a node's events ran: less, where
    they overlap. ``groups`` tells what else joined events and nodes.
    """

    graph: OpGraph
    groups: EventGroups
    node: SmallIntArray
    host_op: IntArray
    busy_ns: FloatArray
    costed: BoolArray

    @property
    def coverage(self) -> float:
        """Share of the device time whose operation has a known cost, 0..1; 1 without device time."""
        total = float(self.busy_ns.sum())
        return float(self.busy_ns[self.costed].sum()) / total if total else 1.0


def costed_ops(profile: Profile, diagnostics: Diagnostics | None = None) -> CostedOps:
    """One node for each operation that ran on the device, in the order of their starts.

    Nodes carry the measured ``duration_ns``, their stream (ordered by control dependences), and operands,
    results, FLOPs, bytes and contractions by the cost table; unknown figures are NaN. Every event belongs to
    exactly one node, so device time in equals device time out; an event that ends before it starts adds
    nothing. Diagnostics say what has no cost.
    """
    groups = group_events(profile)
    graph = _Builder(profile, groups).build()
    with np.errstate(invalid="ignore"):
        costed = ~np.isnan(graph.flops + graph.bytes_read + graph.bytes_written)
    found = CostedOps(
        graph=graph, groups=groups, node=groups.node, host_op=groups.host_op, busy_ns=groups.busy_ns,
        costed=costed,
    )  # fmt: skip
    if diagnostics is not None:
        _report(profile, groups, found, diagnostics)
    return found


_ELEMENT_IN_KERNEL = re.compile(
    r"<(?:[^<>]*[ ,(])?(float|double|c10::BFloat16|c10::Half|long|int|bool|unsigned char|signed char)[,>]"
)
_OPAQUE = re.compile(r"OpaqueType<(\d+)u?>")
_BY_WIDTH = {"1": "i8", "2": "bf16", "4": "f32", "8": "i64", "16": "complex<f64>"}


def _element_type(kernel: str) -> DType | None:
    """The element type in a kernel's name: a list of tensors has none in a trace.

    ``OpaqueType<2u>`` only tells the width; a usual type of that width stands for it.
    """
    opaque = _OPAQUE.search(kernel)
    if opaque:
        return find_dtype(_BY_WIDTH.get(opaque[1], ""))
    found = _ELEMENT_IN_KERNEL.search(kernel)
    return find_dtype(found[1]) if found else None


class _Source(NamedTuple):
    """Where a node comes from; see :class:`EventGroups`."""

    role: Role
    op: int
    answers: bool
    event: int


class _Builder:
    """Adds nodes in order; equal operations are costed once."""

    def __init__(self, profile: Profile, groups: EventGroups) -> None:
        self.profile, self.groups, self.host = profile, groups, profile.host
        self.graph = GraphBuilder(profile.name)
        self.texts: dict[int, str] = {}
        self.costs: dict[tuple[int, int, int, int, int, DType | None], AtenCost] = {}
        self.types: dict[Tensor, int] = {}
        self.comms = {int(event): row for row, event in enumerate(profile.comms.event)}
        self.hints: dict[int, DType | None] = {}

    def text(self, row: int) -> str:
        """A string of the profile."""
        found = self.texts.get(row)
        if found is None:
            found = self.texts[row] = self.profile.strings[row]
        return found

    def hint(self, kernel_row: int) -> DType | None:
        """The element type that a kernel's name states."""
        if kernel_row not in self.hints:
            self.hints[kernel_row] = _element_type(self.text(kernel_row))
        return self.hints[kernel_row]

    def build(self) -> OpGraph:
        """All nodes."""
        groups = self.groups
        columns = (
            groups.role.tolist(), groups.host_op.tolist(), groups.answers.tolist(), groups.longest.tolist(),
            groups.stream.tolist(), groups.duration_ns.tolist(),
        )  # fmt: skip
        before: dict[tuple[int, int, int], int] = {}
        for role, op, answers, event, stream, duration_ns in zip(*columns, strict=True):
            queue = (int(self.profile.rank[event]), int(self.profile.device_index[event]), stream)
            node = self._add(_Source(Role(role), op, answers, event), before.get(queue))
            before[queue] = node
            self.graph.set(node, duration_ns=duration_ns)
            if -1 <= stream < 1 << 31:
                self.graph.set(node, stream=stream)
        return self.graph.build()

    def _add(self, source: _Source, before: int | None) -> int:
        op, event = source.op, source.event
        kernel = self.text(int(self.profile.kernel_row[event]))
        name = self.text(int(self.host.name_row[op])) if op >= 0 else kernel
        priced = self._priced(source, kernel)
        cost = priced.cost
        talks = source.role is Role.COMMUNICATION
        node = self.graph.add_node(
            name_row=self.graph.strings.add(kernel),
            op_row=self.graph.strings.add(name),
            op_class=cost.op_class,
            kind=NodeKind.COLLECTIVE if talks else NodeKind.COMPUTE,
            control_deps=() if before is None else (before,),
            operands=[self._type(each) for each in priced.operands],
            results=[self._type(each) for each in priced.results],
            flops=cost.flops,
            transcendentals=cost.transcendentals,
            bytes_read=cost.bytes_read,
            bytes_written=cost.bytes_written,
        )
        self._details(node, cost, op)
        if talks:
            self._collective(node, op, event, kernel)
        return node

    def _type(self, tensor: Tensor) -> int:
        row = self.types.get(tensor)
        if row is None:
            layout = self.graph.strings.add(tensor.layout)
            row = self.types[tensor] = self.graph.types.add(tensor.dtype, tensor.shape, encoding=layout)
        return row

    def _details(self, node: int, cost: Cost, op: int) -> None:
        if cost.rate_dtype >= 0:
            self.graph.set(node, rate_dtype=cost.rate_dtype)
        if not isnan(cost.flops) and cost.useful_flops != cost.flops:
            self.graph.set(node, useful_flops=cost.useful_flops)
        if op >= 0:
            self.graph.set(node, framework_row=self.graph.strings.add(self._path(op)))
        for row in cost.contractions:
            if max(row.batch, row.m, row.n, row.k) > _LARGEST_INT64:
                continue
            self.graph.add_contraction(
                node, batch=row.batch, m=row.m, n=row.n, k=row.k, flops=row.flops,
                useful_flops=row.useful_flops, lhs=row.lhs, rhs=row.rhs, accumulator=row.accumulator,
                products=row.products,
            )  # fmt: skip

    def _around(self, op: int) -> list[str]:
        """Names of an operation and those around it, innermost first."""
        names: list[str] = []
        while op >= 0 and len(names) < _LONGEST_PATH:
            names.append(self.text(int(self.host.name_row[op])))
            op = int(self.host.parent[op])
        return names

    def _path(self, op: int) -> str:
        return "/".join(name[:_LONGEST_NAME] for name in reversed(self._around(op)))

    def _priced(self, source: _Source, kernel: str) -> AtenCost:
        op, event = source.op, source.event
        moved = float(self.profile.bytes_moved[event])
        match source.role:
            case Role.COMMUNICATION:
                return AtenCost(Cost(OpClass.COLLECTIVE, nan, nan, nan, nan, nan))
            case Role.HOST_COPY:
                return self._host_copy(op, event, moved, kernel)
            case Role.DEVICE_COPY:
                return AtenCost(Cost(OpClass.MOVE, bytes_read=moved, bytes_written=moved))
            case Role.FILL:
                return AtenCost(Cost(OpClass.GENERATE, bytes_written=moved))
            case Role.WORK if source.answers:
                return self._operation(op, event)
            case Role.WORK:
                return AtenCost(Cost(OpClass.UNKNOWN, nan, nan, nan, nan, nan))

    def _host_copy(self, op: int, event: int, moved: float, kernel: str) -> AtenCost:
        """Over the link to the host: the device side alone touches device memory."""
        around = self._operation(op, event) if op >= 0 else AtenCost(Cost(OpClass.UNKNOWN))
        if isnan(moved) and len(around.operands) == 1:
            moved = around.operands[0].bytes
        to_device = "HtoD" in kernel or "HostToDevice" in kernel
        read, written = (0.0, moved) if to_device else (moved, 0.0)
        cost = Cost(OpClass.HOST, bytes_read=read, bytes_written=written)
        return AtenCost(cost, around.operands, around.results)

    def _operation(self, op: int, event: int) -> AtenCost:
        """The cost of a host operation by the table."""
        host = self.host
        columns = (host.name_row, host.shapes_row, host.dtype_row, host.strides_row, host.values_row)
        name, shapes, types, strides, values = (int(column[op]) for column in columns)
        hint = self.hint(int(self.profile.kernel_row[event]))
        key = (name, shapes, types, strides, values, hint)
        found = self.costs.get(key)
        if found is None:
            found = self.costs[key] = aten_cost(
                self.text(name), self.text(shapes), self.text(types), strides=self.text(strides),
                values=self.text(values), hint=hint,
            )  # fmt: skip
        return found

    def _group(self, ranks_row: int) -> int:
        """The group set of a list of ranks written as JSON; -1 unknown."""
        try:
            ranks = msgspec.json.decode(self.text(ranks_row), type=list[int]) if ranks_row else []
        except msgspec.DecodeError:
            ranks = []
        if not ranks or min(ranks) < 0 or max(ranks) >= 1 << 31 or len(set(ranks)) != len(ranks):
            return -1
        return self.graph.group_set(compress_groups(np.array([ranks], np.int64)))

    def _collective(self, node: int, op: int, event: int, kernel: str) -> None:
        row = self.comms.get(event)
        comms = self.profile.comms
        names = ([] if row is None else [self.text(int(comms.kind_row[row]))]) + self._around(op)
        kind = collective_kind([name for name in names if name != "record_param_comms"])
        if kind is CollectiveKind.UNKNOWN:
            kind = collective_kind([kernel])
        sent = nan if row is None else float(comms.operand_bytes[row])
        self.graph.add_collective(
            node, kind, group_set=-1 if row is None else self._group(int(comms.ranks_row[row])),
            comm_bytes=sent, operand_bytes=sent,
            result_bytes=nan if row is None else float(comms.result_bytes[row]),
        )  # fmt: skip


def _report(profile: Profile, groups: EventGroups, found: CostedOps, diagnostics: Diagnostics) -> None:
    """Say what has no cost, by operation, count and time; and where events of one operation overlap."""
    total_ns = float(found.busy_ns.sum())
    graph, where = found.graph, profile.name
    talks = groups.role == Role.COMMUNICATION
    unlinked = (found.host_op < 0) & ~found.costed & ~talks
    rest = ~found.costed & ~unlinked & ~talks
    rows, place = np.unique(graph.op_row, return_inverse=True)
    rules = np.array([find_aten_rule(graph.strings[int(row)]) is not None for row in rows], np.bool_)
    in_table = rules[place] if len(rows) else np.zeros(0, np.bool_)
    described = np.append(profile.host.shapes_row != 0, False)[found.host_op]  # -1: no operation
    lacking = rest & in_table & (groups.answers | ~described)
    for mask, code, told in (
        (unlinked, "measured-ops.unlinked", "device events of no host operation have no cost"),
        (rest & ~lacking, "measured-ops.unknown-op", "no row in the cost table"),
        (lacking, "measured-ops.inputs-not-recorded", NOT_RECORDED),
        (talks, "measured-ops.communication", "communication: its time is the network's"),
    ):
        time_ns = float(found.busy_ns[mask].sum())
        share = time_ns / total_ns if total_ns else 0.0
        message = f"{told}: {share:.1%} of the device time{_names(graph, found.busy_ns, mask)}"
        if code == "measured-ops.communication":
            diagnostics.info(code, where, message, count=int(mask.sum()))
        else:
            diagnostics.warning(code, where, message, count=int(mask.sum()))
    diagnostics.warning(
        "measured-ops.negative-duration",
        where,
        "device events end before they start and are left out of the time of their operations",
        count=int((profile.duration_ns < 0).sum()),
    )
    overlap_ns = groups.busy_ns - groups.duration_ns
    overlapping = overlap_ns > 0
    diagnostics.info(
        "measured-ops.overlap",
        where,
        f"events of one operation overlap, by {overlap_ns[overlapping].sum():,.0f} ns in all",
        count=int(overlapping.sum()),
    )


def _names(graph: OpGraph, busy_ns: FloatArray, mask: BoolArray) -> str:
    """The operations with most time among some nodes: ``; name 3 x 12 ns, ...``."""
    rows = graph.op_row[mask]
    if not len(rows):
        return ""
    kinds, place = np.unique(rows, return_inverse=True)
    time = np.bincount(place, busy_ns[mask])
    count = np.bincount(place)
    top = np.argsort(-time, kind="stable")[:_MOST_NAMED].tolist()
    # A name of another line would read as a message of its own.
    names = [graph.strings[int(kinds[at])][:80].replace("\n", "\\n") for at in top]
    named = [f"{name} {count[at]:,} x, {time[at]:,.0f} ns" for at, name in zip(top, names, strict=True)]
    return "; " + ", ".join(named)
