"""Files as streams: gzip is told by its magic and goes through isal, several times as fast as zlib.

What is read is a regular file, its size is bounded before memory is taken, and errors name their position;
what is written is equal for equal content. This is the one place that knows isal and its types.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, cast

from hespas.files.trust import check_link
from hespas.graph.errors import FormatError, OutputError, UsageError

__all__ = [
    "GZIP_MAGIC",
    "STANDARD_STREAM",
    "VARIABLE",
    "Limits",
    "PackedInput",
    "damage_errors",
    "first_bytes",
    "limits",
    "located",
    "open_input",
    "open_output",
    "open_regular",
    "read_bytes",
    "read_document",
    "read_start",
    "read_toml",
    "refuse_special_files",
    "same_file",
    "standard_input_in",
]

# --- How much an input may ask for: every limit of the readers and writers, in one place.
#
# ``HESPAS_MAX_INPUT_BYTES`` in the environment, or ``--max-input-bytes`` of a command, states how many bytes
# of one input are trusted: it raises every limit in bytes that lies below it, of this process and its
# children. Native parsers then get what an input of that size would.

VARIABLE = "HESPAS_MAX_INPUT_BYTES"
"""The environment variable that raises the limits in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits in bytes end in ``_bytes``; only these are raised by :data:`VARIABLE`.

    A gzip stream may expand to ``packed_free_bytes``, and beyond to ``packed_ratio`` times the compressed
    bytes read so far: deflate reaches 1,032:1 on zeros, real programs and traces stay below 60:1. Columns of
    Parquet tables may unpack to ``table_free_bytes``, and beyond to ``table_ratio`` times the file: real ones
    stay below 30:1. Equal rows take no space there, so what rows take in memory (256 bytes of a table of
    operations, 80 of a profile) is bounded, too: by ``table_rows_bytes`` or ``profile_rows_bytes``, and 20
    times the file. How ``parser_bytes``, ``program_bytes``, ``program_cpu_s`` and ``parser_cpu_s`` grow with
    a program says :func:`hespas.files.sandbox.allowance`. The graph of a text workload takes up to 140 times
    its text. Real models have 400 trees, and have seen 10,000 octaves of sizes. XLA takes hours for programs
    of fewer operations than a replay may have. Ranks that differ in class or situation are compared one by
    one, 64 bytes each.
    """

    input_bytes: int = 64 << 30
    trusted_bytes: int = 0
    reading_bytes: int = 2 << 30
    packed_free_bytes: int = 8 << 20
    packed_ratio: int = 100
    compressed_packets_bytes: int = 8 << 20
    compressed_packets_ratio: int = 50
    configuration_bytes: int = 16 << 20
    device_bytes: int = 1 << 20
    report_bytes: int = 64 << 20
    groups_bytes: int = 256 << 20
    table_bytes: int = 4 << 30
    table_free_bytes: int = 64 << 20
    table_ratio: int = 50
    table_rows_bytes: int = 512 << 20
    table_columns: int = 1 << 12
    profile_rows_bytes: int = 200 << 20
    card_bytes: int = 64 << 20
    model_bytes: int = 64 << 20
    model_trees: int = 4096
    model_sizes: int = 1 << 17
    text_workload_bytes: int = 8 << 20
    cell_bytes: int = 16 << 20
    node_fields: int = 1 << 20
    parser_bytes: int = 150 << 20
    program_bytes: int = 10**9
    program_cpu_s: int = 6
    parser_cpu_s: float = 1.5
    compared_ranks_bytes: int = 64 << 21
    replayed_operations: int = 200_000
    replayed_edges: int = 500_000
    replayed_characters: int = 32 << 20


def limits() -> Limits:
    """Return the limits in force. Raises ``UsageError`` where the environment states no number of bytes."""
    return _stated(os.environ.get(VARIABLE, ""))


@lru_cache(maxsize=4)
def _stated(text: str) -> Limits:
    if not text:
        return Limits()
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 19 and int(text)):
        raise UsageError(
            f"{VARIABLE} is {text[:60]!r}, no number of bytes", hint=f"{VARIABLE}=8000000000, for example"
        )
    size, own = int(text), Limits()
    names = [field.name for field in fields(own) if field.name.endswith("_bytes")]
    return replace(own, **{name: max(size, getattr(own, name)) for name in names})


# --- Files as streams.

GZIP_MAGIC = b"\x1f\x8b"
_LEVEL = 2
"""Of isal's four: several times as fast as zlib, for a tenth more bytes."""
_PIECE_BYTES = 4096


