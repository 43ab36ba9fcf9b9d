"""Tables of a comparison: its Markdown report, short enough for a comment on a change, and its CSV files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from math import isnan

import numpy as np

from hespas._version import __version__
from hespas.estimators.interface import CasePrediction
from hespas.fitting.statistics import ErrorSummary, relative_error
from hespas.graph.columns import FloatArray
from hespas.report.tables import Column, MarkdownText, markdown_code, table_from_rows
from hespas.report.texts import UNKNOWN, shown
from hespas.validators.accuracy.baselines import BASELINES
from hespas.validators.accuracy.cases import Cases
from hespas.validators.accuracy.report.texts import (
    count_text,
    limits_of,
    percent,
    summary_lines,
    time_text,
    verdict_of,
)
from hespas.validators.accuracy.result import Accuracy, Thresholds
from hespas.validators.accuracy.summaries import speed_up_rows

__all__ = [
    "CSV_COLUMNS",
    "FEW_SHAPES",
    "SPEED_UP_COLUMNS",
    "accuracy_csv",
    "accuracy_markdown",
    "speed_up_csv",
]

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
"""Header of the cases. ``tflops_per_s`` is measured, of useful FLOPs; ``share_of_roof`` is the time of the
data sheet alone (``datasheet-roofline``) relative to the measured time. ``instructions`` and ``operations``
are JSON lists of the parts of the case.
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
"""Header of the speed-ups; a speed-up is the time on ``hardware`` divided by the time on ``other``."""

FEW_SHAPES = 5
"""Least distinct shapes of a row that represents others of its kind."""

_MOST_ROWS = 20
_MOST_NAMES = 5
_LEGEND = (
    f"hespas {__version__}. MAPE: mean absolute error relative to the measurement; "
    "datasheet-roofline: published peaks; one-efficiency, overhead+two-efficiencies: two parameters fitted "
    "per device and per class, with each shape excluded from its own fit."
)
_VERDICTS = {
    "pass": "pass",
    "fail": "FAIL",
    "unknown": "unknown: a limit could not be checked",
    "none": "no limits set",
}


def _names(*titles: str, limit: int = 80) -> list[Column]:
    """Return columns of names from files, cut to ``limit`` letters."""
    return [Column(title, title, "code", write=partial(shown, limit=limit)) for title in titles]


def _texts(*titles: str) -> list[Column]:
    return [Column(title, title) for title in titles]


def _figures(*titles: str) -> list[Column]:
    """Return columns of figures as texts."""
    return [Column(title, title, "number", write=str) for title in titles]


def _counts(*titles: str) -> list[Column]:
    return [Column(title, title, "count") for title in titles]


def _shares(*titles: str, signed: bool = False) -> list[Column]:
    return [Column(title, title, "share", write=partial(percent, signed=signed)) for title in titles]


def _times(*titles: str) -> list[Column]:
    return [Column(title, title, "time", write=time_text) for title in titles]


def _ratio(title: str, layout: str) -> Column:
    return Column(title, title, "number", write=layout.format)


