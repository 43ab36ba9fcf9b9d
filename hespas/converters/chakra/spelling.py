"""Texts of tensor types and of contractions in attributes, written and parsed.

Tensor types are ``IOInfo`` texts: shapes ``[[16, 128]]``, types ``["bf16"]``, values ``[]``. Other properties
of a type follow its element type: ``f32{1,0}`` has the layout ``1,0``, ``i8{!quant.uniform<i8:f32, 0.5>}``
is quantised, the extents of ``f32<=`` are upper bounds, ``i8+64B`` takes 64 bytes more than its elements and
``i8-64B`` 64 bytes fewer. The texts are JSON and, as Chakra's readers require, Python literals. Texts of
other tools are preserved verbatim.

Matrix products and convolutions are ``1x128x512x256 bf16*bf16>f32``: the extents batch, M, N and K, then the
element types of both operands and of the accumulator (``?`` unknown). ``flops=``, ``useful=`` and
``products=`` follow if the extents do not imply them. A fusion with several of them separates them by ``;``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from math import isfinite, nan, prod
from typing import Any, NamedTuple

import numpy as np

from hespas.converters.chakra.wire import ByteRows, IoColumns, Longs
from hespas.graph import (
    DTYPES,
    DYNAMIC,
    ContractionTable,
    DType,
    OpGraph,
    RaggedArray,
    StringTableBuilder,
    TensorTypes,
    TensorTypesBuilder,
    find_dtype,
)

__all__ = [
    "LARGEST_EXTENT",
    "TypeTexts",
    "contraction_texts",
    "nodes_of_odd_sizes",
    "parse_contractions",
    "parse_io",
    "type_texts",
]

_VALUES = b"[]"
_TYPE = re.compile(r"([A-Za-z0-9_]*(?:<f[0-9]+>)?)(?:\{(.+)\})?(<=)?(?:([+-][1-9][0-9]{0,15})B)?", re.DOTALL)
_MOST_EXTRA_BYTES = 10**16
_MAX_TEXT = 1 << 24
"""Largest text that is parsed. Scales for each channel of a quantised type take up to 30 characters each."""


class TypeTexts(NamedTuple):
    """Shapes and element types of a list of tensors, as the two texts of an ``IOInfo`` message."""

    shapes: bytes
    types: bytes


def _shape_text(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


class _TensorTypeText(NamedTuple):
    """Tensor type without its shape, as it appears in an ``IOInfo`` text."""

    element: DType | None
    encoding: str = ""
    bounded: bool = False
    extra_bytes: int = 0

    def text(self) -> str:
        """Return the type as JSON text."""
        text = self.element.name if self.element else ""
        text += f"{{{self.encoding}}}" if self.encoding else ""
        text += "<=" if self.bounded else ""
        text += f"{self.extra_bytes:+}B" if self.extra_bytes else ""
        return json.dumps(text)

    @classmethod
    def parse(cls, text: str) -> _TensorTypeText | None:
        """Return the type of a text, None if it is not of this form or names no known element type."""
        match = _TYPE.fullmatch(text)
        if match is None:
            return None
        name, encoding, bounded, extra = match.groups()
        element = find_dtype(name) if name else None
        if name and element is None:
            return None
        return cls(element, encoding or "", bool(bounded), int(extra or 0))


def _joined(spelled: Sequence[tuple[str, str]]) -> TypeTexts:
    """Join the shape and type texts of single tensors to the texts of a list of tensors."""
    shapes = ", ".join([shape for shape, _ in spelled])
    names = ", ".join([name for _, name in spelled])
    return TypeTexts(f"[{shapes}]".encode(), f"[{names}]".encode())


def type_texts(graph: OpGraph, operands: RaggedArray) -> IoColumns:
    """Return the ``IOInfo`` texts of all nodes that have operands (or results, if these are given)."""
    nodes = np.flatnonzero(operands.lengths)
    values = operands.values.astype(np.int32, copy=False)
    bounds = np.append(operands.offsets[nodes], len(values)) * values.itemsize
    distinct, which = ByteRows(values.view(np.uint8), bounds).distinct()
    types = graph.types
    spelled: dict[int, tuple[str, str]] = {}
    for row in set(operands.values.tolist()):
        shape, element, size = types.shape(row), types.dtype_of(row), float(types.bytes[row])
        elements = element.storage_bytes(prod(shape)) if element and isfinite(size) else size
        extra = int(size - elements) if isfinite(size) else 0
        encoding = graph.strings[int(types.encoding[row])]
        text = _TensorTypeText(element, encoding, bool(types.bounded[row]), extra).text()
        spelled[row] = (_shape_text(shape), text)
    lists_of = [np.frombuffer(key, np.int32).tolist() for key in distinct]
    texts = [_joined([spelled[row] for row in rows]) for rows in lists_of]
    return IoColumns(
        nodes,
        ByteRows.from_rows([_VALUES]).take(np.zeros(len(nodes), np.int64)),
        ByteRows.from_rows([text.shapes for text in texts]).take(which),
        ByteRows.from_rows([text.types for text in texts]).take(which),
    )


def nodes_of_odd_sizes(graph: OpGraph) -> int:
    """Return the number of nodes with a tensor whose size in bytes cannot be written. That is a known size of
    an unknown shape, an unknown size of a known shape, or a fractional size.
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
    """Return the size [bytes] that a reader derives from the written text of type ``row``."""
    element, shape, size = types.dtype_of(row), types.shape(row), float(types.bytes[row])
    if element is None or DYNAMIC in shape:
        return nan
    elements = element.storage_bytes(prod(shape))
    extra = int(size - elements) if isfinite(size) else 0
    return float(elements + extra) if abs(extra) < _MOST_EXTRA_BYTES else nan


