"""The start of a trace: which schema it has, its metadata, and the decoder for its nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, NoReturn

from hespas.converters.chakra.codec_faults import CodecFaults
from hespas.converters.chakra.columns import AttributeColumns
from hespas.converters.chakra.decode import Decoder, Metadata
from hespas.converters.chakra.evidence import Evidence
from hespas.converters.chakra.frames import FrameBatch, frames, open_trace
from hespas.converters.chakra.historic import HistoricDecoder
from hespas.converters.chakra.resolution import Resolution, is_final, resolve, survivors
from hespas.converters.chakra.versions import (
    FirstFrame,
    Signature,
    as_current_metadata,
    first_frame,
    looks_old,
    possible_versions,
)
from hespas.graph.errors import FormatError, UnsupportedError
from hespas.schemas.chakra.history import CURRENT, EARLY, NAMED, VERSIONS

__all__ = ["Opened", "Reading", "open_nodes"]

_PROBED_NODES = 64
_NO_TRACE = "is this a Chakra trace? Its first frame would be a GlobalMetadata message"


class Reading(NamedTuple):
    """How to read a file: up to which size, and as which version (empty: as it tells itself)."""

    path: Path
    max_bytes: int | None
    version: str


class Opened(NamedTuple):
    """A trace of which the first batch has been looked at. ``schema`` names an older schema, else empty."""

    decoder: Decoder | HistoricDecoder
    metadata: Metadata
    nodes: FrameBatch
    schema: str


def open_nodes(batch: FrameBatch, reading: Reading, faults: CodecFaults) -> Opened:
    """Tell the schema, decode the metadata, and return the nodes of the first batch.

    Where the first frame does not tell, the file is read as far as it takes. Raises :class:`FormatError` and
    :class:`UnsupportedError` (``ET003``) where the schema is none that is known, or cannot be told.
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
                "ET003: the metadata of this file are of schema 0.0.4, its nodes of 0.0.3 or older",
                path=path,
                position=f"byte {int(nodes.frame_byte[index])}",
                hint="write the trace again with one version of Chakra",
            )
    return resolve(Evidence(), possible, has_metadata=True, named=named, path=path)


def _told_by_nodes(
    batch: FrameBatch, possible: frozenset[str], reading: Reading, faults: CodecFaults, *, has_metadata: bool
) -> Resolution:
    """The schema that the nodes have: of the first batch or, while that is not enough, of more of them."""
    evidence = Evidence()
    if has_metadata:
        evidence.add_metadata(batch.message(0))
    start = evidence.copy()
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
        evidence = start.copy()
        evidence.add_nodes(nodes.window, nodes.start[: middle + 1], nodes.end[: middle + 1])
        if survivors(evidence, possible, has_metadata=has_metadata):
            low = middle + 1
        else:
            high = middle
    return int(nodes.frame_byte[low]) if low < len(nodes) else nodes.base


def _read_on(evidence: Evidence, possible: frozenset[str], reading: Reading, *, has_metadata: bool) -> None:
    """Collect evidence from the batches behind the first, until it is enough; damage ends it too."""
    try:
        for number, batch in enumerate(frames(open_trace(reading.path, reading.max_bytes))):
            if not number:
                continue
            evidence.add_nodes(batch.window, batch.start, batch.end)
            if is_final(survivors(evidence, possible, has_metadata=has_metadata)):
                return
    except FormatError:
        return  # it is told when the nodes are read


def _open_old(
    batch: FrameBatch, nodes: FrameBatch, chosen: Resolution, faults: CodecFaults, *, has_metadata: bool
) -> Opened:
    decoder = HistoricDecoder(
        VERSIONS[chosen.reading], chosen.label, faults.path, faults.diagnostics if faults.lenient else None
    )
    metadata = Metadata(CURRENT, AttributeColumns.empty(1))
    if has_metadata:
        metadata = decoder.metadata(batch.message(0), batch.base + int(batch.start[0]))
    return Opened(decoder, metadata, nodes, chosen.label)


def _open_current(
    batch: FrameBatch,
    nodes: FrameBatch,
    signature: Signature,
    chosen: Resolution,
    faults: CodecFaults,
    *,
    named: bool,
) -> Opened:
    decoder = Decoder(faults.path, on_error=faults.diagnostics if faults.lenient else None)
    if len(nodes) == len(batch):
        message = "the first frame is a Node, not a GlobalMetadata: the schema (ET003) can only be guessed"
        if named:
            faults.diagnostics.warning("ET002", faults.path, message, path=faults.path)
        else:
            faults.report(
                "ET002", message, "byte 0", f"{_NO_TRACE}; name the schema with --from-version 0.0.4"
            )
        return Opened(decoder, Metadata("", AttributeColumns.empty(1)), nodes, "")
    message_bytes = batch.message(0)
    is_early = chosen.reading == EARLY
    if is_early:
        message_bytes = as_current_metadata(signature)
    metadata = decoder.metadata(message_bytes, batch.base + int(batch.start[0]))
    if is_early:  # it had no label yet; the trace that is read is one of today's schema
        return Opened(decoder, replace(metadata, version=CURRENT), nodes, EARLY)
    return Opened(decoder, metadata, nodes, "")


def _not_a_trace(path: str) -> NoReturn:
    raise FormatError(
        "ET003: the first frame is no Chakra message", path=path, position="byte 0", hint=_NO_TRACE
    )
