"""Two records of the same operations, in order, with gaps in either: which entries belong together."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["common_order"]

_WINDOW = 2048
"""Entries compared at once: gaps of half as many are bridged."""


def common_order(first: Sequence[int], second: Sequence[int]) -> list[tuple[int, int]]:
    """Places of a longest common subsequence, found window by window: linear in the length.

    Within a window the result is a longest one (bit-parallel, Hyyro 2004).
    """
    pairs: list[tuple[int, int]] = []
    left, right = 0, 0
    while left < len(first) and right < len(second):
        one, other = first[left : left + _WINDOW], second[right : right + _WINDOW]
        last = left + len(one) == len(first) and right + len(other) == len(second)
        found = _longest(one, other)
        if not last:  # the end of a window knows nothing of what follows
            found = [pair for pair in found if max(pair) < _WINDOW // 2]
        pairs.extend((left + a, right + b) for a, b in found)
        if last:
            break
        steps = (found[-1][0] + 1, found[-1][1] + 1) if found else (_WINDOW // 2, _WINDOW // 2)
        left, right = left + steps[0], right + steps[1]
    return pairs


def _longest(first: Sequence[int], second: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of one longest common subsequence. O(len(first) * len(second) / word)."""
    places: dict[int, int] = {}
    for place, value in enumerate(second):
        places[value] = places.get(value, 0) | 1 << place
    everywhere = (1 << len(second)) - 1
    row = everywhere
    rows: list[int] = []
    for value in first:
        met = row & places.get(value, 0)
        row = ((row + met) | (row - met)) & everywhere
        rows.append(row)
    return _traced(rows, len(second))


def _traced(rows: list[int], width: int) -> list[tuple[int, int]]:
    """Walk back from the end; a bit that is 0 says that the column adds one to the length."""
    pairs: list[tuple[int, int]] = []
    above, column = len(rows), width
    while above and column:
        bit = 1 << (column - 1)
        if rows[above - 1] & bit:
            column -= 1
            continue
        above -= 1
        if above and not rows[above - 1] & bit:
            continue
        column -= 1
        pairs.append((above, column))
    pairs.reverse()
    return pairs
