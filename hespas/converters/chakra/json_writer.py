"""A workload as Chakra traces in JSON: ``NAME.{rank}.json`` and ``comm_group.json`` in a folder, or one file.

A file is one JSON document, a node a line. Its list ``workload_graph`` has the keys that Chakra's C++ feeder
reads (:mod:`.json_nodes`); beside them stands, in protobuf-JSON, everything else that a ``.et`` file holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from hespas.converters.chakra.contract import INTEGER_FIELDS, WHOLE_WORLD
from hespas.converters.chakra.frames import frames, open_trace
from hespas.converters.chakra.json_frames import METADATA_KEY, NODE_LIST, SCHEMA, SCHEMA_KEY, bare_name
from hespas.converters.chakra.json_nodes import (
    COMMUNICATION_KEYS,
    FEEDER_KEYS,
    HOST_KEY,
    JsonValue,
    message_bytes,
    message_json,
    wire_fields,
    wire_integers,
)
from hespas.converters.chakra.writer import chosen_ranks, write_chakra
from hespas.converters.format import Value, WriteOptions
from hespas.files.streams import open_output
from hespas.graph import Diagnostics, Workload
from hespas.graph.errors import OutputError, UsageError
from hespas.schemas.chakra.tables import (
    ATTRIBUTE,
    GLOBAL_METADATA,
    IO_INFO,
    AttributeField,
    NodeField,
    NodeType,
)

__all__ = ["write_chakra_json"]

_COMMUNICATION = frozenset({NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL})
_SHORT = 256
"""Attributes of so many bytes are remembered: the same few stand on most nodes."""


def write_chakra_json(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    """Write the chosen ranks: a directory, or a file where there is one rank only.

    Raises what :func:`.writer.write_chakra` does, which makes the traces; they are rewritten one by one in a
    scratch folder beside the destination. Memory: that of the first writer, and a block of text.
    """
    several = isinstance(value, Workload) and chosen_ranks(value, options)
    if several and len(several) > 1 and options.name.endswith((".json", ".json.gz")):
        raise UsageError(
            f"{len(several):,} ranks are as many files, and this names one",
            path=options.name,
            hint="name a directory, or choose one rank with --ranks",
        )
    packed = options.name.endswith(".gz") or path.suffix == ".gz"
    bare = bare_name(options.name)  # of a file, the name says which rank it is of
    inner = replace(options, name=bare if bare == options.name else f"{bare}.et", progress=None)
    ignored = _Ignored()
    try:
        with TemporaryDirectory(prefix=".hespas-", dir=path.parent) as folder:
            made = Path(folder) / "traces"
            write_chakra(value, made, inner, diagnostics)
            if made.is_dir():
                _write_directory(made, path, options, ignored, packed=packed)
            else:
                _write_file(made, path, ignored, packed=packed)
    except OutputError as error:
        error.path = str(path)
        raise
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror or error}", path=str(path)) from error
    ignored.report(path.name, diagnostics)


def _write_directory(
    made: Path, path: Path, options: WriteOptions, ignored: _Ignored, *, packed: bool
) -> None:
    path.mkdir()
    files = sorted(made.iterdir())
    for done, file in enumerate(files):
        if file.suffix != ".et":
            file.replace(path / file.name)
            continue
        _write_file(file, path / f"{file.stem}.json{'.gz' if packed else ''}", ignored, packed=packed)
        file.unlink()
        if options.progress:
            options.progress(done + 1, len(files))


def _write_file(made: Path, path: Path, ignored: _Ignored, *, packed: bool) -> None:
    """One trace as one document."""
    with open_output(path, packed=packed) as stream:
        separator = b""
        for number, message in enumerate(_messages(made)):
            if not number:
                stream.write(_head(message))
                continue
            stream.write(separator)
            stream.write(_node_text(message, ignored))
            separator = b",\n"
        stream.write(b"\n]}\n")


def _messages(path: Path) -> Iterator[bytes]:
    for batch in frames(open_trace(path)):
        yield from (batch.message(index) for index in range(len(batch)))


def _head(metadata: bytes) -> bytes:
    header = {SCHEMA_KEY: SCHEMA, METADATA_KEY: message_json(GLOBAL_METADATA, metadata)}
    return msgspec.json.encode(header)[:-1] + f',\n"{NODE_LIST}":[\n'.encode()


class _Attribute(NamedTuple):
    """An attribute as text; ``number`` is its value where that is an integer or bool, ``group`` says that it
    names a process group.
    """

    name: str
    number: int | None
    text: msgspec.Raw
    group: bool
    is_exact: bool


@dataclass(slots=True)
class _Ignored:
    """What Chakra's feeder of JSON files does not look at, and what JSON cannot say; counts of nodes."""

    control: int = 0
    groups: int = 0
    inexact: int = 0

    def report(self, name: str, diagnostics: Diagnostics) -> None:
        """Say it."""
        message = "nodes have ctrl_deps, which Chakra's C++ feeder does not read from JSON"
        diagnostics.info("chakra-json.control-deps", name, message, count=self.control)
        message = "collectives have a process group, which Chakra's C++ feeder does not read from JSON"
        diagnostics.info("chakra-json.process-group", name, message, count=self.groups)
        message = "attributes hold a NaN with a payload, of which JSON keeps that it is a NaN"
        diagnostics.warning("chakra-json.nan-payload", name, message, count=self.inexact)


