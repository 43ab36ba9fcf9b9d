"""The JSON of a host execution trace, by schema (``execution_trace_observer.cpp`` of PyTorch).

Source: https://github.com/pytorch/pytorch.
Schema 1.0.1 has flat nodes; from 1.0.2 on nodes have Chakra's layout, with ``ctrl_deps`` the call-stack
parent. Either becomes an :class:`EtNode`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

import msgspec

from hespas.converters.pytorch import ET_SCHEMAS
from hespas.files.streams import read_bytes
from hespas.graph.errors import FormatError, UnsupportedError

__all__ = [
    "COMMUNICATION_RECORD",
    "SCHEMAS",
    "EtNode",
    "Tensor",
    "Values",
    "argument",
    "is_list",
    "mutated_arguments",
    "read_et",
    "storages_of",
    "tensors_of",
]

_LARGEST = (1 << 63) - 1
COMMUNICATION_RECORD = "record_param_comms"


class Values(msgspec.Struct, gc=False):
    """Arguments or results: what they are, their shapes, the names of their types, and their strides."""

    values: list[Any] = msgspec.field(default_factory=list[Any])
    shapes: list[Any] = msgspec.field(default_factory=list[Any])
    types: list[str] = msgspec.field(default_factory=list[str])
    strides: msgspec.Raw = msgspec.Raw(b"")


class EtNode(NamedTuple):
    """One operation of the host. ``parent`` is the id of the call around it, ``facts`` what a record of
    communication states by name.
    """

    id: int
    name: str
    parent: int
    rf_id: int
    thread: int
    sequence: int
    op_schema: str
    inputs: Values
    outputs: Values
    facts: Mapping[str, str]


class _EtFile(NamedTuple):
    """A trace, with its nodes still to be decoded."""

    schema: str
    process: str
    nodes: Iterator[EtNode]


class _File(msgspec.Struct):
    schema: str = ""
    pid: int | str | None = None
    nodes: list[msgspec.Raw] | None = None


class _FlatNode(msgspec.Struct, gc=False):
    id: int
    name: str
    parent: int = 0
    rf_id: int = 0
    seq_id: int = -1
    tid: int = 0
    op_schema: str = ""
    inputs: list[Any] = msgspec.field(default_factory=list[Any])
    input_shapes: list[Any] = msgspec.field(default_factory=list[Any])
    input_types: list[str] = msgspec.field(default_factory=list[str])
    outputs: list[Any] = msgspec.field(default_factory=list[Any])
    output_shapes: list[Any] = msgspec.field(default_factory=list[Any])
    output_types: list[str] = msgspec.field(default_factory=list[str])


class _Attribute(msgspec.Struct, gc=False):
    name: str
    value: msgspec.Raw = msgspec.Raw(b"")


class _ChakraNode(msgspec.Struct, gc=False):
    id: int
    name: str
    ctrl_deps: int | list[int] | None = None
    inputs: Values = msgspec.field(default_factory=Values)
    outputs: Values = msgspec.field(default_factory=Values)
    attrs: list[_Attribute] = msgspec.field(default_factory=list[_Attribute])


_FLAT = msgspec.json.Decoder(_FlatNode)
_CHAKRA = msgspec.json.Decoder(_ChakraNode)
_TEXT = msgspec.json.Decoder(str)
_NOTHING: Mapping[str, str] = MappingProxyType({})


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether a recorded value is a list."""
    return type(value) is list


def _flat(raw: msgspec.Raw) -> EtNode:
    node = _FLAT.decode(raw)
    inputs = Values(node.inputs, node.input_shapes, node.input_types)
    outputs = Values(node.outputs, node.output_shapes, node.output_types)
    numbers = _fitting(node.rf_id, 0), _fitting(node.tid, 0), _fitting(node.seq_id, -1)
    return EtNode(node.id, node.name, node.parent, *numbers, node.op_schema, inputs, outputs, _NOTHING)


