"""What every command shares: errors to exit codes, progress bars, output that survives a closed pipe."""

from __future__ import annotations

import errno
import gc
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

import typer

from hespas.api.io import is_standard_output, spooled_input
from hespas.cli.text import flagged, plain_text
from hespas.converters import find_format
from hespas.converters.format import ReadOptions
from hespas.files.budget import beyond_memory, command_budget
from hespas.files.output import placed_together
from hespas.files.streams import STANDARD_STREAM, first_bytes, limits, read_document, standard_input_in
from hespas.graph.diagnostics import Diagnostics, Severity
from hespas.graph.errors import (
    FormatError,
    HespasError,
    OutputError,
    UsageError,
    clipped,
    exit_code,
)
from hespas.graph.plugins import set_aside

__all__ = [
    "answer_apart",
    "check_apart",
    "check_once",
    "check_report_folder",
    "check_reports",
    "command_line",
    "emit",
    "estimator_files",
    "hardware_files",
    "is_quiet",
    "is_verbose",
    "list_file",
    "point_elsewhere",
    "progress_bar",
    "report_folder",
    "run",
    "say",
    "say_diagnostics",
    "set_loudness",
    "tell",
    "version",
    "write_document",
]


_LOOKED_AT_BYTES = 1 << 16


class _Heard:
    """Whether a signal has asked the command to end. Libraries drop what a handler raises while they look up
    an attribute, or make another error of it (NumPy does both), so that raising alone might not end it.
    """

    interrupt = False


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    _Heard.interrupt = True
    raise KeyboardInterrupt


def run(app: typer.Typer) -> NoReturn:
    """The entry point of a command: help and usage, which the parser prints, may find no room either."""
    _fill_closed_descriptors()
    if sys.stdout is None:
        sys.stdout = _Closed()
    out: object = sys.stdout
    if isinstance(out, io.TextIOWrapper):  # names of files hold letters that no terminal may know
        out.reconfigure(errors="backslashreplace")
    code: str | int | None = None
    try:
        app()
    except SystemExit as left:
        code = left.code
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}:
            raise
        code = exit_code(OutputError(""))
        say(f"error: standard output cannot be written: {error.strerror}")
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError as error:
            _give_up(stream)
            code = code or (0 if isinstance(error, BrokenPipeError) else exit_code(OutputError("")))
    with suppress(OSError):  # what programs of users still print as Python ends is no part of the answer
        os.dup2(2, 1)
    sys.exit(code)


@contextmanager
def answer_apart() -> Generator[None]:
    """Within, whatever is written to standard output goes to standard error: by programs of users, their
    threads and the processes that they start.
    """
    kept: int | None = None
    with redirect_stdout(sys.stderr):
        try:
            if sys.__stdout__ is not None and sys.__stdout__.fileno() == 1:
                sys.__stdout__.flush()
                kept = os.dup(1)
                os.dup2(2, 1)
        except (OSError, ValueError):  # closed, or no file
            kept = None
        try:
            yield
        finally:
            if kept is not None:
                os.dup2(kept, 1)
                os.close(kept)


class _Closed(io.TextIOBase):
    """Standard output where the caller has closed it. Python would let what is printed go nowhere."""

    def write(self, _: str, /) -> int:
        raise OSError(errno.EBADF, "it is closed")


def point_elsewhere(app: typer.Typer, mine: str, others: Mapping[str, str]) -> None:
    """Commands that stand somewhere else say where: ``hespas convert`` is ``hespas-convert``."""
    anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": list[str]()}
    for name, there in others.items():
        app.command(name, hidden=True, context_settings=anything)(_pointer(f"{mine} {name}", there))


def _pointer(command: str, there: str) -> Callable[[typer.Context], None]:
    def refuse(context: typer.Context) -> None:
        with command_line(debug=False):
            raise UsageError(f"there is no command '{command}'", hint=" ".join((there, *context.args)))

    return refuse


def version(show: bool) -> None:
    """Print the version and leave."""
    if show:
        from hespas._version import __version__

        with command_line(debug=False):
            emit(f"hespas {__version__}")
        raise typer.Exit


