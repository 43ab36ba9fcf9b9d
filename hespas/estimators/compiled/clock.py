"""How long one turn of a loop takes: medians of differences between a long loop and a short one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter_ns
from typing import NamedTuple

from hespas.estimators.compiled.messages import Timing

__all__ = ["Slope", "clock_mhz", "slope_of", "timing_of"]

_SAMPLE_NS = 10e6
_MOST_TURNS = 1 << 20
_TICK_NS = 1.0


class Slope(NamedTuple):
    """Nanoseconds of one turn, sample by sample, and how many turns a sample had."""

    samples_ns: list[float]
    turns: int


def slope_of(run: Callable[[int], object], repeats: int) -> Slope:
    """Time ``run(turns)``, which returns when done; the first runs warm up."""
    run(1)
    turns = 2
    while (spent_ns := _spent_ns(run, turns)) < _SAMPLE_NS / 2 and turns < _MOST_TURNS:
        turns = min(turns * max(2, min(16, int(_SAMPLE_NS / max(spent_ns, 1.0)))), _MOST_TURNS)
    samples = [(_spent_ns(run, turns) - _spent_ns(run, 1)) / (turns - 1) for _ in range(repeats)]
    return Slope(samples, turns)


def _spent_ns(run: Callable[[int], object], turns: int) -> float:
    start = perf_counter_ns()
    run(turns)
    return float(perf_counter_ns() - start)


def timing_of(work: Slope, empty: Slope) -> Timing:
    """One turn's work without the loop around it: median, and the 5th and 95th percentile of samples."""
    loop_ns = max(median(empty.samples_ns), 0.0)
    samples = [sample - loop_ns for sample in work.samples_ns]
    low, high = (
        (quantiles(samples, n=20)[place] for place in (0, -1)) if len(samples) > 1 else (samples[0],) * 2
    )
    # What the clock cannot tell from nothing still took a tick.
    duration = max(median(samples), _TICK_NS)
    return Timing(
        duration_ns=duration,
        low_ns=min(max(low, 0.0), duration),
        high_ns=max(high, duration),
        turns=work.turns,
        samples=len(samples),
        clock_mhz=clock_mhz(),
        when=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def clock_mhz() -> float:
    """The mean frequency of the processors that Linux tells of, 0 where nobody does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        told = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    except (OSError, ValueError):
        return 0.0
    return sum(told) / len(told) if told else 0.0
