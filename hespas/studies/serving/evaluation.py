"""Errors of predicted runs of servers, with and without calibration, and their JSON document.

A naive baseline predicts from the bytes that a step reads and the FLOPs of a prompt. It assumes the median
fractions of memory bandwidth and peak FLOP/s that the runs of the engine reach.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, nan
from typing import Literal, get_args

import msgspec
import numpy as np

from hespas._version import __version__
from hespas.files.documents import Count, Figure, document_bytes
from hespas.generators.llm.model import model_parameters
from hespas.generators.llm.server_memory import ServingLoad, serving_memory
from hespas.graph import Diagnostics
from hespas.graph.columns import FloatArray, dtype
from hespas.hardware import named_device
from hespas.hardware.peaks import peak_for
from hespas.simulator.serving import Correction
from hespas.simulator.serving.engine_parameters import EngineParameters, engine_parameters, parameters_of
from hespas.studies.errors import ErrorFigures, GroupErrors, finite, grouped, grouped_by
from hespas.studies.serving.fit import (
    PRIORS,
    EngineFit,
    fit_engine,
    one_point,
    point_of,
)
from hespas.studies.serving.predict import Capacity, MeanTimes, ServingPredictor, capacity_of, implied_rate
from hespas.studies.serving.recorded import RunReplay
from hespas.studies.serving.rows import ServingRow, deployment_of, engine_of, library_of, stack_of
from hespas.validators.accuracy.document import DiagnosticJson, diagnostics_json

__all__ = [
    "CALIBRATIONS",
    "METRICS",
    "Calibrate",
    "EvaluatedRun",
    "ServingAccuracyDocument",
    "ServingErrorSummary",
    "ServingErrors",
    "evaluate_runs",
    "serving_json",
]

Calibrate = Literal[
    "none", "shipped", "one-per-stack", "one-per-deployment", "stack", "stack-and-one", "stack-and-deployment"
]
CALIBRATIONS: tuple[Calibrate, ...] = get_args(Calibrate)
"""Calibration data: none; the parameters of stacks that ship with the package, as in
:func:`hespas.api.serve`; one run of each engine on a device (the values say "stack"); one run of each
deployment, which is an engine with release, model and precision; all runs of each engine, and for MoE models
of each format of experts; these and one run of each deployment; these and all runs of each deployment.
"""
METRICS = ("ttft", "tpot", "tokens_per_s")
_HELD_OUT_SPLIT = "devval"
"""Split of a table that is never used in fits."""
_TAILS = (0.05, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedRun:
    """Measured run of a server, with its prediction and the prediction of the naive baseline.

    ``low`` and ``high`` are the 90 % interval of the prediction, from the residuals of the runs in the fit;
    None without a fit. ``status`` is predicted, calibrating (used in the fit), or the reason why the run is
    not predicted.
    """

    row: ServingRow
    status: str
    predicted: MeanTimes | None = None
    low: MeanTimes | None = None
    high: MeanTimes | None = None
    baseline: MeanTimes | None = None
    load_share: float = nan
    """Load relative to the capacity of the server, of sequences or of KV-cache tokens."""

    def error(self, metric: str, *, baseline: bool = False) -> float:
        """Return the relative error of a metric (``ttft``, ``tpot`` or ``tokens_per_s``); NaN without a
        prediction.
        """
        times = self.baseline if baseline else self.predicted
        if times is None:
            return nan
        measured = MeanTimes(self.row.ttft_ms, self.row.tpot_ms)
        if metric == "tokens_per_s":
            return implied_rate(self.row, times) / implied_rate(self.row, measured) - 1
        return float(getattr(times, f"{metric}_ms") / getattr(measured, f"{metric}_ms")) - 1

    def inside(self, metric: str) -> float:
        """Return 1 if the measured value is inside the interval, 0 if not, NaN without an interval."""
        if self.low is None or self.high is None or metric == "tokens_per_s":
            return nan
        name = f"{metric}_ms"
        measured = float(getattr(self.row, name))
        return float(getattr(self.low, name) <= measured <= getattr(self.high, name))


class ServingErrorSummary(GroupErrors, frozen=True, kw_only=True):
    """Errors of one metric over a group of runs, and errors of the baseline."""

    calibrate: str
    metric: str
    baseline_mean_ape: Figure
    baseline_median_ape: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingErrors:
    """Errors of all measured serving runs, and the fitted parameters of each engine."""

    calibrate: Calibrate
    rows: tuple[EvaluatedRun, ...]
    fits: dict[str, EngineFit] = field(default_factory=dict[str, EngineFit])

    def summaries(self) -> list[ServingErrorSummary]:
        """Return error summaries over all runs, and by kind of servers, source, engine, model and precision,
        and load relative to capacity.
        """
        runs = [run for run in self.rows if run.status == "predicted"]
        return [
            self._summary(by, value, metric, members)
            for by, value, members in grouped(runs, _GROUPINGS)
            for metric in METRICS
        ]

    def _summary(self, by: str, value: str, metric: str, runs: Sequence[EvaluatedRun]) -> ServingErrorSummary:
        naive = ErrorFigures.of(run.error(metric, baseline=True) for run in runs)
        inside = finite(run.inside(metric) for run in runs)
        return ServingErrorSummary.of(
            (run.error(metric) for run in runs),
            calibrate=self.calibrate,
            by=by,
            value=value,
            metric=metric,
            interval_coverage=float(inside.mean()) if len(inside) else nan,
            baseline_mean_ape=naive.mean_ape,
            baseline_median_ape=naive.median_ape,
        )


_GROUPINGS: dict[str, Callable[[EvaluatedRun], str]] = {
    "all": lambda run: "all",
    "servers": lambda run: "separate prefill and decode" if run.row.prefill else "prefill with decode",
    "source": lambda run: run.row.source or "unknown",
    "stack": lambda run: engine_of(run.row),
    "model": lambda run: f"{engine_of(run.row)} {run.row.model} {run.row.precision}",
    "capacity": lambda run: f"{capacity_of(run.load_share)} capacity",
}


def evaluate_runs(
    rows: Sequence[ServingRow],
    *,
    calibrate: Calibrate = "shipped",
    split: str = "",
    predictor: ServingPredictor | None = None,
    cached_fits: dict[str, EngineFit] | None = None,
    priors: Mapping[str, EngineParameters] | None = None,
) -> ServingErrors:
    """Predict the rows of a ``split`` (empty: all rows) and return their errors.

    Predictions are calibrated with the rows outside of the split ``devval``. ``cached_fits`` maps engines to
    fits from earlier calls with the same rows; new fits are added to it. ``priors`` are the parameters of
    stacks with which ``shipped`` predicts, and from which fits to a single run start (None: all that
    ship). Names without a device apply to devices that have none.
    """
    chosen = predictor or ServingPredictor()
    fitting = [row for row in rows if row.split != _HELD_OUT_SPLIT and not isinstance(chosen.steps(row), str)]
    evaluated = [row for row in rows if not split or row.split == split]
    known = {} if cached_fits is None else cached_fits
    shipped = engine_parameters() if priors is None else priors
    corrections = _Corrections(calibrate, fitting, chosen, known, shipped)
    baseline = _NaiveBaseline(fitting)
    predictions = chosen.all_times(evaluated, corrections.of)
    runs: list[EvaluatedRun] = []
    for row, times in zip(evaluated, predictions, strict=True):
        if isinstance(times, str):
            runs.append(EvaluatedRun(row=row, status=times))
            continue
        low, high = corrections.bounds(row, times)
        runs.append(EvaluatedRun(
            row=row,
            status="calibrating" if row.row in corrections.fitted_on else "predicted",
            predicted=times, low=low, high=high, baseline=baseline.times(row),
            load_share=chosen.load_share(row),
        ))  # fmt: skip
    return ServingErrors(calibrate=calibrate, rows=tuple(runs), fits=corrections.fits)


class _Corrections:
    """Corrections of the predictions of all rows, for one kind of calibration. A correction has the fitted
    parameters of an engine or a deployment.
    """

    def __init__(
        self,
        calibrate: Calibrate,
        rows: Sequence[ServingRow],
        predictor: ServingPredictor,
        cached_fits: dict[str, EngineFit],
        priors: Mapping[str, EngineParameters],
    ) -> None:
        self.fits: dict[str, EngineFit] = {}
        self.points: set[int] = set()
        self._of: dict[str, Correction] = {}
        self._residuals: dict[str, FloatArray] = {}
        self._shipped: Mapping[str, EngineParameters] = priors if calibrate == "shipped" else {}
        self._estimator = predictor.estimator
        for key, members in grouped_by(rows, library_of).items() if calibrate.startswith("stack") else ():
            fitted = cached_fits.get(key) or fit_engine(members, predictor)
            if fitted is not None:
                cached_fits[key] = self.fits[key] = fitted
                self._of[key] = fitted.correction
        if calibrate == "stack-and-deployment":
            self._of |= {key: own for fit in self.fits.values() for key, own in fit.deployments.items()}
        group = _POINT_GROUPS.get(calibrate)
        for key, members in grouped_by(rows, group).items() if group else ():
            row = point_of(members)
            library = library_of(row)
            engine = self.fits.get(library) or priors.get(library) or priors.get(library.partition(" ")[2])
            if engine is None:
                correction = one_point(row, predictor)
            else:
                correction = one_point(row, predictor, engine.correction, engine.apart)
            if correction is not None:
                self._of[key] = correction
                self.points.add(row.row)
        for key, fit in self.fits.items():
            members = [row for row in rows if library_of(row) == key]
            held_out = [row for row in members if row.row not in fit.simulated]
            used = held_out if len(held_out) >= _MIN_RESIDUALS else members
            predicted = [(row, predictor.times(row, self.of(row))) for row in used]
            residuals = [
                (np.log(times.ttft_ms / row.ttft_ms), np.log(times.tpot_ms / row.tpot_ms))
                for row, times in predicted
                if not isinstance(times, str)
            ]
            if len(residuals) >= _MIN_RESIDUALS:
                self._residuals[key] = np.array(residuals)

    @property
    def fitted_on(self) -> frozenset[int]:
        """Return the numbers of the rows that were used in fits."""
        return frozenset(self.points).union(*(fit.simulated for fit in self.fits.values()))

    def of(self, row: ServingRow) -> Correction:
        """Return the correction for a row. If its engine is not calibrated, it is the default correction,
        which changes nothing, or with ``shipped`` the one of the package.
        """
        names = (deployment_of(row), library_of(row), engine_of(row))
        fitted = next((self._of[name] for name in names if name in self._of), None)
        if fitted is not None:
            return fitted
        shipped = parameters_of(stack_of(row), self._estimator, self._shipped)
        return Correction() if shipped is None else shipped.correction

    def bounds(self, row: ServingRow, times: MeanTimes) -> tuple[MeanTimes | None, MeanTimes | None]:
        """Return the ends of the 90 % interval of a prediction; None if there are too few residuals."""
        residuals = self._residuals.get(library_of(row))
        if residuals is None:
            return None, None
        low, high = (np.quantile(residuals, share, axis=0) for share in _TAILS)
        first, second = (
            MeanTimes(times.ttft_ms * exp(-bound[0]), times.tpot_ms * exp(-bound[1])) for bound in (high, low)
        )
        return first, second


_POINT_GROUPS: dict[str, Callable[[ServingRow], str]] = {
    "one-per-stack": engine_of,
    "one-per-deployment": deployment_of,
    "stack-and-one": deployment_of,
}
"""Calibration with single runs -> the groups that have one each."""
_MIN_RESIDUALS = 10
"""Residuals that an interval needs. Residuals of runs outside of the fit are used if there are enough."""


class _NaiveBaseline:
    """Naive baseline: TTFT and TPOT at constant fractions of peak FLOP/s and memory bandwidth. Each fraction
    is the median over the runs of an engine.
    """

    def __init__(self, rows: Sequence[ServingRow]) -> None:
        factors: dict[str, list[FloatArray]] = defaultdict(list)
        for row in rows:
            if (bound := _roofline_times(row)) is not None:
                factors[engine_of(row)].append(np.divide((row.ttft_ms, row.tpot_ms), bound))
        self._factors = {key: np.median(np.array(values), axis=0) for key, values in factors.items()}

    def times(self, row: ServingRow) -> MeanTimes | None:
        """Return the naive prediction of a row; None for an engine without runs."""
        factor, bound = self._factors.get(engine_of(row)), _roofline_times(row)
        if factor is None or bound is None:
            return None
        return MeanTimes(*np.multiply(bound, factor).tolist())


def _roofline_times(row: ServingRow) -> MeanTimes | None:
    """Return TTFT and TPOT of a run at the roofline of one of its devices. TTFT is the FLOPs of a prompt over
    the peak rate; TPOT is the bytes of a step over the memory bandwidth.
    """
    step = row.step
    if step is None:
        return None
    device, ranks = named_device(row.hardware), step.layout.ranks
    prefill = row.prefill.step if row.prefill is not None and row.prefill.step is not None else step
    weights = model_parameters(step.model) * dtype(step.experts or step.precision.matmul).bits / 8
    clients, tokens = row.clients, row.prompt + row.output // 2
    held = ServingLoad(
        batch=clients, context=tokens, kv_format=step.cache, page_tokens=step.page, precision=step.precision
    )
    parts = serving_memory(step.model, replace(step.layout, zero=0), held)[0].parts
    moved = weights / ranks + parts["keys and values"]
    prompt = replace(prefill, phase="prefill", batch=1, prompt=row.prompt).account().model_flops_per_step
    peak = peak_for(device, "matrix", step.precision.matmul).flops_per_s
    return MeanTimes(
        prompt / prefill.layout.dp / prefill.layout.ranks / peak * 1e3,
        moved / device.main_memory.bandwidth_bytes_per_s * 1e3,
    )


class _RunEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Measured run in the JSON document; ``status`` is predicted, calibrating, or the reason why it is not
    predicted.
    """

    row: Count
    model: str
    hardware: str
    stack: str
    release: str
    precision: str
    ranks: Count
    prompt_tokens: Count
    output_tokens: Count
    concurrency: Count
    status: str
    assumed: list[str]
    predicted_ttft_ms: Figure
    low_ttft_ms: Figure
    high_ttft_ms: Figure
    published_ttft_ms: Figure
    ttft_error: Figure
    predicted_tpot_ms: Figure
    low_tpot_ms: Figure
    high_tpot_ms: Figure
    published_tpot_ms: Figure
    tpot_error: Figure
    tokens_per_s_error: Figure
    load_share: Figure
    capacity: Capacity


