"""Reports of analyses and simulated steps: a folder with a page, CSV files and the document."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from hespas._version import __version__
from hespas.analysis.table import Table
from hespas.files.documents import encode_json, escape_cell, json_for_script
from hespas.files.output import check_report_files, write_report_files
from hespas.graph import Diagnostics

__all__ = ["SECTIONS", "SIMULATED", "Section", "analysis_html", "check_folder", "write_report"]

_PAGE, _ANALYSIS = "index.html", "analysis.json"
_MAX_ROWS = 5000
"""Rows of a table on the page; its CSV file has all rows."""
_MAX_DIAGNOSTICS = 100
_PACKAGE = "hespas.analysis"


@dataclass(frozen=True, slots=True)
class Section:
    """Table on the page: its title, an explanation, and the columns that are not shown."""

    table: str
    title: str
    note: str
    left_out: frozenset[str] = frozenset()


_SHAPES = frozenset({"shapes", "dtypes"})
SECTIONS = (
    Section(
        "breakdown",
        "Time breakdown",
        "Each rank as a whole, then its steps. Exposed time runs while nothing computes; the parts add up "
        "to the span.",
        frozenset({"start_ns"}),
    ),
    Section("parts", "Difference by part of the time", "Summed over ranks; the parts add up to the span."),
    Section(
        "by_shape",
        "Operations by shape that changed",
        "The difference is divided into two parts: more or fewer runs, at the mean time before, and another "
        "mean time.",
    ),
    Section("by_operation", "Operations that changed", "As above, by name alone.", _SHAPES),
    Section("by_kernel", "Kernels that changed", "As above.", _SHAPES),
    Section(
        "wins",
        "Optimization opportunities",
        "Time above the roofline: the least time that the device needs for the arithmetic and the bytes.",
    ),
    Section(
        "idle",
        "Idle time by cause",
        "Gaps by cause, of the device (no stream ran anything) and of each stream. Host-bound: the next "
        "event was launched after the previous one had ended (launch delay: and most of the gap is after "
        "that call); kernel delay: launched in time, and below 30 us.",
    ),
    Section(
        "gaps", "Idle time by next operation", "Gaps of the device by the operation that ran after them."
    ),
    Section(
        "operations",
        "Operations by shape",
        "On all ranks together. The roofline time is the least that the device needs.",
    ),
    Section(
        "classes", "Operation classes", "Costed is the share of the time whose FLOPs and bytes are known."
    ),
    Section("kernels", "Kernels", "On all ranks together."),
    Section(
        "tree",
        "Device time by call tree",
        "Modules, functions, ranges and operations around each launch, from the top.",
        frozenset({"node", "parent"}),
    ),
    Section(
        "critical_path",
        "Critical path",
        "Operations that determine the length of the median step, walked backwards from its last device "
        "event: each start by the last event that it waited for.",
    ),
    Section("critical_segments", "Critical path by segment", "In order of time, without a gap."),
    Section(
        "collectives",
        "Collectives",
        "Bandwidths are as defined by nccl-tests; the transfer time is the least over the ranks, without "
        "waiting for late ranks.",
    ),
    Section("stragglers", "Stragglers", "On clocks aligned by the ends of collectives."),
    Section(
        "collective_instances",
        "Collectives across ranks",
        "Skew is the time from the first arrival to the last.",
    ),
    Section("launches", "Launches", "Calls that enqueued work; the delay is from their return to its start."),
    Section("queues", "Queue depth", "Work that was launched and had not started, over time."),
    Section("memory", "Memory", "Peak allocated and reserved memory of each allocator."),
)
"""Sections of the page of an analysis."""

SIMULATED = (
    Section(
        "breakdown",
        "Time breakdown",
        "Ranks that behave alike are one row. Exposed time runs while nothing computes; the parts add up "
        "to the step. A rank that finishes early is idle until the end of the step; idle time includes "
        "waiting for other ranks.",
        frozenset({"step"}),
    ),
    Section(
        "spans",
        "Timeline",
        "Streams of the first ranks; operations on the critical path are darker. Adjacent short operations "
        "of one class are drawn as one. A `timeline` file shows all operations in a viewer.",
    ),
    Section("critical_path", "Critical path", "Operations that determine the length of the step."),
    Section(
        "across",
        "Critical path across ranks",
        "Each segment starts when the previous one allows it, by a message or a collective.",
    ),
    Section("classes", "Operation classes", "On all ranks together; critical is time on the path above."),
    Section(
        "axes",
        "Communication by axis",
        "By the groups of ranks that communicate. Bandwidths are as defined by nccl-tests.",
    ),
    Section(
        "links",
        "Network utilization",
        "By dimension of the system: of a device in the mean over the ranks, and of the rank with the most. "
        "Utilization is the share of the bandwidth over the whole step, and while in use.",
    ),
    Section(
        "link_traffic",
        "Network traffic",
        "Bytes sent by a device, in the mean over the ranks, by kind and chosen algorithm.",
    ),
    Section(
        "modules",
        "Time by module",
        "By the module that the operations name.",
        frozenset({"node", "parent"}),
    ),
    Section("operations", "Operations", "On all ranks together."),
)
"""Sections of the page of a simulated step."""

_ID_COLUMNS = frozenset({"rank", "step", "stream", "device", "depth", "sequence", "first_rank", "last_rank"})
"""Columns of whole numbers that identify something."""
_MOMENT_COLUMNS = frozenset({"start_ns", "end_ns", "peak_time_ns"})
"""Columns of moments on the clock of the recording."""
_UNITS = {"gbytes_per_s": "GB/s", "tflops_per_s": "TFLOP/s", "_ns": "", "_bytes": "", "": ""}
"""Suffixes of column names -> units in labels; the page writes times and bytes with their own units."""


def analysis_html(
    verdict: str,
    tables: Mapping[str, Table[Any]],
    *,
    inputs: Sequence[str],
    baseline: Sequence[str] = (),
    devices: Sequence[str] = (),
    about: str = "",
    title: str = "Time breakdown",
    shown: Sequence[Section] = SECTIONS,
    notes: Sequence[str] = (),
    diagnostics: Diagnostics | None = None,
) -> str:
    """Return the page as HTML. It loads nothing, and names from files are escaped. ``about`` is a sentence
    below the verdict; of the sections in ``shown``, those whose table has rows are on the page.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(_PACKAGE, "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    sections = [section for section in shown if section.table in tables and len(tables[section.table])]
    points = {
        name: {key: column.tolist() for key, column in tables[name].columns.items()} if name in tables else {}
        for name in ("queue_points", "memory_points")
    }
    data = {"sections": [_section_data(section, tables[section.table]) for section in sections], **points}
    distinct = {(row.code, row.path, row.message): row for row in diagnostics or ()}
    rows = list(distinct.values())
    templates = files(_PACKAGE) / "templates"
    return environment.get_template("page.html").render(
        version=__version__,
        verdict=verdict,
        inputs=list(inputs),
        baseline=list(baseline),
        devices=list(devices),
        about=about,
        title=title,
        notes=list(notes),
        sections=sections,
        diagnostics=rows[:_MAX_DIAGNOSTICS],
        more=max(len(rows) - _MAX_DIAGNOSTICS, 0),
        json=Markup(json_for_script(encode_json(data))),
        style=Markup((templates / "page.css").read_text(encoding="utf-8")),
        script=Markup((templates / "page.js").read_text(encoding="utf-8")),
    )


def _section_data(section: Section, table: Table[Any]) -> dict[str, object]:
    """Return a section as the script reads it: columns of values, null if unknown."""
    shown = table.take(np.arange(min(len(table), _MAX_ROWS)))
    names = [name for name in table.columns if name not in section.left_out]
    columns: list[dict[str, str]] = []
    for name in names:
        kinds = {
            "text": shown[name].dtype == np.object_,
            "moment": name in _MOMENT_COLUMNS,
            "time": name.endswith("_ns"),
            "share": name in {"overlap", "share"} or name.endswith("_share"),
            "bytes": name == "bytes_moved" or name.endswith("_bytes"),
            "flops": name == "flops",
            "name": name in _ID_COLUMNS,
            "count": shown[name].dtype.kind in "iu",
        }
        kind = next((kind for kind, applies in kinds.items() if applies), "number")
        unit = next((suffix for suffix in _UNITS if name.endswith(suffix)), "")
        label = f"{name.removesuffix(unit).replace('_', ' ')} {_UNITS[unit]}".strip()
        columns.append({"name": name, "label": label, "kind": kind})
    return {
        "table": section.table,
        "title": section.title,
        "note": section.note,
        "of": len(table),
        "columns": columns,
        "values": [shown[name].tolist() for name in names],
    }


def check_folder(folder: Path, *, document: str = _ANALYSIS, overwrite: bool) -> None:
    """Raise what :func:`write_report` would raise, before anything is computed."""
    check_report_files(folder, (_PAGE, document), overwrite=overwrite)


def write_report(
    folder: Path,
    page: str,
    document: bytes,
    tables: Mapping[str, Table[Any]],
    *,
    name: str = _ANALYSIS,
    overwrite: bool,
) -> None:
    """Write the page, the document as ``name``, and a CSV file per table with rows, each atomically. Other
    files in ``folder`` stay. In CSV files unknown figures are empty, and texts are safe for spreadsheets.
    Raises ``OutputError`` if a file exists (without ``overwrite``) or the folder cannot be made.
    """
    contents = {_PAGE: page.encode("utf-8", "replace"), name: document}
    for title, table in tables.items():
        if not len(table):
            continue
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(table.columns)
        for row in zip(*(column.tolist() for column in table.columns.values()), strict=True):
            writer.writerow(
                "" if isinstance(cell, float) and isnan(cell) else escape_cell(cell) for cell in row
            )
        contents[f"{title}.csv"] = text.getvalue().encode("utf-8", "replace")
    write_report_files(folder, contents, overwrite=overwrite)
