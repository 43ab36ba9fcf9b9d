"""Protobuf reader and writer for single messages whose encoding the fast column decoder does not accept.

Any legal encoding of a message is read (fields in any order, repeated singular fields, unpacked lists,
unknown fields, skipped groups) and written as a protobuf serialiser would write it. The column decoder then
reads the result. Most fields need no change and are copied. Recursion depth is bounded by the schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hespas.files.wire import WireError, decode_varint, encode_varint, tag
from hespas.graph.errors import FormatError
from hespas.schemas.chakra.tables import (
    ATTRIBUTE,
    GLOBAL_METADATA,
    IO_INFO,
    NODE,
    MessageSpec,
    ProtoKind,
    WireType,
)

__all__ = ["Canonical", "canonical_message"]

_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1
_GROUP_START, _GROUP_END = 3, 4
_MAX_GROUP_DEPTH = 100
"""Protobuf's own recursion limit."""
_FIXED_BYTES = {WireType.FIXED32: 4, WireType.FIXED64: 8}
_SHORT = tuple(bytes((value,)) for value in range(0x80))
_FULL_RANGE = (ProtoKind.UINT64, ProtoKind.INT64)
"""Kinds of which every varint keeps its value."""
_MAX_VARINT = 10
"""Bytes of the longest varint; its last byte is 1."""
_BOOL, _STRING = ProtoKind.BOOL, ProtoKind.STRING  # looking up a member costs as much as a comparison
_SIGNED32, _UNSIGNED32 = (ProtoKind.INT32, ProtoKind.ENUM), (ProtoKind.UINT32, ProtoKind.SINT32)


@dataclass(frozen=True, slots=True)
class Canonical:
    """Message in the form that protobuf serialisers write. Unknown fields are left out: ``unknown_fields`` is
    their number, and ``unknown_tags`` their tags.
    """

    data: bytes
    unknown_fields: int
    unknown_tags: frozenset[int]


_INTEGER, _BYTES, _FIXED, _PACKED, _UNPACKED, _MESSAGE = range(6)
"""Forms of the values of a field."""
_LISTED = (_PACKED, _UNPACKED)


class _FieldPlan(NamedTuple):
    """Instructions for reading a field with one tag. ``head`` is the encoded tag that a serialiser writes. It
    may differ from the tag that is read, because a list may be packed or not.
    """

    form: int
    number: int
    head: bytes
    kind: ProtoKind
    size: int
    repeated: bool
    oneof: bool
    plan: _MessagePlan | None


class _MessagePlan(NamedTuple):
    """Instructions for reading a message type: its fields by tag and by number, and the numbers of the fields
    that exclude each other (oneof).
    """

    by_tag: dict[int, _FieldPlan]
    by_number: dict[int, _FieldPlan]
    oneof: frozenset[int]


_Values = dict[int, "bytes | list[bytes] | _Values"]
"""Values by field number: a singular field with its tag, the entries of a repeated one, or a message."""


def _plan(spec: MessageSpec) -> _MessagePlan:
    by_tag: dict[int, _FieldPlan] = {}
    by_number: dict[int, _FieldPlan] = {}
    for field in spec.fields.values():
        wire = field.kind.wire
        packed = field.repeated and wire != WireType.BYTES
        if field.message is not None:
            form = _MESSAGE
        elif packed:
            form = _UNPACKED
        elif wire == WireType.BYTES:
            form = _BYTES
        else:
            form = _INTEGER if wire == WireType.VARINT else _FIXED
        made = _FieldPlan(
            form=form,
            number=field.number,
            head=tag(field.number, WireType.BYTES if packed else wire),
            kind=field.kind,
            size=_FIXED_BYTES.get(wire, 0),
            repeated=field.repeated,
            oneof=field.oneof,
            plan=None if field.message is None else _plan(field.message),
        )
        by_tag[field.number << 3 | field.kind.wire] = made
        if made.form == _UNPACKED:
            made = made._replace(form=_PACKED)
            by_tag[field.number << 3 | WireType.BYTES] = made
        by_number[field.number] = made
    return _MessagePlan(
        by_tag,
        by_number,
        frozenset(field_spec.number for field_spec in spec.fields.values() if field_spec.oneof),
    )


_LISTS = tuple(field.message for field in ATTRIBUTE.fields.values() if field.message is not None)
_KNOWN = {id(spec): _plan(spec) for spec in (NODE, ATTRIBUTE, IO_INFO, GLOBAL_METADATA, *_LISTS)}


