"""Reader of op graphs in JSON. Format: ``hespas/schemas/op_graph.schema.json``.

The document is decoded once without its nodes, which are then decoded one at a time into flat columns. Memory
is thus the text plus the graph.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from hespas.converters.format import ReadOptions, warn_of_whole_job
from hespas.converters.op_graph.document import (
    SCHEMA_ID,
    DocumentOutline,
    DocumentVersion,
    NodeEntry,
    OpGraphDocument,
    RankClass,
    unescape_text,
)
from hespas.converters.op_graph.json_nodes import NodeColumns
from hespas.converters.op_graph.legality import FaultReporter, check_cycle, check_values, decode_ranks
from hespas.files.streams import read_bytes
from hespas.graph import Diagnostics, OpGraph, Workload
from hespas.graph.errors import FormatError, UnsupportedError

__all__ = ["read_json"]

_HINT = "compare the document with hespas/schemas/op_graph.schema.json"
_TRUNCATED = "Input data was truncated"
"""Message of msgspec, which has no position."""
_NOT_UTF8 = "Invalid UTF-8"
"""Start of the message of msgspec 0.23, which does not raise ``UnicodeDecodeError``."""
_PROGRESS_NODES = 1 << 14
_NODE = msgspec.json.Decoder(NodeEntry)
_OUTLINE = msgspec.json.Decoder(DocumentOutline)
_DOCUMENT = msgspec.json.Decoder(OpGraphDocument)
_VERSION = msgspec.json.Decoder(DocumentVersion)

_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def read_json(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Return the workload of an op graph in JSON.

    Raises ``FormatError`` with line and byte for a malformed document and, unless ``options.lenient``, for
    duplicate ids, dangling dependencies and cycles. Raises ``UnsupportedError`` for another version of the
    format.
    """
    workload = _JsonGraphReader(path, options, diagnostics).read()
    return warn_of_whole_job(workload, "op-graph", path, diagnostics)


