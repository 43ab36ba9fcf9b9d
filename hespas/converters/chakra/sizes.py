"""Exact sizes of traces in bytes, computed without writing them.

Most nodes of a job with many micro-batches are repetitions of one another. Their frames differ only in node
ids, dependencies and tensor lists, and the sizes of these parts follow from the numbers in them. One frame of
each kind of node is therefore encoded, and the other sizes are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.comm_groups import GroupIds
from hespas.converters.chakra.contract import JOB_ATTRIBUTE
from hespas.converters.chakra.expansion import encoded
from hespas.converters.chakra.from_graph import RankVariables, TraceLowering
from hespas.converters.chakra.job_traces import RankTraces
from hespas.converters.chakra.lowering import unrolled
from hespas.converters.chakra.own_metadata import texts_of_job, with_metadata
from hespas.converters.chakra.readiness import LIST_NAMES, is_as_stated, list_bytes, written_bytes
from hespas.converters.chakra.wire import Longs, Words, offsets_of
from hespas.converters.chakra.wire.decode import framed_messages
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
"""Operands of a node above which all frames are encoded."""


def trace_bytes(workload: Workload) -> int:
    """Return the total size of the trace files of all available ranks [bytes], without ``comm_group.json``.
    O(classes x nodes + ranks x slots).
    """
    whole = workload.is_complete
    ranks = np.arange(workload.num_ranks) if whole else np.asarray(workload.present, np.int64)
    workload = unrolled(workload, ranks.tolist(), Diagnostics())
    numbers = {} if whole else {JOB_ATTRIBUTE: workload.num_ranks}
    change = partial(with_metadata, numbers=numbers, texts=texts_of_job(workload))
    job = RankTraces(workload, GroupIds.of(workload), Diagnostics(), change)
    total = 0
    size_of: dict[tuple[int, bytes, tuple[int, ...]], int] = {}
    kinds: tuple[tuple[int, bytes], _FrameKinds | None] | None = None
    for batch in job.batches(ranks):
        runs, variables = batch.runs, batch.values.variables(0)
        key = (runs.of_class, runs.pattern, batch.widths)
        if key not in size_of:
            if kinds is None or kinds[0] != key[:2]:
                kinds = (key[:2], _FrameKinds.of(runs.writer.graph))
            if kinds[1] is None:
                parts = TraceLowering(runs.writer.graph).parts(variables)
                size_of[key] = sum(len(piece) for piece in encoded(part.columns for part in parts))
            else:
                size_of[key] = kinds[1].size(variables)
        total += len(batch.ranks) * size_of[key]
    return total


@dataclass(frozen=True, slots=True, eq=False)
class _FrameKinds:
    """Kinds of nodes of a graph. Nodes of one kind have equal encoded messages (frames) except for node
    numbers. ``small`` has one node of each kind, and ``which`` is the kind of each node. ``numbered`` is, for
    each node, the number of encoded bytes that depend on node numbers. ``own`` is that number for the nodes
    of ``small``.
    """

    small: OpGraph
    which: Longs
    numbered: Longs
    own: Longs

    @classmethod
    def of(cls, graph: OpGraph) -> _FrameKinds | None:
        """Return the kinds of a graph. Return None if the frame of a node depends on other nodes or on
        preserved attributes. Durations are an example, because their rounding remainders are added to later
        nodes.
        """
        durations = graph.duration_ns[~np.isnan(graph.duration_ns)]
        lengths = np.diff(graph.strings.offsets)[graph.name_id]
        tables = (graph.collectives, graph.p2p, graph.contractions)
        if not (
            len(graph) > 0
            and not durations.any()
            and bool(lengths.all())  # a node without any field gets a name
            and not is_as_stated(graph)
            and not (graph.extra.node >= 0).any()
            and all(np.bincount(table.node).max(initial=0) < 2 for table in tables)
        ):
            return None
        if max(graph.operands.lengths.max(), graph.results.lengths.max()) > _MOST_TENSORS:
            return None
        _, first, which = np.unique(graph.name_id, return_index=True, return_inverse=True)
        for column in _columns(graph):
            if np.array_equal(column, column[first][which]):
                continue
            values, value = np.unique(column, return_inverse=True)
            _, first, which = np.unique(which * len(values) + value, return_index=True, return_inverse=True)
        alone = RaggedArray.empty(len(first))
        small = take_nodes(graph, first, alone, alone)
        return cls(small, which, _numbered(graph), _numbered(small))

    def size(self, variables: RankVariables) -> int:
        """Return the size of the trace of one rank [bytes]."""
        parts = TraceLowering(self.small).parts(variables)
        data = b"".join(piece.tobytes() for piece in encoded(part.columns for part in parts))
        lengths = np.array([len(message) for message in framed_messages(data)], np.int64)
        lengths[1:] -= self.own
        content = np.append(lengths[:1], lengths[1:][self.which] + self.numbered)
        return int(content.sum() + varint_widths(content.view(np.uint64)).sum())


def _columns(graph: OpGraph) -> Iterator[Longs]:
    """Yield all columns that determine the encoded size of a node, except node numbers, as integers."""
    for name in NODE_COLUMNS:
        column = getattr(graph, name)
        if name != "id" and not is_one_value(column):
            yield _whole_numbers(column)
    for tensors in (graph.operands, graph.results):
        owner = np.repeat(np.arange(len(graph)), tensors.lengths)
        position = np.arange(len(tensors.values)) - np.repeat(tensors.offsets[:-1], tensors.lengths)
        for number in range(int(position.max(initial=-1)) + 1):
            yield _placed(graph, owner[position == number], tensors.values[position == number])
    for table in (graph.collectives, graph.p2p, graph.contractions):
        for name in table.DTYPES:
            if name != "node":
                entries: Longs = getattr(table, name)
                # tags number the messages of a trace: their size depends only on the number of bits
                if name == "tag":
                    entries = np.where(entries < 0, -1, np.searchsorted(_POWERS, entries, side="right"))
                yield _placed(graph, table.node, entries)


def _placed(graph: OpGraph, nodes: NDArray[np.integer], values: NDArray[np.generic]) -> Longs:
    """Return a column with ``values`` at ``nodes`` and -1 elsewhere."""
    column = np.full(len(graph), -1, np.int64)
    column[nodes] = _whole_numbers(values)
    return column


def _whole_numbers(values: NDArray[np.generic]) -> Longs:
    if values.dtype == np.float64:
        return np.ascontiguousarray(values).view(np.int64)
    return values.astype(np.int64)


def _numbered(graph: OpGraph) -> Longs:
    """Return, for each node, the number of encoded bytes that depend on node numbers: id, dependencies and
    tensor lists, with tags and lengths.
    """
    ids = graph.id
    widths = varint_widths(ids)
    total = np.where(ids == 0, 0, _tag_bytes(NodeField.ID, WireType.VARINT) + widths)
    for number, deps in ((NodeField.CTRL_DEPS, graph.control_deps), (NodeField.DATA_DEPS, graph.data_deps)):
        content = _sums(widths, deps)
        field = _tag_bytes(number, WireType.BYTES) + varint_widths(content.view(np.uint64)) + content
        total += np.where(content, field, 0)
    size = written_bytes(graph.kind, (graph.bytes_read, graph.bytes_written), graph.collectives, graph.p2p)
    written = list_bytes(ids, size)
    works = graph.kind != NodeKind.METADATA
    for name, content in zip(LIST_NAMES, (_sums(written, graph.data_deps), written), strict=True):
        head = _tag_bytes(AttributeField.NAME, WireType.BYTES) + 1 + len(name)
        value = _tag_bytes(AttributeField.STRING_LIST, WireType.BYTES) + _width(content) + content
        message = head + value
        total += np.where(works, (_tag_bytes(NodeField.ATTR, WireType.BYTES) + _width(message) + message), 0)
    return total


def _sums(values: Longs, deps: RaggedArray) -> Longs:
    """Return for each node the sum of ``values`` over its dependencies."""
    return np.diff(offsets_of(values[deps.values])[deps.offsets])


def _width(values: Longs) -> Longs:
    words: Words = values.view(np.uint64)
    return varint_widths(words)


def _tag_bytes(number: int, wire: WireType) -> int:
    return len(tag(number, wire))
