"""Events of a Kineto trace as columns, by kind. Microseconds are converted to whole ns since the
base time.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from hespas.converters.chrome_events import EventStream, TraceEvent, event_times
from hespas.converters.launch_shapes import shape_text
from hespas.converters.pytorch.records import (
    EVENT_KINDS,
    DeviceArgs,
    HostArgs,
    JsonNumber,
    KinetoEventKind,
    KinetoHeader,
    LaunchArgs,
    MemoryArgs,
    SyncArgs,
    category_of,
)
from hespas.graph import StringTable, StringTableBuilder
from hespas.graph.columns import IntArray, SmallIntArray, distinct_rows
from hespas.graph.errors import FormatError

__all__ = [
    "Events",
    "HostEvents",
    "KinetoTrace",
    "TextRows",
    "integer",
    "integers",
    "is_text_column",
    "read_events",
]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Events:
    """Columns that every kind of event has. ``process`` and ``thread`` are rows of the string table, because
    the ids may be texts.
    """

    name_id: SmallIntArray
    category_id: SmallIntArray
    process: SmallIntArray
    thread: SmallIntArray
    start_ns: IntArray
    duration_ns: IntArray

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> IntArray:
        """End of each event."""
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _DeviceEvents(Events):
    """Kernels, copies and fills on devices, one per row; -1 for unknown numbers.

    ``collective_id`` is the row of the string table with a collective's arguments as JSON text.
    ``graph_node`` is the node of the captured CUDA graph that the event replays.
    """

    correlation: IntArray
    graph_node: IntArray
    external_id: IntArray
    stream: IntArray
    device: IntArray
    bytes: IntArray
    grid_id: SmallIntArray
    collective_id: SmallIntArray

    @property
    def devices(self) -> IntArray:
        """Numbers of the devices that ran an event, ascending; empty if no event states one."""
        return np.unique(self.device[self.device >= 0])

    @property
    def place(self) -> IntArray:
        """Return for each event the index of its device in :attr:`devices`; 0 if the event does not state a
        device.
        """
        return np.maximum(np.searchsorted(self.devices, self.device), 0)

    def own_streams(self) -> IntArray:
        """Return stream numbers that are unique across devices. The device with most events has the recorded
        numbers. Streams of other devices are numbered after the largest of these.
        """
        if len(self.devices) < 2:
            return self.stream
        main = int(np.bincount(self.place).argmax())
        other = (self.place != main) & (self.stream >= 0)
        _, number = distinct_rows(self.place[other], self.stream[other])
        streams = self.stream.copy()
        streams[other] = int(self.stream.max()) + 1 + number
        return streams


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HostEvents(Events):
    """Operations on the host. ``dims_id``, ``types_id``, ``strides_id`` and ``concrete_id`` are rows of the
    string table (0: none). The strings there are JSON texts with the shapes, types, strides and values of the
    inputs.

    ``stated_id`` is such a row, too. Its text is the list [FLOPs, gigabytes] that a compiler states for its
    kernel.
    """

    external_id: IntArray
    record_id: IntArray
    sequence: IntArray
    forward_thread: IntArray
    dims_id: SmallIntArray
    types_id: SmallIntArray
    strides_id: SmallIntArray
    concrete_id: SmallIntArray
    stated_id: SmallIntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _LaunchEvents(Events):
    """Calls of the CUDA (or HIP) runtime and driver. ``kernel_id`` is the string table row of the kernel name
    that the call states (0: none).
    """

    correlation: IntArray
    external_id: IntArray
    kernel_id: SmallIntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _SyncEvents(Events):
    """Waits of streams for CUDA events: ``stream`` waits for the event that was recorded on
    ``wait_on_stream``. ``record`` is the correlation id of the call that recorded that event.
    """

    correlation: IntArray
    device: IntArray
    stream: IntArray
    wait_on_stream: IntArray
    record: IntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Allocations(Events):
    """Allocations and releases of memory. ``allocated`` and ``reserved`` are the totals after each of them.
    ``device_type`` is PyTorch's number of the kind of device (0: CPU).
    """

    bytes: IntArray
    allocated: IntArray
    reserved: IntArray
    device_type: IntArray
    device: IntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KinetoTrace:
    """Events of one Kineto trace, in one table per kind.

    ``annotation`` has the named ranges, with the columns of host operations. ``skipped`` counts events of
    categories that are not read, by category. ``repeated`` counts events that were dropped because an equal
    event precedes them, by category. ``repairs`` counts repaired defects, by key of
    :data:`hespas.converters.chrome_events.REPAIRS`.
    """

    header: KinetoHeader
    strings: StringTable
    device: _DeviceEvents
    launch: _LaunchEvents
    host: HostEvents
    annotation: HostEvents
    sync: _SyncEvents
    function: Events
    allocation: _Allocations
    skipped: dict[str, int]
    repeated: dict[str, int]
    repairs: dict[str, int]


_Args = TypeVar("_Args", bound=msgspec.Struct)
_Kind = TypeVar("_Kind", bound=Events)


def is_text_column(column: str) -> bool:
    """Return True if a column has string rows, False if it has numbers such as the trace's own ids."""
    return column in {"process", "thread"} or (
        column.endswith("_id") and column not in {"external_id", "record_id"}
    )


