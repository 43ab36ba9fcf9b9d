"""The trace of one rank of a job of several: what it is, and what it can stand for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hespas.converters.format import ReadOptions
from hespas.converters.replica_groups import MAX_DEVICES
from hespas.graph import Diagnostics, OpGraph
from hespas.graph.errors import UnsupportedError, UsageError

__all__ = ["asked_devices", "ranks_of_one"]


def asked_devices(options: ReadOptions, path: str) -> int:
    """How many devices the user states, or 1. Raises ``UsageError`` for more than any job has."""
    asked = 1 if options.num_devices is None else options.num_devices
    if not 1 <= asked <= MAX_DEVICES:
        raise UsageError(f"{asked:,} devices asked for", path=path, hint=f"1 to {MAX_DEVICES:,}")
    return asked


def ranks_of_one(
    graph: OpGraph, number: int, diagnostics: Diagnostics, path: str, *, asked: int, recorded: int
) -> NDArray[np.int32]:
    """The class of each rank, where one rank of ``recorded`` is here: of itself alone, or of as many as are
    ``asked`` for. Raises ``UnsupportedError`` where it cannot stand for those.
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
            f"the trace is of rank {number} of {recorded:,}; the others are not here: what is read is this "
            "rank alone, as rank 0, whose collectives name ranks that are not there. It is no job that a "
            f"simulator can run; {remedy}",
        )  # fmt: skip
    return np.zeros(1, np.int32)


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
            path=path, hint="give the traces of all ranks, or leave --num-devices out",
        )  # fmt: skip
    diagnostics.warning(
        "pytorch.one-rank-for-all", path,
        f"all {world:,} ranks are taken to do what rank {number} did, in its times: no other was recorded",
    )  # fmt: skip
    return np.zeros(world, np.int32)
