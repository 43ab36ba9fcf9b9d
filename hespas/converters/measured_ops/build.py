"""The op graph of a profile's device work, with costs by the table of PyTorch's operations."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isnan, nan
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas.converters.linking import nearest
from hespas.converters.measured_ops.bounds import bounds_of, bounds_text
from hespas.converters.measured_ops.instructions import names_instruction, with_instruction_costs
from hespas.converters.measured_ops.owners import owners_of
from hespas.converters.measured_ops.roles import Role, event_roles, is_to_device
from hespas.costs.aten import PARTS, CallTexts, aten_cost, find_aten_rule
from hespas.costs.aten.call import AtenCost
from hespas.costs.kernels import kernel_facts
from hespas.costs.operation import Cost, add_costed
from hespas.graph import (
    CollectiveKind,
    Diagnostics,
    DType,
    GraphBuilder,
    GroupSet,
    NodeKind,
    OpClass,
    OpGraph,
    Profile,
    RaggedArray,
    compress_groups,
    find_dtype,
)
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray, at_rows, equal_rows, mapped
from hespas.graph.passes import take_nodes

__all__ = [
    "NOT_RECORDED",
    "CostedOps",
    "Role",
    "collective_kind",
    "communication_kind",
    "costed_ops",
    "event_roles",
    "stated_group",
]

# --- Device events sorted into nodes: one for each operation that answers, and what stands apart from it.
#
# Apart stand copies between host and device (another link), and communication kernels; events that nothing
# explains are nodes of their own.

_KINDS: tuple[tuple[str, CollectiveKind], ...] = (
    ("allreduce", CollectiveKind.ALL_REDUCE),
    ("allgather", CollectiveKind.ALL_GATHER),
    ("reducescatter", CollectiveKind.REDUCE_SCATTER),
    ("alltoall", CollectiveKind.ALL_TO_ALL),
    ("broadcast", CollectiveKind.BROADCAST),
    ("barrier", CollectiveKind.BARRIER),
    ("gather", CollectiveKind.GATHER),
    ("scatter", CollectiveKind.SCATTER),
    ("reduce", CollectiveKind.REDUCE),
)
"""Found in a name without separators, in this order."""


def collective_kind(names: Iterable[str]) -> CollectiveKind:
    """The kind that the first telling name states, such as ``c10d::alltoall_base_``."""
    for name in names:
        plain = name.lower().replace("_", "").replace("-", "")
        for part, kind in _KINDS:
            if part in plain:
                return kind
    return CollectiveKind.UNKNOWN


def communication_kind(names: Iterable[str], kernel: str) -> CollectiveKind:
    """The kind of a communication: as stated, by the operations around it, or by the name of its kernel."""
    stated = [name for name in names if name != "record_param_comms"]
    return collective_kind([*stated, kernel_facts(kernel).family, kernel])


def stated_group(text: str) -> GroupSet | None:
    """The group set of a list of ranks written as JSON; None where it is not one."""
    try:
        ranks = msgspec.json.decode(text, type=list[int]) if text else []
    except (msgspec.DecodeError, RecursionError):
        ranks = []
    if not ranks or min(ranks) < 0 or max(ranks) >= 1 << 31 or len(set(ranks)) != len(ranks):
        return None
    return compress_groups(np.array([ranks], np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class _EventGroups:
    """``node`` of each event, nodes numbered by their first start; per node its ``role``, its host operation
    (-1 none) and whether that answers for it, its longest event, its time.

    ``busy_ns`` is the sum over the node's events, ``duration_ns`` the time during which any of them ran; an
    event that ends before it starts counts as none.
    """

    node: SmallIntArray
    role: NDArray[np.uint8]
    host_op: IntArray
    answers: BoolArray
    longest: IntArray
    stream: IntArray
    busy_ns: FloatArray
    duration_ns: FloatArray


def _group_events(profile: Profile) -> _EventGroups:
    """Sort the events into nodes. O(events log events)."""
    count = len(profile)
    role = event_roles(profile)
    launched_by = profile.host_event.astype(np.int64)
    owners = owners_of(profile.host, profile.strings, launched_by)
    apart = role == Role.HOST_COPY
    # A copy to or from the host belongs to the operation that copies, not to all that happens around it.
    owner = np.where(apart, launched_by, owners.op)
    replayed = ~owners.answers & ~apart & _of_one_launch(profile)
    owner[replayed | names_instruction(profile)] = -1
    alone = (owner < 0) | (role == Role.COMMUNICATION)
    inside = (role == Role.DEVICE_COPY) | (role == Role.FILL)
    kept = np.where(inside & ~alone & owners.answers, Role.WORK, role).astype(np.uint8)
    # An operation without a rule is as many nodes as its kernels have classes.
    part = np.where(owners.answers | apart, kept, len(Role) + _kernel_classes(profile))
    parts = len(Role) + len(OpClass)
    # One number per node: of the operation and its part, or of the event itself.
    number = np.where(alone, -1 - np.arange(count, dtype=np.int64), owner * parts + part)
    _, first_seen, group = np.unique(number, return_index=True, return_inverse=True)
    groups = len(first_seen)
    starts = np.full(groups, np.inf)
    np.fmin.at(starts, group, profile.start_ns)  # an unknown start says nothing
    order = np.lexsort((first_seen, starts))
    rank = np.empty(groups, np.int64)
    rank[order] = np.arange(groups)
    node = rank[group]
    by_node = first_seen[order]
    return _timed_groups(profile, node, kept[by_node], owner[by_node], owners.answers[by_node])


def _kernel_classes(profile: Profile) -> NDArray[np.uint8]:
    """The class that the name of each event's kernel states."""
    strings = profile.strings
    return mapped(profile.kernel_row, lambda row: kernel_facts(strings[row]).op_class, np.uint8)


