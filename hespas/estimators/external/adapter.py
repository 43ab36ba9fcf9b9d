"""What all array simulators share: found or told what to install, run once per product, results kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite, isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import msgspec
import numpy as np

from hespas.estimators.availability import Availability
from hespas.estimators.by_operation import Prediction, estimate_by_operation
from hespas.estimators.external.commands import CommandError
from hespas.estimators.external.problems import Product, products_of
from hespas.estimators.result_cache import ResultCache, cache_folder, content_key
from hespas.estimators.systolic.basis import clock_hz
from hespas.graph import Diagnostics, Estimate, OpGraph
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.hardware import Device
from hespas.operations import Operations

__all__ = ["External", "Simulated"]

_LISTED = 5


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulator said of a product: cycles of its clock, or a time [ns]; -1 where it says none."""

    cycles: float = -1.0
    duration_ns: float = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class External:
    """Fields are the options.

    ``command``: the program (or the Python that has the package; empty: looked for). ``clock_mhz``: of the
    array (0: the device's). ``timeout_s``: for one product. ``cache``: the folder of kept results (empty: the
    user's). ``failed``: what a product is that the simulator fails on: ``error`` or ``unknown``.
    ``progress`` is told how many products of how many are done.
    """

    command: str = ""
    clock_mhz: float = 0.0
    timeout_s: float = 600.0
    cache: str = ""
    failed: str = "error"
    progress: Callable[[int, int], None] | None = field(default=None, repr=False, compare=False)

    simulator: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        if self.failed not in {"error", "unknown"}:
            raise UsageError(f"{self.name}: failed is {self.failed!r}", hint="error or unknown")
        if not (self.clock_mhz >= 0 and isfinite(self.clock_mhz) and 0 < self.timeout_s < float("inf")):
            raise UsageError(f"{self.name}: clock_mhz must not be negative, timeout_s must be above 0")
        if self.progress is not None and not callable(self.progress):
            raise UsageError(f"{self.name}: progress is a function", hint="it is given in Python only")

    @property
    def name(self) -> str:
        """What the registry and reports call the model."""
        return self.simulator

    def available(self) -> Availability:
        """Whether the simulator is there, and which version."""
        raise NotImplementedError

    def configured(self, device: Device) -> str:
        """All else that decides a result, as text. Raises ``UsageError`` where something lacks."""
        raise NotImplementedError

    def simulate(self, product: Product, device: Device, folder: Path) -> Simulated:
        """Run the simulator in an empty folder. Raises :class:`CommandError`."""
        raise NotImplementedError

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """The time of one execution of each product of a graph; nothing of other operations."""
        return estimate_by_operation(self, graph, device, diagnostics)

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """The time of each product; NaN of other operations.

        Raises ``UnsupportedError`` where the simulator is not there, or fails (unless ``failed`` is
        ``unknown``), ``UsageError`` where an option lacks.
        """
        found = Diagnostics() if diagnostics is None else diagnostics
        asked = products_of(ops)
        _tell_uncovered(self.name, ops, asked, found)
        distinct = dict.fromkeys(each[0] for each in asked if each is not None)
        said = self._said(list(distinct), device, found)
        times = np.full(len(ops), np.nan)
        for row, each in enumerate(asked):
            if each is not None:
                times[row] = said[each[0]] * each[1]
        return Prediction.of(self.name, times)

    def clock_hz(self, device: Device) -> float:
        """The clock that cycles are of. Raises ``UsageError`` where neither option nor device state one."""
        if self.clock_mhz:
            return self.clock_mhz * 1e6
        stated = clock_hz(device)
        if isnan(stated):
            hint = f"--estimator {self.name}:clock_mhz=940"
            raise UsageError(f"{self.name}: {device.name} states no clock of an array", hint=hint)
        return stated

    def _said(
        self, products: list[Product], device: Device, diagnostics: Diagnostics
    ) -> dict[Product, float]:
        """The time of each product [ns], what is kept first; NaN where the simulator failed."""
        if not products:
            return {}
        there = self.available()
        if not there.is_available:
            raise UnsupportedError(f"estimator {self.name!r}: {there.detail}", hint=there.install)
        configured = self.configured(device)
        folder = Path(self.cache) if self.cache else cache_folder("simulated")
        cache = ResultCache(folder / self.name, Simulated)
        said: dict[Product, float] = {}
        for done, product in enumerate(products):
            if self.progress:
                self.progress(done, len(products))
            key = content_key((self.name, there.detail, configured, repr(tuple(product))))
            result = cache.get(key)
            if result is None or not _states_time(result):
                result = self._run(product, device, diagnostics)
                if result is not None:
                    cache.put(key, result)
            said[product] = self._time_ns(result, device)
        if self.progress:
            self.progress(len(products), len(products))
        return said

    def _run(self, product: Product, device: Device, diagnostics: Diagnostics) -> Simulated | None:
        try:
            with TemporaryDirectory(prefix=f"hespas-{self.name}-") as folder:
                result = self.simulate(product, device, Path(folder))
            if not _states_time(result):
                raise CommandError("its output states no time")
        except CommandError as error:
            text = f"{self.name} failed on a product of {product}: {error}"
            if self.failed == "error":
                hint = f"--estimator {self.name}:failed=unknown (or --missing warn) leaves it unknown"
                raise UnsupportedError(text, hint=hint) from error
            diagnostics.error(f"{self.name}.failed", str(product), text)
            return None
        return result

    def _time_ns(self, result: Simulated | None, device: Device) -> float:
        if result is None:
            return np.nan
        return result.duration_ns if result.duration_ns > 0 else 1e9 * result.cycles / self.clock_hz(device)


def _states_time(result: Simulated) -> bool:
    """Whether it says a time, or cycles; a kept result may be damaged."""
    return 0 < max(result.cycles, result.duration_ns) < float("inf")


def _tell_uncovered(
    name: str, ops: Operations, asked: list[tuple[Product, int] | None], diagnostics: Diagnostics
) -> None:
    uncovered = Counter(ops.op[row] or ops.kind[row] for row, each in enumerate(asked) if each is None)
    if uncovered:
        listed = ", ".join(f"{op} ({count:,})" for op, count in uncovered.most_common(_LISTED))
        text = f"no duration: {name} simulates products of known sizes only, not {listed}"
        diagnostics.warning(f"{name}.not-a-product", "operations", text, count=uncovered.total())
