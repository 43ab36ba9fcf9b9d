"""What is compared: one row per matched group, with what was measured and what each estimator says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from math import isnan, nan
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from hespas.graph import DTYPES, OpClass, OpGraph, Profile
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray
from hespas.graph.errors import InvariantError
from hespas.graph.passes.fuse import merge_nodes
from hespas.validators.accuracy.statistics import medians_of

if TYPE_CHECKING:
    from hespas.validators.accuracy.coverage import Matching

__all__ = [
    "CLASS_NAMES",
    "LEAST_NS",
    "Cases",
    "Measured",
    "Members",
    "Prediction",
    "Texts",
    "case_dtypes",
    "case_labels",
    "covered_ns",
    "grouped_graph",
    "leading_nodes",
    "measured_groups",
    "shared_shapes",
    "text_numbers",
]


CLASS_NAMES: tuple[str, ...] = tuple(each.name.lower() for each in OpClass)
"""Names of the classes of a program's operations, by code."""

_AT_ONCE = 1 << 16

LEAST_NS = 1e-6
"""What took less took no time: no clock tells femtoseconds, and errors relative to that overflow."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prediction:
    """What one estimator says of each case [ns]; NaN where it does not cover one, or gives no interval."""

    estimator: str
    duration_ns: FloatArray
    low_ns: FloatArray
    high_ns: FloatArray


@dataclass(frozen=True, slots=True)
class Members:
    """What one case is made of: compiled instructions, the operations of the program that they carry out, and
    how many events were measured.
    """

    instructions: tuple[str, ...]
    operations: tuple[str, ...]
    events: int


class Texts(Protocol):
    """Texts by number, which need not stand in memory: those of a table of millions are made on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> str: ...

    def __iter__(self) -> Iterator[str]: ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Cases:
    """Columns of shape ``(cases,)``. ``shape`` numbers equal work: the rows of ``shapes`` name it.

    ``measured_ns`` is the median over ``repeats`` runs and ``spread_ns`` their mean distance from it (NaN for
    one run); ``mean_ns`` is the mean over them (none: the same): means add up to the time of a run.
    ``inside_ns`` is the device time of all events that the cases stand for (NaN: the sum of ``measured_ns``),
    ``outside_ns`` that of the events that no case stands for: nobody matches them. ``members`` (empty: each
    case is one operation) say what a case is made of. ``op_class`` numbers ``classes``, which all cases of
    one comparison share; ``families`` (empty: none) names what several classes are summarised as beside, one
    text per class. ``useful_flops`` (none: ``flops``) leave multiplications by zeros out, ``dtypes`` (empty:
    unknown) the element type that each case computes in. All cases together are of ``steps`` steps: a
    recording without its program is of as many as it holds (NaN: unknown).
    """

    source: str
    workload: str
    hardware: str
    labels: Texts
    shapes: Texts
    shape: IntArray
    op_class: NDArray[np.int8] | SmallIntArray
    measured_ns: FloatArray
    spread_ns: FloatArray
    repeats: IntArray | NDArray[np.int8]
    flops: FloatArray
    bytes_moved: FloatArray
    predictions: tuple[Prediction, ...] = ()
    classes: tuple[str, ...] = CLASS_NAMES
    families: tuple[str, ...] = ()
    mean_ns: FloatArray | None = None
    inside_ns: float = nan
    outside_ns: float = 0.0
    members: tuple[Members, ...] = ()
    useful_flops: FloatArray | None = None
    dtypes: tuple[str, ...] = ()
    steps: float = nan

    def __post_init__(self) -> None:
        """Check that all columns have one row per case."""
        columns = (self.shape, self.op_class, self.measured_ns, self.spread_ns, self.repeats, self.flops)
        if any(len(column) != len(self.labels) for column in (*columns, self.bytes_moved)):
            raise InvariantError("Cases: columns differ in length")
        if any(len(each.duration_ns) != len(self.labels) for each in self.predictions):
            raise InvariantError("Cases: a prediction does not have one row per case")
        if any(len(each) not in (0, len(self.labels)) for each in (self.members, self.dtypes)):
            raise InvariantError("Cases: members or element types are not of every case")
        if self.useful_flops is not None and len(self.useful_flops) != len(self.labels):
            raise InvariantError("Cases: useful FLOPs are not of every case")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def share(self) -> float:
        """The share of the device time that the cases stand for, 0..1; 1 where no time was measured."""
        inside = float(self.weights_ns.sum())
        total = inside + self.outside_ns
        return inside / total if total else 1.0

    @property
    def weights_ns(self) -> FloatArray:
        """The device time of all events that each case stands for, its runs together."""
        measured = np.where(self.measured_ns > 0, self.measured_ns, 0.0)
        total = float(measured.sum())
        return measured if isnan(self.inside_ns) or not total else measured * (self.inside_ns / total)

    def prediction(self, estimator: str) -> Prediction | None:
        """What one estimator predicts; None where it was not asked."""
        return next((each for each in self.predictions if each.estimator == estimator), None)

    def with_predictions(self, predictions: Sequence[Prediction]) -> Cases:
        """The same cases with more predictions."""
        return replace(self, predictions=(*self.predictions, *predictions))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Measured:
    """Times of groups; columns of shape ``(measured groups,)``. ``group`` is the group's number,
    ``measured_ns`` the median over its runs, ``mean_ns`` their mean.
    """

    group: IntArray
    measured_ns: FloatArray
    mean_ns: FloatArray
    spread_ns: FloatArray
    repeats: IntArray


