"""Cases in which other tools are wrong, by the rows of the list of traps, with the right answers."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from hespas.converters.format import ReadOptions
from hespas.graph import CollectiveKind, Diagnostics, NodeKind, OpClass, OpGraph, Workload, dtype
from hespas.graph.errors import FormatError

ReadText = Callable[..., tuple[Workload, Diagnostics]]
ReadGraph = Callable[..., OpGraph]


def reduce_of(value: str, shape: str, groups: str, more: str = "") -> str:
    return f""""stablehlo.all_reduce"({value}) <{{replica_groups = {groups}{more}}}> ({{
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }}) : ({shape}) -> {shape}"""


def test_trap_01_a_chain_starts_with_its_first_block(read_body: ReadGraph) -> None:
    body = "\n".join(f"  %x{n + 1} = stablehlo.tanh %x{n} : tensor<8xf32>" for n in range(5))
    graph = read_body("%x0: tensor<8xf32>", body + "\n  return %x5 : tensor<8xf32>", "tensor<8xf32>")
    assert [graph.data_deps.row(node).tolist() for node in range(5)] == [[], [0], [1], [2], [3]]


def test_trap_04_groups_stored_as_hex_are_64_groups_of_two(read_text: ReadText) -> None:
    rows = np.arange(128, dtype="<i8").reshape(64, 2)
    blob = f'dense<"0x{rows.tobytes().hex().upper()}"> : tensor<64x2xi64>'
    graph = read_text(
        f"""module attributes {{mhlo.num_replicas = 128 : i32}} {{
func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {{
  %0 = {reduce_of("%x", "tensor<8xf32>", blob)}
  return %0 : tensor<8xf32>
}}}}"""
    )[0].classes[0]
    (groups,) = graph.group_sets
    assert (groups.num_groups, groups.group_size) == (64, 2)
    assert groups.members(63).tolist() == [126, 127]


@pytest.mark.parametrize("listed", [True, False])
def test_trap_04_shuffled_hex_groups_survive(read_text: ReadText, listed: bool) -> None:
    ids = list(range(128))
    random.Random(4).shuffle(ids)
    rows = np.array(ids, "<i8").reshape(64, 2)
    text = f"dense<{rows.tolist()}>" if listed else f'dense<"0x{rows.tobytes().hex().upper()}">'
    graph = read_text(
        f"""module attributes {{mhlo.num_replicas = 128 : i32}} {{
func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {{
  %0 = {reduce_of("%x", "tensor<8xf32>", f"{text} : tensor<64x2xi64>")}
  return %0 : tensor<8xf32>
}}}}"""
    )[0].classes[0]
    assert [members.tolist() for members in graph.group_sets[0]] == rows.tolist()


def test_trap_06_collectives_state_the_operand_not_the_result(read_text: ReadText) -> None:
    groups = "replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>"
    graph = read_text(
        f"""module attributes {{mhlo.num_replicas = 4 : i32}} {{
func.func @main(%shard: tensor<262144xf32>, %full: tensor<1048576xf32>)
    -> (tensor<1048576xf32>, tensor<262144xf32>) {{
  %0 = "stablehlo.all_gather"(%shard) <{{all_gather_dim = 0 : i64, {groups}}}>
    : (tensor<262144xf32>) -> tensor<1048576xf32>
  %1 = "stablehlo.reduce_scatter"(%full) <{{scatter_dimension = 0 : i64, {groups}}}> ({{
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.maximum %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }}) : (tensor<1048576xf32>) -> tensor<262144xf32>
  return %0, %1 : tensor<1048576xf32>, tensor<262144xf32>
}}}}"""
    )[0].classes[0]
    table = graph.collectives
    assert [CollectiveKind(int(kind)) for kind in table.kind] == [
        CollectiveKind.ALL_GATHER,
        CollectiveKind.REDUCE_SCATTER,
    ]
    assert table.comm_bytes.tolist() == [1_048_576, 4_194_304]
    assert table.result_bytes.tolist() == [4_194_304, 1_048_576]
    assert [graph.strings[int(row)] for row in table.reduction] == ["", "maximum"]


@pytest.mark.parametrize(
    ("source", "kernel", "out", "numbers"),
    [
        ("2x16x16x8", "3x3x8x32", "2x16x16x32", "[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"),
        ("2x8x16x16", "32x8x3x3", "2x32x16x16", "[b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1]"),
    ],
)
def test_trap_07_convolutions_count_by_dimension_numbers(
    read_body: ReadGraph, source: str, kernel: str, out: str, numbers: str
) -> None:
    graph = read_body(
        f"%x: tensor<{source}xf32>, %k: tensor<{kernel}xf32>",
        f"""  %0 = stablehlo.convolution(%x, %k) dim_numbers = {numbers},
    window = {{pad = [[1, 1], [1, 1]]}} {{batch_group_count = 1 : i64, feature_group_count = 1 : i64}}
    : (tensor<{source}xf32>, tensor<{kernel}xf32>) -> tensor<{out}xf32>
  return %0 : tensor<{out}xf32>""",
        f"tensor<{out}xf32>",
    )
    assert graph.flops.tolist() == [2 * 2 * 16 * 16 * 32 * 8 * 9, 0]
    assert graph.useful_flops.tolist() == [2 * 2 * 32 * 8 * 46 * 46, 0]
    assert graph.contractions.useful_flops.tolist() == graph.useful_flops[:1].tolist()


def test_trap_07_one_dimensional_convolution(read_body: ReadGraph) -> None:
    graph = read_body(
        "%x: tensor<2x32x4xf32>, %k: tensor<5x4x8xf32>",
        """  %0 = stablehlo.convolution(%x, %k) dim_numbers = [b, 0, f]x[0, i, o]->[b, 0, f], window = {}
    {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
    : (tensor<2x32x4xf32>, tensor<5x4x8xf32>) -> tensor<2x28x8xf32>
  return %0 : tensor<2x28x8xf32>""",
        "tensor<2x28x8xf32>",
    )
    assert graph.flops.tolist() == graph.useful_flops.tolist() == [2 * 2 * 28 * 8 * 4 * 5, 0]


def test_trap_08_a_library_product_is_not_free(read_text: ReadText) -> None:
    config = (
        r"{\"gemm_backend_config\":{\"dot_dimension_numbers\":{\"lhs_contracting_dimensions\":[\"1\"],"
        r"\"rhs_contracting_dimensions\":[\"0\"],\"lhs_batch_dimensions\":[],\"rhs_batch_dimensions\":[]}}}"
    )
    graph = read_text(
        f"""func.func @main(%x: tensor<8192x8192xbf16>) -> tensor<8192x8192xbf16> {{
  %0:2 = stablehlo.custom_call @__cublas$gemm(%x, %x) {{backend_config = "{config}"}}
    : (tensor<8192x8192xbf16>, tensor<8192x8192xbf16>) -> (tensor<8192x8192xbf16>, tensor<33554432xi8>)
  return %0#0 : tensor<8192x8192xbf16>
}}"""
    )[0].classes[0]
    assert graph.flops.tolist() == [2 * 8192**3, 0]
    assert graph.op_class.tolist() == [OpClass.CONTRACTION, OpClass.FREE]
    assert graph.rate_dtype.tolist() == [dtype("bf16").code, -1]


def test_trap_09_operands_set_the_rate_not_the_accumulator(read_body: ReadGraph) -> None:
    graph = read_body(
        "%x: tensor<64x64xbf16>",
        """  %0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]
    : (tensor<64x64xbf16>, tensor<64x64xbf16>) -> tensor<64x64xf32>
  return %0 : tensor<64x64xf32>""",
        "tensor<64x64xf32>",
    )
    assert graph.rate_dtype.tolist() == [dtype("bf16").code, -1]
    assert graph.contractions.accumulator.tolist() == [dtype("f32").code]


def test_trap_09_an_algorithm_sets_the_rate(read_body: ReadGraph) -> None:
    graph = read_body(
        "%x: tensor<64x64xf32>",
        """  %0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT],
    algorithm = <lhs_precision_type = bf16, rhs_precision_type = bf16, accumulation_type = f32,
    lhs_component_count = 1, rhs_component_count = 1, num_primitive_operations = 3,
    allow_imprecise_accumulation = false> : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %1 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST]
    : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  return %0 : tensor<64x64xf32>""",
        "tensor<64x64xf32>",
    )
    assert graph.rate_dtype.tolist() == [dtype("bf16").code, dtype("f32").code, -1]
    assert graph.contractions.products.tolist() == [3, 6]


def test_trap_10_booleans_variadic_reduces_gathers_and_scatters_move_what_they_move(
    read_body: ReadGraph,
) -> None:
    graph = read_body(
        "%m: tensor<8192x8192xi1>, %x: tensor<128x64xf32>, %i: tensor<128x64xi32>, "
        "%t: tensor<128256x4096xbf16>, %at: tensor<1x1xi32>, %u: tensor<1x4096xbf16>",
        """  %f = stablehlo.constant dense<0.0> : tensor<f32>
  %n = stablehlo.constant dense<0> : tensor<i32>
  %0 = stablehlo.and %m, %m : tensor<8192x8192xi1>
  %1:2 = stablehlo.reduce(%x init: %f), (%i init: %n) across dimensions = [1]
    : (tensor<128x64xf32>, tensor<128x64xi32>, tensor<f32>, tensor<i32>) -> (tensor<128xf32>, tensor<128xi32>)
    reducer(%p: tensor<f32>, %q: tensor<f32>) (%j: tensor<i32>, %k: tensor<i32>) {
      %g = stablehlo.maximum %p, %q : tensor<f32>
      stablehlo.return %g, %j : tensor<f32>, tensor<i32>
    }
  %2 = "stablehlo.gather"(%t, %at) <{dimension_numbers = #stablehlo.gather<offset_dims = [1],
    collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>,
    slice_sizes = array<i64: 1, 4096>}> : (tensor<128256x4096xbf16>, tensor<1x1xi32>) -> tensor<1x4096xbf16>
  %3 = "stablehlo.scatter"(%t, %at, %u)
    <{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0],
    scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}> ({
    ^bb0(%a: tensor<bf16>, %b: tensor<bf16>):
      stablehlo.return %b : tensor<bf16>
    }) : (tensor<128256x4096xbf16>, tensor<1x1xi32>, tensor<1x4096xbf16>) -> tensor<128256x4096xbf16>
  return %0, %3 : tensor<8192x8192xi1>, tensor<128256x4096xbf16>""",
        "(tensor<8192x8192xi1>, tensor<128256x4096xbf16>)",
    )
    moved = graph.bytes_moved[2:].tolist()
    assert moved[0] == 2 * 8192 * 8192
    assert moved[1] == 2 * 128 * 64 * 4 + 8 + 2 * 128 * 4
    assert moved[2] == 4 + 2 * 8192
    assert moved[3] == 4 + 2 * 8192 + 2 * 128256 * 4096 * 2, "the table is no donated argument: it is copied"


def test_trap_11_unknown_extents_are_unknown_with_a_diagnostic(read_text: ReadText) -> None:
    workload, diagnostics = read_text(
        """func.func @main(%x: tensor<?x1024xf32>) -> tensor<?x1024xf32> {
  %0 = stablehlo.tanh %x : tensor<?x1024xf32>
  return %0 : tensor<?x1024xf32>
}"""
    )
    graph = workload.classes[0]
    assert np.isnan(graph.bytes_read[0])
    assert np.isnan(graph.transcendentals[0])
    assert diagnostics.counts() == {"stablehlo.dynamic-shape": 1}


def test_trap_11_strides_of_no_dimension_are_left_out(read_text: ReadText) -> None:
    """MLIR's verifier takes any number of them at a ``dynamic_conv`` whose padding it does not know."""
    graph = read_text(
        """func.func @main(%x: tensor<1x?x2xf32>, %w: tensor<4x2x2xf32>, %p: tensor<1x2xi32>)
    -> tensor<1x?x2xf32> {
  %0 = "stablehlo.dynamic_conv"(%x, %w, %p) {batch_group_count = 1 : i64, feature_group_count = 1 : i64,
    dimension_numbers = #stablehlo.conv<[b, 0, f]x[0, i, o]->[b, 0, f]>, window_strides = array<i64: 2, 2>}
    : (tensor<1x?x2xf32>, tensor<4x2x2xf32>, tensor<1x2xi32>) -> tensor<1x?x2xf32>
  return %0 : tensor<1x?x2xf32>
}"""
    )[0].classes[0]
    node = [graph.op_name(each) for each in range(len(graph))].index("stablehlo.dynamic_conv")
    assert graph.op_class[node] == OpClass.CONVOLUTION
    assert np.isnan(graph.flops[node])


