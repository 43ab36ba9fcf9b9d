"""Attributes of 0.0.2 and 0.0.3: a declared type and a value in the field of that type.

They keep their names. Values get today's field of the same type and, where readers of today want another
integer type, that one; collectives get today's numbers, and the run time goes to where it stands today.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.attributes import not_text
from hespas.converters.chakra.columns import AttributeColumns, ByteRows
from hespas.converters.chakra.contract import ATTRIBUTES, INTEGER_FIELDS
from hespas.converters.chakra.fields import Fields, tag_of, walk
from hespas.converters.chakra.keys import NOT_TEXT, KeyTable
from hespas.converters.chakra.spans import Bools, Bytes, Longs, Window, Words, copy_spans, offsets_of
from hespas.converters.chakra.varints import packed_varints
from hespas.schemas.chakra.history import SchemaVersion
from hespas.schemas.chakra.tables import AttributeField, Kind, WireType, encode_varint

__all__ = ["INTEGER_BOUNDS", "AttributeDecoder", "OldAttributes", "list_message"]

_NAME, _DECLARED, _DOC = 0x0A, 0x10, 0x1A
_LARGEST_TYPE = 15
_KEPT_LISTS, _KEPT_BYTES = 4096, 1024
_MALFORMED = 255
"""Value field of a packed list that is none."""

_RUN_TIME = "runtime"
_TRUTHS = "involved_dim"
"""A list of truth values that older writers had to write as integers."""

INTEGER_BOUNDS: dict[int, tuple[int, int]] = {
    AttributeField.INT32: (-(1 << 31), (1 << 31) - 1),
    AttributeField.INT64: (-(1 << 63), (1 << 63) - 1),
    AttributeField.UINT64: (0, (1 << 63) - 1),
    AttributeField.BOOL: (0, 1),
}
"""What fits integer types, as far as signed 64 bits go."""


@dataclass(frozen=True, slots=True, eq=False)
class OldAttributes:
    """Attributes of a batch of nodes; ``bad`` marks what is not of the schema, ``run_time`` is per node."""

    columns: AttributeColumns
    run_time: Words
    bad: Bools


@dataclass(frozen=True, slots=True, eq=False)
class _Values:
    """Attribute rows as they stand in the file, with today's value fields."""

    key: NDArray[np.int32]
    field: Bytes
    bits: Words
    payload: ByteRows
    doc_row: Longs
    doc: ByteRows


@dataclass(frozen=True, slots=True, eq=False)
class _Raw:
    """Attribute messages at ``start``, ``length``: their fields, which of those (``held``) are values that
    stand where they should, and the number of each message's declared type.
    """

    inner: Fields
    held: Longs
    number: Longs
    start: Longs
    length: Longs

    def message(self, row: int) -> bytes:
        """The bytes of one."""
        start = int(self.start[row])
        return self.inner.window.u8[start : start + int(self.length[row])].tobytes()


