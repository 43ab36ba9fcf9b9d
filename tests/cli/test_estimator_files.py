"""Documents never replace a file that an option of ``--estimator`` names."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hespas.cli.main import app
from hespas.cli.validate import app as validate

TABLE = "hardware,kind,dtype,m,n,k,duration_us\nH100-SXM,matmul,bf16,64,64,64,5\n"


@pytest.mark.parametrize("spelling", ["database:path={}", "composite:order=roofline+database:path={},split="])
def test_a_measured_table_is_not_replaced_by_estimates(tmp_path: Path, spelling: str) -> None:
    measured, asked = tmp_path / "measured.csv", tmp_path / "asked.csv"
    measured.write_text(TABLE)
    asked.write_text("m,n,k\n64,64,64\n")
    common = ["--hardware", "H100-SXM", "--estimator", spelling.format(measured)]
    estimate = ["estimate", "--table", str(asked), *common, "--out", str(measured)]
    accuracy = ["accuracy", "--table", str(asked), *common, "--json", str(measured)]
    for command, arguments in ((app, estimate), (validate, accuracy)):
        done = CliRunner().invoke(command, arguments)
        assert done.exit_code == 2, done.output
        assert "names the same file as --estimator" in done.stderr
        assert measured.read_text() == TABLE
