"""``hespas-validate calibrate``: fits of hardware files, shapes to measure next, end-to-end factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isnan, nan
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from hespas.cli import options
from hespas.cli.accuracy import percent, print_summary, signed
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
from hespas.cli.terminal import emit, is_quiet, print_message, progress_bar, report_diagnostics
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import UsageError
from hespas.report.tables import table_text
from hespas.report.texts import count_text, counted

if TYPE_CHECKING:
    from hespas.api import CalibrationReport
    from hespas.validators.calibration import Calibration

__all__ = ["calibrate"]


_FITTED = ("calibrated", "systolic", "learned")


class _HoldOut(StrEnum):
    """Unit that is left out to test the fits."""

    SHAPE = "shape"
    RECORDING = "recording"
    OP = "op"
    HARDWARE = "hardware"


_EstimatorOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Fit this estimator; repeatable (default: calibrated). calibrated fits the roofline and the "
        "collectives, systolic the times of a systolic array, learned decision trees (written to the folder "
        "FILE.learned). With --end-to-end: the estimator that predicts the steps (default: composite).",
    ),
]
_SplitOption = Annotated[
    str, typer.Option(metavar="NAME", help="Fit on rows of this split (default: all except held-out rows).")
]
_ReportOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        parser=report_folder,
        help="Write the errors before and after the fit as HTML, Markdown and CSV: DIR/by-shape/...",
    ),
]

_SeedOption = Annotated[
    int, typer.Option("--seed", min=0, max=2**32 - 1, metavar="N", help="Set the random seed.")
]
_SuggestOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Write N shapes to measure next, not in --table, to --out FILE.csv; fit nothing.",
    ),
]
_KindOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KIND", help="With --suggest: suggest shapes of this kind; repeatable (default: matmul)."
    ),
]
_DtypeOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DTYPE",
        help="With --suggest: suggest shapes of this dtype; repeatable (default: fastest of bf16, f16 and "
        "f32_full).",
    ),
]
_EndToEndOption = Annotated[
    bool,
    typer.Option(
        "--end-to-end",
        help="Fit correction factors of whole steps to one --table of runs; writes --out FILE.json.",
    ),
]
_DateOption = Annotated[
    str,
    typer.Option("--date", metavar="YYYY-MM-DD", help="Set the date in the file (default: today)."),
]


def calibrate(
    context: typer.Context,
    hardware: Annotated[
        str, options.hardware_option("Calibrate this device; its data sheet and other fits are kept.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE.toml",
            help="Write the hardware file; with --suggest a .csv, with --end-to-end a .json.",
        ),
    ],
    measured: Annotated[
        list[Path] | None, typer.Option(metavar="P", help="Read a profile from the device; repeatable.")
    ] = None,
    table: options.Tables = None,
    workload: options.Workload = None,
    estimator: _EstimatorOption = None,
    allow_programs: options.AllowPrograms = False,
    split: _SplitOption = "",
    test_by: Annotated[
        list[_HoldOut] | None,
        typer.Option(help="Hold out units of this kind to test the fits; repeatable (default: shape)."),
    ] = None,
    suggest: _SuggestOption = None,
    kind: _KindOption = None,
    dtype: _DtypeOption = None,
    end_to_end: _EndToEndOption = False,
    seed: _SeedOption = 0,
    date: _DateOption = "",
    json_file: options.Json = None,
    report: _ReportOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing output files.")] = False,
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
    """Fit estimators to measurements and write a hardware file with the fits.

    hespas-validate calibrate --hardware H100-SXM --table measured.csv --out my-h100.toml
    hespas-validate calibrate --hardware H100-SXM --suggest 50 --out shapes.csv
    hespas-validate calibrate --hardware H100-SXM --end-to-end --table runs.csv --out factors.json
    """
    fit_options = {
        "--estimator": estimator, "--measured": measured, "--workload": workload, "--split": split,
        "--test-by": test_by, "--date": date, "--report": report,
    }  # fmt: skip
    given = [name for name, value in fit_options.items() if value]
    if end_to_end:
        _calibrate_end_to_end(
            hardware,
            table or [],
            estimators=estimator or [],
            out=out,
            context=context,
            overwrite=overwrite,
            progress=progress,
            debug=debug,
        )
        return
    if suggest is not None or kind or dtype:
        _suggest_shapes(
            hardware,
            suggest,
            tables=table or [],
            kinds=kind or [],
            dtypes=dtype or [],
            seed=seed,
            out=out,
            json_file=json_file,
            overwrite=overwrite,
            fit_options=given,
            debug=debug,
        )
        return
    diagnostics = Diagnostics()
    settings = _CalibrationOptions(
        hardware=hardware,
        out=out,
        measured=measured or [],
        tables=table or [],
        workload=workload,
        estimators=tuple(dict.fromkeys(estimator or _FITTED[:1])),
        tests=None if test_by is None else tuple(unit.value for unit in test_by),
        json_file=json_file,
        report=report,
        overwrite=overwrite,
    )
    reads, writes = [hardware, *map(str, settings.inputs)], [out, report]
    with command_line(debug, diagnostics, settings.first, documents=[json_file], reads=reads, writes=writes):
        settings.check()
        from hespas import api
        from hespas.fitting.approaches import FitMemory

        memory = FitMemory.beside(out)
        if memory.folder.is_dir():
            print_message(f"note: continuing an interrupted run: {memory.folder}")
        with progress_bar("fitting", progress) as callback:
            done = api.calibrate(
                hardware,
                profiles=settings.measured,
                table=settings.tables,
                workload=workload,
                estimator=settings.estimators,
                split=split,
                test_by=settings.tests,
                seed=seed,
                date=date,
                memory=memory,
                progress=None if callback is None else lambda count, total, _: callback(count, total),
                diagnostics=diagnostics,
            )
        report_diagnostics(diagnostics, settings.measured[0] if settings.measured else "")
        _print_fits(done.details)
        _write(settings, done)


_END_TO_END_PARAMETERS = frozenset(
    {"hardware", "out", "table", "estimator", "end_to_end", "overwrite", "progress", "max_input_bytes"}
    | {"loudness", "debug"}
)
"""Parameters that ``--end-to-end`` reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CalibrationOptions:
    """Inputs and outputs of a calibration."""

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
        """Return the files of measurements."""
        return [*self.measured, *self.tables]

    @property
    def first(self) -> str:
        """Return the first file of measurements; empty without one."""
        return str(self.recorded[0]) if self.recorded else ""

    @property
    def inputs(self) -> list[Path]:
        """Return all input files."""
        return [*([self.workload] if self.workload else []), *self.recorded]

    def folder(self, test: str) -> Path:
        """Return the folder of the report of a test."""
        return (self.report or Path()) / f"by-{test}"

    def check(self) -> None:
        """Raise an error, before anything is read, for outputs that cannot be written."""
        from hespas.api.validation import check_recorded
        from hespas.files.output import check_destination
        from hespas.hardware import load_device
        from hespas.validators.calibration import check_models_folder, models_folder

        for name in self.estimators:
            if name not in _FITTED:
                raise UsageError(
                    f"--estimator {name}: expected one of {', '.join(_FITTED)}", hint="--estimator calibrated"
                )
        check_recorded(self.measured, self.tables, self.workload)
        if self.out.suffix != ".toml":
            raise UsageError("--out: expected a .toml file", path=str(self.out), hint="--out my-device.toml")
        check_once(self.recorded)
        reads: dict[str, list[Path]] = {"an input": self.inputs, "--hardware": hardware_files(self.hardware)}
        if self.report:
            from hespas.validators.accuracy.report.folder import REPORT_FILES, check_folder

            folders = [self.folder(test) for test in self.tests or ("shape",)]
            files = [folder / name for folder in folders for name in REPORT_FILES]
            for file in files:
                check_apart("--report", file, reads)
            for folder in folders:
                check_folder(folder, overwrite=self.overwrite)
            reads["--report"] = files
        check_apart("--out", self.out, reads)
        check_destination(self.out, overwrite=self.overwrite)
        check_reports({"--json": self.json_file}, {**reads, "--out": [self.out]}, overwrite=self.overwrite)
        if "learned" in self.estimators or load_device(self.hardware).learned_models:
            models = {"the folder of learned models": [models_folder(self.out)]}
            for option, written in (("--report", self.report), ("--json", self.json_file)):
                if written:
                    check_apart(option, written, models)
            check_models_folder(self.out, overwrite=self.overwrite)


