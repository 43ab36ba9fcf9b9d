"""Check of the order in which operations ran against the captured dependencies."""

from __future__ import annotations

import numpy as np

from hespas.graph import OpClass, OpGraph, Profile
from hespas.graph.columns import FloatArray, IntArray
from hespas.validators.accuracy.coverage import RULES, Matching
from hespas.validators.capture.result import OrderCheck, OrderViolation

__all__ = ["check_order"]

_MAX_LISTED = 20
_CLOCK_ERROR_NS = 1_000.0
"""Error of profiler clocks: an event that begins earlier by less may have begun in time."""

_COMPILER_RULES = frozenset({"op-name", "source-line", "structure"})
"""Rules that match instructions to the operations from which a compiler made them."""
_PRESERVED_CLASSES = (
    OpClass.CONTRACTION,
    OpClass.CONVOLUTION,
    OpClass.SORT,
    OpClass.FFT,
    OpClass.LINALG,
    OpClass.COLLECTIVE,
    OpClass.P2P,
    OpClass.CUSTOM,
)
"""Operations that compilers do not merge or rewrite."""

_Spans = dict[int, tuple[FloatArray, FloatArray]]
"""Key of the matching -> starts and ends of its events."""


def check_order(graph: OpGraph, profile: Profile, matching: Matching) -> OrderCheck:
    """Check that the events of each rank and run respect the dependencies of ``graph``.

    All dependencies are checked if instructions have the names of nodes, or if operations are matched one by
    one. Otherwise compilers move, copy, merge and rewrite most operations. Then only dependencies between
    matmuls, convolutions, messages, sorts and library calls are checked. These may be indirect, through other
    operations.

    If several instructions implement an operation, it counts as done when the first instruction that may have
    made the value is done. So a violation is an order that is wrong under every assignment of operations to
    instructions. For operations in loops, the k-th events are compared if both run equally often, else the
    first ones. An operation that encloses another one, such as a loop, is not its predecessor. O(dependencies
    x runs).
    """
    carriers: dict[int, list[int]] = {}
    for number, key in enumerate(matching.keys):
        for node in () if key.inferred else key.nodes:
            carriers.setdefault(node, []).append(number)
    is_compiled = any(RULES[key.rule] in _COMPILER_RULES for key in matching.keys if key.nodes)
    if is_compiled:
        is_preserved = np.isin(graph.op_class, [int(op_class) for op_class in _PRESERVED_CLASSES])
        sources_of: list[tuple[int, ...]] = []
        pairs: list[tuple[int, int]] = []
        for node in range(len(graph)):
            deps: list[int] = graph.data_deps.row(node).tolist()
            origins = tuple(dict.fromkeys(source for dep in deps if dep < node for source in sources_of[dep]))
            if is_preserved[node]:
                pairs += [(source, node) for source in origins]
                origins = (node,)
            sources_of.append(origins)
    else:
        pairs = [
            (before, node)
            for node in range(len(graph))
            for before in (*graph.data_deps.row(node).tolist(), *graph.control_deps.row(node).tolist())
        ]
    pairs = [(before, node) for before, node in pairs if node in carriers]
    known = [(before, node) for before, node in pairs if before in carriers]
    counts = {"checked": 0, "exact": 0, "inside": 0, "unknown": len(pairs) - len(known), "violated": 0}
    violations: list[OrderViolation] = []
    for (rank, run), spans in _spans_by_run(profile, matching.event_key).items():
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
                early_ns = min(_early_ns(source, target) for source in sources for target in targets)
                if early_ns > _CLOCK_ERROR_NS:
                    counts["violated"] += 1
                    names = [graph.node_name(end) or graph.op_name(end) for end in (before, node)]
                    violations.append(
                        OrderViolation(rank=rank, run=run, before=names[0], after=names[1], early_ns=early_ns)
                    )
    violations.sort(key=lambda violation: -violation.early_ns)
    return OrderCheck(**counts, violations=tuple(violations[:_MAX_LISTED]))


def _spans_by_run(profile: Profile, event_key: IntArray) -> dict[tuple[int, int], _Spans]:
    """Return the starts and ends of events by rank and run. ``event_key`` groups events by operation."""
    # An event that is a call of the host ends with that call, which takes longer than the event itself.
    starts = profile.start_ns.copy()
    ends = starts + np.maximum(np.nan_to_num(profile.duration_ns), 0.0)
    linked = np.flatnonzero(profile.host_event >= 0)
    host = profile.host_event[linked]
    calls = linked[profile.host.name_id[host] == profile.op_id[linked]]
    host = profile.host_event[calls]
    ends[calls] = profile.host.start_ns[host] + np.maximum(profile.host.duration_ns[host], 0.0)
    rows = np.flatnonzero(event_key >= 0)
    order = rows[np.lexsort((profile.start_ns[rows], event_key[rows], profile.run[rows], profile.rank[rows]))]
    columns = profile.rank[order], profile.run[order], event_key[order]
    cuts = np.flatnonzero(np.any([np.diff(column) != 0 for column in columns], axis=0)) + 1
    by_run: dict[tuple[int, int], _Spans] = {}
    for part in np.split(order, cuts) if len(order) else []:
        rank_and_run = int(profile.rank[part[0]]), int(profile.run[part[0]])
        by_run.setdefault(rank_and_run, {})[int(event_key[part[0]])] = starts[part], ends[part]
    return by_run


def _early_ns(source: tuple[FloatArray, FloatArray], target: tuple[FloatArray, FloatArray]) -> float:
    """Return the longest time [ns] by which an event of the target begins before the end of the source event;
    0 if none does.

    The k-th event of the target is compared with the k-th event of the source. If their numbers differ, only
    the first ones are compared.
    """
    (begins, ends), (starts, stops) = source, target
    if len(begins) != len(starts):
        begins, ends, starts, stops = begins[:1], ends[:1], starts[:1], stops[:1]
    encloses = ((begins <= starts) & (stops <= ends)) | ((starts <= begins) & (ends <= stops))
    return float(np.where(encloses, 0.0, np.maximum(ends - starts, 0.0)).max())
