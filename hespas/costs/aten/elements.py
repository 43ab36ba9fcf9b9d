"""Costs of PyTorch's elementwise operations, copies, gathers, scatters, losses and dropout.

A row of the table gives the number of leading arguments that may be inputs; a tensor after them is ``out=``.
Counts per result element follow the table of :mod:`hespas.costs.table`: an arithmetic step is one FLOP. A
function that hardware approximates (exp, tanh, sqrt; not division) is one transcendental.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isnan, log2, nan

from hespas.costs.aten.call import (
    AtenCost,
    AtenRule,
    Call,
    Strided,
    dense,
    needs,
    promoted,
    scalar_type,
    simple,
    unknown,
)
from hespas.graph import DType, OpClass, find_dtype

__all__ = [
    "POINTWISE",
    "UNSORTED_INDICES",
    "Pointwise",
    "cast",
    "concatenate",
    "copy_into",
    "dropout",
    "embedding",
    "embedding_bag",
    "embedding_gradient",
    "fill",
    "foreach",
    "gather",
    "generate",
    "index",
    "index_put",
    "index_select",
    "masked_select",
    "nll_loss",
    "nll_loss_backward",
    "optimizer",
    "place_along",
    "pointwise",
    "repeat",
    "scatter",
    "slice_backward",
    "table_lookup",
]

_BOOL = find_dtype("i1")


@dataclass(frozen=True, slots=True)
class Pointwise:
    """Costs of an elementwise operation. ``inputs`` is the number of leading arguments that may be input
    tensors. ``flops`` and ``transcendentals`` are per element.

    ``result`` is the result type: ``same`` (promoted), ``bool``, ``float`` (whole numbers become float32) or
    ``last`` (the type of the last input, as in ``where``). ``alpha`` is the position of a factor that costs
    one more FLOP per element unless it is 1 (-1: none).
    """

    inputs: int
    flops: float = 1.0
    transcendentals: float = 0.0
    result: str = "same"
    alpha: int = -1


def _rows(names: str, row: Pointwise) -> dict[str, Pointwise]:
    return dict.fromkeys(names.split(), row)


POINTWISE: dict[str, Pointwise] = {
    **_rows(
        "neg abs sign sgn relu floor ceil round trunc frac bitwise_not conj_physical positive absolute "
        "negative relu6 square",
        Pointwise(1),
    ),
    **_rows("logical_not isnan isinf isfinite signbit", Pointwise(1, result="bool")),
    **_rows(
        "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh asinh acosh "
        "atanh tanh sigmoid erf erfc erfinv lgamma digamma logit",
        Pointwise(1, 0.0, 1.0, "float"),
    ),
    **_rows("reciprocal", Pointwise(1, 1.0, 0.0, "float")),
    **_rows("silu log_sigmoid_forward", Pointwise(1, 1.0, 1.0)),
    **_rows("gelu", Pointwise(1, 4.0, 1.0)),
    **_rows("mish softplus elu celu selu", Pointwise(1, 3.0, 2.0)),
    **_rows("hardtanh leaky_relu threshold hardshrink softshrink", Pointwise(1, 2.0)),
    **_rows("hardsigmoid hardswish nan_to_num", Pointwise(1, 3.0)),
    **_rows("add sub rsub", Pointwise(2, alpha=2)),
    **_rows(
        "subtract mul multiply maximum minimum fmax fmin fmod remainder clamp_min clamp_max floor_divide "
        "bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ bitwise_left_shift bitwise_right_shift "
        "__lshift__ __rshift__ threshold_backward hardtanh_backward leaky_relu_backward prelu",
        Pointwise(2),
    ),
    **_rows("div divide true_divide", Pointwise(2, result="float")),
    **_rows("eq ne lt le gt ge logical_and logical_or logical_xor isclose", Pointwise(2, result="bool")),
    **_rows("pow atan2 hypot xlogy copysign nextafter", Pointwise(2, 0.0, 1.0)),
    **_rows("clamp clip", Pointwise(3, 2.0)),
    **_rows("where _s_where", Pointwise(3, result="last")),
    **_rows("masked_fill", Pointwise(3, result="first")),
    **_rows("addcmul addcdiv", Pointwise(3, 2.0, alpha=3)),
    **_rows("tril triu", Pointwise(1, 0.0)),
    **_rows(
        "tanh_backward sigmoid_backward hardswish_backward hardsigmoid_backward smooth_l1_loss mse_loss "
        "huber_loss",
        Pointwise(2, 3.0),
    ),
    **_rows("silu_backward", Pointwise(2, 5.0, 1.0)),
    **_rows("gelu_backward", Pointwise(2, 8.0, 2.0)),
    **_rows("elu_backward softplus_backward", Pointwise(2, 3.0, 1.0)),
    **_rows("native_dropout_backward", Pointwise(2, 2.0)),
    **_rows("glu_backward", Pointwise(2, 4.0, 1.0)),
    **_rows("binary_cross_entropy", Pointwise(3, 4.0, 2.0)),
    **_rows("lerp mse_loss_backward smooth_l1_loss_backward", Pointwise(3, 3.0)),
}
"""Operation without its trailing underscore -> row."""

_POWERS = {1.0: 0.0, 2.0: 1.0, 3.0: 2.0, -1.0: 1.0, -2.0: 2.0}
"""Exponent that is computed by multiplications -> FLOPs."""

_GELU_TANH_FLOPS = 8.0


def _shape(inputs: list[Strided]) -> tuple[int, ...] | None:
    """Return the shape to which the input tensors broadcast; None if they do not broadcast."""
    rank = max((len(tensor.shape) for tensor in inputs), default=0)
    shape = [1] * rank
    for tensor in inputs:
        for position, extent in enumerate(tensor.shape, rank - len(tensor.shape)):
            if extent != shape[position] and 1 not in (extent, shape[position]):
                return None
            shape[position] = extent if shape[position] == 1 else shape[position]
    return tuple(shape)


def _result_type(row: Pointwise, inputs: list[Strided], *, rounds: bool) -> DType | None:
    if row.result == "bool":
        return _BOOL
    if row.result == "first":
        return inputs[0].dtype
    return promoted(
        inputs[1:] if row.result == "last" and len(inputs) > 1 else inputs,
        to_float=row.result == "float" and not rounds,
    )


def _per_element(name: str, row: Pointwise, call: Call) -> tuple[float, float]:
    """Return the FLOPs and transcendentals per element of an operation. Some arguments change them, such as a
    factor of 1.
    """
    if name == "pow":
        exponent = call.real(1)
        if exponent is None:
            return row.flops, row.transcendentals if call.tensor(1) is not None else nan
        return (_POWERS[exponent], 0.0) if exponent in _POWERS else (0.0, 1.0)
    if name == "gelu" and call.arg(1).value == "tanh":
        return _GELU_TANH_FLOPS, row.transcendentals
    factor = call.real(row.alpha) if row.alpha >= 0 else None
    return row.flops + (factor not in (None, 1.0)), row.transcendentals


def pointwise(name: str) -> AtenRule:
    """Return the cost rule of the elementwise operation ``name``. A trailing underscore means that the first
    input is overwritten.
    """
    in_place = name.endswith("_") and not name.endswith("__")
    base = name[:-1] if in_place and name not in POINTWISE else name
    row = POINTWISE[base]

    def rule(call: Call) -> AtenCost:
        inputs = call.present(*range(row.inputs))
        first = call.tensor(0)
        if not inputs or (in_place and first is None):
            return unknown(call, OpClass.ELEMENTWISE)
        shape = first.shape if in_place and first is not None else _shape(inputs)
        if shape is None:
            return unknown(call, OpClass.ELEMENTWISE)
        # A division with a rounding mode, its third argument, leaves whole numbers whole.
        rounds = base == "div" and len(call.args) > 2 and call.tensor(2) is None
        target = first if in_place else call.last_output(row.inputs)
        dtype = _result_type(row, inputs, rounds=rounds) if target is None else target.dtype
        result = dense(dtype, shape)
        flops, transcendentals = _per_element(base, row, call)
        op_class = OpClass.TRANSCENDENTAL if transcendentals and not flops else OpClass.ELEMENTWISE
        return simple(
            inputs,
            [result],
            op_class=op_class,
            flops=flops * result.elements,
            transcendentals=transcendentals * result.elements,
            rate=promoted(inputs),
        )

    return rule


@needs(OpClass.MOVE, 0, 1)
def copy_into(call: Call, target: Strided, source: Strided) -> AtenCost:
    """Return the cost of ``copy_``: the source is read and the target written. A type conversion is one FLOP
    per element.
    """
    return _moved(source, target.dense)


def _moved(source: Strided, result: Strided) -> AtenCost:
    converts = source.dtype is not result.dtype
    return simple(
        [source],
        [result],
        op_class=OpClass.ELEMENTWISE if converts else OpClass.MOVE,
        flops=float(result.elements) if converts else 0.0,
        read=source.bytes,
    )


@needs(OpClass.MOVE, 0)
def cast(call: Call, source: Strided, *, position: int) -> AtenCost | None:
    """Return the cost of the copy that ``_to_copy``, ``to`` or ``clone`` makes. ``position`` is the argument
    with the result type (-1: none).
    """
    explicit = scalar_type(call.integer(position)) if position >= 0 else None
    if position >= 0 and explicit is None and not call.has_values:
        return None
    return _moved(source, dense(explicit or source.dtype, source.shape))


def concatenate(call: Call) -> AtenCost:
    """Return the cost of ``cat``: every tensor of the list is read and written once, for any dimension."""
    tensors = call.listed(0)
    if tensors is None:
        return unknown(call, OpClass.MOVE)
    nonempty = [tensor for tensor in tensors if tensor.shape != (0,)]
    out = call.last_output(1)
    dtype = out.dtype if out is not None else promoted(nonempty) if nonempty else None
    written = sum(tensor.elements for tensor in nonempty)
    shape = _joined(nonempty, call.integer(1))
    result = dense(dtype, shape or (written,))
    answer = simple(nonempty, [result], op_class=OpClass.MOVE)
    return answer if shape else answer._replace(results=())


def _joined(tensors: list[Strided], dim: int | None) -> tuple[int, ...] | None:
    if not tensors or dim is None or not -len(tensors[0].shape) <= dim < len(tensors[0].shape):
        return None
    rank = len(tensors[0].shape)
    dim %= rank
    rests = {tensor.shape[:dim] + tensor.shape[dim + 1 :] for tensor in tensors if len(tensor.shape) == rank}
    if len(rests) != 1 or any(len(tensor.shape) != rank for tensor in tensors):
        return None
    total = sum(tensor.shape[dim] for tensor in tensors)
    return (*tensors[0].shape[:dim], total, *tensors[0].shape[dim + 1 :])


@needs(OpClass.GENERATE, 0)
def fill(call: Call, target: Strided) -> AtenCost:
    """Return the cost of ``fill_``, ``zero_`` and random numbers: the target is written, nothing is read."""
    answer = simple([], [target], rate=target.dtype)
    return answer._replace(operands=(target.plain,))


def generate(call: Call) -> AtenCost:
    """Return the cost of ``arange``. The number of elements follows from the range, because ``out=`` may be
    resized.
    """
    out = call.last_output(0)
    if out is None:
        return unknown(call, OpClass.GENERATE)
    numbers = [call.real(position) for position in range(3)]
    valid = [number for number in numbers if number is not None]
    count = float(out.elements) if out.elements else nan
    if len(valid) == 3 and valid[2]:
        length = (valid[1] - valid[0]) / valid[2]
        count = float(-int(-length // 1)) if 0 <= length < 1 << 48 else nan
    if isnan(count):
        return unknown(call, OpClass.GENERATE)
    return simple(
        [], [dense(out.dtype, (int(count),))], op_class=OpClass.GENERATE, flops=count, rate=out.dtype
    )


def foreach(name: str) -> AtenRule:
    """Return the cost rule of ``_foreach_NAME``, which applies an elementwise operation to lists of
    tensors.
    """
    base = name.removeprefix("_foreach_")
    in_place = base.endswith("_")
    row = POINTWISE.get(base.rstrip("_"), Pointwise(3, nan, nan))

    def rule(call: Call) -> AtenCost:
        lists = [call.listed(position) for position in range(max(row.inputs, 1))]
        present = [tensors for tensors in lists if tensors is not None]
        if lists[0] is None or (in_place and base in ("zero_", "copy_") and not present):
            return unknown(call, OpClass.ELEMENTWISE)
        elements = sum(tensor.elements for tensor in lists[0])
        inputs = [tensor for group in present for tensor in group]
        results = [tensor.dense for tensor in lists[0]]
        if base == "zero_":
            return simple([], results, op_class=OpClass.GENERATE)
        if base == "copy_":
            return simple(present[-1], results, op_class=OpClass.MOVE)
        return simple(
            inputs,
            results,
            op_class=OpClass.ELEMENTWISE,
            flops=row.flops * elements,
            transcendentals=row.transcendentals * elements,
        )

    return rule


_ADAM_FLOPS, _SGD_FLOPS = 12.0, 4.0


def optimizer(call: Call) -> AtenCost:
    """Return the cost of a fused optimizer over four lists of tensors: parameters, gradients, first and
    second moments. All lists are read, and all except the gradients are written.
    """
    lists = [call.listed(position) for position in range(4)]
    present = [tensors for tensors in lists if tensors is not None]
    if lists[0] is None or lists[1] is None:
        return unknown(call, OpClass.ELEMENTWISE)
    elements = float(sum(tensor.elements for tensor in lists[0]))
    is_adam = "adam" in call.name
    if is_adam and len(present) < 4:
        return unknown(call, OpClass.ELEMENTWISE)
    state = [tensor for position, group in enumerate(present) if position != 1 for tensor in group]
    return simple(
        [tensor for group in present for tensor in group],
        [tensor.dense for tensor in state],
        op_class=OpClass.ELEMENTWISE,
        flops=(_ADAM_FLOPS if is_adam else _SGD_FLOPS) * elements,
        transcendentals=elements if is_adam else 0.0,
    )


def _picked(source: Strided, indices: Strided, shape: tuple[int, ...]) -> AtenCost:
    """Return the cost of a gather. It reads the ``indices`` and the gathered elements (at most all of
    ``source``), and writes the result of shape ``shape``.
    """
    result = dense(source.dtype, shape)
    read = indices.bytes + min(result.bytes, source.bytes)
    return simple([source, indices], [result], op_class=OpClass.GATHER, read=read)


@needs(OpClass.GATHER, 0, 2)
def index_select(call: Call, source: Strided, indices: Strided) -> AtenCost | None:
    """Return the cost of ``index_select`` (source, dim, indices). A missing ``dim`` is 0 for a vector."""
    rank = len(source.shape)
    dim = 0 if rank == 1 else call.integer(1)
    if dim is None or not -rank <= dim < rank:
        return None
    dim %= rank
    return _picked(source, indices, (*source.shape[:dim], indices.elements, *source.shape[dim + 1 :]))


@needs(OpClass.GATHER, 0)
def gather(call: Call, source: Strided, *, indices_at: int) -> AtenCost | None:
    """Return the cost of ``gather`` (source, dim, indices, ...) and ``take`` (source, indices): one element
    per index.
    """
    indices = call.tensor(indices_at)
    return None if indices is None else _picked(source, indices, indices.shape)


@needs(OpClass.GATHER, 0, 1)
def embedding(call: Call, weight: Strided, indices: Strided) -> AtenCost | None:
    """Return the cost of ``embedding`` (weight, indices): one row of the weight per index."""
    if len(weight.shape) != 2:
        return None
    return _picked(weight, indices, (*indices.shape, weight.shape[1]))


@needs(OpClass.GATHER, 0)
def index(call: Call, source: Strided) -> AtenCost | None:
    """Return the cost of ``index``. It is unknown if the trace lacks the list of index tensors, as most
    traces do.
    """
    lists = call.listed(1)
    if not lists or len(lists) > len(source.shape):
        return None
    if any(tensor.dtype == _BOOL for tensor in lists):
        return None
    longest = max(lists, key=lambda tensor: tensor.elements)
    shape = (*longest.shape, *source.shape[len(lists) :])
    result = dense(source.dtype, shape)
    indices = 8.0 * sum(tensor.stored for tensor in lists)
    return simple([source], [result], read=indices + min(result.bytes, source.bytes))


@needs(OpClass.SCATTER, 0, 2)
def index_put(call: Call, target: Strided, values: Strided, *, copies: bool = False) -> AtenCost | None:
    """Return the cost of ``index_put_``. The values are read and written to the target, or added to it.
    Indices count as in ``index``.

    With ``copies`` the operation is not in place, so that the whole target is also copied.
    """
    lists = call.listed(1)
    if not lists or len(lists) > len(target.shape):
        return None
    longest = max(lists, key=lambda tensor: tensor.elements)
    touched = dense(target.dtype, (*longest.shape, *target.shape[len(lists) :]))
    adds = call.flag(3) is True
    read = 8.0 * sum(tensor.stored for tensor in lists) + values.bytes + (touched.bytes if adds else 0.0)
    copied = target.bytes if copies else 0.0
    return simple(
        [target, values],
        [target.dense],
        flops=float(touched.elements) if adds else 0.0,
        read=read + copied,
        written=touched.bytes + copied,
    )


@needs(OpClass.SCATTER, 0, 2)
def scatter(call: Call, target: Strided, indices: Strided, *, adds: bool, copies: bool = False) -> AtenCost:
    """Return the cost of ``scatter`` (target, dim, indices, source or value), which writes one element per
    index. If ``adds``, these elements are read first.

    With ``copies`` the operation is not in place, so that the whole target is also copied.
    """
    source = call.tensor(3)
    touched = float(indices.elements) * target.width
    read = (
        indices.bytes + (touched if source is not None and source.shape else 0.0) + (touched if adds else 0.0)
    )
    copied = target.bytes if copies else 0.0
    return simple(
        call.present(0, 2, 3),
        [target.dense],
        flops=float(indices.elements) if adds else 0.0,
        read=read + copied,
        written=touched + copied,
    )


@needs(OpClass.SCATTER, 0, 2, 3)
def place_along(
    call: Call, target: Strided, indices: Strided, source: Strided, *, adds: bool, copies: bool = False
) -> AtenCost:
    """Return the cost of ``index_add_`` and ``index_copy_`` (target, dim, indices, source), which write
    slices of the target. If ``adds``, the slices are read first.

    With ``copies`` the operation is not in place, so that the whole target is also copied.
    """
    touched = float(source.elements) * target.width
    copied = target.bytes if copies else 0.0
    return simple(
        [target, indices, source],
        [target.dense],
        flops=float(source.elements) if adds else 0.0,
        read=indices.bytes + source.bytes + (touched if adds else 0.0) + copied,
        written=touched + copied,
    )


UNSORTED_INDICES = 3072
"""Largest number of indices whose gradients PyTorch adds to an embedding table without sorting them
(``Embedding.cu``).
"""


@needs(OpClass.SCATTER, 0, 1)
def embedding_gradient(call: Call, grad: Strided, indices: Strided) -> AtenCost | None:
    """Return the cost of ``embedding_dense_backward`` (gradient, indices, rows, padding index, scale by
    frequency), which adds gradients to rows of a table.

    The table is cleared. Up to :data:`UNSORTED_INDICES` indices, unless their gradients are scaled by
    frequency, one kernel reads the changed rows, adds gradients and writes them (``Embedding.cu``). Others
    are sorted together with their positions, in passes of 8 bits that read and write both. Gradients are
    added in f32 by parts of equal indices, which are read again for the sum of each row
    (``EmbeddingBackwardKernel.cu``).
    """
    rows = call.integer(2)
    if rows is None or not grad.shape or rows < 0:
        return None
    table = dense(grad.dtype, (rows, grad.shape[-1]))
    changed = min(indices.elements, rows) * grad.shape[-1]
    if indices.elements <= UNSORTED_INDICES and call.flag(4) is not True:
        changed_bytes = grad.width * changed
        return simple(
            [grad, indices],
            [table],
            flops=float(grad.elements),
            read=grad.bytes + indices.bytes + changed_bytes,
            written=table.bytes + changed_bytes,
        )
    sorted_bytes = 2 * indices.bytes * max(ceil(log2(max(rows, 2)) / 8), 1)
    return simple(
        [grad, indices],
        [table],
        flops=float(grad.elements),
        read=grad.bytes + indices.bytes + sorted_bytes + 4.0 * changed,
        written=table.bytes + sorted_bytes + (4.0 + grad.width) * changed,
    )


@needs(OpClass.GATHER, 0, 1, 2)
def embedding_bag(call: Call, weight: Strided, indices: Strided, offsets: Strided) -> AtenCost | None:
    """Return the cost of ``embedding_bag`` (weight, indices, offsets, ...): rows are gathered and summed per
    bag.
    """
    if len(weight.shape) != 2 or not offsets.shape:
        return None
    head = weight.shape[1]
    bags = offsets.shape[0]
    picked = float(indices.elements * head)
    return simple(
        [weight, indices, offsets],
        [dense(weight.dtype, (bags, head))],
        flops=max(picked - bags * head, 0.0),
        read=min(picked * weight.width, weight.bytes) + indices.bytes + offsets.bytes,
    )


@needs(OpClass.GATHER, 1, 11, 12)
def table_lookup(
    call: Call, weights: Strided, indices: Strided, offsets: Strided, *, state_at: int
) -> AtenCost | None:
    """Return the cost of a lookup in several embedding tables (``split_embedding_codegen_lookup``): rows are
    gathered and summed per bag, or averaged.

    The optimizer has one number per row of the tables at ``state_at``, from which the mean length of rows
    follows; the length of each table is in no recording. Rows that are read again come from a cache.
    """
    state = call.tensor(state_at)
    if state is None or not 0 < state.elements <= weights.elements or not offsets.elements > 1:
        return None
    length = weights.elements / state.elements
    bags, picked = offsets.elements - 1, indices.elements * length
    read = min(picked * weights.width, weights.bytes)
    return simple(
        [weights, indices, offsets],
        [dense(weights.dtype, (bags, max(round(length), 1)))],
        flops=max(picked - bags * length, 0.0),
        read=read + indices.bytes + offsets.bytes,
    )


def masked_select(call: Call) -> AtenCost:
    """Return an unknown cost: the trace does not record the number of selected elements."""
    return unknown(call, OpClass.GATHER)


@needs(OpClass.REDUCTION, 0, 1)
def nll_loss(call: Call, source: Strided, target: Strided) -> AtenCost | None:
    """Return the cost of ``nll_loss`` (log-probabilities, targets, weight, reduction), which reads one
    element per row. If the argument ``reduction`` is 0, the losses of the rows are not added up.
    """
    reduction = call.integer(3)
    if reduction is None:
        return None
    rows = target.elements
    shape = target.shape if reduction == 0 else ()
    return simple(
        [source, target],
        [dense(source.dtype, shape), dense(source.dtype, ())],
        flops=float(rows),
        read=target.bytes + rows * source.width,
    )


@needs(OpClass.SCATTER, 0, 1, 2)
def nll_loss_backward(call: Call, grad: Strided, source: Strided, target: Strided) -> AtenCost:
    """Return the cost of ``nll_loss_backward`` (gradient, log-probabilities, targets, ...), which writes a
    tensor of the input's shape.
    """
    return simple([grad, target], [source.dense], flops=float(target.elements))


@needs(OpClass.ELEMENTWISE, 0)
def dropout(call: Call, source: Strided) -> AtenCost:
    """Return the cost of ``native_dropout``, which writes scaled elements and a mask of one byte per
    element.
    """
    results = [source.dense, dense(_BOOL, source.shape)]
    return simple([source], results, flops=2.0 * source.elements)


@needs(OpClass.MOVE, 0)
def repeat(call: Call, source: Strided) -> AtenCost | None:
    """Return the cost of ``repeat``: the source is read, the tiled result is written."""
    times = call.integers(1)
    if times is None or len(times) < len(source.shape) or min(times, default=0) < 0:
        return None
    shape = (1,) * (len(times) - len(source.shape)) + source.shape
    result = dense(source.dtype, [n * count for n, count in zip(shape, times, strict=True)])
    return simple([source], [result])


@needs(OpClass.UPDATE, 0)
def slice_backward(call: Call, grad: Strided) -> AtenCost | None:
    """Return the cost of ``slice_backward`` (gradient, input sizes, ...). The result has the size of the
    forward input. It is zero except in the slice, which has the gradient.
    """
    sizes = call.integers(1)
    if sizes is None or min(sizes, default=0) < 0:
        return None
    return simple([grad], [dense(grad.dtype, sizes)])
