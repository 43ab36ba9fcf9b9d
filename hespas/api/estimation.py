"""Durations for a workload, and the sums people ask of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isnan

import numpy as np

from hespas.api.preparation import DEFAULT_ESTIMATOR, Granularity, granularity_of, merged
from hespas.estimators import as_run_on, load_estimator
from hespas.estimators.rates import StepEnergy, step_energy
from hespas.estimators.registry import for_job, with_option
from hespas.graph import Diagnostics, Estimate, OpClass, OpGraph, Profile, Workload
from hespas.graph.columns import BoolArray, FloatArray
from hespas.graph.errors import UsageError
from hespas.graph.passes import GroupRegions, known_sum, with_durations
from hespas.hardware import load_device

__all__ = [
    "ClassTotals",
    "NodeEstimates",
    "SaidBy",
    "class_totals",
    "estimate",
    "total_duration_ns",
]


@dataclass(frozen=True, slots=True)
class NodeEstimates:
    """The estimate of each rank class of a workload, in order of the classes, and the energy of a step.

    ``workload`` is what was estimated: its operations merged as ``granularity`` says (None: as they stood).
    """

    workload: Workload
    estimates: tuple[Estimate, ...]
    energies: tuple[StepEnergy, ...]
    granularity: Granularity | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidBy:
    """What one estimator said of one operation class: nodes that take time, and their sum over a step."""

    estimator: str
    nodes: int
    duration_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTotals:
    """One operation class of one rank: sums over a step. ``unknown`` counts nodes without a duration,
    ``said_by`` shares the others out among the estimators.
    """

    op_class: str
    nodes: float
    flops: float
    bytes_moved: float
    duration_ns: float
    unknown: int
    said_by: tuple[SaidBy, ...] = ()


def estimate(
    workload: Workload | Profile,
    hardware: str,
    *,
    estimator: str = DEFAULT_ESTIMATOR,
    granularity: Granularity | None = None,
    diagnostics: Diagnostics | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> NodeEstimates:
    """What ``estimator`` says of each node of each rank class on ``hardware`` (a name or a TOML file).

    ``granularity`` says which operations are one (by default an unoptimised program is fused first). Raises
    ``UsageError`` for an unknown name, and for a profile, which holds measurements and no program.
    """
    if isinstance(workload, Profile):
        raise UsageError("a profile holds measured times; there is no program in it to estimate")
    device, model = load_device(hardware), for_job(load_estimator(estimator), workload.num_ranks)
    model = with_option(model, "progress", None, progress)
    found = diagnostics if diagnostics is not None else Diagnostics()
    chosen = granularity_of(workload, granularity)
    workload = merged(workload, chosen, found)
    estimates: list[Estimate] = []
    for done, graph in enumerate(workload.classes):
        if progress:
            progress(done, len(workload.classes))
        estimates.append(model.estimate(as_run_on(graph, device, found), device, found))
    if chosen == "region":
        workload, estimates = _grouped(workload, estimates, model.name)
    energies = [
        step_energy(graph, device, total_duration_ns(class_totals(graph, each)))
        for graph, each in zip(workload.classes, estimates, strict=True)
    ]
    return NodeEstimates(workload, tuple(estimates), tuple(energies), chosen)


def _grouped(workload: Workload, estimates: Sequence[Estimate], name: str) -> tuple[Workload, list[Estimate]]:
    """One node per region between collectives, which takes as long as its operations together. Those without
    an interval err as the others do; a region most of whose time has none has none.
    """
    group = GroupRegions()
    sums: list[Estimate] = []
    for graph, said in zip(workload.classes, estimates, strict=True):
        bounded = ~(np.isnan(said.low_ns) | np.isnan(said.high_ns))
        widths = (said.duration_ns, said.duration_ns - said.low_ns, said.high_ns - said.duration_ns)
        columns = (said.duration_ns, *(np.where(bounded, width, 0.0) for width in widths))
        parts = (group(with_durations(graph, column), Diagnostics()) for column in columns)
        duration, known, below, above = (part.duration_ns for part in parts)
        with np.errstate(invalid="ignore", divide="ignore"):
            share = np.where(known > duration / 2, duration / known, np.nan)
        nobody = np.full(len(duration), -1, np.int8)
        sums.append(
            replace(
                said,
                estimators=(name,),
                bounds=(),
                duration_ns=duration,
                low_ns=np.maximum(duration - below * share, 0.0),
                high_ns=duration + above * share,
                said_by=np.where(np.isnan(duration), nobody, np.int8(0)).astype(np.int8),
                bound=nobody,
            )
        )
    return replace(workload, classes=tuple(group(graph, Diagnostics()) for graph in workload.classes)), sums


def total_duration_ns(rows: Sequence[ClassTotals]) -> float:
    """The work of one rank and step: what is known, NaN where nothing is."""
    return known_sum(np.array([row.duration_ns for row in rows], np.float64))


def _longest_first(row: ClassTotals) -> float:
    return inf if isnan(row.duration_ns) else -row.duration_ns


@np.errstate(over="ignore", invalid="ignore")  # sums past what a float holds are infinite
def class_totals(graph: OpGraph, estimated: Estimate | None = None) -> tuple[ClassTotals, ...]:
    """Sums per operation class of one step, longest first; durations of the graph where none is given.

    Raises ``UsageError`` for an estimate of another graph.
    """
    if estimated is not None and len(estimated) != len(graph):
        raise UsageError(
            f"an estimate of {len(estimated)} nodes is not one of a graph of {len(graph)}",
            hint="the graphs that were estimated are in the estimates' own workload",
        )
    durations = graph.duration_ns if estimated is None else estimated.duration_ns
    runs = graph.multiplicity
    rows: list[ClassTotals] = []
    for code in np.unique(graph.op_class).tolist():
        of_class: BoolArray = (graph.op_class == code) & (runs != 0)
        times = runs[of_class]
        rows.append(
            ClassTotals(
                op_class=OpClass(code).name.lower(),
                nodes=float(np.nansum(times)),
                flops=known_sum(graph.flops[of_class] * times),
                bytes_moved=known_sum(graph.bytes_moved[of_class] * times),
                duration_ns=known_sum(durations[of_class] * times),
                unknown=int((np.isnan(durations[of_class]) | np.isnan(times)).sum()),
                said_by=() if estimated is None else tuple(_said_by(estimated, of_class, runs)),
            )
        )
    return tuple(sorted((row for row in rows if row.nodes or row.unknown), key=_longest_first))


def _said_by(estimated: Estimate, nodes: BoolArray, runs: FloatArray) -> Iterator[SaidBy]:
    """Each estimator's part of some nodes, in the order they are asked; what takes no time is nobody's."""
    durations = estimated.duration_ns * runs
    counted = nodes & (durations > 0)
    for number, name in enumerate(estimated.estimators):
        mine = counted & (estimated.said_by == number)
        if mine.any():
            yield SaidBy(estimator=name, nodes=int(mine.sum()), duration_ns=float(durations[mine].sum()))
