"""Predictions of measured runs beside what was measured, with and without calibration, and a naive baseline.

The baseline knows how many bytes a step reads and how many FLOPs a prompt takes: times follow from the part
of the device's memory bandwidth and of its peak that the other runs of the stack reach in the median.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import exp, nan
from typing import Literal, get_args

import numpy as np

from hespas.generators.llm.model import model_parameters
from hespas.generators.llm.serving_memory import Serving, serving_memory
from hespas.graph.columns import FloatArray, dtype
from hespas.hardware import named_device
from hespas.hardware.peaks import peak_for
from hespas.simulator.serving import Correction
from hespas.validators.accuracy.statistics import error_figures
from hespas.validators.serving.capacity import capacity_of
from hespas.validators.serving.fit import Fitted, fit_stack, one_point, point_of
from hespas.validators.serving.predict import Predictor, Times, implied_rate
from hespas.validators.serving.rows import Row, deployment_of, library_of, stack_of

__all__ = ["CALIBRATIONS", "METRICS", "Calibrate", "Judged", "Judgement", "Summary", "judge"]

Calibrate = Literal[
    "none", "one-per-stack", "one-per-deployment", "stack", "stack-and-one", "stack-and-deployment"
]
CALIBRATIONS: tuple[Calibrate, ...] = get_args(Calibrate)
"""Nothing; one measured run of each device and framework; one of each of these, release, model and precision;
few parameters of each device and framework, and of mixtures of each format of experts, from all runs that may
be fitted on; these, and one run of each release, model and precision beside them; these, and the same
parameters of each release, model and precision as far as its runs ask for others.
"""
METRICS = ("ttft", "tpot", "tokens_per_s")
_KEPT = "devval"
"""The split of a table that is never fitted on."""
_TAILS = (0.05, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A run: predicted, and what the baseline says. ``low`` and ``high`` bound 90 % of runs like it, by the
    residuals of those that were fitted on (NaN: none were). ``status``: predicted, calibrating (it was fitted
    on), or why not.
    """

    row: Row
    status: str
    predicted: Times | None = None
    low: Times | None = None
    high: Times | None = None
    baseline: Times | None = None
    load_share: float = nan
    """Requests under way over what the server holds: of sequences or of tokens in its cache."""

    def error(self, metric: str, *, baseline: bool = False) -> float:
        """Predicted over measured, less 1; NaN where nothing is predicted."""
        said = self.baseline if baseline else self.predicted
        if said is None:
            return nan
        measured = Times(self.row.ttft_ms, self.row.tpot_ms)
        pairs = {
            "ttft": (said.ttft_ms, measured.ttft_ms),
            "tpot": (said.tpot_ms, measured.tpot_ms),
            "tokens_per_s": (implied_rate(self.row, said), implied_rate(self.row, measured)),
        }
        predicted, wanted = pairs[metric]
        return predicted / wanted - 1

    def inside(self, metric: str) -> float:
        """1 where the interval holds what was measured, 0 where not, NaN where there is none."""
        if self.low is None or self.high is None or metric == "tokens_per_s":
            return nan
        name = f"{metric}_ms"
        measured = float(getattr(self.row, name))
        return float(getattr(self.low, name) <= measured <= getattr(self.high, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Errors of the runs whose ``by`` is ``value``."""

    by: str
    value: str
    metric: str
    n: int
    mean_ape: float
    median_ape: float
    p90_ape: float
    bias: float
    interval_coverage: float
    baseline_mean_ape: float
    baseline_median_ape: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """All runs, summaries, and what was fitted for each stack."""

    calibrate: Calibrate
    rows: tuple[Judged, ...]
    fits: dict[str, Fitted] = field(default_factory=dict[str, Fitted])

    def summaries(self) -> list[Summary]:
        """Return errors of all runs, by source, stack, model and precision, and by nearness to capacity."""
        found: list[Summary] = []
        judged = [each for each in self.rows if each.status == "predicted"]
        for by, of in _BY.items():
            groups: dict[str, list[Judged]] = defaultdict(list)
            for each in judged:
                groups[of(each.row)].append(each)
            found += [
                _summary(by, value, metric, groups[value]) for value in sorted(groups) for metric in METRICS
            ]
        states = {each.row.row: capacity_of(each.load_share) for each in judged}
        for state in ("below", "near", "beyond", "unknown"):
            some = [each for each in judged if states[each.row.row] == state]
            found += [_summary("capacity", f"{state} capacity", name, some) for name in METRICS if some]
        return found


def _grouped(rows: Sequence[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


_BY: dict[str, Callable[[Row], str]] = {
    "all": lambda row: "all",
    "source": lambda row: row.source or "unknown",
    "stack": stack_of,
    "model": lambda row: f"{stack_of(row)} {row.model} {row.precision}",
}


def _summary(by: str, value: str, metric: str, rows: Sequence[Judged]) -> Summary:
    def known(values: Iterable[float]) -> FloatArray:
        column = np.array(list(values), np.float64)
        return np.asarray(column[np.isfinite(column)], np.float64)

    errors = known(each.error(metric) for each in rows)
    naive = error_figures(known(each.error(metric, baseline=True) for each in rows))
    inside = known(each.inside(metric) for each in rows)
    figures = error_figures(errors)
    return Summary(
        by=by,
        value=value,
        metric=metric,
        n=len(errors),
        mean_ape=figures["mape"],
        median_ape=figures["median_ape"],
        p90_ape=figures["p90_ape"],
        bias=figures["bias"],
        interval_coverage=float(inside.mean()) if len(inside) else nan,
        baseline_mean_ape=naive["mape"],
        baseline_median_ape=naive["median_ape"],
    )


def judge(
    rows: Sequence[Row],
    *,
    calibrate: Calibrate = "none",
    split: str = "",
    predictor: Predictor | None = None,
    known: dict[str, Fitted] | None = None,
) -> Judgement:
    """Predict the rows of a ``split`` (empty: all), calibrated with those that are not of the split
    ``devval``. ``known`` are fits of stacks to the same rows, and gains those that are made.
    """
    maker = predictor or Predictor()
    fitting = [row for row in rows if row.split != _KEPT and not isinstance(maker.steps(row), str)]
    wanted = [row for row in rows if not split or row.split == split]
    corrections = _Corrections(calibrate, fitting, maker, {} if known is None else known)
    baseline = _Baseline(fitting)
    done = maker.all_times(wanted, corrections.of)
    judged: list[Judged] = []
    for row, said in zip(wanted, done, strict=True):
        if isinstance(said, str):
            judged.append(Judged(row=row, status=said))
            continue
        low, high = corrections.bounds(row, said)
        judged.append(Judged(
            row=row,
            status="calibrating" if row.row in corrections.fitted_on else "predicted",
            predicted=said, low=low, high=high, baseline=baseline.times(row),
            load_share=maker.load_share(row),
        ))  # fmt: skip
    return Judgement(calibrate=calibrate, rows=tuple(judged), fits=corrections.fits)


class _Corrections:
    """What each row's prediction is corrected by."""

    def __init__(
        self, calibrate: Calibrate, rows: Sequence[Row], predictor: Predictor, known: dict[str, Fitted]
    ) -> None:
        self.fits: dict[str, Fitted] = {}
        self.points: set[int] = set()
        self._of: dict[str, Correction] = {}
        self._residuals: dict[str, FloatArray] = {}
        for key, mine in _grouped(rows, library_of).items() if calibrate.startswith("stack") else ():
            fitted = known.get(key) or fit_stack(mine, predictor)
            if fitted is not None:
                known[key] = self.fits[key] = fitted
                self._of[key] = fitted.correction
        if calibrate == "stack-and-deployment":
            self._of |= {key: each for fit in self.fits.values() for key, each in fit.deployments.items()}
        group = _POINTS.get(calibrate)
        for key, mine in _grouped(rows, group).items() if group else ():
            self._point(key, mine, predictor)
        for key in self.fits:
            self._spread(key, [row for row in rows if library_of(row) == key], predictor)

    @property
    def fitted_on(self) -> frozenset[int]:
        """Rows that are part of what corrects them."""
        return frozenset(self.points).union(*(fit.simulated for fit in self.fits.values()))

    def of(self, row: Row) -> Correction:
        """Nothing where its stack was not calibrated."""
        names = (deployment_of(row), library_of(row), stack_of(row))
        return next((self._of[name] for name in names if name in self._of), Correction())

    def bounds(self, row: Row, said: Times) -> tuple[Times | None, Times | None]:
        """90 % of runs like it."""
        found = self._residuals.get(library_of(row))
        if found is None:
            return None, None
        low, high = (np.quantile(found, share, axis=0) for share in _TAILS)
        first, second = (
            Times(said.ttft_ms * exp(-each[0]), said.tpot_ms * exp(-each[1])) for each in (high, low)
        )
        return first, second

    def _point(self, key: str, rows: Sequence[Row], predictor: Predictor) -> None:
        row = point_of(rows)
        stack = self.fits.get(library_of(row))
        found = (
            one_point(row, predictor, stack.correction, stack.apart) if stack else one_point(row, predictor)
        )
        if found is not None:
            self._of[key] = found
            self.points.add(row.row)

    def _spread(self, key: str, rows: Sequence[Row], predictor: Predictor) -> None:
        """Residuals of runs of a stack, of those that were not fitted on where there are some."""
        other = [row for row in rows if row.row not in self.fits[key].simulated]
        used = other if len(other) >= _ENOUGH else rows
        said = [(row, predictor.times(row, self.of(row))) for row in used]
        residuals = [
            (np.log(times.ttft_ms / row.ttft_ms), np.log(times.tpot_ms / row.tpot_ms))
            for row, times in said
            if not isinstance(times, str)
        ]
        if len(residuals) >= _ENOUGH:
            self._residuals[key] = np.array(residuals)


_POINTS: dict[str, Callable[[Row], str]] = {
    "one-per-stack": stack_of,
    "one-per-deployment": deployment_of,
    "stack-and-one": deployment_of,
}
"""Of which runs one calibrates."""
_ENOUGH = 10


@dataclass(frozen=True, slots=True)
class _Needs:
    """What a run needs at least of one of its devices: bytes of a step, FLOPs of a prompt."""

    step_ms: float
    prompt_ms: float


class _Baseline:
    """Constant use of bandwidth and peak: medians over runs of a stack, of the run itself too."""

    def __init__(self, rows: Sequence[Row]) -> None:
        factors: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for row in rows:
            if (needs := _needs(row)) is not None:
                factors[stack_of(row)].append((row.ttft_ms / needs.prompt_ms, row.tpot_ms / needs.step_ms))
        self._factors = {key: np.median(np.array(each), axis=0) for key, each in factors.items()}

    def times(self, row: Row) -> Times | None:
        """None for stacks without a run."""
        factor, needs = self._factors.get(stack_of(row)), _needs(row)
        if factor is None or needs is None:
            return None
        return Times(needs.prompt_ms * float(factor[0]), needs.step_ms * float(factor[1]))


def _needs(row: Row) -> _Needs | None:
    step = row.step
    if step is None:
        return None
    device, ranks = named_device(row.hardware), step.layout.ranks
    weights = model_parameters(step.model) * dtype(step.experts or step.precision.matmul).bits / 8
    clients, tokens = max(1, round(row.concurrency / step.layout.dp)), row.prompt + row.output // 2
    held = Serving(
        batch=clients, context=tokens, kv_format=step.cache, page_tokens=step.page, precision=step.precision
    )
    parts = serving_memory(step.model, replace(step.layout, zero=0), held)[0].parts
    moved = weights / ranks + parts["keys and values"]
    prompt = replace(step, phase="prefill", batch=1, prompt=row.prompt).account().model_flops_per_step
    peak = peak_for(device, "matrix", step.precision.matmul).flops_per_s
    return _Needs(
        moved / device.main_memory.bandwidth_bytes_per_s * 1e3, prompt / step.layout.dp / ranks / peak * 1e3
    )
