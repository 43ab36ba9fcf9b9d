"""What is wrong with the measurements themselves: reported beside the errors, never hidden in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hespas.files.documents import Count, Figure
from hespas.graph import Profile
from hespas.graph.columns import BoolArray, FloatArray
from hespas.hardware import Device
from hespas.validators.accuracy.cases import LEAST_NS, Cases
from hespas.validators.accuracy.statistics import slope_of

__all__ = ["LintFinding", "lint_cases", "lint_profile"]

_BELOW_ROOFLINE = 0.97
"""A measurement this far below the roofline of the published peaks is not explained by rounding."""

_DRIFT_NS_PER_S = 1_000.0
"""Clocks of two ranks that part by more than 1 us a second (1 ppm)."""

_DRIFT_SIGMAS = 4.0
"""Standard errors that a drift must be away from none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LintFinding:
    """``share`` is the share of the source's device time concerned (NaN where time says nothing)."""

    code: str
    source: str
    count: Count
    share: Figure
    message: str


def lint_profile(profile: Profile) -> list[LintFinding]:
    """Findings of one profile by itself. O(events log events)."""
    duration = profile.duration_ns
    total = float(duration[duration > 0].sum())
    found: list[LintFinding] = []

    def add(code: str, chosen: BoolArray, message: str, share: float | None = None) -> None:
        count = int(np.count_nonzero(chosen))
        if count:
            if share is None:
                share = float(duration[chosen & (duration > 0)].sum()) / total if total else np.nan
            found.append(
                LintFinding(code=code, source=profile.name, count=count, share=share, message=message)
            )

    message = "events end before they start; they are left out, and what they took is not known"
    add("negative-duration", duration < 0, message, np.nan)
    add(
        "zero-duration",
        (duration >= 0) & (duration < LEAST_NS),
        "events of 0 ns: the clock is coarse, and their error is undefined",
    )
    add("overlap", _overlapping(profile), "events begin before the one before them on the same stream ends")
    # Where no event has a host operation, the recording has no launches: that says nothing of any event.
    unlinked = (profile.host_event < 0) & bool((profile.host_event >= 0).any())
    add("unlinked", unlinked, "no host operation: launched before the window, or replayed")
    if total and bool((duration % 1000 == 0).all()):
        add("clock-resolution", np.ones(len(profile), np.bool_), "all times are whole microseconds")
    add("truncated", _cut_off(profile), "the first or last run has fewer events than the others: it was cut")
    found.extend(_clock_drift(profile))
    return found


def _overlapping(profile: Profile) -> BoolArray:
    """Events that begin over 1 ns before all before them on their device's stream have ended."""
    late = np.zeros(len(profile), np.bool_)
    columns = (profile.stream, profile.device_index, profile.rank)
    order = np.lexsort((profile.start_ns, *columns))
    changes = np.zeros(max(len(order) - 1, 0), np.bool_)
    for column in columns:
        changes |= column[order][1:] != column[order][:-1]
    for rows in np.split(order, np.flatnonzero(changes) + 1):
        start = profile.start_ns[rows]
        reached = np.maximum.accumulate(start + profile.duration_ns[rows])
        late[rows[1:][start[1:] < reached[:-1] - 1.0]] = True
    return late


def _cut_off(profile: Profile) -> BoolArray:
    """Events of the first or last run of a module on a rank, where most of its runs have more events."""
    cut = np.zeros(len(profile), np.bool_)
    inside = np.flatnonzero(profile.run >= 0)
    ran = profile.rank[inside].astype(np.int64) << 32 | profile.module_row[inside]
    place = np.unique(ran, return_inverse=True)[1].astype(np.int64) << 32 | profile.run[inside]
    runs, run_of, counts = np.unique(place, return_inverse=True, return_counts=True)
    short = np.zeros(len(runs), np.bool_)
    bounds = np.flatnonzero(np.diff(runs >> 32)) + 1
    for rows in np.split(np.arange(len(runs)), bounds):
        usual = np.median(counts[rows]) if len(rows) > 2 else counts[rows].max(initial=0)
        edges = rows[[0, -1]] if len(rows) else rows
        short[edges] = counts[edges] < usual
    cut[inside[short[run_of]]] = True
    return cut


def _slope_and_error(x: FloatArray, y: FloatArray) -> tuple[float, float]:
    """The slope of y over x and its standard error; infinite error where it says nothing."""
    slope = slope_of(x, y)
    if np.isnan(slope):
        return 0.0, np.inf
    away, left = x - x.mean(), y - y.mean()
    left = left - slope * away
    return slope, float(np.sqrt((left * left).sum() / (len(x) - 2) / (away * away).sum()))


def _clock_drift(profile: Profile) -> Iterator[LintFinding]:
    """Ranks whose clocks part: all leave a collective together, so the ends of one should not spread more and
    more. What they spread by chance does not count.
    """
    comms = profile.comms
    known = np.flatnonzero((comms.sequence >= 0) & (comms.group_row > 0))
    event = comms.event[known]
    ends = (profile.start_ns + profile.duration_ns)[event]
    instance = comms.group_row[known].astype(np.int64) << 40 | comms.sequence[known] & ((1 << 40) - 1)
    for rank in np.unique(profile.rank[event]).tolist()[1:]:
        base = profile.rank[event] == int(profile.rank[event].min())
        other = profile.rank[event] == rank
        _, one, two = np.intersect1d(instance[base], instance[other], return_indices=True)
        if len(one) < 3:
            continue
        when, apart = ends[base][one], ends[other][two] - ends[base][one]
        slope, doubt = (figure * 1e9 for figure in _slope_and_error(when, apart))
        if abs(slope) > max(_DRIFT_NS_PER_S, _DRIFT_SIGMAS * doubt):
            yield LintFinding(
                code="clock-drift",
                source=profile.name,
                count=len(one),
                share=np.nan,
                message=f"the clock of rank {rank} gains {slope:,.0f} ns a second on the first rank's",
            )


def lint_cases(cases: Cases, naive_ns: FloatArray, times: FloatArray, device: Device) -> list[LintFinding]:
    """Cases faster than the device can be, where its caches do not explain that: a byte or a FLOP is counted
    too often, or the measurement is broken. ``naive_ns`` is the roofline of one execution, of which each case
    has ``times``.
    """
    cache = max((each.capacity_bytes for each in device.memories if each.level == "cache"), default=0)
    fast = (cases.measured_ns > 0) & (cases.measured_ns < _BELOW_ROOFLINE * naive_ns * times)
    beyond = fast & (cases.bytes_moved > cache * times)
    total = float(cases.measured_ns.sum())
    rows = (
        ("physically-impossible", beyond, "faster than the roofline with a working set beyond the cache"),
        ("cached", fast & ~beyond, "faster than the roofline, within the cache: the data was there already"),
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
