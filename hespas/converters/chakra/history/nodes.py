"""Decoding of nodes of older schemas into current columns: fields of old nodes become their current
equivalents.

Types and kinds of collectives get current numbers, ``parent`` becomes ``data_deps``, and texts of inputs and
outputs become ``IOInfo``. Nodes of 0.0.1 have a field for everything and no attributes: these fields become
the attributes that current readers expect. Attributes of 0.0.2 and 0.0.3 have a declared type and a value in
the field of that type. They keep their names; values get the current field of the same type or, if current
readers expect another integer type, that one. Positions in messages refer to the file that is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.checks import Faults
from hespas.converters.chakra.contract import ATTRIBUTES, INTEGER_BOUNDS
from hespas.converters.chakra.wire import (
    AttributeColumns,
    Bools,
    ByteRows,
    Bytes,
    ByteWindow,
    EtColumns,
    IoColumns,
    Longs,
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
from hespas.converters.chakra.wire.walk import WireFields, tag_of, walk
from hespas.files.wire import encode_varint
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

_KEY_TAG, _DECLARED_TAG, _DOC_TAG = 0x0A, 0x10, 0x1A
_LARGEST_TYPE = 15
_KEPT_LISTS, _KEPT_BYTES = 4096, 1024
_MALFORMED = 255
"""Value field of a malformed packed list."""

_RUN_TIME_KEY = "runtime"
_TRUTHS = "involved_dim"
"""Name of a list of bools that older writers had to write as integers."""


@dataclass(frozen=True, slots=True, eq=False)
class _OldAttributes:
    """Decoded attributes of a batch of nodes of an old schema. ``run_time`` is the value of the attribute
    ``runtime`` of each node, in a unit that the schema does not define. ``bad`` marks what the schema does
    not allow.
    """

    columns: AttributeColumns
    run_time: Words
    bad: Bools


@dataclass(frozen=True, slots=True, eq=False)
class _AttributeMessages:
    """Encoded attribute messages. ``start`` and ``length`` are their byte spans, and ``number`` their
    declared types. ``inner`` has the fields of all messages. ``held`` are the indices of the fields in
    ``inner`` that hold the value of an attribute.
    """

    inner: WireFields
    held: Longs
    number: Longs
    start: Longs
    length: Longs

    def message(self, row: int) -> bytes:
        """Return the bytes of one message."""
        start = int(self.start[row])
        return self.inner.window.u8[start : start + int(self.length[row])].tobytes()


@dataclass(slots=True)
class _AttributeDecoder:
    """Decoder of the attributes of one old schema version. Attribute names are numbered in the table
    ``keys``.
    """

    version: SchemaVersion
    keys: KeyTable
    _lists: dict[bytes, tuple[int, bytes]] = field(default_factory=dict[bytes, tuple[int, bytes]])

    def decode(
        self, window: ByteWindow, offsets: Longs, start: Longs, length: Longs, *, of_nodes: bool = True
    ) -> _OldAttributes:
        """Return the attributes at the byte spans ``start`` and ``length``. Owner ``i`` (a node or the
        metadata) has the attributes ``offsets[i]:offsets[i + 1]``. ``bad`` of the result has one entry per
        attribute.

        With ``of_nodes`` the owners are nodes, and the numbers of collective kinds and names such as
        ``runtime`` are converted to the current schema.
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
        table = np.zeros((_LARGEST_TYPE + 1, 128), np.bool_)
        truths = np.zeros(_LARGEST_TYPE + 1, np.bool_)
        for index, entry in enumerate(self.version.declared):
            spec = entry.field
            table[index, tag_of(spec.number, spec.kind.wire)] = True
            table[index, tag_of(spec.number, WireType.BYTES)] |= spec.repeated
            truths[index] = spec.kind is ProtoKind.BOOL
        tag = inner.tag[held]
        of_type = number[inner.owner[held]]
        allowed: Bools = table[of_type, np.minimum(tag, 127)] & (tag < 128)
        varint = tag & 7 == WireType.VARINT
        allowed &= ~(truths[of_type] & varint & (inner.value[held] > 1))
        bad[inner.owner[held[~allowed]]] = True
        key = self.keys.intern(window, *inner.span(1))
        bad |= key == NOT_TEXT
        doc_start, doc_length = inner.span(3)
        doc_row = np.flatnonzero(doc_length)
        doc = ByteRows(*copy_spans(window, doc_start[doc_row], doc_length[doc_row]))
        bad[doc_row[not_text(doc)]] = True
        raw = _AttributeMessages(inner, held[~bad[inner.owner[held]]], number, start, length)
        key = np.where(bad, np.int32(0), key)
        columns = AttributeColumns((), offsets, key, *self._values(raw, key), doc_row, doc)
        bad |= columns.field == _MALFORMED
        if not of_nodes:
            return _OldAttributes(columns, np.zeros(len(offsets) - 1, np.uint64), bad)
        integer = (columns.field == AttributeField.INT64) | (columns.field == AttributeField.UINT64)
        # Replace the numbers of collective kinds by those of the current schema.
        kind_rows = np.flatnonzero((columns.key == self.keys.find("comm_type")) & integer)
        if len(kind_rows):
            today = np.array(self.version.comm_types, np.uint64)
            old_kind = columns.bits[kind_rows]
            bad[kind_rows[old_kind >= len(today)]] = True
            columns.bits[kind_rows] = today[np.minimum(old_kind, np.uint64(len(today) - 1)).view(np.int64)]
        wanted = np.array([ATTRIBUTES.get(name, 0) for name in self.keys.names] or [0], np.uint8)[columns.key]
        value = columns.bits.view(np.int64)
        fits = integer & ~((columns.field == AttributeField.UINT64) & (value < 0))
        for kind, (low, high) in INTEGER_BOUNDS.items():
            columns.field[fits & (wanted == kind) & (value >= low) & (value <= high)] = kind
        return self._without_run_time(columns, bad)

    def _values(self, raw: _AttributeMessages, key: NDArray[np.int32]) -> tuple[Bytes, Words, ByteRows]:
        """Return the field numbers, the bits and the payload of all attributes in the current schema."""
        becomes = np.zeros(_LARGEST_TYPE + 1, np.uint8)
        lists = np.zeros(_LARGEST_TYPE + 1, np.bool_)
        for index, entry in enumerate(self.version.declared):
            becomes[index], lists[index] = entry.becomes, entry.field.repeated
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
        return target, bits, payload

    def _encoded_lists(
        self, raw: _AttributeMessages, rows: Longs, key: NDArray[np.int32], target: Bytes
    ) -> ByteRows:
        """Return list values as encoded list messages of the current schema. Set ``target``, the field number
        of each value, for lists that become another type. Equal lists are encoded once.
        """
        named = (key[rows] == self.keys.find(_TRUTHS)).tolist()
        bounds = np.searchsorted(raw.inner.owner, np.stack([rows, rows + 1])).tolist()
        types: list[int] = target[rows].tolist()
        encoded: list[bytes] = []
        for index, (row, low, high) in enumerate(zip(rows.tolist(), *bounds, strict=True)):
            content = raw.message(row)
            entry = self._lists.get(content)
            if entry is None:
                kind = self.version.declared[int(raw.number[row])].field.kind
                entry = _encoded_list(raw.inner, range(low, high), kind, types[index], truths=named[index])
                if len(self._lists) < _KEPT_LISTS and len(content) < _KEPT_BYTES:
                    self._lists[content] = entry
            types[index] = entry[0]
            encoded.append(entry[1])
        target[rows] = types
        return ByteRows.from_rows(encoded)

    def _without_run_time(self, columns: AttributeColumns, bad: Bools) -> _OldAttributes:
        """Return the attributes of nodes without those called ``runtime``, which become a column."""
        owner, owners = columns.owner, len(columns.offsets) - 1
        # Rows that state the run time once, as an integer and without a doc string.
        integer = (columns.field == AttributeField.INT64) | (columns.field == AttributeField.UINT64)
        is_time = columns.key == self.keys.find(_RUN_TIME_KEY)
        time_rows = np.flatnonzero(is_time & integer & (columns.bits.view(np.int64) >= 0))
        once = np.bincount(owner[time_rows], minlength=owners)[owner[time_rows]] == 1
        rows: Longs = time_rows[once & ~np.isin(time_rows, columns.doc_row)]
        run_time = np.zeros(owners, np.uint64)
        run_time[owner[rows]] = columns.bits[rows]
        remaining = np.ones(len(columns), np.bool_)
        remaining[rows] = False
        new_row = offsets_of(remaining.astype(np.int64))
        left = replace(
            columns,
            offsets=offsets_of(np.bincount(owner[remaining], minlength=owners)),
            key=columns.key[remaining],
            field=columns.field[remaining],
            bits=columns.bits[remaining],
            doc_row=new_row[columns.doc_row],
        )
        return _OldAttributes(left, run_time, bad)


