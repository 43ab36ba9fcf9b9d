"""Costs of kernels that Inductor generates, from their arguments, sizes and names.

A generated kernel takes, in order: tensors that it updates in place (``in_out_ptr0``, ...), tensors that it
only reads (``in_ptr0``, ...), tensors that it only writes (``out_ptr0``, ...), sizes of dynamic shapes, and
the extents of its loops (``ynumel``, ``xnumel``; of a reduction also ``rnumel``). A trace states shapes and
values of these arguments, not their names. A store covers all iterations of the loops, so an output has as
many elements as the loops have iterations. If the last tensor has another size, the first tensor is the
output and is updated in place: its bytes are read and written.

The name of a kernel lists the operations that it fuses, each once. FLOPs are of one execution of each
operation, and unknown if a part of the name is not an operation of the table.
"""

from __future__ import annotations

import re
from math import isnan, nan, prod
from typing import NamedTuple

from hespas.costs.aten.call import FLOAT32, AtenCost, Call, Strided, matrix_product, simple, unknown
from hespas.costs.aten.elements import POINTWISE
from hespas.costs.operation import Contraction
from hespas.graph import OpClass, find_dtype

__all__ = ["generated_kernel"]

_BOOL = find_dtype("i1")


class _NamedStep(NamedTuple):
    """Operation that may occur in the name of a kernel: its work per iteration, and the minimum number of
    tensors that it reads.
    """

    flops: float = 0.0
    transcendentals: float = 0.0
    inputs: int = 1
    reduces: bool = False


_MOVES = (
    "_to_copy to_copy constant_pad_nd cat clone copy slice view _unsafe_view reshape expand permute "
    "transpose t select unsqueeze squeeze stack split split_with_sizes repeat unbind detach alias as_strided "
    "convert_element_type lift_fresh_copy flip roll unfold im2col pixel_shuffle slice_backward "
    "select_backward"
)
_APART = (
    "moe_forward unified_attention unified_attention_with_output unified_kv_cache_update all_reduce "
    "rocm_unquantized_gemm"
)
"""Operations that occur in names of adjacent kernels, but are never part of a generated kernel."""
_CREATES = (
    "zeros ones full empty arange scalar_tensor fill zero zeros_like ones_like full_like empty_like "
    "new_zeros new_ones new_full new_empty new_empty_strided empty_strided iota bernoulli rand rand_like "
    "randn randn_like inductor_random inductor_seeds inductor_lookup_seed"
)
_PICKS = "embedding index gather index_select take _unsafe_index masked_select"
"""Operations that read one element per iteration from a tensor of any size."""
_PLACES = (
    "index_put index_put_ _unsafe_index_put _index_put_impl_ index_copy index_add scatter scatter_add "
    "scatter_reduce slice_scatter select_scatter copy_ embedding_dense_backward"
)
"""Operations that write a part of a tensor of any size."""
_PRODUCTS = "mm addmm bmm baddbmm linear convolution _scaled_mm matmul addmv"
"""Products of other kernels: a kernel with this name adds the bias or the input."""


def _steps(names: str, step: _NamedStep) -> dict[str, _NamedStep]:
    return dict.fromkeys(names.split(), step)


_ONE_TENSOR = (
    "sub rsub subtract mul multiply div divide true_divide maximum minimum fmax fmin fmod remainder "
    "clamp_min clamp_max floor_divide eq ne lt le gt ge pow atan2 clamp clip where _s_where masked_fill "
    "bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ bitwise_left_shift bitwise_right_shift "
    "__lshift__ __rshift__ logical_and logical_or logical_xor isclose"
)
"""Operations of several inputs, of which all except one may be numbers."""

