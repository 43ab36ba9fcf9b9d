"""Profiles with implausible rows: they neither stop nor bias a comparison."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hespas.converters import ReadOptions, load_format
from hespas.graph import Diagnostics, Profile, Workload
from hespas.validators.accuracy.cases import CaseSource
from hespas.validators.accuracy.sources import sources_of
from tests.validators.accuracy.small_profiles import Program, Recording

COLUMNS = "op,dtype,shapes,duration_ns"
SHAPES = '"[[128,64],[64,32]]"'


def _table(path: Path, *rows: str) -> Profile:
    path.write_text("\n".join((COLUMNS, *rows)) + "\n")
    entry = load_format("ops-table")
    assert entry.read is not None
    profile = entry.read(path, ReadOptions(), Diagnostics())
    assert isinstance(profile, Profile)
    return profile


def _only(profile: Profile, workload: Workload | None = None) -> tuple[CaseSource, Diagnostics]:
    diagnostics = Diagnostics()
    (found,) = sources_of(profile, workload, "H100-SXM", diagnostics)
    return found, diagnostics


def test_shapes_nested_beyond_reason_are_no_shapes(tmp_path: Path) -> None:
    deep = "[" * 60_000
    found, _ = _only(_table(tmp_path / "t.csv", f"aten::mm,float32,{deep},5", f"aten::mm,float32,{SHAPES},7"))
    assert found.cases.measured_ns.tolist() == [5.0, 7.0]
    assert np.isnan(found.cases.flops).tolist() == [True, False]


@pytest.mark.parametrize("time", ["0", "-5", "1e-320", "1e-30"])
def test_what_took_no_time_is_no_case(time: str, tmp_path: Path) -> None:
    rows = [f"aten::mm,float32,{SHAPES},{each}" for each in (time, "8")]
    found, _ = _only(_table(tmp_path / "t.csv", *rows))
    assert found.cases.measured_ns.tolist() == [8.0]


def test_rows_without_starts_are_compared_without_a_warning(tmp_path: Path) -> None:
    found, diagnostics = _only(_table(tmp_path / "t.csv", f"aten::mm,float32,{SHAPES},8"))
    assert found.cases.measured_ns.tolist() == [8.0]
    assert not len(diagnostics)


def test_matched_events_of_less_than_no_time_are_left_out_and_told() -> None:
    program, recording = Program(), Recording()
    program.add("dot.1", "dot")
    for run, duration in enumerate((5.0, -4.0, 7.0)):
        recording.event("dot.1", duration, run=run)
    found, diagnostics = _only(recording.build(), Workload.spmd(program.build(), 1))
    assert found.cases.measured_ns.tolist() == [6.0]
    assert found.cases.repeats.tolist() == [2]
    assert diagnostics.counts()["match.negative-duration"] == 1
