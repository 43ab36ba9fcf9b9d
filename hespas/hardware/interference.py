"""What kernels of communication take from kernels beside them on a device: units held, and fitted factors.

Held units are the channels (workgroups) of NCCL and RCCL as recorded; TPUs and accelerators of their kind
move with engines beside their cores, copy engines hold nothing. ``python -m benchmarks.interference`` fits
the factors and tells how far each trace predicts the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from hespas.hardware.model import Device

__all__ = ["FACTORS", "HELD", "Bound", "Held", "InterferenceFactor", "factor_of", "held_of"]

Bound = Literal["compute", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceFactor:
    """A kernel limited by ``bound`` takes ``1 + value x s / (1 - s)`` times as long beside communication;
    ``s`` is the share of units that is held (``compute``) or of memory bandwidth that is taken (``memory``).

    ``device`` is whose fit it is (``*``: the mean of those, for all others). ``n`` counts kernels that ran
    beside communication, of ``keys`` kinds. A fit below 0 is 0.
    """

    device: str
    bound: Bound
    value: float
    std_error: float
    n: int
    keys: int
    source: str

    @property
    def distance(self) -> str:
        """How far the fit stands from a device that has it, in words: empty for that which it was made on."""
        return "another device" if self.device == "*" else ""


class Held(NamedTuple):
    """Units that one collective holds, and where that is from: the device and its family that recorded it."""

    units: int
    device: str
    family: str
    source: str

    def distance(self, device: Device) -> str:
        """How far the recording stands from a device, in words: empty for its own."""
        if device.name == self.device:
            return ""
        return "another device" if device.family == self.family else "another family"


_A100 = "recommendation model, rank 3 of 8, A100-SXM-40GB (HolisticTraceAnalysis f4d0062, trace_diff/control)"
_V100 = "DLRM, 8 ranks, V100-SXM2-32GB (facebookresearch/param 1e115ff, dlrm_kineto)"
_MI350X = "one rank of a training job on MI350X (AMD-AGI/TraceLens 171dd747, rocprof/908_results)"
_ALL = "mean with random effects over A100-SXM-40GB, V100-SXM2-32GB and MI350X; error of one more device"


def _factor(
    device: str, bound: Bound, fit: tuple[float, float], counts: tuple[int, int], source: str
) -> InterferenceFactor:
    return InterferenceFactor(
        device=device,
        bound=bound,
        value=fit[0],
        std_error=fit[1],
        n=counts[0],
        keys=counts[1],
        source=source,
    )


FACTORS: tuple[InterferenceFactor, ...] = (
    InterferenceFactor(
        device="A100-SXM-40GB", bound="compute", value=0.87, std_error=0.28, n=409, keys=38, source=_A100
    ),
    InterferenceFactor(
        device="A100-SXM-40GB", bound="memory", value=1.37, std_error=0.2, n=1891, keys=122, source=_A100
    ),
    InterferenceFactor(
        device="V100-SXM2-32GB", bound="compute", value=0.0, std_error=0.17, n=27, keys=6, source=_V100
    ),
    InterferenceFactor(
        device="V100-SXM2-32GB", bound="memory", value=0.3, std_error=0.07, n=163, keys=24, source=_V100
    ),
    InterferenceFactor(
        device="MI350X", bound="compute", value=0.13, std_error=0.12, n=5173, keys=17, source=_MI350X
    ),
    InterferenceFactor(
        device="MI350X", bound="memory", value=1.39, std_error=0.16, n=24156, keys=77, source=_MI350X
    ),
    _factor("*", "compute", (0.25, 0.36), (5609, 61), _ALL),
    InterferenceFactor(
        device="*", bound="memory", value=1.01, std_error=0.84, n=26210, keys=223, source=_ALL
    ),
)
"""Fitted factors; those of ``*`` are of all devices without one."""

HELD: dict[tuple[str, str], Held] = {
    ("NVIDIA", "Volta"): Held(
        12, "V100-SXM2-32GB", "Volta", "grid of NCCL's ring all-reduce on eight V100-SXM2-32GB, as recorded"
    ),
    ("NVIDIA", ""): Held(
        24, "A100-SXM-40GB", "Ampere", "grid of NCCL's collectives on eight A100-SXM-40GB, as recorded"
    ),
    ("AMD", ""): Held(104, "MI350X", "CDNA 4", "grid of RCCL's collectives on MI350X, as recorded"),
}
"""By vendor and family (empty: any)."""


def held_of(device: Device) -> Held | None:
    """What a collective holds on a device; None where nothing is known, or its units are not shared."""
    if device.kind != "gpu" or device.units <= 0:
        return None
    return HELD.get((device.vendor, device.family)) or HELD.get((device.vendor, ""))


def factor_of(device: Device, bound: Bound) -> InterferenceFactor:
    """The factor of a device, else that of all."""
    found = {each.device: each for each in FACTORS if each.bound == bound}
    return found.get(device.name, found["*"])
