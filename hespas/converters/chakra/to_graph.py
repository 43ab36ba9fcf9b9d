"""A trace of one rank class as a graph of the hub. Units at the border: microseconds -> ns.

Every attribute value either goes into a column that can hold it exactly, or stays in ``extra`` as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import nan

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.contract import (
    COMM_TO_COLLECTIVE,
    LINTED,
    TYPE_TO_KIND,
    AttributeFacts,
    Faults,
    Stated,
    Tag,
    default_classes,
)
from hespas.converters.chakra.peers import Peers
from hespas.converters.chakra.preserve import (
    ExtraRows,
    attribute_rows,
    collect,
    file_rows,
    find_layouts,
    io_rows,
    layout_rows,
    start_rows,
    time_rows,
)
from hespas.converters.chakra.readiness import (
    LIST_NAMES,
    SCHEMA_ATTRIBUTE,
    classes_by_name,
    states_lists,
    tensor_lists,
    written_bytes,
)
from hespas.converters.chakra.spelling import (
    LARGEST_MICROS,
    Times,
    micros_as_ns,
    parse_contractions,
    parse_io,
)
from hespas.converters.chakra.wire import Bools, EtColumns, IoColumns, Longs, Words, offsets_of
from hespas.graph import (
    CollectiveKind,
    CollectiveTable,
    ContractionTable,
    ExtraTable,
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
    find_dtype,
)
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray, constant

__all__ = ["node_numbers", "to_graph"]

_CLASS_BY_NAME = {member.name.lower(): int(member) for member in OpClass}
_LISTED = 8
_MICRO_NS = 1e3
"""Whole microseconds and whole ns of one time differ by less, however the former were rounded."""


def node_numbers(ids: Words, deps: Words) -> Longs:
    """The node number of each id in ``deps``, -1 where there is none; of equal ids the last counts."""
    count = np.uint64(len(ids))
    if np.array_equal(ids, np.arange(len(ids), dtype=np.uint64)):
        return np.where(deps < count, deps, np.uint64(0)).view(np.int64) - (deps >= count)
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    place = np.searchsorted(ordered, deps, side="right") - 1
    found = (place >= 0) & (ordered[np.maximum(place, 0)] == deps)
    return np.where(found, order[np.maximum(place, 0)], -1)


def _with_names(columns: EtColumns, strings: StringTableBuilder) -> tuple[StringTable, int]:
    """The interned strings, all node names behind them (not interned), and the row of the first of these."""
    table = strings.build()
    buffer = b"".join((bytes(table.buffer), columns.name.data.tobytes()))
    offsets = np.concatenate([table.offsets, columns.name.offsets[1:] + table.offsets[-1]])
    return StringTable(buffer, offsets), len(table)


def _deps(ids: Words, offsets: Longs, values: Words) -> RaggedArray:
    if not len(values):
        return RaggedArray.empty(len(ids))
    numbers = node_numbers(ids, values)
    known = numbers >= 0
    if known.all():
        return RaggedArray(offsets, numbers.astype(np.int32))
    return RaggedArray(offsets_of(known.astype(np.int64))[offsets], numbers[known].astype(np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class _Costs:
    flops: FloatArray
    useful_flops: FloatArray
    transcendentals: FloatArray
    bytes_read: FloatArray
    bytes_written: FloatArray
    duration_ns: FloatArray
    exact_micros: Bools
    """Nodes that state in ``duration_nanos`` what ``duration_micros`` says as well."""
    is_exact: bool
    """Whether more than whole microseconds that a float holds are stated."""
    conflicts: int
    """How many state there what no rounding makes of it."""
    bare: Bools
    """Nodes that state a count of 0 as it is, and know the other one."""
    counted_ops: Stated
    counted_bytes: Stated
    """Counts of 0 that are stated as 1."""

    def as_stated(self, reader: _AttributeReader) -> _Costs:
        """Costs of a trace that is written again as it is: the 1 counts, what stands beside it is kept."""
        ops, moved = np.zeros((2, len(self.flops)), np.bool_)
        for found, nodes in ((self.counted_ops, ops), (self.counted_bytes, moved)):
            nodes[found.node] = True
            reader.modelled[found.row] = False
        return replace(
            self,
            flops=np.where(ops, 1.0, self.flops),
            useful_flops=np.where(ops, 1.0, self.useful_flops),
            bytes_read=np.where(moved, 1.0 - self.bytes_written, self.bytes_read),
        )


def _costs(columns: EtColumns, reader: _AttributeReader) -> _Costs:
    num_ops, tensor_size = (reader.take(reader.find(name)) for name in ("num_ops", "tensor_size"))
    counted_ops = _counted(reader, "counted_ops", num_ops)
    counted_bytes = _counted(reader, "counted_bytes", tensor_size)
    flops, moved = num_ops.copy(), tensor_size.copy()
    flops[counted_ops.node] = moved[counted_bytes.node] = 0.0
    useful = reader.find("useful_ops")
    useful_flops = reader.take(useful.where(useful.value != flops[useful.node]))
    written = reader.find("bytes_written")
    fits = written.value <= moved[written.node]
    reader.refuse("bytes_written", int((~fits).sum()))
    bytes_written = reader.take(written.where(fits & (written.value > 0)), default=0.0)
    stated = reader.find("transcendentals", low=-1)
    counted = np.isnan(flops[stated.node]) != (stated.value != 0)
    transcendentals = reader.take(stated.where(counted | (stated.value > 0)))
    # Zero microseconds may as well be an unknown time.
    micros = micros_as_ns(columns.duration_micros)
    nanos = reader.take(reader.find("duration_nanos"))
    run_ns = micros if columns.run_ns is None else columns.run_ns.astype(np.float64)
    return _Costs(
        flops=flops,
        useful_flops=np.where(np.isnan(useful_flops), flops, useful_flops),
        transcendentals=_transcendentals(transcendentals, flops),
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


def _counted(reader: _AttributeReader, name: str, stated: FloatArray) -> Stated:
    """Counts that are stated as 1 because a simulator cannot do with the true one."""
    found = reader.find(name)
    found = found.where((stated[found.node] == 1) & (found.value == 0))
    reader.modelled[found.row] = True
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Types:
    operands: RaggedArray
    results: RaggedArray
    foreign: tuple[IoColumns, IoColumns]


def _types(columns: EtColumns, types: TensorTypesBuilder, strings: StringTableBuilder) -> _Types:
    operands, foreign_in = parse_io(columns.inputs, len(columns), types, strings)
    results, foreign_out = parse_io(columns.outputs, len(columns), types, strings)
    return _Types(operands, results, (columns.inputs.take(foreign_in), columns.outputs.take(foreign_out)))


def _transcendentals(stated: FloatArray, flops: FloatArray) -> FloatArray:
    """Stated numbers; none beside a known ``num_ops`` means 0, and -1 unknown."""
    meant = np.where(np.isnan(stated) & ~np.isnan(flops), 0.0, stated)
    return np.where(meant < 0, nan, meant)


def _extra(
    columns: EtColumns,
    reader: _AttributeReader,
    others: list[ExtraRows],
    forced: Bools,
    strings: StringTableBuilder,
    *,
    as_stated: bool,
) -> ExtraTable:
    flagged = reader.kind != NodeKind.METADATA
    layouts = find_layouts(columns.attrs, reader.modelled, flagged=flagged, forced=forced)
    return collect(
        [
            *file_rows(columns, strings, as_stated=as_stated),
            *layout_rows(layouts, strings),
            *others,
            *attribute_rows(columns, ~reader.modelled, strings),
        ]
    )


def _places(reader: _AttributeReader) -> tuple[NDArray[np.uint8], SmallIntArray]:
    """Resource and stream of each node."""
    count = len(reader.columns)
    flags = reader.facts.integers("is_cpu_op")
    resource = np.full(count, Resource.DEVICE, np.uint8)
    resource[flags.node[flags.value != 0]] = Resource.HOST
    reader.integers("is_cpu_op", reader.kind != NodeKind.METADATA, 0, 1)
    stream = np.full(count, -1, np.int32)
    streams = reader.integers("stream", np.ones(count, np.bool_), 0, (1 << 31) - 1)
    stream[streams.node] = streams.value
    return resource, stream


def _verbatim(
    columns: EtColumns,
    costs: _Costs,
    tensors: _Types,
    place: tuple[NDArray[np.uint8], NDArray[np.uint8], SmallIntArray],
) -> list[ExtraRows]:
    """What a trace states beside attributes and a graph has no column for."""
    kind, resource, stream = place
    found = start_rows(columns)
    if costs.is_exact and columns.duration_micros.any():  # else a writer may fill them in
        written = Times.of(costs.duration_ns, kind, (resource, stream)).micros
        found += time_rows(columns, costs.duration_ns, written)
    for io, tag in zip(tensors.foreign, (Tag.INPUTS, Tag.OUTPUTS), strict=True):
        found += io_rows(io, tag)
    return found


def _without_negative_times(columns: EtColumns, facts: AttributeFacts) -> tuple[EtColumns, _AttributeReader]:
    """The columns, and a reader of their attributes, without times that are errors: who comes here with one
    asked for repairs.
    """
    negative = columns.duration_micros > LARGEST_MICROS
    if negative.any():
        columns = replace(columns, duration_micros=np.where(negative, np.uint64(0), columns.duration_micros))
    reader = _AttributeReader(columns, facts)
    nanos, rows = facts.integers("duration_nanos"), facts.rows("duration_nanos")
    reader.modelled[rows[np.isin(facts.owner[rows], nanos.node[nanos.value < 0])]] = True
    return columns, reader


def to_graph(columns: EtColumns, facts: AttributeFacts, peers: Peers, name: str, faults: Faults) -> OpGraph:
    """The graph of a class whose ranks share these columns; who talks to whom is in ``peers``.

    Unknown is NaN or -1; values that cannot be meant are reported. Cost: O(nodes + attributes), vectorised.
    """
    count = len(columns)
    columns, reader = _without_negative_times(columns, facts)
    strings, type_table = StringTableBuilder(), TensorTypesBuilder()
    tensors = _types(columns, type_table, strings)
    op_row, framework_row = reader.texts("op_type", strings), reader.texts("framework_op", strings)
    costs = _costs(columns, reader)
    resource, stream = _places(reader)
    dtype = reader.codes("dtype", _dtype_codes(facts), np.full(count, -1, np.int16))
    collectives, p2p = _collective_table(reader, peers, strings), _p2p_table(reader, peers)
    contractions = reader.contractions()
    forced = costs.exact_micros | _one_sided(columns, p2p, peers)
    others = _verbatim(columns, costs, tensors, (reader.kind, resource, stream))
    data_deps = _deps(columns.id, columns.data_offsets, columns.data_deps)
    size = written_bytes(reader.kind, (costs.bytes_read, costs.bytes_written), collectives, p2p)
    listed = _takes_lists(reader, data_deps, size, costs.bare & (resource == Resource.DEVICE))
    costs, unstated = (costs if listed else costs.as_stated(reader)), default_classes(reader.kind)
    unstated = unstated if listed else _told(reader, unstated, costs.flops, op_row, strings)
    op_class = reader.codes("op_class", _CLASS_BY_NAME, unstated)
    extra = _extra(columns, reader, others, forced, strings, as_stated=not listed)
    _report(reader, costs, faults)
    texts, first = _with_names(columns, strings)
    return OpGraph(
        name=name,
        strings=texts,
        types=type_table.build(),
        group_sets=peers.group_sets,
        permutations=peers.permutations,
        id=columns.id,
        name_row=np.arange(first, first + count, dtype=np.int32),
        op_row=op_row,
        kind=reader.kind,
        op_class=op_class.astype(np.uint8),
        resource=resource,
        stream=stream,
        region=np.broadcast_to(np.int32(-1), (count,)),
        rate_dtype=dtype.astype(np.int16),
        source_row=np.broadcast_to(np.int32(0), (count,)),
        framework_row=framework_row,
        flops=costs.flops,
        useful_flops=costs.useful_flops,
        transcendentals=costs.transcendentals,
        bytes_read=costs.bytes_read,
        bytes_written=costs.bytes_written,
        duration_ns=costs.duration_ns,
        multiplicity=constant(1.0, count),
        data_deps=data_deps,
        control_deps=_deps(columns.id, columns.ctrl_offsets, columns.ctrl_deps),
        operands=tensors.operands,
        results=tensors.results,
        collectives=collectives,
        p2p=p2p,
        contractions=contractions,
        regions=RegionTable.empty(),
        extra=extra,
    )


def _takes_lists(reader: _AttributeReader, data_deps: RaggedArray, size: Longs, bare: Bools) -> bool:
    """Whether all nodes that do anything list the tensors that a writer would list, and none is a computation
    with a ``bare`` count, which a writer would not leave; the lists then count as accounted for.
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


