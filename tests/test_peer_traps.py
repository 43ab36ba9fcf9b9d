"""Cases in which other tools are wrong, one test per row of the table of traps, with the right answer.

Inputs are small programs written here or the repository's own fixtures; where sample workloads lie beside the
repository, the totals of whole training steps are checked too. Device times are those of an A100 SXM 40 GB by
its peaks (312 TFLOP/s in bf16, 1.555 TB/s), launch overhead taken off.
"""

from __future__ import annotations

import ast
import json
import re
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import tools.examples as documented
from hespas.cli import main, validate
from hespas.converters import format_names, load_format
from hespas.estimators import estimator_names, registry
from hespas.graph import CollectiveKind, Diagnostics, Estimate, NodeKind, OpClass, OpGraph, Workload
from hespas.graph.passes import is_topological
from hespas.hardware import Device, all_device_names, device_names, load_device, system_names
from tests.trap_bench import (
    A100,
    Bench,
    all_reduce,
    ancestors,
    hespas_convert,
    longest_path_us,
    module,
    only,
    read_graph,
    read_workload,
    times_us,
    total_us,
    trace_nodes,
)
from tools.generate import REFERENCE, documents_with_commands, reference_pages

pytest.importorskip("jaxlib")

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "fixtures" / "stablehlo"
LLAMA = FIXTURES / "llama_fsdp_tp_local_N8.mlir.gz"
SHARED = ROOT.parent / "shared" / "data" / "workloads"
needs_samples = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the sample workloads are not beside the repository"
)
GRANULARITIES = ("op", "fused", "region")
runner = CliRunner()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@cache
def _sample(name: str) -> Workload:
    return read_workload(SHARED / f"{name}.mlir.gz")


# 1-3


CHAIN = module(
    """%0 = stablehlo.convolution(%x, %k0)
      dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], window = {pad = [[3, 3], [3, 3]]}
      {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
      : (tensor<8x32x32x3xf32>, tensor<7x7x3x16xf32>) -> tensor<8x32x32x16xf32>
    %1 = stablehlo.tanh %0 : tensor<8x32x32x16xf32>
    %2 = stablehlo.reshape %1 : (tensor<8x32x32x16xf32>) -> tensor<8x16384xf32>
    %3 = stablehlo.dot_general %2, %w, contracting_dims = [1] x [0]
      : (tensor<8x16384xf32>, tensor<16384x10xf32>) -> tensor<8x10xf32>
    %4 = stablehlo.negate %y : tensor<4096x4096xf32>""",
    "%x: tensor<8x32x32x3xf32>, %k0: tensor<7x7x3x16xf32>, "
    "%w: tensor<16384x10xf32>, %y: tensor<4096x4096xf32>",
    "%3: tensor<8x10xf32>; %4: tensor<4096x4096xf32>",
)


def test_trap_01_edges_point_from_the_first_block_to_the_last(bench: Bench) -> None:
    graph = bench.traces(CHAIN, "--hardware", A100).classes[0]
    stem, tanh, dot, side = (only(graph, op) for op in ("convolution", "tanh", "dot_general", "negate"))
    assert [graph.data_deps.row(node).tolist() for node in (stem, tanh, dot, side)] == [
        [],
        [stem],
        [tanh],
        [],
    ]
    chain, alone = float(graph.duration_ns[[stem, tanh, dot]].sum()), float(graph.duration_ns[side])
    assert longest_path_us(graph) == pytest.approx(max(chain, alone) / 1e3)
    assert longest_path_us(graph) < float(graph.duration_ns.sum()) / 1e3


@needs_samples
def test_trap_01_the_stem_of_resnet_50_has_no_predecessor() -> None:
    graph = _sample("resnet_50_train_step_4_devices_1024_batch").classes[0]
    convolutions = np.flatnonzero(graph.op_class == OpClass.CONVOLUTION).tolist()
    assert is_topological(graph)
    assert not ancestors(graph, convolutions[0]) & set(convolutions)
    assert convolutions[0] in ancestors(graph, convolutions[-1])


GATHER_THEN_SCATTER = module(
    """%0 = stablehlo.tanh %x : tensor<512x512xf32>
    %1 = "stablehlo.all_gather"(%0) <{
        all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>}>
      : (tensor<512x512xf32>) -> tensor<2048x512xf32>
    %2 = stablehlo.negate %1 : tensor<2048x512xf32>
    %3 = "stablehlo.reduce_scatter"(%2) <{
        replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, scatter_dimension = 0 : i64}> ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %s = stablehlo.add %a, %b : tensor<f32>
        stablehlo.return %s : tensor<f32>
      }) : (tensor<2048x512xf32>) -> tensor<512x512xf32>""",
    "%x: tensor<512x512xf32>",
    "%3: tensor<512x512xf32>",
    replicas=4,
)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_trap_02_merging_keeps_every_collective(granularity: str, bench: Bench) -> None:
    table = bench.traces(GATHER_THEN_SCATTER, "--granularity", granularity).classes[0].collectives
    assert table.kind.tolist() == [CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER]
    assert table.comm_bytes.tolist() == [1_048_576, 4_194_304]
    before, after = read_graph(LLAMA), bench.traces(LLAMA, "--granularity", granularity).classes[0]
    assert len(after.collectives) == len(before.collectives) == 73
    assert after.collectives.comm_bytes.sum() == before.collectives.comm_bytes.sum()