_VERBOSE: ContextVar[bool | None] = ContextVar("_VERBOSE", default=None)
_RESULT_ON_OUTPUT: ContextVar[bool] = ContextVar("_RESULT_ON_OUTPUT", default=False)


def _check_assumed() -> None:
    """A file that an option names is read, whatever the reader makes of it. Raises ``FormatError``."""
    groups = ReadOptions().comm_groups
    if groups is not None:
        read_document(groups, limits().groups_bytes, "a list of process groups")


@contextmanager
def command_line(
    debug: bool,
    diagnostics: Diagnostics | None = None,
    source: str = "",
    *,
    documents: Sequence[Path | None] = (),
    reads: Sequence[Path | str | None] = (),
    writes: Sequence[Path | str | None] = (),
) -> Generator[None]:
    """Run a command's body: an error becomes one message on standard error and its class's exit code.

    What ``diagnostics`` holds by then about ``source`` is told first: it often says why. Where one of
    ``documents`` is standard output, it holds that alone, and :func:`emit` writes to standard error. Files
    that the body writes are put in place once all it prints has been written.

    ``reads`` and ``writes`` are the files that the user has named, as options spell them: what the system
    refuses of those is told as an error of the input or the output, whoever opened it first. ``-`` among
    ``reads`` is standard input: it is copied to a file, which the body reads by that name.
    """
    # Arrow's own pool reserves a gigabyte of address space at first: too much where a limit is set on it.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    gc.set_threshold(200_000, 20, 20)  # readers make many objects at once and no cycles
    _fill_closed_descriptors()
    before = _RESULT_ON_OUTPUT.set(any(map(is_standard_output, documents)))
    try:
        with _heeding_signals(), command_budget(), _standard_input(reads), _plugins_told(), _results_last():
            _check_assumed()
            yield
    except (HespasError, MemoryError) as error:
        if diagnostics is not None:
            say_diagnostics(diagnostics, source)
        if debug:
            raise
        known = error if isinstance(error, HespasError) else beyond_memory(source)
        raise typer.Exit(_ended_by(known)) from error
    except KeyboardInterrupt as error:
        raise _interrupted() from error
    except BrokenPipeError as error:
        _give_up(sys.stdout)
        raise typer.Exit(0) from error
    except (typer.Exit, typer.BadParameter):
        raise
    except Exception as error:
        if _Heard.interrupt:
            raise _interrupted() from error
        if debug:
            raise
        raise typer.Exit(_unforeseen(error, source, reads, (*documents, *writes))) from error
    finally:
        _RESULT_ON_OUTPUT.reset(before)


def _interrupted() -> typer.Exit:
    say("interrupted: nothing was left half-written")
    return typer.Exit(130)


def _ended_by(error: HespasError) -> int:
    """Tell an error; the exit code."""
    say(_told(error))
    return exit_code(error)


def _refused(
    error: OSError, reads: Sequence[Path | str | None], writes: Sequence[Path | str | None]
) -> HespasError | None:
    """The error about a file that the user has named; None where it is one of ours."""
    if not isinstance(error.filename, str):
        return None
    why = error.strerror or str(error)
    if any(_leads_to(error.filename, named) for named in writes if named):
        return OutputError(why, path=error.filename, hint="choose another destination")
    if any(_leads_to(error.filename, named) for named in reads if named):
        return FormatError(why, path=error.filename, hint="check the path")
    return None


def _leads_to(filename: str, named: Path | str) -> bool:
    """Whether a file is the one that is named, or lies in a folder that is; options name some in their parts:
    ``zigzag:mapping=FILE``.
    """
    found = os.path.realpath(filename)
    parts = {str(named), *re.split("[:,+=]", str(named))}
    places = [os.path.realpath(part) for part in parts if part and "\0" not in part]
    return any(found == place or found.startswith(place + os.sep) for place in places)


