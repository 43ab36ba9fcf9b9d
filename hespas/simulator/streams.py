"""Which stream of a rank a node occupies, as a code: its kind in the low bits, which one of that kind above.

Streams that a graph names run side by side, one of each kind of work per name: a queue of a device and a
thread of a host do one thing at a time. A delay is time that passes and holds none of them.
"""

from __future__ import annotations

import numpy as np

from hespas.graph import NodeKind, OpClass, OpGraph, Resource
from hespas.graph.columns import FloatArray, SmallIntArray
from hespas.graph.passes import is_delay, runtime_copies
from hespas.graph.timeline import layers_of

__all__ = [
    "COMMUNICATION",
    "COMPUTE",
    "COPY",
    "DELAY",
    "FREE",
    "HOST",
    "POSTED",
    "STREAMS",
    "kinds_of",
    "shown_streams",
    "side_by_side",
    "stream_codes",
]

STREAMS = ("compute", "communication", "copy", "host")
"""The kinds of streams of a rank; each stream runs one node at a time."""
COMPUTE, COMMUNICATION, COPY, HOST = range(len(STREAMS))
FREE = -1
"""The code of a node that takes no time, and so no stream."""
DELAY = -2
"""The code of a node that takes time and no stream."""
POSTED = -3
"""The code of communication that waits for other ranks and holds no stream: a posted receive."""

_TALKING = (NodeKind.COLLECTIVE, NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE)
_LOADING = (NodeKind.MEM_LOAD, NodeKind.MEM_STORE)
_TALK = (OpClass.COLLECTIVE, OpClass.P2P)
"""Classes of communication, also where a trace has it as computation of its time: its size is unknown."""
_COPYING = (OpClass.HOST, OpClass.MEMORY)


def stream_codes(graph: OpGraph) -> SmallIntArray:
    """The code of each node.

    Collectives and messages communicate. Loads, stores, transfers between host and device (messages over the
    host link too), and recorded copies and fills by the runtime are copies. Other nodes of the host have a
    stream of their own, or compute where the device has nothing to compute: the host is the device then. A
    time of 0 is ``FREE``. O(nodes log nodes).
    """
    kinds = np.full(len(graph), COMPUTE, np.int32)
    kinds[graph.resource == int(Resource.HOST)] = HOST
    copies = np.isin(graph.op_class, _COPYING) | np.isin(graph.kind, _LOADING)
    kinds[copies | ((kinds == COMPUTE) & runtime_copies(graph))] = COPY
    kinds[np.isin(graph.kind, _TALKING) | np.isin(graph.op_class, _TALK)] = COMMUNICATION
    kinds[graph.p2p.node[graph.p2p.host]] = COPY
    kinds[is_delay(graph)] = DELAY
    kinds[(graph.duration_ns == 0) | (graph.multiplicity == 0)] = FREE
    if not (kinds == COMPUTE).any():
        kinds[kinds == HOST] = COMPUTE
    codes = kinds.copy()
    for kind in range(len(STREAMS)):
        mine = np.flatnonzero(kinds == kind)
        place = np.unique(graph.stream[mine], return_inverse=True)[1].reshape(-1)
        codes[mine] += len(STREAMS) * place.astype(np.int32)
    return codes


def kinds_of(codes: SmallIntArray) -> SmallIntArray:
    """The kind of each stream, an index of ``STREAMS``; a delay waits for the host. ``FREE`` stays."""
    kinds = np.where(codes >= 0, codes % len(STREAMS), codes)
    kinds = np.where(codes == POSTED, COMMUNICATION, kinds)
    return np.where(codes == DELAY, HOST, kinds).astype(np.int32)


def side_by_side(codes: SmallIntArray) -> tuple[int, ...]:
    """The kinds of which several nodes can run at once."""
    used = np.unique(codes[codes != FREE])
    kinds, counts = np.unique(kinds_of(used), return_counts=True)
    several = counts > 1
    for code, kind in ((DELAY, HOST), (POSTED, COMMUNICATION)):
        several |= (kinds == kind) & bool((used == code).any())
    found: list[int] = kinds[several].tolist()
    return tuple(found)


def shown_streams(
    graph: OpGraph, node: SmallIntArray, codes: SmallIntArray, spans: tuple[FloatArray, FloatArray]
) -> SmallIntArray:
    """The stream under which to show each span of starts and ends, so that none of a kind and a stream
    overlap: the one its node names where its kind has several, else -1. Delays get streams behind those of
    the host, posted communication behind those of communication. O(spans log spans).
    """
    several = np.isin(kinds_of(codes), side_by_side(codes))
    named = np.append(graph.stream, -1)[node]  # a block of trips has no node
    shown = np.where(several, named, -1).astype(np.int32)
    for code, kind in ((DELAY, HOST), (POSTED, COMMUNICATION)):
        loose = np.flatnonzero(codes == code)
        first = int(shown[kinds_of(codes) == kind].max(initial=-1)) + 1
        shown[loose] = first + layers_of(spans[0][loose], spans[1][loose])
    return shown