@needs_samples
def test_trap_02_resnet_50_keeps_375_all_reduces_in_the_coarsest_graph(bench: Bench) -> None:
    source = SHARED / "resnet_50_train_step_4_devices_1024_batch.mlir.gz"
    table = bench.traces(source, "--granularity", "region").classes[0].collectives
    assert (len(table), table.comm_bytes.sum()) == (375, 102_865_576)


def test_trap_03_nothing_is_remembered_under_a_name(bench: Bench) -> None:
    program = "%0 = stablehlo.negate %x : {0}", "%x: {0}", "%0: {0}"
    times: list[float] = []
    for tensor in ("tensor<64x64xf32>", "tensor<4096x4096xf32>", "tensor<64x64xf32>"):
        body, arguments, results = (part.format(tensor) for part in program)
        graph = bench.traces(module(body, arguments, results), "--hardware", A100).classes[0]
        times.append(float(graph.duration_ns[0]))
    assert times[0] == times[2] < times[1] / 10
    assert sorted(path.name for path in bench.folder.iterdir()) == ["program.mlir", "traces"]


def test_trap_03_no_format_runs_what_it_reads() -> None:
    forbidden = {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle", "joblib"}
    files = sorted((ROOT / "hespas").rglob("*.py"))
    assert files
    for file in files:
        nodes = list(ast.walk(ast.parse(file.read_text())))
        imports = [node for node in nodes if isinstance(node, ast.Import)]
        froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in imports for alias in node.names}
        for node in froms:
            written = {alias.name for alias in node.names} <= {"dumps", "PROTO"}
            names |= set() if node.module == "pickle" and written else {node.module or ""}
        assert not names & forbidden, file


# 4-6


def test_trap_04_hexadecimal_groups_are_decoded(bench: Bench) -> None:
    rows = [[device, device + 64] for device in range(64)]
    blob = "".join(struct.pack("<q", device).hex().upper() for row in rows for device in row)
    body = all_reduce("%0", "%x", "tensor<256xf32>", f'"0x{blob}"', "64x2")
    text = module(body, "%x: tensor<256xf32>", "%0: tensor<256xf32>", replicas=128)
    for workload in (read_workload(bench.file(text)), bench.traces(text)):
        (groups,) = workload.group_sets
        assert workload.num_ranks == 128
        assert (groups.num_groups, groups.group_size) == (64, 2)
        assert [members.tolist() for members in groups] == rows


TOY = """
name = "toy"
vendor = "nobody"
family = "toy"
kind = "gpu"
description = "round figures, no launch overhead"
aliases = []
units = 1
unit_name = "SM"
launch_overhead_ns = 0.0
launch_overhead_source = "made"
subbyte_storage = "packed"
peaks = [{ unit = "vector", dtype = "f32", flops_per_s = 1e15, density = "dense", source = "made" }]
memories = [
  { level = "main", name = "RAM", capacity_bytes = 1e9, bandwidth_bytes_per_s = 400e9, source = "made" },
]
[[links]]
name = "wire"
kind = "scale_up"
bandwidth_bytes_per_s = 1e11
latency_ns = 4.985
topology = "switch"
links_per_device = 1
devices_per_domain = 4
source = "made"
latency_source = "made"
[sources]
made = "round figures"
""".replace("1e9,", "1_000_000_000,")
"""A device on which 12,000 bytes are squared in 60 ns and all-reduced over four ranks in 199.94 ns."""


def test_trap_05_durations_below_a_microsecond_add_up(bench: Bench) -> None:
    body, last = "", "%x"
    for block in range(200):
        body += all_reduce(f"%r{block}", last, "tensor<3000xf32>")
        last = f"%r{block}"
        for place in range(3):
            body += f"%m{block}_{place} = stablehlo.multiply {last}, {last} : tensor<3000xf32>\n"
            last = f"%m{block}_{place}"
    text = module(body, "%x: tensor<3000xf32>", f"{last}: tensor<3000xf32>", replicas=4)
    device = bench.file(TOY, "toy.toml")
    asked = ("--hardware", str(device), "--estimator", "roofline", "--granularity", "op")
    graph = bench.traces(text, *asked).classes[0]
    assert len(graph) == 800
    assert graph.duration_ns.min() >= 60
    assert graph.duration_ns.sum() == pytest.approx(75_988, abs=1)
    nodes = list(trace_nodes(bench.folder / "traces" / "traces.0.et"))
    assert sum(node.duration_micros for node in nodes) == 76
    nanos = [attr.uint64_val for node in nodes for attr in node.attr if attr.name == "duration_nanos"]
    assert sum(nanos) == pytest.approx(75_988, abs=1)


def test_trap_05_no_costly_node_takes_zero_time(bench: Bench) -> None:
    graph = bench.traces(LLAMA, "--hardware", "H100-SXM", "--granularity", "op").classes[0]
    costly = (graph.flops > 0) | (graph.bytes_moved > 0)
    costly[graph.collectives.node] = True
    assert costly.sum() > 400
    assert (graph.duration_ns[costly] > 0).all()


