"""Execution of a command: start, signals, standard input, and errors as messages and exit codes."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from traceback import extract_tb
from types import FrameType
from typing import NoReturn

import typer

from hespas.api.documents import is_standard_output, spooled_input
from hespas.cli.terminal import (
    discard_output,
    flush_output,
    open_closed_descriptors,
    print_message,
    report_diagnostics,
    results_on_stderr,
)
from hespas.converters import find_format
from hespas.files.limits import command_budget, memory_error
from hespas.files.output import place_together
from hespas.files.streams import STANDARD_STREAM, first_bytes, standard_input_in
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import FormatError, HespasError, OutputError, clipped, exit_code
from hespas.graph.plugins import collect_plugin_errors

__all__ = ["command_line", "reported_error"]

_Paths = Sequence[Path | str | None]

_SNIFFED_BYTES = 1 << 16


class _Interruption:
    """Record of a signal that ends the command. An exception that a signal handler raises is not enough,
    because libraries such as NumPy suppress or replace it.
    """

    received = False


@contextmanager
def command_line(
    debug: bool,
    diagnostics: Diagnostics | None = None,
    source: str = "",
    *,
    documents: Collection[Path | None] = (),
    reads: _Paths = (),
    writes: _Paths = (),
    has_budget: bool = True,
) -> Generator[None]:
    """Run the body of a command: an error becomes one message on standard error and an exit code.

    ``diagnostics`` about ``source`` are printed before the error, because they often explain it. If one of
    ``documents`` is standard output, :func:`emit` writes to standard error. Files that the body writes are
    put in place after everything is printed.

    ``reads`` and ``writes`` are the files in the user's options: an ``OSError`` about one of them is reported
    as an error of the input or the output. ``-`` in ``reads`` is standard input, which is copied to a file.
    Without ``has_budget``, the limits of untrusted inputs do not apply to the body as a whole.
    """
    # By default, Arrow reserves a gigabyte of address space: too much if that is limited.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    gc.set_threshold(200_000, 20, 20)  # readers create many objects at once and no cycles
    open_closed_descriptors()
    with results_on_stderr(any(map(is_standard_output, documents))):
        try:
            with (
                _signals_handled(),
                command_budget() if has_budget else nullcontext(),
                _standard_input_spooled(reads),
                _plugin_warnings(),
                _results_placed_last(),
            ):
                yield
        except (typer.Exit, typer.BadParameter):
            raise
        except BrokenPipeError as error:
            discard_output(sys.stdout)
            raise typer.Exit(0) from error
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, HespasError | MemoryError) and diagnostics is not None:
                report_diagnostics(diagnostics, source)
            if debug and not _is_interrupt(error):
                raise
            raise typer.Exit(_report_failure(error, source, reads, (*documents, *writes))) from error


def _is_interrupt(error: BaseException) -> bool:
    """Return True if the error is, or was raised in place of, the interrupt of a signal."""
    if isinstance(error, KeyboardInterrupt):
        return True
    return _Interruption.received and not isinstance(error, HespasError | MemoryError)


def _report_failure(error: BaseException, source: str, reads: _Paths, writes: _Paths) -> int:
    """Print an error, with its hint on a second line; return the exit code."""
    if _is_interrupt(error):
        print_message("interrupted: no partial output was left")
        return 130
    error = reported_error(error, source, reads, writes)
    if isinstance(error, HespasError):
        lines = [f"error: {error}"]
        if error.hint:
            hint = f"  try: {clipped(error.hint)}"
            lines = [f"error: {str(error).removesuffix(hint).removesuffix(chr(10))}", hint]
    else:
        lines = [
            f"internal error: {type(error).__name__}: {clipped(str(error))}{_raised_at(error)}",
            "  try: run again with --debug and report the output",
        ]
    print_message(lines)
    return exit_code(error)


def reported_error(
    error: BaseException, source: str = "", reads: _Paths = (), writes: _Paths = ()
) -> BaseException:
    """Return the error of Hespas for exhausted memory, and for a system error about one of the files; any
    other error as it is.
    """
    if isinstance(error, MemoryError):
        return memory_error(source)
    if isinstance(error, OSError):
        return _system_refusal(error, source, reads, writes) or error
    return error


def _raised_at(error: BaseException) -> str:
    """Return the file and line that raised an error, in brackets. The file may be of a plug-in."""
    frames = extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _system_refusal(error: OSError, source: str, reads: _Paths, writes: _Paths) -> HespasError | None:
    """Convert an error of the operating system to an error of the input or output, if it is about memory or a
    file in the user's options. Return None for any other error, which is a bug.
    """
    if error.errno == errno.ENOMEM:
        return memory_error(source)
    if not isinstance(error.filename, str):
        return None
    real_path = os.path.realpath(error.filename)

    def is_named_by(option: Path | str) -> bool:
        """Return True if the file is, or is inside, a path in the option's value, such as
        ``zigzag:mapping=FILE``.
        """
        parts = {str(option), *re.split("[:,+=]", str(option))}
        paths = [os.path.realpath(part) for part in parts if part and "\0" not in part]
        return any(real_path == path or real_path.startswith(path + os.sep) for path in paths)

    reason = error.strerror or str(error)
    if any(is_named_by(option) for option in writes if option):
        return OutputError(reason, path=error.filename, hint="choose another destination")
    if any(is_named_by(option) for option in reads if option):
        return FormatError(reason, path=error.filename, hint="check the path")
    return None


@contextmanager
def _signals_handled() -> Generator[None]:
    """Within the context, end the command on SIGTERM and SIGHUP as on Ctrl-C, without partial output.

    Signals that the caller ignores (``nohup``) stay ignored. The caller's handlers are restored, because the
    process may continue. Python can only set handlers in the main thread.
    """
    _Interruption.received = False

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        _Interruption.received = True
        raise KeyboardInterrupt

    replaced: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
    is_main = threading.current_thread() is threading.main_thread()
    for name in ("SIGINT", "SIGTERM", "SIGHUP") if is_main else ():
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            replaced[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def _standard_input_spooled(reads: _Paths) -> Generator[None]:
    """If ``-`` is among the inputs, copy standard input to a temporary file that readers open in its
    place.
    """

    def refuse_binary_noise(beginning: Path) -> None:
        """Raise ``FormatError`` for a binary stream of an unknown format."""
        if b"\0" in first_bytes(beginning, _SNIFFED_BYTES):
            try:
                find_format(beginning, None)
            except FormatError as error:
                raise FormatError(error.message, path=STANDARD_STREAM, hint=error.hint) from error

    with ExitStack() as stack:
        if STANDARD_STREAM in map(str, reads):
            stack.enter_context(standard_input_in(spooled_input(stack, refuse_binary_noise)))
        yield


@contextmanager
def _plugin_warnings() -> Generator[None]:
    """Print the warnings about plugins that could not be loaded."""
    with collect_plugin_errors() as sentences:
        try:
            yield
        finally:
            for sentence in sentences.values():
                print_message(f"warning: {sentence}")


@contextmanager
def _results_placed_last() -> Generator[None]:
    """Return a context that moves written files to their destinations only after all printed text is flushed.
    If the body ends with an exit code, the files are moved too, because an exit code may be a regular result.
    """
    answer: typer.Exit | None = None
    with place_together():
        try:
            yield
        except typer.Exit as ended:
            answer = ended
        flush_output()
        if _Interruption.received:
            raise KeyboardInterrupt
    if answer is not None:
        raise answer
