"""Cost table: one row for each operation of the StableHLO specification, and the aliases of other dialects.

Keys are StableHLO names without the dialect. The table also has the ``chlo`` and ``mhlo`` operations that
StableHLO lacks; :data:`HLO_ALIASES` maps HLO opcodes (``exponential-minus-one``). An operation without a row
is unknown: readers report it and keep its bytes as a lower bound. The StableHLO specification defines the
operations; counts follow the convention of :mod:`hespas.costs.operation`.
"""

from __future__ import annotations

from functools import partial

from hespas.costs.arithmetic import (
    batch_norm,
    elementwise,
    map_body,
    quantize,
    reduce,
    reduce_window,
    scan,
    select_and_scatter,
    sort,
    top_k,
)
from hespas.costs.contraction import convolution, dot, einsum, ragged_dot
from hespas.costs.custom_calls import custom_call
from hespas.costs.data_movement import bitcast_convert, broadcast, gather, scatter, slice_read, update_slice
from hespas.costs.linear_algebra import fft, lapack, triangular_solve
from hespas.costs.operation import FREE, Cost, Operation, Rule, move_cost, unknown_cost
from hespas.graph import OpClass

__all__ = ["HLO_ALIASES", "TABLE", "canonical_name", "cost_of", "find_rule"]