def test_trap_06_a_collective_states_its_shard_or_its_input(bench: Bench) -> None:
    graph = bench.traces(GATHER_THEN_SCATTER).classes[0]
    assert graph.collectives.comm_bytes.tolist() == [1_048_576, 4_194_304]
    nodes = list(trace_nodes(bench.folder / "traces" / "traces.0.et"))
    sizes = [attr.int64_val for node in nodes for attr in node.attr if attr.name == "comm_size"]
    assert sizes == [1_048_576, 4_194_304]


@needs_samples
def test_trap_06_collectives_of_the_sharded_llama_step() -> None:
    table = _sample("llama_sdy_local_N8").classes[0].collectives
    gathers, reduces = table.kind == CollectiveKind.ALL_GATHER, table.kind == CollectiveKind.ALL_REDUCE
    assert (int(gathers.sum()), int(reduces.sum())) == (31, 41)
    assert table.operand_bytes[gathers].sum() == table.comm_bytes[gathers].sum() == 1_245_184
    assert table.result_bytes[gathers].sum() == 2_621_440
    assert table.comm_bytes[reduces].sum() == 5_253_620


# 7-10


def _convolution(x: str, kernel: str, result: str, dims: str, window: str = "") -> str:
    return module(
        f"%0 = stablehlo.convolution(%x, %k) dim_numbers = {dims}, window = {{{window}}} "
        "{batch_group_count = 1 : i64, feature_group_count = 1 : i64} : "
        f"(tensor<{x}>, tensor<{kernel}>) -> tensor<{result}>",
        f"%x: tensor<{x}>, %k: tensor<{kernel}>",
        f"%0: tensor<{result}>",
    )


@pytest.mark.parametrize(
    ("text", "flops", "useful"),
    [
        pytest.param(
            _convolution(
                "1x4x4x1xf32", "3x3x1x1xf32", "1x2x2x1xf32",
                "[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]", "stride = [4, 4], lhs_dilate = [2, 2]",
            ),
            72, 32, id="input dilated by 2",
        ),
        pytest.param(
            _convolution(
                "8x64x56x56xf32", "128x64x3x3xf32", "8x128x56x56xf32",
                "[b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1]", "pad = [[1, 1], [1, 1]]",
            ),
            2 * 8 * 128 * 64 * (56 * 3) ** 2, 2 * 8 * 128 * 64 * (56 * 3 - 2) ** 2, id="NCHW with OIHW",
        ),
        pytest.param(
            _convolution(
                "8x56x56x64xf32", "8x56x56x128xf32", "3x3x64x128xf32",
                "[f, 0, 1, b]x[i, 0, 1, o]->[0, 1, b, f]", "pad = [[1, 1], [1, 1]]",
            ),
            2 * 8 * 128 * 64 * (56 * 3) ** 2, 2 * 8 * 128 * 64 * (56 * 3 - 2) ** 2, id="gradient of a kernel",
        ),
        pytest.param(
            _convolution("4x100x16xf32", "5x16x32xf32", "4x96x32xf32", "[b, 0, f]x[0, i, o]->[b, 0, f]"),
            2 * 4 * 96 * 32 * 16 * 5, 2 * 4 * 96 * 32 * 16 * 5, id="one dimension",
        ),
        pytest.param(
            _convolution(
                "2x8x8x8x4xf32", "3x3x3x4x8xf32", "2x8x8x8x8xf32",
                "[b, 0, 1, 2, f]x[0, 1, 2, i, o]->[b, 0, 1, 2, f]", "pad = [[1, 1], [1, 1], [1, 1]]",
            ),
            2 * 2 * 8 * 4 * (8 * 3) ** 3, 2 * 2 * 8 * 4 * (8 * 3 - 2) ** 3, id="three dimensions",
        ),
    ],
)  # fmt: skip
def test_trap_07_convolutions_cost_what_their_dimension_numbers_say(
    text: str, flops: float, useful: float, bench: Bench
) -> None:
    graph = bench.graph(text)
    node = only(graph, "convolution")
    assert (graph.flops[node], graph.useful_flops[node]) == (flops, useful)


@needs_samples
@pytest.mark.parametrize(
    ("name", "convolutions", "products"),
    [
        ("resnet_50_train_step_4_devices_1024_batch", (158, 7223.6, 6001.867), (3, 3.145728)),
        ("resnet_50_inference_step_4_devices_1024_batch", (53, 2092.6, 2020.456), (1, 1.048576)),
        ("convolution", (1, 72e-9, 32e-9), (0, 0)),
        ("llama_sdy_local_N8", (0, 0, 0), (57, 1.912602624)),
        ("llama_sdy_global_N8", (0, 0, 0), (57, 15.300820992)),
    ],
)
def test_trap_07_totals_of_whole_programs_in_gflop(
    name: str, convolutions: tuple[int, float, float], products: tuple[int, float]
) -> None:
    graph = _sample(name).classes[0]
    convolves, contracts = graph.op_class == OpClass.CONVOLUTION, graph.op_class == OpClass.CONTRACTION
    assert (int(convolves.sum()), int(contracts.sum())) == (convolutions[0], products[0])
    assert graph.flops[convolves].sum() / 1e9 == pytest.approx(convolutions[1], rel=1e-5)
    assert graph.useful_flops[convolves].sum() / 1e9 == pytest.approx(convolutions[2], rel=1e-6)
    assert graph.flops[contracts].sum() / 1e9 == pytest.approx(products[1], rel=1e-12)


