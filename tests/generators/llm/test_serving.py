"""Steps of serving: work of each phase, cache bytes, experts, and cache transfer between servers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import hespas
from hespas.generators.llm.layout import Layout
from hespas.generators.llm.model import Attention, LatentAttention, Mamba, Model, matrix_parameters
from hespas.generators.llm.serving import PHASES, Phase, ServingStep
from hespas.generators.llm.settings import precision_of
from hespas.graph import NodeKind, OpClass, OpGraph
from hespas.graph.errors import UsageError
from tests.generators.llm.small_models import DENSE, HYBRID, MIXTURE, product_flops
from tests.generators.llm.small_models import step as training_step


def step(model: Model = DENSE, layout: Layout | None = None, **settings: Any) -> ServingStep:
    return ServingStep(model=model, layout=layout or Layout(), **settings)


def total(graph: OpGraph, op_class: OpClass) -> tuple[float, float]:
    """FLOPs and bytes of a class."""
    mine = graph.op_class == op_class
    return float(graph.useful_flops[mine].sum()), float(graph.bytes_moved[mine].sum())


MATRICES = 8 * (512 * 64 * 24 + 3 * 512 * 1536)
HEAD = 512 * 1024


def test_a_prompt_costs_twice_the_weights_a_token_and_half_a_square() -> None:
    graph = step(phase="prefill", batch=3, prompt=100).workload().classes[0]
    pairs = 100 * 101 / 2
    expected = 2 * MATRICES * 300 + 2 * HEAD * 3 + 3 * 8 * 8 * 64 * 4 * pairs
    assert total(graph, OpClass.CONTRACTION)[0] + total(graph, OpClass.ATTENTION)[0] == expected


@pytest.mark.parametrize(("cache", "size"), [("bf16", 2), ("f8E4M3FN", 1)])
def test_a_token_reads_the_cache_once(cache: str, size: int) -> None:
    graph = step(batch=5, context=1000, page=16, cache=cache).workload().classes[0]
    flops, moved = total(graph, OpClass.ATTENTION)
    assert flops == 8 * 5 * 8 * 64 * 4 * 1001
    pages = -(-1001 // 16) * 16
    kept = 8 * 5 * pages * 2 * 4 * 64 * size
    assert kept < moved < kept * 1.02  # queries, results and sums beside it


def test_latent_attention_reads_latents() -> None:
    block = MIXTURE.layers[0][0]
    assert isinstance(block, LatentAttention)
    graph = step(MIXTURE, batch=64, context=4000, page=1).workload().classes[0]
    flops, moved = total(graph, OpClass.ATTENTION)
    assert flops == 4 * 64 * 8 * 2 * 4001 * (64 + 16 + 64)
    assert moved == pytest.approx(4 * 64 * 4001 * (64 + 16) * 2, rel=0.06)


def test_drafted_tokens_are_all_worked_on_and_sampled() -> None:
    one = product_flops(step(batch=4, context=500, page=1).workload())
    drafted = product_flops(step(phase="speculative", batch=4, drafts=3, context=500, page=1).workload())
    assert drafted == pytest.approx(4 * one, rel=0.01)


def test_a_chunk_of_a_prompt_runs_beside_decoding() -> None:
    graph = step(phase="mixed", batch=8, prompt=64, context=512).workload().classes[0]
    assert int((graph.op_class == OpClass.ATTENTION).sum()) == 2 * 8
    rows = {
        graph.types.shape(int(graph.operands.row(node)[0]))[0] for node in graph.contractions.node.tolist()
    }
    assert rows == {8 + 64, 8 + 1}  # of layers, of the head


def test_the_cache_goes_from_one_pool_to_the_other() -> None:
    workload = step(phase="disaggregated", layout=Layout(tp=2, dp=2), batch=2, prompt=128).workload()
    assert workload.num_ranks == 8
    sender, receiver = workload.classes
    sent, received = (graph.p2p.comm_bytes.tolist() for graph in (sender, receiver))
    assert sent == received == [2 * 128 * 2 * 2 * 64 * 2] * 8
    way = sender.permutations[0]
    assert [way.target_of(rank) for rank in range(8)] == [4, 5, 6, 7, -1, -1, -1, -1]
    assert set(receiver.kind[receiver.p2p.node].tolist()) == {NodeKind.RECV}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("model", "layout"),
    [(DENSE, Layout(tp=4)), (MIXTURE, Layout(dp=2, tp=2, ep=4)), (HYBRID, Layout(tp=2))],
    ids=["dense", "mixture", "hybrid"],
)
def test_every_phase_is_valid_and_runs(phase: Phase, model: Model, layout: Layout) -> None:
    workload = step(model, layout, phase=phase, batch=4, prompt=64, context=256).workload()
    assert hespas.check(workload, profile="astra-sim").valid
    done = hespas.simulate(workload, "H100-SXM", system="dgx-h100")
    assert done.step_ns > 0
    assert sum(each.unknown for each in done.classes) == 0


def test_stages_of_a_pipeline_hand_on() -> None:
    workload = step(layout=Layout(pp=2, tp=2), phase="prefill", batch=1, prompt=64).workload()
    assert len(workload.classes) == 2
    assert [len(graph.p2p) for graph in workload.classes] == [1, 1]
    assert hespas.check(workload, profile="astra-sim").valid
    assert np.isclose(
        product_flops(workload), product_flops(step(phase="prefill", batch=1, prompt=64).workload())
    )


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"batch": 0}, "batch"), ({"context": -1}, "context"), ({"layout": Layout(cp=2)}, "context parallelism"),
     ({"layout": Layout(pp=2), "phase": "disaggregated"}, "pipeline"), ({"layout": Layout(tp=3)}, "heads")],
)  # fmt: skip
def test_what_cannot_be_served_is_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        step(**settings).workload()


@pytest.mark.parametrize(("batch", "tokens"), [(1, 2), (3, 6), (64, 128)])
def test_experts_that_no_token_reaches_are_not_read(batch: int, tokens: int) -> None:
    graph = step(MIXTURE, batch=batch, context=16).workload().classes[0]
    table = graph.contractions
    rows = [
        row for row, node in enumerate(table.node.tolist()) if graph.node_name(node) == "layers.0.moe.fc1"
    ]
    (row,) = rows
    assert int(table.batch[row]) <= min(16, tokens)
    assert int(table.batch[row]) * int(table.m[row]) == pytest.approx(tokens, rel=0.1)


def test_a_window_limits_what_a_prompt_sees_of_itself() -> None:
    block = DENSE.layers[0][0]
    assert isinstance(block, Attention)
    narrow = replace(DENSE, layers=((replace(block, window=32), DENSE.layers[0][1]),) * 8)
    made = step(narrow, phase="prefill", prompt=256)
    flops = total(made.workload().classes[0], OpClass.ATTENTION)[0]
    assert flops == 8 * 8 * 64 * 4 * (32 * 33 / 2 + (256 - 32) * 32)
    assert product_flops(made.workload()) == pytest.approx(made.account().model_flops_per_step)


def test_no_token_is_dropped_where_tensor_ranks_route() -> None:
    graph = step(MIXTURE, Layout(tp=4, ep=4), batch=3, context=16).workload().classes[0]
    routed = [node for node in range(len(graph)) if graph.node_name(node) == "layers.0.moe.permute"]
    assert [graph.types.shape(int(graph.results.row(node)[0])) for node in routed] == [(2, 512)]


# --- Mamba blocks: 8 heads of 64, states of 64, 4 groups, 4 taps

STATE = 4 * 8 * 64 * 64
TAPS = 2 * (8 * 64 + 2 * 4 * 64) * 3
ONE_LAYER = replace(HYBRID, layers=HYBRID.layers[:1])


def scanned(graph: OpGraph, *names: str) -> list[int]:
    """Nodes whose last name begins with one of these."""
    found = ((node, graph.node_name(node).removeprefix("layers.0.mamba.")) for node in range(len(graph)))
    return [node for node, name in found if name.startswith(names)]


@pytest.mark.parametrize("batch", [1, 48])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_decoded_token_reads_and_writes_the_states_of_its_sequence(batch: int, tp: int) -> None:
    graph = step(ONE_LAYER, Layout(tp=tp), batch=batch, context=5000).workload().classes[0]
    (update,) = scanned(graph, "state_update")
    (conv,) = scanned(graph, "conv1d")
    values, steps, mixed = 2 * batch * 512 // tp, 4 * batch * 8 // tp, 2 * batch * 1024 // tp
    assert graph.bytes_read[update] == batch * STATE // tp + mixed + steps
    assert graph.bytes_written[update] == batch * STATE // tp + values
    assert graph.bytes_read[conv] == graph.bytes_written[conv] == batch * TAPS // tp + mixed
    assert not scanned(graph, "scan")


def test_prompts_are_scanned_in_chunks_of_their_own() -> None:
    graph = step(ONE_LAYER, phase="prefill", batch=3, prompt=100).workload().classes[0]
    table = graph.contractions
    rows = dict(zip(table.node.tolist(), range(len(table)), strict=True))
    (values,) = (rows[node] for node in scanned(graph, "scan.values"))
    assert (int(table.batch[values]), int(table.m[values])) == (3 * 2 * 8, 64)  # 2 chunks of 64 each
    (stored,) = scanned(graph, "scan.store")
    assert (graph.bytes_read[stored], graph.bytes_written[stored]) == (0, 3 * STATE)
    behind = step(ONE_LAYER, phase="mixed", batch=7, prompt=64, context=640).workload().classes[0]
    (stored,) = scanned(behind, "scan.store")
    assert behind.bytes_read[stored] == behind.bytes_written[stored] == STATE
    (update,) = scanned(behind, "state_update")
    assert behind.bytes_written[update] == 7 * (STATE + 2 * 512)


@pytest.mark.parametrize(
    ("phase", "tokens", "scan"),
    [("prefill", 3 * 128, 128 * (2 * 4 * 64 * 64 + 2 * 512 * 64 + 4 * 512 * 64)),
     ("decode", 3, 2 * 4 * 64 + 2 * 512 + 4 * 512 * 64)],
)  # fmt: skip
def test_scans_are_model_flops(phase: Phase, tokens: int, scan: int) -> None:
    block = ONE_LAYER.layers[0][0]
    assert isinstance(block, Mamba)
    made = step(ONE_LAYER, phase=phase, batch=3, prompt=128)
    graph = made.workload().classes[0]
    model = 2 * tokens * matrix_parameters(block, 256) + 2 * 3 * 512 * 256 + 3 * scan
    assert made.account().model_flops_per_step == model
    nodes = [*graph.contractions.node.tolist(), *scanned(graph, "state_update")]
    assert sum(float(graph.flops[node]) for node in nodes) == model


def test_states_go_from_one_pool_to_the_other() -> None:
    workload = step(ONE_LAYER, phase="disaggregated", batch=2, prompt=128).workload()
    sender, receiver = workload.classes
    for graph in workload.classes:
        assert graph.p2p.comm_bytes.tolist() == [2 * (STATE + TAPS)]
    assert len(sender.data_deps.row(int(sender.p2p.node[0])))
    assert receiver.kind[receiver.p2p.node[0]] == NodeKind.RECV


def test_micro_batches_are_scanned_sequence_by_sequence() -> None:
    graph = training_step(ONE_LAYER, Layout(), seq=96, micro_batch=2).classes[0]
    (values, *_) = scanned(graph, "scan.values")
    (row,) = np.flatnonzero(graph.contractions.node == values)
    assert graph.contractions.batch[row] == 2 * 2 * 8


def test_operands_are_kept_transposed_only_for_gradients_of_weights() -> None:
    """A serving step has no backward pass, and frozen matrices have no gradients."""
    fp8 = precision_of("fp8-current")
    served = step(phase="prefill", precision=fp8).workload().classes[0]
    adapted = training_step(DENSE, Layout(), precision=fp8, lora_rank=4).classes[0]
    full = training_step(DENSE, Layout(), precision=fp8).classes[0]
    copies = [written_of_read(each, OpClass.QUANTIZE) for each in (served, adapted, full)]
    assert copies == [{0.5}, {0.5}, {1.0}]


def written_of_read(graph: OpGraph, op_class: OpClass) -> set[float]:
    """Bytes written over bytes read of the operations of a class."""
    mine = graph.op_class == op_class
    assert mine.any()
    return set((graph.bytes_written[mine] / graph.bytes_read[mine]).tolist())
