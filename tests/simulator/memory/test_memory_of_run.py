"""Memory of a simulated run: time of the peak, whether it fits, and metadata."""

from __future__ import annotations

from dataclasses import replace
from math import isnan, nan
from pathlib import Path

import msgspec
import numpy as np
import pytest

import hespas
from hespas.graph import Timeline, Workload
from hespas.hardware import load_device
from hespas.simulator import ListScheduler
from hespas.simulator.memory import RankMemory, memory_by_class, memory_use
from tests.simulator.memory.test_memory_use import Draft, looped

FIXTURES = Path(__file__).parents[3] / "fixtures"


def timeline(starts: list[float], ends: list[float]) -> Timeline:
    count = len(starts)
    return Timeline(
        resources=("compute",),
        node=np.arange(count, dtype=np.int32),
        rank=np.zeros(count, np.int32),
        resource=np.zeros(count, np.int8),
        start_ns=np.array(starts),
        end_ns=np.array(ends),
        critical=np.zeros(count, np.bool_),
        finish_ns=np.array([max(ends)]),
        exposed_comm_ns=np.zeros(1),
    )


def chain() -> Draft:
    """Two values side by side, then one of both."""
    draft = Draft()
    left = draft.product(100)
    right = draft.product(100)
    draft.product(1, left, right)
    return draft


def run_memory(draft: Draft, when: Timeline, capacity: float = nan, **metadata: str) -> RankMemory:
    workload = Workload(
        name="job",
        classes=(draft.builder.build(),),
        rank_class=np.zeros(1, np.int32),
        metadata=metadata,
    )
    device = load_device("H100-SXM")
    memories = tuple(
        msgspec.structs.replace(memory, capacity_bytes=-1 if isnan(capacity) else int(capacity))
        if memory == device.main_memory
        else memory
        for memory in device.memories
    )
    (found,) = memory_by_class(workload, when, {0: 0}, replace(device, memories=memories))
    return found


def test_the_peak_is_at_a_time_of_the_run() -> None:
    found = run_memory(chain(), timeline([0.0, 50.0, 70.0], [40.0, 60.0, 80.0]))
    assert (found.use.peak_bytes, found.use.at_node, found.use.at_ns) == (201, 2, 70.0)
    assert found.fits is None


@pytest.mark.parametrize(("capacity", "fits"), [(201.0, True), (200.0, False)])
def test_it_fits_or_not(capacity: float, fits: bool) -> None:
    found = run_memory(chain(), timeline([0.0, 0.0, 1.0], [1.0, 1.0, 2.0]), capacity)
    assert found.fits is fits
    whole = run_memory(chain(), timeline([0.0, 0.0, 1.0], [1.0, 1.0, 2.0]), capacity, whole_job_parts="4")
    assert whole.fits is None


def test_a_scheduled_program_needs_memory_by_its_own_order() -> None:
    draft = Draft()
    first = draft.product(100)
    draft.product(1, first)
    second = draft.product(100)
    draft.product(1, second)
    together = timeline([0.0, 10.0, 0.0, 10.0], [10.0, 20.0, 10.0, 20.0])
    assert run_memory(draft, together).use.peak_bytes == 202
    assert run_memory(draft, together, is_scheduled="true").use.peak_bytes == 102


def test_parameters_and_results_of_metadata_are_there_throughout() -> None:
    found = run_memory(
        chain(), timeline([0.0, 0.0, 1.0], [1.0, 1.0, 2.0]), program_bytes="1000 300 200"
    ).use  # fmt: skip
    assert (found.parameters_bytes, found.outputs_bytes, found.donated_bytes) == (1000, 100, 200)
    assert found.temporaries_bytes == 200  # what nobody reads is a result
    assert found.peak_bytes == 1000 + 100 + 200


def test_a_recording_that_says_who_waits_but_not_who_reads_is_left_out() -> None:
    draft = Draft()
    for _ in range(3):
        draft.product(100)
    workload = Workload.spmd(draft.builder.build(), 1)
    assert memory_by_class(workload, timeline([0.0, 1.0, 2.0], [1.0, 2.0, 3.0]), {0: 0}) == ()


def test_loops_that_are_extrapolated_need_what_unrolled_ones_do() -> None:
    draft = looped(50.0, in_place=False)
    graph = draft.builder.build()
    for node in range(len(graph)):
        draft.builder.set(node, duration_ns=1.0)
    workload = Workload.spmd(draft.builder.build(), 1)
    expected = memory_use(graph)
    assert expected is not None
    for most in (1, 10_000):
        scheduler = ListScheduler(max_executions=most)
        (found,) = hespas.simulate(workload, simulator=scheduler).memory
        assert found.use.peak_bytes == expected.peak_bytes


def test_the_document_states_the_memory() -> None:
    done = hespas.simulate(FIXTURES / "hlo" / "mlp_train.hlo.txt", "H100-SXM")
    document = msgspec.json.decode(done.to_json())
    (row,) = document["memory"]
    assert row["fits"] is True
    assert row["capacity_bytes"] == pytest.approx(80 * 2**30)
    parts = ("parameters", "constants", "outputs", "temporaries")
    assert row["peak_bytes"] == sum(row[f"{part}_bytes"] for part in parts)
    assert 0 <= row["at_ns"] <= document["step_ns"]
    assert row["largest"][0]["size_bytes"] == 512 * 2048 * 4


def test_a_program_before_it_is_compiled_needs_about_what_the_compiled_one_does() -> None:
    """StableHLO states parameters and results, and is fused as compilers do: within a fifth of XLA's."""
    for name in ("mlp_train.mlir", "llama_train_1dev.mlir.gz"):
        compiled = FIXTURES / "hlo" / name.replace(".mlir", ".hlo.txt")
        (before,), (after,) = (
            hespas.simulate(path, "H100-SXM").memory for path in (FIXTURES / "stablehlo" / name, compiled)
        )
        assert before.use.parameters_bytes == after.use.parameters_bytes
        assert before.use.donated_bytes == after.use.donated_bytes
        assert before.use.peak_bytes == pytest.approx(after.use.peak_bytes, rel=0.2)


@pytest.mark.parametrize(
    "path",
    ["stablehlo/llama_fsdp_tp_local_N8.mlir.gz", "hlo/scan_layers_train.hlo.txt", "stablehlo/mlp.mlir"],
)
def test_contents_over_the_step_add_up(path: str) -> None:
    done = hespas.simulate(FIXTURES / path, "H100-SXM", estimator="roofline")
    assert done.memory
    for memory in done.memory:
        use = memory.use
        total = np.sum(list(use.contents.values()), axis=0)
        assert total == pytest.approx(use.held_bytes[use.sample])
        assert total.max() == pytest.approx(use.peak_bytes)
        assert sum(use.peak_contents.values()) == pytest.approx(use.peak_bytes)
        at_peak = {name: layer[int(np.argmax(total))] for name, layer in use.contents.items()}
        assert {name: size for name, size in at_peak.items() if size} == pytest.approx(use.peak_contents)
