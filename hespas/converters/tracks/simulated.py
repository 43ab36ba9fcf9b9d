"""The tracks of a simulated run: resources of each rank, arrows along what their spans waited for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from hespas.converters.tracks.scene import Argument, Flows, Scene, TextColumn, Tracks
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
from hespas.graph.columns import DYNAMIC, IntArray, SmallIntArray, at_rows, distinct_rows, mapped
from hespas.graph.errors import UsageError

__all__ = ["Simulated", "profile_of_run", "scene_of_timeline"]

_SIMULATED = MappingProxyType({"timeline": "simulated"})
"""What a file of tracks says of itself where they were not measured."""
_CLASSES = ("", *(member.name.lower() for member in OpClass))
_CRITICAL = ("", "yes")


def scene_of_timeline(
    timeline: Timeline, workload: Workload, diagnostics: Diagnostics, *, arrows: bool
) -> Scene:
    """One part per rank class that has spans. Raises ``UsageError`` where numbers of ranks or nodes are not
    those of the workload.
    """
    parts: list[Tracks] = []
    spans: list[tuple[int, IntArray]] = []
    for index, mine in _spans_by_class(timeline, workload):
        tracks, ordered = _rank_tracks(timeline, workload.classes[index], mine)
        parts.append(tracks)
        spans.append((index, ordered))
    flows = _arrows(timeline, workload, spans, diagnostics) if arrows else Flows.none()
    return Scene(workload.name, tuple(parts), flows, _SIMULATED)


def _classes_of_spans(timeline: Timeline, workload: Workload) -> Iterator[tuple[OpGraph, IntArray]]:
    """Each rank class that has spans, and which. Raises ``UsageError`` as :func:`scene_of_timeline` does."""
    return ((workload.classes[index], spans) for index, spans in _spans_by_class(timeline, workload))


def _spans_by_class(timeline: Timeline, workload: Workload) -> Iterator[tuple[int, IntArray]]:
    if len(timeline) and not 0 <= int(timeline.rank.min()) <= int(timeline.rank.max()) < workload.num_ranks:
        raise UsageError(f"the timeline has ranks that workload {workload.name!r} does not have")
    span_class = workload.rank_class[timeline.rank]
    for index, graph in enumerate(workload.classes):
        mine = np.flatnonzero(span_class == index)
        if not len(mine):
            continue
        nodes = timeline.node[mine]
        blocks = timeline.region[mine][nodes < 0]
        fits = -1 <= int(nodes.min()) <= int(nodes.max()) < len(graph)
        if not fits or not ((blocks >= 0) & (blocks < len(graph.regions))).all():
            raise UsageError(f"the timeline has nodes or loops that graph {graph.name!r} does not have")
        yield index, mine


def _rank_tracks(timeline: Timeline, graph: OpGraph, spans: IntArray) -> tuple[Tracks, IntArray]:
    """The ranks of one class; also the spans in the order of the slices."""
    ranks, place = np.unique(timeline.rank[spans], return_inverse=True)
    used, track = distinct_rows(place.reshape(-1), timeline.resource[spans], timeline.stream[spans])
    start_ns, end_ns = timeline.start_ns[spans], timeline.end_ns[spans]
    order = np.lexsort((-end_ns, start_ns, track))
    spans, track = spans[order], track[order]
    alike = np.bincount(timeline.shown_by[timeline.shown_by >= 0], minlength=int(timeline.rank.max()) + 1)
    tracks = Tracks(
        processes=tuple(_rank_name(rank, int(alike[rank])) for rank in ranks.tolist()),
        track_process=tuple(owner for owner, _, _ in used),
        track_name=tuple(_track_name(timeline.resources[kind], stream) for _, kind, stream in used),
        track=track.astype(np.int32),
        name=_span_names(timeline, graph, spans),
        category=TextColumn(at_rows(graph.op_class.astype(np.int32) + 1, timeline.node[spans], 0), _CLASSES),
        start_ns=timeline.start_ns[spans],
        duration_ns=timeline.end_ns[spans] - timeline.start_ns[spans],
        arguments=_arguments(timeline, graph, spans),
    )
    return tracks, spans


def _track_name(resource: str, stream: int) -> str:
    return resource if stream < 0 else f"{resource} {stream}"


def _rank_name(rank: int, alike: int) -> str:
    """A rank that stands for others, too, says for how many."""
    return f"rank {rank}: and {alike - 1:,} alike" if alike > 1 else f"rank {rank}"


def _span_names(timeline: Timeline, graph: OpGraph, spans: IntArray) -> TextColumn:
    """The nodes' names, else their operations; a block of trips is named by its loop."""
    node = timeline.node[spans]
    rows = at_rows(np.where(graph.name_row > 0, graph.name_row, graph.op_row), node, 0)
    blocks = np.flatnonzero(node < 0)
    if not len(blocks):
        return TextColumn(rows, graph.strings)
    texts = StringTableBuilder(graph.strings)
    label = graph.regions.label[timeline.region[spans[blocks]]].tolist()
    trips = timeline.trips[spans[blocks]].tolist()
    rows[blocks] = [
        texts.add(f"{graph.strings[row] or 'loop'}: {count:,.0f} trips")
        for row, count in zip(label, trips, strict=True)
    ]
    return TextColumn(rows, texts.build())


