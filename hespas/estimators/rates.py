"""Rates of a device's data sheet for all nodes of a graph: arithmetic, memory, links and energy.

Rates are looked up once per distinct key. A graph of a million nodes has a few element types and operation
classes, so the rules of :mod:`hespas.hardware.peaks` run a few times, and the results are indexed.

Energies of a step are a floor and a ceiling. The floor counts arithmetic (without transcendentals, registers
and wires) and traffic to main memory, if the device's file has their energies; the ceiling is the board at
its thermal design power while the operations run one after another.

Collectives and messages take latency and bandwidth (alpha-beta) over the device's links. Sent bytes are those
of bandwidth-optimal algorithms (Thakur, Rabenseifner, Gropp: "Optimization of collective communication
operations in MPICH", 2005). A group inside the scale-up domain uses that link, any other the scale-out link
for all of its bytes; contention and hierarchy are left to a simulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isnan, nan
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.files.documents import Figure
from hespas.graph import (
    DTYPES,
    UNKNOWN_DTYPE,
    CollectiveKind,
    ContractionTable,
    DTypeKind,
    GroupSet,
    OpClass,
    OpGraph,
    Permutation,
    StridedGroups,
)
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.errors import UnsupportedError
from hespas.graph.passes import known_sum
from hespas.hardware import Device, Link, PeakChoice, host_payload, peak_for, product_peak
from hespas.hardware.devices import Unit
from hespas.hardware.peaks import energy_pj_per_flop, tdp_energy_j
from hespas.operations import (
    MATRIX_KINDS,
    Operations,
    arithmetic_dtype,
    between_ranks,
    element_bytes,
    find_scheme,
    group_sizes,
)

__all__ = [
    "COLLECTIVE_KINDS",
    "Algorithm",
    "Efficiencies",
    "EnergyPart",
    "NetworkCosts",
    "OperationCosts",
    "PeakTimes",
    "StepEnergy",
    "collective_costs",
    "collective_time_ns",
    "contraction_choices",
    "contraction_rate",
    "group_ranks_per_node",
    "message_costs",
    "message_ranks_per_node",
    "node_energy_j",
    "peak_times",
    "rate_flops_per_s",
    "roof_ns",
    "step_energy",
    "stored_bytes",
    "unit_rate",
    "within_roof",
]

COLLECTIVE_KINDS: Mapping[str, CollectiveKind] = {kind.name.lower(): kind for kind in CollectiveKind}
"""Collective kinds by their names in tables of operations."""

_BYTE = 8


def contraction_rate(table: ContractionTable, device: Device) -> FloatArray:
    """Return the FLOP/s of each matmul or convolution in the table, shape ``(rows,)``; NaN if the device has
    no rate for the operand types.

    The rate depends on the two operand types (:func:`~hespas.hardware.product_peak`). It depends on the
    accumulator type only if the device has several rates for these operands.
    """
    choices, index = contraction_choices(table, device)
    rates = [nan if choice is None else choice.flops_per_s for choice in choices]
    return np.array(rates, np.float64)[index]


def contraction_choices(
    table: ContractionTable, device: Device
) -> tuple[list[PeakChoice | None], NDArray[np.int64]]:
    """Return the rates of the distinct combinations of types in the table (None: the device has no rate), and
    for each row the index of its rate.
    """
    columns = (table.lhs, table.rhs, table.accumulator, table.products)
    key = np.zeros(len(table), np.int64)
    for column in columns:  # a column fits 16 bits, so a row's key is one integer
        key = key << 16 | column.astype(np.int64) & 0xFFFF
    _, first, index = np.unique(key, return_index=True, return_inverse=True)
    distinct = [tuple(int(column[row]) for column in columns) for row in first.tolist()]
    choices: list[PeakChoice | None] = []
    for lhs, rhs, accumulator, products in distinct:
        choice = None
        if UNKNOWN_DTYPE not in (lhs, rhs):
            names = (DTYPES[lhs].name, DTYPES[rhs].name)
            result = "" if accumulator == UNKNOWN_DTYPE else DTYPES[accumulator].name
            with suppress(UnsupportedError):
                choice = product_peak(device, *names, accumulator=result, products=max(products, 1))
        choices.append(choice)
    return choices, index.reshape(-1).astype(np.int64)


def stored_bytes(graph: OpGraph, device: Device) -> FloatArray:
    """Return the bytes that each node reads and writes per execution on this device, shape ``(nodes,)``.

    A graph counts elements of less than a byte as packed. If the device stores such an element in a whole
    byte, the traffic of a node grows in proportion to the storage of its operands and results.
    """
    if device.subbyte_storage == "packed":
        return graph.bytes_moved
    factor = np.ones(len(graph))
    packed, apart = np.zeros(len(graph)), np.zeros(len(graph))
    types = graph.types
    extra = np.zeros(len(types))  # bytes beyond the packed storage, with a byte per element
    for row in range(len(types)):
        element, elements = types.dtype_of(row), types.elements(row)
        if (
            element is not None
            and element.kind is not DTypeKind.BOOL
            and 0 < element.bits < _BYTE
            and elements >= 0
        ):
            extra[row] = elements - -(-elements * element.bits // _BYTE)
    for lists in (graph.operands, graph.results):
        packed += np.bincount(lists.row_ids, types.bytes[lists.values], len(graph))
        apart += np.bincount(lists.row_ids, extra[lists.values], len(graph))
    grows = (apart > 0) & (packed > 0)
    factor[grows] += apart[grows] / packed[grows]
    return graph.bytes_moved * factor


def unit_rate(device: Device, unit: Unit) -> FloatArray:
    """Return the FLOP/s of each element type on the matrix or vector units, shape ``(types + 1,)``; the last
    entry is for an unknown type (-1) and is NaN.
    """
    rates = np.full(len(DTYPES) + 1, nan)
    for code, entry in enumerate(DTYPES):
        with suppress(UnsupportedError):
            rates[code] = peak_for(device, unit, entry.name, accumulator="", products=1).flops_per_s
    return rates


@dataclass(frozen=True, slots=True, eq=False)
class Efficiencies:
    """Efficiencies of a device by operation class and element type, as tables of shape ``(classes, types +
    1)``. The last column is for an unknown type.

    ``compute`` and ``memory`` are fractions of the peak rates. ``overhead_ns`` is the time before the work
    starts. ``op_class`` in a hardware file is the lower-case name of an
    :class:`~hespas.graph.opgraph.OpClass`.
    """

    compute: FloatArray
    memory: FloatArray
    overhead_ns: FloatArray

    @classmethod
    def of(cls, device: Device, compute: float, memory: float) -> Efficiencies:
        """Return the fitted efficiencies of ``device``. Without a fit they are ``compute`` and ``memory``,
        with the launch overhead of the device.
        """
        shape = (len(OpClass), len(DTYPES) + 1)
        tables = cls(
            np.full(shape, compute), np.full(shape, memory), np.full(shape, device.launch_overhead_ns)
        )
        if not device.efficiencies:
            return tables
        names = [*(entry.name for entry in DTYPES), ""]
        for op_class in OpClass:
            for column, name in enumerate(names):
                fit = device.efficiency(op_class.name.lower(), name)
                if fit is None:
                    continue
                values = (fit.compute, fit.memory, fit.t0_ns)
                for table, value in zip(
                    (tables.compute, tables.memory, tables.overhead_ns), values, strict=True
                ):
                    if not isnan(value):
                        table[int(op_class), column] = value
        return tables


@dataclass(frozen=True, slots=True, eq=False)
class PeakTimes:
    """Times of arithmetic and of memory traffic at the published peaks, columns of shape ``(ops,)`` [ns]; NaN
    where a cost or a peak is unknown.
    """

    arithmetic_ns: FloatArray
    memory_ns: FloatArray

    @property
    def roofline_ns(self) -> FloatArray:
        """Return the longer of the two times, without launch overhead; if only one is known, that time."""
        return np.fmax(self.arithmetic_ns, self.memory_ns)


def rate_flops_per_s(device: Device, scheme: str, *, matrix: bool) -> float:
    """Return the peak FLOP/s for operations in a number format, on the matrix or the vector units; NaN if the
    device lists none.
    """
    known_scheme = find_scheme(scheme)
    if known_scheme is None:
        return nan
    try:
        unit: Unit = "matrix" if matrix else "vector"
        return peak_for(device, unit, known_scheme.rate_dtype, products=known_scheme.products).flops_per_s
    except UnsupportedError:
        return nan


def peak_times(ops: Operations, device: Device, *, transcendental_weight: float = 8.0) -> PeakTimes:
    """Return the times at the peaks: FLOPs over the peak of the number format, and bytes over the bandwidth
    of the main memory. O(ops).
    """
    matrix = np.array([name in MATRIX_KINDS for name in ops.kind.names], np.bool_)[ops.kind.row]
    rates = np.array(
        [
            [rate_flops_per_s(device, scheme, matrix=unit) for scheme in ops.scheme.names]
            for unit in (False, True)
        ]
    ).reshape(2, len(ops.scheme.names))
    flops = ops.flops + transcendental_weight * np.nan_to_num(ops.transcendentals)
    with np.errstate(invalid="ignore"):
        arithmetic = np.where(flops == 0, 0.0, flops / rates[matrix.astype(np.int64), ops.scheme.row] * 1e9)
    memory = ops.bytes_moved / device.main_memory.bandwidth_bytes_per_s * 1e9
    return PeakTimes(arithmetic, memory)


_WINOGRAD = 4.0
"""Multiplications saved by F(4x4, 3x3) (Lavin, Gray: "Fast algorithms for convolutional neural networks",
CVPR 2016); larger tiles lose too much accuracy to ship in libraries.
"""
_CACHE_MARGIN = 1.3
"""Margin for cache bandwidths from micro-benchmarks, which are up to a quarter below the peak."""


def roof_ns(ops: Operations, device: Device) -> FloatArray:
    """Return the shortest possible time of each operation on a device [ns], shape ``(ops,)``; 0 if it is
    unknown.

    It is the longest of three times: the arithmetic at the dense peak (for convolutions after fast
    algorithms), the bytes beyond the size of the largest cache at the bandwidth of the main memory, and all
    bytes at the bandwidth of that cache, if the device file states it. Bytes that fit the cache may have been
    left there by an earlier operation, so they do not count as memory traffic. The number of experts that
    receive tokens is unknown, so only the experts of one token are counted. O(ops).
    """
    kinds = np.array([name in MATRIX_KINDS for name in ops.kind.names], np.bool_)[ops.kind.row]
    rates = np.array(
        [
            [rate_flops_per_s(device, scheme, matrix=unit) for scheme in ops.scheme.names]
            for unit in (False, True)
        ]
    ).reshape(2, len(ops.scheme.names))
    # A fusion may run its matmuls on the matrix units and the rest on the vector units.
    most: FloatArray = np.fmax(rates[0], rates[1])
    rate: FloatArray = np.where(kinds, rates[1][ops.scheme.row], most[ops.scheme.row])
    saved = np.where(ops.dim("kernel", 1.0) > 1, _WINOGRAD, 1.0)
    moved = ops.bytes_moved
    mixtures = ops.kind.where("moe")
    if len(mixtures):
        part = ops.take(mixtures)
        share = part.dim("tensor_parallel") * part.dim("expert_parallel")
        weights = part.dim("matrices") * part.dim("hidden") * part.dim("inter") / share
        least_bytes = part.dim("topk") * weights * element_bytes(part.scheme, "weight")
        moved = moved.copy()
        moved[mixtures] = np.fmin(moved[mixtures], least_bytes)
    caches = [memory for memory in device.memories if memory.level == "cache" and memory.capacity_bytes > 0]
    largest = max(caches, key=lambda memory: memory.capacity_bytes, default=None)
    held = 0.0 if largest is None else float(largest.capacity_bytes)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        times: list[FloatArray] = [ops.flops / rate / saved * 1e9]
        times += [np.maximum(moved - held, 0.0) / device.main_memory.bandwidth_bytes_per_s * 1e9]
        if largest is not None:
            times += [moved / (largest.bandwidth_bytes_per_s * _CACHE_MARGIN) * 1e9]
    least: FloatArray = np.nan_to_num(np.fmax.reduce(times), nan=0.0, posinf=0.0)
    return least


def within_roof(times_ns: FloatArray, ops: Operations, device: Device) -> FloatArray:
    """Return times and intervals of shape ``(3, ops)`` [ns], none of them below :func:`roof_ns`. O(ops)."""
    return np.where(np.isnan(times_ns), times_ns, np.maximum(times_ns, roof_ns(ops, device)))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class OperationCosts:
    """Costs of one execution of each node, from an estimator that models energy. ``energy_j`` has shape
    ``(parts, nodes)``. ``cycles`` are of the array that multiplies matrices, ``utilization`` is the share of
    its multipliers that do useful work (0..1); both are NaN for other operations.
    """

    parts: tuple[str, ...]
    energy_j: FloatArray
    cycles: FloatArray
    utilization: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyPart:
    """Energy of one part of a device in a step [J], such as ``adc``."""

    part: str
    energy_j: Figure


@dataclass(frozen=True, slots=True)
class StepEnergy:
    """Energy of one step on one rank [J]; NaN if unknown.

    ``at_least_j`` is a lower bound: the energy of the components for which the device file has figures.
    ``at_tdp_j`` is the time of all operations in sequence, without waits, multiplied by the thermal design
    power of the board, ``tdp_w`` [W].

    Estimators that model energy give ``parts``, whose sum is ``at_least_j``, and the ``array_cycles`` of
    matrix products with the ``array_utilization`` (0..1) over these cycles.
    """

    at_least_j: Figure
    at_tdp_j: Figure
    tdp_w: Figure
    parts: tuple[EnergyPart, ...] = ()
    array_cycles: Figure = nan
    array_utilization: Figure = nan


@np.errstate(over="ignore", invalid="ignore")  # sums past what a float holds are infinite
def step_energy(
    graph: OpGraph, device: Device, duration_ns: float, costs: OperationCosts | None = None
) -> StepEnergy:
    """Return the energy of one step whose operations take ``duration_ns`` in sequence, by the ``costs`` of
    its operations or else by the figures of the device file. O(nodes).
    """
    tdp_j = tdp_energy_j(device, duration_ns)
    if costs is None:
        least_j = known_sum(node_energy_j(graph, device) * graph.executions)
        return StepEnergy(least_j, tdp_j, device.tdp_w)
    energies_j = [known_sum(energy_j * graph.executions) for energy_j in costs.energy_j]
    parts = (EnergyPart(part=part, energy_j=j) for part, j in zip(costs.parts, energies_j, strict=True))
    cycles = costs.cycles * graph.executions
    total_cycles = known_sum(cycles)
    used = known_sum(cycles * costs.utilization) / total_cycles if total_cycles else nan
    least_j = known_sum(np.array(energies_j))
    return StepEnergy(least_j, tdp_j, device.tdp_w, tuple(parts), total_cycles, used)


@np.errstate(over="ignore", invalid="ignore")
def node_energy_j(graph: OpGraph, device: Device) -> FloatArray:
    """Return the energy [J] of one execution of each node by the figures of the device file, shape
    ``(nodes,)``; NaN without figures.
    """
    table = graph.contractions
    parts = [stored_bytes(graph, device) * device.main_memory.energy_pj_per_byte]
    in_products = np.zeros(len(graph))
    if len(table):
        choices, index = contraction_choices(table, device)
        energies = [
            nan if choice is None else choice.peak.energy_pj_per_flop * choice.products for choice in choices
        ]
        in_products = np.bincount(table.node, table.flops, len(graph)).astype(np.float64)
        products = np.bincount(table.node, table.flops * np.array(energies)[index], len(graph))
        parts.append(np.where(in_products > 0, products, 0.0))
    vector = [energy_pj_per_flop(device, "vector", entry.name) for entry in DTYPES]
    rest = np.maximum(graph.flops - in_products, 0.0)
    parts.append(np.where(rest == 0, 0.0, rest * np.array([*vector, nan])[arithmetic_dtype(graph, -1)]))
    total = np.nansum(parts, axis=0)
    # A node without traffic and arithmetic takes no energy; an unknown part is unknown, not 0.
    return np.where((total == 0) & np.isnan(parts).any(axis=0), nan, total) * 1e-12


Algorithm = Literal["auto", "ring", "tree"]
"""Latencies of a collective: N-1 hops of a ring, or log2 N exchanges; ``auto``: by topology of the link."""


_MOST_GROUPS = 1 << 22
"""Limit of groups that are tested one by one; more than any machine has."""


class _TrafficRule(NamedTuple):
    """Traffic of a collective of N ranks with a payload of S bytes.

    A rank sends ``(per_share (N-1)/N + per_peer (N-1) + whole) S`` bytes. A ring has ``ring_hops`` latencies
    for each of its N - 1 hops. A tree has ``tree_levels`` latencies per level and ``tree_steps`` more.
    """

    per_share: float
    per_peer: float
    whole: float
    ring_hops: float
    tree_levels: float
    tree_steps: float


# S is the payload by Chakra's definition: the shard for gathers, the whole buffer otherwise. All-to-alls
# exchange with all peers at once where every pair has a path.
_RULES: dict[CollectiveKind, _TrafficRule] = {
    CollectiveKind.ALL_REDUCE: _TrafficRule(2, 0, 0, 2, 2, 0),
    CollectiveKind.ALL_GATHER: _TrafficRule(0, 1, 0, 1, 1, 0),
    CollectiveKind.REDUCE_SCATTER: _TrafficRule(1, 0, 0, 1, 1, 0),
    CollectiveKind.REDUCE_SCATTER_BLOCK: _TrafficRule(1, 0, 0, 1, 1, 0),
    CollectiveKind.ALL_TO_ALL: _TrafficRule(1, 0, 0, 1, 0, 1),
    CollectiveKind.RAGGED_ALL_TO_ALL: _TrafficRule(1, 0, 0, 1, 0, 1),
    CollectiveKind.BROADCAST: _TrafficRule(0, 0, 1, 1, 1, 0),
    CollectiveKind.REDUCE: _TrafficRule(0, 0, 1, 1, 1, 0),
    CollectiveKind.GATHER: _TrafficRule(0, 1, 0, 1, 1, 0),
    CollectiveKind.SCATTER: _TrafficRule(1, 0, 0, 1, 1, 0),
    CollectiveKind.BARRIER: _TrafficRule(0, 0, 0, 1, 1, 0),
}


@dataclass(frozen=True, slots=True, eq=False)
class NetworkCosts:
    """Times of collectives or messages, one row each, without launch overhead. ``node`` is the node of a row.

    ``duration_ns`` is NaN if the group is unknown (``no_group``), if the device has no link (``no_link``), or
    if the size is unknown. ``local`` is True for rows that use no network (groups of one rank, messages
    without a receiver): their time is 0.
    """

    node: NDArray[np.int32]
    duration_ns: FloatArray
    no_group: NDArray[np.bool_]
    no_link: NDArray[np.bool_]
    local: NDArray[np.bool_]


def _choose_link(device: Device, fits: bool) -> Link | None:
    """Return the link that a group of ranks uses: scale-up if the group ``fits`` in its domain, else
    scale-out. The host link is used if the device has no other.
    """
    scale_up, scale_out = device.link("scale_up"), device.link("scale_out")
    if fits and scale_up is not None:
        return scale_up
    if scale_out is not None:
        return scale_out
    return None if scale_up is not None else device.link("pcie")


def _domain(device: Device) -> int:
    """Return the number of devices that the scale-up links connect: 1 for a device with only a scale-out
    network, -1 for no limit.

    A device that only has links to its host reaches all other devices through the host.
    """
    link = device.link("scale_up")
    if link is None:
        return 1 if device.link("scale_out") is not None else -1
    return link.devices_per_domain


def _groups_fit(groups: GroupSet, domain: int) -> bool:
    """Return True if every group lies within one scale-up domain: a block of ``domain`` consecutive ranks.
    O(groups).
    """
    if domain < 0 or groups.max_group_size <= 1:
        return True
    if groups.num_groups > _MOST_GROUPS:
        return False
    if not isinstance(groups, StridedGroups):
        return all(min(row) // domain == max(row) // domain for row in groups.rows if row)
    first = np.zeros(1, np.int64)
    for size, stride in groups.group_digits:
        first = (first[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    first = groups.base + first
    last = first + sum((size - 1) * stride for size, stride in groups.member_digits)
    return bool((first // domain == last // domain).all())


def _pairs_fit(permutation: Permutation, domain: int) -> bool:
    """Return True if sender and receiver of every pair are in the same scale-up domain of ``domain``
    consecutive ranks. O(ranks).
    """
    return domain < 0 or all(source // domain == target // domain for source, target in permutation)


def _is_ring(link: Link, algorithm: Algorithm) -> bool:
    if algorithm != "auto":
        return algorithm == "ring"
    return link.topology in ("ring", "torus2d", "torus3d")


def group_ranks_per_node(graph: OpGraph, device: Device, *, num_ranks: int) -> FloatArray:
    """Return for each group set the number of ranks that share a node, shape ``(group sets + 1,)``. It is the
    largest number of ranks of the first group that are on one node.

    A node is the device's scale-up domain. If every group fits in a node, the result is the size of the
    group. The last entry is for the group of all ranks, as in :func:`group_sizes`. O(group sizes).
    """
    domain = _domain(device)
    sets: list[GroupSet | None] = [*graph.group_sets]
    sets.append(StridedGroups.all_ranks(num_ranks) if num_ranks > 0 else None)
    most = group_sizes(graph, num_ranks=num_ranks)
    for row, groups in enumerate(sets):
        if groups is None or _groups_fit(groups, domain):
            continue
        if isinstance(groups, StridedGroups) and not groups.base and len(groups.member_digits) == 1:
            ((size, stride),) = groups.member_digits  # evenly spaced ranks: O(1)
            if domain % stride == 0:
                most[row] = float(min(size, domain // stride))
                continue
        _, count = np.unique(np.asarray(groups.members(0), np.int64) // domain, return_counts=True)
        most[row] = float(count.max())
    return most


def message_ranks_per_node(graph: OpGraph, device: Device) -> FloatArray:
    """Return for each message the number of its two ranks that share a node (the device's scale-up domain),
    shape ``(messages,)``.

    It is 2 if the sender and receiver of every pair are on the same node, else 1. A message without a stated
    peer is assumed to leave the node, as in :func:`message_costs`.
    """
    domain = _domain(device)
    within = np.array([*(_pairs_fit(pairs, domain) for pairs in graph.permutations), False])
    return np.where(within[graph.p2p.permutation], 2.0, 1.0)


def collective_costs(graph: OpGraph, device: Device, *, num_ranks: int, algorithm: Algorithm) -> NetworkCosts:
    """Return the time of each collective of a graph, one row per row of the graph's collective table.

    ``num_ranks`` is the number of ranks of groups that are not stated (-1: unknown, so the time stays
    unknown). O(rows + groups).
    """
    table = graph.collectives
    domain = _domain(device)
    # One row more than group sets: -1 (all ranks) is the index of the last.
    sets: list[GroupSet | None] = [*graph.group_sets]
    sets.append(StridedGroups.all_ranks(num_ranks) if num_ranks > 0 else None)
    sizes = group_sizes(graph, num_ranks=num_ranks)
    fits = [groups is not None and _groups_fit(groups, domain) for groups in sets]
    links = [_choose_link(device, fit) for fit in fits]
    beta = np.array([nan if link is None else 1e9 / link.bandwidth_bytes_per_s for link in links])
    alpha = np.array([nan if link is None else link.latency_ns for link in links])
    ring = np.array([link is not None and _is_ring(link, algorithm) for link in links])

    members = sizes[table.group_set]
    sent, hops = _traffic(table.kind.astype(np.int64), table.comm_bytes, members, ring[table.group_set])
    latency = np.where(np.isnan(alpha), 0.0, alpha)[table.group_set]
    local = members <= 1
    duration = np.where(local, 0.0, hops * latency + sent * beta[table.group_set])
    no_link = np.isnan(beta)[table.group_set] & ~np.isnan(members) & ~local
    return NetworkCosts(table.node, duration, np.isnan(members), no_link, local)


def collective_time_ns(
    kind: IntArray,
    members: FloatArray,
    payload: FloatArray,
    device: Device,
    *,
    beyond_node: BoolArray,
    algorithm: Algorithm = "auto",
) -> FloatArray:
    """Return the time of collectives [ns], shape ``(rows,)``; NaN without a link or a rule.

    ``kind`` is a :class:`CollectiveKind`, ``members`` the number of ranks in the group, ``payload`` the bytes
    by Chakra's definition. ``beyond_node`` is True if the group leaves its node.
    """
    domain = _domain(device)
    fits = ~beyond_node & ((members <= domain) if domain >= 0 else np.ones(len(members), np.bool_))
    links = [_choose_link(device, fit) for fit in (False, True)]
    beta = np.array([nan if link is None else 1e9 / link.bandwidth_bytes_per_s for link in links])
    alpha = np.nan_to_num(np.array([nan if link is None else link.latency_ns for link in links]))
    ring = np.array([link is not None and _is_ring(link, algorithm) for link in links])
    index = fits.astype(np.int64)
    sent, hops = _traffic(kind, payload, members, ring[index])
    return np.where(members <= 1, 0.0, hops * alpha[index] + sent * beta[index])


def _traffic(
    kind: IntArray, payload: FloatArray, members: FloatArray, ring: BoolArray
) -> tuple[FloatArray, FloatArray]:
    """Return for each collective the bytes that each rank sends, and the number of network latencies that
    follow one another. Both are NaN for kinds without a rule.
    """
    rules: FloatArray = np.full((len(CollectiveKind), len(_TrafficRule._fields)), nan)
    for collective, rule in _RULES.items():
        rules[int(collective)] = rule
    row: FloatArray = rules[kind]
    peers = members - 1
    whole = np.where(kind == int(CollectiveKind.BARRIER), 0.0, payload)
    sent = (row[:, 0] * peers / np.maximum(members, 1) + row[:, 1] * peers + row[:, 2]) * whole
    tree = row[:, 4] * np.ceil(np.log2(np.maximum(members, 1))) + row[:, 5]
    return sent, np.where(ring, row[:, 3] * peers, tree)


def message_costs(graph: OpGraph, device: Device) -> NetworkCosts:
    """Return the time of each point-to-point message of a graph: one latency plus the bytes over one link of
    the device.

    Host transfers use the host link; a message without a stated peer is assumed to leave the domain.
    """
    table = graph.p2p
    domain = _domain(device)
    links = [_choose_link(device, _pairs_fit(p, domain)) for p in graph.permutations]
    links += [_choose_link(device, fits=False) or device.link("scale_up"), device.link("pcie")]
    # Rows: the permutations, then "peer not stated" (-1 in the table, which would index the next), then host.
    unstated, host = len(links) - 2, len(links) - 1
    row = np.where(table.permutation < 0, unstated, table.permutation)
    row = np.where(table.host, host, row)
    # A message uses all links of a device behind a switch, one link of a ring or torus.
    beta = np.full(len(links), nan)
    for index, link in enumerate(links):
        if link is None:
            continue
        bandwidth = link.bandwidth_bytes_per_s
        if link.topology not in ("switch", "fully_connected") and not isnan(link.link_bandwidth_bytes_per_s):
            bandwidth = link.link_bandwidth_bytes_per_s
        beta[index] = 1e9 / (bandwidth * (host_payload(link) if index == host else 1.0))
    alpha = np.array([nan if link is None else link.latency_ns for link in links])
    local = ~(table.host | between_ranks(graph))
    duration = np.nan_to_num(alpha)[row] + table.comm_bytes * beta[row]
    no_link = np.isnan(beta)[row] & ~local
    no_group = np.zeros(len(table), np.bool_)
    return NetworkCosts(table.node, np.where(local, 0.0, duration), no_group, no_link, local)
