"""A rocpd database as a :class:`Profile`. One holds a set of tables for each process, told apart by a suffix.

Views named without the suffix join the sets; they are SQL of the file, and not used. Schema 3 was written
with times inside the rows, and for a while with times and tracks in tables of their own: both are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from hespas.converters.format import ReadOptions
from hespas.converters.gpu_trace.profile import to_profile
from hespas.converters.gpu_trace.trace import DeviceWork, GpuTrace, Launches, Ranges, listed
from hespas.converters.launch_shapes import shape_rows
from hespas.converters.linking import match_rows
from hespas.files.sqlite import MISSING, Database, Table, folded, opened, report_unread
from hespas.graph import Diagnostics, OpClass, Profile, StringTableBuilder
from hespas.graph.columns import ColumnTable, IntArray, at_rows, distinct_rows, mapped
from hespas.graph.errors import FormatError, UnsupportedError

__all__ = ["Agent", "Agents", "Assembly", "Calls", "Work", "read_rocpd"]

_MOST_LISTED = 1 << 10
_LAUNCHING = re.compile(r"(?:^|_)(?:hip|hsa)_", re.IGNORECASE)
"""``HIP_RUNTIME_API_EXT``, ``HSA_CORE_API``: categories of calls that are no operation of the program."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A CPU or a GPU. ``order`` counts those of a kind."""

    is_gpu: bool
    order: int
    name: str


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Work(ColumnTable):
    """Kernels or copies of one process, -1 for unknown. ``target`` and ``source`` are agents; of a kernel
    both are the one that runs it. ``range_row`` is the range that rocprofv3 names as cause, ``grid_row`` the
    shape of the launch.
    """

    start_ns: IntArray
    end_ns: IntArray
    target: IntArray
    source: IntArray
    stream: IntArray
    queue: IntArray
    stack: IntArray
    parent_stack: IntArray
    name_row: IntArray
    bytes_moved: IntArray
    range_row: IntArray
    grid_row: IntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Calls(ColumnTable):
    """Calls and ranges on the host of one process; ``label`` and ``category`` are places in its texts."""

    thread: IntArray
    start_ns: IntArray
    end_ns: IntArray
    stack: IntArray
    label: IntArray
    category: IntArray


@dataclass(slots=True)
class Agents:
    """The agents of one process by their number in the file. ``node`` tells machines apart."""

    node: int
    by_number: dict[int, Agent] = field(default_factory=dict[int, Agent])


