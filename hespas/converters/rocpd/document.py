"""JSON of rocprofv3 as a :class:`Profile`. Most documents have kernels and nothing of the host.

The fields follow ``source/lib/output/generateJSON.cpp`` and
``source/include/rocprofiler-sdk/cxx/serialization`` of https://github.com/ROCm/rocprofiler-sdk. Times are
nanoseconds; other fields are skipped. Arrays are decoded one block at a time, because small elements become
large objects: memory is bounded by the block.
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
from hespas.converters.rocpd.recording import RocmAgent, RocmAgents, RocmCalls, RocmTraceBuilder, RocmWork
from hespas.files.documents import BracketScan
from hespas.files.streams import read_bytes
from hespas.graph import Diagnostics, Profile, StringTableBuilder
from hespas.graph.columns import ColumnTable, IntArray
from hespas.graph.errors import FormatError

__all__ = ["array_elements", "read_rocprofv3"]

_EMPTY_LIST = msgspec.Raw(b"[]")
_Time = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]


class _RuntimeHandle(msgspec.Struct, gc=False):
    """Number by which the ROCm runtime identifies an object; 64 bits, unsigned."""

    handle: int = -1


class _CorrelationIds(msgspec.Struct, gc=False):
    """Ids that device work and the call that enqueued it share.

    ``external`` is the number of a text, or a dictionary of other properties.
    """

    internal: int = -1
    external: int | msgspec.UnsetType | dict[str, int] = msgspec.UNSET


class _GridExtents(msgspec.Struct, gc=False):
    """Number of threads of a kernel in each direction; 0 if unknown."""

    x: int = 0
    y: int = 0
    z: int = 0


class _DispatchInfo(msgspec.Struct, gc=False):
    """Agent and queue of a kernel, its workgroup size and its number of threads."""

    kernel_id: int
    workgroup_size: _GridExtents = msgspec.field(default_factory=_GridExtents)
    grid_size: _GridExtents = msgspec.field(default_factory=_GridExtents)
    agent_id: _RuntimeHandle = msgspec.field(default_factory=_RuntimeHandle)
    queue_id: _RuntimeHandle = msgspec.field(default_factory=_RuntimeHandle)


class _DispatchRecord(msgspec.Struct, gc=False):
    """Record of a kernel that ran."""

    start_timestamp: _Time
    end_timestamp: _Time
    dispatch_info: _DispatchInfo
    correlation_id: _CorrelationIds = msgspec.field(default_factory=_CorrelationIds)
    stream_id: _RuntimeHandle = msgspec.field(default_factory=_RuntimeHandle)
    thread_id: int = -1


class _CountedDispatch(msgspec.Struct, gc=False):
    """Record of a kernel that ran with performance counters. If counters were recorded, kernels are recorded
    only in this form.
    """

    dispatch_data: _DispatchRecord


class _CopyRecord(msgspec.Struct, gc=False):
    """Record of a copy between agents."""

    start_timestamp: _Time
    end_timestamp: _Time
    kind: int = -1
    operation: int = -1
    bytes: int = -1
    src_agent_id: _RuntimeHandle = msgspec.field(default_factory=_RuntimeHandle)
    dst_agent_id: _RuntimeHandle = msgspec.field(default_factory=_RuntimeHandle)
    correlation_id: _CorrelationIds = msgspec.field(default_factory=_CorrelationIds)
    stream_id: _RuntimeHandle = msgspec.field(default_factory=_RuntimeHandle)


class _ApiRecord(msgspec.Struct, gc=False):
    """Record of a call or a range on the host."""

    start_timestamp: _Time
    end_timestamp: _Time
    kind: int = -1
    operation: int = -1
    thread_id: int = -1
    correlation_id: _CorrelationIds = msgspec.field(default_factory=_CorrelationIds)


class _AgentRecord(msgspec.Struct, gc=False):
    """Record of an agent: a CPU (type 1) or a GPU (type 2)."""

    id: _RuntimeHandle
    type: int = 0
    name: str = ""
    product_name: str = ""
    node_id: int = -1
    logical_node_type_id: int = -1


class _KernelSymbol(msgspec.Struct, gc=False):
    """Record of a kernel symbol: the names of a kernel by its id."""

    kernel_id: int
    formatted_kernel_name: str = ""
    demangled_kernel_name: str = ""
    kernel_name: str = ""


class _RecordKind(msgspec.Struct, gc=False):
    """Name of a kind of API record (``HIP_RUNTIME_API``), and the names of its operations."""

    kind: str
    operations: list[str] = msgspec.field(default_factory=list[str])


class _NumberedText(msgspec.Struct, gc=False):
    """A text and its number, to which other records refer."""

    key: int
    value: str = ""


class _ExternalTexts(msgspec.Struct):
    external: msgspec.Raw = _EMPTY_LIST


class _RocprofStrings(msgspec.Struct):
    buffer_records: msgspec.Raw = _EMPTY_LIST
    marker_api: msgspec.Raw = _EMPTY_LIST
    correlation_id: _ExternalTexts = msgspec.field(default_factory=_ExternalTexts)


class _BufferRecords(msgspec.Struct):
    kernel_dispatch: msgspec.Raw = _EMPTY_LIST
    memory_copy: msgspec.Raw = _EMPTY_LIST
    hip_api: msgspec.Raw = _EMPTY_LIST
    hsa_api: msgspec.Raw = _EMPTY_LIST
    marker_api: msgspec.Raw = _EMPTY_LIST
    rccl_api: msgspec.Raw = _EMPTY_LIST


class _CallbackRecords(msgspec.Struct):
    counter_collection: msgspec.Raw = _EMPTY_LIST


class _RocprofMetadata(msgspec.Struct):
    pid: int = 0


class _RocprofProcess(msgspec.Struct):
    """Record of one process in a document. Its lists stay JSON text until they are read block by block."""

    buffer_records: _BufferRecords
    metadata: _RocprofMetadata = msgspec.field(default_factory=_RocprofMetadata)
    agents: msgspec.Raw = _EMPTY_LIST
    strings: _RocprofStrings = msgspec.field(default_factory=_RocprofStrings)
    kernel_symbols: msgspec.Raw = _EMPTY_LIST
    callback_records: _CallbackRecords = msgspec.field(default_factory=_CallbackRecords)


_GPU = 2
_MAX_ENTRIES = 1 << 16
"""Maximum number of agents, and of kinds of records."""
_T = TypeVar("_T")
_Table = TypeVar("_Table", bound=ColumnTable)


class _RocprofDocument(msgspec.Struct, rename={"processes": "rocprofiler-sdk-tool"}):
    processes: msgspec.Raw


_POSITION = re.compile(r" - at `(.*)`$|: [^:]*\(byte (\d+)\)$", re.DOTALL)
_ROOT = "$.rocprofiler-sdk-tool"
_DOCUMENT = msgspec.json.Decoder(_RocprofDocument)
_PROCESSES = msgspec.json.Decoder(list[_RocprofProcess])
_AGENTS = msgspec.json.Decoder(list[_AgentRecord])
_SYMBOLS = msgspec.json.Decoder(list[_KernelSymbol])
_KINDS = msgspec.json.Decoder(list[_RecordKind])
_ENTRIES = msgspec.json.Decoder(list[_NumberedText])
_DISPATCHES = msgspec.json.Decoder(list[_DispatchRecord])
_COUNTED = msgspec.json.Decoder(list[_CountedDispatch])
_COPIES = msgspec.json.Decoder(list[_CopyRecord])
_APIS = msgspec.json.Decoder(list[_ApiRecord])


def read_rocprofv3(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read a JSON document of rocprofv3, gzipped or not. Raises ``FormatError`` for another document and for
    one without events.
    """
    text = read_bytes(path, options.max_bytes).removeprefix(b"\xef\xbb\xbf")
    try:
        document = _decode(_DOCUMENT, text)
    except (msgspec.DecodeError, RecursionError) as error:
        message = str(error)
        position = f"byte {len(text)}" if "truncated" in message else "$"  # the library states none
        if match := _POSITION.search(message):
            position = match.group(1) or f"byte {match.group(2)}"
        raise FormatError(
            f"this is not a document of rocprofv3: {_POSITION.sub('', message)}",
            path=str(path),
            position=position,
            hint="record again with --output-format json; the profiler may have been interrupted",
        ) from error
    builder = RocmTraceBuilder(str(path))
    number = 0
    for processes in array_elements(document.processes, _PROCESSES, str(path), _ROOT):
        for process in processes:
            _RocprofReader(process, builder, str(path), f"{_ROOT}[{number}]").add()
            number += 1
    message = "kernels have no stream and are ordered by hardware queue"
    diagnostics.info("rocprofv3.ordered-by-queue", str(path), message, count=builder.by_queue)
    return to_profile(path, "rocprofv3", builder.trace(), {}, diagnostics)


