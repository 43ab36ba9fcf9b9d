"""Costs of PyTorch's reductions, normalisations, softmax, sorting, scans, pooling and resampling."""

from __future__ import annotations

from math import ceil, log2, nan, prod

from hespas.costs.aten.call import (
    FLOAT32,
    INT64,
    AtenCost,
    Call,
    Strided,
    dense,
    is_integral,
    needs,
    scalar_type,
    simple,
)
from hespas.graph import DType, OpClass, find_dtype

__all__ = [
    "batch_norm",
    "group_norm",
    "layer_norm",
    "normalisation_backward",
    "pool",
    "pool_backward",
    "reduction",
    "rms_norm",
    "scan",
    "softmax",
    "softmax_backward",
    "sort",
    "top_k",
    "upsample",
]

_BOOL = find_dtype("i1")
_NORM_FLOPS, _NORM_BACKWARD_FLOPS = 6.0, 11.0
"""FLOPs per element: mean, deviation, square, sum, shift and scale, without the affine scale and offset."""


def _statistics(dtype: DType | None) -> DType | None:
    """Return the element type in which a norm stores means and deviations: the input type, but at least
    float32.
    """
    return FLOAT32 if dtype is not None and dtype.bits < 32 else dtype


def _reduced(
    shape: tuple[int, ...], dims: tuple[int, ...] | None, keep: bool | None
) -> tuple[int, ...] | None:
    """Return the shape after a reduction over ``dims`` (empty: all dimensions); None if unknown."""
    rank = len(shape)
    if dims is None or any(not -max(rank, 1) <= dim < max(rank, 1) for dim in dims):
        return None
    gone = {dim % rank for dim in dims} if dims and rank else set(range(rank))
    if keep:
        return tuple(1 if dim in gone else extent for dim, extent in enumerate(shape))
    return tuple(extent for dim, extent in enumerate(shape) if dim not in gone)


def _dims(call: Call, position: int, full_from: int) -> tuple[int, ...] | None:
    """Return the dimensions that a reduction removes: empty for all dimensions (no such argument), None if
    unknown.
    """
    if len(call.args) <= full_from:
        return ()
    if not call.has_values:
        return None
    return call.integers(position) if call.arg(position).value.strip("[] ") else ()


@needs(OpClass.REDUCTION, 0)
def reduction(
    call: Call,
    source: Strided,
    *,
    flops: float = 1.0,
    dim: int = 1,
    keep: int = 2,
    dtype: int = -1,
    full_from: int = 2,
    result: str = "same",
    transcendentals: float = 0.0,
    results: int = 1,
    finish: float = 0.0,
) -> AtenCost | None:
    """Return the cost of a reduction. It takes ``flops`` per step, of which there are as many as elements
    minus results. Each result takes ``finish`` FLOPs more (such as a division) and ``transcendentals``.

    A call with at most ``full_from`` arguments reduces all dimensions. ``result`` is the result type:
    ``same``, ``sum`` (whole numbers become 64 bits wide), ``index`` or ``bool``. ``dim``, ``keep`` and
    ``dtype`` are positions of arguments: the reduced dimensions, the flag to keep them, and an explicit
    result type (-1: none).
    """
    shape = _reduced(source.shape, _dims(call, dim, full_from), call.flag(keep))
    out = call.last_output(max(full_from, 1))
    if shape is None and out is not None and out.elements:
        shape = out.shape
    if shape is None:
        return None
    explicit = out.dtype if out is not None else scalar_type(call.integer(dtype)) if dtype >= 0 else None
    output = dense(explicit or _result(result, source.dtype), shape)
    extra = [dense(INT64, shape)] * (results - 1)
    steps = max(float(source.elements - output.elements), 0.0)
    return simple(
        [source],
        [output, *extra],
        flops=flops * steps + finish * output.elements,
        transcendentals=transcendentals * output.elements,
    )


def _result(kind: str, dtype: DType | None) -> DType | None:
    if kind == "index":
        return INT64
    if kind == "bool":
        return _BOOL
    return INT64 if kind == "sum" and is_integral(dtype) else dtype


@needs(OpClass.NORMALIZATION, 0)
def layer_norm(call: Call, source: Strided) -> AtenCost | None:
    """Return the cost of ``native_layer_norm`` (input, normalised shape, weight, bias), which also writes a
    mean and a deviation per row.
    """
    weight = call.tensor(2)
    inner = call.integers(1) or (None if weight is None else weight.shape)
    if inner is None or source.shape[-len(inner) :] != inner:
        return None
    outer = source.shape[: -len(inner)]
    return _normalised(source, call.present(2, 3), (*outer, *(1,) * len(inner)))


def _normalised(source: Strided, affine: list[Strided], rows: tuple[int, ...]) -> AtenCost:
    """Return the cost of a norm that writes a mean and a deviation for each of ``rows``."""
    statistic = dense(_statistics(source.dtype), rows)
    return simple(
        [source, *affine],
        [source.dense, statistic, statistic],
        op_class=OpClass.NORMALIZATION,
        flops=(_NORM_FLOPS + len(affine)) * source.elements,
        transcendentals=float(prod(rows)),
    )


