"""Estimator for in-memory-computing chips: mapping, cycles, weight reloads and energy by part.

Matrix products and convolutions run on the macros of the device (table ``imc`` of its file), with the
right-hand side as the stored weights. All other operations except collectives run on the digital vector unit,
whose rates are the ``vector`` peaks of the device.

The model covers the following parts of the energy:

- ``dac``, ``cell``, ``adc``, ``accumulate``: the macro (:mod:`hespas.estimators.imc.energy`);
- ``buffer``: reads of inputs and weights, writes of sums, partial sums of several row tiles in both ways;
- ``main_memory``: reloaded weights, and activations that exceed the buffer;
- ``weight_write``: writes of the weights into the cells;
- ``vector``: arithmetic of the vector unit, also of partial sums.

The following is not modelled:

- leakage, clock trees, control, and transfers between chips;
- cells outside the blocks on the diagonal: they hold 0, so that their multipliers do not switch;
- overlapping windows of a convolution: each output position reads all its inputs (im2col);
- packing of several narrow weights into the cells of a wide one, and of several layers into one load;
- noise and clipping of analog sums, which lower the accuracy and not the speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan, nan
from typing import ClassVar

import numpy as np

from hespas.estimators.imc.energy import CLOCK_ERROR, clock_hz, step_energies
from hespas.estimators.imc.mapping import Layer, Mapping, map_layer
from hespas.estimators.interface import Prediction, operations_on, takes_no_time
from hespas.estimators.rates import OperationCosts, rate_flops_per_s
from hespas.graph import DATA_SHEET, DTYPES, Diagnostics, DTypeKind, Estimate, OpGraph
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.errors import UsageError
from hespas.hardware import Device, ImcMacro, Memory
from hespas.hardware.peaks import energy_pj_per_flop
from hespas.operations import Operations, element_bytes, find_scheme

__all__ = ["Imc"]

_PARTS = ("dac", "cell", "adc", "accumulate", "buffer", "main_memory", "weight_write", "vector")
_BOUNDS = ("free", "array", "buffer", "weight_reload", "vector")
_RESIDENCY = ("auto", "resident", "reload")
_BITS_PER_BYTE = 8
_TRANSCENDENTAL_FLOPS = 8.0
"""Vector operations per transcendental function, as in the roofline."""
_LIMITS = (0, *(1 << power for power in range(16, -1, -1)))
"""Limits of the macro loads of a product, or of the copies of a weight, that are tried (0: no limit)."""
_MOST_MACS = 2.0**56
"""Multiplications of an operation, with 64 slices of weights, that integers of 64 bits can count."""
_PARTIAL_SUM = "i32"
"""Type in which the vector unit adds the sums of several row tiles."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Operands:
    """Element types of both operands of each operation, as codes (-1: unknown)."""

    lhs: IntArray
    rhs: IntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Products:
    """Matrix products of known size: their ``rows`` in the table of operations, and columns of shape
    ``(products,)``. ``outputs`` counts the slices of weights that are wider than the macro's.
    """

    rows: IntArray
    layers: tuple[Layer, ...]
    mappings: tuple[Mapping, ...]
    input_bits: FloatArray
    weight_bits: FloatArray
    is_float: BoolArray

    def size(self, name: str) -> FloatArray:
        """Return a size of the layers."""
        return np.array([getattr(layer, name) for layer in self.layers], np.float64)

    def mapped(self, name: str) -> FloatArray:
        """Return a figure of the mappings."""
        return np.array([getattr(mapping, name) for mapping in self.mappings], np.float64)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Work:
    """Times [ns] and costs of distinct operations, shape ``(ops,)``. ``times_ns`` has the rows array, buffer
    (or main memory), weight reload and vector. ``energy_pj`` has a row per part.
    """

    times_ns: FloatArray
    energy_pj: FloatArray
    cycles: FloatArray
    utilization: FloatArray

    def bounded_ns(self, launch_ns: float, clock_errors: tuple[float, float]) -> FloatArray:
        """Return time, low and high, shape ``(3, ops)`` [ns].

        The array, the buffer and the vector unit overlap, and weights are written before. The low end is a
        chip that overlaps all of them, the high end a chip that overlaps none of them. ``clock_errors`` are
        factors on the array time.
        """
        array_ns, buffer_ns, reload_ns, vector_ns = self.times_ns
        time_ns = launch_ns + np.maximum.reduce((array_ns, buffer_ns, vector_ns)) + reload_ns
        low, high = clock_errors
        low_ns = np.maximum.reduce((array_ns * low, buffer_ns, vector_ns, reload_ns))
        high_ns = launch_ns + array_ns * high + buffer_ns + vector_ns + reload_ns
        return np.stack((time_ns, low_ns, high_ns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Imc:
    """Estimator for in-memory-computing chips.

    ``weights``: ``resident`` (weights are stored before the step), ``reload`` (every operation writes its
    weights) or ``auto`` (resident if the weights of all operations fit). ``input_bits`` and ``weight_bits``:
    width of the values, if their types are wider than the values (0: width of the types, for floats the width
    of the macro). ``macros``: number of macros (0: of the device).

    Examples:
        >>> from hespas.estimators import load_estimator
        >>> load_estimator("imc:weights=resident,weight_bits=2")
        Imc(weights='resident', input_bits=0, weight_bits=2, macros=0)
    """

    weights: str = "auto"
    input_bits: int = 0
    weight_bits: int = 0
    macros: int = 0

    inert_options: ClassVar[frozenset[str]] = frozenset({"weights"})

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        if self.weights not in _RESIDENCY:
            raise UsageError(
                f"imc: invalid option weights={self.weights}", hint=f"use one of {', '.join(_RESIDENCY)}"
            )
        for name, value, most in (
            ("input_bits", self.input_bits, 64),
            ("weight_bits", self.weight_bits, 64),
            ("macros", self.macros, 1 << 20),
        ):
            if not 0 <= value <= most:
                raise UsageError(
                    f"imc: invalid option {name}={value}", hint=f"use a number from 0 to {most:,}"
                )

    @property
    def name(self) -> str:
        """Name of the model: ``imc``."""
        return "imc"

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """Return the time of each operation of a table. Weights are reloaded unless they are ``resident``."""
        codes = np.array([_type_code(name) for name in ops.scheme.names], np.int64)[ops.scheme.row]
        operands = _Operands(lhs=codes, rhs=codes)
        work = self._work(ops, device, operands, diagnostics, is_resident=self.weights == "resident")
        times = work.bounded_ns(device.launch_overhead_ns, _clock_errors(device))
        return Prediction.of(self.name, *times, basis=DATA_SHEET)

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """Return the time of one execution of each node, with one mapping per distinct operation."""
        work = self._graph_work(graph, device, diagnostics)
        free = takes_no_time(graph)
        bounded = work.bounded_ns(device.launch_overhead_ns, _clock_errors(device))
        duration, low, high = np.where(free, 0.0, bounded)
        unknown = np.isnan(duration)
        limit = np.argmax(np.nan_to_num(work.times_ns), axis=0) + 1
        return Estimate(
            hardware=device.name,
            estimators=(self.name,),
            bounds=_BOUNDS,
            duration_ns=duration,
            low_ns=low,
            high_ns=high,
            estimator=np.where(unknown, -1, 0).astype(np.int8),
            bound=np.where(unknown, -1, np.where(free, 0, limit)).astype(np.int8),
            bases=(DATA_SHEET,),
            basis=np.where(unknown | free, -1, 0).astype(np.int16),
        )

    def operation_costs(self, graph: OpGraph, device: Device) -> OperationCosts:
        """Return energy by part, array cycles and utilization of one execution of each node."""
        work = self._graph_work(graph, device, None)
        free = takes_no_time(graph)
        return OperationCosts(
            parts=_PARTS,
            energy_j=np.where(free, 0.0, work.energy_pj) * 1e-12,
            cycles=work.cycles,
            utilization=work.utilization,
        )

    def _graph_work(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None) -> _Work:
        """Return the work of each node, with the operand types of its product.

        Weights are resident in mode ``auto`` if the loads of all products fit into the weight sets of all
        macros, for one of the limits of loads of each product. The largest limit that fits is used. Products
        of a loop count once per iteration.
        """
        ops = operations_on(graph, device)
        table = graph.contractions
        lhs, rhs = (np.full(len(graph), -1, np.int64) for _ in range(2))
        lhs[table.node], rhs[table.node] = table.lhs, table.rhs
        operands = _Operands(lhs=lhs, rhs=rhs)
        macro = device.imc
        if macro is None or self.weights == "reload":
            return self._work(ops, device, operands, diagnostics, is_resident=False)
        sets = (self.macros or macro.macros) * macro.weight_sets
        loads = nan
        for most_loads in _LIMITS:
            products = self._products(ops, macro, operands, most_loads)
            loads = float(np.dot(products.mapped("weight_sets"), graph.executions[products.rows]))
            if loads <= sets:  # False if the number of executions is unknown
                return self._work(ops, device, operands, diagnostics, is_resident=True, limit=most_loads)
        if self.weights == "auto":
            text = f"weights take {loads:,.0f} macro loads, {sets:,} fit: operations reload their weights"
            _warn(diagnostics, device, "reload", text, int(_is_product(ops).sum()))
        return self._work(ops, device, operands, diagnostics, is_resident=self.weights == "resident")

    def _products(self, ops: Operations, macro: ImcMacro, operands: _Operands, most_loads: int) -> _Products:
        """Return the products of known size with their mappings: the fewest cycles within ``most_loads``, or
        for -1 the fewest cycles of writing the weights and computing.
        """
        sizes = np.stack([ops.dim(name) for name in ("batch", "m", "n", "k")])
        with np.errstate(over="ignore", invalid="ignore"):
            has_size = (sizes > 0).all(axis=0) & (np.prod(sizes, axis=0) < _MOST_MACS)
        rows = np.flatnonzero(_is_product(ops) & has_size)
        input_bits, float_inputs = _bits(operands.lhs[rows], self.input_bits, macro.input_bits)
        weight_bits, float_weights = _bits(operands.rhs[rows], self.weight_bits, macro.weight_bits)
        sizes = sizes[:, rows]
        sizes[2] *= np.ceil(weight_bits / macro.weight_bits)
        layers = tuple(
            Layer(groups=groups, vectors=vectors, inputs=inputs, outputs=outputs)
            for groups, vectors, outputs, inputs in sizes.T.astype(np.int64).tolist()
        )
        array = (macro.weight_rows, macro.weight_columns, self.macros or macro.macros)
        mappings: list[Mapping] = []
        for layer, bits in zip(layers, input_bits.tolist(), strict=True):
            if most_loads >= 0:
                mappings.append(map_layer(layer, *array, most_loads=most_loads))
                continue
            candidates = [map_layer(layer, *array, most_copies=limit) for limit in _LIMITS]
            steps = macro.steps(bits)
            cycles = [mapping.vector_cycles * steps + _write_cycles(macro, mapping) for mapping in candidates]
            mappings.append(candidates[cycles.index(min(cycles))])
        return _Products(
            rows=rows,
            layers=layers,
            mappings=tuple(mappings),
            input_bits=input_bits,
            weight_bits=weight_bits,
            is_float=float_inputs | float_weights,
        )

    def _work(
        self,
        ops: Operations,
        device: Device,
        operands: _Operands,
        diagnostics: Diagnostics | None,
        *,
        is_resident: bool,
        limit: int = 0,
    ) -> _Work:
        """Return the work of each operation; NaN without macros, and for collectives and unknown sizes.

        ``limit`` is the limit of macro loads of each product with resident weights (0: no limit).
        """
        work = _Work(
            times_ns=np.zeros((4, len(ops))),
            energy_pj=np.zeros((len(_PARTS), len(ops))),
            cycles=np.full(len(ops), nan),
            utilization=np.full(len(ops), nan),
        )
        is_collective = np.isin(ops.kind.row, np.flatnonzero([n == "collective" for n in ops.kind.names]))
        unknown = is_collective.copy()
        vector_flops = ops.flops + _TRANSCENDENTAL_FLOPS * np.nan_to_num(ops.transcendentals)
        moved_bytes = ops.bytes_moved.copy()
        if device.imc is None:
            unknown[:] = True
            _warn(diagnostics, device, "no-macro", "no duration, the device has no table [imc]", len(ops))
        else:
            products = self._products(ops, device.imc, operands, limit if is_resident else -1)
            bits = f"{device.imc.input_bits} and {device.imc.weight_bits} bits"
            text = f"float inputs and weights are assumed to be quantised to {bits}"
            _warn(diagnostics, device, "quantised", text, int(products.is_float.sum()))
            macs = products.size("groups") * products.size("vectors") * products.size("inputs")
            macs *= ops.dim("n")[products.rows]
            vector_flops[products.rows] = np.maximum(vector_flops[products.rows] - 2 * macs, 0.0)
            moved_bytes[products.rows] = 0.0
            unsized = _is_product(ops)
            unsized[products.rows] = False
            unknown |= unsized
            _warn(
                diagnostics,
                device,
                "unknown-size",
                "no duration, a size is unknown or too large",
                int(unsized.sum()),
            )
            self._add_products(work, products, ops, device, device.imc, is_resident=is_resident)
        is_costly = ~((ops.flops == 0) & (ops.bytes_moved == 0))
        text = "no duration, collectives are not estimated"
        _warn(diagnostics, device, "collective", text, int((is_collective & is_costly).sum()))
        _add_vector(work, ops, device, vector_flops, moved_bytes)
        work.times_ns[:, unknown] = nan
        work.energy_pj[:, unknown] = nan
        return work

    def _add_products(
        self,
        work: _Work,
        products: _Products,
        ops: Operations,
        device: Device,
        macro: ImcMacro,
        *,
        is_resident: bool,
    ) -> None:
        """Add the times and energies of products to ``work``.

        Every row tile converts its sums, every column tile converts all inputs again. One read of the buffer
        feeds all macros of a round, so that inputs are read once per round of column tiles. Inputs and
        results that exceed the buffer move between it and the main memory once.
        """
        rows = products.rows
        groups, vectors = products.size("groups"), products.size("vectors")
        inputs, outputs = products.size("inputs"), products.size("outputs")
        row_tiles, column_tiles = products.mapped("row_tiles"), products.mapped("column_tiles")
        steps = np.array([macro.steps(bits) for bits in products.input_bits.tolist()])
        cycles = products.mapped("vector_cycles") * steps
        clock = clock_hz(macro)
        fed = groups * vectors * inputs * column_tiles
        summed = groups * vectors * outputs * row_tiles
        weights = groups * inputs * outputs
        result_bits = products.input_bits + macro.weight_bits
        partial_sums = groups * vectors * outputs * (row_tiles - 1)

        step = step_energies(macro)
        reads = groups * vectors * inputs * np.minimum(column_tiles, products.mapped("rounds"))
        input_bytes = reads * products.input_bits / _BITS_PER_BYTE
        result_bytes = (groups * vectors * outputs + 2 * partial_sums) * result_bits / _BITS_PER_BYTE
        stored_bytes = groups * inputs * ops.dim("n")[rows] * products.weight_bits / _BITS_PER_BYTE
        # The graph counts the activations in the width of their type, and the weights in the same width.
        width_bytes = element_bytes(ops.scheme, "activation")[rows]
        unique = ops.bytes_moved[rows] / width_bytes - groups * inputs * ops.dim("n")[rows]
        unique_bytes = np.nan_to_num(np.maximum(unique, 0.0)) * products.input_bits / _BITS_PER_BYTE
        buffer = _buffer(device)
        held = float(buffer.capacity_bytes) if buffer is not None else 0.0
        main_bytes = np.where(unique_bytes > held, unique_bytes, 0.0)
        main_ns_per_byte = 1e9 / device.main_memory.bandwidth_bytes_per_s
        buffer_pj = buffer.energy_pj_per_byte if buffer is not None else 0.0
        buffer_bandwidth = buffer.bandwidth_bytes_per_s if buffer is not None else nan
        buffer_bytes = input_bytes + result_bytes

        work.cycles[rows] = cycles
        work.utilization[rows] = products.mapped("utilization")
        work.times_ns[0, rows] = cycles / clock * 1e9
        buffer_ns = np.nan_to_num(buffer_bytes / buffer_bandwidth * 1e9)
        work.times_ns[1, rows] = np.maximum(buffer_ns, main_bytes * main_ns_per_byte)
        energy = dict.fromkeys(_PARTS, np.zeros(len(rows)))
        energy["dac"] = fed * macro.converters_per_row * steps * step.dac_pj
        energy["cell"] = groups * vectors * inputs * outputs * steps * step.weight_pj
        energy["adc"] = summed * macro.converters_per_column * steps * step.adc_pj
        energy["accumulate"] = summed * steps * step.accumulate_pj
        energy["vector"] = partial_sums * energy_pj_per_flop(device, "vector", _PARTIAL_SUM)
        if not is_resident:
            write_cycles = np.array([_write_cycles(macro, mapping) for mapping in products.mappings])
            write_ns = np.maximum(write_cycles / clock * 1e9, stored_bytes * main_ns_per_byte)
            work.times_ns[2, rows] = write_ns
            energy["weight_write"] = (
                weights * products.mapped("written") * macro.weight_bits * step.write_pj_per_bit
            )
            main_bytes = main_bytes + stored_bytes
            buffer_bytes = buffer_bytes + stored_bytes * products.mapped("written")
        energy["buffer"] = buffer_bytes * buffer_pj
        energy["main_memory"] = main_bytes * device.main_memory.energy_pj_per_byte
        for index, part in enumerate(_PARTS):
            work.energy_pj[index, rows] = np.where(energy[part] != 0, energy[part], 0.0)


def _add_vector(
    work: _Work, ops: Operations, device: Device, flops: FloatArray, moved_bytes: FloatArray
) -> None:
    """Add the times and energies of ``flops`` on the vector unit, and of ``moved_bytes`` at the buffer or, if
    they exceed it, at the main memory.
    """
    rates = [rate_flops_per_s(device, scheme, matrix=False) for scheme in ops.scheme.names]
    formats = [find_scheme(scheme) for scheme in ops.scheme.names]
    energies = [
        nan if entry is None else energy_pj_per_flop(device, "vector", entry.rate_dtype) for entry in formats
    ]
    index = ops.scheme.row
    buffer = _buffer(device)
    is_held = np.zeros(len(ops), np.bool_) if buffer is None else moved_bytes <= buffer.capacity_bytes
    memories = (device.main_memory, device.main_memory if buffer is None else buffer)
    bandwidth, pj_per_byte = (
        np.array(figures)[is_held.astype(np.int64)]
        for figures in zip(*((m.bandwidth_bytes_per_s, m.energy_pj_per_byte) for m in memories), strict=True)
    )
    bandwidth = np.where(np.isnan(bandwidth), np.inf, bandwidth)
    work.times_ns[3] += np.where(flops == 0, 0.0, flops / np.array(rates)[index] * 1e9)
    work.times_ns[1] += moved_bytes / bandwidth * 1e9
    work.energy_pj[_PARTS.index("vector")] += np.where(flops == 0, 0.0, flops * np.array(energies)[index])
    memory_pj = np.where(moved_bytes == 0, 0.0, moved_bytes * pj_per_byte)
    work.energy_pj[_PARTS.index("buffer")] += np.where(is_held, memory_pj, 0.0)
    work.energy_pj[_PARTS.index("main_memory")] += np.where(is_held, 0.0, memory_pj)


def _write_cycles(macro: ImcMacro, mapping: Mapping) -> int:
    """Return the cycles in which all macros at once write the weights of all rounds."""
    bits = macro.write_bits_per_cycle if macro.write_bits_per_cycle > 0 else macro.columns
    return mapping.rounds * -(-mapping.rows_per_set * macro.rows_per_weight * macro.columns // bits)


def _buffer(device: Device) -> Memory | None:
    """Return the on-chip buffer of a device: its first scratchpad."""
    return next((memory for memory in device.memories if memory.level == "scratchpad"), None)


def _clock_errors(device: Device) -> tuple[float, float]:
    """Return the ends of the array time, as factors: 1 for a clock that the file states."""
    return CLOCK_ERROR if device.imc is not None and isnan(device.imc.clock_hz) else (1.0, 1.0)


def _is_product(ops: Operations) -> BoolArray:
    names = np.array([name in ("matmul", "convolution") for name in ops.kind.names], np.bool_)
    return names[ops.kind.row]


def _type_code(scheme: str) -> int:
    """Return the code of the element type of a number format; -1 if it is unknown."""
    entry = find_scheme(scheme)
    names = [dtype.name for dtype in DTYPES]
    return names.index(entry.rate_dtype) if entry is not None and entry.rate_dtype in names else -1


def _bits(codes: IntArray, chosen: int, native: int) -> tuple[FloatArray, BoolArray]:
    """Return the width of operands with the given types, and a mask of floats, whose width is ``native``.

    ``chosen`` replaces all widths unless it is 0.
    """
    is_integer = [entry.kind in (DTypeKind.SIGNED, DTypeKind.UNSIGNED, DTypeKind.BOOL) for entry in DTYPES]
    widths = [float(max(entry.bits, 1)) for entry in DTYPES]
    if chosen:
        return np.full(len(codes), float(chosen)), np.zeros(len(codes), np.bool_)
    integer = np.array([*is_integer, False])[codes]
    return np.where(integer, np.array([*widths, nan])[codes], float(native)), ~integer


def _warn(diagnostics: Diagnostics | None, device: Device, code: str, text: str, count: int) -> None:
    if diagnostics is not None:
        diagnostics.warning(f"imc.{code}", device.name, text, count=count)
