"""Output of the commands on the terminal: results, messages, diagnostics, progress bars, and their texts."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer

from hespas.graph.diagnostics import Diagnostics, Severity
from hespas.graph.errors import OutputError, clipped
from hespas.graph.progress import Progress
from hespas.report.texts import count_text, counted, plain_text, time_text

if TYPE_CHECKING:
    from hespas.simulator import Simulation

__all__ = [
    "ClosedOutput",
    "discard_output",
    "emit",
    "flagged",
    "flags_of_command",
    "flush_output",
    "is_quiet",
    "is_verbose",
    "mixed_lines",
    "op_class_text",
    "open_closed_descriptors",
    "percent",
    "print_info",
    "print_message",
    "progress_bar",
    "ranks_text",
    "report_diagnostics",
    "results_on_stderr",
    "set_verbosity",
    "signed",
    "stdout_redirected",
    "step_lines",
    "step_text",
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
    """Within the context, redirect standard output to standard error, also for user programs, their threads
    and the processes that they start.
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
    """Set how much is printed until the command ends: True for everything, False for results and
    errors only.
    """
    before = _VERBOSE.set(verbose)
    context.call_on_close(lambda: _VERBOSE.reset(before))


def is_verbose() -> bool:
    """Return True if the command runs with ``--verbose``."""
    return _VERBOSE.get() is True


def is_quiet() -> bool:
    """Return True if the command runs with ``--quiet``, which omits notes and warnings."""
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
    """Print warnings and errors on standard error: for each code its count and up to three messages. Messages
    that differ only in numbers are printed once. Notes of conversions are printed elsewhere.
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
def progress_bar(label: str, wanted: bool | None) -> Generator[Progress | None]:
    """Yield a callback that draws a progress bar on standard error, or None.

    None is yielded if ``wanted`` is False, or if it is None and standard error is not a terminal.
    """
    if sys.stderr is None or wanted is False or (wanted is None and not sys.stderr.isatty()):
        yield None
        return
    from rich import progress
    from rich.console import Console

    with progress.Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def flush_output() -> None:
    """Flush standard output. Raises ``OutputError`` if that fails."""
    if sys.stdout is not None:
        _write(sys.stdout, "")


def discard_output(stream: TextIO | io.TextIOBase) -> None:
    """Connect a stream that cannot be written to the null device. Its buffer is written there too, because
    Python writes it at exit.
    """
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        stream.flush()
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
    """Open the null device in place of each closed standard stream. Otherwise a file that is opened later
    would get its descriptor, and messages of libraries would be written into the file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


_MAX_DECIMAL_ERROR = 1e4
"""Larger errors, of measured times near 0, are written with an exponent."""
_SAME_NAME = (
    "allow_programs alone args array astra_bin astra_timeout backend baseline batch block_size "
    "calibrate capacity capture classes cluster comm_groups compile_for compiled context "
    "context_all_to_all cp dataflow default_dtype devices dp end_to_end engine ep estimator etp "
    "expert_dtype expert_node explicit factors framework global_batch gpu_memory_utilization "
    "gradient_precision granularity grid hardware imbalance interference jitter json "
    "kv_cache_dtype kv_cache_tokens launches limit list_formats lora_rank max_batched_tokens max_e2e "
    "max_input_bytes max_mape max_num_seqs max_regression memory_config mesh messages "
    "micro_batch min_coverage mode model_flops network_config num_devices num_replicas "
    "num_speculative_tokens only_classes out overlap overlap_trips overlay overwrite "
    "partitioner per_request platform pp precision profile prompt queues_per_dim "
    "ranks real_tensors recompute recorded recover report request_overhead_ms requests "
    "rescale resume ring_attention run_time_unit schedule seed seq sequence_parallel shard simulator "
    "split step_factor step_overhead_us suggest system system_config table test_by timeline timeout tokens "
    "tp untrusted vp workload zero"
)
_FLAGS: Mapping[str, str] = {name: "--" + name.replace("_", "-") for name in _SAME_NAME.split()} | {
    "broken": "--break",
    "dims": "--dim",
    "drafts": "--num-speculative-tokens",
    "on_unknown": "--missing",
    "others": "--with",
    "page": "--block-size",
    "profiles": "--measured",
    "source_format": "--from",
    "stragglers": "--straggler",
    "source_version": "--from-version",
    "style": "--framework",
    "target_format": "--to",
    "target_version": "--to-version",
}
"""Argument of the Python interface -> option of the command line, for messages about any command."""

_ARGUMENT = re.compile(r"(?<!Expected )(?<!got )(?<!field )`([a-z_0-9]+)(?:=([^`]*))?`")
"""Argument of the Python interface in a message. msgspec writes types and fields of documents in the same
way: ``Expected `object`, got `array```.
"""
_COMMAND_FLAGS: ContextVar[Mapping[str, str]] = ContextVar("_COMMAND_FLAGS", default=_FLAGS)
"""Argument -> option while a command runs: its own options, and those of other commands."""


