"""Small inputs with large demands: each command ends within a gigabyte, 20 times the input and ten seconds.

Every bomb runs through the real command in a child whose address space and processor time are limited, so a
reader that takes too much fails here however fast the machine is.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import sqlite3
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import numpy as np
import pytest
from typer.testing import CliRunner

import hespas
from hespas.cli import convert, main, validate
from hespas.files.limits import Limits
from hespas.files.wire import field_bytes
from hespas.graph import Workload
from tests.limits import SAFETY_S
from tests.malformed_command import FIXTURES
from tests.malformed_inputs import et_file, et_node, json_graph, varint
from tests.processes import run_command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")

_SPARE_BYTES, _BYTES_PER_BYTE = 1 << 30, 20
_CPU_S = 10
_PEAK = """
import re, sys
from importlib import import_module
from pathlib import Path
try:
    import_module("hespas.cli." + sys.argv.pop(1)).app()
except SystemExit as left:
    assert not left.code, left.code
print(re.search("VmPeak:\\\\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1])
"""
_TOO_MUCH = "needs more memory than is available"
"""What is said where memory ran out. Inputs are to be refused before it does."""
_LARGEST = 2**31 - 1
_LAST = 2**24 - 1
"""The highest rank that is read."""
_PROGRAM = str(FIXTURES / "stablehlo/mlp.mlir")
_DEVICE = "H100-SXM"


@dataclass(frozen=True, slots=True)
class _Bomb:
    """A file, a command on it (``{src}``, ``{out}``, ``{dir}``), its exit code and a part of what it says."""

    name: str
    make: Callable[[], bytes]
    arguments: tuple[str, ...]
    code: int
    says: str
    module: str = "convert"


def _run(folder: Path, bomb: _Bomb) -> subprocess.CompletedProcess[str]:
    source = folder / bomb.name
    source.write_bytes(bomb.make())
    (folder / "out").mkdir()
    places = {"src": str(source), "out": str(folder / "out"), "dir": str(folder)}
    arguments = [part.format(**places) for part in bomb.arguments]
    return _limited(source.stat().st_size, bomb.module, arguments)


def _limited(size: int, module: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    limits = {resource.RLIMIT_AS: _SPARE_BYTES + _BYTES_PER_BYTE * size, resource.RLIMIT_CPU: _CPU_S}
    command = {"main": "hespas", "convert": "hespas-convert", "validate": "hespas-validate"}[module]
    return run_command(command, *arguments, limits=limits)


def _squeezed(head: bytes, unit: bytes, mebibytes: int = 4096) -> bytes:
    """Gzip of ``unit`` again and again behind ``head``."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    start = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(unit * ((16 << 20) // len(unit))) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + start + block * (mebibytes // 16) + b"\x03\0" + bytes(8)


def _zeros() -> bytes:
    return _squeezed(b"", b"\0")


_HEADS: dict[str, tuple[bytes, bytes]] = {
    "stablehlo": (b"module {", b" "),
    "hlo": (b"HloModule m\n", b"\n"),
    "op-graph": (b'{"schema": "hespas.op-graph/1", "nodes": [', b" "),
    "op-graph-arrow": (b"ARROW1\0\0", b"\0"),
    "chakra": (et_file(et_node(1)) + b"\x80\x80\x80\x80\x04", b"\0"),
    "chakra-json": (b'{"schema": "0.0.4", "nodes": [', b" "),
    "astra-text": (b"DATA\n1\n", b"\n"),
    "kineto": (b'{"schemaVersion": 1, "traceEvents": [', b" "),
    "pytorch-et": (b'{"schema": "1.1.1-chakra.0.0.4", "nodes": [', b" "),
    "jax-trace": (b'{"displayTimeUnit": "ns", "traceEvents": [', b" "),
    "chrome-trace": (b'{"traceEvents": [', b" "),
    "rocprofv3": (b'{"rocprofiler-sdk-tool": [', b" "),
    "ops-table": (b"hardware,op,duration_ns\n", b"\n"),
    "xplane": (b"\x0a\x02\x08\x01", b"\x0a\0"),
    "perfetto": (b"\x0a\x02\x08\x01", b"\x0a\0"),
    "nsys": (b"SQLite format 3\0", b"\0"),
    "rocpd": (b"SQLite format 3\0", b"\0"),
}
"""How a file of each format begins, and what can follow without end."""


@pytest.mark.parametrize(
    ("form", "content"),
    [(form, content) for form in _HEADS for content in ("zeros", "format")],
)
def test_a_gzip_bomb_is_refused_early(tmp_path: Path, form: str, content: str) -> None:
    make = _zeros if content == "zeros" else lambda: _squeezed(*_HEADS[form])
    arguments = ("{src}", "{out}/o.json", "--from", form)
    done = _run(tmp_path, _Bomb("bomb.gz", make, arguments, 3, ""))
    assert done.returncode == 3, done.stderr
    assert f"error: {tmp_path / 'bomb.gz'}: " in done.stderr
    assert _TOO_MUCH not in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("module", "words"),
    [(main, ("view", "{src}")), (convert, ("{src}", "{out}")), (validate, ("check", "{src}"))],
    ids=("view", "convert", "check"),
)
def test_memory_that_ends_in_a_reader_is_told_of_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, words: tuple[str, ...]
) -> None:
    def too_much(*_: object) -> NoReturn:
        raise MemoryError

    monkeypatch.setattr("hespas.converters.op_graph.json_reader.read_json", too_much)
    source, out = tmp_path / "g.json", tmp_path / "o.arrow"
    source.write_bytes(json_graph({"id": 0, "op": "x", "deps": []}))
    done = CliRunner().invoke(module.app, [word.format(src=source, out=out) for word in words])
    assert done.exit_code == 3, done.output
    assert f"{source}: takes more than " in done.output
    assert " bytes of memory to read, the limit of an input of its size\n  try: " in done.output
    assert list(tmp_path.iterdir()) == [source]


