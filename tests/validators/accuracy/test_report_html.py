"""HTML report: complete, offline, and without markup from files."""

from __future__ import annotations

import re
from dataclasses import replace
from math import nan
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hespas.files.documents import json_for_script
from hespas.graph import Profile, Timeline
from hespas.graph.columns import FloatArray, StringTable
from hespas.hardware import named_device
from hespas.report.charts import Chart, Plot, Series, StripPlot, Waterfall
from hespas.report.timelines import TimelineChart
from hespas.validators.accuracy.report import accuracy_html, provenance_of
from hespas.validators.accuracy.report.charts import chart_groups
from hespas.validators.accuracy.result import Accuracy, Thresholds
from tests.browser import FAULTS, needs_browser, seen_by
from tests.validators.accuracy.report_samples import (
    HOSTILE,
    NO_LIMITS,
    cases,
    comparison,
    hostile_comparison,
    limits,
    page_of,
)

MOST_BYTES = 5_000_000


def _charts(result: Accuracy) -> dict[str, Chart]:
    groups = chart_groups(result, [named_device("H100-SXM")])
    return {chart.name: chart for group in groups for chart in group.charts}


def _plot(result: Accuracy, name: str) -> dict[str, list[Series]]:
    """Return the series of a plot by the start of their labels, before the number of cases."""
    chart = _charts(result)[name]
    assert isinstance(chart, Plot)
    series: dict[str, list[Series]] = {}
    for part in chart.series:
        series.setdefault(part.label.split(" (")[0], []).append(part)
    return series


def _points(result: Accuracy, name: str = "predicted") -> list[tuple[float, float]]:
    """Return the points of a plot in ascending order."""
    parts = [part for series in _plot(result, name).values() for part in series if part.mark == "points"]
    pairs = [zip(part.x, part.y, strict=True) for part in parts]
    return sorted((float(x), float(y)) for points in pairs for x, y in points)


def _small() -> Accuracy:
    return comparison(cases(30))


def test_every_link_leads_into_the_page_and_nothing_is_loaded() -> None:
    page = page_of(accuracy_html(_small(), NO_LIMITS))
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert {"#verdict", "#errors", "#figures", "#operations", "#data", "#provenance"} <= set(links)
    assert {link.removeprefix("#") for link in links} <= page.ids()
    loading = [
        (tag, attributes)
        for tag, attributes in page.elements
        if "src" in attributes or (tag == "link" and attributes["href"] != "data:,")
    ]
    assert loading == []
    policy = next(each["content"] for tag, each in page.elements if tag == "meta" and "http-equiv" in each)
    assert policy.startswith("default-src 'none'")


def test_ids_are_unique_and_every_field_has_a_label() -> None:
    page = page_of(accuracy_html(_small(), NO_LIMITS))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    labelled = {attributes["for"] for tag, attributes in page.elements if tag == "label"}
    fields = {attributes["id"] for tag, attributes in page.elements if tag in {"select", "input"}}
    assert fields == labelled


def test_hostile_names_are_text() -> None:
    honest = page_of(accuracy_html(comparison(cases(40), cases(40, hardware="MI300X")), NO_LIMITS))
    page = page_of(accuracy_html(hostile_comparison(), NO_LIMITS))
    known = {tag for tag, _ in honest.elements} | {"details", "summary", "ul", "li"}
    assert {tag for tag, _ in page.elements} - known == set()
    assert [name for _, each in page.elements for name in each if name.startswith("on")] == []
    assert len(page.scripts) == len(honest.scripts) == 2
    assert HOSTILE[0] in page.text
    assert HOSTILE[1] in page.text
    assert "{{ 7 * 7 }}" in page.text
    assert "\\u202egnp.exe" in page.text
    assert not any(letter in page.text for letter in "\N{RIGHT-TO-LEFT OVERRIDE}\x00\x1b\x07")


def test_hostile_names_survive_in_the_data_of_the_page() -> None:
    page = page_of(accuracy_html(hostile_comparison(), NO_LIMITS))
    assert set(page.scripts[0]).isdisjoint("<>&\N{LINE SEPARATOR}\N{PARAGRAPH SEPARATOR}")
    names = msgspec.json.decode(page.scripts[0])["texts"]
    assert {HOSTILE[0], HOSTILE[1], HOSTILE[3]} <= set(names)
    assert "a\\u2028b\\u2029c" in names
    assert max(map(len, names)) <= 1000


