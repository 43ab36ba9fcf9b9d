"""Whether bytes are a Perfetto trace: the first packets have the fields that packets have."""

from __future__ import annotations

from types import MappingProxyType

from hespas.files.wire import BYTES, VARINT, WireError, fields
from hespas.schemas.perfetto.tables import PacketField, TraceField

__all__ = ["MOVED_BY", "SCHEMA_ID", "likelihood"]

SCHEMA_ID = "hespas.perfetto/1"
"""What our writer notes among the attributes of a trace."""

MOVED_BY = "moved_by_ns"
"""The attribute that says by how much our writer moved times, which a trace cannot have below 0."""

_WIRES: MappingProxyType[int, int] = MappingProxyType(
    {
        PacketField.CLOCK_SNAPSHOT: BYTES,
        PacketField.TIMESTAMP: VARINT,
        PacketField.TRUSTED_PACKET_SEQUENCE_ID: VARINT,
        PacketField.TRACK_EVENT: BYTES,
        PacketField.INTERNED_DATA: BYTES,
        PacketField.SEQUENCE_FLAGS: VARINT,
        PacketField.TIMESTAMP_CLOCK_ID: VARINT,
        PacketField.TRACK_DESCRIPTOR: BYTES,
        PacketField.GPU_RENDER_STAGE_EVENT: BYTES,
        PacketField.TRACE_PACKET_DEFAULTS: BYTES,
        PacketField.TRACE_ATTRIBUTES: BYTES,
        PacketField.COMPRESSED_PACKETS: BYTES,
    }
)
_PAYLOADS = frozenset(
    {
        PacketField.TRACK_EVENT,
        PacketField.TRACK_DESCRIPTOR,
        PacketField.GPU_RENDER_STAGE_EVENT,
        PacketField.TRACE_ATTRIBUTES,
        PacketField.COMPRESSED_PACKETS,
    }
)
_MOST_PACKETS = 64


def likelihood(data: bytes) -> int:
    """0..100 from the start of a file. Protobuf names nothing, so other messages may look alike: a packet
    tells itself by a time or a sequence number beside an event or a description of a track.
    """
    if SCHEMA_ID.encode() in data:
        return 100
    packets, telling = 0, 0
    try:
        for number, wire, start, end in fields(data, 0, len(data)):
            if number != TraceField.PACKET or wire != BYTES:
                return 0
            seen = {field: kind for field, kind, _, _ in fields(data, start, end)}
            if any(_WIRES.get(field, kind) != kind for field, kind in seen.items()):
                return 0
            packets += 1
            timed = PacketField.TIMESTAMP in seen or PacketField.TRUSTED_PACKET_SEQUENCE_ID in seen
            telling += timed and not _PAYLOADS.isdisjoint(seen)
            telling += seen.keys() == {PacketField.COMPRESSED_PACKETS}
            if packets >= _MOST_PACKETS:
                break
    except WireError:
        pass  # the start of a file ends in the middle of a packet
    if not telling:
        return 0
    return 95 if telling * 4 >= packets else 60
