"""Transformer over flattened graphs: exact gradients, falling loss, and valid and reproducible drafts."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from hespas.generators.synth import Synthesizer, Transformer, flatten, structure_key, unflatten
from tests.generators.test_synth import toy_graphs


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer([flatten(dag) for dag in toy_graphs(40)], epochs=20, dimension=32, layers=1)


def test_the_gradient_is_that_of_the_loss() -> None:
    dags = toy_graphs(2)
    small = Transformer([flatten(dag) for dag in dags], epochs=0, dimension=8)
    rows = [small.example(flatten(dag)) for dag in dags]
    rng = np.random.default_rng(0)
    small.weights.update({name: value.astype(np.float64) for name, value in small.weights.items()})
    _, count, gradients = small.gradients(rows)
    for name, value in list(small.weights.items()):
        direction = rng.standard_normal(value.shape)
        losses: list[float] = []
        for step in (1e-6, -1e-6):
            small.weights[name] = value + step * direction
            losses.append(small.gradients(rows)[0] / count)
        small.weights[name] = value
        slope = (losses[0] - losses[1]) / 2e-6
        assert slope == pytest.approx(float((gradients[name] * direction).sum()), rel=1e-4, abs=1e-7)


def test_the_loss_falls(model: Transformer) -> None:
    assert model.losses[-1] < 0.5
    assert model.losses[0] > 1.0


def test_drafts_are_valid_and_reproducible(model: Transformer) -> None:
    drafts = model.drafts(Random(1), 25, [0.1] * 16)
    completed = [unflatten(tokens) for tokens in drafts if tokens]
    assert len(completed) > 3
    assert np.mean([len(dag) for dag in completed]) == pytest.approx(25, abs=10)
    assert model.drafts(Random(1), 25, [0.1] * 16) == drafts
    assert model.drafts(Random(2), 25, [0.1] * 16) != drafts


def test_steps_with_a_cache_have_the_loss_of_the_whole_sequence(model: Transformer) -> None:
    example = model.example(flatten(toy_graphs(1)[0]))
    inputs, targets, allowed = example
    cache = model.empty_cache(1, len(targets))
    loss = 0.0
    for step, target in enumerate(targets.tolist()):
        logits = model.next_logits(inputs[step : step + 1], step, cache)[0][allowed[step]]
        position = int(allowed[step][:target].sum())
        loss -= float(logits[position] - np.log(np.exp(logits).sum()))
    assert model.gradients([example])[0] == pytest.approx(loss, rel=1e-3)


def test_generated_graphs_are_new(model: Transformer) -> None:
    training = toy_graphs(40)
    known = {structure_key(dag) for dag in training}
    generated = Synthesizer(training, model=model, drafts=6).sample(4)
    assert known.isdisjoint(structure_key(dag) for dag in generated)
