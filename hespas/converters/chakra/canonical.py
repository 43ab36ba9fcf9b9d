"""One message at a time: the whole wire format, for what the column codec does not take.

Reads any legal encoding of a message (fields in any order, repeated singular fields, unpacked lists, unknown
fields, groups to be skipped) and writes the one a protobuf serialiser would have written, which the column
codec then reads. Table-driven; depth is that of the schema, never that of the input.
"""

from __future__ import annotations

from dataclasses import dataclass

from hespas.graph.errors import FormatError
from hespas.schemas.chakra.messages import FieldSpec, MessageSpec
from hespas.schemas.chakra.tables import Kind, WireType, encode_varint, tag

__all__ = ["Canonical", "canonical_message"]

_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1
_GROUP_START, _GROUP_END = 3, 4
_MAX_GROUP_DEPTH = 100
"""Protobuf's own recursion limit."""


@dataclass(frozen=True, slots=True)
class Canonical:
    """A re-encoded message and the number of unknown fields that were left out."""

    data: bytes
    unknown_fields: int


class _Message:
    """Field values of one message: raw integers, byte strings or nested messages."""

    __slots__ = ("spec", "values")

    def __init__(self, spec: MessageSpec) -> None:
        self.spec = spec
        self.values: dict[int, list[int | bytes | _Message]] = {}


class _Reader:
    """Reads one frame; ``base`` is its offset in the file, for messages."""

    __slots__ = ("base", "data", "path", "unknown")

    def __init__(self, data: bytes, base: int, path: str | None) -> None:
        self.data = data
        self.base = base
        self.path = path
        self.unknown = 0

    def fail(self, message: str, at: int) -> FormatError:
        return FormatError(
            f"ET001: {message}",
            path=self.path,
            position=f"byte {self.base + at}",
            hint="the file is damaged or is no Chakra trace; write or download it again",
        )

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """A varint (64 bits are kept) and the position behind it."""
        value = 0
        for shift in range(0, 70, 7):
            if at >= end:
                raise self.fail("a varint is cut off by the end of its message", at)
            byte = self.data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & _MASK64, at
        raise self.fail("a varint is longer than ten bytes", at)

    def skip(self, number: int, wire: int, at: int, end: int) -> int:
        """The position behind an unknown field's value."""
        open_groups: list[int] = []
        while True:
            if wire == _GROUP_START:
                open_groups.append(number)
            elif wire == _GROUP_END:
                if not open_groups or open_groups.pop() != number:
                    raise self.fail("a group ends that did not start", at)
            else:
                at = self._skip_value(wire, at, end)
            if not open_groups:
                return at
            if len(open_groups) > _MAX_GROUP_DEPTH:
                raise self.fail("groups are nested too deeply", at)
            number, wire, at = self.tag(at, end)

    def _skip_value(self, wire: int, at: int, end: int) -> int:
        if wire == WireType.VARINT:
            return self.varint(at, end)[1]
        if wire == WireType.BYTES:
            length, at = self.varint(at, end)
        elif wire in (WireType.FIXED32, WireType.FIXED64):
            length = 4 if wire == WireType.FIXED32 else 8
        else:
            raise self.fail(f"wire type {wire} does not exist", at)
        if length > end - at:
            raise self.fail(f"a field of {length} bytes does not fit into its message", at)
        return at + length

    def tag(self, at: int, end: int) -> tuple[int, int, int]:
        """Field number, wire type and the position behind a tag."""
        value, behind = self.varint(at, end)
        if value >> 3 == 0 or value > _MASK32:
            raise self.fail("a field number is out of range", at)
        return value >> 3, value & 7, behind

    def message(self, into: _Message, at: int, end: int) -> None:
        """Merge the fields of ``data[at:end]`` into a message, as protobuf's parser does."""
        while at < end:
            number, wire, at = self.tag(at, end)
            spec = into.spec.fields.get(number)
            packed = spec is not None and spec.repeated and spec.kind.wire != WireType.BYTES
            if spec is not None and wire == spec.kind.wire:
                at = self._value(into, spec, at, end)
            elif spec is not None and packed and wire == WireType.BYTES:
                at = self._packed(into, spec, at, end)
            else:
                self.unknown += 1
                at = self.skip(number, wire, at, end)

    def _packed(self, into: _Message, spec: FieldSpec, at: int, end: int) -> int:
        behind = self._skip_value(WireType.BYTES, at, end)
        _, at = self.varint(at, end)
        entries = into.values.setdefault(spec.number, [])
        while at < behind:
            value, at = self._scalar(spec.kind, at, behind)
            entries.append(value)
        return behind

    def _value(self, into: _Message, spec: FieldSpec, at: int, end: int) -> int:
        if spec.oneof:
            for number in [n for n in into.values if into.spec.fields[n].oneof and n != spec.number]:
                del into.values[number]
        entries = into.values.setdefault(spec.number, [])
        if spec.message is not None:
            behind = self._skip_value(WireType.BYTES, at, end)
            _, at = self.varint(at, end)
            last = entries[-1] if entries and not spec.repeated else None
            target = last if isinstance(last, _Message) else _Message(spec.message)
            if target is not last:
                entries.append(target)
            self.message(target, at, behind)
            return behind
        value, at = self._scalar(spec.kind, at, end)
        if not spec.repeated:
            entries.clear()
        entries.append(value)
        return at

    def _scalar(self, kind: Kind, at: int, end: int) -> tuple[int | bytes, int]:
        if kind.wire == WireType.VARINT:
            value, at = self.varint(at, end)
            return _normal(kind, value), at
        behind = self._skip_value(kind.wire, at, end)
        if kind.wire == WireType.BYTES:
            _, at = self.varint(at, end)
        content = self.data[at:behind]
        if kind is Kind.STRING:
            try:
                content.decode()
            except UnicodeDecodeError as error:
                raise self.fail("a text is not UTF-8", at + error.start) from None
        return content, behind