def _arguments(timeline: Timeline, graph: OpGraph, spans: IntArray) -> Mapping[str, Argument]:
    node = timeline.node[spans]
    texts = {"op": graph.op_row, "framework_op": graph.framework_row, "source": graph.source_row}
    numbers = {"flops": graph.flops, "bytes": graph.bytes_moved}
    arguments: dict[str, Argument] = {
        key: TextColumn(at_rows(rows, node, 0), graph.strings) for key, rows in texts.items()
    }
    arguments |= {key: at_rows(column, node, np.nan) for key, column in numbers.items()}
    return arguments | {"critical": TextColumn(timeline.critical[spans].astype(np.int32), _CRITICAL)}


def _arrows(
    timeline: Timeline, workload: Workload, spans: list[tuple[int, IntArray]], diagnostics: Diagnostics
) -> Flows:
    """Dependencies inside each rank, then messages and collectives between ranks."""
    ends: list[tuple[str, IntArray, IntArray]] = []
    first, unseen = 0, 0
    for index, ordered in spans:
        graph = workload.classes[index]
        for kind, deps in (("data", graph.data_deps), ("control", graph.control_deps)):
            source, target, missing = _dependency_arrows(timeline, deps, ordered)
            ends.append((kind, source + first, target + first))
            unseen += missing
        first += len(ordered)
    ends.extend(_communication_arrows(timeline, workload, spans))
    message = "dependencies lead to operations that took no time and have no arrow"
    diagnostics.info("tracks.dependency-not-drawn", workload.name, message, count=unseen)
    return Flows.of(ends)


# Arrows of a simulated run: from the spans that others waited for, along dependencies and communication.

_Ends = tuple[str, IntArray, IntArray]


def _dependency_arrows(
    timeline: Timeline, deps: RaggedArray, spans: IntArray
) -> tuple[IntArray, IntArray, int]:
    """Source and target places in ``spans`` of each dependency between two that ran on one rank.

    Where nodes ran several times, the last runs of both belong together, and those before them likewise. The
    third result counts dependencies of spans on nodes without a span. O(spans log spans + edges).
    """
    if not len(spans) or not len(deps.values):
        return np.empty(0, np.int64), np.empty(0, np.int64), 0
    runs = _Runs.of(timeline, spans)
    if not len(runs.keys):
        return np.empty(0, np.int64), np.empty(0, np.int64), 0
    lengths = deps.lengths[runs.node]
    target = np.repeat(np.arange(len(runs.node), dtype=np.int64), lengths)
    wanted = deps.take(runs.node).values.astype(np.int64)
    key = runs.key_of(runs.rank[target], wanted)
    group = np.minimum(np.searchsorted(runs.keys, key), len(runs.keys) - 1)
    found = runs.keys[group] == key
    behind = runs.from_last[target]
    found_and_ran = found & (behind < runs.counts[group])
    source = runs.ends[group] - 1 - behind
    kept = np.flatnonzero(found_and_ran)
    return runs.place[source[kept]], runs.place[target[kept]], int((~found).sum())


