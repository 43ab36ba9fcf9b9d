"""The packets of a trace, those inside compressed ones too, and what belongs to a sequence of them."""

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
"""As plain numbers: members of a flag take ten times as long to ask, for every packet."""
_USUAL_BYTES = 80
"""Of a packet that is not compressed, about."""


@dataclass(slots=True)
class Packet:
    """One packet: its numbers by field, and where each of its messages stands in ``data``."""

    data: bytes
    start: int
    numbers: dict[int, int]
    messages: list[tuple[int, int, int]]

    def number(self, name: PacketField) -> int:
        """A number, 0 where the packet does not have it."""
        return self.numbers.get(name, 0)


def packets(data: bytes) -> Iterator[Packet]:
    """All packets in the order of the file. Raises ``WireError``; ``UnsupportedError`` for zstd."""
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
            for each in _inner(inner, start):
                left -= 1
                if left < 0:
                    raise WireError("compressed packets are more than the file has room for", start)
                yield each


def _inner(data: bytes, position: int) -> Iterator[Packet]:
    try:
        yield from _plain(data)
    except WireError as error:
        raise WireError(f"inside compressed packets: {error}", position) from error


def _plain(data: bytes) -> Iterator[Packet]:
    for number, wire, start, end in fields(data, 0, len(data)):
        if number != TraceField.PACKET or wire != BYTES:
            raise WireError(f"field {number} stands where packets do", start)
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
        found = inflate.decompress(data, max(1, allowed))
    except zlib.error as error:
        raise WireError(f"compressed packets are damaged: {error}", position) from error
    if inflate.unconsumed_tail:
        raise WireError(f"compressed packets take more than {allowed:,} bytes", position)
    if not inflate.eof:
        raise WireError("compressed packets are cut off", position)
    return found


def text(data: bytes, start: int, end: int) -> str:
    """Text that may be damaged."""
    return data[start:end].decode("utf-8", "replace")


class WireMessage(NamedTuple):
    """A message: its numbers by field, and where its bytes stand; of several of one field the last."""

    data: bytes
    numbers: dict[int, int]
    spans: dict[int, tuple[int, int]]

    @classmethod
    def of(cls, data: bytes, start: int, end: int) -> WireMessage:
        """The message in ``data[start:end]``. Raises ``WireError``."""
        found = cls(data, {}, {})
        for number, wire, value, after in fields(data, start, end):
            if wire == BYTES:
                found.spans[number] = (value, after)
            else:
                found.numbers[number] = value
        return found

    def text(self, field: int) -> str:
        """A text, empty where it is not there."""
        return text(self.data, *self.spans.get(field, (0, 0)))


def messages(data: bytes, start: int, end: int, *wanted: int) -> Iterator[tuple[int, WireMessage]]:
    """The messages inside one, in order, each with its field; of the fields that are ``wanted``."""
    for number, wire, value, after in fields(data, start, end):
        if number in wanted and wire == BYTES:
            yield number, WireMessage.of(data, value, after)


@dataclass(slots=True)
class PacketSequence:
    """What earlier packets of one writer said that later ones refer to.

    ``interned`` maps a field of ``InternedData`` and an id to a text. ``valid`` is false where packets were
    lost, until the writer starts anew.
    """

    number: int
    valid: bool = False
    clock: int | None = None
    track: int = 0
    delta_us: int = 0
    interned: dict[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])

    def take(self, packet: Packet) -> bool:
        """Note what a packet says of its sequence; whether the packet itself may be used."""
        flags = packet.number(PacketField.SEQUENCE_FLAGS)
        cleared = bool(flags & _CLEARED)
        cleared |= bool(packet.number(PacketField.INCREMENTAL_STATE_CLEARED))
        if cleared or packet.number(PacketField.PREVIOUS_PACKET_DROPPED):
            self.valid = cleared
            self.interned.clear()
            self.clock, self.track = None, 0
        for number, start, end in packet.messages:
            if number == PacketField.INTERNED_DATA:
                self._intern(packet.data, start, end)
            elif number == PacketField.TRACE_PACKET_DEFAULTS:
                found = WireMessage.of(packet.data, start, end)
                self.clock = found.numbers.get(PacketField.TIMESTAMP_CLOCK_ID, self.clock)
                event = WireMessage.of(packet.data, *found.spans.get(PacketField.TRACK_EVENT, (0, 0)))
                self.track = event.numbers.get(EventField.TRACK_UUID, self.track)
        return self.valid or not flags & _NEEDS_STATE

    def _intern(self, data: bytes, start: int, end: int) -> None:
        for number, entry in messages(data, start, end, *_INTERNED):
            own = entry.text(ComputeKernelField.DEMANGLED_NAME) if number == _KERNELS else ""
            self.interned[number, entry.numbers.get(InternedField.IID, 0)] = own or entry.text(
                InternedField.NAME
            )


# --- Clocks: https://perfetto.dev/docs/concepts/clock-sync.

_Key = tuple[int, int]
"""The packet sequence a clock belongs to (0: all) and its number."""
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
    """What the snapshots so far say of each clock. ``unknown`` counts times of clocks that none mentions."""

    primary: int = int(BuiltinClock.BOOTTIME)
    unknown: int = 0
    _clocks: dict[_Key, _Clock] = field(default_factory=dict[_Key, _Clock])

    def time_ns(self, sequence: int, clock: int | None, value: int, position: int) -> int:
        """A time as the trace's clock shows it. Raises ``WireError`` where it does not fit 64 bits."""
        number = self.primary if clock is None else clock
        known = self._clocks.get(_key(sequence, number))
        if known is None:
            known = self._clocks[_key(sequence, number)] = _Clock()
        if known.incremental:
            value = known.last = known.last + value
        if known.offset_ns is None and number != self.primary:
            self.unknown += 1
        found = value * known.unit_ns + (known.offset_ns or 0)
        if abs(found) > LARGEST_NS:
            raise WireError("a time is too large for 64 bits of nanoseconds", position)
        return found

    def snapshot(self, sequence: int, data: bytes, start: int, end: int) -> None:
        """Several clocks read at one moment."""
        read: list[tuple[_Key, int]] = []
        for number, wire, value, after in fields(data, start, end):
            if number == ClockSnapshotField.CLOCKS and wire == BYTES:
                read.append(self._one(sequence, WireMessage.of(data, value, after).numbers))
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
        """The moment on the trace's clock: as that shows it, else as the first clock known before."""
        for key, shown in read:
            if key == (0, self.primary):
                return shown * self._clocks[key].unit_ns
        for key, shown in read:
            clock = self._clocks[key]
            if clock.offset_ns is not None:
                return shown * clock.unit_ns + clock.offset_ns
        key, shown = read[0]
        return shown * self._clocks[key].unit_ns

    def _one(self, sequence: int, values: dict[int, int]) -> tuple[_Key, int]:
        key = _key(sequence, values.get(ClockField.CLOCK_ID, 0))
        clock = self._clocks.setdefault(key, _Clock())
        clock.unit_ns = values.get(ClockField.UNIT_MULTIPLIER_NS, 1) or 1
        clock.incremental = bool(values.get(ClockField.IS_INCREMENTAL, 0))
        return key, values.get(ClockField.TIMESTAMP, 0)


def _key(sequence: int, clock: int) -> _Key:
    of_sequence = BuiltinClock.LAST < clock <= BuiltinClock.LAST_OF_SEQUENCE
    return (sequence if of_sequence else 0, clock)


# --- Whether bytes are a trace.

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
