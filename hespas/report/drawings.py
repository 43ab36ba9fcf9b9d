"""Drawings of a page as HTML and SVG without scripts: stacked bars and curves over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite, nan
from typing import TYPE_CHECKING

import numpy as np

from hespas.graph.columns import FloatArray
from hespas.report.texts import shown, time_text

if TYPE_CHECKING:
    from markupsafe import Markup

__all__ = ["Bar", "Curve", "curves", "legend", "stacked_bars", "svg", "svg_text"]

_MOST_BARS = 500
_SHOWN_BARS = 12
_WIDTH, _HEIGHT = 1000, 100


@dataclass(frozen=True, slots=True)
class Bar:
    """Bar of a chart, made of ``parts`` [ns] in the order of the legend, with its text. ``low`` and ``high``
    are an interval (NaN: none). If ``whole`` is True, the bar has full width; otherwise its width is relative
    to the longest bar.
    """

    label: str
    parts: Sequence[float]
    low: float = nan
    high: float = nan
    text: str = ""
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Curve:
    """Step curves over time [ns] in one figure: the height after each moment, by name of the line."""

    caption: str
    time_ns: FloatArray
    heights: Mapping[str, FloatArray]


def _markup(parts: Iterable[str]) -> Markup:
    from markupsafe import Markup

    return Markup("".join(parts))


def legend(styles: Mapping[str, str]) -> str:
    """Return the legend of a drawing; ``styles`` maps classes of the style sheet to texts."""
    return "".join(
        f'<span class="key"><i class="{style}"></i>{escape(text)}</span>' for style, text in styles.items()
    )


def stacked_bars(bars: Sequence[Bar], styles: Mapping[str, str], more: str = "more") -> Markup:
    """Return a chart of stacked bars with their texts. The first bars are visible; the others are folded
    under the text ``more``.
    """
    drawn = bars[:_MOST_BARS]
    longest = max(
        (max(sum(bar.parts), bar.high if isfinite(bar.high) else 0) for bar in drawn if not bar.whole),
        default=0,
    )
    lines = [_bar(bar, styles, sum(bar.parts) if bar.whole else longest) for bar in drawn]
    parts = [f"<p>{legend(styles)}</p>", f'<div class="bars">{"".join(lines[:_SHOWN_BARS])}</div>']
    if rest := lines[_SHOWN_BARS:]:
        of = f", of {len(bars) - _SHOWN_BARS:,}" if len(bars) > len(drawn) else ""
        summary = f"<summary>{len(rest):,} {escape(more)}{of}</summary>"
        parts.append(f'<details>{summary}<div class="bars">{"".join(rest)}</div></details>')
    return _markup(parts)


def _bar(bar: Bar, styles: Mapping[str, str], scale: float) -> str:
    scale = scale or 1.0
    parts = [
        f'<i class="{style}" style="width:{part / scale * 100:.3f}%" '
        f'title="{escape(text)}: {time_text(part)}"></i>'
        for (style, text), part in zip(styles.items(), bar.parts, strict=True)
        if part > 0
    ]
    if isfinite(bar.low) and isfinite(bar.high):
        left, width = bar.low / scale * 100, (bar.high - bar.low) / scale * 100
        title = f"{time_text(bar.low)} to {time_text(bar.high)}"
        parts.append(f'<b style="left:{left:.3f}%;width:{width:.3f}%" title="{title}"></b>')
    text = escape(bar.text or time_text(sum(bar.parts)))
    label = escape(shown(bar.label))
    return f'<span>{label}</span><span class="bar">{"".join(parts)}</span><span class="time">{text}</span>'


def curves(drawn: Sequence[Curve], most: int = 4) -> Markup:
    """Return one figure per curve, for the ``most`` curves with the highest values."""

    def height_of(curve: Curve) -> float:
        return (
            float(max((np.nanmax(line, initial=0.0) for line in curve.heights.values()), default=0.0)) or 1.0
        )

    highest = sorted(drawn, key=height_of, reverse=True)
    parts = [f'<p class="faint">The {most} highest of {len(drawn)}:</p>'] if len(drawn) > most else []
    for curve in highest[:most]:
        first, last = float(curve.time_ns[0]), float(curve.time_ns[-1])
        x = (curve.time_ns - first) / ((last - first) or 1.0) * _WIDTH
        paths: list[str] = []
        for place, line in enumerate(curve.heights.values()):
            y = _HEIGHT - 4 - np.nan_to_num(line) / height_of(curve) * (_HEIGHT - 8)
            points = zip(x.tolist(), y.tolist(), strict=True)
            steps = [f"H{left:.1f}V{top:.1f}" for left, top in points]
            start = f"M{float(x[0]):.1f} {float(y[0]):.1f}"
            style = ' class="second"' if place else ""
            paths.append(f'<path{style} d="{start}{"".join(steps[1:])}"/>')
        names: dict[str, str] = dict(zip(("compute", "communication"), curve.heights, strict=False))
        keys = legend(names) if len(curve.heights) > 1 else ""
        caption = escape(curve.caption)
        parts.append(
            f'<figure class="curve"><figcaption>{caption} {keys}</figcaption>'
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img">'
            f"<title>{caption}</title>{''.join(paths)}</svg></figure>"
        )
    return _markup(parts)


def svg(width: float, height: float, label: str, parts: Iterable[str], style: str = "drawn dense") -> Markup:
    """Return an SVG drawing; ``parts`` are elements with escaped texts. ``style`` are classes of the style
    sheet: narrow windows scroll drawings that are ``dense``, and shrink the others.
    """
    return _markup(
        [
            f'<div class="{style}" tabindex="0" role="group" aria-label="{escape(label)}">',
            f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width * 1.25:.0f}px" role="img">',
            f"<title>{escape(label)}</title>",
            *parts,
            "</svg></div>",
        ]
    )


def svg_text(x: float, y: float, text: str, anchor: str = "middle", attributes: str = "") -> str:
    """Return a text in a drawing."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{attributes}>{escape(text)}</text>'
