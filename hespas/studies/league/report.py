"""League report: an HTML page without external files, the JSON document, and a CSV file of the rows."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor, isfinite, isnan, log10
from pathlib import Path
from statistics import median

from hespas._version import __version__
from hespas.files.documents import escape_cell
from hespas.files.output import check_report_files, write_report_files
from hespas.fitting.effects import COMPONENTS
from hespas.graph.errors import clipped
from hespas.studies.league.document import League, league_json
from hespas.studies.league.evaluation import SHARED, EvaluatedRow
from hespas.studies.league.summaries import ScalingPoint

__all__ = ["REPORT_FILES", "check_folder", "league_csv", "league_html", "write_report"]

REPORT_FILES = ("league.html", "league.json", "league.csv")

_STYLE = """
:root { color-scheme: light dark; --ink: #16191d; --ground: #fff; --faint: #59616b; --line: #d3d8de;
  --mark: #2f6fb2; --assumed: #d9822b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --ground: #14171a; --faint: #a7afb8;
  --line: #3f464e; --mark: #6aa7e0; --assumed: #e9a45c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); margin: 2rem auto;
  max-width: 76rem; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin-bottom: 1.5rem; }
th, td { border-bottom: 1px solid var(--line); padding: .15rem .6rem; text-align: right; }
th.text, td.text { text-align: left; white-space: nowrap; } .wide { overflow-x: auto; }
svg { width: 100%; height: auto; display: block; } text { fill: var(--ink); font-size: 12px; }
.predicted { fill: var(--mark); } .assumed { fill: var(--assumed); }
.calibrating { fill: none; stroke: var(--mark); }
.key.predicted, .key.calibrating { color: var(--mark); } .key.assumed { color: var(--assumed); }
.curve { fill: none; stroke-width: 2; } .curve.predicted { stroke: var(--mark); }
.curve.measured { stroke: var(--ink); } .middle { stroke: var(--ink); stroke-width: 2; }
.axis { stroke: var(--line); } .same { stroke: var(--faint); stroke-dasharray: 4 4; }
text.note { fill: var(--faint); }
.note { color: var(--faint); }
"""
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 14, 14, 44
"""Margins of a figure for its ticks and titles [SVG units]."""
_SIDE = 560
"""Width and height of the scatter plot."""
_STRIP, _STRIPS_WIDTH, _LABELS_WIDTH = 26, 900, 150
"""Height of the strip of a source in the error plot, width of the plot, and width of its labels."""
_MAX_ERROR = 0.6
"""Larger errors are drawn at the edge of the error plot."""
_CHART, _CHARTS_PER_ROW = 200, 4
"""Width and height of a scaling chart, and number of charts in a row."""
_MIN_SCALING_POINTS = 2
"""Numbers of accelerators, without the fewest, that a scaling chart needs."""
_CSV_COLUMNS = ("source", "model", "accelerator", "num_accelerators", "precision", "release")
_LEGEND = (
    '<p><span class="key predicted">&#9679;</span> predicted from the row alone '
    '<span class="key assumed">&#9679;</span> with an assumption '
    '<span class="key calibrating">&#9675;</span> used for calibration. Hover over a dot for its row.</p>'
)


def check_folder(folder: Path, *, overwrite: bool) -> None:
    """Raise ``OutputError`` if a file of the report cannot be written, before anything is computed."""
    check_report_files(folder, REPORT_FILES, overwrite=overwrite)


def write_report(league: League, folder: Path, *, overwrite: bool) -> None:
    """Write all of :data:`REPORT_FILES`, each one atomically."""
    table = league_csv(league).encode("utf-8", "replace")
    contents = (league_html(league).encode(), league_json(league), table)
    write_report_files(folder, dict(zip(REPORT_FILES, contents, strict=True)), overwrite=overwrite)


def league_csv(league: League) -> str:
    """Return one line per row: settings, prediction, published time and shares of the predicted step."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    figures = (
        "predicted_ms", "low_ms", "high_ms", "published_ms", "published_low_ms", "published_high_ms",
        "relative_error",
    )  # fmt: skip
    writer.writerow(
        ["row", "status", *_CSV_COLUMNS, *figures, "peak_memory_gib", "published_memory_gib",
         "capacity_gib", "fits", *COMPONENTS,
         "assumptions", "reason"]
    )  # fmt: skip
    for row in league.rows:
        predicted = row.row.predicted
        cells: list[object] = [row.row.number, row.status]
        cells += [escape_cell(row.row.cells.get(name, "")) for name in _CSV_COLUMNS]
        cells += [_number(getattr(row, name)) for name in figures]
        cells += map(_number, (predicted.peak_memory_bytes / 2**30, row.row.number_of("peak_memory_gib")))
        fits = {True: "true", False: "false", None: ""}[predicted.fits]
        cells += [_number(predicted.capacity_bytes / 2**30), fits]
        cells += [_number(row.parts.get(name, 0.0)) for name in COMPONENTS]
        cells += [" ".join(predicted.assumptions), escape_cell(predicted.refused)]
        writer.writerow(cells)
    return text.getvalue()


