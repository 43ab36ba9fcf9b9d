"""Warnings for estimates without measurements of the device, the sizes or the kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hespas
from hespas.cli.main import app
from hespas.graph import Diagnostics, Severity
from hespas.graph.errors import HespasError

PROGRAM = Path(__file__).parents[2] / "fixtures" / "stablehlo" / "mlp.mlir"
CODES = {"calibrated.unseen-device", "composite.unseen-device", "learned.unseen-device", "calibrated.carried"}


def warned(diagnostics: Diagnostics) -> set[str]:
    return {each.code for each in diagnostics if each.severity is Severity.WARNING}


@pytest.mark.parametrize("hardware", ["MI325X", "B200-SXM", "A100-PCIe-40GB", "TPU-v7x"])
def test_a_device_that_was_never_measured_is_warned_of_everywhere(hardware: str, tmp_path: Path) -> None:
    done = hespas.estimate(PROGRAM, hardware)
    assert warned(done.diagnostics) & CODES
    assert warned(hespas.simulate(PROGRAM, hardware).diagnostics) & CODES
    told = CliRunner().invoke(
        app, ["simulate", str(PROGRAM), "--hardware", hardware, "--json", str(tmp_path / "s")]
    )
    assert told.stderr.startswith("warning: ")
    assert any(f"[{code}]" in told.stderr for code in CODES)
    document = json.loads((tmp_path / "s").read_text())
    assert {each["code"] for each in document["diagnostics"] if each["severity"] == "warning"} & CODES


def test_a_device_that_was_measured_is_not() -> None:
    assert not warned(hespas.estimate(PROGRAM, "H100-SXM").diagnostics) & CODES


def unmeasured_products(folder: Path) -> Path:
    """Return a program whose matmuls, of f64, no MI300X or MI325X was measured on."""
    path = folder / "f64.mlir"
    path.write_text(PROGRAM.read_text().replace("f32", "f64"))
    return path


def test_time_of_the_data_sheet_is_stated_as_a_share(tmp_path: Path) -> None:
    done = hespas.estimate(unmeasured_products(tmp_path), "MI325X")
    (found,) = (each for each in done.diagnostics if each.code == "estimate.data-sheet")
    (said,) = done.estimates
    matmuls = said.estimator == said.estimators.index("roofline")
    share = said.duration_ns[matmuls].sum() / said.duration_ns.sum()
    assert found.message.startswith(f"{share:.0%} of the time follows from the data sheet")
    assert "contraction" in found.message


@pytest.mark.parametrize("estimator", ["roofline", "systolic"])
def test_a_model_that_was_chosen_alone_is_no_fallback(estimator: str, tmp_path: Path) -> None:
    try:
        done = hespas.estimate(unmeasured_products(tmp_path), "MI325X", estimator=estimator)
    except HespasError:
        pytest.skip("the model does not cover the device")
    assert "estimate.data-sheet" not in done.diagnostics.counts()


def test_what_changes_little_stays_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from hespas.estimators import step_intervals

    monkeypatch.setattr(step_intervals, "_NOTED", 1.01)
    done = hespas.estimate(unmeasured_products(tmp_path), "MI325X")
    assert {"estimate.data-sheet", "calibrated.unseen-device"} <= set(done.diagnostics.counts())
    assert not warned(done.diagnostics) & {*CODES, "estimate.data-sheet"}


def test_findings_become_warnings_with_their_counts() -> None:
    heard = Diagnostics(keep=1)
    for _ in range(3):
        heard.info("a.b", "here", "a note", count=2)
    heard.info("c.d", "here", "another")
    raised = heard.as_warnings({"a.b": "half of the time"})
    assert raised.counts() == {"a.b": 6, "c.d": 1}
    assert [(each.code, each.severity, each.message) for each in raised] == [
        ("a.b", Severity.WARNING, "a note; half of the time"),
        ("c.d", Severity.INFO, "another"),
    ]
    assert (raised.count(Severity.WARNING), heard.count(Severity.WARNING)) == (6, 0)
