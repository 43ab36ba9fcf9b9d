"""Synthesis of graphs: valid, reproducible, without copies, of the wanted size, and with close statistics."""

from __future__ import annotations

from math import isnan, nan
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.generators.synth import (
    FrontierNgram,
    Synthesizer,
    Token,
    TypedDag,
    flatten,
    measure_synthesis,
    structure_key,
    unflatten,
)
from hespas.generators.synth.features import StarTable
from hespas.generators.synth.sequences import depths_of
from hespas.graph.errors import InvariantError, UsageError

BLOCKS = {1: (2, 3), 4: (5, 6, 7), 8: (5, 9)}
"""Inner operations of each block type of the toy grammar."""


def toy_graph(random: Random) -> TypedDag:
    """Make a chain of blocks: a head, parallel branches, and their sum. The cost is the sum of types."""
    types, edges, last = [0], list[tuple[int, int]](), 0
    for _ in range(random.randrange(4, 10)):
        head = len(types)
        kind = random.choice(list(BLOCKS))
        types.append(kind)
        edges.append((last, head))
        branches: list[int] = []
        for inner in BLOCKS[kind]:
            branches.append(len(types))
            types.append(inner)
            edges.append((head, branches[-1]))
        last = len(types)
        types.append(10)
        edges += [(branch, last) for branch in branches]
    return TypedDag.from_edges(types, edges, float(sum(types)))


def toy_graphs(count: int, seed: int = 0) -> list[TypedDag]:
    random = Random(seed)
    return [toy_graph(random) for _ in range(count)]


@pytest.fixture(scope="module")
def synthesizer() -> Synthesizer:
    return Synthesizer(toy_graphs(60))


graphs = st.integers(1, 25).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(0, 3), min_size=count, max_size=count),
        st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=40),
        st.permutations(range(count)),
    )
)


@given(graphs)
def test_flattening_keeps_the_structure(drawn: tuple[list[int], list[tuple[int, int]], list[int]]) -> None:
    types, pairs, number = drawn
    edges = [(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]]
    dag = TypedDag.from_edges(types, edges, 2.0)
    again = unflatten(flatten(dag), dag.cost)
    assert (again.sources < again.targets).all()
    assert structure_key(again) == structure_key(dag)
    assert sorted(again.types.tolist()) == sorted(types)
    renumbered = [types[number.index(node)] for node in range(len(types))]
    other = TypedDag.from_edges(renumbered, [(number[source], number[target]) for source, target in edges])
    assert structure_key(other) == structure_key(dag)
    assert len(set(flatten(other)) ^ set(flatten(dag))) == 0 or len(set(types)) < len(types)
    assert StarTable([dag]).distances(other).tolist() == [0.0]


def test_keys_differ_by_edges_and_types() -> None:
    chain = TypedDag.from_edges([0, 1, 1], [(0, 1), (1, 2)])
    fork = TypedDag.from_edges([0, 1, 1], [(0, 1), (0, 2)])
    other = TypedDag.from_edges([0, 1, 2], [(0, 1), (1, 2)])
    assert len({structure_key(dag) for dag in (chain, fork, other)}) == 3
    assert depths_of(chain).tolist() == [0, 1, 2]


def test_edges_are_checked() -> None:
    with pytest.raises(UsageError, match="outside of nodes 0 to 1"):
        TypedDag.from_edges([0, 1], [(0, 2)])
    with pytest.raises(UsageError, match="2 nodes are on or behind a cycle"):
        TypedDag.from_edges([0, 1, 2], [(1, 2), (2, 1)])


def test_tokens_are_checked() -> None:
    with pytest.raises(InvariantError, match="fewer children"):
        unflatten([Token(0, 1, ())])
    with pytest.raises(InvariantError, match="not in the frontier"):
        unflatten([Token(0, 1, ()), Token(1, 0, ((0, 5),))])


def test_deep_and_wide_graphs() -> None:
    count = 4_000
    chain = TypedDag.from_edges([1] * count, [(node, node + 1) for node in range(count - 1)])
    star = TypedDag.from_edges([1] * count, [(0, node) for node in range(1, count)])
    for dag in (chain, star):
        assert len(flatten(dag)) == count
    assert depths_of(chain).max() == count - 1


def test_drafts_without_deviation_are_training_graphs() -> None:
    training = [flatten(dag) for dag in toy_graphs(20)]
    model = FrontierNgram(training)
    for seed in range(20):
        assert model.drafts(Random(seed), 30, [0.0])[0] in training


