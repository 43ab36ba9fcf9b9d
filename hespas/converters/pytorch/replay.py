"""Replays of captured graphs aligned with their captures: the captured launch of each replayed kernel.

All work of one replay has the correlation of its graph launch, and along a stream it is in the order of the
capture. So each stream of a replay is aligned by name with the launches of a captured graph, and aligned
again after events or launches that only one side has. A replay belongs to the captured graph that fits best.
Where launches state no names (CUDA's do not), the events between two matched places are aligned by order if
both sides have the same number. A replay that fits no graph, or several graphs of different shapes equally,
is not aligned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from hespas.converters.linking import common_order
from hespas.converters.pytorch.captured import (
    COPY,
    FILL,
    UNNAMED,
    Capture,
    CapturedGraph,
    canonical_name,
    kernel_symbols,
    launches_graphs,
    numbers_in,
)
from hespas.converters.pytorch.events import KinetoTrace
from hespas.converters.pytorch.links import DeviceLinks
from hespas.graph.columns import BoolArray, IntArray, at_rows

__all__ = ["Alignment", "GraphReplay", "aligned_replays", "replays_of"]

_MIN_FIT = 0.6
"""Minimum share of events and launches that a replay and its captured graph have in common."""
_MIN_FIT_OF_CUT = 0.9
"""Minimum share of aligned events of a replay that began before the window."""
_MIN_EVENTS_OF_CUT = 8


@dataclass(frozen=True, slots=True, eq=False)
class GraphReplay:
    """Device work of one replay of a captured graph.

    ``launch`` is the row of the launch call (-1: it was before the recording). ``events`` are rows of device
    events. ``streams`` are lists of indices into ``events``: one list per stream, in the order of the stream.
    If the trace states the graph nodes, there is a single list in the order of the nodes. ``symbols`` are the
    numbers of the kernels (:func:`~hespas.converters.pytorch.captured.kernel_symbols`).
    """

    launch: int
    start_ns: int
    events: IntArray
    streams: tuple[tuple[int, ...], ...]
    symbols: tuple[int, ...]

    @property
    def on_several_streams(self) -> BoolArray:
        """Mask of the events whose kernel occurs on several streams of this replay."""
        streams = Counter(symbol for part in self.signature for symbol in set(part))
        return np.isin(self.symbols, [symbol for symbol, count in streams.items() if count > 1])

    @property
    def signature(self) -> tuple[tuple[int, ...], ...]:
        """Return the kernels of the replay in order, stream by stream. Replays with equal signatures are
        aligned in the same way.
        """
        return tuple(tuple(self.symbols[index] for index in stream) for stream in self.streams)


class Alignment(NamedTuple):
    """Alignment of one replay with a captured graph.

    ``capture`` and ``graph`` are the numbers of the capture and of the graph (-1: none). ``place`` is, for
    each event of the replay, the index of its launch in the graph (-1: none). ``checked`` marks the events
    whose names were compared. ``ambiguous`` is True if several graphs of different shapes fit equally.
    """

    replay: GraphReplay
    capture: int
    graph: int
    place: IntArray
    checked: BoolArray
    ambiguous: bool


def replays_of(trace: KinetoTrace, links: DeviceLinks) -> list[GraphReplay]:
    """Return the replays of graphs in a trace, in order of launch. Their ``symbols`` are still name rows of
    the events.

    Streams with most events come first. If every event states its graph node, all streams are joined into
    one. A single event without a launch record is not a replay.
    """
    device = trace.device
    of_graph = at_rows(launches_graphs(trace), links.launch, False)
    no_launch = (links.launch < 0) & (device.correlation >= 0)
    key = np.where(of_graph, links.launch, len(trace.launch) + device.correlation)
    rows = np.flatnonzero(of_graph | no_launch)
    if not len(rows):
        return []
    rows = rows[np.lexsort((device.start_ns[rows], key[rows]))]
    bounds = np.flatnonzero(np.diff(key[rows], prepend=-1))
    replays: list[GraphReplay] = []
    for first, last in zip(bounds.tolist(), [*bounds[1:].tolist(), len(rows)], strict=True):
        events = rows[first:last]
        launch = int(links.launch[events[0]])
        if launch < 0 and len(events) < 2:
            continue
        start = trace.launch.start_ns[launch] if launch >= 0 else device.start_ns[events[0]]
        stream, node = device.stream[events], device.graph_node[events]
        if len(np.unique(stream)) == 1:
            parts = [np.arange(len(events))]
        elif (node > 0).all() and len(np.unique(node)) == len(node):
            parts = [np.argsort(node)]  # nodes are numbered in the order of capture
        else:
            parts = [np.flatnonzero(stream == number) for number in np.unique(stream)]
            parts.sort(key=lambda part: (-len(part), int(part[0])))
        streams = tuple(tuple(part.tolist()) for part in parts)
        symbols = tuple(device.name_id[events].tolist())
        replays.append(GraphReplay(launch, int(start), events, streams, symbols))
    return sorted(replays, key=lambda replay: replay.start_ns)


def aligned_replays(
    trace: KinetoTrace, replays: Sequence[GraphReplay], captures: Sequence[Capture]
) -> list[Alignment]:
    """Align each replay with its captured graph.

    Several graphs may fit equally, for example layers of a model or batch sizes. Then the graph is chosen
    from which the longest sequence of replays follows the order of capture, and these replays are aligned
    with the next graphs in that order. If several graphs remain, any of them is chosen if their operations
    are recorded equally. Otherwise it is the graph for a batch size that the named range around the launch
    states.
    """
    graphs = [graph for capture in captures for graph in capture.graphs]
    owner = [number for number, capture in enumerate(captures) for _ in capture.graphs]
    replays, launched = _with_symbols(trace, replays, graphs)
    matcher = _GraphMatcher(launched)
    candidates = [matcher.candidates(replay) for replay in replays]
    family = np.array([graph.family for graph in graphs], np.int64)
    has_next = np.append(family[1:] == family[:-1], np.zeros(min(len(family), 1), np.bool_))
    tie_breaker = _TieBreaker(captures, graphs, owner, trace)
    alignments: list[Alignment] = []
    previous, remaining = (
        -1,
        0,
    )  # last graph of the sequence that is followed, and its number of graphs to come
    # Count, for each candidate of each replay, the replays from this one on that follow the capture order.
    sequence_lengths: list[IntArray] = []
    next_numbers, next_lengths = np.empty(0, np.int64), np.empty(0, np.int64)
    for sequence_numbers in reversed(candidates):
        length = np.ones(len(sequence_numbers), np.int64)
        if len(sequence_numbers) and len(next_numbers):
            index = np.minimum(np.searchsorted(next_numbers, sequence_numbers + 1), len(next_numbers) - 1)
            follows = (next_numbers[index] == sequence_numbers + 1) & has_next[sequence_numbers]
            length += np.where(follows, next_lengths[index], 0)
        sequence_lengths.append(length)
        next_numbers, next_lengths = sequence_numbers, length
    for replay, numbers, lengths in zip(replays, candidates, sequence_lengths[::-1], strict=True):
        if remaining:
            chosen, remaining = previous + 1, remaining - 1
        else:
            longest = int(lengths.max(initial=0))
            chosen = tie_breaker.choose(replay, numbers[lengths == longest])
            remaining = longest - 1 if chosen >= 0 else 0
        previous = chosen
        place = np.full(len(replay.events), -1, np.int64)
        checked = np.zeros(len(replay.events), np.bool_)
        if chosen >= 0:
            symbols = np.array(launched[chosen], np.int64)
            for stream, launches in zip(
                replay.streams, matcher.launches(replay, launched[chosen]), strict=True
            ):
                place[list(stream)] = launches
            checked = (place >= 0) & (symbols[place] != UNNAMED)
        capture = owner[chosen] if chosen >= 0 else -1
        is_ambiguous = chosen < 0 and len(numbers) > 0
        alignments.append(Alignment(replay, capture, chosen, place, checked, is_ambiguous))
    return alignments


def _with_symbols(
    trace: KinetoTrace, replays: Sequence[GraphReplay], graphs: Sequence[CapturedGraph]
) -> tuple[list[GraphReplay], list[tuple[int, ...]]]:
    """Return the replays, and the launches of each graph, with kernel names replaced by numbers (symbols).
    Equal numbers on both sides mean the same kernel.
    """
    names = {row: canonical_name(trace.strings[row]) for replay in replays for row in set(replay.symbols)}
    replayed, captured = kernel_symbols(names.values(), (name for graph in graphs for name in graph.name))
    symbol_of_category: dict[int, int] = {}
    for row in np.unique(trace.device.category_id).tolist():
        category = trace.strings[row]
        is_copy, is_fill = "memcpy" in category, "memset" in category
        symbol_of_category[row] = COPY if is_copy else FILL if is_fill else UNNAMED
    numbered: list[GraphReplay] = []
    for replay in replays:
        categories: list[int] = trace.device.category_id[replay.events].tolist()
        symbols = tuple(
            symbol_of_category[category] if symbol_of_category[category] >= 0 else replayed[names[row]]
            for row, category in zip(replay.symbols, categories, strict=True)
        )
        numbered.append(replace(replay, symbols=symbols))
    launched = [
        tuple(
            kind if kind in {COPY, FILL} else captured[name]
            for kind, name in zip(graph.kind, graph.name, strict=True)
        )
        for graph in graphs
    ]
    return numbered, launched


def _match_stream(
    stream: tuple[int, ...], launched: tuple[int, ...], *, by_order: bool
) -> list[tuple[int, int]]:
    """Return pairs of indices (event of a stream, launch) with the same kernel.

    With ``by_order``, launches without a name are matched by order, too: between two matched pairs, if there
    are as many such launches as unmatched events.
    """
    if stream == launched and UNNAMED not in launched:
        return [(index, index) for index in range(len(stream))]
    distinct = [symbol if symbol >= 0 else -2 - index for index, symbol in enumerate(launched)]
    by_name = common_order([max(symbol, UNNAMED) for symbol in stream], distinct)
    if not by_order or UNNAMED not in launched:
        return by_name
    pairs: list[tuple[int, int]] = []
    last_event, last_launch = -1, -1
    for event, launch in [*by_name, (len(stream), len(launched))]:
        events, launches = range(last_event + 1, event), range(last_launch + 1, launch)
        is_unnamed = all(launched[index] == UNNAMED for index in launches)
        if is_unnamed and all(stream[index] > FILL for index in events) and len(events) == len(launches):
            pairs.extend(zip(events, launches, strict=True))
        if event < len(stream) and launch < len(launched):
            pairs.append((event, launch))
        last_event, last_launch = event, launch
    return pairs


def _fit(aligned: int, events: int, launches: int, *, is_cut: bool) -> float:
    """Return how well a replay fits a captured graph, 0..1; 0 below the minimum."""
    if is_cut and events >= _MIN_EVENTS_OF_CUT and aligned >= _MIN_FIT_OF_CUT * events:
        return aligned / events
    share = 2 * aligned / (events + launches) if events + launches else 0.0
    return share if share >= _MIN_FIT else 0.0


@dataclass(slots=True)
class _GraphMatcher:
    """Search for the captured graphs that fit a replay best. Equal replays and equal graphs are compared
    once.
    """

    launched: list[tuple[int, ...]]
    equal_graphs: dict[tuple[int, ...], list[int]] = field(default_factory=dict[tuple[int, ...], list[int]])
    counts: dict[tuple[int, ...], Counter[int]] = field(default_factory=dict[tuple[int, ...], Counter[int]])
    best: dict[object, IntArray] = field(default_factory=dict[object, IntArray])
    matched: dict[object, tuple[IntArray, ...]] = field(default_factory=dict[object, tuple[IntArray, ...]])

    def __post_init__(self) -> None:
        for number, symbols in enumerate(self.launched):
            self.equal_graphs.setdefault(symbols, []).append(number)
        self.counts = {symbols: Counter(symbols) for symbols in self.equal_graphs}

    def launches(self, replay: GraphReplay, launched: tuple[int, ...]) -> tuple[IntArray, ...]:
        """Return the index of the launch that corresponds to each event, stream by stream (-1: none).

        ``launched`` are the kernel symbols of the launches of a captured graph. Each launch is used at most
        once.
        """
        streams = replay.signature
        key = (streams, launched)
        if key not in self.matched:
            free = list(range(len(launched)))
            launches: list[IntArray] = []
            for stream in streams:
                symbols = tuple(launched[launch] for launch in free)
                pairs = _match_stream(stream, symbols, by_order=len(streams) == 1)
                launch_of_event = np.full(len(stream), -1, np.int64)
                for event, index in pairs:
                    launch_of_event[event] = free[index]
                used = {index for _, index in pairs}
                free = [launch for index, launch in enumerate(free) if index not in used]
                launches.append(launch_of_event)
            self.matched[key] = tuple(launches)
        return self.matched[key]

    def candidates(self, replay: GraphReplay) -> IntArray:
        """Return the numbers of the captured graphs that fit a replay best, in ascending order; none if no
        graph fits.
        """
        is_cut = replay.launch < 0
        key = (replay.signature, is_cut)
        if key not in self.best:
            symbols, num_events = Counter(replay.symbols), len(replay.events)
            bounds: list[tuple[float, tuple[int, ...]]] = []
            for launched, counts in self.counts.items():
                shared = (symbols & counts).total() + counts[UNNAMED]
                shared = min(shared, num_events, len(launched))
                bounds.append((_fit(shared, num_events, len(launched), is_cut=is_cut), launched))
            bounds.sort(key=lambda item: -item[0])
            best, numbers = 0.0, list[int]()
            for bound, launched in bounds:
                if bound < best or not bound:
                    break
                aligned = sum(int((launches >= 0).sum()) for launches in self.launches(replay, launched))
                fit = _fit(aligned, num_events, len(launched), is_cut=is_cut)
                if fit > best:
                    best, numbers = fit, []
                if fit and fit == best:
                    numbers.extend(self.equal_graphs[launched])
            self.best[key] = np.array(sorted(numbers), np.int64)
        return self.best[key]


class _TieBreaker:
    """Choice between several captured graphs that match a replay equally well."""

    def __init__(
        self,
        captures: Sequence[Capture],
        graphs: Sequence[CapturedGraph],
        owner: Sequence[int],
        trace: KinetoTrace,
    ) -> None:
        self.captures, self.graphs, self.owner, self.trace = captures, graphs, owner, trace
        self.number_of_description: dict[object, int] = {}
        self.description = np.full(len(graphs), -1, np.int64)

    def choose(self, replay: GraphReplay, tied: IntArray) -> int:
        """Return the number of the chosen graph; -1 if none matches, or if several different graphs match
        equally.
        """
        if not len(tied):
            return -1
        if self._are_equal(tied):
            return int(tied[0])
        note = self.trace.annotation
        around = (note.start_ns <= replay.start_ns) & (note.end_ns > replay.start_ns)
        names = (self.trace.strings[row] for row in note.name_id[around].tolist())
        stated = {number for name in names for number in numbers_in(name)}  # ``step[DECODE bs=32]``
        numbers: list[int] = tied.tolist()
        sized = [number for number in numbers if self.graphs[number].numbers & stated]
        return sized[0] if sized and self._are_equal(np.array(sized)) else -1

    def _are_equal(self, numbers: IntArray) -> bool:
        """Return True if the operations of these graphs have the same names, shapes and types."""
        new: list[int] = numbers[self.description[numbers] < 0].tolist()
        for number in new:
            description = self.captures[self.owner[number]].described(self.graphs[number])
            index = self.number_of_description.setdefault(description, len(self.number_of_description))
            self.description[number] = index
        return bool((self.description[numbers] == self.description[numbers[0]]).all())
