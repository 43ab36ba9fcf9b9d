"""Real training and inference steps: totals computed independently from the files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hespas.converters.format import ReadOptions
from hespas.converters.stablehlo.reader import read
from hespas.graph import CollectiveKind, Diagnostics, OpClass, OpGraph, StridedGroups, Workload

RESNET = "resnet_50_train_step_4_devices_1024_batch.mlir.gz"


def load(folder: Path, name: str) -> tuple[Workload, OpGraph, Diagnostics]:
    diagnostics = Diagnostics()
    workload = read(folder / name, ReadOptions(), diagnostics)
    return workload, workload.classes[0], diagnostics


def gflop(graph: OpGraph, op_class: OpClass, column: str = "flops") -> float:
    values = getattr(graph, column)
    return float((values * graph.executions)[graph.op_class == op_class].sum()) / 1e9


def test_resnet_training_step(shared_workloads: Path) -> None:
    workload, graph, diagnostics = load(shared_workloads, RESNET)
    assert workload.num_ranks == 4
    assert diagnostics.counts() == {}
    assert gflop(graph, OpClass.CONVOLUTION) == pytest.approx(7223.6, abs=0.05)
    assert gflop(graph, OpClass.CONVOLUTION, "useful_flops") == pytest.approx(6001.867, abs=0.0005)
    assert gflop(graph, OpClass.CONTRACTION) == pytest.approx(3.145728)
    assert np.bincount(graph.op_class)[OpClass.CONVOLUTION] == 158
    assert len(graph.contractions) == 161
    assert len(graph.collectives) == 375
    assert set(graph.collectives.kind.tolist()) == {CollectiveKind.ALL_REDUCE}
    assert graph.collectives.operand_bytes.sum() == graph.collectives.comm_bytes.sum() == 102_865_576
    assert graph.group_sets == (StridedGroups.all_ranks(4),)
    assert not np.isnan(graph.flops).any()


def test_resnet_starts_with_its_stem(shared_workloads: Path) -> None:
    _, graph, _ = load(shared_workloads, RESNET)
    reached = np.zeros(len(graph), bool)
    convolutions = np.flatnonzero(graph.op_class == OpClass.CONVOLUTION).tolist()
    behind: list[bool] = []
    for node in range(len(graph)):
        before = graph.data_deps.row(node)
        assert before.size == 0 or int(before.max()) < node, "program order is an issue order"
        behind.append(bool(reached[before].any()))
        reached[node] = behind[-1] or graph.op_class[node] == OpClass.CONVOLUTION
    starts = [node for node in convolutions if not behind[node]]
    assert starts == convolutions[:1]
    assert graph.types.shape(int(graph.operands.row(starts[0])[1])) == (7, 7, 3, 64)


def test_resnet_input_gradients_leave_dilation_holes_out(shared_workloads: Path) -> None:
    _, graph, _ = load(shared_workloads, RESNET)
    useful = gflop(graph, OpClass.CONVOLUTION, "useful_flops")
    spec = gflop(graph, OpClass.CONVOLUTION)
    assert useful < 6217.4 < spec


def test_resnet_inference_step(shared_workloads: Path) -> None:
    _, graph, _ = load(shared_workloads, "resnet_50_inference_step_4_devices_1024_batch.mlir.gz")
    assert gflop(graph, OpClass.CONVOLUTION) == pytest.approx(2092.6, abs=0.05)
    assert gflop(graph, OpClass.CONVOLUTION, "useful_flops") == pytest.approx(2020.456, abs=0.0005)
    assert gflop(graph, OpClass.CONTRACTION) == pytest.approx(1.048576)
    assert len(graph.collectives) == 0


def test_llama_partitioned_over_eight(shared_workloads: Path) -> None:
    workload, graph, diagnostics = load(shared_workloads, "llama_sdy_local_N8.mlir.gz")
    table = graph.collectives
    gathers, reduces = table.kind == CollectiveKind.ALL_GATHER, table.kind == CollectiveKind.ALL_REDUCE
    assert (int(gathers.sum()), int(reduces.sum())) == (31, 41)
    assert table.operand_bytes[gathers].sum() == table.comm_bytes[gathers].sum() == 1_245_184
    assert table.result_bytes[gathers].sum() == 2_621_440
    assert table.operand_bytes[reduces].sum() == 5_253_620
    assert gflop(graph, OpClass.CONTRACTION) == pytest.approx(1.912602624)
    assert workload.num_ranks == 8
    assert all(isinstance(groups, StridedGroups) for groups in graph.group_sets)
    assert diagnostics.counts() == {}


def test_llama_before_partitioning_is_the_whole_job(shared_workloads: Path) -> None:
    _, graph, diagnostics = load(shared_workloads, "llama_sdy_global_N8.mlir.gz")
    assert gflop(graph, OpClass.CONTRACTION) == pytest.approx(8 * 1.912602624)
    assert diagnostics.counts() == {"stablehlo.global-program": 1}


def test_dilated_convolution(shared_workloads: Path) -> None:
    _, graph, _ = load(shared_workloads, "convolution.mlir.gz")
    assert (graph.flops.tolist(), graph.useful_flops.tolist()) == ([72, 0], [32, 0])


def test_top_k_call(shared_workloads: Path) -> None:
    _, graph, diagnostics = load(shared_workloads, "custom_call_topk.mlir.gz")
    assert [graph.op_name(node) for node in range(3)] == [
        "stablehlo.custom_call",
        "stablehlo.get_tuple_element",
        "stablehlo.get_tuple_element",
    ]
    assert graph.op_class[0] == OpClass.SORT
    assert graph.bytes_moved[0] == 2048 * 8 * 2 + 2048 * 2 * (2 + 4)
    assert diagnostics.counts() == {}


def test_splat_groups(shared_workloads: Path) -> None:
    workload, graph, _ = load(shared_workloads, "jax_example.mlir.gz")
    assert workload.num_ranks == 1
    assert graph.collectives.operand_bytes.sum() == 7_454_760
    assert [members.tolist() for members in graph.group_sets[0]] == [[0]]
    assert np.bincount(graph.op_class)[OpClass.CONTRACTION] == 8


def test_split_groups(shared_workloads: Path) -> None:
    workload, graph, _ = load(shared_workloads, "test_split_replica_groups.mlir.gz")
    assert workload.num_ranks == 4
    assert graph.collectives.comm_bytes.sum() == 524_288
    assert [[members.tolist() for members in groups] for groups in graph.group_sets] == [
        [[0, 1], [2, 3]],
        [[0, 1, 2, 3]],
    ]


def test_perceptron(shared_workloads: Path) -> None:
    _, graph, _ = load(shared_workloads, "mlp.mlir.gz")
    assert gflop(graph, OpClass.CONTRACTION) == pytest.approx(2.68435456)


def test_names_and_sources_of_a_located_program(shared_workloads: Path) -> None:
    _, graph, _ = load(shared_workloads, "llama1.stablehlo.mlir.gz")
    named = (graph.framework_id > 0).mean()
    placed = (graph.source_id > 0).mean()
    assert named > 0.95
    assert placed > 0.8
    assert any("jvp()/dot_general" in text for text in graph.strings)


@pytest.mark.parametrize(
    "name", ["llama1.stablehlo.mlir.gz", "llama_n4.stablehlo.mlir.gz", "torchax_block.mlir.gz"]
)
def test_reading_twice_gives_the_same_graph(shared_workloads: Path, name: str) -> None:
    _, first, _ = load(shared_workloads, name)
    _, second, _ = load(shared_workloads, name)
    assert list(first.strings) == list(second.strings)
    assert first.data_deps.equals(second.data_deps)
    np.testing.assert_array_equal(first.flops, second.flops)
