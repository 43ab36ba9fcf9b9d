"""Writer of tracks as a Perfetto trace: attributes, track descriptions, and slices as begin and end events.

There is one packet sequence. Names, categories and texts are interned in the packet before their first use.
Times are whole ns of the trace's default clock. Annotations have the exact times of events with fractions of
a ns or without a valid end; the reader of Hespas reads them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
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
from hespas.graph.progress import Progress
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
    """Write a profile as a Perfetto trace. Raises ``UsageError`` for a workload, which has no times,
    ``OutputError`` if the file cannot be written.
    """
    write_scene(tracks_of_measurement(value, path, options, diagnostics), path, options)


def write_scene(scene: TrackSet, path: Path, options: WriteOptions) -> None:
    """Write tracks as a Perfetto trace, gzipped if the name ends in ``.gz``. Slices are encoded in chunks to
    save memory. Raises ``UnsupportedError`` for times that do not fit the format.
    """
    parts = [part for part in scene.parts if len(part)]
    first_ns = min((float(part.start_ns.min()) for part in parts), default=0.0)
    last_ns = max(
        (float((part.start_ns + np.nan_to_num(np.maximum(part.duration_ns, 0.0))).max()) for part in parts),
        default=0.0,
    )
    if not last_ns - min(first_ns, 0.0) < _LATEST_NS:
        raise UnsupportedError(
            "an event ends too late for 63 bits of nanoseconds",
            path=options.name or str(path),
            position=f"{last_ns:.6g} ns",
            hint="check the times of events; a trace cannot last for centuries",
        )
    with open_output(path, packed=(options.name or path.name).endswith(".gz")) as stream:
        _PerfettoWriter(stream, scene, options.progress).write()


def _packet(content: bytes) -> bytes:
    return _PACKET + encode_varint(len(content)) + content


class _PerfettoWriter:
    """Writer of one trace. Processes have the uuids 1, 2, ...; lanes follow in the order of first use."""

    def __init__(self, stream: BinaryIO, scene: TrackSet, progress: Progress | None) -> None:
        self._stream = stream
        self._scene = scene
        self._progress = progress
        self._texts = _Interning()
        self._uuids: dict[tuple[int, int], int] = {}
        self._ends: dict[tuple[int, int], bytes] = {}
        self._next = 1 + sum(len(part.processes) for part in scene.parts)
        starts = [part.start_ns for part in scene.parts if len(part)]
        self._base_ns = max(0, -int(np.floor(min((float(start.min()) for start in starts), default=0.0))))

    def write(self) -> None:
        """Write attributes, processes, then slices and flows. The first packet also begins the sequence."""
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
            for row, process_name in enumerate(part.processes):
                uuid, name = 1 + first + row, shown(process_name).encode()
                process = field_bytes(ProcessField.PID, uuid) + field_bytes(ProcessField.PROCESS_NAME, name)
                self._describe(
                    field_bytes(DescriptorField.UUID, uuid)
                    + field_bytes(DescriptorField.NAME, name)
                    + field_bytes(DescriptorField.PROCESS, process)
                    + field_bytes(DescriptorField.CHILD_ORDERING, ChildOrdering.EXPLICIT)
                )
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

    def _describe(self, descriptor: bytes) -> None:
        self._stream.write(_packet(_OF_SEQUENCE + field_bytes(PacketField.TRACK_DESCRIPTOR, descriptor)))

    def _uuid(self, chunk: SliceChunk, track: int, lane: int) -> int:
        """Return the uuid of the Perfetto track for a lane, and write the description of a new lane.

        All lanes of a track have its name, so viewers show them together.
        """
        key = (self._scene.first_track[chunk.index] + track, lane)
        if key in self._uuids:
            return self._uuids[key]
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
        # Add integers, because sums of floats lose the last bits of long times.
        whole_ns = begin_ns.astype(np.int64) + self._base_ns
        begins: list[int] = whole_ns.tolist()
        ends: list[int] = (whole_ns + length_ns.astype(np.int64)).tolist()
        where: list[int] = tracks.track[part].tolist()
        label: list[int] = chunk.label.tolist()
        exact: list[bool] = same.tolist()
        first = chunk.first
        behind = first + len(begins)
        arrows: dict[int, bytes] = {}  # the flows of slices ``first .. behind - 1``
        pairs = ((TrackEventField.FLOW_IDS, leaving), (TrackEventField.TERMINATING_FLOW_IDS, arriving))
        for kind, flows in pairs:
            low, high = int(flows.offsets[first]), int(flows.offsets[behind])
            owners = np.searchsorted(flows.offsets, np.arange(low, high), side="right") - 1 - first
            for row, flow in zip(owners.tolist(), flows.values[low:high].tolist(), strict=True):
                arrows[row] = arrows.get(row, b"") + fixed64(kind, flow)
        out: list[bytes] = []
        for row, (lane, ended) in enumerate(lanes.assign(where, begins, ends)):
            out.extend(map(self._end, self._global(ended, chunk.index)))
            uuid = self._uuid(chunk, where[row], lane)
            event = labels[label[row]] + field_bytes(TrackEventField.TRACK_UUID, uuid) + arrows.get(row, b"")
            if not exact[row]:  # slices have whole ns, annotations the exact start and duration
                times_ns = (float(start_ns[row]), float(duration_ns[row]))
                for key, value in zip(_EXACT, times_ns, strict=True):
                    double = int.from_bytes(_DOUBLE.pack(value), "little")
                    event += field_bytes(
                        TrackEventField.DEBUG_ANNOTATIONS,
                        field_bytes(AnnotationField.NAME, key.encode())
                        + fixed64(AnnotationField.DOUBLE_VALUE, double),
                    )
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


@dataclass(slots=True)
class _Interning:
    """Ids of interned texts by kind. A Perfetto trace writes a text once and refers to it by id.
    :meth:`taken` returns the texts that were added since the last call, to be written.
    """

    _numbers: dict[tuple[InternedDataField, str], int] = field(
        default_factory=dict[tuple[InternedDataField, str], int]
    )
    _new: list[bytes] = field(default_factory=list[bytes])

    def number(self, kind: InternedDataField, text: str) -> int:
        """Return the id of a text, from 1."""
        iid = self._numbers.get((kind, text))
        if iid is None:
            iid = self._numbers[kind, text] = len(self._numbers) + 1
            entry = field_bytes(InternedField.IID, iid) + field_bytes(InternedField.NAME, text.encode())
            self._new.append(field_bytes(kind, entry))
        return iid

    def taken(self) -> bytes:
        """Return the ``InternedData`` message of the texts added since the last call, empty if there are
        none.
        """
        data = b"".join(self._new)
        self._new.clear()
        return data
