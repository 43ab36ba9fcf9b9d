"""Roofline: an operation takes the longer of its arithmetic and its memory traffic, plus a launch.

    t = overhead + max(matrix + vector, memory)          [ns]
    matrix = sum over contractions of flops x products / (efficiency x peak of the operand types)
    vector = (other flops + weight x transcendentals) / (efficiency x vector peak)
    memory = bytes read and written / (efficiency x bandwidth of the main memory)

Williams, Waterman, Patterson: "Roofline" (CACM 2009), with the launch overhead and fitted efficiencies of the
hardware file. Exact for the values in the graph; caches are not modelled. Vectorised: a million nodes take
well under a second.

Operations outside a graph take the same model on the values of their table. Their collectives use the links
as in a graph; a group larger than its node leaves the node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isnan
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.interface import Prediction, takes_no_time, transcendentals
from hespas.estimators.rates import (
    COLLECTIVE_KINDS,
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
    DATA_SHEET,
    DTYPES,
    UNKNOWN_DTYPE,
    Diagnostics,
    Estimate,
    NodeKind,
    OpClass,
    OpGraph,
    Resource,
    find_dtype,
)
from hespas.graph.columns import BoolArray, FloatArray, constant, mapped
from hespas.graph.errors import UsageError
from hespas.hardware import Device, host_payload
from hespas.operations import CLASS_OF_KIND, MATRIX_CLASSES, Operations, arithmetic_dtype, find_scheme

__all__ = ["BOUNDS", "Roofline"]

BOUNDS: tuple[str, ...] = ("free", "compute", "memory", "overhead", "network")
"""Limits of a node's time; the ``bound`` column of the estimate is an index into this."""
_FREE, _COMPUTE, _MEMORY, _OVERHEAD, _NETWORK = range(5)

_PAGEABLE_NAMES = re.compile(r"pageable|\(host ->|-> host\)", re.IGNORECASE)
"""Names of copies from and to pageable host memory in recordings: ``Memcpy HtoD (Pageable -> Device)`` of
CUDA, ``(Host -> Device)`` of HIP, whose profiler does not distinguish pinned memory. Programs have to request
that.
"""
_PAGEABLE_BYTES_PER_S: Mapping[str, float] = {"AMD": 35e9, "": 11e9}
"""Limit of copies from and to pageable host memory by vendor of the device (empty: others). CUDA copies such
memory to or from a pinned buffer in a host thread: 38.5 MB took 3.46 ms in a recording of an H100. HIP pins
the pages during the copy; the same 38.5 MB took 1.09 ms in a recording of an MI300X.
"""
_ROUNDING = 1e-12
"""Share of a node's FLOPs below which the rest after its contractions is a rounding error."""