_GEMM = {
    "gemm_backend_config": {
        "dot_dimension_numbers": {
            "lhs_contracting_dimensions": ["1"],
            "rhs_contracting_dimensions": ["0"],
            "lhs_batch_dimensions": [],
            "rhs_batch_dimensions": [],
        }
    }
}
CUBLAS = f"""%0:2 = stablehlo.custom_call @__cublas$gemm(%x, %w) {{
        backend_config = {json.dumps(json.dumps(_GEMM))}}}
      : (tensor<8192x8192xbf16>, tensor<8192x8192xbf16>) -> (tensor<8192x8192xbf16>, tensor<4194304xui8>)"""
SQUARES = "%x: tensor<8192x8192xbf16>, %w: tensor<8192x8192xbf16>"


def test_trap_08_a_library_product_costs_a_product(bench: Bench) -> None:
    graph = bench.graph(module(CUBLAS, SQUARES, "%0#0: tensor<8192x8192xbf16>"))
    assert times_us(graph)["custom_call"] == pytest.approx(3524, abs=0.5)


def test_trap_08_an_unknown_call_is_unknown_and_never_zero(bench: Bench) -> None:
    unknown = CUBLAS.replace("__cublas$gemm", "acme_gemm")
    diagnostics = Diagnostics()
    graph = bench.graph(module(unknown, SQUARES, "%0#0: tensor<8192x8192xbf16>"), diagnostics)
    assert np.isnan(graph.flops[0])
    assert np.isnan(times_us(graph)["custom_call"])
    assert any("@acme_gemm" in found.message for found in diagnostics)


def test_trap_09_the_operands_set_the_rate(bench: Bench) -> None:
    dot = (
        "%0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : "
        "(tensor<8192x8192xbf16>, tensor<8192x8192xbf16>) -> tensor<8192x8192xf32>"
    )
    graph = bench.graph(module(dot, SQUARES, "%0: tensor<8192x8192xf32>"))
    assert times_us(graph)["dot_general"] == pytest.approx(3524, abs=0.5)


def test_trap_09_a_product_inside_a_fusion_runs_on_the_matrix_unit(bench: Bench) -> None:
    text = """HloModule fused_product
fused {
  a = f32[8192,8192]{1,0} parameter(0)
  b = f32[8192,8192]{1,0} parameter(1)
  product = f32[8192,8192]{1,0} dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT out = f32[8192,8192]{1,0} negate(product)
}
ENTRY main {
  x = f32[8192,8192]{1,0} parameter(0)
  y = f32[8192,8192]{1,0} parameter(1)
  ROOT fusion = f32[8192,8192]{1,0} fusion(x, y), kind=kOutput, calls=fused
}
"""
    graph = bench.graph(text, name="program.hlo")
    # 7,048 us for the product in TF32; negating adds its 3.4 us on the vector unit.
    assert times_us(graph)["fusion"] == pytest.approx(7048 + 3.4, abs=0.5)


def test_trap_10_booleans_take_a_byte(bench: Bench) -> None:
    tensor = "tensor<8192x8192xi1>"
    text = module(f"%0 = stablehlo.and %p, %q : {tensor}", f"%p: {tensor}, %q: {tensor}", f"%0: {tensor}")
    graph = bench.graph(text)
    assert graph.bytes_moved[0] == 3 * 8192**2
    assert times_us(graph)["and"] == pytest.approx(129, abs=0.5)


def test_trap_10_a_variadic_reduction_reads_all_its_inputs(bench: Bench) -> None:
    text = module(
        """%f = stablehlo.constant dense<0.0> : tensor<f32>
    %i = stablehlo.constant dense<0> : tensor<i32>
    %0:2 = "stablehlo.reduce"(%x, %y, %f, %i) <{dimensions = array<i64: 1>}> ({
      ^bb0(%a: tensor<f32>, %b: tensor<i32>, %c: tensor<f32>, %d: tensor<i32>):
        %m = stablehlo.maximum %a, %c : tensor<f32>
        %n = stablehlo.maximum %b, %d : tensor<i32>
        stablehlo.return %m, %n : tensor<f32>, tensor<i32>
      }) : (tensor<8192x8192xf32>, tensor<8192x8192xi32>, tensor<f32>, tensor<i32>)
        -> (tensor<8192xf32>, tensor<8192xi32>)""",
        "%x: tensor<8192x8192xf32>, %y: tensor<8192x8192xi32>",
        "%0#0: tensor<8192xf32>; %0#1: tensor<8192xi32>",
    )
    assert times_us(bench.graph(text))["reduce"] == pytest.approx(2 * 172.6, abs=0.2)


TABLE_ROW = module(
    """%0 = "stablehlo.gather"(%table, %row) <{
        dimension_numbers = #stablehlo.gather<
          offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>,
        slice_sizes = array<i64: 1, 4096>}>
      : (tensor<128256x4096xbf16>, tensor<1x1xi32>) -> tensor<1x4096xbf16>
    %1 = "stablehlo.scatter"(%table, %row, %0) <{
        scatter_dimension_numbers = #stablehlo.scatter<
          update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0],
          index_vector_dim = 1>}> ({
      ^bb0(%a: tensor<bf16>, %b: tensor<bf16>):
        %s = stablehlo.add %a, %b : tensor<bf16>
        stablehlo.return %s : tensor<bf16>
      }) : (tensor<128256x4096xbf16>, tensor<1x1xi32>, tensor<1x4096xbf16>) -> tensor<128256x4096xbf16>""",
    "%table: tensor<128256x4096xbf16> {tf.aliasing_output = 0 : i32}, %row: tensor<1x1xi32>",
    "%1: tensor<128256x4096xbf16>",
)


