"""Estimator for systolic arrays: SCALE-Sim's cycles of products, converted to time by fitted lines.

Lines are linear functions, fitted to measurements of a TPU. Products and convolutions use their cycles;
vector operations, norms and poolings use a line over their elements. Other operations are not covered. Times
are of a device's operations alone, as XLA's profiler reports them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from hespas.estimators.calibrated import doublings_beyond
from hespas.estimators.interface import Prediction, estimate_by_operation, with_bands
from hespas.estimators.rates import peak_times, within_roof
from hespas.estimators.systolic.cycles import (
    Array,
    Backing,
    array_of,
    parse_array,
    parse_dataflow,
    shared_cycles,
    stall_cycles,
)
from hespas.estimators.systolic.lines import (
    Assumption,
    LineBasis,
    clock_hz,
    element_columns,
    line_array,
    line_basis,
    line_ns,
    own_cycles,
    product_columns,
)
from hespas.graph import (
    BEYOND_RANGE,
    DATA_SHEET,
    MEASURED_BASIS,
    Diagnostics,
    Estimate,
    OpGraph,
    reference_basis,
)
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UsageError
from hespas.hardware import Device
from hespas.operations import LabelColumn, Labels, Operations

__all__ = ["Systolic", "SystolicFindings"]


@dataclass(frozen=True, slots=True)
class SystolicFindings:
    """Counts of operations by the reason why they have no time, and by the assumption on which their time
    depends.
    """

    _counts: Counter[Assumption] = field(default_factory=Counter[Assumption])

    def uncovered(self, code: str, reason: str, count: int) -> None:
        """Count operations without a time under ``code``, with the reason."""
        self._counts[f"systolic.{code}", f"no duration, {reason}"] += count

    def assumed(self, notes: Iterable[Assumption], count: int) -> None:
        """Count operations whose time depends on the assumptions in ``notes``."""
        for code, text in notes:
            self._counts[f"systolic.{code}", text] += count

    def report(self, device: str, diagnostics: Diagnostics | None) -> None:
        """Report a warning for each reason and each assumption."""
        if diagnostics is None:
            return
        for (code, text), count in self._counts.items():  # counts of 0 report nothing
            diagnostics.warning(code, device, text, count=count)


_PRODUCTS = frozenset({"matmul", "convolution"})
_ELEMENTS = frozenset({"vector", "normalization", "pooling"})
_PER_DOUBLING = 0.25
"""Share by which an interval's half width grows with each doubling of a size beyond the fitted ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Systolic:
    """Estimator for systolic arrays. Empty options are taken from the device file.

    ``array``: shape, such as ``128x128``. ``dataflow``: ``os``, ``ws`` or ``is``. ``arrays``: number of
    arrays that share a matmul (0: reported cycles are for one array, times for all arrays of the device).
    ``words_per_cycle``: rate of the memory behind the operand buffers, which adds approximate stalls (0: no
    limit). ``buffer_kb``: size of the buffer of each operand. ``shipped``: use the lines of the package if
    the device's own file has none.
    """

    array: str = ""
    dataflow: str = ""
    arrays: int = 0
    words_per_cycle: float = 0.0
    buffer_kb: float = 1024.0
    shipped: bool = True

    inert_options: ClassVar[frozenset[str]] = frozenset({"array", "dataflow"})

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        if self.array:
            parse_array(self.array)
        if self.dataflow:
            parse_dataflow(self.dataflow)
        if not 0 <= self.arrays <= 1 << 16:
            raise UsageError(
                f"systolic: invalid option arrays={self.arrays}",
                hint="use a number from 1 to 65,536, or 0 for the device's",
            )
        if not self.words_per_cycle >= 0:
            raise UsageError(
                f"systolic: invalid option words_per_cycle={self.words_per_cycle:g}", hint="use 0 or more"
            )
        if not self.buffer_kb > 0:
            raise UsageError(f"systolic: invalid option buffer_kb={self.buffer_kb:g}", hint="use KiB above 0")

    @property
    def name(self) -> str:
        """Name of the model: ``systolic``."""
        return "systolic"

    def array_of(self, device: Device) -> Array | None:
        """Return the systolic array whose cycles are counted; None if neither the options nor the device file
        state one.
        """
        return array_of(device, self.array, self.dataflow)

    def cycles(self, ops: Operations, device: Device) -> FloatArray:
        """Return SCALE-Sim's total cycles of each product (with stalls for a limited memory), NaN for other
        operations.
        """
        array = self.array_of(device)
        cycles = np.full(len(ops), np.nan)
        rows = ops.kind.where(*_PRODUCTS)
        if array is None or not len(rows):
            return cycles
        products = ops.take(rows)
        cycles[rows] = _shared(products, array, max(self.arrays, 1))
        if self.words_per_cycle:
            cycles[rows] += self._stalls(products, array)
        return cycles

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """Return the time of each operation; see the module. O(ops)."""
        findings = SystolicFindings()
        times, evidence = np.full((3, len(ops)), np.nan), LabelColumn(len(ops))
        for (kind, op, scheme, variant), rows in ops.classes():
            part = ops.take(rows)
            basis = line_basis(device, kind, op, scheme, variant, shipped=self.shipped)
            if kind in _PRODUCTS:
                times[:, rows] = self._products(part, device, basis, findings)
            elif kind in _ELEMENTS:
                times[:, rows] = _elements(part, basis, f"{kind} {op}", findings)
            else:
                # Operations without work take no time in any graph and need no line.
                costs = ~((part.flops == 0) & (part.bytes_moved == 0))
                findings.uncovered("other-kind", f"no line for operations like {kind}", int(costs.sum()))
            evidence.fill(rows, DATA_SHEET if basis is None else _evidence(basis, part))
            if not self.array:  # another array than the device's has peaks of its own
                times[:, rows] = within_roof(times[:, rows], part, device)
            sized = [
                part.dim(name) for name in (("m", "n", "k") if kind in _PRODUCTS else ("rows", "columns"))
            ]
            unknown = np.isnan(sized).any(axis=0) & (kind in _PRODUCTS | _ELEMENTS)
            findings.uncovered("unknown-size", "a size is unknown", int(unknown.sum()))
        findings.report(device.name, diagnostics)
        return Prediction.of(self.name, *times, basis=evidence.labels())

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """Return the time of one execution of each node, with one prediction per distinct operation."""
        return estimate_by_operation(self, graph, device, diagnostics)

    def _products(
        self, ops: Operations, device: Device, basis: LineBasis | None, findings: SystolicFindings
    ) -> FloatArray:
        """Return the time and interval of matrix products with equal labels, shape (3, ops)."""
        array = self.array_of(device)
        if array is None:
            findings.uncovered(
                "no-array", f"{device.name} has no systolic array; give one (128x128)", len(ops)
            )
            return np.full((3, len(ops)), np.nan)
        if basis is None:
            # Without a line: cycles divided by the clock, or the memory traffic where it takes longer.
            clock = clock_hz(device)
            if np.isnan(clock):
                findings.uncovered(
                    "no-clock", f"{device.name} has no array with a clock: cycles only", len(ops)
                )
                return np.full((3, len(ops)), np.nan)
            shape = device.systolic
            arrays = self.arrays or (1 if shape is None else shape.arrays)
            busy = replace(self, arrays=arrays).cycles(ops, device) / clock * 1e9
            time = device.launch_overhead_ns + np.maximum(busy, peak_times(ops, device).memory_ns)
            findings.assumed(
                [("by-clock", "no line was fitted: cycles at the clock of the arrays")], len(ops)
            )
            nothing = np.full(len(ops), np.nan)
            return np.stack((time, nothing, nothing))
        cycles, overridden = self._line_cycles(ops, device, array, basis)
        notes = [*basis.notes, *overridden]
        if self.words_per_cycle:
            cycles = cycles + self._stalls(ops, array)
            notes.append(("approximate-stalls", "stalls for memory are approximate"))
        if "convolution" in ops.kind.used():
            notes.append(("convolution", "a line of products covers convolutions"))
        findings.assumed(notes, len(ops))
        columns = product_columns(ops, cycles, ops.scheme[0])
        scales = {"cycle_ns": basis.cycle_scale}
        scaled = {
            name: column * scales.get(name, basis.byte_scale if name.endswith("_per_byte") else 1.0)
            for name, column in columns.items()
        }
        has_interval = basis.has_interval and len(notes) == len(basis.notes)
        return _with_interval(
            basis, line_ns(basis.fit, scaled), ops, has_interval=has_interval, findings=findings
        )

    def _line_cycles(
        self, ops: Operations, device: Device, array: Array, basis: LineBasis
    ) -> tuple[FloatArray, list[Assumption]]:
        """Return the cycles of matmuls, counted as for the measurements behind the line, and the assumptions.

        If the options state another array or number of arrays than the device has, the cycles are multiplied
        by the ratio of the counts of both arrays.
        """
        shape = device.systolic
        own = array if shape is None else Array(shape.rows, shape.columns, shape.dataflow)
        arrays = 1 if shape is None else shape.arrays
        cycles = own_cycles(ops, line_array(basis.fit, own))
        requested = self.arrays or arrays
        if array == own and requested == arrays:
            return cycles, []
        before = own_cycles(ops, own, arrays=arrays) + 1
        if array.dataflow == own.dataflow:
            after = own_cycles(ops, array, arrays=requested) + 1
        else:
            after = _shared(ops, array, requested) + 1
        text = f"a line of {arrays} arrays of {own} is used for {requested} of {array}"
        return cycles * after / before, [("other-array", text)]

    def _stalls(self, ops: Operations, array: Array) -> FloatArray:
        backing = Backing(self.words_per_cycle, self.buffer_kb * 1024)
        return ops.dim("batch") * stall_cycles(ops.dim("m"), ops.dim("n"), ops.dim("k"), array, backing)


