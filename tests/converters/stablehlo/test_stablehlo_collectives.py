"""Collectives read from programs: groups, permutations, payloads, global programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hespas.converters.format import ReadOptions
from hespas.converters.stablehlo.reader import read
from hespas.graph import CollectiveKind, Diagnostics, NodeKind, OpGraph, RegionKind, StridedGroups, Workload
from hespas.graph.errors import FormatError, UsageError

ReadText = Callable[..., tuple[Workload, Diagnostics]]


def fixture_graph(repository: Path, name: str) -> OpGraph:
    return read(repository / "fixtures" / name, ReadOptions(), Diagnostics()).classes[0]


def groups_of(graph: OpGraph, row: int) -> list[list[int]]:
    return [members.tolist() for members in graph.group_sets[int(graph.collectives.group_set[row])]]


def test_modes_give_global_ids(repository: Path) -> None:
    graph = fixture_graph(repository, "stablehlo/hand_collective_modes.mlir")
    assert [groups_of(graph, row) for row in range(5)] == [
        [[0, 4], [1, 5], [2, 6], [3, 7]],
        [[0, 4, 1, 5, 2, 6, 3, 7]],
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 1, 4, 5], [2, 3, 6, 7]],
        [[0, 1], [2, 3], [4, 5], [6, 7]],
    ]
    (ring,) = graph.permutations
    assert list(ring) == [(0, 1), (1, 2), (2, 3), (3, 0), (4, 5), (5, 6), (6, 7), (7, 4)]
    assert ring.pairs is None, "a ring is kept as a shift"


def test_mesh_axes_give_global_ids(repository: Path) -> None:
    graph = fixture_graph(repository, "stablehlo/hand_mesh_groups.mlir")
    assert [groups_of(graph, row) for row in range(3)] == [
        [[0, 4], [1, 5], [2, 6], [3, 7]],
        [[0, 2], [1, 3], [4, 6], [5, 7]],
        [[0, 1, 2, 3, 4, 5, 6, 7]],
    ]


def test_every_kind_and_spelling(repository: Path) -> None:
    graph = fixture_graph(repository, "stablehlo/hand_collectives.mlir")
    table = graph.collectives
    assert [CollectiveKind(int(kind)).name for kind in table.kind] == [
        "ALL_REDUCE",
        "ALL_REDUCE",
        "ALL_REDUCE",
        "ALL_GATHER",
        "REDUCE_SCATTER",
        "ALL_TO_ALL",
        "BROADCAST",
    ]
    assert table.comm_bytes.tolist() == [2080, 2048, 2048, 2048, 2048, 2048, 2048]
    assert groups_of(graph, 1) == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert groups_of(graph, 2) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert groups_of(graph, 6) == [[0, 1, 2, 3], [7, 6, 5, 4]], "the first of a group is the root"
    assert graph.kind[graph.p2p.node].tolist() == [NodeKind.PERMUTE]
    (permutation,) = graph.permutations
    assert (permutation.target_of(3), permutation.target_of(7), permutation.source_of(6)) == (3, -1, -1)


def test_equal_groups_are_one_group_set(repository: Path) -> None:
    graph = fixture_graph(repository, "binary/llama_fsdp_tp_local_N1024.mlirbc")
    assert len(graph.group_sets) == 2
    assert all(isinstance(groups, StridedGroups) for groups in graph.group_sets)
    assert len(graph.collectives) > 20


def test_a_mesh_program_of_many_devices_stays_small(repository: Path) -> None:
    workload = read(
        repository / "fixtures" / "binary" / "llama_fsdp_tp_local_N1024.mlirbc", ReadOptions(), Diagnostics()
    )
    assert workload.num_ranks == 1024
    assert workload.rank_class.strides == (0,)


def test_global_programs_are_told_from_partitioned_ones(repository: Path) -> None:
    findings = Diagnostics()
    folder = repository / "fixtures" / "stablehlo"
    read(folder / "llama_fsdp_tp_global_N8.mlir.gz", ReadOptions(), findings)
    assert findings.counts() == {"stablehlo.global-program": 1}
    assert "Partition it first" in next(iter(findings)).message
    for name in ("llama_fsdp_tp_local_N8.mlir.gz", "collectives_shard_map.mlir", "mlp.mlir"):
        findings = Diagnostics()
        read(folder / name, ReadOptions(), findings)
        assert findings.counts() == {}, name


def test_devices_left_out_are_reported(read_text: ReadText) -> None:
    _, findings = read_text(
        """module attributes {mhlo.num_replicas = 4 : i32} {
func.func @main(%x: tensor<8xf32>) -> tensor<16xf32> {
  %0 = "stablehlo.all_gather"(%x) <{all_gather_dim = 0 : i64,
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}> : (tensor<8xf32>) -> tensor<16xf32>
  return %0 : tensor<16xf32>
}}"""
    )
    assert findings.counts() == {"stablehlo.devices-left-out": 1}
    assert "2 of 4 devices" in next(iter(findings)).message


_MISFIT = """module attributes {mhlo.num_replicas = 2 : i32} {
func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
  %y = stablehlo.add %x, %x : tensor<8xf32>
  %0 = "stablehlo.all_reduce"(%y) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %s = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>} : (tensor<8xf32>) -> tensor<8xf32>LOCATION
  return %0 : tensor<8xf32>
}}"""


@pytest.mark.parametrize(
    ("location", "position"),
    [("", "operation 1"), (' loc("step/psum"("model.py":7:3))', "model.py:7:3 step/psum")],
)
def test_groups_that_do_not_fit_the_devices_say_where(
    location: str, position: str, read_text: ReadText
) -> None:
    with pytest.raises(FormatError, match="all_reduce: ") as caught:
        read_text(_MISFIT.replace("LOCATION", location))
    assert caught.value.position == position
    assert caught.value.hint == "check that the groups fit the number of devices"


def test_what_the_parser_refuses_of_a_located_operation_says_which(read_text: ReadText) -> None:
    text = _MISFIT.replace("[2, 3]", "[1, 0]").replace("LOCATION", ' loc("step/psum"("model.py":7:3))')
    with pytest.raises(FormatError, match="seen more than once") as caught:
        read_text(text)
    assert caught.value.position is not None
    assert "step/psum" in caught.value.position


def test_contradictory_attributes_are_format_errors(read_text: ReadText) -> None:
    with pytest.raises(FormatError, match="use_global_device_ids needs a channel") as caught:
        read_text(
            """func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = "stablehlo.all_gather"(%x) <{all_gather_dim = 0 : i64, replica_groups = dense<0> : tensor<1x1xi64>,
    channel_handle = #stablehlo.channel_handle<handle = 0, type = 1>, use_global_device_ids}>
    : (tensor<8xf32>) -> tensor<8xf32>
  return %0 : tensor<8xf32>
}"""
        )
    assert caught.value.path == "test.mlir"


_SHARDED = """module attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=2, "y"=4]>
  func.func @main(%a: tensor<64x128xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>},
                  %w: tensor<128x128xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>})
      -> tensor<64x128xf32> {
    %0 = BEFORE
    %1 = sdy.manual_computation(%0, %w) in_shardings=[<@mesh, [{"x"}, {"y"}]>, <@mesh, [{"y"}, {}]>]
        out_shardings=[<@mesh, [{"x"}, {}]>] manual_axes={"x", "y"}
        (%b: tensor<32x32xf32>, %v: tensor<32x128xf32>) {
      %2 = stablehlo.dot_general %b, %v, contracting_dims = [1] x [0]
        : (tensor<32x32xf32>, tensor<32x128xf32>) -> tensor<32x128xf32>
      %3 = "stablehlo.all_reduce"(%2) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
          replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : tensor<2x4xi64>, use_global_device_ids}> ({
      ^bb0(%l: tensor<f32>, %r: tensor<f32>):
        %s = stablehlo.add %l, %r : tensor<f32>
        stablehlo.return %s : tensor<f32>
      }) : (tensor<32x128xf32>) -> tensor<32x128xf32>
      sdy.return %3 : tensor<32x128xf32>
    } : (tensor<64x128xf32>, tensor<128x128xf32>) -> tensor<64x128xf32>
    return %1 : tensor<64x128xf32>
  }
}"""
_WHOLE = (
    "stablehlo.dot_general %a, %w, contracting_dims = [1] x [0]"
    " : (tensor<64x128xf32>, tensor<128x128xf32>) -> tensor<64x128xf32>"
)
_NOTHING = "stablehlo.reshape %a : (tensor<64x128xf32>) -> tensor<64x128xf32>"

_PARTLY = """module attributes {mhlo.num_partitions = 8 : i32} {
  sdy.mesh @mesh = <["x"=2, "y"=4]>
  func.func @main(%a: tensor<64x128xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {SPLIT}]>})
      -> tensor<64x128xf32> {
    %1 = sdy.manual_computation(%a) in_shardings=[<@mesh, [{"x", ?}, {?}]>]
        out_shardings=[<@mesh, [{"x", ?}, {?}]>] manual_axes={"x"} (%b: tensor<32x128xf32>) {
      %2 = stablehlo.tanh %b : tensor<32x128xf32>
      sdy.return %2 : tensor<32x128xf32>
    } : (tensor<64x128xf32>) -> tensor<64x128xf32>
    return %1 : tensor<64x128xf32>
  }
}"""

_TILED = """module attributes {mhlo.num_partitions = 8 : i32} {
  func.func @main(%a: tensor<64x128xf32> {mhlo.sharding = "{devices=[2,4]<=[8]}"}) -> tensor<64x128xf32> {
    %0 = BEFORE
    %1 = stablehlo.custom_call @SPMDFullToShardShape(%0) {mhlo.sharding = "WITHIN"}
      : (tensor<64x128xf32>) -> tensor<32x32xf32>
    %2 = call @body(%1) : (tensor<32x32xf32>) -> tensor<32x32xf32>
    %3 = stablehlo.custom_call @SPMDShardToFullShape(%2) {mhlo.sharding = "{devices=[2,4]<=[8]}"}
      : (tensor<32x32xf32>) -> tensor<64x128xf32>
    return %3 : tensor<64x128xf32>
  }
  func.func private @body(%b: tensor<32x32xf32>) -> tensor<32x32xf32> {
    %0 = stablehlo.tanh %b : tensor<32x32xf32>
    return %0 : tensor<32x32xf32>
  }
}"""
_ALL, _SOME = "{manual}", "{devices=[1,1,2,4]<=[8] last_tile_dims={manual, replicated}}"


@pytest.mark.parametrize(
    ("program", "is_global"),
    [
        pytest.param(_SHARDED.replace("BEFORE", _WHOLE), True, id="a product before a shard_map"),
        pytest.param(_SHARDED.replace("BEFORE", _NOTHING), False, id="all work in a shard_map"),
        pytest.param(_PARTLY.replace("SPLIT", '"y"'), True, id="split over an axis that is not manual"),
        pytest.param(_PARTLY.replace("SPLIT", ""), False, id="the other axis is not in use"),
        pytest.param(
            _TILED.replace("BEFORE", "stablehlo.tanh %a : tensor<64x128xf32>").replace("WITHIN", _ALL),
            True,
            id="tiles: work before",
        ),
        pytest.param(_TILED.replace("BEFORE", _NOTHING).replace("WITHIN", _ALL), False, id="tiles: manual"),
        pytest.param(
            _TILED.replace("BEFORE", _NOTHING).replace("WITHIN", _SOME), True, id="tiles: partly manual"
        ),
    ],
)
def test_work_outside_of_manual_computations_is_the_whole_jobs(
    program: str, is_global: bool, read_text: ReadText
) -> None:
    workload, findings = read_text(program)
    assert findings.counts() == ({"stablehlo.global-program": 1} if is_global else {})
    assert ("whole_job_parts" in workload.metadata) == is_global
    if is_global and "manual_axes" in program:
        assert "outside of computations manual over all axes" in next(iter(findings)).message
    (manual,) = [row for row in range(len(workload.classes[0].regions)) if _is_manual(workload, row)]
    assert (workload.classes[0].region == manual).any()


def _is_manual(workload: Workload, row: int) -> bool:
    return int(workload.classes[0].regions.kind[row]) == RegionKind.MANUAL


def test_a_sharded_program_that_states_no_count_is_global_too(read_text: ReadText) -> None:
    program = _SHARDED.replace("BEFORE", _WHOLE)
    program = program.replace(" attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32}", "")
    workload, findings = read_text(program)
    assert findings.counts()["stablehlo.global-program"] == 1
    assert workload.metadata["whole_job_parts"] == "8"


_CROSS_REPLICA = """func.func @main(%x: tensor<8xf32>) -> tensor<16xf32> {
  %0 = "stablehlo.all_gather"(%x) <{all_gather_dim = 0 : i64,
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}> : (tensor<8xf32>) -> tensor<16xf32>
  return %0 : tensor<16xf32>
}"""


def test_replicas_are_those_asked_for(read_text: ReadText) -> None:
    workload, findings = read_text(_CROSS_REPLICA, ReadOptions(num_devices=8, num_replicas=2))
    assert (workload.metadata["num_replicas"], workload.metadata["num_partitions"]) == ("2", "4")
    assert groups_of(workload.classes[0], 0) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert findings.counts() == {}
    with pytest.raises(UsageError, match="cannot be divided into"):
        read_text(_CROSS_REPLICA, ReadOptions(num_devices=7, num_replicas=2))
    stated = f"module attributes {{mhlo.num_replicas = 2 : i32}} {{\n{_CROSS_REPLICA}\n}}"
    with pytest.raises(UsageError, match="the program states 2"):
        read_text(stated, ReadOptions(num_replicas=4))
