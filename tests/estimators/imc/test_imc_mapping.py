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


def rounds_of(
    split: tuple[int, ...], blocks: int, macros: int, vectors: int, most_copies: int
) -> Iterator[tuple[int, int]]:
    """Yield cycles and macro loads for all numbers of copies in each round, vectors dealt one by one."""
    if not split:
        yield 0, 0
        return
    tiles = split[0]
    places = macros * blocks
    for copies in range(1, min(places // tiles, most_copies or places) + 1):
        dealt = [0] * copies
        for vector in range(vectors):
            dealt[vector % copies] += 1
        loads = next(count for count in range(1, macros + 1) if count * blocks >= tiles * copies)
        for cycles, others in rounds_of(split[1:], blocks, macros, vectors, most_copies):
            yield cycles + max(dealt), others + loads


def enumerated(
    layer: Layer, array: tuple[int, int, int], most_loads: int = 0, most_copies: int = 0
) -> tuple[int, Fraction]:
    """Return the fewest cycles of all mappings that exceed the loads least, and their utilization."""
    rows, columns, macros = array
    results: list[tuple[int, int, int]] = []
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
        for split in splits(len(tiles), fewest, places):
            results += [
                (max(loads - most_loads, 0) if most_loads else 0, cycles, used)
                for cycles, loads in rounds_of(split, blocks, macros, layer.vectors, most_copies)
            ]
    _, cycles, used = min(results)
    return cycles, Fraction(used, cycles * macros * rows * columns)


def random_cases() -> list[tuple[Layer, tuple[int, int, int]]]:
    draw = random.Random(7)
    cases: list[tuple[Layer, tuple[int, int, int]]] = []
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
            cases.append((layer, (rows, columns, macros)))
    return cases


@pytest.mark.parametrize("case", random_cases(), ids=str)
@pytest.mark.parametrize("limits", [(0, 0), (1, 0), (3, 0), (0, 1), (0, 2)])
def test_random_layers_equal_the_enumeration(
    case: tuple[Layer, tuple[int, int, int]], limits: tuple[int, int]
) -> None:
    layer, array = case
    most_loads, most_copies = limits
    mapping = map_layer(layer, *array, most_loads=most_loads, most_copies=most_copies)
    cycles, utilization = enumerated(layer, array, most_loads, most_copies)
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
    cycles, utilization = enumerated(layer, array)
    mapping = map_layer(layer, *array)
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
