"""Tables with rows or columns that would be read as something else, or overflow: refused, and told where."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hespas.estimators.measurements import columns, read_measurements
from hespas.estimators.measurements.asked import read_asked
from hespas.files.limits import Limits
from hespas.graph.errors import FormatError

LAYERS = "Layer,IFMAP Height,IFMAP Width,Filter Height,Filter Width,Channels,Num Filter,Strides\n"
MEASURED = "hardware,kind,dtype,m,n,k,duration_us\nH100-SXM,matmul,bf16,8,8,8,5\n"


def written(tmp_path: Path, text: str, name: str = "t.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("m,n,k\n128,256,512,1024\n64,64,64,64\n", "row 1", "more fields"),
        ("m,n,k\n0,256,512,1024\n1,64,64,64\n", "row 1", "more fields"),
        ("m,m,n,k\n1,2,3,4\n", "header", "called 'm'"),
        ("m,M,n,k\n1,2,3,4\n", "header", "called 'm'"),
        ("m,n,k\n1,2,3\nx,2,3\n", "row 2", "no numbers"),
        ("m,n,k\nTrue,False,True\n", None, "true and false"),
        ("m,n,k\n1,2,3\n1e300,1e300,2\n", "row 2", "1e\\+300"),
        ("m,n,k\n-1,2,3\n", "row 1", "m is -1"),
        ("kind,dtype,op,elements,passes\nvector,bf16,add,8,-3\n", "row 1", "passes is -3"),
        (
            f"{LAYERS}a,9,9,3,3,3,4,1\nb,9,9,3,3,3,4,0\n",
            "row 2",
            "strides is 0",
        ),
    ],
)
def test_what_would_be_misread_is_refused(
    tmp_path: Path, text: str, position: str | None, message: str
) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        read_asked(written(tmp_path, text))
    assert caught.value.position == position
    assert caught.value.hint


def test_lists_where_texts_belong_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pd.DataFrame({"kind": [["matmul"]], "dtype": ["bf16"], "m": [1], "n": [2], "k": [3]}).to_parquet(path)
    with pytest.raises(FormatError, match="'kind' holds no texts"):
        read_asked(path)


def test_a_comma_at_the_end_of_a_row_shifts_nothing(tmp_path: Path) -> None:
    ops = read_asked(written(tmp_path, "m,n,k\n128,256,512,\n64,32,16,\n")).ops
    np.testing.assert_array_equal(ops.dim("m"), [128, 64])
    np.testing.assert_array_equal(ops.dim("k"), [512, 16])


@pytest.mark.parametrize("size", ["-128", "1e300", "inf"])
def test_a_measured_size_that_none_can_have_is_refused(tmp_path: Path, size: str) -> None:
    path = written(tmp_path, MEASURED + f"H100-SXM,matmul,bf16,{size},512,512,9\n")
    with pytest.raises(FormatError, match="m is") as caught:
        read_measurements(path)
    assert caught.value.position == "row 2"


@pytest.mark.parametrize("time", ["inf", "1e300", "1e-300"])
def test_a_time_that_none_takes_is_left_out_and_counted(tmp_path: Path, time: str) -> None:
    found = read_measurements(written(tmp_path, MEASURED + f"H100-SXM,matmul,bf16,9,8,8,{time}\n"))
    assert found.duration_ns.tolist() == [5000.0]
    assert found.left_out == (("a duration below 1 fs or beyond 292 years", 1),)


def test_a_table_without_any_time_above_zero_says_so(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no positive duration: 1"):
        read_measurements(written(tmp_path, MEASURED.replace(",5\n", ",-5\n")))


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, parquet = tmp_path / "t.csv.gz", tmp_path / "t.parquet"
    packed.write_bytes(gzip.compress(b"m,n,k\n" + b"1,2,3\n" * 1000))
    pd.DataFrame({name: np.ones(1000) for name in "mnk"}).to_parquet(parquet)
    assert len(read_asked(packed).ops) == len(read_asked(parquet).ops) == 1000
    monkeypatch.setattr(columns, "limits", lambda: Limits(table_bytes=5500))
    for path in (packed, parquet):
        assert path.stat().st_size < 5500
        with pytest.raises(FormatError, match=r"larger than|more than 5,500"):
            read_asked(path)
