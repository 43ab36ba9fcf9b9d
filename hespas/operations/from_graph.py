"""The operations of a graph, so that models fitted on measured tables cover programs and traces, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan, prod

import numpy as np
from numpy.typing import NDArray

from hespas.graph import DTYPES, DYNAMIC, UNKNOWN_DTYPE, CollectiveKind, NodeKind, OpClass, OpGraph
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray
from hespas.operations.model import KIND_OF_CLASS, KINDS, STRIDED, Labels, Operations
from hespas.operations.tiles import TILED, padding_of_shape

__all__ = [
    "arithmetic_dtype",
    "between_ranks",
    "canonical_op",
    "group_sizes",
    "operations_of",
    "timed_with_events",
]

_NAMES = (
    "other",
    *dict.fromkeys(KIND_OF_CLASS.values()),
    "matmul",
    "convolution",
    "attention.context",
    "attention.generation",
    "attention.encoder",
    "moe",
    "collective",
)
_SAYS_ALL = frozenset(
    {"matmul", "convolution", "attention.context", "attention.generation", "attention.encoder", "moe"}
)
_PLACE: Mapping[str, int] = {name: place for place, name in enumerate(_NAMES)}
_WEIGHT_ONLY: Mapping[tuple[str, str], str] = {
    ("bf16", "i8"): "int8_wo",
    ("f16", "i8"): "int8_wo",
    ("bf16", "i4"): "int4_wo",
    ("f16", "i4"): "int4_wo",
}
_UNKNOWN_TYPE = len(DTYPES)
_MESSAGE = "permute"
"""What tables call a message from one rank to another, which is a permutation of two ranks."""
_STREAMED = tuple(_PLACE[name] for name in ("move", "reduction", "normalization"))
_ROW = 4096.0


def operations_of(graph: OpGraph, *, num_ranks: int = -1, tiled: bool = False) -> Operations:
    """One operation per node. A node with one product is that product; others are told by their operation
    and the extents of their first result (of the first operand where that is larger, as in a reduction).

    ``num_ranks`` is the size of collectives whose groups nobody stated; ``tiled``: say how arrays fill the
    tiles of a memory that holds whole ones (:data:`~hespas.operations.tiles.TILED`). O(nodes).
    """
    kind = np.array([_PLACE[KIND_OF_CLASS.get(each, "other")] for each in OpClass], np.int32)[graph.op_class]
    kind[graph.kind == int(NodeKind.COLLECTIVE)] = _PLACE["collective"]
    kind[np.isin(graph.kind, (int(NodeKind.SEND), int(NodeKind.RECV), int(NodeKind.PERMUTE)))] = 0
    kind[_messages(graph)] = _PLACE["collective"]
    dims, decides = _extents(graph)
    scheme, names = _schemes(graph)
    _products(graph, kind, dims, scheme, names)
    _attention(graph, kind, dims)
    _mixtures(graph, kind, dims)
    op, op_names = _operation_names(graph, kind)
    _collectives(graph, dims, num_ranks)
    _flatten(kind, dims)
    _only_its_own(kind, dims)
    if tiled:
        has = np.array(["rows" in KINDS[each] for each in _NAMES], np.bool_)[kind]
        dims[TILED] = np.where(has, _padding(graph)[decides], np.nan)
    dims[STRIDED] = _strided(graph, kind == _PLACE["vector"], np.isin(kind, _STREAMED))
    return Operations(
        kind=Labels(kind, _NAMES),
        op=Labels(op, op_names),
        scheme=Labels(scheme, tuple(names)),
        variant=Labels.constant("", len(graph)),
        dims=dims,
        flops=np.where(np.isnan(graph.useful_flops), graph.flops, graph.useful_flops),
        transcendentals=graph.transcendentals,
        bytes_moved=graph.bytes_moved,
    )


def _only_its_own(kind: SmallIntArray, dims: dict[str, FloatArray]) -> None:
    """Forget dimensions that do not decide the time of a kind."""
    for name, column in dims.items():
        has = np.array([name in KINDS[each] for each in _NAMES], np.bool_)[kind]
        column[~has] = np.nan


def _flatten(kind: SmallIntArray, dims: dict[str, FloatArray]) -> None:
    """Elementwise operations run over their elements in one row, however they are shaped: told as tables of
    measurements hold them, in rows of at most :data:`_ROW`.
    """
    mine = kind == _PLACE["vector"]
    elements = dims["rows"][mine] * dims["columns"][mine]
    columns = np.minimum(elements, _ROW)
    dims["columns"][mine] = columns
    dims["rows"][mine] = elements / np.maximum(columns, 1.0)


def _operation_names(graph: OpGraph, kind: SmallIntArray) -> tuple[SmallIntArray, tuple[str, ...]]:
    """The operation within its kind: empty where the kind says all."""
    rows: dict[str, int] = {"": 0}
    used = np.unique(graph.op_row).tolist()
    number = np.zeros(len(graph.strings), np.int32)
    for row in used:
        name = canonical_op(graph.strings[row])
        number[row] = rows.setdefault(name, len(rows))
    said = np.array([name in _SAYS_ALL for name in _NAMES], np.bool_)[kind]
    op = np.where(said, 0, number[graph.op_row]).astype(np.int32)
    for each in CollectiveKind:
        found = graph.collectives.node[graph.collectives.kind == int(each)]
        if len(found):
            op[found] = rows.setdefault(each.name.lower(), len(rows))
    messages = _messages(graph)
    if len(messages):
        op[messages] = rows.setdefault(_MESSAGE, len(rows))
    return op, tuple(rows)


def _messages(graph: OpGraph) -> SmallIntArray:
    """Nodes that send to another rank, receive from one, or both."""
    return graph.p2p.node[between_ranks(graph)]


def _first(values: SmallIntArray, offsets: IntArray, default: int) -> IntArray:
    """The first type row of each node, ``default`` where it has none."""
    starts, ends = offsets[:-1], offsets[1:]
    if not len(values):
        return np.full(len(starts), default, np.int64)
    return np.where(ends > starts, values[np.minimum(starts, len(values) - 1)], default).astype(np.int64)


def _extents(graph: OpGraph) -> tuple[dict[str, FloatArray], IntArray]:
    """``rows`` and ``columns`` of the larger of first result and first operand, of fusions, whose operands
    stand in any order, of the largest of all, NaN where unknown; and the row of its type (one past all types
    where there is none). Of what reads or writes a part of that tensor, as an update in place does, they are
    those of the largest tensor that it can have gone through.
    """
    types = len(graph.types)
    rows, columns = np.full(types + 1, np.nan), np.full(types + 1, np.nan)
    for row in range(types):
        shape = graph.types.shape(row)
        if -1 in shape:
            continue
        last = float(shape[-1]) if shape else 1.0
        columns[row] = last
        rows[row] = float(np.prod(np.array(shape[:-1], np.float64)))
    result = _first(graph.results.values, graph.results.offsets, types)
    operand = _first(graph.operands.values, graph.operands.offsets, types)
    elements = rows * columns
    larger = np.nan_to_num(elements[operand]) > np.nan_to_num(elements[result])
    larger &= ~np.isin(graph.op_class, (int(OpClass.GATHER), int(OpClass.SLICE)))
    chosen = _largest_of_fusions(graph, elements, np.where(larger, operand, result))
    chosen = _touched(graph, chosen)
    return {"rows": rows[chosen], "columns": columns[chosen]}, chosen


def _largest_of_fusions(graph: OpGraph, elements: FloatArray, chosen: IntArray) -> IntArray:
    """The rows of types ``chosen``, those of fusions with the most elements that one of their tensors has."""
    fused = graph.op_class == int(OpClass.FUSION)
    found = chosen.copy()
    most = np.where(fused, np.nan_to_num(elements[chosen], nan=-1.0), np.inf)
    for tensors in (graph.operands, graph.results):
        node, row = tensors.row_ids, tensors.values
        order = np.argsort(elements[row], kind="stable")
        last = np.full(len(graph), -1, np.int64)
        last[node[order]] = row[order]  # the largest is written last
        has = last >= 0
        size = np.where(has, np.nan_to_num(elements[last], nan=-1.0), -1.0)
        better = size > most
        found[better], most[better] = last[better], size[better]
    return found


def _touched(graph: OpGraph, chosen: IntArray) -> IntArray:
    """The rows of types ``chosen``, with smaller ones where a node moves fewer bytes than the tensor has."""
    size = np.append(graph.types.bytes, np.nan)
    most = graph.bytes_moved
    partly = np.flatnonzero((size[chosen] > most) & (most > 0))
    if not len(partly):
        return chosen
    found = chosen.copy()
    for node in partly.tolist():
        tensors = np.concatenate([graph.operands.row(node), graph.results.row(node)])
        fitting = tensors[(tensors >= 0) & (size[tensors] <= most[node])]
        if len(fitting):
            found[node] = fitting[np.argmax(size[fitting])]
    return found


def _padding(graph: OpGraph) -> FloatArray:
    """How many times the elements of each type its whole tiles hold, shape ``(types + 1,)``."""
    shapes = (graph.types.shape(row) for row in range(len(graph.types)))
    return np.array([*(np.nan if -1 in shape else padding_of_shape(shape) for shape in shapes), np.nan])


def _schemes(graph: OpGraph) -> tuple[SmallIntArray, list[str]]:
    """The arithmetic type of each node, as rows of all element types and "" (unknown)."""
    names = [*(entry.name for entry in DTYPES), ""]
    code = arithmetic_dtype(graph, -1).astype(np.int32)
    return np.where(code < 0, _UNKNOWN_TYPE, code).astype(np.int32), names


def _named(name: str, names: list[str]) -> int:
    if name not in names:
        names.append(name)
    return names.index(name)


def _products(
    graph: OpGraph,
    kind: SmallIntArray,
    dims: dict[str, FloatArray],
    scheme: SmallIntArray,
    names: list[str],
) -> None:
    """Nodes whose work is one product: its sizes and number format. Fusions of several stay what they are."""
    table = graph.contractions
    for name in ("batch", "m", "n", "k"):
        dims[name] = np.full(len(graph), np.nan)
    if not len(table):
        return
    count = np.bincount(table.node, minlength=len(graph))
    mine = np.flatnonzero((count[table.node] == 1) & (graph.op_class[table.node] != int(OpClass.ATTENTION)))
    node = table.node[mine]
    convolves = graph.op_class[node] == int(OpClass.CONVOLUTION)
    kind[node] = np.where(convolves, _PLACE["convolution"], _PLACE["matmul"])
    for name, column in (("batch", table.batch), ("m", table.m), ("n", table.n), ("k", table.k)):
        dims[name][node] = np.where(column[mine] < 0, np.nan, column[mine])
    key = np.stack((table.lhs[mine], table.rhs[mine], table.products[mine]))
    distinct, place = np.unique(key, axis=1, return_inverse=True)
    triples: list[list[int]] = distinct.T.tolist()
    rows = np.array([_named(_product_scheme(*triple), names) for triple in triples], np.int32)
    scheme[node] = rows[place.reshape(-1)]


def _product_scheme(lhs: int, rhs: int, products: int) -> str:
    """The number format of a product from its operands' types."""
    if lhs < 0 or rhs < 0:
        return ""
    left, right = DTYPES[lhs], DTYPES[rhs]
    if left.name == "f32" and right.name == "f32" and products >= 6:
        return "f32_full"
    mixed = _WEIGHT_ONLY.get((left.name, right.name)) or _WEIGHT_ONLY.get((right.name, left.name))
    if mixed:
        return mixed
    return left.name if left.bits >= right.bits else right.name


