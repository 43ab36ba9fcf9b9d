"""JSON of host execution traces, by schema (``execution_trace_observer.cpp`` of PyTorch).

Source: https://github.com/pytorch/pytorch. Schema 1.0.1 has flat nodes. From 1.0.2 on nodes have Chakra's
layout, and ``ctrl_deps`` is the call-stack parent. Both become an :class:`EtNode`. A tensor is recorded as
``[tensor, storage, offset, elements, element bytes, device]``; its shape and its element type
(``Tensor(float)``) are separate fields. Lists of tensors nest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
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
    "EtTensor",
    "EtValues",
    "argument",
    "is_list",
    "mutated_arguments",
    "read_et",
    "storages_of",
    "tensors_of",
]

_LARGEST = (1 << 63) - 1
COMMUNICATION_RECORD = "record_param_comms"


class EtValues(msgspec.Struct, gc=False):
    """Arguments or results of a recorded operation: values, shapes, names of types, and strides."""

    values: list[Any] = msgspec.field(default_factory=list[Any])
    shapes: list[Any] = msgspec.field(default_factory=list[Any])
    types: list[str] = msgspec.field(default_factory=list[str])
    strides: msgspec.Raw = msgspec.Raw(b"")


class EtNode(NamedTuple):
    """One host operation of an execution trace. ``parent`` is the id of the enclosing call; ``facts`` are the
    attributes of a communication record.
    """

    id: int
    name: str
    parent: int
    rf_id: int
    thread: int
    sequence: int
    op_schema: str
    inputs: EtValues
    outputs: EtValues
    facts: Mapping[str, str]


class _EtFile(NamedTuple):
    """Execution trace file. ``nodes`` decodes each node when it is requested."""

    schema: str
    process: str
    nodes: Iterator[EtNode]


class _EtDocument(msgspec.Struct):
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


class _NodeAttribute(msgspec.Struct, gc=False):
    name: str
    value: msgspec.Raw = msgspec.Raw(b"")


class _ChakraNode(msgspec.Struct, gc=False):
    id: int
    name: str
    ctrl_deps: int | list[int] | None = None
    inputs: EtValues = msgspec.field(default_factory=EtValues)
    outputs: EtValues = msgspec.field(default_factory=EtValues)
    attrs: list[_NodeAttribute] = msgspec.field(default_factory=list[_NodeAttribute])


_FLAT_NODE = msgspec.json.Decoder(_FlatNode)
_CHAKRA_NODE = msgspec.json.Decoder(_ChakraNode)
_TEXT = msgspec.json.Decoder(str)
_NO_FACTS: Mapping[str, str] = MappingProxyType({})


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Return True if a recorded value is a list."""
    return type(value) is list


def _from_flat_node(raw: msgspec.Raw) -> EtNode:
    node = _FLAT_NODE.decode(raw)
    inputs = EtValues(node.inputs, node.input_shapes, node.input_types)
    outputs = EtValues(node.outputs, node.output_shapes, node.output_types)
    numbers = _fitting(node.rf_id, 0), _fitting(node.tid, 0), _fitting(node.seq_id, -1)
    return EtNode(node.id, node.name, node.parent, *numbers, node.op_schema, inputs, outputs, _NO_FACTS)


def _from_chakra_node(raw: msgspec.Raw) -> EtNode:
    node = _CHAKRA_NODE.decode(raw)
    parent = node.ctrl_deps
    if isinstance(parent, list):
        parent = parent[0] if parent else 0
    numbers = {"rf_id": 0, "tid": 0, "seq_id": -1}
    schema = ""
    for attribute in node.attrs:
        default = numbers.get(attribute.name)
        if default is not None:
            with suppress(ValueError):
                numbers[attribute.name] = _fitting(int(bytes(attribute.value).strip(b'" ')), default)
        elif attribute.name == "op_schema":
            schema = _text(attribute.value)
    facts = _NO_FACTS
    if node.name == COMMUNICATION_RECORD:
        facts = {attribute.name: _text(attribute.value) for attribute in node.attrs}
    ids = parent or 0, numbers["rf_id"], numbers["tid"], numbers["seq_id"]
    return EtNode(node.id, node.name, *ids, schema, node.inputs, node.outputs, facts)


def _fitting(value: int, default: int) -> int:
    return value if -_LARGEST <= value <= _LARGEST else default


def _text(raw: msgspec.Raw) -> str:
    """Return a recorded value as text: a string without its quotes, anything else as JSON."""
    text = bytes(raw)
    return _TEXT.decode(text) if text.startswith(b'"') else text.decode("utf-8", "replace")


SCHEMAS: MappingProxyType[str, Callable[[msgspec.Raw], EtNode]] = MappingProxyType(
    {schema: _from_chakra_node if "chakra" in schema else _from_flat_node for schema in ET_SCHEMAS}
)
"""Decoder of nodes by schema, oldest first."""


def read_et(path: Path, max_bytes: int, version: str = "") -> _EtFile:
    """Read an execution trace of PyTorch. ``version`` names the schema if the file states none or a wrong
    one.

    Raises ``FormatError`` if the file is not such a trace and ``UnsupportedError`` for an unknown schema.
    Iterating over the nodes raises ``FormatError`` for a malformed node.
    """
    data = read_bytes(path, max_bytes)
    try:
        document = msgspec.json.decode(data, type=_EtDocument)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"not an execution trace: {error}",
            path=str(path),
            position="the document",
            hint="record again, and stop the observer before the program ends",
        ) from error
    if document.nodes is None:
        raise FormatError(
            "not an execution trace: the list 'nodes' is missing",
            path=str(path),
            position="the document",
            hint="export it with torch.profiler.ExecutionTraceObserver",
        )
    schema = version or document.schema
    decode = SCHEMAS.get(schema)
    if decode is None:
        raise UnsupportedError(
            f"unknown execution trace schema {schema[:40]!r}; supported: {', '.join(SCHEMAS)}",
            path=str(path),
            position="field 'schema'",
            hint="set `source_version` to the nearest one",
        )
    nodes = _nodes(document.nodes, decode, str(path))
    return _EtFile(schema, "" if document.pid is None else str(document.pid), nodes)


