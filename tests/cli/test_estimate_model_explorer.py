"""``hespas estimate --model-explorer``: the file, the printed line, and inputs that have no node data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hespas.cli.main import app

PROGRAMS = Path(__file__).parents[2] / "fixtures" / "stablehlo"
NESTED = PROGRAMS / "scan_nested.mlir"
runner = CliRunner()


def _estimate(*args: str | Path) -> Result:
    fixed = ["--hardware", "H100-SXM", "--estimator", "roofline"]
    return runner.invoke(app, ["estimate", *map(str, args), *fixed])


def test_the_times_are_written_next_to_other_documents(tmp_path: Path) -> None:
    times, report = tmp_path / "times.json", tmp_path / "report.json"
    done = _estimate(NESTED, "--model-explorer", times, "--json", report)
    assert done.exit_code == 0, done.output
    last = " ".join(done.stdout.splitlines()[-1].split())
    assert last.endswith(
        "times.json: 11 of 25 operations with a time, 8 fused into these, "
        "6 without cost (views, constants, branches not taken)"
    )
    values = json.loads(times.read_text(encoding="utf-8"))
    assert values.keys() == {"main", "closed_call", "closed_call_0", "dynamic_update_index_in_dim"}
    whole_us = json.loads(report.read_text(encoding="utf-8"))["rank_classes"][0]["duration_ns"] / 1e3
    main = values["main"]["results"].values()
    assert sum(row["value"] for row in main) == pytest.approx(whole_us, rel=1e-4)
    again = _estimate(NESTED, "--model-explorer", times)
    assert again.exit_code == 2
    assert "--overwrite" in again.output
    assert _estimate(NESTED, "--model-explorer", times, "--overwrite").exit_code == 0


def test_standard_output_has_only_the_file() -> None:
    done = _estimate(NESTED, "--model-explorer", "-")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["main"]["name"] == "estimated time (us) on H100-SXM"
    assert "node data: 11 of 25 operations" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((PROGRAMS.parent / "hlo" / "mlp.hlo.txt",), 4, "no StableHLO program"),
        ((NESTED, "--granularity", "region"), 2, "has no node in Model Explorer"),
        ((PROGRAMS / "dynamic_mlp.mlir", "--dim", "b=8", "--dim", "s=16"), 2, "without --dim"),
        (("--table", "ops.csv"), 2, "--model-explorer requires a program"),
        ((NESTED, "--hardware", "A100-SXM-80GB"), 2, "one simulation only"),
    ],
)
def test_inputs_without_node_data_are_refused(
    tmp_path: Path, arguments: tuple[str | Path, ...], code: int, message: str
) -> None:
    times = tmp_path / "times.json"
    done = _estimate(*arguments, "--model-explorer", times)
    assert done.exit_code == code, done.output
    assert message in " ".join(done.output.split())
    assert not times.exists()
