"""What ASTRA-sim's roofline and its memory tracker want of a trace beyond durations.

With ``roofline-enabled`` a computation of no FLOPs never finishes and one of no bytes wakes nobody, so a
count of 0 is stated as 1 and the true one beside it (``counted_ops``, ``counted_bytes``). With
``track-local-mem`` every node states lists ``inputs`` and ``outputs`` of tensor names and sizes: here each
node writes one tensor, called by the node's id, and reads those of its data dependencies. What comes from
outside the trace, such as weights, is not listed. A trace of another tool keeps what it states; it is marked
by a row of its file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.contract import AttributeFacts, Tag
from hespas.converters.chakra.wire import Bools, ByteRows, Longs, Window, Words, copy_spans, offsets_of
from hespas.files.wire import WireError, fields
from hespas.graph import CollectiveTable, NodeKind, OpClass, OpGraph, P2pTable, RaggedArray, Resource
from hespas.graph.columns import FloatArray
from hespas.schemas.chakra.tables import AttributeField

__all__ = [
    "LARGEST_COUNT",
    "LIST_NAMES",
    "SCHEMA_ATTRIBUTE",
    "TensorLists",
    "classes_by_name",
    "classes_unless_stated",
    "distinct",
    "is_as_stated",
    "list_bytes",
    "list_faults",
    "stand_ins",
    "states_lists",
    "tensor_lists",
    "written_bytes",
]

LARGEST_COUNT = float(1 << 62)
"""Counts from here on are not stated."""
LIST_NAMES = ("inputs", "outputs")

_STRING = 0x0A
"""Tag of a string in a list of strings."""
_ZERO = ord("0")
_POWERS = np.array([10**power for power in range(1, 20)], np.uint64)


def is_as_stated(graph: OpGraph) -> bool:
    """Whether the graph was read from a trace that has not what is added here, and is written as it was."""
    return bool((graph.extra.tag == Tag.AS_STATED).any())


def stand_ins(graph: OpGraph) -> tuple[Bools, Bools]:
    """Computations that state one FLOP, and those that state one byte, because they count none."""
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
    """Whole bytes that each node leaves in memory, 0 where unknown; ``costs`` are bytes read and written."""
    moved = costs[0] + costs[1]
    size = np.where((moved >= 0) & (moved < LARGEST_COUNT), costs[1], 0.0)
    result = collectives.result_bytes
    known = result >= 0
    size[collectives.node[known]] = result[known]
    messages = np.isin(kind, (NodeKind.SEND, NodeKind.RECV))
    size[messages | (kind == NodeKind.METADATA)] = 0.0
    arrives = kind[p2p.node] == NodeKind.RECV
    size[p2p.node[arrives]] = p2p.comm_bytes[arrives]
    return np.rint(np.where((size > 0) & (size < LARGEST_COUNT), size, 0.0)).astype(np.int64)


class TensorLists(NamedTuple):
    """The lists of all nodes, encoded."""

    inputs: ByteRows
    outputs: ByteRows


def tensor_lists(ids: Words, data_deps: RaggedArray, size: Longs, nodes: slice | None = None) -> TensorLists:
    """Return each node's tensor under its id, and those of the nodes it depends on: of some ``nodes``, whose
    dependencies are given, or of all.
    """
    if nodes is None:
        written = outputs = _named_sizes(ids, size)
        producers = data_deps.values.astype(np.int64)
    else:
        outputs = _named_sizes(ids[nodes], size[nodes])
        used, producers = distinct(data_deps.values.astype(np.int64))
        written = _named_sizes(ids[used], size[used])
    lengths = written.lengths[producers]
    data, read = copy_spans(Window.holding(written.data), written.offsets[producers], lengths)
    return TensorLists(ByteRows(data, read[data_deps.offsets]), outputs)


_SPARSE = 16


def distinct(numbers: Longs) -> tuple[Longs, Longs]:
    """Return the distinct numbers, ascending, and which of them each one is; numbers that are close together
    are not sorted.
    """
    if not len(numbers):
        return numbers, numbers
    low = int(numbers.min())
    extent = int(numbers.max()) - low + 1
    if extent > _SPARSE * len(numbers):
        used, which = np.unique(numbers, return_inverse=True)
        return used, which
    place = np.zeros(extent, np.int64)
    place[numbers - low] = 1
    used = np.flatnonzero(place)
    place[used] = np.arange(len(used))
    return used + low, place[numbers - low]


def list_bytes(ids: Words, size: Longs) -> Longs:
    """Bytes of the list of each node's tensor: tag, length and digits of both texts."""
    return np.where(size > 0, 4 + _digits(ids) + _digits(size.view(np.uint64)), 0)