def _of_one_launch(profile: Profile) -> BoolArray:
    """Mark events that were launched together, as those of a replayed graph are."""
    known = np.isfinite(profile.launch_start_ns)
    rows = np.flatnonzero(known)
    _, launch = equal_rows(profile.launch_start_ns[rows], profile.launch_thread_row[rows], profile.rank[rows])
    found = np.zeros(len(profile), np.bool_)
    found[rows] = np.bincount(launch)[launch] > 1 if len(rows) else False
    return found


def _timed_groups(
    profile: Profile, node: IntArray, role: NDArray[np.uint8], host_op: IntArray, answers: BoolArray
) -> _EventGroups:
    count = len(role)
    ran_ns = np.maximum(profile.duration_ns, 0.0)
    busy = np.bincount(node, ran_ns, count).astype(np.float64)
    by_length = np.lexsort((profile.duration_ns, node))
    last = np.flatnonzero(np.append(np.diff(node[by_length]) > 0, True)) if count else np.empty(0, np.int64)
    longest = by_length[last]
    order = np.lexsort((profile.start_ns, node))
    sizes = np.bincount(node, minlength=count)
    duration = busy.copy()
    offsets = np.append(0, np.cumsum(sizes))
    for at in np.flatnonzero(sizes > 1).tolist():
        rows = order[offsets[at] : offsets[at + 1]]
        duration[at] = _running_ns(profile.start_ns[rows], ran_ns[rows], float(busy[at]))
    return _EventGroups(
        node=node.astype(np.int32),
        role=role,
        host_op=host_op,
        answers=answers,
        longest=longest,
        stream=profile.stream[longest] if count else np.empty(0, np.int64),
        busy_ns=busy,
        duration_ns=duration,
    )


def _running_ns(start: FloatArray, duration: FloatArray, busy_ns: float) -> float:
    """Time during which any of some events, sorted by start, ran: their sum where none overlap, or where a
    start is not known.
    """
    if np.isnan(start).any():
        return busy_ns
    reached = np.maximum.accumulate(start + duration)
    before = np.append(-np.inf, reached[:-1])
    overlap = np.minimum(np.maximum(before - start, 0.0), duration)
    return busy_ns - float(overlap.sum())


NOT_RECORDED = (
    "the trace lacks what the cost depends on (PyTorch's profiler keeps shapes with record_shapes=True)"
)
"""What is said of operations that the cost table has."""

_LIBRARY, _BOUNDS = "kernel_library", "work_bounds"
"""Keys of texts beside nodes whose kernel alone is known."""
_LONGEST_PATH = 8
_LONGEST_NAME = 200
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
    groups: _EventGroups
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
    groups = _group_events(profile)
    builder = _Builder(profile, groups)
    graph = builder.build()
    work = event_roles(profile) == Role.WORK
    findings = diagnostics if diagnostics is not None else Diagnostics()
    graph = with_instruction_costs(profile, graph, groups.node.astype(np.int64), work, findings)
    with np.errstate(invalid="ignore"):
        costed = ~np.isnan(graph.flops + graph.bytes_read + graph.bytes_written)
    found = CostedOps(
        graph=graph,
        groups=groups,
        node=groups.node,
        host_op=groups.host_op,
        busy_ns=groups.busy_ns,
        costed=costed,
    )
    if diagnostics is not None:
        _report(profile, groups, found, diagnostics)
        _report_guesses(profile, found, builder.guessed, diagnostics)
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
    """Where a node comes from; see :class:`_EventGroups`."""

    role: Role
    op: int
    answers: bool
    event: int


