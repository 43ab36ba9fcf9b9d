"""rocpd databases as a :class:`Profile`. A database has one set of tables per process, distinguished by a
suffix.

Views without the suffix join the sets. They are SQL of the file, and are not used. Schema 3 was written with
times in the rows, and for a while with times and tracks in tables of their own: both are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from hespas.converters.format import ReadOptions
from hespas.converters.gpu_trace import DeviceWork, GpuLaunches, GpuRanges, GpuTrace, listed
from hespas.converters.gpu_trace.profile import to_profile
from hespas.converters.launch_shapes import shape_rows
from hespas.converters.linking import match_rows
from hespas.files.sqlite import MISSING, SqliteDatabase, SqliteTable, fold_name, open_database, report_unread
from hespas.graph import Diagnostics, OpClass, Profile, StringTableBuilder
from hespas.graph.columns import ColumnTable, IntArray, at_rows, distinct_rows, mapped
from hespas.graph.errors import FormatError, UnsupportedError

__all__ = ["RocmAgent", "RocmAgents", "RocmCalls", "RocmTraceBuilder", "RocmWork", "read_rocpd"]

_MAX_PROCESSES = 1 << 10
_RUNTIME_CATEGORY = re.compile(r"(?:^|_)(?:hip|hsa)_", re.IGNORECASE)
"""Categories of runtime calls, which are not operations of the program: ``HIP_RUNTIME_API_EXT``,
``HSA_CORE_API``.
"""


@dataclass(frozen=True, slots=True)
class RocmAgent:
    """Agent of the ROCm runtime, a CPU or a GPU. ``order`` counts the agents of one kind."""

    is_gpu: bool
    order: int
    name: str


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RocmWork(ColumnTable):
    """Kernels or copies of one process, one per row; -1 for unknown.

    ``target`` and ``source`` are agents (devices); for a kernel both are the agent that runs it. ``range_id``
    and ``grid_id`` are rows of the string table: the range that rocprofv3 states as cause, and the launch
    shape.
    """

    start_ns: IntArray
    end_ns: IntArray
    target: IntArray
    source: IntArray
    stream: IntArray
    queue: IntArray
    stack: IntArray
    parent_stack: IntArray
    name_id: IntArray
    bytes_moved: IntArray
    range_id: IntArray
    grid_id: IntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RocmCalls(ColumnTable):
    """Host calls and ranges of one process; ``label`` and ``category`` are indices of the process's texts."""

    thread: IntArray
    start_ns: IntArray
    end_ns: IntArray
    stack: IntArray
    label: IntArray
    category: IntArray


@dataclass(slots=True)
class RocmAgents:
    """Agents (CPUs and GPUs) of one process by their number in the file. ``node`` is the number of the
    machine.
    """

    node: int
    by_number: dict[int, RocmAgent] = field(default_factory=dict[int, RocmAgent])


