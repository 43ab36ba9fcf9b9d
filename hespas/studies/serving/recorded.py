"""Replays of recorded runs of servers: simulation with the recorded arrivals and lengths, request by request.

The input is two tables as in ``published_e2e``. One has a row per run (``trace, accelerator, model, tp, dp,
ep, max_num_seqs, max_num_batched_tokens, num_kv_tokens``; empty ``dp`` and ``ep`` are 1; limits and cache are
per replica). The other has a row per request (``trace, queued_s, first_token_s, last_token_s, input_tokens,
output_tokens``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan, sqrt
from pathlib import Path
from time import perf_counter
from typing import Annotated

import msgspec
import numpy as np

from hespas.files.documents import Count, Figure
from hespas.files.tables import Column, read_typed_table
from hespas.generators.llm import ServingStep, named_model, precision_of, serving_layout
from hespas.generators.llm.serving_lattice import LatticeGrids, cached_tokens, lattice_kernels
from hespas.graph import Diagnostics
from hespas.graph.columns import BoolArray, FloatArray
from hespas.graph.errors import HespasError, UnsupportedError, clipped
from hespas.hardware import canonical_name, named_device
from hespas.simulator.serving import (
    Correction,
    Policy,
    Requests,
    ServingRun,
    StepTimes,
    models_of,
    policy_of,
    serve_replicas,
    step_times,
)
from hespas.simulator.serving.engine_parameters import Stack, parameters_of
from hespas.studies.serving.predict import Capacity, capacity_of, peak_concurrent

__all__ = ["RecordedRun", "RunReplay", "read_recorded", "replay_runs"]

_CALIBRATION_SHARE = 0.2
"""Share of the requests of a run that calibrate: the first to finish. They are never compared."""
_MEMORY_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """Recorded run: the server, its requests, and the times of their first and last tokens [s]."""

    trace: str
    model: str
    hardware: str
    engine: str
    tp: int
    dp: int = 1
    ep: int = 1
    precision: str
    tokens: int
    sequences: int
    cache_tokens: float
    requests: Requests
    first_s: FloatArray
    last_s: FloatArray

    @property
    def tpot_s(self) -> FloatArray:
        """Return the TPOT of each request; NaN for one output token."""
        later_tokens = self.requests.output - 1
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(later_tokens > 0, (self.last_s - self.first_s) / later_tokens, nan)

    @property
    def is_early(self) -> BoolArray:
        """Return a mask of the first requests to finish, which are used for calibration, shape
        ``(requests,)``.
        """
        return np.asarray(self.last_s <= np.quantile(self.last_s, _CALIBRATION_SHARE), np.bool_)


class RunReplay(msgspec.Struct, frozen=True, kw_only=True):
    """Replay of a recorded run. Errors are relative errors of means over the requests, or of their
    percentiles (p50, p90, p99), without the first fifth. The first fifth is used to calibrate.

    The makespan is from the end of the first fifth to the last token. load_share is the peak load relative to
    the capacity for sequences or KV-cache tokens. If it is near 1 or above, queueing dominates the TTFT.
    measured_s is the duration of the run. computed_s is the time that Hespas needed to estimate the steps and
    to simulate the run, calibrating_s the time that its calibration needed (null: none).
    """

    trace: str
    calibrated: bool
    requests: Count
    ttft_error: Figure
    tpot_error: Figure
    latency_error: Figure
    makespan_error: Figure
    tokens_per_s_error: Figure
    ttft_p50_error: Figure
    ttft_p90_error: Figure
    ttft_p99_error: Figure
    tpot_p50_error: Figure
    tpot_p90_error: Figure
    tpot_p99_error: Figure
    load_share: Figure
    capacity: Capacity
    put_back: Count
    measured_s: Figure
    computed_s: Figure
    calibrating_s: Figure


_Count = Annotated[int, Column(low=1)]


class _RunColumns(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of the table of runs."""

    trace: str
    accelerator: str
    model: str
    engine: str
    tp: _Count
    dp: _Count = 1
    ep: _Count = 1
    precision: str
    max_num_seqs: _Count
    max_num_batched_tokens: _Count
    num_kv_tokens: float = nan


