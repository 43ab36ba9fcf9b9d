"""Conversion of graph nodes to a table of operations, for models that are fitted on measured tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan, prod

import numpy as np
from numpy.typing import NDArray

from hespas.graph import (
    DTYPES,
    DYNAMIC,
    UNKNOWN_DTYPE,
    CollectiveKind,
    DTypeKind,
    NodeKind,
    OpClass,
    OpGraph,
)
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray
from hespas.operations.model import (
    CHANNELS,
    EXPANDED,
    KIND_OF_CLASS,
    KINDS,
    OF_LIBRARY,
    REORDERED,
    ROW_GATHER,
    SCATTERED,
    STRIDED,
    Labels,
    Operations,
    canonical_op,
)
from hespas.operations.tiles import TILED, padding_of_shape

__all__ = [
    "arithmetic_dtype",
    "between_ranks",
    "element_types_of",
    "group_sizes",
    "operations_of",
    "scattered_elements",
    "single_products",
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
_KINDS_OF_ONE_OPERATION = frozenset(
    {"matmul", "convolution", "attention.context", "attention.generation", "attention.encoder", "moe"}
)
_CODE: Mapping[str, int] = {name: code for code, name in enumerate(_NAMES)}
"""Kind -> its index in the column ``kind``."""
_WEIGHT_ONLY: Mapping[tuple[str, str], str] = {
    ("bf16", "i8"): "int8_wo",
    ("f16", "i8"): "int8_wo",
    ("bf16", "i4"): "int4_wo",
    ("f16", "i4"): "int4_wo",
}
_UNKNOWN_TYPE = len(DTYPES)
_MESSAGE = "permute"
"""Name of a point-to-point message in tables: a permutation of two ranks."""
_STREAMED = tuple(_CODE[name] for name in ("move", "reduction", "normalization"))
_MOST_COLUMNS = 4096.0
"""Row length of elementwise operations, as in tables of measurements."""
_BATCH_NORM = "batch_norm"
_LATENT_ATTENTION = "flash_mla::"
"""Prefix of decoding kernels over latents (MLA): they have work, but no sizes that tables state."""
_FUSED_EXPERTS = "fused_moe"
_LIBRARY_CALL, _IMAGE_RANK = "custom-call", 4
"""Operation of library calls in compiled modules, and the dimensions of batches of images."""
_ROWS_OF_TILE = 128.0
_APART_BYTES = 64
"""Distance of neighbours [bytes] from which each is counted as a read of its own line, on all devices."""
_LEAST_SCATTERED = 128
_ANY_ORDER = 0
"""Traversal of a tensor with one element or unknown extents: it agrees with any other."""


def operations_of(graph: OpGraph, *, num_ranks: int = -1, tiled: bool = False) -> Operations:
    """Return a table with one operation per node of the graph.

    A node with one matmul becomes that matmul. Other nodes are described by their name and the extents of
    their first result (of the first operand if that is larger, as in a reduction). ``num_ranks`` is the size
    of collectives without stated groups. ``tiled`` increases arrays to whole memory tiles
    (:data:`~hespas.operations.tiles.TILED`). O(nodes).
    """
    codes = [_CODE[KIND_OF_CLASS.get(op_class, "other")] for op_class in OpClass]
    kind = np.array(codes, np.int32)[graph.op_class]
    kind[graph.kind == int(NodeKind.COLLECTIVE)] = _CODE["collective"]
    kind[np.isin(graph.kind, (int(NodeKind.SEND), int(NodeKind.RECV), int(NodeKind.PERMUTE)))] = 0
    between = between_ranks(graph)
    messages = graph.p2p.node[between]
    kind[messages] = _CODE["collective"]
    dims, deciding_type = _extents(graph)
    element_types = element_types_of(graph)
    scheme, schemes = element_types.row, list(element_types.names)
    _set_products(graph, kind, dims, scheme, schemes)
    _set_attention(graph, kind, dims)
    _set_experts(graph, kind, dims)
    op, op_names = _operation_names(graph, kind, messages)

    ranks, message_bytes = np.full(len(graph), np.nan), np.full(len(graph), np.nan)
    collectives = graph.collectives
    if len(collectives):
        ranks[collectives.node] = group_sizes(graph, num_ranks=num_ranks)[collectives.group_set]
        message_bytes[collectives.node] = collectives.comm_bytes
    ranks[messages] = 2.0
    message_bytes[messages] = graph.p2p.comm_bytes[between]
    dims |= {"ranks": ranks, "message_bytes": message_bytes}

    # The shape of an elementwise operation does not matter: use rows as tables of measurements do.
    is_vector = kind == _CODE["vector"]
    elements = dims["rows"][is_vector] * dims["columns"][is_vector]
    columns = np.minimum(elements, _MOST_COLUMNS)
    dims["columns"][is_vector] = columns
    dims["rows"][is_vector] = elements / np.maximum(columns, 1.0)

    for name, column in dims.items():
        if name not in (EXPANDED, OF_LIBRARY):
            column[~_kinds_with(name)[kind]] = np.nan
    if tiled:
        shapes = (graph.types.shape(row) for row in range(len(graph.types)))
        padding = [np.nan if DYNAMIC in shape else padding_of_shape(shape) for shape in shapes]
        dims[TILED] = np.where(_kinds_with("rows")[kind], np.array([*padding, np.nan])[deciding_type], np.nan)
    dims[CHANNELS] = _channels(graph)
    dims[REORDERED] = _reordered_bytes(graph)
    dims[STRIDED] = _strided(graph, is_vector, np.isin(kind, _STREAMED))
    dims[SCATTERED] = scattered_elements(graph, is_vector, kind == _CODE["move"])
    return Operations(
        kind=Labels(kind, _NAMES),
        op=Labels(op, op_names),
        scheme=Labels(scheme, tuple(schemes)),
        variant=Labels.constant("", len(graph)),
        dims=dims,
        flops=np.where(np.isnan(graph.useful_flops), graph.flops, graph.useful_flops),
        transcendentals=graph.transcendentals,
        bytes_moved=graph.bytes_moved,
    )


def _channels(graph: OpGraph) -> FloatArray:
    """Return the input channels of convolutions without groups, shape ``(nodes,)``. NaN for other nodes, and
    for convolutions whose window is unknown or does not divide K.
    """
    channels, table = np.full(len(graph), np.nan), graph.contractions
    count = np.bincount(table.node, minlength=len(graph))
    rows = (count[table.node] == 1) & (table.batch == 1) & (table.window > 1) & (table.k > 0)
    rows &= table.has_even_window
    channels[table.node[rows]] = table.k[rows] / table.window[rows]
    return channels


def _reordered_bytes(graph: OpGraph) -> FloatArray:
    """Return the bytes of the operands and the first result of 2-D convolutions without groups whose channels
    are not next to each other, shape ``(nodes,)``. NaN for other nodes, and 0 if channels are contiguous.

    The channels of PyTorch are the second dimension; one channel is contiguous in any order. Operands without
    recorded strides have PyTorch's default order (NCHW). Library calls of XLA do not state their channels
    here: the fastest extent of their first operand is compared with the numbers of channels.
    """
    moved, table = np.full(len(graph), np.nan), graph.contractions
    names = [row for row in np.unique(graph.op_id).tolist() if "::" in graph.strings[row]]
    of_torch = np.isin(graph.op_id, names)
    nodes = (graph.op_class == int(OpClass.CONVOLUTION)) & (
        of_torch | (graph.op_id == graph.strings.find(_LIBRARY_CALL))
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        channels = np.stack((table.n, table.k / table.window), axis=1)
    for row in np.flatnonzero(nodes[table.node] & (table.batch == 1)).tolist():
        node = int(table.node[row])
        types: list[int] = [*graph.operands.row(node).tolist(), *graph.results.row(node)[:1].tolist()]
        images = [number for number in types if len(graph.types.shape(number)) == _IMAGE_RANK]
        shape = graph.types.shape(images[0]) if images else ()
        layout = graph.strings[int(graph.types.encoding[images[0]])] if images else ""
        order = _order(layout, len(shape))
        fastest = next((dim for dim in order if shape[dim] != 1), 1)
        if layout.startswith("strides "):
            fastest = 1 if layout.removeprefix("strides ").split(",")[1] == "1" else _IMAGE_RANK - 1
        if of_torch[node]:
            contiguous = fastest == 1 or shape[1:2] == (1,)
        else:
            contiguous = not shape or shape[fastest] in channels[row].tolist()
        moved[node] = 0.0 if contiguous else float(graph.types.bytes[images].sum())
    return moved


def element_types_of(graph: OpGraph) -> Labels:
    """Return the element type in which each node computes. It is the number format of all operations except
    matmuls. O(nodes).
    """
    dtype = arithmetic_dtype(graph, -1).astype(np.int32)
    row = np.where(dtype < 0, _UNKNOWN_TYPE, dtype).astype(np.int32)
    return Labels(row, (*(entry.name for entry in DTYPES), ""))


def _kinds_with(dim: str) -> BoolArray:
    """Return a mask of the kinds of operations that have the size ``dim``."""
    return np.array([dim in KINDS[name] for name in _NAMES], np.bool_)


def _operation_names(
    graph: OpGraph, kind: SmallIntArray, messages: SmallIntArray
) -> tuple[SmallIntArray, tuple[str, ...]]:
    """Return the operation name of each node, as indices and names; empty for kinds of one operation. Gathers
    by indices that are expanded along the row are :data:`ROW_GATHER`.
    """
    rows: dict[str, int] = {"": 0}
    number = np.zeros(len(graph.strings), np.int32)
    for row in np.unique(graph.op_id).tolist():
        name = canonical_op(graph.strings[row])
        number[row] = rows.setdefault(name, len(rows))
    unnamed = np.array([name in _KINDS_OF_ONE_OPERATION for name in _NAMES], np.bool_)[kind]
    op = np.where(unnamed, 0, number[graph.op_id]).astype(np.int32)
    for node in np.flatnonzero(graph.op_id == graph.strings.find("aten::gather")).tolist():
        layouts = [graph.strings[row] for row in graph.types.encoding[graph.operands.row(node)].tolist()]
        if "".join(layouts[1:2]).startswith("strides ") and layouts[1].endswith(",0"):
            op[node] = rows.setdefault(ROW_GATHER, len(rows))
    for collective in CollectiveKind:
        nodes = graph.collectives.node[graph.collectives.kind == int(collective)]
        if len(nodes):
            op[nodes] = rows.setdefault(collective.name.lower(), len(rows))
    if len(messages):
        op[messages] = rows.setdefault(_MESSAGE, len(rows))
    return op, tuple(rows)


def _first(values: SmallIntArray, offsets: IntArray, default: int) -> IntArray:
    """Return the first value of each node, or ``default`` if the node has none. Node ``i`` has the values
    ``offsets[i]:offsets[i + 1]``.
    """
    starts, ends = offsets[:-1], offsets[1:]
    if not len(values):
        return np.full(len(starts), default, np.int64)
    return np.where(ends > starts, values[np.minimum(starts, len(values) - 1)], default).astype(np.int64)


def _extents(graph: OpGraph) -> tuple[dict[str, FloatArray], IntArray]:
    """Return ``rows`` and ``columns`` of the tensor that determines the time of each node, and the index of
    its type.

    That tensor is the larger of the first result and the first operand; for gathers, slices and PyTorch's
    poolings it is the first result. For fusions, whose operands have any order, it is the largest tensor of
    all. The rows of a batch norm are its channels.

    If a node moves fewer bytes than that tensor has, as an update in place does, it is the largest tensor
    that the node can have moved. Extents are NaN if unknown. The index of a node without tensors is the
    number of types.
    """
    types = len(graph.types)
    rows, columns = np.full(types + 1, np.nan), np.full(types + 1, np.nan)
    for row in range(types):
        shape = graph.types.shape(row)
        if DYNAMIC in shape:
            continue
        last = float(shape[-1]) if shape else 1.0
        columns[row] = last
        rows[row] = float(np.prod(np.array(shape[:-1], np.float64)))
    result = _first(graph.results.values, graph.results.offsets, types)
    operand = _first(graph.operands.values, graph.operands.offsets, types)
    elements = rows * columns
    larger = np.nan_to_num(elements[operand]) > np.nan_to_num(elements[result])
    larger &= ~np.isin(graph.op_class, (int(OpClass.GATHER), int(OpClass.SLICE)))
    # Poolings of PyTorch have a thread for each result.
    of_torch = [row for row in np.unique(graph.op_id).tolist() if "::" in graph.strings[row]]
    larger &= (graph.op_class != int(OpClass.WINDOW)) | ~np.isin(graph.op_id, of_torch)
    # Replace the type of a fusion by its type with the most elements.
    chosen = np.where(larger, operand, result)
    fused = graph.op_class == int(OpClass.FUSION)
    deciding = chosen.copy()
    most = np.where(fused, np.nan_to_num(elements[chosen], nan=-1.0), np.inf)
    for lists in (graph.operands, graph.results):
        order = np.argsort(elements[lists.values], kind="stable")
        largest = np.full(len(graph), -1, np.int64)
        largest[lists.row_ids[order]] = lists.values[order]  # the largest is written last
        count = np.where(largest >= 0, np.nan_to_num(elements[largest], nan=-1.0), -1.0)
        better = count > most
        deciding[better], most[better] = largest[better], count[better]

    size, moved = np.append(graph.types.bytes, np.nan), graph.bytes_moved
    for node in np.flatnonzero((size[deciding] > moved) & (moved > 0)).tolist():
        tensors = np.concatenate([graph.operands.row(node), graph.results.row(node)])
        fitting = tensors[(tensors >= 0) & (size[tensors] <= moved[node])]
        if len(fitting):
            deciding[node] = fitting[np.argmax(size[fitting])]
    rows, columns = rows[deciding], columns[deciding]
    # A batch norm in PyTorch reduces each channel, the second dimension, over all images and positions.
    of_channels = np.isin(graph.op_id, [row for row in of_torch if _BATCH_NORM in graph.strings[row]])
    for node in np.flatnonzero(of_channels & ~np.isnan(rows)).tolist():
        shape = graph.types.shape(int(deciding[node]))
        if len(shape) > 1 and shape[1] > 0:
            rows[node], columns[node] = float(shape[1]), rows[node] * columns[node] / shape[1]
    return {"rows": rows, "columns": columns}, deciding


def _set_products(
    graph: OpGraph,
    kind: SmallIntArray,
    dims: dict[str, FloatArray],
    scheme: SmallIntArray,
    schemes: list[str],
) -> None:
    """Set the kind, sizes and number format of nodes with one matmul. Nodes with several matmuls are not
    changed.
    """
    table = graph.contractions
    for name in ("batch", "m", "n", "k"):
        dims[name] = np.full(len(graph), np.nan)
    if not len(table):
        return
    count = np.bincount(table.node, minlength=len(graph))
    mine = np.flatnonzero((count[table.node] == 1) & (graph.op_class[table.node] != int(OpClass.ATTENTION)))
    node = table.node[mine]
    convolves = graph.op_class[node] == int(OpClass.CONVOLUTION)
    kind[node] = np.where(convolves, _CODE["convolution"], _CODE["matmul"])
    for name, column in (("batch", table.batch), ("m", table.m), ("n", table.n), ("k", table.k)):
        dims[name][node] = np.where(column[mine] < 0, np.nan, column[mine])
    dims[EXPANDED] = np.full(len(graph), np.nan)
    dims[EXPANDED][node] = _expanded_weights(graph)[mine]
    key = np.stack((table.lhs[mine], table.rhs[mine], table.products[mine]))
    distinct, index = np.unique(key, axis=1, return_inverse=True)
    triples: list[list[int]] = distinct.T.tolist()
    rows: list[int] = []
    for triple in triples:
        name = _product_scheme(*triple)
        if name not in schemes:
            schemes.append(name)
        rows.append(schemes.index(name))
    scheme[node] = np.array(rows, np.int32)[index.reshape(-1)]


def _expanded_weights(graph: OpGraph) -> FloatArray:
    """Return the weights of 4 bits that each product expands to the 16 bits of its activations, shape
    ``(contractions,)``: all of a matrix for each tile of rows. NaN if a size is unknown.
    """
    table = graph.contractions
    bits = np.array([*(entry.bits for entry in DTYPES), 0])
    is_float = np.array([*(entry.kind is DTypeKind.FLOAT for entry in DTYPES), False])
    expands = (bits[table.lhs] == 16) & (bits[table.rhs] == 4) & is_float[table.rhs]
    sizes = np.stack((table.batch, table.m, table.n, table.k)).astype(np.float64)
    batch, m, n, k = np.where(sizes < 0, np.nan, sizes)
    return np.where(expands, batch * np.ceil(m / _ROWS_OF_TILE) * n * k, 0.0)


def single_products(graph: OpGraph) -> tuple[Operations, IntArray]:
    """Return the products of all nodes that consist of several matmuls or convolutions, as one operation
    each, and the node of each. Such nodes are the gradients of a convolution, of which each takes a kernel.

    The bytes of a product are its share, by FLOPs, of the bytes of its node. Products of fusions, of fused
    attention and of fused experts are left out, because their kernels do other work, too.
    """
    table = graph.contractions
    several = (np.bincount(table.node, minlength=len(graph)) > 1) & (
        graph.op_id != graph.strings.find(_FUSED_EXPERTS)
    )
    classes = (int(OpClass.CONTRACTION), int(OpClass.CONVOLUTION))
    rows = np.flatnonzero(several[table.node] & np.isin(graph.op_class[table.node], classes))
    node = table.node[rows].astype(np.int64)
    triples = zip(*(column[rows].tolist() for column in (table.lhs, table.rhs, table.products)), strict=True)
    convolves = graph.op_class[node] == int(OpClass.CONVOLUTION)
    flops = np.where(np.isnan(table.useful_flops), table.flops, table.useful_flops)[rows]
    dims = {"batch": table.batch, "m": table.m, "n": table.n, "k": table.k}
    with np.errstate(divide="ignore", invalid="ignore"):
        share = flops / np.bincount(node, flops, len(graph))[node]
    products = Operations(
        kind=Labels.choice(("matmul", "convolution"), convolves.astype(np.int64)),
        op=Labels.constant("", len(rows)),
        scheme=Labels.of([_product_scheme(*triple) for triple in triples]),
        variant=Labels.constant("", len(rows)),
        dims={
            **{name: np.where(column[rows] < 0, np.nan, column[rows]) for name, column in dims.items()},
            EXPANDED: _expanded_weights(graph)[rows],
            REORDERED: _reordered_bytes(graph)[node] * share,
        },
        flops=flops,
        transcendentals=np.zeros(len(rows)),
        bytes_moved=graph.bytes_moved[node] * share,
    )
    return products, node


def _product_scheme(lhs: int, rhs: int, products: int) -> str:
    """Return the number format of a matmul of two element types; ``products`` above 1 means emulated
    precision.
    """
    if lhs < 0 or rhs < 0:
        return ""
    left, right = DTYPES[lhs], DTYPES[rhs]
    if left.name == "f32" and right.name == "f32" and products >= 6:
        return "f32_full"
    mixed = _WEIGHT_ONLY.get((left.name, right.name)) or _WEIGHT_ONLY.get((right.name, left.name))
    if mixed:
        return mixed
    return left.name if left.bits >= right.bits else right.name


def _set_attention(graph: OpGraph, kind: SmallIntArray, dims: dict[str, FloatArray]) -> None:
    """Set the kind and sizes of nodes with fused attention. Nodes with one query per sequence are generation,
    others are context.
    """
    nodes = np.flatnonzero(graph.op_class == int(OpClass.ATTENTION))
    flops = np.where(np.isnan(graph.useful_flops), graph.flops, graph.useful_flops)
    names = ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim", "pairs")
    for name in names:
        if name not in dims:
            dims[name] = np.full(len(graph), np.nan)
    operands: list[list[int]] = graph.operands.take(nodes).to_lists()
    dims[OF_LIBRARY] = np.full(len(graph), np.nan)
    dims[OF_LIBRARY][nodes] = [
        nan if "::" not in name else float(not name.startswith("aten::"))
        for name in (graph.op_name(node) for node in nodes.tolist())
    ]
    alike: dict[tuple[int, ...], list[int]] = {}
    for node, op_id, types in zip(nodes.tolist(), graph.op_id[nodes].tolist(), operands, strict=True):
        alike.setdefault((op_id, *types[:2]), []).append(node)
    for (_, *types), rows in alike.items():
        if graph.op_name(rows[0]).startswith(_LATENT_ATTENTION):
            kind[rows] = _CODE["attention.generation"]
            continue
        if (sizes := _attention_sizes(graph, flops, rows[0], types)) is None:
            continue
        kind[rows] = _CODE["attention.generation" if sizes[1] == 1 else "attention.context"]
        for name, size in zip(names[:-1], sizes, strict=True):
            dims[name][rows] = size
        batch, _, _, heads, _, head_dim = sizes
        dims["pairs"][rows] = flops[rows] / (4 * batch * heads * head_dim)


def _set_experts(graph: OpGraph, kind: SmallIntArray, dims: dict[str, FloatArray]) -> None:
    """Set the kind and sizes of nodes with fused mixtures of experts, from the shapes of their operands.

    The operands are the tokens, the two weight matrices of the rank's experts, scores of all experts, and
    chosen experts. If a rank has only a part of an expert, the part counts as an expert of that width.
    """
    for name in KINDS["moe"]:
        dims.setdefault(name, np.full(len(graph), np.nan))
    row = next((row for row in np.unique(graph.op_id).tolist() if graph.strings[row] == _FUSED_EXPERTS), -1)
    for node in np.flatnonzero(graph.op_id == row).tolist():
        types: list[int] = graph.operands.row(node).tolist()
        shapes = [graph.types.shape(type_row) for type_row in types]
        if [len(shape) for shape in shapes] != [2, 3, 3, 2, 2] or any(DYNAMIC in shape for shape in shapes):
            continue
        (tokens, hidden), (local, wide, _), (_, _, inter), (_, experts), (_, topk) = shapes
        kind[node] = _CODE["moe"]
        sizes = (tokens, hidden, inter, topk, experts, 1, experts / local, 1 + wide / inter)
        for name, size in zip(KINDS["moe"], sizes, strict=True):
            dims[name][node] = size


def _attention_sizes(
    graph: OpGraph, flops: FloatArray, node: int, types: Sequence[int]
) -> tuple[float, ...] | None:
    """Return batch, query and key lengths, heads, key heads and head size of an attention node; None if its
    operands lack them.

    Queries of three dimensions are sequences that are packed in (tokens, heads, size); keys may also be pages
    of a cache, (pages, tokens, heads, size). The FLOPs state the mean number of keys per query. If prompts
    with twice as many tokens, of which each sees the ones before it, fit into the tokens, these are assumed;
    otherwise one new token per sequence.
    """
    shapes = [graph.types.shape(row) for row in types]
    ranks = [len(shape) for shape in shapes]
    if ranks not in ([3, 3], [3, 4], [4, 4]) or any(-1 in shape or 0 in shape for shape in shapes):
        return None
    if ranks[0] == 3:
        (tokens, heads, head_dim), kv_heads = shapes[0], shapes[1][-2]
        keys = float(flops[node]) / (4 * tokens * heads * head_dim)
        if not keys >= 1:
            return None
        length = 2 * keys if 2 * keys <= tokens else 1.0
        return tuple(map(float, (tokens / length, length, max(length, keys), heads, kv_heads, head_dim)))
    (batch, q_heads, q_len, head_dim), (_, k_heads, k_len, _) = shapes
    name = graph.op_name(node)
    if "scaled_dot_product" not in name:  # entry points of libraries take (batch, length, heads, size)
        q_heads, q_len, k_heads, k_len = q_len, q_heads, k_len, k_heads
    return tuple(float(size) for size in (batch, q_len, k_len, q_heads, k_heads, head_dim))


def group_sizes(graph: OpGraph, *, num_ranks: int) -> FloatArray:
    """Return the number of ranks in each group set, shape ``(group sets + 1,)``; the last row is for
    collectives without a stated group.
    """
    sizes = [float(groups.max_group_size) for groups in graph.group_sets]
    return np.array([*sizes, float(num_ranks) if num_ranks > 0 else nan])


def between_ranks(graph: OpGraph) -> BoolArray:
    """Return a mask of the messages that go from one rank to another, shape ``(messages,)``.

    Messages to the host, and messages of each rank to itself, are excluded.
    """
    identities = [all(source == target for source, target in pairs) for pairs in graph.permutations]
    is_identity = np.array([*identities, False])
    return np.asarray(~(graph.p2p.host | is_identity[graph.p2p.permutation]), np.bool_)


def arithmetic_dtype(graph: OpGraph, default: int) -> NDArray[np.int16]:
    """Return the element type in which each node computes: the stated type, else the type of its first
    operand or result.

    Unknown types become ``default`` (-1: they stay unknown).
    """
    dtype = graph.rate_dtype
    for lists in (graph.operands, graph.results):
        unknown = dtype == UNKNOWN_DTYPE
        if not len(lists.values) or not unknown.any():
            continue
        starts = lists.offsets[:-1]
        first = graph.types.dtype[lists.values[np.minimum(starts, len(lists.values) - 1)]]
        dtype = np.where(unknown & (lists.offsets[1:] > starts), first, dtype).astype(np.int16)
    if default == UNKNOWN_DTYPE:
        return dtype
    return np.where(dtype == UNKNOWN_DTYPE, default, dtype).astype(np.int16)


def _strided(graph: OpGraph, elementwise: BoolArray, streamed: BoolArray) -> FloatArray:
    """Return 1 for nodes that read operands in another memory order than the order of their first result, and
    0 for others.

    The value is NaN for nodes that are neither ``elementwise`` nor ``streamed``. Operands of elementwise
    nodes must have the shape and order of the result. Operands of ``streamed`` nodes may have other shapes
    (reductions, concatenations); they must be row-major exactly if the result is row-major. Code of fusions
    is generated for their shapes, so that these have a rule of their own: see :func:`_transposes`.
    O(operands).
    """
    # Two numbers for each type: of its memory order (1 row-major, 2 any other), and one that types with equal
    # order and shape share.
    count = len(graph.types)
    by_order, by_shape = np.zeros(count, np.int64), np.zeros(count, np.int64)
    seen: dict[tuple[tuple[int, int], ...], int] = {}
    for row in range(count):
        shape = graph.types.shape(row)
        if DYNAMIC in shape or all(extent == 1 for extent in shape):
            continue
        order = _order(graph.strings[int(graph.types.encoding[row])], len(shape))
        # Dimensions are counted from the last, because leading extents of 1 do not change the order.
        extents = tuple((len(shape) - dim, shape[dim]) for dim in order if shape[dim] != 1)
        positions = [position for position, _ in extents]
        by_order[row] = 1 if order and positions == sorted(positions) else 2
        by_shape[row] = 1 + seen.setdefault(extents if order else ((-1, row),), len(seen))
    strided = np.where(elementwise | streamed, 0.0, np.nan)
    operands, results = graph.operands, graph.results
    if not len(operands.values) or not len(results.values):
        return strided
    fused = elementwise & (graph.op_class == int(OpClass.FUSION))
    node = operands.row_ids
    first = np.minimum(results.offsets[:-1], len(results.values) - 1)
    has_result = results.offsets[1:] > results.offsets[:-1]
    compared = ((by_shape, elementwise & ~fused), (by_order, fused | (streamed & ~elementwise)))
    for traversal, is_compared in (pair for pair in compared if pair[1].any()):
        of_result = np.where(has_result, traversal[results.values[first]], _ANY_ORDER)[node]
        of_operand = traversal[operands.values]
        differs = is_compared[node] & (of_operand != of_result)
        differs &= (of_operand != _ANY_ORDER) & (of_result != _ANY_ORDER)
        strided[node[differs]] = 1.0
    strided[_transposes(graph, fused & has_result)] = 1.0
    return strided


def scattered_elements(graph: OpGraph, elementwise: BoolArray, moves: BoolArray) -> FloatArray:
    """Return how many elements each node reads from a line of the cache of their own, shape ``(nodes,)``: the
    elements of its result for each operand whose neighbours along the result's rows are at least
    :data:`_APART_BYTES` apart. 0 for nodes that are neither ``elementwise`` nor ``moves``. O(operands).

    Rows shorter than :data:`_LEAST_SCATTERED` return to a line before it leaves the cache of a unit. The
    compiler chooses the traversal of a fusion, so that fusions have none.
    """
    is_apart = np.zeros(len(graph.types), np.bool_)
    for row in range(len(graph.types)):
        shape, layout = graph.types.shape(row), graph.strings[int(graph.types.encoding[row])]
        last = max((dim for dim, extent in enumerate(shape) if extent != 1), default=-1)
        if last < 0 or DYNAMIC in shape or shape[last] < _LEAST_SCATTERED:
            continue
        if layout.startswith("strides "):
            stride = int(layout.removeprefix("strides ").split(",")[last])
        else:
            order = _order(layout, len(shape))
            stride = prod(shape[dim] for dim in order[: order.index(last)])
        bits = DTYPES[int(graph.types.dtype[row])].bits if graph.types.dtype[row] >= 0 else 0
        is_apart[row] = stride * bits >= 8 * _APART_BYTES
    operands, results = graph.operands, graph.results
    candidates = (elementwise | moves) & (graph.op_class != int(OpClass.FUSION))
    candidates &= results.offsets[1:] > results.offsets[:-1]
    mine = np.flatnonzero(is_apart[operands.values])
    node = np.searchsorted(operands.offsets, mine, side="right") - 1
    mine, node = mine[candidates[node]], node[candidates[node]]
    first = results.values[results.offsets[:-1][node]]
    elements = np.array([prod(graph.types.shape(row)) for row in range(len(graph.types))], np.float64)
    # The rows of a result that is laid out likewise are traversed along the operand's lines.
    read = np.where(elementwise[node], elements[first], elements[operands.values[mine]])
    read = np.where(is_apart[first], 0.0, read)
    return np.bincount(node, read, len(graph)).astype(np.float64)


def _transposes(graph: OpGraph, candidates: BoolArray) -> IntArray:
    """Return the ``candidates`` (fusions) that write as many elements as an operand has, in another order.

    Broadcasts and reshapes cost a fusion nothing. Broadcast operands are read from caches, and the compiler
    vectorizes accesses where rows end at the same elements. The row ends of a shape are the products of its
    last, its last two, ... extents. Two shapes have the same order if the row ends of one include all row
    ends of the other.
    """
    operands, results = graph.operands, graph.results
    node = operands.row_ids if candidates.any() else np.empty(0, np.int64)
    mine = np.flatnonzero(candidates[node])
    if not len(mine):
        return mine
    pairs = np.stack((operands.values[mine], results.values[results.offsets[:-1][node[mine]]]))
    distinct, index = np.unique(pairs, axis=1, return_inverse=True)
    couples: list[list[int]] = distinct.T.tolist()
    reordered: list[bool] = []
    for operand_row, result_row in couples:
        operand, result = graph.types.shape(operand_row), graph.types.shape(result_row)
        is_copy = DYNAMIC not in operand and DYNAMIC not in result and prod(operand) == prod(result)
        ends, other_ends = _row_ends(operand), _row_ends(result)
        reordered.append(is_copy and not (ends <= other_ends or other_ends <= ends))
    return node[mine[np.array(reordered, np.bool_)[index.reshape(-1)]]]


def _row_ends(shape: tuple[int, ...]) -> set[int]:
    """Return the products of the last extent, the last two extents, and so on of a shape, as a set."""
    ends: set[int] = set()
    length = 1
    for extent in reversed(shape):
        length *= extent
        ends.add(length)
    return ends - {1}


def _order(layout: str, rank: int) -> tuple[int, ...]:
    """Return the dimensions of an array from the fastest to the slowest in memory, from an HLO layout without
    tiling; empty for an unknown order.
    """
    text = layout.strip("{}").partition(":")[0]
    usual = tuple(reversed(range(rank)))
    if not text or not text[0].isdecimal():
        return () if text.startswith("strides") else usual
    numbers = text.split(",")
    order = tuple(map(int, numbers)) if all(number.isdecimal() for number in numbers) else usual
    return order if sorted(order) == list(range(rank)) else usual
