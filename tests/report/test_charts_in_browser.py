"""Timelines and flame graphs in a browser: zoom, search, keyboard and links."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hespas.report import Column, table_from_rows
from hespas.report.page import Block, ChartView, Page, Section, TableView, page_html
from hespas.report.timelines import FlameGraph, Lane, TimelineChart
from tests.browser import FAULTS, needs_browser, seen_by

SPANS = 100_000
SCRIPT = """
const status = () => document.querySelector("#chart-time [role=status]").textContent;
const press = (box, key) => box.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const canvas = document.querySelector("#chart-time canvas");
const view = document.querySelector("#chart-time .view");
const titleOf = each => each.querySelector("title").textContent;
const frames = [...document.querySelectorAll(".frame")];
const frame = name => frames.find(each => titleOf(each).startsWith(`${name}:`));
const flame = document.querySelector(".flame"), frameStatus = () => flame.nextElementSibling.textContent;
const wait = () => new Promise(resolve => setTimeout(resolve, 60));
const painted = () => {
  const pixels = canvas.getContext("2d").getImageData(0, 22, canvas.width, canvas.height - 24).data;
  return pixels.filter((value, at) => at % 4 === 3 && value > 100).length / (pixels.length / 4);
};
const seen = {};
(async () => {
  await wait();
  seen.start = status();
  seen.whole = painted();
  press(view, "ArrowDown");
  seen.lane = status();
  press(view, "n");
  seen.first = status();
  press(view, "n");
  press(view, "p");
  press(view, "n");
  seen.second = status();
  const find = document.querySelector("#chart-time input[type=search]");
  find.value = "needle";
  press(find, "Enter");
  seen.needle = status();
  find.value = "absent";
  press(find, "Enter");
  seen.absent = status();
  location.hash = document.querySelector("#rows tbody a").hash;
  await wait();
  seen.linked = status();
  seen.focused = document.activeElement === view;
  frame("callee").dispatchEvent(new MouseEvent("click", { bubbles: true }));
  seen.flame = [frame("callee").getAttribute("width"), frame("root").getAttribute("width")];
  seen.flame.push(frame("other").style.display, frameStatus());
  press(flame, "Escape");
  seen.all = [frame("callee").getAttribute("width"), frame("other").style.display];
  press(flame, "ArrowUp");
  seen.caller = frameStatus();
  seen.faults = faults;
  document.title = JSON.stringify(seen);
})();
"""


def page() -> str:
    start = np.arange(SPANS, dtype=np.float64) * 1e3
    names = ["needle" if row == 4321 else f"op {row % 50}" for row in range(SPANS)]
    work = Lane("compute", ["compute"] * SPANS, start, start + 900.0, names, np.arange(SPANS) % 3 == 0)
    few = Lane(
        "communication", ["communication"] * 2, np.array([0.0, 5e5]), np.array([1e5, 2e6]), ["one", "two"],
        np.zeros(2, np.bool_),
    )  # fmt: skip
    timeline = TimelineChart(name="time", title="Timeline", lanes=[work, few])
    flame = FlameGraph(
        name="flame",
        title="Calls",
        names=["root", "callee", "other"],
        depths=[0, 1, 1],
        total_ns=[100.0, 25.0, 75.0],
    )
    links = [timeline.links()[name] for name in ("needle", "op 7")]
    table = table_from_rows([Column("operation", kind="code")], [("needle",), ("op 7",)])
    blocks: list[Block] = [
        ChartView(timeline),
        ChartView(flame),
        TableView(name="rows", table=table, links={"operation": links}),
    ]
    return page_html(Page(title="t", sections=[Section("s", "S", blocks)]))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page(), encoding="utf-8")
    return path


def test_a_page_with_many_spans_stays_small(written: Path) -> None:
    assert written.stat().st_size < 1_400_000


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_a_timeline_of_100_000_spans(written: Path, tmp_path: Path, width: int) -> None:
    seen = seen_by(FAULTS + SCRIPT, written, tmp_path, width=width)
    assert seen["faults"] == []
    assert seen["start"] == "compute: 100,000 spans"
    assert seen["whole"] > 0.3
    assert seen["lane"] == "communication: 2 spans"
    assert seen["first"] == "communication: one, 100 us from 0 ns"
    assert seen["second"] == "communication: two, 1.5 ms from 500 us"
    needle = "compute: needle, 900 ns from 4.321 ms"
    assert seen["needle"] == needle
    assert seen["absent"] == "no operation contains absent"
    assert seen["linked"] == needle
    assert seen["focused"]
    assert seen["flame"] == ["100%", "100%", "none", "callee: 25 ns (25.0%)"]
    assert seen["all"] == ["25%", ""]
    assert seen["caller"] == "root: 100 ns (100.0%)"
