"""Patterns of the names of attention kernels.

Name formats follow the sources of FlashAttention (https://github.com/Dao-AILab/flash-attention), FlashInfer
(https://github.com/flashinfer-ai/flashinfer), vLLM (https://github.com/vllm-project/vllm), SGLang
(https://github.com/sgl-project/sglang), Composable Kernel, AITER and AOTriton. The formats of cuDNN and
TensorRT-LLM follow recorded traces.
"""

from __future__ import annotations

import re
from dataclasses import replace

from hespas.costs.kernels.facts import (
    Cover,
    KernelFacts,
    KernelPattern,
    KernelReader,
    cute_shapes,
    element_type,
    type_in_text,
)
from hespas.costs.kernels.names import KernelName
from hespas.graph import OpClass

__all__ = ["ATTENTIONS"]

_FORWARD, _BACKWARD, _COMBINE = "attention forward", "attention backward", "attention combine"
_TRAITS = re.compile(r"Flash_(?:fwd|bwd)_kernel_traits<(\d{1,4}), (\d{1,4}), (\d{1,4})")
"""Head size, queries and keys of a tile."""
_CK_SHAPE = re.compile(r"TileFmhaShape<(?:ck_tile::)?sequence<(\d{1,4}), (\d{1,4}), \d{1,4}, (\d{1,4})")
"""Queries and keys of a tile, a step, value head size."""


def _tiled(facts: KernelFacts, elements: int) -> KernelFacts:
    """Return facts for an attention kernel whose thread blocks compute at most ``elements`` elements each, a
    tile of rows of queries. Blocks beyond the end of a short sequence compute nothing.
    """
    return replace(facts, cover=Cover.AT_MOST, per_block=float(elements))


