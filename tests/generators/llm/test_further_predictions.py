"""Multi-token prediction: gradients of lookups, and the copy of the embedding on the last stage."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

import hespas
from hespas.generators.llm.layout import Layout
from hespas.generators.llm.memory import memory_of
from hespas.generators.llm.model import Model, layer_parameters, norm_parameters
from hespas.graph import OpGraph
from hespas.graph.groups import ExplicitGroups
from tests.generators.llm.small_models import DENSE, MIXTURE, PLAIN, step, training

TABLE = 1024 * 512
POSITIONED = replace(PLAIN, name="positioned", mtp_layers=1)
MICRO_BATCHES = 8


def runs(graph: OpGraph) -> Counter[str]:
    """Return the number of executions by node name."""
    found: Counter[str] = Counter()
    for node, times in enumerate(graph.executions.tolist()):
        found[graph.node_name(node)] += round(times)
    return found


@pytest.mark.parametrize("predictions", [0, 1, 2])
def test_every_look_up_has_a_gradient(predictions: int) -> None:
    model = replace(MIXTURE, mtp_layers=predictions)
    found = runs(step(model, Layout(tp=2, ep=2)).classes[0])
    each = MICRO_BATCHES * (1 + predictions)
    assert found["embedding.lookup"] == found["embedding.lookup.wgrad"] == each
    assert found["embedding.grad.all_gather"] == found["embedding.reduce_scatter"] == each
    for number in range(4, 4 + predictions):
        for norm in ("hidden_norm", "embedding_norm"):
            assert found[f"layers.{number}.mtp.{norm}"] == MICRO_BATCHES
            assert found[f"layers.{number}.mtp.{norm}.backward"] == MICRO_BATCHES


def test_the_gradient_of_a_look_up_comes_from_the_projection() -> None:
    graph = step(MIXTURE, Layout(), global_batch=1).classes[0]
    nodes = {graph.node_name(node): node for node in range(len(graph))}
    norm = nodes["layers.4.mtp.embedding_norm.backward"]
    assert nodes["layers.4.mtp.mtp_proj.dgrad"] in graph.data_deps.row(norm)
    assert nodes["embedding.lookup"] in graph.data_deps.row(norm)
    made = [node for node in range(len(graph)) if graph.node_name(node) == "embedding.lookup.wgrad"]
    assert [norm in graph.data_deps.row(node) for node in made] == [True, False]


def test_adapters_leave_the_embedding_alone() -> None:
    found = runs(step(MIXTURE, Layout(), lora_rank=8).classes[0])
    assert not any(name.endswith(("lookup.wgrad", "embedding_norm.backward")) for name in found)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_pipelines_make_it_too(schedule: str) -> None:
    workload = step(MIXTURE, Layout(pp=2), schedule=schedule)
    assert [runs(graph)["embedding.lookup.wgrad"] for graph in workload.classes] == [MICRO_BATCHES] * 2
    assert hespas.check(workload, profile="astra-sim").valid


def shared(graph: OpGraph) -> list[float]:
    """Payloads between the first and the last stage."""
    table = graph.collectives
    sets = [graph.group_sets[int(each)] for each in table.group_set]
    return [
        float(size)
        for size, each in zip(table.comm_bytes, sets, strict=True)
        if isinstance(each, ExplicitGroups)
    ]


@pytest.mark.parametrize(
    ("model", "copied"),
    [
        (DENSE, 0),
        (MIXTURE, TABLE),
        (replace(MIXTURE, tied=True), TABLE),
        (PLAIN, 1000 * 512),
        (POSITIONED, 1000 * 512 + 256 * 512),
    ],
    ids=["apart", "predictions", "tied-predictions", "tied", "positions"],
)
def test_the_last_stage_has_its_copy_of_the_embedding(model: Model, copied: int) -> None:
    norm = norm_parameters(model)
    layers = model.all_layers[len(model.layers) // 2 :]
    held = sum(layer_parameters(model, each) for each in layers)
    held += norm + model.mtp_layers * (2 * 512 * 512 + 3 * norm)
    head = 0 if model.tied else model.vocab * 512
    _, last = memory_of(model, Layout(pp=2, zero=0), training())
    assert last.parts["weights"] == 2 * (held + head + copied)
    stages = step(model, Layout(pp=4)).classes
    assert [shared(graph) for graph in stages] == [[4.0 * copied] if copied and each in {0, 3} else []
                                                   for each in range(4)]  # fmt: skip


def test_the_last_stage_makes_a_gradient_of_its_copy() -> None:
    layout, chosen = Layout(pp=2, dp=8, zero=3), replace(training(style="torchtitan"), seq=16)
    gradients: list[float] = []
    for vocab in (2**16, 2**17):
        _, last = memory_of(replace(MIXTURE, vocab=vocab), layout, chosen)
        assert last.moment == "reduction of gradients"
        gradients.append(last.parts["gradients"])
    head_and_copy = 2 * 2**16 * 512
    assert gradients[1] - gradients[0] == 4 * head_and_copy
