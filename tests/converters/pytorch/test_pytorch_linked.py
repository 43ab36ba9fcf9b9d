"""Small pairs of profile and execution trace with known graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hespas.graph import ABSENT, CollectiveKind, NodeKind, OpClass, OpGraph
from hespas.graph.errors import FormatError
from hespas.graph.passes import is_topological, without_waits
from tests.converters.pytorch.traces import (
    Json,
    Value,
    annotation,
    call,
    deps,
    groups_node,
    host,
    kernel,
    launch,
    node,
    read_folder,
    read_profile,
    recorded,
    tensor,
    write_et,
    write_kineto,
)

X, W, Y, Z = tensor(100, 8, 4), tensor(101, 4, 2), tensor(102, 8, 2), tensor(103, 8, 2)
RELU = "aten::relu_(Tensor(a!) self) -> Tensor(a!)"
ADDMM = "aten::addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1) -> Tensor"
FACTS: Json = {
    "collective_name": "allreduce", "dtype": "Float", "in_msg_nelems": 16, "out_msg_nelems": 16,
    "in_split_size": "[]", "out_split_size": "[]", "pg_name": "7", "pg_desc": "tp", "pg_size": 2,
}  # fmt: skip
GROUPS = groups_node(
    {"pg_name": "0", "pg_desc": "default_pg", "ranks": [], "group_size": 4},
    {"pg_name": "7", "pg_desc": "tp", "ranks": [0, 2], "group_size": 2},
)
OPERATIONS = [
    GROUPS,
    node(10, "aten::linear", 2, 11, [X, W], [Y]),
    node(11, "aten::addmm", 10, 12, [X, W], [Y], schema=ADDMM),
    node(12, "aten::relu_", 2, 13, [Y], [Y], schema=RELU),
    node(13, "c10d::allreduce_", 2, 14, [([Y[0]], [Y[1]], "GenericList[Tensor(float)]")]),
    recorded(14, (13, 15), [Y], [Y], FACTS),
    node(15, "aten::mul", 2, 16, [Y, Y], [Z]),
]
HOST = [
    host("aten::linear", 10, 9, 11),
    host("aten::addmm", 11, 7, 12, {"Input Dims": [[8, 4], [4, 2]], "Input type": ["float", "float"]}),
    host("aten::relu_", 20, 5, 13, {"Input Dims": [[8, 2]], "Input type": ["float"]}),
    host("c10d::allreduce_", 30, 9, 14),
    host("record_param_comms", 31, 7, 15),
    host("aten::mul", 50, 5, 16, {"Input Dims": [[8, 2], [8, 2]], "Input type": ["float", "float"]}),
]
DEVICE = [
    kernel("Memset (Device)", 2, 1, 999, {"bytes": 64}, cat="gpu_memset"),
    kernel("splitK", 40, 2.5, 1),
    kernel("gemm", 43, 4, 2),
    kernel("relu", 48, 1, 3),
    kernel("ncclDevKernel_AllReduce_Sum_f32", 50, 20.125, 4, stream=9),
    kernel("mul", 75, 1, 5),
]
CALLS = [
    launch(12, 1),
    launch(14, 2),
    launch(21, 3),
    call("cudaEventRecord", 32, 1, 90),
    call("cudaStreamWaitEvent", 33, 1, 91),
    launch(35, 4),
    call("cudaStreamWaitEvent", 49, 1, 92),
    launch(51, 5),
]


def pair(folder: Path, nodes: list[Json], events: list[Json], rank: int = 0, **header: object) -> Path:
    write_et(folder / f"job.rank{rank}.et.json", nodes)
    info: Json = {"rank": rank, "world_size": 4, "backend": "nccl", "pg_config": []}
    write_kineto(folder / f"job.rank{rank}.kineto.json", events, distributedInfo=info, **header)
    return folder


def graph_of(folder: Path) -> OpGraph:
    workload, _ = read_folder(folder)
    assert is_topological(workload.classes[0])
    return without_waits(workload.classes[0])


def test_a_device_graph_node_by_node(tmp_path: Path) -> None:
    workload, found = read_folder(pair(tmp_path, OPERATIONS, [*HOST, *CALLS, *DEVICE]))
    graph = without_waits(workload.classes[0])
    names = [graph.node_name(each) for each in range(len(graph))]
    assert names == [
        "Memset (Device)", "splitK", "gemm", "relu", "ncclDevKernel_AllReduce_Sum_f32", "mul",
    ]  # fmt: skip
    assert graph.duration_ns.tolist() == [1000, 2500, 4000, 1000, 20125, 1000]
    assert graph.stream.tolist() == [7, 7, 7, 7, 9, 7]
    framework = [graph.strings[row] for row in graph.framework_id.tolist()]
    assert framework == ["", "aten::addmm", "aten::addmm", "aten::relu_", "record_param_comms", "aten::mul"]
    assert deps(graph) == [
        ([], []),  # filled before the window: kept, first of its stream
        ([], [0]),
        ([], [1]),
        ([2], []),  # relu_ changes what addmm's last kernel made; the stream says the same
        ([3], []),  # the collective waits for the data; so does its stream
        ([4], [3]),
    ]
    assert graph.kind.tolist() == [0, 0, 0, 0, NodeKind.COLLECTIVE, 0]
    assert graph.op_class[0] == OpClass.GENERATE
    assert (graph.bytes_read[0], graph.bytes_written[0]) == (0, 64)
    table = graph.collectives
    assert (table.kind.tolist(), table.comm_bytes.tolist()) == ([CollectiveKind.ALL_REDUCE], [64.0])
    assert graph.group_sets[int(table.group_set[0])].members(0).tolist() == [0, 2]
    assert [graph.types.shape(int(row)) for row in graph.operands.row(1)] == [(8, 4), (4, 2)]
    assert [graph.types.shape(int(row)) for row in graph.results.row(2)] == [(8, 2)]
    assert graph.operands.row(2).tolist() == graph.results.row(1).tolist() == []
    counts = found.counts()
    assert counts["pytorch.linked-by-record-id"] == 6
    assert counts["kineto.no-launch"] == counts["kineto.unlinked"] == 1
    assert counts["pytorch.inferred-waits"] == 2


def test_without_an_execution_trace_streams_wait_as_the_calls_say(tmp_path: Path) -> None:
    write_kineto(tmp_path / "a.json", [*HOST, *CALLS, *DEVICE])
    graph = graph_of(tmp_path)
    assert deps(graph) == [([], each) for each in ([], [0], [1], [2], [3], [3, 4])]
    assert graph.collectives.kind.tolist() == [CollectiveKind.ALL_REDUCE]


def test_an_inferred_wait_that_the_times_contradict_is_no_dependency(tmp_path: Path) -> None:
    early = [*DEVICE[:5], kernel("mul", 60, 1, 5)]  # runs while the collective still does
    write_kineto(tmp_path / "a.json", [*HOST, *CALLS, *early])
    workload, found = read_folder(tmp_path)
    assert deps(without_waits(workload.classes[0]))[5] == ([], [3])
    assert found.counts()["pytorch.contradicted-waits"] == 1


def test_waits_recorded_with_their_streams_hold_for_these_only(tmp_path: Path) -> None:
    events = [
        launch(1, 1), launch(2, 2), call("cudaEventRecord", 3, 1, 50), launch(5, 3),
        call("cudaStreamWaitEvent", 7, 1, 51), launch(9, 4), launch(11, 5),
        kernel("a", 20, 5, 1, stream=1), kernel("b", 20, 2, 2, stream=2), kernel("c", 23, 2, 3, stream=2),
        kernel("d", 40, 1, 4, stream=1), kernel("e", 41, 1, 5, stream=3),
        {**kernel("Stream Wait Event", 7, 0, 51, stream=3), "cat": "cuda_sync"},
    ]  # fmt: skip
    events[-1]["args"] = {
        "correlation": 51, "stream": 3, "wait_on_stream": 2, "wait_on_cuda_event_record_corr_id": 50,
    }  # fmt: skip
    write_kineto(tmp_path / "a.json", events)
    graph = graph_of(tmp_path)
    names = [graph.node_name(each) for each in range(len(graph))]
    assert names == ["a", "b", "c", "d", "e"]
    assert deps(graph)[3] == ([], [0])  # the next launch, but another stream than the stated one
    assert deps(graph)[4] == ([], [1])  # b was launched before the record, c behind it


def test_the_host_waits_and_what_it_launches_then_does_so_too(tmp_path: Path) -> None:
    events = [
        launch(1, 1), launch(2, 2), call("cudaDeviceSynchronize", 3, 20), launch(30, 3),
        kernel("a", 5, 10, 1, stream=1), kernel("b", 5, 12, 2, stream=2), kernel("c", 40, 1, 3, stream=3),
    ]  # fmt: skip
    write_kineto(tmp_path / "a.json", events)
    assert deps(graph_of(tmp_path))[2] == ([], [0, 1])


def test_all_kernels_of_a_replayed_graph_are_nodes_in_order(tmp_path: Path) -> None:
    replay = [kernel(f"k{each}", 10 + 2 * each, 1.5, 77) for each in range(5)]
    write_kineto(tmp_path / "a.json", [call("cudaGraphLaunch", 1, 2, 77), *replay])
    graph = graph_of(tmp_path)
    assert graph.duration_ns.sum() == 5 * 1500
    assert deps(graph) == [([], [each - 1] if each else []) for each in range(5)]


def test_messages_have_peers_sizes_and_directions(tmp_path: Path) -> None:
    send: Json = {
        "Collective name": "send", "In msg nelems": 32, "Out msg nelems": 32, "dtype": "BFloat16",
        "Group size": 2, "Process Group Name": "7", "Process Group Ranks": "[0, 2]", "Dst Rank": 2, "Seq": 5,
    }  # fmt: skip
    receive = {**send, "Collective name": "recv", "Src Rank": 2, "Seq": 6}
    write_kineto(
        tmp_path / "a.json",
        [
            kernel("ncclDevKernel_SendRecv", 1, 2, -1, send),
            kernel("ncclDevKernel_SendRecv", 5, 2, -1, receive),
        ],
        distributedInfo={"rank": 0, "world_size": 4},
    )
    graph = graph_of(tmp_path)
    assert graph.kind.tolist() == [NodeKind.SEND, NodeKind.RECV]
    assert graph.p2p.comm_bytes.tolist() == [64, 64]
    assert [list(way) for way in graph.permutations] == [[(0, 2)], [(2, 0)]]


def test_a_generic_kernel_is_told_by_the_call_that_launched_it(tmp_path: Path) -> None:
    work = [*DEVICE[:4], kernel("ncclDevKernel_Generic", 50, 20, 4, stream=9), DEVICE[5]]
    graph = graph_of(pair(tmp_path, OPERATIONS, [*HOST, *CALLS, *work]))
    assert graph.collectives.kind.tolist() == [CollectiveKind.ALL_REDUCE]


def test_a_kernel_that_nothing_else_names_is_told_by_the_range_around_its_launch(tmp_path: Path) -> None:
    events = [
        annotation("step", 0, 90), annotation("nccl:all_to_all", 10, 20), annotation("inner", 12, 6),
        launch(14, 1), launch(40, 2), kernel("ncclKernel_SendRecv_RING(ncclWorkElem)", 50, 5, 1, stream=9),
        kernel("ncclKernel_SendRecv_RING(ncclWorkElem)", 60, 5, 2, stream=9),
    ]  # fmt: skip
    path = write_kineto(tmp_path / "a.json", events)
    workload, found = read_folder(tmp_path)
    kinds = without_waits(workload.classes[0]).collectives.kind.tolist()
    assert kinds == [CollectiveKind.ALL_TO_ALL, CollectiveKind.UNKNOWN]
    assert found.counts()["pytorch.unknown-collective"] == 1
    profile, _ = read_profile(path)
    assert [profile.strings[row] for row in profile.comms.kind_id.tolist()] == ["alltoall", ""]


def test_a_communication_that_no_kernel_shows_is_a_node_without_time(tmp_path: Path) -> None:
    events = [*HOST, *CALLS, *DEVICE[:4], DEVICE[5]]
    workload, found = read_folder(pair(tmp_path, OPERATIONS, events))
    graph = without_waits(workload.classes[0])
    assert graph.collectives.comm_bytes.tolist() == [64.0]
    assert np.isnan(graph.duration_ns[graph.collectives.node]).all()
    assert found.counts()["pytorch.communication-without-kernel"] == 1


def test_an_unknown_communication_kernel_is_kept_and_reported(tmp_path: Path) -> None:
    write_kineto(tmp_path / "a.json", [kernel("rcclGenericKernel", 1, 2)])
    workload, found = read_folder(tmp_path)
    assert without_waits(workload.classes[0]).collectives.kind.tolist() == [CollectiveKind.UNKNOWN]
    assert found.counts()["pytorch.unknown-collective"] == 1


# --- runs without a device

CALL = "c10d::allreduce_(Tensor[] tensors, int group, bool async_op=True, int timeout=-1) -> (Tensor[])"
LISTED: Value = ([Y[0]], [Y[1]], "GenericList[Tensor(float)]")


def gloo_nodes(*, waits: bool) -> list[Json]:
    flag: Value = (not waits, [], "Bool")
    others: list[Value] = [("<Object>", [], "Object"), flag, (-1, [], "Int")]
    return [
        groups_node({"pg_name": "0", "ranks": [], "group_size": 4}),
        node(10, "aten::relu_", 2, 11, [Y], [Y], schema=RELU),
        node(11, "c10d::allreduce_", 2, 12, [LISTED, *others], schema=CALL),
        node(12, "gloo:all_reduce", 2, 13, [Y]),
        node(13, "aten::ones", 2, 14, [], [Z]),
        node(14, "aten::mul", 2, 15, [Y], [Z]),
    ]


GLOO_EVENTS = [
    host("aten::relu_", 1, 4, 11),
    host("c10d::allreduce_", 6, 2, 12),
    annotation("gloo:all_reduce", 7, 20, 13, tid=2),
    host("aten::ones", 30, 3, 14),
    host("aten::mul", 35, 1, 15),
]


@pytest.mark.parametrize("waits", [True, False])
def test_a_host_graph_node_by_node(waits: bool, tmp_path: Path) -> None:
    graph = graph_of(pair(tmp_path, gloo_nodes(waits=waits), GLOO_EVENTS))
    names = [graph.node_name(each) for each in range(len(graph))]
    assert names == ["aten::relu_", "c10d::allreduce_", "gloo:all_reduce", "aten::ones", "aten::mul"]
    assert graph.duration_ns.tolist() == [4000, 2000, 20000, 3000, 1000]
    assert graph.kind.tolist() == [0, 0, NodeKind.COLLECTIVE, 0, 0]
    assert graph.op_name(2) == "c10d::allreduce_"
    after = [2, 1] if waits else [1]
    assert [(data, sorted(control)) for data, control in deps(graph)] == [
        ([], []), ([], [0]), ([0], []), ([], sorted(after)), ([2], [3]),
    ]  # fmt: skip
    assert graph.collectives.comm_bytes.tolist() == [64.0]
    assert graph.group_sets[0].is_world(4)


def test_the_time_of_an_operation_is_its_own(tmp_path: Path) -> None:
    events = [
        host("outer", 0, 10, 1), host("inner", 2, 3, 2), host("next", 4, 8, 3), host("free", 20, 1, 4),
        host("inside", 20, 1, 5),
    ]  # fmt: skip
    write_kineto(tmp_path / "a.json", events)
    graph = graph_of(tmp_path)
    own = {graph.node_name(each): float(graph.duration_ns[each]) for each in range(len(graph))}
    assert own == {"outer": 2000, "inner": 2000, "next": 8000, "free": 0, "inside": 1000}
    assert graph.op_class[3] == OpClass.FREE


def test_a_blocking_message_is_one_node_with_the_time_of_call_and_work(tmp_path: Path) -> None:
    schema = "c10d::send(Tensor[] tensors, int group, int dst, int tag) -> Work"
    values: list[Value] = [LISTED, ("<Object>", [], "Object"), (1, [], "Int"), (7, [], "Int")]
    nodes = [
        groups_node({"pg_name": "0", "ranks": [0, 3], "group_size": 2}),
        node(10, "c10d::send", 2, 11, values, schema=schema),
        node(11, "gloo:send", 10, 12, [Y]),
    ]
    events = [host("c10d::send", 0, 10, 11), annotation("gloo:send", 9, 4, 12)]
    graph = graph_of(pair(tmp_path, nodes, events))
    assert graph.kind.tolist() == [NodeKind.SEND]
    assert graph.duration_ns.tolist() == [13_000]
    assert (graph.p2p.comm_bytes.tolist(), graph.p2p.tag.tolist()) == ([64], [7])
    assert list(graph.permutations[0]) == [(0, 3)]  # the peer is a member of the group, by its place there


def test_a_profile_alone_knows_sizes_from_shapes(tmp_path: Path) -> None:
    args: Json = {
        "Input Dims": [[4], [16], [], []], "Input type": ["float", "float", "", "Scalar"],
        "Concrete Inputs": ["", "", "", "False"],
    }  # fmt: skip
    write_kineto(
        tmp_path / "a.json",
        [host("c10d::_reduce_scatter_base_", 0, 5, 1, args), annotation("gloo:all_reduce", 2, 9, 2, tid=3)],
        distributedInfo={"rank": 0, "world_size": 4, "pg_config": [{"pg_name": "0", "ranks": [0, 1, 2, 3]}]},
    )
    table = graph_of(tmp_path).collectives
    assert table.kind.tolist() == [CollectiveKind.REDUCE_SCATTER]
    assert (table.comm_bytes.tolist(), table.result_bytes.tolist()) == ([64], [16])


# --- folders


def test_ranks_are_paired_by_name_and_differ_in_class(tmp_path: Path) -> None:
    for rank in (1, 0):
        pair(tmp_path, OPERATIONS, [*HOST, *CALLS, *DEVICE], rank)
    workload, _ = read_folder(tmp_path)
    assert workload.rank_class.tolist() == [0, 1, ABSENT, ABSENT]
    assert workload.metadata["world_size"] == "4"


def test_execution_traces_without_a_rank_are_paired_by_process(tmp_path: Path) -> None:
    for rank, letter in enumerate("ab"):
        events = [{**event, "pid": 40 + rank} for event in [*HOST, *CALLS, *DEVICE]]
        info = {"rank": rank, "world_size": 2}
        write_kineto(tmp_path / f"{letter}.kineto.json", events, distributedInfo=info)
        write_et(tmp_path / f"host-{letter}.json", OPERATIONS, pid=40 + rank)
    workload, found = read_folder(tmp_path)
    assert found.counts()["pytorch.linked-by-record-id"] == 12
    assert workload.present.tolist() == [0, 1]


def test_ranks_whose_files_are_missing_are_absent(tmp_path: Path) -> None:
    for rank in (1, 3):
        pair(tmp_path, OPERATIONS, [*HOST, *CALLS, *DEVICE], rank)
    workload, found = read_folder(tmp_path)
    assert workload.rank_class.tolist() == [ABSENT, 0, ABSENT, 1]
    assert found.counts()["PR010"] == 2


def test_two_jobs_in_a_folder_are_refused(tmp_path: Path) -> None:
    pair(tmp_path, OPERATIONS, HOST, 0)
    write_et(tmp_path / "other.rank0.et.json", OPERATIONS)
    with pytest.raises(FormatError, match="is unclear") as caught:
        read_folder(tmp_path)
    assert caught.value.position == "file other.rank0.et.json"


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("{}")
    with pytest.raises(FormatError, match="no PyTorch profile and no execution trace"):
        read_folder(tmp_path)


def costs_of(graph: OpGraph) -> list[tuple[float, float, str]]:
    figures = zip(graph.flops.tolist(), graph.bytes_moved.tolist(), graph.op_class.tolist(), strict=True)
    return [(flops, moved, OpClass(code).name) for flops, moved, code in figures]


def test_operations_are_costed_once_on_their_main_kernel(tmp_path: Path) -> None:
    product = node(11, "aten::mm", 10, 12, [X, W], [Y])
    inputs: Json = {"Input Dims": [[8, 4], [4, 2]], "Input type": ["float", "float"]}
    calls = [HOST[0], host("aten::mm", 11, 7, 12, inputs), *HOST[2:], *CALLS]
    graph = graph_of(pair(tmp_path, [*OPERATIONS[:2], product, *OPERATIONS[3:]], [*calls, *DEVICE]))
    found = costs_of(graph)
    assert found[:4] == [
        (0, 64, "GENERATE"),
        (0, 0, "CONTRACTION"),  # splitK, the shorter kernel of the product
        (2 * 8 * 4 * 2, 4 * (32 + 8 + 16), "CONTRACTION"),
        (16, 4 * 32, "ELEMENTWISE"),
    ]
    assert [found[5]] == [(16, 4 * 48, "ELEMENTWISE")]
    table = graph.contractions
    assert (table.node.tolist(), table.m.tolist(), table.n.tolist(), table.k.tolist()) == ([2], [8], [2], [4])


def test_kernels_of_an_elementwise_operation_share_its_cost_by_time(tmp_path: Path) -> None:
    inputs: Json = {"Input Dims": [[5, 3], [5, 3]], "Input type": ["float", "float"]}
    events = [
        host("aten::mul", 0, 30, 1, inputs), launch(1, 1), launch(2, 2), launch(3, 3),
        kernel("mul_a", 40, 1, 1), kernel("mul_b", 45, 3, 2),
        kernel("Memset (Device)", 50, 1, 3, {"bytes": 8}, cat="gpu_memset"),
    ]  # fmt: skip
    write_kineto(tmp_path / "a.json", events)
    graph = graph_of(tmp_path)
    assert costs_of(graph) == [(3, 45, "ELEMENTWISE"), (12, 135, "ELEMENTWISE"), (0, 8, "GENERATE")]
    assert graph.flops.sum() == 15
    assert [graph.types.shape(int(row)) for row in graph.operands.row(0)] == [(5, 3), (5, 3)]


def test_inputs_that_only_the_execution_trace_has_are_costed(tmp_path: Path) -> None:
    bare = [host("aten::sum", 0, 5, 11), launch(1, 1), kernel("reduce", 10, 1, 1)]
    nothing: list[int] = []
    dims: Value = ([0], [nothing], "GenericList[Int]")
    keeps: Value = (False, nothing, "Bool")
    total = node(10, "aten::sum", 2, 11, [X, dims, keeps], [W])
    graph = graph_of(pair(tmp_path, [total], bare))
    assert (graph.flops[0], OpClass(int(graph.op_class[0])).name) == (28, "REDUCTION")


def test_named_ranges_give_the_size_of_a_collective_and_the_world_its_group(tmp_path: Path) -> None:
    said = annotation("nccl:all_reduce", 30, 8)
    said["args"] = {"Input Dims": [[16, 4], [3]], "Input type": ["float", "c10::Half"]}
    events = [
        said, host("record_param_comms", 31, 5), launch(33, 4),
        kernel("ncclKernel_SendRecv", 50, 20, 4, stream=9),
    ]  # fmt: skip
    info: Json = {"rank": 3, "world_size": 8, "backend": "nccl"}
    path = write_kineto(tmp_path / "a.json", events, distributedInfo=info)
    workload, found = read_folder(tmp_path)
    graph = without_waits(workload.classes[0])
    assert graph.collectives.kind.tolist() == [CollectiveKind.ALL_REDUCE]
    assert graph.collectives.comm_bytes.tolist() == [16 * 4 * 4 + 3 * 2]
    assert graph.group_sets[int(graph.collectives.group_set[0])].members(0).tolist() == list(range(8))
    assert found.counts()["pytorch.group-assumed"] == found.counts()["pytorch.one-rank"] == 1
    profile, _ = read_profile(path)
    assert profile.comms.operand_bytes.tolist() == [16 * 4 * 4 + 3 * 2]


def test_a_single_file_is_a_job_of_one_rank(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "a.json", [*HOST, *CALLS, *DEVICE])
    workload, _ = read_folder(path)
    assert len(without_waits(workload.classes[0])) == len(DEVICE)


def test_a_thread_that_was_blocked_goes_on_when_its_work_has_ended(tmp_path: Path) -> None:
    events = [
        host("aten::mul", 5, 60, 11),
        launch(10, 1),
        kernel("a", 20, 30, 1),
        call("cudaDeviceSynchronize", 15, 36, 90),
        launch(55, 2),
        kernel("b", 60, 10, 2),
    ]
    path = tmp_path / "a.json"
    write_kineto(path, events)
    workload, found = read_folder(path)
    graph = workload.classes[0]
    assert [graph.node_name(each) for each in range(len(graph))] == ["a", "host", "idle", "b"]
    assert graph.duration_ns.tolist() == [30_000, 5_000, 5_000, 10_000]
    assert deps(graph) == [([], []), ([], [0]), ([], [1]), ([], [0, 1, 2])]
    assert found.counts()["pytorch.host-time"] == found.counts()["pytorch.delays"] == 1
