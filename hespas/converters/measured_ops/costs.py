"""Costs of operations by event: of device events that an operation launched, and of host operations.

Each operation is costed once. Kernels of an operation share its cost in proportion to their time, in whole
FLOPs and bytes that add up to the cost of the operation. A matrix product or convolution is not divided: its
whole cost is on the longest kernel, and the kernels that prepare or finish it cost nothing. Fills and copies
of an operation that has kernels cost the bytes that the profiler states.

Host operations are the work in a run without a device, and in an execution trace. There every call is
recorded, enclosing ones too. If the table costs an operation with all that it calls, the outermost one has
the cost. If the table costs it by its parts, the innermost one without a costed part has the cost. Calls
inside these cost nothing, and neither do views, bookkeeping of the autograd engine, and calls around
operations with a cost. The cost of any other operation is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hespas.converters.linking import nearest
from hespas.converters.measured_ops.build import ASSUMED_LAYOUT, NOT_RECORDED, costed_ops
from hespas.converters.measured_ops.device_events import EventRole, event_roles, is_to_device
from hespas.costs.aten import VIEWS, aten_cost, find_aten_rule, is_composite
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
    """Costs of events as columns of shape ``(events,)``, as in :class:`hespas.graph.OpGraph`; NaN is unknown.

    Events are device events or, without a device, host operations. ``contractions.node`` is the row of an
    event. The first event of an operation has its operands, and the last event its results. ``types`` is the
    table of their types.
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
        """Return the costs of a graph of ``count`` nodes, where node ``nodes[i]`` has the costs of row
        ``rows[i]``. Costs of the other nodes are unknown.
        """
        row_of = np.full(count, -1, np.int64)
        row_of[nodes] = rows
        node_of = np.full(len(self.flops), -1, np.int32)
        node_of[rows] = nodes
        node = node_of[self.contractions.node]
        order = np.argsort(node, kind="stable")[int((node < 0).sum()) :]
        figures: dict[str, Any] = {name: at_rows(getattr(self, name), row_of, nan) for name in _FIGURES}
        return replace(
            self,
            op_class=at_rows(self.op_class, row_of, OpClass.UNKNOWN),
            rate_dtype=at_rows(self.rate_dtype, row_of, -1),
            contractions=self.contractions.take(order, node[order]),
            operands=self.operands.take(rows).moved(nodes, count),
            results=self.results.take(rows).moved(nodes, count),
            **figures,
        )

    def without(self, rows: BoolArray) -> EventCosts:
        """Return the costs, with zero cost in the rows that the mask ``rows`` marks."""
        figures: dict[str, Any] = {name: np.where(rows, 0.0, getattr(self, name)) for name in _FIGURES}
        return replace(
            self,
            op_class=np.where(rows, np.uint8(OpClass.FREE), self.op_class),
            rate_dtype=np.where(rows, np.int16(-1), self.rate_dtype),
            contractions=self.contractions.take(~rows[self.contractions.node]),
            **figures,
        )


