"""Files of learned models: ``NAME.json`` is the card, which describes the model, and ``NAME.npz`` has the
trees as arrays of numbers (no pickle).
"""

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
from math import inf, isfinite, isnan, prod
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic
from numpy.typing import NDArray

from hespas.estimators.forms import FORMS
from hespas.estimators.learned.bases import REFERENCE_DEVICES, Base, FittedDevice
from hespas.estimators.learned.ensemble import Forest
from hespas.files.limits import limits
from hespas.files.streams import read_document
from hespas.graph.errors import FormatError, InvariantError, clipped

__all__ = [
    "FORESTS",
    "SCHEMA",
    "USUAL_INTERVAL",
    "Candidate",
    "Card",
    "Cell",
    "ErrorRow",
    "FitSettings",
    "Interval",
    "LearnedModel",
    "LeftOutError",
    "NewDeviceInterval",
    "Region",
    "cards_at",
    "cards_in",
    "forget_models",
    "load_model",
    "model_bytes",
    "read_model",
    "save_model",
    "shipped_folder",
]

SCHEMA = "hespas.learned/3"

_T = TypeVar("_T")
_REMEDY = "copy card and trees again, or fit the model again: hespas-validate calibrate --estimator learned"
_POSITION = re.compile(r" - at `(.*)`$|: .*\(byte (\d+)\)$", re.DOTALL)
_NAME = re.compile(r"[\w.+-]{1,200}")
_CODED = frozenset({"variant", "scheme", "op"})
_MOST_COLUMNS = 255
_MOST_LOG = 50.0
"""Limit of a value [log time]: e^50 times the data sheet's time is not a possible time."""
_MOST_CODE = 1_000_000
_LEAST_PARAMETER, _MOST_PARAMETER = 1e-12, 1e12
_MOST_NS = 3.6e12


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Group of operations with equal labels that the model was fitted on, with the number of rows per
    device.
    """

    kind: str
    op: str
    scheme: str
    variant: str
    rows: dict[str, int]


class Interval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers [log time] by which the fitted quantiles are widened, so that they hold 90 % of ``n`` held-out
    rows. ``hardware``, ``kind`` and ``scheme`` may be ``*`` (any).
    """

    hardware: str
    kind: str
    scheme: str
    low: float
    high: float
    n: int


class NewDeviceInterval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Interval of predictions on devices that were not in the fit, in units of their expected deviation
    (:func:`~hespas.estimators.learned.extrapolation.expected_deviation`).

    It holds 90 % of the errors on ``n`` left-out architectures. With few of them it approaches the interval
    over all shipped models, :data:`USUAL_INTERVAL`.
    """

    low: float
    high: float
    n: int


USUAL_INTERVAL = NewDeviceInterval(low=-1.35, high=2.0, n=0)
"""Interval over the left-out architectures of all shipped models."""


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Errors of a learned model on sizes beyond the fitted ones. They were measured by leaving out rows in
    the two largest octaves of any dimension.

    ``widening`` lists pairs: octaves beyond the fitted sizes, and the growth of intervals there [log time].
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
    """Set of hyperparameters that was tested, with its errors on held-out groups of shapes of the split
    ``calib``. ``chosen`` marks the set of a model, and in adapted models all sets in their mean.
    """

    form: str
    loss: str
    trees: int
    leaves: int
    learning_rate: float
    mape: float
    median_ape: float
    chosen: bool


class LeftOutError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Error of the model on devices that were completely left out of the fit, on the split ``calib``."""

    hardware: tuple[str, ...]
    siblings: bool
    mape: float
    median_ape: float
    bias: float
    n: int


class ErrorRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Error of a learned model on shape groups outside its fit, for one class of operations on one device.

    The groups are in the split ``devval``. For a user's own models they are the folds of a cross-validation,
    and ``op`` and ``variant`` are ``*``. Errors are fractions; None if the operations were refused or not
    tested. ``before_mape`` is the error of the learned models of the package on the same rows.
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


class FitSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Data and hyperparameters with which a model was fitted."""

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
    library: str


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of one learned model: everything except its trees.

    ``columns`` are the inputs of the trees.
    ``codes`` are the numbers that the trees use for variants, number formats and operations, in ascending
    order of their mean ratio of time to base time. ``support`` are the sizes whose rounded log2 is stored,
    ``reach`` the least and largest value of each. Trees correct the base time
    (:mod:`~hespas.estimators.learned.bases`), which uses ``bases``, the parameters of ``forms`` and the
    exponent ``form_share``. ``adapts`` is the name of a model of other devices, or empty. If it is set, this
    model has the trees of that model as ``transfer``, with the inputs ``transfer_columns``, and its devices
    as ``references``. The ``main`` trees of this model correct the prediction from these devices.
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
    devices: tuple[FittedDevice, ...]
    intervals: tuple[Interval, ...]
    unseen: NewDeviceInterval
    region: Region | None
    training: FitSettings
    selection: tuple[Candidate, ...]
    left_out: tuple[LeftOutError, ...] = ()
    errors: tuple[ErrorRow, ...] = ()
    adapts: str = ""
    references: tuple[FittedDevice, ...] = ()


def _decode_card(data: bytes, path: str) -> Card:
    """Decode the card in ``data``. Raises ``FormatError`` for another document, another version, or invalid
    values.
    """
    schema = _decoded(data, _CardHeader, path).schema
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
        position = f"line {data.count(bytes([10]), 0, error.start) + 1}, byte {error.start}"
        raise FormatError("the card is not UTF-8", path=path, position=position, hint=_REMEDY) from error
    except RecursionError as error:
        raise FormatError(
            "the card is nested too deeply", path=path, position="the whole card", hint=_REMEDY
        ) from error
    except msgspec.MsgspecError as error:
        text = str(error)
        match = _POSITION.search(text)  # the JSON path or byte; msgspec names none for the whole document
        if match:
            position = match.group(1) or f"byte {match.group(2)}"
        else:
            position = f"byte {len(data)}" if "truncated" in text else "$"
        raise FormatError(
            f"not the card of a learned model: {clipped(text[: match.start()] if match else text)}",
            path=path,
            position=position,
            hint=_REMEDY,
        ) from error


def _faults(card: Card) -> Iterator[tuple[str, str]]:
    """Yield each invalid value of a card: its position, and the expected value."""
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
    if card.adapts:
        # Each class of a model that adapts another one needs a form of the device and of its reference
        # devices.
        classes = {(base.hardware, base.kind, base.op, base.scheme, base.variant) for base in card.bases}
        for index, cell in enumerate(card.cells):
            labels = (cell.kind, cell.op, cell.scheme, cell.variant)
            for name in (*cell.rows, REFERENCE_DEVICES):
                if (name, *labels) not in classes:
                    yield "$.bases", f"a form of '{name}' for $.cells[{index}]"
    if not card.adapts and card.transfer_columns:
        yield "$.transfer_columns", "no names in a model that adapts no other one"
    widening = () if card.region is None else card.region.widening
    if not all(0 <= octaves <= _MOST_LOG and 0 <= wide <= _MOST_LOG for octaves, wide in widening):
        yield "$.region.widening", "pairs of octaves and log times that are 0 or more"
    for name, (low, high) in card.reach.items():
        if not 0 <= low <= high < inf:
            yield f"$.reach.{name}", "the least and most of a size"


def _faults_of_bases(card: Card) -> Iterator[tuple[str, str]]:
    """Yield invalid forms and form parameters of the bases in a card: position, and expected value."""
    if not 0 <= card.form_share <= 1:
        yield "$.form_share", "a share from 0 to 1"
    for name, parameters in card.forms.items():
        entries = FORMS[name].parameters if name in FORMS else ()
        # Older fits lack the parameters that have a value for this case.
        least = {entry.name for entry in entries if isnan(entry.absent)}
        if not parameters or not least <= set(parameters) <= {entry.name for entry in entries}:
            yield f"$.forms.{name}", f"the parameters of one of the forms {', '.join(FORMS)}"
    for index, base in enumerate(card.bases):
        if base.form not in card.forms or len(base.parameters) != len(card.forms[base.form]):
            yield f"$.bases[{index}]", "a form that $.forms names, with as many parameters"
        elif not all(_LEAST_PARAMETER <= value <= _MOST_PARAMETER for value in base.parameters):
            limits_text = f"numbers from {_LEAST_PARAMETER:g} to {_MOST_PARAMETER:g}"
            yield f"$.bases[{index}].parameters", limits_text
        elif not abs(base.asymptote) <= _MOST_LOG:
            yield f"$.bases[{index}].asymptote", f"within {_MOST_LOG:g} of 0, in the logarithm of time"


def _faults_of_rows(card: Card) -> Iterator[tuple[str, str]]:
    """Yield invalid codes, errors, cells and intervals of a card: position, and expected value."""
    for key, codes in card.codes.items():
        if not all(abs(code) <= _MOST_CODE for code in codes.values()):
            yield f"$.codes.{key}", f"numbers up to {_MOST_CODE:,}"
    for index, row in enumerate(card.errors):
        errors = (row.mape, row.before_mape)
        if not all(error is None or 0 <= error < inf for error in errors) or row.n < 0:
            yield f"$.errors[{index}]", "errors and a count that are 0 or more"
    for index, cell in enumerate(card.cells):
        if any(rows < 0 for rows in cell.rows.values()):
            yield f"$.cells[{index}].rows", "counts that are 0 or more"
    bounds = [(f"$.intervals[{index}]", row.low, row.high) for index, row in enumerate(card.intervals)]
    bounds.append(("$.unseen", card.unseen.low, card.unseen.high))
    for position, low, high in bounds:
        if not all(isfinite(bound) and abs(bound) <= _MOST_LOG for bound in (low, high)):
            yield position, f"low and high within {_MOST_LOG:g} of 0, in the logarithm of time"
    if not any((row.hardware, row.kind, row.scheme) == ("*", "*", "*") for row in card.intervals):
        yield "$.intervals", "an interval of all operations: hardware, kind and scheme '*'"


class _CardHeader(msgspec.Struct, frozen=True):
    schema: str


FORESTS = ("main", "transfer", "low", "high")
"""Names of the forests: ``main`` corrects the base time; ``transfer`` is the ``main`` forest of the reference
devices in an adapted model; ``low`` and ``high`` are quantiles of the residual of ``main``. All predict the
logarithm of time over the base.
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
    *(RuntimeError, NotImplementedError, OverflowError, MemoryError),  # encrypted, or an unknown compression
    *(ValueError, TypeError, KeyError, SyntaxError, tokenize.TokenError),  # the header of an array
)


