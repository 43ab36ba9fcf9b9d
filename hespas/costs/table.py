"""THE cost table: one row for each operation of the StableHLO specification, and the aliases of other
dialects.

Keys are StableHLO names without the dialect. ``chlo`` and ``mhlo`` operations that StableHLO does not have
stand in the same table; HLO opcodes (``exponential-minus-one``) are found through :data:`HLO_ALIASES`. An
operation that is not here is unknown: readers report it and keep its bytes as a lower bound.
"""

from __future__ import annotations

from hespas.costs import arithmetic as calc
from hespas.costs import linalg, movement
from hespas.costs.contraction import dot, einsum, ragged_dot
from hespas.costs.convolution import convolution
from hespas.costs.cost import Cost, Rule, unknown_cost
from hespas.costs.custom_calls import custom_call
from hespas.costs.facts import Operation
from hespas.graph import OpClass

__all__ = ["HLO_ALIASES", "TABLE", "canonical_name", "cost_of", "find_rule"]


def _names(text: str) -> list[str]:
    return text.split()


_ADD, _MULTIPLY = calc.elementwise(), calc.elementwise(1, 6)

_ELEMENTWISE = _names(
    """
    add subtract divide negate abs sign maximum minimum remainder compare select and or xor not shift_left
    shift_right_arithmetic shift_right_logical popcnt count_leading_zeros floor ceil round_nearest_afz
    round_nearest_even is_finite convert reduce_precision is_inf is_neg_inf is_pos_inf next_after mulhi conj
    stochastic_convert
    """
)
_TRANSCENDENTAL = _names(
    """
    exponential exponential_minus_one log log_plus_one logistic tanh tan sine cosine sqrt rsqrt cbrt power
    atan2 acos acosh asin asinh atan atanh cosh erf erfc sinh _asin_acos_kernel
    """
)
_SPECIAL = {
    "bessel_i1e": (87, 1),
    "digamma": (73, 3),
    "erf_inv": (37, 2),
    "lgamma": (53, 4),
    "polygamma": (261, 19),
    "zeta": (122, 11),
}
"""FLOPs and transcendentals for each element, as ``chlo-legalize-to-stablehlo`` expands them for f32."""
_BROADCASTING = _names(
    """
    add subtract divide multiply maximum minimum remainder compare select and or xor shift_left
    shift_right_arithmetic shift_right_logical next_after power atan2 polygamma zeta complex
    """
)
_FREE = _names(
    """
    reshape partition_id replica_id bitcast dynamic_reshape get_dimension_size set_dimension_size
    optimization_barrier tuple get_tuple_element after_all create_token return add_dependency domain trace
    minimum_broadcast_shapes async_done async_update parameter
    sdy.sharding_constraint sdy.sharding_group sdy.propagation_barrier sdy.mesh sdy.data_flow_edge
    sdy.func_data_flow_edge
    """
)
_CONTROL = _names(
    """
    while case if composite call fusion async_start sdy.manual_computation sdy.named_computation
    """
)
_MOVE = _names(
    """
    complex real imag transpose reverse concatenate pad dynamic_pad copy copy_start copy_done
    """
)
_COLLECTIVE = _names(
    """
    all_reduce all_gather reduce_scatter all_to_all collective_broadcast collective_reduce
    collective_permute cross-replica-sum ragged_all_to_all
    """
)
_GENERATE = _names(
    """
    iota dynamic_iota constant constant_like
    """
)

