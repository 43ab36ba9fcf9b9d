"""Any Chrome trace as a profile: each slice, on whatever track it stands, is an event.

Complete events (``X``) and pairs of begin and end (``B``, ``E``) are slices. A track is a thread of a
process; the process names the device, or rank and device as our writer does (``rank 3: H100``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas.converters.chrome_events import EventStream, TraceEvent, event_times
from hespas.converters.chrome_trace.writer import SCHEMA_ID
from hespas.converters.format import ReadOptions
from hespas.converters.linking import enclosing, pair
from hespas.converters.tracks.reading import (
    OP_CLASSES,
    agreeing,
    ops_and_kernels,
    rank_and_device,
    report_halves,
    report_nested,
    stream_in_name,
)
from hespas.converters.tracks.scene import HOST_CATEGORY
from hespas.graph import Diagnostics, Findings, HostOps, Profile, StringTable, StringTableBuilder
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray, distinct_rows
from hespas.graph.errors import FormatError

__all__ = ["read_chrome_trace"]

_Track = tuple[int | str, int | str]

_EXACT_US = float(1 << 31)
"""Below this a float64 is within half a ps of the microseconds written: 2**31 us are 36 minutes."""
_TEXTS = ("op", "kernel", "module", "shapes", "dtype", "strides", "values")
_PHASES = "XBEsf"
_WHOLE, _BEGIN, _SOURCE, _TARGET = 0, 1, 3, 4
_ARROWS = "launch"
"""The category of arrows from host operations to the work they caused."""
_LARGEST_RUN = (1 << 31) - 1


class _Name(msgspec.Struct):
    name: str = ""


class _Args(msgspec.Struct, gc=False):
    """What our writer tells of a slice; others may use the same words for the same things."""

    op: str = ""
    kernel: str = ""
    module: str = ""
    shapes: str = ""
    dtype: str = ""
    strides: str = ""
    values: str = ""
    op_class: str = ""
    run: int | None = None
    bytes: int | float | None = None
    start_ns: int | float | None = None
    duration_ns: int | float | None = None


_NOTHING = _Args()
_NAMES = msgspec.json.Decoder(_Name)
_ARGS = msgspec.json.Decoder(_Args)


@dataclass(frozen=True, slots=True, eq=False)
class _Arrows:
    """Ends of arrows in order of their numbers: where they begin and end, by track and whole ns."""

    source_track: IntArray
    source_ns: IntArray
    target_track: IntArray
    target_ns: IntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Collected:
    """Slices as columns of shape ``(slices,)``; ``track`` numbers ``tracks`` (process, thread).

    Times are whole ns; ``*_part_ns`` are the fractions behind them. ``told_*_ns`` are what arguments of these
    names tell (NaN: nothing), which only from our writer are the exact times. ``skipped`` counts events
    without a duration by phase; ``unfinished`` counts slices that never ended, ``orphans`` ends without a
    begin. ``arrows`` join slices.
    """

    strings: StringTable
    tracks: tuple[_Track, ...]
    process_names: Mapping[int | str, str]
    thread_names: Mapping[_Track, str]
    track: IntArray
    name_row: SmallIntArray
    category_row: SmallIntArray
    arguments: Mapping[str, SmallIntArray]
    op_class: NDArray[np.int8]
    run: SmallIntArray
    bytes_moved: FloatArray
    start_ns: IntArray
    start_part_ns: FloatArray
    duration_ns: IntArray
    duration_part_ns: FloatArray
    stated_start_ns: FloatArray
    stated_duration_ns: FloatArray
    skipped: Mapping[str, int]
    unfinished: int
    orphans: int
    arrows: _Arrows

    def only(self, rows: BoolArray) -> _Collected:
        """Some of the slices."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        arguments = {key: column[rows] for key, column in self.arguments.items()}
        return replace(self, arguments=arguments, **columns)


