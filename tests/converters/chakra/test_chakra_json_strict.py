"""JSON traces with duplicate keys, or that are not traces: rejected with their position or format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hespas.converters import ReadOptions, WriteOptions, load_format, sniff
from hespas.graph import Diagnostics, Workload
from hespas.graph.errors import FormatError

_META = '{"version": "0.0.4"}'


def _read(path: Path, found: Diagnostics | None = None) -> Workload:
    read = sniff(path).read
    assert read is not None
    value = read(path, ReadOptions(), Diagnostics() if found is None else found)
    assert isinstance(value, Workload)
    return value


def _listed(path: Path, **node: Any) -> Path:
    path.write_text(json.dumps({"workload_graph": [{"Id": 1, "Name": "a", "NodeType": 4, **node}]}))
    return path


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"workload_graph":[{"Id":1,"Id":2,"Name":"a","NodeType":4}]}', "workload_graph[0], line 1"),
        ('{"workload_graph":[{"Id":1,"Name":"a","NodeType":4,"runtime":5,"runtime":9}]}', "line 1"),
        (
            (
                '{"workload_graph":[{"Id":1,"Name":"a","NodeType":4,\n'
                '"attr":[{"name":"x","name":"y","int64_val":3}]}]}'
            ),
            "line 1",
        ),
        ('{"global_metadata":{},"global_metadata":{},"workload_graph":[{"Id":1,"NodeType":4}]}', "line 1"),
        ('{"schema":"x","workload_graph":[{"Id":1,"NodeType":4}],\n"schema":"y"}', "line 1"),
        (_META + '\n{"id":"1","name":"a","name":"b","type":"COMP_NODE"}', "document 2, line 2"),
        (_META + '\n{"id":"1","type":"COMP_NODE","inputs":{"values":"","values":"x"}}', "document 2, line 2"),
    ],
)
def test_a_key_that_stands_twice_is_refused(tmp_path: Path, text: str, place: str) -> None:
    path = tmp_path / "job.json"
    path.write_text(text)
    with pytest.raises(FormatError, match="occurs twice in an object") as caught:
        _read(path)
    assert place in (caught.value.position or "")


def test_the_same_key_in_two_objects_is_fine(tmp_path: Path) -> None:
    attributes = [{"name": name, "int64_val": 12345678901234567890 % 97} for name in ("x", "y")]
    graph = _read(_listed(tmp_path / "job.json", attr=attributes, runtime=4)).classes[0]
    assert {"x", "y"} <= {graph.strings[row] for row in graph.extra.key.tolist()}


@pytest.mark.parametrize(
    ("stated", "duration_ns", "conflicts"),
    [
        ({"runtime": 5, "duration_nanos": 90_000}, 90_000, 1),
        ({"runtime": 5.5, "duration_nanos": 90_000}, 90_000, 1),
        ({"runtime": 5.5, "duration_nanos": 5_501}, 5_501, 0),
        ({"runtime": 5.5}, 5_500, 0),
        ({"runtime": 1e-7}, 1, 0),
        ({"runtime": 0.0004}, 1, 0),
    ],
)
def test_two_durations_of_the_feeder_do_not_overrule_silently(
    tmp_path: Path, stated: dict[str, Any], duration_ns: float, conflicts: int
) -> None:
    found = Diagnostics()
    graph = _read(_listed(tmp_path / "job.json", **stated), found).classes[0]
    assert graph.duration_ns.tolist() == [duration_ns]
    assert found.counts().get("chakra.duration-conflict", 0) == conflicts


def test_a_node_without_a_field_is_one(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(_META + '\n{}\n{"id": "1", "name": "a", "type": "COMP_NODE"}\n')
    assert sniff(path).name == "chakra-json"
    found = Diagnostics()
    assert _read(path, found).classes[0].id.tolist() == [0, 1]
    assert found.counts()["ET004"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"workload_graph":{}}', "workload_graph is not a list"),
        ('{"workload_graph": 5, "schema": "x"}', "workload_graph is not a list"),
        ('{"workload_graph":[1,2]}', "an object was expected, not b'1,2'"),
    ],
)
def test_what_is_no_list_of_nodes_is_told_by_the_reader_of_such_lists(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "job.json"
    path.write_text(text)
    assert sniff(path).name == "chakra-json"
    with pytest.raises(FormatError, match="ET001") as caught:
        _read(path)
    assert message in caught.value.message


@pytest.mark.parametrize("version", ["0.0.4", "1.0.0"])
def test_a_version_can_be_named_for_json_too(tmp_path: Path, version: str) -> None:
    entry = load_format("chakra-json")
    assert version in entry.write_versions
    assert entry.write is not None
    value = _read(_listed(tmp_path / "job.json", runtime=3))
    entry.write(value, tmp_path / "out.json", WriteOptions(name="out.json", version=version), Diagnostics())
    assert json.loads((tmp_path / "out.json").read_text())["global_metadata"] == {"version": version}
    assert _read(tmp_path / "out.json").metadata["version"] == version
