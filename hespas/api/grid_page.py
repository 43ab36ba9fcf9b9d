"""A grid as a page that needs nothing else: a bar with its interval per row, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import isfinite, isnan

from hespas._version import __version__
from hespas.api.grid_file import Grid
from hespas.api.grid_row import GridRow

__all__ = ["grid_page"]

_STYLE = """
:root { color-scheme: light dark; --ink: #16191d; --ground: #fff; --faint: #59616b; --line: #d3d8de;
  --compute: #2f6fb2; --exposed: #d9822b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --ground: #14171a; --faint: #a7afb8;
  --line: #3f464e; --compute: #6aa7e0; --exposed: #e9a45c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); margin: 2rem auto;
  max-width: 72rem; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .7rem; text-align: right; }
th.axis, td.axis { text-align: left; }
svg { width: 100%; height: auto; } text { fill: var(--ink); font-size: 12px; }
.compute { fill: var(--compute); } .exposed { fill: var(--exposed); } .interval { stroke: var(--ink); }
.note, .fault { color: var(--faint); }
"""
_LABEL, _WIDTH, _ROW = 380, 560, 22
_MOST_BARS = 200
_LEGEND = (
    "Blue is the step without exposed communication, orange what is exposed, the line the 90 % interval."
)


def grid_page(headline: str, grid: Grid, rows: Sequence[GridRow]) -> str:
    """The page as HTML. O(rows)."""
    shared = ", ".join(f"{key} {value}" for key, value in grid.shared.items())
    heads = [f'<th class="axis">{escape(axis.replace("_", " "))}</th>' for axis in grid.axes]
    heads += [
        f"<th>{name}</th>"
        for name in ("step, ms", "90 % interval, ms", "compute, ms", "exposed, ms", "ranks")
    ]
    return "\n".join(
        (
            "<!doctype html>", '<html lang="en"><head><meta charset="utf-8"><title>What if</title>',
            f"<style>{_STYLE}</style></head><body>", "<h1>What if</h1>", f"<p>{escape(headline)}</p>",
            f'<p class="note">All rows: {escape(shared)}. {_LEGEND}</p>',
            _bars(grid, rows), f"<table><thead><tr>{''.join(heads)}</tr></thead><tbody>",
            *(_line(grid, row) for row in rows), "</tbody></table>",
            f'<p class="note">hespas {escape(__version__)}</p></body></html>', "",
        )
    )  # fmt: skip


def _ms(value_ns: float) -> str:
    return "" if isnan(value_ns) else f"{value_ns / 1e6:,.3f}"


def _line(grid: Grid, row: GridRow) -> str:
    cells = [f'<td class="axis">{escape(str(row.settings[axis]))}</td>' for axis in grid.axes]
    if row.fault:
        return f'<tr>{"".join(cells)}<td class="axis fault" colspan="5">{escape(row.fault)}</td></tr>'
    interval = f"{_ms(row.step_low_ns)} to {_ms(row.step_high_ns)}" if not isnan(row.step_low_ns) else ""
    least = "at least " if row.is_lower_bound else ""
    figures = (
        f"{least}{_ms(row.step_ns)}",
        interval,
        _ms(row.compute_ns),
        _ms(row.exposed_comm_ns),
        f"{row.ranks:,}",
    )
    return f"<tr>{''.join(cells)}{''.join(f'<td>{figure}</td>' for figure in figures)}</tr>"


def _bars(grid: Grid, rows: Sequence[GridRow]) -> str:
    known = [row for row in rows if isfinite(row.step_ns)][:_MOST_BARS]
    longest = max(
        (max(row.step_ns, row.step_high_ns if isfinite(row.step_high_ns) else 0.0) for row in known),
        default=0.0,
    )
    if not longest:
        return ""
    scale, parts = _WIDTH / longest, list[str]()
    for place, row in enumerate(known):
        top = place * _ROW
        exposed = min(max(row.exposed_comm_ns, 0.0), row.step_ns) if isfinite(row.exposed_comm_ns) else 0.0
        split, rest = (row.step_ns - exposed) * scale, exposed * scale
        label = ", ".join(str(row.settings[axis]) for axis in grid.axes)
        parts += [
            f'<text x="0" y="{top + 15}">{escape(label[-60:])}</text>',
            f'<rect class="compute" x="{_LABEL}" y="{top + 4}" width="{split:.2f}" height="14"/>',
            f'<rect class="exposed" x="{_LABEL + split:.2f}" y="{top + 4}" width="{rest:.2f}" height="14"/>',
            f'<text x="{_LABEL + _WIDTH + 8}" y="{top + 15}">{_ms(row.step_ns)} ms</text>',
        ]
        if isfinite(row.step_low_ns) and isfinite(row.step_high_ns):
            low, high = _LABEL + row.step_low_ns * scale, _LABEL + row.step_high_ns * scale
            parts.append(f'<path class="interval" d="M{low:.2f} {top + 11}H{high:.2f}"/>')
    height, width = len(known) * _ROW, _LABEL + _WIDTH + 110
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="step by row">{"".join(parts)}</svg>'
