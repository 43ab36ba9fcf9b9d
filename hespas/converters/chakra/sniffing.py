"""Whether an input is a Chakra trace, by its first frames or its file names."""

from __future__ import annotations

from hespas.converters.chakra.naming import RANK_FILE
from hespas.converters.chakra.versions import FirstFrame, Schema, Signature, first_frame, node_schema
from hespas.converters.format import Head

__all__ = ["score"]

_FRAMES = 4
_DIRECTORY, _CERTAIN, _LIKELY, _ONLY_FRAMED, _NO = 90, 95, 60, 20, 0


def score(head: Head) -> int:
    """0 (no) .. 100 (certain)."""
    if head.is_directory:
        return _DIRECTORY if any(RANK_FILE.match(name) for name in head.names) else _NO
    messages = _first_messages(head.data)
    if not messages:
        return _NO
    signatures = [Signature.of(message) for message in messages]
    known = [signature for signature in signatures if signature is not None]
    if len(known) < len(signatures):
        return _NO
    nodes = known if first_frame(known[0]) is FirstFrame.NODE else known[1:]
    schemas = {node_schema(node) for node in nodes}
    if Schema.UNKNOWN in schemas or first_frame(known[0]) is FirstFrame.UNKNOWN:
        return _NO
    if Schema.CURRENT in schemas:
        return _CERTAIN
    return _LIKELY if schemas - {Schema.UNCLEAR} else _ONLY_FRAMED


def _first_messages(data: bytes) -> list[bytes]:
    """Up to four whole frames from the start."""
    messages: list[bytes] = []
    at = 0
    while at < len(data) and len(messages) < _FRAMES:
        length, shift = 0, 0
        while at < len(data) and data[at] > 0x7F and shift < 28:
            length |= (data[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
        if at >= len(data):
            break
        length |= data[at] << shift
        at += 1
        if at + length > len(data):
            break
        messages.append(data[at : at + length])
        at += length
    return messages
