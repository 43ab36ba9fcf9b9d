"""Limits of inputs, and budgets of CPU time and memory.

``HESPAS_MAX_INPUT_BYTES`` in the environment, or ``--max-input-bytes`` of a command, is the trusted number of
bytes of one input. It raises every lower limit in bytes, in this process and its children. Native parsers
then get the limits for an input of that size.

Reading has a budget that grows with the input. ``--untrusted``, or ``HESPAS_UNTRUSTED=1`` in the environment,
limits a whole command: CPU time, memory and ranks; foreign programs do not run, and links must not leave the
folder of an input (:mod:`hespas.files.trust`).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from errno import ENOMEM
from functools import lru_cache
from pathlib import Path
from time import process_time
from types import FrameType

from hespas.files.trust import UNTRUSTED_VARIABLE, check_limits, untrusted_limits
from hespas.graph.errors import BudgetError, FormatError, UsageError

__all__ = [
    "INPUT_BYTES_VARIABLE",
    "Limits",
    "command_budget",
    "limits",
    "memory_error",
    "parser_hint",
    "reading_budget",
    "refuse_comparison",
    "refuse_ranks",
    "untrusted",
    "without_collector",
]


INPUT_BYTES_VARIABLE = "HESPAS_MAX_INPUT_BYTES"
"""Environment variable that raises the limits in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of readers and writers. Names of limits in bytes end in ``_bytes``. The environment variable
    :data:`INPUT_BYTES_VARIABLE` raises these limits and no others.

    A gzip stream may expand to ``packed_free_bytes``, and beyond that to ``packed_ratio`` times the
    compressed bytes read so far: deflate reaches 1,032:1 on zeros, real programs and traces stay below 60:1.
    Columns of Parquet tables may expand to ``table_free_bytes``, and beyond that to ``table_ratio`` times the
    file: real ones stay below 30:1. Equal rows take no space in a Parquet file, so the memory of rows (256
    bytes per row of a table of operations, 80 of a profile) is also limited: to ``table_rows_bytes`` or
    ``profile_rows_bytes``, and to 20 times the file. :func:`hespas.files.sandbox.allowance` documents
    ``parser_bytes``, ``program_bytes``, ``program_cpu_s`` and ``parser_cpu_s``.

    ``text_workload_bytes`` is low because the graph of a text workload of ASTRA-sim takes up to 140 times the
    size of the text. ``model_trees`` and ``model_sizes`` limit learned estimators, which have 400 trees and
    10,000 distinct sizes in practice. ``replayed_operations`` limits a replayed program, because XLA takes
    hours for larger ones. ``compared_ranks_bytes`` limits the ranks that are compared one by one, at 64 bytes
    each.
    """

    input_bytes: int = 64 << 30
    trusted_bytes: int = 0
    reading_bytes: int = 2 << 30
    packed_free_bytes: int = 8 << 20
    packed_ratio: int = 100
    compressed_packets_bytes: int = 8 << 20
    compressed_packets_ratio: int = 50
    configuration_bytes: int = 16 << 20
    device_bytes: int = 1 << 20
    report_bytes: int = 64 << 20
    groups_bytes: int = 256 << 20
    table_bytes: int = 4 << 30
    table_free_bytes: int = 64 << 20
    table_ratio: int = 50
    table_rows_bytes: int = 512 << 20
    table_columns: int = 1 << 12
    profile_rows_bytes: int = 200 << 20
    card_bytes: int = 64 << 20
    model_bytes: int = 64 << 20
    model_trees: int = 4096
    model_sizes: int = 1 << 17
    text_workload_bytes: int = 8 << 20
    cell_bytes: int = 16 << 20
    node_fields: int = 1 << 20
    parser_bytes: int = 150 << 20
    program_bytes: int = 10**9
    program_cpu_s: int = 6
    parser_cpu_s: float = 1.5
    compared_ranks_bytes: int = 64 << 21
    replayed_operations: int = 200_000
    replayed_edges: int = 500_000
    replayed_characters: int = 32 << 20


def limits() -> Limits:
    """Return the limits in force. Raises ``UsageError`` if the environment variable is not a number
    of bytes.
    """
    return _limits_for(os.environ.get(INPUT_BYTES_VARIABLE, ""))


@lru_cache(maxsize=4)
def _limits_for(text: str) -> Limits:
    if not text:
        return Limits()
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 19 and int(text)):
        raise UsageError(
            f"{INPUT_BYTES_VARIABLE} is {text[:60]!r}, which is not a number of bytes",
            hint=f"set a number of bytes, as in {INPUT_BYTES_VARIABLE}=8000000000",
        )
    size, own = int(text), Limits()
    names = [field.name for field in fields(own) if field.name.endswith("_bytes")]
    return replace(own, **{name: max(size, getattr(own, name)) for name in names})


_READING_S, _PACKED = 10.0, 10.0
"""CPU seconds allowed for reading any input, and number of plain bytes that a compressed byte counts as."""

_READING_S_PER_BYTE = 1.5e-6

_READING_BYTES_PER_BYTE = 64
"""Memory per byte of an input, in addition to ``reading_bytes``. Traces of 50 to 100 MB take 3 to 5 bytes per
byte, compressed ones 30 to 42.
"""

_RANK_BYTES = 64

_REPEATED_S = 0.5
"""Seconds between repeated signals. A signal is repeated because a library may swallow its exception."""

_STATM = Path("/proc/self/statm")

_MOST_BYTES = 1 << 60


@contextmanager
def untrusted(
    *, cpu_s: float | None = None, memory_bytes: int | None = None, ranks: int | None = None
) -> Generator[None]:
    """Treat inputs as untrusted inside the block, in this process and its children (see the module).

    ``cpu_s``, ``memory_bytes`` and ``ranks`` are limits (None: the default). The limits of CPU time and
    memory apply to the process from here on. Raises ``BudgetError`` inside the block if one is exceeded.
    Outside of the main thread, only readers have a limit of CPU time.
    """
    options = {"cpu_s": cpu_s, "memory_bytes": memory_bytes, "ranks": ranks}
    text = ",".join(["1", *(f"{name}={value}" for name, value in options.items() if value is not None)])
    check_limits(text)
    before = os.environ.get(UNTRUSTED_VARIABLE)
    os.environ[UNTRUSTED_VARIABLE] = text
    try:
        with command_budget(used_s=0.0):
            yield
    finally:
        if before is None:
            os.environ.pop(UNTRUSTED_VARIABLE, None)
        else:
            os.environ[UNTRUSTED_VARIABLE] = before


@contextmanager
def command_budget(used_s: float | None = None) -> Generator[None]:
    """Limit the CPU time and memory of the block if inputs are untrusted.

    ``used_s`` is the CPU time in seconds that was already used and counts towards the limit (None: all CPU
    time of the process so far).
    """
    bounds = untrusted_limits()
    if bounds is None:
        yield
        return
    left_s = bounds.cpu_s - (process_time() if used_s is None else used_s)
    error = BudgetError(
        f"takes more than {bounds.cpu_s:g} s of processor time, the limit of untrusted inputs",
        hint=f"raise the limit with `limit=cpu_s={2 * bounds.cpu_s:g}`",
    )
    with _bounded_memory(bounds.memory_bytes), _bounded_time(max(left_s, 0.01), error):
        yield


@contextmanager
def reading_budget(path: Path) -> Generator[None]:
    """Limit the resources for reading ``path`` inside the block: 10 s of CPU time plus 1.5 s per MB of the
    file, and 2 GiB of additional memory plus 64 bytes per byte. A compressed byte counts as ten.

    Raises ``BudgetError`` beyond the limits. Only applies in the main thread.
    """
    size = 0.0
    with suppress(OSError):
        entries = [*path.glob("*"), *path.glob("*/*")] if path.is_dir() else [path]
        files = [entry for entry in entries if entry.is_file()]
        size = sum(file.stat().st_size * (_PACKED if file.suffix == ".gz" else 1) for file in files)
    size = max(size, limits().trusted_bytes)
    seconds = _READING_S + _READING_S_PER_BYTE * size
    error = BudgetError(
        f"takes more than {seconds:.0f} s of processor time to read, the limit of an input of its size",
        path=str(path),
        hint="check that the input is intact, or raise the limit with "
        f"`max_input_bytes={4 * max(size, 1 << 20)}`",
    )
    with _reading_memory(path, size), _bounded_time(seconds, error):
        yield


@contextmanager
def _reading_memory(path: Path, size: float) -> Generator[None]:
    most = limits().reading_bytes + int(_READING_BYTES_PER_BYTE * size)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or most >= _MOST_BYTES:
        yield
        return
    with _bounded_memory(_private_bytes() + most) as binds:
        try:
            yield
        except (MemoryError, OSError) as error:
            if not binds or getattr(error, "errno", ENOMEM) != ENOMEM:
                raise  # a lower outer limit, which reports it itself
            enough = int(size) + most // _READING_BYTES_PER_BYTE
            raise BudgetError(
                f"takes more than {most:,} bytes of memory to read, the limit of an input of its size",
                path=str(path),
                hint=f"check that the input is intact, or double the limit with `max_input_bytes={enough}`",
            ) from None


def parser_hint(hint: str) -> str:
    """Return ``hint`` followed by the options that raise the limits of a native parser."""
    bounds = untrusted_limits()
    if bounds is None:
        return f"{hint}; if you trust it, {INPUT_BYTES_VARIABLE} (or `max_input_bytes`) raises the limits"
    more = f"`limit=cpu_s={2 * bounds.cpu_s:g}` and `limit=memory_bytes={2 * bounds.memory_bytes}`"
    return f"{hint}; {more} raise the limits of untrusted inputs"


def memory_error(source: str) -> FormatError:
    """Return the error for exhausted memory: an input needs more than the machine or a limit of the process
    allows.
    """
    bounds = untrusted_limits()
    if bounds is not None:
        return BudgetError(
            f"takes more than {bounds.memory_bytes:,} bytes of memory, the limit of untrusted inputs",
            path=source or None,
            hint=f"raise the limit with `limit=memory_bytes={2 * bounds.memory_bytes}`",
        )
    return FormatError(
        "needs more memory than is available",
        path=source or None,
        position="the input as a whole",
        hint="check that the file is intact, convert a part of it, or use a machine with more memory",
    )


def refuse_ranks(num_ranks: int, path: str) -> None:
    """Raise ``BudgetError`` for a job with more ranks than untrusted inputs may have."""
    bounds = untrusted_limits()
    if bounds is not None and num_ranks > bounds.ranks:
        raise BudgetError(
            f"{num_ranks:,} ranks are more than {bounds.ranks:,}, the limit of untrusted inputs",
            path=path or None,
            hint=f"raise the limit with `limit=ranks={num_ranks}`",
        )


def refuse_comparison(num_ranks: int, path: str) -> None:
    """Raise ``BudgetError`` if there are too many ranks to compare them one by one. ``path`` is the input,
    for the message.

    The memory for the comparison is limited to :attr:`Limits.compared_ranks_bytes`.
    """
    wanted, most = _RANK_BYTES * num_ranks, limits().compared_ranks_bytes
    if wanted > most:
        raise BudgetError(
            f"{num_ranks:,} ranks of several kinds are more than {most // _RANK_BYTES:,}, which are compared "
            "one by one at most",
            path=path or None,
            hint=f"raise the limit with `max_input_bytes={wanted}`",
        )


@contextmanager
def _bounded_time(seconds: float, error: FormatError) -> Generator[None]:
    """Raise ``error`` when the block has used ``seconds`` of CPU time, unless an outer limit is lower."""
    is_main = threading.current_thread() is threading.main_thread()
    if sys.platform == "win32" or not is_main:
        yield
        return

    def expire(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise error

    outer_s, _ = signal.getitimer(signal.ITIMER_PROF)
    if 0 < outer_s <= seconds:
        yield
        return
    start_s = process_time()
    before = signal.signal(signal.SIGPROF, expire)
    signal.setitimer(signal.ITIMER_PROF, seconds, _REPEATED_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, signal.SIG_DFL if before is None else before)
        if outer_s:
            left_s = outer_s - (process_time() - start_s)
            signal.setitimer(signal.ITIMER_PROF, max(left_s, 0.01), _REPEATED_S)


@contextmanager
def _bounded_memory(most: int) -> Generator[bool]:
    """Limit the private memory of the process to ``most`` bytes inside the block. Larger allocations raise
    ``MemoryError``.

    The limit is never below the memory in use plus 128 MiB, which libraries need to load. Yields True if this
    limit is the lowest in force. Yields False if another limit may be lower, and on systems other than Linux,
    where no limit is set.
    """
    if not _STATM.exists():
        yield False
        return
    import resource

    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = max(most, _private_bytes() + (128 << 20))
    bounds = [bound for bound in (before, hard) if bound != resource.RLIM_INFINITY]
    chosen = min([wanted, *bounds])
    resource.setrlimit(resource.RLIMIT_DATA, (chosen, hard))
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    try:
        yield chosen == wanted and (addresses == resource.RLIM_INFINITY or addresses > chosen)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def _private_bytes() -> int:
    """Return the private memory of the process; 0 if the system does not count it."""
    if not _STATM.exists():
        return 0
    import resource

    return int(_STATM.read_text().split()[5]) * resource.getpagesize()


@contextmanager
def without_collector() -> Generator[None]:
    """Disable the garbage collector inside the block.

    Use it for work that makes many objects and no cyclic garbage. Collection would take a fifth of the time
    of such work or more.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
