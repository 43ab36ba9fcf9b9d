"""References of an Arrow op graph are checked before the graph is made: a file is hostile until then."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.converters.op_graph.arrow_io import ArrowColumns, Binary
from hespas.converters.op_graph.arrow_layout import NODE_DTYPES, RAGGED_NODE_COLUMNS, TABLE_DTYPES
from hespas.graph import DTYPES, CollectiveKind, NodeKind, OpClass, RegionKind, Resource
from hespas.graph.columns import IntArray
from hespas.graph.errors import FormatError

__all__ = ["check_columns"]

_MAX_NODES = 2**31 - 1
_TEXT_CHUNK_BYTES = 1 << 20

_CODES = {
    "kind": len(NodeKind),
    "op_class": len(OpClass),
    "resource": len(Resource),
    "collectives.kind": len(CollectiveKind),
    "regions.kind": len(RegionKind),
    "types.bounded": 2,
    "p2p.host": 2,
}
"""Columns of codes 0 .. n - 1."""

_MAY_BE_UNKNOWN = {
    "region": "regions.parent",
    "collectives.group_set": "group_sets",
    "p2p.permutation": "permutations",
}
"""Columns of rows of another column, or -1."""

_TEXT_ROWS = (
    "name_row",
    "op_row",
    "source_row",
    "framework_row",
    "collectives.reduction",
    "regions.label",
    "extra.key",
    "types.encoding",
)
_ELEMENT_TYPES = (
    "rate_dtype",
    "contractions.lhs",
    "contractions.rhs",
    "contractions.accumulator",
    "types.dtype",
)
_NODE_NUMBERS = {
    "collectives.node": 0,
    "p2p.node": 0,
    "contractions.node": 0,
    "extra.node": -1,
    "carried.producer": 0,
    "carried.consumer": 0,
}
"""Columns of node numbers and the least of them."""

_SORTED = ("collectives.node", "p2p.node", "contractions.node", "extra.node")


def check_columns(columns: ArrowColumns, path: str) -> None:
    """Check lengths, ranges, order and texts of one class. Raises ``FormatError``. O(size), little memory."""
    checks = _Checks(columns, path)
    checks.lengths()
    checks.references()
    checks.order()
    checks.texts()


@dataclass(frozen=True, slots=True)
class _Checks:
    columns: ArrowColumns
    path: str

    @property
    def nodes(self) -> int:
        return self.columns.counts["nodes"]

    def lengths(self) -> None:
        flat, nodes = self.columns.flat, self.nodes
        if not 0 <= nodes <= _MAX_NODES or len(flat["id"]) != nodes:
            raise self._error(f"{nodes} nodes have {len(flat['id'])} ids", "field 'nodes'")
        for name in NODE_DTYPES:
            if len(flat[name]) not in {1, nodes}:
                raise self._error(f"{name} has {len(flat[name])} rows, expected {nodes}", f"field {name!r}")
        for name in RAGGED_NODE_COLUMNS:
            rows = len(self.columns.ragged[name].offsets) - 1
            if rows not in {0, nodes}:
                raise self._error(f"{name} has {rows} rows, expected {nodes}", f"field {name!r}")
        for table, dtypes in TABLE_DTYPES.items():
            if len({len(flat[f"{table}.{name}"]) for name in dtypes}) > 1:
                raise self._error(
                    f"the columns of {table} differ in length", f"field '{table}.{next(iter(dtypes))}'"
                )
        self._same("types.dims", len(self.columns.ragged["types.dims"].offsets) - 1, "types.dtype")
        self._same("extra.value", len(self.columns.binary["extra.value"].offsets) - 1, "extra.node")
        names, contents = (self.columns.binary[f"attachments.{part}"].offsets for part in ("name", "content"))
        if len(names) != len(contents):
            raise self._error(
                "attachments differ in number of names and contents", "field 'attachments.name'"
            )

    def _same(self, name: str, rows: int, other: str) -> None:
        if rows != len(self.columns.flat[other]):
            raise self._error(
                f"{name} has {rows} rows, {other} has {len(self.columns.flat[other])}", f"field {name!r}"
            )

    def references(self) -> None:
        columns = self.columns
        strings = len(columns.binary["strings"].offsets) - 1
        types = len(columns.flat["types.dtype"])
        for name, count in _CODES.items():
            self._within(name, columns.flat[name], 0, count)
        for name, target in _MAY_BE_UNKNOWN.items():
            self._within(name, columns.flat[name], -1, self._rows(target))
        for name in _TEXT_ROWS:
            self._within(name, columns.flat[name], 0, strings)
        for name in _ELEMENT_TYPES:
            self._within(name, columns.flat[name], -1, len(DTYPES))
        for name, low in _NODE_NUMBERS.items():
            self._within(name, columns.flat[name], low, self.nodes)
        self._within("carried.region", columns.flat["carried.region"], 0, self._rows("regions.parent"))
        for name in RAGGED_NODE_COLUMNS:
            high = types if name in {"operands", "results"} else self.nodes
            self._within_ragged(name, high)
        self._within("types.dims", columns.ragged["types.dims"].values, -1, 2**63 - 1)

    def _rows(self, column: str) -> int:
        binary = self.columns.binary.get(column)
        return len(self.columns.flat[column]) if binary is None else len(binary.offsets) - 1

    def _within(self, name: str, values: NDArray[np.generic], low: int, high: int) -> None:
        row = _first_outside(values, low, high)
        if row < 0:
            return
        owner = self._owner(name, row)
        raise self._error(f"{name} {values[row]} is outside {low}..{high - 1}", position=owner)

    def _owner(self, name: str, row: int) -> str:
        """``node 17`` where a row belongs to a node, else the row of the table."""
        table = name.partition(".")[0] if "." in name else ""
        owners = self.columns.flat.get(f"{table}.node") if table else None
        number = row if not table else -1 if owners is None else int(owners.astype(np.int64)[row])
        if 0 <= number < self.nodes:
            return f"node {self.columns.flat['id'][number]}"
        return f"field {name!r}, row {row}"

    def _within_ragged(self, name: str, high: int) -> None:
        rows = self.columns.ragged[name]
        place = _first_outside(rows.values, 0, high)
        if place < 0:
            return
        node = int(np.searchsorted(rows.offsets, place, side="right")) - 1
        raise self._error(
            f"{name} {rows.values[place]} is outside 0..{high - 1}",
            position=f"node {self.columns.flat['id'][node]}",
        )

    def order(self) -> None:
        flat = self.columns.flat
        for name in _SORTED:
            if _falls(flat[name]):
                raise self._error(f"{name} is not sorted", f"field {name!r}")
        for table in ("collectives", "p2p"):
            owners = flat[f"{table}.node"]
            if len(np.unique(owners)) < len(owners):
                raise self._error(f"a node has two rows in {table}", f"field '{table}.node'")
        parent = flat["regions.parent"].astype(np.int64)
        wrong = np.flatnonzero((parent < -1) | (parent >= np.arange(len(parent))))
        if len(wrong):
            raise self._error(
                f"region {int(wrong[0])} does not stand after its parent", "field 'regions.parent'"
            )

    def texts(self) -> None:
        strings = self.columns.binary["strings"]
        if len(strings.offsets) < 2 or strings.offsets[1] != 0:
            raise self._error("row 0 of strings is not empty", "field 'strings'")
        place = _first_bad_text(strings)
        if place >= 0:
            raise self._error("strings are not UTF-8", position=f"field 'strings', row {place}")

    def _error(self, message: str, position: str) -> FormatError:
        return FormatError(
            message, path=self.path, position=position, hint="write the file again from its source"
        )


def _first_outside(values: NDArray[np.generic], low: int, high: int) -> int:
    """The first place with a value outside ``low <= value < high``, -1 for none."""
    if not len(values) or (int(np.min(values)) >= low and int(np.max(values)) < high):
        return -1
    whole = values.astype(np.int64, copy=False)
    return int(np.flatnonzero((whole < low) | (whole >= high))[0])


def _falls(values: NDArray[np.generic]) -> bool:
    whole = values.astype(np.int64, copy=False)
    return bool((whole[1:] < whole[:-1]).any())


def _first_bad_text(strings: Binary) -> int:
    """The row near which text is not UTF-8 (surrogates allowed), -1 for none; decoded in pieces."""
    bounds: IntArray = strings.offsets
    row, rows = 0, len(bounds) - 1
    while row < rows:
        limit = int(bounds[row]) + _TEXT_CHUNK_BYTES
        end = max(int(np.searchsorted(bounds, limit, side="right")) - 1, row + 1)
        piece = bytes(strings.data[int(bounds[row]) : int(bounds[end])])
        try:
            piece.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            place = int(bounds[row]) + error.start
            return int(np.searchsorted(bounds, place, side="right")) - 1
        starts = bounds[row:end] - bounds[row]
        inside = starts[starts < len(piece)]
        first_bytes = np.frombuffer(piece, np.uint8)[inside]
        cut = np.flatnonzero((first_bytes & 0xC0) == 0x80)
        if len(cut):
            return row + int(cut[0])
        row = end
    return -1
