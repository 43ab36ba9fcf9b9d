"""The league as a folder: a page that needs nothing else, the document, and a CSV file of the rows."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from html import escape
from math import isfinite, isnan, log10
from pathlib import Path

from hespas._version import __version__
from hespas.files.documents import inert_cell
from hespas.files.output import check_destination, write_atomically
from hespas.graph.errors import OutputError
from hespas.validators.league.document import League, league_json
from hespas.validators.league.judged import JudgedRow
from hespas.validators.league.parts import COMPONENTS

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
th.text, td.text { text-align: left; }
svg { width: 100%; height: auto; } text { fill: var(--ink); font-size: 12px; }
.predicted, .calibrating { fill: var(--mark); } .assumed { fill: var(--assumed); }
.axis { stroke: var(--line); } .same { stroke: var(--faint); stroke-dasharray: 4 4; }
.note { color: var(--faint); }
"""
_SIDE = 560


def check_folder(folder: Path, *, overwrite: bool) -> None:
    """Raise ``OutputError`` where a file of the report could not be written, before anything is computed."""
    nearest = next((each for each in (folder, *folder.parents) if os.path.lexists(each)), folder)
    if not nearest.is_dir():
        raise OutputError("expected a folder", path=str(nearest), hint="name another `report=DIR`")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise OutputError("the folder is not writable", path=str(nearest), hint="name another `report=DIR`")
    for name in REPORT_FILES if nearest == folder else ():
        check_destination(folder / name, overwrite=overwrite)


def write_report(done: League, folder: Path, *, overwrite: bool) -> None:
    """Write all of :data:`REPORT_FILES`, each whole or not at all."""
    check_folder(folder, overwrite=overwrite)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder: {error.strerror}", path=str(folder)) from error
    contents = (league_html(done).encode(), league_json(done), league_csv(done).encode("utf-8", "replace"))
    for name, content in zip(REPORT_FILES, contents, strict=True):
        _write(folder / name, content, overwrite=overwrite)


def _write(path: Path, content: bytes, *, overwrite: bool) -> None:
    def fill(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_atomically(path, fill, overwrite=overwrite, directory=False)


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
        ["row", "status", *_COLUMNS, *figures, "peak_memory_gib", *COMPONENTS, "assumptions", "reason"]
    )
    for row in done.rows:
        predicted = row.row.predicted
        cells: list[object] = [row.row.number, row.status]
        cells += [inert_cell(row.row.cells.get(name, "")) for name in _COLUMNS]
        cells += [_plain(getattr(row, name)) for name in figures]
        cells.append(_plain(predicted.peak_memory_bytes / 2**30))
        cells += [_plain(row.parts.get(name, 0.0)) for name in COMPONENTS]
        cells += [" ".join(predicted.assumptions), inert_cell(predicted.refused)]
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
        "<h2>Errors</h2>",
        _table(("by", "value", "rows", "mean", "median", "P90", "bias", "interval holds"), summary, 2),
        "<h2>Naive baselines</h2>", _table(("baseline", "rows", "mean", "median", "P90"), naive, 1),
        "<h2>What steps are made of</h2>", _parts(done.rows),
        "<h2>Layouts</h2>", _layouts(done), "<h2>Scaling</h2>", _scaling(done),
        "<h2>Factors</h2>" if done.factors else "", _factors(done) if done.factors else "",
        "<h2>Rows</h2>", _rows(done.rows),
    ]  # fmt: skip
    return "\n".join(
        (
            "<!doctype html>", '<html lang="en"><head><meta charset="utf-8"><title>League</title>',
            f"<style>{_STYLE}</style></head><body>", "<h1>Published runs, predicted</h1>",
            f"<p>{escape(done.table)}, calibration {done.calibrate}: {said}</p>", *sections,
            f'<p class="note">hespas {escape(__version__)}</p></body></html>', "",
        )
    )  # fmt: skip


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
    return f"<table><thead>{line(titles, 'th')}</thead><tbody>{body}</tbody></table>"


def _scatter(rows: Sequence[JudgedRow]) -> str:
    """Predicted over published, logarithmic both."""
    known = [row for row in rows if row.published_ms > 0 and isfinite(row.predicted_ms)]
    if not known:
        return '<p class="note">nothing to draw</p>'
    values = [value for row in known for value in (row.published_ms, row.predicted_ms)]
    low, high = log10(min(values)) - 0.05, log10(max(values)) + 0.05

    def place(value: float) -> float:
        return 40 + (log10(value) - low) / (high - low) * (_SIDE - 60)

    parts = [f'<path class="same" d="M40 {_SIDE - 40}L{_SIDE - 20} 20"/>']
    for power in range(int(low) - 1, int(high) + 2):
        if low <= power <= high:
            at = place(10.0**power)
            parts.append(f'<path class="axis" d="M{at:.1f} 20V{_SIDE - 40}"/>')
            parts.append(f'<text x="{at - 18:.1f}" y="{_SIDE - 22}">{10.0**power:,g} ms</text>')
    for row in known:
        x, y = place(row.published_ms), _SIDE - place(row.predicted_ms)
        cells = row.row.cells
        title = f"row {row.row.number}: {cells.get('model', '')} {cells.get('accelerator', '')}"
        parts.append(
            f'<circle class="{row.status}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(title)}, '
            f"{row.relative_error:+.1%}</title></circle>"
        )
    label = 'role="img" aria-label="predicted over published"'
    return f'<svg viewBox="0 0 {_SIDE} {_SIDE}" {label}>{"".join(parts)}</svg>'


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
                cells.get("num_accelerators", ""), _plain(row.predicted_ms), _plain(row.low_ms),
                _plain(row.high_ms), _plain(row.published_ms),
                "" if isnan(row.relative_error) else f"{row.relative_error:+.1%}",
            )
        )  # fmt: skip
    titles = (
        "row", "status", "source", "model", "accelerator", "most of it", "accelerators", "predicted, ms",
        "low", "high", "published, ms", "error",
    )  # fmt: skip
    return _table(titles, lines, 6)
