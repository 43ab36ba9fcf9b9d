"""Recorded runs of servers, request by request: simulated with the same arrivals and lengths, and compared.

Two tables, as ``published_e2e`` has them: a row for each run (``trace, accelerator, model, tp,
max_num_seqs, max_num_batched_tokens, num_kv_tokens``) and one for each request (``trace, queued_s,
first_token_s, last_token_s, input_tokens, output_tokens``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from time import perf_counter

import numpy as np
import pandas as pd

from hespas.generators.llm import Layout, ServingStep, load_model, precision_of
from hespas.generators.llm.serving_lattice import Grids, cached_tokens, lattice_kernels
from hespas.graph import Diagnostics
from hespas.graph.columns import BoolArray
from hespas.graph.errors import FormatError
from hespas.hardware import load_device
from hespas.simulator.serving import (
    Correction,
    Policy,
    Requests,
    ServingRun,
    StepTimes,
    models_of,
    policy_of,
    serve,
    step_times,
)

__all__ = ["RecordedRun", "Replay", "read_recorded", "replayed"]

_EARLY = 0.2
"""The part of a run's requests that calibrate it: those that were done first."""
_MEMORY_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run: the server, its requests, and when each of them had its first and last token [s]."""

    trace: str
    model: str
    hardware: str
    stack: str
    tp: int
    precision: str
    tokens: int
    sequences: int
    cache_tokens: float
    requests: Requests
    first_s: np.ndarray[tuple[int], np.dtype[np.float64]]
    last_s: np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Predicted over measured, less 1, of the means of a run, and how much faster than the run it came about
    (times of steps included). ``calibrated``: by the fifth of its requests that was done first.
    """

    trace: str
    calibrated: bool
    ttft_error: float
    tpot_error: float
    latency_error: float
    makespan_error: float
    tokens_per_s_error: float
    put_back: int
    measured_s: float
    computed_s: float


def read_recorded(runs: Path, requests: Path) -> list[RecordedRun]:
    """The runs of both tables. Raises ``FormatError`` for missing columns."""
    try:
        heads, rows = pd.read_csv(runs), pd.read_csv(requests)
        traces = {str(trace): part for trace, part in rows.groupby("trace", sort=False)}
        return [_run(head, traces[str(head["trace"])]) for _, head in heads.iterrows()]
    except KeyError as error:
        raise FormatError(
            f"no column {error}", path=str(runs), hint="columns of published_serving.csv"
        ) from error


def _run(head: pd.Series, rows: pd.DataFrame) -> RecordedRun:
    ordered = rows.sort_values("queued_s", kind="stable")
    columns = {name: ordered[name].to_numpy(np.float64) for name in ordered.columns if name != "trace"}
    start, known = float(columns["queued_s"][0]), float(head["num_kv_tokens"])
    return RecordedRun(
        trace=str(head["trace"]),
        model=str(head["model"]),
        hardware=str(head["accelerator"]),
        stack=str(head["engine"]).partition(" ")[0].casefold(),
        tp=int(head["tp"]),
        precision=str(head["precision"]),
        tokens=int(head["max_num_batched_tokens"]),
        sequences=int(head["max_num_seqs"]),
        cache_tokens=known,
        requests=Requests(
            arrival_ns=(columns["queued_s"] - start) * 1e9,
            prompt=columns["input_tokens"].astype(np.int64),
            output=columns["output_tokens"].astype(np.int64),
        ),
        first_s=columns["first_token_s"] - start,
        last_s=columns["last_token_s"] - start,
    )


@dataclass(frozen=True, slots=True)
class _Made:
    run: RecordedRun
    steps: StepTimes
    policy: Policy
    room: float
    seconds: float

    def simulated(self, correction: Correction) -> tuple[ServingRun, float]:
        """The run under a correction, and how long that took [s]."""
        start = perf_counter()
        done = serve(self.run.requests, self.steps.corrected(correction), self.policy, cache_tokens=self.room)
        return done, perf_counter() - start

    @property
    def early(self) -> BoolArray:
        """The requests that were done first."""
        last = self.run.last_s
        return np.asarray(last <= np.quantile(last, _EARLY), np.bool_)


