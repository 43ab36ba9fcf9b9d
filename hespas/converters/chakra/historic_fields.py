"""Fields of 0.0.1 nodes as attributes: that schema had none, and a field for everything."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hespas.converters.chakra.columns import AttributeColumns, ByteRows
from hespas.converters.chakra.fields import Fields, tag_of
from hespas.converters.chakra.historic_attributes import INTEGER_BOUNDS, OldAttributes, list_message
from hespas.converters.chakra.keys import KeyTable
from hespas.converters.chakra.spans import Bools, Longs, Words, offsets_of
from hespas.schemas.chakra.history import UPGRADES_001, SchemaVersion
from hespas.schemas.chakra.messages import FieldSpec
from hespas.schemas.chakra.tables import AttributeField, Kind, WireType

__all__ = ["decode_fields"]

_RUN_TIME = tag_of(7, WireType.VARINT)


class _Part(NamedTuple):
    """One attribute of some nodes."""

    node: Longs
    field: AttributeField
    bits: Words


def decode_fields(fields: Fields, version: SchemaVersion, keys: KeyTable) -> OldAttributes:
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
    return OldAttributes(columns, fields.scalar(_RUN_TIME), bad)


def _integers(fields: Fields, spec: FieldSpec, target: AttributeField, version: SchemaVersion) -> list[_Part]:
    """A field of the nodes that state it. The default of an enumeration says nothing; what is too large for
    the type of today has the unsigned one.
    """
    tag = tag_of(spec.number, WireType.VARINT)
    has, value = fields.has(tag), fields.scalar(tag)
    if spec.kind is Kind.ENUM:
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
        messages.append(known.setdefault(content, list_message(content)))
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
