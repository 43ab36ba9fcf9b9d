"""COCOSSim (C++, built by the user): time of a product on a square systolic array with its memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hespas.estimators.external.adapter import (
    CommandError,
    ExternalSimulator,
    MatrixProduct,
    Simulated,
    binary_availability,
    binary_of,
    read_answer,
    run_command,
)
from hespas.estimators.interface import Availability
from hespas.estimators.systolic.cycles import array_of, parse_array, parse_dataflow
from hespas.graph.errors import UsageError
from hespas.hardware import Device

__all__ = ["Cocossim"]

_PROGRAM = "perf_model"
_TIME = re.compile(r"\bTime:\s*([0-9.eE+-]+)\s*us\b")
_CYCLES = re.compile(r"^\s*Cycles:?\s+([0-9.eE+]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cocossim(ExternalSimulator):
    """COCOSSim. Options of :class:`ExternalSimulator`, and: ``array`` as ``128x128`` (square; empty: the
    device's), ``dataflow`` ``os`` or ``ws``, ``cores``.
    """

    array: str = ""
    dataflow: str = ""
    cores: int = 1

    simulator: ClassVar[str] = "cocossim"

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        ExternalSimulator.__post_init__(self)
        if self.array:
            parse_array(self.array)
        if self.dataflow and parse_dataflow(self.dataflow) == "is":
            raise UsageError("cocossim: dataflow is os or ws")
        if self.cores < 1:
            raise UsageError("cocossim: cores must be 1 or more")

    def available(self) -> Availability:
        """Probe if the program exists."""
        install = "build COCOSSim and name its program: `estimator=cocossim:command=PATH/perf_model`"
        return binary_availability(self.command, _PROGRAM, install)

    def configured(self, device: Device) -> str:
        """Return the options of the program."""
        return " ".join(self._options(device))

    def simulate(self, product: MatrixProduct, device: Device, folder: Path) -> Simulated:
        """Return its time, or its cycles if it reports no time."""
        layers, results = folder / "layers.txt", folder / "results.txt"
        # It accepts products with m <= n: the transposed product is the same work.
        m, n = sorted((product.m, product.n))
        layers.write_text(f"Matmul {m} {product.k} {n}\n")
        program = binary_of(self.command, _PROGRAM)
        if program is None:
            raise CommandError("the program no longer exists")
        command = [program, *self._options(device), "-i", str(layers), "-o", str(results)]
        text = run_command(command, folder, self.timeout_s)
        text += "\n" + read_answer(results).decode("utf-8", "replace")
        time, cycles = _last(_TIME, text), _last(_CYCLES, text)
        return Simulated(duration_ns=1e3 * time if time > 0 else -1.0, cycles=cycles)

    def _options(self, device: Device) -> list[str]:
        array = array_of(device, self.array, self.dataflow)
        if array is None:
            hint = "`estimator=cocossim:array=128x128`"
            raise UsageError(f"cocossim: {device.name} states no systolic array", hint=hint)
        if array.rows != array.columns:
            raise UsageError(f"cocossim: arrays are square, not {array.rows}x{array.columns}")
        weights_stay = array.dataflow != "os"  # its arrays have no input-stationary dataflow
        settings = {"c": self.cores, "sa_sz": array.rows, "vu_sz": array.rows, "ws": int(weights_stay)}
        clock = f"{self.clock_hz(device) / 1e9:.6g}"
        return [*(text for name, value in settings.items() for text in (f"-{name}", str(value))), "-f", clock]


def _last(pattern: re.Pattern[str], text: str) -> float:
    """Return the last number that matches, -1 without one."""
    numbers: list[str] = pattern.findall(text)
    try:
        return float(numbers[-1]) if numbers else -1.0
    except ValueError:
        return -1.0
