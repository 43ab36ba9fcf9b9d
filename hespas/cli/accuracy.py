"""``hespas-validate accuracy`` and ``compare``: how far estimates are from measurements, and what changed."""

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
from hespas.cli.text import count_text, counted, table_text, time_text

if TYPE_CHECKING:
    from hespas.validators.accuracy import Accuracy, Comparison
    from hespas.validators.accuracy.coverage import Coverage
    from hespas.validators.accuracy.result import EndToEnd, SummaryRow

__all__ = [
    "accuracy",
    "compare",
    "percent",
    "show_accuracy",
    "show_changes",
    "show_summary",
    "signed",
]

_MOST_SENTENCES = 50
"""Figures past a threshold that are named; the rest is counted."""

_MapeOption = Annotated[
    float | None,
    typer.Option(metavar="X", help="Exit 1 above this MAPE over distinct shapes; 0.2 is 20 %."),
]
_StepOption = Annotated[
    float | None, typer.Option(metavar="X", help="Exit 1 above this relative error of a whole step.")
]
_CoverageOption = Annotated[
    float | None, typer.Option(metavar="X", help="Exit 1 below this share of all device time.")
]
_ReportOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", parser=report_folder, help="Write report.html, .json, .csv and .md into a folder."
    ),
]
_HardwareOption = Annotated[
    list[str] | None,
    typer.Option(
        "--hardware",
        metavar="NAME|FILE",
        help="The device it was measured on; repeatable. Default with --table: all devices in it.",
        autocompletion=options.device_names,
    ),
]

_EstimatorOption = Annotated[
    list[str] | None,
    typer.Option(
        "--estimator",
        metavar="NAME",
        help=f"An estimator (default {DEFAULT_ESTIMATOR}); repeatable.",
        autocompletion=options.estimator_names,
    ),
]


