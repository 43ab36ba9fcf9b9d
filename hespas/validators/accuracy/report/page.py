"""HTML page of a comparison, with the provenance of its inputs: file hashes, versions and device figures."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import isfinite, isnan, nan
from pathlib import Path

import numpy as np
from markupsafe import Markup

from hespas._version import __version__
from hespas.files.streams import open_input
from hespas.fitting.statistics import relative_error
from hespas.graph import Profile, Timeline, Workload
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UsageError
from hespas.hardware import Device, named_device
from hespas.report.charts import Waterfall
from hespas.report.page import (
    Block,
    ChartView,
    Fold,
    Page,
    Paragraph,
    Section,
    TableView,
    Tile,
    Tiles,
    code_text,
    page_html,
)
from hespas.report.tables import Column, Table, Values, table_from_rows
from hespas.report.texts import UNKNOWN, shown
from hespas.report.timelines import TimelineChart
from hespas.validators.accuracy.baselines import BASELINES
from hespas.validators.accuracy.report.charts import ChartGroup, chart_groups
from hespas.validators.accuracy.report.tables import (
    ReportTable,
    class_tables,
    end_to_end_table,
    interval_text,
    join_table,
    limit_table,
    lint_table,
    matching_table,
    speed_up_table,
    trend_table,
)
from hespas.validators.accuracy.report.texts import (
    limits_of,
    percent,
    rate_text,
    summary_lines,
    time_text,
    verdict_of,
)
from hespas.validators.accuracy.result import Accuracy, Thresholds

__all__ = ["FileFact", "ReportProvenance", "accuracy_html", "provenance_of"]

_CHUNK = 1 << 20
_MOST_FILES = 1_000
_PACKAGES = ("numpy", "scipy", "jaxlib")
_MOST_SHAPES = 5_000
"""Most rows of the table of operations."""
_OPEN_GROUPS = 2
"""Groups of charts that are not folded: the first estimator on the first device, and all estimators on it."""
_MOST_ROWS = 200
"""Most rows of other tables; the page shows the number of the remaining rows."""
_MOST_JOINS = 2000
"""Most instructions with their operations, over all sources."""
_MOST_NAMES = 20
"""Most operations of an instruction."""
_MOST_SOURCES = 40
_VERDICTS = {
    "pass": "\N{CHECK MARK} Pass: within every limit",
    "fail": "\N{BALLOT X} Fail: a limit is exceeded",
    "unknown": "? Unknown: a limit could not be checked",
    "none": "No limits set",
}
_ERROR_NOTE = (
    "n: cases; MAPE: mean absolute error, with a 95 % bootstrap interval over distinct shapes; bias: mean "
    "signed error; sum: error of the summed time. Naive models: datasheet-roofline, published peaks alone; "
    "one-efficiency, two parameters fitted for the device; overhead+two-efficiencies, the same per class; "
    "each shape is excluded from its own fit."
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShapeRow:
    """Cases of one source and shape, as a row of a table. Times [ns] are means over ``count`` cases.
    ``share`` is their share of the measured time of the source. ``predicted_ns`` has one time per estimator.
    """

    source: str
    hardware: str
    op_class: str
    label: str
    shape: str
    count: int
    measured_ns: float
    share: float
    predicted_ns: tuple[float, ...]


def provenance_of(
    inputs: Sequence[str] = (),
    devices: Sequence[Device] = (),
    metadata: Mapping[str, Mapping[str, str]] | None = None,
) -> ReportProvenance:
    """Return the hashes of the input files (or of the files in input folders), and the versions of programs.

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


