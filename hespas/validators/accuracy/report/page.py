"""What a report was made from: files by their hash, versions, and the devices' figures with their source."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Protocol, cast

from hespas._version import __version__
from hespas.files.documents import encoded, json_for_script
from hespas.files.streams import open_input
from hespas.graph import DTypeKind, Profile, Timeline, Workload, find_dtype
from hespas.graph.errors import MissingExtraError, UnsupportedError, UsageError
from hespas.hardware import Device, named_device, peak_for
from hespas.hardware.model import Unit
from hespas.validators.accuracy.baselines import BASELINES
from hespas.validators.accuracy.cases import Cases
from hespas.validators.accuracy.report.figures import (
    Names,
    class_names,
    curves_of,
    measured_lanes,
    points_of,
    shape_rows_of,
    simulated_lanes,
    waterfalls_of,
)
from hespas.validators.accuracy.report.rows import FEW_SHAPES
from hespas.validators.accuracy.report.texts import (
    headlines,
    limits_of,
    percent,
    rate_text,
    shown,
    time_text,
    verdict_of,
)
from hespas.validators.accuracy.result import Accuracy, SummaryRow, Thresholds

__all__ = ["FileFact", "Provenance", "accuracy_html", "plotly_script", "provenance_of"]

_CHUNK = 1 << 20
_MOST_FILES = 1_000
_PACKAGES = ("numpy", "scipy", "jaxlib", "plotly")


@dataclass(frozen=True, slots=True)
class FileFact:
    """One input as the user named it, with its size and SHA-256 in hexadecimal."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """``versions`` are of the programs, ``metadata`` what each profile says of itself (driver, framework),
    by its name; ``omitted`` counts files beyond those listed.
    """

    files: tuple[FileFact, ...] = ()
    devices: tuple[Device, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    omitted: int = 0


def provenance_of(
    inputs: Sequence[str] = (),
    devices: Sequence[Device] = (),
    metadata: Mapping[str, Mapping[str, str]] | None = None,
) -> Provenance:
    """Hash the inputs (files, or the files of folders; what is neither is left out) and ask for versions.

    Raises ``OSError`` where a file cannot be read.
    """
    files: list[tuple[str, Path]] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            files.extend((f"{name}/{each.relative_to(path)}", each) for each in sorted(path.rglob("*")))
        else:
            files.append((name, path))
    existing = [(name, path) for name, path in files if path.is_file()]
    return Provenance(
        files=tuple(_fact(name, path) for name, path in existing[:_MOST_FILES]),
        devices=tuple(devices),
        versions=_versions(),
        metadata=metadata or {},
        omitted=max(len(existing) - _MOST_FILES, 0),
    )


def _fact(name: str, path: Path) -> FileFact:
    digest = hashlib.sha256()
    size = 0
    with open_input(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileFact(name, size, digest.hexdigest())


def _versions() -> dict[str, str]:
    found = {"hespas": __version__, "Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


# The lines of the roofline figure: what a device could reach at most.

_LOOKED_AT = 500
"""Letters of a shape that are searched for element types."""

_UNITS: tuple[Unit, ...] = ("matrix", "vector")
_ELEMENT_TYPE = re.compile(r"\b(?:\d+x|\?x)*([a-z][a-zA-Z0-9]{1,15})\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ceiling:
    """A rate, and which unit and element types have it."""

    name: str
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Roof:
    """The ceilings of a device for the element types that were measured, and its main memory."""

    hardware: str
    memory: str
    bandwidth_bytes_per_s: float | None
    ceilings: tuple[_Ceiling, ...]


def _roofs_of(devices: Sequence[Device], cases: Sequence[Cases]) -> Iterator[_Roof]:
    """One per device that something was measured on."""
    for device in devices:
        group = [each for each in cases if each.hardware == device.name]
        if not group:
            continue
        memory = device.main_memory
        bandwidth = memory.bandwidth_bytes_per_s
        yield _Roof(
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


def _ceilings(device: Device, element_types: Sequence[str]) -> Iterator[_Ceiling]:
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
        yield _Ceiling(name=f"{unit} {', '.join(names)}", flops_per_s=rate)


_MOST_TIMELINES = 8
_LISTED = 200
"""Rows of any other table; the rest is counted on the page."""

_MOST_JOINS = 2000
"""Instructions with what they carry out, over all sources."""

_TEMPLATES = "hespas.validators.accuracy.report"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """Errors of one estimator on one device at one level, with the rows of the baselines beside."""

    hardware: str
    estimator: str
    level: str
    rows: tuple[tuple[SummaryRow, tuple[SummaryRow | None, ...]], ...]


def accuracy_html(
    done: Accuracy,
    limits: Thresholds,
    provenance: Provenance | None = None,
    *,
    profiles: Sequence[Profile] = (),
    timeline: Timeline | None = None,
    program: Workload | None = None,
) -> str:
    """The page; it loads nothing, and names from files are text in it, whatever they hold.

    ``provenance`` is :func:`provenance_of` the inputs unless given; give it where a device is described by a
    file of the user's. ``profiles`` and ``timeline`` (of ``program``, which names its nodes) are drawn as
    what ran when. Of very many cases some are shown as points, and the page says so: it stays below 8 MB.
    Raises ``MissingExtraError`` without plotly.
    """
    import jinja2
    from markupsafe import Markup

    plotly = plotly_script()
    if provenance is None:
        told = {each.name: each.metadata for each in profiles}
        provenance = provenance_of(done.inputs, _known_devices(done), told)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(_TEMPLATES, "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(shown=shown, percent=percent, time=time_text, rate=rate_text)
    checked = limits_of(done, limits)
    data = _data(done, provenance.devices, profiles, timeline, program)
    return environment.get_template("report.html").render(
        version=__version__,
        done=done,
        limits=checked,
        verdict=verdict_of(checked),
        headlines=list(headlines(done)),
        tables=_tables(done),
        baselines=BASELINES,
        few=FEW_SHAPES,
        most=_LISTED,
        most_joins=max(_MOST_JOINS // max(len(done.joins), 1), 20),
        counts=done.diagnostics.counts(),
        diagnostics=list(done.diagnostics),
        provenance=provenance,
        data=data,
        json=Markup(json_for_script(encoded(data))),
        plotly=Markup(plotly),
        style=Markup(_template("report.css")),
        script=Markup(_template("report.js")),
    )


def _template(name: str) -> str:
    return (files(_TEMPLATES) / "templates" / name).read_text(encoding="utf-8")


def _known_devices(done: Accuracy) -> list[Device]:
    """Devices that the comparison names and this package describes."""
    found: list[Device] = []
    for name in dict.fromkeys(each.hardware for each in done.cases):
        try:
            found.append(named_device(name))
        except UsageError:
            continue
    return found


def _data(
    done: Accuracy,
    devices: Sequence[Device],
    profiles: Sequence[Profile],
    timeline: Timeline | None,
    program: Workload | None,
) -> dict[str, object]:
    """What the script of the page reads; ``estimators`` are those asked for, then the baselines."""
    names = Names()
    estimators = list(dict.fromkeys((*done.estimators, *BASELINES)))
    lanes = [measured_lanes(profile, names) for profile in profiles[:_MOST_TIMELINES]]
    return {
        "asked": len(done.estimators),
        "few": FEW_SHAPES,
        "estimators": [shown(name) for name in estimators],
        "classes": class_names(done),
        "sources": [{"name": shown(each.source), "hardware": shown(each.hardware)} for each in done.cases],
        "noise": {shown(name): floor.mape for name, floor in done.noise.items()},
        "roofs": list(_roofs_of(devices, done.cases)),
        "points": points_of(done, estimators, names),
        "shapes": shape_rows_of(done, estimators, names),
        "curves": list(curves_of(done, estimators)),
        "waterfalls": list(waterfalls_of(done, estimators, names)),
        "timelines": [each for each in lanes if each is not None],
        "simulated": None if timeline is None else simulated_lanes(timeline, program, names),
        "names": names.texts(),
    }


def _tables(done: Accuracy) -> list[_Table]:
    """Per device and asked estimator: shapes, then instances."""
    rows = {(row.hardware, row.estimator, row.level, row.op_class, row.size): row for row in done.summary}
    return [
        _Table(
            hardware=hardware,
            estimator=estimator,
            level=level,
            rows=tuple(
                (row, tuple(rows.get((hardware, name, level, row.op_class, row.size)) for name in BASELINES))
                for row in done.summary
                if (row.hardware, row.estimator, row.level) == (hardware, estimator, level)
            ),
        )
        for hardware in dict.fromkeys(row.hardware for row in done.summary)
        for estimator in done.estimators
        for level in ("shape", "instance")
    ]


class _PlotlyOffline(Protocol):
    """What is used of ``plotly.offline``, which ships no types."""

    def get_plotlyjs(self) -> str: ...


def plotly_script() -> str:
    """The text of plotly.js as the installed plotly package brings it along.

    Raises ``MissingExtraError`` where that is not installed.
    """
    try:
        offline = cast("_PlotlyOffline", import_module("plotly.offline"))
    except ImportError as error:
        raise MissingExtraError("the HTML report", "report") from error
    # Inside a string or a pattern of the script, "<\/" means "</".
    return offline.get_plotlyjs().replace("</script", "<\\/script").replace("<!--", "<\\!--")