def _by_name(kernel: str) -> AtenCost:
    """What the name of a kernel says where no operation answers for it: a class and an element type. How much
    it does is unknown; :func:`.kernel_bounds` tells what its launch allows.
    """
    facts = kernel_facts(kernel)
    element = find_dtype(facts.dtype)
    rate = -1 if element is None else element.code
    return AtenCost(Cost(facts.op_class, nan, nan, nan, nan, nan, rate))


def _parts_of(profile: Profile) -> dict[int, list[int]]:
    """The operations inside others that the rules of those read, in their order."""
    host, strings = profile.host, profile.strings
    asking = mapped(host.name_row, lambda row: strings[row] in PARTS, np.bool_)
    if not asking.any():
        return {}
    names = frozenset[str]().union(*PARTS.values())
    parts = np.flatnonzero(mapped(host.name_row, lambda row: strings[row] in names, np.bool_))
    parents = host.parent.astype(np.int64)
    found: dict[int, list[int]] = {}
    for part, owner in zip(parts.tolist(), nearest(asking, parents, parents[parts]).tolist(), strict=True):
        if owner >= 0:
            found.setdefault(owner, []).append(part)
    return found


class _Builder:
    """Makes one node of each operation that differs from those before it, and repeats it where it ran."""

    def __init__(self, profile: Profile, groups: _EventGroups) -> None:
        self.profile, self.groups, self.host = profile, groups, profile.host
        self.graph = GraphBuilder(profile.name)
        self.texts: dict[int, str] = {}
        self.comm_of_event = np.full(len(profile), -1, np.int64)
        self.comm_of_event[profile.comms.event] = np.arange(len(profile.comms))
        self.parts = _parts_of(profile)
        self.instruction = names_instruction(profile)
        self.hints: dict[int, DType | None] = {}
        self.stated = _stated_by_op(profile)
        self.guesses: set[int] = set()
        self.guessed = np.zeros(0, np.bool_)

    def text(self, row: int) -> str:
        """A string of the profile."""
        if row not in self.texts:
            self.texts[row] = self.profile.strings[row]
        return self.texts[row]

    def hint(self, kernel_row: int) -> DType | None:
        """The element type that a kernel's name states."""
        if kernel_row not in self.hints:
            self.hints[kernel_row] = _element_type(self.text(kernel_row))
        return self.hints[kernel_row]

    def build(self) -> OpGraph:
        """All nodes. O(nodes log nodes), and the cost table once for each that differs."""
        groups = self.groups
        first, place = equal_rows(*self._columns())
        seen = np.argsort(first, kind="stable")
        number = np.empty(len(first), np.int64)
        number[seen] = np.arange(len(first))
        for row in first[seen].tolist():
            self._add(
                _Source(
                    Role(int(groups.role[row])),
                    int(groups.host_op[row]),
                    bool(groups.answers[row]),
                    int(groups.longest[row]),
                )
            )
        count = len(place)
        self.guessed = np.isin(number[place], list(self.guesses))
        made = take_nodes(self.graph.build(), number[place], RaggedArray.empty(count), self._in_order())
        stated = (groups.stream >= -1) & (groups.stream < 1 << 31)
        return replace(
            made,
            id=np.arange(count, dtype=np.uint64),
            duration_ns=groups.duration_ns,
            stream=np.where(stated, groups.stream, -1).astype(np.int32),
        )

    def _columns(self) -> list[NDArray[Any]]:
        """What a node depends on; shape ``(nodes,)`` each."""
        profile, host, groups = self.profile, self.host, self.groups
        op, event = groups.host_op, groups.longest
        comm = self.comm_of_event[event]
        has_parts = np.isin(op, np.fromiter(self.parts, np.int64))
        around: list[NDArray[Any]] = []
        for _ in range(_LONGEST_PATH):
            around.append(at_rows(host.name_row, op, -1))
            op = at_rows(host.parent, op, -1).astype(np.int64)
        op = groups.host_op
        inputs = (host.shapes_row, host.dtype_row, host.strides_row, host.values_row)
        stated = (profile.comms.kind_row, profile.comms.ranks_row)
        moved = (profile.comms.operand_bytes, profile.comms.result_bytes)
        return [
            groups.role,
            groups.answers,
            np.where(has_parts, op, -1),
            *around,
            *(at_rows(column, op, -1) for column in inputs),
            *(at_rows(column, op, nan) for column in self.stated),
            *(column[event] for column in (profile.kernel_row, profile.batch_row, profile.grid_row)),
            np.where(names_instruction(profile), profile.op_row, 0)[event],
            profile.bytes_moved[event],
            *(at_rows(column, comm, -1) for column in stated),
            *(at_rows(column, comm, nan) for column in moved),
        ]

    def _in_order(self) -> RaggedArray:
        """Each node behind the one before it on its queue."""
        profile, groups = self.profile, self.groups
        event = groups.longest
        _, queue = equal_rows(profile.rank[event], profile.device_index[event], groups.stream)
        order = np.argsort(queue, kind="stable")
        behind = np.flatnonzero(queue[order][1:] == queue[order][:-1]) + 1
        return RaggedArray.from_pairs(order[behind], order[behind - 1], len(queue))

    def _add(self, source: _Source) -> None:
        op, event = source.op, source.event
        kernel = self.text(int(self.profile.kernel_row[event]))
        own = self.profile.op_row[event] if self.instruction[event] else self.profile.kernel_row[event]
        name = self.text(int(self.host.name_row[op] if op >= 0 else own))
        priced = self._priced(source, kernel)
        talks = source.role is Role.COMMUNICATION
        node = add_costed(
            self.graph,
            kernel,
            priced.cost,
            operands=priced.operands,
            results=priced.results,
            op=name,
            kind=NodeKind.COLLECTIVE if talks else NodeKind.COMPUTE,
        )
        if priced.guessed:
            self.guesses.add(node)
        if op >= 0:
            self.graph.set(node, framework_row=self.graph.strings.add(self._path(op)))
        if talks:
            self._collective(node, op, event, kernel)
        elif op < 0 and source.role is Role.WORK:
            self._say_what_is_known(node, event, kernel)

    def _say_what_is_known(self, node: int, event: int, kernel: str) -> None:
        """Keep what a name says beside the node: whose kernel it is, and the bounds of its work."""
        facts = kernel_facts(kernel)
        bounds = bounds_of(facts, self.text(int(self.profile.grid_row[event])))
        told = {_LIBRARY: facts.library, _BOUNDS: bounds_text(bounds) if bounds.known else ""}
        for key, text in told.items():
            if text:
                self.graph.add_extra(node, key, 0, text.encode())

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
                return _by_name(kernel)

    def _host_copy(self, op: int, event: int, moved: float, kernel: str) -> AtenCost:
        """Over the link to the host: the device side alone touches device memory."""
        around = self._operation(op, event) if op >= 0 else AtenCost(Cost(OpClass.UNKNOWN))
        if isnan(moved) and len(around.operands) == 1:
            moved = around.operands[0].bytes
        read, written = (0.0, moved) if is_to_device(kernel) else (moved, 0.0)
        cost = Cost(OpClass.HOST, bytes_read=read, bytes_written=written)
        return AtenCost(cost, around.operands, around.results)

    def _operation(self, op: int, event: int) -> AtenCost:
        """The cost of a host operation by the table."""
        rows = self._rows(op)
        inside = [self._rows(part) for part in self.parts.get(op, ())]
        hint = self.hint(int(self.profile.kernel_row[event]))
        step = int(self.profile.batch_row[event])
        name, shapes, types, strides, values = map(self.text, rows)
        parts = [CallTexts(*map(self.text, part)) for part in inside]
        inputs = {"strides": strides, "values": values, "step": self.text(step)}
        found = aten_cost(name, shapes, types, **inputs, hint=hint, parts=parts)
        return _as_stated(found, *(float(column[op]) for column in self.stated))

    def _rows(self, op: int) -> tuple[int, int, int, int, int]:
        """Rows of the texts that say what an operation was given."""
        host = self.host
        return (
            int(host.name_row[op]),
            int(host.shapes_row[op]),
            int(host.dtype_row[op]),
            int(host.strides_row[op]),
            int(host.values_row[op]),
        )

    def _group(self, ranks_row: int) -> int:
        """The group set of a list of ranks written as JSON; -1 unknown."""
        found = stated_group(self.text(ranks_row))
        return -1 if found is None else self.graph.group_set(found)

    def _collective(self, node: int, op: int, event: int, kernel: str) -> None:
        row = int(self.comm_of_event[event])
        comms = self.profile.comms
        names = ([] if row < 0 else [self.text(int(comms.kind_row[row]))]) + self._around(op)
        kind = communication_kind(names, kernel)
        sent = nan if row < 0 else float(comms.operand_bytes[row])
        self.graph.add_collective(
            node,
            kind,
            group_set=-1 if row < 0 else self._group(int(comms.ranks_row[row])),
            comm_bytes=sent,
            operand_bytes=sent,
            result_bytes=nan if row < 0 else float(comms.result_bytes[row]),
        )


