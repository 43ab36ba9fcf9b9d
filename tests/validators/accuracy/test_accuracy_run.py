"""Whole comparison: small programs by hand, and odd recordings."""

from __future__ import annotations

import json
from dataclasses import replace
from math import isnan, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.converters import Format, load_format
from hespas.graph import Diagnostics, HostOps, OpClass, OpGraph, Profile, Workload
from hespas.graph.errors import MissingExtraError, UsageError
from hespas.validators.accuracy import Accuracy, Thresholds, accuracy, accuracy_json, programs
from hespas.validators.accuracy.run import busy_ns, span_ns
from tests.validators.accuracy.small_profiles import Program, Recording

H100 = ["H100-SXM"]
SQUARE = [(256, 256), (256, 256)]


def _program() -> OpGraph:
    program = Program()
    dot = program.add("dot.1", "dot", takes=SQUARE, makes=[(256, 256)], flops=2.0 * 256**3, moved=7e5)
    program.add(
        "add.2", "add", OpClass.ELEMENTWISE, dot, takes=SQUARE, makes=[(256, 256)], flops=65536.0, moved=8e5
    )
    return program.build()


def _recording(name: str = "recording", runs: int = 2) -> Profile:
    recording = Recording(name)
    for run in range(runs):
        recording.event("dot.1", 3000.0 + run, run=run)
        recording.event("add.2", 1000.5, run=run)
        recording.event("idle", 500.0, run=run)
    return recording.build()


def _compared(graph: OpGraph, *profiles: Profile, diagnostics: Diagnostics | None = None) -> Accuracy:
    return accuracy(profiles, H100, ["roofline"], workload=Workload.spmd(graph, 1), diagnostics=diagnostics)


def test_one_recording_of_one_program() -> None:
    done = _compared(_program(), _recording())
    [cases] = done.cases
    found = dict(zip(cases.labels, cases.measured_ns.tolist(), strict=True))
    assert found == {"dot.1": 3000.5, "add.2": 1000.5}
    assert [said.estimator for said in cases.predictions] == [
        "roofline",
        "datasheet-roofline",
        "one-efficiency",
        "overhead+two-efficiencies",
    ]
    coverage = done.coverage["recording"]
    assert (coverage.events, coverage.matched_events) == (6, 4)
    assert [row.name for row in coverage.unmatched_events] == ["idle"]
    assert done.diagnostics.counts()["match.unmatched-events"] == 2
    runs = {(run.estimator, run.basis): run for run in done.end_to_end}
    assert set(runs) == {
        ("roofline", "span"),
        ("roofline", "busy"),
        *(
            (name, "sum of operations")
            for name in ("roofline", "datasheet-roofline", "one-efficiency", "overhead+two-efficiencies")
        ),
    }
    assert runs["roofline", "span"].measured_ns == 4501.0
    assert runs["roofline", "sum of operations"].measured_ns == 4001.0
    assert runs["roofline", "span"].predicted_ns == pytest.approx(
        runs["roofline", "sum of operations"].predicted_ns
    )


def test_a_fusion_has_the_class_of_its_busiest_member() -> None:
    program = Program()
    dot = program.add("v1", "dot", framework="jit(f)/dot", takes=SQUARE, flops=2.0 * 256**3, moved=7e5)
    program.add(
        "v2", "add", OpClass.ELEMENTWISE, dot, framework="jit(f)/add", takes=SQUARE, flops=65536.0, moved=8e5
    )
    module = b"""HloModule jit_f
    ENTRY e {
      x = f32[8]{0} parameter(0)
      ROOT fusion.1 = f32[8]{0} negate(x), metadata={op_name="jit(f)/(dot:add)"}
    }"""
    recording = Recording()
    recording.event("fusion.1", 5000.0, module="jit_f")
    done = _compared(program.build(), recording.build({"hlo/jit_f": module}))
    [cases] = done.cases
    assert cases.op_class.tolist() == [int(OpClass.CONTRACTION)]
    assert cases.flops.tolist() == [2.0 * 256**3 + 65536]
    assert {row.op_class for row in done.summary} == {"all", "contraction"}


