"""Tables with ambiguous or overflowing rows or columns: rejected with their position."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hespas import api
from hespas.files.limits import INPUT_BYTES_VARIABLE, Limits
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError
from hespas.measurements import LeftOut, columns, read_measurements
from hespas.measurements.read import read_operations
from hespas.operations import Labels
from hespas.validators.accuracy.tables import devices_of_tables
from tests.limits import cpu_limited

LAYERS = "Layer,IFMAP Height,IFMAP Width,Filter Height,Filter Width,Channels,Num Filter,Strides\n"
MEASURED = "hardware,kind,dtype,m,n,k,duration_us\nH100-SXM,matmul,bf16,8,8,8,5\n"


def written(tmp_path: Path, text: str, name: str = "t.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_table_without_rows_is_malformed_and_not_a_wrong_request(tmp_path: Path) -> None:
    path = written(tmp_path, "hardware,dtype,batch,m,n,k,n_entries,tflops,latency_us\n")
    with pytest.raises(FormatError, match=r"no row is a measured operation .the table is empty"):
        read_measurements(path)


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("m,n,k\n128,256,512,1024\n64,64,64,64\n", "row 1", "more fields"),
        ("m,n,k\n0,256,512,1024\n1,64,64,64\n", "row 1", "more fields"),
        ("m,m,n,k\n1,2,3,4\n", "header", "called 'm'"),
        ("m,M,n,k\n1,2,3,4\n", "header", "called 'm'"),
        ("m,n,k\n1,2,3\nx,2,3\n", "row 2", "not numeric"),
        pytest.param(f"m,n,k\n1,2,3\n{'9' * 401},2,3\n", "row 2", "not numeric", id="past all reals"),
        ("m,n,k\nTrue,False,True\n", "row 1", "booleans"),
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
        list(read_operations(written(tmp_path, text)))
    assert caught.value.position == position
    assert caught.value.hint


def test_lists_where_texts_belong_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pd.DataFrame({"kind": [["matmul"]], "dtype": ["bf16"], "m": [1], "n": [2], "k": [3]}).to_parquet(path)
    with pytest.raises(FormatError, match="'kind' is not text"):
        list(read_operations(path))


def test_a_comma_at_the_end_of_a_row_shifts_nothing(tmp_path: Path) -> None:
    [asked] = read_operations(written(tmp_path, "m,n,k\n128,256,512,\n64,32,16,\n"))
    ops = asked.ops
    np.testing.assert_array_equal(ops.dim("m"), [128, 64])
    np.testing.assert_array_equal(ops.dim("k"), [512, 16])


SIZES = {
    "-128": "m is negative",
    "0": "m is 0",
    "": "m is missing, or not a number",
    "nan": "m is missing, or not a number",
    "1e300": "m is above 2^63",
    "inf": "m is above 2^63",
    "8.5": "m is not a whole number",
}
TIMES = {
    "": "no duration, or NaN",
    "nan": "no duration, or NaN",
    "0": "a duration of 0",
    "-0.0": "a duration of 0",
    "-3": "a negative duration",
    "inf": "an infinite duration",
    "-inf": "a negative duration",
    "1e300": "a duration below 1 fs or above 292 years",
    "1e-300": "a duration below 1 fs or above 292 years",
}


@pytest.mark.parametrize("size", SIZES)
def test_a_measured_size_that_none_can_have_is_left_out_and_counted(tmp_path: Path, size: str) -> None:
    bad = f"H100-SXM,matmul,bf16,{size},512,512,9\n"
    found = read_measurements(written(tmp_path, MEASURED + bad + bad))
    assert found.duration_ns.tolist() == [5000.0]
    assert found.left_out == (LeftOut(SIZES[size], 2, 2),)


@pytest.mark.parametrize("time", TIMES)
def test_a_time_that_none_takes_is_left_out_and_counted(tmp_path: Path, time: str) -> None:
    found = read_measurements(written(tmp_path, MEASURED + f"H100-SXM,matmul,bf16,9,8,8,{time}\n"))
    assert found.duration_ns.tolist() == [5000.0]
    assert found.left_out == (LeftOut(TIMES[time], 1, 2),)


def test_times_that_contradict_each_other_are_left_out_and_counted(tmp_path: Path) -> None:
    """A coarser column may be rounded, and speaks where the finer is empty; it may not say something else."""
    head = "hardware,kind,dtype,m,n,k,duration_ns,latency_us\n"
    same = ("5123,5", "5123,5.123", "5123,5.1", "5123,", ",5.1", "400,0")
    other = ("5123,512.3", "5123,5123", "5,5", "5000,inf", "5000,-5", "-5000,5", "5123,7")
    rows = [f"H100-SXM,matmul,bf16,8,8,8,{times}\n" for times in (*same, *other)]
    found = read_measurements(written(tmp_path, head + "".join(rows)))
    assert found.duration_ns.tolist() == [5123, 5123, 5123, 5123, 5100, 400]
    assert {each.reason: each.count for each in found.left_out} == {
        "a negative duration": 1,
        "times that contradict other columns or rows": 6,
    }


def test_a_table_without_any_time_above_zero_says_so(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"a negative duration \(as in row 1\): 1") as caught:
        read_measurements(written(tmp_path, MEASURED.replace(",5\n", ",-5\n")))
    assert (caught.value.position, bool(caught.value.hint)) == ("row 1", True)


def test_rows_are_numbered_as_in_the_file_whatever_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "_BATCH_ROWS", 3)
    head = "hardware,kind,dtype,m,n,k,duration_us,split\n"
    rows = [f"H100-SXM,matmul,bf16,8,8,8,5,{'calib' if row % 2 else 'devval'}\n" for row in range(10)]
    rows[7] = rows[7].replace(",5,", ",0,")
    found = read_measurements(written(tmp_path, head + "".join(rows)), split="calib")
    assert (len(found), found.left_out) == (4, (LeftOut("a duration of 0", 1, 8),))
    rows[9] = rows[9].replace("matmul", "my_kind")
    with pytest.raises(FormatError, match="my_kind") as caught:
        read_measurements(written(tmp_path, head + "".join(rows)), split="calib")
    assert caught.value.position == "row 10"


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.parquet"])
def test_parts_of_a_table_are_read_as_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Kinds, devices and texts that look like numbers differ from part to part."""
    draw = np.random.default_rng(3)
    frame = pd.DataFrame(
        {
            "hardware": draw.choice(["H100-SXM", "my device"], 40),
            "kind": ["matmul"] * 20 + ["vector"] * 20,
            "op": [""] * 20 + ["relu", "add"] * 10,
            "dtype": draw.choice(["bf16", "f32"], 40),
            "variant": ["1.10"] * 10 + ["x"] * 30,
            **{size: draw.integers(1, 9, 40) for size in ("m", "n", "k", "rows", "columns")},
            "duration_us": draw.uniform(-0.2, 1, 40).round(3),
        }
    )
    path = tmp_path / name
    if name.endswith("parquet"):
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False)
    whole = read_measurements(path)
    monkeypatch.setattr(columns, "_BATCH_ROWS", 7)
    parts = read_measurements(path)
    assert "1.10" in whole.ops.variant.used()
    assert (parts.left_out, parts.name, parts.provenance) == (whole.left_out, whole.name, whole.provenance)
    assert len(whole) < 40
    for label in ("kind", "op", "scheme", "variant"):
        assert texts(getattr(parts.ops, label)) == texts(getattr(whole.ops, label))
    assert texts(parts.hardware) == texts(whole.hardware)
    assert set(parts.ops.dims) == set(whole.ops.dims)
    for size in whole.ops.dims:
        np.testing.assert_array_equal(parts.ops.dim(size), whole.ops.dim(size))
    for column in ("duration_ns", "spread_ns"):
        np.testing.assert_array_equal(getattr(parts, column), getattr(whole, column))
    for cost in ("flops", "transcendentals", "bytes_moved"):
        np.testing.assert_array_equal(getattr(parts.ops, cost), getattr(whole.ops, cost))


