"""Events of packets as columns: slices, their ends, and stages of GPUs."""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from hespas.converters.perfetto.packets import LARGEST_NS, Clocks, Packet, Sequence, text
from hespas.converters.tracks.reading import rank_and_device, stream_in_name
from hespas.files.wire import BYTES, VARINT, WireError, fields, signed
from hespas.graph import StringTableBuilder
from hespas.schemas.perfetto import (
    AnnotationField,
    DescriptorField,
    EventField,
    EventType,
    ExtraDataField,
    GpuField,
    GpuInfoField,
    InternedDataField,
    LegacyField,
    PacketField,
    ProcessField,
    SpecificationField,
    SpecificationsField,
    StageField,
    ThreadField,
)

__all__ = ["ARGUMENTS", "Arguments", "Descriptions", "EventColumns", "EventKind", "Place", "TrackKey"]

Arguments = tuple[tuple[str, str | float], ...]
"""What annotations tell, of the names in :data:`ARGUMENTS`."""
TrackKey = tuple[str, int, int | str]
"""``("track", uuid, 0)``, or ``("gpu", gpu, queue)``."""

ARGUMENTS = frozenset(
    {"op", "kernel", "module", "shapes", "dtype", "op_class", "run", "bytes", "start_ns", "duration_ns"}
)
_DOUBLE = struct.Struct("<d")
_U64 = struct.Struct("<Q")
_FLOWS = frozenset(
    {
        EventField.FLOW_IDS,
        EventField.TERMINATING_FLOW_IDS,
        EventField.FLOW_IDS_OLD,
        EventField.TERMINATING_FLOW_IDS_OLD,
    }
)
_NS_PER_US = 1000


class EventKind(IntEnum):
    """What an event is to its track."""

    BEGIN = 0
    END = 1
    INSTANT = 2
    COMPLETE = 3


_KINDS: dict[int, EventKind] = {
    EventType.SLICE_BEGIN: EventKind.BEGIN,
    EventType.SLICE_END: EventKind.END,
    EventType.INSTANT: EventKind.INSTANT,
}
_PHASES = {
    ord("B"): EventKind.BEGIN,
    ord("E"): EventKind.END,
    ord("X"): EventKind.COMPLETE,
    ord("I"): EventKind.INSTANT,
    ord("i"): EventKind.INSTANT,
}


@dataclass(slots=True)
class _Parts:
    """The fields of one event before they are made sense of."""

    type: int = 0
    track: int | None = None
    name: str | None = None
    name_iid: int = 0
    category: str = ""
    category_iid: int = 0
    absolute_us: int | None = None
    delta_us: int = 0
    legacy: tuple[int, int] | None = None
    annotations: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    flows: list[int] = field(default_factory=list[int])

    def message(self, number: int, data: bytes, start: int, end: int) -> None:
        """Take a field of bytes."""
        match number:
            case EventField.DEBUG_ANNOTATIONS:
                self.annotations.append((start, end))
            case EventField.NAME:
                self.name = text(data, start, end)
            case EventField.CATEGORIES:
                self.category = self.category or text(data, start, end)
            case EventField.LEGACY_EVENT:
                self.legacy = (start, end)
            case _:
                pass

    def number(self, number: int, value: int) -> None:
        """Take a field that is a number."""
        match number:
            case EventField.TYPE:
                self.type = value
            case EventField.TRACK_UUID:
                self.track = value
            case EventField.NAME_IID:
                self.name_iid = value
            case EventField.CATEGORY_IIDS:
                self.category_iid = self.category_iid or value
            case EventField.TIMESTAMP_ABSOLUTE_US:
                self.absolute_us = signed(value)
            case EventField.TIMESTAMP_DELTA_US:
                self.delta_us = signed(value)
            case _:
                pass


