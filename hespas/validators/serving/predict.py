"""What a run of a server is predicted to be: the times that its clients see in the mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, nan
from typing import NamedTuple

import numpy as np

from hespas.generators.llm import ServingStep
from hespas.generators.llm.serving_lattice import Grids, cached_tokens, lattice_kernels
from hespas.graph import Diagnostics
from hespas.graph.errors import HespasError
from hespas.hardware import named_device
from hespas.simulator.serving import (
    Correction,
    Requests,
    StepTimes,
    lengths,
    models_of,
    serve,
    step_times,
)
from hespas.validators.serving.launches import Launch
from hespas.validators.serving.rows import Row

__all__ = ["Predictor", "Times", "implied_rate"]

_ROUNDS, _FEW, _USABLE = 10, 3, 0.95
"""Requests of each client of a benchmark; as many rounds as are simulated, the later standing for the rest;
the part of memory that the driver leaves.
"""
_MOST_TOKENS, _MOST_SEQUENCES = 1 << 15, 1 << 11
"""Of a step of any server."""
_LEAST = 24


class Times(NamedTuple):
    """Mean times of requests [ms]."""

    ttft_ms: float
    tpot_ms: float


def implied_rate(row: Row, times: Times) -> float:
    """Output tokens in a second that follow from both times: each of the clients gets ``output`` tokens in a
    time to the first and so many times that per token.
    """
    mean = row.output * (1 + row.ratio) / 2
    return row.concurrency * mean / (times.ttft_ms + times.tpot_ms * (mean - 1)) * 1e3


@dataclass(slots=True)
class Predictor:
    """Predicts rows; times of steps are made once for each server. ``estimator`` as on a command line."""

    estimator: str = "composite"
    progress: Callable[[int, int], None] | None = None
    _steps: dict[tuple[ServingStep, str, str], StepTimes | str] = field(
        default_factory=dict[tuple[ServingStep, str, str], "StepTimes | str"]
    )
    _rooms: dict[tuple[ServingStep, str, Launch, int], float] = field(
        default_factory=dict[tuple[ServingStep, str, Launch, int], float]
    )

    def steps(self, row: Row) -> StepTimes | str:
        """Times of steps of a row's server, or why there are none."""
        if row.step is None:
            return row.reason
        key = (row.step, row.hardware, row.stack)
        if key not in self._steps:
            try:
                self._steps[key] = self._made(*key)
            except HespasError as error:
                self._steps[key] = error.message
        return self._steps[key]

    def _made(self, step: ServingStep, hardware: str, stack: str) -> StepTimes:
        grids = Grids.up_to(tokens=_MOST_TOKENS, sequences=_MOST_SEQUENCES, context=1 << 14)
        return step_times(
            lattice_kernels(step, grids),
            named_device(hardware),
            models_of(stack, self.estimator),
            num_ranks=step.layout.ranks,
            diagnostics=Diagnostics(),
        )

    def times(self, row: Row, correction: Correction) -> Times | str:
        """The prediction of a row, or why there is none."""
        steps = self.steps(row)
        if isinstance(steps, str) or row.step is None:
            return steps if isinstance(steps, str) else row.reason
        policy, room = row.launch.policy, self._room(row, row.step)
        if room < 1:
            return f"the weights leave no room for a cache in {row.step.layout.ranks} x {row.hardware}"
        clients = max(1, round(row.concurrency / row.step.layout.dp))
        requests = _requests(row, clients)
        try:
            run = serve(requests, self._launched(row, steps, correction), policy, cache_tokens=room)
        except HespasError as error:
            return error.message
        ttft = run.ttft_ns
        first, later = ttft[:clients], ttft[clients:]
        mean = (first.mean() + (_ROUNDS - 1) * later.mean()) / _ROUNDS
        return Times(float(mean) / 1e6, float(np.nanmean(run.tpot_ns)) / 1e6)

    def load_share(self, row: Row) -> float:
        """Return requests under way on a replica over what it holds, of sequences or of tokens in its cache;
        NaN where the server is unknown.
        """
        if row.step is None:
            return nan
        clients = max(1, round(row.concurrency / row.step.layout.dp))
        tokens = clients * (row.prompt + row.output) * (1 + row.ratio) / 2
        room = self._room(row, row.step)
        return max(clients / row.launch.policy.sequences, tokens / room if room > 0 else inf)

    @staticmethod
    def _launched(row: Row, steps: StepTimes, correction: Correction) -> StepTimes:
        launch, layers = row.launch, 1 if row.step is None else len(row.step.model.layers)
        return replace(
            steps.corrected(correction),
            captured=launch.captured,
            drafts=launch.drafts,
            draft_share=1 / layers,
        )

    def _room(self, row: Row, step: ServingStep) -> float:
        """Tokens of the cache."""
        launch = row.launch
        key = (step, row.hardware, launch, row.concurrency)
        if key not in self._rooms:
            memory = named_device(row.hardware).main_memory.capacity_bytes
            share = _USABLE if launch.of_free else launch.memory_share
            room = cached_tokens(step, memory * share, tokens=launch.policy.tokens, sequences=row.concurrency)
            self._rooms[key] = room * launch.memory_share if launch.of_free else room
        return self._rooms[key]

    def all_times(self, rows: Sequence[Row], correction_of: Callable[[Row], Correction]) -> list[Times | str]:
        """Predictions of rows, those of one server after another."""
        found: list[Times | str] = []
        for done, row in enumerate(rows):
            if self.progress:
                self.progress(done, len(rows))
            found.append(self.times(row, correction_of(row)))
        return found


def _requests(row: Row, clients: int) -> Requests:
    count = max(clients * _FEW, clients + _LEAST)
    generator = np.random.default_rng(row.prompt * 31 + row.output)
    return Requests(
        arrival_ns=np.zeros(count),
        prompt=lengths(count, row.prompt, row.ratio, generator),
        output=lengths(count, row.output, row.ratio, generator),
        concurrency=clients,
    )