@dataclass(frozen=True, slots=True, eq=False)
class _NodeTimes:
    """Times of one execution of each node [ns]: arithmetic on matrix and on vector units, memory traffic, and
    launch overhead. NaN if unknown.
    """

    matrix_ns: FloatArray
    vector_ns: FloatArray
    memory_ns: FloatArray
    overhead_ns: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Roofline model; fields are its options.

    ``transcendental_weight``: FLOPs per transcendental. ``use_useful_flops``: do not count multiplications by
    zeros of padding and dilation, as direct kernels avoid them; false counts all, by the specification.
    ``sort_passes``: number of times that a sort reads and writes its data. ``compute_efficiency`` and
    ``memory_efficiency``: shares of the peaks if the hardware file has no fit. ``default_dtype``: element
    type of nodes that do not state one (empty: the time of their arithmetic stays unknown). ``num_ranks``:
    number of ranks in collectives over all ranks, for graphs that do not state it (-1: unknown).
    ``algorithm``: algorithm that determines the number of latencies of collectives.
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
            raise UsageError(
                f"unknown collective algorithm {self.algorithm!r}", hint="use one of: auto, ring, tree"
            )
        for name in ("compute_efficiency", "memory_efficiency"):
            if getattr(self, name) <= 0:
                raise UsageError(
                    f"roofline: invalid option {name}={getattr(self, name):g}",
                    hint="use a share of the published peak, such as 0.7",
                )
        for name in ("transcendental_weight", "sort_passes"):
            if getattr(self, name) < 0:
                raise UsageError(
                    f"roofline: invalid option {name}={getattr(self, name):g}", hint="use 0 or more"
                )

    @property
    def name(self) -> str:
        """Name of the model: ``roofline``."""
        return "roofline"

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """Return the time of one execution of each node; see the module. O(nodes), vectorised."""
        findings = diagnostics if diagnostics is not None else Diagnostics()
        with np.errstate(invalid="ignore", over="ignore"):  # infinite costs of a broken input stay visible
            work = self._work(graph, device)
        arithmetic_ns = work.matrix_ns + work.vector_ns
        duration: FloatArray = work.overhead_ns + np.maximum(arithmetic_ns, work.memory_ns)
        bound = np.where(arithmetic_ns >= work.memory_ns, _COMPUTE, _MEMORY).astype(np.int8)
        bound[np.maximum(arithmetic_ns, work.memory_ns) < work.overhead_ns] = _OVERHEAD
        # The known part of a node with one unknown cost is a lower bound of its time.
        least_ns = work.overhead_ns + np.fmax(arithmetic_ns, work.memory_ns)
        # Nodes that this device computes: no messages, no nodes without a kind, no host nodes except on CPUs.
        computes: BoolArray = ~np.isin(
            graph.kind, [int(kind) for kind in (*_COMMUNICATION, NodeKind.INVALID)]
        )
        if device.kind != "cpu":
            computes &= graph.resource != int(Resource.HOST)
        duration[~computes] = np.nan
        for rows, time, limit in self._network(graph, device, work.overhead_ns, findings):
            duration[rows.node], bound[rows.node] = time, limit
        uncounted = np.isnan(graph.transcendentals) & ~np.isnan(graph.flops) & computes
        findings.info(
            "roofline.transcendentals-unknown",
            graph.name,
            "nodes state FLOPs but no transcendentals: counted as 0",
            count=int(uncounted.sum()),
        )
        free = takes_no_time(graph)
        duration = np.where(free, 0.0, duration)
        bound[free] = _FREE
        unknown = np.isnan(duration)
        _report_compute(
            graph, device, unknown & computes, np.isnan(work.matrix_ns + work.vector_ns), findings
        )
        invalid = graph.kind == int(NodeKind.INVALID)
        compute = graph.kind == int(NodeKind.COMPUTE)
        bare = ~(invalid | compute)
        bare[graph.collectives.node] = False
        bare[graph.p2p.node] = False
        for code, message, applies in (
            ("roofline.invalid-node", "the node has no kind", invalid),
            ("roofline.host-node", "the host runs it, not the device", compute),
            ("roofline.unknown-message", "its communication is unknown", bare),
        ):
            _report(graph, code, message, (unknown & ~computes) & applies, findings)
        _report_rates(graph, device, findings)
        bound[unknown] = -1
        return Estimate(
            hardware=device.name,
            estimators=(self.name,),
            bounds=BOUNDS,
            duration_ns=duration,
            low_ns=np.where(unknown & computes, least_ns, np.nan),
            high_ns=np.full(len(graph), np.nan),
            estimator=np.where(unknown, -1, 0).astype(np.int8),
            bound=bound,
            bases=(DATA_SHEET,),
            basis=np.where(unknown | free, -1, 0).astype(np.int16),
        )

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """Return the time of one execution of each operation, outside a graph. O(ops).

        ``use_useful_flops``, ``sort_passes``, ``default_dtype`` and ``num_ranks`` apply to graphs only.
        """
        times = peak_times(ops, device, transcendental_weight=self.transcendental_weight)
        # Shares of the peaks and launch [ns], looked up once per kind and scheme.
        table = np.empty((3, len(ops.kind.names), len(ops.scheme.names)))
        default = (self.compute_efficiency, self.memory_efficiency, device.launch_overhead_ns)
        table[:] = np.array(default)[:, None, None]
        for row, kind in enumerate(ops.kind.names):
            for column, name in enumerate(ops.scheme.names):
                scheme = find_scheme(name)
                dtype = scheme.rate_dtype if scheme else ""
                fit = device.efficiency(CLASS_OF_KIND[kind].name.lower(), dtype)
                if fit is not None:
                    values = np.array((fit.compute, fit.memory, fit.t0_ns))
                    table[:, row, column] = np.where(np.isnan(values), table[:, row, column], values)
        compute, memory, overhead_ns = table[:, ops.kind.row, ops.scheme.row]
        with np.errstate(invalid="ignore"):
            duration = overhead_ns + np.maximum(times.arithmetic_ns / compute, times.memory_ns / memory)
        rows = ops.kind.where("collective")
        if len(rows):
            part = ops.take(rows)
            codes = [int(COLLECTIVE_KINDS.get(name, -1)) for name in part.op.names]
            kinds = np.array(codes, np.int64)[part.op.row]
            ranks = part.dim("ranks")
            network_ns = collective_time_ns(
                np.maximum(kinds, 0),
                ranks,
                part.dim("message_bytes"),
                device,
                beyond_node=ranks > np.nan_to_num(part.dim("ranks_per_node"), nan=np.inf),
                algorithm=self.algorithm,
            )
            duration[rows] = overhead_ns[rows] + np.where(kinds < 0, np.nan, network_ns)
        if diagnostics is not None:
            diagnostics.warning(
                "roofline.unknown",
                device.name,
                "operations have no known cost, or the device has no rate for them",
                count=int(np.isnan(duration).sum()),
            )
        return Prediction.of(self.name, duration, basis=DATA_SHEET)

    def _work(self, graph: OpGraph, device: Device) -> _NodeTimes:
        """Return the times of arithmetic, memory traffic and launch of each node."""
        fits = Efficiencies.of(device, self.compute_efficiency, self.memory_efficiency)
        default = find_dtype(self.default_dtype) if self.default_dtype else None
        dtype = arithmetic_dtype(graph, UNKNOWN_DTYPE if default is None else default.code)
        matrix_ns, in_products = self._products(graph, device, fits)
        # FLOPs of each node outside its listed contractions.
        flops = graph.flops
        if self.use_useful_flops:
            flops = np.where(np.isnan(graph.useful_flops), graph.flops, graph.useful_flops)
        rest = np.maximum(graph.flops - in_products, 0.0)
        rest = np.where(rest <= _ROUNDING * in_products, 0.0, rest)
        flops = np.where(in_products > 0, rest, flops)
        flops = flops + self.transcendental_weight * transcendentals(graph)
        on_matrix = np.isin(graph.op_class, [int(op_class) for op_class in MATRIX_CLASSES])
        on_matrix &= in_products == 0
        rate = np.where(on_matrix, unit_rate(device, "matrix")[dtype], unit_rate(device, "vector")[dtype])
        rate = rate * fits.compute[graph.op_class, dtype]
        vector_ns = np.where(flops == 0, 0.0, flops / rate * 1e9)
        bandwidth = device.main_memory.bandwidth_bytes_per_s * fits.memory[graph.op_class, dtype]
        passes = np.where(graph.op_class == int(OpClass.SORT), self.sort_passes, 1.0)
        memory_ns = stored_bytes(graph, device) * passes / bandwidth * 1e9
        over_host = graph.op_class == int(OpClass.HOST)
        host_ns = np.full(len(graph), np.nan)  # traffic over the host link
        if (link := device.link("pcie")) is not None:
            latency_ns = 0.0 if isnan(link.latency_ns) else link.latency_ns
            host_ns = latency_ns + graph.bytes_moved / (host_payload(link) * link.bandwidth_bytes_per_s) * 1e9
            strings, copies = graph.strings, np.flatnonzero(over_host)
            limit_bytes_per_s = _PAGEABLE_BYTES_PER_S.get(device.vendor, _PAGEABLE_BYTES_PER_S[""])
            pageable = mapped(
                graph.name_id[copies],
                lambda row: _PAGEABLE_NAMES.search(strings[row]) is not None,
                np.bool_,
            )
            staged_ns = graph.bytes_moved[copies] / limit_bytes_per_s * 1e9
            host_ns[copies] = np.where(pageable, np.fmax(host_ns[copies], staged_ns), host_ns[copies])
        memory_ns = np.where(over_host, host_ns, memory_ns)
        return _NodeTimes(matrix_ns, vector_ns, memory_ns, fits.overhead_ns[graph.op_class, dtype])

    def _products(self, graph: OpGraph, device: Device, fits: Efficiencies) -> tuple[FloatArray, FloatArray]:
        """Return the time of the matmuls and convolutions of each node [ns], and their FLOPs including
        padding, as the specification counts them.
        """
        table = graph.contractions
        if not len(table):
            zeros = constant(0.0, len(graph))
            return zeros, zeros
        flops = table.useful_flops if self.use_useful_flops else table.flops
        op_class = graph.op_class[table.node]
        # Inside a fusion the efficiency of products applies, not that of fusions.
        listed = np.isin(op_class, [int(entry) for entry in MATRIX_CLASSES])
        op_class = np.where(listed, op_class, int(OpClass.CONTRACTION))
        rate = contraction_rate(table, device) * fits.compute[op_class, table.lhs]
        time = np.where(flops == 0, 0.0, flops / rate * 1e9)
        in_products = np.bincount(table.node, table.flops, len(graph)).astype(np.float64)
        return np.bincount(table.node, time, len(graph)).astype(np.float64), in_products

    def _network(
        self, graph: OpGraph, device: Device, overhead_ns: FloatArray, diagnostics: Diagnostics
    ) -> Iterator[tuple[NetworkCosts, FloatArray, NDArray[np.int8]]]:
        """Yield a tuple for all collectives, then one for all messages: the costs, the times including launch
        [ns], and the code of the resource that limits each.
        """
        collectives = collective_costs(graph, device, num_ranks=self.num_ranks, algorithm=self.algorithm)
        messages = message_costs(graph, device)
        bandwidth = device.main_memory.bandwidth_bytes_per_s * self.memory_efficiency
        for rows, payload in (
            (collectives, graph.collectives.comm_bytes),
            (messages, graph.p2p.comm_bytes),
        ):
            # Local: a copy within the memory of the rank, read and written.
            moved = graph.bytes_moved[rows.node]
            with np.errstate(over="ignore"):
                copy_ns = np.where(np.isnan(moved), 2 * payload, moved) / bandwidth * 1e9
            time = overhead_ns[rows.node] + np.where(rows.local, copy_ns, rows.duration_ns)
            _report_network(graph, device, rows, diagnostics)
            yield rows, time, np.where(rows.local, _MEMORY, _NETWORK).astype(np.int8)


