"""Tensor types as ``IOInfo`` text and back: shapes ``[[16, 128]]``, types ``["bf16"]``, values ``[]``.

The texts are JSON and, as Chakra's readers want them, Python literals. Texts of other tools are kept
verbatim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hespas.converters.chakra.columns import ByteRows, IoColumns
from hespas.converters.chakra.spans import Longs
from hespas.graph import DTYPES, UNKNOWN_DTYPE, Csr, OpGraph, TensorTypesBuilder, find_dtype

__all__ = ["TypeTexts", "parse_io", "type_texts"]

_VALUES = b"[]"
_MAX_TEXT = 1 << 16
"""A longer text is no list of shapes of ours; it is not parsed."""


@dataclass(frozen=True, slots=True)
class TypeTexts:
    """Shapes and types of one list of tensors."""

    shapes: bytes
    types: bytes


def _render(shapes: Sequence[Sequence[int]], names: Sequence[str]) -> TypeTexts:
    spelled = ", ".join(f"[{', '.join(map(str, shape))}]" for shape in shapes)
    quoted = ", ".join(f'"{name}"' for name in names)
    return TypeTexts(f"[{spelled}]".encode(), f"[{quoted}]".encode())


def type_texts(graph: OpGraph, operands: Csr) -> IoColumns:
    """The ``IOInfo`` of all nodes that have operands (or results)."""
    nodes = np.flatnonzero(operands.lengths)
    known: dict[tuple[int, ...], TypeTexts] = {}
    texts: list[TypeTexts] = []
    bounds: list[int] = operands.offsets.tolist()
    values: list[int] = operands.values.tolist()
    for node in nodes.tolist():
        key = tuple(values[bounds[node] : bounds[node + 1]])
        text = known.get(key)
        if text is None:
            text = known[key] = _texts_of(graph, key)
        texts.append(text)
    return IoColumns(
        nodes,
        ByteRows.from_rows([_VALUES] * len(texts)),
        ByteRows.from_rows([text.shapes for text in texts]),
        ByteRows.from_rows([text.types for text in texts]),
    )


def _texts_of(graph: OpGraph, rows: Sequence[int]) -> TypeTexts:
    codes: list[int] = graph.types.dtype[list(rows)].tolist()
    names = ["" if code == UNKNOWN_DTYPE else DTYPES[code].name for code in codes]
    return _render([graph.types.shape(row) for row in rows], names)


@dataclass(slots=True)
class _Parser:
    types: TensorTypesBuilder
    known: dict[tuple[bytes, bytes], tuple[int, ...] | None] = field(
        default_factory=dict[tuple[bytes, bytes], tuple[int, ...] | None]
    )

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
        elements = [find_dtype(name) if name else None for name in names]
        unknown = any(name and element is None for name, element in zip(names, elements, strict=True))
        spelled = [element.name if element else "" for element in elements]
        same = _render(extents, spelled) == TypeTexts(shapes, types)
        negative = any(extent < -1 or extent > 1 << 62 for shape in extents for extent in shape)
        if unknown or negative or not same or len(extents) != len(names) or not extents:
            return None
        return tuple(self.types.add(element, shape) for element, shape in zip(elements, extents, strict=True))


def parse_io(io: IoColumns, nodes: int, types: TensorTypesBuilder) -> tuple[Csr, Longs]:
    """Type rows per node, and which rows of ``io`` are not of this form and must be kept as they are."""
    if not len(io):
        return Csr.empty(nodes), np.empty(0, np.int64)
    parser = _Parser(types)
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
