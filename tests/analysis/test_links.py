"""Network use of a simulated step: closed forms by hand, loops, overload, and ranks of a class."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import hespas
from hespas.analysis.links import LinkRow, NetworkUtilization, network_utilization
from hespas.api import SimulationResult
from hespas.cli.main import app
from hespas.graph import CollectiveKind, Diagnostics, Permutation, StridedGroups, Timeline, Workload
from hespas.hardware import load_system
from hespas.simulator import ListScheduler
from tests.simulator.network.test_workload import SIZE, job
from tests.simulator.small_programs import Sketch

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = [
    (FIXTURES / "hlo" / "moe_all_to_all.hlo.txt", "hgx-mi300x"),
    (FIXTURES / "hlo" / "pipeline_ring.hlo.txt", "tpu-v5e"),
    (FIXTURES / "chakra" / "pipeline_2x2", "loopback"),
    (FIXTURES / "stablehlo" / "llama_fsdp_tp_local_N8.mlir.gz", "dgx-h100"),
    (FIXTURES / "stablehlo" / "llama_fsdp_tp_local_N8.mlir.gz", "tpu-v5p"),
]


def links_of(done: SimulationResult) -> NetworkUtilization:
    assert done.network_utilization is not None
    return done.network_utilization


@pytest.mark.parametrize(("source", "system"), CASES, ids=[f"{path.name}-{name}" for path, name in CASES])
def test_no_link_carries_more_than_it_can(source: Path, system: str) -> None:
    done = hespas.simulate(source, system=system)
    found = links_of(done)
    assert "simulate.links" not in done.diagnostics.counts()
    for row in found.links.rows():
        assert 0 <= row.utilization_share <= 1
        assert row.sent_bytes <= row.most_sent_bytes
        assert row.most_in_use_ns <= done.step_ns * (1 + 1e-9)
        if row.sent_bytes:
            assert row.utilization_share <= row.in_use_utilization_share <= 1 + 1e-9
        own = found.traffic["sent_bytes"][found.traffic["dimension"] == row.dimension]
        assert own.sum() == pytest.approx(row.sent_bytes)


def test_bytes_of_a_job_are_the_closed_forms() -> None:
    """Sums inside nodes and across them, and a ring of messages, of which one in eight leaves its node."""
    inside, across = StridedGroups(((2, 8),), ((8, 1),)), StridedGroups(((8, 1),), ((2, 8),))
    ring = Permutation.from_pairs([(rank, (rank + 1) % 16) for rank in range(16)], 16)
    done = hespas.simulate(job(16, inside, across, permutation=ring), system="dgx-h100", on_unknown="zero")
    rows = {(row.dimension, row.kind): row for row in links_of(done).traffic.rows()}
    assert rows["InfiniBand NDR", "all_reduce"].sent_bytes == SIZE
    assert rows["InfiniBand NDR", "send/recv"].sent_bytes == SIZE / 8
    assert rows["NVLink 4", "send/recv"].sent_bytes == pytest.approx(SIZE * 7 / 8)
    summed = rows["NVLink 4", "all_reduce"]
    closed = {"in network": 1.0, "ring": 1.75, "hierarchical": 1.75, "tree": 1.75}
    assert summed.sent_bytes == pytest.approx(SIZE * closed[summed.algorithm])
    most = dict(zip(*(links_of(done).links[name] for name in ("dimension", "most_sent_bytes")), strict=True))
    assert most["InfiniBand NDR"] == 2 * SIZE


def test_trips_of_a_loop_count_whether_or_not_they_were_run() -> None:
    sketch = Sketch()
    body = sketch.loop(1000)
    sketch.add("comm", 1e6, region=body)
    graph = sketch.build()
    assert len(graph.collectives) == 1
    workload, system = Workload.spmd(graph, 8), load_system("dgx-h100").sized(8)
    found: list[LinkRow] = []
    for trips in (10, 5000):
        done = hespas.simulate(workload, simulator=ListScheduler(max_executions=trips))
        found.append(network_utilization(done.workload, done.timeline, system).links.rows()[0])
    assert [row.most_in_use_ns for row in found] == pytest.approx([1e9, 1e9])
    assert found[0].in_use_ns == pytest.approx(found[1].in_use_ns)
    assert found[0].sent_bytes == pytest.approx(found[1].sent_bytes, nan_ok=True)


def test_transfers_at_once_beyond_the_link_are_told() -> None:
    """Two sums at the same time, each of which takes all of the link."""
    done = hespas.simulate(job(8, StridedGroups(((1, 8),), ((8, 1),))), system="dgx-h100", on_unknown="zero")
    (graph,), (span,) = done.workload.classes, np.flatnonzero(done.timeline.node == 0)[:1]
    two = np.zeros(2, np.int64) + span
    old, whole_ns = done.timeline, 1.75 * SIZE / 450
    timeline = Timeline(
        resources=old.resources, node=old.node[two], rank=old.rank[two], resource=old.resource[two],
        start_ns=np.zeros(2), end_ns=np.full(2, whole_ns), critical=old.critical[two],
        finish_ns=np.full(8, whole_ns), exposed_comm_ns=old.exposed_comm_ns, shown_by=old.shown_by,
    )  # fmt: skip
    told = Diagnostics()
    (row,) = network_utilization(done.workload, timeline, load_system("dgx-h100").sized(8), told).links.rows()
    assert int(graph.collectives.kind[0]) == int(CollectiveKind.ALL_REDUCE)
    assert told.counts() == {"simulate.links": 8}
    assert row.utilization_share > 1
    assert row.in_use_ns == pytest.approx(whole_ns)


def test_the_document_the_terminal_and_the_report_have_them(tmp_path: Path) -> None:
    source, folder = str(CASES[0][0]), tmp_path / "report"
    ran = CliRunner().invoke(app, ["simulate", source, "--system", "dgx-h100", "--report", str(folder)])
    assert ran.exit_code == 0, ran.output
    assert "utilization" in ran.output
    document = json.loads((folder / "simulation.json").read_text())
    assert [row["dimension"] for row in document["links"]] == ["NVLink 4"]
    assert document["link_traffic"][0]["algorithm"] == "direct"
    assert (folder / "links.csv").exists()
    assert (folder / "link_traffic.csv").exists()


def test_without_a_system_there_are_no_links() -> None:
    assert hespas.simulate(CASES[2][0]).network_utilization is None
