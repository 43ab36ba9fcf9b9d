"""Chakra traces in JSON to a workload and back: https://github.com/mlcommons/chakra.

The files are copied to ``.et`` files of schema 0.0.4 in a scratch folder, node by node, which the reader of
those then reads; errors and findings name the JSON file and its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from hespas.converters.chakra.comm_groups import FILE_NAME, USUAL_NAMES
from hespas.converters.chakra.contract import INTEGER_FIELDS, WHOLE_WORLD
from hespas.converters.chakra.json import (
    METADATA_KEY,
    NODE_LIST,
    SCHEMA_KEY,
    JsonFrames,
    KnownNodes,
    Message,
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
from hespas.converters.chakra.sniff import JSON_RANK_FILE, JSON_SCHEMA
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
"""A frame whose content is missing."""


def read_chakra_json(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Read a file, or a directory of files ``NAME.{rank}.json``, with ``comm_group.json`` beside them.

    Raises what :func:`.reader.read_chakra` does. Memory: that of the ``.et`` files, and a block of text.
    """
    with TemporaryDirectory(prefix="hespas-") as folder:
        copies = _Copies(path if path.is_dir() else path.parent, Path(folder), options)
        place = copies.of_directory(path, diagnostics) if path.is_dir() else copies.of_file(path, diagnostics)
        inner = replace(options, version=LATEST_VERSIONS[-1], progress=None)
        try:
            workload = read_chakra(place, inner, _Findings(copies, diagnostics))
        except HespasError as error:
            copies.rename(error)
            raise
    return replace(workload, metadata={**workload.metadata, "format": "chakra-json"})


@dataclass(slots=True, eq=False)
class _Copies:
    """The ``.et`` files in ``scratch`` that stand for the JSON files in ``folder``."""

    folder: Path
    scratch: Path
    options: ReadOptions
    cut: bool = False
    _sources: dict[str, Path] = field(default_factory=dict[str, Path])
    _lines: tuple[str, dict[int, int]] = ("", {})
    _known: KnownNodes = field(default_factory=KnownNodes)

    def of_file(self, path: Path, diagnostics: Diagnostics) -> Path:
        """The copy of one file."""
        copy = self._copy(path, diagnostics)
        self._link_groups()
        if self.options.progress:
            self.options.progress(1, 1)
        return copy

    def of_directory(self, path: Path, diagnostics: Diagnostics) -> Path:
        """The folder with the copies of all rank files."""
        files = [entry for entry in sorted(path.iterdir()) if JSON_RANK_FILE.match(entry.name)]
        if not files:
            raise FormatError(
                "no rank files here",
                code="ET022",
                path=str(path),
                hint="rank files are called NAME.0.json, NAME.1.json, ...",
            )
        for done, file in enumerate(files):
            if f"{bare_name(file.name)}.et" in self._sources:
                message, hint = "it stands here twice, packed and not", "keep one of the two files"
                raise FormatError(message, code="ET022", path=str(file), hint=hint)
            self._copy(file, diagnostics)
            if self.options.progress:
                self.options.progress(done + 1, len(files))
        self._link_groups()
        return self.scratch

    def _link_groups(self) -> None:
        found = (self.folder / name for name in USUAL_NAMES)
        groups = next((path for path in found if path.is_file()), None)
        if groups is not None:
            (self.scratch / FILE_NAME).symlink_to(groups.resolve())

    def _copy(self, path: Path, diagnostics: Diagnostics) -> Path:
        """Copy one file; what stands before a cut is kept where the options say so."""
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

    def _messages(self, path: Path, diagnostics: Diagnostics) -> Iterator[Message]:
        options = self.options
        frames = JsonFrames(
            path,
            diagnostics,
            max_bytes=options.max_bytes,
            lenient=options.lenient,
            known=self._known,
        )
        return frames.messages()

    def _keep_before(self, error: FormatError, nodes: int, path: Path, diagnostics: Diagnostics) -> None:
        """Go on behind an error where the options allow it; what is cut off can be recovered."""
        is_cut = isinstance(error, CutOffError)
        recovers = is_cut and self.options.recover
        if not (self.options.lenient or recovers):
            if is_cut and nodes:
                error.hint = f"{error.hint}; `recover` keeps the {nodes:,} nodes before the cut"
            raise error
        self.cut = True
        message = f"{error.text}; the {nodes} nodes before it were kept"
        severity = Severity.WARNING if recovers else Severity.ERROR
        diagnostics.add("ET001", severity, error.position or "", message, path=str(path))

    def rename(self, error: HespasError) -> None:
        """Let an error name the JSON file."""
        copy = Path(error.path or "").name
        error.position = error.position and self.lines_for(error.position, copy)
        error.path, error.text = error.path and self.named(error.path), self.named(error.text)
        error.message = self.named(error.message)
        error.args = (error.message,)

    def named(self, text: str) -> str:
        """A text that names the JSON files instead of their copies."""
        text = text.replace(f"{self.scratch}/", "" if self.folder == Path() else f"{self.folder}/")
        text = text.replace(str(self.scratch), str(self.folder))
        for copy, path in self._sources.items():
            if copy in text:
                text = text.replace(copy, path.name)
        return text

    def lines_for(self, position: str, copy: str) -> str:
        """A position with the line in place of the byte in the copy."""
        found = _BYTE.search(position)
        if not found or copy not in self._sources:
            return position
        if self._lines[0] != copy:
            self._lines = (copy, self._lines_by_byte(copy))
        line = self._lines[1].get(int(found[1]))
        return position if line is None else _BYTE.sub(f"line {line}", position)

    def _lines_by_byte(self, copy: str) -> dict[int, int]:
        """Read the JSON file again: the line of each message by the byte of its frame in the copy."""
        lines: dict[int, int] = {}
        byte = 0
        try:
            for message in self._messages(self._sources[copy], Diagnostics(keep=0)):
                lines[byte] = message.line
                byte += len(encode_varint(len(message.data))) + len(message.data)
        except FormatError:
            pass  # reported before
        return lines


