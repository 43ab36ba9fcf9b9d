"""Figures of kernels that several devices share: fits by vendor, shares of the peak by device family, and
interference factors.

Fits of kernels that the devices of a vendor have in common are in ``kernels/``: one file per recorded device,
and one per vendor for its other devices. Files in ``training/`` have figures that no fit of a device covers:
shares of the dense peak that attention libraries are published to reach, and products that a step sustains at
the device's power limit. Their keys: ``name``, ``description``, ``vendor``, ``kind``, ``families`` and
``architectures`` (empty: all others of the vendor), ``library``, ``stands_in``, lists of tables ``attention``
and ``products``, in the common file also tables ``power``, ``apart`` and ``experts``, and ``sources``, a
table of texts that the ``source`` of every row refers to.

Interference: communication kernels occupy units that concurrent kernels cannot use. The units are the
channels (workgroups) of NCCL and RCCL as recorded; TPUs and similar accelerators communicate with engines
next to their cores, and copy engines occupy no units. ``python -m benchmarks.interference`` fits the factors
and reports how well each trace predicts the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import nan
from pathlib import Path
from typing import Literal, NamedTuple, cast

from hespas.hardware.device_fits import Fit, read_fits
from hespas.hardware.devices import Device
from hespas.hardware.library import canonical_name, named_device
from hespas.hardware.typed_toml import (
    FileKind,
    Positive,
    PositiveOrNan,
    Text,
    TomlRow,
    check_source_keys,
    read_rows,
    refuse_repeats,
)

__all__ = [
    "COMMON_FLOOR_NS",
    "HELD_UNITS",
    "INTERFERENCE_FACTORS",
    "KERNELS_FOLDER",
    "LIBRARIES",
    "TRAINING_FOLDER",
    "AttentionShare",
    "Bound",
    "CommonShares",
    "ExpertFigures",
    "HeldUnits",
    "InterferenceFactor",
    "Library",
    "PowerExponent",
    "ProductShare",
    "TrainingShares",
    "UnfusedFactor",
    "common_fits",
    "common_shares",
    "fits_distance",
    "held_units",
    "interference_factor",
    "read_training_shares",
    "recorded_references",
    "scaled_fits",
    "start_ratio",
    "training_shares",
]


KERNELS_FOLDER = Path(__file__).parent / "kernels"
"""Folder with one file per recorded device, and one per vendor for its others, by their names in
lower case.
"""

COMMON_FLOOR_NS = 2000.0
"""Shortest kernel of the device that the file of a vendor describes."""

_STARTS = ("t0_ns", "start_ns")


def common_fits(device: Device) -> tuple[Fit, ...]:
    """Return the kernel fits that apply to a device: fits to its own recordings, and for other forms fits to
    recordings of its vendor's other GPUs.
    """
    if device.kind != "gpu" or device.vendor.lower() not in _names():
        return ()
    own = _in_file(device.name.lower())
    forms = {fit.form for fit in own}
    others = (fit for fit in _in_file(device.vendor.lower()) if fit.form not in forms)
    return (*own, *scaled_fits(tuple(others), device))


def fits_distance(device: Device) -> str:
    """Return a text that describes how the recorded devices behind :func:`common_fits` differ from
    ``device``; empty if ``device`` was recorded.
    """
    names = recorded_references(device)
    if not names:
        return ""
    same_family = named_device(names[0]).family == device.family
    other = f"another device of its family ({device.family})" if same_family else "another family"
    return f"based on recordings of {other}: {', '.join(names)}"


def recorded_references(device: Device) -> tuple[str, ...]:
    """Return the names of the recorded devices behind :func:`common_fits`: of the device's family, else of
    its vendor. Empty if ``device`` was recorded, or no device of its vendor.
    """
    recorded = [entry for entry in _recorded() if entry.vendor == device.vendor]
    if any(entry.name == device.name for entry in recorded):
        return ()
    same_family = tuple(entry.name for entry in recorded if entry.family == device.family)
    return same_family or tuple(entry.name for entry in recorded)


@cache
def _recorded() -> tuple[Device, ...]:
    """Return the devices that have a file of their own recordings."""
    return tuple(named_device(name) for name in sorted(_names()) if canonical_name(name))


def scaled_fits(common: Sequence[Fit], device: Device) -> tuple[Fit, ...]:
    """Return the fits of a vendor with their starts scaled to a device without recordings."""
    starts = start_ratio(device)
    return tuple(
        replace(
            fit,
            parameters=tuple(
                replace(entry, value=entry.value * starts) if entry.name in _STARTS else entry
                for entry in fit.parameters
            ),
        )
        for fit in common
    )


def start_ratio(device: Device) -> float:
    """Return the factor that converts the start-up times of kernels in a vendor's file to a device. It is the
    shortest kernel time of the device divided by the shortest kernel time of the file.
    """
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
"""Libraries of fused attention: FlashAttention's first or second version, cuDNN's, JAX's for TPUs;
``measured``: the estimators' fits of a device's kernels.
"""

TRAINING_FOLDER = Path(__file__).parent / "training"

_TRAINING_FILE = FileKind(
    "a file of training kernels",
    where="check the path; hespas/hardware/training holds those that ship",
    example="hespas/hardware/training/hopper.toml is a whole one",
)


class AttentionShare(TomlRow, frozen=True, kw_only=True):
    """Fractions of the 16-bit peak that an attention library reaches, in the ``forward`` and the ``backward``
    pass, for many keys.

    With ``half_keys`` keys, half of this fraction is reached. Heads narrower than 128 reach the fraction
    multiplied by ``narrow_head``. Operands of 8 bits are ``of_8_bits`` times as fast.
    """

    library: Library
    forward: Positive
    backward: Positive
    half_keys: Positive
    narrow_head: Positive
    of_8_bits: Positive
    source: Text
    note: Text = ""


class ProductShare(TomlRow, frozen=True, kw_only=True):
    """Fraction of the dense peak that the matmuls of a training step sustain, by the bits of their operands.

    ``of_16_bits`` is the efficiency of the number formats in ``stands_in``, relative to the same matmul in 16
    bits. ``of_blocks`` is the efficiency of block-scaled formats, relative to formats with one scale. If
    ``filled`` is True, this fraction is the only limit of a matmul, apart from sizes that do not fill a
    matrix unit.
    """

    bits: Literal[4, 8, 16]
    sustained: Positive
    source: Text
    of_16_bits: PositiveOrNan = nan
    of_blocks: Positive = 1.0
    filled: bool = False
    note: Text = ""


class PowerExponent(TomlRow, frozen=True, kw_only=True):
    """Exponent of the power law by which rates change with a power limit other than the limit in the device
    file.
    """

    exponent: Positive
    source: Text


class UnfusedFactor(TomlRow, frozen=True, kw_only=True):
    """Slow-down of elementwise kernels that are not fused, relative to kernels that a compiler or a library
    fuses.
    """

    factor: Positive
    source: Text


class ExpertFigures(TomlRow, frozen=True, kw_only=True):
    """Figures of kernels of experts on GPUs.

    Matmuls of a group of experts, each with its own number of rows and its own kernel, take longer than one
    matmul with the same FLOPs, by the time of ``half_size / s`` times these FLOPs. ``s`` is the smallest of
    their three sizes. Matmuls with a size below ``least_size`` do not belong to experts. Kernels that sort
    tokens by expert reach the fraction ``sorting`` of the memory bandwidth, and kernels of chunked scans
    (Mamba-2) the fraction ``scans``.
    """

    half_size: Positive
    least_size: Positive
    sorting: Positive
    scans: Positive
    source: Text


class TrainingShares(TomlRow, frozen=True, kw_only=True):
    """Contents of one file with the rates of training kernels, as shares of the peak.

    ``library`` is the default attention library. ``stands_in`` are number formats of matmuls that were
    measured only on devices of other vendors. Estimators replace such matmuls by 16-bit matmuls. ``families``
    apply to devices whose file states no architecture: devices of one family may have different ones.
    """

    name: Text
    description: Text
    vendor: str
    kind: str
    families: tuple[Text, ...]
    architectures: tuple[Text, ...]
    library: Library
    stands_in: tuple[Text, ...]
    attention: tuple[AttentionShare, ...]
    products: tuple[ProductShare, ...]
    sources: dict[str, Text]

    def covers(self, device: Device) -> bool:
        """Return True if the figures are of the architecture of a device."""
        return device.arch in self.architectures if device.arch else device.family in self.families

    def attention_of(self, library: str) -> AttentionShare | None:
        """Return the attention shares of a library, None if unknown."""
        return next((share for share in self.attention if share.library == library), None)

    def products_of(self, bits: float) -> ProductShare | None:
        """Return the shares of products whose operands have ``bits`` bits, without block scales; None if
        unknown.
        """
        return next((share for share in self.products if share.bits == min(16, round(bits))), None)


class CommonShares(TrainingShares, frozen=True, kw_only=True):
    """Contents of the file of training shares for all devices: figures that do not depend on the device
    family, and defaults for unknown devices.
    """

    power: PowerExponent
    apart: UnfusedFactor
    experts: ExpertFigures


def read_training_shares(path: Path) -> TrainingShares:
    """Return the contents of a file of training shares. Raises ``FormatError`` with file, key path and
    expected value.
    """
    table, file = read_rows(path, CommonShares if path.stem == _COMMON else TrainingShares, _TRAINING_FILE)
    for name in ("attention", "products"):
        rows = cast("list[Mapping[str, object]]", table[name])
        for index, row in enumerate(rows):
            check_source_keys(row, f"{name}[{index}].", file.sources, path)
    if isinstance(file, CommonShares):
        for name in ("power", "apart", "experts"):
            check_source_keys(cast("Mapping[str, object]", table[name]), f"{name}.", file.sources, path)
    refuse_repeats(path, "attention", ((share.library,) for share in file.attention))
    refuse_repeats(path, "products", ((share.bits,) for share in file.products))
    return file


_COMMON = "common"


@cache
def _shipped() -> tuple[TrainingShares, ...]:
    return tuple(read_training_shares(path) for path in sorted(TRAINING_FOLDER.glob("*.toml")))


def common_shares() -> CommonShares:
    """Return the training figures that apply to all devices."""
    return next(shares for shares in _shipped() if isinstance(shares, CommonShares))


def training_shares(device: Device) -> TrainingShares:
    """Return the training figures for a device: of its architecture, else of its vendor's other devices, else
    the common ones.
    """
    of_vendor = [
        shares for shares in _shipped() if (shares.vendor, shares.kind) == (device.vendor, device.kind)
    ]
    ranked = [shares for shares in of_vendor if shares.covers(device)]
    ranked += [shares for shares in of_vendor if not shares.families]
    return ranked[0] if ranked else common_shares()


Bound = Literal["compute", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceFactor:
    """Slowdown of a kernel during communication: ``1 + value x s / (1 - s)``. ``bound`` is the resource that
    limits the kernel.

    ``s`` is the fraction of units (``compute``) or of memory bandwidth (``memory``) that communication uses.
    ``device`` is the fitted device (``*``: mean for all others). ``n`` is the number of kernels that
    overlapped with communication, ``keys`` the number of different kinds of them. Negative fits are set to 0.
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
        """Text for messages if the factor is a mean over other devices; empty for a factor of this device."""
        return "another device" if self.device == "*" else ""


