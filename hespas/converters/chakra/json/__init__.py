"""A Chakra trace in JSON as the messages of a ``.et`` file, one after the other.

Three kinds are distinguished by their structure: documents in protobuf-JSON behind each other, the first of
them the ``GlobalMetadata`` (what ``chakra_jsonizer`` prints); an object with a list ``workload_graph``, for
Chakra's C++ feeder; and the same with everything that a trace holds, as our writer makes it.
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

from hespas.converters.chakra.json.nodes import (
    JsonValue,
    WrongValueError,
    contradicted_keys,
    listed_node,
    message_bytes,
)
from hespas.converters.chakra.sniff import JSON_SCHEMA
from hespas.converters.chakra.wire import Longs
from hespas.converters.chakra.wire.decode import CutOffError, open_trace
from hespas.files.documents import BracketScan
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import FormatError, UnsupportedError
from hespas.schemas.chakra.tables import GLOBAL_METADATA, NODE

__all__ = [
    "METADATA_KEY",
    "NODE_LIST",
    "SCHEMA_KEY",
    "JsonFrames",
    "KnownNodes",
    "Message",
    "bare_name",
    "decoded",
    "is_metadata",
    "whole_objects",
]

SCHEMA_KEY, METADATA_KEY = "schema", "global_metadata"
_VERSION = "0.0.4"
_KNOWN_BYTES = 64 << 20
"""Room for the texts and messages of nodes that are met again in files of other ranks."""
_HINT = (
    "compare it with what chakra_jsonizer prints, or with a file that hespas-convert --to chakra-json wrote"
)
_OLD_FIELDS = frozenset(
    {"parent", "attribute", "inputShapes", "input_shapes", "inputTypes", "input_types", "simulatedRunTime"}
)
"""Fields of nodes before schema 0.0.4."""


class Message(NamedTuple):
    """One message, and the line on which its object starts."""

    data: bytes
    line: int


def is_metadata(keys: set[str]) -> bool:
    """Whether a document with these keys is a ``GlobalMetadata``."""
    return keys <= {"version", "attr"}


class KnownNodes:
    """Nodes met before, by their text: ranks of one class differ in few of theirs. Bounded."""

    def __init__(self) -> None:
        """None yet."""
        self._data: dict[bytes, bytes] = {}
        self._room = _KNOWN_BYTES

    def find(self, text: bytes) -> bytes | None:
        """The message of a text without findings that was met before."""
        return self._data.get(text)

    def keep(self, text: bytes, data: bytes) -> None:
        """Remember a node, as long as there is room."""
        size = len(text) + len(data)
        if size <= self._room:
            self._room -= size
            self._data[text] = data


class JsonFrames:
    """The messages of one file; findings go to ``diagnostics``. ``known`` may be shared by files of one set.

    With ``lenient``, nodes that make no sense are left out and recorded. Raises :class:`FormatError`
    (``ET001``, ``ET002``) and :class:`UnsupportedError` (``ET003``) naming document, line and node.
    """

    def __init__(
        self,
        path: Path,
        diagnostics: Diagnostics,
        *,
        max_bytes: int | None,
        lenient: bool,
        known: KnownNodes | None = None,
    ) -> None:
        """Open nothing yet."""
        self._known = KnownNodes() if known is None else known
        self._file = path
        self._max_bytes = max_bytes
        self._path = str(path)
        self._diagnostics = diagnostics
        self._lenient = lenient
        self._is_list = False

    def messages(self) -> Iterator[Message]:
        """The metadata, then the nodes in the order of the file."""
        with closing(_JsonStream(self._file, self._max_bytes)) as stream:
            stream.open()
            self._is_list = stream.is_list
            yield from self._listed(stream) if stream.is_list else self._documents(stream)

    def _listed(self, stream: _JsonStream) -> Iterator[Message]:
        """Nodes of a list, with the metadata beside it before them."""
        yield Message(self._list_metadata(stream.header), 1)
        for found in stream.objects():
            yield from self._node(found)
        self._check_header(stream.header)

    def _documents(self, stream: _JsonStream) -> Iterator[Message]:
        """Documents behind each other, the first of them metadata."""
        for found in stream.objects():
            yield from self._node(found) if found.number else self._first_document(found)

    def _list_metadata(self, header: dict[str, JsonValue]) -> bytes:
        """The metadata of a document with a list; the feeder's has none."""
        if METADATA_KEY not in header:
            return message_bytes(GLOBAL_METADATA, {"version": _VERSION}, [])
        unknown: list[str] = []
        try:
            data = message_bytes(GLOBAL_METADATA, header.pop(METADATA_KEY), unknown)
        except WrongValueError as error:
            self._refuse(f"{METADATA_KEY}: {error}", "line 1")
        self._count_unknown(unknown)
        return data

    def _check_header(self, header: dict[str, JsonValue]) -> None:
        """What else stands beside the list of nodes."""
        if METADATA_KEY in header:
            self._refuse(f"{METADATA_KEY} stands behind {NODE_LIST}", "end of file")
        schema = header.pop(SCHEMA_KEY, JSON_SCHEMA)
        if schema != JSON_SCHEMA:
            raise UnsupportedError(
                f"the document has schema {str(schema)[:60]!r}, not {JSON_SCHEMA}",
                code="ET003",
                path=self._path,
                hint="was it written by a newer version?",
            )
        self._count_unknown(list(header))

    def _first_document(self, found: _TextObject) -> Iterator[Message]:
        value = self._object(found)
        if is_metadata(set(value)):
            unknown: list[str] = []
            try:
                yield Message(message_bytes(GLOBAL_METADATA, value, unknown), found.line)
            except WrongValueError as error:
                self._refuse(str(error), self._position(found))
            self._count_unknown(unknown)
            return
        if NODE_LIST in value:
            self._refuse(f"{NODE_LIST} is no list", self._position(found))
        if not {"id", "name", "type"} & set(value):
            self._refuse("the first document is neither metadata nor a node", self._position(found))
        code, message = "ET002", "the first document is a node, not the GlobalMetadata"
        if not self._lenient:
            raise FormatError(message, code=code, path=self._path, position=self._position(found), hint=_HINT)
        self._diagnostics.error(code, self._position(found), message, path=self._path)
        yield Message(b"", found.line)
        yield from self._node(found)

    def _node(self, found: _TextObject) -> list[Message]:
        """One node; nothing where it is left out."""
        known = self._known.find(found.text) if self._is_list else None
        if known is not None:
            return [Message(known, found.line)]
        unknown: list[str] = []
        value = self._object(found)
        try:
            node: JsonValue = listed_node(value, unknown) if self._is_list else value
            data = message_bytes(NODE, node, unknown)
        except WrongValueError as error:
            position = self._position(found, value)
            if not self._lenient:
                self._refuse(str(error), position)
            message = f"{error}; the node is left out"
            self._diagnostics.error("ET001", position, message, path=self._path)
            return []
        if unknown:
            self._refuse_old(unknown, self._position(found, value))
            self._count_unknown(unknown)
        if self._is_list:
            wrong = contradicted_keys(value)
            message = "a key for the C++ feeder differs from the attribute of its name, which was taken"
            self._count("chakra-json.feeder-key", message, len(wrong))
            if not unknown and not wrong:
                self._known.keep(found.text, data)
        return [Message(data, found.line)]

    def _object(self, found: _TextObject) -> dict[str, JsonValue]:
        try:
            return decoded(found.text)
        except ValueError as error:
            self._refuse(str(error), self._position(found))

    def _position(self, found: _TextObject, value: dict[str, JsonValue] | None = None) -> str:
        place = f"{NODE_LIST}[{found.number}]" if self._is_list else f"document {found.number + 1}"
        stated = (value or {}).get("Id" if self._is_list else "id")
        node = f"node {stated}, " if isinstance(stated, int | str) and len(str(stated)) <= 20 else ""
        return f"{node}{place}, line {found.line}"

    def _refuse(self, message: str, position: str) -> NoReturn:
        raise FormatError(message, code="ET001", path=self._path, position=position, hint=_HINT)

    def _refuse_old(self, unknown: list[str], position: str) -> None:
        old = [name for name in unknown if name in _OLD_FIELDS]
        if old:
            raise UnsupportedError(
                f"{old[0]} is a field of a schema before 0.0.4",
                code="ET003",
                path=self._path,
                position=position,
                hint="convert the .et file that it was printed from",
            )

    def _count_unknown(self, unknown: list[str]) -> None:
        if unknown:
            message = f"unknown fields were left out: {unknown[0][:60]}"
            self._count("chakra.unknown-field", message, len(unknown))

    def _count(self, code: str, message: str, count: int) -> None:
        self._diagnostics.warning(code, self._path, message, path=self._path, count=count)


