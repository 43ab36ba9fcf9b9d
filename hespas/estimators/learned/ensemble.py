"""Ensemble of decision trees: its input columns for an operation on a device, and the sum of its leaves.

Columns are logarithms of sizes, of data-sheet times and of their ratios. They are finite where the sizes, the
peak and the bandwidth are known. Otherwise the whole row is NaN, and the operation has no prediction. Sizes
are in octaves (log2), so that a split is a ratio. The stored models depend on the columns of a kind: a change
is a new version of the format.

Trees are evaluated as flat columns, without the library that fitted them ("QuickScorer", Lucchese et al.,
SIGIR 2015). The leaves of a tree are numbered left to right. Each inner node has a column, a split, and the
leaves below its left branch, which are excluded where an operation goes right. The result is the lowest leaf
that no node excludes. For each tree and column, a table by the interval of the column's value has the leaves
that all nodes on that column allow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.rates import peak_times
from hespas.graph.columns import FloatArray
from hespas.graph.errors import InvariantError
from hespas.hardware import Device
from hespas.operations import Operations, element_bytes

__all__ = ["FAMILIES", "MOST_LEAVES", "Features", "Forest", "features_of"]

_TILES = ((128, 128), (64, 64), (128, 256), (256, 128), (16, 128))
"""Output tiles of the libraries' kernels, rows x columns."""

_KERNELS = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.9),
    (64, 128, 0.8),
    (64, 64, 0.6),
    (64, 32, 0.4),
    (16, 64, 0.25),
)
"""Tiles with the share of the peak that a kernel of that tile can reach: small ones reuse less data."""
_SPLITS = (1, 2, 4, 8)
_SPLIT_SHARE = 0.85
_STEP = 32

_MOST_ALIGNED = 8


def _log2(values: FloatArray) -> FloatArray:
    return np.log2(np.maximum(values, 1e-9))


def _alignment(values: FloatArray) -> FloatArray:
    """Return log2 of the largest power of two that divides a size, at most 8. It affects the time of kernels,
    which read 16 bytes at once and use tiles of 64 or 128.
    """
    whole = np.nan_to_num(values).astype(np.int64)
    lowest = whole & -whole
    exponent = np.log2(np.maximum(lowest, 1).astype(np.float64))
    return np.where(np.isnan(values), np.nan, np.minimum(exponent, _MOST_ALIGNED))


def _rounding(exact: FloatArray) -> FloatArray:
    """Return how much time is lost by rounding ``exact`` up to a whole number, as log2 of the ratio."""
    return np.log2(np.ceil(np.maximum(exact, 1e-9)) / np.maximum(exact, 1e-9))


def _cache_bytes(device: Device) -> float:
    """Return the bytes of a device's largest cache; 1 MiB if the device states none."""
    sizes = (memory.capacity_bytes for memory in device.memories if memory.level == "cache")
    return float(max(1 << 20, max(sizes, default=0)))


def _product_sizes(ops: Operations, device: Device) -> dict[str, FloatArray]:
    """Return the input columns of matmuls: sizes, alignment, and for each tile size the number of waves and
    the loss by rounding it up.
    """
    batch, m, n, k = (ops.dim(name) for name in ("batch", "m", "n", "k"))
    cache = _cache_bytes(device)
    columns = {
        "m": _log2(m),
        "n": _log2(n),
        "k": _log2(k),
        "batch": _log2(batch),
        "smallest": _log2(np.minimum(np.minimum(m, n), k)),
        "m_over_n": _log2(m / n),
        "inputs": _log2(m * k),
        "weights": _log2(n * k),
        "rounding_m": _rounding(m / 8),
        "rounding_n": _rounding(n / 128),
        "rounding_k": _rounding(k / 128),
        "outputs": _log2(batch * m * n),
        "n_over_k": _log2(n / k),
        "align_m": _alignment(m),
        "align_n": _alignment(n),
        "align_k": _alignment(k),
        "weights_over_cache": _log2(batch * n * k * element_bytes(ops.scheme, "weight") / cache),
        "inputs_over_cache": _log2(batch * m * k * element_bytes(ops.scheme, "activation") / cache),
        "outputs_over_cache": _log2(batch * m * n * element_bytes(ops.scheme, "output") / cache),
    }
    for rows, cols in _TILES:
        tiles = batch * np.ceil(m / rows) * np.ceil(n / cols)
        waves = tiles / device.units
        name = f"{rows}x{cols}"
        columns[f"waves_{name}"] = _log2(waves)
        columns[f"loss_{name}"] = _rounding(waves)

    columns["images"] = _log2(m / ops.dim("spatial", 1.0) ** 2)
    columns["kernel"] = ops.dim("kernel", 1.0)
    columns["spatial"] = _log2(ops.dim("spatial", 1.0))
    return columns