def accuracy_html(
    result: Accuracy,
    limits: Thresholds,
    provenance: ReportProvenance | None = None,
    *,
    profiles: Sequence[Profile] = (),
    timeline: Timeline | None = None,
    program: Workload | None = None,
) -> str:
    """Return the HTML page. It loads nothing from the network, and names from files are plain text in it.

    ``provenance`` defaults to the result of :func:`provenance_of` for the inputs; it must be given if a
    user's file describes a device. ``profiles`` and ``timeline`` are drawn as timelines; ``program`` has the
    names of the nodes in ``timeline``. If there are too many cases, the page shows a selection and reports
    it; it stays below 8 MB.
    """
    if provenance is None:
        devices: list[Device] = []
        for name in dict.fromkeys(cases.hardware for cases in result.cases):
            try:
                devices.append(named_device(name))
            except UsageError:
                continue
        metadata = {profile.name: profile.metadata for profile in profiles}
        provenance = provenance_of(result.inputs, devices, metadata)
    groups = list(
        chart_groups(result, provenance.devices, profiles=profiles, timeline=timeline, program=program)
    )
    charts = [chart for group in groups for chart in group.charts]
    timelines = [chart for chart in charts if isinstance(chart, TimelineChart)]
    spans = timelines[0].links() if timelines else {}
    sources = f"{len(result.cases):,} {'source' if len(result.cases) == 1 else 'sources'}"
    measured = f"{sum(map(len, result.cases)):,} measured operations of {sources} on "
    about = ". Errors are relative to the measurement: +100% is twice as long."
    page = Page(
        title="Estimates against measurements",
        summary=[Paragraph(Markup("{}{}{}").format(measured, code_text(*result.noise), about), "faint")],
        sections=[
            Section("verdict", "Verdict", _verdict_blocks(result, limits)),
            Section("errors", "Errors by class and size", _error_blocks(result), _ERROR_NOTE),
            Section("figures", "Charts", _chart_blocks(groups)),
            Section("operations", "Operations", [_operation_view(result, spans)]),
            Section("devices", "Across devices", _views(speed_up_table(result), trend_table(result))),
            Section("matching", "Matching of program and profile", _matching_blocks(result)),
            Section("data", "Data quality", _quality_blocks(result)),
            Section("provenance", "Provenance", _provenance_blocks(provenance)),
        ],
    )
    return page_html(page)


def _views(*tables: ReportTable) -> list[TableView]:
    """Return those of the given tables that have rows, as views for the page."""
    return [
        TableView(
            name=f"table-{table.name}",
            table=table.table,
            title=table.title,
            note=table.note,
            of=table.of,
            most=_MOST_JOINS,
            file="report.json",
        )
        for table in tables
        if len(table.table)
    ]


def _verdict_blocks(result: Accuracy, limits: Thresholds) -> list[Block]:
    """Return the top of the page: verdict, limits, figures of each estimator on each device, and end-to-end
    errors.
    """
    checks = limits_of(result, limits)
    verdict = verdict_of(checks)
    blocks: list[Block] = [Paragraph(_VERDICTS[verdict], f"verdict {verdict}")]
    tones = {"status": [check.status for check in checks]}
    blocks += [replace(view, title="", tones=tones) for view in _views(limit_table(result, limits))]
    for line in summary_lines(result):
        run, shape = line.run, line.shape
        least = "at least " if run is not None and run.is_lower_bound else ""
        worst = f", worst of {line.runs} sources" if line.runs > 1 else ""
        compared = (
            "nothing to compare"
            if run is None
            else f"{least}{time_text(run.predicted_ns)} for {time_text(run.measured_ns)}, "
            f"{run.basis_text}{worst}"
        )
        difference = line.baseline_mape - shape.mape
        naive = "better than the estimator" if difference < 0 else "worse than the estimator"
        noise = f"variation of repeats of equal work; n {line.noise.n:,}"
        tiles = [
            Tile(
                "End to end", UNKNOWN if run is None else percent(run.relative_error, signed=True), compared
            ),
            Tile(
                "MAPE over shapes",
                percent(shape.mape),
                f"95 %: {interval_text(shape)}; {shape.shapes:,} shapes",
            ),
            Tile("Median error", percent(shape.median_ape), f"P90 {percent(shape.p90_ape)}"),
            Tile(
                "Best naive model",
                percent(line.baseline_mape),
                f"{line.best_baseline}, {naive if difference else 'the same'}"
                if line.best_baseline
                else "none",
            ),
            Tile("Noise floor", percent(line.noise.mape), noise if line.noise.n else "nothing was repeated"),
            Tile(
                "Time estimated",
                percent(line.instance.coverage),
                f"{line.instance.n:,} of {line.instance.of:,} compared",
            ),
        ]
        if not isnan(line.matched):
            tiles.append(Tile("Device time matched", percent(line.matched), "matched with the program"))
        title = Markup("{} on {}").format(
            code_text(line.estimator, limit=60), code_text(line.hardware, limit=60)
        )
        blocks.append(Tiles(title, tiles))
    return [*blocks, *_views(end_to_end_table(result, _MOST_ROWS))]