def _encoded_list(
    fields: WireFields, places: range, kind: ProtoKind, target: int, *, truths: bool
) -> tuple[int, bytes]:
    """Convert one list of an old schema: return the field number and the encoded message that it has in the
    current schema.
    """
    entries = [
        (int(fields.tag[index]) & 7, int(fields.value[index]), int(fields.at[index]))
        for index in places
        if int(fields.tag[index]) >> 3 > 3
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
    """Return True if the bytes are the entries of a packed list of this type."""
    if kind is ProtoKind.FLOAT:
        return len(content) % 4 == 0
    if kind is ProtoKind.BOOL:
        return max(content, default=0) <= 1
    window = ByteWindow.holding(np.frombuffer(content, np.uint8))
    return packed_varints(window, np.zeros(1, np.int64), np.full(1, len(content)))[2] is None


def _list_message(content: bytes) -> bytes:
    """Return a current list message with packed entries; an empty list is an empty message."""
    return b"\x0a" + encode_varint(len(content)) + content if content else b""


_ID, _NAME, _TYPE, _PARENT = 1, 2, 3, 4
_ATTRIBUTE = 11
_DAMAGED = "write the trace again with one version of Chakra: the file is damaged or mixes versions"


@dataclass(slots=True)
class HistoricDecoder:
    """Decoder of the messages of one file in an older schema. For the current schema, see
    :class:`.decode.Decoder`.

    ``run_times`` counts durations from fields whose unit the schema does not define.
    """

    version: SchemaVersion
    label: str
    faults: Faults
    unknown_fields: int = 0
    run_times: int = 0
    keys: KeyTable = field(default_factory=KeyTable)
    _attributes: _AttributeDecoder = field(init=False)

    def __post_init__(self) -> None:
        """Prepare the decoding tables of the schema version."""
        self._attributes = _AttributeDecoder(self.version, self.keys)

    def nodes(self, batch: FrameBatch) -> EtColumns:
        """Return the nodes of a batch; attribute names and metadata stay empty. A message is faulty if it is
        malformed (``ET001``) or does not fit this schema (``ET003``). Raise :class:`FormatError` with its
        byte offset, or skip and record it if the reader is lenient.
        """
        columns, bad, run_times = self._decode(batch)
        if bad.any():
            for index in np.flatnonzero(bad).tolist():
                message, base = batch.message(index), batch.base + int(batch.start[index])
                position = f"node {int(columns.id[index])} at byte {int(batch.position[index])}"
                self.faults.skip(self._fault(message, self.version.node, base, position, "this node"))
            good = ~bad
            columns, _, run_times = self._decode(
                FrameBatch(batch.window, batch.start[good], batch.end[good], batch.position[good], batch.base)
            )
        self.run_times += run_times
        return columns

    def metadata(self, message: bytes, base: int = 0) -> Metadata:
        """Decode the metadata frame, which has only attributes; ``base`` is its start."""
        window = ByteWindow.holding(np.frombuffer(message, np.uint8))
        fields = walk(window, np.zeros(1, np.int64), np.full(1, len(message)))
        own = _AttributeDecoder(self.version, KeyTable())
        rows = fields.rows(tag_of(1, WireType.BYTES))
        start, length = fields.at[rows], fields.value[rows].view(np.int64)
        attributes = own.decode(window, np.array([0, len(rows)]), start, length, of_nodes=False)
        if (
            self.version.metadata is None
            or fields.bad.any()
            or attributes.bad.any()
            or len(rows) < len(fields.tag)
        ):
            raise self._fault(message, self.version.metadata, base, f"byte {base}", "the metadata frame")
        return Metadata(CURRENT, replace(attributes.columns, keys=tuple(own.keys.names)))

    def _decode(self, batch: FrameBatch) -> tuple[EtColumns, Bools, int]:
        """Return the columns of all nodes, a mask of the nodes that the schema does not allow, and the number
        of nodes with a run time.
        """
        fields = walk(batch.window, batch.start, batch.end)
        foreign = np.zeros(fields.messages, np.bool_)
        allowed: list[int] = []
        for spec in self.version.node.fields.values():
            tag = tag_of(spec.number, spec.kind.wire)
            allowed.append(tag)
            if spec.repeated and spec.kind.wire != WireType.BYTES:
                allowed.append(tag_of(spec.number, WireType.BYTES))
            if spec.required:
                foreign |= ~fields.has(tag)
            if spec.largest is not None and spec.kind.wire == WireType.VARINT:
                rows = fields.rows(tag)
                foreign[fields.owner[rows[fields.value[rows] > spec.largest]]] = True
        table = np.zeros(256, np.bool_)
        table[allowed] = True
        is_allowed = table.take(np.minimum(fields.tag, 255)) & (fields.tag < 256)
        foreign[fields.owner[~is_allowed]] = True
        bad = fields.bad | foreign
        name = _text(fields, _NAME, bad)
        parents, malformed = fields.integers(_PARENT)
        if malformed is not None:
            bad |= malformed
        inputs = outputs = IoColumns.empty()
        if not self.version.declared:
            attrs = _decode_fields(fields, self.version, self.keys)
            bad |= attrs.bad
        else:
            rows = fields.rows(tag_of(_ATTRIBUTE, WireType.BYTES))
            owner = fields.owner[rows]
            offsets = np.searchsorted(owner, np.arange(fields.messages + 1))
            length = fields.value[rows].view(np.int64)
            attrs = self._attributes.decode(fields.window, offsets, fields.at[rows], length)
            bad[owner[attrs.bad]] = True
            inputs, outputs = _io(fields, 5, bad), _io(fields, 8, bad)
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
            position=batch.position,
        )
        return columns, bad, int(np.count_nonzero(attrs.run_time))

    def _fault(
        self, message: bytes, spec: MessageSpec | None, base: int, position: str, what: str
    ) -> FormatError:
        """Return the error for a refused message: malformed, or outside this schema."""
        if spec is not None:
            try:
                canonical_message(message, spec, base=base, path=self.faults.path)
            except FormatError as error:
                return error
        return FormatError(
            f"{what} does not match schema {self.label} of the rest of the file",
            code="ET003",
            path=self.faults.path,
            position=position,
            hint=_DAMAGED,
        )


