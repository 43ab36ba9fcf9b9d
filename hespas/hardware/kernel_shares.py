"""Kernels"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import nan
from pathlib import Path
from typing import Literal, NamedTuple, cast

from hespas.hardware.device_fits import Fit, read_fits
from hespas.hardware.devices import Device
from hespas.hardware.library import canonical, named_device
from hespas.hardware.typed_toml import (
    FileKind,
    Positive,
    PositiveOrNan,
    Row,
    Text,
    check_source_keys,
    read_rows,
    refuse_repeats,
)

__all__ = [
    "COMMON_FLOOR_NS",
    "FACTORS",
    "HELD",
    "KERNELS_FOLDER",
    "LIBRARIES",
    "TRAINING_FOLDER",
    "Apart",
    "AttentionShare",
    "Bound",
    "CommonShares",
    "Held",
    "InterferenceFactor",
    "Library",
    "Power",
    "ProductShare",
    "TrainingShares",
    "common_fits",
    "common_shares",
    "distance_of_kernels",
    "factor_of",
    "fits_at",
    "held_of",
    "read_training_shares",
    "starts_of",
    "training_shares",
]


KERNELS_FOLDER = Path(__file__).parent / "kernels"
"""One file per recorded device, and one per vendor for its others, by their names in lower case."""

COMMON_FLOOR_NS = 2000.0
"""The shortest kernel of the device that a vendor's file speaks of."""

_STARTS = ("t0_ns", "start_ns")


def common_fits(device: Device) -> tuple[Fit, ...]:
    """What is known of a device's kernels: by recordings of its own, or else of its vendor's other GPUs."""
    if device.kind != "gpu" or device.vendor.lower() not in _names():
        return ()
    own = _in_file(device.name.lower())
    forms = {fit.form for fit in own}
    others = (fit for fit in _in_file(device.vendor.lower()) if fit.form not in forms)
    return (*own, *fits_at(tuple(others), device))


def distance_of_kernels(device: Device) -> str:
    """How far :func:`common_fits` stand from what was recorded, in words: empty for a device with recordings
    of its own.
    """
    recorded = [each for each in _recorded() if each.vendor == device.vendor]
    if any(each.name == device.name for each in recorded):
        return ""
    kin = [each.name for each in recorded if each.family == device.family]
    names = ", ".join(kin or (each.name for each in recorded))
    of_what = f"another device of its family ({device.family})" if kin else "another family"
    return f"recordings of {of_what} stand in: {names}"


@cache
def _recorded() -> tuple[Device, ...]:
    """Devices with a file of their own recordings; the other files are of vendors."""
    return tuple(named_device(name) for name in sorted(_names()) if canonical(name))


def fits_at(common: Sequence[Fit], device: Device) -> tuple[Fit, ...]:
    """What a vendor's devices have in common as one of them runs it of which nothing was recorded."""
    starts = starts_of(device)
    return tuple(
        replace(
            fit,
            parameters=tuple(
                replace(each, value=each.value * starts) if each.name in _STARTS else each
                for each in fit.parameters
            ),
        )
        for fit in common
    )


def starts_of(device: Device) -> float:
    """What kernels start in on a device beside that of a vendor's file: as their shortest ones compare."""
    floor_ns = device.launch_overhead_ns
    return floor_ns / COMMON_FLOOR_NS if floor_ns > 0 else 1.0


@cache
def _in_file(name: str) -> tuple[Fit, ...]:
    return read_fits(KERNELS_FOLDER / f"{name}.toml") if name in _names() else ()


@cache
def _names() -> frozenset[str]:
    return frozenset(path.stem for path in KERNELS_FOLDER.glob("*.toml"))


Library = Literal["flash1", "flash2", "cudnn", "splash", "measured"]

LIBRARIES: tuple[Library, ...] = ("flash1", "flash2", "cudnn", "splash", "measured")
"""Whose fused attention a step runs: FlashAttention's first or second version, cuDNN's, that of JAX for TPUs;
``measured``: what estimators know of a device's kernels.
"""

TRAINING_FOLDER = Path(__file__).parent / "training"

