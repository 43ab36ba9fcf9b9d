"""``hespas-validate calibrate``: fits of hardware files, shapes to measure next, factors on steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

from hespas.api.io import check_once
from hespas.api.validation import calibrate as fit_device
from hespas.api.validation import suggest_shapes
from hespas.cli.accuracy import print_summary
from hespas.cli.command import Call, command
from hespas.cli.destinations import check_apart, check_reports, check_suffix
from hespas.cli.terminal import (
    emit,
    is_quiet,
    percent,
    print_message,
    progress_bar,
    report_diagnostics,
    signed,
)
from hespas.graph.errors import UsageError
from hespas.graph.hints import Option, options_of
from hespas.report.tables import Column, columns, table_from_rows
from hespas.report.texts import counted

if TYPE_CHECKING:
    from hespas.validators.calibration import Calibration

__all__ = ["calibrate"]

_END_TO_END_PARAMETERS = frozenset(
    {"hardware", "out", "table", "estimator", "end_to_end", "overwrite", "progress", "max_input_bytes"}
    | {"loudness", "debug", "json_file"}
)
"""Parameters that ``--end-to-end`` reads."""

_STEP_FACTOR_TITLES: Mapping[str, str | Column] = {
    "framework": "framework",
    "phase": "phase",
    "rows": "steps",
    "workloads": "workloads",
    "ratio": Column("measured/predicted", kind="number", write="{:.3f}".format),
    "share": Column("applied", kind="share", write="{:.0%}".format),
    "factor": Column("factor", kind="number", write="{:.3f}".format),
    "std_error": Column("std error", kind="number", write="{:.3f}".format),
    "before_mape": Column("error before", kind="share"),
    "after_mape": Column("left out", kind="share"),
}
"""Columns of the printed table of step factors."""

_Out = Annotated[
    Path,
    Option(
        "Write the hardware file; with --suggest a .csv, with --end-to-end also a .json.",
        metavar="FILE.toml",
        access="writes",
    ),
]
_Report = Annotated[
    Path | None,
    Option(
        "Write the errors before and after the fit as HTML, Markdown and CSV: DIR/by-shape/...",
        metavar="DIR",
        access="folder",
    ),
]
_EndToEnd = Annotated[
    bool,
    Option(
        "Fit factors to one --table of measured steps: on whole steps for --out FILE.toml, on their "
        "components for --out FILE.json."
    ),
]


@command(fit_device, suggest_shapes, progress="fitting")
def calibrate(call: Call, *, out: _Out, report: _Report = None, end_to_end: _EndToEnd = False) -> None:
    """Fit estimators to measurements and write a hardware file with the fits.

    hespas-validate calibrate --hardware H100-SXM --table measured.csv --out my-h100.toml
    hespas-validate calibrate --hardware H100-SXM --suggest 50 --out shapes.csv
    hespas-validate calibrate --hardware H100-SXM --end-to-end --table steps.csv --out my-h100.toml
    """
    if end_to_end:
        _calibrate_end_to_end(call, out)
    elif call["count"] is not None or call["kind"] or call["dtype"]:
        _suggest_shapes(call, out)
    else:
        _fit(call, out, report)


def _check_out(call: Call, out: Path, suffix: str, example: str) -> None:
    """Raise an error for an output file that cannot be written, before anything is read."""
    from hespas.files.output import check_destination

    check_suffix(out, suffix, example)
    check_once([*call.several("profiles"), *call.several("table")])
    check_apart("--out", out, call.files("reads"))
    check_destination(out, overwrite=call.overwrite)


def _fit(call: Call, out: Path, report: Path | None) -> None:
    """Fit estimators and write the results. The hardware file is written last, so that it exists only if all
    other documents were written.
    """
    from hespas import api
    from hespas.api.validation import check_recorded
    from hespas.files.output import after_placing
    from hespas.fitting.approaches import FitMemory
    from hespas.hardware import load_device
    from hespas.validators.accuracy import Thresholds
    from hespas.validators.accuracy.report.folder import (
        REPORT_FILES,
        ReportInputs,
        check_folder,
        write_report,
    )
    from hespas.validators.calibration import check_models_folder, models_folder

    profiles, tables, estimators = (call.several(name) for name in ("profiles", "table", "estimator"))
    check_recorded(profiles, tables, call["workload"], estimators)
    _check_out(call, out, ".toml", "my-device.toml")
    tests = [f"by-{test}" for test in call["test_by"] or ("shape",)]

    def check_folders(folder: Path, names: Sequence[str], *, overwrite: bool) -> None:
        for test in tests:
            check_folder(folder / test, names, overwrite=overwrite)

    call.check_report([f"{test}/{name}" for test in tests for name in REPORT_FILES], check_folders)
    if "learned" in estimators or load_device(call["hardware"]).learned_models:
        models = {"the folder of learned models": [models_folder(out)]}
        for option, written in (("--report", report), ("--json", call.json_file)):
            if written:
                check_apart(option, written, models)
        check_models_folder(out, overwrite=call.overwrite)
    call.check_outputs()
    memory = FitMemory.beside(out)
    if memory.folder.is_dir():
        print_message(f"note: continuing an interrupted run: {memory.folder}")
    with progress_bar("fitting", call.texts["progress"]) as callback:

        def progress(count: int, total: int, _: object) -> None:
            if callback is not None:
                callback(count, total)

        arguments: dict[str, Any] = call.arguments(fit_device)
        arguments |= {"estimator": estimators, "memory": memory, "progress": callback and progress}
        done = api.calibrate(**arguments)
    report_diagnostics(call.diagnostics, profiles[0] if profiles else "")
    _print_fits(done.details)
    call.write_json(done.to_json())
    if report:
        none = Thresholds(max_mape=nan, max_e2e=nan, min_coverage=nan)
        for test in done.details.held_out:
            folder = report / f"by-{test.by}"
            inputs = ReportInputs.of(test.accuracy, hardware=[call["hardware"]])
            write_report(test.accuracy, none, folder, inputs, overwrite=call.overwrite)
    done.write(out, overwrite=call.overwrite)
    after_placing(memory.forget)
    details = done.details
    rows = sum(table.fitted for table in details.tables)
    parts = [counted(len(details.fits), "fit")] if details.fits else []
    if details.models:
        parts.append(f"{counted(len(details.models), 'learned model')} in {models_folder(out)}")
    emit(f"{out}: {' and '.join(parts)} of {details.device.name} from {counted(rows, 'row')}")
    if details.kept_models:
        names = ", ".join(model.card.name for model in details.kept_models)
        emit(f"learned models kept from {call['hardware']}: {names}")


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
            fit.samples,
            max(fit.error.n, 0),
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
            model.card.training.rows,
            row.n,
            *map(_percent, (row.mape, row.median_ape, row.p90_ape)),
            "" if row.bias is None else signed(row.bias),
            _percent(row.before_mape),
        )
        for model in done.models
        for row in model.card.errors
    ]
    header = (
        *columns("text", "fit", "form"),
        *columns("count", "samples", "held out"),
        *columns("share", "MAPE", "median", "P90", "bias", "before", write=str),
    )
    emit(table_from_rows(header, rows).to_text())


def _percent(share: float | None) -> str:
    return "" if share is None else percent(share)


def _suggest_shapes(call: Call, out: Path) -> None:
    """Write shapes to measure, and print how they were chosen."""
    from hespas import api

    if call["count"] is None:
        raise UsageError("--kind and --dtype require --suggest", hint="add --suggest N")
    of_fits = ({*options_of(fit_device)} - {*options_of(suggest_shapes)}) | {"report"}
    given = [call.options[name].flag for name in call.options if name in of_fits and call.is_written(name)]
    if given:
        raise UsageError(
            f"--suggest excludes {' and '.join(given)}",
            hint="leave it out, and give measurements with --table",
        )
    _check_out(call, out, ".csv", "shapes.csv")
    report = call.run(api.suggest_shapes)
    report_diagnostics(call.diagnostics, call.subject)
    call.write_json(report.to_json())
    report.write(out, overwrite=call.overwrite)
    done = report.details
    from hespas.validators.calibration import TIME_COLUMN

    if not is_quiet():
        rows = [
            (
                row.kind,
                row.dtype,
                row.shapes,
                row.candidates,
                row.measured,
                row.disagreement,
                ", ".join(row.models),
            )
            for row in done.classes
        ]
        header = (
            *columns("text", "kind", "dtype"),
            *columns("count", "shapes", "of", "measured"),
            *columns("number", "devices disagree by", write="{:.2f}x".format, unknown=""),
            *columns("text", "sizes from"),
        )
        emit(table_from_rows(header, rows).to_text())
        emit(
            "shapes are sorted by how many uncovered sizes they represent, weighted by the uncertainty "
            "of the models; measure as many as you like, from the top"
        )
    emit(
        f"{out}: {counted(len(done.frame), 'shape')} to measure on {done.device.name}, most valuable "
        f"first; fill in {TIME_COLUMN}, then: hespas-validate calibrate --hardware {quote(call['hardware'])} "
        f"--table {quote(str(out))} --out FILE.toml"
    )


def _calibrate_end_to_end(call: Call, out: Path) -> None:
    """Fit factors on predicted steps of a device, and write them: factors on whole steps to a hardware file,
    factors on components to a file for ``league --factors``.
    """
    for name in call.texts:
        if call.is_written(name) and name not in _END_TO_END_PARAMETERS:
            raise UsageError(f"--end-to-end excludes {call.spelling(name)}", hint="leave it out")
    tables, estimators = call.several("table"), list[str](call.texts["estimator"] or ())
    if len(estimators) > 1:
        raise UsageError("--end-to-end takes one --estimator", hint="run once per estimator")
    if len(tables) != 1:
        raise UsageError("--end-to-end requires one --table of runs", hint="--table runs.csv")
    check_suffix(out, (".toml", ".json"), "my-device.toml")
    from hespas import api

    keywords: dict[str, Any] = {"estimator": estimators[0]} if estimators else {}
    keywords["diagnostics"] = call.diagnostics
    if out.suffix == ".toml":
        _check_out(call, out, ".toml", "my-device.toml")
        call.check_outputs()
        with progress_bar("predicting", call.texts["progress"]) as callback:
            steps = api.calibrate_steps(call["hardware"], tables[0], progress=callback, **keywords)
        report_diagnostics(call.diagnostics, tables[0])
        call.write_json(steps.to_json())
        steps.write(out, overwrite=call.overwrite)
        if not is_quiet():
            emit(steps.table().select(_STEP_FACTOR_TITLES).to_text())
        emit(f"{out}: {steps.headline()}")
        return
    if call.json_file:
        raise UsageError("--end-to-end excludes --json", hint="leave it out, or write --out FILE.toml")
    check_reports({"--out": out}, call.files("reads"), overwrite=call.overwrite)
    with progress_bar("predicting", call.texts["progress"]) as callback:
        done = api.calibrate_end_to_end(call["hardware"], tables[0], progress=callback, **keywords)
    report_diagnostics(call.diagnostics, tables[0])
    api.write_json(done.to_json(), out, overwrite=call.overwrite)
    rows = [
        (row.source, row.component, row.factor, row.std_error, row.prior_std, row.share, row.n)
        for row in done.after.factors
        if row.accelerator == done.hardware
    ]
    header = (
        *columns("text", "source", "component"),
        *columns("number", "factor", "std error", "prior", write="{:.3f}".format),
        *columns("share", "share", write=percent, unknown="-"),
        *columns("count", "rows"),
    )
    emit(table_from_rows(header, rows).to_text())
    emit(done.headline())
