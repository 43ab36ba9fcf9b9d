"""Replays of single operations: operations that replace collectives, messages and unknown work."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np
import pytest

from hespas import api
from hespas.converters import load_format
from hespas.converters.format import ReadOptions, WriteOptions
from hespas.converters.stablehlo.reader import read_program
from hespas.graph import (
    CollectiveKind,
    Diagnostics,
    ExplicitGroups,
    NodeKind,
    OpClass,
    OpGraph,
    RegionKind,
    StridedGroups,
    Workload,
    dtype,
)
from hespas.graph.errors import FormatError, UnsupportedError, UsageError
from tests.converters.stablehlo.replays import write_bytes, xla_flops
from tests.converters.stablehlo.steps import RANKS, Steps

pytest.importorskip("jaxlib")

Write = Callable[..., tuple[str, Diagnostics]]
PAIRS = StridedGroups(((2, 2),), ((2, 1),))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """``write(steps, num_ranks)``: the text of the replay and what its writer found."""

    def run(steps: Steps | OpGraph, num_ranks: int = RANKS) -> tuple[str, Diagnostics]:
        graph = steps.graph() if isinstance(steps, Steps) else steps
        text, found = write_bytes(Workload.spmd(graph, num_ranks), tmp_path / "a.mlir")
        return text.decode(), found

    return run


def _read(text: str) -> OpGraph:
    return read_program(text.encode(), "a.mlir", ReadOptions(), Diagnostics()).classes[0]


def _groups(graph: OpGraph) -> list[list[int]]:
    assert len(graph.collectives) == 1
    groups = graph.group_sets[int(graph.collectives.group_set[0])]
    return [groups.members(number).tolist() for number in range(groups.num_groups)]


# --- collectives


@pytest.mark.parametrize(
    "kind",
    [
        CollectiveKind.ALL_REDUCE,
        CollectiveKind.ALL_GATHER,
        CollectiveKind.REDUCE_SCATTER,
        CollectiveKind.ALL_TO_ALL,
        CollectiveKind.BROADCAST,
    ],
)
@pytest.mark.parametrize("size", [64.0, 66.0])
def test_a_collective_known_by_its_bytes_keeps_kind_groups_and_bytes(
    kind: CollectiveKind, size: float, write: Write
) -> None:
    steps = Steps()
    steps.collective(kind, groups=PAIRS, size=size)
    graph = _read(write(steps)[0])
    assert graph.collectives.kind.tolist() == [int(kind)]
    assert graph.collectives.comm_bytes.tolist() == [size]
    assert _groups(graph) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("kind", "meant"),
    [
        (CollectiveKind.REDUCE, CollectiveKind.ALL_REDUCE),
        (CollectiveKind.GATHER, CollectiveKind.ALL_GATHER),
        (CollectiveKind.SCATTER, CollectiveKind.ALL_TO_ALL),
        (CollectiveKind.REDUCE_SCATTER_BLOCK, CollectiveKind.REDUCE_SCATTER),
        (CollectiveKind.UNKNOWN, CollectiveKind.ALL_REDUCE),
    ],
)
def test_what_stablehlo_lacks_is_replaced_and_reported(
    kind: CollectiveKind, meant: CollectiveKind, write: Write
) -> None:
    steps = Steps()
    steps.collective(kind)
    text, found = write(steps)
    assert _read(text).collectives.kind.tolist() == [int(meant)]
    assert found.counts()["stablehlo.substituted"] == 1
    assert 'substituted: 1"' in text


def test_a_barrier_is_an_all_reduce_of_one_number(write: Write) -> None:
    steps = Steps()
    before = steps.op(shape=(8,))
    steps.op(deps=[steps.collective(CollectiveKind.BARRIER, deps=[before])], shape=(8,))
    graph = _read(write(steps)[0])
    assert graph.collectives.comm_bytes.tolist() == [4.0]


def test_without_groups_all_ranks_are_one(write: Write) -> None:
    steps = Steps()
    steps.collective(CollectiveKind.ALL_REDUCE)
    assert _groups(_read(write(steps)[0])) == [[0, 1, 2, 3]]


def test_ranks_left_out_form_groups_of_the_same_size(write: Write) -> None:
    steps = Steps()
    steps.collective(CollectiveKind.ALL_GATHER, groups=ExplicitGroups(((1, 2),)))
    assert _groups(_read(write(steps)[0])) == [[1, 2], [0, 3]]


def test_unequal_groups_only_reduce(write: Write) -> None:
    steps = Steps()
    steps.collective(CollectiveKind.ALL_GATHER, groups=ExplicitGroups(((0, 1, 2), (3,))))
    text, found = write(steps)
    assert _read(text).collectives.kind.tolist() == [int(CollectiveKind.ALL_REDUCE)]
    assert found.counts()["stablehlo.substituted"] == 1


@pytest.mark.parametrize("rows", [((0, 1), (1, 2)), ((0, 0),)])
def test_a_rank_in_two_groups_is_refused(rows: tuple[tuple[int, ...], ...], write: Write) -> None:
    steps = Steps()
    steps.collective(CollectiveKind.ALL_REDUCE, groups=ExplicitGroups(rows))
    with pytest.raises(FormatError, match="in two groups"):
        write(steps)


def test_too_many_devices_to_list_are_refused(write: Write) -> None:
    steps = Steps()
    steps.collective(CollectiveKind.ALL_REDUCE, groups=StridedGroups.all_ranks(1 << 40))
    with pytest.raises(UnsupportedError, match="too many to list"):
        write(steps)


@pytest.mark.parametrize(
    ("element", "stated", "used"),
    [("f32", "max", "maximum"), ("f32", "or", "add"), ("i32", "or", "or"), ("f32", "", "add")],
)
def test_the_reduction_is_that_of_the_graph_where_the_type_has_it(
    element: str, stated: str, used: str, write: Write
) -> None:
    steps = Steps()
    b = steps.builder
    types = [b.types.add(dtype(element), (8,))]
    node = b.add_node(
        name_id=b.strings.add("r"),
        op_id=b.strings.add("all_reduce"),
        op_class=OpClass.COLLECTIVE,
        kind=NodeKind.COLLECTIVE,
        operands=types,
        results=types,
    )
    b.add_collective(node, CollectiveKind.ALL_REDUCE, group_set=-1, comm_bytes=32.0, reduction=stated)
    assert f"stablehlo.{used} %x, %y" in write(steps)[0]


def test_channels_are_kept_and_never_shared(write: Write) -> None:
    steps = Steps()
    for channel in (7, 7, -1, 3):
        steps.collective(CollectiveKind.ALL_REDUCE, channel=channel, shape=(8,))
    text, found = write(steps)
    assert _read(text).collectives.channel.tolist() == [7, 8, -1, 3]
    assert found.counts()["stablehlo.channels"] == 1


def test_channels_go_on_from_the_first_free_one_past_the_last(write: Write) -> None:
    steps = Steps()
    for channel in (2**63 - 1, 2**63 - 1, 1, 1):
        steps.collective(CollectiveKind.ALL_REDUCE, channel=channel, shape=(8,))
    assert _read(write(steps)[0]).collectives.channel.tolist() == [2**63 - 1, 2, 1, 3]


@pytest.mark.parametrize("element", ["f6E2M3FN", "f6E3M2FN"])
def test_types_of_six_bits_become_those_that_compile(element: str, write: Write) -> None:
    steps = Steps()
    steps.op("add", shape=(8,), element=element)
    text, found = write(steps)
    assert "f6E" not in text.split("func.func", 1)[1].replace(f"{element}, taken", "")
    assert "tensor<8xf8E4M3FN>" in text
    told = [entry.message for entry in found if entry.code == "stablehlo.types"]
    assert len(told) == 1
    assert f"{element}, taken as f8E4M3FN" in told[0]


@pytest.mark.parametrize(
    ("kind", "size", "written"),
    [
        (CollectiveKind.ALL_GATHER, nan, 4.0),
        (CollectiveKind.ALL_REDUCE, nan, 4.0),
        (CollectiveKind.ALL_TO_ALL, 1001.0, 1004.0),
        (CollectiveKind.REDUCE_SCATTER, 66.0, 68.0),
        (CollectiveKind.BARRIER, 0.0, 4.0),
    ],
)
def test_bytes_that_are_not_those_of_the_graph_are_reported(
    kind: CollectiveKind, size: float, written: float, write: Write
) -> None:
    steps = Steps()
    steps.collective(kind, size=size, reduction="add")
    text, found = write(steps)
    assert _read(text).collectives.comm_bytes.tolist() == [written]
    assert found.counts()["stablehlo.comm-bytes"] == 1
    assert 'comm-bytes: 1"' in text
    (message,) = [each.message for each in found if each.code == "stablehlo.comm-bytes"]
    stated = "unknown" if np.isnan(size) else f"{size:,.0f} B"
    assert f"{kind.name.lower()} of {stated} as {written:,.0f} B (1)" in message


def test_bytes_of_the_types_are_reported_where_the_graph_says_others(write: Write) -> None:
    steps = Steps()
    steps.collective(CollectiveKind.ALL_REDUCE, shape=(4, 4), size=999.0, reduction="add")
    text, found = write(steps)
    assert _read(text).collectives.comm_bytes.tolist() == [64.0]
    assert found.counts()["stablehlo.comm-bytes"] == 1


def test_bytes_that_are_kept_are_not_reported(write: Write) -> None:
    steps = Steps()
    for kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL):
        steps.collective(kind, size=1000.0, reduction="max")
        steps.collective(kind, size=1000.0, groups=PAIRS, reduction="max")
    steps.collective(CollectiveKind.ALL_REDUCE, shape=(8,), size=32.0, reduction="sum")
    steps.message(NodeKind.PERMUTE, [(0, 1)])
    text, found = write(steps)
    graph = _read(text)
    assert sorted(graph.collectives.comm_bytes.tolist()) == [32.0, *[1000.0] * 6]
    assert not {"stablehlo.comm-bytes", "stablehlo.reduction"} & found.counts().keys()


def test_a_message_of_unknown_size_is_reported(write: Write) -> None:
    steps = Steps()
    steps.message(NodeKind.PERMUTE, [(0, 1)], size=nan)
    text, found = write(steps)
    assert _read(text).p2p.comm_bytes.tolist() == [1.0]
    assert found.counts()["stablehlo.comm-bytes"] == 1


@pytest.mark.parametrize(
    ("element", "stated", "said"),
    [
        ("f32", "mystery", "mystery as add"),
        ("f32", "", "unknown as add"),
        ("f32", "or", "or as add"),
        ("i32", "or", ""),
        ("f32", "stablehlo.add", ""),
    ],
)
def test_reductions_that_are_not_those_of_the_graph_are_reported(
    element: str, stated: str, said: str, write: Write
) -> None:
    steps = Steps()
    steps.collective(CollectiveKind.ALL_REDUCE, shape=(16,), reduction=stated, element=element)
    steps.collective(CollectiveKind.ALL_GATHER, reduction=stated)  # reduces nothing
    text, found = write(steps)
    assert found.counts().get("stablehlo.reduction", 0) == bool(said)
    assert ('reduction: 1"' in text) == bool(said)
    messages = [each.message for each in found if each.code == "stablehlo.reduction"]
    assert all(f"{said} (1)" in message for message in messages)


# --- messages


def test_a_send_and_its_receive_are_one_permute(write: Write) -> None:
    steps, ring = Steps(), [(0, 1), (1, 2), (2, 3), (3, 0)]
    send = steps.message(NodeKind.SEND, ring)
    received = steps.message(NodeKind.RECV, ring)
    steps.op(deps=[send, received], shape=(8,))
    text, found = write(steps)
    graph = _read(text)
    assert graph.kind.tolist().count(NodeKind.PERMUTE) == 1
    assert sorted(graph.permutations[0]) == ring
    assert graph.p2p.comm_bytes.tolist() == [256.0]
    assert "stablehlo.message-order" not in found.counts()


def test_messages_of_different_tags_are_not_paired(write: Write) -> None:
    steps = Steps()
    steps.message(NodeKind.SEND, [(0, 1)], tag=1)
    steps.message(NodeKind.RECV, [(0, 1)], tag=2)
    assert _read(write(steps)[0]).kind.tolist().count(NodeKind.PERMUTE) == 2


def test_a_receive_before_its_send_is_where_all_exchange(write: Write) -> None:
    steps = Steps()
    received = steps.message(NodeKind.RECV, [(0, 1)])
    work = steps.op("negate", deps=[received], shape=(64,), flops=64)
    steps.message(NodeKind.SEND, [(0, 1)], deps=[work])
    text, found = write(steps)
    assert text.count("collective_permute") == 1
    assert found.counts()["stablehlo.message-order"] == 1


def test_a_message_to_nobody_known_is_a_copy(write: Write) -> None:
    steps = Steps()
    steps.message(NodeKind.SEND, None)
    text, found = write(steps)
    assert "collective_permute" not in text
    assert found.counts()["stablehlo.unknown-peer"] == 1


# --- work


@pytest.mark.parametrize("flops", [1e3, 1e5, 1e7, 1e9])
@pytest.mark.parametrize("moved", [0.0, 1e6, nan])
def test_work_known_by_its_figures_is_as_much_to_xla(flops: float, moved: float, write: Write) -> None:
    steps = Steps()
    first = steps.op("aten::linear", flops=flops, moved=moved)
    steps.op("aten::linear", flops=flops, moved=moved, deps=[first])
    text, _ = write(steps)
    assert xla_flops(text) == pytest.approx(2 * flops, rel=0.01)


def test_large_products_move_about_as_many_bytes_as_stated(write: Write) -> None:
    steps = Steps()
    steps.op("aten::mm", flops=2.0 * 1024 * 1024 * 1024, moved=3.0 * 4 * 1024 * 1024)
    text, _ = write(steps)
    header = next(line for line in text.splitlines() if "@main(" in line)
    arguments = re.findall(r"%arg\d+: tensor<([0-9x]+)xf32>", header)
    moved = sum(4 * int(np.prod([int(part) for part in each.split("x")])) for each in arguments)
    assert moved == pytest.approx(3.0 * 4 * 1024 * 1024, rel=0.6)


def test_transcendentals_are_counted_too(write: Write) -> None:
    steps = Steps()
    node = steps.op("gelu", shape=(32, 32))
    graph = steps.graph()
    column = np.array(graph.transcendentals)
    column[node] = 2048
    text, _ = write(replace(graph, transcendentals=column))
    assert text.count("stablehlo.logistic") == 2


def test_equal_operations_stay_as_many_as_they_are(write: Write) -> None:
    steps = Steps()
    first = steps.op("negate", shape=(4, 4), flops=16)
    for _ in range(40):
        steps.op("negate", deps=[first], shape=(4, 4), flops=16)
    for _ in range(40):
        steps.op("negate", shape=(4, 4), flops=16)
    text, _ = write(steps)
    made = [line.partition(" = ")[2].partition(" loc(")[0] for line in text.splitlines()]
    negations = [line for line in made if line.startswith("stablehlo.negate")]
    assert len(negations) == len(set(negations)) == 81


@pytest.mark.parametrize(
    "names", [["aten::relu", "aten::silu", "aten::gelu"], ["copy", "mystery", "reverse"]]
)
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (8, 8), None])
def test_operations_that_differ_in_name_only_stay_as_many_as_they_are(
    names: list[str], waits: bool, shape: tuple[int, ...] | None, write: Write
) -> None:
    steps = Steps()
    deps = [steps.op("abs", shape=shape)] if waits else []
    for name in names:
        steps.op(name, deps=deps, shape=shape, flops=64 * 3, moved=512)
        steps.collective(CollectiveKind.ALL_REDUCE, deps=deps, shape=shape, name=name)
        steps.collective(CollectiveKind.ALL_GATHER, deps=deps, name=name)
        steps.message(NodeKind.PERMUTE, [(0, 1)], deps=deps, name=name)
    text, _ = write(steps)
    made = [line.partition(" = ")[2].partition(" loc(")[0] for line in text.splitlines()]
    for op, count in (("all_reduce", 3), ("all_gather", 3), ("collective_permute", 3)):
        found = [line for line in made if f"stablehlo.{op}" in line]
        assert len(found) == len(set(found)) == count, op
    work = [line for line in made if line.startswith("stablehlo.multiply")]
    assert len(work) == len(set(work)) >= 3


def test_reshaped_operands_do_not_hide_equal_operations(write: Write) -> None:
    steps = Steps()
    first = steps.op("abs", shape=(4, 4))
    for _ in range(2):
        steps.op("negate", deps=[first], shape=(16,), flops=16)
    text, _ = write(steps)
    operands = re.findall(r"stablehlo\.negate (%\d+)", text)
    assert len(set(operands)) == 2
    assert text.count("stablehlo.dynamic_update_slice") == 1  # one of them has an element of its own


def test_unknown_flops_are_reported_and_not_made_up(write: Write) -> None:
    steps = Steps()
    steps.op("mystery", shape=(64,), flops=nan)
    text, found = write(steps)
    assert found.counts()["stablehlo.unknown-flops"] == 1
    assert xla_flops(text) == 0


@pytest.mark.parametrize("shape", [(64,), (4, 4), (1,), (), None])
@pytest.mark.parametrize("name", ["a.mlir", "a.mlirbc", "a.vhlo"])
def test_work_of_unknown_flops_is_unknown_again(
    shape: tuple[int, ...] | None, name: str, tmp_path: Path
) -> None:
    steps = Steps()
    steps.op("negate", shape=(64,), flops=64)
    for op in ("mystery", "custom-call", ""):
        steps.op(op, deps=[0], shape=shape, flops=nan)
    data, _ = write_bytes(Workload.spmd(steps.graph(), RANKS), tmp_path / name)
    found = Diagnostics()
    graph = read_program(data, name, ReadOptions(), found).classes[0]
    unknown = np.flatnonzero(np.isnan(graph.flops)).tolist()
    assert [graph.op_name(node) for node in unknown] == ["mystery", "custom-call", ""]
    assert np.isfinite(graph.bytes_moved[unknown]).all()
    assert found.counts()["stablehlo.unknown-cost"] == 3


def test_products_in_work_of_unknown_flops_stay_known(write: Write) -> None:
    steps, code = Steps(), dtype("f32").code
    node = steps.op("mystery", shape=(16, 16), flops=nan)
    product = 2.0 * 16**3
    steps.builder.add_contraction(
        node, batch=1, m=16, n=16, k=16, flops=product, useful_flops=product,
        lhs=code, rhs=code, accumulator=code,
    )  # fmt: skip
    again = _read(write(steps)[0])
    assert np.isnan(again.flops).sum() == 1
    assert np.nansum(again.flops) == product


@pytest.mark.parametrize(
    "call", ['custom_call_target="Acme"', 'custom_call_target="__gpu$xla.gpu.triton", backend_config="{}"']
)
def test_a_step_with_unknown_work_is_a_lower_bound_in_both_files(call: str, tmp_path: Path) -> None:
    source, target = tmp_path / "step.hlo.txt", tmp_path / "step.mlir"
    source.write_text(
        "HloModule step\n\nENTRY main {\n  x = f32[256,256]{1,0} parameter(0)\n"
        f"  y = f32[256,256]{{1,0}} custom-call(x), {call}\n"
        "  ROOT z = f32[256,256]{1,0} add(y, x)\n}\n"
    )
    api.convert(source, target)
    wanted = {"roofline.unknown-flops": 1, "composite.not-covered": 1, "estimate.missing": 1}
    codes: list[dict[str, int]] = []
    for path in (source, target):
        found = Diagnostics()
        assert "at least " in api.simulate(path, "H100-SXM", diagnostics=found).headline()
        codes.append({code: found.counts().get(code, 0) for code in wanted})
    assert codes[0] == codes[1] == wanted


def test_work_that_does_not_fit_the_operation_is_reported(write: Write) -> None:
    steps = Steps()
    steps.op("negate", shape=(1000,), flops=10)
    assert write(steps)[1].counts()["stablehlo.replay-flops"] == 1


def test_flops_nobody_knows_are_not_called_zero(write: Write) -> None:
    steps = Steps()
    first = steps.op("mystery", shape=(64,), flops=nan)
    steps.op("negate", deps=[first], shape=(64,), flops=nan)
    _, found = write(steps)
    (message,) = [each.message for each in found if each.code == "stablehlo.replay-flops"]
    assert message.startswith(
        "replays in which XLA counts 64 FLOPs where the graph has unknown figures of 2 operations:"
    )
    steps.op("abs", shape=(10,), flops=10)
    (message,) = [each.message for each in write(steps)[1] if each.code == "stablehlo.replay-flops"]
    assert "the graph has 10, without 2 operations of unknown figures:" in message


def test_traffic_that_is_not_that_of_the_graph_is_reported(write: Write) -> None:
    steps = Steps()
    steps.op("mystery", flops=nan, moved=8e9)
    text, found = write(steps)
    (message,) = [each.message for each in found if each.code == "stablehlo.replay-bytes"]
    moved = float(_read(text).bytes_moved.sum())
    assert moved < 8e9
    assert f"replays that move {moved:,.0f} bytes where the graph has 8,000,000,000:" in message


def test_traffic_that_is_kept_or_unknown_is_not_reported(write: Write) -> None:
    for moved in (1e6, nan):
        steps = Steps()
        steps.op("mystery", moved=moved)
        steps.collective(CollectiveKind.ALL_GATHER)  # its bytes are a payload
        text, found = write(steps)
        assert "stablehlo.replay-bytes" not in found.counts(), text


def test_names_are_in_the_locations(write: Write) -> None:
    steps = Steps()
    steps.op('q"\\é\n', shape=(8,))
    text, _ = write(steps)
    assert 'loc("q\\22\\5C\\C3\\A9\\0A.0")' in text


def test_a_circle_is_refused(write: Write) -> None:
    steps = Steps()
    steps.op(deps=[1])
    steps.op(deps=[0])
    with pytest.raises(FormatError, match="form a cycle, so that 2 operations never start") as caught:
        write(steps)
    assert caught.value.position == "node 0, which is in the cycle or depends on it"


def test_tensors_past_all_memory_are_refused(write: Write) -> None:
    steps = Steps()
    steps.op(shape=(1 << 30, 1 << 30))
    with pytest.raises(UnsupportedError, match="a tensor of"):
        write(steps)


def test_element_types_stablehlo_lacks_are_replaced_and_reported(write: Write) -> None:
    steps = Steps()
    steps.op(shape=(64,), element="mxfp8")
    text, found = write(steps)
    assert "tensor<64xf8E4M3FN>" in text
    assert "tensor<64xmxfp8>" not in text
    assert found.counts()["stablehlo.types"] == 2


def test_an_empty_graph_is_an_empty_program(write: Write) -> None:
    text, _ = write(Steps())
    assert "return\n" in text


# --- loops


def test_loops_are_unrolled(write: Write) -> None:
    steps = Steps()
    loop = steps.builder.add_region(RegionKind.LOOP_BODY, trips=5.0, label="while")
    steps.op("negate", shape=(64,), flops=64, region=loop)
    text, found = write(steps)
    assert text.count("stablehlo.negate") == 5
    assert found.counts()["stablehlo.unrolled"] == 1


def test_a_loop_of_unknown_trips_runs_once_and_says_so(write: Write) -> None:
    steps = Steps()
    loop = steps.builder.add_region(RegionKind.LOOP_BODY, trips=nan, label="while")
    steps.op("negate", shape=(64,), flops=64, region=loop)
    text, found = write(steps)
    assert text.count("stablehlo.negate") == 1
    assert found.counts()["pass.assumed-trips"] == 1


def test_a_loop_too_long_to_unroll_is_refused_with_a_remedy(write: Write) -> None:
    steps = Steps()
    loop = steps.builder.add_region(RegionKind.LOOP_BODY, trips=1e9, label="while")
    steps.op("negate", shape=(64,), flops=64, region=loop)
    with pytest.raises(UnsupportedError) as raised:
        write(steps)
    assert "`granularity=region`" in str(raised.value)


# --- rank classes


def _two_classes() -> Workload:
    one, two = Steps(), Steps()
    one.op("negate", shape=(64,), flops=64)
    two.op("abs", shape=(64,), flops=64)
    ranks = np.array([0, 0, 1, 1], np.int32)
    return Workload(name="job", classes=(one.graph(), two.graph()), rank_class=ranks)


def test_several_rank_classes_are_a_folder_of_programs(tmp_path: Path) -> None:
    workload, entry = _two_classes(), load_format("stablehlo")
    options, found = WriteOptions(name="job", directory=True), Diagnostics()
    assert entry.writes_directory(workload, options)
    assert entry.write is not None
    entry.write(workload, tmp_path / "job", options, found)
    programs = {path.name: path.read_text() for path in (tmp_path / "job").iterdir()}
    assert sorted(programs) == ["job.0.mlir", "job.1.mlir"]
    assert "stablehlo.negate" in programs["job.0.mlir"]
    assert "stablehlo.abs" in programs["job.1.mlir"]
    assert all("mhlo.num_replicas = 4" in text for text in programs.values())
    assert found.counts()["stablehlo.rank-classes"] == 2


def test_ranks_of_one_class_are_one_program(tmp_path: Path) -> None:
    options = WriteOptions(name="a.mlir", ranks=range(2, 4))
    assert not load_format("stablehlo").writes_directory(_two_classes(), options)
    text, found = write_bytes(_two_classes(), tmp_path / "a.mlir", options)
    assert b"stablehlo.abs" in text
    assert found.counts()["stablehlo.all-ranks"] == 1


def test_one_file_for_several_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="2 rank classes"):
        write_bytes(_two_classes(), tmp_path / "a.mlir")


def test_durations_streams_and_attributes_are_counted(write: Write) -> None:
    steps = Steps()
    node = steps.op(shape=(8,))
    steps.builder.set(node, duration_ns=5.0, stream=2)
    steps.builder.add_extra(node, "key", 0, b"value")
    text, found = write(steps)
    for what in ("durations", "streams", "extra"):
        assert found.counts()[f"stablehlo.{what}"] == 1
        assert f'"{what}: 1"' in text