def texts(labels: Labels) -> list[str]:
    return [labels[row] for row in range(len(labels))]


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, parquet = tmp_path / "t.csv.gz", tmp_path / "t.parquet"
    packed.write_bytes(gzip.compress(b"m,n,k\n" + b"1,2,3\n" * 1000))
    pd.DataFrame({name: np.ones(1000) for name in "mnk"}).to_parquet(parquet)
    for path in (packed, parquet):
        assert sum(len(asked.ops) for asked in read_operations(path)) == 1000
    monkeypatch.setattr(columns, "limits", lambda: Limits(table_bytes=5500, table_rows_bytes=0))
    monkeypatch.setattr("hespas.files.streams.limits", lambda: Limits(packed_free_bytes=5500, packed_ratio=0))
    for path in (packed, parquet):
        assert path.stat().st_size < 5500
        with pytest.raises(FormatError, match=r"more than|1,000 rows in") as caught:
            list(read_operations(path))
        assert caught.value.hint
    bounds = Limits(table_free_bytes=0, table_ratio=0)
    monkeypatch.setattr(columns, "limits", lambda: bounds)
    with pytest.raises(FormatError, match="columns that unpack to"):
        list(read_operations(parquet))


def test_limits_of_tables_are_raised_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a Parquet file that are refused by default, and read where its user trusts it."""
    path = tmp_path / "t.parquet"
    pd.DataFrame({name: np.ones(2_200_000, np.int8) for name in "mnk"}).to_parquet(path)
    with pytest.raises(FormatError, match=r"2,200,000 rows in .* bytes, at most 2,09") as caught:
        next(read_operations(path))
    assert "`max_input_bytes`" in (caught.value.hint or "")
    monkeypatch.setenv(INPUT_BYTES_VARIABLE, "1000000000")
    assert len(next(read_operations(path)).ops)


def test_a_cell_that_names_a_device_is_no_path(tmp_path: Path) -> None:
    """Neither what lies there nor whether anything does is looked at: a pipe would never end."""
    os.mkfifo(tmp_path / "pipe.toml")
    for cell in ("/etc/passwd", str(tmp_path / "pipe.toml"), "../x.toml", "H100-SXM.toml"):
        table = read_measurements(written(tmp_path, MEASURED + f"{cell},matmul,bf16,8,8,8,5\n"))
        told = Diagnostics()
        assert list(devices_of_tables([table], (), told)) == ["H100-SXM"]
        assert [(each.code, each.location) for each in told] == [("accuracy.no-hardware-file", cell)]


def test_names_of_unknown_devices_cost_no_search_for_alike_ones(tmp_path: Path) -> None:
    rows = "".join(f"H{row}-SXM{row},matmul,bf16,8,8,8,5\n" for row in range(30_000))
    command = "import sys; from hespas.measurements import read_measurements as r; r(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", command, str(written(tmp_path, MEASURED + rows))], check=True,
        preexec_fn=cpu_limited(30),
    )  # fmt: skip


def test_memory_is_bounded_by_what_is_kept(tmp_path: Path) -> None:
    """Of 600,000 rows in two columns of texts and one of times nothing stays but those of one split."""
    path = tmp_path / "t.csv"
    row = "H100-SXM,matmul,bf16,8,8,8,5,{},padding of a column that nobody asked for\n"
    with path.open("w") as file:
        file.write("hardware,kind,dtype,m,n,k,duration_us,split,note\n")
        file.write(row.format("calib") * 10)
        file.writelines(row.format("devval") * 1000 for _ in range(600))
    command = (
        "import resource, sys; from hespas.measurements import read_measurements as r; "
        "import pandas, pyarrow.parquet; before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        "assert len(r(sys.argv[1], split='calib')) == 10; "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", command, str(path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 128 << 10  # KiB; the frame of the whole table has 300 MiB


@pytest.mark.parametrize(
    ("hardware", "estimator"),
    [
        ("H100-SXM", "calibrated"),
        ("H100-SXM", "composite"),
        ("H100-SXM", "learned"),
        ("TPU-v4", "systolic"),
    ],
)
@pytest.mark.parametrize(("batch", "kv_heads"), [(5e-324, 2), (2, 1e-320)])
def test_sizes_at_the_ends_of_numbers_are_estimated_without_a_warning(
    batch: float, kv_heads: float, hardware: str, estimator: str, tmp_path: Path
) -> None:
    header = "kind,dtype,batch,q_len,kv_len,heads,kv_heads,head_dim\n"
    row = f"attention.context,bf16,{batch!r},128,128,8,{kv_heads!r},64\n"
    table = written(tmp_path, header + row)
    done = api.estimate_table(table, hardware, estimator=estimator)
    assert [each.operations for each in done.totals] == [1]
