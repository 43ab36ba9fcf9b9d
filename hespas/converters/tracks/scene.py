"""Slices on tracks of processes, with arrows between them: columns, whatever they were made of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.converters.linking import overlapping
from hespas.graph import Diagnostics, OpClass, Profile
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray, StringTable, distinct_rows
from hespas.graph.errors import InvariantError

__all__ = [
    "HOST_CATEGORY",
    "Argument",
    "Chunk",
    "End",
    "Flows",
    "Label",
    "Lanes",
    "Scene",
    "TextColumn",
    "Tracks",
    "is_whole",
    "lanes_of",
    "scene_of_profile",
    "shown",
    "shown_ns",
    "side_by_side",
    "slices_of_events",
]


@dataclass(frozen=True, slots=True, eq=False)
class TextColumn:
    """A text per slice: ``rows`` of ``texts``, whose row 0 is the empty text."""

    rows: SmallIntArray
    texts: StringTable | tuple[str, ...]


Argument = TextColumn | FloatArray
"""What is told of a slice beside its name: a text (empty: nothing) or a number (NaN: nothing)."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Tracks:
    """Slices as columns of shape ``(slices,)``, sorted by track, then by start, then the longest first.

    ``processes`` are names; ``track_process`` and ``track_name`` describe the tracks, ``track`` the track of
    each slice. Times are ns (they may have fractions and may be negative).
    """

    processes: tuple[str, ...]
    track_process: tuple[int, ...]
    track_name: tuple[str, ...]
    track: SmallIntArray
    name: TextColumn
    category: TextColumn
    start_ns: FloatArray
    duration_ns: FloatArray
    arguments: Mapping[str, Argument]

    def __post_init__(self) -> None:
        """Check that all columns have one row per slice."""
        columns: list[Argument] = [self.name, self.category, self.start_ns, self.duration_ns]
        columns += self.arguments.values()
        lengths = [len(each.rows) if isinstance(each, TextColumn) else len(each) for each in columns]
        if any(length != len(self.track) for length in lengths):
            raise InvariantError(f"tracks: a column does not have {len(self.track)} rows")

    def __len__(self) -> int:
        return len(self.track)


@dataclass(frozen=True, slots=True, eq=False)
class Flows:
    """Arrows of shape ``(flows,)`` between slices, which are numbered through all parts of a scene.

    ``kind`` indexes ``kinds`` (``launch``, ``data``, ``control``, ``collective``, ``message``).
    """

    kinds: tuple[str, ...]
    kind: NDArray[np.int8]
    source: IntArray
    target: IntArray

    @classmethod
    def none(cls) -> Flows:
        """No arrows."""
        return cls((), np.empty(0, np.int8), np.empty(0, np.int64), np.empty(0, np.int64))

    @classmethod
    def of(cls, ends: Sequence[tuple[str, IntArray, IntArray]]) -> Flows:
        """Arrows from sources and targets by kind."""
        if not ends:
            return cls.none()
        kinds = tuple(dict.fromkeys(kind for kind, _, _ in ends))
        counts = [len(source) for _, source, _ in ends]
        codes = np.array([kinds.index(kind) for kind, _, _ in ends], np.int8)
        return cls(
            kinds,
            np.repeat(codes, counts),
            np.concatenate([source for _, source, _ in ends]).astype(np.int64, copy=False),
            np.concatenate([target for _, _, target in ends]).astype(np.int64, copy=False),
        )

    def __len__(self) -> int:
        return len(self.kind)