def event_costs(profile: Profile, diagnostics: Diagnostics) -> EventCosts:
    """Return the cost of each device event of a profile with host operations. O(events log events).

    The costs of the events of an operation add up to the cost of its node in :func:`.costed_ops`. If an
    operation has kernels, the bytes of its fills and copies are added to that. Diagnostics report work
    without a cost, and operations with several kernels.
    """
    costed = costed_ops(profile, diagnostics)
    graph, node, duration_ns = costed.graph, costed.node, profile.duration_ns
    count, roles = len(graph), event_roles(profile)
    is_kernel = roles == EventRole.WORK
    has_kernel = np.bincount(node[is_kernel], minlength=count) > 0
    bears: BoolArray = is_kernel | ~has_kernel[node]  # fills and copies bear a cost only without kernels
    is_whole = np.bincount(graph.contractions.node, minlength=count) > 0
    rows = np.flatnonzero(bears)
    order = rows[np.lexsort((-rows, duration_ns[rows], node[rows]))]
    main = np.zeros(count, np.int64)  # the longest bearer of each node, the first of equal ones
    main[node[order]] = order
    is_main = main[node] == np.arange(len(node))
    weight = np.where(bears & (is_main | ~is_whole[node]), np.fmax(duration_ns, 0.0), 0.0)
    total = np.bincount(node, weight, count)[node]
    share: FloatArray = np.divide(weight, total, out=np.zeros(len(node)), where=total > 0)
    figures = {name: _split(getattr(graph, name), share, node, bears, main) for name in _FIGURES}
    is_transfer = (roles == EventRole.DEVICE_COPY) | (roles == EventRole.FILL)
    stated = is_transfer & ~costed.costed[node]
    for name in ("flops", "useful_flops", "transcendentals"):
        figures[name][stated] = 0.0
    is_host_copy, moved = roles == EventRole.HOST_COPY, profile.bytes_moved
    transfers = np.flatnonzero((~bears | stated | is_host_copy) & (~is_host_copy | ~np.isnan(moved)))
    kernel = profile.kernel_id[transfers]
    to_device = mapped(kernel, lambda row: is_to_device(profile.strings[row]), np.bool_)
    writes_only = (roles[transfers] == EventRole.FILL) | (is_host_copy[transfers] & to_device)
    reads_only = is_host_copy[transfers] & ~to_device
    figures["bytes_read"][transfers] = np.where(writes_only, 0.0, moved[transfers])
    figures["bytes_written"][transfers] = np.where(reads_only, 0.0, moved[transfers])
    class_of_role = np.full(len(EventRole), int(OpClass.UNKNOWN), np.uint8)
    class_of_role[EventRole.DEVICE_COPY], class_of_role[EventRole.FILL] = OpClass.MOVE, OpClass.GENERATE
    op_class = np.where(bears & ~stated, graph.op_class[node], class_of_role[roles]).astype(np.uint8)
    op_class[roles == EventRole.COMMUNICATION] = int(OpClass.UNKNOWN)
    by_start = np.lexsort((profile.start_ns, node))
    first, last = np.zeros((2, count), np.int64)
    first[node[by_start[::-1]]] = by_start[::-1]
    last[node[by_start]] = by_start
    num_bearers = np.bincount(node[bears], minlength=count)
    for mask, code, message in (
        (
            ~is_whole,
            "measured-ops.shared-cost",
            "operations of several kernels, which share the cost by time",
        ),
        (
            is_whole,
            "measured-ops.main-kernel",
            "matmuls of several kernels; the longest one has the whole cost",
        ),
    ):
        num_operations = int(((num_bearers > 1) & mask & costed.costed).sum())
        diagnostics.info(code, profile.name, message, count=num_operations)
    table = graph.contractions
    return EventCosts(
        op_class=op_class,
        rate_dtype=np.where(bears, graph.rate_dtype[node], -1).astype(np.int16),
        contractions=replace(table, node=main[table.node].astype(np.int32)),
        types=graph.types,
        operands=graph.operands.moved(first, len(profile)),
        results=graph.results.moved(last, len(profile)),
        **figures,
    )


def _split(
    column: FloatArray, share: FloatArray, node: NDArray[np.integer], bears: BoolArray, main: IntArray
) -> FloatArray:
    """Divide a cost of each node among its events, in whole numbers that add up to the cost.

    ``column`` is the cost of each node, ``node`` the node of each event, and ``share`` the share of each
    event. ``main`` is the event of each node that gets the remainder. Events outside the mask ``bears`` get
    0.
    """
    figure = column[node]
    with np.errstate(invalid="ignore"):
        parts = np.where(bears, np.floor(figure * share), 0.0)
    parts[main] = 0.0
    parts[main] = column - np.bincount(node, np.nan_to_num(parts), len(main))
    return np.where(bears & np.isnan(figure), np.nan, parts)


