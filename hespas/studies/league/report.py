"""League report: an HTML page without external files, the JSON document, and a CSV file of the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import isfinite, nan
from pathlib import Path

from hespas.files.output import write_report_files
from hespas.fitting.effects import COMPONENTS
from hespas.report.charts import Axis, Chart, Plot, Series, StripPlot
from hespas.report.page import Block, ChartView, Fold, Page, Paragraph, Section, TableView, page_html
from hespas.report.tables import Column, Table, columns, table_from_rows
from hespas.studies.league.document import League, league_json
from hespas.studies.league.evaluation import SHARED, EvaluatedRow
from hespas.studies.league.summaries import ScalingPoint

__all__ = ["REPORT_FILES", "league_charts", "league_html", "row_table", "write_report"]

REPORT_FILES = ("league.html", "league.json", "league.csv")

_STATUSES = {
    "predicted": "predicted from the row alone", "assumed": "with an assumption",
    "calibrating": "used for calibration",
}  # fmt: skip
"""Status of a row -> its text."""
_MAX_ERROR = 0.6
"""Larger errors are drawn at the edge of the error plot."""
_MIN_SCALING_POINTS = 2
"""Numbers of accelerators, without the fewest, that a scaling chart needs."""
_SHOWN_SCALING = 4
"""Scaling charts that are not folded."""
_TITLES = {
    "predicted_ms": "predicted, ms", "low_ms": "low", "high_ms": "high", "published_ms": "published, ms",
}  # fmt: skip
_PERCENT, _SIGNED = "{:.1%}".format, "{:+.1%}".format


def write_report(league: League, folder: Path, *, overwrite: bool) -> None:
    """Write all of :data:`REPORT_FILES`, each one atomically."""
    page = league_html(league).encode("utf-8", "replace")
    contents = (page, league_json(league), row_table(league.rows).to_csv().encode())
    write_report_files(folder, dict(zip(REPORT_FILES, contents, strict=True)), overwrite=overwrite)


def _figures(*names: str, detail: int = 0) -> list[Column]:
    """Return the declarations of numeric columns with their titles, shown with six digits."""
    return [
        Column(name, _TITLES.get(name, ""), "number", write="{:.6g}".format, digits=6, detail=detail)
        for name in names
    ]


def row_table(rows: Sequence[EvaluatedRow]) -> Table:
    """Return the table of all evaluated rows: settings, prediction, published time and shares of the
    predicted step.
    """
    header = (
        Column("row", kind="id"),
        *map(Column, ("status", "source", "model", "accelerator")),
        Column("num_accelerators", "accelerators", "number", write=str),
        *(Column(name, detail=2) for name in ("precision", "release")),
        *_figures("predicted_ms", "low_ms", "high_ms", "published_ms"),
        *_figures("published_low_ms", "published_high_ms", detail=2),
        Column("relative_error", "error", "number", write=_SIGNED, digits=6),
        *_figures("peak_memory_gib", "published_memory_gib", detail=2),
        *_figures("device_memory_gib", "capacity_gib", detail=2),
        Column("fits", detail=2),
        *_figures(*COMPONENTS, detail=2),
        *(Column(name, detail=2) for name in ("assumptions", "reason")),
    )
    settings = ("source", "model", "accelerator", "num_accelerators", "precision", "release")
    cells: list[tuple[object, ...]] = []
    for row in rows:
        predicted = row.row.predicted
        cells.append(
            (
                row.row.number,
                row.status,
                *(row.row.cells.get(name, "") for name in settings),
                row.predicted_ms,
                row.low_ms,
                row.high_ms,
                row.published_ms,
                row.published_low_ms,
                row.published_high_ms,
                row.relative_error,
                row.row.compared_memory_bytes / 2**30,
                row.row.number_of("peak_memory_gib"),
                predicted.device_memory_bytes / 2**30,
                predicted.capacity_bytes / 2**30,
                {True: "true", False: "false", None: ""}[predicted.fits],
                *(row.parts.get(name, 0.0) for name in COMPONENTS),
                " ".join(predicted.assumptions),
                predicted.refused,
            )
        )
    return table_from_rows(header, cells)


def league_html(league: League) -> str:
    """Return the HTML page: predicted against published times, errors, components, scaling, rows."""
    total, memory = league.whole, league.memory
    summary = (
        "no row is both predicted and measured" if total is None
        else f"{total.n:,} rows, median error {total.median_ape:.1%}, mean {total.mean_ape:.1%}, coverage of "
        f"90 % intervals {total.interval_coverage:.1%}"
    )  # fmt: skip
    if memory.n:
        summary += f"; peak memory of {memory.n:,} rows, mean error {memory.mean_ape:.1%}"
    times: list[Block] = [ChartView(chart, has_title=False) for chart in _step_charts(league)]
    errors = [ChartView(chart) for chart in _error_charts(league)]
    scaling: list[Block] = [ChartView(chart, is_half=True) for chart in _scaling_charts(league)]
    if len(scaling) > _SHOWN_SCALING:
        others = scaling[_SHOWN_SCALING:]
        scaling[_SHOWN_SCALING:] = [Fold(summary=f"{len(others):,} more charts", blocks=others)]
    sections = [
        Section(
            "times",
            "Predicted against published step times",
            times or [Paragraph("no row is both predicted and measured", "faint")],
        ),
        Section("errors", "Errors", [*errors, *_error_views(league)]),
        Section("components", "Step time by component", _component_views(league.rows)),
        Section("layouts", "Layouts", _layout_views(league)),
        Section("scaling", "Scaling", [*scaling, *_scaling_views(league)]),
        Section("speedups", "Speed-ups between accelerators", _speedup_views(league)),
        Section("factors", "Factors", _factor_views(league)),
        Section("rows", "Rows", [_row_view(league.rows)]),
    ]
    about = Paragraph(f"{league.table}, calibration {league.calibrate}: {summary}", "summary")
    return page_html(Page(title="Predictions of published runs", summary=[about], sections=sections))


def _view(name: str, label: str, header: Sequence[Column], rows: Iterable[Sequence[object]]) -> list[Block]:
    """Return a table of the report page as a list of one block; an empty list if it has no rows."""
    table = table_from_rows(header, rows)
    return [TableView(name=f"table-{name}", table=table, title=label)] if len(table) else []


def _error_views(league: League) -> list[Block]:
    """Return tables of the errors by group, and of the errors of the naive baselines."""
    groups = (
        (group.by, group.value, group.n, group.mean_ape, group.median_ape, group.p90_ape, group.bias,
         group.uncalibrated_mean_ape, group.interval_coverage)
        for group in league.groups
    )  # fmt: skip
    by_group = (
        *columns("text", "by", "value"),
        *columns("count", "rows"),
        *columns("number", "mean", "median", "P90", write=_PERCENT),
        *columns("number", "bias", write=_SIGNED),
        *columns("number", "mean without calibration", "interval coverage", write=_PERCENT),
    )
    baselines = (
        (baseline.name, baseline.n, baseline.mean_ape, baseline.median_ape, baseline.p90_ape)
        for baseline in league.baselines
    )
    naive = (
        Column("baseline"),
        *columns("count", "rows"),
        *columns("number", "mean", "median", "P90", write=_PERCENT),
    )
    return [
        *_view("groups", "Errors by group", by_group, groups),
        *_view("baselines", "Naive baselines", naive, baselines),
    ]


def _component_views(rows: Sequence[EvaluatedRow]) -> list[Block]:
    """Return tables by source: the mean share of each component in the predicted steps, and the number of
    rows in which each component dominates the error.
    """
    sources: dict[str, list[EvaluatedRow]] = {}
    dominated: dict[str, Counter[str]] = {}
    for row in rows:
        source = row.row.cells.get("source", "")
        if row.parts:
            sources.setdefault(source, []).append(row)
        if row.dominant:
            dominated.setdefault(source, Counter())[row.dominant] += 1
    shares = (
        (
            source,
            *(sum(row.parts.get(name, 0.0) for row in members) / len(members) or nan for name in COMPONENTS),
        )
        for source, members in sorted(sources.items())
    )
    of_step = (Column("source"), *(Column(name, kind="share", write="{:.0%}".format) for name in COMPONENTS))
    names = [name for name in (*COMPONENTS, SHARED) if any(counts[name] for counts in dominated.values())]
    counts = (
        (source, *(of_source[name] or nan for name in names))
        for source, of_source in sorted(dominated.items())
    )
    note = Paragraph(
        "Number of rows by the step component that explains most of their error. "
        f"\N{LEFT DOUBLE QUOTATION MARK}{SHARED}\N{RIGHT DOUBLE QUOTATION MARK}: the error is common to all "
        "components.",
        "faint small",
    )
    views = _view(
        "dominant", "Dominant components of errors", (Column("source"), *columns("count", *names)), counts
    )
    return [*_view("shares", "Mean share of the step", of_step, shares), *views, *([note] if views else [])]


def _layout_views(league: League) -> list[Block]:
    header = (
        *map(Column, ("source", "model", "accelerator")),
        Column("accelerators", kind="number", write=str),
        *columns("count", "layouts"),
        Column("best in top two"),
        *columns("number", "chosen is slower by", write=_PERCENT),
        Column("tau", kind="number", write="{:.2f}".format),
    )
    rows = (
        (ranking.source, ranking.model, ranking.accelerator, ranking.num_accelerators, ranking.layouts,
         "yes" if ranking.best_in_top_two else "no", ranking.chosen_excess, ranking.tau)
        for ranking in league.layouts
    )  # fmt: skip
    return _view("layouts", "", header, rows)


def _scaling_views(league: League) -> list[Block]:
    header = (
        *map(Column, ("source", "model", "accelerator", "precision")),
        *columns("count", "fitted on", "accelerators"),
        *columns("number", "published", "predicted", write=_PERCENT),
        *columns("number", "error", write=_SIGNED),
    )
    rows = (
        (point.source, point.model, point.accelerator, point.precision, point.base, point.num_accelerators,
         point.published_efficiency, point.predicted_efficiency, point.relative_error)
        for point in league.scaling
    )  # fmt: skip
    return _view("scaling", "", header, rows)


def _speedup_views(league: League) -> list[Block]:
    ratio = "{:.2f}".format
    header = (
        *map(Column, ("source", "model", "precision", "from", "to")),
        Column("published", kind="number", write=ratio),
        Column("predicted", kind="number", write=ratio),
        Column("right side"),
        *columns("number", "error", write=_SIGNED),
    )
    rows = (
        (speedup.source, speedup.model, speedup.precision, f"{speedup.base_accelerators:,} {speedup.base}",
         f"{speedup.num_accelerators:,} {speedup.accelerator}", speedup.published, speedup.predicted,
         "yes" if speedup.right_side else "no", speedup.relative_error)
        for speedup in league.speedups
    )  # fmt: skip
    return _view("speedups", "", header, rows)


def _factor_views(league: League) -> list[Block]:
    ratio = "{:.3f}".format
    header = (
        *map(Column, ("source", "accelerator", "component")),
        *(Column(name, kind="number", write=ratio) for name in ("factor", "std error", "prior")),
        Column("share", kind="share", write="{:.0%}".format),
        *columns("count", "rows"),
    )
    rows = (
        (factor.source, factor.accelerator, factor.component, factor.factor, factor.std_error,
         factor.prior_std, factor.share, factor.n)
        for factor in league.factors
    )  # fmt: skip
    return _view("factors", "", header, rows)


def _row_view(rows: Sequence[EvaluatedRow]) -> TableView:
    """Return the table of all rows on the page, with only the most important components."""
    table = row_table(rows)
    largest = [sorted(row.parts.items(), key=lambda part: -part[1])[:2] for row in rows]
    return TableView(
        name="table-rows",
        table=Table(
            (
                *table.header,
                Column("components", "largest components"),
                Column("dominant", "dominates the error"),
            ),
            {
                **table.columns,
                "components": [
                    ", ".join(f"{name} {share:.0%}" for name, share in parts) for parts in largest
                ],
                "dominant": [row.dominant for row in rows],
            },
        ),
        label="Rows",
        file="league.csv",
        filters=("status", "source", "model", "accelerator", "dominant"),
    )


def _comparable(rows: Sequence[EvaluatedRow]) -> list[EvaluatedRow]:
    return [row for row in rows if row.published_ms > 0 and isfinite(row.predicted_ms)]


def _row_text(row: EvaluatedRow) -> str:
    cells = row.row.cells
    return (
        f"row {row.row.number}: {cells.get('model', '')} on {cells.get('num_accelerators', '')} "
        f"{cells.get('accelerator', '')}, {row.relative_error:+.1%}"
    )


def league_charts(league: League) -> tuple[Chart, ...]:
    """Return the charts of the page: step times, errors by source, and scaling."""
    return (*_step_charts(league), *_error_charts(league), *_scaling_charts(league))


def _step_charts(league: League) -> Iterator[Plot]:
    """Yield the predicted over the published step times, if a row has both."""
    comparable = _comparable(league.rows)
    if not comparable:
        return
    times = [time * 1e6 for row in comparable for time in (row.published_ms, row.predicted_ms)]
    ends = [min(times), max(times)]
    yield Plot(
        name="step-times",
        title="Predicted over published step times",
        table="times",
        x=Axis("published", "time", is_log=True),
        y=Axis("predicted", "time", is_log=True),
        series=[
            *(
                Series(
                    label=label,
                    x=[row.published_ms * 1e6 for row in rows],
                    y=[row.predicted_ms * 1e6 for row in rows],
                    texts=list(map(_row_text, rows)),
                )
                for label, rows in _by_status(comparable)
            ),
            Series(label="equal", x=ends, y=ends, mark="guide", tone=0),
        ],
    )


def _by_status(rows: Sequence[EvaluatedRow]) -> Iterator[tuple[str, list[EvaluatedRow]]]:
    """Yield the text of each status with its rows, if it has any."""
    for status, label in _STATUSES.items():
        chosen = [row for row in rows if row.status == status]
        if chosen:
            yield label, chosen


def _error_charts(league: League) -> Iterator[StripPlot]:
    """Yield the error of each row by source, if a row has a prediction and a published time."""
    comparable = _comparable(league.rows)
    labels = sorted({_source_of(row) for row in comparable})
    if not labels:
        return
    yield StripPlot(
        name="errors",
        title="Relative error of predictions by source",
        table="errors",
        note=f"A dot is a row of the table, and a vertical line the median. Errors above {_MAX_ERROR:.0%} "
        "are drawn at the edge.",
        labels=labels,
        x=Axis("relative error", "share"),
        limit=_MAX_ERROR,
        series=[
            Series(
                label=label,
                x=[row.relative_error for row in rows],
                y=[labels.index(_source_of(row)) for row in rows],
                texts=list(map(_row_text, rows)),
            )
            for label, rows in _by_status(comparable)
        ],
    )


def _source_of(row: EvaluatedRow) -> str:
    return row.row.cells.get("source", "") or "not stated"


def _scaling_charts(league: League) -> Iterator[Plot]:
    """Yield the published and predicted throughput per accelerator over the number of accelerators, for each
    model that was published for at least three numbers of accelerators.
    """
    curves: dict[tuple[str, ...], list[ScalingPoint]] = {}
    for point in league.scaling:
        key = (point.source, point.model, point.accelerator, point.precision)
        curves.setdefault(key, []).append(point)
    drawn = [(key, points) for key, points in curves.items() if len(points) >= _MIN_SCALING_POINTS]
    for number, ((source, model, accelerator, precision), points) in enumerate(drawn, 1):
        counts = [float(count) for count in (points[0].base, *(point.num_accelerators for point in points))]
        published = [1.0, *(point.published_efficiency for point in points)]
        predicted = [1.0, *(point.predicted_efficiency for point in points)]
        yield Plot(
            name=f"scaling-{number}",
            title=f"{model} on {accelerator}, {precision} ({source})",
            table="scaling",
            x=Axis("accelerators", "count", is_log=True),
            y=Axis("throughput per accelerator, relative to the fewest accelerators", "share"),
            series=[
                Series(label="linear scaling", x=[counts[0], counts[-1]], y=[1.0, 1.0], mark="guide", tone=1),
                *(
                    Series(
                        label=label,
                        x=counts,
                        y=shares,
                        mark="curve",
                        tone=tone,
                        texts=[
                            f"{label}, {count:,.0f}: {share:.1%}"
                            for count, share in zip(counts, shares, strict=True)
                        ],
                    )
                    for tone, (label, shares) in enumerate(
                        (("published", published), ("predicted", predicted))
                    )
                ),
            ],
        )
