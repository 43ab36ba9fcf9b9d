"""Choice of the shapes to measure next on a device, so that a fit to few shapes is good for all of them.

Used by ``calibrate --suggest``. The errors of fits (in log time) are modelled as a Gaussian process over log2
of the sizes, with mean 0. The covariance of two operations of one kind and number format is

    k(x, y) = s(x) s(y) exp(-|log2 x - log2 y|^2 / (2 l^2))     half of it for different operation names

where ``s`` is the uncertainty of the learned models for a device that was not measured, from their intervals:
it is larger if their devices are less related, and beyond the sizes of their fits. The rule greedily takes
the shape that leaves the least variance of

    mean of the process over all candidates - mean over measured and chosen shapes

(the maximum mean discrepancy of the two: "kernel herding", Chen, Welling and Smola, UAI 2010). A shape near a
measured or chosen one adds little; a shape that represents many others adds most.

Minimising the variance of single shapes is not the goal. It is largest at the corners of the size range; but
a fit has a dozen parameters, and its remaining errors only average out over rows that represent all sizes.
Fits to 50 corners had twice the error of fits to random rows; fits to 50 shapes of this rule are better than
fits to random rows. Adding the disagreement of the fits of other devices to ``s`` or to the distance did not
improve them: where they disagree most, a few rows are enough. ``python -m benchmarks.carry_over.suggestions``
compares the rule with random rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import isnan, nan
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from hespas._version import __version__
from hespas.estimators.learned.bases import BaseIndex, FittedDevice
from hespas.estimators.learned.extrapolation import (
    expected_deviation,
    octaves_beyond,
    references_of,
    widening,
)
from hespas.estimators.learned.serialization import Card
from hespas.files.documents import Count, Figure, document_bytes
from hespas.graph import Diagnostics
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import UsageError
from hespas.hardware import Device
from hespas.measurements import Measurements
from hespas.measurements.model import rows_on
from hespas.operations import KINDS, Labels, Operations
from hespas.validators.accuracy.document import DiagnosticJson, diagnostics_json
from hespas.validators.calibration.known_sizes import (
    LABELS,
    KnownSizes,
    candidates_of,
    known_sizes,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "TIME_COLUMN",
    "SuggestedClass",
    "SuggestionDocument",
    "Suggestions",
    "chosen",
    "suggest",
    "suggestion_json",
]

TIME_COLUMN = "latency_us"
"""Column that the user fills in."""
_LENGTH = 2.0
"""Correlation length l of errors, in octaves of a size."""
_OTHER_NAME = 0.5
_SIGMAS = 2 * 1.645
"""Width of an interval of 90 % in standard deviations."""
_ASSUMED_WIDTH = 2.0
"""Width of an interval [log time] if no device could be held out."""
_DERIVED_SIZE = "pairs"
"""Size of attention that follows from the others."""
_MOST_MEASURED = 4000
"""Most measured rows that are used; a larger number is represented by a sample."""
_ELEMENTS_PER_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestedClass:
    """Suggested shapes of one kind and number format. ``shapes`` is their number, ``candidates`` the number
    of shapes from which they were chosen. Candidates are drawn from the fitted sizes of ``models``.

    ``measured`` is the number of rows that were measured before. ``disagreement`` is the factor (one standard
    deviation) by which times predicted from different devices differ for the median shape. It is NaN if fewer
    than two other devices were measured.
    """

    kind: str
    dtype: str
    shapes: int
    candidates: int
    measured: int
    models: tuple[str, ...]
    disagreement: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Suggestions:
    """Suggested shapes, most useful first.

    The columns of ``frame`` are hardware, kind, op, dtype, the sizes, and :data:`TIME_COLUMN`, which is NaN.
    """

    device: Device
    frame: pd.DataFrame
    classes: tuple[SuggestedClass, ...]
    seed: int
    diagnostics: Diagnostics


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
    """Suggest ``count`` shapes to measure on ``device``. Shapes in ``measured`` are left out.

    Each kind and number format of :func:`known_sizes` gets the same number of shapes, or one more. Equal
    seeds give equal results. O(candidates x (candidates + measured + count)), a second per class. Raises
    ``UsageError`` if no model covers a requested class, or if there are too few candidates.
    """
    import pandas as pd

    if count < 1:
        raise UsageError(f"invalid number of shapes to suggest: {count}", hint="use 1 or more")
    all_sizes = known_sizes(device, kinds, dtypes)
    generator = np.random.default_rng(seed)
    diagnostics = diagnostics if diagnostics is not None else Diagnostics()
    before = [_operations_on(device, table, diagnostics) for table in measured]
    frames: list[pd.DataFrame] = []
    classes: list[SuggestedClass] = []
    for number, sizes in enumerate(all_sizes):
        of_class = [
            ops.take(np.intersect1d(ops.kind.where(sizes.kind), ops.scheme.where(sizes.scheme)))
            for ops in before
        ]
        candidates = candidates_of(sizes, device, generator)
        seen = set(chain.from_iterable(map(_shape_keys, of_class)))
        is_new = np.array([key not in seen for key in _shape_keys(candidates.ops)], np.bool_)
        new_frame, new_ops = candidates.frame[is_new], candidates.ops.take(np.flatnonzero(is_new))
        share = (count + len(all_sizes) - 1 - number) // len(all_sizes)
        if share > len(new_ops):
            raise UsageError(
                f"cannot suggest {share:,} shapes of {sizes.kind} in {sizes.scheme}: there are only "
                f"{len(new_ops):,} candidates",
                hint="suggest fewer shapes, or give more kinds",
            )
        rows = chosen(device, sizes, new_ops, share, measured=of_class, seed=seed)
        frames.append(new_frame.iloc[rows].assign(turn=np.arange(share)))
        ops = new_ops.take(rows)
        stand_in = replace(ops, scheme=Labels.constant(sizes.stand_in, len(ops)))
        table = np.array(
            [
                BaseIndex(model.card.bases, model.card.forms).log_times(stand_in, device, (other.name,))[0]
                for model in sizes.models
                for other in _other_devices(device, model.card)
            ]
        )
        is_known = np.isfinite(table)
        device_count = is_known.sum(axis=0)
        mean = np.where(is_known, table, 0.0).sum(axis=0) / np.maximum(device_count, 1)
        squares = np.where(is_known, (table - mean) ** 2, 0.0).sum(axis=0)
        spread = np.sqrt(np.where(device_count > 1, squares / np.maximum(device_count - 1, 1), nan))
        classes.append(
            SuggestedClass(
                kind=sizes.kind,
                dtype=sizes.scheme,
                shapes=len(rows),
                candidates=len(new_ops),
                measured=sum(map(len, of_class)),
                models=tuple(model.card.name for model in sizes.models),
                disagreement=float(np.exp(np.median(spread))) if len(rows) else nan,
            )
        )
    frame = pd.concat(frames).sort_values("turn", kind="stable", ignore_index=True).drop(columns="turn")
    names = [name for name in frame.columns if name not in LABELS]
    frame = frame.astype(dict.fromkeys(names, "Int64")).assign(**{TIME_COLUMN: nan})
    return Suggestions(device=device, frame=frame, classes=tuple(classes), seed=seed, diagnostics=diagnostics)


def _operations_on(device: Device, table: Measurements, diagnostics: Diagnostics) -> Operations:
    """Return the operations in a table that were measured on the device. Raises ``UsageError`` if there are
    none.
    """
    rows = rows_on(table, device)
    if not len(rows):
        listed = ", ".join(sorted(filter(None, table.hardware.used())))
        raise UsageError(
            f"no row of {table.name} is of {device.name}",
            hint=f"choose a device of the table: {listed or 'none'}",
        )
    text = f"rows treated as not measured: {table.describe_left_out()}"
    skipped = sum(reason.count for reason in table.left_out)
    diagnostics.warning("suggest.left-out-rows", table.name, text, count=skipped)
    return table.ops.take(rows)


def _shape_keys(ops: Operations) -> Iterator[tuple[object, ...]]:
    """Yield a key of name and sizes for each operation of one kind and number format. Operations with equal
    keys need one measurement.
    """
    names = dict.fromkeys(name for kind in ops.kind.used() for name in KINDS[kind])
    sizes: list[list[float]] = [np.nan_to_num(ops.dim(name), nan=-1.0).tolist() for name in names]
    return zip(ops.op, *sizes, strict=True)


def chosen(
    device: Device,
    known: KnownSizes,
    candidates: Operations,
    count: int,
    *,
    measured: Sequence[Operations] = (),
    seed: int = 0,
) -> IntArray:
    """Return the indices of ``count`` of the ``candidates``, most useful first, by the rule of this module.

    ``candidates`` and ``measured`` are operations of the kind and number format of ``known``.
    """
    generator = np.random.default_rng(seed)
    points = _ProcessPoints.of(device, known, candidates)
    before = sum(map(len, measured))
    mean_covariance = points.covariance_sum(points) / len(candidates)
    used_covariance = np.zeros(len(candidates))
    for ops in measured:
        most = len(ops) * _MOST_MEASURED // max(before, _MOST_MEASURED)
        if most:
            sample = _ProcessPoints.of(device, known, ops.take(generator.permutation(len(ops))[:most]))
            used_covariance += points.covariance_sum(sample) * len(ops) / most
    rows: list[int] = []
    for used in range(before + 1, before + count + 1):
        gain = mean_covariance - (used_covariance + points.deviation**2 / 2) / used
        gain[rows] = -np.inf
        rows.append(int(np.argmax(gain)))
        used_covariance += points.covariance_sum(points.take(np.array(rows[-1:])))
    return np.array(rows, np.int64)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _ProcessPoints:
    """Operations as points of the Gaussian process (see the module).

    ``position`` has log2 of the sizes, shape ``(ops, dimensions)``. ``op`` has the operation names, and
    ``deviation`` the uncertainty of the learned models for a device that was not measured: a standard
    deviation of log time. Both have shape ``(ops,)``.
    """

    position: FloatArray
    op: NDArray[np.str_]
    deviation: FloatArray

    @classmethod
    def of(cls, device: Device, known: KnownSizes, ops: Operations) -> _ProcessPoints:
        """Return operations as points of a Gaussian process, with standard deviations from the learned models
        in ``known``.
        """
        names = [name for name in KINDS[known.kind] if name != _DERIVED_SIZE]
        sizes = np.stack([np.nan_to_num(ops.dim(name), nan=1.0) for name in names], axis=1)
        deviations: list[FloatArray] = []
        for model in known.models:  # the uncertainty of a model for a device that was not measured
            card = model.card
            cells = [cell for cell in card.cells if (cell.kind, cell.scheme) == (known.kind, known.stand_in)]
            cell = max(cells, key=lambda cell: sum(cell.rows.values()))
            others = {other.name for other in _other_devices(device, card)}
            references = references_of(card, cell, device, {device.name} - others)
            width = _ASSUMED_WIDTH
            if references is not None:
                width = float(expected_deviation(references)) * (card.unseen.high - card.unseen.low)
            deviations.append((width + 2 * widening(card, octaves_beyond(card.reach, ops))) / _SIGMAS)
        return cls(
            position=np.log2(np.maximum(sizes, 1.0)),
            op=np.array([*ops.op]),
            deviation=np.min(deviations, axis=0),
        )

    def take(self, rows: IntArray) -> _ProcessPoints:
        """Return the points with the given numbers."""
        return _ProcessPoints(position=self.position[rows], op=self.op[rows], deviation=self.deviation[rows])

    def covariance_sum(self, others: _ProcessPoints) -> FloatArray:
        """Return for each point the sum of its covariances with ``others``."""
        total = np.empty(len(self.op))
        step = max(1, _ELEMENTS_PER_BLOCK // len(others.op))
        for start in range(0, len(total), step):
            rows = slice(start, start + step)
            distance = np.zeros((len(self.position[rows]), len(others.position)))
            for own, other in zip(self.position[rows].T, others.position.T, strict=True):
                distance += (own[:, None] - other) ** 2
            name_factor = np.where(self.op[rows, None] == others.op, 1.0, _OTHER_NAME)
            correlation = name_factor * np.exp(distance / (-2 * _LENGTH**2))
            total[rows] = self.deviation[rows] * (correlation @ others.deviation)
        return total


def _other_devices(device: Device, card: Card) -> list[FittedDevice]:
    """Return the measured devices of the same kind except ``device``; if it is the only one, return it."""
    same_kind = [other for other in card.devices if other.kind == device.kind]
    return [other for other in same_kind if other.name != device.name] or same_kind


class _SuggestedClassJson(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    dtype: str
    shapes: Count
    candidates: Count
    measured: Annotated[Count, Meta(description="rows of the tables on the device")]
    models: Annotated[tuple[str, ...], Meta(description="models whose sizes the candidates are drawn from")]
    disagreement: Annotated[
        Figure, Meta(description="factor, a standard deviation, between devices over the median shape")
    ]


class _SuggestedShapeJson(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    op: str
    dtype: str
    sizes: dict[str, Count]


class SuggestionDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Document that hespas-validate calibrate --suggest --json writes; null is unknown."""

    schema: Literal["hespas.suggest/1"] = "hespas.suggest/1"
    hespas_version: str = __version__
    inputs: tuple[str, ...]
    hardware: str
    seed: Count
    classes: list[_SuggestedClassJson]
    shapes: Annotated[list[_SuggestedShapeJson], Meta(description="most useful first")]
    diagnostics: list[DiagnosticJson]


def suggestion_json(suggestions: Suggestions, inputs: Sequence[str]) -> bytes:
    """Return the document as indented UTF-8 JSON that ends in a newline; unknown figures are null."""
    frame = suggestions.frame
    names = [name for name in frame.columns if name not in (*LABELS, TIME_COLUMN)]
    sizes = frame[names].astype("float64").to_numpy().tolist()
    labels = frame[["kind", "op", "dtype"]].to_numpy().tolist()
    return document_bytes(
        SuggestionDocument(
            inputs=tuple(inputs),
            hardware=suggestions.device.name,
            seed=suggestions.seed,
            classes=[
                msgspec.convert(row, _SuggestedClassJson, from_attributes=True) for row in suggestions.classes
            ],
            shapes=[
                _SuggestedShapeJson(
                    kind=kind,
                    op=op,
                    dtype=dtype,
                    sizes={name: int(size) for name, size in zip(names, row, strict=True) if not isnan(size)},
                )
                for (kind, op, dtype), row in zip(labels, sizes, strict=True)
            ],
            diagnostics=diagnostics_json(suggestions.diagnostics),
        )
    )
