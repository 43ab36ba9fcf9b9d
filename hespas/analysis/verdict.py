"""The answer in a line: how long a step or the recording took, how busy the device was, and with what."""

from __future__ import annotations

from math import isnan

import numpy as np

from hespas.analysis.breakdown import ALL_STEPS
from hespas.analysis.difference import Difference
from hespas.analysis.idle import WHOLE_DEVICE
from hespas.analysis.run import Analyses
from hespas.converters.measured_ops import recording_text

__all__ = ["changed_text", "share_text", "step_ns_of", "time_text", "verdict_of"]

_HALF = 0.5
_MUCH = 0.1
"""Share of the device time of kernels of unknown class from which communication is a lower bound."""
_UNITS = ("ns", "us", "ms", "s")
_PARTS = {
    "compute_ns": "compute",
    "exposed_communication_ns": "exposed communication",
    "exposed_memory_ns": "copies",
    "idle_ns": "idle",
}


def time_text(duration_ns: float) -> str:
    """A duration with three digits behind the point and the unit that suits it."""
    if isnan(duration_ns):
        return "unknown"
    unit = 0
    while abs(duration_ns) >= 1000 and unit < len(_UNITS) - 1:
        duration_ns /= 1000
        unit += 1
    return f"{duration_ns:,.3f} {_UNITS[unit]}"


def share_text(share: float) -> str:
    """A part of a whole in per cent."""
    return "unknown" if isnan(share) else f"{share:.1%}"


def step_ns_of(found: Analyses) -> float:
    """Return the length of the median step; of the longest rank's span where no steps were recorded."""
    table = found.breakdown
    steps = table["step"] != ALL_STEPS
    spans = table["span_ns"]
    return float(np.median(spans[steps])) if steps.any() else float(spans.max(initial=-np.inf))


def verdict_of(found: Analyses) -> str:
    """Of a job of several ranks the slowest counts for the time, and the mean of all for the shares."""
    table = found.breakdown
    whole = table.take(np.flatnonzero(table["step"] == ALL_STEPS))
    if not len(whole):
        return "no device event was recorded"
    steps = table.take(np.flatnonzero(table["step"] != ALL_STEPS))
    span = float(whole["span_ns"].max())
    told = f"span {time_text(span)} from the first device event to the last"
    if len(steps):
        count = len(np.unique(steps["step"]))
        typical = step_ns_of(found)
        period = "" if isnan(found.period_ns) else time_text(found.period_ns)
        told = f"{time_text(typical)} per step ({recording_text(count, period)}, span {time_text(span)})"
    if len(whole) > 1:
        told += f" on {len(whole)} ranks"
    total = float(whole["span_ns"].sum()) or np.nan
    parts = {name: float(whole[name].sum()) / total for name in _PARTS}
    if found.unclassified >= _MUCH:
        words = {**_PARTS, "exposed_communication_ns": "exposed communication at least"}
        vague = f"; {share_text(found.unclassified)} of the device time is of kernels of unknown class"
    else:
        words, vague = _PARTS, ""
    listed = ", ".join(f"{word} {share_text(parts[name])}" for name, word in words.items())
    busy = float(whole["busy_ns"].sum()) / total
    return f"{told}: busy {share_text(busy)} ({listed}{_mostly(found)}{vague})"


def _mostly(found: Analyses) -> str:
    """What most of the idle time waited for, where one cause has half of it."""
    table = found.idle.take(found.idle["stream"] == WHOLE_DEVICE)
    total = float(table["total_ns"].sum())
    for cause in dict.fromkeys(table["cause"].tolist()):
        share = float(table["total_ns"][table["cause"] == cause].sum()) / total if total else 0.0
        if share >= _HALF:
            return f", {share_text(share)} of it {cause}"
    return ""


def changed_text(changed: Difference) -> str:
    """How much longer or shorter than before, and which part of the time says most of that."""
    rows = {row.part: row for row in changed.parts.rows()}
    whole = rows.pop("span")
    if not whole.delta_ns:
        return "as long as before"
    longer = whole.delta_ns > 0
    share = abs(whole.delta_ns) / whole.before_ns if whole.before_ns else np.nan
    most = max(rows.values(), key=lambda row: row.delta_ns if longer else -row.delta_ns)
    return (
        f"{time_text(abs(whole.delta_ns))} ({share_text(share)}) {'longer' if longer else 'shorter'} than "
        f"before, {most.part} {'+' if most.delta_ns > 0 else '-'}{time_text(abs(most.delta_ns))}"
    )
