"""Whether the order in which operations ran is one that the captured dependencies allow."""

from __future__ import annotations

import numpy as np

from hespas.graph import OpClass, OpGraph, Profile
from hespas.graph.columns import FloatArray, IntArray
from hespas.validators.accuracy.coverage import RULES, Matching
from hespas.validators.capture.result import OrderCheck, OrderViolation

__all__ = ["check_order"]

_LISTED = 20
_CLOCK_NS = 1_000.0
"""Clocks of profilers: what begins so little early may have begun in time."""

_BY_COMPILER = frozenset({"op-name", "source-line", "structure"})
_KEPT = (
    OpClass.CONTRACTION,
    OpClass.CONVOLUTION,
    OpClass.SORT,
    OpClass.FFT,
    OpClass.LINALG,
    OpClass.COLLECTIVE,
    OpClass.P2P,
    OpClass.CUSTOM,
)

_Spans = dict[int, tuple[FloatArray, FloatArray]]


def check_order(graph: OpGraph, profile: Profile, matching: Matching) -> OrderCheck:
    """Hold every dependency of ``graph`` against the events of each rank and run.

    Where instructions bear the names of nodes, and where operations are matched one by one, these are all
    dependencies. Compilers move, copy, merge and rewrite the rest: elsewhere they are those between products,
    convolutions, messages, sorts and library calls, through whatever stands between.

    An operation that several instructions carry out is done when the first of them is that may have made what
    is needed: only what is out of order in every reading is a violation. Of operations that run several times
    (loops), the k-th times are compared where both run equally often, else the first of the one that is
    needed. An operation that encloses another is no predecessor of it. O(dependencies x runs).
    """
    carriers: dict[int, list[int]] = {}
    for number, key in enumerate(matching.keys):
        for node in () if key.inferred else key.nodes:
            carriers.setdefault(node, []).append(number)
    compiled = any(RULES[key.rule] in _BY_COMPILER for key in matching.keys if key.nodes)
    pairs = _between_kept(graph) if compiled else _stated(graph)
    pairs = [(before, node) for before, node in pairs if node in carriers]
    known = [(before, node) for before, node in pairs if before in carriers]
    counts = {"checked": 0, "exact": 0, "inside": 0, "unknown": len(pairs) - len(known), "violated": 0}
    found: list[OrderViolation] = []
    for rank, run, spans in _by_run(profile, matching.event_key):
        for before, node in known:
            sources = [spans[key] for key in carriers[before] if key in spans]
            targets = [spans[key] for key in carriers[node] if key in spans]
            if set(carriers[before]) & set(carriers[node]):
                counts["inside"] += 1
            elif not sources or not targets:
                counts["unknown"] += 1
            else:
                counts["checked"] += 1
                counts["exact"] += len(carriers[before]) == len(carriers[node]) == 1
                early = min(_early_ns(source, target) for source in sources for target in targets)
                if early > _CLOCK_NS:
                    counts["violated"] += 1
                    one, two = (_name(graph, each) for each in (before, node))
                    found.append(OrderViolation(rank=rank, run=run, before=one, after=two, early_ns=early))
    found.sort(key=lambda each: -each.early_ns)
    return OrderCheck(**counts, violations=tuple(found[:_LISTED]))


def _stated(graph: OpGraph) -> list[tuple[int, int]]:
    return [
        (before, node)
        for node in range(len(graph))
        for before in (*graph.data_deps.row(node).tolist(), *graph.control_deps.row(node).tolist())
    ]


def _between_kept(graph: OpGraph) -> list[tuple[int, int]]:
    """Dependencies between the nodes that compilers keep, with what stands between left out."""
    kept = np.isin(graph.op_class, [int(each) for each in _KEPT])
    past: list[tuple[int, ...]] = []
    found: list[tuple[int, int]] = []
    for node in range(len(graph)):
        deps: list[int] = graph.data_deps.row(node).tolist()
        before = tuple(dict.fromkeys(each for dep in deps if dep < node for each in past[dep]))
        if kept[node]:
            found += [(each, node) for each in before]
            before = (node,)
        past.append(before)
    return found


def _early_ns(source: tuple[FloatArray, FloatArray], target: tuple[FloatArray, FloatArray]) -> float:
    """How much too early a target began, 0 where in time: its k-th time against the source's, or its first
    where they run another number of times.
    """
    (begins, ends), (starts, stops) = source, target
    if len(begins) != len(starts):
        begins, ends, starts, stops = begins[:1], ends[:1], starts[:1], stops[:1]
    encloses = ((begins <= starts) & (stops <= ends)) | ((starts <= begins) & (ends <= stops))
    return float(np.where(encloses, 0.0, np.maximum(ends - starts, 0.0)).max())


def _by_run(profile: Profile, event_key: IntArray) -> list[tuple[int, int, _Spans]]:
    """Starts and ends of each key's events, by rank and run."""
    rows = np.flatnonzero(event_key >= 0)
    order = rows[np.lexsort((profile.start_ns[rows], event_key[rows], profile.run[rows], profile.rank[rows]))]
    found: dict[tuple[int, int], _Spans] = {}
    starts, ends = _spans(profile)
    columns = profile.rank[order], profile.run[order], event_key[order]
    cuts = np.flatnonzero(np.any([np.diff(column) != 0 for column in columns], axis=0)) + 1
    for part in np.split(order, cuts) if len(order) else []:
        spans = starts[part], ends[part]
        place = int(profile.rank[part[0]]), int(profile.run[part[0]])
        found.setdefault(place, {})[int(event_key[part[0]])] = spans
    return [(rank, run, spans) for (rank, run), spans in found.items()]


def _spans(profile: Profile) -> tuple[FloatArray, FloatArray]:
    """When each event began and ended. One that is the host's own call ends when the call does, which takes
    more time than the call by itself.
    """
    start = profile.start_ns.copy()
    end = start + np.maximum(np.nan_to_num(profile.duration_ns), 0.0)
    called = np.flatnonzero(profile.host_event >= 0)
    host = profile.host_event[called]
    own = called[profile.host.name_row[host] == profile.op_row[called]]
    host = profile.host_event[own]
    end[own] = profile.host.start_ns[host] + np.maximum(profile.host.duration_ns[host], 0.0)
    return start, end


def _name(graph: OpGraph, node: int) -> str:
    return graph.node_name(node) or graph.strings[int(graph.op_row[node])]