def test_a_loop_is_predicted_and_measured_for_all_its_trips() -> None:
    program = Program()
    program.add("dot.1", "dot", takes=SQUARE, flops=1e6, moved=1e6, region=program.loop(4.0))
    program.add("dot.2", "dot", takes=SQUARE, flops=1e6, moved=1e6)
    recording = Recording()
    for run in range(2):
        for _ in range(4):
            recording.event("dot.1", 100.0, run=run)
        recording.event("dot.2", 100.0, run=run)
    [cases] = _compared(program.build(), recording.build()).cases
    rows = {label: row for row, label in enumerate(cases.labels)}
    looped, once = rows["dot.1"], rows["dot.2"]
    assert (cases.measured_ns[looped], cases.measured_ns[once]) == (400.0, 100.0)
    assert cases.flops[looped] == 4 * cases.flops[once]
    for said in cases.predictions[:2]:
        assert said.duration_ns[looped] == pytest.approx(4 * said.duration_ns[once])
    assert len(cases.shapes) == 2, "four trips are no repeat of one"


def test_members_of_a_group_may_run_differently_often() -> None:
    """One instruction carries out a node inside a loop of four trips and one outside: five executions."""
    program = Program()
    program.add("v1", "dot", framework="n", takes=SQUARE, flops=1e6, moved=1e6, region=program.loop(4.0))
    program.add("v2", "dot", framework="n", takes=SQUARE, flops=1e6, moved=1e6)
    module = b"""HloModule jit_f
    ENTRY e {
      x = f32[8]{0} parameter(0)
      ROOT a = f32[8]{0} negate(x), metadata={op_name="n"}
    }"""
    recording = Recording()
    recording.event("a", 100.0, module="jit_f")
    [cases] = _compared(program.build(), recording.build({"hlo/jit_f": module})).cases
    assert (cases.flops.tolist(), cases.bytes_moved.tolist()) == ([5e6], [5e6])


def test_recordings_of_one_name_are_told_apart() -> None:
    done = _compared(_program(), _recording("trace"), _recording("trace", 3), _recording("trace", 4))
    names = ["trace", "trace (2)", "trace (3)"]
    assert [cases.source for cases in done.cases] == names == list(done.coverage)
    assert [found.events for found in done.coverage.values()] == [6, 9, 12]


def _classes() -> Workload:
    program = Program()
    program.add("sort.1", "sort", OpClass.SORT, takes=SQUARE, flops=1e6, moved=1e6)
    ranks = np.array([0, 1, 0], np.int32)
    return Workload(name="two", classes=(_program(), program.build()), rank_class=ranks)


def test_each_class_of_ranks_is_compared_with_its_own_program() -> None:
    recording = Recording()
    for rank in (0, 1, 2, 7):
        recording.event("sort.1" if rank == 1 else "dot.1", 100.0 + rank, rank=rank, run=0, at=0.0)
    done = accuracy([recording.build()], H100, ["roofline"], workload=_classes())
    assert [(cases.source, cases.labels, cases.measured_ns.tolist()) for cases in done.cases] == [
        ("recording, class 0", ("dot.1",), [101.0]),
        ("recording, class 1", ("sort.1",), [101.0]),
        ("recording, no program", (), []),
    ]
    assert done.diagnostics.counts()["match.unknown-rank"] == 1
    steps = [run for run in done.end_to_end if run.basis == "span"]
    assert [(run.source, run.measured_ns) for run in steps] == [("recording", 102.0)], (
        "rank 7 runs another program"
    )


