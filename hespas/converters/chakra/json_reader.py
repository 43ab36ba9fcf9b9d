"""Chakra traces in JSON to a workload: https://github.com/mlcommons/chakra; the kinds are told by
:mod:`.json_frames`.

The files are copied to ``.et`` files of schema 0.0.4 in a scratch folder, node by node, which the reader of
those then reads; errors and findings name the JSON file and its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hespas.converters.chakra.comm_groups import FILE_NAME, USUAL_NAMES
from hespas.converters.chakra.frames import CutOffError
from hespas.converters.chakra.json_frames import RANK_FILE, JsonFrames, KnownNodes, Message, bare_name
from hespas.converters.chakra.reader import read_chakra
from hespas.converters.format import ReadOptions
from hespas.files.streams import open_output
from hespas.files.wire import encode_varint
from hespas.graph import Diagnostics, Workload
from hespas.graph.diagnostics import Severity
from hespas.graph.errors import FormatError, HespasError
from hespas.schemas.chakra.history import LATEST_VERSIONS

__all__ = ["read_chakra_json"]

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
        files = [entry for entry in sorted(path.iterdir()) if RANK_FILE.match(entry.name)]
        if not files:
            raise FormatError(
                "ET022: no rank files here",
                path=str(path),
                hint="rank files are called NAME.0.json, NAME.1.json, ...",
            )
        for done, file in enumerate(files):
            if f"{bare_name(file.name)}.et" in self._sources:
                message, hint = "ET022: it stands here twice, packed and not", "keep one of the two files"
                raise FormatError(message, path=str(file), hint=hint)
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
                error.hint = f"{error.hint}; --recover keeps the {nodes:,} nodes before the cut"
            raise error
        self.cut = True
        message = f"{error.message.removeprefix('ET001: ')}; the {nodes} nodes before it were kept"
        severity = Severity.WARNING if recovers else Severity.ERROR
        diagnostics.add("ET001", severity, error.position or "", message, path=str(path))

    def rename(self, error: HespasError) -> None:
        """Let an error speak of the JSON file."""
        copy = Path(error.path or "").name
        error.position = error.position and self.lines_for(error.position, copy)
        error.path, error.message = error.path and self.named(error.path), self.named(error.message)
        error.args = (error.message,)

    def named(self, text: str) -> str:
        """A text that speaks of the JSON files instead of their copies."""
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
            pass  # told before
        return lines


class _Findings(Diagnostics):
    """What the reader of the copies finds, told of the JSON files."""

    __slots__ = ("_copies", "_target")

    def __init__(self, copies: _Copies, target: Diagnostics) -> None:
        super().__init__(target.keep)
        self._copies = copies
        self._target = target

    def add(
        self,
        code: str,
        severity: Severity,
        location: str,
        message: str,
        *,
        path: str = "",
        rank: int | None = None,
        node: int | None = None,
        count: int = 1,
    ) -> None:
        """Pass a finding on; that a copy is cut where its source is has been said."""
        if code == "ET001" and self._copies.cut:
            return
        copies = self._copies
        location = copies.named(copies.lines_for(location, Path(path).name))
        path, message = copies.named(path), copies.named(message)
        self._target.add(code, severity, location, message, path=path, rank=rank, node=node, count=count)