def _attention(graph: OpGraph, kind: SmallIntArray, dims: dict[str, FloatArray]) -> None:
    """Fused attention by the shapes of q and k: one query is generation, more are context."""
    found = np.flatnonzero(graph.op_class == int(OpClass.ATTENTION))
    names = ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim", "pairs")
    for name in names:
        if name not in dims:
            dims[name] = np.full(len(graph), np.nan)
    operands: list[list[int]] = graph.operands.take(found).to_lists()
    numbers: list[int] = found.tolist()
    for node, types in zip(numbers, operands, strict=True):
        sizes = _attention_sizes(graph, node, types)
        if sizes is None:
            continue
        kind[node] = _PLACE["attention.generation" if sizes[1] == 1 else "attention.context"]
        for name, size in zip(names[:-1], sizes, strict=True):
            dims[name][node] = size
        batch, _, _, heads, _, head_dim = sizes
        dims["pairs"][node] = graph.flops[node] / (4 * batch * heads * head_dim)


_FUSED_EXPERTS = "fused_moe"


def _mixtures(graph: OpGraph, kind: SmallIntArray, dims: dict[str, FloatArray]) -> None:
    """Experts in one kernel, by the shapes of its operands: tokens, both matrices of the experts of a rank,
    scores of all experts, those chosen. A rank's part of an expert is told as an expert of that width.
    """
    for name in KINDS["moe"]:
        dims.setdefault(name, np.full(len(graph), np.nan))
    row = next((row for row in np.unique(graph.op_row).tolist() if graph.strings[row] == _FUSED_EXPERTS), -1)
    found = np.flatnonzero(graph.op_row == row)
    for node in found.tolist():
        types: list[int] = graph.operands.row(node).tolist()
        shapes = [graph.types.shape(each) for each in types]
        if [len(shape) for shape in shapes] != [2, 3, 3, 2, 2] or any(-1 in shape for shape in shapes):
            continue
        (tokens, hidden), (local, wide, _), (_, _, inter), (_, experts), (_, topk) = shapes
        kind[node] = _PLACE["moe"]
        sizes = (tokens, hidden, inter, topk, experts, 1, experts / local, 1 + wide / inter)
        for name, size in zip(KINDS["moe"], sizes, strict=True):
            dims[name][node] = size


