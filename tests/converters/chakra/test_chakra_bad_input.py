"""Bad input that other tools accept (exit status 0, nodes lost): results of the command."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hespas.cli import convert
from hespas.cli.validate import app as validate
from hespas.converters.chakra.wire import EtColumns
from hespas.converters.chakra.wire.codec import read_columns
from hespas.graph import Diagnostics
from tests.converters.chakra.historic_protos import classes, encode, framed, graph_nodes, rich_nodes


@dataclass(frozen=True, slots=True)
class _Outcome:
    code: int
    said: str
    target: Path

    def columns(self) -> EtColumns:
        return read_columns(self.target, Diagnostics())


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., _Outcome]:
    def command(data: bytes, *options: str, name: str = "a.et") -> _Outcome:
        source, target = tmp_path / name, tmp_path / "out.et"
        source.write_bytes(data)
        done = CliRunner().invoke(convert.app, [str(source), str(target), *options])
        assert "Traceback" not in done.output
        assert done.exit_code in (0, 3, 4)
        assert target.exists() == (done.exit_code == 0)
        assert {path.name for path in tmp_path.iterdir()} <= {name, "out.et"}
        return _Outcome(done.exit_code, done.output, target)

    return command


def _node(number: int, **fields: Any) -> Any:
    attr = [{"name": "is_cpu_op", "bool_val": False}, *fields.pop("attr", [])]
    return classes("0.0.4")["Node"](
        id=number, name=f"n{number}", type=fields.pop("type", 4), attr=attr, **fields
    )


def _file(*nodes: Any) -> bytes:
    head = classes("0.0.4")["GlobalMetadata"](version="0.0.4")
    return framed(head.SerializeToString(), *(node.SerializeToString() for node in nodes))


def _chain(count: int = 10) -> bytes:
    return _file(*(_node(i, data_deps=[i - 1] if i > 1 else []) for i in range(1, count + 1)))


def test_truncated_in_the_last_frame(run: Callable[..., _Outcome]) -> None:
    start = len(_chain(9))
    done = run(_chain()[:-1])
    assert done.code == 3
    assert f"byte {start}: ET001" in done.said


def test_truncated_at_half(run: Callable[..., _Outcome]) -> None:
    data = _chain()
    done = run(data[: len(data) // 2 + 1])
    assert done.code == 3
    assert "ET001" in done.said


def test_truncated_gzip(run: Callable[..., _Outcome]) -> None:
    done = run(gzip.compress(_chain(2000))[:-40], name="a.et.gz")
    assert done.code == 3
    assert "ET001" in done.said
    assert "gzip" in done.said


@pytest.mark.parametrize("seed", range(8))
def test_random_bytes(run: Callable[..., _Outcome], seed: int) -> None:
    done = run(random.Random(seed).randbytes(4000))
    assert done.code in (3, 4)
    assert "ET001" in done.said or "ET003" in done.said


def test_empty(run: Callable[..., _Outcome]) -> None:
    done = run(b"")
    assert done.code == 3
    assert "empty" in done.said
    named = run(b"", "--from", "chakra")
    assert named.code == 3
    assert "ET002" in named.said


def test_no_metadata(run: Callable[..., _Outcome]) -> None:
    data = framed(*(_node(i, data_deps=[1] if i > 1 else []).SerializeToString() for i in (1, 2)))
    done = run(data)
    assert done.code == 3
    assert "ET003" in done.said
    assert "GlobalMetadata" in done.said
    assert run(data, "--from-version", "0.0.4").code == 0


def test_schema_003(run: Callable[..., _Outcome]) -> None:
    done = run(encode("0.0.3-2023-08-07", rich_nodes()))
    assert done.code == 0
    assert "0.0.3" in done.said
    columns = done.columns()
    assert columns.version == "0.0.4"
    assert columns.data_deps.tolist() == [1, 1, 2]
    assert {"rf_id", "op_schema", "strides", "labels"} <= set(columns.attrs.keys)


def test_schema_001(run: Callable[..., _Outcome]) -> None:
    done = run(encode("0.0.1", graph_nodes()), "--to-version", "1.0.0")
    assert done.code == 0
    assert "0.0.1" in done.said
    columns = done.columns()
    assert columns.version == "1.0.0"
    assert columns.id.tolist() == [node.id for node in graph_nodes()]
    assert columns.type.tolist() == [2, 4, 7, 7, 7, 7, 5, 6, 3, 0]


def test_a_version_that_contradicts_the_structure(run: Callable[..., _Outcome]) -> None:
    done = run(encode("0.0.1", graph_nodes()), "--from-version", "0.0.3")
    assert done.code == 4
    assert "ET003" in done.said
    assert "0.0.1" in done.said


def test_a_cycle(run: Callable[..., _Outcome]) -> None:
    done = run(_file(_node(1), _node(2, data_deps=[4]), _node(3, ctrl_deps=[2]), _node(4, data_deps=[3])))
    assert done.code == 3
    assert "ET007" in done.said
    assert all(f" {number}" in done.said for number in (2, 3, 4))


def test_a_dependency_on_nothing(run: Callable[..., _Outcome]) -> None:
    done = run(_file(_node(1), _node(2, data_deps=[99])))
    assert done.code == 3
    assert "ET006" in done.said
    assert "99" in done.said
    assert "node 2 at byte" in done.said


def test_an_id_twice(run: Callable[..., _Outcome]) -> None:
    done = run(_file(_node(1), _node(2), _node(1)))
    assert done.code == 3
    assert "ET005" in done.said


def test_an_empty_node_inside(run: Callable[..., _Outcome]) -> None:
    data = _file(_node(1)) + b"\x00" + framed(_node(2, data_deps=[1]).SerializeToString())
    done = run(data)
    assert done.code == 0
    assert "ET004" in done.said
    assert done.columns().id.tolist() == [1, 0, 2]


def test_an_unsigned_size(run: Callable[..., _Outcome]) -> None:
    attr = [{"name": "comm_type", "int64_val": 0}, {"name": "comm_size", "uint64_val": 1 << 33}]
    done = run(_file(_node(1, type=7, attr=attr)))
    assert done.code == 0
    assert "ET010" in done.said
    columns = done.columns()
    size = columns.attrs.key == columns.attrs.keys.index("comm_size")
    assert columns.attrs.bits[size].tolist() == [1 << 33]


def test_a_checker_lists_what_is_wrong_with_an_old_trace(tmp_path: Path) -> None:
    path = tmp_path / "a.0.et"
    path.write_bytes(encode("0.0.3-2023-08-07", rich_nodes())[:-4])
    done = CliRunner().invoke(validate, ["check", str(path), "--json", str(tmp_path / "out.json")])
    assert done.exit_code == 1
    found = json.loads((tmp_path / "out.json").read_text())["violations"]
    assert {"ET001", "ET003"} <= {entry["code"] for entry in found}