def _unforeseen(
    error: Exception, source: str, reads: Sequence[Path | str | None], writes: Sequence[Path | str | None]
) -> int:
    """Tell what no part of ours has met; the exit code. A file of the user that the system refuses is no bug
    of ours, nor is memory that it does not give.
    """
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return _ended_by(beyond_memory(source))
    if isinstance(error, OSError) and (known := _refused(error, reads, writes)):
        return _ended_by(known)
    say(
        (
            f"internal error: {type(error).__name__}: {clipped(str(error))}",
            "  try: run again with --debug and report what it prints",
        )
    )
    return exit_code(error)


@contextmanager
def _heeding_signals() -> Generator[None]:
    """End the command within by SIGTERM or a closed terminal as by Ctrl-C: nothing is left half-written.

    What the caller lets be ignored (``nohup``) stays ignored. The caller's own handlers are put back: a
    command may run in a process that goes on. Handlers can be set in the main thread alone.
    """
    _Heard.interrupt = False
    replaced: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
    is_main = threading.current_thread() is threading.main_thread()
    for name in ("SIGINT", "SIGTERM", "SIGHUP") if is_main else ():
        number = getattr(signal, name, None)  # Windows has no terminal to hang up
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            replaced[number] = signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def _standard_input(reads: Sequence[Path | str | None]) -> Generator[None]:
    """Copy standard input to a file where ``-`` is among the inputs, and read it from there within."""
    with ExitStack() as stack:
        if STANDARD_STREAM in map(str, reads):
            stack.enter_context(standard_input_in(spooled_input(stack, _refuse_zeros)))
        yield


def _refuse_zeros(beginning: Path) -> None:
    """Raise ``FormatError`` for a long stream that is neither text nor of a known format."""
    if b"\0" in first_bytes(beginning, _LOOKED_AT_BYTES):
        try:
            find_format(beginning, None)
        except FormatError as error:
            raise FormatError(error.message, path=STANDARD_STREAM, hint=error.hint) from error


def _told(error: HespasError) -> list[str]:
    """An error in a line, and its remedy in another."""
    if not error.hint:
        return [f"error: {error}"]
    hint = f"  try: {clipped(error.hint)}"
    return [f"error: {str(error).removesuffix(hint).removesuffix(chr(10))}", hint]


def _fill_closed_descriptors() -> None:
    """Keep the numbers of closed standard streams from files, into which libraries would write messages."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


@contextmanager
def _plugins_told() -> Generator[None]:
    with set_aside() as sentences:
        try:
            yield
        finally:
            for sentence in sentences.values():
                say(f"warning: {sentence}")


@contextmanager
def _results_last() -> Generator[None]:
    """Results replace nothing before all that is printed has been written, which is known once it is flushed.
    An exit code of the body's own is an answer, no failure.
    """
    answer: typer.Exit | None = None
    with placed_together():
        try:
            yield
        except typer.Exit as ended:
            answer = ended
        _flush()
        if _Heard.interrupt:
            raise KeyboardInterrupt
    if answer is not None:
        raise answer


def _flush() -> None:
    if sys.stdout is not None:
        _written(sys.stdout, "")


def _written(stream: TextIO, text: str) -> None:
    """Write a text, or flush where there is none. Who reads may stop doing so: the work goes on without."""
    try:
        if text:
            stream.write(text)
        else:
            stream.flush()
    except BrokenPipeError:
        _give_up(stream)
    except OSError as error:
        _give_up(stream)
        raise OutputError(
            f"standard output cannot be written: {error.strerror or error}",
            hint="free some space or choose another destination",
        ) from error


def _give_up(stream: TextIO | io.TextIOBase) -> None:
    """Let what a stream still holds go nowhere, or Python would try again and complain on its way out."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except OSError:  # a stream of a test has no number
        return


def _lines(text: str | Iterable[str]) -> str:
    """Lines to be written. A text is one line whatever it holds: what of it is foreign can make no others."""
    return "".join(f"{plain_text(line)}\n" for line in ([text] if isinstance(text, str) else text))


