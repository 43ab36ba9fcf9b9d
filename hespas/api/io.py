"""Read any input, write any output: the registry, options and atomic placement in two functions."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

import msgspec

from hespas._version import __version__
from hespas.api.arguments import checked
from hespas.api.parts import check_parts, placement
from hespas.converters import (
    ReadOptions,
    Value,
    WriteOptions,
    find_format,
    format_for_output,
    is_recognised,
    note_unread_files,
)
from hespas.files.documents import document_bytes
from hespas.files.limits import INPUT_BYTES_VARIABLE, limits
from hespas.files.output import check_destination, placed_at_once, write_atomically
from hespas.files.streams import STANDARD_STREAM
from hespas.graph import Diagnostics, DType, Profile, Workload, find_dtype
from hespas.graph.errors import (
    FormatError,
    InvariantError,
    OutputError,
    UnsupportedError,
    UsageError,
    short_repr,
)
from hespas.graph.passes import with_default_dtype
from hespas.measurements.consistency import RecordingFacts, check_job, check_recording, facts_of

if TYPE_CHECKING:
    import pandas

__all__ = [
    "STANDARD_STREAM",
    "Document",
    "Finding",
    "Result",
    "as_workload",
    "check_document",
    "check_streams",
    "check_version",
    "findings",
    "is_standard_output",
    "is_stream",
    "opened",
    "opened_program",
    "put",
    "read",
    "read_profiles",
    "spooled_input",
    "spooled_output",
    "with_capture",
    "write",
    "write_json",
]


_REPLAYING = ("kineto", "pytorch")
"""Formats whose readers take traces of captures."""


@checked()
def read(
    path: str | Path,
    *,
    format: str | None = None,  # noqa: A002 # the word users know
    options: ReadOptions | None = None,
    diagnostics: Diagnostics | None = None,
    workload: bool = False,
    capture: str | Path | Sequence[str | Path] | None = None,
) -> Value:
    """Read a file or a directory of per-rank files; the format is sniffed unless named. ``workload`` wants
    one: of a profile, it is the device work that was measured, in its order and with its times. ``capture``
    are traces of the capture of the graphs that a trace of PyTorch's profiler replays, or folders of them.

    Raises ``FormatError`` for unreadable or malformed input, ``UnsupportedError`` for what this version
    cannot handle, ``UsageError`` for an unknown format name.
    """
    source = Path(path)
    chosen = find_format(source, format, workload=workload)
    if chosen.read is None:
        raise InvariantError(f"format {chosen.name} was chosen for reading and cannot read")
    settings = with_capture(options or ReadOptions(), capture)
    check_version(settings.version, chosen.read_versions, chosen.name, "`source_version`")
    found = diagnostics if diagnostics is not None else Diagnostics()
    note_unread_files(source, chosen, found)
    element = _default_dtype(settings.default_dtype)
    if settings.dims and chosen.name != "stablehlo":
        raise UsageError(
            f"format {chosen.name!r} has no symbolic dimensions",
            path=str(source),
            hint="leave `dims` out: it is for StableHLO programs",
        )
    if settings.capture and chosen.name not in _REPLAYING:
        raise UsageError(
            f"format {chosen.name!r} replays no captured graphs",
            path=str(source),
            hint="leave `capture` out: it is for traces of PyTorch's profiler",
        )
    value = chosen.read(source, settings, found)
    if isinstance(value, Profile):
        check_recording(value, found, str(source))
    if workload:
        value = as_workload(value, found)
    return value if element is None else _with_default_dtype(value, element, str(path), found)


def with_capture(options: ReadOptions, capture: str | Path | Sequence[str | Path] | None) -> ReadOptions:
    """How to read, with these traces of captures (None: those there are)."""
    if capture is None:
        return options
    paths = [capture] if isinstance(capture, str | Path) else capture
    return replace(options, capture=tuple(map(Path, paths)))


def as_workload(value: Value, diagnostics: Diagnostics) -> Workload:
    """The workload itself, or the measured one of a profile (:mod:`hespas.converters.measured_ops`).

    Raises ``UnsupportedError`` for a profile that does not say when its device did what.
    """
    if isinstance(value, Workload):
        return value
    from hespas.converters.measured_ops import measured_workload  # most commands meet no profile

    return measured_workload(value, diagnostics)


def opened(
    source: str | Path | Value,
    format_name: str | None,
    options: ReadOptions | None,
    diagnostics: Diagnostics,
) -> tuple[str, Value]:
    """What the source of a command is called, and its value: it is one already, or the path of one."""
    if isinstance(source, Workload | Profile):
        return source.name, source
    value = read(source, format=format_name, options=options, diagnostics=diagnostics, workload=True)
    return str(source), value


def opened_program(
    source: str | Path | Value,
    format_name: str | None,
    options: ReadOptions | None,
    diagnostics: Diagnostics,
) -> tuple[str, Workload]:
    """As :func:`opened`, for a command that needs a program: see :func:`as_workload`."""
    name, value = opened(source, format_name, options, diagnostics)
    return name, as_workload(value, diagnostics)


def _default_dtype(name: str) -> DType | None:
    element = find_dtype(name) if name else None
    if name and element is None:
        raise UsageError(f"unknown element type {name!r}", hint="write bf16, f16, f32, f8E4M3FN, i8, ...")
    return element


def _with_default_dtype(value: Value, element: DType, path: str, diagnostics: Diagnostics) -> Value:
    """The value whose operations of unknown element type have this one."""
    if not isinstance(value, Workload):
        return value
    made = [with_default_dtype(graph, element.code) for graph in value.classes]
    message = f"operations state no element type and are taken to compute in {element.name}, as asked"
    diagnostics.info("read.default-dtype", path, message, count=sum(count for _, count in made))
    return replace(value, classes=tuple(graph for graph, _ in made))


@checked()
def read_profiles(
    path: str | Path,
    *,
    format: str | None = None,  # noqa: A002 # the word users know
    options: ReadOptions | None = None,
    diagnostics: Diagnostics | None = None,
) -> list[Profile]:
    """The measured profiles of a file, or of a folder with one per rank, in order of ranks.

    A folder that is read as one workload of its files, as that of PyTorch's profiler, holds a profile in each
    file that is one; files in which graphs were captured are joined with those that replay them. Raises what
    :func:`read` does, and ``UsageError`` for what is a program.
    """
    source = Path(path)
    origin = find_format(source, format)
    files = [source]
    if source.is_dir():
        near = sorted([*source.glob("*"), *source.glob("*/*")])
        ranks = [entry for entry in near if entry.is_file() and is_recognised(entry)]
        files = [entry for entry in ranks if find_format(entry, None).as_workload == origin.name] or files
    captures = _captures(source, options) if origin.name == "pytorch" and len(files) > 1 else {}
    found: list[Profile] = []
    facts: list[RecordingFacts] = []
    for file in files:
        if captures and file not in captures:
            continue
        chosen = format if file == source else None
        own = (*(options.capture if options else ()), *captures.get(file, ()))
        value = read(file, format=chosen, options=options, diagnostics=diagnostics, capture=own)
        if not isinstance(value, Profile):
            raise UsageError("expected a measured profile, and this is a program", path=str(file))
        found.append(value)
        facts.append(facts_of(value, str(file)))
    if diagnostics is not None:
        check_job(facts, diagnostics, str(source))
    return sorted(found, key=lambda each: int(each.rank.min()) if len(each) else 0)


def _captures(folder: Path, options: ReadOptions | None) -> dict[Path, tuple[Path, ...]]:
    """The profiles of runs in a folder with the captures of each; nothing where there are no captures."""
    from hespas.converters.pytorch.folder import profiles_in

    found = profiles_in(folder, options or ReadOptions())
    return found if any(found.values()) else {}


@checked()
def write(
    value: Value,
    path: str | Path,
    *,
    format: str | None = None,  # noqa: A002 # the word users know
    overwrite: bool = False,
    options: WriteOptions | None = None,
    diagnostics: Diagnostics | None = None,
    check: Callable[[Path], None] | None = None,
) -> int:
    """Write a value; the format follows from the suffix unless named. Returns the bytes written.

    The destination appears whole or not at all. ``check`` is called with the path of what is written before
    it replaces anything: what it raises leaves the destination as it was. Raises ``OutputError`` where it
    exists already (without ``overwrite``) or cannot be written, ``UnsupportedError`` where the format cannot
    express the value.
    """
    destination = Path(path)
    chosen = format_for_output(destination, format, profile=isinstance(value, Profile))
    writer = chosen.write
    if writer is None:
        raise InvariantError(f"format {chosen.name} was chosen for writing and cannot write")
    settings = options or WriteOptions()
    check_parts(settings, chosen)
    check_destination(destination, overwrite=overwrite or settings.shard is not None)
    if isinstance(value, Profile) and chosen.profiles and not len(value):
        raise UnsupportedError(
            f"no event of a device was recorded, and format {chosen.name!r} holds nothing else",
            hint="record what the device does too; hespas view SOURCE shows what there is",
        )
    check_version(settings.version, chosen.write_versions, chosen.name, "`target_version`")
    settings = replace(
        settings,
        name=settings.name or destination.name,
        directory=settings.directory or _names_directory(path, destination),
    )
    found = diagnostics if diagnostics is not None else Diagnostics()
    key, share = placement(value, chosen, settings)

    def fill(temporary: Path) -> None:
        writer(value, temporary, settings, found)
        if check is not None:
            check(temporary)

    directory = chosen.writes_directory(value, settings)
    return write_atomically(destination, fill, overwrite=overwrite, directory=directory, key=key, share=share)


def check_version(version: str, known: tuple[str, ...], name: str, option: str) -> None:
    """Refuse a version that a format does not have. Raises ``UsageError`` listing those it has."""
    if not version or version in known:
        return
    listed = f"one of: {', '.join(known)}" if known else "leave it out: the format has one version"
    raise UsageError(f"{option} {version}: format {name!r} has no such version", hint=listed)


def _names_directory(given: str | Path, destination: Path) -> bool:
    """Whether a destination is spelled like a directory: a closing slash, no suffix, or there already."""
    return str(given).endswith("/") or destination.is_dir() or not destination.suffix


# --- Standard input and output as files: formats are told by content, and a result goes out when it is whole

_ROWS_SHOWN = 20
_PIECE_BYTES = 1 << 20
_BEGINNING_BYTES = 16 << 20
"""More than any format needs to be told."""
_STANDARD_OUTPUT = frozenset({STANDARD_STREAM, "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"})


def is_standard_output(path: Path | None) -> bool:
    """Whether a document goes to standard output, however that is called."""
    return str(path) in _STANDARD_OUTPUT


def is_stream(path: Path) -> bool:
    """Whether a document that goes there replaces nothing: standard output, a pipe, a device."""
    if is_standard_output(path):
        return True
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def check_document(path: Path, *, overwrite: bool) -> None:
    """Raise ``OutputError`` where :func:`put` cannot succeed, before any work is done."""
    if is_standard_output(path):
        if _bytes_of(sys.stdout) is None:
            raise _closed()
        return
    if is_stream(path):
        if not os.access(path, os.W_OK):
            raise OutputError("is not writable", path=str(path), hint="choose another destination")
        return
    if path.is_dir():
        raise OutputError("exists and is a directory", path=str(path), hint="name a file in it")
    check_destination(path, overwrite=overwrite)


def put(path: Path, fill: Callable[[Path], None], *, overwrite: bool) -> None:
    """Let ``fill`` write a document: a file appears whole or not at all, and replaces another only with
    ``overwrite``; standard output, a pipe or a device gets it once it is whole. Raises ``OutputError``.
    """
    if not is_stream(path):
        write_atomically(path, fill, overwrite=overwrite, directory=False)
        return
    with ExitStack() as stack:
        if is_standard_output(path):
            fill(stack.enter_context(spooled_output(stack)))
            return
        spool = _scratch(stack) / "document"
        fill(spool)
        try:
            with spool.open("rb") as content, path.open("wb") as stream:
                shutil.copyfileobj(content, stream)
        except BrokenPipeError:
            return  # who reads has seen enough
        except OSError as error:
            raise OutputError(
                f"cannot be written: {error.strerror or error}",
                path=str(path),
                hint="free some space or choose another destination",
            ) from error


def check_streams(source: str, destination: str) -> None:
    """Raise ``UsageError`` where a stream that is named is closed, before any work is done."""
    if source == STANDARD_STREAM and _bytes_of(sys.stdin) is None:
        raise UsageError("standard input is closed", path=source, hint="name a file, or pipe one in")
    if destination == STANDARD_STREAM and _bytes_of(sys.stdout) is None:
        raise _closed()


def spooled_input(stack: ExitStack, check: Callable[[Path], object]) -> Path:
    """A copy of standard input that goes with ``stack``. A stream that goes on past its beginning must pass
    ``check``, which sees that much of it: one without end is refused for what it is.

    Raises ``OutputError`` where there is no room for it, ``UsageError`` where the stream is closed or cannot
    be read, ``FormatError`` where it is longer than any input may be, and what ``check`` raises.
    """
    stream = _bytes_of(sys.stdin)
    if stream is None:
        raise UsageError("standard input is closed", path=STANDARD_STREAM, hint="name a file, or pipe one in")
    spool = _scratch(stack) / "stdin"
    most = limits().input_bytes
    try:
        with spool.open("wb") as copy:
            taken = 0
            while part := stream.read(_PIECE_BYTES):
                copy.write(part)
                taken += len(part)
                if taken > most:
                    raise FormatError(
                        f"standard input goes on past {most:,} bytes, the limit",
                        path=STANDARD_STREAM,
                        hint=f"if you trust it, {INPUT_BYTES_VARIABLE} (or `max_input_bytes`) "
                        "raises the limit",
                    )
                if taken - len(part) < _BEGINNING_BYTES <= taken:
                    copy.flush()
                    check(spool)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise _no_room(error, spool.parent) from error
        raise UsageError(
            f"standard input cannot be read: {error.strerror or error}",
            path=STANDARD_STREAM,
            hint="name a file, or pipe one in",
        ) from error
    return spool


@contextmanager
def spooled_output(stack: ExitStack) -> Generator[Path]:
    """A file that goes to standard output once it is written. Raises ``OutputError`` where either fails."""
    spool = _scratch(stack) / "standard.output"
    try:
        with placed_at_once():
            yield spool
    except OutputError as error:
        if error.path == str(spool):  # nobody knows the file
            error.path, error.hint = STANDARD_STREAM, _room_hint(spool.parent)
        raise
    stream = _bytes_of(sys.stdout)
    if stream is None:
        raise _closed()
    with spool.open("rb") as content:
        try:
            shutil.copyfileobj(content, stream)
            stream.flush()
        except BrokenPipeError:
            return  # who reads has seen enough
        except OSError as error:
            raise OutputError(
                f"standard output cannot be written: {error.strerror or error}",
                path=STANDARD_STREAM,
                hint="free some space or choose another destination",
            ) from error


def _bytes_of(stream: object) -> BinaryIO | None:
    """The bytes under a text stream; None where the stream was closed before we began."""
    found: BinaryIO | None = getattr(stream, "buffer", None)
    return found


def _scratch(stack: ExitStack) -> Path:
    """A folder that goes when the conversion ends."""
    try:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hespas-")))
    except OSError as error:
        raise _no_room(error, Path(os.environ.get("TMPDIR", "/tmp"))) from error  # only told


def _no_room(error: OSError, folder: Path) -> OutputError:
    return OutputError(
        f"no temporary file can be written: {error.strerror or error}",
        path=STANDARD_STREAM,
        hint=_room_hint(folder),
    )


def _room_hint(folder: Path) -> str:
    return f"free some space in {folder.parent}, or set TMPDIR to another folder"


def _closed() -> OutputError:
    return OutputError(
        "standard output is closed", path=STANDARD_STREAM, hint="name a file, or pipe it somewhere"
    )


# --- Results of commands, and the documents that scripts rely on


class Finding(msgspec.Struct, frozen=True):
    """A diagnostic in a document; ``count`` is the exact number of its code."""

    code: str
    severity: Literal["info", "warning", "error"]
    path: str
    location: str
    message: str
    rank: int | None
    node: int | None
    count: Annotated[int, msgspec.Meta(ge=1)]


def findings(diagnostics: Diagnostics) -> list[Finding]:
    """One row per kept finding."""
    counts = diagnostics.counts()
    return [
        Finding(
            code=each.code,
            severity=each.severity.value,
            path=each.path,
            location=each.location,
            message=each.message,
            rank=each.rank,
            node=each.node,
            count=counts[each.code],
        )
        for each in diagnostics
    ]


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What every document begins with: its schema, who wrote it, from what, and what was found. Rows that a
    document has of a value of ours are under the names of its attributes; unknown figures are null.
    """

    schema: str
    hespas_version: str = __version__
    inputs: list[str]
    diagnostics: list[Finding]


