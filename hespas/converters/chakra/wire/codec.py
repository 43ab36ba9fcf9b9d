"""Whole Chakra trace files to columns and back: https://github.com/mlcommons/chakra, schema 0.0.4 (= 1.0.0).

Files of older schemas are read as what they are in that one.

Faults carry the ``ET`` codes of ``hespas-validate check``: ``ET001`` framing and wire format, ``ET002`` empty
file, no metadata, no node, ``ET003`` schema, ``ET004`` version label and empty node frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.contract import Faults
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
    frames,
    open_trace,
)
from hespas.converters.chakra.wire.encode import encode_chunks
from hespas.files.streams import open_output
from hespas.graph.diagnostics import Diagnostics, Severity
from hespas.graph.errors import FormatError, UnsupportedError
from hespas.schemas.chakra import CURRENT, EARLY, LATEST_VERSIONS
from hespas.schemas.chakra.tables import NAMED, VERSIONS

__all__ = ["iter_columns", "read_columns", "write_columns"]

_WITHOUT_CONVERTER = "0.0.1"
"""The schema from before there was a converter that wrote microseconds."""
_INTERRUPTED = "was the writing program interrupted?"


def iter_columns(
    path: Path,
    diagnostics: Diagnostics,
    *,
    max_bytes: int | None = None,
    lenient: bool = False,
    version: str = "",
    recover: bool = False,
) -> Iterator[tuple[EtColumns, float]]:
    """The file's nodes chunk by chunk in constant memory, each with a guess of how many chunks there are.

    Every chunk carries the metadata and all attribute names met so far; there is at least one, which may
    be empty. Nodes of older schemas come as those of today's; ``version`` names the schema where the file
    cannot tell. Raises :class:`FormatError` naming file and byte, and :class:`UnsupportedError` where the
    schema is not known; with ``lenient`` faults become diagnostics and whole frames are kept, with
    ``recover`` those before a cut.
    """
    faults = Faults(str(path), None, diagnostics, lenient, recover)
    source = open_trace(path, max_bytes)
    opened: _Opened | None = None
    count, expected = 0, 1.0
    try:
        for whole in frames(source):
            batch = whole
            if opened is None:
                opened = _open_nodes(whole, _Reading(path, max_bytes, version), faults)
                batch = opened.nodes
            empty = int((batch.start == batch.end).sum())
            _warn(diagnostics, "ET004", faults.path, "a node frame is empty (all fields default)", empty)
            if source.size and len(batch):
                expected = source.size / max(1, int(batch.end[-1] - batch.start[0]))
            chunk = opened.decoder.nodes(batch)
            count += len(chunk)
            yield _complete(chunk, opened), expected
    except FormatError as error:
        if opened is None and not lenient:
            raise
        _keep_before(error, count, faults)
        if opened is not None and _is_recovered(error, faults):
            nothing = EtColumns.empty(AttributeColumns.empty(0))
            yield _complete(replace(nothing, is_cut=True), opened), expected
        if opened is None:
            return  # there is nothing else to report
    _conclude(opened, count, faults)


def _complete(chunk: EtColumns, opened: _Opened) -> EtColumns:
    metadata = opened.metadata
    keys = tuple(opened.decoder.keys.names)
    return replace(
        chunk,
        version=metadata.version,
        schema=opened.schema,
        metadata=metadata.attrs,
        attrs=chunk.attrs.with_keys(keys),
    )


def _conclude(opened: _Opened | None, count: int, faults: Faults) -> None:
    """Report what holds for the file as a whole."""
    diagnostics, path = faults.diagnostics, faults.path
    if opened is None:
        faults.error("ET002", "the file is empty", position="byte 0", hint=_INTERRUPTED)
    elif not count:
        faults.error("ET002", "the file has no node", position="end of file", hint=_INTERRUPTED)
    if opened is None:
        return
    message = "unknown fields were left out"
    _warn(diagnostics, "chakra.unknown-field", path, message, opened.decoder.unknown_fields)
    label = opened.metadata.version or "empty"
    if label not in LATEST_VERSIONS:
        _warn(diagnostics, "ET004", path, f"the version label is {label}, not 0.0.4 or 1.0.0", 1)
    if opened.schema:
        _say_migrated(opened, faults)


def _say_migrated(opened: _Opened, faults: Faults) -> None:
    """A checker's reader finds an error here: only today's schema is what simulators read."""
    read_as = f"the trace has schema {opened.schema} and was read as one of 0.0.4"
    if faults.lenient:
        message = f"{read_as}; simulators would misread it: convert it"
        faults.diagnostics.add("ET003", Severity.ERROR, faults.path, message, path=faults.path)
    else:
        _warn(faults.diagnostics, "chakra.migrated", faults.path, read_as, 1)
    if isinstance(opened.decoder, HistoricDecoder):
        likely = (
            "simulators of its time took them as cycles of 1 ns, which is the likely unit: `run_time_unit=ns`"
            if opened.schema == _WITHOUT_CONVERTER
            else "and converters other than Chakra's for PyTorch wrote cycles: `run_time_unit=ns`"
        )
        message = (
            f"run times count as microseconds unless told; schema {opened.schema} names no unit; {likely}"
        )
        _warn(faults.diagnostics, "chakra.run-time-unit", faults.path, message, opened.decoder.run_times)


def _warn(diagnostics: Diagnostics, code: str, path: str, message: str, count: int) -> None:
    diagnostics.warning(code, path, message, path=path, count=count)


def read_columns(
    path: Path,
    diagnostics: Diagnostics,
    *,
    max_bytes: int | None = None,
    lenient: bool = False,
    version: str = "",
    recover: bool = False,
) -> EtColumns:
    """A whole trace file; takes and raises what :func:`iter_columns` does."""
    joiner = _Joiner()
    last = EtColumns.empty(AttributeColumns.empty(0))
    for chunk, expected in iter_columns(
        path, diagnostics, max_bytes=max_bytes, lenient=lenient, version=version, recover=recover
    ):
        joiner.add(chunk, expected)
        last = chunk
    return joiner.take(last)


def write_columns(columns: EtColumns, path: Path) -> None:
    """Write a trace file, gzipped where the name ends in ``.gz``. Raises :class:`OutputError`."""
    with open_output(path, packed=path.suffix == ".gz") as stream:
        for piece in encode_chunks(columns):
            stream.write(np.frombuffer(piece, np.uint8).data)


def _keep_before(error: FormatError, nodes: int, faults: Faults) -> None:
    """Raise a fault of the wire format, unless the reader is lenient or recovers: it keeps what is before."""
    recovers = _is_recovered(error, faults)
    if not (faults.lenient or recovers):
        if isinstance(error, CutOffError) and nodes:
            error.hint = f"{error.hint}; `recover` keeps the {nodes:,} nodes before the cut"
        raise error
    message = f"{error.text}; the {nodes} nodes before it were kept" if nodes else error.text
    severity = Severity.WARNING if recovers else Severity.ERROR
    code, place = error.code or "ET001", error.position or ""
    faults.diagnostics.add(code, severity, place, message, path=faults.path)


def _is_recovered(error: FormatError, faults: Faults) -> bool:
    """Whether the user asked to go on behind this error."""
    return faults.recover and isinstance(error, CutOffError)


# The start of a trace: which schema it has, its metadata, and the decoder for its nodes.

_PROBED_NODES = 64
_NO_TRACE = "is this a Chakra trace? Its first frame would be a GlobalMetadata message"


class _Reading(NamedTuple):
    """How to read a file: up to which size, and as which version (empty: as it tells itself)."""

    path: Path
    max_bytes: int | None
    version: str


class _Opened(NamedTuple):
    """A trace of which the first batch has been looked at. ``schema`` names an older schema, else empty."""

    decoder: Decoder | HistoricDecoder
    metadata: Metadata
    nodes: FrameBatch
    schema: str


def _open_nodes(batch: FrameBatch, reading: _Reading, faults: Faults) -> _Opened:
    """Tell the schema, decode the metadata, and return the nodes of the first batch.

    Where the first frame does not tell, the file is read as far as it takes. Raises :class:`FormatError` and
    :class:`UnsupportedError` (``ET003``) where the schema is none that is known, or cannot be recognised.
    """
    signature = Signature.of(batch.message(0))
    if signature is None or first_frame(signature) is FirstFrame.UNKNOWN:
        _not_a_trace(faults.path)
    has_metadata = first_frame(signature) is FirstFrame.METADATA
    nodes = batch.without_first() if has_metadata else batch
    possible = possible_versions(signature)
    if possible and possible <= NAMED[CURRENT]:
        chosen = _settled(possible, nodes, reading.version, faults.path)
    else:
        chosen = _told_by_nodes(batch, possible, reading, faults, has_metadata=has_metadata)
    if chosen.reading not in NAMED[CURRENT]:
        return _open_old(batch, nodes, chosen, faults, has_metadata=has_metadata)
    return _open_current(batch, nodes, signature, chosen, faults, named=bool(reading.version))


def _settled(possible: frozenset[str], nodes: FrameBatch, named: str, path: str) -> Resolution:
    """The schema where the metadata can be of today's only; nodes of another are refused."""
    for index in range(min(len(nodes), _PROBED_NODES)):
        signature = Signature.of(nodes.message(index))
        if signature is not None and looks_old(signature):
            raise UnsupportedError(
                "the metadata of this file are of schema 0.0.4, its nodes of 0.0.3 or older",
                code="ET003",
                path=path,
                position=f"byte {int(nodes.frame_byte[index])}",
                hint="write the trace again with one version of Chakra",
            )
    return resolve(Evidence(), possible, has_metadata=True, named=named, path=path)


