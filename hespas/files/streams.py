"""Input and output files as streams, with gzip.

Inputs must be regular files, their size is limited before memory is allocated, and errors have positions.
Equal content gives equal output bytes. gzip is detected by its magic bytes and handled by isal, several times
as fast as zlib; only this module imports isal.
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
    "input_location",
    "open_input",
    "open_output",
    "open_regular",
    "read_bytes",
    "read_document",
    "read_start",
    "refuse_special_files",
    "reopenable_path",
    "standard_input_in",
]


GZIP_MAGIC = b"\x1f\x8b"

_LEVEL = 2
"""Compression level of isal (0 to 3): several times as fast as zlib, for ten per cent more bytes."""

_PIECE_BYTES = 4096

STANDARD_STREAM = "-"
"""Name of standard input and output on a command line."""


class _StandardInput:
    """Holder of the path of the file that has a copy of standard input (``spool``). The path is None outside
    of :func:`standard_input_in`.
    """

    spool: Path | None = None


@contextmanager
def standard_input_in(spool: Path) -> Generator[None]:
    """Read the input named ``-`` from ``spool`` within the block; messages still name it ``-``."""
    _StandardInput.spool = spool
    try:
        yield
    finally:
        _StandardInput.spool = None


def input_location(path: Path) -> Path:
    """Return the path of an input's bytes; for ``-``, the path of the copy of standard input."""
    return _StandardInput.spool or path if str(path) == STANDARD_STREAM else path


def open_input(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a file for reading bytes.

    Raises ``OSError`` if it cannot be opened, and for pipes, devices, sockets and folders, because a pipe may
    block forever.
    """
    check_link(path)
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(input_location(path), flags)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb", buffering)
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a directory", str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def reopenable_path(stream: BinaryIO, path: Path) -> str:
    """Return a path to the open file for libraries that open files themselves.

    On Linux it refers to the open file even if ``path`` has been replaced since.
    """
    link = f"/proc/self/fd/{stream.fileno()}"
    return link if os.path.exists(link) else str(input_location(path))  # noqa: PTH110 - it stays a string


class PackedInput:
    """Decompressed bytes of a gzip file, in order, with a limit that applies to all readers together.

    The limit is the lower of :class:`hespas.files.limits.Limits` and ``max_bytes``. ``done`` is the number of
    decompressed bytes read so far.
    """

    def __init__(self, stream: BinaryIO, path: Path, max_bytes: int | None = None, *, code: str = "") -> None:
        """Start at the beginning of ``stream``, an open file, which is closed together with this object.

        Errors name the file ``path``; ``code`` is the code of the error about a decompression bomb.
        """
        self._path = path
        self._raw = stream
        self._raw.seek(0)
        self._stream = cast("BinaryIO", _isal("igzip").IGzipFile(fileobj=self._raw, mode="rb"))
        self._most = limits().input_bytes if max_bytes is None else max_bytes
        self._code = code
        self.done = 0

    def read(self, size: int) -> bytes:
        """Return up to ``size`` decompressed bytes, none at the end.

        Raises the :func:`damage_errors` for a damaged stream and ``FormatError`` as soon as it exceeds the
        limit.
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
                hint=f"if you trust it, decompress it yourself or set {INPUT_BYTES_VARIABLE}",
            )
        return data

    def before_damage(self, skip: int, size: int) -> bytes:
        """Return up to ``size`` intact decompressed bytes of a damaged file from byte ``skip`` on.

        :meth:`read` had decompressed these bytes when it raised. They are decompressed again from the start;
        nothing can be read afterwards.
        """
        make = _isal("isal_zlib").decompressobj
        inflater, position = make(wbits=31), 0
        intact = bytearray()
        self._raw.seek(0)
        while len(intact) < size and (packed := self._raw.read(_PIECE_BYTES)):
            while packed:
                try:
                    data = inflater.decompress(packed)
                except damage_errors():
                    return bytes(intact[:size])
                intact += data[max(0, skip - position) :]
                position += len(data)
                packed = inflater.unused_data
                inflater = make(wbits=31) if inflater.eof else inflater
        return bytes(intact[:size])

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        self._raw.close()

    def __enter__(self) -> PackedInput:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _isal(module: str) -> Any:
    """Import and return a module of isal, whose types are incomplete for type checkers."""
    return import_module(f"isal.{module}")


