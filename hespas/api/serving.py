"""LLM serving: TTFT, TPOT, latency and throughput of a server for a log or a process of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import nan
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np

from hespas.api.arguments import checked
from hespas.api.documents import BasisShare, Document, Result, basis_of, findings, write_table
from hespas.api.request_log import log_of, requests_of
from hespas.api.servers import Server
from hespas.estimators.step_intervals import basis_text
from hespas.files.documents import Count, Figure, document_bytes
from hespas.generators.llm import ServingStep
from hespas.graph import Diagnostics
from hespas.graph.columns import FloatArray
from hespas.graph.deprecation import RenamedAttribute, renamed_arguments
from hespas.graph.errors import UsageError
from hespas.graph.hints import (
    OUTPUT,
    Option,
    OptionsOf,
)
from hespas.graph.progress import Progress
from hespas.report import Column, Kind, Table, table_from_rows
from hespas.report.charts import Axis, Chart, Plot, Series
from hespas.simulator.serving import (
    Requests,
    ServerPool,
    ServingRun,
    StepLog,
    StepTimes,
    serve_disaggregated,
    serve_replicas,
    weighted_percentile,
)
from hespas.simulator.serving.engine_parameters import EngineParameters

__all__ = [
    "Percentiles",
    "PoolRow",
    "ReadyServer",
    "RequestRow",
    "Server",
    "ServingDocument",
    "ServingResult",
    "serve",
    "write_request_rows",
]


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


class PoolRow(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill or decode servers: the numbers of servers, replicas and ranks, and the share of the time in
    which they are busy.
    """

    pool: str
    servers: Count
    replicas: Count
    ranks: Count
    steps: Count
    busy_share: Figure
    cache_tokens: Figure


_POOL_COLUMNS = (
    Column("pool"),
    *(Column(name, kind="count") for name in ("servers", "replicas", "ranks", "steps")),
    Column("busy_share", kind="share"),
    Column("cache_tokens", kind="count"),
)


