"""Tables of a comparison: its Markdown report, short enough for a comment on a change, and its CSV files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, repeat
from math import isnan

import numpy as np

from hespas._version import __version__
from hespas.estimators.interface import CasePrediction
from hespas.fitting.statistics import ErrorSummary, relative_error
from hespas.graph.columns import FloatArray
from hespas.report.tables import Column, Name, Phrase, Table, columns, markdown_code, table_from_rows
from hespas.report.texts import UNKNOWN, shown
from hespas.validators.accuracy.baselines import BASELINES
from hespas.validators.accuracy.cases import Cases
from hespas.validators.accuracy.report.texts import (
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
    "ReportTable",
    "accuracy_csv",
    "accuracy_markdown",
    "class_tables",
    "end_to_end_table",
    "interval_text",
    "join_table",
    "limit_table",
    "lint_table",
    "matching_table",
    "speed_up_csv",
    "speed_up_table",
    "trend_table",
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
"""Least number of distinct shapes whose errors represent other shapes too; rows with fewer are marked."""

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


_SIGNED = partial(percent, signed=True)


def _bounded_text(time_ns: float) -> str:
    return ("at least " if isinstance(time_ns, _LowerBound) else "") + time_text(time_ns)


class _LowerBound(float):
    """Predicted time that is a lower bound, because some operations have no estimate. It is formatted with
    "at least".
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """Table of an accuracy report, for Markdown and the page. ``of`` is the number of all rows; the table may
    show fewer.
    """

    name: str
    title: str
    table: Table
    of: int = 0
    note: str = ""

    def to_markdown(self) -> str:
        """Return the table under its title; an empty text without rows."""
        if not len(self.table):
            return ""
        note = f"\n\n{len(self.table):,} of {self.of:,} rows." if self.of > len(self.table) else ""
        return f"## {self.title}\n\n{self.table.to_markdown()}{note}"


def accuracy_markdown(result: Accuracy, limits: Thresholds) -> str:
    """Return the report: verdict, end-to-end errors, errors by class and size, contributions, devices, lint.

    Names are in code spans, so that nothing in them becomes markup, a link or a mention.
    """
    verdict = verdict_of(limits_of(result, limits))
    sources = f"{len(result.cases):,} {'source' if len(result.cases) == 1 else 'sources'}"
    sections = [
        "# Estimates against measurements",
        f"**Verdict: {_VERDICTS[verdict]}** ({sum(map(len, result.cases)):,} cases of {sources})",
    ]
    if result.inputs:
        more = _more_text(len(result.inputs) - _MOST_ROWS)
        sections.append(f"Inputs: {', '.join(map(markdown_code, result.inputs[:_MOST_ROWS]))}{more}")
    tables = (
        limit_table(result, limits),
        _summary_table(result),
        end_to_end_table(result, 4 * _MOST_ROWS),
        *(
            replace(
                table,
                title=f"Errors of {markdown_code(estimator)} on {markdown_code(hardware)}, each shape once",
            )
            for hardware, estimator, level, table in class_tables(result)
            if level == "shape"
        ),
        _contribution_table(result),
        speed_up_table(result),
        trend_table(result),
        matching_table(result),
        join_table(result, _MOST_ROWS),
        lint_table(result),
    )
    sections += [*(table.to_markdown() for table in tables), _LEGEND]
    return "\n\n".join(section for section in sections if section) + "\n"


def limit_table(result: Accuracy, limits: Thresholds) -> ReportTable:
    """Return the table of the limits that the user set, with the worst value of each."""
    header = (
        *columns("text", "quantity"),
        *columns("number", "limit", "worst", write=str),
        *columns("text", "status"),
    )
    rows = [(check.name, check.required, check.worst, check.status) for check in limits_of(result, limits)]
    return ReportTable(name="limits", title="Limits", table=table_from_rows(header, rows))


def _summary_table(result: Accuracy) -> ReportTable:
    header = (
        *columns("code", "estimator", "device"),
        *columns("number", "MAPE", write=percent),
        *columns("number", "95 %", "best naive", write=str),
        *columns("number", "noise floor", "estimated", "matched", write=percent),
        *columns("number", "end to end", write=_SIGNED),
    )
    rows = (
        (
            line.estimator,
            line.hardware,
            line.shape.mape,
            interval_text(line.shape),
            f"{percent(line.baseline_mape)} ({line.best_baseline})" if line.best_baseline else None,
            line.noise.mape,
            line.instance.coverage,
            line.matched,
            None if line.run is None else line.run.relative_error,
        )
        for line in summary_lines(result)
    )
    return ReportTable(name="summary", title="Summary, each shape once", table=table_from_rows(header, rows))