def _number(value: float) -> str:
    return "" if isnan(value) else f"{value:.6g}"


def _percent(share: float) -> str:
    return "" if isnan(share) else f"{share:.1%}"


def league_html(league: League) -> str:
    """Return the page: predicted against published times, errors, components, scaling, rows."""
    total, memory = league.whole, league.memory
    summary = (
        "no row is both predicted and measured" if total is None
        else f"{total.n:,} rows, median error {total.median_ape:.1%}, mean {total.mean_ape:.1%}, coverage of "
        f"90 % intervals {total.interval_coverage:.1%}"
    )  # fmt: skip
    if memory.n:
        summary += f"; peak memory of {memory.n:,} rows, mean error {memory.mean_ape:.1%}"
    errors = [
        (group.by, group.value, f"{group.n:,}", _percent(group.mean_ape), _percent(group.median_ape),
         _percent(group.p90_ape), f"{group.bias:+.1%}", _percent(group.interval_coverage))
        for group in league.groups
    ]  # fmt: skip
    baselines = [
        (baseline.name, f"{baseline.n:,}", _percent(baseline.mean_ape), _percent(baseline.median_ape),
         _percent(baseline.p90_ape))
        for baseline in league.baselines
    ]  # fmt: skip
    layouts = [
        (ranking.source, ranking.model, ranking.accelerator, ranking.num_accelerators, str(ranking.layouts),
         "yes" if ranking.best_in_top_two else "no", "" if isnan(ranking.tau) else f"{ranking.tau:.2f}")
        for ranking in league.layouts
    ]  # fmt: skip
    layout_titles = ("source", "model", "accelerator", "accelerators", "layouts", "best in top two", "tau")
    scaling = [
        (point.source, point.model, point.accelerator, point.precision, f"{point.base:,}",
         f"{point.num_accelerators:,}", _percent(point.published_efficiency),
         _percent(point.predicted_efficiency), f"{point.relative_error:+.1%}")
        for point in league.scaling
    ]  # fmt: skip
    scaling_titles = ("source", "model", "accelerator", "precision", "fitted on", "accelerators", "published",
                      "predicted", "error")  # fmt: skip
    speedups = [
        (speedup.source, speedup.model, speedup.precision, f"{speedup.base_accelerators:,} {speedup.base}",
         f"{speedup.num_accelerators:,} {speedup.accelerator}", f"{speedup.published:.2f}",
         f"{speedup.predicted:.2f}", "yes" if speedup.right_side else "no", f"{speedup.relative_error:+.1%}")
        for speedup in league.speedups
    ]  # fmt: skip
    speedup_titles = ("source", "model", "precision", "from", "to", "published", "predicted", "right side",
                      "error")  # fmt: skip
    factors = [
        (factor.source, factor.accelerator, factor.component, f"{factor.factor:.3f}",
         f"{factor.std_error:.3f}", f"{factor.prior_std:.3f}", f"{factor.share:.0%}", str(factor.n))
        for factor in league.factors
    ]  # fmt: skip
    factor_titles = ("source", "accelerator", "component", "factor", "std error", "prior", "share", "rows")
    sections = [
        "<h2>Predicted against published step times</h2>", _scatter_plot(league.rows),
        "<h2>Errors</h2>", _error_plot(league.rows),
        _table(("by", "value", "rows", "mean", "median", "P90", "bias", "interval coverage"), errors, 2),
        "<h2>Naive baselines</h2>", _table(("baseline", "rows", "mean", "median", "P90"), baselines, 1),
        "<h2>Step time by component</h2>", _component_table(league.rows),
        "<h2>Dominant components of errors</h2>", _dominant_table(league.rows),
        "<h2>Layouts</h2>", _table(layout_titles, layouts, 3),
        "<h2>Scaling</h2>", _scaling_charts(league), _table(scaling_titles, scaling, 4),
        "<h2>Speed-ups between accelerators</h2>", _table(speedup_titles, speedups, 5),
        "<h2>Factors</h2>" if factors else "", _table(factor_titles, factors, 3) if factors else "",
        "<h2>Rows</h2>", _row_table(league.rows),
    ]  # fmt: skip
    return "\n".join(
        (
            "<!doctype html>", '<html lang="en"><head><meta charset="utf-8"><title>League</title>',
            f"<style>{_STYLE}</style></head><body>", "<h1>Predictions of published runs</h1>",
            f"<p>{escape(league.table)}, calibration {league.calibrate}: {summary}</p>", *sections,
            f'<p class="note">hespas {escape(__version__)}</p></body></html>', "",
        )
    )  # fmt: skip


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], num_text_columns: int) -> str:
    """Return an HTML table. The first ``num_text_columns`` columns are aligned as text."""

    def line(cells: Sequence[str], tag: str) -> str:
        parts = (
            f"<{tag}{' class=text' if column < num_text_columns else ''}>{escape(cell)}</{tag}>"
            for column, cell in enumerate(cells)
        )
        return f"<tr>{''.join(parts)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    table = f"<table><thead>{line(titles, 'th')}</thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _text(x: float, y: float, text: str, anchor: str = "middle", attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{attributes}>{escape(text)}</text>'


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def _comparable(rows: Sequence[EvaluatedRow]) -> list[EvaluatedRow]:
    return [row for row in rows if row.published_ms > 0 and isfinite(row.predicted_ms)]


def _dot(row: EvaluatedRow, x: float, y: float) -> str:
    cells = row.row.cells
    title = (
        f"row {row.row.number}: {cells.get('model', '')} on {cells.get('num_accelerators', '')} "
        f"{cells.get('accelerator', '')}, {row.relative_error:+.1%}"
    )
    shape = f'class="{row.status}" cx="{x:.1f}" cy="{y:.1f}" r="3"'
    return f"<circle {shape}><title>{escape(title)}</title></circle>"


def _scatter_plot(rows: Sequence[EvaluatedRow]) -> str:
    """Return predicted over published times, on logarithmic axes."""
    comparable = _comparable(rows)
    if not comparable:
        return '<p class="note">no row is both predicted and measured</p>'
    times = [time for row in comparable for time in (row.published_ms, row.predicted_ms)]
    low, high = log10(min(times)) - 0.05, log10(max(times)) + 0.05

    def position(value: float) -> float:
        return (log10(value) - low) / (high - low) * _SIDE

    base = _TOP + _SIDE
    parts = [f'<path class="same" d="M{_LEFT} {base}L{_LEFT + _SIDE} {_TOP}"/>']
    for power in range(ceil(low), floor(high) + 1):
        tick = 10.0**power
        x, y, label = _LEFT + position(tick), base - position(tick), f"{tick:,g}"
        parts.append(f'<path class="axis" d="M{x:.1f} {_TOP}V{base}M{_LEFT} {y:.1f}H{_LEFT + _SIDE}"/>')
        parts += [_text(x, base + 16, label), _text(_LEFT - 8, y + 4, label, "end")]
    parts.append(_text(_LEFT + _SIDE / 2, base + 36, "published, ms"))
    rotation = f' transform="rotate(-90 14 {_TOP + _SIDE / 2:.1f})"'
    parts.append(_text(14, _TOP + _SIDE / 2, "predicted, ms", "middle", rotation))
    parts += (
        _dot(row, _LEFT + position(row.published_ms), base - position(row.predicted_ms)) for row in comparable
    )
    figure = _svg(_LEFT + _SIDE + _RIGHT, base + _BOTTOM, "predicted over published step times", parts)
    return _LEGEND + figure


def _error_plot(rows: Sequence[EvaluatedRow]) -> str:
    """Return the error of each row, in one strip per source with its median."""
    sources: dict[str, list[EvaluatedRow]] = {}
    for row in _comparable(rows):
        sources.setdefault(row.row.cells.get("source", "") or "not stated", []).append(row)
    base = _TOP + _STRIP * len(sources)

    def position(error: float) -> float:
        share = (min(max(error, -_MAX_ERROR), _MAX_ERROR) / _MAX_ERROR + 1) / 2
        return _LABELS_WIDTH + share * (_STRIPS_WIDTH - _LABELS_WIDTH - _RIGHT)

    parts: list[str] = []
    for tick in range(-6, 7, 2):
        line, x = "axis" if tick else "same", position(tick / 10)
        parts.append(f'<path class="{line}" d="M{x:.1f} {_TOP}V{base}"/>')
        parts.append(_text(x, base + 16, f"{tick / 10:+.0%}" if tick else "0"))
    for strip, (source, members) in enumerate(sorted(sources.items())):
        y = _TOP + _STRIP * (strip + 0.5)
        parts.append(_text(_LABELS_WIDTH - 10, y + 4, source, "end"))
        parts += (_dot(row, position(row.relative_error), y) for row in members)
        x = position(median(row.relative_error for row in members))
        parts.append(f'<path class="middle" d="M{x:.1f} {y - 10:.1f}V{y + 10:.1f}"/>')
    parts.append(_text((_LABELS_WIDTH + _STRIPS_WIDTH) / 2, base + 36, "relative error of predictions"))
    return _svg(_STRIPS_WIDTH, base + _BOTTOM, "errors of all rows by source, with medians", parts)


def _scaling_charts(league: League) -> str:
    """Return throughput per accelerator over the number of accelerators, published and predicted: a chart
    for each model that was published on three numbers of accelerators or more.
    """
    curves: dict[tuple[str, ...], list[ScalingPoint]] = {}
    for point in league.scaling:
        key = (point.source, point.model, point.accelerator, point.precision)
        curves.setdefault(key, []).append(point)
    drawn = [(key, points) for key, points in curves.items() if len(points) >= _MIN_SCALING_POINTS]
    if not drawn:
        return ""
    parts: list[str] = []
    for number, (names, points) in enumerate(drawn):
        left = (number % _CHARTS_PER_ROW) * (_CHART + 30) + 40
        top = number // _CHARTS_PER_ROW * (_CHART + 30) + 40
        parts += _scaling_chart(names, points, left, top)
    height = ceil(len(drawn) / _CHARTS_PER_ROW) * (_CHART + 30) + 20
    legend = (
        '<p>Throughput per accelerator relative to the fewest accelerators: <span class="key measured">'
        '&#9472;</span> published <span class="key predicted">&#9472;</span> predicted.</p>'
    )
    return legend + _svg(
        _CHARTS_PER_ROW * (_CHART + 30) + 20, height, "scaling, published and predicted", parts
    )


def _scaling_chart(
    key: Sequence[str], points: Sequence[ScalingPoint], left: float, top: float
) -> Iterator[str]:
    width, height = _CHART - 20, _CHART - 60
    base = points[0].base
    counts = [base, *(point.num_accelerators for point in points)]
    decades = log10(counts[-1] / base)
    efficiencies = [(point.published_efficiency, point.predicted_efficiency) for point in points]
    highest = max(1.1, *(max(pair) for pair in efficiencies))

    def x_of(count: int) -> float:
        return left + log10(count / base) / decades * width

    def position(count: int, efficiency: float) -> str:
        return f"{x_of(count):.1f} {top + height * (1 - efficiency / highest):.1f}"

    yield _text(left, top - 18, clipped(key[1]), "start")
    yield _text(left, top - 4, clipped(f"{key[2]}, {key[0]}"), "start", ' class="note"')
    yield f'<path class="axis" fill="none" d="M{left} {top}V{top + height}H{left + width}"/>'
    yield f'<path class="same" d="M{position(base, 1.0)}L{position(counts[-1], 1.0)}"/>'
    yield _text(left - 4, top + height * (1 - 1 / highest) + 4, "1", "end")
    for count in (counts[0], counts[-1]):
        yield _text(round(x_of(count), 1), top + height + 14, f"{count:,}")
    for curve, column in (("measured", 0), ("predicted", 1)):
        line = [position(base, 1.0)]
        line += [position(n, pair[column]) for n, pair in zip(counts[1:], efficiencies, strict=True)]
        yield f'<path class="curve {curve}" d="M{"L".join(line)}"/>'


def _component_table(rows: Sequence[EvaluatedRow]) -> str:
    """Return the mean share of each component in the predicted steps, by source."""
    sources: dict[str, list[EvaluatedRow]] = {}
    for row in rows:
        if row.parts:
            sources.setdefault(row.row.cells.get("source", ""), []).append(row)
    lines: list[list[str]] = []
    for source, members in sorted(sources.items()):
        shares = [sum(row.parts.get(name, 0.0) for row in members) / len(members) for name in COMPONENTS]
        lines.append([source, *(f"{share:.0%}" if share >= 0.005 else "" for share in shares)])
    return _table(("source", *COMPONENTS), lines, 1)


def _dominant_table(rows: Sequence[EvaluatedRow]) -> str:
    """Return the number of rows whose error each component dominates, by source."""
    sources: dict[str, Counter[str]] = {}
    for row in rows:
        if row.dominant:
            sources.setdefault(row.row.cells.get("source", ""), Counter())[row.dominant] += 1
    names = [name for name in (*COMPONENTS, SHARED) if any(counts[name] for counts in sources.values())]
    lines = [
        [source, *(f"{counts[name]:,}" if counts[name] else "" for name in names)]
        for source, counts in sorted(sources.items())
    ]
    note = (
        '<p class="note">Number of rows by the step component that explains most of their error. '
        f"&ldquo;{SHARED}&rdquo;: the error is common to all components.</p>"
    )
    return note + _table(("source", *names), lines, 1)


def _row_table(rows: Sequence[EvaluatedRow]) -> str:
    lines: list[tuple[str, ...]] = []
    for row in rows:
        cells = row.row.cells
        largest = sorted(row.parts.items(), key=lambda part: -part[1])[:2]
        lines.append(
            (
                str(row.row.number), row.status, cells.get("source", ""), cells.get("model", ""),
                cells.get("accelerator", ""), ", ".join(f"{name} {share:.0%}" for name, share in largest),
                row.dominant,
                cells.get("num_accelerators", ""), _number(row.predicted_ms), _number(row.low_ms),
                _number(row.high_ms), _number(row.published_ms),
                "" if isnan(row.relative_error) else f"{row.relative_error:+.1%}",
            )
        )  # fmt: skip
    titles = (
        "row", "status", "source", "model", "accelerator", "largest components", "dominates the error",
        "accelerators", "predicted, ms", "low", "high", "published, ms", "error",
    )  # fmt: skip
    return _table(titles, lines, 7)
