"""Rates of a device looked up once per distinct key, applied to whole columns.

A graph of a million nodes has a handful of element types and operation classes, so the rules of
:mod:`hespas.hardware.peaks` run a handful of times and the rest is indexing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan, nan

import numpy as np
from numpy.typing import NDArray

from hespas.graph import DTYPES, UNKNOWN_DTYPE, ContractionTable, DType, DTypeKind, OpClass, OpGraph
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UnsupportedError
from hespas.graph.passes import known_sum
from hespas.hardware import Device, PeakChoice, peak_for, product_peak
from hespas.hardware.model import Unit
from hespas.hardware.peaks import energy_pj_per_flop, tdp_energy_j
from hespas.operations import MATRIX_KINDS, Operations, arithmetic_dtype, find_scheme

__all__ = [
    "Efficiencies",
    "PeakTimes",
    "StepEnergy",
    "contraction_choices",
    "contraction_rate",
    "node_energy_j",
    "peak_times",
    "rate_flops_per_s",
    "step_energy",
    "stored_bytes",
    "unit_rate",
]

_BYTE = 8


def _flops_per_s(device: Device, unit: Unit, code: int, accumulator: int, products: int) -> float:
    """The rate of one element type, NaN where it is unknown or the device has none."""
    if code == UNKNOWN_DTYPE:
        return nan
    result = "" if accumulator == UNKNOWN_DTYPE else DTYPES[accumulator].name
    try:
        choice = peak_for(device, unit, DTYPES[code].name, accumulator=result, products=products)
    except UnsupportedError:
        return nan
    return choice.flops_per_s


def contraction_rate(table: ContractionTable, device: Device) -> FloatArray:
    """FLOP/s of each row, shape ``(rows,)``; NaN where the device has no rate for the operands.

    The two operand types decide (:func:`~hespas.hardware.product_peak`); the accumulator only picks between
    rates of one pair.
    """
    choices, place = contraction_choices(table, device)
    return np.array([nan if each is None else each.flops_per_s for each in choices], np.float64)[place]


def contraction_choices(
    table: ContractionTable, device: Device
) -> tuple[list[PeakChoice | None], NDArray[np.int64]]:
    """The rates that distinct rows run at (None: the device has none), and which of them each row has."""
    columns = (table.lhs, table.rhs, table.accumulator, table.products)
    key = np.zeros(len(table), np.int64)
    for column in columns:  # each fits 16 bits, so a row's key is one integer
        key = key << 16 | column.astype(np.int64) & 0xFFFF
    _, first, place = np.unique(key, return_index=True, return_inverse=True)
    distinct = [tuple(int(column[row]) for column in columns) for row in first.tolist()]
    return [_product_choice(device, *each) for each in distinct], place.reshape(-1).astype(np.int64)


def _product_choice(device: Device, lhs: int, rhs: int, accumulator: int, products: int) -> PeakChoice | None:
    if UNKNOWN_DTYPE in (lhs, rhs):
        return None
    names = (DTYPES[lhs].name, DTYPES[rhs].name)
    result = "" if accumulator == UNKNOWN_DTYPE else DTYPES[accumulator].name
    try:
        return product_peak(device, *names, accumulator=result, products=max(products, 1))
    except UnsupportedError:
        return None


def stored_bytes(graph: OpGraph, device: Device) -> FloatArray:
    """Bytes read plus written per execution on this device, shape ``(nodes,)``.

    A graph counts elements of less than a byte packed. Where the device stores a byte each, a node's traffic
    grows as the storage of its operands and results does.
    """
    if device.subbyte_storage == "packed":
        return graph.bytes_moved
    factor = np.ones(len(graph))
    packed, apart = np.zeros(len(graph)), np.zeros(len(graph))
    types = graph.types
    extra = np.array([_unpacked(types.dtype_of(row), types.elements(row)) for row in range(len(types))])
    for lists in (graph.operands, graph.results):
        packed += np.bincount(lists.row_ids, types.bytes[lists.values], len(graph))
        apart += np.bincount(lists.row_ids, extra[lists.values], len(graph))
    grows = (apart > 0) & (packed > 0)
    factor[grows] += apart[grows] / packed[grows]
    return graph.bytes_moved * factor


def _unpacked(element: DType | None, elements: int) -> float:
    """Bytes that elements take beyond their packed storage, a byte each."""
    if element is None or element.kind is DTypeKind.BOOL or not 0 < element.bits < _BYTE or elements < 0:
        return 0.0
    return float(elements - -(-elements * element.bits // _BYTE))


def unit_rate(device: Device, unit: Unit) -> FloatArray:
    """FLOP/s of each element type on one unit, shape ``(types + 1,)``; the last row (-1) is NaN."""
    codes = [entry.code for entry in DTYPES]
    return np.array([*(_flops_per_s(device, unit, code, UNKNOWN_DTYPE, 1) for code in codes), nan])


@dataclass(frozen=True, slots=True, eq=False)
class Efficiencies:
    """Fitted efficiencies of a device as tables of shape ``(classes, types + 1)``; the last type is unknown.

    ``op_class`` of a hardware file's row is a name of :class:`~hespas.graph.opgraph.OpClass` in lower case.

    ``compute`` and ``memory`` are fractions of the peak, ``overhead_ns`` the time before work starts.
    """

    compute: FloatArray
    memory: FloatArray
    overhead_ns: FloatArray

    @classmethod
    def of(cls, device: Device, compute: float, memory: float) -> Efficiencies:
        """The fits of ``device``; ``compute``, ``memory`` and its launch overhead stand in where none is."""
        shape = (len(OpClass), len(DTYPES) + 1)
        tables = cls(
            np.full(shape, compute), np.full(shape, memory), np.full(shape, device.launch_overhead_ns)
        )
        if not device.efficiencies:
            return tables
        names = [*(entry.name for entry in DTYPES), ""]
        for op_class in OpClass:
            for column, name in enumerate(names):
                tables._fill(device, op_class, column, name)
        return tables

    def _fill(self, device: Device, op_class: OpClass, column: int, dtype: str) -> None:
        fit = device.efficiency(op_class.name.lower(), dtype)
        if fit is None:
            return
        pairs = ((self.compute, fit.compute), (self.memory, fit.memory), (self.overhead_ns, fit.t0_ns))
        for table, value in pairs:
            if not isnan(value):
                table[int(op_class), column] = value


# What published peaks say of operations: time of the arithmetic and of the memory traffic [ns].


@dataclass(frozen=True, slots=True, eq=False)
class PeakTimes:
    """Columns of shape ``(ops,)`` [ns]; NaN where a cost or a peak is unknown."""

    arithmetic_ns: FloatArray
    memory_ns: FloatArray

    @property
    def roofline_ns(self) -> FloatArray:
        """The longer of the two, without any overhead; what is known where only one is."""
        return np.fmax(self.arithmetic_ns, self.memory_ns)


def rate_flops_per_s(device: Device, scheme: str, *, matrix: bool) -> float:
    """The peak that operations of a scheme run at; NaN where the device lists none."""
    found = find_scheme(scheme)
    if found is None:
        return nan
    try:
        unit: Unit = "matrix" if matrix else "vector"
        return peak_for(device, unit, found.rate_dtype, products=found.products).flops_per_s
    except UnsupportedError:
        return nan


def peak_times(ops: Operations, device: Device, *, transcendental_weight: float = 8.0) -> PeakTimes:
    """FLOPs over the peak of the scheme, bytes over the main memory's bandwidth. O(ops)."""
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


