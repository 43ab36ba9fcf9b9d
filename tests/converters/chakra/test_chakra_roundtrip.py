"""Trace -> graph -> trace: nothing is lost, whatever attributes a trace has."""

from __future__ import annotations

import json
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.converters.chakra import FORMAT
from hespas.converters.format import ReadOptions, WriteOptions
from hespas.graph import Diagnostics, GraphBuilder, OpClass, Workload, find_dtype
from hespas.schemas.chakra.tables import ATTRIBUTE, ProtoKind
from tests.converters.chakra.conftest import Reference, messages_of

_ORACLE = Path(__file__).parents[3].parent / "shared" / "data" / "astra_oracle"


def _read(path: Path, *, lenient: bool = False) -> Workload:
    assert FORMAT.read is not None
    value = FORMAT.read(path, ReadOptions(lenient=lenient), Diagnostics())
    assert isinstance(value, Workload)
    return value


def _write(workload: Workload, path: Path, name: str = "w.et") -> None:
    assert FORMAT.write is not None
    FORMAT.write(workload, path, WriteOptions(name=name), Diagnostics())


@pytest.mark.skipif(not _ORACLE.is_dir(), reason="the shared oracle traces are not here")
def test_every_oracle_trace_comes_back_byte_for_byte(tmp_path: Path) -> None:
    folders = sorted(path for path in _ORACLE.iterdir() if path.is_dir())
    assert folders
    for folder in folders:
        copy = tmp_path / folder.name
        _write(_read(folder), copy, "w")
        for file in folder.glob("*.et"):
            assert (copy / file.name).read_bytes() == file.read_bytes(), file
        groups = folder / "comm_group.json"
        if groups.is_file():
            assert json.loads((copy / groups.name).read_text()) == json.loads(groups.read_text())


_FLAG = {"name": "is_cpu_op", "bool_val": False}
_TEXT = st.text(max_size=12)
_NAMES = [
    "is_cpu_op",
    "comm_type",
    "comm_size",
    "pg_name",
    "comm_src",
    "comm_dst",
    "comm_tag",
    "num_ops",
    "tensor_size",
    "op_type",
    "stream",
    "duration_nanos",
    "bytes_written",
    "useful_ops",
    "transcendentals",
    "op_class",
    "dtype",
    "framework_op",
    "involved_dim",
    "rf_id",
    "scope",
    "",
]
_SMALL = st.sampled_from([0, 1, 2, 5, 127, 128, 300])
_VALUES: dict[ProtoKind, st.SearchStrategy[Any]] = {
    ProtoKind.DOUBLE: st.floats(allow_nan=False),
    ProtoKind.FLOAT: st.floats(width=32, allow_nan=False),
    ProtoKind.INT32: _SMALL | st.integers(-(1 << 31), (1 << 31) - 1),
    ProtoKind.INT64: _SMALL | st.integers(-(1 << 63), (1 << 63) - 1),
    ProtoKind.UINT32: _SMALL | st.integers(0, (1 << 32) - 1),
    ProtoKind.UINT64: _SMALL | st.integers(0, (1 << 64) - 1),
    ProtoKind.SINT32: _SMALL,
    ProtoKind.SINT64: _SMALL | st.just(-3),
    ProtoKind.FIXED32: _SMALL,
    ProtoKind.FIXED64: _SMALL | st.just((1 << 64) - 1),
    ProtoKind.SFIXED32: _SMALL | st.just(-1),
    ProtoKind.SFIXED64: _SMALL | st.just(-1),
    ProtoKind.BOOL: st.booleans(),
    ProtoKind.STRING: st.sampled_from(["", "0", "1", "2", "9", "bf16", "BF16", "contraction", "collective"])
    | _TEXT,
    ProtoKind.BYTES: st.binary(max_size=5),
}
_SIGNED = {
    ProtoKind.INT32,
    ProtoKind.INT64,
    ProtoKind.SINT32,
    ProtoKind.SINT64,
    ProtoKind.SFIXED32,
    ProtoKind.SFIXED64,
}
_FIELDS = [field for field in ATTRIBUTE.fields.values() if field.oneof]


@st.composite
def _attribute(draw: st.DrawFn, name: str) -> dict[str, Any]:
    likely = [
        field
        for field in _FIELDS
        if field.kind in {ProtoKind.INT64, ProtoKind.STRING, ProtoKind.BOOL, ProtoKind.UINT64}
    ]
    field = draw(st.sampled_from(likely) | st.sampled_from(_FIELDS))
    made: dict[str, Any] = {"name": name, "doc_string": draw(st.just("") | _TEXT)}
    if field.message is None:
        value = draw(_VALUES[field.kind])
        is_negative_time = name == "duration_nanos" and field.kind in _SIGNED and value < 0
        made[field.name] = -(value + 1) if is_negative_time else value  # a negative one is an error
    else:
        made[field.name] = {"values": draw(st.lists(_VALUES[field.message.fields[1].kind], max_size=3))}
    return made


@st.composite
def _nodes(draw: st.DrawFn) -> list[dict[str, Any]]:
    ids = draw(st.lists(_SMALL | st.integers(0, (1 << 64) - 1), min_size=1, max_size=5, unique=True))
    io = st.none() | st.fixed_dictionaries({"values": _TEXT, "shapes": _TEXT, "types": _TEXT})
    nodes: list[dict[str, Any]] = []
    for number in ids:
        names = draw(st.lists(st.sampled_from(_NAMES), max_size=6, unique=True))
        others = [other for other in ids if other != number]
        deps = st.lists(st.sampled_from(others), max_size=3) if others else st.just([])
        node = {
            "id": number,
            "name": draw(st.text(max_size=9)),
            "type": draw(st.integers(0, 7)),
            "ctrl_deps": draw(deps),
            "data_deps": draw(deps),
            "start_time_micros": draw(_SMALL),
            "duration_micros": draw(_SMALL | st.integers(0, (1 << 63) - 1)),
            "inputs": draw(io),
            "outputs": draw(io),
            "attr": [draw(_attribute(name)) for name in names],
        }
        nodes.append({key: value for key, value in node.items() if value is not None})
    return nodes


