"""Result of a simulation, and its JSON document: rank classes, critical path, memory, network and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import isnan, nan
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from msgspec.structs import asdict

from hespas.analysis.charts import memory_charts
from hespas.analysis.links import LinkRow, LinkTrafficRow, NetworkUtilization
from hespas.analysis.simulated import SimulatedStep, memory_contents, simulated_step
from hespas.analysis.table import RowTable
from hespas.api.documents import BasisShare, Document, Result, basis_of, findings, put
from hespas.api.lowering import Mode
from hespas.converters.measured_ops.steps import recorded_steps_of, recording_text
from hespas.files.documents import Count, Figure, document_bytes, encode_json
from hespas.graph import WAITS, Diagnostics, OpGraph, Workload
from hespas.graph.deprecation import RenamedAttribute
from hespas.hardware import StepFactor, load_device
from hespas.report import Table, table_from_records
from hespas.report.charts import Chart
from hespas.report.page import Tile
from hespas.report.texts import bytes_text, counted, fits_text, time_text
from hespas.simulator import Simulation, node_label, segments
from hespas.simulator.astra import RankStatistics
from hespas.simulator.astra.external import ExternalRun
from hespas.simulator.memory import RankMemory

__all__ = [
    "REPORT_FILES",
    "ExternalDocument",
    "RecordedStep",
    "SimulationDocument",
    "SimulationResult",
    "correction_text",
    "external_document",
    "recorded_step_of",
    "simulation_document",
    "write_simulation_json",
]

_ROWS_AT_ONCE = 4096
REPORT_FILES = ("index.html", "simulation.json")
"""Files of a report, besides the tables."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SimulationResult(Result, Simulation):
    """Result of a simulation.

    ``hardware`` is empty if the times are from the source, ``system`` if no system was named.
    ``astra_statistics`` has ASTRA-sim's figures per rank (mode ``astra``), ``astra_reference`` the output of
    the user's ASTRA-sim executable. ``measured_ns`` is the step time of the ``overlay`` profiles. ``memory``
    is the memory of each rank class whose operations state their result sizes (mode ``hespas``).
    ``network_utilization`` has the traffic per dimension of the system (None: no system, or mode ``astra``).
    """

    source: str
    hardware: str
    estimator: str
    diagnostics: Diagnostics
    mode: Mode = "hespas"
    system: str = ""
    astra_statistics: RankStatistics | None = None
    astra_reference: ExternalRun | None = None
    measured_ns: float = nan
    memory: tuple[RankMemory, ...] = ()
    network_utilization: NetworkUtilization | None = None
    statistics = RenamedAttribute("astra_statistics")
    external = RenamedAttribute("astra_reference")
    links = RenamedAttribute("network_utilization")

    @property
    def where(self) -> str:
        """Return text with the names of the system and of the device, for the summary line; names that are
        not set are left out.
        """
        return f"{self.system}, {self.hardware}" if self.system and self.hardware else self.hardware

    def headline(self) -> str:
        """Return the summary line: the time of a step, its interval, the number of ranks and the rates."""
        least = "at least " if self.is_lower_bound else ""
        where = f" on {self.hardware}" if self.hardware else ""
        ranks = sum(result.num_ranks for result in self.classes)
        recorded = recorded_step_of(self.workload, estimated=bool(self.hardware) or self.mode == "astra")
        low_ns, high_ns = self.interval_ns
        interval = (
            "" if isnan(low_ns) else f" (90 % interval: {low_ns / 1e6:,.3f} to {high_ns / 1e6:,.3f} ms)"
        )
        time = f"{least}{self.step_ns / 1e6:,.3f} ms"
        summary = f"{time} per step{interval}"
        if recorded is not None and not isnan(recorded.step_ns):
            period = "" if isnan(recorded.period_ns) else f"{recorded.period_ns / 1e6:,.3f} ms"
            steps = recording_text(recorded.count, period)
            summary = f"{recorded.step_ns / 1e6:,.3f} ms per step, {steps}, span {time}"
        elif recorded is not None:
            summary = f"span {time}"
        rates = f"; {self.throughput}" if self.throughput.is_known else ""
        corrected = f"; {correction_text(self)}" if self.step_factor else ""
        return f"{self.source}{where}, {summary} of {counted(ranks, 'rank')}{corrected}{rates}"

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.simulate/1``."""
        return document_bytes(simulation_document(self))

    def table(self) -> Table:
        """Return the result as a table with one row per rank."""
        rows = [asdict(row) for row in _rank_rows(self)]
        names = [name for name in _RankRow.__struct_fields__ if not rows or rows[0][name] is not UNSET]
        return table_from_records(rows, names)

    def tables_by_name(self) -> Mapping[str, RowTable[Any]]:
        """Return all tables of the report by name."""
        return self._tables(simulated_step(self))

    def _tables(self, step: SimulatedStep) -> Mapping[str, RowTable[Any]]:
        network = self.network_utilization.tables() if self.network_utilization else {}
        names = [graph.name for graph in self.workload.classes]
        return step.tables() | {"memory": memory_contents(self.memory, names)} | network

    def charts(self) -> tuple[Chart, ...]:
        """Return the charts of the step: timeline, memory, flame graph, roofline, bus bandwidth and
        communication matrix, as far as their data are known.
        """
        return self._charts(simulated_step(self))

    def _charts(self, step: SimulatedStep) -> tuple[Chart, ...]:
        device = load_device(self.hardware) if self.hardware else None
        names = [graph.name for graph in self.workload.classes]
        charts = step.charts(device, self.throughput.peak_dtype)
        return (*charts, *memory_charts(self.memory, names))

    def to_html(self) -> str:
        """Return the page of the step."""
        return self._html(simulated_step(self))

    def _html(self, step: SimulatedStep) -> str:
        from hespas.analysis.report import SIMULATED, analysis_html

        return analysis_html(
            self.headline(),
            self._tables(step),
            inputs=[self.source],
            about="All times are simulated.",
            title="Time breakdown of a step",
            shown=SIMULATED,
            charts=self._charts(step),
            tiles=[Tile(*tile) for tile in self._tiles()],
            diagnostics=self.diagnostics,
        )

    def _tiles(self) -> Iterator[tuple[str, str, str]]:
        """Yield name, value and note of the main figures of the step."""
        least = "at least " if self.is_lower_bound else ""
        low_ns, high_ns = self.interval_ns
        known = "" if isnan(low_ns) else f"90 % interval: {time_text(low_ns)} to {time_text(high_ns)}"
        basis = f"; basis: {self.basis_text}" if self.basis_text else ""
        corrected = f"; {correction_text(self)}" if self.step_factor else ""
        yield "Step", f"{least}{time_text(self.step_ns)}", f"{known or 'no interval'}{corrected}{basis}"
        last = max(self.classes, key=lambda result: result.finish_ns)
        share = last.exposed_comm_ns / self.operations_ns if self.operations_ns > 0 else nan
        note = "" if isnan(share) else f"{share:.1%} of the step, of the rank that finishes last"
        yield "Exposed communication", time_text(last.exposed_comm_ns), note
        fullest = max(self.memory, key=lambda memory: memory.device_bytes, default=None)
        if fullest is not None:
            fits = fits_text(fullest.fits, fullest.capacity_bytes)
            whole = "of the whole job before partitioning" if fullest.is_whole_job else fits
            least = "at least " if fullest.use.is_lower_bound else ""
            yield "Peak memory", f"{least}{bytes_text(fullest.use.peak_bytes)}", whole
        if not isnan(self.throughput.mfu):
            yield "MFU", f"{self.throughput.mfu:.1%}", f"of the {self.throughput.peak_dtype} peak"

    def write(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write an HTML report of the step (``index.html``), ``simulation.json`` and a CSV file per table
        into a folder. Raises ``OutputError`` if one of them exists, without ``overwrite``.
        """
        from hespas.analysis.report import write_report

        step = simulated_step(self)
        page, document = self._html(step), self.to_json()
        write_report(
            Path(folder), page, document, self._tables(step), name=REPORT_FILES[1], overwrite=overwrite
        )


