"""HTML page of a comparison, with the provenance of its inputs: file hashes, versions and device figures."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Protocol, cast

from hespas._version import __version__
from hespas.files.documents import encode_json, json_for_script
from hespas.files.streams import open_input
from hespas.graph import Profile, Timeline, Workload
from hespas.graph.errors import MissingExtraError, UsageError
from hespas.hardware import Device, named_device
from hespas.report.texts import shown
from hespas.validators.accuracy.baselines import BASELINES
from hespas.validators.accuracy.report.figures import (
    NameTable,
    class_names,
    curves_of,
    measured_lanes,
    points_of,
    roofs_of,
    shape_rows_of,
    simulated_lanes,
    waterfalls_of,
)
from hespas.validators.accuracy.report.tables import FEW_SHAPES
from hespas.validators.accuracy.report.texts import (
    limits_of,
    percent,
    rate_text,
    summary_lines,
    time_text,
    verdict_of,
)
from hespas.validators.accuracy.result import Accuracy, SummaryRow, Thresholds

__all__ = ["FileFact", "ReportProvenance", "accuracy_html", "plotly_script", "provenance_of"]

_CHUNK = 1 << 20
_MOST_FILES = 1_000
_PACKAGES = ("numpy", "scipy", "jaxlib", "plotly")
_MOST_TIMELINES = 8
_MOST_ROWS = 200
"""Most rows of other tables; the page shows the number of the remaining rows."""
_MOST_JOINS = 2000
"""Most instructions with their operations, over all sources."""
_TEMPLATES = "hespas.validators.accuracy.report"


@dataclass(frozen=True, slots=True)
class FileFact:
    """Input file as the user named it, with its size and SHA-256 in hexadecimal."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportProvenance:
    """Origin of a report: input files, devices, program versions, and metadata of each profile by name.

    The metadata holds, for example, driver and framework. ``omitted`` counts the files that are not listed.
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
) -> ReportProvenance:
    """Return the hashes of the inputs (files, or the files of folders) and the versions of programs.

    Inputs that are neither are skipped. Raises ``OSError`` for a file that cannot be read.
    """
    paths: list[tuple[str, Path]] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            paths.extend((f"{name}/{file.relative_to(path)}", file) for file in sorted(path.rglob("*")))
        else:
            paths.append((name, path))
    existing = [(name, path) for name, path in paths if path.is_file()]
    facts: list[FileFact] = []
    for name, path in existing[:_MOST_FILES]:
        digest = hashlib.sha256()
        size = 0
        with open_input(path) as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
        facts.append(FileFact(name, size, digest.hexdigest()))
    versions = {"hespas": __version__, "Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return ReportProvenance(
        files=tuple(facts),
        devices=tuple(devices),
        versions=versions,
        metadata=metadata or {},
        omitted=max(len(existing) - _MOST_FILES, 0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ErrorTable:
    """Errors of one estimator on one device at one level, with the rows of the baselines."""

    hardware: str
    estimator: str
    level: str
    rows: tuple[tuple[SummaryRow, tuple[SummaryRow | None, ...]], ...]


def accuracy_html(
    result: Accuracy,
    limits: Thresholds,
    provenance: ReportProvenance | None = None,
    *,
    profiles: Sequence[Profile] = (),
    timeline: Timeline | None = None,
    program: Workload | None = None,
) -> str:
    """Return the page. It loads nothing, and names from files are plain text in it.

    ``provenance`` defaults to :func:`provenance_of` the inputs; give it if a user's file describes a device.
    ``profiles`` and ``timeline`` (of ``program``, which has the names of its nodes) are drawn as timelines.
    If there are very many cases, the page shows some of them as points and reports it; it stays below 8 MB.
    Raises ``MissingExtraError`` without plotly.
    """
    import jinja2
    from markupsafe import Markup

    plotly = plotly_script()
    if provenance is None:
        devices: list[Device] = []
        for name in dict.fromkeys(cases.hardware for cases in result.cases):
            try:
                devices.append(named_device(name))
            except UsageError:
                continue
        metadata = {profile.name: profile.metadata for profile in profiles}
        provenance = provenance_of(result.inputs, devices, metadata)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(_TEMPLATES, "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(shown=shown, percent=percent, time=time_text, rate=rate_text)
    checks = limits_of(result, limits)
    data = _page_data(result, provenance.devices, profiles, timeline, program)
    folder = files(_TEMPLATES) / "templates"
    rows = {(row.hardware, row.estimator, row.level, row.op_class, row.size): row for row in result.summary}
    return environment.get_template("report.html").render(
        version=__version__,
        result=result,
        limits=checks,
        verdict=verdict_of(checks),
        summary_lines=list(summary_lines(result)),
        tables=[
            _ErrorTable(
                hardware=hardware,
                estimator=estimator,
                level=level,
                rows=tuple(
                    (
                        row,
                        tuple(
                            rows.get((hardware, name, level, row.op_class, row.size)) for name in BASELINES
                        ),
                    )
                    for row in result.summary
                    if (row.hardware, row.estimator, row.level) == (hardware, estimator, level)
                ),
            )
            for hardware in dict.fromkeys(row.hardware for row in result.summary)
            for estimator in result.estimators
            for level in ("shape", "instance")
        ],
        baselines=BASELINES,
        few=FEW_SHAPES,
        most=_MOST_ROWS,
        most_joins=max(_MOST_JOINS // max(len(result.joins), 1), 20),
        counts=result.diagnostics.counts(),
        diagnostics=list(result.diagnostics),
        provenance=provenance,
        data=data,
        json=Markup(json_for_script(encode_json(data))),
        plotly=Markup(plotly),
        style=Markup((folder / "report.css").read_text(encoding="utf-8")),
        script=Markup((folder / "report.js").read_text(encoding="utf-8")),
    )


def _page_data(
    result: Accuracy,
    devices: Sequence[Device],
    profiles: Sequence[Profile],
    timeline: Timeline | None,
    program: Workload | None,
) -> dict[str, object]:
    """Return the data that the script of the page reads.

    ``estimators`` holds the requested estimators, then the baselines.
    """
    names = NameTable()
    estimators = list(dict.fromkeys((*result.estimators, *BASELINES)))
    lanes = [measured_lanes(profile, names) for profile in profiles[:_MOST_TIMELINES]]
    return {
        "requested": len(result.estimators),
        "few": FEW_SHAPES,
        "estimators": [shown(name) for name in estimators],
        "classes": class_names(result),
        "sources": [
            {"name": shown(cases.source), "hardware": shown(cases.hardware)} for cases in result.cases
        ],
        "noise": {shown(name): floor.mape for name, floor in result.noise.items()},
        "roofs": list(roofs_of(devices, result.cases)),
        "points": points_of(result, estimators, names),
        "shapes": shape_rows_of(result, estimators, names),
        "curves": list(curves_of(result, estimators)),
        "waterfalls": list(waterfalls_of(result, estimators, names)),
        "timelines": [lane for lane in lanes if lane is not None],
        "simulated": None if timeline is None else simulated_lanes(timeline, program, names),
        "names": names.texts(),
    }


class _PlotlyOffline(Protocol):
    """Interface of ``plotly.offline``, which has no type annotations."""

    def get_plotlyjs(self) -> str: ...


def plotly_script() -> str:
    """Return the text of plotly.js in the installed plotly package.

    Raises ``MissingExtraError`` without plotly.
    """
    try:
        offline = cast("_PlotlyOffline", import_module("plotly.offline"))
    except ImportError as error:
        raise MissingExtraError("the HTML report", "report") from error
    # Inside a string or a pattern of the script, "<\/" is the same as "</".
    return offline.get_plotlyjs().replace("</script", "<\\/script").replace("<!--", "<\\!--")