class _ParameterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Fitted parameter in the JSON document. It belongs to one deployment, or to an engine if ``deployment``
    is empty. The parameter ``apart`` is the spread of errors within a deployment.
    """

    stack: str
    deployment: str
    name: str
    value: Figure
    standard_error: Figure
    rows: Count


class ServingAccuracyDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Result of hespas-validate serving."""

    schema: Literal["hespas.serving_accuracy/1"] = "hespas.serving_accuracy/1"
    hespas_version: str = __version__
    inputs: list[str]
    diagnostics: list[DiagnosticJson]
    calibrate: str
    rows: list[_RunEntry]
    summary: list[ServingErrorSummary]
    parameters: list[_ParameterEntry]
    recorded: Sequence[RunReplay]


_UNKNOWN_TIMES = MeanTimes(nan, nan)


def _run_entry(run: EvaluatedRun) -> _RunEntry:
    row, times = run.row, run.predicted or _UNKNOWN_TIMES
    low, high = run.low or _UNKNOWN_TIMES, run.high or _UNKNOWN_TIMES
    return _RunEntry(
        row=row.row,
        model=row.model,
        hardware=row.hardware,
        stack=row.engine,
        release=row.release,
        precision=row.precision,
        ranks=row.ranks,
        prompt_tokens=row.prompt,
        output_tokens=row.output,
        concurrency=row.concurrency,
        status=run.status,
        assumed=list(row.assumed),
        predicted_ttft_ms=times.ttft_ms,
        low_ttft_ms=low.ttft_ms,
        high_ttft_ms=high.ttft_ms,
        published_ttft_ms=row.ttft_ms,
        ttft_error=run.error("ttft"),
        predicted_tpot_ms=times.tpot_ms,
        low_tpot_ms=low.tpot_ms,
        high_tpot_ms=high.tpot_ms,
        published_tpot_ms=row.tpot_ms,
        tpot_error=run.error("tpot"),
        tokens_per_s_error=run.error("tokens_per_s"),
        load_share=run.load_share,
        capacity=capacity_of(run.load_share),
    )


