"""What a conversion must conserve, summed over one step of one rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.graph.columns import FloatArray
from hespas.graph.opgraph import OpGraph

__all__ = ["Totals", "known_sum", "totals"]


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over one step, executions counted; ``unknown_ops`` have a cost or count that is not known and are
    not in the sums. A sum is NaN where no term of it is known.
    """

    ops: float
    device_time_ns: float
    flops: float
    useful_flops: float
    transcendentals: float
    bytes_moved: float
    collectives: float
    collective_bytes: float
    messages: float
    message_bytes: float
    unknown_ops: int


def known_sum(column: FloatArray) -> float:
    """The sum of what is known: NaN where there are terms and none is, 0 where there are no terms."""
    unknown = np.isnan(column)
    return float("nan") if len(column) and unknown.all() else float(column[~unknown].sum())


def totals(graph: OpGraph) -> Totals:
    """The sums over one graph; past what a float holds they are infinite. O(nodes)."""
    with np.errstate(over="ignore", invalid="ignore"):  # infinity says it, without a warning of NumPy
        return _totals(graph)


def _totals(graph: OpGraph) -> Totals:
    times = graph.multiplicity
    of_collectives, of_messages = times[graph.collectives.node], times[graph.p2p.node]
    unknown = np.isnan(graph.flops) | np.isnan(graph.bytes_moved) | np.isnan(times)
    return Totals(
        ops=float(np.nansum(times)),
        device_time_ns=known_sum(graph.duration_ns * times),
        flops=known_sum(graph.flops * times),
        useful_flops=known_sum(graph.useful_flops * times),
        transcendentals=known_sum(graph.transcendentals * times),
        bytes_moved=known_sum(graph.bytes_moved * times),
        collectives=float(np.nansum(of_collectives)),
        collective_bytes=float(np.nansum(graph.collectives.comm_bytes * of_collectives)),
        messages=float(np.nansum(of_messages)),
        message_bytes=float(np.nansum(graph.p2p.comm_bytes * of_messages)),
        unknown_ops=int(unknown.sum()),
    )
