"""A file written as an ops-table is a table for ``--table``, and a tidy table is an ops-table."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hespas.api import convert, estimate_table
from hespas.converters import sniff
from hespas.converters.format import ReadOptions, WriteOptions
from hespas.converters.ops_table import FORMAT
from hespas.graph import Diagnostics, HostOps, OpClass, Profile, StringTable
from hespas.measurements import Measurements, read_measurements
from hespas.measurements.read import read_operations

SUFFIXES = ("csv", "csv.gz", "parquet")
TIDY = (
    "hardware,kind,op,dtype,variant,batch,m,n,k,rows,columns,latency_us\n"
    "H100-SXM,matmul,,bf16,cublas,1,16,4096,1024,,,12.5\n"
    "H100-SXM,matmul,,f16,,8,16,128,64,,,3\n"
    "A100-SXM-80GB,vector,add,bf16,,,,,,256,1024,4\n"
    "H100-SXM,normalization,layer_norm,bf16,,,,,,256,1024,6\n"
    "H100-SXM,vector,relu,f32,,,,,,1,64,0\n"
)


def events() -> Profile:
    """A product in two kernels, an addition, and a kernel of nobody."""
    texts = [
        "aten::mm",
        "gemm",
        "reduce",
        "aten::add",
        "add",
        "[[16, 1024], [1024, 4096]]",
        "[[16, 4096], [16, 4096], []]",
        '["c10::BFloat16", "c10::BFloat16"]',
        '["c10::BFloat16", "c10::BFloat16", "Scalar"]',
        '["", "", "1"]',
        "spin",
    ]
    row = {text: place for place, text in enumerate(["", *texts])}
    product = [row[texts[5]], row[texts[7]]]
    addition = [row[texts[6]], row[texts[8]]]
    host = HostOps(
        name_id=np.array([row["aten::mm"], row["aten::add"]], np.int32),
        thread_id=np.zeros(2, np.int32),
        parent=np.full(2, -1, np.int32),
        start_ns=np.full(2, np.nan),
        duration_ns=np.full(2, np.nan),
        sequence=np.full(2, -1, np.int64),
        shapes_id=np.array([product[0], addition[0]], np.int32),
        dtype_id=np.array([product[1], addition[1]], np.int32),
        strides_id=np.zeros(2, np.int32),
        values_id=np.array([0, row[texts[9]]], np.int32),
    )
    return Profile.of(
        "step",
        ("H100-SXM",),
        StringTable.from_strings(["", *texts]),
        start_ns=np.array([0.0, 10.0, 20.0, 30.0]),
        duration_ns=np.array([8000.0, 500.0, 3000.0, 700.0]),
        op_id=np.array([row["aten::mm"], row["aten::mm"], row["aten::add"], 0], np.int32),
        kernel_id=np.array([row["gemm"], row["reduce"], row["add"], row["spin"]], np.int32),
        dtype_id=np.array([product[1], product[1], addition[1], 0], np.int32),
        shapes_id=np.array([product[0], product[0], addition[0], 0], np.int32),
        op_class=np.array([OpClass.CONTRACTION] * 2 + [OpClass.ELEMENTWISE, 0], np.int8),
        device_index=np.zeros(4, np.int32),
        rank=np.zeros(4, np.int32),
        stream=np.full(4, 7, np.int64),
        host_event=np.array([0, 0, 1, -1], np.int32),
        host=host,
        metadata={},
    )


def written(path: Path) -> Path:
    assert FORMAT.write is not None
    FORMAT.write(events(), path, WriteOptions(name=path.name), Diagnostics())
    return path


def tidy(path: Path) -> Path:
    if path.suffix != ".parquet":
        pd: Any = import_module("pandas")
        plain = path.with_name("plain.csv")
        plain.write_text(TIDY)
        pd.read_csv(plain).to_csv(path, index=False)
        return path
    csv, parquet = import_module("pyarrow.csv"), import_module("pyarrow.parquet")
    plain = path.with_name("plain.csv")
    plain.write_text(TIDY)
    parquet.write_table(csv.read_csv(plain), path)
    return path


def described(found: Measurements, row: int) -> tuple[object, ...]:
    ops = found.ops
    sizes = tuple(float(ops.dim(name)[row]) for name in ("batch", "m", "n", "k"))
    return found.hardware[row], ops.kind[row], ops.scheme[row], sizes, float(found.duration_ns[row])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_events_are_measured_operations(suffix: str, tmp_path: Path) -> None:
    found = read_measurements(written(tmp_path / f"events.{suffix}"))
    assert found.recorded
    assert described(found, 0) == ("H100-SXM", "matmul", "bf16", (1.0, 16.0, 4096.0, 1024.0), 8500.0)
    assert (found.ops.kind[1], found.ops.op[1], found.duration_ns[1]) == ("vector", "add", 3000.0)
    assert found.ops.flops.tolist() == [2 * 16 * 4096 * 1024, 16 * 4096]
    assert [(each.count, each.row) for each in found.left_out] == [(2, 2)]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_events_are_estimated_once_per_operation(suffix: str, tmp_path: Path) -> None:
    path = written(tmp_path / f"events.{suffix}")
    assert [asked.kept.tolist() for asked in read_operations(path)] == [[True, False, True, False]]
    done = estimate_table(path, "H100-SXM", estimator="roofline")
    assert np.isnan(done.prediction.duration_ns).tolist() == [False, True, False, True]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_tidy_table_is_an_ops_table(suffix: str, tmp_path: Path) -> None:
    path, diagnostics = tidy(tmp_path / f"mine.{suffix}"), Diagnostics()
    assert FORMAT.read is not None
    profile = FORMAT.read(path, ReadOptions(), diagnostics)
    assert isinstance(profile, Profile)
    assert diagnostics.counts() == {"ops-table.left-out-row": 1}
    assert profile.devices == ("H100-SXM", "A100-SXM-80GB")
    assert [profile.strings[row] for row in profile.op_id.tolist()] == [
        "aten::mm",
        "aten::bmm",
        "aten::add",
        "layer_norm",
    ]
    assert [OpClass(code).name for code in profile.op_class.tolist()] == [
        "CONTRACTION",
        "CONTRACTION",
        "ELEMENTWISE",
        "NORMALIZATION",
    ]
    assert profile.duration_ns.tolist() == [12500.0, 3000.0, 4000.0, 6000.0]
    assert profile.strings[int(profile.kernel_id[0])] == "cublas"


@pytest.mark.parametrize("target", SUFFIXES)
@pytest.mark.parametrize("source", SUFFIXES)
def test_there_and_back_products_are_what_they_were(source: str, target: str, tmp_path: Path) -> None:
    before = tidy(tmp_path / f"mine.{source}")
    after = tmp_path / f"converted.{target}"
    convert(before, after)
    first, second = read_measurements(before), read_measurements(after)
    for row in (0, 1):
        assert described(second, row) == described(first, row)
        assert second.ops.flops[row] == first.ops.flops[row]
        assert second.ops.bytes_moved[row] == first.ops.bytes_moved[row]
    assert second.ops.op[2] == "add"
    assert second.ops.bytes_moved[2] == first.ops.bytes_moved[2] == 3 * 2 * 256 * 1024
    assert [each.count for each in second.left_out] == [1]  # a norm has no operands there


def test_a_tidy_table_is_told_by_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("hardware,kind,dtype,m,n,k,duration_ns\nH100-SXM,matmul,bf16,16,16,16,5\n")
    assert sniff(path) is FORMAT
