"""Element types: every spelling, and their sizes in bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.graph import DTYPES, DType, TensorTypesBuilder, dtype, find_dtype


@pytest.mark.parametrize(
    ("spelling", "elements", "expected_bytes"),
    [
        ("i1", 9, 9),  # one byte each, StableHLO's i1
        ("i4", 9, 5),  # packed, ceil(9 * 4 / 8)
        ("ui2", 5, 2),
        ("bf16", 3, 6),
        ("f8E4M3FN", 7, 7),
        ("f4E2M1FN", 7, 4),
        ("f6E2M3FN", 4, 3),
        ("complex<f64>", 2, 32),
        ("mxfp8", 32, 33),  # one 8-bit scale per 32 elements, OCP Microscaling 1.0
        ("mxfp8", 33, 35),
        ("mxfp4", 64, 34),
        ("mxfp6", 32, 25),
        ("nvfp4", 16, 9),  # one 8-bit scale per 16 elements
        ("token", 1, 0),
        ("f32", 0, 0),
    ],
)
def test_storage(spelling: str, elements: int, expected_bytes: int) -> None:
    assert dtype(spelling).storage_bytes(elements) == expected_bytes


def test_spellings_are_unambiguous() -> None:
    spellings = [spelling.lower() for entry in DTYPES for spelling in (entry.name, *entry.aliases)]
    repeated = {spelling for spelling in spellings if spellings.count(spelling) > 1}
    assert repeated <= {entry.name.lower() for entry in DTYPES}
    for entry in DTYPES:
        assert {find_dtype(spelling) for spelling in (entry.name, *entry.aliases)} == {entry}
        assert find_dtype(entry.name.upper()) is entry


def test_code_is_the_row() -> None:
    assert [entry.code for entry in DTYPES] == list(range(len(DTYPES)))


def test_unknown_spelling() -> None:
    assert find_dtype("q8") is None
    with pytest.raises(KeyError):
        dtype("q8")


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), max_size=3), st.integers(0, 100))
def test_type_bytes_are_those_of_its_elements(element: DType, shape: list[int], extra_bytes: int) -> None:

    builder = TensorTypesBuilder()
    row = builder.add(element, shape, extra_bytes=extra_bytes)
    assert builder.bytes_of(row) == element.storage_bytes(int(np.prod(shape, dtype=int))) + extra_bytes


def test_type_rows_are_interned() -> None:
    builder = TensorTypesBuilder()
    rows = [
        builder.add(dtype("f32"), (2, 3)),
        builder.add(dtype("float"), [2, 3]),
        builder.add(dtype("f32"), (2, 3), bounded=True),
        builder.add(dtype("f32"), (2, 3), encoding=1),
        builder.add(dtype("f32"), ()),
        builder.add(None, (2,)),
        builder.add(dtype("bf16"), (-1, 3)),
    ]
    assert rows == [0, 0, 1, 2, 3, 4, 5]
    types = builder.build()
    assert [types.shape(row) for row in range(6)] == [(2, 3), (2, 3), (2, 3), (), (2,), (-1, 3)]
    assert types.elements(0) == 6
    assert types.elements(3) == 1
    assert types.elements(5) == -1
    assert types.dtype_of(4) is None
    assert types.dtype_of(5) == dtype("bf16")
    np.testing.assert_array_equal(types.bytes, [24, 24, 24, 4, np.nan, np.nan])
    assert types.bounded.tolist() == [False, True, False, False, False, False]
