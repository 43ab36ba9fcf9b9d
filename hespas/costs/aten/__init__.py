"""Cost table of PyTorch's operations, as its profilers record them.

Keys are names with their namespace. A row of :data:`ATEN` is the cost of an operation including all
operations that it calls. A row of :data:`COMPOSITE` is used only if none of the recorded called operations
has a cost: ``aten::linear`` is costed as a product unless its ``aten::addmm`` is recorded. Operations in
neither table have unknown figures (NaN), never 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from hespas.costs.aten import elements, matmul
from hespas.costs.aten import reduce as over
from hespas.costs.aten.call import AtenCost, AtenRule, Call, free, read_call, unknown
from hespas.costs.aten.custom import plugin_rule, user_rule
from hespas.costs.aten.experts import PARTS
from hespas.costs.aten.fused import ATTENTION, FALLBACK, attention
from hespas.costs.aten.generated import generated_kernel
from hespas.costs.aten.serving import FORWARD, SERVING, SERVING_COMPOSITE
from hespas.graph import DType

__all__ = [
    "ATEN",
    "COMPOSITE",
    "FORWARD",
    "PARTS",
    "VIEWS",
    "CallTexts",
    "aten_cost",
    "find_aten_rule",
    "is_composite",
]

_CONV = {
    "convolution": "convolution _convolution convolution_overrideable",
    "cudnn_convolution": "cudnn_convolution",
    "cudnn_convolution_transpose": "cudnn_convolution_transpose",
    "cudnn_convolution_relu": "cudnn_convolution_relu miopen_convolution_relu",
    "cudnn_convolution_add_relu": "cudnn_convolution_add_relu miopen_convolution_add_relu",
    "miopen_convolution": "miopen_convolution miopen_depthwise_convolution mkldnn_convolution",
    "miopen_convolution_transpose": "miopen_convolution_transpose",
    "conv_depthwise": "_conv_depthwise2d conv_depthwise3d",
    "slow_conv": "thnn_conv2d _slow_conv2d_forward slow_conv3d slow_conv3d_forward",
    "slow_conv_dilated": "slow_conv_dilated2d slow_conv_dilated3d",
}
_CONV_COMPOSITE = {
    "conv": "conv1d conv2d conv3d",
    "conv_transpose": "conv_transpose1d conv_transpose2d conv_transpose3d",
}


def _aten(names: str, rule: Callable[..., AtenCost], **options: object) -> dict[str, AtenRule]:
    bound = partial(rule, **options) if options else rule
    return {f"aten::{name}": bound for name in names.split()}


def _convolutions(layouts: dict[str, str]) -> dict[str, AtenRule]:
    rows = [_aten(names, matmul.convolution, layout=layout) for layout, names in layouts.items()]
    return {name: rule for row in rows for name, rule in row.items()}


_MATMULS: dict[str, AtenRule] = {
    **_aten("mm mv dot vdot bmm _int_mm inner", matmul.matmul),
    **_aten("_scaled_mm", matmul.scaled_matmul),
    **_aten("_grouped_mm", matmul.grouped_matmul),
    **_aten("addmm addmm_ _addmm_activation baddbmm baddbmm_ addmv addmv_", matmul.biased_matmul),
    **_convolutions(_CONV),
    **_aten("convolution_backward convolution_backward_overrideable", matmul.convolution_backward),
    **{name: attention(layout) for name, layout in ATTENTION.items()},
}

_REDUCTIONS: dict[str, AtenRule] = {
    **_aten("sum nansum", over.reduction, dtype=3, result="sum"),
    **_aten("mean nanmean", over.reduction, dtype=3, finish=1.0),
    **_aten("prod", over.reduction, dtype=3, result="sum"),
    **_aten("amax amin", over.reduction, full_from=1),
    **_aten("all any", over.reduction, full_from=1, result="bool"),
    **_aten("argmax argmin", over.reduction, full_from=1, result="index"),
    **_aten("norm", over.reduction, flops=2.0, dim=2, keep=3, transcendentals=1.0),
    **_aten("linalg_vector_norm", over.reduction, flops=2.0, dim=2, keep=3, dtype=4, transcendentals=1.0),
    **_aten("var", over.reduction, flops=4.0, keep=3, finish=1.0),
    **_aten("std", over.reduction, flops=4.0, keep=3, finish=1.0, transcendentals=1.0),
    **_aten("logsumexp", over.reduction, flops=3.0, full_from=1, transcendentals=1.0),
    **_aten("count_nonzero", over.reduction, keep=-1, full_from=1, result="index"),
}


_MAXIMUM = elements.pointwise("maximum")


def _extreme(call: Call) -> AtenCost:
    """Return the cost of ``max`` and ``min``. With two tensors they are elementwise, otherwise reductions. A
    reduction over one dimension also writes indices.
    """
    if call.tensor(1) is not None:
        return _MAXIMUM(call)
    return over.reduction(call, full_from=1, results=1 if len(call.args) < 2 else 2)


_NORMS: dict[str, AtenRule] = {
    **_aten("native_layer_norm", over.layer_norm),
    **_aten("native_group_norm", over.group_norm),
    **_aten("native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit", over.batch_norm),
    **_aten("_fused_rms_norm", over.rms_norm, weight_at=2),
    **_aten("native_layer_norm_backward", over.normalisation_backward, read_at=(0, 1, 3, 4, 5), weight_at=5),
    **_aten("native_group_norm_backward", over.normalisation_backward, read_at=(0, 1, 2, 3, 4), weight_at=4),
    **_aten("native_batch_norm_backward", over.normalisation_backward, read_at=(0, 1, 2, 5, 6), weight_at=2),
    **_aten(
        "cudnn_batch_norm_backward miopen_batch_norm_backward",
        over.normalisation_backward,
        read_at=(0, 1, 2, 5, 6),
        source_at=0,
        weight_at=2,
        mask=False,
    ),
    **_aten("_softmax _log_softmax _safe_softmax", over.softmax),
    **_aten("_softmax_backward_data _log_softmax_backward_data", over.softmax_backward),
}

_WINDOWS: dict[str, AtenRule] = {
    **_aten("max_pool2d_with_indices", over.pool, rank=2, ceil_at=5, dilation_at=4, indices=True),
    **_aten("max_pool3d_with_indices", over.pool, rank=3, ceil_at=5, dilation_at=4, indices=True),
    **_aten("avg_pool2d", over.pool, rank=2, ceil_at=4),
    **_aten("avg_pool3d", over.pool, rank=3, ceil_at=4),
    **_aten("_adaptive_avg_pool2d", over.pool, rank=2, adaptive=True),
    **_aten("_adaptive_avg_pool3d", over.pool, rank=3, adaptive=True),
    **_aten("max_pool2d_with_indices_backward avg_pool2d_backward", over.pool_backward, rank=2),
    **_aten("max_pool3d_with_indices_backward avg_pool3d_backward", over.pool_backward, rank=3),
    **_aten("_adaptive_avg_pool2d_backward", over.pool_backward, rank=2, adaptive=True),
    **_aten("_adaptive_avg_pool3d_backward", over.pool_backward, rank=3, adaptive=True),
    **_aten("upsample_nearest1d _upsample_nearest_exact1d", over.upsample, rank=1, flops=0.0),
    **_aten("upsample_nearest2d _upsample_nearest_exact2d", over.upsample, rank=2, flops=0.0),
    **_aten("upsample_nearest3d _upsample_nearest_exact3d", over.upsample, rank=3, flops=0.0),
    **_aten("upsample_linear1d", over.upsample, rank=1, flops=3.0),
    **_aten("upsample_bilinear2d _upsample_bilinear2d_aa", over.upsample, rank=2, flops=9.0),
    **_aten("upsample_bicubic2d _upsample_bicubic2d_aa", over.upsample, rank=2, flops=35.0),
    **_aten("upsample_trilinear3d", over.upsample, rank=3, flops=21.0),
}

_INDEXING: dict[str, AtenRule] = {
    **_aten("index_select", elements.index_select),
    **_aten("gather", elements.gather, indices_at=2),
    **_aten("take", elements.gather, indices_at=1),
    **_aten("index", elements.index),
    **_aten("index_put_ _index_put_impl_", elements.index_put),
    **_aten("index_put", elements.index_put, copies=True),
    **_aten("scatter_", elements.scatter, adds=False),
    **_aten("scatter_add_ scatter_reduce_", elements.scatter, adds=True),
    **_aten("scatter", elements.scatter, adds=False, copies=True),
    **_aten("scatter_add scatter_reduce", elements.scatter, adds=True, copies=True),
    **_aten("index_add_", elements.place_along, adds=True),
    **_aten("index_copy_", elements.place_along, adds=False),
    **_aten("index_add", elements.place_along, adds=True, copies=True),
    **_aten("index_copy", elements.place_along, adds=False, copies=True),
    **_aten("embedding_dense_backward", elements.embedding_gradient),
    **_aten("_embedding_bag _embedding_bag_forward_only", elements.embedding_bag),
    **_aten("masked_select nonzero", elements.masked_select),
    **_aten("nll_loss_forward nll_loss2d_forward", elements.nll_loss),
    **_aten("nll_loss_backward nll_loss2d_backward", elements.nll_loss_backward),
    **_aten("native_dropout _fused_dropout", elements.dropout),
    **_aten("copy_", elements.copy_into),
    **_aten("cat", elements.concatenate),
    **_aten("fill_ zero_ uniform_ normal_ exponential_ random_ bernoulli_", elements.fill),
    **_aten("arange", elements.generate),
    **_aten("cumsum cumprod logcumsumexp", over.scan),
    **_aten("sort", over.sort),
    **_aten("topk", over.top_k),
    **_aten("max min", _extreme),
    **_aten("_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adam _fused_adamw _fused_sgd", elements.optimizer),
    **_aten("_local_scalar_dense", elements.cast, position=-1),
}

_FOREACH = (
    "add sub mul div sqrt neg exp reciprocal addcmul addcdiv lerp pow zero copy maximum minimum clamp_min "
    "clamp_max abs sigmoid tanh log"
)

ATEN: dict[str, AtenRule] = {
    **{f"aten::{name}": elements.pointwise(name) for name in elements.POINTWISE},
    **{
        f"aten::{name}_": elements.pointwise(f"{name}_")
        for name in elements.POINTWISE
        if not name.endswith("_")
    },
    **{
        f"aten::_foreach_{name}{suffix}": elements.foreach(f"_foreach_{name}{suffix}")
        for name in _FOREACH.split()
        for suffix in ("", "_")
    },
    **_MATMULS,
    **_REDUCTIONS,
    **_NORMS,
    **_WINDOWS,
    **_INDEXING,
    **SERVING,
}
"""Operation -> rule of the operation with all it calls."""

_NO_WORK = (
    "view reshape as_strided expand permute transpose t select slice squeeze unsqueeze detach alias unbind "
    "split chunk narrow _unsafe_view view_as expand_as broadcast_to diagonal unfold flatten unflatten "
    "lift_fresh resolve_conj resolve_neg empty empty_like empty_strided split_with_sizes resize_"
)
VIEWS: frozenset[str] = frozenset(_aten(_NO_WORK, free))
"""Operations without kernels and costs; kernels inside one belong to an unknown operation."""

COMPOSITE: dict[str, AtenRule] = {
    **_aten("linear", matmul.linear),
    **_aten("matmul", matmul.matmul),
    **_convolutions(_CONV_COMPOSITE),
    **_aten("scaled_dot_product_attention", attention(FALLBACK)),
    **_aten("embedding", elements.embedding),
    **_aten("embedding_bag", elements.embedding_bag),
    **_aten("_to_copy to", elements.cast, position=1),
    **_aten("clone contiguous", elements.cast, position=-1),
    **_aten("repeat", elements.repeat),
    **_aten("slice_backward select_backward", elements.slice_backward),
    **SERVING_COMPOSITE,
}
"""Operation -> rule that applies if no recorded part of it has a cost."""

_GENERATED = ("triton_",)
_NUMBERED = re.compile(r"(sglang_profiler::\w{1,200}?)_\d{1,9}")
"""Ranges with the source line of the engine as a number."""
_LARGEST_EXTENT = 1 << 62


def find_aten_rule(name: str) -> AtenRule | None:
    """Return the cost rule of an operation, from a user's files, the built-in table or a plug-in; None
    without one.
    """
    of_user = user_rule(name)
    if of_user is not None:
        return of_user.rule
    if name.startswith(_GENERATED):
        return generated_kernel
    numbered = _NUMBERED.fullmatch(name)
    plain_name = numbered[1] if numbered else name
    answer = ATEN.get(plain_name) or COMPOSITE.get(plain_name)
    if answer is not None or plain_name in VIEWS or plain_name.startswith("aten::"):
        return answer
    of_others = plugin_rule(name)
    return None if of_others is None else of_others.rule


def is_composite(name: str) -> bool:
    """Return True if an operation has no cost of its own, because the costs of the operations that it calls
    are counted.
    """
    of_user = user_rule(name)
    return name in COMPOSITE if of_user is None else of_user.composite


class CallTexts(NamedTuple):
    """Inputs of a recorded operation as the JSON texts of the profiler."""

    name: str
    shapes: str
    types: str
    strides: str
    values: str


def aten_cost(
    name: str,
    shapes: str,
    types: str,
    *,
    strides: str = "",
    values: str = "",
    hint: DType | None = None,
    step: str = "",
    parts: Iterable[CallTexts] = (),
) -> AtenCost:
    """Return the cost of a PyTorch operation from the JSON texts of its inputs, as Kineto writes them.

    ``hint`` is the element type of lists of tensors, which traces do not record. ``step`` is the name of the
    enclosing profiler step, which states the sequence lengths of a batch. ``parts`` are the operations inside
    this one that its cost rule needs, as listed in :data:`PARTS`, or the forward operation of
    :data:`FORWARD`. Unknown figures are NaN.
    """
    call = read_call(name, shapes, types, strides=strides, values=values, hint=hint)
    inside = tuple(
        read_call(texts[0], texts[1], texts[2], strides=texts[3], values=texts[4]) for texts in parts
    )
    call = call._replace(step=step, parts=inside)
    rule = find_aten_rule(name)
    if rule is None:
        return free(call) if name in VIEWS else unknown(call)
    try:
        answer = rule(call)
    except OverflowError:  # sizes that no memory holds
        return unknown(call)
    extents = [extent for tensor in answer.results for extent in tensor.shape]
    return answer if max(extents, default=0) <= _LARGEST_EXTENT else unknown(call)