def end_to_end_table(result: Accuracy, most: int) -> ReportTable:
    """Return the table of predicted and measured times of whole sources (steps or sums)."""
    header = (
        *columns("code", "source", "device"),
        *columns("text", "basis"),
        *columns("code", "estimator"),
        *columns("time", "predicted", "measured", write=_bounded_text),
        *columns("number", "error", write=_SIGNED),
        *columns("number", "estimated", write=percent),
    )
    rows = (
        (
            run.source,
            run.hardware,
            run.basis_text,
            run.estimator,
            _LowerBound(run.predicted_ns) if run.is_lower_bound else run.predicted_ns,
            run.measured_ns,
            run.relative_error,
            run.coverage,
        )
        for run in result.end_to_end[:most]
    )
    return ReportTable(
        name="end-to-end",
        title="End to end",
        table=table_from_rows(header, rows),
        of=len(result.end_to_end),
        note="span: simulated step and time from first start to last end; busy: simulated step and time "
        "during which the device works; sum of operations: sum of the predictions and sum of the mean "
        "measured times of the same operations; estimated: share of the device time that the estimates "
        "cover. At least: a part has no estimate.",
    )


def class_tables(result: Accuracy) -> Iterator[tuple[str, str, str, ReportTable]]:
    """Yield tables of errors by class and size, together with the errors of the naive baselines. Each table
    has its device, its estimator and its level (``shape``: each shape once, or ``instance``: every case).
    """
    by_part = {
        (row.hardware, row.estimator, row.level, row.op_class, row.size): row for row in result.summary
    }
    header = (
        *columns("text", "part"),
        *columns("count", "n"),
        *columns("count", "of", detail=1),
        *columns("number", "MAPE", write=percent),
        *columns("number", "95 %", write=str),
        *columns("number", "median", "P90", write=percent),
        *columns("number", "bias", "sum error", write=_SIGNED),
        *columns("number", "coverage", *(f"MAPE {name}" for name in BASELINES), write=percent),
        *columns("text", "note"),
    )
    for number, (hardware, estimator, level) in enumerate(
        (hardware, estimator, level)
        for hardware in dict.fromkeys(row.hardware for row in result.summary)
        for estimator in result.estimators
        for level in ("shape", "instance")
    ):
        rows: list[Sequence[object]] = []
        for (*of_row, op_class, size), row in by_part.items():
            if of_row != [hardware, estimator, level]:
                continue
            errors = row.errors
            naive = [by_part.get((hardware, name, level, op_class, size)) for name in BASELINES]
            note = "n too small" if errors.shapes < FEW_SHAPES else ""
            rows.append(
                (
                    Phrase((size,)) if op_class == "all" else op_class,
                    errors.n,
                    errors.of,
                    errors.mape,
                    interval_text(errors),
                    errors.median_ape,
                    errors.p90_ape,
                    errors.bias,
                    errors.sum_error,
                    errors.coverage,
                    *(None if other is None else other.errors.mape for other in naive),
                    note if errors.n else "not estimated",
                )
            )
        title = f"{estimator} on {hardware}, {'each shape once' if level == 'shape' else 'every instance'}"
        table = ReportTable(name=f"errors-{number}", title=title, table=table_from_rows(header, rows))
        yield hardware, estimator, level, table


def _contribution_table(result: Accuracy) -> ReportTable:
    contributions = [row for row in result.contributions if row.estimator in result.estimators]
    contributions.sort(key=lambda row: -abs(row.share))
    header = (
        *columns("code", "source", limit=40),
        *columns("code", "estimator"),
        *columns("code", "operation", limit=40),
        *columns("code", "shape"),
        *columns("text", "class"),
        *columns("number", "instructions : operations", write=str),
        *columns("count", "n"),
        *columns("time", "predicted", "measured", write=_bounded_text),
        *columns("number", "of the measured time", write=_SIGNED),
    )
    rows = (
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
    )
    return ReportTable(
        name="contributions",
        title="Largest contributions to the error",
        table=table_from_rows(header, rows),
        of=len(contributions),
    )


def speed_up_table(result: Accuracy) -> ReportTable:
    """Return the table of errors of predicted speed-ups between devices."""
    header = (
        *columns("code", "estimator"),
        *columns("text", "devices"),
        *columns("count", "n"),
        *columns("number", "faster device correct", write=percent),
        *columns("number", "by one ratio", write=percent, detail=1),
        *columns("number", "above 20 us", write=percent),
        *columns("count", "of them", detail=1),
        *columns("number", "median error", "of one ratio", write=percent),
        *columns("number", "tau", write="{:+.2f}".format),
    )
    rows = (
        (
            row.estimator,
            Phrase((Name(row.other), " over ", Name(row.hardware))),
            row.n,
            row.sign,
            row.constant_sign,
            row.sign_long,
            row.n_long,
            row.median_error,
            row.constant_error,
            row.rank,
        )
        for row in result.speed_ups
    )
    return ReportTable(
        name="speed-ups",
        title="Speed-ups between devices",
        table=table_from_rows(header, rows),
        note="Shapes measured on both devices: share with the faster device predicted correctly, and error "
        "of the predicted ratio. One ratio: the same figures for a single factor for all shapes.",
    )


