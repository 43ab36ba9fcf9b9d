"""Which shapes to measure next on a device, so that a fit on few tells of all: ``calibrate --suggest``.

What fits miss of the logarithm of an operation's time is taken for a Gaussian process over log2 of its sizes,
its mean 0. Two operations of one kind and number format have the covariance

    k(x, y) = s(x) s(y) exp(-|log2 x - log2 y|^2 / (2 l^2))     half of it if they are called differently

where ``s`` is how unsure the learned models are of a device they have never seen, by their intervals: wider
the less related the devices are that they have seen, and beyond the sizes of their fits. Greedily that shape
is taken which leaves least of the variance of

    mean of the process over all candidates - mean over what is measured and chosen

(the maximum mean discrepancy of the two: "kernel herding", Chen, Welling and Smola, UAI 2010). A shape near
one that was measured or chosen adds little, one that stands for many others adds most.

The variance of single shapes is the wrong aim. It is largest in the corners of the sizes; but a fit has a
dozen parameters, and what it cannot follow averages out over rows that stand for all sizes only. On 50
corners fits were twice as wrong as on random rows; on 50 shapes of this rule they are better than on random
ones. How much the fits of other devices disagree over a shape, as a part of ``s`` or of the distance, made
them no better: where they do most, a few rows tell. ``python -m benchmarks.carry_over.suggestions`` compares
the rule with random rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import nan
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.learned.bases import BaseIndex, SeenDevice, relatives
from hespas.estimators.learned.inference import octaves_beyond, widening
from hespas.estimators.learned.serialization import Card
from hespas.graph import Diagnostics
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import UsageError
from hespas.hardware import Device
from hespas.measurements import Measurements
from hespas.operations import KINDS, Labels, Operations
from hespas.validators.accuracy.tables import rows_on
from hespas.validators.calibration.known_sizes import (
    LABELS,
    Candidates,
    KnownSizes,
    candidates_of,
    known_sizes,
)
from hespas.validators.calibration.suggestions import TIME_COLUMN, SuggestedClass, Suggestions

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["chosen", "suggest"]

_LENGTH = 2.0
"""l: over how many octaves of a size what a fit misses stays alike."""
_OTHER_NAME = 0.5
_SIGMAS = 2 * 1.645
"""An interval of 90 % is so many standard deviations wide."""
_ASSUMED = 2.0
"""The width of an interval [log time] where no device could be left out to see one."""
_FOLLOWS = "pairs"
"""A size of attention that the others decide."""
_MOST_MEASURED = 4000
"""Of more measured rows so many are drawn, and stand for all."""
_AT_ONCE = 1 << 22


def suggest(
    device: Device,
    count: int,
    *,
    kinds: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    measured: Sequence[Measurements] = (),
    seed: int = 0,
    diagnostics: Diagnostics | None = None,
) -> Suggestions:
    """``count`` shapes to measure on ``device``, none of them ``measured``, as many of each kind and number
    format that :func:`known_sizes` finds. Deterministic for one ``seed``.

    O(candidates x (candidates + measured + count)), a second for each class. Raises ``UsageError`` where
    nothing is known of what is asked for, or there are fewer candidates.
    """
    import pandas as pd

    if count < 1:
        raise UsageError(f"{count} shapes to suggest", hint="ask for 1 or more")
    known = known_sizes(device, kinds, dtypes)
    generator = np.random.default_rng(seed)
    found = diagnostics if diagnostics is not None else Diagnostics()
    before = [_measured_on(device, table, found) for table in measured]
    frames: list[pd.DataFrame] = []
    classes: list[SuggestedClass] = []
    for place, each in enumerate(known):
        mine = [ops.take(_of_class(each, ops)) for ops in before]
        new = _unmeasured(candidates_of(each, device, generator), mine)
        share = (count + len(known) - 1 - place) // len(known)
        if share > len(new.ops):
            raise UsageError(
                f"{share:,} shapes of {each.kind} in {each.scheme} to suggest: {len(new.ops):,} candidates",
                hint="ask for fewer, or for more kinds",
            )
        rows = chosen(device, each, new.ops, share, measured=mine, seed=seed)
        frames.append(new.frame.iloc[rows].assign(turn=np.arange(share)))
        classes.append(_told(device, each, new.ops, rows, sum(map(len, mine))))
    frame = pd.concat(frames).sort_values("turn", kind="stable", ignore_index=True).drop(columns="turn")
    sizes = [name for name in frame.columns if name not in LABELS]
    frame = frame.astype(dict.fromkeys(sizes, "Int64")).assign(**{TIME_COLUMN: nan})
    return Suggestions(device=device, frame=frame, classes=tuple(classes), seed=seed, diagnostics=found)


def _measured_on(device: Device, table: Measurements, found: Diagnostics) -> Operations:
    """The operations of a table on the device. Raises ``UsageError`` where there is none."""
    rows = rows_on(table, device)
    if not len(rows):
        listed = ", ".join(sorted(filter(None, table.hardware.used())))
        raise UsageError(
            f"no row of {table.name} is of {device.name}", hint=f"devices there: {listed or 'none'}"
        )
    lost = sum(each.count for each in table.left_out)
    text = f"rows taken for not measured: {table.told_left_out()}"
    found.warning("suggest.left-out-rows", table.name, text, count=lost)
    return table.ops.take(rows)


def _of_class(known: KnownSizes, ops: Operations) -> IntArray:
    return np.intersect1d(ops.kind.where(known.kind), ops.scheme.where(known.scheme))


def _unmeasured(candidates: Candidates, measured: Sequence[Operations]) -> Candidates:
    """Without those that were measured."""
    seen = set(chain.from_iterable(map(_keys, measured)))
    new = np.array([key not in seen for key in _keys(candidates.ops)], np.bool_)
    return Candidates(frame=candidates.frame[new], ops=candidates.ops.take(np.flatnonzero(new)))


def _keys(ops: Operations) -> Iterator[tuple[object, ...]]:
    """What makes operations of one kind and number format the same to whoever measures them."""
    names = dict.fromkeys(name for kind in ops.kind.used() for name in KINDS[kind])
    sizes: list[list[float]] = [np.nan_to_num(ops.dim(name), nan=-1.0).tolist() for name in names]
    return zip(ops.op, *sizes, strict=True)


def _told(
    device: Device, known: KnownSizes, candidates: Operations, rows: IntArray, measured: int
) -> SuggestedClass:
    spread = _spread(device, known, candidates.take(rows))
    return SuggestedClass(
        kind=known.kind,
        dtype=known.scheme,
        shapes=len(rows),
        candidates=len(candidates),
        measured=measured,
        models=tuple(model.card.name for model in known.models),
        disagreement=float(np.exp(np.median(spread))) if len(rows) else nan,
    )


# The choice.


def chosen(
    device: Device,
    known: KnownSizes,
    candidates: Operations,
    count: int,
    *,
    measured: Sequence[Operations] = (),
    seed: int = 0,
) -> IntArray:
    """Numbers of ``count`` of the ``candidates``, the most worth first, by the rule above. They are of the
    kind and number format ``known``, and so is what is ``measured``.
    """
    generator = np.random.default_rng(seed)
    every = _Points.of(device, known, candidates)
    before = sum(map(len, measured))
    like_all, like_taken = every.like(every) / len(candidates), np.zeros(len(candidates))
    for ops in measured:
        most = len(ops) * _MOST_MEASURED // max(before, _MOST_MEASURED)
        if most:
            drawn = _Points.of(device, known, ops.take(generator.permutation(len(ops))[:most]))
            like_taken += every.like(drawn) * len(ops) / most
    found: list[int] = []
    for taken in range(before + 1, before + count + 1):
        gain = like_all - (like_taken + every.deviation**2 / 2) / taken
        gain[found] = -np.inf
        found.append(int(np.argmax(gain)))
        like_taken += every.like(every.take(np.array(found[-1:])))
    return np.array(found, np.int64)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Points:
    """Operations as points of the process: ``place`` of shape (ops, dimensions) is log2 of sizes, ``op`` and
    ``deviation`` of shape ``(ops,)`` their names and standard deviations [log time].
    """

    place: FloatArray
    op: NDArray[np.str_]
    deviation: FloatArray

    @classmethod
    def of(cls, device: Device, known: KnownSizes, ops: Operations) -> _Points:
        """The points of some operations."""
        names = [name for name in KINDS[known.kind] if name != _FOLLOWS]
        sizes = np.stack([np.nan_to_num(ops.dim(name), nan=1.0) for name in names], axis=1)
        unsure = [_unsure(device, model.card, ops) for model in known.models]
        return cls(
            place=np.log2(np.maximum(sizes, 1.0)), op=np.array([*ops.op]), deviation=np.min(unsure, axis=0)
        )

    def take(self, rows: IntArray) -> _Points:
        """Some of them."""
        return _Points(place=self.place[rows], op=self.op[rows], deviation=self.deviation[rows])

    def like(self, others: _Points) -> FloatArray:
        """The sum of the covariances with ``others`` of each point."""
        found = np.empty(len(self.op))
        step = max(1, _AT_ONCE // len(others.op))
        for start in range(0, len(found), step):
            rows = slice(start, start + step)
            apart = np.zeros((len(self.place[rows]), len(others.place)))
            for one, other in zip(self.place[rows].T, others.place.T, strict=True):
                apart += (one[:, None] - other) ** 2
            alike = np.where(self.op[rows, None] == others.op, 1.0, _OTHER_NAME) * np.exp(
                apart / (-2 * _LENGTH**2)
            )
            found[rows] = self.deviation[rows] * (alike @ others.deviation)
        return found


def _others(device: Device, card: Card) -> list[SeenDevice]:
    """The measured devices of the same kind; the device itself only where it is alone."""
    alike = [each for each in card.devices if each.kind == device.kind]
    return [each for each in alike if each.name != device.name] or alike


def _spread(device: Device, known: KnownSizes, ops: Operations) -> FloatArray:
    """By how much devices disagree, the deviation of log time; NaN where fewer than two have a say."""
    asked = replace(ops, scheme=Labels.constant(known.stand_in, len(ops)))
    table = np.array(
        [
            BaseIndex(model.card.bases, model.card.forms).log_times(asked, device, (each.name,))[0]
            for model in known.models
            for each in _others(device, model.card)
        ]
    )
    told = np.isfinite(table)
    count = told.sum(axis=0)
    middle = np.where(told, table, 0.0).sum(axis=0) / np.maximum(count, 1)
    squares = np.where(told, (table - middle) ** 2, 0.0).sum(axis=0)
    return np.sqrt(np.where(count > 1, squares / np.maximum(count - 1, 1), nan))


def _unsure(device: Device, card: Card, ops: Operations) -> FloatArray:
    """How unsure a model is of a device it has never seen, the deviation of log time."""
    seen = _others(device, card)
    kin = relatives(device, seen, [each.name for each in seen])
    widths = {each.tier: each.high - each.low for each in card.unseen}
    width = widths.get(kin.tier if kin else "", _ASSUMED)
    return (width + 2 * widening(card, octaves_beyond(card.reach, ops))) / _SIGMAS
