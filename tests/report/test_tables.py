"""A table in all renderings, in which texts from files stay texts."""

from __future__ import annotations

import csv
import io
import re
from math import isnan, nan
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.files.documents import document_bytes, unescape_formula
from hespas.graph.errors import InvariantError
from hespas.report import Column, Name, Phrase, Table, table_from_records, table_from_rows

HEADER = (
    Column("name", "operation", "code"),
    Column("op_class", "class"),
    Column("count", kind="count"),
    Column("total_ns", "time", "time"),
    Column("share", kind="share", digits=3),
    Column("bandwidth", kind="number", unit="GB/s"),
)
TABLE = table_from_rows(
    HEADER,
    [
        ("dot | general", "matmul", 12, 1_234_567.0, 0.123456, 812.345),
        ("=add.1", "elementwise", 3, nan, nan, None),
    ],
)


def test_text() -> None:
    assert TABLE.to_text() == [
        "operation      class        count      time    share  bandwidth GB/s",
        "dot | general  matmul          12  1.235 ms    12.3%          812.35",
        "=add.1         elementwise      3   unknown  unknown         unknown",
    ]


def test_markdown() -> None:
    assert TABLE.to_markdown().splitlines() == [
        "| operation | class | count | time | share | bandwidth GB/s |",
        "| --- | --- | --- | --- | --- | --- |",
        "| `dot \\| general` | matmul | 12 | 1.235 ms | 12.3% | 812.35 |",
        "| `=add.1` | elementwise | 3 | \N{EN DASH} | \N{EN DASH} | \N{EN DASH} |",
    ]


def test_notebook() -> None:
    left, right = ('style="text-align:' + side + '"' for side in ("left", "right"))
    table = table_from_rows(HEADER[:3], [("<dot>", "matmul", 12), ("add", "", None)])
    assert table.to_html() == (
        f'<table><thead><tr><th scope="col" {left}>operation</th><th scope="col" {left}>class</th>'
        f'<th scope="col" {right}>count</th></tr></thead><tbody>'
        f"<tr><td {left}>&lt;dot&gt;</td><td {left}>matmul</td><td {right}>12</td></tr>"
        f"<tr><td {left}>add</td><td {left}></td><td {right}>\N{EN DASH}</td></tr></tbody></table>"
    )


def test_arrow() -> None:
    arrow = TABLE.to_arrow()
    assert arrow.column_names == [column.name for column in HEADER]
    assert arrow.column("total_ns").to_pylist() == [1_234_567.0, None]
    assert arrow.column("name").to_pylist() == ["dot | general", "=add.1"]


def test_csv() -> None:
    assert TABLE.to_csv().splitlines() == [
        "name,op_class,count,total_ns,share,bandwidth",
        "dot | general,matmul,12,1234567.0,0.123,812.345",
        "'=add.1,elementwise,3,,,",
    ]


def test_json() -> None:
    assert msgspec.json.decode(document_bytes(TABLE.to_records())) == [
        {
            "name": "dot | general", "op_class": "matmul", "count": 12, "total_ns": 1234567.0,
            "share": 0.123456, "bandwidth": 812.345,
        },
        {
            "name": "=add.1", "op_class": "elementwise", "count": 3, "total_ns": None, "share": None,
            "bandwidth": None,
        },
    ]  # fmt: skip


def test_pandas_and_parquet(tmp_path: Path) -> None:
    frame = TABLE.to_pandas()
    assert list(frame) == [column.name for column in HEADER]
    assert frame["total_ns"].dtype == np.float64
    assert isnan(float(frame["bandwidth"].iloc[1]))
    TABLE.write_parquet(tmp_path / "t.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "t.parquet"), frame)


def test_columns_have_equal_lengths() -> None:
    with pytest.raises(InvariantError, match="column b does not have 1 rows"):
        Table((Column("a"), Column("b")), {"a": [1], "b": [1, 2]})


def test_a_table_without_rows_has_a_header() -> None:
    empty = table_from_rows(HEADER, [])
    assert (len(empty), empty.to_csv().count("\n"), len(empty.to_text())) == (0, 1, 1)
    assert list(empty.to_pandas()) == [column.name for column in HEADER]


def test_records_are_flattened() -> None:
    table = table_from_records([{"a": 1, "parts": {"x": 2.0}}, {"a": 2, "b": "text"}])
    assert list(table.tuples()) == [(1, 2.0, None), (2, None, "text")]
    assert [column.name for column in table.header] == ["a", "parts.x", "b"]


@given(st.lists(st.text(min_size=1), min_size=1))
def test_names_are_text_in_csv_and_markdown(names: list[str]) -> None:
    table = table_from_rows([Column("name", kind="code")], [(name,) for name in names])
    text = table.to_csv()
    rows = list(csv.reader(io.StringIO(text, newline="")))[1:]
    known = [name.encode("utf-8", "backslashreplace").decode() for name in names]
    assert [unescape_formula(cell) for (cell,) in rows] == known
    assert not any(re.match(r"[=@\t\r]", cell) for (cell,) in rows)
    lines = table.to_markdown().splitlines()
    assert len(lines) == len(names) + 2
    for line in lines[2:]:
        assert re.fullmatch(r"\| (`+) ?.*[^`]? ?\1 \|", line)
        assert len(re.findall(r"(?<!\\)\|", line)) == 2


@given(st.text())
def test_a_text_is_no_markup_in_markdown(text: str) -> None:
    [line] = table_from_rows([Column("x")], [(text,)]).to_markdown().splitlines()[2:]
    assert line.startswith("| `") or not set(line[2:-2]) & set("`<>*[]\\|#@!~&$")


def test_a_phrase_has_names_as_code() -> None:
    table = table_from_rows([Column("x")], [(Phrase((Name("a|b"), " over ", Name(""))),)])
    assert table.to_markdown().endswith("| `a\\|b` over `(unnamed)` |")
    assert table.to_text()[-1] == "a|b over"


def test_details_are_left_out_of_text_and_markdown() -> None:
    table = table_from_rows([Column("a"), Column("b", detail=1)], [("x", "y")])
    assert table.to_text() == ["a", "x"]
    assert "b" not in table.to_markdown()
    assert table.to_csv() == "a,b\nx,y\n"
