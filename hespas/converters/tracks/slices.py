"""Slices on tracks of processes, with flow arrows between them, as columns; and the tracks of a profile.

Slices of one track must nest, so overlapping slices are put on lanes of their own. Perfetto's viewer drops a
complete slice that overlaps the next one, even by 1 ns (its importer counts them as
``slice_drop_overlapping_complete_event``). So times are rounded to whole ns without changing their order.
"""

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
    "Flows",
    "LaneAssigner",
    "SliceChunk",
    "SliceEnd",
    "SliceLabel",
    "TextColumn",
    "TrackSet",
    "Tracks",
    "is_whole",
    "join_track_sets",
    "lanes_of",
    "shown",
    "shown_ns",
    "slices_of_events",
    "tracks_of_profile",
]


@dataclass(frozen=True, slots=True, eq=False)
class TextColumn:
    """Column with a text per slice: ``rows`` are indices of ``texts``, in which index 0 is the empty text."""

    rows: SmallIntArray
    texts: StringTable | tuple[str, ...]


Argument = TextColumn | FloatArray
"""An argument of a slice: a text (empty: none) or a number (NaN: none)."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Tracks:
    """Slices as columns of shape ``(slices,)``, sorted by track, then by start, longest first.

    ``processes`` are process names. ``track_process`` and ``track_name`` are the process and the name of each
    track. ``track`` is the track of each slice. Times are ns; they may have fractions and may be negative.
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
        lengths = [len(column.rows) if isinstance(column, TextColumn) else len(column) for column in columns]
        if any(length != len(self.track) for length in lengths):
            raise InvariantError(f"tracks: a column does not have {len(self.track)} rows")

    def __len__(self) -> int:
        return len(self.track)


@dataclass(frozen=True, slots=True, eq=False)
class Flows:
    """Arrows between slices, as columns of shape ``(flows,)``. Slices are numbered over all parts of a track
    set.

    ``kind`` indexes ``kinds`` (``launch``, ``data``, ``control``, ``collective``, ``message``).
    """

    kinds: tuple[str, ...]
    kind: NDArray[np.int8]
    source: IntArray
    target: IntArray

    @classmethod
    def none(cls) -> Flows:
        """Return an empty set of arrows."""
        return cls((), np.empty(0, np.int8), np.empty(0, np.int64), np.empty(0, np.int64))

    @classmethod
    def of(cls, ends: Sequence[tuple[str, IntArray, IntArray]]) -> Flows:
        """Return arrows from a list of (kind, source slices, target slices)."""
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


class SliceLabel(NamedTuple):
    """Name, category and arguments of a slice; unknown arguments are omitted."""

    name: str
    category: str
    arguments: tuple[tuple[str, str | float], ...]


@dataclass(frozen=True, slots=True, eq=False)
class SliceChunk:
    """Consecutive slices of one part of a track set. Labels are built once per distinct combination.

    ``first`` is the number of the first slice in the track set. ``index`` is the number of the part, and
    ``part`` selects the chunk in the columns of the part. ``label`` is the index of each slice's label in
    ``labels``.
    """

    first: int
    index: int
    tracks: Tracks
    part: slice
    labels: tuple[SliceLabel, ...]
    label: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class TrackSet:
    """Set of parts (such as ranks) that a viewer shows together. ``flows`` are the arrows between all slices,
    and ``metadata`` texts about the whole set.
    """

    name: str
    parts: tuple[Tracks, ...]
    flows: Flows
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def first_slice(self) -> list[int]:
        """Return the number of the first slice of each part, counted through all parts."""
        return list(accumulate(map(len, self.parts), initial=0))[:-1]

    @property
    def first_track(self) -> list[int]:
        """Return the number of the first track of each part, counted through all parts."""
        return list(accumulate((len(part.track_name) for part in self.parts), initial=0))[:-1]

    @property
    def first_process(self) -> list[int]:
        """Return the number of the first process of each part, counted through all parts."""
        return list(accumulate((len(part.processes) for part in self.parts), initial=0))[:-1]

    def chunks(self, rows: int) -> Iterator[SliceChunk]:
        """Yield all slices in chunks of at most ``rows``, so that memory is needed for one chunk only."""
        for index, (first, tracks) in enumerate(zip(self.first_slice, self.parts, strict=True)):
            for start in range(0, len(tracks), rows):
                part = slice(start, min(start + rows, len(tracks)))
                columns: list[Argument] = [tracks.name, tracks.category, *tracks.arguments.values()]
                key = np.zeros(part.stop - part.start, np.int64)
                for column in columns:
                    values = column.rows[part] if isinstance(column, TextColumn) else column[part]
                    if (values == values[0]).all():
                        continue  # all slices are equal in this column
                    _, code = np.unique(values, return_inverse=True)
                    _, key = np.unique(key * (int(code.max()) + 1) + code, return_inverse=True)
                _, example = np.unique(key, return_index=True)
                spelled = [_label_values(column, example + part.start) for column in columns]
                keys = tuple(tracks.arguments)
                label_rows: list[SliceLabel] = []
                for name, category, *rest in zip(*spelled, strict=True):
                    arguments = tuple(
                        (key, value)
                        for key, value in zip(keys, rest, strict=True)
                        if value != "" and value == value  # noqa: PLR0124 # NaN is no argument
                    )
                    label_rows.append(SliceLabel(str(name), str(category), arguments))
                labels, label = tuple(label_rows), key.astype(np.int64, copy=False)
                yield SliceChunk(first + start, index, tracks, part, labels, label)


