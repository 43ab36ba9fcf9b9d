"""Predictions of measured runs: steps of a league table, LLM serving runs, and correction factors."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from hespas.api.arguments import ChosenEstimator, checked
from hespas.api.documents import Result
from hespas.graph import Diagnostics
from hespas.graph.deprecation import RenamedAttribute
from hespas.graph.errors import UsageError
from hespas.graph.hints import Option, PositiveInt
from hespas.graph.progress import Progress
from hespas.report import Table, table_from_records
from hespas.report.charts import Chart
from hespas.studies.league.evaluation import CalibrateBy
from hespas.studies.serving import Calibrate

if TYPE_CHECKING:
    from hespas.studies.league.document import League
    from hespas.studies.league.evaluation import Calibration, EvaluatedRow
    from hespas.studies.serving import RunReplay, ServingErrors

__all__ = [
    "FactorsReport",
    "LeagueReport",
    "ServingAccuracyReport",
    "calibrate_end_to_end",
    "league",
    "validate_serving",
]


@dataclass(frozen=True, slots=True, repr=False)
class LeagueReport(Result):
    """Rows of a league table with their predictions and errors. ``details`` is the validator's own result."""

    details: League
    result = RenamedAttribute("details")

    @property
    def rows(self) -> tuple[EvaluatedRow, ...]:
        """Return the rows of the table with their predictions."""
        return self.details.rows

    def headline(self) -> str:
        """Return the summary line: the number of predicted rows, and their errors."""
        whole = self.details.whole
        if whole is None:
            return f"{self.details.table}, no row is both predicted and measured"
        return (
            f"{self.details.table}, calibration {self.details.calibrate}: {whole.n:,} of "
            f"{len(self.rows):,} rows, median error {whole.median_ape:.1%}, mean {whole.mean_ape:.1%}"
        )

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.league/1``."""
        from hespas.studies.league.document import league_json

        return league_json(self.details)

    def table(self) -> Table:
        """Return a table with one row per published run: prediction, interval, published times and error."""
        return table_from_records(self.to_dict()["rows"])

    def to_html(self) -> str:
        """Return the page of the report."""
        from hespas.studies.league.report import league_html

        return league_html(self.details)

    def charts(self) -> tuple[Chart, ...]:
        """Return the predicted over the published step times, the errors by source, and the scaling of models
        that were published for several numbers of accelerators.
        """
        from hespas.studies.league.report import league_charts

        return league_charts(self.details)

    def write(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write a page, the document and a CSV file into a folder. Raises ``OutputError`` if one of them
        exists, without ``overwrite``.
        """
        from hespas.studies.league.report import write_report

        write_report(self.details, Path(folder), overwrite=overwrite)


_LeagueTable = Annotated[
    str | Path,
    Option(
        "Read runs, one per row, and models.csv in the same folder (docs/reference/runs.md).",
        flag="table",
        metavar="FILE.csv",
    ),
]
_CalibrateBy = Annotated[
    CalibrateBy,
    Option(
        "Fit correction factors: none; one-per-accelerator: to one row of each accelerator and source; "
        "leave-group-out: for each group (source, model, accelerator), to the rows of all other groups."
    ),
]
_Factors = Annotated[
    str | Path | None,
    Option("Apply factors written by calibrate `end_to_end` instead of calibrating.", metavar="FILE.json"),
]
_Estimator = Annotated[
    str,
    Option("Estimate the durations of kernels with this estimator.", metavar="NAME", completes="estimators"),
]
_Jobs = Annotated[PositiveInt, Option("Run N processes.", metavar="N")]