_KEPT = (
    "name_row",
    "category_row",
    "op_class",
    "run",
    "bytes_moved",
    "stated_start_ns",
    "stated_duration_ns",
)
_COLUMNS = (*_KEPT, "track", "start_ns", "start_part_ns", "duration_ns", "duration_part_ns")
_TYPES: dict[str, type[np.generic]] = {
    **dict.fromkeys(("kind", "op_class"), np.int8),
    **dict.fromkeys(("track", "start_ns", "duration_ns", "number"), np.int64),
    **dict.fromkeys(
        ("start_part_ns", "duration_part_ns", "bytes_moved", "stated_start_ns", "stated_duration_ns"),
        np.float64,
    ),
}
"""Of columns that are no rows of texts and no numbers of runs."""


class _Collector:
    """Takes blocks of events; :meth:`finish` pairs what began with what ended."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._strings = StringTableBuilder()
        self._tracks: dict[_Track, int] = {}
        self._processes: dict[int | str, str] = {}
        self._threads: dict[_Track, str] = {}
        self._skipped: dict[str, int] = {}
        self._seen = 0
        self._parts: dict[str, list[NDArray[np.generic]]] = {}

    def add(self, events: list[TraceEvent], array: bytes) -> None:
        """Take one block. Raises ``FormatError`` for a slice whose time is missing or no number."""
        chosen: list[int] = []
        kinds: list[int] = []
        for place, event in enumerate(events):
            kind = _PHASES.find(event.ph) if len(event.ph) == 1 else -1
            if kind < 0 or (kind >= _SOURCE and (event.cat != _ARROWS or type(event.id) is not int)):
                self._skip(event)
                continue
            if kind > 0 or event.dur is None:
                event.dur = 0
            chosen.append(place)
            kinds.append(kind)
        if chosen:
            self._slices([events[place] for place in chosen], events, array, chosen, kinds)
        self._seen += len(events)

    def _refuse_missing(self, slices: Sequence[TraceEvent], chosen: Sequence[int]) -> None:
        """Times begin somewhere: a slice that does not say where cannot be placed."""
        for event, place in zip(slices, chosen, strict=True):
            if event.ts is None:
                raise FormatError(
                    f"{event.name[:40]!r} has no start",
                    path=self._path,
                    position=f"event {self._seen + place + 1}, field 'ts'",
                    hint="export the trace again",
                )

    def _skip(self, event: TraceEvent) -> None:
        what = f"phase {event.ph[:1] or '?'}"
        if event.ph == "M":
            self._named(event)
        self._skipped[what] = self._skipped.get(what, 0) + 1

    def _named(self, event: TraceEvent) -> None:
        if event.name not in {"process_name", "thread_name"}:
            return
        try:
            name = _NAMES.decode(event.args).name
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        process, thread = _key(event.pid), _key(event.tid)
        if event.name == "process_name":
            self._processes[process] = name
        else:
            self._threads[process, thread] = name

    def _slices(
        self,
        slices: list[TraceEvent],
        events: list[TraceEvent],
        array: bytes,
        chosen: Sequence[int],
        kinds: Sequence[int],
    ) -> None:
        self._refuse_missing(slices, chosen)
        start_ns, duration_ns = event_times(events, array, chosen, path=self._path, before=self._seen)
        start, start_part = _with_parts(start_ns, [event.ts for event in slices])
        duration, duration_part = _with_parts(duration_ns, [event.dur for event in slices])
        args = [self._decoded(event) for event in slices]
        add, number = self._strings.add, self._tracks
        tracks = [number.setdefault((_key(event.pid), _key(event.tid)), len(number)) for event in slices]
        columns: dict[str, Sequence[float] | NDArray[np.generic]] = {
            "kind": kinds,
            "start_ns": start,
            "start_part_ns": start_part,
            "duration_ns": duration,
            "duration_part_ns": duration_part,
            "track": tracks,
            "name_row": [add(event.name) for event in slices],
            "category_row": [add(event.cat) for event in slices],
            **{key: [add(getattr(each, key)) for each in args] for key in _TEXTS},
            "op_class": [OP_CLASSES.get(each.op_class, 0) for each in args],
            "number": [_number(event.id) for event in slices],
            "run": [_run(each.run) for each in args],
            "bytes_moved": [_size(each.bytes) for each in args],
            "stated_start_ns": [_size(each.start_ns) for each in args],
            "stated_duration_ns": [_size(each.duration_ns) for each in args],
        }
        for name, values in columns.items():
            self._parts.setdefault(name, []).append(np.asarray(values, _TYPES.get(name, np.int32)))

    @staticmethod
    def _decoded(event: TraceEvent) -> _Args:
        if len(event.args) <= len("{}"):
            return _NOTHING
        try:
            return _ARGS.decode(event.args)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _NOTHING  # another writer's words

    def _column(self, name: str) -> NDArray[Any]:
        parts = self._parts.pop(name, [])
        return np.concatenate(parts) if parts else np.empty(0, _TYPES.get(name, np.int32))

    def finish(self) -> _Collected:
        """All slices: those that were whole, then the pairs."""
        kind, track = self._column("kind"), self._column("track")
        whole = np.flatnonzero(kind == _WHOLE)
        halves = np.flatnonzero((kind != _WHOLE) & (kind < _SOURCE))
        start_ns, part_ns = self._column("start_ns"), self._column("start_part_ns")
        duration_ns, duration_part_ns = self._column("duration_ns"), self._column("duration_part_ns")
        pairs = pair(track, start_ns, kind == _BEGIN, halves)
        begin, ended = pairs.begin, pairs.end >= 0
        last_ns = int((start_ns + duration_ns).max()) if len(kind) else 0
        end_ns = np.where(ended, start_ns[pairs.end], last_ns)
        end_part_ns = np.where(ended, part_ns[pairs.end], 0.0)
        row = np.concatenate([whole, begin])
        return _Collected(
            strings=self._strings.build(),
            tracks=tuple(self._tracks),
            process_names=self._processes,
            thread_names=self._threads,
            track=track[row],
            arguments={key: self._column(key)[row] for key in _TEXTS},
            **{name: self._column(name)[row] for name in _KEPT},
            start_ns=start_ns[row],
            start_part_ns=part_ns[row],
            duration_ns=np.concatenate([duration_ns[whole], end_ns - start_ns[begin]]),
            duration_part_ns=np.concatenate([duration_part_ns[whole], end_part_ns - part_ns[begin]]),
            skipped=self._skipped,
            unfinished=int((~ended).sum()),
            orphans=pairs.orphans,
            arrows=self._arrows(kind, track, start_ns),
        )

    def _arrows(self, kind: NDArray[np.int8], track: IntArray, start_ns: IntArray) -> _Arrows:
        """Pairs of ends of the same number."""
        number = self._column("number")
        source, target = np.flatnonzero(kind == _SOURCE), np.flatnonzero(kind == _TARGET)
        _, first, second = np.intersect1d(number[source], number[target], return_indices=True)
        source, target = source[first], target[second]
        return _Arrows(track[source], start_ns[source], track[target], start_ns[target])


def _key(value: int | str | None) -> int | str:
    return -1 if value is None else value


def _number(value: int | str | None) -> int:
    return value if type(value) is int and abs(value) < 1 << 62 else -1


def _run(value: int | None) -> int:
    return value if value is not None and 0 <= value <= _LARGEST_RUN else -1


def _size(value: float | None) -> float:
    return float("nan") if value is None or abs(value) > 1e300 else float(value)


def _with_parts(
    whole_ns: IntArray, times_us: Sequence[int | float | str | None]
) -> tuple[IntArray, FloatArray]:
    """Whole ns rounded down, and the rest of each time where a float still holds the ps."""
    if not any(type(time) is float for time in times_us):
        return whole_ns, np.zeros(len(whole_ns))
    written_us = np.array([time if type(time) is float else 0.0 for time in times_us], np.float64)
    exact = np.array([type(time) is float for time in times_us]) & (np.abs(written_us) < _EXACT_US)
    steps = np.rint(np.where(exact, written_us, 0.0) * 1e6).astype(np.int64)
    floor_ns = np.where(exact, steps // 1000, whole_ns)
    return floor_ns, np.where(exact, (steps % 1000) / 1000.0, 0.0)


class _Header(msgspec.Struct):
    """What stands beside the events."""

    otherData: msgspec.Raw = msgspec.Raw(b"{}")  # noqa: N815 # the format's own name


def read_chrome_trace(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read a trace block by block. Raises ``FormatError`` naming the byte or field of what makes no sense.

    Nothing that has a duration is left out; slices that our own writer marked are host operations. Slices
    inside others count like any, and ``diagnostics`` tell how much time is therefore counted twice.
    """
    stream = EventStream(path, options.max_bytes)
    collector = _Collector(str(path))
    for events, array in stream.blocks():
        collector.add(events, array)
    facts = _facts(stream.header, str(path))
    ours = facts.pop("schema", "") == SCHEMA_ID
    everything = collector.finish()
    on_host = everything.category_row == everything.strings.find(HOST_CATEGORY)
    collected, host = everything.only(~on_host), everything.only(on_host)
    if not len(collected.name_row):
        raise FormatError(
            "the trace holds no slices: no event 'X', no pair 'B' and 'E'",
            path=str(path),
            position="list 'traceEvents'",
            hint="was the profiler stopped before anything ran?",
        )
    findings = diagnostics.about(str(path), "chrome-trace")
    repaired = "blocks with text that is not Unicode, which was replaced"
    findings.warning("invalid-utf8", repaired, stream.repaired_blocks)
    _report(collected, findings)
    return _profile(path, collected, host, facts, ours=ours)


