"""Quantised programs as text. jaxlib's bindings lack MLIR's ``quant`` dialect and refuse ``!quant.uniform``
types.

The types are replaced by their storage types before parsing (``!quant.uniform<i8:f32, 0.1>`` -> ``i8``), and
``uniform_quantize``/``uniform_dequantize``, which then no longer verify, by marked ``convert`` ops that the
reader names back. Bytes stay right but for scales and zero points, which are a few bytes a tensor; a
diagnostic says so.
"""

from __future__ import annotations

import re

from hespas.graph import Diagnostics
from hespas.graph.errors import UnsupportedError

__all__ = ["MARK", "has_quantized_types", "to_storage_types"]

MARK = "hespas.op"
"""The attribute that keeps the true name of a replaced operation."""

_TYPE = r"!quant\.uniform<([iu])(\d+)(?:<[^<>]*>)?:[^<>]*>"
_OTHER = r"!quant\.(?!uniform<)"
# quoted or plain name, operand, and what follows the operand
_CONVERSION = r'("?)stablehlo\.(uniform_quantize|uniform_dequantize)\1(\s*\(?\s*%[\w$.#-]+\s*\)?\s*):'


def has_quantized_types(text: str) -> bool:
    """Whether a program mentions types of the ``quant`` dialect."""
    return "!quant." in text


def to_storage_types(text: str, path: str, diagnostics: Diagnostics) -> str:
    """The program with storage types. Raises ``UnsupportedError`` for other types of the dialect."""
    replaced, count = re.subn(_TYPE, _storage, text)
    other = re.search(_OTHER, replaced)
    if other is not None:
        at = other.start()
        raise UnsupportedError(
            f"quantised type {replaced[at : at + 40]!r} is not handled",
            path=path,
            position=f"line {replaced.count(chr(10), 0, at) + 1}",
            hint="uniform quantised types are; dequantise others first",
        )
    diagnostics.info(
        "stablehlo.quantized-storage",
        path,
        f"{count} quantised types read as their storage types; bytes of scales and zero points are left out",
        path=path,
    )
    return re.sub(_CONVERSION, rf'\1stablehlo.convert\1\3 {{{MARK} = "stablehlo.\2"}} :', replaced)


def _storage(found: re.Match[str]) -> str:
    return f"ui{found[2]}" if found[1] == "u" else f"i{found[2]}"
