"""rocprofv3's JSON as a :class:`Profile`. As recorded most often it holds kernels and nothing of the host.

What is read of it: ``source/lib/output/generateJSON.cpp`` and
``source/include/rocprofiler-sdk/cxx/serialization`` of https://github.com/ROCm/rocprofiler-sdk. Times are
nanoseconds; anything else is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas.converters.format import ReadOptions
from hespas.converters.gpu_trace.profile import to_profile
from hespas.converters.launch_shapes import shape_text
from hespas.converters.rocpd.recording import Agent, Agents, Assembly, Calls, Work
from hespas.files.json_text import BracketScan
from hespas.files.streams import read_bytes
from hespas.graph import Diagnostics, Profile, StringTableBuilder
from hespas.graph.columns import ColumnTable, IntArray
from hespas.graph.errors import FormatError

__all__ = ["array_elements", "read_rocprofv3"]

_NOTHING = msgspec.Raw(b"[]")
_Time = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]


class _Handle(msgspec.Struct, gc=False):
    """A number of the runtime; 64 bits, without sign."""

    handle: int = -1


class _Correlation(msgspec.Struct, gc=False):
    """Joins work to the call that enqueued it. ``external`` is the number of a text, or a set of facts."""

    internal: int = -1
    external: int | msgspec.UnsetType | dict[str, int] = msgspec.UNSET


class _Extents(msgspec.Struct, gc=False):
    """Threads in each direction; 0 where it is not told."""

    x: int = 0
    y: int = 0
    z: int = 0


class _DispatchInfo(msgspec.Struct, gc=False):
    """What a kernel runs on, in groups of how many threads, and how many threads there are."""

    kernel_id: int
    workgroup_size: _Extents = msgspec.field(default_factory=_Extents)
    grid_size: _Extents = msgspec.field(default_factory=_Extents)
    agent_id: _Handle = msgspec.field(default_factory=_Handle)
    queue_id: _Handle = msgspec.field(default_factory=_Handle)


class _Dispatch(msgspec.Struct, gc=False):
    """A kernel."""

    start_timestamp: _Time
    end_timestamp: _Time
    dispatch_info: _DispatchInfo
    correlation_id: _Correlation = msgspec.field(default_factory=_Correlation)
    stream_id: _Handle = msgspec.field(default_factory=_Handle)
    thread_id: int = -1


class _Counted(msgspec.Struct, gc=False):
    """A kernel whose counters were read; recorded so where nothing else is."""

    dispatch_data: _Dispatch


class _Copy(msgspec.Struct, gc=False):
    """A copy."""

    start_timestamp: _Time
    end_timestamp: _Time
    kind: int = -1
    operation: int = -1
    bytes: int = -1
    src_agent_id: _Handle = msgspec.field(default_factory=_Handle)
    dst_agent_id: _Handle = msgspec.field(default_factory=_Handle)
    correlation_id: _Correlation = msgspec.field(default_factory=_Correlation)
    stream_id: _Handle = msgspec.field(default_factory=_Handle)


class _Api(msgspec.Struct, gc=False):
    """A call or a range on the host."""

    start_timestamp: _Time
    end_timestamp: _Time
    kind: int = -1
    operation: int = -1
    thread_id: int = -1
    correlation_id: _Correlation = msgspec.field(default_factory=_Correlation)


class _AgentRecord(msgspec.Struct, gc=False):
    """A CPU (type 1) or a GPU (type 2)."""

    id: _Handle
    type: int = 0
    name: str = ""
    product_name: str = ""
    node_id: int = -1
    logical_node_type_id: int = -1


class _Symbol(msgspec.Struct, gc=False):
    """A kernel's names."""

    kernel_id: int
    formatted_kernel_name: str = ""
    demangled_kernel_name: str = ""
    kernel_name: str = ""


class _Kind(msgspec.Struct, gc=False):
    """The name of a kind of record, and of its operations."""

    kind: str
    operations: list[str] = msgspec.field(default_factory=list[str])


