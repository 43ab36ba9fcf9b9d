"""Field numbers and enumerations of the Chakra execution trace, schema 0.0.4 (= 1.0.0).

Source: https://github.com/mlcommons/chakra, ``schema/protobuf/et_def.proto``. The codec, the fallback parser
and the test descriptor are all built from these tables and from the messages beside them; they are facts only
and hold no logic beyond protobuf's own definitions of a varint and a tag.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from types import MappingProxyType

__all__ = [
    "LIST_OF",
    "VALUE_FIELDS",
    "AttributeField",
    "CollectiveCommType",
    "Kind",
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

LIST_OF: MappingProxyType[int, Kind] = MappingProxyType(
    {number + 1: kind for number, kind in VALUE_FIELDS.items()}
)
"""Attribute field number of a list -> the kind of its entries."""
