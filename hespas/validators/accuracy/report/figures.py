"""Names that a page shows, each stored once, together within a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, nan

import numpy as np
from numpy.typing import NDArray

from hespas.graph import ABSENT, Profile, Timeline, Workload
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray
from hespas.validators.accuracy.cases import Cases
from hespas.validators.accuracy.report.texts import shown
from hespas.validators.accuracy.result import Accuracy, Contribution
from hespas.validators.accuracy.statistics import relative_error

__all__ = [
    "MOST_POINTS",
    "Column",
    "Curve",
    "Lanes",
    "Names",
    "Part",
    "Points",
    "ShapeRows",
    "Waterfall",
    "class_names",
    "curves_of",
    "figures",
    "measured_lanes",
    "points_of",
    "shape_rows_of",
    "simulated_lanes",
    "waterfalls_of",
]

_LIMITS = (400, 240, 160, 100, 60, 30)
_MOST_BYTES = 1_600_000


class Names:
    """Hands out a row per distinct name; :meth:`texts` are the names as they are shown."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}

    def row(self, name: str) -> int:
        """The row of a name, a new one for a new name."""
        return self._rows.setdefault(name, len(self._rows))

    def texts(self, most_bytes: int = _MOST_BYTES) -> list[str]:
        """The names, visible and cut as little as keeps all of them within ``most_bytes`` of JSON (the last
        limit holds whatever that makes).
        """
        texts: list[str] = []
        for limit in _LIMITS:
            texts = [shown(name, limit) for name in self._rows]
            if sum(map(_json_bytes, texts)) <= most_bytes:
                break
        return texts


def _json_bytes(text: str) -> int:
    """Bytes of a text in the JSON of a page, where ``<``, ``>`` and ``&`` take six each."""
    escaped = 5 * sum(map(text.count, "<>&")) + sum(map(text.count, '"\\'))
    return len(text.encode("utf-8", "replace")) + escaped + 3


MOST_POINTS = 5_000
"""Cases shown as points, and rows of the table."""

_QUANTILES = 60
_ALWAYS = MOST_POINTS // 5

Column = list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Cases, thinned to :data:`MOST_POINTS` of ``of``; ``predicted`` has one column per estimator."""

    of: int
    source: list[int]
    op_class: list[int]
    label: list[int]
    shape: list[int]
    measured_ns: Column
    flops: Column
    bytes_moved: Column
    predicted_ns: list[Column]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeRows:
    """Cases of one source and shape as one row, the longest of ``of``; times are means of ``count`` cases."""

    of: int
    source: list[int]
    op_class: list[int]
    label: list[int]
    shape: list[int]
    count: list[int]
    measured_ns: Column
    share: Column
    predicted_ns: list[Column]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Quantiles of the absolute relative error, evenly spaced from the least to the largest of ``n``."""

    hardware: str
    estimator: int
    op_class: int
    n: int
    quantiles: Column


def figures(values: FloatArray) -> Column:
    """Numbers with five digits; None where unknown or infinite."""
    numbers: list[float] = values.tolist()
    return [float(f"{value:.5g}") if isfinite(value) else None for value in numbers]


def _predicted_ns(cases: Cases, estimator: str) -> FloatArray:
    prediction = cases.prediction(estimator)
    return np.full(len(cases), nan) if prediction is None else prediction.duration_ns


def points_of(done: Accuracy, estimators: Sequence[str], names: Names) -> Points:
    """The cases as points. O(cases log cases).

    Where there are too many, those that miss most time are kept, and of the rest an even choice over source,
    class and measured time: the same in every run.
    """
    source = np.repeat(np.arange(len(done.cases)), [len(each) for each in done.cases])
    row = np.concatenate([np.arange(len(each)) for each in done.cases] or [np.empty(0, np.int64)])
    measured = _joined([each.measured_ns for each in done.cases])
    op_class = _joined([each.op_class for each in done.cases]).astype(np.int64)
    predicted = [_joined([_predicted_ns(each, name) for each in done.cases]) for name in estimators]
    chosen = np.arange(len(row))
    if len(row) > MOST_POINTS:
        chosen = _thinned(predicted, measured, (measured, op_class, source))
    parts: list[int] = source[chosen].tolist()
    rows: list[int] = row[chosen].tolist()
    pairs = list(zip(parts, rows, strict=True))
    return Points(
        of=len(row),
        source=parts,
        op_class=op_class[chosen].tolist(),
        label=[names.row(done.cases[part].labels[at]) for part, at in pairs],
        shape=[names.row(done.cases[part].shapes[int(done.cases[part].shape[at])]) for part, at in pairs],
        measured_ns=figures(measured[chosen]),
        flops=figures(_joined([each.flops for each in done.cases])[chosen]),
        bytes_moved=figures(_joined([each.bytes_moved for each in done.cases])[chosen]),
        predicted_ns=[figures(column[chosen]) for column in predicted],
    )


