"""Costs of PyTorch's matrix products and convolutions.

Argument orders: https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/native_functions.yaml.
"""

from __future__ import annotations

from dataclasses import replace
from math import isnan, prod
from typing import NamedTuple

from hespas.costs.aten.call import (
    FLOAT32,
    AtenCost,
    Call,
    Strided,
    dense,
    matrix_product,
    needs,
    promoted,
    scalar_type,
    simple,
)
from hespas.costs.contraction import convolution_cost
from hespas.costs.operation import Contraction, ConvAttributes, Cost, Operation, Tensor, WindowDim
from hespas.graph import DType, OpClass

__all__ = [
    "biased_matmul",
    "convolution",
    "convolution_backward",
    "grouped_matmul",
    "linear",
    "matmul",
    "scaled_matmul",
]

_LARGEST_PADDING = 1 << 24
_LONGEST_COUNTED = 1 << 16
"""Maximum of the shorter of window and result, whose positions are counted one by one."""


def _product_cost(
    lhs: Strided,
    rhs: Strided,
    extents: tuple[int, int, int, int],
    shape: tuple[int, ...],
    *,
    bias: Strided | None = None,
    bias_flops: float = 0.0,
    dtype: DType | None = None,
) -> AtenCost:
    """Return the cost of one batched matmul whose result has the shape ``shape``. A bias is an additional
    input.
    """
    out = dtype or promoted([lhs, rhs])
    row = matrix_product(extents, (lhs.dtype, rhs.dtype, out))
    inputs = [lhs, rhs] if bias is None else [bias, lhs, rhs]
    return simple(
        inputs,
        [dense(out, shape)],
        op_class=OpClass.CONTRACTION,
        flops=row.flops + bias_flops,
        rate=lhs.dtype,
        contractions=(row,),
    )


@needs(OpClass.CONTRACTION, 0, 1)
def matmul(call: Call, lhs: Strided, rhs: Strided) -> AtenCost | None:
    """Return the cost of ``mm``, ``mv``, ``dot``, ``bmm`` and ``matmul`` with broadcasting: 2 x batch x M x N
    x K FLOPs.
    """
    return _matmul(lhs, rhs)


@needs(OpClass.CONTRACTION, 0, 1, 2)
def biased_matmul(call: Call, bias: Strided, lhs: Strided, rhs: Strided) -> AtenCost | None:
    """Return the cost of ``addmm``, ``baddbmm`` and ``addmv``: beta x bias + alpha x (lhs x rhs).

    The bias, an alpha other than 1 and a beta other than 1 each add one FLOP per result element. With beta 0
    the bias is not read.
    """
    plain = _matmul(lhs, rhs)
    if plain is None:
        return None
    elements = float(prod(plain.results[0].shape))
    beta, alpha = call.real(3), call.real(4)
    used = beta != 0.0
    per_element = used + (used and beta not in (1.0, None)) + (alpha not in (1.0, None))
    cost = replace(
        plain.cost,
        flops=plain.cost.flops + per_element * elements,
        useful_flops=plain.cost.useful_flops + per_element * elements,
        bytes_read=plain.cost.bytes_read + (bias.bytes if used else 0.0),
    )
    return plain._replace(cost=cost, operands=(bias.plain, *plain.operands))


@needs(OpClass.CONTRACTION, 0, 1)
def scaled_matmul(call: Call, lhs: Strided, rhs: Strided) -> AtenCost | None:
    """Return the cost of ``_scaled_mm``: a matmul of 8-bit operands with scales and a bias. The argument at
    position 6 is the result type.
    """
    bias = call.tensor(4)
    plain = _matmul(lhs, rhs)
    explicit = scalar_type(call.integer(6))
    if plain is None or (explicit is None and not call.has_values):
        return None
    result = dense(explicit or lhs.dtype, plain.results[0].shape)
    extra = [tensor for tensor in call.present(2, 3, 4) if tensor.shape]
    added = 0.0 if bias is None else float(result.elements)
    product = plain.cost.contractions[0]
    extents = (product.batch, product.m, product.n, product.k)
    row = matrix_product(extents, (lhs.dtype, rhs.dtype, FLOAT32))
    return simple([lhs, rhs, *extra], [result], flops=row.flops + added, contractions=(row,))


@needs(OpClass.CONTRACTION, 0, 1)
def grouped_matmul(call: Call, lhs: Strided, rhs: Strided) -> AtenCost | None:
    """Return the cost of ``_grouped_mm``: each group of rows of (tokens, K) is multiplied with its own K x N
    matrix.
    """
    if len(lhs.shape) != 2 or len(rhs.shape) != 3 or lhs.shape[1] != rhs.shape[1]:
        return None
    tokens, k = lhs.shape
    row = matrix_product((1, tokens, rhs.shape[2], k), (lhs.dtype, rhs.dtype, lhs.dtype))
    result = dense(lhs.dtype, (tokens, rhs.shape[2]))
    return simple(call.present(0, 1, 2), [result], flops=row.flops, contractions=(row,))


