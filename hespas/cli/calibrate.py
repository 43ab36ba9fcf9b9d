"""``hespas-validate calibrate``: a hardware file fitted on measurements, with its error on unseen ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hespas.cli import options
from hespas.cli.accuracy import percent, show_summary, signed
from hespas.cli.destinations import (
    check_apart,
    check_once,
    check_reports,
    hardware_files,
    report_folder,
    write_document,
)
from hespas.cli.league import calibrate_end_to_end
from hespas.cli.session import command_line
from hespas.cli.suggest import suggest_shapes
from hespas.cli.terminal import emit, is_quiet, print_message, progress_bar, report_diagnostics
from hespas.cli.text import count_text, counted, table_text
from hespas.graph.errors import UsageError

if TYPE_CHECKING:
    from hespas.api import CalibrationReport
    from hespas.graph import Diagnostics
    from hespas.validators.calibration import Calibration

__all__ = ["calibrate"]


_FITTED = ("calibrated", "systolic", "learned")


class _Test(StrEnum):
    SHAPE = "shape"
    RECORDING = "recording"
    OP = "op"
    HARDWARE = "hardware"


_EstimatorOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="What to fit; repeatable (default calibrated: roofline forms and collectives). systolic: lines "
        "of a device with an array. learned: trees, in a folder FILE.learned beside FILE.toml. With "
        "--end-to-end, whose steps factors are for (default composite).",
    ),
]
_SplitOption = Annotated[
    str, typer.Option(metavar="NAME", help="Fit on these rows (default: all but rows reserved for testing).")
]
_ReportOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        parser=report_folder,
        help="Write before and after as HTML, Markdown and CSV: DIR/by-shape/...",
    ),
]

_SeedOption = Annotated[
    int, typer.Option("--seed", min=0, max=2**32 - 1, metavar="N", help="Seed of all that is drawn.")
]
_SuggestOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Fit nothing: write N shapes to measure next to --out FILE.csv, apart from those of --table.",
    ),
]
_KindOption = Annotated[
    list[str] | None,
    typer.Option(metavar="KIND", help="With --suggest: shapes of this kind; repeatable (default matmul)."),
]
_DtypeOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DTYPE",
        help="With --suggest: in this number format; repeatable (default: of bf16, f16 and f32_full the "
        "fastest of the device).",
    ),
]
_EndToEndOption = Annotated[
    bool,
    typer.Option(
        "--end-to-end",
        help="Fit what whole steps say of the device, with one --table of runs: --out FILE.json.",
    ),
]
_DateOption = Annotated[
    str,
    typer.Option("--date", metavar="YYYY-MM-DD", help="Date written into the file (default today)."),
]


def calibrate(
    context: typer.Context,
    hardware: Annotated[str, options.hardware_option("The device: data sheet, and fits to keep.")],
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE.toml",
            help="The hardware file to write; with --suggest a .csv, with --end-to-end a .json.",
        ),
    ],
    measured: Annotated[
        list[Path] | None, typer.Option(metavar="P", help="A profile taken on the device; repeatable.")
    ] = None,
    table: options.Tables = None,
    workload: options.Workload = None,
    estimator: _EstimatorOption = None,
    allow_programs: options.AllowPrograms = False,
    split: _SplitOption = "",
    test_by: Annotated[
        list[_Test] | None,
        typer.Option(help="What to leave out to test the fits; repeatable (default shape)."),
    ] = None,
    suggest: _SuggestOption = None,
    kind: _KindOption = None,
    dtype: _DtypeOption = None,
    end_to_end: _EndToEndOption = False,
    seed: _SeedOption = 0,
    date: _DateOption = "",
    json_file: options.Json = None,
    report: _ReportOption = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace FILE.toml, its models, files of DIR, and FILE.")
    ] = False,
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
    """Fit estimators on measurements and write a hardware file that holds the fits.

    hespas-validate calibrate --hardware H100-SXM --table measured.csv --out my-h100.toml
    hespas-validate calibrate --hardware H100-SXM --suggest 50 --out shapes.csv
    hespas-validate calibrate --hardware H100-SXM --end-to-end --table runs.csv --out factors.json
    """
    from hespas.graph.diagnostics import Diagnostics

    fitting = {
        "--estimator": estimator, "--measured": measured, "--workload": workload, "--split": split,
        "--test-by": test_by, "--date": date, "--report": report,
    }  # fmt: skip
    given = [name for name, value in fitting.items() if value]
    if end_to_end:
        calibrate_end_to_end(
            hardware,
            table or [],
            estimators=estimator or [],
            out=out,
            others=_not_end_to_end(context),
            overwrite=overwrite,
            progress=progress,
            debug=debug,
        )
        return
    if suggest is not None or kind or dtype:
        suggest_shapes(
            hardware,
            suggest,
            tables=table or [],
            kinds=kind or [],
            dtypes=dtype or [],
            seed=seed,
            out=out,
            json_file=json_file,
            overwrite=overwrite,
            fitting=given,
            debug=debug,
        )
        return
    diagnostics = Diagnostics()
    asked = _Asked(
        hardware=hardware,
        out=out,
        measured=measured or [],
        tables=table or [],
        workload=workload,
        estimators=tuple(dict.fromkeys(estimator or _FITTED[:1])),
        tests=None if test_by is None else tuple(each.value for each in test_by),
        json_file=json_file,
        report=report,
        overwrite=overwrite,
    )
    reads, writes = [hardware, *map(str, asked.inputs)], [out, report]
    with command_line(debug, diagnostics, asked.first, documents=[json_file], reads=reads, writes=writes):
        _check(asked)
        done = _calibrated(asked, (split, seed, date), progress, diagnostics)
        report_diagnostics(diagnostics, asked.measured[0] if asked.measured else "")
        _show(done.details)
        _write(asked, done)


_END_TO_END = frozenset(
    {"hardware", "out", "table", "estimator", "end_to_end", "overwrite", "progress", "max_input_bytes"}
    | {"loudness", "debug"}
)
"""Parameters that factors of whole steps have a use for."""


def _not_end_to_end(context: typer.Context) -> list[str]:
    """The options that the user has written and that factors of whole steps have no use for."""

    def is_written(name: str) -> bool:
        source = context.get_parameter_source(name)
        return source is not None and source.name == "COMMANDLINE"

    return [
        each.opts[0]
        for each in context.command.params
        if each.name and each.name not in _END_TO_END and is_written(each.name)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What is fitted on, and what is written."""

    hardware: str
    out: Path
    measured: list[Path]
    tables: list[Path]
    workload: Path | None
    estimators: tuple[str, ...]
    tests: tuple[str, ...] | None
    json_file: Path | None
    report: Path | None
    overwrite: bool

    @property
    def recorded(self) -> list[Path]:
        """Every file of measurements."""
        return [*self.measured, *self.tables]

    @property
    def first(self) -> str:
        """The first of them; empty where there is none."""
        return str(self.recorded[0]) if self.recorded else ""

    @property
    def inputs(self) -> list[Path]:
        """Every file that is read."""
        return [*([self.workload] if self.workload else []), *self.recorded]

    def folder(self, test: str) -> Path:
        """Where the report of a test goes."""
        return (self.report or Path()) / f"by-{test}"


