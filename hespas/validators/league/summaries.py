"""Figures of a league: errors by what rows share, naive baselines beside them, order of layouts, scaling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import isnan
from statistics import median

import numpy as np

from hespas.graph.columns import FloatArray
from hespas.validators.accuracy.statistics import error_figures, kendall_tau
from hespas.validators.league.judged import Calibration, JudgedRow

__all__ = [
    "BY",
    "NOISE_FLOOR",
    "Baseline",
    "Group",
    "LayoutSet",
    "Scaled",
    "Speedup",
    "baselines",
    "group_of",
    "group_rows",
    "layout_sets",
    "scaling",
    "speedups",
]

NOISE_FLOOR = 0.028
"""Median difference of the step between submitters with the same layout in the same round of MLPerf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Errors of the rows that share ``value``; ``interval_coverage`` is the share whose interval holds."""

    calibrate: Calibration
    by: str
    value: str
    n: int
    mean_ape: float
    median_ape: float
    p90_ape: float
    bias: float
    interval_coverage: float


def _scale(row: JudgedRow) -> str:
    """Powers of eight accelerators: a node, a rack, a pod."""
    count = row.row.number_of("num_accelerators")
    if isnan(count):
        return "not stated"
    for most in (8, 64, 512):
        if count <= most:
            return f"up to {most}"
    return "over 512"


def _cell(column: str) -> Callable[[JudgedRow], str]:
    return lambda row: row.row.cells.get(column, "") or "not stated"


BY: dict[str, Callable[[JudgedRow], str]] = {
    "all": lambda _: "all",
    "source": _cell("source"),
    "accelerator": _cell("accelerator"),
    "model": _cell("model"),
    "scale": _scale,
    "precision": _cell("precision_class"),
    "status": lambda row: row.status,
}
"""What rows are put together by."""


def group_rows(rows: Sequence[JudgedRow], calibrate: Calibration) -> Iterator[Group]:
    """The errors of all rows, and by each of :data:`BY`."""
    counted = [row for row in rows if row.counts]
    for by, value_of in BY.items():
        parts: defaultdict[str, list[JudgedRow]] = defaultdict(list)
        for row in counted:
            parts[value_of(row)].append(row)
        for value, some in sorted(parts.items()):
            figures = error_figures(np.array([row.relative_error for row in some]))
            yield Group(
                calibrate=calibrate,
                by=by,
                value=value,
                n=len(some),
                mean_ape=figures["mape"],
                median_ape=figures["median_ape"],
                p90_ape=figures["p90_ape"],
                bias=figures["bias"],
                interval_coverage=sum(row.inside for row in some) / len(some),
            )


# --- Naive baselines


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A constant MFU per accelerator and number format: the median of the other rows."""

    name: str
    n: int
    mean_ape: float
    median_ape: float
    p90_ape: float


def baselines(rows: Sequence[JudgedRow]) -> Iterator[Baseline]:
    """Leaving out the row alone, and its source, model and accelerator; rows without a peer do not count."""
    known = [row for row in rows if not isnan(row.row.number_of("mfu_pct"))]
    rate = np.array([row.row.number_of("mfu_pct") for row in known])
    cells = np.array([f"{_cell('accelerator')(row)} {_cell('precision_class')(row)}" for row in known])
    groups = np.array([group_of(row) for row in known])
    for name, left_out in (
        ("constant MFU, row left out", np.arange(len(known))),
        ("constant MFU, group left out", groups),
    ):
        errors = np.array(list(_of_constant(rate, cells, left_out)))
        figures = error_figures(errors)
        yield Baseline(
            name=name,
            n=len(errors),
            mean_ape=figures["mape"],
            median_ape=figures["median_ape"],
            p90_ape=figures["p90_ape"],
        )


def _of_constant(
    rate: FloatArray, cells: np.ndarray[tuple[int], np.dtype[np.str_]], left_out: np.ndarray
) -> Iterator[float]:
    for place in range(len(rate)):
        peers = rate[(cells == cells[place]) & (left_out != left_out[place])]
        if len(peers):
            yield float(rate[place] / np.median(peers) - 1)


def group_of(row: JudgedRow) -> str:
    """What is left out together."""
    return " | ".join(_cell(column)(row) for column in ("source", "model", "accelerator"))


# --- What a decision needs


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSet:
    """Layouts and number formats of one model on as many of one accelerator: whether the best of those
    published is among the two predicted best, and how far the orders agree (Kendall's tau, NaN where all are
    alike). Rows that differ in software alone are one layout, for nothing that is predicted tells them apart.
    """

    calibrate: Calibration
    source: str
    model: str
    accelerator: str
    num_accelerators: str
    layouts: int
    best_in_top_two: bool
    tau: float


_SAME = ("source", "model", "accelerator", "num_accelerators", "precision_class", "seq_len", "train_type")


