"""Reads an op graph from JSON. Format: ``hespas/schemas/op_graph.schema.json``.

The document is decoded once with nodes left raw, then node by node into flat columns, so that memory is the
text plus the graph.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from pathlib import Path

import msgspec
import numpy as np

from hespas.converters.format import ReadOptions, warn_of_whole_job
from hespas.converters.op_graph.document import (
    SCHEMA_ID,
    Document,
    Node,
    Outline,
    RankClass,
    Version,
    unescape_text,
)
from hespas.converters.op_graph.json_nodes import NodeColumns
from hespas.converters.op_graph.legality import Fault, check_cycle, check_values, decode_ranks
from hespas.files.streams import read_bytes
from hespas.graph import Diagnostics, OpGraph, Workload
from hespas.graph.errors import FormatError, UnsupportedError

__all__ = ["read_json"]

_HINT = "the format is described in hespas/schemas/op_graph.schema.json"
_TRUNCATED = "Input data was truncated"
"""What msgspec says, without a position."""
_PROGRESS_NODES = 1 << 14
_NODE = msgspec.json.Decoder(Node)
_OUTLINE = msgspec.json.Decoder(Outline)
_DOCUMENT = msgspec.json.Decoder(Document)
_VERSION = msgspec.json.Decoder(Version)

_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def read_json(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """The workload of a JSON document.

    Raises ``FormatError`` with line and byte for a malformed document, and, unless ``options.lenient``, for
    duplicate ids, dangling dependencies and cycles; ``UnsupportedError`` for another version of the format.
    """
    workload = _Reader(path, options, diagnostics).read()
    return warn_of_whole_job(workload, "op-graph", path, diagnostics)


class _Reader:
    """One read: the text, and how faults in it are reported."""

    def __init__(self, path: Path, options: ReadOptions, diagnostics: Diagnostics) -> None:
        self._path = str(path)
        self._options = options
        self._diagnostics = diagnostics
        data = read_bytes(path, options.max_bytes)
        self._data = b"   " + data[3:] if data.startswith(BOM_UTF8) else data

    def read(self) -> Workload:
        try:
            _OUTLINE.decode(self._data)
            document = _DOCUMENT.decode(self._data)
        except _DECODE_ERRORS as error:
            self._check_schema(self._stated_schema())
            raise self._decode_error(error, self._data, 0, "$") from error
        self._check_schema(document.schema)
        classes = self._classes(document)
        try:
            num_ranks = self._num_ranks(document)
            ranks = decode_ranks(document.rank_class, num_ranks, len(classes))
            name = unescape_text(document.name)
            metadata = {unescape_text(key): unescape_text(value) for key, value in document.metadata.items()}
        except ValueError as error:
            raise FormatError(str(error), path=self._path, position="header", hint=_HINT) from error
        graphs = tuple(self._graph(where, fields, len(ranks)) for where, fields in classes)
        return Workload(name=name, classes=graphs, rank_class=ranks, metadata=metadata)

    def _stated_schema(self) -> str:
        """What a document that does not fit says of its version; the own version where it says nothing."""
        try:
            return _VERSION.decode(self._data).schema
        except _DECODE_ERRORS:
            return SCHEMA_ID

    def _check_schema(self, stated: str) -> None:
        if stated != SCHEMA_ID:
            raise UnsupportedError(
                f"the document says schema {stated[:80]!r}, this version reads {SCHEMA_ID!r}",
                path=self._path,
                hint="write it again with a matching version of hespas",
            )

    def _classes(self, document: Document) -> list[tuple[str, RankClass]]:
        """Each class with its JSON path."""
        if (document.nodes is None) == (document.rank_classes is None):
            raise FormatError(
                "a document has either 'nodes' (one program) or 'rank_classes'",
                path=self._path,
                position=self._place("$"),
                hint=_HINT,
            )
        if document.nodes is not None:
            shared = {name: getattr(document, name) for name in RankClass.__struct_fields__}
            return [("$", RankClass(**shared))]
        stray = [name for name in RankClass.__struct_fields__ if name not in ("name", "deps_by", "nodes")]
        stray = [name for name in stray if getattr(document, name)]
        if stray:
            raise FormatError(
                f"{stray[0]!r} stands beside 'rank_classes'; it belongs into a class",
                path=self._path,
                position=self._place(f"$.{stray[0]}"),
                hint="move it into each of 'rank_classes' that needs it",
            )
        classes = document.rank_classes or ()
        if not classes:
            raise FormatError(
                "'rank_classes' is empty",
                path=self._path,
                position=self._place("$.rank_classes"),
                hint=_HINT,
            )
        return [(f"$.rank_classes[{index}]", fields) for index, fields in enumerate(classes)]

    def _num_ranks(self, document: Document) -> int | None:
        """The number of ranks: as the document says, else as the user says."""
        wanted = self._options.num_devices
        stated = document.num_ranks
        if stated is None and document.rank_class is None:
            return wanted
        if wanted is not None and stated is not None and wanted != stated:
            self._diagnostics.warning(
                "op-graph.num-devices-ignored",
                "num_ranks",
                f"the document states {stated} ranks; {wanted} were asked for",
                path=self._path,
            )
        return stated

    def _graph(self, where: str, fields: RankClass, num_ranks: int) -> OpGraph:
        fault = Fault(self._path, self._options.lenient, self._diagnostics)
        try:
            columns = NodeColumns(fields, num_ranks)
        except (ValueError, OverflowError) as error:
            raise FormatError(str(error), path=self._path, position=where, hint=_HINT) from error
        for number, raw in enumerate(fields.nodes):
            try:
                columns.add(number, _NODE.decode(raw))
            except _DECODE_ERRORS as error:
                raise self._node_error(error, where, fields, number) from error
            except (ValueError, OverflowError) as error:
                raise self._value_error(error, fields, number) from error
            if self._options.progress and number % _PROGRESS_NODES == 0:
                self._options.progress(number, len(fields.nodes))
        try:
            graph = columns.build(fault)
        except ValueError as error:
            raise FormatError(str(error), path=self._path, position=where, hint=_HINT) from error
        check_cycle(graph, fault)
        check_values(graph, num_ranks, fault, f"{where}.")
        return graph

    def _place(self, path: str) -> str:
        """Line, byte and path of a value of the document."""
        return f"{_position_text(self._data, _byte_of_path(self._data, path))}, {path}"

    def _node_error(self, error: Exception, where: str, fields: RankClass, number: int) -> FormatError:
        raw = fields.nodes[number]
        start = _offset_in(self._data, raw)
        return self._decode_error(error, raw, start, f"{where}.nodes[{number}]")

    def _value_error(self, error: Exception, fields: RankClass, number: int) -> FormatError:
        raw = fields.nodes[number]
        identity = _NODE.decode(raw).id
        where = _position_text(self._data, _offset_in(self._data, raw))
        shown = number if identity is None else identity
        return FormatError(str(error), path=self._path, position=f"{where}, node {shown}", hint=_HINT)

    def _decode_error(
        self, error: Exception, text: bytes | msgspec.Raw, start: int, where: str
    ) -> FormatError:
        """What the decoder said, with the path from the root and the position in the file."""
        if isinstance(error, RecursionError):
            position = f"{_position_text(self._data, start)}, {where}"
            return FormatError(
                "the document is nested too deeply", path=self._path, position=position, hint=_HINT
            )
        if isinstance(error, UnicodeDecodeError):
            byte = max(self._data.find(error.object, start), 0) + error.start
            return FormatError(
                f"the text is not UTF-8: {error.reason}",
                path=self._path,
                position=_position_text(self._data, byte),
                hint="save the file as UTF-8",
            )
        message, path, byte = _split_message(str(error))
        if message == _TRUNCATED:
            message, byte = "the document ends early", len(self._data) - start
        offset = start + (byte if byte >= 0 else _byte_of_path(text, path))
        position = _position_text(self._data, offset)
        if byte < 0:
            position = f"{position}, {where}{path[1:]}"
        return FormatError(message, path=self._path, position=position, hint=_HINT)


# Where in a JSON text a fault stands: the byte and line of a path like ``$.nodes[3].flops``.

_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_AT_PATH = re.compile(r"^(?P<message>.*?)(?: - at `(?P<where>key in )?(?P<path>\$[^`]*)`)?$", re.DOTALL)
_AT_BYTE = re.compile(r"^(?:JSON is malformed: )?(?P<message>.*) \(byte (?P<byte>\d+)\)$", re.DOTALL)

_MAX_SPLIT = 1 << 22
"""Lists with more commas are not split to say where an item of theirs starts: that takes memory."""
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


def _split_message(text: str) -> tuple[str, str, int]:
    """A decoder's message, the JSON path it names (``$`` where none) and the byte it names (-1 for none)."""
    at_byte = _AT_BYTE.match(text)
    if at_byte:
        return at_byte["message"], "$", int(at_byte["byte"])
    at_path = _AT_PATH.match(text)
    if at_path is None:
        return text, "$", -1
    return at_path["message"], at_path["path"] or "$", -1