@needs(OpClass.CONTRACTION, 0, 1)
def linear(call: Call, x: Strided, weight: Strided) -> AtenCost | None:
    """Return the cost of ``linear``: x (..., K) by the transpose of weight (N, K), plus bias (N)."""
    bias = call.tensor(2)
    if not x.shape or len(weight.shape) != 2 or x.shape[-1] != weight.shape[1]:
        return None
    n, k = weight.shape
    rows = prod(x.shape[:-1])
    flops = 0.0 if bias is None else float(rows * n)
    return _product_cost(x, weight, (1, rows, n, k), (*x.shape[:-1], n), bias=bias, bias_flops=flops)


def _matmul(lhs: Strided, rhs: Strided) -> AtenCost | None:
    """Return the cost of ``torch.matmul`` of two tensors."""
    if not lhs.shape or not rhs.shape:
        return None
    left = lhs.shape if len(lhs.shape) > 1 else (1, *lhs.shape)
    right = rhs.shape if len(rhs.shape) > 1 else (*rhs.shape, 1)
    m, k, n = left[-2], left[-1], right[-1]
    batch = _broadcast(left[:-2], right[:-2])
    if right[-2] != k or batch is None:
        return None
    shape = (*batch, *((m,) if len(lhs.shape) > 1 else ()), *((n,) if len(rhs.shape) > 1 else ()))
    if len(right) == 2:  # one matrix for all batches: their rows are concatenated
        return _product_cost(lhs, rhs, (1, prod(batch) * m, n, k), shape)
    return _product_cost(lhs, rhs, (prod(batch), m, n, k), shape)


def _broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    rank = max(len(left), len(right))
    pairs = zip((1,) * (rank - len(left)) + left, (1,) * (rank - len(right)) + right, strict=True)
    answer = tuple(b if a == 1 else a if b in (1, a) else -1 for a, b in pairs)
    return None if -1 in answer else answer


class _ConvolutionArguments(NamedTuple):
    """Positions of the arguments of a convolution. With -1 the operation has no such argument, and the
    default value of that argument applies.
    """

    bias: int = -1
    stride: int = -1
    padding: int = -1
    dilation: int = -1
    groups: int = -1
    transposed: int | bool = False
    output_padding: int = -1
    depthwise: bool = False

    def spatial(self, call: Call, position: int, rank: int, default: int) -> tuple[int, ...] | None:
        """Return an argument with one number per spatial dimension, such as the stride; None if the trace
        lacks it.
        """
        if position < 0:
            return (default,) * rank
        answer = call.integers(position)
        if answer is None or max((abs(number) for number in answer), default=0) > _LARGEST_PADDING:
            return None
        return answer * rank if len(answer) == 1 else answer if len(answer) == rank else None

    def is_transposed(self, call: Call) -> bool | None:
        """Return True for a transposed convolution; None if the trace does not state it."""
        return self.transposed if isinstance(self.transposed, bool) else call.flag(self.transposed)

    def group_count(self, call: Call, source: Strided) -> int | None:
        """Return the number of feature groups."""
        if self.depthwise:
            return source.shape[1]
        return 1 if self.groups < 0 else call.integer(self.groups)


_LAYOUTS: dict[str, _ConvolutionArguments] = {
    "convolution": _ConvolutionArguments(
        bias=2, stride=3, padding=4, dilation=5, transposed=6, output_padding=7, groups=8
    ),
    "cudnn_convolution": _ConvolutionArguments(padding=2, stride=3, dilation=4, groups=5),
    "cudnn_convolution_transpose": _ConvolutionArguments(
        padding=2, output_padding=3, stride=4, dilation=5, groups=6, transposed=True
    ),
    "cudnn_convolution_relu": _ConvolutionArguments(bias=2, stride=3, padding=4, dilation=5, groups=6),
    "cudnn_convolution_add_relu": _ConvolutionArguments(bias=4, stride=5, padding=6, dilation=7, groups=8),
    "miopen_convolution": _ConvolutionArguments(bias=2, padding=3, stride=4, dilation=5, groups=6),
    "miopen_convolution_transpose": _ConvolutionArguments(
        bias=2, padding=3, output_padding=4, stride=5, dilation=6, groups=7, transposed=True
    ),
    "conv": _ConvolutionArguments(bias=2, stride=3, padding=4, dilation=5, groups=6),
    "conv_transpose": _ConvolutionArguments(
        bias=2, stride=3, padding=4, output_padding=5, groups=6, dilation=7, transposed=True
    ),
    "conv_depthwise": _ConvolutionArguments(bias=3, stride=4, padding=5, dilation=6, depthwise=True),
    "slow_conv": _ConvolutionArguments(bias=3, stride=4, padding=5),
    "slow_conv_dilated": _ConvolutionArguments(bias=3, stride=4, padding=5, dilation=6),
    "convolution_backward": _ConvolutionArguments(
        stride=4, padding=5, dilation=6, transposed=7, output_padding=8, groups=9
    ),
}


