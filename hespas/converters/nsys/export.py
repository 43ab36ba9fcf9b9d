"""SQLite exports of Nsight Systems as a :class:`Profile`: kernels, copies, fills, and the ranges that caused
them.

An export has only the tables for which there are events, columns differ between versions, and unknown values
are NULL. So every table and column is optional, except times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hespas.converters.format import ReadOptions
from hespas.converters.gpu_trace import DeviceWork, GpuLaunches, GpuRanges, GpuTrace, GraphNodes, listed
from hespas.converters.gpu_trace.profile import to_profile
from hespas.converters.launch_shapes import shape_rows
from hespas.converters.linking import match_rows
from hespas.files.sqlite import MISSING, SQLITE_MAGIC, SqliteDatabase, fold_name, open_database, report_unread
from hespas.files.streams import open_input
from hespas.graph import Diagnostics, Findings, OpClass, Profile, StringTableBuilder
from hespas.graph.columns import IntArray, at_rows, distinct_rows, mapped
from hespas.graph.errors import UnsupportedError

__all__ = ["read_nsys"]

_NEWEST_MAJOR = 3
_LAUNCH_TABLES = ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER")
_READ_TABLES = frozenset(
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
_OTHER_PREFIXES = ("ENUM_", "TARGET_INFO_", "META_DATA_", "ANALYSIS_", "sqlite_", "EXPORT_", "NVTX_PAYLOAD_")

_READ_TABLES_FOLDED = frozenset(map(fold_name, _READ_TABLES))
_OTHER_PREFIXES_FOLDED = tuple(map(fold_name, _OTHER_PREFIXES))


def read_nsys(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read an SQLite export of Nsight Systems, also a gzipped one.

    Raises ``UnsupportedError`` for a report that is not exported, and ``FormatError`` for a damaged database
    or one without events.
    """
    if path.suffix in {".nsys-rep", ".qdrep"} and path.is_file():
        with open_input(path) as stream:
            if stream.read(len(SQLITE_MAGIC)) != SQLITE_MAGIC:
                raise UnsupportedError(
                    "a report of Nsight Systems must be exported before it can be read",
                    path=str(path),
                    position="byte 0",
                    hint=f"run nsys export --type sqlite {path.name}",
                )
    with open_database(path, options.max_bytes) as database:
        if database.has("StringTable") and not database.has("StringIds"):
            raise UnsupportedError(
                "this is a profile of nvprof",
                path=str(path),
                position="table StringTable",
                hint="record with nsys, and export to SQLite",
            )
        strings = _NsysStrings(database, StringTableBuilder())
        findings = diagnostics.about(database.path, "nsys")
        gpus = _NsysGpus(database)
        reader = _NsysWorkReader(database, strings, gpus, findings)
        parts = (reader.kernels(), reader.copies(), reader.fills(), reader.decompressions())
        work = DeviceWork.joined(parts).by_start()
        work = DeviceWork.joined((work, reader.graphs(work))).by_start()
        ranges, texts = _read_ranges(database, strings, work, findings)
        # Calls of unknown time or thread are dropped, because they cannot be linked. A CUDA graph node is
        # created when it is captured, or cloned when a graph is instantiated.
        names = ("start", "end", "globalTid", "correlationId")
        tables = [database.read(table, names).integers for table in _LAUNCH_TABLES]
        start, end, thread, correlation = (
            np.concatenate([table[name] for table in tables]) for name in names
        )
        known = (start != MISSING) & (thread != MISSING) & (correlation != MISSING)
        launches = GpuLaunches(
            process=thread[known] >> 24,
            thread=thread[known],
            start_ns=start[known],
            end_ns=end[known],
            correlation=correlation[known],
            range_place=np.full(int(known.sum()), -1, np.int64),
        )
        names = ("start", "globalTid", "graphNodeId", "originalGraphNodeId")
        columns = database.read("CUDA_GRAPH_NODE_EVENTS", names).integers
        known = (columns["start"] != MISSING) & (columns["globalTid"] != MISSING)
        thread, original = columns["globalTid"][known], columns["originalGraphNodeId"][known]
        node = columns["graphNodeId"][known]
        nodes = GraphNodes(
            process=thread >> 24,
            thread=thread,
            start_ns=columns["start"][known],
            node=np.maximum(node, -1),
            original=np.where(original == node, -1, np.maximum(original, -1)),
        )
        trace = GpuTrace(
            strings=strings.builder,
            devices=tuple(gpus.names),
            work=work,
            launches=launches,
            ranges=ranges,
            texts=texts,
            nodes=nodes,
        )
        metadata = _read_metadata(database, findings)
        others = [
            name
            for name in database.tables
            if fold_name(name) not in _READ_TABLES_FOLDED
            and not fold_name(name).startswith(_OTHER_PREFIXES_FOLDED)
        ]
        message = f"tables that are not read: {', '.join(name[:60] for name in others[:40])}"
        findings.info("other-tables", message, len(others))
        report_unread(database, "nsys", diagnostics)
    return to_profile(path, "nsys", trace, metadata, diagnostics)


