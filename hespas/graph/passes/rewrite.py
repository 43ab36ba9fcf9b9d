"""Selection and removal of nodes: building blocks of passes, and the pass that folds zero-cost nodes."""

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
"""Limit of producers times consumers of a dropped node, which is the number of edges that replace it. A
node with more edges is not dropped.
"""


def with_durations(graph: OpGraph, duration_ns: FloatArray) -> OpGraph:
    """Return the graph with other durations, shape ``(nodes,)``."""
    return replace(graph, duration_ns=duration_ns)


def with_default_dtype(graph: OpGraph, code: int) -> tuple[OpGraph, int]:
    """Return the graph in which computations without an element type get the rate type ``code``. Also return
    their number.

    A computation has an element type if ``rate_dtype``, its first operand or its first result has one.
    """
    is_untyped = (graph.kind == NodeKind.COMPUTE) & (graph.rate_dtype == UNKNOWN_DTYPE)
    for lists in (graph.operands, graph.results):
        nodes = np.flatnonzero(lists.lengths)
        first = graph.types.dtype[lists.values[lists.offsets[nodes]]]
        is_untyped[nodes[first != UNKNOWN_DTYPE]] = False
    if not is_untyped.any():
        return graph, 0
    rates = np.where(is_untyped, code, graph.rate_dtype).astype(np.int16)
    return replace(graph, rate_dtype=rates), int(is_untyped.sum())


def take_nodes(graph: OpGraph, rows: IntArray, data_deps: RaggedArray, control_deps: RaggedArray) -> OpGraph:
    """Return a graph whose node ``i`` is old node ``rows[i]``. ``data_deps`` and ``control_deps`` are its
    dependencies, in new numbers.

    A row may occur several times (an unrolled loop). The rows of other tables, such as collectives, follow
    their nodes.
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
    """Return the rows of a table (such as collectives) that belong to new nodes, and the new node of each of
    these rows.

    ``table_nodes`` is the sorted ``node`` column of the table. New node ``i`` is old node ``rows[i]``.
    """
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
    taken_rows = np.concatenate([of_file, old])
    lengths = np.diff(table.offsets)[taken_rows]
    offsets = np.zeros(len(taken_rows) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    # Values of consecutive rows are copied at once.
    first = np.flatnonzero(np.diff(taken_rows, prepend=-2) != 1)
    last = np.append(first, len(taken_rows))[1:] - 1
    starts: list[int] = table.offsets[taken_rows[first]].tolist()
    ends: list[int] = table.offsets[taken_rows[last] + 1].tolist()
    return ExtraTable(
        node=np.concatenate([np.full(len(of_file), -1, np.int32), node]),
        key=table.key[taken_rows],
        tag=table.tag[taken_rows],
        offsets=offsets,
        values=b"".join(table.values[start:end] for start, end in zip(starts, ends, strict=True)),
    )


def _take_carried(table: RegionTable, rows: IntArray, old_nodes: int) -> RegionTable:
    """Return the carried edges between the remaining nodes, with new node numbers.

    If nodes were repeated, an edge goes from the last copy of its producer to every copy of its consumer.
    """
    if not len(table.carried_region):
        return table
    last_copy = np.full(old_nodes, -1, np.int32)
    last_copy[rows] = np.arange(len(rows), dtype=np.int32)
    by_consumer = np.argsort(table.carried_consumer, kind="stable")
    edge, consumer = _matches(table.carried_consumer[by_consumer], rows)
    edge = by_consumer[edge]
    producer = last_copy[table.carried_producer[edge]]
    has_producer = producer >= 0
    return replace(
        table,
        carried_region=table.carried_region[edge][has_producer],
        carried_producer=producer[has_producer],
        carried_consumer=consumer[has_producer],
    )


def _control_deps(
    direct: list[int],
    dropped: list[int],
    waits: list[int],
    drop: list[bool],
    resolved: tuple[list[list[int]], list[list[int]]],
) -> list[int]:
    """Return the control dependencies of one node after nodes are dropped.

    ``waits`` are its old control dependencies. A dropped one is replaced by its own dependencies. ``dropped``
    are its dropped producers, whose control dependencies are added. Nodes in ``direct`` (its data
    dependencies) are left out.
    """
    data, control = resolved
    awaited = dict.fromkeys(source for dep in dropped for source in control[dep])
    for dep in waits:
        awaited.update(dict.fromkeys([*data[dep], *control[dep]]) if drop[dep] else {dep: None})
    producers = set(direct)
    return [dep for dep in awaited if dep not in producers]


def bypass(graph: OpGraph, drop: NDArray[np.bool_]) -> OpGraph:
    """Return the graph without the nodes in the mask ``drop``. Nodes that depend on a removed node depend on
    its dependencies instead.

    The graph must be acyclic. A node is not removed if (number of producers) x (number of consumers) exceeds
    256 edges, or if it passes a carried value of a loop to the next iteration or out of the loop. Other
    carried edges bypass a removed node in the same way.
    """
    return _without(graph, drop, _CarriedValues.of(graph)) if drop.any() else graph


def _without(graph: OpGraph, drop: NDArray[np.bool_], carried: _CarriedValues | None) -> OpGraph:
    """Return the graph without the nodes in the mask ``drop``. If ``carried`` is None, values that these
    nodes carry between iterations are removed too.
    """
    flags: list[bool] = drop.tolist()
    # The dependencies of a dropped node replace it. A dependency of both kinds is a data dependency. A node
    # is not dropped if its bypass would multiply edges or lose an iteration of a carried value.
    fan_out: list[int] = np.bincount(all_deps(graph).values, minlength=len(graph)).tolist()
    data = graph.data_deps.to_lists()
    has_control = bool(len(graph.control_deps.values))
    control: list[list[int]] = graph.control_deps.to_lists() if has_control else [[]] * len(graph)
    order: list[int] = topological_order(graph).tolist()
    for node in order:
        direct, waits = data[node], control[node]
        dropped = [dep for dep in direct if flags[dep]]
        # Dropped control dependencies also pass their values on to dependants of the node.
        all_dropped = [*dropped, *(dep for dep in waits if flags[dep])] if waits else dropped
        if dropped:
            producers_of: dict[int, None] = {}
            for dep in direct:
                producers_of.update(dict.fromkeys(data[dep]) if flags[dep] else {dep: None})
            data[node] = direct = list(producers_of)
        if has_control and (dropped or waits):
            control[node] = waits = _control_deps(direct, dropped, waits, flags, (data, control))
        if not flags[node]:
            continue
        producers = len(direct) + len(waits)
        multiplies = producers > 1 and producers * fan_out[node] > _MAX_BYPASS_EDGES
        hands_on = carried is not None and carried.needs(node, all_dropped, (*direct, *waits))
        flags[node] = not (multiplies or hands_on)
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
    """Return the graph reduced to the nodes that ``roots`` need, directly, through other nodes, or in a later
    iteration of a loop.

    Communication is never removed. O(nodes + edges).
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
    """Return a mask of the carried edges (values that a loop carries) with an end outside of their loop,
    shape ``(carried edges,)``.

    Graphs that passes and simulators accept have no such edge. O(regions + edges).
    """
    table = graph.regions
    parents: list[int] = table.parent.tolist()
    size = [1] * len(parents)
    for row in reversed(range(len(parents))):  # children follow their parents
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
        position = first[graph.region[end]]
        outside |= (position < low) | (position >= high)
    return outside


