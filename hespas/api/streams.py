"""Standard input and output as files: formats are told by content, and a result goes out when it is whole."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from hespas.graph.errors import OutputError, UsageError

__all__ = ["STANDARD_STREAM", "check_streams", "spooled_input", "spooled_output"]

STANDARD_STREAM = "-"


def check_streams(source: str, destination: str) -> None:
    """Raise ``UsageError`` where a stream that is named is closed, before any work is done."""
    if source == STANDARD_STREAM and _bytes_of(sys.stdin) is None:
        raise UsageError("standard input is closed", path=source, hint="name a file, or pipe one in")
    if destination == STANDARD_STREAM and _bytes_of(sys.stdout) is None:
        raise _closed()


def spooled_input(stack: ExitStack) -> Path:
    """A copy of standard input that goes with ``stack``. Raises ``OutputError`` where there is no room for it
    and ``UsageError`` where the stream is closed or cannot be read.
    """
    stream = _bytes_of(sys.stdin)
    if stream is None:
        raise UsageError("standard input is closed", path=STANDARD_STREAM, hint="name a file, or pipe one in")
    spool = _scratch(stack) / "stdin"
    try:
        with spool.open("wb") as copy:
            shutil.copyfileobj(stream, copy)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise _no_room(error, spool.parent) from error
        raise UsageError(
            f"standard input cannot be read: {error.strerror or error}",
            path=STANDARD_STREAM,
            hint="name a file, or pipe one in",
        ) from error
    return spool


@contextmanager
def spooled_output(stack: ExitStack) -> Generator[Path]:
    """A file that goes to standard output once it is written. Raises ``OutputError`` where either fails."""
    spool = _scratch(stack) / "standard.output"
    try:
        yield spool
    except OutputError as error:
        if error.path == str(spool):  # nobody knows the file
            error.path, error.hint = STANDARD_STREAM, _room_hint(spool.parent)
        raise
    stream = _bytes_of(sys.stdout)
    if stream is None:
        raise _closed()
    with spool.open("rb") as content:
        try:
            shutil.copyfileobj(content, stream)
            stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(
                f"standard output cannot be written: {error.strerror or error}",
                path=STANDARD_STREAM,
                hint="free some space or choose another destination",
            ) from error


def _bytes_of(stream: object) -> BinaryIO | None:
    """The bytes under a text stream; None where the stream was closed before we began."""
    found: BinaryIO | None = getattr(stream, "buffer", None)
    return found


def _scratch(stack: ExitStack) -> Path:
    """A folder that goes when the conversion ends."""
    try:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hespas-")))
    except OSError as error:
        raise _no_room(error, Path(os.environ.get("TMPDIR", "/tmp"))) from error  # only told


def _no_room(error: OSError, folder: Path) -> OutputError:
    return OutputError(
        f"no temporary file can be written: {error.strerror or error}",
        path=STANDARD_STREAM,
        hint=_room_hint(folder),
    )


def _room_hint(folder: Path) -> str:
    return f"free some space in {folder.parent}, or set TMPDIR to another folder"


def _closed() -> OutputError:
    return OutputError(
        "standard output is closed", path=STANDARD_STREAM, hint="name a file, or pipe it somewhere"
    )