_ALLOCATION = "[memory]"
_NULL, _NO_ARGS = msgspec.Raw(b"null"), msgspec.Raw(b"{}")


@dataclass(slots=True)
class _KinetoColumns:
    """Columns of one kind of event, which grow while blocks are read.

    Each column is one growing array: many small arrays would fragment the memory of dropped blocks.
    """

    columns: dict[str, array[int]] = field(default_factory=dict[str, "array[int]"])

    def add(self, name: str, values: Sequence[int] | IntArray) -> None:
        column = self.columns.setdefault(name, array("i" if is_text_column(name) else "q"))
        column.frombytes(np.asarray(values, column.typecode).tobytes())

    def add_numbers(self, args: Sequence[msgspec.Struct], *names: str) -> None:
        """Append one column per field in ``names`` of the event arguments ``args``."""
        for name in names:
            self.add(name, integers(list(map(attrgetter(name), args))))

    def column(self, name: str) -> IntArray:
        column = self.columns.get(name, array("q"))
        return np.frombuffer(column, column.typecode)

    def build(self, kind: type[_Kind]) -> _Kind:
        """Return the columns as an object of class ``kind``. Columns of string rows have 32 bits, other
        numbers 64.
        """
        columns: dict[str, Any] = {}
        for column in fields(kind):
            columns[column.name] = self.column(column.name).astype(
                np.int32 if is_text_column(column.name) else np.int64, copy=False
            )
        return kind(**columns)

    def without_repeated(self) -> IntArray:
        """Drop events that are equal to an earlier one in all columns; return the categories of the dropped
        events.

        A stream runs one event at a time, and a thread begins one at a time. So two events with equal times,
        tracks and ids are one event that was written twice.
        """
        if "id" not in self.columns:  # events without ids may be equal
            return np.empty(0, np.int64)
        candidates = _repeated_rows(self.column("start_ns"), self.column("duration_ns"))
        candidates = candidates[self.column("duration_ns")[candidates] > 0]
        for more in ("thread", "name_id"):  # each column leaves fewer candidates
            candidates = candidates[
                _repeated_rows(*(self.column(name)[candidates] for name in ("start_ns", "duration_ns", more)))
            ]
        if not len(candidates):
            return np.empty(0, np.int64)
        columns = {name: self.column(name)[candidates] for name in self.columns}
        _, first = np.unique(np.stack(list(columns.values())), axis=1, return_index=True)
        repeated = np.delete(np.arange(len(candidates)), first)
        repeated = repeated[columns["id"][repeated] >= 0]
        if len(repeated):
            dropped = candidates[repeated]
            remaining = {name: np.delete(self.column(name), dropped) for name in self.columns}
            self.columns = {
                name: array(self.columns[name].typecode, column.tobytes())
                for name, column in remaining.items()
            }
        categories: IntArray = columns["category_id"][repeated]
        return categories


