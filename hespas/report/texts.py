"""Texts of quantities, counts and names in terminals, Markdown and pages.

Names come from measured files and may contain any characters.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from math import isfinite, isnan

__all__ = [
    "UNKNOWN",
    "NameTable",
    "bytes_text",
    "clip",
    "count_text",
    "counted",
    "energy_text",
    "fits_text",
    "flops_text",
    "plain_text",
    "shown",
    "time_text",
]

UNKNOWN = "\N{EN DASH}"
"""Text of an unknown figure in pages and Markdown."""

_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"})
_LENGTH_LIMITS = (1000, 400, 240, 160, 100, 60, 30)
_MOST_BYTES = 1_100_000
_MAX_DECIMAL = 1e15
"""Figures from here on are written with an exponent."""


def _scaled(value: float, units: Sequence[str], step: float) -> str:
    if isnan(value):
        return "unknown"
    index = 0
    while abs(value) >= step and index < len(units) - 1:
        value /= step
        index += 1
    if abs(value) >= _MAX_DECIMAL:
        return f"{_exponent_text(value)} {units[index]}"
    digits = f"{value:,.0f}" if index == 0 and value == int(value) else f"{value:,.3f}"
    return f"{digits} {units[index]}"


def _exponent_text(value: float) -> str:
    """Format a figure that is infinite or too large for all unit prefixes."""
    if isfinite(value):
        return f"{value:.3e}"
    return "infinite" if value > 0 else "-infinite"


def flops_text(flops: float) -> str:
    """Format floating-point operations with a decimal prefix."""
    return _scaled(flops, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"), 1000)


def bytes_text(count: float) -> str:
    """Format bytes with a decimal prefix."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"), 1000)


def energy_text(energy_j: float) -> str:
    """Format an energy with a fitting unit."""
    return _scaled(energy_j * 1e9, ("nJ", "uJ", "mJ", "J", "kJ", "MJ"), 1000)


def time_text(duration_ns: float) -> str:
    """Format a duration with a fitting unit."""
    return _scaled(duration_ns, ("ns", "us", "ms", "s"), 1000)


def fits_text(fits: bool | None, capacity_bytes: float) -> str:
    """Return whether a use of memory fits the device (None: unknown); empty for an unknown capacity."""
    if isnan(capacity_bytes):
        return ""
    verb = {True: "fits", False: "does not fit", None: "unknown whether it fits"}[fits]
    return f"{verb} the {bytes_text(capacity_bytes)} of the device"


def count_text(count: float) -> str:
    """Format a count with thousands separators, and one decimal if it is fractional."""
    if isnan(count):
        return "unknown"
    if abs(count) >= _MAX_DECIMAL:
        return _exponent_text(count)
    return f"{count:,.0f}" if count == int(count) else f"{count:,.1f}"


def counted(count: float, noun: str, plural: str = "") -> str:
    """Format a count with its noun: ``1 rank``, ``2 classes``. ``plural`` is the plural of the last word if
    it is irregular.
    """
    if count == 1:
        return f"1 {noun}"
    if plural:
        return f"{count_text(count)} {' '.join((*noun.split()[:-1], plural))}"
    return f"{count_text(count)} {noun}{'es' if noun.endswith('s') else 's'}"


def plain_text(text: str) -> str:
    """Return a text as one line. Characters that break lines, control a terminal or cannot be encoded are
    escaped as in JSON.
    """
    if text.isprintable():
        return text

    def escaped(character: str) -> str:
        short = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(character)
        if short is not None:
            return short
        code = character.encode("utf-16-be", "surrogatepass").hex()
        return "".join(f"\\u{code[start : start + 4]}" for start in range(0, len(code), 4))

    # translate() escapes each distinct character once, also in megabytes of text.
    return text.translate({ord(char): escaped(char) for char in set(text) if not char.isprintable()})


def clip(text: str, limit: int) -> str:
    """Shorten a text to ``limit`` characters: its start, ``…`` and its end."""
    if len(text) <= limit:
        return text
    tail = max((limit - 1) // 3, 1)
    return f"{text[: limit - 1 - tail]}…{text[-tail:]}"


def shown(text: str, limit: int = 160) -> str:
    r"""Return a name of at most ``limit`` characters, with invisible characters written as ``\u202e``.

    Control, bidirectional and unpaired surrogate characters are written in this way, because they reorder,
    hide or break the text around them.
    """
    cut = clip(text, limit)
    if cut.isprintable():
        return cut

    def escaped(letter: str) -> str:
        code = ord(letter)
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

    return "".join(
        escaped(letter) if unicodedata.category(letter) in _INVISIBLE else letter for letter in cut
    )


class NameTable:
    """Table of the distinct names that a page shows, so that its data can refer to them by row."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}

    def row(self, name: str) -> int:
        """Return the row of a name; a new name gets a new row."""
        return self._rows.setdefault(name, len(self._rows))

    def texts(self, most_bytes: int = _MOST_BYTES) -> list[str]:
        """Return the names, shortened as little as necessary for at most ``most_bytes`` bytes of JSON.

        Names are not shortened below the smallest length limit, even if they are then too long together.
        """
        texts: list[str] = []
        for limit in _LENGTH_LIMITS:
            texts = [shown(name, limit) for name in self._rows]
            size = 0
            for text in texts:  # the JSON of a page needs six bytes for each of <, > and &
                escaped = 5 * sum(map(text.count, "<>&")) + sum(map(text.count, '"\\'))
                size += len(text.encode("utf-8", "replace")) + escaped + 3
            if size <= most_bytes:
                break
        return texts
