"""An encoder for every historic schema that shares nothing with the package: fields by hand, messages by the
protobuf library. ``!`` marks required fields, ``*`` repeated ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["OLD_VERSIONS", "Logical", "Proto", "classes", "encode", "framed", "graph_nodes", "rich_nodes"]

_TYPES = ["INVALID", "MEM_LOAD", "MEM_STORE", "COMP", "SEND", "RECV", "COLL"]
_TYPES_003 = ["INVALID", "METADATA", "MEM_LOAD", "MEM_STORE", "COMP", "SEND", "RECV", "COLL"]
_COMM_001 = ["-", "ALL_REDUCE", "ALL_TO_ALL", "ALL_GATHER", "REDUCE_SCATTER"]
_COMM_002 = _COMM_001[1:]
_COMM_004 = [
    *["ALL_REDUCE", "REDUCE", "ALL_GATHER", "GATHER", "SCATTER", "BROADCAST", "ALL_TO_ALL"],
    *["REDUCE_SCATTER", "REDUCE_SCATTER_BLOCK", "BARRIER"],
]

_NODE_001 = """
    1! uint64 id; 2! string name; 3 NodeType node_type; 4* uint64 parent; 5 MemoryType tensor_loc;
    6 uint64 tensor_size; 7 uint64 simulated_run_time; 8 MemoryType input_tensor_loc;
    9 uint64 input_tensor_size; 10 MemoryType output_tensor_loc; 11 uint64 output_tensor_size;
    12 uint64 num_ops; 13 CommType comm_type; 14* bool involved_dim; 15 uint32 communicator_id;
    16 uint32 comm_src; 17 uint32 comm_dst; 18 uint32 comm_size; 19 uint32 comm_tag; 20 uint32 comm_priority
"""
_NODE_002 = """
    1! uint64 id; 2! string name; 3! NodeType type; 4* uint64 parent; 5 string inputs; 6 string input_shapes;
    7 string input_types; 8 string outputs; 9 string output_shapes; 10 string output_types;
    11* AttributeProto attribute
"""
_NODE_004 = """
    1 uint64 id; 2 string name; 3 NodeType type; 4* uint64 ctrl_deps; 5* uint64 data_deps;
    6 uint64 start_time_micros; 7 uint64 duration_micros; 8 IOInfo inputs; 9 IOInfo outputs;
    10* AttributeProto attr
"""
_ATTRIBUTE_002 = """
    1! string name; 2! AttributeType type; 3 string doc_string; 4 float f; 5 int64 i; 6 string s;
    7* float floats; 8* int64 ints; 9* bytes strings
"""
_ATTRIBUTE_003 = """
    1! string name; 2! AttributeType type; 3 string doc_string; 4 bool b; 5 float f; 6 int64 i; 7 string s;
    8* bool bools; 9* float floats; 10* int64 ints; 11* string strings
"""
_ATTRIBUTE_003_UINT = """
    1! string name; 2! AttributeType type; 3 string doc_string; 4 bool b; 5 float f; 6 uint64 u; 7 int64 i;
    8 string s; 9* bool bools; 10* float floats; 11* uint64 uints; 12* int64 ints; 13* string strings
