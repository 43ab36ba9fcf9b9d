"""Search for the server configuration with the highest load within latency limits (SLA).

Step times are estimated once per layout for the largest limits of the scheduler, and all configurations of
the layout share them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import isnan
from pathlib import Path
from typing import Any

import msgspec

from hespas.api.arguments import ChosenEstimator, checked
from hespas.api.lowering import DEFAULT_ESTIMATOR
from hespas.api.request_log import requests_of
from hespas.api.server_options import (
    MOST_SEARCHED,
    Acceptance,
    ChunkedPrompts,
    DraftSource,
    ExpertDtype,
    GpuMemoryUtilization,
    KvCacheDtype,
    KvCacheTokens,
    KvTransferRate,
    LatencyLimits,
    LimitedFigure,
    PromptOverhead,
    RequestOverhead,
    SearchedDecodeServers,
    SearchedDevices,
    SearchedDp,
    SearchedEp,
    SearchedHardware,
    SearchedPrefillDp,
    SearchedPrefillEp,
    SearchedPrefillServers,
    SearchedPrefillTp,
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
    SpeculativeTokens,
    StepOverhead,
    UsedParameters,
)
from hespas.api.servers import Server
from hespas.api.serving import ReadyServer
from hespas.api.serving_plan_result import (
    ServingPlanAccount,
    ServingPlanResult,
    ServingPlanRow,
)
from hespas.api.serving_search import LATENCIES, ArrivalProcess, LayoutSearch, LoadPoint
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

_SEQUENCES, _TOKENS = (64, 256), (2048, 8192, 16384)
"""Limits that are searched besides the default of the engine."""
_DOMAIN = 8
"""Most tensor-parallel ranks that are searched by default."""
_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_SHARED = (
    "model", "engine", "precision", "expert_dtype", "kv_cache_dtype", "gpu_memory_utilization",
    "kv_cache_tokens", "engine_parameters", "step_overhead_us", "sequence_us", "prompt_us",
    "request_overhead_ms", "estimator", "num_speculative_tokens", "draft", "acceptance",
)  # fmt: skip
"""Settings of a server that all configurations share."""
_POOLS = ("prefill_servers", "decode_servers")
_PREFILL = ("prefill_dp", "prefill_tp", "prefill_ep")


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
    estimated: list[tuple[Server, bool, ReadyServer]] = field(
        default_factory=list[tuple[Server, bool, ReadyServer]]
    )
    """Servers of one layout with the largest limits of the scheduler, whether prompts have separate servers,
    and the step times. Layouts of separate prefill and decode servers share them.
    """

    def values(self, name: str, default: Sequence[int]) -> list[int]:
        """Return the distinct values of an axis. Raises ``UsageError`` for values that are too small."""
        value = default if self.given[name] is None else self.given[name]
        values = [value] if isinstance(value, int) else list(dict.fromkeys(value))
        least = 0 if name.startswith(("max_", "prefill_", "decode_")) else 1
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
        counts = {name: self.values(name, ()) for name in _POOLS if self.given[name] is not None}
        is_separate = any(map(any, counts.values()))
        for name in (*_PREFILL, "kv_transfer_gb_per_s"):
            if self.given[name] is not None and not is_separate:
                raise UsageError(
                    f"`{name}` requires separate prefill servers", hint="add `prefill_servers=1`"
                )
        for name, devices in product(self.devices, self.values("devices", ())):
            degrees = [2**power for power in range(_DOMAIN.bit_length()) if 2**power <= devices]
            if all(0 in values for values in counts.values()):
                for tp in self.values("tp", degrees):
                    dp, rest = divmod(devices, tp)
                    if rest or dp not in self.values("dp", [max(dp, 1)]):
                        continue
                    for ep in self.values("ep", list(dict.fromkeys((1, devices))) if has_experts else [1]):
                        yield Server(hardware=name, dp=dp, tp=tp, ep=ep, **shared)
            if is_separate:
                rate = self.given["kv_transfer_gb_per_s"]
                for layout in self.separate(devices, degrees, counts, has_experts=has_experts):
                    yield Server(hardware=name, **layout, kv_transfer_gb_per_s=rate, **shared)

    def separate(
        self, devices: int, degrees: Sequence[int], counts: Mapping[str, Sequence[int]], *, has_experts: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield the layouts of separate prefill and decode servers that have ``devices`` devices. ``counts``
        has the numbers of servers to try, ``degrees`` the numbers of tensor-parallel ranks.
        """

        def pools(prefix: str, shared: tuple[int, int, int]) -> Iterator[tuple[int, int, int]]:
            default = {"dp": [1], "tp": degrees}
            axes = (self.values(prefix + name, values) for name, values in default.items())
            for dp, tp in ((dp or shared[0], tp or shared[1]) for dp, tp in product(*axes)):
                experts = list(dict.fromkeys((1, dp * tp))) if has_experts else [1]
                yield from ((dp, tp, ep or shared[2]) for ep in self.values(f"{prefix}ep", experts))

        pairs = ((own, prefill) for own in pools("", (1, 1, 1)) for prefill in pools("prefill_", own))
        for (dp, tp, ep), prefill in dict.fromkeys(pairs):
            size = prefill[0] * prefill[1]
            for first in counts.get("prefill_servers", range(1, devices // size + 1)):
                second, rest = divmod(devices - first * size, dp * tp)
                wanted = counts.get("decode_servers", (second,))
                if first and not rest and second > 0 and second in wanted:
                    yield {
                        "dp": dp, "tp": tp, "ep": ep, "prefill_servers": first, "decode_servers": second,
                        **dict(zip(_PREFILL, prefill, strict=True)),
                    }  # fmt: skip

    def ready(self, server: Server, context: int, *, is_disaggregated: bool = False) -> ReadyServer:
        """Return a server of one pool with the estimated times of its steps."""
        for estimated, separate, ready in self.estimated:
            if separate == is_disaggregated and estimated == server:
                return ready
        ready = ReadyServer.with_times(server, context, self.sink, is_disaggregated=is_disaggregated)
        self.estimated.append((server, is_disaggregated, ready))
        return ready

    def configurations(self, server: Server) -> list[ReadyServer]:
        """Return the configurations of a layout that fit into memory, smaller limits first, with shared step
        times.
        """
        policy, (prompt, context) = server.policy(), self.longest
        is_separate = bool(server.prefill_servers)
        axes = ((0,), (0,)) if is_separate else ((*_TOKENS, 0), (*_SEQUENCES, 0))
        tokens = {value or policy.tokens for value in self.values("max_batched_tokens", axes[0])}
        sequences = {value or policy.sequences for value in self.values("max_num_seqs", axes[1])}
        chunked = (policy.chunked,) if is_separate else (True, False)
        if self.given["chunked"] is not None:
            chunked = (self.given["chunked"],)
        sizes: list[tuple[Server, list[float]]] = []
        for is_chunked, most, count in product(chunked, sorted(tokens), sorted(sequences)):
            if not is_chunked and most < prompt and len(tokens) > 1:
                continue
            self.num_configurations += 1
            limited = replace(server, max_batched_tokens=most, max_num_seqs=count, chunked=is_chunked)
            try:
                caches = [pool.cache_size(pool.step()) for pool in limited.pools]
                for size, length in zip(reversed(caches), (context, prompt + 1), strict=False):
                    if size < length:
                        raise UnsupportedError(
                            f"a request of {counted(length, 'token')} does not fit into a KV cache of "
                            f"{counted(size, 'token')}",
                            hint="use more devices, a larger `tp`, or a narrower `precision`",
                        )
                if not is_chunked and most < prompt:
                    raise UnsupportedError(
                        f"a whole prompt of {counted(prompt, 'token')} does not fit into a step of "
                        f"{counted(most, 'token')}",
                        hint=f"use `max_batched_tokens={prompt}`, or split prompts with `chunked`",
                    )
                sizes.append((limited, caches))
            except (UsageError, UnsupportedError) as error:
                self.refused.append(error)
        if not sizes:
            return []
        widest = replace(server, max_batched_tokens=max(tokens), max_num_seqs=max(sequences))
        try:
            ready = [self.ready(pool, context, is_disaggregated=is_separate) for pool in widest.pools]
        except (UsageError, UnsupportedError) as error:  # a rule of layouts, or a kernel without an estimate
            self.refused += [error] * len(sizes)
            return []
        *separate, own = ready
        return [
            replace(
                own,
                server=at,
                kv_cache_tokens=caches[-1],
                prefill=replace(separate[0], kv_cache_tokens=caches[0]) if separate else None,
            )
            for at, caches in sizes
        ]

    def decided(
        self, searched: Sequence[tuple[LayoutSearch, ReadyServer, int, LoadPoint]], process: ArrivalProcess
    ) -> list[LoadPoint]:
        """Return the best point of each configuration, the highest load first. Where a run was too short for
        the next load, search with more requests. Configurations that do not hold the load of the best one
        keep their lower bound.
        """

        def cost(search: LayoutSearch, point: LoadPoint) -> float:
            return point.row.devices * (search.price_per_hour if self.given["objective"] == "price" else 1)

        most = max(
            (at.row.load / cost(search, at) for search, _, _, at in searched if not at.row.is_lower_bound),
            default=0.0,
        )
        best: list[LoadPoint] = []
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

    def account(self, best: Sequence[LoadPoint], runs: int) -> ServingPlanAccount:
        """Return the account of the search, which found ``best`` in ``runs`` simulations."""
        return ServingPlanAccount(
            configurations=self.num_configurations,
            against_rules=sum(isinstance(error, UsageError) for error in self.refused),
            beyond_memory=sum(isinstance(error, UnsupportedError) for error in self.refused),
            compared=len(best),
            within=sum(point.row.is_within for point in best),
            runs=runs,
        )

    def ordered(self, best: Sequence[LoadPoint], *, is_open: bool) -> tuple[ServingPlanRow, ...]:
        """Return the rows of the best points, the best first. Configurations of a layout with equal figures
        are one row, which counts them and has the default limits of the engine, or the smallest.
        """

        def value(row: ServingPlanRow) -> float:
            if self.given["objective"] == "price":
                return row.price_per_million_tokens
            return -(row.load / row.devices if is_open else row.output_tokens_per_s_per_device)

        def order(point: LoadPoint) -> tuple[bool, float, float]:
            row = point.row
            return not row.is_within, value(row) if row.is_within else point.excess, row.latency_ms

        policy = policy_of(self.given["engine"])
        rows: dict[tuple[object, ...], ServingPlanRow] = {}
        for row in (point.row for point in sorted(best, key=order)):
            key = (
                row.hardware, row.tp, row.dp, row.ep, row.requests, row.ttft_ms, row.tpot_ms, row.latency_ms,
                row.output_tokens_per_s, row.is_lower_bound, row.prefill_servers, row.decode_servers,
                row.prefill_tp, row.prefill_dp, row.prefill_ep,
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
    num_speculative_tokens: SpeculativeTokens = 0,
    draft: DraftSource = "layer",
    acceptance: Acceptance = None,
    prefill_servers: SearchedPrefillServers = None,
    decode_servers: SearchedDecodeServers = None,
    prefill_dp: SearchedPrefillDp = None,
    prefill_tp: SearchedPrefillTp = None,
    prefill_ep: SearchedPrefillEp = None,
    kv_transfer_gb_per_s: KvTransferRate = None,
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
    None are searched, as the help of the command states. With ``prefill_servers`` or ``decode_servers``, the
    servers of both pools have ``devices`` devices together, and limits of the scheduler that are None are
    the engine's; 0 in a list searches servers for both too. Each row has the figures of :func:`serve`
    with its settings and its ``requests``.

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
    process = ArrivalProcess.of(str(requests), sla_ms)
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
        raise UsageError(
            "no layout has the wanted number of devices",
            hint="choose `dp` x `tp` = `devices`, for separate servers the sum over all of them",
        )
    searched: list[tuple[LayoutSearch, ReadyServer, int, LoadPoint]] = []
    for number, server in enumerate(servers):
        if progress:
            progress(number, len(servers))
        device = own_devices[server.hardware]
        price = terms.of_device(device).price_per_hour
        if objective == "price" and isnan(price):
            raise terms.unknown(device, "price per device-hour", "price_per_hour")
        search = LayoutSearch(sla_ms, percentile, process, price)
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
        account=space.account(best, len(points)),
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
        if name not in LATENCIES or name in limits or not value_ms > 0:
            raise UsageError(
                f"invalid limit '{clipped(part)}': expected one of {', '.join(LATENCIES)}, each once, with a "
                f"time above 0 and its unit ({', '.join(_UNITS_MS)})",
                hint="`sla=ttft=500ms,tpot=30ms`",
            )
        limits[name] = value_ms
    return limits
