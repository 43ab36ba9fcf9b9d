"""An export of Nsight Systems as a :class:`Profile`: kernels, copies and fills, and the ranges behind them.

Tables are made when there is something to put in them, columns come and go with versions, and what is not
known is NULL: every table and column is looked for, none is needed but the times.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hespas.converters.format import ReadOptions
from hespas.converters.gpu_trace.database import MISSING, Database, folded, log_beside, opened, report_refused
from hespas.converters.gpu_trace.profile import to_profile
from hespas.converters.gpu_trace.tables import SQLITE_MAGIC
from hespas.converters.gpu_trace.trace import GpuTrace, GraphNodes, Launches, listed
from hespas.converters.nsys.ranges import read_ranges
from hespas.converters.nsys.strings import Strings
from hespas.converters.nsys.work import read_work
from hespas.files.packed import open_input
from hespas.graph import Diagnostics, Profile, StringTableBuilder
from hespas.graph.errors import UnsupportedError

__all__ = ["read_nsys"]

_NEWEST_MAJOR = 3
_LAUNCH_TABLES = ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER")
_READ = frozenset(
    {
        *_LAUNCH_TABLES,
        "CUPTI_ACTIVITY_KIND_KERNEL",
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        "CUPTI_ACTIVITY_KIND_MEMSET",
        "CUPTI_ACTIVITY_KIND_MEM_DECOMPRESS",
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
        "CUDA_GRAPH_NODE_EVENTS",
        "NVTX_EVENTS",
        "StringIds",
    }
)
_NO_EVENTS = ("ENUM_", "TARGET_INFO_", "META_DATA_", "ANALYSIS_", "sqlite_", "EXPORT_", "NVTX_PAYLOAD_")

_READ_FOLDED = frozenset(map(folded, _READ))
_NO_EVENTS_FOLDED = tuple(map(folded, _NO_EVENTS))


def read_nsys(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read an export, also gzipped. Raises ``UnsupportedError`` for a report that is not exported,
    ``FormatError`` for a damaged database and one without events.
    """
    _refuse_reports(path)
    with opened(path, options.max_bytes) as database:
        if database.has("StringTable") and not database.has("StringIds"):
            raise UnsupportedError(
                "this is a profile of nvprof",
                path=str(path),
                position="table StringTable",
                hint="record with nsys, and export to SQLite",
            )
        strings = Strings(database, StringTableBuilder())
        work, devices = read_work(database, strings, diagnostics)
        ranges, texts = read_ranges(database, strings, work, diagnostics)
        trace = GpuTrace(
            strings=strings.builder,
            devices=devices,
            work=work,
            launches=_launches(database),
            ranges=ranges,
            texts=texts,
            nodes=_nodes(database),
        )
        metadata = _metadata(database, diagnostics)
        _report_tables(database, diagnostics)
        report_refused(database, "nsys", diagnostics)
    if log_beside(path):
        told = "a write-ahead log lies beside the database: what is in it is not read"
        diagnostics.warning("nsys.write-ahead-log", str(path), told)
    return to_profile(path, "nsys", trace, metadata, diagnostics)


def _refuse_reports(path: Path) -> None:
    """Reports in Nsight's own form are not documented; say how to get at what they hold."""
    if path.suffix not in {".nsys-rep", ".qdrep"} or not path.is_file():
        return
    with open_input(path) as stream:
        if stream.read(len(SQLITE_MAGIC)) != SQLITE_MAGIC:
            raise UnsupportedError(
                "a report of Nsight Systems must be exported before it can be read",
                path=str(path),
                position="byte 0",
                hint=f"nsys export --type sqlite {path.name}",
            )


def _launches(database: Database) -> Launches:
    """Calls of the runtime and the driver; those of unknown time or thread launch nothing we could link."""
    names = ("start", "globalTid", "correlationId")
    tables = [database.read(table, names).integers for table in _LAUNCH_TABLES]
    start, thread, correlation = (np.concatenate([each[name] for each in tables]) for name in names)
    known = (start != MISSING) & (thread != MISSING) & (correlation != MISSING)
    return Launches(
        process=thread[known] >> 24,
        thread=thread[known],
        start_ns=start[known],
        correlation=correlation[known],
        range_place=np.full(int(known.sum()), -1, np.int64),
    )


def _nodes(database: Database) -> GraphNodes:
    """The making of CUDA graph nodes: when they were captured, or cloned as a graph was instantiated."""
    names = ("start", "globalTid", "graphNodeId", "originalGraphNodeId")
    columns = database.read("CUDA_GRAPH_NODE_EVENTS", names).integers
    known = (columns["start"] != MISSING) & (columns["globalTid"] != MISSING)
    thread, original = columns["globalTid"][known], columns["originalGraphNodeId"][known]
    node = columns["graphNodeId"][known]
    return GraphNodes(
        process=thread >> 24,
        thread=thread,
        start_ns=columns["start"][known],
        node=np.maximum(node, -1),
        original=np.where(original == node, -1, np.maximum(original, -1)),
    )


def _metadata(database: Database, diagnostics: Diagnostics) -> dict[str, str]:
    """Facts about the recording; nothing that names a machine, a person or a path."""
    table = database.read("META_DATA_EXPORT", (), ("name", "value"))
    texts = [text.decode("utf-8", "replace") for text in table.distinct]
    pairs = zip(listed(table.texts["name"]), listed(table.texts["value"]), strict=True)
    facts = {texts[name]: texts[value] for name, value in pairs if name >= 0 and value >= 0}
    version, product = facts.get("EXPORT_SCHEMA_VERSION", ""), facts.get("EXPORT_PRODUCT_VERSION", "")
    major = version.partition(".")[0]
    if major.isdecimal() and int(major[:9]) > _NEWEST_MAJOR:
        told = f"the export has schema {version[:40]}, newer than {_NEWEST_MAJOR}: columns may have changed"
        diagnostics.warning("nsys.newer-schema", database.path, told)
    session = database.read("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)).integers["utcEpochNs"]
    started = str(session[0]) if len(session) and session[0] != MISSING else ""
    known = {"schema_version": version[:100], "product_version": product[:100], "session_start_ns": started}
    return {name: value for name, value in known.items() if value}


def _report_tables(database: Database, diagnostics: Diagnostics) -> None:
    """Say what else was recorded."""
    others = [
        name
        for name in database.tables
        if folded(name) not in _READ_FOLDED and not folded(name).startswith(_NO_EVENTS_FOLDED)
    ]
    told = f"tables that are not read: {', '.join(name[:60] for name in others[:40])}"
    diagnostics.info("nsys.other-tables", database.path, told, count=len(others))