def _decode(decoder: msgspec.json.Decoder[_T], text: bytes) -> _T:
    """Decode a text; invalid UTF-8 is replaced."""
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):  # msgspec 0.23 raises its own error for invalid UTF-8
        replaced = text.decode("utf-8", "replace").encode()
        if replaced == text:
            raise
        return decoder.decode(replaced)


@dataclass(slots=True)
class _BlockColumns:
    """Columns of a table while records are read: a list of arrays per column, one array per block."""

    parts: dict[str, list[IntArray]] = field(default_factory=dict[str, list[IntArray]])

    def add(self, **columns: Sequence[int]) -> None:
        for name, values in columns.items():
            self.parts.setdefault(name, []).append(np.array(values, np.int64))

    def table(self, kind: type[_Table]) -> _Table:
        """Return a table of class ``kind`` with the collected columns. Other columns are unknown."""
        columns = {name: np.concatenate(parts) for name, parts in self.parts.items()}
        return kind.of(**columns) if columns else kind.empty()


class _RocprofReader:
    """Reader of one process in a document."""

    def __init__(self, process: _RocprofProcess, builder: RocmTraceBuilder, path: str, where: str) -> None:
        self.process, self.builder = process, builder
        self.path, self.where = path, where
        self.kinds = self._short_list(process.strings.buffer_records, _KINDS, "strings.buffer_records")
        self.text_index: dict[str, int] = {}

    def _blocks(
        self, raw: msgspec.Raw, decoder: msgspec.json.Decoder[list[_T]], name: str
    ) -> Iterator[list[_T]]:
        """Return the elements of the list ``name`` of this process, in blocks."""
        return array_elements(raw, decoder, self.path, f"{self.where}.{name}")

    def _short_list(self, raw: msgspec.Raw, decoder: msgspec.json.Decoder[list[_T]], name: str) -> list[_T]:
        """Return all elements of an array that is short in any real document."""
        elements: list[_T] = []
        for block in self._blocks(raw, decoder, name):
            elements.extend(block)
            if len(elements) > _MAX_ENTRIES:
                message, where = f"more than {_MAX_ENTRIES:,} elements", f"{self.where}.{name}"
                raise FormatError(message, path=self.path, position=where, hint="record again")
        return elements

    def _texts_by_number(self, raw: msgspec.Raw, store: Callable[[str], int], name: str) -> dict[int, int]:
        """Call ``store`` for each text of a list. Return its results by the number of the text in
        the file.
        """
        blocks = self._blocks(raw, _ENTRIES, name)
        return {entry.key: store(entry.value) for block in blocks for entry in block}

    def add(self) -> None:
        """Read the device work and the host calls of the process."""
        process, strings = self.process, self.builder.strings
        agents = RocmAgents(0)
        for agent in self._short_list(process.agents, _AGENTS, "agents"):
            order = agent.logical_node_type_id if agent.logical_node_type_id >= 0 else agent.node_id
            name = agent.product_name or agent.name
            agents.by_number[_fit(agent.id.handle)] = RocmAgent(
                agent.type == _GPU, max(order, 0) & 0xFFFFF, name
            )
        symbols = self._blocks(process.kernel_symbols, _SYMBOLS, "kernel_symbols")
        names = _KernelNameRows.of(symbols, strings)
        external = process.strings.correlation_id.external
        ranges = self._texts_by_number(external, strings.add, "strings.correlation_id.external")
        kernels = self._kernels(names, ranges)
        copies = _BlockColumns()
        buffers = process.buffer_records
        for copy_block in self._blocks(buffers.memory_copy, _COPIES, "buffer_records.memory_copy"):
            copies.add(
                start_ns=[copy.start_timestamp for copy in copy_block],
                end_ns=[copy.end_timestamp for copy in copy_block],
                target=[_fit(copy.dst_agent_id.handle) for copy in copy_block],
                source=[_fit(copy.src_agent_id.handle) for copy in copy_block],
                stream=[_fit(copy.stream_id.handle) for copy in copy_block],
                stack=[_fit(copy.correlation_id.internal) for copy in copy_block],
                bytes_moved=[_fit(copy.bytes) for copy in copy_block],
                name_id=[strings.add(self._operation_name(copy.kind, copy.operation)) for copy in copy_block],
            )
        calls = _BlockColumns()
        markers = self._texts_by_number(process.strings.marker_api, self._text_index, "strings.marker_api")
        for name in ("hip_api", "hsa_api", "marker_api", "rccl_api"):
            for call_block in self._blocks(getattr(buffers, name), _APIS, f"buffer_records.{name}"):
                # An instant is a mark, and encloses nothing.
                spans = [call for call in call_block if call.end_timestamp > call.start_timestamp]
                labels = [markers.get(call.correlation_id.internal, -1) for call in spans]
                calls.add(
                    start_ns=[call.start_timestamp for call in spans],
                    end_ns=[call.end_timestamp for call in spans],
                    thread=[_fit(call.thread_id) for call in spans],
                    stack=[_fit(call.correlation_id.internal) for call in spans],
                    label=[
                        label
                        if label >= 0
                        else self._text_index(self._operation_name(call.kind, call.operation))
                        for label, call in zip(labels, spans, strict=True)
                    ],
                    category=[self._text_index(self._kind_name(call.kind)) for call in spans],
                )
        self.builder.add(
            process.metadata.pid & 0xFFFFFF,
            agents,
            kernels,
            copies.table(RocmWork),
            calls.table(RocmCalls),
            texts=list(self.text_index),
        )

    def _kernels(self, names: _KernelNameRows, ranges: dict[int, int]) -> RocmWork:
        """Return the kernels of the process.

        They come from the dispatch records or, if there are none, from the counter records. ``ranges`` maps
        the number of a range to its row in the string table. The profiler states these ranges as causes of
        kernels (``--kernel-rename``).
        """
        columns = _BlockColumns()

        def add(dispatches: list[_DispatchRecord]) -> None:
            infos = [dispatch.dispatch_info for dispatch in dispatches]
            agents = [_fit(info.agent_id.handle) for info in infos]
            externals = [dispatch.correlation_id.external for dispatch in dispatches]
            columns.add(
                start_ns=[dispatch.start_timestamp for dispatch in dispatches],
                end_ns=[dispatch.end_timestamp for dispatch in dispatches],
                target=agents,
                source=agents,
                stream=[_fit(dispatch.stream_id.handle) for dispatch in dispatches],
                queue=[_fit(info.queue_id.handle) for info in infos],
                stack=[_fit(dispatch.correlation_id.internal) for dispatch in dispatches],
                name_id=[names.row(info.kernel_id) for info in infos],
                range_id=[ranges.get(text, 0) if isinstance(text, int) else 0 for text in externals],
                grid_id=[
                    self.builder.strings.add(
                        shape_text(
                            (info.grid_size.x, info.grid_size.y, info.grid_size.z),
                            (info.workgroup_size.x, info.workgroup_size.y, info.workgroup_size.z),
                            in_threads=True,
                        )
                    )
                    for info in infos
                ],
            )

        records = self.process.buffer_records.kernel_dispatch
        for block in self._blocks(records, _DISPATCHES, "buffer_records.kernel_dispatch"):
            add(block)
        if not any(map(len, columns.parts.get("start_ns", ()))):
            counters = self.process.callback_records.counter_collection
            for counted in self._blocks(counters, _COUNTED, "callback_records.counter_collection"):
                add([record.dispatch_data for record in counted])
        return columns.table(RocmWork)

    def _text_index(self, text: str) -> int:
        return self.text_index.setdefault(text, len(self.text_index))

    def _kind_name(self, kind: int) -> str:
        return self.kinds[kind].kind if 0 <= kind < len(self.kinds) else ""

    def _operation_name(self, kind: int, operation: int) -> str:
        operations = self.kinds[kind].operations if 0 <= kind < len(self.kinds) else []
        return operations[operation] if 0 <= operation < len(operations) else self._kind_name(kind)