# The objects of a JSON file one by one: documents that stand behind each other, as the jsonizer writes them,
# or the entries of the list ``workload_graph`` of one document.
#
# Memory is a block of the file and its largest object; where objects end is found for all of a block at once.

NODE_LIST = "workload_graph"
"""The key under which the feeder's JSON lists nodes."""

_BLOCK_BYTES = 1 << 20
_LARGEST_OBJECT = 64 << 20
_LIST_START = re.compile(rb'(?<!\\)"workload_graph"\s*:\s*\[')
_SPACE = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_DAMAGED = "the file is damaged or cut off; write or copy it again"


class _TextObject(NamedTuple):
    """One object: its text, which it is (from 0), and the line on which it starts (from 1)."""

    text: bytes
    number: int
    line: int


class _Objects(NamedTuple):
    """Objects that begin and end in a text, and the position of the bracket that ends their list, or -1."""

    start: list[int]
    end: list[int]
    closed: int


def whole_objects(text: bytes) -> _Objects:
    """The outermost objects of a text that starts between two of them. O(len(text)), vectorised."""
    _, step, depth = BracketScan().scan(text)
    below: Longs = np.flatnonzero(depth < 0)
    closed = int(below[0]) if len(below) else -1
    if len(below):
        step, depth = step[:closed], depth[:closed]
    ends = np.flatnonzero((depth == 0) & (step < 0)) + 1
    starts = np.flatnonzero((depth == 1) & (step > 0))[: len(ends)]
    return _Objects(starts.tolist(), ends.tolist(), closed)