@checked()
def league(
    table: _LeagueTable = Path("published_training.csv"),
    *,
    calibrate: _CalibrateBy = "none",
    factors: _Factors = None,
    estimator: _Estimator = "composite",
    jobs: _Jobs = 2,
    progress: Progress | None = None,
    diagnostics: Diagnostics | None = None,
) -> LeagueReport:
    """Predict the step of every row of ``table`` from its settings, and compare it with ``step_time_ms``.
    ``docs/reference/runs.md`` lists the columns. Models that are not in the package are read from
    ``models.csv`` in the same folder.

    ``calibrate`` selects the fit of correction factors. ``none``: no fit. ``one-per-accelerator``: fit to one
    row of each accelerator and source. ``leave-group-out``: for each group (source, model and accelerator),
    fit to the rows of all other groups. ``factors`` instead applies a file of :func:`calibrate_end_to_end`,
    fitted to other rows; the table then needs no measured times. Rows are predicted by ``jobs`` processes and
    cached between runs; ``diagnostics`` receive rows that cannot be cached.

    Raises ``UsageError`` for another mode and for factors of another ``estimator``, ``FormatError`` for a
    malformed table, impossible measured figures and a file without factors. If no row can be predicted, it
    raises ``FormatError`` if a row has an error, else ``UnsupportedError``.

    Examples:
        >>> from pathlib import Path
        >>> head = "model,accelerator,num_accelerators,seq_len,global_batch,tp,step_time_ms"
        >>> size = Path("runs.csv").write_text(f"{head}\\nllama-3-8b,H100-SXM,8,4096,16,8,2000\\n")
        >>> hespas.league("runs.csv").to_pandas()[["model", "status"]].values.tolist()
        [['llama-3-8b', 'assumed']]
    """
    from hespas.studies.league.document import evaluate_league, read_factors
    from hespas.studies.league.predict import predicted_rows

    if factors is not None and calibrate != "none":
        raise UsageError(
            f"`factors` cannot be combined with `calibrate={calibrate}`", hint="leave one of them out"
        )
    fitted = [] if factors is None else read_factors(Path(factors), estimator)
    rows = predicted_rows(
        Path(table), estimator=estimator, jobs=jobs, progress=progress, diagnostics=diagnostics
    )
    mode: Calibration = calibrate if factors is None else "factors"
    if fitted and diagnostics is not None:
        pairs = {(factor.source, factor.accelerator) for factor in fitted}
        uncorrected = [
            row for row in rows if (row.cells.get("source", ""), row.cells["accelerator"]) not in pairs
        ]
        names = sorted({" on ".join(pair) for pair in pairs})
        diagnostics.warning(
            "league.no-factors",
            str(factors),
            f"no correction factor for this source and accelerator; left uncorrected (factors are for "
            f"{', '.join(names)})",
            count=len(uncorrected),
        )
    return LeagueReport(evaluate_league(str(table), rows, mode, fitted, estimator=estimator))