def trend_table(result: Accuracy) -> ReportTable:
    """Return the table of trends: how well estimates order the sources of each device."""
    header = (
        *columns("code", "estimator", "device"),
        *columns("count", "n"),
        *columns("number", "tau", write="{:+.2f}".format),
        *columns("number", "slope", write="{:.2f}".format),
    )
    rows = ((row.estimator, row.hardware, row.n, row.rank, row.slope) for row in result.trends)
    return ReportTable(
        name="trends",
        title="Trends over sources",
        table=table_from_rows(header, rows),
        note="Over the sources of one device: rank correlation of the totals, and the slope of ln(predicted) "
        "over ln(measured); with slope 1 the estimator scales like the device.",
    )


def matching_table(result: Accuracy) -> ReportTable:
    """Return the table of matched shares of each source, and the first names without a match."""
    rows: list[Sequence[object]] = []
    for source, coverage in result.coverage.items():
        more_events = len(coverage.unmatched_events) + coverage.unlisted_events - _MOST_NAMES
        more_nodes = len(coverage.unmatched_nodes) + coverage.unlisted_nodes - _MOST_NAMES
        events = ((row.name, f" {time_text(row.total_ns)}") for row in coverage.unmatched_events)
        nodes = ((row.name, f" x {row.count:,}") for row in coverage.unmatched_nodes)
        rows.append(
            (
                source,
                f"{coverage.matched_events:,} of {coverage.events:,}",
                coverage.time_share,
                f"{coverage.matched_nodes:,} of {coverage.nodes:,}",
                _listed(events, _more_text(more_events)),
                _listed(nodes, _more_text(more_nodes)),
            )
        )
    header = (
        *columns("code", "source"),
        *columns("number", "events", write=str),
        *columns("number", "device time", write=percent),
        *columns("number", "operations", write=str),
        *columns("text", "only measured", "only in the program"),
    )
    return ReportTable(name="matched", title="Matching", table=table_from_rows(header, rows))


def join_table(result: Accuracy, most: int, most_names: int = _MOST_NAMES) -> ReportTable:
    """Return the table of the program operations that each instruction carries out, most time first. It has
    at most ``most`` instructions with at most ``most_names`` operations each.
    """
    joins = [(source, join) for source, of_source in result.joins.items() for join in of_source]
    joins.sort(key=lambda row: -row[1].time_ns)
    header = (
        *columns("code", "source", "instruction", limit=40),
        *columns("text", "operations of the program", "rule"),
        Column("served", kind="flag", detail=1),
        *columns("count", "events"),
        *columns("time", "time", write=_bounded_text),
    )
    rows = (
        (
            source,
            join.instruction,
            _listed(
                ((name, "") for name in join.operations),
                _more_text(len(join.operations) - most_names),
                most_names,
            ),
            join.rule,
            join.inferred,
            join.events,
            join.time_ns,
        )
        for source, join in joins[:most]
    )
    return ReportTable(
        name="joins",
        title="Operations of each instruction",
        table=table_from_rows(header, rows),
        of=len(joins),
        note="Served: the compiler created the instruction; the operations are those that it serves.",
    )


def lint_table(result: Accuracy) -> ReportTable:
    """Return the table of findings about the quality of measurements."""
    header = (
        *columns("text", "finding"),
        *columns("code", "source"),
        Column("count", kind="count"),
        *columns("number", "of the time", write=percent),
        *columns("code", "message"),
    )
    rows = (
        (Phrase((finding.code,)), finding.source, finding.count, finding.share, finding.message)
        for finding in result.lint
    )
    title = "Findings about the measurements"
    return ReportTable(name="findings", title=title, table=table_from_rows(header, rows))


def _listed(names: Iterable[tuple[str, str]], more: str, most: int = _MOST_NAMES) -> Phrase:
    """Return a phrase with the first ``most`` names, each followed by its text, and ``more`` at the end if
    some are left out.
    """
    parts: list[str] = []
    for name, text in islice(names, most):
        parts += [", "] if parts else []
        parts += [Name(shown(name, 40)), text]
    return Phrase((*parts, more))


def _more_text(count: int) -> str:
    return f" and {count:,} more" if count > 0 else ""


def interval_text(errors: ErrorSummary) -> str:
    """Return the text of the bootstrap interval of the MAPE."""
    if isnan(errors.ci_low) or isnan(errors.ci_high):
        return UNKNOWN
    return f"{percent(errors.ci_low)} to {percent(errors.ci_high)}"


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
    """Yield one row of the CSV report per case, with the prediction of one estimator."""

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
    """Return CSV text with the speed-up of each shape that was measured on two devices, one row per estimator
    that covers both.

    The text is empty if the devices have no shape in common.
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
