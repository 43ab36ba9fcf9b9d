"""Asking a set of learned models: which speaks for an operation, and what was refused or assumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hespas.estimators.by_operation import Prediction
from hespas.estimators.learned.applied import Answer, apply_model
from hespas.estimators.learned.card import Card
from hespas.estimators.learned.choice import Choice, Wanted, choose
from hespas.estimators.learned.stored import LearnedModel, load_model
from hespas.estimators.operations import Operations, timed_with_events
from hespas.graph import Diagnostics
from hespas.graph.columns import IntArray
from hespas.hardware import Device

__all__ = ["Library", "ModelsAtHand"]


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    """Models by the paths of their cards; the first ``ranked`` speak in their order before all others, where
    they speak of the same. ``load`` is asked for the trees of those that speak.
    """

    cards: Sequence[tuple[Path, Card]]
    ranked: int = 0
    load: Callable[[Path], LearnedModel] = load_model

    def ask(self, ops: Operations, device: Device, diagnostics: Diagnostics | None) -> Answer:
        """The time of each operation, and how many have none for which reason. O(ops x trees)."""
        parts: dict[tuple[Path, bool], list[tuple[Choice, IntArray]]] = {}
        answer = Answer.none(len(ops))
        for wanted, rows in _by_label(ops):
            choice = choose(self.cards, wanted, device, ranked=self.ranked)
            if isinstance(choice, str):
                answer.reasons[choice] = answer.reasons.get(choice, 0) + len(rows)
                continue
            parts.setdefault((choice.path, choice.is_seen), []).append((choice, rows))
            _tell_stand_in(wanted, choice, device, len(rows), diagnostics)
        for (path, _), choices in parts.items():
            apply_model(self.load(path), choices, ops, device, answer)
        return answer


@dataclass(frozen=True, slots=True, eq=False)
class ModelsAtHand:
    """Models that are in no file (yet), as an estimator of operations."""

    models: Sequence[LearnedModel]

    @property
    def name(self) -> str:
        """``learned``."""
        return "learned"

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """Time of each operation; NaN where no model covers it."""
        by_path = {Path(f"{number:06d}.json"): model for number, model in enumerate(self.models)}
        cards = [(path, model.card) for path, model in by_path.items()]
        library = Library(cards, load=by_path.__getitem__)
        answer = library.ask(ops, device, diagnostics)
        return Prediction.of(self.name, answer.duration_ns, answer.low_ns, answer.high_ns)


def _by_label(ops: Operations) -> list[tuple[Wanted, IntArray]]:
    """Rows of operations that share all their labels."""
    labels = (ops.kind, ops.op, ops.scheme, ops.variant)
    key = np.zeros(len(ops), np.int64)
    for each in labels:
        key = key * max(len(each.names), 1) + each.row
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.diff(key[order], prepend=-1))
    return [
        (Wanted(*(each[int(rows[0])] for each in labels)), rows)
        for rows in np.split(order, starts[1:])
        if len(rows)
    ]


def _tell_stand_in(
    wanted: Wanted, choice: Choice, device: Device, count: int, diagnostics: Diagnostics | None
) -> None:
    """Say where another number format, operation or device speaks."""
    if diagnostics is None:
        return
    cell = choice.cell
    if (cell.op, cell.scheme) != (wanted.op, wanted.scheme) and (cell.op or wanted.op or cell.scheme):
        text = f"{wanted.kind} {wanted.op} {wanted.scheme}: estimated as {cell.op} {cell.scheme}"
        diagnostics.info("learned.stand-in", device.name, " ".join(text.split()), count=count)
    if not wanted.variant and timed_with_events(cell.variant):
        text = f"{wanted.kind} {wanted.scheme}: fitted on times taken with events, which hold the launch"
        diagnostics.info("learned.event-times", device.name, text, count=count)
    if not choice.is_seen:
        text = f"{wanted.kind} {wanted.scheme}: the device was not in the fit, intervals are those of others"
        diagnostics.info("learned.unseen-device", device.name, text, count=count)
