"""The card of a stored model: what it was fitted on, how, and how wrong it is where it was not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isfinite
from typing import TypeVar

import msgspec

from hespas.graph.errors import FormatError, clipped

__all__ = [
    "SCHEMA",
    "Candidate",
    "Card",
    "Cell",
    "ErrorRow",
    "Interval",
    "LeftOutError",
    "SeenDevice",
    "Training",
    "decode_card",
    "encode_card",
]

SCHEMA = "hespas.learned/1"

_T = TypeVar("_T")
_REMEDY = "copy card and trees again, or fit the model again: hespas-validate calibrate --estimator learned"
_PLACE = re.compile(r" - at `(.*)`$|: .*\(byte (\d+)\)$", re.DOTALL)
_NAME = re.compile(r"[\w.+-]{1,200}")
_CODED = frozenset({"variant", "scheme", "op"})
_MOST_COLUMNS = 255
_MOST_LOG = 50.0
_MOST_CODE = 1_000_000
_MOST_NS = 3.6e12


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Operations that the model was fitted on: ``rows`` per device."""

    kind: str
    op: str
    scheme: str
    variant: str
    rows: dict[str, int]


class SeenDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device of the fit. Devices of one ``family`` are left out together when transfer is tested."""

    name: str
    vendor: str
    family: str
    kind: str
    rows: int


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
    """Error on shape groups that the fit has not seen: ``devval``, or in a user's own models (there ``op``,
    ``scheme`` and ``variant`` are ``*``) the folds of the fit in turn. Fractions; None: refused, or untested.
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
    ``support`` names the dimensions whose octaves are stored; ``unseen`` is the interval of log time on
    devices that were not in the fit (None: such devices are refused).
    """

    schema: str
    name: str
    family: str
    overhead_ns: float
    columns: tuple[str, ...]
    transfer_columns: tuple[str, ...]
    codes: dict[str, dict[str, float]]
    support: tuple[str, ...]
    cells: tuple[Cell, ...]
    devices: tuple[SeenDevice, ...]
    intervals: tuple[Interval, ...]
    unseen: Interval | None
    training: Training
    selection: tuple[Candidate, ...]
    left_out: tuple[LeftOutError, ...] = ()
    errors: tuple[ErrorRow, ...] = ()


def decode_card(data: bytes, path: str) -> Card:
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
        return msgspec.json.decode(data, type=kind)
    except UnicodeDecodeError as error:
        # The library counts from the start of the text it stands in.
        start = _first_foreign(data)
        where = f"line {data.count(bytes([10]), 0, start) + 1}, byte {start}"
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


def _first_foreign(data: bytes) -> int:
    """The first byte that is not UTF-8."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start
    return len(data)


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


def _faults_of_rows(card: Card) -> Iterator[tuple[str, str]]:
    """The same of codes, cells and intervals."""
    for key, codes in card.codes.items():
        if not all(abs(code) <= _MOST_CODE for code in codes.values()):
            yield f"$.codes.{key}", f"numbers up to {_MOST_CODE:,}"
    for place, cell in enumerate(card.cells):
        if any(rows < 0 for rows in cell.rows.values()):
            yield f"$.cells[{place}].rows", "counts that are 0 or more"
    rows = [(f"$.intervals[{place}]", each) for place, each in enumerate(card.intervals)]
    rows += [("$.unseen", card.unseen)] if card.unseen is not None else []
    for where, each in rows:
        if not all(isfinite(bound) and abs(bound) <= _MOST_LOG for bound in (each.low, each.high)):
            yield where, f"low and high within {_MOST_LOG:g} of 0, in the logarithm of time"
    if not any((each.hardware, each.kind, each.scheme) == ("*", "*", "*") for each in card.intervals):
        yield "$.intervals", "an interval of all operations: hardware, kind and scheme '*'"


def encode_card(card: Card) -> bytes:
    """The card as indented JSON, the same bytes for the same card."""
    return msgspec.json.format(msgspec.json.encode(card), indent=1) + b"\n"


class _Head(msgspec.Struct, frozen=True):
    schema: str
