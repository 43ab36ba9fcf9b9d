"""Reading input bytes safely: regular files only, gzip told by its magic, sizes bounded before memory is
taken, errors with position.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from hespas.files.limits import VARIABLE
from hespas.files.packed import GZIP_MAGIC, PackedInput, damage_errors, open_input
from hespas.graph.errors import FormatError

__all__ = ["open_regular", "read_bytes", "read_document", "refuse_special_files"]

_CHUNK_BYTES = 1 << 20


def refuse_special_files(path: Path) -> None:
    """Raise ``FormatError`` for pipes, devices and sockets, which may never end or never begin.

    What is not there, or may not be looked at, is left to whoever opens it.
    """
    try:
        mode = path.stat().st_mode
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

    The result has at most ``max_bytes``, and for gzip no more than :class:`~hespas.files.packed.PackedInput`
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
        raise FormatError(
            "gzip stream ends early" if early else f"broken gzip stream: {error}",
            path=str(path),
            position=f"byte {content.tell()} of the decompressed data",
            hint="copy the file again",
        ) from error
    return content.getvalue()
