"""Parts of linking, compared with simple brute-force versions."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.converters.linking import common_order, exclusive
from hespas.converters.pytorch.communication import is_communication_kernel, kernel_operation, kind_of_word
from hespas.converters.pytorch.draft import NodeEdges, flow_of
from hespas.converters.pytorch.events import TextRows, integer, integers, read_events
from hespas.converters.pytorch.links import nesting_of
from hespas.converters.pytorch.recognition import job_name, rank_in_name
from hespas.converters.pytorch.records import JsonNumber
from hespas.graph import CollectiveKind, NodeKind, RaggedArray
from tests.converters.pytorch.traces import (
    Json,
    annotation,
    groups_node,
    host,
    kernel,
    launch,
    node,
    read_folder,
    read_profile,
    tensor,
    write_et,
    write_kineto,
)

WORDS = st.lists(st.integers(0, 4), max_size=30)


def longest(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    @cache
    def length(left: int, right: int) -> int:
        if left == len(first) or right == len(second):
            return 0
        if first[left] == second[right]:
            return 1 + length(left + 1, right + 1)
        return max(length(left + 1, right), length(left, right + 1))

    return length(0, 0)


@given(WORDS, WORDS)
def test_the_common_order_is_a_longest_common_subsequence(first: list[int], second: list[int]) -> None:
    pairs = common_order(first, second)
    assert all(first[left] == second[right] for left, right in pairs)
    assert all(before[0] < after[0] and before[1] < after[1] for before, after in pairwise(pairs))
    assert len(pairs) == longest(tuple(first), tuple(second))


def test_long_sequences_with_gaps_are_matched_window_by_window() -> None:
    first = [each * 7919 % 1009 for each in range(20_000)]
    second = [value for place, value in enumerate(first) if place % 10]
    pairs = common_order(first, second)
    assert len(pairs) == len(second)


SPANS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(0, 15)), max_size=20)


@settings(max_examples=200)
@given(SPANS)
def test_every_moment_belongs_to_the_operation_that_started_last(spans: list[tuple[int, int, int]]) -> None:
    key, start, length = (np.array([span[part] for span in spans], np.int64) for part in range(3))
    own = exclusive(key, start, start + length)
    for thread in (0, 1):
        for_thread = [place for place, span in enumerate(spans) if span[0] == thread]
        running = {
            moment: [each for each in for_thread if start[each] <= moment < start[each] + length[each]]
            for moment in range(60)
        }
        assert own[for_thread].sum() == sum(bool(each) for each in running.values())
        for place in for_thread:
            alone = [moment for moment, each in running.items() if each == [place]]
            assert own[place] >= len(alone)


ACCESSES = st.lists(st.tuples(st.sets(st.integers(0, 3)), st.sets(st.integers(0, 3))), max_size=12)


@given(ACCESSES)
def test_dataflow_orders_all_that_touch_a_storage_if_one_changes_it(
    accesses: list[tuple[set[int], set[int]]],
) -> None:
    flow = flow_of(
        *(RaggedArray.from_lists([sorted(access[part]) for access in accesses]) for part in (0, 1))
    )
    data = set(zip(flow.data.consumer.tolist(), flow.data.producer.tolist(), strict=True))
    before = [set[int]() for _ in accesses]
    for edges in flow:
        consumers: list[int] = edges.consumer.tolist()
        producers: list[int] = edges.producer.tolist()
        for later, earlier in zip(consumers, producers, strict=True):
            before[later].add(earlier)
    for later in range(len(accesses)):
        before[later] |= {each for earlier in before[later] for each in before[earlier]}
        for earlier in range(later):
            both = accesses[earlier], accesses[later]
            conflicts = both[0][1] & (both[1][0] | both[1][1]) | both[0][0] & both[1][1]
            assert not conflicts or earlier in before[later]
            between = set[int]().union(*(accesses[each][1] for each in range(earlier + 1, later)))
            reads = bool(both[0][1] & both[1][0] - between)
            assert ((later, earlier) in data) == reads


@given(st.lists(st.integers(-(1 << 65), 1 << 65) | st.floats() | st.sampled_from([None, "7", "-2", "x", ""])))
def test_a_column_of_numbers_is_that_of_its_values(values: list[JsonNumber]) -> None:
    column = integers(values)
    assert column.dtype == np.int64
    assert column.tolist() == [integer(value) for value in values]


def test_spelled_numbers() -> None:
    spelled: list[JsonNumber] = [3, "3", 3.7, None, "", "nan", float("inf"), 1 << 63, -(1 << 63)]
    assert list(map(integer, spelled)) == [3, 3, 3, -1, -1, -1, -1, -1, -(1 << 63)]


def test_rows_are_made_once_in_order_of_appearance() -> None:
    made: list[str] = []

    def add(text: str) -> int:
        made.append(text)
        return len(made)

    rows = TextRows(add)
    assert rows.of("abab") == [1, 2, 1, 2]
    assert rows.of("cab") == [3, 1, 2]
    assert made == ["a", "b", "c"]


THREADS = st.lists(
    st.tuples(st.integers(1, 2), st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=25
)


@given(THREADS)
def test_the_parent_is_the_last_started_that_still_runs(spans: list[tuple[int, int, int]]) -> None:
    events = [host("op", start, length, tid=thread) for thread, start, length in spans]
    with TemporaryDirectory() as folder:
        trace = read_events(write_kineto(Path(folder) / "a.json", events), 1 << 30)
    parent = nesting_of(trace.host).parent.tolist()
    order = sorted(range(len(spans)), key=lambda row: (spans[row][1], -spans[row][2]))
    for thread in (1, 2):
        running: list[int] = []
        for row in (row for row in order if spans[row][0] == thread):
            _, start, length = spans[row]
            while running:
                end = spans[running[-1]][1] + spans[running[-1]][2]
                if end > start or end >= start + length:
                    break
                running.pop()
            assert parent[row] == (running[-1] if running else -1)
            running.append(row)


def test_of_producers_in_a_queue_the_last_remains() -> None:
    edges = NodeEdges(np.array([4, 4, 4, 5]), np.array([0, 1, 2, 3]))
    left = edges.latest(np.array([7, 7, -1, -1, 7, 7]))
    assert sorted(zip(left.consumer.tolist(), left.producer.tolist(), strict=True)) == [
        (4, 1),
        (4, 2),
        (5, 3),
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (
            "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
            CollectiveKind.ALL_REDUCE,
        ),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", CollectiveKind.ALL_GATHER),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevComm*)", CollectiveKind.REDUCE_SCATTER),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclWorkElem)", CollectiveKind.BROADCAST),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL(x)", CollectiveKind.REDUCE),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", None),
        ("ncclDevKernel_Generic(ncclDevKernelArgs)", None),
        ("rcclGenericKernel(x)", None),
    ],
)
def test_kernels_of_communication_libraries(name: str, kind: CollectiveKind | None) -> None:
    assert is_communication_kernel(name)
    said = kernel_operation(name)
    assert (said.collective if said else None) == kind


@pytest.mark.parametrize("name", ["void at::native::nccl_like()", "gemm_nccl", "ampere_sgemm_128x64_nn"])
def test_other_kernels_are_none_of_them(name: str) -> None:
    assert not is_communication_kernel(name)


@pytest.mark.parametrize(
    ("word", "node_kind"),
    [
        ("all_reduce", 1),
        ("ALLREDUCE", 1),
        ("_allgather_base", 1),
        ("all_to_allv", 1),
        ("send", 2),
        ("recv", 3),
    ],
)
def test_spellings_of_communications(word: str, node_kind: int) -> None:
    found = kind_of_word(word)
    assert found is not None
    assert found.node == NodeKind(node_kind)


@pytest.mark.parametrize("word", ["wait", "init", "", "relu"])
def test_other_words_name_none(word: str) -> None:
    assert kind_of_word(word) is None


@pytest.mark.parametrize(
    ("name", "rank", "job"),
    [
        ("gloo2_coll.rank0.et_host.json.gz", 0, "gloo2_coll"),
        ("gloo2_coll.rank13.kineto.json.gz", 13, "gloo2_coll"),
        ("worker7_step_12.1694128201553.pt.trace.json", 7, "step_12.1694128201553"),
        ("dlrm_eg_3.json", 3, "dlrm_3"),
        ("transformer2l.kineto.json.gz", -1, "transformer2l"),
        ("trace.5.json", 5, "trace.5"),
    ],
)
def test_what_file_names_say(name: str, rank: int, job: str) -> None:
    assert (rank_in_name(name), job_name(name)) == (rank, job)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("run_2024.json", -1),
        ("2024-06-01.pt.trace.json", -1),
        ("step-3.et.json", -1),
        ("job.3.json", 3),
        ("run_2024.rank1.json", 1),
        ("worker7.pt.trace.json", 7),
    ],
)
def test_a_number_in_the_name_of_a_lone_file_may_be_any(tmp_path: Path, name: str, rank: int) -> None:
    assert rank_in_name(name, alone=True) == rank
    write_et(tmp_path / name, [groups_node(), node(10, "aten::a", 2, 1, [T], [T])])
    value = read_folder(tmp_path)[0]
    assert value.present.tolist() == [max(rank, 0)]


# --- joining the two records

T = tensor(5, 4)
NAMES = ["aten::a", "aten::b", "aten::a", "aten::c", "aten::a", "aten::d"]


def joined(folder: Path, events: list[Json], records: list[int]) -> dict[str, int]:
    nodes = [node(10 + place, name, 2, records[place], [T], [T]) for place, name in enumerate(NAMES)]
    write_et(folder / "e.rank0.json", [groups_node(), *nodes])
    write_kineto(folder / "k.rank0.json", events)
    counts = read_folder(folder)[1].counts()
    return {code.removeprefix("pytorch.linked-by-"): n for code, n in counts.items() if "linked-by" in code}


def test_ids_join_where_names_agree(tmp_path: Path) -> None:
    events = [host(name, 10 * place, 5, 100 + place) for place, name in enumerate(NAMES)]
    assert joined(tmp_path, events, [100 + place for place in range(6)]) == {"record-id": 6}


def test_external_ids_join_where_there_are_no_others(tmp_path: Path) -> None:
    events = [host(name, 10 * place, 5, 0, {"External id": 101 + place}) for place, name in enumerate(NAMES)]
    assert joined(tmp_path, events, [100 + place for place in range(6)]) == {"external-id": 6}


def test_ids_that_are_all_zero_or_of_another_counter_are_void(tmp_path: Path) -> None:
    shifted = [host(name, 10 * place, 5, 103 + place) for place, name in enumerate(NAMES)]
    assert joined(tmp_path, shifted, [100 + place for place in range(6)]) == {"order": 6}
    (tmp_path / "zero").mkdir()
    events = [host(name, 10 * place, 5) for place, name in enumerate(NAMES) if name != "aten::c"]
    assert joined(tmp_path / "zero", events, [0] * 6) == {"order": 5}


# --- what a profile knows


def test_a_profile_knows_steps_bytes_and_communication(tmp_path: Path) -> None:
    facts: Json = {
        "Collective name": "all_gather", "In msg nelems": 8, "Out msg nelems": 32, "dtype": "BFloat16",
        "Group size": 4, "Process Group Name": "3", "Process Group Ranks": "[0, 2, 4, 6]", "Seq": 11,
    }  # fmt: skip
    events = [
        annotation("ProfilerStep#4", 0, 50),
        annotation("ProfilerStep#5", 60, 50),
        launch(10, 1),
        launch(70, 2),
        kernel("k", 55, 2, 1),
        kernel("ncclDevKernel_AllGather", 80, 2, 2, facts),
        kernel("Memcpy DtoH", 90, 1, -1, {"bytes": 4096}, cat="gpu_memcpy"),
        kernel("ncclDevKernel_Generic", 95, 1),
    ]
    profile, _ = read_profile(write_kineto(tmp_path / "a.json", events))
    assert profile.run.tolist() == [4, 5, -1, -1]
    assert np.nan_to_num(profile.bytes_moved, nan=-1).tolist() == [-1, -1, 4096, -1]
    comms = profile.comms
    assert comms.event.tolist() == [1, 3]
    assert [profile.strings[row] for row in comms.kind_id.tolist()] == ["all_gather", ""]
    assert comms.operand_bytes.tolist()[0] == 16
    assert comms.result_bytes.tolist()[0] == 64
    assert profile.strings[int(comms.ranks_id[0])] == "[0, 2, 4, 6]"
    assert (comms.group_size.tolist(), comms.sequence.tolist()) == ([4, -1], [11, -1])
