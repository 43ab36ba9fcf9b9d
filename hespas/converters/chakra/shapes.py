"""Tensor types as ``IOInfo`` text and back: shapes ``[[16, 128]]``, types ``["bf16"]``, values ``[]``.

The texts are JSON and, as Chakra's readers want them, Python literals. Texts of other tools are kept
verbatim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hespas.converters.chakra.columns import ByteRows, IoColumns
from hespas.converters.chakra.spans import Longs
from hespas.graph import DTYPES, UNKNOWN_DTYPE, Csr, OpGraph, TensorTypesBuilder, find_dtype

__all__ = ["TypeTexts", "parse_io", "type_texts"]

_VALUES = b"[]"
_MAX_TEXT = 1 << 16
"""A longer text is no list of shapes of ours; it is not parsed."""


class TypeTexts(NamedTuple):
    """Shapes and types of one list of tensors."""

    shapes: bytes
    types: bytes


def _shape_text(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _name_text(name: str) -> str:
    return f'"{name}"'


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


def _spelled(graph: OpGraph, row: int) -> tuple[str, str]:
    """Shape and element type of one tensor type."""
    code = int(graph.types.dtype[row])
    return _shape_text(graph.types.shape(row)), _name_text("" if code == UNKNOWN_DTYPE else DTYPES[code].name)


class _Parser:
    """Texts already seen are not parsed again."""

    def __init__(self, types: TensorTypesBuilder) -> None:
        self.types = types
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
        elements = [find_dtype(name) if name else None for name in names]
        unknown = any(name and element is None for name, element in zip(names, elements, strict=True))
        spelled = [
            (_shape_text(shape), _name_text(element.name if element else ""))
            for shape, element in zip(extents, elements, strict=False)
        ]
        same = _joined(spelled) == TypeTexts(shapes, types)
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