def correction_text(done: Simulation) -> str:
    """Return the time of a step without its step factor, and the factor; empty without one."""
    if done.step_factor is None:
        return ""
    factor = f"step factor {done.correction:.2f} ({done.step_factor.evidence})"
    return f"sum of operations {time_text(done.operations_ns)}, {factor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """Steps of the recording from which a workload was made.

    ``count`` is the number of recorded steps (0: the recording has no step annotations). ``step_ns`` is the
    median length of a step over all ranks, ``period_ns`` the median time from the start of a step to the
    start of the next one (for a single step, its length). Both are NaN without steps and for estimated times.
    """

    count: int
    step_ns: float
    period_ns: float


def recorded_step_of(workload: Workload, *, estimated: bool) -> RecordedStep | None:
    """Return the recorded steps of a workload; None for a workload that was not recorded. ``estimated`` is
    True if its times are estimates.
    """
    count, spans, as_recorded = 0, list[float](), not estimated
    periods: list[float] = []
    steps_of = [recorded_steps_of(graph.attachments, graph.name) for graph in workload.classes]
    if not steps_of or any(steps is None for steps in steps_of):
        return None
    ranks = np.bincount(workload.rank_class[workload.rank_class >= 0], minlength=len(steps_of)).tolist()
    for graph, steps, num_ranks in zip(workload.classes, steps_of, ranks, strict=True):
        if steps is not None and steps.is_annotated:
            count = max(count, steps.count)
            spans += steps.span_ns * num_ranks
            periods += [steps.period_ns] * num_ranks if steps.period_ns >= 0 else []
            as_recorded &= steps.describes(graph)
    return RecordedStep(
        count=count,
        step_ns=float(np.median(spans)) if spans and as_recorded else nan,
        period_ns=float(np.median(periods)) if periods and as_recorded else nan,
    )


class _ExternalRank(msgspec.Struct, frozen=True):
    """Figures of a rank as printed by the user's ASTRA-sim."""

    rank: int
    finish_ns: Figure
    exposed_comm_ns: Figure
    compute_ns: Figure
    comm_ns: Figure
    wall_ns: Figure
    cpu_ns: Figure
    remote_memory_ns: Figure
    overlap_ns: Figure


class ExternalDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Run of the user's ASTRA-sim executable. ``differing_ranks`` counts the ranks whose finish or exposed
    communication differs from the simulation by Hespas.
    """

    simulator: Literal["astra-sim"] = "astra-sim"
    binary: str
    exit_code: int
    step_ns: Figure
    differing_ranks: Count
    ranks: list[_ExternalRank]


def external_document(run: ExternalRun, embedded: RankStatistics) -> ExternalDocument:
    """Return the comparison of the user's ASTRA-sim with the embedded simulator on the same job, as a
    document.
    """
    own = run.statistics
    differs = (own.finish_ns != embedded.finish_ns) | (own.exposed_comm_ns != embedded.exposed_comm_ns)
    columns = (
        own.finish_ns, own.exposed_comm_ns, own.compute_ns, own.comm_ns, own.wall_ns, own.cpu_ns,
        own.remote_memory_ns, own.overlap_ns,
    )  # fmt: skip
    rows = zip(*(np.where(column < 0, np.nan, column).tolist() for column in columns), strict=True)
    return ExternalDocument(
        binary=run.binary,
        exit_code=run.exit_code,
        step_ns=float(own.finish_ns.max()),
        differing_ranks=int(differs.sum()),
        ranks=[_ExternalRank(rank, *row) for rank, row in enumerate(rows)],
    )


class _LargestValue(msgspec.Struct, frozen=True):
    name: str
    op_class: str
    kind: str
    size_bytes: Figure
    framework: str
    source: str


class _MemoryOfClass(msgspec.Struct, frozen=True):
    op_class: str
    size_bytes: Figure


class _MemoryDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Row of ``memory`` in the document of a simulation."""

    rank_class: int
    peak_bytes: Figure
    at_ns: Figure
    at_node: str
    parameters_bytes: Figure
    constants_bytes: Figure
    outputs_bytes: Figure
    temporaries_bytes: Figure
    collectives_bytes: Figure
    donated_bytes: Figure
    unlisted_bytes: Figure
    device_bytes: Figure
    capacity_bytes: Figure
    fits: bool | None
    is_lower_bound: bool
    is_whole_job: bool
    unknown: Count
    op_classes: list[_MemoryOfClass]
    largest: list[_LargestValue]


def _memory_document(memory: RankMemory, graph: OpGraph) -> _MemoryDocument:
    use = memory.use
    return _MemoryDocument(
        rank_class=memory.rank_class,
        peak_bytes=use.peak_bytes,
        at_ns=use.at_ns,
        at_node=graph.node_name(use.at_node) if use.at_node >= 0 else "",
        parameters_bytes=use.parameters_bytes,
        constants_bytes=use.constants_bytes,
        outputs_bytes=use.outputs_bytes,
        temporaries_bytes=use.temporaries_bytes,
        collectives_bytes=use.collectives_bytes,
        donated_bytes=use.donated_bytes,
        unlisted_bytes=use.unlisted_bytes,
        device_bytes=memory.device_bytes,
        capacity_bytes=memory.capacity_bytes,
        fits=memory.fits,
        is_lower_bound=use.is_lower_bound,
        is_whole_job=memory.is_whole_job,
        unknown=use.unknown,
        op_classes=[_MemoryOfClass(name, size) for name, size in use.class_bytes.items()],
        largest=[
            _LargestValue(row.name, row.op_class, row.kind, row.size_bytes, row.framework, row.source)
            for row in use.largest
        ],
    )


