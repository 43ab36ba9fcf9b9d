"""The tracks of a simulated run: resources of each rank, arrows along what their spans waited for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hespas.converters.tracks.arrows import communication_arrows, dependency_arrows
from hespas.converters.tracks.scene import Argument, Flows, Scene, TextColumn, Tracks
from hespas.graph import Diagnostics, OpClass, OpGraph, StringTableBuilder, Timeline, Workload
from hespas.graph.columns import IntArray, SmallIntArray
from hespas.graph.errors import UsageError

__all__ = ["SIMULATED", "classes_of_spans", "scene_of_timeline", "span_names"]

SIMULATED = MappingProxyType({"timeline": "simulated"})
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
    return Scene(workload.name, tuple(parts), flows, SIMULATED)


def classes_of_spans(timeline: Timeline, workload: Workload) -> Iterator[tuple[OpGraph, IntArray]]:
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
    wide = place.reshape(-1) * len(timeline.resources) + timeline.resource[spans]
    used, track = np.unique(wide, return_inverse=True)
    track = track.reshape(-1)
    start_ns, end_ns = timeline.start_ns[spans], timeline.end_ns[spans]
    order = np.lexsort((-end_ns, start_ns, track))
    spans, track = spans[order], track[order]
    pairs = [divmod(int(code), len(timeline.resources)) for code in used.tolist()]
    alike = np.bincount(timeline.shown_by[timeline.shown_by >= 0], minlength=int(timeline.rank.max()) + 1)
    tracks = Tracks(
        processes=tuple(_rank_name(rank, int(alike[rank])) for rank in ranks.tolist()),
        track_process=tuple(owner for owner, _ in pairs),
        track_name=tuple(timeline.resources[resource] for _, resource in pairs),
        track=track.astype(np.int32),
        name=span_names(timeline, graph, spans),
        category=TextColumn(
            _of_nodes(graph.op_class.astype(np.int32) + 1, timeline.node[spans], 0), _CLASSES
        ),
        start_ns=timeline.start_ns[spans],
        duration_ns=timeline.end_ns[spans] - timeline.start_ns[spans],
        arguments=_arguments(timeline, graph, spans),
    )
    return tracks, spans


def _rank_name(rank: int, alike: int) -> str:
    """A rank that stands for others, too, says for how many."""
    return f"rank {rank}: and {alike - 1:,} alike" if alike > 1 else f"rank {rank}"


def span_names(timeline: Timeline, graph: OpGraph, spans: IntArray) -> TextColumn:
    """The nodes' names, else their operations; a block of trips is named by its loop."""
    node = timeline.node[spans]
    rows = _of_nodes(np.where(graph.name_row > 0, graph.name_row, graph.op_row), node, 0)
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


_Cell = TypeVar("_Cell", np.int32, np.float64)


def _of_nodes(column: NDArray[_Cell], node: SmallIntArray, otherwise: float) -> NDArray[_Cell]:
    """A column of nodes by span; blocks of trips have none."""
    if not len(column):
        return np.full(len(node), otherwise, column.dtype)
    found = column[np.maximum(node, 0)]
    found[node < 0] = otherwise
    return found


def _arguments(timeline: Timeline, graph: OpGraph, spans: IntArray) -> Mapping[str, Argument]:
    node = timeline.node[spans]
    texts = {"op": graph.op_row, "framework_op": graph.framework_row, "source": graph.source_row}
    numbers = {"flops": graph.flops, "bytes": graph.bytes_moved}
    arguments: dict[str, Argument] = {
        key: TextColumn(_of_nodes(rows, node, 0), graph.strings) for key, rows in texts.items()
    }
    arguments |= {key: _of_nodes(column, node, np.nan) for key, column in numbers.items()}
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
            source, target, missing = dependency_arrows(timeline, deps, ordered)
            ends.append((kind, source + first, target + first))
            unseen += missing
        first += len(ordered)
    ends.extend(communication_arrows(timeline, workload, spans))
    diagnostics.info(
        "tracks.dependency-not-drawn", workload.name,
        "dependencies lead to operations that took no time and have no arrow", count=unseen,
    )  # fmt: skip
    return Flows.of(ends)
