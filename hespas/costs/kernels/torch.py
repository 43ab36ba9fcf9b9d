"""Patterns of the names of PyTorch's kernels (``at::native``), and of the CUB and rocPRIM primitives that it
uses.

Elementwise kernels are one C++ template over a functor, whose name is the operation:
https://github.com/pytorch/pytorch/tree/main/aten/src/ATen/native/cuda.
"""

from __future__ import annotations

import re
from dataclasses import replace

from hespas.costs.kernels.facts import (
    Cover,
    KernelFacts,
    KernelPattern,
    any_of,
    element_type,
    spelled_type,
    type_in_text,
    widest_type,
)
from hespas.costs.kernels.names import KernelName
from hespas.graph import OpClass

__all__ = ["TORCH"]

_E, _NORM = OpClass.ELEMENTWISE, OpClass.NORMALIZATION

_HEAVY = any_of(
    """exp2? expm1 log(?:2|10|1p)? r?sqrt a?sinh? a?cosh? a?tanh? sigmoid logit erf(?:c|inv)? lgamma digamma
    pow_tensor_tensor pow atan2"""
)
"""Functions that hardware approximates."""

_FUNCTORS: tuple[tuple[str, str, OpClass], ...] = (
    (r"FillFunctor|arange_cuda_out|linspace_cuda|random_\w{0,40}kernel", "fill", OpClass.GENERATE),
    (r"(?:bfloat16|float16|float8_\w{1,12})(?:to\w{1,12})?_copy_kernel", "conversion", _E),
    (r"direct_copy_kernel|CopyFunctor|\bCopy<|conj_kernel", "copy", OpClass.MOVE),
    (r"pow_tensor_scalar_kernel_impl<.{0,120}#4\}", "power", OpClass.TRANSCENDENTAL),
    (r"pow_tensor_scalar_kernel_impl", "power", _E),
    (rf"(?<![a-z_]){_HEAVY}_kernel", "function", OpClass.TRANSCENDENTAL),
    (r"index_put_kernel|index_copy_kernel|index_fill_kernel|masked_scatter", "scatter", OpClass.SCATTER),
    (r"scatter_(?:add|fill|reduce)|ReduceAdd|TensorAssign", "scatter", OpClass.SCATTER),
    (r"index_kernel_impl|gpu_index_kernel|take_put_kernel|gather", "gather", OpClass.GATHER),
)
_FUNCTOR = [(re.compile(pattern), family, op_class) for pattern, family, op_class in _FUNCTORS]


_OVER_PLACES = re.compile(r"\{lambda\(int(?:, bool)?\)#\d{1,2}\}$")
"""Lambda of the loop around a functor, whose argument is an index."""
_LAMBDA = re.compile(r"\{lambda\((\w[\w: ]{0,40})")