STANDARD_STREAM = "-"
"""Name of standard input and output on a command line."""


class _Standard:
    """The file that standard input has been copied to; None outside of :func:`standard_input_in`."""

    spool: Path | None = None


@contextmanager
def standard_input_in(spool: Path) -> Generator[None]:
    """Read the input named ``-`` from ``spool`` within; messages name it ``-`` all the same."""
    _Standard.spool = spool
    try:
        yield
    finally:
        _Standard.spool = None


def located(path: Path) -> Path:
    """Return where the bytes of an input lie: of ``-``, the file that standard input has been copied to."""
    return _Standard.spool or path if str(path) == STANDARD_STREAM else path


def open_input(path: Path, buffering: int = -1) -> BinaryIO:
    """The bytes of a file. Raises ``OSError`` where it cannot be opened, and for pipes, devices, sockets and
    folders: the wait for a pipe's other end would be forever.
    """
    check_link(path)
    handle = os.open(located(path), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb", buffering)
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a directory", str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def same_file(stream: BinaryIO, path: Path) -> str:
    """A path for libraries that open files themselves: on Linux that of the open file, whatever may stand at
    its ``path`` by now.
    """
    link = f"/proc/self/fd/{stream.fileno()}"
    return link if os.path.exists(link) else str(located(path))  # noqa: PTH110 - it stays a string


class PackedInput:
    """The decompressed bytes of a gzip file, in order, with the one bound on them that all readers share:
    :class:`hespas.files.streams.Limits` and ``max_bytes``. ``done`` is how many have been read.
    """

    def __init__(self, stream: BinaryIO, path: Path, max_bytes: int | None = None, *, code: str = "") -> None:
        """Read an open file, which is closed with this, from its start. ``path`` is how errors call it,
        ``code`` is that of an error about a bomb.
        """
        self._path = path
        self._raw = stream
        self._raw.seek(0)
        self._stream = cast("BinaryIO", _isal("igzip").IGzipFile(fileobj=self._raw, mode="rb"))
        self._most = limits().input_bytes if max_bytes is None else max_bytes
        self._code = code
        self.done = 0

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes, none at the end. Raises :func:`damage_errors` for a damaged stream and
        ``FormatError`` as soon as it has expanded too far.
        """
        data = self._stream.read(size)
        self.done += len(data)
        bounds = limits()
        allowed = max(bounds.packed_free_bytes, bounds.packed_ratio * self._raw.tell())
        if self.done > min(self._most, allowed):
            raise FormatError(
                f"decompresses to more than {min(self._most, allowed):,} bytes",
                code=self._code,
                path=str(self._path),
                hint=f"if you trust it: decompress it yourself, or set {VARIABLE}",
            )
        return data

    def before_damage(self, skip: int, size: int) -> bytes:
        """Up to ``size`` decompressed bytes of a damaged file from byte ``skip`` on: what :meth:`read` had
        when it raised, and kept for itself. Decompresses from the start; nothing else can be read after.
        """
        make = _isal("isal_zlib").decompressobj
        inflater, position = make(wbits=31), 0
        found = bytearray()
        self._raw.seek(0)
        while len(found) < size and (packed := self._raw.read(_PIECE_BYTES)):
            while packed:
                try:
                    data = inflater.decompress(packed)
                except damage_errors():
                    return bytes(found[:size])
                found += data[max(0, skip - position) :]
                position += len(data)
                packed = inflater.unused_data
                inflater = make(wbits=31) if inflater.eof else inflater
        return bytes(found[:size])

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        self._raw.close()

    def __enter__(self) -> PackedInput:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _isal(module: str) -> Any:
    """A module of isal, whose types say little; it is loaded when needed."""
    return import_module(f"isal.{module}")


def damage_errors() -> tuple[type[Exception], ...]:
    """What :meth:`PackedInput.read` raises for a file that is damaged or cut off."""
    return EOFError, OSError, ValueError, _isal("isal_zlib").error


@contextmanager
def open_output(path: Path, *, packed: bool) -> Generator[BinaryIO]:
    """A binary stream to ``path``, gzipped without time and name where ``packed``.

    Raises ``OutputError`` where the system refuses.
    """
    try:
        with path.open("wb") as raw:
            if not packed:
                yield raw
                return
            packer = _isal("igzip").IGzipFile
            with packer(filename="", mode="wb", fileobj=raw, compresslevel=_LEVEL, mtime=0) as stream:
                yield cast("BinaryIO", stream)
    except OSError as error:
        raise OutputError(
            f"cannot be written: {error.strerror or error}",
            path=str(path),
            hint="free some space or choose another destination",
        ) from error


_CHUNK_BYTES = 1 << 20


def refuse_special_files(path: Path) -> None:
    """Raise ``FormatError`` for pipes, devices and sockets, which may never end or never begin.

    What is not there, or may not be looked at, is left to whoever opens it.
    """
    try:
        mode = located(path).stat().st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise FormatError(
            "not a regular file",
            path=str(path),
            hint="give a file; hespas-convert takes what comes through a pipe: hespas-convert - DST < PIPE",
        )


def open_regular(path: Path) -> BinaryIO:
    """The bytes of a file. Raises ``FormatError`` for what cannot be opened, and for pipes, devices, sockets
    and folders: the wait for a pipe's other end would be forever.
    """
    try:
        return open_input(path)
    except OSError as error:
        raise _unreadable(error, path) from error
    except ValueError as error:  # a name with NUL
        raise FormatError(str(error), path=str(path), hint="check the path") from error


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """The content of a file, gunzipped where it starts with the gzip magic.

    The result has at most ``max_bytes``, and for gzip no more than :class:`~hespas.files.streams.PackedInput`
    gives: a file or bomb that is larger is refused before it fills memory, and none is held twice. Raises
    ``FormatError`` for an unreadable, empty, truncated or oversized file.
    """
    refuse_special_files(path)
    with open_regular(path) as stream:
        magic = stream.read(len(GZIP_MAGIC))
        if not magic:
            hint = "was the writing program interrupted?"
            raise FormatError("the file is empty", path=str(path), position="byte 0", hint=hint)
        if magic == GZIP_MAGIC:
            return _gunzip(stream, path, max_bytes)
        stream.seek(0)
        return _content(stream, path, max_bytes, hint="is this a file of the format it is read as?")


def read_start(path: Path, size: int) -> bytes:
    """The first bytes of a file, at most ``size`` as they lie there and as many once they are gunzipped: what
    tells its format. Raises ``FormatError`` where it cannot be read or is gzipped and broken from the start.
    """
    try:
        with open_input(path) as stream:
            data = stream.read(size)
    except OSError as error:
        raise FormatError(error.strerror or str(error), path=str(path), hint="check the path") from error
    if not data.startswith(GZIP_MAGIC):
        return data
    inflater = zlib.decompressobj(wbits=31)
    try:
        start = inflater.decompress(data, size)
    except zlib.error as error:
        raise _damaged(f"broken gzip stream: {error}", path, f"byte {_broken_byte(data)}") from error
    if not start and not inflater.eof:
        raise _damaged("gzip stream ends early", path, f"byte {len(data)}")
    return start


def first_bytes(path: Path, size: int) -> bytes:
    """The same, nothing where that would be an error."""
    try:
        return read_start(path, size)
    except FormatError:
        return b""


def _broken_byte(packed: bytes) -> int:
    """Where a gzip stream stops making sense; zlib does not say."""
    inflater = zlib.decompressobj(wbits=31)
    for position in range(len(packed)):
        try:
            inflater.decompress(packed[position : position + 1])
        except zlib.error:
            return position
    return len(packed)


def _damaged(problem: str, path: Path, position: str) -> FormatError:
    return FormatError(problem, path=str(path), position=position, hint="copy the file again")


def read_document(path: Path, max_bytes: int, what: str) -> bytes:
    """The content of a small file that is ``what`` ("a system configuration"): never gunzipped, may be empty.

    Raises ``FormatError`` where it is no regular file, cannot be read, or has more than ``max_bytes``.
    """
    with open_regular(path) as stream:
        return _content(stream, path, max_bytes, hint=f"is this {what}?")


def _content(stream: BinaryIO, path: Path, max_bytes: int, *, hint: str) -> bytes:
    """All bytes; the size is looked at first. A file that grows, or states no size, is read on."""
    try:
        size = os.fstat(stream.fileno()).st_size
        parts = [stream.read(size + 1)] if size <= max_bytes else []
        total = sum(map(len, parts))
        while parts and parts[-1] and size < total <= max_bytes:
            parts.append(stream.read(_CHUNK_BYTES))
            total += len(parts[-1])
    except OSError as error:
        raise _unreadable(error, path) from error
    if max(size, total) > max_bytes:
        raise FormatError(
            f"{max(size, total):,} bytes, more than the limit of {max_bytes:,}",
            path=str(path),
            position=f"byte {max_bytes}",
            hint=f"{hint} {VARIABLE} raises the limit",
        )
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _unreadable(error: OSError, path: Path) -> FormatError:
    is_special = error.errno in {errno.EISDIR, errno.EINVAL}
    hint = "give a file; copy what comes through a pipe" if is_special else "check the path"
    return FormatError(error.strerror or str(error), path=str(path), hint=hint)


def _gunzip(stream: BinaryIO, path: Path, max_bytes: int) -> bytes:
    """All members of a gzip file; the limit counts their sum."""
    content = BytesIO()  # hands out what it has written without a copy
    try:
        with PackedInput(stream, path, max_bytes) as packed:
            while part := packed.read(_CHUNK_BYTES):
                content.write(part)
    except damage_errors() as error:
        early = isinstance(error, EOFError)
        problem = "gzip stream ends early" if early else f"broken gzip stream: {error}"
        raise _damaged(problem, path, f"byte {content.tell()} of the decompressed data") from error
    return content.getvalue()


# --- TOML

_MOST_PARTS = 64
_KEY_PART = re.compile(r"""(?:"(?:[^"\\\n]|\\.)*"?|'[^'\n]*'?|[\w-]+)[ \t]*(\.?)[ \t]*""")
_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_DIGITS = re.compile(r"[\d_]+")
_MOST_DIGITS = 4000
_BRACKET = re.compile(r"[][{}]")


