"""Conversion of the trace of one rank class to a graph. Times change from microseconds to ns.

Every attribute value either moves to a column that can hold it exactly, or is preserved in the ``extra``
table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import nan

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.checks import Faults
from hespas.converters.chakra.contract import (
    COMM_TO_COLLECTIVE,
    LINTED,
    TYPE_TO_KIND,
    AttributeFacts,
    AttributeValues,
    Tag,
    default_classes,
)
from hespas.converters.chakra.op_classes import SCHEMA_ATTRIBUTE, classes_by_name
from hespas.converters.chakra.peers import ClassPeers
from hespas.converters.chakra.preserve import (
    attribute_rows,
    collect,
    file_rows,
    find_layouts,
    io_rows,
    layout_rows,
    start_rows,
    time_rows,
)
from hespas.converters.chakra.readiness import LIST_NAMES, states_lists, tensor_lists, written_bytes
from hespas.converters.chakra.spelling import parse_contractions, parse_io
from hespas.converters.chakra.times import LARGEST_MICROS, WrittenTimes, micros_as_ns
from hespas.converters.chakra.wire import Bools, EtColumns, Longs, Words, node_numbers, offsets_of
from hespas.graph import (
    DTYPES,
    CollectiveKind,
    CollectiveTable,
    ContractionTable,
    NodeKind,
    OpClass,
    OpGraph,
    P2pTable,
    RaggedArray,
    RegionTable,
    Resource,
    StringTable,
    StringTableBuilder,
    TensorTypesBuilder,
)
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray, constant

__all__ = ["to_graph"]

_DTYPE_CODES = {dtype.name: dtype.code for dtype in DTYPES}
_CLASS_BY_NAME = {member.name.lower(): int(member) for member in OpClass}
_LISTED = 8
_MICRO_NS = 1e3
"""Limit of the difference between whole microseconds, rounded in any direction, and whole ns of one time."""


def _deps(ids: Words, offsets: Longs, values: Words) -> RaggedArray:
    """Return dependencies as node numbers. Dependencies on unknown nodes are dropped."""
    if not len(values):
        return RaggedArray.empty(len(ids))
    numbers = node_numbers(ids, values)
    exists = numbers >= 0
    if exists.all():
        return RaggedArray(offsets, numbers.astype(np.int32))
    return RaggedArray(offsets_of(exists.astype(np.int64))[offsets], numbers[exists].astype(np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class _NodeCosts:
    """Costs of all nodes from the attributes of a trace, and properties of these attributes that a writer has
    to restore.
    """

    flops: FloatArray
    useful_flops: FloatArray
    transcendentals: FloatArray
    bytes_read: FloatArray
    bytes_written: FloatArray
    duration_ns: FloatArray
    exact_micros: Bools
    """Nodes that state the same time in ``duration_nanos`` and ``duration_micros``."""
    is_exact: bool
    """True if more than whole microseconds that a float holds are stated."""
    conflicts: int
    """Number of nodes whose two times differ by more than rounding."""
    bare: Bools
    """Nodes with a directly stated count of 0 whose other count is known."""
    counted_ops: AttributeValues
    counted_bytes: AttributeValues
    """Counts of 0 that are stated as 1."""

    def as_stated(self, reader: _AttributeReader) -> _NodeCosts:
        """Return the costs for a trace that must be written unchanged. FLOPs and bytes that the trace states
        as 1 instead of 0 are 1, and ``counted_ops`` and ``counted_bytes`` are preserved as attributes.
        """
        ops, moved = np.zeros((2, len(self.flops)), np.bool_)
        for counted, nodes in ((self.counted_ops, ops), (self.counted_bytes, moved)):
            nodes[counted.node] = True
            reader.modelled[counted.row] = False
        return replace(
            self,
            flops=np.where(ops, 1.0, self.flops),
            useful_flops=np.where(ops, 1.0, self.useful_flops),
            bytes_read=np.where(moved, 1.0 - self.bytes_written, self.bytes_read),
        )


def _costs(columns: EtColumns, reader: _AttributeReader) -> _NodeCosts:
    num_ops, tensor_size = (reader.take(reader.find(name)) for name in ("num_ops", "tensor_size"))
    counted_ops = _counted(reader, "counted_ops", num_ops, tensor_size)
    counted_bytes = _counted(reader, "counted_bytes", tensor_size, num_ops)
    flops, moved = num_ops.copy(), tensor_size.copy()
    flops[counted_ops.node] = moved[counted_bytes.node] = 0.0
    useful = reader.find("useful_ops")
    useful_flops = reader.take(useful.where(useful.value != flops[useful.node]))
    written = reader.find("bytes_written")
    fits = written.value <= moved[written.node]
    reader.refuse("bytes_written", int((~fits).sum()))
    bytes_written = reader.take(written.where(fits & (written.value > 0)), default=0.0)
    counts = reader.find("transcendentals", low=-1)
    counted = np.isnan(flops[counts.node]) != (counts.value != 0)
    transcendentals = reader.take(counts.where(counted | (counts.value > 0)))
    # Zero microseconds may as well be an unknown time.
    micros = micros_as_ns(columns.duration_micros)
    nanos = reader.take(reader.find("duration_nanos"))
    run_ns = micros if columns.run_ns is None else columns.run_ns.astype(np.float64)
    # A missing count next to a known ``num_ops`` means 0; -1 means unknown.
    meant = np.where(np.isnan(transcendentals) & ~np.isnan(flops), 0.0, transcendentals)
    return _NodeCosts(
        flops=flops,
        useful_flops=np.where(np.isnan(useful_flops), flops, useful_flops),
        transcendentals=np.where(meant < 0, nan, meant),
        bytes_read=moved - bytes_written,
        bytes_written=np.where(np.isnan(moved), nan, bytes_written),
        duration_ns=np.where(np.isnan(nanos), np.where(run_ns > 0, run_ns, nan), nanos),
        exact_micros=(micros > 0) & (nanos == micros),
        is_exact=not np.isnan(nanos).all() or bool((micros >= _EXACT).any()),
        conflicts=int((np.abs(micros - nanos) >= _MICRO_NS).sum()),
        bare=((num_ops == 0) & (moved >= 0)) | ((tensor_size == 0) & (flops >= 0)),
        counted_ops=counted_ops,
        counted_bytes=counted_bytes,
    )


def _counted(reader: _AttributeReader, name: str, totals: FloatArray, others: FloatArray) -> AttributeValues:
    """Return the nodes whose count the trace states as 1 instead of 0 for ASTRA-sim (see :mod:`.readiness`),
    with their true count 0. ``totals`` are the stated counts, and the attribute ``name`` has the true counts.
    Only nodes whose count in ``others`` is known are returned, because writers do this for no other node.
    """
    true_counts = reader.find(name)
    is_raised = (totals[true_counts.node] == 1) & (others[true_counts.node] >= 0)
    true_counts = true_counts.where(is_raised & (true_counts.value == 0))
    reader.modelled[true_counts.row] = True
    return true_counts


def _places(reader: _AttributeReader) -> tuple[NDArray[np.uint8], SmallIntArray]:
    """Return the resource (device or host) and the stream on which each node runs, from its attributes."""
    count = len(reader.columns)
    flags = reader.facts.integers("is_cpu_op")
    resource = np.full(count, Resource.DEVICE, np.uint8)
    resource[flags.node[flags.value != 0]] = Resource.HOST
    reader.integers("is_cpu_op", reader.kind != NodeKind.METADATA, 0, 1)
    stream = np.full(count, -1, np.int32)
    streams = reader.integers("stream", np.ones(count, np.bool_), 0, (1 << 31) - 1)
    stream[streams.node] = streams.value
    return resource, stream


def _without_negative_times(columns: EtColumns, facts: AttributeFacts) -> tuple[EtColumns, _AttributeReader]:
    """Replace negative times by unknown ones. Return the columns and a reader of their attributes. Negative
    times occur only with ``recover``; otherwise the file was refused before.
    """
    negative = columns.duration_micros > LARGEST_MICROS
    if negative.any():
        columns = replace(columns, duration_micros=np.where(negative, np.uint64(0), columns.duration_micros))
    reader = _AttributeReader(columns, facts)
    nanos, rows = facts.integers("duration_nanos"), facts.rows("duration_nanos")
    reader.modelled[rows[np.isin(facts.owner[rows], nanos.node[nanos.value < 0])]] = True
    return columns, reader


def to_graph(
    columns: EtColumns, facts: AttributeFacts, peers: ClassPeers, name: str, faults: Faults
) -> OpGraph:
    """Return the graph of a rank class. ``columns`` are read from the file of one rank. ``peers`` are the
    group sets and permutations of the whole class.

    Unknown values are NaN or -1; invalid values are reported. O(nodes + attributes).
    """
    count = len(columns)
    columns, reader = _without_negative_times(columns, facts)
    strings, type_table = StringTableBuilder(), TensorTypesBuilder()
    operands, foreign_in = parse_io(columns.inputs, len(columns), type_table, strings)
    results, foreign_out = parse_io(columns.outputs, len(columns), type_table, strings)

    op_id, framework_id = reader.texts("op_type", strings), reader.texts("framework_op", strings)
    costs = _costs(columns, reader)
    resource, stream = _places(reader)
    dtype = reader.codes("dtype", _DTYPE_CODES, np.full(count, -1, np.int16))
    collectives, p2p = _collective_table(reader, peers, strings), _p2p_table(reader, peers)
    contractions = reader.contractions()
    forced = costs.exact_micros | _one_sided(columns, p2p, peers)
    # Start times, other microseconds than a writer would state, and foreign texts have no column.
    others = start_rows(columns)
    if costs.is_exact and columns.duration_micros.any():  # otherwise a writer may state the same times
        written = WrittenTimes.of(costs.duration_ns, reader.kind, (resource, stream)).micros
        others += time_rows(columns, costs.duration_ns, written)
    others += io_rows(columns.inputs.take(foreign_in), Tag.INPUTS)
    others += io_rows(columns.outputs.take(foreign_out), Tag.OUTPUTS)
    data_deps = _deps(columns.id, columns.data_offsets, columns.data_deps)
    size = written_bytes(reader.kind, (costs.bytes_read, costs.bytes_written), collectives, p2p)
    listed = _takes_lists(reader, data_deps, size, costs.bare & (resource == Resource.DEVICE))
    costs, unstated = (costs if listed else costs.as_stated(reader)), default_classes(reader.kind)
    unstated = unstated if listed else _classes_of_words(reader, unstated, costs.flops, op_id, strings)
    op_class = reader.codes("op_class", _CLASS_BY_NAME, unstated)
    flagged = reader.kind != NodeKind.METADATA
    layouts = find_layouts(columns.attrs, reader.modelled, flagged=flagged, forced=forced)
    others = [*file_rows(columns, strings, as_stated=not listed), *layout_rows(layouts, strings), *others]
    extra = collect([*others, *attribute_rows(columns, ~reader.modelled, strings)])
    _report(reader, costs, faults)
    # All node names are appended to the interned strings without being interned.
    table = strings.build()
    buffer = b"".join((bytes(table.buffer), columns.name.data.tobytes()))
    offsets = np.concatenate([table.offsets, columns.name.offsets[1:] + table.offsets[-1]])
    texts, first = StringTable(buffer, offsets), len(table)
    return OpGraph(
        name=name,
        strings=texts,
        types=type_table.build(),
        group_sets=peers.group_sets,
        permutations=peers.permutations,
        id=columns.id,
        name_id=np.arange(first, first + count, dtype=np.int32),
        op_id=op_id,
        kind=reader.kind,
        op_class=op_class.astype(np.uint8),
        resource=resource,
        stream=stream,
        region=np.broadcast_to(np.int32(-1), (count,)),
        rate_dtype=dtype.astype(np.int16),
        source_id=np.broadcast_to(np.int32(0), (count,)),
        framework_id=framework_id,
        flops=costs.flops,
        useful_flops=costs.useful_flops,
        transcendentals=costs.transcendentals,
        bytes_read=costs.bytes_read,
        bytes_written=costs.bytes_written,
        duration_ns=costs.duration_ns,
        executions=constant(1.0, count),
        data_deps=data_deps,
        control_deps=_deps(columns.id, columns.ctrl_offsets, columns.ctrl_deps),
        operands=operands,
        results=results,
        collectives=collectives,
        p2p=p2p,
        contractions=contractions,
        regions=RegionTable.empty(),
        extra=extra,
    )


def _takes_lists(reader: _AttributeReader, data_deps: RaggedArray, size: Longs, bare: Bools) -> bool:
    """Return True if a writer would produce the tensor lists of this trace, so that they need not be
    preserved. ``bare`` marks nodes with a count of 0. If one of them is a computation, return False, because
    a writer replaces its count by 1.
    """
    if (bare & (reader.kind == NodeKind.COMPUTE)).any():
        return False
    if not all(name in reader.columns.attrs.keys for name in LIST_NAMES):
        return False
    nodes = np.flatnonzero(reader.kind != NodeKind.METADATA)
    rows = states_lists(reader.facts, tensor_lists(reader.columns.id, data_deps, size), nodes)
    if rows is None:
        return False
    reader.modelled[rows] = True
    return True


def _classes_of_words(
    reader: _AttributeReader,
    default: NDArray[np.uint8],
    flops: FloatArray,
    op_id: SmallIntArray,
    strings: StringTableBuilder,
) -> NDArray[np.uint8]:
    """Return operation classes derived from the names in another tool's trace."""
    names, operations = reader.columns.name, strings.build()

    def words(nodes: list[int]) -> Iterator[str]:
        for node, row in zip(nodes, op_id[nodes].tolist(), strict=True):
            yield operations[row] if row else names.text(node)

    metadata = AttributeFacts.of(reader.columns.metadata)
    return classes_by_name(default, (reader.kind, flops), words, metadata.text(SCHEMA_ATTRIBUTE).decode())


