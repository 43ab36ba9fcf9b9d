"""The page: whole, offline, and nothing in it is markup that came from a file."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from math import nan
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hespas.files.documents import json_for_script
from hespas.graph import Profile, Timeline
from hespas.graph.columns import FloatArray, StringTable
from hespas.graph.errors import MissingExtraError
from hespas.validators.accuracy import report
from hespas.validators.accuracy.report import accuracy_html, provenance_of
from hespas.validators.accuracy.report.figures import MOST_POINTS
from hespas.validators.accuracy.result import Accuracy, Thresholds
from tests.limits import SAFETY_S
from tests.validators.accuracy.report_samples import (
    HOSTILE,
    NO_LIMITS,
    Page,
    cases,
    comparison,
    hostile_comparison,
    limits,
    page_of,
)

pytest.importorskip("plotly", reason="the extra [report] is not installed")

MOST_BYTES = 8_000_000
BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


class _Points(msgspec.Struct):
    of: int
    measured_ns: list[float | None]
    predicted_ns: list[list[float | None]]
    label: list[int]


class _Lanes(msgspec.Struct):
    title: str
    names: list[str]
    lane: list[int]
    start_ns: list[float]
    tone: list[int]


class _Part(msgspec.Struct):
    predicted_ns: float
    measured_ns: float


class _Waterfall(msgspec.Struct):
    estimator: int
    measured_ns: float
    uncovered_ns: float
    rest_ns: float
    predicted_ns: float
    parts: list[_Part]


class _Curve(msgspec.Struct):
    n: int
    quantiles: list[float]


class _Data(msgspec.Struct):
    texts: list[str]
    points: _Points
    timelines: list[_Lanes]
    simulated: _Lanes | None
    waterfalls: list[_Waterfall]
    curves: list[_Curve]


def _data(page: Page) -> _Data:
    return msgspec.json.decode(page.scripts[0], type=_Data)


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
    assert len(page.scripts) == len(honest.scripts) == 4
    assert HOSTILE[0] in page.text
    assert HOSTILE[1] in page.text
    assert "{{ 7 * 7 }}" in page.text
    assert "\\u202egnp.exe" in page.text
    assert not any(letter in page.text for letter in "\N{RIGHT-TO-LEFT OVERRIDE}\x00\x1b\x07")


def test_hostile_names_survive_in_the_data_of_the_page() -> None:
    page = page_of(accuracy_html(hostile_comparison(), NO_LIMITS))
    assert set(page.scripts[0]).isdisjoint("<>&\N{LINE SEPARATOR}\N{PARAGRAPH SEPARATOR}")
    names = _data(page).texts
    assert {HOSTILE[0], HOSTILE[1], HOSTILE[3]} <= set(names)
    assert "a\\u2028b\\u2029c" in names
    assert max(map(len, names)) <= 1000


def test_the_figures_take_no_name_for_markup() -> None:
    """Plotly makes links and tags of what stands in a legend, at an axis or over a mark."""
    script = (Path(report.__file__).parent / "templates" / "plots.js").read_text()
    names = re.findall(r'(?:scatter|bar)", [^\n]*?\bname: ([^,]*),', script)
    assert "safe(data.classes[code])" in names
    assert {name for name in names if not name.startswith("safe(")} == {"tone"}, names
    lines = re.findall(r"\bline\(\[[^\]]*\], \[[^\]]*\], (.*?), (?:dashes|\")", script)
    assert len(lines) >= 2
    assert [each for each in lines if not each.startswith("safe(")] == []


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
    page = page_of(accuracy_html(comparison(replace(base, predictions=silent)), NO_LIMITS))
    assert "not estimated" in page.text
    assert _data(page).points.predicted_ns[0] == [None] * 12
    assert _data(page).curves == []


def test_many_cases_are_thinned_and_the_page_says_so() -> None:
    count = 30_000
    done = comparison(cases(count, names=tuple(f"{each:04}" + "<&" * 1000 for each in range(2000))))
    html = accuracy_html(done, NO_LIMITS)
    assert len(html.encode()) < MOST_BYTES
    page = page_of(html)
    points = _data(page).points
    assert points.of == count
    assert 0.9 * MOST_POINTS <= len(points.measured_ns) <= MOST_POINTS
    assert f"{len(points.measured_ns):,} of {count:,} cases are drawn" in page.text
    assert accuracy_html(done, NO_LIMITS) == html
    largest = max(value for value in points.measured_ns if value is not None)
    assert largest == pytest.approx(float(done.cases[0].measured_ns.max()), rel=1e-4)


def test_few_cases_are_all_there() -> None:
    page = page_of(accuracy_html(_small(), NO_LIMITS))
    assert len(_data(page).points.measured_ns) == 30
    assert "cases are drawn" not in page.text


def test_a_waterfall_leads_from_measured_to_predicted() -> None:
    done = comparison(cases(300))
    found = _data(page_of(accuracy_html(done, NO_LIMITS))).waterfalls
    assert [each.estimator for each in found] == [0, 1, 2, 3]
    for each in found:
        parts = sum(part.predicted_ns - part.measured_ns for part in each.parts)
        assert len(each.parts) == 20
        assert each.uncovered_ns > 0
        assert each.measured_ns - each.uncovered_ns + parts + each.rest_ns == pytest.approx(each.predicted_ns)


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
    page = page_of(accuracy_html(_small(), NO_LIMITS, profiles=[profile], timeline=timeline))
    (measured,) = _data(page).timelines
    assert (measured.names, measured.title) == (["stream 7"], "recorded")
    assert measured.start_ns == [0.0]
    simulated = _data(page).simulated
    assert simulated is not None
    assert (simulated.names, simulated.tone) == (["compute", "communication"], [2, 1])
    assert "plot-time" in page.ids()
    assert "plot-time" not in page_of(accuracy_html(_small(), NO_LIMITS)).ids()


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
    assert _data(page).points.measured_ns == []


def test_without_plotly_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingExtraError) as caught:
        accuracy_html(_small(), NO_LIMITS)
    assert "hespas[report]" in str(caught.value)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium to open the page in")
def test_a_browser_draws_every_figure_without_an_error(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(accuracy_html(hostile_comparison(), NO_LIMITS).encode("utf-8", "replace"))
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom")
    profile = f"--user-data-dir={tmp_path / 'browser'}"
    done = subprocess.run(
        [str(BROWSER), *options, profile, "--virtual-time-budget=10000", path.as_uri()],
        capture_output=True,
        timeout=SAFETY_S,
        check=True,
    )
    assert b"CONSOLE" not in done.stderr
    dom = done.stdout.decode("utf-8", "replace")
    drawn = re.findall(r'id="(plot-\w+)"[^>]*aria-label="([^"]+)"', dom)
    assert {name for name, _ in drawn} == {"plot-scatter", "plot-cdf", "plot-roof", "plot-fall"}
    assert dom.count('class="main-svg"') >= 4
    rows = dom.partition('id="operations-table"')[2].partition("</table>")[0]
    assert rows.count("<tr>") > 20
    assert "&lt;img src=x onerror=alert(2)&gt;" in rows
    assert "<img" not in rows