_ABOUT = FileKind(
    "a file of training kernels",
    where="check the path; hespas/hardware/training holds those that ship",
    example="hespas/hardware/training/hopper.toml is a whole one",
)


class AttentionShare(Row, frozen=True, kw_only=True):
    """Shares of the 16-bit peak that both passes of a library reach with many keys, and the keys at which
    half of that is. Heads of fewer than 128 reach ``narrow_head`` of it; with operands of 8 bits it is
    ``of_8_bits`` times as fast.
    """

    library: Library
    forward: Positive
    backward: Positive
    half_keys: Positive
    narrow_head: Positive
    of_8_bits: Positive
    source: Text
    note: Text = ""


class ProductShare(Row, frozen=True, kw_only=True):
    """The most of the dense peak that products of a step sustain, by bits of their operands. ``of_16_bits``:
    efficiency of formats that stand in, over that in 16 bits of the same product. ``of_blocks``: that of
    formats with a scale for each block of elements over those with one for all. ``filled``: the share is all
    that limits a product, beside sizes that do not fill a matrix unit.
    """

    bits: Literal[4, 8, 16]
    sustained: Positive
    source: Text
    of_16_bits: PositiveOrNan = nan
    of_blocks: Positive = 1.0
    filled: bool = False
    note: Text = ""


class Power(Row, frozen=True, kw_only=True):
    """The exponent by which rates follow power at another limit than the device file's."""

    exponent: Positive
    source: Text


class Apart(Row, frozen=True, kw_only=True):
    """What elementwise kernels take that nothing fuses, over those that a compiler or a library fuses."""

    factor: Positive
    source: Text


class TrainingShares(Row, frozen=True, kw_only=True):
    """A file. ``library`` is whose attention is meant where nobody says; ``stands_in`` are number formats of
    products which estimators know of other vendors' devices only, so that those in 16 bits stand in.
    """

    name: Text
    description: Text
    vendor: str
    kind: str
    families: tuple[Text, ...]
    library: Library
    stands_in: tuple[Text, ...]
    attention: tuple[AttentionShare, ...]
    products: tuple[ProductShare, ...]
    sources: dict[str, Text]

    def attention_of(self, library: str) -> AttentionShare | None:
        """What is known of a library."""
        return next((each for each in self.attention if each.library == library), None)

    def products_of(self, bits: float) -> ProductShare | None:
        """What is known of products of operands of so many bits; scales of blocks do not count."""
        return next((each for each in self.products if each.bits == min(16, round(bits))), None)


class CommonShares(TrainingShares, frozen=True, kw_only=True):
    """The file that holds for all devices: what no family changes, and devices of which nothing is known."""

    power: Power
    apart: Apart


def read_training_shares(path: Path) -> TrainingShares:
    """What a file says. Raises ``FormatError`` naming file, key path and what was expected."""
    table, file = read_rows(path, CommonShares if path.stem == _COMMON else TrainingShares, _ABOUT)
    for name in ("attention", "products"):
        rows = cast("list[Mapping[str, object]]", table[name])
        for index, row in enumerate(rows):
            check_source_keys(row, f"{name}[{index}].", file.sources, path)
    if isinstance(file, CommonShares):
        for name in ("power", "apart"):
            check_source_keys(cast("Mapping[str, object]", table[name]), f"{name}.", file.sources, path)
    refuse_repeats(path, "attention", ((each.library,) for each in file.attention))
    refuse_repeats(path, "products", ((each.bits,) for each in file.products))
    return file


_COMMON = "common"


@cache
def _shipped() -> tuple[TrainingShares, ...]:
    return tuple(read_training_shares(path) for path in sorted(TRAINING_FOLDER.glob("*.toml")))


def common_shares() -> CommonShares:
    """What holds for all devices."""
    return next(each for each in _shipped() if isinstance(each, CommonShares))


def training_shares(device: Device) -> TrainingShares:
    """What is known of a device: by its family, else its vendor's others of its kind, else what holds for
    all.
    """
    mine = [each for each in _shipped() if (each.vendor, each.kind) == (device.vendor, device.kind)]
    ranked = [each for each in mine if device.family in each.families]
    ranked += [each for each in mine if not each.families]
    return ranked[0] if ranked else common_shares()


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
