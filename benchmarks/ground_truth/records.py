"""Document of a sweep: one record per case, and the machine."""

from __future__ import annotations

from math import nan
from statistics import median, quantiles, stdev

import msgspec

from benchmarks.ground_truth.machine import Clocks, Machine

__all__ = ["SCHEMA", "File", "Manifest", "NoiseFloor", "Record", "noise_floors"]

SCHEMA = "hespas.ground_truth/1"


class File(msgspec.Struct, frozen=True):
    """A gzipped file of a case. ``bytes`` is the packed size, ``sha256`` the hash of the unpacked content."""

    path: str
    bytes: int
    sha256: str


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A captured case. ``fault`` is the reason if the capture failed; the measured fields are then empty.
    Times are of single executions, one per repeat: from the device trace (if empty, ``note`` has the reason),
    and from the host clock.
    """

    name: str
    family: str
    columns: dict[str, str | int] = {}
    split: str = ""
    shapes: str = ""
    strides: str = ""
    device_ns: list[float] = []
    wall_ns: list[float] = []
    clocks: Clocks = Clocks()
    argument_sets: int = 0
    captured: str = ""
    files: dict[str, File] = {}
    left_out: dict[str, str] = {}
    note: str = ""
    fault: str = ""

    @property
    def latency_ns(self) -> float:
        """Median device time over repeats; NaN without device times."""
        return median(self.device_ns) if self.device_ns else nan

    @property
    def deviation_ns(self) -> float:
        """Standard deviation of the device time over repeats; NaN for fewer than two repeats."""
        return stdev(self.device_ns) if len(self.device_ns) > 1 else nan


class NoiseFloor(msgspec.Struct, frozen=True):
    """Deviation over repeats as a share of the median time: median and 90th percentile over ``cases``
    cases.
    """

    cases: int
    median: float
    p90: float


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The document. ``method`` describes the measurement of times, ``bytes`` is the size of all packed
    files.
    """

    schema: str
    command: str
    machine: Machine
    method: str
    repeats: int
    bytes: int
    noise: dict[str, NoiseFloor]
    cases: list[Record]


def noise_floors(records: list[Record]) -> dict[str, NoiseFloor]:
    """Return the noise floor of each family, and of all cases (``all``)."""
    shares: dict[str, list[float]] = {}
    for record in records:
        if len(record.device_ns) > 1:
            share = record.deviation_ns / record.latency_ns
            for name in ("all", record.family):
                shares.setdefault(name, []).append(share)
    return {name: _floor(values) for name, values in shares.items()}


def _floor(shares: list[float]) -> NoiseFloor:
    p90 = quantiles(shares, n=10, method="inclusive")[-1] if len(shares) > 1 else shares[0]
    return NoiseFloor(cases=len(shares), median=round(median(shares), 5), p90=round(p90, 5))
