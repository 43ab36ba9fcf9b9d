"""Reader that converts any Chrome trace to a profile; every slice of every track is an event.

Complete events (``X``) and pairs of begin and end (``B``, ``E``) are slices. A track is a thread of a
process. The name of the process is the device, or rank and device in files of Hespas (``rank 3: H100``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas.converters.chrome_events import EventStream, TraceEvent, event_times, report_repairs
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
from hespas.converters.tracks.slices import HOST_CATEGORY
from hespas.graph import Diagnostics, HostOps, Profile, StringTable, StringTableBuilder
from hespas.graph.columns import ColumnTable, FloatArray, IntArray, SmallIntArray, at_rows, distinct_rows
from hespas.graph.errors import FormatError

__all__ = ["read_chrome_trace"]

_Track = tuple[int | str, int | str]

_EXACT_US = float(1 << 31)
"""Limit in microseconds below which a float64 is exact to half a picosecond: 2**31 us are 36 minutes."""
_TEXTS = ("op", "kernel", "module", "shapes", "dtype", "strides", "values")
_PHASES = "XBEsf"
_WHOLE, _BEGIN, _SOURCE, _TARGET = 0, 1, 3, 4
_ARROWS = "launch"
"""Category of flow arrows from host operations to the work that they launched."""
_LARGEST_RUN = (1 << 31) - 1


class _Name(msgspec.Struct):
    name: str = ""


class _EventArgs(msgspec.Struct, gc=False):
    """Arguments of a slice in the names that Hespas writes. Other tools may use the same names."""

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


_NOTHING = _EventArgs()
_NAMES = msgspec.json.Decoder(_Name)
_ARGS = msgspec.json.Decoder(_EventArgs)


@dataclass(frozen=True, slots=True, eq=False)
class _Arrows:
    """Flow arrows between slices, in the order of their ids: track and time (whole ns) of both ends."""

    source_track: IntArray
    source_ns: IntArray
    target_track: IntArray
    target_ns: IntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _ChromeSlices(ColumnTable):
    """Slices as columns of shape ``(slices,)``. ``track`` is the number of the track; texts are string rows.

    ``start_ns`` and ``duration_ns`` are whole ns, ``*_part_ns`` are the fractions that were rounded off.
    ``stated_*_ns`` are the arguments ``start_ns`` and ``duration_ns`` of a slice (NaN: absent), which are
    exact only in files of Hespas.
    """

    track: IntArray
    name_id: SmallIntArray
    category_id: SmallIntArray
    op: SmallIntArray
    kernel: SmallIntArray
    module: SmallIntArray
    shapes: SmallIntArray
    dtype: SmallIntArray
    strides: SmallIntArray
    values: SmallIntArray
    op_class: NDArray[np.int8]
    run: SmallIntArray
    bytes_moved: FloatArray
    start_ns: IntArray
    start_part_ns: FloatArray
    duration_ns: IntArray
    duration_part_ns: FloatArray
    stated_start_ns: FloatArray
    stated_duration_ns: FloatArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _CollectedEvents:
    """Slices of all tracks, and the arrows between them.

    ``tracks`` has the (process, thread) of each track. ``skipped`` counts events without a duration, by phase
    (the event type ``ph``). ``unfinished`` counts begins without an end, and ``orphans`` ends without a
    begin.
    """

    strings: StringTable
    tracks: tuple[_Track, ...]
    process_names: Mapping[int | str, str]
    thread_names: Mapping[_Track, str]
    slices: _ChromeSlices
    skipped: Mapping[str, int]
    unfinished: int
    orphans: int
    arrows: _Arrows


class _Collector:
    """Collector of the events of a file, block by block. :meth:`finish` pairs begin and end events."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._strings = StringTableBuilder()
        self._tracks: dict[_Track, int] = {}
        self._processes: dict[int | str, str] = {}
        self._threads: dict[_Track, str] = {}
        self._skipped: dict[str, int] = {}
        self._seen = 0
        self.overflowed = 0
        self._parts: dict[str, list[NDArray[Any]]] = {}

    def add(self, events: list[TraceEvent], array: bytes) -> None:
        """Add the events of one block of the file; ``array`` is the JSON text of the block. Raises
        ``FormatError`` for a slice without a numeric time.
        """
        chosen: list[int] = []
        kinds: list[int] = []
        for index, event in enumerate(events):
            kind = _PHASES.find(event.ph) if len(event.ph) == 1 else -1
            if kind < 0 or (kind >= _SOURCE and (event.cat != _ARROWS or type(event.id) is not int)):
                what = f"phase {event.ph[:1] or '?'}"
                if event.ph == "M":
                    self._named(event)
                self._skipped[what] = self._skipped.get(what, 0) + 1
                continue
            if kind > 0 or event.dur is None:
                event.dur = 0
            chosen.append(index)
            kinds.append(kind)
        if chosen:
            self._slices([events[index] for index in chosen], events, array, chosen, kinds)
        self._seen += len(events)

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
        for event, index in zip(slices, chosen, strict=True):
            if event.ts is None:
                raise FormatError(
                    f"{event.name[:40]!r} has no start",
                    path=self._path,
                    position=f"event {self._seen + index + 1}, field 'ts'",
                    hint="export the trace again",
                )
        times = event_times(events, array, chosen, path=self._path, before=self._seen)
        start_ns, duration_ns = times.start_ns, times.duration_ns
        self.overflowed += len(times.overflowed)
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
            "name_id": [add(event.name) for event in slices],
            "category_id": [add(event.cat) for event in slices],
            **{key: [add(getattr(arg, key)) for arg in args] for key in _TEXTS},
            "op_class": [OP_CLASSES.get(arg.op_class, 0) for arg in args],
            "number": [
                event.id if type(event.id) is int and abs(event.id) < 1 << 62 else -1 for event in slices
            ],
            "run": [arg.run if arg.run is not None and 0 <= arg.run <= _LARGEST_RUN else -1 for arg in args],
            "bytes_moved": [_size(arg.bytes) for arg in args],
            "stated_start_ns": [_size(arg.start_ns) for arg in args],
            "stated_duration_ns": [_size(arg.duration_ns) for arg in args],
        }
        for name, values in columns.items():
            dtype = _ChromeSlices.DTYPES.get(name, np.int64)
            self._parts.setdefault(name, []).append(np.asarray(values, dtype))

    @staticmethod
    def _decoded(event: TraceEvent) -> _EventArgs:
        if len(event.args) <= len("{}"):
            return _NOTHING
        try:
            return _ARGS.decode(event.args)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _NOTHING  # arguments of another writer

    def finish(self) -> _CollectedEvents:
        """Return all slices: first the complete events, then the pairs."""
        columns: dict[str, NDArray[Any]] = {
            name: np.concatenate(parts) for name, parts in self._parts.items()
        }
        none = np.empty(0, np.int64)
        kind, number = columns.pop("kind", none), columns.pop("number", none)
        every = _ChromeSlices(**columns) if columns else _ChromeSlices.empty()
        whole = np.flatnonzero(kind == _WHOLE)
        halves = np.flatnonzero((kind != _WHOLE) & (kind < _SOURCE))
        pairs = pair(every.track, every.start_ns, kind == _BEGIN, halves)
        last_ns = int((every.start_ns + every.duration_ns).max()) if len(kind) else 0
        end_ns = at_rows(every.start_ns, pairs.end, last_ns) - every.start_ns[pairs.begin]
        end_part_ns = at_rows(every.start_part_ns, pairs.end, 0.0) - every.start_part_ns[pairs.begin]
        # Pair the ends of flow arrows by id.
        source, target = np.flatnonzero(kind == _SOURCE), np.flatnonzero(kind == _TARGET)
        _, first, second = np.intersect1d(number[source], number[target], return_indices=True)
        source, target = source[first], target[second]
        arrows = _Arrows(
            every.track[source], every.start_ns[source], every.track[target], every.start_ns[target]
        )
        return _CollectedEvents(
            strings=self._strings.build(),
            tracks=tuple(self._tracks),
            process_names=self._processes,
            thread_names=self._threads,
            slices=replace(
                every.take(np.concatenate([whole, pairs.begin])),
                duration_ns=np.concatenate([every.duration_ns[whole], end_ns]),
                duration_part_ns=np.concatenate([every.duration_part_ns[whole], end_part_ns]),
            ),
            skipped=self._skipped,
            unfinished=int((pairs.end < 0).sum()),
            orphans=pairs.orphans,
            arrows=arrows,
        )


