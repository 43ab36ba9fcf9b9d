"""The comparison as Markdown (GitHub's tables), short enough for a comment on a change."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from math import isnan

import numpy as np

from hespas._version import __version__
from hespas.files.documents import inert_cell
from hespas.graph.columns import FloatArray, IntArray
from hespas.validators.accuracy.baselines import BASELINES
from hespas.validators.accuracy.cases import Cases, Prediction
from hespas.validators.accuracy.report.texts import (
    UNKNOWN,
    count_text,
    headlines,
    limits_of,
    percent,
    shown,
    time_text,
    verdict_of,
)
from hespas.validators.accuracy.result import Accuracy, SummaryRow, Thresholds
from hespas.validators.accuracy.statistics import ErrorSummary, relative_error
from hespas.validators.accuracy.summaries import speed_up_rows

__all__ = [
    "CSV_COLUMNS",
    "FEW_SHAPES",
    "SPEED_UP_COLUMNS",
    "accuracy_csv",
    "accuracy_markdown",
    "speed_up_csv",
]

FEW_SHAPES = 5
"""Below so many distinct shapes, a row says little about others of its kind."""

_LISTED = 20
_LEGEND = (
    f"hespas {__version__}. MAPE: mean absolute error relative to the measurement; "
    "datasheet-roofline: published peaks; one-efficiency, overhead+two-efficiencies: two parameters fitted "
    "per device and per class, each shape unseen by its fit."
)
_TITLES = {
    "pass": "pass",
    "fail": "FAIL",
    "unknown": "not decided: nothing to hold against a limit",
    "none": "no limits set",
}


def accuracy_markdown(done: Accuracy, limits: Thresholds) -> str:
    """Verdict, end-to-end errors, errors by class and size, top contributions, devices, unmatched time and
    lint. Names stand in code spans: nothing in them is markup, a link or a mention.
    """
    found = limits_of(done, limits)
    limit_rows = [(limit.name, limit.asked, limit.worst, limit.status) for limit in found]
    sections = (
        _verdict(done, verdict_of(found)),
        _table("Limits", "limit | asked | worst | status", limit_rows),
        _headlines(done),
        _end_to_end(done),
        *_summaries(done),
        _contributions(done),
        _across(done),
        _matching(done),
        _lint(done),
        _LEGEND,
    )
    return "\n\n".join(section for section in sections if section) + "\n"


def _verdict(done: Accuracy, status: str) -> str:
    inputs = ", ".join(_code(name) for name in done.inputs[:_LISTED])
    more = f" and {len(done.inputs) - _LISTED} more" if len(done.inputs) > _LISTED else ""
    word = "source" if len(done.cases) == 1 else "sources"
    compared = f"{sum(map(len, done.cases)):,} cases of {len(done.cases):,} {word}"
    lines = ["# Estimates against measurements", f"**Verdict: {_TITLES[status]}** ({compared})"]
    return "\n\n".join([*lines, f"Inputs: {inputs}{more}"] if inputs else lines)


def _headlines(done: Accuracy) -> str:
    header = "estimator | device | MAPE | 95 % | best naive | noise floor | estimated | matched | end to end"
    rows = (
        (
            _code(each.estimator),
            _code(each.hardware),
            percent(each.shape.mape),
            _interval(each.shape),
            f"{percent(each.baseline_mape)} ({each.best_baseline})" if each.best_baseline else UNKNOWN,
            percent(each.noise.mape),
            percent(each.instance.coverage),
            percent(each.matched),
            UNKNOWN if each.run is None else percent(each.run.relative_error, signed=True),
        )
        for each in headlines(done)
    )
    return _table("In short, each shape once", header, rows)


def _end_to_end(done: Accuracy) -> str:
    rows = [
        (
            _code(run.source),
            _code(run.hardware),
            run.what,
            _code(run.estimator),
            ("at least " if run.is_lower_bound else "") + time_text(run.predicted_ns),
            time_text(run.measured_ns),
            percent(run.relative_error, signed=True),
            percent(run.coverage),
        )
        for run in done.end_to_end
    ]
    header = "source | device | basis | estimator | predicted | measured | error | estimated"
    return _table("End to end", header, rows[: 4 * _LISTED], len(rows))


def _summaries(done: Accuracy) -> Iterator[str]:
    """One table per device and asked estimator, over shapes, the naive models beside."""
    by_part = {
        (row.hardware, row.estimator, row.op_class, row.size): row
        for row in done.summary
        if row.level == "shape"
    }
    for hardware in dict.fromkeys(row.hardware for row in done.summary):
        for estimator in done.estimators:
            parts = [row for key, row in by_part.items() if key[:2] == (hardware, estimator)]
            naive = " | ".join(f"MAPE {name}" for name in BASELINES)
            figures = "part | n | MAPE | 95 % | median | P90 | bias | sum error | coverage"
            yield _table(
                f"Errors of {_code(estimator)} on {_code(hardware)}, each shape once",
                f"{figures} | {naive} | note",
                (_summary(row, by_part) for row in parts),
            )


def _summary(row: SummaryRow, by_part: dict[tuple[str, str, str, str], SummaryRow]) -> Sequence[str]:
    errors = row.errors
    keys = ((row.hardware, name, row.op_class, row.size) for name in BASELINES)
    naive = [percent(by_part[key].errors.mape) if key in by_part else UNKNOWN for key in keys]
    return (
        row.size if row.op_class == "all" else _word(row.op_class),
        f"{errors.n:,}",
        percent(errors.mape),
        _interval(errors),
        percent(errors.median_ape),
        percent(errors.p90_ape),
        percent(errors.bias, signed=True),
        percent(errors.sum_error, signed=True),
        percent(errors.coverage),
        *naive,
        "not estimated" if not errors.n else "n too small" if errors.shapes < FEW_SHAPES else "",
    )


def _contributions(done: Accuracy) -> str:
    rows = [row for row in done.contributions if row.estimator in done.estimators]
    rows.sort(key=lambda row: -abs(row.share))
    header = (
        "source | estimator | operation | shape | class | made of | n | predicted | measured | "
        "of the measured time"
    )
    told = (
        (
            _code(row.source, 40),
            _code(row.estimator),
            _code(row.label, 40),
            _code(row.shape, 80),
            _word(row.op_class),
            f"{row.instructions:,} : {row.operations:,}",
            f"{row.count:,}",
            time_text(row.predicted_ns),
            time_text(row.measured_ns),
            percent(row.share, signed=True),
        )
        for row in rows[:_LISTED]
    )
    return _table("What the error is made of", header, told, len(rows))


def _across(done: Accuracy) -> str:
    speed_ups = (
        (
            _code(row.estimator),
            f"{_code(row.other)} over {_code(row.hardware)}",
            f"{row.n:,}",
            percent(row.sign),
            percent(row.sign_long),
            percent(row.median_error),
            percent(row.constant_error),
            f"{row.rank:+.2f}",
        )
        for row in done.speed_ups
    )
    header = "estimator | devices | n | faster one right | above 20 us | median error | of one ratio | tau"
    trends = (
        (_code(row.estimator), _code(row.hardware), f"{row.n:,}", f"{row.rank:+.2f}", f"{row.slope:.2f}")
        for row in done.trends
    )
    tables = (
        _table("Across devices", header, speed_ups),
        _table("Over sources", "estimator | device | n | tau | slope", trends),
    )
    return "\n\n".join(table for table in tables if table)


def _matching(done: Accuracy) -> str:
    rows = (
        (
            _code(source),
            f"{found.matched_events:,} of {found.events:,}",
            percent(found.time_share),
            f"{found.matched_nodes:,} of {found.nodes:,}",
            ", ".join(
                f"{_code(each.name, 40)} {time_text(each.total_ns)}" for each in found.unmatched_events[:5]
            )
            + _more(len(found.unmatched_events) + found.unlisted_events - 5),
            ", ".join(f"{_code(each.name, 40)} x {each.count:,}" for each in found.unmatched_nodes[:5])
            + _more(len(found.unmatched_nodes) + found.unlisted_nodes - 5),
        )
        for source, found in done.coverage.items()
    )
    header = "source | events | device time | operations | only measured | only in the program"
    joins = [(source, join) for source, found in done.joins.items() for join in found]
    joins.sort(key=lambda row: -row[1].time_ns)
    told = (
        (
            _code(source, 40),
            _code(join.instruction, 40),
            ", ".join(_code(name, 40) for name in join.operations[:5]) + _more(len(join.operations) - 5),
            join.rule,
            f"{join.events:,}",
            time_text(join.time_ns),
        )
        for source, join in joins[:_LISTED]
    )
    titles = "source | instruction | operations of the program | rule | events | time"
    tables = (
        _table("Matched", header, rows),
        _table("What each instruction carries out", titles, told, len(joins)),
    )
    return "\n\n".join(table for table in tables if table)


def _more(count: int) -> str:
    return f" and {count:,} more" if count > 0 else ""


def _lint(done: Accuracy) -> str:
    rows = (
        (
            finding.code,
            _code(finding.source),
            count_text(finding.count),
            percent(finding.share),
            _code(finding.message),
        )
        for finding in done.lint
    )
    return _table("About the measurements", "finding | source | count | of the time | what", rows)


def _interval(errors: ErrorSummary) -> str:
    if isnan(errors.ci_low) or isnan(errors.ci_high):
        return UNKNOWN
    return f"{percent(errors.ci_low)} to {percent(errors.ci_high)}"


def _word(name: str) -> str:
    """A name that is mostly one of ours, and stands as it is where nothing in it could be markup."""
    return name if re.fullmatch(r"[A-Za-z0-9 _-]*", name) else _code(name)


def _code(name: str, limit: int = 80) -> str:
    """A code span that holds any text: fenced by more backticks than it has, bars escaped for the table."""
    text = shown(name, limit) or "(unnamed)"
    text = re.sub(r"\\+\|", lambda found: found[0][:-1] + " |", text).replace("|", "\\|")
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    if not longest:
        return f"`{text}`"
    fence = "`" * (longest + 1)
    return f"{fence} {text} {fence}"


def _table(title: str, header: str, rows: Iterable[Sequence[str]], of: int = 0) -> str:
    """A titled table; nothing where it would have no row."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if not lines:
        return ""
    told = f"\n\n{len(lines):,} of {of:,} rows." if of > len(lines) else ""
    head = [f"| {header} |", "|" + " --- |" * (header.count(" | ") + 1)]
    return f"## {title}\n\n" + "\n".join([*head, *lines]) + told