def _told(
    reader: _AttributeReader,
    default: NDArray[np.uint8],
    flops: FloatArray,
    op_row: SmallIntArray,
    strings: StringTableBuilder,
) -> NDArray[np.uint8]:
    """The classes that the words of another tool's trace tell."""
    names, operations = reader.columns.name, strings.build()

    def words(nodes: list[int]) -> Iterator[str]:
        for node, row in zip(nodes, op_row[nodes].tolist(), strict=True):
            yield operations[row] if row else names.text(node)

    metadata = AttributeFacts.of(reader.columns.metadata)
    schemas = list(metadata.values(metadata.texts(SCHEMA_ATTRIBUTE)))
    return classes_by_name(default, (reader.kind, flops), words, schemas[0].decode() if schemas else "")


def _report(reader: _AttributeReader, costs: _Costs, faults: Faults) -> None:
    """Say what the trace states and the graph does not take from it."""
    kept = "both are kept" if reader.columns.duration_micros.any() else "a trace written from it has both"
    message = "duration_micros, which simulators read, is not what duration_nanos says, which is taken here"
    faults.lint("chakra.duration-conflict", f"{message}; {kept}", costs.conflicts)
    message = (
        "attribute values mean nothing (negative, too large, or of no known form); they count as unknown and "
        f"are kept: {', '.join(list(reader.refused)[:_LISTED])}"
    )
    faults.lint("chakra.bad-value", message, sum(reader.refused.values()))


