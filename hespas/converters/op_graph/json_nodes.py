"""Collects the nodes of one rank class from decoded JSON and freezes them into a graph.

Flat buffers, no object per node; dependencies are kept as ids until all nodes are known.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from hespas.converters.op_graph.document import (
    Collective,
    Contraction,
    Extra,
    Node,
    P2p,
    RankClass,
    Region,
    TensorType,
    default_type_bytes,
    inferred_kind,
    parse_dtype,
    parse_enum,
    parse_groups,
    parse_number,
    parse_permutation,
    parse_type,
    spell_type,
    unescape_text,
)
from hespas.converters.op_graph.legality import Fault, check_ids
from hespas.graph import (
    CollectiveKind,
    CollectiveTable,
    ContractionTable,
    ExplicitGroups,
    ExtraTable,
    GroupSet,
    NodeKind,
    OpClass,
    OpGraph,
    P2pTable,
    Permutation,
    RaggedArray,
    RegionKind,
    RegionTable,
    Resource,
    StringTable,
    StringTableBuilder,
    TensorTypes,
    compress_groups,
)
from hespas.graph.builder import region_multiplicity
from hespas.graph.columns import FloatArray, IntArray, constant_if_equal
from hespas.graph.errors import InvariantError
from hespas.graph.opgraph import NODE_DTYPES

__all__ = ["NodeColumns"]

_Scalar = TypeVar("_Scalar", bound=np.generic)
_Entry = TypeVar("_Entry")
_Parsed = TypeVar("_Parsed")

_MAX_ID = 2**64 - 1
_MAX_SETS = 1 << 20
"""Distinct group sets or permutations of a program; real ones have fewer than a hundred."""
_COSTS = ("flops", "useful_flops", "transcendentals", "bytes_read", "bytes_written", "duration_ns")
_INTEGERS = {
    "id": "Q",
    "name_row": "i",
    "op_row": "i",
    "kind": "B",
    "op_class": "B",
    "resource": "B",
    "stream": "i",
    "region": "i",
    "rate_dtype": "h",
    "source_row": "i",
    "framework_row": "i",
}
_RAGGED = {"data_deps": "Q", "control_deps": "Q", "operands": "i", "results": "i"}


class NodeColumns:
    """The columns of one class. Call :meth:`add` for each node in order, then :meth:`build`.

    Raises ``ValueError`` for a value or reference that cannot be.
    """

    def __init__(self, fields: RankClass, num_ranks: int) -> None:
        """Take what the class states besides its nodes."""
        self._fields = fields
        self._texts = _Texts()
        self._types = _TypeRows(fields.types, self._texts)
        group_sets = _parsed("group_sets", fields.group_sets, parse_groups)
        permutations = _parsed("permutations", fields.permutations, parse_permutation)
        self._tables = _SideTables(self._texts, group_sets, permutations, num_ranks)
        self._regions = len(fields.regions)
        self._integers: dict[str, array[int]] = {name: array(code) for name, code in _INTEGERS.items()}
        self._costs = {name: array("d") for name in _COSTS}
        self._lengths = {name: array("i") for name in _RAGGED}
        self._values: dict[str, array[int]] = {name: array(code) for name, code in _RAGGED.items()}
        self._multiplicity: dict[int, float] = {}
        for entry in fields.extra:
            self._tables.add_extra(-1, entry)

    def add(self, number: int, node: Node) -> None:
        """Append one node."""
        texts, types = self._texts, self._types
        identity = number if node.id is None else node.id
        if max(identity, *node.deps, *node.control_deps, 0) > _MAX_ID:
            raise ValueError("a node id is past 2**64 - 1")
        if not node.region < self._regions:
            raise ValueError(f"region {node.region} does not exist; there are {self._regions}")
        kind, op_class = _kind_and_class(node)
        flops = parse_number(node.flops)
        self._append(
            identity,
            texts.add(node.name),
            texts.add(node.op),
            kind,
            op_class,
            parse_enum(Resource, node.resource) if node.resource else int(Resource.DEVICE),
            node.stream,
            node.region,
            parse_dtype(node.rate_dtype),
            texts.add(node.source),
            texts.add(node.framework_op),
        )
        self._append_costs(node, flops)
        self._append_row("data_deps", node.deps)
        self._append_row("control_deps", node.control_deps)
        self._append_row("operands", [types.row(spelling) for spelling in node.operands])
        self._append_row("results", [types.row(spelling) for spelling in node.results])
        self._add_side_rows(number, node)

    def _append(self, *values: int) -> None:
        for column, value in zip(self._integers.values(), values, strict=True):
            column.append(value)

    def _append_costs(self, node: Node, flops: float) -> None:
        costs = self._costs
        costs["flops"].append(flops)
        costs["useful_flops"].append(flops if node.useful_flops is UNSET else parse_number(node.useful_flops))
        costs["transcendentals"].append(parse_number(node.transcendentals))
        costs["bytes_read"].append(parse_number(node.bytes_read))
        costs["bytes_written"].append(parse_number(node.bytes_written))
        costs["duration_ns"].append(parse_number(node.duration_ns))

    def _append_row(self, name: str, values: Sequence[int]) -> None:
        self._lengths[name].append(len(values))
        self._values[name].extend(values)

    def _add_side_rows(self, number: int, node: Node) -> None:
        tables = self._tables
        if node.multiplicity is not UNSET:
            self._multiplicity[number] = parse_number(node.multiplicity)
        if node.collective is not None:
            tables.add_collective(number, node.collective)
        if node.p2p is not None:
            tables.add_p2p(number, node.p2p)
        for contraction in node.contractions:
            tables.add_contraction(number, contraction)
        for entry in node.extra:
            tables.add_extra(number, entry)

    def build(self, fault: Fault) -> OpGraph:
        """Resolve ids to node numbers and freeze the columns; structural faults go to ``fault``."""
        ids = _column(self._integers["id"], np.uint64)
        check_ids(ids, fault)
        lookup = _IdLookup(ids, by_position=self._fields.deps_by == "position", fault=fault)
        data_deps = self._resolve("data_deps", lookup)
        control_deps = self._resolve("control_deps", lookup)
        regions = _build_regions(self._fields.regions, self._texts, self._carried(lookup))
        buffers: dict[str, array[int] | array[float]] = {**self._integers, **self._costs}
        columns: dict[str, NDArray[Any]] = {
            name: constant_if_equal(_column(buffer, NODE_DTYPES[name])) for name, buffer in buffers.items()
        }
        columns |= {"id": ids, "useful_flops": _same_or(columns["flops"], columns["useful_flops"])}
        tables = self._tables
        attachments = {unescape_text(key): value for key, value in self._fields.attachments.items()}
        return OpGraph(
            name=unescape_text(self._fields.name),
            group_sets=tuple(tables.group_sets),
            permutations=tuple(tables.permutations),
            **columns,
            multiplicity=self._build_multiplicity(region_multiplicity(regions, columns["region"])),
            data_deps=data_deps,
            control_deps=control_deps,
            operands=self._rows("operands"),
            results=self._rows("results"),
            collectives=CollectiveTable.from_rows(tables.collectives),
            p2p=P2pTable.from_rows(tables.p2p),
            contractions=ContractionTable.from_rows(tables.contractions),
            regions=regions,
            extra=ExtraTable.from_rows(tables.extra),
            attachments=attachments,
            types=self._types.build(),
            strings=self._texts.build(),
        )

    def _rows(self, name: str) -> RaggedArray:
        values = _column(self._values[name], np.int32)
        if not len(values):
            return RaggedArray.empty(len(self._lengths[name]))
        return RaggedArray.from_lengths(_column(self._lengths[name], np.int32), values)

    def _resolve(self, name: str, lookup: _IdLookup) -> RaggedArray:
        lengths = _column(self._lengths[name], np.int32)
        ids = _column(self._values[name], np.uint64)
        if not len(ids):
            return RaggedArray.empty(len(lengths))
        owners = np.repeat(np.arange(len(lengths)), lengths)
        numbers = lookup.numbers(ids, owners)
        kept = numbers >= 0
        if not kept.all():
            lengths = np.bincount(owners[kept], minlength=len(lengths)).astype(np.int32)
        return RaggedArray.from_lengths(lengths, numbers[kept])

    def _carried(self, lookup: _IdLookup) -> tuple[IntArray, IntArray, IntArray]:
        rows = np.array([row[0] for row in self._fields.carried], np.int64)
        if len(rows) and int(rows.max()) >= self._regions:
            raise ValueError(f"carried names region {int(rows.max())}; there are {self._regions}")
        if any(max(row) > _MAX_ID for row in self._fields.carried):
            raise ValueError("carried names a node id past 2**64 - 1")
        consumers = lookup.numbers(np.array([row[2] for row in self._fields.carried], np.uint64), None)
        producers = lookup.numbers(np.array([row[1] for row in self._fields.carried], np.uint64), None)
        kept = (consumers >= 0) & (producers >= 0)
        return rows[kept], producers[kept], consumers[kept]

    def _build_multiplicity(self, column: FloatArray) -> FloatArray:
        if not self._multiplicity:
            return column
        changed = column.copy()
        changed[np.fromiter(self._multiplicity, np.int64)] = list(self._multiplicity.values())
        return changed


class _IdLookup:
    """Node numbers of ids; of an id that stands twice, the first."""

    def __init__(self, ids: NDArray[np.uint64], *, by_position: bool, fault: Fault) -> None:
        self._ids = ids
        self._fault = fault
        counted = by_position or np.array_equal(ids, np.arange(len(ids), dtype=np.uint64))
        self._order = None if counted else np.argsort(ids, kind="stable")

    def numbers(self, wanted: NDArray[np.uint64], owners: IntArray | None) -> IntArray:
        """The number of each wanted id; -1, and a fault, where no node has it. ``owners`` ask."""
        nodes = np.uint64(len(self._ids))
        if not len(wanted):
            return np.empty(0, np.int64)
        if self._order is None or not nodes:
            found = np.where(wanted < nodes, wanted, 0).astype(np.int64)
            missing = wanted >= nodes
        else:
            ordered = self._ids[self._order]
            place = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
            found = self._order[place]
            missing = ordered[place] != wanted
        if missing.any():
            self._report(wanted, missing, owners)
        return np.where(missing, -1, found)

    def _report(
        self, wanted: NDArray[np.uint64], missing: NDArray[np.bool_], owners: IntArray | None
    ) -> None:
        first = int(np.flatnonzero(missing)[0])
        target = int(wanted[first])
        owner = "$.carried" if owners is None else f"node {int(self._ids[owners[first]])}"
        self._fault.report_lost(
            "ET006",
            owner,
            f"{owner} depends on node {target}, which does not exist",
            "add the node or remove the dependency",
            int(missing.sum()),
        )


def _parsed(table: str, entries: Sequence[_Entry], parse: Callable[[_Entry], _Parsed]) -> tuple[_Parsed, ...]:
    """All entries of a table; a ``ValueError`` says which one is wrong."""
    if len(entries) > _MAX_SETS:
        raise ValueError(f"{table}: {len(entries):,} entries (limit {_MAX_SETS:,})")
    found: list[_Parsed] = []
    for row, entry in enumerate(entries):
        try:
            found.append(parse(entry))
        except (ValueError, InvariantError) as error:
            raise ValueError(f"{table}[{row}]: {error}") from error
    return tuple(found)


def _kind_and_class(node: Node) -> tuple[int, int]:
    """What the node states, else what its side rows tell."""
    kind, op_class = inferred_kind(
        collective=node.collective is not None, p2p=node.p2p is not None, contraction=bool(node.contractions)
    )
    return (
        parse_enum(NodeKind, node.kind) if node.kind else kind,
        parse_enum(OpClass, node.op_class) if node.op_class else op_class,
    )


def _column(buffer: array[int] | array[float], dtype: type[_Scalar]) -> NDArray[_Scalar]:
    """The buffer as an array, without a copy."""
    return np.frombuffer(buffer, dtype) if len(buffer) else np.empty(0, dtype)


def _same_or(column: FloatArray, other: FloatArray) -> FloatArray:
    """``column`` itself where ``other`` holds the same values."""
    return column if np.array_equal(column, other, equal_nan=True) else other


# Collects the tables of one rank class while its JSON nodes are decoded: types, sets, side tables.
#
# Every method that meets a wrong reference raises ``ValueError``; the reader adds where it stood.


class _Texts:
    """Interns escaped texts."""

    __slots__ = ("_rows", "_table")

    def __init__(self) -> None:
        self._table = StringTableBuilder()
        self._rows: dict[str, int] = {"": 0}

    def add(self, text: str) -> int:
        """The row of a text as the document spells it."""
        row = self._rows.get(text)
        if row is None:
            row = self._rows[text] = self._table.add(unescape_text(text))
        return row

    def build(self) -> StringTable:
        """The finished table."""
        return self._table.build()


class _TypeRows:
    """The types of one class: rows as the document lists them, then those met in nodes."""

    __slots__ = ("_bytes", "_encodings", "_parsed", "_rows", "_texts")

    def __init__(self, listed: Iterable[str | TensorType], texts: _Texts) -> None:
        """Take the listed types; a spelling that stands twice is told apart by ``#row`` only."""
        self._texts = texts
        self._parsed: list[tuple[int, tuple[int, ...], bool]] = []
        self._bytes: list[float] = []
        self._encodings: list[int] = []
        self._rows: dict[str, int] = {}
        for entry in listed:
            row = self._append(TensorType(type=entry) if isinstance(entry, str) else entry)
            spelling = spell_type(*self._parsed[row])
            self._rows[f"{spelling}#{row}"] = row
            self._rows[spelling] = -1 if spelling in self._rows else row

    def _append(self, entry: TensorType) -> int:
        parsed = parse_type(entry.type)
        size = default_type_bytes(*parsed[:2]) if entry.bytes is UNSET else parse_number(entry.bytes)
        self._parsed.append(parsed)
        self._bytes.append(size)
        self._encodings.append(self._texts.add(entry.encoding))
        return len(self._parsed) - 1

    def row(self, spelling: str) -> int:
        """The row a node's operand or result refers to; a new spelling adds a row."""
        row = self._rows.get(spelling)
        if row is None:
            row = self._rows[spelling] = self._resolve(spelling)
        if row < 0:
            raise ValueError(f"several types are spelled {spelling!r}; say which with #row")
        return row

    def _resolve(self, spelling: str) -> int:
        if "#" in spelling:
            raise ValueError(f"{spelling!r} names no row of types")
        canonical = spell_type(*parse_type(spelling))
        known = self._rows.get(canonical)
        return self._append(TensorType(type=spelling)) if known is None else known

    def build(self) -> TensorTypes:
        """The finished table."""
        lengths = [len(shape) for _, shape, _ in self._parsed]
        return TensorTypes(
            dtype=np.array([dtype for dtype, _, _ in self._parsed], np.int16),
            dim_offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
            dims=np.array(list(chain.from_iterable(shape for _, shape, _ in self._parsed)), np.int64),
            bytes=np.array(self._bytes, np.float64),
            bounded=np.array([bounded for _, _, bounded in self._parsed], np.bool_),
            encoding=np.array(self._encodings, np.int32),
        )