def _named_sizes(ids: Words, size: Longs) -> ByteRows:
    """A list of two texts, id and size, per node; an empty one where the size is 0."""
    there = np.flatnonzero(size)
    amount = size[there].view(np.uint64)
    name = ids[there]
    widths = (_digits(name), _digits(amount))
    offsets = offsets_of(list_bytes(ids, size))
    data = np.empty(int(offsets[-1]), np.uint8)
    at = offsets[there]
    for value, width in zip((name, amount), widths, strict=True):
        data[at], data[at + 1] = _STRING, width
        _spell(data, at + 2, value, width)
        at = at + 2 + width
    return ByteRows(data, offsets)


def _digits(value: Words) -> Longs:
    return np.searchsorted(_POWERS, value, side="right") + 1


def _spell(data: NDArray[np.uint8], at: Longs, value: Words, width: Longs) -> None:
    """Write decimal numbers of known widths."""
    end, rest = at + width, value
    for place in range(1, int(width.max(initial=0)) + 1):
        rows = np.flatnonzero(width >= place)
        quotient = rest // np.uint64(10)
        data[(end - place)[rows]] = (rest - quotient * np.uint64(10))[rows] + np.uint64(_ZERO)
        rest = quotient


def states_lists(facts: AttributeFacts, lists: TensorLists, nodes: Longs) -> NDArray[np.int64] | None:
    """The attribute rows that state just these lists of ``nodes``; None where one states others or none, or
    another node states any.
    """
    found: list[Longs] = []
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
        data, _ = copy_spans(Window.holding(payload.data), start, length)
        wanted, _ = copy_spans(
            Window.holding(expected.data), expected.offsets[nodes], expected.lengths[nodes]
        )
        if not np.array_equal(data, wanted):
            return None
        found.append(rows)
    return np.concatenate(found)


def list_faults(graph: OpGraph) -> Iterator[tuple[Bools, str]]:
    """Nodes whose lists stop the memory tracker, and why; only a trace of another tool has any."""
    if not is_as_stated(graph):
        return
    stated = {name: _stated(graph, name) for name in LIST_NAMES}
    works = graph.kind != NodeKind.METADATA
    for name, lists in stated.items():
        absent = works.copy()
        absent[list(lists)] = False
        yield absent, f"no list {name!r}: the memory tracker throws"
        yield (
            _marked(graph, [node for node, texts in lists.items() if not _are_pairs(texts)]),
            (f"its list {name!r} is not of names, each with a size: the memory tracker throws"),
        )
    yield (
        _marked(graph, _written_twice(stated["outputs"])),
        "it writes a tensor that was written before: the memory tracker counts the first only",
    )


def _marked(graph: OpGraph, nodes: list[int]) -> Bools:
    mask = np.zeros(len(graph), np.bool_)
    mask[nodes] = True
    return mask


def _stated(graph: OpGraph, name: str) -> dict[int, list[bytes]]:
    """The texts of one list by node."""
    table = graph.extra
    kept = np.flatnonzero((table.node >= 0) & (table.tag == AttributeField.STRING_LIST))
    keys = table.key[kept]
    rows = kept[np.isin(keys, [key for key in np.unique(keys).tolist() if graph.strings[key] == name])]
    nodes: list[int] = table.node[rows].tolist()
    return {node: _texts(table.value(row)) for node, row in zip(nodes, rows.tolist(), strict=True)}


def _texts(data: bytes) -> list[bytes]:
    """The members of an encoded list of strings; what is none ends it."""
    found: list[bytes] = []
    with suppress(WireError):
        for number, wire, start, end in fields(data, 0, len(data)):
            if number << 3 | wire != _STRING:
                break
            found.append(data[start:end])
    return found


def _are_pairs(texts: list[bytes]) -> bool:
    return len(texts) % 2 == 0 and all(size.isdigit() and len(size) < 20 for size in texts[1::2])


