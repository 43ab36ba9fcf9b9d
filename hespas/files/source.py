"""Reading input bytes safely: gzip told by its magic, decompressed size bounded, errors with position."""

from __future__ import annotations

import stat
import zlib
from pathlib import Path

from hespas.graph.errors import FormatError

__all__ = ["read_bytes", "refuse_special_files"]

_MIN_ALLOWED_BYTES = 64 << 20
_MAX_RATIO = 200
"""Deflate reaches 1,032:1 on zeros; real programs and traces stay below 60:1."""
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
            "not a regular file", path=str(path), hint="pipe it in: hespas-convert - DESTINATION < FILE"
        )


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """The content of a file, gunzipped where it starts with the gzip magic.

    Bounds the result by ``max_bytes`` and, for gzip, by 200 times the file (but at least 64 MiB), so that a
    bomb is refused before it fills memory. Raises ``FormatError`` for an unreadable, empty, truncated or
    oversized file.
    """
    refuse_special_files(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise FormatError(error.strerror or str(error), path=str(path), hint="check the path") from error
    if not raw:
        hint = "was the writing program interrupted?"
        raise FormatError("the file is empty", path=str(path), position="byte 0", hint=hint)
    if not raw.startswith(b"\x1f\x8b"):
        if len(raw) > max_bytes:
            raise FormatError(
                f"{len(raw):,} bytes, more than the limit of {max_bytes:,}",
                path=str(path),
                position=f"byte {max_bytes}",
                hint="is this a file of the format it is read as?",
            )
        return raw
    return _gunzip(path, raw, min(max_bytes, max(_MIN_ALLOWED_BYTES, _MAX_RATIO * len(raw))))


def _too_large(path: Path, limit: int) -> FormatError:
    return FormatError(
        f"decompresses to more than {limit:,} bytes",
        path=str(path),
        position=f"byte {limit} of what is unpacked",
        hint="decompress it yourself if you trust it",
    )


def _gunzip(path: Path, raw: bytes, limit: int) -> bytes:
    """All members of a gzip file; the limit counts their sum."""
    parts: list[bytes] = []
    total, position, ended = 0, 0, False
    inflate = zlib.decompressobj(wbits=31)
    while position < len(raw):
        data = inflate.unconsumed_tail or raw[position : position + _CHUNK_BYTES]
        try:
            part = inflate.decompress(data, _CHUNK_BYTES)
        except zlib.error as error:
            raise FormatError(
                f"broken gzip stream: {error}",
                path=str(path),
                position=f"byte {position}",
                hint="copy the file again",
            ) from error
        parts.append(part)
        total += len(part)
        if total > limit:
            raise _too_large(path, limit)
        ended = inflate.eof
        if ended:
            position = min(position + _CHUNK_BYTES, len(raw)) - len(inflate.unused_data)
            inflate = zlib.decompressobj(wbits=31)
        elif not inflate.unconsumed_tail:
            position += _CHUNK_BYTES
    if not ended:
        raise FormatError(
            "gzip stream ends early", path=str(path), position=f"byte {len(raw)}", hint="copy the file again"
        )
    return b"".join(parts)