def _attention_sizes(ops: Operations, device: Device) -> dict[str, FloatArray]:
    """Return the input columns of attention over many queries: sizes, alignment, attended pairs, and heads
    and query blocks per unit of the device.
    """
    batch, length, heads, size = (ops.dim(name) for name in ("batch", "q_len", "heads", "head_dim"))
    kv_heads = ops.dim("kv_heads", heads)
    pairs = ops.dim("pairs", length * length)
    kv_len = ops.dim("kv_len", length)
    cache = _cache_bytes(device)
    columns = {
        "batch": _log2(batch),
        "length": _log2(length),
        "heads": _log2(heads),
        "kv_heads": _log2(kv_heads),
        "head_dim": size,
        "group": _log2(heads / kv_heads),
        "pairs": _log2(pairs),
        "window": _log2(pairs / length),
        "share": _log2(pairs / (length * kv_len)),
        "sequences": _log2(batch * heads),
        "queries": _log2(batch * heads * length),
        "tokens": _log2(batch * length),
        "kv_over_cache": _log2(batch * kv_len * kv_heads * size * 2 / cache),
        "align_length": _alignment(length),
        "align_heads": _alignment(heads),
    }
    for block in (64, 128, 256):
        waves = batch * heads * np.ceil(length / block) / device.units
        columns[f"waves_{block}"] = _log2(waves)
        columns[f"loss_{block}"] = _rounding(waves)
        columns[f"blocks_{block}"] = _log2(np.ceil(waves) * np.ceil(pairs / length / block))
    return columns


def _generation_sizes(ops: Operations, device: Device) -> dict[str, FloatArray]:
    """Return the input columns of attention of one new token: cached keys, query heads that share them, and
    waves over the units of the device.
    """
    batch, kv_len, heads, size = (ops.dim(name) for name in ("batch", "kv_len", "heads", "head_dim"))
    kv_heads = ops.dim("kv_heads", heads)
    group = heads / kv_heads
    cache = _cache_bytes(device)
    waves = batch * kv_heads / device.units
    columns = {
        "batch": _log2(batch),
        "kv_len": _log2(kv_len),
        "heads": _log2(heads),
        "kv_heads": _log2(kv_heads),
        "head_dim": size,
        "group": _log2(group),
        "sequences": _log2(batch * kv_heads),
        "queries": _log2(batch * heads),
        "cached": _log2(batch * kv_heads * kv_len),
        "per_unit": _log2(batch * kv_heads * kv_len / device.units),
        "kv_over_cache": _log2(batch * kv_len * kv_heads * size * 2 / cache),
        "align_heads": _alignment(heads),
        "align_batch": _alignment(batch),
        "group_rounding": _rounding(group / 8),
        "waves": _log2(waves),
        "loss": _rounding(waves),
        "waves_heads": _log2(batch * heads / device.units),
        "loss_heads": _rounding(batch * heads / device.units),
    }
    for block in (64, 256):
        blocks = np.ceil(kv_len / block)
        columns[f"waves_{block}"] = _log2(waves * blocks)
        columns[f"loss_{block}"] = _rounding(waves * blocks)
    return columns