def test_a_graph_that_carries_times_is_its_own_program() -> None:
    program = Program()
    program.add("a", "dot", takes=SQUARE, duration_ns=50.0, region=program.loop(3.0))
    program.add("b", "dot", takes=SQUARE)
    workload = Workload.spmd(program.build(), 4)
    done = accuracy([workload], H100, ["roofline"])
    [cases] = done.cases
    assert (cases.labels, cases.measured_ns.tolist(), cases.flops.tolist()) == (("a",), [150.0], [300.0])
    assert {run.basis for run in done.end_to_end} == {"sum of operations"}
    with pytest.raises(UsageError, match="no other program can be matched"):
        accuracy([workload], H100, ["roofline"], workload=workload)
    bare = Program()
    bare.add("b", "dot")
    with pytest.raises(UsageError):
        accuracy([Workload.spmd(bare.build(), 1)], H100, ["roofline"])


def test_a_table_of_operations_is_compared_by_its_shapes() -> None:
    recording = Recording()
    for _ in range(3):
        recording.event("aten::relu", 2000.0, shapes="[[1024, 1024]]")
    profile = recording.build()
    [cases] = accuracy([profile], H100, ["roofline"]).cases
    assert (len(cases), len(cases.shapes)) == (3, 1)
    assert cases.measured_ns.tolist() == [2000.0] * 3


def test_attached_programs_that_ran_are_compared_one_by_one() -> None:
    text = b"""HloModule NAME
    ENTRY e {
      x = f32[256,256]{1,0} parameter(0)
      ROOT dot.1 = f32[256,256]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    }"""
    recording = Recording()
    recording.event("dot.1", 100.0, module="jit_f", run=0)
    recording.event("dot.1", 200.0, module="jit_g", run=0)
    attachments = {f"hlo/{name}": text.replace(b"NAME", name.encode()) for name in ("jit_f", "jit_g", "idle")}
    diagnostics = Diagnostics()
    broken = attachments | {"hlo/jit_g": b"\x00"}
    done = accuracy([recording.build(attachments)], H100, ["roofline"])
    assert [(cases.source, cases.workload, cases.measured_ns.tolist()) for cases in done.cases] == [
        ("recording:jit_f", "jit_f", [100.0]),
        ("recording:jit_g", "jit_g", [200.0]),
    ]
    done = accuracy([recording.build(broken)], H100, ["roofline"], diagnostics=diagnostics)
    assert [cases.source for cases in done.cases] == ["recording:jit_f", "recording, no program"]
    assert [len(cases) for cases in done.cases] == [1, 0]
    assert diagnostics.counts()["accuracy.unreadable-module"] == 1


def test_programs_of_a_profile_need_the_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_bindings(*_: object) -> Workload:
        raise MissingExtraError("reading a serialised HloModuleProto", "stablehlo")

    hlo = replace(load_format("hlo"), read=without_bindings)

    def only_hlo(_: str) -> Format:
        return hlo

    monkeypatch.setattr(programs, "load_format", only_hlo)
    recording = Recording()
    recording.event("dot.1", 100.0, module="jit_f", run=0)
    with pytest.raises(MissingExtraError, match="needs the optional 'stablehlo'"):
        accuracy([recording.build({"hlo/jit_f": b"module"})], H100, ["roofline"])


