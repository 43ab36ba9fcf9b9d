"""Reports of analyses and simulated steps: a folder with a page, CSV files and the document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hespas.analysis.device_use import QueuePointRow
from hespas.analysis.table import RowTable, listed
from hespas.files.output import write_report_files
from hespas.graph import Diagnostics
from hespas.report.charts import Chart
from hespas.report.drawings import Bar, Curve, curves, stacked_bars
from hespas.report.page import (
    OPERATION_COLUMNS,
    Block,
    ChartView,
    Drawing,
    Page,
    Paragraph,
    Section,
    TableView,
    Tile,
    Tiles,
    diagnostics_section,
    inputs_text,
    page_html,
)
from hespas.report.tables import Table
from hespas.report.texts import time_text
from hespas.report.timelines import TimelineChart

if TYPE_CHECKING:
    from markupsafe import Markup

__all__ = ["REPORT_FILES", "SECTIONS", "SIMULATED", "AnalysisSection", "analysis_html", "write_report"]

_PAGE, _ANALYSIS = "index.html", "analysis.json"
REPORT_FILES = (_PAGE, _ANALYSIS)
"""Files of the report of an analysis, besides the tables."""
_MAX_DEVICES = 4


@dataclass(frozen=True, slots=True)
class AnalysisSection:
    """Section of the analysis page with one table: its title, an explanation, and the columns that are not
    shown.
    """

    table: str
    title: str
    note: str
    left_out: frozenset[str] = frozenset()


_SHAPES = frozenset({"shapes", "dtypes"})
SECTIONS = (
    AnalysisSection(
        "spans",
        "Timeline",
        "Streams of the first ranks; events on the critical path of the median step are darker and "
        "underlined. If there are more than 100,000, short events of one kind are drawn as one.",
    ),
    AnalysisSection(
        "breakdown",
        "Time breakdown",
        "Each rank as a whole, then its steps. Exposed time runs while nothing computes; the parts add up "
        "to the span.",
        frozenset({"start_ns"}),
    ),
    AnalysisSection(
        "parts", "Difference by part of the time", "Summed over ranks; the parts add up to the span."
    ),
    AnalysisSection(
        "by_shape",
        "Operations by shape that changed",
        "The difference is divided into two parts: more or fewer runs, at the mean time before, and another "
        "mean time.",
    ),
    AnalysisSection("by_operation", "Operations that changed", "As above, by name alone.", _SHAPES),
    AnalysisSection("by_kernel", "Kernels that changed", "As above.", _SHAPES),
    AnalysisSection(
        "wins",
        "Optimization opportunities",
        "Time above the roofline: the least time that the device needs for the arithmetic and the bytes.",
    ),
    AnalysisSection(
        "idle",
        "Idle time by cause",
        "Gaps by cause, of the device (no stream ran anything) and of each stream. Host-bound: the next "
        "event was launched after the previous one had ended (launch delay: and most of the gap is after "
        "that call); kernel delay: launched in time, and below 30 us.",
    ),
    AnalysisSection(
        "gaps", "Idle time by next operation", "Gaps of the device by the operation that ran after them."
    ),
    AnalysisSection(
        "operations",
        "Operations by shape",
        "On all ranks together. The roofline time is the least that the device needs.",
    ),
    AnalysisSection(
        "classes", "Operation classes", "Costed is the share of the time whose FLOPs and bytes are known."
    ),
    AnalysisSection("kernels", "Kernels", "On all ranks together."),
    AnalysisSection(
        "tree",
        "Device time by call tree",
        "Modules, functions, ranges and operations around each launch, from the top.",
        frozenset({"node", "parent"}),
    ),
    AnalysisSection(
        "critical_path",
        "Critical path",
        "Operations that determine the length of the median step, walked backwards from its last device "
        "event: each start by the last event that it waited for.",
    ),
    AnalysisSection("critical_segments", "Critical path by segment", "In order of time, without a gap."),
    AnalysisSection(
        "collectives",
        "Collectives",
        "Bandwidths are as defined by nccl-tests; the transfer time is the least over the ranks, without "
        "waiting for late ranks.",
    ),
    AnalysisSection(
        "traffic",
        "Traffic between ranks",
        "Of the recorded ranks, in collectives whose kind, size and members are recorded.",
    ),
    AnalysisSection("stragglers", "Stragglers", "On clocks aligned by the ends of collectives."),
    AnalysisSection(
        "collective_instances",
        "Collectives across ranks",
        "Skew is the time from the first arrival to the last.",
    ),
    AnalysisSection(
        "launches", "Launches", "Calls that enqueued work; the delay is from their return to its start."
    ),
    AnalysisSection("queues", "Queue depth", "Work that was launched and had not started, over time."),
    AnalysisSection("memory", "Memory", "Peak allocated and reserved memory of each allocator."),
)
"""Sections of the page of an analysis."""

SIMULATED = (
    AnalysisSection(
        "breakdown",
        "Time breakdown",
        "Ranks that behave alike are one row. Exposed time runs while nothing computes; the parts add up "
        "to the step. A rank that finishes early is idle until the end of the step; idle time includes "
        "waiting for other ranks.",
        frozenset({"step"}),
    ),
    AnalysisSection(
        "spans",
        "Timeline",
        "Streams of the first ranks; operations on the critical path are darker and underlined. If there are "
        "more than 100,000, short operations of one class are drawn as one.",
    ),
    AnalysisSection(
        "memory", "Memory", "By rank class at its peak: of the values that the operations make and read."
    ),
    AnalysisSection("critical_path", "Critical path", "Operations that determine the length of the step."),
    AnalysisSection(
        "idle_lengths",
        "Idle time by length of the gap",
        "Times in which a rank computes nothing. The cause is the work that covers most of the gap; waiting: "
        "none does.",
    ),
    AnalysisSection(
        "across",
        "Critical path across ranks",
        "Each segment starts when the previous one allows it, by a message or a collective.",
    ),
    AnalysisSection(
        "classes", "Operation classes", "On all ranks together; critical is time on the path above."
    ),
    AnalysisSection(
        "axes",
        "Communication by axis",
        "By the groups of ranks that communicate. Bandwidths are as defined by nccl-tests.",
    ),
    AnalysisSection(
        "collectives", "Collectives by size", "Bandwidths are as defined by nccl-tests, without waiting."
    ),
    AnalysisSection(
        "traffic", "Traffic between ranks", "By the definition of each collective, and by messages."
    ),
    AnalysisSection(
        "links",
        "Network utilization",
        "By dimension of the system: of a device in the mean over the ranks, and of the rank with the most. "
        "Utilization is the share of the bandwidth over the whole step, and while in use.",
    ),
    AnalysisSection(
        "link_traffic",
        "Network traffic",
        "Bytes sent by a device, in the mean over the ranks, by kind and chosen algorithm.",
    ),
    AnalysisSection(
        "modules",
        "Time by module",
        "By the module that the operations name.",
        frozenset({"node", "parent"}),
    ),
    AnalysisSection("operations", "Operations", "On all ranks together."),
)
"""Sections of the page of a simulated step."""

_PARTS = {
    "compute_ns": ("compute", "compute"),
    "exposed_communication_ns": ("communication", "exposed communication"),
    "exposed_memory_ns": ("copies", "copies"),
    "idle_ns": ("idle", "idle"),
}
"""Parts of the span of a rank: style and text."""


def analysis_html(
    verdict: str,
    tables: Mapping[str, RowTable[Any]],
    *,
    inputs: Sequence[str],
    baseline: Sequence[str] = (),
    devices: Sequence[str] = (),
    about: str = "",
    title: str = "Time breakdown",
    shown: Sequence[AnalysisSection] = SECTIONS,
    charts: Sequence[Chart] = (),
    tiles: Sequence[Tile] = (),
    notes: Sequence[str] = (),
    diagnostics: Diagnostics | None = None,
) -> str:
    """Return the page as HTML. It loads nothing from the network, and names from files are escaped.

    ``about`` is a sentence below the verdict. The page has the sections in ``shown`` whose tables have rows
    or whose ``charts`` exist, and ``tiles`` above them.
    """
    source = inputs_text(inputs, baseline)
    on = f", on {', '.join(devices[:_MAX_DEVICES])}" if devices else ""
    summary: list[Block] = [Paragraph(verdict, "summary"), Paragraph(source + on + f". {about}", "faint")]
    summary += [Paragraph(note, "faint") for note in notes]
    summary += [Tiles("Step", tiles)] if tiles else []
    drawn = {chart.table for chart in charts}
    timeline = next((chart for chart in charts if isinstance(chart, TimelineChart)), None)
    spans = timeline.links() if timeline else {}
    sections = [
        Section(section.table, section.title, _blocks(section, tables, charts, spans), section.note)
        for section in shown
        if section.table in drawn or (section.table in tables and len(tables[section.table]))
    ]
    page = Page(title=title, summary=summary, sections=[*sections, diagnostics_section(diagnostics)])
    return page_html(page)


def _blocks(
    section: AnalysisSection,
    tables: Mapping[str, RowTable[Any]],
    charts: Sequence[Chart],
    spans: Mapping[str, str],
) -> list[Block]:
    """Return the charts of a section, and its table. ``spans`` maps operations to their spans in the
    timeline, to which the rows of these operations link.
    """
    blocks: list[Block] = [
        ChartView(chart, has_title=chart.title != section.title)
        for chart in charts
        if chart.table == section.table
    ]
    if section.table not in tables or section.table == "spans":
        return blocks
    table = tables[section.table]
    if section.table == "breakdown":
        blocks.append(Drawing(content=_part_bars(table)))
    if section.table == "queues" and "queue_points" in tables:
        blocks.append(Drawing(content=_queue_curves(tables["queue_points"])))
    left_out = section.left_out | {"depth"}
    header = tuple(
        replace(column, detail=2) if column.name in left_out else column for column in table.header
    )
    names = ("name", "operation", "kernel")
    named = next((name for name in names if name in table.columns), "")
    folded = _passing_rows(table) if "device_ns" in table.columns and "depth" in table.columns else ()
    blocks.append(
        TableView(
            name=f"table-{section.table}",
            table=Table(header, table.columns),
            label=section.title,
            file=f"{section.table}.csv",
            named=named,
            links={
                name: [spans.get(operation, "") for operation in table[name].tolist()]
                for name in ("name", *OPERATION_COLUMNS)
                if spans and name in table.columns and section.table not in {"tree", "modules"}
            },
            strong=(table["step"] < 0).tolist() if "step" in table.columns else (),
            depths=table["depth"].tolist() if "depth" in table.columns else (),
            folded=folded,
            fold_text="calls that only pass on to one other, too",
            filters={name for name in ("op_class", "kind", "cause") if name in table.columns},
        )
    )
    return blocks


def _passing_rows(table: RowTable[Any]) -> list[bool]:
    """Return a mask of the rows of the call tree that the page can hide: callers with a single callee that
    has all of their time. Modules are always shown.
    """
    if not len(table):
        return []
    depth, time, names = table["depth"], table["device_ns"], table["name"].tolist()
    is_passing = np.zeros(len(table), np.bool_)
    is_passing[:-1] = (depth[1:] == depth[:-1] + 1) & (time[1:] == time[:-1])
    return [
        bool(passing) and not name.startswith("nn.Module: ")
        for passing, name in zip(is_passing.tolist(), names, strict=True)
    ]


def _part_bars(table: RowTable[Any]) -> Markup:
    """Return stacked bars with the components of the span (compute, communication, idle). There is one bar
    per rank, or per step if there is only one rank.
    """
    ranks = listed(table["rank"])
    steps = listed(table["step"])
    spans = table["span_ns"].tolist()
    parts = np.stack([table[name] for name in _PARTS], axis=1).tolist()
    is_single = len(set(ranks)) == 1
    rows = [row for row in range(len(ranks)) if is_single or steps[row] < 0]
    bars: list[Bar] = []
    for row in rows:
        is_whole = is_single and steps[row] < 0 and len(rows) > 1
        step = f"step {steps[row]}" if steps[row] >= 0 else f"rank {ranks[row]}"
        label = "all" if is_whole else step if is_single else f"rank {ranks[row]}"
        bars.append(Bar(label, parts[row], text=time_text(spans[row]), whole=is_whole))
    return stacked_bars(bars, dict(_PARTS.values()), "more steps" if is_single else "more ranks")


def _queue_curves(points: RowTable[QueuePointRow]) -> Markup:
    """Return curves of the queue depth over time: work that was launched and has not started."""
    drawn: list[Curve] = []
    pairs = zip(listed(points["rank"]), listed(points["stream"]), strict=True)
    for rank, stream in dict.fromkeys(pairs):
        chosen = points.take((points["rank"] == rank) & (points["stream"] == stream))
        length = chosen["length"].astype(np.float64)
        span = time_text(float(chosen["time_ns"][-1] - chosen["time_ns"][0]))
        caption = f"rank {rank}, stream {stream}: launched and not started, at most {int(length.max())}"
        drawn.append(Curve(f"{caption}, over {span}", chosen["time_ns"], {"length": length}))
    return curves(drawn)


def write_report(
    folder: Path,
    page: str,
    document: bytes,
    tables: Mapping[str, RowTable[Any]],
    *,
    name: str = _ANALYSIS,
    overwrite: bool,
) -> None:
    """Write the page, the document with the file name ``name``, and a CSV file for each table that has rows.
    Each file is written atomically; other files in ``folder`` stay. In CSV files unknown charts are empty,
    and texts are safe for spreadsheets. Raises ``OutputError`` if a file exists and ``overwrite`` is false,
    or if the folder cannot be made.
    """
    contents = {_PAGE: page.encode("utf-8", "replace"), name: document}
    contents |= {f"{title}.csv": table.to_csv().encode() for title, table in tables.items() if len(table)}
    write_report_files(folder, contents, overwrite=overwrite)