def emit(text: str | Iterable[str]) -> None:
    """Write a line, or lines, to standard output. Raises ``OutputError`` where that is closed or full."""
    if _RESULT_ON_OUTPUT.get():
        say(text)
        return
    if sys.stdout is None or isinstance(sys.stdout, _Closed):
        raise OutputError("standard output is closed", hint="add > FILE")
    _written(sys.stdout, _lines(text))


def set_loudness(context: typer.Context, verbose: bool | None) -> None:
    """How much is told beside results and errors, until the command ends."""
    before = _VERBOSE.set(verbose)
    context.call_on_close(lambda: _VERBOSE.reset(before))


def is_verbose() -> bool:
    """Whether the user asks for what hardly anybody misses, too."""
    return _VERBOSE.get() is True


def is_quiet() -> bool:
    """Whether the user asks for the answer alone."""
    return _VERBOSE.get() is False


def tell(text: str | Iterable[str]) -> None:
    """What stands beside a result: as :func:`say`, where the user has not asked for quiet."""
    if not is_quiet():
        say(text)


def say(text: str | Iterable[str]) -> None:
    """The same on standard error, where it does not mix with results; where nobody listens, nothing. What the
    library says of its arguments is said of the options here.
    """
    if sys.stderr is None:
        return
    try:
        lines = flagged(_lines(text))
        sys.stderr.write(_coloured(lines) if _has_colours(sys.stderr) else lines)
        sys.stderr.flush()
    except OSError:
        _give_up(sys.stderr)


_COLOURS = {"error:": "31", "internal error:": "31", "warning:": "33", "  try:": "36", "note:": "2"}


