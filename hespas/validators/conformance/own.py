"""Hespas's own commands as a tool under test: reader, ``check``, and ``simulate`` in mode ``astra``."""

from __future__ import annotations

from pathlib import Path

from hespas.converters import ReadOptions, load_format
from hespas.converters.chakra.contract import AttributeFacts
from hespas.converters.chakra.wire.codec import iter_columns
from hespas.graph import Diagnostics, Workload
from hespas.graph.errors import CheckFailedError, FormatError, UnsupportedError, UsageError
from hespas.simulator.astra import AstraOptions
from hespas.simulator.astra.configuration import read_memory_config, read_network_config, read_system_config
from hespas.validators.checker import CheckOptions, check
from hespas.validators.checker.execution import run_traces
from hespas.validators.conformance.case import Case, Counts

__all__ = ["own_counts", "own_findings", "own_times"]

_REFUSED = (CheckFailedError, FormatError, UnsupportedError, UsageError)


def own_counts(path: Path) -> Counts | None:
    """Return the counts of one trace file; None if the reader refuses it."""
    nodes = dependencies = comm_bytes = duration_us = 0
    try:
        for columns, _ in iter_columns(path, Diagnostics()):
            nodes += len(columns)
            dependencies += len(columns.data_deps) + len(columns.ctrl_deps)
            comm_bytes += int(AttributeFacts.of(columns.attrs).integers("comm_size").value.sum())
            duration_us += int(columns.duration_micros.sum())
    except _REFUSED:
        return None
    return Counts(nodes, dependencies, comm_bytes, duration_us)


def own_findings(folder: Path, case: Case) -> tuple[bool, frozenset[str]]:
    """Return whether ``check`` calls a job valid, and the codes that it reports."""
    options = CheckOptions()
    if case.profile == "astra-sim":
        options = CheckOptions(
            system_config=folder / "system.json", network_config=folder / "network.yml",
            memory_config=folder / "memory.json", backend=case.backend,
        )  # fmt: skip
    result = check([folder], case.profile, options)
    return result.valid, frozenset(result.counts) | {violation.code for violation in result.violations}


def own_times(folder: Path, case: Case) -> list[int] | str:
    """Return the time of each rank in mode ``astra``, in ns; the reason if the job does not finish."""
    entry = load_format("chakra")
    assert entry.read is not None
    notes = Diagnostics()
    try:
        options = AstraOptions(
            system=read_system_config(folder / "system.json"),
            network=read_network_config(folder / "network.yml"),
            memory=read_memory_config(folder / "memory.json"),
            backend=case.backend,
        )  # fmt: skip
        workload = entry.read(folder, ReadOptions(), notes)
        assert isinstance(workload, Workload)
        times: list[int] = run_traces(workload, options, notes).statistics.finish_ns.tolist()
    except _REFUSED as error:
        return error.message
    return times