@dataclass(frozen=True, slots=True, eq=False)
class _Runs:
    """Spans sorted by rank, node and start: ``place`` is where each stood, ``from_last`` counts the later
    runs of the same node on the same rank. ``keys`` are the distinct pairs, with ``counts`` and ``ends``.
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
    def of(cls, timeline: Timeline, spans: IntArray) -> _Runs:
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
        """The key of pairs; one that no span has where the node is none of theirs."""
        return np.where(node < self.nodes, rank * self.nodes + node, -1)


def _communication_arrows(
    timeline: Timeline, workload: Workload, spans: list[tuple[int, IntArray]]
) -> list[_Ends]:
    """Arrows from sender to receiver, and along the members of each collective in their order.

    The same operation of different ranks is told by its group (or its two ends) and by how many of them ran
    before on that rank. O(communications), one step each.
    """
    meetings: dict[tuple[object, ...], dict[int, int]] = {}
    messages: dict[tuple[int, int, int, int], list[int]] = {}
    counts: dict[tuple[object, ...], int] = {}
    numbers: dict[tuple[int, ...], int] = {}
    first = 0
    for index, ordered in spans:
        talk = _Talk.of(workload.classes[index], workload.num_ranks, numbers)
        for place in talk.places(timeline, ordered):
            span = int(ordered[place])
            rank, node = int(timeline.rank[span]), int(timeline.node[span])
            for role, key in talk.keys(rank, node):
                turn = counts.get((role, rank, *key), 0)
                counts[role, rank, *key] = turn + 1
                if role == "meet":
                    meetings.setdefault((*key, turn), {})[rank] = first + place
                else:
                    source, target, tag = key
                    ends = messages.setdefault((source, target, tag, turn), [-1, -1])
                    ends[role == "receive"] = first + place
        first += len(ordered)
    return [*_collectives(meetings), *_messages(messages)]


@dataclass(frozen=True, slots=True, eq=False)
class _Talk:
    """Who takes part in the communication of one graph, by node.

    ``numbers`` numbers the groups of all graphs by their members; ``known`` is the group of a rank by group
    set, as looking for it may take as long as the group set.
    """

    graph: OpGraph
    num_ranks: int
    collective: dict[int, int]
    message: dict[int, int]
    numbers: dict[tuple[int, ...], int]
    known: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])

    @classmethod
    def of(cls, graph: OpGraph, num_ranks: int, numbers: dict[tuple[int, ...], int]) -> _Talk:
        collective = {node: row for row, node in enumerate(graph.collectives.node.tolist())}
        message = {node: row for row, node in enumerate(graph.p2p.node.tolist())}
        return cls(graph, num_ranks, collective, message, numbers)

    def places(self, timeline: Timeline, ordered: IntArray) -> list[int]:
        """Where spans of communication stand, in the order in which they ran."""
        talking = np.concatenate([self.graph.collectives.node, self.graph.p2p.node])
        place = np.flatnonzero(np.isin(timeline.node[ordered], talking))
        by_time: list[int] = place[np.argsort(timeline.start_ns[ordered[place]], kind="stable")].tolist()
        return by_time

    def keys(self, rank: int, node: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The part a rank plays in a node, and what identifies the other parts."""
        row = self.collective.get(node)
        if row is not None:
            kind, which = int(self.graph.collectives.kind[row]), int(self.graph.collectives.group_set[row])
            yield "meet", (kind, self._group(which, rank))
            return
        row = self.message[node]
        which = int(self.graph.p2p.permutation[row])
        if which < 0:
            return
        permutation, tag = self.graph.permutations[which], int(self.graph.p2p.tag[row])
        kind = int(self.graph.kind[node])
        target, source = permutation.target_of(rank), permutation.source_of(rank)
        if kind != NodeKind.RECV and target >= 0:
            yield "send", (rank, target, tag)
        if kind != NodeKind.SEND and source >= 0:
            yield "receive", (source, rank, tag)

    def _group(self, which: int, rank: int) -> int:
        """The number of the group of a rank: equal members of one communicator, equal number."""
        number = self.known.get((which, rank))
        if number is None:
            members = self._members(which, rank)
            number = self.known[which, rank] = self.numbers.setdefault(members, len(self.numbers))
        return number

    def _members(self, which: int, rank: int) -> tuple[int, ...]:
        groups = self.graph.group_sets[which] if which >= 0 else None
        everybody = (-1, 0 if groups is None else groups.communicator)
        if groups is None or groups.is_world(self.num_ranks):
            return everybody
        group = groups.group_of(rank)
        members = tuple(sorted(groups.members(group).tolist())) if group >= 0 else (rank,)
        return everybody if len(members) == self.num_ranks else (*members, -1, groups.communicator)


