"""Writes tracks as a Perfetto trace: attributes, descriptions of tracks, slices as pairs of begin and end.

One packet sequence; names, categories and texts are interned, in the packet before they are first used.
Times are ns of the trace's default clock; what has fractions of a ns or no sensible end says so exactly in an
annotation, which our reader takes up.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hespas.converters.format import Value, WriteOptions
from hespas.converters.perfetto.packets import MOVED_BY, SCHEMA_ID
from hespas.converters.tracks import TrackSet, tracks_of_measurement
from hespas.converters.tracks.slices import LaneAssigner, SliceChunk, SliceEnd, SliceLabel, shown, shown_ns
from hespas.files.streams import open_output
from hespas.files.wire import encode_varint, field_bytes, fixed64
from hespas.graph import Diagnostics, RaggedArray
from hespas.graph.errors import UnsupportedError
from hespas.schemas.perfetto import (
    AnnotationField,
    AttributeField,
    ChildOrdering,
    DescriptorField,
    EventType,
    InternedDataField,
    InternedField,
    PacketField,
    ProcessField,
    SequenceFlag,
    TraceField,
    TrackEventField,
)

__all__ = ["write_perfetto", "write_scene"]

_CHUNK_ROWS = 1 << 14
_SEQUENCE = 1
_DOUBLE = struct.Struct("<d")
_ATTRIBUTE = 1
_PACKET = field_bytes(TraceField.PACKET, b"")[:1]
_STAMP = field_bytes(PacketField.TIMESTAMP, 0)[:1]
_EVENT = field_bytes(PacketField.TRACK_EVENT, b"")[:1]
_OF_SEQUENCE = field_bytes(PacketField.TRUSTED_PACKET_SEQUENCE_ID, _SEQUENCE)
_REFERS = _OF_SEQUENCE + field_bytes(PacketField.SEQUENCE_FLAGS, SequenceFlag.NEEDS_INCREMENTAL_STATE)
_BEGIN = field_bytes(TrackEventField.TYPE, EventType.SLICE_BEGIN)
_END = field_bytes(TrackEventField.TYPE, EventType.SLICE_END)
_LARGEST_NS = float(1 << 53)
_LATEST_NS = float(1 << 63)
_EXACT = ("start_ns", "duration_ns")


def write_perfetto(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    """Write a profile. Raises ``UsageError`` for a workload, which has no times, ``OutputError`` where the
    disk refuses.
    """
    write_scene(tracks_of_measurement(value, path, options, diagnostics), path, options)


def write_scene(scene: TrackSet, path: Path, options: WriteOptions) -> None:
    """Write tracks; memory beyond the scene is one chunk. Gzipped where the name ends in ``.gz``.

    Raises ``UnsupportedError`` for times that the format has no room for.
    """
    _check_times(scene, options.name or str(path))
    with open_output(path, packed=(options.name or path.name).endswith(".gz")) as stream:
        _PerfettoWriter(stream, scene, options.progress).write()


def _check_times(scene: TrackSet, path: str) -> None:
    """All ends must fit beside the first start: a packet's time is an unsigned number, ours have 63 bits."""
    parts = [part for part in scene.parts if len(part)]
    first_ns = min((float(part.start_ns.min()) for part in parts), default=0.0)
    last_ns = max(
        (float((part.start_ns + np.nan_to_num(np.maximum(part.duration_ns, 0.0))).max()) for part in parts),
        default=0.0,
    )
    if not last_ns - min(first_ns, 0.0) < _LATEST_NS:
        raise UnsupportedError(
            "an event ends too late for 63 bits of nanoseconds",
            path=path,
            position=f"{last_ns:.6g} ns",
            hint="is the time of one event wrong? a trace cannot last for centuries",
        )


def _packet(content: bytes) -> bytes:
    return _PACKET + encode_varint(len(content)) + content


