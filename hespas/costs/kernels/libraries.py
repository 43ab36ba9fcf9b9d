"""Patterns of the names of communication, copy and generated kernels, and of kernels of serving and training
libraries.

Name formats follow the sources of NCCL and RCCL (https://github.com/NVIDIA/nccl), DeepEP
(https://github.com/deepseek-ai/DeepEP), vLLM, SGLang, FlashInfer, AITER, Transformer Engine
(https://github.com/NVIDIA/TransformerEngine), apex (https://github.com/NVIDIA/apex) and FBGEMM
(https://github.com/pytorch/FBGEMM). The formats of XLA and MIOpen follow recorded traces. The library of a
name that several libraries use is unknown, unless a namespace states it.
"""

from __future__ import annotations

import re
from dataclasses import replace

from hespas.costs.kernels.facts import (
    Cover,
    KernelFacts,
    KernelPattern,
    KernelReader,
    any_of,
    element_type,
    spelled_type,
)
from hespas.costs.kernels.names import KernelName
from hespas.graph import OpClass

__all__ = ["COMMUNICATION", "COPIES", "GENERATED", "SERVING", "TRAINING"]

_COLLECTIVE = OpClass.COLLECTIVE
_E, _M, _N = OpClass.ELEMENTWISE, OpClass.MOVE, OpClass.NORMALIZATION

_NCCL_TYPE = re.compile(
    r"_(?:[sS]um|Prod|Max|Min|MinMax|PreMulSum|SumPostDiv)_"
    r"(u?int\d{1,2}_t|__nv_bfloat16|rccl_bfloat16|half|float|double|[iuf]\d{1,2}|bf16|f8e\dm\d)(?![a-zA-Z0-9])"
)
_NCCL_KINDS = {
    "AllReduce": "all-reduce",
    "AllGather": "all-gather",
    "ReduceScatter": "reduce-scatter",
    "AlltoAll": "all-to-all",
    "Broadcast": "broadcast",
    "SendRecv": "send and receive",
    "Reduce": "reduce",
}