@dataclass(slots=True)
class _KernelNameRows:
    """Names of kernels, found by kernel id. Only names of kernels that ran are added to ``strings``, because
    a document may list many other kernels.
    """

    ids: IntArray
    indices: IntArray
    texts: list[str]
    strings: StringTableBuilder
    rows: dict[int, int] = field(default_factory=dict[int, int])

    @classmethod
    def of(cls, blocks: Iterator[list[_KernelSymbol]], strings: StringTableBuilder) -> _KernelNameRows:
        index_of: dict[str, int] = {"": 0}
        columns = _BlockColumns()
        for block in blocks:
            names = [
                symbol.formatted_kernel_name or symbol.demangled_kernel_name or symbol.kernel_name
                for symbol in block
            ]
            columns.add(
                id=[_fit(symbol.kernel_id) for symbol in block],
                index=[index_of.setdefault(name, len(index_of)) for name in names],
            )
        empty = np.empty(0, np.int64)
        ids, indices = (np.concatenate([empty, *columns.parts.get(name, ())]) for name in ("id", "index"))
        order = np.argsort(ids, kind="stable")
        return cls(ids[order], indices[order], list(index_of), strings)

    def row(self, kernel: int) -> int:
        row = self.rows.get(kernel)
        if row is None:
            symbol = int(np.searchsorted(self.ids, _fit(kernel)))
            exists = symbol < len(self.ids) and int(self.ids[symbol]) == kernel
            row = self.strings.add(self.texts[int(self.indices[symbol])] if exists else "")
            self.rows[kernel] = row
        return row


