"""Durations for a workload, and the sums people ask of them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf, isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from hespas.api.arguments import checked
from hespas.api.io import Document, Result, findings, opened_program, put
from hespas.api.preparation import STEP_ESTIMATOR, Granularity, granularity_of, merged, step_estimator
from hespas.converters import ReadOptions
from hespas.estimators import as_run_on, load_estimator
from hespas.estimators.configuration import default_configuration
from hespas.estimators.extrapolation import weighed
from hespas.estimators.rates import StepEnergy, step_energy
from hespas.estimators.registry import estimate_with, for_job, with_option
from hespas.files.documents import Count, Figure, document_bytes, inert_cell
from hespas.graph import Diagnostics, Estimate, OpClass, OpGraph, Profile, Workload
from hespas.graph.columns import BoolArray, FloatArray
from hespas.graph.errors import FormatError, UnsupportedError, UsageError
from hespas.graph.passes import GroupRegions, is_recorded_wait, known_sum, with_durations
from hespas.graph.workload import of_own_ranks
from hespas.hardware import load_device

if TYPE_CHECKING:
    import pandas

    from hespas.simulator import Simulation

__all__ = [
    "ClassTotals",
    "EstimateDocument",
    "EstimatorShare",
    "NodeEstimates",
    "class_totals",
    "estimate",
    "estimate_document",
    "step_of",
    "total_duration_ns",
    "write_estimates_csv",
]


@dataclass(frozen=True, slots=True, repr=False)
class NodeEstimates(Result):
    """The estimate of each rank class of a workload, in order of the classes, and the energy of a step.

    ``workload`` is what was estimated: its operations merged as ``granularity`` says (None: as they stood).
    """

    workload: Workload
    estimates: tuple[Estimate, ...]
    energies: tuple[StepEnergy, ...]
    granularity: Granularity | None
    source: str = ""
    hardware: str = ""
    estimator: str = ""
    diagnostics: Diagnostics = field(default_factory=Diagnostics)

    def headline(self) -> str:
        """Of what, on what, and how much of it."""
        nodes = sum(map(len, self.estimates))
        timed = sum(each.coverage * len(each) for each in self.estimates)
        share = timed / nodes if nodes else 1.0
        by = f"{self.source} on {self.hardware} by {self.estimator}"
        return f"{by}, {nodes:,} operations, {share:.1%} with a time"

    def to_json(self) -> bytes:
        """The document of ``--json``: ``hespas.estimate/1``."""
        return document_bytes(estimate_document(self, step_of(self)))

    def to_pandas(self) -> pandas.DataFrame:
        """One row per operation of each rank class, as ``hespas estimate --out`` writes it."""
        import pandas as pd

        return pd.DataFrame(list(_node_rows(self)), columns=_HEADER)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorShare:
    """What one estimator said of one operation class: nodes that take time, and their sum over a step."""

    estimator: str
    nodes: Count
    duration_ns: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTotals:
    """One operation class of one rank: sums over a step. ``unknown`` counts nodes without a duration,
    ``estimators`` shares the others out among those that gave them.
    """

    op_class: str
    nodes: Figure
    flops: Figure
    bytes_moved: Figure
    duration_ns: Figure
    unknown: Count
    estimators: tuple[EstimatorShare, ...] = ()


@checked()
def estimate(
    source: str | Path | Workload | Profile,
    hardware: str,
    *,
    estimator: str = STEP_ESTIMATOR,
    granularity: Granularity | None = None,
    format: str | None = None,  # noqa: A002 # the word users know
    options: ReadOptions | None = None,
    diagnostics: Diagnostics | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> NodeEstimates:
    """What ``estimator`` says of each node of each rank class on ``hardware`` (a name or a TOML file).

    ``source`` is a workload, or the path of one, read as ``format`` (else the one sniffed) with ``options``.
    The default ``estimator`` depends on the kind of workload (:mod:`hespas.estimators.configuration`).
    ``granularity`` says which operations are one (by default an unoptimised program is fused first). Of a
    profile it is the device work that was measured. Raises ``UsageError`` for an unknown name,
    ``UnsupportedError`` for a profile without device work; for a path also what ``read`` raises.
    """
    found = diagnostics if diagnostics is not None else Diagnostics()
    name, workload = opened_program(source, format, options, found)
    device, estimator = load_device(hardware), step_estimator(workload, hardware, estimator)
    model = for_job(load_estimator(estimator), workload.num_ranks)
    model = with_option(model, "progress", None, progress)
    chosen = granularity_of(workload, granularity)
    workload = merged(workload, chosen, found)
    estimates: list[Estimate] = []
    heard = Diagnostics()
    for done, graph in enumerate(workload.classes):
        if progress:
            progress(done, len(workload.classes))
        own = of_own_ranks(workload, done, graph)
        estimates.append(estimate_with(model, as_run_on(own, device, found), device, heard))
        _tell_waits(graph, device.name, found)
    found.extend(weighed(heard, workload, estimates, device.name))
    if chosen == "region":
        workload, estimates = _grouped(workload, estimates, model.name)
    energies = [
        step_energy(graph, device, total_duration_ns(class_totals(graph, each)))
        for graph, each in zip(workload.classes, estimates, strict=True)
    ]
    return NodeEstimates(
        workload, tuple(estimates), tuple(energies), chosen, name, hardware, estimator, found
    )


def _tell_waits(graph: OpGraph, hardware: str, found: Diagnostics) -> None:
    """Say that recorded waits are not estimated."""
    waits = is_recorded_wait(graph)
    time_ns = float(graph.duration_ns[waits].sum())
    found.info(
        "estimate.recorded-waits",
        graph.name,
        f"time of the host and waits are as they were recorded, not estimated for {hardware}: "
        f"{time_ns / 1e6:,.3f} ms, side by side where threads and streams are",
        count=int(waits.sum()),
    )


def step_of(done: NodeEstimates) -> Simulation | None:
    """Return the step that the estimates make, as :func:`hespas.api.simulate` does on the same device: times
    that the workload states count where the estimator has none. None where they cannot be scheduled (a time
    without end, a cycle), which :func:`hespas.api.simulate` reports.
    """
    from hespas.simulator import simulate

    device = load_device(done.hardware)
    configuration = default_configuration(done.workload, device, done.estimator)
    try:
        return simulate(done.workload, done.estimates, device=device, configuration=configuration)
    except (UnsupportedError, FormatError):
        return None


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
                estimator=np.where(np.isnan(duration), nobody, np.int8(0)).astype(np.int8),
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
    Recorded waits are no operations.

    Raises ``UsageError`` for an estimate of another graph.
    """
    if estimated is not None and len(estimated) != len(graph):
        raise UsageError(
            f"an estimate of {len(estimated)} nodes is not one of a graph of {len(graph)}",
            hint="the graphs that were estimated are in the estimates' own workload",
        )
    durations = graph.duration_ns if estimated is None else estimated.duration_ns
    runs = graph.multiplicity
    works = (runs != 0) & ~is_recorded_wait(graph)
    rows: list[ClassTotals] = []
    for code in np.unique(graph.op_class).tolist():
        of_class: BoolArray = (graph.op_class == code) & works
        times = runs[of_class]
        rows.append(
            ClassTotals(
                op_class=OpClass(code).name.lower(),
                nodes=float(np.nansum(times)),
                flops=known_sum(graph.flops[of_class] * times),
                bytes_moved=known_sum(graph.bytes_moved[of_class] * times),
                duration_ns=known_sum(durations[of_class] * times),
                unknown=int((np.isnan(durations[of_class]) | np.isnan(times)).sum()),
                estimators=() if estimated is None else tuple(_estimator_shares(estimated, of_class, runs)),
            )
        )
    return tuple(sorted((row for row in rows if row.nodes or row.unknown), key=_longest_first))