class Result(ABC):
    """What the function of a command gives: in a line, as a table, and as the document of ``--json``."""

    __slots__ = ()

    @abstractmethod
    def headline(self) -> str:
        """The answer in a few words."""

    @abstractmethod
    def to_json(self) -> bytes:
        """The document that the command writes with ``--json``: indented UTF-8 that ends in a newline."""

    @abstractmethod
    def to_pandas(self) -> pandas.DataFrame:
        """The rows of the answer as a table; unknown is NaN."""

    def to_dict(self) -> dict[str, Any]:
        """The document that the command writes with ``--json``, as Python values; unknown is None."""
        document: dict[str, Any] = json.loads(self.to_json())
        return document

    def __repr__(self) -> str:
        return short_repr(self, "", self.headline())

    def _repr_html_(self) -> str:
        """What a notebook shows: the answer and the beginning of its table."""
        rows = self.to_pandas()
        more = f"<p>{len(rows) - _ROWS_SHOWN:,} more rows</p>" if len(rows) > _ROWS_SHOWN else ""
        return f"<p>{escape(repr(self))}</p>{rows.head(_ROWS_SHOWN).to_html(index=False, border=0)}{more}"


def write_json(document: object, path: Path, *, overwrite: bool = False) -> None:
    """Write a document, or the JSON of one, at once or not at all; ``-`` is standard output. Raises
    ``OutputError`` where it exists already, without ``overwrite``.
    """
    content = document if isinstance(document, bytes) else document_bytes(document)
    put(path, lambda temporary: _write_bytes(temporary, content), overwrite=overwrite)


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)