def _stated_by_op(profile: Profile) -> tuple[FloatArray, FloatArray]:
    """Return FLOPs and bytes that the profile states of each operation of the host, NaN for none."""
    stated = profile.stated
    flops, moved = np.full((2, len(profile.host)), nan)
    flops[stated.op], moved[stated.op] = stated.flops, stated.bytes_moved
    return flops, moved


def _as_stated(found: AtenCost, flops: float, moved: float) -> AtenCost:
    """Return a cost with FLOPs and bytes as the compiler states them, but for FLOPs of a product of known
    extents. Bytes that are not known to be written are read.
    """
    cost = found.cost
    if not isnan(flops) and not cost.contractions:
        transcendentals = 0.0 if isnan(cost.transcendentals) else cost.transcendentals
        cost = replace(cost, flops=flops, useful_flops=flops, transcendentals=transcendentals)
    if isnan(moved):
        return found._replace(cost=cost)
    written = cost.bytes_written if cost.bytes_written <= moved else moved / 2
    return found._replace(
        cost=replace(cost, bytes_read=moved - written, bytes_written=written), guessed=False
    )


def _report_guesses(profile: Profile, found: CostedOps, guessed: BoolArray, diagnostics: Diagnostics) -> None:
    """Report costs that rest on a guess of the tensors that a generated kernel updates."""
    time_ns, total_ns = float(found.busy_ns[guessed].sum()), float(found.busy_ns.sum())
    share = time_ns / total_ns if total_ns else 0.0
    message = (
        "generated kernels are taken to update their first tensor, by the operands that their names need: "
        f"{share:.1%} of the device time{_names(found.graph, found.busy_ns, guessed)}"
    )
    findings = diagnostics.about(profile.name, "measured-ops")
    findings.info("guessed-update", message, int(guessed.sum()))


