"""``hespas-validate accuracy`` and ``compare``: errors of estimates, and changes between two reports."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hespas.api.lowering import DEFAULT_ESTIMATOR
from hespas.cli import options
from hespas.cli.destinations import (
    check_apart,
    check_once,
    check_reports,
    estimator_files,
    hardware_files,
    report_folder,
    write_document,
)
from hespas.cli.session import command_line
from hespas.cli.terminal import emit, is_quiet, progress_bar, report_diagnostics
from hespas.cli.text import op_class_text
from hespas.report.tables import table_text
from hespas.report.texts import count_text, counted, time_text

if TYPE_CHECKING:
    from hespas.validators.accuracy import Accuracy, Comparison
    from hespas.validators.accuracy.coverage import Coverage
    from hespas.validators.accuracy.result import EndToEnd, SummaryRow

__all__ = [
    "accuracy",
    "compare",
    "percent",
    "print_accuracy",
    "print_changes",
    "print_summary",
    "signed",
]

_MAX_EXCEEDED = 50
"""Exceeded thresholds that are printed; the rest is counted."""

_MapeOption = Annotated[
    float | None,
    typer.Option(metavar="X", help="Exit with 1 above this MAPE over distinct shapes; 0.2 is 20 %."),
]
_StepOption = Annotated[
    float | None, typer.Option(metavar="X", help="Exit with 1 above this relative error of a whole step.")
]
_CoverageOption = Annotated[
    float | None, typer.Option(metavar="X", help="Exit with 1 below this matched share of all device time.")
]
_ReportOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", parser=report_folder, help="Write report.html, .json, .csv and .md to a folder."
    ),
]
_HardwareOption = Annotated[
    list[str] | None,
    typer.Option(
        "--hardware",
        metavar="NAME|FILE",
        help="Set the measured device; repeatable (default with --table: all devices in it).",
        autocompletion=options.device_names,
    ),
]

_EstimatorOption = Annotated[
    list[str] | None,
    typer.Option(
        "--estimator",
        metavar="NAME",
        help=f"Evaluate this estimator; repeatable (default: {DEFAULT_ESTIMATOR}).",
        autocompletion=options.estimator_names,
    ),
]


def accuracy(
    measured: Annotated[
        list[Path] | None,
        typer.Option(metavar="P", help="Read a profile, or a graph with measured times; repeatable."),
    ] = None,
    table: options.Tables = None,
    hardware: _HardwareOption = None,
    split: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Compare only the rows of this split of the tables, such as devval."
        ),
    ] = "",
    workload: options.Workload = None,
    capture: options.Capture = None,
    estimator: _EstimatorOption = None,
    allow_programs: options.AllowPrograms = False,
    report: _ReportOption = None,
    json_file: options.Json = None,
    max_mape: _MapeOption = None,
    max_e2e: _StepOption = None,
    min_coverage: _CoverageOption = None,
    overwrite: options.Overwrite = False,
    progress: options.Progress = None,
    default_dtype: options.DefaultDtype = "",
    comm_groups: options.CommGroups = None,
    run_time_unit: options.RunTimeUnit = "",
    max_input_bytes: options.MaxInputBytes = None,
    loudness: options.Loudness = None,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """Compare estimates with measurements, naive baselines and the noise of the measurement.

    hespas-validate accuracy --measured trace.json.gz --hardware H100-SXM --report out
    """
    from hespas.graph.diagnostics import Diagnostics

    diagnostics = Diagnostics()
    captures = capture or []
    inputs = [*(measured or ()), *(table or ()), *captures]
    source = str(inputs[0]) if inputs else ""
    models = estimator or [DEFAULT_ESTIMATOR]
    reads = [workload, *inputs, *(hardware or ()), *models]
    with command_line(debug, diagnostics, source, documents=[json_file], reads=reads, writes=[report]):
        from hespas.api.validation import accuracy as run
        from hespas.api.validation import check_measured

        check_measured(
            measured or [],
            table or [],
            hardware or [],
            workload=workload,
            capture=captures,
            split=split,
            max_e2e=max_e2e,
        )
        check_once(inputs)
        taken = {
            "an input": [*([workload] if workload else []), *inputs],
            "--hardware": hardware_files(*(hardware or ())),
            "--estimator": estimator_files(*models),
        }
        if report:
            from hespas.validators.accuracy.report.folder import REPORT_FILES, check_folder

            files = [report / name for name in REPORT_FILES]
            for file in files:
                check_apart("--report", file, taken)
            check_folder(report, overwrite=overwrite)
            taken["--report"] = files
        check_reports({"--json": json_file}, taken, overwrite=overwrite)
        with progress_bar("reading", progress) as callback:
            done = run(
                measured or [],
                hardware=hardware or [],
                table=table or [],
                workload=workload,
                capture=captures,
                estimator=models,
                split=split,
                max_mape=max_mape,
                max_e2e=max_e2e,
                min_coverage=min_coverage,
                diagnostics=diagnostics,
                progress=callback,
            )
        if json_file:
            write_document(done.to_json(), json_file, overwrite=overwrite)
        if report:
            done.write(report, overwrite=overwrite)
        report_diagnostics(diagnostics, "" if table else inputs[0])  # diagnostics name their table
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


def compare(
    base: Annotated[Path, typer.Argument(metavar="BASE.json", help="Accuracy report from --json.")],
    new: Annotated[
        Path, typer.Argument(metavar="NEW.json", help="Later accuracy report of the same comparison.")
    ],
    max_regression: Annotated[
        float | None,
        typer.Option(metavar="X", help="Exit with 1 if an error grew by more; 0.01 is a percentage point."),
    ] = None,
    json_file: options.Json = None,
    overwrite: options.Overwrite = False,
    max_input_bytes: options.MaxInputBytes = None,
    loudness: options.Loudness = None,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """Compare two accuracy reports: errors that grew or shrank.

    hespas-validate compare main.json branch.json --max-regression 0.01
    """
    with command_line(debug, source=f"{base}, {new}", documents=[json_file], reads=[base, new]):
        from hespas.api import compare as run

        check_reports({"--json": json_file}, {"BASE": [base], "NEW": [new]}, overwrite=overwrite)
        done = run(base, new, max_regression=max_regression)
        if json_file:
            write_document(done.to_json(), json_file, overwrite=overwrite)
        print_changes(done.details)
        _print_exceeded(done.exceeded, _MAX_EXCEEDED)


_MAX_DECIMAL_ERROR = 1e4
"""Larger errors, of measured times near 0, are written with an exponent."""
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
                time_text(run.predicted_ns),
                time_text(run.measured_ns),
                signed(run.relative_error),
                percent(run.coverage),
            )
            for run in done.end_to_end
        ]
        names = ("source", "device", "estimator", "end to end", "predicted", "measured", "error", "estimated")
        emit(table_text(names, runs, left=(0, 1, 2, 3)))
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
    titles = ("device", "estimator", "class", "n", "shapes", "coverage", "MAPE", "95 %", "median", "P90")
    titles = (*titles, "bias", "sum", *(("in interval",) if has_intervals else ()))
    lines = [_summary_line(row, has_intervals=has_intervals) for row in rows]
    emit(table_text(titles, lines, left=(0, 1, 2)))


def _summary_line(row: SummaryRow, *, has_intervals: bool) -> tuple[str, ...]:
    errors = row.errors
    low, high = errors.ci_low, errors.ci_high
    cells = (
        row.hardware,
        row.estimator,
        op_class_text(row.op_class),
        count_text(errors.n),
        count_text(errors.shapes),
        *map(percent, (errors.coverage, errors.mape)),
        f"{low:.1%} to {high:.1%}" if not isnan(low) else "-",
        *map(percent, (errors.median_ape, errors.p90_ape)),
        *map(signed, (errors.bias, errors.sum_error)),
    )
    return (*cells, percent(errors.interval_coverage)) if has_intervals else cells


def percent(value: float) -> str:
    """Format a share as ``12.3%``; a dash if unknown."""
    return _percentage(value, "")


def signed(value: float) -> str:
    """Format a share with its sign; a dash if unknown."""
    return _percentage(value, "+")


def _percentage(value: float, sign: str) -> str:
    if isnan(value):
        return "-"
    return f"{value:{sign}.1%}" if abs(value) < _MAX_DECIMAL_ERROR else f"{100 * value:{sign}.2e}%"


def print_changes(done: Comparison) -> None:
    """Print all changed figures, and their number."""
    rows = [
        (row.what, row.figure, percent(row.before), percent(row.after), signed(row.difference))
        for row in done.changes
        if row.difference
    ]
    if rows:
        emit(table_text(("what", "figure", "before", "after", "change"), rows, left=(0, 1)))
    if done.unlike():
        emit(f"warning: {done.unlike()}; their overall errors are not comparable")
    better, worse = (sum(sign * row.difference > 0 for row in done.changes) for sign in (-1, 1))
    emit(
        f"{counted(len(done.changes), 'figure')} compared: {better:,} better, {worse:,} worse; "
        f"{len(done.only_base):,} only in the first, {len(done.only_new):,} only in the second"
    )
