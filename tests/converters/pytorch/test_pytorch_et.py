"""Host execution traces: schemas, dependencies through storages, communication, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hespas.converters import sniff
from hespas.converters.pytorch import FORMAT_ET
from hespas.converters.pytorch.et_records import SCHEMAS, mutated_arguments
from hespas.graph import CollectiveKind, NodeKind, OpClass, Resource
from hespas.graph.errors import FormatError, UnsupportedError
from tests.converters.pytorch.traces import (
    NOTHING,
    Json,
    Value,
    deps,
    flat_node,
    groups_node,
    node,
    read_et,
    recorded,
    tensor,
    write_et,
)

A, B, C = tensor(11, 4), tensor(12, 4), tensor(13, 4)
IN_PLACE = "aten::relu_(Tensor(a!) self) -> Tensor(a!)"


def chain_of(builder: str) -> list[Json]:
    """b = relu(a); a is changed; c = b + a: a read after write and a write after read."""
    if builder == "1.0.1":
        return [
            flat_node(12, "aten::add", 2, 3, [B, A], [C]),
            flat_node(10, "aten::relu", 2, 1, [A], [B]),
            flat_node(11, "aten::neg_", 2, 2, [A], [A]),
        ]
    return [
        node(12, "aten::add", 2, 3, [B, A], [C], tid=2),
        node(10, "aten::relu", 2, 1, [A], [B]),
        node(11, "aten::neg_", 2, 2, [A], [A], schema=IN_PLACE, tid=3),
    ]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_schema_gives_the_same_dependencies(schema: str, tmp_path: Path) -> None:
    path = write_et(tmp_path / "job_0.json", chain_of(schema), schema)
    assert sniff(path).name == "pytorch-et"
    graph, _ = read_et(path)
    assert graph.id.tolist() == [10, 11, 12]
    assert [graph.op_name(each) for each in range(3)] == ["aten::relu", "aten::neg_", "aten::add"]
    data = [row for row, _ in deps(graph)]
    assert data == [[], [], [0, 1]]
    assert deps(graph)[1][1] == [0]  # neg_ waits until relu has read what it changes
    assert graph.resource.tolist() == [Resource.DEVICE] * 3


def test_all_known_schemas_can_be_named() -> None:
    assert FORMAT_ET.read_versions == tuple(SCHEMAS)


def test_a_schema_that_is_not_known_can_be_read_as_one_that_is(tmp_path: Path) -> None:
    path = write_et(tmp_path / "job_0.json", chain_of("new"), "1.9.0-chakra.2")
    with pytest.raises(UnsupportedError, match=r"1\.9\.0-chakra\.2"):
        read_et(path)
    graph, _ = read_et(path, version="1.1.1-chakra.0.0.4")
    assert len(graph) == 3


def test_views_and_named_ranges_move_no_data(tmp_path: Path) -> None:
    nodes = [
        node(10, "aten::relu", 2, 1, [A], [B]),
        node(11, "aten::view", 2, 2, [B], [B]),
        node(12, "Optimizer.step#SGD.step", 2, 3),
        node(13, "aten::add", 12, 4, [B, B], [C]),
    ]
    graph, _ = read_et(write_et(tmp_path / "a.json", nodes))
    assert [row for row, _ in deps(graph)] == [[], [], [], [0]]
    assert graph.op_class[2] == OpClass.FREE
    assert graph.strings[int(graph.framework_id[3])] == "Optimizer.step#SGD.step"


@pytest.mark.parametrize(
    ("schema", "name", "changed"),
    [
        ("aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)", "", {0}),
        ("aten::mul.out(Tensor self, Tensor other, *, Tensor(a!) out) -> Tensor(a!)", "", {2}),
        ("aten::view(Tensor(a) self, SymInt[] size) -> Tensor(a)", "", set[int]()),
        ("x::y((Tensor, int)[] pairs, Tensor(b!)[] outs) -> ()", "", {1}),
        ("", "custom_", {0}),
        ("", "__init__", set[int]()),
    ],
)
def test_changed_arguments_are_told_by_the_schema(schema: str, name: str, changed: set[int]) -> None:
    assert mutated_arguments(schema, name) == changed


GROUPS = groups_node(
    {"pg_name": "0", "ranks": [], "group_size": 4}, {"pg_name": "5", "ranks": [1, 3], "group_size": 2}
)
LISTED: Value = ([A[0]], [A[1]], "GenericList[Tensor(float)]")
NUMBER, TEXT = "Int", "String"


def told(*values: object) -> list[Value]:
    return [(value, [], TEXT if isinstance(value, str) else NUMBER) for value in values]


@pytest.mark.parametrize(
    ("inputs", "facts", "kind", "members"),
    [
        # 1.0.1 and early 1.0.2: a number for the group
        ([LISTED, *told(7, 94594, 0, "allreduce", [], [])], {}, CollectiveKind.ALL_REDUCE, None),
        # later: sequence and whether it is a message, name and description of the group
        (
            [A, *told([7, False], ["5", "tp"], 1, "_allgather_base", [], [], 1, 2, 2)], {},
            CollectiveKind.ALL_GATHER, [1, 3],
        ),
        # 1.1.0: attributes
        (
            [A, *told(7, ["9", "x"], 1, "reduce_scatter", [], [])],
            {"collective_name": "reduce_scatter", "pg_name": "9", "pg_size": 2, "global_rank_start": 1,
             "global_rank_stride": 2, "dtype": "Float", "in_msg_nelems": 4, "out_msg_nelems": 2},
            CollectiveKind.REDUCE_SCATTER, [1, 3],
        ),
    ],
)  # fmt: skip
def test_records_of_communication_in_all_forms(
    inputs: list[Value],
    facts: Json,
    kind: CollectiveKind,
    members: list[int] | None,
    tmp_path: Path,
) -> None:
    nodes = [GROUPS, recorded(10, (2, 1), inputs, [A], facts), node(11, "nccl:all_reduce", 10, 2, [A])]
    graph, found = read_et(write_et(tmp_path / "job.rank1.json", nodes))
    table = graph.collectives
    assert (len(graph), table.kind.tolist(), table.comm_bytes.tolist()) == (1, [kind], [16])
    if members is None:
        assert table.group_set.tolist() == [-1]
        assert found.counts()["pytorch.group-not-stated"] == 1
    else:
        assert graph.group_sets[int(table.group_set[0])].members(0).tolist() == members


def test_waiting_for_a_communication_is_none(tmp_path: Path) -> None:
    nodes = [
        recorded(10, (2, 1), told(7, 0, 0, "wait", [], []), []),
        recorded(11, (2, 2), told(0, 0, 0, "init", [], []), []),
    ]
    graph, _ = read_et(write_et(tmp_path / "a.json", nodes))
    assert graph.kind.tolist() == [NodeKind.COMPUTE] * 2


def test_a_message_of_a_record_counts_its_peer_within_the_group(tmp_path: Path) -> None:
    inputs = [A, *told([7, True], ["5", "tp"], 1, "send", [], [])]
    graph, _ = read_et(write_et(tmp_path / "job.rank1.json", [GROUPS, recorded(10, (2, 1), inputs, [])]))
    assert graph.kind.tolist() == [NodeKind.SEND]
    assert list(graph.permutations[0]) == [(1, 3)]


def test_a_call_and_the_record_in_it_are_one_communication(tmp_path: Path) -> None:
    dispatched = node(10, "c10d::allreduce_", 2, 1, [LISTED, ("<Object>", [], "Object")], [LISTED])
    inner = recorded(11, (10, 2), [LISTED, *told(7, ["0", ""], 0, "allreduce", [], [])], [LISTED])
    graph, _ = read_et(write_et(tmp_path / "a.json", [GROUPS, dispatched, inner]))
    assert graph.kind.tolist() == [NodeKind.COMPUTE, NodeKind.COLLECTIVE]
    assert graph.group_sets[0].is_world(4)


# --- bad input


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ('{"schema": "1.1.1-chakra.0.0.4", "nodes": [{"id": 1', FormatError, "not an execution trace"),
        ('{"schema": "1.1.1-chakra.0.0.4"}', FormatError, "the list 'nodes' is missing"),
        ('{"schema": "1.1.1-chakra.0.0.4", "nodes": []}', FormatError, "no operation"),
        ('{"schema": "1.1.1-chakra.0.0.4", "nodes": [{"id": "x", "name": ""}]}', FormatError, r"\$\.id"),
        ('{"schema": "1.1.1-chakra.0.0.4", "nodes": [{"id": -3, "name": ""}]}', FormatError, "63 bits"),
        ('{"nodes": [{"id": 1, "name": "a"}]}', UnsupportedError, "schema ''"),
        ("[]", FormatError, "not an execution trace"),
    ],
)
def test_what_is_no_execution_trace_is_refused(
    text: str, error: type[Exception], words: str, tmp_path: Path
) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(error, match=words):
        read_et(tmp_path / "a.json")


def test_an_id_that_stands_twice_is_refused(tmp_path: Path) -> None:
    twice = [node(10, "aten::relu", 2, 1, [A], [B]), node(10, "aten::neg", 2, 2, [A], [B])]
    with pytest.raises(FormatError, match="same id") as caught:
        read_et(write_et(tmp_path / "a.json", twice))
    assert caught.value.position == "node 10"


def test_calls_in_a_circle_are_refused(tmp_path: Path) -> None:
    circle = [node(10 + each, "f", 10 + (each + 1) % 5, each) for each in range(5)]
    with pytest.raises(FormatError, match="circle"):
        read_et(write_et(tmp_path / "a.json", circle))


def test_a_call_that_is_not_in_the_file_is_reported(tmp_path: Path) -> None:
    graph, found = read_et(write_et(tmp_path / "a.json", [node(10, "aten::relu", 777, 1, [A], [B])]))
    assert len(graph) == 1
    assert found.counts()["pytorch.lost-parent"] == 1


def test_a_deep_stack_of_calls_is_no_recursion(tmp_path: Path) -> None:
    nodes = [node(10 + each, "f", 9 + each if each else 2, each, [A], [B]) for each in range(20_000)]
    assert len(read_et(write_et(tmp_path / "a.json", nodes))[0]) == 20_000


ODD: list[object] = [
    None,
    [],
    [[]],
    [[[1, 2, 3, 4, 5, "cpu"]]],
    "x",
    1e300,
    [0] * 6,
    {"a": 1},
    [1, -5, 0, 1 << 70, 4, "c"],
]


@pytest.mark.parametrize("value", ODD, ids=lambda value: json.dumps(value)[:20])
def test_odd_values_are_no_tensors_and_no_crash(value: object, tmp_path: Path) -> None:
    odd: Value = (value, [["x", -1], 1 << 80], "GenericList[Tensor(float)]")
    nodes = [
        node(10, "c10d::allreduce_", 2, 1, [odd, NOTHING], [odd]),
        node(11, "c10d::send", 2, 2, [odd, odd, odd, odd], [odd]),
        recorded(12, (2, 3), [odd, odd, odd, odd, ("allreduce", [], "String"), odd, odd], [odd]),
        node(3, "## process_group:init ##", 2, 4, [odd]),
    ]
    assert len(read_et(write_et(tmp_path / "a.json", nodes))[0]) == 3


def test_numbers_that_do_not_fit_are_unknown(tmp_path: Path) -> None:
    large = {"tid": 1 << 64, "rf_id": 1 << 70, "seq_id": -(1 << 66)}
    nodes: list[Json] = [{**flat_node(10, "aten::relu", 2, 1, [A], [B]), **large}]
    graph, _ = read_et(write_et(tmp_path / "a.json", nodes, "1.0.1"))
    assert [graph.node_name(each) for each in range(len(graph))] == ["aten::relu"]