TABLE: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _ADD),
    **dict.fromkeys(_TRANSCENDENTAL, calc.transcendental),
    **{name: calc.expanded(*counts) for name, counts in _SPECIAL.items()},
    **dict.fromkeys(_FREE, movement.free),
    **dict.fromkeys(_CONTROL, movement.control),
    **dict.fromkeys(_MOVE, movement.move),
    **dict.fromkeys(_COLLECTIVE, movement.collective),
    **dict.fromkeys(_GENERATE, movement.generate),
    "multiply": _MULTIPLY,
    "square": _MULTIPLY,
    "clamp": calc.elementwise(2),
    "dot_general": dot,
    "dot": dot,
    "einsum": einsum,
    "unary_einsum": einsum,
    "ragged_dot": ragged_dot,
    "convolution": convolution,
    "dynamic_conv": convolution,
    "reduce": calc.reduce,
    "reduce_window": calc.reduce_window,
    "select_and_scatter": calc.select_and_scatter,
    "batch_norm_training": calc.batch_norm(8),
    "batch_norm_inference": calc.batch_norm(4),
    "batch_norm_grad": calc.batch_norm(12),
    "scan": calc.scan,
    "sort": calc.sort,
    "top_k": calc.top_k,
    "topk": calc.top_k,
    "map": calc.map_body,
    "cholesky": linalg.cholesky,
    "triangular_solve": linalg.triangular_solve,
    "fft": linalg.fft,
    "bitcast_convert": movement.bitcast_convert,
    "broadcast_in_dim": movement.broadcast,
    "broadcast": movement.broadcast,
    "dynamic_broadcast_in_dim": movement.broadcast,
    "rng": movement.random,
    "rng_bit_generator": movement.random,
    "xla.rng_get_and_update_state": movement.random,
    "slice": movement.slice_read,
    "dynamic_slice": movement.slice_read,
    "real_dynamic_slice": movement.slice_read,
    "dynamic_update_slice": movement.update_slice,
    "gather": movement.gather,
    "dynamic_gather": movement.gather,
    "torch_index_select": movement.gather,
    "scatter": movement.scatter,
    "uniform_quantize": calc.quantize,
    "uniform_dequantize": calc.quantize,
    "infeed": movement.host_transfer(OpClass.HOST),
    "outfeed": movement.host_transfer(OpClass.HOST),
    "send": movement.host_transfer(OpClass.P2P),
    "recv": movement.host_transfer(OpClass.P2P),
    "send_done": movement.free,
    "recv_done": movement.free,
    "custom_call": custom_call,
}
"""Operation name -> rule."""

TABLE.update({f"broadcast_{name}": TABLE[name] for name in _BROADCASTING})

HLO_ALIASES: dict[str, str] = {
    "atan2": "atan2",
    "call": "call",
    "clz": "count_leading_zeros",
    "conditional": "case",
    "cos": "cosine",
    "count-leading-zeros": "count_leading_zeros",
    "dynamic-reshape": "dynamic_reshape",
    "erf": "erf",
    "exp": "exponential",
    "is-finite": "is_finite",
    "log-plus-one": "log_plus_one",
    "opt-barrier": "optimization_barrier",
    "popcnt": "popcnt",
    "ragged-all-to-all": "ragged_all_to_all",
    "ragged-dot": "ragged_dot",
    "rng-get-and-update-state": "xla.rng_get_and_update_state",
    "round-nearest-afz": "round_nearest_afz",
    "sin": "sine",
    "stochastic-convert": "stochastic_convert",
    "topk": "top_k",
    "all-gather-start": "all_gather",
    "all-reduce-start": "all_reduce",
    "reduce-scatter-start": "reduce_scatter",
    "collective-permute-start": "collective_permute",
    "all-gather-done": "async_done",
    "all-reduce-done": "async_done",
    "reduce-scatter-done": "async_done",
    "collective-permute-done": "async_done",
    "copy-done": "async_done",
}
"""HLO opcodes whose name is not the StableHLO one with dashes for underscores."""

_DIALECTS = ("stablehlo.", "mhlo.", "chlo.", "func.")


def canonical_name(op_name: str) -> str:
    """The table's spelling of ``stablehlo.add``, ``mhlo.add``, ``chlo.erf``, or an HLO opcode."""
    for dialect in _DIALECTS:
        if op_name.startswith(dialect):
            return op_name[len(dialect) :]
    alias = HLO_ALIASES.get(op_name)
    if alias is not None:
        return alias
    return op_name if op_name in TABLE else op_name.replace("-", "_")


def find_rule(op_name: str) -> Rule | None:
    """The rule of an operation in any spelling, None where the table has none."""
    return TABLE.get(canonical_name(op_name))


def cost_of(op_name: str, op: Operation) -> Cost:
    """The cost of one operation; class UNKNOWN and NaN arithmetic where the table has no row for it."""
    rule = find_rule(op_name)
    return unknown_cost(op) if rule is None else rule(op)
