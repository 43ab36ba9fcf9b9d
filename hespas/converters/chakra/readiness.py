"""Attributes that ASTRA-sim's roofline model and memory tracker need in addition to durations.

With ``roofline-enabled`` ASTRA-sim never finishes a computation of 0 FLOPs, and never starts the users of one
of 0 bytes. A count of 0 is therefore written as 1, with the true count in ``counted_ops`` or
``counted_bytes``. With ``track-local-mem`` every node needs the lists ``inputs`` and ``outputs`` of tensor
names and sizes. Each node writes one tensor, named after the node's id, and reads the tensors of its data
dependencies. Inputs from outside the trace, such as weights, are not listed. Traces of other tools are
written without these additions; a marker row in the graph records this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.contract import AttributeFacts, Tag
from hespas.converters.chakra.wire import Bools, ByteRows, ByteWindow, Longs, Words, copy_spans, offsets_of
from hespas.files.wire import WireError, fields
from hespas.graph import CollectiveTable, NodeKind, OpGraph, P2pTable, RaggedArray, Resource
from hespas.graph.columns import FloatArray
from hespas.schemas.chakra.tables import AttributeField

__all__ = [
    "LARGEST_COUNT",
    "LIST_NAMES",
    "TensorLists",
    "decimal_widths",
    "distinct",
    "is_as_stated",
    "list_bytes",
    "list_faults",
    "raised_counts",
    "states_lists",
    "tensor_lists",
    "written_bytes",
]

LARGEST_COUNT = float(1 << 62)
"""Limit of counts: larger ones are not stated."""
LIST_NAMES = ("inputs", "outputs")

_STRING = 0x0A
"""Tag of a string in a list of strings."""
_ZERO = ord("0")
_POWERS = np.array([10**power for power in range(1, 20)], np.uint64)


def is_as_stated(graph: OpGraph) -> bool:
    """Return True if the graph was read from a trace without the attributes that Hespas adds for ASTRA-sim
    (counts of 1 instead of 0, tensor lists). It is then written without them.
    """
    return bool((graph.extra.tag == Tag.AS_STATED).any())


def raised_counts(graph: OpGraph) -> tuple[Bools, Bools]:
    """Return two masks of computations: those whose FLOPs, and those whose bytes, are 0 and are written
    as 1.
    """
    if is_as_stated(graph):
        no = np.zeros(len(graph), np.bool_)
        return no, no
    computes = (graph.kind == NodeKind.COMPUTE) & (graph.resource == Resource.DEVICE)
    flops, moved = np.rint(graph.flops), np.rint(graph.bytes_moved)
    return computes & (flops == 0) & (moved >= 0), computes & (moved == 0) & (flops >= 0)


def written_bytes(
    kind: NDArray[np.uint8],
    costs: tuple[FloatArray, FloatArray],
    collectives: CollectiveTable,
    p2p: P2pTable,
) -> Longs:
    """Return the bytes that each node writes to memory, rounded; 0 if unknown. ``costs`` are bytes read and
    bytes written.
    """
    moved = costs[0] + costs[1]
    size = np.where((moved >= 0) & (moved < LARGEST_COUNT), costs[1], 0.0)
    result = collectives.result_bytes
    has_result = result >= 0
    size[collectives.node[has_result]] = result[has_result]
    messages = np.isin(kind, (NodeKind.SEND, NodeKind.RECV))
    size[messages | (kind == NodeKind.METADATA)] = 0.0
    arrives = kind[p2p.node] == NodeKind.RECV
    size[p2p.node[arrives]] = p2p.comm_bytes[arrives]
    return np.rint(np.where((size > 0) & (size < LARGEST_COUNT), size, 0.0)).astype(np.int64)


class TensorLists(NamedTuple):
    """Encoded values of the attributes ``inputs`` and ``outputs``, one row per node. The memory tracker of
    ASTRA-sim reads them.
    """

    inputs: ByteRows
    outputs: ByteRows


def tensor_lists(ids: Words, data_deps: RaggedArray, size: Longs, nodes: slice | None = None) -> TensorLists:
    """Return the tensor lists (attributes ``inputs`` and ``outputs``) of all nodes. With ``nodes``, return
    only their lists; ``data_deps`` then has the dependencies of these nodes only. ``size`` has the bytes of
    each node's tensor.
    """
    if nodes is None:
        written = outputs = _named_sizes(ids, size)
        producers = data_deps.values.astype(np.int64)
    else:
        outputs = _named_sizes(ids[nodes], size[nodes])
        used, producers = distinct(data_deps.values.astype(np.int64))
        written = _named_sizes(ids[used], size[used])
    lengths = written.lengths[producers]
    data, read = copy_spans(ByteWindow.holding(written.data), written.offsets[producers], lengths)
    return TensorLists(ByteRows(data, read[data_deps.offsets]), outputs)


_SPARSE = 16


def distinct(numbers: Longs) -> tuple[Longs, Longs]:
    """Return the distinct numbers, ascending, and the index of each number among them. Numbers from a small
    range are not sorted, which is faster.
    """
    if not len(numbers):
        return numbers, numbers
    low = int(numbers.min())
    extent = int(numbers.max()) - low + 1
    if extent > _SPARSE * len(numbers):
        used, which = np.unique(numbers, return_inverse=True)
        return used, which
    index = np.zeros(extent, np.int64)
    index[numbers - low] = 1
    used = np.flatnonzero(index)
    index[used] = np.arange(len(used))
    return used + low, index[numbers - low]


def list_bytes(ids: Words, size: Longs) -> Longs:
    """Return the encoded size [bytes] of a list with only the node's own tensor; 0 for a tensor of size 0."""
    return np.where(size > 0, 4 + decimal_widths(ids) + decimal_widths(size.view(np.uint64)), 0)


