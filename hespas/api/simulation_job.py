"""Steps of jobs as :func:`hespas.api.simulate` runs them: on the engine or on ASTRA-sim's simulator, with a
file of the simulated timeline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from math import isnan, nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np

from hespas.analysis.links import network_utilization
from hespas.api.estimation import estimate
from hespas.api.io import opened_program, read_profiles
from hespas.api.lowering import (
    STEP_ESTIMATOR,
    Granularity,
    Lowering,
    Mode,
    merged,
    refuse_global,
    step_estimator,
)
from hespas.api.simulation_result import SimulationResult, recorded_step_of
from hespas.api.systems import sized_for
from hespas.converters import ReadOptions, WriteOptions, is_flat, is_recognised, load_format
from hespas.converters.comm_matching import clock_shifts, match_profiles
from hespas.converters.tracks import Displayed, SimulatedRun, TrackSet, joined_tracks
from hespas.estimators import MissingPolicy, refuse_converted
from hespas.estimators.configuration import AUTO, default_configuration
from hespas.estimators.step_intervals import NO_FACTOR
from hespas.files.output import check_destination, write_atomically
from hespas.files.streams import first_bytes
from hespas.graph import ESTIMATED_ON, Diagnostics, Estimate, Profile, Timeline, Workload
from hespas.graph.deprecation import renamed_arguments
from hespas.graph.errors import FormatError, InvariantError, OutputError, UnsupportedError, UsageError
from hespas.graph.progress import Progress
from hespas.hardware import Device, System, load_device, named_device
from hespas.simulator import JobScheduler, ListScheduler, Simulation, Simulator
from hespas.simulator import simulate as run_simulator
from hespas.simulator.astra import (
    AstraOptions,
    AstraSimulation,
    Backend,
    read_memory_config,
    read_network_config,
    read_system_config,
)
from hespas.simulator.astra.configuration import FILE_NAMES, astra_sim_files
from hespas.simulator.astra.external import DEFAULT_TIMEOUT_S, AstraBinary, run_external
from hespas.simulator.job.matching import Protocol
from hespas.simulator.memory import PICKLE_START, RankMemory, memory_by_class, snapshot_bytes
from hespas.simulator.network import Network, on_system
from hespas.simulator.results import throughput_of, warn_of_rates

__all__ = [
    "AstraRequest",
    "Scheduling",
    "StepFiles",
    "StepJob",
    "aligned",
    "check_timeline",
    "write_timeline",
]


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Options of the scheduler: see :class:`hespas.simulator.JobScheduler`."""

    jitter: float
    seed: int
    stragglers: Mapping[int, float]
    messages: Protocol
    alone: bool
    overlap_trips: bool
    interference: bool
    launches: bool

    def scheduler(self, mode: Mode) -> Simulator | None:
        """Return the scheduler with these options; None if all have their defaults. Raises ``UsageError`` for
        options that exclude each other or the mode.
        """
        values = {
            "`jitter`": self.jitter,
            "`seed`": self.seed,
            "`stragglers`": self.stragglers,
            "`messages`": self.messages != "eager",
            "`alone`": self.alone,
            "`overlap_trips`": self.overlap_trips,
            "`interference=False`": not self.interference,
            "`launches=False`": not self.launches,
        }
        given = [option for option, value in values.items() if value]
        if mode == "astra" and given:
            raise UsageError(
                f"{', '.join(given)}: not available in mode astra", hint="leave it out, or `mode=hespas`"
            )
        common: dict[str, Any] = {
            name: getattr(self, name) for name in ("overlap_trips", "interference", "launches")
        }
        if self.alone:
            if self.jitter or self.seed or self.stragglers or self.messages != "eager":
                raise UsageError(
                    "`alone` excludes `jitter`, `seed`, `stragglers` and `messages`",
                    hint="leave `alone` out",
                )
            return ListScheduler(**common)
        if self.seed and not self.jitter:
            raise UsageError("`seed` requires `jitter`, which draws with it", hint="add `jitter=0.05`")
        if not given:
            return None
        stragglers = tuple(self.stragglers.items())
        return JobScheduler(
            jitter=self.jitter, seed=self.seed, stragglers=stragglers, protocol=self.messages, **common
        )


