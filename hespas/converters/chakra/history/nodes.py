"""Nodes of older schemas as columns of today's: what had a field of its own becomes what it is today.

Types and kinds of collectives get today's numbers, ``parent`` becomes ``data_deps``, texts of inputs and
outputs become ``IOInfo``, and fields of 0.0.1 become the attributes that readers of today want. Positions in
messages are those of the file that is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.contract import ATTRIBUTES, INTEGER_FIELDS
from hespas.converters.chakra.wire import (
    AttributeColumns,
    Bools,
    ByteRows,
    Bytes,
    EtColumns,
    IoColumns,
    Longs,
    Window,
    Words,
    copy_spans,
    is_text,
    not_text,
    offsets_of,
    packed_varints,
)
from hespas.converters.chakra.wire.canonical import canonical_message
from hespas.converters.chakra.wire.decode import FrameBatch, Metadata
from hespas.converters.chakra.wire.messages import NOT_TEXT, KeyTable
from hespas.converters.chakra.wire.walk import Fields, tag_of, walk
from hespas.files.wire import encode_varint
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import FormatError
from hespas.schemas.chakra import CURRENT
from hespas.schemas.chakra.tables import (
    UPGRADES_001,
    AttributeField,
    FieldSpec,
    MessageSpec,
    ProtoKind,
    SchemaVersion,
    WireType,
)

__all__ = ["HistoricDecoder"]

# Attributes of 0.0.2 and 0.0.3: a declared type and a value in the field of that type.
#
# They keep their names. Values get today's field of the same type and, where readers of today want another
# integer type, that one; collectives get today's numbers, and the run time goes to where it stands today.

_KEY_TAG, _DECLARED_TAG, _DOC_TAG = 0x0A, 0x10, 0x1A
_LARGEST_TYPE = 15
_KEPT_LISTS, _KEPT_BYTES = 4096, 1024
_MALFORMED = 255
"""Value field of a packed list that is none."""

_RUN_TIME_KEY = "runtime"
_TRUTHS = "involved_dim"
"""A list of truth values that older writers had to write as integers."""

_INTEGER_BOUNDS: dict[int, tuple[int, int]] = {
    AttributeField.INT32: (-(1 << 31), (1 << 31) - 1),
    AttributeField.INT64: (-(1 << 63), (1 << 63) - 1),
    AttributeField.UINT64: (0, (1 << 63) - 1),
    AttributeField.BOOL: (0, 1),
}
"""What fits integer types, as far as signed 64 bits go."""


@dataclass(frozen=True, slots=True, eq=False)
class _OldAttributes:
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
class _AttributeDecoder:
    """Decodes attributes by the tables of one version; names are interned into ``keys``."""

    version: SchemaVersion
    keys: KeyTable
    _lists: dict[bytes, tuple[int, bytes]] = field(default_factory=dict[bytes, tuple[int, bytes]])

    def decode(
        self, window: Window, offsets: Longs, start: Longs, length: Longs, *, of_nodes: bool = True
    ) -> _OldAttributes:
        """The attributes at the given spans, of the owners that ``offsets`` says; ``bad`` is per attribute.

        Only those ``of_nodes`` have names with a meaning.
        """
        inner = walk(window, start, start + length)
        declared = inner.scalar(_DECLARED_TAG)
        held = np.flatnonzero(inner.tag >> 3 > 3)
        bad = inner.bad | ~inner.has(_KEY_TAG) | ~inner.has(_DECLARED_TAG)
        bad |= declared >= len(self.version.declared)
        bad[inner.owner[~np.isin(inner.tag, (_KEY_TAG, _DECLARED_TAG, _DOC_TAG)) & (inner.tag >> 3 <= 3)]] = (
            True
        )
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
            truths[place] = spec.kind is ProtoKind.BOOL
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
        for kind, (low, high) in _INTEGER_BOUNDS.items():
            rows = fits & (wanted == kind) & (value >= low) & (value <= high)
            values.field[rows] = kind

    def _finished(self, values: _Values, offsets: Longs, bad: Bools, *, of_nodes: bool) -> _OldAttributes:
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
        return _OldAttributes(columns, run_time, bad)

    def _run_times(self, values: _Values, owner: Longs, owners: int) -> Longs:
        """Rows that state the run time, where that is an integer, stated once and without a comment."""
        integer = (values.field == AttributeField.INT64) | (values.field == AttributeField.UINT64)
        named = values.key == self.keys.find(_RUN_TIME_KEY)
        rows = np.flatnonzero(named & integer & (values.bits.view(np.int64) >= 0))
        once = np.bincount(owner[rows], minlength=owners)[owner[rows]] == 1
        found: Longs = rows[once & ~np.isin(rows, values.doc_row)]
        return found


def _encoded_list(
    fields: Fields, places: range, kind: ProtoKind, target: int, *, truths: bool
) -> tuple[int, bytes]:
    """Today's type and message of one list."""
    entries = [
        (int(fields.tag[place]) & 7, int(fields.value[place]), int(fields.at[place]))
        for place in places
        if int(fields.tag[place]) >> 3 > 3
    ]
    if kind is ProtoKind.BYTES:
        texts = [fields.window.u8[at : at + size].tobytes() for _, size, at in entries]
        message = b"".join(b"\x0a" + encode_varint(len(text)) + text for text in texts)
        return (target if all(map(is_text, texts)) else AttributeField.BYTES_LIST), message
    size_of = 4 if kind is ProtoKind.FLOAT else 0
    content = b"".join(
        fields.window.u8[at : at + (value if wire == WireType.BYTES else size_of)].tobytes()
        if size_of or wire == WireType.BYTES
        else encode_varint(value)
        for wire, value, at in entries
    )
    if any(wire == WireType.BYTES for wire, _, _ in entries) and not _is_packed(content, kind):
        return _MALFORMED, b""
    truths = truths and target == AttributeField.INT64_LIST and max(content, default=0) <= 1
    return (AttributeField.BOOL_LIST if truths else target), _list_message(content)