def _attention_sizes(graph: OpGraph, node: int, types: Sequence[int]) -> tuple[float, ...] | None:
    """Batch, query and key lengths, heads, key heads, head size; None where the operands do not show them."""
    shapes = [graph.types.shape(row) for row in types[:2]]
    if len(shapes) < 2 or any(len(shape) != 4 or -1 in shape or 0 in shape for shape in shapes):
        return None
    (batch, q_heads, q_len, head_dim), (_, k_heads, k_len, _) = shapes
    name = graph.op_name(node)
    if "scaled_dot_product" not in name:  # the libraries' own entries hold (batch, length, heads, size)
        q_heads, q_len, k_heads, k_len = q_len, q_heads, k_len, k_heads
    return tuple(float(size) for size in (batch, q_len, k_len, q_heads, k_heads, head_dim))


def group_sizes(graph: OpGraph, *, num_ranks: int) -> FloatArray:
    """Ranks of each group set, shape ``(group sets + 1,)``; the last row is the group nobody stated."""
    stated = [float(groups.max_group_size) for groups in graph.group_sets]
    return np.array([*stated, float(num_ranks) if num_ranks > 0 else nan])


def between_ranks(graph: OpGraph) -> BoolArray:
    """Messages that go from one rank to another, shape ``(messages,)``: not to the host, and not those of
    permutations that leave everything where it is.
    """
    still = np.array(
        [*(all(source == target for source, target in each) for each in graph.permutations), False]
    )
    return np.asarray(~(graph.p2p.host | still[graph.p2p.permutation]), np.bool_)