class _TypeParser:
    """Parser of ``IOInfo`` texts to tensor types, with a cache."""

    def __init__(self, types: TensorTypesBuilder, strings: StringTableBuilder) -> None:
        self.types = types
        self.strings = strings
        self.known: dict[tuple[bytes, bytes], tuple[int, ...] | None] = {}

    def rows(self, shapes: bytes, types: bytes) -> tuple[int, ...] | None:
        """Return the rows in the type table for a list of tensors; None if the texts are not in the format of
        Hespas.
        """
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
        parsed = [_TensorTypeText.parse(name) for name in names]
        valid = [tensor_type for tensor_type in parsed if tensor_type is not None]
        negative = any(extent < -1 or extent > 1 << 62 for shape in extents for extent in shape)
        if len(valid) != len(parsed) or negative or len(extents) != len(names) or not extents:
            return None
        for tensor_type, shape in zip(valid, extents, strict=True):
            element, extra = tensor_type.element, tensor_type.extra_bytes
            if extra and (element is None or DYNAMIC in shape or element.storage_bytes(prod(shape)) < -extra):
                return None  # the extra bytes do not give a possible size
        texts = [
            (_shape_text(shape), tensor_type.text())
            for shape, tensor_type in zip(extents, valid, strict=True)
        ]
        if _joined(texts) != TypeTexts(shapes, types):
            return None
        return tuple(
            self.types.add(
                tensor_type.element,
                shape,
                encoding=self.strings.add(tensor_type.encoding),
                bounded=tensor_type.bounded,
                extra_bytes=tensor_type.extra_bytes,
            )
            for tensor_type, shape in zip(valid, extents, strict=True)
        )


def parse_io(
    io: IoColumns, nodes: int, types: TensorTypesBuilder, strings: StringTableBuilder
) -> tuple[RaggedArray, Longs]:
    """Convert the input (or output) texts of nodes to tensor types. Return for each node its rows in the type
    table, and the rows of ``io`` whose texts are not in the format of Hespas. These texts must be preserved
    verbatim.
    """
    if not len(io):
        return RaggedArray.empty(nodes), np.empty(0, np.int64)
    parser = _TypeParser(types, strings)
    foreign: list[int] = []
    lengths = np.zeros(nodes, np.int64)
    flat: list[int] = []
    owners: list[int] = io.node.tolist()
    for row, (owner, value, shapes, names) in enumerate(
        zip(owners, io.values, io.shapes, io.types, strict=True)
    ):
        type_rows = parser.rows(shapes, names) if value == _VALUES else None
        if type_rows is None:
            foreign.append(row)
            continue
        lengths[owner] = len(type_rows)
        flat.extend(type_rows)
    return RaggedArray.from_lengths(lengths, np.array(flat, np.int32)), np.array(foreign, np.int64)


_UNKNOWN = "?"
LARGEST_EXTENT = 1 << 62
_FLOPS_PER_MULTIPLY_ADD = 2
_ELEMENT = r"(\?|[A-Za-z0-9_]+(?:<f\d+>)?)"
_FIGURE = r"nan|-?\d{1,400}(?:\.\d{1,400})?(?:e[+-]?\d{1,3})?"
_TEXT = re.compile(
    rf"(-?\d{{1,19}})x(-?\d{{1,19}})x(-?\d{{1,19}})x(-?\d{{1,19}}) {_ELEMENT}\*{_ELEMENT}>{_ELEMENT}"
    rf"(?: flops=({_FIGURE}))?(?: useful=({_FIGURE}))?(?: products=(\d{{1,3}}))?(?: window=(\d{{1,19}}))?"
)


