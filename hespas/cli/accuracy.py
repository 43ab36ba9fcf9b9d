"""``hespas-validate accuracy`` and ``compare``: how far estimates are from measurements, and what changed."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hespas.cli.reports import check_reports
from hespas.cli.session import DebugOption, ProgressOption, command_line, emit, progress_bar, say_diagnostics
from hespas.cli.text import count_text, counted, table_text, time_text
from hespas.graph.errors import UsageError

if TYPE_CHECKING:
    from hespas.graph import Diagnostics, Profile, Workload
    from hespas.validators.accuracy import Accuracy, Comparison, Thresholds

__all__ = ["accuracy", "compare"]


def accuracy(
    measured: Annotated[
        list[Path], typer.Option(metavar="P", help="A profile, a table of measured operations; repeatable.")
    ],
    hardware: Annotated[
        list[str], typer.Option(metavar="NAME|FILE", help="The device it was measured on; repeatable.")
    ],
    workload: Annotated[
        Path | None,
        typer.Option(metavar="W", help="The program that ran; without it, what the profile holds."),
    ] = None,
    estimator: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="An estimator (default roofline); repeatable.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write report.html, .json, .csv and .md into a folder.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures as JSON.")
    ] = None,
    max_mape: Annotated[
        float, typer.Option(metavar="X", help="Exit 1 above this MAPE over distinct shapes; 0.2 is 20 %.")
    ] = nan,
    max_e2e: Annotated[
        float, typer.Option(metavar="X", help="Exit 1 above this relative error of a whole step.")
    ] = nan,
    min_coverage: Annotated[
        float, typer.Option(metavar="X", help="Exit 1 below this share of the measured time.")
    ] = nan,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files of DIR.")] = False,
    progress: Annotated[bool | None, ProgressOption] = None,
    debug: Annotated[bool, DebugOption] = False,
) -> None:
    """Compare estimates with what was measured, beside naive baselines and the noise of the measurement.

    hespas-validate accuracy --measured trace.json.gz --hardware H100-SXM --report out
    """
    from hespas.graph.diagnostics import Diagnostics

    diagnostics = Diagnostics()
    with command_line(debug, diagnostics, str(measured[0])):
        from hespas.validators.accuracy import Thresholds

        limits = Thresholds(max_mape=max_mape, max_e2e=max_e2e, min_coverage=min_coverage)
        models = estimator or ["roofline"]
        asked = _Asked(measured, hardware, workload, models, report, json_file, overwrite)
        _check(asked)
        done = _compared(asked, limits, progress, diagnostics)
        say_diagnostics(diagnostics, measured[0])
        _show(done)
        _verdict(done, limits)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is compared, and where the reports go."""

    measured: list[Path]
    hardware: list[str]
    workload: Path | None
    models: list[str]
    report: Path | None
    json_file: Path | None
    overwrite: bool

    @property
    def inputs(self) -> list[Path]:
        """Every file that is read."""
        return [*([self.workload] if self.workload else []), *self.measured]


def _check(asked: _Asked) -> None:
    """Refuse reports that cannot be written before anything is read."""
    check_reports({"--json": asked.json_file}, {"an input": asked.inputs})
    if asked.report:
        from hespas.validators.accuracy.folder import check_folder

        check_folder(asked.report, overwrite=asked.overwrite)


def _compared(asked: _Asked, limits: Thresholds, progress: bool | None, diagnostics: Diagnostics) -> Accuracy:
    """Read, compare, write the reports."""
    from hespas.validators.accuracy import accuracy as run
    from hespas.validators.accuracy import accuracy_json

    program = _program(asked.workload, diagnostics)
    profiles = _profiles(asked.measured, progress, diagnostics)
    done = run(
        profiles,
        asked.hardware,
        asked.models,
        workload=program,
        inputs=[str(path) for path in asked.inputs],
        diagnostics=diagnostics,
    )
    if asked.json_file:
        _write(accuracy_json(done, limits), asked.json_file)
    if asked.report:
        from hespas.validators.accuracy.folder import write_report

        write_report(
            done,
            limits,
            asked.report,
            overwrite=asked.overwrite,
            hardware=asked.hardware,
            estimators=asked.models,
            profiles=profiles,
            workload=program,
        )
    return done


def _program(path: Path | None, diagnostics: Diagnostics) -> Workload | None:
    if path is None:
        return None
    from hespas import api
    from hespas.graph import Profile

    value = api.read(path, diagnostics=diagnostics)
    if isinstance(value, Profile):
        raise UsageError("a profile is no program", path=str(path), hint="give it as --measured")
    return value


def _profiles(paths: list[Path], progress: bool | None, diagnostics: Diagnostics) -> list[Profile | Workload]:
    from hespas import api

    found: list[Profile | Workload] = []
    with progress_bar("reading", progress) as callback:
        for place, path in enumerate(paths):
            if callback:
                callback(place, len(paths))
            found.append(api.read(path, diagnostics=diagnostics))
    return found