_STEPS: dict[str, _NamedStep] = {
    **{
        name: _NamedStep(row.flops, row.transcendentals, min(row.inputs, 2))
        for name, row in POINTWISE.items()
    },
    **{
        name: _NamedStep(POINTWISE[name].flops, POINTWISE[name].transcendentals)
        for name in _ONE_TENSOR.split()
    },
    **_steps(f"{_MOVES} {_APART}", _NamedStep()),
    **_steps(_CREATES, _NamedStep(inputs=0)),
    **_steps(_PICKS, _NamedStep(inputs=2)),
    **_steps(_PLACES, _NamedStep(1.0, inputs=2)),
    **_steps(_PRODUCTS, _NamedStep(1.0)),
    **_steps("native_dropout dropout", _NamedStep(2.0)),
    **_steps("threshold", _NamedStep(2.0)),
    **_steps(
        "sum mean nansum nanmean amax amin max min prod all any argmax argmin count_nonzero cumsum cumprod",
        _NamedStep(1.0, reduces=True),
    ),
    **_steps("linalg_vector_norm norm", _NamedStep(2.0, reduces=True)),
    **_steps("var std var_mean std_mean", _NamedStep(4.0, reduces=True)),
    **_steps("logsumexp _log_softmax _softmax _safe_softmax", _NamedStep(3.0, 1.0, reduces=True)),
    **_steps("_softmax_backward_data _log_softmax_backward_data", _NamedStep(4.0, inputs=2, reduces=True)),
    **_steps(
        "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit _fused_rms_norm "
        "_native_batch_norm_legit_functional _native_batch_norm_legit_no_training layer_norm rms_norm",
        _NamedStep(6.0, reduces=True),
    ),
    **_steps(
        "native_layer_norm_backward native_group_norm_backward native_batch_norm_backward",
        _NamedStep(11.0, inputs=2, reduces=True),
    ),
    **_steps("nll_loss_forward nll_loss_backward nll_loss", _NamedStep(1.0, inputs=2, reduces=True)),
}
"""Operation in kernel names -> work per iteration of the kernel."""

_LONGEST_STEP = max(name.count("_") for name in _STEPS) + 1
_NAME = re.compile(
    r"triton_(?P<kind>poi|red|per|tem|for|mix|spl|split_scan|unk)_fused(?:_(?P<steps>\w{1,400}))?"
)
_NUMBER = re.compile(r"\d{1,6}")
_REDUCTIONS = frozenset({"red", "per", "mix", "spl", "split_scan"})


def _steps_of(text: str) -> list[str] | None:
    """Split the middle part of a kernel name into operations; None if a part is not an operation of the
    table.

    Numbers after operations, and at the end, count nodes and kernels.
    """
    words = text.split("_")
    before: dict[int, list[str]] = {0: []}
    for position in range(len(words)):
        reached = before.get(position)
        if reached is None:
            continue
        if _NUMBER.fullmatch(words[position]):
            before.setdefault(position + 1, reached)
        for end in range(min(len(words), position + _LONGEST_STEP), position, -1):
            name = "_".join(words[position:end])
            if name in _STEPS:
                before.setdefault(end, [*reached, name])
    return before.get(len(words))


class _LoopSizes(NamedTuple):
    """Iterations of a kernel's loops. ``total`` counts all loops, ``outer`` leaves out reduced loops. -1: not
    in the trace.
    """

    total: int = -1
    outer: int = -1

    @property
    def known(self) -> bool:
        return self.total >= 0

    def is_output(self, tensor: Strided) -> bool:
        """Return True if the tensor has the size that a store of the kernel covers."""
        return tensor.elements in (self.total, self.outer)


def _loops(call: Call, tensors: tuple[Strided, ...], *, reduces: bool) -> _LoopSizes:
    """Return the loop sizes, found among the numbers after the tensors.

    Sizes of dynamic shapes come first. The loops are therefore the longest run of numbers at the end whose
    product is the size of a tensor. The result is unknown if no run fits a tensor.
    """
    numbers: list[int] = []
    for position in range(len(call.args) - 1, -1, -1):
        value = None if call.tensor(position) is not None else call.integer(position)
        if value is None or value < 1:
            break
        numbers.insert(0, value)
    sizes = {tensor.elements for tensor in tensors}
    runs = [numbers[-count:] for count in range(min(3, len(numbers)), 1 if reduces else 0, -1)]
    loops = [_LoopSizes(prod(run), prod(run[:-1]) if reduces else prod(run)) for run in runs]
    whole = next((size for size in loops if size.total in sizes), None)
    return whole or next((size for size in loops if size.outer in sizes), _LoopSizes())


