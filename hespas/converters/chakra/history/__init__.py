"""Telling the schema of a trace by its first frames: labels are unreliable and numbers were reused.

A metadata frame with a version text or with attributes in field 2 can only be of today's schema. Everything
else (no metadata, empty ones, attributes in field 1) needs :mod:`.resolution` from the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from hespas.converters.chakra.wire import (
    Bools,
    Longs,
    Window,
    Words,
    offsets_of,
    packed_varints,
    read_varints,
)
from hespas.files.wire import BYTES, VARINT, WireError, encode_varint
from hespas.files.wire import fields as wire_fields
from hespas.schemas.chakra import CURRENT, EARLY
from hespas.schemas.chakra.history import VERSIONS
from hespas.schemas.chakra.tables import WireType

__all__ = [
    "Fields",
    "FirstFrame",
    "Repeated",
    "Signature",
    "as_current_metadata",
    "first_frame",
    "looks_old",
    "possible_versions",
    "tag_of",
    "walk",
]

_NAME_TAG = b"\x0a"
_WITH_METADATA = frozenset(label for label, version in VERSIONS.items() if version.metadata)
_PROTO2 = frozenset(label for label, version in VERSIONS.items() if version.syntax == "proto2")


class FirstFrame(Enum):
    """What the first frame is."""

    METADATA = "metadata"
    NODE = "node"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Signature:
    """Top-level fields of one message: (number, wire type, content of a length-delimited one)."""

    fields: tuple[tuple[int, int, bytes], ...]

    @classmethod
    def of(cls, message: bytes) -> Signature | None:
        """The fields of a message, None where it is no protobuf message."""
        found: list[tuple[int, int, bytes]] = []
        try:
            for number, wire, start, end in wire_fields(message, 0, len(message)):
                found.append((number, wire, message[start:end] if wire == BYTES else b""))
        except WireError:
            return None
        return cls(tuple(found))

    @property
    def wires(self) -> frozenset[tuple[int, int]]:
        """Which (number, wire type) there are."""
        return frozenset((number, wire) for number, wire, _ in self.fields)

    def contents(self, number: int) -> list[bytes]:
        """What stands in a length-delimited field."""
        return [content for found, wire, content in self.fields if found == number and wire == BYTES]


def first_frame(signature: Signature) -> FirstFrame:
    """Whether the first frame is a ``GlobalMetadata`` (an empty one is) or already a ``Node``."""
    wires = {number: wire for number, wire, _ in reversed(signature.fields)}
    if wires.get(1) == VARINT or set(wires) - {1, 2}:
        return FirstFrame.NODE if set(wires) - {2} else FirstFrame.UNKNOWN
    return FirstFrame.METADATA if set(wires.values()) <= {BYTES} else FirstFrame.UNKNOWN


def possible_versions(signature: Signature) -> frozenset[str]:
    """The versions whose traces may begin with this frame.

    A node may come first in all of proto2, since writers were slower than the schema; today's codec reads
    such a file only as a faulty one. An attribute begins with its name, whose tag is a line feed: no version
    label does. Attributes of proto2 declare a type, where those of today have a doc string.
    """
    if first_frame(signature) is not FirstFrame.METADATA:
        return _PROTO2 | {CURRENT}
    if not signature.fields:
        return _WITH_METADATA
    first = signature.contents(1)
    if len(first) < len(signature.fields) or not all(map(_is_attribute, first)):
        return frozenset({CURRENT})
    typed = [(2, VARINT) in inner.wires for inner in map(Signature.of, first) if inner is not None]
    if all(typed):
        return _WITH_METADATA & _PROTO2
    return frozenset() if any(typed) else frozenset({EARLY})


def _is_attribute(content: bytes) -> bool:
    inner = Signature.of(content) if content.startswith(_NAME_TAG) else None
    return inner is not None


def as_current_metadata(signature: Signature) -> bytes:
    """Early 0.0.4 metadata, whose attributes are in field 1, as metadata of today."""
    return b"".join(
        b"\x12" + encode_varint(len(content)) + content
        for number, _, content in signature.fields
        if number == 1
    )


def looks_old(signature: Signature) -> bool:
    """Whether a node has fields as only nodes before 0.0.4 have them."""
    wires = signature.wires
    if wires & {(6, BYTES), (7, BYTES)} or any((number, VARINT) in wires for number in range(8, 21)):
        return True
    old = [inner for inner in map(Signature.of, signature.contents(11)) if inner is not None]
    return any({(1, BYTES), (2, VARINT)} <= inner.wires for inner in old)


# --- All fields of many messages at once, in whatever order and number they stand.
#
# Where the codec of today's schema expects what a serialiser writes, this walks any message: the fields of
# old traces are few, their encodings many (packed and unpacked lists, explicit zeros). Nothing here raises;
# malformed messages are marked.

_ROUNDS = 64
"""Fields that are walked for all messages at once; longer messages are finished singly."""

_LARGEST_TAG = (1 << 32) - 1
_FIXED_BYTES: dict[int, int] = {WireType.FIXED64: 8, WireType.FIXED32: 4}


def tag_of(number: int, wire: int) -> int:
    """A field number and wire type as they stand before a value."""
    return number << 3 | wire


class Repeated(NamedTuple):
    """A repeated integer field: ``values[offsets[i]:offsets[i + 1]]`` are those of message ``i``."""

    values: Words
    offsets: Longs


@dataclass(frozen=True, slots=True, eq=False)
class Fields:
    """Fields in message order: field ``i`` belongs to message ``owner[i]`` and has the tag ``tag[i]``.

    ``value`` is the integer, the raw bits of a fixed one, or the length of the content, which begins at
    ``at``. ``bad`` marks messages that are malformed; their fields up to the fault are listed.
    """

    window: Window
    messages: int
    owner: Longs
    tag: Longs
    value: Words
    at: Longs
    bad: Bools

    def rows(self, tag: int) -> Longs:
        """The fields with one tag."""
        return np.flatnonzero(self.tag == tag)

    def has(self, tag: int) -> Bools:
        """Which messages have a field."""
        found = np.zeros(self.messages, np.bool_)
        found[self.owner[self.rows(tag)]] = True
        return found

    def scalar(self, tag: int) -> Words:
        """The last value of a field in each message, 0 where it is absent."""
        column = np.zeros(self.messages, np.uint64)
        rows = self.rows(tag)
        column[self.owner[rows]] = self.value[rows]
        return column

    def span(self, number: int) -> tuple[Longs, Longs]:
        """Start and length of a length-delimited field's last occurrence; length 0 where it is absent."""
        rows = self.rows(tag_of(number, WireType.BYTES))
        start, length = np.zeros(self.messages, np.int64), np.zeros(self.messages, np.int64)
        start[self.owner[rows]] = self.at[rows]
        length[self.owner[rows]] = self.value[rows].view(np.int64)
        return start, length

    def integers(self, number: int) -> tuple[Repeated, Bools | None]:
        """A repeated varint field, packed or not, and which messages hold a malformed packed one."""
        packed_tag = tag_of(number, WireType.BYTES)
        rows = np.flatnonzero((self.tag == tag_of(number, WireType.VARINT)) | (self.tag == packed_tag))
        if not len(rows):
            return Repeated(np.empty(0, np.uint64), np.broadcast_to(np.int64(0), (self.messages + 1,))), None
        owner, values = self.owner[rows], self.value[rows]
        packed = np.flatnonzero(self.tag[rows] == packed_tag)
        if not len(packed):
            return Repeated(values, offsets_of(np.bincount(owner, minlength=self.messages))), None
        inside, bounds, cut = packed_varints(
            self.window, self.at[rows[packed]], values[packed].view(np.int64)
        )
        counts = np.ones(len(rows), np.int64)
        counts[packed] = np.diff(bounds)
        place = offsets_of(counts)
        merged = np.empty(int(place[-1]), np.uint64)
        single = np.delete(np.arange(len(rows)), packed)
        merged[place[single]] = values[single]
        shift = np.repeat(place[packed] - bounds[:-1], np.diff(bounds))
        merged[np.arange(len(inside)) + shift] = inside
        totals = np.bincount(owner, weights=counts, minlength=self.messages).astype(np.int64)
        bad = None if cut is None else np.isin(np.arange(self.messages), owner[packed[cut]])
        return Repeated(merged, offsets_of(totals)), bad


