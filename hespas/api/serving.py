"""LLM serving: TTFT, TPOT, latency and throughput of a server for a log or a process of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np

from hespas.api.arguments import ChosenEstimator, checked, hardware_option
from hespas.api.documents import BasisShare, Document, Result, basis_of, findings, put
from hespas.api.lowering import DEFAULT_ESTIMATOR
from hespas.api.request_log import log_of, requests_of
from hespas.estimators.step_intervals import basis_text
from hespas.files.documents import Count, Figure, document_bytes
from hespas.generators.llm import Model, ServingStep, load_model, precision_of, serving_layout
from hespas.generators.llm.serving_lattice import LatticeGrids, cached_tokens, lattice_kernels
from hespas.graph import Diagnostics, find_dtype
from hespas.graph.columns import FloatArray
from hespas.graph.deprecation import RenamedAttribute, renamed_arguments, renamed_fields
from hespas.graph.errors import UnsupportedError, UsageError, clipped
from hespas.graph.hints import (
    OUTPUT,
    AtLeast,
    AtMost,
    NonNegativeInt,
    Option,
    OptionsOf,
    PositiveInt,
    check_fields,
)
from hespas.graph.progress import Progress
from hespas.hardware import load_device
from hespas.report import Column, Kind, Table, table_from_rows, write_tables
from hespas.report.charts import Axis, Chart, Plot, Series
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
    weighted_percentile,
)

__all__ = [
    "Percentiles",
    "RequestRow",
    "Server",
    "ServingDocument",
    "ServingResult",
    "serve",
    "write_request_rows",
]


_MAX_OVERHEAD = 1e9
"""Limit of overheads: a quarter of an hour per step [us], and more than a week per request [ms]."""

_MOST_OF_A_STEP = "these kernels are most of the time of a step"
_UNSEEN: Mapping[str, str] = {
    "learned.unseen-device": _MOST_OF_A_STEP,
    "composite.unseen-device": _MOST_OF_A_STEP,
}
"""Notes on the diagnostics about matmuls and attention that were not measured on the device."""


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and percentiles of a time over requests, or over tokens."""

    what: str
    mean_ms: Figure
    p50_ms: Figure
    p90_ms: Figure
    p99_ms: Figure
    max_ms: Figure


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """A request: its arrival, lengths, and simulated times."""

    arrival_s: Figure
    prompt_tokens: Count
    output_tokens: Count
    queue_ms: Figure
    ttft_ms: Figure
    tpot_ms: Figure
    latency_ms: Figure
    put_back: Count
    basis: str = ""