def test_json_in_a_script_means_the_same() -> None:
    value = ["</script>&<!--", "\N{LINE SEPARATOR}\N{PARAGRAPH SEPARATOR}"]
    text = json_for_script(msgspec.json.encode(value))
    assert "<" not in text
    assert msgspec.json.decode(text) == value


@pytest.mark.parametrize(
    ("asked", "word", "tone"),
    [
        (NO_LIMITS, "No limits set", "none"),
        (limits(mape=0.5, coverage=0.5), "Pass", "pass"),
        (limits(mape=0.5, coverage=0.99), "Fail", "fail"),
        (limits(mape=0.01), "Fail", "fail"),
    ],
)
def test_the_verdict_is_that_of_the_thresholds(asked: Thresholds, word: str, tone: str) -> None:
    done = _small()
    page = page_of(accuracy_html(done, asked))
    shown = [
        each["class"] for tag, each in page.elements if tag == "p" and "verdict" in each.get("class", "")
    ]
    assert shown == [f"verdict {tone}"]
    assert word in page.text
    assert bool(done.exceeded(asked)) == (tone == "fail")


def test_few_shapes_are_flagged() -> None:
    assert "n too small" in page_of(accuracy_html(comparison(cases(4)), NO_LIMITS)).text
    many = accuracy_html(comparison(cases(900)), NO_LIMITS)
    assert "n too small" not in page_of(many).text.replace("1-10 us", "")


def test_nothing_predicted_is_no_error_of_zero() -> None:
    base = cases(12)
    silent = tuple(replace(said, duration_ns=np.full(12, nan)) for said in base.predictions)
    done = comparison(replace(base, predictions=silent))
    page = page_of(accuracy_html(done, NO_LIMITS))
    assert "not estimated" in page.text
    assert "Nothing that was measured is predicted" in page.text
    assert set(_charts(done)) == {"roofline"}


def test_many_cases_are_thinned_and_the_page_says_so() -> None:
    count = 30_000
    done = comparison(cases(count, names=tuple(f"{each:04}" + "<&" * 1000 for each in range(2000))))
    html = accuracy_html(done, NO_LIMITS)
    assert len(html.encode()) < MOST_BYTES
    page = page_of(html)
    points = _points(done)
    predicted = done.cases[0].predicted_ns("roofline")
    known = int((~np.isnan(predicted)).sum())
    assert f"{len(points):,} of {known:,} cases are drawn" in page.text
    assert len(points) == 2000
    assert accuracy_html(done, NO_LIMITS) == html
    assert points[-1][0] == float(done.cases[0].measured_ns[~np.isnan(predicted)].max())


def test_a_page_of_100_000_cases_is_small() -> None:
    page = accuracy_html(comparison(cases(100_000)), NO_LIMITS).encode()
    assert len(page) < 2_500_000


def test_charts_of_many_devices_share_the_points() -> None:
    done = comparison(*(cases(3000, hardware=f"device {number}") for number in range(12)))
    charts = _charts(done)
    assert {"predicted", "predicted-12", "roofline-12", "errors-by-class-12", "waterfall-12"} <= set(charts)
    points = [
        sum(len(part.x) for part in chart.series if part.mark == "points")
        for chart in charts.values()
        if isinstance(chart, Plot)
    ]
    assert sum(points) <= 16_000


def test_few_cases_are_all_there() -> None:
    done = _small()
    assert "cases are drawn" not in page_of(accuracy_html(done, NO_LIMITS)).text
    measured, predicted = done.cases[0].measured_ns, done.cases[0].predicted_ns("roofline")
    known = ~np.isnan(predicted)
    assert _points(done) == sorted(zip(measured[known].tolist(), predicted[known].tolist(), strict=True))
    chart = _charts(done)["predicted"]
    error = np.abs(predicted[known] / measured[known] - 1)
    shares = [f"{np.mean(error <= limit + 1e-9):.1%} within {limit:.0%}" for limit in (0.1, 0.5)]
    assert chart.note == f"Of {known.sum()} predicted cases, {' and '.join(shares)}."


