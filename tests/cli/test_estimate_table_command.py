"""``hespas estimate --table``: printed text, files and errors."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import pandas as pd
import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner, Result

from hespas import api
from hespas.cli.main import app
from hespas.measurements import read_measurements
from hespas.measurements.read import read_operations

ROOT = Path(__file__).parents[2]
STEP = ROOT / "fixtures" / "stablehlo" / "llama_fsdp_tp_local_N8.mlir.gz"
SCHEMA = json.loads((ROOT / "hespas" / "schemas" / "estimate_table.schema.json").read_text())
TABLES = ROOT.parent / "shared" / "data"

GAINED = ("duration_ns", "low_ns", "high_ns", "estimator", "basis")
PRODUCTS = "name,M,N,K\nfirst,512,512,512\n01,1024,1024,1024\nempty,0,4,4\n"
TOPOLOGY = (
    "Layer name, IFMAP Height, IFMAP Width, Filter Height, Filter Width, Channels, Num Filter, Strides,\n"
    "conv1, 8, 11, 3, 2, 4, 6, 2,\n"
)
TIDY = (
    "hardware,kind,op,dtype,m,n,k,rows,columns,ranks,message_bytes,ranks_per_node,duration_us\n"
    "H100-SXM,matmul,,bf16,512,512,512,,,,,,9.5\n"
    "H100-SXM,vector,add,bf16,,,,64,4096,,,,3.5\n"
    "H100-SXM,collective,all_reduce,bf16,,,,,,8,1000000,8,20\n"
)


class _Validator(Protocol):
    def validate(self, instance: object) -> None: ...


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["estimate", *(str(each) for each in arguments)])


def written(tmp_path: Path, text: str, name: str = "table.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def validated(path: Path) -> dict[str, object]:
    document = cast("dict[str, object]", json.loads(path.read_text()))
    Draft202012Validator.check_schema(SCHEMA)
    cast("_Validator", Draft202012Validator(SCHEMA)).validate(document)
    return document


def test_a_table_gains_cycles_and_times(tmp_path: Path) -> None:
    table, out, document = written(tmp_path, PRODUCTS), tmp_path / "o.csv", tmp_path / "o.json"
    arguments = ("--hardware", "tpu_v4", "--estimator", "systolic", "--array", "128x128", "--dataflow", "ws")
    done = run("--table", table, *arguments, "--out", out, "--json", document)
    assert done.exit_code == 0, done.output
    rows = rows_of(out)
    assert list(rows[0]) == ["name", "M", "N", "K", *GAINED, "cycles"]
    assert [row["cycles"] for row in rows] == ["14303", "89983", "0"]
    assert [row["name"] for row in rows] == ["first", "01", "empty"]
    assert [row["estimator"] for row in rows] == ["systolic"] * 3
    assert float(rows[0]["low_ns"]) < float(rows[0]["duration_ns"]) < float(rows[0]["high_ns"])
    assert "table.csv: 3 operations, 3" in done.stdout
    assert "matmul  bf16" in done.stdout
    assert "no column dtype: bf16 is assumed [table.no-dtype] (3 times)" in done.stderr
    sums = validated(document)
    assert (sums["hardware"], sums["operations"], sums["unknown"]) == ("TPU-v4", 3, 0)
    assert sums["estimator"] == "systolic:array=128x128,dataflow=ws"
    (kind,) = cast("list[dict[str, object]]", sums["kinds"])
    assert kind["cycles"] == 14_303 + 89_983
    assert sums["duration_ns"] == pytest.approx(sum(float(row["duration_ns"]) for row in rows))


def test_runs_of_the_simulator_as_a_table(tmp_path: Path) -> None:
    path = TABLES / "systolic_oracle.csv"
    if not path.exists():
        pytest.skip("the runs of the simulator are not beside the checkout")
    runs = pd.read_csv(path)
    for (rows, columns, flow), part in runs.groupby(["rows", "cols", "dataflow"]):
        table = tmp_path / "t.csv"
        part.to_csv(table, index=False)
        done = run(
            *(
                "--table",
                table,
                "--hardware",
                "TPU-v4",
                "--estimator",
                "systolic",
                "--out",
                tmp_path / "o.csv",
                "--overwrite",
            ),
            *("--array", f"{rows}x{columns}", "--dataflow", str(flow)),
        )
        assert done.exit_code == 0, done.output
        cycles = [int(row["cycles"]) for row in rows_of(tmp_path / "o.csv")]
        assert cycles == (part["total_cycles"] - part["stall_cycles"]).tolist()


def test_a_topology_of_the_simulator(tmp_path: Path) -> None:
    table = written(tmp_path, TOPOLOGY)
    done = run(
        *("--table", table, "--hardware", "TPU-v5e", "--estimator", "systolic:array=4x8", "--dataflow", "os"),
        *("--out", tmp_path / "o.csv"),
    )
    assert done.exit_code == 0, done.output
    (row,) = rows_of(tmp_path / "o.csv")
    # 24 places, 6 filters, windows of 24: 6 x 1 folds of 24 + 4 + 8 - 2.
    assert row["cycles"] == str(6 * 34 - 1)
    assert "[systolic.convolution]" in done.stderr
    assert "[systolic.derived-line]" in done.stderr


def test_rooflines_of_a_tidy_table(tmp_path: Path) -> None:
    table = written(tmp_path, TIDY)
    done = run(
        *("--table", table, "--hardware", "H200-SXM", "--estimator", "roofline"),
        *("--out", tmp_path / "o.csv", "--json", tmp_path / "j"),
    )
    assert done.exit_code == 0, done.output
    rows = rows_of(tmp_path / "o.csv")
    assert "cycles" not in rows[0]
    assert all(float(row["duration_ns"]) > 1000 for row in rows)
    assert [row["duration_us"] for row in rows] == ["9.5", "3.5", "20"]
    sums = validated(tmp_path / "j")
    kinds = cast("list[dict[str, object]]", sums["kinds"])
    assert [row["kind"] for row in kinds] == ["matmul", "vector", "collective"]
    assert [row["cycles"] for row in kinds] == [None] * 3
    assert [row["estimators"] for row in kinds] == [["roofline"]] * 3


def test_own_columns_of_the_same_name_are_kept(tmp_path: Path) -> None:
    text = PRODUCTS.replace("name", "duration_ns")
    done = run("--table", written(tmp_path, text), "--hardware", "H100-SXM", "--out", tmp_path / "o.csv")
    assert done.exit_code == 0, done.output
    rows = rows_of(tmp_path / "o.csv")
    assert [row["table_duration_ns"] for row in rows] == ["first", "01", "empty"]
    assert "duration_ns as table_duration_ns [table.renamed-column]" in done.stderr


def test_parquet_and_times_that_are_not_asked_for(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"kind": ["matmul"] * 2, "dtype": ["f16", "f16"], "m": [8, 8], "n": [8, 9], "k": [8, 8]}
    )
    frame.to_parquet(tmp_path / "t.parquet")
    done = run("--table", tmp_path / "t.parquet", "--hardware", "TPU-v4", "--out", tmp_path / "o.csv")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    assert [row["m"] for row in rows_of(tmp_path / "o.csv")] == ["8", "8"]


def test_unknown_stays_empty_and_is_counted(tmp_path: Path) -> None:
    table = written(tmp_path, TIDY)
    done = run(
        *("--table", table, "--hardware", "H100-SXM", "--estimator", "systolic"),
        *("--out", tmp_path / "o.csv", "--json", tmp_path / "j.json"),
    )
    assert done.exit_code == 0, done.output
    assert {row["duration_ns"] + row["estimator"] + row["cycles"] for row in rows_of(tmp_path / "o.csv")} == {
        ""
    }
    assert "no systolic array" in done.stderr
    assert "unknown on H100-SXM" in done.stdout
    sums = validated(tmp_path / "j.json")
    assert (sums["unknown"], sums["duration_ns"]) == (3, None)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 2, "SRC or --table is required"),
        ((STEP, "--table", "t.csv"), 2, "SRC and --table exclude each other"),
        (("--table", "t.csv", "--from", "hlo"), 2, "--from and --table"),
        (("--table", "t.csv", "--num-devices", "2"), 2, "--num-devices and --table"),
        (("--table", "t.csv", "--array", "4x4"), 2, "estimator 'auto' has no option --array"),
        (
            ("--table", "t.csv", "--estimator", "systolic", "--array", "4by4"),
            2,
            "is not the shape of an array",
        ),
        (("--table", "t.csv", "--estimator", "systolic", "--dataflow", "rs"), 2, "is not a dataflow"),
        (("--table", "t.csv", "--estimator", "nobody"), 2, "nobody"),
        (("--table", "t.csv", "--out", "t.csv"), 2, "--out names the same file as --table"),
        (("--table", "absent.csv"), 3, "No such file or directory"),
        (("--table", "other.csv"), 3, "do not match any known table of operations"),
        (("--table", "negative.csv"), 3, "negative.csv: row 2: m is -4"),
        (("--table", "text.csv"), 3, "column 'm' is not numeric"),
        (("--table", "infinite.csv"), 3, "infinite.csv: row 3: column 'm' is not numeric"),
        (("--table", "none.csv"), 3, "no rows"),
        (("--table", "binary.parquet"), 3, "not a table"),
    ],
)
def test_what_is_refused(
    arguments: tuple[str | Path, ...], code: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, PRODUCTS, "t.csv")
    written(tmp_path, "a,b\n1,2\n", "other.csv")
    written(tmp_path, "m,n,k\n1,1,1\n-4,1,1\n", "negative.csv")
    written(tmp_path, "m,n,k\none,1,1\n", "text.csv")
    written(tmp_path, "m,n,k\ninf,1,1\n2,1,1\none,1,1\n", "infinite.csv")
    written(tmp_path, "m,n,k\n", "none.csv")
    written(tmp_path, "PAR1 and nothing", "binary.parquet")
    before = sorted(path.name for path in tmp_path.iterdir())
    done = run(*arguments, "--hardware", "TPU-v4")
    assert done.exit_code == code, done.output
    assert text in done.stderr
    assert "Traceback" not in done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_programs_take_the_array_too(tmp_path: Path) -> None:
    done = run(
        STEP,
        "--hardware",
        "TPU-v4",
        "--estimator",
        "systolic",
        "--array",
        "128x128",
        "--json",
        tmp_path / "j",
    )
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "j").read_text())["estimator"] == "systolic:array=128x128"


@pytest.mark.parametrize("name", ["tpuv4_matmul.csv.gz", "vidur_compute.parquet", "neusight_conv.parquet"])
def test_measured_tables_are_asked_like_any(name: str) -> None:
    path = TABLES / "groundtruth" / name
    if not path.exists():
        pytest.skip("the tables of measurements are not beside the checkout")
    measured = read_measurements(path)
    done = api.estimate_table(path, "TPU-v4", estimator="systolic")
    assert len(done.prediction.duration_ns) >= len(measured)
    assert done.cycles is not None
    asked = list(read_operations(path))
    kinds = [each.ops.kind[row] for each in asked for row in range(len(each.ops))]
    products = np.flatnonzero(np.isin(kinds, ("matmul", "convolution")))
    assert np.isfinite(done.cycles[products]).all()
    assert np.isfinite(done.prediction.duration_ns[products]).all()


def test_a_name_in_parquet_gets_a_parquet_file(tmp_path: Path) -> None:
    """The same rows as the CSV file, also of a program."""
    table = tmp_path / "t.csv"
    table.write_text("kind,m,n,k,dtype\nmatmul,64,128,256,bf16\nmatmul,512,512,512,bf16\n", encoding="utf-8")
    program = Path(__file__).parents[2] / "fixtures" / "stablehlo" / "mlp.mlir"
    for source in (("--table", table), (program,)):
        frames: list[pd.DataFrame] = []
        for name, read in (("o.csv", pd.read_csv), ("o.parquet", pd.read_parquet)):
            out = tmp_path / name
            done = run(*source, "--hardware", "H100-SXM", "--out", out, "--overwrite")
            assert done.exit_code == 0, done.output
            frames.append(read(out))
        assert list(frames[0].columns) == list(frames[1].columns)
        assert frames[0]["duration_ns"].tolist() == frames[1]["duration_ns"].tolist()
