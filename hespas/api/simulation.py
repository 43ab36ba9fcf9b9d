"""End-to-end time of a workload, and the JSON document about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from msgspec.structs import astuple

from hespas.analysis.links import LinkRow, LinkTrafficRow, LinkUse, link_use
from hespas.api.arguments import checked
from hespas.api.astra import AstraReady, AstraRequest, run_astra
from hespas.api.estimation import estimate
from hespas.api.external import ExternalDocument, external_document, measured_step_ns
from hespas.api.io import Document, Result, findings, opened_program, put, read_profiles
from hespas.api.memory import MemoryDocument, memory_document, memory_on
from hespas.api.preparation import (
    STEP_ESTIMATOR,
    Granularity,
    Mode,
    merged,
    refuse_global,
    step_estimator,
)
from hespas.api.recorded_steps import recorded_step_of
from hespas.api.systems import sized_for
from hespas.api.timeline_file import check_timeline, write_timeline
from hespas.converters import ReadOptions
from hespas.converters.measured_ops import recording_text
from hespas.estimators import MissingPolicy, refuse_converted
from hespas.estimators.configuration import default_configuration
from hespas.files.documents import Count, Figure, document_bytes, encoded
from hespas.graph import ESTIMATED_ON, WAITS, Diagnostics, Profile, Workload
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UsageError
from hespas.graph.hints import PositiveInt
from hespas.hardware import Device, System, load_device, named_device
from hespas.simulator import ClassResult, Segment, Simulation, Simulator, node_label, segments
from hespas.simulator import simulate as run
from hespas.simulator.astra import AstraOptions, AstraSimulation, Backend, RankStatistics
from hespas.simulator.astra.external import DEFAULT_TIMEOUT_S, AstraBinary, ExternalRun
from hespas.simulator.memory import RankMemory
from hespas.simulator.network import Network, on_system
from hespas.simulator.throughput import Throughput, throughput_of, warn_of_rates

if TYPE_CHECKING:
    import pandas

__all__ = [
    "SimulationDocument",
    "SimulationResult",
    "simulate",
    "simulation_document",
    "write_simulation_json",
]

_ROWS_AT_ONCE = 4096
_REPORT_DOCUMENT = "simulation.json"
"""The document in the folder of a report."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SimulationResult(Result, Simulation):
    """A simulation, with what was asked: ``hardware`` is empty where the times are those of the source,
    ``system`` where none was named. ``statistics`` are ASTRA-sim's own, in mode ``astra``, and ``external``
    what a user's ASTRA-sim says; ``measured_ns`` is the step of the profiles beside it; ``memory`` is that of
    each rank class whose operations say what they make, in mode ``hespas``, and ``links`` how far the network
    of the system is used (None: no system, or mode ``astra``).
    """

    source: str
    hardware: str
    estimator: str
    diagnostics: Diagnostics
    mode: Mode = "hespas"
    system: str = ""
    statistics: RankStatistics | None = None
    external: ExternalRun | None = None
    measured_ns: float = nan
    memory: tuple[RankMemory, ...] = ()
    links: LinkUse | None = None

    @property
    def where(self) -> str:
        """Return the system and the device, as far as they were named."""
        return f"{self.system}, {self.hardware}" if self.system and self.hardware else self.hardware

    def headline(self) -> str:
        """How long a step takes."""
        least = "at least " if self.is_lower_bound else ""
        where = f" on {self.hardware}" if self.hardware else ""
        ranks = sum(found.num_ranks for found in self.classes)
        recorded = recorded_step_of(self.workload, estimated=bool(self.hardware) or self.mode == "astra")
        interval = ""
        if not isnan(self.low_ns):
            interval = f" (90 % interval: {self.low_ns / 1e6:,.3f} to {self.high_ns / 1e6:,.3f} ms)"
        time = f"{least}{self.step_ns / 1e6:,.3f} ms"
        told = f"{time} per step{interval}"
        if recorded is not None and not isnan(recorded.step_ns):
            period = "" if isnan(recorded.period_ns) else f"{recorded.period_ns / 1e6:,.3f} ms"
            steps = recording_text(recorded.count, period)
            told = f"{recorded.step_ns / 1e6:,.3f} ms per step, {steps}, span {time}"
        elif recorded is not None:
            told = f"span {time}"
        rates = f"; {self.throughput}" if self.throughput.is_known else ""
        return f"{self.source}{where}, {told} of {ranks:,} ranks{rates}"

    def to_json(self) -> bytes:
        """The document of ``--json``: ``hespas.simulate/1``."""
        return document_bytes(simulation_document(self))

    def to_pandas(self) -> pandas.DataFrame:
        """One row per rank."""
        import pandas as pd

        rows = [astuple(row) for row in _rank_rows(self)]
        table = pd.DataFrame(rows, columns=list(_RankRow.__struct_fields__))
        return table[[name for name in table if not len(rows) or table[name].iloc[0] is not UNSET]]

    def write(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write a page of where the time goes, ``simulation.json`` and a CSV file per table into a folder.
        Raises ``OutputError`` where one of them exists, without ``overwrite``.
        """
        from hespas.analysis.report import SIMULATED, analysis_html, write_report
        from hespas.analysis.simulated import simulated_step

        tables = simulated_step(self).tables() | (self.links.tables() if self.links else {})
        page = analysis_html(
            self.headline(),
            tables,
            inputs=[self.source],
            about="All times are simulated.",
            title="Where the time of a step goes",
            shown=SIMULATED,
            diagnostics=self.diagnostics,
        )
        document = self.to_json()
        write_report(Path(folder), page, document, tables, name=_REPORT_DOCUMENT, overwrite=overwrite)


@checked()
def simulate(
    source: str | Path | Workload | Profile,
    hardware: str | None = None,
    *,
    estimator: str = STEP_ESTIMATOR,
    granularity: Granularity | None = None,
    simulator: Simulator | None = None,
    format: str | None = None,  # noqa: A002 # the word users know
    options: ReadOptions | None = None,
    missing: MissingPolicy = "warn",
    timeline: str | Path | None = None,
    beside: str | Path | Profile | Sequence[str | Path | Profile] = (),
    overwrite: bool = False,
    mode: Mode = "hespas",
    system: str | Path | System | None = None,
    system_config: str | Path | None = None,
    network_config: str | Path | None = None,
    memory_config: str | Path | None = None,
    backend: Backend = "unaware",
    queues_per_dim: PositiveInt = 1,
    astra_bin: str | Path | None = None,
    astra_timeout: float = DEFAULT_TIMEOUT_S,
    diagnostics: Diagnostics | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SimulationResult:
    """One step of every rank that is here: see :func:`hespas.simulator.simulate`.

    ``source``, ``format``, ``options`` and ``granularity`` are those of :func:`hespas.api.estimate`. With
    ``hardware`` (a name or a TOML file), nodes take the time that ``estimator`` gives them there, else that
    of the workload itself, of a profile that of the device work that was measured. With ``system`` (a name, a
    TOML file or a value) communication takes what its network makes of where ranks lie in it
    (:mod:`hespas.simulator.network`), and ``hardware`` is its device unless given.

    Mode ``astra`` gives the nanoseconds of ASTRA-sim's analytical simulator, from its configuration files or
    those of ``system`` (:func:`hespas.simulator.astra.simulate_astra`): ``backend`` without congestion or
    with it, ``queues_per_dim`` as on its command line; ``CheckFailedError`` where ranks never finish.
    ``astra_bin``, a user's own ASTRA-sim, is run on the same files for ``astra_timeout`` seconds at most.

    What ran when is written to the file ``timeline`` (.json, .pftrace or .csv) and, in the first two, the
    measured profiles ``beside`` it (values, or paths of files and of folders of ranks): see
    :func:`hespas.api.write_timeline`. Raises ``UsageError`` for an unknown name, ``UnsupportedError`` for a
    profile without device work, and what :func:`check_timeline` and :func:`read_profiles` raise.
    """
    found = diagnostics if diagnostics is not None else Diagnostics()
    request = AstraRequest(
        system_config, network_config, memory_config, backend, queues_per_dim, astra_bin, astra_timeout
    )
    ready = request.check(mode, simulator, system)
    drawn, shown = None if timeline is None else Path(timeline), _listed(beside)
    check_timeline(drawn, beside=bool(shown), overwrite=overwrite)
    name, workload = opened_program(source, format, options, found)
    measured = _profiles(shown, found)
    if missing == "error":
        refuse_global(workload)
    sized = sized_for(system, workload.num_ranks)
    asked = _Asked(_device(hardware, sized), estimator, granularity, missing, found, progress, sized)
    result = asked.told(name, asked.run(workload, simulator, ready), measured_step_ns(measured))
    if drawn:
        _write_timeline_of(result, drawn, measured, overwrite=overwrite)
    return result


def _device(hardware: str | None, system: System | None) -> str | None:
    """Whose times are asked for: those of the system's device where no other is named."""
    return hardware or (system.device if system else "") or None


@dataclass(frozen=True, slots=True)
class _Asked:
    """Where times come from, and what is done about those that nobody knows."""

    hardware: str | None
    estimator: str
    granularity: Granularity | None
    missing: MissingPolicy
    diagnostics: Diagnostics
    progress: Callable[[int, int], None] | None
    system: System | None

    def told(self, source: str, ran: Simulation, measured_ns: float) -> SimulationResult:
        """A simulation with what was asked."""
        columns = {column.name: getattr(ran, column.name) for column in fields(Simulation)}
        columns["throughput"] = rates = self._rates(ran)
        warn_of_rates(rates, source, self.diagnostics)
        statistics = ran.statistics if isinstance(ran, AstraSimulation) else None
        links = None
        if self.system is not None and statistics is None:
            links = link_use(ran.workload, ran.timeline, self.system, self.diagnostics)
        return SimulationResult(
            source=source,
            hardware=self.hardware or "",
            estimator=step_estimator(ran.workload, self.hardware, self.estimator) if self.hardware else "",
            system="" if self.system is None else self.system.name,
            diagnostics=self.diagnostics,
            mode="hespas" if statistics is None else "astra",
            statistics=statistics,
            external=ran.external if isinstance(ran, AstraSimulation) else None,
            measured_ns=measured_ns,
            memory=()
            if isinstance(ran, AstraSimulation)
            else memory_on(ran, self.hardware, self.diagnostics),
            links=links,
            **columns,
        )

    def _rates(self, ran: Simulation) -> Throughput:
        """Return the rates of a step; those of a recording are of the time between starts of its steps."""
        estimated = bool(self.hardware) or isinstance(ran, AstraSimulation)
        recorded = recorded_step_of(ran.workload, estimated=estimated)
        if not ran.throughput.is_known or recorded is None or not recorded.count:
            return ran.throughput
        period_ns = ran.step_ns / recorded.count if isnan(recorded.period_ns) else recorded.period_ns
        return throughput_of(ran.workload.metadata, period_ns, self._device_of_times(ran.workload))

    def run(self, workload: Workload, simulator: Simulator | None, request: AstraReady | None) -> Simulation:
        """The step in the mode that is asked for."""
        if request is None:
            return self.scheduled(workload, simulator)
        return self.on_astra(workload, request.options(self.system, self.diagnostics), request.binary)

    def on_astra(
        self, workload: Workload, options: AstraOptions, binary: AstraBinary | None
    ) -> AstraSimulation:
        """As ASTRA-sim runs it."""
        return run_astra(
            workload,
            options,
            binary=binary,
            hardware=self.hardware,
            estimator=self.estimator,
            granularity=self.granularity,
            missing=self.missing,
            diagnostics=self.diagnostics,
            progress=self.progress,
        )

    def scheduled(self, workload: Workload, simulator: Simulator | None) -> Simulation:
        """As ``simulator`` runs it, with times of a device or those of the workload."""
        estimates = None
        if self.hardware is None:
            workload = merged(workload, self.granularity, self.diagnostics)
        else:
            if self.missing == "error":
                refuse_converted(workload, load_device(self.hardware))
            done = estimate(
                workload,
                self.hardware,
                estimator=self.estimator,
                granularity=self.granularity,
                diagnostics=self.diagnostics,
                progress=self.progress,
            )
            workload, estimates = done.workload, done.estimates
        device = self._device_of_times(workload)
        configuration = None if device is None else default_configuration(workload, device, self.estimator)
        if self.system is not None:
            network = Network(self.system, device)
            workload, estimates = on_system(workload, estimates, network, self.diagnostics)
        return run(
            workload,
            estimates,
            simulator=simulator,
            device=device,
            configuration=configuration,
            missing=self.missing,
            diagnostics=self.diagnostics,
        )

    def _device_of_times(self, workload: Workload) -> Device | None:
        """Return the device whose kernels and collectives contend: the chosen one, else that which the
        durations of the workload are estimates for, None for recorded or foreign times.
        """
        if self.hardware is not None:
            return load_device(self.hardware)
        name = workload.metadata.get(ESTIMATED_ON, "")
        if not name:
            return None
        try:
            device = named_device(name)
        except UsageError:
            self.diagnostics.warning(
                "simulate.unknown-device",
                workload.name,
                f"durations are estimates for {name}, which is not in the catalogue: contention between "
                "kernels and collectives is not included",
            )
            return None
        self.diagnostics.info(
            "simulate.estimated-times", workload.name, f"durations are estimates for {device.name}"
        )
        return device


def _write_timeline_of(
    done: SimulationResult, path: Path, measured: Sequence[Profile], *, overwrite: bool
) -> None:
    write_timeline(
        done.timeline,
        done.workload,
        path,
        beside=measured,
        hardware=done.hardware,
        overwrite=overwrite,
        diagnostics=done.diagnostics,
    )


def _listed(beside: str | Path | Profile | Sequence[str | Path | Profile]) -> list[str | Path | Profile]:
    return [beside] if isinstance(beside, str | Path | Profile) else list(beside)


def _profiles(beside: Sequence[str | Path | Profile], diagnostics: Diagnostics) -> list[Profile]:
    """The profiles that are given, and those that files and folders hold."""
    found: list[Profile] = []
    for each in beside:
        found += [each] if isinstance(each, Profile) else read_profiles(each, diagnostics=diagnostics)
    return found


class _Busy(msgspec.Struct, frozen=True):
    resource: str
    busy_ns: Figure
    idle_ns: Figure


class _OfClass(msgspec.Struct, frozen=True):
    op_class: str
    duration_ns: Figure


class _OfResource(msgspec.Struct, frozen=True):
    resource: str
    duration_ns: Figure


class _Path(msgspec.Struct, frozen=True):
    spans: Count
    after_resource: Count
    op_classes: list[_OfClass]
    resources: list[_OfResource]


class _Waited(msgspec.Struct, frozen=True):
    cause: str
    duration_ns: Figure


class _Segment(msgspec.Struct, frozen=True):
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
    resources: list[_Busy]
    waits: list[_Waited]
    critical_path: _Path


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
    """What hespas simulate --json writes. ``step_ns`` is the time of the whole graph: of a recording of
    ``recorded_steps`` (null: not of a recording, 0: without annotated steps) their span, and
    ``recorded_step_ns`` the time of one, where times are as recorded; ``recorded_period_ns`` is from the
    start of a step to that of the next, of a single step its length.
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
    memory: list[MemoryDocument]
    links: list[LinkRow]
    link_traffic: list[LinkTrafficRow]
    critical_path: list[_Segment]
    ranks: list[_RankRow]


def simulation_document(done: SimulationResult, *, ranks: bool = True) -> msgspec.Struct:
    """The figures of a simulation: ``hespas.simulate/1``. Without ``ranks`` its rows are left out: those may
    be many, and :func:`write_simulation_json` adds them as it writes.
    """
    recorded = recorded_step_of(done.workload, estimated=bool(done.hardware) or done.mode == "astra")
    return SimulationDocument(
        inputs=[done.source],
        diagnostics=findings(done.diagnostics),
        hardware=done.hardware,
        estimator=done.estimator,
        simulator=done.simulator,
        system=done.system,
        mode=done.mode,
        num_ranks=sum(found.num_ranks for found in done.classes),
        step_ns=done.step_ns,
        step_low_ns=done.low_ns,
        step_high_ns=done.high_ns,
        model_flops_per_step=done.throughput.model_flops,
        tokens_per_step=done.throughput.tokens,
        mfu=done.throughput.mfu,
        mfu_peak_dtype=done.throughput.peak_dtype,
        tokens_per_s=done.throughput.tokens_per_s,
        is_lower_bound=done.is_lower_bound,
        is_mixed=done.is_mixed,
        measured_ns=done.measured_ns,
        recorded_steps=recorded.count if recorded else None,
        recorded_step_ns=recorded.step_ns if recorded else nan,
        recorded_period_ns=recorded.period_ns if recorded else nan,
        external=external_document(done.external, done.statistics)
        if done.external and done.statistics
        else None,
        rank_classes=[_simulated_class(found) for found in done.classes],
        memory=[memory_document(found, done.workload.classes[found.rank_class]) for found in done.memory],
        links=done.links.links.rows() if done.links else [],
        link_traffic=done.links.traffic.rows() if done.links else [],
        critical_path=[_segment(done, found) for found in segments(done)],
        ranks=list(_rank_rows(done)) if ranks else [],
    )


def _segment(done: SimulationResult, found: Segment) -> _Segment:
    first, last = (
        node_label(done.workload.graph_of(found.rank), node) for node in (found.first_node, found.last_node)
    )
    return _Segment(found.rank, found.spans, first, last, found.start_ns, found.end_ns)


def _simulated_class(found: ClassResult) -> _SimulatedClass:
    path = found.critical_path
    return _SimulatedClass(
        rank_class=found.rank_class,
        name=found.name,
        ranks=found.num_ranks,
        ways=found.ways,
        first_rank=found.rank,
        finish_ns=found.finish_ns,
        exposed_comm_ns=found.exposed_comm_ns,
        interference_ns=found.interference_ns,
        unknown=found.unknown,
        kept=found.kept,
        extrapolated_loops=found.extrapolated,
        resources=[
            _Busy(resource, busy_ns, max(found.finish_ns - busy_ns, 0.0))
            for resource, busy_ns in found.busy_ns.items()
        ],
        waits=[_Waited(cause, duration_ns) for cause, duration_ns in found.wait_ns.items()],
        critical_path=_Path(
            path.spans,
            path.after_resource,
            [_OfClass(name, spent_ns) for name, spent_ns in path.class_ns.items()],
            [_OfResource(name, spent_ns) for name, spent_ns in path.resource_ns.items()],
        ),
    )


def _rank_rows(done: SimulationResult) -> Iterator[_RankRow]:
    """One row per rank that is here, in order of the ranks."""
    timeline = done.timeline
    columns = [
        timeline.finish_ns,
        timeline.exposed_comm_ns,
        timeline.resource_ns("compute"),
        timeline.resource_ns("communication"),
    ]
    lists: list[list[Any]] = [column.tolist() for column in columns]
    if done.statistics is None:
        lists += [column.tolist() for column in timeline.exposed_wait_ns.T]
        lists.append(timeline.interference_ns.tolist())
    else:
        lists += [[UNSET] * len(timeline.finish_ns)] * (len(WAITS) + 1)
        lists += [column.tolist() for column in _astra_columns(done.statistics)]
    figures = zip(timeline.shown_by.tolist(), *lists, strict=True)
    return (_RankRow(rank, *row) for rank, (shown_by, *row) in enumerate(figures) if shown_by >= 0)


def _astra_columns(statistics: RankStatistics) -> list[FloatArray]:
    """What mode ``astra`` says besides; NaN is not defined."""
    times = (statistics.wall_ns, statistics.cpu_ns, statistics.remote_memory_ns, statistics.overlap_ns)
    known = [np.where(column < 0, np.nan, column) for column in times]
    return known if statistics.roofline is None else [*known, *statistics.roofline.T]


def write_simulation_json(done: SimulationResult, path: Path, *, overwrite: bool = False) -> None:
    """Write the document of a simulation, one line per rank, at once or not at all; ``-`` is standard output.
    Raises ``OutputError`` where it exists already, without ``overwrite``.
    """
    beginning = document_bytes(simulation_document(done, ranks=False))

    def fill(temporary: Path) -> None:
        with temporary.open("wb") as stream:
            stream.write(beginning.removesuffix(b"]\n}\n"))
            rows, separator = _rank_rows(done), b"\n    "
            while part := list(islice(rows, _ROWS_AT_ONCE)):
                stream.write(separator + b",\n    ".join(map(encoded, part)))
                separator = b",\n    "
            stream.write(b"\n  ]\n}\n")

    put(path, fill, overwrite=overwrite)