def _print_fits(done: Calibration) -> None:
    """Print the errors on held-out rows, then the fits."""
    from hespas.validators.calibration import TESTS

    if is_quiet():
        return
    for test in done.held_out:
        emit(
            f"held out by {test.by}: {counted(test.count, 'row')}, fits on the other {test.fitted:,}; "
            f"{TESTS[test.by]}"
        )
        print_summary(test.accuracy)
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
    titles = ("fit", "form", "samples", "held out", "MAPE", "median", "P90", "bias", "before")
    emit(table_text(titles, rows, left=(0, 1)))


def _percent(share: float | None) -> str:
    return "" if share is None else percent(share)


def _write(settings: _CalibrationOptions, report: CalibrationReport) -> None:
    """Write the documents, then the hardware file, so that it exists only if all others do."""
    from hespas.files.output import after_placing
    from hespas.fitting.approaches import FitMemory
    from hespas.validators.calibration import models_folder

    if settings.json_file:
        write_document(report.to_json(), settings.json_file, overwrite=settings.overwrite)
    done = report.details
    if settings.report:
        from hespas.validators.accuracy import Thresholds
        from hespas.validators.accuracy.report.folder import write_report

        none = Thresholds(max_mape=nan, max_e2e=nan, min_coverage=nan)
        for test in done.held_out:
            folder = settings.folder(test.by)
            write_report(
                test.accuracy, none, folder, overwrite=settings.overwrite, hardware=[settings.hardware]
            )
    report.write(settings.out, overwrite=settings.overwrite)
    after_placing(FitMemory.beside(settings.out).forget)
    rows = sum(table.fitted for table in done.tables)
    parts = [counted(len(done.fits), "fit")] if done.fits else []
    if done.models:
        parts.append(f"{counted(len(done.models), 'learned model')} in {models_folder(settings.out)}")
    emit(f"{settings.out}: {' and '.join(parts)} of {done.device.name} from {counted(rows, 'row')}")
    if done.kept_models:
        names = ", ".join(model.card.name for model in done.kept_models)
        emit(f"learned models kept from {settings.hardware}: {names}")


