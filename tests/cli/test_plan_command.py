"""``hespas plan`` as users type it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hespas.cli.main import app

_SPACE = (
    *("--devices", "8", "--hardware", "H100-SXM", "--global-batch", "16", "--seq", "4096", "--pp", "1,2"),
    *("--cp", "1", "--zero", "1", "--micro-batch", "1", "--recompute", "none", "--schedule", "1f1b"),
)


def _plan(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_the_best_layout_is_printed_with_its_proof(tmp_path: Path) -> None:
    table, document = tmp_path / "layouts.csv", tmp_path / "plan.json"
    done = _plan("llama-3-8b", *_SPACE, "--out", table, "--json", document, "--top", "2")
    assert done.exit_code == 0, done.output
    found = json.loads(document.read_bytes())
    assert found["schema"] == "hespas.plan/1"
    best = found["rows"][0]
    assert f"{best['step_ns'] / 1e6:,.3f} ms" in done.output
    assert "no layout is faster than" in done.output
    assert f"basis: {best['basis']}" in done.output
    assert "assumed" in done.output
    assert "per M tokens" not in done.output
    rows = list(csv.DictReader(table.read_text(encoding="utf-8").splitlines()))
    assert len(rows) == len(found["rows"])
    assert float(rows[0]["step_ns"]) == best["step_ns"]
    assert _plan("llama-3-8b", *_SPACE, "--out", table).exit_code == 2  # it exists


def test_the_printed_time_is_that_of_generate(tmp_path: Path) -> None:
    planned, generated = tmp_path / "plan.json", tmp_path / "step.json"
    assert _plan("llama-3-8b", *_SPACE, "--json", planned).exit_code == 0
    best = json.loads(planned.read_bytes())["rows"][0]
    options = [
        text
        for name, value in best["settings"].items()
        if value != "" and not (name == "schedule" and best["settings"]["pp"] == 1)
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    command = ["generate", "llm", "llama-3-8b", *options, "--global-batch", "16", "--hardware", "H100-SXM"]
    done = CliRunner().invoke(app, [*command, "--dry-run", "--json", str(generated)])
    assert done.exit_code == 0, done.output
    step = json.loads(generated.read_bytes())
    assert step["step"]["step_ns"] == pytest.approx(best["step_ns"], rel=1e-3)
    assert step["peak_memory_bytes"] == best["peak_memory_bytes"]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--hardware", "nothing"), 2),
        (("--tp", "one"), 2),
        (("--tp", "3"), 2),
        (("--tp", "0"), 2),
        (("--micro-batch", "0"), 2),
        (("--ep", "0"), 2),
        (("--etp", "0"), 2),
        (("--out", "layouts.txt"), 2),
        (("--objective", "speed"), 2),
        (("--objective", "price"), 2),
        (("--margin", "2"), 2),
        (("--global-batch", "0"), 2),
        (("--from", "traces"), 2),
        (("--link-bandwidth", "fast"), 2),
        (("--prices", "missing.toml"), 3),
    ],
)
def test_wrong_options_are_refused(options: tuple[str, ...], code: int) -> None:
    done = _plan("llama-3-8b", *_SPACE, *options)
    assert done.exit_code == code, done.output
    assert "try:" in done.output or "Error" in done.output  # of options that the parser refuses


def test_a_program_without_a_decoder_cannot_be_planned(tmp_path: Path) -> None:
    program = tmp_path / "program.mlir"
    program.write_text(
        "func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {\n"
        "  %y = stablehlo.add %x, %x : tensor<4xf32>\n  return %y : tensor<4xf32>\n}\n",
        encoding="utf-8",
    )
    done = _plan("--from", program, *_SPACE)
    assert done.exit_code == 4, done.output
    assert "main: it has no matmuls" in done.output


def test_a_space_without_a_fitting_layout_fails() -> None:
    done = _plan("llama-3-70b", *_SPACE, "--tp", "8", "--pp", "1")
    assert done.exit_code == 1, done.output
    assert done.output.count("none of 1 layout fits: 1 exceeds the memory") == 1
    assert "bound above" not in done.output