@dataclass(frozen=True, slots=True, eq=False)
class LearnedModel:
    """Card and trees of a learned model. ``octaves`` are the distinct fitted sizes as rounded log2, shape
    ``(sizes, dimensions of card.support)``.
    """

    card: Card
    forests: Mapping[str, Forest]
    octaves: NDArray[np.int8]


def shipped_folder() -> Path:
    """Return the folder of the models that ship with the package."""
    return Path(str(files("hespas.estimators.learned") / "data"))


@lru_cache(maxsize=8)
def cards_in(folder: Path) -> tuple[tuple[Path, Card], ...]:
    """Return the cards in a folder, sorted by name. Raises ``FormatError`` for a damaged card."""
    paths = sorted(folder.glob("*.json"))
    return tuple((path, _decode_card(_card_bytes(path), str(path))) for path in paths)


@lru_cache(maxsize=8)
def cards_at(paths: tuple[str, ...]) -> tuple[tuple[Path, Card], ...]:
    """Return the cards that a hardware file names. Raises ``FormatError`` for a damaged or missing card."""
    return tuple((Path(path), _decode_card(_card_bytes(Path(path)), path)) for path in paths)


def forget_models() -> None:
    """Clear the caches of cards and models, after some were written."""
    for cached in (cards_in, cards_at, load_model):
        cached.cache_clear()


@lru_cache(maxsize=64)
def load_model(path: Path) -> LearnedModel:
    """Return the model of the card at ``path``, cached; see :func:`read_model`."""
    return read_model(path)


def read_model(path: Path) -> LearnedModel:
    """Return the model of the card at ``path``. Raises ``FormatError`` if it is damaged or of another
    version.
    """
    card = _decode_card(_card_bytes(path), str(path))
    trees = path.with_suffix(".npz")
    _check_size(trees, "put it in the folder of its card")
    expected = {f"{name}.{column}" for name in FORESTS for column in (*_ARRAYS, *_SCALARS)} | {"octaves"}
    arrays: dict[str, NDArray[np.generic]] = {}
    position = "the list of members"
    try:
        with zipfile.ZipFile(trees) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > limits().model_bytes:
                raise _damaged(trees, position, f"unpacks to more than {limits().model_bytes:,} bytes")
            for member in members:
                position = clipped(member.filename).removesuffix(".npy")
                if position not in expected or position in arrays:
                    raise _damaged(trees, position, "not an array of a learned model, or stored twice")
                arrays[position] = _array(archive, member)
    except (*_UNREADABLE, RecursionError) as error:
        raise _damaged(trees, position, clipped(str(error))) from error
    octaves = arrays.pop("octaves", np.empty(0))
    if octaves.dtype != np.int8 or octaves.ndim != 2 or octaves.shape[1] != len(card.support):
        raise _damaged(trees, "octaves", "dimensions differ from the support of the card")
    if len(octaves) > limits().model_sizes:
        raise _damaged(trees, "octaves", f"{len(octaves):,} sizes, at most {limits().model_sizes:,}")
    forests: dict[str, Forest] = {}
    for name in FORESTS:
        of_forest = {
            key.partition(".")[2]: array for key, array in arrays.items() if key.startswith(f"{name}.")
        }
        if of_forest:
            forests[name] = _forest(name, of_forest, trees)
            width = len(card.transfer_columns if name == "transfer" else card.columns)
            if len(forests[name].edge_offsets) - 1 != width:
                raise _damaged(trees, f"{name}.edge_offsets", "columns differ from the card")
    missing = [name for name in ("main", "low", "high") if name not in forests]
    if missing or (card.transfer_columns and "transfer" not in forests):
        raise _damaged(trees, missing[0] if missing else "transfer", "trees are missing")
    return LearnedModel(card, forests, np.ascontiguousarray(octaves, np.int8))


