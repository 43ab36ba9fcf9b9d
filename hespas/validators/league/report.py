"""The league as a folder: a page that needs nothing else, the document, and a CSV file of the rows."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from html import escape
from math import ceil, floor, isfinite, isnan, log10
from pathlib import Path
from statistics import median

from hespas._version import __version__
from hespas.files.documents import escape_cell
from hespas.files.output import check_report_files, write_report_files
from hespas.graph.errors import clipped
from hespas.validators.league.document import League, league_json
from hespas.validators.league.judged import SHARED, JudgedRow
from hespas.validators.league.parts import COMPONENTS
from hespas.validators.league.summaries import Scaled

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
_SIDE = 560


def check_folder(folder: Path, *, overwrite: bool) -> None:
    """Raise ``OutputError`` where a file of the report could not be written, before anything is computed."""
    check_report_files(folder, REPORT_FILES, overwrite=overwrite)


def write_report(done: League, folder: Path, *, overwrite: bool) -> None:
    """Write all of :data:`REPORT_FILES`, each whole or not at all."""
    contents = (league_html(done).encode(), league_json(done), league_csv(done).encode("utf-8", "replace"))
    write_report_files(folder, dict(zip(REPORT_FILES, contents, strict=True)), overwrite=overwrite)


_COLUMNS = ("source", "model", "accelerator", "num_accelerators", "precision", "release")


def league_csv(done: League) -> str:
    """One line per row: what it is, predicted, published, and shares of the predicted step."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    figures = (
        "predicted_ms", "low_ms", "high_ms", "published_ms", "published_low_ms", "published_high_ms",
        "relative_error",
    )  # fmt: skip
    writer.writerow(
        ["row", "status", *_COLUMNS, *figures, "peak_memory_gib", "published_memory_gib",
         "capacity_gib", "fits", *COMPONENTS,
         "assumptions", "reason"]
    )  # fmt: skip
    for row in done.rows:
        predicted = row.row.predicted
        cells: list[object] = [row.row.number, row.status]
        cells += [escape_cell(row.row.cells.get(name, "")) for name in _COLUMNS]
        cells += [_plain(getattr(row, name)) for name in figures]
        cells += map(_plain, (predicted.peak_memory_bytes / 2**30, row.row.number_of("peak_memory_gib")))
        fits = {True: "true", False: "false", None: ""}[predicted.fits]
        cells += [_plain(predicted.capacity_bytes / 2**30), fits]
        cells += [_plain(row.parts.get(name, 0.0)) for name in COMPONENTS]
        cells += [" ".join(predicted.assumptions), escape_cell(predicted.refused)]
        writer.writerow(cells)
    return text.getvalue()


def _plain(value: float) -> str:
    return "" if isnan(value) else f"{value:.6g}"


def league_html(done: League) -> str:
    """The page: errors by what rows share, predicted beside published, scaling, what steps are made of."""
    whole = done.whole
    said = (
        "no row counts" if whole is None else f"{whole.n:,} rows, median error {whole.median_ape:.1%}, mean "
        f"{whole.mean_ape:.1%}, 90 % intervals hold {whole.interval_coverage:.1%}"
    )  # fmt: skip
    summary = [
        (each.by, each.value, f"{each.n:,}", *map(_percent, (each.mean_ape, each.median_ape, each.p90_ape)),
         f"{each.bias:+.1%}", _percent(each.interval_coverage))
        for each in done.groups
    ]  # fmt: skip
    naive = [
        (each.name, f"{each.n:,}", *map(_percent, (each.mean_ape, each.median_ape, each.p90_ape)))
        for each in done.baselines
    ]
    sections = [
        "<h2>Predicted beside published</h2>", _scatter(done.rows),
        "<h2>Errors</h2>", _lanes(done.rows),
        _table(("by", "value", "rows", "mean", "median", "P90", "bias", "interval holds"), summary, 2),
        "<h2>Naive baselines</h2>", _table(("baseline", "rows", "mean", "median", "P90"), naive, 1),
        "<h2>What steps are made of</h2>", _parts(done.rows),
        "<h2>What dominates errors</h2>", _dominating(done.rows),
        "<h2>Layouts</h2>", _layouts(done), "<h2>Scaling</h2>", _panels(done), _scaling(done),
        "<h2>Speed-ups between accelerators</h2>", _speedups(done),
        "<h2>Factors</h2>" if done.factors else "", _factors(done) if done.factors else "",
        "<h2>Rows</h2>", _rows(done.rows),
    ]  # fmt: skip
    return "\n".join(
        (
            "<!doctype html>", '<html lang="en"><head><meta charset="utf-8"><title>League</title>',
            f"<style>{_STYLE}</style></head><body>", "<h1>Published runs, predicted</h1>",
            f"<p>{escape(done.table)}, calibration {done.calibrate}: {said}{_memory(done)}</p>", *sections,
            f'<p class="note">hespas {escape(__version__)}</p></body></html>', "",
        )
    )  # fmt: skip