def _paged(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    """Return the facts in the template arguments ``<.., block size, head size, threads, alibi, queries per
    key head, ...>`` of a paged attention kernel.

    A thread block computes the queries of one key head over a part of the keys of one sequence.
    """
    head, shared = name.number(5), name.number(8)
    return _tiled(facts, head * shared) if head > 0 and shared > 0 else facts


def _flash2(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    facts = replace(facts, dtype=element_type(name.text))
    traits = _TRAITS.search(name.text)
    if traits is None:
        return facts
    head, queries, keys = (int(extent) for extent in traits.groups())
    facts = replace(facts, tile=(queries, keys), sizes=(("head", head),))
    return _tiled(facts, queries * head) if name.base == "flash_fwd_kernel" else facts


def _flash3(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    """Return the facts with the tile (queries, keys, head size) in a FlashAttention 3 kernel name: the first
    triple of constants that is not a cluster shape.
    """
    facts = type_in_text(facts, name, match)
    shape = next((extents for extents in cute_shapes(name.text) if min(extents) > 2), None)
    if shape is None:
        return facts
    return replace(facts, tile=shape[:2], sizes=(("head", shape[2]),))


def _ck_fmha(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    facts = replace(facts, dtype=element_type(name.text))
    shape = _CK_SHAPE.search(name.text)
    if shape is None:
        return facts
    queries, keys, head = (int(extent) for extent in shape.groups())
    facts = replace(facts, tile=(queries, keys), sizes=(("head", head),))
    return _tiled(facts, queries * head) if facts.family == _FORWARD else facts


def _row(
    pattern: str,
    library: str,
    family: str = "attention",
    *,
    read: KernelReader | None = None,
    whole: bool = False,
) -> KernelPattern:
    return KernelPattern(pattern, library, family, OpClass.ATTENTION, whole, read)


_PAGED = "paged attention"
_CK = r"^ck_tile::k.{0,60}?"
_TYPE = r"(?P<type>bf16|fp16|f16|f32|fp8|e4m3)"
_TILE = r"(?P<m>\d{1,4})x(?P<n>\d{1,4})"

_FLASH: tuple[KernelPattern, ...] = (
    _row(r"flash_fwd_splitkv_combine_kernel$", "FlashAttention", _COMBINE, read=_flash2),
    _row(r"flash::flash_fwd_(?:splitkv_)?kernel$", "FlashAttention", _FORWARD, read=_flash2),
    _row(r"flash::flash_bwd_\w{0,60}kernel$", "FlashAttention", _BACKWARD, read=_flash2),
    _row(r"flash::FlashAttnFwdCombine", "FlashAttention", _COMBINE, read=type_in_text, whole=True),
    _row(r"flash::FlashAttnFwdSm\d", "FlashAttention", _FORWARD, read=_flash3, whole=True),
    KernelPattern(r"flash::prepare_varlen", "FlashAttention", "batch bookkeeping", OpClass.ELEMENTWISE),
    _row(r"flash::FlashAttnBwd", "FlashAttention", _BACKWARD, read=type_in_text, whole=True),
    _row(r"^kernel_cutlass_\w{0,20}flash_\w{0,40}[bB](?:ack)?wa?r?d", "FlashAttention", _BACKWARD),
    _row(r"^kernel_cutlass_\w{0,20}flash_attn", "FlashAttention", _FORWARD),
    _row(r"flash_fwd_mla_combine|flash_fwd_\w{0,20}mla_combine", "FlashMLA", _COMBINE, read=type_in_text),
    _row(r"flash_fwd_\w{0,20}mla|flash_mla::|sm\d{2,3}::\w{0,40}mla", "FlashMLA", read=type_in_text),
)

_FRAMEWORKS: tuple[KernelPattern, ...] = (
    _row(rf"^fmha_cutlassF_{_TYPE}_aligned_{_TILE}", "PyTorch", _FORWARD),
    _row(rf"^fmha_cutlassB_{_TYPE}_aligned_{_TILE}", "PyTorch", _BACKWARD),
    _row(r"^fmha_cutlass|PyTorchMemEffAttention", "PyTorch", whole=True, read=type_in_text),
    _row(r"attention_kernel(?:_backward)?_batched_impl", "xFormers", read=type_in_text),
    _row(r"^cudnn_\w{0,80}sdpa\w{0,60}(?:fprop|fwd)", "cuDNN", _FORWARD),
    _row(r"^cudnn_\w{0,80}sdpa\w{0,60}(?:bprop|bwd)", "cuDNN", _BACKWARD),
    _row(r"^cudnn_\w{0,80}(?:sdpa|fmha|flash)", "cuDNN"),
    _row(rf"^fmha_v2_\w{{0,40}}?_{_TYPE}", "TensorRT-LLM", _FORWARD),
    _row(r"^[fF]mhaSm\d{2,3}\w{0,8}Kernel_Qk?v?(?P<type>Bfloat16|Fp16|E4m3)", "TensorRT-LLM"),
    _row(r"^fmhaReductionKernel", "TensorRT-LLM", _COMBINE),
    _row(r"^[fF]mhaSm\d{2,3}|mha::kernel_mha|^kernel_mha|(?:^|::)xqa", "TensorRT-LLM"),
    _row(r"^(?:attn_fwd|bwd_kernel_(?:fuse|dk_dv|dq)|bwd_preprocess\w{0,20})$", "AOTriton"),
    _row(r"^_fwd_(?:grouped_)?kernel_stage[12]$|^_fwd_kernel(?:_\w{0,20})?$", "Triton"),
    _row(r"^_(?:attn_fwd|attn_bwd|bwd_preprocess|attention_kernel)\w{0,30}$", "Triton"),
    _row(r"^triton_\w{3,4}_fused_\w{0,200}flex_attention_backward", "Inductor", _BACKWARD),
    _row(r"^triton_\w{3,4}_fused_\w{0,200}flex_(?:attention|decoding)", "Inductor", _FORWARD),
)

_SERVING: tuple[KernelPattern, ...] = (
    _row(r"flashinfer::\w{0,40}(?:Prefill|Decode)With", "FlashInfer", read=type_in_text, whole=True),
    _row(r"flashinfer::\w{0,60}Merge\w{0,20}States?", "FlashInfer", _COMBINE, read=type_in_text),
    _row(r"flashinfer::.{0,80}?(?:mla|MLA|[Aa]ttention|BatchAttention)", "FlashInfer", read=type_in_text),
    _row(r"paged_attention_ll4mi_QKV_\w{0,20}kernel$", "vLLM", _PAGED, read=_paged),
    _row(r"paged_attention_\w{0,20}reduce_kernel$", "vLLM", _COMBINE),
    _row(r"paged_attention_v[12]_kernel$", "vLLM", _PAGED),
    _row(r"(?:^|::)merge_attn_states_kernel$", "vLLM", _COMBINE),
    _row(r"^kernel_(?:unified_attention_[23]d|paged_attention_2d)", "vLLM", _PAGED),
    _row(r"^reduce_segments$", "vLLM", _COMBINE),
    _row(_CK + r"FmhaFwdSplitKVCombine", "CK", _COMBINE, read=_ck_fmha, whole=True),
    _row(_CK + r"FmhaBwd", "CK", _BACKWARD, read=_ck_fmha, whole=True),
    _row(_CK + r"Fmha", "CK", _FORWARD, read=_ck_fmha, whole=True),
    _row(rf"(?:^|aiter::)fmha_bwd_hd\d{{2,3}}\w{{0,20}}?_{_TYPE}", "aiter", _BACKWARD),
    _row(rf"(?:^|aiter::)fmha_(?:v3_)?fwd_hd\d{{2,3}}\w{{0,20}}?_{_TYPE}", "aiter", _FORWARD),
    _row(rf"(?:^|aiter::)(?:mla|pa)_{_TYPE}_", "aiter", _PAGED),
    _row(
        r"(?:^|aiter::)(?:mla|pa)_a\d{1,2}w\d{1,2}_|aiter::\w{0,20}(?:mla|paged_attention|pa_|fmha|mha)",
        "aiter",
    ),
)

ATTENTIONS: tuple[KernelPattern, ...] = (*_FLASH, *_FRAMEWORKS, *_SERVING)
