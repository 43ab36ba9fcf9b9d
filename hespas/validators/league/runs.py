"""A published run as timed passes: its settings from its row, its system as stated or by its accelerator,
times of kernels by an estimator and of communication by the network of the system.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.estimators import as_run_on
from hespas.estimators.configuration import host_issue_ns, training_estimator
from hespas.estimators.registry import Estimator
from hespas.generators.llm.layout import check_layout, layers_of_stages, micro_batches
from hespas.generators.llm.published import PublishedRun
from hespas.generators.llm.stage import StagePasses, stage_passes
from hespas.graph import Diagnostics, Estimate, NodeKind, Workload
from hespas.graph.columns import FloatArray
from hespas.hardware import Device, System
from hespas.simulator.network import Network, on_system
from hespas.validators.league.parts import StageNodes, stage_nodes
from hespas.validators.league.pipeline import Schedule
from hespas.validators.league.places import system_of

__all__ = ["TimedRun", "timed_run"]


@dataclass(frozen=True, slots=True)
class TimedRun:
    """The passes of the distinct stages of a run with their times, and the schedule that joins them."""

    stages: tuple[StageNodes, ...]
    schedule: Schedule
    unknown: int
    """Nodes without a time, which count as none."""


def timed_run(
    run: PublishedRun, device: Device, estimator: str, diagnostics: Diagnostics, system: System | None = None
) -> TimedRun:
    """The passes of a run with what an estimator and the network of a system say of them; None is the system
    that the device usually stands in. Raises ``UsageError`` for layouts that break a rule.
    """
    check_layout(run.model, run.layout, run.training)
    network = Network(system_of(run, system, device), device)
    like, first = _distinct(run)
    passes = [stage_passes(run.model, run.layout, run.training, stage) for stage in first]
    facts = run.facts(device)
    model = training_estimator(facts, device, estimator, run.layout.ranks)
    times = _times(_Clock(run, device, model, network, diagnostics), passes, like)
    stages: list[StageNodes] = []
    unknown = 0
    for each, time_ns in zip(passes, times, strict=True):
        silent = np.isnan(time_ns)
        unknown += int(silent.sum())
        arrives = each.graph.kind == int(NodeKind.RECV)
        settled = np.where(silent | arrives, 0.0, time_ns)
        stages.append(
            stage_nodes(
                each.graph,
                each.parts,
                each.variants,
                each.end,
                settled.tolist(),
                synchronizes=facts.reads_counts and host_issue_ns(facts, device) > 0,
            )
        )
    schedule = Schedule(
        run.training.schedule,
        run.layout,
        micro_batches(run.layout, run.training),
        like,
        run.training.overlap.pipeline,
    )
    return TimedRun(tuple(stages), schedule, unknown)


def _distinct(run: PublishedRun) -> tuple[list[int], list[int]]:
    """Of each stage which of the distinct ones it is like, and the first stage of each of those."""
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


@dataclass(frozen=True, slots=True)
class _Clock:
    """Who says what nodes of a run take."""

    run: PublishedRun
    device: Device
    model: Estimator
    network: Network
    diagnostics: Diagnostics


def _times(clock: _Clock, passes: list[StagePasses], like: list[int]) -> list[FloatArray]:
    """The time of each node of each distinct stage [ns], NaN where nobody knows: of ranks that differ in
    where their groups lie, the longest.
    """
    run, device, diagnostics = clock.run, clock.device, clock.diagnostics
    graphs = tuple(each.graph for each in passes)
    ranks = np.repeat(np.array(like, np.int32), run.layout.ranks // run.layout.pp)
    job = Workload(name=run.model.name, classes=graphs, rank_class=ranks, metadata={})
    own = [as_run_on(graph, device, diagnostics) for graph in graphs]
    estimates: list[Estimate] = [clock.model.estimate(graph, device, diagnostics) for graph in own]
    parted, placed = on_system(job, estimates, clock.network, diagnostics)
    longest = [np.full(len(graph), np.nan) for graph in graphs]
    for number, estimate in enumerate(placed or ()):
        members = np.flatnonzero(parted.rank_class == number)
        if len(members):
            whose = int(ranks[members[0]])
            longest[whose] = np.fmax(longest[whose], estimate.duration_ns)
    return longest
