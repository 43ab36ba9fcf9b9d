"""Element types of MLIR's ``quant`` dialect: https://mlir.llvm.org/docs/Dialects/QuantDialect/.

``!quant.uniform<i8<-127:127>:f32:1, {1.0e-02:3, 2.0e-02}>`` stores i8 for f32, with a scale and a zero point
for each index of dimension 1. Elements count at the width of the storage type. A scale counts at the width of
the expressed type and a zero point at that of the storage type, stored or not: one of each per tensor, n per
axis, one for each block of a sub-channel type. The bindings know no accessors, so the printed type is read.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hespas.graph import DType, find_dtype

__all__ = ["Quantised", "read_quantised"]

_UNIFORM = re.compile(r"!quant\.uniform<(\w+)(?:<[^<>]*>)?:(\w+)(?::\d+|:\{[^{}]*\})?, (.*)>", re.DOTALL)
_ANY = re.compile(r"!quant\.any<(\w+)(?:<[^<>]*>)?(?::(\w+))?>")


class Quantised(NamedTuple):
    """``element`` is the storage type, None where unknown; ``extra_bytes`` scales and zero points;
    ``expressed`` the type whose values are meant, None where unknown.
    """

    element: DType | None
    extra_bytes: int
    expressed: DType | None = None


def read_quantised(text: str) -> Quantised | None:
    """A printed element type, None where it is not quantised."""
    if not text.startswith("!quant."):
        return None
    uniform = _UNIFORM.fullmatch(text)
    if uniform is None:
        other = _ANY.match(text)
        if other is None:
            return Quantised(None, 0)
        return Quantised(find_dtype(other[1]), 0, find_dtype(other[2] or ""))
    storage, expressed = find_dtype(uniform[1]), find_dtype(uniform[2])
    pairs = uniform[3].count(",") + 1
    if storage is None or expressed is None:
        return Quantised(storage, 0, expressed)
    return Quantised(storage, expressed.storage_bytes(pairs) + storage.storage_bytes(pairs), expressed)
