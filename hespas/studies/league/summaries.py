"""Summaries of evaluated rows: errors by group, naive baselines, ranking of layouts, scaling, speed-ups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from math import isnan
from statistics import median
from typing import TypeVar

import msgspec
import numpy as np

from hespas.files.documents import Count, Figure
from hespas.fitting.statistics import kendall_tau
from hespas.studies.errors import ErrorSizes, GroupErrors, grouped, grouped_by
from hespas.studies.league.evaluation import Calibration, EvaluatedRow

__all__ = [
    "GROUPINGS",
    "NEAR_BEST",
    "NOISE_FLOOR",
    "AcceleratorSpeedup",
    "BaselineErrors",
    "LayoutRanking",
    "RowGroupErrors",
    "ScalingPoint",
    "group_errors",
    "group_of",
    "naive_baselines",
    "rank_layouts",
    "scaling_points",
    "speedups",
]

_Member = TypeVar("_Member")
NOISE_FLOOR = 0.028
"""Median difference of the step between submitters with the same layout in the same round of MLPerf."""
_LAYOUT_KEYS = (
    "source", "model", "accelerator", "num_accelerators", "precision_class", "seq_len", "train_type",
)  # fmt: skip
_SCALING_KEYS = ("source", "model", "accelerator", "precision", "train_type", "seq_len")
_SPEEDUP_KEYS = ("source", "model", "precision_class", "train_type", "seq_len")
"""Columns in which the rows of a layout set, of a scaling curve and of a speed-up are equal."""
NEAR_BEST = 0.03
"""Largest excess of a chosen layout over the best one that counts as near."""
_MAX_COUNT_RATIO = 2.0
"""Limit of the ratio of two numbers of accelerators: beyond it, a speed-up would include scaling effects."""


class RowGroupErrors(GroupErrors, frozen=True, kw_only=True):
    """Errors of a group of league rows with one calibration. ``uncalibrated_mean_ape`` is the mean error of
    the same rows without calibration.
    """

    calibrate: Calibration
    uncalibrated_mean_ape: Figure


def _cell(column: str) -> Callable[[EvaluatedRow], str]:
    return lambda row: row.row.cells.get(column, "") or "not stated"


def _scale(row: EvaluatedRow) -> str:
    """Return the range in which the number of accelerators falls. Ranges grow by powers of eight: a node, a
    rack, a pod.
    """
    count = row.row.number_of("num_accelerators")
    if isnan(count):
        return "not stated"
    return next((f"up to {limit}" for limit in (8, 64, 512) if count <= limit), "over 512")


GROUPINGS: dict[str, Callable[[EvaluatedRow], str]] = {
    "all": lambda _: "all",
    "source": _cell("source"),
    "accelerator": _cell("accelerator"),
    "model": _cell("model"),
    "scale": _scale,
    "precision": _cell("precision_class"),
    "status": lambda row: row.status,
}
"""Groupings of rows."""


def group_errors(rows: Sequence[EvaluatedRow], calibrate: Calibration) -> Iterator[RowGroupErrors]:
    """Yield the errors of all rows, and of each group of :data:`GROUPINGS`."""
    for by, value, members in grouped([row for row in rows if row.counts], GROUPINGS):
        yield RowGroupErrors.of(
            (row.relative_error for row in members),
            calibrate=calibrate,
            uncalibrated_mean_ape=sum(abs(row.uncalibrated_error) for row in members) / len(members),
            by=by,
            value=value,
            interval_coverage=sum(row.inside for row in members) / len(members),
        )


class BaselineErrors(ErrorSizes, frozen=True, kw_only=True):
    """Errors of a naive baseline, which predicts each row with the median MFU of other rows of its
    accelerator and number format.
    """

    name: str
    p90_ape: Figure


def naive_baselines(rows: Sequence[EvaluatedRow]) -> Iterator[BaselineErrors]:
    """Yield the errors of two baselines. The first predicts each row from all other rows. The second predicts
    it from all rows of another source, model or accelerator (another group).

    Rows without other rows of their accelerator and number format are not included.
    """
    measured = [row for row in rows if not isnan(row.row.number_of("mfu_pct"))]
    mfu = np.array([row.row.number_of("mfu_pct") for row in measured])
    cells = np.array([f"{_cell('accelerator')(row)} {_cell('precision_class')(row)}" for row in measured])
    groups = np.array([group_of(row) for row in measured])
    for name, left_out in (
        ("constant MFU, row left out", np.arange(len(measured))),
        ("constant MFU, group left out", groups),
    ):
        errors: list[float] = []
        for index in range(len(mfu)):
            others = mfu[(cells == cells[index]) & (left_out != left_out[index])]
            if len(others):
                errors.append(float(mfu[index] / np.median(others) - 1))
        yield BaselineErrors.of(errors, name=name)


def group_of(row: EvaluatedRow) -> str:
    """Return the name of the group of a row: its source, model and accelerator. A fit leaves out all rows of
    a group together.
    """
    return " | ".join(_cell(column)(row) for column in ("source", "model", "accelerator"))


def _num_accelerators(row: EvaluatedRow) -> int:
    return int(row.row.number_of("num_accelerators"))


def _families(
    rows: Sequence[EvaluatedRow], columns: Sequence[str], member: Callable[[EvaluatedRow], _Member]
) -> Iterator[tuple[tuple[str, ...], dict[_Member, list[EvaluatedRow]]]]:
    """Yield groups of rows that can be compared, because they have equal values in ``columns``. Only rows
    with a measured and a predicted time are included. The rows of each group are returned in subgroups by
    ``member``.
    """
    comparable = [row for row in rows if row.published_ms > 0 and not isnan(row.predicted_ms)]
    for key, members in grouped_by(
        comparable, lambda row: tuple(_cell(column)(row) for column in columns)
    ).items():
        yield key, grouped_by(members, member)


def _published(row: EvaluatedRow) -> float:
    return row.published_ms


def _predicted(row: EvaluatedRow) -> float:
    return row.predicted_ms


class LayoutRanking(msgspec.Struct, frozen=True, kw_only=True):
    """Ranking of the layouts and number formats of one model on one number of accelerators.

    ``best_in_top_two`` is True if the layout with the best published time is among the two layouts with the
    best predicted times. ``chosen_excess`` is the published time of the layout with the best predicted time,
    relative to the best published time, less one. ``tau`` is Kendall's tau of both orders (NaN if all times
    are equal). Rows that differ only in software count as one layout, because their predictions are equal.
    """

    calibrate: Calibration
    source: str
    model: str
    accelerator: str
    num_accelerators: str
    layouts: Count
    best_in_top_two: bool
    chosen_excess: Figure
    tau: Figure


def rank_layouts(rows: Sequence[EvaluatedRow], calibrate: Calibration) -> Iterator[LayoutRanking]:
    """Yield the ranking of each set of at least two layouts, by the time per sequence (the median of the rows
    of a layout).
    """
    for key, layouts in _families(
        rows, _LAYOUT_KEYS, lambda row: (row.row.predicted.layout, row.row.cells.get("precision", ""))
    ):
        if len(layouts) < 2:
            continue
        published, predicted = (
            [
                median(time_of(row) / row.row.number_of("global_batch") for row in members)
                for members in layouts.values()
            ]
            for time_of in (_published, _predicted)
        )
        best = min(range(len(published)), key=published.__getitem__)
        order = sorted(range(len(predicted)), key=predicted.__getitem__)
        yield LayoutRanking(
            calibrate=calibrate,
            source=key[0],
            model=key[1],
            accelerator=key[2],
            num_accelerators=key[3],
            layouts=len(layouts),
            best_in_top_two=best in order[:2],
            chosen_excess=published[order[0]] / published[best] - 1,
            tau=kendall_tau(np.array(predicted), np.array(published)),
        )


class ScalingPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Scaling efficiency of a model on ``num_accelerators`` accelerators, published and predicted. It is the
    throughput per accelerator, relative to the smallest published number of accelerators (``base``).
    """

    calibrate: Calibration
    source: str
    model: str
    accelerator: str
    precision: str
    base: Count
    num_accelerators: Count
    published_efficiency: Figure
    predicted_efficiency: Figure
    relative_error: Figure


