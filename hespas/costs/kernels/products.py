"""Patterns of the names of matrix product and convolution kernels.

Name formats follow the generators of Tensile (https://github.com/ROCm/rocm-libraries, ``Cijk_``), CUTLASS's
profiler (https://github.com/NVIDIA/cutlass), DeepGEMM (https://github.com/deepseek-ai/DeepGEMM), Composable
Kernel (https://github.com/ROCm/composable_kernel) and AITER (https://github.com/ROCm/aiter). The formats of
cuBLAS, cuDNN, MIOpen and TensorRT-LLM follow recorded traces.
"""

from __future__ import annotations

import re
from dataclasses import replace

from hespas.costs.kernels.facts import (
    Cover,
    KernelFacts,
    KernelPattern,
    any_of,
    cute_shapes,
    element_type,
    spelled_type,
    type_in_text,
)
from hespas.costs.kernels.names import KernelName
from hespas.graph import OpClass

__all__ = ["PRODUCTS"]

_GEMM, _CONV = OpClass.CONTRACTION, OpClass.CONVOLUTION
_TILE = r"(?P<m>\d{1,4})x(?P<n>\d{1,4})"
_TILE_K = _TILE + r"x(?P<k>\d{1,4})"
_LAYOUT = r"(?P<layout>[nt]{2})"

_TENSILE_TYPES = {
    "S": "f32",
    "D": "f64",
    "C": "complex<f32>",
    "Z": "complex<f64>",
    "H": "f16",
    "B": "bf16",
    "X": "tf32",
    "I": "i32",
    "I8": "i8",
    "F8": "f8E4M3FN",
    "B8": "f8E5M2",
    "F8N": "f8E4M3FNUZ",
    "B8N": "f8E5M2FNUZ",
    "F6": "f6E2M3FN",
    "F4": "f4E2M1FN",
}
_TENSILE_LETTER = re.compile(r"F8N|B8N|F8|B8|F6|F4|I8|[SDCZHBXI]")
_TRANSPOSED = {"Ailk": "N", "Alik": "T", "Bljk": "N", "Bjlk": "T"}