def _facts(header: bytes, path: str) -> dict[str, str]:
    """The texts of ``otherData``; whatever else stands there is a viewer's."""
    try:
        other = msgspec.json.decode(header, type=_Header).otherData
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"what stands beside the events is no JSON object: {error}",
            path=path,
            position="header",
            hint="was the file cut off? export the trace again",
        ) from error
    try:
        found = msgspec.json.decode(other, type=dict[str, str | int | float | bool | None])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return {key: text for key, text in found.items() if isinstance(text, str)}


def _profile(
    path: Path, found: _Collected, host: _Collected, facts: dict[str, str], *, ours: bool
) -> Profile:
    devices, places = _places(found)
    base_ns = 0 if ours else int(found.start_ns.min())  # ours count from the first event already
    name = facts.pop("name", "") if ours else ""
    metadata = facts if ours else {"format": "chrome-trace"}
    if not ours:
        metadata["first_event_ns"] = str(base_ns)
    texts = found.arguments
    op_row, kernel_row = ops_and_kernels(found.name_row, texts["op"], texts["kernel"], ours=ours)
    start_ns, duration_ns = _times(found, base_ns, ours=ours)
    strings = StringTableBuilder(found.strings)
    host_times = _times(host, base_ns, ours=ours)
    operations = _host_ops(host, *host_times, strings)
    return Profile.of(
        name or path.name.removesuffix(".gz").removesuffix(".json"),
        devices,
        strings.build(),
        start_ns=start_ns,
        duration_ns=duration_ns,
        op_row=op_row,
        kernel_row=kernel_row,
        module_row=texts["module"],
        shapes_row=texts["shapes"],
        dtype_row=texts["dtype"],
        category_row=found.category_row,
        op_class=found.op_class,
        device_index=places["device_index"],
        rank=places["rank"],
        stream=places["stream"],
        run=found.run,
        bytes_moved=found.bytes_moved,
        host_event=_causes(found.arrows, host, found),
        host=operations,
        metadata=metadata,
    )