class _RepeatedKeyError(ValueError):
    """A key that stands twice in an object: which of its values is meant, nobody knows."""


def _refuse_repeated(pairs: list[tuple[str, object]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise _RepeatedKeyError(f"key {key[:60]!r} stands twice in an object")
        seen.add(key)


def _check_keys(text: bytes) -> None:
    """Raise :class:`_RepeatedKeyError` where an object of a sound text has a key twice."""
    json.loads(text.decode(), object_pairs_hook=_refuse_repeated, parse_int=len, parse_float=len)


def decoded(text: bytes) -> dict[str, JsonValue]:
    """The object of a JSON text. Raises ``ValueError`` for whatever is wrong with it."""
    try:
        value = cast("JsonValue", msgspec.json.decode(text))
        _check_keys(text)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(value, dict):
        raise ValueError("it is no object")
    return value


class _JsonStream:
    """Reads one file once: :meth:`open`, :meth:`objects`, :meth:`close`.

    ``header`` holds what stands beside the list of nodes (nothing where documents stand behind each other);
    what stands behind the list is there when all objects were read. Errors are ``ET001`` and name the line.
    """

    def __init__(self, path: Path, max_bytes: int | None) -> None:
        """Open the file, gzip or not; raises what :func:`.decode.open_trace` does."""
        self.path = str(path)
        self.header: dict[str, JsonValue] = {}
        self.is_list = False
        self._stated: frozenset[str] = frozenset()
        self._source = open_trace(path, max_bytes)
        self._text = b""
        self._line = 1
        self._count = 0

    def open(self) -> None:
        """Find out which kind of file it is, and read it up to the first node."""
        self._more(_BLOCK_BYTES)
        self._text = self._text.removeprefix(_BOM)
        more = True
        while more:
            found = _LIST_START.search(self._text)
            if found and self._begins_list(found.end()):
                return
            if whole_objects(self._text).end or len(self._text) > _LARGEST_OBJECT:
                return
            more = self._more(len(self._text))

    def close(self) -> None:
        """Close the file."""
        self._source.stream.close()

    def _begins_list(self, end: int) -> bool:
        """Whether the list of nodes starts at ``end``: the document closed there must make sense."""
        try:
            self.header = decoded(self._text[:end] + b"]}")
        except _RepeatedKeyError as error:
            self._fail(str(error), 0)
        except ValueError:
            return False
        del self.header[NODE_LIST]
        self._stated = frozenset(self.header)
        self._consume(end)
        self.is_list = True
        return True

    def _more(self, size: int) -> bool:
        data = self._source.stream.read(size)
        self._text += data
        return bool(data)

    def _consume(self, end: int) -> None:
        self._line += self._text.count(b"\n", 0, end)
        self._text = self._text[end:]

    def objects(self) -> Generator[_TextObject]:
        """The objects in order, from where :meth:`open` got to."""
        more = True
        while True:
            found = whole_objects(self._text)
            if not self.is_list and found.closed >= 0:
                self._fail("a bracket closes what was not opened", found.closed)
            yield from self._within(found)
            if found.closed >= 0:
                self._check_gap(found.end[-1] if found.end else 0, found.closed, closing=True)
                self._consume(found.closed)
                self._read_trailer()
                return
            self._consume(found.end[-1] if found.end else 0)
            if not more:
                break
            if len(self._text) > _LARGEST_OBJECT:
                self._fail(f"an object of more than {_LARGEST_OBJECT >> 20} MiB", 0)
            more = self._more(max(_BLOCK_BYTES, len(self._text)))
        self._check_end()

    def _within(self, found: _Objects) -> Iterator[_TextObject]:
        """The objects of the block; between them is nothing, or a comma in a list."""
        line, behind = self._line, 0
        for start, end in zip(found.start, found.end, strict=True):
            self._check_gap(behind, start)
            line += self._text.count(b"\n", behind, start)
            yield _TextObject(self._text[start:end], self._count, line)
            line += self._text.count(b"\n", start, end)
            self._count += 1
            behind = end

    def _check_gap(self, start: int, end: int, *, closing: bool = False) -> None:
        gap = self._text[start:end].strip(_SPACE)
        expected = b"," if self.is_list and self._count and not closing else b""
        if gap == expected:
            return
        what = "a comma is missing" if not gap else f"an object was expected, not {gap[:20]!r}"
        self._fail(what, start)

    def _check_end(self) -> None:
        """Raise where the file ends within an object or a list."""
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
        """What stands behind the list of nodes."""
        while self._more(_BLOCK_BYTES):
            if len(self._text) > _LARGEST_OBJECT:
                self._fail(f"more than {_LARGEST_OBJECT >> 20} MiB behind {NODE_LIST}", 0)
        try:
            trailer = decoded(b'{"":[' + self._text)
        except ValueError as error:
            self._fail(f"behind {NODE_LIST}: {error}", 0)
        del trailer[""]
        if NODE_LIST in trailer:
            self._fail(f"{NODE_LIST} stands twice", 0)
        again = next((key for key in trailer if key in self._stated), "")
        if again:
            self._fail(f"key {again[:60]!r} stands twice in an object", 0)
        self.header.update(trailer)

    def _fail(self, what: str, at: int) -> NoReturn:
        line = self._line + self._text.count(b"\n", 0, at)
        raise FormatError(what, code="ET001", path=self.path, position=f"line {line}", hint=_DAMAGED)


def bare_name(name: str) -> str:
    """A name without ``.json`` and ``.gz``."""
    return name.removesuffix(".gz").removesuffix(".json")