_BOOKKEEPING = re.compile(
    r"autograd::engine::.*|torch::autograd::\w+|\w+Backward\d+|detach_?|\[pytorch\|.*|## .* ##", re.DOTALL
)
_IDLE_ALONE = frozenset({"aten::to", "aten::contiguous", "aten::dropout"})
"""Operations that do nothing, or call an operation that works. Without a recorded call they did nothing."""

_LARGEST_INT64 = (1 << 63) - 1
_MAX_NAMED = 10


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _HostRoles:
    """Masks of host operations by their role. The cost of operations without a role is unknown.

    ``bears`` marks operations with a cost, ``idle`` operations without cost, and ``communicates``
    communication. ``undescribed`` marks operations that are in the cost table but whose inputs the trace does
    not record.
    """

    bears: BoolArray
    idle: BoolArray
    communicates: BoolArray
    undescribed: BoolArray

    @classmethod
    def of(
        cls, host: HostOps, strings: StringTable, communicates: BoolArray, touches: BoolArray | None
    ) -> _HostRoles:
        """Return the roles of all host operations. They determine if an operation has a cost itself, or if
        the operations that it calls have one.
        """

        def matching(predicate: Callable[[str], bool]) -> BoolArray:
            return mapped(host.name_id, lambda row: predicate(strings[row]), np.bool_)

        in_table = matching(lambda name: find_aten_rule(name) is not None) & ~communicates
        by_parts = in_table & matching(is_composite)
        idle_alone = matching(_IDLE_ALONE.__contains__)
        described = host.shapes_id != 0
        whole = in_table & ~by_parts & described
        whole &= ~_inside(host.parent, whole)
        covered = _inside(host.parent, whole)
        parts = by_parts & described & ~covered & ~_around(host.parent, whole)
        parts &= ~idle_alone
        parts &= ~_around(host.parent, parts)
        bears = whole | parts
        covered |= _inside(host.parent, parts)
        calls = bears | communicates
        encloses = (~in_table | by_parts) & (_around(host.parent, calls) | _inside(host.parent, communicates))
        no_work = idle_alone | matching(
            lambda name: name in VIEWS or _BOOKKEEPING.fullmatch(name) is not None
        )
        if touches is not None:
            no_work |= ~touches & ~in_table
        idle = ~bears & ~communicates & (covered | encloses | no_work)
        return cls(bears=bears, idle=idle, communicates=communicates, undescribed=in_table & ~described)


