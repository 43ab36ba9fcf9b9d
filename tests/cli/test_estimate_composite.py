"""``hespas estimate --estimator composite``: the source of each estimate in text and document."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from hespas.cli.main import app

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "fixtures" / "hlo" / "collectives_shard_map.hlo.txt"
SCHEMA = json.loads((ROOT / "hespas" / "schemas" / "estimate.schema.json").read_text(encoding="utf-8"))
runner = CliRunner()


def test_each_estimators_share_is_printed_and_written(tmp_path: Path) -> None:
    document = tmp_path / "estimate.json"
    done = runner.invoke(
        app,
        [
            "estimate",
            str(PROGRAM),
            "--hardware",
            "TPU-v4",  # no fit of messages, nor a device like it: the roofline has them
            "--estimator",
            "composite:order=collectives+roofline",
            "--json",
            str(document),
        ],
    )
    assert done.exit_code == 0, done.output
    assert re.search(r"share +estimator", done.stdout)
    row = re.search(r"^collective .*(\n .*)*", done.stdout, re.MULTILINE)  # with the lines it goes on in
    assert row
    assert re.search(r"collectives [\d.]+%, roofline [\d.]+%", " ".join(row[0].split()))
    written = json.loads(document.read_text(encoding="utf-8"))
    jsonschema.validate(written, SCHEMA)
    rows = {row["op_class"]: row for row in written["rank_classes"][0]["op_classes"]}
    assert [part["estimator"] for part in rows["collective"]["estimators"]] == ["collectives", "roofline"]
    total = sum(part["duration_ns"] for part in rows["collective"]["estimators"])
    assert total == pytest.approx(rows["collective"]["duration_ns"])
    assert rows["free"]["estimators"] == []


def test_one_estimator_needs_no_column() -> None:
    done = runner.invoke(app, ["estimate", str(PROGRAM), "--hardware", "P4", "--estimator", "roofline"])
    assert done.exit_code == 0, done.output
    assert not re.search(r"share +estimator", done.stdout)


def test_only_who_spoke_is_named() -> None:
    """Who stands in the order and says nothing is not an author of the time."""
    asked = ["estimate", str(PROGRAM), "--hardware", "H100-SXM", "--estimator"]
    done = runner.invoke(app, [*asked, "composite:order=systolic+roofline"])
    assert done.exit_code == 0, done.output
    assert not re.search(r"share +estimator", done.stdout)
    assert "(roofline)" in done.stdout


def test_a_wrong_order_exits_2_and_a_missing_table_3(tmp_path: Path) -> None:
    base = ["estimate", str(PROGRAM), "--hardware", "H100-SXM", "--estimator"]
    wrong = runner.invoke(app, [*base, "composite:order=nobody+roofline"])
    assert wrong.exit_code == 2
    assert "nobody" in wrong.output
    missing = runner.invoke(app, [*base, f"composite:order=database:path={tmp_path / 'none.csv'}+roofline"])
    assert missing.exit_code == 3
