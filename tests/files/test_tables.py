"""Typed rows of tables: equal values from every kind of file, and errors that name the cell."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan, nan
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pandas as pd
import pytest

from hespas.files.tables import Column, TableRow, read_table, read_typed_table, typed_row
from hespas.graph.errors import FormatError


class Cells(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of every kind."""

    name: str
    count: Annotated[int, Column(names=("number",), low=1, high=1e6)]
    time_ms: Annotated[float, Column(is_open=True, unit="ms")] = nan
    mode: Literal["", "fast", "slow"] = ""
    note: Annotated[str, Column(is_in_header=True)] = ""


ROWS = [
    {"name": "a", "number": 8.0, "time_ms": 1.5, "mode": "fast", "note": "x, y"},
    {"name": "b", "number": 2.0, "time_ms": nan, "mode": None, "note": None},
]
EXPECTED = [
    Cells(name="a", count=8, time_ms=1.5, mode="fast", note="x, y"),
    Cells(name="b", count=2),
]
WRITERS: dict[str, Callable[[pd.DataFrame, Path], object]] = {
    "t.csv": lambda frame, path: frame.to_csv(path, index=False),
    "t.csv.gz": lambda frame, path: frame.to_csv(path, index=False),
    "t.parquet": lambda frame, path: frame.to_parquet(path),
    "t.jsonl.gz": lambda frame, path: frame.to_json(path, orient="records", lines=True),
    "t.jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_equal_cells(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    WRITERS[name](pd.DataFrame(ROWS), path)
    cells = [cells for _, cells in read_typed_table(path, Cells)]
    assert [repr(row) for row in cells] == [repr(row) for row in EXPECTED]


def written(folder: Path, text: str) -> Path:
    path = folder / "table.csv"
    path.write_text(text, "utf-8")
    return path


def test_names_of_columns_have_no_case_and_no_blanks(tmp_path: Path) -> None:
    path = written(tmp_path, "\ufeff Name ,COUNT,note\n a , 1 ,\n")
    ((row, cells),) = read_typed_table(path, Cells)
    assert (cells.name, cells.count, row.line) == ("a", 1, 2)
    assert isnan(cells.time_ms)


@pytest.mark.parametrize(
    ("line", "column", "message", "expected"),
    [
        (",1,,,", "name", "name is empty", "a text"),
        ("a,,,,", "number", "number is empty", "a whole number of 1 or more, at most 1,000,000"),
        ("a,0,,,", "number", "number is '0'", "a whole number of 1 or more"),
        ("a,1.5,,,", "number", "number is '1.5'", "a whole number"),
        ("a,1e7,,,", "number", "number is '1e7'", "a whole number"),
        ("a,1,0,,", "time_ms", "time_ms is '0'", "a number above 0 [ms], or an empty cell"),
        ("a,1,inf,,", "time_ms", "time_ms is 'inf'", "a number above 0 [ms]"),
        ("a,1,soon,,", "time_ms", "time_ms is 'soon'", "a number above 0 [ms]"),
        ("a,1,,quick,", "mode", "mode is 'quick'", "fast or slow, or an empty cell"),
    ],
)
def test_an_error_names_the_cell_and_what_it_may_hold(
    line: str, column: str, message: str, expected: str, tmp_path: Path
) -> None:
    path = written(tmp_path, f'name,number,time_ms,mode,note\n"a\nb",1,,,\n{line}\n')
    with pytest.raises(FormatError, match=message) as caught:
        list(read_typed_table(path, Cells))
    error = caught.value
    assert (error.path, error.position) == (str(path), f"row 1, column {column}")
    assert f"write {expected}" in str(error.hint)
    assert "row 1 is line 4 of the file" in str(error.hint)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,number\na,1\n", "missing column note"),
        ("name,note\na,\n", "missing column count"),
        ("name,number,note\n", "no row below the header"),
        ("name,number,note\na,1,x,y\n", "more cells than the header"),
        ("name,number,note\na,1\n", "fewer cells than the header"),
        ('name,number,note\n"a,1,x\n', "not a row of CSV"),
        ("name,Name,number,note\na,b,1,x\n", "several columns are called 'name'"),
    ],
)
def test_a_file_that_is_not_such_a_table_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=message):
        list(read_typed_table(written(tmp_path, text), Cells))


def test_empty_cells_beyond_the_header_are_ignored(tmp_path: Path) -> None:
    rows = list(read_table(written(tmp_path, "a,b\n1,2,\n\n3,4,,\n"), ("a",)))
    assert [row.cells for row in rows] == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert [(row.row, row.line) for row in rows] == [(0, 2), (1, 4)]


def test_needed_columns_of_texts_are_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="missing column c, d"):
        list(read_table(written(tmp_path, "a,b\n1,2\n"), ("a", "d", "c")))


def test_a_row_of_another_source_has_the_place_of_its_path() -> None:
    row = TableRow("runs.csv:3", -1, 0, {"name": "a", "number": "x", "note": ""})
    with pytest.raises(FormatError) as caught:
        typed_row(row, Cells)
    assert (caught.value.path, caught.value.position) == ("runs.csv:3", "column number")


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1 and more")
    with pytest.raises(FormatError, match="not a Parquet table"):
        list(read_table(path))
