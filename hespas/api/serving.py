"""Servers of language models: requests in, times to the first token and between tokens out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from hespas.api.arguments import checked
from hespas.api.io import Document, Result, findings, put
from hespas.api.preparation import DEFAULT_ESTIMATOR
from hespas.api.request_log import log_of, requests_of
from hespas.files.documents import Count, Figure, document_bytes
from hespas.generators.llm import Model, ServingStep, load_model, precision_of, serving_layout
from hespas.generators.llm.serving_lattice import Grids, cached_tokens, lattice_kernels
from hespas.graph import Diagnostics, find_dtype
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UnsupportedError, UsageError, clipped
from hespas.graph.hints import NonNegativeInt, PositiveInt, check_fields
from hespas.hardware import load_device
from hespas.simulator.serving import (
    Correction,
    Policy,
    Requests,
    ServingRun,
    StepTimes,
    models_of,
    policy_of,
    share_of,
    step_times,
    weighted_percentile,
)
from hespas.simulator.serving import serve as run_server

if TYPE_CHECKING:
    import pandas

__all__ = [
    "Percentiles",
    "RequestRow",
    "Server",
    "ServingDocument",
    "ServingResult",
    "serve",
    "write_request_rows",
]


_MOST_WAITED = 1e9
"""Of a time of the host: a quarter of an hour, and more than a week of a request."""


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of a time over requests, or over tokens."""

    what: str
    mean_ms: Figure
    p50_ms: Figure
    p90_ms: Figure
    p99_ms: Figure
    max_ms: Figure


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """A request: when it came, its length, and what it saw."""

    arrival_s: Figure
    prompt_tokens: Count
    output_tokens: Count
    queue_ms: Figure
    ttft_ms: Figure
    tpot_ms: Figure
    latency_ms: Figure
    put_back: Count


