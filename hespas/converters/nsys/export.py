"""An export of Nsight Systems as a :class:`Profile`: kernels, copies and fills, and the ranges behind them.

Tables are made when there is something to put in them, columns come and go with versions, and what is not
known is NULL: every table and column is looked for, none is needed but the times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hespas.converters.format import ReadOptions
from hespas.converters.gpu_trace.profile import to_profile
from hespas.converters.gpu_trace.trace import DeviceWork, GpuTrace, GraphNodes, Launches, Ranges, listed
from hespas.converters.launch_shapes import shape_rows
from hespas.converters.linking import match_rows
from hespas.files.sqlite import MISSING, SQLITE_MAGIC, Database, Table, folded, opened, report_unread
from hespas.files.streams import open_input
from hespas.graph import Diagnostics, Findings, OpClass, Profile, StringTableBuilder
from hespas.graph.columns import IntArray, at_rows, distinct_rows, mapped
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
        strings = _Strings(database, StringTableBuilder())
        findings = diagnostics.about(database.path, "nsys")
        work, devices = _read_work(database, strings, findings)
        ranges, texts = _read_ranges(database, strings, work, findings)
        trace = GpuTrace(
            strings=strings.builder,
            devices=devices,
            work=work,
            launches=_launches(database),
            ranges=ranges,
            texts=texts,
            nodes=_nodes(database),
        )
        metadata = _metadata(database, findings)
        _report_tables(database, findings)
        report_unread(database, "nsys", diagnostics)
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
    names = ("start", "end", "globalTid", "correlationId")
    tables = [database.read(table, names).integers for table in _LAUNCH_TABLES]
    start, end, thread, correlation = (np.concatenate([each[name] for each in tables]) for name in names)
    known = (start != MISSING) & (thread != MISSING) & (correlation != MISSING)
    return Launches(
        process=thread[known] >> 24,
        thread=thread[known],
        start_ns=start[known],
        end_ns=end[known],
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


def _metadata(database: Database, findings: Findings) -> dict[str, str]:
    """Facts about the recording; nothing that names a machine, a person or a path."""
    table = database.read("META_DATA_EXPORT", (), ("name", "value"))
    facts = table.facts("name", "value")
    version, product = facts.get("EXPORT_SCHEMA_VERSION", ""), facts.get("EXPORT_PRODUCT_VERSION", "")
    major = version.partition(".")[0]
    if major.isdecimal() and int(major[:9]) > _NEWEST_MAJOR:
        newer = f"the export has schema {version[:40]}, newer than {_NEWEST_MAJOR}: columns may have changed"
        findings.warning("newer-schema", newer)
    session = database.read("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)).integers["utcEpochNs"]
    started = str(session[0]) if len(session) and session[0] != MISSING else ""
    known = {"schema_version": version[:100], "product_version": product[:100], "session_start_ns": started}
    return {name: value for name, value in known.items() if value}


def _report_tables(database: Database, findings: Findings) -> None:
    """Say what else was recorded."""
    others = [
        name
        for name in database.tables
        if folded(name) not in _READ_FOLDED and not folded(name).startswith(_NO_EVENTS_FOLDED)
    ]
    message = f"tables that are not read: {', '.join(name[:60] for name in others[:40])}"
    findings.info("other-tables", message, len(others))


# NVTX ranges of an export. Numbers of event types: table ``ENUM_NSYS_EVENT_TYPE``.

_PUSH_POP = (59, 70)
"""``NvtxPushPopRange`` and its like in imported traces."""
_START_END = (60, 71)
_INTEGERS = ("start", "end", "eventType", "globalTid", "textId")


def _read_ranges(
    database: Database, strings: _Strings, work: DeviceWork, findings: Findings
) -> tuple[Ranges, list[str]]:
    """The ranges, and what they say. A range that was open when the recording ended lasts until its end."""
    table = database.read("NVTX_EVENTS", _INTEGERS, ("text",))
    columns = table.integers
    kind = columns["eventType"]
    untyped = (kind == MISSING) & (columns["end"] != MISSING)
    nests = np.isin(kind, _PUSH_POP) | untyped
    chosen = nests | np.isin(kind, _START_END)
    timeless = chosen & (columns["start"] == MISSING)
    others = "marks, domains and categories of NVTX are no ranges"
    findings.info("other-nvtx-events", others, int((~chosen).sum()))
    findings.warning("range-without-time", "NVTX ranges have no start and are left out", int(timeless.sum()))
    rows = np.flatnonzero(chosen & ~timeless)
    start, end = columns["start"][rows], columns["end"][rows]
    still_open = end < start
    last = max((int(part.max()) for part in (start, end, work.end_ns) if len(part)), default=0)
    message = "NVTX ranges were open when the recording ended, and are taken to last until then"
    findings.info("open-range", message, int(still_open.sum()))
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


def _texts(table: Table, rows: IntArray, strings: _Strings) -> tuple[IntArray, list[str]]:
    """What ranges say: their own text, else one of the table of texts."""
    own, texts = table.texts["text"][rows], table.words
    empty = np.array([not text for text in texts], np.bool_)
    without = at_rows(empty, own, missing=True)
    numbers, codes = np.unique(table.integers["textId"][rows][without], return_inverse=True)
    places = own.copy()
    places[without] = len(texts) + codes
    texts.extend(strings.text(number) for number in listed(numbers))
    return places, texts


# Device work of an export: kernels, copies, fills, and CUDA graphs that were recorded as a whole.

_COMMON = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "graphNodeId")
_SHAPE = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
_COPIES = (
    *("HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"),
    *("UVM HtoD", "UVM DtoH", "UVM DtoD"),
)
"""``copyKind`` (table ``ENUM_CUDA_MEMCPY_OPER``) from 1 on, as Kineto calls them: ``H`` is the host."""


@dataclass(frozen=True, slots=True, eq=False)
class _Reader:
    database: Database
    strings: _Strings
    gpus: _Gpus
    findings: Findings

    def part(
        self, table: str, category: str, further: tuple[str, ...]
    ) -> tuple[DeviceWork, dict[str, IntArray]]:
        """The work of one table without names, and the further columns. What has no times is left out."""
        columns = self.database.read(table, (*_COMMON, *further)).integers
        known = (columns["start"] != MISSING) & (columns["end"] != MISSING)
        message = f"rows of {table} have no start or no end and are left out"
        lost = len(known) - int(known.sum())
        self.findings.error("event-without-time", message, lost)
        columns = {name: column[known] for name, column in columns.items()}
        count = int(known.sum())
        nothing = np.zeros(count, np.int64)
        process = np.where(columns["globalPid"] == MISSING, -1, columns["globalPid"] >> 24)
        gpu, device = self.gpus.of(process, columns["deviceId"])
        bytes_moved = columns.get("bytes", np.full(count, -1, np.int64))
        return DeviceWork(
            process=process,
            gpu=gpu,
            device=device,
            stream=_or_unknown(columns["streamId"]),
            start_ns=columns["start"],
            end_ns=columns["end"],
            name_row=nothing,
            category_row=np.full(count, self.strings.builder.add(category), np.int64),
            bytes_moved=_or_unknown(bytes_moved),
            correlation=_or_unknown(columns["correlationId"]),
            node=_or_unknown(columns["graphNodeId"]),
            range_row=nothing,
            op_class=nothing.copy(),
            grid_row=nothing,
        ), columns

    def kernels(self) -> DeviceWork:
        names = ("demangledName", "shortName", "mangledName")
        part, columns = self.part("CUPTI_ACTIVITY_KIND_KERNEL", "kernel", (*names, *_SHAPE))
        row = np.zeros(len(part), np.int64)
        for name in names:
            row = np.where(row > 0, row, self.strings.rows(columns[name]))
        grid_row = shape_rows(self.strings.builder, *(columns[name] for name in _SHAPE))
        return replace(part, name_row=row, grid_row=grid_row.astype(np.int64))

    def copies(self) -> DeviceWork:
        further = ("bytes", "copyKind", "srcKind", "dstKind")
        part, columns = self.part("CUPTI_ACTIVITY_KIND_MEMCPY", "gpu_memcpy", further)
        labels = self._labels("ENUM_CUDA_MEM_KIND")
        operations = self._labels("ENUM_CUDA_MEMCPY_OPER")
        triples, place = distinct_rows(*(columns[name] for name in further[1:]))
        rows: list[int] = []
        classes: list[int] = []
        for kind, source, target in triples:
            short, op_class = operations.get(kind, "unknown"), OpClass.UNKNOWN
            if 0 < kind <= len(_COPIES):
                short = _COPIES[kind - 1]
                op_class = OpClass.MEMORY if "H" in short else OpClass.MOVE
            between = f" ({labels[source]} -> {labels[target]})" if {source, target} <= labels.keys() else ""
            rows.append(self.strings.builder.add(f"Memcpy {short}{between}"))
            classes.append(op_class)
        name_row, classes_of = (np.array(each, np.int64)[place] for each in (rows, classes))
        return replace(part, name_row=name_row, op_class=classes_of)

    def _labels(self, table: str) -> dict[int, str]:
        """A table of numbers and what they mean."""
        return self.database.read(table, ("id",), ("label",)).by_key("id", "label")

    def fills(self) -> DeviceWork:
        part, _ = self.part("CUPTI_ACTIVITY_KIND_MEMSET", "gpu_memset", ("bytes",))
        row = self.strings.builder.add("Memset")
        return replace(part, name_row=np.full(len(part), row, np.int64))

    def decompressions(self) -> DeviceWork:
        part, columns = self.part(
            "CUPTI_ACTIVITY_KIND_MEM_DECOMPRESS", "gpu_mem_decompress", ("sourceBytes",)
        )
        row = self.strings.builder.add("MemDecompress")
        moved = _or_unknown(columns["sourceBytes"])
        return replace(part, name_row=np.full(len(part), row, np.int64), bytes_moved=moved)

    def graphs(self, others: DeviceWork) -> DeviceWork:
        """Graphs recorded as a whole. Where their nodes were recorded too, those are the work."""
        part, columns = self.part("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "cuda_graph", ("graphId",))
        wanted = (part.process, part.correlation)
        covered = match_rows((others.process, others.correlation), wanted) >= 0
        message = "CUDA graphs whose nodes are recorded too are left out: their time is that of the nodes"
        self.findings.info("graph-of-recorded-nodes", message, int(covered.sum()))
        add = self.strings.builder.add
        rows = mapped(columns["graphId"], lambda number: add(f"CUDA graph {max(number, 0)}"), np.int64)
        return replace(part, name_row=rows).take(np.flatnonzero(~covered))


def _read_work(
    database: Database, strings: _Strings, findings: Findings
) -> tuple[DeviceWork, tuple[str, ...]]:
    """All device work by start, and the names of the devices. O(n log n)."""
    gpus = _Gpus(database)
    reader = _Reader(database, strings, gpus, findings)
    parts = (reader.kernels(), reader.copies(), reader.fills(), reader.decompressions())
    nodes = DeviceWork.joined(parts).by_start()
    return DeviceWork.joined((nodes, reader.graphs(nodes))).by_start(), tuple(gpus.names)


class _Gpus:
    """Which GPU a process means by a device number, and its name. ``names`` holds each name once."""

    def __init__(self, database: Database) -> None:
        gpus = database.read("TARGET_INFO_GPU", ("id", "cuDevice"), ("name",))
        numbers, own = (listed(each) for each in gpus.integers.values())
        self._name = gpus.by_key("id", "name")
        self._by_number = {number: gpu for number, gpu in zip(own, numbers, strict=True) if number >= 0}
        seen = database.read("TARGET_INFO_CUDA_DEVICE", ("pid", "cudaId", "gpuId")).integers
        pids, devices, ids = (listed(column) for column in seen.values())
        self._seen = {
            (pid, number): gpu for pid, number, gpu in zip(pids, devices, ids, strict=True) if gpu >= 0
        }
        self.names: dict[str, int] = {}

    def of(self, process: IntArray, number: IntArray) -> tuple[IntArray, IntArray]:
        """The GPU of each event (-1: unknown), and the place of its name."""
        pairs, place = distinct_rows(process, number)
        found = [self._one(owner & 0xFFFFFF, each) for owner, each in pairs]
        gpu, name = np.array(found, np.int64).reshape(-1, 2)[place].T
        return gpu, name

    def _one(self, pid: int, number: int) -> tuple[int, int]:
        gpu = self._seen.get((pid, number))
        if gpu is None:
            gpu = self._by_number.get(number, number if number >= 0 else -1)
        return gpu, self.names.setdefault(self._name.get(gpu, ""), len(self.names))


def _or_unknown(column: IntArray) -> IntArray:
    return np.maximum(column, -1)


class _Strings:
    """Table ``StringIds``. ``builder`` takes the texts that are asked for."""

    def __init__(self, database: Database, builder: StringTableBuilder) -> None:
        """Read the table; it may be missing."""
        self.builder = builder
        table = database.read("StringIds", ("id",), ("value",))
        order = np.argsort(table.integers["id"], kind="stable")
        self._ids = table.integers["id"][order]
        self._places = table.texts["value"][order]
        self._distinct = table.distinct

    def text(self, number: int) -> str:
        """One text, "" for a number that is not there."""
        at = int(np.searchsorted(self._ids, number))
        if number == MISSING or at >= len(self._ids) or self._ids[at] != number or self._places[at] < 0:
            return ""
        return self._distinct[int(self._places[at])].decode("utf-8", "replace")

    def rows(self, numbers: IntArray) -> IntArray:
        """The rows of texts by number in ``builder``, 0 for those that are not there."""
        return mapped(numbers, lambda number: self.builder.add(self.text(number)), np.int64)