def _made(run: RecordedRun, estimator: str) -> _Made:
    start = perf_counter()
    step = ServingStep(
        model=load_model(run.model), layout=Layout(tp=run.tp), precision=precision_of(run.precision),
        fused=True,
    )  # fmt: skip
    policy = policy_of(run.stack, tokens=run.tokens, sequences=run.sequences)
    longest = int((run.requests.prompt + run.requests.output).max())
    device = load_device(run.hardware)
    steps = step_times(
        lattice_kernels(step, Grids.up_to(tokens=run.tokens, sequences=run.sequences, context=longest)),
        device,
        models_of(run.stack, estimator),
        num_ranks=run.tp,
        diagnostics=Diagnostics(),
    )
    memory = device.main_memory.capacity_bytes * _MEMORY_SHARE
    room = run.cache_tokens
    if np.isnan(room):
        room = cached_tokens(step, memory, tokens=run.tokens, sequences=run.sequences)
    return _Made(run, steps, policy, room, perf_counter() - start)


def replayed(runs: list[RecordedRun], *, estimator: str = "composite") -> list[Replay]:
    """Each run without and with calibration: a factor on all kernels of a device, from its runs on one rank,
    and one on its collectives, from those on several. The fifth of its requests that was done first speaks
    of each; the comparison is of all.
    """
    made = [_made(run, estimator) for run in runs]
    found = [_compared(each, Correction(), calibrated=False) for each in made]
    of_device: dict[str, Correction] = {}
    for each in sorted(made, key=lambda each: each.run.tp):
        known = of_device.get(each.run.hardware)
        names = _KERNELS if known is None else ("collectives",)
        of_device[each.run.hardware] = _calibrated(each, known or Correction(), names)
    return found + [_compared(each, of_device[each.run.hardware], calibrated=True) for each in made]


_KERNELS = ("products", "attention", "collectives", "others")
_HALVINGS, _FACTORS = 18, (0.2, 8.0)


def _calibrated(made: _Made, known: Correction, names: tuple[str, ...]) -> Correction:
    """The factor on some shares by which times per token of early requests are right in the mean."""
    early, run = made.early, made.run
    measured = float(np.mean((run.last_s - run.first_s)[early] / (run.requests.output - 1)[early])) * 1e9

    def with_factor(factor: float) -> Correction:
        stated: Mapping[str, float] = {name: getattr(known, name) * factor for name in names}
        return replace(known, **stated)

    def is_slow(factor: float) -> bool:
        return float(np.mean(made.simulated(with_factor(factor))[0].tpot_ns[early])) > measured

    return with_factor(_edge(is_slow))


def _edge(is_beyond: Callable[[float], bool]) -> float:
    low, high = _FACTORS
    for _ in range(_HALVINGS):
        middle = sqrt(low * high)
        low, high = (low, middle) if is_beyond(middle) else (middle, high)
    return sqrt(low * high)


def _compared(made: _Made, correction: Correction, *, calibrated: bool) -> Replay:
    done, seconds = made.simulated(correction)
    run = made.run
    arrival = run.requests.arrival_ns / 1e9
    tpot = (run.last_s - run.first_s) / (run.requests.output - 1)
    span = float(run.last_s.max())
    return Replay(
        trace=run.trace,
        calibrated=calibrated,
        ttft_error=float(done.ttft_ns.mean() / 1e9 / (run.first_s - arrival).mean() - 1),
        tpot_error=float(done.tpot_ns.mean() / 1e9 / tpot.mean() - 1),
        latency_error=float(done.latency_ns.mean() / 1e9 / (run.last_s - arrival).mean() - 1),
        makespan_error=done.makespan_ns / 1e9 / span - 1,
        tokens_per_s_error=span / (done.makespan_ns / 1e9) - 1,
        put_back=int(done.put_back.sum()),
        measured_s=span,
        computed_s=made.seconds + seconds,
    )