class HeldUnits(NamedTuple):
    """Number of compute units (SMs, CUs) that a running collective occupies, with the device on which it was
    recorded, the family of that device, and the source.
    """

    units: int
    device: str
    family: str
    source: str

    def distance(self, device: Device) -> str:
        """Return a text that describes how the recorded device differs from ``device``; empty if they are the
        same.
        """
        if device.name == self.device:
            return ""
        return "another device" if device.family == self.family else "another family"


_A100 = "recommendation model, rank 3 of 8, A100-SXM-40GB (HolisticTraceAnalysis f4d0062, trace_diff/control)"

_V100 = "DLRM, 8 ranks, V100-SXM2-32GB (facebookresearch/param 1e115ff, dlrm_kineto)"

_MI350X = "one rank of a training job on MI350X (AMD-AGI/TraceLens 171dd747, rocprof/908_results)"

_ALL = "mean with random effects over A100-SXM-40GB, V100-SXM2-32GB and MI350X; error of one more device"


INTERFERENCE_FACTORS: tuple[InterferenceFactor, ...] = (
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
    InterferenceFactor(device="*", bound="compute", value=0.25, std_error=0.36, n=5609, keys=61, source=_ALL),
    InterferenceFactor(
        device="*", bound="memory", value=1.01, std_error=0.84, n=26210, keys=223, source=_ALL
    ),
)
"""Fitted factors; ``*`` applies to devices without a fit."""

