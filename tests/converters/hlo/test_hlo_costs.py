"""Costs of fusions, calls and single operations."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan, log2

import numpy as np
import pytest

from hespas.graph import DTYPES, Diagnostics, OpClass, OpGraph, Workload, dtype

ReadText = Callable[[str], tuple[Workload, Diagnostics]]


def _node(graph: OpGraph, name: str) -> int:
    return [graph.node_name(node) for node in range(len(graph))].index(name)


def _fusion(body: str, operands: str, result: str, header: str = "", parameters: str = "") -> str:
    return f"""HloModule m, is_scheduled=true{header}
add {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}}
inner {{
  a = f32[64,128]{{1,0}} parameter(0)
  b = f32[128,32]{{1,0}} parameter(1)
  ROOT d = f32[64,32]{{1,0}} dot(a, b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
fused {{
  {body}
}}
ENTRY e {{
  table = f32[1024,64]{{1,0}} parameter(0)
  rows = f32[8,64]{{1,0}} parameter(1)
  at = s32[] parameter(2)
  index = s32[8,1]{{1,0}} parameter(3)
  lhs = f32[64,128]{{1,0}} parameter(4)
  rhs = f32[128,32]{{1,0}} parameter(5)
  {parameters}
  ROOT f = {result} fusion({operands}), kind=kLoop, calls=fused
}}
"""


ROW, TABLE = 8 * 64 * 4, 1024 * 64 * 4
T0 = "t = f32[1024,64]{1,0} parameter(0)\n  "
SLICED = T0 + (
    "i = s32[] parameter(1)\n  z = s32[] constant(0)\n"
    "  s = f32[8,64]{1,0} dynamic-slice(t, i, z), dynamic_slice_sizes={8,64}\n"
)
GATHER = (
    "offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,64}"
)
UPDATED = T0 + (
    "u = f32[8,64]{1,0} parameter(1)\n  i = s32[] parameter(2)\n  z = s32[] constant(0)\n"
    "  w = f32[8,64]{1,0} negate(u)\n  d = f32[1024,64]{1,0} dynamic-update-slice(t, w, i, z)\n"
)
SCATTERED = T0 + (
    "i = s32[8,1]{1,0} parameter(1)\n  u = f32[8,64]{1,0} parameter(2)\n"
    "  d = f32[1024,64]{1,0} scatter(t, i, u), update_window_dims={1}, inserted_window_dims={0}, "
    "scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=add\n"
)
ADDED = T0 + (
    "u = f32[8,64]{1,0} parameter(1)\n  i = s32[] parameter(2)\n  z = s32[] constant(0)\n"
    "  s = f32[8,64]{1,0} dynamic-slice(t, %s, z), dynamic_slice_sizes={8,64}\n"
    "  w = f32[8,64]{1,0} add(s, u)\n  d = f32[1024,64]{1,0} dynamic-update-slice(t, w, i, z)\n"
)
DONATED = ", input_output_alias={ {}: (0, {}, may-alias) }"


@pytest.mark.parametrize(
    ("body", "operands", "header", "moved"),
    [
        pytest.param(SLICED + "  r = f32[8,64] negate(s)", "table, at", "", (ROW + 4, ROW), id="slice"),
        pytest.param(
            T0 + "a = f32[1024,64]{1,0} abs(t)\n  r = f32[8,64] slice(a), slice={[0:8], [0:64]}",
            "table", "", (ROW, ROW), id="slice behind elementwise",
        ),
        pytest.param(
            T0 + f"i = s32[8,1] parameter(1)\n  r = f32[8,64] gather(t, i), {GATHER}",
            "table, index", "", (ROW + 32, ROW), id="gather",
        ),
        pytest.param(
            SLICED + "  y = f32[1024,64] abs(t)\n  p = f32[8,64] slice(y), slice={[8:16], [0:64]}\n"
            "  r = f32[8,64] add(s, p)",
            "table, at", "", (2 * ROW + 4, ROW), id="two slices",
        ),
        pytest.param(UPDATED, "table, rows, at", DONATED, (ROW + 4, ROW), id="update in place"),
        pytest.param(
            UPDATED + "  r = f32[65536]{0} bitcast(d)",
            "table, rows, at", DONATED, (ROW + 4, ROW), id="behind a view",
        ),
        pytest.param(UPDATED, "table, rows, at", "", (TABLE + ROW + 4, TABLE), id="argument kept"),
        pytest.param(ADDED % "i", "table, rows, at", DONATED, (2 * ROW + 4, ROW), id="added to a part"),
        pytest.param(
            ADDED % "z", "table, rows, at", DONATED, (TABLE + ROW + 4, TABLE), id="another part is read"
        ),
        pytest.param(SCATTERED, "table, index, rows", DONATED, (2 * ROW + 32, ROW), id="scatter in place"),
        pytest.param(
            T0 + "r = f32[1024,64] multiply(t, t)", "table", "", (TABLE, TABLE), id="operand used twice"
        ),
    ],
)  # fmt: skip
def test_fusion_traffic(
    read_text: ReadText, body: str, operands: str, header: str, moved: tuple[int, int]
) -> None:
    flat = "bitcast" in body
    result = "f32[8,64]" if moved[1] == ROW and not header else "f32[65536]" if flat else "f32[1024,64]"
    graph = read_text(_fusion(body, operands, result, header))[0].classes[0]
    node = _node(graph, "f")
    assert (graph.bytes_read[node], graph.bytes_written[node]) == moved
    assert graph.op_class[node] == OpClass.FUSION


def test_an_operand_passed_twice_is_read_once(read_text: ReadText) -> None:
    body = T0 + "u = f32[1024,64]{1,0} parameter(1)\n  r = f32[1024,64] add(t, u)"
    graph = read_text(_fusion(body, "table, table", "f32[1024,64]"))[0].classes[0]
    assert graph.bytes_read[_node(graph, "f")] == TABLE


NESTED = (
    "a = f32[64,128]{1,0} parameter(0)\n  b = f32[128,32]{1,0} parameter(1)\n"
    "  g = f32[64,32]{1,0} fusion(a, b), kind=kCustom, calls=inner\n"
    "  x = f32[64,32]{1,0} exponential(g)\n  z = f32[] constant(0)\n"
    "  r = f32[64]{0} reduce(x, z), dimensions={1}, to_apply=add\n  ROOT n = f32[64]{0} negate(r)"
)


def test_a_fusion_sums_its_body_and_those_inside(read_text: ReadText) -> None:
    graph = read_text(_fusion(NESTED, "lhs, rhs", "f32[64]"))[0].classes[0]
    node = _node(graph, "f")
    product = 2 * 64 * 128 * 32
    assert graph.flops[node] == product + 64 * 31 + 64
    assert graph.transcendentals[node] == 64 * 32
    assert graph.bytes_moved[node] == 4 * (64 * 128 + 128 * 32 + 64)
    assert graph.op_class[node] == OpClass.CONTRACTION
    assert DTYPES[int(graph.rate_dtype[node])].name == "f32"
    table = graph.contractions
    extents = [column.tolist() for column in (table.node, table.batch, table.m, table.n, table.k)]
    assert extents == [[node], [1], [64], [32], [128]]
    assert table.flops.tolist() == [product]


def test_the_rate_is_that_of_the_operands(read_text: ReadText) -> None:
    body = (
        "a = bf16[64,128]{1,0} parameter(0)\n  b = bf16[128,32]{1,0} parameter(1)\n"
        "  d = f32[64,32]{1,0} dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        "  n = f32[64,32]{1,0} negate(d)"
    )
    more = "p = bf16[64,128]{1,0} parameter(6)\n  q = bf16[128,32]{1,0} parameter(7)"
    graph = read_text(_fusion(body, "p, q", "f32[64,32]", parameters=more))[0].classes[0]
    assert graph.rate_dtype[_node(graph, "f")] == dtype("bf16").code
    assert graph.contractions.accumulator.tolist() == [dtype("f32").code]


def _single(line: str, header: str = "") -> str:
    return f"""HloModule m{header}
less {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = pred[] compare(a, b), direction=LT
}}
pair {{
  a = f32[] parameter(0)
  b = s32[] parameter(1)
  c = f32[] parameter(2)
  d = s32[] parameter(3)
  g = pred[] compare(a, c), direction=GT
  m = f32[] select(g, a, c)
  n = s32[] select(g, b, d)
  ROOT t = (f32[], s32[]) tuple(m, n)
}}
replace {{
  a = f32[] parameter(0)
  ROOT b = f32[] parameter(1)
}}
ENTRY e {{
  x = f32[64,128]{{1,0}} parameter(0)
  i = s32[64,128]{{1,0}} parameter(1)
  image = f32[2,16,16,8]{{3,2,1,0}} parameter(2)
  kernel = f32[3,3,8,16]{{3,2,1,0}} parameter(3)
  signal = c64[4,256]{{1,0}} parameter(4)
  rows = s32[8,1]{{1,0}} parameter(5)
  part = f32[8,128]{{1,0}} parameter(6)
  zero = f32[] constant(0)
  none = s32[] constant(0)
  copied = f32[64,128]{{1,0}} negate(x)
  ROOT r = {line}
}}
"""


X = 64 * 128 * 4
PART = 8 * 128 * 4
SCATTER = (
    "update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, "
    "to_apply=replace"
)


@pytest.mark.parametrize(
    ("line", "op_class", "flops", "moved"),
    [
        ("f32[64,128] add(x, x)", OpClass.ELEMENTWISE, 8192, 2 * X),
        ("f32[128,64]{1,0} transpose(x), dimensions={1,0}", OpClass.MOVE, 0, 2 * X),
        ("f32[64,128]{0,1} copy(x)", OpClass.MOVE, 0, 2 * X),
        ("f32[8192]{0} bitcast(x)", OpClass.FREE, 0, 0),
        ("f32[8192]{0} reshape(x)", OpClass.FREE, 0, 0),
        ("s32[64,128]{1,0} bitcast-convert(x)", OpClass.FREE, 0, 0),
        ("f32[8,128] slice(x), slice={[0:8], [0:128]}", OpClass.SLICE, 0, 2 * PART),
        (
            ("f32[8,128] gather(x, rows), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, "
            "index_vector_dim=1, slice_sizes={1,128}"),
            OpClass.GATHER, 0, 2 * PART + 32,
        ),
        (f"f32[64,128] scatter(copied, rows, part), {SCATTER}", OpClass.SCATTER, 0, 2 * PART + 32),
        (f"f32[64,128] scatter(x, rows, part), {SCATTER}", OpClass.SCATTER, 0, 2 * PART + 32 + 2 * X),
        ("f32[64,128] dynamic-update-slice(copied, part, none, none)", OpClass.UPDATE, 0, 2 * PART + 8),
        ("f32[64,128] dynamic-update-slice(x, part, none, none)", OpClass.UPDATE, 0, 2 * PART + 8 + 2 * X),
        ("(f32[64], s32[64]) reduce(x, i, zero, none), dimensions={1}, to_apply=pair", OpClass.REDUCTION,
         3 * 64 * 127, 2 * X + 8 + 512),
        ("f32[64,128] sort(x), dimensions={1}, to_apply=less", OpClass.SORT, 8192 * 7, 2 * X),
        ("(f32[64,8], s32[64,8]) topk(x), k=8, largest=true", OpClass.SORT, 8192 * 3, X + 2 * 64 * 8 * 4),
        (
            "c64[4,256] fft(signal), fft_type=FFT, fft_length={256}",
            OpClass.FFT, 4 * 5 * 256 * log2(256), 2 * 8192,
        ),
        (
            ("f32[2,8,8,16] convolution(image, kernel), window={size=3x3 stride=2x2 pad=0_1x0_1}, "
            "dim_labels=b01f_01io->b01f"),
            OpClass.CONVOLUTION, 2 * 2 * 64 * 16 * 8 * 9, 4 * (4096 + 1152 + 2048),
        ),
        (
            ("f32[64,64] dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={1}, "
            "operand_precision={highest,highest}"),
            OpClass.CONTRACTION, 2 * 64 * 64 * 128, X + 64 * 64 * 4,
        ),
        ('f32[64,128] custom-call(x), custom_call_target="Sharding"', OpClass.FREE, 0, 0),
        ("f32[64,128,2] broadcast(x), dimensions={0,1}", OpClass.BROADCAST, 0, 3 * X),
        ("f32[64,128] exponential-minus-one(x)", OpClass.TRANSCENDENTAL, 0, 2 * X),
        ("f32[64,128] round-nearest-even(x)", OpClass.ELEMENTWISE, 8192, 2 * X),
    ],
)  # fmt: skip
def test_single_operations(
    read_text: ReadText, line: str, op_class: OpClass, flops: float, moved: float
) -> None:
    graph = read_text(_single(line))[0].classes[0]
    node = _node(graph, "r")
    assert OpClass(int(graph.op_class[node])) is op_class
    assert graph.flops[node] == pytest.approx(flops)
    assert graph.bytes_moved[node] == moved


def test_compiled_programs_write_broadcasts_and_iotas_out(read_text: ReadText) -> None:
    scheduled = ", is_scheduled=true"
    graph = read_text(_single("f32[64,128,2] broadcast(x), dimensions={0,1}", scheduled))[0].classes[0]
    assert graph.bytes_moved[_node(graph, "r")] == 3 * X
    graph = read_text(_single("s32[64,128] iota(), iota_dimension=0", scheduled))[0].classes[0]
    assert (graph.bytes_read[_node(graph, "r")], graph.bytes_written[_node(graph, "r")]) == (0, X)


def test_emulated_precision_and_algorithms(read_text: ReadText) -> None:
    dims = "lhs_contracting_dims={1}, rhs_contracting_dims={1}"
    line = f"f32[64,64] dot(x, x), {dims}, "
    table = read_text(_single(line + "operand_precision={highest,highest}"))[0].classes[0].contractions
    assert table.products.tolist() == [6]
    table = read_text(_single(line + "algorithm=dot_bf16_bf16_f32_x3"))[0].classes[0].contractions
    assert (table.products.tolist(), table.lhs.tolist()) == ([3], [dtype("bf16").code])


def test_a_library_product_is_a_contraction(read_text: ReadText) -> None:
    config = (
        '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["1"]}}}'
    )
    line = '(f32[64,64], s8[4096]) custom-call(x, x), custom_call_target="__cublas$gemm", backend_config='
    workload, diagnostics = read_text(_single(line + config))
    graph = workload.classes[0]
    node = _node(graph, "r")
    assert graph.flops[node] == 2 * 64 * 64 * 128
    assert graph.bytes_written[node] == 64 * 64 * 4
    assert len(diagnostics) == 0


def test_what_is_unknown_is_nan_and_told_in_full(read_text: ReadText) -> None:
    text = """HloModule m
fused {
  p = f32[8] parameter(0)
  ROOT q = f32[8] frobnicate(p)
}
ENTRY e {
  x = f32[8] parameter(0)
  a = f32[8] frobnicate(x)
  b = f32[8] frobnicate(x)
  c = f32[8] twiddle(x)
  d = f32[8] custom-call(x), custom_call_target="acme"
  f = f32[8] fusion(x), kind=kLoop, calls=fused
  ROOT g = q7[8] negate(x)
}
"""
    workload, diagnostics = read_text(text)
    graph = workload.classes[0]
    for name in "abcdf":
        assert isnan(graph.flops[_node(graph, name)])
    for name in "abcd":
        assert graph.op_class[_node(graph, name)] in {OpClass.UNKNOWN, OpClass.CUSTOM}
        assert graph.bytes_moved[_node(graph, name)] == 64
    assert isnan(graph.bytes_written[_node(graph, "g")])
    assert diagnostics.counts() == {"hlo.unknown-op": 4, "hlo.unknown-custom-call": 1, "hlo.unknown-type": 1}
    messages = [f"{found.location}: {found.message}" for found in diagnostics]
    assert any(
        "line 8, %a" in text and "frobnicate" in text and "%b" in text and "%q" in text for text in messages
    )
    assert any("line 10, %c" in text and "twiddle" in text for text in messages)
    assert any("line 11, %d" in text and "acme" in text for text in messages)
    assert any("line 13, %g" in text and "q7" in text for text in messages)


def test_bounded_shapes_give_upper_bounds(read_text: ReadText) -> None:
    workload, diagnostics = read_text(
        "HloModule m\nENTRY e {\n  x = f32[<=32,8] parameter(0)\n  y = f32[<=32,8] abs(x)\n}"
    )
    graph = workload.classes[0]
    assert graph.flops[1] == 256
    assert graph.types.bounded[graph.results.row(1)].tolist() == [True]
    assert diagnostics.counts() == {"hlo.bounded-shape": 1}


def test_spec_and_useful_work_of_a_padded_convolution(read_text: ReadText) -> None:
    window = "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f"
    line = f"f32[2,16,16,16] convolution(image, kernel), {window}"
    graph = read_text(_single(line))[0].classes[0]
    node = _node(graph, "r")
    taps = 16 * 3 - 2
    assert graph.flops[node] == 2 * 2 * 16 * 16 * 9 * 8 * 16
    assert graph.useful_flops[node] == 2 * 2 * taps * taps * 8 * 16
    assert np.isclose(graph.contractions.useful_flops.sum(), graph.useful_flops[node])