def _estimator_shares(estimated: Estimate, nodes: BoolArray, runs: FloatArray) -> Iterator[EstimatorShare]:
    """Each estimator's part of some nodes, in the order they are asked; what takes no time is nobody's."""
    durations = estimated.duration_ns * runs
    counted = nodes & (durations > 0)
    for number, name in enumerate(estimated.estimators):
        mine = counted & (estimated.estimator == number)
        if mine.any():
            yield EstimatorShare(
                estimator=name, nodes=int(mine.sum()), duration_ns=float(durations[mine].sum())
            )


# --- The table of operations, and the document

_HEADER = (
    "rank_class",
    "node",
    "name",
    "op",
    "op_class",
    "executions",
    "flops",
    "useful_flops",
    "transcendentals",
    "bytes_read",
    "bytes_written",
    "duration_ns",
    "low_ns",
    "high_ns",
    "estimator",
    "bound",
    "framework_op",
    "source",
)


def write_estimates_csv(done: NodeEstimates, path: Path, *, overwrite: bool = False) -> None:
    """Write all nodes of all rank classes, at once or not at all; unknown is an empty field, ``-`` is
    standard output. Raises ``OutputError`` where the file exists already, without ``overwrite``.
    """

    def fill(temporary: Path) -> None:
        with temporary.open("w", newline="", encoding="utf-8", errors="replace") as stream:
            writer = csv.writer(stream)
            writer.writerow(_HEADER)
            writer.writerows([inert_cell(cell) for cell in row] for row in _node_rows(done))

    put(path, fill, overwrite=overwrite)


