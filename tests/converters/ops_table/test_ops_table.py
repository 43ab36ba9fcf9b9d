"""Tables of measured operations: declared columns read back exactly, other columns are not lost silently."""

from __future__ import annotations

import csv
import gc
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from hespas.converters import sniff
from hespas.converters.format import ReadOptions, WriteOptions
from hespas.converters.measured_ops.build import costed_ops
from hespas.converters.ops_table import FORMAT
from hespas.graph import Diagnostics, OpClass, Profile, StringTable
from hespas.graph.errors import FormatError, HespasError, UsageError
from hespas.measurements import COLUMNS
from tests.converters.tracks.samples import HOSTILE, measured, profiles, simulated

DATA = Path(__file__).parents[3].parent / "shared" / "data" / "groundtruth"
absent = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not here")

pa: Any = import_module("pyarrow")
pq: Any = import_module("pyarrow.parquet")

SUFFIXES = ("csv", "csv.gz", "parquet")
Row = tuple[object, ...]


def write(profile: Profile, path: Path, diagnostics: Diagnostics | None = None) -> Path:
    assert FORMAT.write is not None
    found = Diagnostics() if diagnostics is None else diagnostics
    FORMAT.write(profile, path, WriteOptions(name=path.name), found)
    return path


def read(path: Path, diagnostics: Diagnostics | None = None) -> Profile:
    assert FORMAT.read is not None
    profile = FORMAT.read(path, ReadOptions(), Diagnostics() if diagnostics is None else diagnostics)
    assert isinstance(profile, Profile)
    return profile


def rows(profile: Profile) -> list[Row]:
    """The declared columns of each event in order, unknown as None."""
    text = list(profile.strings)
    columns: list[list[object]] = [
        [profile.devices[index] for index in profile.device_index.tolist()],
        [text[row] for row in profile.op_id.tolist()],
        [OpClass(code).name for code in profile.op_class.tolist()],
        [text[row] for row in profile.kernel_id.tolist()],
        profile.rank.tolist(),
        profile.stream.tolist(),
        [None if np.isnan(time) else time for time in profile.start_ns.tolist()],
        [None if np.isnan(time) else time for time in profile.duration_ns.tolist()],
        [text[row] for row in profile.dtype_id.tolist()],
        [text[row] for row in profile.shapes_id.tolist()],
    ]
    return list(zip(*columns, strict=True))