class EventColumns:
    """Grows one row an event; texts are rows of ``strings``, arguments rows of ``arguments`` (0: none)."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self.strings = StringTableBuilder()
        self.tracks: dict[TrackKey, int] = {}
        self.arguments: dict[Arguments, int] = {(): 0}
        self.kind = array("b")
        self.track = array("q")
        self.time_ns = array("q")
        self.duration_ns = array("q")
        self.name_row = array("i")
        self.category_row = array("i")
        self.argument = array("i")
        self.flow = array("Q")
        self.flow_event = array("q")
        self.other = 0
        self.unresolved = 0
        self._queues: list[str] = []
        self._stages: list[str] = []

    def track_event(self, packet: Packet, sequence: Sequence, start: int, end: int) -> None:
        """A begin, an end, or a moment; counters are counted only."""
        parts = self._parts(packet.data, start, end)
        kind, duration_ns = _KINDS.get(parts.type), 0
        if parts.legacy is not None:
            kind, duration_ns = self._legacy(packet.data, parts, kind)
        sequence.delta_us += parts.delta_us
        if kind is None:
            self.other += 1
            return
        if parts.absolute_us is not None:
            time_ns = parts.absolute_us * _NS_PER_US
        elif PacketField.TIMESTAMP in packet.numbers:
            clock = packet.numbers.get(PacketField.TIMESTAMP_CLOCK_ID, sequence.clock)
            stamp = packet.number(PacketField.TIMESTAMP)
            time_ns = self._clocks.time_ns(sequence.number, clock, stamp, start)
        else:
            time_ns = sequence.delta_us * _NS_PER_US
        name = parts.name
        if name is None:
            name = self._looked_up(sequence, InternedDataField.EVENT_NAMES, parts.name_iid)
        category = parts.category or self._looked_up(
            sequence, InternedDataField.EVENT_CATEGORIES, parts.category_iid
        )
        arguments = self._annotations(packet.data, sequence, parts.annotations) if parts.annotations else ()
        for flow in parts.flows:
            self.flow.append(flow)
            self.flow_event.append(len(self.kind))
        track = sequence.track if parts.track is None else parts.track
        times_ns = (_within(time_ns, start), _within(duration_ns, start))
        self._append(kind, ("track", track, 0), times_ns, (name, category), arguments)

    @staticmethod
    def _parts(data: bytes, start: int, end: int) -> _Parts:
        found = _Parts()
        for number, wire, value, after in fields(data, start, end):
            if number in _FLOWS and wire == BYTES:
                found.flows += (_U64.unpack_from(data, at)[0] for at in range(value, after - 7, 8))
            elif number in _FLOWS:
                found.flows.append(value)
            elif wire == BYTES:
                found.message(number, data, value, after)
            else:
                found.number(number, value)
        return found

    @staticmethod
    def _legacy(data: bytes, parts: _Parts, kind: EventKind | None) -> tuple[EventKind | None, int]:
        """The phase of an event in Chrome's older form, and the duration of a complete one in ns."""
        start, end = parts.legacy or (0, 0)
        duration_ns = 0
        for number, wire, value, _ in fields(data, start, end):
            if wire != VARINT:
                continue
            if number == LegacyField.PHASE:
                kind = _PHASES.get(value)
            elif number == LegacyField.DURATION_US:
                duration_ns = signed(value) * _NS_PER_US
            elif number == LegacyField.NAME_IID:
                parts.name_iid = parts.name_iid or value
        return kind, duration_ns

    def _looked_up(self, sequence: Sequence, what: InternedDataField, iid: int) -> str:
        if not iid:
            return ""
        found = sequence.interned.get((what, iid))
        if found is None:
            self.unresolved += 1
        return found or ""

    def _annotations(self, data: bytes, sequence: Sequence, spans: list[tuple[int, int]]) -> Arguments:
        arguments: dict[str, str | float] = {}
        for start, end in spans:
            key = ""
            value: str | float | None = None
            for number, wire, place, after in fields(data, start, end):
                match number:
                    case AnnotationField.NAME_IID if wire == VARINT:
                        key = sequence.interned.get((InternedDataField.DEBUG_ANNOTATION_NAMES, place), "")
                    case AnnotationField.NAME if wire == BYTES:
                        key = text(data, place, after)
                    case AnnotationField.STRING_VALUE if wire == BYTES:
                        value = text(data, place, after)
                    case AnnotationField.STRING_VALUE_IID if wire == VARINT:
                        value = self._looked_up(
                            sequence, InternedDataField.DEBUG_ANNOTATION_STRING_VALUES, place
                        )
                    case AnnotationField.UINT_VALUE | AnnotationField.INT_VALUE if wire == VARINT:
                        value = float(signed(place))
                    case AnnotationField.DOUBLE_VALUE if wire != BYTES:
                        value = float(_DOUBLE.unpack(_U64.pack(place))[0])
                    case _:
                        pass
            if key in ARGUMENTS and value is not None:
                arguments[key] = value
        return tuple(arguments.items())

    def stage(self, packet: Packet, sequence: Sequence, start: int, end: int) -> None:
        """Work on a queue of a GPU; what only lists queues and stages is no event."""
        data, values = packet.data, dict[int, int]()
        name, arguments = "", dict[str, str | float]()
        for number, wire, value, after in fields(data, start, end):
            if wire == VARINT:
                values[number] = value
            elif number == StageField.NAME and wire == BYTES:
                name = text(data, value, after)
            elif number == StageField.EXTRA_DATA and wire == BYTES:
                key, content = _pair(data, value, after)
                if key in ARGUMENTS:
                    arguments[key] = content
            elif number == StageField.SPECIFICATIONS and wire == BYTES:
                self._specify(data, value, after)
        if StageField.EVENT_ID not in values and StageField.DURATION not in values:
            return
        stage = self._specified(sequence, values, StageField.STAGE_IID, StageField.STAGE_ID, self._stages)
        queue = self._specified(
            sequence, values, StageField.HW_QUEUE_IID, StageField.HW_QUEUE_ID, self._queues
        )
        kernel = self._looked_up(
            sequence, InternedDataField.COMPUTE_KERNELS, values.get(StageField.KERNEL_IID, 0)
        )
        interned = self._looked_up(
            sequence, InternedDataField.EVENT_NAMES, values.get(StageField.NAME_IID, 0)
        )
        clock = packet.numbers.get(PacketField.TIMESTAMP_CLOCK_ID, sequence.clock)
        time_ns = self._clocks.time_ns(sequence.number, clock, packet.number(PacketField.TIMESTAMP), start)
        gpu = signed(values.get(StageField.GPU_ID, 0))
        where = queue or f"queue {values.get(StageField.HW_QUEUE_ID, 0)}"
        shown = name or interned or kernel or stage
        times_ns = (_within(time_ns, start), _within(values.get(StageField.DURATION, 0), start))
        self._append(
            EventKind.COMPLETE, ("gpu", gpu, where), times_ns, (shown, stage), tuple(arguments.items())
        )

    def _specified(
        self,
        sequence: Sequence,
        values: dict[int, int],
        iid: StageField,
        index: StageField,
        listed: list[str],
    ) -> str:
        """The name of a queue or a stage, interned or by its number in a list."""
        if iid in values:
            return self._looked_up(sequence, InternedDataField.GPU_SPECIFICATIONS, values[iid])
        number = values.get(index, -1)
        return listed[number] if 0 <= number < len(listed) else ""

    def _specify(self, data: bytes, start: int, end: int) -> None:
        queues: list[str] = []
        stages: list[str] = []
        for number, wire, value, after in fields(data, start, end):
            if wire != BYTES or number not in {SpecificationsField.HW_QUEUE, SpecificationsField.STAGE}:
                continue
            into = queues if number == SpecificationsField.HW_QUEUE else stages
            names = [
                text(data, place, behind)
                for inner, kind, place, behind in fields(data, value, after)
                if inner == SpecificationField.NAME and kind == BYTES
            ]
            into.append("".join(names[-1:]))
        self._queues, self._stages = queues or self._queues, stages or self._stages

    def _append(
        self,
        kind: EventKind,
        track: TrackKey,
        times_ns: tuple[int, int],
        names: tuple[str, str],
        arguments: Arguments,
    ) -> None:
        self.kind.append(kind)
        self.track.append(self.tracks.setdefault(track, len(self.tracks)))
        self.time_ns.append(times_ns[0])
        self.duration_ns.append(times_ns[1])
        self.name_row.append(self.strings.add(names[0]))
        self.category_row.append(self.strings.add(names[1]))
        self.argument.append(self.arguments.setdefault(arguments, len(self.arguments)))