def _node_rows(done: NodeEstimates) -> Iterator[tuple[object, ...]]:
    pairs = zip(done.workload.classes, done.estimates, strict=True)
    return chain.from_iterable(_node_rows_of(index, *pair) for index, pair in enumerate(pairs))


def _node_rows_of(index: int, graph: OpGraph, estimated: Estimate) -> Iterator[tuple[object, ...]]:
    strings = list(graph.strings)
    names: list[str] = [strings[row] for row in graph.name_row.tolist()]
    ops: list[str] = [strings[row] for row in graph.op_row.tolist()]
    classes = [OpClass(code).name.lower() for code in graph.op_class.tolist()]
    numbers = (
        graph.multiplicity,
        graph.flops,
        graph.useful_flops,
        graph.transcendentals,
        graph.bytes_read,
        graph.bytes_written,
        estimated.duration_ns,
        estimated.low_ns,
        estimated.high_ns,
    )
    figures = [[_cell(value) for value in column.tolist()] for column in numbers]
    said = _named(estimated.estimator.tolist(), estimated.estimators)
    bound = _named(estimated.bound.tolist(), estimated.bounds)
    frameworks: list[str] = [strings[row] for row in graph.framework_row.tolist()]
    sources: list[str] = [strings[row] for row in graph.source_row.tolist()]
    for node, row in enumerate(
        zip(names, ops, classes, *figures, said, bound, frameworks, sources, strict=True)
    ):
        yield (index, node, *row)


def _named(codes: list[int], names: tuple[str, ...]) -> list[str]:
    return [names[code] if code >= 0 else "" for code in codes]


def _cell(value: float) -> float | str:
    return value if value == value else ""  # noqa: PLR0124 # NaN is the only number unlike itself


class _EstimatedClass(msgspec.Struct, frozen=True, kw_only=True):
    rank_class: int
    ranks: Count
    coverage: Figure
    duration_ns: Figure
    energy: StepEnergy
    op_classes: tuple[ClassTotals, ...]


class EstimateDocument(Document, frozen=True, kw_only=True):
    """What hespas estimate --json writes."""

    schema: Literal["hespas.estimate/1"] = "hespas.estimate/1"
    hardware: str
    estimator: str
    granularity: str
    step_ns: Figure
    step_low_ns: Figure
    step_high_ns: Figure
    model_flops_per_step: Figure
    tokens_per_step: Figure
    mfu: Figure
    mfu_peak_dtype: str
    tokens_per_s: Figure
    rank_classes: list[_EstimatedClass]


def estimate_document(done: NodeEstimates, step: Simulation | None) -> msgspec.Struct:
    """Times per operation class of each rank class, and the ``step`` they make: ``hespas.estimate/1``."""
    from hespas.simulator.throughput import Throughput

    classes: list[_EstimatedClass] = []
    of_class = zip(done.workload.classes, done.estimates, done.energies, strict=True)
    for index, (graph, estimated, energy) in enumerate(of_class):
        rows = class_totals(graph, estimated)
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
    return EstimateDocument(
        inputs=[done.source],
        diagnostics=findings(done.diagnostics),
        hardware=done.hardware,
        estimator=done.estimator,
        granularity=done.granularity or "",
        step_ns=step.step_ns if step else nan,
        step_low_ns=step.low_ns if step else nan,
        step_high_ns=step.high_ns if step else nan,
        model_flops_per_step=rates.model_flops,
        tokens_per_step=rates.tokens,
        mfu=rates.mfu,
        mfu_peak_dtype=rates.peak_dtype,
        tokens_per_s=rates.tokens_per_s,
        rank_classes=classes,
    )
