"""A Chakra trace in JSON as the messages of a ``.et`` file, one after the other.

Three kinds are told apart by their structure: documents in protobuf-JSON behind each other, the first of
them the ``GlobalMetadata`` (what ``chakra_jsonizer`` prints); an object with a list ``workload_graph``, for
Chakra's C++ feeder; and the same with everything that a trace holds, as our writer makes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, NoReturn

from hespas.converters.chakra.json_fields import message_bytes
from hespas.converters.chakra.json_nodes import contradicted_keys, listed_node
from hespas.converters.chakra.json_stream import NODE_LIST, JsonStream, TextObject, decoded
from hespas.converters.chakra.json_values import JsonValue, WrongValueError
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import FormatError, UnsupportedError
from hespas.schemas.chakra.messages import GLOBAL_METADATA, NODE

__all__ = ["METADATA_KEY", "SCHEMA", "SCHEMA_KEY", "JsonFrames", "KnownNodes", "Message", "is_metadata"]

SCHEMA_KEY, METADATA_KEY = "schema", "global_metadata"
SCHEMA = "hespas.chakra-json/1"
"""What a document of our writer calls itself."""

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
        with closing(JsonStream(self._file, self._max_bytes)) as stream:
            stream.open()
            self._is_list = stream.is_list
            yield from self._listed(stream) if stream.is_list else self._documents(stream)

    def _listed(self, stream: JsonStream) -> Iterator[Message]:
        """Nodes of a list, with the metadata beside it before them."""
        yield Message(self._list_metadata(stream.header), 1)
        for found in stream.objects():
            yield from self._node(found)
        self._check_header(stream.header)

    def _documents(self, stream: JsonStream) -> Iterator[Message]:
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
        schema = header.pop(SCHEMA_KEY, SCHEMA)
        if schema != SCHEMA:
            raise UnsupportedError(
                f"ET003: the document has schema {str(schema)[:60]!r}, not {SCHEMA}",
                path=self._path,
                hint="was it written by a newer version?",
            )
        self._count_unknown(list(header))

    def _first_document(self, found: TextObject) -> Iterator[Message]:
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
        message = "ET002: the first document is a node, not the GlobalMetadata"
        if not self._lenient:
            raise FormatError(message, path=self._path, position=self._position(found), hint=_HINT)
        self._diagnostics.error("ET002", self._position(found), message[7:], path=self._path)
        yield Message(b"", found.line)
        yield from self._node(found)

    def _node(self, found: TextObject) -> list[Message]:
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

    def _object(self, found: TextObject) -> dict[str, JsonValue]:
        try:
            return decoded(found.text)
        except ValueError as error:
            self._refuse(str(error), self._position(found))

    def _position(self, found: TextObject, value: dict[str, JsonValue] | None = None) -> str:
        place = f"{NODE_LIST}[{found.number}]" if self._is_list else f"document {found.number + 1}"
        stated = (value or {}).get("Id" if self._is_list else "id")
        node = f"node {stated}, " if isinstance(stated, int | str) and len(str(stated)) <= 20 else ""
        return f"{node}{place}, line {found.line}"

    def _refuse(self, message: str, position: str) -> NoReturn:
        raise FormatError(f"ET001: {message}", path=self._path, position=position, hint=_HINT)

    def _refuse_old(self, unknown: list[str], position: str) -> None:
        old = [name for name in unknown if name in _OLD_FIELDS]
        if old:
            raise UnsupportedError(
                f"ET003: {old[0]} is a field of a schema before 0.0.4",
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