def _nccl(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    """Return the facts with the kind of collective and the element type in an NCCL kernel name. Collectives
    without arithmetic always have ``int8_t``.
    """
    typed = _NCCL_TYPE.search(name.text)
    kind = _NCCL_KINDS.get(match["kind"] or "", facts.family)
    return replace(facts, family=kind, dtype=spelled_type(typed[1]) if typed else "")


_NAMESPACES = {
    "vllm": "vLLM",
    "sgl_hip": "SGLang",
    "sgl_kernel": "SGLang",
    "flashinfer": "FlashInfer",
    "aiter": "aiter",
    "ck_tile": "CK",
    "tensorrt_llm": "TensorRT-LLM",
    "moe": "TensorRT-LLM",
    "at": "PyTorch",
    "transformer_engine": "TransformerEngine",
}


def _owned(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    """Return the facts with the library, from the namespace in the name, and the first element type in the
    whole name.
    """
    owner = _NAMESPACES.get(name.qualified.partition("::")[0], "")
    return replace(facts, library=facts.library or owner, dtype=element_type(name.text))


def _collective(pattern: str, library: str, family: str) -> KernelPattern:
    return KernelPattern(pattern, library, family, _COLLECTIVE, read=_owned)


_PART = r"(?:^|::)(?:\w{0,30}_)?"

_EP = r"(?:deep_ep::(?:\w{1,20}::){0,2}|(?:^|::)(?:internode|intranode)(?:_ll)?::)"
"""Namespaces of DeepEP's kernels, also in forks."""

COMMUNICATION: tuple[KernelPattern, ...] = (
    KernelPattern(
        r"^(?:nccl\w{0,8}Kernel|rccl\w{0,10}Kernel|rccl_\w{0,10}|onerccl\w{0,10}|msccl\w{0,10}Kernel\w{0,20}?)_?"
        r"(?P<kind>AllReduce|AllGather|ReduceScatter|AlltoAll|Broadcast|SendRecv|Reduce)?",
        "NCCL",
        "collective",
        _COLLECTIVE,
        read=_nccl,
    ),
    KernelPattern(
        rf"(?:{_EP}|(?:^|::)layout::)get_dispatch_layout",
        "DeepEP",
        "dispatch layout",
        OpClass.SCATTER,
    ),
    KernelPattern(rf"{_EP}clean", "DeepEP", "fill", OpClass.GENERATE),
    _collective(_EP, "DeepEP", "all-to-all"),
    _collective(r"^(?:nv|roc)shmem", "NVSHMEM", "collective"),
    _collective(r"(?:one_shot|two_shot|multimem)_\w{0,10}all_?reduce", "PyTorch", "all-reduce"),
    _collective(r"(?:one_shot|multimem)_\w{0,10}all_?gather", "PyTorch", "all-gather"),
    _collective(
        r"symm_mem|symmetric_memory|(?:put|wait)_signal_kernel|^barrier_kernel$", "PyTorch", "collective"
    ),
    _collective(r"cross_device_reduce", "vLLM", "all-reduce"),
    _collective(r"quickreduce::|allreduce_prototype_", "vLLM", "all-reduce"),
    _collective(r"userbuffers_", "TransformerEngine", "collective"),
    _collective(_PART + r"(?:all_?reduce|AllReduce)", "", "all-reduce"),
    _collective(_PART + r"(?:all_?gather|AllGather)", "", "all-gather"),
    _collective(_PART + r"reduce_?scatter", "", "reduce-scatter"),
    _collective(_PART + r"all_?to_?all", "", "all-to-all"),
)

_DIRECTIONS = r"H(?:ost)?(?:2|to|To)D|D(?:evice)?(?:2|to|To)H"

COPIES: tuple[KernelPattern, ...] = (
    KernelPattern(
        rf"^(?:[mM]emcpy(?:32)?[ _]?|Copy|MEMORY_COPY_)(?:{_DIRECTIONS}|HtoH|HOST_TO_DEVICE|DEVICE_TO_HOST)",
        "driver",
        "host copy",
        OpClass.HOST,
        whole=True,
    ),
    KernelPattern(r"^Memcpy ?P(?:to|2)P", "driver", "peer copy", OpClass.P2P, whole=True),
    KernelPattern(
        r"^(?:[mM]emcpy|CopyDeviceToDevice|MEMORY_COPY|__amd_rocclr_copyBuffer)",
        "driver",
        "copy",
        _M,
        whole=True,
    ),
    KernelPattern(r"^(?:[mM]emset|__amd_rocclr_fillBuffer)", "driver", "fill", OpClass.GENERATE, whole=True),
)

_MOST_UNROLLED = 16.0
"""Maximum loop elements per thread in XLA kernels: 4, and more for types narrower than a byte."""
_MOST_IN_TILE = 256.0
"""Maximum elements per thread of XLA's transposition in shared memory: 8 or 16 by the warp size, times the
elements of a vector.
"""


def _per_thread(elements: float) -> KernelReader:
    """Return a reader of kernel names that adds a limit of ``elements`` per thread to the facts."""
    return lambda facts, name, match: replace(facts, cover=Cover.AT_MOST, per_thread=elements)


_HEAVY = any_of("exponential log tanh sqrt rsqrt logistic sine cosine power cbrt erf")

GENERATED: tuple[KernelPattern, ...] = (
    KernelPattern(
        r"^triton_tem_fused_\w{0,200}(?:mm|linear|matmul)", "Inductor", "gemm", OpClass.CONTRACTION
    ),
    KernelPattern(r"^triton_tem_fused_\w{0,200}conv", "Inductor", "convolution", OpClass.CONVOLUTION),
    KernelPattern(r"^triton_(?:poi|for)_", "Inductor", "pointwise fusion", OpClass.FUSION),
    KernelPattern(r"^triton_(?:red|per|mix|split_scan)_", "Inductor", "reduction fusion", OpClass.FUSION),
    KernelPattern(r"^triton_softmax", "XLA", "reduction fusion", OpClass.FUSION),
    KernelPattern(r"^(?:triton_gemm|gemm_fusion|triton_nested_gemm)", "XLA", "gemm", OpClass.CONTRACTION),
    KernelPattern(r"^triton_(?:fused|fusion|unk_fused)", "Inductor", "fusion", OpClass.FUSION),
    KernelPattern(r"^cutlass_gemm_with_upcast|^cublas-|^__cublas", "XLA", "gemm", OpClass.CONTRACTION),
    KernelPattern(
        r"^(?:input|loop|wrapped)_\w{0,30}reduce\w{0,60}", "XLA", "reduction fusion", OpClass.FUSION
    ),
    KernelPattern(r"^wrapped_(?:concatenate|transpose|copy|slice|pad|reverse)", "XLA", "move", _M),
    KernelPattern(r"^(?:wrapped|input)_scatter", "XLA", "scatter", OpClass.SCATTER),
    KernelPattern(r"^wrapped_gather", "XLA", "gather", OpClass.GATHER),
    KernelPattern(r"^wrapped_(?:broadcast|iota)", "XLA", "fill", OpClass.GENERATE),
    KernelPattern(rf"^wrapped_{_HEAVY}", "XLA", "function", OpClass.TRANSCENDENTAL),
    KernelPattern(r"^wrapped_", "XLA", "elementwise", _E),
    KernelPattern(
        r"^input_\w{0,40}transpose_fusion|^transpose_fusion",
        "XLA",
        "transpose fusion",
        OpClass.FUSION,
        read=_per_thread(_MOST_IN_TILE),
    ),
    KernelPattern(
        r"^loop_\w{0,200}fusion(?:[._]\w{1,30}){0,3}$",
        "XLA",
        "loop fusion",
        OpClass.FUSION,
        read=_per_thread(_MOST_UNROLLED),
    ),
    KernelPattern(r"^(?:\w{1,80}_)?fusion(?:[._]\w{1,30}){0,3}$", "XLA", "fusion", OpClass.FUSION),
    KernelPattern(
        r"redzone_checker|fp_comparison|repeat_buffer_kernel", "XLA", "autotuning check", OpClass.CUSTOM
    ),
)

_CK_ROWS = re.compile(r"Generic2dBlockShape<(?:ck_tile::)?sequence<(\d{1,5}), (\d{1,6})>")


def _norm_rows(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    """Return the facts in the template arguments of ``add_rmsnorm_quant_kernel<in, out, threads, elements per
    thread, ...>`` (AITER) and of one-pass norms of CK. A thread block computes as many rows as fit into it.
    """
    facts = _owned(facts, name, match)
    shape = _CK_ROWS.search(name.text)
    if shape is not None and "OnePass" in name.text:
        return replace(facts, cover=Cover.AT_MOST, per_block=float(int(shape[1]) * int(shape[2])))
    threads, elements = name.number(2), name.number(3)
    if name.base == "add_rmsnorm_quant_kernel" and threads > 0 and elements > 0:
        return replace(facts, cover=Cover.AT_MOST, per_block=float(threads * elements))
    return facts


def _named(words: str, family: str, op_class: OpClass, library: str = "") -> KernelPattern:
    """Return the pattern of kernels whose name contains one of the ``words``."""
    return KernelPattern(rf"(?:^|::|_){any_of(words)}", library, family, op_class, read=_owned)


def _ck(words: str, family: str, op_class: OpClass) -> KernelPattern:
    return KernelPattern(
        rf"^ck_tile::k.{{0,60}}?{any_of(words)}", "CK", family, op_class, whole=True, read=_owned
    )


SERVING: tuple[KernelPattern, ...] = (
    KernelPattern(
        r"^ck_tile::k.{0,60}?(?:Rms|Layer)[nN]orm",
        "CK",
        "norm",
        _N,
        whole=True,
        read=_norm_rows,
    ),
    KernelPattern(r"^aiter::add_rmsnorm_quant_kernel$", "aiter", "norm", _N, read=_norm_rows),
    _ck("MoeSorting TopkSoftmax", "expert routing", OpClass.SORT),
    _ck("[qQ]uant", "quantization", OpClass.QUANTIZE),
    _named(
        "(?:fused_)?(?:add_)?rms_?norm rmsnorm2d \\w{0,20}RMSNorm layer_?norm \\w{0,10}LayerNorm", "norm", _N
    ),
    _named(
        r"(?:act|silu|gelu|swiglu)\w{0,10}_mul\w{0,30}(?:quant|fp8|fp4)", "gated activation", OpClass.QUANTIZE
    ),
    _named(r"(?:act|silu|gelu)\w{0,10}_mul swiglu", "gated activation", _E),
    _named(r"rotary_ rope Rope \w{0,40}(?:ApplyRotary|applyMLARope)", "rotary embedding", _E),
    _named(
        r"""reshape_and_cache store_kv_?cache concat_and_cache AppendPagedKVCache set_kv_ set_mla_kv
        indexer_k_quant_and_cache""",
        "cache update",
        OpClass.SCATTER,
    ),
    _named(r"copy_blocks_kernel swap_blocks gather_\w{0,10}cache", "cache copy", _M),
    _named(
        r"""topk_?[gG]ating topGating topk_softmax topk_sigmoid grouped_topk moe_fused_gate moe_align
        count_and_sort_expert moe_sort combined_routing routing sum_bitmatrix_rows compute_seg_indptr
        compute_src2dst compute_arg_sorts expt_data""",
        "expert routing",
        OpClass.SORT,
    ),
    _named(
        r"""sampling \w{0,20}[sS]ampling \w{0,20}Sampling gumbel_sample apply_\w{0,30}penalt min_p_ TopPRenorm
        ChainSpeculative TreeSpeculative rejection_""",
        "sampling",
        OpClass.SORT,
    ),
    _named(r"topk_(?:forward|backward|kernel) \w{0,20}TopK\w{0,20}Kernel", "top-k", OpClass.SORT),
    _named(
        "fused_moe_kernel moe_mmk moe_gemm batched_triton_kernel", "moe gemm", OpClass.CONTRACTION, "Triton"
    ),
    _named(
        r"moe_sum finalizeMoeRouting finalize_matmul finalize post_reorder ep_gather unpermute moe_reduce",
        "expert combination",
        OpClass.REDUCTION,
    ),
    _named("expandInputRows pre_reorder ep_scatter shuffle_rows", "expert permutation", OpClass.GATHER),
    _named(
        r"(?:\w{0,10}[qQ]uant) dequant cvt_fp16_to_fp4 scaled_fp8 segmented_max cast_to_fp8",
        "quantization",
        OpClass.QUANTIZE,
    ),
    _named(
        "w8a8_ w4a16_ scaled_mm gemm_a\\d{1,2}w\\d gemm_afp4wfp4 gemm_kernel matmul_kernel bmm_kernel",
        "gemm",
        OpClass.CONTRACTION,
    ),
    _named(
        r"""compute_position clamp_position resolve_future_token create_\w{0,30}kv_indices get_num_kv_splits
        write_req_to_token computeStrides
        alloc_extend alloc_decode advance_step compute_slot_mapping get_last_loc""",
        "batch bookkeeping",
        _E,
    ),
    _named("causal_conv1d", "convolution", OpClass.CONVOLUTION),
    _named(
        "selective_scan chunk_(?:scan|state|fwd|bwd|gated|delta) state_passing fused_recurrent bmm_chunk",
        "state-space scan",
        OpClass.CUSTOM,
    ),
)


def _fbgemm(words: str, family: str, op_class: OpClass) -> KernelPattern:
    return KernelPattern(rf"^(?:fbgemm_gpu::)?_?{any_of(words)}", "FBGEMM", family, op_class)


def _engine(words: str, family: str, op_class: OpClass) -> KernelPattern:
    pattern = rf"transformer_engine::(?:\w{{1,40}}::){{0,4}}\w{{0,40}}?{any_of(words)}"
    return KernelPattern(pattern, "TransformerEngine", family, op_class)


def _apex(words: str, family: str, op_class: OpClass) -> KernelPattern:
    return KernelPattern(rf"(?:^|::){any_of(words)}", "apex", family, op_class)


def _convolving(words: str, family: str, op_class: OpClass, library: str) -> KernelPattern:
    return KernelPattern(rf"^{any_of(words)}", library, family, op_class)


_CUDNN = r"cudnn::(?:\w{1,40}::){0,3}\w{0,20}?"

TRAINING: tuple[KernelPattern, ...] = (
    _fbgemm(r"(?:split|dense|ssd)_embedding\w{0,60}forward", "embedding lookup", OpClass.GATHER),
    _fbgemm(r"(?:split|dense|ssd)_embedding\w{0,60}(?:backward|grad)", "embedding update", OpClass.SCATTER),
    _fbgemm(r"permute_ recat_ jagged_ block_bucketize dense_to_jagged", "permutation", _M),
    _fbgemm("bounds_check linearize_ offsets_range expand_into asynchronous_", "index bookkeeping", _E),
    _engine("cast quantize", "quantization", OpClass.QUANTIZE),
    _engine("rmsnorm ln_ layernorm norm softmax", "norm", _N),
    _engine("transpose permut", "transpose", _M),
    _engine("adam Adam multi_tensor", "optimizer", OpClass.UPDATE),
    _engine("", "elementwise", _E),
    _apex("scaled_\\w{0,40}masked_softmax generic_scaled_masked", "softmax", _N),
    _apex("cu(?:Apply|Compute)\\w{0,10}(?:LayerNorm|RMSNorm|GradInput|Grad)", "norm", _N),
    _apex("distributed_(?:adam|lamb) \\w{0,30}(?:Adam|LAMB|Lamb|SGD)\\w{0,40}", "optimizer", OpClass.UPDATE),
    _named("cross_entropy", "loss", OpClass.REDUCTION),
    _convolving("batched_transpose_ transpose_ Im[23]?d?2Col Col2Im", "move", _M, "MIOpen"),
    _convolving(
        "MIOpenBatchNorm MIOpenLayerNorm MIOpenSoftmax LayerNorm SoftmaxForward", "norm", _N, "MIOpen"
    ),
    _convolving("mloPooling MIOpenPool", "window", OpClass.WINDOW, "MIOpen"),
    _convolving("SubTensorOpWith Op[1-5]dTensor OpTensor MIOpenActiv", "elementwise", _E, "MIOpen"),
    _convolving(
        _CUDNN + "(?:nchwToNhwc|nhwcToNchw|[tT]ranspose|ensorTransform|convertTensor)", "layout", _M, "cuDNN"
    ),
    _convolving(_CUDNN + "(?:bn_|batchnorm|softmax|norm)", "norm", _N, "cuDNN"),
    _convolving(_CUDNN + "(?:pooling|lrn)", "window", OpClass.WINDOW, "cuDNN"),
    _convolving(
        _CUDNN + "(?:op_tensor|add_tensor|activation|set_tensor|scale_tensor)", "elementwise", _E, "cuDNN"
    ),
)