def _times(found: _Collected, base_ns: int, *, ours: bool) -> tuple[FloatArray, FloatArray]:
    """Starts and durations [ns]."""
    start_ns = _joined(found.start_ns - base_ns, found.start_part_ns)
    duration_ns = _joined(found.duration_ns, found.duration_part_ns)
    if not ours:
        return start_ns, duration_ns
    exact = (start_ns, found.stated_start_ns), (duration_ns, found.stated_duration_ns)
    start_ns, duration_ns = (np.where(agreeing(stated, shown), stated, shown) for shown, stated in exact)
    return start_ns, duration_ns


def _joined(whole_ns: IntArray, part_ns: FloatArray) -> FloatArray:
    """Times in ns; fractions are whole ps, added as integers so that the nearest float comes out."""
    if not part_ns.any():
        return whole_ns.astype(np.float64)
    steps = whole_ns * 1000 + np.rint(part_ns * 1000).astype(np.int64)
    return np.where(part_ns != 0, steps / 1000.0, whole_ns.astype(np.float64))


def _report(found: _Collected, findings: Findings) -> None:
    listed = ", ".join(f"{what} {count:,}" for what, count in sorted(found.skipped.items()))
    message = f"events without time on a device are left out: {listed}"
    findings.info("other-events", message, sum(found.skipped.values()))
    report_halves(findings, "events", found.unfinished, found.orphans)
    findings.warning("negative-duration", "events end before they start", int((found.duration_ns < 0).sum()))
    report_nested(findings, found.track, found.start_ns, found.duration_ns)