@settings(max_examples=15)
@given(nodes=_nodes(), metadata=st.lists(st.sampled_from(["pid", "schema"]).flatmap(_attribute), max_size=1))
def test_any_attributes_survive_the_graph(
    reference: Any, tmp_path: Path, nodes: list[dict[str, Any]], metadata: list[dict[str, Any]]
) -> None:
    head = reference.metadata(version="1.0.0", attr=metadata).SerializeToString()
    good = reference.node(id=(1 << 63) + 7, name="anchor", duration_micros=1, attr=[_FLAG])
    messages = [reference.node(**node).SerializeToString() for node in nodes]
    data = reference.framed(head, good.SerializeToString(), *messages)
    (tmp_path / "w.0.et").write_bytes(data)
    (tmp_path / "comm_group.json").write_text('{"1": [0, 1], "2": [0, 3]}')
    workload = _read(tmp_path / "w.0.et", lenient=True)
    _write(workload, tmp_path / "out.et")
    copy = (tmp_path / "out.et").read_bytes()
    named = [text or 'name: "node_0"\n' for text in _nodes_of(reference, data)]  # no frame is empty
    assert _nodes_of(reference, copy) == named


def _nodes_of(reference: Any, data: bytes) -> list[str]:
    """The messages of a file as text, without the metadata that a lone file gains."""
    _, *nodes = messages_of(data)
    return [str(reference.node.FromString(body)) for body in nodes]


def test_exact_times_survive_and_microseconds_are_carried(reference: Any, tmp_path: Path) -> None:
    nanos = [300, 300, 300, 999_700, 1, 0, 2_000]
    nodes = [
        reference.node(
            id=i,
            name=f"n{i}",
            type=4,
            attr=[{"name": "is_cpu_op", "bool_val": False}, {"name": "duration_nanos", "uint64_val": time}],
        )
        for i, time in enumerate(nanos)
    ]
    (tmp_path / "t.0.et").write_bytes(reference.file(*nodes))
    workload = _read(tmp_path / "t.0.et")
    assert workload.classes[0].duration_ns.tolist() == nanos
    _write(workload, tmp_path / "out.et")
    again = _read(tmp_path / "out.et")
    assert again.classes[0].duration_ns.tolist() == nanos
    text = "".join(_nodes_of(reference, (tmp_path / "out.et").read_bytes()))
    micros = [int(line.split()[1]) for line in text.splitlines() if line.startswith("duration_micros")]
    assert abs(sum(micros) - sum(nanos) / 1000) < 1
    assert micros[0] == 1  # the first sub-microsecond node is not lost


def test_gzip_in_and_out(reference: Any, tmp_path: Path) -> None:
    node = reference.node(id=1, name="n", type=4, attr=[{"name": "is_cpu_op", "bool_val": True}])
    (tmp_path / "a.et").write_bytes(reference.file(node))
    workload = _read(tmp_path / "a.et")
    _write(workload, tmp_path / "partial", "out.et.gz")
    assert (tmp_path / "partial").read_bytes()[:2] == b"\x1f\x8b"
    _write(_read(tmp_path / "partial"), tmp_path / "b.et")
    assert (tmp_path / "b.et").read_bytes() == (tmp_path / "a.et").read_bytes()


@pytest.mark.parametrize(
    ("element", "size", "told"),
    [
        ("f32", 96.0, 0),
        ("f32", 160.0, 0),
        ("f32", 32.0, 0),
        ("f32", nan, 1),
        ("f32", 97.5, 1),
        ("f32", 1e30, 1),
        ("", nan, 0),
        ("", 96.0, 1),
    ],
)
def test_sizes_of_tensors_come_back_or_are_told(tmp_path: Path, element: str, size: float, told: int) -> None:
    builder = GraphBuilder("x")
    row = builder.types.add(find_dtype(element) if element else None, (4, 6))
    builder.add_node(name_id=0, op_id=0, op_class=OpClass.ELEMENTWISE, operands=[row, row])
    graph = builder.build()
    graph = replace(graph, types=replace(graph.types, bytes=np.array([size])))
    found = Diagnostics()
    assert FORMAT.write is not None
    FORMAT.write(Workload.spmd(graph, 1), tmp_path / "x.et", WriteOptions(name="x.et"), found)
    assert found.counts().get("chakra.tensor-size", 0) == told
    after = _read(tmp_path / "x.et").classes[0]
    if not told:
        assert np.array_equal(after.types.bytes, [size], equal_nan=True)


@pytest.mark.parametrize("text", ['["f32-97B"]', '["+64B"]'])
def test_a_size_that_no_tensor_has_is_kept_as_it_is(tmp_path: Path, reference: Reference, text: str) -> None:
    node = reference.node(id=0, name="a", type=4)
    node.inputs.values, node.inputs.shapes, node.inputs.types = "[]", "[[4, 6]]", text
    (tmp_path / "x.et").write_bytes(reference.file(node))
    workload = _read(tmp_path / "x.et")
    assert not len(workload.classes[0].types)
    _write(workload, tmp_path / "y.et", "y.et")
    assert text.encode() in (tmp_path / "y.et").read_bytes()
