"""How many bytes traces take, without their being written.

In a job of many micro-batches most nodes are repetitions. Their frames differ in the node's own id, those it
waits for, and the lists of tensors that are called by them; how long those parts are follows from the
numbers. One frame of each kind is encoded, and gives the rest. The sum is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.comm_groups import GroupIds
from hespas.converters.chakra.contract import JOB_ATTRIBUTE
from hespas.converters.chakra.expansion import encoded
from hespas.converters.chakra.from_graph import Lowering, Variables
from hespas.converters.chakra.job_traces import JobTraces
from hespas.converters.chakra.lowering import unrolled
from hespas.converters.chakra.own_metadata import texts_of_job, with_metadata
from hespas.converters.chakra.readiness import LIST_NAMES, is_as_stated, list_bytes, written_bytes
from hespas.converters.chakra.wire import Longs, Words, offsets_of
from hespas.converters.chakra.wire.encode import varint_widths
from hespas.files.wire import tag
from hespas.graph import Diagnostics, NodeKind, OpGraph, RaggedArray, Workload
from hespas.graph.columns import is_one_value
from hespas.graph.opgraph import NODE_COLUMNS
from hespas.graph.passes import take_nodes
from hespas.schemas.chakra.tables import AttributeField, NodeField, WireType

__all__ = ["trace_bytes"]

_POWERS = 1 << np.arange(63, dtype=np.int64)
_MOST_TENSORS = 64
"""Operands of a node, beyond which all frames are encoded."""


def trace_bytes(workload: Workload) -> int:
    """Bytes of the files of all ranks that are here, without ``comm_group.json``, as a folder is written.
    O(classes x nodes + ranks x slots).
    """
    whole = workload.is_complete
    ranks = np.arange(workload.num_ranks) if whole else np.asarray(workload.present, np.int64)
    workload = unrolled(workload, ranks.tolist(), Diagnostics())
    numbers = {} if whole else {JOB_ATTRIBUTE: workload.num_ranks}
    change = partial(with_metadata, numbers=numbers, texts=texts_of_job(workload))
    job = JobTraces(workload, GroupIds.of(workload), Diagnostics(), change)
    total = 0
    known: dict[tuple[int, bytes, tuple[int, ...]], int] = {}
    kinds: tuple[tuple[int, bytes], _Kinds | None] | None = None
    for batch in job.batches(ranks):
        runs, variables = batch.runs, batch.values.variables(0)
        key = (runs.of_class, runs.pattern, batch.widths)
        if key not in known:
            if kinds is None or kinds[0] != key[:2]:
                kinds = (key[:2], _Kinds.of(runs.writer.graph))
            known[key] = (
                _whole(runs.writer.graph, variables) if kinds[1] is None else kinds[1].size(variables)
            )
        total += len(batch.ranks) * known[key]
    return total


def _whole(graph: OpGraph, variables: Variables) -> int:
    """The size of a trace that is encoded whole."""
    return sum(len(piece) for piece in encoded(part.columns for part in Lowering(graph).parts(variables)))


@dataclass(frozen=True, slots=True, eq=False)
class _Kinds:
    """A graph with one node of each kind, which kind each node is of, and the bytes of each node's parts that
    its number is in; those of the nodes of ``small`` are ``own``.
    """

    small: OpGraph
    which: Longs
    numbered: Longs
    own: Longs

    @classmethod
    def of(cls, graph: OpGraph) -> _Kinds | None:
        """None for a graph whose frames depend on more than their own row: times whose remainders are
        carried along, attributes that were kept from a file.
        """
        if not _is_plain(graph):
            return None
        found = _kinds(graph)
        if found is None:
            return None
        first, which = found
        alone = RaggedArray.empty(len(first))
        small = take_nodes(graph, first, alone, alone)
        return cls(small, which, _numbered(graph), _numbered(small))

    def size(self, variables: Variables) -> int:
        """The size of the trace of one rank."""
        parts = Lowering(self.small).parts(variables)
        data = np.concatenate(list(encoded(part.columns for part in parts)))
        head, *frames = _frames(data)
        rest = np.array([each.content for each in frames], np.int64) - self.own
        content = rest[self.which] + self.numbered
        return head.size + int(content.sum() + varint_widths(content.view(np.uint64)).sum())


class _Frame(NamedTuple):
    """Bytes of a message, and of the frame with its length in front."""

    content: int
    size: int


def _frames(data: NDArray[np.uint8]) -> Iterator[_Frame]:
    at = 0
    while at < len(data):
        start, content, shift = at, 0, 0
        while True:
            byte = int(data[at])
            content |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                break
        at += content
        yield _Frame(content, at - start)


def _is_plain(graph: OpGraph) -> bool:
    """Whether every frame depends on the row of its node alone, but for numbers of nodes."""
    known = graph.duration_ns[~np.isnan(graph.duration_ns)]
    lengths = np.diff(graph.strings.offsets)[graph.name_row]
    tables = (graph.collectives, graph.p2p, graph.contractions)
    return (
        len(graph) > 0
        and not known.any()
        and bool(lengths.all())  # the name of a node without anything is made up
        and not is_as_stated(graph)
        and not (graph.extra.node >= 0).any()
        and all(np.bincount(table.node).max(initial=0) < 2 for table in tables)
    )


def _kinds(graph: OpGraph) -> tuple[Longs, Longs] | None:
    """The first node of each kind, and the kind of each node; None where nodes have too many tensors."""
    if max(graph.operands.lengths.max(), graph.results.lengths.max()) > _MOST_TENSORS:
        return None
    _, first, which = np.unique(graph.name_row, return_index=True, return_inverse=True)
    for column in _columns(graph):
        if np.array_equal(column, column[first][which]):
            continue
        values, value = np.unique(column, return_inverse=True)
        _, first, which = np.unique(which * len(values) + value, return_index=True, return_inverse=True)
    return first, which


def _columns(graph: OpGraph) -> Iterator[Longs]:
    """All that a frame says beside numbers of nodes, as whole numbers."""
    for name in NODE_COLUMNS:
        column = getattr(graph, name)
        if name != "id" and not is_one_value(column):
            yield _whole_numbers(column)
    for tensors in (graph.operands, graph.results):
        owner = np.repeat(np.arange(len(graph)), tensors.lengths)
        place = np.arange(len(tensors.values)) - np.repeat(tensors.offsets[:-1], tensors.lengths)
        for number in range(int(place.max(initial=-1)) + 1):
            yield _placed(graph, owner[place == number], tensors.values[place == number])
    for table in (graph.collectives, graph.p2p, graph.contractions):
        for name in table.DTYPES:
            if name != "node":
                column = getattr(table, name)
                # tags number the messages of a trace: as many bits take as many bytes
                yield _placed(graph, table.node, _bits(column) if name == "tag" else column)


def _placed(graph: OpGraph, nodes: NDArray[np.integer], values: NDArray[np.generic]) -> Longs:
    """Values of some nodes by node; that others have none, their kind or their operation says."""
    column = np.full(len(graph), -1, np.int64)
    column[nodes] = _whole_numbers(values)
    return column


def _bits(values: Longs) -> Longs:
    """Bits of whole numbers; -1 of one below 0."""
    return np.where(values < 0, -1, np.searchsorted(_POWERS, values, side="right"))


def _whole_numbers(values: NDArray[np.generic]) -> Longs:
    if values.dtype == np.float64:
        return np.ascontiguousarray(values).view(np.int64)
    return values.astype(np.int64)


# --- the parts of a frame that numbers of nodes are in


def _numbered(graph: OpGraph) -> Longs:
    """Bytes of each node's id, dependencies and lists of tensors, tags and lengths included."""
    ids = graph.id
    widths = varint_widths(ids)
    found = np.where(ids == 0, 0, _tag_bytes(NodeField.ID, WireType.VARINT) + widths)
    for number, deps in ((NodeField.CTRL_DEPS, graph.control_deps), (NodeField.DATA_DEPS, graph.data_deps)):
        content = _sums(widths, deps)
        field = _tag_bytes(number, WireType.BYTES) + varint_widths(content.view(np.uint64)) + content
        found += np.where(content, field, 0)
    size = written_bytes(graph.kind, (graph.bytes_read, graph.bytes_written), graph.collectives, graph.p2p)
    written = list_bytes(ids, size)
    works = graph.kind != NodeKind.METADATA
    for name, content in zip(LIST_NAMES, (_sums(written, graph.data_deps), written), strict=True):
        found += np.where(works, _list_attribute(name, content), 0)
    return found


def _sums(values: Longs, deps: RaggedArray) -> Longs:
    """The sum over what each node waits for."""
    return np.diff(offsets_of(values[deps.values])[deps.offsets])


def _list_attribute(name: str, content: Longs) -> Longs:
    """Bytes of an attribute whose value is a list of so many bytes."""
    head = _tag_bytes(AttributeField.NAME, WireType.BYTES) + 1 + len(name)
    value = _tag_bytes(AttributeField.STRING_LIST, WireType.BYTES) + _width(content) + content
    message = head + value
    return _tag_bytes(NodeField.ATTR, WireType.BYTES) + _width(message) + message


def _width(values: Longs) -> Longs:
    words: Words = values.view(np.uint64)
    return varint_widths(words)


def _tag_bytes(number: int, wire: WireType) -> int:
    return len(tag(number, wire))