class _BusyResource(msgspec.Struct, frozen=True):
    resource: str
    busy_ns: Figure
    idle_ns: Figure


class _PathClassTime(msgspec.Struct, frozen=True):
    op_class: str
    duration_ns: Figure


class _PathResourceTime(msgspec.Struct, frozen=True):
    resource: str
    duration_ns: Figure


class _CriticalPathDocument(msgspec.Struct, frozen=True):
    spans: Count
    after_resource: Count
    op_classes: list[_PathClassTime]
    resources: list[_PathResourceTime]


class _WaitCause(msgspec.Struct, frozen=True):
    cause: str
    duration_ns: Figure


class _PathSegment(msgspec.Struct, frozen=True):
    rank: int
    spans: Count
    first_node: str
    last_node: str
    start_ns: Figure
    end_ns: Figure


class _SimulatedClass(msgspec.Struct, frozen=True, kw_only=True):
    rank_class: int
    name: str
    ranks: Count
    ways: Count
    first_rank: int
    finish_ns: Figure
    exposed_comm_ns: Figure
    interference_ns: Figure
    unknown: Count
    kept: Count
    extrapolated_loops: Count
    resources: list[_BusyResource]
    waits: list[_WaitCause]
    critical_path: _CriticalPathDocument


class _RankRow(msgspec.Struct, frozen=True):
    rank: int
    finish_ns: Figure
    exposed_comm_ns: Figure
    compute_ns: Figure
    comm_ns: Figure
    collective_wait_ns: Figure | UnsetType = UNSET
    message_wait_ns: Figure | UnsetType = UNSET
    interference_ns: Figure | UnsetType = UNSET
    wall_ns: Figure | UnsetType = UNSET
    cpu_ns: Figure | UnsetType = UNSET
    remote_memory_ns: Figure | UnsetType = UNSET
    overlap_ns: Figure | UnsetType = UNSET
    compute_bound: Figure | UnsetType = UNSET
    compute_utilization: Figure | UnsetType = UNSET
    memory_utilization: Figure | UnsetType = UNSET
    operation_intensity: Figure | UnsetType = UNSET


class SimulationDocument(Document, frozen=True, kw_only=True):
    """JSON document of ``hespas simulate --json``.

    ``step_ns`` is the time of the whole graph. It includes the step factor of the device file, if there is
    one; ``operations_ns`` and all other times are without it. If the workload is a recording, the graph has
    ``recorded_steps`` steps (0: without step annotations; null: not a recording). If the times are as
    recorded, ``recorded_step_ns`` is the time of one step, and ``recorded_period_ns`` the time from the start
    of a step to the start of the next one (for a single step, its length).
    """

    schema: Literal["hespas.simulate/1"] = "hespas.simulate/1"
    hardware: str
    estimator: str
    simulator: str
    system: str
    mode: Mode
    num_ranks: Count
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
    is_lower_bound: bool
    is_mixed: bool
    measured_ns: Figure
    recorded_steps: Count | None
    recorded_step_ns: Figure
    recorded_period_ns: Figure
    external: ExternalDocument | None
    rank_classes: list[_SimulatedClass]
    memory: list[_MemoryDocument]
    links: list[LinkRow]
    link_traffic: list[LinkTrafficRow]
    critical_path: list[_PathSegment]
    ranks: list[_RankRow]


