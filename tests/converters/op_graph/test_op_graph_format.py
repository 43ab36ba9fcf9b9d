"""The registry finds both spellings, by content and by suffix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import hespas
from hespas.converters.format import ReadOptions, WriteOptions
from hespas.converters.registry import format_for_output, load_format, sniff
from hespas.graph import Diagnostics, GraphBuilder, OpClass, Workload, dtype
from hespas.graph.equality import workloads_equal
from hespas.graph.errors import UnsupportedError, UsageError


@pytest.mark.parametrize("name", ["op-graph", "op-graph-arrow"])
def test_written_files_are_sniffed_whatever_their_name(
    name: str, make_workload: Callable[[int, int], Workload], tmp_path: Path
) -> None:
    entry = load_format(name)
    path = tmp_path / "no_suffix_at_all"
    workload = make_workload(1, 20)
    assert entry.write is not None
    entry.write(workload, path, WriteOptions(), Diagnostics())
    found = sniff(path)
    assert found is entry
    assert found.read is not None
    again = found.read(path, ReadOptions(), Diagnostics())
    assert isinstance(again, Workload)
    assert workloads_equal(workload, again) == []


def test_hand_written_json_is_sniffed(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text('{"nodes": [{"op": "matmul", "deps": []}]}')
    assert sniff(path).name == "op-graph"


@pytest.mark.parametrize(
    ("file_name", "format_name"),
    [
        ("a.json", "op-graph"),
        ("a.opgraph.json", "op-graph"),
        ("a.arrow", "op-graph-arrow"),
        ("a.opgraph", "op-graph-arrow"),
    ],
)
def test_suffix_chooses_the_output(file_name: str, format_name: str, tmp_path: Path) -> None:
    assert format_for_output(tmp_path / file_name, None).name == format_name


def test_a_gz_name_compresses_json_and_is_refused_for_arrow(tmp_path: Path) -> None:
    source = tmp_path / "hand.json"
    source.write_text('{"nodes":[{"op":"a","deps":[]}]}')
    workload = hespas.read(source)
    hespas.write(workload, tmp_path / "g.json.gz")
    assert (tmp_path / "g.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    again = hespas.read(tmp_path / "g.json.gz")
    assert isinstance(workload, Workload)
    assert isinstance(again, Workload)
    assert workloads_equal(workload, again) == []
    with pytest.raises(UsageError, match="not compressed"):
        hespas.write(workload, tmp_path / "g.arrow.gz")


def _with_tensor(*shape: int) -> Workload:
    builder = GraphBuilder("made")
    name, op = builder.strings.add("a"), builder.strings.add("abs")
    operands = [builder.types.add(dtype("i8"), shape)]
    builder.add_node(name_id=name, op_id=op, op_class=OpClass.ELEMENTWISE, operands=operands)
    return Workload.spmd(builder.build(), 1)


@pytest.mark.parametrize("file_name", ["g.json", "g.arrow"])
def test_the_largest_tensor_is_written_and_read_and_a_larger_one_refused(
    file_name: str, tmp_path: Path
) -> None:
    largest = _with_tensor(7, (2**63 - 1) // 7, 1)
    hespas.write(largest, tmp_path / file_name)
    again = hespas.read(tmp_path / file_name)
    assert isinstance(again, Workload)
    assert workloads_equal(largest, again) == []
    for shape in [(2**62, 2), (2**62, -1, 0, 2), (2**62,) * 16]:
        with pytest.raises(UnsupportedError, match=r"more than 2\*\*63 elements: i8\[4611686018427387904,"):
            hespas.write(_with_tensor(*shape), tmp_path / f"larger.{file_name}")
    assert [entry.name for entry in tmp_path.iterdir()] == [file_name]
