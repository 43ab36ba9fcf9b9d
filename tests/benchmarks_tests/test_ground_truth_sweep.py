"""A small sweep on this CPU, whose output the commands of the package read."""

from __future__ import annotations

import csv
import gzip
import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import hespas
from benchmarks.ground_truth import __main__ as command
from benchmarks.ground_truth.records import SCHEMA, Manifest
from benchmarks.ground_truth.sweep import FAMILIES, cases_of
from hespas.cli.validate import app
from hespas.graph import Profile
from hespas.hardware import load_device, write_device
from hespas.hardware.measure import cpu_name
from hespas.measurements import read_measurements
from tests.limits import SAFETY_S

ROOT = Path(__file__).parents[2]
ONLY = ("models", "gemm", "attention", "conv", "elementwise", "collectives")
REPEATS = 3


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the command has filled."""
    folder = tmp_path_factory.mktemp("sweep") / "here"
    arguments = ("--out", str(folder), "--scale", "tiny", "--only", ",".join(ONLY), "--repeats", str(REPEATS))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ground_truth", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=SAFETY_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def hardware(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A device called like this machine; its rates do not matter."""
    device = replace(load_device("H100-SXM"), name=cpu_name(), aliases=(), fits_of="")
    return write_device(device, tmp_path_factory.mktemp("hardware") / "cpu.toml")


def manifest(folder: Path) -> Manifest:
    return msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)


def run(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_document_says_what_was_measured_where_and_how_sure_it_is(sweep: Path) -> None:
    found = manifest(sweep)
    assert (found.schema, found.repeats, found.machine.hardware) == (SCHEMA, REPEATS, cpu_name())
    assert {"jax", "jaxlib", "numpy", "hespas"} <= set(found.machine.versions)
    assert {case.family for case in found.cases} == set(ONLY)
    assert [case.name for case in found.cases if case.fault] == []
    for case in found.cases:
        assert len(case.wall_ns) == REPEATS, case.name
        assert len(case.device_ns) == REPEATS or case.note, case.name
    assert found.noise["all"].cases == sum(bool(case.device_ns) for case in found.cases)
    assert 0 <= found.noise["all"].median <= found.noise["all"].p90


def test_files_are_packed_whole_and_name_no_place_of_this_machine(sweep: Path) -> None:
    found = manifest(sweep)
    assert found.bytes == sum(file.bytes for case in found.cases for file in case.files.values())
    for case in found.cases:
        assert set(case.files) == {"stablehlo", "hlo", "xplane"}
        for file in case.files.values():
            packed = (sweep / file.path).read_bytes()
            content = gzip.decompress(packed)
            assert (len(packed), hashlib.sha256(content).hexdigest()) == (file.bytes, file.sha256)
            assert str(ROOT).encode() not in content, file.path
            assert b"site-packages" not in content, file.path
    named = {file.path for case in found.cases for file in case.files.values()}
    assert {str(path.relative_to(sweep)) for path in sweep.rglob("*.gz")} == named


def test_a_row_is_one_operation_with_its_layout_and_every_repeat(sweep: Path) -> None:
    with (sweep / "operations.csv").open(newline="") as lines:
        rows = {row["case"]: row for row in csv.DictReader(lines)}
    row = rows["gemm-bf16-nn-4x16x32x16"]
    assert (row["kind"], row["batch"], row["m"], row["n"], row["k"]) == ("matmul", "4", "16", "32", "16")
    assert row["strides"] == "256,16,1 512,32,1 -> 512,32,1"
    assert row["shapes"].startswith("bf16[4,16,16] bf16[4,16,32] ->")
    times = [float(row[f"device_us_{turn}"]) for turn in range(1, REPEATS + 1)]
    assert float(row["latency_us"]) == pytest.approx(median(times))
    # One device sends nothing: programs of collectives and models are kept, and are no rows.
    assert {row["family"] for row in rows.values()} == set(ONLY) - {"models", "collectives"}


def test_the_table_is_one_of_measured_operations(sweep: Path) -> None:
    found = read_measurements(sweep / "operations.csv")
    kinds = {"matmul", "attention.context", "attention.generation", "convolution", "vector"}
    assert set(found.ops.kind.used()) == kinds
    assert set(found.split.used()) == {"calib", "devval"}
    assert set(found.hardware.used()) == {cpu_name()}
    assert np.isfinite(found.spread_ns).all()
    assert np.isfinite(found.ops.flops).all()
    assert (found.ops.bytes_moved > 0).all()


def test_estimates_are_compared_with_the_table_and_fitted_on_it(
    sweep: Path, hardware: Path, tmp_path: Path
) -> None:
    table = sweep / "operations.csv"
    said = run("accuracy", "--table", table, "--hardware", hardware, "--split", "devval")
    assert "vector f32" in said
    # A fit is used only if it improves held-out rows. Times of so few repeats are noise, so this table states
    # times that follow from the sizes.
    rows = pd.read_csv(table)
    for column in ("latency_us", *(f"device_us_{turn}" for turn in range(1, REPEATS + 1))):
        rows[column] = 5.0 + rows["rows"].fillna(1.0) / 4
    regular, out = tmp_path / "regular.csv", tmp_path / "fitted.toml"
    rows.to_csv(regular, index=False)
    run("calibrate", "--table", regular, "--hardware", hardware, "--out", out)
    assert [fit.kind for fit in load_device(out).fits if fit.kind == "vector"]


@pytest.mark.parametrize("program", ["mlir", "hlo.txt"])
def test_a_trace_is_compared_with_its_program(sweep: Path, hardware: Path, program: str) -> None:
    stem = sweep / "cases" / "models" / "models-mlp"
    trace = Path(f"{stem}.xplane.pb.gz")
    profile = hespas.read(trace)
    assert isinstance(profile, Profile)
    assert int(profile.run.max()) == REPEATS, "one execution more than repeats, counted from 0"
    said = run(
        "accuracy", "--measured", trace, "--workload", f"{stem}.{program}.gz", "--hardware", hardware,
        "--min-coverage", "0.9",
    )  # fmt: skip
    assert "busy" in said


def test_a_sweep_is_never_written_over(sweep: Path) -> None:
    before = (sweep / "manifest.json").read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ground_truth", "--out", str(sweep), "--scale", "tiny"],
        cwd=ROOT, capture_output=True, text=True, timeout=SAFETY_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--resume" in done.stderr
    assert (sweep / "manifest.json").read_bytes() == before


def test_every_family_can_be_asked_for_and_a_name_is_one_operation() -> None:
    names: tuple[str, ...] = getattr(command, "_FAMILIES")  # noqa: B009 - the command's own list
    assert names == tuple(FAMILIES)
    for scale in ("tiny", "small", "full"):
        cases = [case for family in FAMILIES for case in FAMILIES[family](scale)]
        named = {case.name: case for case in cases}
        assert all(named[case.name].columns == case.columns for case in cases), "one name, one operation"
        assert {case.family for case in cases} == set(FAMILIES)
    assert len(cases_of(["attention"], "full", gpu=False)) < len(cases_of(["attention"], "full", gpu=True))
