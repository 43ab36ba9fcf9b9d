"""Output of the commands on the terminal: results, messages, diagnostics and progress bars."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import TextIO

import typer

from hespas.cli.text import flagged
from hespas.graph.diagnostics import Diagnostics, Severity
from hespas.graph.errors import OutputError, clipped
from hespas.report.texts import plain_text

__all__ = [
    "ClosedOutput",
    "discard_output",
    "emit",
    "flush_output",
    "is_quiet",
    "is_verbose",
    "open_closed_descriptors",
    "print_info",
    "print_message",
    "progress_bar",
    "report_diagnostics",
    "results_on_stderr",
    "set_verbosity",
    "stdout_redirected",
]

_VERBOSE: ContextVar[bool | None] = ContextVar("_VERBOSE", default=None)
_RESULT_ON_OUTPUT: ContextVar[bool] = ContextVar("_RESULT_ON_OUTPUT", default=False)
_MESSAGES_PER_CODE = 3
_SEVERITY_WORDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_ANSI_CODES = {"error:": "31", "internal error:": "31", "warning:": "33", "  try:": "36", "note:": "2"}
"""Prefix of a line -> ANSI code of its colour."""


class ClosedOutput(io.TextIOBase):
    """Standard output that the caller has closed. Every write raises ``OSError``; Python would drop it."""

    def write(self, _: str, /) -> int:
        """Raise ``OSError``."""
        raise OSError(errno.EBADF, "it is closed")


@contextmanager
def results_on_stderr(enabled: bool) -> Generator[None]:
    """Within the context and if ``enabled``, let :func:`emit` write to standard error, because a document
    goes to standard output.
    """
    before = _RESULT_ON_OUTPUT.set(enabled)
    try:
        yield
    finally:
        _RESULT_ON_OUTPUT.reset(before)


@contextmanager
def stdout_redirected() -> Generator[None]:
    """Within the context, send standard output to standard error: of user programs, their threads and the
    processes that they start.
    """
    saved: int | None = None
    with redirect_stdout(sys.stderr):
        try:
            if sys.__stdout__ is not None and sys.__stdout__.fileno() == 1:
                sys.__stdout__.flush()
                saved = os.dup(1)
                os.dup2(2, 1)
        except (OSError, ValueError):  # standard output is closed or is not a file
            saved = None
        try:
            yield
        finally:
            if saved is not None:
                os.dup2(saved, 1)
                os.close(saved)


def set_verbosity(context: typer.Context, verbose: bool | None) -> None:
    """Set the amount of messages until the command ends: True for all, False for results and errors only."""
    before = _VERBOSE.set(verbose)
    context.call_on_close(lambda: _VERBOSE.reset(before))


def is_verbose() -> bool:
    """Return True if the command runs with ``--verbose``."""
    return _VERBOSE.get() is True


def is_quiet() -> bool:
    """Return True if the command runs with ``--quiet``."""
    return _VERBOSE.get() is False


def emit(text: str | Iterable[str]) -> None:
    """Write a line, or lines, to standard output. Raises ``OutputError`` if it is closed or full."""
    if _RESULT_ON_OUTPUT.get():
        print_message(text)
        return
    if sys.stdout is None or isinstance(sys.stdout, ClosedOutput):
        raise OutputError("standard output is closed", hint="redirect it to a file: > FILE")
    _write(sys.stdout, _lines(text))


def print_message(text: str | Iterable[str]) -> None:
    """Write a line, or lines, to standard error; nothing if it is closed. Names of Python arguments in
    messages of the library become the options of the command line.
    """
    if sys.stderr is None:
        return
    try:
        lines = flagged(_lines(text))
        # https://no-color.org
        if (
            sys.stderr.isatty()
            and not os.environ.get("NO_COLOR")
            and os.environ.get("TERM", "dumb") != "dumb"
        ):
            for word, code in _ANSI_CODES.items():
                lines = re.sub(f"(?m)^{word}", f"\033[{code}m{word}\033[0m", lines)
        sys.stderr.write(lines)
        sys.stderr.flush()
    except OSError:
        discard_output(sys.stderr)


def print_info(text: str | Iterable[str]) -> None:
    """Write to standard error like :func:`print_message`, unless the command runs with ``--quiet``."""
    if not is_quiet():
        print_message(text)


def report_diagnostics(diagnostics: Diagnostics, source: Path | str) -> None:
    """Print warnings and errors on standard error: for each code its count and up to three messages that
    differ in more than numbers. Notes of conversions are printed elsewhere.
    """
    counts = diagnostics.counts()
    printed: dict[str, set[str]] = {}
    for diagnostic in diagnostics:
        texts = printed.setdefault(diagnostic.code, set())
        text = re.sub(r"\d+", "", diagnostic.message)
        if diagnostic.severity is Severity.INFO or text in texts or len(texts) == _MESSAGES_PER_CODE:
            continue
        path, position = diagnostic.path or str(source), diagnostic.location
        if position != path and not position.startswith(f"{path}:"):
            position = ": ".join(part for part in (path, position) if part)
        count = counts[diagnostic.code]
        times = f" ({count:,} times)" if count > 1 and not texts else ""
        texts.add(text)
        show = print_message if diagnostic.severity is Severity.ERROR else print_info
        word = _SEVERITY_WORDS[diagnostic.severity]
        show(f"{word}: {clipped(position)}: {clipped(diagnostic.message)} [{diagnostic.code}]{times}")


@contextmanager
def progress_bar(label: str, wanted: bool | None) -> Generator[Callable[[int, int], None] | None]:
    """Yield a callback that draws a progress bar on standard error, or None.

    None is yielded if ``wanted`` is False, or if it is None and standard error is not a terminal.
    """
    if sys.stderr is None or wanted is False or (wanted is None and not sys.stderr.isatty()):
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def flush_output() -> None:
    """Flush standard output. Raises ``OutputError`` if that fails."""
    if sys.stdout is not None:
        _write(sys.stdout, "")


def discard_output(stream: TextIO | io.TextIOBase) -> None:
    """Connect a stream that cannot be written to the null device, so that Python does not retry at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except OSError:  # a stream of a test has no file descriptor
        return


def _lines(text: str | Iterable[str]) -> str:
    """Join lines, each with a line end. Line breaks inside a text are escaped, so that input cannot forge
    a message.
    """
    return "".join(f"{plain_text(line)}\n" for line in ([text] if isinstance(text, str) else text))


def _write(stream: TextIO, text: str) -> None:
    """Write a text, or flush if it is empty. A broken pipe is ignored: the work continues."""
    try:
        if text:
            stream.write(text)
        else:
            stream.flush()
    except BrokenPipeError:
        discard_output(stream)
    except OSError as error:
        discard_output(stream)
        raise OutputError(
            f"standard output cannot be written: {error.strerror or error}",
            hint="free disk space or choose another destination",
        ) from error


def open_closed_descriptors() -> None:
    """Open the null device as each closed standard stream, so that files do not get their descriptors and
    receive the messages of libraries.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
