"""Recorded calls as nodes: dependencies, streams and costs."""

from __future__ import annotations

from math import isnan
from typing import Any

import numpy as np
import pytest

from hespas.captures.torch.builder import MeshRule, graph_of
from hespas.captures.torch.calls import (
    CallArgument,
    CallCommunication,
    RankRecording,
    RecordedCall,
    TensorRecord,
)
from hespas.graph import CollectiveKind, Diagnostics, NodeKind, OpClass, OpGraph, Permutation, StridedGroups
from hespas.graph.mesh import Mesh


def tensor(storage: int, *shape: int, dtype: str = "float32") -> TensorRecord:
    strides = tuple(int(np.prod(shape[place + 1 :])) for place in range(len(shape)))
    return TensorRecord(dtype, shape, strides, storage)


def call(
    op: str, arguments: tuple[CallArgument, ...], made: TensorRecord | None = None, **others: Any
) -> RecordedCall:
    """A call that reads all its tensors and makes one."""
    read = tuple(each.storage for each in arguments if isinstance(each, TensorRecord))
    results = () if made is None else (made,)
    fresh = tuple(each.storage for each in results)
    plain = RecordedCall(op, "default", arguments, results, read, fresh, fresh)
    return plain._replace(**others)


def build(
    calls: list[RecordedCall],
    *,
    groups: dict[str, tuple[int, ...]] | None = None,
    mesh: str = "data=2,model=2",
    rank: int = 0,
    diagnostics: Diagnostics | None = None,
) -> OpGraph:
    shape = Mesh.of(mesh)
    recording = RankRecording(rank, shape.num_devices, calls, groups or {})
    found = Diagnostics() if diagnostics is None else diagnostics
    return graph_of(recording, MeshRule(shape), "step", found.about("step", "torch"))


def test_a_product_has_its_cost_place_and_types() -> None:
    product = call(
        "aten::mm",
        (tensor(0, 8, 16), tensor(1, 16, 4)),
        tensor(2, 8, 4),
        module="GPT.head",
        phase="backward",
        source="train.py:7",
        overload="default",
    )
    graph = build([product])
    assert graph.op_name(0) == "aten::mm"
    assert (graph.flops[0], graph.bytes_read[0], graph.bytes_written[0]) == (1024.0, 768.0, 128.0)
    assert [int(graph.contractions.m[0]), int(graph.contractions.n[0]), int(graph.contractions.k[0])] == [
        8,
        4,
        16,
    ]
    assert graph.strings[int(graph.framework_id[0])] == "backward/GPT.head/mm"
    assert graph.strings[int(graph.source_id[0])] == "train.py:7"
    assert graph.types.shape(graph.results.to_lists()[0][0]) == (8, 4)


def test_views_are_no_nodes_and_their_readers_depend_on_what_made_the_values() -> None:
    diagnostics = Diagnostics()
    graph = build(
        [
            call("aten::relu", (tensor(0, 4, 4),), tensor(1, 4, 4)),
            call("aten::view", (tensor(1, 4, 4), "[16]"), is_view=True),
            call("aten::_unsafe_view", (tensor(1, 4, 4), "[16]")),
            call("aten::empty", ("[4]",), tensor(3, 4)),
            call("aten::relu", (tensor(1, 16),), tensor(2, 16)),
        ],
        diagnostics=diagnostics,
    )
    assert [graph.op_name(node) for node in range(len(graph))] == ["aten::relu", "aten::relu"]
    assert graph.data_deps.to_lists() == [[], [0]]
    assert diagnostics.counts() == {"torch.views": 3}


def test_a_writer_in_place_waits_for_earlier_readers_on_other_streams() -> None:
    group: dict[str, tuple[int, ...]] = {"world": (0, 1, 2, 3)}
    reduced = CallCommunication("allreduce", "world", 16.0, 16.0, reduction="sum")
    graph = build(
        [
            call("aten::relu", (tensor(0, 4),), tensor(1, 4)),
            call(
                "_c10d_functional::all_reduce",
                (tensor(1, 4), "sum", "world"),
                tensor(2, 4),
                communication=reduced,
            ),
            call("aten::add_", (tensor(1, 4), tensor(0, 4)), writes=(1,)),
            call("aten::relu", (tensor(2, 4),), tensor(3, 4)),
        ],
        groups=group,
    )
    assert graph.data_deps.to_lists() == [[], [0], [0], [1]]
    assert graph.control_deps.to_lists() == [[], [], [1], [2]]
    assert graph.stream.tolist() == [0, 1, 0, 0]


def test_collectives_have_groups_of_the_mesh_and_their_bytes() -> None:
    gather = CallCommunication("allgather_base", "rows", 16.0, 32.0)
    scatter = CallCommunication("reduce_scatter_base", "columns", 32.0, 16.0)
    graph = build(
        [
            call(
                "c10d::_allgather_base_",
                (tensor(1, 8), tensor(0, 4)),
                reads=(0,),
                writes=(1,),
                communication=gather,
            ),
            call(
                "c10d::_reduce_scatter_base_",
                (tensor(2, 4), tensor(1, 8)),
                reads=(1,),
                writes=(2,),
                communication=scatter,
            ),
        ],
        groups={"rows": (1, 3), "columns": (2, 3)},
        rank=3,
    )
    table = graph.collectives
    assert table.kind.tolist() == [CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER]
    assert table.comm_bytes.tolist() == [16.0, 32.0]
    assert [graph.group_sets[row] for row in table.group_set] == [
        StridedGroups.from_mesh((2, 2), (0,)),
        StridedGroups.from_mesh((2, 2), (1,)),
    ]
    assert graph.stream.tolist() == [1, 2]
    assert (graph.op_class == OpClass.COLLECTIVE).all()


