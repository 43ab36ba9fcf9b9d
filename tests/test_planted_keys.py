"""Nothing that an input file names runs, and no file out of its folder is opened: see ``planted_keys``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import SAFETY_S
from tests.planted_keys import ROOT, Case, Outcome, as_input, plant

_Ended = list[tuple[Case, Outcome]]


def _outcomes(top: Path, cases: list[Case]) -> list[Outcome]:
    """Run the cases in one child."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(top / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.planted_keys"], input=as_input(top / "outside", cases), cwd=ROOT,
        env=environment | {"COLUMNS": "1000"}, capture_output=True, text=True, check=False, timeout=SAFETY_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [Outcome(*each) for each in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, _Ended]:
    """The folder of all cases, and how each ended."""
    top = tmp_path_factory.mktemp("planted")
    cases = plant(top)
    return top, list(zip(cases, _outcomes(top, cases), strict=True))


def test_no_program_runs_and_no_file_outside_is_opened(planted: tuple[Path, _Ended]) -> None:
    top, ended = planted
    assert len(ended) > 200
    assert {case.name: outcome.events for case, outcome in ended if outcome.events} == {}
    assert not (top / "ran").exists()


def test_refusals_name_file_key_and_option(planted: tuple[Path, _Ended]) -> None:
    for case, outcome in planted[1]:
        if case.position:
            assert outcome.exit_code == 3, (case.name, outcome.output[-300:])
            assert case.position in outcome.output, (case.name, outcome.output[-300:])
            assert case.option in outcome.output, (case.name, outcome.output[-300:])


def test_outputs_repeat_nothing_of_what_was_refused(planted: tuple[Path, _Ended]) -> None:
    for case, outcome in planted[1]:
        assert "root:" not in outcome.output, case.name
        assert "PYTHONPATH" not in outcome.output, case.name
        assert outcome.exit_code in {0, 1, 2, 3, 4}, (case.name, outcome.output[-500:])


def test_what_the_user_types_runs_and_opens(tmp_path: Path) -> None:
    """The hook and the canary see both."""
    spelling = "scalesim:command=./run.sh,array=8x8,clock_mhz=940"
    (planted,) = (case for case in plant(tmp_path) if case.name == f"grid {spelling}")
    opening = ("simulate", str(tmp_path / "outside" / "w.mlir"), "--hardware", "TPU-v4")
    allowed = (*planted.arguments, "--allow-programs")
    typed = (*planted.arguments, "--estimator", spelling)
    cases = [
        Case(name="typed", folder=planted.folder, command="main", arguments=arguments)
        for arguments in (allowed, typed, opening)
    ]
    *programs, path = _outcomes(tmp_path, cases)
    assert (tmp_path / "ran").exists()
    for program in programs:
        assert any("run.sh" in event for event in program.events), program
    assert any("w.mlir" in event for event in path.events), path