def _label_values(column: Argument, slices: IntArray) -> list[str] | list[float]:
    if not isinstance(column, TextColumn):
        numbers: list[float] = column[slices].tolist()
        return numbers
    rows: list[int] = column.rows[slices].tolist()
    texts = {row: shown(column.texts[row]) for row in set(rows)}
    return [texts[row] for row in rows]


def shown(text: str) -> str:
    """Return a text that UTF-8 can encode: unpaired surrogates are replaced."""
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def join_track_sets(
    track_sets: Sequence[tuple[str, TrackSet]], between: Sequence[tuple[str, IntArray, IntArray]] = ()
) -> TrackSet:
    """Join several track sets into one. Each label becomes a prefix of the names of its processes.

    ``between`` are arrows between the sets: (kind, source slices, target slices), numbered over all sets.
    """
    parts: list[Tracks] = []
    ends: list[tuple[str, IntArray, IntArray]] = []
    metadata: dict[str, str] = {}
    first = 0
    for label, track_set in track_sets:
        flows, prefix = track_set.flows, f"{label} " if label else ""
        for code, kind in enumerate(flows.kinds):
            of_kind = flows.kind == code
            ends.append((kind, flows.source[of_kind] + first, flows.target[of_kind] + first))
        first += len(track_set)
        parts.extend(
            replace(part, processes=tuple(f"{prefix}{name}" for name in part.processes))
            for part in track_set.parts
        )
        metadata |= {f"{label}.{key}" if label else key: text for key, text in track_set.metadata.items()}
    name = " and ".join(dict.fromkeys(track_set.name for _, track_set in track_sets if track_set.name))
    return TrackSet(name, tuple(parts), Flows.of([*ends, *between]), metadata)


SliceEnd = tuple[int, int, int]
"""A slice that has ended: its end [ns], its track, and its lane on the track."""

_MAX_LANES = 128
"""Maximum number of lanes that are searched for a free one. Beyond it, a slice without a free lane opens a
new one.
"""
_PS = 1000.0
_WHOLE_NS = 2.0**52
"""Floats of this size or larger are whole numbers."""


@dataclass(slots=True)
class LaneAssigner:
    """Assignment of lanes to overlapping slices of a track. Slices are sorted by track and start, longest
    first.
    """

    _track: int = -1
    _opened: list[list[float]] = field(default_factory=list[list[float]])

    def assign(
        self, tracks: Sequence[int], starts: Sequence[float], ends: Sequence[float]
    ) -> Iterator[tuple[int, list[SliceEnd]]]:
        """Yield, for each slice, its lane and the slices that end at or before its start."""
        for track, start, end in zip(tracks, starts, ends, strict=True):
            ended: list[SliceEnd] = []
            if track != self._track:
                ended = self.rest()
                self._track, self._opened = track, [[]]
            for lane, opened in enumerate(self._opened[:_MAX_LANES]):
                while opened and opened[-1] <= start:
                    ended.append((int(opened.pop()), self._track, lane))
                if not opened or end <= opened[-1]:
                    break
            else:
                lane = len(self._opened)
                self._opened.append([])
            self._opened[lane].append(end)
            yield lane, ended

    def rest(self) -> list[SliceEnd]:
        """Return the slices that are still open on the last track, inner slices first."""
        ended = [
            (int(end), self._track, lane)
            for lane, opened in enumerate(self._opened)
            for end in reversed(opened)
        ]
        self._opened = []
        return ended


def is_whole(start_ns: FloatArray, duration_ns: FloatArray) -> BoolArray:
    """Return a mask of the slices that :func:`shown_ns` shows exactly; an unknown duration is not exact."""
    whole: BoolArray = (np.floor(start_ns) == start_ns) & (np.floor(duration_ns) == duration_ns)
    return whole


