"""Models as files: ``NAME.json`` is the card, ``NAME.npz`` the trees. Arrays of numbers only, no pickle."""

from __future__ import annotations

import lzma
import re
import stat
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.resources import files
from io import BytesIO
from math import inf, isfinite, prod
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic
from numpy.typing import NDArray

from hespas.estimators.forms import FORMS
from hespas.estimators.learned.bases import RELATIVES, TIERS, Base, SeenDevice
from hespas.estimators.learned.ensemble import Forest
from hespas.files.limits import limits
from hespas.files.streams import read_document
from hespas.graph.errors import FormatError, InvariantError, clipped

__all__ = [
    "FORESTS",
    "SCHEMA",
    "Candidate",
    "Card",
    "Cell",
    "ErrorRow",
    "Interval",
    "LearnedModel",
    "LeftOutError",
    "Region",
    "Training",
    "Unseen",
    "cards_at",
    "cards_in",
    "forget_models",
    "load_model",
    "model_bytes",
    "read_model",
    "save_model",
    "shipped_folder",
]

# Sums of decision trees as flat columns, evaluated without the library that grew them.
#
# A tree's leaves are numbered left to right. Each inner node says which column it looks at, the split, and
# which leaves hang below its left branch; where an operation goes right, those are out. What is left of all
# leaves after every node has spoken, lowest first, is the leaf: "QuickScorer" (Lucchese et al., SIGIR 2015).
# Per tree and column the verdict of all its nodes is one table over the column's interval number.

# The card of a stored model: what it was fitted on, how, and how wrong it is where it was not.

SCHEMA = "hespas.learned/2"

_T = TypeVar("_T")
_REMEDY = "copy card and trees again, or fit the model again: hespas-validate calibrate --estimator learned"
_PLACE = re.compile(r" - at `(.*)`$|: .*\(byte (\d+)\)$", re.DOTALL)
_NAME = re.compile(r"[\w.+-]{1,200}")
_CODED = frozenset({"variant", "scheme", "op"})
_MOST_COLUMNS = 255
_MOST_LOG = 50.0
"""e^50 times the data sheet's time is no time."""
_MOST_CODE = 1_000_000
_LEAST_PARAMETER, _MOST_PARAMETER = 1e-12, 1e12
_MOST_NS = 3.6e12


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Operations that the model was fitted on: ``rows`` per device."""

    kind: str
    op: str
    scheme: str
    variant: str
    rows: dict[str, int]


class Interval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far to widen the fitted quantiles, in log time, so that 90 % of ``n`` held-out rows lie between.

    ``hardware``, ``kind`` and ``scheme`` may be ``*``.
    """

    hardware: str
    kind: str
    scheme: str
    low: float
    high: float
    n: int


class Unseen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The interval of log time on devices that were not in the fit, by how near the nearest that was is
    (:data:`~hespas.estimators.learned.bases.TIERS`); ``n`` devices or families were left out to see it (0:
    nothing could be left out, the interval is an assumption).
    """

    tier: str
    low: float
    high: float
    n: int


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Errors on sizes beyond those of a fit: rows in the two largest octaves of any dimension were kept from
    it. ``widening`` is by how much intervals grow [log time] so many octaves beyond the sizes fitted on.
    """

    mape: float
    median_ape: float
    p90_ape: float
    bias: float
    n: int
    inside_mape: float
    coverage: float
    widening: tuple[tuple[float, float], ...]


class Candidate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One set of hyperparameters tried; figures on shape groups of ``calib`` left out of that fit."""

    form: str
    loss: str
    trees: int
    leaves: int
    learning_rate: float
    mape: float
    median_ape: float
    chosen: bool


class LeftOutError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Error on devices of which no row was in the fit, on ``calib``."""

    hardware: tuple[str, ...]
    siblings: bool
    mape: float
    median_ape: float
    bias: float
    n: int


class ErrorRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Error on shape groups that the fit has not seen: ``devval``, or in a user's own models (there ``op``
    and ``variant`` are ``*``) the folds of the fit in turn. Fractions; None: refused, or untested.
    ``before_mape`` is of the package's learned models, before these.
    """

    hardware: str
    kind: str
    op: str
    scheme: str
    variant: str
    n: int
    refused: int
    mape: float | None
    median_ape: float | None
    p90_ape: float | None
    bias: float | None
    interval_coverage: float | None
    before_mape: float | None = None


class Training(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Data and hyperparameters of the fit."""

    tables: tuple[str, ...]
    provenance: tuple[str, ...]
    split: str
    rows: int
    shape_groups: int
    seed: int
    form: str
    trees: int
    leaves: int
    learning_rate: float
    loss: str
    share_of_columns: float
    least_rows_of_leaf: int
    rising_columns: tuple[str, ...]
    transfer_trees: int
    library: str


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything about one model but its trees.

    ``columns`` name what the trees see, ``transfer_columns`` what those for unseen devices see;
    ``codes`` number the variants, schemes and operations in the order of their mean time over the base.
    ``support`` names the dimensions whose octaves are stored, ``reach`` the least and most of each. Trees
    correct ``bases`` (:mod:`~hespas.estimators.learned.bases`), whose parameters ``forms`` name, and of which
    ``form_share`` enters. Where the model ``adapts`` one of other devices (by its name), its ``main`` trees
    correct what that one's ``transfer`` trees leave.
    """

    schema: str
    name: str
    family: str
    overhead_ns: float
    form_share: float
    forms: dict[str, tuple[str, ...]]
    bases: tuple[Base, ...]
    columns: tuple[str, ...]
    transfer_columns: tuple[str, ...]
    codes: dict[str, dict[str, float]]
    support: tuple[str, ...]
    reach: dict[str, tuple[float, float]]
    cells: tuple[Cell, ...]
    devices: tuple[SeenDevice, ...]
    intervals: tuple[Interval, ...]
    unseen: tuple[Unseen, ...]
    region: Region | None
    training: Training
    selection: tuple[Candidate, ...]
    left_out: tuple[LeftOutError, ...] = ()
    errors: tuple[ErrorRow, ...] = ()
    adapts: str = ""


def _decode_card(data: bytes, path: str) -> Card:
    """The card in ``data``. Raises ``FormatError`` for what is none, of another version, or no model."""
    schema = _decoded(data, _Head, path).schema
    if schema != SCHEMA:
        raise FormatError(
            f"the model is of schema {clipped(repr(schema))}",
            path=path,
            position="$.schema",
            hint=f"fit it again: this version reads {SCHEMA}",
        )
    card = _decoded(data, Card, path)
    fault = next(_faults(card), None)
    if fault is not None:
        position, expected = fault
        raise FormatError(f"expected {expected}", path=path, position=position, hint=_REMEDY)
    return card


def _decoded(data: bytes, kind: type[_T], path: str) -> _T:
    try:
        data.decode()
        return msgspec.json.decode(data, type=kind)
    except UnicodeDecodeError as error:
        where = f"line {data.count(bytes([10]), 0, error.start) + 1}, byte {error.start}"
        raise FormatError("the card is not UTF-8", path=path, position=where, hint=_REMEDY) from error
    except RecursionError as error:
        raise FormatError(
            "the card is nested too deeply", path=path, position="the whole card", hint=_REMEDY
        ) from error
    except msgspec.MsgspecError as error:
        told = _PLACE.search(str(error))
        text = clipped(str(error)[: told.start()] if told else str(error))
        raise FormatError(
            f"not the card of a learned model: {text}",
            path=path,
            position=_position(told, str(error), len(data)),
            hint=_REMEDY,
        ) from error


def _position(place: re.Match[str] | None, told: str, size: int) -> str:
    """The JSON path or byte that the library names; it names none for the document itself."""
    if place:
        return place.group(1) or f"byte {place.group(2)}"
    return f"byte {size}" if "truncated" in told else "$"


def _faults(card: Card) -> Iterator[tuple[str, str]]:
    """Where values make no model, and what is expected there."""
    if not (isfinite(card.overhead_ns) and 0 <= card.overhead_ns <= _MOST_NS):
        yield "$.overhead_ns", "a time from 0 to an hour in nanoseconds"
    if not _NAME.fullmatch(card.name) or card.name.startswith("."):
        yield "$.name", "a name of letters, digits, '-', '.' and '_'"
    for key, names in {
        "columns": card.columns,
        "transfer_columns": card.transfer_columns,
        "support": card.support,
    }.items():
        least = int(key != "transfer_columns")
        if not least <= len(names) <= _MOST_COLUMNS or len(set(names)) < len(names):
            yield f"$.{key}", f"{least} to {_MOST_COLUMNS} names, each once"
    if set(card.codes) - _CODED:
        yield "$.codes", f"tables called {', '.join(sorted(_CODED))}"
    yield from _faults_of_rows(card)
    yield from _faults_of_bases(card)
    yield from _faults_of_adapted(card)
    yield from _faults_beyond(card)


def _faults_of_bases(card: Card) -> Iterator[tuple[str, str]]:
    """The same of forms and their parameters."""
    if not 0 <= card.form_share <= 1:
        yield "$.form_share", "a share from 0 to 1"
    for name, parameters in card.forms.items():
        wanted = {each.name for each in FORMS[name].parameters} if name in FORMS else set[str]()
        if set(parameters) != wanted:
            yield f"$.forms.{name}", f"the parameters of one of the forms {', '.join(FORMS)}"
    for place, base in enumerate(card.bases):
        if base.form not in card.forms or len(base.parameters) != len(card.forms[base.form]):
            yield f"$.bases[{place}]", "a form that $.forms names, with as many parameters"
        elif not all(_LEAST_PARAMETER <= each <= _MOST_PARAMETER for each in base.parameters):
            expected = f"numbers from {_LEAST_PARAMETER:g} to {_MOST_PARAMETER:g}"
            yield f"$.bases[{place}].parameters", expected
        elif not abs(base.asymptote) <= _MOST_LOG:
            yield f"$.bases[{place}].asymptote", f"within {_MOST_LOG:g} of 0, in the logarithm of time"


def _faults_of_adapted(card: Card) -> Iterator[tuple[str, str]]:
    """The same of a model that adapts another: of each class a form of the device and of its relatives."""
    stated = {(each.hardware, each.kind, each.op, each.scheme, each.variant) for each in card.bases}
    for place, cell in enumerate(card.cells if card.adapts else ()):
        labels = (cell.kind, cell.op, cell.scheme, cell.variant)
        for name in (*cell.rows, RELATIVES):
            if (name, *labels) not in stated:
                yield "$.bases", f"a form of '{name}' for $.cells[{place}]"


def _faults_beyond(card: Card) -> Iterator[tuple[str, str]]:
    """The same of what is known beyond the fit."""
    for place, unseen in enumerate(card.unseen):
        if unseen.tier not in TIERS:
            yield f"$.unseen[{place}].tier", f"one of {', '.join(TIERS)}"
    widening = () if card.region is None else card.region.widening
    if not all(0 <= octaves <= _MOST_LOG and 0 <= wide <= _MOST_LOG for octaves, wide in widening):
        yield "$.region.widening", "pairs of octaves and log times that are 0 or more"
    for name, (low, high) in card.reach.items():
        if not 0 <= low <= high < inf:
            yield f"$.reach.{name}", "the least and most of a size"


def _faults_of_rows(card: Card) -> Iterator[tuple[str, str]]:
    """The same of codes, cells and intervals."""
    for key, codes in card.codes.items():
        if not all(abs(code) <= _MOST_CODE for code in codes.values()):
            yield f"$.codes.{key}", f"numbers up to {_MOST_CODE:,}"
    for place, row in enumerate(card.errors):
        if not all(each is None or 0 <= each < inf for each in (row.mape, row.before_mape)) or row.n < 0:
            yield f"$.errors[{place}]", "errors and a count that are 0 or more"
    for place, cell in enumerate(card.cells):
        if any(rows < 0 for rows in cell.rows.values()):
            yield f"$.cells[{place}].rows", "counts that are 0 or more"
    rows = [(f"$.intervals[{place}]", each) for place, each in enumerate(card.intervals)]
    bounds = [(where, each.low, each.high) for where, each in rows]
    bounds += [(f"$.unseen[{place}]", each.low, each.high) for place, each in enumerate(card.unseen)]
    for where, low, high in bounds:
        if not all(isfinite(bound) and abs(bound) <= _MOST_LOG for bound in (low, high)):
            yield where, f"low and high within {_MOST_LOG:g} of 0, in the logarithm of time"
    if not any((each.hardware, each.kind, each.scheme) == ("*", "*", "*") for each in card.intervals):
        yield "$.intervals", "an interval of all operations: hardware, kind and scheme '*'"


def _encode_card(card: Card) -> bytes:
    """The card as indented JSON, the same bytes for the same card."""
    return msgspec.json.format(msgspec.json.encode(card), indent=1) + b"\n"


class _Head(msgspec.Struct, frozen=True):
    schema: str


FORESTS = ("main", "transfer", "low", "high")
"""``main`` for devices of the fit, ``transfer`` for others; ``low`` and ``high`` are quantiles of what
``main`` leaves. All speak of the logarithm of time over the base.
"""

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
_SCALARS: Mapping[str, type[np.generic]] = {"scale": np.float64, "baseline": np.float64}
_MOST_HEADER = 1 << 12
_UNREADABLE = (
    *(OSError, EOFError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(RuntimeError, NotImplementedError, OverflowError, MemoryError),  # encrypted, or packed in unknown ways
    *(ValueError, TypeError, KeyError, SyntaxError, tokenize.TokenError),  # the literal in front of an array
)


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
    return tuple((path, _decode_card(_bytes(path), str(path))) for path in found)


@lru_cache(maxsize=8)
def cards_at(paths: tuple[str, ...]) -> tuple[tuple[Path, Card], ...]:
    """The cards that a hardware file names. Raises ``FormatError`` where one is damaged or gone."""
    return tuple((Path(path), _decode_card(_bytes(Path(path)), path)) for path in paths)


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
    card = _decode_card(_bytes(path), str(path))
    trees = path.with_suffix(".npz")
    arrays = _arrays(trees)
    octaves = arrays.pop("octaves", np.empty(0))
    if octaves.dtype != np.int8 or octaves.ndim != 2 or octaves.shape[1] != len(card.support):
        raise _damaged(trees, "octaves", "the support is not that of the card")
    if len(octaves) > limits().model_sizes:
        raise _damaged(trees, "octaves", f"{len(octaves):,} sizes, at most {limits().model_sizes:,}")
    forests: dict[str, Forest] = {}
    for name in FORESTS:
        mine = {key.partition(".")[2]: each for key, each in arrays.items() if key.startswith(f"{name}.")}
        if mine:
            forests[name] = _forest(name, mine, trees)
            wanted = len(card.transfer_columns if name == "transfer" else card.columns)
            if len(forests[name].edge_offsets) - 1 != wanted:
                raise _damaged(trees, f"{name}.edge_offsets", "other columns than those of the card")
    missing = [name for name in ("main", "low", "high") if name not in forests]
    if missing or (card.transfer_columns and "transfer" not in forests):
        raise _damaged(trees, missing[0] if missing else "transfer", "trees are missing")
    return LearnedModel(card, forests, np.asarray(octaves, np.int8))


def _damaged(path: Path, position: str, why: str) -> FormatError:
    return FormatError(f"the trees are damaged: {why}", path=str(path), position=position, hint=_REMEDY)


def _arrays(path: Path) -> dict[str, NDArray[np.generic]]:
    """The arrays of numbers in an archive. Raises ``FormatError`` for anything else: other members, objects,
    more than the archive has room for.
    """
    _check_size(path, "put it beside its card")
    wanted = {f"{name}.{column}" for name in FORESTS for column in (*_ARRAYS, *_SCALARS)} | {"octaves"}
    found: dict[str, NDArray[np.generic]] = {}
    where = "the list of members"
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > limits().model_bytes:
                raise _damaged(path, where, f"unpacks to more than {limits().model_bytes:,} bytes")
            for member in members:
                where = clipped(member.filename).removesuffix(".npy")
                if where not in wanted or where in found:
                    raise _damaged(path, where, "no array of a learned model, or stated twice")
                found[where] = _array(archive, member)
    except (*_UNREADABLE, RecursionError) as error:
        raise _damaged(path, where, clipped(str(error))) from error
    return found


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[np.generic]:
    """One member, which holds what its header states: the header alone would be room for any size."""
    with archive.open(member) as stream:
        content = stream.read(member.file_size)
    file = BytesIO(content)
    version = read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of an array")
    read = read_array_header_1_0 if version == (1, 0) else read_array_header_2_0
    shape, fortran, dtype = read(file, max_header_size=_MOST_HEADER)
    if dtype.hasobject or dtype.kind not in "iuf" or fortran or len(shape) > 2:
        raise ValueError(f"no plain array of numbers: {dtype} in {len(shape)} dimensions")
    if prod(shape) * dtype.itemsize != len(content) - file.tell() or min(shape, default=0) < 0:
        raise ValueError(f"the header states {shape} of {dtype}, not {len(content) - file.tell()} bytes")
    found: NDArray[np.generic] = np.frombuffer(content, dtype, offset=file.tell()).reshape(shape)
    return found


def save_model(model: LearnedModel, folder: Path) -> None:
    """Write card and trees into ``folder``; the same model is the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    card, trees = model_bytes(model)
    (folder / f"{model.card.name}.npz").write_bytes(trees)
    (folder / f"{model.card.name}.json").write_bytes(card)