@dataclass(slots=True)
class Assembly:
    """Collects processes of the file ``path``."""

    path: str
    strings: StringTableBuilder = field(default_factory=StringTableBuilder)
    texts: dict[str, int] = field(default_factory=dict[str, int])
    devices: dict[str, int] = field(default_factory=dict[str, int])
    work: list[DeviceWork] = field(default_factory=list[DeviceWork])
    launches: list[Launches] = field(default_factory=list[Launches])
    ranges: list[Ranges] = field(default_factory=list[Ranges])
    by_queue: int = 0
    _range_count: int = 0
    _process_count: int = 0

    def add(
        self, pid: int, agents: Agents, kernels: Work, copies: Work, calls: Calls, *, texts: Sequence[str]
    ) -> None:
        """One process, whose calls say ``texts``. Raises ``FormatError`` where there are too many."""
        self._process_count += 1
        if self._process_count > _MOST_LISTED:
            raise FormatError(
                f"there are more than {_MOST_LISTED:,} processes",
                path=self.path,
                position=f"process {self._process_count}",
                hint="record again",
            )
        process = (self._process_count << 24) + (pid & 0xFFFFFF)
        self._add_calls(process, calls, texts)
        stacks = calls.stack
        use_stream = any(bool((part.stream > 0).any()) for part in (kernels, copies))
        self.by_queue += 0 if use_stream else len(kernels)
        for part, category in ((kernels, "kernel"), (copies, "gpu_memcpy")):
            self.work.append(self._work(process, agents, part, category, stacks, use_stream=use_stream))

    def _add_calls(self, process: int, calls: Calls, texts: Sequence[str]) -> None:
        launches = np.array([bool(_LAUNCHING.search(text)) for text in texts], np.bool_)
        api = at_rows(
            launches, calls.category, missing=False
        )  # calls of the runtime, no ranges of the program
        own = np.flatnonzero(~api)
        place = np.full(len(api), -1, np.int64)
        place[own] = self._range_count + np.arange(len(own))
        self._range_count += len(own)
        thread = (process << 24) + (calls.thread & 0xFFFFFF)
        whole = np.full(len(api), process, np.int64)
        self.launches.append(
            Launches(
                process=whole,
                thread=thread,
                start_ns=calls.start_ns,
                end_ns=calls.end_ns,
                correlation=calls.stack,
                range_place=place,
            )
        )
        used = np.unique(calls.label[own])
        known = used[used >= 0]
        numbers = np.full(len(texts) + 1, -1, np.int64)
        numbers[known] = [self.texts.setdefault(texts[text], len(self.texts)) for text in listed(known)]
        self.ranges.append(
            Ranges(
                process=whole[own],
                thread=thread[own],
                start_ns=calls.start_ns[own],
                end_ns=np.maximum(calls.end_ns[own], calls.start_ns[own]),
                text=numbers[calls.label[own]],
                nests=np.ones(len(own), np.bool_),
            )
        )

    def _work(
        self, process: int, agents: Agents, part: Work, category: str, stacks: IntArray, *, use_stream: bool
    ) -> DeviceWork:
        count = len(part)
        zeros = np.zeros(count, np.int64)
        known = match_rows((np.zeros(len(stacks), np.int64), stacks), (zeros, part.stack)) >= 0
        gpu, device, op_class = self._placed(agents, part)
        return DeviceWork(
            process=np.full(count, process, np.int64),
            gpu=gpu,
            device=device,
            stream=part.stream if use_stream else np.where(part.queue >= 0, part.queue, part.stream),
            start_ns=part.start_ns,
            end_ns=part.end_ns,
            name_row=part.name_row,
            category_row=np.full(count, self.strings.add(category), np.int64),
            bytes_moved=part.bytes_moved,
            correlation=np.where(known, part.stack, part.parent_stack),
            node=np.full(count, -1, np.int64),
            range_row=part.range_row,
            grid_row=part.grid_row,
            op_class=op_class if category == "gpu_memcpy" else zeros,
        )

    def _placed(self, agents: Agents, part: Work) -> tuple[IntArray, IntArray, IntArray]:
        """GPU, name of the device and class of a copy, from the agents at both ends; the target's where both
        are GPUs.
        """
        pairs, place = distinct_rows(part.target, part.source)
        found = [self._one(agents, *map(agents.by_number.get, pair)) for pair in pairs]
        gpu, device, op_class = np.array(found, np.int64).reshape(-1, 3)[place].T
        return gpu, device, op_class

    def _one(self, agents: Agents, target: Agent | None, source: Agent | None) -> tuple[int, int, int]:
        ends = [end for end in (target, source) if end is not None]
        gpus = [end for end in ends if end.is_gpu]
        name = gpus[0].name if gpus else ""
        place = self.devices.setdefault(name, len(self.devices))
        gpu = (agents.node << 20) + gpus[0].order if gpus else -1
        of_host = OpClass.MEMORY if len(gpus) < len(ends) else OpClass.MOVE
        return gpu, place, of_host if len(ends) == 2 else OpClass.UNKNOWN

    def trace(self) -> GpuTrace:
        """Everything that was added."""
        return GpuTrace(
            strings=self.strings,
            devices=tuple(self.devices),
            work=DeviceWork.joined(self.work).by_start(),
            launches=Launches.joined(self.launches),
            ranges=Ranges.joined(self.ranges),
            texts=list(self.texts),
        )


