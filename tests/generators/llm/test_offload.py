"""Offloading to the host: copies are nodes, with as many bytes as the memory account removes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hespas
from hespas.generators.llm.layout import Layout
from hespas.generators.llm.memory import memory_of
from hespas.generators.llm.model import Model
from hespas.generators.llm.settings import Recompute, offload_of, recompute_of
from hespas.graph import NodeKind, OpGraph, Resource
from hespas.graph.errors import UsageError
from tests.generators.llm.small_models import DENSE, MIXTURE, product_flops, step, training

COPIES = NodeKind.MEM_STORE, NodeKind.MEM_LOAD


def copied(graph: OpGraph, kind: NodeKind) -> float:
    """Bytes of a step that cross the host link in one way."""
    nodes = graph.kind == kind
    return float((graph.bytes_moved * graph.executions)[nodes].sum())


def away(*modules: str, recompute: str = "none") -> Recompute:
    return offload_of(",".join(modules), recompute_of(recompute))[1]


def kept(model: Model, layout: Layout, recompute: Recompute) -> int:
    """Bytes that all layers keep of a micro-batch, at the loss."""
    parts = memory_of(model, layout, training(global_batch=1, recompute=recompute))[0].parts
    names = {"norms and residuals", "attention", "mlp", "experts", "layer inputs"}
    return sum(size for name, size in parts.items() if name in names)


@pytest.mark.parametrize(
    ("modules", "recompute"),
    [
        (["block"], "none"),
        (["mlp", "layernorm"], "none"),
        (["qkv"], "mlp_act"),
        (["decoder_layer_input"], "full"),
    ],
)
@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2, vp=2), Layout(tp=2, dp=2, zero=3)])
def test_activations_leave_and_return_each_micro_batch(
    layout: Layout, modules: list[str], recompute: str
) -> None:
    moved = step(DENSE, layout, recompute=away(*modules, recompute=recompute), global_batch=4 * layout.dp)
    stays = step(DENSE, layout, recompute=recompute_of(recompute), global_batch=4 * layout.dp)
    for graph in moved.classes:
        assert copied(graph, COPIES[0]) == copied(graph, COPIES[1]) > 0
    assert product_flops(moved) == product_flops(stays)
    assert hespas.check(moved, profile="astra-sim").valid


@pytest.mark.parametrize("modules", [["mlp"], ["layernorm", "mlp_act"], ["qkv", "mlp"]])
def test_as_much_moves_as_the_account_leaves_out(modules: list[str]) -> None:
    graph = step(DENSE, Layout(), recompute=away(*modules), global_batch=1).classes[0]
    # at the fullest moment, the backward pass of the last layer, all layers but that one have left
    of_seven = kept(DENSE, Layout(), Recompute()) - kept(DENSE, Layout(), away(*modules))
    assert copied(graph, COPIES[0]) == of_seven * 8 / 7


def spans(workload: Any) -> tuple[OpGraph, dict[str, tuple[float, float]]]:
    """Return when the nodes of a rank ran, by name."""
    ran = hespas.simulate(workload, "H100-SXM", system="dgx-h100")
    done, graph = ran.timeline, ran.workload.classes[0]
    rows = np.flatnonzero(done.rank == 0)
    return graph, {
        graph.node_name(int(done.node[row])): (float(done.start_ns[row]), float(done.end_ns[row]))
        for row in rows
    }


def test_activations_are_fetched_a_layer_ahead_beside_computation() -> None:
    _, ran = spans(step(DENSE, Layout(), recompute=away("mlp_act"), seq=2048, global_batch=1))
    for number in range(7):
        start, end = ran[f"layers.{number}.activations.reload"]
        assert number == 6 or start >= ran[f"layers.{number + 2}.mlp.fc2.dgrad"][1]
        assert start < ran[f"layers.{number + 1}.attention.norm.backward"][0]
        assert end <= ran[f"layers.{number}.mlp.fc2.wgrad"][0]
        assert ran[f"layers.{number}.activations.offload"][0] >= ran[f"layers.{number}.mlp.fc2"][1]


def test_what_is_on_the_host_takes_no_memory_meanwhile() -> None:
    runs = [
        hespas.simulate(
            step(DENSE, Layout(), seq=4096, global_batch=1, recompute=each), "H100-SXM", system="dgx-h100"
        )
        for each in (Recompute(), away("mlp"), away("block"))
    ]
    none, some, all_away = (each.memory[0].use.peak_bytes for each in runs)
    assert all_away < some < none
    assert all_away < none / 2


@pytest.mark.parametrize(("style", "up"), [("megatron", 2), ("torchtitan", 4)])
@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, zero=0), Layout(dp=4, tp=2, pp=2, zero=3)])
def test_an_optimizer_on_the_host_takes_gradients_and_gives_weights(
    layout: Layout, style: str, up: int
) -> None:
    workload = step(DENSE, layout, optimizer_offload=True, style=style)
    for graph in workload.classes:
        down = copied(graph, NodeKind.MEM_STORE)
        assert copied(graph, NodeKind.MEM_LOAD) == down * up / 4
        on_host = [graph.node_name(int(each)) for each in np.flatnonzero(graph.resource == Resource.HOST)]
        assert on_host == ["optimizer.adam"]
    shards = layout.sharded if layout.zero else 1
    total = sum(copied(graph, NodeKind.MEM_STORE) for graph in workload.classes)
    whole = sum(copied(graph, NodeKind.MEM_STORE) for graph in step(DENSE, Layout(
        tp=layout.tp, pp=layout.pp, zero=0), optimizer_offload=True).classes)  # fmt: skip
    assert total == pytest.approx(whole / shards, rel=0.01)


def test_how_long_a_host_updates_is_not_known() -> None:
    done = hespas.simulate(step(DENSE, Layout(), optimizer_offload=True), "H100-SXM", system="dgx-h100")
    assert done.is_lower_bound
    assert [each.unknown for each in done.classes] == [1]
    told = [each.message for each in done.diagnostics if each.code == "roofline.host-node"]
    assert [each.split(":")[0] for each in told] == ["cpu_adam"]


def test_activations_of_mixtures_move() -> None:
    workload = step(MIXTURE, Layout(dp=2, ep=2), recompute=away("moe", "mla_up_proj"), global_batch=4)
    assert copied(workload.classes[0], COPIES[0]) == copied(workload.classes[0], COPIES[1]) > 0
    assert hespas.simulate(workload, "H100-SXM", system="dgx-h100").step_ns > 0


def test_a_layer_waits_for_what_none_of_its_values_stands_for() -> None:
    # the sums of attention, which no value of the graph stands for
    graph = step(DENSE, Layout(), recompute=away("core_attn"), global_batch=1).classes[0]
    assert copied(graph, COPIES[1]) == 8 * 4 * 256 * 8
    loads = np.flatnonzero(graph.kind == NodeKind.MEM_LOAD)
    assert set(loads.tolist()) <= set(graph.control_deps.values.tolist())


def test_what_cannot_move_is_refused() -> None:
    assert offload_of("optimizer,mlp", Recompute()) == (True, Recompute(offloaded=frozenset({"mlp"})))
    with pytest.raises(UsageError, match="unknown module 'logits'"):
        offload_of("logits", Recompute())
