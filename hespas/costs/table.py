"""THE cost table: one row for each operation of the StableHLO specification, and the aliases of other
dialects.

Keys are StableHLO names without the dialect. ``chlo`` and ``mhlo`` operations that StableHLO does not have
stand in the same table; HLO opcodes (``exponential-minus-one``) are found through :data:`HLO_ALIASES`. An
operation that is not here is unknown: readers report it and keep its bytes as a lower bound. The rules stand
above the table, but for those of contractions and of custom calls. What is computed is said by the StableHLO
specification; counts follow the convention of :mod:`hespas.costs.operation`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import ceil, log2, nan, prod
from typing import NamedTuple

from hespas.costs.contraction import convolution, dot, einsum, ragged_dot, valid_positions
from hespas.costs.operation import (
    FREE,
    Body,
    BodyAttributes,
    BroadcastAttributes,
    Cost,
    FftAttributes,
    Operation,
    Rule,
    ScatterAttributes,
    SelectScatterAttributes,
    SolveAttributes,
    Tensor,
    TopKAttributes,
    UpdateAttributes,
    WindowAttributes,
    arithmetic_dtype,
    is_complex,
    move_cost,
    unknown_cost,
)
from hespas.graph import CollectiveKind, OpClass

__all__ = [
    "COLLECTIVE_KINDS",
    "HLO_ALIASES",
    "LAPACK_ROUTINES",
    "TABLE",
    "Payload",
    "canonical_name",
    "cost_of",
    "find_rule",
    "lapack",
    "payload",
    "quantize",
    "top_k",
]


# --- rules of arithmetic: elementwise, reductions, windows, normalisation and sorting


def _elementwise(
    flops: float = 1.0,
    *,
    complex_flops: float | None = None,
    transcendentals: float = 0.0,
    op_class: OpClass = OpClass.ELEMENTWISE,
) -> Rule:
    """So many FLOPs and transcendentals for each result element, in the type that is expressed; a complex
    add is 2 FLOPs and a complex multiply 6.
    """
    of_complex = 2 * flops if complex_flops is None else complex_flops

    def rule(op: Operation) -> Cost:
        factor = of_complex if op_class is OpClass.ELEMENTWISE and is_complex(op.operands[-1]) else flops
        elements = op.results[0].elements
        done = factor * elements if factor else 0.0
        return Cost(
            op_class,
            done,
            done,
            transcendentals * elements if transcendentals else 0.0,
            op.read_bytes,
            op.written_bytes,
            arithmetic_dtype(op.operands),
        )

    return rule


quantize = _elementwise(2.0, op_class=OpClass.QUANTIZE)
"""Scale and shift: two FLOPs for each element, in the type that is expressed; bytes at storage width."""


def _applied(op: Operation, op_class: OpClass, times: float, flops: float, transcendentals: float) -> Cost:
    """A body applied ``times`` times over all operands and results."""
    total = times * flops
    rate = op.operands[0].code if op.operands else -1
    return Cost(op_class, total, total, times * transcendentals, op.read_bytes, op.written_bytes, rate)


def _reduce(op: Operation) -> Cost:
    """(n_in - n_out) applications of the combined body; reads **all** inputs and init values."""
    if not isinstance(op.attributes, BodyAttributes) or not op.operands:
        return unknown_cost(op, OpClass.REDUCTION)
    steps = op.operands[0].elements - op.results[0].elements
    body = op.attributes.body
    return _applied(op, OpClass.REDUCTION, max(steps, 0.0), body.flops, body.transcendentals)


def _reduce_window(op: Operation) -> Cost:
    """(taps - 1) applications for each result element, where taps on padding or dilation holes are left out.

    ``useful_flops`` counts real taps only, ``flops`` all positions of the window.
    """
    attributes = op.attributes
    if not isinstance(attributes, WindowAttributes) or not op.operands:
        return unknown_cost(op, OpClass.WINDOW)
    source, result = op.operands[0], op.results[0]
    applications = result.elements * (prod(dim.size for dim in attributes.window) - 1)
    pairs = [
        float(valid_positions(extent, out, dim))
        for extent, out, dim in zip(source.shape, result.shape, attributes.window, strict=True)
    ]
    useful = max(prod(pairs) - result.elements, 0.0) if result.elements == result.elements else nan
    cost = _applied(op, OpClass.WINDOW, applications, attributes.body.flops, attributes.body.transcendentals)
    return replace(cost, useful_flops=useful * attributes.body.flops)


def _select_and_scatter(op: Operation) -> Cost:
    """(window - 1) comparisons and one scatter body for each source element."""
    attributes = op.attributes
    if not isinstance(attributes, SelectScatterAttributes):
        return unknown_cost(op, OpClass.WINDOW)
    picks = attributes.window_elements - 1
    flops = picks * attributes.select.flops + attributes.scatter.flops
    transcendentals = picks * attributes.select.transcendentals + attributes.scatter.transcendentals
    return _applied(op, OpClass.WINDOW, op.operands[1].elements, flops, transcendentals)


def _map_body(op: Operation) -> Cost:
    """The body once for each element."""
    if not isinstance(op.attributes, BodyAttributes):
        return unknown_cost(op, OpClass.MAP)
    body = op.attributes.body
    return _applied(op, OpClass.MAP, op.results[0].elements, body.flops, body.transcendentals)


def _scan(op: Operation) -> Cost:
    """The body once for each slice along the scanned dimension."""
    if not isinstance(op.attributes, BodyAttributes) or not op.operands:
        return unknown_cost(op, OpClass.REDUCTION)
    trips = float(op.attributes.extent) if op.attributes.extent >= 0 else nan
    return _applied(
        op, OpClass.REDUCTION, trips, op.attributes.body.flops, op.attributes.body.transcendentals
    )


def _batch_norm(per_element: int) -> Rule:
    """About ``per_element`` FLOPs for each input element and one rsqrt for each feature (approximate)."""

    def rule(op: Operation) -> Cost:
        features: Tensor = op.operands[1]
        cost = _applied(op, OpClass.NORMALIZATION, op.operands[0].elements, per_element, 0.0)
        return replace(cost, transcendentals=features.elements)

    return rule


def _comparisons(op: Operation, extent: int, depth: int, body: Body) -> Cost:
    """``depth`` comparisons for each element of the first operand; unknown where the extent is."""
    times = op.operands[0].elements * depth if extent >= 0 else nan
    return _applied(op, OpClass.SORT, times, body.flops, body.transcendentals)


def _sort(op: Operation) -> Cost:
    """elements x ceil(log2 extent) comparisons; inputs and outputs pass once."""
    if not isinstance(op.attributes, BodyAttributes) or not op.operands:
        return unknown_cost(op, OpClass.SORT)
    extent = op.attributes.extent
    depth = ceil(log2(extent)) if extent > 1 else 0
    return _comparisons(op, extent, depth, op.attributes.body)


def top_k(op: Operation) -> Cost:
    """elements x ceil(log2 k) comparisons, at least one each."""
    if not isinstance(op.attributes, TopKAttributes) or not op.operands:
        return unknown_cost(op, OpClass.SORT)
    depth = max(ceil(log2(op.attributes.k)), 1) if op.attributes.k > 0 else 0
    return _comparisons(op, 0, depth, Body(1.0))


# --- dense linear algebra and Fourier transforms.
#
# Operation counts: G. H. Golub, C. F. Van Loan, "Matrix Computations", 4th edition. Factorisations that
# iterate (eigenvalues, singular values) have no exact count; the book's usual totals stand for them. A
# transform of length L is counted as 5 L log2 L (the radix-2 count), half of it for real input or output.


_FACTORISATIONS: dict[str, tuple[float, float]] = {
    routine: coefficients
    for routines, coefficients in {
        "potrf": (0.0, 1 / 3),
        "getrf": (1.0, -1 / 3),
        "geqrf geqp3 orgqr ungqr": (2.0, -2 / 3),
        "sytrd hetrd": (0.0, 4 / 3),
        "syevd heevd": (0.0, 9.0),
        "gehrd": (0.0, 10 / 3),
        "geev gees": (0.0, 25.0),
        "gesdd gesvd gesvdj": (4.0, 22.0),
    }.items()
    for routine in routines.split()
}
"""Routine -> coefficients of (m n^2, n^3) for one m x n matrix."""

LAPACK_ROUTINES: frozenset[str] = frozenset({*_FACTORISATIONS, "trsm"})
"""Routine names without the type letter."""


def _matrix_batch(tensor: Tensor) -> float:
    """Matrices in a stack of them, NaN unknown."""
    batch = tensor.shape[:-2]
    return nan if min(batch, default=0) < 0 else float(prod(batch))


def _extent(tensor: Tensor, dim: int) -> float:
    extent = tensor.shape[dim]
    return nan if extent < 0 else float(extent)


def _dense(op: Operation, flops: float) -> Cost:
    return Cost(OpClass.LINALG, flops, flops, 0.0, op.read_bytes, op.written_bytes, op.operands[0].code)


def lapack(routine: str) -> Rule:
    """The count of one LAPACK or cuSOLVER routine on the first operand, a stack of m x n matrices."""
    if routine == "trsm":
        return _triangular_solve
    cross, cube = _FACTORISATIONS[routine]

    def rule(op: Operation) -> Cost:
        if not op.operands or len(op.operands[0].shape) < 2:
            return unknown_cost(op, OpClass.LINALG)
        matrix = op.operands[0]
        rows, columns = _extent(matrix, -2), _extent(matrix, -1)
        long, short = max(rows, columns), min(rows, columns)
        return _dense(op, _matrix_batch(matrix) * (cross * long * short**2 + cube * short**3))

    return rule


def _triangular_solve(op: Operation) -> Cost:
    """Batch x n^2 x k for an n x n matrix and k right-hand sides."""
    left_side = op.attributes.left_side if isinstance(op.attributes, SolveAttributes) else True
    if len(op.operands) < 2 or len(op.operands[0].shape) < 2 or len(op.operands[1].shape) < 2:
        return unknown_cost(op, OpClass.LINALG)
    matrix, right = op.operands[0], op.operands[1]
    sides = _extent(right, -1 if left_side else -2)
    return _dense(op, _matrix_batch(matrix) * _extent(matrix, -1) ** 2 * sides)


def _fft(op: Operation) -> Cost:
    """5 L log2 L for each complex transform over ``lengths``, half for a real one."""
    attributes = op.attributes
    if not isinstance(attributes, FftAttributes) or not op.operands:
        return unknown_cost(op, OpClass.FFT)
    complex_side = op.operands[0] if attributes.kind in {"IFFT", "FFT", "RFFT"} else op.results[0]
    points = prod(attributes.lengths)
    if points < 1:
        return Cost(OpClass.FFT, bytes_read=op.read_bytes, bytes_written=op.written_bytes)
    transforms = complex_side.elements / points
    factor = 2.5 if attributes.kind in {"RFFT", "IRFFT"} else 5.0
    flops = factor * points * log2(points) * transforms
    rate = op.operands[0].code
    return Cost(OpClass.FFT, flops, flops, 0.0, op.read_bytes, op.written_bytes, rate)


# --- rules of operations that move or select data

_INDEX_OPERANDS_OF_UPDATE = 2
"""``dynamic_update_slice`` takes operand, update, then scalar start indices."""


def _bitcast_convert(op: Operation) -> Cost:
    """A view where the width stays, else a move."""
    source, result = op.operands[0].dtype, op.results[0].dtype
    if source is not None and result is not None and source.bits == result.bits:
        return FREE
    return move_cost(op)


def _broadcast(op: Operation) -> Cost:
    """No traffic where consumers fuse it (the default); otherwise operand and result."""
    if isinstance(op.attributes, BroadcastAttributes) and op.attributes.materialised:
        return move_cost(op, OpClass.BROADCAST)
    return Cost(OpClass.BROADCAST)


def _slice_read(op: Operation) -> Cost:
    """What is kept is read and written; start indices are read."""
    indices = sum(tensor.bytes for tensor in op.operands[1:])
    return Cost(OpClass.SLICE, bytes_read=op.written_bytes + indices, bytes_written=op.written_bytes)


def _update_slice(op: Operation) -> Cost:
    """In place: the update is read and written. Otherwise the operand is copied besides."""
    operand, update = op.operands[0].bytes, op.operands[1].bytes
    indices = sum(tensor.bytes for tensor in op.operands[_INDEX_OPERANDS_OF_UPDATE:])
    in_place = isinstance(op.attributes, UpdateAttributes) and op.attributes.in_place
    copied = 0.0 if in_place else operand
    return Cost(OpClass.UPDATE, bytes_read=copied + update + indices, bytes_written=copied + update)


def _gather(op: Operation) -> Cost:
    """Indices and what is picked (at most the operand) are read, the result is written."""
    indices = sum(tensor.bytes for tensor in op.operands[1:])
    picked = min(op.written_bytes, op.operands[0].bytes) if op.operands else nan
    return Cost(OpClass.GATHER, bytes_read=indices + picked, bytes_written=op.written_bytes)


def _scatter(op: Operation) -> Cost:
    """One body for each update. Indices and updates are read, touched results written (read too by the body).

    Not in place, every operand is copied besides.
    """
    attributes = op.attributes
    if not isinstance(attributes, ScatterAttributes):
        return Cost(OpClass.SCATTER, nan, nan, nan, op.read_bytes, op.written_bytes)
    first_update = attributes.num_inputs + 1
    updates = op.operands[first_update:]
    touched = sum(tensor.bytes for tensor in updates)
    copied = (
        0.0 if attributes.in_place else sum(tensor.bytes for tensor in op.operands[: attributes.num_inputs])
    )
    reads = touched if attributes.body.reads_first else 0.0
    times = updates[0].elements if updates else nan
    flops = times * attributes.body.flops * (2 if updates and is_complex(updates[0]) else 1)
    return Cost(
        OpClass.SCATTER,
        flops,
        flops,
        times * attributes.body.transcendentals,
        op.operands[attributes.num_inputs].bytes + touched + reads + copied,
        touched + copied,
        op.operands[0].code,
    )


# --- the table


def _custom_call(op: Operation) -> Cost:
    """By its target; the rules of targets are loaded when a program calls one."""
    from hespas.costs.custom_calls import custom_call

    return custom_call(op)


def _rows(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


def _always(cost: Cost, names: str) -> dict[str, Rule]:
    """Views, structure and what consumers fuse: one cost whatever the types."""
    return _rows(lambda op: cost, names)


def _moves(op_class: OpClass, names: str) -> dict[str, Rule]:
    """No arithmetic; every distinct operand read, every result written."""
    return _rows(partial(move_cost, op_class=op_class), names)


_SPECIAL = {
    "bessel_i1e": (87, 1),
    "digamma": (73, 3),
    "erf_inv": (37, 2),
    "lgamma": (53, 4),
    "polygamma": (261, 19),
    "zeta": (122, 11),
}
"""FLOPs and transcendentals for each element, as ``chlo-legalize-to-stablehlo`` expands them for f32."""

TABLE: dict[str, Rule] = {
    **_rows(
        _elementwise(),
        """
        add subtract divide negate abs sign maximum minimum remainder compare select and or xor not shift_left
        shift_right_arithmetic shift_right_logical popcnt count_leading_zeros floor ceil round_nearest_afz
        round_nearest_even is_finite convert reduce_precision is_inf is_neg_inf is_pos_inf next_after mulhi
        conj stochastic_convert
        """,
    ),
    **_rows(_elementwise(complex_flops=6.0), "multiply square"),
    **_rows(_elementwise(2.0), "clamp"),
    **_rows(
        _elementwise(0.0, transcendentals=1.0, op_class=OpClass.TRANSCENDENTAL),
        """
        exponential exponential_minus_one log log_plus_one logistic tanh tan sine cosine sqrt rsqrt cbrt power
        atan2 acos acosh asin asinh atan atanh cosh erf erfc sinh _asin_acos_kernel
        """,
    ),
    **{
        name: _elementwise(flops, transcendentals=heavy, op_class=OpClass.TRANSCENDENTAL)
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
    # Regions of control flow stand in the graph as nodes of their own.
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
    # Local memory traffic only: payloads and groups stand in the collective table.
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
    **_rows(_bitcast_convert, "bitcast_convert"),
    **_rows(_broadcast, "broadcast_in_dim broadcast dynamic_broadcast_in_dim"),
    **_rows(_slice_read, "slice dynamic_slice real_dynamic_slice"),
    **_rows(_update_slice, "dynamic_update_slice"),
    **_rows(_gather, "gather dynamic_gather torch_index_select"),
    **_rows(_scatter, "scatter"),
    **_rows(dot, "dot_general dot"),
    **_rows(einsum, "einsum unary_einsum"),
    **_rows(ragged_dot, "ragged_dot"),
    **_rows(convolution, "convolution dynamic_conv"),
    **_rows(_reduce, "reduce"),
    **_rows(_reduce_window, "reduce_window"),
    **_rows(_select_and_scatter, "select_and_scatter"),
    **_rows(_batch_norm(8), "batch_norm_training"),
    **_rows(_batch_norm(4), "batch_norm_inference"),
    **_rows(_batch_norm(12), "batch_norm_grad"),
    **_rows(_scan, "scan"),
    **_rows(_sort, "sort"),
    **_rows(top_k, "top_k topk"),
    **_rows(_map_body, "map"),
    **_rows(lapack("potrf"), "cholesky"),
    **_rows(_triangular_solve, "triangular_solve"),
    **_rows(_fft, "fft"),
    **_rows(quantize, "uniform_quantize uniform_dequantize"),
    **_rows(_custom_call, "custom_call"),
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


# --- What a collective sends: Chakra's ``comm_size``, bytes on the wire.
#
# ``group_size`` is N. Sent bytes are those of bandwidth-optimal algorithms, per device. Bytes are those of
# one device in this program: a variadic collective counts the sum over its operands.


COLLECTIVE_KINDS: dict[str, CollectiveKind] = {
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "cross-replica-sum": CollectiveKind.ALL_REDUCE,
    "all_gather": CollectiveKind.ALL_GATHER,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "all_to_all": CollectiveKind.ALL_TO_ALL,
    "ragged_all_to_all": CollectiveKind.RAGGED_ALL_TO_ALL,
    "collective_broadcast": CollectiveKind.BROADCAST,
    "collective_reduce": CollectiveKind.REDUCE,
}
"""Canonical operation name (see :func:`hespas.costs.canonical_name`) -> kind."""


class Payload(NamedTuple):
    """``comm_bytes``: the size a Chakra trace states; ``sent_bytes``: what one device puts on the wire.

    ``is_bound`` says that both are upper bounds, because the sizes are run-time values.
    """

    comm_bytes: float
    sent_bytes: float
    is_bound: bool = False


def payload(kind: CollectiveKind, operand_bytes: float, result_bytes: float, group_size: int) -> Payload:
    """The payload of one collective; ``group_size`` -1 (groups differ or unknown) leaves sent bytes unknown.

    All-gather counts the shard and reduce-scatter the full input: both are the operand.
    """
    others = float(group_size - 1) if group_size > 0 else nan
    share = others / group_size if group_size > 0 else nan
    size = operand_bytes
    if kind is CollectiveKind.RAGGED_ALL_TO_ALL:
        return Payload(result_bytes, share * result_bytes, is_bound=True)
    if kind is CollectiveKind.ALL_REDUCE:
        return Payload(size, 2.0 * share * size)
    if kind is CollectiveKind.ALL_GATHER:
        return Payload(size, others * size)
    if kind in {CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL}:
        return Payload(size, share * size)
    return Payload(size, size if group_size != 1 else 0.0)
