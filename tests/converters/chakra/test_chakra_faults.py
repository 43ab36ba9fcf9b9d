"""Faults of traces: strict readers name file, node and byte; lenient ones record the checker's code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hespas.converters.chakra import FORMAT
from hespas.converters.format import ReadOptions
from hespas.graph import Diagnostics, Severity, Workload
from hespas.graph.errors import FormatError

_FLAG = {"name": "is_cpu_op", "bool_val": False}
_Nodes = list[dict[str, Any]]


def _compute(number: int, **fields: Any) -> dict[str, Any]:
    return {"id": number, "name": f"n{number}", "type": 4, "attr": [_FLAG], **fields}


def _collective(number: int, *attributes: dict[str, Any]) -> dict[str, Any]:
    sizes = [{"name": "comm_type", "int64_val": 0}, {"name": "comm_size", "int64_val": 64}]
    return _compute(number, type=7, attr=[_FLAG, *sizes, *attributes])


# Code, nodes, what the message says, id of the node at fault.
_CASES: list[tuple[str, _Nodes, str, int]] = [
    ("ET005", [_compute(1), _compute(2), _compute(1)], "another node has the same id", 1),
    ("ET006", [_compute(1), _compute(2, data_deps=[1, 77])], "data_deps names node 77", 2),
    ("ET006", [_compute(1), _compute(2, ctrl_deps=[78])], "ctrl_deps names node 78", 2),
    ("ET007", [_compute(1), _compute(2, data_deps=[2])], "names the node itself", 2),
    ("ET009", [_compute(1), _compute(2, type=9)], "node type", 2),
    ("ET010", [_compute(1), _compute(2, attr=[_FLAG, _FLAG])], "the same name", 2),
    ("ET010", [_compute(1), _compute(2, attr=[{"name": "num_ops", "double_val": 1.0}])], "num_ops", 2),
    (
        "ET014",
        [_compute(1), _compute(2, type=5, attr=[_FLAG, {"name": "comm_src", "int32_val": 3}])],
        "comm_src",
        2,
    ),
    ("ET018", [_compute(1), _collective(2, {"name": "pg_name", "string_val": "5"})], "comm_group.json", 2),
]


def _read(path: Path, *, lenient: bool = False) -> tuple[Workload, Diagnostics]:
    assert FORMAT.read is not None
    diagnostics = Diagnostics()
    value = FORMAT.read(path, ReadOptions(lenient=lenient), diagnostics)
    assert isinstance(value, Workload)
    return value, diagnostics


@pytest.mark.parametrize("case", _CASES, ids=lambda case: f"{case[0]}-{case[2][:12]}")
def test_faults(reference: Any, tmp_path: Path, case: tuple[str, _Nodes, str, int]) -> None:
    code, nodes, message, node = case
    path = tmp_path / "bad.0.et"
    path.write_bytes(reference.file(*(reference.node(**fields) for fields in nodes)))
    with pytest.raises(FormatError) as caught:
        _read(path)
    assert caught.value.message.startswith(f"{code}: ")
    assert message in caught.value.message
    assert caught.value.path == str(path)
    assert (caught.value.position or "").startswith(f"node {node} at byte ")
    workload, diagnostics = _read(path, lenient=True)
    assert len(workload.classes[0]) == len(nodes)
    found = [entry for entry in diagnostics if entry.code == code and entry.severity is Severity.ERROR]
    assert [entry.node for entry in found] == [node]


def test_other_integer_types_are_accepted_with_a_lint(reference: Any, tmp_path: Path) -> None:
    attributes = [
        {"name": "is_cpu_op", "int32_val": 1},
        {"name": "comm_type", "int64_val": 2},
        {"name": "comm_size", "uint64_val": 1 << 33},
    ]
    node = reference.node(id=1, name="gather", type=7, attr=attributes)
    (tmp_path / "a.et").write_bytes(reference.file(node))
    workload, diagnostics = _read(tmp_path / "a.et")
    assert workload.classes[0].collectives.comm_bytes.tolist() == [1 << 33]
    assert workload.classes[0].resource.tolist() == [1]
    assert diagnostics.counts() == {"ET010": 2}
    assert diagnostics.count(Severity.ERROR) == 0


def _files(reference: Any, folder: Path, names: list[str]) -> None:
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(reference.file(reference.node(**_compute(1))))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no rank files"),
        (["a.0.et", "b.0.et"], "2 jobs"),
        (["a.0.et", "a.1.et", "a.3.et"], "rank 2"),
        (["a.1.et"], "rank 0"),
        (["a.0.et", "a.00.et"], "two files"),
    ],
)
def test_incomplete_sets(reference: Any, tmp_path: Path, names: list[str], message: str) -> None:
    _files(reference, tmp_path / "set", names)
    with pytest.raises(FormatError, match=message) as caught:
        _read(tmp_path / "set")
    assert "ET022" in caught.value.message


def test_a_lenient_reader_takes_the_ranks_before_a_gap(reference: Any, tmp_path: Path) -> None:
    _files(reference, tmp_path / "set", ["a.0.et", "a.1.et", "a.3.et"])
    workload, diagnostics = _read(tmp_path / "set", lenient=True)
    assert workload.num_ranks == 2
    assert diagnostics.counts()["ET022"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "not an object"),
        ('{"1": [0, "x"]}', "not an object"),
        ('{"0": [0, 1]}', "pg_name is not a group"),
        ('{"x": [0, 1]}', "pg_name is not a group"),
        ('{"1": [0, 0]}', "lists a rank twice"),
        ('{"1": []}', "is empty"),
        ('{"1": [4, 5]}', "not a member"),
        ('{"1": [0, 9223372036854775808]}', "names a rank above the limit of 16,777,216"),
        ('{"1": [0, 2147483648]}', "names a rank above the limit of 16,777,216"),
        ('{"1": [0, ' + "9" * 5000 + "]}", "ET01[89]"),
        ('{"1": ' + "[" * 100_000, "not an object"),
        ("", "is not an object of rank lists"),
        ('{"1": [0, 1.5]}', "not an object"),
        ('{"\\ud800": [0]}', "ET019"),
    ],
    ids=range(14),
)
def test_group_files(reference: Any, tmp_path: Path, text: str, message: str) -> None:
    node = reference.node(**_collective(1, {"name": "pg_name", "string_val": "1"}))
    (tmp_path / "a.0.et").write_bytes(reference.file(node))
    (tmp_path / "comm_group.json").write_text(text)
    with pytest.raises(FormatError, match=message):
        _read(tmp_path / "a.0.et")
    _, diagnostics = _read(tmp_path / "a.0.et", lenient=True)
    assert {"ET018", "ET019"} & set(diagnostics.counts())


def test_a_group_file_that_is_no_file_is_told(reference: Any, tmp_path: Path) -> None:
    node = reference.node(**_collective(1, {"name": "pg_name", "string_val": "1"}))
    (tmp_path / "a.0.et").write_bytes(reference.file(node))
    groups = tmp_path / "comm_group.json"
    for kind in ("folder", "dangling", "pipe"):
        if kind == "folder":
            groups.mkdir()
        elif kind == "dangling":
            groups.symlink_to("nowhere")
        else:
            os.mkfifo(groups)
        with pytest.raises(FormatError, match=r"ET019: comm_group\.json cannot be read: "):
            _read(tmp_path / "a.0.et")
        _, diagnostics = _read(tmp_path / "a.0.et", lenient=True)
        assert diagnostics.counts()["ET019"]
        groups.rmdir() if groups.is_dir() else groups.unlink()


def test_long_chains_are_read(reference: Any, tmp_path: Path) -> None:
    nodes = (reference.node(**_compute(i, data_deps=[i - 1] if i else [])) for i in range(20_000))
    (tmp_path / "chain.et").write_bytes(reference.file(*nodes))
    workload, _ = _read(tmp_path / "chain.et")
    assert workload.classes[0].data_deps.values.tolist() == list(range(19_999))


def _damaged(data: bytes, kind: str) -> bytes:
    return {"cut": data[:-3], "junk": b"\xff" + data, "empty": b""}[kind]


@pytest.mark.parametrize("kind", ["cut", "junk", "empty"])
def test_damaged_files_of_a_set_are_named(reference: Any, tmp_path: Path, kind: str) -> None:
    _files(reference, tmp_path / "set", ["a.0.et", "a.1.et"])
    bad = tmp_path / "set" / "a.1.et"
    bad.write_bytes(_damaged(bad.read_bytes(), kind))
    with pytest.raises(FormatError) as caught:
        _read(tmp_path / "set")
    assert caught.value.path == str(bad)
