"""The order in which one rank issues its communication, by ASTRA-sim's rule.

One CPU operation, one device operation and one communication are in flight at a time, receives without limit;
whenever something completes, ready nodes are issued in ascending id (network model, section 7).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.graph import OpGraph
from hespas.validators.program import NodeProgram
from hespas.validators.replay import Task, replay

__all__ = ["IssueOrder", "issue_order"]


@dataclass(frozen=True, slots=True)
class IssueOrder:
    """Collective nodes of a class in the order in which a rank issues them when it never waits.

    ``by_time`` follows the slot rule with the durations the graph states, ``by_id`` the ids alone. They
    differ only where independent collectives race, and then the true order is a matter of timing.
    """

    by_time: tuple[int, ...]
    by_id: tuple[int, ...]


def issue_order(graph: OpGraph) -> IssueOrder:
    """Both orders of one graph. O(nodes log nodes)."""
    runs = graph.multiplicity != 0
    table = graph.collectives
    nodes = table.node[runs[table.node]]
    by_id: list[int] = nodes[np.argsort(graph.id[nodes], kind="stable")].tolist()
    if len(by_id) < 2:
        return IssueOrder(tuple(by_id), tuple(by_id))
    alone = Task(NodeProgram.of(graph), dict.fromkeys(by_id, 0), {}, {})
    issued = replay([alone], [1], comm_ns=1).issued[0]
    return IssueOrder(tuple(issued), tuple(by_id))
