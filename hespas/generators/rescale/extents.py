"""Where an extent of one tensor of an operation stands in its others, by their shapes alone.

A graph keeps no dimension numbers, so every way in which an operation may relate the shapes at hand is taken
and the answer is the one that all of them agree on; None where they do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import prod

__all__ = ["Dims", "Shape", "Ways", "broadcasts", "permuted", "products", "reductions", "reshaped"]

Shape = tuple[int, ...]
Dims = frozenset[int]
"""Places of dimensions in a shape."""
Ways = Iterator[tuple[tuple[tuple[int, int], ...], ...]]
"""Ways to relate the tensors of an operation: each is classes of (tensor, dimension) that are one extent."""


def reshaped(source: Shape, target: Shape, dims: Dims) -> Dims | None:
    """Where split dimensions stand after a reshape: both shapes fall into runs of equal products, and what
    splits a run splits its slowest dimension that is not 1.
    """
    found: set[int] = set()
    a = b = 0
    while a < len(source) or b < len(target):
        first, second = a, b
        left = right = 1
        while True:
            if left <= right and a < len(source):
                left, a = left * source[a], a + 1
            elif b < len(target):
                right, b = right * target[b], b + 1
            else:
                break
            if left == right and left > 1:
                break
        slowest = next((place for place in range(first, a) if source[place] != 1), -1)
        inside = {place for place in dims if first <= place < a}
        if inside - {slowest}:
            return None
        if inside:
            place = next((place for place in range(second, b) if target[place] != 1), -1)
            if place < 0:
                return None
            found.add(place)
    return frozenset(found)


def permuted(source: Shape, target: Shape, dims: Dims) -> Dims | None:
    """Where dimensions stand after a transpose, of which the permutation is not known."""
    found: set[int] = set()
    for extent in {source[place] for place in dims}:
        places = {place for place, other in enumerate(source) if other == extent}
        if not places <= dims:
            return None
        found |= {place for place, other in enumerate(target) if other == extent}
    return frozenset(found) if len(found) == len(dims) else None


def broadcasts(source: Shape, target: Shape) -> Ways:
    """Ways to lay a tensor into a larger one, in order; an extent of 1 is repeated."""
    for chosen in combinations(range(len(target)), len(source)):
        if all(source[place] in (1, target[into]) for place, into in enumerate(chosen)):
            yield tuple(((0, a), (1, b)) for a, b in enumerate(chosen) if source[a] == target[b])


def reductions(source: Shape, target: Shape) -> Ways:
    """Ways to leave dimensions of a tensor out."""
    for chosen in combinations(range(len(source)), len(target)):
        if all(source[place] == target[into] for into, place in enumerate(chosen)):
            yield tuple(((0, place), (1, into)) for into, place in enumerate(chosen))


def products(lhs: Shape, rhs: Shape, result: Shape, sizes: tuple[int, int, int, int]) -> Ways:
    """Ways to multiply: batch, rows, columns and contracted extents have the products ``sizes``."""
    for left in product("bmk", repeat=len(lhs)):
        if [_sized(lhs, left, kind) for kind in "bmk"] != [sizes[0], sizes[1], sizes[3]]:
            continue
        for right in product("bnk", repeat=len(rhs)):
            if [_sized(rhs, right, kind) for kind in "bnk"] != [sizes[0], sizes[2], sizes[3]]:
                continue
            way = _joined(lhs, rhs, result, left, right)
            if way is not None:
                yield way


def _sized(shape: Shape, kinds: Sequence[str], wanted: str) -> int:
    return prod(extent for extent, kind in zip(shape, kinds, strict=True) if kind == wanted)


def _places(kinds: Sequence[str], wanted: str) -> list[int]:
    return [place for place, kind in enumerate(kinds) if kind == wanted]


def _joined(
    lhs: Shape, rhs: Shape, result: Shape, left: Sequence[str], right: Sequence[str]
) -> tuple[tuple[tuple[int, int], ...], ...] | None:
    """The classes of one way, None where the shapes do not admit it. Dimensions of a kind pair in order."""
    batch, other = _places(left, "b"), _places(right, "b")
    inner, partner = _places(left, "k"), _places(right, "k")
    rows, columns = _places(left, "m"), _places(right, "n")
    places = (*batch, *rows)
    shape = tuple(lhs[place] for place in places) + tuple(rhs[place] for place in columns)
    if shape != result or len(batch) != len(other) or len(inner) != len(partner):
        return None
    pairs = [*zip(batch, other, strict=True), *zip(inner, partner, strict=True)]
    if any(lhs[a] != rhs[b] for a, b in pairs):
        return None
    classes: list[tuple[tuple[int, int], ...]] = [
        ((0, a), (1, b), (2, into)) for into, (a, b) in enumerate(zip(batch, other, strict=True))
    ]
    classes += [((0, a), (1, b)) for a, b in zip(inner, partner, strict=True)]
    classes += [((0, place), (2, len(batch) + into)) for into, place in enumerate(rows)]
    classes += [((1, place), (2, len(places) + into)) for into, place in enumerate(columns)]
    return tuple(classes)