def _told_by_nodes(
    batch: FrameBatch, possible: frozenset[str], reading: _Reading, faults: Faults, *, has_metadata: bool
) -> Resolution:
    """The schema that the nodes have: of the first batch or, while that is not enough, of more of them."""
    evidence = Evidence()
    if has_metadata:
        evidence.add_metadata(batch.message(0))
    start = deepcopy(evidence)
    nodes = batch.without_first() if has_metadata else batch
    evidence.add_nodes(nodes.window, nodes.start, nodes.end)
    found = survivors(evidence, possible, has_metadata=has_metadata)
    if not is_final(found):
        _read_on(evidence, possible, reading, has_metadata=has_metadata)
    try:
        return resolve(evidence, possible, has_metadata=has_metadata, named=reading.version, path=faults.path)
    except UnsupportedError as error:
        if not found:
            error.position = f"byte {_stranger(nodes, start, possible, has_metadata=has_metadata)}"
        raise


def _stranger(nodes: FrameBatch, start: Evidence, possible: frozenset[str], *, has_metadata: bool) -> int:
    """Where the first node is with which no version is left, in the first batch; found by halving."""
    low, high = 0, len(nodes)
    while low < high:
        middle = (low + high) // 2
        evidence = deepcopy(start)
        evidence.add_nodes(nodes.window, nodes.start[: middle + 1], nodes.end[: middle + 1])
        if survivors(evidence, possible, has_metadata=has_metadata):
            low = middle + 1
        else:
            high = middle
    return int(nodes.frame_byte[low]) if low < len(nodes) else nodes.base


