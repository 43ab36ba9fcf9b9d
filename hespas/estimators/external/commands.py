"""Other people's programs, each in a folder of its own: bounded in time, ended with all they start."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic

from hespas.files.sandbox import clean_environment, tied_to_parent

__all__ = ["CommandError", "read_answer", "run_command"]

_MOST_BYTES = 16 << 20
_MOST_WRITTEN_BYTES = 256 << 20
_ASKED_AGAIN_S = 0.2
_LAST_WORDS = 2000


class CommandError(Exception):
    """A program that could not be started, failed, or took too long; the message says which, in its words."""


def run_command(
    command: Sequence[str], folder: Path, timeout_s: float, environment: Mapping[str, str] | None = None
) -> str:
    """Run a program in ``folder`` and return what it wrote, errors included (the last 16 MiB of it).

    Raises :class:`CommandError`.
    """
    with TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                tied_to_parent(command), cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=clean_environment(environment), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise CommandError(f"{command[0]} does not start: {error.strerror or error}") from error
        try:
            status = _status(process, output.fileno(), timeout_s)
        finally:
            _end(process)
        size = output.seek(0, os.SEEK_END)
        output.seek(max(size - _MOST_BYTES, 0))
        text = output.read().decode("utf-8", "replace")
    if status:
        raise CommandError(f"exit status {status}: {text.strip()[-_LAST_WORDS:] or 'it says nothing'}")
    return text


def read_answer(path: Path) -> bytes:
    """What a program left in a file; nothing where it left none. Raises :class:`CommandError` for more than
    16 MiB.
    """
    if not path.is_file():
        return b""
    if path.stat().st_size > _MOST_BYTES:
        raise CommandError(f"{path.name} is larger than {_MOST_BYTES >> 20} MiB")
    return path.read_bytes()


def _status(process: subprocess.Popen[bytes], output: int, timeout_s: float) -> int:
    """The exit status, asked for again and again: who writes without end would fill the disk until then."""
    end_s = monotonic() + timeout_s
    while True:
        left_s = end_s - monotonic()
        try:
            return process.wait(min(_ASKED_AGAIN_S, max(left_s, 0.0)))
        except subprocess.TimeoutExpired:
            if left_s <= 0:
                raise CommandError(f"no result within {timeout_s:g} s") from None
        if os.fstat(output).st_size > _MOST_WRITTEN_BYTES:
            raise CommandError(f"it wrote more than {_MOST_WRITTEN_BYTES >> 20} MiB of messages")


def _end(process: subprocess.Popen[bytes]) -> None:
    """The program and all it started, also where it ended by itself and left them behind."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
