"""The time of a loop with many trips, from schedules of a few: trips of a loop become periodic.

Let T(k) be the time of a list schedule of k trips, alone on idle streams. Trips are equal and wait for each
other and for streams, so after a while T grows by the same amount every c trips, for a small c. T is measured
for some k until it grows twice by the same amount, and goes on growing by that: exact from where it is
periodic on. No stream can do more than one thing at a time, which bounds the growth from below.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hespas.graph import Diagnostics, OpGraph
from hespas.graph.columns import FloatArray
from hespas.simulator.columns import flatten, with_trips
from hespas.simulator.measures import Block, busy_ns, critical_ns, exposed_ns
from hespas.simulator.schedule import Priority, list_schedule

__all__ = ["FEWEST_EXECUTIONS", "rest_of_loop"]

_MOST_TRIPS = 32
_FEWEST_TRIPS = 3
_MOST_EXECUTIONS = 300_000
"""Trips run before a period is looked for: so many, fewer where their nodes are many."""

FEWEST_EXECUTIONS = 1 + 3 * _FEWEST_TRIPS + 3
"""How often the nodes of a loop run to find a period of one trip: T(1), T(3), T(4), T(5)."""

_LONGEST_PERIOD = 6
_EQUAL = 1e-9
"""T grows equally twice where that differs by less than this share of T: these are differences of sums."""


class _Run(NamedTuple):
    """Some trips of a loop, scheduled alone: times [ns], as in :class:`hespas.simulator.measures.Block`."""

    time_ns: float
    exposed_ns: float
    busy_ns: FloatArray
    critical_ns: FloatArray


@dataclass(slots=True)
class _Trips:
    """Runs of ``region`` alone by their number of trips, made when asked for."""

    loop: OpGraph
    region: int
    blocks: tuple[Block, ...]
    priority: Priority
    runs: dict[int, _Run] = field(default_factory=dict[int, _Run])

    def run(self, trips: int) -> _Run:
        """The schedule of so many trips."""
        if trips not in self.runs:
            self.runs[trips] = self._made(trips)
        return self.runs[trips]

    def _made(self, trips: int) -> _Run:
        counts = self.loop.regions.trips.copy()
        counts[self.region] = trips
        program = flatten(with_trips(self.loop, counts), self.blocks)
        schedule = list_schedule(program.tasks, self.priority)
        return _Run(
            time_ns=schedule.finish_ns,
            exposed_ns=exposed_ns(program, schedule),
            busy_ns=busy_ns(program),
            critical_ns=critical_ns(program, schedule, schedule.critical()),
        )

    def period(self, trips: int) -> int:
        """After how many trips T grows by the same again, from ``trips`` on; 0: not seen."""
        for period in range(1, _LONGEST_PERIOD + 1):
            last = self.run(trips + 2 * period).time_ns
            middle = self.run(trips + period).time_ns
            if abs((last - middle) - (middle - self.run(trips).time_ns)) <= _EQUAL * last:
                return period
        return 0


def rest_of_loop(
    loop: OpGraph,
    region: int,
    trips: int,
    blocks: tuple[Block, ...],
    *,
    priority: Priority,
    diagnostics: Diagnostics,
) -> Block:
    """All trips but the first of ``region``. ``loop`` has only its nodes, reduced as in
    :mod:`hespas.simulator.columns`; ``blocks`` stand for loops within it.

    Tells ``diagnostics`` where no period was found: the mean growth seen is taken.
    """
    some = _Trips(loop, region, blocks, priority)
    first = some.run(1)
    size = max(float((loop.multiplicity / trips).sum()), 1.0)
    seen = max(_FEWEST_TRIPS, min(_MOST_TRIPS, int(_MOST_EXECUTIONS / size)))
    if trips <= seen + 2 * _LONGEST_PERIOD:
        whole = some.run(trips)
        return _block(region, trips, first, whole, _minus(whole, first))
    period = some.period(seen)
    if not period:
        period = 2 * _LONGEST_PERIOD
        diagnostics.warning(
            "simulate.loop-not-steady",
            loop.name,
            f"a loop of {trips:,} trips shows no period within {seen + period} trips: their mean is taken",
        )
    growth = _minus(some.run(seen + period), some.run(seen))
    start = some.run(seen + (trips - seen) % period)
    periods = (trips - seen) // period
    slowest_ns = max(growth.time_ns, period * float(first.busy_ns.max()))
    whole = _Run(
        time_ns=start.time_ns + periods * slowest_ns,
        exposed_ns=start.exposed_ns + periods * growth.exposed_ns,
        busy_ns=first.busy_ns * trips,
        critical_ns=start.critical_ns + periods * growth.critical_ns,
    )
    return _block(region, trips, first, whole, growth)


def _minus(more: _Run, less: _Run) -> _Run:
    return _Run(
        more.time_ns - less.time_ns,
        more.exposed_ns - less.exposed_ns,
        more.busy_ns - less.busy_ns,
        more.critical_ns - less.critical_ns,
    )


def _block(region: int, trips: int, first: _Run, whole: _Run, growth: _Run) -> Block:
    """What ``whole`` has more than the first trip; where the critical path spends it, ``growth`` says."""
    rest = _minus(whole, first)
    duration_ns = max(rest.time_ns, 0.0)
    spent = np.maximum(growth.critical_ns, 0.0)  # the path may move from one stream to another
    total_ns = float(spent.sum())
    return Block(
        region=region,
        trips=trips - 1,
        duration_ns=duration_ns,
        busy_ns=rest.busy_ns,
        exposed_ns=min(max(rest.exposed_ns, 0.0), duration_ns),
        critical_ns=spent * (duration_ns / total_ns if total_ns else 0.0),
    )
