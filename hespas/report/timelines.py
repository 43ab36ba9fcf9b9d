"""Timelines and flame graphs: charts with many spans, which the script of a page can zoom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar
from zlib import crc32

import numpy as np

from hespas.graph.columns import BoolArray, FloatArray
from hespas.graph.timeline import Intervals
from hespas.report.charts import TONES, WIDTH, Axis, Chart, Scale, Sketch, legend_markup
from hespas.report.drawings import svg, svg_text
from hespas.report.texts import NameTable, counted, shown, time_text

if TYPE_CHECKING:
    from markupsafe import Markup

__all__ = ["FlameGraph", "Lane", "TimelineChart"]

_WORDS = {"compute": "compute", "communication": "communication", "copies": "copies", "host": "other"}
"""Styles of spans -> texts of the legend."""
_LABEL, _LANE, _BOTTOM = 170, 17, 40
"""Width of labels, height of a lane, and height of the axis of a timeline [SVG units]."""
_FRAME, _NARROW = 19, 5e-4
"""Height of a frame of a flame graph [SVG units], and share of the width of the narrowest frame."""
_MOST_DEPTH, _MOST_FRAMES = 40, 4_000


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """Lane of a timeline: the spans of one stream in order of their starts. ``styles`` are classes of the
    style sheet: compute, communication, copies or host. ``critical`` is True for spans on the critical path.
    """

    label: str
    styles: Sequence[str]
    start_ns: FloatArray
    end_ns: FloatArray
    texts: Sequence[str]
    critical: BoolArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class TimelineChart(Chart):
    """Spans of streams over time. Pages can zoom it to a single span."""

    lanes: Sequence[Lane]
    is_dense: ClassVar[bool] = True

    @property
    def start_ns(self) -> float:
        """Return the start of the first span."""
        return min((float(lane.start_ns[0]) for lane in self.lanes if len(lane.start_ns)), default=0.0)

    @property
    def end_ns(self) -> float:
        """Return the end of the last span."""
        return max((float(lane.end_ns.max()) for lane in self.lanes if len(lane.end_ns)), default=1.0)

    def links(self) -> dict[str, str]:
        """Return the id on a page of the longest span of each operation."""
        longest_ns: dict[str, float] = {}
        links: dict[str, str] = {}
        for number, lane in enumerate(self.lanes):
            lengths = (lane.end_ns - lane.start_ns).tolist()
            for row, (text, length) in enumerate(zip(lane.texts, lengths, strict=True)):
                if length > longest_ns.get(text, -1.0):
                    longest_ns[text] = length
                    links[text] = f"{self.id}/{number}/{row}"
        return links

    def markup(self) -> Markup:
        """Return the chart for a page. Its script draws the spans on a canvas, also above this drawing."""
        from markupsafe import Markup

        sketch = self.sketch()
        drawing = svg(WIDTH, sketch.height, shown(self.title), sketch.parts, "drawn dense")
        box = Markup('{}<div class="timeline" data-title="{}">{}</div>')
        return box.format(legend_markup(sketch), self.title, drawing)

    def data(self, names: NameTable) -> Mapping[str, Any]:
        """Return the spans for the script of a page: times in ``unit_ns`` as gap before and length of each
        span, texts, and the rows of critical spans.
        """
        first, last = self.start_ns, self.end_ns
        unit_ns = 1.0 if last - first >= 1e5 else 1e-3
        codes = {style: code for code, style in enumerate(_WORDS)}
        lanes: list[dict[str, Any]] = []
        for lane in self.lanes:
            start = np.rint((lane.start_ns - first) / unit_ns).astype(np.int64)
            end = np.maximum(np.rint((lane.end_ns - first) / unit_ns).astype(np.int64), start)
            before = np.append(0, end)[:-1]
            lanes.append(
                {
                    "label": shown(lane.label),
                    "styles": _shortened([codes[style] for style in lane.styles]),
                    "gaps": (start - before).tolist(),
                    "lengths": (end - start).tolist(),
                    "codes": list(map(names.row, lane.texts)),
                    "critical": np.flatnonzero(lane.critical).tolist(),
                }
            )
        return {
            "kind": "timeline",
            "unit_ns": unit_ns,
            "length_ns": last - first,
            "styles": list(_WORDS),
            "lanes": lanes,
        }

    def sketch(self) -> Sketch:
        """Return the elements of the drawing at the resolution of the drawing."""
        first, last = self.start_ns, self.end_ns
        across = Scale(Axis("time", "time"), 0.0, (last - first) or 1.0, _LABEL, WIDTH - 12)
        styles: dict[str, str] = {}
        for style, word in _WORDS.items():
            masks = [(np.array(lane.styles) == style, lane.critical) for lane in self.lanes]
            if any((mask & ~critical).any() for mask, critical in masks):
                styles[f"span {style}"] = word
            if any((mask & critical).any() for mask, critical in masks):
                styles[f"span critical {style}"] = f"{word}, on the critical path"
        top = 6.0
        bottom = top + _LANE * len(self.lanes)
        parts: list[str] = []
        for value in across.ticks():
            x = across.at(value)
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>')
            parts.append(svg_text(x, bottom + 15, across.axis.text(value), attributes=' class="note"'))
        for row, lane in enumerate(self.lanes):
            y = top + row * _LANE
            parts.append(svg_text(_LABEL - 8, y + 12, shown(lane.label, 25), "end"))
            title = f"<title>{escape(shown(lane.label))}: {counted(len(lane.start_ns), 'span')}</title>"
            for style in styles:
                words = style.split(" ")
                chosen = (np.array(lane.styles) == words[-1]) & (lane.critical == ("critical" in words))
                path = "".join(_boxes(lane, chosen, first, across, y))
                if path:
                    parts.append(f'<path class="{style}" d="{path}">{title}</path>')
        return Sketch(bottom + _BOTTOM - 18, parts, styles)


def _shortened(codes: list[int]) -> list[int]:
    """Return the codes, or only the first one if all are equal."""
    return codes if len(set(codes)) > 1 else codes[:1]


def _boxes(lane: Lane, chosen: BoolArray, first_ns: float, across: Scale, y: float) -> Iterator[str]:
    """Yield the path of the spans of a lane; spans within one unit of the drawing are joined."""
    scale = (across.end - across.start) / (across.high - across.low)
    start = np.floor((lane.start_ns[chosen] - first_ns) * scale * 2) / 2
    end = np.maximum(np.ceil((lane.end_ns[chosen] - first_ns) * scale * 2) / 2, start + 0.5)
    joined = Intervals.union(start, end)
    for left, right in zip(joined.start.tolist(), joined.end.tolist(), strict=True):
        yield f"M{across.start + left:.1f} {y + 2:.0f}h{right - left:.1f}v{_LANE - 4}h{left - right:.1f}z"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class FlameGraph(Chart):
    """Tree of calls or modules: a frame per row, as wide as its share of the time. Rows are in the order of
    the tree, each caller before its callees; ``depths`` are 0 for the roots. Frames that are too narrow to be
    seen are left out.
    """

    names: Sequence[str]
    depths: Sequence[int]
    total_ns: Sequence[float]

    def data(self, names: NameTable) -> Mapping[str, Any]:
        """Return the kind of the chart; its script reads the frames from the drawing."""
        return {"kind": "flame"}

    def frames(self) -> list[tuple[int, float, float, int]]:
        """Return row, start and width (shares of the whole) and depth of each frame that is drawn."""
        whole = sum(time for time, depth in zip(self.total_ns, self.depths, strict=True) if depth == 0)
        frames: list[tuple[int, float, float, int]] = []
        # the start of the next frame at each depth, and whether its caller is drawn
        next_start: list[float] = [0.0]
        for row, (depth, time_ns) in enumerate(zip(self.depths, self.total_ns, strict=True)):
            del next_start[depth + 1 :]
            if len(next_start) <= depth or not whole > 0 or not isfinite(time_ns):
                continue
            start, width = next_start[depth], time_ns / whole
            next_start[depth] += width
            if width >= _NARROW and depth < _MOST_DEPTH:
                frames.append((row, start, width, depth))
                next_start.append(start)
        return sorted(frames, key=lambda frame: -frame[2])[:_MOST_FRAMES]

    def markup(self) -> Markup:
        """Return the chart for a page, as wide as the page. Its script zooms frames."""
        from markupsafe import Markup

        sketch = self.sketch()
        head = Markup(
            '<div class="flame" tabindex="0" role="group" aria-label="{0}"><svg role="img" '
            'style="height:{1:.0f}px"><title>{0}</title>'
        ).format(self.title, sketch.height)
        return head + Markup("".join(sketch.parts)) + Markup("</svg></div>")

    def sketch(self) -> Sketch:
        """Return the elements of the drawing."""
        frames = sorted(self.frames(), key=lambda frame: frame[0])
        parts: list[str] = []
        for row, start, width, depth in frames:
            name = shown(self.names[row], 160)
            tone = crc32(name.encode("utf-8", "replace")) % TONES
            text = f"{escape(name)}: {time_text(self.total_ns[row])} ({width:.1%})"
            position = f'x="{start * 100:.4f}%" y="{depth * _FRAME}" width="{width * 100:.4f}%"'
            inside = svg_text(4, 13, name, "start") if width > 0.015 else ""
            parts.append(
                f'<svg class="frame" {position} height="{_FRAME}" data-start="{start:.6f}" '
                f'data-width="{width:.6f}"><title>{text}</title>'
                f'<rect class="c{tone}" width="100%" height="100%"/>{inside}</svg>'
            )
        return Sketch(_FRAME * (1 + max((frame[3] for frame in frames), default=0)), parts)
