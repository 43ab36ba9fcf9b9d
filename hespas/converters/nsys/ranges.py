"""NVTX ranges of an export. Numbers of event types: table ``ENUM_NSYS_EVENT_TYPE``."""

from __future__ import annotations

import numpy as np

from hespas.converters.gpu_trace.database import MISSING, Database, Table
from hespas.converters.gpu_trace.trace import DeviceWork, Ranges, listed
from hespas.converters.nsys.strings import Strings
from hespas.graph import Diagnostics
from hespas.graph.columns import IntArray

__all__ = ["read_ranges"]

_PUSH_POP = (59, 70)
"""``NvtxPushPopRange`` and its like in imported traces."""
_START_END = (60, 71)
_INTEGERS = ("start", "end", "eventType", "globalTid", "textId")


def read_ranges(
    database: Database, strings: Strings, work: DeviceWork, diagnostics: Diagnostics
) -> tuple[Ranges, list[str]]:
    """The ranges, and what they say. A range that was open when the recording ended lasts until its end."""
    table = database.read("NVTX_EVENTS", _INTEGERS, ("text",))
    columns, path = table.integers, database.path
    kind = columns["eventType"]
    untyped = (kind == MISSING) & (columns["end"] != MISSING)
    nests = np.isin(kind, _PUSH_POP) | untyped
    chosen = nests | np.isin(kind, _START_END)
    timeless = chosen & (columns["start"] == MISSING)
    told = "marks, domains and categories of NVTX are no ranges"
    diagnostics.info("nsys.other-nvtx-events", path, told, count=int((~chosen).sum()))
    told = "NVTX ranges have no start and are left out"
    diagnostics.warning("nsys.range-without-time", path, told, count=int(timeless.sum()))
    rows = np.flatnonzero(chosen & ~timeless)
    start, end = columns["start"][rows], columns["end"][rows]
    still_open = end < start
    last = max((int(part.max()) for part in (start, end, work.end_ns) if len(part)), default=0)
    told = "NVTX ranges were open when the recording ended, and are taken to last until then"
    diagnostics.info("nsys.open-range", path, told, count=int(still_open.sum()))
    thread = columns["globalTid"][rows]
    places, texts = _texts(table, rows, strings)
    return Ranges(
        process=thread >> 24,
        thread=thread,
        start_ns=start,
        end_ns=np.where(still_open, last, end),
        text=places,
        nests=nests[rows],
    ), texts


def _texts(table: Table, rows: IntArray, strings: Strings) -> tuple[IntArray, list[str]]:
    """What ranges say: their own text, else one of the table of texts."""
    own = table.texts["text"][rows]
    texts = [text.decode("utf-8", "replace") for text in table.distinct]
    empty = np.array([not text for text in texts], np.bool_)
    without = (own < 0) | (empty[np.maximum(own, 0)] if len(empty) else np.True_)
    numbers, codes = np.unique(table.integers["textId"][rows][without], return_inverse=True)
    places = own.copy()
    places[without] = len(texts) + codes
    texts.extend(strings.text(number) for number in listed(numbers))
    return places, texts