def _fit(number: int) -> int:
    """Return the number if it fits 63 bits, else -1."""
    return number if 0 <= number < 1 << 63 else -1


_BLOCK_BYTES = 1 << 20
_ELEMENT_POSITION = re.compile(r" - at `\$\[(\d+)\](.*)`$", re.DOTALL)
_COMMA = ord(",")


def array_elements(
    raw: msgspec.Raw, decoder: msgspec.json.Decoder[list[_T]], path: str, where: str
) -> Iterator[list[_T]]:
    """Return the elements of the array at the JSON path ``where``, in blocks.

    Raises ``FormatError`` if the text is not an array of such elements.
    """
    text = memoryview(raw).cast("B") if raw else memoryview(b"[]")
    data = np.frombuffer(text, np.uint8)
    opening = _first_of(data)
    if opening < 0 or data[opening] != ord("["):
        raise FormatError(
            "a list is missing", path=path, position=where, hint="record again with --output-format json"
        )
    count = 0

    def decoded(part: memoryview[int]) -> list[_T]:
        try:
            return _decode(decoder, b"".join((b"[", part, b"]")))
        except (msgspec.DecodeError, RecursionError) as error:
            message = str(error)
            position = f"{where}[{count}] or later"
            if match := _ELEMENT_POSITION.search(message):
                position = f"{where}[{count + int(match.group(1))}]{match.group(2)}"
            raise FormatError(
                f"malformed record: {_ELEMENT_POSITION.sub('', message)}",
                path=path,
                position=position,
                hint="record again; the profiler may have been interrupted",
            ) from error

    begin, scan = opening + 1, BracketScan()
    end = len(data) - 1 - _first_of(data[::-1])
    for start in range(begin, end, _BLOCK_BYTES):
        piece = data[start : min(start + _BLOCK_BYTES, end)]
        brackets = scan.scan(piece)
        commas = np.flatnonzero((piece == _COMMA) & ~brackets.inside & (brackets.depth == 0))
        if len(commas):
            cut = start + int(commas[-1])
            elements = decoded(text[begin:cut])
            yield elements
            count += len(elements)
            begin = cut + 1
    yield decoded(text[begin:end])


def _first_of(data: NDArray[np.uint8]) -> int:
    """Return the index of the first character that is not white space."""
    for start in range(0, len(data), _BLOCK_BYTES):
        characters = np.flatnonzero(~np.isin(data[start : start + _BLOCK_BYTES], (0x20, 0x09, 0x0A, 0x0D)))
        if len(characters):
            return start + int(characters[0])
    return -1
