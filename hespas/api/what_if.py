"""Comparison of simulations: grids over devices, systems, precisions and layouts, and pairs of runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Annotated, ClassVar, Literal, cast

import msgspec
import numpy as np

from hespas._version import __version__
from hespas.api.arguments import checked
from hespas.api.documents import Document, Result, findings
from hespas.api.grid_rows import AXES, Grid, GridRow, GridValue, grid_row, read_grid
from hespas.converters import ReadOptions
from hespas.estimators.registry import named_paths
from hespas.files.documents import Figure, document_bytes, encode_json
from hespas.files.limits import limits
from hespas.files.output import check_destination, write_atomically
from hespas.files.processes import pool
from hespas.files.streams import read_document
from hespas.files.trust import allowing_programs, programs_allowed
from hespas.graph import Diagnostics, Severity
from hespas.graph.columns import pareto_rows
from hespas.graph.errors import FormatError, OutputError
from hespas.graph.hints import OUTPUT, AtLeast, AtMost, Option, OptionsOf
from hespas.graph.progress import Progress
from hespas.hardware import own_device_file, own_system_file
from hespas.report.charts import Axis, Chart, HeatMap, Plot, Series, Waterfall
from hespas.report.drawings import Bar, stacked_bars
from hespas.report.page import Block, ChartView, Drawing, Page, Paragraph, Section, TableView, page_html
from hespas.report.tables import Column, Kind, Table, column_of, table_from_rows
from hespas.report.texts import time_text

__all__ = [
    "DifferenceRow",
    "GridDocument",
    "GridResult",
    "RunDifference",
    "RunDifferenceDocument",
    "compare_runs",
    "simulate_grid",
]

_ROWS, _DOCUMENT, _TABLE, _PAGE = "rows", "grid.json", "grid.csv", "index.html"
_FIGURES = tuple(
    name for name in GridRow.__struct_fields__ if name not in {"settings", "critical_ns", "diagnostics"}
)

_KINDS: Mapping[str, Kind] = {
    "basis": "text", "ranks": "count", "is_lower_bound": "flag", "fault": "text", "exit_code": "id",
    "correction": "number",
}  # fmt: skip
"""Kinds of the figures that are not times."""
_PARTS = {"compute": "step without exposed communication", "communication": "exposed communication"}
"""Parts of a bar: style and text."""

_RUN_SCHEMA = "hespas.simulate/1"
_PartName = Literal["step", "critical path by class", "critical path by resource", "busy", "rank"]


class GridDocument(Document, frozen=True, kw_only=True):
    """JSON document of ``hespas simulate --grid``."""

    schema: Literal["hespas.grid/1"] = "hespas.grid/1"
    axes: dict[str, list[GridValue]]
    shared: dict[str, GridValue]
    rows: list[GridRow]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GridResult(Result):
    """Result of a grid: one row per combination, in the order of the axes. ``kept`` is the number of rows
    that an earlier, interrupted run had finished. ``diagnostics`` include those of all rows.
    """

    grid: Grid
    rows: tuple[GridRow, ...]
    kept: int
    diagnostics: Diagnostics

    def headline(self) -> str:
        """Return the summary line: the number of rows, and the row with the shortest step."""
        failed = sum(bool(row.fault) for row in self.rows)
        counts = f"{len(self.rows):,} row{'s' * (len(self.rows) != 1)}, {failed:,} without a time"
        best = min(
            (row for row in self.rows if not isnan(row.step_ns)), key=lambda row: row.step_ns, default=None
        )
        if best is None:
            return counts
        named = ", ".join(f"{key} {value}" for key, value in best.settings.items())
        return f"{counts}; shortest step {best.step_ns / 1e6:,.3f} ms{f': {named}' if named else ''}"

    @property
    def exit_code(self) -> int:
        """Return 0 if a row has a time, otherwise the highest exit code of the rows."""
        return 0 if any(not row.fault for row in self.rows) else max(row.exit_code for row in self.rows)

    def document(self) -> GridDocument:
        """Return the document ``hespas.grid/1`` as a value."""
        return GridDocument(
            inputs=[self.grid.path],
            diagnostics=findings(self.diagnostics),
            axes={key: list(values) for key, values in self.grid.axes.items()},
            shared=dict(self.grid.shared),
            rows=list(self.rows),
        )

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.grid/1``."""
        return document_bytes(self.document())

    def table(self) -> Table:
        """Return the result as a table with one row per combination: the settings on the axes, then the
        figures.
        """
        header = (
            *(Column(axis) for axis in self.grid.axes),
            *(column_of(name, _KINDS.get(name, "time")) for name in _FIGURES),
        )
        columns = {axis: [row.settings[axis] for row in self.rows] for axis in self.grid.axes}
        figures = {name: [getattr(row, name) for row in self.rows] for name in _FIGURES}
        return Table(header, columns | figures)

    def to_csv(self) -> str:
        """Return the rows as CSV; an unknown figure is an empty field."""
        return self.table().to_csv()

    def charts(self) -> tuple[Chart, ...]:
        """Return the heat map of the step over the two axes with the most values, and the step over the
        number of ranks; only if there are two such axes, and several numbers of ranks.
        """
        rows = [row for row in self.rows if isfinite(row.step_ns)]
        axes = [axis for axis, values in self.grid.axes.items() if len(set(map(str, values))) > 1]
        charts: list[Chart] = []
        if rows and len(axes) > 1:
            charts.append(self._heat_map(rows, sorted(axes, key=lambda axis: -len(self.grid.axes[axis]))))
        if len({row.ranks for row in rows}) > 1:
            charts.append(_step_over_ranks(rows))
        return tuple(charts)

    def _heat_map(self, rows: Sequence[GridRow], axes: Sequence[str]) -> HeatMap:
        """Return the shortest step for each pair of values of the first two axes."""
        down, across = axes[:2]
        labels = {axis: [str(value) for value in self.grid.axes[axis]] for axis in (down, across)}
        values = np.full((len(labels[down]), len(labels[across])), nan)
        for row in rows:
            cell = tuple(labels[axis].index(str(row.settings[axis])) for axis in (down, across))
            values[cell] = np.fmin(values[cell], row.step_ns)
        others = ", ".join(axis.replace("_", " ") for axis in axes[2:])
        best = f" Of {others}, the best value of each cell." if others else ""
        return HeatMap(
            name="heat-map",
            title="Step by " + " and ".join(axis.replace("_", " ") for axis in (down, across)),
            table="steps",
            note=f"Frame: the shortest step.{best}",
            rows=labels[down],
            columns=labels[across],
            values=values,
            axis=Axis("step", "time"),
            row_title=down.replace("_", " "),
            column_title=across.replace("_", " "),
            best=True,
        )

    def to_html(self) -> str:
        """Return the page: charts, a bar with its interval per row, and the table."""
        bars: list[Bar] = []
        for row in self.rows:
            if not isfinite(row.step_ns):
                continue
            exposed = (
                min(max(row.exposed_comm_ns, 0.0), row.step_ns) if isfinite(row.exposed_comm_ns) else 0.0
            )
            label = ", ".join(str(row.settings[axis]) for axis in self.grid.axes)
            parts = (row.step_ns - exposed, exposed)
            bars.append(Bar(label, parts, row.step_low_ns, row.step_high_ns, time_text(row.step_ns)))
        blocks: list[Block] = [ChartView(chart) for chart in self.charts()]
        blocks += [Drawing(content=stacked_bars(bars, _PARTS, "more rows"))] if bars else []
        view = TableView(
            name="table-rows",
            table=self.table(),
            label="Rows",
            file=_TABLE,
            filters=list(self.grid.axes),
        )
        shared = ", ".join(f"{key} {value}" for key, value in self.grid.shared.items())
        about = [Paragraph(f"All rows: {shared}.", "faint")] if shared else []
        return page_html(
            Page(
                title="What if",
                summary=[Paragraph(self.headline(), "summary"), *about],
                sections=[
                    Section("steps", "Step by row", blocks, "Frame in a bar: 90 % interval."),
                    Section("rows", "Rows", [view]),
                ],
            )
        )


