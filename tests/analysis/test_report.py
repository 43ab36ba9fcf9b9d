"""Report folder: equal figures in the page, the CSV files and the document."""

from __future__ import annotations

import csv
import json
import re
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import hespas
from hespas.analysis.report import SECTIONS
from hespas.cli.main import app
from hespas.files.documents import unescape_formula
from hespas.graph.errors import OutputError
from hespas.report.texts import shown
from tests.analysis.raw import FIXTURE
from tests.browser import needs_browser, opened
from tests.converters.pytorch.traces import host, kernel, launch, write_kineto

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028=HYPERLINK"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["analyze", *map(str, arguments)])


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', page, re.DOTALL)
    assert found
    document: dict[str, Any] = json.loads(found[1])
    return document


def test_page_tables_and_document_say_the_same(tmp_path: Path) -> None:
    done = run(FIXTURE, "--report", tmp_path / "out", "--quiet")
    assert done.exit_code == 0, done.output
    tables = hespas.analyze(FIXTURE).tables_by_name()
    names = {path.name for path in (tmp_path / "out").iterdir()}
    filled = {name for name, table in tables.items() if len(table)}
    assert names == {"index.html", "analysis.json", *(f"{name}.csv" for name in filled)}
    document = json.loads((tmp_path / "out" / "analysis.json").read_text())
    page = (tmp_path / "out" / "index.html").read_text()
    data = data_of(page)
    sections = {name.removeprefix("table-"): table for name, table in data["tables"].items()}
    del sections["diagnostics-table"]
    assert set(sections) == {each.table for each in SECTIONS} & filled
    assert set(sections) == set(re.findall(r'<section id="(\w+)"', page)) - {"diagnostics", "spans"}
    for name in filled:
        with (tmp_path / "out" / f"{name}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == len(tables[name]) == len(document[name])
        for row, known in zip(rows, document[name], strict=True):
            for key, cell in row.items():
                value = known[key]
                wanted = "" if value is None else str(value)
                assert unescape_formula(cell) == wanted or float(cell) == pytest.approx(value)
    for name, section in sections.items():
        assert section["of"] == len(tables[name])
        for column in section["columns"]:
            known = [row[column["name"]] for row in document[name]]
            if "values" in column:
                assert column["values"] == known
            elif column["name"] not in {"shapes", "dtypes"}:
                assert [data["texts"][code] for code in column["codes"]] == known


def test_names_from_files_are_text(tmp_path: Path) -> None:
    events = [host(HOSTILE, 0, 9), launch(1, 4), kernel(HOSTILE, 20, 5, 4)]
    trace = write_kineto(tmp_path / "t.json", events, deviceProperties=[{"id": 0, "name": HOSTILE}])
    hespas.analyze(trace).write(tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text()
    assert "<img" not in page
    assert page.count("</script>") == 3
    assert "http:" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in page
    assert shown(HOSTILE) in data_of(page)["texts"]


def test_what_stands_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "kernels.csv").write_text("mine")
    with pytest.raises(OutputError, match="exists"):
        hespas.analyze(FIXTURE).write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kernels.csv"]
    hespas.analyze(FIXTURE).write(tmp_path, overwrite=True)
    assert (tmp_path / "kernels.csv").read_text().startswith("kernel,kind,")
    done = run(FIXTURE, "--report", tmp_path)
    assert done.exit_code == 2 or "exists" in done.stderr
    assert done.exit_code != 0


def test_a_report_in_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    done = run(FIXTURE, "--report", tmp_path / "file")
    assert done.exit_code != 0
    assert "expected a folder" in done.stderr


def test_figures_of_a_table_are_csv_numbers(tmp_path: Path) -> None:
    hespas.analyze(FIXTURE).write(tmp_path / "out")
    table = hespas.analyze(FIXTURE).tables.kernels
    with (tmp_path / "out" / "kernels.csv").open(newline="") as file:
        deviations = [row["std_ns"] for row in csv.DictReader(file)]
    for cell, value in zip(deviations, table["std_ns"].tolist(), strict=True):
        assert (cell == "") == isnan(value)
        assert isnan(value) or float(cell) == value


def rows_shown(section: dict[str, Any]) -> int:
    """Rows of a table; of the tree those that do more than pass all of their time on to one other."""
    return int(section["rows"]) - int(sum(section.get("folded", ())))


@needs_browser
def test_the_page_draws_its_tables(tmp_path: Path) -> None:
    hespas.analyze(FIXTURE, baseline=FIXTURE).write(tmp_path / "out")
    page = tmp_path / "out" / "index.html"
    dom = opened(page, tmp_path)
    for name, section in data_of(page.read_text())["tables"].items():
        part = dom.partition(f'<div class="table" id="{name}">')[2].partition("</table>")[0]
        assert part.count("<tr") - 1 == min(rows_shown(section), 50)
        assert part.count("<button") == len(section["columns"])