def test_lines_are_at_the_measured_time_and_the_bands_around_it() -> None:
    series = _plot(_small(), "predicted")
    assert [len(series[label]) for label in ("equal", "±10%", "±50%")] == [1, 2, 2]
    factors = {
        label: [float(y) / float(x) for part in series[label] for x, y in zip(part.x, part.y, strict=True)]
        for label in ("equal", "±10%", "±50%")
    }
    assert factors["equal"] == [1.0, 1.0]
    assert factors["±10%"] == pytest.approx([1.1, 1.1, 0.9, 0.9])
    assert factors["±50%"] == pytest.approx([1.5, 1.5, 0.5, 0.5])


def test_a_distribution_is_the_share_of_cases_within_an_error() -> None:
    done = comparison(cases(40))
    series = _plot(done, "error-distribution")
    naive = {"datasheet-roofline", "one-efficiency", "overhead+two-efficiencies"}
    assert set(series) == {"all classes", "noise floor", "contraction", "elementwise", "reduction"} | naive
    (whole,) = series["all classes"]
    error = np.abs(done.cases[0].predicted_ns("roofline") / done.cases[0].measured_ns - 1)
    for x, y in zip(whole.x, whole.y, strict=True):
        shares = [np.mean(error[~np.isnan(error)] <= x + sign * 1e-9) for sign in (-1, 1)]
        assert shares[0] - 1e-9 <= y <= shares[1] + 1e-9
    assert float(whole.y[-1]) == 1.0


def test_strips_have_the_quantiles_of_each_class() -> None:
    done = comparison(cases(900))
    chart = _charts(done)["errors-by-class"]
    assert isinstance(chart, StripPlot)
    assert set(chart.labels) == {"contraction", "elementwise", "reduction"}
    assert [part.label for part in chart.series] == ["roofline", "overhead+two-efficiencies"]
    found = done.cases[0]
    error = found.predicted_ns("roofline") / found.measured_ns - 1
    for strip, label in enumerate(chart.labels):
        is_class = found.op_class == found.classes.index(label)
        drawn = np.asarray(chart.series[0].x)[np.asarray(chart.series[0].y) == strip]
        assert len(drawn) == 61
        assert np.median(drawn) == pytest.approx(np.nanmedian(error[is_class]))
        assert [drawn[0], drawn[-1]] == pytest.approx(
            [np.nanmin(error[is_class]), np.nanmax(error[is_class])]
        )


def test_a_waterfall_leads_from_measured_to_predicted() -> None:
    done = comparison(cases(300))
    fall = _charts(done)["waterfall"]
    assert isinstance(fall, Waterfall)
    predicted = done.cases[0].predicted_ns("roofline")
    assert fall.before == pytest.approx(float(done.cases[0].measured_ns.sum()))
    assert fall.after == pytest.approx(float(np.nansum(predicted)))
    assert len(fall.changes) == 21
    uncovered = float(done.cases[0].measured_ns[np.isnan(predicted)].sum())
    assert fall.changes["not estimated"] == pytest.approx(-uncovered)
    assert sum(change for _, change in fall.steps()) == pytest.approx(fall.after - fall.before)
    assert set(fall.texts) == set(fall.changes) - {"not estimated"}


def test_a_roofline_has_the_limits_of_the_device() -> None:
    done = _small()
    series = _plot(done, "roofline")
    device = named_device("H100-SXM")
    (memory,) = series[next(label for label in series if label.startswith(device.main_memory.name))]
    bandwidth = device.main_memory.bandwidth_bytes_per_s / 1e12
    assert np.asarray(memory.y) == pytest.approx(np.asarray(memory.x) * bandwidth)
    rates = sorted(y for _, y in _points(done, "roofline"))
    assert rates == pytest.approx([0.01] * 30)


def test_classes_beyond_the_colours_are_drawn_together() -> None:
    base = cases(400)
    done = comparison(replace(base, op_class=(np.arange(400) % 12 + 1).astype(np.int8)))
    series = _plot(done, "predicted")
    points = [part for parts in series.values() for part in parts if part.mark == "points"]
    assert len(points) == 8
    assert len({part.tone for part in points}) == 8
    assert sum(len(part.x) for part in points) == len(_points(done))
    assert "other classes" in series


