"""The page shows the simulated step of a program that came with its measurements, without --workload too."""

from __future__ import annotations

import json
from math import nan
from pathlib import Path
from typing import cast

import pytest

from hespas.graph import Profile
from hespas.validators.accuracy import Thresholds, accuracy
from hespas.validators.accuracy.report.folder import write_report
from tests.validators.accuracy.small_profiles import Recording

NONE = Thresholds(max_mape=nan, max_e2e=nan, min_coverage=nan)


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


def _simulated(folder: Path) -> dict[str, object] | None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    at = text.index('"simulated":') + len('"simulated":')
    found: object = json.JSONDecoder().raw_decode(text[at:])[0]
    return cast("dict[str, object] | None", found)


def test_the_program_that_took_most_time_is_simulated(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    profile = _recording()
    done = accuracy([profile], ["H100-SXM"], ["roofline"])
    assert len(done.programs) == 2
    write_report(
        done,
        NONE,
        tmp_path,
        overwrite=True,
        hardware=["H100-SXM"],
        estimators=["roofline"],
        profiles=[profile],
    )
    found = _simulated(tmp_path)
    assert found is not None
    names = json.loads((tmp_path / "report.html").read_text().split('"texts":')[1].partition("]")[0] + "]")
    shown = {names[row] for row in cast("list[int]", found["label"])}
    assert shown == {"multiply.1", "copy.2"}
    [span] = {
        run.predicted_ns for run in done.end_to_end if run.basis == "span" and "multiply" in run.workload
    }
    ends = zip(cast("list[float]", found["start_ns"]), cast("list[float]", found["duration_ns"]), strict=True)
    assert max(start + length for start, length in ends) == pytest.approx(span, rel=1e-3)


def test_without_a_program_nothing_is_simulated(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    recording = Recording()
    recording.event("aten::mm", 100.0, shapes="[[64,64],[64,64]]", dtypes='["float","float"]')
    profile = recording.build()
    done = accuracy([profile], ["H100-SXM"], ["roofline"])
    write_report(
        done,
        NONE,
        tmp_path,
        overwrite=True,
        hardware=["H100-SXM"],
        estimators=["roofline"],
        profiles=[profile],
    )
    assert _simulated(tmp_path) is None
