"""Reading and writing of Chakra traces in JSON: https://github.com/mlcommons/chakra.

To read, files are copied node by node to ``.et`` files of schema 0.0.4 in a temporary folder and read from
there; errors and findings name the JSON file and its line. A written file is one JSON document with one node
per line. Its list ``workload_graph`` has the keys that Chakra's C++ feeder reads (:mod:`.nodes`), and
everything else that a trace holds in protobuf-JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from hespas.converters.chakra import JSON_RANK_FILE, JSON_SCHEMA
from hespas.converters.chakra.comm_groups import FILE_NAME, USUAL_NAMES
from hespas.converters.chakra.contract import INTEGER_FIELDS, WHOLE_WORLD
from hespas.converters.chakra.json import (
    METADATA_KEY,
    NODE_LIST,
    SCHEMA_KEY,
    JsonFrames,
    JsonMessage,
    KnownNodes,
    bare_name,
)
from hespas.converters.chakra.json.nodes import (
    COMMUNICATION_KEYS,
    FEEDER_KEYS,
    HOST_KEY,
    JsonValue,
    message_bytes,
    message_json,
    wire_fields,
    wire_integers,
)
from hespas.converters.chakra.reader import read_chakra
from hespas.converters.chakra.wire.decode import CutOffError, frames, open_trace
from hespas.converters.chakra.writer import chosen_ranks, write_chakra
from hespas.converters.format import ReadOptions, Value, WriteOptions
from hespas.files.streams import open_output
from hespas.files.wire import encode_varint
from hespas.graph import Diagnostic, Diagnostics, Workload
from hespas.graph.diagnostics import Severity
from hespas.graph.errors import FormatError, HespasError, OutputError, UsageError
from hespas.schemas.chakra import LATEST_VERSIONS
from hespas.schemas.chakra.tables import (
    ATTRIBUTE,
    GLOBAL_METADATA,
    IO_INFO,
    AttributeField,
    NodeField,
    NodeType,
)

__all__ = ["read_chakra_json", "write_chakra_json"]

_BYTE = re.compile(r"byte (\d+)")
_CUT_FRAME = b"\x01"
"""Frame without its content."""


def read_chakra_json(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Read a file, or a directory of files ``NAME.{rank}.json`` with a ``comm_group.json``.

    Raises the errors of :func:`.reader.read_chakra`. Memory: that of the ``.et`` files, and a block of text.
    """
    with TemporaryDirectory(prefix="hespas-") as folder:
        copies = _TraceCopies(path if path.is_dir() else path.parent, Path(folder), options)
        copy = copies.of_directory(path, diagnostics) if path.is_dir() else copies.of_file(path, diagnostics)
        inner = replace(options, version=LATEST_VERSIONS[-1], progress=None)
        try:
            workload = read_chakra(copy, inner, _CopyDiagnostics(copies, diagnostics))
        except HespasError as error:
            copies.rename(error)
            raise
    return replace(workload, metadata={**workload.metadata, "format": "chakra-json"})


