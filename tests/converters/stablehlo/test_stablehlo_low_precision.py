"""FQ-Conv programs and hybrid products: facts outside of types are preserved by every format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hespas import api
from hespas.cli.main import app
from hespas.graph import DTYPES, Diagnostics, OpGraph, Workload

ReadText = Callable[..., tuple[Workload, Diagnostics]]

KIND = "!quant.uniform<i4:f32, 5.000000e-01>"
TERNARY = "!quant.uniform<i4<-1:1>:f32, 2.500000e-01>"
CONV = f"""func.func @main(%x: tensor<8x16x16x8x{KIND}>, %w: tensor<3x3x8x32x{TERNARY}>)
    -> tensor<8x14x14x32x{KIND}> {{
  %0 = "stablehlo.convolution"(%x, %w) <{{batch_group_count = 1 : i64,
      dimension_numbers = #stablehlo.conv<[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]>,
      feature_group_count = 1 : i64, window_strides = array<i64: 1, 1>}}> {{ATTRIBUTES}}
      : (tensor<8x16x16x8x{KIND}>, tensor<3x3x8x32x{TERNARY}>) -> tensor<8x14x14x32x{KIND}>
  return %0 : tensor<8x14x14x32x{KIND}>
}}"""
STATED = {"accumulator_bits": "12", "mac_noise_sigma": "0.5"}


def stated(graph: OpGraph) -> dict[str, str]:
    """Return the values of node 0 in the extra table."""
    extra = graph.extra
    rows = [row for row in range(len(extra)) if int(extra.node[row]) == 0]
    return {graph.strings[int(extra.key[row])]: bytes(extra.value(row)).decode() for row in rows}


@pytest.mark.parametrize(
    "attributes",
    [
        "accumulator_bits = 12 : i64, mac_noise_sigma = 5.0e-01 : f64",
        "hespas.accumulator_bits = 12 : i32, hespas.mac_noise_sigma = 5.0e-01 : f32",
        'mhlo.frontend_attributes = {accumulator_bits = "12", mac_noise_sigma = "0.5"}',
        'accumulator_bits = 12 : i8, mhlo.frontend_attributes = {mac_noise_sigma = "0.5"}',
        'accumulator_bits = 12 : i8, mac_noise_sigma = "0.5", hespas.accumulator_bits = 12 : i8',
    ],
)
def test_multiply_accumulate_attributes_are_kept(read_text: ReadText, attributes: str) -> None:
    graph = read_text(CONV.replace("ATTRIBUTES", attributes))[0].classes[0]
    assert stated(graph) == STATED
    assert DTYPES[int(graph.contractions.accumulator[0])].name == "i16"


def test_convolution_by_hand(read_text: ReadText) -> None:
    """8 x 14 x 14 positions, 32 features, 3 x 3 x 8 taps; a ternary weight takes its 4 stored bits."""
    graph = read_text(CONV.replace("ATTRIBUTES", ""))[0].classes[0]
    outputs = 8 * 14 * 14 * 32
    assert graph.contractions.flops[0] == 2 * outputs * 72
    assert graph.flops[0] == 2 * outputs * 72 + 2 * outputs
    assert graph.bytes_read[0] == (8 * 16 * 16 * 8 // 2 + 4 + 1) + (72 * 32 // 2 + 4 + 1)
    assert graph.bytes_written[0] == outputs // 2 + 4 + 1
    assert DTYPES[int(graph.contractions.accumulator[0])].name == "i32"
    assert len(graph.extra) == 0


def test_equal_products_with_unlike_attributes_stay_apart(read_text: ReadText) -> None:
    x = "tensor<4x4xi8>"
    lines = "\n".join(
        f"%{bits} = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0] "
        f"{{accumulator_bits = {bits} : i64}} : ({x}, {x}) -> tensor<4x4xi32>"
        for bits in (10, 20)
    )
    program = f"func.func @main(%x: {x}) -> tensor<4x4xi32> {{\n{lines}\nreturn %20 : tensor<4x4xi32>\n}}"
    graph = read_text(program)[0].classes[0]
    assert [bytes(graph.extra.value(row)) for row in range(2)] == [b"10", b"20"]
    assert graph.extra.node.tolist() == [0, 1]


@pytest.mark.parametrize("name", ["op-graph", "op-graph-arrow", "chakra", "chakra-json"])
def test_attributes_pass_through_formats(read_text: ReadText, tmp_path: Path, name: str) -> None:
    attributes = "accumulator_bits = 12 : i64, mac_noise_sigma = 5.0e-01 : f64"
    workload = read_text(CONV.replace("ATTRIBUTES", attributes))[0]
    path = tmp_path / "out"
    api.write(workload, path, format=name)
    back = api.read(path, format=name)
    assert isinstance(back, Workload)
    assert stated(back.classes[0]) == STATED
    (row,) = api.summarise(back, name).classes[0].products
    assert (row.lhs, row.rhs, row.accumulator) == ("i4", "i4", "i16")
    assert (row.accumulator_bits, row.mac_noise_sigma) == ("12", "0.5")
    assert row.flops == 2 * 8 * 14 * 14 * 32 * 72


def test_hlo_states_them_among_its_frontend_attributes(tmp_path: Path) -> None:
    path = tmp_path / "dot.hlo.txt"
    path.write_text(
        "HloModule m\n\nENTRY main {\n  a = s8[8,64]{1,0} parameter(0)\n  b = s8[64,32]{1,0} parameter(1)\n"
        "  ROOT d = s32[8,32]{1,0} dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
        'frontend_attributes={accumulator_bits="20",mac_noise_sigma="0.25"}\n}\n',
        "utf-8",
    )
    workload = api.read(path)
    assert isinstance(workload, Workload)
    (row,) = api.summarise(workload, "hlo").classes[0].products
    assert (row.accumulator_bits, row.mac_noise_sigma, row.accumulator) == ("20", "0.25", "i32")


def test_view_prints_number_formats_and_what_is_stated(tmp_path: Path) -> None:
    attributes = "accumulator_bits = 12 : i64, mac_noise_sigma = 5.0e-01 : f64"
    path = tmp_path / "conv.mlir"
    path.write_text(CONV.replace("ATTRIBUTES", attributes), "utf-8")
    done = CliRunner().invoke(app, ["view", str(path)])
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.output.splitlines()]
    at = lines.index(["matmuls", "accumulator", "bits", "noise", "operations", "runs", "FLOPs"])
    assert lines[at + 1][:6] == ["i4", "x", "i4", "i16", "12", "0.5"]