def _report(reader: _AttributeReader, costs: _NodeCosts, faults: Faults) -> None:
    """Report invalid values, and durations in microseconds that contradict the durations in ns."""
    note = "both are kept" if reader.columns.duration_micros.any() else "a trace written from it has both"
    message = "duration_micros, which simulators read, differs from duration_nanos, which is used here"
    faults.lint("chakra.duration-conflict", f"{message}; {note}", costs.conflicts)
    message = (
        "attribute values are invalid (negative, too large, or malformed); they count as unknown and "
        f"are kept: {', '.join(list(reader.refused)[:_LISTED])}"
    )
    faults.lint("chakra.bad-value", message, sum(reader.refused.values()))


def _one_sided(columns: EtColumns, p2p: P2pTable, peers: ClassPeers) -> Bools:
    """Return a mask of the messages that state only a sender or only a receiver, although traces should state
    both.
    """
    num_stated = np.bincount(columns.attrs.owner[peers.peer_rows], minlength=len(columns))
    alone = np.zeros(len(columns), np.bool_)
    nodes = p2p.node[p2p.permutation >= 0]
    alone[nodes] = num_stated[nodes] < 2
    return alone


_LARGEST_NUMBER = (1 << 63) - 1


def _collective_table(
    reader: _AttributeReader, peers: ClassPeers, strings: StringTableBuilder
) -> CollectiveTable:
    """Return the collective table; ``peers`` has the group set of each collective."""
    is_collective = reader.kind == NodeKind.COLLECTIVE
    nodes = np.flatnonzero(is_collective)
    kind = np.full(len(reader.columns), CollectiveKind.UNKNOWN, np.uint8)
    comm_types = reader.integers("comm_type", is_collective, 0, max(COMM_TO_COLLECTIVE))
    meaning = np.array(
        [COMM_TO_COLLECTIVE[number] for number in range(max(COMM_TO_COLLECTIVE) + 1)], np.uint8
    )
    kind[comm_types.node] = meaning[comm_types.value]
    reader.modelled[peers.group_rows] = True
    return CollectiveTable(
        node=nodes.astype(np.int32),
        kind=kind[nodes],
        group_set=peers.group_set.astype(np.int32),
        comm_bytes=reader.sizes("comm_size", is_collective)[nodes],
        operand_bytes=reader.sizes("comm_operand_bytes", is_collective)[nodes],
        result_bytes=reader.sizes("comm_result_bytes", is_collective)[nodes],
        channel=reader.numbers("channel", is_collective)[nodes],
        reduction=reader.texts("reduction", strings, is_collective)[nodes],
    )


