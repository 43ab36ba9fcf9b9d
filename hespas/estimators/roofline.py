"""Roofline: an operation takes as long as its slower half, arithmetic or memory traffic, plus a launch.

    t = overhead + max(matrix + vector, memory)          [ns]
    matrix = sum over contractions of flops x products / (efficiency x peak of the operand types)
    vector = (other flops + weight x transcendentals) / (efficiency x vector peak)
    memory = bytes read and written / (efficiency x bandwidth of the main memory)

Williams, Waterman, Patterson: "Roofline" (CACM 2009), with the launch overhead and fitted efficiencies of the
hardware file. Exact for what the graph states; no cache is modelled. Vectorised: a million nodes take well
under a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isnan
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.interface import Prediction, takes_no_time, transcendentals
from hespas.estimators.rates import (
    Algorithm,
    Efficiencies,
    NetworkCosts,
    collective_costs,
    collective_time_ns,
    contraction_choices,
    contraction_rate,
    message_costs,
    peak_times,
    stored_bytes,
    unit_rate,
)
from hespas.graph import (
    DTYPES,
    UNKNOWN_DTYPE,
    CollectiveKind,
    Diagnostics,
    Estimate,
    NodeKind,
    OpClass,
    OpGraph,
    Resource,
    find_dtype,
)
from hespas.graph.columns import BoolArray, FloatArray, constant
from hespas.graph.errors import UsageError
from hespas.hardware import Device
from hespas.operations import CLASS_OF_KIND, MATRIX_CLASSES, Operations, arithmetic_dtype, find_scheme

__all__ = ["BOUNDS", "Roofline"]

BOUNDS: tuple[str, ...] = ("free", "compute", "memory", "overhead", "network")
"""What limits a node; the ``bound`` column of the estimate indexes this."""
_FREE, _COMPUTE, _MEMORY, _OVERHEAD, _NETWORK = range(5)

_ROUNDING = 1e-12
"""What is left of a node's FLOPs after its contractions is rounding below this share of them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """Times of one execution as columns [ns]; NaN where a part is unknown."""

    matrix_ns: FloatArray
    vector_ns: FloatArray
    memory_ns: FloatArray
    overhead_ns: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The roofline model; fields are its options.

    ``transcendental_weight``: FLOPs one transcendental counts as. ``use_useful_flops``: leave out products
    with padding and dilation zeros, as direct kernels do; false counts by the specification.
    ``sort_passes``: how often a sort moves its data. ``compute_efficiency`` and ``memory_efficiency``: shares
    of the peaks reached where the hardware file has no fit. ``default_dtype``: element type of nodes that
    state none (empty: their arithmetic stays unknown). ``num_ranks``: size of collectives over all ranks
    where the graph does not say (-1: unknown). ``algorithm``: latencies of collectives.
    """

    transcendental_weight: float = 8.0
    use_useful_flops: bool = True
    sort_passes: float = 1.0
    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    default_dtype: str = ""
    num_ranks: int = -1
    algorithm: Algorithm = "auto"

    inert_options: ClassVar[frozenset[str]] = frozenset({"algorithm", "default_dtype"})

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        if self.default_dtype and find_dtype(self.default_dtype) is None:
            raise UsageError(f"unknown element type {self.default_dtype!r}", hint="write bf16, f32, i8, ...")
        if self.algorithm not in ("auto", "ring", "tree"):
            raise UsageError(f"unknown algorithm {self.algorithm!r}", hint="one of: auto, ring, tree")
        if min(self.compute_efficiency, self.memory_efficiency) <= 0:
            raise UsageError("an efficiency must be above 0", hint="1 is the published peak")
        if min(self.transcendental_weight, self.sort_passes) < 0:
            raise UsageError("transcendental_weight and sort_passes must not be negative")

    @property
    def name(self) -> str:
        """``roofline``."""
        return "roofline"

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """Time of one execution of each node; see the module. O(nodes), vectorised."""
        found = diagnostics if diagnostics is not None else Diagnostics()
        with np.errstate(invalid="ignore", over="ignore"):  # infinite costs of a broken input stay visible
            work = self._work(graph, device)
        arithmetic_ns = work.matrix_ns + work.vector_ns
        duration: FloatArray = work.overhead_ns + np.maximum(arithmetic_ns, work.memory_ns)
        bound = np.where(arithmetic_ns >= work.memory_ns, _COMPUTE, _MEMORY).astype(np.int8)
        bound[np.maximum(arithmetic_ns, work.memory_ns) < work.overhead_ns] = _OVERHEAD
        # What is known of a half-known node is a lower bound of its time.
        known_ns = work.overhead_ns + np.fmax(arithmetic_ns, work.memory_ns)
        computes = _is_device_compute(graph, device)
        duration[~computes] = np.nan
        for rows, time, limit in self._network(graph, device, work.overhead_ns, found):
            duration[rows.node], bound[rows.node] = time, limit
        uncounted = np.isnan(graph.transcendentals) & ~np.isnan(graph.flops) & computes
        found.info(
            "roofline.transcendentals-unknown",
            graph.name,
            "nodes state FLOPs but no transcendentals: taken as none",
            count=int(uncounted.sum()),
        )
        free = takes_no_time(graph)
        duration = np.where(free, 0.0, duration)
        bound[free] = _FREE
        unknown = np.isnan(duration)
        _tell_compute(graph, device, unknown & computes, np.isnan(work.matrix_ns + work.vector_ns), found)
        _tell_other(graph, unknown & ~computes, found)
        _tell_rates(graph, device, found)
        bound[unknown] = -1
        return Estimate(
            hardware=device.name,
            estimators=(self.name,),
            bounds=BOUNDS,
            duration_ns=duration,
            low_ns=np.where(unknown & computes, known_ns, np.nan),
            high_ns=np.full(len(graph), np.nan),
            estimator=np.where(unknown, -1, 0).astype(np.int8),
            bound=bound,
        )

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """Time of one execution of each operation, apart from any graph. O(ops).

        ``use_useful_flops``, ``sort_passes``, ``default_dtype`` and ``num_ranks`` are of graphs only.
        """
        return _roofline_of_operations(
            ops,
            device,
            transcendental_weight=self.transcendental_weight,
            efficiencies=(self.compute_efficiency, self.memory_efficiency),
            algorithm=self.algorithm,
            diagnostics=diagnostics,
        )

    def _work(self, graph: OpGraph, device: Device) -> _Work:
        fits = Efficiencies.of(device, self.compute_efficiency, self.memory_efficiency)
        default = find_dtype(self.default_dtype) if self.default_dtype else None
        dtype = arithmetic_dtype(graph, UNKNOWN_DTYPE if default is None else default.code)
        matrix_ns, in_products = self._products(graph, device, fits)
        flops = self._flops_outside(graph, in_products)
        flops = flops + self.transcendental_weight * transcendentals(graph)
        on_matrix = np.isin(graph.op_class, [int(op_class) for op_class in MATRIX_CLASSES])
        on_matrix &= in_products == 0
        rate = np.where(on_matrix, unit_rate(device, "matrix")[dtype], unit_rate(device, "vector")[dtype])
        rate = rate * fits.compute[graph.op_class, dtype]
        vector_ns = np.where(flops == 0, 0.0, flops / rate * 1e9)
        bandwidth = device.main_memory.bandwidth_bytes_per_s * fits.memory[graph.op_class, dtype]
        passes = np.where(graph.op_class == int(OpClass.SORT), self.sort_passes, 1.0)
        memory_ns = stored_bytes(graph, device) * passes / bandwidth * 1e9
        memory_ns = np.where(graph.op_class == int(OpClass.HOST), _host_ns(graph, device), memory_ns)
        return _Work(matrix_ns, vector_ns, memory_ns, fits.overhead_ns[graph.op_class, dtype])

    def _products(self, graph: OpGraph, device: Device, fits: Efficiencies) -> tuple[FloatArray, FloatArray]:
        """Per node: time of its contractions [ns], and their FLOPs by the specification."""
        table = graph.contractions
        if not len(table):
            nothing = constant(0.0, len(graph))
            return nothing, nothing
        flops = table.useful_flops if self.use_useful_flops else table.flops
        op_class = graph.op_class[table.node]
        # Inside a fusion the product is what was fitted, not the fusion.
        listed = np.isin(op_class, [int(entry) for entry in MATRIX_CLASSES])
        op_class = np.where(listed, op_class, int(OpClass.CONTRACTION))
        rate = contraction_rate(table, device) * fits.compute[op_class, table.lhs]
        time = np.where(flops == 0, 0.0, flops / rate * 1e9)
        in_products = np.bincount(table.node, table.flops, len(graph)).astype(np.float64)
        return np.bincount(table.node, time, len(graph)).astype(np.float64), in_products

    def _flops_outside(self, graph: OpGraph, in_products: FloatArray) -> FloatArray:
        """FLOPs of each node that its listed contractions do not account for."""
        flops = graph.flops
        if self.use_useful_flops:
            flops = np.where(np.isnan(graph.useful_flops), graph.flops, graph.useful_flops)
        rest = np.maximum(graph.flops - in_products, 0.0)
        rest = np.where(rest <= _ROUNDING * in_products, 0.0, rest)
        return np.where(in_products > 0, rest, flops)

    def _network(
        self, graph: OpGraph, device: Device, overhead_ns: FloatArray, diagnostics: Diagnostics
    ) -> Iterator[tuple[NetworkCosts, FloatArray, NDArray[np.int8]]]:
        """Collectives, then messages: their rows, times with launch [ns] and bounds."""
        collectives = collective_costs(graph, device, num_ranks=self.num_ranks, algorithm=self.algorithm)
        messages = message_costs(graph, device)
        bandwidth = device.main_memory.bandwidth_bytes_per_s * self.memory_efficiency
        for rows, payload in (
            (collectives, graph.collectives.comm_bytes),
            (messages, graph.p2p.comm_bytes),
        ):
            # Nothing leaves the rank: a copy within its memory, in and out.
            moved = graph.bytes_moved[rows.node]
            copy_ns = np.where(np.isnan(moved), 2 * payload, moved) / bandwidth * 1e9
            time = overhead_ns[rows.node] + np.where(rows.local, copy_ns, rows.duration_ns)
            _tell_network(graph, device, rows, diagnostics)
            yield rows, time, np.where(rows.local, _MEMORY, _NETWORK).astype(np.int8)


_TALKING = (NodeKind.COLLECTIVE, NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE)


def _host_ns(graph: OpGraph, device: Device) -> FloatArray:
    """Time of the traffic over the host link [ns]; NaN without one."""
    link = device.link("pcie")
    if link is None:
        return np.full(len(graph), np.nan)
    latency_ns = 0.0 if isnan(link.latency_ns) else link.latency_ns
    return latency_ns + graph.bytes_moved / link.bandwidth_bytes_per_s * 1e9


def _is_device_compute(graph: OpGraph, device: Device) -> BoolArray:
    """Nodes this device computes: not messages, not nodes without a kind, not the host's (if it is none)."""
    computes: BoolArray = ~np.isin(graph.kind, [int(kind) for kind in (*_TALKING, NodeKind.INVALID)])
    if device.kind == "cpu":
        return computes
    computes &= graph.resource != int(Resource.HOST)
    return computes