def _one_sided(columns: EtColumns, p2p: P2pTable, peers: Peers) -> Bools:
    """Messages that state their peer but not their own rank, which a writer would."""
    stated = np.bincount(columns.attrs.owner[peers.peer_rows], minlength=len(columns))
    alone = np.zeros(len(columns), np.bool_)
    nodes = p2p.node[p2p.permutation >= 0]
    alone[nodes] = stated[nodes] < 2
    return alone


def _dtype_codes(facts: AttributeFacts) -> dict[str, int]:
    """The element types this trace names by the spelling of the hub's table."""
    texts, _ = facts.distinct(facts.texts("dtype"))
    found = {text: find_dtype(text) for text in texts}
    return {text: entry.code for text, entry in found.items() if entry is not None and entry.name == text}


# Collectives and messages of a trace as tables of the hub.

_LARGEST_NUMBER = (1 << 63) - 1


def _collective_table(reader: _AttributeReader, peers: Peers, strings: StringTableBuilder) -> CollectiveTable:
    """One row per collective node; who takes part is in ``peers``."""
    is_collective = reader.kind == NodeKind.COLLECTIVE
    nodes = np.flatnonzero(is_collective)
    kind = np.full(len(reader.columns), CollectiveKind.UNKNOWN, np.uint8)
    stated = reader.integers("comm_type", is_collective, 0, max(COMM_TO_COLLECTIVE))
    meaning = np.array(
        [COMM_TO_COLLECTIVE[number] for number in range(max(COMM_TO_COLLECTIVE) + 1)], np.uint8
    )
    kind[stated.node] = meaning[stated.value]
    reader.modelled[peers.group_rows] = True
    return CollectiveTable(
        node=nodes.astype(np.int32),
        kind=kind[nodes],
        group_set=peers.group_set.astype(np.int32),
        comm_bytes=_sizes(reader, "comm_size", is_collective)[nodes],
        operand_bytes=_sizes(reader, "comm_operand_bytes", is_collective)[nodes],
        result_bytes=_sizes(reader, "comm_result_bytes", is_collective)[nodes],
        channel=_numbers(reader, "channel", is_collective)[nodes],
        reduction=reader.texts("reduction", strings, is_collective)[nodes],
    )