def _offset_in(whole: bytes | msgspec.Raw, part: msgspec.Raw) -> int:
    """Where a raw value starts in the text it was cut from: raw values share the text's memory."""
    return _address(memoryview(part)) - _address(memoryview(whole))


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _byte_of_path(text: bytes | msgspec.Raw, path: str) -> int:
    """The byte where the value at ``path`` starts, or the deepest enclosing value that is well formed."""
    current: bytes | msgspec.Raw = text
    for step in _STEP.finditer(path):
        name, index = step.groups()
        if index and _num_commas(current) > _MAX_SPLIT:
            break
        try:
            found = _FIELDS.decode(current)[name] if name else _ITEMS.decode(current)[int(index)]
        except (msgspec.MsgspecError, KeyError, IndexError, RecursionError, UnicodeDecodeError):
            break
        current = found
    return _offset_in(text, current) if isinstance(current, msgspec.Raw) else 0


def _num_commas(text: bytes | msgspec.Raw) -> int:
    """One less than the most items a list can have."""
    return int(np.count_nonzero(np.frombuffer(memoryview(text), np.uint8) == ord(",")))


def _position_text(data: bytes, byte: int) -> str:
    """``line 3, byte 57``; lines count from 1."""
    line = data.count(b"\n", 0, byte) + 1
    return f"line {line}, byte {byte}"
