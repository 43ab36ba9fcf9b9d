"""A published run as a job of the simulator: its settings from its row, its system as stated or by its
accelerator, times of kernels by an estimator and of communication by the network of the system.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hespas.estimators import as_run_on
from hespas.estimators.configuration import training_estimator
from hespas.generators.llm.layout import Layout, check_layout, layers_of_stages, micro_batches
from hespas.generators.llm.model import Model
from hespas.generators.llm.published import PublishedRun
from hespas.generators.llm.settings import Training
from hespas.generators.llm.step import StagePasses, ordered_passes, stage_passes
from hespas.graph import Diagnostics, StepFacts, Workload
from hespas.graph.columns import IntArray
from hespas.graph.passes import with_durations
from hespas.hardware import Device, System
from hespas.simulator.network import Network, on_system
from hespas.validators.league.places import system_of

__all__ = ["RunSettings", "TimedRun", "settings_of", "timed_run"]


@dataclass(frozen=True, slots=True)
class RunSettings:
    """All settings that the step of a run depends on: rows with equal ones have equal steps."""

    model: Model
    layout: Layout
    training: Training
    facts: StepFacts
    device: Device
    system: System
    estimator: str


def settings_of(
    run: PublishedRun, device: Device, estimator: str, system: System | None = None
) -> RunSettings:
    """Return the settings of a run on a device; the default system is the usual one of the device. Raises
    ``UsageError`` for layouts that break a rule.
    """
    check_layout(run.model, run.layout, run.training)
    placed = system_of(run, system, device)
    return RunSettings(run.model, run.layout, run.training, run.facts(device), device, placed, estimator)


@dataclass(frozen=True, slots=True, eq=False)
class TimedRun:
    """A run whose passes have times. ``passes`` are those of stages with equal layers on ranks with equal
    network times, and ``part`` is the row of them that each rank runs, shape ``(ranks,)``.
    """

    settings: RunSettings
    passes: Sequence[StagePasses]
    part: IntArray
    unknown: int
    """Nodes of passes without a time, which count as none."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return micro_batches(self.settings.layout, self.settings.training)

    def workload(self, count: int) -> Workload:
        """Return a step with ``count`` micro-batches, with times. O(nodes of the step + ranks)."""
        run, layout = self.settings, self.settings.layout
        stage = np.repeat(np.arange(layout.pp), layout.ranks // layout.pp)
        distinct, place = np.unique(np.stack([stage, self.part]), axis=1, return_inverse=True)
        numbers: list[tuple[int, int]] = list(zip(*distinct.tolist(), strict=True))
        return Workload(
            name=run.model.name,
            classes=tuple(
                ordered_passes(self.passes[part], layout, run.training, stage, count)
                for stage, part in numbers
            ),
            rank_class=place.reshape(-1).astype(np.int32),
            metadata=run.facts.metadata(),
        )


def timed_run(run: RunSettings, diagnostics: Diagnostics) -> TimedRun:
    """Return a run with the times that its estimator and the network of its system give its passes."""
    device, network = run.device, Network(run.system, run.device)
    like, first = _distinct(run)
    passes = [stage_passes(run.model, run.layout, run.training, stage) for stage in first]
    model = training_estimator(run.facts, device, run.estimator, run.layout.ranks)
    graphs = tuple(each.graph for each in passes)
    ranks = np.repeat(np.array(like, np.int32), run.layout.ranks // run.layout.pp)
    job = Workload(name=run.model.name, classes=graphs, rank_class=ranks, metadata={})
    own = [as_run_on(graph, device, diagnostics) for graph in graphs]
    estimates = [model.estimate(graph, device, diagnostics) for graph in own]
    parted, placed = on_system(job, estimates, network, diagnostics)
    timed: dict[int, StagePasses] = {}
    silent: dict[int, int] = {}
    for number, estimate in enumerate(placed or ()):
        members = np.flatnonzero(parted.rank_class == number)
        if len(members):
            whose = int(ranks[members[0]])
            unknown = np.isnan(estimate.duration_ns)
            silent[whose] = max(silent.get(whose, 0), int(unknown.sum()))
            times = np.where(unknown, 0.0, estimate.duration_ns)
            timed[number] = passes[whose]._replace(graph=with_durations(graphs[whose], times))
    row = np.full(max(timed, default=-1) + 1, -1, np.int64)
    row[list(timed)] = np.arange(len(timed))
    return TimedRun(run, tuple(timed.values()), row[parted.rank_class], sum(silent.values()))


def _distinct(run: RunSettings) -> tuple[list[int], list[int]]:
    """Return for each stage the number of the first stages that has the same layers, and those stages."""
    layers = run.model.all_layers
    found: dict[tuple[object, ...], int] = {}
    like: list[int] = []
    first: list[int] = []
    last = run.layout.pp - 1
    for stage, chunks in enumerate(layers_of_stages(run.model, run.layout)):
        kinds = tuple(tuple(layers[number] for number in chunk) for chunk in chunks)
        key = (kinds, stage == 0, stage == last)
        if key not in found:
            found[key] = len(found)
            first.append(stage)
        like.append(found[key])
    return like, first
