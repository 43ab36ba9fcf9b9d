"""What all passes are made of: topological order, rows dropped with a bypass, repeated or reordered."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import (
    UNKNOWN_DTYPE,
    BoolArray,
    FloatArray,
    IntArray,
    RaggedArray,
    SmallIntArray,
    mapped,
    taken,
)
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.opgraph import (
    NODE_COLUMNS,
    ExtraTable,
    NodeKind,
    OpClass,
    OpGraph,
    RegionTable,
    is_recorded_wait,
)
from hespas.graph.passes.order import all_deps, topological_order

__all__ = [
    "FoldFree",
    "bypass",
    "dead_code",
    "is_delay",
    "is_free",
    "is_runtime_copy",
    "leaves_loop",
    "runtime_copies",
    "take_nodes",
    "with_default_dtype",
    "with_durations",
    "without_waits",
]


_MAX_BYPASS_EDGES = 256
"""A dropped join of many producers and many consumers would square its edges; past this it stays."""


def with_durations(graph: OpGraph, duration_ns: FloatArray) -> OpGraph:
    """The same graph with other durations, shape ``(nodes,)``."""
    return replace(graph, duration_ns=duration_ns)


def with_default_dtype(graph: OpGraph, code: int) -> tuple[OpGraph, int]:
    """The graph whose computations that state no element type compute in that of ``code``, and how many those
    are. One states its type, or its first operand or result does.
    """
    silent = (graph.kind == NodeKind.COMPUTE) & (graph.rate_dtype == UNKNOWN_DTYPE)
    for lists in (graph.operands, graph.results):
        there = np.flatnonzero(lists.lengths)
        first = graph.types.dtype[lists.values[lists.offsets[there]]]
        silent[there[first != UNKNOWN_DTYPE]] = False
    if not silent.any():
        return graph, 0
    rates = np.where(silent, code, graph.rate_dtype).astype(np.int16)
    return replace(graph, rate_dtype=rates), int(silent.sum())


def take_nodes(graph: OpGraph, rows: IntArray, data_deps: RaggedArray, control_deps: RaggedArray) -> OpGraph:
    """A graph whose node ``i`` is old node ``rows[i]``; ``data_deps`` and ``control_deps`` have new numbers.

    A row may come several times (a loop unrolled). Side tables follow their nodes, in new node order.
    """
    columns: dict[str, Any] = {name: taken(getattr(graph, name), rows) for name in NODE_COLUMNS}
    return replace(
        graph,
        **columns,
        data_deps=data_deps,
        control_deps=control_deps,
        operands=graph.operands.take(rows) if len(graph.operands.values) else RaggedArray.empty(len(rows)),
        results=graph.results.take(rows) if len(graph.results.values) else RaggedArray.empty(len(rows)),
        collectives=graph.collectives.take(*_matches(graph.collectives.node, rows)),
        p2p=graph.p2p.take(*_matches(graph.p2p.node, rows)),
        contractions=graph.contractions.take(*_matches(graph.contractions.node, rows)),
        extra=_take_extra(graph.extra, rows),
        regions=_take_carried(graph.regions, rows, len(graph)),
    )


def _matches(table_nodes: SmallIntArray, rows: IntArray) -> tuple[IntArray, SmallIntArray]:
    """For a sorted ``node`` column: which table rows the new nodes take along, and for which new node."""
    starts = np.searchsorted(table_nodes, rows, side="left")
    lengths = np.searchsorted(table_nodes, rows, side="right") - starts
    new_nodes = np.repeat(np.arange(len(rows), dtype=np.int32), lengths)
    firsts = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return firsts + np.arange(len(new_nodes), dtype=np.int64), new_nodes


def _take_extra(table: ExtraTable, rows: IntArray) -> ExtraTable:
    if not len(table):
        return table
    of_file = np.flatnonzero(table.node == -1)
    old, node = _matches(table.node, rows)
    kept = np.concatenate([of_file, old])
    lengths = np.diff(table.offsets)[kept]
    offsets = np.zeros(len(kept) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return ExtraTable(
        node=np.concatenate([np.full(len(of_file), -1, np.int32), node]),
        key=table.key[kept],
        tag=table.tag[kept],
        offsets=offsets,
        values=b"".join(table.value(row) for row in kept.tolist()),
    )


def _take_carried(table: RegionTable, rows: IntArray, old_nodes: int) -> RegionTable:
    """Carried edges between kept nodes in new numbers: from the last copy of a repeated producer to every
    copy of its consumer.
    """
    if not len(table.carried_region):
        return table
    last_copy = np.full(old_nodes, -1, np.int32)
    last_copy[rows] = np.arange(len(rows), dtype=np.int32)
    by_consumer = np.argsort(table.carried_consumer, kind="stable")
    edge, consumer = _matches(table.carried_consumer[by_consumer], rows)
    edge = by_consumer[edge]
    producer = last_copy[table.carried_producer[edge]]
    kept = producer >= 0
    return replace(
        table,
        carried_region=table.carried_region[edge][kept],
        carried_producer=producer[kept],
        carried_consumer=consumer[kept],
    )


def _resolve(
    graph: OpGraph, drop: list[bool], carried: _CarriedValues | None
) -> tuple[list[list[int]], list[list[int]]]:
    """Data and control dependencies of each node with dropped nodes replaced by what they wait for.

    What reaches a node both ways is a data dependency. ``drop`` is corrected in place where a bypass would
    multiply edges or lose a trip of a carried value.
    """
    fan_out: list[int] = np.bincount(all_deps(graph).values, minlength=len(graph)).tolist()
    data = graph.data_deps.to_lists()
    has_control = bool(len(graph.control_deps.values))
    control: list[list[int]] = graph.control_deps.to_lists() if has_control else [[]] * len(graph)
    order: list[int] = topological_order(graph).tolist()
    for node in order:
        direct, waits = data[node], control[node]
        dropped = [dep for dep in direct if drop[dep]]
        # Those it waits for by control hand their values on to what waits for it, too.
        gone = [*dropped, *(dep for dep in waits if drop[dep])] if waits else dropped
        if dropped:
            data[node] = direct = _led_around(direct, drop, data)
        if has_control and (dropped or waits):
            control[node] = waits = _waits(direct, dropped, waits, drop, (data, control))
        if not drop[node]:
            continue
        producers = len(direct) + len(waits)
        multiplies = producers > 1 and producers * fan_out[node] > _MAX_BYPASS_EDGES
        hands_on = carried is not None and carried.needs(node, gone, (*direct, *waits))
        drop[node] = not (multiplies or hands_on)
    return data, control


def _led_around(deps: list[int], drop: list[bool], resolved: list[list[int]]) -> list[int]:
    found: dict[int, None] = {}
    for dep in deps:
        found.update(dict.fromkeys(resolved[dep]) if drop[dep] else {dep: None})
    return list(found)


def _waits(
    direct: list[int],
    dropped: list[int],
    waits: list[int],
    drop: list[bool],
    resolved: tuple[list[list[int]], list[list[int]]],
) -> list[int]:
    """Control dependencies of one node: its own, and those of the dropped nodes among its producers."""
    data, control = resolved
    found = dict.fromkeys(each for dep in dropped for each in control[dep])
    for dep in waits:
        found.update(dict.fromkeys([*data[dep], *control[dep]]) if drop[dep] else {dep: None})
    known = set(direct)
    return [dep for dep in found if dep not in known]


def bypass(graph: OpGraph, drop: NDArray[np.bool_]) -> OpGraph:
    """Remove nodes; whoever waited for one waits for what it waited for. The graph must be acyclic.

    A join with so many producers and consumers that their product passes 256 edges stays. Carried edges of
    loops through a dropped node are led around it in the same way; a node that hands a carried value on, to
    the next trip or out of the loop, stays.
    """
    return _without(graph, drop, _CarriedValues.of(graph)) if drop.any() else graph


def _without(graph: OpGraph, drop: NDArray[np.bool_], carried: _CarriedValues | None) -> OpGraph:
    """Remove nodes with a bypass; without ``carried``, carried edges of what is removed go with it."""
    flags: list[bool] = drop.tolist()
    data, control = _resolve(graph, flags, carried)
    has_control = bool(len(graph.control_deps.values))
    rows = np.flatnonzero(~np.array(flags, np.bool_))
    number = np.cumsum(~np.array(flags, np.bool_)) - 1
    if carried is not None:
        graph = replace(graph, regions=carried.bypass(graph.regions, flags, data, control))
    return take_nodes(
        graph,
        rows,
        _renumber([data[row] for row in rows.tolist()], number),
        _renumber([control[row] for row in rows.tolist()], number)
        if has_control
        else RaggedArray.empty(len(rows)),
    )


def _renumber(rows: list[list[int]], number: IntArray) -> RaggedArray:
    deps = RaggedArray.from_lists(rows)
    return RaggedArray(deps.offsets, number[deps.values].astype(np.int32))


def dead_code(graph: OpGraph, roots: IntArray) -> OpGraph:
    """Only what ``roots`` need, directly, not directly or a trip later; communication is always needed.
    O(nodes + edges).
    """
    live = np.zeros(len(graph), np.bool_)
    live[roots] = True
    live[graph.collectives.node] = True
    live[graph.p2p.node] = True
    flags: list[bool] = live.tolist()
    stack = np.flatnonzero(live).tolist()
    carried = RaggedArray.from_pairs(
        graph.regions.carried_consumer, graph.regions.carried_producer, len(graph)
    )
    needed = (graph.data_deps, graph.control_deps, carried)
    tables = [(deps.offsets.tolist(), deps.values.tolist()) for deps in needed]
    while stack:
        node = stack.pop()
        for bounds, values in tables:
            for dep in values[bounds[node] : bounds[node + 1]]:
                if not flags[dep]:
                    flags[dep] = True
                    stack.append(dep)
    dead = ~np.array(flags, np.bool_)
    return _without(graph, dead, None) if dead.any() else graph


def leaves_loop(graph: OpGraph) -> BoolArray:
    """Which carried edges have an end outside of their loop, shape ``(carried edges,)``. A graph that a pass
    or a simulator is given has none. O(regions + edges).
    """
    table = graph.regions
    parents: list[int] = table.parent.tolist()
    size = [1] * len(parents)
    for row in reversed(range(len(parents))):  # children stand behind their parents
        if parents[row] >= 0:
            size[parents[row]] += size[row]
    # Number the regions so that those nested in one follow it.
    start, free = [0] * len(parents), [0] * (len(parents) + 1)
    for row, parent in enumerate(parents):
        start[row] = free[parent]
        free[parent] += size[row]
        free[row] = start[row] + 1
    first = np.array([*start, -1], np.int64)
    low = first[table.carried_region]
    high = low + np.array(size, np.int64)[table.carried_region]
    outside = np.zeros(len(low), np.bool_)
    for end in (table.carried_producer, table.carried_consumer):
        place = first[graph.region[end]]
        outside |= (place < low) | (place >= high)
    return outside


class _CarriedValues:
    """The values that the loops of a graph carry, seen by a pass that drops nodes.

    An edge spans exactly one trip. Where a free node takes a value carried to it and hands it on, into the
    next trip or out of the loop, the value behind it is one trip older than what stands before it: without
    that node the trip would be lost. So such a node stays (:meth:`needs`). Each method visits a node once,
    in topological order, and costs O(its edges).
    """

    def __init__(self, graph: OpGraph, consumers: RaggedArray) -> None:
        """``consumers`` lists, for each node, those that depend on it (one row a node)."""
        table = graph.regions
        self._consumers = consumers
        self._region: list[int] = graph.region.tolist()
        self._parent: list[int] = table.parent.tolist()
        self._runs: list[bool] = (graph.multiplicity != 0).tolist()
        self._takes = _regions_of(table.carried_consumer, table.carried_region)
        self._gives = _regions_of(table.carried_producer, table.carried_region)
        self._holds: dict[int, set[int]] = {}
        self._is_within: dict[tuple[int, int], bool] = {}

    @classmethod
    def of(cls, graph: OpGraph) -> _CarriedValues | None:
        """Those of a graph; None where no loop carries anything."""
        if not len(graph.regions.carried_region):
            return None
        return cls(graph, all_deps(graph).transpose(len(graph)))

    def needs(self, node: int, dropped: Iterable[int], producers: Iterable[int]) -> bool:
        """Whether a node about to be dropped hands a carried value on, and has to stay.

        ``dropped`` are the dropped nodes it directly depends on, ``producers`` the kept nodes it waits for
        once those are led around. Nodes that never run hand nothing on.
        """
        if not self._runs[node]:
            return False
        given = self._gives.get(node, ())
        # Carried into the loop from outside: there in the second trip, but not in the first.
        if given and any(not self.within(each, row) for each in producers for row in given):
            return True
        held = set(self._takes.get(node, ()))
        for dep in dropped:
            held.update(self._holds.get(dep, ()))
        held = {row for row in held if self.within(node, row)}
        if not held:
            return False
        if given or self._is_read_outside(node, held):
            return True
        self._holds[node] = held
        return False

    def _is_read_outside(self, node: int, rows: set[int]) -> bool:
        readers: list[int] = self._consumers.row(node).tolist()
        return any(self._runs[each] and not self.within(each, row) for each in readers for row in rows)

    def within(self, node: int, row: int) -> bool:
        """Whether a node stands in a region or in one nested in it. O(depth) once per pair of regions."""
        key = (self._region[node], row)
        known = self._is_within.get(key)
        if known is None:
            here = key[0]
            while here > row:  # parents stand before their children
                here = self._parent[here]
            known = self._is_within[key] = here == row
        return known

    def bypass(
        self, table: RegionTable, drop: list[bool], data: list[list[int]], control: list[list[int]]
    ) -> RegionTable:
        """Carried edges with dropped producers replaced by what they waited for, dropped consumers by whoever
        waits for them in the same loop.
        """
        edges: dict[tuple[int, int, int], None] = {}
        regions: list[int] = table.carried_region.tolist()
        producers: list[int] = table.carried_producer.tolist()
        consumers: list[int] = table.carried_consumer.tolist()
        for row, producer, consumer in zip(regions, producers, consumers, strict=True):
            sources = [*data[producer], *control[producer]] if drop[producer] else [producer]
            targets = self._live_consumers(consumer, row, drop)
            inside = [each for each in sources if self.within(each, row)]
            edges.update(dict.fromkeys((row, source, target) for source in inside for target in targets))
        flat = np.array(list(edges), np.int32).reshape(-1, 3)
        return replace(
            table, carried_region=flat[:, 0], carried_producer=flat[:, 1], carried_consumer=flat[:, 2]
        )

    def _live_consumers(self, node: int, row: int, drop: list[bool]) -> list[int]:
        """The nearest kept nodes downstream of a node in a loop, the node itself if kept."""
        found: dict[int, None] = {}
        seen = {node}
        stack = [node]
        while stack:
            current = stack.pop()
            if not drop[current]:
                found[current] = None
                continue
            after: list[int] = self._consumers.row(current).tolist()
            fresh = [each for each in after if each not in seen and self.within(each, row)]
            seen.update(fresh)
            stack.extend(fresh)
        return list(found)


def _regions_of(nodes: SmallIntArray, rows: SmallIntArray) -> dict[int, set[int]]:
    """The loops that carry something to or from each node."""
    found: dict[int, set[int]] = {}
    for node, row in zip(nodes.tolist(), rows.tolist(), strict=True):
        found.setdefault(node, set()).add(row)
    return found


def is_free(graph: OpGraph) -> BoolArray:
    """Which nodes take no time by construction: no arithmetic, traffic, communication, or stated time."""
    unused = (graph.flops == 0) & (graph.transcendentals == 0) & (graph.bytes_moved == 0)
    compute = graph.kind == int(NodeKind.COMPUTE)
    timed = graph.duration_ns > 0
    free: BoolArray = compute & ~timed & ((graph.op_class == int(OpClass.FREE)) | unused)
    return free


def is_delay(graph: OpGraph) -> BoolArray:
    """Recorded waits that no thread and no queue is busy with: they pass beside whatever else runs."""
    delays: BoolArray = is_recorded_wait(graph) & (graph.stream < 0)
    return delays


_RUNTIME_COPY = re.compile(
    r"[mM]em(?:cpy|set)(?:[ _\dDHPA(].*|$)|MEMORY_COPY_.*|Copy(?:Device|Host)To(?:Device|Host).*", re.DOTALL
)


def is_runtime_copy(name: str) -> bool:
    """Return True for what profilers call a copy or a fill by the runtime, which computes nothing."""
    return _RUNTIME_COPY.fullmatch(name[:200]) is not None


def runtime_copies(graph: OpGraph) -> BoolArray:
    """Mark recorded copies and fills by the runtime."""
    strings = graph.strings
    return mapped(graph.name_row, lambda row: is_runtime_copy(strings[row]), np.bool_)


def without_waits(graph: OpGraph) -> OpGraph:
    """The work alone, without recorded waits and what depends on them; the order of the work stays."""
    kept = ~is_recorded_wait(graph)
    if kept.all():
        return graph
    rows, number = np.flatnonzero(kept), np.cumsum(kept) - 1

    def between_work(deps: RaggedArray) -> RaggedArray:
        inside = kept[deps.row_ids] & kept[deps.values]
        return RaggedArray.from_pairs(number[deps.row_ids[inside]], number[deps.values[inside]], len(rows))

    return take_nodes(graph, rows, between_work(graph.data_deps), between_work(graph.control_deps))


@dataclass(frozen=True, slots=True)
class FoldFree:
    """Fold views, constants and tuples into their consumers, and drop branches that are not taken.

    FLOPs, bytes and communication are conserved: only zeros go. O(nodes + edges).
    """

    def __call__(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """The graph without free and never executed nodes."""
        free = is_free(graph)
        untaken = graph.multiplicity == 0
        folded = bypass(graph, free | untaken)
        removed = len(graph) - len(folded)
        diagnostics.info(
            "pass.untaken-branch",
            graph.name,
            "operations of branches not taken left out",
            count=int(untaken.sum()),
        )
        diagnostics.info(
            "pass.folded-free",
            graph.name,
            "operations that cost nothing (views, constants, tuples) folded into their consumers",
            count=removed - int(untaken.sum()),
        )
        return folded