def _joined(columns: Sequence[FloatArray | NDArray[np.int8] | SmallIntArray]) -> FloatArray:
    return np.concatenate([np.asarray(column, np.float64) for column in columns] or [np.empty(0)])


def _thinned(
    predicted: Sequence[FloatArray], measured: FloatArray, keys: tuple[FloatArray | IntArray, ...]
) -> IntArray:
    missed = np.nan_to_num(np.abs((predicted[0] if predicted else measured) - measured))
    largest = np.argsort(-missed, kind="stable")[:_ALWAYS]
    rest = np.lexsort(keys)
    rest = rest[~np.isin(rest, largest)]
    even = rest[np.linspace(0, len(rest) - 1, MOST_POINTS - _ALWAYS).astype(np.int64)]
    return np.sort(np.concatenate((largest, even)))


def shape_rows_of(done: Accuracy, estimators: Sequence[str], names: Names) -> ShapeRows:
    """Every source's shapes, those with most measured time first. O(cases log cases)."""
    tables = [_by_shape(each, estimators) for each in done.cases]
    source = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    everything = np.concatenate(tables) if tables else np.empty((0, 6 + len(estimators)))
    order = np.argsort(-everything[:, 3], kind="stable")[:MOST_POINTS]
    rows = everything[order]
    parts: list[int] = source[order].tolist()
    first: list[int] = rows[:, 0].astype(np.int64).tolist()
    shape: list[int] = rows[:, 1].astype(np.int64).tolist()
    return ShapeRows(
        of=len(everything),
        source=parts,
        op_class=[int(done.cases[part].op_class[at]) for part, at in zip(parts, first, strict=True)],
        label=[names.row(done.cases[part].labels[at]) for part, at in zip(parts, first, strict=True)],
        shape=[names.row(done.cases[part].shapes[at]) for part, at in zip(parts, shape, strict=True)],
        count=rows[:, 2].astype(np.int64).tolist(),
        measured_ns=figures(rows[:, 4]),
        share=figures(rows[:, 5]),
        predicted_ns=[figures(rows[:, 6 + number]) for number in range(len(estimators))],
    )


def _by_shape(cases: Cases, estimators: Sequence[str]) -> FloatArray:
    """Columns: first case, shape, count, total, mean, share of the source's time, mean of each prediction."""
    shape, first, place, counts = np.unique(
        cases.shape, return_index=True, return_inverse=True, return_counts=True
    )
    total = np.bincount(place, cases.measured_ns, len(shape))
    whole = float(total.sum())
    share = total / whole if whole else total * nan
    columns = [first, shape, counts, total, total / counts, share]
    # Where one of equal cases is not covered, their mean is not known.
    columns += [np.bincount(place, _predicted_ns(cases, name), len(shape)) / counts for name in estimators]
    return np.stack([np.asarray(column, np.float64) for column in columns], axis=1)


def curves_of(done: Accuracy, estimators: Sequence[str]) -> Iterator[Curve]:
    """Error quantiles over all cases of each device: per estimator over all (class -1), then per class."""
    for hardware in dict.fromkeys(each.hardware for each in done.cases):
        group = [each for each in done.cases if each.hardware == hardware]
        measured = _joined([each.measured_ns for each in group])
        op_class = _joined([each.op_class for each in group]).astype(np.int64)
        for number, name in enumerate(estimators):
            error = np.abs(relative_error(_joined([_predicted_ns(each, name) for each in group]), measured))
            for code in (-1, *np.unique(op_class).tolist()):
                known = error[~np.isnan(error) & ((op_class == code) | (code < 0))]
                if len(known):
                    yield Curve(
                        hardware=shown(hardware),
                        estimator=number,
                        op_class=code,
                        n=len(known),
                        quantiles=figures(_quantiles(known)),
                    )


