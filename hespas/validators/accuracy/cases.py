"""Cases of a comparison. A case is one matched group of events and nodes, with its measured time and its
predictions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from math import isnan, nan
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hespas.converters.measured_ops.steps import RecordedSteps
from hespas.estimators.interface import CasePrediction
from hespas.fitting.statistics import medians_of
from hespas.graph import DTYPES, OpClass, OpGraph, OptionalEventColumns, Profile, Workload
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray
from hespas.graph.errors import InvariantError
from hespas.graph.passes.merge import merge_nodes
from hespas.validators.accuracy.coverage import Coverage, InstructionJoin, Matching

__all__ = [
    "CLASS_NAMES",
    "LEAST_NS",
    "CaseMembers",
    "CaseSource",
    "Cases",
    "GroupTimes",
    "IndexedTexts",
    "case_dtypes",
    "case_labels",
    "cases_of",
    "covered_ns",
    "events_of",
    "grouped_graph",
    "leading_nodes",
    "measured_groups",
    "shared_shapes",
    "text_numbers",
]


CLASS_NAMES: tuple[str, ...] = tuple(op_class.name.lower() for op_class in OpClass)
"""Names of the classes of a program's operations, by code."""

_TEXTS_PER_BLOCK = 1 << 16
_EVENT_COLUMNS = (*OptionalEventColumns.__annotations__, "start_ns", "duration_ns")

LEAST_NS = 1e-6
"""Least measured time: no clock resolves femtoseconds, and errors relative to less overflow."""


@dataclass(frozen=True, slots=True)
class CaseMembers:
    """Members of one case (a measured time that is compared with an estimate): the compiled instructions, the
    program operations that the instructions carry out, and the number of measured events.
    """

    instructions: tuple[str, ...]
    operations: tuple[str, ...]
    events: int