def _has_colours(stream: TextIO) -> bool:
    """By https://no-color.org, and by what the terminal says of itself."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def _coloured(lines: str) -> str:
    """The first word of each line in the colour of its weight."""
    for word, code in _COLOURS.items():
        lines = re.sub(f"(?m)^{word}", f"\033[{code}m{word}\033[0m", lines)
    return lines


@contextmanager
def progress_bar(label: str, wanted: bool | None) -> Generator[Callable[[int, int], None] | None]:
    """A callback for long work that draws a bar on standard error, or None where none is wanted."""
    if sys.stderr is None or wanted is False or (wanted is None and not sys.stderr.isatty()):
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _place(path: str, location: str) -> str:
    """File and position; a location that names the file already says both."""
    if location == path or location.startswith(f"{path}:"):
        return location
    return ": ".join(part for part in (path, location) if part)


_MARKS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


_MESSAGES_OF_A_CODE = 3


def say_diagnostics(diagnostics: Diagnostics, source: Path | str) -> None:
    """Print warnings and errors on standard error: of each code the count and a few messages that differ in
    more than numbers. Notes of passes are printed elsewhere.
    """
    counts = diagnostics.counts()
    printed: dict[str, set[str]] = {}
    for found in diagnostics:
        texts, text = printed.setdefault(found.code, set()), re.sub(r"\d+", "", found.message)
        if found.severity is Severity.INFO or text in texts or len(texts) == _MESSAGES_OF_A_CODE:
            continue
        where = _place(found.path or str(source), found.location)
        times = f" ({counts[found.code]:,} times)" if counts[found.code] > 1 and not texts else ""
        texts.add(text)
        shown = say if found.severity is Severity.ERROR else tell
        shown(f"{_MARKS[found.severity]}: {clipped(where)}: {clipped(found.message)} [{found.code}]{times}")


# --- Documents that a command writes beside its result: looked at before any work, never over an input

_TABLE = "--out"
"""The option of tables, which cannot be told from those that hold measured operations."""


def check_reports(
    reports: Mapping[str, Path | None], others: Mapping[str, Sequence[str | Path]], *, overwrite: bool
) -> None:
    """Raise ``OutputError`` or ``UsageError`` where a report of an option cannot be written, or would replace
    what the same command reads or writes, another report of it, any file without ``overwrite``, or one with a
    workload or profile.

    ``others`` are the paths of each argument. Standard output (``-``), pipes and devices take a report too.
    """
    from hespas.api.io import check_document, is_standard_output, is_stream
    from hespas.converters import is_recognised

    taken = {role: list(paths) for role, paths in others.items()}
    streams = ["DST"] if "-" in taken.get("DST", ()) else []
    for option, path in reports.items():
        if path is None:
            continue
        if not is_stream(path):
            check_apart(option, path, taken)
        check_document(path, overwrite=overwrite)
        if is_standard_output(path):
            if streams:
                raise UsageError(
                    f"{option} and {streams[0]} both go to standard output", hint=f"{option} FILE"
                )
            streams.append(option)
        if not is_stream(path) and path.exists() and option != _TABLE and is_recognised(path):
            raise OutputError(
                "holds a workload or a profile, and no earlier report",
                path=str(path),
                hint="choose another file",
            )
        taken[option] = [path]


def check_apart(option: str, path: Path, others: Mapping[str, Sequence[str | Path]]) -> None:
    """Raise ``UsageError`` where what an option writes is a file of another argument."""
    for role, paths in others.items():
        if any(_same(path, Path(other)) for other in paths):
            raise UsageError(
                f"{option} names the same file as {role}", path=str(path), hint="choose another file"
            )


def check_once(paths: Sequence[Path]) -> None:
    """Raise ``UsageError`` for an input that is given twice: repeats of itself would look like no noise."""
    seen: set[tuple[int, int]] = set()
    for path in paths:
        try:
            found = path.stat()
        except OSError:  # who reads it says what is wrong
            continue
        if (found.st_dev, found.st_ino) in seen:
            raise UsageError("is given twice", path=str(path), hint="give each recording once")
        seen.add((found.st_dev, found.st_ino))


def hardware_files(*hardware: str) -> list[Path]:
    """Those of the values of ``--hardware`` that name files which are there; the others name devices."""
    return [Path(each) for each in hardware if each and _is_file(Path(each))]


def estimator_files(*spellings: str) -> list[Path]:
    """The files that options of ``--estimator`` name: tables, orders, configurations, programs."""
    from hespas.estimators.registry import named_paths

    return [each for spelling in spellings for each in named_paths(spelling) if _is_file(each)]


def _is_file(path: Path) -> bool:
    """Whether a value of an option names a file; it may be no name at all, and longer than any."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def check_report_folder(
    folder: Path | None,
    document: str,
    json_file: Path | None,
    taken: Mapping[str, Sequence[str | Path]],
    *,
    overwrite: bool,
) -> None:
    """Refuse a folder of ``--report`` that cannot be written, or whose page or ``document`` would replace
    what the same command reads or writes, before any work is done.
    """
    if folder is None:
        return
    from hespas.analysis.report import check_folder

    others = {**taken, "--json": [json_file] if json_file else []}
    for name in ("index.html", document):
        check_apart("--report", folder / name, others)
    check_folder(folder, document=document, overwrite=overwrite)


def report_folder(text: str) -> Path:
    """The folder of ``--report``. Raises ``BadParameter`` for what names none."""
    if text in ("", "-"):
        raise typer.BadParameter(f"{text!r} names no folder")
    return Path(text)


def write_document(content: bytes, path: Path, *, overwrite: bool) -> None:
    """Write a document at once or not at all; ``-`` is standard output."""
    from hespas.api.io import put

    def fill(temporary: Path) -> None:
        temporary.write_bytes(content)

    put(path, fill, overwrite=overwrite)


def list_file(path: Path | None, *, as_json: bool, overwrite: bool) -> Path | None:
    """Where the JSON of a list goes: ``--json`` takes a file or none. Raises as ``check_reports`` does."""
    if not as_json:
        if path:
            raise UsageError(f"unexpected argument {str(path)!r}", hint="add --json to write the list there")
        return None
    place = path or Path("-")
    check_reports({"--json": place}, {}, overwrite=overwrite)
    return place


def _same(one: Path, other: Path) -> bool:
    """Whether two paths lead to the same file, also where it is not there yet."""
    if str(other) == "-":
        return False
    try:
        return os.path.realpath(one) == os.path.realpath(other) or one.samefile(other)
    except OSError:  # one of them does not exist yet
        return False