@dataclass(slots=True)
class AttributeDecoder:
    """Decodes attributes by the tables of one version; names are interned into ``keys``."""

    version: SchemaVersion
    keys: KeyTable
    _lists: dict[bytes, tuple[int, bytes]] = field(default_factory=dict[bytes, tuple[int, bytes]])

    def decode(
        self, window: Window, offsets: Longs, start: Longs, length: Longs, *, of_nodes: bool = True
    ) -> OldAttributes:
        """The attributes at the given spans, of the owners that ``offsets`` says; ``bad`` is per attribute.

        Only those ``of_nodes`` have names with a meaning.
        """
        inner = walk(window, start, start + length)
        declared = inner.scalar(_DECLARED)
        held = np.flatnonzero(inner.tag >> 3 > 3)
        bad = inner.bad | ~inner.has(_NAME) | ~inner.has(_DECLARED)
        bad |= declared >= len(self.version.declared)
        bad[inner.owner[~np.isin(inner.tag, (_NAME, _DECLARED, _DOC)) & (inner.tag >> 3 <= 3)]] = True
        number = np.minimum(declared, np.uint64(_LARGEST_TYPE)).view(np.int64)
        bad[inner.owner[held[~self._allowed(inner, held, number)]]] = True
        key = self.keys.intern(window, *inner.span(1))
        bad |= key == NOT_TEXT
        doc_start, doc_length = inner.span(3)
        doc_row = np.flatnonzero(doc_length)
        doc = ByteRows(*copy_spans(window, doc_start[doc_row], doc_length[doc_row]))
        bad[doc_row[not_text(doc)]] = True
        raw = _Raw(inner, held[~bad[inner.owner[held]]], number, start, length)
        values = self._values(raw, np.where(bad, np.int32(0), key))
        values = replace(values, doc_row=doc_row, doc=doc)
        bad |= values.field == _MALFORMED
        if of_nodes:
            bad |= self._collectives(values)
            self._canonical(values)
        return self._finished(values, offsets, bad, of_nodes=of_nodes)

    def _allowed(self, inner: Fields, held: Longs, number: Longs) -> Bools:
        """Which values stand where their attribute's declared type says."""
        table = np.zeros((_LARGEST_TYPE + 1, 128), np.bool_)
        truths = np.zeros(_LARGEST_TYPE + 1, np.bool_)
        for place, entry in enumerate(self.version.declared):
            spec = entry.field
            table[place, tag_of(spec.number, spec.kind.wire)] = True
            table[place, tag_of(spec.number, WireType.BYTES)] |= spec.repeated
            truths[place] = spec.kind is Kind.BOOL
        tag = inner.tag[held]
        of_type = number[inner.owner[held]]
        allowed: Bools = table[of_type, np.minimum(tag, 127)] & (tag < 128)
        varint = tag & 7 == WireType.VARINT
        allowed &= ~(truths[of_type] & varint & (inner.value[held] > 1))
        return allowed

    def _values(self, raw: _Raw, key: NDArray[np.int32]) -> _Values:
        becomes = np.zeros(_LARGEST_TYPE + 1, np.uint8)
        lists = np.zeros(_LARGEST_TYPE + 1, np.bool_)
        for place, entry in enumerate(self.version.declared):
            becomes[place], lists[place] = entry.becomes, entry.field.repeated
        inner, held = raw.inner, raw.held
        owner, is_list = inner.owner[held], lists[raw.number]
        has_value = np.zeros(inner.messages, np.bool_)
        has_value[owner] = True
        target = np.where(is_list | has_value, becomes[raw.number], 0).astype(np.uint8)
        bits, start = np.zeros(inner.messages, np.uint64), np.zeros(inner.messages, np.int64)
        bits[owner], start[owner] = inner.value[held], inner.at[held]
        rows = np.flatnonzero(target == AttributeField.STRING)
        payload = ByteRows(*copy_spans(inner.window, start[rows], bits[rows].view(np.int64)))
        target[rows[not_text(payload)]] = AttributeField.BYTES
        list_rows = np.flatnonzero(is_list)
        if len(list_rows):
            payload = payload.joined(self._encoded_lists(raw, list_rows, key, target))
            rows = np.concatenate([rows, list_rows])
            order = np.argsort(rows, kind="stable")
            payload, rows = payload.take(order), rows[order]
        bits[rows] = np.arange(len(rows), dtype=np.uint64)
        return _Values(key, target, bits, payload, rows[:0], ByteRows.blank(0))

    def _encoded_lists(self, raw: _Raw, rows: Longs, key: NDArray[np.int32], target: Bytes) -> ByteRows:
        """Lists as today's list messages; sets the type of those that today have another. Equal ones are
        encoded once.
        """
        named = (key[rows] == self.keys.find(_TRUTHS)).tolist()
        bounds = np.searchsorted(raw.inner.owner, np.stack([rows, rows + 1])).tolist()
        types: list[int] = target[rows].tolist()
        found: list[bytes] = []
        for place, (row, low, high) in enumerate(zip(rows.tolist(), *bounds, strict=True)):
            content = raw.message(row)
            known = self._lists.get(content)
            if known is None:
                kind = self.version.declared[int(raw.number[row])].field.kind
                known = _encoded_list(raw.inner, range(low, high), kind, types[place], truths=named[place])
                if len(self._lists) < _KEPT_LISTS and len(content) < _KEPT_BYTES:
                    self._lists[content] = known
            types[place] = known[0]
            found.append(known[1])
        target[rows] = types
        return ByteRows.from_rows(found)

    def _collectives(self, values: _Values) -> Bools:
        """Give kinds of collectives today's numbers; returns which rows have one that the schema lacks."""
        rows = np.flatnonzero(
            (values.key == self.keys.find("comm_type"))
            & np.isin(values.field, (AttributeField.INT64, AttributeField.UINT64))
        )
        bad = np.zeros(len(values.key), np.bool_)
        if len(rows):
            today = np.array(self.version.comm_types, np.uint64)
            stated = values.bits[rows]
            bad[rows[stated >= len(today)]] = True
            values.bits[rows] = today[np.minimum(stated, np.uint64(len(today) - 1)).view(np.int64)]
        return bad

    def _canonical(self, values: _Values) -> None:
        """Give integers the type that readers of today want of their name, where it holds them."""
        wanted = np.array(
            [
                ATTRIBUTES.get(name, 0) if ATTRIBUTES.get(name) in INTEGER_FIELDS else 0
                for name in self.keys.names
            ]
            or [0],
            np.uint8,
        )[values.key]
        integer = (values.field == AttributeField.INT64) | (values.field == AttributeField.UINT64)
        value = values.bits.view(np.int64)
        fits = integer & (wanted != 0) & ~((values.field == AttributeField.UINT64) & (value < 0))
        for kind, (low, high) in INTEGER_BOUNDS.items():
            rows = fits & (wanted == kind) & (value >= low) & (value <= high)
            values.field[rows] = kind

    def _finished(self, values: _Values, offsets: Longs, bad: Bools, *, of_nodes: bool) -> OldAttributes:
        """The rows as columns, without the attribute ``runtime``, which moves into a column of its own."""
        owners = len(offsets) - 1
        owner = np.repeat(np.arange(owners, dtype=np.int64), np.diff(offsets))
        run_time = np.zeros(owners, np.uint64)
        kept = np.ones(len(values.key), np.bool_)
        if of_nodes:
            rows = self._run_times(values, owner, owners)
            run_time[owner[rows]] = values.bits[rows]
            kept[rows] = False
        place = offsets_of(kept.astype(np.int64))
        columns = AttributeColumns(
            (),
            offsets_of(np.bincount(owner[kept], minlength=owners)),
            values.key[kept],
            values.field[kept],
            values.bits[kept],
            values.payload,
            place[values.doc_row],
            values.doc,
        )
        return OldAttributes(columns, run_time, bad)

    def _run_times(self, values: _Values, owner: Longs, owners: int) -> Longs:
        """Rows that state the run time, where that is an integer, stated once and without a comment."""
        integer = (values.field == AttributeField.INT64) | (values.field == AttributeField.UINT64)
        named = values.key == self.keys.find(_RUN_TIME)
        rows = np.flatnonzero(named & integer & (values.bits.view(np.int64) >= 0))
        once = np.bincount(owner[rows], minlength=owners)[owner[rows]] == 1
        found: Longs = rows[once & ~np.isin(rows, values.doc_row)]
        return found


