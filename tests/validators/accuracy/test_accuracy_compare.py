"""Comparison of two accuracy reports, and of documents that are not reports."""

from __future__ import annotations

import json
from math import nan
from pathlib import Path

import pytest

from hespas.graph.errors import FormatError, UsageError
from hespas.validators.accuracy import compare_reports, comparison_json


def _row(mape: float | None, op_class: str = "all", coverage: float | None = 1.0) -> dict[str, object]:
    return {
        "estimator": "roofline", "hardware": "H100-SXM", "level": "shape", "op_class": op_class,
        "size": "all", "mape": mape, "median_ape": None, "coverage": coverage, "more": [1, 2],
    }  # fmt: skip


def _run(error: float | None) -> dict[str, object]:
    return {
        "source": "s", "hardware": "H100-SXM", "estimator": "roofline", "basis": "span",
        "relative_error": error,
    }  # fmt: skip


def _report(
    path: Path, summary: list[dict[str, object]], runs: list[dict[str, object]] | None = None
) -> Path:
    document = {"schema": "hespas.accuracy/1", "summary": summary, "end_to_end": runs or []}
    path.write_text(json.dumps(document))
    return path


def test_what_grew_and_what_shrank(tmp_path: Path) -> None:
    base = _report(tmp_path / "a.json", [_row(0.2), _row(0.5, "sort"), _row(0.3, "move")], [_run(-0.1)])
    new = _report(tmp_path / "b.json", [_row(0.3), _row(0.4, "sort", 0.75), _row(0.1, "fft")], [_run(0.1)])
    done = compare_reports(base, new)
    grew = {(each.what, each.figure): round(each.difference, 9) for each in done.changes}
    assert grew == {
        ("roofline on H100-SXM, all, each shape", "MAPE"): 0.1,
        ("roofline on H100-SXM, all, each shape", "not covered"): 0.0,
        ("roofline on H100-SXM, sort, each shape", "MAPE"): -0.1,
        ("roofline on H100-SXM, sort, each shape", "not covered"): 0.25,
        ("roofline on H100-SXM, s, span", "end to end"): 0.0,
    }
    assert [each.what for each in done.regressions(0.05)] == [
        "roofline on H100-SXM, all, each shape",
        "roofline on H100-SXM, sort, each shape",
    ]
    assert done.regressions(0.3) == ()
    assert done.regressions(nan) == ()
    assert done.only_base == (
        "MAPE of roofline on H100-SXM, move, each shape",
        "not covered of roofline on H100-SXM, move, each shape",
    )
    assert len(done.only_new) == 2


def test_a_report_is_as_good_as_itself(tmp_path: Path) -> None:
    path = _report(tmp_path / "a.json", [_row(0.2), _row(None, coverage=None)], [_run(None)])
    done = compare_reports(path, path)
    assert [each.difference for each in done.changes] == [0.0, 0.0]
    assert (done.only_base, done.only_new, done.regressions(0.0)) == ((), (), ())
    document = json.loads(comparison_json(done, nan))
    assert (document["max_regression"], document["regressions"]) == (None, [])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"schema": "hespas.simulate/1", "summary": [], "end_to_end": []}',
        b'{"schema": "hespas.accuracy/1", "summary": [{}], "end_to_end": []}',
        b'{"schema": "hespas.accuracy/1", "summary": 7, "end_to_end": []}',
        b"[" * 100_000,
        b'{"schema": "hespas.accuracy/1", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"schema": "hespas.accuracy/1", "summary": [], "summary": [], "end_to_end": []}',
    ],
)
def test_a_document_that_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    good = _report(tmp_path / "a.json", [_row(0.2)])
    with pytest.raises(FormatError) as caught:
        compare_reports(good, tmp_path / "x.json")
    assert "x.json" in str(caught.value)


@pytest.mark.parametrize(
    ("figure", "value"), [("mape", -1e308), ("median_ape", -0.1), ("coverage", -0.1), ("coverage", 1.1)]
)
def test_a_figure_that_cannot_be(figure: str, value: float, tmp_path: Path) -> None:
    good = _report(tmp_path / "a.json", [_row(0.2)])
    bad = _report(tmp_path / "b.json", [_row(0.2) | {figure: value}])
    with pytest.raises(FormatError, match=figure):
        compare_reports(good, bad)


def test_a_report_may_say_a_thing_twice_but_not_two_things_of_one(tmp_path: Path) -> None:
    good = _report(tmp_path / "a.json", [_row(0.2)], [_run(0.1)])
    same = _report(tmp_path / "b.json", [_row(0.2), _row(0.2)], [_run(0.1), _run(0.1)])
    assert compare_reports(good, same).exceeded(0.0) == ()
    hidden = _report(tmp_path / "c.json", [_row(0.9), _row(0.0)])
    with pytest.raises(FormatError, match=r"MAPE of .* is 0\.9 in one row and 0 in another") as caught:
        compare_reports(good, hidden)
    assert caught.value.path == str(hidden)
    runs = _report(tmp_path / "d.json", [_row(0.2)], [_run(0.9), _run(0.0)])
    with pytest.raises(FormatError, match="end to end of"):
        compare_reports(good, runs)


def test_a_file_that_is_absent(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such file"):
        compare_reports(tmp_path / "a.json", tmp_path / "b.json")


def test_reports_of_other_things_have_nothing_to_compare(tmp_path: Path) -> None:
    one = _report(tmp_path / "a.json", [_row(0.2)])
    two = _report(tmp_path / "b.json", [_row(0.2, "sort")])
    with pytest.raises(UsageError, match="no figure in common"):
        compare_reports(one, two)


def _of(path: Path, mape: float, *sources: str) -> Path:
    named = [{"source": source, "hardware": "H100-SXM", "cases": 1} for source in sources]
    document = {"schema": "hespas.accuracy/1", "summary": [_row(mape)], "end_to_end": [], "sources": named}
    path.write_text(json.dumps(document))
    return path


def test_reports_of_different_sources_do_not_compare(tmp_path: Path) -> None:
    base, new = _of(tmp_path / "a.json", 0.2, "bert", "qwen"), _of(tmp_path / "b.json", 0.9, "qwen", "llama")
    done = compare_reports(base, new)
    told = (
        "the reports have different sources: only the first has bert on H100-SXM; "
        "only the second has llama on H100-SXM"
    )
    assert done.unlike() == told
    assert done.exceeded(0.1) == (f"the limit cannot be checked: {told}",)
    assert done.exceeded(nan) == ()
    assert json.loads(comparison_json(done, nan))["unlike"] == told
    same = compare_reports(base, _of(tmp_path / "c.json", 0.9, "qwen", "bert"))
    assert same.unlike() == ""
    assert len(same.exceeded(0.1)) == 1
