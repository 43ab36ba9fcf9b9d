"""One row of a grid: its settings, simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from hespas.api.grid_file import Value
from hespas.api.io import opened_program
from hespas.api.preparation import STEP_ESTIMATOR
from hespas.api.simulation import SimulationResult, simulate
from hespas.converters import ReadOptions
from hespas.files.documents import Count, Figure
from hespas.files.output import placed_at_once
from hespas.graph import Diagnostics, Workload, step_facts
from hespas.graph.errors import HespasError, UsageError, exit_code
from hespas.graph.passes import InPrecision
from hespas.hardware import Device, System, load_device, load_system, write_device
from hespas.simulator.astra import read_network_config

__all__ = ["GridRow", "grid_row"]

_PASSED = (
    "hardware", "system", "estimator", "granularity", "missing", "mode", "system_config",
    "network_config", "memory_config", "backend", "queues_per_dim",
)  # fmt: skip
"""Settings that are arguments of :func:`hespas.api.simulate` by the same name."""


class GridRow(msgspec.Struct, frozen=True, kw_only=True):
    """``settings`` are the values of the axes. Times are of the rank that is done last, ``critical_ns`` those
    of operation classes on its critical path; ``fault`` says why there are none, and ``exit_code`` what
    ``hespas simulate`` of this row alone would end with.
    """

    settings: dict[str, Value]
    step_ns: Figure = nan
    step_low_ns: Figure = nan
    step_high_ns: Figure = nan
    compute_ns: Figure = nan
    comm_ns: Figure = nan
    exposed_comm_ns: Figure = nan
    critical_ns: dict[str, Figure] = {}
    ranks: Count = 0
    is_lower_bound: bool = False
    fault: str = ""
    exit_code: Count = 0


def grid_row(settings: Mapping[str, Value], shown: Mapping[str, Value]) -> GridRow:
    """Simulate one row; ``shown`` of its settings are told in it. Faults of the input are the row's own."""
    with TemporaryDirectory(prefix="hespas-grid-") as folder:
        try:
            done = _simulated(settings, Path(folder))
        except HespasError as error:
            own = not error.path or error.path.startswith(folder)
            where = "" if own else f"{error.path}: "
            fault = f"{where}{error.message}"
            return GridRow(settings=dict(shown), fault=fault, exit_code=exit_code(error))
    timeline = done.timeline
    here = np.flatnonzero(timeline.shown_by >= 0)
    last = int(here[np.argmax(timeline.finish_ns[here])])
    return GridRow(
        settings=dict(shown),
        step_ns=done.step_ns,
        step_low_ns=done.low_ns,
        step_high_ns=done.high_ns,
        compute_ns=float(timeline.resource_ns("compute")[last]),
        comm_ns=float(timeline.resource_ns("communication")[last]),
        exposed_comm_ns=float(timeline.exposed_comm_ns[last]),
        critical_ns=dict(max(done.classes, key=lambda found: found.finish_ns).critical_path.class_ns),
        ranks=len(here),
        is_lower_bound=done.is_lower_bound,
    )


def _simulated(settings: Mapping[str, Value], folder: Path) -> SimulationResult:
    diagnostics = Diagnostics()
    reading = ReadOptions(
        num_devices=_number(settings.get("num_devices")), num_replicas=_number(settings.get("num_replicas"))
    )
    _, workload = opened_program(str(settings["source"]), None, reading, diagnostics)
    if "precision" in settings:
        workload = _in_precision(workload, str(settings["precision"]), settings, diagnostics)
    given: dict[str, Any] = {name: settings[name] for name in _PASSED if name in settings}
    given.setdefault("estimator", STEP_ESTIMATOR)
    if settings.get("link_bandwidth", 1) != 1:
        given |= _with_links(given, float(settings["link_bandwidth"]), folder)
    return simulate(workload, diagnostics=diagnostics, **given)


def _number(value: Value | None) -> int | None:
    return value if isinstance(value, int) else None


def _in_precision(
    workload: Workload, name: str, settings: Mapping[str, Value], diagnostics: Diagnostics
) -> Workload:
    if "hardware" not in settings and "system" not in settings:
        raise UsageError("precision needs `hardware`", hint="recorded times are of one precision")
    step = InPrecision.of(name)
    facts = step_facts(workload.metadata)
    return replace(
        workload,
        classes=tuple(step(graph, diagnostics) for graph in workload.classes),
        metadata={**workload.metadata, **(replace(facts, dtype=name).metadata() if facts else {})},
    )


def _with_links(given: Mapping[str, Any], factor: float, folder: Path) -> dict[str, object]:
    """Return the device with links of another bandwidth, and ASTRA-sim's network with another one."""
    changed: dict[str, object] = {}
    if "hardware" in given:
        device = _scaled(load_device(given["hardware"]), factor)
        with placed_at_once():
            changed["hardware"] = str(write_device(device, folder / "device.toml"))
    if "network_config" in given:
        changed["network_config"] = _scaled_network(Path(given["network_config"]), factor, folder)
    if "system" in given:
        changed["system"] = _scaled_system(load_system(given["system"]), factor)
    if not changed:
        hint = "or `system`, or `network_config`"
        raise UsageError("link_bandwidth needs `hardware`", hint=hint)
    return changed


def _scaled(device: Device, factor: float) -> Device:
    """Fits of collectives are of the links that were measured, and are left out."""
    links = tuple(
        structs.replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor)
        for link in device.links
    )
    fits = tuple(fit for fit in device.fits if fit.kind != "collective")
    return replace(device, links=links, own_fits=fits, fits_of="")


def _scaled_system(system: System, factor: float) -> System:
    """Both directions of every dimension; unknown ones stay unknown."""
    dimensions = tuple(
        structs.replace(
            each,
            bandwidth_bytes_per_s=each.bandwidth_bytes_per_s * factor,
            down_bandwidth_bytes_per_s=each.down_bandwidth_bytes_per_s * factor,
        )
        for each in system.dimensions
    )
    return replace(system, dimensions=dimensions)


def _scaled_network(path: Path, factor: float, folder: Path) -> Path:
    network = read_network_config(path)
    lists = {
        "topology": network.topology,
        "npus_count": network.npus,
        "bandwidth": tuple(repr(each * factor) for each in network.bandwidth_gib_per_s),
        "latency": network.latency_ns,
    }
    lines = [f"{key}: [{', '.join(map(str, values))}]\n" for key, values in lists.items()]
    target = folder / "network.yml"
    target.write_text("".join(lines), encoding="utf-8")
    return target
