"""Field numbers and enumerations of the Chakra execution trace, schema 0.0.4 (= 1.0.0).

Source: https://github.com/mlcommons/chakra, ``schema/protobuf/et_def.proto``. The codec, the fallback parser
and the descriptor of the tests are all built from these tables; they are facts only and hold no logic.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from types import MappingProxyType
from typing import NamedTuple

__all__ = [
    "ATTRIBUTE",
    "GLOBAL_METADATA",
    "IO_INFO",
    "NODE",
    "VALUE_FIELDS",
    "AttributeField",
    "CollectiveCommType",
    "FieldSpec",
    "Kind",
    "MessageSpec",
    "NodeField",
    "NodeType",
    "WireType",
]


class WireType(IntEnum):
    """Protobuf wire types that this schema uses."""

    VARINT = 0
    FIXED64 = 1
    BYTES = 2
    FIXED32 = 5


class NodeType(IntEnum):
    """``Node.type``. 0.0.1 and 0.0.2 lack METADATA, which shifts every later number by one."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


class CollectiveCommType(IntEnum):
    """Value of the ``comm_type`` attribute. Numbered differently before 0.0.4."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


class NodeField(IntEnum):
    """Field numbers of ``Node``."""

    ID = 1
    NAME = 2
    TYPE = 3
    CTRL_DEPS = 4
    DATA_DEPS = 5
    START_TIME_MICROS = 6
    DURATION_MICROS = 7
    INPUTS = 8
    OUTPUTS = 9
    ATTR = 10


class AttributeField(IntEnum):
    """Field numbers of ``AttributeProto``; the list form of a scalar ``n`` has the number ``n + 1``."""

    UNSET = 0
    NAME = 1
    DOC_STRING = 2
    DOUBLE = 3
    DOUBLE_LIST = 4
    FLOAT = 5
    FLOAT_LIST = 6
    INT32 = 7
    INT32_LIST = 8
    INT64 = 9
    INT64_LIST = 10
    UINT32 = 11
    UINT32_LIST = 12
    UINT64 = 13
    UINT64_LIST = 14
    SINT32 = 15
    SINT32_LIST = 16
    SINT64 = 17
    SINT64_LIST = 18
    FIXED32 = 19
    FIXED32_LIST = 20
    FIXED64 = 21
    FIXED64_LIST = 22
    SFIXED32 = 23
    SFIXED32_LIST = 24
    SFIXED64 = 25
    SFIXED64_LIST = 26
    BOOL = 27
    BOOL_LIST = 28
    STRING = 29
    STRING_LIST = 30
    BYTES = 31
    BYTES_LIST = 32


class Kind(Enum):
    """Protobuf value kinds, with their wire type and the name used in ``.proto`` files."""

    DOUBLE = ("double", WireType.FIXED64)
    FLOAT = ("float", WireType.FIXED32)
    INT32 = ("int32", WireType.VARINT)
    INT64 = ("int64", WireType.VARINT)
    UINT32 = ("uint32", WireType.VARINT)
    UINT64 = ("uint64", WireType.VARINT)
    SINT32 = ("sint32", WireType.VARINT)
    SINT64 = ("sint64", WireType.VARINT)
    FIXED32 = ("fixed32", WireType.FIXED32)
    FIXED64 = ("fixed64", WireType.FIXED64)
    SFIXED32 = ("sfixed32", WireType.FIXED32)
    SFIXED64 = ("sfixed64", WireType.FIXED64)
    BOOL = ("bool", WireType.VARINT)
    STRING = ("string", WireType.BYTES)
    BYTES = ("bytes", WireType.BYTES)
    ENUM = ("enum", WireType.VARINT)
    MESSAGE = ("message", WireType.BYTES)

    @property
    def proto(self) -> str:
        """The type's keyword in a ``.proto`` file."""
        return self.value[0]

    @property
    def wire(self) -> WireType:
        """How one value of the kind travels."""
        return self.value[1]


_SCALARS = tuple(kind for kind in Kind if kind not in {Kind.ENUM, Kind.MESSAGE})

VALUE_FIELDS: MappingProxyType[int, Kind] = MappingProxyType(
    {3 + 2 * place: kind for place, kind in enumerate(_SCALARS)}
)
"""Attribute field number of a scalar -> its kind."""


# --- The messages, field by field: for what goes through a message as a whole. The columnar codec needs only
# the numbers above.


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
