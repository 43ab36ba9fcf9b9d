"""Time tables of a simulated step, compared with its timeline."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import hespas
from hespas.analysis.simulated import simulated_step
from hespas.cli.main import app
from hespas.graph import Timeline, Workload
from hespas.simulator import ListScheduler, Simulation
from tests.simulator.small_programs import Sketch

FIXTURES = Path(__file__).parents[2] / "fixtures"
SHARDED = FIXTURES / "stablehlo" / "llama_fsdp_tp_local_N8.mlir.gz"
NAMED = FIXTURES / "hlo" / "scan_layers_train.hlo.txt"
RING = FIXTURES / "hlo" / "pipeline_ring.hlo.txt"
PIPELINE = FIXTURES / "chakra" / "pipeline_2x2"


@pytest.fixture(params=[SHARDED, NAMED, RING, PIPELINE], ids=lambda path: path.name)
def done(request: pytest.FixtureRequest) -> Simulation:
    path: Path = request.param
    return hespas.simulate(path, "H100-SXM", estimator="roofline")


def alike(timeline: Timeline) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([int((timeline.shown_by == rank).sum()) for rank in range(len(timeline.finish_ns))])


def test_parts_add_up_to_the_step(done: Simulation) -> None:
    table = simulated_step(done).breakdown
    parts = ("compute_ns", "exposed_communication_ns", "exposed_memory_ns", "idle_ns")
    assert sum(table[name] for name in parts) == pytest.approx(table["span_ns"])
    assert table["span_ns"] == pytest.approx(done.step_ns)
    assert table["alike"].sum() == done.workload.num_available


def test_every_table_counts_all_of_the_time(done: Simulation) -> None:
    timeline, step = done.timeline, simulated_step(done)
    work_ns = timeline.end_ns - timeline.start_ns - timeline.wait_ns
    spent_ns = float((work_ns * alike(timeline)[timeline.rank]).sum())
    for table in (step.classes, step.operations):
        assert table["total_ns"].sum() == pytest.approx(spent_ns)
        assert table["share"].sum() == pytest.approx(1.0)
    tops = step.modules["parent"] < 0
    if len(step.modules):
        own = timeline.node >= 0
        of_nodes = (work_ns * alike(timeline)[timeline.rank])[own].sum()
        assert step.modules["total_ns"][tops].sum() == pytest.approx(of_nodes)
        assert step.modules["own_ns"].sum() == pytest.approx(of_nodes)
    assert step.spans["count"].sum() == len(timeline)


def test_the_critical_path_is_as_long_as_the_step(done: Simulation) -> None:
    step = simulated_step(done)
    assert step.critical_path["total_ns"].sum() == pytest.approx(done.step_ns)
    assert step.classes["critical_ns"].sum() == pytest.approx(done.step_ns)


def test_a_pipeline_waits_and_its_path_leads_through_ranks() -> None:
    """Forward on both stages, then backward, 200 and 300 us: by hand from the fixture's script."""
    done = hespas.simulate(PIPELINE)
    step = simulated_step(done)
    rows = {row.rank: row for row in step.breakdown.rows()}
    assert (rows[0].waiting_ns, rows[2].waiting_ns) == (300_000.0, 100_000.0)
    assert (rows[0].idle_ns, rows[2].idle_ns) == (300_000.0, 300_000.0)
    assert [(row.rank, row.duration_ns) for row in step.across.rows()] == [
        (0, 200_000.0),
        (2, 500_000.0),
        (0, 200_000.0),
    ]


def test_communication_by_axis_is_that_of_the_ranks() -> None:
    done = hespas.simulate(SHARDED, "H100-SXM", estimator="roofline")
    axes = simulated_step(done).axes
    talk = done.timeline.resource_ns("communication").sum()
    assert axes["total_ns"].sum() == pytest.approx(talk)
    assert axes["exposed_ns"].sum() == pytest.approx(done.timeline.exposed_comm_ns.sum())
    (reduced,) = [row for row in axes.rows() if row.kind == "all_reduce" and row.group_size == 4]
    table, graph = done.workload.classes[0].collectives, done.workload.classes[0]
    rows: list[int] = table.group_set.tolist()
    sizes = [graph.group_sets[row].group_size for row in rows]
    mine = (table.kind == 0) & (np.array(sizes) == 4)
    assert reduced.count == 8 * mine.sum()
    assert reduced.size_bytes == table.comm_bytes[mine].sum()
    assert reduced.bus_gbytes_per_s == pytest.approx(1.5 * reduced.algorithm_gbytes_per_s)


def test_modules_are_a_tree() -> None:
    modules = simulated_step(hespas.simulate(NAMED, "H100-SXM", estimator="roofline")).modules.rows()
    assert len(modules) > 3
    for row in modules:
        inside = [each for each in modules if each.parent == row.node]
        assert all(each.depth == row.depth + 1 for each in inside)
        assert row.total_ns == pytest.approx(row.own_ns + sum(each.total_ns for each in inside))


def test_the_report_is_a_page_its_tables_and_the_document(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    asked = ["simulate", str(SHARDED), "--hardware", "H100-SXM", "--report", str(folder)]
    first = CliRunner().invoke(app, asked)
    assert first.exit_code == 0, first.output
    document = json.loads((folder / "simulation.json").read_text())
    assert document["schema"] == "hespas.simulate/1"
    names = set(re.findall(r'<section id="(\w+)"', (folder / "index.html").read_text())) - {"diagnostics"}
    assert {"breakdown", "spans", "critical_path", "classes", "axes", "operations"} <= names
    assert names == {path.stem for path in folder.glob("*.csv")}
    again = CliRunner().invoke(app, asked)
    assert (again.exit_code, "exists" in again.output) == (2, True)
    assert CliRunner().invoke(app, [*asked, "--overwrite"]).exit_code == 0


def test_trips_that_were_not_run_one_by_one_are_counted() -> None:
    sketch = Sketch()
    body = sketch.loop(1000)
    sketch.add("product", 10.0, region=body)
    sketch.add("product", 5.0)
    workload = Workload.spmd(sketch.build(), 1)
    done = hespas.simulate(workload, simulator=ListScheduler(max_executions=10))
    step = simulated_step(done)
    counts = dict(zip(step.classes["op_class"], step.classes["count"], strict=True))
    assert counts == {"contraction": 2, "loop": 999}
    assert step.operations["total_ns"].sum() == done.step_ns == 10_005.0


def test_gaps_by_length_are_the_time_without_computation(done: Simulation) -> None:
    step = simulated_step(done)
    gaps, ranks = step.idle_lengths, step.breakdown
    without_ns = float(((ranks["span_ns"] - ranks["compute_ns"]) * ranks["alike"]).sum())
    assert gaps["total_ns"].sum() == pytest.approx(without_ns, abs=1e-3)
    assert set(gaps["cause"].tolist()) <= {"communication", "copy", "host", "waiting"}
    mean = gaps["total_ns"] / gaps["count"]
    assert ((gaps["from_ns"] <= mean * (1 + 1e-9)) & (mean <= gaps["to_ns"])).all()
