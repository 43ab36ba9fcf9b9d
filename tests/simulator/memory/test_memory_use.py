"""Peaks compared with brute force on small graphs, value by value at each moment."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.graph import DONATED_TO, GraphBuilder, OpClass, OpGraph, RegionKind, find_dtype
from hespas.simulator.memory import MemoryUse, in_time, memory_use
from hespas.simulator.memory.buffers import Lifetimes, in_order
from hespas.simulator.memory.values import values_of


@dataclass(slots=True)
class Draft:
    """A program of vectors of bytes."""

    builder: GraphBuilder = field(default_factory=lambda: GraphBuilder("draft"))

    def add(
        self,
        op: str,
        op_class: OpClass,
        size: int | None,
        *deps: int,
        region: int = -1,
        written: float | None = None,
        results: tuple[int, ...] = (),
    ) -> int:
        b = self.builder
        sizes = results or (() if size is None else (size,))
        rows = [b.types.add(find_dtype("i8"), (each,)) for each in sizes]
        inputs = [row for dep in deps for row in self._rows[dep]]
        made = float(sum(sizes)) if written is None else written
        free = op_class in {OpClass.FREE, OpClass.CONTROL}
        self._rows.append(rows)
        return b.add_node(
            name_id=b.strings.add(f"{op}{len(b)}"),
            op_id=b.strings.add(op),
            op_class=op_class,
            data_deps=deps,
            operands=inputs,
            results=rows,
            flops=0.0,
            transcendentals=0.0,
            bytes_read=0.0,
            bytes_written=0.0 if free else made,
            region=region,
        )

    _rows: list[list[int]] = field(default_factory=list[list[int]])

    def parameter(self, size: int) -> int:
        return self.add("parameter", OpClass.FREE, size)

    def product(self, size: int, *deps: int, region: int = -1) -> int:
        return self.add("dot", OpClass.CONTRACTION, size, *deps, region=region)

    def elementwise(self, size: int, *deps: int, region: int = -1) -> int:
        return self.add("add", OpClass.ELEMENTWISE, size, *deps, region=region)

    def end(self, *deps: int) -> None:
        b = self.builder
        rows = [row for dep in deps for row in self._rows[dep]]
        b.add_node(
            name_id=b.strings.add("return"),
            op_id=b.strings.add("func.return"),
            op_class=OpClass.FREE,
            data_deps=deps,
            operands=rows,
            flops=0.0,
            transcendentals=0.0,
            bytes_read=0.0,
            bytes_written=0.0,
        )

    def use(self) -> MemoryUse:
        found = memory_use(self.builder.build())
        assert found is not None
        assert found.unknown == 0
        parts = found.parameters_bytes, found.constants_bytes, found.outputs_bytes, found.temporaries_bytes
        assert found.peak_bytes == sum(parts)
        return found


@dataclass(frozen=True, slots=True)
class Node:
    elementwise: bool
    size: int
    deps: tuple[int, ...]


@st.composite
def programs(draw: st.DrawFn) -> list[Node]:
    count = draw(st.integers(1, 9))
    sizes = st.sampled_from((16, 32, 48))
    return [
        Node(
            draw(st.booleans()),
            draw(sizes),
            tuple(draw(st.lists(st.integers(0, at - 1), max_size=3, unique=True)) if at else ()),
        )
        for at in range(count)
    ]


def drafted(nodes: list[Node]) -> Draft:
    draft = Draft()
    for node in nodes:
        (draft.elementwise if node.elementwise else draft.product)(node.size, *node.deps)
    return draft


def last_uses(nodes: list[Node]) -> list[int]:
    """The last reader of each value; what nobody reads stays to the end."""
    last = [len(nodes)] * len(nodes)
    for at in range(len(nodes)):
        readers = [reader for reader, node in enumerate(nodes) if at in node.deps]
        if readers:
            last[at] = readers[-1]
    return last


def brute_force(nodes: list[Node]) -> int:
    """The peak: at each node all that was made and is read from it on, and what it makes itself, unless it
    can write that over an operand of the same size that it is the last to read.
    """
    last = last_uses(nodes)
    peak = 0
    for at, node in enumerate(nodes):
        live = sum(nodes[made].size for made in range(at + 1) if last[made] >= at)
        dying = [dep for dep in node.deps if last[dep] == at and nodes[dep].size == node.size]
        peak = max(peak, live - (node.size if node.elementwise and dying else 0))
    return peak


@given(programs())
def test_the_peak_of_a_program_is_what_lives_at_once(nodes: list[Node]) -> None:
    assert drafted(nodes).use().peak_bytes == brute_force(nodes)


@given(programs(), st.data())
def test_a_program_with_results_never_needs_less_than_what_lives_at_once(
    nodes: list[Node], data: st.DataObject
) -> None:
    draft = drafted(nodes)
    sinks = [at for at in range(len(nodes)) if not any(at in node.deps for node in nodes)]
    more = data.draw(st.lists(st.integers(0, len(nodes) - 1), max_size=3, unique=True))
    results = sorted({*sinks, *more})
    draft.end(*results)
    kept = [Node(node.elementwise, node.size, node.deps) for node in nodes]
    kept.append(Node(elementwise=False, size=0, deps=tuple(results)))
    found = draft.use()
    assert found.peak_bytes >= brute_force(kept)
    assert found.peak_bytes >= found.outputs_bytes == sum(nodes[at].size for at in results)


@given(programs(), st.data())
def test_a_schedule_needs_what_lives_at_its_moments(nodes: list[Node], data: st.DataObject) -> None:
    """With starts that wait for dependencies only, as many streams as there are nodes."""
    nodes = [Node(elementwise=False, size=node.size, deps=node.deps) for node in nodes]
    start, end = np.zeros(len(nodes)), np.zeros(len(nodes))
    for at, node in enumerate(nodes):
        start[at] = max((end[dep] for dep in node.deps), default=0.0) + data.draw(st.integers(0, 5))
        end[at] = start[at] + data.draw(st.integers(1, 9))
    graph = drafted(nodes).builder.build()
    numbers = np.arange(len(nodes), dtype=np.int32)
    found = memory_use(graph, in_time(graph, numbers, start, end, {}))
    readers = [[reader for reader, node in enumerate(nodes) if at in node.deps] for at in range(len(nodes))]
    until = [max((end[each] for each in each_of), default=np.inf) for each_of in readers]
    expected = max(
        sum(node.size for at, node in enumerate(nodes) if start[at] <= moment < until[at])
        for moment in start.tolist()
    )
    assert found is not None
    assert found.peak_bytes == expected
    assert found.at_ns == start[found.at_node]


def test_a_parameter_stays_and_a_view_keeps_what_it_shows() -> None:
    draft = Draft()
    given_value = draft.parameter(100)
    made = draft.product(10, given_value)
    view = draft.add("bitcast", OpClass.FREE, 10, made)
    other = draft.product(7, given_value)
    last = draft.product(1, view, other)
    draft.end(last)
    found = draft.use()
    assert found.peak_bytes == 100 + 1 + 10 + 7
    assert (found.parameters_bytes, found.outputs_bytes, found.temporaries_bytes) == (100, 1, 17)
    assert found.largest[0].kind == "parameter"
    assert found.largest[0].size_bytes == 100


def test_a_tuple_keeps_each_element_for_its_own_readers() -> None:
    draft = Draft()
    pair = draft.add("custom-call", OpClass.CUSTOM, None, results=(40, 60))
    first = draft.add("get-tuple-element", OpClass.FREE, 40, pair)
    draft.builder.add_extra(first, "index", 0, b"0")
    short = draft.product(1, first)
    second = draft.add("get-tuple-element", OpClass.FREE, 60, pair)
    draft.builder.add_extra(second, "index", 0, b"1")
    draft.product(2, draft.product(50, short), second)
    # at the end: 60 of the pair, 50 made of the other 40, and the result
    assert draft.use().peak_bytes == 60 + 50 + 2


def test_a_result_over_a_donated_parameter_needs_no_memory() -> None:
    draft = Draft()
    weights = draft.parameter(100)
    gradient = draft.product(100, weights)
    updated = draft.elementwise(100, weights, gradient)
    draft.end(updated)
    assert draft.use().peak_bytes == 300 - 100  # the gradient is made in the memory of the result
    draft.builder.add_extra(weights, DONATED_TO, 0, b"0")
    found = draft.use()
    assert found.peak_bytes == 200
    assert found.donated_bytes == 100
    assert found.outputs_bytes == 0


def looped(trips: float, *, in_place: bool) -> Draft:
    """A table updated in a loop from a row that each trip makes of weights made before it."""
    draft = Draft()
    weights = draft.product(50)
    table = draft.product(1000)
    region = draft.builder.add_region(RegionKind.LOOP_BODY, trips=trips, label="loop")
    state = draft.add("get-tuple-element", OpClass.FREE, 1000, table, region=region)
    row = draft.product(20, weights, region=region)
    update = draft.add(
        "dynamic-update-slice", OpClass.UPDATE, 1000, state, row, region=region,
        written=20.0 if in_place else 1000.0,
    )  # fmt: skip
    draft.builder.add_carried(region, update, state)
    draft.end(draft.product(5, update))
    return draft


@pytest.mark.parametrize("trips", [1, 2, 1000])
def test_a_loop_counts_once(trips: float) -> None:
    assert looped(trips, in_place=True).use().peak_bytes == 1000 + 50 + 20 + 5
    assert looped(trips, in_place=False).use().peak_bytes == 2000 + 50 + 20 + 5


def test_what_a_loop_reads_in_every_trip_lives_to_its_end() -> None:
    draft = Draft()
    weights = draft.product(50)
    region = draft.builder.add_region(RegionKind.LOOP_BODY, trips=3.0, label="loop")
    small = draft.product(1, weights, region=region)
    large = draft.product(200, small, region=region)
    draft.product(2, large)
    assert draft.use().peak_bytes == 50 + 1 + 200


@pytest.mark.parametrize(
    ("kind", "trips", "peak"),
    [
        (RegionKind.CALL, 1.0, 100 + 10),
        (RegionKind.BRANCH, 1.0, 100 + 10),
        (RegionKind.COMPOSITE, 0.5, 100 + 10),
        (RegionKind.CALL, 2.0, 100 + 10 + 50),
        (RegionKind.LOOP_BODY, 1.0, 100 + 10 + 50),
    ],
)
def test_only_what_repeats_keeps_what_it_reads(kind: RegionKind, trips: float, peak: int) -> None:
    draft = Draft()
    made = draft.product(100)
    region = draft.builder.add_region(kind, trips=trips, label="region")
    small = draft.product(10, made, region=region)
    draft.product(2, draft.product(50, small, region=region))
    assert draft.use().peak_bytes == peak


def test_loops_in_loops() -> None:
    """The inner loop keeps what the outer one makes, and the outer one keeps what is made before it."""
    draft = Draft()
    before = draft.product(100)
    outer = draft.builder.add_region(RegionKind.LOOP_BODY, trips=3.0, label="outer")
    inner = draft.builder.add_region(RegionKind.LOOP_BODY, parent=outer, trips=3.0, label="inner")
    made = draft.product(30, region=outer)
    small = draft.product(10, before, made, region=inner)
    large = draft.product(50, small, region=inner)
    draft.product(1, draft.product(200, large, region=outer))
    assert draft.use().peak_bytes == 100 + 50 + 200
    inside = draft.builder.build()
    lifetimes = Lifetimes(inside, in_order(inside))
    spans = [lifetimes.of(value) for value in values_of(inside).values]
    # Node n starts at 2 n and ends at 2 n + 1.
    assert spans == [(0, 9), (2, 7), (4, 7), (6, 9), (8, 11), (10, 11)]


def test_moments_of_spans() -> None:
    """At 0 ns two nodes start, of which one takes no time. At 10 ns, the first one ends, then one without a
    span starts and ends, then the third one starts.
    """
    draft = Draft()
    first = draft.product(1)
    second = draft.product(1, first)
    draft.product(1, second)
    draft.product(1)
    graph = draft.builder.build()
    when = in_time(graph, np.array([0, 2], np.int32), np.array([0.0, 10.0]), np.array([10.0, 20.0]), {})
    assert when.start.tolist() == [0, 6, 9, 1]
    assert when.end.tolist() == [4, 7, 10, 2]
    assert when.last.tolist() == [5, 8, 11, 3]
    assert when.time_ns.tolist() == [0.0] * 4 + [10.0] * 6 + [20.0] * 2


def test_moments_of_iterations() -> None:
    """The first execution decides start and end, the last one or the end of the loop the last end. Spans
    without a node do not count.
    """
    draft = Draft()
    region = draft.builder.add_region(RegionKind.LOOP_BODY, trips=9.0, label="loop")
    draft.product(1, region=region)
    draft.product(1)
    graph = draft.builder.build()
    node = np.array([0, 1, -1, 0], np.int32)
    start, end = np.array([20.0, 5.0, 50.0, 1.0]), np.array([30.0, 40.0, 60.0, 11.0])
    for blocks, last_ns in (({}, 30.0), ({region: 70.0}, 70.0), ({region: 25.0}, 30.0)):
        when = in_time(graph, node, start, end, blocks)
        times = when.time_ns
        assert times[when.start].tolist() == [1.0, 5.0]
        assert times[when.end].tolist() == [11.0, 40.0]
        assert times[when.last].tolist() == [last_ns, 40.0]


def test_positions_of_a_traversal_from_the_last_node() -> None:
    """Operands come first, in their order; node 2 is not reached."""
    draft = Draft()
    left, right = draft.product(1), draft.product(1)
    draft.product(1, left)
    middle = draft.product(1, right, left)
    draft.product(1, middle, left)
    graph = draft.builder.build()
    assert Lifetimes(graph, in_order(graph)).reached() == [1, 0, 7, 2, 3]


def test_an_asynchronous_start_keeps_its_operand_until_it_is_done() -> None:
    draft = Draft()
    sent = draft.product(100)
    start = draft.add("all-gather-start", OpClass.COLLECTIVE, 400, sent)
    meanwhile = draft.product(30)
    done = draft.add("all-gather-done", OpClass.FREE, 400, start)
    draft.product(1, done, meanwhile)
    found = draft.use()
    assert found.peak_bytes == 100 + 400 + 30
    assert found.collectives_bytes == 400


def test_what_is_not_known_makes_a_lower_bound() -> None:
    draft = Draft()
    row = draft.builder.types.add(find_dtype("f32"), (-1,))
    draft.product(10)
    draft.builder.add_node(
        name_id=0, op_id=draft.builder.strings.add("dot"), op_class=OpClass.CONTRACTION, results=[row]
    )
    found = memory_use(draft.builder.build())
    assert found is not None
    assert found.is_lower_bound
    assert found.unknown == 1
    assert found.peak_bytes == 10


def test_a_graph_without_tensors_says_nothing() -> None:
    builder = GraphBuilder("bare")
    builder.add_node(name_id=0, op_id=0, op_class=OpClass.CUSTOM)
    graph: OpGraph = builder.build()
    assert memory_use(graph) is None
