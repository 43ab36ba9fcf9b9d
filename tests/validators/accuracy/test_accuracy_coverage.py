"""Figures include all device time, and a step is a run of one program."""

from __future__ import annotations

import csv
import io
import json
from math import isnan, nan

import numpy as np
import pytest

from hespas.graph import CollectiveKind, Diagnostics, OpClass, OpGraph, Profile, Workload
from hespas.validators.accuracy import Accuracy, Thresholds, accuracy, accuracy_json
from hespas.validators.accuracy.programs import step_rows
from hespas.validators.accuracy.report import accuracy_csv, accuracy_html, accuracy_markdown
from hespas.validators.accuracy.result import SummaryRow
from tests.validators.accuracy.small_profiles import Program, Recording

H100 = ["H100-SXM"]
SQUARE = [(256, 256), (256, 256)]
NO_LIMITS = Thresholds(max_mape=nan, max_e2e=nan, min_coverage=nan)
HLO = b"""HloModule jit_f
ENTRY e {
  x = f32[256,256]{1,0} parameter(0)
  ROOT dot.1 = f32[256,256]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}"""


def _program() -> OpGraph:
    program = Program()
    dot = program.add("dot.1", "dot", takes=SQUARE, makes=[(256, 256)], flops=2.0 * 256**3, moved=7e5)
    program.add(
        "add.2", "add", OpClass.ELEMENTWISE, dot, takes=SQUARE, makes=[(256, 256)], flops=65536.0, moved=8e5
    )
    return program.build()


def _compared(*profiles: Profile) -> Accuracy:
    return accuracy(profiles, H100, ["roofline"], workload=Workload.spmd(_program(), 1))


def _whole(done: Accuracy, level: str) -> SummaryRow:
    [row] = [
        row
        for row in done.summary
        if (row.estimator, row.level, row.op_class, row.size) == ("roofline", level, "all", "all")
    ]
    return row


@pytest.mark.parametrize("level", ["instance", "shape"])
def test_unmatched_time_is_not_covered(level: str) -> None:
    recording = Recording()
    for run in range(3):
        recording.event("dot.1", 500.5, run=run)
        recording.event("add.2", 300.5, run=run)
        recording.event("idle", 199.0, run=run)
    done = _compared(recording.build())
    assert _whole(done, level).errors.coverage == pytest.approx(0.801)
    [part] = [
        row
        for row in done.summary
        if (row.estimator, row.level, row.op_class) == ("roofline", level, "contraction")
    ]
    assert part.errors.coverage == 1.0, "nobody knows the class of what is not matched"
    limits = Thresholds(max_mape=nan, max_e2e=nan, min_coverage=0.9)
    assert done.exceeded(limits) == ("roofline on H100-SXM covers 80.1% of the time, the limit is 90.0%",)


def test_all_matched_is_all_covered() -> None:
    recording = Recording()
    for run in range(3):
        recording.event("dot.1", 0.1 + run, run=run)
        recording.event("add.2", 0.7, run=run)
    done = _compared(recording.build())
    assert [_whole(done, level).errors.coverage for level in ("instance", "shape")] == [1.0, 1.0]


def test_coverage_over_shapes_is_of_time_too() -> None:
    """Nine operations of one shape with a cost, one of another without: 90 % of the time, half the shapes."""
    recording = Recording()
    for _ in range(9):
        recording.event("aten::relu", 1000.5, shapes="[[1024, 1024]]", dtypes="float")
    recording.event("aten::nobody_knows", 1000.5, shapes="[[4]]")
    done = accuracy([recording.build()], H100, ["roofline"])
    assert _whole(done, "shape").errors.coverage == pytest.approx(0.9)
    assert _whole(done, "instance").errors.coverage == pytest.approx(0.9)


def test_events_of_no_program_stay_in_the_figures() -> None:
    recording = Recording()
    for run in range(2):
        recording.event("dot.1", 800.5, module="jit_f", run=run)
        recording.event("", 100.0, kernel="memcpy")
        recording.event("x.1", 99.5, module="jit_unread", run=run)
    diagnostics = Diagnostics()
    done = accuracy([recording.build({"hlo/jit_f": HLO})], H100, ["roofline"], diagnostics=diagnostics)
    assert _whole(done, "instance").errors.coverage == pytest.approx(0.8005)
    rest = done.coverage["recording, no program"]
    assert (rest.events, rest.matched_events, rest.time_ns) == (4, 0, 399.0)
    assert {(row.name, row.total_ns) for row in rest.unmatched_events} == {("memcpy", 200.0), ("x.1", 199.0)}
    assert diagnostics.counts()["match.no-program"] == 4
    document = json.loads(accuracy_json(done, NO_LIMITS))
    assert sum(each["events"] for each in document["coverage"]) == 6
    assert accuracy_html(done, NO_LIMITS)


def test_a_step_is_a_run_of_the_module_that_ran_the_program() -> None:
    """Runs are counted per module: run 0 of a helper is no part of run 0 of the step, far away in time."""
    recording = Recording()
    for run, at in ((0, 0.0), (1, 1e4)):
        recording.event("convert", 100.0, at=at, module="jit_helper", run=run)
    for run, at in ((0, 5e6), (1, 6e6)):
        recording.event("dot.1", 3000.0, at=at, module="jit_f", run=run)
        recording.event("add.2", 1000.0, at=at + 3000.0, module="jit_f", run=run)
        recording.event("idle", 500.0, at=at + 4000.0, module="jit_f", run=run)
    done = _compared(recording.build())
    runs = {(run.estimator, run.basis): run for run in done.end_to_end}
    assert runs["roofline", "span"].measured_ns == runs["roofline", "busy"].measured_ns == 4500.0
    assert runs["roofline", "span"].coverage == pytest.approx(8000 / 9200)


