"""Mappings to macros against an exhaustive enumeration that places every tile."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction

import pytest

from hespas.estimators.imc.mapping import Layer, map_layer


def spans(size: int, most: int) -> list[range]:
    """Cut ``size`` positions into ranges of up to ``most``."""
    return [range(start, min(start + most, size)) for start in range(0, size, most)]


def splits(tiles: int, rounds: int, places: int) -> Iterator[tuple[int, ...]]:
    """Yield all numbers of tiles per round, 1 to ``places`` each."""
    if rounds == 1:
        if 1 <= tiles <= places:
            yield (tiles,)
        return
    for first in range(1, min(tiles, places) + 1):
        for others in splits(tiles - first, rounds - 1, places):
            yield (first, *others)


def round_cycles(tiles: int, places: int, vectors: int, most_copies: int) -> int:
    """Smallest number of cycles of a round: all numbers of copies, vectors dealt to the copies one by one."""
    best = None
    for copies in range(1, min(places // tiles, most_copies or places) + 1):
        dealt = [0] * copies
        for vector in range(vectors):
            dealt[vector % copies] += 1
        best = max(dealt) if best is None else min(best, max(dealt))
    assert best is not None
    return best


def enumerated(
    layer: Layer, rows: int, columns: int, macros: int, most_copies: int = 0
) -> tuple[int, Fraction]:
    """Return the fewest cycles of all mappings, and the utilization with these cycles."""
    results: list[tuple[int, int]] = []
    for blocks in range(1, min(rows, columns) + 1):
        block_rows, block_columns = rows // blocks, columns // blocks
        tiles = [
            (inputs, outputs)
            for _ in range(layer.groups)
            for inputs in spans(layer.inputs, block_rows)
            for outputs in spans(layer.outputs, block_columns)
        ]
        assert all(len(i) <= block_rows and len(o) <= block_columns for i, o in tiles)
        places = macros * blocks
        used = sum(1 for i, o in tiles for _ in i for _ in o for _ in range(layer.vectors))
        fewest = next(rounds for rounds in range(1, len(tiles) + 1) if rounds * places >= len(tiles))
        results += [
            (sum(round_cycles(count, places, layer.vectors, most_copies) for count in split), used)
            for split in splits(len(tiles), fewest, places)
        ]
    cycles, used = min(results)
    return cycles, Fraction(used, cycles * macros * rows * columns)


def random_cases() -> list[tuple[Layer, int, int, int]]:
    draw = random.Random(7)
    cases: list[tuple[Layer, int, int, int]] = []
    while len(cases) < 200:
        rows, columns, macros = draw.randint(1, 9), draw.randint(1, 9), draw.randint(1, 4)
        layer = Layer(
            groups=draw.randint(1, 3),
            vectors=draw.randint(1, 11),
            inputs=draw.randint(1, 13),
            outputs=draw.randint(1, 13),
        )
        blocks = min(rows, columns)
        most_tiles = (
            layer.groups * -(-layer.inputs // (rows // blocks)) * -(-layer.outputs // (columns // blocks))
        )
        if most_tiles <= 5 * macros:  # the enumeration of rounds grows exponentially
            cases.append((layer, rows, columns, macros))
    return cases


@pytest.mark.parametrize("case", random_cases(), ids=str)
@pytest.mark.parametrize("most_copies", [0, 1, 2])
def test_random_layers_equal_the_enumeration(case: tuple[Layer, int, int, int], most_copies: int) -> None:
    layer, rows, columns, macros = case
    mapping = map_layer(layer, rows, columns, macros, most_copies)
    cycles, utilization = enumerated(layer, rows, columns, macros, most_copies)
    assert mapping.vector_cycles == cycles
    assert mapping.utilization == pytest.approx(float(utilization), rel=1e-12)


@pytest.mark.parametrize(
    "array", [(1, 1, 1), (1, 7, 1), (7, 1, 1), (1, 5, 3), (5, 1, 2), (7, 5, 2), (11, 3, 1)]
)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (1, 3), (3, 1), (7, 5), (2, 3)])
@pytest.mark.parametrize("vectors", [1, 2, 13])
def test_lines_of_cells_and_prime_sizes(
    array: tuple[int, int, int], inputs: int, outputs: int, vectors: int
) -> None:
    layer = Layer(groups=1, vectors=vectors, inputs=inputs, outputs=outputs)
    rows, columns, macros = array
    cycles, utilization = enumerated(layer, rows, columns, macros)
    mapping = map_layer(layer, rows, columns, macros)
    assert mapping.vector_cycles == cycles
    assert mapping.utilization == pytest.approx(float(utilization), rel=1e-12)


def test_figures_by_hand() -> None:
    """A 3 x 3 convolution of 16 channels and 20 filters at 100 positions, on 2 macros of 64 x 16 weights."""
    layer = Layer(groups=1, vectors=100, inputs=144, outputs=20)
    mapping = map_layer(layer, 64, 16, 2)
    assert (mapping.row_tiles, mapping.column_tiles, mapping.blocks) == (3, 2, 1)
    assert (mapping.rounds, mapping.vector_cycles, mapping.weight_sets) == (3, 300, 6)
    assert mapping.utilization == pytest.approx(144 * 20 / (3 * 2 * 64 * 16))
    copied = map_layer(Layer(groups=1, vectors=100, inputs=20, outputs=8), 64, 16, 2)
    assert (copied.blocks, copied.copies, copied.vector_cycles, copied.written) == (2, 4, 25, 4.0)
    depthwise = map_layer(Layer(groups=6, vectors=10, inputs=9, outputs=1), 64, 16, 1)
    assert (depthwise.blocks, depthwise.vector_cycles, depthwise.rounds) == (6, 10, 1)