def layout_sets(rows: Sequence[JudgedRow], calibrate: Calibration) -> Iterator[LayoutSet]:
    """Sets of two layouts and more, by time a sequence: of one layout the median of its rows counts."""
    sets: defaultdict[tuple[str, ...], defaultdict[tuple[str, str], list[JudgedRow]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        if row.published_ms > 0 and not isnan(row.predicted_ms):
            cells = row.row.cells
            key = tuple(cells.get(name, "") for name in _SAME)
            sets[key][row.row.predicted.layout, cells.get("precision", "")].append(row)
    for key, layouts in sets.items():
        if len(layouts) < 2:
            continue
        published = _per_sequence(layouts.values(), lambda row: row.published_ms)
        predicted = _per_sequence(layouts.values(), lambda row: row.predicted_ms)
        best = min(range(len(published)), key=published.__getitem__)
        top = sorted(range(len(predicted)), key=predicted.__getitem__)[:2]
        yield LayoutSet(
            calibrate=calibrate,
            source=key[0],
            model=key[1],
            accelerator=key[2],
            num_accelerators=key[3],
            layouts=len(layouts),
            best_in_top_two=best in top,
            tau=kendall_tau(np.array(predicted), np.array(published)),
        )


def _per_sequence(layouts: Iterable[list[JudgedRow]], time_of: Callable[[JudgedRow], float]) -> list[float]:
    return [median(time_of(row) / row.row.number_of("global_batch") for row in rows) for rows in layouts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A model on ``num_accelerators`` after one factor was fitted on the fewest of its rows, ``base``: the
    throughput of an accelerator over that on the fewest, published and predicted.
    """

    calibrate: Calibration
    source: str
    model: str
    accelerator: str
    precision: str
    base: int
    num_accelerators: int
    published_efficiency: float
    predicted_efficiency: float
    relative_error: float


_SCALED = ("source", "model", "accelerator", "precision", "train_type", "seq_len")


def scaling(rows: Sequence[JudgedRow], calibrate: Calibration) -> Iterator[Scaled]:
    """Every model that was published on several numbers of one accelerator; medians of the rows of each. The
    error is that of the step on more after one factor was fitted on the fewest.
    """
    curves: defaultdict[tuple[str, ...], defaultdict[int, list[JudgedRow]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        if row.published_ms > 0 and not isnan(row.predicted_ms):
            key = tuple(_cell(column)(row) for column in _SCALED)
            curves[key][int(row.row.number_of("num_accelerators"))].append(row)
    for key, points in curves.items():
        base = min(points)
        first = [_rate(points[base], time_of) for time_of in (_published, _predicted)]
        for count, some in sorted(points.items()):
            if count == base:
                continue
            published, predicted = (
                _rate(some, time_of) / before
                for time_of, before in zip((_published, _predicted), first, strict=True)
            )
            yield Scaled(
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """Throughput of an accelerator of ``accelerator`` over that of one of ``base`` for the same model, number
    format and sequence, where counts of both are the nearest that were published: at most twice as many.
    ``right_side``: the prediction names the same one as faster, or both are within the noise floor.
    """

    calibrate: Calibration
    source: str
    model: str
    precision: str
    base: str
    base_accelerators: int
    accelerator: str
    num_accelerators: int
    published: float
    predicted: float
    right_side: bool
    relative_error: float


_COMPARED = ("source", "model", "precision_class", "train_type", "seq_len")
_FARTHEST = 2.0
"""Counts of accelerators that are farther apart are not compared: scaling would be part of it."""


def speedups(rows: Sequence[JudgedRow], calibrate: Calibration) -> Iterator[Speedup]:
    """Every two accelerators that a source published the same model on, by the best throughput of each count:
    whoever chooses hardware lays his job out well on both.
    """
    models: defaultdict[tuple[str, ...], defaultdict[tuple[str, int], list[JudgedRow]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        if row.published_ms > 0 and not isnan(row.predicted_ms):
            key = tuple(_cell(column)(row) for column in _COMPARED)
            models[key][_cell("accelerator")(row), int(row.row.number_of("num_accelerators"))].append(row)
    for key, points in models.items():
        for base, other in combinations(sorted({name for name, _ in points}), 2):
            pairs = product(*([each for each in points if each[0] == name] for name in (base, other)))
            apart, first, second = min((_apart(one, two), one, two) for one, two in pairs)
            if apart > _FARTHEST:
                continue
            published, predicted = (
                _best(points[second], time_of) / _best(points[first], time_of)
                for time_of in (_published, _predicted)
            )
            yield Speedup(
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


def _apart(one: tuple[str, int], two: tuple[str, int]) -> float:
    return max(one[1], two[1]) / min(one[1], two[1])


def _published(row: JudgedRow) -> float:
    return row.published_ms


def _predicted(row: JudgedRow) -> float:
    return row.predicted_ms


def _rate(rows: Sequence[JudgedRow], time_of: Callable[[JudgedRow], float]) -> float:
    """Tokens a second and accelerator, the median of some rows."""
    return median(_rates(rows, time_of))


def _best(rows: Sequence[JudgedRow], time_of: Callable[[JudgedRow], float]) -> float:
    """The same of the row that is the fastest by that time."""
    return max(_rates(rows, time_of))


def _rates(rows: Sequence[JudgedRow], time_of: Callable[[JudgedRow], float]) -> Iterator[float]:
    for row in rows:
        sequences, accelerators = row.row.number_of("global_batch"), row.row.number_of("num_accelerators")
        yield sequences * row.row.number_of("seq_len") / time_of(row) / accelerators