class ServingDocument(Document, frozen=True, kw_only=True):
    """Document of ``hespas serve --json``. Rates are over the whole run, from the first arrival to the last
    token. cache_tokens is the size of the KV cache of a replica. put_back is the number of preemptions. basis
    has the shares of the bases of estimates in the kernel time of all steps.
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
    basis: list[BasisShare]
    times: list[Percentiles]
    rows: list[RequestRow] | msgspec.UnsetType = msgspec.UNSET


_LAYOUT, _SCHEDULER, _HOST = "Layout and number formats", "Scheduler and cache", "Host"
"""Headings of ``--help``."""
_NonNegative = Annotated[float, AtLeast(0)]


def _number(help_text: str, panel: str, metavar: str = "N") -> Option:
    return Option(help_text, panel=panel, metavar=metavar)


_Model = Annotated[
    str | Path | Model,
    Option(
        "Built-in model or model file.",
        metavar="MODEL|FILE.toml",
        completes="models",
        is_argument=True,
        is_text=True,
    ),
]
_Hardware = Annotated[str, hardware_option("Estimate durations on this device (see 'hespas hardware list').")]
_Engine = Annotated[
    Literal["vllm", "sglang", "trtllm"],
    Option("Model the scheduler and all-reduce of this serving engine.", panel=_SCHEDULER),
]
_Dp = Annotated[PositiveInt, _number("Set data-parallel attention replicas (round-robin).", _LAYOUT)]
_Tp = Annotated[PositiveInt, _number("Set tensor-parallel ranks.", _LAYOUT)]
_Ep = Annotated[PositiveInt, _number("Set expert-parallel ranks.", _LAYOUT)]
_Precision = Annotated[
    str,
    Option("Set the precision: bf16, fp16, fp8, mxfp8, nvfp4, int8.", metavar="NAME", panel=_LAYOUT),
]
_ExpertDtype = Annotated[
    str,
    Option("Set the element type of experts (default: from `precision`).", metavar="TYPE", panel=_LAYOUT),
]
_KvCacheDtype = Annotated[str, Option("Set the element type of the KV cache.", metavar="TYPE", panel=_LAYOUT)]
_Tokens = Annotated[
    NonNegativeInt,
    _number("Limit tokens per step (vLLM: max-num-batched-tokens; 0: the engine's default).", _SCHEDULER),
]
_Sequences = Annotated[
    NonNegativeInt,
    _number("Limit concurrent sequences (vLLM: max-num-seqs; 0: the engine's default).", _SCHEDULER),
]
_Chunked = Annotated[
    bool | None,
    Option(
        "Split a prompt that exceeds a step, or schedule it whole (default: the engine's).",
        flag="chunked/whole-prompts",
        panel=_SCHEDULER,
    ),
]
_GpuMemoryUtilization = Annotated[
    float,
    AtLeast(0.01),
    AtMost(1),
    _number("Set the fraction of device memory to use.", _SCHEDULER, "X"),
]
_KvCacheTokens = Annotated[
    NonNegativeInt,
    _number("Set the KV-cache size per replica in tokens (0: all free memory).", _SCHEDULER),
]
_StepOverhead = Annotated[
    _NonNegative, _number("Set the CPU overhead per step in microseconds.", _HOST, "US")
]
_SequenceUs = Annotated[
    _NonNegative, _number("Set the CPU overhead per sequence of a step in microseconds.", _HOST, "US")
]
_PromptUs = Annotated[
    _NonNegative, _number("Set the CPU overhead per prompt of a step in microseconds.", _HOST, "US")
]
_RequestOverhead = Annotated[
    _NonNegative, _number("Set the fixed latency per request before queueing in milliseconds.", _HOST, "MS")
]


@renamed_fields(
    stack="engine",
    experts="expert_dtype",
    cache="kv_cache_dtype",
    max_sequences="max_num_seqs",
    memory_share="gpu_memory_utilization",
    cache_tokens="kv_cache_tokens",
    host_us="step_overhead_us",
    request_ms="request_overhead_ms",
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """LLM server: an ``engine`` (vllm, sglang, trtllm) with ``tp`` tensor-parallel ranks and ``dp`` replicas
    of attention, which each serve a share of the requests. Experts are distributed over ``ep`` ranks.

    ``expert_dtype`` is the element type of experts (empty: from ``precision``), ``kv_cache_dtype`` the
    element type of the KV cache. The server uses at most the fraction ``gpu_memory_utilization`` of the
    memory of a device. ``kv_cache_tokens`` is the size of the KV cache per replica in tokens (0: all free
    memory). Overheads of the host are ``step_overhead_us`` per step, ``sequence_us`` per sequence and
    ``prompt_us`` per prompt in the step, and ``request_overhead_ms`` per request before its first step.
    """

    model: _Model
    hardware: _Hardware
    engine: _Engine = "vllm"
    dp: _Dp = 1
    tp: _Tp = 1
    ep: _Ep = 1
    precision: _Precision = "bf16"
    expert_dtype: _ExpertDtype = ""
    kv_cache_dtype: _KvCacheDtype = "bf16"
    max_batched_tokens: _Tokens = 0
    max_num_seqs: _Sequences = 0
    chunked: _Chunked = None
    gpu_memory_utilization: _GpuMemoryUtilization = 0.9
    kv_cache_tokens: _KvCacheTokens = 0
    step_overhead_us: _StepOverhead = 0.0
    sequence_us: _SequenceUs = 0.0
    prompt_us: _PromptUs = 0.0
    request_overhead_ms: _RequestOverhead = 0.0
    estimator: ChosenEstimator = DEFAULT_ESTIMATOR

    def __post_init__(self) -> None:
        """Raise ``UsageError`` for values that are not allowed."""
        check_fields(self)
        precision_of(self.precision)
        for name in ("kv_cache_dtype", "expert_dtype"):
            if (dtype := getattr(self, name)) and find_dtype(dtype) is None:
                raise UsageError(
                    f"`{name}={clipped(dtype)}` is not an element type",
                    hint="use bf16, f16, f8E4M3FN, i8, ...",
                )
        for name in ("step_overhead_us", "sequence_us", "prompt_us", "request_overhead_ms"):
            if not 0 <= getattr(self, name) <= _MAX_OVERHEAD:
                raise UsageError(
                    f"invalid `{name}={getattr(self, name):g}`",
                    hint=f"use a value from 0 to {_MAX_OVERHEAD:g}",
                )
        self.policy()

    def policy(self) -> Policy:
        """Return the scheduling policy of the server's engine, with the limits that the server sets. Raises
        ``UsageError``.
        """
        return policy_of(
            self.engine,
            tokens=self.max_batched_tokens or None,
            sequences=self.max_num_seqs or None,
            chunked=self.chunked,
        )

    def step(self) -> ServingStep:
        """Return the serving step that generates the kernels of this server. Without ``ep``, experts are
        sharded over all ranks. Raises ``UsageError`` for an unknown model.
        """
        model = self.model if isinstance(self.model, Model) else load_model(str(self.model))
        return ServingStep(
            model=model,
            layout=serving_layout(model, tp=self.tp, dp=self.dp, ep=self.ep),
            precision=precision_of(self.precision),
            cache=self.kv_cache_dtype,
            experts=self.expert_dtype,
            fused=True,
        )

    def times(self, step: ServingStep, context: int, diagnostics: Diagnostics) -> StepTimes:
        """Return the estimated times of the server's steps, for sequences of at most ``context`` tokens."""
        policy = self.policy()
        grids = LatticeGrids.up_to(
            tokens=policy.tokens, sequences=min(policy.sequences, policy.tokens), context=max(context, 128)
        )
        times = step_times(
            lattice_kernels(step, grids),
            load_device(self.hardware),
            models_of(self.engine, self.estimator),
            num_ranks=step.layout.ranks,
            diagnostics=diagnostics,
        )
        overheads = Correction(
            step_ns=self.step_overhead_us * 1e3,
            sequence_ns=self.sequence_us * 1e3,
            prompt_ns=self.prompt_us * 1e3,
            request_ns=self.request_overhead_ms * 1e6,
        )
        return times.corrected(overheads)

    def cache_size(self, step: ServingStep) -> float:
        """Return the size of the KV cache of a replica in tokens. Raises ``UnsupportedError`` if the
        weights leave no memory for it.
        """
        if self.kv_cache_tokens:
            return float(self.kv_cache_tokens)
        device, policy = load_device(self.hardware), self.policy()
        memory = device.main_memory.capacity_bytes * self.gpu_memory_utilization
        sequences = min(policy.sequences, policy.tokens)
        tokens = cached_tokens(step, memory, tokens=policy.tokens, sequences=sequences)
        if tokens < 1:
            raise UnsupportedError(
                f"the weights of {step.model.name} leave no memory for a KV cache in {memory / 1e9:,.0f} GB",
                hint="use a larger `tp`, a narrower `precision`, or `kv_cache_tokens`",
            )
        return float(int(tokens))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServingResult(Result):
    """Simulated serving: one run for each replica that had requests. ``kv_cache_tokens`` is the size of the
    KV cache of a replica. ``basis`` has the share of each basis of estimates in the kernel time of all steps,
    the largest first. ``per_request`` is True if the document has a row per request.
    """

    page_title: ClassVar[str] = "Requests to an LLM server"

    server: Server
    model: str
    runs: tuple[ServingRun, ...]
    kv_cache_tokens: float
    basis: Mapping[str, float] = field(default_factory=dict[str, float])
    per_request: bool = False
    inputs: tuple[str, ...] = ()
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    cache_tokens = RenamedAttribute("kv_cache_tokens")
    with_rows = RenamedAttribute("per_request")

    def _column(self, name: str) -> FloatArray:
        """Return one figure of all requests as a column, replica by replica."""
        return np.concatenate([np.asarray(getattr(run, name), np.float64) for run in self.runs])

    @property
    def ttft_ns(self) -> FloatArray:
        """Return the time to the first token of each request, replica by replica."""
        return self._column("ttft_ns")

    @property
    def tpot_ns(self) -> FloatArray:
        """Return the time per output token of each request, replica by replica; NaN for answers of one
        token.
        """
        return self._column("tpot_ns")

    @property
    def makespan_ns(self) -> float:
        """Return the time from the first arrival to the last token."""
        return float(self._column("last_token_ns").max() - self._column("arrival_ns").min())

    @property
    def output_tokens_per_s(self) -> float:
        """Return the output tokens per second of all replicas."""
        tokens = sum(int(run.requests.output.sum()) for run in self.runs)
        return tokens / self.makespan_ns * 1e9 if self.makespan_ns > 0 else nan

    @property
    def basis_text(self) -> str:
        """Return the shares of :attr:`basis` as text; empty if no estimate states its basis."""
        return basis_text(self.basis)

    def headline(self) -> str:
        """Return the summary line: throughput, mean TTFT and mean TPOT."""
        tpot = self.tpot_ns[~np.isnan(self.tpot_ns)]
        mean_tpot = float(tpot.mean()) if len(tpot) else nan
        return (
            f"{self.model} on {self.server.dp * self.server.tp} x {self.server.hardware} "
            f"({self.server.engine}): {self.output_tokens_per_s:,.0f} output tokens/s, "
            f"mean TTFT {np.mean(self.ttft_ns) / 1e6:,.1f} ms, mean TPOT {mean_tpot / 1e6:,.2f} ms"
        )

    def times(self) -> list[Percentiles]:
        """Return the distributions of TTFT, TPOT and latency of requests, and of the times between tokens."""
        rows: list[Percentiles] = []
        for what in ("ttft", "tpot", "latency"):
            times = self._column(f"{what}_ns")
            times = times[~np.isnan(times)] / 1e6
            figures = [nan] * 5
            if len(times):
                figures = [times.mean(), *np.percentile(times, (50, 90, 99)), times.max()]
            mean_ms, p50_ms, p90_ms, p99_ms, max_ms = map(float, figures)
            rows.append(
                Percentiles(
                    what=what, mean_ms=mean_ms, p50_ms=p50_ms, p90_ms=p90_ms, p99_ms=p99_ms, max_ms=max_ms
                )
            )
        pairs = [run.gaps() for run in self.runs]
        gaps = np.concatenate([pair[0] for pair in pairs])
        tokens = np.concatenate([pair[1] for pair in pairs])
        mean = float((gaps * tokens).sum() / tokens.sum()) if tokens.sum() else nan
        p50, p90, p99 = (weighted_percentile(gaps, tokens, share) / 1e6 for share in (0.5, 0.9, 0.99))
        most = float(gaps.max(initial=0.0)) if len(gaps) else nan
        between = Percentiles(
            what="inter-token", mean_ms=mean / 1e6, p50_ms=p50, p90_ms=p90, p99_ms=p99, max_ms=most / 1e6
        )
        return [*rows, between]

    def document(self) -> ServingDocument:
        """Return the content of the command's ``--json`` as a typed value."""
        steps = [run.steps.columns() for run in self.runs]
        time, batch, prompts = (np.concatenate([columns[index] for columns in steps]) for index in range(3))
        requests = [run.requests for run in self.runs]
        count, span = sum(map(len, requests)), self.makespan_ns
        ranks = self.server.dp * self.server.tp
        decodes = batch > 0
        rows: list[RequestRow] | msgspec.UnsetType = msgspec.UNSET
        if self.per_request:
            table = self.table()
            rows = [RequestRow(**dict(zip(table.columns, row, strict=True))) for row in table.tuples()]
        return ServingDocument(
            inputs=list(self.inputs),
            diagnostics=findings(self.diagnostics),
            model=self.model,
            hardware=self.server.hardware,
            stack=self.server.engine,
            ranks=ranks,
            replicas=self.server.dp,
            requests=count,
            prompt_tokens=sum(int(part.prompt.sum()) for part in requests),
            output_tokens=sum(int(part.output.sum()) for part in requests),
            makespan_s=span / 1e9,
            requests_per_s=count / span * 1e9 if span > 0 else nan,
            output_tokens_per_s=self.output_tokens_per_s,
            output_tokens_per_s_per_rank=self.output_tokens_per_s / ranks,
            steps=len(time),
            steps_with_prompts=int((prompts > 0).sum()),
            mean_batch=float(np.average(batch[decodes], weights=time[decodes])) if decodes.any() else nan,
            busy_share=float(time.sum() / span / self.server.dp) if span > 0 else nan,
            cache_tokens=self.kv_cache_tokens,
            put_back=sum(int(run.preemptions.sum()) for run in self.runs),
            basis=basis_of(self.basis),
            times=self.times(),
            rows=rows,
        )

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.serving/1``."""
        return document_bytes(self.document())

    def table(self) -> Table:
        """Return the result as a table with one row per request, in order of arrival."""
        arrival = self._column("arrival_ns")
        columns = {
            "arrival_s": arrival / 1e9,
            "prompt_tokens": np.concatenate([run.requests.prompt for run in self.runs]),
            "output_tokens": np.concatenate([run.requests.output for run in self.runs]),
            "queue_ms": (self._column("scheduled_ns") - arrival) / 1e6,
            "ttft_ms": self.ttft_ns / 1e6,
            "tpot_ms": self.tpot_ns / 1e6,
            "latency_ms": self._column("latency_ns") / 1e6,
            "put_back": self._column("preemptions").astype(np.int64),
            "basis": np.full(len(arrival), self.basis_text),
        }
        order = np.argsort(columns["arrival_s"], kind="stable")
        kinds: dict[str, Kind] = {
            "prompt_tokens": "count", "output_tokens": "count", "put_back": "count", "basis": "text",
        }  # fmt: skip
        header = tuple(Column(name, kind=kinds.get(name, "number")) for name in columns)
        return Table(header, {name: column[order] for name, column in columns.items()})

    def tables_by_name(self) -> Mapping[str, Table]:
        """Return the distributions of times, the bases of estimates, and the requests."""
        header = (
            Column("what"),
            *(Column(f"{name}_ms", kind="number") for name in ("mean", "p50", "p90", "p99", "max")),
        )
        rows = [
            (row.what, row.mean_ms, row.p50_ms, row.p90_ms, row.p99_ms, row.max_ms) for row in self.times()
        ]
        shares = (Column("basis"), Column("share", kind="share"))
        return {
            "times": table_from_rows(header, rows),
            "basis": table_from_rows(shares, list(self.basis.items())),
            "requests": self.table(),
        }

    def charts(self) -> tuple[Chart, ...]:
        """Return the distributions of TTFT, TPOT and latency, and the TTFT of requests by their arrival."""
        series: list[Series] = []
        for what in ("ttft", "tpot", "latency"):
            times = np.sort(self._column(f"{what}_ns"))
            times = times[~np.isnan(times)]
            if len(times):
                shares = np.arange(1, len(times) + 1) / len(times)
                chosen = np.unique(np.linspace(0, len(times) - 1, min(len(times), 400)).astype(np.int64))
                series.append(Series(label=what, x=times[chosen], y=shares[chosen], mark="steps"))
        arrival_ns, ttft_ns = self._column("arrival_ns"), self.ttft_ns
        drawn = np.unique(np.linspace(0, len(ttft_ns) - 1, min(len(ttft_ns), 2_000)).astype(np.int64))
        order = np.argsort(arrival_ns, kind="stable")[drawn]
        return (
            Plot(
                name="latency-distribution",
                title="Distribution of TTFT, TPOT and latency",
                table="times",
                note="Share of the requests with at most this time.",
                x=Axis("time", "time", is_log=True),
                y=Axis("share of requests", "share"),
                series=series,
            ),
            Plot(
                name="ttft-by-arrival",
                title="TTFT by arrival",
                table="requests",
                note="A TTFT that grows with the arrival: the server cannot keep up with the load.",
                x=Axis("arrival", "time"),
                y=Axis("TTFT", "time"),
                series=[Series(label="requests", x=arrival_ns[order], y=ttft_ns[order])],
            ),
        )


_ServerOptions = Annotated[Server, OptionsOf()]
_Requests = Annotated[
    str | Path | Requests,
    Option(
        "Read a log with arrival_s, prompt_tokens and output_tokens, or draw requests from a process: "
        "poisson:rate=4, bursts:rate=4,burst=8, closed:concurrency=16; each with requests=, prompt=, "
        "output=, ratio=, seed=.",
        metavar="LOG.csv|LOG.jsonl|PROCESS",
        is_text=True,
        access="reads",
    ),
]
_PerRequest = Annotated[bool, Option("Add one row per request to `json`.", panel=OUTPUT)]


@renamed_arguments(with_rows="per_request")
@checked()
def serve(
    server: _ServerOptions,
    requests: _Requests,
    *,
    per_request: _PerRequest = False,
    diagnostics: Diagnostics | None = None,
    progress: Progress | None = None,
) -> ServingResult:
    """Simulate a server that answers ``requests``: a log (CSV or JSON lines: arrival, prompt tokens, output
    tokens), an arrival process (``poisson:rate=4,prompt=1024,output=256``, ``bursts:``,
    ``closed:concurrency=16``), or a value. ``per_request`` adds a row per request to the document.
    ``progress`` is called with the numbers of finished and of all requests. Requests are distributed over
    the replicas of attention (``dp``) in turn; replicas beyond the number of concurrent requests stay idle.

    Raises ``UsageError`` for contradicting settings, ``UnsupportedError`` if the model does not fit into
    memory or has no estimate, ``FormatError`` for a log that cannot be read.

    Examples:
        >>> from hespas.api import Server
        >>> server = Server(model="Llama-3-8B", hardware="H100-SXM")
        >>> done = hespas.serve(server, "poisson:rate=4,prompt=512,output=64,requests=32")
        >>> len(done.to_pandas())
        32
    """
    sink = diagnostics if diagnostics is not None else Diagnostics()
    log = requests if isinstance(requests, Requests) else requests_of(requests)
    if not len(log):
        raise UsageError(
            "there are no requests to serve", hint="give a log or process with 1 or more requests"
        )
    step, policy = server.step(), server.policy()
    cache_tokens = server.cache_size(step)
    estimated = Diagnostics()
    times = server.times(step, int((log.prompt + log.output).max()), estimated)
    sink.extend(estimated.as_warnings(_UNSEEN))
    runs = serve_replicas(log, times, policy, server.dp, cache_tokens=cache_tokens, progress=progress)
    sink.info(
        "serving.put-back",
        step.model.name,
        "requests were preempted because the KV cache was full, and their tokens computed again",
        count=sum(int(run.preemptions.sum()) for run in runs),
    )
    # the input files: a model or device file of the user, and the log
    names = [Path(source) for source in (server.model, server.hardware) if not isinstance(source, Model)]
    files = [path for path in names if path.suffix == ".toml" or path.name != str(path)]
    log_path = None if isinstance(requests, Requests) else log_of(requests)
    return ServingResult(
        server=server,
        model=step.model.name,
        runs=runs,
        kv_cache_tokens=cache_tokens,
        basis=times.basis_shares(run.steps for run in runs),
        per_request=per_request,
        inputs=tuple(map(str, files if log_path is None else [*files, log_path])),
        diagnostics=sink,
    )


def write_request_rows(done: ServingResult, path: Path, *, overwrite: bool = False) -> None:
    """Write one row per request atomically, as Parquet if the name ends in ``.parquet``, else as CSV. Raises
    ``OutputError`` if the file exists, without ``overwrite``.
    """

    def fill(temporary: Path) -> None:
        write_tables([done.table()], temporary, is_parquet=path.suffix == ".parquet")

    put(path, fill, overwrite=overwrite)