def _p2p_table(reader: _AttributeReader, peers: Peers) -> P2pTable:
    """One row per message node; whom it goes to is in ``peers``."""
    is_message = (reader.kind == NodeKind.SEND) | (reader.kind == NodeKind.RECV)
    nodes = np.flatnonzero(is_message)
    reader.modelled[peers.peer_rows] = True
    return P2pTable(
        node=nodes.astype(np.int32),
        permutation=peers.permutation.astype(np.int32),
        comm_bytes=_sizes(reader, "comm_size", is_message)[nodes],
        tag=_numbers(reader, "comm_tag", is_message)[nodes],
        host=np.zeros(len(nodes), np.bool_),
    )


def _sizes(reader: _AttributeReader, name: str, nodes: Bools) -> FloatArray:
    """Bytes by node, NaN where not stated."""
    return reader.take(reader.find(name, nodes=nodes))


def _numbers(reader: _AttributeReader, name: str, nodes: Bools) -> IntArray:
    """Numbers by node, -1 where not stated."""
    found = reader.integers(name, nodes, 0, _LARGEST_NUMBER)
    column = np.full(len(reader.columns), -1, np.int64)
    column[found.node] = found.value
    return column


# Moving attribute values of a trace into columns, remembering which attributes are accounted for.

_EXACT = 1 << 53
"""Up to here floats hold every integer."""

_LARGEST = (1 << 62) - 1
"""Beyond this a float that is cast to an integer may not fit."""


