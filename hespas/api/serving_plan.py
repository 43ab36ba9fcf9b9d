"""Search for the server configuration with the highest load within latency limits (SLA).

Step times are estimated once per layout for the largest limits of the scheduler, and all configurations of
the layout share them. Bisection on simulations of the scheduler finds the highest load of a configuration. A
simulation in which a limit did not delay a request counts for larger limits too.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil, inf, isnan, log2
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from hespas.api.arguments import ChosenEstimator, checked
from hespas.api.lowering import DEFAULT_ESTIMATOR
from hespas.api.request_log import PROCESSES, requests_of
from hespas.api.server_options import (
    MOST_SEARCHED,
    ChunkedPrompts,
    ExpertDtype,
    GpuMemoryUtilization,
    KvCacheDtype,
    KvCacheTokens,
    LatencyLimits,
    LimitedFigure,
    PromptOverhead,
    RequestOverhead,
    SearchedDevices,
    SearchedDp,
    SearchedEp,
    SearchedHardware,
    SearchedRequests,
    SearchedSequences,
    SearchedTokens,
    SearchedTp,
    SearchObjective,
    SearchPrices,
    SearchTop,
    SequenceOverhead,
    ServedModel,
    ServingEngine,
    ServingPrecision,
    StepOverhead,
    UsedParameters,
)
from hespas.api.servers import Server
from hespas.api.serving import ReadyServer
from hespas.api.serving_plan_result import (
    LatencyFigure,
    ServingPlanAccount,
    ServingPlanResult,
    ServingPlanRow,
)
from hespas.generators.llm import Model, load_model
from hespas.generators.llm.model import Experts
from hespas.graph import Diagnostics
from hespas.graph.columns import pareto_rows
from hespas.graph.errors import HespasError, UnsupportedError, UsageError, clipped
from hespas.graph.progress import Progress
from hespas.hardware import Device, load_device
from hespas.hardware.prices import Prices, read_prices
from hespas.report.texts import counted
from hespas.simulator.serving import policy_of

__all__ = ["plan_serving"]

_LOAD_STEP = 1.02
"""Ratio of two loads next to each other."""
_LEAST_RATE, _NUM_RATES = 1e-4, 1280
"""Lowest request rate [1/s] of the search, and the number of rates (up to 1e7)."""
_MOST_CONCURRENT = 1_000_000
_SPAN = 3.0
"""A run shows that a server holds a rate if its requests arrive for at least this many mean latencies."""
_MOST_GROWTH = 16
"""Most times the default number of requests in a run. The search doubles the number if a run is too short."""
_MOST_SPAN_S = 5e8
"""Longest mean time in which the requests of a run arrive: half the limit of arrival processes."""
_IDLE = 0.1
"""Share of the time in which a server works at the lowest rate of the first search. Lower rates are searched
if that one misses a limit.
"""
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
    "engine_parameters", "step_overhead_us", "sequence_us", "prompt_us", "request_overhead_ms", "estimator",
)  # fmt: skip
"""Settings of a server that all configurations share."""


@dataclass(frozen=True, slots=True)
class _Point:
    """Simulated configuration at a load: its figures, and the limits that delayed requests. ``excess`` is the
    largest ratio of a figure to its limit. ``length`` is the ratio of the number of requests to the least one
    that shows the load: a run below 1 is too short.
    """

    row: ServingPlanRow
    excess: float
    length: float
    num_requests: int
    bound_by: frozenset[str]
    peak_tokens: float

    @property
    def is_open(self) -> bool:
        """Return True if all limits hold, but the run is too short to show that."""
        return self.excess <= 1 and self.length < 1


class _Process(NamedTuple):
    """Arrival process: its name, the setting that is searched with its values (``loads``, ascending), and the
    other settings. ``num_requests`` may grow up to ``most_growth`` times.
    """

    name: str
    setting: str
    others: str
    loads: Sequence[float]
    num_requests: int
    most_growth: int

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
        setting_names = {part.partition("=")[0] for part in others.split(",")}
        if setting in setting_names:
            raise UsageError(f"`sla` searches {setting}=", hint=f"leave {setting}= out of `requests`")
        sample, growth = requests_of(f"{name}:{others}"), 1 if "requests" in setting_names else _MOST_GROWTH
        count = len(sample)
        if "tpot" in sla_ms and sample.output.max() < 2:
            raise UsageError(
                "`sla` limits tpot, but no request has a second output token",
                hint="use output=2 or more in `requests`, or leave tpot out",
            )
        if name == "closed":
            loads = [1.0]
            while loads[-1] < _MOST_CONCURRENT:
                loads.append(max(loads[-1] + 1.0, float(round(loads[-1] * _LOAD_STEP))))
            return cls(name, setting, others, loads, count, growth)
        if not {"ttft", "latency"} & sla_ms.keys():
            raise UsageError(
                f"the rate of {name} requests has no maximum without a limit of the waiting time",
                hint="add a limit such as ttft=500ms, or use `requests=closed`",
            )
        rates = [float(f"{_LEAST_RATE * _LOAD_STEP**step:.3g}") for step in range(_NUM_RATES)]
        rates = [rate for rate in rates if count * growth <= _MOST_SPAN_S * rate]
        return cls(name, setting, others, rates, count, growth)

    def spelling(self, load: int, growth: int = 1) -> str:
        """Return the process with a load and ``growth`` times the number of requests as text."""
        settings = [f"{self.setting}={self.loads[load]:.10g}", *filter(None, [self.others])]
        if growth > 1:
            settings.append(f"requests={self.num_requests * growth}")
        return f"{self.name}:{','.join(settings)}"


@dataclass
class _LayoutSearch:
    """Search over the configurations of one layout on one device, which share step times."""

    sla_ms: Mapping[str, float]
    figure: LatencyFigure
    process: _Process
    price_per_hour: float
    points: dict[tuple[int, int], list[_Point]] = field(default_factory=dict[tuple[int, int], "list[_Point]"])
    """Simulated points by load and growth of the number of requests."""

    def run(self, variants: Sequence[ReadyServer]) -> list[tuple[int, _Point]]:
        """Return the highest load of each configuration and its point. The search starts at the best load of
        the configuration before; the first start follows from decoding steps that take the limit of TPOT.
        """
        server, times = variants[-1].server, variants[-1].times
        sample = requests_of(self.process.spelling(0))
        prompt, output = float(sample.prompt.mean()), float(sample.output.mean())
        context, batches = np.array([prompt + output / 2]), times.grids.batch
        step_s = {batch: float(times.decode_ns(batch, context)[0]) / 1e9 for batch in batches}
        limit_s = self.sla_ms.get("tpot", inf) / 1e3
        most = variants[-1].kv_cache_tokens / (prompt + output)
        batch = max((batch for batch in batches if step_s[batch] <= limit_s and batch <= most), default=1)
        highest = len(self.process.loads) - 1
        floor, at = 0, bisect_left(self.process.loads, batch * server.dp)
        if self.process.name != "closed":
            per_s = server.dp / output
            floor = min(bisect_left(self.process.loads, _IDLE * per_s / step_s[batches[0]]), highest)
            at = max(bisect_left(self.process.loads, batch * per_s / step_s[batch]), floor)
        best: list[tuple[int, _Point]] = []
        for ready in variants:
            best.append(self.highest(ready, floor, at))
            at = best[-1][0]
        for steps in _LADDER:
            if at - steps >= floor:
                self.point(variants[-1], at - steps)
        return best

    def highest(
        self, ready: ReadyServer, floor: int, start: int, *, most_growth: int = 1, least: int = -1
    ) -> tuple[int, _Point]:
        """Return the highest load at which the limits hold and its point, with the reason why the next load
        does not hold. If the limits hold at no load from ``floor`` on, search lower ones; without any, return
        the lowest load. A run that is too short grows up to ``most_growth`` times. If the limits do not hold
        at the load ``least``, which is above ``floor``, return ``floor``, at which they hold.
        """
        low, high, at, stride = floor - 1, len(self.process.loads), start, 1
        points: dict[int, _Point] = {}
        while high - low > 1 or (low < floor and floor > 0):
            if high - low == 1:
                floor, low, at = 0, -1, 0
            at = min(max(at, low + 1), high - 1)
            points[at], growth = self.point(ready, at), 1
            is_full = self.process.name == "closed" and "max_num_seqs" in points[at].bound_by
            while points[at].is_open and growth < most_growth and not is_full:
                growth = min(growth * 2 ** ceil(-log2(points[at].length)), most_growth)
                points[at] = self.point(ready, at, growth)
            low, high = (at, high) if points[at].row.is_within else (low, at)
            if floor < high == least:
                points[floor] = self.point(ready, floor)
                break
            if low >= floor and high < len(self.process.loads):
                at = (low + high) // 2
            else:
                at = low + stride if low >= floor else high - stride
                stride *= 2
        best = max(low, floor)
        point, cause = points[best], points.get(high)
        limited_by = "the highest load of the search"
        is_lower_bound = cause is None or cause.is_open or high - best > 1
        if cause is not None:
            figures = {what: getattr(cause.row, f"{what}_ms") for what in self.sla_ms}
            limited_by = (
                " and ".join(
                    f"{what} {figures[what]:,.1f} ms"
                    for what, limit in self.sla_ms.items()
                    if figures[what] > limit
                )
                or f"a run of {counted(cause.num_requests, 'request')} is too short"
            )
            if cause.bound_by:
                limited_by += f" ({', '.join(sorted(cause.bound_by))})"
            if cause is not point:
                limited_by += f" at {self.process.setting}={self.process.loads[high]:.10g}"
                if cause.num_requests != point.num_requests:
                    limited_by += f",requests={cause.num_requests}"
        row = msgspec.structs.replace(point.row, limited_by=limited_by, is_lower_bound=is_lower_bound)
        return best, replace(point, row=row)

    def point(self, ready: ReadyServer, load: int, growth: int = 1) -> _Point:
        """Return the figures of a configuration at a load, with ``growth`` times the requests. The simulation
        of another configuration counts if no limit in which they differ delayed a request.
        """
        policy, known = ready.server.policy(), self.points.setdefault((load, growth), [])
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
        spelling, server = self.process.spelling(load, growth), ready.server
        requests = requests_of(spelling)
        done = ready.run(requests)
        figures: dict[str, float] = {
            what: getattr(done.percentiles(what), f"{self.figure}_ms") for what in _METRICS
        }
        devices, tokens_per_s = server.dp * server.tp, done.output_tokens_per_s
        excess = max(figures[what] / limit_ms for what, limit_ms in self.sla_ms.items())
        length = float(requests.arrival_ns[-1]) / (_SPAN * done.percentiles("latency").mean_ms * 1e6)
        if requests.concurrency:
            length = len(requests) / (2 * requests.concurrency)
        row = ServingPlanRow(
            hardware=server.hardware, devices=devices, tp=server.tp, dp=server.dp, ep=server.ep, **settings,
            requests=spelling, load=self.process.loads[load], is_within=excess <= 1 and length >= 1,
            ttft_ms=figures["ttft"], tpot_ms=figures["tpot"], latency_ms=figures["latency"],
            requests_per_s=len(requests) / done.makespan_ns * 1e9, output_tokens_per_s=tokens_per_s,
            output_tokens_per_s_per_device=tokens_per_s / devices,
            put_back=sum(int(run.preemptions.sum()) for run in done.runs),
            price_per_million_tokens=self.price_per_hour * devices / (tokens_per_s * 3600) * 1e6,
            basis=done.basis_text,
        )  # fmt: skip
        point = _Point(
            row=row,
            excess=excess,
            length=length,
            num_requests=len(requests),
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
        if max(values) > MOST_SEARCHED:
            raise UsageError(
                f"`{name}={max(values)}`: expected at most {MOST_SEARCHED}", hint=f"`{name}={MOST_SEARCHED}`"
            )
        return values

    def layouts(self, model: Model) -> Iterator[Server]:
        """Yield a server for each layout on the wanted numbers of each device."""
        if not self.devices:
            raise UsageError("`hardware` names no device", hint="`hardware=H100-SXM`")
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
                if size < context:
                    raise UnsupportedError(
                        f"a request of {counted(context, 'token')} does not fit into a KV cache of "
                        f"{counted(size, 'token')}",
                        hint="use more devices, a larger `tp`, or a narrower `precision`",
                    )
                if not is_chunked and most < prompt:
                    raise UnsupportedError(
                        f"a whole prompt of {counted(prompt, 'token')} does not fit into a step of "
                        f"{counted(most, 'token')}",
                        hint=f"use `max_batched_tokens={prompt}`, or split prompts with `chunked`",
                    )
                sizes.append((limited, size))
            except (UsageError, UnsupportedError) as error:
                self.refused.append(error)
        if not sizes:
            return []
        widest = replace(server, max_batched_tokens=max(tokens), max_num_seqs=max(sequences))
        step = widest.step()
        parameters = widest.parameters(step)
        times = widest.times(step, context, self.sink, parameters)
        return [
            ReadyServer(server=at, step=step, times=times, kv_cache_tokens=size, parameters=parameters)
            for at, size in sizes
        ]

    def decided(
        self, searched: Sequence[tuple[_LayoutSearch, ReadyServer, int, _Point]], process: _Process
    ) -> list[_Point]:
        """Return the best point of each configuration, the highest load first. Where a run was too short for
        the next load, search with more requests. Configurations that do not hold the load of the best one
        keep their lower bound.
        """

        def cost(search: _LayoutSearch, point: _Point) -> float:
            return point.row.devices * (search.price_per_hour if self.given["objective"] == "price" else 1)

        most = max(
            (at.row.load / cost(search, at) for search, _, _, at in searched if not at.row.is_lower_bound),
            default=0.0,
        )
        best: list[_Point] = []
        for search, ready, load, point in sorted(
            searched, key=lambda at: -at[3].row.load / cost(at[0], at[3])
        ):
            decided = point
            if point.row.is_lower_bound and point.row.is_within and process.most_growth > 1:
                least = bisect_right(process.loads, most * cost(search, point) * (1 + 1e-9))
                is_open = process.name != "closed" and load < least < len(process.loads)
                _, decided = search.highest(
                    ready,
                    load,
                    least if is_open else load + 1,
                    most_growth=process.most_growth,
                    least=least if is_open else -1,
                )
            if not decided.row.is_lower_bound:
                most = max(most, decided.row.load / cost(search, decided))
            best.append(decided)
        if bounds := sum(point.row.is_lower_bound for point in best):
            self.sink.warning(
                "serving.lower-bound",
                "requests",
                f"the highest load of {counted(bounds, 'configuration')} is a lower bound, because "
                "runs at higher loads are too short or were left out; state more requests= in `requests`",
            )
        return best

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
                row.output_tokens_per_s, row.is_lower_bound,
            )  # fmt: skip
            before = rows.setdefault(key, msgspec.structs.replace(row, equal=0))
            limits = row.max_batched_tokens, row.max_num_seqs, row.chunked
            is_usual = limits == (policy.tokens, policy.sequences, policy.chunked)
            rows[key] = msgspec.structs.replace(row if is_usual else before, equal=before.equal + 1)
        return tuple(rows.values())


@checked()
def plan_serving(
    model: ServedModel,
    requests: SearchedRequests = "poisson",
    *,
    hardware: SearchedHardware,
    sla: LatencyLimits,
    percentile: LimitedFigure = "p90",
    objective: SearchObjective = "throughput",
    prices: SearchPrices = None,
    top: SearchTop = 10,
    devices: SearchedDevices = None,
    engine: ServingEngine = "vllm",
    dp: SearchedDp = None,
    tp: SearchedTp = None,
    ep: SearchedEp = None,
    precision: ServingPrecision = "bf16",
    expert_dtype: ExpertDtype = "",
    kv_cache_dtype: KvCacheDtype = "bf16",
    max_batched_tokens: SearchedTokens = None,
    max_num_seqs: SearchedSequences = None,
    chunked: ChunkedPrompts = None,
    gpu_memory_utilization: GpuMemoryUtilization = 0.9,
    kv_cache_tokens: KvCacheTokens = 0,
    engine_parameters: UsedParameters = "shipped",
    step_overhead_us: StepOverhead = None,
    sequence_us: SequenceOverhead = None,
    prompt_us: PromptOverhead = None,
    request_overhead_ms: RequestOverhead = None,
    estimator: ChosenEstimator = DEFAULT_ESTIMATOR,
    diagnostics: Diagnostics | None = None,
    progress: Progress | None = None,
) -> ServingPlanResult:
    """Return the configurations of a server by the highest load at which the limits ``sla`` hold, and the
    Pareto frontier of throughput per device and latency over all simulated loads.

    ``sla`` limits the ``percentile`` of ``ttft``, ``tpot`` and ``latency``: ``"ttft=500ms,tpot=30ms"``. The
    load is the rate of an open arrival process, or the concurrency of a closed one; ``requests`` states the
    process without it. Loads are 2 % apart. A run that is too short for a load has up to 16 times the default
    number of requests. With a stated ``requests=``, beyond that number, and for configurations that do not
    hold the load of the best one, the load is a lower bound, which a diagnostic reports. Options that are
    None are searched, as the help of the command states. Each row has the figures of :func:`serve` with its
    settings and its ``requests``.

    Raises ``UsageError`` for contradicting settings, an empty space, a limit of TPOT without second tokens,
    and the error of the first configuration if none can be served.

    Examples:
        >>> done = hespas.plan_serving(
        ...     "Llama-3-8B", "closed:prompt=512,output=64,requests=64", hardware="H100-SXM", devices=1,
        ...     sla="tpot=10ms", chunked=True, max_batched_tokens=8192, max_num_seqs=256,
        ... )
        >>> done.best.is_within
        True
    """
    given = dict(locals())
    sink, sla_ms = Diagnostics() if diagnostics is None else diagnostics, _limits_of(sla)
    process = _Process.of(str(requests), sla_ms)
    own_devices: dict[str, Device] = {}
    for text in [hardware] if isinstance(hardware, str) else hardware:
        if (device := load_device(text)) not in own_devices.values():
            own_devices[text] = device
    terms = Prices(rows={}) if prices is None else read_prices(Path(prices), own_devices.values())
    sample = requests_of(process.spelling(0, process.most_growth))
    longest = int(sample.prompt.max()), int((sample.prompt + sample.output).max())
    space = _Space(given, own_devices, longest, sink)
    named = model if isinstance(model, Model) else load_model(str(model))
    servers = list(space.layouts(named))
    files = [*filter(None, [prices]), *(path for server in servers for path in server.files())]
    if not servers:
        raise UsageError("no layout has the wanted number of devices", hint="choose `dp` x `tp` = `devices`")
    searched: list[tuple[_LayoutSearch, ReadyServer, int, _Point]] = []
    for number, server in enumerate(servers):
        if progress:
            progress(number, len(servers))
        device = own_devices[server.hardware]
        price = terms.of_device(device).price_per_hour
        if objective == "price" and isnan(price):
            raise terms.unknown(device, "price per device-hour", "price_per_hour")
        search = _LayoutSearch(sla_ms, percentile, process, price)
        if configurations := space.configurations(server):
            runs = zip(configurations, search.run(configurations), strict=True)
            searched += [(search, ready, at, point) for ready, (at, point) in runs]
    if not searched:
        raise space.refused[0]
    best = space.decided(searched, process)
    layouts = {id(search): search for search, *_ in searched}.values()
    points = [point for search in layouts for known in search.points.values() for point in known]
    simulated = [point.row for point in points if point.length >= 1]
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
        inputs=tuple(dict.fromkeys(map(str, files))),
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
                f"time above 0 and its unit ({', '.join(_UNITS_MS)})",
                hint="`sla=ttft=500ms,tpot=30ms`",
            )
        limits[name] = value_ms
    return limits