def host_costs(
    host: HostOps,
    strings: StringTable,
    diagnostics: Diagnostics,
    where: str,
    *,
    communicates: BoolArray,
    touches: BoolArray | None = None,
) -> EventCosts:
    """Return the cost of each host operation, shape ``(operations,)``; NaN is unknown.

    ``communicates`` marks operations whose time is network time. Their cost is unknown, and operations around
    or inside them cost nothing. ``touches`` marks operations with tensors (None: not known); all other
    operations cost nothing. Diagnostics report operations without a cost. O(operations log depth).
    """
    roles = _HostRoles.of(host, strings, communicates, touches)
    rows = np.flatnonzero(roles.bears)
    columns = (host.name_id, host.shapes_id, host.dtype_id, host.strides_id, host.values_id)
    inputs, index = distinct_rows(*(column[rows] for column in columns))
    calls = [[strings[row] for row in call] for call in inputs]
    costs = [
        aten_cost(name, shapes, types, strides=strides, values=values)
        for name, shapes, types, strides, values in calls
    ]

    def figure(name: str) -> FloatArray:
        column = np.where(roles.idle, 0.0, np.nan)
        column[rows] = np.array([getattr(cost.cost, name) for cost in costs], np.float64)[index]
        return column

    op_class = np.where(roles.idle, int(OpClass.FREE), int(OpClass.UNKNOWN)).astype(np.uint8)
    op_class[rows] = np.array([cost.cost.op_class for cost in costs], np.uint8)[index]
    rate_dtype = np.full(len(host), -1, np.int16)
    rate_dtype[rows] = np.array([cost.cost.rate_dtype for cost in costs], np.int16)[index]
    types = TensorTypesBuilder()
    operands, results = (
        RaggedArray.from_lists([[types.add(value.dtype, value.shape) for value in values] for values in side])
        for side in ([cost.operands for cost in costs], [cost.results for cost in costs])
    )
    products: list[Contraction] = []
    products_of: list[list[int]] = []
    for cost in costs:
        fitting = [
            product
            for product in cost.cost.contractions
            if max(product.batch, product.m, product.n, product.k) <= _LARGEST_INT64
        ]
        products_of.append(list(range(len(products), len(products) + len(fitting))))
        products.extend(fitting)
    of_rows = RaggedArray.from_lists(products_of).take(index)
    empty = ContractionTable.empty()
    contractions = {
        name: np.array([getattr(product, name) for product in products], getattr(empty, name).dtype)
        for name in ContractionTable.DTYPES
        if name != "node"
    }
    table = replace(
        empty,
        node=rows[of_rows.row_ids].astype(np.int32),
        **{name: column[of_rows.values] for name, column in contractions.items()},
    )
    result = EventCosts(
        op_class=op_class,
        rate_dtype=rate_dtype,
        contractions=table,
        types=types.build(),
        operands=operands.take(index).moved(rows, len(host)),
        results=results.take(index).moved(rows, len(host)),
        **{name: figure(name) for name in _FIGURES},
    )
    _report_host_costs(host, strings, roles, result, diagnostics.about(where, "measured-ops"))
    return result


def _inside(parent: NDArray[np.integer], marked: BoolArray) -> BoolArray:
    """Return a mask of the operations that are called, directly or not, by an operation marked in
    ``marked``.
    """
    outer = parent.astype(np.int64)
    return nearest(marked, outer, outer) >= 0


def _around(parent: NDArray[np.integer], marked: BoolArray) -> BoolArray:
    """Return a mask of the operations that call, directly or not, an operation marked in ``marked``."""
    around = np.zeros(len(parent), np.bool_)
    around[parent[marked & (parent >= 0)]] = True
    ancestor = parent.astype(np.int64)
    while (ancestor >= 0).any():
        around[ancestor[around & (ancestor >= 0)]] = True
        ancestor = at_rows(ancestor, ancestor, -1)
    return around


def _report_host_costs(
    host: HostOps, strings: StringTable, roles: _HostRoles, costs: EventCosts, findings: Findings
) -> None:
    """Report host operations without a cost, and those that are assumed to cost nothing themselves."""
    unknown = ~roles.bears & ~roles.idle & ~roles.communicates
    not_recorded = roles.bears & np.isnan(costs.flops + costs.bytes_read + costs.bytes_written)
    not_recorded |= unknown & roles.undescribed
    for mask, code, message in (
        (unknown & ~not_recorded, "unknown-op", "operations without a row in the cost table"),
        (not_recorded, "inputs-not-recorded", NOT_RECORDED),
    ):
        rows, counts = np.unique(host.name_id[mask], return_counts=True)
        most_frequent = np.argsort(-counts, kind="stable")[:_MAX_NAMED].tolist()
        names = ", ".join(f"{strings[int(rows[row])][:80]} {int(counts[row]):,} x" for row in most_frequent)
        findings.warning(code, f"{message}: {names}", int(mask.sum()))
    calls = "calls around or inside operations with a cost, views and bookkeeping cost nothing themselves"
    findings.info("calls", calls, int(roles.idle.sum()))
    # Host operations keep no strides, also where the trace records them.
    is_assumed = roles.bears & ~not_recorded & (costs.op_class == int(OpClass.CONVOLUTION))
    findings.info("assumed-layout", ASSUMED_LAYOUT, int(is_assumed.sum()))
