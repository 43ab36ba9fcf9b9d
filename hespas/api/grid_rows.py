"""Grids of simulations: a TOML file with a key per axis (a list of values, or one value for all rows), and
the simulation of one row.

The file is untrusted data: the files that it names must be in its folder, and estimators that run programs
need permission.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import nan, prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast, get_args

import msgspec
import numpy as np
from msgspec import structs

from hespas.api.documents import Finding, findings
from hespas.api.io import opened_program
from hespas.api.lowering import STEP_ESTIMATOR, Granularity, Missing, Mode
from hespas.api.simulation import simulate
from hespas.converters import ReadOptions
from hespas.estimators.registry import check_stated_estimator
from hespas.files.documents import Count, Figure, read_toml
from hespas.files.output import place_immediately
from hespas.files.trust import file_in_folder_of
from hespas.graph import Diagnostics, DType, Workload, step_facts
from hespas.graph.columns import DTypeKind, find_dtype
from hespas.graph.errors import FormatError, HespasError, MissingExtraError, UsageError, clipped, exit_code
from hespas.graph.passes import InPrecision
from hespas.hardware import is_path, load_device, load_system, write_device
from hespas.simulator.astra import Backend, read_network_config

__all__ = ["AXES", "Grid", "GridRow", "GridValue", "grid_row", "read_grid", "with_scaled_links"]

GridValue = str | int | float

_MAX_ROWS = 10_000
_MAX_FACTOR = 1e9
_EXAMPLE = 'a line is an axis: hardware = ["H100-SXM", "B200-SXM"]'


@dataclass(frozen=True, slots=True)
class _Axis:
    """Allowed values of one key (axis) of a grid file. If ``is_path`` is True, the values are files in the
    folder of the grid file.
    """

    expected: str
    allows: Callable[[GridValue], bool]
    is_path: bool = False


def _one_of(*names: str) -> _Axis:
    return _Axis(f"one of {', '.join(names)}", lambda value: value in names)


_NAME_OR_FILE_AXES = ("hardware", "system")
_NAME = _Axis("a name", lambda value: isinstance(value, str) and bool(value))
_FILE = _Axis("a path", lambda value: isinstance(value, str) and bool(value), is_path=True)
_COUNT = _Axis("a whole number", lambda value: isinstance(value, int) and value >= 1)
_FACTOR = _Axis(
    "a factor from 1e-9 to 1e9",
    lambda value: isinstance(value, (int, float)) and 1 / _MAX_FACTOR <= value <= _MAX_FACTOR,
)
AXES: Mapping[str, _Axis] = {
    "source": _FILE,
    "hardware": _NAME,
    "estimator": _NAME,
    "step_factor": _NAME,
    "precision": _Axis(
        "a floating-point type such as bf16, tf32 or f32_full (IEEE)",
        lambda value: (
            value == "f32_full"
            or (isinstance(dtype := find_dtype(str(value)), DType) and dtype.kind is DTypeKind.FLOAT)
        ),
    ),
    "link_bandwidth": _FACTOR,
    "num_devices": _COUNT,
    "num_replicas": _COUNT,
    "granularity": _one_of(*get_args(Granularity)),
    "missing": _one_of(*get_args(Missing)),
    "mode": _one_of(*get_args(Mode)),
    "system": _NAME,
    "system_config": _FILE,
    "network_config": _FILE,
    "memory_config": _FILE,
    "backend": _one_of(*get_args(Backend)),
    "queues_per_dim": _COUNT,
}
"""Keys of the file. ``precision`` f32 multiplies as the program's framework does by default: IEEE f32 in
PyTorch, TF32 in XLA on devices with such units. ``link_bandwidth`` is a factor on the bandwidth of all
links; with a factor other than 1, collective times follow from the links and not from measurements.
``source`` may list one program per parallel layout.
"""

_SIMULATE_ARGUMENTS = (
    "hardware", "system", "estimator", "step_factor", "granularity", "mode", "system_config",
    "network_config", "memory_config", "backend", "queues_per_dim",
)  # fmt: skip
"""Settings that are arguments of :func:`hespas.api.simulate` with the same name."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Parsed grid file: the axes in the order of the file, and the values that all rows share."""

    path: str
    axes: Mapping[str, tuple[GridValue, ...]]
    shared: Mapping[str, GridValue]

    def rows(self) -> list[dict[str, GridValue]]:
        """Return the settings of all combinations of the axes, one row each; the last axis varies fastest."""
        return [
            dict(self.shared) | dict(zip(self.axes, values, strict=True))
            for values in product(*self.axes.values())
        ]


