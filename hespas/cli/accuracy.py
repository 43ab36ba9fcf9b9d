"""``hespas-validate accuracy`` and ``compare``: how far estimates are from measurements, and what changed."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hespas.api.preparation import DEFAULT_ESTIMATOR
from hespas.cli import options
from hespas.cli.accuracy_text import show_accuracy, show_changes
from hespas.cli.session import (
    check_apart,
    check_once,
    check_reports,
    command_line,
    emit,
    estimator_files,
    hardware_files,
    limit_of,
    progress_bar,
    report_folder,
    say_diagnostics,
    write_document,
)
from hespas.graph.errors import UsageError

if TYPE_CHECKING:
    from hespas.graph import Diagnostics, Profile, Workload
    from hespas.measurements import Measurements
    from hespas.validators.accuracy import Accuracy, Thresholds

__all__ = [
    "accuracy",
    "compare",
    "read_program",
    "read_tables",
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
    estimator: _EstimatorOption = None,
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
    debug: options.Debug = False,
) -> None:
    """Compare estimates with what was measured, beside naive baselines and the noise of the measurement.

    hespas-validate accuracy --measured trace.json.gz --hardware H100-SXM --report out
    """
    from hespas.graph.diagnostics import Diagnostics

    diagnostics = Diagnostics()
    inputs = [*(measured or ()), *(table or ())]
    source = str(inputs[0]) if inputs else ""
    reads = [workload, *inputs, *(hardware or ()), *(estimator or ())]
    with command_line(debug, diagnostics, source, documents=[json_file], reads=reads, writes=[report]):
        limits = _limits(max_mape, max_e2e, min_coverage)
        asked = _Asked(
            measured=measured or [],
            tables=table or [],
            hardware=hardware or [],
            split=split,
            workload=workload,
            models=estimator or [DEFAULT_ESTIMATOR],
            report=report,
            json_file=json_file,
            overwrite=overwrite,
        )
        _check(asked, limits)
        run = _compared_tables if asked.tables else _compared
        done = run(asked, limits, progress, diagnostics)
        say_diagnostics(diagnostics, "" if asked.tables else inputs[0])  # findings name their table
        show_accuracy(done)
        _verdict(done, limits)


def _limits(mape: float | None, e2e: float | None, coverage: float | None) -> Thresholds:
    from hespas.validators.accuracy import Thresholds

    return Thresholds(
        max_mape=limit_of("--max-mape", mape),
        max_e2e=limit_of("--max-e2e", e2e),
        min_coverage=limit_of("--min-coverage", coverage, most=1.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What is compared, and where the reports go."""

    measured: list[Path]
    tables: list[Path]
    hardware: list[str]
    split: str
    workload: Path | None
    models: list[str]
    report: Path | None
    json_file: Path | None
    overwrite: bool

    @property
    def inputs(self) -> list[Path]:
        """Every file that is read."""
        return [*([self.workload] if self.workload else []), *self.measured, *self.tables]


def _check(asked: _Asked, limits: Thresholds) -> None:
    """Refuse what contradicts itself, and reports that cannot be written, before anything is read."""
    if asked.tables and (asked.measured or asked.workload):
        raise UsageError(
            "a table states its operations itself", hint="give --table, or --measured with --workload"
        )
    if asked.tables and not isnan(limits.max_e2e):
        raise UsageError("a table of operations has no step to time", hint="leave --max-e2e out")
    if not asked.tables and not asked.measured:
        raise UsageError("nothing to compare with", hint="give --measured PROFILE or --table TABLE")
    if asked.split and not asked.tables:
        raise UsageError("--split chooses rows of tables", hint="give the table with --table")
    if asked.measured and not asked.hardware:
        raise UsageError("which device was it measured on?", hint="give --hardware NAME: see hespas hardware")
    _check_files(asked)