def _columns(*values: float) -> FloatArray:
    return np.array(values, np.float64)


def test_measured_and_simulated_time_stand_side_by_side() -> None:
    strings = StringTable.from_strings(["", "<b>dot</b>", "add"])
    profile = Profile.of(
        "recorded",
        ("device",),
        strings,
        start_ns=_columns(100.0, 160.0, 900.0),
        duration_ns=_columns(50.0, 20.0, 30.0),
        op_id=np.array([1, 2, 1], np.int32),
        stream=np.array([7, 8, 7], np.int64),
        run=np.array([0, 0, 1], np.int32),
    )
    timeline = Timeline(
        resources=("compute", "communication"),
        node=np.array([0, 1], np.int32),
        rank=np.array([0, 0], np.int32),
        resource=np.array([0, 1], np.int8),
        start_ns=_columns(0.0, 10.0),
        end_ns=_columns(10.0, 30.0),
        critical=np.array([True, False]),
        finish_ns=_columns(30.0),
        exposed_comm_ns=_columns(20.0),
    )
    done = _small()
    groups = chart_groups(done, [], profiles=[profile], timeline=timeline)
    (chart,) = (chart for group in groups for chart in group.charts if isinstance(chart, TimelineChart))
    measured, compute, communication = chart.lanes
    assert (measured.label, measured.start_ns.tolist(), measured.texts) == (
        "measured: stream 7",
        [0.0],
        ["<b>dot</b>"],
    )
    assert (compute.label, compute.critical.tolist()) == ("simulated: compute", [True])
    assert (communication.styles, communication.critical.tolist()) == (["communication"], [False])
    assert "chart-timeline" in page_of(accuracy_html(done, NO_LIMITS, profiles=[profile])).ids()
    assert "chart-timeline" not in page_of(accuracy_html(done, NO_LIMITS)).ids()


def test_operations_link_to_their_longest_measured_span() -> None:
    done = _small()
    strings = StringTable.from_strings(["", "op3", "add"])
    profile = Profile.of(
        "recorded", ("device",), strings, start_ns=_columns(0.0, 10.0, 20.0),
        duration_ns=_columns(5.0, 8.0, 6.0), op_id=np.array([1, 2, 1], np.int32),
    )  # fmt: skip
    page = page_of(accuracy_html(done, NO_LIMITS, profiles=[profile]))
    links = {each["href"] for tag, each in page.elements if tag == "a" and "href" in each}
    assert "#chart-timeline/0/2" in links


def test_provenance_names_files_by_hash_and_devices_by_source(tmp_path: Path) -> None:
    file = tmp_path / "<trace>.json"
    file.write_bytes(b"abc")
    done = replace(_small(), inputs=(str(file), str(tmp_path / "absent")))
    page = page_of(accuracy_html(done, NO_LIMITS))
    assert "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" in page.text
    assert "white paper" in page.text
    assert "Device H100-SXM" in re.sub(r"\s+", " ", page.text)
    facts = provenance_of([str(tmp_path)]).files
    assert [(fact.path, fact.size_bytes) for fact in facts] == [(f"{tmp_path}/<trace>.json", 3)]


def test_an_empty_comparison_is_a_page() -> None:
    page = page_of(accuracy_html(comparison(cases(0)), NO_LIMITS))
    assert {"verdict", "provenance"} <= page.ids()
    assert "figures" not in page.ids()


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_has_no_faults_in_a_browser(width: int, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(accuracy_html(hostile_comparison(), NO_LIMITS).encode("utf-8", "replace"))
    script = """
    const rows = document.querySelectorAll("#operations-table tbody tr");
    const seen = { rows: rows.length > 20, images: document.images.length, charts: all("figure[id]").length };
    document.querySelectorAll("details").forEach(each => { each.open = true; });
    seen.faults = faults;
    document.title = JSON.stringify(seen);
    """
    seen = seen_by(FAULTS + script, path, tmp_path, width=width)
    charts = _charts(hostile_comparison())
    assert seen == {"rows": True, "images": 0, "charts": len(charts), "faults": []}