class _CanonicalReader:
    """Parser of one message that need not be in canonical form. ``base`` is the offset of the message in the
    file, for error messages.
    """

    __slots__ = ("base", "data", "path", "unknown", "unknown_tags")

    def __init__(self, data: bytes, base: int, path: str | None) -> None:
        self.data = data
        self.base = base
        self.path = path
        self.unknown = 0
        self.unknown_tags: set[int] = set()

    def fail(self, message: str, at: int) -> FormatError:
        return FormatError(
            message,
            code="ET001",
            path=self.path,
            position=f"byte {self.base + at}",
            hint="write or download the file again: it is damaged or is not a Chakra trace",
        )

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """Return a varint (64 bits) and the position after it."""
        if at < end and self.data[at] < 0x80:
            return self.data[at], at + 1
        try:
            return decode_varint(self.data, at, end)
        except WireError as error:
            raise self.fail(str(error), error.position) from None

    def content(self, at: int, end: int) -> tuple[int, int]:
        """Return the bounds of the content of a length-delimited field."""
        if at < end and self.data[at] < 0x80:
            length, at = self.data[at], at + 1
        else:
            length, at = self.varint(at, end)
        if length > end - at:
            raise self._does_not_fit(length, at)
        return at, at + length

    def _does_not_fit(self, length: int, at: int) -> FormatError:
        return self.fail(f"a field of {length} bytes does not fit into its message", at)

    def tag(self, at: int, end: int) -> tuple[int, int]:
        """Return the tag of the next field and the position after it."""
        value, behind = self.varint(at, end)
        if value >> 3 == 0 or value > _MASK32:
            raise self.fail(f"field number {value >> 3} is out of range (1 to 2**29 - 1)", at)
        return value, behind

    def skip(self, key: int, at: int, end: int) -> int:
        """Return the position after the value of an unknown field."""
        open_groups: list[int] = []
        while True:
            number, wire = key >> 3, key & 7
            if wire == _GROUP_START:
                open_groups.append(number)
            elif wire == _GROUP_END:
                if not open_groups or open_groups.pop() != number:
                    raise self.fail(f"group {number} ends, but did not start", at)
            elif wire == WireType.VARINT:
                at = self.varint(at, end)[1]
            elif wire == WireType.BYTES:
                at = self.content(at, end)[1]
            elif wire in _FIXED_BYTES:
                at = self._fixed(_FIXED_BYTES[WireType(wire)], at, end)
            else:
                raise self.fail(f"wire type {wire} does not exist", at)
            if not open_groups:
                return at
            if len(open_groups) > _MAX_GROUP_DEPTH:
                raise self.fail(f"groups are nested more than {_MAX_GROUP_DEPTH} deep", at)
            key, at = self.tag(at, end)

    def _fixed(self, length: int, at: int, end: int) -> int:
        if length > end - at:
            raise self._does_not_fit(length, at)
        return at + length

    def message(self, plan: _MessagePlan, values: _Values, at: int, end: int) -> None:
        """Merge the fields of ``data[at:end]`` into a message, as protobuf's parser does."""
        data, by_tag = self.data, plan.by_tag
        while at < end:
            key = data[at]
            if 8 <= key < 0x80:
                at += 1
            else:
                key, at = self.tag(at, end)
            field = by_tag.get(key)
            if field is None:
                self.unknown += 1
                self.unknown_tags.add(key)
                at = at + 1 if not key & 7 and at < end and data[at] < 0x80 else self.skip(key, at, end)
                continue
            form, number = field.form, field.number
            if field.oneof:
                for other in [
                    field_number
                    for field_number in values
                    if field_number != number and field_number in plan.oneof
                ]:
                    del values[other]
            if form == _INTEGER:
                if at < end and data[at] < 0x80:
                    value, at = data[at], at + 1
                else:
                    value, at = self.varint(at, end)
                encoded = _varint(field.kind, value)
                values[number] = field.head + encoded if encoded != b"\0" or field.oneof else b""
            elif form == _MESSAGE:
                at = self._nested(field, values, at, end)
            elif form in _LISTED:
                at = self._list(field, values, at, end)
            else:
                at = self._bytes(field, values, at, end)

    def _nested(self, field: _FieldPlan, values: _Values, at: int, end: int) -> int:
        """Read a nested message. If a singular field occurs again, the message is merged into the earlier
        one.
        """
        begin, behind = self.content(at, end)
        plan = field.plan
        assert plan is not None
        if field.repeated:
            inner: _Values = {}
            self.message(plan, inner, begin, behind)
            _entries(values, field.number).append(field.head + _delimited(_write(plan, inner)))
        else:
            earlier = values.get(field.number)
            target = values[field.number] = earlier if isinstance(earlier, dict) else {}
            self.message(plan, target, begin, behind)
        return behind

    def _bytes(self, field: _FieldPlan, values: _Values, at: int, end: int) -> int:
        """Read a string, bytes, or a number of fixed size."""
        if field.form == _FIXED:
            behind = self._fixed(field.size, at, end)
            values[field.number] = field.head + self.data[at:behind]
            return behind
        begin, behind = self.content(at, end)
        content = self.data[begin:behind]
        if field.kind is _STRING and not content.isascii():
            try:
                content.decode()
            except UnicodeDecodeError as error:
                raise self.fail("a text field is not UTF-8", begin + error.start) from None
        encoded = field.head + _delimited(content)
        if field.repeated:
            _entries(values, field.number).append(encoded)
        else:
            values[field.number] = encoded if content or field.oneof else b""
        return behind

    def _list(self, field: _FieldPlan, values: _Values, at: int, end: int) -> int:
        """Read numbers of a repeated field: a packed list, or a single entry."""
        entries = _entries(values, field.number)
        if field.form == _UNPACKED:
            content, at = self._scalar(field, at, end)
            entries.append(content)
            return at
        at, behind = self.content(at, end)
        content = self.data[at:behind]
        if field.size:
            is_shortest = len(content) % field.size == 0
        elif content.isascii():
            is_shortest = field.kind is not _BOOL
        else:
            is_shortest = field.kind in _FULL_RANGE and _are_shortest(content)
        if is_shortest:
            entries.append(content)
            return behind
        while at < behind:
            content, at = self._scalar(field, at, behind)
            entries.append(content)
        return behind

    def _scalar(self, field: _FieldPlan, at: int, end: int) -> tuple[bytes, int]:
        if not field.size:
            value, at = self.varint(at, end)
            return _varint(field.kind, value), at
        behind = self._fixed(field.size, at, end)
        return self.data[at:behind], behind