def read_grid(path: Path, source: Path | None = None, estimator: str | None = None) -> Grid:
    """Read a grid file. ``source`` is the workload if the file does not name one. ``estimator`` is the
    estimator that the user typed. If the file names no estimator, it is used for all rows; otherwise it
    permits the same estimator in the file.

    Raises ``FormatError`` with the key, the expected value and a fix; ``BoundaryError`` for a file outside of
    the folder, or an estimator that needs permission.
    """
    content = read_toml(path, "a grid", where="give a TOML file with axes", example=_EXAMPLE)
    axes: dict[str, tuple[GridValue, ...]] = {}
    shared: dict[str, GridValue] = {}
    for key, value in content.items():
        if key not in AXES:
            raise FormatError(
                f"unknown axis '{clipped(key)}'", path=str(path), position=key,
                hint=f"use one of {', '.join(AXES)}",
            )  # fmt: skip
        if isinstance(value, list):
            items = enumerate(cast("list[object]", value))
            values = tuple(
                _checked_value(path, key, item, estimator, f"{key}[{index}]") for index, item in items
            )
            if not values or len(set(values)) < len(values):
                repeated = next((clipped(repr(value)) for value in values if values.count(value) > 1), "")
                fault = f"lists {repeated} twice" if values else "has an empty list"
                raise FormatError(f"{key} {fault}", path=str(path), position=key, hint=_EXAMPLE)
            axes[key] = values
        else:
            shared[key] = _checked_value(path, key, value, estimator, key)
    if estimator is not None:
        if "estimator" in axes:
            estimators = axes["estimator"]
        else:
            estimators = (shared.setdefault("estimator", estimator),)
        if estimator not in estimators:
            raise UsageError(
                f"`estimator={clipped(estimator)}` is not one of the estimators in {path}",
                hint="leave `estimator` out: the estimators of the file are used",
            )
    if "source" not in axes and "source" not in shared:
        if source is None:
            raise FormatError(
                "the grid names no workload",
                path=str(path),
                hint='give SRC, or source = ["a.mlir", "b.mlir"]',
            )
        shared["source"] = str(source)
    count = prod(map(len, axes.values()))
    if count > _MAX_ROWS:
        message = f"the axes have {count:,} combinations, more than the limit of {_MAX_ROWS:,}"
        raise FormatError(message, path=str(path), hint="give fewer values")
    return Grid(str(path), axes, shared)


def _checked_value(path: Path, key: str, value: object, estimator: str | None, position: str) -> GridValue:
    axis = AXES[key]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not axis.allows(value):
        raise FormatError(
            f"{key} has the value {clipped(repr(value))}", path=str(path), position=key,
            hint=f"write {axis.expected}, or a list of such",
        )  # fmt: skip
    if not isinstance(value, str):
        return value
    if key == "estimator" and value != estimator:
        check_stated_estimator(value, path, position)
    is_file = axis.is_path or (key in _NAME_OR_FILE_AXES and is_path(value))
    return str(file_in_folder_of(path, value, position)) if is_file else value


_DEVICE_COPY, _NETWORK_COPY = "device.toml", "network.yml"
_SETTING_OF_COPY = {_DEVICE_COPY: "hardware", _NETWORK_COPY: "network_config"}


class GridRow(msgspec.Struct, frozen=True, kw_only=True):
    """Simulated row of a grid. ``settings`` are the values of the axes. Times are of the rank that finishes
    last; ``critical_ns`` is the time per operation class on its critical path. ``correction`` is the step
    factor that the step time includes (1: none). ``basis`` has the shares of the evidence behind the
    estimates. If the row could not be simulated, ``fault`` is the error, and
    ``exit_code`` the exit code of ``hespas simulate`` for that row. ``diagnostics`` has the first diagnostic
    of each code.
    """

    settings: dict[str, GridValue]
    step_ns: Figure = nan
    step_low_ns: Figure = nan
    step_high_ns: Figure = nan
    correction: Figure = nan
    basis: str = ""
    compute_ns: Figure = nan
    comm_ns: Figure = nan
    exposed_comm_ns: Figure = nan
    critical_ns: dict[str, Figure] = {}
    ranks: Count = 0
    is_lower_bound: bool = False
    fault: str = ""
    exit_code: Count = 0
    diagnostics: list[Finding] = []