def accuracy(
    measured: Annotated[
        list[Path] | None,
        typer.Option(metavar="P", help="A profile, or a graph with times; repeatable."),
    ] = None,
    table: options.Tables = None,
    hardware: _HardwareOption = None,
    split: Annotated[
        str, typer.Option(metavar="NAME", help="Compare only these rows of the tables: devval.")
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
    """Compare estimates with what was measured, beside naive baselines and the noise of the measurement.

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
        _check_written(taken, report, json_file, overwrite=overwrite)
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
        report_diagnostics(diagnostics, "" if table else inputs[0])  # findings name their table
        show_accuracy(done.details)
        _verdict(done.exceeded, len(done.exceeded))


def _check_written(
    reads: dict[str, list[Path]], report: Path | None, json_file: Path | None, *, overwrite: bool
) -> None:
    """Refuse reports that cannot be written, or would replace what is read."""
    if report:
        from hespas.validators.accuracy.report.folder import REPORT_FILES, check_folder

        files = [report / name for name in REPORT_FILES]
        for file in files:
            check_apart("--report", file, reads)
        check_folder(report, overwrite=overwrite)
        reads = reads | {"--report": files}
    check_reports({"--json": json_file}, reads, overwrite=overwrite)


def _verdict(exceeded: Sequence[str], most: int) -> None:
    """What is past a threshold, ``most`` of it in full, and the exit code that says so."""
    for sentence in exceeded[:most]:
        emit(f"past a threshold: {sentence}")
    if len(exceeded) > most:
        emit(f"past a threshold: {len(exceeded) - most:,} more")
    if exceeded:
        raise typer.Exit(1)


def compare(
    base: Annotated[Path, typer.Argument(metavar="BASE.json", help="An accuracy report, from --json.")],
    new: Annotated[Path, typer.Argument(metavar="NEW.json", help="Another of the same comparison.")],
    max_regression: Annotated[
        float | None,
        typer.Option(metavar="X", help="Exit 1 where an error grew by more; 0.01 is a percentage point."),
    ] = None,
    json_file: options.Json = None,
    overwrite: options.Overwrite = False,
    max_input_bytes: options.MaxInputBytes = None,
    loudness: options.Loudness = None,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """What got better or worse between two accuracy reports.

    hespas-validate compare main.json branch.json --max-regression 0.01
    """
    with command_line(debug, source=f"{base}, {new}", documents=[json_file], reads=[base, new]):
        from hespas.api import compare as run

        check_reports({"--json": json_file}, {"BASE": [base], "NEW": [new]}, overwrite=overwrite)
        done = run(base, new, max_regression=max_regression)
        if json_file:
            write_document(done.to_json(), json_file, overwrite=overwrite)
        show_changes(done.details)
        _verdict(done.exceeded, _MOST_SENTENCES)


_VAST = 1e4
"""Errors from here on are written with an exponent: a time of almost nothing makes hundreds of digits."""
_MOST_HEADLINES = 6
_MOST_PAIRS = 20
"""Comparisons of two devices; where there are more, those of the baselines are in the documents only."""


def show_accuracy(done: Accuracy) -> None:
    """Errors over all and per class, a step end to end, and what is wrong with the data."""
    from hespas.validators.accuracy.baselines import BASELINES

    for run in _headlines(done):
        least = "at least " if run.is_lower_bound else ""
        emit(
            f"{run.source} on {run.hardware}: {least}{time_text(run.predicted_ns)} predicted, "
            f"{time_text(run.measured_ns)} measured, {signed(run.relative_error)} "
            f"({run.estimator}, {run.basis}){_of_operations(done, run)}"
        )
    if is_quiet():
        return
    for source, found in done.coverage.items():
        emit(
            f"{source}: {found.time_share:.1%} of the device time and {found.matched_events:,} of "
            f"{counted(found.events, 'event')} matched; {found.matched_nodes:,} of "
            f"{counted(found.nodes, 'operation')} that cost something{_evidence(found)}"
        )
    show_summary(done)
    for hardware, floor in done.noise.items():
        told = (
            f"{floor.median_ape:.1%} (median over {floor.n:,} repeated cases; mean {floor.mape:.1%})"
            if floor.n
            else "not repeated"
        )
        emit(f"noise floor of {hardware}: {told}")
    emit("each distinct shape counts once, coverage is of all device time")
    emit(f"naive baselines: {', '.join(BASELINES)}")
    if done.end_to_end:
        _show_runs(done)
    many = len(done.speed_ups) > _MOST_PAIRS
    for pair in done.speed_ups:
        if many and pair.estimator not in done.estimators:
            continue
        emit(
            f"{pair.estimator}: {pair.hardware} or {pair.other}? faster one right for {pair.sign:.0%} of "
            f"{counted(pair.n, 'shared shape')} ({pair.constant_sign:.0%} by one ratio), "
            f"above 20 us {percent(pair.sign_long)} of {pair.n_long:,}"
        )
    for finding in done.lint:
        share = f", {finding.share:.1%} of the time" if not isnan(finding.share) else ""
        emit(f"data: {finding.source}: {finding.message}: {finding.count:,}{share} [{finding.code}]")


def _of_operations(done: Accuracy, run: EndToEnd) -> str:
    """Return the error of single operations: those of a step may cancel out."""
    for row in done.summary:
        is_its = (row.hardware, row.estimator) == (run.hardware, run.estimator)
        if is_its and (row.level, row.op_class, row.size) == ("shape", "all", "all"):
            found = row.errors
            if isnan(found.median_ape):
                return ""
            return f"; single operations: median {percent(found.median_ape)}, MAPE {percent(found.mape)}"
    return ""


def _headlines(done: Accuracy) -> list[EndToEnd]:
    """One figure per source, device and estimator: of the span of the step, else of what stands for it."""
    first: dict[tuple[str, str, str], EndToEnd] = {}
    for run in done.end_to_end:
        if run.estimator in done.estimators and not isnan(run.relative_error):
            first.setdefault((run.source, run.hardware, run.estimator), run)
    return list(first.values())[:_MOST_HEADLINES]


def _show_runs(done: Accuracy) -> None:
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
            emit(
                f"{source}: no program to simulate: {_added_up(spans.get(source, nan))}; measured span "
                f"{time_text(step.span_ns)}, busy {time_text(step.busy_ns)}"
            )


def _added_up(steps: float) -> str:
    """Over how many steps operations are summed, where times beside are those of one."""
    if isnan(steps):
        return "operations are added up over the whole recording, which marks no steps"
    return f"operations are added up over {counted(int(steps), 'step')}, times are of one"


def _evidence(found: Coverage) -> str:
    """By what the events were matched, where that is not names alone."""
    if not found.time_ns or found.by_rule.keys() <= {"instruction", "op-name"}:
        return ""
    rules = ", ".join(f"{rule} {time / found.time_ns:.1%}" for rule, time in found.by_rule.items())
    return f"; matched by {rules}"


def show_summary(done: Accuracy) -> None:
    """Errors per device, estimator and class, each distinct shape once; the baselines over all. Classes that
    have families are told by them.
    """
    shown = {"all", *(name for cases in done.cases for name in cases.families or cases.classes)}
    found = [
        row
        for row in done.summary
        if row.level == "shape" and row.size == "all" and row.op_class in shown
        if row.op_class == "all" or row.estimator in done.estimators
    ]
    bounded = any(row.errors.interval_n for row in found)
    titles = ("device", "estimator", "class", "n", "shapes", "coverage", "MAPE", "95 %", "median", "P90")
    titles = (*titles, "bias", "sum", *(("in interval",) if bounded else ()))
    emit(table_text(titles, [_cells(row, bounded=bounded) for row in found], left=(0, 1, 2)))


def _cells(row: SummaryRow, *, bounded: bool) -> tuple[str, ...]:
    errors = row.errors
    cells = (
        row.hardware,
        row.estimator,
        row.op_class,
        count_text(errors.n),
        count_text(errors.shapes),
        *map(percent, (errors.coverage, errors.mape)),
        _interval(errors.ci_low, errors.ci_high),
        *map(percent, (errors.median_ape, errors.p90_ape)),
        *map(signed, (errors.bias, errors.sum_error)),
    )
    return (*cells, percent(errors.interval_coverage)) if bounded else cells


def _interval(low: float, high: float) -> str:
    return f"{low:.1%} to {high:.1%}" if not isnan(low) else "-"


def percent(value: float) -> str:
    """``12.3%`` of 0.123; a dash for what is unknown."""
    return _percentage(value, "") if not isnan(value) else "-"


def signed(value: float) -> str:
    """The same with its sign."""
    return _percentage(value, "+") if not isnan(value) else "-"


def _percentage(value: float, sign: str) -> str:
    return f"{value:{sign}.1%}" if abs(value) < _VAST else f"{100 * value:{sign}.2e}%"


def show_changes(done: Comparison) -> None:
    """Every figure that changed, and how many did."""
    rows = [
        (each.what, each.figure, percent(each.before), percent(each.after), signed(each.difference))
        for each in done.changes
        if each.difference
    ]
    if rows:
        emit(table_text(("what", "figure", "before", "after", "change"), rows, left=(0, 1)))
    if done.unlike():
        emit(f"warning: {done.unlike()}; errors over all of them do not compare")
    better, worse = (sum(sign * each.difference > 0 for each in done.changes) for sign in (-1, 1))
    emit(
        f"{counted(len(done.changes), 'figure')} compared: {better:,} better, {worse:,} worse; "
        f"{len(done.only_base):,} only in the first, {len(done.only_new):,} only in the second"
    )
