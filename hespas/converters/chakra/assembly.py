"""Attributes on their way into a trace: those of many names put together as rows by node in the wanted
layout, and what a graph keeps of a trace verbatim.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.contract import (
    ATTRIBUTES,
    GROUPS_ATTRIBUTE,
    INTEGER_FIELDS,
    JOB_ATTRIBUTE,
    LINTED,
    RANK_ATTRIBUTE,
    STEPS_ATTRIBUTE,
    TEXTS_OF_JOB,
    Tag,
)
from hespas.converters.chakra.spelling import Times, micros_as_ns, type_texts
from hespas.converters.chakra.wire import (
    SLACK,
    AttributeColumns,
    Bools,
    ByteRows,
    Bytes,
    IoColumns,
    Longs,
    Window,
    Words,
    copy_spans,
    not_text,
    offsets_of,
)
from hespas.graph import PROGRAM_BYTES, OpGraph, RaggedArray, StringTable
from hespas.graph.columns import FloatArray
from hespas.schemas.chakra.tables import AttributeField

__all__ = [
    "Assembled",
    "Assembly",
    "Kept",
    "Layout",
    "Layouts",
    "Strings",
    "encode_layout",
    "foreign_texts",
    "simulated_ns",
]

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


class Strings(NamedTuple):
    """The texts of a graph, ready to be copied some at a time."""

    window: Window
    offsets: Longs

    @classmethod
    def of(cls, table: StringTable) -> Strings:
        """Copy the texts once."""
        return cls(Window.holding(np.frombuffer(table.buffer, np.uint8)), table.offsets)

    def lengths(self, rows: NDArray[np.integer]) -> Longs:
        """Return the bytes of some texts."""
        found: Longs = self.offsets[rows + 1] - self.offsets[rows]
        return found

    def take(self, rows: NDArray[np.integer]) -> ByteRows:
        """Return some texts."""
        return ByteRows(*copy_spans(self.window, self.offsets[rows], self.lengths(rows)))


class Assembled(NamedTuple):
    """The finished attributes; ``slot`` says which rows depend on the rank (-1: none)."""

    attrs: AttributeColumns
    slot: Longs


class _Part(NamedTuple):
    """Rows of attributes. ``generated`` ones follow from the graph, others are kept as they were; ``length``
    is -1 where the value is in ``bits``.
    """

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
    generated: Bools


def _same(count: int, value: int) -> Longs:
    """One value ``count`` times, in no memory, at a third of what ``broadcast_to`` costs; read only."""
    return np.ndarray((count,), np.int64, np.int64(value).tobytes(), strides=(0,))


def _flags(count: int, value: bool) -> Bools:
    return np.ndarray((count,), np.bool_, np.bool_(value).tobytes(), strides=(0,))


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
        part = self._part(name, kind, node, slot)
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
        self._parts.append(self._part(name, kind, node, slot)._replace(start=start, length=length))

    def _part(self, name: str, kind: AttributeField, node: Longs, slot: Longs | None) -> _Part:
        """Rows without a value."""
        count = len(node)
        no = _flags(count, False)
        return _Part(
            node=node,
            key=np.broadcast_to(np.int32(self.key(name)), (count,)),
            field=np.broadcast_to(np.uint8(kind), (count,)),
            bits=np.broadcast_to(np.uint64(0), (count,)),
            start=_same(count, 0),
            length=_same(count, -1),
            order=_same(count, len(self._parts)),
            slot=_same(count, -1) if slot is None else slot,
            optional=no,
            implied=no,
            generated=_flags(count, True),
        )

    def verbatim(
        self, node: Longs, key: NDArray[np.int32], kind: Bytes, bits: Words, span: tuple[Longs, Longs]
    ) -> None:
        """Attributes as they were, in order; ``span`` has length -1 where the value is in ``bits``."""
        count = len(node)
        order, no = _VERBATIM + np.arange(count, dtype=np.int64), _flags(count, False)
        self._parts.append(_Part(node, key, kind, bits, *span, order, _same(count, -1), no, no, no))

    def finish(self, layouts: Layouts, docs: tuple[Longs, NDArray[np.int32], ByteRows]) -> Assembled:
        """Return all rows by node; ``docs`` are (node, key, text) and go to the first attribute of that name.

        Memory: a row takes 80 bytes on the way, and 20 then.
        """
        if not self._parts:
            return Assembled(AttributeColumns.empty(self.nodes), np.empty(0, np.int64))
        whole = _Part(*map(np.concatenate, zip(*self._parts, strict=True)))
        kept = ~whole.optional
        if layouts.layouts:
            kept = _apply(layouts, whole, self._names, self.nodes)
        rows = np.flatnonzero(kept)
        if layouts.layouts:
            rows = rows[np.lexsort((whole.order[rows], whole.node[rows]))]
        else:  # parts are in order already
            rows = rows[np.argsort(whole.node[rows], kind="stable")]
        node, key, bits, length = whole.node[rows], whole.key[rows], whole.bits[rows], whole.length[rows]
        held = np.flatnonzero(length >= 0)
        bits[held] = np.arange(len(held), dtype=np.uint64)
        texts = ByteRows(*copy_spans(self._window(), whole.start[rows[held]], length[held]))
        doc_row, doc = _place_docs(node, key, len(self._names), docs)
        offsets = offsets_of(np.bincount(node, minlength=self.nodes))
        names = tuple(self._names)
        attrs = AttributeColumns(names, offsets, key, whole.field[rows], bits, texts, doc_row, doc)
        return Assembled(attrs, whole.slot[rows])

    def _window(self) -> Window:
        """Return all buffers as one."""
        return Window.over(np.concatenate([*self._buffers, np.zeros(SLACK, np.uint8)]))


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


def _apply(layouts: Layouts, whole: _Part, names: dict[str, int], nodes: int) -> Bools:
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
        own = whole.generated[rows]
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


def _decode_layout(data: bytes) -> Layout:
    """The inverse of :func:`encode_layout`."""
    layout: list[tuple[str, int]] = []
    at = 0
    while at + 5 <= len(data):
        end = at + 5 + int.from_bytes(data[at + 1 : at + 5], "little")
        layout.append((data[at + 5 : end].decode(), data[at]))
        at = end
    return tuple(layout)


# What a trace stated in ``duration_micros`` where a writer would state something else.
#
# ``duration_nanos`` is exact and counts where both stand; what simulators read is kept beside it, so that a
# rewritten trace says the same and a checker can hold one against the other.

_ROW_BYTES = 16


def _kept_micros(graph: OpGraph) -> tuple[Longs, Words]:
    """Nodes and the microseconds their trace stated; only nodes that still have the duration read there."""
    table = graph.extra
    rows = np.flatnonzero((table.tag == Tag.DURATION_MICROS) & (table.node >= 0))
    rows = rows[np.diff(table.offsets)[rows] == _ROW_BYTES]
    if not len(rows):
        return np.empty(0, np.int64), np.empty(0, np.uint64)
    words = Window.holding(np.frombuffer(table.values, np.uint8)).words
    start = table.offsets[rows]
    nodes = table.node[rows].astype(np.int64)
    same = words[start + 8] == np.ascontiguousarray(graph.duration_ns[nodes]).view(np.uint64)
    return nodes[same], words[start][same]


def simulated_ns(graph: OpGraph) -> FloatArray:
    """Return the durations that readers of ``duration_micros`` take [ns]: whole microseconds as the graph's
    trace stated them, or as they are written, which is 0 for a part of the computations below 1 us.
    """
    nodes, stated = _kept_micros(graph)
    micros = Times.of(graph.duration_ns, graph.kind, (graph.resource, graph.stream)).micros.copy()
    micros[nodes] = stated
    return micros_as_ns(micros)


# What a graph keeps of a trace verbatim, on its way back into one.

_OTHER_TAGS = (
    Tag.DOC_STRING,
    Tag.START_MICROS,
    Tag.DURATION_MICROS,
    Tag.INPUTS,
    Tag.OUTPUTS,
    Tag.LAYOUT,
    Tag.VERSION,
    Tag.AS_STATED,
)
"""What a trace has beside attributes."""

_RESERVED = frozenset({"", *ATTRIBUTES, *LINTED})
_RESERVED_OF_FILE = frozenset(
    {"", RANK_ATTRIBUTE, GROUPS_ATTRIBUTE, JOB_ATTRIBUTE, PROGRAM_BYTES, STEPS_ATTRIBUTE, *TEXTS_OF_JOB}
)
"""Names of attributes that readers of traces understand."""


_DEFAULT_VERSION = "0.0.4"


class Kept:
    """The graph's verbatim rows, sorted out: the inverse of :func:`.preserve.collect`."""

    def __init__(self, graph: OpGraph) -> None:
        """Find the version label."""
        self.graph = graph
        table = graph.extra
        self.table = table
        self.of_file = table.node < 0
        self.data = np.frombuffer(table.values, np.uint8)
        version = np.flatnonzero(self.of_file & (table.tag == Tag.VERSION))
        self.version = table.value(int(version[0])).decode() if len(version) else _DEFAULT_VERSION

    def _rows(self, tag: int) -> Longs:
        return np.flatnonzero(~self.of_file & (self.table.tag == tag))

    def start_micros(self) -> Words:
        """Start times in us, 0 where none is kept."""
        column = np.zeros(len(self.graph), np.uint64)
        rows = self._rows(Tag.START_MICROS)
        column[self.table.node[rows]] = self._eight_bytes(rows)
        return column

    def _eight_bytes(self, rows: Longs) -> Words:
        if not len(rows):
            return np.empty(0, np.uint64)
        return Window.holding(self.data).words[self.table.offsets[rows]]

    def times(self, times: Times) -> Times:
        """``times`` with the microseconds that a trace stated, where the graph has the time read there."""
        nodes, stated = _kept_micros(self.graph)
        if not len(nodes):
            return times
        micros = times.micros.copy()
        micros[nodes] = stated
        return times._replace(micros=micros)

    def io(self, tag: int, operands: RaggedArray) -> IoColumns:
        """Texts kept verbatim, and those made from tensor types for all other nodes."""
        rows = self._rows(tag)
        made = type_texts(self.graph, operands)
        if not len(rows):
            return made
        from hespas.converters.chakra.wire.decode import decode_io

        start = self.table.offsets[rows]
        kept = decode_io(Window.holding(self.data), start, self.table.offsets[rows + 1] - start)
        kept = IoColumns(self.table.node[rows].astype(np.int64), kept.values, kept.shapes, kept.types)
        made = made.take(np.flatnonzero(~np.isin(made.node, kept.node)))
        return kept.joined(made) if len(made) else kept

    def layouts(self) -> Layouts:
        """Distinct layouts and the choice of each node."""
        whole = np.flatnonzero(self.of_file & (self.table.tag == Tag.LAYOUT))
        chosen = self._rows(Tag.LAYOUT)
        nothing = np.empty(0, np.int64)
        if not len(whole) or not len(chosen):
            return Layouts((), nothing, nothing)
        index = Window.holding(self.data).words[self.table.offsets[chosen]] & np.uint64(0xFFFFFFFF)
        good = index < len(whole)
        used, choice = np.unique(index[good], return_inverse=True)
        layouts = tuple(_decode_layout(self.table.value(row)) for row in whole[used.view(np.int64)].tolist())
        return Layouts(layouts, self.table.node[chosen][good].astype(np.int64), choice.astype(np.int64))

    def add_to(self, assembly: Assembly, *, of_file: bool) -> tuple[Longs, NDArray[np.int32], ByteRows]:
        """Hand the kept attributes over; returns the doc strings as (node, key, text)."""
        table = self.table
        mine = self.of_file if of_file else ~self.of_file
        keys = self._keys(assembly)
        foreign, _ = foreign_texts(self.graph, of_file=of_file)
        is_kept = mine & _is_attribute(table.tag)
        is_kept[foreign] = True
        rows = np.flatnonzero(is_kept)
        kind = self._fields(rows)
        held = (kind >= AttributeField.BOOL_LIST) | ((kind > AttributeField.DOUBLE) & (kind & 1 == 0))
        base = assembly.buffer(table.values)
        length = np.where(held, table.offsets[rows + 1] - table.offsets[rows], -1)
        bits = np.zeros(len(rows), np.uint64)
        bits[~held] = self._eight_bytes(rows[~held])
        node = np.maximum(table.node[rows].astype(np.int64), 0)
        assembly.verbatim(node, keys[table.key[rows]], kind, bits, (table.offsets[rows] + base, length))
        docs = np.flatnonzero(mine & (table.tag == Tag.DOC_STRING))
        texts = ByteRows(self.data, table.offsets).take(docs)
        return np.maximum(table.node[docs].astype(np.int64), 0), keys[table.key[docs]], texts

    def _fields(self, rows: Longs) -> Bytes:
        """The value field of each row that becomes an attribute."""
        kind = self.table.tag[rows].astype(np.uint8)
        kind[kind == Tag.NO_VALUE] = AttributeField.UNSET
        foreign = np.flatnonzero(self.table.tag[rows] == Tag.TEXT)
        broken = not_text(ByteRows(self.data, self.table.offsets).take(rows[foreign]))
        kind[foreign] = np.where(broken, AttributeField.BYTES, AttributeField.STRING)
        return kind

    def _keys(self, assembly: Assembly) -> NDArray[np.int32]:
        """The assembly's key for each string row in use."""
        keys = np.zeros(len(self.graph.strings), np.int32)
        for row in sorted(set(self.table.key[self.table.tag <= Tag.DOC_STRING].tolist())):
            keys[row] = assembly.key(self.graph.strings[row])
        return keys

    def metadata(self) -> AttributeColumns:
        """The file's own attributes."""
        assembly = Assembly(1)
        docs = self.add_to(assembly, of_file=True)
        nothing = np.empty(0, np.int64)
        return assembly.finish(Layouts((), nothing, nothing), docs).attrs


