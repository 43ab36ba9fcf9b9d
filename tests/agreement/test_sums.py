"""FLOPs and communication of a workload are the same in `view`, estimates, conversions and written traces."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import hespas
from hespas.generators.llm.layout import Layout
from hespas.generators.llm.step import LlmStep
from hespas.graph import CollectiveKind, Diagnostics, NodeKind, OpGraph, Workload
from hespas.graph.groups import peers_of
from hespas.graph.passes import totals
from tests.agreement.cases import DEVICE, FIXTURES, LAYOUTS, PROGRAMS, DrawnStep
from tests.agreement.raw_traces import RankSums, sums_of
from tests.generators.llm.small_models import DENSE, training

COMM_TYPE = {
    CollectiveKind.ALL_REDUCE: 0,
    CollectiveKind.ALL_GATHER: 2,
    CollectiveKind.ALL_TO_ALL: 6,
    CollectiveKind.REDUCE_SCATTER: 7,
}
"""``CollectiveCommType`` of et_def.proto."""


def _sums_of_rank(graph: OpGraph, rank: int, num_ranks: int) -> RankSums:
    """Return what one rank of a class communicates in a step, from the columns of the graph."""
    table, sums = graph.collectives, RankSums()
    runs = graph.executions
    counts, sizes = Counter[int](), Counter[int]()
    for row, node in enumerate(table.node.tolist()):
        groups = int(table.group_set[row])
        if groups >= 0 and graph.group_sets[groups].group_of(rank) < 0:
            continue
        kind = COMM_TYPE[CollectiveKind(int(table.kind[row]))]
        counts[kind] += int(runs[node])
        sizes[kind] += int(runs[node] * table.comm_bytes[row])
    sums.collectives = {kind: (counts[kind], sizes[kind]) for kind in counts}
    messages = graph.p2p
    for row, node in enumerate(messages.node.tolist()):
        peers = peers_of(graph.permutations[int(messages.permutation[row])], num_ranks)
        size = int(runs[node] * messages.comm_bytes[row])
        kind = int(graph.kind[node])
        if kind in {NodeKind.SEND, NodeKind.PERMUTE} and peers.target[rank] not in {-1, rank}:
            sums.sent_bytes += size
        if kind in {NodeKind.RECV, NodeKind.PERMUTE} and peers.source[rank] not in {-1, rank}:
            sums.received_bytes += size
    return sums


def _assert_traces_equal(workload: Workload, traces: dict[int, RankSums]) -> None:
    assert sorted(traces) == list(range(workload.num_ranks))
    for rank, raw in traces.items():
        graph = workload.classes[int(workload.rank_class[rank])]
        expected = _sums_of_rank(graph, rank, workload.num_ranks)
        assert raw.collectives == expected.collectives, f"rank {rank}"
        assert (raw.sent_bytes, raw.received_bytes) == (expected.sent_bytes, expected.received_bytes)


UNKNOWN = (
    "hlo/hand_control.hlo.txt",
    "hlo/while_unknown.hlo.txt",
    "stablehlo/hand_dynamic.mlir",
    "stablehlo/while_unknown.mlir",
)
"""Programs with loops of unknown trip counts or with dynamic shapes."""


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in UNKNOWN])
def test_flops_of_programs(name: str, tmp_path: Path) -> None:
    read = hespas.read(FIXTURES / name, workload=True)
    assert isinstance(read, Workload)
    expected = totals(read.classes[0]).flops
    viewed = hespas.view(read).to_dict()["classes"][0]["by_class"]
    assert sum(row["flops"] or 0.0 for row in viewed) == pytest.approx(expected, rel=1e-12)
    estimated = hespas.estimate(read, DEVICE, estimator="roofline").to_dict()["rank_classes"][0]["op_classes"]
    assert sum(row["flops"] or 0.0 for row in estimated) == pytest.approx(expected, rel=1e-12)
    done = hespas.convert(read, tmp_path / "traces")
    assert done.conservation is not None
    assert done.conservation.before.flops == done.conservation.after.flops == expected * read.num_ranks
    written = sums_of(tmp_path / "traces")
    if written:  # a job of one rank is one file
        assert max(each.ops for each in written.values()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_flops_of_programs_are_reported(name: str, tmp_path: Path) -> None:
    diagnostics = Diagnostics()
    done = hespas.convert(FIXTURES / name, tmp_path / "traces", diagnostics=diagnostics)
    assert done.conservation is not None
    assert done.conservation.before.unknown_ops > 0
    assumed = {"pass.assumed-trips", "stablehlo.dynamic-shape"}
    assert assumed & {finding.code for finding in diagnostics}


@pytest.mark.parametrize(
    "name",
    ["hlo/moe_all_to_all.hlo.txt", "hlo/pipeline_ring.hlo.txt", "stablehlo/collectives_shard_map.mlir"],
)
def test_communication_of_programs(name: str, tmp_path: Path) -> None:
    read = hespas.read(FIXTURES / name, workload=True)
    assert isinstance(read, Workload)
    hespas.convert(read, tmp_path / "traces")
    _assert_traces_equal(read, sums_of(tmp_path / "traces"))


@pytest.mark.parametrize("drawn", LAYOUTS, ids=str)
def test_of_generated_steps(drawn: DrawnStep, tmp_path: Path) -> None:
    made = hespas.generate(drawn.step, tmp_path / "traces")
    written = sums_of(tmp_path / "traces")
    _assert_traces_equal(made.workload, written)
    flops = {rank: totals(made.workload.graph_of(rank)).flops for rank in written}
    for rank, raw in written.items():
        assert raw.ops == pytest.approx(flops[rank], rel=1e-6), f"rank {rank}"
    viewed = hespas.view(made.workload).to_dict()
    by_class = [sum(row["flops"] or 0.0 for row in each["by_class"]) for each in viewed["classes"]]
    np.testing.assert_allclose(by_class, [totals(graph).flops for graph in made.workload.classes], rtol=1e-9)


_ACTIVATION_BYTES = 256 * 512 * 2
"""A microbatch of one sequence: tokens x hidden size x two bytes."""
_LAYERS = 8


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("micro_batches", [1, 3, 4, 7, 16])
def test_tensor_parallel_traffic_follows_first_principles(
    tp: int, micro_batches: int, tmp_path: Path
) -> None:
    """Per layer and microbatch: two reduce-scatters each way, two all-gathers forward and four backward
    (inputs are gathered again); two scatters and three gathers for embedding and head (Megatron-Core).
    """
    step = LlmStep(model=DENSE, layout=Layout(tp=tp), training=training(global_batch=micro_batches))
    hespas.generate(step, tmp_path / "traces")
    for rank, raw in sums_of(tmp_path / "traces").items():
        scattered = micro_batches * (_LAYERS * 4 + 2)
        gathered = micro_batches * (_LAYERS * 6 + 3)
        count, size = raw.collectives[COMM_TYPE[CollectiveKind.REDUCE_SCATTER]]
        assert (count, size) == (scattered, scattered * _ACTIVATION_BYTES), f"rank {rank}"
        count, size = raw.collectives[COMM_TYPE[CollectiveKind.ALL_GATHER]]
        assert gathered * _ACTIVATION_BYTES // tp <= size < (gathered + 4) * _ACTIVATION_BYTES // tp
        assert gathered <= count <= gathered + 4


@pytest.mark.parametrize("micro_batches", [1, 5, 12])
def test_traffic_of_pipelines(micro_batches: int, tmp_path: Path) -> None:
    """Each boundary carries the activations of each microbatch forward and their gradients backward."""
    stages = 4
    step = LlmStep(model=DENSE, layout=Layout(pp=stages), training=training(global_batch=micro_batches))
    hespas.generate(step, tmp_path / "traces")
    for rank, raw in sums_of(tmp_path / "traces").items():
        boundaries = 1 if rank in {0, stages - 1} else 2
        assert raw.sent_bytes == raw.received_bytes == boundaries * micro_batches * _ACTIVATION_BYTES


def test_traffic_of_full_sharding(tmp_path: Path) -> None:
    """All weights are gathered for the forward and the backward pass of each microbatch, and all gradients
    are scattered in f32 (ZeRO-3).
    """
    dp, micro_batches = 4, 6
    step = LlmStep(
        model=DENSE, layout=Layout(dp=dp, zero=3), training=training(global_batch=dp * micro_batches)
    )
    parameters = step.account().parameters
    hespas.generate(step, tmp_path / "traces")
    for raw in sums_of(tmp_path / "traces").values():
        gathered = raw.collectives[COMM_TYPE[CollectiveKind.ALL_GATHER]][1]
        scattered = raw.collectives[COMM_TYPE[CollectiveKind.REDUCE_SCATTER]][1]
        assert gathered == micro_batches * 2 * 2 * parameters / dp
        assert scattered == micro_batches * 4 * parameters
