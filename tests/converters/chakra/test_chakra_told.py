"""Conversions report what a trace does not store of a graph, and a graph not of a trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hespas import api
from hespas.cli import validate
from hespas.converters import ReadOptions, WriteOptions, load_format
from hespas.graph import (
    Diagnostics,
    GraphBuilder,
    NodeKind,
    OpClass,
    OpGraph,
    Permutation,
    Severity,
    Workload,
)
from hespas.graph.errors import FormatError
from hespas.validators.checker import Profile, check
from hespas.validators.roundtrip import roundtrip

_LIST = {"1": [0, 1], "2": [2, 3]}


def _read(path: Path, found: Diagnostics | None = None) -> Workload:
    read = load_format("chakra").read
    assert read is not None
    value = read(path, ReadOptions(), Diagnostics() if found is None else found)
    assert isinstance(value, Workload)
    return value


def _write(value: Workload, path: Path, **options: Any) -> dict[str, int]:
    write = load_format("chakra").write
    assert write is not None
    found = Diagnostics()
    write(value, path, WriteOptions(name=path.name, **options), found)
    return found.counts()


def _graph(name: str = "") -> OpGraph:
    builder = GraphBuilder("g")
    node = builder.add_node(
        name_id=builder.strings.add(name), op_id=0, op_class=OpClass.UNKNOWN, kind=NodeKind.COMPUTE
    )
    builder.set(node, duration_ns=1000.0)
    return builder.build()


def test_nodes_without_a_name_stay_without_one(reference: Any, tmp_path: Path) -> None:
    nodes = [
        reference.node(id=5, type=4, duration_micros=3),
        reference.node(type=4, data_deps=[5]),
        reference.node(id=1),
    ]
    path = tmp_path / "w.0.et"
    path.write_bytes(reference.file(*nodes))
    workload = _read(path)
    assert [workload.classes[0].node_name(node) for node in range(3)] == ["", "", ""]
    assert "chakra.named" not in _write(workload, tmp_path / "out.0.et")
    assert (tmp_path / "out.0.et").read_bytes() == path.read_bytes()


def test_fractions_of_nanoseconds_are_told(tmp_path: Path) -> None:
    graph = _graph("a")
    for time, told in ((3.0, None), (3.25, 1), (0.5, 1), (1e300, None)):
        timed = replace(graph, duration_ns=np.array([time]))
        counts = _write(Workload.spmd(timed, 1), tmp_path / f"{time}.0.et")
        assert counts.get("chakra.rounded-times") == told


def test_large_sizes_that_floats_hold_come_back(tmp_path: Path) -> None:
    """Whole numbers past 2**53, of which a float holds every second one and fewer."""
    program = Path(__file__).parents[3] / "fixtures/stablehlo/hand_collectives.mlir"
    made = api.read(program)
    assert isinstance(made, Workload)
    (graph,) = made.classes
    sizes = np.full(len(graph.collectives), 2.0**53 + 2)
    large = replace(graph, collectives=replace(graph.collectives, comm_bytes=sizes, operand_bytes=sizes))
    _write(replace(made, classes=(large,)), tmp_path / "w.0.et", ranks=range(1))
    back = _read(tmp_path / "w.0.et").classes[0].collectives
    assert set(back.comm_bytes.tolist()) == set(back.operand_bytes.tolist()) == {2.0**53 + 2}


def test_a_node_that_has_nothing_is_named_and_told(reference: Any, tmp_path: Path) -> None:
    path = tmp_path / "w.0.et"
    path.write_bytes(reference.file(reference.node(), reference.node(id=1, name="b", type=4)))
    assert _write(_read(path), tmp_path / "out.0.et")["chakra.named"] == 1
    graph = _read(tmp_path / "out.0.et").classes[0]
    assert [graph.node_name(node) for node in range(2)] == ["node_0", "b"]
    assert graph.kind.tolist() == [NodeKind.INVALID, NodeKind.COMPUTE]
    assert roundtrip([path], ("op-graph", "chakra")).valid


def test_facts_about_the_job_and_documents_are_counted(tmp_path: Path) -> None:
    graph = replace(_graph("a"), attachments={"stablehlo": b"module {}", "notes": b""})
    facts = {"format": "x", "version": "1", "module": "m", "mesh": "2x2"}
    counts = _write(Workload.spmd(graph, 2, facts), tmp_path / "job")
    assert (counts["chakra.metadata"], counts["chakra.attachments"]) == (2, 2)
    counts = _write(Workload.spmd(_graph("a"), 2, {"format": "x"}), tmp_path / "other")
    assert not {"chakra.metadata", "chakra.attachments"} & set(counts)


def _job(reference: Any, folder: Path) -> Path:
    folder.mkdir()
    for rank in range(4):
        attributes = [
            {"name": "is_cpu_op", "bool_val": False},
            {"name": "comm_type", "int64_val": 0},
            {"name": "comm_size", "int64_val": 64},
            {"name": "pg_name", "string_val": str(1 + rank // 2)},
        ]
        node = reference.node(id=1, name="sum", type=7, attr=attributes)
        (folder / f"w.{rank}.et").write_bytes(reference.file(node))
    (folder / "comm_group.json").write_text(json.dumps(_LIST, indent=2))
    return folder


def test_the_list_of_groups_comes_back_as_it_was(reference: Any, tmp_path: Path) -> None:
    folder = _job(reference, tmp_path / "job")
    counts = _write(_read(folder), tmp_path / "out", directory=True)
    assert "chakra.attachments" not in counts
    name = "comm_group.json"
    assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


def test_one_rank_takes_its_own_groups_only_and_says_so(reference: Any, tmp_path: Path) -> None:
    counts = _write(_read(_job(reference, tmp_path / "job")), tmp_path / "w.2.et", ranks=range(2, 3))
    assert counts["chakra.attachments"] == 1
    (tmp_path / "alone").mkdir()
    (tmp_path / "w.2.et").rename(tmp_path / "alone" / "w.et")
    alone = _read(tmp_path / "alone" / "w.et")
    assert json.loads(alone.classes[0].attachments["comm_group.json"]) == {"2": [2, 3]}


@pytest.mark.parametrize("name", ["out.et", "out.1.et"])
def test_a_file_stays_that_of_its_rank_under_any_name(reference: Any, tmp_path: Path, name: str) -> None:
    sent = [
        {"name": "is_cpu_op", "bool_val": False},
        {"name": "comm_size", "int64_val": 64},
        {"name": "comm_src", "int32_val": 1},
        {"name": "comm_dst", "int32_val": 0},
        {"name": "comm_tag", "int32_val": 3},
    ]
    path = tmp_path / "w.1.et"
    path.write_bytes(reference.file(reference.node(id=1, name="to 0", type=5, attr=sent)))
    workload = _read(path)
    assert "chakra.metadata" not in _write(workload, tmp_path / name)
    again = _read(tmp_path / name)
    assert again.metadata["rank"] == "1"
    assert again.classes[0].permutations[0].target_of(1) == 0
    assert ((tmp_path / name).read_bytes() == path.read_bytes()) == (name == "out.1.et")


@pytest.mark.parametrize(
    ("attribute", "count"),
    [
        ({"name": "num_ops", "int64_val": -5}, 1),
        ({"name": "num_ops", "int64_val": (1 << 62) + 1}, 1),
        ({"name": "tensor_size", "int64_val": -1}, 1),
        ({"name": "tensor_size", "uint64_val": (1 << 64) - 1}, 1),
        ({"name": "stream", "int64_val": -2}, 1),
        ({"name": "is_cpu_op", "int64_val": 2}, 1),
        ({"name": "op_class", "string_val": "nonsense"}, 1),
        ({"name": "dtype", "string_val": "f99"}, 1),
        ({"name": "contractions", "string_val": "zzz"}, 1),
        ({"name": "bytes_written", "uint64_val": 9}, 1),
        ({"name": "useful_ops", "string_val": "many"}, 1),
        ({"name": "num_ops", "int64_val": 5}, 0),
        ({"name": "bytes_written", "uint64_val": 0}, 1),
        ({"name": "op_class", "string_val": "contraction"}, 0),
        ({"name": "scope", "int64_val": -7}, 0),
    ],
)
def test_values_that_cannot_be_meant_are_told_and_kept(
    reference: Any, tmp_path: Path, attribute: dict[str, Any], count: int
) -> None:
    path = tmp_path / "w.0.et"
    path.write_bytes(reference.file(reference.node(id=1, name="a", type=4, attr=[attribute])))
    found = Diagnostics()
    workload = _read(path, found)
    told = [entry for entry in found if entry.code == "chakra.bad-value"]
    assert found.counts().get("chakra.bad-value", 0) == count
    assert all(attribute["name"] in entry.message for entry in told)
    _write(workload, tmp_path / "out.0.et")
    assert (tmp_path / "out.0.et").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("name", "value"), [("comm_type", 77), ("comm_size", -1), ("comm_size", (1 << 53) + 1), ("channel", -3)]
)
def test_sizes_and_kinds_that_cannot_be_meant_are_told(
    reference: Any, tmp_path: Path, name: str, value: int
) -> None:
    stated = {"is_cpu_op": 0, "comm_type": 0, "comm_size": 8, name: value}
    attributes = [{"name": key, "int64_val": number} for key, number in stated.items()]
    path = tmp_path / "w.0.et"
    path.write_bytes(reference.file(reference.node(id=1, name="a", type=7, attr=attributes)))
    found = Diagnostics()
    _read(path, found)
    assert found.counts()["chakra.bad-value"] == 1


@pytest.mark.parametrize("tag", [7, (1 << 31) - 1, 1 << 31, (1 << 63) - 1])
def test_any_tag_comes_back(tmp_path: Path, tag: int) -> None:
    builder = GraphBuilder("g")
    way = builder.permutation(Permutation(num_ranks=2, pairs=((0, 1), (1, 0))))
    for kind in (NodeKind.SEND, NodeKind.RECV):
        node = builder.add_node(name_id=builder.strings.add("m"), op_id=0, op_class=OpClass.P2P, kind=kind)
        builder.add_p2p(node, permutation=way, comm_bytes=8.0, tag=tag)
    _write(Workload.spmd(builder.build(), 2), tmp_path / "job")
    again = _read(tmp_path / "job")
    assert {value for graph in again.classes for value in graph.p2p.tag.tolist()} == {tag}
    _write(again, tmp_path / "again")
    for rank in range(2):
        first, second = (
            tmp_path / folder / f"{name}.{rank}.et" for folder, name in (("job", "job"), ("again", "again"))
        )
        assert first.read_bytes() == second.read_bytes()


def test_ranks_without_anything_to_do_are_a_declared_loss(tmp_path: Path) -> None:
    builder = GraphBuilder("g")
    way = builder.permutation(Permutation(num_ranks=2, pairs=((0, 1),)))
    node = builder.add_node(
        name_id=builder.strings.add("out"), op_id=builder.strings.add("send"), op_class=OpClass.P2P,
        kind=NodeKind.SEND,
    )  # fmt: skip
    builder.add_p2p(node, permutation=way, comm_bytes=8.0, tag=(1 << 63) - 1)
    write = load_format("op-graph").write
    assert write is not None
    write(Workload.spmd(builder.build(), 2), tmp_path / "g.json", WriteOptions(), Diagnostics())
    found = roundtrip([tmp_path / "g.json"], ("op-graph", "chakra"))
    assert found.valid, [(cell.source, cell.via, cell.unreported) for cell in found.cells]
    assert any("chakra.empty-rank" in cell.findings for cell in found.cells)


def test_an_early_trace_is_written_with_the_label_of_its_schema(reference: Any, tmp_path: Path) -> None:
    attribute = reference.metadata(attr=[{"name": "pid", "int64_val": 7}]).SerializeToString()
    early = b"\x0a" + attribute[1:]  # then the attributes were in field 1
    node = reference.node(id=1, name="a", type=4, duration_micros=2).SerializeToString()
    path = tmp_path / "w.0.et"
    path.write_bytes(reference.framed(early, node))
    found = Diagnostics()
    workload = _read(path, found)
    assert "chakra.migrated" in found.counts()
    assert "ET004" not in found.counts()
    _write(workload, tmp_path / "out.0.et")
    assert reference.metadata(version="0.0.4").SerializeToString() in (tmp_path / "out.0.et").read_bytes()
    again = Diagnostics()
    _read(tmp_path / "out.0.et", again)
    assert not again.counts()


@pytest.mark.parametrize(
    ("fields", "nanos", "message"),
    [
        ({"duration_micros": 1 << 63}, None, "2**63 or more"),
        ({"duration_micros": (1 << 63) - 1}, None, ""),
        ({"duration_micros": 1}, -1, "duration_nanos is negative"),
        ({"duration_micros": 1}, 0, ""),
    ],
)
def test_negative_times_are_errors_and_unknown_once_repaired(
    reference: Any, tmp_path: Path, fields: dict[str, int], nanos: int | None, message: str
) -> None:
    node = reference.node(id=1, name="a", type=4, **fields)
    if nanos is not None:
        node.attr.add(name="duration_nanos").int64_val = nanos
    (tmp_path / "w.et").write_bytes(reference.file(node))
    profiles: list[Profile | None] = [None, "chakra", "astra-sim"]
    for profile in profiles:
        result = check([tmp_path / "w.et"], profile)
        found = [entry for entry in result.violations if entry.code == "GR001"]
        assert [(entry.severity, entry.node) for entry in found] == [(Severity.ERROR, 1)] * bool(message)
        assert all(message in entry.message for entry in found)
    if not message:
        assert not np.isnan(_read(tmp_path / "w.et").classes[0].duration_ns).any()
        return
    with pytest.raises(FormatError, match=r"node 1 at byte \d+: GR001") as refused:
        _read(tmp_path / "w.et")
    assert message in str(refused.value)
    assert "`recover`" in (refused.value.hint or "")
    repairs = Diagnostics()
    repaired = api.read(tmp_path / "w.et", options=ReadOptions(recover=True), diagnostics=repairs)
    assert isinstance(repaired, Workload)
    assert repairs.counts()["GR001"] == 1
    expected = [np.nan if nanos is None else 1000.0]
    np.testing.assert_array_equal(repaired.classes[0].duration_ns, expected)
    _write(repaired, tmp_path / "out.0.et")
    again = _read(tmp_path / "out.0.et")
    np.testing.assert_array_equal(again.classes[0].duration_ns, expected)


@pytest.mark.parametrize("jobs", [1, 2])
def test_round_trips_read_the_groups_that_are_named_and_write_their_own(
    reference: Any, tmp_path: Path, jobs: int
) -> None:
    sets = [tmp_path / "one", tmp_path / "two"]
    for folder in sets:
        folder.mkdir()
        for rank in range(2):
            node = reference.node(id=1, name="ar", type=7)
            node.attr.add(name="comm_type").int64_val = 0
            node.attr.add(name="comm_size").int64_val = 9
            node.attr.add(name="pg_name").string_val = "dp"
            (folder / f"w.{rank}.et").write_bytes(reference.file(node))
    with pytest.raises(FormatError, match="is not a group"):
        roundtrip(sets, ("chakra",), jobs=jobs)
    named = tmp_path / "any.txt"
    named.write_text('{"dp": [0, 1]}')
    command = ["roundtrip", *map(str, sets), "--formats", "chakra", "--jobs", str(jobs)]
    done = CliRunner().invoke(validate.app, [*command, "--comm-groups", str(named)])
    assert done.exit_code == 0, done.output
