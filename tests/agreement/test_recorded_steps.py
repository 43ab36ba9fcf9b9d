"""Steps and spans of recordings have equal figures and names in analysis and simulation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import hespas
from hespas.cli.terminal import step_text
from hespas.report.texts import time_text
from tests.analysis.raw import FIXTURE
from tests.converters.pytorch.traces import kernel, write_kineto

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", [FIXTURE, ROOT / "fixtures" / "profiles" / "h100_streams.xplane.pb"])
def test_per_step_is_a_step_and_a_span_is_a_span(path: Path) -> None:
    table = hespas.analyze(path).tables.breakdown
    steps = table["span_ns"][table["step"] >= 0]
    done = hespas.simulate(path)
    found = json.loads(done.to_json())
    assert found["recorded_steps"] == len(np.unique(table["step"][table["step"] >= 0]))
    assert found["recorded_step_ns"] == pytest.approx(float(np.median(steps)), rel=1e-9)
    text = step_text(done, "")
    verdict = hespas.analyze(path).headline()
    # Ranks whose clock is one start at different times: the span of a simulation is that of all of them.
    mark = ")" if found["num_ranks"] == 1 else ", span"
    assert text.partition(mark)[0] == verdict.partition(mark)[0]
    assert f"recorded steps, a step every {time_text(found['recorded_period_ns'])}, span " in text
    assert json.loads(hespas.analyze(path).to_json())["step_period_ns"] == found["recorded_period_ns"]
    assert "per step, 2 recorded steps, a step every " in done.headline()


def test_estimated_times_have_a_span_alone() -> None:
    done = hespas.simulate(FIXTURE, hardware="B200")
    assert step_text(done, done.hardware).startswith("span ")
    assert "of 2 recorded steps" in step_text(done, done.hardware)
    assert json.loads(done.to_json())["recorded_step_ns"] is None


def test_a_recording_without_steps_is_a_span(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "r.pt.trace.json", [kernel("k", 10, 5, 1), kernel("k", 20, 5, 2)])
    done = hespas.simulate(path)
    assert step_text(done, "").startswith("span 15.000 us")
    assert hespas.analyze(path).headline().startswith("span 15.000 us")
    assert json.loads(done.to_json())["recorded_steps"] == 0
