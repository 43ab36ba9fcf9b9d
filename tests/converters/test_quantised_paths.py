"""Quantised types through every format: random types, and the networks among the fixtures."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.converters import load_format
from hespas.converters.format import ReadOptions, WriteOptions
from hespas.converters.stablehlo.mlir import load_bindings
from hespas.converters.stablehlo.reader import read_program
from hespas.generators.obfuscate import Key, Obfuscate
from hespas.graph import Diagnostics, OpGraph, Workload
from hespas.graph.passes import FoldFree, UnrollLoops
from hespas.graph.quantised import QUANTISED, QuantisedType, accumulator_sums, parse_quantised
from hespas.validators.checker import check_workload
from tests.converters.stablehlo.replays import FIXTURES, read_any, without_program
from tests.quantised_types import types_of_shape

pytest.importorskip("jaxlib")

STABLEHLO = FIXTURES / "stablehlo"
NETWORKS = ("quantised_mlp.mlir", "ternary_network.mlir", "hand_quantized.mlir")
LOSSLESS = {"op-graph": "g.json", "op-graph-arrow": "g.arrow", "chakra": "g.et", "chakra-json": "g.et.json"}


def types_by_node(graph: OpGraph) -> dict[str, list[str]]:
    """The quantised types of operands and results of each node, by its name."""
    encodings = [graph.strings[row] for row in graph.types.encoding.tolist()]
    texts = [text if text.startswith(QUANTISED) else "" for text in encodings]
    return {
        graph.node_name(node): [
            texts[row] for rows in (graph.operands, graph.results) for row in rows.row(node)
        ]
        for node in range(len(graph))
    }


def through(workload: Workload, name: str, file: str) -> Workload:
    """The workload that is read after it was written in a format."""
    with TemporaryDirectory() as folder:
        write = load_format(name).write
        assert write is not None
        write(workload, Path(folder) / file, WriteOptions(name=file), Diagnostics())
        return read_any(Path(folder) / file, name)


def flat(workload: Workload) -> Workload:
    """Without what flat formats have no nodes for."""
    graph = FoldFree()(UnrollLoops()(workload.classes[0], Diagnostics()), Diagnostics())
    return Workload.spmd(graph, workload.num_ranks)


SHAPE = (4, 6)


@st.composite
def programs(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A program of values that are quantised and dequantised, and of arguments of types with blocks."""
    lines: list[str] = []
    texts: list[str] = []
    for number in range(draw(st.integers(1, 3))):
        kind: QuantisedType = draw(types_of_shape(SHAPE, of_values=True))
        texts.append(str(kind))
        plain, stored = f"tensor<4x6x{kind.expressed}>", f"tensor<4x6x{kind}>"
        lines.append(f"%f{number} = stablehlo.convert %x : (tensor<4x6xf64>) -> {plain}")
        lines.append(f"%q{number} = stablehlo.uniform_quantize %f{number} : ({plain}) -> {stored}")
        lines.append(f"%d{number} = stablehlo.uniform_dequantize %q{number} : ({stored}) -> {plain}")
    kind = draw(types_of_shape(SHAPE))
    texts.append(str(kind))
    passed = f"tensor<4x6x{kind}>"
    body = "\n".join(lines)
    text = f"""module {{ func.func public @main(%x: tensor<4x6xf64>, %w: {passed}) -> {passed} {{
{body}
return %w : {passed} }} }}"""
    return text, texts


@given(programs())
@settings(max_examples=25)
def test_random_types_survive_every_format(program: tuple[str, list[str]]) -> None:
    text, types = program
    workload = read_program(text.encode(), "p", ReadOptions(), Diagnostics())
    graph = workload.classes[0]
    read = {encoding for row in types_by_node(graph).values() for encoding in row if encoding}
    assert {parse_quantised(encoding) for encoding in read} == set(map(parse_quantised, types))
    for name in ("op-graph", "op-graph-arrow"):
        again = through(workload, name, LOSSLESS[name])
        assert types_by_node(again.classes[0]) == types_by_node(graph)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "again.mlir"
            write = load_format("stablehlo").write
            assert write is not None
            write(again, path, WriteOptions(name=path.name), Diagnostics())
            assert path.read_text() == text
    bare = flat(workload)
    for name, file in LOSSLESS.items():
        again = through(bare, name, file)
        assert types_by_node(again.classes[0]) == types_by_node(bare.classes[0])


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("format_name", LOSSLESS)
def test_networks_keep_their_types(name: str, format_name: str) -> None:
    before = flat(read_any(STABLEHLO / name, "stablehlo"))
    after = through(before, format_name, LOSSLESS[format_name])
    wanted = types_by_node(before.classes[0])
    assert any(any(row) for row in wanted.values())
    assert types_by_node(after.classes[0]) == wanted


