"""Models as files: ``NAME.json`` is the card, ``NAME.npz`` the trees. Arrays of numbers only, no pickle."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.resources import files
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.learned.card import Card, decode_card, encode_card
from hespas.estimators.learned.trees import Forest
from hespas.files.limits import limits
from hespas.files.source import read_document
from hespas.graph.errors import FormatError

__all__ = [
    "FORESTS",
    "LearnedModel",
    "cards_at",
    "cards_in",
    "forget_models",
    "load_model",
    "model_bytes",
    "read_model",
    "save_model",
    "shipped_folder",
]

FORESTS = ("main", "transfer", "low", "high")
"""``main`` for devices of the fit, ``transfer`` for others; ``low`` and ``high`` are quantiles of what
``main`` leaves. All speak of the logarithm of time over the base.
"""

_MOST_LOG = 50.0
"""e^50 times the data sheet's time is no time."""
_REMEDY = "copy card and trees again, or fit the model again"
_ARRAYS: Mapping[str, type[np.generic]] = {
    "column": np.uint8,
    "split": np.uint8,
    "first": np.uint8,
    "last": np.uint8,
    "node_offsets": np.int32,
    "leaf": np.int16,
    "leaf_offsets": np.int32,
    "edges": np.float32,
    "edge_offsets": np.int32,
}


@dataclass(frozen=True, slots=True, eq=False)
class LearnedModel:
    """A card and its trees. ``octaves`` of shape (cells, dimensions of ``card.support``) are the rounded log2
    of the sizes that the fit has seen.
    """

    card: Card
    forests: Mapping[str, Forest]
    octaves: NDArray[np.int8]


def shipped_folder() -> Path:
    """The folder of the models that come with the package."""
    return Path(str(files("hespas.estimators.learned") / "data"))


@lru_cache(maxsize=8)
def cards_in(folder: Path) -> tuple[tuple[Path, Card], ...]:
    """The cards of a folder, by name. Raises ``FormatError`` where one is damaged."""
    found = sorted(folder.glob("*.json"))
    return tuple((path, decode_card(_bytes(path), str(path))) for path in found)


@lru_cache(maxsize=8)
def cards_at(paths: tuple[str, ...]) -> tuple[tuple[Path, Card], ...]:
    """The cards that a hardware file names. Raises ``FormatError`` where one is damaged or gone."""
    return tuple((Path(path), decode_card(_bytes(Path(path)), path)) for path in paths)


def forget_models() -> None:
    """Read every file again when it is next asked for: some have been written."""
    for cached in (cards_in, cards_at, load_model):
        cached.cache_clear()


@lru_cache(maxsize=64)
def load_model(path: Path) -> LearnedModel:
    """What :func:`read_model` reads; once."""
    return read_model(path)


def read_model(path: Path) -> LearnedModel:
    """The model of the card at ``path``. Raises ``FormatError`` where damaged or of another version."""
    card = decode_card(_bytes(path), str(path))
    trees = path.with_suffix(".npz")
    if not trees.is_file():
        raise FormatError("the card has no trees beside it", path=str(path), hint=f"put {trees.name} there")
    _check_size(trees)
    _check_unpacked(trees)
    try:
        with trees.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            forests = {name: _forest(name, arrays) for name in FORESTS if f"{name}.column" in arrays}
            octaves = np.asarray(arrays["octaves"])
    except Exception as error:  # zip, zlib and NumPy raise a dozen classes for one thing: damaged
        raise FormatError(f"the trees are damaged: {error}", path=str(trees), hint=_REMEDY) from error
    if octaves.dtype != np.int8 or octaves.ndim != 2 or octaves.shape[1] != len(card.support):
        raise FormatError("the support is not that of the card", path=str(trees))
    for name, forest in forests.items():
        wanted = len(card.transfer_columns if name == "transfer" else card.columns)
        if len(forest.edge_offsets) - 1 != wanted:
            raise FormatError(f"the trees {name!r} have other columns than the card", path=str(trees))
    if not {"main", "low", "high"} <= set(forests):
        raise FormatError("trees are missing", path=str(trees))
    return LearnedModel(card, forests, octaves)


def save_model(model: LearnedModel, folder: Path) -> None:
    """Write card and trees into ``folder``; the same model is the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    card, trees = model_bytes(model)
    (folder / f"{model.card.name}.npz").write_bytes(trees)
    (folder / f"{model.card.name}.json").write_bytes(card)


def model_bytes(model: LearnedModel) -> tuple[bytes, bytes]:
    """What is written of a model: card and trees."""
    arrays: dict[str, NDArray[np.generic]] = {"octaves": model.octaves}
    for name, forest in model.forests.items():
        for field in fields(forest):
            arrays[f"{name}.{field.name}"] = np.asarray(getattr(forest, field.name))
    file = BytesIO()
    np.savez_compressed(file, allow_pickle=False, **arrays)  # pyright: ignore[reportArgumentType]
    return encode_card(model.card), file.getvalue()


def _forest(name: str, arrays: Mapping[str, NDArray[np.generic]]) -> Forest:
    columns: dict[str, NDArray[np.generic]] = {}
    for column, dtype in _ARRAYS.items():
        found = arrays[f"{name}.{column}"]
        if found.dtype != dtype or found.ndim != 1:
            raise ValueError(f"{name}.{column} is of type {found.dtype}, not {np.dtype(dtype)}")
        columns[column] = found
    scale, baseline = (float(arrays[f"{name}.{each}"].item()) for each in ("scale", "baseline"))
    if not np.isfinite(scale) or not np.isfinite(baseline):
        raise ValueError(f"{name}: the scale is not finite")
    if len(columns["leaf"]):
        largest = abs(scale) * float(np.abs(columns["leaf"].astype(np.float64)).max())
        if max(largest, abs(baseline)) > _MOST_LOG:
            raise ValueError(f"{name}: a leaf is {largest:g} in the logarithm of time")
    return Forest(**columns, scale=scale, baseline=baseline)  # type: ignore[arg-type]


def _bytes(path: Path) -> bytes:
    if not path.is_file():
        hint = "put the folder of models where the hardware file says, or run hespas-validate calibrate again"
        raise FormatError("no such learned model", path=str(path), hint=hint)
    return read_document(path, limits().card_bytes, "the card of a learned model")


def _check_unpacked(path: Path) -> None:
    """A small file may unpack to anything."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
    except (OSError, zipfile.BadZipFile) as error:
        raise FormatError(f"the trees are damaged: {error}", path=str(path), hint=_REMEDY) from error
    most = limits().model_bytes
    if size > most:
        raise FormatError(
            f"unpacks to {size:,} bytes: a learned model has at most {most:,}", path=str(path), hint=_REMEDY
        )


def _check_size(path: Path) -> None:
    size, most = path.stat().st_size, limits().card_bytes
    if size > most:
        raise FormatError(
            f"{size:,} bytes: a learned model has at most {most:,}", path=str(path), hint=_REMEDY
        )