@dataclass(frozen=True, slots=True)
class StepJob:
    """Options of a simulation that say where its times come from, and what happens to unknown times."""

    hardware: str | None
    estimator: str
    granularity: Granularity | None
    on_unknown: MissingPolicy
    diagnostics: Diagnostics
    progress: Progress | None
    system: System | None = None
    step_factor: str = AUTO

    def of_source(
        self,
        source: str | Path | Workload | Profile,
        reading: tuple[str | None, ReadOptions | None],
        request: AstraRequest,
        files: StepFiles,
        system: str | Path | System | None,
    ) -> SimulationResult:
        """Simulate a workload, a profile, or a file of either; ``reading`` has the format and read options of
        a file. The ASTRA-sim arguments of ``request`` and the ``files`` to write are checked before the
        source is read.
        """
        astra = request.checked_job(system)
        if astra is not None and self.step_factor not in {AUTO, NO_FACTOR}:
            raise UsageError(
                "`step_factor` is not available in mode astra", hint="leave it out, or `mode=hespas`"
            )
        files.check()
        name, workload = opened_program(source, *reading, self.diagnostics)
        measured = files.profiles(self.diagnostics)
        if self.on_unknown == "error":
            refuse_global(workload)
        sized = sized_for(system, workload.num_ranks)
        device = self.hardware or (sized.device if sized else "") or None
        for option, default in (("estimator", STEP_ESTIMATOR), ("step_factor", AUTO)):
            if device is None and getattr(self, option) != default:
                raise UsageError(
                    f"`{option}` requires `hardware`: without it, times are those of the input",
                    hint=f"add `hardware=NAME`, or leave `{option}` out",
                )
        job = replace(self, hardware=device, system=sized)
        if astra is None:
            simulation = job.run(workload, request.scheduler)
        else:
            simulation = job.run_astra(workload, astra.options(sized, self.diagnostics), astra.binary)
        result = job.result(name, simulation, measured)
        files.write(result, measured)
        return result

    def timed(
        self, workload: Workload, device: Device | None
    ) -> tuple[Workload, tuple[Estimate, ...] | None]:
        """Return the workload as it is simulated, and the times of its operations on the device and the
        system; None for the times of the workload itself. ``device`` is the device of all times.
        """
        estimates = None
        if self.hardware is None:
            workload = merged(workload, self.granularity, self.diagnostics)
        else:
            if self.on_unknown == "error":
                refuse_converted(workload, load_device(self.hardware))
            estimated = estimate(
                workload,
                self.hardware,
                estimator=self.estimator,
                granularity=self.granularity,
                step_factor=NO_FACTOR,  # the simulation applies it
                diagnostics=self.diagnostics,
                progress=self.progress,
            )
            workload, estimates = estimated.workload, estimated.estimates
        if self.system is not None:
            network = Network(self.system, device)
            workload, estimates = on_system(workload, estimates, network, self.diagnostics)
        return workload, estimates

    def run(self, workload: Workload, simulator: Simulator | None) -> Simulation:
        """Simulate the workload with times estimated for the device, or with the workload's own times."""
        device = self._device_of_times(workload)
        workload, estimates = self.timed(workload, device)
        configuration = None
        if device is not None:
            chosen = self.step_factor
            configuration = default_configuration(workload, device, self.estimator, step_factor=chosen)
        return run_simulator(
            workload,
            estimates,
            simulator=simulator,
            device=device,
            configuration=configuration,
            missing=self.on_unknown,
            diagnostics=self.diagnostics,
        )

    def run_astra(
        self, workload: Workload, options: AstraOptions, binary: AstraBinary | None
    ) -> AstraSimulation:
        """Simulate in ASTRA-sim mode. Chakra traces run as they were read. Other workloads, and traces that
        get times of a device, are converted as by ``hespas-convert``: whole microseconds, permutes as
        messages, unrolled loops. ``binary`` is the user's ASTRA-sim executable, which runs on the same files.

        Raises the errors of :func:`hespas.api.write` and :func:`hespas.simulator.astra.simulate_astra`.
        """
        from hespas.converters.chakra.comm_groups import FILE_NAME
        from hespas.converters.chakra.reader import read_chakra
        from hespas.converters.chakra.writer import write_chakra
        from hespas.validators.checker.execution import run_traces

        is_chakra = workload.metadata.get("format") == "chakra"
        if self.hardware is None and self.granularity is None and is_chakra:
            if binary is None:
                return run_traces(workload, options, self.diagnostics)
        else:
            lowering = Lowering(
                granularity=self.granularity,
                on_unknown=self.on_unknown,
                hardware=self.hardware,
                estimator=self.estimator,
                target=load_format("chakra"),
                folds=not is_flat(workload.metadata, load_format("stablehlo")),  # its first format decides
            )
            workload, _ = lowering.run(workload, range(workload.num_ranks), self.diagnostics)
        with TemporaryDirectory(prefix="hespas-astra-") as folder:
            traces = Path(folder) / "traces"
            writing = WriteOptions(progress=self.progress, directory=True)
            write_chakra(workload, traces, writing, self.diagnostics)
            written = read_chakra(traces, ReadOptions(), Diagnostics())
            simulation = run_traces(written, options, self.diagnostics)
            if binary is None:
                return simulation
            groups = traces / FILE_NAME
            group_file = groups if groups.exists() else None
            reference = run_external(binary, traces, group_file, options, written.num_ranks)
            return replace(simulation, external=reference)

    def result(self, source: str, simulation: Simulation, measured: Sequence[Profile]) -> SimulationResult:
        """Return the result: the simulation with rates, memory and use of the network. The measured step time
        is the longest time from the first to the last device event of a profile in ``measured``.
        """
        spans_ns = [
            float(np.nanmax(profile.start_ns + profile.duration_ns) - np.nanmin(profile.start_ns))
            for profile in measured
            if len(profile.start_ns)
        ]
        workload = simulation.workload
        columns = {column.name: getattr(simulation, column.name) for column in fields(Simulation)}
        astra = simulation if isinstance(simulation, AstraSimulation) else None
        rates = simulation.throughput
        recorded = recorded_step_of(workload, estimated=bool(self.hardware) or astra is not None)
        if rates.is_known and recorded is not None and recorded.count:
            # rates of a recording are per period of its steps
            period_ns = recorded.period_ns
            if isnan(period_ns):
                period_ns = simulation.step_ns / recorded.count
            rates = throughput_of(workload.metadata, period_ns, self._device_of_times(workload))
        columns["throughput"] = rates
        warn_of_rates(rates, source, self.diagnostics)
        network = None
        if self.system is not None and astra is None:
            network = network_utilization(workload, simulation.timeline, self.system, self.diagnostics)
        memory: tuple[RankMemory, ...] = ()
        if astra is None:
            device = load_device(self.hardware) if self.hardware else None
            shown = {result.rank_class: result.rank for result in simulation.classes}
            memory = memory_by_class(workload, simulation.timeline, shown, device)
            beyond = sum(workload.class_sizes[row.rank_class] for row in memory if row.fits is False)
            capacity_bytes = memory[0].capacity_bytes if memory else nan
            message = f"ranks need more memory than {self.hardware} has ({capacity_bytes / 1e9:,.1f} GB)"
            self.diagnostics.warning("simulate.beyond-memory", workload.name, message, count=beyond)
        return SimulationResult(
            source=source,
            hardware=self.hardware or "",
            estimator=step_estimator(workload, self.hardware, self.estimator) if self.hardware else "",
            system="" if self.system is None else self.system.name,
            diagnostics=self.diagnostics,
            mode="hespas" if astra is None else "astra",
            astra_statistics=None if astra is None else astra.statistics,
            astra_reference=None if astra is None else astra.external,
            measured_ns=max(spans_ns, default=nan),
            memory=memory,
            network_utilization=network,
            **columns,
        )

    def _device_of_times(self, workload: Workload) -> Device | None:
        """Return the device to which all times belong, for contention between its kernels and collectives. It
        is the chosen device, else the device for which the durations of the workload were estimated. None for
        recorded times and for an unknown device.
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


@dataclass(frozen=True, slots=True)
class StepFiles:
    """Requested files of a step: the simulated timeline, with the measured profiles ``overlays`` that are
    drawn next to it, and the memory snapshot.
    """

    timeline: Path | None
    memory_snapshot: Path | None
    overlays: Sequence[str | Path | Profile]
    overwrite: bool

    def check(self) -> None:
        """Check that the files can be written; raises what :func:`hespas.api.check_timeline` raises.

        For the snapshot, it raises ``UsageError`` for another suffix than ``.pickle``, and ``OutputError`` if
        the file exists (without ``overwrite``) or is no pickle.
        """
        check_timeline(self.timeline, overlay=bool(self.overlays), overwrite=self.overwrite)
        path = self.memory_snapshot
        if path is None:
            return
        if path.suffix != ".pickle":
            raise UsageError("a memory snapshot is a pickle", path=str(path), hint="name it FILE.pickle")
        if path.is_dir():
            raise OutputError("exists and is a directory", path=str(path), hint="name a file in it")
        check_destination(path, overwrite=self.overwrite)
        if path.exists() and first_bytes(path, 1) != PICKLE_START:
            raise OutputError("is not a pickle", path=str(path), hint="choose another file")

    def profiles(self, diagnostics: Diagnostics) -> list[Profile]:
        """Return the measured profiles, which are read if they are files."""
        measured: list[Profile] = []
        for item in self.overlays:
            measured += [item] if isinstance(item, Profile) else read_profiles(item, diagnostics=diagnostics)
        return measured

    def write(self, result: SimulationResult, measured: Sequence[Profile]) -> None:
        """Write the requested files."""
        if self.timeline:
            write_timeline(
                result.timeline,
                result.workload,
                self.timeline,
                overlay=measured,
                hardware=result.hardware,
                overwrite=self.overwrite,
                diagnostics=result.diagnostics,
            )
        if self.memory_snapshot:
            if not result.memory:
                raise UnsupportedError(
                    "no memory snapshot: the memory of no rank class is known, because its operations state "
                    "no results or no readers of them, or because ASTRA-sim was simulated",
                    path=result.source,
                    hint="use a program with static shapes or a generated workload, in mode hespas",
                )
            content = snapshot_bytes(result.memory, result.workload)

            def fill(temporary: Path) -> None:
                temporary.write_bytes(content)

            write_atomically(self.memory_snapshot, fill, overwrite=self.overwrite, directory=False)


@dataclass(frozen=True, slots=True)
class AstraRequest:
    """Arguments that select the simulator: the mode and a scheduler. For mode ``astra`` they also include
    configuration files, network backend, queues per dimension and executable.
    """

    mode: Mode = "hespas"
    scheduler: Simulator | None = None
    system_config: str | Path | None = None
    network_config: str | Path | None = None
    memory_config: str | Path | None = None
    backend: Backend = "unaware"
    queues_per_dim: int = 1
    astra_bin: str | Path | None = None
    astra_timeout: float = DEFAULT_TIMEOUT_S

    def checked_job(self, system: object) -> _AstraJob | None:
        """Check the arguments before the workload is read, and return the job for mode ``astra``; None in
        mode ``hespas``. Raises the errors of :meth:`options`, and ``UsageError`` for a system together with
        configuration files.
        """
        configuration = None
        if self.mode != "astra" or system is None:
            configuration = self.options()
            if configuration is None:
                return None
        elif self.system_config or self.network_config or self.memory_config:
            raise UsageError(
                "`system` and configuration files of ASTRA-sim cannot be combined",
                hint="leave one out; `hespas hardware system NAME --to astra-sim DIR` writes files to edit",
            )
        binary = None
        if self.astra_bin is not None:
            binary = AstraBinary(path=str(self.astra_bin), timeout_s=self.astra_timeout)
        return _AstraJob(self, binary, configuration)

    def options(self) -> AstraOptions | None:
        """Read the configuration files; return None in mode ``hespas``. Raises ``UsageError`` for a missing
        file, and for arguments of the other mode.
        """
        if self.mode == "hespas":
            files = [self.system_config, self.network_config, self.memory_config, self.astra_bin]
            if any(files) or self.backend != "unaware" or self.queues_per_dim != 1:
                raise UsageError(
                    "options of ASTRA-sim (files, binary, `backend`, `queues_per_dim`) need mode astra",
                    hint="add `mode=astra`",
                )
            return None
        if self.scheduler:
            raise UsageError(
                "`simulator` belongs to mode hespas", hint="leave `simulator` out, or use mode hespas"
            )
        if not self.system_config or not self.network_config:
            missing = "network_config" if self.system_config else "system_config"
            raise UsageError(
                f"mode astra needs `{missing}`",
                hint="give system.json and network.yml, or `system` with the name of one",
            )
        return AstraOptions(
            system=read_system_config(Path(self.system_config)),
            network=read_network_config(Path(self.network_config)),
            memory=read_memory_config(Path(self.memory_config)) if self.memory_config else None,
            backend=self.backend,
            queues_per_dim=self.queues_per_dim,
        )


@dataclass(frozen=True, slots=True)
class _AstraJob:
    """Checked arguments of mode ``astra``. ``configuration`` is read from the configuration files. If a
    system is given instead, it is None, because the files are written after the size of the job is known.
    """

    request: AstraRequest
    binary: AstraBinary | None
    configuration: AstraOptions | None

    def options(self, system: System | None, diagnostics: Diagnostics) -> AstraOptions:
        """Return the configuration of ASTRA-sim. For a system, its files are written for the size of the job
        and read back.
        """
        configuration = self.configuration
        if configuration is None and system is not None:
            with TemporaryDirectory(prefix="hespas-system-") as folder:
                for name, text in astra_sim_files(system, diagnostics).items():
                    (Path(folder) / name).write_text(text, encoding="utf-8")
                system_file, network_file, memory_file = (Path(folder) / name for name in FILE_NAMES)
                written = replace(
                    self.request,
                    system_config=system_file,
                    network_config=network_file,
                    memory_config=memory_file,
                )
                try:
                    configuration = written.options()
                except FormatError as error:  # users cannot look into our temporary files
                    raise UnsupportedError(
                        f"ASTRA-sim cannot run the system {system.name}: {error.message}", hint=error.hint
                    ) from error
        if configuration is None:
            raise InvariantError("mode astra without configuration files")
        return configuration


_VIEWER_WRITERS = {
    ".json": "hespas.converters.chrome_trace.writer",
    ".pftrace": "hespas.converters.perfetto.writer",
    ".perfetto-trace": "hespas.converters.perfetto.writer",
    ".perfetto": "hespas.converters.perfetto.writer",
}
_TABLE = ".csv"
_HINT = "name it FILE.json or FILE.pftrace for a viewer, FILE.csv for a table (all of them also .gz)"
_SIMULATED_DEVICE = "simulated"
_TIMELINE_MARKS = (
    b'timeline":"simulated"',  # in the header of a Chrome trace
    b"timeline\x1a\x09simulated",  # an attribute of a Perfetto trace
)
_TIMELINE_TABLE = re.compile(rb'"hardware"[^\n]*\n"simulated')
"""Start of a table whose first row is of a simulated device."""
_HEAD_BYTES = 65_536

_WriteScene = Callable[[TrackSet, Path, WriteOptions], None]


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix


@renamed_arguments(beside="overlay")
def check_timeline(path: Path | None, *, overlay: bool = False, overwrite: bool = False) -> None:
    """Raise an error for a file that :func:`write_timeline` cannot write, before any work is done.

    Raises ``UsageError`` for an unknown suffix, and for an ``overlay`` in a table or without a file;
    ``OutputError`` if the file exists (without ``overwrite``), cannot be written, or is a workload or a
    measured profile.
    """
    if path is None:
        if overlay:
            raise UsageError(
                "`overlay` requires `timeline`, to which it adds a profile", hint="add `timeline=FILE.json`"
            )
        return
    suffix = _suffix(path)
    if suffix != _TABLE and suffix not in _VIEWER_WRITERS:
        named = f"the suffix {suffix!r}" if suffix else "a name without a suffix"
        raise UsageError(f"{named} does not name a timeline format", path=str(path), hint=_HINT)
    if overlay and suffix == _TABLE:
        raise UsageError(
            "a timeline table (CSV) cannot hold an overlay", path=str(path),
            hint="name it FILE.json or FILE.pftrace, or leave out `overlay`",
        )  # fmt: skip
    if path.is_dir():
        raise OutputError("exists and is a directory", path=str(path), hint="name a file in it")
    check_destination(path, overwrite=overwrite)
    if path.exists() and is_recognised(path):
        head = first_bytes(path, _HEAD_BYTES)
        is_timeline = any(mark in head for mark in _TIMELINE_MARKS) or _TIMELINE_TABLE.match(head) is not None
        if not is_timeline:
            raise OutputError(
                "holds a workload or a measured profile, not an earlier timeline", path=str(path),
                hint="choose another file",
            )  # fmt: skip


@renamed_arguments(beside="overlay")
def write_timeline(
    timeline: Timeline,
    workload: Workload,
    path: Path,
    *,
    overlay: Sequence[Profile] = (),
    hardware: str = "",
    overwrite: bool = False,
    diagnostics: Diagnostics | None = None,
    progress: Progress | None = None,
) -> int:
    """Write a simulated run atomically, with measured profiles as ``overlay``, whose first step starts when
    the run starts: see :func:`aligned`.

    The suffix selects the format: a Chrome trace, a Perfetto trace, or a table of the spans, whose device
    is ``simulated HARDWARE``. Returns the number of bytes written. Raises what :func:`check_timeline`
    raises, and ``UsageError`` if the timeline is not of this workload.
    """
    check_timeline(path, overlay=bool(overlay), overwrite=overwrite)
    sink = diagnostics if diagnostics is not None else Diagnostics()
    options = WriteOptions(name=path.name, progress=progress)
    run = SimulatedRun(timeline, workload)

    def fill(temporary: Path) -> None:
        suffix = _suffix(path)
        if suffix == _TABLE:
            from hespas.converters.ops_table.writer import write_ops_table
            from hespas.converters.tracks.simulated import profile_of_run

            profile = profile_of_run(run, f"{_SIMULATED_DEVICE} {hardware}".rstrip())
            write_ops_table(profile, temporary, options, sink)
            return
        values: list[tuple[str, Displayed]] = [("", run)]
        if overlay:
            values = [*(("measured", profile) for profile in aligned(overlay)), ("simulated", run)]
        write_scene = cast("_WriteScene", import_module(_VIEWER_WRITERS[suffix]).write_scene)
        write_scene(joined_tracks(values, sink), temporary, options)

    return write_atomically(path, fill, overwrite=overwrite, directory=False)


def aligned(profiles: Sequence[Profile]) -> list[Profile]:
    """Move profiles of one job to the clock of a simulated step: the device events of the first recorded step
    start at 0. Without recorded steps, the first device event starts at 0.

    Recordings of several processes have different clocks. All ranks leave a collective at the same time.
    Therefore a later profile is shifted so that the median difference to an earlier profile is 0, over the
    ends of their common collectives (matched by group and sequence number, see
    :mod:`hespas.converters.comm_matching`). A profile without common collectives starts at 0.
    """
    events = match_profiles(profiles)
    owners: list[int] = events.profile.tolist()
    ends_ns = [
        float(profiles[owner].start_ns[event] + profiles[owner].duration_ns[event])
        for owner, event in zip(owners, events.event.tolist(), strict=True)
    ]
    starts_ns: list[float] = []
    for profile in profiles:
        has_start = ~np.isnan(profile.start_ns)
        in_step = has_start & (profile.run >= 0)
        chosen = in_step if bool(in_step.any()) else has_start
        starts_ns.append(float(profile.start_ns[chosen].min()) if bool(chosen.any()) else 0.0)
    # a message may be sent long before it is received: only collectives end at the same time
    collective = np.where(events.sends < 0, events.instance, -1)
    shifts = clock_shifts(owners, collective, ends_ns, starts_ns)
    return [profile.shifted(shifts[index]) for index, profile in enumerate(profiles)]