def _error_blocks(result: Accuracy) -> list[Block]:
    """Return the tables of errors of each estimator on each device. Tables over every instance are folded."""
    blocks: list[Block] = []
    for _, _, level, table in class_tables(result):
        title = shown(table.title)
        for view in _views(table):
            strong = [str(part) == "all" for part in table.table.columns["part"]]
            if level == "shape":
                blocks.append(replace(view, title=title, strong=strong))
            else:
                blocks.append(
                    Fold(summary=title, blocks=[replace(view, title="", label=title, strong=strong)])
                )
    return blocks


def _chart_blocks(groups: Sequence[ChartGroup]) -> list[Block]:
    """Return the charts. If there are several estimators or devices, the charts of the others are folded."""
    blocks: list[Block] = []
    for number, group in enumerate(groups):
        views: list[Block] = [
            ChartView(chart, is_half=chart.name.startswith(("predicted", "error-distribution")))
            for chart in group.charts
        ]
        first = next((row for row, chart in enumerate(group.charts) if isinstance(chart, Waterfall)), 0)
        others = views[first + 1 :] if first else []
        if others:
            summary = f"{len(others):,} more {'source' if len(others) == 1 else 'sources'}"
            views[first + 1 :] = [Fold(summary=summary, blocks=others)]
        if not views:
            views = [Paragraph("Nothing that was measured is predicted, or has FLOPs and bytes.", "faint")]
        is_open = number < _OPEN_GROUPS or any(isinstance(chart, TimelineChart) for chart in group.charts)
        blocks += views if is_open else [Fold(summary=group.title, blocks=views)]
    return blocks


def _figures(values: FloatArray) -> list[float | None]:
    """Return numbers rounded to five significant digits; None if unknown or infinite."""
    numbers: list[float] = values.tolist()
    return [float(f"{value:.5g}") if isfinite(value) else None for value in numbers]


def _shape_rows(result: Accuracy, estimators: Sequence[str]) -> tuple[list[_ShapeRow], int]:
    """Return the shapes with the most measured time, longest first (at most :data:`_MOST_SHAPES`), and the
    number of shapes of all sources. O(cases log cases).
    """
    tables: list[FloatArray] = []
    for cases in result.cases:
        shape, first, index, counts = np.unique(
            cases.shape, return_index=True, return_inverse=True, return_counts=True
        )
        total = np.bincount(index, cases.measured_ns, len(shape))
        sum_ns = float(total.sum())
        share = total / sum_ns if sum_ns else total * nan
        columns = [first, shape, counts, total, total / counts, share]
        # The mean is unknown if one of the cases has no prediction.
        columns += [np.bincount(index, cases.predicted_ns(name), len(shape)) / counts for name in estimators]
        tables.append(np.stack([np.asarray(column, np.float64) for column in columns], axis=1))
    source = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    all_rows = np.concatenate(tables) if tables else np.empty((0, 6 + len(estimators)))
    order = np.argsort(-all_rows[:, 3], kind="stable")[:_MOST_SHAPES]
    rows = all_rows[order]
    shapes: list[_ShapeRow] = []
    numbers: list[int] = source[order].tolist()
    lines: list[list[float]] = rows.tolist()
    for number, cells in zip(numbers, lines, strict=True):
        of_source, row = result.cases[number], int(cells[0])
        shapes.append(
            _ShapeRow(
                source=of_source.source,
                hardware=of_source.hardware,
                op_class=of_source.classes[int(of_source.op_class[row])],
                label=of_source.labels[row],
                shape=of_source.shapes[int(cells[1])],
                count=int(cells[2]),
                measured_ns=cells[4],
                share=cells[5],
                predicted_ns=tuple(cells[6:]),
            )
        )
    return shapes, len(all_rows)