class _JsonGraphReader:
    """Reader of one JSON document. It has the text, from which it finds the positions of faults."""

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
            with suppress(*_DECODE_ERRORS):  # another version of the format explains the error
                self._check_schema(_VERSION.decode(self._data).schema)
            raise self._decode_error(error, self._data, 0, "$") from error
        self._check_schema(document.schema)
        classes = self._classes(document)
        try:
            wanted, num_ranks = self._options.num_devices, document.num_ranks
            if wanted is not None and num_ranks is not None and wanted != num_ranks:
                self._diagnostics.warning(
                    "op-graph.num-devices-ignored",
                    "num_ranks",
                    f"the document states {num_ranks} ranks; {wanted} were requested",
                    path=self._path,
                )
            if num_ranks is None and document.rank_class is None:
                num_ranks = wanted
            ranks = decode_ranks(document.rank_class, num_ranks, len(classes))
            name = unescape_text(document.name)
            metadata = {unescape_text(key): unescape_text(value) for key, value in document.metadata.items()}
        except ValueError as error:
            raise FormatError(str(error), path=self._path, position="header", hint=_HINT) from error
        graphs = tuple(self._graph(where, fields, len(ranks)) for where, fields in classes)
        return Workload(name=name, classes=graphs, rank_class=ranks, metadata=metadata)

    def _check_schema(self, schema: str) -> None:
        if schema != SCHEMA_ID:
            raise UnsupportedError(
                f"the document has schema {schema[:80]!r}, but this version reads {SCHEMA_ID!r}",
                path=self._path,
                hint="write it again with a matching version of hespas",
            )

    def _classes(self, document: OpGraphDocument) -> list[tuple[str, RankClass]]:
        """Return each rank class of the document with its JSON path."""
        if (document.nodes is None) == (document.rank_classes is None):
            raise FormatError(
                "a document needs either 'nodes' (one program) or 'rank_classes'",
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
                f"{stray[0]!r} is outside of 'rank_classes', but it belongs to a class",
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

    def _graph(self, where: str, fields: RankClass, num_ranks: int) -> OpGraph:
        fault = FaultReporter(self._path, self._options.lenient, self._diagnostics)
        try:
            columns = NodeColumns(fields, num_ranks)
        except (ValueError, OverflowError) as error:
            raise FormatError(str(error), path=self._path, position=where, hint=_HINT) from error
        for number, raw in enumerate(fields.nodes):
            try:
                columns.add(number, _NODE.decode(raw))
            except _DECODE_ERRORS as error:
                node_text = fields.nodes[number]
                start = _offset_in(self._data, node_text)
                raise self._decode_error(error, node_text, start, f"{where}.nodes[{number}]") from error
            except (ValueError, OverflowError) as error:
                raw_node = fields.nodes[number]
                identity = _NODE.decode(raw_node).id
                node_position = _position_text(self._data, _offset_in(self._data, raw_node))
                shown = number if identity is None else identity
                raise FormatError(
                    str(error), path=self._path, position=f"{node_position}, node {shown}", hint=_HINT
                ) from error
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
        """Return the position of the value at a JSON path: line, byte and path."""
        return f"{_position_text(self._data, _byte_of_path(self._data, path))}, {path}"

    def _decode_error(
        self, error: Exception, text: bytes | msgspec.Raw, start: int, where: str
    ) -> FormatError:
        """Convert a decoding error in a part of the document to a ``FormatError`` with its position.
        ``start`` is the offset of the part, and ``where`` its path, to which the path of the error is
        appended.
        """
        if isinstance(error, RecursionError):
            position = f"{_position_text(self._data, start)}, {where}"
            return FormatError(
                "the document is nested too deeply", path=self._path, position=position, hint=_HINT
            )
        if str(error).startswith(_NOT_UTF8):
            try:
                bytes(text).decode()
            except UnicodeDecodeError as invalid:
                error = invalid
        if isinstance(error, UnicodeDecodeError):
            byte = max(self._data.find(error.object, start), 0) + error.start
            return FormatError(
                f"the text is not UTF-8: {error.reason}",
                path=self._path,
                position=_position_text(self._data, byte),
                hint="save the file as UTF-8",
            )
        error_text = str(error)
        at_byte = _AT_BYTE.match(error_text)
        if at_byte:
            message, path, byte = at_byte["message"], "$", int(at_byte["byte"])
        else:
            at_path = _AT_PATH.match(error_text)
            if at_path is None:
                message, path, byte = error_text, "$", -1
            else:
                message, path, byte = at_path["message"], at_path["path"] or "$", -1
        if message == _TRUNCATED:
            message, byte = "the document ends early", len(self._data) - start
        offset = start + (byte if byte >= 0 else _byte_of_path(text, path))
        position = _position_text(self._data, offset)
        if byte < 0:
            position = f"{position}, {where}{path[1:]}"
        return FormatError(message, path=self._path, position=position, hint=_HINT)


_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_AT_PATH = re.compile(r"^(?P<message>.*?)(?: - at `(?P<where>key in )?(?P<path>\$[^`]*)`)?$", re.DOTALL)
_AT_BYTE = re.compile(r"^(?:JSON is malformed: )?(?P<message>.*) \(byte (?P<byte>\d+)\)$", re.DOTALL)

_MAX_SPLIT = 1 << 22
"""Limit of commas of a list that is split to locate an item, which takes memory."""
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


def _offset_in(whole: bytes | msgspec.Raw, part: msgspec.Raw) -> int:
    """Return the offset of an undecoded value in its text, from their memory addresses."""
    return _address(memoryview(part)) - _address(memoryview(whole))


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _byte_of_path(text: bytes | msgspec.Raw, path: str) -> int:
    """Return the offset in the text of the value at a JSON path, or of the deepest well-formed value that
    contains it.
    """
    current: bytes | msgspec.Raw = text
    for step in _STEP.finditer(path):
        name, index = step.groups()
        if (
            index
            and int(np.count_nonzero(np.frombuffer(memoryview(current), np.uint8) == ord(","))) > _MAX_SPLIT
        ):
            break
        try:
            value = _FIELDS.decode(current)[name] if name else _ITEMS.decode(current)[int(index)]
        except (msgspec.MsgspecError, KeyError, IndexError, RecursionError, UnicodeDecodeError):
            break
        current = value
    return _offset_in(text, current) if isinstance(current, msgspec.Raw) else 0


def _position_text(data: bytes, byte: int) -> str:
    """Return ``line 3, byte 57``; lines count from 1."""
    line = data.count(b"\n", 0, byte) + 1
    return f"line {line}, byte {byte}"