def _report(profile: Profile, groups: _EventGroups, found: CostedOps, diagnostics: Diagnostics) -> None:
    """Say what has no cost, by operation, count and time; and where events of one operation overlap."""
    total_ns = float(found.busy_ns.sum())
    graph, findings = found.graph, diagnostics.about(profile.name, "measured-ops")
    talks = groups.role == Role.COMMUNICATION
    unlinked = (found.host_op < 0) & ~found.costed & ~talks
    rest = ~found.costed & ~unlinked & ~talks
    in_table = mapped(graph.op_row, lambda row: find_aten_rule(graph.strings[row]) is not None, np.bool_)
    described = np.append(profile.host.shapes_row != 0, False)[found.host_op]  # -1: no operation
    lacking = rest & in_table & (groups.answers | ~described)
    for mask, code, reason in (
        (unlinked, "unlinked", "device events of no host operation have no cost"),
        (rest & ~lacking, "unknown-op", "no row in the cost table"),
        (lacking, "inputs-not-recorded", NOT_RECORDED),
        (talks, "communication", "communication: its time is the network's"),
    ):
        time_ns = float(found.busy_ns[mask].sum())
        share = time_ns / total_ns if total_ns else 0.0
        message = f"{reason}: {share:.1%} of the device time{_names(graph, found.busy_ns, mask)}"
        report = findings.info if mask is talks else findings.warning
        report(code, message, int(mask.sum()))
    message = "device events end before they start and are left out of the time of their operations"
    findings.warning("negative-duration", message, int((profile.duration_ns < 0).sum()))
    overlap_ns = groups.busy_ns - groups.duration_ns
    overlapping = overlap_ns > 0
    message = f"events of one operation overlap, by {overlap_ns[overlapping].sum():,.0f} ns in all"
    findings.info("overlap", message, int(overlapping.sum()))


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