def _named_sizes(ids: Words, size: Longs) -> ByteRows:
    """Return for each node the encoded list of its tensor's name (the node's id) and size. The list is empty
    if the size is 0.
    """
    there = np.flatnonzero(size)
    amount = size[there].view(np.uint64)
    name = ids[there]
    widths = (decimal_widths(name), decimal_widths(amount))
    offsets = offsets_of(list_bytes(ids, size))
    data = np.empty(int(offsets[-1]), np.uint8)
    at = offsets[there]
    for value, width in zip((name, amount), widths, strict=True):
        data[at], data[at + 1] = _STRING, width
        end, rest = (at + 2) + width, value
        for digit in range(1, int(width.max(initial=0)) + 1):
            rows = np.flatnonzero(width >= digit)
            quotient = rest // np.uint64(10)
            data[(end - digit)[rows]] = (rest - quotient * np.uint64(10))[rows] + np.uint64(_ZERO)
            rest = quotient
        at = at + 2 + width
    return ByteRows(data, offsets)


def decimal_widths(value: Words) -> Longs:
    """Return the number of decimal digits of each value."""
    return np.searchsorted(_POWERS, value, side="right") + 1


def states_lists(facts: AttributeFacts, lists: TensorLists, nodes: Longs) -> NDArray[np.int64] | None:
    """Return the attribute rows of ``inputs`` and ``outputs`` if exactly ``nodes`` have these attributes and
    their values equal ``lists``. Otherwise return None.
    """
    matching: list[Longs] = []
    for name, expected in zip(LIST_NAMES, lists, strict=True):
        rows = facts.first_rows(name)
        if not np.array_equal(facts.owner[rows], nodes):
            return None
        if not (facts.attrs.field[rows] == AttributeField.STRING_LIST).all():
            return None
        payload = facts.attrs.payload
        row = facts.attrs.bits[rows].view(np.int64)
        start, length = payload.offsets[row], payload.offsets[row + 1] - payload.offsets[row]
        if not np.array_equal(length, expected.lengths[nodes]):
            return None
        data, _ = copy_spans(ByteWindow.holding(payload.data), start, length)
        wanted, _ = copy_spans(
            ByteWindow.holding(expected.data), expected.offsets[nodes], expected.lengths[nodes]
        )
        if not np.array_equal(data, wanted):
            return None
        matching.append(rows)
    return np.concatenate(matching)


def list_faults(graph: OpGraph) -> Iterator[tuple[Bools, str, bool]]:
    """Yield masks of nodes whose tensor lists (attributes ``inputs`` and ``outputs``) make the memory tracker
    of ASTRA-sim fail, each with the reason, and True if it ends the simulation. Only traces of other tools
    have such nodes.
    """
    if not is_as_stated(graph):
        return
    texts_by_name = {name: _stated(graph, name) for name in LIST_NAMES}
    works = graph.kind != NodeKind.METADATA
    for name, lists in texts_by_name.items():
        absent = works.copy()
        absent[list(lists)] = False
        yield absent, f"no list {name!r}: the memory tracker throws an exception", True
        malformed = [
            node
            for node, texts in lists.items()
            if len(texts) % 2 or not all(size.isdigit() and len(size) < 20 for size in texts[1::2])
        ]
        message = (
            f"its list {name!r} is not a list of (name, size) pairs: the memory tracker throws an exception"
        )
        yield _marked(graph, malformed), message, True
    outputs = texts_by_name["outputs"]
    seen: set[bytes] = set()
    again: list[int] = []
    for node in sorted(outputs):
        texts = outputs[node]
        names = {name for name, size in zip(texts[::2], texts[1::2], strict=False) if size.strip(b"0")}
        if names & seen:
            again.append(node)
        seen |= names
    yield (
        _marked(graph, again),
        "it writes a tensor that was written before: the memory tracker counts only the first write",
        False,
    )


def _marked(graph: OpGraph, nodes: list[int]) -> Bools:
    mask = np.zeros(len(graph), np.bool_)
    mask[nodes] = True
    return mask


def _stated(graph: OpGraph, name: str) -> dict[int, list[bytes]]:
    """Return the entries of the list attribute ``name`` of each node that has it."""
    table = graph.extra
    list_rows = np.flatnonzero((table.node >= 0) & (table.tag == AttributeField.STRING_LIST))
    keys = table.key[list_rows]
    rows = list_rows[np.isin(keys, [key for key in np.unique(keys).tolist() if graph.strings[key] == name])]
    nodes: list[int] = table.node[rows].tolist()
    texts: dict[int, list[bytes]] = {}
    for node, row in zip(nodes, rows.tolist(), strict=True):
        data, members = table.value(row), list[bytes]()
        with suppress(WireError):  # the list ends before the first entry that is not a string
            for number, wire, start, end in fields(data, 0, len(data)):
                if number << 3 | wire != _STRING:
                    break
                members.append(data[start:end])
        texts[node] = members
    return texts
