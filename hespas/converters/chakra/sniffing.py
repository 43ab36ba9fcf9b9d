"""Whether an input is a Chakra trace, by its first frames or its file names."""

from __future__ import annotations

import numpy as np

from hespas.converters.chakra.comm_groups import RANK_FILE
from hespas.converters.chakra.resolution import Evidence, is_final, survivors
from hespas.converters.chakra.versions import (
    FirstFrame,
    Signature,
    first_frame,
    looks_old,
    possible_versions,
)
from hespas.converters.chakra.wire import Window, offsets_of
from hespas.converters.format import Head
from hespas.files.wire import WireError, decode_varint
from hespas.schemas.chakra.history import CURRENT, NAMED

__all__ = ["score"]

_FRAMES = 64
_LENGTH_BYTES = 5
_DIRECTORY, _CERTAIN, _LIKELY, _ONLY_FRAMED, _NO = 90, 95, 60, 20, 0


def score(head: Head) -> int:
    """0 (no) .. 100 (certain)."""
    if head.is_directory:
        return _DIRECTORY if any(RANK_FILE.match(name) for name in head.names) else _NO
    messages = _first_messages(head.data)
    if len(messages) == _FRAMES and not any(messages):
        return _NO  # zeros
    signatures = [Signature.of(message) for message in messages]
    known = [signature for signature in signatures if signature is not None]
    if not known or len(known) < len(signatures) or first_frame(known[0]) is FirstFrame.UNKNOWN:
        return _NO
    has_metadata = first_frame(known[0]) is FirstFrame.METADATA
    possible = possible_versions(known[0])
    evidence = Evidence()
    if has_metadata:
        evidence.add_metadata(messages[0])
    nodes = messages[has_metadata:]
    offsets = offsets_of(np.array([len(node) for node in nodes], np.int64))
    window = Window.holding(np.frombuffer(b"".join(nodes), np.uint8))
    evidence.add_nodes(window, offsets[:-1], offsets[1:])
    found = survivors(evidence, possible, has_metadata=has_metadata)
    if not nodes or not found:
        return _ONLY_FRAMED if not nodes or any(map(looks_old, known)) else _NO
    if possible <= NAMED[CURRENT]:
        return _CERTAIN
    return _LIKELY if is_final(found) else _ONLY_FRAMED


def _first_messages(data: bytes) -> list[bytes]:
    """The first whole frames from the start."""
    messages: list[bytes] = []
    at = 0
    while at < len(data) and len(messages) < _FRAMES:
        try:
            length, at = decode_varint(data, at, min(len(data), at + _LENGTH_BYTES))
        except WireError:
            break
        if at + length > len(data):
            break
        messages.append(data[at : at + length])
        at += length
    return messages