def table(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_golden_file(tmp_path: Path) -> None:
    diagnostics = Diagnostics()
    path = write(measured(), tmp_path / "measured.csv", diagnostics)
    assert path.read_bytes() == (Path(__file__).parent / "measured.csv").read_bytes()
    with path.open(newline="") as stream:
        assert next(csv.reader(stream)) == list(COLUMNS)
    assert diagnostics.counts() == {"ops-table.no-column": 6, "ops-table.host-operations": 2}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_of_one_operation_are_costed_once(suffix: str, tmp_path: Path) -> None:
    shapes, dtypes = "[[4, 8],\n [8, 2]]", '["float", "float"]'
    strides, values = "[[8, 1], [1, 8]]", '["", ""]'
    profile = measured()
    texts = StringTable.from_strings([*profile.strings, shapes, dtypes, strides, values])
    first = len(profile.strings)
    names = ("shapes_id", "dtype_id", "strides_id", "values_id")
    inputs = [np.array([0, first + at], np.int32) for at in range(len(names))]
    host = replace(
        profile.host, shapes_id=inputs[0], dtype_id=inputs[1], strides_id=inputs[2], values_id=inputs[3]
    )
    both = np.array([2, 2, 0], np.int32)
    profile = replace(
        profile, strings=texts, host=host, op_id=both, host_event=np.array([1, 1, -1], np.int32),
        shapes_id=np.where(both > 0, first, 0).astype(np.int32),
        dtype_id=np.where(both > 0, first + 1, 0).astype(np.int32),
    )  # fmt: skip
    path = write(profile, tmp_path / f"t.{suffix}")
    back = read(path)
    assert back.host_event.tolist() == [0, 0, -1]
    told = [back.strings[int(getattr(back.host, name)[0])] for name in names]
    assert told == ["[[4, 8], [8, 2]]", dtypes, strides, values]
    assert np.nansum(costed_ops(back).graph.flops) == 2 * 4 * 8 * 2


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_profile_reads_back(suffix: str, tmp_path: Path) -> None:
    path = write(measured(), tmp_path / f"t.{suffix}")
    diagnostics = Diagnostics()
    assert rows(read(path, diagnostics)) == rows(measured())
    assert diagnostics.counts() == {}
    assert sniff(path) is FORMAT


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(max_examples=40)
@given(profile=profiles())
def test_any_declared_column_reads_back_exactly(suffix: str, profile: Profile, tmp_path: Path) -> None:
    assert rows(read(write(profile, tmp_path / f"t.{suffix}"))) == rows(profile)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_hostile_names_and_what_is_unknown(suffix: str, tmp_path: Path) -> None:
    names = [*HOSTILE, "NA", "null", "-1", "half \udc80 pair"]
    count = len(names)
    profile = Profile.of(
        "p", ("a", "", 'c "d"'), StringTable.from_strings(["", *names]),
        start_ns=np.full(count, np.nan), duration_ns=np.full(count, np.nan),
        op_id=np.arange(1, count + 1, dtype=np.int32), kernel_id=np.arange(count, dtype=np.int32),
        rank=np.full(count, -1, np.int32), stream=np.full(count, (1 << 62) + 1, np.int64),
        device_index=np.arange(count, dtype=np.int32) % 3,
    )  # fmt: skip
    diagnostics = Diagnostics()
    back = read(write(profile, tmp_path / f"t.{suffix}"), diagnostics)
    expected = rows(profile)
    *sound, (hardware, op, *rest) = expected
    assert rows(back) == [*sound, (hardware, str(op).replace("\udc80", "\ufffd" * 3), *rest)]
    assert back.devices == ("a", "", 'c "d"')
    assert diagnostics.counts() == {"ops-table.no-duration": count}


@pytest.mark.parametrize(
    ("column", "written", "expected"),
    [
        ("duration_ns", "12.5", 12.5), ("duration_us", "3.3", 3300.0), ("duration_ms", "0.001", 1000.0),
        ("duration_s", "2", 2e9), ("latency_us", "4.35", 4350.0), ("latency_ns", "7", 7.0),
    ],
)  # fmt: skip
def test_durations_come_in_several_units(column: str, written: str, expected: float, tmp_path: Path) -> None:
    profile = read(table(tmp_path / "t.csv", f"op,{column}\ngelu,{written}\n"))
    assert profile.duration_ns.tolist() == [expected]
    assert np.isnan(profile.start_ns).all()
    assert (profile.rank.tolist(), profile.stream.tolist()) == ([0], [-1])


def test_columns_that_are_not_ours_are_reported_by_name(tmp_path: Path) -> None:
    diagnostics = Diagnostics()
    path = table(tmp_path / "t.csv", "\ufeffhardware,op,m,n,latency_us,op_class\r\nh100,mm,4,8,1,gemm\r\n")
    profile = read(path, diagnostics)
    assert profile.devices == ("h100",)
    assert diagnostics.counts() == {"ops-table.unknown-column": 2, "ops-table.unknown-class": 1}
    assert ["m, n" in entry.message for entry in diagnostics if "column" in entry.code] == [True]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("op,time", "no column of durations; the columns are op, time"),
        ("m,n,latency_us", "no column op or kernel"),
        ("op,latency_us,duration_ns", "several columns of durations"),
        ("op,op,latency_us", "'op' appears twice"),
    ],
)
def test_a_table_that_does_not_tell_what_it_must_names_what_is_expected(
    header: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        read(table(tmp_path / "t.csv", f"{header}\n1,2,3\n"))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"op,latency_us\na,1\nb,soon\n", 3),
        (b'op,latency_us\n"two\nlines",1\nb,\x00\n', 4),
        (b"op,latency_us\na,1\nb\n", 3),
        (b"op,latency_us\na,1\nb\xff,2\n", 3),
        (b"op,latency_us\na,1\n" + b"x" * 9_000_000 + b",1\n", 3),
        (b"op,latency_us,rank\na,1,1.5\n", 2),
        (b"op,latency_us,stream\na,1,99999999999999999999\n", 2),
    ],
)
def test_a_broken_line_is_named(text: bytes, line: int, tmp_path: Path) -> None:
    with pytest.raises(FormatError) as caught:
        read(table(tmp_path / "t.csv", text))
    assert caught.value.position == f"line {line}"


