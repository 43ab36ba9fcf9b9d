"""Reader of StableHLO: one program that all devices run, or a folder with one program per rank class.

A folder holds replays (:mod:`.replay`) ``NAME.{class}.mlir`` of one job. Each states its ranks as text:
``0-3,8-14/2`` is 0, 1, 2, 3, 8, 10, 12, 14.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hespas.converters.format import ReadOptions
from hespas.converters.replica_groups import MAX_DEVICES
from hespas.converters.stablehlo import class_files
from hespas.converters.stablehlo.mlir import check_installation
from hespas.converters.stablehlo.sandbox import read_in_sandbox
from hespas.files.streams import read_bytes
from hespas.graph import PROGRAM_BYTES, Diagnostics, GraphBuilder, Workload
from hespas.graph.columns import IntArray, SmallIntArray
from hespas.graph.errors import FormatError, UnsupportedError

__all__ = ["parsed_ranks", "ranks_text", "read", "read_program"]


def read(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Read a file in any form or a folder. Raises ``FormatError``, ``UsageError`` or ``UnsupportedError``."""
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        files = class_files(names)
        if not files and not any(name.endswith(_PROGRAMS) for name in names):
            raise FormatError(
                "the folder has no StableHLO program",
                path=str(path),
                position="file names",
                hint=f"name a file, or a folder of programs with suffix {', '.join(_PROGRAMS)}",
            )
        if not files:
            raise UnsupportedError(
                "the file names in this folder do not show which ranks run which program",
                path=str(path),
                position=f"file {next(name for name in names if name.endswith(_PROGRAMS))}",
                hint="read the programs one by one",
            )
        programs = {
            name: read_program(
                read_bytes(path / name, options.max_bytes), str(path / name), options, diagnostics
            )
            for name in files.values()
        }
        rank_class = _rank_class(path, programs)
        classes = [program.classes[0] for program in programs.values()]
        if (idle := int((rank_class == len(classes)).sum())) > 0:
            message = "ranks without a program in the folder run an empty graph"
            diagnostics.warning("stablehlo.absent-ranks", path.name, message, path=str(path), count=idle)
            classes.append(GraphBuilder(path.name).build())
        first = next(iter(programs.values()))
        metadata = {
            key: value for key, value in first.metadata.items() if key not in {"ranks", PROGRAM_BYTES}
        }
        metadata["num_replicas"] = str(len(rank_class))
        return Workload(name=first.name, classes=tuple(classes), rank_class=rank_class, metadata=metadata)
    return read_program(read_bytes(path, options.max_bytes), str(path), options, diagnostics)


def read_program(data: bytes, path: str, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Read a program from memory, in a child process. ``path`` appears in messages."""
    check_installation()  # fail before a child process starts
    return read_in_sandbox(data, path, options, diagnostics)


_PROGRAMS = (".mlir", ".mlir.gz", ".mlirbc", ".stablehlo", ".vhlo", ".bc")


def _rank_class(path: Path, programs: Mapping[str, Workload]) -> SmallIntArray:
    """Return the class of each rank from the programs of a folder. Ranks without a program get the class
    after the last one.
    """
    num_ranks = max(program.num_ranks for program in programs.values())
    rank_class = np.full(num_ranks, len(programs), np.int32)
    for number, (name, program) in enumerate(programs.items()):
        ranks_of_program = program.metadata.get("ranks", "")
        try:
            ranks = parsed_ranks(ranks_of_program)
        except ValueError as error:
            raise _misfit(path / name, f"ranks = {ranks_of_program[:80]!r}: {error}") from None
        if int(ranks.max()) >= num_ranks:
            raise _misfit(
                path / name, f"it runs on rank {int(ranks.max())}, but the job has {num_ranks} ranks"
            )
        taken = ranks[rank_class[ranks] < len(programs)]
        if len(taken):
            raise _misfit(path / name, f"rank {int(taken[0])} also runs another program")
        rank_class[ranks] = number
    return rank_class


def _misfit(path: Path, message: str) -> FormatError:
    return FormatError(
        message,
        path=str(path),
        position="hespas.replay in the module header",
        hint="write the folder again, or read one program at a time",
    )


_RUN = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?:/(\d{1,9}))?)?")

_SHORTEST = 3
"""Smallest number of ranks that are written as a run with a step."""


def ranks_text(ranks: IntArray) -> str:
    """Return ascending ranks as text: ranges, each with a step, such as ``0-6/2``. O(ranks)."""
    runs: list[str] = []
    listed: list[int] = ranks.tolist()
    start = 0
    while start < len(listed):
        end = min(start + 2, len(listed))
        while end < len(listed) and listed[end] - listed[end - 1] == listed[start + 1] - listed[start]:
            end += 1
        first, last = listed[start], listed[end - 1]
        step = listed[start + 1] - first if end - start > 1 else 1
        if end - start < _SHORTEST and step > 1:
            end, last = start + 1, first
        runs.append(f"{first}" if last == first else f"{first}-{last}" + (f"/{step}" if step > 1 else ""))
        start = end
    return ",".join(runs)


def parsed_ranks(text: str) -> IntArray:
    """Parse the text of :func:`ranks_text`. Raises ``ValueError`` for an invalid text or more than 2**24
    ranks.
    """
    parts: list[IntArray] = []
    left = MAX_DEVICES
    for run in text.split(","):
        match = _RUN.fullmatch(run)
        if match is None:
            raise ValueError(f"{run[:40]!r} is not a run of ranks")
        first = int(match[1])
        last, step = int(match[2] or first), int(match[3] or 1)
        count = (last - first) // step + 1 if step and last >= first else 0
        if not 0 < count <= left or last >= MAX_DEVICES:
            raise ValueError(f"{run!r} is not a run of ranks below {MAX_DEVICES:,}")
        left -= count
        parts.append(np.arange(first, last + 1, step, dtype=np.int64))
    return np.concatenate(parts)
