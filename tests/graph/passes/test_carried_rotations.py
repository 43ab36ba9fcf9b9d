"""Loops that pass values from slot to slot, folded and unrolled, compared with symbolic execution.

A loop carries ``slots`` values. A trip makes one new value per slot (a reduction over the loop state, waiting
for what the slots read hold), then ``yields`` says what each slot holds in the next trip: ``new 0`` or
``slot 2`` or ``outer``. What stands behind the loop reads one slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest

from hespas.converters.format import ReadOptions
from hespas.converters.hlo.parser import parse_module
from hespas.converters.hlo.reader import workload_of
from hespas.converters.hlo.scan import HloText
from hespas.converters.stablehlo.reader import read_program
from hespas.graph import Diagnostics, GraphBuilder, OpClass, OpGraph, RegionKind
from hespas.graph.errors import InvariantError
from hespas.graph.opgraph import NodeKind
from hespas.graph.passes import FoldFree, UnrollLoops, dead_code


class Loop(NamedTuple):
    """``makes[j]`` is the slot that dot ``j`` of a trip reads; ``yields`` names what each slot holds next."""

    slots: int
    makes: tuple[int, ...]
    yields: tuple[str, ...]
    trips: int = 4


ROTATE_BY_ONE = Loop(2, (0,), ("slot 1", "new 0"))
ROTATE_BY_TWO = Loop(3, (0,), ("slot 1", "slot 2", "new 0"))
LOOPS = {
    "by one": ROTATE_BY_ONE,
    "by two": ROTATE_BY_TWO,
    "swap": Loop(2, (0, 1), ("slot 1", "slot 0")),
    "swap of new": Loop(2, (0, 1), ("new 1", "new 0")),
    "fan": Loop(3, (0, 1), ("slot 2", "slot 2", "new 0")),
    "kept": Loop(2, (0,), ("new 0", "slot 1")),
    "from outside": Loop(3, (0,), ("outer", "slot 0", "slot 1")),
    "delayed result": Loop(3, (0,), ("new 0", "slot 0", "slot 1")),
}


def reference(loop: Loop, read: int) -> list[tuple[str, frozenset[str]]]:
    """Each dot and the value behind the loop with the dots, or values made before the loop, that it waits
    for.
    """
    state = [f"start{place}" for place in range(loop.slots)]
    found: list[tuple[str, frozenset[str]]] = []
    for trip in range(loop.trips):
        made = [f"dot{place}@{trip}" for place in range(len(loop.makes))]
        found += [(name, frozenset({state[slot]})) for name, slot in zip(made, loop.makes, strict=True)]
        source = {f"new {place}": name for place, name in enumerate(made)}
        source |= {f"slot {place}": name for place, name in enumerate(state)} | {"outer": "outer"}
        state = [source[name] for name in loop.yields]
    return [*found, ("end", frozenset({state[read]}))]


def stablehlo(loop: Loop, read: int) -> OpGraph:
    kind = "tensor<64x64xf32>"
    names = [f"%s{place}" for place in range(loop.slots)]
    lines = [f"%start{place} = stablehlo.cosine %x : {kind}" for place in range(loop.slots)]
    lines += [f"%outer = stablehlo.sine %x : {kind}", "%c0 = stablehlo.constant dense<0> : tensor<i32>"]
    lines += [f"%n = stablehlo.constant dense<{loop.trips}> : tensor<i32>"]
    lines += ["%one = stablehlo.constant dense<1> : tensor<i32>"]
    starts = ", ".join(f"{name} = %start{place}" for place, name in enumerate(names))
    kinds = ", ".join(["tensor<i32>", *[kind] * loop.slots])
    lines += [f"%r:{loop.slots + 1} = stablehlo.while(%i = %c0, {starts}) : {kinds} cond {{"]
    lines += ["%p = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>"]
    lines += ["stablehlo.return %p : tensor<i1> } do {", "%i2 = stablehlo.add %i, %one : tensor<i32>"]
    for place, slot in enumerate(loop.makes):
        lines.append(f"%d{place} = stablehlo.exponential {names[slot]} : {kind}")
    yielded = [_spelled(each, names) for each in loop.yields]
    lines += [f"stablehlo.return %i2, {', '.join(yielded)} : {kinds} }}"]
    lines += [f"%end = stablehlo.negate %r#{read + 1} : {kind}", f"return %end : {kind}"]
    text = f"func.func @main(%x: {kind}) -> {kind} {{\n" + "\n".join(lines) + "\n}"
    return read_program(text.encode(), "loop.mlir", ReadOptions(), Diagnostics()).classes[0]


def hlo(loop: Loop, read: int) -> OpGraph:
    """The same; a body captures nothing, so that ``outer`` is one more element of the state."""
    names = [f"%s{place}" for place in range(loop.slots)]
    kind = "f32[64,64]"
    state = f"({', '.join(['s32[]', *[kind] * (loop.slots + 1)])})"
    lines = ["HloModule m", f"%cond (p: {state}) -> pred[] {{", f"%p = {state} parameter(0)"]
    lines += ["%i = s32[] get-tuple-element(%p), index=0", f"%n = s32[] constant({loop.trips})"]
    lines += ["ROOT %lt = pred[] compare(%i, %n), direction=LT", "}"]
    lines += [f"%body (p: {state}) -> {state} {{", f"%p = {state} parameter(0)"]
    lines += ["%i = s32[] get-tuple-element(%p), index=0", "%one = s32[] constant(1)"]
    for place, name in enumerate([*names, "%outer"]):
        lines.append(f"{name} = {kind} get-tuple-element(%p), index={place + 1}")
    lines += ["%i2 = s32[] add(%i, %one)"]
    for place, slot in enumerate(loop.makes):
        lines.append(f"%d{place} = {kind} exponential({names[slot]})")
    yielded = [_spelled(each, names) for each in loop.yields]
    lines += [f"ROOT %t = {state} tuple(%i2, {', '.join(yielded)}, %outer)", "}"]
    lines += [f"ENTRY %main (x: {kind}) -> {kind} {{", f"%x = {kind} parameter(0)", "%c = s32[] constant(0)"]
    lines += [f"%start{place} = {kind} cosine(%x)" for place in range(loop.slots)]
    starts = ", ".join(f"%start{place}" for place in range(loop.slots))
    lines += [f"%outer = {kind} sine(%x)", f"%init = {state} tuple(%c, {starts}, %outer)"]
    trips = f'backend_config={{"known_trip_count":{{"n":"{loop.trips}"}}}}'
    lines += [f"%l = {state} while(%init), condition=%cond, body=%body, {trips}"]
    lines += [f"%r = {kind} get-tuple-element(%l), index={read + 1}", f"ROOT %end = {kind} negate(%r)", "}"]
    module = parse_module(HloText("\n".join(lines), "loop.hlo"))
    return workload_of(module, ReadOptions(), Diagnostics()).classes[0]


def _spelled(value: str, names: Sequence[str]) -> str:
    what, _, place = value.partition(" ")
    return {"new": f"%d{place}", "slot": names[int(place)] if place else "", "outer": "%outer"}[what]


def waits(graph: OpGraph) -> list[tuple[str, frozenset[str]]]:
    """The same, of the flat graph: what each waits for by data, through free nodes."""
    flat = UnrollLoops()(FoldFree()(graph, Diagnostics()), Diagnostics())
    made: list[frozenset[str]] = []
    found: list[tuple[str, frozenset[str]]] = []
    dots: dict[str, int] = {}
    copies: dict[str, int] = {}
    starts = 0
    for node in range(len(flat)):
        producers: list[int] = flat.data_deps.row(node).tolist()
        before = frozenset[str]().union(*(made[dep] for dep in producers))
        op, name = flat.op_name(node).removeprefix("stablehlo."), flat.node_name(node)
        if op == "exponential":
            copies[name] = copies.get(name, -1) + 1
            label = f"dot{dots.setdefault(name, len(dots))}@{copies[name]}"
            found.append((label, before))
        elif op == "cosine":
            label, starts = f"start{starts}", starts + 1
        else:
            label = {"sine": "outer", "negate": "end"}.get(op, "")
        if op == "negate":
            found.append((label, before))
        is_free = flat.op_class[node] == OpClass.FREE
        made.append(before if is_free else frozenset({label} if label else ()))
    return found


@pytest.mark.parametrize("write", [stablehlo, hlo])
@pytest.mark.parametrize(
    ("name", "read"), [(name, read) for name in LOOPS for read in range(LOOPS[name].slots)]
)
def test_each_trip_waits_for_the_trip_that_made_its_value(
    write: Callable[[Loop, int], OpGraph], name: str, read: int
) -> None:
    loop = LOOPS[name]
    graph = write(loop, read)
    assert sorted(waits(graph)) == sorted(reference(loop, read))
    assert graph.op_class.tolist().count(OpClass.TRANSCENDENTAL) == loop.slots + 1 + len(loop.makes)


@pytest.mark.parametrize("write", [stablehlo, hlo])
def test_every_way_to_hand_two_slots_on(write: Callable[[Loop, int], OpGraph]) -> None:
    choices = ("slot 0", "slot 1", "new 0", "outer")
    for yields in product(choices, repeat=2):
        for read in range(2):
            loop = Loop(2, (1,), yields, trips=3)
            assert sorted(waits(write(loop, read))) == sorted(reference(loop, read)), (yields, read)


def _rotation(trips: float = 3) -> GraphBuilder:
    """new -> old, old -> oldest, carried; nobody but the end reads the oldest."""
    builder = GraphBuilder("rotation")
    name = builder.strings.add("n")
    row = builder.add_region(RegionKind.LOOP_BODY, trips=trips, label="loop")

    def node(deps: Sequence[int], region: int, flops: float) -> int:
        return builder.add_node(
            name_id=name,
            op_id=name,
            op_class=OpClass.ELEMENTWISE if flops else OpClass.FREE,
            kind=NodeKind.COMPUTE,
            data_deps=deps,
            flops=flops,
            transcendentals=0,
            bytes_read=0,
            bytes_written=0,
            region=region,
        )

    oldest, old, new = node([], row, 0), node([], row, 0), node([], row, 1)
    builder.add_carried(row, new, old)
    builder.add_carried(row, old, oldest)
    node([oldest], -1, 1)
    return builder


def test_a_free_node_that_hands_a_carried_value_on_stays() -> None:
    folded = FoldFree()(_rotation().build(), Diagnostics())
    assert len(folded) == 4
    edges = folded.regions
    pairs = zip(edges.carried_producer.tolist(), edges.carried_consumer.tolist(), strict=True)
    assert set(pairs) == {(2, 1), (1, 0)}
    flat = UnrollLoops()(folded, Diagnostics())
    assert flat.data_deps.to_lists() == [[], [], [], [1], [2], [], [4], [5], [], [6]]


def test_nothing_stays_of_a_loop_that_never_runs() -> None:
    assert len(FoldFree()(_rotation(trips=0).build(), Diagnostics())) == 1


def test_what_a_later_trip_needs_is_not_dead() -> None:
    graph = _rotation().build()
    assert len(dead_code(graph, np.array([3]))) == 4


def test_a_carried_edge_that_leaves_its_loop_is_a_broken_promise() -> None:
    builder = _rotation()
    builder.add_carried(0, 2, 3)
    with pytest.raises(InvariantError, match="leaves its loop"):
        UnrollLoops()(builder.build(), Diagnostics())