def _collectives(graph: OpGraph, dims: dict[str, FloatArray], num_ranks: int) -> None:
    table = graph.collectives
    for name in ("ranks", "message_bytes"):
        dims[name] = np.full(len(graph), np.nan)
    if len(table):
        dims["ranks"][table.node] = group_sizes(graph, num_ranks=num_ranks)[table.group_set]
        dims["message_bytes"][table.node] = table.comm_bytes
    messages, between = graph.p2p, between_ranks(graph)
    dims["ranks"][messages.node[between]] = 2.0
    dims["message_bytes"][messages.node[between]] = messages.comm_bytes[between]


def arithmetic_dtype(graph: OpGraph, default: int) -> NDArray[np.int16]:
    """The element type each node computes in: the stated one, else that of its first operand or result.

    What remains unknown becomes ``default`` (-1: stays unknown).
    """
    found = graph.rate_dtype
    for lists in (graph.operands, graph.results):
        unknown = found == UNKNOWN_DTYPE
        if not len(lists.values) or not unknown.any():
            continue
        starts = lists.offsets[:-1]
        first = graph.types.dtype[lists.values[np.minimum(starts, len(lists.values) - 1)]]
        found = np.where(unknown & (lists.offsets[1:] > starts), first, found).astype(np.int16)
    if default == UNKNOWN_DTYPE:
        return found
    return np.where(found == UNKNOWN_DTYPE, default, found).astype(np.int16)