def _text(fields: WireFields, number: int, bad: Bools) -> ByteRows:
    rows = ByteRows(*copy_spans(fields.window, *fields.span(number)))
    bad |= not_text(rows)
    return rows


def _io(fields: WireFields, first: int, bad: Bools) -> IoColumns:
    """Return the inputs (or outputs) of nodes as ``IOInfo`` columns. In the old schema, values, shapes and
    types are three strings in consecutive fields from number ``first``.
    """
    texts = [_text(fields, number, bad) for number in range(first, first + 3)]
    some = texts[0].lengths + texts[1].lengths + texts[2].lengths
    node: Longs = np.flatnonzero(some)
    if not len(node):
        return IoColumns.empty()
    if len(node) < len(some):
        texts = [text.take(node) for text in texts]
    return IoColumns(node, *texts)


_RUN_TIME = tag_of(7, WireType.VARINT)


class _AttributePart(NamedTuple):
    """Values of one attribute of several nodes: node ``node[i]`` has the value ``bits[i]``, of type
    ``field``.
    """

    node: Longs
    field: AttributeField
    bits: Words


def _decode_fields(fields: WireFields, version: SchemaVersion, keys: KeyTable) -> _OldAttributes:
    """Convert the fields of nodes of version 0.0.1, which has no attributes, to attributes of the current
    schema. ``bad`` of the result marks nodes that the schema does not allow.
    """
    bad = np.zeros(fields.messages, np.bool_)
    by_name = {spec.name: spec for spec in version.node.fields.values()}
    rows: list[int] = []
    parts: list[_AttributePart] = []
    payload = ByteRows.blank(0)
    for name, target in UPGRADES_001.items():
        spec = by_name[name]
        if spec.repeated:
            part, payload = _truths(fields, spec, bad)
            new_parts = [part]
        else:
            new_parts = _integers(fields, spec, target, version)
        parts += new_parts
        rows += [keys.add(name)] * len(new_parts)
    columns = AttributeColumns.empty(fields.messages)
    if parts:  # sort them by node; the order within a node is unchanged
        node = np.concatenate([part.node for part in parts])
        sizes = [len(part.node) for part in parts]
        order = np.argsort(node, kind="stable")
        columns = replace(
            columns,
            offsets=offsets_of(np.bincount(node, minlength=fields.messages)),
            key=np.repeat(np.array(rows, np.int32), sizes)[order],
            field=np.repeat(np.array([part.field for part in parts], np.uint8), sizes)[order],
            bits=np.concatenate([part.bits for part in parts])[order],
            payload=payload,
        )
    return _OldAttributes(columns, fields.scalar(_RUN_TIME), bad)