def _number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def _attribute(name: str, field: int, value: int) -> bytes:
    inner = varint(1 << 3 | 2) + varint(len(name)) + name.encode() + _number(field, value)
    return varint(10 << 3 | 2) + varint(len(inner)) + inner


def _message(kind: int, **attributes: int) -> bytes:
    fields = {"comm_src": 7, "comm_dst": 7}
    rest = b"".join(_attribute(name, fields.get(name, 9), value) for name, value in attributes.items())
    return et_file(et_node(1, kind=kind, rest=rest))


def _node(**fields: object) -> dict[str, object]:
    return {"id": 0, "op": "x", "deps": [], **fields}


def _nodes(count: int, node: dict[str, object]) -> bytes:
    text = json.dumps(node, separators=(",", ":"))
    return f'{{"schema":"hespas.op-graph/1","nodes":[{",".join([text] * count)}]}}'.encode()


def _shifted() -> bytes:
    shift = {"ranks": 16_000_000, "digit": [16_000_000, 1], "shift": 1}
    return json_graph(
        _node(kind="permute", p2p={"permutation": 0}), num_ranks=16_000_000, permutations=[shift]
    )


def _split() -> bytes:
    groups = {"kind": "all_reduce", "groups": "[250000,64]<=[64,250000]T(1,0)"}
    return json_graph(_node(collective=groups), num_ranks=16_000_000)


def _nested_loops() -> bytes:
    loops = [{"kind": "loop_body", "trips": 1000, "parent": number - 1} for number in range(19)]
    return json_graph(_node(region=18), regions=loops)


def _space(*planes: bytes) -> bytes:
    return b"".join(field_bytes(1, plane) for plane in planes)


def _plane(*lines: bytes) -> bytes:
    kind = field_bytes(4, field_bytes(1, 1) + field_bytes(2, field_bytes(1, 1) + field_bytes(2, b"a")))
    return field_bytes(2, b"/device:TPU:0") + kind + b"".join(field_bytes(3, line) for line in lines)


def _line(events: bytes) -> bytes:
    return field_bytes(1, 1) + field_bytes(2, b"XLA Ops") + events


_EVENT = field_bytes(4, field_bytes(1, 1) + field_bytes(2, 0) + field_bytes(3, 10))


def _inflating(unit: bytes, count: int) -> bytes:
    """A Perfetto trace of one packet, in which are many."""
    return field_bytes(1, field_bytes(50, zlib.compress(unit * count, 9)))


def _stage() -> bytes:
    stage = field_bytes(1, 1) + field_bytes(2, 5) + field_bytes(3, 1)
    return field_bytes(1, field_bytes(8, 5) + field_bytes(10, 1) + field_bytes(53, stage))


def _database(*statements: str) -> bytes:
    with sqlite3.connect(":memory:") as connection:
        for statement in ("CREATE TABLE StringIds(id INTEGER PRIMARY KEY, value TEXT)", *statements):
            connection.execute(statement)
        connection.commit()
        found = connection.serialize()
    connection.close()
    return found


_ENDLESS = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT"
_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"


def _communication() -> bytes:
    facts = {"Collective name": "allreduce", "In msg nelems": 1, "Group size": -(1 << 63), "dtype": "Float"}
    kernel = {
        "ph": "X",
        "cat": "kernel",
        "name": "ncclDevKernel_AllReduce",
        "pid": 0,
        "tid": 7,
        "ts": 1,
        "dur": 1,
    }
    event = kernel | {"args": {"stream": 7, "device": 0, "correlation": 1, **facts}}
    return json.dumps({"schemaVersion": 1, "deviceProperties": [{"id": 0}], "traceEvents": [event]}).encode()


