"""Graph of the device work of a small profile: every event in one node, no cost counted twice."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.converters.measured_ops.build import CostedOps, costed_ops
from hespas.graph import (
    CollectiveKind,
    Diagnostics,
    HostOps,
    MeasuredComms,
    NodeKind,
    OpClass,
    Profile,
    StringTableBuilder,
    dtype,
)

Inputs = tuple[object, object]
PAIR: Inputs = ([[4, 8], [8, 2]], ["float", "float"])
SUM: Inputs = ([[4, 2], [4, 2], []], ["float", "float", "Scalar"])


@dataclass
class Trace:
    """Host operations and device events, one line each."""

    strings: StringTableBuilder = field(default_factory=StringTableBuilder)
    ops: list[tuple[int, int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int, int]])
    events: list[tuple[int, int, int, float, float, float]] = field(
        default_factory=list[tuple[int, int, int, float, float, float]]
    )
    sequences: dict[int, int] = field(default_factory=dict[int, int])

    def op(self, name: str, inputs: Inputs | None = None, parent: int = -1, values: object = None) -> int:
        add = self.strings.add
        texts = ["", ""] if inputs is None else [json.dumps(part) for part in inputs]
        value = "" if values is None else json.dumps(values)
        self.ops.append((add(name), parent, add(texts[0]), add(texts[1]), add(value)))
        return len(self.ops) - 1

    def event(
        self,
        kernel: str,
        op: int,
        start: float,
        duration: float,
        *,
        stream: int = 7,
        moved: float = np.nan,
    ) -> None:
        self.events.append((self.strings.add(kernel), op, stream, start, duration, moved))

    def profile(self, comms: MeasuredComms | None = None) -> Profile:
        ops = np.array(self.ops, np.int32).reshape(-1, 5)
        nothing = np.zeros(len(ops), np.int32)
        host = HostOps(
            name_id=ops[:, 0],
            thread_id=nothing,
            parent=ops[:, 1],
            start_ns=np.arange(len(ops), dtype=np.float64),
            duration_ns=np.zeros(len(ops)),
            sequence=np.array([self.sequences.get(op, -1) for op in range(len(ops))], np.int64),
            shapes_id=ops[:, 2],
            dtype_id=ops[:, 3],
            strides_id=nothing,
            values_id=ops[:, 4],
        )
        return Profile.of(
            "hand",
            ("H100",),
            self.strings.build(),
            start_ns=np.array([each[3] for each in self.events], np.float64),
            duration_ns=np.array([each[4] for each in self.events], np.float64),
            kernel_id=np.array([each[0] for each in self.events], np.int32),
            host_event=np.array([each[1] for each in self.events], np.int32),
            stream=np.array([each[2] for each in self.events], np.int64),
            bytes_moved=np.array([each[5] for each in self.events], np.float64),
            host=host,
            comms=comms,
        )


def names(found: CostedOps) -> list[str]:
    return [found.graph.op_name(node) for node in range(len(found.graph))]


def test_kernels_of_one_operation_are_one_node_with_their_sum() -> None:
    trace = Trace()
    mm = trace.op("aten::mm", PAIR, trace.op("aten::linear", ([[4, 8], [2, 8]], ["float", "float"])))
    trace.event("Memset (Device)", mm, 0, 1, moved=64)
    trace.event("gemm", mm, 2, 5)
    trace.event("splitK", mm, 8, 2.5)
    found = costed_ops(trace.profile())
    assert names(found) == ["aten::mm"]
    assert found.node.tolist() == [0, 0, 0]
    assert found.graph.duration_ns.tolist() == found.busy_ns.tolist() == [8.5]
    assert found.graph.flops.tolist() == [2 * 4 * 8 * 2]
    assert found.graph.bytes_moved.tolist() == [4 * (32 + 16 + 8)]
    assert found.graph.node_name(0) == "gemm"
    assert found.graph.stream.tolist() == [7]
    assert int(found.graph.rate_dtype[0]) == dtype("f32").code
    assert found.graph.strings[int(found.graph.framework_id[0])] == "aten::linear/aten::mm"
    shapes = [found.graph.types.shape(int(row)) for row in found.graph.operands.row(0)]
    assert (shapes, found.graph.types.shape(int(found.graph.results.row(0)[0]))) == ([(4, 8), (8, 2)], (4, 2))
    table = found.graph.contractions
    assert (table.m.tolist(), table.n.tolist(), table.k.tolist()) == ([4], [2], [8])


def test_operations_that_recur_keep_times_streams_and_order_of_their_own() -> None:
    trace = Trace()
    for turn in range(3):
        start = 100.0 * turn
        trace.event("gemm", trace.op("aten::mm", PAIR), start, 5 + turn)
        trace.event("Memcpy DtoD", -1, start + 1, 2, stream=9, moved=64 + (turn > 1))
    graph = costed_ops(trace.profile()).graph
    assert graph.duration_ns.tolist() == [5, 2, 6, 2, 7, 2]
    assert graph.stream.tolist() == [7, 9] * 3
    assert graph.control_deps.to_lists() == [[], [], [0], [1], [2], [3]]
    assert graph.id.tolist() == list(range(6))
    assert graph.flops[::2].tolist() == [2 * 4 * 8 * 2] * 3
    assert graph.bytes_read[1::2].tolist() == [64, 64, 65]
    assert graph.contractions.node.tolist() == [0, 2, 4]


def test_an_operation_answers_for_what_it_calls() -> None:
    # As MIOpen does it: the convolution launches, and its bias is an addition inside it.
    trace = Trace()
    types = ["float", "float", "", *["ScalarList"] * 3, "Scalar", "Scalar"]
    shapes: Inputs = ([[1, 1, 8], [1, 1, 3], *[[]] * 6], types)
    conv = trace.op(
        "aten::miopen_convolution", shapes, values=["", "", "", "[0]", "[1]", "[1]", "1", "False"]
    )
    bias = trace.op("aten::add_", SUM, conv)
    trace.event("gemm", conv, 0, 5)
    trace.event("add", bias, 6, 1)
    found = costed_ops(trace.profile())
    assert names(found) == ["aten::miopen_convolution"]
    assert found.node.tolist() == [0, 0]
    assert found.graph.duration_ns.tolist() == [6]


def test_siblings_stay_apart_and_parts_cost_what_is_made_of_them() -> None:
    trace = Trace()
    linear = trace.op("aten::linear", ([[4, 8], [2, 8]], ["float", "float"]))
    trace.event("gemm", trace.op("aten::mm", PAIR, linear), 0, 5)
    trace.event("add", trace.op("aten::add_", SUM, linear), 6, 1)
    found = costed_ops(trace.profile())
    assert names(found) == ["aten::mm", "aten::add_"]
    assert found.graph.flops.sum() == 2 * 4 * 8 * 2 + 4 * 2


def test_an_operation_made_of_parts_answers_where_no_part_does() -> None:
    trace = Trace()
    linear = trace.op("aten::linear", ([[4, 8], [2, 8]], ["float", "float"]))
    trace.event("gemm", trace.op("somebody::gemm", PAIR, linear), 0, 5)
    trace.event("epilogue", linear, 6, 1)
    assert names(costed_ops(trace.profile())) == ["aten::linear"]
    # Where one does, the rest is unknown: the whole would count the part twice.
    trace.event("gemm", trace.op("aten::mm", PAIR, linear), 8, 5)
    found = costed_ops(trace.profile())
    assert names(found) == ["somebody::gemm", "aten::linear", "aten::mm"]
    assert found.costed.tolist() == [False, False, True]
    assert np.nansum(found.graph.flops) == 2 * 4 * 8 * 2


def test_work_of_a_view_or_of_an_unknown_operation_is_never_free() -> None:
    trace = Trace()
    trace.event("k", trace.op("aten::view", ([[4]], ["float"])), 0, 1)
    trace.event("k", trace.op("somebody::op", PAIR), 2, 1)
    found = costed_ops(trace.profile())
    assert found.costed.tolist() == [False, False]
    assert np.isnan(found.graph.flops).all()
    assert found.graph.op_class.tolist() == [OpClass.UNKNOWN, OpClass.UNKNOWN]


def test_copies_to_the_host_stand_apart_from_the_operation_around_them() -> None:
    trace = Trace()
    rows: Inputs = ([[9, 8], [], [4]], ["float", "Scalar", "long int"])
    index = trace.op("aten::index_select", rows, values=["", "0", ""])
    copy = trace.op("aten::copy_", ([[4], [4], []], ["long int", "long int", "Scalar"]), index)
    trace.event("Memcpy HtoD (Pinned -> Device)", copy, 0, 3, moved=32)
    trace.event("gather", index, 4, 2)
    found = costed_ops(trace.profile())
    assert names(found) == ["aten::copy_", "aten::index_select"]
    assert found.graph.op_class.tolist() == [OpClass.HOST, OpClass.GATHER]
    assert (found.graph.bytes_read[0], found.graph.bytes_written[0]) == (0, 32)


def test_a_copy_whose_bytes_nobody_says_has_those_of_its_tensor() -> None:
    trace = Trace()
    copy = trace.op("aten::copy_", ([[4], [4], []], ["long int", "long int", "Scalar"]))
    trace.event("Memcpy DtoH (Device -> Pageable)", copy, 0, 3)
    assert costed_ops(trace.profile()).graph.bytes_read.tolist() == [32]


def test_work_that_nothing_explains_is_one_node_an_event() -> None:
    trace = Trace()
    trace.event("k", -1, 5, 2)
    trace.event("Memset (Device)", -1, 0, 1, moved=256)
    trace.event("Memcpy DtoD (Device -> Device)", -1, 2, 1, moved=128)
    diagnostics = Diagnostics()
    found = costed_ops(trace.profile(), diagnostics)
    assert found.node.tolist() == [2, 0, 1]
    assert found.graph.bytes_moved.tolist()[:2] == [256, 256]
    assert np.isnan(found.graph.flops[2])
    assert names(found)[2] == "k"
    assert found.coverage == 0.5
    assert diagnostics.counts() == {"measured-ops.unlinked": 1}


def test_work_that_nothing_explains_is_called_what_its_name_says() -> None:
    trace = Trace()
    trace.event("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_tn", -1, 0, 2)
    trace.event("k", -1, 3, 2)
    trace.event("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(int)", -1, 6, 2)
    graph = costed_ops(trace.profile()).graph
    assert [OpClass(code) for code in graph.op_class.tolist()[:2]] == [OpClass.CONTRACTION, OpClass.UNKNOWN]
    assert graph.rate_dtype.tolist()[:2] == [dtype("bf16").code, -1]
    assert np.isnan(graph.flops).all(), "a name does not say how much there is to do"
    assert NodeKind(graph.kind[2]) is NodeKind.COLLECTIVE


def test_a_backward_operation_reads_the_sizes_of_its_forward_call() -> None:
    """By sequence number, or else by the shape of the first operation inside."""
    forward = "fbgemm::split_embedding_codegen_lookup_rowwise_adagrad_function"
    backward = "torch::autograd::CppNode<SplitLookupFunction_rowwise_adagrad_Op>"
    for numbered in (True, False):
        trace = Trace()
        calls: list[int] = []
        for lookups in (512, 2048, 1024):
            shapes = [[0], [64000], [0], [0, 0], [1], [1], [2], [], [], [2], [], [lookups], [65]]
            calls.append(trace.op(forward, (shapes, ["float"] * 11 + ["long", "long"])))
        update = trace.op(backward, ([[64, 64]], ["float"]))
        inside = trace.op("aten::empty_like", ([[2048], []], ["long", "Scalar"]), parent=update)
        if numbered:
            trace.sequences = {call: 7 + call for call in calls} | {update: 7 + calls[0]}
        trace.event("linearize", update, 0.0, 5.0)
        trace.event("update", inside, 5.0, 5.0)
        costed = costed_ops(trace.profile())
        assert costed.graph.flops.tolist() == [64 * (512 if numbered else 2048)]


def test_experts_are_costed_by_the_weights_that_their_parts_look_at() -> None:
    trace = Trace()
    bf16 = "c10::BFloat16"
    forward = trace.op("vllm::moe_forward", ([[16, 64], [16, 8], []], [bf16, bf16, ""]))
    trace.op("TopK", ([[16, 8], []], [bf16, "Scalar"]), forward, ["", "2"])
    view = trace.op("aten::view", ([[8, 64, 96], []], [bf16, "ScalarList"]), forward)
    trace.op("aten::view", ([[8, 48, 64], []], [bf16, "ScalarList"]), view)
    trace.op("aten::view", ([[8, 999, 64], []], [bf16, "ScalarList"]))
    trace.event("_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1_swiglu", forward, 0, 5)
    trace.event("_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1", forward, 5, 5)
    found = costed_ops(trace.profile())
    rows = found.graph.contractions
    assert list(zip(rows.m.tolist(), rows.n.tolist(), rows.k.tolist(), strict=True)) == [
        (32, 96, 64),
        (32, 64, 48),
    ]
    assert found.coverage == 1.0


def test_overlapping_kernels_count_once_in_time_and_fully_in_the_balance() -> None:
    trace = Trace()
    mm = trace.op("aten::mm", PAIR)
    trace.event("a", mm, 0, 10, stream=1)
    trace.event("b", mm, 4, 3, stream=2)
    trace.event("c", mm, 8, 6, stream=2)
    diagnostics = Diagnostics()
    found = costed_ops(trace.profile(), diagnostics)
    assert (found.busy_ns.tolist(), found.graph.duration_ns.tolist()) == ([19], [14])
    assert found.graph.stream.tolist() == [1]
    assert diagnostics.counts() == {"measured-ops.overlap": 1}


def test_nodes_follow_each_other_on_their_stream() -> None:
    trace = Trace()
    for start, stream in ((0, 1), (1, 2), (2, 1), (3, 2)):
        trace.event("k", trace.op("aten::mm", PAIR), start, 0.5, stream=stream)
    found = costed_ops(trace.profile())
    assert found.graph.control_deps.to_lists() == [[], [], [0], [1]]


def test_an_element_type_is_read_off_the_kernel() -> None:
    for kernel, element in (
        ("void at::native::CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 4>(x)", 2),
        ("void at::native::CatArrayBatchedCopy<float, unsigned int, 2, 128, 1>(float*)", 4),
    ):
        trace = Trace()
        cat = trace.op("aten::cat", ([[[3], [5]], []], ["TensorList", "Scalar"]), values=["", "0"])
        trace.event(kernel, cat, 0, 1)
        assert costed_ops(trace.profile()).graph.bytes_moved.tolist() == [element * 2 * 8]


def test_collectives_are_nodes_of_their_own_with_what_is_known() -> None:
    trace = Trace()
    step = trace.op("record_param_comms", None, trace.op("c10d::alltoall_base_"))
    trace.event("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", step, 0, 5)
    trace.event("ncclDevKernel_Generic", step, 6, 5)
    add = trace.strings.add
    comms = MeasuredComms(
        event=np.array([1], np.int32),
        kind_id=np.array([add("_allgather_base")], np.int32),
        operand_bytes=np.array([64.0]),
        result_bytes=np.array([256.0]),
        group_id=np.array([add("0")], np.int32),
        ranks_id=np.array([add("[0, 1, 2, 3]")], np.int32),
        group_size=np.array([4], np.int32),
        sequence=np.array([1], np.int64),
    )
    graph = costed_ops(trace.profile(comms)).graph
    assert graph.kind.tolist() == [NodeKind.COLLECTIVE] * 2
    assert graph.collectives.kind.tolist() == [CollectiveKind.ALL_TO_ALL, CollectiveKind.ALL_GATHER]
    assert graph.collectives.operand_bytes.tolist()[1] == 64
    assert graph.collectives.group_set.tolist() == [-1, 0]
    assert graph.group_sets[0].members(0).tolist() == [0, 1, 2, 3]


def test_a_profile_without_events() -> None:
    found = costed_ops(Trace().profile(), Diagnostics())
    assert (len(found.graph), found.coverage) == (0, 1.0)


@given(
    st.lists(st.tuples(st.sampled_from(["aten::mm", "aten::linear", "aten::add", "x", "aten::view"]),
                       st.integers(-1, 9), st.booleans()), min_size=1, max_size=10),
    st.lists(st.tuples(st.sampled_from(["k", "Memcpy HtoD", "Memset", "ncclKernel_AllReduce"]),
                       st.integers(-1, 9), st.integers(0, 50), st.integers(0, 20), st.integers(0, 2)),
             max_size=20),
)  # fmt: skip
def test_device_time_in_is_device_time_out(
    ops: list[tuple[str, int, bool]], events: list[tuple[str, int, int, int, int]]
) -> None:
    trace = Trace()
    for place, (name, parent, described) in enumerate(ops):
        trace.op(name, PAIR if described else None, min(parent, place - 1))
    for kernel, op, start, duration, stream in events:
        trace.event(kernel, min(op, len(ops) - 1), start, duration, stream=stream)
    profile = trace.profile()
    found = costed_ops(profile, Diagnostics())
    assert found.busy_ns.sum() == profile.duration_ns.sum()
    by_node = np.bincount(found.node, profile.duration_ns, len(found.graph))
    assert by_node.tolist() == found.busy_ns.tolist()
    assert (found.graph.duration_ns <= found.busy_ns).all()
    starts = [profile.start_ns[found.node == node].min() for node in range(len(found.graph))]
    assert starts == sorted(starts)
    # No operation whose cost is known stands inside another.
    copies = found.graph.op_class == int(OpClass.HOST)
    whole = set(found.host_op[found.costed & ~copies & (found.host_op >= 0)].tolist())
    for op in whole:
        around = int(profile.host.parent[op])
        while around >= 0:
            assert around not in whole
            around = int(profile.host.parent[around])


def test_an_event_of_less_than_no_time_takes_nothing_from_the_others() -> None:
    trace = Trace()
    mm = trace.op("aten::mm", PAIR)
    trace.event("gemm", mm, 10, 5)
    trace.event("back", mm, 20, -4)
    alone = trace.op("aten::mm", PAIR)
    trace.event("back", alone, 30, -9)
    diagnostics = Diagnostics()
    found = costed_ops(trace.profile(), diagnostics)
    assert found.busy_ns.tolist() == [5.0, 0.0]
    assert found.graph.duration_ns.tolist() == [5.0, 0.0]
    assert diagnostics.counts()["measured-ops.negative-duration"] == 2


def test_events_of_unknown_start_come_last_and_count_in_full() -> None:
    trace = Trace()
    mm = trace.op("aten::mm", PAIR)
    for start in (np.nan, np.nan, 50.0):
        trace.event("gemm", mm, start, 3)
    trace.event("first", trace.op("aten::add", SUM), 20, 2)
    trace.event("alone", trace.op("aten::add", SUM), np.nan, 1)
    found = costed_ops(trace.profile())  # warnings are errors here
    assert names(found) == ["aten::add", "aten::mm", "aten::add"]
    assert found.graph.duration_ns.tolist() == [2.0, 9.0, 1.0]


def test_a_name_does_not_begin_a_line_of_a_message() -> None:
    trace = Trace()
    trace.event("gemm", trace.op("a\nerror: b"), 0, 5)
    diagnostics = Diagnostics()
    costed_ops(trace.profile(), diagnostics)
    told = [each.message for each in diagnostics if each.code == "measured-ops.unknown-op"]
    assert "a\\nerror: b" in told[0]
    assert "\n" not in told[0]


def test_an_operation_of_the_table_without_shapes_is_not_called_unknown() -> None:
    trace = Trace()
    trace.event("gemm", trace.op("aten::mm"), 0, 5)
    trace.event("mine", trace.op("my::op"), 5, 2)
    diagnostics = Diagnostics()
    costed_ops(trace.profile(), diagnostics)
    told = {each.code: each.message for each in diagnostics}
    assert "my::op 1 x" in told["measured-ops.unknown-op"]
    assert "aten::mm" not in told["measured-ops.unknown-op"]
    assert "aten::mm 1 x" in told["measured-ops.inputs-not-recorded"]


@pytest.mark.parametrize(("strides", "count"), [("", 1), ("[[401408,1,7168,32],[288,9,3,1]]", 0)])
def test_images_without_strides_are_reported(strides: str, count: int) -> None:
    trace = Trace()
    values = ["", "", "", "[1, 1]", "[0, 0]", "[1, 1]", "False", "[0]", "1"]
    shapes = [[8, 32, 224, 56], [32, 32, 3, 3], *[[]] * 7]
    image = trace.op("aten::convolution", (shapes, ["float"] * 2 + [""] * 7), values=values)
    trace.event("implicit_gemm", image, 0, 5)
    trace.event("gemm", trace.op("aten::mm", PAIR), 5, 5)
    row = trace.strings.add(strides)
    profile = trace.profile()
    profile = replace(profile, host=replace(profile.host, strides_id=np.array([row, 0], np.int32)))
    diagnostics = Diagnostics()
    costed_ops(profile, diagnostics)
    assert diagnostics.counts().get("measured-ops.assumed-layout", 0) == count