def test_two_process_groups_of_the_same_ranks_are_told_apart() -> None:
    talks = [CallCommunication("allreduce", name, 4.0, 4.0) for name in ("first", "second", "first")]
    calls = [
        call("c10d::allreduce_", (tensor(place, 1),), writes=(place,), communication=talk)
        for place, talk in enumerate(talks)
    ]
    graph = build(calls, groups={"first": (0, 1, 2, 3), "second": (0, 1, 2, 3)})
    assert graph.collectives.group_set.tolist() == [0, 1, 0]
    assert [groups.communicator for groups in graph.group_sets] == [0, 1]
    assert graph.control_deps.to_lists() == [[], [], [0]]


def test_messages_move_along_an_axis_and_have_a_stream_for_each_direction() -> None:
    calls = [
        call(
            "c10d::recv_",
            (tensor(0, 4), "1", "7"),
            reads=(),
            writes=(0,),
            communication=CallCommunication("recv", "w", nan(), 16.0, 2, 7),
        ),
        call("aten::relu", (tensor(0, 4),), tensor(1, 4)),
        call(
            "c10d::send",
            (tensor(1, 4), "3", "-1"),
            communication=CallCommunication("send", "w", 16.0, nan(), 6, -1),
        ),
    ]
    graph = build(calls, groups={"w": (0, 2, 4, 6)}, mesh="pipe=4,data=2", rank=4)
    assert graph.kind.tolist() == [NodeKind.RECV, NodeKind.COMPUTE, NodeKind.SEND]
    assert graph.p2p.tag.tolist() == [7, 0]
    assert graph.p2p.comm_bytes.tolist() == [16.0, 16.0]
    forward = Permutation(8, (4, 2), 1, wraps=False)
    assert [graph.permutations[row] for row in graph.p2p.permutation] == [forward, forward]
    assert (forward.source_of(4), forward.target_of(4)) == (2, 6)
    assert graph.stream.tolist() == [1, 0, 2]
    assert graph.bytes_written[2] == 0.0


def nan() -> float:
    return float("nan")


def test_gathers_of_fsdp_run_at_most_two_ahead() -> None:
    calls: list[RecordedCall] = []
    for turn in range(4):
        inputs, gathered, parameters = 3 * turn, 3 * turn + 1, 3 * turn + 2
        copied_in = call(
            "fsdp::all_gather_copy_in", (tensor(inputs, 4), tensor(gathered, 8)), reads=(inputs,)
        )
        gather = call("c10d::_allgather_base_", (tensor(gathered, 8), tensor(gathered, 4)), reads=(gathered,))
        copied_out = call("fsdp::split_with_sizes_copy", (tensor(gathered, 8),), reads=(gathered,))
        calls += [
            copied_in._replace(writes=(gathered,)),
            gather._replace(
                writes=(gathered,), communication=CallCommunication("allgather_base", "w", 16.0, 32.0)
            ),
            copied_out._replace(writes=(parameters,)),
        ]
    graph = build(calls, groups={"w": (0, 2)})
    assert graph.control_deps.to_lists()[6] == [2, 3]
    assert graph.control_deps.to_lists()[9] == [5, 6]
    assert graph.stream.tolist() == [1, 2, 0] * 4
    assert graph.bytes_read[0] == graph.bytes_written[0] == 16.0


def test_what_no_rule_knows_is_unknown_and_told() -> None:
    diagnostics = Diagnostics()
    graph = build(
        [call("mine::fancy", (tensor(0, 4),), tensor(1, 4)), call("aten::zeros", ("[4]",), tensor(2, 4))],
        diagnostics=diagnostics,
    )
    assert isnan(graph.flops[0])
    assert graph.op_class.tolist() == [OpClass.UNKNOWN, OpClass.GENERATE]
    assert graph.bytes_written[1] == 16.0
    assert diagnostics.counts() == {"torch.unknown-op": 1}
    assert "mine::fancy" in next(iter(diagnostics)).message


@pytest.mark.parametrize(
    ("ranks", "how"), [((0, 1, 2, 3), "mesh"), ((0, 1), "strides"), ((0, 4), "mesh"), ((0, 3), "alone")]
)
def test_a_group_says_how_its_rule_is_known(ranks: tuple[int, ...], how: str) -> None:
    groups, found = MeshRule(Mesh.of("data=2,model=4")).group_set(ranks, 0)
    assert found == how
    assert tuple(groups.members(groups.group_of(0)).tolist()) == ranks


def test_groups_that_tile_half_an_axis_cover_all_ranks() -> None:
    groups, _ = MeshRule(Mesh.of("data=2,model=4")).group_set((4, 6), 6)
    assert [list(row) for row in groups.rows_of_ranks()] == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_a_message_across_several_axes_is_one_pair() -> None:
    way = MeshRule(Mesh.of("pipe=2,data=2")).message(0, 3)
    assert list(way) == [(0, 3)]