@needs(OpClass.NORMALIZATION)
def rms_norm(
    call: Call,
    *,
    weight_at: int,
    source_at: int = 0,
    residual_at: int = -1,
    residual_out_at: int = -1,
    out_at: int = -1,
) -> AtenCost | None:
    """Return the cost of x / sqrt(mean(x^2)) * weight: four FLOPs per element. If there is a residual, it is
    added to x and the sum is written.

    Tensors that the caller allocated (``out_at``, ``residual_out_at``) are not read.
    """
    source, residual = call.tensor(source_at), call.tensor(residual_at)
    if source is None or not source.shape:
        return None
    out, residual_out = call.tensor(out_at), call.tensor(residual_out_at)
    inputs = call.present(source_at, residual_at, weight_at)
    results = [dense((out or source).dtype, source.shape)]
    if residual is not None:
        results.append(dense((residual_out or residual).dtype, source.shape))
    flops = (2.0 + len(inputs)) * source.elements
    return simple(inputs, results, flops=flops, transcendentals=float(prod(source.shape[:-1])))


@needs(OpClass.NORMALIZATION, 0)
def group_norm(call: Call, source: Strided) -> AtenCost | None:
    """Return the cost of ``native_group_norm`` (input, weight, bias, N, C, HxW, groups, eps)."""
    batch, groups = call.integer(3), call.integer(6)
    if batch is None or groups is None or min(batch, groups) < 1:
        return None
    return _normalised(source, call.present(1, 2), (batch, groups))


@needs(OpClass.NORMALIZATION, 0)
def batch_norm(call: Call, source: Strided) -> AtenCost | None:
    """Return the cost of a batch norm (input, weight, bias, running mean, running variance, training).

    It takes eight FLOPs per element in training and four in inference, as in the cost table of StableHLO.
    """
    training = call.flag(5)
    if len(source.shape) < 2 or training is None:
        return None
    features = source.shape[1]
    statistic = dense(_statistics(source.dtype), (features,))
    return simple(
        call.present(*range(5)),
        [source.dense, statistic, statistic] if training else [source.dense],
        flops=(8.0 if training else 4.0) * source.elements,
        transcendentals=float(features),
    )


@needs(OpClass.NORMALIZATION)
def normalisation_backward(
    call: Call, *, read_at: tuple[int, ...], weight_at: int, source_at: int = 1, mask: bool = True
) -> AtenCost | None:
    """Return the cost of the gradients of input, weight and bias of a norm.

    With ``mask``, the last argument selects the gradients. If the trace does not record values, all gradients
    count.
    """
    source, weight = call.tensor(source_at), call.tensor(weight_at)
    if source is None:
        return None
    wanted = call.flags(len(call.args) - 1) if mask and call.has_values else None
    wanted = wanted if wanted is not None and len(wanted) == 3 else (True, True, True)
    results = [source.dense] if wanted[0] else []
    if weight is not None:
        results += [weight.dense] * (wanted[1] + wanted[2])
    return simple(call.present(*read_at), results, flops=_NORM_BACKWARD_FLOPS * source.elements)


@needs(OpClass.NORMALIZATION, 0)
def softmax(call: Call, source: Strided) -> AtenCost:
    """Return the cost of a softmax (input, dim, half to float): four FLOPs (maximum, subtract, sum, divide)
    and one exponential per element.
    """
    dim = call.integer(1)
    widened = call.flag(2) is True and "backward" not in call.name
    result = dense(FLOAT32 if widened else source.dtype, source.shape)
    rank = len(source.shape)
    extent = source.shape[dim] if dim is not None and -rank <= dim < rank else 0
    rows = source.elements / extent if extent else nan if source.elements else 0.0
    is_log = "log" in call.name
    return simple(
        [source],
        [result],
        flops=4.0 * source.elements - 2.0 * rows,
        transcendentals=source.elements + (rows if is_log else 0.0),
    )


@needs(OpClass.NORMALIZATION, 0, 1)
def softmax_backward(call: Call, grad: Strided, output: Strided) -> AtenCost:
    """Return the cost of the gradient of a softmax (gradient, output, ...): two multiplications, a sum and a
    difference per element.
    """
    is_log = "log" in call.name
    return simple(
        [grad, output],
        [output.dense],
        flops=(3.0 if is_log else 4.0) * output.elements,
        transcendentals=float(output.elements) if is_log else 0.0,
    )


@needs(OpClass.REDUCTION, 0)
def scan(call: Call, source: Strided) -> AtenCost:
    """Return the cost of ``cumsum`` and ``cumprod``: one FLOP per element."""
    out = call.last_output(1)
    explicit = out.dtype if out is not None else scalar_type(call.integer(2))
    result = dense(explicit or _result("sum", source.dtype), source.shape)
    return simple([source], [result], flops=float(source.elements))


