"""The card of a stored model: what it was fitted on, how, and how wrong it is where it was not."""

from __future__ import annotations

import msgspec

from hespas.graph.errors import FormatError

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
    """The card in ``data``. Raises ``FormatError`` for what is none, or of another version."""
    try:
        schema = msgspec.json.decode(data, type=_Head).schema
    except msgspec.MsgspecError as error:
        raise FormatError(f"not the card of a learned model: {error}", path=path) from error
    if schema != SCHEMA:
        raise FormatError(
            f"the model is of schema {schema!r}", path=path, hint=f"fit it again: this version reads {SCHEMA}"
        )
    try:
        return msgspec.json.decode(data, type=Card)
    except msgspec.MsgspecError as error:
        raise FormatError(f"not the card of a learned model: {error}", path=path) from error


def encode_card(card: Card) -> bytes:
    """The card as indented JSON, the same bytes for the same card."""
    return msgspec.json.format(msgspec.json.encode(card), indent=1) + b"\n"


class _Head(msgspec.Struct, frozen=True):
    schema: str
