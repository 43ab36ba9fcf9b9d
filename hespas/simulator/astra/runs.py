"""What a run leaves: when each node of each rank ran. Ranks that did the same at the same time are one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hespas.graph.columns import IntArray
from hespas.simulator.astra.traces import RankTrace

__all__ = ["NEVER", "RankRun", "Run"]

NEVER = -1
"""The time of what has not happened, and the cause of what had none."""


@dataclass(frozen=True, slots=True, eq=False)
class RankRun:
    """One rank: times of its nodes [ns], in ascending order of their ids. ``cause`` is the node at whose end
    one was issued, ``NEVER`` where that was the start.
    """

    trace: RankTrace
    start_ns: Sequence[int]
    end_ns: Sequence[int]
    cause: Sequence[int]
    finish_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """All ranks: ``shown_by`` tells for each rank of the job which of ``ranks`` did the same."""

    ranks: Sequence[RankRun]
    shown_by: IntArray
