"""Where JSON text can be cut: brackets outside strings, found for a whole block at once.

Cutting at a separator that one writer uses is not safe (texts may hold it), so a cut is either proved by a
parser that takes everything before it for whole elements, or found here with strings skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["BracketScan", "Brackets", "array_cut"]

_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_STEP = np.array([(byte in b"{[") - (byte in b"}]") for byte in range(256)], np.int8)


class Brackets(NamedTuple):
    """Per character: whether it stands between quotes, what it opens (1) or closes (-1) outside of them, and
    how many brackets are open behind it.
    """

    inside: NDArray[np.bool_]
    step: NDArray[np.int8]
    depth: NDArray[np.int32]


@dataclass(slots=True)
class BracketScan:
    """Where a scan of a text in blocks stands: inside a string or not, behind a lone backslash or not, and
    how many brackets are open.
    """

    inside: bool = False
    escaped: bool = False
    depth: int = 0

    def scan(self, text: bytes | bytearray | memoryview[int] | NDArray[np.uint8]) -> Brackets:
        """The next block. O(len(text)), vectorised."""
        data = np.frombuffer(text, np.uint8)
        inside = ((np.cumsum(self._quotes(data), dtype=np.int32) + self.inside) % 2).astype(np.bool_)
        step = _STEP[data]
        step[inside] = 0
        depth = np.cumsum(step, dtype=np.int32)
        if self.depth:
            depth += np.int32(self.depth)
        if len(data):
            self.inside, self.depth = bool(inside[-1]), int(depth[-1])
        return Brackets(inside, step, depth)

    def _quotes(self, data: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Which characters are quotes; behind an odd number of backslashes there is none."""
        quotes: NDArray[np.bool_] = data == _QUOTE
        slashes = np.flatnonzero(data == _BACKSLASH)
        if self.escaped:
            slashes = np.concatenate(([-1], slashes))
        if len(slashes) and len(data):
            starts = np.flatnonzero(np.diff(slashes, prepend=slashes[0] - 2) != 1)
            lengths = np.diff(np.append(starts, len(slashes)))
            escaped = (slashes[starts] + lengths)[lengths % 2 == 1]
            self.escaped = bool(len(escaped)) and int(escaped[-1]) == len(data)
            quotes[escaped[: len(escaped) - self.escaped]] = False
        return quotes


class _ArrayCut(NamedTuple):
    """``behind`` is the position behind the last whole object (0: there is none); ``closed`` the position of
    the bracket that ends the array, -1 where it is not in the text.
    """

    behind: int
    closed: int


def array_cut(text: bytes | bytearray) -> _ArrayCut:
    """Where an array of objects may be cut; ``text`` starts inside of it. O(len(text)), vectorised."""
    _, step, depth = BracketScan().scan(text)
    closed = np.flatnonzero(depth < 0)
    end = int(closed[0]) if len(closed) else -1
    within = slice(0, end if end >= 0 else len(depth))
    whole = np.flatnonzero((depth[within] == 0) & (step[within] < 0))
    return _ArrayCut(int(whole[-1]) + 1 if len(whole) else 0, end)