def damage_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that :meth:`PackedInput.read` raises for a damaged or truncated file."""
    return EOFError, OSError, ValueError, _isal("isal_zlib").error


@contextmanager
def open_output(path: Path, *, packed: bool) -> Generator[BinaryIO]:
    """Open a binary stream to ``path`` inside the block. If ``packed``, it is gzipped without time and name,
    so that equal content gives equal files.

    Raises ``OutputError`` if the system refuses.
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
    """Raise ``FormatError`` for pipes, devices and sockets, which may block or never end.

    Missing and inaccessible files pass; opening them reports the error.
    """
    try:
        mode = input_location(path).stat().st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise FormatError(
            "not a regular file",
            path=str(path),
            hint="give a file; hespas-convert reads from a pipe with: hespas-convert - DST < PIPE",
        )


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading bytes.

    Raises ``FormatError`` if it cannot be opened, and for pipes, devices, sockets and folders, because a pipe
    may block forever.
    """
    try:
        return open_input(path)
    except OSError as error:
        raise _unreadable(error, path) from error
    except ValueError as error:  # a path with a NUL character
        raise FormatError(str(error), path=str(path), hint="check the path") from error


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file, decompressed if it starts with the gzip magic.

    The result has at most ``max_bytes``, and for gzip at most the limit of :class:`PackedInput`. A larger
    file or decompression bomb is refused before it fills memory, and content is never held twice. Raises
    ``FormatError`` for an unreadable, empty, truncated or oversized file.
    """
    refuse_special_files(path)
    with open_regular(path) as stream:
        magic = stream.read(len(GZIP_MAGIC))
        if not magic:
            hint = "write the file again: the program that wrote it may have been interrupted"
            raise FormatError("the file is empty", path=str(path), position="byte 0", hint=hint)
        if magic == GZIP_MAGIC:
            # The limit applies to the sum of all members.
            content = BytesIO()  # getvalue() does not copy
            try:
                with PackedInput(stream, path, max_bytes) as packed:
                    while part := packed.read(_CHUNK_BYTES):
                        content.write(part)
            except damage_errors() as error:
                early = isinstance(error, EOFError)
                problem = "gzip stream ends early" if early else f"broken gzip stream: {error}"
                raise _damaged(problem, path, f"byte {content.tell()} of the decompressed data") from error
            return content.getvalue()
        stream.seek(0)
        return _content(stream, path, max_bytes, hint="check that the file has the expected format")


def read_start(path: Path, size: int) -> bytes:
    """Return the first bytes of a file, from which its format is detected: up to ``size`` bytes, decompressed
    if gzipped.

    Raises ``FormatError`` if the file cannot be read, or is gzipped and damaged from the start.
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
        raise _damaged(f"broken gzip stream: {error}", path, f"byte {_first_broken_byte(data)}") from error
    if not start and not inflater.eof:
        raise _damaged("gzip stream ends early", path, f"byte {len(data)}")
    return start


def first_bytes(path: Path, size: int) -> bytes:
    """Return the first bytes of a file as :func:`read_start` does; empty if it raises."""
    try:
        return read_start(path, size)
    except FormatError:
        return b""


def _first_broken_byte(packed: bytes) -> int:
    """Return the position at which a gzip stream becomes invalid, which zlib does not report."""
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
    """Return the content of a small file. It is not decompressed and may be empty. ``what`` describes the
    file in messages ("a system configuration").

    Raises ``FormatError`` if it is not a regular file, cannot be read, or has more than ``max_bytes``.
    """
    with open_regular(path) as stream:
        return _content(stream, path, max_bytes, hint=f"check that this is {what}")


def _content(stream: BinaryIO, path: Path, max_bytes: int, *, hint: str) -> bytes:
    """Return all bytes of a stream after a check of its size. Files that grow, or report no size, are read to
    the end.
    """
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
            hint=f"{hint}, or raise the limit with {INPUT_BYTES_VARIABLE}",
        )
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _unreadable(error: OSError, path: Path) -> FormatError:
    is_special = error.errno in {errno.EISDIR, errno.EINVAL}
    hint = "give a regular file; copy the data of a pipe to one" if is_special else "check the path"
    return FormatError(error.strerror or str(error), path=str(path), hint=hint)
