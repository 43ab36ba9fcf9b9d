"""``--html``: one option of all commands whose results have a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hespas.cli import main, validate

FIXTURES = Path(__file__).parents[2] / "fixtures"
PROGRAM = str(FIXTURES / "stablehlo" / "mlp.mlir")
DEVICE = ("--hardware", "H100-SXM", "--estimator", "roofline")
COMMANDS = {
    "simulate": (PROGRAM, *DEVICE),
    "simulate in columns": (PROGRAM, *DEVICE, "--hardware", "A100-SXM-80GB"),
    "simulate grid": ("--grid", str(FIXTURES / "astra_sim" / "what_if.toml"),
                      str(FIXTURES / "chakra" / "pipeline_2x2")),
    "analyze": (str(FIXTURES / "profiles" / "ffn_train_rank0of2.pt.trace.json.gz"),),
    "plan": (
        *("llama-3-8b", "--devices", "4", "--hardware", "H100-SXM", "--global-batch", "8", "--pp", "1"),
        *("--cp", "1", "--micro-batch", "1", "--recompute", "none", "--zero", "1,3"),
    ),
    "serve": ("llama-3-8b", "--hardware", "H100-SXM", "--requests", "closed:concurrency=2,requests=4"),
    "generate llm": ("llama-3-8b", "--dp", "2", "--dry-run"),
    "generate random": ("--ranks", "2", "--dry-run"),
    "check": (PROGRAM,),
    "roundtrip": (PROGRAM, "--formats", "op-graph,stablehlo"),
}  # fmt: skip
"""Command and words that tell two uses apart -> its arguments."""


def words(command: str) -> list[str]:
    return re.sub(r" (in columns|grid)$", "", command).split()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_writes_its_page(command: str, tmp_path: Path) -> None:
    app = validate.app if words(command)[0] in {"check", "roundtrip"} else main.app
    page = tmp_path / "page.html"
    arguments = [*words(command), *COMMANDS[command], "--html", str(page)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    written = page.read_text(encoding="utf-8")
    assert written.startswith("<!doctype html>")
    assert "default-src 'none'" in written
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code != 0
    assert "page.html" in again.stderr
    assert CliRunner().invoke(app, [*arguments, "--overwrite"]).exit_code == 0


def test_a_page_on_standard_output_stands_alone() -> None:
    done = CliRunner().invoke(validate.app, ["check", PROGRAM, "--html", "-"])
    assert done.stdout.startswith("<!doctype html>")
    assert done.stdout.rstrip().endswith("</html>")
    both = CliRunner().invoke(validate.app, ["check", PROGRAM, "--html", "-", "--json", "-"])
    assert both.exit_code == 2
    assert "both go to standard output" in both.stderr


def test_a_page_never_replaces_an_input(tmp_path: Path) -> None:
    program = tmp_path / "step.mlir"
    program.write_text(Path(PROGRAM).read_text(encoding="utf-8"), encoding="utf-8")
    done = CliRunner().invoke(main.app, ["simulate", str(program), "--html", str(program), "--overwrite"])
    assert done.exit_code == 2
    assert program.read_text(encoding="utf-8") == Path(PROGRAM).read_text(encoding="utf-8")