def _pair(data: bytes, start: int, end: int) -> tuple[str, str]:
    """A name and a value as texts."""
    arguments = {
        number: text(data, at, after) for number, wire, at, after in fields(data, start, end) if wire == BYTES
    }
    return arguments.get(ExtraDataField.NAME, ""), arguments.get(ExtraDataField.VALUE, "")


def _within(time_ns: int, position: int) -> int:
    """A time whose sums and differences fit 64 bits."""
    if abs(time_ns) > LARGEST_NS:
        raise WireError("a time is too large for 64 bits of nanoseconds", position)
    return time_ns


# --- What tracks are: their names, the processes they belong to, and which of them are devices.

_DEVICE = re.compile(
    r"(?<![a-z])(gpus?|tpus?|npus?|xpus?|cuda|hip|rocm|device|streams?|(hw )?queues?|nccl|rccl|kernels?"
    r"|memcpy|memset|compute|communication|copy)(?![a-z])"
)
_DEEPEST = 64
"""Tracks within tracks; more are a circle, or as good as one."""
_NAMES = frozenset({DescriptorField.NAME, DescriptorField.STATIC_NAME, DescriptorField.ATRACE_NAME})


@dataclass(frozen=True, slots=True)
class Place:
    """Where slices of one track ran. ``label`` names the track with all that it stands under."""

    label: str
    device: str
    rank: int
    stream: int
    is_device: bool
    is_host: bool = False


