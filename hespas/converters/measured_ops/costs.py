"""Costs of operations on the device events they caused: each operation once, whatever it launched.

Kernels of an operation share its figures as they share its time, in whole FLOPs and bytes that add up to
those of the operation. A matrix product or convolution cannot be cut by time: all of it stands on the longest
kernel, and the others, which prepare or finish it, cost nothing of their own. Fills and copies beside kernels
are not what the operation is for: they cost what the profiler says they touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hespas.converters.linking import nearest
from hespas.converters.measured_ops.build import NOT_RECORDED, CostedOps, costed_ops
from hespas.converters.measured_ops.roles import Role, event_roles, is_to_device
from hespas.costs.aten import VIEWS, aten_cost, find_aten_rule, is_composite
from hespas.costs.aten.call import AtenCost
from hespas.costs.operation import Contraction
from hespas.graph import (
    ContractionTable,
    Diagnostics,
    Findings,
    HostOps,
    OpClass,
    Profile,
    RaggedArray,
    StringTable,
    TensorTypes,
    TensorTypesBuilder,
)
from hespas.graph.columns import (
    BoolArray,
    FloatArray,
    IntArray,
    at_rows,
    distinct_rows,
    mapped,
)

__all__ = [
    "EventCosts",
    "event_costs",
    "host_costs",
]

_FIGURES = ("flops", "useful_flops", "transcendentals", "bytes_read", "bytes_written")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EventCosts:
    """Columns of shape ``(events,)`` as those of :class:`hespas.graph.OpGraph`; NaN is unknown. Events are
    those of a device, or operations of the host that are the work themselves.

    ``contractions.node`` is the row of an event. Operands are on the first event of an operation, results on
    its last; ``types`` holds their types.
    """

    op_class: NDArray[np.uint8]
    flops: FloatArray
    useful_flops: FloatArray
    transcendentals: FloatArray
    bytes_read: FloatArray
    bytes_written: FloatArray
    rate_dtype: NDArray[np.int16]
    contractions: ContractionTable
    types: TensorTypes
    operands: RaggedArray
    results: RaggedArray

    def placed(self, rows: IntArray, nodes: IntArray, count: int) -> EventCosts:
        """What ``nodes`` of ``count`` cost, which are these ``rows``; nothing is known of the others."""
        place = np.full(count, -1, np.int64)
        place[nodes] = rows
        node_of = np.full(len(self.flops), -1, np.int32)
        node_of[rows] = nodes
        node = node_of[self.contractions.node]
        order = np.argsort(node, kind="stable")[int((node < 0).sum()) :]
        figures: dict[str, Any] = {name: at_rows(getattr(self, name), place, nan) for name in _FIGURES}
        return replace(
            self,
            op_class=at_rows(self.op_class, place, OpClass.UNKNOWN),
            rate_dtype=at_rows(self.rate_dtype, place, -1),
            contractions=self.contractions.take(order, node[order]),
            operands=self.operands.take(rows).moved(nodes, count),
            results=self.results.take(rows).moved(nodes, count),
            **figures,
        )

    def without(self, rows: BoolArray) -> EventCosts:
        """The same where some rows do nothing."""
        figures: dict[str, Any] = {name: np.where(rows, 0.0, getattr(self, name)) for name in _FIGURES}
        return replace(
            self,
            op_class=np.where(rows, np.uint8(OpClass.FREE), self.op_class),
            rate_dtype=np.where(rows, np.int16(-1), self.rate_dtype),
            contractions=self.contractions.take(~rows[self.contractions.node]),
            **figures,
        )


def event_costs(profile: Profile, diagnostics: Diagnostics) -> EventCosts:
    """The cost of each device event of a profile with host operations. O(events log events).

    Sums over the events of an operation are those of :func:`.costed_ops`, but for fills and copies beside its
    kernels, which come on top. Diagnostics say what has no cost, and how many operations share theirs.
    """
    found = costed_ops(profile, diagnostics)
    graph, node = found.graph, found.node
    roles = event_roles(profile)
    bears = _bearers(found, roles)
    whole = np.bincount(graph.contractions.node, minlength=len(graph)) > 0
    main = _longest(node, bears, profile.duration_ns, len(graph))
    share = _shares(node, bears, main, whole, profile.duration_ns)
    figures = {name: _split(getattr(graph, name), share, node, bears, main) for name in _FIGURES}
    stated = ((roles == Role.DEVICE_COPY) | (roles == Role.FILL)) & ~found.costed[node]
    for name in ("flops", "useful_flops", "transcendentals"):
        figures[name][stated] = 0.0
    _own_traffic(profile, roles, ~bears | stated | (roles == Role.HOST_COPY), figures)
    op_class = np.where(bears & ~stated, graph.op_class[node], _own_class(roles)).astype(np.uint8)
    op_class[roles == Role.COMMUNICATION] = int(OpClass.UNKNOWN)
    table = graph.contractions
    _report(profile, found, bears, whole, diagnostics)
    return EventCosts(
        op_class=op_class,
        rate_dtype=np.where(bears, graph.rate_dtype[node], -1).astype(np.int16),
        contractions=replace(table, node=main[table.node].astype(np.int32)),
        types=graph.types,
        operands=graph.operands.moved(_end_events(profile, found, first=True), len(profile)),
        results=graph.results.moved(_end_events(profile, found, first=False), len(profile)),
        **figures,
    )


def _bearers(found: CostedOps, roles: NDArray[np.uint8]) -> BoolArray:
    """Which events stand for their operation: its kernels; without any, its fills and copies."""
    kernel = roles == Role.WORK
    has_kernel = np.bincount(found.node[kernel], minlength=len(found.graph)) > 0
    bears: BoolArray = kernel | ~has_kernel[found.node]
    return bears


def _longest(node: NDArray[np.integer], bears: BoolArray, duration_ns: FloatArray, count: int) -> IntArray:
    """The longest of the events that stand for each node, the first of equal ones."""
    rows = np.flatnonzero(bears)
    order = rows[np.lexsort((-rows, duration_ns[rows], node[rows]))]
    main = np.zeros(count, np.int64)
    main[node[order]] = order
    return main


def _shares(
    node: NDArray[np.integer], bears: BoolArray, main: IntArray, whole: BoolArray, duration_ns: FloatArray
) -> FloatArray:
    """The part that each event takes of the figures of its node: by measured time; nothing but to the
    ``main`` event where nodes are kept ``whole``.
    """
    is_main = main[node] == np.arange(len(node))
    weight = np.where(bears & (is_main | ~whole[node]), np.fmax(duration_ns, 0.0), 0.0)
    total = np.bincount(node, weight, len(main))[node]
    share: FloatArray = np.divide(weight, total, out=np.zeros(len(node)), where=total > 0)
    return share


def _split(
    column: FloatArray, share: FloatArray, node: NDArray[np.integer], bears: BoolArray, main: IntArray
) -> FloatArray:
    """One figure of all nodes by event: whole numbers that add up to it, as ``main`` takes what is left over;
    0 beside those that bear it.
    """
    figure = column[node]
    with np.errstate(invalid="ignore"):
        parts = np.where(bears, np.floor(figure * share), 0.0)
    parts[main] = 0.0
    parts[main] = column - np.bincount(node, np.nan_to_num(parts), len(main))
    return np.where(bears & np.isnan(figure), np.nan, parts)


def _own_class(roles: NDArray[np.uint8]) -> NDArray[np.uint8]:
    own = np.full(len(Role), int(OpClass.UNKNOWN), np.uint8)
    own[Role.DEVICE_COPY], own[Role.FILL] = OpClass.MOVE, OpClass.GENERATE
    return own[roles]


def _own_traffic(
    profile: Profile, roles: NDArray[np.uint8], apart: BoolArray, figures: dict[str, FloatArray]
) -> None:
    """Put in what copies and fills touched by themselves, where the profiler says it."""
    moved = profile.bytes_moved
    rows = np.flatnonzero(apart & ((roles != Role.HOST_COPY) | ~np.isnan(moved)))
    kernel = profile.kernel_row[rows]
    to_device = mapped(kernel, lambda row: is_to_device(profile.strings[row]), np.bool_)
    role = roles[rows]
    writes_only = (role == Role.FILL) | ((role == Role.HOST_COPY) & to_device)
    reads_only = (role == Role.HOST_COPY) & ~to_device
    figures["bytes_read"][rows] = np.where(writes_only, 0.0, moved[rows])
    figures["bytes_written"][rows] = np.where(reads_only, 0.0, moved[rows])


def _end_events(profile: Profile, found: CostedOps, *, first: bool) -> IntArray:
    """The event of each node that starts first, or last."""
    order = np.lexsort((profile.start_ns, found.node))
    if first:
        order = order[::-1]
    ends = np.zeros(len(found.graph), np.int64)
    ends[found.node[order]] = order
    return ends


def _report(
    profile: Profile, found: CostedOps, bears: BoolArray, whole: BoolArray, diagnostics: Diagnostics
) -> None:
    kernels = np.bincount(found.node[bears], minlength=len(found.graph))
    for mask, code, message in (
        (~whole, "measured-ops.shared-cost", "operations of several kernels, which share its cost by time"),
        (whole, "measured-ops.main-kernel", "matmuls of several kernels; all their cost is on the longest"),
    ):
        diagnostics.info(code, profile.name, message, count=int(((kernels > 1) & mask & found.costed).sum()))


# --- Costs of operations of the host, where those are the work: a run without a device, or an execution
# trace.
#
# Every call is recorded, the outer ones too, so each cost stands once, on the operation that answers for it:
# of those that the table costs with all they call, the outermost; of those it costs by their parts, the
# innermost where no part has a cost. What is called inside them costs nothing of its own, nor do views, the
# bookkeeping of the autograd engine, and calls around operations with a cost. Any other operation is unknown.

_BOOKKEEPING = re.compile(
    r"autograd::engine::.*|torch::autograd::\w+|\w+Backward\d+|detach_?|\[pytorch\|.*|## .* ##", re.DOTALL
)
_BY_PARTS_ALONE = frozenset({"aten::to", "aten::contiguous", "aten::dropout"})
"""Operations that do nothing, or call what does it; recorded without that, they did nothing."""

_LARGEST_INT64 = (1 << 63) - 1
_MOST_NAMED = 10


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Roles:
    """Which operations bear a cost, cost nothing of their own, and communicate; of others nobody knows.

    ``undescribed`` are in the table, and the trace does not say what they were given.
    """

    bears: BoolArray
    idle: BoolArray
    communicates: BoolArray
    undescribed: BoolArray


def host_costs(
    host: HostOps,
    strings: StringTable,
    diagnostics: Diagnostics,
    where: str,
    *,
    communicates: BoolArray,
    touches: BoolArray | None = None,
) -> EventCosts:
    """The cost of each operation of the host, shape ``(operations,)``; NaN where it is unknown.

    ``communicates`` marks operations whose time is the network's: nothing is known of them, and nothing is
    done around or inside them. ``touches`` marks those that have tensors, where that is known: others do
    nothing. Diagnostics say what has no cost. O(operations log depth).
    """
    roles = _roles(host, strings, communicates, touches)
    bears, idle = roles.bears, roles.idle
    rows = np.flatnonzero(bears)
    columns = (host.name_row, host.shapes_row, host.dtype_row, host.strides_row, host.values_row)
    inputs, place = distinct_rows(*(column[rows] for column in columns))
    priced: list[AtenCost] = []
    for each in inputs:
        name, shapes, types, strides, values = (strings[row] for row in each)
        priced.append(aten_cost(name, shapes, types, strides=strides, values=values))
    found = _host_columns(len(host), rows, place, priced, idle)
    _report_host(host, strings, roles, found, diagnostics.about(where, "measured-ops"))
    return found


def _roles(host: HostOps, strings: StringTable, communicates: BoolArray, touches: BoolArray | None) -> _Roles:
    def named(question: Callable[[str], bool]) -> BoolArray:
        return mapped(host.name_row, lambda row: question(strings[row]), np.bool_)

    in_table = named(lambda name: find_aten_rule(name) is not None) & ~communicates
    by_parts = in_table & named(is_composite)
    alone = named(_BY_PARTS_ALONE.__contains__)
    described = host.shapes_row != 0
    whole = in_table & ~by_parts & described
    whole &= ~_inside(host.parent, whole)
    answered = _inside(host.parent, whole)
    parts = by_parts & described & ~answered & ~_around(host.parent, whole)
    parts &= ~alone
    parts &= ~_around(host.parent, parts)
    bears = whole | parts
    answered |= _inside(host.parent, parts)
    calls = bears | communicates
    wraps = (~in_table | by_parts) & (_around(host.parent, calls) | _inside(host.parent, communicates))
    kept = alone | named(lambda name: name in VIEWS or _BOOKKEEPING.fullmatch(name) is not None)
    if touches is not None:
        kept |= ~touches & ~in_table
    idle = ~bears & ~communicates & (answered | wraps | kept)
    return _Roles(bears=bears, idle=idle, communicates=communicates, undescribed=in_table & ~described)


def _inside(parent: NDArray[np.integer], marked: BoolArray) -> BoolArray:
    """What is called, directly or not, by something marked."""
    outer = parent.astype(np.int64)
    return nearest(marked, outer, outer) >= 0


def _around(parent: NDArray[np.integer], marked: BoolArray) -> BoolArray:
    """What calls, directly or not, something marked."""
    found = np.zeros(len(parent), np.bool_)
    found[parent[marked & (parent >= 0)]] = True
    jump = parent.astype(np.int64)
    while (jump >= 0).any():
        found[jump[found & (jump >= 0)]] = True
        jump = at_rows(jump, jump, -1)
    return found


def _host_columns(
    count: int, rows: IntArray, place: IntArray, priced: Sequence[AtenCost], idle: BoolArray
) -> EventCosts:
    """Columns of all operations, from the costs of the distinct ones."""
    nothing = np.where(idle, 0.0, np.nan)

    def figures(name: str) -> FloatArray:
        column = nothing.copy()
        column[rows] = np.array([getattr(each.cost, name) for each in priced], np.float64)[place]
        return column

    op_class = np.where(idle, int(OpClass.FREE), int(OpClass.UNKNOWN)).astype(np.uint8)
    op_class[rows] = np.array([each.cost.op_class for each in priced], np.uint8)[place]
    rate = np.full(count, -1, np.int16)
    rate[rows] = np.array([each.cost.rate_dtype for each in priced], np.int16)[place]
    types = TensorTypesBuilder()
    ends = [
        RaggedArray.from_lists([[types.add(each.dtype, each.shape) for each in side] for side in sides])
        for sides in ([each.operands for each in priced], [each.results for each in priced])
    ]
    operands, results = (side.take(place).moved(rows, count) for side in ends)
    return EventCosts(
        op_class=op_class,
        rate_dtype=rate,
        contractions=_contractions_of(rows, place, priced),
        types=types.build(),
        operands=operands,
        results=results,
        **{name: figures(name) for name in _FIGURES},
    )


def _contractions_of(rows: IntArray, place: IntArray, priced: Sequence[AtenCost]) -> ContractionTable:
    """The matmuls of all operations."""
    listed: list[Contraction] = []
    of_key: list[list[int]] = []
    for each in priced:
        rows_of = each.cost.contractions
        fitting = [row for row in rows_of if max(row.batch, row.m, row.n, row.k) <= _LARGEST_INT64]
        of_key.append(list(range(len(listed), len(listed) + len(fitting))))
        listed.extend(fitting)
    chosen = RaggedArray.from_lists(of_key).take(place)
    empty = ContractionTable.empty()
    columns = {
        name: np.array([getattr(row, name) for row in listed], getattr(empty, name).dtype)[chosen.values]
        for name in ("batch", "m", "n", "k", "flops", "useful_flops", "lhs", "rhs", "accumulator", "products")
    }
    return replace(empty, node=rows[chosen.row_ids].astype(np.int32), **columns)


def _report_host(
    host: HostOps, strings: StringTable, roles: _Roles, found: EventCosts, findings: Findings
) -> None:
    """Say what has no cost, and what was taken to have none of its own."""
    unknown = ~roles.bears & ~roles.idle & ~roles.communicates
    unclear = roles.bears & np.isnan(found.flops + found.bytes_read + found.bytes_written)
    unclear |= unknown & roles.undescribed
    for mask, code, message in (
        (unknown & ~unclear, "unknown-op", "operations without a row in the cost table"),
        (unclear, "inputs-not-recorded", NOT_RECORDED),
    ):
        findings.warning(code, f"{message}: {_most_frequent(host, strings, mask)}", int(mask.sum()))
    calls = (
        "calls around operations with a cost, parts of them, views and bookkeeping cost nothing themselves"
    )
    findings.info("calls", calls, int(roles.idle.sum()))


def _most_frequent(host: HostOps, strings: StringTable, mask: BoolArray) -> str:
    rows, counts = np.unique(host.name_row[mask], return_counts=True)
    top = np.argsort(-counts, kind="stable")[:_MOST_NAMED].tolist()
    return ", ".join(f"{strings[int(rows[at])][:80]} {int(counts[at]):,} x" for at in top)
