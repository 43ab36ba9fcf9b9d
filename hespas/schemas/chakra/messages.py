"""The messages of the Chakra execution trace, field by field: for what goes through a message as a whole.

The columnar codec needs only the numbers in :mod:`hespas.schemas.chakra.tables`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

from hespas.schemas.chakra.tables import VALUE_FIELDS, Kind, NodeField

__all__ = ["ATTRIBUTE", "GLOBAL_METADATA", "IO_INFO", "NODE", "FieldSpec", "MessageSpec"]


class FieldSpec(NamedTuple):
    """One field of a message. ``oneof`` fields replace each other; ``message`` goes with ``Kind.MESSAGE``.

    ``required`` fields and the ``largest`` value of closed enumerations exist in proto2 only.
    """

    number: int
    name: str
    kind: Kind
    repeated: bool = False
    oneof: bool = False
    message: MessageSpec | None = None
    required: bool = False
    largest: int | None = None


class MessageSpec(NamedTuple):
    """A message type: its name and its fields by number."""

    name: str
    fields: MappingProxyType[int, FieldSpec]


def _message(name: str, *fields: FieldSpec) -> MessageSpec:
    return MessageSpec(name, MappingProxyType({field.number: field for field in fields}))


def _value_fields() -> list[FieldSpec]:
    fields: list[FieldSpec] = []
    for number, kind in VALUE_FIELDS.items():
        entries = _message(f"{kind.proto.title()}List", FieldSpec(1, "values", kind, repeated=True))
        fields.append(FieldSpec(number, f"{kind.proto}_val", kind, oneof=True))
        fields.append(FieldSpec(number + 1, f"{kind.proto}_list", Kind.MESSAGE, oneof=True, message=entries))
    return fields


ATTRIBUTE = _message(
    "AttributeProto",
    FieldSpec(1, "name", Kind.STRING),
    FieldSpec(2, "doc_string", Kind.STRING),
    *_value_fields(),
)

IO_INFO = _message(
    "IOInfo",
    FieldSpec(1, "values", Kind.STRING),
    FieldSpec(2, "shapes", Kind.STRING),
    FieldSpec(3, "types", Kind.STRING),
)

GLOBAL_METADATA = _message(
    "GlobalMetadata",
    FieldSpec(1, "version", Kind.STRING),
    FieldSpec(2, "attr", Kind.MESSAGE, repeated=True, message=ATTRIBUTE),
)

NODE = _message(
    "Node",
    FieldSpec(NodeField.ID, "id", Kind.UINT64),
    FieldSpec(NodeField.NAME, "name", Kind.STRING),
    FieldSpec(NodeField.TYPE, "type", Kind.ENUM),
    FieldSpec(NodeField.CTRL_DEPS, "ctrl_deps", Kind.UINT64, repeated=True),
    FieldSpec(NodeField.DATA_DEPS, "data_deps", Kind.UINT64, repeated=True),
    FieldSpec(NodeField.START_TIME_MICROS, "start_time_micros", Kind.UINT64),
    FieldSpec(NodeField.DURATION_MICROS, "duration_micros", Kind.UINT64),
    FieldSpec(NodeField.INPUTS, "inputs", Kind.MESSAGE, message=IO_INFO),
    FieldSpec(NodeField.OUTPUTS, "outputs", Kind.MESSAGE, message=IO_INFO),
    FieldSpec(NodeField.ATTR, "attr", Kind.MESSAGE, repeated=True, message=ATTRIBUTE),
)
