"""Reading and writing of Chakra traces in JSON: https://github.com/mlcommons/chakra.

A written file is one JSON document with one node per line. Its list ``workload_graph`` has the keys that
Chakra's C++ feeder reads (:mod:`.nodes`), and everything else that a trace holds in protobuf-JSON. Positions
are lines of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from hespas.converters.chakra import JSON_RANK_FILE, JSON_SCHEMA
from hespas.converters.chakra.checks import Faults
from hespas.converters.chakra.contract import INTEGER_BOUNDS
from hespas.converters.chakra.forms import TraceForm
from hespas.converters.chakra.json import (
    METADATA_KEY,
    NODE_LIST,
    SCHEMA_KEY,
    JsonFrames,
    JsonMessage,
    KnownNodes,
)
from hespas.converters.chakra.json.nodes import (
    COMMUNICATION_KEYS,
    FEEDER_KEYS,
    HOST_KEY,
    JsonValue,
    message_json,
    wire_fields,
    wire_integers,
)
from hespas.converters.chakra.reader import read_traces
from hespas.converters.chakra.wire import ByteRows, Bytes, ByteWindow
from hespas.converters.chakra.wire.decode import FrameBatch, framed_messages, refuse_crowded
from hespas.converters.chakra.writer import write_traces
from hespas.converters.format import ReadOptions, Value, WriteOptions
from hespas.graph import Diagnostics, Workload
from hespas.graph.errors import FormatError
from hespas.schemas.chakra import LATEST_VERSIONS
from hespas.schemas.chakra.tables import ATTRIBUTE, GLOBAL_METADATA, IO_INFO, NodeField, NodeType

__all__ = ["read_chakra_json", "write_chakra_json"]

_BATCH_BYTES = 1 << 20
"""Size of the messages that are decoded together, and of the text that is written at once."""


def read_chakra_json(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Read a JSON trace, or a directory of files ``NAME.{rank}.json`` with a ``comm_group.json``.

    Raises the errors of :func:`.reader.read_traces`. Memory: the columns, and a block of text.
    """
    return read_traces(path, options, diagnostics, _form())