class _Entry(msgspec.Struct, gc=False):
    """A text by number."""

    key: int
    value: str = ""


class _External(msgspec.Struct):
    external: msgspec.Raw = _NOTHING


class _Strings(msgspec.Struct):
    buffer_records: msgspec.Raw = _NOTHING
    marker_api: msgspec.Raw = _NOTHING
    correlation_id: _External = msgspec.field(default_factory=_External)


class _Buffers(msgspec.Struct):
    kernel_dispatch: msgspec.Raw = _NOTHING
    memory_copy: msgspec.Raw = _NOTHING
    hip_api: msgspec.Raw = _NOTHING
    hsa_api: msgspec.Raw = _NOTHING
    marker_api: msgspec.Raw = _NOTHING
    rccl_api: msgspec.Raw = _NOTHING


class _Callbacks(msgspec.Struct):
    counter_collection: msgspec.Raw = _NOTHING


class _Metadata(msgspec.Struct):
    pid: int = 0


class _Process(msgspec.Struct):
    """One process. Lists stay text until they are read piece by piece."""

    buffer_records: _Buffers
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    agents: msgspec.Raw = _NOTHING
    strings: _Strings = msgspec.field(default_factory=_Strings)
    kernel_symbols: msgspec.Raw = _NOTHING
    callback_records: _Callbacks = msgspec.field(default_factory=_Callbacks)


_GPU = 2
_MOST_ENTRIES = 1 << 16
"""Of agents and kinds of records."""
_T = TypeVar("_T")
_Table = TypeVar("_Table", bound=ColumnTable)


class _Document(msgspec.Struct, rename={"processes": "rocprofiler-sdk-tool"}):
    processes: msgspec.Raw


_PLACE = re.compile(r" - at `(.*)`$|: [^:]*\(byte (\d+)\)$", re.DOTALL)
_ROOT = "$.rocprofiler-sdk-tool"
_DOCUMENT = msgspec.json.Decoder(_Document)
_PROCESSES = msgspec.json.Decoder(list[_Process])
_AGENTS = msgspec.json.Decoder(list[_AgentRecord])
_SYMBOLS = msgspec.json.Decoder(list[_Symbol])
_KINDS = msgspec.json.Decoder(list[_Kind])
_ENTRIES = msgspec.json.Decoder(list[_Entry])
_DISPATCHES = msgspec.json.Decoder(list[_Dispatch])
_COUNTED = msgspec.json.Decoder(list[_Counted])
_COPIES = msgspec.json.Decoder(list[_Copy])
_APIS = msgspec.json.Decoder(list[_Api])