def shown_ns(start_ns: FloatArray, duration_ns: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return start and length of slices in whole ns, without changing order or nesting of slices.

    Whole times stay exact at any size. An unknown duration is 0. If all starts are so large that they are
    whole, lengths are rounded on their own, because sums with starts would lose their fractions.
    """
    known_ns = np.nan_to_num(duration_ns, nan=0.0)
    begin_ns = _floor(start_ns)
    length_ns = np.where(
        np.abs(start_ns) < _WHOLE_NS, _floor(start_ns + known_ns) - begin_ns, _floor(known_ns)
    )
    return begin_ns, np.where(is_whole(start_ns, known_ns), known_ns, length_ns)


def _floor(times_ns: FloatArray) -> FloatArray:
    """Round times down to whole ns. A time just below a whole number, as sums of floats give, becomes that
    number. The order of times does not change.
    """
    whole_ns = np.floor(times_ns)
    partial_ns = np.where(whole_ns == times_ns, 0.0, times_ns)
    return np.where(whole_ns == times_ns, whole_ns, np.floor(np.rint(partial_ns * _PS) / _PS))


def lanes_of(tracks: Tracks) -> SmallIntArray:
    """Return the lane of each slice on its track, 0 for the first lane. O(slices log slices)."""
    lanes = np.zeros(len(tracks), np.int32)
    if not len(tracks):
        return lanes
    begin_ns, length_ns = shown_ns(tracks.start_ns, tracks.duration_ns)
    end_ns = begin_ns + np.maximum(length_ns, 0.0)
    crowded = np.unique(tracks.track[overlapping(tracks.track, begin_ns, end_ns - begin_ns)])
    rows = np.flatnonzero(np.isin(tracks.track, crowded))
    assigned = LaneAssigner().assign(
        tracks.track[rows].tolist(), begin_ns[rows].tolist(), end_ns[rows].tolist()
    )
    lanes[rows] = [lane for lane, _ in assigned]
    return lanes


HOST_CATEGORY = "host operation"
"""Category of slices that are not device work."""
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
_CLASSES = tuple("" if member is OpClass.UNKNOWN else member.name.lower() for member in OpClass)
_NO_SLICE = -1


@dataclass(frozen=True, slots=True, eq=False)
class _SortedSlices:
    """Slices in the order in which a track set shows them. ``event`` is the original row of each slice."""

    event: IntArray
    track: SmallIntArray

    @classmethod
    def of(cls, track: IntArray, start_ns: FloatArray, duration_ns: FloatArray) -> _SortedSlices:
        """Sort slices by track, then by start, longest first; rows without a start are dropped."""
        has_start = np.flatnonzero(~np.isnan(start_ns))
        order = np.lexsort((-duration_ns[has_start], start_ns[has_start], track[has_start]))
        event = has_start[order]
        return cls(event, track[event].astype(np.int32))

    def slice_of(self, rows: int) -> IntArray:
        """Return the slice that shows each of ``rows`` original rows, -1 for a dropped row."""
        number = np.full(rows, _NO_SLICE, np.int64)
        number[self.event] = np.arange(len(self.event))
        return number


def tracks_of_profile(profile: Profile, diagnostics: Diagnostics, *, arrows: bool) -> TrackSet:
    """Return the tracks of the device and of the host, with arrows from host operations to the work that they
    caused.
    """
    findings = diagnostics.about(profile.name, "tracks")
    no_start = np.isnan(profile.start_ns)
    no_start_ns = float(np.nansum(profile.duration_ns[no_start]))
    message = f"events without a start are not shown: {no_start_ns:,.0f} ns of device time"
    findings.warning("no-start", message, int(no_start.sum()))
    negative = "events end before they start; viewers do not show them"
    findings.warning("negative-duration", negative, int((profile.duration_ns < 0).sum()))
    num_surrogates = len(_SURROGATE.findall(bytes(profile.strings.buffer)))
    findings.warning("invalid-text", "unpaired surrogates in texts are replaced", num_surrogates)
    device, slices = _device_tracks(profile)
    if not len(profile.host):
        return TrackSet(profile.name, (device,), Flows.none(), profile.metadata)
    host_ops, strings = profile.host, profile.strings
    threads, track = np.unique(host_ops.thread_id, return_inverse=True)
    host_rows = _SortedSlices.of(track.reshape(-1).astype(np.int64), host_ops.start_ns, host_ops.duration_ns)
    columns = {
        "shapes": host_ops.shapes_id,
        "dtype": host_ops.dtype_id,
        "strides": host_ops.strides_id,
        "values": host_ops.values_id,
    }
    texts = {key: rows[host_rows.event] for key, rows in columns.items()}
    ranks = np.unique(profile.rank)
    owner = f"rank {int(ranks[0])} host" if len(ranks) == 1 and int(ranks[0]) >= 0 else "host"
    host, host_slices = (
        Tracks(
            processes=(owner,),
            track_process=(0,) * len(threads),
            track_name=tuple(f"thread {strings[row]}".rstrip() for row in threads.tolist()),
            track=host_rows.track,
            name=TextColumn(host_ops.name_id[host_rows.event], strings),
            category=TextColumn(np.ones(len(host_rows.event), np.int32), ("", HOST_CATEGORY)),
            start_ns=host_ops.start_ns[host_rows.event],
            duration_ns=host_ops.duration_ns[host_rows.event],
            arguments={key: TextColumn(rows, strings) for key, rows in texts.items() if rows.any()},
        ),
        host_rows,
    )
    flows = Flows.none()
    if arrows:
        caused = np.flatnonzero(profile.host_event >= 0)
        source = host_slices.slice_of(len(profile.host))[profile.host_event[caused]]
        target = slices.slice_of(len(profile))[caused]
        is_shown = (source >= 0) & (target >= 0)
        flows = Flows.of([("launch", source[is_shown] + len(device), target[is_shown])])
    return TrackSet(profile.name, (device, host), flows, profile.metadata)


def _device_tracks(profile: Profile) -> tuple[Tracks, _SortedSlices]:
    """Return one track per stream of a device, and the order of the slices.

    A slice is named after its kernel, or else its operation, or else its category. It has an argument
    ``kernel`` only if the operation has the same name as the kernel.
    """
    processes, process = _processes(profile)
    tracks, track = distinct_rows(process, profile.stream)
    slices = _SortedSlices.of(track, profile.start_ns, profile.duration_ns)
    event, strings = slices.event, profile.strings
    kernel, op, category = profile.kernel_id[event], profile.op_id[event], profile.category_id[event]
    same_name = (kernel == op) & (op > 0)
    texts: dict[str, NDArray[np.int32]] = {
        "op": op,
        "kernel": np.where(same_name, op, 0).astype(np.int32),
        "module": profile.module_id[event],
        "shapes": profile.shapes_id[event],
        "dtype": profile.dtype_id[event],
    }
    numbers: dict[str, FloatArray] = {
        "run": np.where(profile.run[event] >= 0, profile.run[event], np.nan),
        "bytes": profile.bytes_moved[event],
        "repeats": np.where(profile.repeats[event] == 1, np.nan, profile.repeats[event]),
        "spread_ns": profile.spread_ns[event],
    }
    arguments: dict[str, Argument] = {
        key: TextColumn(rows, strings) for key, rows in texts.items() if rows.any()
    }
    if profile.op_class[event].any():
        arguments["op_class"] = TextColumn(profile.op_class[event].astype(np.int32), _CLASSES)
    arguments |= {key: column for key, column in numbers.items() if not np.isnan(column).all()}
    return Tracks(
        processes=processes,
        track_process=tuple(owner for owner, _ in tracks),
        track_name=tuple(f"stream {stream}" if stream >= 0 else "no stream" for _, stream in tracks),
        track=slices.track,
        name=TextColumn(np.where(kernel > 0, kernel, np.where(op > 0, op, category)), strings),
        category=TextColumn(category, strings),
        start_ns=profile.start_ns[event],
        duration_ns=profile.duration_ns[event],
        arguments=arguments,
    ), slices


def slices_of_events(profile: Profile) -> IntArray:
    """Return the slice of each event in the track set of its profile, shape ``(events,)``; -1 without a
    start.
    """
    _, process = _processes(profile)
    _, track = distinct_rows(process, profile.stream)
    return _SortedSlices.of(track, profile.start_ns, profile.duration_ns).slice_of(len(profile))


def _processes(profile: Profile) -> tuple[tuple[str, ...], IntArray]:
    """Return the names of processes, one per rank and device that has events, and the process of
    each event.
    """
    pairs, process = distinct_rows(profile.rank, profile.device_index)
    names: list[str] = []
    for rank, device in pairs:
        device_name = profile.devices[device] if 0 <= device < len(profile.devices) else ""
        owner = f"rank {rank}" if rank >= 0 else "unknown rank"
        names.append(f"{owner}: {device_name}" if device_name else owner)
    return tuple(names), process