def write_chakra_json(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    """Write the chosen ranks as JSON traces: a directory, or a file if there is only one rank.

    Raises the errors of :func:`.writer.write_traces`.
    """
    write_traces(value, path, options, diagnostics, _form())


def _form() -> TraceForm:
    """Return the JSON form of traces, with a new cache of the nodes that recur in the files of one job."""
    return TraceForm(
        name="chakra-json",
        suffix=".json",
        rank_file=JSON_RANK_FILE,
        ending=re.compile(r"(\.json)?(\.gz)?$"),
        batches=partial(_batches, KnownNodes()),
        content=_document,
        version=LATEST_VERSIONS[-1],
        findings=(
            (
                "chakra-json.control-deps",
                "nodes have ctrl_deps, which Chakra's C++ feeder does not read from JSON",
            ),
            (
                "chakra-json.process-group",
                "collectives have a process group, which Chakra's C++ feeder does not read from JSON",
            ),
            ("chakra-json.nan-payload", "attributes hold a NaN with a payload, which JSON cannot represent"),
        ),
    )


def _batches(cache: KnownNodes, path: Path, max_bytes: int | None, faults: Faults) -> Iterator[FrameBatch]:
    """Yield the messages of a file in batches. If the file has a fault, the messages before it are yielded
    first.
    """
    reader = JsonFrames(path, faults, max_bytes=max_bytes, cache=cache)
    waiting: list[JsonMessage] = []
    size = 0
    with closing(reader.messages()) as messages:
        try:
            for message in messages:
                waiting.append(message)
                size += len(message.data)
                if size >= _BATCH_BYTES:
                    full, waiting, size = waiting, [], 0
                    yield _batch(full, path)
        except FormatError:
            if waiting:
                yield _batch(waiting, path)
            raise
    if waiting:
        yield _batch(waiting, path)


def _batch(messages: list[JsonMessage], path: Path) -> FrameBatch:
    texts = ByteRows.from_rows([message.data for message in messages])
    lines = np.array([message.line for message in messages], np.int64)
    window = ByteWindow.holding(texts.data)
    batch = FrameBatch(window, texts.offsets[:-1], texts.offsets[1:], lines, unit="line")
    refuse_crowded(batch, str(path))
    return batch


def _document(pieces: Iterable[Bytes]) -> Iterator[Bytes]:
    """Convert the pieces of a binary trace to the pieces of a JSON document."""
    lines: list[bytes] = []
    size = 0
    separator = b""
    messages = (message for piece in pieces for message in framed_messages(piece.tobytes()))
    for number, message in enumerate(messages):
        if not number:
            header = {SCHEMA_KEY: JSON_SCHEMA, METADATA_KEY: message_json(GLOBAL_METADATA, message)}
            lines.append(msgspec.json.encode(header)[:-1] + f',\n"{NODE_LIST}":[\n'.encode())
            continue
        line = _short_line(message) if len(message) <= _SHORT_NODE else _new_line(message)
        lines += (separator, line)
        separator = b",\n"
        size += len(line)
        if size >= _BATCH_BYTES:
            yield np.frombuffer(b"".join(lines), np.uint8)
            lines, size = [], 0
    lines.append(b"\n]}\n")
    yield np.frombuffer(b"".join(lines), np.uint8)


_COMMUNICATION = frozenset({NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL})
_SHORT = 256
"""Largest attribute that is cached [bytes]: most nodes have the same few attributes."""


class _AttributeText(NamedTuple):
    """Attribute of a node as JSON text. ``number`` is its value if that is an integer or bool."""

    name: str
    number: int | None
    text: msgspec.Raw


def _new_attribute(data: bytes) -> _AttributeText:
    value = message_json(ATTRIBUTE, data)
    name = value.get("name")
    number: int | None = None
    for tag, _ in wire_fields(data):
        field_value = value.get(ATTRIBUTE.fields[tag].name)
        if tag in INTEGER_BOUNDS and isinstance(field_value, bool | int | str):
            number = int(field_value)
    text = msgspec.Raw(msgspec.json.encode(value))
    return _AttributeText(name if isinstance(name, str) else "", number, text)


_SHORT_NODE = 2048
"""Largest node that is cached [bytes]: 16,384 of them take 32 MiB and as much text."""

_short_attribute = lru_cache(maxsize=1 << 14)(_new_attribute)


def _new_line(data: bytes) -> bytes:
    """Convert an encoded node to one line of JSON, with the keys for Chakra's feeder first."""
    numbers: dict[int, int] = {}
    deps: dict[int, list[int]] = {}
    io: dict[int, JsonValue] = {}
    attributes: list[_AttributeText] = []
    name = ""
    for tag, raw in wire_fields(data):
        if isinstance(raw, int):
            numbers[tag] = raw
        elif tag == NodeField.ATTR:
            attributes.append(_short_attribute(raw) if len(raw) <= _SHORT else _new_attribute(raw))
        elif tag == NodeField.NAME:
            name = raw.decode()
        elif tag in (NodeField.CTRL_DEPS, NodeField.DATA_DEPS):
            deps[tag] = wire_integers(raw)
        else:
            io[tag] = message_json(IO_INFO, raw)
    kind = numbers.get(NodeField.TYPE, 0)
    # Of several attributes with one name the first one counts.
    feeder_values = {
        attribute.name: attribute.number
        for attribute in reversed(attributes)
        if attribute.name in FEEDER_KEYS and attribute.number is not None
    }
    keys = COMMUNICATION_KEYS if kind in _COMMUNICATION else ()
    node: dict[str, object] = {
        "Id": numbers.get(NodeField.ID, 0),
        "Name": name,
        "NodeType": kind if kind < 1 << 63 else kind - (1 << 64),
        HOST_KEY: feeder_values.get(HOST_KEY, 0) != 0,
        **{key: feeder_values[key] for key in keys if key in feeder_values},
        "runtime": numbers.get(NodeField.DURATION_MICROS, 0),
        "data_deps": deps.get(NodeField.DATA_DEPS, []),
    }
    for tag, key in _OTHER_FIELDS.items():
        field_value = deps.get(tag) or io.get(tag)
        if field_value is None:
            field_value = numbers.get(tag)
        if field_value is not None:
            node[key] = field_value
    node["attr"] = [attribute.text for attribute in attributes]
    return msgspec.json.encode(node)


_short_line = lru_cache(maxsize=1 << 14)(_new_line)

_OTHER_FIELDS = {
    NodeField.CTRL_DEPS: "ctrl_deps",
    NodeField.START_TIME_MICROS: "start_time_micros",
    NodeField.INPUTS: "inputs",
    NodeField.OUTPUTS: "outputs",
}