# How operations walk their operands: in the order of their results, or in another.

_ONE = 0
"""The walk of what has one element, or an extent nobody knows: it agrees with any other."""


def _strided(graph: OpGraph, elementwise: BoolArray, streamed: BoolArray) -> FloatArray:
    """1 for nodes whose operands are not walked as their first result is, 0 for others; NaN where neither
    ``elementwise`` nor ``streamed``.

    Elements are walked alike in the same shape and order. What is ``streamed`` may have other shapes
    (reductions, concatenations): there, operand and result are both row by row, or both not. A fusion is a
    kernel of its own making: see :func:`_transposes`. O(operands).
    """
    by_order, by_shape = _walks(graph)
    found = np.where(elementwise | streamed, 0.0, np.nan)
    operands, results = graph.operands, graph.results
    if not len(operands.values) or not len(results.values):
        return found
    fused = elementwise & (graph.op_class == int(OpClass.FUSION))
    node = operands.row_ids
    first = np.minimum(results.offsets[:-1], len(results.values) - 1)
    answers = results.offsets[1:] > results.offsets[:-1]
    by_order_too = fused | (streamed & ~elementwise)
    for walk, asked in ((by_shape, elementwise & ~fused), (by_order, by_order_too)):
        of_result = np.where(answers, walk[results.values[first]], _ONE)[node]
        of_operand = walk[operands.values]
        differs = asked[node] & (of_operand != of_result) & (of_operand != _ONE) & (of_result != _ONE)
        found[node[differs]] = 1.0
    found[_transposes(graph, fused & answers)] = 1.0
    return found


def _transposes(graph: OpGraph, asked: BoolArray) -> IntArray:
    """Of the fusions asked, those that write as many elements as an operand has, in another order.

    A compiler works out addresses for the shapes it knows and reads vectors where rows end together, and
    what is broadcast comes from the caches; so neither costs a fusion more. One order is another's where
    the extents from the last on multiply to the same numbers, of either or of both: rows that were only
    joined or cut.
    """
    operands, results = graph.operands, graph.results
    node = operands.row_ids
    mine = np.flatnonzero(asked[node])
    if not len(mine):
        return mine
    pairs = np.stack((operands.values[mine], results.values[results.offsets[:-1][node[mine]]]))
    distinct, place = np.unique(pairs, axis=1, return_inverse=True)
    couples: list[list[int]] = distinct.T.tolist()
    apart = np.array(
        [_is_reordered(graph.types.shape(a), graph.types.shape(b)) for a, b in couples], np.bool_
    )
    return node[mine[apart[place.reshape(-1)]]]