class IndexedTexts(Protocol):
    """Protocol of a list of texts that need not be in memory: texts of large tables are made on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> str: ...

    def __iter__(self) -> Iterator[str]: ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Cases:
    """Cases of one source as columns of shape ``(cases,)``. A case is a measured time that is compared with
    estimates. Cases with the same ``shape`` number do equal work; the number is an index in ``shapes``, the
    descriptions of the work.

    * ``measured_ns`` is the median over ``repeats`` runs. ``spread_ns`` is the mean distance of the runs from
      the median (NaN for one run). ``mean_ns`` is the mean over the runs (None: equal to ``measured_ns``);
      means add up to the time of a run.
    * ``inside_ns`` is the device time of all events that the cases represent (NaN: the sum of
      ``measured_ns``). ``outside_ns`` is the device time of the events that match no case.
    * ``members`` lists the instructions and operations of each case (empty: each case is one operation).
    * ``op_class`` is an index in ``classes``, which all cases of one comparison share. ``families`` has a
      name per class, under which several classes are also summarised (empty: none).
    * ``useful_flops`` exclude multiplications by zero (None: equal to ``flops``). ``dtypes`` is the element
      type in which each case computes (empty: unknown).
    * ``steps`` is the number of steps that all cases together cover (NaN: unknown). A recording without its
      program covers all its steps.
    """

    source: str
    workload: str
    hardware: str
    labels: IndexedTexts
    shapes: IndexedTexts
    shape: IntArray
    op_class: NDArray[np.int8] | SmallIntArray
    measured_ns: FloatArray
    spread_ns: FloatArray
    repeats: IntArray | NDArray[np.int8]
    flops: FloatArray
    bytes_moved: FloatArray
    predictions: tuple[CasePrediction, ...] = ()
    classes: tuple[str, ...] = CLASS_NAMES
    families: tuple[str, ...] = ()
    mean_ns: FloatArray | None = None
    inside_ns: float = nan
    outside_ns: float = 0.0
    members: tuple[CaseMembers, ...] = ()
    useful_flops: FloatArray | None = None
    dtypes: tuple[str, ...] = ()
    steps: float = nan

    def __post_init__(self) -> None:
        """Check that all columns have one row per case."""
        columns = (self.shape, self.op_class, self.measured_ns, self.spread_ns, self.repeats, self.flops)
        if any(len(column) != len(self.labels) for column in (*columns, self.bytes_moved)):
            raise InvariantError("Cases: columns differ in length")
        if any(len(prediction.duration_ns) != len(self.labels) for prediction in self.predictions):
            raise InvariantError("Cases: a prediction does not have one row per case")
        if any(len(column) not in (0, len(self.labels)) for column in (self.members, self.dtypes)):
            raise InvariantError("Cases: members or element types do not have one row per case")
        if self.useful_flops is not None and len(self.useful_flops) != len(self.labels):
            raise InvariantError("Cases: useful FLOPs do not have one row per case")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def share(self) -> float:
        """Return the share of the device time that the cases represent, 0..1; 1 if no time was measured."""
        inside = float(self.weights_ns.sum())
        total = inside + self.outside_ns
        return inside / total if total else 1.0

    @property
    def weights_ns(self) -> FloatArray:
        """Return the device time of all events that each case represents, summed over its runs [ns]."""
        measured = np.where(self.measured_ns > 0, self.measured_ns, 0.0)
        total = float(measured.sum())
        return measured if isnan(self.inside_ns) or not total else measured * (self.inside_ns / total)

    def prediction(self, estimator: str) -> CasePrediction | None:
        """Return the predictions of one estimator; None if it was not evaluated."""
        return next((row for row in self.predictions if row.estimator == estimator), None)

    def predicted_ns(self, estimator: str) -> FloatArray:
        """Return the times that one estimator predicts; NaN where it predicts none."""
        found = self.prediction(estimator)
        return np.full(len(self), nan) if found is None else found.duration_ns

    def with_predictions(self, predictions: Sequence[CasePrediction]) -> Cases:
        """Return the same cases with more predictions."""
        return replace(self, predictions=(*self.predictions, *predictions))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CaseSource:
    """Cases of one program in one profile. ``node`` is the node of each case in ``graph``, which has one node
    per case. A step runs each case ``times`` times.

    * ``program`` is the program to simulate end to end. It is None for a trace of operations, and for further
      rank classes of a program that another source has. ``profile`` has its events on all ranks.
    * A graph that carries measured times has no ``profile``. ``recorded`` then has the times of its steps,
      if known.
    * ``joins`` lists the operations that each instruction carries out. ``num_ranks`` is the size of the job
      (-1: unknown).
    """

    profile: Profile | None
    graph: OpGraph
    node: IntArray
    times: FloatArray
    cases: Cases
    coverage: Coverage | None
    program: Workload | None
    joins: tuple[InstructionJoin, ...] = ()
    num_ranks: int = -1
    recorded: RecordedSteps | None = None


def events_of(profile: Profile, rows: IntArray, name: str) -> Profile:
    """Return a profile with only the events ``rows``, without their communication."""
    columns = {column: getattr(profile, column)[rows] for column in _EVENT_COLUMNS}
    return replace(profile, name=name, comms=type(profile.comms).empty(), **columns)


def cases_of(graph: OpGraph, node: IntArray, times: FloatArray, names: tuple[str, str, str]) -> Cases:
    """Return a case (measured time to compare) for each node with a measured time. A case covers all
    executions of the node in a step; ``times`` is their number. ``names`` are source, workload and hardware.
    """
    labels, shapes, shape = case_labels(graph, node, times)
    return Cases(
        source=names[0],
        workload=names[1],
        hardware=names[2],
        labels=labels,
        shapes=shapes,
        shape=shape,
        op_class=graph.op_class[node].astype(np.int8),
        measured_ns=graph.duration_ns[node] * times,
        spread_ns=np.full(len(node), np.nan),
        repeats=np.ones(len(node), np.int64),
        flops=graph.flops[node] * times,
        bytes_moved=graph.bytes_moved[node] * times,
        useful_flops=graph.useful_flops[node] * times,
        dtypes=case_dtypes(graph, node),
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GroupTimes:
    """Measured times of matched groups of events, as columns of shape ``(measured groups,)``. ``group`` is
    the number of the group, ``measured_ns`` the median over its runs, ``mean_ns`` their mean.
    """

    group: IntArray
    measured_ns: FloatArray
    mean_ns: FloatArray
    spread_ns: FloatArray
    repeats: IntArray


def leading_nodes(graph: OpGraph, node_group: IntArray, num_groups: int) -> IntArray:
    """Return for each group the node with the most work, shape ``(groups,)``. Work is the sum of bytes and
    4 x FLOPs: one FLOP counts as much as four bytes.

    The group has the name and the class of that node. Raises ``InvariantError`` for a group without nodes.
    """
    work = np.nan_to_num(graph.flops) * 4 + np.nan_to_num(graph.bytes_moved)
    order = np.argsort(work, kind="stable")
    order = order[node_group[order] >= 0]
    leading = np.full(num_groups, -1, np.int64)
    leading[node_group[order]] = order
    if (leading < 0).any():
        raise InvariantError("a group without nodes cannot be estimated")
    return leading


def grouped_graph(graph: OpGraph, node_group: IntArray, num_groups: int) -> OpGraph:
    """Return a graph with one node per group, so that an estimator gives one time per measured time.

    FLOPs and communicated bytes of a group are added; tensors inside a group cause no memory traffic. All
    nodes without a group are merged into the last node.
    """
    leading = leading_nodes(graph, node_group, num_groups)
    rest = np.flatnonzero(node_group < 0)[:1]
    group = np.where(node_group >= 0, node_group, num_groups)
    merged = merge_nodes(graph, group, np.concatenate((leading, rest)), "fusion", keeps_traffic=False)
    collectives, p2p = graph.collectives, graph.p2p
    if not len(collectives) and not len(p2p):
        return merged

    def group_sums(column: FloatArray, node: SmallIntArray, into: SmallIntArray) -> FloatArray:
        return np.bincount(group[node], column, len(merged))[into].astype(np.float64)

    source, target = collectives.node, merged.collectives.node
    return replace(
        merged,
        collectives=replace(
            merged.collectives,
            comm_bytes=group_sums(collectives.comm_bytes, source, target),
            operand_bytes=group_sums(collectives.operand_bytes, source, target),
            result_bytes=group_sums(collectives.result_bytes, source, target),
        ),
        p2p=replace(merged.p2p, comm_bytes=group_sums(p2p.comm_bytes, p2p.node, merged.p2p.node)),
    )


def measured_groups(profile: Profile, matching: Matching) -> GroupTimes:
    """Return the measured time of each group: the sum of its events in a run of a rank, then the median over
    ranks and runs.

    If events of a run overlap on several streams, the union of their intervals is measured instead of the
    sum. Events outside of runs are from a run that the recording cut off. They are used only for groups
    without events in a run. A run with an event of negative or unknown duration is ignored if the group has
    other runs; otherwise only that event is ignored. O(events log events).
    """
    chosen = np.flatnonzero(matching.event_group >= 0)
    in_run = np.zeros(len(matching), np.bool_)
    in_run[matching.event_group[chosen[profile.run[chosen] >= 0]]] = True
    chosen = chosen[(profile.run[chosen] >= 0) | ~in_run[matching.event_group[chosen]]]
    rank_and_run = (
        profile.rank[chosen].astype(np.int64) << 32 | profile.run[chosen].astype(np.int64) & 0xFFFFFFFF
    )
    runs, run = np.unique(rank_and_run, return_inverse=True)
    group = matching.event_group[chosen]
    group_run = group * len(runs) + run
    has_time = profile.duration_ns[chosen] >= 0
    if not has_time.all():
        whole = ~np.isin(group_run, group_run[~has_time])
        has_time &= whole | ~np.isin(group, group[whole])
        chosen, group_run = chosen[has_time], group_run[has_time]
    keys, index = np.unique(group_run, return_inverse=True)
    count = len(keys)
    order = np.lexsort((profile.start_ns[chosen], index))
    duration, start = profile.duration_ns[chosen][order], profile.start_ns[chosen][order]
    stream = profile.stream[chosen][order]
    total = np.bincount(index, profile.duration_ns[chosen], count)
    ordered = index[order]
    bounds = np.searchsorted(ordered, np.arange(count + 1))
    on_other_stream = (ordered[1:] == ordered[:-1]) & (stream[1:] != stream[:-1])
    for number in np.unique(ordered[1:][on_other_stream]).tolist():
        rows = slice(int(bounds[number]), int(bounds[number + 1]))
        total[number] = min(float(total[number]), covered_ns(start[rows], start[rows] + duration[rows]))
    times = total.astype(np.float64)
    group = keys // max(len(runs), 1)
    order = np.lexsort((times, group))
    group, times = group[order], times[order]
    distinct, index, counts = np.unique(group, return_inverse=True, return_counts=True)
    median, spread = medians_of(times, index)
    return GroupTimes(
        group=distinct,
        measured_ns=median,
        mean_ns=np.bincount(index, times, len(distinct)) / counts,
        spread_ns=spread,
        repeats=counts.astype(np.int64),
    )


def covered_ns(start: FloatArray, end: FloatArray) -> float:
    """Return the length of the union of intervals that are ordered by ``start`` [ns]."""
    reached = np.maximum.accumulate(end)
    before = np.concatenate(([-np.inf], reached[:-1]))
    return float(np.maximum(reached - np.maximum(start, before), 0.0).sum())


def case_labels(
    graph: OpGraph, nodes: IntArray, times: FloatArray
) -> tuple[tuple[str, ...], tuple[str, ...], IntArray]:
    """Return the names of ``nodes``, the distinct descriptions of their work, and the index of each node's
    description.

    A description is ``op(types) -> types``. If a step does the work several times, the description also has
    the number of ``times``.
    """
    strings, types = graph.strings, graph.types
    texts: list[str] = []
    for row in range(len(types)):
        element = types.dtype_of(row)
        extents = "x".join("?" if extent < 0 else str(extent) for extent in types.shape(row))
        element_name = "?" if element is None else element.name
        texts.append(f"{extents}x{element_name}" if extents else element_name)
    operands: list[list[int]] = graph.operands.to_lists()
    results: list[list[int]] = graph.results.to_lists()
    labels: list[str] = []
    rows: dict[str, int] = {}
    shape: list[int] = []
    numbers: list[int] = nodes.tolist()
    columns = np.stack((graph.flops[nodes], graph.bytes_moved[nodes], times), axis=1)
    figures: list[tuple[float, float, float]] = columns.tolist()
    for node, (flops, moved, count) in zip(numbers, figures, strict=True):
        taken = ", ".join(texts[row] for row in operands[node])
        made = ", ".join(texts[row] for row in results[node])
        name = strings[int(graph.op_id[node])]
        labels.append(name if "::" in name else graph.node_name(node) or name)
        work = f"{flops:g}/{moved:g}"
        text = f"{name}({taken}) -> {made}" if taken or made else f"{name} {work}"
        if name == "fusion" and (taken or made):
            text += f" {work}"
        if count != 1:
            text += f" x {count:g}"
        shape.append(rows.setdefault(text, len(rows)))
    return tuple(labels), tuple(rows), np.array(shape, np.int64)


def case_dtypes(graph: OpGraph, nodes: IntArray) -> tuple[str, ...]:
    """Return the element type in which each node computes. If it is unknown, return the first known type of
    the operands, then of the results.

    The text is empty if no type is known.
    """
    rates: list[int] = graph.rate_dtype[nodes].tolist()
    operands: list[list[int]] = graph.operands.take(nodes).to_lists()
    results: list[list[int]] = graph.results.take(nodes).to_lists()
    dtypes: list[str] = []
    for rate, taken, made in zip(rates, operands, results, strict=True):
        names = (element.name for row in (*taken, *made) if (element := graph.types.dtype_of(row)))
        dtypes.append(DTYPES[rate].name if rate >= 0 else next(names, ""))
    return tuple(dtypes)


def shared_shapes(cases: Sequence[Cases]) -> IntArray:
    """Return the shape numbers of several sources, concatenated. Equal descriptions have equal numbers."""
    several = [source for source in cases if len(source)]
    if not several:
        return np.empty(0, np.int64)
    if len(several) == 1:  # its texts are all different
        return several[0].shape
    numbers = text_numbers([source.shapes for source in several])
    return np.concatenate([number[source.shape] for number, source in zip(numbers, several, strict=True)])


def text_numbers(parts: Sequence[IndexedTexts]) -> list[IntArray]:
    """Return one column of integers per list of texts. Equal texts get equal integers across all lists (at
    least one), in order of first appearance.

    Texts are compared by a digest of 16 bytes, so that millions of texts need not be in memory.
    """
    digest_columns: list[NDArray[np.uint64]] = []
    for texts in parts:
        column = np.empty((len(texts), 2), np.uint64)
        remaining = iter(texts)
        for start in range(0, len(texts), _TEXTS_PER_BLOCK):
            digest = b"".join(
                blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
                for text in islice(remaining, _TEXTS_PER_BLOCK)
            )
            column[start : start + _TEXTS_PER_BLOCK] = np.frombuffer(digest, np.uint64).reshape(-1, 2)
        digest_columns.append(column)
    digests = np.concatenate(digest_columns)
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: equal ones stay in order of appearance
    ordered = digests[order]
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first = order[is_new]
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    number = np.empty(len(order), np.int64)
    number[order] = rank[np.cumsum(is_new) - 1]
    return np.split(number, np.cumsum([len(texts) for texts in parts])[:-1])