def test_trap_10_a_row_of_a_table_costs_a_row(bench: Bench) -> None:
    graph = bench.graph(TABLE_ROW)
    gather, scatter = only(graph, "gather"), only(graph, "scatter")
    row = 4096 * 2
    assert graph.bytes_moved[gather] == 4 + 2 * row
    assert times_us(graph)["gather"] < 0.02
    # In place: the index, the update, and the row both read and written.
    assert graph.bytes_moved[scatter] == 4 + 3 * row
    copied = bench.graph(TABLE_ROW.replace("{tf.aliasing_output = 0 : i32}", ""))
    assert copied.bytes_moved[only(copied, "scatter")] == 4 + 3 * row + 2 * 128_256 * row


# 11-14


def test_trap_11_a_dynamic_extent_is_unknown_and_said(bench: Bench) -> None:
    tensor = "tensor<?x1024xf32>"
    text = module(f"%0 = stablehlo.add %x, %y : {tensor}", f"%x: {tensor}, %y: {tensor}", f"%0: {tensor}")
    diagnostics = Diagnostics()
    graph = bench.graph(text, diagnostics)
    assert np.isnan([graph.flops[0], graph.bytes_moved[0], times_us(graph)["add"]]).all()
    assert diagnostics.counts()["stablehlo.dynamic-shape"] == 1
    strict = hespas_convert(bench.file(text), bench.folder / "out", "--hardware", A100, "--missing", "error")
    assert strict.exit_code == 4
    assert "stablehlo.add" in strict.stderr
    assert not (bench.folder / "out").exists()


_SHARED_CONSTANT = """%i = stablehlo.iota dim = 0 : tensor<4096x4096xf32>
    %s = stablehlo.sine %i : tensor<4096x4096xf32>
    %mask = stablehlo.multiply %s, %s : tensor<4096x4096xf32>"""
_TABLE_FUNCTION = f"""func.func private @table() -> tensor<4096x4096xf32> {{
    {_SHARED_CONSTANT}
    return %mask : tensor<4096x4096xf32>
}}
}}"""


def _masked_blocks(mask: str) -> str:
    """Three blocks between two all-reduces, each multiplied by what is computed from constants once."""
    body, last = mask + "\n", "%x"
    for block in range(3):
        body += f"%m{block} = stablehlo.multiply {last}, %mask : tensor<4096x4096xf32>\n"
        last = f"%m{block}"
        if block < 2:
            body += all_reduce(f"%r{block}", last, "tensor<4096x4096xf32>")
            last = f"%r{block}"
    return module(body, "%x: tensor<4096x4096xf32>", f"{last}: tensor<4096x4096xf32>", replicas=4)


def test_trap_12_constants_are_computed_once_however_the_program_is_cut(bench: Bench) -> None:
    inline = _masked_blocks(_SHARED_CONSTANT)
    called = _masked_blocks("%mask = func.call @table() : () -> tensor<4096x4096xf32>")
    called = called[: called.rindex("}")] + _TABLE_FUNCTION
    totals = [total_us(bench.graph(text)) for text in (inline, called)]
    assert totals[0] == totals[1]
    elements = 4096**2
    moved: list[float] = []
    for granularity in GRANULARITIES:
        graph = bench.traces(inline, "--granularity", granularity, "--hardware", A100).classes[0]
        assert graph.flops.sum() == 4 * elements
        assert np.nansum(graph.transcendentals) == elements
        moved.append(float(graph.bytes_moved.sum()))
    assert moved == sorted(moved, reverse=True), "a coarser graph never moves more"


def _grouped(groups: str, of: str, replicas: int, partitions: int = 1) -> str:
    body = all_reduce("%0", "%x", "tensor<64xf32>", groups, of)
    return module(body, "%x: tensor<64xf32>", "%0: tensor<64xf32>", replicas, partitions)


def test_trap_13_the_program_says_how_many_devices_run_it(bench: Bench) -> None:
    workload = bench.traces(_grouped("[[0, 1]]", "1x2", replicas=2, partitions=4))
    assert workload.num_ranks == 8
    (groups,) = workload.group_sets
    assert [members.tolist() for members in groups] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    text = _grouped("[[0, 1, 2, 3]]", "1x4", replicas=4)
    other = hespas_convert(bench.file(text), bench.folder / "out", "--num-devices", "8")
    assert other.exit_code == 2
    assert "4 replicas x 1 partitions" in other.stderr


def test_trap_13_padding_is_nobody(bench: Bench) -> None:
    workload = bench.traces(_grouped("[[0, 1, 2, 3, 4], [5, 6, 7, -1, -1]]", "2x5", replicas=8))
    (groups,) = workload.group_sets
    assert [members.tolist() for members in groups] == [[0, 1, 2, 3, 4], [5, 6, 7]]