# Why a node has no estimate, told to the user once per operation and reason.

_NARROW = 16
"""Bits below which a type is one that only some devices multiply."""


def _tell_compute(
    graph: OpGraph, device: Device, unknown: BoolArray, no_rate: BoolArray, diagnostics: Diagnostics
) -> None:
    """Reasons for compute nodes; the first that applies to a node counts."""
    bytes_unknown = np.isnan(graph.bytes_moved)
    flops_unknown = np.isnan(graph.flops)
    reasons: tuple[tuple[str, str, BoolArray], ...] = (
        ("roofline.unknown-cost", "neither FLOPs nor bytes are known", flops_unknown & bytes_unknown),
        ("roofline.unknown-flops", "the FLOPs are unknown", flops_unknown),
        ("roofline.unknown-bytes", "the bytes are unknown", bytes_unknown),
        (
            "roofline.unknown-dtype",
            "the element type is unknown (`default_dtype=bf16` states one for all that state none)",
            no_rate & (arithmetic_dtype(graph, UNKNOWN_DTYPE) == UNKNOWN_DTYPE),
        ),
        ("roofline.no-rate", f"{device.name} has no rate for the element type", no_rate),
        ("roofline.no-host-link", f"{device.name} states no link to the host", unknown),
    )
    rest = unknown
    for code, message, applies in reasons:
        _tell(graph, code, message, rest & applies, diagnostics)
        rest = rest & ~applies