def _collectives(meetings: dict[tuple[object, ...], dict[int, int]]) -> list[_Ends]:
    source: list[int] = []
    target: list[int] = []
    for meeting in meetings.values():
        places = [meeting[rank] for rank in sorted(meeting)]
        source.extend(places[:-1])
        target.extend(places[1:])
    return [("collective", np.array(source, np.int64), np.array(target, np.int64))]


def _messages(messages: dict[tuple[int, int, int, int], list[int]]) -> list[_Ends]:
    whole = [(one, other) for one, other in messages.values() if one >= 0 and other >= 0 and one != other]
    ends = np.array(whole, np.int64).reshape(-1, 2)
    return [("message", ends[:, 0], ends[:, 1])]


@dataclass(frozen=True, slots=True, eq=False)
class Simulated:
    """A timeline, and the workload whose nodes it numbers."""

    timeline: Timeline
    workload: Workload


# --- A simulated run as rows, for tables: what ran where, from when, and for how long.


def profile_of_run(run: Simulated, device: str) -> Profile:
    """One event per span, in the order of the timeline, as if ``device`` had been measured: its name should
    say that it was not. The stream is the number of the resource in ``run.timeline.resources``.

    Raises ``UsageError`` where the timeline does not fit its workload.
    """
    timeline = run.timeline
    strings = StringTableBuilder()
    strings.add("")
    op_row, shapes_row, dtype_row = (np.zeros(len(timeline), np.int32) for _ in range(3))
    op_class = np.zeros(len(timeline), np.int8)
    for graph, spans in _classes_of_spans(timeline, run.workload):
        own = spans[timeline.node[spans] >= 0]
        node = timeline.node[own]
        op_row[spans] = _added(strings, _span_names(timeline, graph, spans))
        op_class[own] = graph.op_class[node]
        shapes_row[own], dtype_row[own] = _operands(strings, graph, node)
    return Profile.of(
        run.workload.name,
        (device,),
        strings.build(),
        start_ns=timeline.start_ns,
        duration_ns=timeline.end_ns - timeline.start_ns,
        op_row=op_row,
        op_class=op_class,
        shapes_row=shapes_row,
        dtype_row=dtype_row,
        rank=timeline.rank.astype(np.int32, copy=False),
        stream=timeline.resource.astype(np.int64),
    )


def _added(strings: StringTableBuilder, column: TextColumn) -> SmallIntArray:
    """The texts of a column as rows of ``strings``."""
    return mapped(column.rows, lambda row: strings.add(column.texts[row]), np.int32)


def _operands(
    strings: StringTableBuilder, graph: OpGraph, node: IntArray | SmallIntArray
) -> tuple[SmallIntArray, SmallIntArray]:
    """Shapes and element types of the operands of each node, as JSON lists."""
    used, place = np.unique(node.astype(np.int64), return_inverse=True)
    operands = graph.operands.take(used.astype(np.int64)).to_lists()
    shapes = [strings.add(_shapes(graph, rows)) for rows in operands]
    dtypes = [strings.add(_dtypes(graph, rows)) for rows in operands]
    place = place.reshape(-1)
    return np.array(shapes, np.int32)[place], np.array(dtypes, np.int32)[place]


def _shapes(graph: OpGraph, rows: Sequence[int]) -> str:
    shapes = [[None if extent == DYNAMIC else extent for extent in graph.types.shape(row)] for row in rows]
    return json.dumps(shapes, separators=(",", ":")) if rows else ""


def _dtypes(graph: OpGraph, rows: Sequence[int]) -> str:
    found = [graph.types.dtype_of(row) for row in rows]
    names = [None if dtype is None else dtype.name for dtype in found]
    return json.dumps(names, separators=(",", ":")) if rows else ""
