"""Attributes of other formats in a trace: text stays text, nothing is written without a value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hespas import api
from hespas.converters.chakra import FORMAT
from hespas.converters.chakra.contract import AttributeFacts
from hespas.converters.chakra.wire.codec import read_columns
from hespas.converters.format import ReadOptions, WriteOptions
from hespas.converters.hlo import FORMAT as HLO
from hespas.estimators.roofline import Roofline
from hespas.graph import Diagnostics, GraphBuilder, NodeKind, OpClass, OpGraph, Severity, Workload
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UsageError
from hespas.hardware import load_device, peak_for
from hespas.schemas.chakra.tables import AttributeField

_PROGRAM = Path(__file__).parents[3] / "fixtures" / "hlo" / "mlp.hlo.txt"


def _read(path: Path) -> tuple[Workload, Diagnostics]:
    assert FORMAT.read is not None
    diagnostics = Diagnostics()
    value = FORMAT.read(path, ReadOptions(), diagnostics)
    assert isinstance(value, Workload)
    return value, diagnostics


def _write(workload: Workload, path: Path) -> Diagnostics:
    assert FORMAT.write is not None
    diagnostics = Diagnostics()
    FORMAT.write(workload, path, WriteOptions(name="w.et"), diagnostics)
    return diagnostics


def _texts(graph: OpGraph) -> set[tuple[str, str, bytes]]:
    """(node, key, value) of the attributes kept, those of the file included."""
    table = graph.extra
    keys = [graph.strings[row] for row in table.key.tolist()]
    nodes = [graph.node_name(node) if node >= 0 else "" for node in table.node.tolist()]
    values = [table.value(row) for row in range(len(table))]
    is_text = np.isin(table.tag, [0, int(AttributeField.STRING), int(AttributeField.BYTES)])
    rows = zip(nodes, keys, values, is_text.tolist(), strict=True)
    return {(node, key, value) for node, key, value, chosen in rows if chosen}


def _one_node(*extra: tuple[str, int, bytes]) -> Workload:
    builder = GraphBuilder("made")
    op, name = builder.strings.add("dot"), builder.strings.add("product")
    node = builder.add_node(name_id=name, op_id=op, op_class=OpClass.CONTRACTION, kind=NodeKind.COMPUTE)
    for key, tag, value in extra:
        builder.add_extra(node, key, tag, value)
    return Workload.spmd(builder.build(), 1)


def test_attributes_of_hlo_come_back_as_the_same_text(tmp_path: Path) -> None:
    assert HLO.read is not None
    workload = HLO.read(_PROGRAM, ReadOptions(), Diagnostics())
    assert isinstance(workload, Workload)
    stated = _texts(workload.classes[0])
    assert len(stated) > 5
    _write(workload, tmp_path / "out.et")
    columns = read_columns(tmp_path / "out.et", Diagnostics())
    assert AttributeField.UNSET not in columns.attrs.field
    assert AttributeField.UNSET not in columns.metadata.field
    again, diagnostics = _read(tmp_path / "out.et")
    assert stated <= _texts(again.classes[0])
    assert "ET010" not in diagnostics.counts()


def test_text_is_a_string_attribute_and_other_bytes_are_bytes(tmp_path: Path) -> None:
    _write(_one_node(("note", 0, "größer".encode()), ("blob", 0, b"\xff\0")), tmp_path / "out.et")
    attrs = read_columns(tmp_path / "out.et", Diagnostics()).attrs
    rows: list[int] = attrs.key.tolist()
    names = [attrs.keys[row] for row in rows]
    assert attrs.field[names.index("note")] == AttributeField.STRING
    assert attrs.field[names.index("blob")] == AttributeField.BYTES
    kept = _texts(_read(tmp_path / "out.et")[0].classes[0])
    assert kept >= {("product", "note", "größer".encode()), ("product", "blob", b"\xff\0")}


@pytest.mark.parametrize(
    ("key", "tag"),
    [
        pytest.param("num_ops", 0, id="name of the contract"),
        pytest.param("involved_dim", 0, id="name that simulators read"),
        pytest.param("", 0, id="no name"),
        pytest.param("note", 300, id="type of another format"),
        pytest.param("note", -7, id="negative type"),
    ],
)
def test_what_would_be_misunderstood_is_left_out_and_told(tmp_path: Path, key: str, tag: int) -> None:
    diagnostics = _write(_one_node((key, tag, b"12"), ("good", 0, b"yes")), tmp_path / "out.et")
    assert diagnostics.counts()["chakra.foreign-attribute"] == 1
    graph = _read(tmp_path / "out.et")[0].classes[0]
    assert _texts(graph) == {("product", "good", b"yes")}
    columns = read_columns(tmp_path / "out.et", Diagnostics())
    assert len(AttributeFacts.of(columns.attrs).integers("num_ops").value) == 0


def test_a_second_attribute_of_a_name_is_left_out(tmp_path: Path) -> None:
    diagnostics = _write(_one_node(("note", 0, b"a"), ("note", 0, b"b")), tmp_path / "out.et")
    assert diagnostics.counts()["chakra.foreign-attribute"] == 1
    again, findings = _read(tmp_path / "out.et")
    assert _texts(again.classes[0]) == {("product", "note", b"a")}
    assert "ET010" not in findings.counts()


def test_an_attribute_without_a_value_is_found_and_kept(reference: Any, tmp_path: Path) -> None:
    flag = {"name": "is_cpu_op", "bool_val": False}
    node = reference.node(id=1, name="a", type=4, attr=[flag, {"name": "note"}])
    (tmp_path / "a.et").write_bytes(reference.file(node))
    workload, diagnostics = _read(tmp_path / "a.et")
    found = [entry for entry in diagnostics if entry.code == "ET010"]
    assert [(entry.severity, "no value" in entry.message) for entry in found] == [(Severity.WARNING, True)]
    _write(workload, tmp_path / "out.et")
    assert (tmp_path / "out.et").read_bytes() == (tmp_path / "a.et").read_bytes()


def test_sizes_of_contractions_travel_in_an_attribute(tmp_path: Path) -> None:
    assert HLO.read is not None
    workload = HLO.read(_PROGRAM, ReadOptions(), Diagnostics())
    assert isinstance(workload, Workload)
    rows = workload.classes[0].contractions
    assert len(rows) > 0
    _write(workload, tmp_path / "out.et")
    back = _read(tmp_path / "out.et")[0].classes[0].contractions
    for name in ("batch", "m", "n", "k", "lhs", "rhs", "accumulator", "flops", "useful_flops", "products"):
        assert getattr(back, name).tolist() == getattr(rows, name).tolist()


_STEPS = (
    ("transformer.0.mha.q@0_Y", "M", 4_000_000),
    ("transformer.0.mha.norm@0_Y", "E", 2_000),
    ("matmul_of_letters", "E2", 3_000),
    ("transformer.0.mha.res@0_Y", "A", 1_000),
    ("nothing to do", "M", 0),
)


def _letters(reference: Any, path: Path, schema: str) -> None:
    """A trace as STAGE writes it: no version, no element types, letters for operations."""
    nodes: list[Any] = []
    for number, (name, letter, flops) in enumerate(_STEPS):
        node = reference.node(id=number, name=name, type=4, data_deps=[number - 1] if number else [])
        node.attr.add(name="num_ops").int64_val = flops
        node.attr.add(name="tensor_size").uint64_val = 6_000
        node.attr.add(name="op_type").string_val = letter
        nodes.append(node)
    head = reference.metadata()
    head.attr.add(name="schema").string_val = schema
    frames = [head.SerializeToString(), *(node.SerializeToString() for node in nodes)]
    path.write_bytes(reference.framed(*frames))


def test_a_trace_without_element_types_is_estimated_at_the_rate_of_products(
    reference: Any, tmp_path: Path
) -> None:
    path = tmp_path / "w.et"
    _letters(reference, path, "symbolic_tensor_network")
    silent = Diagnostics()
    assert np.isnan(_roofline(api.read(path), silent)).any()
    assert any("`default_dtype=bf16`" in entry.message for entry in silent)
    told = Diagnostics()
    value = api.read(path, options=ReadOptions(default_dtype="bf16"), diagnostics=told)
    assert told.counts()["read.default-dtype"] == len(_STEPS)
    assert isinstance(value, Workload)
    contraction, elementwise, none = OpClass.CONTRACTION, OpClass.ELEMENTWISE, OpClass.UNKNOWN
    assert value.classes[0].op_class.tolist() == [contraction, *[elementwise] * 3, none]
    times = _roofline(value, Diagnostics())
    device = load_device("H100")
    peak = peak_for(device, "matrix", "bf16").flops_per_s
    assert times[0] == pytest.approx(device.launch_overhead_ns + 4e6 / peak * 1e9)
    assert not np.isnan(times).any()
    with pytest.raises(UsageError, match="unknown element type"):
        api.read(path, options=ReadOptions(default_dtype="bfloat17"))


def _roofline(value: object, diagnostics: Diagnostics) -> FloatArray:
    assert isinstance(value, Workload)
    return Roofline().estimate(value.classes[0], load_device("H100"), diagnostics).duration_ns


@pytest.mark.parametrize(
    ("text", "op_class"),
    [
        ("aten::mm", OpClass.CONTRACTION),
        ("aten::addmm", OpClass.CONTRACTION),
        ("BatchMatMul", OpClass.CONTRACTION),
        ("layer1_fwd_gemm", OpClass.CONTRACTION),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", OpClass.CONTRACTION),
        ("nvjet_hsh_128x256", OpClass.CONTRACTION),
        ("einsum.12", OpClass.CONTRACTION),
        ("Linear", OpClass.CONTRACTION),
        ("conv2d", OpClass.CONVOLUTION),
        ("aten::convolution_backward", OpClass.CONVOLUTION),
        ("flash_fwd_kernel", OpClass.ATTENTION),
        ("self_attention", OpClass.ATTENTION),
        ("attention_softmax", OpClass.UNKNOWN),
        ("attention_norm", OpClass.UNKNOWN),
        ("linear_bias_add", OpClass.UNKNOWN),
        ("splitKreduce_kernel gemm", OpClass.UNKNOWN),
        ("command", OpClass.UNKNOWN),
        ("convert", OpClass.UNKNOWN),
        ("M", OpClass.UNKNOWN),
    ],
)
def test_products_are_told_by_words(reference: Any, tmp_path: Path, text: str, op_class: OpClass) -> None:
    path = tmp_path / "w.et"
    for name, operation in ((text, ""), ("step", text)):
        node = reference.node(id=1, name=name, type=4)
        node.attr.add(name="num_ops").int64_val = 5
        if operation:
            node.attr.add(name="op_type").string_val = operation
        path.write_bytes(reference.file(node))
        value = _read(path)[0]
        assert value.classes[0].op_class.tolist() == [op_class]
        _write(value, tmp_path / "again.et")
        assert (tmp_path / "again.et").read_bytes() == path.read_bytes()


def test_a_class_that_a_trace_states_counts(reference: Any, tmp_path: Path) -> None:
    path = tmp_path / "w.et"
    for stated, found in (("elementwise", OpClass.ELEMENTWISE), ("contraction", OpClass.CONTRACTION)):
        node = reference.node(id=1, name="gemm", type=4)
        node.attr.add(name="num_ops").int64_val = 5
        node.attr.add(name="op_class").string_val = stated
        path.write_bytes(reference.file(node))
        value = _read(path)[0]
        assert value.classes[0].op_class.tolist() == [found]
        _write(value, tmp_path / "again.et")
        assert (tmp_path / "again.et").read_bytes() == path.read_bytes()