def _encoded_list(
    fields: Fields, places: range, kind: Kind, target: int, *, truths: bool
) -> tuple[int, bytes]:
    """Today's type and message of one list."""
    entries = [
        (int(fields.tag[place]) & 7, int(fields.value[place]), int(fields.at[place]))
        for place in places
        if int(fields.tag[place]) >> 3 > 3
    ]
    if kind is Kind.BYTES:
        texts = [fields.window.u8[at : at + size].tobytes() for _, size, at in entries]
        message = b"".join(b"\x0a" + encode_varint(len(text)) + text for text in texts)
        return (target if all(map(_is_text, texts)) else AttributeField.BYTES_LIST), message
    size_of = 4 if kind is Kind.FLOAT else 0
    content = b"".join(
        fields.window.u8[at : at + (value if wire == WireType.BYTES else size_of)].tobytes()
        if size_of or wire == WireType.BYTES
        else encode_varint(value)
        for wire, value, at in entries
    )
    if any(wire == WireType.BYTES for wire, _, _ in entries) and not _is_packed(content, kind):
        return _MALFORMED, b""
    truths = truths and target == AttributeField.INT64_LIST and max(content, default=0) <= 1
    return (AttributeField.BOOL_LIST if truths else target), list_message(content)


def _is_packed(content: bytes, kind: Kind) -> bool:
    """Whether bytes are entries of a packed list."""
    if kind is Kind.FLOAT:
        return len(content) % 4 == 0
    if kind is Kind.BOOL:
        return max(content, default=0) <= 1
    window = Window.holding(np.frombuffer(content, np.uint8))
    return packed_varints(window, np.zeros(1, np.int64), np.full(1, len(content)))[2] is None


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def list_message(content: bytes) -> bytes:
    """A list of today with packed entries; an empty one has none."""
    return b"\x0a" + encode_varint(len(content)) + content if content else b""