def _memory(done: League) -> str:
    memory = done.memory
    return f"; peak memory of {memory.n:,} rows, mean error {memory.mean_ape:.1%}" if memory.n else ""


def _percent(share: float) -> str:
    return "" if isnan(share) else f"{share:.1%}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], texts: int) -> str:
    """Cells as a table; the first ``texts`` columns are texts."""

    def line(cells: Sequence[str], tag: str) -> str:
        parts = (
            f"<{tag}{' class=text' if place < texts else ''}>{escape(cell)}</{tag}>"
            for place, cell in enumerate(cells)
        )
        return f"<tr>{''.join(parts)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    table = f"<table><thead>{line(titles, 'th')}</thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{table}</div>'


_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 14, 14, 44
"""Room beside a figure for its ticks and titles, in its units."""


def _logarithmic(values: Sequence[float], length: float) -> tuple[Callable[[float], float], list[float]]:
    """Places of values from 0 to ``length``, and the powers of ten among them."""
    low, high = log10(min(values)) - 0.05, log10(max(values)) + 0.05
    powers = [10.0**power for power in range(ceil(low), floor(high) + 1)]
    return lambda value: (log10(value) - low) / (high - low) * length, powers


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


_KEY = (
    '<p><span class="key predicted">&#9679;</span> predicted from the row alone '
    '<span class="key assumed">&#9679;</span> with an assumption '
    '<span class="key calibrating">&#9675;</span> calibrated on. Names appear under the pointer.</p>'
)


def _known(rows: Sequence[JudgedRow]) -> list[JudgedRow]:
    return [row for row in rows if row.published_ms > 0 and isfinite(row.predicted_ms)]


def _dot(row: JudgedRow, x: float, y: float) -> str:
    cells = row.row.cells
    title = (
        f"row {row.row.number}: {cells.get('model', '')} on {cells.get('num_accelerators', '')} "
        f"{cells.get('accelerator', '')}, {row.relative_error:+.1%}"
    )
    shape = f'class="{row.status}" cx="{x:.1f}" cy="{y:.1f}" r="3"'
    return f"<circle {shape}><title>{escape(title)}</title></circle>"


def _scatter(rows: Sequence[JudgedRow]) -> str:
    """Predicted over published, logarithmic both."""
    known = _known(rows)
    if not known:
        return '<p class="note">nothing to draw</p>'
    values = [value for row in known for value in (row.published_ms, row.predicted_ms)]
    place, powers = _logarithmic(values, _SIDE)
    base = _TOP + _SIDE
    parts = [f'<path class="same" d="M{_LEFT} {base}L{_LEFT + _SIDE} {_TOP}"/>']
    for power in powers:
        x, y, name = _LEFT + place(power), base - place(power), f"{power:,g}"
        parts.append(f'<path class="axis" d="M{x:.1f} {_TOP}V{base}M{_LEFT} {y:.1f}H{_LEFT + _SIDE}"/>')
        parts += [_text(x, base + 16, name), _text(_LEFT - 8, y + 4, name, "end")]
    parts.append(_text(_LEFT + _SIDE / 2, base + 36, "published, ms"))
    turned = f' transform="rotate(-90 14 {_TOP + _SIDE / 2:.1f})"'
    parts.append(_text(14, _TOP + _SIDE / 2, "predicted, ms", "middle", turned))
    parts += (_dot(row, _LEFT + place(row.published_ms), base - place(row.predicted_ms)) for row in known)
    figure = _svg(_LEFT + _SIDE + _RIGHT, base + _BOTTOM, "predicted over published step times", parts)
    return _KEY + figure


_LANE, _WIDE, _NAMES = 26, 900, 150
_FAR = 0.6
"""Errors beyond are drawn at the edge."""


