"""Compiled estimators: each distinct region of a program is compiled and timed on this machine's device.

Effects across regions (further fusion, reuse of memory in place, overlap) are not covered. Communication is
covered between the devices of one machine only. Times are of this machine for any requested device, with a
warning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np

from hespas.estimators.compiled.measuring import (
    Timing,
    UnitMeasurement,
    UnitTimings,
)
from hespas.estimators.compiled.units import Unit, units_of, units_of_table
from hespas.estimators.interface import Availability, Prediction, takes_no_time
from hespas.graph import MEASURED_BASIS, Diagnostics, Estimate, OpGraph, reference_basis
from hespas.graph.errors import MissingExtraError, UnsupportedError, UsageError
from hespas.graph.progress import Progress
from hespas.hardware import Device, find_device
from hespas.operations import Operations

__all__ = ["Iree", "Xla"]

_LISTED = 5
_MOST_DEVICES = 64
"""Limit of devices of one machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CompiledEstimator:
    """Base class of estimators that compile and time regions of a program. Fields are their common options.

    ``region``: ``fused`` (chains of elementwise work with their consumer, as compilers fuse them) or ``op``.
    ``repeats``: samples per region. ``timeout_s``: time limit for one region. ``cache``: folder of saved
    results (empty: the user's cache). ``failed``: treat a region that does not compile or run as an
    ``error``, or as ``unknown``. ``progress`` is called with the number of measured regions and of all
    regions.
    """

    region: str = "fused"
    repeats: int = 7
    timeout_s: float = 120.0
    cache: str = ""
    failed: str = "error"
    progress: Progress | None = field(default=None, repr=False, compare=False)

    toolchain: ClassVar[str] = ""
    extra: ClassVar[str] = ""
    modules: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        if self.region not in {"fused", "op"}:
            raise UsageError(f"{self.name}: invalid option region={self.region}", hint="use fused or op")
        if self.failed not in {"error", "unknown"}:
            raise UsageError(f"{self.name}: invalid option failed={self.failed}", hint="use error or unknown")
        if not 1 <= self.repeats <= 1000:
            raise UsageError(f"{self.name}: invalid option repeats={self.repeats}", hint="use 1 to 1000")
        if not 0 < self.timeout_s < float("inf"):
            raise UsageError(
                f"{self.name}: invalid option timeout_s={self.timeout_s:g}", hint="use seconds above 0"
            )
        if self.progress is not None and not callable(self.progress):
            raise UsageError(
                f"{self.name}: option progress must be a Python function", hint="set it in Python only"
            )

    @property
    def name(self) -> str:
        """Name of the model in the registry and in reports."""
        return self.toolchain

    @property
    def _at_once(self) -> int:
        """Return the number of devices that run a region at the same time."""
        return 1

    @classmethod
    def available(cls) -> Availability:
        """Return the availability: test if the compiler is installed."""
        missing: list[str] = []
        for module in cls.modules:
            try:
                is_missing = find_spec(module) is None
            except ModuleNotFoundError:  # its parent package is not installed
                is_missing = True
            if is_missing:
                missing.append(module)
        why = f"not installed: {', '.join(missing)}" if missing else ""
        return Availability(not missing, why, f"pip install 'hespas[{cls.extra}]'" if missing else "")

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """Return the time of one execution of each node. The time of a region is divided among its nodes in
        proportion to the bytes they move.

        Raises ``MissingExtraError`` without the compiler, and ``UnsupportedError`` with the compiler's
        message if a region fails (unless ``failed`` is ``unknown``).
        """
        findings = Diagnostics() if diagnostics is None else diagnostics
        units = units_of(graph, fused=self.region == "fused", devices=self._at_once)
        _report_uncovered(self.name, graph.name, units.uncovered, findings)
        measured = self._measured(units.units, graph.name, device, findings)
        times = np.full((3, len(graph)), np.nan)
        times[:, takes_no_time(graph)] = 0.0
        if measured is not None:
            moved = np.maximum(np.nan_to_num(graph.bytes_moved, nan=1.0, posinf=1.0), 1.0)
            for number, nodes in units.members:
                timing, last = measured.timings[number], nodes[-1]
                source = graph.strings[int(graph.source_id[last])] or f"node {int(graph.id[last])}"
                self._check(timing, graph.op_name(last), f"{graph.name}: {source}", findings)
                figures, members = np.array(_figures(timing)), np.array(nodes, np.int64)
                times[:, members] = figures[:, None] * (moved[members] / moved[members].sum())
        estimated = ~np.isnan(times[0])
        return Estimate(
            hardware=device.name,
            estimators=(self.name,),
            bounds=("free", "model"),
            duration_ns=times[0],
            low_ns=times[1],
            high_ns=times[2],
            estimator=np.where(estimated, 0, -1).astype(np.int8),
            bound=np.where(estimated, times[0] > 0, -1).astype(np.int8),
            bases=("" if measured is None else _basis(measured, device),),
            basis=np.where(estimated & (times[0] > 0), 0, -1).astype(np.int16),
        )

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """Return the time of each operation of a table: products, elementwise operations and sums; NaN for
        others.
        """
        findings = Diagnostics() if diagnostics is None else diagnostics
        units = units_of_table(ops)
        distinct = {unit: number for number, unit in enumerate(dict.fromkeys(filter(None, units)))}
        without = Counter(ops.op[row] or ops.kind[row] for row, unit in enumerate(units) if unit is None)
        _report_uncovered(self.name, "table", without, findings)
        times = np.full((3, len(ops)), np.nan)
        measured = self._measured(tuple(distinct), "table", device, findings)
        if measured is not None:
            for row, unit in enumerate(units):
                if unit is not None:
                    timing = measured.timings[distinct[unit]]
                    self._check(timing, ops.op[row] or ops.kind[row], "table", findings)
                    times[:, row] = _figures(timing)
        basis = "" if measured is None else _basis(measured, device)
        return Prediction.of(self.name, times[0], times[1], times[2], basis=basis)

    def _measured(
        self, units: Sequence[Unit], where: str, device: Device, diagnostics: Diagnostics
    ) -> UnitTimings | None:
        if not units:
            return None
        if not self.available().is_available:
            raise MissingExtraError(f"estimator {self.name!r}", self.extra)
        measuring = UnitMeasurement(
            toolchain=self.toolchain,
            repeats=self.repeats,
            timeout_s=self.timeout_s,
            folder=Path(self.cache) if self.cache else None,
            devices=self._at_once,
        )
        measured = measuring.run(units, self.progress)
        # Report the machine on which the times were measured, and warn if it is not the requested device.
        machine = measured.machine
        clocks = sorted(timing.clock_mhz for timing in measured.timings if timing.clock_mhz)
        at = f" at {clocks[len(clocks) // 2]:,.0f} MHz" if clocks else ""
        several = f"{machine.devices} at once of " if machine.devices > 1 else ""
        text = f"{several}{machine.device} ({machine.platform}, {machine.compiler}){at}"
        diagnostics.info(f"{self.name}.measured", where, f"measured on {text}")
        if _basis(measured, device) != MEASURED_BASIS:
            warning = f"times are of this machine, {text}, not of {device.name}"
            diagnostics.warning(f"{self.name}.other-device", where, warning)
        return measured

    def _check(self, timing: Timing, op: str, where: str, diagnostics: Diagnostics) -> None:
        """Report a region that failed, as an error or as a diagnostic (option ``failed``)."""
        if timing.is_known:
            return
        text = f"{op}: {self.name} failed: {timing.fault or 'no time was measured'}"
        if self.failed == "error":
            hint = f"leave it unknown: `estimator={self.name}:failed=unknown` (or `on_unknown=warn`)"
            raise UnsupportedError(f"{where}: {text}", hint=hint)
        diagnostics.error(f"{self.name}.failed", where, text)


