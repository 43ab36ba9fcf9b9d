"""Op graph of a profile's device work, with costs by the table of PyTorch's operations."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isnan, nan
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas.converters.linking import nearest
from hespas.converters.measured_ops.device_events import (
    EventGroups,
    EventRole,
    bounds_of,
    bounds_text,
    event_roles,
    group_events,
    is_to_device,
)
from hespas.converters.measured_ops.instructions import names_instruction, with_instruction_costs
from hespas.costs.aten import FORWARD, PARTS, CallTexts, aten_cost, find_aten_rule
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
from hespas.graph.columns import BoolArray, FloatArray, SmallIntArray, at_rows, equal_rows, mapped
from hespas.graph.passes import take_nodes

__all__ = [
    "ASSUMED_LAYOUT",
    "NOT_RECORDED",
    "CostedOps",
    "costed_ops",
    "kind_of_communication",
    "stated_group",
]

NOT_RECORDED = (
    "the trace does not record the inputs that determine the cost (record with record_shapes=True of "
    "PyTorch's profiler)"
)
"""Message about operations that the cost table has but whose inputs are unknown."""
ASSUMED_LAYOUT = (
    "the memory order of images is unknown: convolutions are assumed to read and write PyTorch's default "
    "order (NCHW)"
)
"""Message about convolutions of images without known strides."""

_KIND_WORDS: tuple[tuple[str, CollectiveKind], ...] = (
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
"""Words in a name without separators, searched in this order."""

_LIBRARY, _BOUNDS = "kernel_library", "work_bounds"
"""Keys of texts in :class:`~hespas.graph.opgraph.ExtraTable` on nodes of which only the kernel is known."""
_MAX_PATH = 8
_MAX_NAME = 200
_MAX_NAMED = 10
_ELEMENT_IN_KERNEL = re.compile(
    r"<(?:[^<>]*[ ,(])?(float|double|c10::BFloat16|c10::Half|long|int|bool|unsigned char|signed char)[,>]"
)
_OPAQUE = re.compile(r"OpaqueType<(\d+)u?>")
_BY_WIDTH = {"1": "i8", "2": "bf16", "4": "f32", "8": "i64", "16": "complex<f64>"}


def kind_of_communication(names: Iterable[str], kernel: str) -> CollectiveKind:
    """Return the kind of a communication from the first name that states a kind.

    The names of the operations around the communication (``c10d::alltoall_base_``) come first, then the name
    of its kernel.
    """
    stated = [name for name in names if name != "record_param_comms"]
    for name in (*stated, kernel_facts(kernel).family, kernel):
        plain = name.lower().replace("_", "").replace("-", "")
        for word, kind in _KIND_WORDS:
            if word in plain:
                return kind
    return CollectiveKind.UNKNOWN


def stated_group(text: str) -> GroupSet | None:
    """Return the group set of a JSON list of ranks, None if the text is not such a list."""
    try:
        ranks = msgspec.json.decode(text, type=list[int]) if text else []
    except (msgspec.DecodeError, RecursionError):
        ranks = []
    if not ranks or min(ranks) < 0 or max(ranks) >= 1 << 31 or len(set(ranks)) != len(ranks):
        return None
    return compress_groups(np.array([ranks], np.int64))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CostedOps:
    """Device work as a graph, with the relation between its nodes and the profile's events.

    ``node`` is the node of each event, shape ``(events,)``. The next three have one entry per node.
    ``host_op`` is the row of the profile's host operation that covers the node (-1: none). ``busy_ns`` is the
    sum over the events of the node. All sums add up to the device time of the profile (except for events that
    end before they start). ``costed`` is True if FLOPs and bytes are both known. The graph's ``duration_ns``
    is the time during which any event of a node ran, which is less than ``busy_ns`` if events overlap.
    ``groups`` has further columns per node.
    """

    graph: OpGraph
    groups: EventGroups
    node: SmallIntArray
    host_op: NDArray[np.int64]
    busy_ns: FloatArray
    costed: BoolArray

    @property
    def coverage(self) -> float:
        """Share of the device time whose operation has a known cost, 0..1; 1 without device time."""
        total = float(self.busy_ns.sum())
        return float(self.busy_ns[self.costed].sum()) / total if total else 1.0


def costed_ops(profile: Profile, diagnostics: Diagnostics | None = None) -> CostedOps:
    """Return a graph with one node for each operation that ran on the device, in order of start.

    Nodes have the measured ``duration_ns`` and a stream, whose order is stated by control dependencies.
    Operands, results, FLOPs, bytes and contractions come from the cost table; unknown figures are NaN. Every
    event belongs to exactly one node, so the graph has the device time of the profile; an event that ends
    before it starts adds nothing. Diagnostics report work without a cost.
    """
    groups = group_events(profile)
    builder = _CostedGraphBuilder(profile, groups)
    graph = builder.build()
    work = event_roles(profile) == EventRole.WORK
    all_diagnostics = diagnostics if diagnostics is not None else Diagnostics()
    graph = with_instruction_costs(profile, graph, groups.node.astype(np.int64), work, all_diagnostics)
    with np.errstate(invalid="ignore"):
        costed = ~np.isnan(graph.flops + graph.bytes_read + graph.bytes_written)
    result = CostedOps(
        graph=graph,
        groups=groups,
        node=groups.node,
        host_op=groups.host_op,
        busy_ns=groups.busy_ns,
        costed=costed,
    )
    if diagnostics is not None:
        findings = diagnostics.about(profile.name, "measured-ops")
        total_ns = float(result.busy_ns.sum())
        graph, groups = result.graph, result.groups
        is_communication = groups.role == EventRole.COMMUNICATION
        unlinked = (result.host_op < 0) & ~result.costed & ~is_communication
        rest = ~result.costed & ~unlinked & ~is_communication
        in_table = mapped(graph.op_id, lambda row: find_aten_rule(graph.strings[row]) is not None, np.bool_)
        has_shapes = np.append(profile.host.shapes_id != 0, False)[result.host_op]  # -1: no operation
        no_strides = has_shapes & np.append(profile.host.strides_id == 0, False)[result.host_op]
        not_recorded = rest & in_table & (groups.answers | ~has_shapes)
        update = (
            "generated kernels are assumed to update their first tensor, because their names need its "
            "operands"
        )
        for mask, code, reason in (
            (unlinked, "unlinked", "device events without a host operation have no cost"),
            (rest & ~not_recorded, "unknown-op", "operations without a row in the cost table"),
            (not_recorded, "inputs-not-recorded", NOT_RECORDED),
            (is_communication, "communication", "communication takes network time and has no cost"),
            (builder.guessed, "guessed-update", update),
            ((graph.op_class == int(OpClass.CONVOLUTION)) & no_strides, "assumed-layout", ASSUMED_LAYOUT),
        ):
            time_ns = float(result.busy_ns[mask].sum())
            share = time_ns / total_ns if total_ns else 0.0
            names, index = np.unique(graph.op_id[mask], return_inverse=True)
            time, count = np.bincount(index, result.busy_ns[mask]), np.bincount(index)
            listed = [
                f"{graph.strings[int(names[row])][:80]} {count[row]:,} x, {time[row]:,.0f} ns"
                for row in np.argsort(-time, kind="stable")[:_MAX_NAMED].tolist()
            ]
            # A name with a line break would look like another message.
            operations = "; ".join(["", ", ".join(listed)] if listed else []).replace("\n", "\\n")
            is_warning = code in {"unlinked", "unknown-op", "inputs-not-recorded"}
            report = findings.warning if is_warning else findings.info
            report(code, f"{reason}: {share:.1%} of the device time{operations}", int(mask.sum()))
        message = "device events that end before they start add no time to their operations"
        findings.warning("negative-duration", message, int((profile.duration_ns < 0).sum()))
        overlap_ns = groups.busy_ns - groups.duration_ns
        overlapping = overlap_ns > 0
        message = f"operations have overlapping events, by {overlap_ns[overlapping].sum():,.0f} ns in total"
        findings.info("overlap", message, int(overlapping.sum()))
    return result


@dataclass(frozen=True, slots=True)
class _NodeSource:
    """Origin of one node of the graph. ``op`` is its host operation and ``event`` its longest event (-1:
    none). ``answers`` is True if the cost of that operation covers the node.
    """

    role: EventRole
    op: int
    answers: bool
    event: int


class _CostedGraphBuilder:
    """Builder of a graph from measured operations. The cost of each distinct operation is computed once and
    used for all nodes of that operation.
    """

    def __init__(self, profile: Profile, groups: EventGroups) -> None:
        self.profile, self.groups, self.host = profile, groups, profile.host
        self.graph = GraphBuilder(profile.name)
        self.texts: dict[int, str] = {}
        self.comm_of_event = np.full(len(profile), -1, np.int64)
        self.comm_of_event[profile.comms.event] = np.arange(len(profile.comms))
        # Inner operations that cost rules of other operations read, by operation.
        self.parts: dict[int, list[int]] = {}
        host, strings = profile.host, profile.strings
        has_parts = mapped(host.name_id, lambda row: strings[row] in PARTS, np.bool_)
        if has_parts.any():
            names = frozenset[str]().union(*PARTS.values())
            parts = np.flatnonzero(mapped(host.name_id, lambda row: strings[row] in names, np.bool_))
            parents = host.parent.astype(np.int64)
            owners: list[int] = nearest(has_parts, parents, parents[parts]).tolist()
            for part, owner in zip(parts.tolist(), owners, strict=True):
                if owner >= 0:
                    self.parts.setdefault(owner, []).append(part)
        # The forward call of each backward operation whose rule reads it: the last call before it with the
        # same sequence number. Older profilers do not record the numbers of forward calls. Then it is a call
        # with an input of the shape that the first operation inside the backward operation has.
        backward = mapped(host.name_id, lambda row: strings[row] in FORWARD, np.bool_)
        if backward.any():
            parents = host.parent.astype(np.int64)
            rows = np.flatnonzero(~backward & (host.shapes_id != 0))
            rows = rows[np.argsort(host.start_ns[rows], kind="stable")]
            around = nearest(backward, parents, parents[rows])
            inside = around >= 0
            outer, places = np.unique(around[inside], return_index=True)
            first_inside = dict(zip(outer.tolist(), rows[inside][places].tolist(), strict=True))
            forward = {
                name: rows[host.name_id[rows] == strings.find(FORWARD[strings[name]])]
                for name in np.unique(host.name_id[backward]).tolist()
            }
            for row in np.flatnonzero(backward).tolist():
                calls = forward[int(host.name_id[row])]
                calls = calls[: np.searchsorted(host.start_ns[calls], host.start_ns[row])]
                same = calls[(host.sequence[calls] == host.sequence[row]) & (host.sequence[calls] >= 0)]
                if not len(same) and row in first_inside:
                    shape = self.text(int(host.shapes_id[first_inside[row]])).partition("]")[0].lstrip("[")
                    inputs = [self.text(at) for at in host.shapes_id[calls].tolist()]
                    agrees = np.array([bool(shape) and f"[{shape}]" in text for text in inputs], np.bool_)
                    same = calls[agrees]
                if len(same):
                    self.parts[row] = [int(same[-1])]
        self.instruction = names_instruction(profile)
        self.hints: dict[int, DType | None] = {}
        stated = profile.stated  # FLOPs and bytes that the profile states of host operations
        self.stated_flops, self.stated_bytes = np.full((2, len(profile.host)), nan)
        self.stated_flops[stated.op], self.stated_bytes[stated.op] = stated.flops, stated.bytes_moved
        self.guesses: set[int] = set()
        self.guessed = np.zeros(0, np.bool_)

    def text(self, row: int) -> str:
        """Return the text of a string row of the profile, from a cache."""
        if row not in self.texts:
            self.texts[row] = self.profile.strings[row]
        return self.texts[row]

    def hint(self, kernel_id: int) -> DType | None:
        """Return the element type that the name of a kernel states, None if it states none.

        Costs of lists of tensors need this type, because a trace does not record their element types.
        ``OpaqueType<2u>`` states only the width; a usual type of that width is returned.
        """
        if kernel_id not in self.hints:
            kernel = self.text(kernel_id)
            opaque, element = _OPAQUE.search(kernel), _ELEMENT_IN_KERNEL.search(kernel)
            name = _BY_WIDTH.get(opaque[1], "") if opaque else element[1] if element else ""
            self.hints[kernel_id] = find_dtype(name)
        return self.hints[kernel_id]

    def build(self) -> OpGraph:
        """Return all nodes. O(nodes log nodes); the cost table is evaluated once for each distinct node."""
        profile, groups = self.profile, self.groups
        example, index = equal_rows(*self._columns())
        order = np.argsort(example, kind="stable")
        number = np.empty(len(example), np.int64)
        number[order] = np.arange(len(example))
        for row in example[order].tolist():
            role, op, answers = (
                EventRole(int(groups.role[row])),
                int(groups.host_op[row]),
                groups.answers[row],
            )
            self._add(_NodeSource(role, op, bool(answers), int(groups.longest[row])))
        count = len(index)
        self.guessed = np.isin(number[index], list(self.guesses))
        event = groups.longest
        _, queue = equal_rows(profile.rank[event], profile.device_index[event], groups.stream)
        order = np.argsort(queue, kind="stable")
        after = np.flatnonzero(queue[order][1:] == queue[order][:-1]) + 1
        in_order = RaggedArray.from_pairs(order[after], order[after - 1], count)
        graph = take_nodes(self.graph.build(), number[index], RaggedArray.empty(count), in_order)
        fits = (groups.stream >= -1) & (groups.stream < 1 << 31)
        return replace(
            graph,
            id=np.arange(count, dtype=np.uint64),
            duration_ns=groups.duration_ns,
            stream=np.where(fits, groups.stream, -1).astype(np.int32),
        )

    def _columns(self) -> list[NDArray[Any]]:
        """Return the columns that determine the cost of a node, each of shape ``(nodes,)``."""
        profile, host, groups = self.profile, self.host, self.groups
        op, event = groups.host_op, groups.longest
        comm = self.comm_of_event[event]
        has_parts = np.isin(op, np.fromiter(self.parts, np.int64))
        path: list[NDArray[Any]] = []
        outer = op
        for _ in range(_MAX_PATH):
            path.append(at_rows(host.name_id, outer, -1))
            outer = at_rows(host.parent, outer, -1).astype(np.int64)
        inputs = (host.shapes_id, host.dtype_id, host.strides_id, host.values_id)
        comm_rows = (profile.comms.kind_id, profile.comms.ranks_id)
        comm_bytes = (profile.comms.operand_bytes, profile.comms.result_bytes)
        return [
            groups.role,
            groups.answers,
            np.where(has_parts, op, -1),
            *path,
            *(at_rows(column, op, -1) for column in inputs),
            *(at_rows(column, op, nan) for column in (self.stated_flops, self.stated_bytes)),
            *(column[event] for column in (profile.kernel_id, profile.batch_id, profile.grid_id)),
            np.where(names_instruction(profile), profile.op_id, 0)[event],
            profile.bytes_moved[event],
            *(at_rows(column, comm, -1) for column in comm_rows),
            *(at_rows(column, comm, nan) for column in comm_bytes),
        ]

    def _add(self, source: _NodeSource) -> None:
        op, event = source.op, source.event
        kernel = self.text(int(self.profile.kernel_id[event]))
        own = self.profile.op_id[event] if self.instruction[event] else self.profile.kernel_id[event]
        path: list[str] = []  # names of the operation and the enclosing ones, innermost first
        outer = op
        while outer >= 0 and len(path) < _MAX_PATH:
            path.append(self.text(int(self.host.name_id[outer])))
            outer = int(self.host.parent[outer])
        cost = self._cost(source, kernel)
        is_communication = source.role is EventRole.COMMUNICATION
        node = add_costed(
            self.graph,
            kernel,
            cost.cost,
            operands=cost.operands,
            results=cost.results,
            op=path[0] if path else self.text(int(own)),
            kind=NodeKind.COLLECTIVE if is_communication else NodeKind.COMPUTE,
        )
        if cost.guessed:
            self.guesses.add(node)
        if path:
            framework_path = "/".join(name[:_MAX_NAME] for name in reversed(path))
            self.graph.set(node, framework_id=self.graph.strings.add(framework_path))
        if is_communication:
            row, comms = int(self.comm_of_event[event]), self.profile.comms
            names = path if row < 0 else [self.text(int(comms.kind_id[row])), *path]
            group = None if row < 0 else stated_group(self.text(int(comms.ranks_id[row])))
            sent = nan if row < 0 else float(comms.operand_bytes[row])
            self.graph.add_collective(
                node,
                kind_of_communication(names, kernel),
                group_set=-1 if group is None else self.graph.group_set(group),
                comm_bytes=sent,
                operand_bytes=sent,
                result_bytes=nan if row < 0 else float(comms.result_bytes[row]),
            )
        elif op < 0 and source.role is EventRole.WORK:  # the name states the library and bounds of the work
            facts = kernel_facts(kernel)
            bounds = bounds_of(facts, self.text(int(self.profile.grid_id[event])))
            extra = {_LIBRARY: facts.library, _BOUNDS: bounds_text(bounds) if bounds.known else ""}
            for key, text in extra.items():
                if text:
                    self.graph.add_extra(node, key, 0, text.encode())

    def _cost(self, source: _NodeSource, kernel: str) -> AtenCost:
        op, event = source.op, source.event
        moved = float(self.profile.bytes_moved[event])
        match source.role:
            case EventRole.COMMUNICATION:
                return AtenCost(Cost(OpClass.COLLECTIVE, nan, nan, nan, nan, nan))
            case EventRole.HOST_COPY:  # only the device side touches device memory
                around = self._operation_cost(op, event) if op >= 0 else AtenCost(Cost(OpClass.UNKNOWN))
                if isnan(moved) and len(around.operands) == 1:
                    moved = around.operands[0].bytes
                read, written = (0.0, moved) if is_to_device(kernel) else (moved, 0.0)
                cost = Cost(OpClass.HOST, bytes_read=read, bytes_written=written)
                return AtenCost(cost, around.operands, around.results)
            case EventRole.DEVICE_COPY:
                return AtenCost(Cost(OpClass.MOVE, bytes_read=moved, bytes_written=moved))
            case EventRole.FILL:
                return AtenCost(Cost(OpClass.GENERATE, bytes_written=moved))
            case EventRole.WORK if source.answers:
                return self._operation_cost(op, event)
            case EventRole.WORK:  # the name of a kernel states class and element type, but not the amount
                facts = kernel_facts(kernel)
                dtype = find_dtype(facts.dtype)
                rate_dtype = -1 if dtype is None else dtype.code
                return AtenCost(Cost(facts.op_class, nan, nan, nan, nan, nan, rate_dtype))

    def _operation_cost(self, op: int, event: int) -> AtenCost:
        """Return the cost of host operation ``op`` from the cost table.

        FLOPs that the compiler states replace the number of the table, except FLOPs of a matmul. Bytes that
        the compiler states are divided into the written bytes of the table and read bytes. If the written
        bytes are unknown or more than stated, half of the stated bytes count as written.
        """
        name, shapes, types, strides, values = self._call_texts(op)
        parts = [CallTexts(*self._call_texts(part)) for part in self.parts.get(op, ())]
        hint = self.hint(int(self.profile.kernel_id[event]))
        step = self.text(int(self.profile.batch_id[event]))
        inputs = {"strides": strides, "values": values, "step": step}
        result = aten_cost(name, shapes, types, **inputs, hint=hint, parts=parts)
        flops, moved = float(self.stated_flops[op]), float(self.stated_bytes[op])
        cost = result.cost
        if not isnan(flops) and not cost.contractions:
            transcendentals = 0.0 if isnan(cost.transcendentals) else cost.transcendentals
            cost = replace(cost, flops=flops, useful_flops=flops, transcendentals=transcendentals)
        if isnan(moved):
            return result._replace(cost=cost)
        written = cost.bytes_written if cost.bytes_written <= moved else moved / 2
        cost = replace(cost, bytes_read=moved - written, bytes_written=written)
        return result._replace(cost=cost, guessed=False)

    def _call_texts(self, op: int) -> tuple[str, str, str, str, str]:
        """Return the name, shapes, types, strides and values of a host operation as texts."""
        host = self.host
        return (
            self.text(int(host.name_id[op])),
            self.text(int(host.shapes_id[op])),
            self.text(int(host.dtype_id[op])),
            self.text(int(host.strides_id[op])),
            self.text(int(host.values_id[op])),
        )
