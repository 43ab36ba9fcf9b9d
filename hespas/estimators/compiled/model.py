"""The compiled estimators: each distinct region of a program, compiled and timed on the present device.

What a compiler does across regions (fusing further, reusing memory in place, overlapping) is not seen.
Communication is seen between the devices of one machine only. Times are of the machine this runs on, whatever
device is asked for: that is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np

from hespas.estimators.compiled.measuring import Machine, Measured, Measuring, Progress, Timing
from hespas.estimators.compiled.units import Unit, Units, units_of, units_of_table
from hespas.estimators.interface import Availability, Prediction, takes_no_time
from hespas.graph import Diagnostics, Estimate, OpGraph
from hespas.graph.columns import FloatArray
from hespas.graph.errors import MissingExtraError, UnsupportedError, UsageError
from hespas.hardware import Device, find_device
from hespas.operations import Operations

__all__ = ["Iree", "Xla"]

_LISTED = 5
_MOST_DEVICES = 64
"""Devices of one machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compiled:
    """Fields are the options.

    ``region``: ``fused`` (chains of elementwise work with their consumer, as compilers fuse them) or ``op``.
    ``repeats``: samples per region. ``timeout_s``: for one region. ``cache``: the folder of kept results
    (empty: the user's cache). ``failed``: what a region that does not compile or run is: an ``error``, or
    ``unknown``. ``progress`` is told how many regions of how many are measured.
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
            raise UsageError(f"{self.name}: no region {self.region!r}", hint="fused or op")
        if self.failed not in {"error", "unknown"}:
            raise UsageError(f"{self.name}: failed is {self.failed!r}", hint="error or unknown")
        if not (1 <= self.repeats <= 1000 and 0 < self.timeout_s < float("inf")):
            raise UsageError(f"{self.name}: repeats are 1 to 1000, timeout_s above 0")
        if self.progress is not None and not callable(self.progress):
            raise UsageError(f"{self.name}: progress is a function", hint="it is given in Python only")

    @property
    def name(self) -> str:
        """What the registry and reports call the model."""
        return self.toolchain

    @property
    def _at_once(self) -> int:
        """Devices that run a region at the same time."""
        return 1

    @classmethod
    def available(cls) -> Availability:
        """Whether the compiler is installed."""
        missing = [module for module in cls.modules if not _is_installed(module)]
        why = f"not installed: {', '.join(missing)}" if missing else ""
        return Availability(not missing, why, f"pip install 'hespas[{cls.extra}]'" if missing else "")

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """The time of one execution of each node; members of a region share its time by the bytes they move.

        Raises ``MissingExtraError`` without the compiler, and ``UnsupportedError`` with its message where a
        region fails (unless ``failed`` is ``unknown``).
        """
        found = Diagnostics() if diagnostics is None else diagnostics
        units = units_of(graph, fused=self.region == "fused", devices=self._at_once)
        _tell_uncovered(self.name, graph.name, units.uncovered, found)
        measured = self._measured(units.units, graph.name, device, found)
        times = np.full((3, len(graph)), np.nan)
        times[:, takes_no_time(graph)] = 0.0
        if measured is not None:
            self._settle(graph, units, measured.timings, found)
            _spread(graph, units, measured.timings, times)
        known = ~np.isnan(times[0])
        return Estimate(
            hardware=device.name,
            estimators=(self.name,),
            bounds=("free", "model"),
            duration_ns=times[0],
            low_ns=times[1],
            high_ns=times[2],
            estimator=np.where(known, 0, -1).astype(np.int8),
            bound=np.where(known, times[0] > 0, -1).astype(np.int8),
        )

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """The time of each operation of a table: products, elementwise operations and sums; others none."""
        found = Diagnostics() if diagnostics is None else diagnostics
        units = units_of_table(ops)
        distinct = {unit: number for number, unit in enumerate(dict.fromkeys(filter(None, units)))}
        without = Counter(ops.op[row] or ops.kind[row] for row, unit in enumerate(units) if unit is None)
        _tell_uncovered(self.name, "table", without, found)
        times = np.full((3, len(ops)), np.nan)
        measured = self._measured(tuple(distinct), "table", device, found)
        if measured is not None:
            for row, unit in enumerate(units):
                if unit is not None:
                    timing = measured.timings[distinct[unit]]
                    self._check(timing, ops.op[row] or ops.kind[row], "table", found)
                    times[:, row] = _figures(timing)
        return Prediction.of(self.name, times[0], times[1], times[2])

    def _measured(
        self, units: Sequence[Unit], where: str, device: Device, diagnostics: Diagnostics
    ) -> Measured | None:
        if not units:
            return None
        if not self.available().is_available:
            raise MissingExtraError(f"estimator {self.name!r}", self.extra)
        measuring = Measuring(
            toolchain=self.toolchain,
            repeats=self.repeats,
            timeout_s=self.timeout_s,
            folder=Path(self.cache) if self.cache else None,
            devices=self._at_once,
        )
        measured = measuring.run(units, self.progress)
        _tell_machine(self.name, where, measured, device, diagnostics)
        return measured

    def _settle(
        self, graph: OpGraph, units: Units, timings: Sequence[Timing], diagnostics: Diagnostics
    ) -> None:
        for number, nodes in units.members:
            place = graph.strings[int(graph.source_row[nodes[-1]])] or f"node {int(graph.id[nodes[-1]])}"
            self._check(timings[number], graph.op_name(nodes[-1]), f"{graph.name}: {place}", diagnostics)

    def _check(self, timing: Timing, op: str, where: str, diagnostics: Diagnostics) -> None:
        """A failure is an error, or told; it never is a time."""
        if timing.is_known:
            return
        text = f"{op}: {self.name} failed: {timing.fault or 'no time was measured'}"
        if self.failed == "error":
            hint = f"`estimator={self.name}:failed=unknown` (or `on_unknown=warn`) leaves it unknown"
            raise UnsupportedError(f"{where}: {text}", hint=hint)
        diagnostics.error(f"{self.name}.failed", where, text)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is not there
        return False


def _figures(timing: Timing) -> tuple[float, float, float]:
    if not timing.is_known:
        return np.nan, np.nan, np.nan
    return timing.duration_ns, timing.low_ns, timing.high_ns


def _spread(graph: OpGraph, units: Units, timings: Sequence[Timing], times: FloatArray) -> None:
    """Each region's time among its members, by the bytes they move."""
    moved = np.maximum(np.nan_to_num(graph.bytes_moved, nan=1.0, posinf=1.0), 1.0)
    for number, nodes in units.members:
        figures = np.array(_figures(timings[number]))
        members = np.array(nodes, np.int64)
        times[:, members] = figures[:, None] * (moved[members] / moved[members].sum())


