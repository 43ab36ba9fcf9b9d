"""The lines of the roofline figure: what a device could reach at most."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from hespas.graph import DTypeKind, find_dtype
from hespas.graph.errors import UnsupportedError
from hespas.hardware import Device, peak_for
from hespas.hardware.model import Unit
from hespas.validators.accuracy.cases import Cases
from hespas.validators.accuracy.report.texts import shown

__all__ = ["Ceiling", "Roof", "roofs_of"]

_LOOKED_AT = 500
"""Letters of a shape that are searched for element types."""

_UNITS: tuple[Unit, ...] = ("matrix", "vector")
_ELEMENT_TYPE = re.compile(r"\b(?:\d+x|\?x)*([a-z][a-zA-Z0-9]{1,15})\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """A rate, and which unit and element types have it."""

    name: str
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """The ceilings of a device for the element types that were measured, and its main memory."""

    hardware: str
    memory: str
    bandwidth_bytes_per_s: float | None
    ceilings: tuple[Ceiling, ...]


def roofs_of(devices: Sequence[Device], cases: Sequence[Cases]) -> Iterator[Roof]:
    """One per device that something was measured on."""
    for device in devices:
        group = [each for each in cases if each.hardware == device.name]
        if not group:
            continue
        memory = device.main_memory
        bandwidth = memory.bandwidth_bytes_per_s
        yield Roof(
            hardware=shown(device.name),
            memory=memory.name,
            bandwidth_bytes_per_s=bandwidth if isfinite(bandwidth) else None,
            ceilings=tuple(_ceilings(device, _element_types(group))),
        )


def _element_types(cases: Sequence[Cases]) -> list[str]:
    """Element types that the shapes name, sorted: floating-point ones only, where there are any."""
    words = {
        word for each in cases for text in each.shapes for word in _ELEMENT_TYPE.findall(text[:_LOOKED_AT])
    }
    # Names of operations hold words like "float": only what shapes spell is a type.
    found = [
        known for word in sorted(words) if (known := find_dtype(word)) is not None and known.name == word
    ]
    real = [known.name for known in found if known.kind is DTypeKind.FLOAT]
    return real or [known.name for known in found]


def _ceilings(device: Device, element_types: Sequence[str]) -> Iterator[Ceiling]:
    """The rates of those types, types of one rate together; all dense rates where no type is known."""
    rates: dict[tuple[Unit, float], list[str]] = {}
    for unit in _UNITS:
        for name in element_types:
            try:
                found = peak_for(device, unit, name)
            except UnsupportedError:
                continue
            if found.peak.unit == unit:
                rates.setdefault((unit, found.flops_per_s), []).append(name)
    if not rates:
        for peak in device.peaks:
            if peak.density == "dense":
                rates.setdefault((peak.unit, peak.flops_per_s), []).append(peak.dtype)
    for (unit, rate), names in sorted(rates.items(), key=lambda entry: -entry[0][1]):
        yield Ceiling(name=f"{unit} {', '.join(names)}", flops_per_s=rate)