def _is_packed(content: bytes, kind: ProtoKind) -> bool:
    """Whether bytes are entries of a packed list."""
    if kind is ProtoKind.FLOAT:
        return len(content) % 4 == 0
    if kind is ProtoKind.BOOL:
        return max(content, default=0) <= 1
    window = Window.holding(np.frombuffer(content, np.uint8))
    return packed_varints(window, np.zeros(1, np.int64), np.full(1, len(content)))[2] is None


def _list_message(content: bytes) -> bytes:
    """A list of today with packed entries; an empty one has none."""
    return b"\x0a" + encode_varint(len(content)) + content if content else b""


_ID, _NAME, _TYPE, _PARENT = 1, 2, 3, 4
_ATTRIBUTE = 11
_DAMAGED = "the file is damaged, or its frames come from several versions; write it again with one"


@dataclass(slots=True)
class HistoricDecoder:
    """Decodes the frames of one file of an older schema, as :class:`.decode.Decoder` does those of today.

    ``run_times`` counts durations taken from fields that name no unit.
    """

    version: SchemaVersion
    label: str
    path: str | None = None
    on_error: Diagnostics | None = None
    unknown_fields: int = 0
    run_times: int = 0
    keys: KeyTable = field(default_factory=KeyTable)
    _attributes: _AttributeDecoder = field(init=False)

    def __post_init__(self) -> None:
        """Prepare the tables of the version."""
        self._attributes = _AttributeDecoder(self.version, self.keys)

    def nodes(self, batch: FrameBatch) -> EtColumns:
        """The nodes of a batch; keys and metadata are left empty. Raises :class:`FormatError` with the byte
        offset of what is malformed (``ET001``) or not of this schema (``ET003``).
        """
        columns, bad, run_times = self._decode(batch)
        if bad.any():
            kept = self._report(batch, bad, columns.id)
            columns, _, run_times = self._decode(kept)
        self.run_times += run_times
        return columns

    def metadata(self, message: bytes, base: int = 0) -> Metadata:
        """Decode the metadata frame, whose attributes are all it has; ``base`` is where it starts."""
        window = Window.holding(np.frombuffer(message, np.uint8))
        fields = walk(window, np.zeros(1, np.int64), np.full(1, len(message)))
        own = _AttributeDecoder(self.version, KeyTable())
        rows = fields.rows(tag_of(1, WireType.BYTES))
        start, length = fields.at[rows], fields.value[rows].view(np.int64)
        found = own.decode(window, np.array([0, len(rows)]), start, length, of_nodes=False)
        if (
            self.version.metadata is None
            or fields.bad.any()
            or found.bad.any()
            or len(rows) < len(fields.tag)
        ):
            raise self._fault(message, self.version.metadata, base, f"byte {base}", "the metadata frame")
        return Metadata(CURRENT, found.columns.with_keys(tuple(own.keys.names)))

    def _decode(self, batch: FrameBatch) -> tuple[EtColumns, Bools, int]:
        """All columns, which nodes are not of this schema, and how many have a run time."""
        fields = walk(batch.window, batch.start, batch.end)
        bad = fields.bad | self._strangers(fields)
        name = _text(fields, _NAME, bad)
        parents, malformed = fields.integers(_PARENT)
        if malformed is not None:
            bad |= malformed
        attrs, inputs, outputs = self._rest(fields, bad)
        kind = fields.scalar(tag_of(_TYPE, WireType.VARINT))
        today = np.array(self.version.node_types, np.int32)
        columns = replace(
            EtColumns.empty(attrs.columns),
            id=fields.scalar(tag_of(_ID, WireType.VARINT)),
            name=name,
            type=today[np.minimum(kind, np.uint64(len(today) - 1)).view(np.int64)],
            data_offsets=parents.offsets,
            data_deps=parents.values,
            duration_micros=attrs.run_time,
            inputs=inputs,
            outputs=outputs,
            frame_byte=batch.frame_byte,
        )
        return columns, bad, int(np.count_nonzero(attrs.run_time))

    def _strangers(self, fields: Fields) -> Bools:
        """Nodes with fields or values that this schema does not have, or without those that it requires."""
        bad = np.zeros(fields.messages, np.bool_)
        allowed: list[int] = []
        for spec in self.version.node.fields.values():
            tag = tag_of(spec.number, spec.kind.wire)
            allowed.append(tag)
            if spec.repeated and spec.kind.wire != WireType.BYTES:
                allowed.append(tag_of(spec.number, WireType.BYTES))
            if spec.required:
                bad |= ~fields.has(tag)
            if spec.largest is not None and spec.kind.wire == WireType.VARINT:
                rows = fields.rows(tag)
                bad[fields.owner[rows[fields.value[rows] > spec.largest]]] = True
        table = np.zeros(256, np.bool_)
        table[allowed] = True
        known = table.take(np.minimum(fields.tag, 255)) & (fields.tag < 256)
        bad[fields.owner[~known]] = True
        return bad

    def _rest(self, fields: Fields, bad: Bools) -> tuple[_OldAttributes, IoColumns, IoColumns]:
        """Attributes, inputs and outputs; marks nodes in which they are not right."""
        if not self.version.declared:
            attrs = _decode_fields(fields, self.version, self.keys)
            bad |= attrs.bad
            return attrs, IoColumns.empty(), IoColumns.empty()
        rows = fields.rows(tag_of(_ATTRIBUTE, WireType.BYTES))
        owner = fields.owner[rows]
        offsets = np.searchsorted(owner, np.arange(fields.messages + 1))
        length = fields.value[rows].view(np.int64)
        attrs = self._attributes.decode(fields.window, offsets, fields.at[rows], length)
        bad[owner[attrs.bad]] = True
        return attrs, _io(fields, 5, bad), _io(fields, 8, bad)

    def _report(self, batch: FrameBatch, bad: Bools, ids: Words) -> FrameBatch:
        """Raise the first fault or, where faults are recorded, all; returns the batch without these nodes."""
        for index in np.flatnonzero(bad).tolist():
            message, base = batch.message(index), batch.base + int(batch.start[index])
            place = f"node {int(ids[index])} at byte {int(batch.frame_byte[index])}"
            fault = self._fault(message, self.version.node, base, place, "this node")
            if self.on_error is None:
                raise fault
            told = f"{fault.text}; the node is left out"
            self.on_error.error(fault.code, fault.position or "", told, path=self.path or "")
        kept = ~bad
        return FrameBatch(
            batch.window, batch.start[kept], batch.end[kept], batch.frame_byte[kept], batch.base
        )

    def _fault(
        self, message: bytes, spec: MessageSpec | None, base: int, place: str, what: str
    ) -> FormatError:
        """Why a message is not taken: malformed, or not of this schema."""
        if spec is not None:
            try:
                canonical_message(message, spec, base=base, path=self.path)
            except FormatError as error:
                return error
        return FormatError(
            f"{what} is not of schema {self.label}, which the rest of the file has",
            code="ET003",
            path=self.path,
            position=place,
            hint=_DAMAGED,
        )


