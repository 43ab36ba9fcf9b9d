"""The systolic estimator: SCALE-Sim's cycles of products, and lines that turn them into time on TPUs.

Products and convolutions take their cycles, vector operations, norms and poolings a line in elements. Other
operations are not covered. Times are of a device's operations alone, as XLA's profiler tells them.
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
    Basis,
    Note,
    basis_of,
    clock_hz,
    element_columns,
    line_array,
    line_ns,
    own_cycles,
    product_columns,
)
from hespas.graph import Diagnostics, Estimate, OpGraph
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UsageError
from hespas.hardware import Device
from hespas.operations import Operations

__all__ = ["Findings", "Systolic"]

# What a prediction leaves open or assumes, counted by reason and told once each.


@dataclass(frozen=True, slots=True)
class Findings:
    """Operations by finding."""

    _counts: Counter[Note] = field(default_factory=Counter[Note])

    def uncovered(self, code: str, reason: str, count: int) -> None:
        """``count`` operations have no time."""
        self._counts[f"systolic.{code}", f"no duration, {reason}"] += count

    def assumed(self, notes: Iterable[Note], count: int) -> None:
        """``count`` operations have one that rests on each of these."""
        for code, text in notes:
            self._counts[f"systolic.{code}", text] += count

    def tell(self, device: str, diagnostics: Diagnostics | None) -> None:
        """A warning per finding."""
        if diagnostics is None:
            return
        for (code, text), count in self._counts.items():  # nothing is told of a count of 0
            diagnostics.warning(code, device, text, count=count)


_PRODUCTS = frozenset({"matmul", "convolution"})
_ELEMENTS = frozenset({"vector", "normalization", "pooling"})
_PER_DOUBLING = 0.25
"""Share by which an interval's half width grows with each doubling of a size beyond what was fitted on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Systolic:
    """Fields are the options; those left empty come from the device file.

    ``array``: shape as ``128x128``; ``dataflow``: ``os``, ``ws`` or ``is``. ``arrays``: how many share a
    product (0: cycles are of one, times of all that the device has). ``words_per_cycle`` and ``buffer_kb``:
    a limited memory behind the buffer of each operand, which adds approximate stalls (0: no limit).
    ``shipped``: use the lines that come with the package where the device's own file has none.
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
            raise UsageError(f"{self.arrays} arrays", hint="a number from 1 to 65,536, or 0 for the device's")
        if not (self.words_per_cycle >= 0 and self.buffer_kb > 0):
            raise UsageError("words_per_cycle must not be negative, buffer_kb must be above 0")

    @property
    def name(self) -> str:
        """``systolic``."""
        return "systolic"

    def array_of(self, device: Device) -> Array | None:
        """The array that is counted on; None where neither the options nor the device file state one."""
        return array_of(device, self.array, self.dataflow)

    def cycles(self, ops: Operations, device: Device) -> FloatArray:
        """SCALE-Sim's total cycles of each product (with stalls, where a memory is given), NaN of others."""
        array = self.array_of(device)
        found = np.full(len(ops), np.nan)
        rows = ops.kind.where(*_PRODUCTS)
        if array is None or not len(rows):
            return found
        mine = ops.take(rows)
        found[rows] = _shared(mine, array, max(self.arrays, 1))
        if self.words_per_cycle:
            found[rows] += self._stalls(mine, array)
        return found

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """Time of each operation; see the module. O(ops)."""
        findings = Findings()
        times = np.full((3, len(ops)), np.nan)
        for (kind, op, scheme, variant), rows in ops.classes():
            part = ops.take(rows)
            basis = basis_of(device, kind, op, scheme, variant, shipped=self.shipped)
            if kind in _PRODUCTS:
                times[:, rows] = self._products(part, device, basis, findings)
            elif kind in _ELEMENTS:
                times[:, rows] = _elements(part, basis, f"{kind} {op}", findings)
            else:
                # What states no work takes no time in any graph: nothing is missing.
                costs = ~((part.flops == 0) & (part.bytes_moved == 0))
                findings.uncovered("other-kind", f"no line for operations like {kind}", int(costs.sum()))
            if not self.array:  # another array than the device's has peaks of its own
                times[:, rows] = within_roof(times[:, rows], part, device)
            sized = [
                part.dim(name) for name in (("m", "n", "k") if kind in _PRODUCTS else ("rows", "columns"))
            ]
            unknown = np.isnan(sized).any(axis=0) & (kind in _PRODUCTS | _ELEMENTS)
            findings.uncovered("unknown-size", "a size is unknown", int(unknown.sum()))
        findings.tell(device.name, diagnostics)
        return Prediction.of(self.name, *times)

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """Time of one execution of each node; each distinct operation is asked once."""
        return estimate_by_operation(self, graph, device, diagnostics)

    def _products(
        self, ops: Operations, device: Device, basis: Basis | None, findings: Findings
    ) -> FloatArray:
        array = self.array_of(device)
        if array is None:
            findings.uncovered(
                "no-array", f"{device.name} has no systolic array; give one (128x128)", len(ops)
            )
            return np.full((3, len(ops)), np.nan)
        if basis is None:
            return self._by_clock(ops, device, findings)
        cycles, overridden = self._line_cycles(ops, device, array, basis)
        notes = [*basis.notes, *overridden]
        if self.words_per_cycle:
            cycles = cycles + self._stalls(ops, array)
            notes.append(("approximate-stalls", "stalls for memory are approximate"))
        if "convolution" in ops.kind.used():
            notes.append(("convolution", "a line of products covers convolutions"))
        findings.assumed(notes, len(ops))
        columns = product_columns(ops, cycles, ops.scheme[0])
        scaled = {name: column * _scale(basis, name) for name, column in columns.items()}
        honest = basis.honest and len(notes) == len(basis.notes)
        return _with_interval(basis, line_ns(basis.fit, scaled), ops, honest=honest, findings=findings)

    def _line_cycles(
        self, ops: Operations, device: Device, array: Array, basis: Basis
    ) -> tuple[FloatArray, list[Note]]:
        """Cycles as the line counts them, and what stands in for something else. Another shape, dataflow or
        number of arrays than the device's changes them by as much as it changes the device's own.
        """
        shape = device.systolic
        own = array if shape is None else Array(shape.rows, shape.columns, shape.dataflow)
        arrays = 1 if shape is None else shape.arrays
        cycles = own_cycles(ops, line_array(basis.fit, own))
        asked = self.arrays or arrays
        if array == own and asked == arrays:
            return cycles, []
        before = own_cycles(ops, own, arrays=arrays) + 1
        if array.dataflow == own.dataflow:
            after = own_cycles(ops, array, arrays=asked) + 1
        else:
            after = _shared(ops, array, asked) + 1
        text = f"a line of {arrays} arrays of {own} stands in for {asked} of {array}"
        return cycles * after / before, [("other-array", text)]

    def _stalls(self, ops: Operations, array: Array) -> FloatArray:
        backing = Backing(self.words_per_cycle, self.buffer_kb * 1024)
        return ops.dim("batch") * stall_cycles(ops.dim("m"), ops.dim("n"), ops.dim("k"), array, backing)

    def _by_clock(self, ops: Operations, device: Device, findings: Findings) -> FloatArray:
        """No line: cycles at the clock of the arrays, or the traffic where that takes longer."""
        clock = clock_hz(device)
        if np.isnan(clock):
            findings.uncovered("no-clock", f"{device.name} has no array with a clock: cycles only", len(ops))
            return np.full((3, len(ops)), np.nan)
        shape = device.systolic
        arrays = self.arrays or (1 if shape is None else shape.arrays)
        busy = replace(self, arrays=arrays).cycles(ops, device) / clock * 1e9
        time = device.launch_overhead_ns + np.maximum(busy, peak_times(ops, device).memory_ns)
        findings.assumed([("by-clock", "no line was fitted: cycles at the clock of the arrays")], len(ops))
        nothing = np.full(len(ops), np.nan)
        return np.stack((time, nothing, nothing))