def _expert_sizes(ops: Operations, device: Device) -> dict[str, FloatArray]:
    """Return the input columns of mixture-of-experts layers: tokens per expert, experts that get tokens, and
    tiles per unit of the device.
    """
    tokens, hidden, inter, topk = (ops.dim(name) for name in ("tokens", "hidden", "inter", "topk"))
    experts, tensor, parallel = (ops.dim(name) for name in ("experts", "tensor_parallel", "expert_parallel"))
    local, width = experts / parallel, inter / tensor
    per_expert = tokens * topk / experts
    hit = local * -np.expm1(tokens * topk * np.log1p(-1 / np.maximum(experts, 2)))
    columns = {
        "tokens": _log2(tokens),
        "hidden": _log2(hidden),
        "width": _log2(width),
        "inter": _log2(inter),
        "topk": _log2(topk),
        "experts": _log2(experts),
        "local_experts": _log2(local),
        "tensor_parallel": _log2(tensor),
        "expert_parallel": _log2(parallel),
        "matrices": ops.dim("matrices"),
        "tokens_per_expert": _log2(per_expert),
        "pairs": _log2(tokens * topk / parallel),
        "hit": _log2(hit),
        "weights_over_cache": _log2(hit * hidden * width * 2 / _cache_bytes(device)),
        "align_width": _alignment(width),
        "expansion": _log2(hidden / width),
    }
    for rows in (16, 64, 128):
        waves = (
            hit * np.ceil(np.maximum(per_expert * local / np.maximum(hit, 1e-9), 1e-3) / rows) * width / 128
        )
        waves = waves / device.units
        columns[f"waves_{rows}"] = _log2(waves)
        columns[f"loss_{rows}"] = _rounding(waves)
    return columns


def _stream_sizes(ops: Operations, device: Device) -> dict[str, FloatArray]:
    """Return the input columns of operations over rows and columns: elements per unit of the device,
    alignment, and the ratio of sizes to the cache.
    """
    rows, columns = ops.dim("rows"), ops.dim("columns")
    elements = rows * columns
    waves = elements / 1024 / device.units
    return {
        "rows": _log2(rows),
        "columns": _log2(columns),
        "elements": _log2(elements),
        "passes": ops.bytes_moved / elements,
        "align_columns": _alignment(columns),
        "align_elements": _alignment(elements),
        "waves": _log2(waves),
        "loss": _rounding(waves),
        "row_waves": _log2(rows / device.units),
        "row_loss": _rounding(rows / device.units),
        "column_rounding": _rounding(columns / 128),
        "row_rounding": _rounding(rows / 8),
    }


FAMILIES: Mapping[str, str] = {
    "matmul": "product",
    "convolution": "product",
    "attention.context": "attention",
    "attention.encoder": "attention",
    "attention.generation": "generation",
    "moe": "experts",
    "vector": "stream",
    "normalization": "stream",
    "pooling": "stream",
    "quantize": "stream",
    "gather": "stream",
}
"""Kind -> its family of columns. Kinds that are absent have no model."""

_SIZES: Mapping[str, Callable[[Operations, Device], dict[str, FloatArray]]] = {
    "product": _product_sizes,
    "attention": _attention_sizes,
    "generation": _generation_sizes,
    "experts": _expert_sizes,
    "stream": _stream_sizes,
}

_REACHED = 0.75
"""Share of the peaks that a good kernel reaches: scales the base of products, which trees then correct."""


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """Inputs of the trees of a learned model. ``columns`` has shape ``(ops, len(names))``. The trees predict
    the ratio of the time to ``base_ns``, which has shape ``(ops,)``.
    """

    names: tuple[str, ...]
    columns: NDArray[np.float32]
    base_ns: FloatArray