def accuracy_markdown(result: Accuracy, limits: Thresholds) -> str:
    """Return the report: verdict, end-to-end errors, errors by class and size, contributions, devices, lint.

    Names are in code spans, so that nothing in them becomes markup, a link or a mention.
    """
    checks = limits_of(result, limits)
    sources = f"{len(result.cases):,} {'source' if len(result.cases) == 1 else 'sources'}"
    sections = [
        "# Estimates against measurements",
        f"**Verdict: {_VERDICTS[verdict_of(checks)]}** ({sum(map(len, result.cases)):,} cases of {sources})",
    ]
    if result.inputs:
        more = _more_text(len(result.inputs) - _MOST_ROWS)
        sections.append(f"Inputs: {', '.join(map(markdown_code, result.inputs[:_MOST_ROWS]))}{more}")
    rows = [(check.name, check.required, check.worst, check.status) for check in checks]
    limit_columns = (*_texts("quantity"), *_figures("limit", "worst"), *_texts("status"))
    sections += [
        _section("Limits", limit_columns, rows),
        *_error_tables(result),
        *_device_tables(result),
        *_matching_tables(result),
        _LEGEND,
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _error_tables(result: Accuracy) -> Iterator[str]:
    """Yield the errors: summary lines, end to end, by class and size, and by contribution."""
    yield _section(
        "Summary, each shape once",
        (
            *_names("estimator", "device"),
            *_shares("MAPE"),
            *_figures("95 %", "best naive"),
            *_shares("noise floor", "estimated", "matched"),
            *_shares("end to end", signed=True),
        ),
        (
            (
                line.estimator,
                line.hardware,
                line.shape.mape,
                _interval(line.shape),
                f"{percent(line.baseline_mape)} ({line.best_baseline})" if line.best_baseline else None,
                line.noise.mape,
                line.instance.coverage,
                line.matched,
                None if line.run is None else line.run.relative_error,
            )
            for line in summary_lines(result)
        ),
    )
    yield _section(
        "End to end",
        (
            *_names("source", "device"),
            *_texts("basis"),
            *_names("estimator"),
            *_figures("predicted"),
            *_times("measured"),
            *_shares("error", signed=True),
            *_shares("estimated"),
        ),
        (
            (
                run.source,
                run.hardware,
                run.basis_text,
                run.estimator,
                ("at least " if run.is_lower_bound else "") + time_text(run.predicted_ns),
                run.measured_ns,
                run.relative_error,
                run.coverage,
            )
            for run in result.end_to_end[: 4 * _MOST_ROWS]
        ),
        len(result.end_to_end),
    )
    yield from _class_tables(result)
    yield _contribution_table(result)


def _contribution_table(result: Accuracy) -> str:
    """Return the shapes with the largest contributions to the error."""
    contributions = [row for row in result.contributions if row.estimator in result.estimators]
    contributions.sort(key=lambda row: -abs(row.share))
    return _section(
        "Largest contributions to the error",
        (
            *_names("source", limit=40),
            *_names("estimator"),
            *_names("operation", limit=40),
            *_names("shape"),
            *_texts("class"),
            *_figures("instructions : operations"),
            *_counts("n"),
            *_times("predicted", "measured"),
            *_shares("of the measured time", signed=True),
        ),
        (
            (
                row.source,
                row.estimator,
                row.label,
                row.shape,
                row.op_class,
                f"{row.instructions:,} : {row.operations:,}",
                row.count,
                row.predicted_ns,
                row.measured_ns,
                row.share,
            )
            for row in contributions[:_MOST_ROWS]
        ),
        len(contributions),
    )


def _class_tables(result: Accuracy) -> Iterator[str]:
    """Yield one table of errors by class and size per device and estimator, next to the naive baselines."""
    by_part = {
        (row.hardware, row.estimator, row.op_class, row.size): row
        for row in result.summary
        if row.level == "shape"
    }
    header = (
        *_texts("part"),
        *_counts("n"),
        *_shares("MAPE"),
        *_figures("95 %"),
        *_shares("median", "P90"),
        *_shares("bias", "sum error", signed=True),
        *_shares("coverage", *(f"MAPE {name}" for name in BASELINES)),
        *_texts("note"),
    )
    for hardware in dict.fromkeys(row.hardware for row in result.summary):
        for estimator in result.estimators:
            rows: list[Sequence[object]] = []
            for (row_hardware, row_estimator, op_class, size), row in by_part.items():
                if (row_hardware, row_estimator) != (hardware, estimator):
                    continue
                errors = row.errors
                naive = [by_part.get((hardware, name, op_class, size)) for name in BASELINES]
                note = "n too small" if errors.shapes < FEW_SHAPES else ""
                rows.append(
                    (
                        MarkdownText(size) if op_class == "all" else op_class,
                        errors.n,
                        errors.mape,
                        _interval(errors),
                        errors.median_ape,
                        errors.p90_ape,
                        errors.bias,
                        errors.sum_error,
                        errors.coverage,
                        *(None if other is None else other.errors.mape for other in naive),
                        note if errors.n else "not estimated",
                    )
                )
            title = f"Errors of {markdown_code(estimator)} on {markdown_code(hardware)}, each shape once"
            yield _section(title, header, rows)


def _device_tables(result: Accuracy) -> Iterator[str]:
    """Yield speed-ups between devices, and trends over the sources of a device."""
    yield _section(
        "Speed-ups between devices",
        (
            *_names("estimator"),
            *_texts("devices"),
            *_counts("n"),
            *_shares("faster device correct", "above 20 us", "median error", "of one ratio"),
            _ratio("tau", "{:+.2f}"),
        ),
        (
            (
                row.estimator,
                MarkdownText(f"{markdown_code(row.other)} over {markdown_code(row.hardware)}"),
                row.n,
                row.sign,
                row.sign_long,
                row.median_error,
                row.constant_error,
                row.rank,
            )
            for row in result.speed_ups
        ),
    )
    yield _section(
        "Trends over sources",
        (
            *_names("estimator", "device"),
            *_counts("n"),
            _ratio("tau", "{:+.2f}"),
            _ratio("slope", "{:.2f}"),
        ),
        ((row.estimator, row.hardware, row.n, row.rank, row.slope) for row in result.trends),
    )


def _matching_tables(result: Accuracy) -> Iterator[str]:
    """Yield matched shares, the operations of each instruction, and findings about the measurements."""
    rows: list[Sequence[object]] = []
    for source, coverage in result.coverage.items():
        events = [
            f"{markdown_code(row.name, 40)} {time_text(row.total_ns)}"
            for row in coverage.unmatched_events[:_MOST_NAMES]
        ]
        nodes = [
            f"{markdown_code(row.name, 40)} x {row.count:,}" for row in coverage.unmatched_nodes[:_MOST_NAMES]
        ]
        more_events = len(coverage.unmatched_events) + coverage.unlisted_events - _MOST_NAMES
        more_nodes = len(coverage.unmatched_nodes) + coverage.unlisted_nodes - _MOST_NAMES
        rows.append(
            (
                source,
                f"{coverage.matched_events:,} of {coverage.events:,}",
                coverage.time_share,
                f"{coverage.matched_nodes:,} of {coverage.nodes:,}",
                MarkdownText(", ".join(events) + _more_text(more_events)),
                MarkdownText(", ".join(nodes) + _more_text(more_nodes)),
            )
        )
    yield _section(
        "Matching",
        (
            *_names("source"),
            *_figures("events"),
            *_shares("device time"),
            *_figures("operations"),
            *_texts("only measured", "only in the program"),
        ),
        rows,
    )
    joins = [(source, join) for source, of_source in result.joins.items() for join in of_source]
    joins.sort(key=lambda row: -row[1].time_ns)
    yield _section(
        "Operations of each instruction",
        (
            *_names("source", "instruction", limit=40),
            *_texts("operations of the program", "rule"),
            *_counts("events"),
            *_times("time"),
        ),
        (
            (
                source,
                join.instruction,
                MarkdownText(
                    ", ".join(markdown_code(name, 40) for name in join.operations[:_MOST_NAMES])
                    + _more_text(len(join.operations) - _MOST_NAMES)
                ),
                join.rule,
                join.events,
                join.time_ns,
            )
            for source, join in joins[:_MOST_ROWS]
        ),
        len(joins),
    )
    yield _section(
        "Findings about the measurements",
        (
            *_texts("finding"),
            *_names("source"),
            Column("count", kind="count", write=count_text),
            *_shares("of the time"),
            *_names("message"),
        ),
        (
            (MarkdownText(finding.code), finding.source, finding.count, finding.share, finding.message)
            for finding in result.lint
        ),
    )


def _more_text(count: int) -> str:
    return f" and {count:,} more" if count > 0 else ""


def _interval(errors: ErrorSummary) -> str:
    if isnan(errors.ci_low) or isnan(errors.ci_high):
        return UNKNOWN
    return f"{percent(errors.ci_low)} to {percent(errors.ci_high)}"


def _section(title: str, header: Sequence[Column], rows: Iterable[Sequence[object]], of: int = 0) -> str:
    """Return a table with its title; an empty text without rows. ``of`` is the number of all rows."""
    table = table_from_rows(header, rows)
    if not len(table):
        return ""
    note = f"\n\n{len(table):,} of {of:,} rows." if of > len(table) else ""
    return f"## {title}\n\n{table.to_markdown()}{note}"


def accuracy_csv(result: Accuracy) -> str:
    """Return all cases of all sources, once per estimator and baseline; an unknown figure is an empty field.

    Figures are exact (the shortest text that reads back as the same number). Names are unchanged, except that
    texts that a spreadsheet would calculate get an apostrophe in front, and that unpaired surrogates, which a
    file cannot contain, are written as ``\\ud800``.
    """

    def rows() -> Iterator[tuple[object, ...]]:
        for cases in result.cases:
            unknown = np.full(len(cases), np.nan)
            nothing = CasePrediction(estimator="", duration_ns=unknown, low_ns=unknown, high_ns=unknown)
            for prediction in cases.predictions or (nothing,):
                yield from _case_rows(cases, prediction)

    return table_from_rows(list(map(Column, CSV_COLUMNS)), rows()).to_csv()


def _case_rows(cases: Cases, prediction: CasePrediction) -> Iterator[tuple[object, ...]]:
    """Yield one row per case with one prediction."""

    def ratio(numerator: FloatArray) -> list[float]:
        quotient = np.full(len(cases), np.nan)
        np.divide(numerator, cases.measured_ns, out=quotient, where=cases.measured_ns > 0)
        values: list[float] = quotient.tolist()
        return values

    shapes: list[int] = cases.shape.tolist()
    classes: list[int] = cases.op_class.tolist()
    useful = cases.flops if cases.useful_flops is None else cases.useful_flops
    roof = cases.prediction(BASELINES[0])
    members: list[tuple[object, str, str]] = [
        (
            row.events,
            json.dumps(row.instructions, ensure_ascii=False),
            json.dumps(row.operations, ensure_ascii=False),
        )
        for row in cases.members
    ]
    return zip(
        repeat(cases.source),
        repeat(cases.hardware),
        cases.labels,
        [cases.shapes[row] for row in shapes],
        [cases.classes[code] for code in classes],
        cases.measured_ns.tolist(),
        cases.spread_ns.tolist(),
        cases.repeats.tolist(),
        cases.dtypes or repeat(""),
        cases.flops.tolist(),
        useful.tolist(),
        cases.bytes_moved.tolist(),
        ratio(useful / 1e3),
        repeat("") if roof is None else ratio(roof.duration_ns),
        repeat(prediction.estimator),
        prediction.duration_ns.tolist(),
        prediction.low_ns.tolist(),
        prediction.high_ns.tolist(),
        relative_error(prediction.duration_ns, cases.measured_ns).tolist(),
        *(zip(*members, strict=True) if members else repeat(repeat(""), 3)),
        strict=False,  # the repeated columns have no end
    )


def speed_up_csv(cases: Sequence[Cases]) -> str:
    """Return each shape that two devices measured, once per estimator that covers both.

    The text is empty if the devices share no shape.
    """
    rows: list[Sequence[object]] = []
    for row in speed_up_rows(cases):
        source, case = row.cases, row.case
        measured = row.measured_ns[0] / row.measured_ns[1]
        predicted = row.predicted_ns[0] / row.predicted_ns[1]
        rows.append(
            (
                source.labels[case],
                source.shapes[int(source.shape[case])],
                source.classes[int(source.op_class[case])],
                row.hardware,
                row.other,
                *row.measured_ns,
                measured,
                row.estimator,
                *row.predicted_ns,
                predicted,
                predicted / measured - 1,
            )
        )
    return table_from_rows(list(map(Column, SPEED_UP_COLUMNS)), rows).to_csv() if rows else ""