def _text(fields: Fields, number: int, bad: Bools) -> ByteRows:
    rows = ByteRows(*copy_spans(fields.window, *fields.span(number)))
    bad |= not_text(rows)
    return rows


def _io(fields: Fields, first: int, bad: Bools) -> IoColumns:
    """Values, shapes and types, three texts in consecutive fields, of the nodes that have any."""
    texts = [_text(fields, number, bad) for number in range(first, first + 3)]
    some = texts[0].lengths + texts[1].lengths + texts[2].lengths
    node: Longs = np.flatnonzero(some)
    if not len(node):
        return IoColumns.empty()
    if len(node) < len(some):
        texts = [text.take(node) for text in texts]
    return IoColumns(node, *texts)


# Fields of 0.0.1 nodes as attributes: that schema had none, and a field for everything.

_RUN_TIME = tag_of(7, WireType.VARINT)


class _Part(NamedTuple):
    """One attribute of some nodes."""

    node: Longs
    field: AttributeField
    bits: Words


def _decode_fields(fields: Fields, version: SchemaVersion, keys: KeyTable) -> _OldAttributes:
    """The attributes that the fields of nodes are today, and the run time; ``bad`` is per node."""
    bad = np.zeros(fields.messages, np.bool_)
    by_name = {spec.name: spec for spec in version.node.fields.values()}
    rows: list[int] = []
    parts: list[_Part] = []
    payload = ByteRows.blank(0)
    for name, target in UPGRADES_001.items():
        spec = by_name[name]
        if spec.repeated:
            part, payload = _truths(fields, spec, bad)
            found = [part]
        else:
            found = _integers(fields, spec, target, version)
        parts += found
        rows += [keys.add(name)] * len(found)
    columns = _by_node(parts, rows, payload, fields.messages)
    return _OldAttributes(columns, fields.scalar(_RUN_TIME), bad)