def _is_reordered(operand: tuple[int, ...], result: tuple[int, ...]) -> bool:
    if DYNAMIC in operand or DYNAMIC in result or prod(operand) != prod(result):
        return False
    ends, others = _row_ends(operand), _row_ends(result)
    return not (ends <= others or others <= ends)


def _row_ends(shape: tuple[int, ...]) -> set[int]:
    """How many elements the rows of the last, the last two, ... extents have."""
    found: set[int] = set()
    length = 1
    for extent in reversed(shape):
        length *= extent
        found.add(length)
    return found - {1}


def _walks(graph: OpGraph) -> tuple[IntArray, IntArray]:
    """A number per type for its order in memory (1 row by row, 2 any other), and one for order and shape."""
    count = len(graph.types)
    by_order, by_shape = np.zeros(count, np.int64), np.zeros(count, np.int64)
    seen: dict[tuple[tuple[int, int], ...], int] = {}
    for row in range(count):
        shape = graph.types.shape(row)
        if DYNAMIC in shape or all(extent == 1 for extent in shape):
            continue
        order = _order(graph.strings[int(graph.types.encoding[row])], len(shape))
        # Leading extents of 1 change nothing, so dimensions are counted from the last.
        walk = tuple((len(shape) - dim, shape[dim]) for dim in order if shape[dim] != 1)
        places = [place for place, _ in walk]
        by_order[row] = 1 if order and places == sorted(places) else 2
        by_shape[row] = 1 + seen.setdefault(walk if order else ((-1, row),), len(seen))
    return by_order, by_shape


def _order(layout: str, rank: int) -> tuple[int, ...]:
    """Dimensions from the fastest, as HLO writes them (tiling left out); none for any other order."""
    text = layout.strip("{}").partition(":")[0]
    usual = tuple(reversed(range(rank)))
    if not text or not text[0].isdecimal():
        return () if text.startswith("strides") else usual
    numbers = text.split(",")
    order = tuple(int(each) for each in numbers) if all(each.isdecimal() for each in numbers) else usual
    return order if sorted(order) == list(range(rank)) else usual


# One name for one operation, whoever wrote it: ``stablehlo.add``, ``aten::add_.Tensor`` and ``VECadd``.

_EVENT_TIMES = "pytorch events"
"""How the names of variants begin whose times a host took with events."""

_SAME: Mapping[str, str] = {
    "addition": "add",
    "addu": "add_scalar",
    "subtract": "sub",
    "multiply": "mul",
    "mulu": "mul_scalar",
    "divide": "div",
    "divu": "div_scalar",
    "power": "pow",
    "powu": "pow_scalar",
    "pow_tensor_scalar": "pow_scalar",
    "exponential": "exp",
    "logistic": "sigmoid",
    "maximum": "max",
    "minimum": "min",
    "ln": "layer_norm",
    "native_layer_norm": "layer_norm",
    "input_layernorm": "rms_norm",
    "post_attention_layernorm": "rms_norm",
    "fused_rms_norm": "rms_norm",
    "emb": "embedding",
    "safe_softmax": "softmax",
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "alltoall": "all_to_all",
    "send_recv": "permute",
    "collective_permute": "permute",
}


def canonical_op(name: str) -> str:
    """The operation without dialect, overload, in-place mark and case; synonyms become one name."""
    bare = name.rpartition("::")[2] if "::" in name else name.rpartition(".")[2]
    if "::" in name:
        bare = bare.partition(".")[0]
    bare = bare.strip("_").casefold()
    return _SAME.get(bare, bare)


def timed_with_events(variant: str) -> bool:
    """Whether times of a variant hold what the host had to do: 14 to 30 us that no kernel takes."""
    return variant.startswith(_EVENT_TIMES)