def model_bytes(model: LearnedModel) -> tuple[bytes, bytes]:
    """What is written of a model: card and trees."""
    arrays: dict[str, NDArray[np.generic]] = {"octaves": model.octaves}
    for name in FORESTS:
        forest = model.forests.get(name)
        for field in () if forest is None else fields(forest):
            arrays[f"{name}.{field.name}"] = np.asarray(getattr(forest, field.name))
    file = BytesIO()
    np.savez_compressed(file, allow_pickle=False, **arrays)  # pyright: ignore[reportArgumentType]
    return _encode_card(model.card), file.getvalue()


def _forest(name: str, arrays: Mapping[str, NDArray[np.generic]], path: Path) -> Forest:
    for column, dtype in (*_ARRAYS.items(), *_SCALARS.items()):
        found = arrays.get(column, np.empty(0, np.object_))
        if found.dtype != dtype or found.ndim != (column not in _SCALARS):
            raise _damaged(path, f"{name}.{column}", f"expected {np.dtype(dtype)}, got {found.dtype}")
    scale, baseline = (float(arrays[each].item()) for each in _SCALARS)
    if not np.isfinite(scale) or not np.isfinite(baseline):
        raise _damaged(path, f"{name}.scale", "scale or baseline is not finite")
    if len(arrays["leaf_offsets"]) - 1 > limits().model_trees:
        raise _damaged(path, f"{name}.leaf_offsets", f"more than {limits().model_trees:,} trees")
    leaf = arrays["leaf"].astype(np.float64)
    largest = max(abs(scale) * float(np.abs(leaf).max(initial=0.0)), abs(baseline))
    if largest > _MOST_LOG:
        raise _damaged(path, f"{name}.leaf", f"a leaf is {largest:g} in the logarithm of time")
    try:
        forest = Forest(**{each: arrays[each] for each in _ARRAYS}, scale=scale, baseline=baseline)  # type: ignore[arg-type]
    except InvariantError as error:
        raise _damaged(path, name, error.message) from error
    return forest


def _bytes(path: Path) -> bytes:
    _check_size(
        path, "put the folder of models where the hardware file says, or run hespas-validate calibrate again"
    )
    return read_document(path, limits().card_bytes, "the card of a learned model")


def _check_size(path: Path, remedy: str) -> None:
    """Refuse what is not there, no regular file, or too large."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        raise FormatError("no such learned model", path=str(path), hint=remedy) from error
    if not stat.S_ISREG(found.st_mode):
        raise FormatError("no such learned model: not a regular file", path=str(path), hint=remedy)
    most = limits().card_bytes
    if found.st_size > most:
        raise FormatError(
            f"{found.st_size:,} bytes: a learned model has at most {most:,}",
            path=str(path),
            position=f"byte {most}",
            hint="name the card of a learned model, with its trees beside it",
        )