def _written_twice(outputs: dict[int, list[bytes]]) -> list[int]:
    """Nodes that write a tensor of some size which a node before them writes, too."""
    seen: set[bytes] = set()
    again: list[int] = []
    for node in sorted(outputs):
        texts = outputs[node]
        names = {name for name, size in zip(texts[::2], texts[1::2], strict=False) if size.strip(b"0")}
        if names & seen:
            again.append(node)
        seen |= names
    return again


# --- What operation a node of another tool's trace is, as far as its words say: matmuls run at another rate.
#
# Only matmuls, convolutions and attention are known, by the operation a node states or, where it states
# none, by its name, and only where it counts FLOPs. STAGE writes letters, which are known by the schema of
# its files.

SCHEMA_ATTRIBUTE = "schema"

_STAGE_SCHEMA = "symbolic_tensor_network"
"""What the metadata of STAGE's files says of their schema."""

_STAGE: Mapping[str, OpClass] = {
    "M": OpClass.CONTRACTION,
    "A": OpClass.ELEMENTWISE,
    "E": OpClass.ELEMENTWISE,
    "E2": OpClass.ELEMENTWISE,
    "B": OpClass.REDUCTION,
    "SLICE": OpClass.SLICE,
}

_SEPARATE = re.compile(r"(?<=[a-z])(?=[A-Z])|[^A-Za-z0-9]+")
_OTHERS = re.compile(
    r"softmax|norm|relu|gelu|silu|swiglu|rope|rotary|dropout|embed|residual|reduce|(?<!ein)sum|bias_?add|elementwise"
    r"|transpose|copy|cast|loss|optim|adam|sgd(?!emm)|update|memcpy|memset|splitk|reshape|permute"
)
_CLASSES: tuple[tuple[OpClass, re.Pattern[str]], ...] = (
    (OpClass.ATTENTION, re.compile(r"flash|sdpa|fmha|(?:^| )(?:attention|attn)(?: |$)|scaled dot product")),
    (OpClass.CONVOLUTION, re.compile(r"(?:^| )conv(?:olution)?[123]?d?(?: |$)|fprop|dgrad|wgrad")),
    (
        OpClass.CONTRACTION,
        re.compile(r"gemm|mat ?mul|nvjet|(?:^| )(?:mm|bmm|addmm|baddbmm|linear|einsum|dot|dense)(?: |$)"),
    ),
)


def _class_of(text: str) -> OpClass:
    words = " ".join(_SEPARATE.split(text)).lower()
    if _OTHERS.search(words.replace(" ", "")):
        return OpClass.UNKNOWN
    return next((op_class for op_class, found in _CLASSES if found.search(words)), OpClass.UNKNOWN)


def classes_by_name(
    default: NDArray[np.uint8],
    costs: tuple[NDArray[np.uint8], FloatArray],
    words: Callable[[list[int]], Iterable[str]],
    schema: str,
) -> NDArray[np.uint8]:
    """The classes, ``default`` where no word tells. ``costs``: each node's kind and FLOPs; ``words``: the
    operations or names of some nodes; ``schema``: what the file calls its own.
    """
    kind, flops = costs
    unclassed = np.flatnonzero((kind == NodeKind.COMPUTE) & (flops > 0) & (default == OpClass.UNKNOWN))
    if not len(unclassed):
        return default
    letters = _STAGE if schema == _STAGE_SCHEMA else dict[str, OpClass]()
    known = dict[str, int]()
    found: list[int] = []
    for text in words(unclassed.tolist()):
        if text not in known:
            known[text] = int(letters.get(text) or _class_of(text))
        found.append(known[text])
    classes = default.copy()
    classes[unclassed] = found
    return classes


def classes_unless_stated(graph: OpGraph, default: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What a reader of the graph's trace takes the classes to be where no attribute states them."""
    if not is_as_stated(graph):
        return default
    strings, table = graph.strings, graph.extra

    def words(nodes: list[int]) -> Iterator[str]:
        for operation, name in zip(graph.op_row[nodes].tolist(), graph.name_row[nodes].tolist(), strict=True):
            yield strings[operation or name]

    kept = np.flatnonzero((table.node < 0) & (table.tag == AttributeField.STRING)).tolist()
    schemas = [table.value(row).decode() for row in kept if strings[int(table.key[row])] == SCHEMA_ATTRIBUTE]
    return classes_by_name(default, (graph.kind, graph.flops), words, schemas[0] if schemas else "")
