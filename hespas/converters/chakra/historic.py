"""Nodes of older schemas as columns of today's: what had a field of its own becomes what it is today.

Types and kinds of collectives get today's numbers, ``parent`` becomes ``data_deps``, texts of inputs and
outputs become ``IOInfo``, and fields of 0.0.1 become the attributes that readers of today want. Positions in
messages are those of the file that is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hespas.converters.chakra.attributes import not_text
from hespas.converters.chakra.canonical import canonical_message
from hespas.converters.chakra.columns import AttributeColumns, ByteRows, EtColumns, IoColumns
from hespas.converters.chakra.decode import Metadata
from hespas.converters.chakra.fields import Fields, tag_of, walk
from hespas.converters.chakra.frames import FrameBatch
from hespas.converters.chakra.historic_attributes import AttributeDecoder, OldAttributes
from hespas.converters.chakra.historic_fields import decode_fields
from hespas.converters.chakra.keys import KeyTable
from hespas.converters.chakra.spans import Bools, Longs, Window, Words, copy_spans
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import FormatError
from hespas.schemas.chakra.history import CURRENT, SchemaVersion
from hespas.schemas.chakra.messages import MessageSpec
from hespas.schemas.chakra.tables import WireType

__all__ = ["HistoricDecoder"]

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
    _attributes: AttributeDecoder = field(init=False)

    def __post_init__(self) -> None:
        """Prepare the tables of the version."""
        self._attributes = AttributeDecoder(self.version, self.keys)

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
        own = AttributeDecoder(self.version, KeyTable())
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
        columns = EtColumns(
            version="",
            metadata=AttributeColumns.empty(1),
            id=fields.scalar(tag_of(_ID, WireType.VARINT)),
            name=name,
            type=today[np.minimum(kind, np.uint64(len(today) - 1)).view(np.int64)],
            ctrl_offsets=np.zeros(len(batch) + 1, np.int64),
            ctrl_deps=np.empty(0, np.uint64),
            data_offsets=parents.offsets,
            data_deps=parents.values,
            start_micros=np.zeros(len(batch), np.uint64),
            duration_micros=attrs.run_time,
            inputs=inputs,
            outputs=outputs,
            attrs=attrs.columns,
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

    def _rest(self, fields: Fields, bad: Bools) -> tuple[OldAttributes, IoColumns, IoColumns]:
        """Attributes, inputs and outputs; marks nodes in which they are not right."""
        if not self.version.declared:
            attrs = decode_fields(fields, self.version, self.keys)
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
            code, text = fault.message.split(": ", 1)
            self.on_error.error(
                code, fault.position or "", f"{text}; the node is left out", path=self.path or ""
            )
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
            f"ET003: {what} is not of schema {self.label}, which the rest of the file has",
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
    return IoColumns(node, texts[0], texts[1], texts[2])
