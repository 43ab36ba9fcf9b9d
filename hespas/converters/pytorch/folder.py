"""The traces of a job: per rank a profile, an execution trace, or both, as one workload.

Files are told by content and paired by the rank in their names; where names do not do, by the process they
are of. Each rank is a class: measured times differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hespas.converters.format import HEAD_BYTES, ReadOptions
from hespas.converters.pytorch.et_graph import asked_devices, ranks_here, ranks_of_one
from hespas.converters.pytorch.rank_graph import RankFiles, read_rank
from hespas.converters.pytorch.sniffing import is_execution_trace, is_profile, rank_in_name
from hespas.files.streams import first_bytes
from hespas.graph import CollectiveKind, Diagnostics, OpGraph, Workload
from hespas.graph.errors import FormatError

__all__ = ["read_folder"]

_MOST_FILES = 1 << 17
_MOST_DIGITS = 10
_RANK = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}]{0,200}?"rank"\s*:\s*(\d{1,9})')
_PID = re.compile(rb'"pid"\s*:\s*"?(\d{1,18})')


@dataclass(frozen=True, slots=True)
class _Found:
    """One file: what it is, and what it says of its rank and process (-1: nothing)."""

    path: Path
    is_profile: bool
    rank: int
    process: int


def read_folder(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Read all ranks. Raises ``FormatError`` where files do not make one job, or one of them is broken."""
    ranks = _paired(path, list(_files(path)), diagnostics)
    asked = asked_devices(options, str(path))
    world = max(asked, len(ranks))
    graphs: list[OpGraph] = []
    metadata: dict[str, str] = {}
    for done, (number, files) in enumerate(sorted(ranks.items())):
        result = read_rank(files, number, world, options, diagnostics)
        graphs.append(result.graph)
        metadata = metadata or dict(result.metadata)
        if options.progress:
            options.progress(done + 1, len(ranks))
    metadata["format"] = "pytorch"
    stated = metadata.get("world_size", "")
    recorded = int(stated) if stated.isdecimal() and len(stated) < _MOST_DIGITS else 1
    if len(ranks) > 1:
        rank_class = ranks_here(sorted(ranks), graphs, max(recorded, asked), str(path))
        diagnostics.warning(
            "pytorch.ranks-missing", str(path), "ranks of the job have no trace here",
            count=len(rank_class) - len(ranks),
        )  # fmt: skip
    else:
        number = next(iter(ranks))
        metadata["rank"] = str(number)
        rank_class = ranks_of_one(graphs[0], number, diagnostics, str(path), asked=asked, recorded=recorded)
    graphs = _with_equal_payloads(graphs, diagnostics, str(path))
    return Workload(
        name=path.resolve().name if path.is_dir() else graphs[0].name,
        classes=tuple(graphs),
        rank_class=rank_class,
        metadata=metadata,
    )


def _files(path: Path) -> Iterator[_Found]:
    """Traces in the folder and in folders right below it; a single file is that file."""
    entries = sorted(path.iterdir()) if path.is_dir() else [path]
    nested = [inner for entry in entries if entry.is_dir() for inner in sorted(entry.iterdir())]
    candidates = [entry for entry in (*entries, *nested) if entry.is_file() and ".json" in entry.suffixes]
    if len(candidates) > _MOST_FILES:
        raise FormatError(
            f"{len(candidates):,} files, more than {_MOST_FILES:,}", path=str(path),
            position=f"file {candidates[_MOST_FILES].name}", hint="keep one job per folder",
        )  # fmt: skip
    for entry in candidates:
        head = first_bytes(entry, HEAD_BYTES)
        profile = is_profile(head)
        if profile or is_execution_trace(head):
            stated = _RANK.search(head) if profile else None
            rank = int(stated[1]) if stated else rank_in_name(entry.name)
            process = _PID.search(head)
            yield _Found(entry, profile, rank, int(process[1]) if process else -1)


def _rank_alone(each: _Found) -> int:
    """The rank of a file that is the only one of its kind: a number in its name may be any."""
    by_name = rank_in_name(each.path.name)
    return rank_in_name(each.path.name, alone=True) if each.rank == by_name else each.rank


