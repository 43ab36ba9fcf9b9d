"""Writer of small Chakra traces for the conformance kit, in every schema version.

It encodes one node at a time and is independent of the columnar codec of :mod:`hespas.converters.chakra`, so
that a fault of the codec does not change the kit. A node can have bytes that no writer makes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

from hespas.converters.chakra.contract import ATTRIBUTES
from hespas.files.wire import FIXED32, FIXED64, encode_varint, field_bytes, tag
from hespas.schemas.chakra import CURRENT, EARLY
from hespas.schemas.chakra.tables import (
    UPGRADES_001,
    VERSIONS,
    AttributeField,
    CollectiveCommType,
    NodeType,
    SchemaVersion,
)

__all__ = ["TraceNode", "Typed", "Value", "attribute", "collective", "compute", "frame", "message", "trace"]

_PACKING = {
    "double": "<d",
    "float": "<f",
    "fixed32": "<I",
    "fixed64": "<Q",
    "sfixed32": "<i",
    "sfixed64": "<q",
}


class Typed(NamedTuple):
    """Value of an attribute with the name of its protobuf type, such as ``uint64`` or ``string_list``."""

    type: str
    value: object


Value = int | str | Sequence[str] | Sequence[bool] | Typed


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceNode:
    """Node of a trace. ``attrs`` without a type get their canonical one. ``extra`` is appended to the encoded
    message.
    """

    id: int
    name: str = "node"
    type: int = NodeType.COMP
    data: tuple[int, ...] = ()
    control: tuple[int, ...] = ()
    start_micros: int = 0
    micros: int = 0
    attrs: Mapping[str, Value] = field(default_factory=dict[str, Value])
    extra: bytes = b""

    def with_attrs(self, **attrs: Value) -> TraceNode:
        """Return the node with more, or other, attributes."""
        return replace(self, attrs={**self.attrs, **attrs})

    def without(self, *names: str) -> TraceNode:
        """Return the node without some attributes."""
        return replace(self, attrs={name: value for name, value in self.attrs.items() if name not in names})


def compute(number: int, *data: int, micros: int = 5, **attrs: Value) -> TraceNode:
    """Return a computation on the device."""
    return TraceNode(id=number, name=f"compute_{number}", data=data, micros=micros, attrs=attrs)


def collective(
    number: int, *data: int, kind: str = "ALL_REDUCE", size: int = 1 << 20, **attrs: Value
) -> TraceNode:
    """Return a collective of ``size`` bytes, over all ranks unless ``pg_name`` names a group."""
    attributes: dict[str, Value] = {"comm_type": int(CollectiveCommType[kind]), "comm_size": size, **attrs}
    return TraceNode(
        id=number, name=f"{kind.lower()}_{number}", type=NodeType.COMM_COLL, data=data, attrs=attributes
    )


def message(
    kind: str, number: int, *data: int, source: int, target: int, size: int = 4096, tag: int = 1
) -> TraceNode:
    """Return a SEND or RECV node of rank ``source`` or ``target``."""
    attrs = {"comm_src": source, "comm_dst": target, "comm_size": size, "comm_tag": tag}
    node_type = NodeType[f"COMM_{kind}"]
    return TraceNode(id=number, name=f"{kind.lower()}_{number}", type=node_type, data=data, attrs=attrs)


def frame(content: bytes) -> bytes:
    """Return a message with its length in front."""
    return encode_varint(len(content)) + content


def trace(
    nodes: Sequence[TraceNode], version: str = "1.0.0", metadata: Mapping[str, Value] | None = None
) -> bytes:
    """Return a trace file in a schema version: a label of the current schema, or a key of ``VERSIONS``."""
    schema = VERSIONS.get(version, VERSIONS[CURRENT])
    frames: list[bytes] = []
    if schema.syntax == "proto3":
        attrs = b"".join(
            field_bytes(1 if schema.label == EARLY else 2, attribute(name, value))
            for name, value in (metadata or {}).items()
        )
        label = b"" if schema.label == EARLY else field_bytes(1, version.encode())
        frames.append(frame(label + attrs))
        frames += [frame(_node(node)) for node in nodes]
    else:
        if schema.metadata is not None:
            texts = [_old_attribute(name, value, schema) for name, value in (metadata or {}).items()]
            frames.append(frame(b"".join(field_bytes(1, text) for text in texts)))
        encode = _node_001 if schema.label == "0.0.1" else _old_node
        frames += [frame(encode(node, schema)) for node in nodes]
    return b"".join(frames)


def attribute(name: str, value: Value) -> bytes:
    """Return an encoded ``AttributeProto`` of the current schema."""
    canonical = ATTRIBUTES.get(name)
    if isinstance(value, Typed):
        kind = value.type
    elif canonical is not None:
        kind = canonical.name.lower()
    else:
        kind = "string" if isinstance(value, str) else "int64"
    content = value.value if isinstance(value, Typed) else value
    number = int(AttributeField[kind.upper()])
    if kind.endswith("_list"):
        entries = cast("Sequence[object]", content)
        parts = b"".join(_scalar(1, kind.removesuffix("_list"), entry) for entry in entries)
        return field_bytes(1, name.encode()) + field_bytes(number, parts)
    return field_bytes(1, name.encode()) + _scalar(number, kind, content)


def _scalar(number: int, kind: str, value: object) -> bytes:
    if isinstance(value, str):
        return field_bytes(number, value.encode())
    if isinstance(value, bytes):
        return field_bytes(number, value)
    assert isinstance(value, int | float)
    if kind in _PACKING:
        wire = FIXED64 if kind.endswith("64") or kind == "double" else FIXED32
        return tag(number, wire) + struct.pack(_PACKING[kind], value)
    integer = int(value)
    return field_bytes(number, (integer << 1 ^ integer >> 63) if kind.startswith("sint") else integer)


def _varints(number: int, values: Sequence[int]) -> bytes:
    """Return a packed list of integers; nothing for an empty list."""
    packed = b"".join(map(encode_varint, values))
    return field_bytes(number, packed) if values else b""


def _node(node: TraceNode) -> bytes:
    """Return a node of the current schema. Fields of value 0 are omitted, as in proto3."""
    name = field_bytes(2, node.name.encode()) if node.name else b""
    return b"".join(
        [
            field_bytes(1, node.id) if node.id else b"",
            name,
            field_bytes(3, node.type) if node.type else b"",
            _varints(4, node.control),
            _varints(5, node.data),
            field_bytes(6, node.start_micros) if node.start_micros else b"",
            field_bytes(7, node.micros) if node.micros else b"",
            *(field_bytes(10, attribute(key, value)) for key, value in node.attrs.items()),
            node.extra,
        ]
    )


def _old_number(value: int, table: Sequence[int]) -> int:
    """Return the number that an old schema has for a number of the current one."""
    return list(table).index(value)


def _old_node(node: TraceNode, schema: SchemaVersion) -> bytes:
    """Return a node of 0.0.2 or 0.0.3. Its duration is the attribute ``runtime`` in microseconds."""
    attrs = {**node.attrs, **({"runtime": node.micros} if node.micros else {})}
    texts = [_old_attribute(name, value, schema) for name, value in attrs.items()]
    return b"".join(
        [
            field_bytes(1, node.id),
            field_bytes(2, node.name.encode()),
            field_bytes(3, _old_number(node.type, schema.node_types)),
            *(field_bytes(4, parent) for parent in (*node.control, *node.data)),
            *(field_bytes(11, text) for text in texts),
        ]
    )


def _old_attribute(name: str, value: Value, schema: SchemaVersion) -> bytes:
    """Return an attribute with the number of its declared type and a value in the field of that type."""
    content = value.value if isinstance(value, Typed) else value
    wanted = AttributeField.STRING if isinstance(content, str) else AttributeField.INT64
    declared = [entry.becomes for entry in schema.declared].index(wanted)
    spec = schema.declared[declared].field
    if name == "comm_type":
        assert isinstance(content, int)
        content = _old_number(content, schema.comm_types)
    head = field_bytes(1, name.encode()) + field_bytes(2, declared)
    return head + _scalar(spec.number, spec.kind.proto, content)


def _node_001(node: TraceNode, schema: SchemaVersion) -> bytes:
    """Return a node of 0.0.1, which has a field for each attribute."""
    number_of = {spec.name: spec for spec in schema.node.fields.values()}
    parts = [
        field_bytes(1, node.id),
        field_bytes(2, node.name.encode()),
        field_bytes(3, _old_number(node.type, schema.node_types)),
        *(field_bytes(4, parent) for parent in (*node.control, *node.data)),
        field_bytes(7, node.micros),
    ]
    values: list[tuple[int, int]] = []
    for name, value in node.attrs.items():
        if name in UPGRADES_001 and isinstance(value, int):
            number = _old_number(value, schema.comm_types) if name == "comm_type" else value
            values.append((number_of[name].number, number))
    return b"".join(parts + [field_bytes(number, value) for number, value in sorted(values)])
