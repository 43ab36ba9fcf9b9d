"""Files as streams: gzip is told by its magic and goes through isal, several times as fast as zlib.

What is read is a regular file, its size is bounded before memory is taken, and errors name their position;
what is written is equal for equal content. This is the one place that knows isal and its types.
"""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, cast

from hespas.files.limits import INPUT_BYTES_VARIABLE, limits
from hespas.files.trust import check_link
from hespas.graph.errors import FormatError, OutputError

__all__ = [
    "GZIP_MAGIC",
    "STANDARD_STREAM",
    "PackedInput",
    "damage_errors",
    "first_bytes",
    "located",
    "open_input",
    "open_output",
    "open_regular",
    "read_bytes",
    "read_document",
    "read_start",
    "refuse_special_files",
    "same_file",
    "standard_input_in",
]


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
    :class:`hespas.files.limits.Limits` and ``max_bytes``. ``done`` is how many have been read.
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
                hint=f"if you trust it: decompress it yourself, or set {INPUT_BYTES_VARIABLE}",
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
            hint=f"{hint} {INPUT_BYTES_VARIABLE} raises the limit",
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
