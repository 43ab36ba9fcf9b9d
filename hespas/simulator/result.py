"""What a simulation says besides its timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from typing import Protocol, runtime_checkable

from hespas.graph import Diagnostics, Timeline, Workload

__all__ = ["ClassResult", "CriticalPath", "Simulation", "Simulator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """The chain of spans that ends last; each starts at the moment the one before it ends.

    ``spans`` counts them, ``after_resource`` those that waited for a busy resource and not for a dependency.
    ``class_ns`` and ``resource_ns`` say where its time goes, by the name of the operation class or resource;
    each sums to the finish of the rank.
    """

    spans: int
    after_resource: int
    class_ns: Mapping[str, float]
    resource_ns: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassResult:
    """One rank class that some rank runs. ``rank`` is the one whose spans the timeline has.

    ``busy_ns`` is by resource. ``unknown`` counts nodes whose time nobody knows: they took none, so that
    ``finish_ns`` is a lower bound. ``kept`` counts nodes whose time is a recorded one, beside those that are
    estimated for a device. ``extrapolated`` counts the loops that were not run trip by trip.
    """

    rank_class: int
    name: str
    num_ranks: int
    rank: int
    finish_ns: float
    exposed_comm_ns: float
    busy_ns: Mapping[str, float]
    critical_path: CriticalPath
    extrapolated: int = 0
    unknown: int = 0
    kept: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The timeline of all ranks, and one summary per rank class, in order of the classes.

    ``workload`` is what ran. ``low_ns`` and ``high_ns`` bound the step with 90 % confidence, as far as the
    estimates of its operations can tell (NaN: they cannot).
    """

    simulator: str
    workload: Workload
    timeline: Timeline
    classes: tuple[ClassResult, ...]
    low_ns: float = nan
    high_ns: float = nan

    @property
    def step_ns(self) -> float:
        """When the last rank is done."""
        return self.timeline.step_ns

    @property
    def is_lower_bound(self) -> bool:
        """Whether the time of some node that runs is not known, and counts as none."""
        return any(found.unknown for found in self.classes)

    @property
    def is_mixed(self) -> bool:
        """Whether some times are recorded ones, of whatever device, beside estimated ones."""
        return any(found.kept for found in self.classes)


# What a simulator is.


@runtime_checkable
class Simulator(Protocol):
    """A model of what happens when a workload runs: a frozen dataclass whose fields are its options."""

    @property
    def name(self) -> str:
        """What reports call the model."""
        ...

    def run(self, workload: Workload, diagnostics: Diagnostics) -> Simulation:
        """Run one step of every rank from time 0; ``workload`` is not changed.

        All nodes that run have a time (finite, 0 or more, 0 for what costs nothing) and all trip counts are
        whole numbers: :func:`hespas.simulator.simulate` sees to it. Raises ``FormatError`` where dependencies
        form a cycle.
        """
        ...