class Label(NamedTuple):
    """What is told of a slice; only arguments that say something."""

    name: str
    category: str
    arguments: tuple[tuple[str, str | float], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Some slices of one part in order, with what is told of each spelled once per distinct combination.

    ``first`` is the number of the first slice in the scene, ``index`` that of the part they are of, ``part``
    the slice of its columns; ``label`` says which of ``labels`` each slice has.
    """

    first: int
    index: int
    tracks: Tracks
    part: slice
    labels: tuple[Label, ...]
    label: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """Parts that are shown together, the arrows between them, and facts about all of it as text."""

    name: str
    parts: tuple[Tracks, ...]
    flows: Flows
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def first_slice(self) -> list[int]:
        """The number of the first slice of each part."""
        return list(accumulate(map(len, self.parts), initial=0))[:-1]

    @property
    def first_track(self) -> list[int]:
        """The number of the first track of each part, through all parts."""
        return list(accumulate((len(part.track_name) for part in self.parts), initial=0))[:-1]

    @property
    def first_process(self) -> list[int]:
        """The number of the first process of each part, through all parts."""
        return list(accumulate((len(part.processes) for part in self.parts), initial=0))[:-1]

    def chunks(self, rows: int) -> Iterator[Chunk]:
        """All slices, at most ``rows`` at a time; memory is that of one chunk."""
        for index, (first, tracks) in enumerate(zip(self.first_slice, self.parts, strict=True)):
            for start in range(0, len(tracks), rows):
                part = slice(start, min(start + rows, len(tracks)))
                labels, label = _labels(tracks, part)
                yield Chunk(first + start, index, tracks, part, labels, label)


def _labels(tracks: Tracks, part: slice) -> tuple[tuple[Label, ...], IntArray]:
    """The distinct combinations of name, category and arguments, and which each slice of ``part`` has."""
    columns: list[Argument] = [tracks.name, tracks.category, *tracks.arguments.values()]
    key = np.zeros(part.stop - part.start, np.int64)
    for column in columns:
        values = column.rows[part] if isinstance(column, TextColumn) else column[part]
        if (values == values[0]).all():
            continue  # it tells no two slices apart
        _, code = np.unique(values, return_inverse=True)
        _, key = np.unique(key * (int(code.max()) + 1) + code, return_inverse=True)
    _, example = np.unique(key, return_index=True)
    spelled = [_spelled(column, example + part.start) for column in columns]
    keys = tuple(tracks.arguments)
    labels: list[Label] = []
    for name, category, *rest in zip(*spelled, strict=True):
        stated = tuple((key, value) for key, value in zip(keys, rest, strict=True) if _is_stated(value))
        labels.append(Label(str(name), str(category), stated))
    return tuple(labels), key.astype(np.int64, copy=False)


def _is_stated(value: str | float) -> bool:
    return value != "" and value == value  # noqa: PLR0124 # NaN says nothing


def _spelled(column: Argument, places: IntArray) -> list[str] | list[float]:
    if not isinstance(column, TextColumn):
        numbers: list[float] = column[places].tolist()
        return numbers
    rows: list[int] = column.rows[places].tolist()
    texts = {row: shown(column.texts[row]) for row in set(rows)}
    return [texts[row] for row in rows]


def shown(text: str) -> str:
    """A text that UTF-8 can hold: halves of surrogate pairs are replaced."""
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def side_by_side(
    scenes: Sequence[tuple[str, Scene]], between: Sequence[tuple[str, IntArray, IntArray]] = ()
) -> Scene:
    """One scene of several; the label of each stands before the names of its processes. Arrows ``between``
    them are kinds, and the slices they join as numbered through all.
    """
    parts: list[Tracks] = []
    ends: list[tuple[str, IntArray, IntArray]] = []
    metadata: dict[str, str] = {}
    first = 0
    for label, scene in scenes:
        flows = scene.flows
        for code, kind in enumerate(flows.kinds):
            mine = flows.kind == code
            ends.append((kind, flows.source[mine] + first, flows.target[mine] + first))
        first += len(scene)
        parts.extend(_renamed(part, label) for part in scene.parts)
        metadata |= {f"{label}.{key}" if label else key: text for key, text in scene.metadata.items()}
    name = " and ".join(dict.fromkeys(scene.name for _, scene in scenes if scene.name))
    return Scene(name, tuple(parts), Flows.of([*ends, *between]), metadata)


def _renamed(tracks: Tracks, label: str) -> Tracks:
    if not label:
        return tracks
    return replace(tracks, processes=tuple(f"{label} {name}" for name in tracks.processes))


# --- Slices that run over each other, on lanes of their own: on one track of a viewer they must nest.
#
# Perfetto's viewer drops a complete slice that runs into the next one (its importer's statistic
# ``slice_drop_overlapping_complete_event``), be it by 1 ns. So times are shown in whole ns, rounded alike.

End = tuple[int, int, int]
"""When a slice ends, on which track, on which lane of it."""

_MOST_LANES = 128
"""Lanes that are looked at for a place; past them every slice that does not fit opens its own."""
_PS = 1000.0
_WHOLE_NS = 2.0**52
"""From here on floats hold whole numbers only."""


@dataclass(slots=True)
class Lanes:
    """Takes slices sorted by track and start, the longest first."""

    _track: int = -1
    _opened: list[list[float]] = field(default_factory=list[list[float]])

    def placed(
        self, tracks: Sequence[int], starts: Sequence[float], ends: Sequence[float]
    ) -> Iterator[tuple[int, list[End]]]:
        """The lane of each slice, and what has to end before it begins there."""
        for track, start, end in zip(tracks, starts, ends, strict=True):
            ended: list[End] = []
            if track != self._track:
                ended = self.rest()
                self._track, self._opened = track, [[]]
            lane = self._lane(start, end, ended)
            self._opened[lane].append(end)
            yield lane, ended

    def _lane(self, start: float, end: float, ended: list[End]) -> int:
        for lane, opened in enumerate(self._opened[:_MOST_LANES]):
            while opened and opened[-1] <= start:
                ended.append((int(opened.pop()), self._track, lane))
            if not opened or end <= opened[-1]:
                return lane
        self._opened.append([])
        return len(self._opened) - 1

    def rest(self) -> list[End]:
        """What is still open on the last track, inner slices first."""
        ended = [
            (int(end), self._track, lane)
            for lane, opened in enumerate(self._opened)
            for end in reversed(opened)
        ]
        self._opened = []
        return ended


def is_whole(start_ns: FloatArray, duration_ns: FloatArray) -> BoolArray:
    """Which slices :func:`shown_ns` tells exactly; an unknown duration is not."""
    whole: BoolArray = (np.floor(start_ns) == start_ns) & (np.floor(duration_ns) == duration_ns)
    return whole


def shown_ns(start_ns: FloatArray, duration_ns: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Start and length in whole ns, such that what ends before another starts, or inside it, does so still.

    What is whole stays exact at any size. An unknown duration is 0. Where starts are so late that all are
    whole, sums with them say less of a length than the length itself.
    """
    known_ns = np.nan_to_num(duration_ns, nan=0.0)
    begin_ns = _floor(start_ns)
    length_ns = np.where(
        np.abs(start_ns) < _WHOLE_NS, _floor(start_ns + known_ns) - begin_ns, _floor(known_ns)
    )
    return begin_ns, np.where(is_whole(start_ns, known_ns), known_ns, length_ns)


def _floor(times_ns: FloatArray) -> FloatArray:
    """Rounded down, but for the last bits of sums. It never changes the order of two times."""
    whole_ns = np.floor(times_ns)
    partial_ns = np.where(whole_ns == times_ns, 0.0, times_ns)
    return np.where(whole_ns == times_ns, whole_ns, np.floor(np.rint(partial_ns * _PS) / _PS))


def lanes_of(tracks: Tracks) -> SmallIntArray:
    """The lane of each slice on its track, 0 for the first. O(slices log slices)."""
    lanes = np.zeros(len(tracks), np.int32)
    if not len(tracks):
        return lanes
    begin_ns, length_ns = shown_ns(tracks.start_ns, tracks.duration_ns)
    end_ns = begin_ns + np.maximum(length_ns, 0.0)
    crowded = np.unique(tracks.track[overlapping(tracks.track, begin_ns, end_ns - begin_ns)])
    rows = np.flatnonzero(np.isin(tracks.track, crowded))
    placed = Lanes().placed(tracks.track[rows].tolist(), begin_ns[rows].tolist(), end_ns[rows].tolist())
    lanes[rows] = [lane for lane, _ in placed]
    return lanes


# --- The tracks of a measured profile.

HOST_CATEGORY = "host operation"
"""The category of slices that are no device work."""
_HALF_PAIR = re.compile(rb"\xed[\xa0-\xbf]")
_CLASSES = tuple("" if member is OpClass.UNKNOWN else member.name.lower() for member in OpClass)
_NOWHERE = -1


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """Slices in the order of a scene: ``event`` is the row each had, ``track`` its track."""

    event: IntArray
    track: SmallIntArray

    @classmethod
    def of(cls, track: IntArray, start_ns: FloatArray, duration_ns: FloatArray) -> _Placed:
        """By track, then by start, then the longest first; what has no start is left out."""
        known = np.flatnonzero(~np.isnan(start_ns))
        order = np.lexsort((-duration_ns[known], start_ns[known], track[known]))
        event = known[order]
        return cls(event, track[event].astype(np.int32))

    def place_of(self, rows: int) -> IntArray:
        """The slice of each row, -1 where it was left out."""
        place = np.full(rows, _NOWHERE, np.int64)
        place[self.event] = np.arange(len(self.event))
        return place


def scene_of_profile(profile: Profile, diagnostics: Diagnostics, *, arrows: bool) -> Scene:
    """Device tracks, then those of the host; an arrow from each host operation to the work it caused."""
    _report(profile, diagnostics)
    processes, process = _processes(profile)
    tracks, track = distinct_rows(process, profile.stream)
    placed = _Placed.of(track, profile.start_ns, profile.duration_ns)
    device = Tracks(
        processes=processes,
        track_process=tuple(owner for owner, _ in tracks),
        track_name=tuple(f"stream {stream}" if stream >= 0 else "no stream" for _, stream in tracks),
        track=placed.track,
        name=_names(profile, placed.event),
        category=TextColumn(profile.category_row[placed.event], profile.strings),
        start_ns=profile.start_ns[placed.event],
        duration_ns=profile.duration_ns[placed.event],
        arguments=_arguments(profile, placed.event),
    )
    if not len(profile.host):
        return Scene(profile.name, (device,), Flows.none(), profile.metadata)
    host, host_placed = _host(profile)
    flows = Flows.none()
    if arrows:
        caused = np.flatnonzero(profile.host_event >= 0)
        source = host_placed.place_of(len(profile.host))[profile.host_event[caused]]
        target = placed.place_of(len(profile))[caused]
        drawn = (source >= 0) & (target >= 0)
        flows = Flows.of([("launch", source[drawn] + len(device), target[drawn])])
    return Scene(profile.name, (device, host), flows, profile.metadata)


def slices_of_events(profile: Profile) -> IntArray:
    """Where each event stands in the scene of its profile, shape ``(events,)``; -1 for one without start."""
    _, process = _processes(profile)
    _, track = distinct_rows(process, profile.stream)
    return _Placed.of(track, profile.start_ns, profile.duration_ns).place_of(len(profile))


def _report(profile: Profile, diagnostics: Diagnostics) -> None:
    """Say what a viewer will not show, or shows in another way."""
    findings = diagnostics.about(profile.name, "tracks")
    homeless = np.isnan(profile.start_ns)
    total_ns = float(np.nansum(profile.duration_ns[homeless]))
    message = f"events have no start and stand on no track: {total_ns:,.0f} ns of device time"
    findings.warning("no-start", message, int(homeless.sum()))
    negative = "events end before they start; viewers do not draw them"
    findings.warning("negative-duration", negative, int((profile.duration_ns < 0).sum()))
    halves = len(_HALF_PAIR.findall(bytes(profile.strings.buffer)))
    findings.warning("invalid-text", "halves of surrogate pairs are no text and are replaced", halves)


def _processes(profile: Profile) -> tuple[tuple[str, ...], IntArray]:
    """One process for each rank and device that has events: their names, and that of each event."""
    pairs, process = distinct_rows(profile.rank, profile.device_index)
    return tuple(_process_name(profile, rank, device) for rank, device in pairs), process


def _process_name(profile: Profile, rank: int, device: int) -> str:
    name = profile.devices[device] if 0 <= device < len(profile.devices) else ""
    who = f"rank {rank}" if rank >= 0 else "unknown rank"
    return f"{who}: {name}" if name else who


def _names(profile: Profile, event: IntArray) -> TextColumn:
    """The kernel, else the operation, else the category."""
    kernel, op = profile.kernel_row[event], profile.op_row[event]
    return TextColumn(
        np.where(kernel > 0, kernel, np.where(op > 0, op, profile.category_row[event])), profile.strings
    )


def _arguments(profile: Profile, event: IntArray) -> Mapping[str, Argument]:
    """What else is known; ``kernel`` only where the operation is named alike, as the name says it."""
    op = profile.op_row[event]
    alike = (profile.kernel_row[event] == op) & (op > 0)
    texts: dict[str, NDArray[np.int32]] = {
        "op": op,
        "kernel": np.where(alike, op, 0).astype(np.int32),
        "module": profile.module_row[event],
        "shapes": profile.shapes_row[event],
        "dtype": profile.dtype_row[event],
    }
    numbers: dict[str, FloatArray] = {
        "run": np.where(profile.run[event] >= 0, profile.run[event], np.nan),
        "bytes": profile.bytes_moved[event],
        "repeats": np.where(profile.repeats[event] == 1, np.nan, profile.repeats[event]),
        "spread_ns": profile.spread_ns[event],
    }
    arguments: dict[str, Argument] = {
        key: TextColumn(rows, profile.strings) for key, rows in texts.items() if rows.any()
    }
    if profile.op_class[event].any():
        arguments["op_class"] = TextColumn(profile.op_class[event].astype(np.int32), _CLASSES)
    return arguments | {key: column for key, column in numbers.items() if not np.isnan(column).all()}


def _host(profile: Profile) -> tuple[Tracks, _Placed]:
    """The threads of the host, of the one process that there is or of one of their own."""
    host = profile.host
    threads, track = np.unique(host.thread_row, return_inverse=True)
    placed = _Placed.of(track.reshape(-1).astype(np.int64), host.start_ns, host.duration_ns)
    columns = {
        "shapes": host.shapes_row,
        "dtype": host.dtype_row,
        "strides": host.strides_row,
        "values": host.values_row,
    }
    texts = {key: rows[placed.event] for key, rows in columns.items()}
    ranks = np.unique(profile.rank)
    owner = f"rank {int(ranks[0])} host" if len(ranks) == 1 and int(ranks[0]) >= 0 else "host"
    tracks = Tracks(
        processes=(owner,),
        track_process=(0,) * len(threads),
        track_name=tuple(f"thread {profile.strings[row]}".rstrip() for row in threads.tolist()),
        track=placed.track,
        name=TextColumn(host.name_row[placed.event], profile.strings),
        category=TextColumn(np.ones(len(placed.event), np.int32), ("", HOST_CATEGORY)),
        start_ns=host.start_ns[placed.event],
        duration_ns=host.duration_ns[placed.event],
        arguments={key: TextColumn(rows, profile.strings) for key, rows in texts.items() if rows.any()},
    )
    return tracks, placed