class _TensorUse(NamedTuple):
    """Tensors that a kernel reads and tensors that it writes. A tensor that is updated in place is in both.

    ``guessed`` is true if only names and shapes suggest an update in place, and the loop sizes do not prove
    it.
    """

    read: tuple[Strided, ...]
    written: tuple[Strided, ...]
    guessed: bool = False


def _updates_first(
    tensors: tuple[Strided, ...], loops: _LoopSizes, steps: list[str] | None, *, reduces: bool
) -> bool:
    """Return True if the first tensor is the output, updated in place, and the last tensor is only read."""
    first, last, others = tensors[0], tensors[-1], tensors[:-1]
    needed = max((_STEPS[name].inputs for name in steps or ()), default=0)
    if not others:
        return needed > 0
    if not loops.known:
        is_largest = first.elements == max(tensor.elements for tensor in tensors)
        leading = len(first.shape) - len(last.shape)
        is_broadcast = leading > 0 and first.shape[leading:] == last.shape
        return is_largest and is_broadcast
    if not loops.is_output(first):
        return False
    if not loops.is_output(last):
        writes_part = any(name in _PLACES.split() or name in ("cat", "copy") for name in steps or ())
        return last.elements < loops.total or not writes_part
    if not reduces:
        return len(others) < needed
    # A reduction reads a tensor of all its iterations.
    reads_last = all(tensor.elements < loops.total for tensor in others)
    return reads_last or _is_weight(tensors, loops, steps)


_NORMALISES = frozenset(
    {"native_layer_norm", "native_group_norm", "_fused_rms_norm", "layer_norm", "rms_norm", "rsqrt"}
)


def _is_weight(tensors: tuple[Strided, ...], loops: _LoopSizes, steps: list[str] | None) -> bool:
    """Return True if the last tensor is the weight of a norm over rows whose length equals the number of
    rows, so that sizes alone are ambiguous.
    """
    square = loops.outer * loops.outer == loops.total
    full = [tensor.elements == loops.total for tensor in tensors]
    vector = tensors[-1].shape == (loops.outer,)
    return square and vector and full[0] and not any(full[1:]) and not _NORMALISES.isdisjoint(steps or ())


_MASKED = frozenset(["relu", "hardtanh", "threshold", "native_dropout"])


def _tensor_use(call: Call, loops: _LoopSizes, steps: list[str] | None, kind: str) -> _TensorUse:
    tensors = call.tensors
    if kind == "for":
        # A foreach kernel joins kernels; the trace may have the iterations of each.
        values = [
            call.integer(position) for position in range(len(call.args)) if call.tensor(position) is None
        ]
        sizes = [value for value in values if value is not None and value > 0]
        leading = sorted(tensor.elements for tensor in tensors[: len(sizes)])
        if sizes and tensors[-1].elements not in sizes and leading == sorted(sizes):
            return _TensorUse(tensors, tensors[: len(sizes)])
        return _TensorUse(tensors[:-1], tensors[-1:])
    # An activation may write its mask to the last tensor, while its result overwrites the first tensor.
    covered = [tensor for tensor in tensors if loops.known and tensor.elements == loops.total]
    ends = len(covered) == 2 and covered[0] is tensors[0] and covered[1] is tensors[-1]
    is_mask = ends and covered[1].dtype == _BOOL and covered[0].dtype != _BOOL
    if is_mask and not _MASKED.isdisjoint(steps or ()):
        return _TensorUse(tensors[:-1], (tensors[0], tensors[-1]))
    if kind and _updates_first(tensors, loops, steps, reduces=kind in _REDUCTIONS):
        proven = len(tensors) == 1 or (loops.known and not loops.is_output(tensors[-1]))
        return _TensorUse(tensors, tensors[:1], guessed=not proven)
    return _TensorUse(tensors[:-1], tensors[-1:])


