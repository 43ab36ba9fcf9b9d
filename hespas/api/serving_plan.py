"""Search for the server configuration with the highest load within latency limits (SLA).

Step times are estimated once per layout for the largest limits of the scheduler, and all configurations of
the layout share them. Bisection on simulations of the scheduler finds the highest load of a configuration. A
simulation in which a limit did not delay a request counts for larger limits too.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf, isnan
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from hespas.api.arguments import ChosenEstimator, checked, hardware_option
from hespas.api.lowering import DEFAULT_ESTIMATOR
from hespas.api.request_log import PROCESSES, requests_of
from hespas.api.servers import (
    LAYOUT,
    SCHEDULER,
    ChunkedPrompts,
    ExpertDtype,
    GpuMemoryUtilization,
    KvCacheDtype,
    KvCacheTokens,
    PromptOverhead,
    RequestOverhead,
    SequenceOverhead,
    ServedModel,
    Server,
    ServingEngine,
    ServingPrecision,
    StepOverhead,
)
from hespas.api.serving import ReadyServer
from hespas.api.serving_plan_result import (
    LatencyFigure,
    ServingObjective,
    ServingPlanAccount,
    ServingPlanResult,
    ServingPlanRow,
)
from hespas.generators.llm import Model, load_model
from hespas.generators.llm.model import Experts
from hespas.graph import Diagnostics
from hespas.graph.columns import pareto_rows
from hespas.graph.errors import HespasError, UnsupportedError, UsageError, clipped
from hespas.graph.hints import AtLeast, AtMost, Option
from hespas.graph.progress import Progress
from hespas.hardware import Device, load_device
from hespas.hardware.prices import Prices, read_prices
from hespas.simulator.serving import policy_of

__all__ = ["plan_serving"]

_SEARCH = "Search under latency limits"
"""Heading of ``--help``."""
_LOAD_STEP = 1.02
"""Ratio of two loads next to each other."""
_LEAST_RATE, _NUM_RATES = 1e-4, 1280
"""Lowest request rate [1/s] of the search, and the number of rates (up to 1e7)."""
_MOST_CONCURRENT = 1_000_000
_SPAN = 3.0
"""Least ratio of the time in which requests arrive to their mean latency, for a run that shows a rate."""
_IDLE = 0.1
"""Share of the time in which a server works at the lowest rate that is searched."""
_SEQUENCES, _TOKENS = (64, 256), (2048, 8192, 16384)
"""Limits that are searched besides the default of the engine."""
_DOMAIN = 8
"""Most tensor-parallel ranks that are searched by default."""
_LADDER = (35, 70, 105, 140)
"""Steps below the best load of a layout that are simulated for the frontier: 1/2, 1/4, 1/8 and 1/16 of it."""
_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_METRICS = ("ttft", "tpot", "latency")
_SHARED = (
    "model", "engine", "precision", "expert_dtype", "kv_cache_dtype", "gpu_memory_utilization",
    "kv_cache_tokens",
    "step_overhead_us", "sequence_us", "prompt_us", "request_overhead_ms", "estimator",
)  # fmt: skip
"""Settings of a server that all configurations share."""


def _one_or_more(text: str) -> int | tuple[int, ...]:
    """Parse one whole number, or a list of them: ``8`` or ``1,2,4``."""
    parts = [part.strip() for part in str(text).split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 16 for part in parts):
        raise UsageError(
            f"invalid list '{clipped(text)}': expected whole numbers separated by commas", hint="write 1,2,4"
        )
    numbers = tuple(map(int, parts))
    return numbers[0] if len(numbers) == 1 else numbers


def _axis(help_text: str, panel: str, default_text: str) -> Option:
    return Option(help_text, metavar="N[,N...]", panel=panel, parse=_one_or_more, default_text=default_text)


_Numbers = int | Sequence[int] | None
_Hardware = Annotated[
    str | Sequence[str],
    hardware_option("Estimate durations on this device (see 'hespas hardware list'); `sla` accepts a list."),
]
_Requests = Annotated[
    str,
    Option(
        "Read a log with arrival_s, prompt_tokens and output_tokens, or draw requests from a process: "
        "poisson:rate=4, bursts:rate=4,burst=8, closed:concurrency=16; each with requests=, prompt=, "
        "output=, ratio=, seed=. With `sla`, a process without rate= or concurrency=, which is searched.",
        metavar="LOG.csv|LOG.jsonl|PROCESS",
        is_text=True,
        access="reads",
        default_text="with `sla`: poisson",
    ),
]
_Sla = Annotated[
    str,
    Option(
        "Find the highest load within these limits of ttft, tpot and latency, over all combinations of "
        "`hardware`, `devices`, `tp`, `dp`, `ep`, `max_batched_tokens`, `max_num_seqs` (each accepts a "
        "list) and chunked or whole prompts.",
        metavar="ttft=500ms,tpot=30ms",
        panel=_SEARCH,
        is_required=False,
    ),
]
_Devices = Annotated[_Numbers, _axis("Use `dp` x `tp` = N devices.", _SEARCH, "")]
_Percentile = Annotated[LatencyFigure, Option("Limit this figure of the requests.", panel=_SEARCH)]
_Objective = Annotated[
    ServingObjective, Option("Maximize the load per device, or minimize the price per token.", panel=_SEARCH)
]
_PriceFile = Annotated[
    str | Path | None,
    Option("Read prices per device-hour from a TOML file.", metavar="FILE", panel=_SEARCH, access="reads"),
]
_Top = Annotated[
    int, AtLeast(1), AtMost(1000), Option("Print the N best configurations.", metavar="N", panel=_SEARCH)
]
_Dp = Annotated[
    _Numbers,
    _axis("Set data-parallel attention replicas (round-robin).", LAYOUT, "1; with `sla`: all that fit"),
]
_Tp = Annotated[_Numbers, _axis("Set tensor-parallel ranks.", LAYOUT, "1; with `sla`: 1, 2, 4, 8")]
_Ep = Annotated[_Numbers, _axis("Set expert-parallel ranks.", LAYOUT, "1; with `sla`: 1 and all devices")]
_Tokens = Annotated[
    _Numbers,
    _axis(
        "Limit tokens per step (vLLM: max-num-batched-tokens; 0: the engine's default).",
        SCHEDULER,
        "0; with `sla`: 2048, 8192, 16384 and 0",
    ),
]
_Sequences = Annotated[
    _Numbers,
    _axis(
        "Limit concurrent sequences (vLLM: max-num-seqs; 0: the engine's default).",
        SCHEDULER,
        "0; with `sla`: 64, 256 and 0",
    ),
]


@dataclass(frozen=True, slots=True)
class _Point:
    """Simulated configuration at a load: its figures, and the limits that delayed requests. ``excess`` is the
    largest ratio of a figure to its limit. ``is_short``: the run has too few requests for its load.
    """

    row: ServingPlanRow
    excess: float
    is_short: bool
    bound_by: frozenset[str]
    peak_tokens: float

    @property
    def holds(self) -> bool:
        """Return True if all limits hold."""
        return self.excess <= 1 and not self.is_short


class _Process(NamedTuple):
    """Arrival process: its name, the setting that is searched with its values (``loads``, ascending), and the
    other settings.
    """

    name: str
    setting: str
    others: str
    loads: Sequence[float]

    @classmethod
    def of(cls, requests: str, sla_ms: Mapping[str, float]) -> _Process:
        """Parse a process without a load. Raises ``UsageError`` for a log, for a stated load, and for open
        arrivals without a limit of waiting times.
        """
        name, _, others = requests.partition(":")
        if name not in PROCESSES:
            raise UsageError(
                f"a search needs an arrival process, got {clipped(requests)!r}",
                hint=f"use one of {', '.join(PROCESSES)}: `requests=poisson:prompt=1024,output=256`",
            )
        setting = "concurrency" if name == "closed" else "rate"
        if any(part.partition("=")[0] == setting for part in others.split(",")):
            raise UsageError(f"`sla` searches {setting}=", hint=f"leave {setting}= out of `requests`")
        if name == "closed":
            loads = [1.0]
            while loads[-1] < _MOST_CONCURRENT:
                loads.append(max(loads[-1] + 1.0, float(round(loads[-1] * _LOAD_STEP))))
            return cls(name, setting, others, loads)
        if not {"ttft", "latency"} & sla_ms.keys():
            raise UsageError(
                f"the rate of {name} requests has no maximum without a limit of the waiting time",
                hint="add a limit such as ttft=500ms, or use `requests=closed`",
            )
        rates = [float(f"{_LEAST_RATE * _LOAD_STEP**step:.3g}") for step in range(_NUM_RATES)]
        return cls(name, setting, others, rates)

    def spelling(self, load: int) -> str:
        """Return the process with a load as text."""
        return f"{self.name}:{self.setting}={self.loads[load]:.10g}{',' if self.others else ''}{self.others}"


@dataclass
class _LayoutSearch:
    """Search over the configurations of one layout on one device, which share step times."""

    sla_ms: Mapping[str, float]
    figure: LatencyFigure
    process: _Process
    price_per_hour: float
    points: dict[int, list[_Point]] = field(default_factory=dict[int, "list[_Point]"])
    """Simulated points by load."""

    def run(self, variants: Sequence[ReadyServer]) -> list[_Point]:
        """Return the best point of each configuration. The search starts at the best load of the
        configuration before; the first start follows from decoding steps that take the limit of TPOT.
        """
        server, times = variants[-1].server, variants[-1].times
        sample = requests_of(self.process.spelling(0))
        prompt, output = float(sample.prompt.mean()), float(sample.output.mean())
        context, batches = np.array([prompt + output / 2]), times.grids.batch
        step_s = {batch: float(times.decode_ns(batch, context)[0]) / 1e9 for batch in batches}
        limit_s = self.sla_ms.get("tpot", inf) / 1e3
        most = variants[-1].kv_cache_tokens / (prompt + output)
        batch = max((batch for batch in batches if step_s[batch] <= limit_s and batch <= most), default=1)
        floor, at = 0, bisect_left(self.process.loads, batch * server.dp)
        if self.process.name != "closed":
            per_s = server.dp / output
            floor = bisect_left(self.process.loads, _IDLE * per_s / step_s[batches[0]])
            at = max(bisect_left(self.process.loads, batch * per_s / step_s[batch]), floor)
        best: list[_Point] = []
        for ready in variants:
            at, point = self.highest(ready, floor, at)
            best.append(point)
        for steps in _LADDER:
            if at - steps >= floor:
                self.point(variants[-1], at - steps)
        return best

    def highest(self, ready: ReadyServer, floor: int, start: int) -> tuple[int, _Point]:
        """Return the highest load at which the limits hold and its point, with the reason why the next load
        does not hold. If the limits do not hold at the load ``floor``, return that load.
        """
        low, high, at, stride = floor - 1, len(self.process.loads), start, 1
        points: dict[int, _Point] = {}
        while high - low > 1:
            at = min(max(at, low + 1), high - 1)
            points[at] = self.point(ready, at)
            low, high = (at, high) if points[at].holds else (low, at)
            if low >= floor and high < len(self.process.loads):
                at = (low + high) // 2
            else:
                at = low + stride if low >= floor else high - stride
                stride *= 2
        best = max(low, floor)
        point, cause = points[best], points.get(high)
        limited_by = "the highest load of the search"
        if cause is not None:
            figures = {what: getattr(cause.row, f"{what}_ms") for what in self.sla_ms}
            limited_by = (
                " and ".join(
                    f"{what} {figures[what]:,.1f} ms"
                    for what, limit in self.sla_ms.items()
                    if figures[what] > limit
                )
                or "a run that is too short: give more requests="
            )
            if cause.bound_by:
                limited_by += f" ({', '.join(sorted(cause.bound_by))})"
            if cause is not point:
                limited_by += f" at {self.process.setting}={self.process.loads[high]:.10g}"
        row = msgspec.structs.replace(point.row, is_within=point.holds, limited_by=limited_by)
        return best, replace(point, row=row)

    def point(self, ready: ReadyServer, load: int) -> _Point:
        """Return the figures of a configuration at a load. The simulation of another configuration counts if
        no limit in which they differ delayed a request.
        """
        policy, known = ready.server.policy(), self.points.setdefault(load, [])
        settings: dict[str, Any] = {
            "max_batched_tokens": policy.tokens, "max_num_seqs": policy.sequences,
            "chunked": policy.chunked, "kv_cache_tokens": ready.kv_cache_tokens,
        }  # fmt: skip
        for point in known:
            row, bound_by = point.row, point.bound_by
            is_equal = {
                "max_batched_tokens": (row.max_batched_tokens, row.chunked)
                == (policy.tokens, policy.chunked),
                "max_num_seqs": row.max_num_seqs == policy.sequences,
                "kv_cache": row.kv_cache_tokens == ready.kv_cache_tokens,
            }
            is_wider = {
                "max_batched_tokens": row.max_batched_tokens <= policy.tokens,
                "max_num_seqs": row.max_num_seqs <= policy.sequences,
                "kv_cache": point.peak_tokens <= ready.kv_cache_tokens,
            }
            if all(is_equal[name] or (is_wider[name] and name not in bound_by) for name in is_equal):
                return replace(point, row=msgspec.structs.replace(row, **settings))
        requests, server = requests_of(self.process.spelling(load)), ready.server
        done = ready.run(requests)
        figures: dict[str, float] = {
            what: getattr(done.percentiles(what), f"{self.figure}_ms") for what in _METRICS
        }
        devices, tokens_per_s = server.dp * server.tp, done.output_tokens_per_s
        row = ServingPlanRow(
            hardware=server.hardware, devices=devices, tp=server.tp, dp=server.dp, ep=server.ep, **settings,
            requests=self.process.spelling(load), load=self.process.loads[load],
            ttft_ms=figures["ttft"], tpot_ms=figures["tpot"], latency_ms=figures["latency"],
            requests_per_s=len(requests) / done.makespan_ns * 1e9, output_tokens_per_s=tokens_per_s,
            output_tokens_per_s_per_device=tokens_per_s / devices,
            put_back=sum(int(run.preemptions.sum()) for run in done.runs),
            price_per_million_tokens=self.price_per_hour * devices / (tokens_per_s * 3600) * 1e6,
            basis=done.basis_text,
        )  # fmt: skip
        is_short = float(requests.arrival_ns[-1]) < _SPAN * done.percentiles("latency").mean_ms * 1e6
        if requests.concurrency:
            is_short = len(requests) < 2 * requests.concurrency
        point = _Point(
            row=row,
            excess=max(figures[what] / limit_ms for what, limit_ms in self.sla_ms.items()),
            is_short=is_short,
            bound_by=frozenset[str]().union(*(run.bound_by for run in done.runs)),
            peak_tokens=max(run.peak_pages for run in done.runs) * policy.page_tokens,
        )
        known.append(point)
        return point


@dataclass
class _Space:
    """Space of configurations: the arguments of :func:`plan_serving`, the device of each name, and the
    ``longest`` prompt and sequence of the requests. ``refused`` are the errors of configurations that cannot
    be served.
    """

    given: Mapping[str, Any]
    devices: Mapping[str, Device]
    longest: tuple[int, int]
    sink: Diagnostics
    num_configurations: int = 0
    refused: list[HespasError] = field(default_factory=list[HespasError])

    def values(self, name: str, default: Sequence[int]) -> list[int]:
        """Return the distinct values of an axis. Raises ``UsageError`` for values that are too small."""
        value = default if self.given[name] is None else self.given[name]
        values = [value] if isinstance(value, int) else list(dict.fromkeys(value))
        least = 0 if name.startswith("max_") else 1
        if not values or min(values) < least:
            raise UsageError(
                f"`{name}={min(values, default='')}`: expected {least} or more", hint=f"`{name}={least}`"
            )
        return values

    def layouts(self, model: Model) -> Iterator[Server]:
        """Yield a server for each layout on the wanted numbers of each device."""
        if self.given["devices"] is None:
            raise UsageError("`devices` is required with `sla`", hint="`devices=8`")
        has_experts = any(isinstance(block, Experts) for block in model.blocks())
        shared = {name: self.given[name] for name in _SHARED}
        for name, devices in product(self.devices, self.values("devices", ())):
            degrees = [2**power for power in range(_DOMAIN.bit_length()) if 2**power <= devices]
            for tp in self.values("tp", degrees):
                dp, rest = divmod(devices, tp)
                if rest or dp not in self.values("dp", [max(dp, 1)]):
                    continue
                for ep in self.values("ep", list(dict.fromkeys((1, devices))) if has_experts else [1]):
                    yield Server(hardware=name, dp=dp, tp=tp, ep=ep, **shared)

    def configurations(self, server: Server) -> list[ReadyServer]:
        """Return the configurations of a layout that fit into memory, smaller limits first, with shared step
        times.
        """
        policy, (prompt, context) = server.policy(), self.longest
        tokens = {value or policy.tokens for value in self.values("max_batched_tokens", (*_TOKENS, 0))}
        sequences = {value or policy.sequences for value in self.values("max_num_seqs", (*_SEQUENCES, 0))}
        chunked = (True, False) if self.given["chunked"] is None else (self.given["chunked"],)
        sizes: list[tuple[Server, float]] = []
        for is_chunked, most, count in product(chunked, sorted(tokens), sorted(sequences)):
            if not is_chunked and most < prompt and len(tokens) > 1:
                continue
            self.num_configurations += 1
            limited = replace(server, max_batched_tokens=most, max_num_seqs=count, chunked=is_chunked)
            try:
                size = limited.cache_size(limited.step())
                if size < context or (not is_chunked and most < prompt):
                    raise UnsupportedError(
                        f"a request of {context:,} tokens does not fit into a KV cache of {size:,.0f} tokens "
                        f"and steps of {most:,} tokens",
                        hint="use more devices, larger `max_batched_tokens`, or a narrower `precision`",
                    )
                sizes.append((limited, size))
            except (UsageError, UnsupportedError) as error:
                self.refused.append(error)
        if not sizes:
            return []
        widest = replace(server, max_batched_tokens=max(tokens), max_num_seqs=max(sequences))
        step = widest.step()
        times = widest.times(step, context, self.sink)
        return [ReadyServer(server=at, step=step, times=times, kv_cache_tokens=size) for at, size in sizes]

    def ordered(self, best: Sequence[_Point], *, is_open: bool) -> tuple[ServingPlanRow, ...]:
        """Return the rows of the best points, the best first. Configurations of a layout with equal figures
        are one row, which counts them and has the default limits of the engine, or the smallest.
        """

        def value(row: ServingPlanRow) -> float:
            if self.given["objective"] == "price":
                return row.price_per_million_tokens
            return -(row.load / row.devices if is_open else row.output_tokens_per_s_per_device)

        def order(point: _Point) -> tuple[bool, float, float]:
            row = point.row
            return not row.is_within, value(row) if row.is_within else point.excess, row.latency_ms

        policy = policy_of(self.given["engine"])
        rows: dict[tuple[object, ...], ServingPlanRow] = {}
        for row in (point.row for point in sorted(best, key=order)):
            key = (
                row.hardware, row.tp, row.dp, row.ep, row.requests, row.ttft_ms, row.tpot_ms, row.latency_ms,
                row.output_tokens_per_s,
            )  # fmt: skip
            before = rows.setdefault(key, msgspec.structs.replace(row, equal=0))
            limits = row.max_batched_tokens, row.max_num_seqs, row.chunked
            is_usual = limits == (policy.tokens, policy.sequences, policy.chunked)
            rows[key] = msgspec.structs.replace(row if is_usual else before, equal=before.equal + 1)
        return tuple(rows.values())


@checked()
def plan_serving(
    model: ServedModel,
    requests: _Requests = "poisson",
    *,
    hardware: _Hardware,
    sla: _Sla,
    percentile: _Percentile = "p90",
    objective: _Objective = "throughput",
    prices: _PriceFile = None,
    top: _Top = 10,
    devices: _Devices = None,
    engine: ServingEngine = "vllm",
    dp: _Dp = None,
    tp: _Tp = None,
    ep: _Ep = None,
    precision: ServingPrecision = "bf16",
    expert_dtype: ExpertDtype = "",
    kv_cache_dtype: KvCacheDtype = "bf16",
    max_batched_tokens: _Tokens = None,
    max_num_seqs: _Sequences = None,
    chunked: ChunkedPrompts = None,
    gpu_memory_utilization: GpuMemoryUtilization = 0.9,
    kv_cache_tokens: KvCacheTokens = 0,
    step_overhead_us: StepOverhead = 0.0,
    sequence_us: SequenceOverhead = 0.0,
    prompt_us: PromptOverhead = 0.0,
    request_overhead_ms: RequestOverhead = 0.0,
    estimator: ChosenEstimator = DEFAULT_ESTIMATOR,
    diagnostics: Diagnostics | None = None,
    progress: Progress | None = None,
) -> ServingPlanResult:
    """Return the configurations of a server by the highest load at which the limits ``sla`` hold, and the
    Pareto frontier of throughput per device and latency over all simulated loads.

    ``sla`` limits the ``percentile`` of ``ttft``, ``tpot`` and ``latency``: ``"ttft=500ms,tpot=30ms"``. The
    load is the rate of an open arrival process, or the concurrency of a closed one; ``requests`` states the
    process without it. Loads are 2 % apart. Options that are None are searched, as the help of the command
    states. Each row has the figures of :func:`serve` with its settings and its ``requests``.

    Raises ``UsageError`` for contradicting settings and an empty space, and the error of the first
    configuration if none can be served.

    Examples:
        >>> done = hespas.plan_serving(
        ...     "Llama-3-8B", "closed:prompt=512,output=64,requests=64", hardware="H100-SXM", devices=1,
        ...     sla="tpot=10ms", chunked=True, max_batched_tokens=8192, max_num_seqs=256,
        ... )
        >>> done.best.is_within
        True
    """
    given = dict(locals())
    sink = diagnostics if diagnostics is not None else Diagnostics()
    sla_ms = _limits_of(sla)
    process = _Process.of(str(requests), sla_ms)
    names = dict.fromkeys([hardware] if isinstance(hardware, str) else hardware)
    own_devices = {text: load_device(text) for text in names}
    terms = Prices(rows={}) if prices is None else read_prices(Path(prices), own_devices.values())
    sample = requests_of(f"{process.name}:{process.others}")
    longest = int(sample.prompt.max()), int((sample.prompt + sample.output).max())
    space = _Space(given, own_devices, longest, sink)
    named = model if isinstance(model, Model) else load_model(str(model))
    servers = list(space.layouts(named))
    if not servers:
        raise UsageError("no layout has the wanted number of devices", hint="choose `dp` x `tp` = `devices`")
    best: list[_Point] = []
    points: list[_Point] = []
    for number, server in enumerate(servers):
        if progress:
            progress(number, len(servers))
        device = own_devices[server.hardware]
        price = terms.of_device(device).price_per_hour
        if objective == "price" and isnan(price):
            raise terms.unknown(device, "price per device-hour", "price_per_hour")
        search = _LayoutSearch(sla_ms, percentile, process, price)
        if configurations := space.configurations(server):
            best += search.run(configurations)
        points += [point for known in search.points.values() for point in known]
    if not best:
        raise space.refused[0]
    simulated = [point.row for point in points if not point.is_short]
    frontier = pareto_rows([(row.latency_ms, -row.output_tokens_per_s_per_device) for row in simulated])
    priced = [device for device in own_devices.values() if terms.of_device(device).price_source]
    return ServingPlanResult(
        model=named.name,
        engine=engine,
        sla_ms=sla_ms,
        percentile=percentile,
        objective=objective,
        setting=process.setting,
        rows=space.ordered(best, is_open=process.name != "closed"),
        frontier=tuple(simulated[index] for index in frontier),
        account=ServingPlanAccount(
            configurations=space.num_configurations,
            against_rules=sum(isinstance(error, UsageError) for error in space.refused),
            beyond_memory=sum(isinstance(error, UnsupportedError) for error in space.refused),
            compared=len(best),
            within=sum(point.row.is_within for point in best),
            runs=len(points),
        ),
        currency=terms.currency,
        sources=tuple(f"price of {device.name}: {terms.of_device(device).price_source}" for device in priced),
        inputs=tuple(str(path) for path in (prices, *servers[0].files()) if path is not None),
        diagnostics=sink,
    )


def _limits_of(sla: str) -> dict[str, float]:
    """Return the limits [ms] of a text such as ``ttft=500ms,tpot=30ms``. Raises ``UsageError``."""
    limits: dict[str, float] = {}
    for part in sla.split(","):
        name, _, text = (piece.strip() for piece in part.partition("="))
        matched = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(us|ms|s)", text)
        value_ms = float(matched[1]) * _UNITS_MS[matched[2]] if matched else 0.0
        if name not in _METRICS or name in limits or not value_ms > 0:
            raise UsageError(
                f"invalid limit '{clipped(part)}': expected one of {', '.join(_METRICS)}, each once, with a "
                "time above 0",
                hint="`sla=ttft=500ms,tpot=30ms`",
            )
        limits[name] = value_ms
    return limits