def features_of(family: str, ops: Operations, device: Device, *, overhead_ns: float) -> Features:
    """Return the input columns of operations of one family (such as ``product``, matmuls). ``overhead_ns`` is
    a constant part of the base time. O(ops).
    """
    cache, count = _cache_bytes(device), len(ops)
    bandwidth = device.main_memory.bandwidth_bytes_per_s
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # such operations get no prediction
        peaks = peak_times(ops, device)
        arithmetic = np.maximum(peaks.arithmetic_ns, 1e-3)
        memory = np.maximum(peaks.memory_ns, 1e-3)
        base = overhead_ns + np.hypot(arithmetic, memory)
        columns = {"arithmetic": np.log2(arithmetic), "memory": np.log2(memory)}
        columns["balance"] = columns["arithmetic"] - columns["memory"]
        if family == "product":
            # The fastest of some kernels, padding to whole tiles and waves included [FLOPs at peak].
            batch, m, n, k = (ops.dim(name) for name in ("batch", "m", "n", "k"))
            best = np.full(count, np.inf)
            for rows, cols, share in _KERNELS:
                tiles = batch * np.ceil(m / rows) * np.ceil(n / cols)
                for split in _SPLITS:
                    depth = np.ceil(k / split / _STEP) * _STEP
                    waves = np.ceil(tiles * split / device.units)
                    reached = share * (1.0 if split == 1 else _SPLIT_SHARE)
                    best = np.fmin(best, waves * device.units * 2 * rows * cols * depth / reached)
            tiled = best / (ops.flops / arithmetic)
            moved = memory * (1 - 0.5 * np.minimum(1.0, cache / ops.bytes_moved))
            base = overhead_ns + np.hypot(tiled, moved) / _REACHED
            columns["tiled_balance"] = np.log2(tiled / moved)
        columns["base"] = np.log2(base)
        columns |= _SIZES[family](ops, device)
        rate = np.maximum(ops.flops, 1.0) / arithmetic * 1e9
        columns |= {
            "peak": np.log2(rate),
            "peak_per_unit": np.log2(rate / device.units),
            "ridge": np.log2(rate / bandwidth),
            "bandwidth": np.full(count, np.log2(bandwidth)),
            "units": np.full(count, np.log2(device.units)),
            "cache": np.full(count, np.log2(cache)),
            "bytes_over_cache": np.log2(np.maximum(ops.bytes_moved, 1.0) / cache),
            "weight_bits": 8 * element_bytes(ops.scheme, "weight"),
        }
        table = np.stack([column.astype(np.float32) for column in columns.values()], axis=1)
    complete = np.isfinite(table).all(axis=1) & np.isfinite(base)
    table[~complete] = np.nan
    return Features(tuple(columns), table, np.where(complete, base, np.nan))


MOST_LEAVES = 64
"""Limit of leaves of one tree: bits of a word."""