def _read_on(evidence: Evidence, possible: frozenset[str], reading: _Reading, *, has_metadata: bool) -> None:
    """Collect evidence from the batches behind the first, until it is enough; damage ends it too."""
    try:
        for number, batch in enumerate(frames(open_trace(reading.path, reading.max_bytes))):
            if not number:
                continue
            evidence.add_nodes(batch.window, batch.start, batch.end)
            if is_final(survivors(evidence, possible, has_metadata=has_metadata)):
                return
    except FormatError:
        return  # it is reported when the nodes are read


def _open_old(
    batch: FrameBatch, nodes: FrameBatch, chosen: Resolution, faults: Faults, *, has_metadata: bool
) -> _Opened:
    decoder = HistoricDecoder(
        VERSIONS[chosen.reading], chosen.label, faults.path, faults.diagnostics if faults.lenient else None
    )
    metadata = Metadata(CURRENT, AttributeColumns.empty(1))
    if has_metadata:
        metadata = decoder.metadata(batch.message(0), batch.base + int(batch.start[0]))
    return _Opened(decoder, metadata, nodes, chosen.label)


def _open_current(
    batch: FrameBatch,
    nodes: FrameBatch,
    signature: Signature,
    chosen: Resolution,
    faults: Faults,
    *,
    named: bool,
) -> _Opened:
    decoder = Decoder(faults.path, on_error=faults.diagnostics if faults.lenient else None)
    if len(nodes) == len(batch):
        message = "the first frame is a Node, not a GlobalMetadata: the schema (ET003) can only be guessed"
        if named:
            faults.diagnostics.warning("ET002", faults.path, message, path=faults.path)
        else:
            hint = f"{_NO_TRACE}; name the schema with `source_version=0.0.4`"
            faults.error("ET002", message, position="byte 0", hint=hint)
        return _Opened(decoder, Metadata("", AttributeColumns.empty(1)), nodes, "")
    message_bytes = batch.message(0)
    is_early = chosen.reading == EARLY
    if is_early:
        message_bytes = as_current_metadata(signature)
    metadata = decoder.metadata(message_bytes, batch.base + int(batch.start[0]))
    if is_early:  # it had no label yet; the trace that is read is one of today's schema
        return _Opened(decoder, replace(metadata, version=CURRENT), nodes, EARLY)
    return _Opened(decoder, metadata, nodes, "")