# Energy of a step on a device whose file has figures for it: a floor and a ceiling, never a guess between.
#
# The floor counts arithmetic (without transcendentals, registers and wires) and traffic to main memory,
# where the file has their energies; the ceiling is the board at its thermal design power while the
# operations run one after another.


@dataclass(frozen=True, slots=True)
class StepEnergy:
    """Joules of one rank and step; NaN unknown. ``at_least_j`` is what is known of the parts the file has
    figures for; ``at_tdp_j`` has the board at ``tdp_w`` watts for the work of the step.
    """

    at_least_j: float
    at_tdp_j: float
    tdp_w: float


@np.errstate(over="ignore", invalid="ignore")  # sums past what a float holds are infinite
def step_energy(graph: OpGraph, device: Device, duration_ns: float) -> StepEnergy:
    """Energy of one step that takes ``duration_ns``. O(nodes)."""
    known = known_sum(node_energy_j(graph, device) * graph.multiplicity)
    return StepEnergy(known, tdp_energy_j(device, duration_ns), device.tdp_w)


@np.errstate(over="ignore", invalid="ignore")
def node_energy_j(graph: OpGraph, device: Device) -> FloatArray:
    """Joules of one execution of each node that the file's figures account for, shape ``(nodes,)``; NaN where
    they account for nothing.
    """
    table = graph.contractions
    parts = [stored_bytes(graph, device) * device.main_memory.energy_pj_per_byte]
    in_products = np.zeros(len(graph))
    if len(table):
        choices, place = contraction_choices(table, device)
        each = [nan if one is None else one.peak.energy_pj_per_flop * one.products for one in choices]
        in_products = np.bincount(table.node, table.flops, len(graph)).astype(np.float64)
        products = np.bincount(table.node, table.flops * np.array(each)[place], len(graph))
        parts.append(np.where(in_products > 0, products, 0.0))
    vector = [energy_pj_per_flop(device, "vector", entry.name) for entry in DTYPES]
    rest = np.maximum(graph.flops - in_products, 0.0)
    parts.append(np.where(rest == 0, 0.0, rest * np.array([*vector, nan])[arithmetic_dtype(graph, -1)]))
    known = np.nansum(parts, axis=0)
    # Nothing moved and nothing computed takes nothing; a part that is unknown is not nothing.
    return np.where((known == 0) & np.isnan(parts).any(axis=0), nan, known) * 1e-12
