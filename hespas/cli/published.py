"""``hespas-validate league`` and ``serving``: predictions of published runs against their measurements."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hespas.cli import options
from hespas.cli.accuracy import percent, signed
from hespas.cli.destinations import check_apart, check_reports, estimator_files, report_folder, write_document
from hespas.cli.session import command_line
from hespas.cli.terminal import emit, is_quiet, print_message, progress_bar, report_diagnostics
from hespas.graph.diagnostics import Diagnostics
from hespas.report.tables import table_text
from hespas.report.texts import count_text, counted

if TYPE_CHECKING:
    from hespas.studies.league.document import League

__all__ = ["league", "serving"]

_Calibrate = Literal["none", "one-per-accelerator", "leave-group-out"]


def league(
    table: Annotated[
        Path,
        typer.Option(
            metavar="FILE.csv",
            help="Read runs, one per row, and models.csv in the same folder (docs/league.md).",
        ),
    ] = Path("published_training.csv"),
    calibrate: Annotated[
        _Calibrate,
        typer.Option(
            help="Fit correction factors to no row, to one row per accelerator and source, or to all other "
            "groups."
        ),
    ] = "none",
    factors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Apply factors written by calibrate --end-to-end instead of calibrating.",
        ),
    ] = None,
    estimator: Annotated[
        str, typer.Option(metavar="NAME", help="Estimate the durations of kernels with this estimator.")
    ] = "composite",
    allow_programs: options.AllowPrograms = False,
    report: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=report_folder, help="Write a report: HTML page, JSON and CSV."),
    ] = None,
    json_file: options.Json = None,
    overwrite: options.Overwrite = False,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Run N processes.")] = 2,
    progress: options.Progress = None,
    max_input_bytes: options.MaxInputBytes = None,
    loudness: options.Loudness = None,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """Predict the step of every run of a table from its settings, and compare with the measured step.

    hespas-validate league --table published_training.csv --calibrate leave-group-out --report league/
    """
    diagnostics = Diagnostics()
    reads = [table, *([factors] if factors else [])]
    with command_line(debug, diagnostics, str(table), documents=[json_file], reads=reads, writes=[report]):
        taken = {"--table": reads, "--estimator": estimator_files(estimator)}
        check_reports({"--json": json_file}, taken, overwrite=overwrite)
        if report:
            from hespas.studies.league.report import REPORT_FILES, check_folder

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
        _print_league(done.details)


def _print_league(done: League) -> None:
    """Print the rows that are not predicted, the errors by group, memory, and the choice of layouts."""
    from hespas.studies.league.document import refusals

    for reason, position, count in refusals(done.rows):
        first = position if count == 1 else f"the first is {position}"
        print_message(f"note: {counted(count, 'row')} not predicted ({first}): {reason}")
    assumed = sum(row.status == "assumed" for row in done.rows)
    if assumed:
        print_message(f"note: {counted(assumed, 'row')} with assumptions, because the table lacks settings")
    untimed = sum("row.untimed" in row.row.predicted.assumptions for row in done.rows)
    if untimed:
        print_message(f"warning: {counted(untimed, 'row')} with kernels of unknown duration, counted as 0")
    beyond = sum(row.row.predicted.fits is False for row in done.rows)
    if beyond:
        print_message(f"warning: {counted(beyond, 'row')} with a predicted peak memory beyond the device's")
    if is_quiet():
        return
    rows = [
        (row.by, row.value, count_text(row.n), *map(percent, (row.mean_ape, row.median_ape, row.p90_ape)),
         signed(row.bias), percent(row.interval_coverage))
        for row in done.groups
        if row.by in {"all", "source", "accelerator", "scale", "precision", "status"}
    ]  # fmt: skip
    rows += [
        ("baseline", row.name, count_text(row.n), *map(percent, (row.mean_ape, row.median_ape, row.p90_ape)),
         "", "")
        for row in done.baselines
    ]  # fmt: skip
    titles = ("by", "value", "rows", "mean", "median", "P90", "bias", "in interval")
    emit(table_text(titles, rows, left=(0, 1)))
    memory = done.memory
    if memory.n:
        errors = f"mean error {percent(memory.mean_ape)}, median {percent(memory.median_ape)}"
        emit(f"peak memory of {counted(memory.n, 'row')}: {errors}")
    hits = [layout.best_in_top_two for layout in done.layouts]
    if hits:
        emit(f"best layout among the two best predictions: {sum(hits)} of {counted(len(hits), 'set')}")


class _ServingCalibration(StrEnum):
    """Calibration of ``hespas-validate serving``."""

    NONE = "none"
    ONE_PER_STACK = "one-per-stack"
    ONE_PER_DEPLOYMENT = "one-per-deployment"
    STACK = "stack"
    STACK_AND_ONE = "stack-and-one"
    STACK_AND_DEPLOYMENT = "stack-and-deployment"


_ServingTable = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Read runs, one per row: model_path, system, backend, ..., silicon_tpot_ms."
    ),
]
_CalibrateOption = Annotated[
    _ServingCalibration,
    typer.Option(
        help="Set the calibration data. A stack is a device and framework (for MoE also the experts' "
        "format); a deployment is a release, model and format on a stack.\n\n"
        "one-per-stack: one measured run per stack.\n\n"
        "one-per-deployment: one measured run per deployment.\n\n"
        "stack: a few parameters per stack, on all rows outside of the split devval.\n\n"
        "stack-and-one: as stack, then one run per deployment.\n\n"
        "stack-and-deployment: as stack, then all runs of each deployment outside of devval."
    ),
]
_Recorded = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        metavar="RUNS.csv REQUESTS.csv",
        help="Replay recorded runs request by request; the first fifth calibrates, the others are compared.",
    ),
]


def serving(
    *,
    table: _ServingTable = None,
    split: Annotated[
        str, typer.Option(metavar="NAME", help="Evaluate rows of this split (default: all).")
    ] = "",
    calibrate: _CalibrateOption = _ServingCalibration.NONE,
    recorded: _Recorded = None,
    estimator: options.Estimator = "composite",
    allow_programs: options.AllowPrograms = False,
    json_file: options.Json = None,
    overwrite: options.Overwrite = False,
    progress: options.Progress = None,
    max_input_bytes: options.MaxInputBytes = None,
    loudness: options.Loudness = None,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """Compare measured runs of LLM servers with their predicted TTFT and TPOT.

    hespas-validate serving --table runs.csv --calibrate one-per-stack
    """
    reads = [table, *(recorded or ())]
    diagnostics = Diagnostics()
    with command_line(debug, diagnostics, str(table or ""), documents=[json_file], reads=reads):
        check_reports(
            {"--json": json_file},
            {"--table": [table] if table else [], "--recorded": list(recorded or ())},
            overwrite=overwrite,
        )
        from hespas import api

        with progress_bar("simulating", progress) as callback:
            done = api.validate_serving(
                table, recorded=recorded, split=split, calibrate=calibrate.value, estimator=estimator,
                progress=callback, diagnostics=diagnostics,
            )  # fmt: skip
        if json_file:
            write_document(done.to_json(), json_file, overwrite=overwrite)
        report_diagnostics(diagnostics, str(table or ""))
        errors = done.errors
        if errors.rows:
            statuses, first = Counter(run.status for run in errors.rows), dict[str, int]()
            for run in errors.rows:
                first.setdefault(run.status, run.row.row)
            predicted = statuses.pop("predicted", 0)
            emit(f"{count_text(predicted)} of {count_text(len(errors.rows))} runs are evaluated")
            emit(
                f"{count_text(count)}: {reason} (row {first[reason]})"
                for reason, count in statuses.most_common()
            )
            lines = [
                (
                    row.value, row.metric, count_text(row.n), percent(row.median_ape), percent(row.mean_ape),
                    percent(row.p90_ape), signed(row.bias), percent(row.interval_coverage),
                    percent(row.baseline_median_ape), percent(row.baseline_mean_ape),
                )
                for row in errors.summaries()
            ]  # fmt: skip
            heads = (
                "runs",
                "of",
                "n",
                "median",
                "mean",
                "P90",
                "bias",
                "in 90%",
                "naive median",
                "naive mean",
            )
            emit(table_text(heads, lines, left=(0, 1)))
        if done.recorded:
            replays = [
                (
                    run.trace, "yes" if run.calibrated else "no", count_text(run.requests),
                    signed(run.ttft_error), signed(run.tpot_error), signed(run.latency_error),
                    signed(run.makespan_error), signed(run.tokens_per_s_error),
                    f"{run.measured_s / run.computed_s:,.0f}", percent(run.load_share),
                    run.capacity,
                )
                for run in done.recorded
            ]  # fmt: skip
            titles = (
                "recorded", "calibrated", "n", "TTFT", "TPOT", "latency", "makespan", "tokens/s",
                "times faster",
                "load", "capacity",
            )  # fmt: skip
            emit(table_text(titles, replays, left=(0, 1)))