class ServingDocument(Document, frozen=True, kw_only=True):
    """Document of ``hespas serve --json``. Rates are over the whole run, from the first arrival to the last
    token. cache_tokens is the size of the KV cache of a replica. put_back is the number of preemptions. basis
    has the shares of the bases of estimates in the kernel time of all steps. engine_evidence are the measured
    runs from which parameters of the engine correct these times (empty: none), and correction its factors and
    host times; host times that the user states replace them. pools has separate prefill and
    decode servers; cache_tokens is then the cache of a decode replica. tokens_per_step is the mean number of
    tokens that a step generates for a decoding sequence, above 1 with speculative tokens.
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
    tokens_per_step: Figure = 1.0
    busy_share: Figure
    cache_tokens: Figure
    put_back: Count
    basis: list[BasisShare]
    engine_evidence: str
    correction: dict[str, Figure]
    times: list[Percentiles]
    pools: list[PoolRow] | msgspec.UnsetType = msgspec.UNSET
    rows: list[RequestRow] | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServingResult(Result):
    """Simulated serving: one run for each replica that had requests, or one run of separate prefill and
    decode servers. ``kv_cache_tokens`` is the size of the KV cache of a replica. ``parameters``
    of the engine correct the times of steps. ``prefill`` are the separate prefill servers. ``per_request``
    is True if the document has a row per request.
    """

    page_title: ClassVar[str] = "Requests to an LLM server"

    server: Server
    model: str
    runs: tuple[ServingRun, ...]
    kv_cache_tokens: float
    step_times: StepTimes
    parameters: EngineParameters | None = None
    prefill: ReadyServer | None = None
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
    def basis(self) -> Mapping[str, float]:
        """Return the share of each basis of estimates in the kernel time of all steps, the largest first."""
        times_ns = Counter(self.step_times.basis_times_ns(run.steps for run in self.runs))
        if self.prefill is not None:
            times_ns.update(self.prefill.times.basis_times_ns(run.prefill_steps for run in self.runs))
        total_ns = sum(times_ns.values())
        return {basis: time_ns / total_ns for basis, time_ns in times_ns.most_common() if time_ns > 0}

    @property
    def basis_text(self) -> str:
        """Return the shares of :attr:`basis` and the measured runs behind the engine's parameters as text."""
        engine = "" if self.parameters is None else f"engine: {self.parameters.evidence}"
        return "; ".join(filter(None, (basis_text(self.basis), engine)))

    def headline(self) -> str:
        """Return the summary line: throughput, mean TTFT and mean TPOT."""
        tpot = self.tpot_ns[~np.isnan(self.tpot_ns)]
        mean_tpot = float(tpot.mean()) if len(tpot) else nan
        return (
            f"{self.model} on {self.server.num_devices} x {self.server.hardware} "
            f"({self.server.engine}): {self.output_tokens_per_s:,.0f} output tokens/s, "
            f"mean TTFT {np.mean(self.ttft_ns) / 1e6:,.1f} ms, mean TPOT {mean_tpot / 1e6:,.2f} ms"
        )

    def percentiles(self, what: str) -> Percentiles:
        """Return the distribution of ``ttft``, ``tpot`` or ``latency`` over requests."""
        times = self._column(f"{what}_ns")
        times = times[~np.isnan(times)] / 1e6
        figures = [nan] * 5
        if len(times):
            figures = [times.mean(), *np.percentile(times, (50, 90, 99)), times.max()]
        mean_ms, p50_ms, p90_ms, p99_ms, max_ms = map(float, figures)
        return Percentiles(
            what=what, mean_ms=mean_ms, p50_ms=p50_ms, p90_ms=p90_ms, p99_ms=p99_ms, max_ms=max_ms
        )

    def times(self) -> list[Percentiles]:
        """Return the distributions of TTFT, TPOT and latency of requests, and of the times between tokens."""
        rows = [self.percentiles(what) for what in ("ttft", "tpot", "latency")]
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

    def _logs(self) -> list[StepLog]:
        """Return the log of separate prefill servers, if there are any, and the log of decode servers."""
        logs = [StepLog.joined(run.steps for run in self.runs)]
        if self.prefill is not None:
            logs.insert(0, StepLog.joined(run.prefill_steps for run in self.runs))
        return logs

    def pools(self) -> list[PoolRow]:
        """Return a row for the separate prefill servers and one for the decode servers; empty without."""
        if self.prefill is None:
            return []
        cache_tokens, span = (self.prefill.kv_cache_tokens, self.kv_cache_tokens), self.makespan_ns
        rows: list[PoolRow] = []
        for index, (name, log) in enumerate(zip(("prefill", "decode"), self._logs(), strict=True)):
            pool, replicas, (times, *_) = (
                self.server.pools[index],
                self.server.num_replicas[index],
                log.columns(),
            )
            rows.append(
                PoolRow(
                    pool=name,
                    servers=replicas // pool.dp,
                    replicas=replicas,
                    ranks=replicas * pool.tp,
                    steps=len(times),
                    busy_share=float(times.sum() / span / replicas) if span > 0 else nan,
                    cache_tokens=cache_tokens[index],
                )
            )
        return rows

    def document(self) -> ServingDocument:
        """Return the content of the command's ``--json`` as a typed value."""
        steps, replicas = [log.columns() for log in self._logs()], self.server.num_replicas
        time, batch, prompts = (np.concatenate([columns[index] for columns in steps]) for index in range(3))
        requests = [run.requests for run in self.runs]
        count, span = sum(map(len, requests)), self.makespan_ns
        ranks = self.server.num_devices
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
            replicas=sum(replicas),
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
            tokens_per_step=self.step_times.gain,
            busy_share=float(time.sum() / span / sum(replicas)) if span > 0 else nan,
            cache_tokens=self.kv_cache_tokens,
            put_back=sum(int(run.preemptions.sum()) for run in self.runs),
            basis=basis_of(self.basis),
            engine_evidence="" if self.parameters is None else self.parameters.evidence,
            correction=asdict(self.step_times.correction),
            times=self.times(),
            pools=self.pools() or msgspec.UNSET,
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
        """Return the distributions of times, the bases of estimates, separate prefill and decode servers, and
        the requests.
        """
        header = (
            Column("what"),
            *(Column(f"{name}_ms", kind="number") for name in ("mean", "p50", "p90", "p99", "max")),
        )
        rows = [
            (row.what, row.mean_ms, row.p50_ms, row.p90_ms, row.p99_ms, row.max_ms) for row in self.times()
        ]
        shares = (Column("basis"), Column("share", kind="share"))
        pools = [tuple(getattr(pool, column.name) for column in _POOL_COLUMNS) for pool in self.pools()]
        return {
            "times": table_from_rows(header, rows),
            "basis": table_from_rows(shares, list(self.basis.items())),
            **({"pools": table_from_rows(_POOL_COLUMNS, pools)} if pools else {}),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyServer:
    """Server with the estimated times of its steps, the parameters of its engine that correct them, and the
    size of the KV cache of a replica in tokens. ``prefill`` are its separate prefill servers; the other
    fields are then of the decode servers.

    Servers that differ only in limits of the scheduler and the cache share their step times.
    """

    server: Server
    step: ServingStep
    times: StepTimes
    kv_cache_tokens: float
    parameters: EngineParameters | None = None
    prefill: ReadyServer | None = None

    @classmethod
    def of(
        cls, server: Server, context: int, diagnostics: Diagnostics, *, is_disaggregated: bool = False
    ) -> ReadyServer:
        """Estimate the steps of a server for sequences of at most ``context`` tokens. Raises the errors of
        :func:`serve`.
        """
        *separate, own = server.pools
        kv_cache_tokens = own.cache_size(own.step())
        is_disaggregated = is_disaggregated or bool(separate)
        return replace(
            cls.with_times(own, context, diagnostics, is_disaggregated=is_disaggregated),
            server=server,
            kv_cache_tokens=kv_cache_tokens,
            prefill=cls.of(separate[0], context, diagnostics, is_disaggregated=True) if separate else None,
        )

    @classmethod
    def with_times(
        cls, server: Server, context: int, diagnostics: Diagnostics, *, is_disaggregated: bool
    ) -> ReadyServer:
        """Estimate the steps of the servers of one pool, whatever the size of their KV cache (NaN)."""
        step = server.step()
        parameters = server.parameters(step, is_disaggregated=is_disaggregated)
        times = server.times(step, context, diagnostics, parameters)
        return cls(server=server, step=step, times=times, kv_cache_tokens=nan, parameters=parameters)

    def run(self, requests: Requests, progress: Progress | None = None) -> ServingResult:
        """Simulate the server. Raises ``UnsupportedError`` for a request that does not fit."""
        policy, replicas, prefill = self.server.policy(), self.server.num_replicas, self.prefill
        if prefill is None:
            runs = serve_replicas(
                requests, self.times, policy, *replicas,
                cache_tokens=self.kv_cache_tokens, progress=progress,
            )  # fmt: skip
        else:
            run = serve_disaggregated(
                requests,
                ServerPool(prefill.times, policy, replicas[0], prefill.kv_cache_tokens),
                ServerPool(self.times, policy, replicas[1], self.kv_cache_tokens),
                self.server.send_ns(requests.prompt),
                progress=progress,
            )
            runs = (run,)
        return ServingResult(
            server=self.server,
            model=self.step.model.name,
            runs=runs,
            kv_cache_tokens=self.kv_cache_tokens,
            step_times=self.times,
            parameters=self.parameters,
            prefill=prefill,
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
    With separate prefill and decode servers, a request goes to the replica with the fewest requests.

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
    done = ReadyServer.of(server, int((log.prompt + log.output).max()), sink).run(log, progress)
    sink.info(
        "serving.put-back",
        done.model,
        "requests were preempted because the KV cache was full, and their tokens computed again",
        count=sum(int(run.preemptions.sum()) for run in done.runs),
    )
    log_path = None if isinstance(requests, Requests) else log_of(requests)
    files = server.files()
    return replace(
        done,
        per_request=per_request,
        inputs=tuple(map(str, files if log_path is None else [*files, log_path])),
        diagnostics=sink,
    )


def write_request_rows(done: ServingResult, path: Path, *, overwrite: bool = False) -> None:
    """Write one row per request atomically, as Parquet if the name ends in ``.parquet``, else as CSV. Raises
    ``OutputError`` if the file exists, without ``overwrite``.
    """

    write_table(done.table(), path, overwrite=overwrite)
