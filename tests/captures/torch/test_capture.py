"""Captures of PyTorch programs: rank classes, phases, memory, and leftovers in the process."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest

import hespas
from hespas.captures.torch import TensorKind, capture_torch, record_rank
from hespas.graph import CollectiveKind, Diagnostics, OpGraph, Severity, Workload
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.graph.mesh import Mesh

torch: Any = pytest.importorskip("torch", reason="needs the extra 'torch'")


def program(name: str) -> Any:
    from fixtures.make.torch_programs import PROGRAMS

    return PROGRAMS[name]


def captured(name: str, mesh: str) -> tuple[Workload, Diagnostics]:
    diagnostics = Diagnostics()
    return capture_torch(program(name), Mesh.of(mesh), diagnostics=diagnostics), diagnostics


def counts(graph: OpGraph) -> dict[str, int]:
    kinds = [CollectiveKind(int(code)).name for code in graph.collectives.kind]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def test_a_sharded_gpt_has_its_collectives_on_the_axes_of_the_mesh() -> None:
    workload, diagnostics = captured("gpt", "data=16,model=4")
    (graph,) = workload.classes
    assert workload.num_ranks == 64
    assert counts(graph) == {"ALL_GATHER": 5, "ALL_REDUCE": 12, "REDUCE_SCATTER": 3}
    sizes = {groups.group_size for groups in workload.group_sets}
    assert sizes == {4, 16}
    assert not diagnostics.counts().keys() - {"torch.views", "torch.ranks-recorded"}
    phases = {graph.strings[int(row)].split("/")[0] for row in graph.framework_id}
    assert phases == {"forward", "backward", "optimizer"}
    places = {graph.strings[int(row)] for row in graph.framework_id}
    assert "backward/GPT.blocks.1.attention.wq/mm" in places
    assert any("torch_programs.py:" in graph.strings[int(row)] for row in graph.source_id)


def test_flops_of_a_layer_are_those_of_its_shapes_split_over_ranks() -> None:
    workload, _ = captured("gpt", "data=2,model=4")
    graph = workload.classes[0]
    tokens, hidden = 2 * 128, 256
    blocks = 2 * 12 * hidden * hidden // 4
    logits = hidden * 1024
    products = [node for node in range(len(graph)) if graph.op_name(node) == "aten::mm"]
    assert graph.flops[products].sum() == 3 * 2 * tokens * (blocks + logits)


def test_buckets_of_data_parallel_are_reduced_and_every_parameter_is_in_one() -> None:
    workload, _ = captured("resnet", "data=4")
    graph = workload.classes[0]
    reduced = graph.collectives.kind == CollectiveKind.ALL_REDUCE
    from fixtures.make.torch_programs import ResNet

    parameters = sum(each.numel() for each in ResNet(100).parameters())
    assert graph.collectives.comm_bytes[reduced].sum() == 4 * parameters
    assert reduced.sum() > 1


def test_experts_exchange_tokens_forward_and_back() -> None:
    workload, diagnostics = captured("moe", "expert=4")
    graph = workload.classes[0]
    assert counts(graph) == {"ALL_TO_ALL": 4}
    assert graph.collectives.comm_bytes.tolist() == [2 * 256 * 64 * 4.0] * 4
    assert "torch.unknown-op" not in diagnostics.counts()


def test_stages_of_a_pipeline_are_rank_classes_that_send_what_the_next_receives(tmp_path: Path) -> None:
    workload, _ = captured("pipeline", "pipe=4,data=2")
    assert [workload.ranks_of(index).tolist() for index in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [len(graph.p2p) for graph in workload.classes] == [8, 16, 16, 8]
    hespas.write(workload, tmp_path / "job")
    checked = hespas.check([tmp_path / "job"], profile="astra-sim")
    assert [each for each in checked.violations if each.severity is Severity.ERROR] == []
    assert hespas.simulate(workload, hardware="h100-sxm").step_ns > 0


def test_uneven_shards_are_rank_classes() -> None:
    workload, _ = captured("gpt", "data=48")
    assert len(workload.classes) > 1
    states = [int(each.split()[0]) for each in workload.metadata["program_bytes"].split(";")]
    assert len(set(states)) > 1


def test_state_is_parameters_optimizer_and_inputs() -> None:
    def build(_: Any) -> Any:
        layer = torch.nn.Linear(64, 32, bias=False)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(16, 64)

        def step() -> None:
            layer(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    record = record_rank(build, Mesh.of("data=2"), 1)
    weights, inputs = 64 * 32 * 4, 16 * 64 * 4
    assert record.state_bytes == 2 * weights + inputs
    loss_and_its_gradient = 8
    assert record.peak_bytes == record.state_bytes + weights + loss_and_its_gradient
    assert record.kept_bytes == 0


def test_real_tensors_record_the_same_operations() -> None:
    kinds: tuple[TensorKind, ...] = ("fake", "real")
    records = [record_rank(program("moe"), Mesh.of("expert=4"), 2, tensors=kind) for kind in kinds]
    fake, real = ([each.op for each in record.calls] for record in records)
    assert fake == real


def test_a_function_without_a_step_is_recorded_whole() -> None:
    diagnostics = Diagnostics()

    def run() -> None:
        torch.distributed.all_reduce(torch.ones(5))

    workload = capture_torch(run, Mesh.of("data=3"), diagnostics=diagnostics)
    assert counts(workload.classes[0]) == {"ALL_REDUCE": 1}
    assert diagnostics.counts()["torch.no-step"] == 1


def test_values_read_from_tensors_without_data_are_told() -> None:
    diagnostics = Diagnostics()

    def build(_: Any) -> Any:
        x = torch.ones(4)
        return lambda: x * float(x.sum().item())

    workload = capture_torch(build, Mesh.of("data=2"), diagnostics=diagnostics)
    assert diagnostics.counts()["torch.value-guessed"] == 1
    assert workload.metadata["guessed_values"] == "1"
    with pytest.raises(UnsupportedError, match="depend on guessed values"):
        hespas.capture(build, mesh="data=2", on_unknown="error")


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_graphs_are_recorded_with_the_collectives_between_them() -> None:
    def build(mesh: Any) -> Any:
        shard: Any = import_module("torch.distributed.fsdp").fully_shard
        layer = shard(torch.nn.Linear(16, 16), mesh=mesh)
        x = torch.randn(4, 16)

        def activation(y: Any) -> Any:
            return torch.nn.functional.silu(y)

        compiled = torch.compile(activation)
        return lambda: compiled(layer(x)).sum().backward()

    mesh = Mesh.of("data=2")
    plain = record_rank(build, mesh, 0, tensors="real")
    graphs = record_rank(build, mesh, 0, tensors="real", compiled=True)
    talks = [[call.op for call in each.calls if call.communication] for each in (plain, graphs)]
    assert talks[0] == talks[1] == ["c10d::_allgather_base_", "c10d::_reduce_scatter_base_"]
    # The derivative of an activation is one operation of PyTorch's, and several of a graph.
    names = [{call.op for call in each.calls} for each in (plain, graphs)]
    assert "aten::silu_backward" in names[0]
    assert "aten::sigmoid" in names[1]
    with pytest.raises(UsageError, match="made of real tensors"):
        capture_torch(build, mesh, compiled=True)


def test_nothing_is_left_in_the_process_even_after_an_error() -> None:
    def state() -> list[object]:
        mesh: Any = import_module("torch.distributed.device_mesh").DeviceMesh
        return [torch.UntypedStorage.resize_, torch.compile, mesh.__init__, sys.excepthook, dict(os.environ)]

    before = state()

    def fails(_: Any) -> None:
        raise ValueError("mine")

    with pytest.raises(UsageError, match="fails on rank 0: ValueError: mine") as raised:
        capture_torch(fails, Mesh.of("data=2"))
    assert raised.value.position is not None
    assert "test_capture.py:" in raised.value.position
    captured("moe", "expert=4")
    assert state() == before
    assert not torch.distributed.is_initialized()


def test_shapes_that_depend_on_values_are_refused_with_the_way_round() -> None:
    def build(_: Any) -> Any:
        x = torch.ones(4)
        return x.nonzero

    with pytest.raises(UsageError, match="DynamicOutputShapeException") as raised:
        capture_torch(build, Mesh.of("data=2"))
    assert "real_tensors" in str(raised.value.hint)
    assert len(capture_torch(build, Mesh.of("data=2"), tensors="real").classes[0]) == 1


def test_a_process_group_of_the_user_is_refused() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        with pytest.raises(UsageError, match="has a process group already"):
            capture_torch(program("gpt"), Mesh.of("data=2"))
    finally:
        torch.distributed.destroy_process_group()


def test_an_unknown_kind_of_tensors_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown kind of tensors"):
        capture_torch(program("gpt"), Mesh.of("data=2"), tensors=cast("TensorKind", "meta"))