def generated_kernel(call: Call) -> AtenCost:
    """Return the cost of a kernel that Inductor generated, or of a user's kernel with such a name."""
    tensors = call.tensors
    if not tensors:
        return unknown(call, OpClass.FUSION)
    match = _NAME.fullmatch(call.name[:500])
    kind = match["kind"] if match else ""
    steps = _steps_of(match["steps"]) if match and match["steps"] else None
    if kind == "tem":
        # The last tensor is the result. If its size does not fit the product, the first tensor is the
        # result, updated in place.
        tensors = call.tensors
        op_class = next(
            (
                kind
                for pattern, kind in _TEMPLATES
                if pattern.search(match["steps"] if match and match["steps"] else "")
            ),
            OpClass.FUSION,
        )
        row = _product(tensors) if op_class is OpClass.CONTRACTION else None
        results = tensors[-1:]
        if row is not None and tensors[-1].elements != row.batch * row.m * row.n:
            results = tensors[:1]
        read = tensors if results[0] is not tensors[-1] else tensors[:-1]
        flops = nan if row is None else row.flops
        return simple(
            read,
            [tensor.dense for tensor in results],
            op_class=op_class,
            flops=flops,
            transcendentals=nan if isnan(flops) else 0.0,
            written=results[0].bytes,
            rate=tensors[0].dtype,
            contractions=() if row is None else (row,),
        )
    reduces = kind in _REDUCTIONS
    loops = _loops(call, tensors, reduces=reduces) if reduces or kind == "poi" else _LoopSizes()
    use = _tensor_use(call, loops, steps, kind)
    flops, transcendentals = _work(steps, loops, use, reduces=reduces)
    picks = any(name in _PICKS.split() for name in steps or ())
    inputs = [tensor for tensor in use.read if tensor.shape]
    cost = simple(
        use.read,
        [tensor.dense for tensor in use.written],
        op_class=OpClass.FUSION,
        flops=flops,
        transcendentals=transcendentals,
        read=sum(_part_bytes(tensor, loops) if picks else tensor.bytes for tensor in inputs),
        written=sum(_part_bytes(tensor, loops) for tensor in use.written),
        rate=tensors[0].dtype,
    )
    return cost._replace(guessed=use.guessed)


def _part_bytes(tensor: Strided, loops: _LoopSizes) -> float:
    """Return the bytes of a tensor that the loops reach: all of it, or one element per iteration if the
    tensor is larger.
    """
    if not loops.known or tensor.elements <= loops.total:
        return tensor.bytes
    return tensor.bytes * loops.total / tensor.elements


def _work(
    steps: list[str] | None, loops: _LoopSizes, use: _TensorUse, *, reduces: bool
) -> tuple[float, float]:
    """Return the FLOPs and transcendentals of one execution of each operation in the name; NaN without such
    names.
    """
    named = [_STEPS[name] for name in dict.fromkeys(steps or ())]
    if not named or (reduces and not any(step.reduces for step in named)):
        return nan, nan
    flops, functions = sum(step.flops for step in named), sum(step.transcendentals for step in named)
    iterations = float(loops.total) if loops.known else float(max(tensor.elements for tensor in use.written))
    if reduces and not loops.known:
        iterations = nan
    return flops * iterations if flops else 0.0, functions * iterations if functions else 0.0


_TEMPLATES = (
    (re.compile(r"(?:^|_)(?:flex_attention|flex_decoding)"), OpClass.ATTENTION),
    (re.compile(r"(?:^|_)convolution"), OpClass.CONVOLUTION),
    (re.compile(r"(?:^|_)\w{0,9}mm(?:_|$)|(?:^|_)(?:linear|matmul)"), OpClass.CONTRACTION),
)


def _product(tensors: tuple[Strided, ...]) -> Contraction | None:
    """Return the product of two of the tensors whose result would have the size of a third one; None without
    such tensors.
    """
    matrices = [tensor for tensor in tensors if len(tensor.shape) in (2, 3)]
    for position, lhs in enumerate(matrices):
        for rhs in matrices[position + 1 :]:
            if len(lhs.shape) != len(rhs.shape) or lhs.shape[:-2] != rhs.shape[:-2]:
                continue
            if lhs.shape[-1] != rhs.shape[-2]:
                continue
            extents = (prod(lhs.shape[:-2]), lhs.shape[-2], rhs.shape[-1], lhs.shape[-1])
            others = [tensor for tensor in tensors if tensor is not lhs and tensor is not rhs]
            if any(tensor.elements == prod(extents[:3]) for tensor in others):
                return matrix_product(extents, (lhs.dtype, rhs.dtype, FLOAT32))
    return None