def test_trap_13_a_device_in_no_group_joins_none(bench: Bench) -> None:
    diagnostics = Diagnostics()
    (groups,) = read_workload(bench.file(_grouped("[[0, 1]]", "1x2", replicas=4)), diagnostics).group_sets
    assert [groups.group_of(rank) for rank in range(4)] == [0, 0, -1, -1]
    assert any("2 of 4 devices are in no group" in found.message for found in diagnostics)


@pytest.mark.parametrize("groups", ["[[0, 1], [2, 7]]", "[[0, 1], [1, 2]]"], ids=["outside", "twice"])
def test_trap_13_impossible_groups_are_an_error(groups: str, bench: Bench) -> None:
    done = hespas_convert(bench.file(_grouped(groups, "2x2", replicas=4)), bench.folder / "out")
    assert done.exit_code == 3
    assert "line 3" in done.stderr
    assert not (bench.folder / "out").exists()


@dataclass(frozen=True)
class _Silent:
    """An estimator whose back end returns nothing."""

    name: str = "silent"

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        nothing = np.full(len(graph), np.nan)
        nobody = np.full(len(graph), -1, np.int8)
        return Estimate(
            hardware=device.name, estimators=("silent",), bounds=("none",), duration_ns=nothing,
            low_ns=nothing, high_ns=nothing, estimator=nobody, bound=nobody,
        )  # fmt: skip


@dataclass(frozen=True)
class _Broken(_Silent):
    """An estimator whose back end fails."""

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        raise RuntimeError("the profiler did not start")


@pytest.mark.parametrize(
    ("kind", "options", "code"), [("_Broken", [], 70), ("_Silent", ["--missing", "error"], 4)]
)
def test_trap_14_a_failing_back_end_fails_the_conversion(
    kind: str, options: list[str], code: int, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.BUILTIN, "backend", f"{__name__}:{kind}")
    out = bench.folder / "out"
    done = hespas_convert(bench.file(CHAIN), out, "--hardware", A100, "--estimator", "backend", *options)
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    assert not out.exists()


def test_trap_14_what_nobody_estimated_stays_unknown(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILTIN, "backend", f"{__name__}:_Silent")
    done = hespas_convert(
        bench.file(CHAIN), bench.folder / "out.et", "--hardware", A100, "--estimator", "backend"
    )
    assert done.exit_code == 0
    assert "stay unknown" in done.stderr
    assert np.isnan(read_graph(bench.folder / "out.et").duration_ns).all()


# 15-19


EVERYTHING = (
    """module @everything attributes {mhlo.num_replicas = 4 : i32, mhlo.num_partitions = 1 : i32} {
  func.func public @main(%x: tensor<1024xf32>, %which: tensor<i32>) -> tensor<1024xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %limit = stablehlo.constant dense<7> : tensor<i32>
    %0:2 = stablehlo.while(%i = %zero, %v = %x) : tensor<i32>, tensor<1024xf32>
      cond {
        %c = stablehlo.compare LT, %i, %limit, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %c : tensor<i1>
      } do {
        %s = func.call @reduced(%v) : (tensor<1024xf32>) -> tensor<1024xf32>
        %n = stablehlo.add %i, %one : tensor<i32>
        stablehlo.return %n, %s : tensor<i32>, tensor<1024xf32>
      }
    %1 = "stablehlo.case"(%which) ({
      %a = stablehlo.tanh %0#1 : tensor<1024xf32>
      stablehlo.return %a : tensor<1024xf32>
    }, {
      stablehlo.return %0#1 : tensor<1024xf32>
    }) : (tensor<i32>) -> tensor<1024xf32>
    %2 = "stablehlo.collective_broadcast"(%1) <{replica_groups = dense<[[2, 0, 1, 3]]> : tensor<1x4xi64>}>
      : (tensor<1024xf32>) -> tensor<1024xf32>
    return %2 : tensor<1024xf32>
  }
  func.func private @reduced(%x: tensor<1024xf32>) -> tensor<1024xf32> {
    """
    + all_reduce("%0", "%x", "tensor<1024xf32>")
    + """    return %0 : tensor<1024xf32>
  }
}
"""
)


def test_trap_15_loops_branches_and_private_functions_convert(bench: Bench) -> None:
    workload = read_workload(bench.file(EVERYTHING))
    graph = workload.classes[0]
    reduce, broadcast = only(graph, "all_reduce"), only(graph, "collective_broadcast")
    assert (graph.executions[reduce], graph.executions[broadcast]) == (7, 1)
    assert graph.collectives.kind.tolist() == [CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST]
    flat = bench.traces(EVERYTHING).classes[0]
    assert len(flat.collectives) == 7 + 1


@pytest.mark.parametrize("name", ["hand_async", "hand_quantized", "hand_structure", "hand_collectives"])
def test_trap_15_async_quantised_and_composite_programs_convert(name: str, bench: Bench) -> None:
    graph = bench.traces(FIXTURES / f"{name}.mlir", "--hardware", A100, "--missing", "error").classes[0]
    assert len(graph)
    assert (graph.duration_ns[graph.kind == NodeKind.COMPUTE] > 0).all()


