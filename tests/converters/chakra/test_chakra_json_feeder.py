"""Lists ``workload_graph``: the JSON of Chakra's C++ feeder, and our own document, which it can read too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format

from hespas.converters import ReadOptions, WriteOptions, load_format, sniff
from hespas.converters.chakra.json.files import read_chakra_json
from hespas.converters.chakra.reader import read_chakra
from hespas.graph import CollectiveKind, Diagnostics, NodeKind, Workload
from hespas.graph.errors import FormatError, OutputError, UnsupportedError, UsageError

_PARSE: Any = json_format.ParseDict
_FEEDER: list[dict[str, Any]] = [
    {"Id": 3, "Name": "matmul", "NodeType": 4, "is_cpu_op": False, "runtime": 12, "data_deps": []},
    {
        "Id": 4,
        "Name": "sum",
        "NodeType": 7,
        "is_cpu_op": False,
        "runtime": 0.25,
        "data_deps": [3],
        "comm_type": 0,
        "comm_size": 4096,
        "comm_priority": 2,
    },
    {
        "Id": 5,
        "Name": "to 1",
        "NodeType": 5,
        "is_cpu_op": False,
        "data_deps": [4],
        "ctrlDeps": [3],
        "comm_src": 0,
        "comm_dst": 1,
        "comm_tag": 8,
        "comm_size": 64,
        "note": "kept",
        "involved_dim": [True, False],
        "more": {"a": 1},
    },
]


def _read(path: Path, diagnostics: Diagnostics | None = None, **options: Any) -> Workload:
    return read_chakra_json(
        path, ReadOptions(**options), Diagnostics() if diagnostics is None else diagnostics
    )


def _write(workload: Workload, path: Path, diagnostics: Diagnostics | None = None) -> None:
    write = load_format("chakra-json").write
    assert write
    write(
        workload,
        path,
        WriteOptions(name=path.name),
        Diagnostics() if diagnostics is None else diagnostics,
    )


def _write_traces(workload: Workload, path: Path) -> None:
    write = load_format("chakra").write
    assert write
    write(workload, path, WriteOptions(name=path.name), Diagnostics())


def test_the_feeders_keys_become_the_attributes_of_the_contract(tmp_path: Path) -> None:
    path = tmp_path / "job.0.json"
    path.write_text(json.dumps({"workload_graph": _FEEDER}, indent=1))
    assert sniff(path).name == "chakra-json"
    found = Diagnostics()
    graph = _read(path, found, num_devices=2).classes[0]
    assert [graph.node_name(node) for node in range(3)] == ["matmul", "sum", "to 1"]
    assert graph.kind.tolist() == [NodeKind.COMPUTE, NodeKind.COLLECTIVE, NodeKind.SEND]
    assert graph.duration_ns.tolist()[:2] == [12_000, 250]
    assert graph.collectives.kind.tolist() == [CollectiveKind.ALL_REDUCE]
    assert graph.collectives.comm_bytes.tolist() == [4096]
    assert graph.p2p.tag.tolist() == [8]
    assert graph.permutations[0].target_of(0) == 1
    assert graph.data_deps.row(2).tolist() == [1]
    assert graph.control_deps.row(2).tolist() == [0]
    keys = {graph.strings[row] for row in graph.extra.key.tolist()}
    assert {"note", "involved_dim", "comm_priority"} <= keys
    assert found.counts()["chakra.unknown-field"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Id": None}, "Id is missing"),
        ({"NodeType": None}, "NodeType is missing"),
        ({"NodeType": "X"}, "not a node type"),
        ({"runtime": -1}, "duration_micros: -1"),
        ({"data_deps": "3"}, "data_deps: not a list"),
        ({"comm_size": "many"}, "int64_val: 'many' is not a whole number"),
        ({"is_cpu_op": 3}, "bool_val: 3 is neither"),
        ({"ctrl_deps": [], "ctrlDeps": []}, "two spellings"),
    ],
)
def test_wrong_feeder_nodes_are_refused_by_place(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "job.json"
    nodes = [_FEEDER[0], {**_FEEDER[1], **change}]
    path.write_text('{"workload_graph": [\n' + ",\n".join(map(json.dumps, nodes)) + "]}")
    with pytest.raises(FormatError, match=message) as caught:
        _read(path)
    assert "workload_graph[1], line 3" in (caught.value.position or "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"workload_graph": [{"Id": 1, "NodeType": 4, "Name": "a"}', "cut off"),
        ('{"workload_graph": [{"Id": 1, "NodeType": 4, "Name": "a"},', "cut off"),
        ('{"workload_graph": [{"Id": 1, "NodeType": 4, "Name": "a"} {}]}', "comma is missing"),
        ('{"workload_graph": [5]}', "an object was expected"),
        ('{"workload_graph": [{"Id": 1, "NodeType": 4, "Name": "a"},]}', "an object was expected"),
        ('{"workload_graph": [{"Id": 1, "NodeType": 4, "Name": "a"}]', "after workload_graph"),
        ('{"workload_graph": [{"Id": 1, "NodeType": 4, "Name": "a"}]} {}', "after workload_graph"),
        ('{"workload_graph": []}', "ET002"),
        ('{"workload_graph": [], "workload_graph": []}', "twice"),
        (
            '{"workload_graph": [{"Id": 1, "NodeType": 4, "Name": "a"}], "global_metadata": {}}',
            "follows workload_graph",
        ),
    ],
)
def test_broken_lists_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=message):
        _read(path)


def test_a_document_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    node = {"Id": 1, "NodeType": 4, "Name": "a"}
    path.write_text(json.dumps({"schema": "hespas.chakra-json/9", "workload_graph": [node]}))
    with pytest.raises(UnsupportedError, match="chakra-json/9"):
        _read(path)


def _trace(reference: Any, path: Path) -> Workload:
    """A trace with what JSON finds hard, which the chakra writer gives back byte for byte."""
    first = reference.node(id=1 << 63, name='ä"\\\n\x00', type=4, duration_micros=9, start_time_micros=4)
    first.inputs.SetInParent()
    for name, values in (("d", [0.1, float("nan"), -0.0, 1e300]), ("f", [0.1, float("-inf")])):
        kind = {"d": "double", "f": "float"}[name]
        for place, value in enumerate(values):
            first.attr.add(name=f"{name}{place}", **{f"{kind}_val": value})
        getattr(first.attr.add(name=f"{name}s"), f"{kind}_list").values.extend(values)
    first.attr.add(name="raw", bytes_val=bytes(range(256)))
    first.attr.add(name="is_cpu_op", int32_val=1)
    first.attr.add(name="wide", sint64_val=-(1 << 63), doc_string="why")
    collective = reference.node(id=2, name="gather", type=7, data_deps=[1 << 63], ctrl_deps=[1 << 63])
    collective.attr.add(name="comm_type", int64_val=2)
    collective.attr.add(name="comm_size", uint64_val=77)
    collective.attr.add(name="pg_name", string_val="3")
    path.mkdir()
    (path / "w.0.et").write_bytes(reference.file(first, collective))
    (path / "comm_group.json").write_bytes(b'{"3": [0]}')
    return read_chakra(path, ReadOptions(), Diagnostics())


def test_a_trace_comes_back_from_json_byte_for_byte(reference: Any, tmp_path: Path) -> None:
    workload = _trace(reference, tmp_path / "w")
    straight, through = tmp_path / "straight", tmp_path / "through"
    straight.mkdir()
    found = Diagnostics()
    _write(workload, tmp_path / "w.0.json", found)
    again = _read(tmp_path / "w.0.json")
    through.mkdir()
    _write_traces(workload, straight / "w.0.et")
    _write_traces(again, through / "w.0.et")
    assert (straight / "w.0.et").read_bytes() == (through / "w.0.et").read_bytes()
    assert found.counts()["chakra-json.control-deps"] == 1
    assert "chakra-json.nan-payload" not in found.counts()


def test_our_document_is_json_with_what_the_feeder_reads(reference: Any, tmp_path: Path) -> None:
    workload = _trace(reference, tmp_path / "w")
    path = tmp_path / "w.0.json"
    _write(workload, path)
    document = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert document["schema"] == "hespas.chakra-json/1"
    first, collective = document["workload_graph"]
    assert (first["Id"], first["NodeType"], first["runtime"], first["is_cpu_op"]) == (1 << 63, 4, 9, True)
    assert first["inputs"] == {}
    assert collective["data_deps"] == [1 << 63]
    assert (collective["comm_type"], collective["comm_size"], collective["is_cpu_op"]) == (2, 77, False)
    for node in (first, collective):  # the rest is what the protobuf library understands
        message = _PARSE({"attr": node["attr"]}, reference.node())
        assert len(message.attr) == len(node["attr"])
    _PARSE(document["global_metadata"], reference.metadata())
    assert sniff(path).name == "chakra-json"


def test_a_key_that_contradicts_its_attribute_is_told(reference: Any, tmp_path: Path) -> None:
    workload = _trace(reference, tmp_path / "w")
    path = tmp_path / "w.0.json"
    _write(workload, path)
    path.write_text(
        path.read_text(encoding="utf-8").replace('"comm_size":77', '"comm_size":78'), encoding="utf-8"
    )
    found = Diagnostics()
    graph = _read(path, found).classes[0]
    assert graph.collectives.comm_bytes.tolist() == [77]
    assert found.counts()["chakra-json.feeder-key"] == 1


def test_a_nan_with_a_payload_is_told(reference: Any, tmp_path: Path) -> None:
    payload = np.array([0x7FF8_0000_0000_0001], np.uint64).view(np.float64)[0]
    node = reference.node(id=1, name="a", type=4)
    node.attr.add(name="x", double_val=float(payload))
    (tmp_path / "w.0.et").write_bytes(reference.file(node))
    found = Diagnostics()
    _write(read_chakra(tmp_path / "w.0.et", ReadOptions(), Diagnostics()), tmp_path / "w.0.json", found)
    assert found.counts()["chakra-json.nan-payload"] == 1


def test_several_ranks_are_a_folder_without_scratch(reference: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for rank in range(3):
        node = reference.node(id=0, name="sum", type=7)
        node.attr.add(name="comm_type", int64_val=0)
        node.attr.add(name="comm_size", int64_val=8)
        node.attr.add(name="pg_name", string_val="1" if rank < 2 else "")
        (source / f"w.{rank}.et").write_bytes(reference.file(node))
    (source / "comm_group.json").write_text('{"1": [0, 1]}')
    workload = read_chakra(source, ReadOptions(), Diagnostics())
    made = tmp_path / "made"
    found = Diagnostics()
    _write(workload, made, found)
    assert found.counts()["chakra-json.process-group"] == 2
    assert sorted(file.name for file in made.iterdir()) == [
        "comm_group.json",
        "made.0.json",
        "made.1.json",
        "made.2.json",
    ]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["made", "source"]
    again = _read(made)
    assert again.rank_class.tolist() == workload.rank_class.tolist()
    assert [groups.group_size for groups in again.group_sets] == [
        groups.group_size for groups in workload.group_sets
    ]
    with pytest.raises(UsageError, match="3 ranks need as many files"):
        _write(workload, tmp_path / "one.json")
    (made / "made.1.json").unlink()
    with pytest.raises(FormatError, match="ET022") as caught:
        _read(made)
    assert caught.value.path == str(made)


def test_packed_output_is_packed(reference: Any, tmp_path: Path) -> None:
    workload = _trace(reference, tmp_path / "w")
    path = tmp_path / "w.0.json.gz"
    _write(workload, path)
    assert path.read_bytes()[:2] == b"\x1f\x8b"
    assert len(_read(path).classes[0]) == 2


def test_a_folder_that_cannot_be_written_is_told(reference: Any, tmp_path: Path) -> None:
    workload = _trace(reference, tmp_path / "w")
    with pytest.raises(OutputError, match="cannot be written"):
        _write(workload, tmp_path / "missing" / "w.0.json")


@pytest.mark.parametrize(
    "text",
    [
        '{"schema": "1.1.1-chakra.0.0.4", "pid": 3, "start_ts": 1, "nodes": [{"id": 1, "attrs": []}]}',
        '{"traceEvents": [{"ph": "X", "name": "a"}], "version": "1"}',
        '{"version": "2.0", "name": "package"}',
        '{"version": "1"}',
        '{"1": [0, 1]}',
        '{"graph": {"workload_graph": {"nodes": []}}}',
        "[]",
        "{",
    ],
)
def test_other_json_is_not_taken_for_a_trace(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    try:
        told = sniff(path).name
    except FormatError as error:
        told = error.message
    assert told != "chakra-json"
