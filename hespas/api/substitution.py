"""Collectives that simulators have no algorithm for, replaced by one that moves the same data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from hespas.graph import CollectiveKind, Diagnostics, OpGraph
from hespas.graph.columns import FloatArray

__all__ = ["SUBSTITUTES", "SimulatedCollectives"]

SUBSTITUTES: MappingProxyType[CollectiveKind, CollectiveKind] = MappingProxyType(
    {
        CollectiveKind.REDUCE: CollectiveKind.ALL_REDUCE,
        CollectiveKind.GATHER: CollectiveKind.ALL_GATHER,
        CollectiveKind.SCATTER: CollectiveKind.REDUCE_SCATTER,
        CollectiveKind.REDUCE_SCATTER_BLOCK: CollectiveKind.REDUCE_SCATTER,
        CollectiveKind.BARRIER: CollectiveKind.ALL_REDUCE,
    }
)
"""A kind -> the kind that includes it, of the same payload: an upper bound of its time. A barrier is an
all-reduce of one byte, as NCCL does it with one element.
"""


@dataclass(frozen=True, slots=True)
class SimulatedCollectives:
    """Say of every collective a kind that ASTRA-sim runs. Nodes, operations and times stay."""

    def __call__(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """The graph with substituted kinds; the same graph where there is nothing to substitute."""
        table = graph.collectives
        replaced = np.isin(table.kind, list(SUBSTITUTES))
        if not replaced.any():
            return graph
        kind = table.kind.copy()
        for old, new in SUBSTITUTES.items():
            diagnostics.warning(
                f"pass.substituted-{old.name.lower().replace('_', '-')}",
                graph.name,
                f"{_spelled(old)} are written as {_spelled(new)} of the same payload, which simulators run",
                count=int((table.kind == old).sum()),
            )
            kind[table.kind == old] = new
        barrier = table.kind == CollectiveKind.BARRIER
        payload: FloatArray = np.where(barrier & ~(table.comm_bytes >= 1), 1.0, table.comm_bytes)
        operand, result = (
            np.where(replaced, np.nan, column) for column in (table.operand_bytes, table.result_bytes)
        )
        return replace(
            graph,
            collectives=replace(
                table, kind=kind, comm_bytes=payload, operand_bytes=operand, result_bytes=result
            ),
        )


def _spelled(kind: CollectiveKind) -> str:
    return f"{kind.name.lower().replace('_', '-')}s"