def _step_over_ranks(rows: Sequence[GridRow]) -> Plot:
    """Return the step of each row over its number of ranks, with the Pareto frontier: the rows for which no
    row with as many or fewer ranks has a shorter step.
    """
    texts = [", ".join(f"{key} {value}" for key, value in row.settings.items()) for row in rows]
    frontier = [rows[index] for index in pareto_rows([(row.ranks, row.step_ns) for row in rows])]
    return Plot(
        name="pareto",
        title="Step over the number of ranks",
        table="steps",
        note="Line: Pareto frontier. No row with as many or fewer ranks has a shorter step.",
        x=Axis("ranks", "count", is_log=True),
        y=Axis("step", "time", is_log=True),
        series=[
            Series(
                label="rows",
                x=[float(row.ranks) for row in rows],
                y=[row.step_ns for row in rows],
                texts=[f"{text}: {time_text(row.step_ns)}" for text, row in zip(texts, rows, strict=True)],
            ),
            Series(
                label="Pareto frontier",
                x=[float(row.ranks) for row in frontier],
                y=[row.step_ns for row in frontier],
                mark="steps",
            ),
        ],
    )


_WHAT_IF = "What if"
"""Heading of ``--help``."""
_Grid = Annotated[
    str | Path | Grid,
    Option(
        "Sweep all combinations of the axes in this file (docs/questions/layout.md).",
        flag="grid",
        metavar="GRID.toml",
        panel=_WHAT_IF,
        is_required=False,
    ),
]
_Folder = Annotated[
    str | Path | None,
    Option(
        "Write a report: index.html, one CSV file per table and simulation.json.",
        flag="report",
        metavar="DIR",
        panel=OUTPUT,
        access="folder",
    ),
]
_Reading = Annotated[ReadOptions | None, OptionsOf(("default_dtype", "dims", "comm_groups", "run_time_unit"))]
_Jobs = Annotated[
    int,
    AtLeast(1),
    AtMost(1024),
    Option("Simulate N sweep points in parallel.", metavar="N", panel=_WHAT_IF),
]