def test_generated_graphs_are_new_valid_and_reproducible(synthesizer: Synthesizer) -> None:
    known = {structure_key(dag) for dag in toy_graphs(60)}
    generated = synthesizer.sample(20, seed=3)
    for dag in generated:
        assert (dag.sources < dag.targets).all()
        assert dag.targets.max() < len(dag)
        assert structure_key(dag) not in known
        assert dag.cost > 0
    again = Synthesizer(toy_graphs(60)).sample(20, seed=3)
    for dag, other in zip(generated, again, strict=True):
        assert dag.types.tolist() == other.types.tolist()
        assert dag.edges() == other.edges()
        assert dag.cost == other.cost
    others = synthesizer.sample(20, seed=4)
    assert [structure_key(dag) for dag in others] != [structure_key(dag) for dag in generated]


@pytest.mark.parametrize("nodes", [20, 30, 40])
def test_size_is_a_condition(synthesizer: Synthesizer, nodes: int) -> None:
    """Training graphs have 17 to 41 nodes."""
    sizes = [len(dag) for dag in synthesizer.sample(10, nodes=nodes)]
    assert np.mean(sizes) == pytest.approx(nodes, rel=0.2)


def test_cost_is_a_condition(synthesizer: Synthesizer) -> None:
    costs = [np.median([dag.cost for dag in synthesizer.sample(20, cost=cost)]) for cost in (80.0, 250.0)]
    assert costs == pytest.approx([80.0, 250.0], rel=0.25)


def test_statistics_are_close_to_those_of_other_real_graphs(synthesizer: Synthesizer) -> None:
    card = measure_synthesis(synthesizer.sample(80, seed=1), toy_graphs(60), toy_graphs(150, seed=1))
    assert card.copies == card.distinct_copies == 0
    assert max(card.type_tv, card.bigram_tv, card.motif_tv) < 0.1
    assert card.depth_w1 < 2.5
    assert card.nodes_w1 < 4
    assert card.pearson > 0.95
    assert 0.5 < card.nearest_ratio < 1.5


def test_novelty_is_the_distance_to_training_graphs() -> None:
    training = toy_graphs(40)
    distances = [
        measure_synthesis(Synthesizer(training, novelty=novelty).sample(20), training, training).nearest
        for novelty in (0.3, 1.5)
    ]
    assert distances[0] < distances[1]


def test_labels_follow_the_costs(synthesizer: Synthesizer) -> None:
    errors = [dag.cost / float(dag.types.sum()) - 1 for dag in synthesizer.sample(40, seed=5)]
    assert np.median(np.abs(errors)) < 0.2


def test_graphs_without_costs() -> None:
    unknown = [TypedDag(dag.types, dag.sources, dag.targets, nan) for dag in toy_graphs(30)]
    generator = Synthesizer(unknown)
    assert all(isnan(dag.cost) for dag in generator.sample(5))
    with pytest.raises(UsageError, match="cannot be targeted"):
        generator.sample(1, cost=3.0)


def test_card_of_copies() -> None:
    training = toy_graphs(30)
    card = measure_synthesis(training, training, training)
    assert card.copies == card.distinct_copies == 1.0
    assert card.nodes_w1 == card.depth_w1 == card.bigram_tv == card.cost_w1 == 0
    assert isnan(card.nearest)


def test_longest_run_of_a_combined_graph() -> None:
    first = TypedDag.from_edges([0, 1, 2, 3], [(0, 1), (1, 2), (2, 3)], 1.0)
    second = TypedDag.from_edges([0, 4, 2, 5], [(0, 1), (1, 2), (2, 3)], 2.0)
    combined = TypedDag.from_edges([0, 1, 2, 5], [(0, 1), (1, 2), (2, 3)], 3.0)
    card = measure_synthesis([combined], [first, second], [first])
    assert card.longest_run == 0.75
    assert card.nearest == 0.5


def test_training_graphs_are_checked() -> None:
    graph = toy_graphs(1)
    with pytest.raises(UsageError, match="expected at least 2"):
        Synthesizer([*graph, *graph])
    with pytest.raises(UsageError, match="no nodes"):
        Synthesizer([*graph, TypedDag.from_edges([], [])])
    with pytest.raises(UsageError, match="novelty"):
        Synthesizer(toy_graphs(5), novelty=-1)
    with pytest.raises(UsageError, match="nodes is 0"):
        Synthesizer(toy_graphs(5)).sample(1, nodes=0)


def test_copies_are_rejected() -> None:
    chains = [TypedDag.from_edges(types, [(0, 1), (1, 2)], 1.0) for types in ([1, 2, 3], [4, 5, 6])]
    with pytest.raises(UsageError, match="copies of training graphs"):
        Synthesizer(chains).sample(1)
