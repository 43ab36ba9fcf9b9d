"""Names and figures as people read them. Names come from measured files: they may hold anything."""

from __future__ import annotations

import unicodedata
from math import isnan

__all__ = ["UNKNOWN", "clip", "count_text", "percent", "rate_text", "shown", "time_text"]

UNKNOWN = "\N{EN DASH}"
"""Stands where nothing is known."""

_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"})
_RATES = ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"))
_TIMES = ((1e9, "s"), (1e6, "ms"), (1e3, "us"))


def clip(text: str, limit: int) -> str:
    """A text of at most ``limit`` characters: its start and its end, ``…`` for what is left out between."""
    if len(text) <= limit:
        return text
    tail = max((limit - 1) // 3, 1)
    return f"{text[: limit - 1 - tail]}…{text[-tail:]}"


def shown(text: str, limit: int = 160) -> str:
    r"""A name cut to ``limit`` characters, whose control, bidirectional and unpaired ones are written as
    ``\u202e``: what would reorder, hide or break the text around it becomes visible.
    """
    cut = clip(text, limit)
    if cut.isprintable():
        return cut
    return "".join(
        _escaped(letter) if unicodedata.category(letter) in _INVISIBLE else letter for letter in cut
    )


def _escaped(letter: str) -> str:
    code = ord(letter)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def percent(value: float, *, signed: bool = False) -> str:
    """``12.3%`` of 0.123; without decimals from 1000 % on."""
    if isnan(value):
        return UNKNOWN
    places = 0 if abs(value) >= 10 else 1
    return f"{value:{'+' if signed else ''},.{places}%}"


def time_text(time_ns: float, *, signed: bool = False) -> str:
    """Nanoseconds in the unit that leaves three or four digits."""
    if isnan(time_ns):
        return UNKNOWN
    sign = "+" if signed else ""
    for size, unit in _TIMES:
        if abs(time_ns) >= size:
            return f"{_digits(time_ns / size, sign)} {unit}"
    return f"{time_ns:{sign}.3g} ns"


def _digits(value: float, sign: str) -> str:
    places = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    return f"{value:{sign},.{places}f}"


def rate_text(flops_per_s: float) -> str:
    """FLOP/s in the unit that leaves three or four digits."""
    if isnan(flops_per_s):
        return UNKNOWN
    size, unit = next((row for row in _RATES if flops_per_s >= row[0]), _RATES[-1])
    return f"{flops_per_s / size:,.4g} {unit}"


def count_text(value: float) -> str:
    """A count with separators; a dash for one nobody knows."""
    return UNKNOWN if isnan(value) else f"{value:,.0f}"
