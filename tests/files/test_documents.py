"""Spreadsheet cells: no formulas, and values that read back unchanged."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas import api
from hespas.files.documents import document_bytes, encode_json, escape_cell, escape_formula, unescape_formula
from hespas.graph import OpClass, Profile
from hespas.graph.columns import StringTable

HARMFUL = ("=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\tx", "\rx", "'=1", "''@x", "=", "-x")


@pytest.mark.parametrize("text", HARMFUL)
def test_what_begins_a_formula_is_text(text: str) -> None:
    assert escape_formula(text) == f"'{text}"
    assert unescape_formula(escape_formula(text)) == text


@pytest.mark.parametrize("text", ["-5", "+1.5", "-1e-9", "-inf", "aten::mm", "", "'quoted'", "a=b", " =x"])
def test_numbers_and_other_texts_stay(text: str) -> None:
    assert escape_formula(text) == text == unescape_formula(text)


def test_other_cells_stay() -> None:
    assert [escape_cell(cell) for cell in (-1, 2.5, None, "=x")] == [-1, 2.5, None, "'=x"]


@given(st.text(alphabet="'=+-@\t\r1.e x", max_size=6))
def test_every_text_comes_back(text: str) -> None:
    assert unescape_formula(escape_formula(text)) == text
    assert escape_formula(text)[:1] not in {"=", "@", "\t", "\r"}


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.parquet"])
def test_a_table_of_events_gives_names_back(name: str, tmp_path: Path) -> None:
    texts = ("", *HARMFUL)
    count = len(HARMFUL)
    rows = np.arange(1, count + 1, dtype=np.int32)
    profile = Profile.of(
        "t", ("=DEVICE()",), StringTable.from_strings(texts),
        start_ns=np.arange(count, dtype=np.float64), duration_ns=np.ones(count), op_id=rows, kernel_id=rows,
        op_class=np.full(count, int(OpClass.UNKNOWN), np.int8), device_index=np.zeros(count, np.int32),
    )  # fmt: skip
    api.write(profile, tmp_path / name)
    again = api.read(tmp_path / name)
    assert isinstance(again, Profile)
    assert [again.strings[row] for row in again.op_id.tolist()] == list(HARMFUL)
    assert [again.strings[row] for row in again.kernel_id.tolist()] == list(HARMFUL)
    assert again.devices == ("=DEVICE()",)
    if name == "t.csv":
        cells = (tmp_path / name).read_text().split(",")
        assert not [cell for cell in cells if cell.strip('"')[:1] in {"=", "@", "+"}]


class _Row(msgspec.Struct):
    count: int
    time_ns: float
    name: str = ""


@pytest.mark.parametrize("name", ["plain", "byte \udcff of a file"])
def test_every_document_is_json_that_can_be_read(name: str) -> None:
    """Values of NumPy, numbers that JSON has not, and names that UTF-8 cannot hold, with each other."""
    rows: list[object] = [
        _Row(np.int64(3), np.float64(2.5), name),  # type: ignore[arg-type] # as a careless caller gives it
        _Row(4, np.float64("nan"), name),
        {"sizes": np.arange(2), "least": np.float32("-inf"), "is": np.bool_(True), name: Path("a") / "b"},
    ]
    shown = name.replace("\udcff", "\\udcff")
    expected = [
        {"count": 3, "time_ns": 2.5, "name": shown},
        {"count": 4, "time_ns": None, "name": shown},
        {"sizes": [0, 1], "least": None, "is": True, shown: "a/b"},
    ]
    assert msgspec.json.decode(encode_json(rows)) == expected
    assert msgspec.json.decode(document_bytes(rows)) == expected
    assert document_bytes(rows).decode("utf-8").endswith("]\n")


def test_a_value_without_json_is_an_error_of_ours() -> None:
    with pytest.raises(NotImplementedError, match="values of type object have no JSON form"):
        document_bytes([object()])