def test_trap_15_a_program_of_constants_only_converts(bench: Bench) -> None:
    tensor = "tensor<4xf32>"
    text = module(f"%0 = stablehlo.constant dense<1.0> : {tensor}", "", f"%0: {tensor}")
    assert len(bench.graph(text)) == 2, "the constant and the return"
    done = hespas_convert(bench.file(text), bench.folder / "out.et", "--hardware", A100, "--missing", "error")
    assert done.exit_code == 0, done.output


def test_trap_15_all_problems_are_listed_in_one_run(bench: Bench) -> None:
    calls = [
        f"%{n} = stablehlo.custom_call @acme_{n}(%x) : (tensor<8xf32>) -> tensor<8xf32>" for n in range(5)
    ]
    text = module("\n".join(calls), "%x: tensor<8xf32>", "%4: tensor<8xf32>")
    log = bench.folder / "log.json"
    done = hespas_convert(bench.file(text), bench.folder / "out.et", "--hardware", A100, "--log-json", log)
    assert done.exit_code == 0
    found = [row for row in json.loads(log.read_text())["diagnostics"] if "custom-call" in row["code"]]
    assert [re.findall(r"@acme_\d", row["message"]) for row in found] == [[f"@acme_{n}"] for n in range(5)]
    assert [row["location"].rpartition("program.mlir:")[2] for row in found] == [
        f"{n + 3}:6" for n in range(5)
    ]


def test_trap_16_names_that_commands_print_are_names_that_commands_take(bench: Bench) -> None:
    listed = runner.invoke(main.app, ["hardware", "list"]).stdout
    devices, systems = (part.splitlines()[1:] for part in listed.split("\n\n"))
    named = [line.split()[0] for line in devices if not line.startswith(" ")]
    assert named == list(all_device_names())
    assert [line.split()[0] for line in systems if not line.startswith(" ")] == list(system_names())
    for name in estimator_names():
        out = bench.folder / f"{name}.et"
        done = hespas_convert(bench.file(CHAIN), out, "--hardware", A100, "--estimator", name)
        # Some need a table, an extra or another program, and say so.
        assert done.exit_code == 0 or (done.exit_code in (2, 4) and "\n  try: " in done.output), done.output
    formats = json.loads(hespas_convert("--list-formats", "--json").stdout)
    assert [row["name"] for row in formats] == list(format_names())
    both = [row["name"] for row in formats if row["write"] and row["read"]]
    for name in (name for name in both if not load_format(name).profiles):
        out, again = bench.folder / f"out-{name}", bench.folder / f"again-{name}"
        assert hespas_convert(bench.file(CHAIN), out, "--to", name).exit_code == 0
        assert hespas_convert(out, again, "--from", name, "--to", name).exit_code == 0


@pytest.mark.parametrize("name", device_names())
def test_trap_17_every_shipped_device_is_a_device_file(name: str, bench: Bench) -> None:
    shown = runner.invoke(main.app, ["hardware", "show", name])
    assert shown.exit_code == 0, shown.output
    again = load_device(bench.file(shown.stdout, "shown.toml"))
    assert repr(again.peaks) == repr(load_device(name).peaks)  # NaN is not equal to itself