@pytest.mark.parametrize(
    ("hardware", "message"),
    [([], "no device to compare"), (["H900"], "H900"), (["L4", "MI300X"], "which `hardware`")],
)
def test_devices_that_cannot_be_told(hardware: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        accuracy([_recording()], hardware, ["roofline"], workload=Workload.spmd(_program(), 1))


def test_nothing_to_compare_is_told() -> None:
    workload = Workload.spmd(_program(), 1)
    other = Recording()
    other.event("sort", 5.0)
    for profiles, program, message in (
        ([], workload, "no profile to compare"),
        ([Recording().build()], workload, "no event of the profiles"),
        ([other.build()], workload, "no event of the profiles"),
        ([other.build()], None, "has no operations with shapes"),
        ([Recording().build()], None, "has no operations with shapes"),
    ):
        with pytest.raises(UsageError, match=message):
            accuracy(profiles, H100, ["roofline"], workload=program)


def test_the_device_is_found_by_its_own_name() -> None:
    named = replace(_recording(), devices=("NVIDIA H100 80GB HBM3",))
    done = accuracy([named], ["MI300X", "H100-SXM"], ["roofline"], workload=Workload.spmd(_program(), 1))
    assert [cases.hardware for cases in done.cases] == ["H100-SXM"]
    assert (done.noise["H100-SXM"].n, done.noise["MI300X"].n) == (2, 0)


def _limits(max_mape: float = nan, max_e2e: float = nan, min_coverage: float = nan) -> Thresholds:
    return Thresholds(max_mape=max_mape, max_e2e=max_e2e, min_coverage=min_coverage)


def test_thresholds() -> None:
    done = _compared(_program(), _recording())
    assert done.exceeded(_limits()) == ()
    assert done.exceeded(_limits(10, 10, 0.5)) == ()
    [told] = done.exceeded(_limits(max_mape=0.01))
    assert told.startswith("MAPE of roofline on H100-SXM is ")
    assert told.endswith("the limit is 1.0%")
    assert len(done.exceeded(_limits(max_e2e=0.01))) == 3, "span, busy, sum"
    [told] = done.exceeded(_limits(min_coverage=0.9))
    assert "covers 88.9% of the time" in told, "idle is not matched"


def test_an_unknown_error_passes_every_limit() -> None:
    program = Program()
    program.add("dot.1", "dot", flops=nan, moved=nan)
    recording = Recording()
    recording.event("dot.1", 10.0)
    done = _compared(program.build(), recording.build())
    assert len(done.exceeded(_limits(1e9, nan, 0.1))) == 2


def test_span_and_busy_of_a_run() -> None:
    recording = Recording()
    for run, at in ((0, 0.0), (1, 1000.0), (-1, 5000.0)):
        recording.event("a", 100.0, at=at, run=run, stream=0)
        recording.event("b", 100.0, at=at + 50.0, run=run, stream=1)
        recording.event("c", 250.0, at=at + 50.0, run=run, rank=1)
    profile = recording.build()
    assert (span_ns(profile), busy_ns(profile)) == (300.0, 200.0)
    assert isnan(span_ns(Recording().build()))
    assert isnan(busy_ns(Recording().build()))


def test_ranks_out_of_step_are_not_one_long_run() -> None:
    """The second device began a run later, and its runs are numbered from there; clocks differ by 20 ns."""
    recording = Recording()
    for run in range(4):
        recording.event("a", 990.0, at=1000.0 * run, run=run, rank=0)
        recording.event("a", 990.0, at=1000.0 * (run + 1) - 20.0, run=run, rank=1)
    assert span_ns(recording.build()) == 990.0
    assert busy_ns(recording.build()) == 990.0


EVENT = st.tuples(
    st.sampled_from(["dot.1", "add.2", "aten::mm", "fusion.9", ""]),
    st.sampled_from(["", "[[4, 4], [4, 4]]", "[[", "null", '[["x"]]']),
    st.integers(-1, 3),
    st.integers(-1, 2),
    st.one_of(st.integers(-8000, 8_000_000).map(lambda eighths: eighths / 8), st.just(nan)),
)


@settings(max_examples=60)
@given(st.lists(EVENT, max_size=20), st.booleans(), st.booleans())
def test_no_recording_breaks_it(
    events: list[tuple[str, str, int, int, float]], has_program: bool, has_host: bool
) -> None:
    recording = Recording(host=HostOps.empty() if has_host else None)
    for number, (op, shapes, run, rank, duration_ns) in enumerate(events):
        recording.event(op, duration_ns, at=10.0 * number, shapes=shapes, run=run, rank=rank)
    program = Workload.spmd(_program(), 2) if has_program else None
    try:
        done = accuracy([recording.build()], H100, ["roofline"], workload=program)
    except UsageError:
        return
    document = json.loads(accuracy_json(done, _limits(0.1, 0.1, 0.1)))
    assert document["schema"] == "hespas.accuracy/1"
    for cases in done.cases:
        assert len(cases) == len(cases.labels)
        assert np.all(cases.measured_ns[~np.isnan(cases.measured_ns)] >= 0)