def read_rocprofv3(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read a document, also gzipped. Raises ``FormatError`` for what is none and for one without events."""
    text = read_bytes(path, options.max_bytes).removeprefix(b"\xef\xbb\xbf")
    try:
        document = _decode(_DOCUMENT, text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _no_document(error, str(path), len(text)) from error
    assembly = Assembly(str(path))
    number = 0
    for processes in array_elements(document.processes, _PROCESSES, str(path), _ROOT):
        for process in processes:
            _Reader(process, assembly, diagnostics, str(path), f"{_ROOT}[{number}]").add()
            number += 1
    message = "kernels tell no stream: they are ordered by hardware queue"
    diagnostics.info("rocprofv3.ordered-by-queue", str(path), message, count=assembly.by_queue)
    return to_profile(path, "rocprofv3", assembly.trace(), {}, diagnostics)


def _decode(decoder: msgspec.json.Decoder[_T], text: bytes) -> _T:
    """What a text says; where it is not UTF-8, with replaced characters."""
    try:
        return decoder.decode(text)
    except UnicodeDecodeError:
        return decoder.decode(text.decode("utf-8", "replace").encode())


def _no_document(error: Exception, path: str, size: int) -> FormatError:
    message = str(error)
    place = _PLACE.search(message)
    position = f"byte {size}" if "truncated" in message else "$"  # the library names none for the document
    if place:
        position = place.group(1) or f"byte {place.group(2)}"
    return FormatError(
        f"this is no document of rocprofv3: {_PLACE.sub('', message)}",
        path=path,
        position=position,
        hint="was the profiler interrupted? record again with --output-format json",
    )


@dataclass(slots=True)
class _Columns:
    """Columns while records are read: arrays, one a block."""

    parts: dict[str, list[IntArray]] = field(default_factory=dict[str, list[IntArray]])

    def add(self, **columns: Sequence[int]) -> None:
        for name, values in columns.items():
            self.parts.setdefault(name, []).append(np.array(values, np.int64))

    def table(self, kind: type[_Table]) -> _Table:
        """The columns of a table; those that were never told are unknown."""
        columns = {name: np.concatenate(parts) for name, parts in self.parts.items()}
        return kind.of(**columns) if columns else kind.empty()


class _Reader:
    """Reads one process."""

    def __init__(
        self, process: _Process, assembly: Assembly, diagnostics: Diagnostics, path: str, where: str
    ) -> None:
        self.process, self.assembly = process, assembly
        self.diagnostics, self.path, self.where = diagnostics, path, where
        self.kinds = self._few(process.strings.buffer_records, _KINDS, "strings.buffer_records")
        self.places: dict[str, int] = {}

    def _each(
        self, raw: msgspec.Raw, decoder: msgspec.json.Decoder[list[_T]], name: str
    ) -> Iterator[list[_T]]:
        """The elements of the list ``name`` of this process."""
        return array_elements(raw, decoder, self.path, f"{self.where}.{name}")

    def _few(self, raw: msgspec.Raw, decoder: msgspec.json.Decoder[list[_T]], name: str) -> list[_T]:
        """All elements of an array that is short in any real document."""
        found: list[_T] = []
        for part in self._each(raw, decoder, name):
            found.extend(part)
            if len(found) > _MOST_ENTRIES:
                message, where = f"more than {_MOST_ENTRIES:,} elements", f"{self.where}.{name}"
                raise FormatError(message, path=self.path, position=where, hint="record again")
        return found

    def _entries(self, raw: msgspec.Raw, keep: Callable[[str], int], name: str) -> dict[int, int]:
        """Texts by number; ``keep`` stores one."""
        return {each.key: keep(each.value) for part in self._each(raw, _ENTRIES, name) for each in part}

    def add(self) -> None:
        """Read what ran on the device, and on the host."""
        process = self.process
        agents = Agents(0)
        for each in self._few(process.agents, _AGENTS, "agents"):
            order = each.logical_node_type_id if each.logical_node_type_id >= 0 else each.node_id
            name = each.product_name or each.name
            agents.by_number[_fit(each.id.handle)] = Agent(each.type == _GPU, max(order, 0) & 0xFFFFF, name)
        names = _Names.of(
            self._each(process.kernel_symbols, _SYMBOLS, "kernel_symbols"), self.assembly.strings
        )
        external = process.strings.correlation_id.external
        ranges = self._entries(external, self.assembly.strings.add, "strings.correlation_id.external")
        self.assembly.add(
            process.metadata.pid & 0xFFFFFF,
            agents,
            self._kernels(names, ranges),
            self._copies(),
            self._calls(),
            texts=list(self.places),
        )

    def _kernels(self, names: _Names, ranges: dict[int, int]) -> Work:
        found = _Columns()
        records = self.process.buffer_records
        for part in self._each(records.kernel_dispatch, _DISPATCHES, "buffer_records.kernel_dispatch"):
            _add_dispatches(found, part, names, ranges)
        if not any(map(len, found.parts.get("start_ns", ()))):
            counters = self.process.callback_records.counter_collection
            for counted in self._each(counters, _COUNTED, "callback_records.counter_collection"):
                _add_dispatches(found, [each.dispatch_data for each in counted], names, ranges)
        return found.table(Work)

    def _copies(self) -> Work:
        found = _Columns()
        add = self.assembly.strings.add
        copies = self.process.buffer_records.memory_copy
        for part in self._each(copies, _COPIES, "buffer_records.memory_copy"):
            found.add(
                start_ns=[each.start_timestamp for each in part],
                end_ns=[each.end_timestamp for each in part],
                target=[_fit(each.dst_agent_id.handle) for each in part],
                source=[_fit(each.src_agent_id.handle) for each in part],
                stream=[_fit(each.stream_id.handle) for each in part],
                stack=[_fit(each.correlation_id.internal) for each in part],
                bytes_moved=[_fit(each.bytes) for each in part],
                name_row=[add(self._operation(each.kind, each.operation)) for each in part],
            )
        return found.table(Work)

    def _calls(self) -> Calls:
        markers = self._entries(self.process.strings.marker_api, self._place, "strings.marker_api")
        found, buffers = _Columns(), self.process.buffer_records
        for name in ("hip_api", "hsa_api", "marker_api", "rccl_api"):
            for part in self._each(getattr(buffers, name), _APIS, f"buffer_records.{name}"):
                # An instant is a mark, and encloses nothing.
                spans = [each for each in part if each.end_timestamp > each.start_timestamp]
                labels = [markers.get(each.correlation_id.internal, -1) for each in spans]
                found.add(
                    start_ns=[each.start_timestamp for each in spans],
                    end_ns=[each.end_timestamp for each in spans],
                    thread=[_fit(each.thread_id) for each in spans],
                    stack=[_fit(each.correlation_id.internal) for each in spans],
                    label=[
                        label if label >= 0 else self._place(self._operation(each.kind, each.operation))
                        for label, each in zip(labels, spans, strict=True)
                    ],
                    category=[self._place(self._kind(each.kind)) for each in spans],
                )
        return found.table(Calls)

    def _place(self, text: str) -> int:
        return self.places.setdefault(text, len(self.places))

    def _kind(self, kind: int) -> str:
        return self.kinds[kind].kind if 0 <= kind < len(self.kinds) else ""

    def _operation(self, kind: int, operation: int) -> str:
        operations = self.kinds[kind].operations if 0 <= kind < len(self.kinds) else []
        return operations[operation] if 0 <= operation < len(operations) else self._kind(kind)


@dataclass(slots=True)
class _Names:
    """Rows of kernels' names; only those that ran are kept. Symbols are many, so they are columns."""

    ids: IntArray
    places: IntArray
    texts: list[str]
    strings: StringTableBuilder
    rows: dict[int, int] = field(default_factory=dict[int, int])

    @classmethod
    def of(cls, parts: Iterator[list[_Symbol]], strings: StringTableBuilder) -> _Names:
        places: dict[str, int] = {"": 0}
        found = _Columns()
        for part in parts:
            called = [
                each.formatted_kernel_name or each.demangled_kernel_name or each.kernel_name for each in part
            ]
            found.add(
                id=[_fit(each.kernel_id) for each in part],
                place=[places.setdefault(name, len(places)) for name in called],
            )
        none = np.empty(0, np.int64)
        ids, place = (np.concatenate([none, *found.parts.get(name, ())]) for name in ("id", "place"))
        order = np.argsort(ids, kind="stable")
        return cls(ids[order], place[order], list(places), strings)

    def row(self, kernel: int) -> int:
        row = self.rows.get(kernel)
        if row is None:
            at = int(np.searchsorted(self.ids, _fit(kernel)))
            known = at < len(self.ids) and int(self.ids[at]) == kernel
            row = self.strings.add(self.texts[int(self.places[at])] if known else "")
            self.rows[kernel] = row
        return row


def _add_dispatches(found: _Columns, part: list[_Dispatch], names: _Names, ranges: dict[int, int]) -> None:
    agents = [_fit(each.dispatch_info.agent_id.handle) for each in part]
    found.add(
        start_ns=[each.start_timestamp for each in part],
        end_ns=[each.end_timestamp for each in part],
        target=agents,
        source=agents,
        stream=[_fit(each.stream_id.handle) for each in part],
        queue=[_fit(each.dispatch_info.queue_id.handle) for each in part],
        stack=[_fit(each.correlation_id.internal) for each in part],
        name_row=[names.row(each.dispatch_info.kernel_id) for each in part],
        range_row=[_named_range(each.correlation_id, ranges) for each in part],
        grid_row=[_grid_row(each.dispatch_info, names.strings) for each in part],
    )


def _grid_row(info: _DispatchInfo, strings: StringTableBuilder) -> int:
    """The shape of a launch, whose grid counts threads."""
    grid, block = info.grid_size, info.workgroup_size
    extents = (grid.x, grid.y, grid.z), (block.x, block.y, block.z)
    return strings.add(shape_text(*extents, in_threads=True))


def _named_range(correlation: _Correlation, ranges: dict[int, int]) -> int:
    """The range that the profiler names as cause (``--kernel-rename``)."""
    external = correlation.external
    return ranges.get(external, 0) if isinstance(external, int) else 0


def _fit(number: int) -> int:
    """A number that fits 63 bits, else -1."""
    return number if 0 <= number < 1 << 63 else -1


# The elements of a JSON array a block at a time, so that memory is bounded by the block.
#
# Elements of few bytes become objects of many: an array is never decoded as a whole.

_BLOCK_BYTES = 1 << 20
_FAULT_PLACE = re.compile(r" - at `\$\[(\d+)\](.*)`$", re.DOTALL)
_COMMA = ord(",")


def array_elements(
    raw: msgspec.Raw, decoder: msgspec.json.Decoder[list[_T]], path: str, where: str
) -> Iterator[list[_T]]:
    """The elements of the array at the JSON path ``where``, some at a time. Raises ``FormatError`` for what
    is no array of these.
    """
    text = memoryview(raw).cast("B") if raw else memoryview(b"[]")
    data = np.frombuffer(text, np.uint8)
    opened = _first_of(data)
    if opened < 0 or data[opened] != ord("["):
        raise FormatError(
            "a list is missing", path=path, position=where, hint="record again with --output-format json"
        )
    begin, scan, count = opened + 1, BracketScan(), 0
    end = len(data) - 1 - _first_of(data[::-1])
    for start in range(begin, end, _BLOCK_BYTES):
        piece = data[start : min(start + _BLOCK_BYTES, end)]
        found = scan.scan(piece)
        commas = np.flatnonzero((piece == _COMMA) & ~found.inside & (found.depth == 0))
        if len(commas):
            cut = start + int(commas[-1])
            part = _decoded(text[begin:cut], decoder, path, (where, count))
            count += len(part)
            yield part
            begin = cut + 1
    yield _decoded(text[begin:end], decoder, path, (where, count))


def _first_of(data: NDArray[np.uint8]) -> int:
    """The first character that is no white space."""
    for start in range(0, len(data), _BLOCK_BYTES):
        found = np.flatnonzero(~np.isin(data[start : start + _BLOCK_BYTES], (0x20, 0x09, 0x0A, 0x0D)))
        if len(found):
            return start + int(found[0])
    return -1


def _decoded(
    part: memoryview[int], decoder: msgspec.json.Decoder[list[_T]], path: str, at: tuple[str, int]
) -> list[_T]:
    try:
        return _decode(decoder, b"".join((b"[", part, b"]")))
    except (msgspec.DecodeError, RecursionError) as error:
        raise _no_record(error, path, at) from error


def _no_record(error: Exception, path: str, at: tuple[str, int]) -> FormatError:
    """The error at a place of the array, whose elements are decoded some at a time: ``at`` is the first."""
    where, first = at
    message = str(error)
    place = _FAULT_PLACE.search(message)
    position = f"{where}[{first}] or later"
    if place:
        position = f"{where}[{first + int(place.group(1))}]{place.group(2)}"
    return FormatError(
        f"a record makes no sense: {_FAULT_PLACE.sub('', message)}",
        path=path,
        position=position,
        hint="was the profiler interrupted? record again",
    )
