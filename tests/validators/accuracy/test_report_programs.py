"""The page shows the simulated step of a program that came with its measurements, without --workload too."""

from __future__ import annotations

import pytest

from hespas.graph import Profile
from hespas.report.timelines import Lane, TimelineChart
from hespas.validators.accuracy import accuracy
from hespas.validators.accuracy.report.folder import ReportInputs
from hespas.validators.accuracy.result import Accuracy
from tests.validators.accuracy.small_profiles import Recording


def _hlo(op: str) -> bytes:
    return f"""HloModule jit_{op}

ENTRY e {{
  x = f32[512,512]{{1,0}} parameter(0)
  {op}.1 = f32[512,512]{{1,0}} {op}(x, x)
  ROOT copy.2 = f32[512,512]{{1,0}} copy({op}.1)
}}
""".encode()


def _recording() -> Profile:
    """Two programs: the second takes more time."""
    recording = Recording()
    for op, duration in (("add", 900.0), ("multiply", 1500.0)):
        recording.event(f"{op}.1", duration, module=f"jit_{op}", run=0)
        recording.event("copy.2", duration, module=f"jit_{op}", run=0)
    return recording.build({f"hlo/jit_{op}": _hlo(op) for op in ("add", "multiply")})


def _simulated(done: Accuracy, profile: Profile) -> list[Lane]:
    """Return the simulated lanes of the timeline."""
    inputs = ReportInputs.of(done, hardware=["H100-SXM"], estimators=["roofline"], profiles=[profile])
    (timeline,) = (chart for chart in inputs.charts(done) if isinstance(chart, TimelineChart))
    return [lane for lane in timeline.lanes if lane.label.startswith("simulated")]


def test_the_program_that_took_most_time_is_simulated() -> None:
    profile = _recording()
    done = accuracy([profile], ["H100-SXM"], ["roofline"])
    assert len(done.programs) == 2
    lanes = _simulated(done, profile)
    assert {text for lane in lanes for text in lane.texts} == {"multiply.1", "copy.2"}
    [span] = {
        run.predicted_ns for run in done.end_to_end if run.basis == "span" and "multiply" in run.workload
    }
    assert max(float(lane.end_ns.max()) for lane in lanes) == pytest.approx(span, rel=1e-3)


def test_without_a_program_nothing_is_simulated() -> None:
    recording = Recording()
    recording.event("aten::mm", 100.0, shapes="[[64,64],[64,64]]", dtypes='["float","float"]')
    profile = recording.build()
    done = accuracy([profile], ["H100-SXM"], ["roofline"])
    assert _simulated(done, profile) == []