# Host operations of a trace that our writer made, and the device work that arrows join to them.

_THREAD = "thread"


def _host_ops(
    found: _Collected, start_ns: FloatArray, duration_ns: FloatArray, strings: StringTableBuilder
) -> HostOps:
    """The slices as host operations; names of threads go to ``strings``."""
    names = [found.thread_names.get(track, "") for track in found.tracks]
    threads = np.array([strings.add(name.removeprefix(_THREAD).strip()) for name in names] or [0], np.int32)
    texts = found.arguments
    return HostOps.of(
        name_row=found.name_row,
        thread_row=threads[found.track],
        parent=enclosing(found.track, found.start_ns, found.duration_ns)[0],
        start_ns=start_ns,
        duration_ns=duration_ns,
        shapes_row=texts["shapes"],
        dtype_row=texts["dtype"],
        strides_row=texts["strides"],
        values_row=texts["values"],
    )


def _causes(arrows: _Arrows, host: _Collected, device: _Collected) -> SmallIntArray:
    """The host operation of each device slice, -1 for none. Of slices that start where an arrow ends, the
    shortest is meant, as viewers take it.
    """
    source = _slice_at(host, arrows.source_track, arrows.source_ns)
    target = _slice_at(device, arrows.target_track, arrows.target_ns)
    joined = (source >= 0) & (target >= 0)
    cause = np.full(len(device.track), -1, np.int32)
    cause[target[joined]] = source[joined]
    return cause


def _slice_at(found: _Collected, track: IntArray, at_ns: IntArray) -> IntArray:
    """The slice that starts at each place and time, -1 for none."""
    both_track, both_ns = np.concatenate([found.track, track]), np.concatenate([found.start_ns, at_ns])
    _, key = distinct_rows(both_track, both_ns)
    order = np.argsort(-found.duration_ns, kind="stable")
    slices = np.full(int(key.max(initial=-1)) + 1, -1, np.int64)
    slices[key[: len(found.track)][order]] = order
    return slices[key[len(found.track) :]]


# Where slices ran: rank, device and stream, as far as names and numbers of processes and threads tell.


def _places(found: _Collected) -> tuple[tuple[str, ...], dict[str, IntArray]]:
    """The names of devices, and columns of a profile: rank and device by the name of the process, the stream
    by that of the thread or its number.
    """
    devices: dict[str, int] = {}
    columns: dict[str, list[int]] = {"rank": [], "device_index": [], "stream": []}
    used = set(np.unique(found.track).tolist())
    for number, (pid, tid) in enumerate(found.tracks):
        known = found.process_names.get(pid, "")
        rank, name = rank_and_device(known) or (0, known or f"process {pid}")
        columns["rank"].append(rank)
        columns["device_index"].append(devices.setdefault(name, len(devices)) if number in used else 0)
        columns["stream"].append(_stream(found.thread_names.get((pid, tid), ""), tid, number))
    return tuple(devices), {key: np.array(each, np.int64)[found.track] for key, each in columns.items()}


def _stream(name: str, tid: int | str, number: int) -> int:
    stated = stream_in_name(name)
    if stated is not None:
        return stated
    return tid if isinstance(tid, int) and 0 <= tid < 1 << 63 else number