class ServingDocument(Document, frozen=True, kw_only=True):
    """What hespas serve --json writes. Rates are of the whole run, from the first arrival to the last token;
    cache_tokens is how many tokens' keys and values a replica has room for.
    """

    schema: Literal["hespas.serving/1"] = "hespas.serving/1"
    model: str
    hardware: str
    stack: str
    ranks: Count
    replicas: Count
    requests: Count
    prompt_tokens: Count
    output_tokens: Count
    makespan_s: Figure
    requests_per_s: Figure
    output_tokens_per_s: Figure
    output_tokens_per_s_per_rank: Figure
    steps: Count
    steps_with_prompts: Count
    mean_batch: Figure
    busy_share: Figure
    cache_tokens: Figure
    put_back: Count
    times: list[Percentiles]
    rows: list[RequestRow] | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server of a model: ``tp`` ranks share each layer, ``dp`` replicas of attention each serve a part of
    the requests, experts are spread over ``ep`` ranks. ``experts`` is the element type of experts where it is
    not that of ``precision``, ``cache`` that of keys and values. ``memory_share`` of a device's memory is
    filled at most; ``cache_tokens`` states the room of a replica's cache instead (0: what is left of memory).
    ``host_us``: time of the host that each step waits for; ``sequence_us`` more for each of its sequences,
    ``prompt_us`` for each of its prompts; ``request_ms`` is outside of steps, before the first.
    """

    model: str | Path | Model
    hardware: str
    stack: str = "vllm"
    dp: PositiveInt = 1
    tp: PositiveInt = 1
    ep: PositiveInt = 1
    precision: str = "bf16"
    experts: str = ""
    cache: str = "bf16"
    max_batched_tokens: NonNegativeInt = 0
    max_sequences: NonNegativeInt = 0
    chunked: bool | None = None
    memory_share: float = 0.9
    cache_tokens: NonNegativeInt = 0
    host_us: float = 0.0
    sequence_us: float = 0.0
    prompt_us: float = 0.0
    request_ms: float = 0.0
    estimator: str = DEFAULT_ESTIMATOR

    def __post_init__(self) -> None:
        """Check figures and names. Raises ``UsageError``."""
        check_fields(self)
        precision_of(self.precision)
        for name in ("cache", "experts"):
            if (dtype := getattr(self, name)) and find_dtype(dtype) is None:
                raise UsageError(
                    f"`{name}={clipped(dtype)}` is not an element type", hint="bf16, f16, f8E4M3FN, i8 ..."
                )
        if not 0 < self.memory_share <= 1:
            raise UsageError(f"memory_share {self.memory_share:g} is no part", hint="`memory_share=0.9`")
        for name in ("host_us", "sequence_us", "prompt_us", "request_ms"):
            if not 0 <= getattr(self, name) <= _MOST_WAITED:
                raise UsageError(
                    f"{name} of a server: {getattr(self, name):g}", hint=f"`{name}` of 0 to {_MOST_WAITED:g}"
                )
        self.policy()

    def policy(self) -> Policy:
        """The scheduler. Raises ``UsageError``."""
        return policy_of(
            self.stack,
            tokens=self.max_batched_tokens or None,
            sequences=self.max_sequences or None,
            chunked=self.chunked,
        )

    def step(self) -> ServingStep:
        """Whose kernels run: a step of the generator. Experts that no ``ep`` spreads are shared by all ranks.
        Raises ``UsageError`` for an unknown model.
        """
        model = self.model if isinstance(self.model, Model) else load_model(str(self.model))
        return ServingStep(
            model=model,
            layout=serving_layout(model, tp=self.tp, dp=self.dp, ep=self.ep),
            precision=precision_of(self.precision),
            cache=self.cache,
            experts=self.experts,
            fused=True,
        )

    def times(self, step: ServingStep, context: int, diagnostics: Diagnostics) -> StepTimes:
        """Times of steps, of sequences of at most ``context`` tokens."""
        policy = self.policy()
        grids = Grids.up_to(
            tokens=policy.tokens, sequences=min(policy.sequences, policy.tokens), context=max(context, 128)
        )
        found = step_times(
            lattice_kernels(step, grids),
            load_device(self.hardware),
            models_of(self.stack, self.estimator),
            num_ranks=step.layout.ranks,
            diagnostics=diagnostics,
        )
        host = Correction(
            step_ns=self.host_us * 1e3,
            sequence_ns=self.sequence_us * 1e3,
            prompt_ns=self.prompt_us * 1e3,
            request_ns=self.request_ms * 1e6,
        )
        return found.corrected(host)

    def room(self, step: ServingStep) -> float:
        """Tokens that the cache of a replica holds. Raises ``UnsupportedError`` where weights leave none."""
        if self.cache_tokens:
            return float(self.cache_tokens)
        device, policy = load_device(self.hardware), self.policy()
        memory = device.main_memory.capacity_bytes * self.memory_share
        sequences = min(policy.sequences, policy.tokens)
        found = cached_tokens(step, memory, tokens=policy.tokens, sequences=sequences)
        if found < 1:
            raise UnsupportedError(
                f"the weights of {step.model.name} leave no room for a cache in {memory / 1e9:,.0f} GB",
                hint="a larger `tp`, a narrower `precision`, or `cache_tokens`",
            )
        return float(int(found))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServingResult(Result):
    """What requests saw, one run for each replica that had some."""

    server: Server
    model: str
    runs: tuple[ServingRun, ...]
    cache_tokens: float
    with_rows: bool = False
    inputs: tuple[str, ...] = ()
    diagnostics: Diagnostics = field(default_factory=Diagnostics)

    def _all(self, name: str) -> FloatArray:
        return np.concatenate([np.asarray(getattr(run, name), np.float64) for run in self.runs])

    @property
    def ttft_ns(self) -> FloatArray:
        """Time to the first token of each request, replica by replica."""
        return self._all("ttft_ns")

    @property
    def tpot_ns(self) -> FloatArray:
        """Time per output token of each request, replica by replica; NaN for answers of one token."""
        return self._all("tpot_ns")

    @property
    def makespan_ns(self) -> float:
        """From the first arrival to the last token."""
        return float(self._all("last_token_ns").max() - self._all("arrival_ns").min())

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens given in a second, by all replicas."""
        tokens = sum(int(run.requests.output.sum()) for run in self.runs)
        return tokens / self.makespan_ns * 1e9 if self.makespan_ns > 0 else nan

    def headline(self) -> str:
        """Rates and times in a line."""
        return (
            f"{self.model} on {self.server.dp * self.server.tp} x {self.server.hardware} "
            f"({self.server.stack}): {self.output_tokens_per_s:,.0f} output tokens/s, "
            f"TTFT {np.mean(self.ttft_ns) / 1e6:,.1f} ms and "
            f"TPOT {_mean(self.tpot_ns) / 1e6:,.2f} ms in the mean"
        )

    def times(self) -> list[Percentiles]:
        """TTFT, TPOT and latency of requests, times between tokens."""
        found = [
            _percentiles(what, self._all(name))
            for what, name in (("ttft", "ttft_ns"), ("tpot", "tpot_ns"), ("latency", "latency_ns"))
        ]
        pairs = [run.gaps() for run in self.runs]
        gaps = np.concatenate([pair[0] for pair in pairs])
        tokens = np.concatenate([pair[1] for pair in pairs])
        mean = float((gaps * tokens).sum() / tokens.sum()) if tokens.sum() else nan
        p50, p90, p99 = (weighted_percentile(gaps, tokens, share) / 1e6 for share in (0.5, 0.9, 0.99))
        most = float(gaps.max(initial=0.0)) if len(gaps) else nan
        between = Percentiles(
            what="inter-token", mean_ms=mean / 1e6, p50_ms=p50, p90_ms=p90, p99_ms=p99, max_ms=most / 1e6
        )
        return [*found, between]

    def document(self) -> ServingDocument:
        """The document as a value."""
        steps = [run.steps.columns() for run in self.runs]
        time, batch, prompts = (np.concatenate([each[place] for each in steps]) for place in range(3))
        requests = [run.requests for run in self.runs]
        count, span = sum(map(len, requests)), self.makespan_ns
        ranks = self.server.dp * self.server.tp
        decodes = batch > 0
        return ServingDocument(
            inputs=list(self.inputs),
            diagnostics=findings(self.diagnostics),
            model=self.model,
            hardware=self.server.hardware,
            stack=self.server.stack,
            ranks=ranks,
            replicas=self.server.dp,
            requests=count,
            prompt_tokens=sum(int(each.prompt.sum()) for each in requests),
            output_tokens=sum(int(each.output.sum()) for each in requests),
            makespan_s=span / 1e9,
            requests_per_s=count / span * 1e9 if span > 0 else nan,
            output_tokens_per_s=self.output_tokens_per_s,
            output_tokens_per_s_per_rank=self.output_tokens_per_s / ranks,
            steps=len(time),
            steps_with_prompts=int((prompts > 0).sum()),
            mean_batch=float(np.average(batch[decodes], weights=time[decodes])) if decodes.any() else nan,
            busy_share=float(time.sum() / span / self.server.dp) if span > 0 else nan,
            cache_tokens=self.cache_tokens,
            put_back=sum(int(run.put_back.sum()) for run in self.runs),
            times=self.times(),
            rows=self._rows() if self.with_rows else msgspec.UNSET,
        )

    def _rows(self) -> list[RequestRow]:
        records = self.to_pandas().to_dict("records")
        return [RequestRow(**{str(key): value for key, value in each.items()}) for each in records]

    def to_json(self) -> bytes:
        """The document of ``--json``: ``hespas.serving/1``."""
        return document_bytes(self.document())

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each request, in order of arrival."""
        import pandas as pd

        prompt = np.concatenate([run.requests.prompt for run in self.runs])
        output = np.concatenate([run.requests.output for run in self.runs])
        arrival = self._all("arrival_ns")
        table = pd.DataFrame({
            "arrival_s": arrival / 1e9,
            "prompt_tokens": prompt,
            "output_tokens": output,
            "queue_ms": (self._all("scheduled_ns") - arrival) / 1e6,
            "ttft_ms": self.ttft_ns / 1e6,
            "tpot_ms": self.tpot_ns / 1e6,
            "latency_ms": self._all("latency_ns") / 1e6,
            "put_back": self._all("put_back").astype(np.int64),
        })  # fmt: skip
        return table.sort_values("arrival_s", kind="stable", ignore_index=True)


def _mean(values: FloatArray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else nan


def _percentiles(what: str, values: FloatArray) -> Percentiles:
    known = values[~np.isnan(values)] / 1e6
    if not len(known):
        return Percentiles(what=what, mean_ms=nan, p50_ms=nan, p90_ms=nan, p99_ms=nan, max_ms=nan)
    p50, p90, p99 = (float(each) for each in np.percentile(known, (50, 90, 99)))
    return Percentiles(
        what=what, mean_ms=float(known.mean()), p50_ms=p50, p90_ms=p90, p99_ms=p99, max_ms=float(known.max())
    )


@checked()
def serve(
    server: Server,
    requests: str | Path | Requests,
    *,
    with_rows: bool = False,
    diagnostics: Diagnostics | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ServingResult:
    """Let a server answer requests: those of a log (CSV or JSON lines: arrival, prompt tokens, output
    tokens), of ``poisson:rate=4,prompt=1024,output=256``, ``bursts:`` or ``closed:concurrency=16``, or as a
    value. ``with_rows``: the document has a row for each. ``progress`` is called with the finished requests
    and all. Replicas of attention (``dp``) take turns; those
    beyond the requests that are under way at any time are idle.

    Raises ``UsageError`` for settings that contradict each other, ``UnsupportedError`` for what does not fit
    into memory or has no estimate, ``FormatError`` for a log that cannot be read.
    """
    found = diagnostics if diagnostics is not None else Diagnostics()
    asked = requests if isinstance(requests, Requests) else requests_of(requests)
    if not len(asked):
        raise UsageError("no requests", hint="`requests` of 1 or more")
    step, policy = server.step(), server.policy()
    room = server.room(step)
    times = server.times(step, int((asked.prompt + asked.output).max()), found)
    busy = min(server.dp, len(asked), asked.concurrency or len(asked))
    shares = [share_of(asked, place, busy) for place in range(busy)]
    runs: list[ServingRun] = []
    for share in shares:
        before = sum(len(run.requests) for run in runs)
        told = _counted_on(progress, before, len(asked))
        runs.append(run_server(share, times, policy, cache_tokens=room, progress=told))
    put_back = sum(int(run.put_back.sum()) for run in runs)
    found.info(
        "serving.put-back",
        step.model.name,
        "requests were put back for want of pages of the cache, and their tokens worked on again",
        count=put_back,
    )
    return ServingResult(
        server=server,
        model=step.model.name,
        runs=tuple(runs),
        cache_tokens=room,
        with_rows=with_rows,
        inputs=_inputs(server, requests),
        diagnostics=found,
    )


def _counted_on(
    progress: Callable[[int, int], None] | None, before: int, total: int
) -> Callable[[int, int], None] | None:
    """Return a callback for a replica that adds the requests of those before it."""
    return None if progress is None else lambda done, _: progress(before + done, total)


def _inputs(server: Server, requests: str | Path | Requests) -> tuple[str, ...]:
    """The files that were read: of a model and of a device of one's own, and the log."""
    named = [Path(each) for each in (server.model, server.hardware) if not isinstance(each, Model)]
    own = [each for each in named if each.suffix == ".toml" or each.name != str(each)]
    log = None if isinstance(requests, Requests) else log_of(requests)
    return tuple(map(str, own if log is None else [*own, log]))


def write_request_rows(done: ServingResult, path: Path, *, overwrite: bool = False) -> None:
    """Write a row for each request as CSV, at once or not at all. Raises ``OutputError`` where the file
    exists already, without ``overwrite``.
    """
    put(path, lambda temporary: done.to_pandas().to_csv(temporary, index=False), overwrite=overwrite)