def _p2p_table(reader: _AttributeReader, peers: ClassPeers) -> P2pTable:
    """Return the table of messages; ``peers`` has the permutation of each message."""
    is_message = (reader.kind == NodeKind.SEND) | (reader.kind == NodeKind.RECV)
    nodes = np.flatnonzero(is_message)
    reader.modelled[peers.peer_rows] = True
    return P2pTable(
        node=nodes.astype(np.int32),
        permutation=peers.permutation.astype(np.int32),
        comm_bytes=reader.sizes("comm_size", is_message)[nodes],
        tag=reader.numbers("comm_tag", is_message)[nodes],
        host=np.zeros(len(nodes), np.bool_),
    )


_EXACT = 1 << 53
"""Limit up to which floats hold every integer."""

_LARGEST = (1 << 62) - 1
"""Limit above which a float that is cast to an integer may not fit."""


class _AttributeReader:
    """Reader that copies attribute values into columns of the graph. ``modelled`` marks the attribute rows
    that were copied. All other rows are preserved as attributes.
    """

    def __init__(self, columns: EtColumns, facts: AttributeFacts) -> None:
        self.columns = columns
        self.facts = facts
        table = np.full(max(TYPE_TO_KIND) + 2, NodeKind.INVALID, np.uint8)
        for number, kind in TYPE_TO_KIND.items():
            table[number] = kind
        is_valid = (columns.type >= 0) & (columns.type <= max(TYPE_TO_KIND))
        self.kind = table[np.where(is_valid, columns.type, len(table) - 1)]
        self.modelled: Bools = np.zeros(len(columns.attrs), np.bool_)
        self.refused: dict[str, int] = {}
        """How many values of an attribute mean nothing to the graph: negative, too large, of a wrong type."""

    def refuse(self, name: str, count: int) -> None:
        """Count invalid values of an attribute. They are preserved as attributes and not copied into a
        column.
        """
        if count:
            self.refused[name] = self.refused.get(name, 0) + count

    def find(self, name: str, low: int = 0, nodes: Bools | None = None) -> AttributeValues:
        """Return the valid values of an integer attribute, of all nodes or of the marked ``nodes``. Values
        below ``low``, and values that a float cannot hold exactly, are reported as invalid.
        """
        values = self.facts.integers(name)
        fits = (values.value >= low) & (values.value <= _LARGEST)
        good = fits & (np.where(fits, values.value, 0).astype(np.float64).astype(np.int64) == values.value)
        return self._within(name, values, good if nodes is None else good & nodes[values.node], nodes)

    def _within(
        self, name: str, values: AttributeValues, good: Bools, nodes: Bools | None = None
    ) -> AttributeValues:
        """Return the values marked in ``good``; count all other values of the marked nodes as invalid."""
        good_ones = values.where(good)
        rows = self.facts.first_rows(name, integral=name in LINTED)
        num_stated = len(rows) if nodes is None else int(nodes[self.facts.owner[rows]].sum())
        self.refuse(name, num_stated - len(good_ones.node))
        return good_ones

    def take(self, values: AttributeValues, default: float = nan) -> FloatArray:
        """Return a column of floats with these values, and ``default`` for all other nodes. Mark the
        attribute rows as copied.
        """
        if not len(values.node):
            return constant(default, len(self.columns))
        column = np.full(len(self.columns), default)
        column[values.node] = values.value
        self.modelled[values.row] = True
        return column

    def integers(self, name: str, nodes: Bools, low: int, high: int) -> AttributeValues:
        """Return the values of an integer attribute of the marked ``nodes``, and mark their rows as copied.
        Values that are not between ``low`` and ``high`` are reported as invalid.
        """
        values = self.facts.integers(name)
        good = nodes[values.node] & (values.value >= low) & (values.value <= high)
        values = self._within(name, values, good, nodes)
        self.modelled[values.row] = True
        return values

    def sizes(self, name: str, nodes: Bools) -> FloatArray:
        """Return an integer attribute of the marked ``nodes`` as a column of bytes, NaN if absent."""
        return self.take(self.find(name, nodes=nodes))

    def numbers(self, name: str, nodes: Bools) -> IntArray:
        """Return an integer attribute of the marked ``nodes`` as a column, -1 if absent."""
        values = self.integers(name, nodes, 0, _LARGEST_NUMBER)
        column = np.full(len(self.columns), -1, np.int64)
        column[values.node] = values.value
        return column

    def texts(self, name: str, strings: StringTableBuilder, nodes: Bools | None = None) -> SmallIntArray:
        """Return a string attribute as a column of string table rows, 0 if absent. Empty strings are
        preserved.
        """
        values = self.facts.texts(name)
        if nodes is not None:
            values = values.where(nodes[values.node])
        texts, index = self.facts.distinct(values)
        rows = np.array([strings.add(text) for text in texts] or [0], np.int32)
        column = np.zeros(len(self.columns), np.int32)
        column[values.node] = rows[index]
        self.modelled[values.row[rows[index] > 0]] = True
        return column

    def codes(self, name: str, table: dict[str, int], default: NDArray[np.integer]) -> NDArray[np.integer]:
        """Return the codes in ``table`` for the values of a string attribute, one per node; nodes without the
        attribute have the code in ``default``. Values that are not in ``table``, and values that mean the
        default, are preserved as attributes.
        """
        values = self.facts.texts(name)
        texts, index = self.facts.distinct(values)
        meaning = np.array([table.get(text, -1) for text in texts] or [-1])[index]
        good = (meaning >= 0) & (meaning != default[values.node])
        column = default.copy()
        column[values.node[good]] = meaning[good]
        self.modelled[values.row[good]] = True
        unknown = np.array([text != "" and text not in table for text in texts] or [False])[index]
        self.refuse(name, int(unknown.sum()) + self._no_texts(name))
        return column

    def _no_texts(self, name: str) -> int:
        """Return the number of nodes on which the attribute ``name``, which should be a string, has another
        type.
        """
        return len(self.facts.first_rows(name)) - len(self.facts.texts(name).row)

    def contractions(self) -> ContractionTable:
        """Return the table of matmuls and convolutions. Texts that cannot be parsed are preserved."""
        values = self.facts.texts("contractions")
        self.refuse("contractions", self._no_texts("contractions"))
        if not len(values.node):
            return ContractionTable.empty()
        table, foreign = parse_contractions(values.node, *self.facts.distinct(values))
        self.refuse("contractions", len(foreign))
        self.modelled[np.delete(values.row, foreign)] = True
        return table