def _suggest_shapes(
    hardware: str,
    count: int | None,
    *,
    tables: Sequence[Path],
    kinds: Sequence[str],
    dtypes: Sequence[str],
    seed: int,
    out: Path,
    json_file: Path | None,
    overwrite: bool,
    fit_options: Sequence[str],
    debug: bool,
) -> None:
    """Write ``count`` shapes to ``out``, and print how they were chosen. ``fit_options`` are options on the
    command line that only a fit reads.
    """
    diagnostics = Diagnostics()
    source = str(tables[0]) if tables else ""
    reads = [hardware, *map(str, tables)]
    with command_line(debug, diagnostics, source, documents=[json_file], reads=reads, writes=[out]):
        from hespas import api
        from hespas.files.output import check_destination

        if count is None:
            raise UsageError("--kind and --dtype require --suggest", hint="add --suggest N")
        if fit_options:
            raise UsageError(
                f"--suggest excludes {' and '.join(fit_options)}",
                hint="leave it out, and give measurements with --table",
            )
        if out.suffix != ".csv":
            raise UsageError("--out: expected a .csv file", path=str(out), hint="--out shapes.csv")
        check_once(tables)
        taken = {"an input": tables, "--hardware": hardware_files(hardware)}
        check_apart("--out", out, taken)
        check_destination(out, overwrite=overwrite)
        check_reports({"--json": json_file}, {**taken, "--out": [out]}, overwrite=overwrite)
        report = api.suggest_shapes(
            hardware, count, table=tables, kind=kinds, dtype=dtypes, seed=seed, diagnostics=diagnostics
        )
        report_diagnostics(diagnostics, source)
        if json_file:
            write_document(report.to_json(), json_file, overwrite=overwrite)
        report.write(out, overwrite=overwrite)
        done = report.details
        from hespas.validators.calibration import TIME_COLUMN

        if not is_quiet():
            rows = [
                (
                    row.kind,
                    row.dtype,
                    count_text(row.shapes),
                    count_text(row.candidates),
                    count_text(row.measured),
                    "" if isnan(row.disagreement) else f"{row.disagreement:.2f}x",
                    ", ".join(row.models),
                )
                for row in done.classes
            ]
            titles = ("kind", "dtype", "shapes", "of", "measured", "devices disagree by", "sizes from")
            emit(table_text(titles, rows, left=(0, 1, 6)))
            emit(
                "shapes are sorted by how many uncovered sizes they represent, weighted by the uncertainty "
                "of the models; measure as many as you like, from the top"
            )
        emit(
            f"{out}: {counted(len(done.frame), 'shape')} to measure on {done.device.name}, most valuable "
            f"first; fill in {TIME_COLUMN}, then: hespas-validate calibrate --hardware {quote(hardware)} "
            f"--table {quote(str(out))} --out FILE.toml"
        )