def _integers(fields: Fields, spec: FieldSpec, target: AttributeField, version: SchemaVersion) -> list[_Part]:
    """A field of the nodes that state it. The default of an enumeration says nothing; what is too large for
    the type of today has the unsigned one.
    """
    tag = tag_of(spec.number, WireType.VARINT)
    has, value = fields.has(tag), fields.scalar(tag)
    if spec.kind is ProtoKind.ENUM:
        has &= value != 0
    if spec.name == "comm_type":
        today = np.array([max(number, 0) for number in version.comm_types], np.uint64)
        value = today[np.minimum(value, np.uint64(len(today) - 1)).view(np.int64)]
    high = np.uint64(_INTEGER_BOUNDS.get(target, (0, (1 << 64) - 1))[1])
    if target is AttributeField.UINT64:
        high = np.uint64((1 << 64) - 1)
    larger = AttributeField.UINT32 if target is AttributeField.INT32 else AttributeField.UINT64
    fits = value <= high
    parts = [(has & fits, target), (has & ~fits, larger)]
    return [_Part(np.flatnonzero(where), kind, value[where]) for where, kind in parts if where.any()]


def _truths(fields: Fields, spec: FieldSpec, bad: Bools) -> tuple[_Part, ByteRows]:
    """A list of truth values, packed or not, of the nodes that have any."""
    found, malformed = fields.integers(spec.number)
    if malformed is not None:
        bad |= malformed
    counts = np.diff(found.offsets)
    node = np.flatnonzero(counts)
    wrong = np.flatnonzero(found.values > 1)
    bad[np.searchsorted(found.offsets, wrong, side="right") - 1] = True
    flat = found.values.astype(np.uint8)
    known: dict[bytes, bytes] = {}
    messages: list[bytes] = []
    starts, ends = found.offsets[node].tolist(), found.offsets[node + 1].tolist()
    for start, end in zip(starts, ends, strict=True):
        content = flat[start:end].tobytes()
        messages.append(known.setdefault(content, _list_message(content)))
    part = _Part(node, AttributeField.BOOL_LIST, np.arange(len(node), dtype=np.uint64))
    return part, ByteRows.from_rows(messages)


def _by_node(parts: list[_Part], rows: list[int], payload: ByteRows, nodes: int) -> AttributeColumns:
    """The parts in the order of nodes; within a node they keep theirs."""
    if not parts:
        return AttributeColumns.empty(nodes)
    node = np.concatenate([part.node for part in parts])
    sizes = [len(part.node) for part in parts]
    order = np.argsort(node, kind="stable")
    return AttributeColumns(
        (),
        offsets_of(np.bincount(node, minlength=nodes)),
        np.repeat(np.array(rows, np.int32), sizes)[order],
        np.repeat(np.array([part.field for part in parts], np.uint8), sizes)[order],
        np.concatenate([part.bits for part in parts])[order],
        payload,
        np.empty(0, np.int64),
        ByteRows.blank(0),
    )
