"""When nodes run: in the order of their program, or as a schedule says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import numpy as np

from hespas.graph import OpGraph
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray
from hespas.graph.passes import topological_order

__all__ = ["Moments", "in_order", "in_time"]


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """The starts and ends of nodes as places in one order of all of them; columns of shape ``(nodes,)``.

    ``start`` and ``end`` are of a node's first execution, ``last`` is the end of its last one. ``time_ns`` is
    the time of each place (empty: nobody knows).
    """

    start: IntArray
    end: IntArray
    last: IntArray
    time_ns: FloatArray


def in_order(graph: OpGraph) -> Moments:
    """One node after the other, in the order of the program: that of a compiler's schedule. O(nodes +
    edges).
    """
    place = _places(topological_order(graph))
    return Moments(2 * place, 2 * place + 1, 2 * place + 1, np.empty(0))


def in_time(
    graph: OpGraph, node: SmallIntArray, start_ns: FloatArray, end_ns: FloatArray, blocks: Mapping[int, float]
) -> Moments:
    """As the spans of one rank say: ``node`` of each (-1: none), its start and end [ns]. ``blocks`` are the
    ends [ns] of loops whose later trips have no spans of their own. A node without a span takes no time, and
    runs when all it waits for has ended. O((nodes + spans) log spans).
    """
    count = len(graph)
    first_ns, until_ns, last_ns = np.full(count, inf), np.full(count, inf), np.full(count, -inf)
    own = np.flatnonzero(node >= 0)
    latest_first = own[np.argsort(start_ns[own], kind="stable")][::-1]  # so that the first one stays
    first_ns[node[latest_first]], until_ns[node[latest_first]] = start_ns[latest_first], end_ns[latest_first]
    np.maximum.at(last_ns, node[own], end_ns[own])
    order = topological_order(graph)
    _fill_ready(graph, order, first_ns, until_ns)
    last_ns = np.maximum(last_ns, until_ns)
    for region, block_ns in blocks.items():
        inside = graph.region == region
        last_ns[inside] = np.maximum(last_ns[inside], block_ns)
    return _ranked(_places(order), first_ns, until_ns, last_ns)


def _places(order: IntArray) -> IntArray:
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return place


def _fill_ready(graph: OpGraph, order: IntArray, first_ns: FloatArray, until_ns: FloatArray) -> None:
    """Times of nodes without a span, in place."""
    ends: list[float] = until_ns.tolist()
    data, control = graph.data_deps.to_lists(), graph.control_deps.to_lists()
    listed: list[int] = order.tolist()
    for node in listed:
        if ends[node] == inf:
            deps = data[node] + control[node]
            ends[node] = max([ends[dep] for dep in deps], default=0.0)
    until_ns[:] = ends
    silent = first_ns == inf
    first_ns[silent] = until_ns[silent]


def _ranked(place: IntArray, first_ns: FloatArray, until_ns: FloatArray, last_ns: FloatArray) -> Moments:
    """At one moment, what took time ends first; then nodes start, and end if they take none, in program
    order.
    """
    count = len(place)
    ends = np.where(until_ns > first_ns, 0, 1)
    time_ns = np.concatenate([first_ns, until_ns, last_ns])
    phase = np.concatenate([np.ones(count, np.int64), ends, ends])
    within = np.concatenate([2 * place, 2 * place + 1, 2 * place + 1])
    key = np.lexsort((within, phase, time_ns))
    rank = np.empty(3 * count, np.int64)
    rank[key] = np.arange(3 * count)
    return Moments(rank[:count], rank[count : 2 * count], rank[2 * count :], time_ns[key])
