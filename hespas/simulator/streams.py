"""Stream of each node as a code: the low bits are the kind of stream, the high bits its number among streams
of that kind.

Streams that a graph names run concurrently, one per kind of work and name. A device queue and a host thread
run one operation at a time. A delay takes time and occupies no stream.
"""

from __future__ import annotations

import numpy as np

from hespas.graph import NodeKind, OpClass, OpGraph, Resource
from hespas.graph.columns import FloatArray, SmallIntArray
from hespas.graph.passes import is_delay, runtime_copies
from hespas.graph.timeline import layers_of

__all__ = [
    "COMMUNICATION",
    "COMMUNICATION_KINDS",
    "COMPUTE",
    "COPY",
    "DELAY",
    "FREE",
    "HOST",
    "POSTED",
    "STREAMS",
    "concurrent_kinds",
    "kinds_of",
    "shown_streams",
    "stream_codes",
]

STREAMS = ("compute", "communication", "copy", "host")
"""Kinds of streams of a rank; each stream runs one node at a time."""
COMPUTE, COMMUNICATION, COPY, HOST = range(len(STREAMS))
FREE = -1
"""Code of a zero-cost node, which occupies no stream."""
DELAY = -2
"""Code of a node that takes time and occupies no stream."""
POSTED = -3
"""Code of communication that waits for other ranks and occupies no stream: a posted receive."""

COMMUNICATION_KINDS = (NodeKind.COLLECTIVE, NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE)
"""Kinds of nodes that communicate."""
_STORAGE_KINDS = (NodeKind.MEM_LOAD, NodeKind.MEM_STORE)
_COMMUNICATION_CLASSES = (OpClass.COLLECTIVE, OpClass.P2P)
"""Classes of communication, also for trace nodes that are computation because their size is unknown."""
_COPY_CLASSES = (OpClass.HOST, OpClass.MEMORY)


def stream_codes(graph: OpGraph) -> SmallIntArray:
    """Return the stream code of each node.

    Collectives and messages run on communication streams. Loads, stores, transfers between host and device
    (including messages over the host link), and recorded copies and fills run on copy streams. Other host
    nodes run on host streams, or on the compute stream if the device computes nothing, because then the host
    is the device. Nodes with a time of 0 get ``FREE``. O(nodes log nodes).
    """
    kinds = np.full(len(graph), COMPUTE, np.int32)
    kinds[graph.resource == int(Resource.HOST)] = HOST
    copies = np.isin(graph.op_class, _COPY_CLASSES) | np.isin(graph.kind, _STORAGE_KINDS)
    kinds[copies | ((kinds == COMPUTE) & runtime_copies(graph))] = COPY
    kinds[np.isin(graph.kind, COMMUNICATION_KINDS) | np.isin(graph.op_class, _COMMUNICATION_CLASSES)] = (
        COMMUNICATION
    )
    kinds[graph.p2p.node[graph.p2p.host]] = COPY
    kinds[is_delay(graph)] = DELAY
    kinds[(graph.duration_ns == 0) | (graph.executions == 0)] = FREE
    if not (kinds == COMPUTE).any():
        kinds[kinds == HOST] = COMPUTE
    codes = kinds.copy()
    if not (graph.stream[1:] != graph.stream[:-1]).any():  # one stream of each kind
        return codes
    for kind in range(len(STREAMS)):
        mine = np.flatnonzero(kinds == kind)
        number = np.unique(graph.stream[mine], return_inverse=True)[1].reshape(-1)
        codes[mine] += len(STREAMS) * number.astype(np.int32)
    return codes


def kinds_of(codes: SmallIntArray) -> SmallIntArray:
    """Return the kind of each stream code, as an index in ``STREAMS``. A delay counts as host; ``FREE`` is
    returned unchanged.
    """
    kinds = np.where(codes >= 0, codes % len(STREAMS), codes)
    kinds = np.where(codes == POSTED, COMMUNICATION, kinds)
    return np.where(codes == DELAY, HOST, kinds).astype(np.int32)


def concurrent_kinds(codes: SmallIntArray) -> tuple[int, ...]:
    """Return the kinds of streams on which several nodes can run concurrently."""
    used = np.unique(codes[codes != FREE])
    kinds, counts = np.unique(kinds_of(used), return_counts=True)
    several = counts > 1
    for code, kind in ((DELAY, HOST), (POSTED, COMMUNICATION)):
        several |= (kinds == kind) & bool((used == code).any())
    concurrent: list[int] = kinds[several].tolist()
    return tuple(concurrent)


def shown_streams(
    graph: OpGraph, node: SmallIntArray, codes: SmallIntArray, spans: tuple[FloatArray, FloatArray]
) -> SmallIntArray:
    """Return the stream number to show for each span of a timeline, such that no two spans of one kind and
    stream overlap.

    If the streams of a kind are numbered, it is the stream that the node names, otherwise -1. Delays get
    separate streams after the host's streams. Posted communication gets separate streams after the other
    communication streams. O(spans log spans).
    """
    several = np.isin(kinds_of(codes), concurrent_kinds(codes))
    named = np.append(graph.stream, -1)[node]  # a block of iterations has no node
    shown = np.where(several, named, -1).astype(np.int32)
    for code, kind in ((DELAY, HOST), (POSTED, COMMUNICATION)):
        loose = np.flatnonzero(codes == code)
        first = int(shown[kinds_of(codes) == kind].max(initial=-1)) + 1
        shown[loose] = first + layers_of(spans[0][loose], spans[1][loose])
    return shown
