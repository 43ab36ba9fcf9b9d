"""Simulation of a step: on the engine (mode ``hespas``), or on ASTRA-sim's analytical simulator (mode
``astra``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import isnan, nan
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from hespas.analysis.links import network_utilization
from hespas.api.arguments import checked
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
from hespas.api.timeline_file import check_timeline, write_timeline
from hespas.converters import ReadOptions, WriteOptions, is_flat, load_format
from hespas.converters.chakra.comm_groups import FILE_NAME
from hespas.converters.chakra.reader import read_chakra
from hespas.converters.chakra.writer import write_chakra
from hespas.estimators import MissingPolicy, refuse_converted
from hespas.estimators.configuration import default_configuration
from hespas.graph import ESTIMATED_ON, Diagnostics, Profile, Workload
from hespas.graph.deprecation import renamed_arguments
from hespas.graph.errors import FormatError, InvariantError, UnsupportedError, UsageError
from hespas.graph.hints import PositiveInt
from hespas.hardware import Device, System, load_device, named_device
from hespas.simulator import Simulation, Simulator
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
from hespas.simulator.memory import RankMemory, memory_by_class
from hespas.simulator.network import Network, on_system
from hespas.simulator.results import throughput_of, warn_of_rates
from hespas.validators.checker.execution import run_traces

__all__ = ["simulate"]


@renamed_arguments(missing="on_unknown", beside="overlay")
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
    on_unknown: MissingPolicy = "warn",
    timeline: str | Path | None = None,
    overlay: str | Path | Profile | Sequence[str | Path | Profile] = (),
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
    """Simulate one step of all ranks in the workload: see :func:`hespas.simulator.simulate`.

    ``source``, ``format``, ``options`` and ``granularity`` are as in :func:`hespas.api.estimate`. With
    ``hardware`` (a name or a TOML file), operations take the time that ``estimator`` gives them there;
    without it, the times of the workload, or of the device events of a profile. With ``system`` (a name, a
    TOML file or a value), communication is timed on its network by the position of the ranks
    (:mod:`hespas.simulator.network`), and ``hardware`` defaults to its device. ``on_unknown`` (``warn``,
    ``error``, ``zero``) is the policy for unknown times and trip counts.

    Mode ``astra`` gives the nanoseconds of ASTRA-sim's analytical simulator for its configuration files, or
    for those of ``system`` (:func:`hespas.simulator.astra.simulate_astra`). ``backend`` is
    congestion-unaware or -aware, ``queues_per_dim`` is ASTRA-sim's option. ``astra_bin`` is the user's own
    ASTRA-sim, which runs on the same files for at most ``astra_timeout`` seconds. Raises
    ``CheckFailedError`` if ranks never finish.

    The file ``timeline`` (.json, .pftrace or .csv) gets the time of every operation; in the first two
    formats, the measured profiles in ``overlay`` (values, files, or folders of ranks) are added: see
    :func:`hespas.api.write_timeline`. Raises ``UsageError`` for an unknown name, ``UnsupportedError`` for a
    profile without device events, and what :func:`check_timeline` and :func:`read_profiles` raise.
    """
    sink = diagnostics if diagnostics is not None else Diagnostics()
    request = _AstraRequest(
        system_config, network_config, memory_config, backend, queues_per_dim, astra_bin, astra_timeout
    )
    astra = request.checked_job(mode, simulator, system)
    timeline_path = None if timeline is None else Path(timeline)
    overlays = [overlay] if isinstance(overlay, str | Path | Profile) else list(overlay)
    check_timeline(timeline_path, overlay=bool(overlays), overwrite=overwrite)
    name, workload = opened_program(source, format, options, sink)
    measured: list[Profile] = []
    for item in overlays:
        measured += [item] if isinstance(item, Profile) else read_profiles(item, diagnostics=sink)
    if on_unknown == "error":
        refuse_global(workload)
    sized = sized_for(system, workload.num_ranks)
    device = hardware or (sized.device if sized else "") or None
    job = _StepJob(device, estimator, granularity, on_unknown, sink, progress, sized)
    if astra is None:
        simulation = job.run(workload, simulator)
    else:
        simulation = job.run_astra(workload, astra.options(sized, sink), astra.binary)
    result = job.result(name, simulation, measured)
    if timeline_path:
        write_timeline(
            result.timeline,
            result.workload,
            timeline_path,
            overlay=measured,
            hardware=result.hardware,
            overwrite=overwrite,
            diagnostics=sink,
        )
    return result


@dataclass(frozen=True, slots=True)
class _StepJob:
    """Options of a simulation: the source of times, and the policy for unknown times."""

    hardware: str | None
    estimator: str
    granularity: Granularity | None
    on_unknown: MissingPolicy
    diagnostics: Diagnostics
    progress: Callable[[int, int], None] | None
    system: System | None

    def run(self, workload: Workload, simulator: Simulator | None) -> Simulation:
        """Simulate on the engine, with times of a device or of the workload."""
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
                diagnostics=self.diagnostics,
                progress=self.progress,
            )
            workload, estimates = estimated.workload, estimated.estimates
        device = self._device_of_times(workload)
        configuration = None if device is None else default_configuration(workload, device, self.estimator)
        if self.system is not None:
            network = Network(self.system, device)
            workload, estimates = on_system(workload, estimates, network, self.diagnostics)
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
        """Simulate as ASTRA-sim does. Chakra traces run as they were read; other workloads, and traces that
        get times of a device, are converted as by ``hespas-convert``: whole microseconds, permutes as
        messages, unrolled loops. ``binary``, the user's own ASTRA-sim, runs on the same files.

        Raises what :func:`hespas.api.write` and :func:`hespas.simulator.astra.simulate_astra` raise.
        """
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
            written = read_chakra(traces, ReadOptions(comm_groups=None), Diagnostics())
            simulation = run_traces(written, options, self.diagnostics)
            if binary is None:
                return simulation
            groups = traces / FILE_NAME
            group_file = groups if groups.exists() else None
            reference = run_external(binary, traces, group_file, options, written.num_ranks)
            return replace(simulation, external=reference)

    def result(self, source: str, simulation: Simulation, measured: Sequence[Profile]) -> SimulationResult:
        """Return the result: the simulation with rates, memory and use of the network. The measured step is
        the longest time from the first to the last device event of a profile.
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
            capacity = load_device(self.hardware).main_memory.capacity_bytes if self.hardware else -1
            shown = {result.rank_class: result.rank for result in simulation.classes}
            capacity_bytes = float(capacity) if capacity >= 0 else nan
            memory = memory_by_class(workload, simulation.timeline, shown, capacity_bytes)
            beyond = sum(workload.class_sizes[row.rank_class] for row in memory if row.fits is False)
            message = f"ranks need more memory than {self.hardware} has ({capacity / 1e9:,.1f} GB)"
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
        """Return the device whose kernels and collectives contend: the chosen one, else the device for
        which the durations of the workload were estimated. None for recorded times and for an unknown
        device.
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
class _AstraRequest:
    """Arguments of mode ``astra``: configuration files, network backend, queues per dimension, binary."""

    system_config: str | Path | None = None
    network_config: str | Path | None = None
    memory_config: str | Path | None = None
    backend: Backend = "unaware"
    queues_per_dim: int = 1
    astra_bin: str | Path | None = None
    astra_timeout: float = DEFAULT_TIMEOUT_S

    def checked_job(self, mode: Mode, simulator: Simulator | None, system: object) -> _AstraJob | None:
        """Check the arguments before the workload is read; return None in mode ``hespas``. Raises what
        :meth:`options` raises, and ``UsageError`` for a system together with configuration files.
        """
        configuration = None
        if mode != "astra" or system is None:
            configuration = self.options(mode, simulator)
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
        return _AstraJob(self, simulator, binary, configuration)

    def options(self, mode: Mode, simulator: Simulator | None = None) -> AstraOptions | None:
        """Read the configuration files; return None in mode ``hespas``. Raises ``UsageError`` for a missing
        file, and for arguments of the other mode.
        """
        if mode not in {"hespas", "astra"}:
            raise UsageError(f"unknown mode {mode!r}", hint="use hespas or astra")
        if mode == "hespas":
            files = [self.system_config, self.network_config, self.memory_config, self.astra_bin]
            if any(files) or self.backend != "unaware" or self.queues_per_dim != 1:
                raise UsageError(
                    "options of ASTRA-sim (files, binary, `backend`, `queues_per_dim`) need mode astra",
                    hint="add `mode=astra`",
                )
            return None
        if simulator:
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
    """Checked request of mode ``astra``. ``configuration`` is read from the files; it is None for a system,
    whose files are written after the size of the job is known.
    """

    request: _AstraRequest
    simulator: Simulator | None
    binary: AstraBinary | None
    configuration: AstraOptions | None

    def options(self, system: System | None, diagnostics: Diagnostics) -> AstraOptions:
        """Return the configuration. For a sized system its files are written and read back."""
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
                    configuration = written.options("astra", self.simulator)
                except FormatError as error:  # users cannot look into our temporary files
                    raise UnsupportedError(
                        f"ASTRA-sim cannot run the system {system.name}: {error.message}", hint=error.hint
                    ) from error
        if configuration is None:
            raise InvariantError("mode astra without configuration files")
        return configuration
