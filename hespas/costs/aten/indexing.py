"""Costs of PyTorch operations that pick, place or make elements, and of losses and dropout."""

from __future__ import annotations

from hespas.costs.aten.args import Call, Strided
from hespas.costs.aten.cost import AtenCost, AtenRule, dense, simple, unknown
from hespas.graph import OpClass, find_dtype

__all__ = [
    "dropout",
    "embedding",
    "embedding_bag",
    "embedding_gradient",
    "gather",
    "index",
    "index_put",
    "index_select",
    "masked_select",
    "nll_loss",
    "nll_loss_backward",
    "one_hot_pick",
    "place_along",
    "repeat",
    "scatter",
    "slice_backward",
]

_BOOL = find_dtype("i1")


def _picked(source: Strided, indices: Strided, shape: tuple[int, ...]) -> AtenCost:
    """Indices and what is picked (at most the source) are read, the result is written."""
    result = dense(source.dtype, shape)
    read = indices.bytes + min(result.bytes, source.bytes)
    return simple(OpClass.GATHER, [source, indices], [result], read=read)


def _dim(call: Call, place: int, rank: int) -> int | None:
    dim = call.integer(place)
    return dim % rank if dim is not None and rank and -rank <= dim < rank else None


def index_select(call: Call) -> AtenCost:
    """(source, dim, indices). Where the trace does not say which dimension, a vector's is known."""
    source, indices = call.tensor(0), call.tensor(2)
    if source is None or indices is None:
        return unknown(call, OpClass.GATHER)
    dim = 0 if len(source.shape) == 1 else _dim(call, 1, len(source.shape))
    if dim is None:
        return unknown(call, OpClass.GATHER)
    return _picked(source, indices, (*source.shape[:dim], indices.elements, *source.shape[dim + 1 :]))


def gather(call: Call) -> AtenCost:
    """(source, dim, indices, sparse gradient, out): as many as there are indices."""
    source, indices = call.tensor(0), call.tensor(2)
    if source is None or indices is None:
        return unknown(call, OpClass.GATHER)
    return _picked(source, indices, indices.shape)


def one_hot_pick(call: Call) -> AtenCost:
    """``take``: (source, indices)."""
    source, indices = call.tensor(0), call.tensor(1)
    return (
        unknown(call, OpClass.GATHER)
        if source is None or indices is None
        else _picked(source, indices, indices.shape)
    )


def embedding(call: Call) -> AtenCost:
    """(weight, indices): a row for each index."""
    weight, indices = call.tensor(0), call.tensor(1)
    if weight is None or indices is None or len(weight.shape) != 2:
        return unknown(call, OpClass.GATHER)
    return _picked(weight, indices, (*indices.shape, weight.shape[1]))


def index(call: Call) -> AtenCost:
    """``index``: advanced indices are a list, which traces seldom spell out; unknown without."""
    source, lists = call.tensor(0), call.listed(1)
    if source is None or not lists or len(lists) > len(source.shape):
        return unknown(call, OpClass.GATHER)
    if any(each.dtype == _BOOL for each in lists):
        return unknown(call, OpClass.GATHER)
    longest = max(lists, key=lambda each: each.elements)
    shape = (*longest.shape, *source.shape[len(lists) :])
    result = dense(source.dtype, shape)
    indices = 8.0 * sum(each.stored for each in lists)
    return simple(OpClass.GATHER, [source], [result], read=indices + min(result.bytes, source.bytes))


def index_put(call: Call) -> AtenCost:
    """``index_put_``: values read and written, read first where they add up; indices as in ``index``."""
    target, lists, values = call.tensor(0), call.listed(1), call.tensor(2)
    if target is None or not lists or values is None or len(lists) > len(target.shape):
        return unknown(call, OpClass.SCATTER)
    longest = max(lists, key=lambda each: each.elements)
    touched = dense(target.dtype, (*longest.shape, *target.shape[len(lists) :]))
    adds = call.flag(3) is True
    read = 8.0 * sum(each.stored for each in lists) + values.bytes + (touched.bytes if adds else 0.0)
    return simple(
        OpClass.SCATTER,
        [target, values],
        [dense(target.dtype, target.shape)],
        flops=float(touched.elements) if adds else 0.0,
        read=read,
        written=touched.bytes,
    )


def scatter(*, adds: bool, copies: bool = False) -> AtenRule:
    """(target, dim, indices, source or value): touched elements written, read first where they are added to.

    ``copies``: not in place, so the whole target is copied besides.
    """

    def rule(call: Call) -> AtenCost:
        target, indices, source = call.tensor(0), call.tensor(2), call.tensor(3)
        if target is None or indices is None:
            return unknown(call, OpClass.SCATTER)
        touched = float(indices.elements) * target.width
        read = (
            indices.bytes
            + (touched if source is not None and source.shape else 0.0)
            + (touched if adds else 0.0)
        )
        copied = target.bytes if copies else 0.0
        return simple(
            OpClass.SCATTER,
            [each for each in (target, indices, source) if each is not None],
            [dense(target.dtype, target.shape)],
            flops=float(indices.elements) if adds else 0.0,
            read=read + copied,
            written=touched + copied,
        )

    return rule