class _Findings(Diagnostics):
    """What the reader of the copies finds, in terms of the JSON files."""

    __slots__ = ("_copies", "_target")

    def __init__(self, copies: _Copies, target: Diagnostics) -> None:
        super().__init__(target.keep)
        self._copies = copies
        self._target = target

    def record(self, diagnostic: Diagnostic, count: int) -> None:
        """Pass a finding on; that a copy is cut where its source is has been reported."""
        if diagnostic.code == "ET001" and self._copies.cut:
            return
        copies = self._copies
        location = copies.named(copies.lines_for(diagnostic.location, Path(diagnostic.path).name))
        path, message = copies.named(diagnostic.path), copies.named(diagnostic.message)
        self._target.record(replace(diagnostic, location=location, path=path, message=message), count)


# --- Writing: ``NAME.{rank}.json`` and ``comm_group.json`` in a folder, or one file.
#
# A file is one JSON document, a node a line. Its list ``workload_graph`` has the keys that Chakra's C++
# feeder reads (:mod:`.nodes`); beside them stands, in protobuf-JSON, everything else that a trace holds.

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
            hint="name a directory, or choose one rank with `ranks`",
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
    header = {SCHEMA_KEY: JSON_SCHEMA, METADATA_KEY: message_json(GLOBAL_METADATA, metadata)}
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
    for tag in fields:
        stated = value.get(ATTRIBUTE.fields[tag].name)
        if tag in INTEGER_FIELDS and isinstance(stated, bool | int | str):
            number = int(stated)
        elif tag == AttributeField.STRING:
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
    for tag, raw in wire_fields(data):
        if isinstance(raw, int):
            numbers[tag] = raw
        elif tag == NodeField.ATTR:
            attributes.append(_attribute(raw))
        elif tag == NodeField.NAME:
            name = raw.decode()
        elif tag in (NodeField.CTRL_DEPS, NodeField.DATA_DEPS):
            deps[tag] = wire_integers(raw)
        else:
            io[tag] = message_json(IO_INFO, raw)
    kind = numbers.get(NodeField.TYPE, 0)
    node: dict[str, object] = {
        "Id": numbers.get(NodeField.ID, 0),
        "Name": name,
        "NodeType": kind if kind < 1 << 63 else kind - (1 << 64),
        **_feeder_values(attributes, is_communication=kind in _COMMUNICATION),
        "runtime": numbers.get(NodeField.DURATION_MICROS, 0),
        "data_deps": deps.get(NodeField.DATA_DEPS, []),
    }
    for tag, key in _OTHER_FIELDS.items():
        found = deps.get(tag) or io.get(tag)
        if found is None:
            found = numbers.get(tag)
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
