"""Replays of captured graphs aligned with their captures: which launch each replayed kernel was captured at.

All work of one replay carries the correlation of its one graph launch. Along a stream it is in the order of
the capture. So each stream of a replay is laid beside the launches of a captured graph, by name, and
realigned where one of them has something of its own; a replay is of the captured graph it fits best. Where
launches state no names (CUDA's do not), what lies between two sure places is aligned by order if it is as
long on both sides. What fits nothing, or several captures of other shapes equally, is not aligned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hespas.converters.common_order import common_order
from hespas.converters.pytorch.captured import Capture, Segment, launches_graphs, numbers_in
from hespas.converters.pytorch.events import KinetoTrace
from hespas.converters.pytorch.kernel_names import COPY, FILL, UNNAMED, canonical_name, kernel_symbols
from hespas.converters.pytorch.kernels import Links
from hespas.graph.columns import BoolArray, IntArray, at_rows

__all__ = ["Alignment", "Replay", "aligned_replays", "replays_of"]

_LEAST_FIT = 0.6
"""A replay and a captured graph have at least this share of both in common."""
_LEAST_OF_CUT = 0.9
_LEAST_EVENTS_OF_CUT = 8
"""Of a replay that began before the window: how much of what is left fits, and how much that is at least."""


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """The work of one launch of a graph. ``events`` are rows of the device's; ``streams`` their places in the
    order of each stream, or of the graph's nodes where the trace states those; ``symbols`` what each is.
    ``launch`` is the row of the call (-1: before the window).
    """

    launch: int
    start_ns: int
    events: IntArray
    streams: tuple[tuple[int, ...], ...]
    symbols: tuple[int, ...]

    @property
    def on_several_streams(self) -> BoolArray:
        """Which events are of kernels that run on several streams of this replay."""
        found = [set(part) for part in self.signature]
        common = {symbol for part in found for symbol in part if sum(symbol in each for each in found) > 1}
        return np.isin(self.symbols, list(common))

    @property
    def signature(self) -> tuple[tuple[int, ...], ...]:
        """What ran, in order, stream by stream: equal ones align alike."""
        return tuple(tuple(self.symbols[place] for place in stream) for stream in self.streams)


class Alignment(NamedTuple):
    """One replay beside the captured graph it is of (-1: none; ``ambiguous``: of several of other shapes).

    ``place`` is the launch of the segment for each event of the replay (-1: none); ``checked`` says of which
    events the names were compared.
    """

    replay: Replay
    capture: int
    segment: int
    place: IntArray
    checked: BoolArray
    ambiguous: bool


def replays_of(trace: KinetoTrace, links: Links) -> list[Replay]:
    """The replays of graphs in a trace, in order; symbols are still rows of names. A single event without a
    record of its launch is none.
    """
    device = trace.device
    of_graph = at_rows(launches_graphs(trace), links.launch, False)
    orphan = (links.launch < 0) & (device.correlation >= 0)
    key = np.where(of_graph, links.launch, len(trace.launch) + device.correlation)
    rows = np.flatnonzero(of_graph | orphan)
    if not len(rows):
        return []
    rows = rows[np.lexsort((device.start_ns[rows], key[rows]))]
    bounds = np.flatnonzero(np.diff(key[rows], prepend=-1))
    found: list[Replay] = []
    for first, last in zip(bounds.tolist(), [*bounds[1:].tolist(), len(rows)], strict=True):
        events = rows[first:last]
        launch = int(links.launch[events[0]])
        if launch < 0 and len(events) < 2:
            continue
        start = trace.launch.start_ns[launch] if launch >= 0 else device.start_ns[events[0]]
        symbols = tuple(device.name_row[events].tolist())
        found.append(Replay(launch, int(start), events, _streams(trace, events), symbols))
    return sorted(found, key=lambda each: each.start_ns)


def _streams(trace: KinetoTrace, events: IntArray) -> tuple[tuple[int, ...], ...]:
    """Places of events in order: of each stream, those with most events first; of all streams together where
    every event states its node, which are numbered as they were captured.
    """
    stream, node = trace.device.stream[events], trace.device.graph_node[events]
    if len(np.unique(stream)) == 1:
        return (tuple(range(len(events))),)
    if (node > 0).all() and len(np.unique(node)) == len(node):
        return (tuple(np.argsort(node).tolist()),)
    parts = [np.flatnonzero(stream == each) for each in np.unique(stream)]
    parts.sort(key=lambda part: (-len(part), int(part[0])))
    return tuple(tuple(part.tolist()) for part in parts)


def _with_symbols(
    trace: KinetoTrace, replays: Sequence[Replay], segments: Sequence[Segment]
) -> tuple[list[Replay], list[tuple[int, ...]]]:
    """Replays and segments whose events and launches have one numbering of kernels."""
    names = {row: canonical_name(trace.strings[row]) for each in replays for row in set(each.symbols)}
    category = {row: trace.strings[row] for row in np.unique(trace.device.category_row).tolist()}
    ours, theirs = kernel_symbols(names.values(), (name for each in segments for name in each.name))
    found: list[Replay] = []
    for each in replays:
        categories: list[int] = trace.device.category_row[each.events].tolist()
        symbols = tuple(
            _moves(category[kind]) if _moves(category[kind]) >= 0 else ours[names[row]]
            for row, kind in zip(each.symbols, categories, strict=True)
        )
        found.append(Replay(each.launch, each.start_ns, each.events, each.streams, symbols))
    launched = [
        tuple(
            kind if kind in {COPY, FILL} else theirs[name]
            for kind, name in zip(each.kind, each.name, strict=True)
        )
        for each in segments
    ]
    return found, launched


def _moves(category: str) -> int:
    """``COPY`` or ``FILL`` by the profiler's category, else ``UNNAMED``."""
    return COPY if "memcpy" in category else FILL if "memset" in category else UNNAMED


