"""``hespas-validate league``: the step of every published run, predicted and beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hespas.cli import options
from hespas.cli.destinations import check_apart, check_reports, estimator_files, report_folder, write_document
from hespas.cli.session import command_line
from hespas.cli.terminal import emit, is_quiet, print_message, progress_bar, report_diagnostics
from hespas.cli.text import count_text, counted, table_text
from hespas.graph.errors import UsageError

if TYPE_CHECKING:
    from hespas.validators.league.document import League

__all__ = ["calibrate_end_to_end", "league"]

_Calibrate = Literal["none", "one-per-accelerator", "leave-group-out"]


def league(
    table: Annotated[
        Path,
        typer.Option(
            metavar="FILE.csv", help="Runs, a row each, with models.csv beside it: see docs/league.md."
        ),
    ] = Path("published_training.csv"),
    calibrate: Annotated[
        _Calibrate,
        typer.Option(help="On nothing, on one row of each accelerator and source, or on all other groups."),
    ] = "none",
    factors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="Those of calibrate --end-to-end, of other rows: fit nothing here."
        ),
    ] = None,
    estimator: Annotated[str, typer.Option(metavar="NAME", help="Times of kernels.")] = "composite",
    allow_programs: options.AllowPrograms = False,
    report: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=report_folder, help="Write a page, JSON and CSV into DIR."),
    ] = None,
    json_file: options.Json = None,
    overwrite: options.Overwrite = False,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Processes.")] = 2,
    progress: options.Progress = None,
    max_input_bytes: options.MaxInputBytes = None,
    loudness: options.Loudness = None,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """Predict the step of every run of a table from its settings, and judge it beside what was measured.

    hespas-validate league --table published_training.csv --calibrate leave-group-out --report league/
    """
    from hespas.graph.diagnostics import Diagnostics

    diagnostics = Diagnostics()
    reads = [table, *([factors] if factors else [])]
    with command_line(debug, diagnostics, str(table), documents=[json_file], reads=reads, writes=[report]):
        taken = {"--table": reads, "--estimator": estimator_files(estimator)}
        check_reports({"--json": json_file}, taken, overwrite=overwrite)
        if report:
            from hespas.validators.league.report import REPORT_FILES, check_folder

            taken["--json"] = [json_file] if json_file else []
            for name in REPORT_FILES:
                check_apart("--report", report / name, taken)
            check_folder(report, overwrite=overwrite)
        from hespas import api

        with progress_bar("predicting", progress) as callback:
            done = api.league(
                table,
                calibrate=calibrate,
                factors=factors,
                estimator=estimator,
                jobs=jobs,
                progress=callback,
                diagnostics=diagnostics,
            )
        report_diagnostics(diagnostics, table)
        if json_file:
            write_document(done.to_json(), json_file, overwrite=overwrite)
        if report:
            done.write(report, overwrite=overwrite)
        _show(done.details)


def _show(done: League) -> None:
    """What is not predicted, the errors, and what a decision needs."""
    from hespas.validators.league.document import refusals

    for reason, place, count in refusals(done.rows):
        first = place if count == 1 else f"the first is {place}"
        print_message(f"note: {counted(count, 'row')} not predicted ({first}): {reason}")
    assumed = sum(row.status == "assumed" for row in done.rows)
    if assumed:
        print_message(f"note: marked as assumed, since the table does not say all: {counted(assumed, 'row')}")
    untimed = sum("row.untimed" in row.row.predicted.assumptions for row in done.rows)
    if untimed:
        print_message(f"warning: kernels without a time count as none: {counted(untimed, 'row')}")
    beyond = sum(row.row.predicted.fits is False for row in done.rows)
    if beyond:
        print_message(
            f"warning: predicted peak memory beyond the memory of the device: {counted(beyond, 'row')}"
        )
    if is_quiet():
        return
    rows = [
        (each.by, each.value, count_text(each.n), *map(_percent, (each.mean_ape, each.median_ape)),
         _percent(each.p90_ape), f"{each.bias:+.1%}", _percent(each.interval_coverage))
        for each in done.groups
        if each.by in {"all", "source", "accelerator", "scale", "precision", "status"}
    ]  # fmt: skip
    rows += [
        ("baseline", each.name, count_text(each.n), *map(_percent, (each.mean_ape, each.median_ape)),
         _percent(each.p90_ape), "", "")
        for each in done.baselines
    ]  # fmt: skip
    titles = ("by", "value", "rows", "mean", "median", "P90", "bias", "inside")
    emit(table_text(titles, rows, left=(0, 1)))
    memory = done.memory
    if memory.n:
        errors = f"mean error {_percent(memory.mean_ape)}, median {_percent(memory.median_ape)}"
        emit(f"peak memory of {counted(memory.n, 'row')}: {errors}")
    found = [each.best_in_top_two for each in done.layouts]
    if found:
        emit(f"best layout among the predicted two best: {sum(found)} of {counted(len(found), 'set')}")


def _percent(share: float) -> str:
    return f"{share:.1%}"


def calibrate_end_to_end(
    hardware: str,
    tables: Sequence[Path],
    *,
    estimators: Sequence[str],
    out: Path,
    others: Sequence[str],
    overwrite: bool,
    progress: bool | None,
    debug: bool,
) -> None:
    """``hespas-validate calibrate --end-to-end``: factors of the parts of steps on a device."""
    from hespas.graph.diagnostics import Diagnostics

    diagnostics = Diagnostics()
    with command_line(debug, diagnostics, hardware, documents=[out], reads=[hardware, *map(str, tables)]):
        if others:
            raise UsageError(f"--end-to-end takes no {others[0]}", hint="leave it out")
        if len(estimators) > 1:
            raise UsageError("--end-to-end takes one --estimator", hint="fit the factors of each by itself")
        if len(tables) != 1:
            raise UsageError("--end-to-end needs one table of runs", hint="--table runs.csv")
        if out.suffix != ".json":
            raise UsageError("factors are written as .json", path=str(out), hint="--out factors.json")
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
            (each.source, each.component, f"{each.factor:.3f}", f"{each.std_error:.3f}",
             f"{each.prior_std:.3f}", _percent(each.share), count_text(each.n))
            for each in done.after.factors
            if each.accelerator == done.hardware
        ]  # fmt: skip
        titles = ("stack", "component", "factor", "std error", "prior", "share", "rows")
        emit(table_text(titles, rows, left=(0, 1)))
        emit(done.headline())
