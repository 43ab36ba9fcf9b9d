"""Field numbers and enumerations of all versions of the Chakra execution trace schema.

Sources: ``schema/protobuf/et_def.proto`` of https://github.com/mlcommons/chakra for schema 0.0.4 (= 1.0.0),
and the history of that file for older versions. The codec, the fallback parser and the descriptor of the
tests are built from these tables; they are facts and contain no logic. Messages are for code that processes a
message as a whole; the columnar codec needs only the numbers.

Version labels are not reliable (some commits changed the wire format under one label, others only the label),
so the table of versions goes by date. The reader dispatches through :data:`VERSIONS`; other versions are not
read.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from types import MappingProxyType
from typing import Literal, NamedTuple

from hespas.schemas.chakra import CURRENT, EARLY

__all__ = [
    "ATTRIBUTE",
    "GLOBAL_METADATA",
    "IO_INFO",
    "NAMED",
    "NODE",
    "RENAMED_FIELDS",
    "UPGRADES_001",
    "VALUE_FIELDS",
    "VERSIONS",
    "AttributeField",
    "CollectiveCommType",
    "DeclaredType",
    "FieldSpec",
    "MessageSpec",
    "NodeField",
    "NodeType",
    "ProtoKind",
    "SchemaVersion",
    "WireType",
]


class WireType(IntEnum):
    """Protobuf wire types that this schema uses."""

    VARINT = 0
    FIXED64 = 1
    BYTES = 2
    FIXED32 = 5


class NodeType(IntEnum):
    """Values of the Chakra field ``Node.type``. 0.0.1 and 0.0.2 lack METADATA, so their later numbers are
    lower by one.
    """

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


class CollectiveCommType(IntEnum):
    """Values of the Chakra attribute ``comm_type``. Versions before 0.0.4 use other numbers."""

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
    """Field numbers of the Chakra message ``Node``."""

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
    """Field numbers of the Chakra message ``AttributeProto``; the list form of a scalar ``n`` has the number
    ``n + 1``.
    """

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


class ProtoKind(Enum):
    """Kinds of protobuf values, with their wire type and their name in ``.proto`` files."""

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
        """Wire type of one value of the kind."""
        return self.value[1]


_SCALARS = tuple(kind for kind in ProtoKind if kind not in {ProtoKind.ENUM, ProtoKind.MESSAGE})

VALUE_FIELDS: MappingProxyType[int, ProtoKind] = MappingProxyType(
    {3 + 2 * index: kind for index, kind in enumerate(_SCALARS)}
)
"""Attribute field number of a scalar -> its kind."""


class FieldSpec(NamedTuple):
    """One field of a protobuf message. Fields with ``oneof`` exclude each other. ``message`` is the type of a
    field of kind ``ProtoKind.MESSAGE``.

    ``required`` and ``largest`` (the largest value of a closed enumeration) exist in proto2 only.
    """

    number: int
    name: str
    kind: ProtoKind
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
        fields.append(
            FieldSpec(number + 1, f"{kind.proto}_list", ProtoKind.MESSAGE, oneof=True, message=entries)
        )
    return fields


ATTRIBUTE = _message(
    "AttributeProto",
    FieldSpec(1, "name", ProtoKind.STRING),
    FieldSpec(2, "doc_string", ProtoKind.STRING),
    *_value_fields(),
)

IO_INFO = _message(
    "IOInfo",
    FieldSpec(1, "values", ProtoKind.STRING),
    FieldSpec(2, "shapes", ProtoKind.STRING),
    FieldSpec(3, "types", ProtoKind.STRING),
)

GLOBAL_METADATA = _message(
    "GlobalMetadata",
    FieldSpec(1, "version", ProtoKind.STRING),
    FieldSpec(2, "attr", ProtoKind.MESSAGE, repeated=True, message=ATTRIBUTE),
)

NODE = _message(
    "Node",
    FieldSpec(NodeField.ID, "id", ProtoKind.UINT64),
    FieldSpec(NodeField.NAME, "name", ProtoKind.STRING),
    FieldSpec(NodeField.TYPE, "type", ProtoKind.ENUM),
    FieldSpec(NodeField.CTRL_DEPS, "ctrl_deps", ProtoKind.UINT64, repeated=True),
    FieldSpec(NodeField.DATA_DEPS, "data_deps", ProtoKind.UINT64, repeated=True),
    FieldSpec(NodeField.START_TIME_MICROS, "start_time_micros", ProtoKind.UINT64),
    FieldSpec(NodeField.DURATION_MICROS, "duration_micros", ProtoKind.UINT64),
    FieldSpec(NodeField.INPUTS, "inputs", ProtoKind.MESSAGE, message=IO_INFO),
    FieldSpec(NodeField.OUTPUTS, "outputs", ProtoKind.MESSAGE, message=IO_INFO),
    FieldSpec(NodeField.ATTR, "attr", ProtoKind.MESSAGE, repeated=True, message=ATTRIBUTE),
)


class DeclaredType(NamedTuple):
    """Value type in attributes of old Chakra schemas: the field that has the value, and its type in the
    current schema.
    """

    field: FieldSpec
    becomes: AttributeField


class SchemaVersion(NamedTuple):
    """One version of the Chakra schema.

    ``metadata`` is None if traces of this version begin with a node. ``declared`` lists the value types of
    attributes in the order of their numbers (empty: not declared). ``node_types`` and ``comm_types`` map the
    numbers in the file to current numbers (-1: not a collective).
    """

    label: str
    date: str
    syntax: Literal["proto2", "proto3"]
    node: MessageSpec
    metadata: MessageSpec | None
    declared: tuple[DeclaredType, ...]
    node_types: tuple[int, ...]
    comm_types: tuple[int, ...]


_U32, _ENUM = (1 << 32) - 1, ProtoKind.ENUM

_NODE_001 = _message(
    "Node",
    FieldSpec(1, "id", ProtoKind.UINT64, required=True),
    FieldSpec(2, "name", ProtoKind.STRING, required=True),
    FieldSpec(3, "node_type", _ENUM, largest=6),
    FieldSpec(4, "parent", ProtoKind.UINT64, repeated=True),
    FieldSpec(5, "tensor_loc", _ENUM, largest=2),
    FieldSpec(6, "tensor_size", ProtoKind.UINT64),
    FieldSpec(7, "simulated_run_time", ProtoKind.UINT64),
    FieldSpec(8, "input_tensor_loc", _ENUM, largest=2),
    FieldSpec(9, "input_tensor_size", ProtoKind.UINT64),
    FieldSpec(10, "output_tensor_loc", _ENUM, largest=2),
    FieldSpec(11, "output_tensor_size", ProtoKind.UINT64),
    FieldSpec(12, "num_ops", ProtoKind.UINT64),
    FieldSpec(13, "comm_type", _ENUM, largest=4),
    FieldSpec(14, "involved_dim", ProtoKind.BOOL, repeated=True, largest=1),
    FieldSpec(15, "communicator_id", ProtoKind.UINT32, largest=_U32),
    FieldSpec(16, "comm_src", ProtoKind.UINT32, largest=_U32),
    FieldSpec(17, "comm_dst", ProtoKind.UINT32, largest=_U32),
    FieldSpec(18, "comm_size", ProtoKind.UINT32, largest=_U32),
    FieldSpec(19, "comm_tag", ProtoKind.UINT32, largest=_U32),
    FieldSpec(20, "comm_priority", ProtoKind.UINT32, largest=_U32),
)

UPGRADES_001: MappingProxyType[str, AttributeField] = MappingProxyType(
    {
        "comm_type": AttributeField.INT64,
        "comm_size": AttributeField.INT64,
        "comm_src": AttributeField.INT32,
        "comm_dst": AttributeField.INT32,
        "comm_tag": AttributeField.INT32,
        "num_ops": AttributeField.INT64,
        "tensor_size": AttributeField.UINT64,
        "involved_dim": AttributeField.BOOL_LIST,
        "communicator_id": AttributeField.UINT32,
        "comm_priority": AttributeField.INT32,
        "tensor_loc": AttributeField.UINT32,
        "input_tensor_loc": AttributeField.UINT32,
        "input_tensor_size": AttributeField.UINT64,
        "output_tensor_loc": AttributeField.UINT32,
        "output_tensor_size": AttributeField.UINT64,
    }
)
"""Fields of 0.0.1 nodes that are attributes in the current schema, with the expected types."""


def _attribute(*values: FieldSpec, types: int) -> MessageSpec:
    return _message(
        "AttributeProto",
        FieldSpec(1, "name", ProtoKind.STRING, required=True),
        FieldSpec(2, "type", _ENUM, required=True, largest=types - 1),
        FieldSpec(3, "doc_string", ProtoKind.STRING),
        *values,
    )


_SCALAR_TYPES = {
    "b": (ProtoKind.BOOL, AttributeField.BOOL),
    "f": (ProtoKind.FLOAT, AttributeField.FLOAT),
    "u": (ProtoKind.UINT64, AttributeField.UINT64),
    "i": (ProtoKind.INT64, AttributeField.INT64),
    "s": (ProtoKind.STRING, AttributeField.STRING),
}

_LISTS = {
    "bools": (ProtoKind.BOOL, AttributeField.BOOL_LIST),
    "floats": (ProtoKind.FLOAT, AttributeField.FLOAT_LIST),
    "uints": (ProtoKind.UINT64, AttributeField.UINT64_LIST),
    "ints": (ProtoKind.INT64, AttributeField.INT64_LIST),
    "strings": (ProtoKind.BYTES, AttributeField.STRING_LIST),
}


def _declared(names: str) -> tuple[DeclaredType, ...]:
    """Return value types in the order of their numbers. The first type has its value in field 4, the second
    in field 5, and so on.

    Attributes of type ``strings`` were declared as bytes at first and as text later, which have the same
    encoding.
    """
    types: list[DeclaredType] = []
    for number, name in enumerate(names.split(), start=4):
        repeated = name in _LISTS
        kind, becomes = _LISTS[name] if repeated else _SCALAR_TYPES[name]
        largest = 1 if kind is ProtoKind.BOOL else None
        types.append(DeclaredType(FieldSpec(number, name, kind, repeated=repeated, largest=largest), becomes))
    return tuple(types)


_DECLARED_002 = _declared("f i s floats ints strings")

_DECLARED_003 = _declared("b f i s bools floats ints strings")

_DECLARED_003_UINT = _declared("b f u i s bools floats uints ints strings")


def _node(declared: tuple[DeclaredType, ...], largest_type: int) -> MessageSpec:
    texts = ("inputs", "input_shapes", "input_types", "outputs", "output_shapes", "output_types")
    attribute = _attribute(*(entry.field for entry in declared), types=len(declared))
    return _message(
        "Node",
        FieldSpec(1, "id", ProtoKind.UINT64, required=True),
        FieldSpec(2, "name", ProtoKind.STRING, required=True),
        FieldSpec(3, "type", _ENUM, required=True, largest=largest_type),
        FieldSpec(4, "parent", ProtoKind.UINT64, repeated=True),
        *(FieldSpec(number, name, ProtoKind.STRING) for number, name in enumerate(texts, start=5)),
        FieldSpec(11, "attribute", ProtoKind.MESSAGE, repeated=True, message=attribute),
    )


RENAMED_FIELDS: MappingProxyType[str, str] = MappingProxyType(
    {
        "node_type": "type",
        "parent": "data_deps",
        "simulated_run_time": "duration_micros",
        "inputs": "inputs.values",
        "input_shapes": "inputs.shapes",
        "input_types": "inputs.types",
        "outputs": "outputs.values",
        "output_shapes": "outputs.shapes",
        "output_types": "outputs.types",
    }
)
"""Fields of proto2 nodes with another name in the current schema."""

_NO_METADATA_TYPE = (NodeType.INVALID, *range(NodeType.MEM_LOAD, NodeType.COMM_COLL + 1))
"""Node types before METADATA was inserted."""

_NODE_TYPES = tuple(NodeType)

_COMM = CollectiveCommType

_COMM_002 = (_COMM.ALL_REDUCE, _COMM.ALL_TO_ALL, _COMM.ALL_GATHER, _COMM.REDUCE_SCATTER)


_ROWS = (
    SchemaVersion("0.0.1", "2023-01", "proto2", _NODE_001, None, (), _NO_METADATA_TYPE, (-1, *_COMM_002)),
    *(
        SchemaVersion(
            label if label == "0.0.2" else f"{label}-{date}",
            date,
            "proto2",
            _node(declared, len(node_types) - 1),
            _message(
                "GlobalMetadata",
                FieldSpec(
                    1,
                    "attribute",
                    ProtoKind.MESSAGE,
                    repeated=True,
                    message=_attribute(*(entry.field for entry in declared), types=len(declared)),
                ),
            )
            if has_metadata
            else None,
            declared,
            node_types,
            comm_types,
        )
        for label, date, declared, has_metadata, node_types, comm_types in (
            ("0.0.2", "2023-06-27", _DECLARED_002, False, _NO_METADATA_TYPE, _COMM_002),
            ("0.0.3", "2023-07-07", _DECLARED_003, False, _NODE_TYPES, _COMM_002),
            ("0.0.3", "2023-08-02", _DECLARED_003, True, _NODE_TYPES, _COMM_002),
            ("0.0.3", "2023-08-05", _DECLARED_003_UINT, True, _NODE_TYPES, _COMM_002),
            ("0.0.3", "2023-08-07", _DECLARED_003_UINT, True, _NODE_TYPES, (*_COMM_002, _COMM.BROADCAST)),
        )
    ),
    SchemaVersion(
        EARLY,
        "2023-10-10",
        "proto3",
        NODE,
        _message("GlobalMetadata", FieldSpec(1, "attr", ProtoKind.MESSAGE, repeated=True, message=ATTRIBUTE)),
        (),
        _NODE_TYPES,
        tuple(_COMM),
    ),
    SchemaVersion(CURRENT, "2023-10-10", "proto3", NODE, GLOBAL_METADATA, (), _NODE_TYPES, tuple(_COMM)),
)

VERSIONS: MappingProxyType[str, SchemaVersion] = MappingProxyType({row.label: row for row in _ROWS})
"""All versions, oldest first. 1.0.0 is another label of 0.0.4 with the same bytes."""

NAMED: MappingProxyType[str, frozenset[str]] = MappingProxyType(
    {
        "0.0.1": frozenset({"0.0.1"}),
        "0.0.2": frozenset({"0.0.2"}),
        "0.0.3": frozenset(label for label in VERSIONS if label.startswith("0.0.3-")),
        **{label: frozenset({label}) for label in VERSIONS if "-" in label},
        CURRENT: frozenset({EARLY, CURRENT}),
        "1.0.0": frozenset({CURRENT}),
    }
)
"""Label that users can select -> matching versions; the structure of a trace decides between several."""