def _check(asked: _Asked) -> None:
    """Refuse what cannot be written before anything is read."""
    from hespas.api.validation import check_recorded
    from hespas.files.output import check_destination
    from hespas.validators.calibration import check_models_folder, models_folder

    for name in asked.estimators:
        if name not in _FITTED:
            raise UsageError(f"--estimator {name}: nothing to fit", hint=f"one of {', '.join(_FITTED)}")
    check_recorded(asked.measured, asked.tables, asked.workload)
    if asked.out.suffix != ".toml":
        raise UsageError("a hardware file ends in .toml", path=str(asked.out), hint="--out my-device.toml")
    check_once(asked.recorded)
    reads: dict[str, list[Path]] = {"an input": asked.inputs, "--hardware": hardware_files(asked.hardware)}
    if asked.report:
        from hespas.validators.accuracy.report.folder import REPORT_FILES, check_folder

        folders = [asked.folder(test) for test in asked.tests or ("shape",)]
        files = [folder / name for folder in folders for name in REPORT_FILES]
        for file in files:
            check_apart("--report", file, reads)
        for folder in folders:
            check_folder(folder, overwrite=asked.overwrite)
        reads["--report"] = files
    check_apart("--out", asked.out, reads)
    check_destination(asked.out, overwrite=asked.overwrite)
    check_reports({"--json": asked.json_file}, {**reads, "--out": [asked.out]}, overwrite=asked.overwrite)
    if "learned" in asked.estimators or _names_models(asked.hardware):
        models = {"the folder of learned models": [models_folder(asked.out)]}
        for option, written in (("--report", asked.report), ("--json", asked.json_file)):
            if written:
                check_apart(option, written, models)
        check_models_folder(asked.out, overwrite=asked.overwrite)