class _CarriedValues:
    """Values that the loops of a graph carry between iterations, for a pass that drops nodes.

    A carried edge spans exactly one iteration. If a zero-cost node receives a carried value and passes it to
    the next iteration or out of the loop, the value after the node is one iteration older than the value
    before it. Therefore the node must not be dropped (:meth:`needs`). Each method visits a node once, in
    topological order, and costs O(its edges).
    """

    def __init__(self, graph: OpGraph, consumers: RaggedArray) -> None:
        """Store ``consumers``, the nodes that depend on each node (one row per node)."""
        table = graph.regions
        self._consumers = consumers
        self._region: list[int] = graph.region.tolist()
        self._parent: list[int] = table.parent.tolist()
        self._runs: list[bool] = (graph.executions != 0).tolist()
        self._takes = _regions_of(table.carried_consumer, table.carried_region)
        self._gives = _regions_of(table.carried_producer, table.carried_region)
        self._holds: dict[int, set[int]] = {}
        self._is_within: dict[tuple[int, int], bool] = {}

    @classmethod
    def of(cls, graph: OpGraph) -> _CarriedValues | None:
        """Return the carried values of a graph; None if no loop carries a value."""
        if not len(graph.regions.carried_region):
            return None
        return cls(graph, all_deps(graph).transpose(len(graph)))

    def needs(self, node: int, dropped: Iterable[int], producers: Iterable[int]) -> bool:
        """Return True if a node passes a carried value on, so that it must not be dropped.

        ``dropped`` are the dropped nodes among its direct dependencies, ``producers`` the nodes on which it
        depends after the bypass. Nodes that never run pass no value on.
        """
        if not self._runs[node]:
            return False
        given = self._gives.get(node, ())
        # Carried into the loop from outside: present in the second iteration, but not in the first.
        if given and any(not self.within(producer, row) for producer in producers for row in given):
            return True
        held = set(self._takes.get(node, ()))
        for dep in dropped:
            held.update(self._holds.get(dep, ()))
        held = {row for row in held if self.within(node, row)}
        if not held:
            return False
        readers: list[int] = self._consumers.row(node).tolist()
        leaves = (self._runs[reader] and not self.within(reader, row) for reader in readers for row in held)
        if given or any(leaves):
            return True
        self._holds[node] = held
        return False

    def within(self, node: int, row: int) -> bool:
        """Return True if a node is in a region or in one nested in it. O(depth) once per pair of regions."""
        key = (self._region[node], row)
        is_within = self._is_within.get(key)
        if is_within is None:
            region = key[0]
            while region > row:  # parents precede their children
                region = self._parent[region]
            is_within = self._is_within[key] = region == row
        return is_within

    def bypass(
        self, table: RegionTable, drop: list[bool], data: list[list[int]], control: list[list[int]]
    ) -> RegionTable:
        """Return the regions with carried edges that bypass dropped nodes.

        A dropped producer of a carried edge is replaced by its dependencies. A dropped consumer is replaced
        by the nodes in the same loop that depend on it.
        """
        edges: dict[tuple[int, int, int], None] = {}
        regions: list[int] = table.carried_region.tolist()
        producers: list[int] = table.carried_producer.tolist()
        consumers: list[int] = table.carried_consumer.tolist()
        for row, producer, consumer in zip(regions, producers, consumers, strict=True):
            sources = [*data[producer], *control[producer]] if drop[producer] else [producer]
            targets = self._live_consumers(consumer, row, drop)
            inside = [source for source in sources if self.within(source, row)]
            edges.update(dict.fromkeys((row, source, target) for source in inside for target in targets))
        flat = np.array(list(edges), np.int32).reshape(-1, 3)
        return replace(
            table, carried_region=flat[:, 0], carried_producer=flat[:, 1], carried_consumer=flat[:, 2]
        )

    def _live_consumers(self, node: int, row: int, drop: list[bool]) -> list[int]:
        """Return the nearest nodes downstream of ``node`` in a loop that are not dropped, or the node
        itself if it is not dropped.
        """
        live: dict[int, None] = {}
        seen = {node}
        stack = [node]
        while stack:
            current = stack.pop()
            if not drop[current]:
                live[current] = None
                continue
            after: list[int] = self._consumers.row(current).tolist()
            fresh = [user for user in after if user not in seen and self.within(user, row)]
            seen.update(fresh)
            stack.extend(fresh)
        return list(live)