DOCUMENTS = [path for path in documents_with_commands() if documented.examples(path.read_text("utf-8"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_trap_17_every_documented_command_prints_what_the_document_says(document: Path, bench: Bench) -> None:
    examples = documented.examples(document.read_text())
    results = documented.run(examples, bench.folder)
    for example, printed in zip(examples, results, strict=True):
        if printed is not None:
            now, then = (documented.comparable(output) for output in (printed, example.output))
            assert now == then, f"$ {example.command}: run 'python -m tools.generate'"


def test_trap_17_documents_show_the_commands() -> None:
    commands = [example.command for path in DOCUMENTS for example in documented.examples(path.read_text())]
    for start in ("hespas-convert ", "hespas-validate check ", "hespas estimate ", "hespas hardware "):
        assert any(command.startswith(start) for command in commands), start
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {command.removeprefix("make ") for command in commands if command.startswith("make ")} <= {
        *targets
    }


def test_trap_17_documented_commands_need_the_package_only() -> None:
    commands = [example.command for path in DOCUMENTS for example in documented.examples(path.read_text())]
    assert [command for command in commands if "fixtures" in command] == []


def test_trap_17_the_reference_is_made_from_the_registry_and_the_rules() -> None:
    pages = reference_pages()
    for path, text in pages.items():
        assert path.read_text("utf-8") == text, "run 'python -m tools.generate'"
    assert all(f"| `{name}` |" in pages[REFERENCE / "formats.md"] for name in format_names())


def test_trap_18_a_batch_multiplies_the_product(bench: Bench) -> None:
    def product(batch: int) -> str:
        tensor = f"tensor<{batch}x512x512xbf16>"
        return module(
            "%0 = stablehlo.dot_general %x, %w, batching_dims = [0] x [0], contracting_dims = [2] x [1] : "
            f"({tensor}, {tensor}) -> {tensor}",
            f"%x: {tensor}, %w: {tensor}",
            f"%0: {tensor}",
        )

    one, many = bench.graph(product(1)), bench.graph(product(32))
    row = many.contractions
    assert (int(row.batch[0]), int(row.m[0]), int(row.n[0]), int(row.k[0])) == (32, 512, 512, 512)
    assert many.flops[0] == 32 * one.flops[0] == 32 * 2 * 512**3
    assert times_us(many)["dot_general"] == pytest.approx(32 * times_us(one)["dot_general"])


def test_trap_19_only_files_of_ours_are_ever_replaced(bench: Bench) -> None:
    folder = bench.folder / "traces"
    (folder / "deep").mkdir(parents=True)
    (folder / "notes.txt").write_text("precious")
    (folder / "deep" / "model.bin").write_text("precious")
    refused = hespas_convert(bench.file(GATHER_THEN_SCATTER), folder)
    assert refused.exit_code == 2
    assert sorted(path.name for path in folder.iterdir()) == ["deep", "notes.txt"]
    # A folder is put in place in one step, and one inside it cannot come along.
    refused = hespas_convert(bench.file(GATHER_THEN_SCATTER), folder, "--overwrite")
    assert refused.exit_code == 2
    assert (folder / "deep" / "model.bin").read_text() == "precious"
    (folder / "deep").rename(bench.folder / "deep")
    bench.traces(GATHER_THEN_SCATTER)
    assert (folder / "notes.txt").read_text() == "precious"
    assert len(list(folder.glob("traces.*.et"))) == 4
    help_text = hespas_convert("--help").output + runner.invoke(validate.app, ["--help"]).output
    assert "--clean" not in help_text


# 20-22


@pytest.mark.parametrize("name", device_names())
def test_trap_20_every_peak_is_dense_and_sourced(name: str) -> None:
    device = load_device(name)
    for peak in device.peaks:
        assert peak.density == "dense"
        assert len(device.source_text(peak.source)) > 10


def test_trap_20_b200_and_h100_are_stated_alike() -> None:
    def bf16(name: str) -> float:
        peaks = load_device(name).peaks
        return next(peak.flops_per_s for peak in peaks if (peak.unit, peak.dtype) == ("matrix", "bf16"))

    assert bf16("H100-SXM") == pytest.approx(0.9895e15, rel=1e-3)
    assert bf16("B200-SXM") == pytest.approx(2.25e15, rel=1e-2)


def test_trap_21_views_are_free_and_updates_happen_in_place(bench: Bench) -> None:
    text = module(
        """%0 = stablehlo.reshape %x : (tensor<1024x1024xf32>) -> tensor<1048576xf32>
    %1 = stablehlo.bitcast_convert %0 : (tensor<1048576xf32>) -> tensor<1048576xi32>
    %2 = stablehlo.power %x, %y : tensor<1024x1024xf32>
    %3 = stablehlo.dynamic_update_slice %cache, %row, %at, %at
      : (tensor<4096x1024xf32>, tensor<1x1024xf32>, tensor<i32>, tensor<i32>) -> tensor<4096x1024xf32>""",
        "%cache: tensor<4096x1024xf32> {tf.aliasing_output = 2 : i32}, %row: tensor<1x1024xf32>, "
        "%x: tensor<1024x1024xf32>, %y: tensor<1024x1024xf32>, %at: tensor<i32>",
        "%1: tensor<1048576xi32>; %2: tensor<1024x1024xf32>; %3: tensor<4096x1024xf32>",
    )
    graph = bench.graph(text)
    moved = {graph.op_name(node).partition(".")[2]: graph.bytes_moved[node] for node in range(len(graph))}
    tensor, row = 4 * 1024**2, 4 * 1024
    assert (moved["reshape"], moved["bitcast_convert"], moved["power"]) == (0, 0, 3 * tensor)
    assert 2 * row <= moved["dynamic_update_slice"] <= 2 * row + 2 * 4
    kept = bench.graph(text.replace("{tf.aliasing_output = 2 : i32}", ""))
    assert kept.bytes_moved[only(kept, "dynamic_update_slice")] >= 2 * 4 * tensor


@pytest.mark.parametrize(
    ("content", "position"),
    [
        pytest.param(b"", "the file is empty", id="empty"),
        pytest.param(CHAIN.encode()[:400], "line 4", id="cut short"),
        pytest.param(bytes(range(256)) * 8, "byte", id="binary"),
        pytest.param(CHAIN.replace("stablehlo.tanh", "stablehlo.tahn").encode(), "line 7", id="misspelt"),
    ],
)
def test_trap_22_a_broken_input_is_named_with_its_position(
    content: bytes, position: str, bench: Bench
) -> None:
    program = bench.folder / "broken.mlir"
    program.write_bytes(content)
    done = hespas_convert(program, bench.folder / "out", "--hardware", A100)
    assert done.exit_code == 3
    assert "broken.mlir" in done.stderr
    assert position in done.stderr
    assert "try:" in done.stderr
    assert "Traceback" not in done.output
    assert [path.name for path in bench.folder.iterdir()] == ["broken.mlir"]


def test_trap_22_trace_nodes_keep_operation_shapes_and_work(bench: Bench) -> None:
    bench.traces(CHAIN)
    stem = next(trace_nodes(bench.folder / "traces" / "traces.0.et"))
    attributes = {attr.name: attr for attr in stem.attr}
    assert attributes["op_type"].string_val == "stablehlo.convolution"
    assert attributes["num_ops"].int64_val > 0
    assert attributes["tensor_size"].uint64_val > 0
    assert json.loads(stem.inputs.shapes) == [[8, 32, 32, 3], [7, 7, 3, 16]]
    assert json.loads(stem.outputs.types) == ["f32"]