@dataclass(frozen=True, slots=True, repr=False)
class FactorsReport(Result):
    """Correction factors of an accelerator for each software stack of a table. It also has the errors without
    factors, and with factors on groups that were held out of the fit.
    """

    hardware: str
    before: League
    after: League

    def headline(self) -> str:
        """Return the summary line: the median errors before, and on held-out groups."""
        before, after = (
            next(
                (
                    group.median_ape
                    for group in rows.groups
                    if (group.by, group.value) == ("accelerator", self.hardware)
                ),
                nan,
            )
            for rows in (self.before, self.after)
        )
        return f"{self.hardware}, median error {before:.1%} before, {after:.1%} on groups left out"

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.league_factors/1``."""
        from hespas.studies.league.document import factors_json

        return factors_json(self.before, self.after, self.hardware)

    def table(self) -> Table:
        """Return the result as a table with one row per factor."""
        return table_from_records(self.to_dict()["factors"])


def calibrate_end_to_end(
    hardware: str,
    table: str | Path,
    *,
    estimator: str = "composite",
    jobs: PositiveInt = 2,
    progress: Progress | None = None,
    diagnostics: Diagnostics | None = None,
) -> FactorsReport:
    """Fit the ratio of measured to predicted time for each component of a step on ``hardware``, per
    software stack (the column ``source``), on all rows of ``table``, with shrinkage to the fits per
    operation. The factors are valid for ``estimator`` only.

    Raises ``UsageError`` if the table has no measured row of the device, and what :func:`league` raises.
    """
    from hespas.hardware import load_device
    from hespas.studies.league.document import evaluate_league
    from hespas.studies.league.predict import predicted_rows

    name = load_device(hardware).name
    rows = predicted_rows(
        Path(table), estimator=estimator, jobs=jobs, progress=progress, diagnostics=diagnostics
    )
    before, after = (
        evaluate_league(str(table), rows, mode, estimator=estimator) for mode in ("none", "leave-group-out")
    )
    if not any(factor.accelerator == name for factor in after.factors):
        raise UsageError(
            f"no factors for {name}: {table} has no row of this device that is both measured and predicted",
            hint="name another device",
        )
    return FactorsReport(name, before, after)


@dataclass(frozen=True, slots=True, repr=False)
class ServingAccuracyReport(Result):
    """Measured serving runs with the errors of their predictions, and recorded runs that were replayed."""

    page_title: ClassVar[str] = "Predictions of measured LLM servers"

    errors: ServingErrors
    recorded: tuple[RunReplay, ...]
    inputs: tuple[str, ...]
    diagnostics: Diagnostics
    judgement = RenamedAttribute("errors")

    def headline(self) -> str:
        """Return the summary line: the numbers of evaluated runs and their errors."""
        rows, traces = self.errors.rows, {replay.trace for replay in self.recorded}
        parts = [f"{len(traces):,} recorded runs replayed"] if traces else []
        if rows:
            count = sum(row.status == "predicted" for row in rows)
            totals = [summary for summary in self.errors.summaries() if summary.by == "all"]
            errors = [
                f"median error of {summary.metric} {summary.median_ape:.1%}"
                for summary in totals
                if summary.n
            ]
            parts = [f"{count:,} of {len(rows):,} runs evaluated", *errors, *parts]
        return ", ".join(parts) or "nothing evaluated"

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.serving_accuracy/1``."""
        from hespas.studies.serving import serving_json

        return serving_json(self.errors, self.recorded, self.inputs, self.diagnostics)

    def table(self) -> Table:
        """Return the result as a table with one row per run of the table; without a table, one row per
        recorded run.
        """
        document = self.to_dict()
        return table_from_records(document["rows"] or document["recorded"])

    def charts(self) -> tuple[Chart, ...]:
        """Return the throughput-latency curves, measured and predicted, of the deployments with the most
        loads.
        """
        from hespas.studies.serving.curves import load_curves

        return tuple(load_curves(self.errors.rows))


_ServingTable = Annotated[
    str | Path | None,
    Option("Read runs, one per row: model_path, system, backend, ..., silicon_tpot_ms.", metavar="FILE"),
]
_Split = Annotated[str, Option("Evaluate rows of this split (default: all).", metavar="NAME")]
_ServingCalibration = Annotated[
    Calibrate,
    Option(
        "Set the calibration data. A stack is a device and framework (for MoE also the experts' "
        "format); a deployment is a release, model and format on a stack.\n\n"
        "shipped: as hespas serve, with the parameters of engines that ship with Hespas.\n\n"
        "none: kernels alone.\n\n"
        "one-per-stack: one measured run per stack.\n\n"
        "one-per-deployment: one measured run per deployment.\n\n"
        "stack: a few parameters per stack, on all rows outside of the split devval.\n\n"
        "stack-and-one: as stack, then one run per deployment.\n\n"
        "stack-and-deployment: as stack, then all runs of each deployment outside of devval."
    ),
]
_Recorded = Annotated[
    tuple[str | Path, str | Path] | None,
    Option(
        "Replay recorded runs request by request; the first fifth calibrates, the others are compared.",
        metavar="RUNS.csv REQUESTS.csv",
    ),
]


