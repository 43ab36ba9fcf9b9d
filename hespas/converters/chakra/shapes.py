"""Tensor types as ``IOInfo`` text and back: shapes ``[[16, 128]]``, types ``["bf16"]``, values ``[]``.

What a type says beside its element type stands behind that: ``f32{1,0}`` has the layout ``1,0``, the extents
of ``f32<=`` are upper bounds, ``i8+64B`` takes 64 bytes more than its elements and ``i8-64B`` as many fewer.

The texts are JSON and, as Chakra's readers want them, Python literals. Texts of other tools are kept
verbatim.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from math import isfinite, nan, prod
from typing import NamedTuple

import numpy as np

from hespas.converters.chakra.columns import ByteRows, IoColumns
from hespas.converters.chakra.spans import Longs
from hespas.graph import (
    DYNAMIC,
    Csr,
    DType,
    OpGraph,
    StringTableBuilder,
    TensorTypes,
    TensorTypesBuilder,
    find_dtype,
)

__all__ = ["TypeTexts", "nodes_of_odd_sizes", "parse_io", "type_texts"]

_VALUES = b"[]"
_TYPE = re.compile(r"([A-Za-z0-9_]*(?:<f[0-9]+>)?)(?:\{(.+)\})?(<=)?(?:([+-][1-9][0-9]{0,15})B)?", re.DOTALL)
_MOST_EXTRA_BYTES = 10**16
_MAX_TEXT = 1 << 16
"""A longer text is no list of shapes of ours; it is not parsed."""


class TypeTexts(NamedTuple):
    """Shapes and types of one list of tensors."""

    shapes: bytes
    types: bytes


def _shape_text(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


class _Type(NamedTuple):
    """A tensor type beside its shape."""

    element: DType | None
    encoding: str = ""
    bounded: bool = False
    extra_bytes: int = 0

    def text(self) -> str:
        """The type as JSON text."""
        text = self.element.name if self.element else ""
        text += f"{{{self.encoding}}}" if self.encoding else ""
        text += "<=" if self.bounded else ""
        text += f"{self.extra_bytes:+}B" if self.extra_bytes else ""
        return json.dumps(text)

    @classmethod
    def parse(cls, text: str) -> _Type | None:
        """The type that a text says, None where it is not of this form or names no known element type."""
        match = _TYPE.fullmatch(text)
        if match is None:
            return None
        name, encoding, bounded, extra = match.groups()
        element = find_dtype(name) if name else None
        if name and element is None:
            return None
        return cls(element, encoding or "", bool(bounded), int(extra or 0))


def _joined(spelled: Sequence[tuple[str, str]]) -> TypeTexts:
    """The texts of a list of tensors from those of its members."""
    shapes = ", ".join([shape for shape, _ in spelled])
    names = ", ".join([name for _, name in spelled])
    return TypeTexts(f"[{shapes}]".encode(), f"[{names}]".encode())


def type_texts(graph: OpGraph, operands: Csr) -> IoColumns:
    """The ``IOInfo`` of all nodes that have operands (or results)."""
    nodes = np.flatnonzero(operands.lengths)
    lists = operands.values.astype(np.int32, copy=False).tobytes()
    start: list[int] = (operands.offsets[nodes] * 4).tolist()
    end: list[int] = (operands.offsets[nodes + 1] * 4).tolist()
    keys = list(map(lists.__getitem__, map(slice, start, end)))
    distinct = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    which = np.fromiter(map(distinct.__getitem__, keys), np.int64, len(keys))
    spelled = {row: _spelled(graph, row) for row in set(operands.values.tolist())}
    lists_of = [np.frombuffer(key, np.int32).tolist() for key in distinct]
    texts = [_joined([spelled[row] for row in rows]) for rows in lists_of]
    return IoColumns(
        nodes,
        ByteRows.from_rows([_VALUES]).take(np.zeros(len(nodes), np.int64)),
        ByteRows.from_rows([text.shapes for text in texts]).take(which),
        ByteRows.from_rows([text.types for text in texts]).take(which),
    )


def nodes_of_odd_sizes(graph: OpGraph) -> int:
    """Nodes whose tensors have a size that the texts do not bring back: one of an unknown shape, none of a
    known one, or parts of a byte.
    """
    types = graph.types
    back = np.array([_size_read(types, row) for row in range(len(types))], np.float64)
    is_odd = (types.bytes != back) & ~(np.isnan(types.bytes) & np.isnan(back))
    if not is_odd.any():
        return 0
    odd = np.zeros(len(graph), np.bool_)
    for rows in (graph.operands, graph.results):
        odd[np.repeat(np.arange(len(graph)), rows.lengths)[is_odd[rows.values]]] = True
    return int(odd.sum())


def _size_read(types: TensorTypes, row: int) -> float:
    """The size that is read where the type of ``row`` was written."""
    element, shape, size = types.dtype_of(row), types.shape(row), float(types.bytes[row])
    if element is None or DYNAMIC in shape:
        return nan
    elements = element.storage_bytes(prod(shape))
    extra = int(size - elements) if isfinite(size) else 0
    return float(elements + extra) if abs(extra) < _MOST_EXTRA_BYTES else nan


def _spelled(graph: OpGraph, row: int) -> tuple[str, str]:
    """Shape and type of one tensor type."""
    types = graph.types
    shape, element = types.shape(row), types.dtype_of(row)
    size = float(types.bytes[row])
    elements = element.storage_bytes(prod(shape)) if element and isfinite(size) else size
    extra = int(size - elements) if isfinite(size) else 0
    told = _Type(element, graph.strings[int(types.encoding[row])], bool(types.bounded[row]), extra)
    return _shape_text(shape), told.text()


def _fits(told: _Type, shape: Sequence[int]) -> bool:
    """Whether bytes beside the elements, or fewer than them, stand for a size that there can be."""
    if not told.extra_bytes:
        return True
    if told.element is None or DYNAMIC in shape:
        return False
    return told.element.storage_bytes(prod(shape)) + told.extra_bytes >= 0


class _Parser:
    """Texts already seen are not parsed again."""

    def __init__(self, types: TensorTypesBuilder, strings: StringTableBuilder) -> None:
        self.types = types
        self.strings = strings
        self.known: dict[tuple[bytes, bytes], tuple[int, ...] | None] = {}

    def rows(self, shapes: bytes, types: bytes) -> tuple[int, ...] | None:
        """Type rows of two texts, None where they are not ours."""
        key = (shapes, types)
        if key not in self.known:
            self.known[key] = self._parse(shapes, types)
        return self.known[key]

    def _parse(self, shapes: bytes, types: bytes) -> tuple[int, ...] | None:
        if max(len(shapes), len(types)) > _MAX_TEXT:
            return None
        import msgspec

        try:
            extents = msgspec.json.decode(shapes, type=list[list[int]])
            names = msgspec.json.decode(types, type=list[str])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        told = [_Type.parse(name) for name in names]
        known = [each for each in told if each is not None]
        negative = any(extent < -1 or extent > 1 << 62 for shape in extents for extent in shape)
        if len(known) != len(told) or negative or len(extents) != len(names) or not extents:
            return None
        if not all(_fits(each, shape) for each, shape in zip(known, extents, strict=True)):
            return None
        spelled = [(_shape_text(shape), each.text()) for shape, each in zip(extents, known, strict=True)]
        if _joined(spelled) != TypeTexts(shapes, types):
            return None
        return tuple(self._row(each, shape) for each, shape in zip(known, extents, strict=True))

    def _row(self, told: _Type, shape: Sequence[int]) -> int:
        return self.types.add(
            told.element,
            shape,
            encoding=self.strings.add(told.encoding),
            bounded=told.bounded,
            extra_bytes=told.extra_bytes,
        )


def parse_io(
    io: IoColumns, nodes: int, types: TensorTypesBuilder, strings: StringTableBuilder
) -> tuple[Csr, Longs]:
    """Type rows per node, and which rows of ``io`` are not of this form and must be kept as they are."""
    if not len(io):
        return Csr.empty(nodes), np.empty(0, np.int64)
    parser = _Parser(types, strings)
    foreign: list[int] = []
    lengths = np.zeros(nodes, np.int64)
    flat: list[int] = []
    owners: list[int] = io.node.tolist()
    for row, (owner, value, shapes, names) in enumerate(
        zip(owners, io.values, io.shapes, io.types, strict=True)
    ):
        found = parser.rows(shapes, names) if value == _VALUES else None
        if found is None:
            foreign.append(row)
            continue
        lengths[owner] = len(found)
        flat.extend(found)
    return Csr.from_lengths(lengths, np.array(flat, np.int32)), np.array(foreign, np.int64)