@pytest.mark.parametrize(
    ("text", "column", "row"),
    [
        (b"op,start_ns,duration_ns\na,0,1\nb,inf,1\n", "start_ns", 2),
        (b"op,start_ns,duration_ns\na,0,-inf\n", "duration_ns", 1),
        (b"op,latency_s\na,1\nb,2\nc,1e300\n", "latency_s", 3),
        (b"op,latency_s\na,1e308\n", "latency_s", 1),
        (b"op,start_ns,duration_ns\na,2.4e18,1\n", "start_ns", 1),
    ],
)
def test_times_that_no_clock_shows_are_refused(text: bytes, column: str, row: int, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(text)
    with pytest.raises(FormatError, match=f"column {column} holds a time too large") as caught:
        read(path)
    assert caught.value.position == f"row {row}"


@pytest.mark.parametrize(
    "text", [b"op,latency_us\n", b"\n", b"op", b'"op,latency_us', b"x" * 2_000_000, b"op,latency_us\n\n"]
)
def test_what_is_no_table_is_refused(text: bytes, tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        read(table(tmp_path / "t.csv", text))


def test_parquet_of_other_types(tmp_path: Path) -> None:
    columns = {
        "op": pa.array(["a", None]).dictionary_encode(), "latency_ms": pa.array([1, 2], pa.int32()),
        "rank": pa.array([0.0, None]), "stream": pa.array([7, 8], pa.uint8()), "dtype": pa.nulls(2),
        "kernel": pa.array(["k", "k"], pa.large_string()),
    }  # fmt: skip
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table(columns), path)
    profile = read(path)
    assert rows(profile) == [
        ("", "a", "UNKNOWN", "k", 0, 7, None, 1e6, "", ""),
        ("", "", "UNKNOWN", "k", -1, 8, None, 2e6, "", ""),
    ]


@pytest.mark.parametrize(
    ("column", "values"),
    [("op", pa.array([1, 2])), ("duration_ns", pa.array(["a", "b"])), ("rank", pa.array([0.5, 1.0])),
     ("stream", pa.array([1, 1 << 63], pa.uint64())), ("op", pa.array([[1], [2]])),
     ("kernel", pa.array([1, 2]).dictionary_encode()), ("rank", pa.array([1, 1 << 40]))],
)  # fmt: skip
def test_parquet_of_wrong_types_names_the_column(column: str, values: Any, tmp_path: Path) -> None:
    columns = {"op": pa.array(["a", "b"]), "duration_ns": pa.array([1.0, 2.0])} | {column: values}
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(FormatError) as caught:
        read(path)
    assert caught.value.position == f"column {column!r}"


def test_a_parquet_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    batch = pa.record_batch({"op": pa.array(["a"] * 100_000), "duration_ns": pa.array(np.ones(100_000))})
    with pq.ParquetWriter(path, batch.schema) as writer:
        for _ in range(40):
            writer.write_batch(batch, row_group_size=100_000)
    assert path.stat().st_size < 200_000
    with pytest.raises(FormatError, match=r"4,000,000 rows in .* bytes, at most"):
        read(path)


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "parquet"])
def test_damaged_files_are_format_errors(suffix: str, tmp_path: Path) -> None:
    sound = write(measured(), tmp_path / f"t.{suffix}").read_bytes()
    path, rng = tmp_path / f"broken.{suffix}", Random(0)
    for cut in range(0, len(sound), 1 if len(sound) < 300 else 9):
        path.write_bytes(sound[:cut])
        with suppress(HespasError):  # a table cut between two lines is a table
            read(path)
    for _ in range(200):
        data = bytearray(sound)
        for _ in range(rng.choice((1, 3))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        with suppress(HespasError):
            read(path)


def test_a_workload_and_packed_parquet_are_refused(tmp_path: Path) -> None:
    assert FORMAT.write is not None
    with pytest.raises(UsageError, match="not a workload"):
        FORMAT.write(simulated()[1], tmp_path / "t.csv", WriteOptions(), Diagnostics())
    with pytest.raises(UsageError, match="already compressed"):
        write(measured(), tmp_path / "t.parquet.gz")


@absent
def test_tables_with_other_columns_are_told_from_ours() -> None:
    with pytest.raises(FormatError, match="no column op or kernel; the columns are hardware"):
        read(DATA / "aiconfigurator_gemm.parquet")
    with pytest.raises(FormatError, match="no column of durations"):
        read(DATA / "tpuv4_nongemm.csv.gz")
    diagnostics = Diagnostics()
    profile = read(DATA / "neusight_perop.parquet", diagnostics)
    assert len(profile) == 185_317
    assert len(profile.devices) == 7
    assert diagnostics.counts()["ops-table.unknown-column"] == 7


def _one_text(path: Path, text: str, rows: int = 1) -> Path:
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))
    content = pa.table({"op": texts, "duration_ns": [5.0] * rows})
    pq.write_table(content, path, compression="zstd", store_schema=False)
    return path