_COMMUNICATION = (NodeKind.COLLECTIVE, NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE)


_NARROW = 16
"""Bits below which only some devices multiply a type."""


def _report_compute(
    graph: OpGraph, device: Device, unknown: BoolArray, no_rate: BoolArray, diagnostics: Diagnostics
) -> None:
    """Report why compute nodes have no time. For each node, only the first reason that applies is
    reported.
    """
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
        _report(graph, code, message, rest & applies, diagnostics)
        rest = rest & ~applies


def _report_rates(graph: OpGraph, device: Device, diagnostics: Diagnostics) -> None:
    """Report the rates that are used for products of narrow or different types for which the device lists no
    rate.
    """
    table = graph.contractions
    is_narrow = np.array([entry.bits < _NARROW for entry in DTYPES] + [False])
    rows = np.flatnonzero((table.lhs != table.rhs) | is_narrow[table.lhs])
    if not len(rows):
        return
    choices, index = contraction_choices(table, device)
    rules: dict[str, int] = {}
    for which, count in zip(*np.unique(index[rows], return_counts=True), strict=True):
        choice = choices[int(which)]
        if choice is not None and not choice.exact:
            rules[choice.rule] = rules.get(choice.rule, 0) + int(count)
    for rule, count in rules.items():
        diagnostics.warning("roofline.rate-fallback", device.name, rule, count=count)


