"""Where JSON text can be cut: between the elements of an array whose end may not be there yet.

Cutting at a separator that one writer uses is not safe (names of kernels may hold it), so a cut is either
proved by a parser that takes everything before it for whole elements, or found here with strings skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Cut", "array_cut", "depths_at", "likely_cut"]

_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_STEP = np.array([(byte in b"{[") - (byte in b"}]") for byte in range(256)], np.int8)


@dataclass(frozen=True, slots=True)
class Cut:
    """``behind`` is the position behind the last whole element (0: there is none); ``closed`` the position
    of the bracket that ends the array, -1 where it is not in the text.
    """

    behind: int
    closed: int


def likely_cut(text: bytes | bytearray) -> int:
    """The position behind the last ``}`` that a comma and a ``{`` follow, 0 where there is none."""
    at = len(text)
    while at > 0:
        at = text.rfind(b"}", 0, at)
        if at < 0:
            return 0
        rest = text[at + 1 : at + 64].lstrip()
        if rest.startswith(b",") and rest[1:].lstrip().startswith(b"{"):
            return at + 1
    return 0


def array_cut(text: bytes | bytearray) -> Cut:
    """Look at all brackets outside strings; ``text`` starts inside the array. O(len(text)), vectorised."""
    data = np.frombuffer(text, np.uint8)
    depth = np.cumsum(np.where(_inside_strings(data), 0, _STEP[data]), dtype=np.int32)
    closed = np.flatnonzero(depth < 0)
    end = int(closed[0]) if len(closed) else -1
    within = depth[:end] if end >= 0 else depth
    whole = np.flatnonzero((within == 0) & (data[: len(within)] == ord("}")))
    return Cut(int(whole[-1]) + 1 if len(whole) else 0, end)


def depths_at(text: bytes, places: Sequence[int]) -> list[int]:
    """How many brackets, outside strings, are open at some positions of a document. O(len(text))."""
    data = np.frombuffer(text, np.uint8)
    depth = np.cumsum(np.where(_inside_strings(data), 0, _STEP[data]), dtype=np.int32)
    return [int(depth[place]) for place in places]


def _inside_strings(data: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which characters stand between quotes; a quote behind an odd number of backslashes is none."""
    quotes = data == _QUOTE
    slashes = np.flatnonzero(data == _BACKSLASH)
    if len(slashes):
        starts = np.flatnonzero(np.diff(slashes, prepend=slashes[0] - 2) != 1)
        lengths = np.diff(np.append(starts, len(slashes)))
        behind = slashes[starts] + lengths
        odd = behind[(lengths % 2 == 1) & (behind < len(data))]
        quotes[odd] = False
    opened: NDArray[np.bool_] = (np.cumsum(quotes, dtype=np.int32) % 2).astype(np.bool_)
    return opened
