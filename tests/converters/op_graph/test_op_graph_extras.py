"""Verbatim attributes in JSON op graphs: text as text, other bytes as base64."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path

import pytest

from hespas.converters.format import ReadOptions, WriteOptions
from hespas.converters.op_graph import FORMAT
from hespas.graph import Diagnostics, GraphBuilder, OpClass, Workload
from hespas.graph.equality import workloads_equal
from hespas.graph.errors import FormatError

_TEXTS = ["", "{{0,1},{2,3}}", "größer 中", "two\nlines\tand\r\n", '"quoted" \\']
_OTHERS = [b"\xff\xfe", b"\0", b"\x1b[2J", "\u202e".encode(), b"\xed\xa0\x80", b"\x01\0\0\0\0\0\0\0"]


def _workload(*values: bytes) -> Workload:
    builder = GraphBuilder("made")
    name, op = builder.strings.add("a"), builder.strings.add("dot")
    node = builder.add_node(name_id=name, op_id=op, op_class=OpClass.CONTRACTION)
    for number, value in enumerate(values):
        builder.add_extra(node, f"key{number}", number, value)
        builder.add_extra(-1, f"file{number}", number, value)
    return Workload.spmd(builder.build(), 1)


def _write(workload: Workload, path: Path) -> None:
    assert FORMAT.write is not None
    FORMAT.write(workload, path, WriteOptions(), Diagnostics())


def _read(path: Path) -> Workload:
    assert FORMAT.read is not None
    value = FORMAT.read(path, ReadOptions(), Diagnostics())
    assert isinstance(value, Workload)
    return value


def test_every_value_comes_back(tmp_path: Path) -> None:
    workload = _workload(*(text.encode() for text in _TEXTS), *_OTHERS)
    _write(workload, tmp_path / "graph.json")
    assert workloads_equal(_read(tmp_path / "graph.json"), workload) == []


@pytest.mark.parametrize("text", _TEXTS)
def test_printable_text_is_written_as_such(tmp_path: Path, text: str) -> None:
    _write(_workload(text.encode()), tmp_path / "graph.json")
    document = json.loads((tmp_path / "graph.json").read_text("utf-8"))["rank_classes"][0]
    for entry in (document["extra"][0], document["nodes"][0]["extra"][0]):
        assert entry.get("text", "") == text
        assert "value" not in entry


@pytest.mark.parametrize("value", _OTHERS)
def test_all_else_is_written_in_base64(tmp_path: Path, value: bytes) -> None:
    _write(_workload(value), tmp_path / "graph.json")
    document = json.loads((tmp_path / "graph.json").read_text("utf-8"))["rank_classes"][0]
    (entry,) = document["nodes"][0]["extra"]
    assert entry["value"] == b64encode(value).decode()
    assert "text" not in entry


def test_two_values_contradict_each_other(tmp_path: Path) -> None:
    node = {"op": "dot", "deps": [], "extra": [{"key": "a", "text": "b", "value": "Yw=="}]}
    (tmp_path / "graph.json").write_text(json.dumps({"nodes": [node]}))
    with pytest.raises(FormatError, match="'a' has both text and value") as caught:
        _read(tmp_path / "graph.json")
    assert caught.value.position