@contextmanager
def flags_of_command(flags: Mapping[str, str]) -> Generator[None]:
    """Within the context, let :func:`flagged` know the options of the command, to name them in messages."""
    before = _COMMAND_FLAGS.set({**_FLAGS, **flags})
    try:
        yield
    finally:
        _COMMAND_FLAGS.reset(before)


def flagged(text: str) -> str:
    """Replace Python arguments in a message of the library (```num_devices=8```) by options of the command
    line (``--num-devices 8``).
    """

    flags = _COMMAND_FLAGS.get()

    def option(argument: re.Match[str]) -> str:
        flag = flags.get(argument[1])
        if flag is None:
            return argument[0]
        if argument[2] in {"True", "False"}:
            return flag if argument[2] == "True" else f"--no-{flag.removeprefix('--')}"
        return flag if argument[2] is None else f"{flag} {argument[2]}"

    return _ARGUMENT.sub(option, text)


def percent(value: float) -> str:
    """Format a share as ``12.3%``; a dash if unknown."""
    return _percentage(value, "")


def signed(value: float) -> str:
    """Format a share with its sign; a dash if unknown."""
    return _percentage(value, "+")


def _percentage(value: float, sign: str) -> str:
    if isnan(value):
        return "-"
    return f"{value:{sign}.1%}" if abs(value) < _MAX_DECIMAL_ERROR else f"{100 * value:{sign}.2e}%"


def step_text(done: Simulation, hardware: str, *, mode: str = "hespas") -> str:
    """Return the summary line of a step: its time, 90 % interval, device and number of ranks.

    In ``mode`` astra, only computation times are recorded ones.
    """
    from hespas.api.simulation_result import recorded_step_of
    from hespas.converters.measured_ops.steps import recording_text

    has_time = bool(done.step_ns) or not done.is_lower_bound
    time = time_text(done.step_ns if has_time else nan)
    span = f"{time} per step"
    recorded = recorded_step_of(done.workload, estimated=bool(hardware) or mode == "astra")
    if has_time and recorded is not None:  # a recording without step marks has only one span
        span = f"span {time}"
        if recorded.count:
            period = "" if isnan(recorded.period_ns) else time_text(recorded.period_ns)
            steps = recording_text(recorded.count, period)
            if isnan(recorded.step_ns):
                span = f"span {time} of {steps}"
            else:
                span = f"{time_text(recorded.step_ns)} per step ({steps}, span {time})"
    at_least = "at least " if done.is_lower_bound and has_time else ""
    num_ranks = ranks_text(sum(entry.num_ranks for entry in done.classes), len(done.timeline.finish_ns))
    source = _duration_source(done, hardware, mode)
    return f"{at_least}{span}{source}, {num_ranks} in {counted(len(done.classes), 'class')}"


def _duration_source(done: Simulation, hardware: str, mode: str) -> str:
    """Return the device of estimated durations with their interval, or the device of recorded ones."""
    if not hardware:
        device = done.workload.metadata.get("device", "")
        if not device:
            return ""
        return f"{', computation' if mode != 'hespas' else ''} as recorded on {clipped(device)}"
    low_ns, high_ns = done.interval_ns
    if isnan(low_ns):
        return f" on {hardware} (no interval: its estimators give none)"
    return f" on {hardware} (90 % interval: {time_text(low_ns)} to {time_text(high_ns)})"


def step_lines(done: Simulation, hardware: str, *, mode: str = "hespas") -> list[str]:
    """Return the summary line of a step, and lines with its step factor, the basis of its estimates and its
    throughput, as far as they are known.
    """
    from hespas.api.simulation_result import correction_text

    correction = [correction_text(done)] if done.step_factor else []
    basis = [f"basis: {done.basis_text}"] if done.basis_text else []
    rates = [str(done.throughput)] if done.throughput.is_known else []
    return [step_text(done, hardware, mode=mode), *correction, *basis, *rates]


def mixed_lines(done: Simulation) -> list[str]:
    """Return a line about a workload that mixes recorded and estimated durations; else no line."""
    if not done.mixes_recorded_and_estimated:
        return []
    recorded = counted(sum(entry.kept for entry in done.classes), "operation")
    device = clipped(done.workload.metadata.get("device", "")) or "an unknown device"
    return [f"mixed: {recorded} with durations recorded on {device}, the others estimated"]


def op_class_text(name: str) -> str:
    """Return the name of an operation class in printed tables. JSON documents and files keep the name in the
    graph.
    """
    return {"contraction": "matmul", "move": "copy", "generate": "init", "free": "zero-cost"}.get(name, name)


def ranks_text(available: int, total: int) -> str:
    """Format a number of ranks: ``4 ranks``, or ``1 of 8 ranks`` if the input holds only some of the job."""
    return (
        counted(total, "rank")
        if available == total
        else f"{count_text(available)} of {counted(total, 'rank')}"
    )
