"""Files as streams, gzip through isal: several times as fast as zlib. What is read is a regular file and
bounded, and equal content makes equal files; this is the one place that knows isal's types.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from hespas.files.limits import VARIABLE, limits
from hespas.graph.errors import FormatError, OutputError

__all__ = ["GZIP_MAGIC", "PackedInput", "damage_errors", "open_input", "open_output", "same_file"]

GZIP_MAGIC = b"\x1f\x8b"
_LEVEL = 2
"""Of isal's four: several times as fast as zlib, for a tenth more bytes."""
_PIECE_BYTES = 4096


class _Inflater(Protocol):
    """A decompressor of isal."""

    eof: bool
    unused_data: bytes

    def decompress(self, data: bytes, /) -> bytes: ...


def open_input(path: Path, buffering: int = -1) -> BinaryIO:
    """The bytes of a file. Raises ``OSError`` where it cannot be opened, and for pipes, devices, sockets and
    folders: the wait for a pipe's other end would be forever.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
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
    return link if os.path.exists(link) else str(path)  # noqa: PTH110 - it stays a string


class PackedInput:
    """The decompressed bytes of a gzip file, in order, with the one bound on them that all readers share:
    :class:`hespas.files.limits.Limits` and ``max_bytes``. ``done`` is how many have been read.
    """

    def __init__(self, stream: BinaryIO, path: Path, max_bytes: int | None = None, *, code: str = "") -> None:
        """Read an open file, which is closed with this, from its start. ``path`` is how errors call it,
        ``code`` is put before what is said of a bomb.
        """
        self._path = path
        self._raw = stream
        self._raw.seek(0)
        opener = cast("Callable[[BinaryIO, str], BinaryIO]", import_module("isal.igzip").open)
        self._stream = opener(self._raw, "rb")
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
                f"{self._code}decompresses to more than {min(self._most, allowed):,} bytes",
                path=str(self._path),
                hint=f"if you trust it: decompress it yourself, or set {VARIABLE}",
            )
        return data

    def before_damage(self, skip: int, size: int) -> bytes:
        """Up to ``size`` decompressed bytes of a damaged file from byte ``skip`` on: what :meth:`read` had
        when it raised, and kept for itself. Decompresses from the start; nothing else can be read after.
        """
        library = import_module("isal.isal_zlib")
        make = cast("Callable[..., _Inflater]", library.decompressobj)
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


def damage_errors() -> tuple[type[Exception], ...]:
    """What :meth:`PackedInput.read` raises for a file that is damaged or cut off."""
    broken = cast("type[Exception]", import_module("isal.isal_zlib").error)
    return EOFError, OSError, ValueError, broken


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
            packer = cast("Callable[..., BinaryIO]", import_module("isal.igzip").IGzipFile)
            with packer(filename="", mode="wb", fileobj=raw, compresslevel=_LEVEL, mtime=0) as stream:
                yield stream
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror or error}", path=str(path)) from error
