"""Output streams, gzipped or not: equal content makes equal files."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import BinaryIO, cast

from hespas.graph.errors import OutputError

__all__ = ["open_output"]

_LEVEL = 2
"""Of isal's four: several times as fast as zlib, for a tenth more bytes."""


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
