"""``hespas-validate calibrate``: a hardware file fitted on measurements, with its error on unseen ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hespas.cli.accuracy import TablesOption, read_tables, write_document
from hespas.cli.accuracy_text import percent, show_summary, signed
from hespas.cli.reports import check_reports
from hespas.cli.session import (
    DebugOption,
    ProgressOption,
    command_line,
    emit,
    progress_bar,
    say,
    say_diagnostics,
)
from hespas.cli.text import count_text, counted, table_text
from hespas.graph.errors import UsageError

if TYPE_CHECKING:
    from hespas.estimators.measurements import Measurements
    from hespas.graph import Diagnostics
    from hespas.hardware import Device
    from hespas.validators.calibration import Calibration

__all__ = ["calibrate"]


class _Test(StrEnum):
    SHAPE = "shape"
    OP = "op"
    HARDWARE = "hardware"


def calibrate(
    hardware: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="The device: data sheet, and fits to keep.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE.toml", help="The hardware file to write.")],
    measured: Annotated[
        list[Path] | None, typer.Option(metavar="P", help="A profile taken on the device; repeatable.")
    ] = None,
    table: TablesOption = None,
    split: Annotated[
        str,
        typer.Option(metavar="NAME", help="Fit on these rows (default: all but those kept for testing)."),
    ] = "",
    test_by: Annotated[
        list[_Test] | None,
        typer.Option(help="What to leave out to test the fits; repeatable (default shape)."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of all that is drawn.")] = 0,
    date: Annotated[
        str, typer.Option(metavar="YYYY-MM-DD", help="Date written into the file (default today).")
    ] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write fits and errors as JSON.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write before and after as HTML, Markdown and CSV: DIR/by-shape/..."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace FILE.toml and files of DIR.")
    ] = False,
    progress: Annotated[bool | None, ProgressOption] = None,
    debug: Annotated[bool, DebugOption] = False,
) -> None:
    """Fit the calibrated estimator on measurements and write a hardware file that holds the fits.

    hespas-validate calibrate --hardware H100-SXM --table measured.csv --out my-h100.toml
    """
    from hespas.graph.diagnostics import Diagnostics

    diagnostics = Diagnostics()
    asked = _Asked(
        hardware=hardware,
        out=out,
        measured=measured or [],
        tables=table or [],
        tests=None if test_by is None else tuple(each.value for each in test_by),
        json_file=json_file,
        report=report,
        overwrite=overwrite,
    )
    with command_line(debug, diagnostics, str(asked.inputs[0]) if asked.inputs else ""):
        _check(asked)
        done = _calibrated(asked, (split, seed, date), progress, diagnostics)
        say_diagnostics(diagnostics, asked.measured[0] if asked.measured else "")
        _show(done)
        _write(asked, done)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What is fitted on, and what is written."""

    hardware: str
    out: Path
    measured: list[Path]
    tables: list[Path]
    tests: tuple[str, ...] | None
    json_file: Path | None
    report: Path | None
    overwrite: bool

    @property
    def inputs(self) -> list[Path]:
        """Every file of measurements."""
        return [*self.measured, *self.tables]

    def folder(self, test: str) -> Path:
        """Where the report of a test goes."""
        return (self.report or Path()) / f"by-{test}"


def _check(asked: _Asked) -> None:
    """Refuse what cannot be written before anything is read."""
    from hespas.converters.output import check_destination

    if not asked.inputs:
        raise UsageError("nothing to fit on", hint="give --table TABLE or --measured PROFILE")
    if asked.out.suffix != ".toml":
        raise UsageError("a hardware file ends in .toml", path=str(asked.out), hint="--out my-device.toml")
    reads = {"an input": asked.inputs, "--hardware": [Path(asked.hardware)]}
    check_reports({"--out": asked.out, "--json": asked.json_file}, reads)
    check_destination(asked.out, overwrite=asked.overwrite)
    if asked.report:
        from hespas.validators.accuracy.folder import check_folder

        for test in asked.tests or ("shape",):
            check_folder(asked.folder(test), overwrite=asked.overwrite)


def _calibrated(
    asked: _Asked, options: tuple[str, int, str], progress: bool | None, diagnostics: Diagnostics
) -> Calibration:
    from hespas.hardware import load_device
    from hespas.validators.calibration import FitMemory
    from hespas.validators.calibration import calibrate as run

    split, seed, date = options
    device = load_device(asked.hardware)
    tables = read_tables(asked.tables, progress)
    if asked.measured:
        tables.append(_recorded(asked.measured, device, diagnostics))
    memory = FitMemory.beside(asked.out)
    if memory.folder.is_dir():
        say(f"note: going on from an interrupted run: {memory.folder}")
    with progress_bar("fitting", progress) as callback:
        return run(
            tables,
            device,
            split=split,
            tests=asked.tests,
            seed=seed,
            fitted=date,
            inputs=[str(path) for path in asked.inputs],
            memory=memory,
            progress=_counting(callback),
            diagnostics=diagnostics,
        )


def _counting(callback: Callable[[int, int], None] | None) -> Callable[[int, int, str], None] | None:
    """A callback that draws how far the present step is; its name has no place on the bar."""
    if callback is None:
        return None
    return lambda done, total, _: callback(done, total)


def _recorded(paths: list[Path], device: Device, diagnostics: Diagnostics) -> Measurements:
    """The operations of all profiles as one table."""
    from hespas import api
    from hespas.validators.calibration import joined, measurements_of

    parts: list[Measurements] = []
    for path in paths:
        profile = api.read(path, diagnostics=diagnostics)
        parts.append(measurements_of(profile, device.name, diagnostics=diagnostics))
    return joined(parts, " ".join(part.name for part in parts))


def _show(done: Calibration) -> None:
    """Errors on what was left out, then the fits."""
    from hespas.validators.calibration import TESTS

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
        )
        for fit in done.fits
    ]
    titles = ("fit", "form", "samples", "unseen", "MAPE", "median", "P90", "bias")
    emit(table_text(titles, rows, left=(0, 1)))


def _write(asked: _Asked, done: Calibration) -> None:
    """Documents first: once the hardware file is there, all is."""
    from hespas.hardware import write_device
    from hespas.validators.calibration import FitMemory, calibration_json

    if asked.json_file:
        write_document(calibration_json(done, [str(path) for path in asked.inputs]), asked.json_file)
    if asked.report:
        _write_reports(asked, done)
    write_device(done.device, asked.out, overwrite=asked.overwrite)
    FitMemory.beside(asked.out).forget()
    rows = sum(table.fitted for table in done.tables)
    emit(f"{asked.out}: {counted(len(done.fits), 'fit')} of {done.device.name} from {counted(rows, 'row')}")


def _write_reports(asked: _Asked, done: Calibration) -> None:
    from math import nan

    from hespas.validators.accuracy import Thresholds
    from hespas.validators.accuracy.folder import write_report

    none = Thresholds(max_mape=nan, max_e2e=nan, min_coverage=nan)
    for test in done.held_out:
        write_report(
            test.accuracy,
            none,
            asked.folder(test.by),
            overwrite=asked.overwrite,
            hardware=[asked.hardware],
        )