@dataclass(slots=True)
class _Track:
    name: str = ""
    parent: int = 0
    process: int | None = None
    thread_name: str = ""
    thread: bool = False


@dataclass(slots=True)
class Descriptions:
    """Descriptions of tracks, processes and GPUs, as they are met."""

    gpus: list[str] = field(default_factory=list[str])
    _tracks: dict[int, _Track] = field(default_factory=dict[int, _Track])
    _processes: dict[int, str] = field(default_factory=dict[int, str])

    def add(self, number: int, data: bytes, start: int, end: int) -> None:
        """Note a description; other messages say nothing of tracks."""
        match number:
            case PacketField.TRACK_DESCRIPTOR:
                self._track(data, start, end)
            case PacketField.PROCESS_DESCRIPTOR:
                self._process(data, start, end)
            case PacketField.GPU_INFO:
                self.gpus = [
                    _name(data, value, after, GpuField.NAME)
                    for inner, wire, value, after in fields(data, start, end)
                    if inner == GpuInfoField.GPUS and wire == BYTES
                ]
            case _:
                pass

    def _track(self, data: bytes, start: int, end: int) -> None:
        uuid, track = 0, _Track()
        for number, wire, value, after in fields(data, start, end):
            if wire == VARINT:
                if number == DescriptorField.UUID:
                    uuid = value
                elif number == DescriptorField.PARENT_UUID:
                    track.parent = value
            elif wire == BYTES:
                if number in _NAMES:
                    track.name = text(data, value, after)
                elif number == DescriptorField.PROCESS:
                    track.process = self._process(data, value, after)
                elif number == DescriptorField.THREAD:
                    track.thread = True
                    track.thread_name = _name(data, value, after, ThreadField.THREAD_NAME)
                    track.process = _number(data, value, after, ThreadField.PID)
        known = self._tracks.get(uuid)
        if known is None or track.name or track.thread_name or track.process is not None:
            self._tracks[uuid] = track

    def _process(self, data: bytes, start: int, end: int) -> int:
        pid = _number(data, start, end, ProcessField.PID)
        name = _name(data, start, end, ProcessField.PROCESS_NAME)
        if name or pid not in self._processes:
            self._processes[pid] = name
        return pid

    def place(self, key: TrackKey, number: int) -> Place:
        """What the names of a track tell; ``number`` serves as its stream where nothing else does."""
        kind, which, queue = key
        if kind == "gpu":
            name = self.gpus[which] if 0 <= which < len(self.gpus) else ""
            label = f"{name or f'GPU {which}'}/{queue}"
            return Place(label, name or f"GPU {which}", 0, _stream([str(queue)], number), is_device=True)
        names = list(self._names(which))
        process = names[-1] if names else ""
        ranks = map(rank_and_device, reversed(names))
        rank, device = next((found for found in ranks if found is not None), (0, process or ""))
        return Place(
            "/".join(reversed([name for name in names if name])) or f"track {which}",
            device,
            rank,
            _stream(names, number),
            is_device=any(_DEVICE.search(name.lower()) for name in names) and not _host(names),
            is_host=_host(names),
        )

    def _names(self, uuid: int) -> Iterator[str]:
        """The names of a track and of what it stands under, inside out; the last is the process's."""
        for _ in range(_DEEPEST):
            track = self._tracks.get(uuid)
            if track is None:
                return
            yield track.thread_name or track.name
            if track.process is not None and (track.thread or not track.parent):
                process = self._processes.get(track.process, "")
                if process != track.name or track.thread:
                    yield process
                if track.thread:
                    return
            if not track.parent or track.parent == uuid:
                return
            uuid = track.parent


def _host(names: list[str]) -> bool:
    """Whether a process says that it is no device."""
    return bool(names) and re.search(r"(?<![a-z])(host|cpu)(?![a-z])", names[-1].lower()) is not None


def _stream(names: list[str], number: int) -> int:
    stated = (stream_in_name(name) for name in names)
    return next((stream for stream in stated if stream is not None), number)


def _name(data: bytes, start: int, end: int, which: int) -> str:
    """The last text of one field."""
    found = [
        (value, after)
        for number, wire, value, after in fields(data, start, end)
        if number == which and wire == BYTES
    ]
    return text(data, *found[-1]) if found else ""


def _number(data: bytes, start: int, end: int, which: int) -> int:
    """The last number of one field, 0 where there is none."""
    found = [
        value for number, wire, value, _ in fields(data, start, end) if number == which and wire == VARINT
    ]
    return signed(found[-1]) if found else 0