# One replay beside one captured graph.


def _beside(streams: tuple[tuple[int, ...], ...], launched: tuple[int, ...]) -> tuple[IntArray, ...]:
    """Per stream the launch of each event, -1 for none; no launch twice."""
    free = list(range(len(launched)))
    found: list[IntArray] = []
    for stream in streams:
        rest = tuple(launched[place] for place in free)
        pairs = _pairs(stream, rest, by_order=len(streams) == 1)
        place = np.full(len(stream), -1, np.int64)
        for ours, theirs in pairs:
            place[ours] = free[theirs]
        taken = {theirs for _, theirs in pairs}
        free = [launch for at, launch in enumerate(free) if at not in taken]
        found.append(place)
    return tuple(found)


def _pairs(stream: tuple[int, ...], launched: tuple[int, ...], *, by_order: bool) -> list[tuple[int, int]]:
    """Events and launches that belong together. Launches without a name are matched ``by_order`` between
    those that are sure, where both sides have as many.
    """
    if stream == launched and UNNAMED not in launched:
        return [(place, place) for place in range(len(stream))]
    apart = [symbol if symbol >= 0 else -2 - at for at, symbol in enumerate(launched)]
    sure = common_order([max(symbol, UNNAMED) for symbol in stream], apart)
    if not by_order or UNNAMED not in launched:
        return sure
    found: list[tuple[int, int]] = []
    before = (-1, -1)
    for ours, theirs in [*sure, (len(stream), len(launched))]:
        mine, other = range(before[0] + 1, ours), range(before[1] + 1, theirs)
        kernels = all(launched[at] == UNNAMED for at in other) and all(stream[at] > FILL for at in mine)
        if kernels and len(mine) == len(other):
            found.extend(zip(mine, other, strict=True))
        if ours < len(stream) and theirs < len(launched):
            found.append((ours, theirs))
        before = (ours, theirs)
    return found


def _fit(aligned: int, events: int, launches: int, *, cut: bool) -> float:
    """How well a replay fits a captured graph, 0..1; 0 for less than enough."""
    if cut and events >= _LEAST_EVENTS_OF_CUT and aligned >= _LEAST_OF_CUT * events:
        return aligned / events
    both = 2 * aligned / (events + launches) if events + launches else 0.0
    return both if both >= _LEAST_FIT else 0.0


@dataclass(slots=True)
class _Fits:
    """Which captured graphs each replay fits best; equal replays and equal graphs are compared once."""

    launched: list[tuple[int, ...]]
    alike: dict[tuple[int, ...], list[int]] = field(default_factory=dict[tuple[int, ...], list[int]])
    counts: dict[tuple[int, ...], Counter[int]] = field(default_factory=dict[tuple[int, ...], Counter[int]])
    best: dict[object, IntArray] = field(default_factory=dict[object, IntArray])
    places: dict[object, tuple[IntArray, ...]] = field(default_factory=dict[object, tuple[IntArray, ...]])

    def __post_init__(self) -> None:
        for number, symbols in enumerate(self.launched):
            self.alike.setdefault(symbols, []).append(number)
        self.counts = {symbols: Counter(symbols) for symbols in self.alike}

    def beside(self, replay: Replay, symbols: tuple[int, ...]) -> tuple[IntArray, ...]:
        """As :func:`_beside`, remembered."""
        key = (replay.signature, symbols)
        if key not in self.places:
            self.places[key] = _beside(replay.signature, symbols)
        return self.places[key]

    def candidates(self, replay: Replay) -> IntArray:
        """The numbers of the graphs that fit best, in order; none where none does."""
        cut = replay.launch < 0
        key = (replay.signature, cut)
        if key not in self.best:
            self.best[key] = self._found(replay, cut=cut)
        return self.best[key]

    def _found(self, replay: Replay, *, cut: bool) -> IntArray:
        mine, events = Counter(replay.symbols), len(replay.events)
        bounds: list[tuple[float, tuple[int, ...]]] = []
        for symbols, theirs in self.counts.items():
            shared = min((mine & theirs).total() + theirs[UNNAMED], events, len(symbols))
            bounds.append((_fit(shared, events, len(symbols), cut=cut), symbols))
        bounds.sort(key=lambda each: -each[0])
        best, chosen = 0.0, list[int]()
        for bound, symbols in bounds:
            if bound < best or not bound:
                break
            aligned = sum(int((place >= 0).sum()) for place in self.beside(replay, symbols))
            fit = _fit(aligned, events, len(symbols), cut=cut)
            if fit > best:
                best, chosen = fit, []
            if fit and fit == best:
                chosen.extend(self.alike[symbols])
        return np.array(sorted(chosen), np.int64)