def test_a_text_that_unpacks_to_far_more_than_the_file_is_refused(tmp_path: Path) -> None:
    path = _one_text(tmp_path / "t.parquet", "x" * (70 << 20))
    assert path.stat().st_size < 10_000
    with pytest.raises(FormatError, match="unpack to 73,4"):
        read(path)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_text_longer_than_any_name_is_refused(suffix: str, tmp_path: Path) -> None:
    path, text = tmp_path / f"t.{suffix}", "x" * ((1 << 20) + 1)
    if suffix == "csv":
        table(path, f"op,duration_ns\n{text},5\n")
    else:
        _one_text(path, text)
    with pytest.raises(FormatError, match="column op holds a text of more than 1,048,576 characters"):
        read(path)


def test_a_long_text_of_many_rows_takes_its_space_once(tmp_path: Path) -> None:
    # Written out, the names of these rows would take 200 MB, more than is read from so small a file.
    profile = read(_one_text(tmp_path / "t.parquet", "x" * 100_000, rows=2_000))
    assert len(profile) == 2_000
    assert len(profile.strings[int(profile.op_id[-1])]) == 100_000


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_texts_of_several_row_groups_read_alike(kind: str, tmp_path: Path) -> None:
    names = [f"op{row % 7 if row < 500 else row}" for row in range(1000)] + [None]
    column = pa.array(names, pa.large_string() if kind == "large_string" else pa.string())
    column = column.dictionary_encode() if kind == "dictionary" else column
    path = tmp_path / "t.parquet"
    durations = pa.array([5.0] * len(names))
    pq.write_table(pa.table({"op": column, "duration_ns": durations}), path, row_group_size=300)
    profile = read(path)
    assert [profile.strings[row] for row in profile.op_id.tolist()] == [name or "" for name in names]


def test_what_arrow_reads_ahead_is_nothing_of_pythons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads let go of it when they are done, perhaps as Python ends: rc 134 once in a hundred runs."""
    path = tmp_path / "t.csv"
    path.write_text("hardware,op,duration_ns\n" + "H100-SXM,aten::mm,5\n" * 1000)
    reading: Any = import_module("pyarrow.csv")
    held: list[tuple[object, int]] = []
    gc.collect()
    before, read_plainly = pa.total_allocated_bytes(), reading.open_csv

    def told(source: object, **options: object) -> object:
        held.append((source, pa.total_allocated_bytes() - before))
        return read_plainly(source, **options)

    monkeypatch.setattr(reading, "open_csv", told)
    assert len(read(path)) == 1000
    [(source, size)] = held
    assert isinstance(source, pa.BufferReader)
    # Arrow's threads may let go of something else meanwhile.
    assert size >= path.stat().st_size // 2