def _chakra(raw: msgspec.Raw) -> EtNode:
    node = _CHAKRA.decode(raw)
    parent = node.ctrl_deps
    if isinstance(parent, list):
        parent = parent[0] if parent else 0
    known = {"rf_id": 0, "tid": 0, "seq_id": -1}
    schema = ""
    for attribute in node.attrs:
        if attribute.name in known:
            known[attribute.name] = _integer(bytes(attribute.value), known[attribute.name])
        elif attribute.name == "op_schema":
            schema = _text(attribute.value)
    facts = _NOTHING
    if node.name == COMMUNICATION_RECORD:
        facts = {attribute.name: _text(attribute.value) for attribute in node.attrs}
    numbers = parent or 0, known["rf_id"], known["tid"], known["seq_id"]
    return EtNode(node.id, node.name, *numbers, schema, node.inputs, node.outputs, facts)


def _integer(text: bytes, default: int) -> int:
    try:
        return _fitting(int(text.strip(b'" ')), default)
    except ValueError:
        return default


def _fitting(value: int, default: int) -> int:
    return value if -_LARGEST <= value <= _LARGEST else default


def _text(raw: msgspec.Raw) -> str:
    """A value as text: a string without its quotes, anything else as JSON writes it."""
    text = bytes(raw)
    return _TEXT.decode(text) if text.startswith(b'"') else text.decode("utf-8", "replace")


SCHEMAS: MappingProxyType[str, Callable[[msgspec.Raw], EtNode]] = MappingProxyType(
    {schema: _chakra if "chakra" in schema else _flat for schema in ET_SCHEMAS}
)
"""Schema -> how its nodes are decoded, oldest first."""


def read_et(path: Path, max_bytes: int, version: str = "") -> _EtFile:
    """Read the frame of a trace. ``version`` names the schema where the file has none or another.

    Raises ``FormatError`` for what is no such trace, ``UnsupportedError`` for a schema that is not known;
    so does taking nodes.
    """
    data = read_bytes(path, max_bytes)
    try:
        found = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"no execution trace: {error}",
            path=str(path),
            position="the document",
            hint="was the observer stopped before the program ended?",
        ) from error
    if found.nodes is None:
        raise FormatError(
            "no execution trace: there is no list 'nodes'",
            path=str(path),
            position="the document",
            hint="export it with torch.profiler.ExecutionTraceObserver",
        )
    schema = version or found.schema
    decode = SCHEMAS.get(schema)
    if decode is None:
        raise UnsupportedError(
            f"execution trace of schema {schema[:40]!r}; known are {', '.join(SCHEMAS)}",
            path=str(path),
            position="field 'schema'",
            hint="name the nearest one with `source_version`",
        )
    nodes = _nodes(found.nodes, decode, str(path))
    return _EtFile(schema, "" if found.pid is None else str(found.pid), nodes)


def _nodes(
    raws: Sequence[msgspec.Raw], decode: Callable[[msgspec.Raw], EtNode], path: str
) -> Iterator[EtNode]:
    """Nodes in the order of the file, decoded one at a time."""
    for place, raw in enumerate(raws):
        try:
            node = decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FormatError(
                f"no operation: {error}", path=path, position=f"nodes[{place}]", hint="export the trace again"
            ) from error
        if not (0 <= node.id <= _LARGEST and 0 <= node.parent <= _LARGEST):
            raise FormatError(
                "the id of an operation does not fit 63 bits",
                path=path,
                position=f"nodes[{place}]",
                hint="export the trace again",
            )
        yield node


# Tensors among the recorded values of an operation: which storage, how many bytes, what type.
#
# A tensor is written as ``[tensor, storage, offset, elements, element bytes, device]``, its shape beside it,
# its element type as ``Tensor(float)``; lists of tensors nest.

_TENSOR_TYPE = re.compile(r"Tensor\(([^()]*)\)")
_MOST_BYTES = 1 << 62
_FIELDS = 6


