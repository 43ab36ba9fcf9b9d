"""Decoding of ``AttributeProto`` messages, for all attributes of a chunk at once. Each distinct name is
stored once.

A trace has few distinct names and many occurrences. Names of up to 32 bytes are looked up by a hash and then
compared in full. All other names, and the first occurrence of each, are looked up in a dictionary.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.wire import (
    AttributeColumns,
    Bools,
    ByteRows,
    Bytes,
    ByteWindow,
    Longs,
    Words,
    copy_spans,
    not_text,
    read_varints,
)
from hespas.converters.chakra.wire.canonical import canonical_message
from hespas.converters.chakra.wire.walk import Cursor, repeated_spans
from hespas.graph.errors import FormatError
from hespas.schemas.chakra.tables import (
    ATTRIBUTE,
    VALUE_FIELDS,
    AttributeField,
    WireType,
)

__all__ = ["NOT_TEXT", "KeyTable", "decode_attributes"]

_NAME_TAG, _DOC_TAG, _ENTRY_TAG = 0x0A, 0x12, 0x0A
_NO_VALUE = 255


def _wire_of_tag() -> Bytes:
    """Return an array with the wire type of each protobuf tag that holds the value of an attribute. Other
    tags have 255.
    """
    table = np.full(1 << 14, _NO_VALUE, np.uint8)
    for number, kind in VALUE_FIELDS.items():
        table[number << 3 | kind.wire] = kind.wire
        table[number + 1 << 3 | WireType.BYTES] = WireType.BYTES
    return table


_WIRE_OF_TAG = _wire_of_tag()
_LOW32 = np.uint64(0xFFFFFFFF)


def decode_attributes(
    window: ByteWindow, offsets: Longs, start: Longs, length: Longs, keys: KeyTable
) -> tuple[AttributeColumns, Bools]:
    """Decode the attributes at the given byte spans. Return their columns, and a mask of the attributes that
    must first be re-encoded in canonical form.

    Owner ``i`` has the attributes ``offsets[i]:offsets[i + 1]``. Names are added to ``keys``; the names in
    the result are set when all chunks are joined.
    """
    cursor = Cursor(window, start, start + length)
    name_start, name_length = cursor.span(_NAME_TAG).spread(len(start))
    key = keys.intern(window, name_start, name_length)
    doc = cursor.span(_DOC_TAG)
    doc_rows = np.arange(len(start)) if doc.rows is None else doc.rows
    docs = ByteRows(*copy_spans(window, doc.start, doc.length))
    cursor.mark(doc_rows, not_text(docs) | (doc.length == 0) if len(docs) else None)
    at = cursor.at
    has = at < cursor.end
    low = window.u8.take(at)
    wide = low >= 0x80
    tag = low.astype(np.int64)
    if wide.any():
        tag += np.where(wide, (window.u8.take(at + 1).astype(np.int64) << 7) - 0x80, 0)
    wire = np.where(has, _WIRE_OF_TAG.take(tag, mode="clip"), _NO_VALUE)
    cursor.bad = cursor.bad | (has & (wire == _NO_VALUE))
    field = np.where(has, tag >> 3, 0).astype(np.uint8)
    cursor.at = np.where(wire == _NO_VALUE, at, at + 1 + wide)
    bits = np.zeros(len(at), np.uint64)
    rows = np.flatnonzero(wire == WireType.VARINT)
    if len(rows):
        value, behind, endless = read_varints(window, cursor.at[rows])
        cursor.mark(rows, endless)
        cursor.at[rows] = behind
        bits[rows] = _integers(field[rows], value)
    _fixed(cursor, np.flatnonzero(wire == WireType.FIXED64), field, bits, 8)
    _fixed(cursor, np.flatnonzero(wire == WireType.FIXED32), field, bits, 4)
    payload = _payloads(cursor, np.flatnonzero(wire == WireType.BYTES), field, bits)
    columns = AttributeColumns((), offsets, key, field, bits, payload, doc_rows, docs)
    return columns, cursor.finish() | (key == NOT_TEXT)


def _integers(field: Bytes, raw: Words) -> Words:
    """Convert varints to the values of their fields: cut to 32 bits, zigzag-decoded, or bool."""
    value = raw.copy()
    present = set(np.flatnonzero(np.bincount(field, minlength=33)).tolist())
    if AttributeField.INT32 in present:
        rows = np.flatnonzero(field == AttributeField.INT32)
        value[rows] = _sign_extended(raw[rows])
    if AttributeField.UINT32 in present:
        value[field == AttributeField.UINT32] &= _LOW32
    if AttributeField.BOOL in present:
        rows = np.flatnonzero(field == AttributeField.BOOL)
        value[rows] = raw[rows] != 0
    for number, mask in ((AttributeField.SINT32, _LOW32), (AttributeField.SINT64, ~np.uint64(0))):
        if number in present:
            rows = np.flatnonzero(field == number)
            zigzag = raw[rows] & mask
            value[rows] = (zigzag >> np.uint64(1)) ^ (~(zigzag & np.uint64(1)) + np.uint64(1))
    return value


def _sign_extended(value: Words) -> Words:
    return value.astype(np.uint32).view(np.int32).astype(np.int64).view(np.uint64)


def _fixed(cursor: Cursor, rows: Longs, field: Bytes, bits: Words, size: int) -> None:
    if not len(rows):
        return
    at = cursor.at[rows]
    value = cursor.window.words[at]
    if size == 4:
        value &= _LOW32
        signed = field[rows] == AttributeField.SFIXED32
        value[signed] = _sign_extended(value[signed])
    bits[rows] = value
    cursor.at[rows] = at + size


def _payloads(cursor: Cursor, rows: Longs, field: Bytes, bits: Words) -> ByteRows:
    """Return the values of strings, bytes and lists. Attributes whose value is not canonical or not text are
    marked.
    """
    if not len(rows):
        return ByteRows.blank(0)
    value, start, endless = read_varints(cursor.window, cursor.at[rows])
    end = cursor.end[rows]
    length = value.view(np.int64)
    outside = (length != end - start) | (length < 0)
    if endless is not None:
        outside |= endless
    start, length = np.where(outside, end, start), np.where(outside, 0, length)
    cursor.mark(rows, outside)
    cursor.at[rows] = end
    payload = ByteRows(*copy_spans(cursor.window, start, length))
    number = field[rows]
    strings = number == AttributeField.STRING
    if strings.any():
        cursor.mark(rows, not_text(payload) & strings)
    texts = np.flatnonzero((number == AttributeField.STRING_LIST) | (number == AttributeField.BYTES_LIST))
    cursor.mark(rows[texts], _bad_entries(cursor.window, number[texts], start[texts], length[texts]))
    lists = np.flatnonzero((number & 1 == 0) & (number < AttributeField.STRING_LIST))
    cursor.mark(rows[lists], _bad_lists(number[lists], payload, lists))
    bits[rows] = np.arange(len(rows), dtype=np.uint64)
    return payload


def _bad_entries(window: ByteWindow, number: Bytes, start: Longs, length: Longs) -> Bools | None:
    """Return a mask of the lists of strings or bytes that are not canonical, or whose strings are not
    UTF-8.
    """
    if not len(number):
        return None
    cursor = Cursor(window, start, start + length)
    offsets, entry_start, entry_length = repeated_spans(cursor, _ENTRY_TAG)
    # A length written with more bytes than it needs shows as a total that is too long.
    sizes = 1 + entry_length + 1
    for bound in range(7, 64, 7):
        if not len(entry_length) or int(entry_length.max()) >> bound == 0:
            break
        sizes += entry_length >= 1 << bound
    total = np.concatenate([[0], np.cumsum(sizes)])[offsets]
    bad: Bools = cursor.finish() | (np.diff(total) != length)
    entries = ByteRows(*copy_spans(window, entry_start, entry_length))
    wrong = np.flatnonzero(not_text(entries))
    owner = np.searchsorted(offsets, wrong, side="right") - 1
    bad[owner[number[owner] == AttributeField.STRING_LIST]] = True
    return bad


def _bad_lists(number: Bytes, payload: ByteRows, rows: Longs) -> Bools | None:
    """Return a mask of numeric lists that are not canonical. Equal lists are checked once."""
    if not len(rows):
        return None
    seen: dict[tuple[int, bytes], bool] = {}
    bad = np.zeros(len(rows), np.bool_)
    for index, (field, row) in enumerate(zip(number.tolist(), rows.tolist(), strict=True)):
        content = payload[row]
        is_bad = seen.get((field, content))
        if is_bad is None:
            spec = ATTRIBUTE.fields[field].message
            is_bad = True
            with suppress(FormatError):
                is_bad = spec is None or canonical_message(content, spec).data != content
            seen[field, content] = is_bad
        bad[index] = is_bad
    return bad


NOT_TEXT = -1
"""Key of a name that is not UTF-8."""

_WORDS = 4
_SHORT = 8 * _WORDS
_BUCKETS = 1 << 12
_ROUNDS = 64
"""Number of new names of a chunk that are each searched in all of it; further ones are added one by one."""
_MIX = tuple(
    np.uint64(odd) for odd in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
)
# Row n keeps the first n bytes of a name's words.
_MASKS: Words = np.array(
    [
        [(1 << 8 * min(8, max(0, length - 8 * word))) - 1 for word in range(_WORDS)]
        for length in range(_SHORT + 1)
    ],
    np.uint64,
)


class KeyTable:
    """Table of the distinct attribute names of a file in order of first appearance. All chunks of the file
    use it.
    """

    __slots__ = ("_bucket", "_length", "_rows", "_words", "names")

    def __init__(self) -> None:
        """Start with no names."""
        self.names: list[str] = []
        self._rows: dict[bytes, int] = {}
        self._bucket = np.zeros(_BUCKETS, np.int32)
        self._words: Words = np.zeros((_WORDS, 64), np.uint64)
        self._length: Longs = np.full(64, -1, np.int64)

    def intern(self, window: ByteWindow, start: Longs, length: Longs) -> NDArray[np.int32]:
        """Return the table row of the name at each span of the buffer. New names are added. The row is
        :data:`NOT_TEXT` for a name that is not UTF-8.
        """
        short = np.minimum(length, _SHORT)
        longest = int(length.max()) if len(length) else 0
        depth = min(_WORDS, max(1, (longest + 7) // 8))
        words = [window.words[start + 8 * word] & _MASKS[:, word].take(short) for word in range(depth)]
        mixed = words[0] * _MIX[0]
        for column, odd in zip(words[1:], _MIX[1:], strict=False):
            mixed ^= column * odd
        bucket = (mixed >> np.uint64(52)).view(np.int64)
        key = self._bucket.take(bucket)
        same: NDArray[np.bool_] = self._length.take(key) == length
        for word, column in enumerate(words):
            same &= self._words[word].take(key) == column
        pending = np.flatnonzero(~same | (length > _SHORT))
        long = length[pending] > _SHORT
        for row in pending[long].tolist():
            key[row] = self._add(window.u8[start[row] : start[row] + length[row]].tobytes())
        pending = pending[~long]
        for _ in range(_ROUNDS):
            if not len(pending):
                return key
            row = int(pending[0])
            new_key = self._add(window.u8[start[row] : start[row] + length[row]].tobytes())
            self._bucket[bucket[row]] = max(new_key, 0)
            alike = length[pending] == length[row]
            for column in words:
                alike &= column[pending] == column[row]
            key[pending[alike]] = new_key
            pending = pending[~alike]
        for row in pending.tolist():
            key[row] = self._add(window.u8[start[row] : start[row] + length[row]].tobytes())
        return key

    def add(self, name: str) -> int:
        """Return the row of a name; a new name is added."""
        return self._add(name.encode())

    def find(self, name: str) -> int:
        """Return the row of a name, -1 if it is not in the table."""
        return self._rows.get(name.encode(), -1)

    def _add(self, name: bytes) -> int:
        """Return the row of a name; a new name is added. Return :data:`NOT_TEXT` if it is not UTF-8."""
        row = self._rows.get(name)
        if row is not None:
            return row
        try:
            text = name.decode()
        except UnicodeDecodeError:
            return NOT_TEXT
        row = self._rows[name] = len(self.names)
        self.names.append(text)
        if row == len(self._length):
            self._length = np.concatenate([self._length, np.full(row, -1, np.int64)])
            self._words = np.concatenate([self._words, np.zeros((_WORDS, row), np.uint64)], axis=1)
        if len(name) <= _SHORT:
            padded = np.frombuffer(name.ljust(_SHORT, b"\0"), "<u8")
            self._words[:, row] = padded
            self._length[row] = len(name)
        return row
