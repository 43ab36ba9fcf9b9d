"""Reading of whole Chakra trace files as columns: https://github.com/mlcommons/chakra, schema
0.0.4 (= 1.0.0).

Files of older schemas are converted to this schema while reading. Chunks of a file are joined one column at a
time, so that at most one column is in memory twice.

Faults carry the ``ET`` codes of ``hespas-validate check``: ``ET001`` framing and wire format, ``ET002`` empty
file, no metadata, no node, ``ET003`` schema, ``ET004`` version label and empty node frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.checks import Faults
from hespas.converters.chakra.forms import BINARY, TraceForm
from hespas.converters.chakra.history import (
    Evidence,
    FirstFrame,
    Resolution,
    Signature,
    as_current_metadata,
    first_frame,
    is_final,
    looks_old,
    possible_versions,
    resolve,
    survivors,
)
from hespas.converters.chakra.history.nodes import HistoricDecoder
from hespas.converters.chakra.wire import AttributeColumns, ByteRows, EtColumns, IoColumns
from hespas.converters.chakra.wire.decode import (
    CutOffError,
    Decoder,
    FrameBatch,
    Metadata,
)
from hespas.converters.format import ReadOptions
from hespas.graph.diagnostics import Diagnostics, Severity
from hespas.graph.errors import FormatError, UnsupportedError
from hespas.schemas.chakra import CURRENT, EARLY, LATEST_VERSIONS
from hespas.schemas.chakra.tables import NAMED, VERSIONS

__all__ = ["iter_columns", "read_columns"]

_DEFAULTS = ReadOptions()
_WITHOUT_CONVERTER = "0.0.1"
"""Schema that predates the first converter that wrote microseconds."""
_MAX_EMPTY_FRAMES = 1 << 16
_INTERRUPTED = "write the trace again: the program may have been interrupted"


def iter_columns(
    path: Path,
    diagnostics: Diagnostics,
    options: ReadOptions = _DEFAULTS,
    form: TraceForm = BINARY,
) -> Iterator[tuple[EtColumns, float]]:
    """Yield the nodes of a file chunk by chunk in constant memory, each chunk with the estimated total number
    of chunks.

    Every chunk has the metadata and all attribute names that occurred so far. There is at least one chunk,
    which may be empty. Nodes of older schemas are converted to the current one; the option ``version`` names
    the schema if the file does not determine it. Raises :class:`FormatError` with file and byte, and
    :class:`UnsupportedError` for an unknown schema. With ``lenient`` faults become diagnostics, and all
    complete messages are read. With ``recover`` the messages before a truncation are read.
    """
    faults = Faults(str(path), None, diagnostics, options.lenient, options.recover)
    reading = _ReadRequest(form, path, options.max_bytes, options.version or form.version)
    opened: _OpenedTrace | None = None
    count, all_empty, expected = 0, 0, 1.0
    try:
        for whole in form.batches(path, options.max_bytes, faults):
            batch = whole
            if opened is None:
                opened = _open_nodes(whole, reading, faults)
                batch = opened.nodes
            empty = int((batch.start == batch.end).sum())
            all_empty += empty
            if all_empty > _MAX_EMPTY_FRAMES:
                raise FormatError(
                    f"more than {_MAX_EMPTY_FRAMES} empty frames: this is zero padding, not a trace",
                    code="ET001",
                    path=faults.path,
                    position=batch.place(0),
                    hint="write or download the file again: it is damaged or is not a Chakra trace",
                )
            _warn(diagnostics, "ET004", faults.path, "a node frame is empty (all fields default)", empty)
            if batch.file_bytes and len(batch):
                expected = batch.file_bytes / max(1, int(batch.end[-1] - batch.start[0]))
            chunk = opened.decoder.nodes(batch)
            count += len(chunk)
            yield _complete(chunk, opened), expected
    except FormatError as error:
        if opened is None and not options.lenient:
            raise
        recovers = faults.recover and isinstance(error, CutOffError)
        if not (faults.lenient or recovers):
            if isinstance(error, CutOffError) and count:
                error.hint = f"{error.hint}; `recover` keeps what is before the cut (nodes: {count:,})"
            raise error
        message = f"{error.text}; the {count} nodes before it are kept" if count else error.text
        severity = Severity.WARNING if recovers else Severity.ERROR
        code, position = error.code or "ET001", error.position or ""
        faults.diagnostics.add(code, severity, position, message, path=faults.path)
        if opened is not None and recovers:
            nothing = EtColumns.empty(AttributeColumns.empty(0))
            yield _complete(replace(nothing, is_cut=True), opened), expected
        if opened is None:
            return  # there is nothing else to report
    _conclude(opened, count, faults)


def _complete(chunk: EtColumns, opened: _OpenedTrace) -> EtColumns:
    metadata = opened.metadata
    keys = tuple(opened.decoder.keys.names)
    return replace(
        chunk,
        version=metadata.version,
        schema=opened.schema,
        metadata=metadata.attrs,
        attrs=replace(chunk.attrs, keys=keys),
    )


def _conclude(opened: _OpenedTrace | None, count: int, faults: Faults) -> None:
    """Report findings about the file as a whole: no nodes, unknown fields, version label, schema."""
    diagnostics, path = faults.diagnostics, faults.path
    if opened is None:
        faults.error("ET002", "the file is empty", position="byte 0", hint=_INTERRUPTED)
    elif not count:
        faults.error("ET002", "the file has no node", position="end of file", hint=_INTERRUPTED)
    if opened is None:
        return
    message = "unknown fields were ignored"
    _warn(diagnostics, "chakra.unknown-field", path, message, opened.decoder.unknown_fields)
    label = opened.metadata.version or "empty"
    if label not in LATEST_VERSIONS:
        _warn(diagnostics, "ET004", path, f"the version label is {label}, not 0.0.4 or 1.0.0", 1)
    if opened.schema:
        read_as = f"the trace has schema {opened.schema} and was converted to 0.0.4"
        if faults.lenient:
            message = f"{read_as}; simulators would misread it; convert it first"
            faults.diagnostics.add("ET003", Severity.ERROR, faults.path, message, path=faults.path)
        else:
            _warn(faults.diagnostics, "chakra.migrated", faults.path, read_as, 1)
        if isinstance(opened.decoder, HistoricDecoder):
            likely = (
                "simulators of that version read cycles of 1 ns, the likely unit: `run_time_unit=ns`"
                if opened.schema == _WITHOUT_CONVERTER
                else "and converters other than Chakra's for PyTorch wrote cycles: `run_time_unit=ns`"
            )
            message = (
                f"run times count as microseconds by default; schema {opened.schema} names no unit; {likely}"
            )
            _warn(faults.diagnostics, "chakra.run-time-unit", faults.path, message, opened.decoder.run_times)


def _warn(diagnostics: Diagnostics, code: str, path: str, message: str, count: int) -> None:
    diagnostics.warning(code, path, message, path=path, count=count)


def read_columns(
    path: Path,
    diagnostics: Diagnostics,
    options: ReadOptions = _DEFAULTS,
    form: TraceForm = BINARY,
) -> EtColumns:
    """Return a whole trace file. :func:`iter_columns` explains the arguments and errors."""
    joiner = _Joiner()
    last = EtColumns.empty(AttributeColumns.empty(0))
    for chunk, expected in iter_columns(path, diagnostics, options, form):
        joiner.add(chunk, expected)
        last = chunk
    return joiner.take(last)


_PROBED_NODES = 64
_NO_TRACE = "check that this is a Chakra trace, whose first frame is a GlobalMetadata message"


class _ReadRequest(NamedTuple):
    """Options of reading one file: its form, size limit, and schema version (empty: determined from the
    file).
    """

    form: TraceForm
    path: Path
    max_bytes: int | None
    version: str


class _OpenedTrace(NamedTuple):
    """Trace whose first messages have been read. ``nodes`` is the first batch of nodes. ``schema`` is the
    name of an older schema, empty for the current one.
    """

    decoder: Decoder | HistoricDecoder
    metadata: Metadata
    nodes: FrameBatch
    schema: str


def _open_nodes(batch: FrameBatch, reading: _ReadRequest, faults: Faults) -> _OpenedTrace:
    """Determine the schema, decode the metadata, and return the nodes of the first batch.

    If the first frame does not determine the schema, more of the file is read. Raises :class:`FormatError`
    and :class:`UnsupportedError` (``ET003``) for an unknown or ambiguous schema.
    """
    signature = Signature.of(batch.message(0))
    if signature is None or first_frame(signature) is FirstFrame.UNKNOWN:
        raise FormatError(
            "the first frame is not a Chakra message",
            code="ET003",
            path=faults.path,
            position=batch.place(0),
            hint=_NO_TRACE,
        )
    has_metadata = first_frame(signature) is FirstFrame.METADATA
    nodes = batch.without_first() if has_metadata else batch
    possible = possible_versions(signature)
    if possible and possible <= NAMED[CURRENT]:
        for index in range(min(len(nodes), _PROBED_NODES)):
            node_signature = Signature.of(nodes.message(index))
            if node_signature is not None and looks_old(node_signature):
                raise UnsupportedError(
                    "the metadata of this file have schema 0.0.4, its nodes 0.0.3 or older",
                    code="ET003",
                    path=faults.path,
                    position=nodes.place(index),
                    hint="write the trace again with one version of Chakra",
                )
        chosen = resolve(Evidence(), possible, has_metadata=True, named=reading.version, path=faults.path)
    else:
        chosen = _resolved_by_nodes(batch, possible, reading, faults, has_metadata=has_metadata)
    if chosen.reading not in NAMED[CURRENT]:
        decoder = HistoricDecoder(VERSIONS[chosen.reading], chosen.label, faults)
        metadata = Metadata(CURRENT, AttributeColumns.empty(1))
        if has_metadata:
            metadata = decoder.metadata(batch.message(0), batch.base + int(batch.start[0]))
        return _OpenedTrace(decoder, metadata, nodes, chosen.label)
    return _open_current(batch, nodes, signature, chosen, faults, named=bool(reading.version))


def _resolved_by_nodes(
    batch: FrameBatch, possible: frozenset[str], reading: _ReadRequest, faults: Faults, *, has_metadata: bool
) -> Resolution:
    """Determine the schema version from the nodes of the first batch and, if that is ambiguous, from more of
    the file.
    """
    evidence = Evidence()
    if has_metadata:
        evidence.add_metadata(batch.message(0))
    start = deepcopy(evidence)
    nodes = batch.without_first() if has_metadata else batch
    evidence.add_nodes(nodes.window, nodes.start, nodes.end)
    remaining = survivors(evidence, possible, has_metadata=has_metadata)
    if not is_final(remaining):
        _read_on(evidence, possible, reading, has_metadata=has_metadata)
    try:
        return resolve(evidence, possible, has_metadata=has_metadata, named=reading.version, path=faults.path)
    except UnsupportedError as error:
        if not remaining:
            # Bisect for the first node of the batch after which no version remains.
            low, high = 0, len(nodes)
            while low < high:
                middle = (low + high) // 2
                probe = deepcopy(start)
                probe.add_nodes(nodes.window, nodes.start[: middle + 1], nodes.end[: middle + 1])
                if survivors(probe, possible, has_metadata=has_metadata):
                    low = middle + 1
                else:
                    high = middle
            error.position = nodes.place(low) if low < len(nodes) else f"byte {nodes.base}"
        raise


def _read_on(
    evidence: Evidence, possible: frozenset[str], reading: _ReadRequest, *, has_metadata: bool
) -> None:
    """Add the nodes after the first batch to ``evidence``, until the schema is determined or the file is
    damaged.
    """
    try:
        unreported = Faults(str(reading.path), None, Diagnostics(keep=0), lenient=False)
        for number, batch in enumerate(reading.form.batches(reading.path, reading.max_bytes, unreported)):
            if not number:
                continue
            evidence.add_nodes(batch.window, batch.start, batch.end)
            if is_final(survivors(evidence, possible, has_metadata=has_metadata)):
                return
    except FormatError:
        return  # it is reported when the nodes are read


def _open_current(
    batch: FrameBatch,
    nodes: FrameBatch,
    signature: Signature,
    chosen: Resolution,
    faults: Faults,
    *,
    named: bool,
) -> _OpenedTrace:
    decoder = Decoder(faults)
    if len(nodes) == len(batch):
        message = "the first frame is a Node, not a GlobalMetadata: the schema (ET003) can only be guessed"
        if named:
            faults.diagnostics.warning("ET002", faults.path, message, path=faults.path)
        else:
            hint = f"{_NO_TRACE}; name the schema with `source_version=0.0.4`"
            faults.error("ET002", message, position=batch.place(0), hint=hint)
        return _OpenedTrace(decoder, Metadata("", AttributeColumns.empty(1)), nodes, "")
    message_bytes = batch.message(0)
    is_early = chosen.reading == EARLY
    if is_early:
        message_bytes = as_current_metadata(signature)
    metadata = decoder.metadata(message_bytes, batch.base + int(batch.start[0]))
    if is_early:  # it had no label yet; the decoded trace has the current schema
        return _OpenedTrace(decoder, replace(metadata, version=CURRENT), nodes, EARLY)
    return _OpenedTrace(decoder, metadata, nodes, "")


_NODE_OFFSETS = ("ctrl_offsets", "data_offsets")
_NODE_COLUMNS = (
    *("id", "type", "start_micros", "duration_micros", "position"),
    *("ctrl_deps", "data_deps"),
)
_IO_TEXTS = ("values", "shapes", "types")


class _TraceColumn:
    """Column that grows as arrays are appended. It reserves more capacity than it uses; unused capacity takes
    no physical memory.
    """

    __slots__ = ("_room", "size")

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._room: NDArray[Any] = np.empty(0, dtype)
        self.size = 0

    @property
    def last(self) -> int:
        """Return the last entry, 0 for an empty column."""
        return int(self._room[self.size - 1]) if self.size else 0

    def add(self, piece: NDArray[Any], expected: float) -> None:
        """Append an array. ``expected`` estimates the final size of the column, as a multiple of this array's
        size.
        """
        end = self.size + len(piece)
        if end > len(self._room):
            wanted = int(len(piece) * expected * 1.05) if self.size <= 1 else end + end // 2
            larger = np.empty(max(end, wanted), self._room.dtype)
            larger[: self.size] = self._room[: self.size]
            self._room = larger
        self._room[self.size : end] = piece
        self.size = end

    def take(self) -> NDArray[Any]:
        """Return the whole column."""
        return self._room[: self.size]


class _Joiner:
    """Accumulator that joins the columns of a file's chunks. All chunks must use one table of attribute
    names.
    """

    def __init__(self) -> None:
        """Start with no nodes."""
        self._columns: dict[str, _TraceColumn] = {}

    def add(self, chunk: EtColumns, expected: float = 1.0) -> None:
        """Append the nodes of a chunk. ``expected`` estimates the total number of chunks, for the initial
        capacity.
        """
        attrs, bits = chunk.attrs, chunk.attrs.bits
        nodes, rows, payloads = (
            (self._columns[name].size if name in self._columns else 0)
            for name in ("id", "key", "payload.offsets")
        )
        if len(attrs.payload):
            bits = np.where(attrs.has_payload, bits + np.uint64(max(0, payloads - 1)), bits)
        pieces: dict[str, NDArray[Any]] = {name: getattr(chunk, name) for name in _NODE_COLUMNS}
        pieces |= {"key": attrs.key, "field": attrs.field, "bits": bits, "doc_row": attrs.doc_row + rows}
        offsets = {name: getattr(chunk, name) for name in _NODE_OFFSETS} | {"attr_offsets": attrs.offsets}
        texts = {"name": chunk.name, "payload": attrs.payload, "doc": attrs.doc}
        for side, io in (("inputs", chunk.inputs), ("outputs", chunk.outputs)):
            pieces[f"{side}.node"] = io.node + nodes
            texts |= {f"{side}.{part}": getattr(io, part) for part in _IO_TEXTS}
        for name, text in texts.items():
            pieces[f"{name}.data"], offsets[f"{name}.offsets"] = text.data, text.offsets
        for name, piece in pieces.items():
            self._column(name, piece).add(piece, expected)
        for name, piece in offsets.items():
            column = self._column(name, piece)
            base = column.last
            column.add(piece[1:] + base if column.size else piece, expected)

    def _column(self, name: str, like: NDArray[Any]) -> _TraceColumn:
        return self._columns.setdefault(name, _TraceColumn(like.dtype))

    def _take(self, name: str) -> NDArray[Any]:
        return self._columns.pop(name).take()

    def _texts(self, name: str) -> ByteRows:
        return ByteRows(self._take(f"{name}.data"), self._take(f"{name}.offsets"))

    def take(self, last: EtColumns) -> EtColumns:
        """Return all nodes, with the metadata of the last chunk. The joiner is empty afterwards."""
        if not self._columns:
            return last
        attrs = replace(
            last.attrs,
            offsets=self._take("attr_offsets"),
            key=self._take("key"),
            field=self._take("field"),
            bits=self._take("bits"),
            payload=self._texts("payload"),
            doc_row=self._take("doc_row"),
            doc=self._texts("doc"),
        )
        columns: dict[str, Any] = {name: self._take(name) for name in (*_NODE_COLUMNS, *_NODE_OFFSETS)}
        for side in ("inputs", "outputs"):
            texts = [self._texts(f"{side}.{part}") for part in _IO_TEXTS]
            columns[side] = IoColumns(self._take(f"{side}.node"), *texts)
        return replace(last, **columns, name=self._texts("name"), attrs=attrs)
