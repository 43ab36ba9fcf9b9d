"""The file of an SQLite database before it is opened: whether all of it is there, and unpacking it."""

from __future__ import annotations

from pathlib import Path

from hespas.files.packed import PackedInput, damage_errors
from hespas.files.source import open_regular
from hespas.graph.errors import FormatError

__all__ = ["HEADER_BYTES", "refuse_cut_off", "unpack_database"]

HEADER_BYTES = 100
_CHUNK_BYTES = 4 << 20
_CUT_OFF_HINT = "copy the file again, or export the profile again"


def refuse_cut_off(header: bytes, size: int, path: str) -> None:
    """SQLite reads zeros where the last page of a file is not whole, and so loses rows without a word.

    The header is described at https://sqlite.org/fileformat2.html; its count of pages holds where the file
    was last written by a version that keeps it.
    """
    if len(header) < HEADER_BYTES:
        raise FormatError("the database is cut off", path=path, position=f"byte {size}", hint=_CUT_OFF_HINT)
    stated = int.from_bytes(header[16:18], "big")
    page_bytes = 1 << 16 if stated == 1 else stated
    pages = int.from_bytes(header[28:32], "big") if header[24:28] == header[92:96] else 0
    if pages * page_bytes > size or (page_bytes and size % page_bytes):
        expected = f"{pages * page_bytes:,} bytes" if pages else f"whole pages of {page_bytes:,} bytes"
        raise FormatError(
            f"the database is cut off: {size:,} bytes of {expected}",
            path=path, position=f"byte {size}", hint=_CUT_OFF_HINT,
        )  # fmt: skip


def unpack_database(path: Path, into: Path, max_bytes: int) -> None:
    """Gunzip a chunk at a time, no further than :class:`hespas.files.packed.PackedInput` goes."""
    with PackedInput(open_regular(path), path, max_bytes) as packed, into.open("wb") as plain:
        while True:
            try:
                chunk = packed.read(_CHUNK_BYTES)
            except damage_errors() as error:
                why = "gzip stream ends early" if isinstance(error, EOFError) else f"cannot be read: {error}"
                raise FormatError(
                    why, path=str(path), position=f"byte {packed.done}", hint="copy the file again"
                ) from error
            if not chunk:
                return
            plain.write(chunk)