class _AttributeReader:
    """Moves attribute values into columns and remembers which rows are accounted for."""

    def __init__(self, columns: EtColumns, facts: AttributeFacts) -> None:
        self.columns = columns
        self.facts = facts
        self.kind = _kinds(columns.type)
        self.modelled: Bools = np.zeros(len(columns.attrs), np.bool_)
        self.refused: dict[str, int] = {}
        """How many values of an attribute mean nothing to the graph: negative, too large, of a wrong type."""

    def refuse(self, name: str, count: int) -> None:
        """Count values that stay attributes because they cannot be meant."""
        if count:
            self.refused[name] = self.refused.get(name, 0) + count

    def find(self, name: str, low: int = 0, nodes: Bools | None = None) -> Stated:
        """An integer attribute (of the nodes marked) from ``low`` on that a float holds exactly; others are
        refused.
        """
        found = self.facts.integers(name)
        fits = (found.value >= low) & (found.value <= _LARGEST)
        good = fits & (np.where(fits, found.value, 0).astype(np.float64).astype(np.int64) == found.value)
        return self._within(name, found, good if nodes is None else good & nodes[found.node], nodes)

    def _within(self, name: str, found: Stated, good: Bools, nodes: Bools | None = None) -> Stated:
        """The good ones; all others of the nodes marked are refused."""
        good_ones = found.where(good)
        rows = self.facts.first_rows(name, integral=name in LINTED)
        stated = len(rows) if nodes is None else int(nodes[self.facts.owner[rows]].sum())
        self.refuse(name, stated - len(good_ones.node))
        return good_ones

    def take(self, found: Stated, default: float = nan) -> FloatArray:
        """The values as a float column; they count as accounted for."""
        if not len(found.node):
            return constant(default, len(self.columns))
        column = np.full(len(self.columns), default)
        column[found.node] = found.value
        self.modelled[found.row] = True
        return column

    def integers(self, name: str, nodes: Bools, low: int, high: int) -> Stated:
        """Values of the nodes marked, within bounds; they count as accounted for, others are refused."""
        found = self.facts.integers(name)
        good = nodes[found.node] & (found.value >= low) & (found.value <= high)
        found = self._within(name, found, good, nodes)
        self.modelled[found.row] = True
        return found

    def texts(self, name: str, strings: StringTableBuilder, nodes: Bools | None = None) -> SmallIntArray:
        """A string attribute (of the nodes marked) as string rows, 0 where absent; empty values stay where
        they are.
        """
        found = self.facts.texts(name)
        if nodes is not None:
            found = found.where(nodes[found.node])
        texts, place = self.facts.distinct(found)
        rows = np.array([strings.add(text) for text in texts] or [0], np.int32)
        column = np.zeros(len(self.columns), np.int32)
        column[found.node] = rows[place]
        self.modelled[found.row[rows[place] > 0]] = True
        return column

    def codes(self, name: str, table: dict[str, int], default: NDArray[np.integer]) -> NDArray[np.integer]:
        """A string attribute by what its values mean; unknown values stay where they are, and so do those
        that equal the default.
        """
        found = self.facts.texts(name)
        texts, place = self.facts.distinct(found)
        meaning = np.array([table.get(text, -1) for text in texts] or [-1])[place]
        good = (meaning >= 0) & (meaning != default[found.node])
        column = default.copy()
        column[found.node[good]] = meaning[good]
        self.modelled[found.row[good]] = True
        unknown = np.array([text != "" and text not in table for text in texts] or [False])[place]
        self.refuse(name, int(unknown.sum()) + self._no_texts(name))
        return column

    def _no_texts(self, name: str) -> int:
        """Values of a string attribute that are none."""
        return len(self.facts.first_rows(name)) - len(self.facts.texts(name).row)

    def contractions(self) -> ContractionTable:
        """The matrix products and convolutions that nodes state; other texts stay where they are."""
        found = self.facts.texts("contractions")
        self.refuse("contractions", self._no_texts("contractions"))
        if not len(found.node):
            return ContractionTable.empty()
        table, foreign = parse_contractions(found.node, *self.facts.distinct(found))
        self.refuse("contractions", len(foreign))
        self.modelled[np.delete(found.row, foreign)] = True
        return table


def _kinds(types: NDArray[np.int32]) -> NDArray[np.uint8]:
    table = np.full(max(TYPE_TO_KIND) + 2, NodeKind.INVALID, np.uint8)
    for number, kind in TYPE_TO_KIND.items():
        table[number] = kind
    known = (types >= 0) & (types <= max(TYPE_TO_KIND))
    return table[np.where(known, types, len(table) - 1)]
