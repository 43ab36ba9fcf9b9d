"""Joining the chunks of a file: one column at a time, so that only one column is ever held twice."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.columns import AttributeColumns, ByteRows, EtColumns, IoColumns
from hespas.converters.chakra.spans import Longs, Words

__all__ = ["Joiner"]

_Scalar = TypeVar("_Scalar", bound=np.generic)


class _Column(Generic[_Scalar]):
    """A flat column that grows; room that is not used takes no memory."""

    __slots__ = ("_room", "size")

    def __init__(self, dtype: type[_Scalar]) -> None:
        self._room: NDArray[_Scalar] = np.empty(0, dtype)
        self.size = 0

    def add(self, piece: NDArray[_Scalar], expected: float) -> None:
        """Append; ``expected`` is how many times this much the whole column is thought to hold."""
        end = self.size + len(piece)
        if end > len(self._room):
            wanted = int(len(piece) * expected * 1.05) if self.size <= 1 else end + end // 2
            larger = np.empty(max(end, wanted), self._room.dtype)
            larger[: self.size] = self._room[: self.size]
            self._room = larger
        self._room[self.size : end] = piece
        self.size = end

    def take(self) -> NDArray[_Scalar]:
        """The whole column; this one is empty afterwards."""
        whole = self._room[: self.size]
        self._room = np.empty(0, whole.dtype)
        self.size = 0
        return whole


class _Offsets:
    """The pieces of an offsets column, each moved behind the one before."""

    __slots__ = ("_column", "base")

    def __init__(self) -> None:
        self._column = _Column(np.int64)
        self._column.add(np.zeros(1, np.int64), 0)
        self.base = 0

    def add(self, offsets: Longs, expected: float) -> None:
        self._column.add(offsets[1:] + self.base, expected)
        self.base += int(offsets[-1])

    def take(self) -> Longs:
        return self._column.take()


class _Rows:
    """The pieces of a column of byte strings."""

    __slots__ = ("_data", "_offsets", "count")

    def __init__(self) -> None:
        self._data = _Column(np.uint8)
        self._offsets = _Offsets()
        self.count = 0

    def add(self, rows: ByteRows, expected: float) -> None:
        self._data.add(rows.data, expected)
        self._offsets.add(rows.offsets, expected)
        self.count += len(rows)

    def take(self) -> ByteRows:
        return ByteRows(self._data.take(), self._offsets.take())


class _Io:
    __slots__ = ("_node", "_shapes", "_types", "_values")

    def __init__(self) -> None:
        self._node = _Column(np.int64)
        self._values, self._shapes, self._types = _Rows(), _Rows(), _Rows()

    def add(self, columns: IoColumns, base: int, expected: float) -> None:
        if not len(columns):
            return
        self._node.add(columns.node + base, expected)
        self._values.add(columns.values, expected)
        self._shapes.add(columns.shapes, expected)
        self._types.add(columns.types, expected)

    def take(self) -> IoColumns:
        return IoColumns(self._node.take(), self._values.take(), self._shapes.take(), self._types.take())


class _Attributes:
    __slots__ = ("_bits", "_doc", "_doc_row", "_field", "_key", "_offsets", "_payload")

    def __init__(self) -> None:
        self._offsets = _Offsets()
        self._key, self._field, self._bits = _Column(np.int32), _Column(np.uint8), _Column(np.uint64)
        self._payload, self._doc = _Rows(), _Rows()
        self._doc_row = _Column(np.int64)

    def add(self, columns: AttributeColumns, expected: float) -> None:
        if len(columns.doc_row):
            self._doc_row.add(columns.doc_row + self._offsets.base, expected)
            self._doc.add(columns.doc, expected)
        bits = columns.bits
        if len(columns.payload):
            bits = np.where(columns.has_payload, bits + np.uint64(self._payload.count), bits)
            self._payload.add(columns.payload, expected)
        self._offsets.add(columns.offsets, expected)
        self._key.add(columns.key, expected)
        self._field.add(columns.field, expected)
        self._bits.add(bits, expected)

    def take(self, keys: tuple[str, ...]) -> AttributeColumns:
        return AttributeColumns(
            keys,
            self._offsets.take(),
            self._key.take(),
            self._field.take(),
            self._bits.take(),
            self._payload.take(),
            self._doc_row.take(),
            self._doc.take(),
        )


class Joiner:
    """Takes chunks in file order, whose attribute keys come from one table, and makes one set of columns."""

    __slots__ = ("_attrs", "_ctrl", "_data", "_inputs", "_name", "_nodes", "_outputs", "_type", "_words")

    def __init__(self) -> None:
        """Start with no nodes."""
        self._words: dict[str, _Column[np.uint64]] = {
            name: _Column(np.uint64) for name in ("id", "start", "duration", "ctrl", "data")
        }
        self._type = _Column(np.int32)
        self._nodes = _Column(np.int64)
        self._name, self._inputs, self._outputs = _Rows(), _Io(), _Io()
        self._ctrl, self._data = _Offsets(), _Offsets()
        self._attrs = _Attributes()

    def add(self, chunk: EtColumns, expected: float = 1.0) -> None:
        """Append the nodes of a chunk; ``expected`` guesses how many such chunks there are, to plan room."""
        base = self._nodes.size
        self._inputs.add(chunk.inputs, base, expected)
        self._outputs.add(chunk.outputs, base, expected)
        self._nodes.add(chunk.frame_byte, expected)
        self._type.add(chunk.type, expected)
        self._name.add(chunk.name, expected)
        self._ctrl.add(chunk.ctrl_offsets, expected)
        self._data.add(chunk.data_offsets, expected)
        self._attrs.add(chunk.attrs, expected)
        for name, words in self._of(chunk).items():
            self._words[name].add(words, expected)

    @staticmethod
    def _of(chunk: EtColumns) -> dict[str, Words]:
        return {
            "id": chunk.id,
            "start": chunk.start_micros,
            "duration": chunk.duration_micros,
            "ctrl": chunk.ctrl_deps,
            "data": chunk.data_deps,
        }

    def take(self, version: str, metadata: AttributeColumns, keys: tuple[str, ...]) -> EtColumns:
        """The whole; the joiner is empty afterwards."""
        return EtColumns(
            version=version,
            metadata=metadata,
            attrs=self._attrs.take(keys),
            name=self._name.take(),
            id=self._words["id"].take(),
            type=self._type.take(),
            ctrl_offsets=self._ctrl.take(),
            ctrl_deps=self._words["ctrl"].take(),
            data_offsets=self._data.take(),
            data_deps=self._words["data"].take(),
            start_micros=self._words["start"].take(),
            duration_micros=self._words["duration"].take(),
            inputs=self._inputs.take(),
            outputs=self._outputs.take(),
            frame_byte=self._nodes.take(),
        )
