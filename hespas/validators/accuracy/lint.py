"""What is wrong with the measurements themselves: reported beside the errors, never hidden in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hespas.graph import Profile
from hespas.graph.columns import BoolArray, FloatArray
from hespas.hardware import Device
from hespas.validators.accuracy.cases import Cases
from hespas.validators.accuracy.fitting import slope_of

__all__ = ["LintFinding", "lint_cases", "lint_profile"]

_BELOW_ROOFLINE = 0.97
"""A measurement this far below the roofline of the published peaks is not explained by rounding."""

_DRIFT_NS_PER_S = 1_000.0
"""Clocks of two ranks that part by more than 1 us a second (1 ppm)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LintFinding:
    """``share`` is the share of the source's device time concerned (NaN where time says nothing)."""

    code: str
    source: str
    count: int
    share: float
    message: str


def lint_profile(profile: Profile) -> list[LintFinding]:
    """Findings of one profile by itself. O(events log events)."""
    duration = profile.duration_ns
    total = float(duration[duration > 0].sum())
    found: list[LintFinding] = []

    def add(code: str, chosen: BoolArray, message: str) -> None:
        count = int(np.count_nonzero(chosen))
        if count:
            share = float(duration[chosen].sum()) / total if total else np.nan
            found.append(
                LintFinding(code=code, source=profile.name, count=count, share=share, message=message)
            )

    add("negative-duration", duration < 0, "events end before they start")
    add("zero-duration", duration == 0, "events of 0 ns: the clock is coarse, and their error is undefined")
    add("overlap", _overlapping(profile), "events begin before the one before them on the same stream ends")
    unlinked = (profile.host_event < 0) & (len(profile.host) > 0)
    add(
        "unlinked",
        unlinked,
        "no host operation: launched before the window, or replayed",
    )
    if len(profile) and bool((duration % 1000 == 0).all()):
        whole = np.ones(len(profile), np.bool_)
        add(
            "clock-resolution",
            whole,
            "all times are whole microseconds",
        )
    found.extend(_clock_drift(profile))
    return found


def _overlapping(profile: Profile) -> BoolArray:
    """Events that begin over 1 ns before the one before them on their rank and stream has ended."""
    order = np.lexsort((profile.start_ns, profile.stream, profile.rank))
    start, end = profile.start_ns[order], (profile.start_ns + profile.duration_ns)[order]
    same = (profile.rank[order][1:] == profile.rank[order][:-1]) & (
        profile.stream[order][1:] == profile.stream[order][:-1]
    )
    late = np.zeros(len(profile), np.bool_)
    late[order[1:][same & (start[1:] < end[:-1] - 1.0)]] = True
    return late


def _clock_drift(profile: Profile) -> Iterator[LintFinding]:
    """Ranks whose clocks part: all leave a collective together, so the ends of one should not spread more and
    more.
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
        slope = slope_of(when, apart) * 1e9
        if abs(slope) > _DRIFT_NS_PER_S:
            yield LintFinding(
                code="clock-drift",
                source=profile.name,
                count=len(one),
                share=np.nan,
                message=f"the clock of rank {rank} gains {slope:,.0f} ns a second on the first rank's",
            )


def lint_cases(cases: Cases, naive_ns: FloatArray, device: Device) -> list[LintFinding]:
    """Cases faster than the device can be, where its caches do not explain that: a byte or a FLOP is counted
    too often, or the measurement is broken.
    """
    cache = max((each.capacity_bytes for each in device.memories if each.level == "cache"), default=0)
    fast = (cases.measured_ns > 0) & (cases.measured_ns < _BELOW_ROOFLINE * naive_ns)
    beyond = fast & (cases.bytes_moved > cache)
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