def _check_files(asked: _Asked) -> None:
    check_once([*asked.measured, *asked.tables])
    reads = {
        "an input": asked.inputs,
        "--hardware": hardware_files(*asked.hardware),
        "--estimator": estimator_files(*asked.models),
    }
    if asked.report:
        from hespas.validators.accuracy.report.folder import REPORT_FILES, check_folder

        files = [asked.report / name for name in REPORT_FILES]
        for file in files:
            check_apart("--report", file, reads)
        check_folder(asked.report, overwrite=asked.overwrite)
        reads["--report"] = files
    check_reports({"--json": asked.json_file}, reads, overwrite=asked.overwrite)


def _compared(asked: _Asked, limits: Thresholds, progress: bool | None, diagnostics: Diagnostics) -> Accuracy:
    """Read, compare, write the reports."""
    from hespas.validators.accuracy import accuracy as run
    from hespas.validators.accuracy import accuracy_json

    program = read_program(asked.workload, diagnostics)
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
        write_document(accuracy_json(done, limits), asked.json_file, overwrite=asked.overwrite)
    if asked.report:
        from hespas.validators.accuracy.report.folder import write_report

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


def _compared_tables(
    asked: _Asked, limits: Thresholds, progress: bool | None, diagnostics: Diagnostics
) -> Accuracy:
    """The same for tables."""
    from hespas.validators.accuracy import accuracy_json, accuracy_of_tables

    done = accuracy_of_tables(
        read_tables(asked.tables, progress),
        asked.hardware,
        asked.models,
        split=asked.split,
        inputs=[str(path) for path in asked.inputs],
        diagnostics=diagnostics,
    )
    if asked.json_file:
        write_document(accuracy_json(done, limits), asked.json_file, overwrite=asked.overwrite)
    if asked.report:
        from hespas.validators.accuracy.report.folder import write_report

        devices = asked.hardware or list(dict.fromkeys(each.hardware for each in done.cases))
        write_report(
            done,
            limits,
            asked.report,
            overwrite=asked.overwrite,
            hardware=devices,
            estimators=asked.models,
        )
    return done


def read_tables(paths: list[Path], progress: bool | None) -> list[Measurements]:
    """Tables of measured operations. Raises ``UsageError`` for the same one twice."""
    from hespas.measurements import read_measurements

    found: list[Measurements] = []
    with progress_bar("reading", progress) as callback:
        for place, path in enumerate(paths):
            if callback:
                callback(place, len(paths))
            if path in paths[:place]:
                raise UsageError("is given twice", path=str(path))
            found.append(read_measurements(path))
    return found


def read_program(path: Path | None, diagnostics: Diagnostics) -> Workload | None:
    """The program that ran, where one is given. Raises ``UsageError`` for a profile."""
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
        float | None,
        typer.Option(metavar="X", help="Exit 1 where an error grew by more; 0.01 is a percentage point."),
    ] = None,
    json_file: options.Json = None,
    overwrite: options.Overwrite = False,
    max_input_bytes: options.MaxInputBytes = None,
    loudness: options.Loudness = None,
    debug: options.Debug = False,
) -> None:
    """What got better or worse between two accuracy reports.

    hespas-validate compare main.json branch.json --max-regression 0.01
    """
    with command_line(debug, source=f"{base}, {new}", documents=[json_file], reads=[base, new]):
        from hespas.validators.accuracy import compare_reports, comparison_json

        limit = limit_of("--max-regression", max_regression)
        check_reports({"--json": json_file}, {"BASE": [base], "NEW": [new]}, overwrite=overwrite)
        done = compare_reports(base, new)
        if json_file:
            write_document(comparison_json(done, limit), json_file, overwrite=overwrite)
        show_changes(done)
        exceeded = done.exceeded(limit)
        for sentence in exceeded[:_MOST_SENTENCES]:
            emit(f"past a threshold: {sentence}")
        if len(exceeded) > _MOST_SENTENCES:
            emit(f"past a threshold: {len(exceeded) - _MOST_SENTENCES:,} more")
        if exceeded:
            raise typer.Exit(1)
