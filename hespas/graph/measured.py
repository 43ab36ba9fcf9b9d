"""What a model says (`Estimate`), and what happens then (`Timeline`)."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import FloatArray, SmallIntArray
from hespas.graph.errors import InvariantError

__all__ = ["Estimate", "Timeline"]


def _no_ints() -> SmallIntArray:
    return np.empty(0, np.int32)


def _no_flags() -> NDArray[np.bool_]:
    return np.empty(0, np.bool_)


def _no_floats() -> FloatArray:
    return np.empty(0, np.float64)


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
    """When each node of each rank ran; columns of shape ``(spans,)``. What takes no time has no span.

    ``resource`` indexes ``resources`` (``compute``, ``communication``, ``copy``, ``host``). ``critical``
    marks the spans on the critical path of their rank. ``cause`` is the span whose end let this one start
    (-1: it starts with the step), ``by_resource`` whether it had to wait for the resource that span held,
    and not for what it made.

    A span with ``node`` -1 stands for ``trips`` trips of loop ``region`` (a row of the graph's regions, -1
    for a node's own span): its end is where the last of them ends.

    Ranks that do the same at the same time are shown once: ``shown_by`` names, for each rank, the one whose
    spans are also its own. ``finish_ns``, ``exposed_comm_ns`` (communication while nothing computes) and
    ``shown_by`` have shape ``(ranks,)``, ``busy_ns`` has ``(ranks, resources)``. Where the columns behind
    ``exposed_comm_ns`` are left out, they say that nothing is known (-1, NaN, each rank shown by itself). A
    rank of the job that was not there has NaN throughout and is shown by -1.
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
    cause: SmallIntArray = field(default_factory=_no_ints)
    by_resource: NDArray[np.bool_] = field(default_factory=_no_flags)
    region: SmallIntArray = field(default_factory=_no_ints)
    trips: FloatArray = field(default_factory=_no_floats)
    shown_by: SmallIntArray = field(default_factory=_no_ints)
    busy_ns: FloatArray = field(default_factory=_no_floats)

    def __post_init__(self) -> None:
        """Fill the columns left out; check that all have one row per span, or per rank."""
        spans, ranks = len(self.start_ns), len(self.finish_ns)
        nowhere = np.broadcast_to(np.int32(-1), (spans,))
        self._fill("cause", nowhere)
        self._fill("by_resource", np.broadcast_to(np.False_, (spans,)))
        self._fill("region", nowhere)
        self._fill("trips", np.broadcast_to(np.float64(1.0), (spans,)))
        self._fill("shown_by", np.arange(ranks, dtype=np.int32))
        self._fill("busy_ns", np.full((ranks, len(self.resources)), np.nan))
        of_spans = (
            "node",
            "rank",
            "resource",
            "end_ns",
            "critical",
            "cause",
            "by_resource",
            "region",
            "trips",
        )
        _same_length("Timeline", spans, {name: getattr(self, name) for name in of_spans})
        of_ranks = ("exposed_comm_ns", "shown_by", "busy_ns")
        _same_length("Timeline", ranks, {name: getattr(self, name) for name in of_ranks})

    def _fill(self, name: str, column: NDArray[np.generic]) -> None:
        if not len(getattr(self, name)):
            object.__setattr__(self, name, column)

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def step_ns(self) -> float:
        """When the last rank is done; 0 without ranks."""
        return float(np.fmax.reduce(self.finish_ns)) if len(self.finish_ns) else 0.0

    def resource_ns(self, resource: str) -> FloatArray:
        """Time each rank keeps a resource busy [ns], shape ``(ranks,)``; NaN for one that is not listed."""
        if resource not in self.resources:
            return np.full(len(self.finish_ns), np.nan)
        return self.busy_ns[:, self.resources.index(resource)]
