"""Reads a folder of replays, ``NAME.{class}.mlir``: the programs of one job's rank classes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hespas.converters.format import ReadOptions
from hespas.converters.stablehlo.ranks import parsed_ranks
from hespas.converters.stablehlo.reader import read_program
from hespas.converters.stablehlo.sniffing import class_files
from hespas.files.source import read_bytes
from hespas.graph import Diagnostics, GraphBuilder, OpGraph, Workload
from hespas.graph.columns import SmallIntArray
from hespas.graph.errors import FormatError, UnsupportedError

__all__ = ["read_folder"]

_PROGRAMS = (".mlir", ".mlir.gz", ".mlirbc", ".stablehlo", ".vhlo", ".bc")


def read_folder(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """A workload of as many classes as there are programs; ranks of none run an empty graph.

    Raises ``UnsupportedError`` for a folder of other programs, ``FormatError`` for one without any, and where
    ranks are not as stated.
    """
    names = sorted(entry.name for entry in path.iterdir())
    files = class_files(names)
    if not files and not any(name.endswith(_PROGRAMS) for name in names):
        raise FormatError(
            "no StableHLO program is in this folder",
            path=str(path),
            position="the names of its files",
            hint=f"name a file, or keep programs there whose names end in {', '.join(_PROGRAMS)}",
        )
    if not files:
        raise UnsupportedError(
            "a folder of programs that do not say which ranks run them",
            path=str(path),
            position=f"file {next(name for name in names if name.endswith(_PROGRAMS))}",
            hint="read them one by one",
        )
    programs = {name: _program(path / name, options, diagnostics) for name in files.values()}
    rank_class = _rank_class(path, programs)
    classes = [program.classes[0] for program in programs.values()]
    if (idle := int((rank_class == len(classes)).sum())) > 0:
        message = "ranks whose program is not in the folder do nothing"
        diagnostics.warning("stablehlo.absent-ranks", path.name, message, path=str(path), count=idle)
        classes.append(_empty(path.name))
    first = next(iter(programs.values()))
    metadata = {key: value for key, value in first.metadata.items() if key != "ranks"}
    metadata["num_replicas"] = str(len(rank_class))
    return Workload(name=first.name, classes=tuple(classes), rank_class=rank_class, metadata=metadata)


def _program(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    return read_program(read_bytes(path, options.max_bytes), str(path), options, diagnostics)


def _rank_class(path: Path, programs: Mapping[str, Workload]) -> SmallIntArray:
    """The class of each rank; one past the last for ranks of no program."""
    num_ranks = max(program.num_ranks for program in programs.values())
    rank_class = np.full(num_ranks, len(programs), np.int32)
    for number, (name, program) in enumerate(programs.items()):
        stated = program.metadata.get("ranks", "")
        try:
            ranks = parsed_ranks(stated)
        except ValueError as error:
            raise _misfit(path / name, f"ranks = {stated[:80]!r}: {error}") from None
        if int(ranks.max()) >= num_ranks:
            raise _misfit(path / name, f"it is of rank {int(ranks.max())} of a job of {num_ranks}")
        taken = ranks[rank_class[ranks] < len(programs)]
        if len(taken):
            raise _misfit(path / name, f"rank {int(taken[0])} runs another program, too")
        rank_class[ranks] = number
    return rank_class


def _misfit(path: Path, message: str) -> FormatError:
    return FormatError(
        message,
        path=str(path),
        position="hespas.replay in the module header",
        hint="write the folder again, or read one program at a time",
    )


def _empty(name: str) -> OpGraph:
    return GraphBuilder(name).build()
