"""What a model says (`Estimate`), and what happens then (`Timeline`)."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import FloatArray, SmallIntArray
from hespas.graph.errors import InvariantError

__all__ = ["Estimate", "Timeline"]


def _same_length(owner: str, rows: int, columns: Mapping[str, Sized]) -> None:
    for name, column in columns.items():
        if len(column) != rows:
            raise InvariantError(f"{owner}: column {name} does not have {rows} rows")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Estimate:
    """What a model says of each node of one graph; columns of shape ``(nodes,)``.

    ``duration_ns`` is the time of one execution (NaN where no estimator covers the node; 0 only for nodes
    that cost nothing); ``low_ns`` and ``high_ns`` bound it (NaN: no interval). ``said_by`` indexes
    ``estimators`` (-1: nobody). ``bound`` indexes ``bounds``: what limits the node.
    """

    hardware: str
    estimators: tuple[str, ...]
    bounds: tuple[str, ...]
    duration_ns: FloatArray
    low_ns: FloatArray
    high_ns: FloatArray
    said_by: NDArray[np.int8]
    bound: NDArray[np.int8]

    def __post_init__(self) -> None:
        """Check that all columns have one row per node."""
        names = ("low_ns", "high_ns", "said_by", "bound")
        _same_length("Estimate", len(self), {name: getattr(self, name) for name in names})

    def __len__(self) -> int:
        return len(self.duration_ns)

    @property
    def coverage(self) -> float:
        """Share of nodes with a duration, 0..1; 1 for a graph without nodes."""
        return float(np.mean(~np.isnan(self.duration_ns))) if len(self) else 1.0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Timeline:
    """When each node of each rank ran; columns of shape ``(spans,)``.

    ``resource`` indexes ``resources`` (``compute``, ``communication``, ``copy``). ``critical`` marks the
    spans on the critical path. ``finish_ns`` and ``exposed_comm_ns`` have shape ``(ranks,)``.
    """

    resources: tuple[str, ...]
    node: SmallIntArray
    rank: SmallIntArray
    resource: NDArray[np.int8]
    start_ns: FloatArray
    end_ns: FloatArray
    critical: NDArray[np.bool_]
    finish_ns: FloatArray
    exposed_comm_ns: FloatArray

    def __post_init__(self) -> None:
        """Check that all columns have one row per span."""
        names = ("node", "rank", "resource", "end_ns", "critical")
        _same_length("Timeline", len(self), {name: getattr(self, name) for name in names})

    def __len__(self) -> int:
        return len(self.start_ns)
