"""``hespas-validate serving``: how far predicted times of servers are from measured runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hespas.cli import options
from hespas.cli.accuracy import percent, signed
from hespas.cli.destinations import check_reports, write_document
from hespas.cli.session import command_line
from hespas.cli.terminal import emit, progress_bar, report_diagnostics
from hespas.cli.text import count_text, table_text
from hespas.graph.diagnostics import Diagnostics

if TYPE_CHECKING:
    from hespas.validators.serving import RunReplay, ServingErrors

__all__ = ["serving"]


class _Calibrate(StrEnum):
    NONE = "none"
    ONE_PER_STACK = "one-per-stack"
    ONE_PER_DEPLOYMENT = "one-per-deployment"
    STACK = "stack"
    STACK_AND_ONE = "stack-and-one"
    STACK_AND_DEPLOYMENT = "stack-and-deployment"


_Table = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Runs, a row each: model_path, system, backend, ..., silicon_tpot_ms."),
]
_CalibrateOption = Annotated[
    _Calibrate,
    typer.Option(
        help="What is fitted before; a deployment is a release, a model and a format on a stack.\n\n"
        "one-per-stack: one measured run of each device and framework.\n\n"
        "one-per-deployment: one of each deployment.\n\n"
        "stack: few parameters of each device and framework (of mixtures, and format of experts), on all "
        "rows but those of the split devval.\n\n"
        "stack-and-one: these, then one run of each deployment.\n\n"
        "stack-and-deployment: these, then of each deployment as far as all its runs ask for others."
    ),
]
_Recorded = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        metavar="RUNS.csv REQUESTS.csv",
        help="Recorded runs, to be repeated request by request. The first fifth calibrates, the others are "
        "compared.",
    ),
]


def serving(
    *,
    table: _Table = None,
    split: Annotated[str, typer.Option(metavar="NAME", help="Judge these rows (default: all).")] = "",
    calibrate: _CalibrateOption = _Calibrate.NONE,
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
    """Measured runs of servers beside their predicted times to the first token and per token.

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
        _show(done.errors)
        _show_recorded(done.recorded)


def _show(judged: ServingErrors) -> None:
    if not judged.rows:
        return
    left, first = Counter(each.status for each in judged.rows), dict[str, int]()
    for each in judged.rows:
        first.setdefault(each.status, each.row.row)
    emit(f"{count_text(left.pop('predicted', 0))} of {count_text(len(judged.rows))} runs are judged")
    emit(f"{count_text(count)}: {reason} (row {first[reason]})" for reason, count in left.most_common())
    lines = [
        (
            each.value, each.metric, count_text(each.n), percent(each.median_ape), percent(each.mean_ape),
            percent(each.p90_ape), signed(each.bias), percent(each.interval_coverage),
            percent(each.baseline_median_ape), percent(each.baseline_mean_ape),
        )
        for each in judged.summaries()
    ]  # fmt: skip
    heads = ("runs", "of", "n", "median", "mean", "P90", "bias", "in 90%", "naive median", "naive mean")
    emit(table_text(heads, lines, left=(0, 1)))


def _show_recorded(replays: Sequence[RunReplay]) -> None:
    if not replays:
        return
    from hespas.validators.serving.predict import capacity_of

    lines = [
        (
            each.trace, "yes" if each.calibrated else "no", count_text(each.requests),
            signed(each.ttft_error), signed(each.tpot_error), signed(each.latency_error),
            signed(each.makespan_error), signed(each.tokens_per_s_error),
            f"{each.measured_s / each.computed_s:,.0f}", percent(each.load_share),
            capacity_of(each.load_share),
        )
        for each in replays
    ]  # fmt: skip
    heads = (
        "recorded", "calibrated", "n", "TTFT", "TPOT", "latency", "makespan", "tokens/s", "times faster",
        "load", "capacity",
    )  # fmt: skip
    emit(table_text(heads, lines, left=(0, 1)))