_ROWS_AT_ONCE = 4096
_TREES_AT_ONCE = 128
_CODES = 257
_FEW_ROWS = 64
"""Up to this, comparing all splits costs less than the tables of allowed leaves."""
_PRIME = 67
"""Powers of two below 2^64 differ modulo 67, so that one division gives the position of a single bit."""
_SLOTS = np.array([pow(2, bit, _PRIME) for bit in range(MOST_LEAVES)])
_EVERY_LEAF = np.uint64(np.iinfo(np.uint64).max)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Forest:
    """Ensemble of decision trees. Its prediction is ``baseline`` plus the value of one leaf of each tree.

    ``column``, ``split``, ``first`` and ``last`` describe inner nodes, shape ``(inner nodes,)``. An operation
    whose value in ``column`` is at most ``edges[split]`` goes left, to the leaves ``first`` to ``last - 1``.
    ``node_offsets`` and ``leaf_offsets``, of length trees + 1, delimit the nodes and leaves of each tree.
    ``edge_offsets``, of length columns + 1, delimits the edges of each column. The value of a leaf is
    ``leaf`` times ``scale``.
    """

    column: NDArray[np.uint8]
    split: NDArray[np.uint8]
    first: NDArray[np.uint8]
    last: NDArray[np.uint8]
    node_offsets: NDArray[np.int32]
    leaf: NDArray[np.int16]
    leaf_offsets: NDArray[np.int32]
    edges: NDArray[np.float32]
    edge_offsets: NDArray[np.int32]
    scale: float
    baseline: float

    def __post_init__(self) -> None:
        """Check the arrays of the trees, so that a damaged file raises an error and does not give a wrong
        time.
        """
        nodes = np.diff(self.node_offsets)
        leaves = np.diff(self.leaf_offsets)
        edges = np.diff(self.edge_offsets)
        if not (len(self.node_offsets) and len(self.leaf_offsets) and len(self.edge_offsets)):
            raise InvariantError("Forest: columns are empty")
        whole = (
            self.node_offsets[0] == self.leaf_offsets[0] == self.edge_offsets[0] == 0
            and self.node_offsets[-1] == len(self.column) == len(self.split)
            and len(self.first) == len(self.last) == len(self.column)
            and self.leaf_offsets[-1] == len(self.leaf)
            and self.edge_offsets[-1] == len(self.edges)
        )
        if not whole or len(nodes) != len(leaves) or bool((leaves != nodes + 1).any()):
            raise InvariantError("Forest: columns differ in length")
        if (len(leaves) and int(leaves.max()) > MOST_LEAVES) or bool((edges < 0).any()):
            raise InvariantError(f"Forest: a tree of more than {MOST_LEAVES} leaves")
        if len(self.column) and int(self.column.max()) >= len(edges):
            raise InvariantError("Forest: a node uses a column that does not exist")
        if bool((self.split >= edges[self.column]).any()):
            raise InvariantError("Forest: a node splits at an edge that does not exist")
        most = np.repeat(leaves, nodes)
        if bool(((self.first >= self.last) | (self.last >= most)).any()):
            raise InvariantError("Forest: a node leads to leaves that do not exist")
        same_column = np.repeat(np.arange(len(edges)), edges)
        rising = (np.diff(self.edges) > 0) | (np.diff(same_column) > 0)
        if not bool(np.isfinite(self.edges).all()) or not bool(rising.all()):
            raise InvariantError("Forest: the edges of a column do not rise")

    @property
    def trees(self) -> int:
        """Return the number of trees."""
        return len(self.leaf_offsets) - 1

    def predict(self, table: NDArray[np.float32]) -> FloatArray:
        """Return the prediction for each row of ``table``, of shape (ops, columns) and without NaN. It takes
        about 2 us per row and 300 trees.
        """
        if table.shape[1] != len(self.edge_offsets) - 1:
            raise InvariantError(f"Forest: {table.shape[1]} columns, expected {len(self.edge_offsets) - 1}")
        total = np.full(len(table), self.baseline)
        codes = np.zeros((table.shape[1], len(table)), np.uint8)  # edges of its column that a value is above
        for column in range(table.shape[1]):
            edges = self.edges[self.edge_offsets[column] : self.edge_offsets[column + 1]]
            if len(edges):
                codes[column] = np.searchsorted(edges, np.ascontiguousarray(table[:, column]), side="left")
        if len(table) <= _FEW_ROWS:
            self._add_few(codes, total)
            return total
        for start in range(0, self.trees, _TREES_AT_ONCE):
            allowed = _AllowedLeaves.of(self, start, min(start + _TREES_AT_ONCE, self.trees))
            for row in range(0, len(table), _ROWS_AT_ONCE):
                allowed.add(codes[:, row : row + _ROWS_AT_ONCE], total[row : row + _ROWS_AT_ONCE])
        return total

    def _add_few(self, codes: NDArray[np.uint8], total: FloatArray) -> None:
        """Add the result of each tree to ``total``, for a small number of operations: all trees are evaluated
        at once. Results are added in the same order as for many operations, so that sums are equal.
        """
        goes_right = codes[self.column] > self.split[:, np.newaxis]
        allowed = np.full((len(self.column) + 1, len(total)), _EVERY_LEAF)
        np.copyto(allowed[:-1], ~_below(self.first, self.last)[:, np.newaxis], where=goes_right)
        alive = np.bitwise_and.reduceat(allowed, self.node_offsets[:-1], axis=0)
        alive[self.node_offsets[1:] == self.node_offsets[:-1]] = _EVERY_LEAF  # trees without inner nodes
        bit = np.zeros(_PRIME, np.int64)
        bit[_SLOTS] = np.arange(MOST_LEAVES)
        added = self.leaf[self.leaf_offsets[:-1, np.newaxis] + bit[_slots(alive)]] * self.scale
        # Not `reduce`, which adds a single column pairwise: times must not depend on the number of rows.
        total[:] = np.add.accumulate(np.vstack((total, added)), axis=0)[-1]


