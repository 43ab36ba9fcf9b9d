"""What is compared: one row per matched group, with what was measured and what each estimator says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hespas.graph import OpGraph, Profile
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import InvariantError
from hespas.graph.passes.merge import merge_nodes
from hespas.validators.matching import Matching

__all__ = [
    "Cases",
    "Measured",
    "Prediction",
    "case_labels",
    "grouped_graph",
    "measured_groups",
    "shared_shapes",
]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prediction:
    """What one estimator says of each case [ns]; NaN where it does not cover one, or gives no interval."""

    estimator: str
    duration_ns: FloatArray
    low_ns: FloatArray
    high_ns: FloatArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Cases:
    """Columns of shape ``(cases,)``. ``shape`` numbers equal work: the rows of ``shapes`` name it.

    ``measured_ns`` is the median over ``repeats`` runs and ``spread_ns`` their mean distance from it (NaN for
    one run).
    """

    source: str
    workload: str
    hardware: str
    labels: tuple[str, ...]
    shapes: tuple[str, ...]
    shape: IntArray
    op_class: NDArray[np.int8]
    measured_ns: FloatArray
    spread_ns: FloatArray
    repeats: IntArray
    flops: FloatArray
    bytes_moved: FloatArray
    predictions: tuple[Prediction, ...] = ()

    def __post_init__(self) -> None:
        """Check that all columns have one row per case."""
        columns = (self.shape, self.op_class, self.measured_ns, self.spread_ns, self.repeats, self.flops)
        if any(len(column) != len(self.labels) for column in (*columns, self.bytes_moved)):
            raise InvariantError("Cases: columns differ in length")
        if any(len(each.duration_ns) != len(self.labels) for each in self.predictions):
            raise InvariantError("Cases: a prediction does not have one row per case")

    def __len__(self) -> int:
        return len(self.labels)

    def with_predictions(self, predictions: Sequence[Prediction]) -> Cases:
        """The same cases with more said of them."""
        return replace(self, predictions=(*self.predictions, *predictions))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Measured:
    """Times of groups; columns of shape ``(measured groups,)``. ``group`` is the group's number."""

    group: IntArray
    measured_ns: FloatArray
    spread_ns: FloatArray
    repeats: IntArray


def grouped_graph(graph: OpGraph, node_group: IntArray, num_groups: int) -> OpGraph:
    """A graph whose node ``g`` is group ``g``: FLOPs add up, and tensors that stay inside move no bytes.

    What was measured as one is estimated as one. Nodes in no group are left out. The node that lends a group
    its name is the one with most work.
    """
    work = np.nan_to_num(graph.flops) * 4 + np.nan_to_num(graph.bytes_moved)
    order = np.argsort(work, kind="stable")
    group = np.where(node_group >= 0, node_group, num_groups)
    has_rest = bool((node_group < 0).any())
    roots = np.full(num_groups + has_rest, -1, np.int64)
    roots[group[order]] = order
    if (roots < 0).any():
        raise InvariantError("a group without nodes cannot be estimated")
    return merge_nodes(graph, group, roots, "fusion", keeps_traffic=False)


def measured_groups(profile: Profile, matching: Matching) -> Measured:
    """The time of each group: added up within a run of a rank (or the union where events of one overlap on
    several streams), then the median over runs; ranks are runs of the same work. O(events log events).
    """
    chosen = np.flatnonzero(matching.event_group >= 0)
    group = matching.event_group[chosen]
    run = profile.run[chosen].astype(np.int64) + 1
    part = profile.rank[chosen].astype(np.int64) * (int(run.max(initial=0)) + 1) + run
    keys, place = np.unique(np.stack((group, part)), axis=1, return_inverse=True)
    times = _run_times(profile, chosen, place.reshape(-1), keys.shape[1])
    return _over_runs(keys[0], times)


def _run_times(profile: Profile, chosen: IntArray, place: IntArray, count: int) -> FloatArray:
    """The time of each (group, run) [ns]."""
    duration = profile.duration_ns[chosen]
    total = np.bincount(place, duration, count).astype(np.float64)
    stream = profile.stream[chosen]
    order = np.lexsort((profile.start_ns[chosen], place))
    same = place[order][1:] == place[order][:-1]
    end = (profile.start_ns[chosen] + duration)[order]
    overlaps = (
        same & (end[:-1] > profile.start_ns[chosen][order][1:]) & (stream[order][1:] != stream[order][:-1])
    )
    for number in np.unique(place[order][1:][overlaps]).tolist():
        rows = chosen[place == number]
        total[number] = _union(profile.start_ns[rows], profile.start_ns[rows] + profile.duration_ns[rows])
    return total


def _union(start: FloatArray, end: FloatArray) -> float:
    """The length of what some intervals cover."""
    order = np.argsort(start, kind="stable")
    reached = np.maximum.accumulate(end[order])
    before = np.concatenate(([-np.inf], reached[:-1]))
    covered = reached - np.maximum(start[order], before)
    return float(np.maximum(covered, 0.0).sum())


def _over_runs(group: IntArray, times: FloatArray) -> Measured:
    order = np.lexsort((times, group))
    ordered, counts_at = group[order], times[order]
    distinct, first, counts = np.unique(ordered, return_index=True, return_counts=True)
    low = counts_at[first + (counts - 1) // 2]
    high = counts_at[first + counts // 2]
    place = np.repeat(np.arange(len(distinct)), counts)
    median = (low + high) / 2
    away = np.bincount(place, np.abs(counts_at - median[place]), len(distinct)) / counts
    return Measured(
        group=distinct,
        measured_ns=median,
        spread_ns=np.where(counts > 1, away, np.nan),
        repeats=counts.astype(np.int64),
    )


def case_labels(graph: OpGraph, nodes: IntArray) -> tuple[tuple[str, ...], tuple[str, ...], IntArray]:
    """Names of nodes, and what work they are: distinct texts ``op(types) -> types`` and each node's row."""
    strings, types = graph.strings, graph.types
    texts = [_type_text(graph, row) for row in range(len(types))]
    operands: list[list[int]] = graph.operands.to_lists()
    results: list[list[int]] = graph.results.to_lists()
    labels: list[str] = []
    rows: dict[str, int] = {}
    shape: list[int] = []
    numbers: list[int] = nodes.tolist()
    for node in numbers:
        taken = ", ".join(texts[row] for row in operands[node])
        made = ", ".join(texts[row] for row in results[node])
        name = strings[int(graph.op_row[node])]
        labels.append(name if "::" in name else graph.node_name(node) or name)
        work = f"{float(graph.flops[node]):g}/{float(graph.bytes_moved[node]):g}"
        text = f"{name}({taken}) -> {made}" if taken or made else f"{name} {work}"
        if name == "fusion":
            text += f" {work}"
        shape.append(rows.setdefault(text, len(rows)))
    return tuple(labels), tuple(rows), np.array(shape, np.int64)


def _type_text(graph: OpGraph, row: int) -> str:
    element = graph.types.dtype_of(row)
    extents = "x".join("?" if extent < 0 else str(extent) for extent in graph.types.shape(row))
    name = "?" if element is None else element.name
    return f"{extents}x{name}" if extents else name


def shared_shapes(cases: Sequence[Cases]) -> IntArray:
    """Shape numbers of several sources, one after the other, the same number for the same text."""
    rows: dict[str, int] = {}
    parts = [
        np.array([rows.setdefault(text, len(rows)) for text in each.shapes], np.int64)[each.shape]
        for each in cases
        if len(each)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
