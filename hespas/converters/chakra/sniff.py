"""Recognition of Chakra traces, binary or JSON, by their first frames or objects, or by their file names.

The decoders are imported only for inputs that may be traces.
"""

from __future__ import annotations

import re

import numpy as np

from hespas.converters.chakra import JSON_RANK_FILE, JSON_SCHEMA, RANK_FILE
from hespas.converters.format import HEAD_BYTES, Head
from hespas.files.streams import first_bytes
from hespas.files.wire import WireError, decode_varint
from hespas.schemas.chakra import CURRENT, LATEST_VERSIONS

__all__ = ["score", "score_json"]

_FRAMES = 64
_LENGTH_BYTES = 5
_CERTAIN, _DIRECTORY, _LIKELY, _ONLY_FRAMED, _NO = 95, 90, 60, 20, 0


def score(head: Head) -> int:
    """Return the confidence that the input is a binary trace: 0 (no) .. 100 (certain)."""
    if head.is_directory:
        return _DIRECTORY if any(RANK_FILE.match(name) for name in head.names) else _NO
    messages: list[bytes] = []
    at = 0
    while at < len(head.data) and len(messages) < _FRAMES:
        try:
            length, at = decode_varint(head.data, at, min(len(head.data), at + _LENGTH_BYTES))
        except WireError:
            break
        if at + length > len(head.data):
            break
        messages.append(head.data[at : at + length])
        at += length
    if not messages or (len(messages) == _FRAMES and not any(messages)):
        return _NO  # nothing, or zeros
    from hespas.converters.chakra.history import (
        Evidence,
        FirstFrame,
        Signature,
        first_frame,
        is_final,
        looks_old,
        possible_versions,
        survivors,
    )
    from hespas.converters.chakra.wire import ByteWindow, offsets_of
    from hespas.schemas.chakra.tables import NAMED

    signatures = [Signature.of(message) for message in messages]
    decoded_signatures = [signature for signature in signatures if signature is not None]
    if (
        not decoded_signatures
        or len(decoded_signatures) < len(signatures)
        or first_frame(decoded_signatures[0]) is FirstFrame.UNKNOWN
    ):
        return _NO
    has_metadata = first_frame(decoded_signatures[0]) is FirstFrame.METADATA
    possible = possible_versions(decoded_signatures[0])
    evidence = Evidence()
    if has_metadata:
        evidence.add_metadata(messages[0])
    nodes = messages[has_metadata:]
    offsets = offsets_of(np.array([len(node) for node in nodes], np.int64))
    window = ByteWindow.holding(np.frombuffer(b"".join(nodes), np.uint8))
    evidence.add_nodes(window, offsets[:-1], offsets[1:])
    remaining = survivors(evidence, possible, has_metadata=has_metadata)
    if not nodes or not remaining:
        return _ONLY_FRAMED if not nodes or any(map(looks_old, decoded_signatures)) else _NO
    if possible <= NAMED[CURRENT]:
        return _CERTAIN
    return _LIKELY if is_final(remaining) else _ONLY_FRAMED


_BOM = b"\xef\xbb\xbf"
_LIST = re.compile(rb'(?<!\\)"workload_graph"\s*:\s*\[\s*(\]|\{\s*"(Id|Name|NodeType)"\s*:)')
_NODE_LIST = re.compile(rb'(?<!\\)"workload_graph"\s*:\s*\[')
_NO_LIST = re.compile(rb'\{\s*"workload_graph"\s*:')
_METADATA = re.compile(rb'\{\s*(?:\}|"(?:version|attr)"\s*:)')
_FIRST_KEY = re.compile(rb'\{\s*"(version|attr)"\s*:')
_NODE_TYPE = re.compile(rb'"type"\s*:\s*"[A-Z_]{1,40}_NODE"')
_NODE_KEYS = frozenset({"id", "name", "type"})


def score_json(head: Head) -> int:
    """Return the confidence that the input is a JSON trace: 0 (no) .. 100 (certain). In a directory, check
    the first rank file.
    """
    if head.is_directory:
        first = next((name for name in head.names if JSON_RANK_FILE.match(name)), "")
        return _DIRECTORY if first and _score(first_bytes(head.path / first, HEAD_BYTES)) >= _LIKELY else _NO
    return _score(head.data)


def _score(data: bytes) -> int:
    text = data.removeprefix(_BOM).lstrip()
    if not text.startswith(b"{"):
        return _NO
    if f'"{JSON_SCHEMA}"'.encode() in text[:200]:
        return 100
    if _NODE_LIST.search(text):
        if _LIST.search(text):
            return _CERTAIN
        return _LIKELY if b'"NodeType"' in text or _NO_LIST.match(text) else _NO
    if _NO_LIST.match(text):
        return _LIKELY  # the value is not a list, which the reader reports
    return _score_documents(text) if _METADATA.match(text) or b'_NODE"' in text else _NO


def _score_documents(text: bytes) -> int:
    """Return the confidence for concatenated JSON documents, from the metadata and, if it is within the text,
    the first node.
    """
    from hespas.converters.chakra.json import decoded, is_metadata, whole_objects

    spans = whole_objects(text)
    texts = [text[start:end] for start, end in zip(spans.start[:2], spans.end[:2], strict=True)]
    if not texts:  # the metadata of a converter may hold its whole input
        return _LIKELY if _FIRST_KEY.match(text) and b'Val"' in text else _NO
    try:
        first = decoded(texts[0])
    except ValueError:
        return _NO
    if not is_metadata(set(first)):  # the reader reports missing metadata
        is_node = set(first) >= _NODE_KEYS and str(first["type"]).endswith("_NODE")
        return _LIKELY if is_node else _NO
    if len(texts) < 2:
        return _LIKELY if first.get("version") in LATEST_VERSIONS or b'Val"' in texts[0] else _NO
    try:
        keys = set(decoded(texts[1]))
    except ValueError:  # a damaged node is still a node
        return _LIKELY if _NODE_TYPE.search(texts[1]) else _NO
    return _CERTAIN if _NODE_KEYS & keys else _NO if keys else _LIKELY