@needs(OpClass.SORT, 0)
def sort(call: Call, source: Strided) -> AtenCost | None:
    """Return the cost of a sort (input, dim): n log2(extent) comparisons. Values and 64-bit indices are
    written.
    """
    dim = call.integer(1)
    if dim is None or not -len(source.shape) <= dim < len(source.shape):
        return None
    steps = ceil(log2(source.shape[dim])) if source.shape[dim] > 1 else 0
    results = [source.dense, dense(INT64, source.shape)]
    return simple([source], results, flops=float(source.elements * steps))


@needs(OpClass.SORT, 0)
def top_k(call: Call, source: Strided) -> AtenCost | None:
    """Return the cost of ``topk`` (input, k, dim): 1 + log2(k) comparisons per element."""
    k = call.integer(1)
    if k is None or not source.shape or not 0 <= k <= max(source.shape):
        return None
    dim = call.integer(2)
    position = -1 if dim is None else dim
    if not -len(source.shape) <= position < len(source.shape):
        return None
    shape = list(source.shape)
    shape[position] = k
    steps = 1 + (ceil(log2(k)) if k > 1 else 0)
    results = [dense(source.dtype, shape), dense(INT64, shape)]
    return simple([source], results, flops=float(source.elements * steps))


def _pooled(call: Call, source: Strided, rank: int, ceil_at: int, dilation_at: int) -> tuple[int, ...] | None:
    size, stride, padding = call.integers(1), call.integers(2), call.integers(3)
    dilation = call.integers(dilation_at) if dilation_at >= 0 else (1,)
    if size is None or padding is None or dilation is None or len(source.shape) < rank:
        return None
    stride = stride or size
    parts = [part * rank if len(part) == 1 else part for part in (size, stride, padding, dilation)]
    if any(len(part) != rank for part in parts) or min(*parts[0], *parts[1], *parts[3]) < 1:
        return None
    up = call.flag(ceil_at) is True
    extents: list[int] = []
    for position, extent in enumerate(source.shape[-rank:]):
        kernel, step, pad, spread = (part[position] for part in parts)
        room = extent + 2 * pad - spread * (kernel - 1) - 1
        count = (-(-room // step) if up else room // step) + 1
        if up and (count - 1) * step >= extent + pad:
            count -= 1
        extents.append(count)
    return None if min(extents) < 0 else (*source.shape[:-rank], *extents)


@needs(OpClass.WINDOW, 0)
def pool(
    call: Call,
    source: Strided,
    *,
    rank: int,
    ceil_at: int = -1,
    dilation_at: int = -1,
    indices: bool = False,
    adaptive: bool = False,
) -> AtenCost | None:
    """Return the cost of pooling over windows of the last ``rank`` dimensions: one FLOP per element of each
    window.
    """
    if len(source.shape) < rank:
        return None
    if adaptive:
        size = call.integers(1)
        shape = None if size is None or len(size) != rank or min(size) < 0 else (*source.shape[:-rank], *size)
        taps = source.elements / prod(shape) if shape and prod(shape) else nan
    else:
        shape = _pooled(call, source, rank, ceil_at, dilation_at)
        window = call.integers(1) or ()
        taps = float(prod(window * rank if len(window) == 1 else window))
    if shape is None:
        return None
    result = dense(source.dtype, shape)
    results = [result, dense(INT64, shape)] if indices else [result]
    return simple([source], results, flops=taps * result.elements)


@needs(OpClass.WINDOW, 0, 1)
def pool_backward(
    call: Call, grad: Strided, source: Strided, *, rank: int, adaptive: bool = False
) -> AtenCost:
    """Return the cost of the gradient of a pooling over the last ``rank`` dimensions (gradient, input,
    window, ..., indices of maxima).

    Each element of the gradient is added at the position of its maximum or, in a pooling without maxima, at
    all positions of its window. The FLOPs are unknown if the trace does not state a window of positive
    extents.
    """
    maxima = call.last_output(2)
    if maxima is not None:
        return simple([grad, maxima], [source.dense], flops=float(grad.elements))
    window = call.integers(2) or (0,)
    taps = float(prod(window * rank if len(window) == 1 else window)) if min(window) > 0 else nan
    added = grad.elements * taps
    return simple([grad], [source.dense], flops=float(source.elements) if adaptive else added)


@needs(OpClass.WINDOW, 0)
def upsample(call: Call, source: Strided, *, rank: int, flops: float) -> AtenCost | None:
    """Return the cost of an upsampling (input, output size, ...): ``flops`` per result element. With 0 FLOPs
    (nearest neighbour), at most as many bytes are read as are written.
    """
    size = call.integers(1)
    if size is None or len(size) != rank or len(source.shape) != rank + 2 or min(size) < 0:
        return None
    result = dense(source.dtype, (*source.shape[:2], *size))
    read = min(source.bytes, result.bytes) if flops == 0 else source.bytes
    return simple([source], [result], flops=flops * result.elements, read=read)