@checked()
def simulate_grid(
    path: _Grid,
    source: str | Path | None = None,
    *,
    folder: _Folder = None,
    estimator: str | None = None,
    jobs: _Jobs = 1,
    options: _Reading = None,
    allow_programs: bool = False,
    overwrite: bool = False,
    diagnostics: Diagnostics | None = None,
    progress: Progress | None = None,
) -> GridResult:
    """Simulate every combination of the axes of a grid (a value or a file) in ``jobs`` processes. Workloads
    are read with ``options``.

    Each finished row is written into ``folder``, so that an interrupted run can be resumed. At the end
    ``grid.json``, ``grid.csv`` and a page (``index.html``) are written there; with ``overwrite`` they replace
    existing files. A row that cannot be simulated reports its error, and the next run tries it again.

    The file is untrusted data. It may only name files in its folder. Estimators that run programs, execute
    the workload or have an option that names files need ``allow_programs``, unless ``estimator`` names the
    same estimator. If the file names no estimator, ``estimator`` is used for all rows.

    Raises ``FormatError`` for a malformed file, ``BoundaryError`` if the file names something that needs
    permission, ``OutputError`` for a folder with an earlier table if ``overwrite`` is false.
    """
    with allowing_programs(allow_programs or programs_allowed()):
        grid = path
        if not isinstance(grid, Grid):
            grid = read_grid(Path(grid), None if source is None else Path(source), estimator)
        target = None if folder is None else Path(folder)
        if target is not None:
            try:
                (target / _ROWS).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                reason, hint = error.strerror or str(error), "name a folder that can be written"
                raise OutputError(reason, path=str(target / _ROWS), hint=hint) from error
            for name in (_DOCUMENT, _TABLE, _PAGE):
                check_destination(target / name, overwrite=overwrite)
        settings, reading = grid.rows(), replace(options or ReadOptions(), progress=None)
        files = [
            None if target is None else target / _ROWS / f"{_row_key(row, reading)}.json" for row in settings
        ]
        rows: list[GridRow | None] = [None if file is None else _finished_row(file) for file in files]
        kept = sum(row is not None for row in rows)
        if progress and kept:
            progress(kept, len(rows))
        shown = [{key: row[key] for key in grid.axes} for row in settings]
        missing = [index for index, row in enumerate(rows) if row is None]
        tasks = [(settings[index], shown[index], reading) for index in missing]
        for number, row in pool(_simulated_row, tasks, jobs, progress=progress, finished=kept):
            index = missing[number]
            rows[index] = row
            file = files[index]
            if file is not None and not row.fault:
                _save_row(file, encode_json(row))
        result = GridResult(
            grid=grid,
            rows=tuple(row for row in rows if row is not None),
            kept=kept,
            diagnostics=diagnostics if diagnostics is not None else Diagnostics(),
        )
        for row in result.rows:
            for finding in row.diagnostics:
                severity, rank, node = Severity(finding.severity), finding.rank, finding.node
                result.diagnostics.add(
                    finding.code, severity, finding.location, finding.message,
                    path=finding.path, rank=rank, node=node, count=finding.count,
                )  # fmt: skip
        if target is not None:
            _write(target / _DOCUMENT, result.to_json(), overwrite=overwrite)
            _write(target / _TABLE, result.to_csv().encode(), overwrite=overwrite)
            _write(target / _PAGE, result.to_html().encode("utf-8", "replace"), overwrite=overwrite)
        return result


