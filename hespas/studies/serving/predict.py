"""Predicted mean TTFT and TPOT of a run of a server, and the load of the run relative to the capacity of the
server.

Near and beyond the capacity, a small error of the rate causes a large error of the TTFT. Such runs are
marked, and their errors are summarized separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, inf, isnan, nan
from typing import Literal, NamedTuple

import numpy as np

from hespas.generators.llm import ServingStep
from hespas.generators.llm.serving_lattice import (
    LatticeGrids,
    cache_transfer_ns,
    cached_tokens,
    draft_layer,
    lattice_kernels,
    with_draft_layer,
)
from hespas.graph import Diagnostics
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import HespasError
from hespas.graph.progress import Progress
from hespas.hardware import named_device
from hespas.simulator.serving import (
    Correction,
    Drafts,
    Requests,
    ServerPool,
    StepTimes,
    lengths,
    models_of,
    serve,
    serve_disaggregated,
    step_times,
)
from hespas.studies.serving.launches import ServerLaunch
from hespas.studies.serving.rows import ServingRow

__all__ = ["Capacity", "MeanTimes", "ServingPredictor", "capacity_of", "implied_rate", "peak_concurrent"]

Capacity = Literal["below", "near", "beyond", "unknown"]
_NEAR_CAPACITY = 0.9
"""Share of the capacity from which requests queue by chance."""
_ROUNDS, _SIMULATED_ROUNDS, _USABLE_MEMORY = 10, 3, 0.95
"""Requests per client of a benchmark; simulated requests per client (the later ones represent the others);
fraction of memory that the driver leaves.
"""
_MAX_TOKENS, _MAX_SEQUENCES = 1 << 15, 1 << 11
"""Limits of a step of any server."""
_MIN_LATER_REQUESTS = 24


class MeanTimes(NamedTuple):
    """Mean TTFT and TPOT over the requests of a run [ms]."""

    ttft_ms: float
    tpot_ms: float


def implied_rate(row: ServingRow, times: MeanTimes) -> float:
    """Return the output tokens per second that follow from mean TTFT and TPOT and the number of concurrent
    clients.
    """
    mean = row.output * (1 + row.ratio) / 2
    return row.concurrency * mean / (times.ttft_ms + times.tpot_ms * (mean - 1)) * 1e3


@dataclass(slots=True)
class ServingPredictor:
    """Predictor of measured runs. It estimates step times once per server. ``estimator`` is as on the command
    line.
    """

    estimator: str = "composite"
    progress: Progress | None = None
    _steps: dict[tuple[ServingStep, str, str, int], StepTimes | str] = field(
        default_factory=dict[tuple[ServingStep, str, str, int], "StepTimes | str"]
    )
    _cache_sizes: dict[tuple[ServingStep, str, ServerLaunch, int], float] = field(
        default_factory=dict[tuple[ServingStep, str, ServerLaunch, int], float]
    )

    def steps(self, row: ServingRow) -> StepTimes | str:
        """Return the step times of a row's server, or the reason why it has none. Separate prefill servers
        need step times, too.
        """
        if row.prefill is not None and row.prefill.step is not None:
            prefill = self._estimated(row, row.prefill.step)
            if isinstance(prefill, str):
                return prefill
        return row.reason if row.step is None else self._estimated(row, row.step)

    def _estimated(self, row: ServingRow, step: ServingStep) -> StepTimes | str:
        """Return the times of a serving step on the device and the engine of a row, or the reason why it has
        none.
        """
        drafts = row.launch.drafts
        key = (step, row.hardware, row.engine, drafts)
        if key not in self._steps:
            grids = LatticeGrids.up_to(tokens=_MAX_TOKENS, sequences=_MAX_SEQUENCES, context=1 << 14)

            def estimate(part: ServingStep, queries: int = 1) -> StepTimes:
                return step_times(
                    lattice_kernels(part, grids, queries=queries),
                    named_device(row.hardware),
                    models_of(row.engine, self.estimator),
                    num_ranks=part.layout.ranks,
                    diagnostics=Diagnostics(),
                )

            try:
                drafted = estimate(draft_layer(step)) if drafts else None
                self._steps[key] = replace(
                    estimate(step, 1 + drafts), drafts=Drafts(tokens=drafts, times=drafted)
                )
            except HespasError as error:
                self._steps[key] = error.message
        return self._steps[key]

    def times(self, row: ServingRow, correction: Correction) -> MeanTimes | str:
        """Return the predicted times of a row, or the reason why it has none."""
        if row.step is None:
            return row.reason
        servers = [(row.step, row.servers)]
        if row.prefill is not None and row.prefill.step is not None:
            servers.insert(0, (row.prefill.step, row.prefill.servers))
        # equal replicas share the clients: the smallest part with the same proportions is simulated
        replicas = [count * step.layout.dp for step, count in servers]
        parts = gcd(*replicas)
        pools: list[ServerPool] = []
        for (step, _), count in zip(servers, replicas, strict=True):
            estimated = self._estimated(row, step)
            if isinstance(estimated, str):
                return estimated
            cache_tokens = self._cache_tokens(row, step)
            if cache_tokens < 1:
                return f"the weights leave no memory for a KV cache in {step.layout.ranks} x {row.hardware}"
            launched = replace(estimated.corrected(correction), captured=row.launch.policy.captured)
            pools.append(ServerPool(launched, row.launch.policy, count // parts, cache_tokens))
        clients = max(1, round(row.concurrency / parts))
        count = max(clients * _SIMULATED_ROUNDS, clients + _MIN_LATER_REQUESTS)
        generator = np.random.default_rng(row.prompt * 31 + row.output)
        requests = Requests(
            arrival_ns=np.zeros(count),
            prompt=lengths(count, row.prompt, row.ratio, generator),
            output=lengths(count, row.output, row.ratio, generator),
            concurrency=clients,
        )
        try:
            if len(pools) > 1:
                send_ns = cache_transfer_ns((step for step, _ in servers), requests.prompt)
                run = serve_disaggregated(requests, pools[0], pools[1], send_ns)
            else:
                (launched, policy, _, cache_tokens), *_ = pools
                run = serve(requests, launched, policy, cache_tokens=cache_tokens)
        except HespasError as error:
            return error.message
        ttft = run.ttft_ns
        first, later = ttft[:clients], ttft[clients:]
        mean = (first.mean() + (_ROUNDS - 1) * later.mean()) / _ROUNDS
        return MeanTimes(float(mean) / 1e6, float(np.nanmean(run.tpot_ns)) / 1e6)

    def load_share(self, row: ServingRow) -> float:
        """Return the load of a server relative to its capacity (0.5 is half full). It is the larger of two
        ratios: running sequences to their maximum number, and their tokens to the KV-cache tokens. NaN if the
        server is unknown.
        """
        if row.step is None:
            return nan
        clients = row.clients
        tokens = clients * (row.prompt + row.output) * (1 + row.ratio) / 2
        cache_tokens = self._cache_tokens(row, row.step)
        return max(clients / row.launch.policy.sequences, tokens / cache_tokens if cache_tokens > 0 else inf)

    def _cache_tokens(self, row: ServingRow, step: ServingStep) -> float:
        """Return the KV-cache size of a replica in tokens."""
        launch = row.launch
        key = (step, row.hardware, launch, row.concurrency)
        if key not in self._cache_sizes:
            share = _USABLE_MEMORY if launch.of_free else launch.memory_share
            tokens = cached_tokens(
                with_draft_layer(step) if launch.drafts else step,
                named_device(row.hardware),
                share,
                tokens=launch.policy.tokens,
                sequences=row.concurrency,
            )
            self._cache_sizes[key] = tokens * launch.memory_share if launch.of_free else tokens
        return self._cache_sizes[key]

    def all_times(
        self, rows: Sequence[ServingRow], correction_of: Callable[[ServingRow], Correction]
    ) -> list[MeanTimes | str]:
        """Return the predicted times of each row, or the reason why it has none."""
        predictions: list[MeanTimes | str] = []
        for done, row in enumerate(rows):
            if self.progress:
                self.progress(done, len(rows))
            predictions.append(self.times(row, correction_of(row)))
        return predictions


def capacity_of(load_share: float) -> Capacity:
    """Return the category of a load relative to the capacity of the server."""
    if isnan(load_share):
        return "unknown"
    return "beyond" if load_share > 1 else "near" if load_share >= _NEAR_CAPACITY else "below"


def peak_concurrent(start_s: FloatArray, end_s: FloatArray, amount: IntArray) -> float:
    """Return the maximum over time of the sum of ``amount`` over the running requests. A request runs from
    ``start_s`` to ``end_s``. O(requests log requests).
    """
    times = np.concatenate((start_s, end_s))
    change = np.concatenate((amount, -amount))
    order = np.lexsort((change, times))  # at equal times, ends come before starts
    return float(np.cumsum(change[order]).max())