"""
_IO_INFO = "1 string values; 2 string shapes; 3 string types"


@dataclass(frozen=True, slots=True)
class Proto:
    """One schema: messages by name, enumerations by name, and where the metadata frame came in."""

    syntax: str
    messages: Mapping[str, str]
    node_types: Sequence[str]
    comm_types: Sequence[str]
    attribute_types: Sequence[str] = ()
    has_metadata: bool = False


def _old(attribute: str, types: str, node_types: Sequence[str], comm: Sequence[str], **more: Any) -> Proto:
    messages = {"AttributeProto": attribute, "Node": _NODE_002}
    if more.get("has_metadata"):
        messages["GlobalMetadata"] = "1* AttributeProto attribute"
    return Proto("proto2", messages, node_types, comm, types.split(), **more)


_T3, _T5 = "b f i s bools floats ints strings", "b f u i s bools floats uints ints strings"
_BROADCAST = [*_COMM_002, "BROADCAST"]
OLD_VERSIONS: dict[str, Proto] = {
    "0.0.1": Proto("proto2", {"Node": _NODE_001}, _TYPES, _COMM_001),
    "0.0.2": _old(_ATTRIBUTE_002, "f i s floats ints strings", _TYPES, _COMM_002),
    "0.0.3-2023-07-07": _old(_ATTRIBUTE_003, _T3, _TYPES_003, _COMM_002),
    "0.0.3-2023-08-02": _old(_ATTRIBUTE_003, _T3, _TYPES_003, _COMM_002, has_metadata=True),
    "0.0.3-2023-08-05": _old(_ATTRIBUTE_003_UINT, _T5, _TYPES_003, _COMM_002, has_metadata=True),
    "0.0.3-2023-08-07": _old(_ATTRIBUTE_003_UINT, _T5, _TYPES_003, _BROADCAST, has_metadata=True),
}
_KINDS_004 = [
    "double",
    "float",
    "int32",
    "int64",
    "uint32",
    "uint64",
    "sint32",
    "sint64",
    "fixed32",
    "fixed64",
    "sfixed32",
    "sfixed64",
    "bool",
    "string",
    "bytes",
]


def _proto_004(metadata: str) -> Proto:
    values = [f"{3 + 2 * place} {kind} {kind}_val" for place, kind in enumerate(_KINDS_004)]
    lists = [f"{4 + 2 * place} {kind.title()}List {kind}_list" for place, kind in enumerate(_KINDS_004)]
    messages = {f"{kind.title()}List": f"1* {kind} values" for kind in _KINDS_004}
    messages["AttributeProto"] = ";".join(["1 string name", "2 string doc_string", *values, *lists])
    messages |= {"IOInfo": _IO_INFO, "Node": _NODE_004, "GlobalMetadata": metadata}
    return Proto("proto3", messages, _TYPES_003, _COMM_004, has_metadata=True)


_VERSIONS = {
    **OLD_VERSIONS,
    "0.0.4-2023-10-10": _proto_004("1* AttributeProto attr"),
    "0.0.4": _proto_004("1 string version; 2* AttributeProto attr"),
}


@cache
def classes(version: str, *, packed: bool = False) -> dict[str, Any]:
    """Message classes of one schema, in a pool of their own; ``packed`` asks for packed lists in proto2."""
    proto = _VERSIONS[version]
    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="et", syntax=proto.syntax)
    for name, members in (
        ("NodeType", proto.node_types),
        ("MemoryType", ["INVALID", "LOCAL", "REMOTE"]),
        ("CommType", proto.comm_types),
        ("AttributeType", proto.attribute_types or ["NONE"]),
    ):
        enum = file.enum_type.add(name=name)
        for number, member in enumerate(members):
            enum.value.add(name=f"{name}_{member.replace('-', 'NO')}", number=number)
    for name, text in proto.messages.items():
        message = file.message_type.add(name=name)
        is_oneof = name == "AttributeProto" and proto.syntax == "proto3"
        if is_oneof:
            message.oneof_decl.add(name="value")
        for line in text.split(";"):
            _add_field(message, line.strip(), oneof=is_oneof, packed=packed)
    pool: Any = descriptor_pool.DescriptorPool()
    pool.Add(file)
    make: Any = message_factory.GetMessageClass
    return {name: make(pool.FindMessageTypeByName(f"et.{name}")) for name in proto.messages}


def _add_field(message: Any, line: str, *, oneof: bool, packed: bool) -> None:
    match = re.fullmatch(r"(\d+)([!*]?) (\w+) (\w+)", line)
    assert match, line
    number, mark, kind, name = match.groups()
    entry = message.field.add(name=name, number=int(number))
    entry.label = {"!": entry.LABEL_REQUIRED, "*": entry.LABEL_REPEATED}.get(mark, entry.LABEL_OPTIONAL)
    if kind.endswith("Type"):
        entry.type, entry.type_name = entry.TYPE_ENUM, f".et.{kind}"
    elif kind[0].isupper():
        entry.type, entry.type_name = entry.TYPE_MESSAGE, f".et.{kind}"
    else:
        entry.type = entry.Type.Value(f"TYPE_{kind.upper()}")
    if oneof and int(number) > 2:
        entry.oneof_index = 0
    if packed and mark == "*" and kind not in ("string", "bytes") and not kind[0].isupper():
        entry.options.packed = True


@dataclass(frozen=True, slots=True)
class Logical:
    """A node as what it means. Attribute values are bool, int, float, str or lists of them; ``comm_type`` is
    a name. ``texts`` are the six of inputs and outputs.
    """

    id: int
    name: str
    kind: str
    deps: tuple[int, ...] = ()
    micros: int = 0
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    texts: tuple[str, ...] = ()


_CANONICAL = {
    "is_cpu_op": "bool",
    "comm_type": "int64",
    "comm_size": "int64",
    "comm_src": "int32",
    "comm_dst": "int32",
    "comm_tag": "int32",
    "num_ops": "int64",
    "tensor_size": "uint64",
    "stream": "int64",
    "communicator_id": "uint32",
    "comm_priority": "int32",
    "tensor_loc": "uint32",
    "input_tensor_loc": "uint32",
    "input_tensor_size": "uint64",
    "output_tensor_loc": "uint32",
    "output_tensor_size": "uint64",
}
_NATURAL: dict[type, str] = {bool: "bool", int: "int64", float: "float", str: "string", bytes: "bytes"}
_LETTERS: dict[type, str] = {bool: "b", int: "i", float: "f", str: "s", bytes: "s"}


def framed(*messages: bytes) -> bytes:
    """Messages with their lengths before them."""
    return b"".join(_varint(len(message)) + message for message in messages)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def encode(
    version: str,
    nodes: Sequence[Logical],
    metadata: Mapping[str, Any] | None = None,
    *,
    packed: bool = False,
    label: str = "0.0.4",
) -> bytes:
    """A whole file. ``metadata`` attributes are written where the schema has them; None: no metadata frame in
    proto2.
    """
    proto, made = _VERSIONS[version], classes(version, packed=packed)
    write = {"0.0.1": _node_001}.get(version, _node_002 if proto.syntax == "proto2" else _node_004)
    messages = [write(made, proto, node).SerializeToString() for node in nodes]
    if proto.has_metadata and (metadata is not None or proto.syntax == "proto3"):
        entries = [_attribute(proto, name, value) for name, value in (metadata or {}).items()]
        if proto.syntax == "proto2":
            head = made["GlobalMetadata"](attribute=entries)
        else:
            named = {"version": label} if version == "0.0.4" else {}
            head = made["GlobalMetadata"](attr=entries, **named)
        messages.insert(0, head.SerializeToString())
    return framed(*messages)


def _node_001(made: dict[str, Any], proto: Proto, node: Logical) -> Any:
    attrs = dict(node.attrs)
    if "comm_type" in attrs:
        attrs["comm_type"] = proto.comm_types.index(attrs["comm_type"])
    if node.micros:
        attrs["simulated_run_time"] = node.micros
    number = proto.node_types.index(node.kind)
    return made["Node"](id=node.id, name=node.name, node_type=number, parent=node.deps, **attrs)


_TEXTS = ("inputs", "input_shapes", "input_types", "outputs", "output_shapes", "output_types")


def _node_002(made: dict[str, Any], proto: Proto, node: Logical) -> Any:
    message = made["Node"](
        id=node.id, name=node.name, type=proto.node_types.index(node.kind), parent=node.deps
    )
    for name, text in zip(_TEXTS, node.texts, strict=False):
        setattr(message, name, text)
    attrs = dict(node.attrs)
    if node.micros:
        attrs["runtime"] = node.micros
    for name, value in attrs.items():
        message.attribute.add(**_attribute(proto, name, value))
    return message


_Scalar = bool | int | float | str | bytes


def _attribute(proto: Proto, name: str, value: _Scalar | list[_Scalar]) -> dict[str, Any]:
    """One attribute as keyword arguments: of the declared type it has in proto2, or of its type in 0.0.4."""
    many = isinstance(value, list)
    entries = value if isinstance(value, list) else [value]
    if name == "comm_type":
        entries = [proto.comm_types.index(str(entry)) for entry in entries]
    kind = type(entries[0])
    has_bools = proto.syntax == "proto3" or "b" in proto.attribute_types
    if kind is bool and not has_bools:
        kind, entries = int, [int(entry) for entry in entries]
    if proto.syntax == "proto3":
        natural = _CANONICAL.get(name, _NATURAL[kind])
        field = {f"{natural}_list": {"values": entries}} if many else {f"{natural}_val": entries[0]}
        return {"name": name, **field}
    where = _LETTERS[kind]
    if many:
        where = {"b": "bools", "i": "ints", "f": "floats", "s": "strings"}[where]
    if where == "strings" and not has_bools:
        entries = [str(entry).encode() for entry in entries]
    declared = proto.attribute_types.index(where)
    return {"name": name, "type": declared, where: entries if many else entries[0]}


def _node_004(made: dict[str, Any], proto: Proto, node: Logical) -> Any:
    message = made["Node"](
        id=node.id,
        name=node.name,
        type=proto.node_types.index(node.kind),
        data_deps=node.deps,
        duration_micros=node.micros,
        attr=[_attribute(proto, name, value) for name, value in node.attrs.items()],
    )
    for owner, texts in (("inputs", node.texts[:3]), ("outputs", node.texts[3:])):
        for name, text in zip(("values", "shapes", "types"), texts, strict=False):
            if any(texts):
                setattr(getattr(message, owner), name, text)
    return message


def graph_nodes() -> list[Logical]:
    """A program that every schema can say."""
    return [
        Logical(0, "load", "MEM_LOAD", attrs={"tensor_size": 1 << 20}),
        Logical(1, "gemm", "COMP", (0,), 17, {"num_ops": 1 << 33, "tensor_size": 3 << 20}),
        Logical(
            2,
            "reduce",
            "COLL",
            (1,),
            attrs={"comm_type": "ALL_REDUCE", "comm_size": 4096, "involved_dim": [True, True, False]},
        ),
        Logical(3, "gather", "COLL", (1,), attrs={"comm_type": "ALL_GATHER", "comm_size": 64}),
        Logical(4, "exchange", "COLL", (3, 2), attrs={"comm_type": "ALL_TO_ALL", "comm_size": 128}),
        Logical(5, "scatter", "COLL", (4,), attrs={"comm_type": "REDUCE_SCATTER", "comm_size": 256}),
        Logical(
            6, "send", "SEND", (5,), attrs={"comm_size": 512, "comm_src": 0, "comm_dst": 1, "comm_tag": 7}
        ),
        Logical(
            7, "receive", "RECV", (5,), attrs={"comm_size": 512, "comm_src": 1, "comm_dst": 0, "comm_tag": 8}
        ),
        Logical(300, "store", "MEM_STORE", (6, 7), 3, {"tensor_size": 1 << 20}),
        Logical(301, "nothing", "INVALID"),
    ]


def rich_nodes(version: str = "0.0.3") -> list[Logical]:
    """A program with texts and attributes of every type that 0.0.2 or the revisions of 0.0.3 can say."""
    texts = ("[1, 'x']", "[[16, 128], []]", "['Tensor(float)', 'Int']", "[2]", "[[16]]", "['Tensor(long)']")
    flag = {"is_cpu_op": False}
    values = {
        "rf_id": -5,
        "weight": 0.5,
        "op_schema": "aten::mm(Tensor self) -> Tensor",
        "strides": [1, -128, 1 << 40],
        "scales": [0.25, -2.0],
        "labels": ["a", "bc", ""],
    }
    nodes = [
        Logical(1, "aten::mm", "COMP", (), 12, {**flag, **values}, texts),
        Logical(2, "nccl", "COLL", (1,), 0, {**flag, "comm_type": "ALL_GATHER", "comm_size": 99, "tid": 3}),
        Logical(5, "only outputs", "COMP", (1, 2), 0, flag, ("", "", "", "[3]", "[[1]]", "['Int']")),
    ]
    if version == "0.0.2":
        return nodes
    more = {"traced": True, "mask": [True, False], "is_root": False}
    return [*nodes, Logical(9, "setup", "METADATA", (), 0, more), *_broadcast(version)]


def _broadcast(version: str) -> list[Logical]:
    if version != "0.0.3-2023-08-07":
        return []
    attrs = {"is_cpu_op": False, "comm_type": "BROADCAST", "comm_size": 7}
    return [Logical(10, "nccl:broadcast", "COLL", (5,), 0, attrs)]
