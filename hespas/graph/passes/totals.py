"""What a conversion must conserve, summed over one step of one rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.graph.opgraph import OpGraph

__all__ = ["Totals", "totals"]


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over one step, executions counted; ``unknown_ops`` have a cost or count that is not known and are
    not in the sums. ``device_time_ns`` is NaN where no operation states a time.
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


def totals(graph: OpGraph) -> Totals:
    """The sums over one graph. O(nodes)."""
    times = graph.multiplicity
    of_collectives, of_messages = times[graph.collectives.node], times[graph.p2p.node]
    device_time = graph.duration_ns * times
    timed = not np.isnan(device_time).all() or not len(graph)
    unknown = np.isnan(graph.flops) | np.isnan(graph.bytes_moved) | np.isnan(times)
    return Totals(
        ops=float(np.nansum(times)),
        device_time_ns=float(np.nansum(device_time)) if timed else float("nan"),
        flops=float(np.nansum(graph.flops * times)),
        useful_flops=float(np.nansum(graph.useful_flops * times)),
        transcendentals=float(np.nansum(graph.transcendentals * times)),
        bytes_moved=float(np.nansum(graph.bytes_moved * times)),
        collectives=float(np.nansum(of_collectives)),
        collective_bytes=float(np.nansum(graph.collectives.comm_bytes * of_collectives)),
        messages=float(np.nansum(of_messages)),
        message_bytes=float(np.nansum(graph.p2p.comm_bytes * of_messages)),
        unknown_ops=int(unknown.sum()),
    )
