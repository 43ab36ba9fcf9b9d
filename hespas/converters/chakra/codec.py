"""Whole Chakra trace files to columns and back: https://github.com/mlcommons/chakra, schema 0.0.4 (= 1.0.0).

Files of older schemas are read as what they are in that one.

Faults carry the ``ET`` codes of ``hespas-validate check``: ``ET001`` framing and wire format, ``ET002`` empty
file, no metadata, no node, ``ET003`` schema, ``ET004`` version label and empty node frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from hespas.converters.chakra.codec_faults import CodecFaults
from hespas.converters.chakra.columns import AttributeColumns, EtColumns
from hespas.converters.chakra.encode import encode_chunks
from hespas.converters.chakra.frames import frames, open_trace
from hespas.converters.chakra.historic import HistoricDecoder
from hespas.converters.chakra.join import Joiner
from hespas.converters.chakra.opening import Opened, Reading, open_nodes
from hespas.files.packed import open_output
from hespas.graph.diagnostics import Diagnostics, Severity
from hespas.graph.errors import FormatError
from hespas.schemas.chakra.history import LATEST_VERSIONS

__all__ = ["iter_columns", "read_columns", "write_columns"]

_WITHOUT_CONVERTER = "0.0.1"
"""The schema from before there was a converter that wrote microseconds."""


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
    faults = CodecFaults(str(path), diagnostics, lenient, recover)
    source = open_trace(path, max_bytes)
    opened: Opened | None = None
    count, expected = 0, 1.0
    try:
        for whole in frames(source):
            batch = whole
            if opened is None:
                opened = open_nodes(whole, Reading(path, max_bytes, version), faults)
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
        faults.framing(error, count)
        if opened is not None and faults.is_recovered(error):
            nothing = EtColumns.empty(AttributeColumns.empty(0))
            yield _complete(replace(nothing, is_cut=True), opened), expected
        if opened is None:
            return  # there is nothing else to be said of it
    _conclude(opened, count, faults)


def _complete(chunk: EtColumns, opened: Opened) -> EtColumns:
    metadata = opened.metadata
    keys = tuple(opened.decoder.keys.names)
    return replace(
        chunk,
        version=metadata.version,
        schema=opened.schema,
        metadata=metadata.attrs,
        attrs=chunk.attrs.with_keys(keys),
    )


def _conclude(opened: Opened | None, count: int, faults: CodecFaults) -> None:
    """Say what is to be said of the file as a whole."""
    diagnostics, path = faults.diagnostics, faults.path
    if opened is None:
        faults.report("ET002", "the file is empty", "byte 0", "was the writing program interrupted?")
    elif not count:
        faults.report("ET002", "the file has no node", "end of file", "was the writing program interrupted?")
    if opened is None:
        return
    message = "unknown fields were left out"
    _warn(diagnostics, "chakra.unknown-field", path, message, opened.decoder.unknown_fields)
    label = opened.metadata.version or "empty"
    if label not in LATEST_VERSIONS:
        _warn(diagnostics, "ET004", path, f"the version label is {label}, not 0.0.4 or 1.0.0", 1)
    if opened.schema:
        _say_migrated(opened, faults)


def _say_migrated(opened: Opened, faults: CodecFaults) -> None:
    """A checker's reader finds an error here: only today's schema is what simulators read."""
    read_as = f"the trace has schema {opened.schema} and was read as one of 0.0.4"
    if faults.lenient:
        message = f"{read_as}; simulators would misread it: convert it"
        faults.diagnostics.add("ET003", Severity.ERROR, faults.path, message, path=faults.path)
    else:
        _warn(faults.diagnostics, "chakra.migrated", faults.path, read_as, 1)
    if isinstance(opened.decoder, HistoricDecoder):
        likely = (
            "simulators of its time took them as cycles of 1 ns, which is the likely unit: --run-time-unit ns"
            if opened.schema == _WITHOUT_CONVERTER
            else "and converters other than Chakra's for PyTorch wrote cycles: --run-time-unit ns"
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
    joiner = Joiner()
    last = EtColumns.empty(AttributeColumns.empty(0))
    for chunk, expected in iter_columns(
        path, diagnostics, max_bytes=max_bytes, lenient=lenient, version=version, recover=recover
    ):
        joiner.add(chunk, expected)
        last = chunk
    whole = joiner.take(last.version, last.metadata, last.attrs.keys)
    return replace(whole, schema=last.schema, is_cut=last.is_cut)


def write_columns(columns: EtColumns, path: Path) -> None:
    """Write a trace file, gzipped where the name ends in ``.gz``. Raises :class:`OutputError`."""
    with open_output(path, packed=path.suffix == ".gz") as stream:
        for piece in encode_chunks(columns):
            stream.write(np.frombuffer(piece, np.uint8).data)