class _ContractionText(NamedTuple):
    """One matmul of a node, as a text in an attribute. The fields are columns of the contraction table."""

    batch: int
    m: int
    n: int
    k: int
    flops: float
    useful_flops: float
    lhs: int
    rhs: int
    accumulator: int
    products: int
    window: int

    @property
    def usual_flops(self) -> float:
        """FLOPs that follow from the extents: two per multiply-add."""
        return float(_FLOPS_PER_MULTIPLY_ADD) * self.batch * self.m * self.n * self.k

    def text(self) -> str:
        """Return the row as text; values that follow from the extents are left out."""
        text = f"{self.batch}x{self.m}x{self.n}x{self.k} "
        text += f"{_name(self.lhs)}*{_name(self.rhs)}>{_name(self.accumulator)}"
        text += f" flops={self.flops!r}" if self.flops != self.usual_flops else ""
        both_unknown = np.isnan(self.useful_flops) and np.isnan(self.flops)
        if self.useful_flops != self.flops and not both_unknown:
            text += f" useful={self.useful_flops!r}"
        text += f" products={self.products}" if self.products != 1 else ""
        return text + (f" window={self.window}" if self.window != 1 else "")

    @classmethod
    def parse(cls, text: str) -> _ContractionText | None:
        """Return the row of a text, None if it is not of this form."""
        match = _TEXT.fullmatch(text)
        if match is None:
            return None
        batch, m, n, k = (int(part) for part in match.groups()[:4])
        lhs, rhs, accumulator = (_code(part) for part in match.groups()[4:7])
        products, window = int(match[10] or 1), int(match[11] or 1)
        too_large = max(abs(batch), abs(m), abs(n), abs(k), window) > LARGEST_EXTENT
        is_uneven = window < 1 or (k >= 0 and k % window != 0)
        if lhs is None or rhs is None or accumulator is None or too_large or is_uneven:
            return None
        row = cls(batch, m, n, k, 0.0, 0.0, lhs, rhs, accumulator, products, window)
        flops = float(match[8]) if match[8] else row.usual_flops
        useful = float(match[9]) if match[9] else flops
        return row._replace(flops=flops, useful_flops=useful)


def _name(code: int) -> str:
    return DTYPES[code].name if code >= 0 else _UNKNOWN


def _code(name: str) -> int | None:
    if name == _UNKNOWN:
        return -1
    dtype = find_dtype(name)
    return dtype.code if dtype is not None and dtype.name == name else None


def contraction_texts(graph: OpGraph) -> tuple[Longs, list[bytes], Longs]:
    """Return the nodes with matmuls or convolutions, the distinct texts that describe them, and the index of
    each node's text.
    """
    table = graph.contractions
    columns = [getattr(table, name).tolist() for name in table.DTYPES]
    texts: dict[int, str] = {}
    spelled: dict[tuple[Any, ...], str] = {}
    for node, *values in zip(*columns, strict=True):
        row = tuple(values)
        text = spelled.get(row) or spelled.setdefault(row, _ContractionText(*row).text())
        texts[node] = f"{texts[node]};{text}" if node in texts else text
    distinct = {text: number for number, text in enumerate(dict.fromkeys(texts.values()))}
    which = np.array([distinct[text] for text in texts.values()], np.int64)
    return np.array(list(texts), np.int64), [text.encode() for text in distinct], which


def parse_contractions(nodes: Longs, texts: list[str], text_of: Longs) -> tuple[ContractionTable, Longs]:
    """Convert texts about matmuls to the contraction table of a graph. Node ``nodes[i]`` has the text
    ``texts[text_of[i]]``. Also return the indices of ``nodes`` whose texts are not in the format of Hespas or
    would be written differently.
    """
    parsed: list[list[_ContractionText] | None] = []
    for text in texts:
        parts = [_ContractionText.parse(part) for part in text.split(";")]
        valid = [row for row in parts if row is not None]
        same = len(valid) == len(parts) and ";".join(row.text() for row in valid) == text
        parsed.append(valid if same and all(row.products <= 255 for row in valid) else None)
    which: list[int] = text_of.tolist()
    owners: list[int] = nodes.tolist()
    rows = [parsed[text_row] for text_row in which]
    table_rows = [(node, *row) for node, entry in zip(owners, rows, strict=True) for row in entry or ()]
    foreign = np.array([index for index, entry in enumerate(rows) if entry is None], np.int64)
    return ContractionTable.from_rows(table_rows), foreign