def _not_a_trace(path: str) -> NoReturn:
    raise FormatError(
        "the first frame is no Chakra message", code="ET003", path=path, position="byte 0", hint=_NO_TRACE
    )


# Joining the chunks of a file: one column at a time, so that only one column is ever held twice.

_NODE_OFFSETS = ("ctrl_offsets", "data_offsets")
_NODE_COLUMNS = (
    *("id", "type", "start_micros", "duration_micros", "frame_byte"),
    *("ctrl_deps", "data_deps"),
)
_IO_TEXTS = ("values", "shapes", "types")


class _Column:
    """A flat column that grows; room that is not used takes no memory."""

    __slots__ = ("_room", "size")

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._room: NDArray[Any] = np.empty(0, dtype)
        self.size = 0

    @property
    def last(self) -> int:
        """The last entry, 0 where there is none."""
        return int(self._room[self.size - 1]) if self.size else 0

    def add(self, piece: NDArray[Any], expected: float) -> None:
        """Append; ``expected`` is how many times this much the whole column is thought to hold."""
        end = self.size + len(piece)
        if end > len(self._room):
            wanted = int(len(piece) * expected * 1.05) if self.size <= 1 else end + end // 2
            larger = np.empty(max(end, wanted), self._room.dtype)
            larger[: self.size] = self._room[: self.size]
            self._room = larger
        self._room[self.size : end] = piece
        self.size = end

    def take(self) -> NDArray[Any]:
        """The whole column."""
        return self._room[: self.size]


class _Joiner:
    """Takes chunks in file order, whose attribute keys come from one table, and makes one set of columns."""

    def __init__(self) -> None:
        """Start with no nodes."""
        self._columns: dict[str, _Column] = {}

    def add(self, chunk: EtColumns, expected: float = 1.0) -> None:
        """Append the nodes of a chunk; ``expected`` guesses how many such chunks there are, to plan room."""
        attrs, bits = chunk.attrs, chunk.attrs.bits
        nodes, rows, payloads = (self._size(name) for name in ("id", "key", "payload.offsets"))
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

    def _size(self, name: str) -> int:
        return self._columns[name].size if name in self._columns else 0

    def _column(self, name: str, like: NDArray[Any]) -> _Column:
        return self._columns.setdefault(name, _Column(like.dtype))

    def _take(self, name: str) -> NDArray[Any]:
        return self._columns.pop(name).take()

    def _texts(self, name: str) -> ByteRows:
        return ByteRows(self._take(f"{name}.data"), self._take(f"{name}.offsets"))

    def take(self, last: EtColumns) -> EtColumns:
        """The whole, with what the last chunk says of the file; the joiner is empty afterwards."""
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
