"""Output of TPU compilers: collectives in fusions, batches as windows, on-chip memory, order."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np

from hespas.converters.format import ReadOptions
from hespas.converters.hlo.parser import parse_module
from hespas.converters.hlo.reader import workload_of
from hespas.converters.hlo.scan import HloText
from hespas.graph import CollectiveKind, Diagnostics, NodeKind, OpGraph
from hespas.graph.passes import is_topological

FIXTURES = Path(__file__).parents[3] / "fixtures" / "hlo"


def _graph(name: str, *, in_order: bool = False) -> OpGraph:
    source = HloText((FIXTURES / name).read_text(), name)
    found = Diagnostics()
    graph = workload_of(parse_module(source), ReadOptions(), found, in_order=in_order).classes[0]
    assert not [each for each in found if each.code == "hlo.unknown-custom-call"]
    return graph


def _node(graph: OpGraph, name: str) -> int:
    return next(node for node in range(len(graph)) if graph.node_name(node) == name)


def _reaches(graph: OpGraph, node: int, target: int) -> bool:
    """Return True if ``node`` depends on ``target``, directly or not."""
    waits = {node}
    for each in range(node, -1, -1):
        if each in waits:
            waits.update(graph.data_deps.row(each).tolist())
            waits.update(graph.control_deps.row(each).tolist())
    return target in waits


def test_work_that_carries_a_collective_on_does_not_wait_for_its_end() -> None:
    graph = _graph("hand_tpu_collectives.hlo.txt")
    start, beside = _node(graph, "async-collective-start"), _node(graph, "beside")
    done, reader = _node(graph, "async-collective-done"), _node(graph, "z")
    assert not _reaches(graph, beside, start)
    assert _reaches(graph, done, start)
    assert _reaches(graph, reader, start)


def test_a_collective_is_counted_once_however_many_fusions_hold_it() -> None:
    graph = _graph("hand_tpu_collectives.hlo.txt")
    table = graph.collectives
    assert [CollectiveKind(kind) for kind in table.kind.tolist()] == [
        CollectiveKind.ALL_GATHER,
        CollectiveKind.REDUCE_SCATTER,
    ]
    assert table.comm_bytes.tolist() == [64 * 128 * 2, 64 * 128 * 2]
    assert table.result_bytes.tolist() == [256 * 128 * 2, 16 * 128 * 2]
    start, beside = _node(graph, "async-collective-start"), _node(graph, "beside")
    assert (graph.bytes_read[start], graph.bytes_written[start]) == (64 * 128 * 2, 256 * 128 * 2)
    # Of the fusion beside it: both operands and the result of its product, none of the buffers.
    assert graph.bytes_read[beside] == (64 * 256 + 256 * 128) * 2
    assert graph.bytes_written[beside] == 64 * 128 * 2
    assert graph.kind[beside] == int(NodeKind.COMPUTE)


def test_an_all_reduce_that_is_kept_whole_stays_one() -> None:
    text = (FIXTURES / "hand_tpu_collectives.hlo.txt").read_text()
    # The slice is of another size than the share of a device.
    other = text.replace("bf16[16,128]", "bf16[32,128]").replace("{16,128}", "{32,128}")
    graph = workload_of(parse_module(HloText(other, "other")), ReadOptions(), Diagnostics()).classes[0]
    assert graph.collectives.kind.tolist()[1] == int(CollectiveKind.ALL_REDUCE)


def test_a_window_that_meets_one_product_at_each_place_is_a_batch() -> None:
    graph = _graph("hand_tpu_collectives.hlo.txt")
    table = graph.contractions
    row = table.node.tolist().index(_node(graph, "scores"))
    extents = (table.batch[row], table.m[row], table.n[row], table.k[row])
    assert extents == (6, 16, 64, 32)
    assert table.useful_flops[row] == 2 * 6 * 16 * 64 * 32
    assert table.flops[row] == 6 * table.useful_flops[row]  # by the specification, zeros included


def test_a_space_of_gpus_is_main_memory() -> None:
    text = (FIXTURES / "hand_tpu_layouts.hlo.txt").read_text()
    tiled = _graph("hand_tpu_layouts.hlo.txt")
    plain = text.replace("T(8,128)(2,1)", "").replace("T(8,128)", "").replace("T(1024)", "")
    graph = workload_of(parse_module(HloText(plain, "plain")), ReadOptions(), Diagnostics()).classes[0]
    node = _node(graph, "fusion")
    assert graph.bytes_read[node] - tiled.bytes_read[node] == 512 * 1024 * 2


def test_in_order_what_computes_waits_for_what_stands_before() -> None:
    free, ordered = _graph("hand_gpu_async.hlo.txt"), _graph("hand_gpu_async.hlo.txt", in_order=True)
    assert is_topological(ordered)
    assert np.array_equal(free.flops, ordered.flops)
    gemm, fusion = _node(ordered, "gemm"), _node(ordered, "fusion")
    gathered, second = _node(ordered, "all-gather-done"), _node(ordered, "second")
    reduced, scattered = _node(ordered, "all-reduce-done"), _node(ordered, "reduce-scatter-done")
    permute = _node(ordered, "permute-start")
    # The stream: a product, an elementwise kernel, then waits for three collectives, then a product.
    chain = (gemm, fusion, gathered, reduced, scattered, second)
    assert all(_reaches(ordered, later, earlier) for earlier, later in pairwise(chain))
    assert not _reaches(free, second, scattered)
    # A start is issued in its turn and holds up nothing.
    assert _reaches(ordered, permute, scattered)
    assert permute not in ordered.data_deps.row(second).tolist()
    assert not _reaches(ordered, second, permute)


def test_in_order_branches_and_loops_are_in_line() -> None:
    graph = _graph("hand_control.hlo.txt", in_order=True)
    assert is_topological(graph)
    assert len(graph.control_deps.values) > len(_graph("hand_control.hlo.txt").control_deps.values)
