"""The packets of a trace, those inside compressed ones too, and what belongs to a sequence of them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from hespas.files.limits import limits
from hespas.files.wire import BYTES, VARINT, WireError, fields
from hespas.graph.errors import UnsupportedError
from hespas.schemas.perfetto.tables import (
    ComputeKernelField,
    EventField,
    InternedDataField,
    InternedField,
    PacketField,
    SequenceFlag,
    TraceField,
)

__all__ = ["Packet", "Sequence", "packets", "text"]

_INTERNED = frozenset(int(member) for member in InternedDataField)
_DEMANGLED = (InternedDataField.COMPUTE_KERNELS, ComputeKernelField.DEMANGLED_NAME)
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
    allowed, left = _allowed(len(data))
    for packet in _plain(data):
        if not packet.messages:
            yield packet
            continue
        squeezed = [span for span in packet.messages if span[0] == PacketField.COMPRESSED_PACKETS]
        if any(number == PacketField.ZSTD_COMPRESSED_PACKETS for number, _, _ in packet.messages):
            raise UnsupportedError(
                "the trace holds packets compressed with zstd", position=f"byte {packet.start}",
                hint="record it with deflate, or unpack it: traceconv decompress_packets TRACE OUT",
            )  # fmt: skip
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


def _allowed(size: int) -> tuple[int, int]:
    """How many bytes and packets the compressed ones of a trace may hold: each packet takes a byte of the
    file at least. Without a bound 20 kB hold ten million packets, and each takes its time.
    """
    bounds = limits()
    free = bounds.compressed_packets_bytes
    return max(free, bounds.compressed_packets_ratio * size), free // _USUAL_BYTES + size


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


@dataclass(slots=True)
class Sequence:
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
                self._defaults(packet.data, start, end)
        return self.valid or not flags & _NEEDS_STATE

    def _intern(self, data: bytes, start: int, end: int) -> None:
        for number, wire, inside, behind in fields(data, start, end):
            if number not in _INTERNED or wire != BYTES:
                continue
            iid, name = 0, ""
            for inner, kind, value, after in fields(data, inside, behind):
                if inner == InternedField.IID and kind == VARINT:
                    iid = value
                elif kind == BYTES and (inner == InternedField.NAME or (number, inner) == _DEMANGLED):
                    name = text(data, value, after) or name
            self.interned[number, iid] = name

    def _defaults(self, data: bytes, start: int, end: int) -> None:
        for number, wire, value, after in fields(data, start, end):
            if number == PacketField.TIMESTAMP_CLOCK_ID and wire == VARINT:
                self.clock = value
            elif number == PacketField.TRACK_EVENT and wire == BYTES:
                for inner, kind, track, _ in fields(data, value, after):
                    if inner == EventField.TRACK_UUID and kind == VARINT:
                        self.track = track