class _PerfettoWriter:
    """Processes have the uuids 1, 2, ...; tracks follow, then lanes in the order in which they are opened."""

    def __init__(
        self, stream: BinaryIO, scene: TrackSet, progress: Callable[[int, int], None] | None
    ) -> None:
        self._stream = stream
        self._scene = scene
        self._progress = progress
        self._texts = _Interning()
        self._uuids: dict[tuple[int, int], int] = {}
        self._ends: dict[tuple[int, int], bytes] = {}
        self._next = 1 + sum(len(part.processes) for part in scene.parts)
        starts = [part.start_ns for part in scene.parts if len(part)]
        self._base_ns = max(0, -int(np.floor(min((float(each.min()) for each in starts), default=0.0))))

    def write(self) -> None:
        """Attributes, processes, then everything else."""
        # The first packet also begins the sequence.
        facts = {shown(key): shown(text) for key, text in self._scene.metadata.items()}
        facts |= {"schema": SCHEMA_ID, "name": shown(self._scene.name)}
        if self._base_ns:
            facts[MOVED_BY] = str(self._base_ns)
        encoded = b"".join(
            field_bytes(
                _ATTRIBUTE,
                field_bytes(AttributeField.KEY, key.encode())
                + field_bytes(AttributeField.STRING_VALUE, text.encode()),
            )
            for key, text in sorted(facts.items(), key=lambda fact: fact[0] != "schema")
        )
        cleared = field_bytes(PacketField.SEQUENCE_FLAGS, SequenceFlag.INCREMENTAL_STATE_CLEARED)
        self._stream.write(
            _packet(_OF_SEQUENCE + cleared + field_bytes(PacketField.TRACE_ATTRIBUTES, encoded))
        )
        for part, first in zip(self._scene.parts, self._scene.first_process, strict=True):
            for row, name in enumerate(part.processes):
                self._process(1 + first + row, shown(name))
        flows = self._scene.flows
        count = len(self._scene)
        numbers = np.arange(1, len(flows) + 1)
        leaving = RaggedArray.from_pairs(flows.source, numbers, count)
        arriving = RaggedArray.from_pairs(flows.target, numbers, count)
        lanes, current = LaneAssigner(), 0
        for chunk in self._scene.chunks(_CHUNK_ROWS):
            if chunk.index != current:
                self._stream.write(b"".join(map(self._end, self._global(lanes.rest(), current))))
                lanes, current = LaneAssigner(), chunk.index
            self._chunk(chunk, lanes, leaving, arriving)
            if self._progress:
                self._progress(chunk.first + chunk.part.stop - chunk.part.start, count)
        self._stream.write(b"".join(map(self._end, self._global(lanes.rest(), current))))

    def _process(self, uuid: int, name: str) -> None:
        process = field_bytes(ProcessField.PID, uuid) + field_bytes(ProcessField.PROCESS_NAME, name.encode())
        self._describe(
            field_bytes(DescriptorField.UUID, uuid)
            + field_bytes(DescriptorField.NAME, name.encode())
            + field_bytes(DescriptorField.PROCESS, process)
            + field_bytes(DescriptorField.CHILD_ORDERING, ChildOrdering.EXPLICIT)
        )

    def _describe(self, descriptor: bytes) -> None:
        self._stream.write(_packet(_OF_SEQUENCE + field_bytes(PacketField.TRACK_DESCRIPTOR, descriptor)))

    def _uuid(self, chunk: SliceChunk, track: int, lane: int) -> int:
        """The uuid of a lane; a new one is described first. Lanes of a track share its name, by which
        viewers show them together.
        """
        key = (self._scene.first_track[chunk.index] + track, lane)
        known = self._uuids.get(key)
        if known is not None:
            return known
        uuid = self._uuids[key] = self._next
        self._next += 1
        owner = 1 + self._scene.first_process[chunk.index] + chunk.tracks.track_process[track]
        self._describe(
            field_bytes(DescriptorField.UUID, uuid)
            + field_bytes(DescriptorField.NAME, shown(chunk.tracks.track_name[track]).encode())
            + field_bytes(DescriptorField.PARENT_UUID, owner)
            + field_bytes(DescriptorField.SIBLING_ORDER_RANK, track)
        )
        event = _END + field_bytes(TrackEventField.TRACK_UUID, uuid)
        self._ends[key] = _REFERS + field_bytes(PacketField.TRACK_EVENT, event)
        return uuid

    def _global(self, ended: Sequence[SliceEnd], index: int) -> list[SliceEnd]:
        first = self._scene.first_track[index] if self._scene.parts else 0
        return [(time_ns, first + track, lane) for time_ns, track, lane in ended]

    def _end(self, ended: SliceEnd) -> bytes:
        time_ns, track, lane = ended
        return _packet(_STAMP + encode_varint(time_ns) + self._ends[track, lane])

    def _chunk(
        self, chunk: SliceChunk, lanes: LaneAssigner, leaving: RaggedArray, arriving: RaggedArray
    ) -> None:
        part, tracks = chunk.part, chunk.tracks
        labels = [self._label(label) for label in chunk.labels]
        new = self._texts.taken()
        if new:
            self._stream.write(_packet(_REFERS + field_bytes(PacketField.INTERNED_DATA, new)))
        start_ns, duration_ns = tracks.start_ns[part], tracks.duration_ns[part]
        begin_ns, length_ns = shown_ns(start_ns, np.maximum(duration_ns, 0.0))
        same = (begin_ns == start_ns) & (length_ns == duration_ns)
        # Sums of floats lose the last bits of long times.
        whole_ns = begin_ns.astype(np.int64) + self._base_ns
        begins: list[int] = whole_ns.tolist()
        ends: list[int] = (whole_ns + length_ns.astype(np.int64)).tolist()
        where: list[int] = tracks.track[part].tolist()
        label: list[int] = chunk.label.tolist()
        exact: list[bool] = same.tolist()
        first = chunk.first
        # The flows of slices ``first .. behind - 1``, by their place among these.
        behind = first + len(begins)
        found: dict[int, bytes] = {}
        pairs = ((EventField.FLOW_IDS, leaving), (EventField.TERMINATING_FLOW_IDS, arriving))
        for kind, flows in pairs:
            low, high = int(flows.offsets[first]), int(flows.offsets[behind])
            owners = np.searchsorted(flows.offsets, np.arange(low, high), side="right") - 1 - first
            for row, flow in zip(owners.tolist(), flows.values[low:high].tolist(), strict=True):
                found[row] = found.get(row, b"") + fixed64(kind, flow)
        arrows = found
        out: list[bytes] = []
        for row, (lane, ended) in enumerate(lanes.assign(where, begins, ends)):
            out.extend(map(self._end, self._global(ended, chunk.index)))
            uuid = self._uuid(chunk, where[row], lane)
            event = labels[label[row]] + field_bytes(TrackEventField.TRACK_UUID, uuid) + arrows.get(row, b"")
            if not exact[row]:
                event += self._exactly(float(start_ns[row]), float(duration_ns[row]))
            stamp = _STAMP + encode_varint(begins[row]) + _REFERS
            out.append(_packet(stamp + _EVENT + encode_varint(len(event)) + event))
        self._stream.write(b"".join(out))

    def _label(self, label: SliceLabel) -> bytes:
        number = self._texts.number
        encoded = _BEGIN + field_bytes(
            TrackEventField.NAME_IID, number(InternedDataField.EVENT_NAMES, label.name)
        )
        if label.category:
            category = number(InternedDataField.EVENT_CATEGORIES, label.category)
            encoded += field_bytes(TrackEventField.CATEGORY_IIDS, category)
        return encoded + b"".join(self._annotation(key, value) for key, value in label.arguments)

    def _annotation(self, key: str, value: str | float) -> bytes:
        name = self._texts.number(InternedDataField.DEBUG_ANNOTATION_NAMES, key)
        encoded = field_bytes(AnnotationField.NAME_IID, name)
        if isinstance(value, str):
            text = self._texts.number(InternedDataField.DEBUG_ANNOTATION_STRING_VALUES, value)
            encoded += field_bytes(AnnotationField.STRING_VALUE_IID, text)
        elif abs(value) < _LARGEST_NS and value == int(value):
            encoded += field_bytes(AnnotationField.INT_VALUE, int(value))
        else:
            encoded += fixed64(AnnotationField.DOUBLE_VALUE, int.from_bytes(_DOUBLE.pack(value), "little"))
        return field_bytes(TrackEventField.DEBUG_ANNOTATIONS, encoded)

    def _exactly(self, *times_ns: float) -> bytes:
        """Annotations of the start and the duration that a trace in whole ns cannot say."""
        encoded = b""
        for key, value in zip(_EXACT, times_ns, strict=True):
            double = fixed64(AnnotationField.DOUBLE_VALUE, int.from_bytes(_DOUBLE.pack(value), "little"))
            encoded += field_bytes(
                TrackEventField.DEBUG_ANNOTATIONS, field_bytes(AnnotationField.NAME, key.encode()) + double
            )
        return encoded


# Texts that are written once and referred to by number.


@dataclass(slots=True)
class _Interning:
    """Numbers texts by kind; :meth:`taken` gives those that are new since it was last called."""

    _numbers: dict[tuple[InternedDataField, str], int] = field(
        default_factory=dict[tuple[InternedDataField, str], int]
    )
    _new: list[bytes] = field(default_factory=list[bytes])

    def number(self, kind: InternedDataField, text: str) -> int:
        """The id of a text, from 1."""
        known = self._numbers.get((kind, text))
        if known is None:
            known = self._numbers[kind, text] = len(self._numbers) + 1
            entry = field_bytes(InternedField.IID, known) + field_bytes(InternedField.NAME, text.encode())
            self._new.append(field_bytes(kind, entry))
        return known

    def taken(self) -> bytes:
        """The message ``InternedData`` of new texts; empty where there is none."""
        data = b"".join(self._new)
        self._new.clear()
        return data
