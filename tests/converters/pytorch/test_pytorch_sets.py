"""Real sets of several ranks: all communication is present, times are preserved, simulators accept them."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from hespas.api import convert
from hespas.converters import sniff
from hespas.graph import CollectiveKind, Diagnostics, NodeKind, OpClass, OpGraph, Severity, Workload
from hespas.graph.passes import is_topological, without_waits
from hespas.simulator import ListScheduler, simulate
from hespas.validators.checker import check as check_paths
from tests.converters.pytorch.traces import (
    DATA,
    Json,
    absent,
    dlrm,
    gloo,
    kernel,
    read_folder,
    write_kineto,
)

pytestmark = absent

KIND = CollectiveKind
GLOO: dict[str, Counter[str]] = {
    "gloo2_coll": Counter(
        {
            "ALL_REDUCE": 4, "BROADCAST": 2, "ALL_GATHER": 2, "ALL_TO_ALL": 2, "REDUCE_SCATTER": 2,
            "REDUCE": 2, "BARRIER": 2,
        }
    ),
    "gloo2_fsdp2": Counter({"ALL_GATHER": 10, "REDUCE_SCATTER": 6}),
    "gloo2_ddp": Counter({"ALL_REDUCE": 2}),
}  # fmt: skip


def events_of(path: Path) -> list[Json]:
    data = path.read_bytes()
    text = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    return cast("list[Json]", json.loads(text.decode("utf-8", "replace"))["traceEvents"])


def nanoseconds(value: object) -> int:
    return int((Decimal(str(value)) * 1000).to_integral_value())


def union_ns(spans: list[tuple[int, int]]) -> int:
    """The length of the union of intervals."""
    total, reached = 0, None
    for start, end in sorted(spans):
        begin = start if reached is None else max(start, reached)
        total += max(end - begin, 0)
        reached = end if reached is None else max(reached, end)
    return total


def host_spans(path: Path) -> dict[object, list[tuple[int, int]]]:
    """Operations and work of Gloo by thread."""
    threads: dict[object, list[tuple[int, int]]] = {}
    for event in events_of(path):
        name = str(event["name"])
        if event.get("ph") == "X" and (event.get("cat") == "cpu_op" or name.startswith("gloo:")):
            start = nanoseconds(event["ts"])
            threads.setdefault(event["tid"], []).append((start, start + nanoseconds(event["dur"])))
    return threads


def host_time_ns(path: Path) -> int:
    """Return the time of operations by thread, and of works of Gloo with the calls that block for them."""
    threads: dict[object, list[tuple[int, int]]] = {}
    called: tuple[object, tuple[int, int]] | None = None
    total = 0
    events = [event for event in events_of(path) if event.get("ph") == "X" and "args" in event]
    for event in sorted(events, key=record_id):
        thread, start = event["tid"], nanoseconds(event["ts"])
        span = start, start + nanoseconds(event["dur"])
        if str(event["name"]).startswith("gloo:"):
            if called is not None and called[0] == thread:
                threads[thread].remove(called[1])
                span = min(span[0], called[1][0]), max(span[1], called[1][1])
            called = None
            total += span[1] - span[0]
        elif event["cat"] == "cpu_op":
            threads.setdefault(thread, []).append(span)
            called = (thread, span) if str(event["name"]).startswith("c10d::") else called
    return total + sum(map(union_ns, threads.values()))


def record_id(event: Json) -> int:
    """Return the number of a record, which counts in the order of starts; 0 for none."""
    return int(str(cast("Json", event["args"]).get("Record function id", 0)))


def host_span_ns(path: Path) -> int:
    """From the first start to the last end of them."""
    spans = [span for thread in host_spans(path).values() for span in thread]
    return max(end for _, end in spans) - min(start for start, _ in spans)


def device_time_ns(path: Path) -> tuple[int, int]:
    wanted = {"kernel", "gpu_memcpy", "gpu_memset"}
    lengths = [
        nanoseconds(event["dur"])
        for event in events_of(path)
        if event.get("ph") == "X" and event.get("cat") in wanted
    ]
    return len(lengths), sum(lengths)


def collectives(graph: OpGraph) -> Counter[str]:
    return Counter(KIND(kind).name for kind in graph.collectives.kind.tolist())


def check(folder: Path, tmp_path: Path) -> tuple[Diagnostics, list[str]]:
    """Convert to Chakra, and check the result for a simulator."""
    diagnostics = Diagnostics()
    done = convert(folder, tmp_path / "out", target_format="chakra", diagnostics=diagnostics)
    assert done.conservation is not None
    before, after = done.conservation.before.device_time_ns, done.conservation.after.device_time_ns
    assert before == pytest.approx(after, rel=0, abs=0, nan_ok=True)
    result = check_paths([tmp_path / "out"], profile="astra-sim")
    assert not result.unreadable
    return diagnostics, [each.message for each in result.violations if each.severity is Severity.ERROR]


@pytest.mark.parametrize("name", GLOO)
def test_every_gloo_collective_is_a_communication_node(name: str, tmp_path: Path) -> None:
    workload, found = read_folder(gloo(tmp_path, name))
    assert workload.num_ranks == 2
    for graph in workload.classes:
        assert is_topological(graph)
        assert collectives(graph) == GLOO[name]
        assert all(groups.is_world(2) for groups in graph.group_sets)
        assert (graph.collectives.group_set == 0).all()
        sized = graph.collectives.kind != KIND.BARRIER
        assert (graph.collectives.comm_bytes[sized] > 0).all()
    counts = found.counts()
    assert "pytorch.not-in-profile" not in counts
    assert "pytorch.linked-by-order" not in counts
    assert "pytorch.work-without-call" not in counts


def test_gloo_messages_and_payloads(tmp_path: Path) -> None:
    """Each step sends 1,024 floats with tag 7 from rank 0 to 1, and exchanges as many with tag 0."""
    workload, _ = read_folder(gloo(tmp_path, "gloo2_coll"))
    for rank, graph in enumerate(workload.classes):
        kinds = graph.kind[graph.p2p.node].tolist()
        first = NodeKind.SEND if rank == 0 else NodeKind.RECV
        assert kinds == [first, NodeKind.SEND, NodeKind.RECV] * 2
        assert graph.p2p.tag.tolist() == [7, 0, 0] * 2
        assert graph.p2p.comm_bytes.tolist() == [4096.0] * 6
        rows: list[int] = graph.p2p.permutation.tolist()
        ways = [list(graph.permutations[row]) for row in rows]
        assert ways == [[(0, 1)], [(rank, 1 - rank)], [(1 - rank, rank)]] * 2
        table = graph.collectives
        sizes = dict(
            zip([KIND(kind).name for kind in table.kind.tolist()], table.comm_bytes.tolist(), strict=True)
        )
        assert {
            sizes[kind] for kind in ("ALL_REDUCE", "ALL_GATHER", "ALL_TO_ALL", "REDUCE_SCATTER", "REDUCE")
        } == {4096.0}
        scattered = table.result_bytes[table.kind == KIND.REDUCE_SCATTER]
        assert scattered.tolist() == [2048.0, 2048.0]


def test_sharded_parameters_are_gathered_whole(tmp_path: Path) -> None:
    """The three shards of the model, in floats: 6,450 of the head and 66,240 of each layer."""
    workload, _ = read_folder(gloo(tmp_path, "gloo2_fsdp2"))
    table = workload.classes[0].collectives
    gathers = table.kind == KIND.ALL_GATHER
    assert set(table.comm_bytes[gathers].tolist()) == {6450 * 4.0, 66240 * 4.0}
    assert (table.result_bytes[gathers] == 2 * table.comm_bytes[gathers]).all()
    assert (table.result_bytes[~gathers] * 2 == table.comm_bytes[~gathers]).all()


@pytest.mark.parametrize("name", [*GLOO, "transformer2l", "nosched"])
def test_host_time_is_kept_to_the_nanosecond(name: str, tmp_path: Path) -> None:
    folder = gloo(tmp_path, name)
    workload, _ = read_folder(folder)
    traces = sorted(folder.glob("*.kineto.json.gz"))
    assert [int(without_waits(graph).duration_ns.sum()) for graph in workload.classes] == [
        host_time_ns(path) for path in traces
    ]
    alone = simulate(workload, simulator=ListScheduler()).classes
    together = simulate(workload).timeline
    for rank, (each, path) in enumerate(zip(alone, traces, strict=True)):
        assert each.finish_ns == host_span_ns(path)
        mine = together.rank == rank
        span_ns = together.end_ns[mine].max() - together.start_ns[mine].min()
        assert span_ns == pytest.approx(host_span_ns(path), rel=0.05)  # waits told apart from work


@pytest.mark.parametrize("name", GLOO)
def test_gloo_sets_become_traces_a_simulator_takes(name: str, tmp_path: Path) -> None:
    folder = gloo(tmp_path, name)
    assert sniff(folder).name == "pytorch"
    found, errors = check(folder, tmp_path)
    assert errors == []
    substituted = {
        code: count for code, count in found.counts().items() if code.startswith("pass.substituted")
    }
    expected = {"pass.substituted-reduce": 4, "pass.substituted-barrier": 4} if name == "gloo2_coll" else {}
    assert substituted == expected


def test_execution_traces_alone_become_traces_a_simulator_takes(tmp_path: Path) -> None:
    folder = gloo(tmp_path, "gloo2_coll")
    for profile in folder.glob("*.kineto.json.gz"):
        profile.unlink()
    workload, _ = read_folder(folder)
    assert [collectives(graph) for graph in workload.classes] == [GLOO["gloo2_coll"]] * 2
    assert [len(graph.p2p) for graph in workload.classes] == [6, 6]
    assert check(folder, tmp_path)[1] == []


# --- eight ranks with NCCL

RANK_0 = [24576, 192, 1536, 13568, 394241 * 4, 24576, 448, 907840]
"""Payloads of rank 0 in its execution trace (``record_param_comms``, in order); the fourth has unequal
parts.
"""


def test_dlrm_device_time_is_kept_and_every_collective_known(tmp_path: Path) -> None:
    workload, found = read_folder(dlrm())
    assert workload.num_ranks == 8
    for rank, graph in enumerate(map(without_waits, workload.classes)):
        path = next((dlrm() / "dlrm_kineto").glob(f"worker{rank}_*"))
        assert (len(graph), int(graph.duration_ns.sum())) == device_time_ns(path)
        assert is_topological(graph)
        assert collectives(graph) == Counter({"ALL_TO_ALL": 4, "RAGGED_ALL_TO_ALL": 1, "ALL_REDUCE": 3})
        assert graph.collectives.operand_bytes.min() > 0
    table = workload.classes[0].collectives
    assert table.operand_bytes.tolist() == RANK_0
    assert found.counts()["pytorch.linked-by-order"] >= 8 * 1474
    assert check(dlrm(), tmp_path)[1] == []


def test_a_ragged_exchange_has_the_payload_of_the_rank_that_sends_most(tmp_path: Path) -> None:
    for rank, elements in enumerate((12, 20)):
        facts: Json = {
            "Collective name": "all_to_allv", "In msg nelems": elements, "Out msg nelems": 32 - elements,
            "dtype": "Int", "Group size": 2, "In split size": f"[{elements - 4}, 4]" if rank else "[6, 6]",
        }  # fmt: skip
        later: Json = {**facts, "Collective name": "all_to_all", "In msg nelems": 8, "In split size": "[]"}
        write_kineto(
            tmp_path / f"a.rank{rank}.json",
            [
                kernel("ncclDevKernel_SendRecv", 1, 2, -1, facts),
                kernel("ncclDevKernel_SendRecv", 4, 2, -1, later),
            ],
            distributedInfo={"rank": rank, "world_size": 2},
        )
    workload, found = read_folder(tmp_path)
    tables = [graph.collectives for graph in workload.classes]
    ragged, even = KIND.RAGGED_ALL_TO_ALL, KIND.ALL_TO_ALL
    assert [table.kind.tolist() for table in tables] == [[ragged, even]] * 2
    assert [table.comm_bytes.tolist() for table in tables] == [[80.0, 32.0]] * 2
    assert [table.operand_bytes.tolist() for table in tables] == [[48.0, 32.0], [80.0, 32.0]]
    assert found.counts()["pytorch.ragged-exchange"] == 1


def test_dlrm_waits_agree_with_the_measured_times() -> None:
    """No node starts before what it waits for has ended; the clock of this set counts whole microseconds."""
    workload, _ = read_folder(dlrm())
    for rank, graph in enumerate(map(without_waits, workload.classes)):
        path = next((dlrm() / "dlrm_kineto").glob(f"worker{rank}_*"))
        wanted = {"kernel", "gpu_memcpy", "gpu_memset"}
        rows = [event for event in events_of(path) if event.get("cat") in wanted]
        rows.sort(
            key=lambda event: (float(str(event["ts"])), int(str(cast("Json", event["args"])["stream"])))
        )
        start = np.array([nanoseconds(event["ts"]) for event in rows])
        end = start + np.array([nanoseconds(event["dur"]) for event in rows])
        for deps in (graph.data_deps, graph.control_deps):
            assert (end[deps.values] <= start[deps.row_ids]).all()


def test_profiles_alone_keep_all_device_time(tmp_path: Path) -> None:
    shutil.copytree(dlrm() / "dlrm_kineto", tmp_path / "kineto")
    workload, _ = read_folder(tmp_path / "kineto")
    for rank, graph in enumerate(map(without_waits, workload.classes)):
        path = next((dlrm() / "dlrm_kineto").glob(f"worker{rank}_*"))
        assert (len(graph), int(graph.duration_ns.sum())) == device_time_ns(path)
        assert len(graph.collectives) == 8
        exchanged = graph.collectives.kind != KIND.ALL_REDUCE
        assert (graph.collectives.comm_bytes[exchanged] > 0).all()


@pytest.mark.parametrize(
    "name", ["h100_qwen1.5-0.5b_inf", "mi300x_qwen1.5-0.5b_inf", "a100-40_recsys_train_rank3of8"]
)
def test_work_launched_before_the_window_is_kept(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name.partition('_rank')[0]}.json.gz"
    shutil.copyfile(DATA / "profiles" / f"{name}.json.gz", path)
    workload, _ = read_folder(tmp_path)
    graph = without_waits(workload.classes[0])
    assert isinstance(workload, Workload)
    assert (len(graph), int(graph.duration_ns.sum())) == device_time_ns(path)
    assert (graph.control_deps.lengths[1:] > 0).mean() > 0.9


def test_a_run_of_the_host_costs_the_same_by_both_records(tmp_path: Path) -> None:
    """By the profiler, by the execution trace, and by both linked: each operation once."""
    graphs: list[OpGraph] = []
    for number, kinds in enumerate(("kineto", "et_host", "*")):
        folder = tmp_path / str(number)
        folder.mkdir()
        for source in (DATA / "pytorch_cpu").glob(f"transformer2l.{kinds}.json.gz"):
            shutil.copyfile(source, folder / source.name)
        graphs.extend(read_folder(folder)[0].classes)
    assert len(graphs) == 3
    # 3 steps over 256 tokens of 2 layers and a head; twice that backward, but for the first layer's input.
    layer = 128 * 384 + 128 * 128 + 128 * 256 + 256 * 128
    products = 3 * 2 * 256 * (3 * (2 * layer + 128 * 100) - 128 * 384)
    for graph in graphs:
        table = graph.contractions
        linear = graph.op_class[table.node] == OpClass.CONTRACTION
        assert table.flops[linear].sum() == products
        assert not np.isnan(graph.flops + graph.bytes_moved).any()
        assert (graph.flops.sum(), graph.bytes_moved.sum()) == (
            graphs[0].flops.sum(),
            graphs[0].bytes_moved.sum(),
        )