@dataclass(slots=True, eq=False)
class _TraceCopies:
    """Copies, in ``scratch``, of the JSON files in ``folder`` as ``.et`` files."""

    folder: Path
    scratch: Path
    options: ReadOptions
    cut: bool = False
    _sources: dict[str, Path] = field(default_factory=dict[str, Path])
    _lines: tuple[str, dict[int, int]] = ("", {})
    _cache: KnownNodes = field(default_factory=KnownNodes)

    def of_file(self, path: Path, diagnostics: Diagnostics) -> Path:
        """Return the copy of one file."""
        copy = self._copy(path, diagnostics)
        self._link_groups()
        if self.options.progress:
            self.options.progress(1, 1)
        return copy

    def of_directory(self, path: Path, diagnostics: Diagnostics) -> Path:
        """Return the folder with the copies of all rank files."""
        files = [entry for entry in sorted(path.iterdir()) if JSON_RANK_FILE.match(entry.name)]
        if not files:
            raise FormatError(
                "the folder contains no rank files",
                code="ET022",
                path=str(path),
                hint="name rank files NAME.0.json, NAME.1.json, ...",
            )
        for done, file in enumerate(files):
            if f"{bare_name(file.name)}.et" in self._sources:
                message, hint = "the folder has this file twice, gzipped and not", "keep one of the two files"
                raise FormatError(message, code="ET022", path=str(file), hint=hint)
            self._copy(file, diagnostics)
            if self.options.progress:
                self.options.progress(done + 1, len(files))
        self._link_groups()
        return self.scratch

    def _link_groups(self) -> None:
        paths = (self.folder / name for name in USUAL_NAMES)
        groups = next((path for path in paths if path.is_file()), None)
        if groups is not None:
            (self.scratch / FILE_NAME).symlink_to(groups.resolve())

    def _copy(self, path: Path, diagnostics: Diagnostics) -> Path:
        """Copy one file; keep the nodes before a cut if the options allow it."""
        copy = self.scratch / f"{bare_name(path.name)}.et"
        self._sources[copy.name] = path
        written = 0
        with open_output(copy, packed=False) as stream:
            try:
                for message in self._messages(path, diagnostics):
                    stream.write(encode_varint(len(message.data)))
                    stream.write(message.data)
                    written += 1
            except FormatError as error:
                self._keep_before(error, max(0, written - 1), path, diagnostics)
                stream.write(_CUT_FRAME)
        return copy

    def _messages(self, path: Path, diagnostics: Diagnostics) -> Iterator[JsonMessage]:
        options = self.options
        frames = JsonFrames(
            path,
            diagnostics,
            max_bytes=options.max_bytes,
            lenient=options.lenient,
            cache=self._cache,
        )
        return frames.messages()

    def _keep_before(self, error: FormatError, nodes: int, path: Path, diagnostics: Diagnostics) -> None:
        """Continue after an error if the options allow it: a file that was cut off can be recovered."""
        is_cut = isinstance(error, CutOffError)
        recovers = is_cut and self.options.recover
        if not (self.options.lenient or recovers):
            if is_cut and nodes:
                error.hint = f"{error.hint}; `recover` keeps what is before the cut (nodes: {nodes:,})"
            raise error
        self.cut = True
        message = f"{error.text}; the {nodes} nodes before it are kept"
        severity = Severity.WARNING if recovers else Severity.ERROR
        diagnostics.add("ET001", severity, error.position or "", message, path=str(path))

    def rename(self, error: HespasError) -> None:
        """Replace the names of copies in an error by those of the JSON files."""
        copy = Path(error.path or "").name
        error.position = error.position and self.lines_for(error.position, copy)
        error.path, error.text = error.path and self.named(error.path), self.named(error.text)
        error.message = self.named(error.message)
        error.args = (error.message,)

    def named(self, text: str) -> str:
        """Return a text with the names of the JSON files in place of their copies."""
        text = text.replace(f"{self.scratch}/", "" if self.folder == Path() else f"{self.folder}/")
        text = text.replace(str(self.scratch), str(self.folder))
        for copy, path in self._sources.items():
            if copy in text:
                text = text.replace(copy, path.name)
        return text

    def lines_for(self, position: str, copy: str) -> str:
        """Return a position with the line in place of the byte in the copy."""
        match = _BYTE.search(position)
        if not match or copy not in self._sources:
            return position
        if self._lines[0] != copy:  # read the JSON file again: lines by the byte of each frame in the copy
            lines: dict[int, int] = {}
            byte = 0
            with suppress(FormatError):  # it was reported before
                for message in self._messages(self._sources[copy], Diagnostics(keep=0)):
                    lines[byte] = message.line
                    byte += len(encode_varint(len(message.data))) + len(message.data)
            self._lines = (copy, lines)
        line = self._lines[1].get(int(match[1]))
        return position if line is None else _BYTE.sub(f"line {line}", position)


class _CopyDiagnostics(Diagnostics):
    """Diagnostics of the copies' reader, translated to the JSON files."""

    __slots__ = ("_copies", "_target")

    def __init__(self, copies: _TraceCopies, target: Diagnostics) -> None:
        super().__init__(target.keep)
        self._copies = copies
        self._target = target

    def record(self, diagnostic: Diagnostic, count: int) -> None:
        """Forward a finding; a cut of a copy has been reported already."""
        if diagnostic.code == "ET001" and self._copies.cut:
            return
        copies = self._copies
        location = copies.named(copies.lines_for(diagnostic.location, Path(diagnostic.path).name))
        path, message = copies.named(diagnostic.path), copies.named(diagnostic.message)
        self._target.record(replace(diagnostic, location=location, path=path, message=message), count)


_COMMUNICATION = frozenset({NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL})
_SHORT = 256
"""Largest attribute that is cached [bytes]: most nodes have the same few attributes."""