def grid_row(
    settings: Mapping[str, GridValue], shown: Mapping[str, GridValue], options: ReadOptions
) -> GridRow:
    """Read a workload with ``options`` and simulate it with the ``settings`` of one row. ``shown`` are the
    settings that the row reports. An error of the input becomes the ``fault`` of the row.
    """
    diagnostics = Diagnostics(keep=1)
    counts: dict[str, Any] = {
        key: value for key in ("num_devices", "num_replicas") if isinstance(value := settings.get(key), int)
    }
    with TemporaryDirectory(prefix="hespas-grid-") as folder:
        try:
            reading = replace(options, **counts)
            _, workload = opened_program(str(settings["source"]), None, reading, diagnostics)
            if "precision" in settings:
                workload = _in_precision(workload, str(settings["precision"]), settings, diagnostics)
            arguments: dict[str, Any] = {
                name: settings[name] for name in _SIMULATE_ARGUMENTS if name in settings
            }
            if "missing" in settings:
                arguments["on_unknown"] = settings["missing"]
            arguments.setdefault("estimator", STEP_ESTIMATOR)
            factor = float(settings.get("link_bandwidth", 1))
            if factor != 1:
                arguments |= with_scaled_links(arguments, factor, Path(folder))
                if "hardware" in arguments:
                    text = (
                        "collective times of rows with another factor than 1 follow from the links, not from "
                        "measurements"
                    )
                    diagnostics.warning("grid.link-estimates", "link_bandwidth", text)
            result = simulate(workload, diagnostics=diagnostics, **arguments)
        except HespasError as error:
            path = error.path or ""
            if path.startswith(folder):  # name the file of the setting, not its copy with scaled links
                path = str(settings.get(_SETTING_OF_COPY.get(Path(path).name, ""), ""))
            fault = f"{path}: {error.message}" if path else error.message
            if isinstance(error, MissingExtraError):
                fault = f"{fault}: {error.hint}"
            return GridRow(
                settings=dict(shown),
                fault=fault,
                exit_code=exit_code(error),
                diagnostics=findings(diagnostics),
            )
    timeline = result.timeline
    present = np.flatnonzero(timeline.shown_by >= 0)
    last = int(present[np.argmax(timeline.finish_ns[present])])
    last_class = max(result.classes, key=lambda of_class: of_class.finish_ns)
    return GridRow(
        settings=dict(shown),
        step_ns=result.step_ns,
        step_low_ns=result.interval_ns[0],
        step_high_ns=result.interval_ns[1],
        correction=result.correction,
        basis=result.basis_text,
        compute_ns=float(timeline.resource_ns("compute")[last]),
        comm_ns=float(timeline.resource_ns("communication")[last]),
        exposed_comm_ns=float(timeline.exposed_comm_ns[last]),
        critical_ns=dict(last_class.critical_path.class_ns),
        ranks=len(present),
        is_lower_bound=result.is_lower_bound,
        diagnostics=findings(diagnostics),
    )


def _in_precision(
    workload: Workload, name: str, settings: Mapping[str, GridValue], diagnostics: Diagnostics
) -> Workload:
    if "hardware" not in settings and "system" not in settings:
        raise UsageError(
            "precision needs `hardware`",
            hint="add `hardware`: recorded times cannot change with the precision",
        )
    convert_graph = InPrecision.of(name)
    facts = step_facts(workload.metadata)
    return replace(
        workload,
        classes=tuple(convert_graph(graph, diagnostics) for graph in workload.classes),
        metadata={**workload.metadata, **(replace(facts, dtype=name).metadata() if facts else {})},
    )


def with_scaled_links(arguments: Mapping[str, Any], factor: float, folder: Path) -> dict[str, object]:
    """Return the device, the system and ASTRA-sim's network with the bandwidth of all links times
    ``factor``.
    """
    changed: dict[str, object] = {}
    if "hardware" in arguments:
        device = load_device(arguments["hardware"])
        links = tuple(
            structs.replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor)
            for link in device.links
        )
        # fits of collectives are of the measured links
        fits = tuple(fit for fit in device.fits if fit.kind != "collective")
        device = replace(device, links=links, own_fits=fits, fits_of="")
        with place_immediately():
            changed["hardware"] = str(write_device(device, folder / _DEVICE_COPY))
    if "network_config" in arguments:
        network = read_network_config(Path(arguments["network_config"]))
        lists = {
            "topology": network.topology,
            "npus_count": network.npus,
            "bandwidth": tuple(repr(bandwidth * factor) for bandwidth in network.bandwidth_gib_per_s),
            "latency": network.latency_ns,
        }
        target = folder / _NETWORK_COPY
        lines = [f"{key}: [{', '.join(map(str, values))}]\n" for key, values in lists.items()]
        target.write_text("".join(lines), encoding="utf-8")
        changed["network_config"] = target
    if "system" in arguments:
        system = load_system(arguments["system"])
        dimensions = tuple(
            structs.replace(
                dimension,
                bandwidth_bytes_per_s=dimension.bandwidth_bytes_per_s * factor,
                down_bandwidth_bytes_per_s=dimension.down_bandwidth_bytes_per_s * factor,
            )
            for dimension in system.dimensions
        )
        changed["system"] = replace(system, dimensions=dimensions)
    if not changed:
        message = "link_bandwidth needs `hardware`, `system` or `network_config`"
        raise UsageError(message, hint="add one of them, or remove link_bandwidth")
    return changed
