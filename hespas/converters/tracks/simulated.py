"""Tracks of a simulated run: resources of each rank, with arrows along dependencies and communication."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from hespas.converters.tracks.slices import Argument, Flows, TextColumn, Tracks, TrackSet
from hespas.graph import (
    Diagnostics,
    NodeKind,
    OpClass,
    OpGraph,
    Profile,
    RaggedArray,
    StringTableBuilder,
    Timeline,
    Workload,
)
from hespas.graph.columns import DYNAMIC, IntArray, SmallIntArray, at_rows, distinct_rows
from hespas.graph.errors import UsageError

__all__ = ["SimulatedRun", "profile_of_run", "tracks_of_timeline"]

_METADATA = MappingProxyType({"timeline": "simulated"})
"""Metadata of a file of tracks that were not measured."""
_CLASSES = ("", *(member.name.lower() for member in OpClass))
_CRITICAL_TEXTS = ("", "yes")


def tracks_of_timeline(
    timeline: Timeline, workload: Workload, diagnostics: Diagnostics, *, arrows: bool
) -> TrackSet:
    """Return the tracks of a timeline, with one part per rank class that has spans.

    Arrows are dependencies inside each rank, then messages and collectives between ranks. Raises
    ``UsageError`` if the timeline has ranks or nodes that the workload does not have.
    """
    parts: list[Tracks] = []
    spans: list[tuple[OpGraph, IntArray]] = []
    for graph, class_spans in _spans_by_class(timeline, workload):
        ordered = class_spans
        ranks, index = np.unique(timeline.rank[ordered], return_inverse=True)
        used, track = distinct_rows(index.reshape(-1), timeline.resource[ordered], timeline.stream[ordered])
        order = np.lexsort((-timeline.end_ns[ordered], timeline.start_ns[ordered], track))
        ordered, track = ordered[order], track[order]
        node = timeline.node[ordered]
        num_equal = np.bincount(
            timeline.shown_by[timeline.shown_by >= 0], minlength=int(timeline.rank.max()) + 1
        )
        processes: list[str] = []
        for rank in ranks.tolist():
            num_others = int(num_equal[rank]) - 1
            processes.append(f"rank {rank}: and {num_others:,} alike" if num_others > 0 else f"rank {rank}")
        resources = ((timeline.resources[kind], stream) for _, kind, stream in used)
        texts = {"op": graph.op_id, "framework_op": graph.framework_id, "source": graph.source_id}
        numbers = {"flops": graph.flops, "bytes": graph.bytes_moved}
        arguments: dict[str, Argument] = {
            key: TextColumn(at_rows(rows, node, 0), graph.strings) for key, rows in texts.items()
        }
        arguments |= {key: at_rows(column, node, np.nan) for key, column in numbers.items()}
        arguments["critical"] = TextColumn(timeline.critical[ordered].astype(np.int32), _CRITICAL_TEXTS)
        tracks = Tracks(
            processes=tuple(processes),
            track_process=tuple(owner for owner, _, _ in used),
            track_name=tuple(name if stream < 0 else f"{name} {stream}" for name, stream in resources),
            track=track.astype(np.int32),
            name=_span_names(timeline, graph, ordered),
            category=TextColumn(at_rows(graph.op_class.astype(np.int32) + 1, node, 0), _CLASSES),
            start_ns=timeline.start_ns[ordered],
            duration_ns=timeline.end_ns[ordered] - timeline.start_ns[ordered],
            arguments=arguments,
        )
        parts.append(tracks)
        spans.append((graph, ordered))
    if not arrows:
        return TrackSet(workload.name, tuple(parts), Flows.none(), _METADATA)
    ends: list[_Arrows] = []
    first = num_missing = 0
    for graph, ordered in spans:
        for kind, deps in (("data", graph.data_deps), ("control", graph.control_deps)):
            source, target, missing = _dependency_arrows(timeline, deps, ordered)
            ends.append((kind, source + first, target + first))
            num_missing += missing
        first += len(ordered)
    ends.extend(_communication_arrows(timeline, workload.num_ranks, spans))
    message = "dependencies on operations that took no time have no arrow"
    diagnostics.info("tracks.dependency-not-drawn", workload.name, message, count=num_missing)
    return TrackSet(workload.name, tuple(parts), Flows.of(ends), _METADATA)


_SAME_WORKLOAD = "pass the workload that was simulated"


def _spans_by_class(timeline: Timeline, workload: Workload) -> Iterator[tuple[OpGraph, IntArray]]:
    """Yield each rank class that has spans, and its spans. Raises ``UsageError`` as
    :func:`tracks_of_timeline`.
    """
    if len(timeline) and not 0 <= int(timeline.rank.min()) <= int(timeline.rank.max()) < workload.num_ranks:
        ranks = f"{int(timeline.rank.min())}..{int(timeline.rank.max())}"
        raise UsageError(
            f"the timeline has ranks {ranks}, but workload {workload.name!r} has ranks "
            f"0..{workload.num_ranks - 1}",
            hint=_SAME_WORKLOAD,
        )
    class_of_span = workload.rank_class[timeline.rank]
    for index, graph in enumerate(workload.classes):
        spans = np.flatnonzero(class_of_span == index)
        if not len(spans):
            continue
        nodes = timeline.node[spans]
        loops = timeline.region[spans][nodes < 0]
        fits = -1 <= int(nodes.min()) <= int(nodes.max()) < len(graph)
        if not fits or not ((loops >= 0) & (loops < len(graph.regions))).all():
            raise UsageError(
                f"the timeline has node {int(nodes.max())} or loops that graph {graph.name!r} of "
                f"{len(graph)} nodes does not have",
                hint=_SAME_WORKLOAD,
            )
        yield graph, spans


def _span_names(timeline: Timeline, graph: OpGraph, spans: IntArray) -> TextColumn:
    """Return the name of each span: the name of its node, or the operation of a node without a name.

    A span of several loop iterations is named after its loop.
    """
    node = timeline.node[spans]
    rows = at_rows(np.where(graph.name_id > 0, graph.name_id, graph.op_id), node, 0)
    blocks = np.flatnonzero(node < 0)
    if not len(blocks):
        return TextColumn(rows, graph.strings)
    texts = StringTableBuilder(graph.strings)
    label = graph.regions.label[timeline.region[spans[blocks]]].tolist()
    trips = timeline.trips[spans[blocks]].tolist()
    rows[blocks] = [
        texts.add(f"{graph.strings[row] or 'loop'}: {count:,.0f} iterations")
        for row, count in zip(label, trips, strict=True)
    ]
    return TextColumn(rows, texts.build())


_Arrows = tuple[str, IntArray, IntArray]


def _dependency_arrows(
    timeline: Timeline, deps: RaggedArray, spans: IntArray
) -> tuple[IntArray, IntArray, int]:
    """Return the dependencies between the nodes of each rank as arrows between their spans.

    The results are the source and the target of each arrow, as indices of ``spans``, and the number of
    dependencies on nodes without a span. If nodes ran several times, an arrow connects the last runs of both
    nodes, another one the runs before these, and so on. O(spans log spans + edges).
    """
    if not len(spans) or not len(deps.values):
        return np.empty(0, np.int64), np.empty(0, np.int64), 0
    runs = _NodeRuns.of(timeline, spans)
    if not len(runs.keys):
        return np.empty(0, np.int64), np.empty(0, np.int64), 0
    lengths = deps.lengths[runs.node]
    target = np.repeat(np.arange(len(runs.node), dtype=np.int64), lengths)
    producers = deps.take(runs.node).values.astype(np.int64)
    key = runs.key_of(runs.rank[target], producers)
    group = np.minimum(np.searchsorted(runs.keys, key), len(runs.keys) - 1)
    ran = runs.keys[group] == key
    from_last = runs.from_last[target]
    has_run = ran & (from_last < runs.counts[group])
    source = runs.ends[group] - 1 - from_last
    drawn = np.flatnonzero(has_run)
    return runs.place[source[drawn]], runs.place[target[drawn]], int((~ran).sum())


@dataclass(frozen=True, slots=True, eq=False)
class _NodeRuns:
    """Spans of a timeline sorted by rank, node and start.

    ``place`` is the original index of each span. ``from_last`` is the number of later runs of the same node
    on the same rank. ``keys`` are the distinct pairs of rank and node. The spans of pair ``i`` are the
    ``counts[i]`` spans before index ``ends[i]``.
    """

    nodes: int
    place: IntArray
    rank: IntArray
    node: IntArray
    from_last: IntArray
    keys: IntArray
    counts: IntArray
    ends: IntArray

    @classmethod
    def of(cls, timeline: Timeline, spans: IntArray) -> _NodeRuns:
        own = np.flatnonzero(timeline.node[spans] >= 0)  # the others are blocks of whole trips
        spans = spans[own]
        node, rank = timeline.node[spans].astype(np.int64), timeline.rank[spans].astype(np.int64)
        nodes = int(node.max(initial=0)) + 1
        key = rank * nodes + node
        place = np.lexsort((timeline.start_ns[spans], key))
        keys, counts = np.unique(key, return_counts=True)
        ends = np.cumsum(counts)
        from_last = np.repeat(ends, counts) - 1 - np.arange(len(place))
        return cls(nodes, own[place], rank[place], node[place], from_last, keys, counts, ends)

    def key_of(self, rank: IntArray, node: IntArray) -> IntArray:
        """Return the key that identifies a rank and a node, -1 for nodes without a span."""
        return np.where(node < self.nodes, rank * self.nodes + node, -1)


def _communication_arrows(
    timeline: Timeline, num_ranks: int, spans: list[tuple[OpGraph, IntArray]]
) -> list[_Arrows]:
    """Return arrows that connect the members of each collective in order of rank, and sender and receiver of
    each message.

    Spans of different ranks belong to the same communication if they have the same group (or sender and
    receiver), and the same number of such communications ran before on their rank. O(communications), one
    step each.
    """
    rendezvous: dict[tuple[object, ...], dict[int, int]] = {}
    messages: dict[tuple[int, int, int, int], list[int]] = {}
    counts: dict[tuple[object, ...], int] = {}
    numbers: dict[tuple[int, ...], int] = {}
    first = 0
    for graph, ordered in spans:
        communication = _GraphCommunication.of(graph, num_ranks, numbers)
        for index in communication.places(timeline, ordered):
            span = int(ordered[index])
            rank, node = int(timeline.rank[span]), int(timeline.node[span])
            for role, key in communication.keys(rank, node):
                number = counts.get((role, rank, *key), 0)
                counts[role, rank, *key] = number + 1
                if role == "member":
                    rendezvous.setdefault((*key, number), {})[rank] = first + index
                else:
                    source, target, tag = key
                    ends = messages.setdefault((source, target, tag, number), [-1, -1])
                    ends[role == "receiver"] = first + index
        first += len(ordered)
    sources: list[int] = []
    targets: list[int] = []
    for span_of_rank in rendezvous.values():
        members = [span_of_rank[rank] for rank in sorted(span_of_rank)]
        sources.extend(members[:-1])
        targets.extend(members[1:])
    pairs = [(sent, received) for sent, received in messages.values() if min(sent, received) >= 0]
    complete = np.array([pair for pair in pairs if pair[0] != pair[1]], np.int64).reshape(-1, 2)
    return [
        ("collective", np.array(sources, np.int64), np.array(targets, np.int64)),
        ("message", complete[:, 0], complete[:, 1]),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _GraphCommunication:
    """Communication of one graph, with the ranks that take part in it.

    ``collective`` and ``message`` map a node to its row in the table. ``numbers`` maps the members of a group
    to a number that is the same in all graphs. ``group_of`` caches that number by group set and rank, because
    a lookup may take as long as the group set has groups.
    """

    graph: OpGraph
    num_ranks: int
    collective: dict[int, int]
    message: dict[int, int]
    numbers: dict[tuple[int, ...], int]
    group_of: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])

    @classmethod
    def of(cls, graph: OpGraph, num_ranks: int, numbers: dict[tuple[int, ...], int]) -> _GraphCommunication:
        collective = {node: row for row, node in enumerate(graph.collectives.node.tolist())}
        message = {node: row for row, node in enumerate(graph.p2p.node.tolist())}
        return cls(graph, num_ranks, collective, message, numbers)

    def places(self, timeline: Timeline, ordered: IntArray) -> list[int]:
        """Return the indices of the spans in ``ordered`` that communicate, in order of start."""
        nodes = np.concatenate([self.graph.collectives.node, self.graph.p2p.node])
        index = np.flatnonzero(np.isin(timeline.node[ordered], nodes))
        by_start: list[int] = index[np.argsort(timeline.start_ns[ordered[index]], kind="stable")].tolist()
        return by_start

    def keys(self, rank: int, node: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the role of a rank in the communication of a node, and the key of that communication.

        All ranks that take part in the communication have the same key. A node may be sender and receiver.
        """
        row = self.collective.get(node)
        if row is not None:
            kind, group_set = (
                int(self.graph.collectives.kind[row]),
                int(self.graph.collectives.group_set[row]),
            )
            number = self.group_of.get((group_set, rank))
            if number is None:
                members = self._members(group_set, rank)
                number = self.group_of[group_set, rank] = self.numbers.setdefault(members, len(self.numbers))
            yield "member", (kind, number)
            return
        row = self.message[node]
        permutation_row = int(self.graph.p2p.permutation[row])
        if permutation_row < 0:
            return
        permutation, tag = self.graph.permutations[permutation_row], int(self.graph.p2p.tag[row])
        kind = int(self.graph.kind[node])
        target, source = permutation.target_of(rank), permutation.source_of(rank)
        if kind != NodeKind.RECV and target >= 0:
            yield "sender", (rank, target, tag)
        if kind != NodeKind.SEND and source >= 0:
            yield "receiver", (source, rank, tag)

    def _members(self, group_set: int, rank: int) -> tuple[int, ...]:
        """Return the members of a rank's group and the communicator. For a group of all ranks the members are
        not listed.
        """
        groups = self.graph.group_sets[group_set] if group_set >= 0 else None
        all_ranks = (-1, 0 if groups is None else groups.communicator)
        if groups is None or groups.is_world(self.num_ranks):
            return all_ranks
        group = groups.group_of(rank)
        members = tuple(sorted(groups.members(group).tolist())) if group >= 0 else (rank,)
        return all_ranks if len(members) == self.num_ranks else (*members, -1, groups.communicator)


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedRun:
    """Simulated timeline together with the workload to whose nodes it refers."""

    timeline: Timeline
    workload: Workload