def _quantiles(errors: FloatArray) -> FloatArray:
    """All errors where they are few, else evenly spaced ranks of them."""
    ordered = np.sort(errors)
    if len(ordered) <= _QUANTILES:
        return ordered
    return ordered[np.linspace(0, len(ordered) - 1, _QUANTILES).astype(np.int64)]


def class_names(done: Accuracy) -> list[str]:
    """Names of the classes by code."""
    return [shown(name) for name in done.cases[0].classes] if done.cases else []


_MOST_SOURCES = 40
_MOST_PARTS = 20
_MOST_SPANS = 1_500
_MOST_LANES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What the cases of one shape add to the error of a source."""

    label: int
    shape: int
    op_class: str
    count: int
    predicted_ns: float
    measured_ns: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """Measured, less what nobody estimates, plus the parts and the ``rest_ns`` of all others: predicted."""

    source: int
    estimator: int
    measured_ns: float
    uncovered_ns: float
    rest_ns: float
    predicted_ns: float
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Spans of one run in lanes, times from its start: the longest of ``of``, with ``shown_share`` of the
    time. ``tone`` is 0 for what was measured, 1 for what is simulated, 2 on the critical path of that.
    """

    title: str
    names: list[str]
    of: int
    lanes_of: int
    shown_share: float
    lane: list[int]
    start_ns: Column
    duration_ns: Column
    label: list[int]
    tone: list[int]


def waterfalls_of(done: Accuracy, estimators: Sequence[str], names: Names) -> Iterator[Waterfall]:
    """One per source (those that ran longest) and estimator."""
    listed: dict[tuple[str, str, str], list[Contribution]] = {}
    for row in done.contributions:
        listed.setdefault((row.source, row.hardware, row.estimator), []).append(row)
    order = sorted(range(len(done.cases)), key=lambda at: -float(done.cases[at].measured_ns.sum()))
    for at in order[:_MOST_SOURCES]:
        cases = done.cases[at]
        for number, name in enumerate(estimators):
            rows = listed.get((cases.source, cases.hardware, name), [])[:_MOST_PARTS]
            prediction = cases.prediction(name)
            if prediction is not None and len(cases):
                yield _waterfall(at, number, cases.measured_ns, prediction.duration_ns, _parts(rows, names))


def _waterfall(
    source: int, estimator: int, measured_ns: FloatArray, predicted_ns: FloatArray, parts: tuple[Part, ...]
) -> Waterfall:
    known = ~np.isnan(predicted_ns)
    measured, predicted = float(measured_ns.sum()), float(predicted_ns[known].sum())
    uncovered = float(measured_ns[~known].sum())
    listed = sum(part.predicted_ns - part.measured_ns for part in parts)
    return Waterfall(
        source=source,
        estimator=estimator,
        measured_ns=measured,
        uncovered_ns=uncovered,
        rest_ns=predicted - (measured - uncovered) - listed,
        predicted_ns=predicted,
        parts=parts,
    )


def _parts(rows: Sequence[Contribution], names: Names) -> tuple[Part, ...]:
    return tuple(
        Part(
            label=names.row(row.label),
            shape=names.row(row.shape),
            op_class=row.op_class,
            count=row.count,
            predicted_ns=row.predicted_ns,
            measured_ns=row.measured_ns,
            share=row.share,
        )
        for row in rows
    )