def test_trap_11_bounded_extents_are_upper_bounds(read_text: ReadText) -> None:
    workload, diagnostics = read_text(
        """func.func @main(%x: tensor<?x8xf32, #stablehlo.bounds<16, ?>>)
    -> tensor<?x8xf32, #stablehlo.bounds<16, ?>> {
  %0 = stablehlo.tanh %x : tensor<?x8xf32, #stablehlo.bounds<16, ?>>
  return %0 : tensor<?x8xf32, #stablehlo.bounds<16, ?>>
}"""
    )
    graph = workload.classes[0]
    assert graph.transcendentals.tolist() == [128, 0]
    assert graph.types.bounded.tolist() == [True]
    assert diagnostics.counts() == {"stablehlo.bounded-shape": 1}


def split_styles() -> list[str]:
    """The same chain of two products over a constant: flat, in one function, in two functions."""
    kind = "tensor<32x32xf32>"
    make = f"""  %c = stablehlo.constant dense<2.0> : tensor<f32>
  %w = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<f32>) -> {kind}
  %v = stablehlo.exponential %w : {kind}"""
    dot = "%{} = stablehlo.dot %{}, %{} : " + f"({kind}, {kind}) -> {kind}"
    head = f"func.func {{}}(%x: {kind}{{}}) -> {kind} {{{{"
    main = head.format("@main", "")
    first, second = dot.format("a", "x", "v"), dot.format("b", "a", "v")
    call = f"({kind}) -> {kind}"
    flat = f"{main}\n{make}\n{first}\n{second}\nreturn %b : {kind}\n}}"
    whole = (
        f"{main}\n%r = call @all(%x) : {call}\nreturn %r : {kind}\n}}\n"
        f"{head.format('private @all', '')}\n{make}\n{first}\n{second}\nreturn %b : {kind}\n}}"
    )
    shared = (
        f"{main}\n{make}\n%a = call @one(%x, %v) : ({kind}, {kind}) -> {kind}\n"
        f"%b = call @one(%a, %v) : ({kind}, {kind}) -> {kind}\nreturn %b : {kind}\n}}\n"
        f"{head.format('private @one', f', %v: {kind}')}\n{first}\nreturn %a : {kind}\n}}"
    )
    return [text.replace("{{", "{") for text in (flat, whole, shared)]