def _rows(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


def _always(cost: Cost, names: str) -> dict[str, Rule]:
    """Return rows of the cost table for several operations with the same cost for all types. They are views,
    structural operations, and operations that are fused into their consumers.
    """
    return _rows(lambda op: cost, names)


def _moves(op_class: OpClass, names: str) -> dict[str, Rule]:
    """Return table rows of operations that only move data: every distinct operand is read, every result
    written.
    """
    return _rows(partial(move_cost, op_class=op_class), names)


_SPECIAL = {
    "bessel_i1e": (87, 1),
    "digamma": (73, 3),
    "erf_inv": (37, 2),
    "lgamma": (53, 4),
    "polygamma": (261, 19),
    "zeta": (122, 11),
}
"""FLOPs and transcendentals per element, as ``chlo-legalize-to-stablehlo`` expands them for f32."""

TABLE: dict[str, Rule] = {
    **_rows(
        elementwise(),
        """
        add subtract divide negate abs sign maximum minimum remainder compare select and or xor not shift_left
        shift_right_arithmetic shift_right_logical popcnt count_leading_zeros floor ceil round_nearest_afz
        round_nearest_even is_finite convert reduce_precision is_inf is_neg_inf is_pos_inf next_after mulhi
        conj stochastic_convert
        """,
    ),
    **_rows(elementwise(complex_flops=6.0), "multiply square"),
    **_rows(elementwise(2.0), "clamp"),
    **_rows(
        elementwise(0.0, transcendentals=1.0, op_class=OpClass.TRANSCENDENTAL),
        """
        exponential exponential_minus_one log log_plus_one logistic tanh tan sine cosine sqrt rsqrt cbrt power
        atan2 acos acosh asin asinh atan atanh cosh erf erfc sinh _asin_acos_kernel
        """,
    ),
    **{
        name: elementwise(flops, transcendentals=heavy, op_class=OpClass.TRANSCENDENTAL)
        for name, (flops, heavy) in _SPECIAL.items()
    },
    **_always(
        FREE,
        """
        reshape partition_id replica_id bitcast dynamic_reshape get_dimension_size set_dimension_size
        optimization_barrier tuple get_tuple_element after_all create_token return add_dependency domain trace
        minimum_broadcast_shapes async_done async_update parameter send_done recv_done
        sdy.sharding_constraint sdy.sharding_group sdy.propagation_barrier sdy.mesh sdy.data_flow_edge
        sdy.func_data_flow_edge
        """,
    ),
    # Regions of control flow are separate nodes of the graph.
    **_always(
        Cost(OpClass.CONTROL),
        "while case if composite call fusion async_start sdy.manual_computation sdy.named_computation",
    ),
    **_always(Cost(OpClass.GENERATE), "iota dynamic_iota constant constant_like"),
    # The integer work of a random word is an estimator's parameter.
    **_moves(OpClass.GENERATE, "rng rng_bit_generator xla.rng_get_and_update_state"),
    **_moves(
        OpClass.MOVE,
        "complex real imag transpose reverse concatenate pad dynamic_pad copy copy_start copy_done",
    ),
    # Local memory traffic only: payloads and groups are in the collective table.
    **_moves(
        OpClass.COLLECTIVE,
        """
        all_reduce all_gather reduce_scatter all_to_all collective_broadcast collective_reduce
        collective_permute cross-replica-sum ragged_all_to_all
        """,
    ),
    # Traffic of a link, not of device memory: what goes out is read, what comes in is written.
    **_moves(OpClass.HOST, "infeed outfeed"),
    **_moves(OpClass.P2P, "send recv"),
    **_rows(bitcast_convert, "bitcast_convert"),
    **_rows(broadcast, "broadcast_in_dim broadcast dynamic_broadcast_in_dim"),
    **_rows(slice_read, "slice dynamic_slice real_dynamic_slice"),
    **_rows(update_slice, "dynamic_update_slice"),
    **_rows(gather, "gather dynamic_gather torch_index_select"),
    **_rows(scatter, "scatter"),
    **_rows(dot, "dot_general dot"),
    **_rows(einsum, "einsum unary_einsum"),
    **_rows(ragged_dot, "ragged_dot"),
    **_rows(convolution, "convolution dynamic_conv"),
    **_rows(reduce, "reduce"),
    **_rows(reduce_window, "reduce_window"),
    **_rows(select_and_scatter, "select_and_scatter"),
    **_rows(batch_norm(8), "batch_norm_training"),
    **_rows(batch_norm(4), "batch_norm_inference"),
    **_rows(batch_norm(12), "batch_norm_grad"),
    **_rows(scan, "scan"),
    **_rows(sort, "sort"),
    **_rows(top_k, "top_k topk"),
    **_rows(map_body, "map"),
    **_rows(lapack("potrf"), "cholesky"),
    **_rows(triangular_solve, "triangular_solve"),
    **_rows(fft, "fft"),
    **_rows(quantize, "uniform_quantize uniform_dequantize"),
    **_rows(custom_call, "custom_call"),
}
"""Operation name -> rule."""

_BROADCASTING = """
    add subtract divide multiply maximum minimum remainder compare select and or xor shift_left
    shift_right_arithmetic shift_right_logical next_after power atan2 polygamma zeta complex
"""
TABLE.update({f"broadcast_{name}": TABLE[name] for name in _BROADCASTING.split()})

_ASYNC_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute")

HLO_ALIASES: dict[str, str] = {
    "clz": "count_leading_zeros",
    "conditional": "case",
    "cos": "cosine",
    "exp": "exponential",
    "opt-barrier": "optimization_barrier",
    "rng-get-and-update-state": "xla.rng_get_and_update_state",
    "sin": "sine",
    "topk": "top_k",
    **{f"{name}-start": name.replace("-", "_") for name in _ASYNC_COLLECTIVES},
    **dict.fromkeys([*(f"{name}-done" for name in _ASYNC_COLLECTIVES), "copy-done"], "async_done"),
}
"""HLO opcodes whose name is not the StableHLO name with dashes instead of underscores."""

_DIALECTS = ("stablehlo.", "mhlo.", "chlo.", "func.")


def canonical_name(op_name: str) -> str:
    """Return the name by which the table lists an operation (such as ``stablehlo.add``, ``mhlo.add``,
    ``chlo.erf``, or an HLO opcode).
    """
    for dialect in _DIALECTS:
        if op_name.startswith(dialect):
            return op_name[len(dialect) :]
    alias = HLO_ALIASES.get(op_name)
    if alias is not None:
        return alias
    return op_name if op_name in TABLE else op_name.replace("-", "_")


def find_rule(op_name: str) -> Rule | None:
    """Return the cost rule of an operation, by its name in any dialect; None if the table has none."""
    return TABLE.get(canonical_name(op_name))


def cost_of(op_name: str, op: Operation) -> Cost:
    """Return the cost of one operation; class UNKNOWN and NaN arithmetic without a row in the table."""
    rule = find_rule(op_name)
    return unknown_cost(op) if rule is None else rule(op)