def _report_network(graph: OpGraph, device: Device, rows: NetworkCosts, diagnostics: Diagnostics) -> None:
    """Report why collectives and messages have no time, from the reasons in their cost rows."""
    unknown = np.isnan(rows.duration_ns) & ~rows.no_group & ~rows.no_link
    reasons = (
        ("roofline.unknown-group", "the ranks of the group are unknown (state num_ranks)", rows.no_group),
        ("roofline.no-link", f"{device.name} has no link that leaves its scale-up domain", rows.no_link),
        ("roofline.unknown-message", "the kind or the bytes of the communication are unknown", unknown),
    )
    for code, message, applies in reasons:
        mask = np.zeros(len(graph), np.bool_)
        mask[rows.node[applies]] = True
        _report(graph, code, message, mask, diagnostics)


def _report(graph: OpGraph, code: str, message: str, nodes: BoolArray, diagnostics: Diagnostics) -> None:
    """Report one warning per operation name, with the number of its nodes and the location of the first."""
    rows, first, counts = np.unique(graph.op_id[nodes], return_index=True, return_counts=True)
    where = np.flatnonzero(nodes)
    for row, index, count in zip(rows.tolist(), first.tolist(), counts.tolist(), strict=True):
        node = int(where[index])
        location = graph.strings[int(graph.source_id[node])] or f"node {int(graph.id[node])}"
        operation = graph.strings[row] or "unnamed node"
        diagnostics.warning(code, location, f"{operation}: no duration, {message}", count=count)
