"""Charts of results, declared as data and drawn as SVG on pages, in notebooks and in files.

A chart has its values, and no drawing library is needed. Texts are escaped, and names from files limited.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from importlib.resources import files
from math import ceil, floor, isfinite, log2, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from hespas.files.output import write_atomically
from hespas.graph.columns import FloatArray, highest_rows
from hespas.report.drawings import svg, svg_text
from hespas.report.tables import Column, Kind
from hespas.report.texts import NameTable, shown

if TYPE_CHECKING:
    from markupsafe import Markup

__all__ = [
    "TONES",
    "WIDTH",
    "AreaChart",
    "Axis",
    "Chart",
    "HeatMap",
    "Histogram",
    "Mark",
    "Plot",
    "Scale",
    "Series",
    "Sketch",
    "StripPlot",
    "Waterfall",
    "legend_markup",
    "roof_lines",
]

WIDTH = 760
"""Width of a drawing [SVG units]."""
Mark = Literal["points", "curve", "line", "steps", "guide"]
TONES = 8
"""Colours of the style sheet for series: ``c0`` to ``c7``."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 30.0, 46
"""Margins of a plot for its ticks and titles [SVG units]."""
_HEIGHT, _LETTER, _LINE = 300, 6.6, 18
"""Height of a plot, mean width of a letter and height of a line of texts [SVG units]."""
_ROW, _LABEL = 22, 230
"""Height of a row of a waterfall, and width of its labels [SVG units]."""
_STRIP, _STRIP_LABEL = 13, 170
"""Height of a series in a strip, and width of the labels of strips [SVG units]."""
_MOST_POINTS = 400
"""Moments of an area chart; each one is the moment with the highest total of those around it."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """Elements of a drawing, and its height [SVG units]. ``styles`` maps classes of the style sheet to the
    texts of the legend: filled areas (``c0``), points (``dot c0``) or lines (``line l0``).
    """

    height: float
    parts: Sequence[str]
    styles: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Chart(ABC):
    """Chart of a result.

    ``name`` is unique in the result. ``note`` explains the values. ``table`` is the
    table that pages show below the chart (empty: the chart has a section of its own).
    """

    name: str
    title: str
    note: str = ""
    table: str = ""
    is_dense: ClassVar[bool] = False
    """True for charts with long labels, which narrow windows scroll and do not shrink."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.title}>"

    @property
    def id(self) -> str:
        """Return the id of the chart on a page."""
        return f"chart-{self.name}"

    @abstractmethod
    def sketch(self) -> Sketch:
        """Return the elements of the drawing."""

    def markup(self) -> Markup:
        """Return the chart for a page, which has the style sheet."""
        sketch = self.sketch()
        style = "drawn dense" if self.is_dense else "drawn"
        return legend_markup(sketch) + svg(WIDTH, sketch.height, shown(self.title), sketch.parts, style)

    def data(self, names: NameTable) -> Mapping[str, Any] | None:
        """Return the values that the script of a page reads for this chart, with rows of ``names`` as texts;
        None if it needs none.
        """
        return None

    def to_svg(self) -> str:
        """Return the chart as an SVG document with its own style."""
        sketch = self.sketch()
        style = (files("hespas.report") / "templates" / "charts.css").read_text(encoding="utf-8")
        legend, lines = _legend(sketch)
        top = _LINE * (lines + 1) + 8
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="alone" role="img" width="{WIDTH}" '
            f'height="{sketch.height + top:.0f}" viewBox="0 {-top} {WIDTH} {sketch.height + top:.0f}">'
            f"<title>{escape(shown(self.title))}</title><style>{style}</style>"
            f'<rect class="ground" y="{-top}" width="100%" height="100%"/>'
            f"{svg_text(8, 14 - top, shown(self.title), 'start')}"
            f'<g transform="translate(0 {_LINE - top})">{legend}</g>{"".join(sketch.parts)}</svg>'
        )

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def write(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the chart as an SVG file, atomically. Raises ``OutputError`` if the file exists, without
        ``overwrite``.
        """

        def fill(temporary: Path) -> None:
            temporary.write_text(self.to_svg(), encoding="utf-8")

        write_atomically(Path(path), fill, overwrite=overwrite, directory=False)


def _mark(style: str, x: float, y: float) -> str:
    """Return the mark of a legend for a style; ``y`` is its lower edge."""
    if style.startswith("dot"):
        return _point(x + 7, y - 5, int(style[-1]), "")
    if style.startswith("line"):
        return f'<path class="{style}" d="M{x:.1f} {y - 5:.1f}h16"/>'
    return f'<rect class="{style}" x="{x + 2:.1f}" y="{y - 10:.1f}" width="11" height="10"/>'


def _legend(sketch: Sketch) -> tuple[str, int]:
    """Return the legend of an SVG document, and the number of its lines."""
    x, lines, parts = 8.0, min(len(sketch.styles), 1), list[str]()
    for style, text in sketch.styles.items():
        label = shown(text, 48)
        width = 32 + _LETTER * len(label)
        if x > 8 and x + width > WIDTH:
            x, lines = 8.0, lines + 1
        y = lines * _LINE - 4.0
        parts += [_mark(style, x, y), svg_text(x + 20, y, label, "start")]
        x += width
    return "".join(parts), lines


def legend_markup(sketch: Sketch) -> Markup:
    """Return the legend of a chart on a page, whose lines break like text."""
    from markupsafe import Markup

    mark = '<span class="key"><svg class="mark" aria-hidden="true" viewBox="0 0 18 12">{}</svg>{}</span>'
    keys = "".join(
        mark.format(_mark(style, 0, 11), escape(shown(text))) for style, text in sketch.styles.items()
    )
    return Markup(f'<p class="legend">{keys}</p>' if keys else "")


@dataclass(frozen=True, slots=True)
class Axis:
    """Axis of a plot: its title, the kind of its values, and ``is_log`` for a logarithmic axis."""

    title: str
    kind: Kind = "number"
    is_log: bool = False

    def text(self, value: float) -> str:
        """Return the text of a value without trailing zeros."""
        return re.sub(
            r"\.(\d*?)0+(?!\d)", lambda match: f".{match[1]}" if match[1] else "", self.exact(value)
        )

    def exact(self, value: float) -> str:
        """Return the text of a value as in tables."""
        return Column("", kind="time" if self.kind == "moment" else self.kind).text(value)


@dataclass(frozen=True, slots=True)
class Scale:
    """Map from the values of an axis, from ``low`` to ``high``, to positions [SVG units]."""

    axis: Axis
    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, axis: Axis, values: Sequence[float] | FloatArray, start: float, end: float) -> Scale:
        """Return the scale over all finite values; linear scales begin at 0 unless values are negative."""
        known = np.asarray(values, np.float64)
        known = known[np.isfinite(known) & ((known > 0) | (not axis.is_log))]
        low, high = (float(known.min()), float(known.max())) if len(known) else (1.0, 10.0)
        if axis.is_log:
            return cls(axis, low / 1.25, high * 1.25, start, end)
        low, high = min(low, 0.0), max(high, 0.0)
        return cls(axis, low * 1.05, (high or 1.0 if low == 0 else high) * 1.05, start, end)

    def at(self, value: float) -> float:
        """Return the position of a value; values outside are at the ends."""
        bounded = min(max(value, self.low), self.high)
        if self.axis.is_log:
            part = log10(bounded / self.low) / log10(self.high / self.low)
        else:
            part = (bounded - self.low) / ((self.high - self.low) or 1.0)
        return self.start + part * (self.end - self.start)

    def ticks(self, most: int = 7) -> list[float]:
        """Return round values inside the axis."""
        if not self.axis.is_log:
            step = (self.high - self.low) / most or 1.0
            size = 10.0 ** floor(log10(step))
            step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= step * 0.999)
            return [row * step for row in range(ceil(self.low / step), floor(self.high / step) + 1)]
        if self.axis.kind == "count" and self.high < most * 1e3 * self.low:
            powers = range(ceil(log2(self.low)), floor(log2(self.high)) + 1)
            return [2.0**power for power in powers if power % ceil(len(powers) / 8) == 0]
        first, last = ceil(log10(self.low)), floor(log10(self.high))
        decades = last - first + 1
        factors = {0: (1, 2, 5), 1: (1, 2, 5), 2: (1, 3)}.get(decades, (1,))
        every = max(ceil(decades / most), 1)
        values = [factor * 10.0**row for row in range(first - 1, last + 1, every) for factor in factors]
        return [value for value in values if self.low <= value <= self.high]


def _x_axis(scale: Scale, top: float, bottom: float) -> Iterator[str]:
    """Yield the grid lines, ticks and title of a horizontal axis below a plot."""
    for value in scale.ticks():
        x = scale.at(value)
        yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>'
        yield svg_text(x, bottom + 17, scale.axis.text(value), attributes=' class="note"')
    yield svg_text((scale.start + scale.end) / 2, bottom + 39, scale.axis.title, attributes=' class="note"')


def _y_axis(scale: Scale, left: float, right: float) -> Iterator[str]:
    """Yield the grid lines, ticks and title of a vertical axis to the left of a plot."""
    for value in scale.ticks(6):
        y = scale.at(value)
        yield f'<line class="axis" x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield svg_text(left - 6, y + 4, scale.axis.text(value), "end", ' class="note"')
    yield svg_text(8, 14, scale.axis.title, "start", ' class="note"')


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """Values of a plot that are drawn alike. A ``curve`` is a line through points, and a ``guide`` a line for
    comparison, without a colour. ``texts`` are shown when the mouse points at a value. ``tone`` is the number
    of its colour and dashes (-1: the order of the series). Unknown values are not drawn.
    """

    label: str
    x: Sequence[float] | FloatArray
    y: Sequence[float] | FloatArray
    mark: Mark = "points"
    texts: Sequence[str] = ()
    tone: int = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Plot(Chart):
    """Plot of points, lines and steps over two axes: rooflines, bandwidths, distributions and frontiers."""

    x: Axis
    y: Axis
    series: Sequence[Series]

    def sketch(self) -> Sketch:
        """Return the elements of the drawing."""
        tones = [part.tone if part.tone >= 0 else row % TONES for row, part in enumerate(self.series)]
        classes = [
            f"dot c{tone}" if part.mark == "points"
            else f"line guide l{tone}" if part.mark == "guide"
            else f"line l{tone}"
            for part, tone in zip(self.series, tones, strict=True)
        ]  # fmt: skip
        styles = {style: part.label for style, part in zip(classes, self.series, strict=True)}
        top, bottom = _TOP, _TOP + _HEIGHT
        xs = np.concatenate([np.asarray(part.x, np.float64) for part in self.series] or [np.empty(0)])
        ys = np.concatenate([np.asarray(part.y, np.float64) for part in self.series] or [np.empty(0)])
        across = Scale.over(self.x, xs, _LEFT, WIDTH - _RIGHT)
        up = Scale.over(self.y, ys, bottom, top)
        parts = [*_x_axis(across, top, bottom), *_y_axis(up, _LEFT, WIDTH - _RIGHT)]
        for part, tone, style in zip(self.series, tones, classes, strict=True):
            points = [
                (across.at(float(x)), up.at(float(y)), row)
                for row, (x, y) in enumerate(zip(part.x, part.y, strict=True))
                if _is_drawn(float(x), self.x) and _is_drawn(float(y), self.y)
            ]
            if part.mark != "points" and points:
                step = "H{0:.1f}V{1:.1f}" if part.mark == "steps" else "L{0:.1f} {1:.1f}"
                path = "".join(step.format(x, y) for x, y, _ in points[1:])
                start = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
                title = f"<title>{escape(shown(part.label))}</title>"
                parts.append(f'<path class="{style}" d="{start}{path}">{title}</path>')
            if part.mark in {"points", "curve"}:
                parts += (_point(x, y, tone, part.texts[row] if part.texts else "") for x, y, row in points)
        return Sketch(bottom + _BOTTOM, parts, styles)


def _is_drawn(value: float, axis: Axis) -> bool:
    return isfinite(value) and (value > 0 or not axis.is_log)


_MARKS = ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "M-4-4H4V4H-4z", "M0-5L5 0 0 5-5 0z", "M0-5L5 4H-5z")
"""Marks of points, by colour, so that series also differ without colour."""


def _point(x: float, y: float, tone: int, text: str) -> str:
    title = f"<title>{escape(shown(text, 240))}</title>" if text else ""
    shape = f'd="{_MARKS[tone % len(_MARKS)]}" transform="translate({x:.1f} {y:.1f})"'
    return f'<path class="dot c{tone}" {shape}>{title}</path>'


def roof_lines(
    memory: str, bandwidth: float, peaks: Mapping[str, float], low: float, high: float
) -> list[Series]:
    """Return the lines of a roofline over FLOP/byte, from ``low`` to ``high``: the limit of the ``memory``,
    and the ``peaks`` by their labels. The bandwidth (not finite: unknown) is in the unit of the peaks.
    """
    lines: list[Series] = []
    knee = max(peaks.values(), default=high * bandwidth) / bandwidth
    if knee > low:
        x = [low, knee]
        lines.append(Series(label=memory, x=x, y=[value * bandwidth for value in x], mark="guide", tone=0))
    for row, (label, peak) in enumerate(peaks.items()):
        start = max(peak / bandwidth, low) if isfinite(bandwidth) else low
        lines.append(Series(label=label, x=[start, high], y=[peak, peak], mark="guide", tone=row + 1))
    return lines


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class StripPlot(Chart):
    """Values in strips, one strip for each of ``labels``, with the median of each series. ``y`` of a series
    has the number of the strip of each value. Values beyond ``limit``, also below 0, are drawn at the edge.
    """

    labels: Sequence[str]
    x: Axis
    series: Sequence[Series]
    limit: float
    is_dense: ClassVar[bool] = True

    def sketch(self) -> Sketch:
        """Return the elements of the drawing."""
        height = _STRIP * len(self.series) + 6
        top, bottom = 4.0, 4.0 + height * len(self.labels)
        every = [np.clip(np.asarray(part.x, np.float64), -self.limit, self.limit) for part in self.series]
        across = Scale.over(self.x, np.concatenate([*every, np.zeros(1)]), _STRIP_LABEL, WIDTH - _RIGHT)
        parts = [*_x_axis(across, top, bottom)]
        for strip, label in enumerate(self.labels):
            y = top + height * strip
            parts.append(f'<line class="axis" x1="8" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(svg_text(_STRIP_LABEL - 10, y + height / 2 + 4, shown(label, 24), "end"))
        x = across.at(0.0)
        parts.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>')
        for tone, (part, drawn) in enumerate(zip(self.series, every, strict=True)):
            strips, values = np.asarray(part.y, np.int64), np.asarray(part.x, np.float64)
            for strip, label in enumerate(self.labels):
                y = top + height * strip + 3 + _STRIP * (tone + 0.5)
                rows = np.flatnonzero((strips == strip) & np.isfinite(values))
                for row in rows.tolist():
                    text = part.texts[row] if part.texts else ""
                    parts.append(_point(across.at(float(drawn[row])), y, tone % TONES, text))
                if len(rows):
                    median = float(np.median(values[rows]))
                    x = across.at(min(max(median, -self.limit), self.limit))
                    text = f"{shown(label)}, {shown(part.label)}: median {self.x.exact(median)}"
                    path = f"M{x:.1f} {y - _STRIP / 2:.1f}v{_STRIP}"
                    parts.append(f'<path class="middle" d="{path}"><title>{escape(text)}</title></path>')
        styles = {f"dot c{tone % TONES}": part.label for tone, part in enumerate(self.series)}
        return Sketch(bottom + _BOTTOM, parts, styles)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class AreaChart(Chart):
    """Stacked areas over time. ``layers`` has the height of each layer from each moment to the next one, the
    lowest layer first. ``limit`` is a line with the text ``limit_text`` (not finite: none).
    """

    moments: FloatArray
    layers: Mapping[str, FloatArray]
    axis: Axis
    x: Axis = Axis("time", "time")
    limit: float = float("nan")
    limit_text: str = ""

    def sketch(self) -> Sketch:
        """Return the elements of the drawing."""
        rows = highest_rows(np.sum(list(self.layers.values()), axis=0), _MOST_POINTS)
        moments = self.moments[rows] - self.moments[0]
        total = np.zeros(len(rows))
        top, bottom = _TOP, _TOP + _HEIGHT
        most = float(np.sum([layer[rows] for layer in self.layers.values()], axis=0).max(initial=0.0))
        across = Scale(self.x, 0.0, float(moments[-1]) or 1.0, _LEFT, WIDTH - _RIGHT)
        # the limit is drawn if the layers come near it
        is_near = isfinite(self.limit) and self.limit < 3 * most
        up = Scale.over(self.axis, [most, self.limit if is_near else 0.0], bottom, top)
        parts = [*_x_axis(across, top, bottom), *_y_axis(up, _LEFT, WIDTH - _RIGHT)]
        x = [across.at(float(moment)) for moment in moments]
        styles: dict[str, str] = {}
        for tone, (label, layer) in enumerate(self.layers.items()):
            lower = [up.at(float(height)) for height in total]
            total = total + np.maximum(np.nan_to_num(layer[rows]), 0.0)
            upper = [up.at(float(height)) for height in total]
            there = "".join(f"H{left:.1f}V{y:.1f}" for left, y in zip(x[1:], upper[1:], strict=True))
            back = "".join(f"V{y:.1f}H{left:.1f}" for left, y in zip(x[-2::-1], lower[-2::-1], strict=True))
            style = f"c{tone % TONES}"
            text = f"{escape(shown(label))}: at most {self.axis.exact(float(np.nanmax(layer)))}"
            path = f"M{x[0]:.1f} {upper[0]:.1f}{there}V{lower[-1]:.1f}{back}z"
            parts.append(f'<path class="area {style}" d="{path}"><title>{text}</title></path>')
            styles[style] = label
        if is_near:
            y = up.at(self.limit)
            parts.append(
                f'<line class="limit" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            parts.append(svg_text(WIDTH - _RIGHT - 4, y - 5, shown(self.limit_text), "end"))
        return Sketch(bottom + _BOTTOM, parts, styles)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Waterfall(Chart):
    """Waterfall from the value ``before`` to the value ``after`` through the ``changes`` by label. The label
    of a value that is not explained by the changes is ``rest``. ``texts`` by label are shown when the mouse
    points at a change.
    """

    before: float
    after: float
    changes: Mapping[str, float]
    axis: Axis
    labels: tuple[str, str] = ("before", "after")
    is_dense: ClassVar[bool] = True
    rest: str = "all others"
    texts: Mapping[str, str] = field(default_factory=dict[str, str])

    def steps(self) -> list[tuple[str, float]]:
        """Return the changes with the rest, if there is one; they add up to the difference."""
        rest = self.after - self.before - sum(self.changes.values())
        steps = list(self.changes.items())
        has_rest = abs(rest) > 1e-9 * max(abs(self.before), abs(self.after))
        return [*steps, (self.rest, rest)] if has_rest else steps

    def sketch(self) -> Sketch:
        """Return the elements of the drawing."""
        steps = self.steps()
        levels = np.cumsum([self.before, *(change for _, change in steps)])
        left, right = _LABEL, WIDTH - 110
        across = Scale.over(self.axis, levels, left, right)
        lowest, highest = float(levels.min()), float(levels.max())
        if lowest > 0.7 * highest > 0:  # small changes would not be visible
            cut = max(lowest - 0.3 * (highest - lowest), 0.0)
            axis = replace(self.axis, title=f"{self.axis.title} (the axis does not begin at 0)")
            across = Scale(axis, cut, highest + 0.05 * (highest - lowest), left, right)
        styles = (
            {"c1": "longer", "c0": "shorter"} if self.axis.kind == "time" else {"c1": "more", "c0": "less"}
        )
        top = 4.0
        bottom = top + _ROW * (len(steps) + 2) + 4
        parts = [*_x_axis(across, top, bottom)]
        rows = [
            (self.labels[0], 0.0, self.before, "whole", self.axis.exact(self.before)),
            *(
                (label, float(start), float(start) + change, "c1" if change > 0 else "c0",
                 f"{'+' if change > 0 else ''}{self.axis.exact(change)}")
                for (label, change), start in zip(steps, levels, strict=False)
            ),
            (self.labels[1], 0.0, self.after, "whole", self.axis.exact(self.after)),
        ]  # fmt: skip
        for row, (label, start, end, style, text) in enumerate(rows):
            y = top + 3 + row * _ROW
            near, far = sorted((across.at(start), across.at(end)))
            more = f"; {shown(self.texts[label], 240)}" if label in self.texts else ""
            title = f"<title>{escape(f'{shown(label)}: {text}{more}')}</title>"
            box = f'x="{near:.1f}" y="{y:.1f}" width="{max(far - near, 1):.1f}" height="{_ROW - 6}"'
            parts.append(f'<rect class="{style}" {box}>{title}</rect>')
            parts.append(svg_text(left - 8, y + 12, shown(label, 34), "end"))
            parts.append(svg_text(far + 6, y + 12, text, "start"))
        return Sketch(bottom + _BOTTOM, parts, styles)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class HeatMap(Chart):
    """Values of shape ``(rows, columns)`` as cells, darker for larger values. Unknown values are empty cells.
    ``best`` marks the cell with the lowest value.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    values: FloatArray
    axis: Axis
    row_title: str = ""
    column_title: str = ""
    best: bool = False
    is_dense: ClassVar[bool] = True

    def sketch(self) -> Sketch:
        """Return the elements of the drawing."""
        longest = max(len(shown(label, 24)) for label in (*self.rows, self.row_title))
        left = 14 + _LETTER * longest
        width = min((WIDTH - _RIGHT - left) / max(len(self.columns), 1), 110)
        height = min(max(width * 0.6, 400 / max(len(self.rows), 1), 5), 30)
        if len(self.columns) > 12:
            height = width
        top = 38.0
        known = self.values[np.isfinite(self.values)]
        low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
        low = min(low, 0.0) if high > 3 * low else low
        every_row = max(ceil(13 / height), 1)
        most = max(floor((width - 4) / _LETTER), 4)
        labels = [shown(label, most) for label in self.columns]
        every_column = max(ceil(max(map(len, labels), default=1) * _LETTER / width), 1)
        parts = [
            svg_text(left - 5, top - 6, shown(self.row_title, 24), "end", ' class="note"'),
            svg_text(
                left + width * len(self.columns) / 2, 13, shown(self.column_title), attributes=' class="note"'
            ),
        ]
        parts += (
            svg_text(left + (column + 0.5) * width, top - 6, label)
            for column, label in enumerate(labels)
            if column % every_column == 0
        )
        texts = [[self.axis.text(float(f"{value:.3g}")) for value in cells] for cells in self.values.tolist()]
        longest = max((len(text) for cells in texts for text in cells), default=0)
        has_texts = height >= 16 and width >= _LETTER * longest + 4
        lowest = int(np.nanargmin(self.values)) if self.best and len(known) else -1
        for row, label in enumerate(self.rows):
            y = top + row * height
            if row % every_row == 0:
                parts.append(svg_text(left - 5, y + height / 2 + 4, shown(label, 24), "end"))
            for column, value in enumerate(self.values[row].tolist()):
                if not isfinite(value):
                    continue
                share = (value - low) / ((high - low) or 1.0)
                title = f"{shown(label)}, {shown(self.columns[column])}: {self.axis.exact(value)}"
                box = f'x="{left + column * width:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
                style = "cell best" if row * len(self.columns) + column == lowest else "cell"
                parts.append(
                    f'<rect class="{style}" {box} fill-opacity="{0.06 + 0.54 * share:.2f}">'
                    f"<title>{escape(title)}</title></rect>"
                )
                if has_texts:
                    parts.append(
                        svg_text(left + (column + 0.5) * width, y + height / 2 + 4, texts[row][column])
                    )
        bottom = top + height * len(self.rows)
        return Sketch(bottom + 10, parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Histogram(Chart):
    """Stacked bars between the ``edges`` of bins: ``heights`` of shape ``(bins,)`` by label. ``texts`` are
    shown when the mouse points at a bin.
    """

    edges: FloatArray
    heights: Mapping[str, FloatArray]
    x: Axis
    y: Axis
    texts: Sequence[str] = ()

    def sketch(self) -> Sketch:
        """Return the elements of the drawing."""
        styles = {f"c{tone % TONES}": label for tone, label in enumerate(self.heights)}
        top, bottom = _TOP, _TOP + _HEIGHT
        total = np.sum(list(self.heights.values()), axis=0)
        across = Scale(self.x, float(self.edges[0]), float(self.edges[-1]), _LEFT, WIDTH - _RIGHT)
        up = Scale.over(self.y, total, bottom, top)
        parts = [*_x_axis(across, top, bottom), *_y_axis(up, _LEFT, WIDTH - _RIGHT)]
        base = np.zeros(len(total))
        for tone, (label, heights) in enumerate(self.heights.items()):
            for row, height in enumerate(heights.tolist()):
                if height <= 0:
                    continue
                near, far = across.at(float(self.edges[row])), across.at(float(self.edges[row + 1]))
                low, high = up.at(float(base[row])), up.at(float(base[row]) + height)
                between = (
                    f"{self.x.text(float(self.edges[row]))} to {self.x.text(float(self.edges[row + 1]))}"
                )
                title = f"{shown(label)}, {between}: {self.y.exact(height)}"
                if self.texts:
                    title += f"; {shown(self.texts[row])}"
                box = f'x="{near + 0.5:.1f}" y="{high:.1f}" width="{max(far - near - 1, 0.5):.1f}" '
                box += f'height="{max(low - high, 0.3):.1f}"'
                style = f"c{tone % TONES}"
                parts.append(f'<rect class="{style}" {box}><title>{escape(title)}</title></rect>')
            base = base + heights
        return Sketch(bottom + _BOTTOM, parts, styles)
