"""Interning of attribute names: a handful of distinct names, millions of occurrences.

Names of up to 32 bytes are looked up by a hash of their words and compared in full; every other name, and the
first occurrence of each, goes through a dictionary.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.spans import Longs, Window, Words

__all__ = ["NOT_TEXT", "KeyTable"]

NOT_TEXT = -1
"""What stands for a name that is not UTF-8."""

_WORDS = 4
_SHORT = 8 * _WORDS
_BUCKETS = 1 << 12
_ROUNDS = 64
"""So many new names of a chunk are each looked for in all of it; more are taken one by one."""
_MIX = tuple(
    np.uint64(odd) for odd in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
)
# Row n keeps the first n bytes of a name's words.
_MASKS: Words = np.array(
    [
        [(1 << 8 * min(8, max(0, length - 8 * word))) - 1 for word in range(_WORDS)]
        for length in range(_SHORT + 1)
    ],
    np.uint64,
)


class KeyTable:
    """Distinct names in order of first appearance; shared by all chunks of a file."""

    __slots__ = ("_bucket", "_length", "_rows", "_words", "names")

    def __init__(self) -> None:
        """Start with no names."""
        self.names: list[str] = []
        self._rows: dict[bytes, int] = {}
        self._bucket = np.zeros(_BUCKETS, np.int32)
        self._words: Words = np.zeros((_WORDS, 64), np.uint64)
        self._length: Longs = np.full(64, -1, np.int64)

    def intern(self, window: Window, start: Longs, length: Longs) -> NDArray[np.int32]:
        """The row in ``names`` of each span (:data:`NOT_TEXT` where it is no UTF-8)."""
        short = np.minimum(length, _SHORT)
        words = [
            window.words[start + 8 * word] & _MASKS[:, word].take(short)
            for word in range(self._depth(length))
        ]
        mixed = words[0] * _MIX[0]
        for word, odd in zip(words[1:], _MIX[1:], strict=False):
            mixed ^= word * odd
        bucket = (mixed >> np.uint64(52)).view(np.int64)
        key = self._bucket.take(bucket)
        pending = np.flatnonzero(~self._same(key, words, length) | (length > _SHORT))
        long = length[pending] > _SHORT
        for row in pending[long].tolist():
            key[row] = self._add(window.u8[start[row] : start[row] + length[row]].tobytes())
        pending = pending[~long]
        for _ in range(_ROUNDS):
            if not len(pending):
                return key
            row = int(pending[0])
            found = self._add(window.u8[start[row] : start[row] + length[row]].tobytes())
            self._bucket[bucket[row]] = max(found, 0)
            alike = length[pending] == length[row]
            for column in words:
                alike &= column[pending] == column[row]
            key[pending[alike]] = found
            pending = pending[~alike]
        for row in pending.tolist():
            key[row] = self._add(window.u8[start[row] : start[row] + length[row]].tobytes())
        return key

    def add(self, name: str) -> int:
        """The row of a name that stands in no message."""
        return self._add(name.encode())

    def find(self, name: str) -> int:
        """The row of a name, -1 where it has not been met."""
        return self._rows.get(name.encode(), -1)

    @staticmethod
    def _depth(length: Longs) -> int:
        """Words needed to tell these names apart."""
        longest = int(length.max()) if len(length) else 0
        return min(_WORDS, max(1, (longest + 7) // 8))

    def _same(self, key: NDArray[np.int32], words: list[Words], length: Longs) -> NDArray[np.bool_]:
        """Where the name of ``key`` is what stands in ``words``."""
        same: NDArray[np.bool_] = self._length.take(key) == length
        for word, column in enumerate(words):
            same &= self._words[word].take(key) == column
        return same

    def _add(self, name: bytes) -> int:
        """The row of a name, new or old."""
        row = self._rows.get(name)
        if row is not None:
            return row
        try:
            text = name.decode()
        except UnicodeDecodeError:
            return NOT_TEXT
        row = self._rows[name] = len(self.names)
        self.names.append(text)
        if row == len(self._length):
            self._length = np.concatenate([self._length, np.full(row, -1, np.int64)])
            self._words = np.concatenate([self._words, np.zeros((_WORDS, row), np.uint64)], axis=1)
        if len(name) <= _SHORT:
            padded = np.frombuffer(name.ljust(_SHORT, b"\0"), "<u8")
            self._words[:, row] = padded
            self._length[row] = len(name)
        return row
