"""Assignment of a few values to buffers, by hand. Node n starts at position 2 n and ends at 2 n + 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hespas.graph import GraphBuilder, OpClass
from hespas.simulator.memory.buffers import Buffer, Lifetimes, buffers_of, in_order
from hespas.simulator.memory.values import MemoryValue, ProgramValues, ValueKind

PARAMETER, OUTPUT = ValueKind.PARAMETER, ValueKind.OUTPUT
NODES = 10
WHOLE = (0, 2 * NODES)
"""Life of a parameter."""


def value(node: int, size: float, *users: int, over: Sequence[int] = (), **more: Any) -> MemoryValue:
    """A value that a node makes and others read."""
    return MemoryValue(node, 0, size, -1, users=list(users), over=tuple(over), **more)


def assigned(
    *values: MemoryValue, results: list[int] | None = None, donated: dict[int, int] | None = None
) -> list[Buffer]:
    made = GraphBuilder("nodes")
    for _ in range(NODES):
        made.add_node(name_id=0, op_id=0, op_class=OpClass.CUSTOM)
    graph = made.build()
    program = ProgramValues(list(values), results, [], 0)
    return buffers_of(program, Lifetimes(graph, in_order(graph)), donated or {})


def lives(*values: MemoryValue) -> list[list[tuple[int, int]]]:
    return [buffer.lives for buffer in assigned(*values)]


# --- lifetimes


def test_lives_of_values() -> None:
    """To the last reader, whatever the order of readers; unread values to their own end."""
    assert lives(value(0, 8, 2), value(1, 8, 5, 3), value(4, 8)) == [[(0, 5)], [(2, 11)], [(8, 9)]]
    assert lives(value(3, 8, 4, kind=PARAMETER), value(3, 8, 4, kind=OUTPUT)) == [[WHOLE], [(6, WHOLE[1])]]
    assert lives(value(3, 8, kind=ValueKind.CONSTANT)) == [[WHOLE]]


def test_values_without_bytes_need_no_buffer() -> None:
    assert [buffer.values for buffer in assigned(value(0, 0, 2), value(1, 8, 2))] == [[1]]


# --- values that overwrite others


def test_a_value_takes_the_memory_of_one_that_ends_with_it() -> None:
    """Node 2 reads the value of node 0 for the last time and writes over it."""
    assert lives(value(0, 8, 2), value(2, 8, 3, over=[0])) == [[(0, 3)], [(4, 7)]]
    assert lives(value(2, 8, 3, over=[1]), value(0, 8, 2)) == [[(4, 7)], [(0, 3)]]


def test_a_value_that_is_read_later_keeps_its_memory() -> None:
    assert lives(value(0, 8, 2, 3), value(2, 8, 3, over=[0])) == [[(0, 7)], [(4, 7)]]


def test_the_first_value_that_ends_gives_its_memory_and_no_other_does() -> None:
    first, second, third = value(0, 8, 2, 9), value(1, 8, 2), value(1, 8, 2)
    assert lives(first, second, third, value(2, 8, 4, over=[0, 1, 2])) == [
        [(0, 19)], [(2, 3)], [(2, 5)], [(4, 9)],
    ]  # fmt: skip


def test_memory_is_given_once() -> None:
    taken = lives(value(0, 8, 2), value(2, 8, 4, over=[0]), value(2, 8, 5, over=[0]))
    assert taken == [[(0, 3)], [(4, 9)], [(4, 11)]]


# --- values in one buffer


def test_updates_in_place_share_a_buffer() -> None:
    """The parts of its life: positions 0-1, nothing, then 4-7."""
    (buffer,) = assigned(
        value(0, 8), value(2, 24, 3, over=[0], in_place=True), value(3, 16, over=[1], in_place=True)
    )
    assert (buffer.values, buffer.size_bytes, buffer.lives) == ([0, 1, 2], 24, [(0, 1), (4, 7)])
    assert not buffer.reserved


def test_an_update_of_what_is_still_read_is_a_copy() -> None:
    assert len(assigned(value(0, 8, 2, 5), value(2, 8, 3, over=[0], in_place=True))) == 2
    assert len(assigned(value(0, 8, kind=PARAMETER), value(2, 8, 3, over=[0], in_place=True))) == 2


def test_an_update_takes_the_first_operand_that_it_can() -> None:
    found = assigned(value(0, 8, 2, 5), value(1, 8, 2), value(2, 8, 3, over=[0, 1], in_place=True))
    assert [buffer.values for buffer in found] == [[0], [1, 2]]


def test_an_update_takes_only_one_operand() -> None:
    found = assigned(value(0, 8, 2), value(1, 8, 2), value(2, 8, 3, over=[0, 1], in_place=True))
    assert [buffer.values for buffer in found] == [[0, 2], [1]]


def test_two_results_of_a_node_are_in_two_buffers() -> None:
    """Also if nothing reads the first one."""
    updates = [value(2, 8, *users, over=[0], in_place=True) for users in ((), (3,))]
    assert [buffer.values for buffer in assigned(value(0, 8, 2), *updates)] == [[0, 1], [2]]


def test_results_over_donated_parameters() -> None:
    """A donated parameter lives to its last reader; a result that begins later, or that may overwrite it
    at that node, shares its buffer.
    """
    for node, over, buffers in ((4, (), 1), (3, (), 2), (3, (0,), 1)):
        found = assigned(
            value(0, 8, 3, kind=PARAMETER),
            value(node, 8, kind=OUTPUT, over=over),
            results=[1],
            donated={1: 0},
        )
        assert len(found) == buffers, (node, over)
        assert all(buffer.reserved for buffer in found)
        assert found[0].kind is PARAMETER
    alone = assigned(value(0, 8, 3, kind=PARAMETER), value(9, 8, kind=OUTPUT), results=[1])
    assert [buffer.values for buffer in alone] == [[0], [1]]


# --- temporaries in the buffers of results


def inside(*values: MemoryValue, donated: dict[int, int] | None = None) -> list[bool]:
    """The first value is a result of 100 bytes of node 5."""
    found = assigned(value(5, 100, kind=OUTPUT), *values, results=[0], donated=donated)
    assert found[0].reserved
    assert not any(buffer.reserved for buffer in found[1:] if buffer.kind is ValueKind.TEMPORARY)
    return [buffer.inside for buffer in found[1:]]


def test_what_ends_before_a_result_begins_is_in_its_buffer() -> None:
    assert inside(value(0, 100, 4)) == [True]
    assert inside(value(0, 101, 4)) == [False]
    assert inside(value(0, 100, 5)) == [False]
    assert inside(value(0, 100, 4), value(1, 100, 2)) == [True, False]
    assert inside(value(0, 100, 2), value(3, 100, 4)) == [True, True]
    # The larger one is placed first.
    assert inside(value(0, 50, 4), value(1, 60, 2)) == [False, True]


def test_without_stated_results_nothing_is_reserved() -> None:
    found = assigned(value(5, 100, kind=OUTPUT), value(0, 100, 4))
    assert [(buffer.reserved, buffer.inside) for buffer in found] == [(False, False)] * 2


def test_what_a_result_overwrites_may_touch_it() -> None:
    """Node 5 reads the temporary for the last time, and writes the result over it."""
    result = value(5, 100, kind=OUTPUT, over=[1])
    found = assigned(result, value(0, 100, 5), results=[0])
    assert [buffer.inside for buffer in found] == [False, True]
    later = assigned(result, value(0, 100, 5, 6), results=[0])
    assert [buffer.inside for buffer in later] == [False, False]


def test_parameters_lend_memory_only_if_they_are_donated() -> None:
    parameter = value(0, 200, 1, kind=PARAMETER)
    late = value(6, 150, 7)
    assert inside(parameter, late) == [False, False]
    assert inside(parameter, late, value(9, 200, kind=OUTPUT), donated={3: 1}) == [False, True]


def test_the_smallest_sufficient_result_is_taken() -> None:
    results = [value(5, size, kind=OUTPUT) for size in (300, 100, 200)]
    found = assigned(*results, value(0, 150, 4), value(1, 90, 4), results=[0, 1, 2])
    assert [buffer.inside for buffer in found] == [False] * 3 + [True] * 2
    # Three temporaries of 90 bytes fill the three results, a fourth has no memory left.
    small = [value(0, 90, 4) for _ in range(4)]
    full = assigned(*results, *small, results=[0, 1, 2])
    assert [buffer.inside for buffer in full] == [False] * 3 + [True] * 3 + [False]


def test_parameters_and_small_results_do_not_count_as_tried() -> None:
    """At most 16 results are tried, of those that are large enough."""
    result, temporary = value(5, 200, kind=OUTPUT), value(0, 50, 4)
    parameters = [value(0, 100, 9, kind=PARAMETER) for _ in range(20)]
    small = [value(5, 10, kind=OUTPUT) for _ in range(20)]
    for others in (parameters, small):
        found = assigned(result, *others, temporary, results=[0])
        assert found[-1].inside
    occupied = [value(0, 60, kind=OUTPUT) for _ in range(16)]
    for count, placed in ((15, True), (16, False)):
        assert assigned(result, *occupied[:count], temporary, results=[0])[-1].inside == placed


def test_small_temporaries_are_not_placed() -> None:
    """Less than 1/4096 of the largest buffer."""
    largest = value(5, 4096 * 8, kind=OUTPUT)
    for size, placed in ((8, True), (7, False)):
        found = assigned(largest, value(0, size, 4), results=[0])
        assert found[1].inside == placed