@checked()
def validate_serving(
    table: _ServingTable = None,
    *,
    split: _Split = "",
    calibrate: _ServingCalibration = "shipped",
    recorded: _Recorded = None,
    estimator: ChosenEstimator = "composite",
    progress: Progress | None = None,
    diagnostics: Diagnostics | None = None,
) -> ServingAccuracyReport:
    """Compare predicted TTFT and TPOT with measured serving runs.

    ``table`` has one row per run, with means over its requests (columns: ``model_path, system, backend,
    mode, isl, osl, tp_size, silicon_ttft_ms, silicon_tpot_ms`` and others of aiconfigurator's sample of
    measurements; ``concurrency``, ``benchmark`` and ``measured``, a date, may be columns of their own, and
    ``num_speculative_tokens`` states the speculative tokens per step).
    ``split`` selects the rows to evaluate (empty: all). ``recorded`` are two tables, of runs and of their
    requests, which are replayed request by request: the first fifth of the requests calibrates, the
    others are compared.

    ``calibrate`` selects the rows of the fit. A stack is a device with a framework; a deployment is a stack
    with a release of the framework, a model and a number format:

    - ``shipped``: no fit; parameters of stacks that ship with the package, as in :func:`serve`.
    - ``none``: no fit; kernels alone.
    - ``one-per-stack``, ``one-per-deployment``: one run of each.
    - ``stack``: a few parameters per stack, and per expert format for mixtures of experts, on all rows except
      the split ``devval``.
    - ``stack-and-one``: as ``stack``, then on one run of each deployment.
    - ``stack-and-deployment``: as ``stack``, then on all runs of each deployment.

    Raises ``UsageError`` for another mode, a split without rows and if there is nothing to evaluate,
    ``FormatError`` for a broken table.

    Examples:
        >>> from pathlib import Path
        >>> head = "model_path,system,backend,mode,isl,osl,tp_size,batch_size,silicon_ttft_ms,silicon_tpot_ms"
        >>> row = "meta-llama/Llama-3-8B,h100_sxm,vllm,agg,512,64,1,8,90,9"
        >>> size = Path("served.csv").write_text(f"{head}\\n{row}\\n")
        >>> hespas.validate_serving("served.csv").to_pandas()[["model", "status"]].values.tolist()
        [['Llama-3-8B', 'predicted']]
    """
    from hespas.studies.serving import (
        ServingErrors,
        ServingPredictor,
        evaluate_runs,
        read_recorded,
        read_rows,
        refuse_empty_split,
        replay_runs,
    )

    if table is None and recorded is None:
        raise UsageError(
            "no runs to evaluate", hint="give a table of runs (`table`), or recorded requests (`recorded`)"
        )
    sink = diagnostics if diagnostics is not None else Diagnostics()
    errors, replays = ServingErrors(calibrate=calibrate, rows=()), list["RunReplay"]()
    if table is not None:
        rows = read_rows(Path(table))
        refuse_empty_split(rows, split)
        predictor = ServingPredictor(estimator=estimator, progress=progress)
        errors = evaluate_runs(rows, calibrate=calibrate, split=split, predictor=predictor)
        for run in errors.rows:
            if run.status not in {"predicted", "calibrating"}:
                sink.info("serving.not-predicted", f"row {run.row.row}", run.status, path=str(table))
        sink.info(
            "serving.calibrating",
            str(table),
            "rows that were fitted on are not evaluated; `split` devval in the table keeps rows from fits",
            count=sum(run.status == "calibrating" for run in errors.rows),
        )
    if recorded is not None:
        runs = read_recorded(Path(recorded[0]), Path(recorded[1]), diagnostics=sink)
        replays = replay_runs(runs, estimator=estimator, diagnostics=sink)
    inputs = tuple(str(path) for path in (table, *(recorded or ())) if path is not None)
    return ServingAccuracyReport(errors, tuple(replays), inputs, sink)
