"""Cost table of custom calls by their target. Calls of other targets have unknown costs, never zero.

Target names are the names that XLA and JAX emit. Library calls have their dimension numbers in the backend
configuration: protobuf JSON, where integers may be strings (xla/service/gpu/backend_configs.proto). The cost
of a call with an invalid configuration is unknown.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import nan, prod

import msgspec

from hespas.costs.arithmetic import quantize, top_k
from hespas.costs.contraction import config_precision, contraction_cost, convolution_cost, dot
from hespas.costs.linear_algebra import LAPACK_ROUTINES, lapack
from hespas.costs.operation import (
    FREE,
    ConvAttributes,
    Cost,
    CustomAttributes,
    DotAttributes,
    Operation,
    Rule,
    Tensor,
    TopKAttributes,
    move_cost,
    unknown_cost,
)
from hespas.graph import OpClass

__all__ = ["custom_call", "is_known_target"]


class _GemmDims(msgspec.Struct, frozen=True):
    """Dimension numbers of a matmul in the backend configuration of a custom call."""

    lhs_contracting_dimensions: tuple[int, ...] = ()
    rhs_contracting_dimensions: tuple[int, ...] = ()
    lhs_batch_dimensions: tuple[int, ...] = ()
    rhs_batch_dimensions: tuple[int, ...] = ()


class _PrecisionConfig(msgspec.Struct, frozen=True):
    """Precision of each operand in the backend configuration of a custom call."""

    operand_precision: tuple[str, ...] = ()


class _GemmConfig(msgspec.Struct, frozen=True):
    """Backend configuration of a custom call that is a matmul of a library (cuBLAS)."""

    dot_dimension_numbers: _GemmDims | None = None
    precision_config: _PrecisionConfig = _PrecisionConfig()


class _ShapeConfig(msgspec.Struct, frozen=True):
    """Shape of a tensor in the backend configuration of a custom call."""

    dimensions: tuple[int, ...] = ()


class _AttentionConfig(msgspec.Struct, frozen=True):
    """Configuration of a custom call that is fused attention: the shape of its scores."""

    intermediate_tensor_shape: _ShapeConfig = _ShapeConfig()


class _CostEstimate(msgspec.Struct, frozen=True):
    """Cost estimate in a custom call, stated by the author of the kernel."""

    flops: float = nan
    transcendentals: float = 0.0
    bytes_accessed: float = nan


class _KernelConfig(msgspec.Struct, frozen=True):
    """Backend configuration of a custom call that is a hand-written kernel (such as Pallas)."""

    cost_estimate: _CostEstimate | None = None


class _BackendConfig(msgspec.Struct, frozen=True):
    """Backend configuration of a custom call, with the fields of all known targets."""

    gemm_backend_config: _GemmConfig | None = None
    cudnn_fmha_backend_config: _AttentionConfig | None = None
    custom_call_config: _KernelConfig | None = None
    dot_dimension_numbers: _GemmDims | None = None


def _parse_config(text: str) -> _BackendConfig | None:
    """Parse the backend configuration of a custom call; return None for invalid JSON."""
    try:
        return msgspec.json.decode(text.encode(), type=_BackendConfig, strict=False)
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return None


_FREE_TARGETS: frozenset[str] = frozenset(
    {
        "AllocateBuffer",
        "AsyncCollectiveDone",
        "AsyncCollectiveStart",
        "AssumeGatherIndicesInBound",
        "ConcatBitcast",
        "LayoutConstraint",
        "PrepareAsyncCallDone",
        "PrepareAsyncCallStart",
        "SPMDFullToShardShape",
        "SPMDShardToFullShape",
        "Sharding",
        "annotate_device_placement",
        "shape_assertion",
        "xla.sdy.FuncResultSharding",
        "xla.sdy.GlobalToLocalShape",
        "xla.sdy.LocalToGlobalShape",
        "xla.sdy.PropagationBarrier",
        "xla.sdy.Sharding",
        "xla.sdy.ShardingGroup",
    }
)
"""Annotations and checks that devices do not execute."""


def _gemm(op: Operation, attributes: CustomAttributes) -> Cost:
    """Return the cost of a library matmul. A workspace that is returned as the last result is not traffic."""
    config = _parse_config(attributes.config)
    gemm = config.gemm_backend_config if config else None
    dims = gemm.dot_dimension_numbers if gemm else config.dot_dimension_numbers if config else None
    if dims is None or len(op.operands) < 2:
        return unknown_cost(op, OpClass.CONTRACTION)
    levels = gemm.precision_config.operand_precision if gemm else ()
    product = DotAttributes(
        dims.lhs_batch_dimensions,
        dims.rhs_batch_dimensions,
        dims.lhs_contracting_dimensions,
        dims.rhs_contracting_dimensions,
        config_precision(levels),
    )
    return dot(Operation(op.operands, _without_workspace(op.results), product, op.repeated))


def _block_scaled_dot(op: Operation) -> Cost:
    """Return the cost of a matmul of block-scaled operands (MX formats, NVFP4). The scales count as traffic.

    Both operands have their batch dimensions first and the contracted dimension last, as JAX emits the call.
    Scaling takes no FLOPs, because matrix units for block-scaled types apply the scales as they multiply.
    """
    ranks = {len(tensor.shape) for tensor in op.operands[:2]}
    if len(op.operands) < 4 or len(ranks) != 1 or min(ranks) < 2:
        return unknown_cost(op, OpClass.CONTRACTION)
    last = ranks.pop() - 1
    batch = tuple(range(last - 1))
    return dot(op._replace(attributes=DotAttributes(batch, batch, (last,), (last,))))


def _without_workspace(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    last = results[-1] if results else None
    scratch = last is not None and last.dtype is not None and last.dtype.name in {"i8", "ui8"}
    return results[:-1] if scratch and len(results) > 1 else results


def _convolution(source: int, kernel: int, output: int) -> Rule:
    """Return the cost rule of a library convolution, or of one of its gradients. A gradient has the window of
    the forward convolution.

    ``source``, ``kernel`` and ``output`` are the positions of these tensors: 0 and 1 are operands, 2 is the
    result.
    """

    def rule(op: Operation) -> Cost:
        attributes = op.attributes
        conv: ConvAttributes | None = attributes.conv if isinstance(attributes, CustomAttributes) else None
        if conv is None or len(op.operands) < 2 or not op.results:
            return unknown_cost(op, OpClass.CONVOLUTION)
        traffic = Operation(op.operands, _without_workspace(op.results), op.attributes, op.repeated)
        tensors = (op.operands[0], op.operands[1], op.results[0])
        return convolution_cost(traffic, conv, tensors[source], tensors[kernel], tensors[output])

    return rule


def _transformer_engine_attention(op: Operation, attributes: CustomAttributes) -> Cost:
    """Return the cost of fused attention of TransformerEngine.

    The first operands are query, key and value, separate or packed, with shape (..., sequence, heads, head
    size). Packed operands have a dimension for the number of parts before the heads.

    The forward pass takes two matmuls with the size of the scores, the backward pass five. If the
    configuration states a causal mask, half of the scores are counted.
    """
    if len(op.operands) < 3 or not op.results:
        return unknown_cost(op, OpClass.ATTENTION)
    query, key, value = (list(tensor.shape) for tensor in op.operands[:3])
    if len(key) == len(query) + 1 and key[-3] == 2:  # key and value in one
        key = value = [*key[:-3], *key[-2:]]
    elif len(query) > 3 and query[-3] == 3 and len(key) < len(query):  # all three in one
        query = key = value = [*query[:-3], *query[-2:]]
    if min(map(len, (query, key, value))) < 3 or min(*query, *key, *value) < 0:
        return unknown_cost(op, OpClass.ATTENTION)
    batch, queries, keys = prod(query[:-3]) * query[-2], query[-3], key[-3]
    backward = "backward" in attributes.target
    deep = 3 * query[-1] + 2 * value[-1] if backward else query[-1] + value[-1]
    macs = float(batch * queries * keys * deep)
    products = 5 if backward else 2
    mask = re.search(r"\bmask_type\s*=\s*(\d+)", attributes.config)
    is_causal = mask is not None and int(mask[1]) in _CAUSAL_MASKS
    traffic = Operation(op.operands, _without_workspace(op.results), attributes, op.repeated)
    cost = contraction_cost(
        traffic,
        OpClass.ATTENTION,
        (products * batch, queries, keys, deep // products),
        config_precision(()),
        macs=macs,
        useful_macs=macs / 2 if is_causal else macs,
        types=(op.operands[0], op.operands[1] if op.operands[1].shape else op.operands[0], op.results[0]),
    )
    return replace(cost, transcendentals=float(batch * queries * keys))


_CAUSAL_MASKS = frozenset({2, 3, 4, 5})
"""``NVTE_CAUSAL_MASK``, ``NVTE_PADDING_CAUSAL_MASK`` and their bottom-right variants."""


def _approximate_top_k(op: Operation) -> Cost:
    """Return the cost of ``ApproxTopK``: each element is compared once with the best element of its bin."""
    if not op.operands or not op.results:
        return unknown_cost(op, OpClass.SORT)
    elements = op.operands[0].elements
    rate = op.operands[0].code
    return Cost(OpClass.SORT, elements, elements, 0.0, op.read_bytes, op.written_bytes, rate)


def _stated_estimate(op: Operation, attributes: CustomAttributes) -> Cost:
    """Return the cost that the configuration of a hand-written kernel states; unknown without one."""
    config = _parse_config(attributes.config)
    kernel = config.custom_call_config if config else None
    estimate = kernel.cost_estimate if kernel else None
    if estimate is None:
        return unknown_cost(op, OpClass.CUSTOM)
    known_bytes = estimate.bytes_accessed == estimate.bytes_accessed
    read = max(estimate.bytes_accessed - op.written_bytes, 0.0) if known_bytes else op.read_bytes
    rate = op.operands[0].code if op.operands else -1
    return Cost(
        OpClass.CUSTOM, estimate.flops, estimate.flops, estimate.transcendentals, read, op.written_bytes, rate
    )


def _top_k(op: Operation) -> Cost:
    """Return the cost of ``TopK``; k is the last extent of the result."""
    if not op.results or not op.results[0].shape:
        return unknown_cost(op, OpClass.SORT)
    return top_k(Operation(op.operands, op.results, TopKAttributes(op.results[0].shape[-1]), op.repeated))


_CONVOLUTIONS: dict[str, Rule] = {
    "__cudnn$convForward": _convolution(0, 1, 2),
    "__cudnn$convForwardGraph": _convolution(0, 1, 2),
    "__cudnn$convBiasActivationForward": _convolution(0, 1, 2),
    "__cudnn$convBackwardInput": _convolution(2, 1, 0),
    "__cudnn$convBackwardFilter": _convolution(0, 2, 1),
}
_RULES: dict[str, Rule] = {
    **_CONVOLUTIONS,
    "__op$block_scaled_dot": _block_scaled_dot,
    **dict.fromkeys(("__op$quantize", "__op$dequantize"), quantize),
    # LiteRT's exporters (tensorflow/compiler/mlir/lite/stablehlo): scales and zero points are operands
    **dict.fromkeys(("quant.quantize", "quant.dequantize", "quant.fake_quant"), quantize),
    "ApproxTopK": _approximate_top_k,
    "PartialReduce": _approximate_top_k,
    "TopK": _top_k,
    "mhlo.topk": _top_k,
    "__gpu$TopK": _top_k,
    "MoveToHost": lambda op: move_cost(op, OpClass.HOST),
    "MoveToDevice": lambda op: move_cost(op, OpClass.HOST),
    **dict.fromkeys(_FREE_TARGETS, lambda op: FREE),
}
_CONFIGURED_RULES = {
    "__cublas$gemm": _gemm,
    "__cublas$lt$matmul": _gemm,
    "__cublas$lt$matmul$f8": _gemm,
    "te_fused_attn_backward": _transformer_engine_attention,
    "te_fused_attn_backward_ffi": _transformer_engine_attention,
    "te_fused_attn_forward": _transformer_engine_attention,
    "te_fused_attn_forward_ffi": _transformer_engine_attention,
    "tpu_custom_call": _stated_estimate,
}
_LAPACK = (
    r"(?:lapack_[sdcz]?|cusolver_|hipsolver_|cublas_|hipblas_|blas_[sdcz]?)([a-z0-9]+?)(?:_batched)?(?:_ffi)?"
)


def _lapack_routine(target: str) -> str | None:
    match = re.fullmatch(_LAPACK, target)
    return match[1] if match and match[1] in LAPACK_ROUTINES else None


def is_known_target(target: str) -> bool:
    """Return True if the table has a rule for a target. The rule may still need a valid configuration."""
    has_rule = target in _RULES or target in _CONFIGURED_RULES or target.startswith("__cudnn$fmha")
    return has_rule or _lapack_routine(target) is not None


def custom_call(op: Operation) -> Cost:
    """Return the cost of a custom call by the rule of its target. For unknown targets the bytes are a lower
    bound.
    """
    attributes = op.attributes
    if not isinstance(attributes, CustomAttributes):
        return unknown_cost(op, OpClass.CUSTOM)
    simple = _RULES.get(attributes.target)
    if simple is not None:
        return simple(op)
    configured = _CONFIGURED_RULES.get(attributes.target)
    if configured is not None:
        return configured(op, attributes)
    if attributes.target.startswith("__cudnn$fmha"):
        # Fused attention has two products over the scores forward, five backward, and one exponential per
        # score.
        config = _parse_config(attributes.config)
        shape = config.cudnn_fmha_backend_config if config else None
        scores = shape.intermediate_tensor_shape.dimensions if shape else ()
        if len(scores) < 2 or not op.operands or not op.operands[0].shape:
            return unknown_cost(op, OpClass.ATTENTION)
        head = op.operands[0].shape[-1]
        products = 5 if "Backward" in attributes.target else 2
        traffic = Operation(op.operands, _without_workspace(op.results), attributes, op.repeated)
        types = (op.operands[0], op.operands[1 % len(op.operands)], op.results[0])
        extents = (products * prod(scores[:-2]), scores[-2], scores[-1], head)
        macs = float(prod(extents)) if min(extents) >= 0 else nan
        cost = contraction_cost(
            traffic,
            OpClass.ATTENTION,
            extents,
            config_precision(()),
            macs=macs,
            useful_macs=macs,
            types=types,
        )
        return replace(cost, transcendentals=float(prod(scores)))
    routine = _lapack_routine(attributes.target)
    return unknown_cost(op, OpClass.CUSTOM) if routine is None else lapack(routine)(op)