def _operation_view(result: Accuracy, spans: Mapping[str, str]) -> TableView:
    """Return the table of the shapes of all sources, with the predictions of the selected estimator.
    ``spans`` are the ids of the operations in a timeline.
    """
    estimators = list(dict.fromkeys((*result.estimators, *BASELINES)))
    rows, of = _shape_rows(result, estimators)
    signed = partial(percent, signed=True)
    several = len({cases.hardware for cases in result.cases}) > 1
    header = [
        Column("operation", kind="code"),
        Column("shape", kind="code"),
        Column("n", kind="count"),
        Column("measured", kind="time", write=time_text),
        Column("of_time", "of the time", "share", write=percent),
    ]
    columns: dict[str, Values] = {
        "operation": [row.label for row in rows],
        "shape": [row.shape for row in rows],
        "n": [row.count for row in rows],
        "measured": _figures(np.array([row.measured_ns for row in rows])),
        "of_time": _figures(np.array([row.share for row in rows])),
    }
    choices: dict[str, str] = {}
    for number, estimator in enumerate(estimators):
        choice = shown(estimator) if number < len(result.estimators) else f"{shown(estimator)} (naive)"
        predicted = np.array([row.predicted_ns[number] for row in rows])
        measured = np.array([row.measured_ns for row in rows])
        error = relative_error(predicted, measured)
        missed = (predicted - measured) * np.array(columns["n"])
        for name, title, values in (
            ("predicted", "predicted", predicted),
            ("error", "error", error),
            ("missed", "missed", missed),
        ):
            write = signed if name == "error" else partial(time_text, signed=name == "missed")
            header.append(
                Column(f"{name}-{number}", title, "number" if name == "error" else "time", write=write)
            )
            columns[f"{name}-{number}"] = _figures(values)
            choices[f"{name}-{number}"] = choice
    header.append(Column("op_class", "class"))
    columns["op_class"] = [row.op_class for row in rows]
    if len(result.cases) > 1:
        header.append(Column("source", kind="code"))
        columns["source"] = [f"{row.source} ({row.hardware})" if several else row.source for row in rows]
    return TableView(
        name="operations-table",
        table=Table(tuple(header), columns),
        label="Operations",
        note="Equal operations of one source are one row; measured and predicted are means. Missed: "
        "predicted minus measured, times n.",
        of=of,
        file="report.csv",
        named="operation",
        links={"operation": [spans.get(row.label, "") for row in rows]} if spans else {},
        filters={"op_class", "source"} if len(result.cases) <= _MOST_SOURCES else {"op_class"},
        choices=choices,
        choice_title="estimator",
    )


def _matching_blocks(result: Accuracy) -> list[Block]:
    """Return the table of matched shares, for each source the names without a match, and the table of the
    operations of each instruction.
    """
    blocks: list[Block] = [replace(view, title="") for view in _views(matching_table(result))]
    for number, (source, coverage) in enumerate(list(result.coverage.items())[:_MOST_SOURCES]):
        inner: list[Block] = []
        if coverage.inferred_time_ns:
            inner.append(
                Paragraph(
                    f"{time_text(coverage.inferred_time_ns)} belongs to instructions that the compiler "
                    "created; they are matched with the operations that they serve."
                )
            )
        if coverage.by_rule:
            rules = ", ".join(
                f"{shown(rule, 60)} {time_text(time)}" for rule, time in coverage.by_rule.items()
            )
            inner.append(Paragraph(f"By rule: {rules}.", "faint small"))
        for title, missed, unlisted, name in (
            ("Only measured", coverage.unmatched_events, coverage.unlisted_events, "measured"),
            ("Only in the program", coverage.unmatched_nodes, coverage.unlisted_nodes, "program"),
        ):
            header = (
                Column("name", kind="code"),
                Column("n", kind="count"),
                Column("time", kind="time", write=time_text, detail=2 if name == "program" else 0),
            )
            rows = [(row.name, row.count, row.total_ns) for row in missed]
            if not rows:
                inner.append(Paragraph(f"{title}: nothing.", "faint"))
                continue
            inner.append(
                TableView(
                    name=f"{name}-{number}",
                    title=f"{title}: {len(missed) + unlisted:,} names",
                    table=table_from_rows(header, rows),
                    of=len(missed) + unlisted,
                )
            )
        summary = Markup("{}: {} of the device time matched").format(
            code_text(source, limit=100), percent(coverage.time_share)
        )
        blocks.append(Fold(summary=summary, blocks=inner, is_open=len(result.coverage) == 1))
    return [*blocks, *_views(join_table(result, _MOST_JOINS, _MOST_NAMES))]


