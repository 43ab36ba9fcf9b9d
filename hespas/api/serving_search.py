"""Search for the highest load of server configurations that share step times, within latency limits.

Bisection on simulations of the scheduler finds the highest load of a configuration. A simulation in which a
limit did not delay a request counts for larger limits too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, log2
from typing import Any, NamedTuple

import msgspec
import numpy as np

from hespas.api.request_log import PROCESSES, requests_of
from hespas.api.serving import ReadyServer
from hespas.api.serving_plan_result import LatencyFigure, ServingPlanRow
from hespas.graph.errors import UsageError, clipped
from hespas.report.texts import counted

__all__ = ["LATENCIES", "ArrivalProcess", "LayoutSearch", "LoadPoint"]

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
_LADDER = (35, 70, 105, 140)
"""Steps below the best load of a layout that are simulated for the frontier: 1/2, 1/4, 1/8 and 1/16 of it."""
LATENCIES = ("ttft", "tpot", "latency")


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """Simulated configuration at a load: its figures, and the limits that delayed requests. ``excess`` is the
    largest ratio of a figure to its limit. ``length`` is the ratio of the number of requests to the least one
    that shows the load: a run below 1 is too short. ``peak_tokens`` are the most cached tokens of a server,
    ``caches`` the sizes of the caches of decode and prefill servers.
    """

    row: ServingPlanRow
    excess: float
    length: float
    num_requests: int
    bound_by: frozenset[str]
    peak_tokens: float
    caches: tuple[float, ...]

    @property
    def is_open(self) -> bool:
        """Return True if all limits hold, but the run is too short to show that."""
        return self.excess <= 1 and self.length < 1


class ArrivalProcess(NamedTuple):
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
    def of(cls, requests: str, sla_ms: Mapping[str, float]) -> ArrivalProcess:
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
class LayoutSearch:
    """Search over the configurations of one layout on one device, which share step times."""

    sla_ms: Mapping[str, float]
    figure: LatencyFigure
    process: ArrivalProcess
    price_per_hour: float
    points: dict[tuple[int, int], list[LoadPoint]] = field(
        default_factory=dict[tuple[int, int], "list[LoadPoint]"]
    )
    """Simulated points by load and growth of the number of requests."""

    def run(self, variants: Sequence[ReadyServer]) -> list[tuple[int, LoadPoint]]:
        """Return the highest load of each configuration and its point. The search starts at the best load of
        the configuration before; the first start follows from decoding steps that take the limit of TPOT.
        """
        server, times = variants[-1].server, variants[-1].times
        sample = requests_of(self.process.spelling(0))
        prompt, output = float(sample.prompt.mean()), float(sample.output.mean())
        context, batches = np.array([prompt + output / 2]), times.grids.batch
        replicas = server.num_replicas[-1]
        step_s = {batch: float(times.decode_ns(batch, context)[0]) / times.gain / 1e9 for batch in batches}
        limit_s = self.sla_ms.get("tpot", inf) / 1e3
        most = variants[-1].kv_cache_tokens / (prompt + output)
        batch = max((batch for batch in batches if step_s[batch] <= limit_s and batch <= most), default=1)
        highest = len(self.process.loads) - 1
        floor, at = 0, bisect_left(self.process.loads, batch * replicas)
        if self.process.name != "closed":
            per_s = replicas / output
            floor = min(bisect_left(self.process.loads, _IDLE * per_s / step_s[batches[0]]), highest)
            at = max(bisect_left(self.process.loads, batch * per_s / step_s[batch]), floor)
        best: list[tuple[int, LoadPoint]] = []
        for ready in variants:
            best.append(self.highest(ready, floor, at))
            at = best[-1][0]
        for steps in _LADDER:
            if at - steps >= floor:
                self.point(variants[-1], at - steps)
        return best

    def highest(
        self, ready: ReadyServer, floor: int, start: int, *, most_growth: int = 1, least: int = -1
    ) -> tuple[int, LoadPoint]:
        """Return the highest load at which the limits hold and its point, with the reason why the next load
        does not hold. If the limits hold at no load from ``floor`` on, search lower ones; without any, return
        the lowest load. A run that is too short grows up to ``most_growth`` times. If the limits do not hold
        at the load ``least``, which is above ``floor``, return ``floor``, at which they hold.
        """
        low, high, at, stride = floor - 1, len(self.process.loads), start, 1
        points: dict[int, LoadPoint] = {}
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

    def point(self, ready: ReadyServer, load: int, growth: int = 1) -> LoadPoint:
        """Return the figures of a configuration at a load, with ``growth`` times the requests. The simulation
        of another configuration counts if no limit in which they differ delayed a request.
        """
        policy, known = ready.server.policy(), self.points.setdefault((load, growth), [])
        caches = tuple(pool.kv_cache_tokens for pool in (ready, ready.prefill) if pool is not None)
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
                "kv_cache": point.caches == caches,
            }
            is_wider = {
                "max_batched_tokens": row.max_batched_tokens <= policy.tokens,
                "max_num_seqs": row.max_num_seqs <= policy.sequences,
                "kv_cache": point.peak_tokens <= min(caches),
            }
            if all(is_equal[name] or (is_wider[name] and name not in bound_by) for name in is_equal):
                return replace(point, caches=caches, row=msgspec.structs.replace(row, **settings))
        spelling, server = self.process.spelling(load, growth), ready.server
        requests = requests_of(spelling)
        done = ready.run(requests)
        figures: dict[str, float] = {
            what: getattr(done.percentiles(what), f"{self.figure}_ms") for what in LATENCIES
        }
        devices, tokens_per_s = server.num_devices, done.output_tokens_per_s
        separate = server.pools[0] if server.prefill_servers else None
        pools: dict[str, Any] = {
            "prefill_servers": server.prefill_servers, "decode_servers": server.decode_servers,
            **({} if separate is None else {
                "prefill_tp": separate.tp, "prefill_dp": separate.dp, "prefill_ep": separate.ep,
            }),
        }  # fmt: skip
        excess = max(figures[what] / limit_ms for what, limit_ms in self.sla_ms.items())
        length = float(requests.arrival_ns[-1]) / (_SPAN * done.percentiles("latency").mean_ms * 1e6)
        if requests.concurrency:
            length = len(requests) / (2 * requests.concurrency)
        row = ServingPlanRow(
            hardware=server.hardware, devices=devices, tp=server.tp, dp=server.dp, ep=server.ep, **pools,
            **settings,
            requests=spelling, load=self.process.loads[load], is_within=excess <= 1 and length >= 1,
            ttft_ms=figures["ttft"], tpot_ms=figures["tpot"], latency_ms=figures["latency"],
            requests_per_s=len(requests) / done.makespan_ns * 1e9, output_tokens_per_s=tokens_per_s,
            output_tokens_per_s_per_device=tokens_per_s / devices,
            put_back=sum(int(run.preemptions.sum()) for run in done.runs),
            price_per_million_tokens=self.price_per_hour * devices / (tokens_per_s * 3600) * 1e6,
            basis=done.basis_text,
        )  # fmt: skip
        point = LoadPoint(
            row=row,
            excess=excess,
            length=length,
            num_requests=len(requests),
            bound_by=frozenset[str]().union(*(run.bound_by for run in done.runs)),
            peak_tokens=max(run.peak_pages for run in done.runs) * policy.page_tokens,
            caches=caches,
        )
        known.append(point)
        return point