@dataclass(slots=True)
class RocmTraceBuilder:
    """Builder of the recording of a GPU profiler from the processes in the file ``path``."""

    path: str
    strings: StringTableBuilder = field(default_factory=StringTableBuilder)
    texts: dict[str, int] = field(default_factory=dict[str, int])
    devices: dict[str, int] = field(default_factory=dict[str, int])
    work: list[DeviceWork] = field(default_factory=list[DeviceWork])
    launches: list[GpuLaunches] = field(default_factory=list[GpuLaunches])
    ranges: list[GpuRanges] = field(default_factory=list[GpuRanges])
    by_queue: int = 0
    _range_count: int = 0
    _process_count: int = 0

    def add(
        self,
        pid: int,
        agents: RocmAgents,
        kernels: RocmWork,
        copies: RocmWork,
        calls: RocmCalls,
        *,
        texts: Sequence[str],
    ) -> None:
        """Add one process; ``texts`` are the texts of its calls. Raises ``FormatError`` for too many
        processes.
        """
        self._process_count += 1
        if self._process_count > _MAX_PROCESSES:
            raise FormatError(
                f"there are more than {_MAX_PROCESSES:,} processes",
                path=self.path,
                position=f"process {self._process_count}",
                hint="record again",
            )
        process = (self._process_count << 24) + (pid & 0xFFFFFF)
        is_runtime = np.array([bool(_RUNTIME_CATEGORY.search(text)) for text in texts], np.bool_)
        # Calls of the runtime are not ranges of the program.
        ranges = np.flatnonzero(~at_rows(is_runtime, calls.category, missing=False))
        range_place = np.full(len(calls), -1, np.int64)
        range_place[ranges] = self._range_count + np.arange(len(ranges))
        self._range_count += len(ranges)
        thread = (process << 24) + (calls.thread & 0xFFFFFF)
        self.launches.append(
            GpuLaunches(
                process=np.full(len(calls), process, np.int64),
                thread=thread,
                start_ns=calls.start_ns,
                end_ns=calls.end_ns,
                correlation=calls.stack,
                range_place=range_place,
            )
        )
        labels = np.unique(calls.label[ranges])
        labels = labels[labels >= 0]
        text_index = np.full(len(texts) + 1, -1, np.int64)
        text_index[labels] = [
            self.texts.setdefault(texts[label], len(self.texts)) for label in listed(labels)
        ]
        self.ranges.append(
            GpuRanges(
                process=np.full(len(ranges), process, np.int64),
                thread=thread[ranges],
                start_ns=calls.start_ns[ranges],
                end_ns=np.maximum(calls.end_ns[ranges], calls.start_ns[ranges]),
                text=text_index[calls.label[ranges]],
                nests=np.ones(len(ranges), np.bool_),
            )
        )
        use_stream = any(bool((part.stream > 0).any()) for part in (kernels, copies))
        self.by_queue += 0 if use_stream else len(kernels)
        for part, category in ((kernels, "kernel"), (copies, "gpu_memcpy")):
            has_call = match_rows((calls.stack,), (part.stack,)) >= 0
            gpu, device, op_class = self._devices_of(agents, part)
            unknown = np.full(len(part), -1, np.int64)
            self.work.append(
                DeviceWork(
                    process=np.full(len(part), process, np.int64),
                    gpu=gpu,
                    device=device,
                    stream=part.stream if use_stream else np.where(part.queue >= 0, part.queue, part.stream),
                    start_ns=part.start_ns,
                    end_ns=part.end_ns,
                    name_id=part.name_id,
                    category_id=np.full(len(part), self.strings.add(category), np.int64),
                    bytes_moved=part.bytes_moved,
                    correlation=np.where(has_call, part.stack, part.parent_stack),
                    node=unknown,
                    range_id=part.range_id,
                    grid_id=part.grid_id,
                    op_class=op_class if part is copies else np.zeros(len(part), np.int64),
                )
            )

    def _devices_of(self, agents: RocmAgents, part: RocmWork) -> tuple[IntArray, IntArray, IntArray]:
        """Return, for each kernel or copy, its GPU, the index of the device's name, and its operation class.

        They follow from the agents (devices) at the source and the target. If both are GPUs, the work belongs
        to the target.
        """
        pairs, index = distinct_rows(part.target, part.source)
        rows: list[tuple[int, int, int]] = []
        for pair in pairs:
            ends = [agent for agent in map(agents.by_number.get, pair) if agent is not None]
            gpus = [agent for agent in ends if agent.is_gpu]
            name = gpus[0].name if gpus else ""
            device = self.devices.setdefault(name, len(self.devices))
            gpu = (agents.node << 20) + gpus[0].order if gpus else -1
            op_class = OpClass.MEMORY if len(gpus) < len(ends) else OpClass.MOVE
            rows.append((gpu, device, op_class if len(ends) == 2 else OpClass.UNKNOWN))
        gpu_column, device_column, class_column = np.array(rows, np.int64).reshape(-1, 3)[index].T
        return gpu_column, device_column, class_column

    def trace(self) -> GpuTrace:
        """Return the recording of all added processes."""
        return GpuTrace(
            strings=self.strings,
            devices=tuple(self.devices),
            work=DeviceWork.joined(self.work).by_start(),
            launches=GpuLaunches.joined(self.launches),
            ranges=GpuRanges.joined(self.ranges),
            texts=list(self.texts),
        )


