"""Parameters of fits are checked against their form when a hardware file is read."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hespas.cli.main import app
from hespas.graph.errors import FormatError
from hespas.hardware import Device, load_device, write_device
from hespas.hardware.device_fits import SEGMENTS, SegmentName, parameter_fault, segment_name

LINE = {"r8_n1_t0_ns": 5e3, "r8_n1_knee1_bytes": 1e5, "r8_n1_ns_per_byte1": 0.1, "r8_n1_ns_per_byte2": 0.01}
ROOFLINE = {"t0_ns": 3e3, "compute": 0.5, "memory": 0.7, "overlap": 2.0}


def fitted_device() -> Device:
    """A device with its shipped fits of bf16 products as its own."""
    device = load_device("H100-SXM")
    fits = tuple(fit for fit in device.fits if fit.kind == "matmul" and fit.scheme == "bf16")
    return replace(device, fits_of="", own_fits=fits[:1])


@pytest.mark.parametrize(
    ("pattern", "written", "message"),
    [
        (r'"compute" = \[[^]]*\], ', "", "missing: a fit of form 'tiles'"),
        (r'"compute" = \[[^]]*\]', '"compute" = "fast"', "got 'fast'"),
        (r'"compute" = \[[^,]*,', '"compute" = ["fast",', "a list of 2 numbers"),
        (r'"compute" = \[[^,]*,', '"compute" = [nan,', "a finite number"),
        (r'"compute" = \[[^,]*,', '"compute" = [inf,', "a finite number"),
        (r'"compute" = \[[^,]*,', '"compute" = [-0.5,', "expected a positive, finite number, got -0.5"),
        (r'"compute" = \[[^,]*,', '"compute" = [0,', "expected a positive, finite number"),
        (r'"compute" = ', '"compute" = [0.5, nan], "compuet" = ', "compuet.*unknown"),
    ],
)
def test_a_parameter_that_cannot_be_used_is_a_fault_with_its_place_and_a_remedy(
    tmp_path: Path, pattern: str, written: str, message: str
) -> None:
    path = write_device(fitted_device(), tmp_path / "mine.toml")
    text, count = re.subn(pattern, written, path.read_text("utf-8"), count=1)
    assert count == 1
    path.write_text(text, "utf-8")
    with pytest.raises(FormatError, match=message) as caught:
        load_device(path)
    assert caught.value.path == str(path)
    assert (caught.value.position or "").startswith("fits[0].parameters.compu")
    assert "hespas-validate calibrate" in (caught.value.hint or "")


def test_the_command_ends_with_what_is_wrong_and_where(tmp_path: Path) -> None:
    path = write_device(fitted_device(), tmp_path / "mine.toml")
    path.write_text(re.sub(r'"memory" = \[[^]]*\], ', "", path.read_text("utf-8")), "utf-8")
    table = tmp_path / "sizes.csv"
    table.write_text("m,n,k\n64,64,64\n", "utf-8")
    arguments = ["estimate", "--table", str(table), "--hardware", str(path), "--estimator", "calibrated"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 3
    said = " ".join(done.output.split())
    assert "fits[0].parameters.memory" in said
    assert "calibrate" in said


def test_parameters_of_another_estimators_form_are_taken_as_they_are() -> None:
    assert parameter_fault("somebody's own", {"slope": -3.0}) is None


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"t0": 1.0}, "t0"),
        ({"r8_n1_t0_ns": -1.0}, "r8_n1_t0_ns"),
        ({"r8_n1_ns_per_byte2": inf}, "r8_n1_ns_per_byte2"),
        ({"r8_n1_ns_per_byte4": 0.1}, "r8_n1_ns_per_byte3"),
        ({"r8_n1_knee2_bytes": 2e5}, "r8_n1_knee2_bytes"),
        ({"r8_n1_knee2_bytes": 1e5, "r8_n1_ns_per_byte3": 0.1}, "r8_n1_knee2_bytes"),
        ({"r16_n2_t0_ns": 1.0}, "r16_n2_ns_per_byte1"),
    ],
)
def test_lines_of_collectives_are_whole_and_rise(change: dict[str, float], name: str) -> None:
    assert parameter_fault(SEGMENTS, LINE) is None
    fault = parameter_fault(SEGMENTS, LINE | change)
    assert fault is not None
    assert fault[0] == name


@pytest.mark.parametrize("missing", ["r8_n1_t0_ns", "r8_n1_knee1_bytes", "r8_n1_ns_per_byte1"])
def test_a_line_that_lacks_a_part_is_a_fault(missing: str) -> None:
    rest = {name: value for name, value in LINE.items() if name != missing}
    fault = parameter_fault(SEGMENTS, rest)
    assert fault is not None
    assert fault[0].startswith("r8_n1_")


def test_names_of_lines() -> None:
    assert segment_name("r8_n2_knee12_bytes") == SegmentName(8, 2, "knee12_bytes")
    assert segment_name("r8_n2_knee_bytes") is None
    assert segment_name(f"r{'9' * 400}_n1_t0_ns") is None


@pytest.mark.parametrize("missing", list(ROOFLINE))
def test_every_parameter_of_a_form_is_needed(missing: str) -> None:
    assert parameter_fault("roofline", ROOFLINE) is None
    rest = {name: value for name, value in ROOFLINE.items() if name != missing}
    assert (parameter_fault("roofline", rest) or ("",))[0] == missing