def _paired(path: Path, found: list[_Found], diagnostics: Diagnostics) -> dict[int, RankFiles]:
    """The files of each rank. Raises ``FormatError`` for two files of one kind and rank.

    A single pair is one rank whatever its names say, that of the profile where it states one.
    """
    if not found:
        raise FormatError(
            "no profile and no execution trace of PyTorch here", path=str(path),
            position="the names and first bytes of its files",
            hint="one file of torch.profiler and one of ExecutionTraceObserver per rank, .json or .json.gz",
        )  # fmt: skip
    kinds = [[each for each in found if each.is_profile is kind] for kind in (True, False)]
    if all(len(kind) <= 1 for kind in kinds):
        profile, trace = (kind[0].path if kind else None for kind in kinds)
        ranks_said = (_rank_alone(each) for each in (*kinds[0], *kinds[1]))
        stated = next((rank for rank in ranks_said if rank >= 0), 0)
        return {stated: RankFiles(profile, trace)}
    by_kind: list[dict[int, Path]] = []
    for kind in kinds:
        ranks: dict[int, Path] = {}
        for each in kind:
            number = _rank_of(each, kinds[0], found)
            if number < 0 or number in ranks:
                other = f" and {ranks[number].name}" if number in ranks else ""
                raise FormatError(
                    f"which rank is {each.path.name}{other} of?", path=str(path),
                    position=f"file {each.path.name}",
                    hint="keep one job per folder, and name files like job.rank0.kineto.json",
                )  # fmt: skip
            ranks[number] = each.path
        by_kind.append(ranks)
    return _complete(path, by_kind[0], by_kind[1], diagnostics)


def _rank_of(each: _Found, profiles: list[_Found], found: list[_Found]) -> int:
    """The rank of a file; of an execution trace without one, that of the profile of the same process."""
    if each.rank >= 0 or each.is_profile:
        return each.rank
    same = [profile.rank for profile in profiles if profile.process == each.process and each.process >= 0]
    alone = sum(other.process == each.process for other in found if not other.is_profile) == 1
    return same[0] if len(same) == 1 and alone else -1


def _complete(
    path: Path, profiles: dict[int, Path], traces: dict[int, Path], diagnostics: Diagnostics
) -> dict[int, RankFiles]:
    ranks = sorted(profiles.keys() | traces.keys())
    missing = sorted(set(range(ranks[-1] + 1)) - set(ranks)) if ranks[-1] < _MOST_FILES else [0]
    if missing:
        raise FormatError(
            f"the files of {len(missing):,} ranks are missing, first rank {missing[0]}", path=str(path),
            position=f"rank {missing[0]}", hint="copy the set again",
        )  # fmt: skip
    single = len(profiles.keys() ^ traces.keys()) if profiles and traces else 0
    diagnostics.warning(
        "pytorch.unpaired", str(path), "ranks have only one of profile and execution trace", count=single
    )
    return {rank: RankFiles(profiles.get(rank), traces.get(rank)) for rank in ranks}


def _with_equal_payloads(graphs: list[OpGraph], diagnostics: Diagnostics, path: str) -> list[OpGraph]:
    """Ragged exchanges with the largest payload of all ranks: what one of them sends bounds them all.

    The n-th ragged exchange over a group set is the same one on every rank; what a rank really sends stays
    in its ``operand_bytes``.
    """
    ragged = CollectiveKind.RAGGED_ALL_TO_ALL
    largest: dict[tuple[object, int], float] = {}
    places: list[list[tuple[int, tuple[object, int]]]] = []
    for graph in graphs:
        table = graph.collectives
        seen: dict[object, int] = {}
        mine: list[tuple[int, tuple[object, int]]] = []
        kinds: list[int] = table.kind.tolist()
        sets: list[int] = table.group_set.tolist()
        for row, (kind, group) in enumerate(zip(kinds, sets, strict=True)):
            if kind not in (ragged, CollectiveKind.ALL_TO_ALL):
                continue
            groups: object = graph.group_sets[group] if group >= 0 else None
            number = seen[groups] = seen.get(groups, -1) + 1
            mine.append((row, (groups, number)))
            if kind == ragged:
                size = float(table.comm_bytes[row])
                largest[groups, number] = max(largest.get((groups, number), 0.0), size)
        places.append(mine)
    if not largest or len(graphs) < 2:
        return graphs
    equal = [_bounded(graph, mine, largest) for graph, mine in zip(graphs, places, strict=True)]
    diagnostics.info(
        "pytorch.ragged-exchange", path,
        "all-to-alls with parts of several sizes; their payload is the largest of all ranks",
        count=len(largest),
    )  # fmt: skip
    return equal


def _bounded(
    graph: OpGraph, mine: list[tuple[int, tuple[object, int]]], largest: dict[tuple[object, int], float]
) -> OpGraph:
    table = graph.collectives
    size, kind = table.comm_bytes.copy(), table.kind.copy()
    for row, key in mine:
        if key in largest:
            size[row] = max(largest[key], size[row])
            kind[row] = CollectiveKind.RAGGED_ALL_TO_ALL
    return replace(graph, collectives=replace(table, comm_bytes=size, kind=kind))
