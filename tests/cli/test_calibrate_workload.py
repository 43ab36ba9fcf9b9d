"""``hespas-validate calibrate --workload``: fits to traces with names alone, with the program that ran."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hespas import api
from hespas.cli.validate import app
from hespas.hardware import load_device
from tests.validators.accuracy.small_profiles import Recording

ROWS = range(128, 128 * 21, 128)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["calibrate", *(str(each) for each in arguments)])


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Twenty additions of rising size."""
    types = ", ".join(f"f32[{rows},1024]" for rows in ROWS)
    lines = [f"  %p.{place} = f32[{rows},1024] parameter({place})" for place, rows in enumerate(ROWS)]
    lines += [f"  %add.{rows} = f32[{rows},1024] add(%p.{at}, %p.{at})" for at, rows in enumerate(ROWS)]
    results = ", ".join(f"%add.{rows}" for rows in ROWS)
    lines.append(f"  ROOT %all = ({types}) tuple({results})")
    path = tmp_path / "step.hlo.txt"
    path.write_text("HloModule jit_step\n\nENTRY %main {\n" + "\n".join(lines) + "\n}\n")
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """What ran, by name: no shapes, no element types."""
    made = Recording("trace")
    for number in range(3):
        for rows in ROWS:
            made.event(f"add.{rows}", 4e3 + rows * 1024 * 8 / 2.01, module="jit_step", run=number)
    path = tmp_path / "trace.csv"
    api.write(made.build(), path)
    return path


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are those of the test's folder."""
    monkeypatch.chdir(tmp_path)


def test_the_program_says_what_the_events_are(program: Path, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    asked = ("--hardware", "H100-SXM", "--measured", trace, "--out", out)
    alone = run(*asked)
    assert alone.exit_code != 0, "names alone have no sizes"
    assert not out.exists()
    done = run(*asked, "--workload", program)
    assert done.exit_code == 0, done.output
    assert done.stdout.rstrip().endswith("fits of H100-SXM from 20 rows")
    fits = {(fit.kind, fit.samples) for fit in load_device(out).own_fits if fit.table == "trace"}
    assert {("vector", 20), ("*", 20)} <= fits


@pytest.mark.parametrize(
    ("workload", "measured", "code", "message"),
    [
        ("trace.csv", "--measured", 2, "is not a program"),
        ("absent.mlir", "--measured", 3, "no such file"),
        ("step.hlo.txt", "--table", 2, "add --measured PROFILE, or leave --workload out"),
    ],
)
@pytest.mark.usefixtures("program", "trace", "in_folder")
def test_a_wrong_program_says_what_is_wrong(workload: str, measured: str, code: int, message: str) -> None:
    asked = ("--hardware", "H100-SXM", measured, "trace.csv", "--workload", workload, "--out", "mine.toml")
    done = run(*asked)
    assert done.exit_code == code, done.output
    assert message in " ".join(done.stderr.split())
    assert not Path("mine.toml").exists()


def test_the_program_is_not_written_over(program: Path, trace: Path, tmp_path: Path) -> None:
    asked = ("--hardware", "H100-SXM", "--measured", trace, "--workload", program)
    done = run(*asked, "--out", tmp_path / "mine.toml", "--json", program)
    assert done.exit_code == 2, done.output
    assert program.read_text().startswith("HloModule")