_SCHEMA = "3"
_MAX_PROCESSES_OF_SET = 1 << 10
_WORK_TABLES = ("rocpd_kernel_dispatch", "rocpd_memory_copy", "rocpd_region")
_SPAN_COLUMNS = (
    "start",
    "end",
    "start_id",
    "end_id",
    "track_id",
    "nid",
    "pid",
    "tid",
    "agent_id",
    "queue_id",
    "stream_id",
)
_SHAPE_COLUMNS = (
    *("grid_size_x", "grid_size_y", "grid_size_z"),
    *("workgroup_size_x", "workgroup_size_y", "workgroup_size_z"),
)
_ORDER_COLUMNS = ("type_index", "absolute_index", "id")
_TRACK_COLUMNS = ("nid", "pid", "tid", "agent_id", "queue_id", "stream_id")


class _MarkerText(msgspec.Struct):
    message: str = ""


_MARKER_TEXTS = msgspec.json.Decoder(_MarkerText)


def read_rocpd(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read a rocpd database of rocprofv3, also a gzipped one.

    Raises ``UnsupportedError`` for the tables of the older rpd tracer, and ``FormatError`` for a damaged
    database or one without events.
    """
    builder = RocmTraceBuilder(str(path))
    with open_database(path, options.max_bytes) as database:
        suffixes = sorted(
            {
                fold_name(table)[len(name) :]
                for table in database.tables
                for name in _WORK_TABLES
                if fold_name(table) == name or fold_name(table).startswith(f"{name}_")
            }
        )
        if not suffixes and (database.has("rocpd_op") or database.has("rocpd_api")):
            raise UnsupportedError(
                "this is a recording of the older rpd tracer",
                path=database.path,
                position="the list of tables",
                hint="record with rocprofv3",
            )
        if not suffixes:
            raise FormatError(
                "the database has no tables of kernels, copies or regions",
                path=database.path,
                position="the list of tables",
                hint="record with rocprofv3",
            )
        nodes: dict[int, int] = {}
        versions: set[str] = set()
        for suffix in suffixes:
            _RocpdReader(database, suffix, builder, diagnostics).add(nodes)
            facts = database.read(_table_name(database, "metadata", suffix), (), ("tag", "value"))
            versions.add(facts.facts("tag", "value").get("schema_version", ""))
        report_unread(database, "rocpd", diagnostics)
    others = sorted(versions - {_SCHEMA})
    message = f"the schema is {', '.join(others)[:80] or 'not stated'}, not {_SCHEMA}: columns may differ"
    diagnostics.warning("rocpd.other-schema", str(path), message, count=len(others))
    message = "kernels have no stream and are ordered by hardware queue"
    diagnostics.info("rocpd.ordered-by-queue", str(path), message, count=builder.by_queue)
    newest = max(versions)
    metadata = {"schema_version": newest[:100]} if newest else {}
    return to_profile(path, "rocpd", builder.trace(), metadata, diagnostics)


def _table_name(database: SqliteDatabase, name: str, suffix: str) -> str:
    """Return the name of the table ``name`` of one recording in a database. Each recording has tables with a
    ``suffix``; a table without suffix is shared by all recordings.
    """
    own, shared = f"rocpd_{name}{suffix}", f"rocpd_{name}"
    return shared if not database.has(own) and database.has(shared) else own


def _values_at(column: IntArray, rows: IntArray) -> IntArray:
    """Return the value of a column at each row, -1 for row -1 or NULL."""
    return np.maximum(at_rows(column, rows, -1), -1)


class _RocpdReader:
    """Reader of the tables of one recording in a rocpd database. Their names have the same suffix."""

    def __init__(
        self, database: SqliteDatabase, suffix: str, builder: RocmTraceBuilder, diagnostics: Diagnostics
    ) -> None:
        """Read the tables to which events refer: texts, clocks, tracks and agents."""
        self.database, self.suffix = database, suffix
        self.builder, self.diagnostics = builder, diagnostics
        strings = self._table("string", ("id",), ("string",))
        self.texts, self.text_of = strings.words, strings.by_key("id", "string")
        self.string_id, self.string_index = strings.integers["id"], strings.texts["string"]
        events = self._table("event", ("id", "category_id", "stack_id", "parent_stack_id"), ("extdata",))
        self.events = events
        self.clock = self._table("timestamp", ("id", "value")).integers
        self.tracks = self._table("track", ("id", *_TRACK_COLUMNS)).integers
        agent_texts = ("type", "product_name", "name")
        self.agent_table = self._table("info_agent", ("nid", *_ORDER_COLUMNS), agent_texts)

    def _table(self, name: str, integers: tuple[str, ...], texts: tuple[str, ...] = ()) -> SqliteTable:
        return self.database.read(_table_name(self.database, name, self.suffix), integers, texts)

    def _span(self, name: str, more: tuple[str, ...]) -> dict[str, IntArray]:
        """Return the rows of a table with their times, process, thread and track, and the columns ``more``.

        Rows without times are dropped and reported.
        """
        columns = self._table(name, (*_SPAN_COLUMNS, *more)).integers
        for end in ("start", "end"):
            row = match_rows((self.clock["id"],), (columns.pop(f"{end}_id"),))
            in_clock_table = at_rows(self.clock["value"], row, MISSING)
            columns[end] = np.where(columns[end] == MISSING, in_clock_table, columns[end])
        track = match_rows((self.tracks["id"],), (columns.pop("track_id"),))
        for column in _TRACK_COLUMNS:
            own = np.maximum(columns[column], -1)
            columns[column] = np.where(own >= 0, own, _values_at(self.tracks[column], track))
        has_times = (columns["start"] != MISSING) & (columns["end"] != MISSING)
        message = f"rows of rocpd_{name} without a start or an end are dropped"
        num_dropped = len(has_times) - int(has_times.sum())
        self.diagnostics.error("rocpd.event-without-time", self.database.path, message, count=num_dropped)
        columns = {column: values[has_times] for column, values in columns.items()}
        columns["event"] = match_rows((self.events.integers["id"],), (columns["event_id"],))
        for column in ("stack_id", "parent_stack_id"):
            columns[column] = _values_at(self.events.integers[column], columns["event"])
        return columns

    def add(self, nodes: dict[int, int]) -> None:
        """Read all processes of this set of tables; rocprofv3 writes one. ``nodes`` numbers the machines."""
        kernels = self._span("kernel_dispatch", ("kernel_id", "event_id", "region_name_id", *_SHAPE_COLUMNS))
        names = ("name_id", "event_id", "dst_agent_id", "src_agent_id", "size", "region_name_id")
        copies = self._span("memory_copy", names)
        regions = self._span("region", ("name_id", "event_id"))
        symbols = self._table("info_kernel_symbol", ("id",), ("display_name", "kernel_name"))
        shown_names, names_of = (symbols.by_key("id", name) for name in ("display_name", "kernel_name"))
        names_of |= {number: name for number, name in shown_names.items() if name}
        kernel_id = self._rows(kernels["kernel_id"], names_of)
        copy_row = self._rows(copies["name_id"], self.text_of)
        label, category, texts = self._labels(regions)
        keys = [np.stack((part["nid"], part["pid"])) for part in (kernels, copies, regions)]
        every = np.unique(np.concatenate(keys, axis=1), axis=1)
        if every.shape[1] > _MAX_PROCESSES_OF_SET:
            message = f"a set of tables has more than {_MAX_PROCESSES_OF_SET:,} processes"
            raise self.database.malformed(
                message, f"tables {'kernel_dispatch, memory_copy, region'}{self.suffix}"
            )
        for node, pid in zip(listed(every[0]), listed(every[1]), strict=True):
            of_kernels, of_copies, of_regions = (
                np.flatnonzero((key[0] == node) & (key[1] == pid)) for key in keys
            )
            machine = nodes.setdefault(node, len(nodes))
            table = self.agent_table
            agent_texts = [*table.words, ""]
            kinds, products, agent_names = (
                listed(table.texts[name]) for name in ("type", "product_name", "name")
            )
            nids, *columns = (listed(table.integers[name]) for name in ("nid", *_ORDER_COLUMNS))
            agents = RocmAgents(machine)
            for row, number in enumerate(columns[-1]):
                if node >= 0 and nids[row] not in {node, MISSING}:
                    continue
                order = next((column[row] for column in columns if column[row] >= 0), 0)
                name = agent_texts[products[row]] or agent_texts[agent_names[row]]
                agents.by_number[number] = RocmAgent(agent_texts[kinds[row]] == "GPU", order & 0xFFFFF, name)
            self.builder.add(
                pid,
                agents,
                self._work(kernels, of_kernels, kernel_id, ("agent_id", "agent_id")),
                self._work(copies, of_copies, copy_row, ("dst_agent_id", "src_agent_id")),
                RocmCalls(
                    thread=regions["tid"][of_regions],
                    start_ns=regions["start"][of_regions],
                    end_ns=regions["end"][of_regions],
                    stack=regions["stack_id"][of_regions],
                    label=label[of_regions],
                    category=category[of_regions],
                ),
                texts=texts,
            )

    def _work(
        self, columns: dict[str, IntArray], rows: IntArray, name_id: IntArray, ends: tuple[str, str]
    ) -> RocmWork:
        selected = {name: column[rows] for name, column in columns.items()}
        unknown = np.full(len(rows), -1, np.int64)
        grid_id = np.zeros(len(rows), np.int64)
        range_id = self._rows(selected["region_name_id"], self.text_of)
        if _SHAPE_COLUMNS[0] in selected:  # grids count threads; copies have none
            extents = (selected[name] for name in _SHAPE_COLUMNS)
            grid_id = shape_rows(self.builder.strings, *extents, in_threads=True).astype(np.int64)
        return RocmWork(
            start_ns=selected["start"],
            end_ns=selected["end"],
            target=np.maximum(selected[ends[0]], -1),
            source=np.maximum(selected[ends[1]], -1),
            stream=selected["stream_id"],
            queue=selected["queue_id"],
            stack=selected["stack_id"],
            parent_stack=selected["parent_stack_id"],
            name_id=name_id[rows],
            bytes_moved=np.maximum(selected.get("size", unknown), -1),
            range_id=range_id,
            grid_id=grid_id,
        )

    def _rows(self, ids: IntArray, text_of: Mapping[int, str]) -> IntArray:
        """Return the string row in the profile of each text, given the number of the text in the file."""
        return mapped(ids, lambda number: self.builder.strings.add(text_of.get(number, "")), np.int64)

    def _labels(self, regions: dict[str, IntArray]) -> tuple[IntArray, IntArray, list[str]]:
        """Return the labels and categories of regions as indices of texts, and the texts.

        For a marker, the label is the message in its event.
        """
        texts = list(self.texts)
        label, category_of_event = (
            _values_at(self.string_index, match_rows((self.string_id,), (ids,)))
            for ids in (regions["name_id"], self.events.integers["category_id"])
        )
        category = _values_at(category_of_event, regions["event"])
        extdata = _values_at(self.events.texts["extdata"], regions["event"])
        message = np.full(len(self.events.distinct) + 1, -1, np.int64)
        for index in listed(np.unique(extdata[extdata >= 0])):
            document = self.events.distinct[index]
            if b"message" not in document:
                continue
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                text = _MARKER_TEXTS.decode(document).message
                if text:
                    message[index] = len(texts)
                    texts.append(text)
        return np.where(message[extdata] >= 0, message[extdata], label), category, texts
