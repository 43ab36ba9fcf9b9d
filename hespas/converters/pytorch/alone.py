"""The trace of one rank of a job of several: what it is, and what it can stand for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hespas.converters.format import ReadOptions
from hespas.converters.replica_groups import MAX_DEVICES, highest_id
from hespas.graph import ABSENT, Diagnostics, OpGraph
from hespas.graph.errors import FormatError, UnsupportedError, UsageError

__all__ = ["asked_devices", "ranks_here", "ranks_of_one"]


def asked_devices(options: ReadOptions, path: str) -> int:
    """How many devices the user states, or 1. Raises ``UsageError`` for more than any job has."""
    asked = 1 if options.num_devices is None else options.num_devices
    if not 1 <= asked <= MAX_DEVICES:
        raise UsageError(f"{asked:,} devices asked for", path=path, hint=f"1 to {MAX_DEVICES:,}")
    return asked


def ranks_of_one(
    graph: OpGraph, number: int, diagnostics: Diagnostics, path: str, *, asked: int, recorded: int
) -> NDArray[np.int32]:
    """The class of each rank of the job, where one rank of ``recorded`` is here: the others are absent, or do
    the same where as many are ``asked`` for. Raises ``UnsupportedError`` where it cannot stand for those.
    """
    if asked > 1:
        return _for_all(graph, number, asked, diagnostics, path)
    if recorded > 1:
        remedy = (
            f"--num-devices {recorded} takes it that all ranks do what this one did"
            if _stands_for(graph, recorded)
            else "give the traces of all ranks for one"
        )
        diagnostics.warning(
            "pytorch.one-rank", path,
            f"the trace is of rank {number} of {recorded:,}; the others are not here, and collectives and "
            f"messages with them end nowhere. It is no job that a simulator can run; {remedy}",
        )  # fmt: skip
    return ranks_here([number], [graph], recorded, path)


def ranks_here(
    numbers: Sequence[int], graphs: Sequence[OpGraph], recorded: int, path: str
) -> NDArray[np.int32]:
    """The class of each rank of the job, where some are here, each a class of its own. The job has as many as
    were ``recorded``, or as groups and messages name. Raises ``FormatError`` for more than any job has.
    """
    groups = [1 + highest_id(each) for graph in graphs for each in graph.group_sets]
    peers = [permutation.num_ranks for graph in graphs for permutation in graph.permutations]
    size = max([recorded, max(numbers) + 1, *groups, *peers])
    if size > MAX_DEVICES:
        raise FormatError(
            f"the trace is of a job of {size:,} ranks",
            path=path,
            position="the largest rank of a group or a message",
            hint=f"from 1 to {MAX_DEVICES:,} are possible",
        )
    ranks = np.full(size, ABSENT, np.int32)
    ranks[numbers] = np.arange(len(numbers), dtype=np.int32)
    return ranks


def _stands_for(graph: OpGraph, world: int) -> bool:
    """Whether all ranks can do the same: messages, and groups of others than all, are those of one alone."""
    return not len(graph.p2p) and all(groups.is_world(world) for groups in graph.group_sets)


def _for_all(
    graph: OpGraph, number: int, world: int, diagnostics: Diagnostics, path: str
) -> NDArray[np.int32]:
    """The class of ``world`` ranks that all do what one recorded rank did."""
    if not _stands_for(graph, world):
        raise UnsupportedError(
            f"the trace of rank {number} cannot stand for {world:,} ranks: it does not always talk with all "
            "of them, and with no others",
            path=path, position="process groups and messages",
            hint="give the traces of all ranks, or leave --num-devices out",
        )  # fmt: skip
    diagnostics.warning(
        "pytorch.one-rank-for-all", path,
        f"all {world:,} ranks are taken to do what rank {number} did, in its times: no other was recorded",
    )  # fmt: skip
    return np.zeros(world, np.int32)