def write_chakra_json(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    """Write the chosen ranks: a directory, or a file if there is only one rank.

    Raises the errors of :func:`.writer.write_chakra`, which writes ``.et`` traces to a temporary folder next
    to the destination; they are converted one by one. Memory: that of the first writer, and a block of text.
    """
    several = isinstance(value, Workload) and chosen_ranks(value, options)
    if several and len(several) > 1 and options.name.endswith((".json", ".json.gz")):
        raise UsageError(
            f"{len(several):,} ranks need as many files, and the destination is one file",
            path=options.name,
            hint="name a directory, or choose one rank with `ranks`",
        )
    packed = options.name.endswith(".gz") or path.suffix == ".gz"
    bare = bare_name(options.name)  # the name of a file states its rank
    inner = replace(options, name=bare if bare == options.name else f"{bare}.et", progress=None)
    ignored = _IgnoredCounts()
    try:
        with TemporaryDirectory(prefix=".hespas-", dir=path.parent) as folder:
            made = Path(folder) / "traces"
            write_chakra(value, made, inner, diagnostics)
            if made.is_dir():
                path.mkdir()
                files = sorted(made.iterdir())
                for done, file in enumerate(files):
                    if file.suffix != ".et":
                        file.replace(path / file.name)
                        continue
                    _write_file(
                        file, path / f"{file.stem}.json{'.gz' if packed else ''}", ignored, packed=packed
                    )
                    file.unlink()
                    if options.progress:
                        options.progress(done + 1, len(files))
            else:
                _write_file(made, path, ignored, packed=packed)
    except OutputError as error:
        error.path = str(path)
        raise
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror or error}", path=str(path)) from error
    ignored.report(path.name, diagnostics)


def _write_file(made: Path, path: Path, ignored: _IgnoredCounts, *, packed: bool) -> None:
    """Write one trace as one document."""
    with open_output(path, packed=packed) as stream:
        separator = b""
        for number, message in enumerate(_messages(made)):
            if not number:
                header = {SCHEMA_KEY: JSON_SCHEMA, METADATA_KEY: message_json(GLOBAL_METADATA, message)}
                stream.write(msgspec.json.encode(header)[:-1] + f',\n"{NODE_LIST}":[\n'.encode())
                continue
            stream.write(separator)
            line = _short_line(message) if len(message) <= _SHORT_NODE else _new_line(message)
            ignored.control += line.control
            ignored.groups += line.groups
            ignored.inexact += line.inexact
            stream.write(line.text)
            separator = b",\n"
        stream.write(b"\n]}\n")


def _messages(path: Path) -> Iterator[bytes]:
    for batch in frames(open_trace(path)):
        yield from (batch.message(index) for index in range(len(batch)))


class _AttributeText(NamedTuple):
    """Attribute as text. ``number`` is its value if that is an integer or bool; ``group`` is True if it names
    a process group.
    """

    name: str
    number: int | None
    text: msgspec.Raw
    group: bool
    is_exact: bool


@dataclass(slots=True)
class _IgnoredCounts:
    """Counts of node properties that Chakra's JSON feeder ignores or that JSON cannot hold."""

    control: int = 0
    groups: int = 0
    inexact: int = 0

    def report(self, name: str, diagnostics: Diagnostics) -> None:
        """Report the counts as diagnostics."""
        message = "nodes have ctrl_deps, which Chakra's C++ feeder does not read from JSON"
        diagnostics.info("chakra-json.control-deps", name, message, count=self.control)
        message = "collectives have a process group, which Chakra's C++ feeder does not read from JSON"
        diagnostics.info("chakra-json.process-group", name, message, count=self.groups)
        message = "attributes hold a NaN with a payload, which JSON cannot represent"
        diagnostics.warning("chakra-json.nan-payload", name, message, count=self.inexact)


def _new_attribute(data: bytes) -> _AttributeText:
    value = message_json(ATTRIBUTE, data)
    fields = dict(wire_fields(data))
    name = value.get("name")
    number: int | None = None
    group = False
    for tag in fields:
        field_value = value.get(ATTRIBUTE.fields[tag].name)
        if tag in INTEGER_FIELDS and isinstance(field_value, bool | int | str):
            number = int(field_value)
        elif tag == AttributeField.STRING:
            group = name == "pg_name" and field_value not in WHOLE_WORLD
    text = msgspec.Raw(msgspec.json.encode(value))
    is_exact = message_bytes(ATTRIBUTE, value, []) == data
    return _AttributeText(name if isinstance(name, str) else "", number, text, group, is_exact)


_SHORT_NODE = 2048
"""Largest node that is cached [bytes]: 16,384 of them take 32 MiB and as much text."""

_short_attribute = lru_cache(maxsize=1 << 14)(_new_attribute)


class _NodeLine(NamedTuple):
    """Node as one line, and counts of its properties that the feeder ignores or JSON cannot hold."""

    text: bytes
    control: int
    groups: int
    inexact: int


def _new_line(data: bytes) -> _NodeLine:
    """Return a node as one line, with the feeder's keys first."""
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
    return _NodeLine(
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