def _many_columns() -> bytes:
    names = ",".join(f"c{number}" for number in range(50_000))
    return f"hardware,kind,dtype,duration_ns,{names}\nx,matmul,bf16,1{',1' * 50_000}\n".encode()


def _doubled(levels: int, *rest: str, first: str = "f32[4] parameter(0)") -> bytes:
    lines = [f"t{level + 1} = tuple(t{level}, t{level})" for level in range(levels)]
    return "\n".join(["HloModule m", "ENTRY e {", f"t0 = {first}", *lines, *rest, "}"]).encode()


def _stated() -> bytes:
    return _doubled(0, f"t1 = ({'u8[],' * 140_000}) tuple()")


def _header() -> bytes:
    layout = f"{{(f32[4])->({'u8[],' * 140_000})}}".encode()
    return _doubled(0).replace(b" m\n", b" m, entry_computation_layout=" + layout + b"\n", 1)


def _nested_tuples() -> bytes:
    return _doubled(0, *[f"t{place + 1} = tuple(t{place})" for place in range(65)])


def _handed_on(line: str, levels: int = 15, count: int = 20_000) -> bytes:
    return _doubled(levels, *[f"u{number} = {line}" for number in range(count)])


_TO_JSON = ("{src}", "{out}/o.json")
_TO_MLIR = ("{src}", "{out}/o.mlir")
_LOOP = [{"kind": "loop_body", "trips": 1e12}]
_REPLAY = "a StableHLO replay of it has"
_FOLDER = ("{src}", "{out}/ranks/", "--to", "chakra")
_HARDWARE = ("estimate", _PROGRAM, "--hardware", "{src}")
_CHECK = ("check", "{dir}/x.et")

_VIEW = ("view", "{src}")
_TABLE = ("accuracy", "--hardware", _DEVICE, "--table", "{src}")