def _evidence(basis: LineBasis, ops: Operations) -> Labels:
    """Return the basis of each time by a line."""
    if basis.references:
        return Labels.constant(reference_basis(basis.references), len(ops))
    if not basis.fit.samples:
        return Labels.constant(DATA_SHEET, len(ops))
    is_beyond = doublings_beyond(basis.fit, ops) > 0
    return Labels.choice((MEASURED_BASIS, BEYOND_RANGE), is_beyond.astype(np.int64))


def _shared(ops: Operations, array: Array, arrays: int) -> FloatArray:
    """Return the cycles of products that are split over several arrays (``arrays``), with the dataflow of the
    array.
    """
    m, n, k = (ops.dim(name) for name in ("m", "n", "k"))
    return shared_cycles(m, n, k, array, arrays=arrays, batch=ops.dim("batch"))


def _elements(ops: Operations, basis: LineBasis | None, label: str, findings: SystolicFindings) -> FloatArray:
    """Return the time and interval of elementwise operations with equal labels, shape (3, ops)."""
    if basis is None:
        findings.uncovered("no-line", f"no line for {label}", len(ops))
        return np.full((3, len(ops)), np.nan)
    columns = element_columns(ops)
    # Bytes already follow the width of the format.
    scales = {
        "element_ns": basis.element_scale,
        "row_ns": basis.byte_scale,
        "ns_per_byte": basis.byte_scale,
    }
    scaled = {name: column * scales.get(name, 1.0) for name, column in columns.items()}
    findings.assumed(basis.notes, len(ops))
    return _with_interval(
        basis, line_ns(basis.fit, scaled), ops, has_interval=basis.has_interval, findings=findings
    )


def _with_interval(
    basis: LineBasis, time: FloatArray, ops: Operations, *, has_interval: bool, findings: SystolicFindings
) -> FloatArray:
    """Return the time with its 5 % and 95 % bounds [ns]. Intervals widen beyond the fitted sizes. The bounds
    are NaN if ``has_interval`` is False.
    """
    beyond = doublings_beyond(basis.fit, ops)
    findings.assumed([("beyond", "sizes beyond the fitted ones")], int((beyond > 0).sum()))
    if not has_interval:
        nothing = np.full(len(ops), np.nan)
        return np.stack((time, nothing, nothing))
    return with_bands(basis.fit, time, 1 + _PER_DOUBLING * beyond)
