"""Estimated durations of a workload: per operation, per operation class, and as a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import inf, isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas.api.arguments import (
    Array,
    ChosenGranularity,
    ComparedEstimator,
    Dataflow,
    EstimatedOn,
    ReadingProgram,
    StepFactorChoice,
    checked,
    with_array,
)
from hespas.api.documents import BasisShare, Document, Result, basis_of, findings, put
from hespas.api.io import opened_program
from hespas.api.lowering import STEP_ESTIMATOR, Granularity, granularity_of, merged, step_estimator
from hespas.converters.format import SourceFormat
from hespas.estimators import as_run_on, load_estimator
from hespas.estimators.configuration import AUTO, default_configuration
from hespas.estimators.interface import EnergyModel, estimate_with, for_job, with_option
from hespas.estimators.rates import OperationCosts, StepEnergy, step_energy
from hespas.estimators.step_intervals import applied_factor, weighed
from hespas.files.documents import Count, Figure, document_bytes
from hespas.graph import Diagnostics, Estimate, OpClass, OpGraph, Profile, Workload
from hespas.graph.columns import BoolArray
from hespas.graph.errors import FormatError, UnsupportedError, UsageError
from hespas.graph.hints import Option
from hespas.graph.passes import GroupRegions, is_recorded_wait, known_sum, with_durations
from hespas.graph.progress import Progress
from hespas.graph.workload import of_own_ranks
from hespas.hardware import StepFactor, load_device
from hespas.hardware.prices import Prices
from hespas.report.tables import Column, Table, Values, column_of, joined_tables, write_tables

if TYPE_CHECKING:
    from hespas.simulator import Simulation

__all__ = [
    "ClassTotals",
    "DeviceEnergy",
    "EstimateDocument",
    "EstimatorShare",
    "NodeEstimates",
    "device_energy",
    "estimate",
    "estimate_document",
    "op_class_summary",
    "simulated_step",
    "total_duration_ns",
    "write_estimates_csv",
]


@dataclass(frozen=True, slots=True, repr=False)
class NodeEstimates(Result):
    """Estimates of a workload and energies of a step, one per rank class.

    ``workload`` is the estimated workload, whose operations are merged by ``granularity`` (None: not merged).
    ``costs`` are of each rank class, if the estimator models energy and operations are not merged to regions.
    ``step_factor`` is the choice of the factor on the time of the step.
    """

    workload: Workload
    estimates: tuple[Estimate, ...]
    energies: tuple[StepEnergy, ...]
    granularity: Granularity | None
    source: str = ""
    hardware: str = ""
    estimator: str = ""
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    costs: tuple[OperationCosts, ...] = ()
    step_factor: str = AUTO

    def headline(self) -> str:
        """Return the summary line: source, device, estimator, number of operations and the share with
        a time.
        """
        nodes = sum(map(len, self.estimates))
        timed = sum(estimate.coverage * len(estimate) for estimate in self.estimates)
        share = timed / nodes if nodes else 1.0
        by = f"{self.source} on {self.hardware} by {self.estimator}"
        return f"{by}, {nodes:,} operations, {share:.1%} with a time"

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.estimate/1``."""
        return document_bytes(estimate_document(self, simulated_step(self)))

    def table(self) -> Table:
        """Return the result as a table with one row per operation of each rank class, as written by
        ``hespas estimate --out``.
        """
        return joined_tables(list(_node_tables(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorShare:
    """Share of one estimator in an operation class: number of nodes, and time per step."""

    estimator: str
    nodes: Count
    duration_ns: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTotals:
    """Totals of one operation class of one rank over a step. ``unknown`` counts nodes without a duration.
    ``estimators`` counts the other nodes by the estimator of their time.
    """

    op_class: str
    nodes: Figure
    flops: Figure
    bytes_moved: Figure
    duration_ns: Figure
    unknown: Count
    estimators: tuple[EstimatorShare, ...] = ()


_Source = Annotated[
    str | Path | Workload | Profile,
    Option("Workload in any readable format.", metavar="[SRC]", is_argument=True, is_required=False),
]


@checked()
def estimate(
    source: _Source,
    hardware: EstimatedOn,
    *,
    estimator: ComparedEstimator = STEP_ESTIMATOR,
    step_factor: StepFactorChoice = AUTO,
    granularity: ChosenGranularity = None,
    array: Array = "",
    dataflow: Dataflow = "",
    format: SourceFormat = None,  # noqa: A002 # the word users know
    options: ReadingProgram = None,
    diagnostics: Diagnostics | None = None,
    progress: Progress | None = None,
) -> NodeEstimates:
    """Estimate the time of each operation of each rank class on ``hardware`` (a name or a TOML file).

    ``source`` is a workload, a profile (whose device events are estimated), or the path of a file with
    either, which is read as ``format`` (default: detected) with ``options``. The default ``estimator``
    depends on the kind of workload (:mod:`hespas.estimators.configuration`). ``step_factor`` selects the
    factor of the device file that corrects the time of the step, which the estimates of operations do not
    include (:func:`hespas.estimators.step_intervals.applied_factor`). ``granularity`` selects the
    operations to merge; by default an unoptimised program is fused. ``array`` and ``dataflow`` are options of
    the estimator ``systolic``. Raises ``UsageError`` for an unknown name, ``UnsupportedError`` for a profile
    without device events, and for a path the errors of ``read``.

    Examples:
        >>> hespas.estimate("samples/mlp.mlir", "H100-SXM")
        <NodeEstimates: samples/mlp.mlir on H100-SXM by composite, 4 operations, 100.0% with a time>
    """
    sink = diagnostics if diagnostics is not None else Diagnostics()
    estimator = with_array(estimator, array, dataflow)
    name, workload = opened_program(source, format, options, sink)
    device, estimator = load_device(hardware), step_estimator(workload, hardware, estimator)
    settings = default_configuration(workload, device, estimator, step_factor=step_factor)
    applied_factor(workload, device, settings, sink)  # report why none is applied
    model = for_job(load_estimator(estimator), workload.num_ranks)
    model = with_option(model, "progress", None, progress)
    chosen = granularity_of(workload, granularity)
    workload = merged(workload, chosen, sink)
    estimates: list[Estimate] = []
    costs: list[OperationCosts] = []
    own = Diagnostics()
    for done, graph in enumerate(workload.classes):
        if progress:
            progress(done, len(workload.classes))
        own_graph = of_own_ranks(workload, done, graph)
        as_run = as_run_on(own_graph, device, sink)
        estimates.append(estimate_with(model, as_run, device, own))
        if isinstance(model, EnergyModel):
            costs.append(model.operation_costs(as_run, device))
        waits = is_recorded_wait(graph)
        sink.info(
            "estimate.recorded-waits",
            graph.name,
            f"host time and waits are as recorded, not estimated for {device.name}: "
            f"{float(graph.duration_ns[waits].sum()) / 1e6:,.3f} ms, summed over threads and streams",
            count=int(waits.sum()),
        )
    sink.extend(weighed(own, workload, estimates, device.name))
    energies = [
        step_energy(graph, device, total_duration_ns(op_class_summary(graph, estimated)), cost)
        for graph, estimated, cost in zip_longest(workload.classes, estimates, costs)
    ]
    if chosen == "region":
        workload, estimates = _estimates_of_regions(workload, estimates, model.name)
        costs = []
    return NodeEstimates(
        workload=workload,
        estimates=tuple(estimates),
        energies=tuple(energies),
        granularity=chosen,
        source=name,
        hardware=hardware,
        estimator=estimator,
        diagnostics=sink,
        costs=tuple(costs),
        step_factor=step_factor,
    )


def simulated_step(done: NodeEstimates) -> Simulation | None:
    """Simulate a step with the estimates, as :func:`hespas.api.simulate` does on the same device.
    Operations without an estimate take the time that the workload states. Return None if the operations
    cannot be scheduled (an infinite time, a cycle), which :func:`hespas.api.simulate` reports.
    """
    from hespas.simulator import simulate

    device = load_device(done.hardware)
    configuration = default_configuration(done.workload, device, done.estimator, step_factor=done.step_factor)
    try:
        return simulate(done.workload, done.estimates, device=device, configuration=configuration)
    except (UnsupportedError, FormatError):
        return None


class DeviceEnergy(msgspec.Struct, frozen=True, kw_only=True):
    """Energy of one device in a step [J], a mean over all ranks, with an interval from the power and from the
    time of the step. ``source`` states the assumed power.
    """

    energy_j: Figure
    low_j: Figure
    high_j: Figure
    source: str


def device_energy(step: Simulation, hardware: str) -> DeviceEnergy | None:
    """Return the energy of one device in a simulated step, as :func:`hespas.api.plan` computes it without a
    price file.

    Returns None if the design power of the device or all times are unknown, and for a recording, whose waits
    are those of another device.
    """
    from hespas.api.simulation_result import recorded_step_of

    device = load_device(hardware)
    terms = Prices(rows={}).of_device(device)
    if isnan(terms.tdp_w) or (step.is_lower_bound and not step.step_ns):
        return None
    if recorded_step_of(step.workload, estimated=True) is not None:
        return None
    low_j, energy_j, high_j = terms.power.energy_j(
        terms.tdp_w, step.device_times().by_power_ns, step.relative_interval
    )
    return DeviceEnergy(energy_j=energy_j, low_j=low_j, high_j=high_j, source=terms.power_source)


def _estimates_of_regions(
    workload: Workload, estimates: Sequence[Estimate], name: str
) -> tuple[Workload, list[Estimate]]:
    """Merge operations into regions between collectives, and add their estimates. Intervals of operations are
    added too. If some operations have no interval, the sum is scaled up for them. A region in which most of
    the time has no interval gets none.
    """
    group = GroupRegions()
    sums: list[Estimate] = []
    for graph, estimated in zip(workload.classes, estimates, strict=True):
        bounded = ~(np.isnan(estimated.low_ns) | np.isnan(estimated.high_ns))
        widths = (
            estimated.duration_ns,
            estimated.duration_ns - estimated.low_ns,
            estimated.high_ns - estimated.duration_ns,
        )
        columns = (estimated.duration_ns, *(np.where(bounded, width, 0.0) for width in widths))
        parts = (group(with_durations(graph, column), Diagnostics()) for column in columns)
        duration, bounded_ns, below, above = (part.duration_ns for part in parts)
        with np.errstate(invalid="ignore", divide="ignore"):
            share = np.where(bounded_ns > duration / 2, duration / bounded_ns, np.nan)
        no_estimator = np.full(len(duration), -1, np.int8)
        sums.append(
            replace(
                estimated,
                estimators=(name,),
                bounds=(),
                duration_ns=duration,
                low_ns=np.maximum(duration - below * share, 0.0),
                high_ns=duration + above * share,
                estimator=np.where(np.isnan(duration), no_estimator, np.int8(0)).astype(np.int8),
                bound=no_estimator,
                basis=_longest_basis(graph, estimated, len(duration)),
            )
        )
    return replace(workload, classes=tuple(group(graph, Diagnostics()) for graph in workload.classes)), sums


def _longest_basis(graph: OpGraph, estimated: Estimate, regions: int) -> NDArray[np.int16]:
    """Return the basis of the longest part of each region of a graph; -1 for regions whose estimates state
    none.
    """
    longest_ns, basis = np.zeros(regions), np.full(regions, -1, np.int16)
    for number in range(len(estimated.bases)):
        time_ns = np.where(estimated.basis == number, estimated.duration_ns, 0.0)
        sum_ns = GroupRegions()(with_durations(graph, time_ns), Diagnostics()).duration_ns
        basis = np.where(sum_ns > longest_ns, number, basis).astype(np.int16)
        longest_ns = np.fmax(longest_ns, sum_ns)
    return basis


def total_duration_ns(rows: Sequence[ClassTotals]) -> float:
    """Return the total time of one rank and step; unknown times are not included, NaN if all are unknown."""
    return known_sum(np.array([row.duration_ns for row in rows], np.float64))


@np.errstate(over="ignore", invalid="ignore")  # sums beyond the range of a float are infinite
def op_class_summary(graph: OpGraph, estimated: Estimate | None = None) -> tuple[ClassTotals, ...]:
    """Return totals per operation class of one step, longest first, of estimated durations or, without an
    estimate, of the durations in the graph. Recorded waits are not included.

    Raises ``UsageError`` for an estimate of another graph.
    """
    if estimated is not None and len(estimated) != len(graph):
        raise UsageError(
            f"an estimate of {len(estimated)} nodes does not belong to a graph of {len(graph)}",
            hint="pass a graph of the `workload` of the estimates",
        )
    durations = graph.duration_ns if estimated is None else estimated.duration_ns
    numbers = None if estimated is None else estimated.estimator
    runs = graph.executions
    times_ns = durations * runs
    is_work = (runs != 0) & ~is_recorded_wait(graph)
    rows: list[ClassTotals] = []
    for code in np.unique(graph.op_class).tolist():
        of_class: BoolArray = (graph.op_class == code) & is_work
        executions = runs[of_class]
        shares: list[EstimatorShare] = []
        for number, name in enumerate(() if estimated is None else estimated.estimators):
            own = of_class & (times_ns > 0) & (numbers == number)
            if own.any():
                time_ns = float(times_ns[own].sum())
                shares.append(EstimatorShare(estimator=name, nodes=int(own.sum()), duration_ns=time_ns))
        rows.append(
            ClassTotals(
                op_class=OpClass(code).name.lower(),
                nodes=float(np.nansum(executions)),
                flops=known_sum(graph.flops[of_class] * executions),
                bytes_moved=known_sum(graph.bytes_moved[of_class] * executions),
                duration_ns=known_sum(durations[of_class] * executions),
                unknown=int((np.isnan(durations[of_class]) | np.isnan(executions)).sum()),
                estimators=tuple(shares),
            )
        )
    used = (row for row in rows if row.nodes or row.unknown)
    return tuple(sorted(used, key=lambda row: inf if isnan(row.duration_ns) else -row.duration_ns))


_NODE_HEADER = (
    *map(column_of, ("rank_class", "node")),
    Column("name", kind="code"),
    *map(Column, ("op", "op_class")),
    *(
        column_of(name)
        for name in (
            "executions", "flops", "useful_flops", "transcendentals", "bytes_read", "bytes_written",
            "duration_ns", "low_ns", "high_ns",
        )
    ),
    *map(Column, ("estimator", "bound", "basis")),
    *(Column(name, kind="code") for name in ("framework_op", "source")),
)  # fmt: skip


_COST_HEADER = (
    Column("energy_j", kind="number"),
    Column("array_cycles", kind="number"),
    Column("array_utilization", kind="number"),
)


def write_estimates_csv(done: NodeEstimates, path: Path, *, overwrite: bool = False) -> None:
    """Write one row per operation of each rank class atomically, as Parquet if the name ends in ``.parquet``,
    else as CSV, where an unknown figure is an empty field. ``-`` is standard output. Raises ``OutputError``
    if the file exists and ``overwrite`` is false.
    """

    def fill(temporary: Path) -> None:
        is_parquet = path.suffix == ".parquet"
        write_tables(_node_tables(done), temporary, is_parquet=is_parquet, line_end="\r\n")

    put(path, fill, overwrite=overwrite)


def _node_tables(done: NodeEstimates) -> Iterator[Table]:
    """Yield the estimates of one rank class after another, as tables with one row per operation."""
    for index, (graph, estimated) in enumerate(zip(done.workload.classes, done.estimates, strict=True)):
        strings = list(graph.strings)
        labels: dict[str, tuple[NDArray[np.integer], tuple[str, ...]]] = {
            "estimator": (estimated.estimator, estimated.estimators),
            "bound": (estimated.bound, estimated.bounds),
            "basis": (estimated.basis, estimated.bases),
        }
        texts: dict[str, Values] = {
            name: [words[code] if code >= 0 else "" for code in codes.tolist()]
            for name, (codes, words) in labels.items()
        }
        for name, rows in (
            ("name", graph.name_id),
            ("op", graph.op_id),
            ("framework_op", graph.framework_id),
            ("source", graph.source_id),
        ):
            texts[name] = [strings[row] for row in rows.tolist()]
        texts["op_class"] = [OpClass(code).name.lower() for code in graph.op_class.tolist()]
        numbers: dict[str, Values] = {
            "rank_class": [index] * len(graph),
            "node": list(range(len(graph))),
            "executions": graph.executions,
            "flops": graph.flops,
            "useful_flops": graph.useful_flops,
            "transcendentals": graph.transcendentals,
            "bytes_read": graph.bytes_read,
            "bytes_written": graph.bytes_written,
            "duration_ns": estimated.duration_ns,
            "low_ns": estimated.low_ns,
            "high_ns": estimated.high_ns,
        }
        if not done.costs:
            yield Table(_NODE_HEADER, texts | numbers)
            continue
        costs = done.costs[index]
        numbers |= {
            "energy_j": costs.energy_j.sum(axis=0),
            "array_cycles": costs.cycles,
            "array_utilization": costs.utilization,
        }
        numbers |= {f"{part}_j": column for part, column in zip(costs.parts, costs.energy_j, strict=True)}
        parts = (Column(f"{part}_j", kind="number") for part in costs.parts)
        yield Table((*_NODE_HEADER, *_COST_HEADER, *parts), texts | numbers)


class _EstimatedClass(msgspec.Struct, frozen=True, kw_only=True):
    rank_class: int
    ranks: Count
    coverage: Figure
    duration_ns: Figure
    energy: StepEnergy
    op_classes: tuple[ClassTotals, ...]


class EstimateDocument(Document, frozen=True, kw_only=True):
    """JSON document of ``hespas estimate --json``. ``step_ns`` includes the step factor of the device file,
    if there is one; ``operations_ns`` is the time without it. ``energy`` is of one device in the simulated
    step (null: unknown design power).
    """

    schema: Literal["hespas.estimate/1"] = "hespas.estimate/1"
    hardware: str
    estimator: str
    granularity: str
    step_ns: Figure
    step_low_ns: Figure
    step_high_ns: Figure
    operations_ns: Figure
    step_factor: StepFactor | None
    basis: list[BasisShare]
    model_flops_per_step: Figure
    tokens_per_step: Figure
    mfu: Figure
    mfu_peak_dtype: str
    tokens_per_s: Figure
    energy: DeviceEnergy | None
    rank_classes: list[_EstimatedClass]


def estimate_document(done: NodeEstimates, step: Simulation | None) -> msgspec.Struct:
    """Return times per operation class of each rank class, and the simulated ``step``:
    ``hespas.estimate/1``.
    """
    from hespas.simulator.results import Throughput

    classes: list[_EstimatedClass] = []
    per_class = zip(done.workload.classes, done.estimates, done.energies, strict=True)
    for index, (graph, estimated, energy) in enumerate(per_class):
        rows = op_class_summary(graph, estimated)
        classes.append(
            _EstimatedClass(
                rank_class=index,
                ranks=int((done.workload.rank_class == index).sum()),
                coverage=estimated.coverage,
                duration_ns=total_duration_ns(rows),
                energy=energy,
                op_classes=rows,
            )
        )
    rates = step.throughput if step else Throughput()
    low_ns, high_ns = step.interval_ns if step else (nan, nan)
    return EstimateDocument(
        inputs=[done.source],
        diagnostics=findings(done.diagnostics),
        hardware=done.hardware,
        estimator=done.estimator,
        granularity=done.granularity or "",
        step_ns=step.step_ns if step else nan,
        step_low_ns=low_ns,
        step_high_ns=high_ns,
        operations_ns=step.operations_ns if step else nan,
        step_factor=step.step_factor if step else None,
        basis=basis_of(step.basis if step else {}),
        model_flops_per_step=rates.model_flops,
        tokens_per_step=rates.tokens,
        mfu=rates.mfu,
        mfu_peak_dtype=rates.peak_dtype,
        tokens_per_s=rates.tokens_per_s,
        energy=device_energy(step, done.hardware) if step else None,
        rank_classes=classes,
    )