# Which of several captured graphs that fit alike: layers of a model, or batch sizes.


def aligned_replays(
    trace: KinetoTrace, replays: Sequence[Replay], captures: Sequence[Capture]
) -> list[Alignment]:
    """Each replay beside the captured graph that it is of. Of several that fit alike it is the one from which
    most of the replays behind it follow the order of the capture, and those are of the graphs behind that
    one. Of several such it is any, where the operations behind them are the same; else the one for a size
    that the named range around the launch states.
    """
    segments = [segment for capture in captures for segment in capture.segments]
    owner = [number for number, capture in enumerate(captures) for _ in capture.segments]
    replays, launched = _with_symbols(trace, replays, segments)
    fits = _Fits(launched)
    candidates = [fits.candidates(replay) for replay in replays]
    family = np.array([each.family for each in segments], np.int64)
    follows = np.append(family[1:] == family[:-1], np.zeros(min(len(family), 1), np.bool_))
    choice = _Choice(captures, segments, owner, trace)
    found: list[Alignment] = []
    before, left = -1, 0  # of the run that is being followed: its last graph, and how many are to come
    for replay, these, runs in zip(replays, candidates, _runs(candidates, follows), strict=True):
        if left:
            chosen, left = before + 1, left - 1
        else:
            longest = int(runs.max(initial=0))
            chosen = choice.of(replay, these[runs == longest])
            left = longest - 1 if chosen >= 0 else 0
        before = chosen
        place = np.full(len(replay.events), -1, np.int64)
        checked = np.zeros(len(replay.events), np.bool_)
        if chosen >= 0:
            symbols = np.array(launched[chosen], np.int64)
            for stream, places in zip(replay.streams, fits.beside(replay, launched[chosen]), strict=True):
                place[list(stream)] = places
            checked = (place >= 0) & (symbols[place] != UNNAMED)
        capture = owner[chosen] if chosen >= 0 else -1
        found.append(Alignment(replay, capture, chosen, place, checked, chosen < 0 and len(these) > 0))
    return found


def _runs(candidates: Sequence[IntArray], follows: BoolArray) -> list[IntArray]:
    """For each candidate of each replay, how many replays from this one on follow the order of the capture;
    ``follows`` says of which graphs the next one is of the same family.
    """
    found: list[IntArray] = []
    after, behind = np.empty(0, np.int64), np.empty(0, np.int64)
    for these in reversed(candidates):
        runs = np.ones(len(these), np.int64)
        if len(these) and len(after):
            at = np.minimum(np.searchsorted(after, these + 1), len(after) - 1)
            runs += np.where((after[at] == these + 1) & follows[these], behind[at], 0)
        found.append(runs)
        after, behind = these, runs
    return found[::-1]


class _Choice:
    """Chooses among graphs that fit a replay alike."""

    def __init__(
        self,
        captures: Sequence[Capture],
        segments: Sequence[Segment],
        owner: Sequence[int],
        trace: KinetoTrace,
    ) -> None:
        self.captures, self.segments, self.owner, self.trace = captures, segments, owner, trace
        self.kinds: dict[object, int] = {}
        self.kind = np.full(len(segments), -1, np.int64)

    def of(self, replay: Replay, tied: IntArray) -> int:
        """The number of the graph, -1 where none fits, or nobody can say which."""
        if not len(tied):
            return -1
        if self._agree(tied):
            return int(tied[0])
        stated = self._stated(replay)
        numbers: list[int] = tied.tolist()
        sized = [number for number in numbers if self.segments[number].numbers & stated]
        return sized[0] if sized and self._agree(np.array(sized)) else -1

    def _agree(self, numbers: IntArray) -> bool:
        """Whether the operations behind some graphs are recorded alike."""
        new: list[int] = numbers[self.kind[numbers] < 0].tolist()
        for number in new:
            text = self.captures[self.owner[number]].described(self.segments[number])
            self.kind[number] = self.kinds.setdefault(text, len(self.kinds))
        return bool((self.kind[numbers] == self.kind[numbers[0]]).all())

    def _stated(self, replay: Replay) -> frozenset[int]:
        """Numbers in the names of the ranges around a launch: ``step[DECODE bs=32]``."""
        note = self.trace.annotation
        around = (note.start_ns <= replay.start_ns) & (note.end_ns > replay.start_ns)
        names = (self.trace.strings[row] for row in note.name_row[around].tolist())
        return frozenset(number for name in names for number in numbers_in(name))
