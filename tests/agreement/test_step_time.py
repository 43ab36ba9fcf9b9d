"""The step time of a workload is equal in every command, in Python, and in every written file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hespas
from hespas.graph import Workload
from hespas.graph.errors import HespasError
from tests.agreement.cases import DEVICE, FIXTURES, LAYOUTS, PROGRAMS, RECORDINGS, DrawnStep
from tests.processes import run_command

WHOLE_NS = 1e-3
"""Relative tolerance of traces with times, which hold whole nanoseconds."""

_FORMATS = ("op-graph", "op-graph-arrow", "chakra", "chakra-json")
_FILES = {"op-graph": "step.json", "op-graph-arrow": "step.arrow"}


def _written(workload: Workload, folder: Path, target: str, **options: Any) -> Path:
    path = folder / _FILES.get(target, f"{target}-{len(list(folder.iterdir()))}")
    hespas.convert(workload, path, target_format=target, **options)
    return path


def _subfolder(folder: Path) -> Path:
    (folder / "timed").mkdir(exist_ok=True)
    return folder / "timed"


def _step_ns(source: Workload | Path, hardware: str | None = None) -> float:
    return hespas.simulate(source, hardware).step_ns


@pytest.mark.parametrize("name", PROGRAMS)
def test_of_programs(name: str, tmp_path: Path) -> None:
    read = hespas.read(FIXTURES / name, workload=True)
    assert isinstance(read, Workload)
    expected = _step_ns(read, DEVICE)
    assert hespas.estimate(read, DEVICE).to_dict()["step_ns"] == expected
    for target in _FORMATS:
        again = _step_ns(_written(read, tmp_path, target), DEVICE)
        assert again == pytest.approx(expected, rel=1e-9), f"written as {target}, estimated again"
    for target in _FORMATS:
        timed = _step_ns(_written(read, _subfolder(tmp_path), target, hardware=DEVICE))
        assert timed == pytest.approx(expected, rel=WHOLE_NS, abs=len(read.classes[0])), f"times in {target}"


@pytest.mark.parametrize("name", RECORDINGS)
def test_of_recordings(name: str, tmp_path: Path) -> None:
    read = hespas.read(FIXTURES / name, workload=True)
    assert isinstance(read, Workload)
    expected = _step_ns(read)
    for target in _FORMATS:
        again = _step_ns(_written(read, tmp_path, target))
        assert again == pytest.approx(expected, rel=WHOLE_NS, abs=1.0), f"written as {target}"


@pytest.mark.parametrize("name", [*PROGRAMS, *RECORDINGS])
def test_of_commands(name: str) -> None:
    path = FIXTURES / name
    python = {
        "estimate": hespas.estimate(path, DEVICE).to_dict(),
        "simulate": hespas.simulate(path, DEVICE).to_dict(),
    }
    assert python["estimate"]["step_ns"] == python["simulate"]["step_ns"]
    for command, document in python.items():
        ran = run_command("hespas", command, path, "--hardware", DEVICE, "--json", "-")
        assert ran.returncode == 0, ran.stderr
        printed = json.loads(ran.stdout)
        for key in ("step_ns", "step_low_ns", "step_high_ns"):
            assert printed[key] == document[key], f"{command}: {key}"


@pytest.mark.parametrize("drawn", LAYOUTS, ids=str)
def test_of_generated_steps(drawn: DrawnStep, tmp_path: Path) -> None:
    made = hespas.generate(drawn.step, tmp_path / "traces")
    hespas.generate(drawn.step, tmp_path / "step.json")
    expected = _step_ns(made.workload, DEVICE)
    assert hespas.estimate(made.workload, DEVICE).to_dict()["step_ns"] == expected
    assert _step_ns(tmp_path / "step.json", DEVICE) == pytest.approx(expected, rel=1e-9)
    # Traces hold no loops: launches of a host at the ends of their trips are counted slightly otherwise.
    assert _step_ns(tmp_path / "traces", DEVICE) == pytest.approx(expected, rel=WHOLE_NS)
    timed = _step_ns(_written(made.workload, tmp_path, "chakra", hardware=DEVICE))
    assert timed == pytest.approx(expected, rel=WHOLE_NS)


def test_a_program_that_cannot_be_timed_fails_alike() -> None:
    path = FIXTURES / "stablehlo" / "mlp.mlir"
    for ask in (hespas.estimate, hespas.simulate):
        with pytest.raises(HespasError, match="no-such-device"):
            ask(path, "no-such-device")
