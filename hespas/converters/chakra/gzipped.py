"""Trace files as streams, gzipped or not. Gzip goes through isal, several times as fast as zlib; this is
the one place that knows its types.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from hespas.graph.errors import OutputError

__all__ = ["before_damage", "damage_errors", "open_gzip", "open_output"]

_LEVEL = 2
_PIECE_BYTES = 4096


class _Inflater(Protocol):
    """A decompressor of isal."""

    eof: bool
    unused_data: bytes

    def decompress(self, data: bytes, /) -> bytes: ...


def open_gzip(path: Path) -> BinaryIO:
    """A stream of the decompressed bytes of a file."""
    opener = cast("Callable[[Path, str], BinaryIO]", import_module("isal.igzip").open)
    return opener(path, "rb")


def before_damage(path: Path, skip: int, size: int) -> bytes:
    """Up to ``size`` decompressed bytes of a damaged file from byte ``skip`` on: what a stream that raises
    had already, and kept for itself. Decompresses from the start.
    """
    library = import_module("isal.isal_zlib")
    make = cast("Callable[..., _Inflater]", library.decompressobj)
    inflater, position = make(wbits=31), 0
    found = bytearray()
    with path.open("rb") as stream:
        while len(found) < size and (packed := stream.read(_PIECE_BYTES)):
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


def damage_errors() -> tuple[type[Exception], ...]:
    """What a stream of :func:`open_gzip` raises for a file that is damaged or cut off."""
    broken = cast("type[Exception]", import_module("isal.isal_zlib").error)
    return EOFError, OSError, broken


@contextmanager
def open_output(path: Path, *, packed: bool) -> Generator[BinaryIO]:
    """A binary stream to ``path``. Raises :class:`OutputError` when the system refuses.

    Gzip output carries no time and no name: equal traces are equal files.
    """
    try:
        with path.open("wb") as raw:
            if not packed:
                yield raw
                return
            with _pack(raw) as stream:
                yield stream
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror or error}", path=str(path)) from error


def _pack(raw: BinaryIO) -> BinaryIO:
    """A stream that compresses into ``raw``."""
    packer = cast("Callable[..., BinaryIO]", import_module("isal.igzip").IGzipFile)
    return packer(filename="", mode="wb", fileobj=raw, compresslevel=_LEVEL, mtime=0)