def _damaged(path: Path, position: str, why: str) -> FormatError:
    return FormatError(f"the trees are damaged: {why}", path=str(path), position=position, hint=_REMEDY)


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[np.generic]:
    """Return one array of an archive. Its stored size must agree with its header, which alone could claim any
    size.
    """
    with archive.open(member) as stream:
        content = stream.read(member.file_size)
    file = BytesIO(content)
    version = read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of an array")
    read = read_array_header_1_0 if version == (1, 0) else read_array_header_2_0
    shape, by_column, dtype = read(file, max_header_size=_MOST_HEADER)
    if dtype.hasobject or dtype.kind not in "iuf" or len(shape) > 2:
        raise ValueError(f"not a plain array of numbers: {dtype} in {len(shape)} dimensions")
    if prod(shape) * dtype.itemsize != len(content) - file.tell() or min(shape, default=0) < 0:
        raise ValueError(f"the header states {shape} of {dtype}, not {len(content) - file.tell()} bytes")
    flat: NDArray[np.generic] = np.frombuffer(content, dtype, offset=file.tell())
    return flat.reshape(shape, order="F" if by_column else "C")


def save_model(model: LearnedModel, folder: Path) -> None:
    """Write card and trees into ``folder``; equal models give equal bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    card, trees = model_bytes(model)
    (folder / f"{model.card.name}.npz").write_bytes(trees)
    (folder / f"{model.card.name}.json").write_bytes(card)


def model_bytes(model: LearnedModel) -> tuple[bytes, bytes]:
    """Return the contents of the two files of a model: card and trees."""
    # Sorted rows compress to a quarter if each column is stored in one piece.
    arrays: dict[str, Any] = {"octaves": np.asfortranarray(model.octaves)}
    for name in FORESTS:
        forest = model.forests.get(name)
        for field in () if forest is None else fields(forest):
            arrays[f"{name}.{field.name}"] = np.asarray(getattr(forest, field.name))
    file = BytesIO()
    np.savez_compressed(file, **arrays)  # allow_pickle needs NumPy 2.2; 2.1 stores it as an array
    return msgspec.json.format(msgspec.json.encode(model.card), indent=1) + b"\n", file.getvalue()


def _forest(name: str, arrays: Mapping[str, NDArray[np.generic]], path: Path) -> Forest:
    for column, dtype in (*_ARRAYS.items(), *_SCALARS.items()):
        array = arrays.get(column, np.empty(0, np.object_))
        if array.dtype != dtype or array.ndim != (column not in _SCALARS):
            raise _damaged(path, f"{name}.{column}", f"expected {np.dtype(dtype)}, got {array.dtype}")
    scale, baseline = (float(arrays[column].item()) for column in _SCALARS)
    if not np.isfinite(scale) or not np.isfinite(baseline):
        raise _damaged(path, f"{name}.scale", "scale or baseline is not finite")
    if len(arrays["leaf_offsets"]) - 1 > limits().model_trees:
        raise _damaged(path, f"{name}.leaf_offsets", f"more than {limits().model_trees:,} trees")
    leaf = arrays["leaf"].astype(np.float64)
    largest = max(abs(scale) * float(np.abs(leaf).max(initial=0.0)), abs(baseline))
    if largest > _MOST_LOG:
        raise _damaged(path, f"{name}.leaf", f"a leaf is {largest:g} in the logarithm of time")
    try:
        forest = Forest(**{column: arrays[column] for column in _ARRAYS}, scale=scale, baseline=baseline)  # type: ignore[arg-type]
    except InvariantError as error:
        raise _damaged(path, name, error.message) from error
    return forest


def _card_bytes(path: Path) -> bytes:
    _check_size(
        path,
        "put the folder of models at the path in the hardware file, or run hespas-validate calibrate again",
    )
    return read_document(path, limits().card_bytes, "the card of a learned model")


def _check_size(path: Path, remedy: str) -> None:
    """Raise ``FormatError`` for a path that is missing, not a regular file, or too large."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise FormatError("no such learned model", path=str(path), hint=remedy) from error
    if not stat.S_ISREG(status.st_mode):
        raise FormatError("no such learned model: not a regular file", path=str(path), hint=remedy)
    most = limits().card_bytes
    if status.st_size > most:
        raise FormatError(
            f"{status.st_size:,} bytes: a learned model has at most {most:,}",
            path=str(path),
            position=f"byte {most}",
            hint="give the card of a learned model (NAME.json); its trees must be in the same folder",
        )