def _tell_rates(graph: OpGraph, device: Device, diagnostics: Diagnostics) -> None:
    """Products of narrow or unlike types for which the device lists no rate of their own: what stands in."""
    table = graph.contractions
    is_narrow = np.array([entry.bits < _NARROW for entry in DTYPES] + [False])
    rows = np.flatnonzero((table.lhs != table.rhs) | is_narrow[table.lhs])
    if not len(rows):
        return
    choices, place = contraction_choices(table, device)
    told: dict[str, int] = {}
    for which, count in zip(*np.unique(place[rows], return_counts=True), strict=True):
        choice = choices[int(which)]
        if choice is not None and not choice.exact:
            told[choice.rule] = told.get(choice.rule, 0) + int(count)
    for rule, count in told.items():
        diagnostics.warning("roofline.rate-fallback", device.name, rule, count=count)


def _tell_other(graph: OpGraph, unknown: BoolArray, diagnostics: Diagnostics) -> None:
    """Nodes that no device runs, and communication without a row that says what it moves."""
    invalid = graph.kind == int(NodeKind.INVALID)
    compute = graph.kind == int(NodeKind.COMPUTE)
    bare = ~(invalid | compute)
    bare[graph.collectives.node] = False
    bare[graph.p2p.node] = False
    for code, message, applies in (
        ("roofline.invalid-node", "the node has no kind", invalid),
        ("roofline.host-node", "the host runs it, not the device", compute),
        ("roofline.unknown-message", "what it communicates is unknown", bare),
    ):
        _tell(graph, code, message, unknown & applies, diagnostics)


