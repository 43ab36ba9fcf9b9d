"""The comparison as one HTML page that needs nothing but itself: figures, tables, provenance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from hespas import __version__
from hespas.graph import Profile, Timeline, Workload
from hespas.graph.errors import UsageError
from hespas.hardware import Device, named_device
from hespas.validators.accuracy.baselines import BASELINES
from hespas.validators.accuracy.report.embedding import json_for_script, plotly_script
from hespas.validators.accuracy.report.figures import (
    Curve,
    Points,
    ShapeRows,
    class_names,
    curves_of,
    points_of,
    shape_rows_of,
)
from hespas.validators.accuracy.report.markdown import FEW_SHAPES
from hespas.validators.accuracy.report.names import Names
from hespas.validators.accuracy.report.provenance import Provenance, provenance_of
from hespas.validators.accuracy.report.rooflines import Roof, roofs_of
from hespas.validators.accuracy.report.steps import (
    Lanes,
    Waterfall,
    measured_lanes,
    simulated_lanes,
    waterfalls_of,
)
from hespas.validators.accuracy.report.texts import percent, rate_text, shown, time_text
from hespas.validators.accuracy.report.verdict import headlines, limits_of, verdict_of
from hespas.validators.accuracy.result import Accuracy, SummaryRow, Thresholds
from hespas.validators.document import encoded

__all__ = ["accuracy_html"]

_MOST_TIMELINES = 8
_LISTED = 200
"""Rows of any other table; the rest is counted on the page."""

_MOST_JOINS = 2000
"""Instructions with what they carry out, over all sources."""

_TEMPLATES = "hespas.validators.accuracy.report"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    name: str
    hardware: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Data:
    """What the script of the page reads; ``estimators`` are those asked for, then the baselines."""

    asked: int
    few: int
    estimators: list[str]
    classes: list[str]
    sources: list[_Source]
    noise: dict[str, float]
    roofs: list[Roof]
    points: Points
    shapes: ShapeRows
    curves: list[Curve]
    waterfalls: list[Waterfall]
    timelines: list[Lanes]
    simulated: Lanes | None
    names: list[str]


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
) -> _Data:
    names = Names()
    estimators = list(dict.fromkeys((*done.estimators, *BASELINES)))
    lanes = [measured_lanes(profile, names) for profile in profiles[:_MOST_TIMELINES]]
    return _Data(
        asked=len(done.estimators),
        few=FEW_SHAPES,
        estimators=[shown(name) for name in estimators],
        classes=class_names(done),
        sources=[_Source(name=shown(each.source), hardware=shown(each.hardware)) for each in done.cases],
        noise={shown(name): floor.mape for name, floor in done.noise.items()},
        roofs=list(roofs_of(devices, done.cases)),
        points=points_of(done, estimators, names),
        shapes=shape_rows_of(done, estimators, names),
        curves=list(curves_of(done, estimators)),
        waterfalls=list(waterfalls_of(done, estimators, names)),
        timelines=[each for each in lanes if each is not None],
        simulated=None if timeline is None else simulated_lanes(timeline, program, names),
        names=names.texts(),
    )


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
