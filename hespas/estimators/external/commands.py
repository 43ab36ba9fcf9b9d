"""Other people's programs, each in a folder of its own: bounded in time, ended with all they start."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

__all__ = ["CommandError", "run_command"]

_MOST_BYTES = 16 << 20
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
                list(command), cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env={**os.environ, **(environment or {})}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise CommandError(f"{command[0]} does not start: {error.strerror or error}") from error
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise CommandError(f"no result within {timeout_s:g} s") from None
        finally:
            _end(process)
        size = output.seek(0, os.SEEK_END)
        output.seek(max(size - _MOST_BYTES, 0))
        text = output.read().decode("utf-8", "replace")
    if status:
        raise CommandError(f"exit status {status}: {text.strip()[-_LAST_WORDS:] or 'it says nothing'}")
    return text


def _end(process: subprocess.Popen[bytes]) -> None:
    """The program and what it started; nothing where it ended by itself."""
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