def simulation_document(done: SimulationResult, *, ranks: bool = True) -> msgspec.Struct:
    """Return the document of a simulation: ``hespas.simulate/1``. If ``ranks`` is false, the rows per rank
    are left out, because :func:`write_simulation_json` adds them while it writes.
    """
    recorded = recorded_step_of(done.workload, estimated=bool(done.hardware) or done.mode == "astra")
    network = done.network_utilization
    external = None
    if done.astra_reference and done.astra_statistics:
        external = external_document(done.astra_reference, done.astra_statistics)
    return SimulationDocument(
        inputs=[done.source],
        diagnostics=findings(done.diagnostics),
        hardware=done.hardware,
        estimator=done.estimator,
        simulator=done.simulator,
        system=done.system,
        mode=done.mode,
        num_ranks=sum(result.num_ranks for result in done.classes),
        step_ns=done.step_ns,
        step_low_ns=done.interval_ns[0],
        step_high_ns=done.interval_ns[1],
        operations_ns=done.operations_ns,
        step_factor=done.step_factor,
        basis=basis_of(done.basis),
        model_flops_per_step=done.throughput.model_flops,
        tokens_per_step=done.throughput.tokens,
        mfu=done.throughput.mfu,
        mfu_peak_dtype=done.throughput.peak_dtype,
        tokens_per_s=done.throughput.tokens_per_s,
        is_lower_bound=done.is_lower_bound,
        is_mixed=done.mixes_recorded_and_estimated,
        measured_ns=done.measured_ns,
        recorded_steps=recorded.count if recorded else None,
        recorded_step_ns=recorded.step_ns if recorded else nan,
        recorded_period_ns=recorded.period_ns if recorded else nan,
        external=external,
        rank_classes=_class_documents(done),
        memory=[_memory_document(memory, done.workload.classes[memory.rank_class]) for memory in done.memory],
        links=network.links.rows() if network else [],
        link_traffic=network.traffic.rows() if network else [],
        critical_path=[
            _PathSegment(
                segment.rank,
                segment.spans,
                node_label(done.workload.graph_of(segment.rank), segment.first_node),
                node_label(done.workload.graph_of(segment.rank), segment.last_node),
                segment.start_ns,
                segment.end_ns,
            )
            for segment in segments(done)
        ],
        ranks=list(_rank_rows(done)) if ranks else [],
    )


def _class_documents(done: SimulationResult) -> list[_SimulatedClass]:
    """Return one row per rank class."""
    return [
        _SimulatedClass(
            rank_class=result.rank_class,
            name=result.name,
            ranks=result.num_ranks,
            ways=result.ways,
            first_rank=result.rank,
            finish_ns=result.finish_ns,
            exposed_comm_ns=result.exposed_comm_ns,
            interference_ns=result.interference_ns,
            unknown=result.unknown,
            kept=result.kept,
            extrapolated_loops=result.extrapolated,
            resources=[
                _BusyResource(resource, busy_ns, max(result.finish_ns - busy_ns, 0.0))
                for resource, busy_ns in result.busy_ns.items()
            ],
            waits=[_WaitCause(cause, duration_ns) for cause, duration_ns in result.wait_ns.items()],
            critical_path=_CriticalPathDocument(
                result.critical_path.spans,
                result.critical_path.after_resource,
                [_PathClassTime(*pair) for pair in result.critical_path.class_ns.items()],
                [_PathResourceTime(*pair) for pair in result.critical_path.resource_ns.items()],
            ),
        )
        for result in done.classes
    ]


def _rank_rows(done: SimulationResult) -> Iterator[_RankRow]:
    """Yield one row per rank of the workload, in order of the ranks."""
    timeline, statistics = done.timeline, done.astra_statistics
    columns = [
        timeline.finish_ns,
        timeline.exposed_comm_ns,
        timeline.resource_ns("compute"),
        timeline.resource_ns("communication"),
    ]
    lists: list[list[Any]] = [column.tolist() for column in columns]
    if statistics is None:
        lists += [column.tolist() for column in timeline.exposed_wait_ns.T]
        lists.append(timeline.interference_ns.tolist())
    else:
        lists += [[UNSET] * len(timeline.finish_ns)] * (len(WAITS) + 1)
        times = (statistics.wall_ns, statistics.cpu_ns, statistics.remote_memory_ns, statistics.overlap_ns)
        lists += [np.where(column < 0, np.nan, column).tolist() for column in times]
        if statistics.roofline is not None:
            lists += [column.tolist() for column in statistics.roofline.T]
    figures = zip(timeline.shown_by.tolist(), *lists, strict=True)
    return (_RankRow(rank, *row) for rank, (shown_by, *row) in enumerate(figures) if shown_by >= 0)


def write_simulation_json(done: SimulationResult, path: Path, *, overwrite: bool = False) -> None:
    """Write the document of a simulation atomically, one line per rank; ``-`` is standard output. Raises
    ``OutputError`` if the file exists, without ``overwrite``.
    """
    head = document_bytes(simulation_document(done, ranks=False))

    def fill(temporary: Path) -> None:
        with temporary.open("wb") as stream:
            stream.write(head.removesuffix(b"]\n}\n"))
            rows, separator = _rank_rows(done), b"\n    "
            while batch := list(islice(rows, _ROWS_AT_ONCE)):
                stream.write(separator + b",\n    ".join(map(encode_json, batch)))
                separator = b",\n    "
            stream.write(b"\n  ]\n}\n")

    put(path, fill, overwrite=overwrite)
