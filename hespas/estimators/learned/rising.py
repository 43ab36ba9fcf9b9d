"""Correction of learned predictions that fall when an operation grows.

Trees are step functions: across a step an operation of twice the size may take less time. Its time is then
raised to the time of the operation with halved sizes, less a few per cent for each halving. Halved operations
that take a fifth longer are ignored: where a library switches to another kernel, some operations were
measured at a third of the time for twice the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np

from hespas.graph.columns import FloatArray, IntArray
from hespas.operations import Operations, element_bytes

__all__ = ["halved", "raised"]

_MOST_HALVINGS = 4
_MAY_FALL = 0.96
"""Least time of an operation, as a share of the time of its half."""
_MOST_RAISED = 1.2
"""Limit of the factor by which times of measured devices are raised."""
_LENGTHS = ("q_len", "kv_len")
_DIMS: Mapping[str, tuple[str, ...]] = {
    "product": ("batch", "m", "n", "k"),
    "attention": ("batch", "heads", "q_len"),
    "generation": ("batch", "heads", "kv_len"),
    "experts": ("tokens",),
    "stream": ("rows", "columns"),
}
"""Sizes that are halved, by family of columns; a prompt has as many keys as queries."""


def halved(family: str, ops: Operations, by: Mapping[str, FloatArray | int]) -> Operations:
    """Return the operations with some sizes divided (by one number, or one per operation). FLOPs and bytes
    are scaled accordingly, including the bytes of operations fused into a matmul.
    """
    dims = dict(ops.dims)
    for name, divisor in by.items():
        dims[name] = ops.dim(name) / divisor
        if name == "q_len" and "kv_len" in dims:
            dims["kv_len"] = ops.dim("kv_len") / divisor
        if name == "q_len" and "pairs" in dims:
            length = dims["q_len"]
            causal = length * (length + 1) / 2
            is_causal = ops.dim("pairs") < ops.dim("q_len") ** 2
            dims["pairs"] = np.where(is_causal, np.minimum(ops.dim("pairs") / divisor, causal), length**2)
    small = replace(ops, dims=dims)
    with np.errstate(invalid="ignore", divide="ignore"):
        work, moved = (part(family, small) / part(family, ops) for part in (_work, _moved))
    return replace(
        small,
        flops=ops.flops * work,
        transcendentals=ops.transcendentals * work,
        bytes_moved=ops.bytes_moved * moved,
    )


def _work(family: str, ops: Operations) -> FloatArray:
    """Return a measure of the arithmetic of each operation. Only ratios between sizes of one operation are
    meaningful.
    """
    if family == "attention":
        return ops.dim("batch") * ops.dim("heads") * ops.dim("pairs", ops.dim("q_len") ** 2)
    work = np.ones(len(ops))
    for name in _DIMS[family]:
        work = work * ops.dim(name)
    return work


def _moved(family: str, ops: Operations) -> FloatArray:
    """Return a measure of the memory traffic of each operation; only ratios between sizes of one operation
    are meaningful.
    """
    if family == "product":
        batch, m, n, k = (ops.dim(name) for name in _DIMS["product"])
        read = m * k * element_bytes(ops.scheme, "activation") + n * k * element_bytes(ops.scheme, "weight")
        return batch * (read + m * n * element_bytes(ops.scheme, "output"))
    heads = ops.dim("heads")
    if family == "attention":
        keys = ops.dim("kv_len", ops.dim("q_len")) * ops.dim("kv_heads", heads)
        return ops.dim("batch") * (ops.dim("q_len") * heads + keys)
    if family == "generation":
        return ops.dim("batch") * (ops.dim("kv_len") * ops.dim("kv_heads", heads) + heads)
    if family == "experts":
        draws = ops.dim("tokens") * ops.dim("topk")
        hit = -np.expm1(draws * np.log1p(-1 / np.maximum(ops.dim("experts"), 2)))
        width = ops.dim("inter") / ops.dim("tensor_parallel")
        weights = hit * ops.dim("experts") * ops.dim("matrices") * ops.dim("hidden") * width
        return weights + 2 * draws * (ops.dim("hidden") + width)
    return _work(family, ops)


def raised(
    family: str,
    ops: Operations,
    times_ns: FloatArray,
    predict: Callable[[Operations, IntArray, FloatArray], FloatArray],
    *,
    measured: bool,
) -> FloatArray:
    """Return times and intervals of operations of one family, shape ``(3, ops)`` [ns]. Times that are clearly
    shorter than the time of the same operation with halved sizes are raised.

    If the device was ``measured``, larger differences are accepted, because a library may switch to a faster
    kernel at a larger size. ``predict`` returns the times of the halved operations, shape ``(rows,)``. It is
    called once with these operations, the rows they come from, and times: below these times it may return
    NaN.
    """
    dims = _DIMS[family]
    rows: list[IntArray] = [np.empty(0, np.int64)]
    divisors: list[IntArray] = [np.empty((0, len(dims)), np.int64)]
    for count in range(1, _MOST_HALVINGS + 1):
        for names in combinations_with_replacement(dims, count):
            by = {name: 2 ** names.count(name) for name in names}
            divides = np.ones(len(ops), np.bool_)
            for name, divisor in by.items():
                for size in _LENGTHS if name == "q_len" and "kv_len" in ops.dims else (name,):
                    with np.errstate(invalid="ignore"):
                        divides &= ops.dim(size) % divisor == 0
            some = np.flatnonzero(divides & ~np.isnan(times_ns[0]))
            rows.append(some)
            divisors.append(np.repeat([[by.get(name, 1) for name in dims]], len(some), axis=0))
    of = np.concatenate(rows)
    if not len(of):
        return times_ns
    by_row = np.concatenate(divisors).astype(np.float64)
    share = _MAY_FALL ** np.log2(by_row).sum(axis=1)
    halves = halved(family, ops.take(of), dict(zip(dims, by_row.T, strict=True)))
    least = times_ns[0].copy()
    wanted = predict(halves, of, times_ns[0][of] / share) * share
    with np.errstate(invalid="ignore"):
        is_jump = wanted > _MOST_RAISED * times_ns[0][of]
        np.fmax.at(least, of, np.where(is_jump & measured, np.nan, wanted))
        raised_ns: FloatArray = times_ns * (least / times_ns[0])
    return raised_ns
