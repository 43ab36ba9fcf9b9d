"""Truncated traces: an error, or the complete part on request."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hespas.cli import convert
from hespas.converters.chakra import FORMAT
from hespas.converters.chakra.wire.codec import read_columns
from hespas.converters.format import ReadOptions, WriteOptions
from hespas.graph import Diagnostics, Severity, Workload
from hespas.graph.equality import workloads_equal
from hespas.graph.errors import FormatError
from tests.converters.chakra.historic_protos import Logical, encode

_VERSIONS = ["0.0.1", "0.0.3-2023-08-07", "0.0.4"]


def _trace(version: str, count: int = 30) -> bytes:
    attrs = {"num_ops": 1 << 20, "tensor_size": 5}
    return encode(
        version,
        [Logical(i, f"n{i}", "COMP", (i - 1,) if i else (), i + 1, attrs) for i in range(count)],
        {},
    )


def _read(path: Path, *, recover: bool, version: str = "") -> tuple[Workload, Diagnostics]:
    assert FORMAT.read is not None
    diagnostics = Diagnostics()
    value = FORMAT.read(path, ReadOptions(recover=recover, version=version), diagnostics)
    assert isinstance(value, Workload)
    return value, diagnostics


@pytest.mark.parametrize("version", _VERSIONS)
def test_whole_frames_before_a_cut_are_kept(tmp_path: Path, version: str) -> None:
    data = _trace(version)
    path = tmp_path / "a.et"
    path.write_bytes(data)
    starts = read_columns(path, Diagnostics()).position.tolist()
    ends = [*starts[1:], len(data)]
    for size in random.Random(3).sample(range(ends[2], len(data)), 25):
        if size in ends:
            continue
        path.write_bytes(data[:size])
        with pytest.raises(FormatError, match="ET001") as caught:
            _read(path, recover=False)
        assert "`recover`" in (caught.value.hint or "")
        whole = sum(end <= size for end in ends)
        found, diagnostics = _read(path, recover=True)
        assert len(found.classes[0]) == whole
        told = next(entry for entry in diagnostics if entry.code == "ET001")
        assert told.severity is Severity.WARNING
        assert f"the {whole} nodes before it are kept" in told.message
        assert told.location == f"byte {ends[whole - 1]}"


@pytest.mark.parametrize("version", _VERSIONS)
@pytest.mark.parametrize("cut", [1, 8, 9, 60, 3000])
def test_a_cut_gzip_stream(tmp_path: Path, version: str, cut: int) -> None:
    packed = gzip.compress(_trace(version, 3000), mtime=0)
    path = tmp_path / "a.et.gz"
    path.write_bytes(packed[:-cut])
    with pytest.raises(FormatError, match=r"ET001.*gzip"):
        _read(path, recover=False)
    found, diagnostics = _read(path, recover=True)
    kept = len(found.classes[0])
    assert (kept == 3000) if cut <= 9 else (1000 < kept < 3000)
    told = next(entry for entry in diagnostics if entry.code == "ET001")
    assert f"the {kept} nodes" in told.message
    assert "byte" in told.location


def test_every_byte_before_the_damage_is_used(tmp_path: Path) -> None:
    """Also what lies behind the last whole block that a stream hands out."""
    data = _trace("0.0.4", 40_000)
    path = tmp_path / "a.et"
    path.write_bytes(gzip.compress(data, compresslevel=1)[:-8])
    found, _ = _read(path, recover=True)
    assert len(found.classes[0]) == 40_000


@pytest.mark.parametrize("version", _VERSIONS)
def test_dependencies_on_lost_nodes_are_left_out(tmp_path: Path, version: str) -> None:
    attrs = {"num_ops": 1}
    nodes = [Logical(0, "a", "COMP", (2,), 0, attrs), Logical(1, "b", "COMP", (0,), 0, attrs)]
    data = encode(version, [*nodes, Logical(2, "c", "COMP", (), 0, attrs)])
    path = tmp_path / "a.et"
    path.write_bytes(data[:-1])
    found, diagnostics = _read(path, recover=True)
    assert found.classes[0].data_deps.values.tolist() == [0]
    assert diagnostics.counts()["ET006"] == 1
    path.write_bytes(encode(version, nodes))
    with pytest.raises(FormatError, match="ET006") as caught:
        _read(path, recover=False)
    assert "`recover`" in (caught.value.hint or "")
    found, diagnostics = _read(path, recover=True)
    assert found.classes[0].data_deps.values.tolist() == [0]
    told = next(entry for entry in diagnostics if entry.code == "ET006")
    assert (told.severity, diagnostics.counts()["ET006"]) == (Severity.WARNING, 1)
    assert "names node 2, which does not exist: dependencies on unknown nodes are ignored" in told.message


def _pytorch_step(reference: Any) -> list[Any]:
    """No node 0 though others wait for it, CPU nodes, and process groups in a METADATA node."""
    listed: list[dict[str, str | list[int]]] = [
        {"pg_name": "0", "pg_desc": "default_pg", "ranks": []},
        {"pg_name": "7", "pg_desc": "pairs", "ranks": [0, 1]},
        {"pg_name": "tensor parallel", "pg_desc": "", "ranks": [1, 0]},
        {"pg_name": "everybody", "pg_desc": "", "ranks": []},
    ]
    init = {"values": f"['{json.dumps(listed)}']"}
    nodes: list[Any] = [
        reference.node(id=1, name="## process_group:init ##", type=1, inputs=init),
        reference.node(id=2, name="aten::mm", type=4, ctrl_deps=[0, 1], duration_micros=5),
    ]
    nodes[1].attr.add(name="is_cpu_op").bool_val = True
    for number, name in enumerate(("0", "7", "tensor parallel", "everybody", "stranger"), 3):
        node = reference.node(id=number, name="nccl", type=7, data_deps=[number - 1])
        node.attr.add(name="comm_type").int64_val = 0
        node.attr.add(name="comm_size").int64_val = 64
        node.attr.add(name="pg_name").string_val = name
        nodes.append(node)
    return nodes


def test_a_pytorch_trace_as_its_converter_leaves_it_is_read(reference: Any, tmp_path: Path) -> None:
    nodes = _pytorch_step(reference)
    for rank in range(4):
        (tmp_path / f"w.{rank}.et").write_bytes(reference.file(*nodes[: 2 if rank > 1 else None]))
    with pytest.raises(FormatError, match="ET018"):
        _read(tmp_path, recover=False)
    found, diagnostics = _read(tmp_path, recover=True)
    told = [entry.message for entry in diagnostics if entry.code in {"ET006", "ET018"}]
    assert any("treated as a group of all ranks" in message for message in told)
    assert any("dependencies on unknown nodes are ignored" in message for message in told)
    graph = found.classes[0]
    rows: list[int] = graph.collectives.group_set.tolist()
    members: list[list[int]] = [[] if row < 0 else graph.group_sets[row].members(0).tolist() for row in rows]
    assert members == [[], [0, 1], [1, 0], [], []]
    assert FORMAT.write is not None
    FORMAT.write(found, tmp_path / "out", WriteOptions(directory=True, name="w"), Diagnostics())
    assert json.loads((tmp_path / "out" / "comm_group.json").read_text()) == {"7": [0, 1], "8": [1, 0]}
    again, _ = _read(tmp_path / "out", recover=True)
    assert [each for each in workloads_equal(again, found) if each.column != "name"] == []


def test_recovery_is_for_cuts_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.et"
    path.write_bytes(_trace("0.0.4") + b"\x03\x12\x05ab")
    with pytest.raises(FormatError, match="ET001"):
        _read(path, recover=True)
    path.write_bytes(_trace("0.0.4") + b"\xff" * 9 + b"\x01")
    with pytest.raises(FormatError, match="ET001"):
        _read(path, recover=True)
    path.write_bytes(_trace("0.0.4")[:3])
    with pytest.raises(FormatError, match=r"ET00[12]"):
        _read(path, recover=True)


def test_the_command_recovers_on_request(tmp_path: Path) -> None:
    source, target = tmp_path / "a.et", tmp_path / "b.et"
    source.write_bytes(_trace("0.0.3-2023-08-07")[:-5])
    refused = CliRunner().invoke(convert.app, [str(source), str(target)])
    assert refused.exit_code == 3
    assert not target.exists()
    done = CliRunner().invoke(convert.app, [str(source), str(target), "--recover"])
    assert done.exit_code == 0, done.output
    assert "29 nodes before it are kept" in done.output
    assert len(read_columns(target, Diagnostics())) == 29