def serving_json(
    errors: ServingErrors, recorded: Sequence[RunReplay], inputs: Sequence[str], diagnostics: Diagnostics
) -> bytes:
    """Return the document ``hespas.serving_accuracy/1``."""
    parameters: list[_ParameterEntry] = []
    for engine, fitted in sorted(errors.fits.items()):
        values = {name: float(getattr(fitted.correction, name)) for name in PRIORS} | {"apart": fitted.apart}
        parameters += [
            _ParameterEntry(
                stack=engine, deployment="", name=name, value=value,
                standard_error=fitted.standard_errors.get(name, nan), rows=fitted.rows,
            )
            for name, value in values.items()
        ]  # fmt: skip
        if errors.calibrate != "stack-and-deployment":
            continue
        parameters += [
            _ParameterEntry(
                stack=engine, deployment=key, name=name, value=getattr(own, name), standard_error=nan,
                rows=fitted.rows,
            )
            for key, own in sorted(fitted.deployments.items())
            for name in PRIORS
        ]  # fmt: skip
    document = ServingAccuracyDocument(
        inputs=list(inputs),
        diagnostics=diagnostics_json(diagnostics),
        calibrate=errors.calibrate,
        rows=[_run_entry(run) for run in errors.rows],
        summary=errors.summaries(),
        parameters=parameters,
        recorded=recorded,
    )
    return document_bytes(document)
