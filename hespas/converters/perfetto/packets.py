"""Packets of a Perfetto trace, also compressed ones, with the state of packet sequences and clocks.

Clocks: https://perfetto.dev/docs/concepts/clock-sync.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from hespas.files.limits import limits
from hespas.files.wire import BYTES, VARINT, WireError, fields
from hespas.graph.errors import UnsupportedError
from hespas.schemas.perfetto import (
    BuiltinClock,
    ClockField,
    ClockSnapshotField,
    ComputeKernelField,
    InternedDataField,
    InternedField,
    PacketField,
    SequenceFlag,
    TraceField,
    TrackEventField,
)

__all__ = [
    "LARGEST_NS",
    "MOVED_BY",
    "SCHEMA_ID",
    "Clocks",
    "Packet",
    "PacketSequence",
    "WireMessage",
    "likelihood",
    "messages",
    "packets",
    "text",
]

_INTERNED = frozenset(int(member) for member in InternedDataField)
_KERNELS = int(InternedDataField.COMPUTE_KERNELS)
_CLEARED, _NEEDS_STATE = (
    int(SequenceFlag.INCREMENTAL_STATE_CLEARED),
    int(SequenceFlag.NEEDS_INCREMENTAL_STATE),
)
"""Sequence flags as plain integers. Operations on enum flags take ten times as long, and run for every
packet.
"""
_USUAL_BYTES = 80
"""Typical size of an uncompressed packet."""


@dataclass(slots=True)
class Packet:
    """One packet of a Perfetto trace. ``numbers`` has the numeric fields by field number, and ``messages``
    the byte spans of submessages in ``data``.
    """

    data: bytes
    start: int
    numbers: dict[int, int]
    messages: list[tuple[int, int, int]]

    def number(self, name: PacketField) -> int:
        """Return a number, 0 if the packet does not have it."""
        return self.numbers.get(name, 0)


def packets(data: bytes) -> Iterator[Packet]:
    """Yield all packets in the order of the file, decompressed. Raises ``WireError`` for malformed packets
    and ``UnsupportedError`` for zstd.
    """
    size = len(data)
    bounds = limits()
    free = bounds.compressed_packets_bytes
    allowed, left = max(free, bounds.compressed_packets_ratio * size), free // _USUAL_BYTES + size
    for packet in _plain(data):
        if not packet.messages:
            yield packet
            continue
        squeezed = [span for span in packet.messages if span[0] == PacketField.COMPRESSED_PACKETS]
        if any(number == PacketField.ZSTD_COMPRESSED_PACKETS for number, _, _ in packet.messages):
            raise UnsupportedError(
                "the trace holds packets compressed with zstd",
                position=f"byte {packet.start}",
                hint="record it with deflate, or unpack it: traceconv decompress_packets TRACE OUT",
            )
        if not squeezed:
            yield packet
        for _, start, end in squeezed:
            inner = _inflated(data[start:end], allowed, start)
            allowed -= len(inner)
            unpacked = _plain(inner)
            while True:
                try:
                    inner_packet = next(unpacked, None)
                except WireError as error:
                    raise WireError(f"inside compressed packets: {error}", start) from error
                if inner_packet is None:
                    break
                left -= 1
                if left < 0:
                    raise WireError("too many compressed packets for the size of the file", start)
                yield inner_packet


def _plain(data: bytes) -> Iterator[Packet]:
    for number, wire, start, end in fields(data, 0, len(data)):
        if number != TraceField.PACKET or wire != BYTES:
            raise WireError(f"field {number} instead of a packet", start)
        numbers: dict[int, int] = {}
        messages: list[tuple[int, int, int]] = []
        for inner, kind, value, after in fields(data, start, end):
            if kind == VARINT:
                numbers[inner] = value
            elif kind == BYTES:
                messages.append((inner, value, after))
        yield Packet(data, start, numbers, messages)


def _inflated(data: bytes, allowed: int, position: int) -> bytes:
    inflate = zlib.decompressobj()
    try:
        unpacked = inflate.decompress(data, max(1, allowed))
    except zlib.error as error:
        raise WireError(f"compressed packets are damaged: {error}", position) from error
    if inflate.unconsumed_tail:
        raise WireError(f"compressed packets take more than {allowed:,} bytes", position)
    if not inflate.eof:
        raise WireError("compressed packets are cut off", position)
    return unpacked


def text(data: bytes, start: int, end: int) -> str:
    """Decode a text; invalid UTF-8 is replaced."""
    return data[start:end].decode("utf-8", "replace")


class WireMessage(NamedTuple):
    """Decoded protobuf message. ``numbers`` has the numeric fields by field number, and ``spans`` the byte
    spans of texts and submessages.

    Of a repeated field, only the last value is stored.
    """

    data: bytes
    numbers: dict[int, int]
    spans: dict[int, tuple[int, int]]

    @classmethod
    def of(cls, data: bytes, start: int, end: int) -> WireMessage:
        """Decode the message in ``data[start:end]``. Raises ``WireError``."""
        message = cls(data, {}, {})
        for number, wire, value, after in fields(data, start, end):
            if wire == BYTES:
                message.spans[number] = (value, after)
            else:
                message.numbers[number] = value
        return message

    def text(self, field: int) -> str:
        """Return a text, empty if the field is missing."""
        return text(self.data, *self.spans.get(field, (0, 0)))


def messages(data: bytes, start: int, end: int, *wanted: int) -> Iterator[tuple[int, WireMessage]]:
    """Yield the submessages in ``data[start:end]`` whose field is in ``wanted``, each with its field
    number.
    """
    for number, wire, value, after in fields(data, start, end):
        if number in wanted and wire == BYTES:
            yield number, WireMessage.of(data, value, after)


@dataclass(slots=True)
class PacketSequence:
    """State of the packets of one writer (a packet sequence), to which later packets refer.

    ``interned`` maps a field of ``InternedData`` and an id to a text. ``valid`` is False after lost packets,
    until the writer clears its state.
    """

    number: int
    valid: bool = False
    clock: int | None = None
    track: int = 0
    delta_us: int = 0
    interned: dict[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])

    def take(self, packet: Packet) -> bool:
        """Update the state of the sequence (interned names, clocks) from a packet. Return False if the packet
        refers to state that was lost.
        """
        flags = packet.number(PacketField.SEQUENCE_FLAGS)
        cleared = bool(flags & _CLEARED)
        cleared |= bool(packet.number(PacketField.INCREMENTAL_STATE_CLEARED))
        if cleared or packet.number(PacketField.PREVIOUS_PACKET_DROPPED):
            self.valid = cleared
            self.interned.clear()
            self.clock, self.track = None, 0
        for number, start, end in packet.messages:
            if number == PacketField.INTERNED_DATA:
                for field_number, entry in messages(packet.data, start, end, *_INTERNED):
                    is_kernel = field_number == _KERNELS
                    name = entry.text(ComputeKernelField.DEMANGLED_NAME) if is_kernel else ""
                    iid = entry.numbers.get(InternedField.IID, 0)
                    self.interned[field_number, iid] = name or entry.text(InternedField.NAME)
            elif number == PacketField.TRACE_PACKET_DEFAULTS:
                defaults = WireMessage.of(packet.data, start, end)
                self.clock = defaults.numbers.get(PacketField.TIMESTAMP_CLOCK_ID, self.clock)
                event = WireMessage.of(packet.data, *defaults.spans.get(PacketField.TRACK_EVENT, (0, 0)))
                self.track = event.numbers.get(TrackEventField.TRACK_UUID, self.track)
        return self.valid or not flags & _NEEDS_STATE


_Key = tuple[int, int]
"""Packet sequence of a clock (0: all sequences) and number of the clock."""
LARGEST_NS = (1 << 61) - 1
"""73 years; sums of two such times fit 64 bits."""


@dataclass(slots=True)
class _Clock:
    unit_ns: int = 1
    incremental: bool = False
    last: int = 0
    offset_ns: int | None = None


@dataclass(slots=True)
class Clocks:
    """Conversion of the clocks of a trace to one clock. Times are at most 73 years, so that sums of two times
    fit 64 bits.
    """

    primary: int = int(BuiltinClock.BOOTTIME)
    unknown: int = 0
    _clocks: dict[_Key, _Clock] = field(default_factory=dict[_Key, _Clock])

    def time_ns(self, sequence: int, clock: int | None, value: int, position: int) -> int:
        """Convert a time to the trace's clock. Raises ``WireError`` if it does not fit 64 bits."""
        number = self.primary if clock is None else clock
        state = self._clocks.get(_key(sequence, number))
        if state is None:
            state = self._clocks[_key(sequence, number)] = _Clock()
        if state.incremental:
            value = state.last = state.last + value
        if state.offset_ns is None and number != self.primary:
            self.unknown += 1
        time_ns = value * state.unit_ns + (state.offset_ns or 0)
        if abs(time_ns) > LARGEST_NS:
            raise WireError("a time is too large for 64 bits of nanoseconds", position)
        return time_ns

    def snapshot(self, sequence: int, data: bytes, start: int, end: int) -> None:
        """Add a snapshot: several clocks read at the same moment."""
        read: list[tuple[_Key, int]] = []
        for number, wire, value, after in fields(data, start, end):
            if number == ClockSnapshotField.CLOCKS and wire == BYTES:
                entry = WireMessage.of(data, value, after).numbers
                clock_key = _key(sequence, entry.get(ClockField.CLOCK_ID, 0))
                state = self._clocks.setdefault(clock_key, _Clock())
                state.unit_ns = entry.get(ClockField.UNIT_MULTIPLIER_NS, 1) or 1
                state.incremental = bool(entry.get(ClockField.IS_INCREMENTAL, 0))
                read.append((clock_key, entry.get(ClockField.TIMESTAMP, 0)))
            elif number == ClockSnapshotField.PRIMARY_TRACE_CLOCK and wire != BYTES:
                self.primary = value
        if not read:
            return
        moment_ns = self._moment_ns(read)
        for key, shown in read:
            clock = self._clocks[key]
            clock.offset_ns = moment_ns - shown * clock.unit_ns
            clock.last = shown

    def _moment_ns(self, read: list[tuple[_Key, int]]) -> int:
        """Return the time of a clock snapshot on the trace's clock [ns].

        ``read`` has the clocks in the snapshot with their values. The value of the trace's clock is used, or
        else the value of the first clock whose offset to it is known.
        """
        for key, shown in read:
            if key == (0, self.primary):
                return shown * self._clocks[key].unit_ns
        for key, shown in read:
            clock = self._clocks[key]
            if clock.offset_ns is not None:
                return shown * clock.unit_ns + clock.offset_ns
        key, shown = read[0]
        return shown * self._clocks[key].unit_ns