def _lanes(rows: Sequence[JudgedRow]) -> str:
    """The error of each row, a lane for each source, and the median of each lane."""
    sources: dict[str, list[JudgedRow]] = {}
    for row in _known(rows):
        sources.setdefault(row.row.cells.get("source", "") or "not stated", []).append(row)
    base = _TOP + _LANE * len(sources)

    def place(error: float) -> float:
        return _NAMES + (min(max(error, -_FAR), _FAR) / _FAR + 1) / 2 * (_WIDE - _NAMES - _RIGHT)

    parts: list[str] = []
    for tick in range(-6, 7, 2):
        kind, x = "axis" if tick else "same", place(tick / 10)
        parts.append(f'<path class="{kind}" d="M{x:.1f} {_TOP}V{base}"/>')
        parts.append(_text(x, base + 16, f"{tick / 10:+.0%}" if tick else "0"))
    for lane, (source, some) in enumerate(sorted(sources.items())):
        y = _TOP + _LANE * (lane + 0.5)
        parts.append(_text(_NAMES - 10, y + 4, source, "end"))
        parts += (_dot(row, place(row.relative_error), y) for row in some)
        middle = place(median(row.relative_error for row in some))
        parts.append(f'<path class="middle" d="M{middle:.1f} {y - 10:.1f}V{y + 10:.1f}"/>')
    parts.append(_text((_NAMES + _WIDE) / 2, base + 36, "predicted over published, less 1"))
    return _svg(_WIDE, base + _BOTTOM, "errors of all rows by source, and their medians", parts)


_PANEL, _ACROSS = 200, 4
_FEWEST_COUNTS = 2
"""Counts of accelerators beside the fewest from which a model's scaling is drawn."""


def _panels(done: League) -> str:
    """How throughput of an accelerator falls with their number, published and predicted: a panel for each
    model that was published on three numbers of them and more.
    """
    curves: dict[tuple[str, ...], list[Scaled]] = {}
    for each in done.scaling:
        curves.setdefault((each.source, each.model, each.accelerator, each.precision), []).append(each)
    drawn = [(key, some) for key, some in curves.items() if len(some) >= _FEWEST_COUNTS]
    if not drawn:
        return ""
    parts: list[str] = []
    for number, (key, some) in enumerate(drawn):
        left, top = (number % _ACROSS) * (_PANEL + 30) + 40, number // _ACROSS * (_PANEL + 30) + 40
        parts += _panel(key, some, left, top)
    height = ceil(len(drawn) / _ACROSS) * (_PANEL + 30) + 20
    legend = (
        '<p>Throughput of an accelerator over that on the fewest: <span class="key measured">&#9472;</span> '
        'published <span class="key predicted">&#9472;</span> predicted.</p>'
    )
    return legend + _svg(_ACROSS * (_PANEL + 30) + 20, height, "scaling, published and predicted", parts)


def _panel(key: Sequence[str], some: Sequence[Scaled], left: float, top: float) -> Iterator[str]:
    wide, tall = _PANEL - 20, _PANEL - 60
    base = some[0].base
    counts = [base, *(each.num_accelerators for each in some)]
    across = log10(counts[-1] / base)
    both = [(each.published_efficiency, each.predicted_efficiency) for each in some]
    high = max(1.1, *(max(pair) for pair in both))

    def at(count: int, efficiency: float) -> str:
        return f"{left + log10(count / base) / across * wide:.1f} {top + tall * (1 - efficiency / high):.1f}"

    yield _text(left, top - 18, clipped(key[1]), "start")
    yield _text(left, top - 4, clipped(f"{key[2]}, {key[0]}"), "start", ' class="note"')
    yield f'<path class="axis" fill="none" d="M{left} {top}V{top + tall}H{left + wide}"/>'
    yield f'<path class="same" d="M{at(base, 1.0)}L{at(counts[-1], 1.0)}"/>'
    yield _text(left - 4, top + tall * (1 - 1 / high) + 4, "1", "end")
    for count in (counts[0], counts[-1]):
        yield _text(float(at(count, 0).split()[0]), top + tall + 14, f"{count:,}")
    for kind, column in (("measured", 0), ("predicted", 1)):
        points = [at(base, 1.0), *(at(n, pair[column]) for n, pair in zip(counts[1:], both, strict=True))]
        yield f'<path class="curve {kind}" d="M{"L".join(points)}"/>'