def scaling_points(rows: Sequence[EvaluatedRow], calibrate: Calibration) -> Iterator[ScalingPoint]:
    """Yield the scaling efficiency of every model that was published for several numbers of one accelerator.
    Figures are medians of the rows with each number.

    The error is the error of the step time. Predictions are first multiplied by one factor, fitted on the
    smallest number of accelerators.
    """
    for key, points in _families(rows, _SCALING_KEYS, _num_accelerators):
        base = min(points)
        for count, members in sorted(points.items()):
            if count == base:
                continue
            published, predicted = (
                median(_rates(members, time_of)) / median(_rates(points[base], time_of))
                for time_of in (_published, _predicted)
            )
            yield ScalingPoint(
                calibrate=calibrate,
                source=key[0],
                model=key[1],
                accelerator=key[2],
                precision=key[3],
                base=base,
                num_accelerators=count,
                published_efficiency=published,
                predicted_efficiency=predicted,
                relative_error=published / predicted - 1,
            )


class AcceleratorSpeedup(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput of one ``accelerator`` relative to another accelerator, ``base``, for the same model, number
    format and sequence length. The compared numbers of accelerators are the nearest published ones (a ratio
    of at most 2).

    ``right_side`` is True if the prediction has the same faster accelerator, or both speed-ups are within the
    noise floor.
    """

    calibrate: Calibration
    source: str
    model: str
    precision: str
    base: str
    base_accelerators: Count
    accelerator: str
    num_accelerators: Count
    published: Figure
    predicted: Figure
    right_side: bool
    relative_error: Figure


def speedups(rows: Sequence[EvaluatedRow], calibrate: Calibration) -> Iterator[AcceleratorSpeedup]:
    """Yield the speed-up for every two accelerators on which a source published the same model.

    For each number of accelerators the best throughput is used, because each accelerator should be compared
    with its best layout.
    """
    for key, points in _families(
        rows, _SPEEDUP_KEYS, lambda row: (_cell("accelerator")(row), _num_accelerators(row))
    ):
        for base, other in combinations(sorted({name for name, _ in points}), 2):
            pairs = product(*([point for point in points if point[0] == name] for name in (base, other)))
            ratio, first, second = min(
                (max(one[1], two[1]) / min(one[1], two[1]), one, two) for one, two in pairs
            )
            if ratio > _MAX_COUNT_RATIO:
                continue
            published, predicted = (
                max(_rates(points[second], time_of)) / max(_rates(points[first], time_of))
                for time_of in (_published, _predicted)
            )
            yield AcceleratorSpeedup(
                calibrate=calibrate,
                source=key[0],
                model=key[1],
                precision=key[2],
                base=base,
                base_accelerators=first[1],
                accelerator=other,
                num_accelerators=second[1],
                published=published,
                predicted=predicted,
                right_side=(published - 1) * (predicted - 1) > 0
                or max(abs(published - 1), abs(predicted - 1)) < NOISE_FLOOR,
                relative_error=predicted / published - 1,
            )


def _rates(rows: Sequence[EvaluatedRow], time_of: Callable[[EvaluatedRow], float]) -> Iterator[float]:
    """Yield the tokens per second and accelerator of each row, computed with the step time that ``time_of``
    returns.
    """
    for row in rows:
        sequences, accelerators = row.row.number_of("global_batch"), row.row.number_of("num_accelerators")
        yield sequences * row.row.number_of("seq_len") / time_of(row) / accelerators
