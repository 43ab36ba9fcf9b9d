"""``hespas-validate accuracy`` and ``compare``: how far estimates are from measurements, and what changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

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
    progress_bar,
    report_folder,
    say_diagnostics,
    write_document,
)

__all__ = [
    "accuracy",
    "compare",
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
        asked = _Asked(
            measured=measured or [],
            tables=table or [],
            hardware=hardware or [],
            workload=workload,
            models=estimator or [DEFAULT_ESTIMATOR],
            report=report,
            json_file=json_file,
            overwrite=overwrite,
        )
        from hespas.api.validation import accuracy as run
        from hespas.api.validation import check_measured

        check_measured(
            asked.measured, asked.tables, asked.hardware, workload=workload, split=split, max_e2e=max_e2e
        )
        _check_files(asked)
        with progress_bar("reading", progress) as callback:
            done = run(
                asked.measured,
                hardware=asked.hardware,
                table=asked.tables,
                workload=workload,
                estimator=asked.models,
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
        say_diagnostics(diagnostics, "" if asked.tables else inputs[0])  # findings name their table
        show_accuracy(done.result)
        _verdict(done.exceeded, len(done.exceeded))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What is compared, and where the reports go."""

    measured: list[Path]
    tables: list[Path]
    hardware: list[str]
    workload: Path | None
    models: list[str]
    report: Path | None
    json_file: Path | None
    overwrite: bool

    @property
    def inputs(self) -> list[Path]:
        """Every file that is read."""
        return [*([self.workload] if self.workload else []), *self.measured, *self.tables]


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
        show_changes(done.result)
        _verdict(done.exceeded, _MOST_SENTENCES)