CSV_COLUMNS = (
    "source",
    "hardware",
    "label",
    "shape",
    "op_class",
    "measured_ns",
    "spread_ns",
    "repeats",
    "dtype",
    "flops",
    "useful_flops",
    "bytes",
    "tflops_per_s",
    "share_of_roof",
    "estimator",
    "predicted_ns",
    "low_ns",
    "high_ns",
    "relative_error",
    "events",
    "instructions",
    "operations",
)
"""The header. ``tflops_per_s`` is what was measured, of useful FLOPs; ``share_of_roof`` is what the data
sheet alone would take (``datasheet-roofline``) of the time measured. ``instructions`` and ``operations`` are
JSON lists of what the case is made of.
"""

SPEED_UP_COLUMNS = (
    "label",
    "shape",
    "op_class",
    "hardware",
    "other",
    "measured_ns",
    "other_measured_ns",
    "speed_up",
    "estimator",
    "predicted_ns",
    "other_predicted_ns",
    "predicted_speed_up",
    "relative_error",
)
"""The header of the table across devices; a speed-up is the time on ``hardware`` by that on ``other``."""


def accuracy_csv(done: Accuracy) -> str:
    """Every case of every source, once per estimator and baseline; an unknown figure is an empty field.

    Figures are exact (the shortest text that reads back as the same number). Names stand as they are, except
    that an apostrophe stands before what a spreadsheet would calculate, and that unpaired surrogates, which
    no file can hold, are written ``\\ud800``.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for cases in done.cases:
        for prediction in cases.predictions or (_nobody(cases),):
            writer.writerows([inert_cell(cell) for cell in row] for row in _rows(cases, prediction))
    return out.getvalue().encode("utf-8", "backslashreplace").decode("utf-8")


def _nobody(cases: Cases) -> Prediction:
    unknown = np.full(len(cases), np.nan)
    return Prediction(estimator="", duration_ns=unknown, low_ns=unknown, high_ns=unknown)


def _rows(cases: Cases, prediction: Prediction) -> Iterator[tuple[object, ...]]:
    shapes: list[int] = cases.shape.tolist()
    members = [(each.events, _listed(each.instructions), _listed(each.operations)) for each in cases.members]
    blank: list[tuple[object, object, object]] = [("", "", "")] * len(cases)
    told = tuple(zip(*(members or blank), strict=True)) or ((), (), ())
    classes: list[int] = cases.op_class.tolist()
    useful = cases.flops if cases.useful_flops is None else cases.useful_flops
    return zip(
        repeat(cases.source),
        repeat(cases.hardware),
        cases.labels,
        [cases.shapes[row] for row in shapes],
        [cases.classes[code] for code in classes],
        _figures(cases.measured_ns),
        _figures(cases.spread_ns),
        cases.repeats.tolist(),
        cases.dtypes or repeat(""),
        _figures(cases.flops),
        _figures(useful),
        _figures(cases.bytes_moved),
        _figures(_ratio(useful / 1e3, cases.measured_ns)),
        _figures(_ratio(_roof_ns(cases), cases.measured_ns)),
        repeat(prediction.estimator),
        _figures(prediction.duration_ns),
        _figures(prediction.low_ns),
        _figures(prediction.high_ns),
        _figures(relative_error(prediction.duration_ns, cases.measured_ns)),
        *told,
        strict=False,  # the repeated columns have no end
    )


def _roof_ns(cases: Cases) -> FloatArray:
    """What the data sheet alone would take; NaN where nothing says."""
    roof = cases.prediction(BASELINES[0])
    return np.full(len(cases), np.nan) if roof is None else roof.duration_ns


def _ratio(one: FloatArray, other: FloatArray) -> FloatArray:
    """NaN where either is unknown or nothing was measured."""
    found = np.full(len(one), np.nan)
    np.divide(one, other, out=found, where=other > 0)
    return found


def speed_up_csv(cases: Sequence[Cases]) -> str:
    """The table across devices: each shape that two of them measured, once per estimator that covers both;
    empty where they share none.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for number, row in enumerate(speed_up_rows(cases)):
        if not number:
            writer.writerow(SPEED_UP_COLUMNS)
        at, place = row.cases, row.case
        measured, predicted = (
            row.measured_ns[0] / row.measured_ns[1],
            row.predicted_ns[0] / row.predicted_ns[1],
        )
        what = at.labels[place], at.shapes[int(at.shape[place])], at.classes[int(at.op_class[place])]
        cells = (
            *(*what, row.hardware, row.other, *row.measured_ns, measured),
            *(row.estimator, *row.predicted_ns, predicted, predicted / measured - 1),
        )
        writer.writerow([inert_cell(cell) for cell in cells])
    return out.getvalue().encode("utf-8", "backslashreplace").decode("utf-8")


def _listed(names: tuple[str, ...]) -> str:
    return json.dumps(names, ensure_ascii=False)


def _figures(column: FloatArray | IntArray) -> list[float | str]:
    return ["" if value != value else value for value in column.tolist()]  # noqa: PLR0124 (NaN)