def profile_of_run(run: SimulatedRun, device: str) -> Profile:
    """Return a simulated run as a profile of ``device``: one event per span, in the order of the timeline.

    The name ``device`` should show that the run was simulated. The stream is the index of the resource in
    ``run.timeline.resources``. Raises ``UsageError`` if the timeline does not fit its workload.
    """
    timeline = run.timeline
    strings = StringTableBuilder()
    strings.add("")
    op_id, shapes_id, dtype_id = (np.zeros(len(timeline), np.int32) for _ in range(3))
    op_class = np.zeros(len(timeline), np.int8)
    for graph, spans in _spans_by_class(timeline, run.workload):
        names = _span_names(timeline, graph, spans)
        rows, index = np.unique(names.rows, return_inverse=True)
        listed: list[int] = rows.tolist()
        text_rows = np.array([strings.add(names.texts[row]) for row in listed], np.int32)
        op_id[spans] = text_rows[index.reshape(-1)]
        of_node = spans[timeline.node[spans] >= 0]
        node = timeline.node[of_node]
        op_class[of_node] = graph.op_class[node]
        shapes_id[of_node], dtype_id[of_node] = _operands(strings, graph, node)
    return Profile.of(
        run.workload.name,
        (device,),
        strings.build(),
        start_ns=timeline.start_ns,
        duration_ns=timeline.end_ns - timeline.start_ns,
        op_id=op_id,
        op_class=op_class,
        shapes_id=shapes_id,
        dtype_id=dtype_id,
        rank=timeline.rank.astype(np.int32, copy=False),
        stream=timeline.resource.astype(np.int64),
    )


def _operands(
    strings: StringTableBuilder, graph: OpGraph, node: IntArray | SmallIntArray
) -> tuple[SmallIntArray, SmallIntArray]:
    """Return shapes and element types of the operands of each node, as JSON lists."""

    def text_rows(lists: list[list[Any]]) -> SmallIntArray:
        texts = [json.dumps(values, separators=(",", ":")) if values else "" for values in lists]
        return np.array([strings.add(text) for text in texts], np.int32)

    nodes, index = np.unique(node.astype(np.int64), return_inverse=True)
    operands = graph.operands.take(nodes.astype(np.int64)).to_lists()
    shapes: list[list[Any]] = []
    dtypes: list[list[Any]] = []
    for types in operands:
        extents = [graph.types.shape(row) for row in types]
        elements = [graph.types.dtype_of(row) for row in types]
        shapes.append([[None if extent == DYNAMIC else extent for extent in shape] for shape in extents])
        dtypes.append([None if dtype is None else dtype.name for dtype in elements])
    index = index.reshape(-1)
    return text_rows(shapes)[index], text_rows(dtypes)[index]
