"""How a step's predicted time comes from the measured one, and what ran when: measured and simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hespas.graph import ABSENT, Profile, Timeline, Workload
from hespas.graph.columns import FloatArray, IntArray
from hespas.validators.accuracy.cases import Cases
from hespas.validators.accuracy.report.figures import Column, figures
from hespas.validators.accuracy.report.names import Names
from hespas.validators.accuracy.result import Accuracy, Contribution

__all__ = ["Lanes", "Part", "Waterfall", "measured_lanes", "simulated_lanes", "waterfalls_of"]

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
            found = _waterfall(cases, name, rows, names)
            if found is not None:
                measured, uncovered, rest, predicted, parts = found
                yield Waterfall(
                    source=at,
                    estimator=number,
                    measured_ns=measured,
                    uncovered_ns=uncovered,
                    rest_ns=rest,
                    predicted_ns=predicted,
                    parts=parts,
                )


def _waterfall(
    cases: Cases, estimator: str, rows: Sequence[Contribution], names: Names
) -> tuple[float, float, float, float, tuple[Part, ...]] | None:
    said = next((each.duration_ns for each in cases.predictions if each.estimator == estimator), None)
    if said is None or not len(cases):
        return None
    known = ~np.isnan(said)
    measured, predicted = float(cases.measured_ns.sum()), float(said[known].sum())
    uncovered = float(cases.measured_ns[~known].sum())
    parts = tuple(
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
    listed = sum(part.predicted_ns - part.measured_ns for part in parts)
    return measured, uncovered, predicted - (measured - uncovered) - listed, predicted, parts


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