def _tensile(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    """Return the facts with the element types and the layout in
    ``Cijk_Alik_Bljk_BBS_BH_..._MT256x192x64_...``, the name of a kernel for C[i,j,k] = A[l,i,k] B[l,j,k].

    The letters after the indices are the types of operands, result and arithmetic. The first index of an
    operand is the fastest in memory.
    """
    letters = _TENSILE_LETTER.findall(match["types"] + (match["more"] or ""))
    types = [_TENSILE_TYPES[letter] for letter in letters]
    if not types:
        return facts
    layout = _TRANSPOSED.get(match["a"], "") + _TRANSPOSED.get(match["b"], "")
    return replace(
        facts,
        dtype=types[0],
        result_dtype=types[1] if len(types) > 2 else types[0],
        layout=layout,
        cover=_tensile_cover(name.text),
    )


_STREAM_K = re.compile(r"_SK[1-9]\d{0,2}(?:_|$)|_PK[1-9](?:_|$)")
_ONE_SPLIT = re.compile(r"_GSU1(?:_|$)")


def _tensile_cover(name: str) -> Cover:
    """Return the distribution of tiles over thread blocks that the kernel name states.

    Stream-K (``SK3``) and persistent kernels loop over tiles. Others have a block per tile, or several blocks
    where K is split. The number of splits of kernels with user arguments is only set at run time.
    """
    if _STREAM_K.search(name):
        return Cover.UNKNOWN
    return Cover.TILES if _ONE_SPLIT.search(name) and "_UserArgs" not in name else Cover.AT_MOST


_UNITS = {"h": "f16", "s": "f32", "d": "f64", "c": "complex<f32>", "z": "complex<f64>", "i": "i8"}
_TENSOR_UNITS = {"s884": "f16", "s161616": "f16", "s1688": "tf32", "s16816": "f16", "s16832": "f16"}
"""Operand type of tensor-core instructions in names without a type. The letter is the accumulator type."""
_NAMED = r"(?:(?P<type>bf16|fp16|f16|tf32|f32|fp32|f64|e4m3|e5m2|int8|s8|u8)_)?"
_UNIT = r"(?P<unit>[hsdczi])(?P<step>\d{2,6})?"
_OUT = r"(?:_(?P<out>bf16|fp16|f16|tf32|f32|fp32|f64|int8|s8))?"
_ARCHITECTURE = any_of("maxwell pascal volta turing ampere ada hopper blackwell")
_CUTLASS = r"\bcutlass_(?:\d\d_)?(?:tensorop|simt|wmma_tensorop)_"


def _unit(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    if facts.dtype and match["type"]:
        return facts
    unit, step = match["unit"], match["step"] or ""
    if step and facts.result_dtype:
        return replace(facts, dtype=facts.result_dtype)
    return replace(facts, dtype=_TENSOR_UNITS.get(unit + step, _UNITS[unit]))


_XMMA_TYPE = re.compile(r"tf32|bf16|f16|f32|f64|e4m3|e5m2|i8|u8|i32")


def _xmma(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    """Return the facts with the element types in ``bf16bf16_bf16f32_f32`` (operands, result, accumulator) or
    ``f32f32_tf32f32`` (TF32).
    """
    types = _XMMA_TYPE.findall(match["types"])
    if "_segment_k_off_" in name.text and len(facts.tile) > 1:  # persistent, with no more blocks than tiles
        facts = replace(facts, cover=Cover.AT_LEAST)
    if not types:
        return replace(facts, dtype="")
    if "tf32" in types:
        return replace(facts, dtype="tf32", result_dtype="f32")
    return replace(
        facts,
        dtype=spelled_type(types[0]),
        result_dtype=spelled_type(types[2]) if len(types) > 2 else "",
    )


_NVJET = {"h": "f16", "t": "bf16", "s": "f32", "q": "f8E4M3FN", "o": "f4E2M1FN", "i": "i8", "d": "f64"}


def _nvjet(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    """Return the facts with the type letters ``hsh`` (operands, arithmetic, result) or ``qqtst`` (two
    operands, addend, arithmetic, result) of a name.
    """
    letters = match["types"]
    operands = "tf32" if letters[:2] == "ss" else _NVJET.get(letters[0], "")
    return replace(facts, dtype=operands, result_dtype=_NVJET.get(letters[-1], ""))


def _deep_gemm(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    """Return the facts in the template arguments ``<shape M, N, K, groups, block M, N, K, ...>`` of a
    DeepGEMM kernel. Extents that are given at run time are 0.
    """
    low = "bf16" if "bf16" in name.base else "f8E4M3FN"
    # Casts to an enumeration of a namespace are layouts.
    plain = (position for position, argument in enumerate(name.arguments[:12]) if "::" not in argument)
    numbers = [number for number in map(name.number, plain) if number >= 0]
    if len(numbers) < 7:
        return replace(facts, dtype=low)
    sizes = tuple((key, size) for key, size in zip(("m", "n", "k", "groups"), numbers, strict=False) if size)
    return replace(facts, dtype=low, tile=tuple(numbers[4:7]), sizes=sizes)


def _old_deep_gemm(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    """Return the facts in the template arguments ``<shape N, K, block M, N, K, ...>`` of a DeepGEMM kernel
    before June 2025.
    """
    numbers = [name.number(position) for position in range(5)]
    if min(numbers) <= 0:
        return replace(facts, dtype="f8E4M3FN")
    sizes = (("n", numbers[0]), ("k", numbers[1]))
    return replace(facts, dtype="f8E4M3FN", tile=tuple(numbers[2:]), sizes=sizes)


_LEAST_TILE = 8
"""Minimum extent of a tile; smaller shapes are clusters."""


def _cutlass3(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    """Return the facts with the tile of a CUTLASS 3 kernel: the first triple of constants in the name that is
    not a cluster shape.
    """
    tile = next((shape for shape in cute_shapes(name.text) if min(shape) >= _LEAST_TILE), ())
    return replace(facts, dtype=element_type(name.text), tile=tile)


_AITER_KINDS = {"f4": "f4E2M1FN", "fp8": "f8E4M3FN", "f8": "f8E4M3FN", "i8": "i8", "bf16": "bf16"}


def _aiter_gemm(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    """Return the facts with the types in a name such as ``f4gemm_bf16_per1x32Fp4``: the prefix is the operand
    type, the next word the result type.
    """
    return replace(facts, dtype=_AITER_KINDS[match["kind"].lower()])


def _ck_type(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    """Return the facts with the element type of a CK kernel. Demanglers write CK's ``bhalf_t`` as unsigned
    short.
    """
    text = name.text.replace("unsigned short", "bf16").replace("ushort", "bf16")
    return replace(facts, dtype=element_type(text))


def _matmul_ogs(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    """Return the facts with the types in ``bf16xbf16xmxfp4``: result, activations, weights."""
    types = [spelled_type(part) for part in match["types"].split("x", 1)]
    activations = match["types"].split("x")[1]
    loops = name.base.startswith("_p_")
    return replace(
        facts,
        dtype=spelled_type(activations),
        result_dtype=types[0],
        cover=Cover.UNKNOWN if loops else facts.cover,
    )


def _gemm(pattern: str, library: str) -> KernelPattern:
    return KernelPattern(pattern, library, "gemm", _GEMM)


def _conv(pattern: str, library: str) -> KernelPattern:
    return KernelPattern(pattern, library, "convolution", _CONV)


_TENSILE: tuple[KernelPattern, ...] = (
    KernelPattern(
        r"^Cijk_(?P<a>A[ikl]{3})_(?P<b>B[jkl]{3})_(?P<types>[A-Z0-9]{1,8})(?:_(?P<more>[SDCZHBXI]{2}))?_"
        r"(?:\w{0,120}?_)?MT" + _TILE_K,
        "hipBLASLt",
        "gemm",
        _GEMM,
        read=_tensile,
        cover=Cover.AT_MOST,
    ),
    _gemm(r"^Cijk_", "hipBLASLt"),
)

_NVIDIA: tuple[KernelPattern, ...] = (
    KernelPattern(
        r"(?:^|_)sm\d{2,3}_xmma_(?:fprop|dgrad|wgrad)_implicit_gemm(?:_indexed)?_(?P<types>\w{3,40}?)_n\w{0,80}?"
        r"tilesize" + _TILE_K,
        "cuDNN",
        "convolution",
        _CONV,
        read=_xmma,
    ),
    KernelPattern(
        r"(?:^|_)sm\d{2,3}_xmma_gemm_(?P<types>\w{3,40}?)_" + _LAYOUT + r"_\w{0,60}?tilesize" + _TILE_K,
        "cuBLAS",
        "gemm",
        _GEMM,
        read=_xmma,
    ),
    _conv(r"sm\d{2,3}_xmma_(?:fprop|dgrad|wgrad|conv)", "cuDNN"),
    _gemm(r"sm\d{2,3}_xmma_gemm", "cuBLAS"),
    KernelPattern(
        r"^nvjet_(?:sm\d{2,3}_)?(?P<types>[a-z]{3,6})_(?:mma_)?" + _TILE + r"_(?P<k>\d{1,4})x\d{1,3}"
        r"(?:_\w{0,80}?_(?P<layout>[NT]{2})[NT](?:_|$))?",
        "cuBLAS",
        "gemm",
        _GEMM,
        read=_nvjet,
    ),
    KernelPattern(
        r"^nvjet_(?:sm\d{2,3}_)?(?P<types>[a-z]{3,6})_mma_"
        + _TILE_K
        + r"_\w{0,80}?_(?P<layout>[NT]{2})[NT]{1,2}$",
        "cuBLAS",
        "gemm",
        _GEMM,
        read=_nvjet,
    ),
    _gemm(r"^nvjet_", "cuBLAS"),
    KernelPattern(
        rf"^{_ARCHITECTURE}_{_NAMED}{_UNIT}gemm(?:_relu|_gelu|_bias){{0,2}}{_OUT}_{_TILE}(?:_\w{{0,60}}?)?"
        rf"(?:stages_(?P<k>\d{{1,4}})x\d{{1,2}}_)?{_LAYOUT}(?:_v\d)?$",
        "cuBLAS",
        "gemm",
        _GEMM,
        read=_unit,
        cover=Cover.AT_MOST,
    ),
    _conv(rf"^{_ARCHITECTURE}_\w{{0,40}}cudnn", "cuDNN"),
    _gemm(rf"^{_ARCHITECTURE}_(?:\w{{1,20}}_)?[hsdczi]\d{{0,6}}gemm", "cuBLAS"),
    KernelPattern(
        rf"{_CUTLASS}{_NAMED}{_UNIT}(?:fprop|dgrad|wgrad)\w{{0,40}}?_{_TILE}_(?P<k>\d{{1,4}})x\d",
        "cuDNN",
        "convolution",
        _CONV,
        whole=True,
        read=_unit,
        cover=Cover.AT_MOST,
    ),
    KernelPattern(
        rf"{_CUTLASS}{_NAMED}{_UNIT}gemm(?:_relu|_gelu|_bias){{0,2}}{_OUT}(?:_f32|_f16|_bf16)?"
        rf"_{_TILE}(?:_(?P<k>\d{{1,4}})x\d{{1,2}})?_{_LAYOUT}",
        "CUTLASS",
        "gemm",
        _GEMM,
        whole=True,
        read=_unit,
        cover=Cover.AT_MOST,
    ),
    KernelPattern(
        r"\bcutlass3x_sm\d{2,3}_(?:bs)?(?:tensorop|simt)_\w{0,60}?gemm_(?P<type>[a-z]{1,3}\d\w{0,3}?)_\w{0,80}?_"
        + _TILE_K
        + r"_\w{0,40}?"
        + _LAYOUT
        + "[nt]_",
        "CUTLASS",
        "gemm",
        _GEMM,
        whole=True,
    ),
    _gemm(r"^gemv\w{0,40}_kernel\w{0,10}$|gemv\w{0,10}::kernel$|^gemvNSP_kernel", "cuBLAS"),
    _gemm(r"^(?:dot_kernel|gemmk1_kernel|gemmSN_\w{2,20}|gemm_kernel\w{0,10})$", "cuBLAS"),
    KernelPattern(r"^(?:cublasLt::)?splitKreduce_kernel$", "cuBLAS", "split-K sum", OpClass.REDUCTION),
    KernelPattern(r"^epilogue::impl::globalKernel$", "cuBLAS", "gemm epilogue", OpClass.ELEMENTWISE),
    KernelPattern(r"^reduce_1Block_kernel$", "cuBLAS", "dot sum", OpClass.REDUCTION),
    _gemm(r"^cublasLt?::", "cuBLAS"),
    _conv(r"^cudnn_\w{0,80}(?:conv|fprop|dgrad|wgrad)", "cuDNN"),
    _conv(r"^(?:implicit|explicit|precomputed)_convolve|^conv2d_c1_k1_nchw", "cuDNN"),
    _conv(r"^cudnn::(?:winograd|cnn::(?:conv|wgrad)|detail::(?:implicit|dgrad|wgrad))", "cuDNN"),
)

_AMD: tuple[KernelPattern, ...] = (
    KernelPattern(
        r"^(?P<kind>f4|fp8|f8|[iI]8|bf16)gemm_(?P<out>bf16|fp16|f16|fp32)\w{0,80}?_(?P<m>\d{2,3})x(?P<n>\d{2,4})"
        r"(?:_|$)",
        "aiter",
        "gemm",
        _GEMM,
        read=_aiter_gemm,
    ),
    KernelPattern(r"^(?P<kind>f4|fp8|f8|[iI]8|bf16)gemm_", "aiter", "gemm", _GEMM, read=_aiter_gemm),
    KernelPattern(
        r"(?:^|aiter::)fmoe_(?P<out>bf16|fp16)_\w{0,12}?(?P<type>Fp8|Int8|MXfp4|MXFp4)_\w{0,40}?_(?P<m>\d{2,3})x"
        r"(?P<n>\d{2,4})(?:_|$)",
        "aiter",
        "moe gemm",
        _GEMM,
    ),
    KernelPattern(r"(?:^|aiter::)fmoe_|aiter::\w{0,30}moe_stage[12]", "aiter", "moe gemm", _GEMM),
    _gemm(r"^flatmm_|aiter::\w{0,40}gemm|aiter::(?:wv_?splitk|LLGemm)", "aiter"),
    _conv(
        r"^igemm_(?:fwd|bwd|wrw)_\w{0,40}?_(?P<type>bf16|fp16|fp32|int8)_\w{0,20}bt" + _TILE_K,
        "MIOpen",
    ),
    _conv(
        "^" + any_of("igemm_ miopenSp3Asm miopenGcnAsm MIOpenConv MIOpenCv gridwise_conv naive_conv_"),
        "MIOpen",
    ),
    KernelPattern(r"^ck::kernel_\w{0,40}conv", "CK", "convolution", _CONV, read=_ck_type),
    KernelPattern(r"^ck::kernel_(?:moe|grouped_gemm)", "CK", "moe gemm", _GEMM, read=_ck_type),
    KernelPattern(r"^ck::kernel_\w{0,60}(?:gemm|contraction)", "CK", "gemm", _GEMM, read=_ck_type),
    KernelPattern(
        r"^ck_tile::k.{0,60}?(?:MoeGemm|MoeFlatmm)", "CK", "moe gemm", _GEMM, whole=True, read=type_in_text
    ),
    KernelPattern(
        r"^ck_tile::k.{0,60}?(?:GemmKernel|Flatmm)", "CK", "gemm", _GEMM, whole=True, read=type_in_text
    ),
)

_OTHERS: tuple[KernelPattern, ...] = (
    KernelPattern(
        r"deep_gemm::sm\d{2,3}_\w{0,40}gemm\w{0,40}_impl$", "DeepGEMM", "gemm", _GEMM, read=_deep_gemm
    ),
    KernelPattern(
        r"deep_gemm::\w{0,20}(?:mqa_logits|paged_mqa)", "DeepGEMM", "attention logits", OpClass.ATTENTION
    ),
    KernelPattern(r"deep_gemm::fp8_(?:wgrad_)?gemm_kernel$", "DeepGEMM", "gemm", _GEMM, read=_old_deep_gemm),
    KernelPattern(r"deep_gemm::(?:transpose|pack|smxx_)", "DeepGEMM", "scale layout", OpClass.MOVE),
    _gemm(r"deep_gemm::", "DeepGEMM"),
    KernelPattern(
        r"^_p?_?matmul_ogs_\w{1,8}_(?P<types>\w{2,12}x\w{2,12}x\w{2,12})_" + _TILE_K + r"x\d",
        "triton_kernels",
        "moe gemm",
        _GEMM,
        read=_matmul_ogs,
        cover=Cover.AT_MOST,
    ),
    KernelPattern(r"^_p?_?matmul_ogs", "triton_kernels", "moe gemm", _GEMM),
    KernelPattern(
        r"^(?:bmm|gemm)_(?P<out>Bfloat16|Fp16|Fp32|E4m3|E2m1)_(?P<type>Bfloat16|Fp16|E4m3|E2m1)\w{0,120}?_t"
        + _TILE_K,
        "TensorRT-LLM",
        "gemm",
        _GEMM,
    ),
    _gemm(r"(?:^|::)Marlin$|awq_gemm|gptq_gemm|gemm_half_q_half|^(?:wvSpl\w{0,2}K|LLGemm)", "vLLM"),
    KernelPattern(r"DeltaRule|LinearAttention", "", "state-space scan", OpClass.CUSTOM, whole=True),
    KernelPattern(r"^cutlass::(?:device_kernel|Kernel2?)$", "CUTLASS", "gemm", _GEMM, read=_cutlass3),
)

PRODUCTS: tuple[KernelPattern, ...] = (*_TENSILE, *_NVIDIA, *_AMD, *_OTHERS)