def _repeated_rows(*columns: IntArray) -> IntArray:
    """Return the rows in which all of these columns equal another row: events that are stored twice."""
    order = np.lexsort(columns[::-1])
    same = np.ones(max(len(order) - 1, 0), np.bool_)
    for column in columns:
        ordered = column[order]
        same &= ordered[1:] == ordered[:-1]
    equal = np.flatnonzero(same)
    return np.unique(np.concatenate([order[equal], order[equal + 1]]))


def read_events(path: Path, max_bytes: int, *, recover: bool = False) -> KinetoTrace:
    """Read a trace block by block. Raises ``FormatError`` with the byte position of a defect, unless
    ``recover`` is set.
    """
    stream = EventStream(path, max_bytes, recover=recover)
    reader = _KinetoCollector(str(path))
    for events, text in stream.blocks():
        reader.add(events, text)
    try:
        header = msgspec.json.decode(stream.header, type=KinetoHeader)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"malformed header: {error}",
            path=str(path),
            position="header",
            hint="use a trace of PyTorch's profiler",
        ) from error
    stream.repairs["overflowed-duration"] = reader.overflowed
    return reader.trace(header, dict(stream.repairs))


class _KinetoCollector:
    """Collector of the events of a Kineto trace. It sorts them by kind and appends their fields to
    columns.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.strings = StringTableBuilder()
        self.skipped: dict[str, int] = {}
        self.seen = 0
        self.overflowed = 0
        self.kinds = {kind: _KinetoColumns() for kind in KinetoEventKind}
        self.device_args = msgspec.json.Decoder(list[DeviceArgs])
        self.launch_args = msgspec.json.Decoder(list[LaunchArgs])
        self.host_args = msgspec.json.Decoder(list[HostArgs])
        self.sync_args = msgspec.json.Decoder(list[SyncArgs])
        self.memory_args = msgspec.json.Decoder(list[MemoryArgs])
        add = self.strings.add
        self.labels = TextRows[int | str | None](lambda label: add(str(label)))
        self.kernels = TextRows[JsonNumber](lambda kernel: add(kernel if isinstance(kernel, str) else ""))
        self.shapes = TextRows[bytes](lambda shape: add(_launch_shape(shape)))
        self.texts = TextRows[bytes](lambda text: add(text.decode("utf-8", "replace")))

    def add(self, events: list[TraceEvent], array: bytes) -> None:
        """Append the events of one block."""
        rows_of: defaultdict[str, list[int]] = defaultdict(list)
        skipped: defaultdict[str, int] = defaultdict(int)
        for row, event in enumerate(events):
            if event.ph == "X":
                if event.cat not in EVENT_KINDS:
                    event.cat = category_of(event.cat, event.name)
                rows_of[event.cat].append(row)
            elif event.name == _ALLOCATION:
                event.cat, event.dur = "cpu_instant_event", 0
                rows_of[event.cat].append(row)
            else:
                skipped[event.cat or f"phase {event.ph or '?'}"] += 1
        by_kind: dict[KinetoEventKind, list[int]] = {kind: [] for kind in KinetoEventKind}
        for category, rows in rows_of.items():
            kind = EVENT_KINDS.get(category)
            if kind is None:
                skipped[category or "phase X"] += len(rows)
            else:
                by_kind[kind].extend(rows)
        for category, count in skipped.items():
            self.skipped[category] = self.skipped.get(category, 0) + count
        for kind, rows in by_kind.items():
            if rows:
                rows.sort()  # of several categories
                selected = [events[row] for row in rows]
                times = event_times(events, array, rows, path=self.path, before=self.seen)
                self.overflowed += len(times.overflowed)
                columns = self.kinds[kind]
                columns.add("start_ns", times.start_ns)
                columns.add("duration_ns", times.duration_ns)
                columns.add("name_id", self.labels.of([event.name for event in selected]))
                columns.add("category_id", self.labels.of([event.cat for event in selected]))
                columns.add("process", self.labels.of([event.pid for event in selected]))
                columns.add("thread", self.labels.of([event.tid for event in selected]))
                self._add_arguments(kind, selected, rows)
        self.seen += len(events)

    def _add_arguments(self, kind: KinetoEventKind, events: list[TraceEvent], rows: list[int]) -> None:
        columns, count = self.kinds[kind], len(events)
        match kind:
            case KinetoEventKind.DEVICE:
                devices = self._decoded(self.device_args, events, rows)
                columns.add_numbers(devices, "correlation", "graph_node", "stream", "device", "bytes")
                columns.add("external_id", _external_ids(devices))
                shapes = (bytes(args.grid) + b"|" + bytes(args.block) for args in devices)
                columns.add("grid_id", self.shapes.of(shapes))
                columns.add("collective_id", [self._collective(args) for args in devices])
            case KinetoEventKind.LAUNCH:
                launches = self._decoded(self.launch_args, events, rows)
                columns.add_numbers(launches, "correlation")
                columns.add("external_id", _external_ids(launches))
                columns.add("kernel_id", self.kernels.of([args.kernel for args in launches]))
            case KinetoEventKind.HOST | KinetoEventKind.ANNOTATION:
                hosts = self._decoded(self.host_args, events, rows)
                columns.add_numbers(hosts, "external_id", "record_id", "sequence", "forward_thread")
                for name in ("dims", "types", "strides", "concrete"):
                    columns.add(f"{name}_id", self._texts(list(map(attrgetter(name), hosts))))
                columns.add("stated_id", self._texts(list(map(_stated_costs, hosts))))
                ids = (columns.column(name)[-count:] for name in ("external_id", "record_id"))
                columns.add("id", np.maximum(*ids))
                return
            case KinetoEventKind.SYNC:
                waits = self._decoded(self.sync_args, events, rows)
                columns.add_numbers(waits, "correlation", "device", "stream", "wait_on_stream", "record")
            case KinetoEventKind.FUNCTION:
                return
            case KinetoEventKind.ALLOCATION:
                memory = self._decoded(self.memory_args, events, rows)
                columns.add_numbers(memory, "bytes", "allocated", "reserved", "device_type", "device")
                return
        columns.add("id", columns.column("correlation")[-count:])

    def _decoded(
        self, decoder: msgspec.json.Decoder[list[_Args]], events: list[TraceEvent], rows: list[int]
    ) -> list[_Args]:
        try:
            return decoder.decode(b"[" + b",".join([event.args for event in events]) + b"]")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if any(event.args == _NULL for event in events):
                for event in events:
                    event.args = _NO_ARGS if event.args == _NULL else event.args
                return self._decoded(decoder, events, rows)
            wrong = rows[0]
            for row, event in zip(rows, events, strict=True):
                try:
                    decoder.decode(b"[" + event.args + b"]")
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    wrong = row
                    break
            raise FormatError(
                f"malformed args of an event: {error}",
                path=self.path,
                position=f"event {self.seen + wrong + 1}, field 'args'",
                hint="export the trace again",
            ) from error

    def _collective(self, args: DeviceArgs) -> int:
        """Return the string row of the arguments of a collective, encoded as JSON; row 0 for other events."""
        if args.collective is None:
            return 0
        facts = {
            "collective": args.collective,
            "in_elements": integer(args.in_elements),
            "out_elements": integer(args.out_elements),
            "dtype": args.dtype or "",
            "group_size": integer(args.group_size),
            "group_name": args.group_name or "",
            "group_ranks": args.group_ranks if isinstance(args.group_ranks, str) else str(args.group_ranks),
            "sequence": integer(args.sequence),
            "splits": _differ(args.in_split) or _differ(args.out_split),
            "source": integer(args.source),
            "target": integer(args.target),
        }
        return self.strings.add(msgspec.json.encode(facts).decode())

    def _texts(self, raws: list[msgspec.Raw]) -> list[int]:
        """Return string rows of JSON texts; equal texts are decoded once."""
        if not bytes(raws[0]) and raws.count(raws[0]) == len(raws):  # no event states any
            return [0] * len(raws)
        return self.texts.of(map(bytes, raws))

    def trace(self, header: KinetoHeader, repairs: dict[str, int]) -> KinetoTrace:
        """Return the trace with all collected events."""
        rows = [columns.without_repeated() for columns in self.kinds.values()]
        strings = self.strings.build()
        repeated = Counter(strings[row] for row in np.concatenate(rows).tolist())
        kinds = self.kinds
        return KinetoTrace(
            header=header,
            strings=strings,
            device=kinds[KinetoEventKind.DEVICE].build(_DeviceEvents),
            launch=kinds[KinetoEventKind.LAUNCH].build(_LaunchEvents),
            host=kinds[KinetoEventKind.HOST].build(HostEvents),
            annotation=kinds[KinetoEventKind.ANNOTATION].build(HostEvents),
            sync=kinds[KinetoEventKind.SYNC].build(_SyncEvents),
            function=kinds[KinetoEventKind.FUNCTION].build(Events),
            allocation=kinds[KinetoEventKind.ALLOCATION].build(_Allocations),
            skipped=self.skipped,
            repeated=dict(repeated),
            repairs=repairs,
        )


_extents = msgspec.json.Decoder(tuple[int, int, int])


def _launch_shape(shape: bytes) -> str:
    """Return the launch shape (grid and block) as one text, empty if either is missing."""
    grid, _, block = shape.partition(b"|")
    try:
        return shape_text(_extents.decode(grid), _extents.decode(block))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def _stated_costs(args: HostArgs) -> msgspec.Raw:
    """Return the costs that an operation states in its arguments as a JSON list, nothing if it states
    none.
    """
    flops, gigabytes = bytes(args.flops), bytes(args.gigabytes)
    if not flops and not gigabytes:
        return args.flops
    return msgspec.Raw(b"[%b,%b]" % (flops or b"null", gigabytes or b"null"))


def _external_ids(arguments: Sequence[DeviceArgs] | Sequence[LaunchArgs]) -> IntArray:
    """Return the ids that link events to operations. Old profilers spell the name of the field in lower
    case.
    """
    ids = integers([args.external_id for args in arguments])
    old_ids = integers([args.first_external_id for args in arguments])
    return np.where(ids < 0, old_ids, ids)


_ABSENT = -1
_Value = TypeVar("_Value", bound=float | str | bytes | None)


def integers(values: Sequence[JsonNumber]) -> IntArray:
    """Return a column of numbers, -1 for missing ones."""
    for absent in (False, True):
        present = [_ABSENT if value is None else value for value in values] if absent else values
        try:
            return np.frombuffer(array("q", cast("Sequence[int]", present)), np.int64)
        except (TypeError, OverflowError):
            continue  # a value is missing, a text, or out of range
    return np.array(list(map(integer, values)), np.int64)


def integer(value: JsonNumber) -> int:
    """Return the integer that a JSON number or text states, -1 if it is missing or malformed."""
    if value is None:
        return _ABSENT
    try:
        whole = int(value)
    except (ValueError, OverflowError):
        return _ABSENT
    return whole if -(1 << 63) <= whole < 1 << 63 else _ABSENT


class TextRows(dict[_Value, int]):
    """Cache of the string table row of each value. ``add`` creates the row of a new value."""

    __slots__ = ("_add",)

    def __init__(self, add: Callable[[_Value], int]) -> None:
        super().__init__()
        self._add = add

    def __missing__(self, value: _Value) -> int:
        """Create the row of a new value."""
        row = self[value] = self._add(value)
        return row

    def of(self, values: Iterable[_Value]) -> list[int]:
        """Return the row of each value."""
        return list(map(self.__getitem__, values))


def _differ(split: str | list[int] | None) -> bool:
    """Return True if the parts of an all-to-all exchange, one per rank, differ in size. ``split`` has the
    recorded sizes, as a list or as text. In a text, dots abbreviate a long list.
    """
    if isinstance(split, str):
        split = [int(part) for part in split.strip("[] ").split(",") if part.strip().isdecimal()]
    return len(set(split or ())) > 1