def _read_metadata(database: SqliteDatabase, findings: Findings) -> dict[str, str]:
    """Return facts about the recording, without names of machines or persons and without paths."""
    table = database.read("META_DATA_EXPORT", (), ("name", "value"))
    facts = table.facts("name", "value")
    version, product = facts.get("EXPORT_SCHEMA_VERSION", ""), facts.get("EXPORT_PRODUCT_VERSION", "")
    major = version.partition(".")[0]
    if major.isdecimal() and int(major[:9]) > _NEWEST_MAJOR:
        message = (
            f"the export has schema {version[:40]}, newer than {_NEWEST_MAJOR}: columns may have changed"
        )
        findings.warning("newer-schema", message)
    session = database.read("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)).integers["utcEpochNs"]
    started = str(session[0]) if len(session) and session[0] != MISSING else ""
    metadata = {
        "schema_version": version[:100],
        "product_version": product[:100],
        "session_start_ns": started,
    }
    return {name: value for name, value in metadata.items() if value}


_PUSH_POP = (59, 70)
"""``NvtxPushPopRange``, and the corresponding type in imported traces."""
_START_END = (60, 71)
_RANGE_COLUMNS = ("start", "end", "eventType", "globalTid", "textId")


def _read_ranges(
    database: SqliteDatabase, strings: _NsysStrings, work: DeviceWork, findings: Findings
) -> tuple[GpuRanges, list[str]]:
    """Return the NVTX ranges and their texts. A range that was open at the end of the recording lasts until
    the end.

    Table ``ENUM_NSYS_EVENT_TYPE`` lists the numbers of event types. A range has a text of its own, or refers
    to the table of texts.
    """
    table = database.read("NVTX_EVENTS", _RANGE_COLUMNS, ("text",))
    columns = table.integers
    kind = columns["eventType"]
    untyped = (kind == MISSING) & (columns["end"] != MISSING)
    nests = np.isin(kind, _PUSH_POP) | untyped
    is_range = nests | np.isin(kind, _START_END)
    no_start = is_range & (columns["start"] == MISSING)
    message = "marks, domains and categories of NVTX are not ranges and are skipped"
    findings.info("other-nvtx-events", message, int((~is_range).sum()))
    findings.warning("range-without-time", "NVTX ranges without a start are skipped", int(no_start.sum()))
    rows = np.flatnonzero(is_range & ~no_start)
    start, end = columns["start"][rows], columns["end"][rows]
    is_open = end < start
    last = max((int(part.max()) for part in (start, end, work.end_ns) if len(part)), default=0)
    message = "NVTX ranges were open when the recording ended, and last until then"
    findings.info("open-range", message, int(is_open.sum()))
    thread = columns["globalTid"][rows]
    text, texts = table.texts["text"][rows], table.words
    is_empty = np.array([not word for word in texts], np.bool_)
    no_text = at_rows(is_empty, text, missing=True)
    numbers, codes = np.unique(columns["textId"][rows][no_text], return_inverse=True)
    text = text.copy()
    text[no_text] = len(texts) + codes
    texts.extend(strings.text(number) for number in listed(numbers))
    return GpuRanges(
        process=thread >> 24,
        thread=thread,
        start_ns=start,
        end_ns=np.where(is_open, last, end),
        text=text,
        nests=nests[rows],
    ), texts


_COMMON_COLUMNS = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "graphNodeId")
_SHAPE_COLUMNS = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
_COPY_KINDS = (
    *("HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"),
    *("UVM HtoD", "UVM DtoH", "UVM DtoD"),
)
"""``copyKind`` (table ``ENUM_CUDA_MEMCPY_OPER``) from 1 on, in Kineto's spelling; ``H`` is the host."""


