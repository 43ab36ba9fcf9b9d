"""What the nodes of a trace say about its schema: which fields they have, of which wire types, how large.

Evidence is collected over as many frames as it takes and then held against each version's table
(:mod:`.resolution`). It is a few small sets, however long the trace is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntFlag

import numpy as np

from hespas.converters.chakra.attributes import not_text
from hespas.converters.chakra.columns import ByteRows
from hespas.converters.chakra.fields import Fields, walk
from hespas.converters.chakra.spans import Bools, Longs, Window, Words, copy_spans
from hespas.converters.chakra.varints import packed_varints
from hespas.schemas.chakra.tables import VALUE_FIELDS, WireType

__all__ = ["ATTRIBUTE_TAG", "Evidence", "Seen"]

ATTRIBUTE_TAG = 11 << 3 | WireType.BYTES
"""Attributes of 0.0.2 and 0.0.3 nodes."""

_NAME, _TYPE, _DOC = 0x0A, 0x10, 0x1A
_ID_TAG, _NAME_TAG, _TYPE_TAG = 0x08, 0x12, 0x18
_CTRL, _DATA = 4 << 3, 5 << 3
_TEXT_TAGS = tuple(number << 3 | WireType.BYTES for number in range(5, 11))
_PACKED = (_CTRL | WireType.BYTES, _DATA | WireType.BYTES)
_IO = tuple(number << 3 | WireType.BYTES for number in (8, 9))
_ATTR = 10 << 3 | WireType.BYTES
_IO_TAGS = (0x0A, 0x12, 0x1A)
_ATTR_TAGS = (
    0x0A,
    0x12,
    *(number << 3 | kind.wire for number, kind in VALUE_FIELDS.items()),
    *(number + 1 << 3 | WireType.BYTES for number in VALUE_FIELDS),
)
_NOT_IN_PROTO3 = (_ID_TAG, _TYPE_TAG, 6 << 3, 7 << 3)
"""Numbers that a proto3 serialiser leaves out when they are 0."""

_COMM_TYPE = (9, int.from_bytes(b"comm_typ", "little"), ord("e"))
_UNKNOWN_TAG = 32 << 3
"""No version has a field of this number, or of a larger one."""
_LARGEST_TYPE = 15
_MANY = 64


class Seen(IntFlag):
    """What has been seen of the values of one (declared type, tag) of attributes."""

    ABOVE_ONE = 1
    ABOVE_INT64 = 2
    EMPTY = 4
    TEXT = 8
    NO_BOOLS = 16
    NO_FLOATS = 32
    NO_VARINTS = 64


@dataclass(slots=True, eq=False)
class Evidence:
    """Collected over nodes, and over the metadata attributes of old traces.

    ``largest`` is the largest value by tag (0 for what is no integer), ``lacking`` the numbers of fields that
    some node lacks, ``broken`` the tags whose content is not what it is in any schema that has messages or
    lists there, ``not_text`` those whose content is no text. ``values`` says what attribute values look like
    by (declared type, tag), ``valueless`` the declared types of attributes without one. ``unlike_proto3``:
    some node is not as a proto3 serialiser writes it.
    """

    largest: dict[int, int] = field(default_factory=dict[int, int])
    lacking: set[int] = field(default_factory=set[int])
    broken: set[int] = field(default_factory=set[int])
    not_text: set[int] = field(default_factory=set[int])
    node_types: set[int] = field(default_factory=set[int])
    values: dict[tuple[int, int], Seen] = field(default_factory=dict[tuple[int, int], Seen])
    valueless: set[int] = field(default_factory=set[int])
    comm_types: set[int] = field(default_factory=set[int])
    unlike_proto3: bool = False

    def copy(self) -> Evidence:
        """The same evidence, to which more can be added."""
        return Evidence(
            dict(self.largest),
            set(self.lacking),
            set(self.broken),
            set(self.not_text),
            set(self.node_types),
            dict(self.values),
            set(self.valueless),
            set(self.comm_types),
            self.unlike_proto3,
        )

    def add_nodes(self, window: Window, start: Longs, end: Longs) -> None:
        """Take in nodes; malformed ones say nothing."""
        fields = walk(window, start, end)
        if fields.bad.any():
            good = np.flatnonzero(~fields.bad)
            fields = walk(window, start[good], end[good])
        for number, tag in ((1, _ID_TAG), (2, _NAME_TAG), (3, _TYPE_TAG)):
            if not fields.has(tag).all():
                self.lacking.add(number)
        present = np.bincount(np.minimum(fields.tag, _UNKNOWN_TAG), minlength=_UNKNOWN_TAG + 1)
        for tag in np.flatnonzero(present[:_UNKNOWN_TAG]).tolist():
            self._field(tag, fields)
        if present[_UNKNOWN_TAG]:
            self.largest[_UNKNOWN_TAG] = 0
        self._few(self.node_types, fields.value[fields.rows(_TYPE_TAG)])

    def add_metadata(self, message: bytes) -> None:
        """Take in the attributes of a metadata frame that may be one of 0.0.3."""
        window = Window.holding(np.frombuffer(message, np.uint8))
        fields = walk(window, np.zeros(1, np.int64), np.full(1, len(message)))
        self._attributes(fields, fields.rows(_NAME))

    def _field(self, tag: int, fields: Fields) -> None:
        rows = fields.rows(tag)
        value = fields.value[rows]
        is_integer = tag & 7 == WireType.VARINT
        self.largest[tag] = max(self.largest.get(tag, 0), int(value.max()) if is_integer else 0)
        if tag in (_CTRL, _DATA) or (tag in (*_NOT_IN_PROTO3, _NAME_TAG) and not value.all()):
            self.unlike_proto3 = True
        if tag & 7 != WireType.BYTES:
            return
        start, length = fields.at[rows], value.view(np.int64)
        if tag in _TEXT_TAGS and not_text(ByteRows(*copy_spans(fields.window, start, length))).any():
            self.not_text.add(tag)
        if tag in _PACKED and packed_varints(fields.window, start, length)[2] is not None:
            self.broken.add(tag)
        if tag in _IO or tag == _ATTR:
            inner = walk(fields.window, start, start + length)
            known = _IO_TAGS if tag in _IO else _ATTR_TAGS
            if inner.bad.any() or not np.isin(inner.tag, known).all():
                self.broken.add(tag)
        if tag == ATTRIBUTE_TAG:
            self._attributes(fields, rows)

    def _attributes(self, fields: Fields, rows: Longs) -> None:
        """Attributes of proto2, standing in the given fields."""
        start = fields.at[rows]
        inner = walk(fields.window, start, start + fields.value[rows].view(np.int64))
        declared = inner.scalar(_TYPE)
        has_value = np.zeros(inner.messages, np.bool_)
        number = inner.tag >> 3
        held = np.flatnonzero((number > 3) & (number < 16))
        has_value[inner.owner[held]] = True
        known = np.isin(inner.tag, (_NAME, _TYPE, _DOC))
        known[held] = True
        complete = inner.has(_NAME) & inner.has(_TYPE) & (declared <= _LARGEST_TYPE)
        if inner.bad.any() or not (known.all() and complete.all()):
            self.broken.add(ATTRIBUTE_TAG)
            return
        self._few(self.valueless, declared[~has_value])
        code = declared[inner.owner[held]].view(np.int64) * 128 + inner.tag[held]
        for each in np.unique(code).tolist():
            place = divmod(each, 128)
            seen = _looks(inner, held[code == each], place[1] & 7)
            self.values[place] = self.values.get(place, Seen(0)) | seen
        is_kind = held[_named_comm_type(inner)[inner.owner[held]]]
        self._few(self.comm_types, inner.value[is_kind[inner.tag[is_kind] & 7 == WireType.VARINT]])

    @staticmethod
    def _few(into: set[int], values: Words) -> None:
        """Add distinct values; more than a few are all too large, and the smallest and largest will do."""
        distinct: list[int] = np.unique(values).tolist()
        into.update(distinct if len(distinct) < _MANY else (distinct[0], distinct[-1]))


def _looks(fields: Fields, rows: Longs, wire: int) -> Seen:
    """What the values in some fields of one tag look like."""
    value = fields.value[rows]
    if wire == WireType.VARINT:
        highest = int(value.max())
        return Seen(Seen.ABOVE_ONE * (highest > 1) | Seen.ABOVE_INT64 * (highest >= 1 << 63))
    if wire != WireType.BYTES:
        return Seen(0)
    start, length = fields.at[rows], value.view(np.int64)
    seen = Seen.EMPTY if not length.all() else Seen(0)
    filled = np.flatnonzero(length)
    if not len(filled):
        return seen
    content = ByteRows(*copy_spans(fields.window, start[filled], length[filled]))
    if (~_is_binary(content)).any():
        seen |= Seen.TEXT
    if (content.data > 1).any():
        seen |= Seen.NO_BOOLS
    if (content.lengths % 4).any():
        seen |= Seen.NO_FLOATS
    if packed_varints(fields.window, start[filled], length[filled])[2] is not None:
        seen |= Seen.NO_VARINTS
    return seen


def _is_binary(content: ByteRows) -> Bools:
    """Which rows nobody would write as a text: no UTF-8, or with control characters."""
    data = content.data
    control = ((data < 0x20) & (data != 0x09) & (data != 0x0A) & (data != 0x0D)) | (data == 0x7F)
    return not_text(content) | (np.add.reduceat(control, content.offsets[:-1], dtype=np.int64) > 0)


def _named_comm_type(fields: Fields) -> Bools:
    """Which attributes are called ``comm_type``."""
    start, length = fields.span(1)
    size, head, last = _COMM_TYPE
    named = (length == size) & (fields.window.words[start] == head)
    same: Bools = named & (fields.window.u8[start + 8] == last)
    return same
