"""Models that see operations, not graphs: each distinct operation of a graph is asked once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.free import takes_no_time
from hespas.estimators.network import group_ranks_per_node, message_ranks_per_node
from hespas.graph import Diagnostics, Estimate, OpGraph
from hespas.graph.columns import FloatArray
from hespas.graph.errors import InvariantError
from hespas.hardware import Device
from hespas.operations import Operations, between_ranks, operations_of

__all__ = ["OperationModel", "Prediction", "estimate_by_operation", "operations_on"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prediction:
    """What a model says of each operation; columns of shape ``(ops,)`` [ns].

    ``duration_ns`` is NaN where the model does not cover an operation; ``low_ns`` and ``high_ns`` hold 90 %
    of outcomes (NaN: no interval). ``said_by`` numbers ``models`` (-1: nobody), for models made of several.
    """

    duration_ns: FloatArray
    low_ns: FloatArray
    high_ns: FloatArray
    models: tuple[str, ...]
    said_by: NDArray[np.int8]

    @classmethod
    def of(
        cls,
        model: str,
        duration_ns: FloatArray,
        low_ns: FloatArray | None = None,
        high_ns: FloatArray | None = None,
    ) -> Prediction:
        """What one model says."""
        nothing = np.full(len(duration_ns), np.nan)
        return cls(
            duration_ns=duration_ns,
            low_ns=nothing if low_ns is None else low_ns,
            high_ns=nothing if high_ns is None else high_ns,
            models=(model,),
            said_by=np.where(np.isnan(duration_ns), -1, 0).astype(np.int8),
        )

    def __post_init__(self) -> None:
        """Check that all columns have one row per operation."""
        if {len(self.low_ns), len(self.high_ns), len(self.said_by)} != {len(self.duration_ns)}:
            raise InvariantError("Prediction: columns differ in length")


@runtime_checkable
class OperationModel(Protocol):
    """A model of time of single operations: a frozen dataclass whose fields are its options."""

    @property
    def name(self) -> str:
        """What the registry and reports call the model."""
        ...

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """The time of one execution of each operation; NaN where the model does not cover one, never 0.

        ``diagnostics`` is told, per reason, how many are not covered.
        """
        ...


def operations_on(graph: OpGraph, device: Device, *, num_ranks: int = -1) -> Operations:
    """The operations of a graph, and how many ranks of its collectives and messages share a node of it.
    O(nodes).
    """
    ops, table, messages = operations_of(graph, num_ranks=num_ranks), graph.collectives, graph.p2p
    if not len(table) and not len(messages):
        return ops
    per_node = np.full(len(ops), np.nan)
    shared = group_ranks_per_node(graph, device, num_ranks=num_ranks)
    per_node[table.node] = shared[table.group_set]
    between = between_ranks(graph)
    per_node[messages.node[between]] = message_ranks_per_node(graph, device)[between]
    return replace(ops, dims={**ops.dims, "ranks_per_node": per_node})


def estimate_by_operation(
    model: OperationModel,
    graph: OpGraph,
    device: Device,
    diagnostics: Diagnostics | None = None,
    *,
    num_ranks: int = -1,
) -> Estimate:
    """``model`` asked once for each distinct operation of ``graph``. O(nodes log nodes)."""
    distinct, place = operations_on(graph, device, num_ranks=num_ranks).distinct()
    said = model.predict(distinct, device, diagnostics)
    free = takes_no_time(graph)
    duration = np.where(free, 0.0, said.duration_ns[place])
    unknown = np.isnan(duration)
    return Estimate(
        hardware=device.name,
        estimators=said.models,
        bounds=("free", "model"),
        duration_ns=duration,
        low_ns=np.where(free, 0.0, said.low_ns[place]),
        high_ns=np.where(free, 0.0, said.high_ns[place]),
        said_by=np.where(unknown, -1, np.where(free, 0, said.said_by[place])).astype(np.int8),
        bound=np.where(unknown, -1, np.where(free, 0, 1)).astype(np.int8),
    )
