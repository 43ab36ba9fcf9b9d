"""``hespas-validate league`` and ``serving``: errors of predictions of published runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

from hespas.api.published_runs import league as evaluate_league
from hespas.api.published_runs import validate_serving
from hespas.cli.command import Call, command
from hespas.cli.terminal import emit, is_quiet, percent, print_message, report_diagnostics, signed
from hespas.graph.hints import Option
from hespas.report.tables import columns, table_from_rows
from hespas.report.texts import count_text, counted

__all__ = ["league", "serving"]

_LeagueReport = Annotated[
    Path | None, Option("Write a report: HTML page, JSON and CSV.", metavar="DIR", access="folder")
]


@command(evaluate_league, progress="predicting", has_page=True)
def league(call: Call, *, report: _LeagueReport = None) -> None:
    """Predict the step of every run of a table from its settings, and compare with the measured step.

    hespas-validate league --table published_training.csv --calibrate leave-group-out --report league/
    """
    from hespas import api
    from hespas.studies.league.document import refusals
    from hespas.studies.league.report import REPORT_FILES
    from hespas.studies.league.summaries import NEAR_BEST

    call.check_report(REPORT_FILES)
    done = call.run(api.league)
    report_diagnostics(call.diagnostics, call["table"])
    call.write_json(done.to_json())
    call.write_html(done)
    if report:
        done.write(report, overwrite=call.overwrite)
    details = done.details
    for reason, position, count in refusals(details.rows):
        first = position if count == 1 else f"the first is {position}"
        print_message(f"note: {counted(count, 'row')} not predicted ({first}): {reason}")
    assumed = sum(row.status == "assumed" for row in details.rows)
    if assumed:
        print_message(f"note: {counted(assumed, 'row')} with assumptions, because the table lacks settings")
    untimed = sum("row.untimed" in row.row.predicted.assumptions for row in details.rows)
    if untimed:
        print_message(f"warning: {counted(untimed, 'row')} with kernels of unknown duration, counted as 0")
    beyond = sum(row.row.predicted.fits is False for row in details.rows)
    if beyond:
        print_message(f"warning: {counted(beyond, 'row')} that need more memory than the device has")
    if is_quiet():
        return
    rows: list[tuple[object, ...]] = [
        (row.by, row.value, row.n, row.mean_ape, row.median_ape, row.p90_ape, signed(row.bias),
         percent(row.interval_coverage))
        for row in details.groups
        if row.by in {"all", "source", "accelerator", "scale", "precision", "status"}
    ]  # fmt: skip
    rows += [
        ("baseline", row.name, row.n, row.mean_ape, row.median_ape, row.p90_ape, "", "")
        for row in details.baselines
    ]
    header = (
        *columns("text", "by", "value"),
        *columns("count", "rows"),
        *columns("share", "mean", "median", "P90", write=percent, unknown="-"),
        *columns("share", "bias", "in interval", write=str),
    )
    emit(table_from_rows(header, rows).to_text())
    memory = details.memory
    if memory.n:
        errors = f"mean error {percent(memory.mean_ape)}, median {percent(memory.median_ape)}"
        emit(f"peak memory of {counted(memory.n, 'row')}: {errors}")
    near_best = [layout.chosen_excess <= NEAR_BEST for layout in details.layouts]
    if near_best:
        emit(
            f"layout with the best prediction within {NEAR_BEST:.0%} of the fastest one: "
            f"{sum(near_best)} of {counted(len(near_best), 'set')}"
        )


@command(validate_serving, progress="simulating", has_page=True)
def serving(call: Call) -> None:
    """Compare measured runs of LLM servers with their predicted TTFT and TPOT.

    hespas-validate serving --table runs.csv --calibrate one-per-stack
    """
    from hespas import api

    done = call.run(api.validate_serving)
    call.write_json(done.to_json())
    call.write_html(done)
    report_diagnostics(call.diagnostics, str(call["table"] or ""))
    errors = done.errors
    if errors.rows:
        statuses, first = Counter(run.status for run in errors.rows), dict[str, int]()
        for run in errors.rows:
            first.setdefault(run.status, run.row.row)
        predicted = statuses.pop("predicted", 0)
        emit(f"{count_text(predicted)} of {count_text(len(errors.rows))} runs are evaluated")
        emit(
            f"{count_text(count)}: {reason} (row {first[reason]})" for reason, count in statuses.most_common()
        )
        lines = [
            (
                row.value, row.metric, row.n, row.median_ape, row.mean_ape, row.p90_ape, row.bias,
                row.interval_coverage, row.baseline_median_ape, row.baseline_mean_ape,
            )
            for row in errors.summaries()
        ]  # fmt: skip
        header = (
            *columns("text", "runs", "of"),
            *columns("count", "n"),
            *columns("share", "median", "mean", "P90", write=percent),
            *columns("share", "bias", write=signed),
            *columns("share", "in 90%", "naive median", "naive mean", write=percent),
        )
        emit(table_from_rows(header, lines).to_text(unknown="-"))
    if done.recorded:
        replays = [
            (
                run.trace, "yes" if run.calibrated else "no", run.requests, run.ttft_error,
                run.tpot_error, run.latency_error, run.makespan_error, run.tokens_per_s_error,
                run.ttft_p50_error, run.ttft_p90_error, run.ttft_p99_error,
                run.tpot_p50_error, run.tpot_p90_error, run.tpot_p99_error,
                run.measured_s / run.computed_s, run.load_share, run.capacity,
            )
            for run in done.recorded
        ]  # fmt: skip
        header = (
            *columns("text", "recorded", "calibrated"),
            *columns("count", "n"),
            *columns("share", "TTFT", "TPOT", "latency", "makespan", "tokens/s", write=signed),
            *columns("share", "TTFT P50", "P90", "P99", "TPOT P50", "P90 ", "P99 ", write=signed),
            *columns("number", "times faster", write="{:,.0f}".format),
            *columns("share", "load", write=percent),
            *columns("number", "capacity", write=str),
        )
        emit(table_from_rows(header, replays).to_text(unknown="-"))