_BOMBS: dict[str, _Bomb] = {
    **{
        f"{name}: {what}": _Bomb(name, make, _VIEW, 3, says, module="main")
        for name, what, make, says in (
            ("x.xplane.pb", "planes", lambda: _space(_plane(_line(_EVENT))) * 30_000, "30,000 planes"),
            ("x.xplane.pb", "lines", lambda: _space(_plane(*[_line(_EVENT)] * 50_000)), "50,000 lines"),
            (
                "x.xplane.pb",
                "a length",
                lambda: _space(_plane(_line(_EVENT))) + b"\x0a" + varint(1 << 62),
                "byte",
            ),
            ("x.pftrace", "packets", lambda: _inflating(b"\x0a\0", 4_000_000), "too many compressed packets"),
            ("x.pftrace", "stages", lambda: _inflating(_stage(), 300_000), "too many compressed packets"),
            ("x.pftrace", "zeros", lambda: _inflating(b"\0", 1 << 28), "take more than"),
            (
                "x.sqlite",
                "a view without end",
                lambda: _database(
                    f"CREATE VIEW {_KERNELS}(start, end, deviceId) AS {_ENDLESS} x, x, 0 FROM r"
                ),
                "nsys.not-stored",
            ),
            ("x.json", "lists", lambda: b'{"rocprofiler-sdk-tool": ' + b"[" * 1_000_000, "recursion"),
        )
    },
    "names of columns that are empty": _Bomb(
        "t.csv", lambda: b"hardware,op,duration_ns" + b"," * 500_000, _TABLE, 3, "columns", module="validate"
    ),
    "columns of a profile": _Bomb(
        "t.csv",
        lambda: b"hardware,op,duration_ns" + b"".join(b",c%d" % number for number in range(100_000)),
        _VIEW,
        3,
        "100,003 columns or more; at most 4,096",
        module="main",
    ),
    "a cell of megabytes": _Bomb(
        "t.csv",
        lambda: (
            b"hardware,kind,dtype,m,n,k,duration_ns\nH100-SXM,matmul," + b"x" * 30_000_000 + b",1,1,1,1\n"
        ),
        _TABLE,
        3,
        "column 'dtype' contains a text of more than 1,048,576",
        module="validate",
    ),
    "a cell of megabytes of a profile": _Bomb(
        "t.csv",
        lambda: b"hardware,op,duration_ns\nx," + b"a" * 20_000_000 + b",1\n",
        _VIEW,
        3,
        "line 2",
        module="main",
    ),
    "columns by the thousand": _Bomb("t.csv", _many_columns, _TABLE, 3, "50,004 columns", module="validate"),
    "replay of a peer of millions": _Bomb(
        "x.et", lambda: _message(6, comm_src=_LAST, comm_size=8), _TO_MLIR, 4, "too many to list"
    ),
    "transcendentals": _Bomb(
        "g.json", lambda: json_graph(_node(transcendentals=1e12)), _TO_MLIR, 4, f"{_REPLAY} more than 200,000"
    ),
    "transcendentals of a trace": _Bomb(
        "x.et", lambda: _message(4, num_ops=2**60, transcendentals=10**12), _TO_MLIR, 4, _REPLAY
    ),
    "many transcendentals": _Bomb(
        "g.json", lambda: _nodes(3000, _node(transcendentals=6e6) | {"id": None}), _TO_MLIR, 4, _REPLAY
    ),
    "a replay of 300,000 operations": _Bomb(
        "g.json", lambda: _nodes(300_000, {"op": "", "deps": []}), _TO_MLIR, 4, f"{_REPLAY} 300,000"
    ),
    "a replay of a million operands": _Bomb(
        "g.json",
        lambda: _nodes(10, {"op": "add", "deps": [], "operands": ["f32[1]"] * 100_000}),
        _TO_MLIR,
        4,
        f"{_REPLAY} 1,000,000 operands",
    ),
    "a replay of endless trips": _Bomb(
        "g.json", lambda: json_graph(_node(region=0), regions=_LOOP), _TO_MLIR, 4, "unroll"
    ),
    "endless trips as a trace": _Bomb(
        "g.json", lambda: json_graph(_node(region=0), regions=_LOOP), _FOLDER, 4, "unroll"
    ),
    "trips of trips as a trace": _Bomb("g.json", _nested_loops, _FOLDER, 4, "unroll"),
    "ranks": _Bomb(
        "g.json",
        lambda: json_graph(_node(), num_ranks=_LARGEST),
        ("{src}", "{out}/o.arrow"),
        3,
        "ranks; the supported range is 1 to",
    ),
    "a permutation of millions as rank files": _Bomb("g.json", _shifted, _FOLDER, 4, "ranks"),
    "groups of millions as rank files": _Bomb("g.json", _split, _FOLDER, 4, "ranks"),
    "groups of millions as a program": _Bomb("g.json", _split, _TO_MLIR, 4, "too many to list"),
    "attributes by the million": _Bomb(
        "x.et",
        lambda: et_file(et_node(1, rest=b"\x52\x00" * 12_000_000)),
        ("{src}", "{out}/o.json"),
        3,
        "a message of more than 1,048,576 fields",
    ),
    "text workload of many ranks": _Bomb(
        "a.txt",
        lambda: (
            b"HYBRID_TRANSFORMER model_parallel_NPU_group: 2147483647\n1\n"
            b"x -1 1 NONE 0 1 NONE 0 1 ALLREDUCE 1 1\n"
        ),
        ("{src}", "{out}/o.json", "--from", "astra-text"),
        4,
        "limit 16,777,216",
    ),
    "text workload that is long": _Bomb(
        "a.txt",
        lambda: b"DATA\n1\n" + b"\n" * (9 << 20),
        ("{src}", "{out}/o.json", "--from", "astra-text"),
        3,
        "more than the limit of 8,388,608",
    ),
    "an event of megabytes": _Bomb(
        "k.json",
        lambda: b'{"schemaVersion":1,"traceEvents":[{"name":"' + b"\\" * 30_000_000,
        ("{src}", "{out}/o.json", "--from", "kineto"),
        3,
        "byte 30000043",
    ),
    "events of nothing": _Bomb(
        "k.json",
        lambda: b'{"schemaVersion":1,"traceEvents":[' + b"{}," * 2_000_000 + b"{}]}",
        ("{src}", "{out}/o.json", "--from", "kineto"),
        3,
        "neither device events",
    ),
    "lists in lists of an execution trace": _Bomb(
        "p.json",
        lambda: b'{"schema":"1.1.1-chakra.0.0.4","nodes":' + b"[" * 1_000_000,
        ("{src}", "{out}/o.json", "--from", "pytorch-et"),
        3,
        "recursion",
    ),
    "lists in lists of a JSON trace": _Bomb(
        "c.json",
        lambda: b'{"nodes":[{"id":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
        ("{src}", "{out}/o.json", "--from", "chakra-json"),
        3,
        "nested too deep",
    ),
    **{
        f"hlo: {name}": _Bomb("m.hlo", make, _TO_JSON, 4, says)
        for name, make, says in (
            ("tuples of tuples", lambda: _doubled(24), "a tuple of 262,143 values (limit 131,072)"),
            ("tuples of tuples of tuples", lambda: _doubled(64), "line 20, column 7: a tuple of"),
            ("tuples of nothing", lambda: _doubled(24, first="tuple()"), "a tuple of 262,143 values"),
            ("a stated tuple", _stated, "a tuple of 140,001"),
            ("a header of a large tuple", _header, "entry_computation_layout: a tuple of 140,001"),
            ("a tuple in tuples", _nested_tuples, "more than 64"),
            ("a tuple handed on", lambda: _handed_on("opt-barrier(t15)"), "values in total"),
            ("a tuple in many tuples", lambda: _handed_on("tuple(t15, t0)"), "values in total"),
            ("a tuple copied", lambda: _handed_on("copy-start(t15)"), "values in total"),
            ("a tuple fed out", lambda: _handed_on("token[] outfeed(t15, t0)"), "values in total"),
            ("a tuple copied and doubled", lambda: _handed_on("copy-start(t16)", 16), "a tuple of 262,14"),
        )
    },
    "groups in groups": _Bomb(
        "comm_group.json", lambda: b'{"1":' + b"[" * 1_000_000, ("{dir}/x.et", "{out}/o.json"), 3, "ET019"
    ),
    "a group of zeros": _Bomb(
        "comm_group.json",
        lambda: b'{"1":[' + b"0," * 5_000_000 + b"0]}",
        ("{dir}/x.et", "{out}/o.json"),
        3,
        "ET019",
    ),
    **{
        f"hardware: {name}": _Bomb("h.toml", make, _HARDWARE, 3, says, module="main")
        for name, make, says in (
            ("a word", lambda: b"a" * 1_000_000, "not TOML"),
            ("quotes that stay open", lambda: b'"\\' * 500_000, "not TOML"),
            ("a key of keys", lambda: b"a." * 500_000, "nested too deeply"),
            ("a key of quoted keys", lambda: b'"a b".' * 160_000 + b"c=1", "nested too deeply"),
            ("tables in tables", lambda: b"[" + b"a." * 100_000 + b"b]", "nested too deeply"),
            ("lists in lists", lambda: b"a=" + b"[" * 1_000_000, "nested too deeply"),
            ("inline tables", lambda: b"a=" + b"{a=" * 300_000, "nested too deeply"),
            ("a number", lambda: b"a=" + b"1" * 1_000_000, "not TOML"),
            ("a large file", lambda: b"#" * (50 << 20), "more than the limit of 1,048,576"),
            ("rows of fits", lambda: b"[[fits]]\n" * 100_000, "missing key"),
        )
    },
    **{
        f"{what}: {name}": _Bomb(
            "c.cfg", make, (*_CHECK, f"--{what}-config", "{src}"), 3, says, module="validate"
        )
        for what in ("system", "memory")
        for name, make, says in (
            ("lists in lists", lambda: b"[" * 1_000_000, "nested too deeply"),
            ("objects in objects", lambda: b'{"a":' * 200_000, "nested too deeply"),
            ("a large file", lambda: b" " * (100 << 20), "more than the limit of 16,777,216"),
        )
    },
    **{
        f"network: {name}": _Bomb(
            "c.yml", make, (*_CHECK, "--network-config", "{src}"), 3, says, module="validate"
        )
        for name, make, says in (
            ("an alias", lambda: b"topology: &a [Ring]\nnpus_count: *a\n", "line 1"),
            ("lists in lists", lambda: b"topology: " + b"[" * 1_000_000, "line 1"),
            ("a word", lambda: b"a" * 1_000_000 + b" " * 1_000_000 + b":", "is missing"),
            ("a long list", lambda: b"topology: [" + b"Ring," * 2_000_000 + b"Ring]\n", "is missing"),
            ("a large file", lambda: b"#" * (100 << 20), "more than the limit of 16,777,216"),
        )
    },
    **{
        f"compare: {name}": _Bomb("r.json", make, ("compare", "{src}", "{src}"), 3, says, module="validate")
        for name, make, says in (
            ("a large file", lambda: b" " * (100 << 20), "more than the limit of 67,108,864"),
            ("lists in lists", lambda: b"[" * 1_000_000, "expected an accuracy report"),
        )
    },
}


