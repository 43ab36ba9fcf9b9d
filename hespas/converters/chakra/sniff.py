"""Whether an input is a Chakra trace, binary or JSON: by its first frames or objects, or by its file names.

The machinery of the formats is loaded only for what may be one.
"""

from __future__ import annotations

import re

import numpy as np

from hespas.converters.format import HEAD_BYTES, Head
from hespas.files.streams import first_bytes
from hespas.files.wire import WireError, decode_varint
from hespas.schemas.chakra import CURRENT, LATEST_VERSIONS

__all__ = ["JSON_RANK_FILE", "JSON_SCHEMA", "RANK_FILE", "score", "score_json"]

RANK_FILE = re.compile(r"^(?P<name>.+)\.(?P<rank>[0-9]+)\.e[tg](?:\.gz)?$")
"""The name of one rank's file; those of schema 0.0.1 end in ``.eg``."""

JSON_RANK_FILE = re.compile(r"^(?P<name>.+)\.(?P<rank>[0-9]+)\.json(?:\.gz)?$")
"""The name of one rank's file in JSON; ``comm_group.json`` is none."""

JSON_SCHEMA = "hespas.chakra-json/1"
"""What a document of our writer calls itself."""

_FRAMES = 64
_LENGTH_BYTES = 5
_CERTAIN, _DIRECTORY, _LIKELY, _ONLY_FRAMED, _NO = 95, 90, 60, 20, 0


def score(head: Head) -> int:
    """0 (no) .. 100 (certain)."""
    if head.is_directory:
        return _DIRECTORY if any(RANK_FILE.match(name) for name in head.names) else _NO
    messages = _first_messages(head.data)
    if not messages or (len(messages) == _FRAMES and not any(messages)):
        return _NO  # nothing, or zeros
    return _score_messages(messages)


def _score_messages(messages: list[bytes]) -> int:
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
    from hespas.converters.chakra.wire import Window, offsets_of
    from hespas.schemas.chakra.tables import NAMED

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


# --- JSON.

_BOM = b"\xef\xbb\xbf"
_LIST = re.compile(rb'(?<!\\)"workload_graph"\s*:\s*\[\s*(\]|\{\s*"(Id|Name|NodeType)"\s*:)')
_NODE_LIST = re.compile(rb'(?<!\\)"workload_graph"\s*:\s*\[')
_NO_LIST = re.compile(rb'\{\s*"workload_graph"\s*:')
_METADATA = re.compile(rb'\{\s*(?:\}|"(?:version|attr)"\s*:)')
_FIRST_KEY = re.compile(rb'\{\s*"(version|attr)"\s*:')
_NODE_TYPE = re.compile(rb'"type"\s*:\s*"[A-Z_]{1,40}_NODE"')
_NODE_KEYS = frozenset({"id", "name", "type"})


def score_json(head: Head) -> int:
    """0 (no) .. 100 (certain). Of a directory the first rank file is looked at."""
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
        return _LIKELY  # there is no list in it; the reader says so
    return _score_documents(text)


def _score_node(text: bytes) -> int:
    """The document behind the metadata; a damaged node is one all the same, and so is one without a field."""
    from hespas.converters.chakra.json import decoded

    try:
        keys = set(decoded(text))
        return _CERTAIN if _NODE_KEYS & keys else _NO if keys else _LIKELY
    except ValueError:
        return _LIKELY if _NODE_TYPE.search(text) else _NO


def _score_documents(text: bytes) -> int:
    """Metadata, and a node behind them where the text reaches that far."""
    if not _METADATA.match(text) and b'_NODE"' not in text:
        return _NO
    from hespas.converters.chakra.json import decoded, is_metadata, whole_objects

    found = whole_objects(text)
    texts = [text[start:end] for start, end in zip(found.start[:2], found.end[:2], strict=True)]
    if not texts:  # the metadata of a converter may hold the whole text that it was given
        return _LIKELY if _FIRST_KEY.match(text) and b'Val"' in text else _NO
    try:
        first = decoded(texts[0])
    except ValueError:
        return _NO
    if not is_metadata(set(first)):  # where they are missing, the reader says so
        is_node = set(first) >= _NODE_KEYS and str(first["type"]).endswith("_NODE")
        return _LIKELY if is_node else _NO
    if len(texts) > 1:
        return _score_node(texts[1])
    return _LIKELY if first.get("version") in LATEST_VERSIONS or b'Val"' in texts[0] else _NO
