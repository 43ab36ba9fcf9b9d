"""What a trace stated in ``duration_micros`` where a writer would state something else.

``duration_nanos`` is exact and counts where both stand; what simulators read is kept beside it, so that a
rewritten trace says the same and a checker can hold one against the other.
"""

from __future__ import annotations

import numpy as np

from hespas.converters.chakra.contract import Tag
from hespas.converters.chakra.spans import Longs, Window, Words
from hespas.converters.chakra.timing import micros_as_ns
from hespas.graph import OpGraph
from hespas.graph.columns import FloatArray

__all__ = ["kept_micros", "simulated_ns"]

_ROW_BYTES = 16


def kept_micros(graph: OpGraph) -> tuple[Longs, Words]:
    """Nodes and the microseconds their trace stated; only nodes that still have the duration read there."""
    table = graph.extra
    rows = np.flatnonzero((table.tag == Tag.DURATION_MICROS) & (table.node >= 0))
    rows = rows[np.diff(table.offsets)[rows] == _ROW_BYTES]
    if not len(rows):
        return np.empty(0, np.int64), np.empty(0, np.uint64)
    words = Window.holding(np.frombuffer(table.values, np.uint8)).words
    start = table.offsets[rows]
    nodes = table.node[rows].astype(np.int64)
    same = words[start + 8] == np.ascontiguousarray(graph.duration_ns[nodes]).view(np.uint64)
    return nodes[same], words[start][same]


def simulated_ns(graph: OpGraph) -> FloatArray:
    """The durations that readers of ``duration_micros`` take, in ns: those of the graph but where its trace
    stated others.
    """
    nodes, micros = kept_micros(graph)
    duration_ns = graph.duration_ns.copy()
    duration_ns[nodes] = micros_as_ns(micros)
    return duration_ns
