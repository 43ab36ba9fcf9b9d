"""Pipelined collectives of tensor parallelism, and the order of recomputed kernels."""

from __future__ import annotations

from typing import Any

import pytest

from hespas.generators.llm.layout import Layout, RankGroups
from hespas.generators.llm.settings import Overlap, Recompute, precision_of, recompute_of
from hespas.graph import CollectiveKind, OpGraph
from tests.generators.llm.small_models import DENSE, calls, step

TENSOR = Layout(tp=4, dp=2)
SELECTIVE = Recompute(modules=frozenset({"layernorm", "mlp_act", "qkv"}), per_operation=True)
LAYERS = len(DENSE.layers)


def titan(*, overlap: bool = True, precision: str = "bf16", micro_batch: int = 2, **settings: Any) -> OpGraph:
    """One micro-batch of torchtitan with tensor parallelism."""
    chosen: dict[str, Any] = {"recompute": SELECTIVE, **settings}
    return step(
        DENSE, TENSOR, global_batch=2 * micro_batch, micro_batch=micro_batch, style="torchtitan",
        overlap=Overlap(tensor=overlap), precision=precision_of(precision), **chosen,
    ).classes[0]  # fmt: skip


def numbers(graph: OpGraph, name: str) -> list[int]:
    return [node for node in range(len(graph)) if graph.node_name(node) == name]


def behind(graph: OpGraph, node: int) -> set[str]:
    before = [*graph.data_deps.row(node), *graph.control_deps.row(node)]
    return {graph.node_name(int(number)) for number in before}


def of_kind(graph: OpGraph, kind: CollectiveKind) -> list[float]:
    return calls(graph, kind, RankGroups(TENSOR).tensor)


@pytest.mark.parametrize("recompute", ["full", "layernorm,mlp_act,core_attn"])
def test_recomputed_kernels_start_after_the_gradient_of_their_layer(recompute: str) -> None:
    graph = step(DENSE, Layout(), global_batch=1, recompute=recompute_of(recompute)).classes[0]
    block = "attention" if recompute == "full" else "mlp"
    first = numbers(graph, f"layers.3.{block}.norm")[1]
    assert "layers.4.attention.norm.backward" in behind(graph, first)
    after = numbers(graph, "layers.3.mlp.activation")[1]
    assert behind(graph, after) & {"layers.3.mlp.norm", "layers.3.mlp.fc1"}


def test_recomputation_of_a_stage_waits_for_the_received_gradient() -> None:
    work = step(DENSE, Layout(pp=2), global_batch=2, recompute=recompute_of("full"))
    graph = work.classes[0]
    first = numbers(graph, "layers.3.attention.norm")
    assert any("recv" in name for name in behind(graph, first[-1]) | behind(graph, first[1]))


def test_torch_pipelines_collectives_next_to_one_matmul() -> None:
    graph = titan()
    names = {graph.node_name(node).removeprefix("layers.1.") for node in range(len(graph))}
    gathers = ["attention.qkv", "attention.k", "attention.proj.dgrad", "mlp.fc1", "mlp.fc2.dgrad"]
    for name in (*gathers, "mlp.fc1_second"):
        assert {f"{name}.share", f"{name}.0.ring", f"{name}.2.ring"} <= names
        assert f"{name}.3.ring" not in names
    for name in ("attention.proj", "mlp.fc2"):
        assert {f"{name}.sum", f"{name}.0.ring", f"{name}.2.ring"} <= names
    # gradients of several matmuls are summed before they are scattered; the head is not compiled
    assert {"attention.qkv.dgrad.reduce_scatter", "mlp.fc1.dgrad.reduce_scatter"} <= names
    assert "loss0.head.all_gather" in names
    (third,) = numbers(graph, "layers.1.mlp.fc2.3")
    assert "layers.1.mlp.fc2.1.ring" in behind(graph, third)


@pytest.mark.parametrize("overlap", [True, False])
def test_torch_gathers_a_recomputed_input_once(overlap: bool) -> None:
    graph = titan(overlap=overlap)
    assert not numbers(graph, "layers.1.mlp.fc1.regather")
    (wgrad,) = numbers(graph, "layers.1.mlp.fc1.wgrad")
    assert "layers.1.mlp.fc1_second.all_gather.cat" in behind(graph, wgrad)
    pipelined = 0 if overlap else 6 * LAYERS
    assert len(of_kind(graph, CollectiveKind.ALL_GATHER)) == pipelined + 3  # head twice, embedding


@pytest.mark.parametrize(("style", "micro_batch"), [("torchtitan", 1), ("torchtitan", 2), ("megatron", 2)])
def test_torch_copies_gathered_rows_of_several_sequences(style: str, micro_batch: int) -> None:
    settings: dict[str, Any] = {"style": style, "micro_batch": micro_batch, "overlap": Overlap()}
    graph = step(DENSE, TENSOR, global_batch=2 * micro_batch, **settings).classes[0]
    copies = [node for node in range(len(graph)) if graph.node_name(node).endswith(".cat")]
    kinds = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
    collectives = sum(len(of_kind(graph, kind)) for kind in kinds)
    assert collectives == 10 * LAYERS + 5
    assert len(copies) == (collectives if (style, micro_batch) == ("torchtitan", 2) else 0)


def test_scales_by_row_are_computed_after_the_gather() -> None:
    graph = titan(precision="fp8-rowwise")
    assert len(of_kind(graph, CollectiveKind.ALL_GATHER)) == 6 * LAYERS + 3
    assert numbers(graph, "layers.1.mlp.fc2.sum")


def test_torch_gathers_rows_with_one_scale_in_8_bits() -> None:
    sizes = {
        precision: sum(of_kind(titan(overlap=False, precision=precision), CollectiveKind.ALL_GATHER))
        for precision in ("bf16", "fp8-current", "fp8-rowwise", "mxfp8")
    }
    assert sizes["bf16"] == sizes["fp8-rowwise"] == sizes["mxfp8"]
    outside = 3 / (6 * LAYERS + 3)  # head and embedding
    assert sizes["fp8-current"] == pytest.approx(sizes["bf16"] * (0.5 + outside / 2))


def test_user_buffers_pipeline_all_layers_but_the_head() -> None:
    settings: dict[str, Any] = {"global_batch": 2, "overlap": Overlap(tensor=True)}
    graph = step(DENSE, TENSOR, **settings).classes[0]
    assert numbers(graph, "layers.1.mlp.fc1.dgrad.2.ring")
    assert not numbers(graph, "layers.1.mlp.fc2.sum")
    assert numbers(graph, "loss0.head.all_gather")
    assert not numbers(graph, "loss0.head.0.ring")
    torch = step(DENSE, TENSOR, style="torchtitan", **settings).classes[0]
    assert not numbers(torch, "layers.1.mlp.fc1.dgrad.2.ring")