def test_the_step_of_each_rank_is_its_own_module() -> None:
    recording = Recording()
    for rank, module in ((0, "jit_a"), (1, "jit_b"), (2, "jit_b")):
        recording.event("dot.1", 100.0, module=module, rank=rank, run=0)
        recording.event("dot.1", 10.0, module="jit_helper", rank=rank, run=0)
    profile = recording.build()
    matched = np.array([True, True, True, False, False, False])
    assert step_rows(profile, matched).tolist() == [0, 2]
    assert step_rows(profile, np.zeros(6, np.bool_)).tolist() == []
    assert step_rows(Recording().build(), np.zeros(0, np.bool_)).tolist() == []


def test_sums_of_operations_add_up_to_the_runs() -> None:
    """Medians of operations that are slow in different runs do not."""
    recording = Recording()
    for run, (dot, add) in enumerate(((900.0, 100.0), (100.0, 900.0), (100.0, 100.0))):
        recording.event("dot.1", dot, run=run)
        recording.event("add.2", add, run=run)
    done = _compared(recording.build())
    [total] = [
        each for each in done.end_to_end if (each.estimator, each.basis) == ("roofline", "sum of operations")
    ]
    assert total.measured_ns == pytest.approx(2200 / 3)
    assert done.cases[0].measured_ns.tolist() == [100.0, 100.0]


def test_a_part_of_the_operations_is_no_step() -> None:
    recording = Recording()
    recording.event("aten::relu", 2000.5, shapes="[[1024, 1024]]", dtypes="float")
    recording.event("aten::nobody_knows", 2000.5, shapes="[[4]]")
    done = accuracy([recording.build()], H100, ["roofline"])
    limits = Thresholds(max_mape=nan, max_e2e=1e9, min_coverage=nan)
    [told] = done.exceeded(limits)
    assert "estimates cover only 50.0% of the device time, not a whole step" in told
    step = done.steps["recording"]
    assert (step.span_ns, step.busy_ns, step.is_simulated) == (4001.0, 4001.0, False)


def test_collectives_of_a_timed_graph_know_the_size_of_the_job() -> None:
    program = Program()
    node = program.add("c", "all_reduce", takes=[(1024,)], moved=4096.0, duration_ns=5000.0)
    program.builder.add_collective(node, CollectiveKind.ALL_REDUCE, group_set=-1, comm_bytes=4096.0)
    graph = program.build()
    times: list[float] = []
    for ranks in (2, 8):
        [cases] = accuracy([Workload.spmd(graph, ranks)], H100, ["roofline"]).cases
        assert [said.estimator for said in cases.predictions[:2]] == ["roofline", "datasheet-roofline"]
        times.extend(float(said.duration_ns[0]) for said in cases.predictions[:2])
    assert not any(map(isnan, times))
    assert times[0] < times[2], "more ranks take longer"


def test_an_estimator_that_says_nothing_is_told() -> None:
    recording = Recording()
    recording.event("aten::nobody_knows", 2000.5, shapes="[[4]]")
    diagnostics = Diagnostics()
    accuracy([recording.build()], H100, ["roofline"], diagnostics=diagnostics)
    assert diagnostics.counts()["accuracy.nothing-estimated"] == 1


def _fused() -> Accuracy:
    program = Program()
    program.add("dot_general.8", "dot", framework="n", takes=SQUARE, flops=1e6, moved=1e6)
    program.add("add.9", "add", OpClass.ELEMENTWISE, framework="n", takes=SQUARE, flops=1e3, moved=1e6)
    module = b"""HloModule jit_f
    ENTRY e {
      x = f32[8]{0} parameter(0)
      ROOT copy_fusion = f32[8]{0} negate(x), metadata={op_name="n"}
    }"""
    recording = Recording()
    recording.event("copy_fusion", 5000.0, module="jit_f", run=0)
    recording.event("copy_fusion", 5000.0, module="jit_f", run=1)
    profile = recording.build({"hlo/jit_f": module})
    return accuracy([profile], H100, ["roofline"], workload=Workload.spmd(program.build(), 1))


def test_every_report_lists_what_an_instruction_carries_out() -> None:
    done = _fused()
    [join] = json.loads(accuracy_json(done, NO_LIMITS))["joins"]
    assert (join["source"], join["module"], join["instruction"], join["rule"], join["operations"]) == (
        "recording", "jit_f", "copy_fusion", "op-name", ["dot_general.8", "add.9"],
    )  # fmt: skip
    assert (join["events"], join["time_ns"], join["group"]) == (2, 10_000.0, 0)
    row = next(csv.DictReader(io.StringIO(accuracy_csv(done))))
    assert (row["events"], json.loads(row["instructions"]), json.loads(row["operations"])) == (
        "2", ["copy_fusion"], ["dot_general.8", "add.9"],
    )  # fmt: skip
    assert "`copy_fusion` | `dot_general.8`, `add.9` | op-name | 2 | 10.00 us |" in accuracy_markdown(
        done, NO_LIMITS
    )
    page = accuracy_html(done, NO_LIMITS)
    assert "Operations of each instruction" in page
    assert "dot_general.8, add.9" in page


def test_a_contribution_says_how_much_its_case_is_made_of() -> None:
    done = _fused()
    [row] = [row for row in done.contributions if row.estimator == "roofline"]
    assert (row.count, row.instructions, row.operations) == (1, 1, 2)
    assert "| 1 : 2 |" in accuracy_markdown(done, NO_LIMITS)