def _attribute(data: bytes) -> _Attribute:
    return _short_attribute(data) if len(data) <= _SHORT else _new_attribute(data)


def _new_attribute(data: bytes) -> _Attribute:
    value = message_json(ATTRIBUTE, data)
    fields = dict(wire_fields(data))
    name = value.get("name")
    number: int | None = None
    group = False
    for field in fields:
        stated = value.get(ATTRIBUTE.fields[field].name)
        if field in INTEGER_FIELDS and isinstance(stated, bool | int | str):
            number = int(stated)
        elif field == AttributeField.STRING:
            group = name == "pg_name" and stated not in WHOLE_WORLD
    text = msgspec.Raw(msgspec.json.encode(value))
    is_exact = message_bytes(ATTRIBUTE, value, []) == data
    return _Attribute(name if isinstance(name, str) else "", number, text, group, is_exact)


_SHORT_NODE = 2048
"""Longer nodes are not remembered: 16,384 of these are 32 MiB and as much text."""

_short_attribute = lru_cache(maxsize=1 << 14)(_new_attribute)


class _Line(NamedTuple):
    """A node as one line, and what of it the feeder ignores or JSON cannot say."""

    text: bytes
    control: int
    groups: int
    inexact: int


def _node_text(data: bytes, ignored: _Ignored) -> bytes:
    """A node as one line, counted; ranks of one class have few nodes of their own."""
    line = _short_line(data) if len(data) <= _SHORT_NODE else _new_line(data)
    ignored.control += line.control
    ignored.groups += line.groups
    ignored.inexact += line.inexact
    return line.text


def _new_line(data: bytes) -> _Line:
    """The feeder's keys first."""
    numbers: dict[int, int] = {}
    deps: dict[int, list[int]] = {}
    io: dict[int, JsonValue] = {}
    attributes: list[_Attribute] = []
    name = ""
    for field, raw in wire_fields(data):
        if isinstance(raw, int):
            numbers[field] = raw
        elif field == NodeField.ATTR:
            attributes.append(_attribute(raw))
        elif field == NodeField.NAME:
            name = raw.decode()
        elif field in (NodeField.CTRL_DEPS, NodeField.DATA_DEPS):
            deps[field] = wire_integers(raw)
        else:
            io[field] = message_json(IO_INFO, raw)
    kind = numbers.get(NodeField.TYPE, 0)
    node: dict[str, object] = {
        "Id": numbers.get(NodeField.ID, 0),
        "Name": name,
        "NodeType": kind if kind < 1 << 63 else kind - (1 << 64),
        **_feeder_values(attributes, is_communication=kind in _COMMUNICATION),
        "runtime": numbers.get(NodeField.DURATION_MICROS, 0),
        "data_deps": deps.get(NodeField.DATA_DEPS, []),
    }
    for field, key in _OTHER_FIELDS.items():
        found = deps.get(field) or io.get(field)
        if found is None:
            found = numbers.get(field)
        if found is not None:
            node[key] = found
    node["attr"] = [attribute.text for attribute in attributes]
    return _Line(
        text=msgspec.json.encode(node),
        control=int(NodeField.CTRL_DEPS in deps),
        groups=int(kind == NodeType.COMM_COLL and any(attribute.group for attribute in attributes)),
        inexact=sum(not attribute.is_exact for attribute in attributes),
    )


_short_line = lru_cache(maxsize=1 << 14)(_new_line)


_OTHER_FIELDS = {
    NodeField.CTRL_DEPS: "ctrl_deps",
    NodeField.START_TIME_MICROS: "start_time_micros",
    NodeField.INPUTS: "inputs",
    NodeField.OUTPUTS: "outputs",
}


def _feeder_values(attributes: list[_Attribute], *, is_communication: bool) -> dict[str, object]:
    """The attributes that the feeder knows; of several of one name the first counts."""
    stated: dict[str, int] = {}
    for attribute in attributes:
        if attribute.name in FEEDER_KEYS and attribute.number is not None:
            stated.setdefault(attribute.name, attribute.number)
    found: dict[str, object] = {HOST_KEY: stated.get(HOST_KEY, 0) != 0}
    if is_communication:
        found.update({key: stated[key] for key in COMMUNICATION_KEYS if key in stated})
    return found