def measured_lanes(profile: Profile, names: Names) -> Lanes | None:
    """The run of median length, one lane per rank and stream; None without events. O(n log n)."""
    rows = _median_run(profile)
    if not len(rows):
        return None
    start, duration = profile.start_ns[rows], np.maximum(profile.duration_ns[rows], 0.0)
    keys = np.stack((profile.rank[rows].astype(np.int64), profile.stream[rows].astype(np.int64)))
    distinct, place = np.unique(keys, axis=1, return_inverse=True)
    ranks, streams = distinct.tolist()
    several = len(set(ranks)) > 1
    titles = [
        (f"rank {rank}, " if several else "") + ("stream unknown" if stream < 0 else f"stream {stream}")
        for rank, stream in zip(ranks, streams, strict=True)
    ]
    text: list[int] = np.where(profile.op_row > 0, profile.op_row, profile.kernel_row)[rows].tolist()
    return _lanes(
        profile.name,
        titles,
        (place.reshape(-1), start - float(start.min()), duration),
        lambda row: names.row(profile.strings[text[row]] or "(unnamed)"),
        np.zeros(len(rows), np.int64),
    )


def _median_run(profile: Profile) -> IntArray:
    """Events of the run whose span is the median one; all events where no run is told."""
    inside = np.flatnonzero(profile.run >= 0)
    if not len(inside):
        return np.arange(len(profile))
    runs, place = np.unique(profile.run[inside], return_inverse=True)
    first, last = np.full(len(runs), np.inf), np.full(len(runs), -np.inf)
    np.minimum.at(first, place, profile.start_ns[inside])
    np.maximum.at(last, place, (profile.start_ns + np.maximum(profile.duration_ns, 0.0))[inside])
    middle = np.argsort(last - first, kind="stable")[(len(runs) - 1) // 2]
    chosen: IntArray = inside[place == middle]
    return chosen


def simulated_lanes(timeline: Timeline, program: Workload | None, names: Names) -> Lanes | None:
    """The first rank that has spans, one lane per resource; ``program`` names its nodes. None without any."""
    if not len(timeline):
        return None
    rank = int(timeline.rank.min())
    rows = np.flatnonzero(timeline.rank == rank)
    nodes: list[int] = timeline.node[rows].tolist()
    tone = np.where(timeline.critical[rows], 2, 1)
    start = timeline.start_ns[rows]
    return _lanes(
        f"simulated, rank {rank}",
        timeline.resources,
        (timeline.resource[rows].astype(np.int64), start, timeline.end_ns[rows] - start),
        lambda row: names.row(_node_text(program, rank, nodes[row])),
        tone,
    )


def _node_text(program: Workload | None, rank: int, node: int) -> str:
    if node < 0:
        return "loop trips"
    if program is None or rank >= program.num_ranks or program.rank_class[rank] == ABSENT:
        return f"node {node}"
    graph = program.graph_of(rank)
    if node >= len(graph):
        return f"node {node}"
    return graph.node_name(node) or graph.op_name(node) or f"node {node}"


def _lanes(
    title: str,
    names: Sequence[str],
    spans: tuple[IntArray, FloatArray, FloatArray],
    label: Callable[[int], int],
    tone: IntArray,
) -> Lanes:
    """The busiest lanes and their longest spans, in order of lane and start."""
    lane, start, duration = spans
    busy = np.bincount(lane, duration, len(names))
    kept = np.sort(np.argsort(-busy, kind="stable")[:_MOST_LANES])
    kept = kept[np.bincount(lane, minlength=len(names))[kept] > 0]
    inside = np.flatnonzero(np.isin(lane, kept))
    longest = inside[np.argsort(-duration[inside], kind="stable")[:_MOST_SPANS]]
    rows = longest[np.lexsort((start[longest], lane[longest]))]
    total = float(duration.sum())
    return Lanes(
        title=title,
        names=[str(names[each]) for each in kept.tolist()],
        of=len(lane),
        lanes_of=int((np.bincount(lane, minlength=len(names)) > 0).sum()),
        shown_share=float(duration[rows].sum()) / total if total else 1.0,
        lane=np.searchsorted(kept, lane[rows]).tolist(),
        start_ns=_starts(start[rows]),
        duration_ns=figures(duration[rows]),
        label=[label(row) for row in rows.tolist()],
        tone=tone[rows].tolist(),
    )


def _starts(start_ns: FloatArray) -> Column:
    """Starts to the nanosecond: five digits would let spans overlap."""
    return [float(value) for value in np.round(start_ns, 0).tolist()]