def _write(content: bytes, path: Path) -> None:
    from hespas.converters.output import write_atomically

    def fill(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_atomically(path, fill, overwrite=True, directory=False)


def _show(done: Accuracy) -> None:
    """Errors over all and per class, a step end to end, and what is wrong with the data."""
    for source, found in done.coverage.items():
        emit(
            f"{source}: {found.time_share:.1%} of the device time and {found.matched_events:,} of "
            f"{counted(found.events, 'event')} matched; {found.matched_nodes:,} of "
            f"{counted(found.nodes, 'operation')} that cost something"
        )
    rows = [
        (
            row.hardware,
            row.estimator,
            row.op_class,
            count_text(row.errors.n),
            count_text(row.errors.shapes),
            *map(_percent, (row.errors.coverage, row.errors.mape)),
            _interval(row.errors.ci_low, row.errors.ci_high),
            *map(_percent, (row.errors.median_ape, row.errors.p90_ape)),
            *map(_signed, (row.errors.bias, row.errors.sum_error)),
        )
        for row in done.summary
        if row.level == "shape" and row.size == "all"
        if row.op_class == "all" or row.estimator in done.estimators
    ]
    titles = ("device", "estimator", "class", "n", "shapes", "coverage", "MAPE", "95 %", "median", "P90")
    emit(table_text((*titles, "bias", "sum"), rows, left=(0, 1, 2)))
    for hardware, floor in done.noise.items():
        told = (
            f"{floor.mape:.1%} (median {floor.median_ape:.1%}, n {floor.n:,})" if floor.n else "not repeated"
        )
        emit(f"noise floor of {hardware}: {told}")
    emit("each distinct shape counts once; p0-p2 are the naive baselines")
    runs = [
        (
            run.source,
            run.hardware,
            run.estimator,
            run.basis,
            time_text(run.predicted_ns),
            time_text(run.measured_ns),
            _signed(run.relative_error),
        )
        for run in done.end_to_end
    ]
    names = ("source", "device", "estimator", "end to end", "predicted", "measured", "error")
    emit(table_text(names, runs, left=(0, 1, 2, 3)))
    for pair in done.speed_ups:
        emit(
            f"{pair.estimator}: {pair.hardware} or {pair.other}? faster one right for {pair.sign:.0%} of "
            f"{counted(pair.n, 'shared shape')} ({pair.constant_sign:.0%} by one ratio), "
            f"above 20 us {_percent(pair.sign_long)} of {pair.n_long:,}"
        )
    for finding in done.lint:
        share = f", {finding.share:.1%} of the time" if not isnan(finding.share) else ""
        emit(f"data: {finding.source}: {finding.message}: {finding.count:,}{share} [{finding.code}]")


def _percent(value: float) -> str:
    return f"{value:.1%}" if not isnan(value) else "-"


def _signed(value: float) -> str:
    return f"{value:+.1%}" if not isnan(value) else "-"


def _verdict(done: Accuracy, limits: Thresholds) -> None:
    exceeded = done.exceeded(limits)
    for sentence in exceeded:
        emit(f"past a threshold: {sentence}")
    if exceeded:
        raise typer.Exit(1)


def compare(
    base: Annotated[Path, typer.Argument(metavar="BASE.json", help="An accuracy report, from --json.")],
    new: Annotated[Path, typer.Argument(metavar="NEW.json", help="Another of the same comparison.")],
    max_regression: Annotated[
        float,
        typer.Option(metavar="X", help="Exit 1 where an error grew by more; 0.01 is a percentage point."),
    ] = nan,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the differences as JSON.")
    ] = None,
    debug: Annotated[bool, DebugOption] = False,
) -> None:
    """What got better or worse between two accuracy reports.

    hespas-validate compare main.json branch.json --max-regression 0.01
    """
    with command_line(debug):
        from hespas.validators.accuracy import compare_reports, comparison_json

        check_reports({"--json": json_file}, {"BASE": [base], "NEW": [new]})
        done = compare_reports(base, new)
        if json_file:
            _write(comparison_json(done, max_regression), json_file)
        _show_changes(done)
        worse = done.regressions(max_regression)
        for change in worse:
            emit(f"past a threshold: {change.figure} of {change.what} grew by {_percent(change.difference)}")
        if worse or (not isnan(max_regression) and done.only_base):
            raise typer.Exit(1)


def _show_changes(done: Comparison) -> None:
    rows = [
        (each.what, each.figure, _percent(each.before), _percent(each.after), _signed(each.difference))
        for each in done.changes
        if each.difference
    ]
    if rows:
        emit(table_text(("what", "figure", "before", "after", "change"), rows, left=(0, 1)))
    better, worse = (sum(sign * each.difference > 0 for each in done.changes) for sign in (-1, 1))
    emit(
        f"{counted(len(done.changes), 'figure')} compared: {better:,} better, {worse:,} worse; "
        f"{len(done.only_base):,} only in the first, {len(done.only_new):,} only in the second"
    )


def _interval(low: float, high: float) -> str:
    return f"{low:.1%} to {high:.1%}" if not isnan(low) else "-"