def _regions_of(nodes: SmallIntArray, rows: SmallIntArray) -> dict[int, set[int]]:
    """Return for each node the loops that carry a value to it or from it."""
    regions: dict[int, set[int]] = {}
    for node, row in zip(nodes.tolist(), rows.tolist(), strict=True):
        regions.setdefault(node, set()).add(row)
    return regions


def is_free(graph: OpGraph) -> BoolArray:
    """Return a mask of the nodes that take no time by construction: no arithmetic, traffic, communication or
    duration.
    """
    unused = (graph.flops == 0) & (graph.transcendentals == 0) & (graph.bytes_moved == 0)
    compute = graph.kind == int(NodeKind.COMPUTE)
    timed = graph.duration_ns > 0
    free: BoolArray = compute & ~timed & ((graph.op_class == int(OpClass.FREE)) | unused)
    return free


def is_delay(graph: OpGraph) -> BoolArray:
    """Return a mask of recorded waits that occupy no thread and no queue, so that they overlap with any other
    work.
    """
    delays: BoolArray = is_recorded_wait(graph) & (graph.stream < 0)
    return delays


_RUNTIME_COPY = re.compile(
    r"[mM]em(?:cpy|set)(?:[ _\dDHPA(].*|$)|MEMORY_COPY_.*|Copy(?:Device|Host)To(?:Device|Host).*", re.DOTALL
)


def is_runtime_copy(name: str) -> bool:
    """Return True if a profiler gives this name to a copy or fill by the runtime, which computes nothing."""
    return _RUNTIME_COPY.fullmatch(name[:200]) is not None


def runtime_copies(graph: OpGraph) -> BoolArray:
    """Return a mask of recorded copies and fills by the runtime."""
    strings = graph.strings
    return mapped(graph.name_id, lambda row: is_runtime_copy(strings[row]), np.bool_)


def without_waits(graph: OpGraph) -> OpGraph:
    """Return the graph without recorded waits and dependencies on them; other nodes keep their order."""
    is_work = ~is_recorded_wait(graph)
    if is_work.all():
        return graph
    rows, number = np.flatnonzero(is_work), np.cumsum(is_work) - 1

    def between_work(deps: RaggedArray) -> RaggedArray:
        inside = is_work[deps.row_ids] & is_work[deps.values]
        return RaggedArray.from_pairs(number[deps.row_ids[inside]], number[deps.values[inside]], len(rows))

    return take_nodes(graph, rows, between_work(graph.data_deps), between_work(graph.control_deps))


@dataclass(frozen=True, slots=True)
class FoldFree:
    """Pass that folds views, constants and tuples into their consumers, and drops branches that are not
    taken.

    FLOPs, bytes and communication are conserved. O(nodes + edges).
    """

    def __call__(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """Return the graph without zero-cost nodes and nodes that never run."""
        free = is_free(graph)
        untaken = graph.executions == 0
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
