"""One stored model asked about operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.learned.card import Card, Cell
from hespas.estimators.learned.choice import Choice
from hespas.estimators.learned.features import features_of
from hespas.estimators.learned.stored import LearnedModel
from hespas.estimators.learned.support import FREE_OCTAVES, MOST_OCTAVES, WIDENING, distances, octaves_of
from hespas.estimators.operations import Labels, Operations
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import FormatError, clipped
from hespas.hardware import Device

__all__ = ["Answer", "apply_model", "code_columns"]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """Columns of shape ``(ops,)`` [ns] to be filled in, and why some are not."""

    duration_ns: FloatArray
    low_ns: FloatArray
    high_ns: FloatArray
    reasons: dict[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def none(cls, count: int) -> Answer:
        """Nothing said yet."""
        return cls(np.full(count, nan), np.full(count, nan), np.full(count, nan))


def code_columns(
    codes: Mapping[str, Mapping[str, float]], labels: Mapping[str, Labels]
) -> dict[str, FloatArray]:
    """The columns ``variant``, ``scheme`` and ``op``: the number of each label, NaN where it has none."""
    found: dict[str, FloatArray] = {}
    for name, numbers in codes.items():
        each = labels[name]
        found[name] = np.array([numbers.get(text, np.nan) for text in each.names])[each.row]
    return found


def apply_model(
    model: LearnedModel,
    choices: Sequence[tuple[Choice, IntArray]],
    ops: Operations,
    device: Device,
    answer: Answer,
) -> None:
    """Fill in the answers of the rows of ``choices``, which are of one model and of one kind of trees.

    Raises ``FormatError`` where the card names a column, a family or a label that there is not.
    """
    try:
        _apply(model, choices, ops, device, answer)
    except KeyError as error:
        raise FormatError(
            f"the card of {model.card.name!r} is damaged: nothing is called {clipped(str(error))}",
            path=str(choices[0][0].path),
            position="$.family, $.columns or $.codes",
            hint="copy card and trees again, or fit the model again",
        ) from error


def _apply(
    model: LearnedModel,
    choices: Sequence[tuple[Choice, IntArray]],
    ops: Operations,
    device: Device,
    answer: Answer,
) -> None:
    card = model.card
    rows = np.concatenate([each for _, each in choices])
    cell = np.repeat(np.arange(len(choices)), [len(each) for _, each in choices])
    asked = _as_fitted(ops.take(rows), [choice.cell for choice, _ in choices], cell)
    features = features_of(card.family, asked, device, overhead_ns=card.overhead_ns)
    labels = {"variant": asked.variant, "scheme": asked.scheme, "op": asked.op}
    columns = dict(zip(features.names, features.columns.T, strict=True))
    columns |= {name: each.astype(np.float32) for name, each in code_columns(card.codes, labels).items()}
    table = np.stack([columns[name] for name in card.columns], axis=1)
    known = np.isfinite(table).all(axis=1)
    distance = distances(model.octaves, octaves_of(card.support, asked))
    near = known & (distance <= MOST_OCTAVES)
    _count(answer, "sizes, FLOPs, bytes or the peak are unknown", int((~known).sum()))
    _count(answer, "its sizes are far from all that was measured", int((known & ~near).sum()))
    if not near.any():
        return
    if choices[0][0].is_seen:
        middle, low, high = _said(model, table[near], asked.take(near.nonzero()[0]), device)
    else:
        transfer = np.stack([columns[name] for name in card.transfer_columns], axis=1)
        middle, low, high = _said_of_unseen(model, transfer[near])
    wider = WIDENING * np.log(2) * np.maximum(distance[near] - FREE_OCTAVES, 0)
    place, base = rows[near], features.base_ns[near]
    answer.duration_ns[place] = base * np.exp(middle)
    answer.low_ns[place] = base * np.exp(middle + low - wider)
    answer.high_ns[place] = base * np.exp(middle + high + wider)


def _said(
    model: LearnedModel, table: NDArray[np.float32], ops: Operations, device: Device
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Log time over the base, and how far its interval reaches below (negative) and above."""
    middle = model.forests["main"].predict(table)
    below, above = _margins(model.card, ops, device)
    low = np.minimum(model.forests["low"].predict(table) - below, 0.0)
    high = np.maximum(model.forests["high"].predict(table) + above, 0.0)
    return middle, low, high


def _said_of_unseen(
    model: LearnedModel, table: NDArray[np.float32]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The same on a device that was not in the fit."""
    middle, unseen = model.forests["transfer"].predict(table), model.card.unseen
    low, high = (nan, nan) if unseen is None else (unseen.low, unseen.high)
    return middle, np.full(len(middle), low), np.full(len(middle), high)


def _margins(card: Card, ops: Operations, device: Device) -> tuple[FloatArray, FloatArray]:
    """What the fitted quantiles are widened by: of device, kind and scheme, else of the kind, else of all."""
    table = {(row.hardware, row.kind, row.scheme): row for row in card.intervals}
    schemes = len(ops.scheme.names)
    rows = [
        table.get((device.name, kind, scheme)) or table.get(("*", kind, "*")) or table[("*", "*", "*")]
        for kind in ops.kind.names
        for scheme in ops.scheme.names
    ]
    place = ops.kind.row.astype(np.int64) * schemes + ops.scheme.row
    return np.array([row.low for row in rows])[place], np.array([row.high for row in rows])[place]


def _as_fitted(ops: Operations, cells: Sequence[Cell], cell: IntArray) -> Operations:
    """The operations under the labels of the cells that speak for them."""

    def labelled(names: list[str]) -> Labels:
        distinct = tuple(dict.fromkeys(names))
        return Labels.choice(distinct, np.array([distinct.index(name) for name in names])[cell])

    return replace(
        ops,
        op=labelled([each.op for each in cells]),
        scheme=labelled([each.scheme for each in cells]),
        variant=labelled([each.variant for each in cells]),
    )


def _count(answer: Answer, reason: str, count: int) -> None:
    answer.reasons[reason] = answer.reasons.get(reason, 0) + count
