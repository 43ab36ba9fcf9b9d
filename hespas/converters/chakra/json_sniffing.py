"""Whether an input is a Chakra trace in JSON, by its first objects or its file names."""

from __future__ import annotations

import re

from hespas.converters.chakra.json_frames import RANK_FILE, SCHEMA, decoded, is_metadata, whole_objects
from hespas.converters.format import HEAD_BYTES, Head
from hespas.files.streams import first_bytes
from hespas.schemas.chakra.history import LATEST_VERSIONS

__all__ = ["score_json"]

_CERTAIN, _DIRECTORY, _LIKELY, _NO = 95, 90, 60, 0
_BOM = b"\xef\xbb\xbf"
_LIST = re.compile(rb'(?<!\\)"workload_graph"\s*:\s*\[\s*(\]|\{\s*"(Id|Name|NodeType)"\s*:)')
_NODE_LIST = re.compile(rb'(?<!\\)"workload_graph"\s*:\s*\[')
_NO_LIST = re.compile(rb'\{\s*"workload_graph"\s*:')
_FIRST_KEY = re.compile(rb'\{\s*"(version|attr)"\s*:')
_NODE_TYPE = re.compile(rb'"type"\s*:\s*"[A-Z_]{1,40}_NODE"')
_NODE_KEYS = frozenset({"id", "name", "type"})


def score_json(head: Head) -> int:
    """0 (no) .. 100 (certain). Of a directory the first rank file is looked at."""
    if head.is_directory:
        first = next((name for name in head.names if RANK_FILE.match(name)), "")
        return _DIRECTORY if first and _score(first_bytes(head.path / first, HEAD_BYTES)) >= _LIKELY else _NO
    return _score(head.data)


def _score(data: bytes) -> int:
    text = data.removeprefix(_BOM).lstrip()
    if not text.startswith(b"{"):
        return _NO
    if f'"{SCHEMA}"'.encode() in text[:200]:
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
    try:
        keys = set(decoded(text))
        return _CERTAIN if _NODE_KEYS & keys else _NO if keys else _LIKELY
    except ValueError:
        return _LIKELY if _NODE_TYPE.search(text) else _NO


def _score_documents(text: bytes) -> int:
    """Metadata, and a node behind them where the text reaches that far."""
    found = whole_objects(text)
    texts = [text[start:end] for start, end in zip(found.start[:2], found.end[:2], strict=True)]
    if not texts:  # the metadata of a converter may hold the whole text that it was given
        return _LIKELY if _FIRST_KEY.match(text) and b'Val"' in text else _NO
    try:
        first = decoded(texts[0])
    except ValueError:
        return _NO
    if set(first) >= _NODE_KEYS and str(first["type"]).endswith("_NODE"):
        return _LIKELY  # the metadata are missing; the reader says so
    if not is_metadata(set(first)):
        return _NO
    if len(texts) > 1:
        return _score_node(texts[1])
    return _LIKELY if first.get("version") in LATEST_VERSIONS or b'Val"' in texts[0] else _NO
