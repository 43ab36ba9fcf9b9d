"""The events of a trace as columns, by kind. Units at the border: microseconds -> whole ns since the base."""

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

from hespas.converters.chrome_events import EventStream, EventTimes, TraceEvent, event_times
from hespas.converters.launch_shapes import shape_text
from hespas.converters.pytorch.records import (
    KINDS,
    DeviceArgs,
    Header,
    HostArgs,
    Kind,
    LaunchArgs,
    MemoryArgs,
    Number,
    SyncArgs,
    category_of,
)
from hespas.graph import StringTable, StringTableBuilder
from hespas.graph.columns import IntArray, SmallIntArray, distinct_rows
from hespas.graph.errors import FormatError

__all__ = ["Events", "HostEvents", "KinetoTrace", "Rows", "integer", "integers", "read_events"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Events:
    """Columns every kind has; ``process`` and ``thread`` are string rows (pids may be texts)."""

    name_row: SmallIntArray
    category_row: SmallIntArray
    process: SmallIntArray
    thread: SmallIntArray
    start_ns: IntArray
    duration_ns: IntArray

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> IntArray:
        """When each event ends."""
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _DeviceEvents(Events):
    """Work on devices; -1 where not stated. ``collective_row`` is the JSON text of a collective's facts.
    ``graph_node`` is the node of a captured graph that it replays.
    """

    correlation: IntArray
    graph_node: IntArray
    external_id: IntArray
    stream: IntArray
    device: IntArray
    bytes: IntArray
    grid_row: SmallIntArray
    collective_row: SmallIntArray

    @property
    def devices(self) -> IntArray:
        """The numbers of the devices that worked, in order; none where no event states one."""
        return np.unique(self.device[self.device >= 0])

    @property
    def place(self) -> IntArray:
        """Which of :attr:`devices` each event was on; the first where it does not say."""
        return np.maximum(np.searchsorted(self.devices, self.device), 0)

    def own_streams(self) -> IntArray:
        """The stream of each event; of several devices with streams of one number, the one with most events
        keeps its numbers, and those of others follow the largest.
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
    """Operations on the host; shapes, types, strides and values of inputs as JSON texts (row 0: none).
    ``stated_row`` is a JSON list of the FLOPs and gigabytes that a compiler states of its kernel.
    """

    external_id: IntArray
    record_id: IntArray
    sequence: IntArray
    forward_thread: IntArray
    dims_row: SmallIntArray
    types_row: SmallIntArray
    strides_row: SmallIntArray
    concrete_row: SmallIntArray
    stated_row: SmallIntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _LaunchEvents(Events):
    """Calls of the runtime and the driver; ``kernel_row`` is what a launch says it launches (0: nothing)."""

    correlation: IntArray
    external_id: IntArray
    kernel_row: SmallIntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _SyncEvents(Events):
    """Waits: ``stream`` waits for what the call ``record`` (a correlation) marked on ``wait_on_stream``."""

    correlation: IntArray
    device: IntArray
    stream: IntArray
    wait_on_stream: IntArray
    record: IntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Allocations(Events):
    """Changes of memory in use, with the totals behind them; ``device_type`` is PyTorch's (0: the CPU)."""

    bytes: IntArray
    allocated: IntArray
    reserved: IntArray
    device_type: IntArray
    device: IntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KinetoTrace:
    """One trace. ``annotation`` holds named ranges as operations of the host. ``skipped`` counts events of
    categories that carry no time of ours, by category. ``repeated`` counts events that stood in the file
    before, with all that is kept of them, by category: they are left out. ``repairs`` counts what had to be
    mended, by key of :data:`hespas.converters.chrome_events.REPAIRS`.
    """

    header: Header
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


def _is_row(column: str) -> bool:
    """Whether a column holds rows of texts."""
    return column.endswith("_row") or column in {"process", "thread"}


_ALLOCATION = "[memory]"
_NULL, _NOTHING = msgspec.Raw(b"null"), msgspec.Raw(b"{}")


@dataclass(slots=True)
class _Collected:
    """Columns of one kind, which grow while blocks are read: small arrays between what is read and dropped
    would keep the memory of that.
    """

    columns: dict[str, array[int]] = field(default_factory=dict[str, "array[int]"])

    def add(self, name: str, values: Sequence[int] | IntArray) -> None:
        column = self.columns.setdefault(name, array("i" if _is_row(name) else "q"))
        column.frombytes(np.asarray(values, column.typecode).tobytes())

    def add_numbers(self, args: Sequence[msgspec.Struct], *names: str) -> None:
        """Columns of what the arguments of events say under these names."""
        for name in names:
            self.add(name, integers(list(map(attrgetter(name), args))))

    def column(self, name: str) -> IntArray:
        column = self.columns.get(name, array("q"))
        return np.frombuffer(column, column.typecode)

    def build(self, kind: type[_Kind]) -> _Kind:
        """The columns that a kind of events has; rows of texts are small."""
        columns: dict[str, Any] = {}
        for each in fields(kind):
            columns[each.name] = self.column(each.name).astype(
                np.int32 if _is_row(each.name) else np.int64, copy=False
            )
        return kind(**columns)

    def without_repeated(self) -> IntArray:
        """Leave out events that are equal to an earlier one in all columns; the categories of those.

        A stream runs one thing at a time, and a thread begins one: what took time at the same place and
        moment under the same ids was written twice.
        """
        if "id" not in self.columns:  # what has no ids may well repeat itself
            return np.empty(0, np.int64)
        near = _with_a_twin(self.column("start_ns"), self.column("duration_ns"))
        near = near[self.column("duration_ns")[near] > 0]
        for more in ("thread", "name_row"):  # few are left for each column that is looked at
            near = near[
                _with_a_twin(*(self.column(name)[near] for name in ("start_ns", "duration_ns", more)))
            ]
        if not len(near):
            return np.empty(0, np.int64)
        columns = {name: self.column(name)[near] for name in self.columns}
        _, first = np.unique(np.stack(list(columns.values())), axis=1, return_index=True)
        repeated = np.delete(np.arange(len(near)), first)
        repeated = repeated[columns["id"][repeated] >= 0]
        if len(repeated):
            again = near[repeated]
            left = {name: np.delete(self.column(name), again) for name in self.columns}
            self.columns = {
                name: array(self.columns[name].typecode, column.tobytes()) for name, column in left.items()
            }
        categories: IntArray = columns["category_row"][repeated]
        return categories


def _with_a_twin(*columns: IntArray) -> IntArray:
    """Rows that are equal to another one in all of these columns."""
    order = np.lexsort(columns[::-1])
    same = np.ones(max(len(order) - 1, 0), np.bool_)
    for column in columns:
        ordered = column[order]
        same &= ordered[1:] == ordered[:-1]
    places = np.flatnonzero(same)
    return np.unique(np.concatenate([order[places], order[places + 1]]))


def read_events(path: Path, max_bytes: int, *, recover: bool = False) -> KinetoTrace:
    """Read a trace block by block. Raises ``FormatError`` with the byte of what makes no sense, unless it is
    to ``recover`` what does.
    """
    stream = EventStream(path, max_bytes, recover=recover)
    reader = _Reader(str(path))
    for events, text in stream.blocks():
        reader.add(events, text)
    try:
        header = msgspec.json.decode(stream.header, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"what stands beside the events is not a trace's header: {error}",
            path=str(path),
            position="header",
            hint="is it a Chrome trace of PyTorch's profiler?",
        ) from error
    stream.repairs["overflowed-duration"] = reader.overflowed
    return reader.trace(header, dict(stream.repairs))


def _makes_sense(decoder: msgspec.json.Decoder[list[_Args]], event: TraceEvent) -> bool:
    try:
        decoder.decode(b"[" + event.args + b"]")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


class _Reader:
    """Sorts events by kind and turns what is known of them into columns."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.strings = StringTableBuilder()
        self.skipped: dict[str, int] = {}
        self.seen = 0
        self.overflowed = 0
        self.kinds = {kind: _Collected() for kind in Kind}
        self.device_args = msgspec.json.Decoder(list[DeviceArgs])
        self.launch_args = msgspec.json.Decoder(list[LaunchArgs])
        self.host_args = msgspec.json.Decoder(list[HostArgs])
        self.sync_args = msgspec.json.Decoder(list[SyncArgs])
        self.memory_args = msgspec.json.Decoder(list[MemoryArgs])
        add = self.strings.add
        self.labels = Rows[int | str | None](lambda label: add(str(label)))
        self.kernels = Rows[Number](lambda kernel: add(kernel if isinstance(kernel, str) else ""))
        self.shapes = Rows[bytes](lambda shape: add(_launch_shape(shape)))
        self.texts = Rows[bytes](lambda text: add(text.decode("utf-8", "replace")))

    def add(self, events: list[TraceEvent], array: bytes) -> None:
        """Take one block."""
        places_of: defaultdict[str, list[int]] = defaultdict(list)
        others: defaultdict[str, int] = defaultdict(int)
        for place, event in enumerate(events):
            if event.ph == "X":
                if event.cat not in KINDS:
                    event.cat = category_of(event.cat, event.name)
                places_of[event.cat].append(place)
            elif event.name == _ALLOCATION:
                event.cat, event.dur = "cpu_instant_event", 0
                places_of[event.cat].append(place)
            else:
                others[event.cat or f"phase {event.ph or '?'}"] += 1
        chosen: dict[Kind, list[int]] = {kind: [] for kind in Kind}
        for category, places in places_of.items():
            kind = KINDS.get(category)
            if kind is None:
                others[category or "phase X"] += len(places)
            else:
                chosen[kind].extend(places)
        for what, count in others.items():
            self.skipped[what] = self.skipped.get(what, 0) + count
        for kind, places in chosen.items():
            if places:
                places.sort()  # of several categories
                these = [events[place] for place in places]
                times = event_times(events, array, places, path=self.path, before=self.seen)
                self.overflowed += len(times.overflowed)
                self._common(self.kinds[kind], these, times)
                self._specific(kind, these, places)
        self.seen += len(events)

    def _common(self, into: _Collected, events: list[TraceEvent], times: EventTimes) -> None:
        into.add("start_ns", times.start_ns)
        into.add("duration_ns", times.duration_ns)
        into.add("name_row", self.labels.of([event.name for event in events]))
        into.add("category_row", self.labels.of([event.cat for event in events]))
        into.add("process", self.labels.of([event.pid for event in events]))
        into.add("thread", self.labels.of([event.tid for event in events]))

    def _specific(self, kind: Kind, events: list[TraceEvent], places: list[int]) -> None:
        into, count = self.kinds[kind], len(events)
        match kind:
            case Kind.DEVICE:
                devices = self._decoded(self.device_args, events, places)
                into.add_numbers(devices, "correlation", "graph_node", "stream", "device", "bytes")
                into.add("external_id", _external_ids(devices))
                into.add(
                    "grid_row",
                    self.shapes.of(bytes(each.grid) + b"|" + bytes(each.block) for each in devices),
                )
                into.add("collective_row", [self._collective(each) for each in devices])
            case Kind.LAUNCH:
                launches = self._decoded(self.launch_args, events, places)
                into.add_numbers(launches, "correlation")
                into.add("external_id", _external_ids(launches))
                into.add("kernel_row", self.kernels.of([each.kernel for each in launches]))
            case Kind.HOST | Kind.ANNOTATION:
                hosts = self._decoded(self.host_args, events, places)
                into.add_numbers(hosts, "external_id", "record_id", "sequence", "forward_thread")
                for name in ("dims", "types", "strides", "concrete"):
                    into.add(f"{name}_row", self._texts(list(map(attrgetter(name), hosts))))
                into.add("stated_row", self._texts(list(map(_stated_costs, hosts))))
                stated = (into.column(name)[-count:] for name in ("external_id", "record_id"))
                into.add("id", np.maximum(*stated))
                return
            case Kind.SYNC:
                waits = self._decoded(self.sync_args, events, places)
                into.add_numbers(waits, "correlation", "device", "stream", "wait_on_stream", "record")
            case Kind.FUNCTION:
                return
            case Kind.ALLOCATION:
                memory = self._decoded(self.memory_args, events, places)
                into.add_numbers(memory, "bytes", "allocated", "reserved", "device_type", "device")
                return
        into.add("id", into.column("correlation")[-count:])

    def _decoded(
        self, decoder: msgspec.json.Decoder[list[_Args]], events: list[TraceEvent], places: list[int]
    ) -> list[_Args]:
        try:
            return decoder.decode(b"[" + b",".join([event.args for event in events]) + b"]")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if any(event.args == _NULL for event in events):
                for event in events:
                    event.args = _NOTHING if event.args == _NULL else event.args
                return self._decoded(decoder, events, places)
            pairs = zip(places, events, strict=True)
            wrong = (place for place, event in pairs if not _makes_sense(decoder, event))
            number = next(wrong, places[0])
            raise FormatError(
                f"the args of an event make no sense: {error}",
                path=self.path,
                position=f"event {self.seen + number + 1}, field 'args'",
                hint="export the trace again",
            ) from error

    def _collective(self, args: DeviceArgs) -> int:
        """What a kernel says of the collective it is part of, as a text; row 0 for nothing."""
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
        """String rows of JSON texts; equal ones are decoded once."""
        if not bytes(raws[0]) and raws.count(raws[0]) == len(raws):  # no event states any
            return [0] * len(raws)
        return self.texts.of(map(bytes, raws))

    def trace(self, header: Header, repairs: dict[str, int]) -> KinetoTrace:
        """All columns."""
        rows = [collected.without_repeated() for collected in self.kinds.values()]
        strings = self.strings.build()
        repeated = Counter(strings[row] for row in np.concatenate(rows).tolist())
        kinds = self.kinds
        return KinetoTrace(
            header=header,
            strings=strings,
            device=kinds[Kind.DEVICE].build(_DeviceEvents),
            launch=kinds[Kind.LAUNCH].build(_LaunchEvents),
            host=kinds[Kind.HOST].build(HostEvents),
            annotation=kinds[Kind.ANNOTATION].build(HostEvents),
            sync=kinds[Kind.SYNC].build(_SyncEvents),
            function=kinds[Kind.FUNCTION].build(Events),
            allocation=kinds[Kind.ALLOCATION].build(_Allocations),
            skipped=self.skipped,
            repeated=dict(repeated),
            repairs=repairs,
        )


_extents = msgspec.json.Decoder(tuple[int, int, int])


def _launch_shape(shape: bytes) -> str:
    """Grid and block as one text; empty where there is none."""
    grid, _, block = shape.partition(b"|")
    try:
        return shape_text(_extents.decode(grid), _extents.decode(block))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def _stated_costs(args: HostArgs) -> msgspec.Raw:
    """Return what an operation states of its costs as a list, nothing where it states nothing."""
    flops, gigabytes = bytes(args.flops), bytes(args.gigabytes)
    if not flops and not gigabytes:
        return args.flops
    return msgspec.Raw(b"[%b,%b]" % (flops or b"null", gigabytes or b"null"))


def _external_ids(args: Sequence[DeviceArgs] | Sequence[LaunchArgs]) -> IntArray:
    """Ids of operations, whose name was once written small."""
    found = integers([each.external_id for each in args])
    first = integers([each.first_external_id for each in args])
    return np.where(found < 0, first, found)


# Values of events as columns: numbers however they are spelled, rows of texts, parts of an exchange.

_ABSENT = -1
_Value = TypeVar("_Value", bound=float | str | bytes | None)


def integers(values: Sequence[Number]) -> IntArray:
    """A column of numbers, -1 where there is none."""
    for absent in (False, True):
        stated = [_ABSENT if value is None else value for value in values] if absent else values
        try:
            return np.frombuffer(array("q", cast("Sequence[int]", stated)), np.int64)
        except (TypeError, OverflowError):
            continue  # one is absent, or a text, or does not fit
    return np.array(list(map(integer, values)), np.int64)


def integer(value: Number) -> int:
    """A number however it is written, -1 where there is none."""
    if value is None:
        return _ABSENT
    try:
        whole = int(value)
    except (ValueError, OverflowError):
        return _ABSENT
    return whole if -(1 << 63) <= whole < 1 << 63 else _ABSENT


class Rows(dict[_Value, int]):
    """Rows of values; ``add`` makes one for a value that is new."""

    __slots__ = ("_add",)

    def __init__(self, add: Callable[[_Value], int]) -> None:
        super().__init__()
        self._add = add

    def __missing__(self, value: _Value) -> int:
        """The row of a new value."""
        row = self[value] = self._add(value)
        return row

    def of(self, values: Iterable[_Value]) -> list[int]:
        """The row of each value."""
        return list(map(self.__getitem__, values))


def _differ(split: str | list[int] | None) -> bool:
    """Whether the parts of an exchange have several sizes; long lists are written cut, with dots."""
    if isinstance(split, str):
        split = [int(part) for part in split.strip("[] ").split(",") if part.strip().isdecimal()]
    return len(set(split or ())) > 1