_Seconds = Annotated[float, Column(high=1e12, unit="s")]


class _RequestColumns(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of the table of requests."""

    trace: str
    queued_s: _Seconds
    first_token_s: _Seconds
    last_token_s: _Seconds
    input_tokens: _Count
    output_tokens: _Count


def read_recorded(runs: Path, requests: Path, *, diagnostics: Diagnostics | None = None) -> list[RecordedRun]:
    """Read the runs of both tables. Requests without a run are ignored and counted.

    Raises ``FormatError`` for other tables, invalid cells, and a run without requests.
    """
    by_trace = defaultdict[str, list[_RequestColumns]](list)
    for row, request in read_typed_table(requests, _RequestColumns):
        if not request.queued_s <= request.first_token_s <= request.last_token_s:
            problem = f"is {request.last_token_s:g}, after {request.queued_s:g} and {request.first_token_s:g}"
            raise row.fault(
                "last_token_s", problem, "times of queueing, first and last token in ascending order"
            )
        by_trace[request.trace].append(request)
    recorded: list[RecordedRun] = []
    for row, run in read_typed_table(runs, _RunColumns):
        if run.trace not in by_trace:
            problem = f"is {clipped(run.trace)!r}, which has no request in {requests}"
            raise row.fault("trace", problem, "the name of a trace with requests")
        rows = by_trace[run.trace]
        times = np.array([(row.queued_s, row.first_token_s, row.last_token_s) for row in rows], np.float64)
        order = np.argsort(times[:, 0], kind="stable")
        queued, first, last = times[order].T - times[order[0], 0]
        prompt, output = np.array([(row.input_tokens, row.output_tokens) for row in rows], np.int64)[order].T
        recorded.append(
            RecordedRun(
                trace=run.trace,
                model=run.model,
                hardware=canonical_name(run.accelerator) or run.accelerator,
                engine=run.engine.partition(" ")[0].casefold(),
                tp=run.tp,
                dp=run.dp,
                ep=run.ep,
                precision=run.precision,
                tokens=run.max_num_batched_tokens,
                sequences=run.max_num_seqs,
                cache_tokens=run.num_kv_tokens,
                requests=Requests(arrival_ns=queued * 1e9, prompt=prompt, output=output),
                first_s=first,
                last_s=last,
            )
        )
    others = by_trace.keys() - {run.trace for run in recorded}
    if diagnostics is not None:
        diagnostics.warning(
            "serving.other-requests", str(requests), "requests of traces without a run are ignored",
            count=sum(len(by_trace[trace]) for trace in others),
        )  # fmt: skip
    return recorded


@dataclass(frozen=True, slots=True)
class _ReplayTimes:
    """Simulated times of all requests of a replayed run, in order of arrival [ns], shape ``(requests,)``."""

    ttft_ns: FloatArray
    tpot_ns: FloatArray
    latency_ns: FloatArray
    last_token_ns: FloatArray
    put_back: int

    @classmethod
    def of(cls, runs: Sequence[ServingRun]) -> _ReplayTimes:
        """Join the simulated runs of replicas, which serve requests round-robin, to times in order of
        arrival.
        """
        count, num_replicas = sum(len(run.requests) for run in runs), len(runs)

        def joined(name: str) -> FloatArray:
            column = np.empty(count)
            for replica, run in enumerate(runs):
                column[replica::num_replicas] = getattr(run, name)
            return column

        return cls(
            ttft_ns=joined("ttft_ns"),
            tpot_ns=joined("tpot_ns"),
            latency_ns=joined("latency_ns"),
            last_token_ns=joined("last_token_ns"),
            put_back=sum(int(run.preemptions.sum()) for run in runs),
        )


@dataclass(frozen=True, slots=True)
class _PreparedRun:
    """Recorded run with the step times, policy and KV-cache size of its server, and the parameters of its
    engine that ship with the package (``shipped``).
    """

    run: RecordedRun
    steps: StepTimes
    policy: Policy
    cache_tokens: float
    shipped: Correction
    seconds: float
    """Time that the estimation of steps took [s]."""

    @property
    def load_share(self) -> float:
        """Return the peak load relative to the capacity of the server."""
        run, requests = self.run, self.run.requests
        span = requests.arrival_ns / 1e9, run.last_s
        sequences = peak_concurrent(*span, np.ones(len(requests), np.int64)) / (run.sequences * run.dp)
        tokens = peak_concurrent(*span, requests.prompt + requests.output) / (self.cache_tokens * run.dp)
        return max(sequences, tokens)

    def simulated(self, correction: Correction) -> tuple[_ReplayTimes, float]:
        """Simulate the run with a correction. Return the times of its requests, and the time that the
        simulation needed [s].
        """
        start = perf_counter()
        steps = self.steps.corrected(correction)
        runs = serve_replicas(
            self.run.requests, steps, self.policy, self.run.dp, cache_tokens=self.cache_tokens
        )
        return _ReplayTimes.of(runs), perf_counter() - start


def _prepared(run: RecordedRun, estimator: str) -> _PreparedRun:
    """Return a recorded run with the estimated step times of its server."""
    if run.is_early.all():
        raise UnsupportedError(
            "all finished requests are used for calibration, so that none is left to compare",
            hint="record more requests: the first fifth calibrates",
        )
    start = perf_counter()
    model = named_model(run.model)
    step = ServingStep(
        model=model, layout=serving_layout(model, tp=run.tp, dp=run.dp, ep=run.ep),
        precision=precision_of(run.precision), fused=True,
    )  # fmt: skip
    policy = policy_of(run.engine, tokens=run.tokens, sequences=run.sequences)
    longest = int((run.requests.prompt + run.requests.output).max())
    device = named_device(run.hardware)
    steps = step_times(
        lattice_kernels(
            step, LatticeGrids.up_to(tokens=run.tokens, sequences=run.sequences, context=longest)
        ),
        device,
        models_of(run.engine, estimator),
        num_ranks=step.layout.ranks,
        diagnostics=Diagnostics(),
    )
    cache_tokens = run.cache_tokens
    if isnan(cache_tokens):
        cache_tokens = cached_tokens(step, device, _MEMORY_SHARE, tokens=run.tokens, sequences=run.sequences)
    shipped = parameters_of(Stack(device.name, run.engine, step.expert_format), estimator)
    return _PreparedRun(
        run,
        replace(steps, captured=policy.captured),
        policy,
        cache_tokens,
        Correction() if shipped is None else shipped.correction,
        perf_counter() - start,
    )


def replay_runs(
    runs: Sequence[RecordedRun], *, estimator: str = "composite", diagnostics: Diagnostics | None = None
) -> list[RunReplay]:
    """Replay each run twice: with the parameters of engines that ship with the package, and calibrated.

    The calibration has two factors per device. The factor on all kernels is fitted to runs on one rank, the
    factor on collectives to runs on several ranks. The first fifth of the requests is used to calibrate, the
    others are compared. A run that cannot be replayed is skipped with a warning.
    """
    messages = diagnostics if diagnostics is not None else Diagnostics()
    prepared: list[_PreparedRun] = []
    uncalibrated: list[RunReplay] = []
    for run in runs:
        try:
            prepared.append(_prepared(run, estimator))
            uncalibrated.append(_compared(prepared[-1], prepared[-1].shipped))
            if (state := uncalibrated[-1].capacity) in {"near", "beyond"}:
                text = f"{state} the capacity of its server: queueing dominates the TTFT"
                messages.warning("serving.near-capacity", run.trace, text)
        except HespasError as error:
            prepared = [entry for entry in prepared if entry.run is not run]
            messages.warning("serving.not-repeated", run.trace, f"not replayed: {error.message}")
    of_device: dict[str, Correction] = {}
    seconds: dict[str, float] = {}
    for entry in sorted(prepared, key=lambda entry: entry.run.tp):
        run = entry.run
        start, previous = perf_counter(), of_device.get(run.hardware)
        if previous is not None and run.tp * run.dp == 1:
            continue  # it has no collectives
        names = _KERNELS if previous is None else ("collectives",)
        correction = _calibrated(entry, previous or entry.shipped, names)
        if correction is None:
            text = "not calibrated: no early request has more than one output token"
            messages.warning("serving.uncalibrated", run.trace, text)
            continue
        of_device[run.hardware] = correction
        seconds[run.trace] = perf_counter() - start
    return uncalibrated + [
        _compared(entry, of_device[entry.run.hardware], seconds.get(entry.run.trace, 0.0))
        for entry in prepared
        if entry.run.hardware in of_device
    ]


_KERNELS = ("products", "attention", "collectives", "others")
_HALVINGS, _FACTORS = 12, (0.2, 8.0)
"""Steps and range of the bisection, which ends within a thousandth."""


def _calibrated(entry: _PreparedRun, start: Correction, names: tuple[str, ...]) -> Correction | None:
    """Return the correction ``start`` with the factors in ``names`` scaled, so that the simulated mean TPOT
    of early requests equals the measured one. None if no early request has a TPOT.
    """
    run = entry.run
    early = run.is_early & (run.requests.output > 1)
    if not early.any():
        return None
    measured = float(np.mean(run.tpot_s[early])) * 1e9

    def with_factor(factor: float) -> Correction:
        values: Mapping[str, float] = {name: getattr(start, name) * factor for name in names}
        return replace(start, **values)

    low, high = _FACTORS
    for _ in range(_HALVINGS):
        middle = sqrt(low * high)
        tpot_ns = float(np.mean(entry.simulated(with_factor(middle))[0].tpot_ns[early]))
        low, high = (low, middle) if tpot_ns > measured else (middle, high)
    return with_factor(sqrt(low * high))


def _compared(entry: _PreparedRun, correction: Correction, calibrating_s: float = nan) -> RunReplay:
    """Return the errors of a simulated run against its recording. ``calibrating_s`` is the time that its
    calibration needed (NaN: none).
    """
    simulated, seconds = entry.simulated(correction)
    run, later = entry.run, ~entry.run.is_early
    arrival = run.requests.arrival_ns / 1e9
    answers = later & (run.requests.output > 1)
    start_s = float(run.last_s[~later].max())
    span = float(simulated.last_token_ns.max()) / 1e9 - start_s
    measured = float(run.last_s.max()) - start_s
    ttft, tpot = (simulated.ttft_ns, run.first_s - arrival, later), (simulated.tpot_ns, run.tpot_s, answers)
    return RunReplay(
        trace=run.trace,
        calibrated=not isnan(calibrating_s),
        requests=int(later.sum()),
        ttft_error=_error(*ttft),
        tpot_error=_error(*tpot),
        latency_error=_error(simulated.latency_ns, run.last_s - arrival, later),
        makespan_error=span / measured - 1,
        tokens_per_s_error=measured / span - 1 if span > 0 else nan,
        ttft_p50_error=_error(*ttft, 50),
        ttft_p90_error=_error(*ttft, 90),
        ttft_p99_error=_error(*ttft, 99),
        tpot_p50_error=_error(*tpot, 50),
        tpot_p90_error=_error(*tpot, 90),
        tpot_p99_error=_error(*tpot, 99),
        load_share=entry.load_share,
        capacity=capacity_of(entry.load_share),
        put_back=simulated.put_back,
        measured_s=float(run.last_s.max()),
        computed_s=entry.seconds + seconds,
        calibrating_s=calibrating_s,
    )


def _error(
    predicted_ns: FloatArray, measured_s: FloatArray, mask: BoolArray, percentile: float = nan
) -> float:
    """Return the relative error of a percentile, or without one of the mean, over the requests in ``mask``;
    NaN if the measured figure is 0 or missing.
    """
    if not mask.any():
        return nan
    columns = predicted_ns[mask] / 1e9, measured_s[mask]
    predicted, measured = (
        float(column.mean() if isnan(percentile) else np.percentile(column, percentile)) for column in columns
    )
    return predicted / measured - 1 if measured > 0 else nan
