"""Number formats of a whole operation: what is multiplied, what is stored, what is quantised on the way.

Tables and runtimes name such a *scheme* (``fp8_block``, ``int4_wo``), programs state element types. Bits per
element include block scales: MX formats one 8-bit scale per 32 elements, NVFP4 one per 16, ``fp8_block`` one
32-bit scale per 128 x 128 of the weights and per 128 of the activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hespas.graph import find_dtype
from hespas.graph.dtypes import DTypeKind

__all__ = ["SCHEMES", "Scheme", "find_scheme"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """``rate_dtype`` sets the arithmetic rate, with ``products`` primitive products per multiply (6: full
    float32, never TF32). Bits are per stored element, scales included. ``quantizes``: the operation takes
    16-bit activations and quantises them itself, in kernels of its own.
    """

    name: str
    rate_dtype: str
    activation_bits: float
    weight_bits: float
    output_bits: float
    products: int = 1
    quantizes: bool = False


def _plain(name: str, bits: float, *, products: int = 1, rate: str = "") -> Scheme:
    return Scheme(
        name=name,
        rate_dtype=rate or name,
        activation_bits=bits,
        weight_bits=bits,
        output_bits=bits,
        products=products,
    )


def _mixed(name: str, rate: str, activation: float, weight: float, *, quantizes: bool = False) -> Scheme:
    return Scheme(
        name=name,
        rate_dtype=rate,
        activation_bits=activation,
        weight_bits=weight,
        output_bits=16,
        quantizes=quantizes,
    )


_ROWS = (
    _plain("f32_full", 32, products=6, rate="f32"),
    _mixed("fp8", "f8E4M3FN", 16, 8, quantizes=True),
    _mixed("fp8_block", "f8E4M3FN", 16, 8 + 32 / (128 * 128), quantizes=True),
    _mixed("nvfp4", "f4E2M1FN", 16, 4.5, quantizes=True),
    _mixed("sq", "i8", 16, 8, quantizes=True),
    _mixed("int8_wo", "bf16", 16, 8),
    _mixed("int4_wo", "bf16", 16, 4),
    _mixed("w4a16_mxfp4", "bf16", 16, 4.25),
    _mixed("w4a8_mxfp4_mxfp8", "f8E4M3FN", 8.25, 4.25),
    _mixed("a8w8", "i8", 8, 8),
    _mixed("a8w8_fp8", "f8E4M3FN", 8, 8),
    _mixed("a8w8_fp8_block", "f8E4M3FN", 8 + 32 / 128, 8 + 32 / (128 * 128)),
)

SCHEMES: Mapping[str, Scheme] = MappingProxyType({row.name: row for row in _ROWS})
"""Schemes that are no single element type, by the name tables and runtimes use."""


def find_scheme(name: str) -> Scheme | None:
    """The scheme of that name, of :data:`SCHEMES` or an element type in any spelling; None if neither."""
    if name in SCHEMES:
        return SCHEMES[name]
    entry = find_dtype(name)
    if entry is None or entry.kind in (DTypeKind.TOKEN, DTypeKind.OPAQUE):
        return None
    bits: float = 8 if entry.kind is DTypeKind.BOOL else entry.bits
    if entry.block_elements:
        bits += entry.block_scale_bits / entry.block_elements
    return _plain(entry.name, bits)