def _quality_blocks(result: Accuracy) -> list[Block]:
    """Return the findings about the quality of measurements, and the diagnostics by code."""
    found: list[Block] = [replace(view, title="") for view in _views(lint_table(result))]
    found = found or [Paragraph("No findings about the measurements.")]
    counts = result.diagnostics.counts()
    first = {row.code: row for row in reversed(list(result.diagnostics))}
    if first:
        header = (
            Column("code", kind="code"),
            Column("severity"),
            Column("n", kind="count"),
            Column("message", "first message"),
            Column("place", kind="code"),
        )
        rows = [
            (code, row.severity.value, counts[code], row.message, row.location)
            for code, row in sorted(first.items())
        ]
        table = table_from_rows(header, rows)
        summary = f"Diagnostics: {len(first):,} codes"
        view = TableView(name="codes", table=table, label=summary, most=_MOST_ROWS)
        found.append(Fold(summary=summary, blocks=[view]))
    return found


def _provenance_blocks(provenance: ReportProvenance) -> list[Block]:
    """Return the tables of input files with hashes, program versions, device figures, and profile
    metadata.
    """
    blocks: list[Block] = []
    if provenance.files:
        header = (
            Column("file", kind="code"),
            Column("bytes", kind="count"),
            Column("sha256", "SHA-256", "code"),
        )
        rows = [(file.path, file.size_bytes, file.sha256) for file in provenance.files]
        of = len(rows) + provenance.omitted
        view = TableView(
            name="files", title="Files", table=table_from_rows(header, rows), of=of, most=_MOST_ROWS
        )
        blocks.append(view)
    programs = ", ".join(f"{program} {number}" for program, number in provenance.versions.items())
    blocks.append(Paragraph(f"{programs}."))
    for number, device in enumerate(provenance.devices):
        launch = f"{time_text(device.launch_overhead_ns)} ({shown(device.launch_overhead_source, 100)})"
        inner: list[Block] = [Paragraph(f"{shown(device.description, 300)}. Launch overhead {launch}.")]
        header = (Column("figure"), Column("value", kind="number", write=str), Column("source"))
        table = table_from_rows(header, _device_rows(device))
        inner.append(
            TableView(name=f"device-{number}", table=table, label=f"Figures of {shown(device.name, 60)}")
        )
        inner += [
            Paragraph(Markup("<b>{}</b>: {}").format(shown(source.key, 60), shown(source.text, 400)), "small")
            for source in device.sources
        ]
        summary = Markup("Device {}").format(code_text(device.name, limit=60))
        blocks.append(Fold(summary=summary, blocks=inner, is_open=True))
    for number, (source, facts) in enumerate(provenance.metadata.items()):
        if facts:
            view = TableView(
                name=f"metadata-{number}",
                table=table_from_rows((Column("key"), Column("value", kind="code")), list(facts.items())),
                label="Metadata",
                most=_MOST_ROWS,
            )
            blocks.append(Fold(summary=f"Metadata of {shown(source, 100)}", blocks=[view]))
    return blocks


def _device_rows(device: Device) -> Iterator[tuple[str, str, str]]:
    """Yield peaks, memories and fits of a device: name, value and source."""
    for peak in device.peaks:
        sparse = " sparse" if peak.density == "sparse" else ""
        accumulator = f", accumulated in {peak.accumulator}" if peak.accumulator else ""
        name = f"{peak.unit} {peak.dtype}{sparse}{accumulator}"
        yield name, rate_text(peak.flops_per_s), f"{peak.source}: {peak.note}" if peak.note else peak.source
    for memory in device.memories:
        bandwidth = memory.bandwidth_bytes_per_s
        value = UNKNOWN if isnan(bandwidth) else f"{bandwidth / 1e9:.4g} GB/s"
        source = f"{memory.source}: {memory.note}" if memory.note else memory.source
        yield f"{shown(memory.name, 40)} ({memory.level})", value, source
    for row in device.efficiencies:
        value = f"{row.compute:.3g} of peak, {row.memory:.3g} of memory, {time_text(row.t0_ns)}"
        yield f"fit of {row.op_class} {row.dtype}", value, row.provenance
