"""What kernels of a training step reach by family of devices: TOML files in ``training/``, decoded into rows.

They say what no fit of a device does: shares of the dense peak that libraries of attention are published to
reach, and products that a step keeps at the device's power limit. Top level: ``name``, ``description``,
``vendor``, ``kind``, ``families`` (empty: all others of the vendor), ``library``, ``stands_in``, lists of
tables ``attention`` and ``products``, in the file for all also tables ``power`` and ``apart``, and
``sources``, a table of texts that every row's ``source`` refers to.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import nan
from pathlib import Path
from typing import Literal, cast

from hespas.hardware.model import Device, Positive, PositiveOrNan, Row, Text
from hespas.hardware.typed_toml import FileKind, check_source_keys, read_rows, refuse_repeats

__all__ = [
    "LIBRARIES",
    "TRAINING_FOLDER",
    "Apart",
    "AttentionShare",
    "CommonShares",
    "Library",
    "Power",
    "ProductShare",
    "TrainingShares",
    "common_shares",
    "read_training_shares",
    "training_shares",
]

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
