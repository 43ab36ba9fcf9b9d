"""``hespas-validate accuracy`` and ``compare``: errors of estimates."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hespas.api.comparison import compare as compare_reports
from hespas.api.io import check_once
from hespas.api.validation import accuracy as evaluate
from hespas.cli.command import Call, command
from hespas.cli.terminal import (
    emit,
    is_quiet,
    op_class_text,
    percent,
    report_diagnostics,
    signed,
)
from hespas.graph.hints import Option
from hespas.report.tables import columns, table_from_rows
from hespas.report.texts import counted, time_text

if TYPE_CHECKING:
    from hespas.validators.accuracy import Accuracy, Comparison
    from hespas.validators.accuracy.coverage import Coverage
    from hespas.validators.accuracy.result import EndToEnd, SummaryRow

__all__ = [
    "accuracy",
    "compare",
    "print_accuracy",
    "print_changes",
    "print_summary",
]

_MAX_EXCEEDED = 50
"""Exceeded thresholds that are printed; the rest is counted."""

_Report = Annotated[
    Path | None,
    Option("Write report.html, .json, .csv and .md to a folder.", metavar="DIR", access="folder"),
]


@command(evaluate, progress="reading")
def accuracy(call: Call, *, report: _Report = None) -> None:
    """Compare estimates with measurements, naive baselines and the noise of the measurement.

    hespas-validate accuracy --measured trace.json.gz --hardware H100-SXM --report out
    """
    from hespas import api

    check_once([path for name in ("profiles", "table", "capture") for path in call.several(name)])
    if report:
        from hespas.validators.accuracy.report.folder import REPORT_FILES, check_folder

        call.check_report(REPORT_FILES, check_folder)
    done = call.run(api.accuracy)
    call.write_json(done.to_json())
    if report:
        done.write(report, overwrite=call.overwrite)
    tables = call.several("table")  # diagnostics name their table
    report_diagnostics(call.diagnostics, "" if tables else call.several("profiles")[0])
    print_accuracy(done.details)
    _print_exceeded(done.exceeded, len(done.exceeded))


def _print_exceeded(exceeded: Sequence[str], limit: int) -> None:
    """Print the exceeded thresholds, at most ``limit`` in full, and exit with 1 if there are any."""
    for sentence in exceeded[:limit]:
        emit(f"threshold exceeded: {sentence}")
    if len(exceeded) > limit:
        emit(f"threshold exceeded: {len(exceeded) - limit:,} more")
    if exceeded:
        raise typer.Exit(1)


@command(compare_reports, has_page=True)
def compare(call: Call) -> None:
    """Compare two accuracy reports: errors that grew or shrank.

    hespas-validate compare main.json branch.json --max-regression 0.01
    """
    from hespas import api

    done = call.run(api.compare)
    call.write_json(done.to_json())
    call.write_html(done)
    print_changes(done.details)
    _print_exceeded(done.exceeded, _MAX_EXCEEDED)


_MAX_SUMMARY_LINES = 6
_MAX_SPEED_UPS = 20
"""Comparisons of two devices; if there are more, comparisons of baselines are not printed."""


def print_accuracy(done: Accuracy) -> None:
    """Print the errors of steps, classes and pairs of devices, and problems of the data."""
    from hespas.validators.accuracy.baselines import BASELINES

    first: dict[tuple[str, str, str], EndToEnd] = {}  # the span of the step, or the figure that replaces it
    for run in done.end_to_end:
        if run.estimator in done.estimators and not isnan(run.relative_error):
            first.setdefault((run.source, run.hardware, run.estimator), run)
    for run in list(first.values())[:_MAX_SUMMARY_LINES]:
        at_least = "at least " if run.is_lower_bound else ""
        emit(
            f"{run.source} on {run.hardware}: {at_least}{time_text(run.predicted_ns)} predicted, "
            f"{time_text(run.measured_ns)} measured, {signed(run.relative_error)} "
            f"({run.estimator}, {run.basis}){_operation_errors(done, run)}"
        )
    if is_quiet():
        return
    for source, coverage in done.coverage.items():
        emit(
            f"{source}: {coverage.time_share:.1%} of the device time and {coverage.matched_events:,} of "
            f"{counted(coverage.events, 'event')} matched; {coverage.matched_nodes:,} of "
            f"{counted(coverage.nodes, 'operation')} with costs{_matching_rules(coverage)}"
        )
    print_summary(done)
    for hardware, floor in done.noise.items():
        noise = (
            f"{floor.median_ape:.1%} (median over {floor.n:,} repeated cases; mean {floor.mape:.1%})"
            if floor.n
            else "not repeated"
        )
        emit(f"noise floor of {hardware}: {noise}")
    emit("each distinct shape counts once; coverage is of all device time")
    emit(f"naive baselines: {', '.join(BASELINES)}")
    if done.end_to_end:
        runs = [
            (
                run.source,
                run.hardware,
                run.estimator,
                run.basis_text,
                run.predicted_ns,
                run.measured_ns,
                run.relative_error,
                run.coverage,
            )
            for run in done.end_to_end
        ]
        header = (
            *columns("text", "source", "device", "estimator", "end to end"),
            *columns("time", "predicted", "measured"),
            *columns("share", "error", write=signed, unknown="-"),
            *columns("share", "estimated", write=percent, unknown="-"),
        )
        emit(table_from_rows(header, runs).to_text())
        spans = {cases.source: cases.steps for cases in done.cases}
        for source, step in done.steps.items():
            if source not in done.coverage and not step.is_simulated and not isnan(step.span_ns):
                steps = spans.get(source, nan)
                summed = "operations are summed over the whole recording, which marks no steps"
                if not isnan(steps):
                    summed = f"operations are summed over {counted(int(steps), 'step')}, times are per step"
                emit(
                    f"{source}: no program to simulate: {summed}; measured span {time_text(step.span_ns)}, "
                    f"busy {time_text(step.busy_ns)}"
                )
    are_many = len(done.speed_ups) > _MAX_SPEED_UPS
    for pair in done.speed_ups:
        if are_many and pair.estimator not in done.estimators:
            continue
        emit(
            f"{pair.estimator}: faster device of {pair.hardware} and {pair.other} correct for "
            f"{pair.sign:.0%} of {counted(pair.n, 'shared shape')} "
            f"({pair.constant_sign:.0%} with a constant ratio), above 20 us "
            f"{percent(pair.sign_long)} of {pair.n_long:,}"
        )
    emit(
        f"data: {finding.source}: {finding.message}: {finding.count:,}"
        f"{'' if isnan(finding.share) else f', {finding.share:.1%} of the time'} [{finding.code}]"
        for finding in done.lint
    )


def _operation_errors(done: Accuracy, run: EndToEnd) -> str:
    """Return the errors of single operations, which can cancel out in a step."""
    for row in done.summary:
        is_its = (row.hardware, row.estimator) == (run.hardware, run.estimator)
        if is_its and (row.level, row.op_class, row.size) == ("shape", "all", "all"):
            errors = row.errors
            if isnan(errors.median_ape):
                return ""
            return f"; single operations: median {percent(errors.median_ape)}, MAPE {percent(errors.mape)}"
    return ""


def _matching_rules(coverage: Coverage) -> str:
    """Return the rules by which events were matched, unless all are by name."""
    if not coverage.time_ns or coverage.by_rule.keys() <= {"instruction", "op-name"}:
        return ""
    rules = ", ".join(f"{rule} {time / coverage.time_ns:.1%}" for rule, time in coverage.by_rule.items())
    return f"; matched by {rules}"


def print_summary(done: Accuracy) -> None:
    """Print the errors per device, estimator and class; each distinct shape counts once.

    Baselines are printed over all classes only. Classes with families are split by family.
    """
    shown = {"all", *(name for cases in done.cases for name in cases.families or cases.classes)}
    rows = [
        row
        for row in done.summary
        if row.level == "shape" and row.size == "all" and row.op_class in shown
        if row.op_class == "all" or row.estimator in done.estimators
    ]
    has_intervals = any(row.errors.interval_n for row in rows)
    header = (
        *columns("text", "device", "estimator"),
        *columns("text", "class", write=op_class_text),
        *columns("count", "n", "shapes"),
        *columns("share", "coverage", "MAPE", write=percent),
        *columns("number", "95 %", write=str),
        *columns("share", "median", "P90", write=percent),
        *columns("share", "bias", "sum", write=signed),
        *columns("share", *(("in interval",) if has_intervals else ()), write=percent),
    )
    lines = [_summary_line(row)[: len(header)] for row in rows]
    emit(table_from_rows(header, lines).to_text(unknown="-"))


def _summary_line(row: SummaryRow) -> tuple[object, ...]:
    errors = row.errors
    low, high = errors.ci_low, errors.ci_high
    return (
        row.hardware,
        row.estimator,
        row.op_class,
        errors.n,
        errors.shapes,
        errors.coverage,
        errors.mape,
        None if isnan(low) else f"{low:.1%} to {high:.1%}",
        errors.median_ape,
        errors.p90_ape,
        errors.bias,
        errors.sum_error,
        errors.interval_coverage,
    )


def print_changes(done: Comparison) -> None:
    """Print all changed figures, and their number."""
    rows = [
        (row.what, row.figure, row.before, row.after, row.difference)
        for row in done.changes
        if row.difference
    ]
    if rows:
        header = (
            *columns("text", "what", "figure"),
            *columns("share", "before", "after", write=percent),
            *columns("share", "change", write=signed),
        )
        emit(table_from_rows(header, rows).to_text(unknown="-"))
    if done.unlike():
        emit(f"warning: {done.unlike()}; their overall errors are not comparable")
    better, worse = (sum(sign * row.difference > 0 for row in done.changes) for sign in (-1, 1))
    emit(
        f"{counted(len(done.changes), 'figure')} compared: {better:,} better, {worse:,} worse; "
        f"{len(done.only_base):,} only in the first, {len(done.only_new):,} only in the second"
    )
