"""The page: golden HTML of one table, escaping of texts, and one module that writes pages."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from math import nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import Markup

from hespas.graph import Diagnostics
from hespas.report import Column, table_from_rows
from hespas.report.drawings import Bar, Curve, curves, stacked_bars, svg, svg_text
from hespas.report.page import (
    Block,
    ChartView,
    Drawing,
    Fold,
    Page,
    Paragraph,
    Section,
    TableView,
    Tile,
    Tiles,
    code_text,
    diagnostics_section,
    page_html,
)
from hespas.report.texts import shown
from hespas.report.timelines import FlameGraph, Lane, TimelineChart

PACKAGE = Path(__file__).parents[2] / "hespas"
TABLE = table_from_rows(
    (
        Column("name", "operation", "code"),
        Column("total_ns", "time", "time"),
        Column("share", kind="share"),
        Column("note", detail=2),
    ),
    [("<dot>", 1_234_567.0, 0.25, "hidden"), ("add", nan, nan, "hidden")],
)


class _Text(HTMLParser):
    """Tags, ids, and the text outside of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside = tag if tag in {"script", "style"} else ""
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.links += [value or "" for name, value in attrs if name == "href" and tag == "a"]

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        self.text += "" if self._inside else data


def _page(name: str) -> str:
    """Return a page in which ``name`` is in every kind of block."""
    table = table_from_rows(
        (Column("name", name, "code"), Column("share", kind="share")), [(name, 0.5), (name * 2, nan)]
    )
    lane = Lane(name, ["compute"], np.zeros(1), np.ones(1), [name], np.ones(1, np.bool_))
    curve = Curve(name, np.array([0.0, 1.0]), {name: np.array([1.0, 2.0])})
    diagnostics = Diagnostics()
    diagnostics.warning("some.code", name, name)
    blocks: list[Block] = [
        Paragraph(name),
        Tiles(name, [Tile(name, name, name)]),
        Drawing(content=stacked_bars([Bar(name, [1.0])], {"compute": name}), title=name, note=name),
        ChartView(TimelineChart(name="timeline", title=name, note=name, lanes=[lane])),
        ChartView(FlameGraph(name="flame", title=name, names=[name], depths=[0], total_ns=[1.0])),
        Drawing(content=curves([curve])),
        Drawing(content=svg(10, 10, name, [svg_text(1, 1, name)])),
        Fold(summary=name, blocks=[TableView(name="t", table=table, title=name, note=name, file=name)]),
        Paragraph(code_text(name, name)),
    ]
    sections = [Section("first", name, blocks, name), diagnostics_section(diagnostics)]
    return page_html(Page(title=name, summary=[Paragraph(name)], sections=sections))


@settings(max_examples=60)
@given(st.text(min_size=1, max_size=80))
def test_no_text_is_markup(name: str) -> None:
    page = _Text(_page(name))
    assert page.tags == _Text(_page("x")).tags
    assert re.sub(r"\s+", " ", shown(name).strip()) in re.sub(r"\s+", " ", page.text)


@pytest.mark.parametrize(
    "name", ["</script><script>alert(1)</script>", "<!--<script>", "{{ 7 * 7 }}{% raw %}"]
)
def test_a_hostile_name_stays_a_text(name: str) -> None:
    page = _page(name)
    assert _Text(page).tags == _Text(_page("x")).tags
    data = re.search(r'id="page-data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert name in json.loads(data[1])["texts"]


def test_links_lead_to_sections_that_exist() -> None:
    empty = Section("empty", "Left out", [])
    view = TableView(
        name="matrix",
        table=TABLE,
        links={"name": ["cell", ""]},
        tones={"name": ["good", "bad"]},
        named="name",
    )
    fold = Fold(summary="cell", blocks=[Paragraph("inside")], id="cell")
    page = page_html(Page(title="t", sections=[Section("one", "One", [view, fold]), empty]))
    parsed = _Text(page)
    assert parsed.links == ["#one", "#cell"]
    assert {"one", "matrix", "cell"} <= set(parsed.ids)
    assert "empty" not in parsed.ids
    assert '<td class="text code named good"><span><a href="#cell">&lt;dot&gt;</a></span></td>' in page
    assert "hidden</span>" not in page


def test_a_page_loads_nothing() -> None:
    page = _page("x")
    assert "default-src 'none'" in page
    assert not re.search(r"<(?:img|iframe|object|embed)|\ssrc=|@import|url\(", page)
    assert "://" not in page


def test_a_tree_folds_rows_and_keeps_levels() -> None:
    tree = table_from_rows([Column("name")], [("a",), ("b",), ("c",)])
    view = TableView(name="t", table=tree, depths=[0, 1, 2], folded=[False, True, False], fold_text="all")
    page = page_html(Page(title="t", sections=[Section("s", "S", [view])]))
    assert '<span style="--level:0">a</span>' in page
    assert '<span style="--level:1">c</span>' in page
    assert "<span>b" not in page
    assert '"unfolded_levels":[0,1,2]' in page


def test_long_tables_are_cut_and_say_so() -> None:
    table = table_from_rows([Column("n", kind="count")], [(row,) for row in range(300)])
    view = TableView(name="t", table=table, most=200, file="t.csv")
    page = page_html(Page(title="t", sections=[Section("s", "S", [view])]))
    assert "50 of 200 rows; the first 200 of 300 rows are on this page; t.csv has all" in page
    assert page.count("<td") == 50


def test_bars_beyond_the_first_are_folded() -> None:
    drawn = stacked_bars(
        [Bar(str(row), [float(row)]) for row in range(1, 20)], {"compute": "compute"}, "more"
    )
    assert isinstance(drawn, Markup)
    assert "<summary>7 more</summary>" in drawn
    assert drawn.count('class="bar"') == 19


def test_one_module_writes_pages() -> None:
    writers = [
        path.relative_to(PACKAGE).as_posix()
        for path in sorted(PACKAGE.rglob("*"))
        if path.suffix in {".py", ".html", ".js"} and "<html" in path.read_text(encoding="utf-8").lower()
    ]
    assert writers == ["report/templates/page.html"]
