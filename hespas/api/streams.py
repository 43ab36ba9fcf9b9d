"""Standard input and output as files: formats are told by content, and a result goes out when it is whole.

Documents and tables beside a result may also go to a pipe or a device, which nothing replaces.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from hespas.files.limits import VARIABLE, limits
from hespas.files.output import check_destination, placed_at_once, write_atomically
from hespas.graph.errors import FormatError, OutputError, UsageError

__all__ = [
    "STANDARD_STREAM",
    "check_document",
    "check_streams",
    "is_standard_output",
    "is_stream",
    "put",
    "spooled_input",
    "spooled_output",
]

STANDARD_STREAM = "-"
_PIECE_BYTES = 1 << 20
_BEGINNING_BYTES = 16 << 20
"""More than any format needs to be told."""
_STANDARD_OUTPUT = frozenset({STANDARD_STREAM, "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"})


def is_standard_output(path: Path | None) -> bool:
    """Whether a document goes to standard output, however that is called."""
    return str(path) in _STANDARD_OUTPUT


def is_stream(path: Path) -> bool:
    """Whether a document that goes there replaces nothing: standard output, a pipe, a device."""
    if is_standard_output(path):
        return True
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def check_document(path: Path, *, overwrite: bool) -> None:
    """Raise ``OutputError`` where :func:`put` cannot succeed, before any work is done."""
    if is_standard_output(path):
        if _bytes_of(sys.stdout) is None:
            raise _closed()
        return
    if is_stream(path):
        if not os.access(path, os.W_OK):
            raise OutputError("is not writable", path=str(path), hint="choose another destination")
        return
    if path.is_dir():
        raise OutputError("exists and is a directory", path=str(path), hint="name a file in it")
    check_destination(path, overwrite=overwrite)


def put(path: Path, fill: Callable[[Path], None], *, overwrite: bool) -> None:
    """Let ``fill`` write a document: a file appears whole or not at all, and replaces another only with
    ``overwrite``; standard output, a pipe or a device gets it once it is whole. Raises ``OutputError``.
    """
    if not is_stream(path):
        write_atomically(path, fill, overwrite=overwrite, directory=False)
        return
    with ExitStack() as stack:
        if is_standard_output(path):
            fill(stack.enter_context(spooled_output(stack)))
            return
        spool = _scratch(stack) / "document"
        fill(spool)
        try:
            with spool.open("rb") as content, path.open("wb") as stream:
                shutil.copyfileobj(content, stream)
        except BrokenPipeError:
            return  # who reads has seen enough
        except OSError as error:
            raise OutputError(
                f"cannot be written: {error.strerror or error}",
                path=str(path),
                hint="free some space or choose another destination",
            ) from error


def check_streams(source: str, destination: str) -> None:
    """Raise ``UsageError`` where a stream that is named is closed, before any work is done."""
    if source == STANDARD_STREAM and _bytes_of(sys.stdin) is None:
        raise UsageError("standard input is closed", path=source, hint="name a file, or pipe one in")
    if destination == STANDARD_STREAM and _bytes_of(sys.stdout) is None:
        raise _closed()


def spooled_input(stack: ExitStack, check: Callable[[Path], object]) -> Path:
    """A copy of standard input that goes with ``stack``. A stream that goes on past its beginning must pass
    ``check``, which sees that much of it: one without end is refused for what it is.

    Raises ``OutputError`` where there is no room for it, ``UsageError`` where the stream is closed or cannot
    be read, ``FormatError`` where it is longer than any input may be, and what ``check`` raises.
    """
    stream = _bytes_of(sys.stdin)
    if stream is None:
        raise UsageError("standard input is closed", path=STANDARD_STREAM, hint="name a file, or pipe one in")
    spool = _scratch(stack) / "stdin"
    most = limits().input_bytes
    try:
        with spool.open("wb") as copy:
            taken = 0
            while part := stream.read(_PIECE_BYTES):
                copy.write(part)
                taken += len(part)
                if taken > most:
                    raise FormatError(
                        f"standard input goes on past {most:,} bytes, the limit",
                        path=STANDARD_STREAM,
                        hint=f"if you trust it, {VARIABLE} (or --max-input-bytes) raises the limit",
                    )
                if taken - len(part) < _BEGINNING_BYTES <= taken:
                    copy.flush()
                    check(spool)
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
        with placed_at_once():
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
            return  # who reads has seen enough
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