def _key(sequence: int, clock: int) -> _Key:
    of_sequence = BuiltinClock.LAST < clock <= BuiltinClock.LAST_OF_SEQUENCE
    return (sequence if of_sequence else 0, clock)


SCHEMA_ID = "hespas.perfetto/1"
"""Attribute that marks traces written by Hespas."""

MOVED_BY = "moved_by_ns"
"""Attribute with the shift that the writer applied, because a trace cannot have times below 0."""

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
    """Return the confidence, from 0 to 100, that the start of a file is a Perfetto trace. Other protobuf
    messages may look alike, so a typical packet must have a time or a sequence number, and an event or a
    track description.
    """
    if SCHEMA_ID.encode() in data:
        return 100
    packets, typical = 0, 0
    try:
        for number, wire, start, end in fields(data, 0, len(data)):
            if number != TraceField.PACKET or wire != BYTES:
                return 0
            seen = {field: kind for field, kind, _, _ in fields(data, start, end)}
            if any(_WIRES.get(field, kind) != kind for field, kind in seen.items()):
                return 0
            packets += 1
            timed = PacketField.TIMESTAMP in seen or PacketField.TRUSTED_PACKET_SEQUENCE_ID in seen
            typical += timed and not _PAYLOADS.isdisjoint(seen)
            typical += seen.keys() == {PacketField.COMPRESSED_PACKETS}
            if packets >= _MOST_PACKETS:
                break
    except WireError:
        pass  # the start of a file ends in the middle of a packet
    if not typical:
        return 0
    return 95 if typical * 4 >= packets else 60