HELD_UNITS: dict[tuple[str, str], HeldUnits] = {
    ("NVIDIA", "Volta"): HeldUnits(
        12, "V100-SXM2-32GB", "Volta", "grid of NCCL's ring all-reduce on eight V100-SXM2-32GB, as recorded"
    ),
    ("NVIDIA", ""): HeldUnits(
        24, "A100-SXM-40GB", "Ampere", "grid of NCCL's collectives on eight A100-SXM-40GB, as recorded"
    ),
    ("AMD", ""): HeldUnits(104, "MI350X", "CDNA 4", "grid of RCCL's collectives on MI350X, as recorded"),
}
"""Occupied units by vendor and family (empty: any)."""


def held_units(device: Device) -> HeldUnits | None:
    """Return the compute units that a collective occupies on a device; None if unknown, or if communication
    uses other engines.
    """
    if device.kind != "gpu" or device.units <= 0:
        return None
    return HELD_UNITS.get((device.vendor, device.family)) or HELD_UNITS.get((device.vendor, ""))


def interference_factor(device: Device, bound: Bound) -> InterferenceFactor:
    """Return the interference factor of a device; the mean over devices if it was not fitted."""
    factors = {factor.device: factor for factor in INTERFERENCE_FACTORS if factor.bound == bound}
    return factors.get(device.name, factors["*"])