class _SideTables:
    """Rows of the side tables of one class, in node order."""

    def __init__(
        self,
        texts: _Texts,
        group_sets: tuple[GroupSet, ...],
        permutations: tuple[Permutation, ...],
        num_ranks: int,
    ) -> None:
        """``num_ranks`` is what inline permutations go over."""
        self._texts = texts
        self._num_ranks = num_ranks
        self.group_sets = list(group_sets)
        self.permutations = list(permutations)
        self._group_rows: dict[GroupSet, int] = {}
        self._permutation_rows: dict[Permutation, int] = {}
        for row, groups in enumerate(group_sets):
            self._group_rows.setdefault(groups, row)
        for row, permutation in enumerate(permutations):
            self._permutation_rows.setdefault(permutation, row)
        self.collectives: list[tuple[int, int, int, float, float, float, int, int]] = []
        self.p2p: list[tuple[int, int, float, int, bool]] = []
        self.contractions: list[tuple[int, int, int, int, int, float, float, int, int, int, int]] = []
        self.extra: list[tuple[int, int, int, bytes]] = []

    def add_collective(self, node: int, entry: Collective) -> None:
        """A node's ``collective``."""
        self.collectives.append(
            (
                node,
                parse_enum(CollectiveKind, entry.kind),
                self._group_row(entry),
                parse_number(entry.comm_bytes),
                parse_number(entry.operand_bytes),
                parse_number(entry.result_bytes),
                entry.channel,
                self._texts.add(entry.reduction),
            )
        )

    def _group_row(self, entry: Collective) -> int:
        if entry.groups is None:
            row = -1 if entry.group_set is None else entry.group_set
            return _checked("group_set", row, -1, len(self.group_sets))
        if entry.group_set is not None:
            raise ValueError("a collective has either group_set or groups")
        groups = parse_groups(entry.groups)
        if isinstance(groups, ExplicitGroups) and groups.group_size > 0:
            groups = compress_groups(np.array(groups.rows, np.int64))
        row = self._group_rows.setdefault(groups, len(self.group_sets))
        if row == len(self.group_sets):
            self.group_sets.append(groups)
        return row

    def add_p2p(self, node: int, entry: P2p) -> None:
        """A node's ``p2p``."""
        row = self._permutation_row(entry)
        self.p2p.append((node, row, parse_number(entry.comm_bytes), entry.tag, entry.host))

    def _permutation_row(self, entry: P2p) -> int:
        if entry.pairs is None:
            row = -1 if entry.permutation is None else entry.permutation
            return _checked("permutation", row, -1, len(self.permutations))
        if entry.permutation is not None:
            raise ValueError("a p2p has either permutation or pairs")
        permutation = Permutation.from_pairs(entry.pairs, self._num_ranks)
        row = self._permutation_rows.setdefault(permutation, len(self.permutations))
        if row == len(self.permutations):
            self.permutations.append(permutation)
        return row

    def add_contraction(self, node: int, entry: Contraction) -> None:
        """One of a node's ``contractions``."""
        flops = parse_number(entry.flops)
        useful_flops = flops if entry.useful_flops is UNSET else parse_number(entry.useful_flops)
        types = (parse_dtype(entry.lhs), parse_dtype(entry.rhs), parse_dtype(entry.accumulator))
        sizes = (entry.batch, entry.m, entry.n, entry.k)
        self.contractions.append((node, *sizes, flops, useful_flops, *types, entry.products))

    def add_extra(self, node: int, entry: Extra) -> None:
        """One of a node's, or of the file's (-1), verbatim attributes. Raises ``ValueError`` for two
        values.
        """
        if entry.text and entry.value:
            raise ValueError(f"extra {entry.key[:60]!r} has both text and value")
        self.extra.append((node, self._texts.add(entry.key), entry.tag, entry.text.encode() or entry.value))


def _build_regions(
    entries: Iterable[Region], texts: _Texts, carried: tuple[IntArray, IntArray, IntArray]
) -> RegionTable:
    """The region table; ``carried`` are region rows, producers and consumers as node numbers."""
    rows = [
        (entry.parent, parse_enum(RegionKind, entry.kind), parse_number(entry.trips), texts.add(entry.label))
        for entry in entries
    ]
    for row, (parent, *_) in enumerate(rows):
        _checked(f"regions[{row}].parent", parent, -1, row)
    return RegionTable.from_rows(rows, np.stack(carried, axis=1))


def _checked(name: str, row: int, low: int, high: int) -> int:
    if not low <= row < high:
        raise ValueError(f"{name} {row} does not exist; there are {high} (rows 0..{high - 1})")
    return row