class _Round(NamedTuple):
    """One field of each of some messages."""

    rows: Longs
    tag: Longs
    value: Words
    at: Longs


def walk(window: Window, start: Longs, end: Longs) -> Fields:
    """The fields of the messages at ``start`` to ``end``. Cost: O(fields), a few passes over each."""
    bad = np.zeros(len(start), np.bool_)
    rows = np.flatnonzero(start < end)
    at = start[rows]
    rounds: list[_Round] = []
    while len(rows) and len(rounds) < _ROUNDS:
        found, at, good = _step(window, rows, at, end[rows])
        if good is not None:
            bad[rows[~good]] = True
            found = _Round(found.rows[good], found.tag[good], found.value[good], found.at[good])
            at = at[good]
        rounds.append(found)
        more = at < end[found.rows]
        rows, at = (found.rows, at) if more.all() else (found.rows[more], at[more])
    counts = np.zeros(len(start), np.int64)
    for found in rounds:
        counts[found.rows] += 1
    tails = _tails(window, rows, at, end, bad)
    for row, fields in tails:
        counts[row] += len(fields)
    return _in_order(window, rounds, tails, counts, bad)


def _step(window: Window, rows: Longs, at: Longs, end: Longs) -> tuple[_Round, Longs, Bools | None]:
    """Read one field of each message at ``at``.

    Returns the positions behind, and which are sound (None: all).
    """
    tag, behind, wrong = read_varints(window, at)
    wire = (tag & np.uint64(7)).astype(np.uint8)
    value, content, endless = read_varints(window, behind)
    delimited = wire == WireType.BYTES
    length = np.where(delimited, value.view(np.int64), 0)
    behind_value = content + length
    fixed = np.flatnonzero((wire == WireType.FIXED32) | (wire == WireType.FIXED64))
    sound = (length >= 0) & (length <= end - content) & (delimited | (wire == WireType.VARINT))
    if endless is not None:
        sound &= ~endless
    if len(fixed):
        size = np.where(wire[fixed] == WireType.FIXED64, 8, 4)
        behind_value[fixed] = behind[fixed] + size
        raw = window.words[behind[fixed]]
        value[fixed] = np.where(size == 8, raw, raw & np.uint64(0xFFFFFFFF))
        content[fixed] = behind[fixed]
        sound[fixed] = behind_value[fixed] <= end[fixed]
    sound &= (tag >= 8) & (tag <= _LARGEST_TAG)
    if wrong is not None:
        sound &= ~wrong
    good = None if sound.all() else sound
    return _Round(rows, tag.view(np.int64), value, content), behind_value, good


