"""Events of packets as columns (slices, their ends, GPU render stages), and the descriptions of their
tracks.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from hespas.converters.perfetto.packets import (
    LARGEST_NS,
    Clocks,
    Packet,
    PacketSequence,
    WireMessage,
    messages,
    text,
)
from hespas.converters.tracks.reading import rank_and_device, stream_in_name
from hespas.files.wire import BYTES, VARINT, WireError, fields, signed
from hespas.graph import StringTableBuilder
from hespas.schemas.perfetto import (
    AnnotationField,
    DescriptorField,
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
    TrackEventField,
)

__all__ = ["Descriptions", "TrackEventColumns", "TrackEventKind", "TrackOwner"]

_Arguments = tuple[tuple[str, str | float], ...]
"""Name and value of the annotations of an event that :data:`_ARGUMENTS` lists."""
_TrackKey = tuple[str, int, int | str]
"""Identity of a track: ``("track", uuid, 0)``, or ``("gpu", gpu, queue)``."""

_ARGUMENTS = frozenset(
    {"op", "kernel", "module", "shapes", "dtype", "op_class", "run", "bytes", "start_ns", "duration_ns"}
)
_DOUBLE = struct.Struct("<d")
_U64 = struct.Struct("<Q")
_FLOWS = frozenset(
    {
        TrackEventField.FLOW_IDS,
        TrackEventField.TERMINATING_FLOW_IDS,
        TrackEventField.FLOW_IDS_OLD,
        TrackEventField.TERMINATING_FLOW_IDS_OLD,
    }
)
_NS_PER_US = 1000


class TrackEventKind(IntEnum):
    """Kind of a track event: begin or end of a slice, instant, or complete slice."""

    BEGIN = 0
    END = 1
    INSTANT = 2
    COMPLETE = 3


_KINDS: dict[int, TrackEventKind] = {
    EventType.SLICE_BEGIN: TrackEventKind.BEGIN,
    EventType.SLICE_END: TrackEventKind.END,
    EventType.INSTANT: TrackEventKind.INSTANT,
}
_PHASES = {
    ord("B"): TrackEventKind.BEGIN,
    ord("E"): TrackEventKind.END,
    ord("X"): TrackEventKind.COMPLETE,
    ord("I"): TrackEventKind.INSTANT,
    ord("i"): TrackEventKind.INSTANT,
}


class _EventFields(NamedTuple):
    """Raw fields of one track event. ``numbers`` has the numeric fields by field number, ``spans`` the byte
    spans of texts and messages. ``annotations`` are byte spans, and ``flows`` are flow ids.
    """

    numbers: dict[int, int]
    spans: dict[int, tuple[int, int]]
    annotations: list[tuple[int, int]]
    flows: list[int]


class TrackEventColumns:
    """Columns of the events of a Perfetto trace, one row per event. Texts are indices into ``strings``, and
    arguments indices into ``arguments`` (0: none).
    """

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self.strings = StringTableBuilder()
        self.tracks: dict[_TrackKey, int] = {}
        self.arguments: dict[_Arguments, int] = {(): 0}
        self.kind = array("b")
        self.track = array("q")
        self.time_ns = array("q")
        self.duration_ns = array("q")
        self.name_id = array("i")
        self.category_id = array("i")
        self.argument = array("i")
        self.flow = array("Q")
        self.flow_event = array("q")
        self.other = 0
        self.unresolved = 0
        self._queues: list[str] = []
        self._stages: list[str] = []

    def track_event(self, packet: Packet, sequence: PacketSequence, start: int, end: int) -> None:
        """Add a begin, an end or an instant event; counters and others are only counted."""
        parts = self._parts(packet.data, start, end)
        numbers, spans = parts.numbers, parts.spans
        kind, duration_ns = _KINDS.get(numbers.get(TrackEventField.TYPE, 0)), 0
        name_iid = numbers.get(TrackEventField.NAME_IID, 0)
        if TrackEventField.LEGACY_EVENT in spans:
            legacy = WireMessage.of(packet.data, *spans[TrackEventField.LEGACY_EVENT]).numbers
            if LegacyField.PHASE in legacy:
                kind = _PHASES.get(legacy[LegacyField.PHASE])
            duration_ns = signed(legacy.get(LegacyField.DURATION_US, 0)) * _NS_PER_US
            name_iid = name_iid or legacy.get(LegacyField.NAME_IID, 0)
        sequence.delta_us += signed(numbers.get(TrackEventField.TIMESTAMP_DELTA_US, 0))
        if kind is None:
            self.other += 1
            return
        if TrackEventField.TIMESTAMP_ABSOLUTE_US in numbers:
            time_ns = signed(numbers[TrackEventField.TIMESTAMP_ABSOLUTE_US]) * _NS_PER_US
        elif PacketField.TIMESTAMP in packet.numbers:
            time_ns = self._stamp_ns(packet, sequence, start)
        else:
            time_ns = sequence.delta_us * _NS_PER_US
        if TrackEventField.NAME in spans:
            name = text(packet.data, *spans[TrackEventField.NAME])
        else:
            name = self._looked_up(sequence, InternedDataField.EVENT_NAMES, name_iid)
        category = text(packet.data, *spans.get(TrackEventField.CATEGORIES, (0, 0))) or self._looked_up(
            sequence, InternedDataField.EVENT_CATEGORIES, numbers.get(TrackEventField.CATEGORY_IIDS, 0)
        )
        arguments = self._annotations(packet.data, sequence, parts.annotations) if parts.annotations else ()
        for flow in parts.flows:
            self.flow.append(flow)
            self.flow_event.append(len(self.kind))
        track = numbers.get(TrackEventField.TRACK_UUID, sequence.track)
        times_ns = (_within(time_ns, start), _within(duration_ns, start))
        self._append(kind, ("track", track, 0), times_ns, (name, category), arguments)

    def _stamp_ns(self, packet: Packet, sequence: PacketSequence, position: int) -> int:
        clock = packet.numbers.get(PacketField.TIMESTAMP_CLOCK_ID, sequence.clock)
        return self._clocks.time_ns(sequence.number, clock, packet.number(PacketField.TIMESTAMP), position)

    @staticmethod
    def _parts(data: bytes, start: int, end: int) -> _EventFields:
        event = _EventFields({}, {}, [], [])
        for number, wire, value, after in fields(data, start, end):
            if number in _FLOWS and wire == BYTES:
                event.flows.extend(_U64.unpack_from(data, at)[0] for at in range(value, after - 7, 8))
            elif number in _FLOWS:
                event.flows.append(value)
            elif number == TrackEventField.DEBUG_ANNOTATIONS and wire == BYTES:
                event.annotations.append((value, after))
            elif wire == BYTES:
                if number != TrackEventField.CATEGORIES or number not in event.spans:
                    event.spans[number] = (value, after)
            elif number != TrackEventField.CATEGORY_IIDS or not event.numbers.get(number):
                event.numbers[number] = value
        return event

    def _looked_up(self, sequence: PacketSequence, what: InternedDataField, iid: int) -> str:
        if not iid:
            return ""
        interned = sequence.interned.get((what, iid))
        if interned is None:
            self.unresolved += 1
        return interned or ""

    def _annotations(self, data: bytes, sequence: PacketSequence, spans: list[tuple[int, int]]) -> _Arguments:
        arguments: dict[str, str | float] = {}
        for start, end in spans:
            key = ""
            value: str | float | None = None
            for number, wire, at, after in fields(data, start, end):
                match number:
                    case AnnotationField.NAME_IID if wire == VARINT:
                        key = sequence.interned.get((InternedDataField.DEBUG_ANNOTATION_NAMES, at), "")
                    case AnnotationField.NAME if wire == BYTES:
                        key = text(data, at, after)
                    case AnnotationField.STRING_VALUE if wire == BYTES:
                        value = text(data, at, after)
                    case AnnotationField.STRING_VALUE_IID if wire == VARINT:
                        value = self._looked_up(
                            sequence, InternedDataField.DEBUG_ANNOTATION_STRING_VALUES, at
                        )
                    case AnnotationField.UINT_VALUE | AnnotationField.INT_VALUE if wire == VARINT:
                        value = float(signed(at))
                    case AnnotationField.DOUBLE_VALUE if wire != BYTES:
                        value = float(_DOUBLE.unpack(_U64.pack(at))[0])
                    case _:
                        pass
            if key in _ARGUMENTS and value is not None:
                arguments[key] = value
        return tuple(arguments.items())

    def stage(self, packet: Packet, sequence: PacketSequence, start: int, end: int) -> None:
        """Add work on a GPU queue (a render stage event). A message that only lists queues and stages is not
        an event.
        """
        data, values = packet.data, dict[int, int]()
        name, arguments = "", dict[str, str | float]()
        for number, wire, value, after in fields(data, start, end):
            if wire == VARINT:
                values[number] = value
            elif number == StageField.NAME and wire == BYTES:
                name = text(data, value, after)
            elif number == StageField.EXTRA_DATA and wire == BYTES:
                extra = WireMessage.of(data, value, after)
                key = extra.text(ExtraDataField.NAME)
                if key in _ARGUMENTS:
                    arguments[key] = extra.text(ExtraDataField.VALUE)
            elif number == StageField.SPECIFICATIONS and wire == BYTES:
                listed: dict[int, list[str]] = {
                    SpecificationsField.HW_QUEUE: [],
                    SpecificationsField.STAGE: [],
                }
                for kind, specification in messages(data, value, after, *listed):
                    listed[kind].append(specification.text(SpecificationField.NAME))
                queues, stages = listed.values()
                self._queues, self._stages = queues or self._queues, stages or self._stages
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
        time_ns = self._stamp_ns(packet, sequence, start)
        gpu = signed(values.get(StageField.GPU_ID, 0))
        where = queue or f"queue {values.get(StageField.HW_QUEUE_ID, 0)}"
        shown = name or interned or kernel or stage
        times_ns = (_within(time_ns, start), _within(values.get(StageField.DURATION, 0), start))
        self._append(
            TrackEventKind.COMPLETE, ("gpu", gpu, where), times_ns, (shown, stage), tuple(arguments.items())
        )

    def _specified(
        self,
        sequence: PacketSequence,
        values: dict[int, int],
        iid: StageField,
        index: StageField,
        listed: list[str],
    ) -> str:
        """Return the name of a GPU queue or stage, empty if the event states none.

        ``values`` are the numeric fields of the event. Field ``iid`` is the id of an interned name. If it is
        absent, field ``index`` is a position in the list of names ``listed``.
        """
        if iid in values:
            return self._looked_up(sequence, InternedDataField.GPU_SPECIFICATIONS, values[iid])
        number = values.get(index, -1)
        return listed[number] if 0 <= number < len(listed) else ""

    def _append(
        self,
        kind: TrackEventKind,
        track: _TrackKey,
        times_ns: tuple[int, int],
        names: tuple[str, str],
        arguments: _Arguments,
    ) -> None:
        self.kind.append(kind)
        self.track.append(self.tracks.setdefault(track, len(self.tracks)))
        self.time_ns.append(times_ns[0])
        self.duration_ns.append(times_ns[1])
        self.name_id.append(self.strings.add(names[0]))
        self.category_id.append(self.strings.add(names[1]))
        self.argument.append(self.arguments.setdefault(arguments, len(self.arguments)))


def _within(time_ns: int, position: int) -> int:
    """Return ``time_ns`` unchanged. Raise ``WireError`` if sums of such times may not fit 64 bits."""
    if abs(time_ns) > LARGEST_NS:
        raise WireError("a time is too large for 64 bits of nanoseconds", position)
    return time_ns


_DEVICE = re.compile(
    r"(?<![a-z])(gpus?|tpus?|npus?|xpus?|cuda|hip|rocm|device|streams?|(hw )?queues?|nccl|rccl|kernels?"
    r"|memcpy|memset|compute|communication|copy)(?![a-z])"
)
_DEEPEST = 64
"""Maximum nesting of tracks; deeper nesting is treated as a cycle."""
_NAMES = frozenset({DescriptorField.NAME, DescriptorField.STATIC_NAME, DescriptorField.ATRACE_NAME})


@dataclass(frozen=True, slots=True)
class TrackOwner:
    """Device, rank and stream to which a track belongs, derived from names. ``label`` joins the names of the
    track and its parents.
    """

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
    """Descriptions of tracks, processes and GPUs read so far."""

    gpus: list[str] = field(default_factory=list[str])
    _tracks: dict[int, _Track] = field(default_factory=dict[int, _Track])
    _processes: dict[int, str] = field(default_factory=dict[int, str])

    def add(self, number: int, data: bytes, start: int, end: int) -> None:
        """Add the description of a track, process or GPU; ignore other messages."""
        match number:
            case PacketField.TRACK_DESCRIPTOR:
                message, track = WireMessage.of(data, start, end), _Track()
                uuid = message.numbers.get(DescriptorField.UUID, 0)
                track.parent = message.numbers.get(DescriptorField.PARENT_UUID, 0)
                names = (message.text(name) for name in reversed(message.spans) if name in _NAMES)
                track.name = next(names, "")
                if DescriptorField.PROCESS in message.spans:
                    track.process = self._process(data, *message.spans[DescriptorField.PROCESS])
                if DescriptorField.THREAD in message.spans:
                    thread = WireMessage.of(data, *message.spans[DescriptorField.THREAD])
                    track.thread, track.thread_name = True, thread.text(ThreadField.THREAD_NAME)
                    track.process = signed(thread.numbers.get(ThreadField.PID, 0))
                if uuid not in self._tracks or track.name or track.thread_name or track.process is not None:
                    self._tracks[uuid] = track
            case PacketField.PROCESS_DESCRIPTOR:
                self._process(data, start, end)
            case PacketField.GPU_INFO:
                gpus = messages(data, start, end, GpuInfoField.GPUS)
                self.gpus = [gpu.text(GpuField.NAME) for _, gpu in gpus]
            case _:
                pass

    def _process(self, data: bytes, start: int, end: int) -> int:
        message = WireMessage.of(data, start, end)
        pid, name = signed(message.numbers.get(ProcessField.PID, 0)), message.text(ProcessField.PROCESS_NAME)
        if name or pid not in self._processes:
            self._processes[pid] = name
        return pid

    def owner(self, key: _TrackKey, number: int) -> TrackOwner:
        """Derive the device, rank and stream of a track from its names; ``number`` is the stream if no name
        contains one.
        """
        kind, which, queue = key
        if kind == "gpu":
            name = self.gpus[which] if 0 <= which < len(self.gpus) else ""
            label = f"{name or f'GPU {which}'}/{queue}"
            return TrackOwner(label, name or f"GPU {which}", 0, _stream([str(queue)], number), is_device=True)
        names = list(self._names(which))
        process = names[-1] if names else ""
        ranks = map(rank_and_device, reversed(names))
        rank, device = next((pair for pair in ranks if pair is not None), (0, process or ""))
        return TrackOwner(
            "/".join(reversed([name for name in names if name])) or f"track {which}",
            device,
            rank,
            _stream(names, number),
            is_device=any(_DEVICE.search(name.lower()) for name in names) and not _host(names),
            is_host=_host(names),
        )

    def _names(self, uuid: int) -> Iterator[str]:
        """Yield the names of a track and its parents from the inside out; the last is the process's."""
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
    """Return True if the process, the last name, is named as a host."""
    return bool(names) and re.search(r"(?<![a-z])(host|cpu)(?![a-z])", names[-1].lower()) is not None


def _stream(names: list[str], number: int) -> int:
    streams = (stream_in_name(name) for name in names)
    return next((stream for stream in streams if stream is not None), number)