def leading_nodes(graph: OpGraph, node_group: IntArray, num_groups: int) -> IntArray:
    """The node of each group with most work, shape ``(groups,)``: four FLOPs count as one byte.

    It lends the group its name and class. Raises ``InvariantError`` for a group without nodes.
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
    """A graph whose node ``g`` is group ``g``: FLOPs add up, as does what is sent, and tensors that stay
    inside move no bytes.

    What was measured as one is estimated as one. Nodes in no group become one more node, the last.
    """
    leading = leading_nodes(graph, node_group, num_groups)
    rest = np.flatnonzero(node_group < 0)[:1]
    group = np.where(node_group >= 0, node_group, num_groups)
    merged = merge_nodes(graph, group, np.concatenate((leading, rest)), "fusion", keeps_traffic=False)
    collectives, p2p = graph.collectives, graph.p2p
    if not len(collectives) and not len(p2p):
        return merged

    def total(column: FloatArray, node: SmallIntArray, into: SmallIntArray) -> FloatArray:
        return np.bincount(group[node], column, len(merged))[into].astype(np.float64)

    of, to = collectives.node, merged.collectives.node
    return replace(
        merged,
        collectives=replace(
            merged.collectives,
            comm_bytes=total(collectives.comm_bytes, of, to),
            operand_bytes=total(collectives.operand_bytes, of, to),
            result_bytes=total(collectives.result_bytes, of, to),
        ),
        p2p=replace(merged.p2p, comm_bytes=total(p2p.comm_bytes, p2p.node, merged.p2p.node)),
    )


def measured_groups(profile: Profile, matching: Matching) -> Measured:
    """The time of each group: added up within a run of a rank (or the union where events overlap on several
    streams), then the median over runs; ranks are runs of the same work.

    Events outside of any run count only for groups without events in one: a run that the recording cut off
    is no run. Neither is one with an event of less than no time, or of unknown time, where a group has
    others; where it has none, the rest of it counts. O(events log events).
    """
    chosen = np.flatnonzero(matching.event_group >= 0)
    in_run = np.zeros(len(matching), np.bool_)
    in_run[matching.event_group[chosen[profile.run[chosen] >= 0]]] = True
    chosen = chosen[(profile.run[chosen] >= 0) | ~in_run[matching.event_group[chosen]]]
    part = profile.rank[chosen].astype(np.int64) << 32 | profile.run[chosen].astype(np.int64) & 0xFFFFFFFF
    parts, part = np.unique(part, return_inverse=True)
    place = matching.event_group[chosen] * len(parts) + part
    kept = _timed(profile.duration_ns[chosen], place, matching.event_group[chosen])
    chosen = chosen[kept]
    keys, place = np.unique(place[kept], return_inverse=True)
    times = _run_times(profile, chosen, place, len(keys))
    return _over_runs(keys // max(len(parts), 1), times)


def _timed(duration_ns: FloatArray, place: IntArray, group: IntArray) -> BoolArray:
    """Events whose time counts: of runs (``place``) whose events all have one, where the group has such."""
    timed: BoolArray = duration_ns >= 0
    if timed.all():
        return timed
    whole = ~np.isin(place, place[~timed])
    return timed & (whole | ~np.isin(group, group[whole]))


def _run_times(profile: Profile, chosen: IntArray, place: IntArray, count: int) -> FloatArray:
    """The time of each (group, run) [ns]."""
    order = np.lexsort((profile.start_ns[chosen], place))
    duration, start = profile.duration_ns[chosen][order], profile.start_ns[chosen][order]
    stream = profile.stream[chosen][order]
    total = np.bincount(place, profile.duration_ns[chosen], count)
    bounds = np.searchsorted(place[order], np.arange(count + 1))
    same = place[order][1:] == place[order][:-1]
    several = np.unique(place[order][1:][same & (stream[1:] != stream[:-1])])
    for number in several.tolist():
        part = slice(int(bounds[number]), int(bounds[number + 1]))
        total[number] = min(float(total[number]), covered_ns(start[part], start[part] + duration[part]))
    return total.astype(np.float64)


def covered_ns(start: FloatArray, end: FloatArray) -> float:
    """The length of what some intervals, ordered by ``start``, cover together [ns]."""
    reached = np.maximum.accumulate(end)
    before = np.concatenate(([-np.inf], reached[:-1]))
    return float(np.maximum(reached - np.maximum(start, before), 0.0).sum())


def _over_runs(group: IntArray, times: FloatArray) -> Measured:
    order = np.lexsort((times, group))
    group, times = group[order], times[order]
    distinct, place, counts = np.unique(group, return_inverse=True, return_counts=True)
    median, away = medians_of(times, place)
    return Measured(
        group=distinct,
        measured_ns=median,
        mean_ns=np.bincount(place, times, len(distinct)) / counts,
        spread_ns=away,
        repeats=counts.astype(np.int64),
    )


def case_labels(
    graph: OpGraph, nodes: IntArray, times: FloatArray
) -> tuple[tuple[str, ...], tuple[str, ...], IntArray]:
    """Names of nodes, and what work they are: distinct texts ``op(types) -> types`` and each node's row. Work
    that a step does several ``times`` is other work than once.
    """
    strings, types = graph.strings, graph.types
    texts = [_type_text(graph, row) for row in range(len(types))]
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
        name = strings[int(graph.op_row[node])]
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
    """The element type that each node computes in, else that of its first operand, else of its first result;
    the empty text where no type is known.
    """
    rates: list[int] = graph.rate_dtype[nodes].tolist()
    operands: list[list[int]] = graph.operands.take(nodes).to_lists()
    results: list[list[int]] = graph.results.take(nodes).to_lists()
    found: list[str] = []
    for rate, taken, made in zip(rates, operands, results, strict=True):
        known = (element.name for row in (*taken, *made) if (element := graph.types.dtype_of(row)))
        found.append(DTYPES[rate].name if rate >= 0 else next(known, ""))
    return tuple(found)


def _type_text(graph: OpGraph, row: int) -> str:
    element = graph.types.dtype_of(row)
    extents = "x".join("?" if extent < 0 else str(extent) for extent in graph.types.shape(row))
    name = "?" if element is None else element.name
    return f"{extents}x{name}" if extents else name


def shared_shapes(cases: Sequence[Cases]) -> IntArray:
    """Shape numbers of several sources, one after the other, the same number for the same text."""
    several = [each for each in cases if len(each)]
    if not several:
        return np.empty(0, np.int64)
    if len(several) == 1:  # its texts, all different, need not be looked at
        return several[0].shape
    numbers = text_numbers([each.shapes for each in several])
    return np.concatenate([number[each.shape] for number, each in zip(numbers, several, strict=True)])


def text_numbers(parts: Sequence[Texts]) -> list[IntArray]:
    """A number per distinct text of several lists, in order of appearance; one column for each list, of which
    there is one at least.

    Texts are told apart by 16 bytes that stand for each, so that millions need not stand in memory.
    """
    digests = np.concatenate([_digests(part) for part in parts])
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: equal ones stay in order of appearance
    ordered = digests[order]
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first = order[is_new]
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    number = np.empty(len(order), np.int64)
    number[order] = rank[np.cumsum(is_new) - 1]
    return np.split(number, np.cumsum([len(part) for part in parts])[:-1])


def _digests(texts: Texts) -> NDArray[np.uint64]:
    """What stands for each text, shape ``(texts, 2)``."""
    found = np.empty((len(texts), 2), np.uint64)
    source = iter(texts)
    for start in range(0, len(texts), _AT_ONCE):
        some = islice(source, _AT_ONCE)
        made = b"".join(
            blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest() for text in some
        )
        found[start : start + _AT_ONCE] = np.frombuffer(made, np.uint64).reshape(-1, 2)
    return found
