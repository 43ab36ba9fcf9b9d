"""Chakra traces in JSON, read as the messages of a ``.et`` file in order.

Three forms are distinguished by their structure. The output of ``chakra_jsonizer`` consists of concatenated
documents in protobuf-JSON; the first one is the ``GlobalMetadata``. Chakra's C++ feeder reads an object with
a list ``workload_graph``. Hespas writes the same object with everything else that a trace contains. Memory:
one block of the file and its largest object. The ends of all objects of a block are found in one pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, NoReturn, cast

import msgspec
import numpy as np

from hespas.converters.chakra import JSON_SCHEMA
from hespas.converters.chakra.checks import Faults
from hespas.converters.chakra.json.nodes import (
    JsonValue,
    WrongValueError,
    contradicted_keys,
    listed_node,
    message_bytes,
)
from hespas.converters.chakra.wire import Longs
from hespas.converters.chakra.wire.decode import CutOffError, open_trace
from hespas.files.documents import BracketScan
from hespas.graph.errors import FormatError, UnsupportedError
from hespas.schemas.chakra.tables import GLOBAL_METADATA, NODE

__all__ = [
    "METADATA_KEY",
    "NODE_LIST",
    "SCHEMA_KEY",
    "JsonFrames",
    "JsonMessage",
    "KnownNodes",
    "decoded",
    "is_metadata",
    "whole_objects",
]

SCHEMA_KEY, METADATA_KEY = "schema", "global_metadata"
_VERSION = "0.0.4"
_KNOWN_BYTES = 64 << 20
"""Memory for the texts and messages of nodes that recur in the files of other ranks."""
_HINT = "compare the file with the output of chakra_jsonizer or of hespas-convert --to chakra-json"
_OLD_FIELDS = frozenset(
    {"parent", "attribute", "inputShapes", "input_shapes", "inputTypes", "input_types", "simulatedRunTime"}
)
"""Fields of nodes before schema 0.0.4."""


class JsonMessage(NamedTuple):
    """Protobuf message (metadata or node) encoded from JSON. ``line`` is the line of the file on which the
    JSON object starts.
    """

    data: bytes
    line: int


def is_metadata(keys: set[str]) -> bool:
    """Return True if a document with these keys is a ``GlobalMetadata``."""
    return keys <= {"version", "attr"}


class KnownNodes:
    """Cache of nodes that were already converted, by their JSON text. It saves time because the files of one
    rank class differ in few nodes. Its size is bounded.
    """

    def __init__(self) -> None:
        """Start with an empty cache."""
        self._data: dict[bytes, bytes] = {}
        self._room = _KNOWN_BYTES

    def find(self, text: bytes) -> bytes | None:
        """Return the cached message for a JSON text, or None. Only nodes without findings are cached."""
        return self._data.get(text)

    def keep(self, text: bytes, data: bytes) -> None:
        """Add the encoded message of a JSON text to the cache, if there is space."""
        size = len(text) + len(data)
        if size <= self._room:
            self._room -= size
            self._data[text] = data


class JsonFrames:
    """Reader that converts the nodes of one JSON file to protobuf messages. Findings go to ``faults``. Files
    of one set may share a ``cache``.

    Invalid nodes are skipped if the reader is lenient. Raises :class:`FormatError` (``ET001``, ``ET002``) and
    :class:`UnsupportedError` (``ET003``) with document, line and node.
    """

    def __init__(
        self, path: Path, faults: Faults, *, max_bytes: int | None, cache: KnownNodes | None = None
    ) -> None:
        """Store the arguments. :meth:`messages` opens the file."""
        self._cache = KnownNodes() if cache is None else cache
        self._file = path
        self._max_bytes = max_bytes
        self._faults = faults
        self._path = str(path)
        self._is_list = False

    def messages(self) -> Generator[JsonMessage]:
        """Yield the metadata, then the nodes in file order."""
        with closing(_JsonStream(self._file, self._max_bytes)) as stream:
            stream.open()
            self._is_list = stream.is_list
            if stream.is_list:
                yield JsonMessage(self._list_metadata(stream.header), 1)
            for text_object in stream.objects():
                if stream.is_list or text_object.number:
                    yield from self._node(text_object)
                else:
                    yield from self._first_document(text_object)
            if stream.is_list:
                if METADATA_KEY in stream.header:
                    self._refuse(f"{METADATA_KEY} follows {NODE_LIST}", "end of file")
                schema = stream.header.pop(SCHEMA_KEY, JSON_SCHEMA)
                if schema != JSON_SCHEMA:
                    raise UnsupportedError(
                        f"the document has schema {str(schema)[:60]!r}, not {JSON_SCHEMA}",
                        code="ET003",
                        path=self._path,
                        hint="read it with the version of hespas that wrote it",
                    )
                self._count_unknown(list(stream.header))

    def _list_metadata(self, header: dict[str, JsonValue]) -> bytes:
        """Return the encoded metadata of a document with a node list. Documents of the form for Chakra's
        feeder have no metadata.
        """
        if METADATA_KEY not in header:
            return message_bytes(GLOBAL_METADATA, {"version": _VERSION}, [])
        unknown: list[str] = []
        try:
            data = message_bytes(GLOBAL_METADATA, header.pop(METADATA_KEY), unknown)
        except WrongValueError as error:
            self._refuse(f"{METADATA_KEY}: {error}", "line 1")
        self._count_unknown(unknown)
        return data

    def _first_document(self, text_object: _TextObject) -> Iterator[JsonMessage]:
        value = self._object(text_object)
        if is_metadata(set(value)):
            unknown: list[str] = []
            try:
                yield JsonMessage(message_bytes(GLOBAL_METADATA, value, unknown), text_object.line)
            except WrongValueError as error:
                self._refuse(str(error), self._position(text_object))
            self._count_unknown(unknown)
            return
        if NODE_LIST in value:
            self._refuse(f"{NODE_LIST} is not a list", self._position(text_object))
        if not {"id", "name", "type"} & set(value):
            self._refuse("the first document is neither metadata nor a node", self._position(text_object))
        code, message = "ET002", "the first document is a node, not the GlobalMetadata"
        self._faults.error(code, message, position=self._position(text_object), hint=_HINT)
        yield JsonMessage(b"", text_object.line)
        yield from self._node(text_object)

    def _node(self, text_object: _TextObject) -> list[JsonMessage]:
        """Return the encoded message of one node, in a list that is empty if the node is skipped."""
        cached = self._cache.find(text_object.text) if self._is_list else None
        if cached is not None:
            return [JsonMessage(cached, text_object.line)]
        unknown: list[str] = []
        value = self._object(text_object)
        try:
            node: JsonValue = listed_node(value, unknown) if self._is_list else value
            data = message_bytes(NODE, node, unknown)
        except WrongValueError as error:
            self._faults.skip(self._fault(str(error), self._position(text_object, value)))
            return []
        if unknown:
            old = [name for name in unknown if name in _OLD_FIELDS]
            if old:
                raise UnsupportedError(
                    f"{old[0]} is a field of a schema before 0.0.4",
                    code="ET003",
                    path=self._path,
                    position=self._position(text_object, value),
                    hint="convert the .et file that it was printed from",
                )
            self._count_unknown(unknown)
        if self._is_list:
            wrong = contradicted_keys(value)
            message = "a key for the C++ feeder differs from the attribute of the same name, which is used"
            self._count("chakra-json.feeder-key", message, len(wrong))
            if not unknown and not wrong:
                self._cache.keep(text_object.text, data)
        return [JsonMessage(data, text_object.line)]

    def _object(self, text_object: _TextObject) -> dict[str, JsonValue]:
        try:
            return decoded(text_object.text)
        except ValueError as error:
            self._refuse(str(error), self._position(text_object))

    def _position(self, text_object: _TextObject, value: dict[str, JsonValue] | None = None) -> str:
        entry = (
            f"{NODE_LIST}[{text_object.number}]" if self._is_list else f"document {text_object.number + 1}"
        )
        node_id = (value or {}).get("Id" if self._is_list else "id")
        node = f"node {node_id}, " if isinstance(node_id, int | str) and len(str(node_id)) <= 20 else ""
        return f"{node}{entry}, line {text_object.line}"

    def _refuse(self, message: str, position: str) -> NoReturn:
        raise self._fault(message, position)

    def _fault(self, message: str, position: str) -> FormatError:
        return FormatError(message, code="ET001", path=self._path, position=position, hint=_HINT)

    def _count_unknown(self, unknown: list[str]) -> None:
        if unknown:
            message = f"unknown fields were ignored: {unknown[0][:60]}"
            self._count("chakra.unknown-field", message, len(unknown))

    def _count(self, code: str, message: str, count: int) -> None:
        self._faults.diagnostics.warning(code, self._path, message, path=self._path, count=count)


NODE_LIST = "workload_graph"
"""Key of the node list in JSON for the feeder."""

_BLOCK_BYTES = 1 << 20
_LARGEST_OBJECT = 64 << 20
_LIST_START = re.compile(rb'(?<!\\)"workload_graph"\s*:\s*\[')
_SPACE = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_DAMAGED = "write or copy the file again: it is damaged or cut off"


class _TextObject(NamedTuple):
    """Text of one JSON object in a file, with its number (from 0) and the line on which it starts (from
    1).
    """

    text: bytes
    number: int
    line: int


class _ObjectSpans(NamedTuple):
    """Start and end of each JSON object in a text. ``closed`` is the position of the bracket that ends the
    list of objects (-1: not in this text).
    """

    start: list[int]
    end: list[int]
    closed: int


def whole_objects(text: bytes) -> _ObjectSpans:
    """Return the outermost objects of a text that starts between two objects. O(len(text)), vectorised."""
    _, step, depth = BracketScan().scan(text)
    below: Longs = np.flatnonzero(depth < 0)
    closed = int(below[0]) if len(below) else -1
    if len(below):
        step, depth = step[:closed], depth[:closed]
    ends = np.flatnonzero((depth == 0) & (step < 0)) + 1
    starts = np.flatnonzero((depth == 1) & (step > 0))[: len(ends)]
    return _ObjectSpans(starts.tolist(), ends.tolist(), closed)


class _RepeatedKeyError(ValueError):
    """Error for a key that occurs twice in an object, whose value is therefore ambiguous."""


def _refuse_repeated(pairs: list[tuple[str, object]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise _RepeatedKeyError(f"key {key[:60]!r} occurs twice in an object")
        seen.add(key)


def decoded(text: bytes) -> dict[str, JsonValue]:
    """Return the object of a JSON text. Raise ``ValueError`` for any fault."""
    try:
        value = cast("JsonValue", msgspec.json.decode(text))
        json.loads(text.decode(), object_pairs_hook=_refuse_repeated, parse_int=len, parse_float=len)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    return value


class _JsonStream:
    """Single-pass reader of one file. Call :meth:`open`, iterate over :meth:`objects`, and call
    :meth:`close`.

    ``header`` has the keys of a document with a node list, except that list (empty for concatenated
    documents). Keys after the list are added when all objects were read. Errors have the code ``ET001`` and
    state the line.
    """

    def __init__(self, path: Path, max_bytes: int | None) -> None:
        """Open the file, gzip or not; raise the errors of :func:`.decode.open_trace`."""
        self.path = str(path)
        self.header: dict[str, JsonValue] = {}
        self.is_list = False
        self._keys_before: frozenset[str] = frozenset()
        self._source = open_trace(path, max_bytes)
        self._text = b""
        self._line = 1
        self._count = 0

    def open(self) -> None:
        """Detect the form of the file, and read it up to the first node."""
        self._more(_BLOCK_BYTES)
        self._text = self._text.removeprefix(_BOM)
        more = True
        while more:
            match = _LIST_START.search(self._text)
            try:
                header = decoded(self._text[: match.end()] + b"]}") if match else None
            except _RepeatedKeyError as error:
                self._fail(str(error), 0)
            except ValueError:  # the key is inside another value, or the text ends before the list
                header = None
            if match and header is not None:
                del header[NODE_LIST]
                self.header, self._keys_before = header, frozenset(header)
                self._consume(match.end())
                self.is_list = True
                return
            if whole_objects(self._text).end or len(self._text) > _LARGEST_OBJECT:
                return
            more = self._more(len(self._text))

    def close(self) -> None:
        """Close the file."""
        self._source.stream.close()

    def _more(self, size: int) -> bool:
        data = self._source.stream.read(size)
        self._text += data
        return bool(data)

    def _consume(self, end: int) -> None:
        self._line += self._text.count(b"\n", 0, end)
        self._text = self._text[end:]

    def objects(self) -> Generator[_TextObject]:
        """Yield the objects in order, from the position where :meth:`open` stopped."""
        more = True
        while True:
            spans = whole_objects(self._text)
            if not self.is_list and spans.closed >= 0:
                self._fail("a closing bracket has no opening one", spans.closed)
            line, behind = self._line, 0
            for start, end in zip(spans.start, spans.end, strict=True):
                self._check_gap(behind, start)
                line += self._text.count(b"\n", behind, start)
                yield _TextObject(self._text[start:end], self._count, line)
                line += self._text.count(b"\n", start, end)
                self._count += 1
                behind = end
            if spans.closed >= 0:
                self._check_gap(behind, spans.closed, closing=True)
                self._consume(spans.closed)
                self._read_trailer()
                return
            self._consume(behind)
            if not more:
                break
            if len(self._text) > _LARGEST_OBJECT:
                self._fail(f"an object of more than {_LARGEST_OBJECT >> 20} MiB", 0)
            more = self._more(max(_BLOCK_BYTES, len(self._text)))
        rest = self._text.strip(_SPACE)
        if not rest and not self.is_list:
            return
        if rest and not rest.lstrip(b", \t\r\n").startswith(b"{"):
            self._fail(f"an object was expected, not {rest[:20]!r}", 0)
        what = f"the list {NODE_LIST}" if self.is_list else f"document {self._count + 1}"
        line = self._line + self._text.count(b"\n")
        raise CutOffError(
            f"{what} is cut off by the end of the file",
            code="ET001",
            path=self.path,
            position=f"line {line}",
            hint=_DAMAGED,
        )

    def _read_trailer(self) -> None:
        """Read the keys that follow the node list of the document, and add them to ``header``."""
        while self._more(_BLOCK_BYTES):
            if len(self._text) > _LARGEST_OBJECT:
                self._fail(f"more than {_LARGEST_OBJECT >> 20} MiB after {NODE_LIST}", 0)
        try:
            trailer = decoded(b'{"":[' + self._text)
        except ValueError as error:
            self._fail(f"after {NODE_LIST}: {error}", 0)
        del trailer[""]
        if NODE_LIST in trailer:
            self._fail(f"{NODE_LIST} occurs twice", 0)
        again = next((key for key in trailer if key in self._keys_before), "")
        if again:
            self._fail(f"key {again[:60]!r} occurs twice in an object", 0)
        self.header.update(trailer)

    def _check_gap(self, start: int, end: int, *, closing: bool = False) -> None:
        gap = self._text[start:end].strip(_SPACE)
        expected = b"," if self.is_list and self._count and not closing else b""
        if gap == expected:
            return
        what = "a comma is missing" if not gap else f"an object was expected, not {gap[:20]!r}"
        self._fail(what, start)

    def _fail(self, what: str, at: int) -> NoReturn:
        line = self._line + self._text.count(b"\n", 0, at)
        raise FormatError(what, code="ET001", path=self.path, position=f"line {line}", hint=_DAMAGED)
