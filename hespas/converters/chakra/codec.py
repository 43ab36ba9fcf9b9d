"""Whole Chakra trace files to columns and back: https://github.com/mlcommons/chakra, schema 0.0.4 (= 1.0.0).

Faults carry the ``ET`` codes of ``hespas-validate check``: ``ET001`` framing and wire format, ``ET002`` empty
file, no metadata, no node, ``ET003`` schema, ``ET004`` version label and empty node frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from hespas.converters.chakra.columns import AttributeColumns, EtColumns
from hespas.converters.chakra.decode import Decoder, Metadata
from hespas.converters.chakra.encode import encode_chunks
from hespas.converters.chakra.frames import FrameBatch, frames, open_trace
from hespas.converters.chakra.gzipped import open_output
from hespas.converters.chakra.join import Joiner
from hespas.converters.chakra.versions import (
    FirstFrame,
    Schema,
    Signature,
    as_current_metadata,
    first_frame,
    is_attribute_first,
    node_schema,
)
from hespas.graph.diagnostics import Diagnostics, Severity
from hespas.graph.errors import FormatError, UnsupportedError

__all__ = ["CURRENT_VERSIONS", "iter_columns", "read_columns", "write_columns"]

CURRENT_VERSIONS = ("0.0.4", "1.0.0")
"""Version labels of the schema this codec knows; both name the same bytes."""

_PROBED_NODES = 64
_NO_TRACE = "is this a Chakra trace? Its first frame would be a GlobalMetadata message"


class _Faults:
    """Raises faults, or records them and goes on where the reader is lenient."""

    def __init__(self, path: Path, diagnostics: Diagnostics, lenient: bool) -> None:
        self.path = str(path)
        self.diagnostics = diagnostics
        self.lenient = lenient

    def report(self, code: str, message: str, position: str, hint: str) -> None:
        """An error of the file as a whole."""
        if not self.lenient:
            raise FormatError(f"{code}: {message}", path=self.path, position=position, hint=hint)
        self.diagnostics.add(code, Severity.ERROR, position, message, path=self.path)

    def framing(self, error: FormatError, nodes: int) -> None:
        """A fault of the wire format; a lenient reader keeps the whole frames before it."""
        if not self.lenient:
            raise error
        message = f"{error.message.removeprefix('ET001: ')}; the {nodes} nodes before it were kept"
        self.diagnostics.add("ET001", Severity.ERROR, error.position or "", message, path=self.path)


def iter_columns(
    path: Path, diagnostics: Diagnostics, *, max_bytes: int | None = None, lenient: bool = False
) -> Iterator[tuple[EtColumns, float]]:
    """The file's nodes chunk by chunk in constant memory, each with a guess of how many chunks there are.

    Every chunk carries the metadata and all attribute names met so far; there is at least one, which may
    be empty. Raises :class:`FormatError` naming file and byte, and :class:`UnsupportedError` for an older
    schema; with ``lenient`` faults become diagnostics and whole frames are kept.
    """
    faults = _Faults(path, diagnostics, lenient)
    decoder = Decoder(str(path), on_error=diagnostics if lenient else None)
    source = open_trace(path, max_bytes)
    metadata: Metadata | None = None
    count, expected = 0, 1.0
    try:
        for whole in frames(source):
            batch = whole
            if metadata is None:
                metadata, batch = _start(decoder, whole, faults)
            empty = int((batch.start == batch.end).sum())
            _warn(diagnostics, "ET004", faults.path, "a node frame is empty (all fields default)", empty)
            if source.size and len(batch):
                expected = source.size / max(1, int(batch.end[-1] - batch.start[0]))
            chunk = decoder.nodes(batch)
            count += len(chunk)
            yield _complete(chunk, metadata, decoder), expected
    except FormatError as error:
        faults.framing(error, count)
    if metadata is None:
        faults.report("ET002", "the file is empty", "byte 0", "was the writing program interrupted?")
    if not count:
        faults.report("ET002", "the file has no node", "end of file", "was the writing program interrupted?")
    message = "unknown fields were left out"
    _warn(diagnostics, "chakra.unknown-field", faults.path, message, decoder.unknown_fields)
    if metadata is not None and metadata.version not in CURRENT_VERSIONS:
        label = metadata.version or "empty"
        _warn(diagnostics, "ET004", faults.path, f"the version label is {label}, not 0.0.4 or 1.0.0", 1)


def _warn(diagnostics: Diagnostics, code: str, path: str, message: str, count: int) -> None:
    diagnostics.warning(code, path, message, path=path, count=count)


def _complete(chunk: EtColumns, metadata: Metadata, decoder: Decoder) -> EtColumns:
    keys = tuple(decoder.keys.names)
    return replace(
        chunk, version=metadata.version, metadata=metadata.attrs, attrs=chunk.attrs.with_keys(keys)
    )


def _start(decoder: Decoder, batch: FrameBatch, faults: _Faults) -> tuple[Metadata, FrameBatch]:
    """Check the schema and decode the metadata; returns the nodes of the first batch too."""
    message = batch.message(0)
    signature = Signature.of(message)
    if signature is None:
        _not_a_trace(faults.path)
    kind = first_frame(signature)
    is_node = kind is FirstFrame.NODE
    nodes = batch if is_node else batch.without_first()
    attribute_first = kind is FirstFrame.METADATA and is_attribute_first(signature)
    _check_nodes(nodes, doubtful=is_node or attribute_first, path=faults.path)
    if kind is FirstFrame.UNKNOWN:
        _not_a_trace(faults.path)
    if is_node:
        faults.report("ET002", "the first frame is a Node, not a GlobalMetadata", "byte 0", _NO_TRACE)
        return Metadata("", AttributeColumns.empty(1)), nodes
    if attribute_first:
        message = as_current_metadata(signature)
    return decoder.metadata(message, batch.base + int(batch.start[0])), nodes


def _check_nodes(nodes: FrameBatch, *, doubtful: bool, path: str) -> None:
    """Refuse older schemas; ``doubtful`` says that the first frame is not the metadata of today."""
    schemas: set[Schema] = set()
    for index in range(min(len(nodes), _PROBED_NODES)):
        signature = Signature.of(nodes.message(index))
        if signature is not None:
            schemas.add(node_schema(signature))
    for old in (Schema.OLD_003, Schema.OLD_001):
        if old in schemas:
            raise UnsupportedError(
                f"ET003: this is a Chakra trace of schema {old.value}; 0.0.4 and 1.0.0 are read",
                path=path,
                hint="write the trace again with a current Chakra, or convert it there",
            )
    if doubtful and Schema.CURRENT not in schemas:
        raise UnsupportedError(
            "ET003: nothing in this file tells which Chakra schema it has",
            path=path,
            hint="write the trace again with a current Chakra, which adds metadata and attributes",
        )


def _not_a_trace(path: str) -> NoReturn:
    raise FormatError(
        "ET003: the first frame is no Chakra message", path=path, position="byte 0", hint=_NO_TRACE
    )


def read_columns(
    path: Path, diagnostics: Diagnostics, *, max_bytes: int | None = None, lenient: bool = False
) -> EtColumns:
    """A whole trace file; raises as :func:`iter_columns` does. ``max_bytes`` bounds gunzipped data."""
    joiner = Joiner()
    version, metadata = "", AttributeColumns.empty(1)
    keys: tuple[str, ...] = ()
    for chunk, expected in iter_columns(path, diagnostics, max_bytes=max_bytes, lenient=lenient):
        joiner.add(chunk, expected)
        version, metadata, keys = chunk.version, chunk.metadata, chunk.attrs.keys
    return joiner.take(version, metadata, keys)


def write_columns(columns: EtColumns, path: Path) -> None:
    """Write a trace file, gzipped where the name ends in ``.gz``. Raises :class:`OutputError`."""
    with open_output(path, packed=path.suffix == ".gz") as stream:
        for piece in encode_chunks(columns):
            stream.write(np.frombuffer(piece, np.uint8).data)
