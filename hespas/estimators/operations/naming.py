"""One name for one operation, whoever wrote it: ``stablehlo.add``, ``aten::add_.Tensor`` and ``VECadd``."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["canonical_op", "timed_with_events"]

_EVENT_TIMES = "pytorch events"
"""How the names of variants begin whose times a host took with events."""

_SAME: Mapping[str, str] = {
    "addition": "add",
    "addu": "add_scalar",
    "subtract": "sub",
    "multiply": "mul",
    "mulu": "mul_scalar",
    "divide": "div",
    "divu": "div_scalar",
    "power": "pow",
    "powu": "pow_scalar",
    "pow_tensor_scalar": "pow_scalar",
    "exponential": "exp",
    "logistic": "sigmoid",
    "maximum": "max",
    "minimum": "min",
    "ln": "layer_norm",
    "native_layer_norm": "layer_norm",
    "input_layernorm": "rms_norm",
    "post_attention_layernorm": "rms_norm",
    "fused_rms_norm": "rms_norm",
    "emb": "embedding",
    "safe_softmax": "softmax",
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "alltoall": "all_to_all",
    "send_recv": "permute",
    "collective_permute": "permute",
}


def canonical_op(name: str) -> str:
    """The operation without dialect, overload, in-place mark and case; synonyms become one name."""
    bare = name.rpartition("::")[2] if "::" in name else name.rpartition(".")[2]
    if "::" in name:
        bare = bare.partition(".")[0]
    bare = bare.strip("_").casefold()
    return _SAME.get(bare, bare)


def timed_with_events(variant: str) -> bool:
    """Whether times of a variant hold what the host had to do: 14 to 30 us that no kernel takes."""
    return variant.startswith(_EVENT_TIMES)
