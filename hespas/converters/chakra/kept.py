"""What a graph keeps of a trace verbatim, on its way back into one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.assembly import Assembly
from hespas.converters.chakra.columns import AttributeColumns, ByteRows, IoColumns
from hespas.converters.chakra.contract import Tag
from hespas.converters.chakra.extras import foreign_texts, is_attribute
from hespas.converters.chakra.kept_times import kept_micros
from hespas.converters.chakra.layouts import Layouts, decode_layout
from hespas.converters.chakra.shapes import type_texts
from hespas.converters.chakra.spans import Bytes, Longs, Window, Words
from hespas.converters.chakra.timing import Times
from hespas.graph import Csr, OpGraph
from hespas.schemas.chakra.tables import AttributeField

__all__ = ["Kept"]

_DEFAULT_VERSION = "0.0.4"
_NO_ASCII = 128


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


class Kept:
    """The graph's verbatim rows, sorted out: the inverse of :mod:`.extras`."""

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
        nodes, stated = kept_micros(self.graph)
        if not len(nodes):
            return times
        micros = times.micros.copy()
        micros[nodes] = stated
        return times._replace(micros=micros)

    def io(self, tag: int, operands: Csr) -> IoColumns:
        """Texts kept verbatim, and those made from tensor types for all other nodes."""
        rows = self._rows(tag)
        made = type_texts(self.graph, operands)
        if not len(rows):
            return made
        from hespas.converters.chakra.decode import decode_io

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
        known = tuple(decode_layout(self.table.value(row)) for row in whole.tolist())
        index = Window.holding(self.data).words[self.table.offsets[chosen]] & np.uint64(0xFFFFFFFF)
        good = index < len(known)
        return Layouts(known, self.table.node[chosen][good].astype(np.int64), index[good].view(np.int64))

    def add_to(self, assembly: Assembly, *, of_file: bool) -> tuple[Longs, NDArray[np.int32], ByteRows]:
        """Hand the kept attributes over; returns the doc strings as (node, key, text)."""
        table = self.table
        mine = self.of_file if of_file else ~self.of_file
        keys = self._keys(assembly)
        foreign, _ = foreign_texts(self.graph, of_file=of_file)
        is_kept = mine & is_attribute(table.tag)
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
        foreign = self.table.tag[rows] == Tag.TEXT
        kind[foreign] = AttributeField.STRING
        if int(self.data.max(initial=0)) >= _NO_ASCII:
            for place in np.flatnonzero(foreign).tolist():
                if not _is_utf8(self.table.value(int(rows[place]))):
                    kind[place] = AttributeField.BYTES
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
