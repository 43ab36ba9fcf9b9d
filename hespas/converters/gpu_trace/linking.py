"""Which range on the host caused a piece of device work.

In this order: the graph node replayed was made inside a range (the capture is in the recording); the call
that launches is a range, or stands inside ranges of its own thread, of which the innermost is the cause.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.converters.gpu_trace.nesting import Nesting, match_pairs
from hespas.converters.gpu_trace.trace import DeviceWork, GpuTrace, GraphNodes, Launches
from hespas.graph.columns import BoolArray, IntArray

__all__ = ["Links", "link", "up_to"]

_MOST_CLONES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """Per piece of device work: its launch, the innermost range around that, and the range that caused it
    (-1: none); whether the cause was found by the graph node, and whether several processes could have
    launched it (it is then not linked).
    """

    launch: IntArray
    launched_in: IntArray
    cause: IntArray
    by_node: BoolArray
    ambiguous: BoolArray


def link(trace: GpuTrace, nesting: Nesting) -> Links:
    """Find the launch and the range of all device work."""
    launch, ambiguous = _launches(trace.launches, trace.work)
    at = np.maximum(launch, 0)
    cause = np.full(len(launch), -1, np.int64)
    if len(trace.launches):
        calls = trace.launches
        inside = nesting.innermost(calls.thread[at], calls.start_ns[at])
        own = calls.range_place[at]
        cause = np.where(launch >= 0, np.where(own >= 0, own, inside), -1)
    made = _made_in(trace.nodes, trace.work, nesting)
    return Links(launch, cause, np.where(made >= 0, made, cause), made >= 0, ambiguous)


def _launches(launches: Launches, work: DeviceWork) -> tuple[IntArray, BoolArray]:
    """The launch of each piece of work, by process and correlation.

    Work that does not tell its process finds a launch where only one process uses the correlation.
    """
    found = match_pairs((launches.process, launches.correlation), (work.process, work.correlation))
    ambiguous = np.zeros(len(work), np.bool_)
    nameless = np.flatnonzero(work.process < 0)
    if not len(nameless) or not len(launches):
        return found, ambiguous
    zeros, asked = np.zeros(len(launches), np.int64), np.zeros(len(nameless), np.int64)
    wanted = (asked, work.correlation[nameless])
    first = match_pairs((zeros, launches.correlation), wanted)
    backwards = match_pairs((zeros, launches.correlation[::-1]), wanted)
    last = np.where(backwards >= 0, len(launches) - 1 - backwards, -1)
    several = (first >= 0) & (launches.process[first] != launches.process[last])
    found[nameless] = np.where(several, -1, first)
    ambiguous[nameless] = several
    return found, ambiguous


def _made_in(nodes: GraphNodes, work: DeviceWork, nesting: Nesting) -> IntArray:
    """The range that each piece of work's graph node, or the one it was cloned from, was made in."""
    if not len(nodes) or not bool((work.node >= 0).any()):
        return np.full(len(work), -1, np.int64)
    clones, node = np.flatnonzero(nodes.original >= 0), work.node
    for _ in range(_MOST_CLONES):
        clone = match_pairs((nodes.process[clones], nodes.node[clones]), (work.process, node))
        if not bool((clone >= 0).any()):
            break
        node = np.where(clone >= 0, nodes.original[clones[np.maximum(clone, 0)]], node)
    at = match_pairs((nodes.process, nodes.node), (work.process, node))
    row = np.maximum(at, 0)
    return np.where(at >= 0, nesting.innermost(nodes.thread[row], nodes.start_ns[row]), -1)


def up_to(wanted: BoolArray, parent: IntArray, start: IntArray) -> IntArray:
    """From each range (-1: none) outwards to the first that is ``wanted``, -1 for none."""
    found = start.copy()
    places = np.flatnonzero(found >= 0)
    while len(places):
        places = places[~wanted[found[places]]]
        found[places] = parent[found[places]]
        places = places[found[places] >= 0]
    return found
