"""GpuRanges: their content, nesting, and the range at a given time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.converters.gpu_trace import GpuRanges
from hespas.converters.gpu_trace.profile import (
    RangeText,
    collective_in_kernel,
    collective_in_range,
    is_collective_kernel,
    nesting_of,
    parse_range_text,
)
from hespas.converters.linking import match_rows


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "aten::mm, seq = 3, op_id = 7, sizes = [[4, 8], [8, 2]]",
            RangeText("aten::mm", "[[4, 8], [8, 2]]", 3),
        ),
        ("aten::mm, sizes = [[4, 8], []], input_op_ids = [(0,-1)]", RangeText("aten::mm", "[[4, 8], []]")),
        ("aten::ones", RangeText("aten::ones")),
        ("autograd::f: AddBackward0, seq = 12", RangeText("autograd::f: AddBackward0", sequence=12)),
        ("a, sizes = [[4, 8]", RangeText("a, sizes = [[4, 8]")),
        ("a, seq = later", RangeText("a, seq = later")),
        (", seq = 4", RangeText(", seq = 4")),
        ("f(x), with, commas", RangeText("f(x), with, commas")),
        ("ProfilerStep#17", RangeText("ProfilerStep#17", step=17)),
        ("step 4", RangeText("step 4", step=4)),
        ("stepping", RangeText("stepping")),
        ("Thunk:#hlo_op=fusion.1,hlo_module=jit_f#", RangeText("fusion.1", "", -1, "jit_f", "fusion.1")),
        ("train#step_num=8,x#", RangeText("train", step=8)),
        ("#", RangeText("#")),
        ("", RangeText("")),
    ],
)
def test_texts_of_ranges(text: str, expected: RangeText) -> None:
    assert parse_range_text(text) == expected


@given(st.text(alphabet="a:#=,[]0123456789 seqizop_d", max_size=60))
def test_any_text_is_read(text: str) -> None:
    said = parse_range_text(text)
    assert said.name or not text
    assert said.sequence >= -1


@pytest.mark.parametrize("depth", [10_000, 300_000])
def test_deep_and_long_sizes_are_no_sizes(depth: int) -> None:
    text = f"a, sizes = {'[' * depth}"
    assert parse_range_text(text) == RangeText(text)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "allreduce"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)", "allgather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "sendrecv"),
        ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", "allreduce"),
        ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", ""),
    ],
)
def test_kernels_of_collectives(kernel: str, kind: str) -> None:
    assert is_collective_kernel(kernel)
    assert collective_in_kernel(kernel) == kind


def test_other_kernels_and_ranges() -> None:
    assert not is_collective_kernel("void gemm_nccl_like<float>()")
    assert [
        collective_in_range(text) for text in ("ncclAllReduce", "nccl:all_reduce", "c10d::allreduce_")
    ] == ["allreduce"] * 3
    assert collective_in_range("ncclCommInitRank") == collective_in_range("aten::mm") == ""


Spans = list[tuple[int, int, int]]


def ranges_of(spans: Spans) -> GpuRanges:
    thread, start, end = np.array(spans, np.int64).reshape(-1, 3).T
    place = np.arange(len(spans))
    return GpuRanges(
        process=thread,
        thread=thread,
        start_ns=start,
        end_ns=end,
        text=place,
        nests=np.ones(len(spans), np.bool_),
    )


@st.composite
def forests(draw: st.DrawFn) -> Spans:
    """GpuRanges pushed and popped on two threads."""
    spans: Spans = []
    for thread in (1, 2):
        clock, stack = 0, list[int]()
        for push in draw(st.lists(st.booleans(), max_size=12)):
            clock += draw(st.integers(1, 3))
            if push:
                stack.append(clock)
            elif stack:
                spans.append((thread, stack.pop(), clock))
        while stack:
            clock += 1
            spans.append((thread, stack.pop(), clock))
    return draw(st.permutations(spans))


@given(forests(), st.lists(st.tuples(st.integers(1, 3), st.integers(0, 40)), max_size=12))
def test_the_innermost_range_is_the_shortest_around(spans: Spans, asked: list[tuple[int, int]]) -> None:
    nesting = nesting_of(ranges_of(spans))
    thread, at = np.array(asked, np.int64).reshape(-1, 2).T
    found = nesting.innermost(thread, at).tolist()
    for place, (wanted, time) in zip(found, asked, strict=True):
        around = [
            (end - start, number)
            for number, (owner, start, end) in enumerate(spans)
            if owner == wanted and start <= time <= end
        ]
        later = [spans[number][1] for _, number in around]
        assert place == (-1 if not around else next(n for _, n in around if spans[n][1] == max(later)))
    for number, parent in enumerate(nesting.parent.tolist()):
        if parent >= 0:
            assert spans[parent][0] == spans[number][0]
            assert spans[parent][1] <= spans[number][1]
            assert spans[number][2] <= spans[parent][2]


pairs = st.lists(st.tuples(st.integers(-1, 4), st.integers(-1, 4)), max_size=20)


@given(pairs, pairs)
def test_pairs_are_matched_to_the_first(known: list[tuple[int, int]], asked: list[tuple[int, int]]) -> None:
    columns = [tuple(np.array(part, np.int64).reshape(-1, 2).T) for part in (known, asked)]
    found = match_rows((columns[0][0], columns[0][1]), (columns[1][0], columns[1][1]))
    expected = [known.index(pair) if pair in known and pair[1] >= 0 else -1 for pair in asked]
    assert found.tolist() == expected
