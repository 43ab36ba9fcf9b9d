"""Mode ``astra`` of :func:`hespas.api.simulate`: a workload as the traces that ASTRA-sim would be given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hespas.api.preparation import Granularity, Mode, Preparation
from hespas.converters import ReadOptions, WriteOptions, is_flat, load_format
from hespas.converters.chakra.comm_groups import FILE_NAME
from hespas.converters.chakra.reader import read_chakra
from hespas.converters.chakra.writer import write_chakra
from hespas.estimators import MissingPolicy
from hespas.graph import Diagnostics, Workload
from hespas.graph.errors import FormatError, InvariantError, UnsupportedError, UsageError
from hespas.hardware import System
from hespas.simulator import Simulator
from hespas.simulator.astra import (
    AstraOptions,
    AstraSimulation,
    Backend,
    read_memory_config,
    read_network_config,
    read_system_config,
)
from hespas.simulator.astra.external import DEFAULT_TIMEOUT_S, AstraBinary, run_external
from hespas.simulator.astra.system_files import FILE_NAMES, astra_sim_files
from hespas.validators.checker.execution import run_traces

__all__ = ["AstraReady", "AstraRequest", "run_astra"]


@dataclass(frozen=True, slots=True)
class AstraRequest:
    """ASTRA-sim's configuration files, the backend of its network, and queues per dimension."""

    system_config: str | Path | None = None
    network_config: str | Path | None = None
    memory_config: str | Path | None = None
    backend: Backend = "unaware"
    queues_per_dim: int = 1
    astra_bin: str | Path | None = None
    astra_timeout: float = DEFAULT_TIMEOUT_S

    def check(self, mode: Mode, simulator: Simulator | None, system: object) -> AstraReady | None:
        """What is known before the workload is; None in mode ``hespas``. Raises as :meth:`options`, and
        ``UsageError`` where a system and files are given.
        """
        if mode != "astra" or system is None:
            read = self.options(mode, simulator)
            return None if read is None else AstraReady(self, simulator, self.binary(), read)
        if self.system_config or self.network_config or self.memory_config:
            raise UsageError(
                "`system` and configuration files of ASTRA-sim both say what runs the job",
                hint="`hespas hardware system NAME --to astra-sim DIR` writes files to change",
            )
        return AstraReady(self, simulator, self.binary(), None)

    def binary(self) -> AstraBinary | None:
        """The user's ASTRA-sim. Raises ``UsageError`` where it cannot be started."""
        if self.astra_bin is None:
            return None
        return AstraBinary(path=str(self.astra_bin), timeout_s=self.astra_timeout)

    def options(self, mode: Mode, simulator: Simulator | None = None) -> AstraOptions | None:
        """The files as read, None in mode ``hespas``. Raises ``UsageError`` where one is missing, or given in
        the other mode, as ``simulator`` is in this one.
        """
        stated = [self.system_config, self.network_config, self.memory_config, self.astra_bin]
        if mode not in {"hespas", "astra"}:
            raise UsageError(f"unknown mode {mode!r}", hint="one of: hespas, astra")
        if mode == "hespas":
            if any(stated) or self.backend != "unaware" or self.queues_per_dim != 1:
                raise UsageError(
                    "what is ASTRA-sim's (its files and binary, `backend`, `queues_per_dim`) belongs to mode "
                    "astra",
                    hint="add `mode=astra`",
                )
            return None
        if simulator:
            raise UsageError("`simulator` belongs to mode hespas", hint="ASTRA-sim has options of its own")
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
class AstraReady:
    """A request of mode ``astra`` that has been checked: ``read`` are its files, None where a system stands
    for them, which is written once the job's size is known.
    """

    request: AstraRequest
    simulator: Simulator | None
    binary: AstraBinary | None
    read: AstraOptions | None

    def options(self, system: System | None, diagnostics: Diagnostics) -> AstraOptions:
        """The files as read, or what a sized system is written as, read back."""
        if self.read is not None or system is None:
            return _there(self.read)
        with TemporaryDirectory(prefix="hespas-system-") as folder:
            for name, text in astra_sim_files(system, diagnostics).items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            of_system, of_network, of_memory = (Path(folder) / name for name in FILE_NAMES)
            written = replace(
                self.request, system_config=of_system, network_config=of_network, memory_config=of_memory
            )
            try:
                return _there(written.options("astra", self.simulator))
            except FormatError as error:  # the files are ours: nobody can look into them
                raise UnsupportedError(
                    f"{system.name} is none that ASTRA-sim runs: {error.message}", hint=error.hint
                ) from error


def _there(options: AstraOptions | None) -> AstraOptions:
    if options is None:
        raise InvariantError("mode astra without configuration files")
    return options


def run_astra(
    workload: Workload,
    options: AstraOptions,
    *,
    binary: AstraBinary | None = None,
    hardware: str | None,
    estimator: str,
    granularity: Granularity | None,
    missing: MissingPolicy,
    diagnostics: Diagnostics,
    progress: Callable[[int, int], None] | None,
) -> AstraSimulation:
    """The step as ASTRA-sim has it. What is no Chakra trace, or gets times of a device, is what
    ``hespas-convert`` would write for it: whole microseconds, messages for permutes, loops unrolled. Those
    files are given to ``binary``, a user's own ASTRA-sim, too.

    Raises what :func:`hespas.api.write` and :func:`hespas.simulator.astra.simulate_astra` do.
    """
    as_read = hardware is None and granularity is None and workload.metadata.get("format") == "chakra"
    if as_read and binary is None:
        return run_traces(workload, options, diagnostics)
    if as_read:
        return _run_written(workload, options, binary, diagnostics, progress)
    target = load_format("chakra")
    preparation = Preparation(
        granularity=granularity,
        missing=missing,
        hardware=hardware,
        estimator=estimator,
        target=target,
        folds=not is_flat(workload.metadata, load_format("stablehlo")),  # its first format decides
    )
    prepared, _ = preparation.run(workload, range(workload.num_ranks), diagnostics)
    return _run_written(prepared, options, binary, diagnostics, progress)


def _run_written(
    workload: Workload,
    options: AstraOptions,
    binary: AstraBinary | None,
    diagnostics: Diagnostics,
    progress: Callable[[int, int], None] | None,
) -> AstraSimulation:
    """Run the traces that are written for a workload, and give them to a user's ASTRA-sim if there is one."""
    with TemporaryDirectory(prefix="hespas-astra-") as folder:
        traces = Path(folder) / "traces"
        write_chakra(workload, traces, WriteOptions(progress=progress, directory=True), diagnostics)
        read = read_chakra(traces, ReadOptions(comm_groups=None), Diagnostics())
        done = run_traces(read, options, diagnostics)
        if binary is None:
            return done
        groups = traces / FILE_NAME
        said = run_external(binary, traces, groups if groups.exists() else None, options, read.num_ranks)
        return replace(done, external=said)
