"""The two binary trees of an all-reduce: who is whose parent.

The root has one child, which heads a full binary tree of the other levels. Places are numbered in order
(left, node, right), so that the root of the first tree is the last place, that of the second tree the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["TreePlace", "tree_place"]


class TreePlace(NamedTuple):
    """The ranks a rank talks to: -1 is no parent, children are left then right."""

    parent: int
    children: tuple[int, ...]


def tree_place(ring: Sequence[int], place: int, number: int) -> TreePlace:
    """The place of a rank in the tree with this number: even ones have the last rank as root, odd the first.

    ``ring`` has a power of two of ranks. In-order numbers of a full tree tell the level: trailing ones.
    """
    count = len(ring)
    root_is_last = number % 2 == 0
    root = count - 1 if root_is_last else 0
    first = 0 if root_is_last else 1  # of the full tree, which numbers its count - 1 places from here
    top = count // 2 - 1 + first
    if place == root:
        return TreePlace(-1, (ring[top],))
    local = place - first
    reach = ~local & (local + 1)  # to the parent; twice as far as to the children
    children = (ring[place - reach // 2], ring[place + reach // 2]) if reach > 1 else ()
    if place == top:
        return TreePlace(ring[root], children)
    parent = place + reach if local // (2 * reach) % 2 == 0 else place - reach
    return TreePlace(ring[parent], children)
