"""Malformed device files: errors give file, key path, expectation and fix."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hespas.graph.errors import FormatError
from hespas.hardware import load_device
from hespas.hardware.library import DATA_FOLDER
from tests.limits import cpu_limited

GOOD = """\
name = "Test"
vendor = "Nobody"
family = "None"
kind = "gpu"
description = "a device for tests"
aliases = ["t1"]
units = 4
unit_name = "SM"
launch_overhead_ns = 1000
launch_overhead_source = "here"
subbyte_storage = "packed"
peaks = [
  { unit = "matrix", dtype = "bf16", flops_per_s = 2e12, density = "dense", source = "here" },
  { unit = "vector", dtype = "f32", flops_per_s = 1e12, density = "dense", source = "here" },
]
memories = [
  { level = "main", name = "HBM", capacity_bytes = 1024, bandwidth_bytes_per_s = 1e12, source = "here" },
  { level = "cache", name = "L2", capacity_bytes = -1, bandwidth_bytes_per_s = nan, source = "here" },
]
links = [
  { name = "wire", kind = "scale_up", bandwidth_bytes_per_s = 1e9, latency_ns = nan, topology = "ring", \
links_per_device = 2, devices_per_domain = -1, source = "here", latency_source = "here" },
]
efficiencies = [
  { op_class = "contraction", dtype = "bf16", compute = 0.7, memory = 0.8, t0_ns = 3000.0, provenance = "x" },
]
systolic = { rows = 8, columns = 8, arrays = 1, clock_hz = 1e9, dataflow = "ws", source = "here" }
[sources]
here = "this test, dense"
"""


def _load(tmp_path: Path, text: str) -> FormatError:
    path = tmp_path / "bad.toml"
    path.write_text(text, "utf-8")
    with pytest.raises(FormatError) as caught:
        load_device(path)
    assert caught.value.path == str(path)
    assert caught.value.position
    assert caught.value.hint
    return caught.value


def test_the_good_file_is_good(tmp_path: Path) -> None:
    path = tmp_path / "good.toml"
    path.write_text(GOOD, "utf-8")
    device = load_device(path)
    assert (device.name, device.launch_overhead_ns, len(device.peaks)) == ("Test", 1000.0, 2)
    assert device.main_memory.name == "HBM"
    assert device.systolic is not None
    assert device.systolic.rows == 8


@pytest.mark.parametrize(
    ("old", "new", "position", "expected"),
    [
        # wrong type
        ("units = 4", 'units = "4"', "units", "expected a whole number, got '4'"),
        ("units = 4", "units = 4.0", "units", "expected a whole number, got 4.0"),
        ("units = 4", "units = true", "units", "expected a whole number, got True"),
        ('vendor = "Nobody"', "vendor = 3", "vendor", "expected a string, got 3"),
        ('aliases = ["t1"]', 'aliases = "t1"', "aliases", "expected a list, got 't1'"),
        ('aliases = ["t1"]', 'aliases = ["t1", 2]', "aliases[1]", "expected a string, got 2"),
        ("flops_per_s = 2e12", 'flops_per_s = "2e12"', "peaks[0].flops_per_s", "expected a number"),
        ("flops_per_s = 2e12", "flops_per_s = [1]", "peaks[0].flops_per_s", "expected a number, got a list"),
        ("peaks = [", "peaks = [ 7,", "peaks[0]", "expected a table, got 7"),
        ('here = "this test, dense"', "here = 1", "sources.here", "expected a string"),
        # missing
        ('kind = "gpu"\n', "", "kind", "missing key"),
        ('density = "dense", ', "", "peaks[0].density", "missing key"),
        ("capacity_bytes = 1024, ", "", "memories[0].capacity_bytes", "missing key"),
        ('[sources]\nhere = "this test, dense"\n', "", "sources", "missing key"),
        ('here = "this test, dense"\n', "", "sources", "expected at least one source"),
        ('vendor = "Nobody"', 'vendor = ""', "vendor", "not empty"),
        # out of range
        ("flops_per_s = 2e12", "flops_per_s = -2e12", "peaks[0].flops_per_s", "expected a positive number"),
        ("flops_per_s = 2e12", "flops_per_s = 0", "peaks[0].flops_per_s", "expected a positive number"),
        ("flops_per_s = 2e12", "flops_per_s = inf", "peaks[0].flops_per_s", "expected a positive number"),
        ("flops_per_s = 2e12", "flops_per_s = nan", "peaks[0].flops_per_s", "expected a positive number"),
        ("flops_per_s = 2e12", f"flops_per_s = {10**400}", "peaks[0].flops_per_s", "beyond 64 bits"),
        ("flops_per_s = 2e12", f"flops_per_s = {10**30}", "peaks[0].flops_per_s", "beyond 64 bits"),
        ("capacity_bytes = 1024", "capacity_bytes = 0", "memories[0].capacity_bytes", "positive whole"),
        ("capacity_bytes = 1024", f"capacity_bytes = {2**63}", "memories[0].capacity_bytes", "beyond 64"),
        ("bytes_per_s = 1e12", "bytes_per_s = nan", "memories[0].bandwidth_bytes_per_s", "positive"),
        ("launch_overhead_ns = 1000", "launch_overhead_ns = -1", "launch_overhead_ns", "0 or more or nan"),
        # not one of the allowed
        (
            'kind = "gpu"',
            'kind = "npu"',
            "kind",
            "expected one of gpu, tpu, cpu, accelerator, imc; got 'npu'",
        ),
        ('unit = "matrix"', 'unit = "tensor"', "peaks[0].unit", "expected one of matrix, vector"),
        ('topology = "ring"', 'topology = "star"', "links[0].topology", "expected one of switch, ring"),
        ('dataflow = "ws"', 'dataflow = "xx"', "systolic.dataflow", "expected one of os, ws, is"),
        ('dtype = "bf16", flops', 'dtype = "bfloat16", flops', "peaks[0].dtype", "MLIR's spelling"),
        ('dtype = "bf16", flops', 'dtype = "f17", flops', "peaks[0].dtype", "unknown element type 'f17'"),
        ('dtype = "bf16", compute', 'dtype = "x", compute', "efficiencies[0].dtype", "unknown element type"),
        # unknown keys
        ("units = 4", "units = 4\nunit = 5", "unit", "unknown key"),
        ('unit_name = "SM"', 'unit_name = "SM"\ncolour = 1', "colour", "unknown key"),
        ("capacity_bytes = 1024", "capacity_bytes = 1024, speed = 1", "memories[0].speed", "unknown key"),
        ("rows = 8", "rows = 8, row = 8", "systolic.row", "unknown key"),
        ("units = 4", 'units = 4\n"a` - at `$.peaks[0]" = 1', "a` - at `$.peaks[0]", "unknown key"),
        ("units = 4", 'units = 4\n"a` - at `$.nowhere[7].x" = 1', "a` - at `$.nowhere[7].x", "unknown key"),
        ("rows = 8", 'rows = 8, "$.peaks[0]" = 8', "systolic.$.peaks[0]", "unknown key"),
        ('density = "dense", source', 'density = "dense", energy_pj_per_flop = 1.0, source',
         "peaks[0].energy_source", "missing key"),
        ('density = "dense", source', 'density = "dense", energy_source = "here", source',
         "peaks[0].energy_source", "not stated"),
        ("latency_ns = nan", "latency_ns = nan, latency_us = 1", "links[0].latency_us", "unknown key"),
        ("t0_ns = 3000.0", "t0_ns = 3000.0, t0 = 3", "efficiencies[0].t0", "unknown key"),
        # sources
        ('1e12, density = "dense", source = "here"', '1e12, density = "dense", source = "there"',
         "peaks[1].source", "'there' is not a key of the sources table"),
        ('latency_source = "here"', 'latency_source = "x"', "links[0].latency_source", "not a key"),
        # sparse
        ('2e12, density = "dense"', '2e12, density = "sparse"', "peaks[0].density", "sparse peak"),
        # error correction
        ('capacity_bytes = -1,', 'capacity_bytes = -1, error_correction = "inline",',
         "memories[1].error_correction", "expected none for a memory of level 'cache'"),
        ('capacity_bytes = 1024,', 'capacity_bytes = 1024, error_correction = "x",',
         "memories[0].error_correction", "one of none, inline"),
        # rows together
        ('dtype = "f32"', 'dtype = "bf16"', "", ""),
        ('level = "cache"', 'level = "main"', "memories[1].bandwidth_bytes_per_s", "positive number"),
        ('level = "main"', 'level = "cache"', "memories", "exactly one row of level 'main', got 0"),
        ('unit = "vector", dtype = "f32"', 'unit = "matrix", dtype = "bf16"', "peaks[1]", "stated already"),
        ('name = "L2"', 'name = "HBM"', "memories[1]", "'HBM' is stated already in memories[0]"),
    ],
)  # fmt: skip
def test_fault_names_file_key_and_expectation(
    tmp_path: Path, old: str, new: str, position: str, expected: str
) -> None:
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    if not position:  # the same type on two units is two rows
        (tmp_path / "fine.toml").write_text(text, "utf-8")
        assert load_device(tmp_path / "fine.toml").peaks[1].dtype == "bf16"
        return
    error = _load(tmp_path, text)
    assert error.position == position
    assert expected in error.message


def test_all_missing_keys_of_a_row_are_listed(tmp_path: Path) -> None:
    error = _load(tmp_path, GOOD.replace("capacity_bytes = 1024, bandwidth_bytes_per_s = 1e12, ", "", 1))
    assert error.position == "memories[0].capacity_bytes"
    assert error.hint
    assert "add capacity_bytes = -1; also missing: bandwidth_bytes_per_s; " in error.hint


def test_typing_error_in_a_key_is_pointed_out(tmp_path: Path) -> None:
    error = _load(tmp_path, GOOD.replace("units = 4", "units = 4\nalliases = []"))
    assert error.hint == "did you mean 'aliases'?"


def test_sparse_peak_must_be_marked_twice_and_is_kept_then(tmp_path: Path) -> None:
    sparse = GOOD.replace('2e12, density = "dense"', '2e12, density = "sparse"')
    assert "half" in str(_load(tmp_path, sparse).hint)
    path = tmp_path / "marked.toml"
    path.write_text("allow_sparse = true\n" + sparse, "utf-8")
    assert [peak.density for peak in load_device(path).peaks] == ["sparse", "dense"]


def test_only_sparse_peaks_are_not_a_device(tmp_path: Path) -> None:
    error = _load(tmp_path, "allow_sparse = true\n" + GOOD.replace('density = "dense"', 'density = "sparse"'))
    assert (error.position, error.message) == ("peaks", "expected at least one dense peak")


@pytest.mark.parametrize(
    ("content", "expected", "position"),
    [
        (b"", "missing key", "sources"),
        (b"\x00\x01\x02", "not TOML", "line 1, column 1"),
        (b"units = 4\n\xff\xfe", "not UTF-8", "line 2, byte 10"),
        (b'{"name": "json"}', "not TOML", "line 1, column 1"),
        (b"units = 4\nname = ", "not TOML", "line 2"),
        (b"a = 1\na = 2", "not TOML", "line 2"),
        (b"units = 4\na = " + b"[" * 100_000, "nested too deeply", "line 2"),
        (b"units = 4\n" + b"a." * 5000 + b"a = 1", "nested too deeply", "line 2"),
        (b"units = 4\na = " + b"9" * 10_000, "not TOML", "line 2"),
        (b"#" * (2 << 20), "more than the limit of 1,048,576", "byte 1048576"),
    ],
)
def test_files_that_are_no_device(tmp_path: Path, content: bytes, expected: str, position: str) -> None:
    path = tmp_path / "junk.toml"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=expected) as caught:
        load_device(path)
    assert caught.value.path == str(path)
    assert (caught.value.position or "").startswith(position)
    assert caught.value.hint


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "marked.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_device(path).name == "Test"


@pytest.mark.parametrize(
    "junk",
    ["w" * 900_000, ("w" * 800 + " ") * 1000, "w." * 60 + "w " + "w" * 900_000],
    ids=["one word", "many words", "dotted"],
)
def test_long_words_take_no_time(tmp_path: Path, junk: str) -> None:
    """A search that looks at each letter of a word again for every letter before it takes half an hour."""
    path = tmp_path / "long.toml"
    path.write_text(junk)
    command = "import sys; from hespas.hardware import load_device; load_device(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", command, str(path)], capture_output=True, text=True, check=False,
        preexec_fn=cpu_limited(20),
    )  # fmt: skip
    assert "FormatError" in done.stderr


def test_what_never_ends_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (tmp_path / "pipe.toml", Path("/dev/zero")):
        with pytest.raises(FormatError, match="not a regular file"):
            load_device(path)


_EXTREMES = (
    *("0", "-1", "1e308", "nan", "inf", "9223372036854775808", "true"),
    *('""', '"x"', "[]", "{}", "07:32:00", '"\\ud800"', "[[[]]]"),
)


@pytest.mark.parametrize("value", _EXTREMES)
def test_any_value_for_any_key_is_read_or_told(tmp_path: Path, value: str) -> None:
    """A refusal names the key, what was expected and a remedy, whichever value is of the wrong kind."""
    refused: list[FormatError] = []
    path = tmp_path / "mine.toml"
    for found in re.finditer(r'(?<= = )("[^"]*"|[\w.]+|-1)(?=[,\s])', GOOD):
        path.write_text(GOOD[: found.start()] + value + GOOD[found.end() :], "utf-8")
        try:
            load_device(path)
        except FormatError as error:
            refused.append(error)
    assert len(refused) > 20
    assert all(each.path and each.position and each.hint for each in refused)


def test_folder_is_told_apart_from_a_file(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="is a directory"):
        load_device(tmp_path)


def test_truncation_anywhere_is_a_fault(tmp_path: Path) -> None:
    """Every shipped figure is needed: cutting a file at any of 50 points never yields a device."""
    text = (DATA_FOLDER / "H100-SXM.toml").read_text("utf-8")
    cuts = random.Random(7).sample(range(len(text) - 120), 50)
    for cut in cuts:
        _load(tmp_path, text[:cut])