class Tensor(NamedTuple):
    """One tensor; ``shape`` is None where it is not recorded, or not possible."""

    storage: int
    bytes: int
    dtype: str
    shape: tuple[int, ...] | None


def _is_tensor(value: list[Any]) -> bool:
    return (
        len(value) == _FIELDS
        and type(value[5]) is str
        and type(value[1]) is int
        and type(value[3]) is int
        and type(value[4]) is int
    )


def _tensor(value: list[Any], shape: object, dtype: str) -> Tensor:
    size = value[3] * value[4]
    extents = _shape(shape)
    return Tensor(value[1], size if 0 <= size < _MOST_BYTES else 0, dtype, extents)


def _shape(shape: object) -> tuple[int, ...] | None:
    if not is_list(shape) or len(shape) > 64:
        return None
    if not all(type(extent) is int and 0 <= extent < _MOST_BYTES for extent in shape):
        return None
    return tuple(shape) if prod(shape) < _MOST_BYTES else None


def _item(values: Sequence[Any], place: int) -> object:
    return values[place] if place < len(values) else None


def argument(values: Values, place: int) -> list[Tensor]:
    """The tensors of one argument, in order, however lists nest."""
    if not 0 <= place < len(values.values):
        return []
    value = values.values[place]
    kind = values.types[place] if place < len(values.types) else ""
    if not is_list(value) or not value:
        return []
    if _is_tensor(value):
        return [_tensor(value, _item(values.shapes, place), kind[7:-1] if kind.startswith("Tensor(") else "")]
    return _nested(value, _item(values.shapes, place), kind) if "Tensor" in kind else []


def _nested(value: list[Any], shape: object, kind: str) -> list[Tensor]:
    dtypes = _TENSOR_TYPE.findall(kind)
    found: list[Tensor] = []
    stack: list[tuple[object, object]] = [(value, shape)]
    while stack:
        inner, extents = stack.pop()
        if not is_list(inner):
            continue
        if _is_tensor(inner):
            found.append(_tensor(inner, extents, dtypes[len(found)] if len(found) < len(dtypes) else ""))
            continue
        shapes = extents if is_list(extents) and len(extents) == len(inner) else [None] * len(inner)
        stack.extend(zip(reversed(inner), reversed(shapes), strict=True))
    return found


def tensors_of(values: Values) -> list[Tensor]:
    """All tensors of all arguments."""
    return [tensor for place in range(len(values.values)) for tensor in argument(values, place)]


@cache
def mutated_arguments(op_schema: str, name: str) -> frozenset[int]:
    """The places of arguments that an operation changes: marked ``!`` in its schema; without a schema, the
    first of an operation whose name ends in ``_``.
    """
    if "(" not in op_schema:
        return frozenset({0}) if name.endswith("_") and not name.endswith("__") else frozenset()
    depth, place = 0, 0
    found: set[int] = set()
    for character in op_schema[op_schema.index("(") :]:
        depth += (character in "([") - (character in ")]")
        if depth == 0:
            break
        if character == "," and depth == 1:
            place += 1
        elif character == "*" and depth == 1:  # what follows is passed by name; the mark is no argument
            place -= 1
        elif character == "!":
            found.add(place)
    return frozenset(found)


def storages_of(
    inputs: Values, outputs: list[Tensor], changed: frozenset[int]
) -> tuple[list[int], list[int]]:
    """Storages an operation reads and writes. A result that shares its storage with an argument is a view,
    and what makes nothing but views touches no data.
    """
    reads: dict[int, None] = {}
    writes: dict[int, None] = {}
    for place in range(len(inputs.values)):
        for tensor in argument(inputs, place):
            reads[tensor.storage] = None
            if place in changed:
                writes[tensor.storage] = None
    for tensor in outputs:
        if tensor.storage not in reads:
            writes[tensor.storage] = None
    only_views = bool(outputs) and not writes
    return [] if only_views else list(reads), list(writes)