def _forward(
    call: Call, layout: _ConvolutionArguments, source: Strided, kernel: Strided
) -> tuple[Cost, Strided] | None:
    """Return the cost and the result of a convolution of dense tensors; None if a number is missing."""
    rank = len(kernel.shape) - 2
    if rank < 1 or len(source.shape) != rank + 2:
        return None
    strides = layout.spatial(call, layout.stride, rank, 1)
    padding = layout.spatial(call, layout.padding, rank, 0)
    dilation = layout.spatial(call, layout.dilation, rank, 1)
    extra = layout.spatial(call, layout.output_padding, rank, 0)
    groups, transposed = layout.group_count(call, source), layout.is_transposed(call)
    if strides is None or padding is None or dilation is None or groups is None or transposed is None:
        return None
    extra = (0,) * rank if extra is None else extra
    if min(*strides, *dilation, groups) < 1 or source.shape[1] % groups:
        return None
    sizes, extents = kernel.shape[2:], source.shape[2:]
    spread = [dilation[i] * (sizes[i] - 1) for i in range(rank)]
    if transposed:
        outs = [
            (extents[i] - 1) * strides[i] - 2 * padding[i] + spread[i] + extra[i] + 1 for i in range(rank)
        ]
        pads = [(spread[i] - padding[i], spread[i] - padding[i] + extra[i]) for i in range(rank)]
        window = tuple(WindowDim(sizes[i], 1, *pads[i], strides[i], dilation[i]) for i in range(rank))
        features, order = kernel.shape[1] * groups, (0, 1)
        # Stored as (input features, output features per group); the cost wants input features per group.
        shape = (source.shape[1] // groups, features, *sizes)
    else:
        outs = [(extents[i] + 2 * padding[i] - spread[i] - 1) // strides[i] + 1 for i in range(rank)]
        window = tuple(
            WindowDim(sizes[i], strides[i], padding[i], padding[i], 1, dilation[i]) for i in range(rank)
        )
        features, order, shape = kernel.shape[0], (1, 0), kernel.shape
    if min(outs) < 0 or max(min(pair) for pair in zip(outs, sizes, strict=True)) > _LONGEST_COUNTED:
        return None
    result = dense(promoted([source, kernel]), (source.shape[0], features, *outs))
    spatial = tuple(range(2, rank + 2))
    attributes = ConvAttributes(0, 1, spatial, *order, spatial, 0, 1, spatial, window, feature_groups=groups)
    weights = Tensor(kernel.dtype, shape)
    cost = convolution_cost(
        Operation((source.plain, weights), (result.plain,)), attributes, source.plain, weights, result.plain
    )
    return cost, result


@needs(OpClass.CONVOLUTION, 0, 1)
def convolution(call: Call, source: Strided, kernel: Strided, *, layout: str) -> AtenCost | None:
    """Return the cost of a convolution: 2 FLOPs per pair of output and kernel position. ``layout`` is the
    name of the argument order in :data:`_LAYOUTS`.
    """
    answer = _forward(call, _LAYOUTS[layout], source, kernel)
    if answer is None:
        return None
    cost, out = answer
    bias = call.tensor(_LAYOUTS[layout].bias)
    added = 0.0 if bias is None else float(out.elements)
    return simple(
        [source, kernel] if bias is None else [source, kernel, bias],
        [out],
        flops=cost.flops + added,
        useful_flops=cost.useful_flops + added,
        rate=source.dtype,
        contractions=cost.contractions,
    )


@needs(OpClass.CONVOLUTION, 0, 1, 2)
def convolution_backward(call: Call, grad: Strided, source: Strided, kernel: Strided) -> AtenCost | None:
    """Return the cost of the gradients of a convolution. The gradients of input and weight each take as many
    FLOPs as the forward convolution, and the gradient of the bias is a sum.

    ``output_mask``, the last argument, selects the gradients; the cost is unknown without it.
    """
    mask = call.flags(10)
    if mask is None or len(mask) != 3:
        return None
    answer = _forward(call, _LAYOUTS["convolution_backward"], source, kernel)
    if answer is None or not answer[0].contractions or isnan(answer[0].flops):
        return None
    row = answer[0].contractions[0]
    rows: list[Contraction] = []
    results: list[Strided] = []
    if mask[0]:
        rows.append(replace(row, n=row.k, k=row.n))
        results.append(source.dense)
    if mask[1]:
        rows.append(replace(row, m=row.n, n=row.k, k=row.m))
        results.append(kernel.dense)
    added = 0.0
    if mask[2]:
        results.append(dense(grad.dtype, (grad.shape[1],)))
        added = float(grad.elements - grad.shape[1])
    inputs = [grad, *([source] if mask[1] else []), *([kernel] if mask[0] else [])]
    return simple(
        inputs,
        results,
        flops=sum(product.flops for product in rows) + added,
        useful_flops=sum(product.useful_flops for product in rows) + added,
        rate=source.dtype,
        contractions=tuple(rows),
    )