def _entries(values: _Values, number: int) -> list[bytes]:
    entries = values.setdefault(number, [])
    assert isinstance(entries, list)
    return entries


def _are_shortest(content: bytes) -> bool:
    """Return True if ``content`` consists of varints in the form that a serialiser writes."""
    values = np.frombuffer(content, np.uint8)
    ends = np.flatnonzero(values < 0x80)
    if not len(ends) or ends[-1] != len(values) - 1:
        return False
    lengths, last = np.diff(ends, prepend=-1), values[ends]
    is_short = (lengths < _MAX_VARINT) & ((lengths == 1) | (last != 0))
    return bool((is_short | ((lengths == _MAX_VARINT) & (last == 1))).all())


def _varint(kind: ProtoKind, value: int) -> bytes:
    """Return the varint that a serialiser writes for the parsed ``value``."""
    if kind is _BOOL:
        return _SHORT[value != 0]
    if value < 0x80:
        return _SHORT[value]
    if kind in _SIGNED32:
        low = value & _MASK32
        value = low | (_MASK64 ^ _MASK32) if low >> 31 else low
    elif kind in _UNSIGNED32:
        value &= _MASK32
    return encode_varint(value)


def _delimited(content: bytes) -> bytes:
    length = len(content)
    return (_SHORT[length] if length < 0x80 else encode_varint(length)) + content


def _write(plan: _MessagePlan, values: _Values) -> bytes:
    """Return the message as a protobuf serialiser writes it: ascending fields, packed lists, no defaults."""
    parts: list[bytes] = []
    for number in sorted(values):
        value = values[number]
        if isinstance(value, bytes):
            parts.append(value)
            continue
        field = plan.by_number[number]
        if isinstance(value, dict):
            assert field.plan is not None
            parts.append(field.head + _delimited(_write(field.plan, value)))
        elif field.form != _PACKED:
            parts += value
        elif content := b"".join(value):
            parts.append(field.head + _delimited(content))
    return b"".join(parts)


def canonical_message(data: bytes, spec: MessageSpec, *, base: int = 0, path: str | None = None) -> Canonical:
    """Return ``data`` as protobuf would write it after parsing, without unknown fields.

    Raises :class:`FormatError` with the offset in the file (``base`` is the offset of ``data``) for an
    illegal message. It takes about a microsecond per field and is meant for single messages.
    """
    reader, plan = _CanonicalReader(data, base, path), _KNOWN.get(id(spec)) or _plan(spec)
    values: _Values = {}
    reader.message(plan, values, 0, len(data))
    return Canonical(_write(plan, values), reader.unknown, frozenset(reader.unknown_tags))
