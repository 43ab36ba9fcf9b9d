"""Markdown and CSV of a comparison, their folder, and the display of names."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from math import isnan, nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.estimators.interface import CasePrediction
from hespas.graph.errors import OutputError
from hespas.report.texts import UNKNOWN, NameTable, clip, shown
from hespas.validators.accuracy.cases import Cases
from hespas.validators.accuracy.report import accuracy_csv, accuracy_markdown, speed_up_csv
from hespas.validators.accuracy.report.folder import REPORT_FILES, ReportInputs, check_folder, write_report
from hespas.validators.accuracy.report.texts import (
    limits_of,
    percent,
    rate_text,
    summary_lines,
    time_text,
    verdict_of,
)
from tests.validators.accuracy.report_samples import (
    HOSTILE,
    NO_LIMITS,
    cases,
    comparison,
    hostile_comparison,
    limits,
)

BAR = re.compile(r"(?<!\\)\|")
CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")


def test_csv_has_a_row_per_case_and_estimator() -> None:
    done = comparison(cases(20), cases(5, source="other"))
    text = accuracy_csv(done)
    assert text.splitlines()[0] == (
        "source,hardware,label,shape,op_class,measured_ns,spread_ns,repeats,dtype,flops,useful_flops,bytes,"
        "tflops_per_s,share_of_roof,estimator,predicted_ns,low_ns,high_ns,relative_error,"
        "events,instructions,operations"
    )
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == (20 + 5) * 4
    first = rows[0]
    assert (first["source"], first["label"], first["op_class"]) == ("trace", "op0", "contraction")
    assert (first["estimator"], first["repeats"]) == ("roofline", "3")
    assert float(first["predicted_ns"]) == done.cases[0].predictions[0].duration_ns[0]
    assert float(first["relative_error"]) == pytest.approx(0.1)
    assert first["low_ns"] == ""
    unknown = [row for row in rows if row["predicted_ns"] == ""]
    assert {row["relative_error"] for row in unknown} == {""}
    assert len(unknown) == 2 * 4


def test_csv_says_what_rate_was_reached_and_which_share_of_the_roof() -> None:
    """By the FLOPs that are no zeros, against what the data sheet alone would take (p0)."""
    some = cases(3)
    roof = CasePrediction(
        estimator="datasheet-roofline",
        duration_ns=np.array([50.0, np.nan, 20.0]),
        low_ns=np.full(3, np.nan),
        high_ns=np.full(3, np.nan),
    )
    some = replace(
        some,
        predictions=(roof,),
        measured_ns=np.array([200.0, 100.0, 0.0]),
        flops=np.array([8e6, 5e6, 1e6]),
        useful_flops=np.array([4e6, np.nan, 1e6]),
        dtypes=("bf16", "f32", ""),
    )
    rows = list(csv.DictReader(io.StringIO(accuracy_csv(comparison(some)))))
    told = ("dtype", "flops", "useful_flops", "tflops_per_s", "share_of_roof")
    assert [
        tuple(row[name] for name in told) for row in rows if row["estimator"] == "datasheet-roofline"
    ] == [
        ("bf16", "8000000.0", "4000000.0", "20.0", "0.25"),
        ("f32", "5000000.0", "", "", ""),
        ("", "1000000.0", "1000000.0", "", ""),
    ]


def test_the_table_of_speed_ups_has_a_row_per_shape_that_devices_share() -> None:
    def measured(hardware: str, times_ns: list[float], predicted_ns: list[float]) -> Cases:
        unknown = np.full(3, np.nan)
        said = CasePrediction(
            estimator="roofline", duration_ns=np.array(predicted_ns), low_ns=unknown, high_ns=unknown
        )
        some = replace(cases(3), hardware=hardware, measured_ns=np.array(times_ns), predictions=(said,))
        return replace(some, shapes=("a", "b", hardware), shape=np.arange(3))

    one = measured("H100-SXM", [100.0, 50.0, 7.0], [100.0, 40.0, 7.0])
    two = measured("B200-SXM", [50.0, 25.0, 9.0], [40.0, 20.0, 9.0])
    text = speed_up_csv([one, two])
    assert text.splitlines()[0] == (
        "label,shape,op_class,hardware,other,measured_ns,other_measured_ns,speed_up,"
        "estimator,predicted_ns,other_predicted_ns,predicted_speed_up,relative_error"
    )
    rows = list(csv.DictReader(io.StringIO(text)))
    told = ("shape", "hardware", "other", "speed_up", "predicted_speed_up", "relative_error")
    assert [tuple(row[name] for name in told) for row in rows] == [
        ("a", "H100-SXM", "B200-SXM", "2.0", "2.5", "0.25"),
        ("b", "H100-SXM", "B200-SXM", "2.0", "2.0", "0.0"),
    ]
    assert not speed_up_csv([one])


def test_csv_keeps_hostile_names() -> None:
    done = hostile_comparison()
    rows = list(csv.DictReader(io.StringIO(accuracy_csv(done), newline="")))
    labels = {row["label"] for row in rows}
    assert {row["op_class"][:1] for row in rows} == {"<"}
    assert {name for name in HOSTILE if "\ud800" not in name} <= labels
    assert "unpaired \\ud800 surrogate" in labels


def test_markdown_tables_have_as_many_cells_as_titles() -> None:
    for done in (comparison(cases(40), cases(40, hardware="MI300X")), hostile_comparison()):
        text = accuracy_markdown(done, limits(mape=0.1))
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            assert len({len(BAR.findall(line)) for line in table.splitlines()}) == 1


def test_markdown_holds_no_markup_from_names() -> None:
    bare = CODE.sub("", accuracy_markdown(hostile_comparison(), NO_LIMITS))
    assert set(bare).isdisjoint("<>@[]`")


def test_markdown_says_what_was_found() -> None:
    done = comparison(cases(40))
    text = accuracy_markdown(done, limits(mape=0.001))
    assert "**Verdict: FAIL** (40 cases of 1 source)" in text
    assert "| MAPE over shapes | at most 0.1% |" in text
    assert "no limits set" in accuracy_markdown(done, NO_LIMITS)
    (headline,) = summary_lines(done)
    assert percent(headline.shape.mape) in text
    assert headline.best_baseline == "overhead+two-efficiencies"


def test_a_limit_nothing_can_be_held_against_is_not_passed() -> None:
    found = limits_of(comparison(cases(0)), limits(mape=0.1, e2e=0.1))
    assert verdict_of(found) != "pass"


def test_a_folder_of_reports_is_written_whole_and_not_over_another(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "report"
    done = hostile_comparison()
    inputs = ReportInputs.of(done, hardware=["H100-SXM"])
    write_report(done, NO_LIMITS, folder, inputs, overwrite=False)
    assert {path.name for path in folder.iterdir()} == {*REPORT_FILES, "speed-ups.csv"}
    (folder / "mine.txt").write_text("kept")
    with pytest.raises(OutputError):
        check_folder(folder, overwrite=False)
    before = {name: (folder / name).read_bytes() for name in REPORT_FILES}
    write_report(done, NO_LIMITS, folder, inputs, overwrite=True)
    assert {name: (folder / name).read_bytes() for name in REPORT_FILES} == before
    assert (folder / "mine.txt").read_text() == "kept"


def test_a_file_is_no_folder_for_reports(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        check_folder(tmp_path / "file", overwrite=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5 ns"),
        (999.0, "999 ns"),
        (1234.0, "1.234 us"),
        (-45_600.0, "-45.60 us"),
        (2.5e9, "2.500 s"),
        (nan, UNKNOWN),
    ],
)
def test_times(value: float, text: str) -> None:
    assert time_text(value) == text


def test_shares_and_rates() -> None:
    assert [percent(value) for value in (0.1234, 12.3, nan)] == ["12.3%", "1,230%", UNKNOWN]
    assert percent(-0.5, signed=True) == "-50.0%"
    assert (rate_text(989.4e12), rate_text(7.9e9), rate_text(nan)) == (
        "989.4 TFLOP/s",
        "7.9 GFLOP/s",
        UNKNOWN,
    )


@given(st.text(max_size=300), st.integers(2, 50))
def test_names_are_cut_and_every_letter_of_them_is_visible(text: str, limit: int) -> None:
    assert len(clip(text, limit)) <= limit
    assert all(letter.isprintable() or letter.isspace() for letter in shown(text, limit))
    assert not set(shown(text)) & {"\n", "\r", "\u2028", "\u202e", "\u2066", "\x00"}


def test_names_keep_within_their_bytes_and_are_stored_once() -> None:
    names = NameTable()
    rows = [names.row(f"{number}" + "<" * 300) for number in range(2000)]
    assert rows == list(range(2000))
    assert names.row("0" + "<" * 300) == 0
    texts = names.texts(most_bytes=1_000_000)
    assert len(texts) == 2000
    assert sum(len(text) + 5 * text.count("<") for text in texts) < 1_000_000


def test_the_noise_floor_stands_beside_the_errors() -> None:
    done = comparison(cases(40, repeated=2))
    (headline,) = summary_lines(done)
    assert headline.noise.n == 40
    assert not isnan(headline.noise.mape)
    assert np.isclose(headline.shape.shapes, headline.shape.n)