def _key(value: int | str | None) -> int | str:
    return -1 if value is None else value


def _size(value: float | None) -> float:
    return float("nan") if value is None or abs(value) > 1e300 else float(value)


def _with_parts(
    whole_ns: IntArray, times_us: Sequence[int | float | str | None]
) -> tuple[IntArray, FloatArray]:
    """Return times as whole ns, rounded down, and the fraction of a ns that was rounded off.

    ``times_us`` are the times in the file [us], and ``whole_ns`` the same times, rounded to ns. The fraction
    is known for times that a float represents to a picosecond; for others it is 0.
    """
    if not any(type(time) is float for time in times_us):
        return whole_ns, np.zeros(len(whole_ns))
    written_us = np.array([time if type(time) is float else 0.0 for time in times_us], np.float64)
    exact = np.array([type(time) is float for time in times_us]) & (np.abs(written_us) < _EXACT_US)
    steps = np.rint(np.where(exact, written_us, 0.0) * 1e6).astype(np.int64)
    floor_ns = np.where(exact, steps // 1000, whole_ns)
    return floor_ns, np.where(exact, (steps % 1000) / 1000.0, 0.0)


class _Header(msgspec.Struct):
    """Fields of a Chrome trace other than the events."""

    otherData: msgspec.Raw = msgspec.Raw(b"{}")  # noqa: N815 # the format's own name


def read_chrome_trace(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read a Chrome trace block by block. Raises ``FormatError`` with the malformed byte or field.

    Every event with a duration is read. Slices that the writer of Hespas marked as host operations become
    host operations. Nested slices count in full, and a diagnostic reports the time that is therefore counted
    twice.
    """
    stream = EventStream(path, options.max_bytes, recover=options.recover)
    collector = _Collector(str(path))
    for events, array in stream.blocks():
        collector.add(events, array)
    stream.repairs["overflowed-duration"] = collector.overflowed
    try:
        other = msgspec.json.decode(stream.header, type=_Header).otherData
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"malformed JSON around the events: {error}",
            path=str(path),
            position="header",
            hint="export the trace again; the file may be cut off",
        ) from error
    try:
        other_data = msgspec.json.decode(other, type=dict[str, str | int | float | bool | None])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        other_data = {}  # another viewer's document
    facts = {key: text for key, text in other_data.items() if isinstance(text, str)}
    ours = facts.pop("schema", "") == SCHEMA_ID
    collected = collector.finish()
    on_host = collected.slices.category_id == collected.strings.find(HOST_CATEGORY)
    device, host = collected.slices.take(~on_host), collected.slices.take(on_host)
    if not len(device):
        raise FormatError(
            "the trace holds no slices: no event 'X', no pair 'B' and 'E'",
            path=str(path),
            position="list 'traceEvents'",
            hint="record again, and stop the profiler after the work",
        )
    findings = diagnostics.about(str(path), "chrome-trace")
    report_repairs(stream.repairs, findings)
    listed = ", ".join(f"{what} {count:,}" for what, count in sorted(collected.skipped.items()))
    message = f"events without a duration are left out: {listed}"
    findings.info("other-events", message, sum(collected.skipped.values()))
    report_halves(findings, "events", collected.unfinished, collected.orphans)
    findings.warning("negative-duration", "events end before they start", int((device.duration_ns < 0).sum()))
    report_nested(findings, device.track, device.start_ns, device.duration_ns)
    return _profile(path, collected, device, host, facts, ours=ours)


def _profile(
    path: Path,
    collected: _CollectedEvents,
    device: _ChromeSlices,
    host: _ChromeSlices,
    facts: dict[str, str],
    *,
    ours: bool,
) -> Profile:
    # Find rank and device from the name of the process, the stream from the name or number of the thread.
    devices: dict[str, int] = {}
    columns: dict[str, list[int]] = {"rank": [], "device_index": [], "stream": []}
    used = set(np.unique(device.track).tolist())
    for number, (pid, tid) in enumerate(collected.tracks):
        process = collected.process_names.get(pid, "")
        rank, name = rank_and_device(process) or (0, process or f"process {pid}")
        columns["rank"].append(rank)
        columns["device_index"].append(devices.setdefault(name, len(devices)) if number in used else 0)
        stream = stream_in_name(collected.thread_names.get((pid, tid), ""))
        if stream is None:
            stream = tid if isinstance(tid, int) and 0 <= tid < 1 << 63 else number
        columns["stream"].append(stream)
    track_columns = {key: np.array(column, np.int64)[device.track] for key, column in columns.items()}
    base_ns = 0 if ours else int(device.start_ns.min())  # files of Hespas count from the first event already
    name = facts.pop("name", "") if ours else ""
    metadata = facts if ours else {"format": "chrome-trace"}
    if not ours:
        metadata["first_event_ns"] = str(base_ns)
    op_id, kernel_id = ops_and_kernels(device.name_id, device.op, device.kernel, ours=ours)
    start_ns, duration_ns = _times(device, base_ns, ours=ours)
    strings = StringTableBuilder(collected.strings)
    operations = _host_ops(collected, host, *_times(host, base_ns, ours=ours), strings)
    # Find the host operation of each device slice, -1 for none. Where several slices start at the end of a
    # flow arrow, the shortest is used, as trace viewers do.
    source = _slice_at(host, collected.arrows.source_track, collected.arrows.source_ns)
    target = _slice_at(device, collected.arrows.target_track, collected.arrows.target_ns)
    joined = (source >= 0) & (target >= 0)
    cause = np.full(len(device.track), -1, np.int32)
    cause[target[joined]] = source[joined]
    return Profile.of(
        name or path.name.removesuffix(".gz").removesuffix(".json"),
        tuple(devices),
        strings.build(),
        start_ns=start_ns,
        duration_ns=duration_ns,
        op_id=op_id,
        kernel_id=kernel_id,
        module_id=device.module,
        shapes_id=device.shapes,
        dtype_id=device.dtype,
        category_id=device.category_id,
        op_class=device.op_class,
        device_index=track_columns["device_index"],
        rank=track_columns["rank"],
        stream=track_columns["stream"],
        run=device.run,
        bytes_moved=device.bytes_moved,
        host_event=cause,
        host=operations,
        metadata=metadata,
    )


def _times(slices: _ChromeSlices, base_ns: int, *, ours: bool) -> tuple[FloatArray, FloatArray]:
    """Return the starts and durations of slices [ns]."""
    start_ns = _joined(slices.start_ns - base_ns, slices.start_part_ns)
    duration_ns = _joined(slices.duration_ns, slices.duration_part_ns)
    if not ours:
        return start_ns, duration_ns
    exact_ns = slices.stated_start_ns, slices.stated_duration_ns
    start_ns = np.where(agreeing(exact_ns[0], start_ns), exact_ns[0], start_ns)
    return start_ns, np.where(agreeing(exact_ns[1], duration_ns), exact_ns[1], duration_ns)


def _joined(whole_ns: IntArray, part_ns: FloatArray) -> FloatArray:
    """Add whole ns and fractions of ns. The sum is computed in integer ps, so that the result is the nearest
    float.
    """
    if not part_ns.any():
        return whole_ns.astype(np.float64)
    steps = whole_ns * 1000 + np.rint(part_ns * 1000).astype(np.int64)
    return np.where(part_ns != 0, steps / 1000.0, whole_ns.astype(np.float64))


_THREAD = "thread"


def _host_ops(
    collected: _CollectedEvents,
    host: _ChromeSlices,
    start_ns: FloatArray,
    duration_ns: FloatArray,
    strings: StringTableBuilder,
) -> HostOps:
    """Convert the slices of the host to operations; names of threads are added to ``strings``."""
    names = [collected.thread_names.get(track, "") for track in collected.tracks]
    threads = np.array([strings.add(name.removeprefix(_THREAD).strip()) for name in names], np.int32)
    return HostOps.of(
        name_id=host.name_id,
        thread_id=threads[host.track],
        parent=enclosing(host.track, host.start_ns, host.duration_ns)[0],
        start_ns=start_ns,
        duration_ns=duration_ns,
        shapes_id=host.shapes,
        dtype_id=host.dtype,
        strides_id=host.strides,
        values_id=host.values,
    )


def _slice_at(table: _ChromeSlices, track: IntArray, at_ns: IntArray) -> IntArray:
    """Return the row of the slice that starts on each track at each time; -1 for none."""
    both_track, both_ns = np.concatenate([table.track, track]), np.concatenate([table.start_ns, at_ns])
    _, key = distinct_rows(both_track, both_ns)
    order = np.argsort(-table.duration_ns, kind="stable")
    slices = np.full(int(key.max(initial=-1)) + 1, -1, np.int64)
    slices[key[: len(table.track)][order]] = order
    return slices[key[len(table.track) :]]
