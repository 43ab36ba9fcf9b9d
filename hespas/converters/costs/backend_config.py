"""Backend configurations of custom calls: the parts that say what a call costs.

XLA writes them as protobuf JSON, where integers may be spelled as strings
(xla/service/gpu/backend_configs.proto).
"""

from __future__ import annotations

from math import nan

import msgspec

__all__ = [
    "Attention",
    "BackendConfig",
    "Estimate",
    "Extents",
    "Gemm",
    "GemmDims",
    "Kernel",
    "PrecisionConfig",
    "parse_config",
]


class GemmDims(msgspec.Struct, frozen=True):
    """Dimension numbers of a product."""

    lhs_contracting_dimensions: tuple[int, ...] = ()
    rhs_contracting_dimensions: tuple[int, ...] = ()
    lhs_batch_dimensions: tuple[int, ...] = ()
    rhs_batch_dimensions: tuple[int, ...] = ()


class PrecisionConfig(msgspec.Struct, frozen=True):
    """One precision for each operand."""

    operand_precision: tuple[str, ...] = ()


class Gemm(msgspec.Struct, frozen=True):
    """A library product."""

    dot_dimension_numbers: GemmDims | None = None
    precision_config: PrecisionConfig = PrecisionConfig()


class Extents(msgspec.Struct, frozen=True):
    """A shape."""

    dimensions: tuple[int, ...] = ()


class Attention(msgspec.Struct, frozen=True):
    """A fused attention: the shape of its scores."""

    intermediate_tensor_shape: Extents = Extents()


class Estimate(msgspec.Struct, frozen=True):
    """What a kernel's author says it costs."""

    flops: float = nan
    transcendentals: float = 0.0
    bytes_accessed: float = nan


class Kernel(msgspec.Struct, frozen=True):
    """A hand-written kernel."""

    cost_estimate: Estimate | None = None


class BackendConfig(msgspec.Struct, frozen=True):
    """Whatever one of the known targets states."""

    gemm_backend_config: Gemm | None = None
    cudnn_fmha_backend_config: Attention | None = None
    custom_call_config: Kernel | None = None
    dot_dimension_numbers: GemmDims | None = None


def parse_config(text: str) -> BackendConfig | None:
    """The configuration, None where the text is no such JSON."""
    try:
        return msgspec.json.decode(text.encode(), type=BackendConfig, strict=False)
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return None
