"""Tables of a page in a browser: sort, search, filter, select and unfold without errors."""

from __future__ import annotations

from math import nan
from pathlib import Path

from hespas.report import Column, table_from_rows
from hespas.report.page import Fold, Page, Section, TableView, page_html
from tests.browser import needs_browser, seen_by

SCRIPT = """
const texts = row => [...row.cells].map(cell => cell.textContent);
const rows = name => [...document.querySelectorAll(`#${name} tbody tr`)].map(texts);
const heads = name => [...document.querySelectorAll(`#${name} th`)];
const sort = (name, place) => heads(name)[place].querySelector("button").click();
const count = name => document.querySelector(`#${name} .row-count`).textContent;
const set = (name, place, value, event) => {
  const field = document.querySelectorAll(`#${name} .tools :is(input, select)`)[place];
  if (field.type === "checkbox") field.checked = value; else field.value = value;
  field.dispatchEvent(new Event(event));
};
const seen = {};
seen.first = rows("big").length;
document.querySelector("#big .more").click();
seen.more = [rows("big").length, count("big")];
sort("big", 1);
seen.down = [rows("big")[0], heads("big")[1].getAttribute("aria-sort"), rows("big").at(-1)[1]];
sort("big", 1);
seen.up = rows("big")[0];
set("big", 0, "name 11", "input");
seen.searched = [rows("big").map(row => row[0]), count("big")];
set("big", 0, "", "input");
set("big", 1, "1", "change");
seen.filtered = [rows("big").length, new Set(rows("big").map(row => row[2])).size];
seen.chosen = heads("choice").map(head => head.textContent);
set("choice", 1, "1", "change");
seen.other = [heads("choice").map(head => head.textContent), rows("choice")[0]];
seen.tree = rows("tree").map(row => row[0]);
set("tree", 0, true, "change");
seen.unfolded = rows("tree").map(row => row[0]);
location.hash = "#inside";
seen.wide = document.documentElement.scrollWidth <= innerWidth;
setTimeout(() => {
  seen.open = document.querySelector("details").open;
  document.title = JSON.stringify(seen);
}, 50);
"""


def _page() -> str:
    kinds = ("one", "two", "three")
    rows = [(f"name {row}", nan if row == 5 else float(row), kinds[row % 3]) for row in range(120)]
    header = (Column("name", kind="code"), Column("time_ns", "time", "time"), Column("kind"))
    big = TableView(name="big", table=table_from_rows(header, rows), filters=["kind"])
    choices = (
        Column("shape"),
        Column("a", "predicted", kind="number", write=str),
        Column("b", "predicted", kind="number", write=str),
    )
    choice = TableView(
        name="choice",
        table=table_from_rows(choices, [(f"s{row}", row, -row) for row in range(1, 8)]),
        choices={"a": "first", "b": "second"},
        choice_title="estimator",
    )
    names = table_from_rows([Column("call")], [("a",), ("b",), ("c",)])
    tree = TableView(
        name="tree", table=names, depths=[0, 1, 2], folded=[False, True, False], fold_text="all calls"
    )
    fold = Fold(summary="more", blocks=[tree], id="inside")
    sections = [Section("s", "S", [big, choice]), Section("t", "T", [fold])]
    return page_html(Page(title="t", sections=sections))


@needs_browser
def test_tables_are_sorted_searched_and_filtered(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(_page(), encoding="utf-8")
    seen = seen_by(SCRIPT, page, tmp_path, width=390)
    assert seen["first"] == 50
    assert seen["more"] == [120, "120 of 120 rows"]
    assert seen["down"] == [["name 119", "119 ns", "three"], "descending", "\N{EN DASH}"]
    assert seen["up"] == ["name 0", "0 ns", "one"]
    searched, count = seen["searched"]
    assert searched == ["name 11", *(f"name {row}" for row in range(110, 120))]
    assert count == "11 of 11 rows, of 120"
    assert seen["filtered"] == [40, 1]
    assert seen["chosen"] == ["shape", "predicted"]
    assert seen["other"] == [["shape", "predicted"], ["s1", "-1"]]
    assert seen["tree"] == ["a", "c"]
    assert seen["unfolded"] == ["a", "b", "c"]
    assert seen["wide"]
    assert seen["open"]