def _basis(measured: UnitTimings, device: Device) -> str:
    """Return the basis of times that were measured on this machine, which may not be the estimated device."""
    machine = measured.machine
    if device.kind == "cpu":
        is_same = machine.platform in {"cpu", "local-task"}
    else:
        try:
            is_same = find_device(machine.device) == device.name
        except UsageError:
            is_same = False
    return MEASURED_BASIS if is_same else reference_basis((machine.device,))


def _figures(timing: Timing) -> tuple[float, float, float]:
    if not timing.is_known:
        return np.nan, np.nan, np.nan
    return timing.duration_ns, timing.low_ns, timing.high_ns


def _report_uncovered(name: str, where: str, uncovered: Counter[str], diagnostics: Diagnostics) -> None:
    """Warn about operations that have no duration because their types do not determine a program to time."""
    if uncovered:
        listed = ", ".join(f"{op} ({count:,})" for op, count in uncovered.most_common(_LISTED))
        text = f"no duration: the types do not determine a program of {listed}"
        diagnostics.warning(f"{name}.no-program", where, text, count=uncovered.total())


@dataclass(frozen=True, slots=True, kw_only=True)
class Xla(_CompiledEstimator):
    """Estimator that compiles and times regions by XLA, on the device that JAX uses. Options: see
    :class:`_CompiledEstimator`.

    With ``devices`` above 1, that many devices of this machine run each region at once, including collectives
    between them (the devices of a CPU share its cores).
    """

    devices: int = 1

    toolchain: ClassVar[str] = "xla"
    what: ClassVar[str] = "Regions of the program, compiled by XLA and timed on the device that JAX uses."
    extra: ClassVar[str] = "jax"
    modules: ClassVar[tuple[str, ...]] = ("jax", "jaxlib")

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        _CompiledEstimator.__post_init__(self)
        if not 1 <= self.devices <= _MOST_DEVICES:
            raise UsageError(f"xla: invalid option devices={self.devices}", hint=f"use 1 to {_MOST_DEVICES}")

    @property
    def _at_once(self) -> int:
        return self.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Iree(_CompiledEstimator):
    """Estimator that compiles and times regions by IREE's LLVM back end, on this CPU. Options: see
    :class:`_CompiledEstimator`.
    """

    toolchain: ClassVar[str] = "iree"
    what: ClassVar[str] = "Regions of the program, compiled by IREE's LLVM back end and timed on this CPU."
    extra: ClassVar[str] = "iree"
    modules: ClassVar[tuple[str, ...]] = ("iree.compiler", "iree.runtime")
