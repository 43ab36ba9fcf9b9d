"""The JSON documents that scripts rely on; their schemas stand in ``hespas/schemas``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import cast

from hespas.api.conversion import Conversion, EventConservation
from hespas.api.estimation import NodeEstimates, class_totals, total_duration_ns
from hespas.api.io import put
from hespas.api.preparation import Dropped
from hespas.estimators.registry import ListedEstimator
from hespas.graph import Diagnostics
from hespas.hardware import Device
from hespas.simulator import Simulation

__all__ = [
    "Json",
    "conversion_document",
    "devices_document",
    "diagnostics_rows",
    "estimate_document",
    "estimators_document",
    "finite",
    "header",
    "plain",
    "write_json",
]

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]


def header(kind: str, inputs: Sequence[str]) -> dict[str, Json]:
    """What every document begins with: its schema, who wrote it, and from what."""
    from hespas import __version__

    return {"schema": f"hespas.{kind}/1", "hespas_version": __version__, "inputs": list(inputs)}


def finite(value: float) -> float | None:
    """NaN and infinity have no JSON spelling; what is unknown, or past what a number holds, is null."""
    return value if isfinite(value) else None


def plain(value: object) -> Json:
    """Plain JSON of a dataclass turned into a dictionary."""
    match value:
        case float():
            return finite(value)
        case dict():
            return {name: plain(each) for name, each in cast("dict[str, object]", value).items()}
        case list() | tuple():
            return [plain(each) for each in cast("Sequence[object]", value)]
        case None | bool() | int() | str():
            return value
        case _:
            raise TypeError(f"{type(value).__name__} has no JSON spelling")


def _finite_row(row: Mapping[str, float]) -> dict[str, Json]:
    return {name: finite(value) for name, value in row.items()}


def diagnostics_rows(diagnostics: Diagnostics) -> list[Json]:
    """One object per kept finding; ``count`` is the exact number of its code."""
    counts = diagnostics.counts()
    return [
        {
            "code": found.code,
            "severity": found.severity.value,
            "path": found.path,
            "location": found.location,
            "message": found.message,
            "rank": found.rank,
            "node": found.node,
            "count": counts[found.code],
        }
        for found in diagnostics
    ]


def conversion_document(done: Conversion) -> Mapping[str, Json]:
    """What a conversion did: ``hespas.convert/1``."""
    document = header("convert", [done.source])
    document["output"] = done.destination
    document["source_format"] = done.source_format
    document["target_format"] = done.target_format
    document["hardware"] = done.hardware
    document["estimator"] = done.estimator
    document["bytes_written"] = done.bytes_written
    document["diagnostics"] = diagnostics_rows(done.diagnostics)
    if done.events is not None:
        document["conservation"] = _event_conservation(done.events)
    account = done.conservation
    if account is not None:
        document["num_ranks"] = account.num_ranks
        document["rank_classes"] = account.rank_classes
        document["conservation"] = {
            "events_in": account.before.ops,
            "events_out": account.after.ops,
            "device_time_ns_in": finite(account.before.device_time_ns),
            "device_time_ns_out": finite(account.after.device_time_ns),
            "flops": {"in": finite(account.before.flops), "out": finite(account.after.flops)},
            "bytes": {
                "in": finite(account.before.bytes_moved),
                "out": finite(account.after.bytes_moved),
            },
            "totals_in": _finite_row(asdict(account.before)),
            "totals_out": _finite_row(asdict(account.after)),
            "dropped": _dropped_rows(account.dropped),
        }
    return document


def _event_conservation(account: EventConservation) -> dict[str, Json]:
    before, after = account.before, account.after
    return {
        "events_in": before.events,
        "events_out": after.events,
        "device_time_ns_in": finite(before.device_time_ns),
        "device_time_ns_out": finite(after.device_time_ns),
        "flops": {"in": None, "out": None},
        "bytes": {"in": finite(before.bytes_moved), "out": finite(after.bytes_moved)},
        "totals_in": _finite_row(asdict(before)),
        "totals_out": _finite_row(asdict(after)),
        "dropped": _dropped_rows(account.dropped),
    }


def _dropped_rows(dropped: Iterable[Dropped]) -> list[Json]:
    return [
        {
            "reason": each.reason,
            "count": each.count,
            "bytes_moved": each.bytes_moved,
            "message": each.message,
        }
        for each in dropped
    ]


def estimate_document(
    done: NodeEstimates,
    step: Simulation | None,
    *,
    source: str,
    hardware: str,
    estimator: str,
    diagnostics: Diagnostics,
) -> Mapping[str, Json]:
    """Times per operation class of each rank class, and the ``step`` they make: ``hespas.estimate/1``."""
    document = header("estimate", [source])
    document["hardware"] = hardware
    document["estimator"] = estimator
    document["granularity"] = done.granularity or ""
    document["diagnostics"] = diagnostics_rows(diagnostics)
    document["step_ns"] = finite(step.step_ns) if step else None
    document["step_low_ns"] = finite(step.low_ns) if step else None
    document["step_high_ns"] = finite(step.high_ns) if step else None
    classes: list[Json] = []
    of_class = zip(done.workload.classes, done.estimates, done.energies, strict=True)
    for index, (graph, estimated, energy) in enumerate(of_class):
        rows = class_totals(graph, estimated)
        classes.append(
            {
                "rank_class": index,
                "ranks": int((done.workload.rank_class == index).sum()),
                "coverage": finite(estimated.coverage),
                "duration_ns": finite(total_duration_ns(rows)),
                "energy": {name: finite(value) for name, value in asdict(energy).items()},
                "op_classes": [plain(asdict(row)) for row in rows],
            }
        )
    document["rank_classes"] = classes
    return document


def write_json(document: Json, path: Path, *, overwrite: bool = False) -> None:
    """Write a document, indented, at once or not at all; ``-`` is standard output. Raises ``OutputError``
    where it exists already, without ``overwrite``.
    """
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    put(path, lambda temporary: _write_text(temporary, text), overwrite=overwrite)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def estimators_document(rows: Sequence[ListedEstimator]) -> Mapping[str, Json]:
    """The list of estimators: ``hespas.estimators/1``."""
    document = header("estimators", [])
    document["diagnostics"] = []
    document["estimators"] = [{**asdict(row), "options": list(row.options)} for row in rows]
    return document


def devices_document(devices: Sequence[Device]) -> Mapping[str, Json]:
    """The devices that ship with the package: ``hespas.devices/1``. A peak is per device, dense or sparse as
    it says; ``hespas hardware show`` tells the sources.
    """
    document = header("devices", [])
    document["diagnostics"] = []
    document["devices"] = [_device_row(device) for device in devices]
    return document


def _device_row(device: Device) -> Mapping[str, Json]:
    return {
        "name": device.name,
        "vendor": device.vendor,
        "family": device.family,
        "kind": device.kind,
        "description": device.description,
        "aliases": list(device.aliases),
        "tdp_w": finite(device.tdp_w),
        "peaks": [
            {
                "unit": peak.unit,
                "dtype": peak.dtype,
                "density": peak.density,
                "flops_per_s": finite(peak.flops_per_s),
            }
            for peak in device.peaks
        ],
        "memories": [
            {
                "level": memory.level,
                "name": memory.name,
                "capacity_bytes": memory.capacity_bytes,
                "bandwidth_bytes_per_s": finite(memory.bandwidth_bytes_per_s),
            }
            for memory in device.memories
        ],
        "links": [
            {
                "name": link.name,
                "kind": link.kind,
                "bandwidth_bytes_per_s": finite(link.bandwidth_bytes_per_s),
                "latency_ns": finite(link.latency_ns),
                "links_per_device": link.links_per_device,
                "devices_per_domain": link.devices_per_domain,
            }
            for link in device.links
        ],
    }
