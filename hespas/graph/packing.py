"""Workloads as bytes for another process of the same version of Hespas.

The bytes hold the columns and plain values only. Unpacking builds only the classes in :data:`_CLASSES`, so
bytes of a process that reads hostile input are safe to unpack. Files use the op-graph formats instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import RaggedArray, StringTable, TensorTypes
from hespas.graph.groups import ExplicitGroups, Permutation, StridedGroups
from hespas.graph.opgraph import (
    CollectiveTable,
    ContractionTable,
    ExtraTable,
    OpGraph,
    P2pTable,
    RegionTable,
)
from hespas.graph.workload import Workload

__all__ = ["pack", "unpack"]

_CLASSES: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (
        Workload, OpGraph, StringTable, RaggedArray, TensorTypes, CollectiveTable, P2pTable, ContractionTable,
        RegionTable, ExtraTable, StridedGroups, ExplicitGroups, Permutation,
    )
}  # fmt: skip


def pack(workload: Workload) -> bytes:
    """Return the bytes of a workload. Columns that share memory are stored once. O(size)."""
    packer = _Packer()
    value = packer.packed(workload)
    return msgspec.msgpack.encode((packer.arrays, value))


def unpack(data: bytes) -> Workload:
    """Return the workload that :func:`pack` converted to ``data``. Its columns are read-only views of
    ``data``.

    Raises ``ValueError`` for other bytes, ``InvariantError`` for columns that contradict each other.
    """
    try:
        stored, value = msgspec.msgpack.decode(data)
        workload = _unpacked(value, [_array(*entry) for entry in stored])
    except (TypeError, LookupError, AttributeError, msgspec.DecodeError) as error:
        raise ValueError(f"not a packed workload: {error}") from error
    if not isinstance(workload, Workload):
        raise ValueError("not a packed workload")
    return workload


class _Packer:
    """Converter of a workload to nested plain values. Arrays are collected in a separate list and referred to
    by number.
    """

    def __init__(self) -> None:
        self.arrays: list[tuple[str, tuple[int, ...], bool, memoryview]] = []
        self._numbers: dict[int, int] = {}

    def packed(self, value: object) -> object:
        """Return a scalar unchanged, and any other value as a pair of its kind and content."""
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str):
            return "text", value.encode("utf-8", "surrogatepass")
        if isinstance(value, bytes | memoryview):
            return "bytes", bytes(cast("bytes | memoryview[int]", value))
        if isinstance(value, np.ndarray):
            array = cast("NDArray[Any]", value)
            if id(array) not in self._numbers:
                self._numbers[id(array)] = len(self.arrays)
                is_constant = array.strides == (0,) and len(array) > 0
                content = np.ascontiguousarray(array[:1] if is_constant else array)
                self.arrays.append((array.dtype.str, array.shape, is_constant, content.data.cast("B")))
            return "array", self._numbers[id(array)]
        if isinstance(value, tuple):
            return "tuple", [self.packed(item) for item in cast("tuple[object, ...]", value)]
        if isinstance(value, Mapping):
            items = cast("Mapping[object, object]", value).items()
            return "mapping", [(self.packed(key), self.packed(item)) for key, item in items]
        parts = {
            field.name: self.packed(getattr(value, field.name))
            for field in fields(cast("Any", value))
            if field.init
        }
        return type(value).__name__, parts


def _array(dtype: str, shape: list[int], is_constant: bool, content: bytes) -> NDArray[Any]:
    values = np.frombuffer(content, np.dtype(dtype))
    return np.broadcast_to(values, shape) if is_constant else values.reshape(shape)


def _unpacked(value: object, arrays: Sequence[NDArray[Any]]) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = cast("tuple[str, Any]", value)
    match kind:
        case "text":
            return content.decode("utf-8", "surrogatepass")
        case "bytes":
            return content
        case "array":
            return arrays[int(content)]
        case "tuple":
            return tuple(_unpacked(item, arrays) for item in content)
        case "mapping":
            return {_unpacked(key, arrays): _unpacked(item, arrays) for key, item in content}
        case _:
            return _CLASSES[kind](**{name: _unpacked(item, arrays) for name, item in content.items()})