_Tail = list[tuple[int, int, int]]


def _tails(window: Window, rows: Longs, at: Longs, end: Longs, bad: Bools) -> list[tuple[int, _Tail]]:
    """The rest of long messages, one by one: (row, [(tag, value, position)])."""
    tails: list[tuple[int, _Tail]] = []
    for row, here, stop in zip(rows.tolist(), at.tolist(), end[rows].tolist(), strict=True):
        fields, sound = _walk_one(window.u8[here:stop].tobytes(), here)
        bad[row] |= not sound
        tails.append((row, fields))
    return tails


def _walk_one(data: bytes, base: int) -> tuple[_Tail, bool]:
    """The fields of one message's rest, and whether it is sound."""
    found: _Tail = []
    try:
        for number, wire, value, place in wire_fields(data, 0, len(data)):
            tag = number << 3 | wire
            if tag > _LARGEST_TAG:
                return found, False
            is_bytes = wire == WireType.BYTES
            found.append((tag, place - value, base + value) if is_bytes else (tag, value, base + place))
    except WireError:
        return found, False
    return found, True


def _in_order(
    window: Window, rounds: list[_Round], tails: list[tuple[int, _Tail]], counts: Longs, bad: Bools
) -> Fields:
    """Rounds hold the first, second, ... field of every message; put each message's side by side."""
    offsets = offsets_of(counts)
    total = int(offsets[-1])
    tag, value = np.empty(total, np.int64), np.empty(total, np.uint64)
    at = np.empty(total, np.int64)
    place = offsets[:-1].copy()
    for found in rounds:
        into = place[found.rows]
        tag[into], value[into], at[into] = found.tag, found.value, found.at
        place[found.rows] = into + 1
    for row, fields in tails:
        rest = slice(int(place[row]), int(offsets[row + 1]))
        tag[rest] = [field[0] for field in fields]
        value[rest] = np.array([field[1] for field in fields], np.uint64)
        at[rest] = [field[2] for field in fields]
    owner = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return Fields(window, len(counts), owner, tag, value, at, bad)
