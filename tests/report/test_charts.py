"""Charts: drawn shapes follow from values, texts stay texts, and SVG documents are self-contained."""

from __future__ import annotations

import re
from math import inf, isclose, nan
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.graph.columns import highest_rows
from hespas.graph.errors import OutputError
from hespas.report.charts import (
    AreaChart,
    Axis,
    Chart,
    HeatMap,
    Histogram,
    Plot,
    Scale,
    Series,
    StripPlot,
    Waterfall,
    roof_lines,
)
from hespas.report.texts import NameTable
from hespas.report.timelines import FlameGraph, Lane, TimelineChart

SVG = "{http://www.w3.org/2000/svg}"
TIME, BYTES = Axis("time", "time"), Axis("size", "bytes", is_log=True)


def lane(count: int = 3, label: str = "compute") -> Lane:
    start = np.arange(count, dtype=np.float64) * 1e3 + 5e6
    return Lane(
        label=label,
        styles=["compute", "communication"] * (count // 2) + ["host"] * (count % 2),
        start_ns=start,
        end_ns=start + 600.0,
        texts=[f"op {row % 7}" for row in range(count)],
        critical=np.arange(count) % 2 == 0,
    )


def charts(label: str = "label") -> list[Chart]:
    values = np.array([[1.0, 2.0], [nan, 4.0]])
    series = [
        Series(label=label, x=[1e3, 1e6], y=[1.0, nan], texts=[label, label]),
        Series(label=label, x=[1e3, 1e6], y=[1.0, 2.0], mark="line"),
        Series(label=label, x=[1e3, 1e6], y=[1.0, 2.0], mark="steps"),
        Series(label=label, x=[1e3, 1e6], y=[1.0, 2.0], mark="guide"),
    ]
    time, heights = np.array([0.0, 1.0, 5.0]), np.array([1.0, 3.0, 2.0])
    heat = HeatMap(
        name="heat", title=label, rows=[label, "b"], columns=[label, "d"], values=values, axis=TIME, best=True
    )
    bins = Histogram(
        name="bins", title=label, edges=time, heights={label: heights[:2]}, x=TIME, y=TIME, texts=[label] * 2
    )
    return [
        Plot(name="plot", title=label, x=BYTES, y=TIME, series=series),
        AreaChart(name="area", title=label, moments=time, layers={label: heights}, axis=BYTES, limit=4.0),
        Waterfall(
            name="fall",
            title=label,
            before=5.0,
            after=9.0,
            changes={label: 3.0},
            axis=TIME,
            texts={label: label},
        ),
        StripPlot(
            name="strips",
            title=label,
            labels=[label, "b"],
            x=TIME,
            limit=5.0,
            series=[Series(label=label, x=[1.0, nan], y=[0, 1], texts=[label, label])],
        ),
        heat,
        bins,
        TimelineChart(name="time", title=label, lanes=[lane(label=label)]),
        FlameGraph(name="flame", title=label, names=[label, "b"], depths=[0, 1], total_ns=[2.0, 1.0]),
    ]


@pytest.mark.parametrize("chart", charts(), ids=lambda chart: type(chart).__name__)
def test_a_chart_is_a_document_with_a_name(chart: Chart, tmp_path: Path) -> None:
    chart.write(tmp_path / "chart.svg")
    root = ElementTree.parse(tmp_path / "chart.svg").getroot()
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    first = root[0]
    assert (first.tag, first.text) == (f"{SVG}title", "label")
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert "label" in texts
    assert chart.to_svg() == (tmp_path / "chart.svg").read_text(encoding="utf-8")
    with pytest.raises(OutputError):
        chart.write(tmp_path / "chart.svg")
    numbers = [float(text) for text in re.findall(r'(?<=[ "])-?[0-9.]+(?=[ "])', chart.to_svg())]
    assert all(abs(number) < 1e5 for number in numbers)
    assert "nan" not in chart.to_svg()


@given(st.text(min_size=1, max_size=60))
def test_names_are_texts(name: str) -> None:
    for chart, plain in zip(charts(name), charts(), strict=True):
        drawn = ElementTree.fromstring(chart.to_svg())
        tags = [element.tag for element in drawn.iter()]
        assert [tag for tag in tags if tag != f"{SVG}text"] == [
            element.tag
            for element in ElementTree.fromstring(plain.to_svg()).iter()
            if element.tag != f"{SVG}text"
        ]


@given(
    st.lists(st.floats(1e-3, 1e15), min_size=1, max_size=20),
    st.booleans(),
)
def test_ticks_are_inside_the_axis_and_values_inside_the_plot(values: list[float], is_log: bool) -> None:
    scale = Scale.over(Axis("x", "number", is_log=is_log), values, 10.0, 110.0)
    assert scale.ticks() == sorted(scale.ticks())
    assert len(scale.ticks()) <= 12
    for value in (*values, *scale.ticks()):
        assert 10.0 - 1e-9 <= scale.at(value) <= 110.0 + 1e-9
    assert all(scale.low * 0.999 <= tick <= scale.high * 1.001 for tick in scale.ticks())
    order = sorted(values)
    assert [scale.at(value) for value in order] == sorted(scale.at(value) for value in values)


def test_texts_of_ticks_have_no_trailing_zeros() -> None:
    assert [TIME.text(value) for value in (0.0, 1e3, 1.5e6, 2e9)] == ["0 ns", "1 us", "1.5 ms", "2 s"]
    assert [BYTES.text(value) for value in (10.0, 1e7, 1.25e9)] == ["10 B", "10 MB", "1.25 GB"]


def test_a_waterfall_adds_up() -> None:
    fall = Waterfall(name="fall", title="t", before=5.0, after=8.0, changes={"a": 4.0, "b": -2.0}, axis=TIME)
    assert fall.steps() == [("a", 4.0), ("b", -2.0), ("all others", 1.0)]
    exact = Waterfall(name="fall", title="t", before=10.0, after=12.0, changes={"a": 2.0}, axis=TIME)
    assert exact.steps() == [("a", 2.0)]
    near = Waterfall(name="fall", title="t", before=1000.0, after=1001.0, changes={"a": 1.0}, axis=TIME)
    assert "does not begin at 0" in near.to_svg()
    assert "does not begin at 0" not in fall.to_svg()


def test_strips_have_medians_and_cut_far_values() -> None:
    strips = StripPlot(
        name="strips",
        title="t",
        labels=["first", "second"],
        x=Axis("error", "share"),
        limit=0.5,
        series=[
            Series(
                label="a", x=[-0.1, 0.1, 0.3, nan], y=[0, 0, 0, 0], texts=["low", "middle", "high", "none"]
            ),
            Series(label="b", x=[-3.0, 7.0], y=[1, 1]),
        ],
    )
    drawing = strips.to_svg()
    assert "first, a: median 10.0%" in drawing
    assert "second, b: median 200.0%" in drawing
    assert drawing.count('class="dot c0"') == 3 + 1  # three points, and the mark of the legend
    assert drawing.count('class="dot c1"') == 2 + 1
    assert "<title>none</title>" not in drawing
    across = [float(x) for x in re.findall(r'class="dot c1" [^>]*translate\(([0-9.]+) ', drawing)]
    assert across[-1] - across[-2] == pytest.approx((744 - 170) / 1.05, abs=0.2)  # from -50 % to 50 %


def test_the_lines_of_a_roofline_meet() -> None:
    memory, matrix, vector = roof_lines("HBM", 2.0, {"matrix": 100.0, "vector": 10.0}, 1.0, 200.0)
    assert (memory.x, memory.y) == ([1.0, 50.0], [2.0, 100.0])
    assert (matrix.x, matrix.y) == ([50.0, 200.0], [100.0, 100.0])
    assert (vector.x, vector.y) == ([5.0, 200.0], [10.0, 10.0])
    assert [line.label for line in roof_lines("HBM", nan, {"matrix": 100.0}, 1.0, 200.0)] == ["matrix"]
    assert [line.label for line in roof_lines("HBM", 2.0, {}, 1.0, 200.0)] == ["HBM"]


def test_frames_are_inside_their_callers() -> None:
    graph = FlameGraph(
        name="flame",
        title="t",
        names=["root", "a", "a1", "b", "narrow", "inside it", "other"],
        depths=[0, 1, 2, 1, 1, 2, 0],
        total_ns=[60.0, 30.0, 30.0, 20.0, 1e-4, 1e-5, 40.0],
    )
    frames = {graph.names[row]: (start, width, depth) for row, start, width, depth in graph.frames()}
    assert frames == {
        "root": (0.0, 0.6, 0),
        "other": (0.6, 0.4, 0),
        "a": (0.0, 0.3, 1),
        "a1": (0.0, 0.3, 2),
        "b": (0.3, 0.2, 1),
    }


def test_spans_on_a_page_are_those_of_the_lanes() -> None:
    lanes = [lane(9), lane(4, "other")]
    names = NameTable()
    data = TimelineChart(name="t", title="t", lanes=lanes).data(names)
    texts = names.texts()
    for drawn, given_lane in zip(data["lanes"], lanes, strict=True):
        ends = np.cumsum(np.array(drawn["gaps"]) + np.array(drawn["lengths"])) * data["unit_ns"]
        assert ends + 5e6 == pytest.approx(given_lane.end_ns)
        assert np.array(drawn["lengths"]) * data["unit_ns"] == pytest.approx(
            given_lane.end_ns - given_lane.start_ns
        )
        assert [texts[code] for code in drawn["codes"]] == given_lane.texts
        assert drawn["critical"] == np.flatnonzero(given_lane.critical).tolist()
        assert [data["styles"][code] for code in drawn["styles"]] == given_lane.styles


def test_links_lead_to_the_longest_span_of_an_operation() -> None:
    first = lane(7)
    longer = Lane("x", ["host"], np.array([5e6]), np.array([6e6]), ["op 3"], np.zeros(1, np.bool_))
    chart = TimelineChart(name="t", title="t", lanes=[first, longer])
    links = chart.links()
    assert links["op 3"] == "chart-t/1/0"
    assert links["op 5"] == "chart-t/0/5"
    assert "op 9" not in links


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=400), st.integers(3, 50))
def test_a_thinned_curve_keeps_its_peak_and_its_ends(values: list[float], most: int) -> None:
    column = np.array(values)
    rows = highest_rows(column, most)
    assert len(rows) <= max(most, len(values) if len(values) <= most else most)
    assert rows[0] == 0
    assert rows[-1] == len(values) - 1
    assert column[rows].max() == column.max()
    assert (np.diff(rows) > 0).all()


def test_unknown_and_infinite_values_are_not_drawn() -> None:
    plot = Plot(
        name="p",
        title="t",
        x=BYTES,
        y=TIME,
        series=[Series(label="a", x=[0.0, 1e3, inf, 1e4], y=[1.0, 2.0, 3.0, nan])],
    )
    assert plot.to_svg().count('class="dot c0"') == 2  # one point, and the mark of the legend
    cells = HeatMap(
        name="h", title="t", rows=["a"], columns=["b", "c"], values=np.array([[nan, 1.0]]), axis=TIME
    )
    assert cells.to_svg().count('class="cell') == 1
    assert isclose(Scale.over(BYTES, [], 0.0, 1.0).low, 0.8)
