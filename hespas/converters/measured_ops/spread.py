"""Costs of operations on the device events they caused: each operation once, whatever it launched.

Kernels of an operation share its figures as they share its time, in whole FLOPs and bytes that add up to
those of the operation. A matrix product or convolution cannot be cut by time: all of it stands on the longest
kernel, and the others, which prepare or finish it, cost nothing of their own. Fills and copies beside kernels
are not what the operation is for: they cost what the profiler says they touched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hespas.converters.measured_ops.build import CostedOps, costed_ops
from hespas.converters.measured_ops.groups import Role, event_roles
from hespas.graph import ContractionTable, Csr, Diagnostics, OpClass, Profile, TensorTypes
from hespas.graph.columns import BoolArray, FloatArray, IntArray

__all__ = ["EventCosts", "event_costs"]

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
    operands: Csr
    results: Csr


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
    shares = _Shares.of(node, bears, main, whole, profile.duration_ns)
    figures = {name: shares.split(getattr(graph, name)) for name in _FIGURES}
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
        operands=_placed(graph.operands, _end_events(profile, found, first=True), len(profile)),
        results=_placed(graph.results, _end_events(profile, found, first=False), len(profile)),
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


@dataclass(frozen=True, slots=True, eq=False)
class _Shares:
    """How events divide the figures of their nodes; ``main`` is the event that takes what is left over."""

    node: NDArray[np.integer]
    bears: BoolArray
    main: IntArray
    share: FloatArray

    @classmethod
    def of(
        cls,
        node: NDArray[np.integer],
        bears: BoolArray,
        main: IntArray,
        whole: BoolArray,
        duration_ns: FloatArray,
    ) -> _Shares:
        """By measured time; nothing but to the main event where nodes are kept ``whole``."""
        is_main = main[node] == np.arange(len(node))
        weight = np.where(bears & (is_main | ~whole[node]), np.fmax(duration_ns, 0.0), 0.0)
        total = np.bincount(node, weight, len(main))[node]
        share = np.divide(weight, total, out=np.zeros(len(node)), where=total > 0)
        return cls(node, bears, main, share)

    def split(self, column: FloatArray) -> FloatArray:
        """One figure of all nodes by event: whole numbers that add up to it, 0 beside those that bear it."""
        figure = column[self.node]
        with np.errstate(invalid="ignore"):
            parts = np.where(self.bears, np.floor(figure * self.share), 0.0)
        parts[self.main] = 0.0
        known = np.where(np.isnan(parts), 0.0, parts)
        parts[self.main] = column - np.bincount(self.node, known, len(self.main))
        return np.where(self.bears & np.isnan(figure), np.nan, parts)


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
    kernels, place = np.unique(profile.kernel_row[rows], return_inverse=True)
    names = [profile.strings[int(row)] for row in kernels]
    to_device = np.array([_is_to_device(name) for name in names], np.bool_)[place.reshape(-1)]
    role = roles[rows]
    writes_only = (role == Role.FILL) | ((role == Role.HOST_COPY) & to_device)
    reads_only = (role == Role.HOST_COPY) & ~to_device
    figures["bytes_read"][rows] = np.where(writes_only, 0.0, moved[rows])
    figures["bytes_written"][rows] = np.where(reads_only, 0.0, moved[rows])


def _is_to_device(kernel: str) -> bool:
    return "HtoD" in kernel or "HostToDevice" in kernel


def _end_events(profile: Profile, found: CostedOps, *, first: bool) -> IntArray:
    """The event of each node that starts first, or last."""
    order = np.lexsort((profile.start_ns, found.node))
    if first:
        order = order[::-1]
    ends = np.zeros(len(found.graph), np.int64)
    ends[found.node[order]] = order
    return ends


def _placed(types: Csr, events: IntArray, count: int) -> Csr:
    return Csr.from_pairs(events[types.row_ids], types.values, count)


def _report(
    profile: Profile, found: CostedOps, bears: BoolArray, whole: BoolArray, diagnostics: Diagnostics
) -> None:
    kernels = np.bincount(found.node[bears], minlength=len(found.graph))
    for mask, code, message in (
        (~whole, "measured-ops.shared-cost", "operations of several kernels, which share its cost by time"),
        (whole, "measured-ops.main-kernel", "products of several kernels; all their cost is on the longest"),
    ):
        diagnostics.info(code, profile.name, message, count=int(((kernels > 1) & mask & found.costed).sum()))
