"""Learned: gradient-boosted trees on the logarithm of time over a data-sheet time.

    time = base(sizes, data sheet) x exp(sum of trees(log sizes, log ratios, device descriptors))

Trees that never see what a device is called speak of devices that were not in the fit. The interval holds
90 % of outcomes: fitted quantiles, widened until that was so on rows left out of the fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hespas.estimators.by_operation import Prediction, estimate_by_operation
from hespas.estimators.learned.applied import Answer, apply_model
from hespas.estimators.learned.choice import Choice, Wanted, choose
from hespas.estimators.learned.stored import cards_in, load_model, shipped_folder
from hespas.estimators.operations import Operations, timed_with_events
from hespas.graph import Diagnostics, Estimate, OpGraph
from hespas.graph.columns import IntArray
from hespas.graph.errors import UsageError
from hespas.hardware import Device

__all__ = ["Learned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The learned models of a folder; fields are options. ``models``: the folder (empty: the shipped ones).
    ``num_ranks``: size of collectives over all ranks where the graph does not say.
    """

    models: str = ""
    num_ranks: int = -1

    @property
    def name(self) -> str:
        """``learned``."""
        return "learned"

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """Time of each operation; NaN with a reason where no model covers its kind, number format or sizes.

        O(ops x trees): about 2 us per operation and 300 trees.
        """
        folder = Path(self.models) if self.models else shipped_folder()
        cards = cards_in(folder)
        if not cards:
            raise UsageError(f"no learned model in {folder}", hint="name a folder of cards and trees")
        parts: dict[tuple[Path, bool], list[tuple[Choice, IntArray]]] = {}
        refused: dict[str, int] = {}
        for wanted, rows in _by_label(ops):
            choice = choose(cards, wanted, device)
            if isinstance(choice, str):
                refused[choice] = refused.get(choice, 0) + len(rows)
                continue
            parts.setdefault((choice.path, choice.is_seen), []).append((choice, rows))
            _tell_stand_in(wanted, choice, device, len(rows), diagnostics)
        answer = Answer.none(len(ops))
        for (path, _), choices in parts.items():
            apply_model(load_model(path), choices, ops, device, answer)
        for reason, count in (*refused.items(), *answer.reasons.items()):
            if diagnostics is not None and count:
                diagnostics.warning("learned.refused", device.name, f"no duration, {reason}", count=count)
        return Prediction.of(self.name, answer.duration_ns, answer.low_ns, answer.high_ns)

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """The time of one execution of each node; distinct operations are asked once."""
        return estimate_by_operation(self, graph, device, diagnostics, num_ranks=self.num_ranks)


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
