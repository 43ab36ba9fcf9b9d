"""Ragged columns and string tables against nested lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hespas.graph import HostOps, RaggedArray, StringTable, StringTableBuilder
from hespas.graph.columns import at_rows, constant, distinct_rows, equal_rows, mapped

ROWS = st.lists(st.lists(st.integers(0, 6), max_size=4), max_size=8)
TEXTS = st.lists(st.text(alphabet=st.characters(codec=None), max_size=6))
"""Any code point, lone surrogates included."""


@given(ROWS)
def test_lists_round_trip(rows: list[list[int]]) -> None:
    csr = RaggedArray.from_lists(rows)
    assert csr.to_lists() == rows
    assert len(csr) == len(rows)
    assert csr.lengths.tolist() == [len(row) for row in rows]
    assert csr.row_ids.tolist() == [at for at, row in enumerate(rows) for _ in row]
    for at, row in enumerate(rows):
        assert csr.row(at).tolist() == row


@given(ROWS, st.data())
def test_take_gives_rows_in_the_order_asked(rows: list[list[int]], data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.sampled_from(range(len(rows))))) if rows else []
    taken = RaggedArray.from_lists(rows).take(np.array(wanted, np.int64))
    assert taken.to_lists() == [rows[at] for at in wanted]


@given(ROWS)
def test_transpose_turns_rows_into_values(rows: list[list[int]]) -> None:
    expected = [
        [at for at, row in enumerate(rows) for value in row if value == column] for column in range(7)
    ]
    transposed = RaggedArray.from_lists(rows).transpose(7)
    assert transposed.to_lists() == expected
    again = transposed.transpose(len(rows))
    assert again.to_lists() == [sorted(row) for row in rows]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99))))
def test_pairs_keep_their_order_within_a_row(pairs: list[tuple[int, int]]) -> None:
    rows, values = np.array(pairs, np.int64).reshape(-1, 2).T
    csr = RaggedArray.from_pairs(rows, values, 6)
    assert csr.to_lists() == [[value for row, value in pairs if row == at] for at in range(6)]


@given(ROWS)
def test_segment_sum_adds_what_rows_refer_to(rows: list[list[int]]) -> None:
    column = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    assert RaggedArray.from_lists(rows).segment_sum(column).tolist() == [sum(column[row]) for row in rows]


@given(ROWS, ROWS)
def test_equals_compares_rows(one: list[list[int]], two: list[list[int]]) -> None:
    assert RaggedArray.from_lists(one).equals(RaggedArray.from_lists(two)) == (one == two)


def test_empty_rows_take_no_memory() -> None:
    empty = RaggedArray.empty(1_000_000)
    assert len(empty) == 1_000_000
    assert empty.offsets.strides == (0,)
    assert not empty.lengths.any()
    assert empty.row(999_999).tolist() == []


def test_constant_takes_no_memory() -> None:
    column = constant(3.0, 1_000_000)
    assert column.shape == (1_000_000,)
    assert column.strides == (0,)
    assert not column.flags.writeable


@given(TEXTS)
def test_interned_texts_come_back(texts: list[str]) -> None:
    builder = StringTableBuilder()
    rows = [builder.add(text) for text in texts]
    table = builder.build()
    assert [table[row] for row in rows] == texts
    assert table[0] == ""
    assert len(table) == len({"", *texts}), "equal texts have one row"
    assert list(table) == [table[row] for row in range(len(table))]


@given(TEXTS, st.text(alphabet=st.characters(codec=None), max_size=6))
def test_find_gives_the_row_or_minus_one(texts: list[str], wanted: str) -> None:
    table = StringTable.from_strings(["", *texts])
    row = table.find(wanted)
    assert row == (["", *texts].index(wanted) if wanted in ["", *texts] else -1)
    mapped = StringTable(memoryview(bytes(table.buffer)), table.offsets)
    assert mapped.find(wanted) == row, "a memory map behaves like bytes"
    assert list(mapped) == list(table)


@given(TEXTS)
def test_continued_table_keeps_its_rows(texts: list[str]) -> None:
    table = StringTable.from_strings(["", *texts])
    builder = StringTableBuilder(table)
    row = builder.add("certainly new")
    again = builder.build()
    assert [again[at] for at in range(len(table))] == ["", *texts]
    assert row == len(table) or "certainly new" in texts


def test_rows_of_a_column_that_are_not_there_are_missing() -> None:
    column = np.array([5, 6, 7], np.int32)
    found = at_rows(column, np.array([2, -1, 0]), 9)
    assert (found.tolist(), found.dtype) == ([7, 9, 5], np.dtype(np.int32))
    assert at_rows(column[:0], np.array([-1, -1]), -3).tolist() == [-3, -3]


@given(st.lists(st.integers(-3, 3)))
def test_a_function_is_called_once_for_equal_numbers(values: list[int]) -> None:
    calls: list[int] = []

    def double(value: int) -> int:
        calls.append(value)
        return 2 * value

    found = mapped(np.array(values, np.int64), double, np.int16)
    assert (found.tolist(), found.dtype) == ([2 * value for value in values], np.dtype(np.int16))
    assert calls == sorted(set(values))


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2))))
def test_combinations_are_sorted_and_rows_know_theirs(pairs: list[tuple[int, int]]) -> None:
    first, second = np.array(pairs, np.int64).reshape(-1, 2).T
    found, place = distinct_rows(first, second.astype(np.int32))
    listed: list[int] = place.tolist()
    assert found == sorted(map(list, set(pairs)))
    assert [found[at] for at in listed] == list(map(list, pairs))


@given(st.lists(st.tuples(st.integers(-2, 2), st.sampled_from([0.5, 1.5, np.nan]), st.booleans())))
def test_equal_rows_are_told_by_the_first_of_them(rows: list[tuple[int, float, bool]]) -> None:
    numbers, figures, flags = ([row[at] for row in rows] for at in range(3))
    first, place = equal_rows(np.array(numbers, np.int64), np.array(figures), np.array(flags, np.bool_))
    texts = [str(row) for row in rows]  # NaN is not equal to itself, and looks the same
    assert sorted(first.tolist()) == sorted({texts.index(text) for text in texts})
    assert [texts[first[at]] for at in place.tolist()] == texts


def test_a_table_of_known_columns_says_of_the_others_that_nothing_is_known() -> None:
    one = HostOps.of(name_id=np.array([1, 2]), start_ns=np.array([3, 4]))
    assert (one.name_id.dtype, one.start_ns.dtype) == (np.dtype(np.int32), np.dtype(np.float64))
    assert (one.parent.tolist(), one.shapes_id.tolist()) == ([-1, -1], [0, 0])
    assert np.isnan(one.duration_ns).all()
    both = HostOps.joined([one, one.take(np.array([1]))])
    assert (both.name_id.tolist(), both.name_id.dtype) == ([1, 2, 2], np.dtype(np.int32))
    assert len(HostOps.joined([])) == 0


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=4))
def test_rows_move_to_other_places(rows: list[list[int]]) -> None:
    places = np.arange(len(rows))[::-1] + 1
    moved = RaggedArray.from_lists(rows).moved(places, len(rows) + 2)
    assert moved.to_lists() == [[], *reversed(rows), []]