def _normal(kind: Kind, value: int) -> int:
    """The varint that a serialiser writes for what a parser made of ``value``."""
    if kind is Kind.BOOL:
        return int(value != 0)
    if kind in (Kind.INT32, Kind.ENUM):
        low = value & _MASK32
        return low | (_MASK64 ^ _MASK32) if low >> 31 else low
    if kind in (Kind.UINT32, Kind.SINT32):
        return value & _MASK32
    return value


def _delimited(content: bytes) -> bytes:
    return encode_varint(len(content)) + content


def _write_value(kind: Kind, value: int | bytes | _Message) -> bytes:
    if isinstance(value, _Message):
        return _delimited(_write(value))
    if isinstance(value, int):
        return encode_varint(value)
    return _delimited(value) if kind.wire == WireType.BYTES else value


def _is_default(spec: FieldSpec, value: int | bytes | _Message) -> bool:
    """Whether proto3 leaves a singular value out; members of a oneof and messages are always written."""
    return not (spec.oneof or isinstance(value, _Message) or value)


def _write(message: _Message) -> bytes:
    """The message as a protobuf serialiser writes it: ascending fields, packed lists, defaults left out."""
    parts: list[bytes] = []
    for number in sorted(message.values):
        spec, entries = message.spec.fields[number], message.values[number]
        if not spec.repeated:
            parts += [
                tag(number, spec.kind.wire) + _write_value(spec.kind, value)
                for value in entries
                if not _is_default(spec, value)
            ]
        elif spec.kind.wire == WireType.BYTES:
            head = tag(number, WireType.BYTES)
            parts += [head + _write_value(spec.kind, value) for value in entries]
        elif entries:
            content = b"".join(_write_value(spec.kind, value) for value in entries)
            parts.append(tag(number, WireType.BYTES) + _delimited(content))
    return b"".join(parts)


def canonical_message(data: bytes, spec: MessageSpec, *, base: int = 0, path: str | None = None) -> Canonical:
    """``data`` as protobuf would write it again after parsing it, without its unknown fields.

    Raises :class:`FormatError` with the offset in the file (``base`` is the offset of ``data``) when it is no
    legal message. Costs microseconds per field: meant for single messages.
    """
    reader = _Reader(data, base, path)
    message = _Message(spec)
    reader.message(message, 0, len(data))
    return Canonical(_write(message), reader.unknown)
