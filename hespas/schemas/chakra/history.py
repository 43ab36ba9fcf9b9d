"""Every version of the Chakra execution trace schema in one table: what it is written with, and what its
numbers mean today.

Source: the history of ``et_def.proto`` in https://github.com/mlcommons/chakra. Labels are not reliable (some
steps changed the wire format under one label, others only the label), so the table goes by date. The reader
dispatches through :data:`VERSIONS`; what is not in it is not read.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal, NamedTuple

from hespas.schemas.chakra import CURRENT, EARLY
from hespas.schemas.chakra.tables import (
    ATTRIBUTE,
    GLOBAL_METADATA,
    NODE,
    AttributeField,
    CollectiveCommType,
    FieldSpec,
    Kind,
    MessageSpec,
    NodeType,
)

__all__ = [
    "NAMED",
    "PLACES",
    "UPGRADES_001",
    "VERSIONS",
    "Declared",
    "SchemaVersion",
]


class Declared(NamedTuple):
    """A value type of old attributes: which field holds it, and what it is today."""

    field: FieldSpec
    becomes: AttributeField


class SchemaVersion(NamedTuple):
    """One version. ``metadata`` is None where traces begin with a node. ``declared`` lists the value types of
    attributes by number (empty: none are declared). ``node_types`` and ``comm_types`` give, by the number in
    the file, today's number (-1: not a collective at all).
    """

    label: str
    date: str
    syntax: Literal["proto2", "proto3"]
    node: MessageSpec
    metadata: MessageSpec | None
    declared: tuple[Declared, ...]
    node_types: tuple[int, ...]
    comm_types: tuple[int, ...]


_U32, _ENUM = (1 << 32) - 1, Kind.ENUM


def _message(name: str, *fields: FieldSpec) -> MessageSpec:
    return MessageSpec(name, MappingProxyType({field.number: field for field in fields}))


_NODE_001 = _message(
    "Node",
    FieldSpec(1, "id", Kind.UINT64, required=True),
    FieldSpec(2, "name", Kind.STRING, required=True),
    FieldSpec(3, "node_type", _ENUM, largest=6),
    FieldSpec(4, "parent", Kind.UINT64, repeated=True),
    FieldSpec(5, "tensor_loc", _ENUM, largest=2),
    FieldSpec(6, "tensor_size", Kind.UINT64),
    FieldSpec(7, "simulated_run_time", Kind.UINT64),
    FieldSpec(8, "input_tensor_loc", _ENUM, largest=2),
    FieldSpec(9, "input_tensor_size", Kind.UINT64),
    FieldSpec(10, "output_tensor_loc", _ENUM, largest=2),
    FieldSpec(11, "output_tensor_size", Kind.UINT64),
    FieldSpec(12, "num_ops", Kind.UINT64),
    FieldSpec(13, "comm_type", _ENUM, largest=4),
    FieldSpec(14, "involved_dim", Kind.BOOL, repeated=True, largest=1),
    FieldSpec(15, "communicator_id", Kind.UINT32, largest=_U32),
    FieldSpec(16, "comm_src", Kind.UINT32, largest=_U32),
    FieldSpec(17, "comm_dst", Kind.UINT32, largest=_U32),
    FieldSpec(18, "comm_size", Kind.UINT32, largest=_U32),
    FieldSpec(19, "comm_tag", Kind.UINT32, largest=_U32),
    FieldSpec(20, "comm_priority", Kind.UINT32, largest=_U32),
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
"""Fields of 0.0.1 nodes that are attributes today, with the type that readers of today want."""


def _attribute(*values: FieldSpec, types: int) -> MessageSpec:
    return _message(
        "AttributeProto",
        FieldSpec(1, "name", Kind.STRING, required=True),
        FieldSpec(2, "type", _ENUM, required=True, largest=types - 1),
        FieldSpec(3, "doc_string", Kind.STRING),
        *values,
    )


_SCALARS = {
    "b": (Kind.BOOL, AttributeField.BOOL),
    "f": (Kind.FLOAT, AttributeField.FLOAT),
    "u": (Kind.UINT64, AttributeField.UINT64),
    "i": (Kind.INT64, AttributeField.INT64),
    "s": (Kind.STRING, AttributeField.STRING),
}
_LISTS = {
    "bools": (Kind.BOOL, AttributeField.BOOL_LIST),
    "floats": (Kind.FLOAT, AttributeField.FLOAT_LIST),
    "uints": (Kind.UINT64, AttributeField.UINT64_LIST),
    "ints": (Kind.INT64, AttributeField.INT64_LIST),
    "strings": (Kind.BYTES, AttributeField.STRING_LIST),
}


def _declared(names: str) -> tuple[Declared, ...]:
    """Value types in the order of their numbers; the value of the first stands in field 4, and so on.

    ``strings`` were bytes at first and text later, which is the same on the wire.
    """
    found: list[Declared] = []
    for number, name in enumerate(names.split(), start=4):
        repeated = name in _LISTS
        kind, becomes = _LISTS[name] if repeated else _SCALARS[name]
        largest = 1 if kind is Kind.BOOL else None
        found.append(Declared(FieldSpec(number, name, kind, repeated=repeated, largest=largest), becomes))
    return tuple(found)


_DECLARED_002 = _declared("f i s floats ints strings")
_DECLARED_003 = _declared("b f i s bools floats ints strings")
_DECLARED_003_UINT = _declared("b f u i s bools floats uints ints strings")


def _node(declared: tuple[Declared, ...], largest_type: int) -> MessageSpec:
    texts = ("inputs", "input_shapes", "input_types", "outputs", "output_shapes", "output_types")
    attribute = _attribute(*(entry.field for entry in declared), types=len(declared))
    return _message(
        "Node",
        FieldSpec(1, "id", Kind.UINT64, required=True),
        FieldSpec(2, "name", Kind.STRING, required=True),
        FieldSpec(3, "type", _ENUM, required=True, largest=largest_type),
        FieldSpec(4, "parent", Kind.UINT64, repeated=True),
        *(FieldSpec(number, name, Kind.STRING) for number, name in enumerate(texts, start=5)),
        FieldSpec(11, "attribute", Kind.MESSAGE, repeated=True, message=attribute),
    )


def _metadata(declared: tuple[Declared, ...]) -> MessageSpec:
    attribute = _attribute(*(entry.field for entry in declared), types=len(declared))
    return _message(
        "GlobalMetadata", FieldSpec(1, "attribute", Kind.MESSAGE, repeated=True, message=attribute)
    )


PLACES: MappingProxyType[str, str] = MappingProxyType(
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
"""Fields of proto2 nodes that have another name or place today."""

_NO_METADATA_TYPE = (NodeType.INVALID, *range(NodeType.MEM_LOAD, NodeType.COMM_COLL + 1))
"""Node types before METADATA was inserted."""
_NODE_TYPES = tuple(NodeType)
_COMM = CollectiveCommType
_COMM_002 = (_COMM.ALL_REDUCE, _COMM.ALL_TO_ALL, _COMM.ALL_GATHER, _COMM.REDUCE_SCATTER)

_NOTHING: tuple[Declared, ...] = ()

_ROWS = (
    SchemaVersion(
        "0.0.1", "2023-01", "proto2", _NODE_001, None, _NOTHING, _NO_METADATA_TYPE, (-1, *_COMM_002)
    ),
    *(
        SchemaVersion(
            label if label == "0.0.2" else f"{label}-{date}",
            date,
            "proto2",
            _node(declared, len(node_types) - 1),
            _metadata(declared) if has_metadata else None,
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
        _message("GlobalMetadata", FieldSpec(1, "attr", Kind.MESSAGE, repeated=True, message=ATTRIBUTE)),
        (),
        _NODE_TYPES,
        tuple(_COMM),
    ),
    SchemaVersion(CURRENT, "2023-10-10", "proto3", NODE, GLOBAL_METADATA, (), _NODE_TYPES, tuple(_COMM)),
)

VERSIONS: MappingProxyType[str, SchemaVersion] = MappingProxyType({row.label: row for row in _ROWS})
"""All versions, oldest first. 1.0.0 is another label of 0.0.4: the same bytes."""

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
"""What a user can name -> the versions that are meant; the structure decides between several."""
