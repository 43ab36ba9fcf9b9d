"""Opening a trace file for writing, gzipped or not."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from hespas.converters.chakra.gzipped import pack
from hespas.graph.errors import OutputError

__all__ = ["open_output"]


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
            with pack(raw) as stream:
                yield stream
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror or error}", path=str(path)) from error