def _simulated_row(task: tuple[Mapping[str, GridValue], Mapping[str, GridValue], ReadOptions]) -> GridRow:
    return grid_row(*task)


def _row_key(settings: Mapping[str, GridValue], options: ReadOptions) -> str:
    """Return the cache key of a row. It is a hash of its settings, the read options, the size and time of the
    files that the settings name, and the version of Hespas.
    """
    digest = blake2b(digest_size=12)
    digest.update(msgspec.json.encode([__version__, sorted(settings.items(), key=lambda item: item[0])]))
    if options != ReadOptions():
        digest.update(repr(options).encode())
    for key, value in settings.items():
        text = str(value)
        if key == "estimator":
            paths = named_paths(text.partition(":")[2])
        elif key in {"hardware", "system"}:
            file = (own_device_file if key == "hardware" else own_system_file)(text)
            paths = [] if file is None else [file]
        else:
            paths = [Path(text)] if AXES[key].is_path else []
        for path in paths:
            try:
                entries = sorted(path.iterdir()) if path.is_dir() else [path]
                stamps = [f"{entry.stat().st_size} {entry.stat().st_mtime_ns};" for entry in entries]
            except (OSError, ValueError):  # not a file: an option with another meaning
                continue
            digest.update("".join(stamps).encode())
    return digest.hexdigest()


def _finished_row(file: Path) -> GridRow | None:
    """Return a row that an earlier run finished; None for a missing or damaged file."""
    try:
        content = msgspec.json.decode(file.read_bytes(), type=dict[str, object])
        figures = {key: value for key, value in content.items() if value is not None}  # null is unknown
        return msgspec.convert(figures, GridRow)
    except (OSError, ValueError, RecursionError):
        return None


def _save_row(file: Path, content: bytes) -> None:
    """Save a finished row of the grid atomically, so that an interrupted run can continue."""
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        reason = error.strerror or str(error)
        raise OutputError(reason, path=str(file), hint="check the folder of the report") from error