def _shared(ops: Operations, array: Array, arrays: int) -> FloatArray:
    """Cycles of the dataflow as it stands, on the slowest of some arrays."""
    m, n, k = (ops.dim(name) for name in ("m", "n", "k"))
    return shared_cycles(m, n, k, array, arrays=arrays, batch=ops.dim("batch"))


def _scale(basis: Basis, name: str) -> float:
    if name == "cycle_ns":
        return basis.cycle_scale
    return basis.byte_scale if name.endswith("_per_byte") else 1.0


def _elements(ops: Operations, basis: Basis | None, label: str, findings: Findings) -> FloatArray:
    if basis is None:
        findings.uncovered("no-line", f"no line for {label}", len(ops))
        return np.full((3, len(ops)), np.nan)
    columns = element_columns(ops)
    # Bytes follow the format's width by themselves.
    scales = {
        "element_ns": basis.element_scale,
        "row_ns": basis.byte_scale,
        "ns_per_byte": basis.byte_scale,
    }
    scaled = {name: column * scales.get(name, 1.0) for name, column in columns.items()}
    findings.assumed(basis.notes, len(ops))
    return _with_interval(basis, line_ns(basis.fit, scaled), ops, honest=basis.honest, findings=findings)


def _with_interval(
    basis: Basis, time: FloatArray, ops: Operations, *, honest: bool, findings: Findings
) -> FloatArray:
    """Time, 5 % and 95 % [ns]: intervals widen beyond the sizes that were fitted on, and there is none where
    the line covers what it was not fitted on.
    """
    beyond = doublings_beyond(basis.fit, ops)
    findings.assumed([("beyond", "sizes beyond those that were fitted on")], int((beyond > 0).sum()))
    if not honest:
        nothing = np.full(len(ops), np.nan)
        return np.stack((time, nothing, nothing))
    return with_bands(basis.fit, time, 1 + _PER_DOUBLING * beyond)