_SCHEMA = "3"
_MOST_PROCESSES = 1 << 10
_WORK_TABLES = ("rocpd_kernel_dispatch", "rocpd_memory_copy", "rocpd_region")
_SPAN = (
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
_SHAPE = (
    *("grid_size_x", "grid_size_y", "grid_size_z"),
    *("workgroup_size_x", "workgroup_size_y", "workgroup_size_z"),
)
_ORDER = ("type_index", "absolute_index", "id")
_TRACK = ("nid", "pid", "tid", "agent_id", "queue_id", "stream_id")


class _Message(msgspec.Struct):
    message: str = ""


_MESSAGES = msgspec.json.Decoder(_Message)


def read_rocpd(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read a database, also gzipped. Raises ``UnsupportedError`` for the tables of the older rpd tracer,
    ``FormatError`` for a damaged database and one without events.
    """
    assembly = Assembly(str(path))
    with opened(path, options.max_bytes) as database:
        suffixes = _suffixes(database)
        if not suffixes:
            raise _no_tables(database)
        nodes: dict[int, int] = {}
        for suffix in suffixes:
            _Reader(database, suffix, assembly, diagnostics).add(nodes)
        versions = sorted({_version(database, suffix) for suffix in suffixes})
        report_unread(database, "rocpd", diagnostics)
    others = [version for version in versions if version != _SCHEMA]
    message = f"the schema is {', '.join(others)[:80] or 'not stated'}, not {_SCHEMA}: columns may differ"
    diagnostics.warning("rocpd.other-schema", str(path), message, count=len(others))
    message = "kernels tell no stream: they are ordered by hardware queue"
    diagnostics.info("rocpd.ordered-by-queue", str(path), message, count=assembly.by_queue)
    metadata = {"schema_version": versions[-1][:100]} if versions[-1] else {}
    return to_profile(path, "rocpd", assembly.trace(), metadata, diagnostics)


def _suffixes(database: Database) -> list[str]:
    """What follows the names of tables, for each set of tables in the file."""
    found = {
        folded(table)[len(name) :]
        for table in database.tables
        for name in _WORK_TABLES
        if folded(table) == name or folded(table).startswith(f"{name}_")
    }
    return sorted(found)


def _table_name(database: Database, name: str, suffix: str) -> str:
    """A table of a set: the one with its suffix, else the one that all sets share."""
    own, shared = f"rocpd_{name}{suffix}", f"rocpd_{name}"
    return shared if not database.has(own) and database.has(shared) else own


def _no_tables(database: Database) -> FormatError | UnsupportedError:
    if database.has("rocpd_op") or database.has("rocpd_api"):
        return UnsupportedError(
            "this is a recording of the older rpd tracer",
            path=database.path,
            position="the list of tables",
            hint="record with rocprofv3",
        )
    return FormatError(
        "there are no tables of kernels, copies or regions",
        path=database.path,
        position="the list of tables",
        hint="record with rocprofv3",
    )


def _version(database: Database, suffix: str) -> str:
    table = database.read(_table_name(database, "metadata", suffix), (), ("tag", "value"))
    return table.facts("tag", "value").get("schema_version", "")


def _picked(column: IntArray, places: IntArray) -> IntArray:
    """A column by row, -1 where there is none or it is NULL."""
    return np.maximum(at_rows(column, places, -1), -1)


class _Reader:
    """Reads one set of tables."""

    def __init__(self, database: Database, suffix: str, assembly: Assembly, diagnostics: Diagnostics) -> None:
        """Read what events refer to."""
        self.database, self.suffix = database, suffix
        self.assembly, self.diagnostics = assembly, diagnostics
        strings = self._table("string", ("id",), ("string",))
        self.texts, self.text_of = strings.words, strings.by_key("id", "string")
        self.string_id, self.string_place = strings.integers["id"], strings.texts["string"]
        events = self._table("event", ("id", "category_id", "stack_id", "parent_stack_id"), ("extdata",))
        self.events = events
        self.clock = self._table("timestamp", ("id", "value")).integers
        self.tracks = self._table("track", ("id", *_TRACK)).integers

    def _table(self, name: str, integers: tuple[str, ...], texts: tuple[str, ...] = ()) -> Table:
        return self.database.read(_table_name(self.database, name, self.suffix), integers, texts)

    def _span(self, name: str, further: tuple[str, ...]) -> dict[str, IntArray]:
        """Rows of a table with their times, process, thread and place; those without times are left out."""
        columns = self._table(name, (*_SPAN, *further)).integers
        for end in ("start", "end"):
            at = match_rows((self.clock["id"],), (columns.pop(f"{end}_id"),))
            elsewhere = at_rows(self.clock["value"], at, MISSING)
            columns[end] = np.where(columns[end] == MISSING, elsewhere, columns[end])
        track = match_rows((self.tracks["id"],), (columns.pop("track_id"),))
        for each in _TRACK:
            own = np.maximum(columns[each], -1)
            columns[each] = np.where(own >= 0, own, _picked(self.tracks[each], track))
        known = (columns["start"] != MISSING) & (columns["end"] != MISSING)
        message = f"rows of rocpd_{name} have no start or no end and are left out"
        lost = len(known) - int(known.sum())
        self.diagnostics.error("rocpd.event-without-time", self.database.path, message, count=lost)
        columns = {each: column[known] for each, column in columns.items()}
        event = match_rows((self.events.integers["id"],), (columns["event_id"],))
        columns["event"] = event
        for each in ("stack_id", "parent_stack_id"):
            columns[each] = _picked(self.events.integers[each], event)
        return columns

    def add(self, nodes: dict[int, int]) -> None:
        """Read all processes of the set: one, as rocprofv3 writes it. ``nodes`` numbers machines."""
        agents = self._table("info_agent", ("nid", *_ORDER), ("type", "product_name", "name"))
        kernels = self._span("kernel_dispatch", ("kernel_id", "event_id", "region_name_id", *_SHAPE))
        names = ("name_id", "event_id", "dst_agent_id", "src_agent_id", "size", "region_name_id")
        copies = self._span("memory_copy", names)
        regions = self._span("region", ("name_id", "event_id"))
        kernel_row, copy_row = self._kernel_names(kernels["kernel_id"]), self._rows(copies["name_id"])
        label, category, texts = self._labels(regions)
        keys = [np.stack((each["nid"], each["pid"])) for each in (kernels, copies, regions)]
        every = np.unique(np.concatenate(keys, axis=1), axis=1)
        if every.shape[1] > _MOST_PROCESSES:
            message = f"a set of tables is of more than {_MOST_PROCESSES:,} processes"
            raise self.database.malformed(
                message, f"tables {'kernel_dispatch, memory_copy, region'}{self.suffix}"
            )
        for node, pid in zip(listed(every[0]), listed(every[1]), strict=True):
            of_kernels, of_copies, of_regions = (
                np.flatnonzero((key[0] == node) & (key[1] == pid)) for key in keys
            )
            self.assembly.add(
                pid,
                _agents(agents, nodes.setdefault(node, len(nodes)), node),
                self._work(kernels, of_kernels, kernel_row, ("agent_id", "agent_id")),
                self._work(copies, of_copies, copy_row, ("dst_agent_id", "src_agent_id")),
                Calls(
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
        self, columns: dict[str, IntArray], chosen: IntArray, name_row: IntArray, ends: tuple[str, str]
    ) -> Work:
        picked = {name: column[chosen] for name, column in columns.items()}
        unknown = np.full(len(chosen), -1, np.int64)
        return Work(
            start_ns=picked["start"],
            end_ns=picked["end"],
            target=np.maximum(picked[ends[0]], -1),
            source=np.maximum(picked[ends[1]], -1),
            stream=picked["stream_id"],
            queue=picked["queue_id"],
            stack=picked["stack_id"],
            parent_stack=picked["parent_stack_id"],
            name_row=name_row[chosen],
            bytes_moved=np.maximum(picked.get("size", unknown), -1),
            range_row=self._rows(picked["region_name_id"]),
            grid_row=self._shapes(picked),
        )

    def _shapes(self, columns: dict[str, IntArray]) -> IntArray:
        """Shapes of launches, whose grids count threads; copies have none."""
        if _SHAPE[0] not in columns:
            return np.zeros(len(columns["start"]), np.int64)
        extents = (columns[name] for name in _SHAPE)
        return shape_rows(self.assembly.strings, *extents, in_threads=True).astype(np.int64)

    def _rows(self, ids: IntArray) -> IntArray:
        """Rows of the profile's strings by number of the file's."""
        return self._added(ids, self.text_of)

    def _added(self, ids: IntArray, text_of: Mapping[int, str]) -> IntArray:
        return mapped(ids, lambda number: self.assembly.strings.add(text_of.get(number, "")), np.int64)

    def _kernel_names(self, ids: IntArray) -> IntArray:
        symbols = self._table("info_kernel_symbol", ("id",), ("display_name", "kernel_name"))
        shown, own = (symbols.by_key("id", name) for name in ("display_name", "kernel_name"))
        return self._added(ids, own | {number: name for number, name in shown.items() if name})

    def _labels(self, regions: dict[str, IntArray]) -> tuple[IntArray, IntArray, list[str]]:
        """What regions say and their categories, as places in texts. A marker's text is beside its event."""
        texts = list(self.texts)
        category_id = self.events.integers["category_id"]
        label, of_event = (
            _picked(self.string_place, match_rows((self.string_id,), (ids,)))
            for ids in (regions["name_id"], category_id)
        )
        category = _picked(of_event, regions["event"])
        described = _picked(self.events.texts["extdata"], regions["event"])
        used = np.unique(described[described >= 0])
        message = np.full(len(self.events.distinct) + 1, -1, np.int64)
        for place in listed(used):
            text = _message(self.events.distinct[place])
            if text:
                message[place] = len(texts)
                texts.append(text)
        message = message[described]
        return np.where(message >= 0, message, label), category, texts


def _agents(table: Table, machine: int, node: int) -> Agents:
    """The agents of one machine by their number."""
    texts = [*table.words, ""]
    kinds, products, names = (listed(table.texts[name]) for name in ("type", "product_name", "name"))
    nids, *columns = (listed(table.integers[name]) for name in ("nid", *_ORDER))
    agents = Agents(machine)
    for row, number in enumerate(columns[-1]):
        if node >= 0 and nids[row] not in {node, MISSING}:
            continue
        order = next((column[row] for column in columns if column[row] >= 0), 0)
        name = texts[products[row]] or texts[names[row]]
        agents.by_number[number] = Agent(texts[kinds[row]] == "GPU", order & 0xFFFFF, name)
    return agents


def _message(extdata: bytes) -> str:
    if b"message" not in extdata:
        return ""
    try:
        return _MESSAGES.decode(extdata).message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