def _functor(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    """Return the facts with the operation of an elementwise kernel. The operation is the functor among the
    template arguments: a template over the element type, or a lambda over elements.
    """
    text = ", ".join(_OVER_PLACES.sub("", argument) for argument in name.arguments)
    typed = _LAMBDA.search(text)
    dtype = spelled_type(typed[1]) if typed else ""
    facts = _shared(replace(facts, dtype=dtype or element_type(text)), name, text)
    for pattern, family, op_class in _FUNCTOR:
        if pattern.search(text):
            wide = max(facts.widest, 4.0) if family == "conversion" else facts.widest
            return replace(facts, family=family, op_class=op_class, widest=wide)
    return facts


_ARRAYS = re.compile(r"(?:at::detail::Array|std::array)<char ?\*, (\d{1,2})(?:ul)?>")
_MOST_A_THREAD = 8
_MOST_NARROW = 16
"""Maximum elements per thread: 4 or 8 by the version of PyTorch, and up to 16 for types narrower than four
bytes (``elems_per_thread``).
"""
_NARROW = re.compile(
    r"bool|[cC]ompare|logical|isnan|isinf|signbit|BFloat16|Half|float8|bfloat16|char\b(?! ?\*)|int8"
)


def _shared(facts: KernelFacts, name: KernelName, text: str) -> KernelFacts:
    """Return the facts with the distribution of elements over thread blocks, which ``CUDALoops.cuh`` of
    PyTorch defines for each kernel.
    """
    arrays = _ARRAYS.search(text)
    described = replace(
        facts, cover=Cover.ONCE, arrays=int(arrays[1]) if arrays else 0, widest=widest_type(text) or 8.0
    )
    threads, elements = name.number(0), name.number(1)
    match name.base.removeprefix("_"):
        case (
            "elementwise_kernel"
            | "elementwise_kernel_manual_unroll"
            | "index_elementwise_kernel"
            | ("scatter_gather_elementwise_kernel")
        ) if threads > 0 and elements > 0:
            return replace(described, per_block=threads * elements, per_block_low=threads * elements)
        case "vectorized_elementwise_kernel" | "vectorized_templated_elementwise_kernel" if threads > 0:
            is_narrow = described.widest < 4 or _NARROW.search(text) is not None
            return replace(
                described, per_thread=_MOST_NARROW if is_narrow else _MOST_A_THREAD, per_thread_low=4
            )
        case "unrolled_elementwise_kernel":
            stated_each = name.number(2)
            most = stated_each if stated_each > 0 else _MOST_A_THREAD
            return replace(described, per_thread=most, per_thread_low=stated_each if stated_each > 0 else 4)
        case "elementwise_kernel_with_index":
            return replace(described, per_thread=4, per_thread_low=1)
        case _:
            return facts


_CHUNK = 65_536
"""Elements of a tensor per block: ``kChunkSize`` of PyTorch, and of apex (2048 * 32)."""
_LONGEST_ROW = 1024
"""Row length above which softmax uses a block per row."""


def _softmax(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    """Return the facts in the template arguments of softmax kernels.

    They are ``softmax_warp_forward<in, out, sum, log2 of a row, ...>``, ``cunn_SoftMaxForward<...>`` (a block
    per row), and ``cunn_SoftMaxForwardReg<..., registers>`` with the row in registers.
    """
    arrays = replace(facts, arrays=2, widest=4.0)
    if name.base in ("softmax_warp_forward", "softmax_warp_backward"):
        bits = name.number(3)
        if not 0 <= bits <= 10:
            return facts
        # A warp has two rows of up to 128 elements, or one longer row; warps have 32 or 64 threads.
        return replace(arrays, cover=Cover.AT_MOST, per_thread=float((1 << bits) * (2 if bits <= 7 else 1)))
    if name.base.startswith("cunn_SoftMaxForward"):
        row = float(_LONGEST_ROW // 2 + 1 if facts.dtype == "f64" else _LONGEST_ROW + 1)
        registers = name.number(len(name.arguments) - 1) if name.base.endswith("Reg") else 0
        return replace(arrays, cover=Cover.ROWS, per_block_low=row, per_thread=float(max(registers, 0)))
    return facts


def _reduces(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    """Return the facts in the template arguments of ``reduce_kernel<threads, results per thread, ...>``. The
    name does not state the operands.
    """
    elements = max(name.number(1), 1)
    return replace(type_in_text(facts, name, match), cover=Cover.AT_MOST, per_thread=float(elements))


def _gathers(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    """Return the facts in the template arguments of ``vectorized_gather_kernel<bytes per thread, index>``.
    Such a kernel reads at most as many indices as it copies bytes.
    """
    elements = name.number(0)
    return replace(
        facts, dtype="ui8", cover=Cover.AT_MOST, per_thread=float(max(elements, 0)), arrays=3, widest=1.0
    )


_TENSORS: tuple[tuple[str, str, OpClass], ...] = (
    (r"Adam|SGD|LAMB|Lamb|Lion|Adagrad|NovoGrad|fused_adam", "optimizer", OpClass.UPDATE),
    (r"[Nn]ormFunctor|MaxNorm|LpMax", "norm of tensors", OpClass.REDUCTION),
    (r"CopyFunctor|\bCopy<", "copy", OpClass.MOVE),
    (r"ZeroFunctor", "fill", OpClass.GENERATE),
)


def _tensors(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    """Return the facts with the operation of a kernel over lists of tensors, such as a fused optimizer."""
    facts = replace(facts, cover=Cover.AT_MOST, per_block=_CHUNK)
    for pattern, family, op_class in _TENSORS:
        if re.search(pattern, name.text):
            return replace(facts, family=family, op_class=op_class)
    return facts


_LIBRARIES = {"hipcub": "hipCUB", "rocprim": "rocPRIM", "thrust": "Thrust", "cub": "CUB"}


def _primitive(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    return replace(facts, library=_LIBRARIES[match["owner"]])


def _native(words: str, family: str, op_class: OpClass) -> KernelPattern:
    return KernelPattern(
        rf"^at::native::(?:\w{{1,40}}::){{0,4}}_?{any_of(words)}", "PyTorch", family, op_class
    )


def _primitives(words: str, family: str, op_class: OpClass) -> KernelPattern:
    pattern = rf"^(?:\w{{1,40}}::){{0,3}}(?P<owner>hipcub|cub|rocprim|thrust)\b.{{0,400}}?{any_of(words)}"
    return KernelPattern(pattern, "CUB", family, op_class, whole=True, read=_primitive)


TORCH: tuple[KernelPattern, ...] = (
    KernelPattern(
        r"(?:^|::)(?:vectorized_|unrolled_|legacy_|vectorized_templated_|unrolled_templated_)?"
        r"elementwise_kernel(?:_manual_unroll|_with_index|_strided)?$",
        "PyTorch",
        "elementwise",
        _E,
        read=_functor,
    ),
    KernelPattern(r"::index_elementwise_kernel$", "PyTorch", "gather", OpClass.GATHER, read=_functor),
    KernelPattern(
        r"::_scatter_gather_elementwise_kernel$", "PyTorch", "gather", OpClass.GATHER, read=_functor
    ),
    KernelPattern(r"(?:^|::)multi_tensor_apply_kernel$", "PyTorch", "multi-tensor", _E, read=_tensors),
    KernelPattern(
        r"^at::native::(?:\w{1,40}::){0,4}(?:multi_output_)?reduce_kernel$",
        "PyTorch",
        "reduction",
        OpClass.REDUCTION,
        read=_reduces,
    ),
    _native("lpnorm_cleanup", "norm of tensors", OpClass.REDUCTION),
    _native("CatArrayBatchedCopy", "concatenation", OpClass.MOVE),
    KernelPattern(
        r"(?:^|::)(?:cunn_S\w{0,20}[sS]oft[mM]ax|softmax_warp_|\w{0,20}[sS]oft[mM]ax\w{0,10}(?:Forward|Backward))",
        "PyTorch",
        "softmax",
        _NORM,
        read=_softmax,
    ),
    _native(
        r"""\w{0,30}(?:layer_norm|LayerNorm|group_norm|GroupNorm|rms_norm|batch_norm|BatchNorm) RowwiseMoments
        \w{0,10}GammaBeta cuCompute(?:Part)?Grad \w{0,10}InternalGradients Compute\w{0,20}FusedParams""",
        "norm",
        _NORM,
    ),
    KernelPattern(
        r"^at::native::vectorized_gather_kernel$", "PyTorch", "gather", OpClass.GATHER, read=_gathers
    ),
    _native(
        r"""indexSelect embedding_\w{0,10}bag EmbeddingBag_update nonzero write_indices
        flag_ compute_cuda_kernel""",
        "gather",
        OpClass.GATHER,
    ),
    _native(
        r"""indexFunc index(?:Add|Copy|Fill|ing_backward) embedding_backward compute_grad_weight
        sum_and_scatter EmbeddingBag_acc \w{0,10}[hH]istogram""",
        "scatter",
        OpClass.SCATTER,
    ),
    _native("krn_partial compute_num_of_partial write_num_of_segments", "segment bookkeeping", _E),
    KernelPattern(r"^at::to_dense_representation_kernel", "PyTorch", "segment bookkeeping", _E),
    _native("fused_dropout masked_scale triu_tril nan_to_num clamp where", "elementwise", _E),
    _native("distribution_ bernoulli philox", "random numbers", OpClass.GENERATE),
    _native("upsample_ max_pool avg_pool adaptive_?a?v?e?r?a?g?e?_?\\w{0,10}pool", "window", OpClass.WINDOW),
    _native("conv_depthwise conv_transpose slow_conv", "convolution", OpClass.CONVOLUTION),
    _native(r"im2col col2im vol2col \w{0,20}transpose \w{0,10}flip roll", "move", OpClass.MOVE),
    _native("tensor_kernel_scan device_scan", "scan", OpClass.REDUCTION),
    KernelPattern(r"(?:^|::)indexing_backward_kernel", "PyTorch", "scatter", OpClass.SCATTER),
    _native(r"nll_loss\w{0,20}forward", "loss", OpClass.REDUCTION),
    _native(r"nll_loss\w{0,20}backward", "loss", OpClass.SCATTER),
    _native(
        r"""radixSort bitonicSort sbtopk mbtopk warpMerge gatherTopK gatherMedian gatherKth radixFindKth
        computeBlockwise sort searchsorted bucketize unique fill_index_and_segment fill_reverse""",
        "sort",
        OpClass.SORT,
    ),
    _primitives(
        "[rR]adix_?[sS]ort [mM]erge_?[sS]ort block_sort block_merge onesweep [hH]istogram SortPairs sort_",
        "sort",
        OpClass.SORT,
    ),
    _primitives("[sS]can lookback", "scan", OpClass.REDUCTION),
    _primitives("[rR]educe run_length RunLength", "reduction", OpClass.REDUCTION),
    _primitives("[sS]elect [pP]artition [uU]nique Compact", "selection", OpClass.GATHER),
    _primitives("transform for_each ForEach parallel_for static_kernel fill batch_memcpy", "elementwise", _E),
)