def _names_models(hardware: str) -> bool:
    """Whether a hardware file names learned models of its own, which the new one will keep."""
    from hespas.hardware import load_device

    return bool(load_device(hardware).learned_models)


def _calibrated(
    asked: _Asked, options: tuple[str, int, str], progress: bool | None, diagnostics: Diagnostics
) -> CalibrationReport:
    from hespas import api
    from hespas.validators.calibration import FitMemory

    split, seed, date = options
    memory = FitMemory.beside(asked.out)
    if memory.folder.is_dir():
        print_message(f"note: going on from an interrupted run: {memory.folder}")
    with progress_bar("fitting", progress) as callback:
        return api.calibrate(
            asked.hardware,
            profiles=asked.measured,
            table=asked.tables,
            workload=asked.workload,
            estimator=asked.estimators,
            split=split,
            test_by=asked.tests,
            seed=seed,
            date=date,
            memory=memory,
            progress=_counting(callback),
            diagnostics=diagnostics,
        )


def _counting(callback: Callable[[int, int], None] | None) -> Callable[[int, int, str], None] | None:
    """A callback that draws how far the present step is; its name has no place on the bar."""
    if callback is None:
        return None
    return lambda done, total, _: callback(done, total)


def _show(done: Calibration) -> None:
    """Errors on what was left out, then the fits."""
    from hespas.validators.calibration import TESTS

    if is_quiet():
        return
    for test in done.held_out:
        emit(
            f"held out by {test.by}: {counted(test.count, 'row')}, fits on {test.fitted:,} others; "
            f"{TESTS[test.by]}"
        )
        show_summary(test.accuracy)
    rows = [
        (
            " ".join(part for part in fit.key if part) if fit.kind != "*" else "whole chip",
            fit.form,
            count_text(fit.samples),
            count_text(max(fit.error.n, 0)),
            *map(percent, (fit.error.mape, fit.error.median_ape, fit.error.p90_ape)),
            signed(fit.error.bias),
            percent(fit.error.before_mape),
        )
        for fit in done.fits
    ]
    rows += [
        (
            f"learned {row.kind} {row.scheme} ({model.card.name})",
            f"{model.card.training.trees} trees",
            count_text(model.card.training.rows),
            count_text(row.n),
            *map(_percent, (row.mape, row.median_ape, row.p90_ape)),
            "" if row.bias is None else signed(row.bias),
            _percent(row.before_mape),
        )
        for model in done.models
        for row in model.card.errors
    ]
    titles = ("fit", "form", "samples", "unseen", "MAPE", "median", "P90", "bias", "before")
    emit(table_text(titles, rows, left=(0, 1)))


def _percent(share: float | None) -> str:
    return "" if share is None else percent(share)


def _write(asked: _Asked, report: CalibrationReport) -> None:
    """Documents first: once the hardware file is there, all is."""
    from hespas.files.output import once_placed
    from hespas.validators.calibration import FitMemory, models_folder

    if asked.json_file:
        write_document(report.to_json(), asked.json_file, overwrite=asked.overwrite)
    done = report.details
    if asked.report:
        _write_reports(asked, done)
    report.write(asked.out, overwrite=asked.overwrite)
    once_placed(FitMemory.beside(asked.out).forget)
    rows = sum(table.fitted for table in done.tables)
    parts = [counted(len(done.fits), "fit")] if done.fits else []
    if done.models:
        parts.append(f"{counted(len(done.models), 'learned model')} in {models_folder(asked.out)}")
    emit(f"{asked.out}: {' and '.join(parts)} of {done.device.name} from {counted(rows, 'row')}")
    if done.kept_models:
        names = ", ".join(model.card.name for model in done.kept_models)
        emit(f"learned models kept from {asked.hardware}: {names}")


def _write_reports(asked: _Asked, done: Calibration) -> None:
    from math import nan

    from hespas.validators.accuracy import Thresholds
    from hespas.validators.accuracy.report.folder import write_report

    none = Thresholds(max_mape=nan, max_e2e=nan, min_coverage=nan)
    for test in done.held_out:
        write_report(
            test.accuracy,
            none,
            asked.folder(test.by),
            overwrite=asked.overwrite,
            hardware=[asked.hardware],
        )