def test_trap_12_totals_do_not_depend_on_how_a_program_is_split(read_text: ReadText) -> None:
    graphs = [read_text(program)[0].classes[0] for program in split_styles()]
    for column in ("flops", "transcendentals", "bytes_read", "bytes_written"):
        assert len({float(getattr(graph, column).sum()) for graph in graphs}) == 1, column
    assert {len(graph) for graph in graphs} == {6}


def test_trap_13_devices_come_from_the_module(read_text: ReadText) -> None:
    body = f"""func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {{
  %0 = {reduce_of("%x", "tensor<8xf32>", "dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>")}
  return %0 : tensor<8xf32>
}}"""
    stated, found = read_text(f"module attributes {{mhlo.num_replicas = 4 : i32}} {{ {body} }}")
    assert (stated.num_ranks, found.counts()) == (4, {})
    inferred, found = read_text(body)
    assert (inferred.num_ranks, found.counts()) == (4, {"stablehlo.devices-inferred": 1})
    told, found = read_text(body, ReadOptions(num_devices=8))
    assert (told.num_ranks, found.counts()) == (8, {"stablehlo.devices-left-out": 1})
    assert told.classes[0].group_sets[0].group_of(7) == -1


def test_trap_13_a_program_lowered_on_an_abstract_mesh_runs_on_all_of_it(read_text: ReadText) -> None:
    """JAX writes that one device runs it, where no argument says how it is sharded."""
    ones = "mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32"
    channel = ", channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids"
    reduced = reduce_of("%part", "tensor<2xf32>", "dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>", channel)
    text = f"""module attributes {{{ones}}} {{
  sdy.mesh @mesh = <["data"=2, "model"=2]>
  func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {{
    %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{{"data", "model"}}]>]
        out_shardings=[<@mesh, [{{"data", "model"}}]>] manual_axes={{"data", "model"}}
        (%part: tensor<2xf32>) {{
      %1 = {reduced}
      sdy.return %1 : tensor<2xf32>
    }} : (tensor<8xf32>) -> tensor<8xf32>
    return %0 : tensor<8xf32>
  }}
}}"""
    workload, found = read_text(text)
    assert (workload.num_ranks, found.counts()) == (4, {"stablehlo.devices-of-mesh": 1})
    assert read_text(text, ReadOptions(num_devices=4))[0].num_ranks == 4


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("dense<[[0, 1, 2, 3, 4]]> : tensor<1x5xi64>", "ids 0..4 are not all within 0..3"),
        ("dense<[[0, 2, 1, 3, 4]]> : tensor<1x5xi64>", "id 4 is outside 0..3"),
        ("dense<[[0, 1], [1, 2]]> : tensor<2x2xi64>", "more than once"),
    ],
)
def test_trap_13_wrong_groups_are_errors(read_text: ReadText, groups: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read_text(
            f"""module attributes {{mhlo.num_replicas = 4 : i32}} {{
func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {{
  %0 = {reduce_of("%x", "tensor<8xf32>", groups)}
  return %0 : tensor<8xf32>
}}}}"""
        )


def test_trap_13_padding_is_dropped(read_text: ReadText) -> None:
    graph = read_text(
        f"""module attributes {{mhlo.num_replicas = 5 : i32}} {{
func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {{
  %0 = {reduce_of("%x", "tensor<8xf32>", "dense<[[0, 1, 2], [3, 4, -1]]> : tensor<2x3xi64>")}
  return %0 : tensor<8xf32>
}}}}"""
    )[0].classes[0]
    assert [members.tolist() for members in graph.group_sets[0]] == [[0, 1, 2], [3, 4]]


def test_trap_15_collectives_in_private_functions_and_loops_are_read(read_text: ReadText) -> None:
    body = reduce_of("%v", "tensor<8xf32>", "dense<[[0, 1]]> : tensor<1x2xi64>")
    graph = read_text(
        f"""module attributes {{mhlo.num_replicas = 2 : i32}} {{
func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {{
  %c0 = stablehlo.constant dense<0> : tensor<i32>
  %c1 = stablehlo.constant dense<1> : tensor<i32>
  %c6 = stablehlo.constant dense<6> : tensor<i32>
  %0:2 = stablehlo.while(%i = %c0, %v = %x) : tensor<i32>, tensor<8xf32>
  cond {{
    %p = stablehlo.compare LT, %i, %c6 : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  }} do {{
    %y = func.call @sync(%v) : (tensor<8xf32>) -> tensor<8xf32>
    %j = stablehlo.add %i, %c1 : tensor<i32>
    stablehlo.return %j, %y : tensor<i32>, tensor<8xf32>
  }}
  return %0#1 : tensor<8xf32>
}}
func.func private @sync(%v: tensor<8xf32>) -> tensor<8xf32> {{
  %0 = {body}
  return %0 : tensor<8xf32>
}}}}"""
    )[0].classes[0]
    (node,) = graph.collectives.node.tolist()
    assert (graph.kind[node], graph.executions[node]) == (NodeKind.COLLECTIVE, 6)


def test_trap_18_a_batched_product_keeps_its_batch(read_body: ReadGraph) -> None:
    graph = read_body(
        "%x: tensor<32x64x128xf32>, %y: tensor<32x128x16xf32>",
        """  %0 = stablehlo.dot_general %x, %y, batching_dims = [0] x [0], contracting_dims = [2] x [1]
    : (tensor<32x64x128xf32>, tensor<32x128x16xf32>) -> tensor<32x64x16xf32>
  return %0 : tensor<32x64x16xf32>""",
        "tensor<32x64x16xf32>",
    )
    table = graph.contractions
    extents = [int(column[0]) for column in (table.batch, table.m, table.n, table.k)]
    assert extents == [32, 64, 16, 128]
    assert graph.flops.tolist() == [2 * 32 * 64 * 16 * 128, 0]


UPDATE = """stablehlo.dynamic_update_slice {}, %u, %at, %at
    : (tensor<128x64xf32>, tensor<1x64xf32>, tensor<i32>, tensor<i32>) -> tensor<128x64xf32>"""
CALL = """%r = call @update(%x, %u, %at)
    : (tensor<128x64xf32>, tensor<1x64xf32>, tensor<i32>) -> tensor<128x64xf32>"""
IN_PLACE = 2 * 256 + 4
"""Bytes of an update in place; the two start indices are one value."""


@pytest.mark.parametrize(
    ("argument", "body", "in_place"),
    [
        ("%x: tensor<128x64xf32> {tf.aliasing_output = 0 : i32}", f"%r = {UPDATE.format('%x')}", True),
        ("%x: tensor<128x64xf32> {jax.buffer_donor = true}", f"%r = {UPDATE.format('%x')}", True),
        ("%x: tensor<128x64xf32>", f"%r = {UPDATE.format('%x')}", False),
        (
            "%x: tensor<128x64xf32>",
            f"%y = stablehlo.negate %x : tensor<128x64xf32>\n%r = {UPDATE.format('%y')}",
            True,
        ),
        (
            "%x: tensor<128x64xf32> {jax.buffer_donor = true}",
            f"%r = {UPDATE.format('%x')}\n%y = stablehlo.negate %x : tensor<128x64xf32>",
            False,
        ),
        ("%x: tensor<128x64xf32> {jax.buffer_donor = true}", CALL, True),
        ("%x: tensor<128x64xf32>", CALL, False),
    ],
)
def test_trap_21_updates_are_in_place_where_the_buffer_dies(
    read_text: ReadText, argument: str, body: str, in_place: bool
) -> None:
    kinds = "%u: tensor<1x64xf32>, %at: tensor<i32>"
    graph = read_text(
        f"""func.func @main({argument}, {kinds}) -> tensor<128x64xf32> {{
{body}
return %r : tensor<128x64xf32>
}}
func.func private @update(%x: tensor<128x64xf32>, {kinds}) -> tensor<128x64xf32> {{
%r = {UPDATE.format("%x")}
return %r : tensor<128x64xf32>
}}"""
    )[0].classes[0]
    (moved,) = graph.bytes_moved[graph.op_class == OpClass.UPDATE].tolist()
    assert moved == pytest.approx(IN_PLACE + (0 if in_place else 2 * 128 * 64 * 4), abs=4)


def test_trap_21_views_are_free_and_power_reads_both(read_body: ReadGraph) -> None:
    graph = read_body(
        "%x: tensor<16xf32>, %y: tensor<16xf32>",
        """  %0 = stablehlo.reshape %x : (tensor<16xf32>) -> tensor<4x4xf32>
  %1 = stablehlo.bitcast_convert %x : (tensor<16xf32>) -> tensor<16xi32>
  %2 = stablehlo.power %x, %y : tensor<16xf32>
  return %2 : tensor<16xf32>""",
        "tensor<16xf32>",
    )
    assert graph.bytes_moved.tolist() == [0, 0, 3 * 64, 0]


def test_trap_22_nodes_keep_operation_types_and_cost(read_body: ReadGraph) -> None:
    graph = read_body(
        "%x: tensor<4x8xbf16>",
        "  %0 = stablehlo.negate %x : tensor<4x8xbf16>\n  return %0 : tensor<4x8xbf16>",
        "tensor<4x8xbf16>",
    )
    assert (graph.op_name(0), graph.node_name(0)) == ("stablehlo.negate", "negate.0")
    (row,) = graph.results.row(0).tolist()
    assert graph.types.shape(row) == (4, 8)
    assert graph.types.dtype_of(row) == dtype("bf16")
    assert graph.flops.tolist() == [32, 0]
