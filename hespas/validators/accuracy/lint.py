"""Checks of the quality of measurements, whose findings are reported next to the errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hespas.files.documents import Count, Figure
from hespas.fitting.statistics import slope_of
from hespas.graph import Profile
from hespas.graph.columns import BoolArray, FloatArray
from hespas.hardware import Device
from hespas.validators.accuracy.cases import LEAST_NS, Cases

__all__ = ["LintFinding", "lint_cases", "lint_profile"]

_BELOW_ROOFLINE = 0.97
"""Largest ratio of a measurement to the published roofline that rounding does not explain."""

_DRIFT_NS_PER_S = 1_000.0
"""Least drift between the clocks of two ranks that is reported: 1 us per second (1 ppm)."""

_DRIFT_SIGMAS = 4.0
"""Least drift in standard errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LintFinding:
    """Finding about the quality of measurements, such as a coarse clock. ``share`` is the affected share of
    the device time (NaN: not applicable).
    """

    code: str
    source: str
    count: Count
    share: Figure
    message: str


def lint_profile(profile: Profile) -> list[LintFinding]:
    """Return the findings of one profile. O(events log events)."""
    duration = profile.duration_ns
    total = float(duration[duration > 0].sum())
    findings: list[LintFinding] = []

    def add(code: str, chosen: BoolArray, message: str, share: float | None = None) -> None:
        count = int(np.count_nonzero(chosen))
        if count:
            if share is None:
                share = float(duration[chosen & (duration > 0)].sum()) / total if total else np.nan
            findings.append(
                LintFinding(code=code, source=profile.name, count=count, share=share, message=message)
            )

    message = "events end before they start: they are excluded, and their duration is unknown"
    add("negative-duration", duration < 0, message, np.nan)
    add(
        "zero-duration",
        (duration >= 0) & (duration < LEAST_NS),
        "events of 0 ns: the clock is coarse, and the error is undefined",
    )
    late = np.zeros(len(profile), np.bool_)  # begins over 1 ns before all earlier events of the stream end
    columns = (profile.stream, profile.device_index, profile.rank)
    order = np.lexsort((profile.start_ns, *columns))
    changes = np.zeros(max(len(order) - 1, 0), np.bool_)
    for column in columns:
        changes |= column[order][1:] != column[order][:-1]
    for rows in np.split(order, np.flatnonzero(changes) + 1):
        start = profile.start_ns[rows]
        reached = np.maximum.accumulate(start + profile.duration_ns[rows])
        late[rows[1:][start[1:] < reached[:-1] - 1.0]] = True
    add("overlap", late, "events begin before the previous event on the same stream ends")
    # If no event has a host operation, the recording contains no launches.
    unlinked = (profile.host_event < 0) & bool((profile.host_event >= 0).any())
    add("unlinked", unlinked, "no host operation: launched before the window, or replayed")
    if total and bool((duration % 1000 == 0).all()):
        add("clock-resolution", np.ones(len(profile), np.bool_), "all times are whole microseconds")
    # Most runs of a module have the same events; a first or last run with fewer was cut by the recording.
    cut = np.zeros(len(profile), np.bool_)
    inside = np.flatnonzero(profile.run >= 0)
    ran = profile.rank[inside].astype(np.int64) << 32 | profile.module_id[inside]
    module_run = np.unique(ran, return_inverse=True)[1].astype(np.int64) << 32 | profile.run[inside]
    runs, run_of, counts = np.unique(module_run, return_inverse=True, return_counts=True)
    short = np.zeros(len(runs), np.bool_)
    bounds = np.flatnonzero(np.diff(runs >> 32)) + 1
    for rows in np.split(np.arange(len(runs)), bounds):
        usual = np.median(counts[rows]) if len(rows) > 2 else counts[rows].max(initial=0)
        edges = rows[[0, -1]] if len(rows) else rows
        short[edges] = counts[edges] < usual
    cut[inside[short[run_of]]] = True
    add("truncated", cut, "the first or last run has fewer events than the others: it was cut")
    findings.extend(_clock_drift(profile))
    return findings


def _clock_drift(profile: Profile) -> Iterator[LintFinding]:
    """Yield a finding for each rank whose clock drifts from the clock of the first rank.

    All ranks leave a collective at the same time, so the difference between their recorded ends must stay
    constant up to noise.
    """
    comms = profile.comms
    usable = np.flatnonzero((comms.sequence >= 0) & (comms.group_id > 0))
    event = comms.event[usable]
    ends = (profile.start_ns + profile.duration_ns)[event]
    instance = comms.group_id[usable].astype(np.int64) << 40 | comms.sequence[usable] & ((1 << 40) - 1)
    for rank in np.unique(profile.rank[event]).tolist()[1:]:
        lowest = int(profile.rank[event].min())
        base = profile.rank[event] == lowest
        other = profile.rank[event] == rank
        _, first, second = np.intersect1d(instance[base], instance[other], return_indices=True)
        if len(first) < 3:
            continue
        time, difference = ends[base][first], ends[other][second] - ends[base][first]
        slope = slope_of(time, difference)
        if np.isnan(slope):
            continue
        time, residual = time - time.mean(), difference - difference.mean()
        residual = residual - slope * time
        error = float(np.sqrt((residual * residual).sum() / (len(time) - 2) / (time * time).sum()))
        drift_ns_per_s = slope * 1e9
        if abs(drift_ns_per_s) > max(_DRIFT_NS_PER_S, _DRIFT_SIGMAS * error * 1e9):
            yield LintFinding(
                code="clock-drift",
                source=profile.name,
                count=len(first),
                share=np.nan,
                message=f"the clock of rank {rank} gains {drift_ns_per_s:,.0f} ns per second on {lowest}",
            )


def lint_cases(cases: Cases, naive_ns: FloatArray, times: FloatArray, device: Device) -> list[LintFinding]:
    """Return findings about cases whose measured time is shorter than the device allows.

    The cause may be caches, a count of bytes or FLOPs that is too high, or a wrong measurement. ``naive_ns``
    is the data-sheet roofline of one execution; each case has ``times`` executions.
    """
    cache = max((memory.capacity_bytes for memory in device.memories if memory.level == "cache"), default=0)
    fast = (cases.measured_ns > 0) & (cases.measured_ns < _BELOW_ROOFLINE * naive_ns * times)
    beyond = fast & (cases.bytes_moved > cache * times)
    total = float(cases.measured_ns.sum())
    rows = (
        ("physically-impossible", beyond, "faster than the roofline, with a working set beyond the cache"),
        ("cached", fast & ~beyond, "faster than the roofline, within the cache: the data was in the cache"),
    )
    return [
        LintFinding(
            code=code,
            source=cases.source,
            count=int(chosen.sum()),
            share=float(cases.measured_ns[chosen].sum()) / total if total else np.nan,
            message=message,
        )
        for code, chosen, message in rows
        if chosen.any()
    ]