def place_along(*, adds: bool) -> AtenRule:
    """``index_add_``, ``index_copy_``: (target, dim, indices, source): slices of the target."""

    def rule(call: Call) -> AtenCost:
        target, indices, source = call.tensor(0), call.tensor(2), call.tensor(3)
        if target is None or indices is None or source is None:
            return unknown(call, OpClass.SCATTER)
        touched = float(source.elements) * target.width
        return simple(
            OpClass.SCATTER,
            [target, indices, source],
            [dense(target.dtype, target.shape)],
            flops=float(source.elements) if adds else 0.0,
            read=indices.bytes + source.bytes + (touched if adds else 0.0),
            written=touched,
        )

    return rule


def embedding_gradient(call: Call) -> AtenCost:
    """``embedding_dense_backward`` (gradient, indices, rows): a table, zero but where indices point."""
    grad, indices, rows = call.tensor(0), call.tensor(1), call.integer(2)
    if grad is None or indices is None or rows is None or not grad.shape or rows < 0:
        return unknown(call, OpClass.SCATTER)
    table = dense(grad.dtype, (rows, grad.shape[-1]))
    return simple(OpClass.SCATTER, [grad, indices], [table], flops=float(grad.elements))


def embedding_bag(call: Call) -> AtenCost:
    """(weight, indices, offsets, ...): rows picked and summed by bag."""
    weight, indices, offsets = call.tensor(0), call.tensor(1), call.tensor(2)
    if weight is None or indices is None or offsets is None or len(weight.shape) != 2 or not offsets.shape:
        return unknown(call, OpClass.GATHER)
    head = weight.shape[1]
    bags = offsets.shape[0]
    picked = float(indices.elements * head)
    return simple(
        OpClass.GATHER,
        [weight, indices, offsets],
        [dense(weight.dtype, (bags, head))],
        flops=max(picked - bags * head, 0.0),
        read=min(picked * weight.width, weight.bytes) + indices.bytes + offsets.bytes,
    )


def masked_select(call: Call) -> AtenCost:
    """How many elements a mask keeps is not in the trace."""
    return unknown(call, OpClass.GATHER)


def nll_loss(call: Call) -> AtenCost:
    """(log-probabilities, targets, weight, reduction): one of each row is read; reduction 0 keeps rows."""
    source, target, reduction = call.tensor(0), call.tensor(1), call.integer(3)
    if source is None or target is None or reduction is None:
        return unknown(call, OpClass.REDUCTION)
    rows = target.elements
    shape = target.shape if reduction == 0 else ()
    return simple(
        OpClass.REDUCTION,
        [source, target],
        [dense(source.dtype, shape), dense(source.dtype, ())],
        flops=float(rows),
        read=target.bytes + rows * source.width,
    )


def nll_loss_backward(call: Call) -> AtenCost:
    """(gradient, log-probabilities, targets, ...): the input's shape, zero but for the targets."""
    grad, source, target = call.tensor(0), call.tensor(1), call.tensor(2)
    if grad is None or source is None or target is None:
        return unknown(call, OpClass.SCATTER)
    return simple(
        OpClass.SCATTER, [grad, target], [dense(source.dtype, source.shape)], flops=float(target.elements)
    )


def dropout(call: Call) -> AtenCost:
    """``native_dropout``: the kept elements scaled, and the mask, one byte each."""
    source = call.tensor(0)
    if source is None:
        return unknown(call, OpClass.ELEMENTWISE)
    results = [dense(source.dtype, source.shape), dense(_BOOL, source.shape)]
    return simple(OpClass.ELEMENTWISE, [source], results, flops=2.0 * source.elements)


def repeat(call: Call) -> AtenCost:
    """``repeat``: the source read, the tiled result written; ``copy_`` inside it usually costs it."""
    source, times = call.tensor(0), call.integers(1)
    if source is None or times is None or len(times) < len(source.shape) or min(times, default=0) < 0:
        return unknown(call, OpClass.MOVE)
    shape = (1,) * (len(times) - len(source.shape)) + source.shape
    result = dense(source.dtype, [n * count for n, count in zip(shape, times, strict=True)])
    return simple(OpClass.MOVE, [source], [result])


def slice_backward(call: Call) -> AtenCost:
    """(gradient, input sizes, ...): zeros of the input's size with the gradient in them."""
    grad, sizes = call.tensor(0), call.integers(1)
    if grad is None or sizes is None or min(sizes, default=0) < 0:
        return unknown(call, OpClass.UPDATE)
    return simple(OpClass.UPDATE, [grad], [dense(grad.dtype, sizes)])
