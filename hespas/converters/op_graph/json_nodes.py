"""Columns of one rank class, filled node by node from decoded JSON and then converted to a graph.

Buffers are flat, without an object per node. Dependencies remain ids until all nodes are read. Methods that
find a wrong reference raise ``ValueError``; the reader adds the position.
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
    ContractionEntry,
    DocumentCollective,
    ExtraEntry,
    NodeEntry,
    P2pEntry,
    RankClass,
    TensorTypeEntry,
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
from hespas.converters.op_graph.legality import FaultReporter, check_ids
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
from hespas.graph.builder import region_executions
from hespas.graph.columns import IntArray, constant_if_equal
from hespas.graph.errors import InvariantError
from hespas.graph.opgraph import NODE_DTYPES

__all__ = ["NodeColumns"]

_Scalar = TypeVar("_Scalar", bound=np.generic)
_Entry = TypeVar("_Entry")
_Parsed = TypeVar("_Parsed")

_MAX_ID = 2**64 - 1
_MAX_SETS = 1 << 20
"""Limit of distinct group sets or permutations; real programs have fewer than a hundred."""
_COSTS = ("flops", "useful_flops", "transcendentals", "bytes_read", "bytes_written", "duration_ns")
_INTEGERS = {
    "id": "Q",
    "name_id": "i",
    "op_id": "i",
    "kind": "B",
    "op_class": "B",
    "resource": "B",
    "stream": "i",
    "region": "i",
    "rate_dtype": "h",
    "source_id": "i",
    "framework_id": "i",
}
_RAGGED = {"data_deps": "Q", "control_deps": "Q", "operands": "i", "results": "i"}


class NodeColumns:
    """Growing columns of the nodes of one rank class. Call :meth:`add` for each node in order, then
    :meth:`build`. Raises ``ValueError`` for an impossible value or reference.
    """

    def __init__(self, fields: RankClass, num_ranks: int) -> None:
        """Read all fields of the rank class except its nodes."""
        self._fields = fields
        self._texts = _TextInterner()
        self._types = _TypeInterner(fields.types, self._texts)
        group_sets = _parsed("group_sets", fields.group_sets, parse_groups)
        permutations = _parsed("permutations", fields.permutations, parse_permutation)
        self._tables = _SideTables(self._texts, group_sets, permutations, num_ranks)
        self._regions = len(fields.regions)
        self._integers: dict[str, array[int]] = {name: array(code) for name, code in _INTEGERS.items()}
        self._costs = {name: array("d") for name in _COSTS}
        self._lengths = {name: array("i") for name in _RAGGED}
        self._values: dict[str, array[int]] = {name: array(code) for name, code in _RAGGED.items()}
        self._executions: dict[int, float] = {}
        for entry in fields.extra:
            self._tables.add_extra(-1, entry)

    def add(self, number: int, node: NodeEntry) -> None:
        """Append one node."""
        texts, types = self._texts, self._types
        identity = number if node.id is None else node.id
        largest = max(identity, *node.deps, *node.control_deps, 0)
        if largest > _MAX_ID:
            raise ValueError(f"node id {largest} is larger than 2**64 - 1")
        if not node.region < self._regions:
            raise ValueError(f"region {node.region} does not exist; there are {self._regions}")
        kind, op_class = inferred_kind(
            collective=node.collective is not None,
            p2p=node.p2p is not None,
            contraction=bool(node.contractions),
        )
        flops = parse_number(node.flops)
        self._append(
            identity,
            texts.add(node.name),
            texts.add(node.op),
            parse_enum(NodeKind, node.kind) if node.kind else kind,
            parse_enum(OpClass, node.op_class) if node.op_class else op_class,
            parse_enum(Resource, node.resource) if node.resource else int(Resource.DEVICE),
            node.stream,
            node.region,
            parse_dtype(node.rate_dtype),
            texts.add(node.source),
            texts.add(node.framework_op),
        )
        costs = self._costs
        costs["flops"].append(flops)
        costs["useful_flops"].append(flops if node.useful_flops is UNSET else parse_number(node.useful_flops))
        costs["transcendentals"].append(parse_number(node.transcendentals))
        costs["bytes_read"].append(parse_number(node.bytes_read))
        costs["bytes_written"].append(parse_number(node.bytes_written))
        costs["duration_ns"].append(parse_number(node.duration_ns))
        self._append_row("data_deps", node.deps)
        self._append_row("control_deps", node.control_deps)
        self._append_row("operands", [types.row(spelling) for spelling in node.operands])
        self._append_row("results", [types.row(spelling) for spelling in node.results])
        tables = self._tables
        if node.multiplicity is not UNSET:
            self._executions[number] = parse_number(node.multiplicity)
        if node.collective is not None:
            tables.add_collective(number, node.collective)
        if node.p2p is not None:
            tables.add_p2p(number, node.p2p)
        for contraction in node.contractions:
            tables.add_contraction(number, contraction)
        for entry in node.extra:
            tables.add_extra(number, entry)

    def _append(self, *values: int) -> None:
        for column, value in zip(self._integers.values(), values, strict=True):
            column.append(value)

    def _append_row(self, name: str, values: Sequence[int]) -> None:
        self._lengths[name].append(len(values))
        self._values[name].extend(values)

    def build(self, fault: FaultReporter) -> OpGraph:
        """Return the graph, with ids of dependencies replaced by node numbers. Structural faults are reported
        to ``fault``.
        """
        ids = _column(self._integers["id"], np.uint64)
        check_ids(ids, fault)
        lookup = _IdLookup(ids, by_position=self._fields.deps_by == "position", fault=fault)
        data_deps = self._resolve("data_deps", lookup)
        control_deps = self._resolve("control_deps", lookup)
        rows = np.array([carried_row[0] for carried_row in self._fields.carried], np.int64)
        if len(rows) and int(rows.max()) >= self._regions:
            raise ValueError(f"carried names region {int(rows.max())}; there are {self._regions}")
        if any(max(carried_row) > _MAX_ID for carried_row in self._fields.carried):
            largest = max(map(max, self._fields.carried))
            raise ValueError(f"carried names node id {largest}, which is larger than 2**64 - 1")
        consumers = lookup.numbers(
            np.array([carried_row[2] for carried_row in self._fields.carried], np.uint64), None
        )
        producers = lookup.numbers(
            np.array([carried_row[1] for carried_row in self._fields.carried], np.uint64), None
        )
        carried = np.stack([rows, producers, consumers], axis=1)[(consumers >= 0) & (producers >= 0)]
        entries = [
            (
                entry.parent,
                parse_enum(RegionKind, entry.kind),
                parse_number(entry.trips),
                self._texts.add(entry.label),
            )
            for entry in self._fields.regions
        ]
        for row, (parent, *_) in enumerate(entries):
            _checked(f"regions[{row}].parent", parent, -1, row)
        regions = RegionTable.from_rows(entries, carried)
        buffers: dict[str, array[int] | array[float]] = {**self._integers, **self._costs}
        columns: dict[str, NDArray[Any]] = {
            name: constant_if_equal(_column(buffer, NODE_DTYPES[name])) for name, buffer in buffers.items()
        }
        column = columns["flops"]
        other = columns["useful_flops"]
        columns |= {
            "id": ids,
            "useful_flops": column if np.array_equal(column, other, equal_nan=True) else other,
        }
        executions = region_executions(regions, columns["region"])
        if self._executions:
            executions = executions.copy()
            executions[np.fromiter(self._executions, np.int64)] = list(self._executions.values())
        tables = self._tables
        attachments = {unescape_text(key): value for key, value in self._fields.attachments.items()}
        return OpGraph(
            name=unescape_text(self._fields.name),
            group_sets=tuple(tables.group_sets),
            permutations=tuple(tables.permutations),
            **columns,
            executions=executions,
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
        is_known = numbers >= 0
        if not is_known.all():
            lengths = np.bincount(owners[is_known], minlength=len(lengths)).astype(np.int32)
        return RaggedArray.from_lengths(lengths, numbers[is_known])


class _IdLookup:
    """Look-up of node numbers by id. If nodes share an id, the first one counts."""

    def __init__(self, ids: NDArray[np.uint64], *, by_position: bool, fault: FaultReporter) -> None:
        self._ids = ids
        self._fault = fault
        counted = by_position or np.array_equal(ids, np.arange(len(ids), dtype=np.uint64))
        self._order = None if counted else np.argsort(ids, kind="stable")

    def numbers(self, wanted: NDArray[np.uint64], owners: IntArray | None) -> IntArray:
        """Return the node number of each id in ``wanted``. A missing id is reported as a fault and gives -1.

        ``owners`` are the nodes that refer to the ids, for messages.
        """
        nodes = np.uint64(len(self._ids))
        if not len(wanted):
            return np.empty(0, np.int64)
        if self._order is None or not nodes:
            numbers = np.where(wanted < nodes, wanted, 0).astype(np.int64)
            missing = wanted >= nodes
        else:
            ordered = self._ids[self._order]
            position = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
            numbers = self._order[position]
            missing = ordered[position] != wanted
        if missing.any():
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
        return np.where(missing, -1, numbers)


def _parsed(table: str, entries: Sequence[_Entry], parse: Callable[[_Entry], _Parsed]) -> tuple[_Parsed, ...]:
    """Parse all entries of a table of the document. A ``ValueError`` contains the position of the wrong
    entry.
    """
    if len(entries) > _MAX_SETS:
        raise ValueError(f"{table}: {len(entries):,} entries (limit {_MAX_SETS:,})")
    values: list[_Parsed] = []
    for row, entry in enumerate(entries):
        try:
            values.append(parse(entry))
        except (ValueError, InvariantError) as error:
            raise ValueError(f"{table}[{row}]: {error}") from error
    return tuple(values)


def _column(buffer: array[int] | array[float], dtype: type[_Scalar]) -> NDArray[_Scalar]:
    """Return a buffer of numbers as an array, without a copy."""
    return np.frombuffer(buffer, dtype) if len(buffer) else np.empty(0, dtype)


class _TextInterner:
    """Builder of the string table. Each distinct text is unescaped and stored once."""

    __slots__ = ("_rows", "_table")

    def __init__(self) -> None:
        self._table = StringTableBuilder()
        self._rows: dict[str, int] = {"": 0}

    def add(self, text: str) -> int:
        """Return the row of a text from the document, which may be escaped."""
        row = self._rows.get(text)
        if row is None:
            row = self._rows[text] = self._table.add(unescape_text(text))
        return row

    def build(self) -> StringTable:
        """Return the finished string table."""
        return self._table.build()


class _TypeInterner:
    """Builder of the type table: first the types that the document lists, then those that only nodes
    state.
    """

    __slots__ = ("_bytes", "_encodings", "_parsed", "_rows", "_texts")

    def __init__(self, listed: Iterable[str | TensorTypeEntry], texts: _TextInterner) -> None:
        """Add the listed types. If several types have the same text, nodes refer to them as ``TYPE#row``."""
        self._texts = texts
        self._parsed: list[tuple[int, tuple[int, ...], bool]] = []
        self._bytes: list[float] = []
        self._encodings: list[int] = []
        self._rows: dict[str, int] = {}
        for entry in listed:
            row = self._append(TensorTypeEntry(type=entry) if isinstance(entry, str) else entry)
            spelling = spell_type(*self._parsed[row])
            self._rows[f"{spelling}#{row}"] = row
            self._rows[spelling] = -1 if spelling in self._rows else row

    def _append(self, entry: TensorTypeEntry) -> int:
        parsed = parse_type(entry.type)
        size = default_type_bytes(*parsed[:2]) if entry.bytes is UNSET else parse_number(entry.bytes)
        self._parsed.append(parsed)
        self._bytes.append(size)
        self._encodings.append(self._texts.add(entry.encoding))
        return len(self._parsed) - 1

    def row(self, spelling: str) -> int:
        """Return the row of a type from its text form in a node; a new type is added."""
        row = self._rows.get(spelling)
        if row is None:
            row = self._rows[spelling] = self._resolve(spelling)
        if row < 0:
            raise ValueError(f"several types are spelled {spelling!r}; name one with #row")
        return row

    def _resolve(self, spelling: str) -> int:
        if "#" in spelling:
            raise ValueError(f"{spelling!r} does not name a row of types")
        canonical = spell_type(*parse_type(spelling))
        row = self._rows.get(canonical)
        return self._append(TensorTypeEntry(type=spelling)) if row is None else row

    def build(self) -> TensorTypes:
        """Return the finished type table."""
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
    """Builders of the collective, message, contraction and extra tables of one class, in node order."""

    def __init__(
        self,
        texts: _TextInterner,
        group_sets: tuple[GroupSet, ...],
        permutations: tuple[Permutation, ...],
        num_ranks: int,
    ) -> None:
        """Start with empty tables. Permutations that a node states itself are for ``num_ranks`` ranks."""
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
        self.contractions: list[tuple[int, int, int, int, int, float, float, int, int, int, int, int]] = []
        self.extra: list[tuple[int, int, int, bytes]] = []

    def add_collective(self, node: int, entry: DocumentCollective) -> None:
        """Add the collective of a node."""
        kind = parse_enum(CollectiveKind, entry.kind)
        if entry.groups is None:
            row = _checked(
                "group_set", -1 if entry.group_set is None else entry.group_set, -1, len(self.group_sets)
            )
        else:
            if entry.group_set is not None:
                raise ValueError("this collective has both group_set and groups: give only one")
            groups = parse_groups(entry.groups)
            if isinstance(groups, ExplicitGroups) and groups.group_size > 0:
                groups = compress_groups(np.array(groups.rows, np.int64))
            row = self._group_rows.setdefault(groups, len(self.group_sets))
            if row == len(self.group_sets):
                self.group_sets.append(groups)
        self.collectives.append(
            (
                node,
                kind,
                row,
                parse_number(entry.comm_bytes),
                parse_number(entry.operand_bytes),
                parse_number(entry.result_bytes),
                entry.channel,
                self._texts.add(entry.reduction),
            )
        )

    def add_p2p(self, node: int, entry: P2pEntry) -> None:
        """Add the message of a node."""
        if entry.pairs is None:
            row = -1 if entry.permutation is None else entry.permutation
            _checked("permutation", row, -1, len(self.permutations))
        else:
            if entry.permutation is not None:
                raise ValueError("this p2p has both permutation and pairs: give only one")
            permutation = Permutation.from_pairs(entry.pairs, self._num_ranks)
            row = self._permutation_rows.setdefault(permutation, len(self.permutations))
            if row == len(self.permutations):
                self.permutations.append(permutation)
        self.p2p.append((node, row, parse_number(entry.comm_bytes), entry.tag, entry.host))

    def add_contraction(self, node: int, entry: ContractionEntry) -> None:
        """Add a matmul or convolution of a node."""
        flops = parse_number(entry.flops)
        useful_flops = flops if entry.useful_flops is UNSET else parse_number(entry.useful_flops)
        types = (parse_dtype(entry.lhs), parse_dtype(entry.rhs), parse_dtype(entry.accumulator))
        sizes = (entry.batch, entry.m, entry.n, entry.k)
        self.contractions.append((node, *sizes, flops, useful_flops, *types, entry.products, entry.window))

    def add_extra(self, node: int, entry: ExtraEntry) -> None:
        """Add a preserved attribute of a node or of the file (-1). Raises ``ValueError`` if it has both
        ``text`` and ``value``.
        """
        if entry.text and entry.value:
            raise ValueError(f"extra {entry.key[:60]!r} has both text and value")
        self.extra.append((node, self._texts.add(entry.key), entry.tag, entry.text.encode() or entry.value))


def _checked(name: str, row: int, low: int, high: int) -> int:
    if not low <= row < high:
        raise ValueError(f"{name} {row} does not exist; there are {high} (rows 0..{high - 1})")
    return row