@dataclass(frozen=True, slots=True, eq=False)
class _NsysWorkReader:
    """Reader of the tables of device work in an export: kernels, copies, fills and graphs."""

    database: SqliteDatabase
    strings: _NsysStrings
    gpus: _NsysGpus
    findings: Findings

    def part(
        self, table: str, category: str, more: tuple[str, ...]
    ) -> tuple[DeviceWork, dict[str, IntArray]]:
        """Return the device work in one table, and the additional columns ``more``. The names of the work are
        not set.

        Rows without times are dropped and reported. ``category`` is the category of all events.
        """
        columns = self.database.read(table, (*_COMMON_COLUMNS, *more)).integers
        known = (columns["start"] != MISSING) & (columns["end"] != MISSING)
        message = f"rows of {table} without a start or an end are dropped"
        lost = len(known) - int(known.sum())
        self.findings.error("event-without-time", message, lost)
        columns = {name: column[known] for name, column in columns.items()}
        count = int(known.sum())
        zeros = np.zeros(count, np.int64)
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
            name_id=zeros,
            category_id=np.full(count, self.strings.builder.add(category), np.int64),
            bytes_moved=_or_unknown(bytes_moved),
            correlation=_or_unknown(columns["correlationId"]),
            node=_or_unknown(columns["graphNodeId"]),
            range_id=zeros,
            op_class=zeros.copy(),
            grid_id=zeros,
        ), columns

    def kernels(self) -> DeviceWork:
        names = ("demangledName", "shortName", "mangledName")
        part, columns = self.part("CUPTI_ACTIVITY_KIND_KERNEL", "kernel", (*names, *_SHAPE_COLUMNS))
        row = np.zeros(len(part), np.int64)
        for name in names:
            row = np.where(row > 0, row, self.strings.rows(columns[name]))
        grid_id = shape_rows(self.strings.builder, *(columns[name] for name in _SHAPE_COLUMNS))
        return replace(part, name_id=row, grid_id=grid_id.astype(np.int64))

    def copies(self) -> DeviceWork:
        names = ("bytes", "copyKind", "srcKind", "dstKind")
        part, columns = self.part("CUPTI_ACTIVITY_KIND_MEMCPY", "gpu_memcpy", names)
        labels, operations = (
            self.database.read(table, ("id",), ("label",)).by_key("id", "label")
            for table in ("ENUM_CUDA_MEM_KIND", "ENUM_CUDA_MEMCPY_OPER")
        )
        triples, index = distinct_rows(*(columns[name] for name in names[1:]))
        rows: list[int] = []
        classes: list[int] = []
        for kind, source, target in triples:
            direction, op_class = operations.get(kind, "unknown"), OpClass.UNKNOWN
            if 0 < kind <= len(_COPY_KINDS):
                direction = _COPY_KINDS[kind - 1]
                op_class = OpClass.MEMORY if "H" in direction else OpClass.MOVE
            between = f" ({labels[source]} -> {labels[target]})" if {source, target} <= labels.keys() else ""
            rows.append(self.strings.builder.add(f"Memcpy {direction}{between}"))
            classes.append(op_class)
        name_id, classes_of = (np.array(values, np.int64)[index] for values in (rows, classes))
        return replace(part, name_id=name_id, op_class=classes_of)

    def fills(self) -> DeviceWork:
        part, _ = self.part("CUPTI_ACTIVITY_KIND_MEMSET", "gpu_memset", ("bytes",))
        row = self.strings.builder.add("Memset")
        return replace(part, name_id=np.full(len(part), row, np.int64))

    def decompressions(self) -> DeviceWork:
        part, columns = self.part(
            "CUPTI_ACTIVITY_KIND_MEM_DECOMPRESS", "gpu_mem_decompress", ("sourceBytes",)
        )
        row = self.strings.builder.add("MemDecompress")
        moved = _or_unknown(columns["sourceBytes"])
        return replace(part, name_id=np.full(len(part), row, np.int64), bytes_moved=moved)

    def graphs(self, others: DeviceWork) -> DeviceWork:
        """Return the CUDA graphs that are recorded as a whole, one event per launch.

        Graphs whose nodes are recorded too (in ``others``) are dropped, because the nodes already account for
        their time.
        """
        part, columns = self.part("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "cuda_graph", ("graphId",))
        key = (part.process, part.correlation)
        covered = match_rows((others.process, others.correlation), key) >= 0
        message = "CUDA graphs whose nodes are recorded too are dropped, because the nodes have their time"
        self.findings.info("graph-of-recorded-nodes", message, int(covered.sum()))
        add = self.strings.builder.add
        rows = mapped(columns["graphId"], lambda number: add(f"CUDA graph {max(number, 0)}"), np.int64)
        return replace(part, name_id=rows).take(np.flatnonzero(~covered))


class _NsysGpus:
    """GPUs of an export by process and CUDA device number. ``names`` maps each distinct GPU name to its
    index.
    """

    def __init__(self, database: SqliteDatabase) -> None:
        gpus = database.read("TARGET_INFO_GPU", ("id", "cuDevice"), ("name",))
        ids, numbers = (listed(column) for column in gpus.integers.values())
        self._name = gpus.by_key("id", "name")
        self._by_number = {number: gpu for number, gpu in zip(numbers, ids, strict=True) if number >= 0}
        used = database.read("TARGET_INFO_CUDA_DEVICE", ("pid", "cudaId", "gpuId")).integers
        pids, devices, ids = (listed(column) for column in used.values())
        self._used = {
            (pid, number): gpu for pid, number, gpu in zip(pids, devices, ids, strict=True) if gpu >= 0
        }
        self.names: dict[str, int] = {}

    def of(self, process: IntArray, number: IntArray) -> tuple[IntArray, IntArray]:
        """Return the GPU of each event (-1: unknown), and the index of its name."""
        pairs, index = distinct_rows(process, number)
        rows: list[tuple[int, int]] = []
        for owner, device in pairs:
            gpu = self._used.get((owner & 0xFFFFFF, device))
            if gpu is None:
                gpu = self._by_number.get(device, device if device >= 0 else -1)
            rows.append((gpu, self.names.setdefault(self._name.get(gpu, ""), len(self.names))))
        gpus, names = np.array(rows, np.int64).reshape(-1, 2)[index].T
        return gpus, names


def _or_unknown(column: IntArray) -> IntArray:
    return np.maximum(column, -1)


class _NsysStrings:
    """Reader of the table ``StringIds`` of an export, which contains the texts for all other tables. Texts
    that are used are added to ``builder``.
    """

    def __init__(self, database: SqliteDatabase, builder: StringTableBuilder) -> None:
        """Read the table; it may be missing."""
        self.builder = builder
        table = database.read("StringIds", ("id",), ("value",))
        order = np.argsort(table.integers["id"], kind="stable")
        self._ids = table.integers["id"][order]
        self._text_index = table.texts["value"][order]
        self._distinct = table.distinct

    def text(self, number: int) -> str:
        """Return a text by number, "" for an unknown number."""
        index = int(np.searchsorted(self._ids, number))
        if (
            number == MISSING
            or index >= len(self._ids)
            or self._ids[index] != number
            or self._text_index[index] < 0
        ):
            return ""
        return self._distinct[int(self._text_index[index])].decode("utf-8", "replace")

    def rows(self, numbers: IntArray) -> IntArray:
        """Return the row in ``builder`` of the text with each number, 0 for missing texts."""
        return mapped(numbers, lambda number: self.builder.add(self.text(number)), np.int64)