def _parts(rows: Sequence[JudgedRow]) -> str:
    """By source the mean share of each component in the predicted steps."""
    sources: dict[str, list[JudgedRow]] = {}
    for row in rows:
        if row.parts:
            sources.setdefault(row.row.cells.get("source", ""), []).append(row)
    lines: list[list[str]] = []
    for source, some in sorted(sources.items()):
        shares = [sum(row.parts.get(name, 0.0) for row in some) / len(some) for name in COMPONENTS]
        lines.append([source, *(f"{share:.0%}" if share >= 0.005 else "" for share in shares)])
    return _table(("source", *COMPONENTS), lines, 1)


def _layouts(done: League) -> str:
    lines = [
        (each.source, each.model, each.accelerator, each.num_accelerators, str(each.layouts),
         "yes" if each.best_in_top_two else "no", "" if isnan(each.tau) else f"{each.tau:.2f}")
        for each in done.layouts
    ]  # fmt: skip
    titles = ("source", "model", "accelerator", "accelerators", "layouts", "best in top two", "tau")
    return _table(titles, lines, 3)


def _scaling(done: League) -> str:
    lines = [
        (each.source, each.model, each.accelerator, each.precision, f"{each.base:,}",
         f"{each.num_accelerators:,}", _percent(each.published_efficiency),
         _percent(each.predicted_efficiency), f"{each.relative_error:+.1%}")
        for each in done.scaling
    ]  # fmt: skip
    titles = ("source", "model", "accelerator", "precision", "fitted on", "accelerators", "published",
              "predicted", "error")  # fmt: skip
    return _table(titles, lines, 4)


def _speedups(done: League) -> str:
    lines = [
        (each.source, each.model, each.precision, f"{each.base_accelerators:,} {each.base}",
         f"{each.num_accelerators:,} {each.accelerator}", f"{each.published:.2f}", f"{each.predicted:.2f}",
         "yes" if each.right_side else "no", f"{each.relative_error:+.1%}")
        for each in done.speedups
    ]  # fmt: skip
    titles = ("source", "model", "precision", "of", "to", "published", "predicted", "right side", "error")
    return _table(titles, lines, 5)


def _dominating(rows: Sequence[JudgedRow]) -> str:
    """By source, of how many rows each part of the step dominates the error."""
    sources: dict[str, Counter[str]] = {}
    for row in rows:
        if row.dominant:
            sources.setdefault(row.row.cells.get("source", ""), Counter())[row.dominant] += 1
    names = [name for name in (*COMPONENTS, SHARED) if any(counts[name] for counts in sources.values())]
    lines = [
        [source, *(f"{counts[name]:,}" if counts[name] else "" for name in names)]
        for source, counts in sorted(sources.items())
    ]
    about = (
        '<p class="note">Rows by the part of the step that most of the error is put down to: what rows that '
        f"err alike have in common. &ldquo;{SHARED}&rdquo;: no part in particular.</p>"
    )
    return about + _table(("source", *names), lines, 1)


def _factors(done: League) -> str:
    lines = [
        (each.source, each.accelerator, each.component, f"{each.factor:.3f}", f"{each.std_error:.3f}",
         f"{each.prior_std:.3f}", f"{each.share:.0%}", str(each.n))
        for each in done.factors
    ]  # fmt: skip
    titles = ("source", "accelerator", "component", "factor", "std error", "prior", "share", "rows")
    return _table(titles, lines, 3)


def _rows(rows: Sequence[JudgedRow]) -> str:
    lines: list[tuple[str, ...]] = []
    for row in rows:
        cells = row.row.cells
        largest = sorted(row.parts.items(), key=lambda part: -part[1])[:2]
        lines.append(
            (
                str(row.row.number), row.status, cells.get("source", ""), cells.get("model", ""),
                cells.get("accelerator", ""), ", ".join(f"{name} {share:.0%}" for name, share in largest),
                row.dominant,
                cells.get("num_accelerators", ""), _plain(row.predicted_ms), _plain(row.low_ms),
                _plain(row.high_ms), _plain(row.published_ms),
                "" if isnan(row.relative_error) else f"{row.relative_error:+.1%}",
            )
        )  # fmt: skip
    titles = (
        "row", "status", "source", "model", "accelerator", "most of it", "dominates the error",
        "accelerators", "predicted, ms", "low", "high", "published, ms", "error",
    )  # fmt: skip
    return _table(titles, lines, 7)
