"""List scheduler: schedules one rank at a time on its streams, without a network and without other ranks.

Communication takes its estimated time (latency and bandwidth, :mod:`hespas.estimators.rates`). Ranks of one
class do the same at the same time, so each class is scheduled once. Ranks of different classes do not wait
for each other; use :class:`hespas.simulator.job.JobScheduler` to model that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hespas.graph import Diagnostics, Workload
from hespas.graph.hints import PositiveInt, check_fields
from hespas.simulator.interference import Pressure
from hespas.simulator.loop_extrapolation import expanded
from hespas.simulator.results import (
    RepresentedClass,
    ScheduledRank,
    Simulation,
    schedule_alone,
    simulation_of,
)
from hespas.simulator.schedule import Priority

__all__ = ["ListScheduler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListScheduler:
    """List schedule of each rank class; fields are its options.

    ``priority``: order of ready nodes (:data:`hespas.simulator.schedule.PRIORITIES`). ``max_executions``:
    limit up to which all iterations of all loops are simulated; above it the longest loops are extrapolated
    (:mod:`hespas.simulator.loop_extrapolation`). ``overlap_trips``: an iteration begins as soon as its inputs
    are ready, as with compiler loop pipelining, and not after the previous iteration. ``interference``:
    communication and kernels that overlap slow each other down, if their times are estimated
    (:mod:`hespas.simulator.interference`). ``launches``: kernels wait for a host that launches them one by
    one, if the configuration has host launches (:mod:`hespas.simulator.launches`).
    """

    priority: Priority = "program"
    max_executions: PositiveInt = 1_000_000
    overlap_trips: bool = False
    interference: bool = True
    launches: bool = True

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        check_fields(self)

    @property
    def name(self) -> str:
        """Return ``list-schedule``."""
        return "list-schedule"

    def run(
        self, workload: Workload, diagnostics: Diagnostics, pressures: Sequence[Pressure] | None = None
    ) -> Simulation:
        """Simulate the step of one rank of each rank class, as described in the module. ``pressures`` are the
        contention factors of the rank classes. O(executions log executions) per class.
        """
        counts = workload.class_sizes
        used = [index for index, count in enumerate(counts) if count]
        if len(used) > 1:
            diagnostics.info(
                "simulate.ranks-alone",
                workload.name,
                f"the {len(used):,} rank classes are scheduled independently: no rank waits for other ranks",
            )
        of = pressures if pressures is not None and self.interference else [None] * len(counts)
        parts = [self.scheduled(workload, index, counts[index], of[index], diagnostics) for index in used]
        part_of = np.full(len(workload.classes) + 1, -1, np.int64)  # the last entry is for absent ranks
        part_of[used] = np.arange(len(used))
        return simulation_of(self.name, workload, parts, workload.by_rank(part_of))

    def scheduled(
        self,
        workload: Workload,
        index: int,
        ranks: int,
        pressure: Pressure | None,
        diagnostics: Diagnostics,
    ) -> ScheduledRank:
        """Return the schedule of a rank class with ``ranks`` ranks, without waits for other ranks."""
        graph = workload.classes[index]
        program = expanded(
            graph,
            self.max_executions,
            self.priority,
            diagnostics,
            overlap_trips=self.overlap_trips,
            pressure=pressure,
        )
        rank = int(np.argmax(workload.rank_class == index))
        return schedule_alone(graph, program, self.priority, RepresentedClass(index, rank, ranks))