def read_toml(path: Path, what: str, *, where: str, example: str) -> dict[str, object]:
    """The root table of a file that is ``what``. Raises ``FormatError`` if it is missing, no regular file,
    over 1 MiB, or not TOML; remedies name ``where`` such files are and an ``example`` of one.
    """
    import tomllib

    shown = str(path)
    try:
        content = read_document(path, limits().device_bytes, what)
    except FormatError as error:
        hint = example if error.position else where
        message = error.message if error.position else f"cannot be read: {error.message}"
        raise FormatError(message, path=shown, position=error.position, hint=hint) from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise FormatError(
            "not UTF-8",
            path=shown,
            position=f"line {line}, byte {error.start}",
            hint="save the file as UTF-8",
        ) from error
    deep = _many_parts(text)
    try:
        if not deep:
            return tomllib.loads(text)
    except RecursionError:
        deep = _deepest(text)
    except ValueError as error:  # TOMLDecodeError, and integers of thousands of digits
        raise FormatError(
            f"not TOML: {_PLACE.sub('', str(error))}",
            path=shown,
            position=_place(str(error), text),
            hint='a line is key = value, with texts in quotes: name = "my device"',
        ) from error
    raise FormatError(
        "tables nested too deeply",
        path=shown,
        position=deep,
        hint=f"no key has more than three parts; {example}",
    )


def _place(told: str, text: str) -> str:
    """Where the library says that it stopped; for a number, that it does not place, the first long one."""
    place = _PLACE.search(told)
    if place and place.group(1):
        return f"line {place.group(1)}, column {place.group(2)}"
    at = (
        len(text)
        if place
        else next((m.start() for m in _DIGITS.finditer(text) if len(m[0]) > _MOST_DIGITS), 0)
    )
    return f"line {text.count(chr(10), 0, at) + 1}"


def _deepest(text: str) -> str:
    """The first line at which more brackets are open than any file has."""
    depth = 0
    for number, line in enumerate(text.split("\n"), start=1):
        for bracket in _BRACKET.findall(line):
            depth += 1 if bracket in "[{" else -1
            if depth > _MOST_PARTS:
                return f"line {number}"
    return "line 1"


def _many_parts(text: str) -> str:
    """The line of the first key of many parts, for which the library takes hours; empty where none is.
    O(length): no part is looked at twice.
    """
    parts, end = 0, -1
    for part in _KEY_PART.finditer(text):
        parts = parts + 1 if part.start() == end else 1
        if parts > _MOST_PARTS:
            return f"line {text.count(chr(10), 0, end) + 1}"
        end = part.end() if part.group(1) else -1
    return ""