def _nodes(
    raws: Sequence[msgspec.Raw], decode: Callable[[msgspec.Raw], EtNode], path: str
) -> Iterator[EtNode]:
    """Decode the nodes of an execution trace in the order of the file, one at a time."""
    for index, raw in enumerate(raws):
        try:
            node = decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FormatError(
                f"malformed operation: {error}",
                path=path,
                position=f"nodes[{index}]",
                hint="export the trace again",
            ) from error
        if not (0 <= node.id <= _LARGEST and 0 <= node.parent <= _LARGEST):
            raise FormatError(
                f"id {node.id} or parent {node.parent} of an operation does not fit 63 bits",
                path=path,
                position=f"nodes[{index}]",
                hint="export the trace again",
            )
        yield node


_TENSOR_TYPE = re.compile(r"Tensor\(([^()]*)\)")
_MAX_BYTES = 1 << 62
_MAX_DIMENSIONS = 64
_TENSOR_FIELDS = 6


class EtTensor(NamedTuple):
    """One tensor of an operation. ``shape`` is None if it is not recorded or impossible."""

    storage: int
    bytes: int
    dtype: str
    shape: tuple[int, ...] | None


def _is_tensor(value: list[Any]) -> bool:
    return (
        len(value) == _TENSOR_FIELDS
        and type(value[5]) is str
        and type(value[1]) is int
        and type(value[3]) is int
        and type(value[4]) is int
    )


def _tensor(value: list[Any], shape: object, dtype: str) -> EtTensor:
    size = value[3] * value[4]
    extents: tuple[int, ...] | None = None
    if is_list(shape) and len(shape) <= _MAX_DIMENSIONS:
        is_valid = all(type(extent) is int and 0 <= extent < _MAX_BYTES for extent in shape)
        extents = tuple(shape) if is_valid and prod(shape) < _MAX_BYTES else None
    return EtTensor(value[1], size if 0 <= size < _MAX_BYTES else 0, dtype, extents)


def argument(values: EtValues, index: int) -> list[EtTensor]:
    """Return the tensors in argument number ``index`` in order, also those in nested lists."""
    if not 0 <= index < len(values.values):
        return []
    value = values.values[index]
    kind = values.types[index] if index < len(values.types) else ""
    shape: object = values.shapes[index] if index < len(values.shapes) else None
    if not is_list(value) or not value:
        return []
    if _is_tensor(value):
        return [_tensor(value, shape, kind[7:-1] if kind.startswith("Tensor(") else "")]
    if "Tensor" not in kind:
        return []
    dtypes = _TENSOR_TYPE.findall(kind)
    tensors: list[EtTensor] = []
    stack: list[tuple[object, object]] = [(value, shape)]
    while stack:
        inner, extents = stack.pop()
        if not is_list(inner):
            continue
        if _is_tensor(inner):
            tensors.append(
                _tensor(inner, extents, dtypes[len(tensors)] if len(tensors) < len(dtypes) else "")
            )
            continue
        shapes = extents if is_list(extents) and len(extents) == len(inner) else [None] * len(inner)
        stack.extend(zip(reversed(inner), reversed(shapes), strict=True))
    return tensors


def tensors_of(values: EtValues) -> list[EtTensor]:
    """Return all tensors of all arguments."""
    return [tensor for index in range(len(values.values)) for tensor in argument(values, index)]


@cache
def mutated_arguments(op_schema: str, name: str) -> frozenset[int]:
    """Return the indices of the arguments that an operation changes.

    These arguments are marked ``!`` in its schema. Without a schema, the first argument is changed if the
    name ends in ``_``.
    """
    if "(" not in op_schema:
        return frozenset({0}) if name.endswith("_") and not name.endswith("__") else frozenset()
    depth, index = 0, 0
    mutated: set[int] = set()
    for character in op_schema[op_schema.index("(") :]:
        depth += (character in "([") - (character in ")]")
        if depth == 0:
            break
        if character == "," and depth == 1:
            index += 1
        elif character == "*" and depth == 1:  # keyword-only arguments follow; the mark is not an argument
            index -= 1
        elif character == "!":
            mutated.add(index)
    return frozenset(mutated)


def storages_of(
    inputs: EtValues, outputs: list[EtTensor], changed: frozenset[int]
) -> tuple[list[int], list[int]]:
    """Return the storages (memory of tensors) that an operation reads and writes. ``changed`` are the indices
    of inputs that the operation writes.

    A result that shares its storage with an argument is a view. An operation that only makes views reads and
    writes nothing.
    """
    reads: dict[int, None] = {}
    writes: dict[int, None] = {}
    for index in range(len(inputs.values)):
        for tensor in argument(inputs, index):
            reads[tensor.storage] = None
            if index in changed:
                writes[tensor.storage] = None
    for tensor in outputs:
        if tensor.storage not in reads:
            writes[tensor.storage] = None
    only_views = bool(outputs) and not writes
    return [] if only_views else list(reads), list(writes)
