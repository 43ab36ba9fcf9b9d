"""Which stream of a device a node occupies."""

from __future__ import annotations

import numpy as np

from hespas.graph import NodeKind, OpClass, OpGraph, Resource
from hespas.graph.columns import SmallIntArray

__all__ = ["COMMUNICATION", "COMPUTE", "COPY", "FREE", "HOST", "STREAMS", "stream_codes"]

STREAMS = ("compute", "communication", "copy", "host")
"""The streams of a rank; each runs one node at a time."""
COMPUTE, COMMUNICATION, COPY, HOST = range(len(STREAMS))
FREE = -1
"""The code of a node that takes no time, and so no stream."""

_TALKING = (NodeKind.COLLECTIVE, NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE)
_LOADING = (NodeKind.MEM_LOAD, NodeKind.MEM_STORE)
_COPYING = (OpClass.HOST, OpClass.MEMORY)


def stream_codes(graph: OpGraph) -> SmallIntArray:
    """The stream of each node, an index of ``STREAMS`` or ``FREE``.

    Collectives and messages communicate; loads, stores and transfers between host and device (messages over
    the host link too) are copies; other nodes of the host have a stream of their own, or compute where the
    device has nothing to compute: the host is the device then. A time of 0 is ``FREE``. O(nodes).
    """
    codes = np.full(len(graph), COMPUTE, np.int32)
    codes[graph.resource == int(Resource.HOST)] = HOST
    codes[np.isin(graph.op_class, _COPYING) | np.isin(graph.kind, _LOADING)] = COPY
    codes[np.isin(graph.kind, _TALKING)] = COMMUNICATION
    codes[graph.p2p.node[graph.p2p.host]] = COPY
    codes[(graph.duration_ns == 0) | (graph.multiplicity == 0)] = FREE
    if not (codes == COMPUTE).any():
        codes[codes == HOST] = COMPUTE
    return codes
