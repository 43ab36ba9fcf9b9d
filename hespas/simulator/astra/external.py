"""Run a user's own ASTRA-sim on traces and configuration files: https://github.com/astra-sim/astra-sim.

The exit code of ASTRA-sim does not indicate success: it is 0 even if ranks never finish. Results are read
from the line of each rank, ``sys[3] finished, 9240 cycles, exposed communication 9240 cycles.``, and from the
statistics after it. A cycle is 1 ns.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from hespas.files.processes import Ended, run
from hespas.files.trust import refuse_in_untrusted
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import CheckFailedError, UsageError
from hespas.simulator.astra.configuration import AstraOptions
from hespas.simulator.astra.statistics import UNKNOWN, RankStatistics

__all__ = ["DEFAULT_TIMEOUT_S", "AstraBinary", "ExternalRun", "run_external"]

DEFAULT_TIMEOUT_S = 3600.0
_FINISHED = re.compile(
    rb"sys\[(\d{1,9})\] finished, (\d{1,18}) cycles, exposed communication (-?\d{1,18}) cyc"
)
_STATISTIC = re.compile(rb"sys\[(\d{1,9})\], ([A-Za-z -]{1,64}): (-?\d{1,18}(?:\.\d{1,18})?)(?!\d)")
_COLUMNS = {
    b"Wall time": "wall_ns",
    b"GPU time": "compute_ns",
    b"Comm time": "comm_ns",
    b"CPU time": "cpu_ns",
    b"Remote mem time": "remote_memory_ns",
    b"Total compute-communication overlap": "overlap_ns",
}
_ROOFLINE = {
    b"Compute bound percentage": (0, 100.0),
    b"Average compute utilization": (1, 100.0),
    b"Average memory utilization": (2, 100.0),
    b"Average operation intensity": (3, 1.0),
}
"""Column of each statistic among roofline averages, and its divisor."""
_SHOWN_BYTES, _SHOWN_LINES = 4096, 8
_LONGEST_LINE = 1 << 16
_MOST_LOG_BYTES = 1 << 30
"""Limit on its output; thousands of lines for each of 100,000 ranks stay below it."""
_NO_MEMORY = '{"memory-type": "NO_MEMORY_EXPANSION"}\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class AstraBinary:
    """Executable of ASTRA-sim's analytical simulator, built for one network backend."""

    path: str
    timeout_s: float = DEFAULT_TIMEOUT_S

    def __post_init__(self) -> None:
        """Raise ``UsageError`` if the file is not executable."""
        if not Path(self.path).is_file() or not os.access(self.path, os.X_OK):
            raise UsageError(
                "not an executable file", path=self.path,
                hint="give the analytical binary that ASTRA-sim's build makes, with `astra_bin`",
            )  # fmt: skip
        if not self.timeout_s > 0:
            raise UsageError(f"invalid `astra_timeout={self.timeout_s:g}`", hint="use seconds above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalRun:
    """Figures that ASTRA-sim itself printed for each rank; -1 if not printed (NaN for roofline averages).
    ``exit_code`` is reported but not evaluated.
    """

    binary: str
    exit_code: int
    statistics: RankStatistics


def run_external(
    binary: AstraBinary, traces: Path, groups: Path | None, options: AstraOptions, num_ranks: int
) -> ExternalRun:
    """Run ASTRA-sim on the files ``NAME.{rank}.et`` in the folder ``traces``, in a temporary folder.

    Raises ``CheckFailedError`` if some ranks do not finish, or not in time; ``UsageError`` if the executable
    cannot be started.
    """
    refuse_in_untrusted("`astra_bin` runs a program")
    with TemporaryDirectory(prefix="hespas-astra-sim-") as scratch:
        folder = Path(scratch)
        out = folder / "stdout"
        memory = folder / "remote_memory.json"
        memory.write_text(_NO_MEMORY, encoding="utf-8")
        memory_file = Path(options.memory.path) if options.memory is not None else memory
        first = next(traces.glob("*.0.et"))
        arguments = {
            "workload-configuration": first.with_name(first.name.removesuffix(".0.et")).resolve(),
            "system-configuration": Path(options.system.path).resolve(),
            "network-configuration": Path(options.network.path).resolve(),
            "remote-memory-configuration": memory_file.resolve(),
            "logging-folder": folder / "log",
            "num-queues-per-dim": options.queues_per_dim,
        }
        if groups is not None:
            arguments["comm-group-configuration"] = groups.resolve()
        command = [
            str(Path(binary.path).resolve()),
            *(f"--{name}={value}" for name, value in arguments.items()),
        ]
        with out.open("wb") as log:
            try:
                ended = run(
                    command, time_s=binary.timeout_s, environment=os.environ, folder=folder, output=log,
                    output_bytes=_MOST_LOG_BYTES,
                )  # fmt: skip
            except OSError as error:
                reason = error.strerror or str(error)
                raise UsageError(
                    f"cannot be started: {reason}",
                    path=binary.path,
                    hint="check that the file is a program for this machine",
                ) from error
        seen = _LogFigures(num_ranks)
        with out.open("rb") as stream:
            while line := stream.readline(_LONGEST_LINE):
                seen.take(line)
        finished = int((seen.columns["finish_ns"] >= 0).sum())
        if finished < num_ranks:
            with out.open("rb") as stream:
                stream.seek(max(out.stat().st_size - _SHOWN_BYTES, 0))
                tail = _last_lines(ended.errors[-_SHOWN_BYTES:]) or _last_lines(stream.read())
            raise _unfinished(binary, ended, finished, num_ranks, tail)
        return ExternalRun(binary=binary.path, exit_code=ended.status, statistics=seen.statistics())


class _LogFigures:
    """Figures of each rank, collected from the lines of ASTRA-sim's log."""

    def __init__(self, num_ranks: int) -> None:
        names = ("finish_ns", "exposed_comm_ns", *_COLUMNS.values())
        self.columns: dict[str, IntArray] = {name: np.full(num_ranks, UNKNOWN, np.int64) for name in names}
        self.roofline: FloatArray = np.full((num_ranks, len(_ROOFLINE)), np.nan)
        self._ranks = num_ranks

    def take(self, line: bytes) -> None:
        finished = _FINISHED.search(line)
        if finished is not None and int(finished[1]) < self._ranks:
            rank = int(finished[1])
            self.columns["finish_ns"][rank] = int(finished[2])
            self.columns["exposed_comm_ns"][rank] = int(finished[3])
            return
        statistic = _STATISTIC.search(line)
        if statistic is None or int(statistic[1]) >= self._ranks:
            return
        rank, name = int(statistic[1]), statistic[2]
        if name in _COLUMNS and statistic[3].isdigit():
            self.columns[_COLUMNS[name]][rank] = int(statistic[3])
        elif name in _ROOFLINE:
            column, scale = _ROOFLINE[name]
            self.roofline[rank, column] = float(statistic[3]) / scale

    def statistics(self) -> RankStatistics:
        has_roofline = bool(np.isfinite(self.roofline).any())
        return RankStatistics(**self.columns, roofline=self.roofline if has_roofline else None)


def _last_lines(text: bytes) -> Sequence[str]:
    lines = [line.strip() for line in text.decode(errors="replace").splitlines()]
    return [line for line in lines if line][-_SHOWN_LINES:]


def _unfinished(
    binary: AstraBinary, ended: Ended, finished: int, num_ranks: int, tail: Sequence[str]
) -> CheckFailedError:
    if ended.stopped == "time":
        how = f"it was stopped after {binary.timeout_s:g} s"
    elif ended.stopped == "output":
        how = f"it was stopped when it had printed {_MOST_LOG_BYTES:,} bytes"
    elif ended.status < 0:
        how = f"it was ended by signal {-ended.status}"
    else:
        how = f"exit code {ended.status}"
    output = f"; its last output: {' | '.join(tail)}" if tail else "; it printed nothing"
    hint = "give a binary and files of the same version"
    if finished or ended.stopped == "time" or not ended.status:
        hint = "run without `astra_bin` to list what each rank waits for"
    return CheckFailedError(
        f"ASTRA-sim finished {finished:,} of {num_ranks:,} ranks ({how}){output}", path=binary.path, hint=hint
    )