def _below(first: NDArray[np.uint8], last: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return a bit mask of the leaves ``first`` to ``last - 1`` of a tree."""
    one = np.uint64(1)
    below: NDArray[np.uint64] = (one << last.astype(np.uint64)) - (one << first.astype(np.uint64))
    return below


@dataclass(frozen=True, slots=True, eq=False)
class _AllowedLeaves:
    """Bit masks for the fast evaluation of some trees of a forest. The masks in ``leaves`` mark the leaves
    that a value of one column allows, shape ``(pairs of tree and column, codes)``. The AND of the masks of
    all columns leaves one leaf per tree.
    """

    leaves: NDArray[np.uint64]
    column: list[int]
    offsets: list[int]
    value: FloatArray

    @classmethod
    def of(cls, forest: Forest, start: int, stop: int) -> _AllowedLeaves:
        """Return the trees ``start`` to ``stop - 1`` of a forest, prepared for evaluation."""
        nodes = slice(int(forest.node_offsets[start]), int(forest.node_offsets[stop]))
        tree = np.repeat(np.arange(stop - start), np.diff(forest.node_offsets[start : stop + 1]))
        key = tree.astype(np.int64) * 256 + forest.column[nodes]
        present = np.zeros((stop - start) * 256, np.bool_)  # marks keys faster than np.unique sorts them
        present[key] = True
        pairs = np.flatnonzero(present)
        pair = (np.cumsum(present) - 1)[key]
        below = _below(forest.first[nodes], forest.last[nodes])
        leaves = np.full((len(pairs), _CODES), _EVERY_LEAF)
        np.bitwise_and.at(leaves, (pair, forest.split[nodes].astype(np.int64) + 1), ~below)
        np.bitwise_and.accumulate(leaves, axis=1, out=leaves)
        value = np.zeros((stop - start, _PRIME))
        bounds: list[int] = forest.leaf_offsets[start : stop + 1].tolist()
        for number, (low, high) in enumerate(pairwise(bounds)):
            value[number, _SLOTS[: high - low]] = forest.leaf[low:high] * forest.scale
        offsets = np.searchsorted(pairs, np.arange(stop - start + 1) * 256)
        return cls(leaves, (pairs % 256).tolist(), offsets.tolist(), value)

    def add(self, codes: NDArray[np.uint8], total: FloatArray) -> None:
        """Add the result of each tree to ``total``. ``codes`` has the interval between edges in which the
        value of each column lies, shape ``(columns, ops)``.
        """
        code = codes.astype(np.intp)
        alive, of_pair = np.empty(len(total), np.uint64), np.empty(len(total), np.uint64)
        for tree, (low, high) in enumerate(pairwise(self.offsets)):
            alive[:] = _EVERY_LEAF
            for pair in range(low, high):
                np.take(self.leaves[pair], code[self.column[pair]], out=of_pair, mode="clip")
                np.bitwise_and(alive, of_pair, out=alive)
            total += self.value[tree].take(_slots(alive))


def _slots(alive: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Return the position in the array of leaf values of the lowest allowed leaf in each bit mask."""
    return ((alive & (~alive + np.uint64(1))) % np.uint64(_PRIME)).astype(np.intp)