def _write(path: Path, content: bytes, *, overwrite: bool) -> None:
    def fill(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_atomically(path, fill, overwrite=overwrite, directory=False)


class DifferenceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One time in two simulated runs. For the parts ``critical path`` and ``busy`` (time per resource) it is
    a time of the rank that finishes last. For ``rank`` it is the time at which that rank finishes.
    """

    part: _PartName
    name: str
    before_ns: Figure
    after_ns: Figure

    @property
    def difference_ns(self) -> float:
        """Return the time after minus the time before."""
        return self.after_ns - self.before_ns


class RunDifferenceDocument(Document, frozen=True, kw_only=True):
    """JSON document of ``hespas simulate --compare``."""

    schema: Literal["hespas.run_difference/1"] = "hespas.run_difference/1"
    rows: list[DifferenceRow]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunDifference(Result):
    """Differences between two simulated runs; a time is NaN if a run has no such part."""

    page_title: ClassVar[str] = "Comparison of two steps"

    paths: tuple[str, str]
    rows: tuple[DifferenceRow, ...]
    diagnostics: Diagnostics

    def headline(self) -> str:
        """Return the summary line: the step times of both runs."""
        step = self.rows[0]
        change = step.difference_ns / step.before_ns if step.before_ns > 0 else nan
        before, after = (
            "unknown" if isnan(time_ns) else f"{time_ns / 1e6:,.3f} ms"
            for time_ns in (step.before_ns, step.after_ns)
        )
        return f"step {before} -> {after}{'' if isnan(change) else f' ({change:+.1%})'}"

    def document(self) -> RunDifferenceDocument:
        """Return the document ``hespas.run_difference/1`` as a value."""
        return RunDifferenceDocument(
            inputs=list(self.paths), diagnostics=findings(self.diagnostics), rows=list(self.rows)
        )

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.run_difference/1``."""
        return document_bytes(self.document())

    def table(self) -> Table:
        """Return the result as a table with one row per part and name."""
        times = (column_of(name) for name in ("before_ns", "after_ns", "difference_ns"))
        rows = ((row.part, row.name, row.before_ns, row.after_ns, row.difference_ns) for row in self.rows)
        return table_from_rows((Column("part"), Column("name", kind="code"), *times), rows)

    def charts(self) -> tuple[Chart, ...]:
        """Return the waterfall of the step by operation classes on the critical path, if both steps are
        known.
        """
        step = self.rows[0]
        if isnan(step.difference_ns):
            return ()
        part = "critical path by class"
        changes = {
            row.name: float(np.nan_to_num(row.after_ns) - np.nan_to_num(row.before_ns))
            for row in self.rows
            if row.part == part
        }
        return (
            Waterfall(
                name="waterfall",
                title="From the first step to the second",
                table="rows",
                note="By operation class on the critical path of the rank that finishes last.",
                before=step.before_ns,
                after=step.after_ns,
                changes={name: change for name, change in changes.items() if change},
                axis=Axis("step", "time"),
            ),
        )


class _ReadPathTime(msgspec.Struct):
    duration_ns: float | None
    op_class: str = ""
    resource: str = ""


class _ReadBusyTime(msgspec.Struct):
    resource: str
    busy_ns: float | None


class _ReadCriticalPath(msgspec.Struct):
    op_classes: list[_ReadPathTime]
    resources: list[_ReadPathTime]


class _ReadClass(msgspec.Struct):
    finish_ns: float | None
    resources: list[_ReadBusyTime]
    critical_path: _ReadCriticalPath


class _ReadRank(msgspec.Struct):
    rank: int
    finish_ns: float | None


class _ReadSimulation(msgspec.Struct):
    """Fields of a document of ``hespas simulate --json`` that ``--compare`` reads."""

    schema: str
    step_ns: float | None
    rank_classes: list[_ReadClass]
    ranks: list[_ReadRank]


@checked()
def compare_runs(
    before: str | Path, after: str | Path, *, diagnostics: Diagnostics | None = None
) -> RunDifference:
    """Compare two documents of ``hespas simulate --json``; the largest differences come first in each part.

    Raises ``FormatError`` for a file that is not such a document.
    """
    times_before, times_after = _times_of_run(Path(before)), _times_of_run(Path(after))
    keys = list(dict.fromkeys((*times_before, *times_after)))
    rows = [
        DifferenceRow(
            part=cast("_PartName", part),
            name=name,
            before_ns=times_before.get((part, name), nan),
            after_ns=times_after.get((part, name), nan),
        )
        for part, name in keys
    ]
    order = {part: index for index, part in enumerate(dict.fromkeys(part for part, _ in keys))}

    def weight(row: DifferenceRow) -> float:
        """Return the size of a difference, by which rows are sorted; the time itself if one run has no such
        part.
        """
        if not isnan(row.difference_ns):
            return abs(row.difference_ns)
        return max((time for time in (row.before_ns, row.after_ns) if not isnan(time)), default=0.0)

    rows.sort(key=lambda row: (order[row.part], -weight(row)))
    return RunDifference(
        paths=(str(before), str(after)),
        rows=tuple(rows),
        diagnostics=diagnostics if diagnostics is not None else Diagnostics(),
    )


def _times_of_run(path: Path) -> Mapping[tuple[str, str], float]:
    """Read a document of ``hespas simulate --json``, and return its times by part and name."""
    content = read_document(path, limits().report_bytes, "a document of hespas simulate --json")
    hint = "give two files that hespas simulate --json wrote"
    try:
        run = msgspec.json.decode(content, type=_ReadSimulation)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not a simulation document: {error}", path=str(path), hint=hint) from error
    if run.schema != _RUN_SCHEMA:
        raise FormatError(f"the schema is {run.schema!r}, not {_RUN_SCHEMA!r}", path=str(path), hint=hint)
    times: dict[tuple[str, str], float | None] = {("step", ""): run.step_ns}
    last = max(run.rank_classes, key=lambda of_class: of_class.finish_ns or 0.0, default=None)
    if last is not None:
        path_times = last.critical_path
        times |= {("critical path by class", row.op_class): row.duration_ns for row in path_times.op_classes}
        times |= {
            ("critical path by resource", row.resource): row.duration_ns for row in path_times.resources
        }
        times |= {("busy", row.resource): row.busy_ns for row in last.resources}
    times |= {("rank", str(rank.rank)): rank.finish_ns for rank in run.ranks}
    return {key: nan if time_ns is None else time_ns for key, time_ns in times.items()}