def _tell_uncovered(name: str, where: str, uncovered: Counter[str], diagnostics: Diagnostics) -> None:
    if uncovered:
        listed = ", ".join(f"{op} ({count:,})" for op, count in uncovered.most_common(_LISTED))
        text = f"no duration: the types do not say enough to write a program of {listed}"
        diagnostics.warning(f"{name}.no-program", where, text, count=uncovered.total())


def _tell_machine(
    name: str, where: str, measured: Measured, device: Device, diagnostics: Diagnostics
) -> None:
    """Where the times are from, and that they are not of the device asked for."""
    machine = measured.machine
    clocks = sorted(each.clock_mhz for each in measured.timings if each.clock_mhz)
    at = f" at {clocks[len(clocks) // 2]:,.0f} MHz" if clocks else ""
    several = f"{machine.devices} at once of " if machine.devices > 1 else ""
    text = f"{several}{machine.device} ({machine.platform}, {machine.compiler}){at}"
    diagnostics.info(f"{name}.measured", where, f"measured on {text}")
    if not _is_same(machine, device):
        warning = f"times are of {text}, where this runs, not of {device.name}"
        diagnostics.warning(f"{name}.other-device", where, warning)


def _is_same(machine: Machine, device: Device) -> bool:
    if device.kind == "cpu":
        return machine.platform in {"cpu", "local-task"}
    try:
        return find_device(machine.device) == device.name
    except UsageError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Xla(_Compiled):
    """XLA, on the device that JAX uses. Options: see :class:`_Compiled`; with ``devices`` above 1 each region
    is timed while so many devices of this machine run it at once (those of a CPU share its cores), and so are
    collectives over them.
    """

    devices: int = 1

    toolchain: ClassVar[str] = "xla"
    what: ClassVar[str] = "Regions of the program, compiled by XLA and timed on the device that JAX uses."
    extra: ClassVar[str] = "jax"
    modules: ClassVar[tuple[str, ...]] = ("jax", "jaxlib")

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        _Compiled.__post_init__(self)
        if not 1 <= self.devices <= _MOST_DEVICES:
            raise UsageError(f"xla: devices is {self.devices}", hint=f"1 to {_MOST_DEVICES}")

    @property
    def _at_once(self) -> int:
        return self.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Iree(_Compiled):
    """IREE's LLVM back end, on this CPU. Options: see :class:`_Compiled`."""

    toolchain: ClassVar[str] = "iree"
    what: ClassVar[str] = "Regions of the program, compiled by IREE's LLVM back end and timed on this CPU."
    extra: ClassVar[str] = "iree"
    modules: ClassVar[tuple[str, ...]] = ("iree.compiler", "iree.runtime")