def _integers(
    fields: WireFields, spec: FieldSpec, target: AttributeField, version: SchemaVersion
) -> list[_AttributePart]:
    """Return an integer field as an attribute of type ``target`` of the nodes that have the field. The
    default (0) of an enumeration counts as absent. Values too large for ``target`` get the unsigned type.
    """
    tag = tag_of(spec.number, WireType.VARINT)
    has, value = fields.has(tag), fields.scalar(tag)
    if spec.kind is ProtoKind.ENUM:
        has &= value != 0
    if spec.name == "comm_type":
        today = np.array([max(number, 0) for number in version.comm_types], np.uint64)
        value = today[np.minimum(value, np.uint64(len(today) - 1)).view(np.int64)]
    high = np.uint64(INTEGER_BOUNDS.get(target, (0, (1 << 64) - 1))[1])
    if target is AttributeField.UINT64:
        high = np.uint64((1 << 64) - 1)
    larger = AttributeField.UINT32 if target is AttributeField.INT32 else AttributeField.UINT64
    fits = value <= high
    parts = [(has & fits, target), (has & ~fits, larger)]
    return [_AttributePart(np.flatnonzero(where), kind, value[where]) for where, kind in parts if where.any()]


def _truths(fields: WireFields, spec: FieldSpec, bad: Bools) -> tuple[_AttributePart, ByteRows]:
    """Return a list of bools as an attribute of the nodes that have it, and the encoded lists."""
    entries, malformed = fields.integers(spec.number)
    if malformed is not None:
        bad |= malformed
    counts = np.diff(entries.offsets)
    node = np.flatnonzero(counts)
    wrong = np.flatnonzero(entries.values > 1)
    bad[np.searchsorted(entries.offsets, wrong, side="right") - 1] = True
    flat = entries.values.astype(np.uint8)
    messages_by_content: dict[bytes, bytes] = {}
    messages: list[bytes] = []
    starts, ends = entries.offsets[node].tolist(), entries.offsets[node + 1].tolist()
    for start, end in zip(starts, ends, strict=True):
        content = flat[start:end].tobytes()
        messages.append(messages_by_content.setdefault(content, _list_message(content)))
    part = _AttributePart(node, AttributeField.BOOL_LIST, np.arange(len(node), dtype=np.uint64))
    return part, ByteRows.from_rows(messages)
