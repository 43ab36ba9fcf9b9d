"""Recorded runs of servers, request by request: simulated with the same arrivals and lengths, and compared.

Two tables, as ``published_e2e`` has them: a row for each run (``trace, accelerator, model, tp, dp, ep,
max_num_seqs, max_num_batched_tokens, num_kv_tokens``; empty ``dp`` and ``ep`` are 1; limits and cache are
of each of ``dp`` replicas) and one for each request (``trace, queued_s,
first_token_s, last_token_s, input_tokens, output_tokens``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan, sqrt
from pathlib import Path
from time import perf_counter

import numpy as np

from hespas.generators.llm import ServingStep, named_model, precision_of, serving_layout
from hespas.generators.llm.serving_lattice import Grids, cached_tokens, lattice_kernels
from hespas.graph import Diagnostics
from hespas.graph.columns import BoolArray, FloatArray
from hespas.graph.errors import HespasError, UnsupportedError, clipped
from hespas.hardware import canonical, named_device
from hespas.simulator.serving import (
    Correction,
    Policy,
    Requests,
    ServingRun,
    StepTimes,
    models_of,
    policy_of,
    serve,
    share_of,
    step_times,
)
from hespas.validators.serving.capacity import capacity_of, most_at_once
from hespas.validators.serving.cells import Cells, read_cells

__all__ = ["RecordedRun", "Replay", "read_recorded", "replayed"]

_EARLY = 0.2
"""The part of a run's requests that calibrate it: those that were done first. Never compared."""
_MEMORY_SHARE = 0.9
_LATEST_S = 1e12
"""Beyond, a time is none of any clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run: the server, its requests, and when each of them had its first and last token [s]."""

    trace: str
    model: str
    hardware: str
    stack: str
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
        """Time per output token after the first of each request; NaN for answers of one."""
        more = self.requests.output - 1
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(more > 0, (self.last_s - self.first_s) / more, nan)

    @property
    def is_early(self) -> BoolArray:
        """The requests that were done first: they calibrate, all others are compared."""
        return np.asarray(self.last_s <= np.quantile(self.last_s, _EARLY), np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Predicted over measured, less 1, of the means of so many ``requests`` of a run: those that were done
    after the first fifth, which calibrates (``calibrated``). The makespan is from when that fifth was done
    to the last token of all. ``load_share`` is the most that requests asked of the server at once over what
    it holds: of sequences or of tokens in its cache. ``measured_s`` is how long the whole run took,
    ``computed_s`` how long its simulation did with the times of its steps, ``calibrating_s`` how long
    calibration did before (NaN: none).
    """

    trace: str
    calibrated: bool
    requests: int
    ttft_error: float
    tpot_error: float
    latency_error: float
    makespan_error: float
    tokens_per_s_error: float
    load_share: float
    put_back: int
    measured_s: float
    computed_s: float
    calibrating_s: float


_OF_RUNS = (
    "trace", "accelerator", "model", "engine", "tp", "precision", "max_num_seqs", "max_num_batched_tokens",
)  # fmt: skip
_OF_REQUESTS = ("trace", "queued_s", "first_token_s", "last_token_s", "input_tokens", "output_tokens")


def read_recorded(runs: Path, requests: Path, *, diagnostics: Diagnostics | None = None) -> list[RecordedRun]:
    """The runs of both tables. Requests of no run are left out and counted. Raises ``FormatError`` for what
    are no such tables, cells that hold no such thing, and a run without requests.
    """
    heads, of = read_cells(runs, _OF_RUNS), defaultdict[str, list[Cells]](list)
    for each in read_cells(requests, _OF_REQUESTS):
        of[each.stated("trace")].append(each)
    found: list[RecordedRun] = []
    for head in heads:
        trace = head.stated("trace")
        if trace not in of:
            raise head.fault("trace", f"is {clipped(trace)!r}, of which {requests} has no request", "a trace")
        found.append(_run(head, of[trace]))
    others = of.keys() - {run.trace for run in found}
    if diagnostics is not None:
        diagnostics.warning(
            "serving.other-requests", str(requests), "requests of traces that no run has were left out",
            count=sum(len(of[trace]) for trace in others),
        )  # fmt: skip
    return found


def _run(head: Cells, rows: Sequence[Cells]) -> RecordedRun:
    times = np.array([_seconds(each) for each in rows], np.float64)
    order = np.argsort(times[:, 0], kind="stable")
    queued, first, last = times[order].T - times[order[0], 0]
    prompt, output = (
        np.array([each.count(name) for each in rows], np.int64)[order]
        for name in ("input_tokens", "output_tokens")
    )
    return RecordedRun(
        trace=head.stated("trace"),
        model=head.stated("model"),
        hardware=canonical(head.stated("accelerator")) or head.stated("accelerator"),
        stack=head.stated("engine").partition(" ")[0].casefold(),
        tp=head.count("tp"),
        dp=head.count("dp", 1),
        ep=head.count("ep", 1),
        precision=head.stated("precision"),
        tokens=head.count("max_num_batched_tokens"),
        sequences=head.count("max_num_seqs"),
        cache_tokens=head.number("num_kv_tokens"),
        requests=Requests(arrival_ns=queued * 1e9, prompt=prompt, output=output),
        first_s=first,
        last_s=last,
    )


def _seconds(cells: Cells) -> tuple[float, float, float]:
    """When a request was queued, and had its first and last token."""
    queued, first, last = (
        cells.number(name, None, "seconds") for name in ("queued_s", "first_token_s", "last_token_s")
    )
    if last > _LATEST_S:
        raise cells.fault("last_token_s", f"is {last:g}", f"seconds, at most {_LATEST_S:g}")
    if not queued <= first <= last:
        raise cells.fault(
            "last_token_s", f"is {last:g}, after {queued:g} and {first:g}", "queued, first and last in order"
        )
    return queued, first, last


@dataclass(frozen=True, slots=True)
class _Simulated:
    """Times of all requests in the order of their arrival [ns], shape ``(requests,)``."""

    ttft_ns: FloatArray
    tpot_ns: FloatArray
    latency_ns: FloatArray
    last_token_ns: FloatArray
    put_back: int

    @classmethod
    def of(cls, runs: Sequence[ServingRun]) -> _Simulated:
        """Join the runs of replicas that took turns."""
        count, turns = sum(len(run.requests) for run in runs), len(runs)

        def joined(name: str) -> FloatArray:
            column = np.empty(count)
            for place, run in enumerate(runs):
                column[place::turns] = getattr(run, name)
            return column

        return cls(
            ttft_ns=joined("ttft_ns"),
            tpot_ns=joined("tpot_ns"),
            latency_ns=joined("latency_ns"),
            last_token_ns=joined("last_token_ns"),
            put_back=sum(int(run.put_back.sum()) for run in runs),
        )


@dataclass(frozen=True, slots=True)
class _Made:
    run: RecordedRun
    steps: StepTimes
    policy: Policy
    room: float
    seconds: float
    """That the times of steps took."""

    @property
    def load_share(self) -> float:
        """The most that requests asked of the server at once over what it holds."""
        run, requests = self.run, self.run.requests
        span = requests.arrival_ns / 1e9, run.last_s
        sequences = most_at_once(*span, np.ones(len(requests), np.int64)) / (run.sequences * run.dp)
        tokens = most_at_once(*span, requests.prompt + requests.output) / (self.room * run.dp)
        return max(sequences, tokens)

    def simulated(self, correction: Correction) -> tuple[_Simulated, float]:
        """The run under a correction, replicas taking turns, and how long that took [s]."""
        start = perf_counter()
        steps, busy = self.steps.corrected(correction), min(self.run.dp, len(self.run.requests))
        shares = [share_of(self.run.requests, place, busy) for place in range(busy)]
        runs = [serve(share, steps, self.policy, cache_tokens=self.room) for share in shares]
        return _Simulated.of(runs), perf_counter() - start


def _made(run: RecordedRun, estimator: str) -> _Made:
    if run.is_early.all():
        raise UnsupportedError("no request was done after those that calibrate")
    start = perf_counter()
    model = named_model(run.model)
    step = ServingStep(
        model=model, layout=serving_layout(model, tp=run.tp, dp=run.dp, ep=run.ep),
        precision=precision_of(run.precision), fused=True,
    )  # fmt: skip
    policy = policy_of(run.stack, tokens=run.tokens, sequences=run.sequences)
    longest = int((run.requests.prompt + run.requests.output).max())
    device = named_device(run.hardware)
    steps = step_times(
        lattice_kernels(step, Grids.up_to(tokens=run.tokens, sequences=run.sequences, context=longest)),
        device,
        models_of(run.stack, estimator),
        num_ranks=step.layout.ranks,
        diagnostics=Diagnostics(),
    )
    memory = device.main_memory.capacity_bytes * _MEMORY_SHARE
    room = run.cache_tokens
    if np.isnan(room):
        room = cached_tokens(step, memory, tokens=run.tokens, sequences=run.sequences)
    return _Made(run, steps, policy, room, perf_counter() - start)


def replayed(
    runs: Sequence[RecordedRun], *, estimator: str = "composite", diagnostics: Diagnostics | None = None
) -> list[Replay]:
    """Each run without and with calibration: a factor on all kernels of a device, from its runs on one rank,
    and one on its collectives, from those on several. The fifth of its requests that was done first speaks
    of each; the comparison is of all others. A run that cannot be repeated is left out and said.
    """
    found = diagnostics if diagnostics is not None else Diagnostics()
    made: list[_Made] = []
    plain: list[Replay] = []
    for run in runs:
        try:
            made.append(_made(run, estimator))
            plain.append(_compared(made[-1], Correction()))
            if (state := capacity_of(plain[-1].load_share)) in {"near", "beyond"}:
                text = f"{state} the capacity of its server: the time to the first token is that of a queue"
                found.warning("serving.near-capacity", run.trace, text)
        except HespasError as error:
            made = [each for each in made if each.run is not run]
            found.warning("serving.not-repeated", run.trace, f"not repeated: {error.message}")
    of_device: dict[str, Correction] = {}
    seconds: dict[str, float] = {}
    for each in sorted(made, key=lambda each: each.run.tp):
        start, known = perf_counter(), of_device.get(each.run.hardware)
        if known is not None and each.run.tp * each.run.dp == 1:
            continue  # nothing of it tells of collectives
        names = _KERNELS if known is None else ("collectives",)
        factored = _calibrated(each, known or Correction(), names)
        if factored is None:
            found.warning("serving.uncalibrated", each.run.trace, "no early answer has more than one token")
            continue
        of_device[each.run.hardware] = factored
        seconds[each.run.trace] = perf_counter() - start
    return plain + [
        _compared(each, of_device[each.run.hardware], seconds.get(each.run.trace, 0.0))
        for each in made
        if each.run.hardware in of_device
    ]


_KERNELS = ("products", "attention", "collectives", "others")
_HALVINGS, _FACTORS = 12, (0.2, 8.0)
"""The factor is found to a thousandth."""


def _calibrated(made: _Made, known: Correction, names: tuple[str, ...]) -> Correction | None:
    """The factor on some shares by which times per token of early requests are right in the mean; None where
    these have no times per token.
    """
    run = made.run
    early = run.is_early & (run.requests.output > 1)
    if not early.any():
        return None
    measured = float(np.mean(run.tpot_s[early])) * 1e9

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


def _compared(made: _Made, correction: Correction, calibrating_s: float = nan) -> Replay:
    """A run under a correction that took so long to find (NaN: nothing was calibrated)."""
    done, seconds = made.simulated(correction)
    run, later = made.run, ~made.run.is_early
    arrival = run.requests.arrival_ns / 1e9
    answers = later & (run.requests.output > 1)
    known = float(run.last_s[~later].max())
    span, measured = float(done.last_token_ns.max()) / 1e9 - known, float(run.last_s.max()) - known
    return Replay(
        trace=run.trace,
        calibrated=not isnan(calibrating_s),
        requests=int(later.sum()),
        ttft_error=_error(done.ttft_ns, run.first_s - arrival, later),
        tpot_error=_error(done.tpot_ns, run.tpot_s, answers),
        latency_error=_error(done.latency_ns, run.last_s - arrival, later),
        makespan_error=span / measured - 1,
        tokens_per_s_error=measured / span - 1 if span > 0 else nan,
        load_share=made.load_share,
        put_back=done.put_back,
        measured_s=float(run.last_s.max()),
        computed_s=made.seconds + seconds,
        calibrating_s=calibrating_s,
    )


def _error(said_ns: FloatArray, measured_s: FloatArray, of: BoolArray) -> float:
    """Of the means of some requests; NaN where there are none, or nothing was measured to take time."""
    measured = float(measured_s[of].mean()) if of.any() else 0.0
    return float(said_ns[of].mean()) / 1e9 / measured - 1 if measured > 0 else nan
