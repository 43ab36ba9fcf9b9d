"""Tokens per second and MFU of recorded steps."""

from __future__ import annotations

import json
from math import inf, nan
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hespas
from hespas.cli.main import app
from hespas.graph.errors import UsageError
from hespas.hardware import load_device
from hespas.hardware.peaks import peak_for
from tests.analysis.raw import FIXTURE
from tests.converters.pytorch.traces import kernel, write_kineto

GUIDE = Path(__file__).parents[2] / "docs" / "questions" / "slow.md"
STEP_S, RANKS = 3.0e-3, 2
"""The time from the start of the first step of the fixture to that of the second."""


def test_the_options_of_the_guide_print_both() -> None:
    words = ["--tokens", "8192", "--model-flops", "1e11"]
    assert f"`{' '.join(words)}`" in " ".join(GUIDE.read_text("utf-8").split())
    done = CliRunner().invoke(app, ["analyze", str(FIXTURE), "--quiet", "--hardware", "H100-SXM", *words])
    assert done.exit_code == 0
    first = done.stdout.splitlines()[0]
    peak = peak_for(load_device("H100-SXM"), "matrix", "bf16").flops_per_s
    assert f"MFU {1e11 / STEP_S / RANKS / peak:.1%} of the bf16 peak" in first
    assert f"{8192 / STEP_S:,.0f} tokens/s" in first


def test_the_document_has_the_fields_of_a_simulation() -> None:
    found = json.loads(hespas.analyze(FIXTURE, tokens=8192, model_flops=1e11).to_json())
    assert found["tokens_per_step"] == 8192
    assert found["model_flops_per_step"] == 1e11
    assert found["tokens_per_s"] == pytest.approx(8192 / STEP_S)
    simulated = json.loads(hespas.simulate(FIXTURE).to_json())
    names = {"tokens_per_step", "model_flops_per_step", "mfu", "mfu_peak_dtype", "tokens_per_s"}
    assert names <= found.keys() & simulated.keys()


def test_without_numbers_there_are_no_rates() -> None:
    done = hespas.analyze(FIXTURE)
    assert "tokens/s" not in done.headline()
    assert "MFU" not in done.headline()
    assert json.loads(done.to_json())["mfu"] is None


def test_a_recording_without_steps_is_one_step(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "r.pt.trace.json", [kernel("k", 10, 5, 1), kernel("k", 20, 5, 2)])
    done = hespas.analyze(path, tokens=30)
    assert done.throughput.tokens_per_s == pytest.approx(30 / 15e-6)


@pytest.mark.parametrize("value", [0, -1, nan, inf])
def test_numbers_that_are_not_above_0_are_refused(value: float) -> None:
    with pytest.raises(UsageError, match="`tokens`"):
        hespas.analyze(FIXTURE, tokens=value)
    with pytest.raises(UsageError, match="`model_flops`"):
        hespas.analyze(FIXTURE, model_flops=value)


def test_the_command_names_its_option() -> None:
    done = CliRunner().invoke(app, ["analyze", str(FIXTURE), "--model-flops", "-3"])
    assert done.exit_code == 2
    assert "--model-flops" in done.stderr
