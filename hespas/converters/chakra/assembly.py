"""Putting attributes of many names together: parts per name become rows by node, in the wanted layout."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.contract import INTEGER_FIELDS
from hespas.converters.chakra.wire import Bools, Bytes, Longs, Window, Words, copy_spans, offsets_of
from hespas.converters.chakra.wire.columns import AttributeColumns, ByteRows
from hespas.schemas.chakra.tables import AttributeField

__all__ = ["Assembled", "Assembly", "Layout", "Layouts", "decode_layout", "encode_layout"]

_VERBATIM = 1 << 20
"""Order of what is kept verbatim, behind all that the graph models."""

_NEVER = 1 << 40
"""Order of what stands behind all that a layout names."""

_BOUNDS: dict[int, tuple[int, int]] = {
    AttributeField.INT32: (-(1 << 31), (1 << 31) - 1),
    AttributeField.SINT32: (-(1 << 31), (1 << 31) - 1),
    AttributeField.SFIXED32: (-(1 << 31), (1 << 31) - 1),
    AttributeField.UINT32: (0, (1 << 32) - 1),
    AttributeField.FIXED32: (0, (1 << 32) - 1),
    AttributeField.UINT64: (0, (1 << 63) - 1),
    AttributeField.FIXED64: (0, (1 << 63) - 1),
    AttributeField.BOOL: (0, 1),
}


class Assembled(NamedTuple):
    """The finished attributes; ``slot`` says which rows depend on the rank (-1: none)."""

    attrs: AttributeColumns
    slot: Longs


class _Part(NamedTuple):
    node: Longs
    key: NDArray[np.int32]
    field: Bytes
    bits: Words
    start: Longs
    length: Longs
    order: Longs
    slot: Longs
    optional: Bools
    implied: Bools
    generated: bool


def _same(count: int, value: int) -> Longs:
    """One value ``count`` times, in no memory; parts are read only."""
    return np.broadcast_to(np.int64(value), (count,))


class Assembly:
    """Collects attributes of ``nodes`` nodes. Parts added first come first within a node."""

    def __init__(self, nodes: int) -> None:
        """Start without attributes."""
        self.nodes = nodes
        self._names: dict[str, int] = {}
        self._parts: list[_Part] = []
        self._buffers: list[Bytes] = []
        self._size = 0

    def buffer(self, data: bytes | memoryview[int]) -> int:
        """Make bytes available to :meth:`texts`; returns where they start."""
        start = self._size
        self._buffers.append(np.frombuffer(data, np.uint8))
        self._size += len(self._buffers[-1])
        return start

    def key(self, name: str) -> int:
        """The row of an attribute name."""
        return self._names.setdefault(name, len(self._names))

    def integers(
        self,
        name: str,
        kind: AttributeField,
        node: Longs,
        value: Longs,
        *,
        slot: Longs | None = None,
        optional: Bools | None = None,
        implied: Bools | None = None,
    ) -> None:
        """An integer attribute. ``optional`` rows are written only where the node's layout names them,
        ``implied`` ones are left out where it has a layout that does not.
        """
        count = len(node)
        span = (_same(count, 0), _same(count, -1))
        part = self._part(name, kind, node, span, slot)
        no = part.optional
        self._parts.append(
            part._replace(
                bits=value.view(np.uint64),
                optional=no if optional is None else optional,
                implied=no if implied is None else implied,
            )
        )

    def texts(
        self,
        name: str,
        kind: AttributeField,
        node: Longs,
        start: Longs,
        length: Longs,
        *,
        slot: Longs | None = None,
    ) -> None:
        """A string attribute; the texts lie in the buffers."""
        self._parts.append(self._part(name, kind, node, (start, length), slot))

    def _part(
        self, name: str, kind: AttributeField, node: Longs, span: tuple[Longs, Longs], slot: Longs | None
    ) -> _Part:
        count = len(node)
        no = np.zeros(count, np.bool_)
        return _Part(
            node=node,
            key=np.full(count, self.key(name), np.int32),
            field=np.full(count, kind, np.uint8),
            bits=np.zeros(count, np.uint64),
            start=span[0],
            length=span[1],
            order=_same(count, len(self._parts)),
            slot=_same(count, -1) if slot is None else slot,
            optional=no,
            implied=no,
            generated=True,
        )

    def verbatim(
        self, node: Longs, key: NDArray[np.int32], kind: Bytes, bits: Words, span: tuple[Longs, Longs]
    ) -> None:
        """Attributes as they were, in order; ``span`` has length -1 where the value is in ``bits``."""
        count = len(node)
        order = _VERBATIM + np.arange(count, dtype=np.int64)
        no = np.zeros(count, np.bool_)
        self._parts.append(
            _Part(node, key, kind, bits, span[0], span[1], order, _same(count, -1), no, no, generated=False)
        )

    def finish(self, layouts: Layouts, docs: tuple[Longs, NDArray[np.int32], ByteRows]) -> Assembled:
        """All rows by node; ``docs`` are (node, key, text) and go to the first attribute of that name."""
        if not self._parts:
            return Assembled(AttributeColumns.empty(self.nodes), np.empty(0, np.int64))
        parts = self._parts
        whole = _Part(
            node=np.concatenate([part.node for part in parts]),
            key=np.concatenate([part.key for part in parts]),
            field=np.concatenate([part.field for part in parts]),
            bits=np.concatenate([part.bits for part in parts]),
            start=np.concatenate([part.start for part in parts]),
            length=np.concatenate([part.length for part in parts]),
            order=np.concatenate([part.order for part in parts]),
            slot=np.concatenate([part.slot for part in parts]),
            optional=np.concatenate([part.optional for part in parts]),
            implied=np.concatenate([part.implied for part in parts]),
            generated=False,
        )
        generated = np.concatenate([np.full(len(part.node), part.generated) for part in parts])
        kept = ~whole.optional
        if layouts.layouts:
            kept = _apply(layouts, whole, generated, self._names, self.nodes)
        rows = np.flatnonzero(kept)
        if layouts.layouts:
            rows = rows[np.lexsort((whole.order[rows], whole.node[rows]))]
        else:  # parts stand in order already
            rows = rows[np.argsort(whole.node[rows], kind="stable")]
        return Assembled(self._columns(whole, rows, docs), whole.slot[rows])

    def _columns(
        self, whole: _Part, rows: Longs, docs: tuple[Longs, NDArray[np.int32], ByteRows]
    ) -> AttributeColumns:
        node, key = whole.node[rows], whole.key[rows]
        bits, length = whole.bits[rows], whole.length[rows]
        held = np.flatnonzero(length >= 0)
        bits[held] = np.arange(len(held), dtype=np.uint64)
        data = np.concatenate(self._buffers) if self._buffers else np.empty(0, np.uint8)
        payload = copy_spans(Window.holding(data), whole.start[rows[held]], length[held])
        doc_row, doc = _place_docs(node, key, len(self._names), docs)
        return AttributeColumns(
            tuple(self._names),
            offsets_of(np.bincount(node, minlength=self.nodes)),
            key,
            whole.field[rows],
            bits,
            ByteRows(*payload),
            doc_row,
            doc,
        )


def _place_docs(
    node: Longs, key: NDArray[np.int32], keys: int, docs: tuple[Longs, NDArray[np.int32], ByteRows]
) -> tuple[Longs, ByteRows]:
    """The attribute rows that doc strings belong to."""
    if not len(docs[0]):
        return np.empty(0, np.int64), ByteRows.blank(0)
    code = node * max(1, keys) + key
    order = np.argsort(code, kind="stable")
    wanted = docs[0] * max(1, keys) + docs[1]
    place = np.minimum(np.searchsorted(code[order], wanted), max(0, len(code) - 1))
    found = np.flatnonzero(code[order][place] == wanted) if len(code) else np.empty(0, np.int64)
    rows, first = np.unique(order[place[found]], return_index=True)
    return rows, docs[2].take(found[first])


def _apply(layouts: Layouts, whole: _Part, generated: Bools, names: dict[str, int], nodes: int) -> Bools:
    """Order and type the attributes of nodes that have a layout; returns which rows to keep."""
    kept = ~whole.optional
    layout_of = np.full(nodes, -1, np.int64)
    layout_of[layouts.node] = layouts.choice
    row_layout = layout_of[whole.node]
    by_layout = np.argsort(row_layout, kind="stable")
    bounds = np.searchsorted(row_layout[by_layout], np.arange(len(layouts.layouts) + 1))
    for number, layout in enumerate(layouts.layouts):
        rows = by_layout[bounds[number] : bounds[number + 1]]
        place = np.full(len(names), -1, np.int64)
        wanted = np.zeros(len(names), np.uint8)
        for position, (name, field_number) in reversed(list(enumerate(layout))):
            if name in names:
                place[names[name]], wanted[names[name]] = position, field_number
        order, kind = place[whole.key[rows]], wanted[whole.key[rows]]
        named = order >= 0
        own = generated[rows]
        whole.order[rows] = np.where(named, order, _NEVER + whole.order[rows])
        retyped = named & own & _fits(kind, whole.bits[rows], whole.length[rows])
        whole.field[rows[retyped]] = kind[retyped]
        integer = np.isin(kind, [int(member) for member in INTEGER_FIELDS])
        same = (kind == AttributeField.STRING) | (kind == whole.field[rows])
        text = same & (whole.length[rows] >= 0)
        code = whole.node[rows] * len(names) + whole.key[rows]
        spurious = own & named & (~integer & ~text | np.isin(code, code[~own]))
        silent = own & ~named & (whole.implied[rows] | whole.optional[rows])
        kept[rows] = ~(spurious | silent)
    return kept


def _fits(kind: Bytes, bits: Words, length: Longs) -> Bools:
    """Whether values can have another integer type."""
    value = bits.view(np.int64)
    fits = (length < 0) & np.isin(kind, [int(member) for member in INTEGER_FIELDS])
    for number, (low, high) in _BOUNDS.items():
        rows = kind == number
        fits[rows] &= (value[rows] >= low) & (value[rows] <= high)
    return fits


# Which attributes a node had, in which order and of which type: kept where a writer would choose otherwise.
#
# A trace made by this project needs none of this. One made by another tool may lack ``is_cpu_op``, order its
# attributes differently or use other integer types; its distinct layouts are kept once each as rows of the
# file, and each such node refers to one, so that the trace is written again as it was.

Layout = tuple[tuple[str, int], ...]
"""Name and field number of each attribute of a node, in order."""


class Layouts(NamedTuple):
    """Distinct layouts, and which of them (``choice[i]``) node ``node[i]`` has."""

    layouts: tuple[Layout, ...]
    node: Longs
    choice: Longs


def encode_layout(layout: Layout) -> bytes:
    """A layout as bytes: field number, length of the name in four bytes, name; repeated."""
    parts = [
        bytes([field]) + len(name.encode()).to_bytes(4, "little") + name.encode() for name, field in layout
    ]
    return b"".join(parts)


def decode_layout(data: bytes) -> Layout:
    """The inverse of :func:`encode_layout`."""
    layout: list[tuple[str, int]] = []
    at = 0
    while at + 5 <= len(data):
        end = at + 5 + int.from_bytes(data[at + 1 : at + 5], "little")
        layout.append((data[at + 5 : end].decode(), data[at]))
        at = end
    return tuple(layout)