def _tell_network(graph: OpGraph, device: Device, rows: NetworkCosts, diagnostics: Diagnostics) -> None:
    """Reasons for collectives and messages, from their cost rows."""
    unknown = np.isnan(rows.duration_ns) & ~rows.no_group & ~rows.no_link
    reasons = (
        ("roofline.unknown-group", "the ranks of the group are unknown (state num_ranks)", rows.no_group),
        ("roofline.no-link", f"{device.name} has no link that leaves its scale-up domain", rows.no_link),
        ("roofline.unknown-message", "the kind or the bytes of the communication are unknown", unknown),
    )
    for code, message, applies in reasons:
        mask = np.zeros(len(graph), np.bool_)
        mask[rows.node[applies]] = True
        _tell(graph, code, message, mask, diagnostics)


def _tell(graph: OpGraph, code: str, message: str, nodes: BoolArray, diagnostics: Diagnostics) -> None:
    """One warning per operation name with the number of its nodes and the place of the first."""
    rows, first, counts = np.unique(graph.op_row[nodes], return_index=True, return_counts=True)
    where = np.flatnonzero(nodes)
    for row, place, count in zip(rows.tolist(), first.tolist(), counts.tolist(), strict=True):
        node = int(where[place])
        location = graph.strings[int(graph.source_row[node])] or f"node {int(graph.id[node])}"
        operation = graph.strings[row] or "unnamed node"
        diagnostics.warning(code, location, f"{operation}: no duration, {message}", count=count)


# The roofline of operations apart from any graph: the same model as of nodes, on what tables state.
#
#     t = overhead + max(arithmetic / efficiency, memory / efficiency)          [ns]
#
# Collectives take the time of the links, as in a graph; a group larger than its node leaves the node.

_COLLECTIVES: Mapping[str, CollectiveKind] = {each.name.lower(): each for each in CollectiveKind}


def _roofline_of_operations(
    ops: Operations,
    device: Device,
    *,
    transcendental_weight: float,
    efficiencies: tuple[float, float],
    algorithm: Algorithm,
    diagnostics: Diagnostics | None = None,
) -> Prediction:
    """Time of one execution of each operation; NaN where a cost or a peak is unknown. O(ops).

    ``efficiencies`` are shares of the peaks of arithmetic and memory where the hardware file has no fit.
    """
    times = peak_times(ops, device, transcendental_weight=transcendental_weight)
    compute, memory, overhead_ns = _efficiencies(ops, device, efficiencies)
    with np.errstate(invalid="ignore"):
        duration = overhead_ns + np.maximum(times.arithmetic_ns / compute, times.memory_ns / memory)
    rows = ops.kind.where("collective")
    if len(rows):
        duration[rows] = overhead_ns[rows] + _network_ns(ops.take(rows), device, algorithm)
    unknown = np.isnan(duration)
    if diagnostics is not None:
        diagnostics.warning(
            "roofline.unknown",
            device.name,
            "operations have no known cost, or the device no rate for them",
            count=int(unknown.sum()),
        )
    return Prediction.of("roofline", duration)


def _efficiencies(
    ops: Operations, device: Device, default: tuple[float, float]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Shares of the peaks and launch [ns] of each operation: looked up once per kind and scheme."""
    table = np.empty((3, len(ops.kind.names), len(ops.scheme.names)))
    table[:] = np.array([*default, device.launch_overhead_ns])[:, None, None]
    for row, kind in enumerate(ops.kind.names):
        for column, name in enumerate(ops.scheme.names):
            scheme = find_scheme(name)
            fit = device.efficiency(CLASS_OF_KIND[kind].name.lower(), scheme.rate_dtype if scheme else "")
            if fit is None:
                continue
            for place, value in enumerate((fit.compute, fit.memory, fit.t0_ns)):
                if not isnan(value):
                    table[place, row, column] = value
    compute, memory, overhead_ns = table[:, ops.kind.row, ops.scheme.row]
    return compute, memory, overhead_ns


def _network_ns(ops: Operations, device: Device, algorithm: Algorithm) -> FloatArray:
    """Time of collectives without launch [ns]; NaN for kinds nobody knows."""
    kinds = np.array([int(_COLLECTIVES.get(name, -1)) for name in ops.op.names], np.int64)[ops.op.row]
    ranks = ops.dim("ranks")
    found = collective_time_ns(
        np.maximum(kinds, 0),
        ranks,
        ops.dim("message_bytes"),
        device,
        beyond_node=ranks > np.nan_to_num(ops.dim("ranks_per_node"), nan=np.inf),
        algorithm=algorithm,
    )
    return np.where(kinds < 0, np.nan, found)