def foreign_texts(graph: OpGraph, *, of_file: bool) -> tuple[Longs, int]:
    """Rows of another format's texts that become string attributes, and how many rows cannot be written:
    those without a key or with one that means something else in a trace, a second one of a key on a node, and
    those whose tag no trace knows.
    """
    table = graph.extra
    mine = (table.node < 0) == of_file
    own = _is_attribute(table.tag)
    foreign = mine & (table.tag == Tag.TEXT)
    unknown = int((mine & ~own & ~foreign & ~np.isin(table.tag, _OTHER_TAGS)).sum())
    if not foreign.any():
        return np.empty(0, np.int64), unknown
    reserved = _RESERVED_OF_FILE if of_file else _RESERVED
    bad = [key for key in np.unique(table.key[foreign]).tolist() if graph.strings[key] in reserved]
    rows = np.flatnonzero(foreign & ~np.isin(table.key, bad))
    # Attributes that were kept from a trace stay: they take precedence.
    attributes = np.flatnonzero(mine & own)
    order = np.concatenate([attributes, rows])
    code = (table.node[order].astype(np.int64) + 1) * len(graph.strings) + table.key[order]
    first = np.unique(code, return_index=True)[1]
    kept = np.sort(order[first[first >= len(attributes)]])
    return kept, unknown + int(foreign.sum()) - len(kept)


def _is_attribute(tag: NDArray[np.int16]) -> Bools:
    """Which tags mark attributes of a trace."""
    of_value = (tag >= AttributeField.DOUBLE) & (tag <= AttributeField.BYTES_LIST)
    found: Bools = of_value | (tag == Tag.NO_VALUE)
    return found
