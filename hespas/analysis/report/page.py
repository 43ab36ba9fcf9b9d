"""The page: figures of all tables as data in it, which a script of its own draws, sorts and searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from hespas._version import __version__
from hespas.analysis.table import Table
from hespas.files.documents import encoded, json_for_script
from hespas.graph import Diagnostics

__all__ = ["SECTIONS", "SIMULATED", "Section", "analysis_html"]

_MOST_ROWS = 5000
"""Rows of a table on the page; its CSV file has all."""
_MOST_DIAGNOSTICS = 100
_TEMPLATES = "hespas.analysis.report"


@dataclass(frozen=True, slots=True)
class Section:
    """A table on the page: its title, what it says, and the columns that are left out of it."""

    table: str
    title: str
    note: str
    left_out: frozenset[str] = frozenset()


_SHAPES = frozenset({"shapes", "dtypes"})
SECTIONS = (
    Section(
        "breakdown",
        "Where the time went",
        "Each rank as a whole, then its steps. Exposed is what runs while nothing computes; the parts add up "
        "to the span.",
        frozenset({"start_ns"}),
    ),
    Section("parts", "Where the difference lies", "Summed over ranks; the parts add up to the span."),
    Section(
        "by_shape",
        "Operations by shape that changed",
        "The difference is what comes of running more or fewer times, at the mean time of before, and what "
        "comes of another mean time.",
    ),
    Section(
        "by_operation", "Operations that changed", "As above, by name alone.", frozenset({"shapes", "dtypes"})
    ),
    Section("by_kernel", "Kernels that changed", "As above.", frozenset({"shapes", "dtypes"})),
    Section(
        "wins",
        "Where time would be won",
        "Time beyond the roof: the least that the device needs for the arithmetic and the bytes.",
    ),
    Section(
        "idle",
        "Why nothing ran",
        "Gaps by cause, of the device (no stream ran anything) and of each stream. Host-bound: the next "
        "event was launched after the one before had ended (launch delay: and most of the gap lies behind "
        "that call); kernel delay: launched in time, and below 30 us.",
    ),
    Section("gaps", "What the device waited for", "Gaps of the device by what ran after them."),
    Section(
        "operations",
        "Operations by shape",
        "On all ranks together. The roof is what the device needs at least.",
    ),
    Section(
        "classes", "Operation classes", "Costed is the share of the time whose FLOPs and bytes are known."
    ),
    Section("kernels", "Kernels", "On all ranks together."),
    Section(
        "tree",
        "Device time by calls",
        "Modules, functions, ranges and operations around each launch, from the top.",
        frozenset({"node", "parent"}),
    ),
    Section(
        "critical_path",
        "Critical path",
        "What the length of the step of median length hangs on, from its last device event back: each start "
        "by what allowed it last.",
    ),
    Section("critical_segments", "The critical path, stretch by stretch", "In order of time, without a gap."),
    Section(
        "collectives",
        "Collectives",
        "Bandwidths as nccl-tests defines them; the transfer is the least time over the ranks, without "
        "waiting for those that come late.",
    ),
    Section("stragglers", "Who came last", "On clocks aligned by the ends of collectives."),
    Section(
        "collective_instances",
        "Each collective across ranks",
        "From the first arrival to the last is the skew.",
    ),
    Section("launches", "Launches", "Calls that enqueued work; the delay is from their return to its start."),
    Section("queues", "Queues", "Work that was launched and had not started, over time."),
    Section("memory", "Memory", "What allocators gave out and held at most."),
)

SIMULATED = (
    Section(
        "breakdown",
        "Where the time goes",
        "Ranks that do the same are one. Exposed is what runs while nothing computes; the parts add up "
        "to the step, at whose end one that was done earlier is idle; idle also waits for other ranks.",
        frozenset({"step"}),
    ),
    Section(
        "spans",
        "What runs when",
        "Streams of the first ranks; what the critical path goes through is darker. Short operations of one "
        "class that stand together are drawn as one. A `timeline` shows each, in a viewer.",
    ),
    Section(
        "critical_path",
        "Critical path",
        "What the length of the step hangs on.",
    ),
    Section(
        "across",
        "The critical path from rank to rank",
        "Each stretch starts when the one before it lets it, by a message or a collective.",
    ),
    Section("classes", "Operation classes", "On all ranks together; critical is on the path above."),
    Section(
        "axes",
        "Communication by axis",
        "By the groups of ranks that talk to each other. Bandwidths as nccl-tests defines them.",
    ),
    Section(
        "links",
        "Use of the network",
        "By dimension of the system, of a device in the mean over the ranks, and of the one that has most. "
        "Utilization is of the bandwidth over the whole step, and while in use.",
    ),
    Section(
        "link_traffic",
        "What the network carries",
        "What a device sends, in the mean over the ranks, by kind and the algorithm that was chosen.",
    ),
    Section(
        "modules",
        "By module",
        "As the operations say whose they are.",
        frozenset({"node", "parent"}),
    ),
    Section("operations", "Operations", "On all ranks together."),
)
"""The sections of a page on a simulated step."""

_NUMBERS = frozenset({"rank", "step", "stream", "device", "depth", "sequence", "first_rank", "last_rank"})
"""Whole numbers that name something."""


_MOMENTS = frozenset({"start_ns", "end_ns", "peak_time_ns"})
"""On the clock of the recording."""


def _kind(name: str, column: np.ndarray[Any, Any]) -> str:
    """How figures of a column are written."""
    kinds = {
        "text": column.dtype == np.object_,
        "moment": name in _MOMENTS,
        "time": name.endswith("_ns"),
        "share": name in {"overlap", "share"} or name.endswith("_share"),
        "bytes": name == "bytes_moved" or name.endswith("_bytes"),
        "flops": name == "flops",
        "name": name in _NUMBERS,
        "count": column.dtype.kind in "iu",
    }
    return next((kind for kind, holds in kinds.items() if holds), "number")


_UNITS = {"gbytes_per_s": "GB/s", "tflops_per_s": "TFLOP/s"}


def _label(name: str) -> str:
    for suffix, unit in _UNITS.items():
        if name.endswith(suffix):
            return f"{name.removesuffix(suffix).replace('_', ' ')} {unit}".strip()
    for suffix in ("_ns", "_bytes"):
        name = name.removesuffix(suffix)
    return name.replace("_", " ")


def _data(table: Table[Any], left_out: frozenset[str]) -> dict[str, object]:
    """A table as the script reads it: columns of values, null where unknown."""
    shown = table.take(np.arange(min(len(table), _MOST_ROWS)))
    names = [name for name in table.columns if name not in left_out]
    return {
        "of": len(table),
        "columns": [
            {"name": name, "label": _label(name), "kind": _kind(name, shown[name])} for name in names
        ],
        "values": [shown[name].tolist() for name in names],
    }


def _template(name: str) -> str:
    return (files(_TEMPLATES) / "templates" / name).read_text(encoding="utf-8")


def analysis_html(
    verdict: str,
    tables: Mapping[str, Table[Any]],
    *,
    inputs: Sequence[str],
    against: Sequence[str] = (),
    devices: Sequence[str] = (),
    about: str = "",
    title: str = "Where the time went",
    shown: Sequence[Section] = SECTIONS,
    notes: Sequence[str] = (),
    diagnostics: Diagnostics | None = None,
) -> str:
    """The page; it loads nothing, and names from files are text in it, whatever they hold. ``about`` is a
    sentence below the verdict, ``shown`` are the sections that are there where their table has rows.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(_TEMPLATES, "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    sections = [each for each in shown if each.table in tables and len(tables[each.table])]
    data = {
        "sections": [
            {"table": each.table, "title": each.title, "note": each.note}
            | _data(tables[each.table], each.left_out)
            for each in sections
        ],
        "queue_points": _points(tables, "queue_points"),
        "memory_points": _points(tables, "memory_points"),
    }
    found = list({(each.code, each.path, each.message): each for each in diagnostics or ()}.values())
    return environment.get_template("page.html").render(
        version=__version__,
        verdict=verdict,
        inputs=list(inputs),
        against=list(against),
        devices=list(devices),
        about=about,
        title=title,
        notes=list(notes),
        sections=sections,
        diagnostics=found[:_MOST_DIAGNOSTICS],
        more=max(len(found) - _MOST_DIAGNOSTICS, 0),
        json=Markup(json_for_script(encoded(data))),
        style=Markup(_template("page.css")),
        script=Markup(_template("page.js")),
    )


def _points(tables: Mapping[str, Table[Any]], name: str) -> dict[str, list[object]]:
    """The columns of a table that is drawn."""
    return {key: column.tolist() for key, column in tables[name].columns.items()} if name in tables else {}