_DENSE: dict[str, tuple[str, bytes, bytes, bytes]] = {
    "op-graph": (
        "g.json.gz",
        b'{"schema":"hespas.op-graph/1","nodes":[',
        b'{"op":"","deps":[]},',
        b'{"op":"","deps":[]}]}',
    ),
    "stablehlo": (
        "m.mlir.gz",
        b"module {\nfunc.func @main(%a: tensor<f32>) {\n",
        b'"stablehlo.add"(%a, %a) : (tensor<f32>, tensor<f32>) -> tensor<f32>\n',
        b"return }}",
    ),
    "chrome-trace": (
        "c.json.gz",
        b'{"traceEvents":[',
        b'{"ph":"X","name":"k","pid":0,"tid":7,"ts":1,"dur":1},',
        b"{}]}",
    ),
    "perfetto": ("p.pftrace.gz", b"", b"\x0a\x02\x08\x01", b""),
    "kineto": ("k.json.gz", b'{"schemaVersion":1,"traceEvents":[', b"{},", b"{}]}"),
}
"""Of each format a name, and what begins, fills and ends a file of as many parts as there is room for."""


@pytest.mark.parametrize("form", list(_DENSE))
def test_gzip_just_below_the_limit_takes_no_more_time_than_there_is(tmp_path: Path, form: str) -> None:
    name, head, unit, tail = _DENSE[form]
    path = tmp_path / name
    room = Limits().packed_free_bytes - len(head) - len(tail)
    path.write_bytes(gzip.compress(head + unit * (room // len(unit)) + tail, 9, mtime=0))
    assert path.stat().st_size < 100_000
    done = _limited(path.stat().st_size, "main", ["view", str(path)])
    assert done.returncode == (3 if form in {"perfetto", "kineto"} else 0), done.stderr
    assert "decompresses to more than" not in done.stderr
    assert _TOO_MUCH not in done.stderr


@pytest.mark.parametrize("name", list(_BOMBS))
def test_a_bomb_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.et").write_bytes(et_file(et_node(1)))
    bomb = _BOMBS[name]
    done = _run(tmp_path, bomb)
    assert (done.returncode, bomb.says in done.stderr) == (bomb.code, True), done.stderr[-600:]
    assert f"error: {tmp_path}" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("name", _BOMBS)
def test_a_bomb_of_a_stranger_takes_half_a_gigabyte_at_most(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.et").write_bytes(et_file(et_node(1)))
    bomb, source = _BOMBS[name], tmp_path / _BOMBS[name].name
    source.write_bytes(bomb.make())
    (tmp_path / "out").mkdir()
    places = {"src": str(source), "out": str(tmp_path / "out"), "dir": str(tmp_path)}
    arguments = [part.format(**places) for part in bomb.arguments]
    command = {"main": "hespas", "convert": "hespas-convert", "validate": "hespas-validate"}[bomb.module]
    limits = {resource.RLIMIT_DATA: 500 << 20, resource.RLIMIT_CPU: 5}
    done = run_command(command, *arguments, "--untrusted", limits=limits)
    assert done.returncode in {1, 2, 3, 4}, done.stderr[-600:]
    assert list((tmp_path / "out").iterdir()) == []


_WORLD = """HloModule m, num_partitions={ranks}, replica_count=1

add {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}}

ENTRY e {{
  p = f32[1024]{{0}} parameter(0)
  ROOT r = f32[1024]{{0}} all-reduce(p), replica_groups=[{groups},{size}]<=[{ranks}], channel_id=1,
    use_global_device_ids=true, to_apply=add
}}
"""


@pytest.mark.parametrize("groups", [1, 1 << 21])
@pytest.mark.parametrize(
    ("module", "command"),
    [("validate", ["check"]), ("main", ["simulate", "--hardware", "TPU-v4"]), ("main", ["view"])],
)
def test_a_job_of_millions_of_equal_ranks_takes_what_one_takes(
    tmp_path: Path, module: str, command: list[str], groups: int
) -> None:
    path = tmp_path / "m.hlo.txt"
    path.write_text(_WORLD.format(ranks=1 << 24, groups=groups, size=(1 << 24) // groups))
    name = {"main": "hespas", "validate": "hespas-validate"}[module]
    limits = {resource.RLIMIT_AS: 1 << 30, resource.RLIMIT_CPU: 5}
    done = run_command(name, *command, str(path), limits=limits)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-600:]
    assert "16,777,216 ranks" in done.stdout


@pytest.mark.parametrize(
    ("module", "command"), [("validate", ["check"]), ("main", ["simulate", "--hardware", "TPU-v4"])]
)
def test_millions_of_ranks_of_several_classes_are_refused(
    tmp_path: Path, module: str, command: list[str]
) -> None:
    """They are compared one by one, in memory and time that grow with them."""
    program, path, ranks = tmp_path / "m.hlo.txt", tmp_path / "m.json", 1 << 22
    program.write_text(_WORLD.format(ranks=ranks, groups=1, size=ranks))
    read = hespas.read(program)
    assert isinstance(read, Workload)
    (graph,) = read.classes
    rank_class = np.zeros(ranks, np.int32)
    rank_class[ranks // 2 :] = 1
    hespas.write(Workload(name="m", classes=(graph, replace(graph)), rank_class=rank_class), path)
    limits = {resource.RLIMIT_AS: 1 << 30, resource.RLIMIT_CPU: 5}
    name = {"main": "hespas", "validate": "hespas-validate"}[module]
    done = run_command(name, *command, str(path), limits=limits)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "4,194,304 ranks of several kinds are more than 2,097,152" in done.stdout + done.stderr
    assert "--max-input-bytes 268435456" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("get-tuple-element(t16), index=0", 1),
        *(
            (line, count)
            for line, count in (
                ("opt-barrier(t16)", 4),
                ("call(t16), to_apply=same", 4),
                ("fusion(t16), kind=kLoop, calls=same", 4),
                ("while(t16), condition=holds, body=same", 2),
                ("conditional(c, t16, t16), true_computation=same, false_computation=same", 2),
            )
        ),
    ],
)
def test_a_large_tuple_is_read(tmp_path: Path, line: str, count: int) -> None:
    shape = "f32[4]"
    for _ in range(16):
        shape = f"({shape},{shape})"
    heads = f"same {{\np = {shape} parameter(0)\n}}\nholds {{\np = {shape} parameter(0)\n"
    heads += "ROOT c = pred[] constant(true)\n}\nENTRY"
    lines = [f"u{number} = {line}" for number in range(count)]
    text = _doubled(16, "c = pred[] parameter(1)", *lines).replace(b"ENTRY", heads.encode())
    done = _run(tmp_path, _Bomb("m.hlo", lambda: text, ("{src}", "{out}/o.arrow"), 0, ""))
    assert done.returncode == 0, done.stderr[-600:]


_SPECIAL: dict[str, tuple[str, tuple[str, ...]]] = {
    "hardware": ("main", ("estimate", _PROGRAM, "--hardware", "{special}")),
    "table": ("main", ("estimate", "--hardware", _DEVICE, "--table", "{special}")),
    "system": ("validate", (*_CHECK, "--system-config", "{special}")),
    "network": ("validate", (*_CHECK, "--network-config", "{special}")),
    "memory": ("validate", (*_CHECK, "--memory-config", "{special}")),
    "groups": ("validate", (*_CHECK, "--comm-groups", "{special}")),
    "database": (
        "main",
        ("estimate", _PROGRAM, "--hardware", _DEVICE, "--estimator", "database:path={special}"),
    ),
    "compare": ("validate", ("compare", "{special}", "{special}")),
    "input": ("convert", ("{special}", "{dir}/o.json")),
}


@pytest.mark.parametrize(
    ("what", "kind"),
    [(what, kind) for what in _SPECIAL for kind in ("pipe.toml", "/dev/zero", "folder.toml")],
)
def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path, what: str, kind: str) -> None:
    (tmp_path / "x.et").write_bytes(et_file(et_node(1)))
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "folder.toml").mkdir()
    module, arguments = _SPECIAL[what]
    special = str(tmp_path / kind)
    done = _limited(0, module, [part.format(special=special, dir=tmp_path) for part in arguments])
    assert done.returncode == 3, done.stderr
    why = "not a regular file"
    if kind.startswith("folder"):
        why = "no known format fits this input" if what == "input" else "is a directory"
    assert re.search(f"error: {special}: (cannot be read: )?{why}", done.stderr)
    assert "\n  try: " in done.stderr


@pytest.mark.parametrize(
    ("rank", "peer"),
    [
        (1, _LAST),
        *((rank, _LAST) for rank in (0, 8_388_607, _LAST - 1)),
    ],
)
@pytest.mark.parametrize(("kind", "side"), [(6, "comm_src"), (5, "comm_dst")])
def test_a_peer_of_millions_takes_no_memory(
    tmp_path: Path, kind: int, side: str, rank: int, peer: int
) -> None:
    """Whether the pairs are a shift by one digit is found without counting through the ranks between."""
    path = tmp_path / f"x.{rank}.et"
    path.write_bytes(_message(kind, **{side: peer, "comm_size": 8}))
    done = _limited(0, "convert", [str(path), str(tmp_path / "o.json")])
    assert done.returncode == 0, done.stderr
    pair = [peer, rank] if kind == 6 else [rank, peer]
    assert json.loads((tmp_path / "o.json").read_text())["rank_classes"][0]["permutations"] == [
        {"ranks": peer + 1, "pairs": [pair]}
    ]


def test_a_name_of_control_characters_is_shown(tmp_path: Path) -> None:
    columns = "start, end, deviceId, contextId, streamId, correlationId, shortName, demangledName"
    path = tmp_path / "x.sqlite"
    path.write_bytes(
        _database(
            f"CREATE TABLE {_KERNELS}({columns})",
            f"INSERT INTO {_KERNELS} VALUES(1, 2, 0, 1, 7, 1, 1, 1)",
            "INSERT INTO StringIds VALUES(1, zeroblob(15000000))",
        )
    )
    done = _limited(path.stat().st_size, "main", ["view", str(path)])
    assert done.returncode == 0, done.stderr[-600:]
    assert r"\u0000" in done.stdout
    assert len(done.stdout) < 10_000


def test_a_group_of_less_than_nothing_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "k.json"
    path.write_bytes(_communication())
    done = _limited(0, "main", ["view", str(path)])
    assert done.returncode == 0, done.stderr
    assert "1 device event" in done.stdout


def test_a_long_text_of_many_rows_is_held_once(tmp_path: Path) -> None:
    """Equal texts take no space in a Parquet file: 100,000 of a megabyte are 4 kB."""
    script = """
import sys
import pyarrow as pa, pyarrow.parquet as pq
zeros = pa.array([0] * 100_000, pa.int32())
texts = {"hardware": sys.argv[2], "kind": "matmul", "dtype": "bf16", "op": "x" * 1_000_000}
columns = {name: pa.DictionaryArray.from_arrays(zeros, pa.array([text])) for name, text in texts.items()}
sizes = {name: pa.array([64.0] * 100_000) for name in ("m", "n", "k", "duration_ns")}
pq.write_table(pa.table({**columns, **sizes}), sys.argv[1])
"""
    path = tmp_path / "t.parquet"
    subprocess.run([sys.executable, "-c", script, str(path), _DEVICE], check=True)
    assert path.stat().st_size < 100_000
    done = _limited(0, "validate", ["accuracy", "--hardware", _DEVICE, "--table", str(path)])
    assert done.returncode == 0, done.stderr


def test_a_million_equal_rows_are_compared(tmp_path: Path) -> None:
    """They take no space in a Parquet file."""
    script = """
import sys
import pyarrow as pa, pyarrow.parquet as pq
count = 1_000_000
texts = {"hardware": sys.argv[2], "kind": "matmul", "dtype": "bf16"}
columns = {
    name: pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([text]))
    for name, text in texts.items()
}
sizes = {name: pa.array([64.0] * count) for name in ("m", "n", "k", "duration_ns")}
pq.write_table(pa.table({**columns, **sizes}), sys.argv[1])
"""
    path = tmp_path / "t.parquet"
    subprocess.run([sys.executable, "-c", script, str(path), _DEVICE], check=True)
    assert path.stat().st_size < 100_000
    done = _limited(0, "validate", ["accuracy", "--table", str(path)])
    assert done.returncode == 0, done.stderr
    assert "1,000,000" in done.stdout


@pytest.mark.parametrize("peer", [100_000, _LAST])
def test_the_far_peer_of_a_lone_rank_makes_round_trips(tmp_path: Path, peer: int) -> None:
    path = tmp_path / "x.0.et"
    path.write_bytes(_message(5, comm_dst=peer, comm_size=8))
    done = _limited(0, "validate", ["roundtrip", str(path)])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("peer", [_LAST + 1, _LARGEST])
@pytest.mark.parametrize(("kind", "side"), [(6, "comm_src"), (5, "comm_dst")])
def test_a_peer_past_the_limit_of_ranks_is_refused(tmp_path: Path, kind: int, side: str, peer: int) -> None:
    path = tmp_path / "x.0.et"
    path.write_bytes(_message(kind, **{side: peer, "comm_size": 8}))
    done = _limited(0, "convert", [str(path), str(tmp_path / "o.json")])
    assert done.returncode == 3, done.stderr
    assert f"{side} is above the limit of 16,777,216 ranks" in done.stderr
    assert "  try: name a rank of the job, or copy the file again" in done.stderr


@pytest.mark.parametrize(
    ("module", "command", "code"),
    [
        ("validate", ["check"], 1),
        ("main", ["view"], 3),
        ("validate", ["roundtrip"], 3),
        ("main", ["simulate"], 3),
    ],
)
def test_attributes_by_the_million_are_refused_before_they_take_memory(
    tmp_path: Path, module: str, command: list[str], code: int
) -> None:
    path = tmp_path / "x.et"
    path.write_bytes(et_file(et_node(1, rest=b"\x52\x00" * 12_000_000)))
    done = _limited(0, module, [*command, str(path)])
    assert done.returncode == code, done.stderr
    assert "a message of more than 1,048,576 fields" in done.stdout + done.stderr
    assert str(path) in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_arrow_takes_no_more_address_space_than_it_needs(tmp_path: Path, name: str) -> None:
    """Its own pool of memory reserves a gigabyte at first, and leaves nothing to what comes after."""
    source = str(FIXTURES / "profiles/h100_streams.xplane.pb")
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, "convert", source, str(tmp_path / name)],
        capture_output=True,
        text=True,
        timeout=SAFETY_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) << 10 < _SPARE_BYTES