def _calibrate_end_to_end(
    hardware: str,
    tables: Sequence[Path],
    *,
    estimators: Sequence[str],
    out: Path,
    context: typer.Context,
    overwrite: bool,
    progress: bool | None,
    debug: bool,
) -> None:
    """Fit correction factors of the components of steps on a device."""
    diagnostics = Diagnostics()
    with command_line(debug, diagnostics, hardware, documents=[out], reads=[hardware, *map(str, tables)]):
        for parameter in context.command.params:
            source = context.get_parameter_source(parameter.name or "")
            is_given = source is not None and source.name == "COMMANDLINE"
            if is_given and parameter.name not in _END_TO_END_PARAMETERS:
                raise UsageError(f"--end-to-end excludes {parameter.opts[0]}", hint="leave it out")
        if len(estimators) > 1:
            raise UsageError("--end-to-end takes one --estimator", hint="run once per estimator")
        if len(tables) != 1:
            raise UsageError("--end-to-end requires one --table of runs", hint="--table runs.csv")
        if out.suffix != ".json":
            raise UsageError("--out: expected a .json file", path=str(out), hint="--out factors.json")
        taken = {"--table": list(tables), "--estimator": estimator_files(*estimators)}
        check_reports({"--out": out}, taken, overwrite=overwrite)
        from hespas import api

        with progress_bar("predicting", progress) as callback:
            done = api.calibrate_end_to_end(
                hardware,
                tables[0],
                estimator=next(iter(estimators), "composite"),
                progress=callback,
                diagnostics=diagnostics,
            )
        report_diagnostics(diagnostics, tables[0])
        write_document(done.to_json(), out, overwrite=overwrite)
        rows = [
            (row.source, row.component, f"{row.factor:.3f}", f"{row.std_error:.3f}",
             f"{row.prior_std:.3f}", percent(row.share), count_text(row.n))
            for row in done.after.factors
            if row.accelerator == done.hardware
        ]  # fmt: skip
        titles = ("source", "component", "factor", "std error", "prior", "share", "rows")
        emit(table_text(titles, rows, left=(0, 1)))
        emit(done.headline())