@pytest.mark.parametrize("name", NETWORKS)
def test_a_replay_states_the_types(name: str) -> None:
    before = without_program(flat(read_any(STABLEHLO / name, "stablehlo")))
    found = Diagnostics()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "replay.mlir"
        write = load_format("stablehlo").write
        assert write is not None
        write(before, path, WriteOptions(name=path.name), found)
        text = path.read_text()
        after = read_any(path, "stablehlo").classes[0]
    load_bindings().parse(text)
    had, has = (
        Counter(tuple(filter(None, row)) for row in types_by_node(graph).values() if any(row))
        for graph in (before.classes[0], after)
    )
    replaced = found.counts().get("stablehlo.types", 0)
    assert (had - has).total() <= replaced, "types are kept or reported"
    assert replaced <= 1, "only the custom call is replaced"


def test_accumulators_survive_traces_and_replays() -> None:
    before = flat(read_any(STABLEHLO / "ternary_network.mlir", "stablehlo"))
    trace = through(before, "chakra", "g.et")
    replayed = through(trace, "stablehlo", "g.mlir")
    bounds = [
        sorted((each.depth, each.low, each.high, each.bits) for each in accumulator_sums(job.classes[0]))
        for job in (before, trace, replayed)
    ]
    assert bounds[0] == bounds[1] == bounds[2]
    assert [bits for *_, bits in bounds[0]] == [16, 8, 10]
    for job in (before, trace, replayed):
        (violation,) = [each for each in check_workload(job).violations if each.code == "GR008"]
        assert "a sum of 288 products of -1..1 and -1..1 can be -288 to 288" in violation.message
        assert "its 8-bit accumulator holds -128 to 127: use 10 bits" in violation.message


def test_long_lists_of_scales_are_read_from_traces() -> None:
    scales = ",".join(f"{0.01 + number * 1e-7:.10f}" for number in range(8192))
    kind = f"tensor<8192x2x!quant.uniform<i8:f32:0, {{{scales}}}>>"
    text = f"""module {{ func.func public @main(%x: tensor<8192x2xf32>) -> tensor<8192x2xf32> {{
%q = stablehlo.uniform_quantize %x : (tensor<8192x2xf32>) -> {kind}
%d = stablehlo.uniform_dequantize %q : ({kind}) -> tensor<8192x2xf32>
return %d : tensor<8192x2xf32> }} }}"""
    before = flat(read_program(text.encode(), "p", ReadOptions(), Diagnostics()))
    for name in ("chakra", "chakra-json"):
        assert types_by_node(through(before, name, LOSSLESS[name]).classes[0]) == types_by_node(
            before.classes[0]
        )


def test_custom_calls_on_quantised_tensors_keep_their_configuration() -> None:
    before = flat(read_any(STABLEHLO / "quantised_mlp.mlir", "stablehlo"))
    for job in (before, through(before, "chakra", "g.et"), through(before, "op-graph", "g.json")):
        graph = job.classes[0]
        rows = [
            row
            for row in range(len(graph.extra))
            if graph.strings[int(graph.extra.key[row])] == "backend_config"
        ]
        assert [bytes(graph.extra.value(row)) for row in rows] == [b"axis=1"]
        assert graph.op_name(int(graph.extra.node[rows[0]])) == "stablehlo.custom_call"


def test_obfuscation_keeps_storage_and_drops_scales() -> None:
    before = flat(read_any(STABLEHLO / "ternary_network.mlir", "stablehlo"))
    found = Diagnostics()
    after = Obfuscate(key=Key(b"a key of this test"), level="names")(before, found).classes[0]
    kinds = [parse_quantised(after.strings[row]) for row in after.types.encoding.tolist()]
    assert {(kind.kind, kind.storage, kind.low, kind.high) for kind in kinds if kind is not None} == {
        ("any", "i4", -8, 7),
        ("any", "i4", -7, 7),
        ("any", "i2", -1, 1),
        ("any", "i32", -(2**31), 2**31 - 1),
    }
    assert "5.000000e-01" not in "".join(after.strings)
    assert [each.depth for each in accumulator_sums(after) if not each.fits] == [288]
    assert found.counts()["obfuscate.dropped"] >= sum(kind is not None for kind in kinds)
