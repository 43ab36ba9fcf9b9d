"""Energy figures: by hand, and unknown without figures in the file."""

from __future__ import annotations

from math import isnan
from pathlib import Path

import pytest

from hespas.graph.errors import FormatError
from hespas.hardware import load_device
from hespas.hardware.devices import Unit
from hespas.hardware.library import DATA_FOLDER
from hespas.hardware.peaks import energy_pj_per_flop, tdp_energy_j


@pytest.mark.parametrize(
    ("unit", "dtype", "pj"),
    [
        ("matrix", "bf16", (0.21 + 0.38) / 2),
        ("matrix", "f16", (0.34 + 0.38) / 2),
        ("matrix", "i8", (0.07 + 0.03) / 2),
        ("vector", "f32", (1.31 + 0.38) / 2),
    ],
)
def test_an_operation_is_half_of_a_multiply_and_an_add(unit: Unit, dtype: str, pj: float) -> None:
    assert energy_pj_per_flop(load_device("A100-SXM-40GB"), unit, dtype) == pytest.approx(pj)


def test_memory_by_hand() -> None:
    """350 pJ for 64 bits of HBM2."""
    assert load_device("V100-SXM2-16GB").main_memory.energy_pj_per_byte == 350 / 8


def test_unknown_is_never_nothing() -> None:
    device = load_device("H100-SXM")
    assert isnan(energy_pj_per_flop(device, "matrix", "bf16"))
    assert isnan(energy_pj_per_flop(device, "matrix", "token"))
    assert isnan(tdp_energy_j(load_device("TPU-v5e"), 1e9))


def test_design_power_over_time() -> None:
    """700 W for one second are 700 J."""
    assert tdp_energy_j(load_device("H100-SXM"), 1e9) == pytest.approx(700.0)


@pytest.mark.parametrize(
    ("old", "new", "position"),
    [
        ('tdp_source = "datasheet"\n', "", "tdp_source"),
        ("tdp_w = 400.0", "tdp_w = -1.0", "tdp_w"),
        ('boost_clock_source = "clock"\n', "", "boost_clock_source"),
        ("boost_clock_hz = 1.41e9", "boost_clock_hz = 1410", "boost_clock_hz"),
        (', energy_source = "lessons" },', " },", "peaks[2].energy_source"),
        ("energy_pj_per_flop = 0.295", 'energy_pj_per_flop = "little"', "peaks[2].energy_pj_per_flop"),
        ("energy_pj_per_byte = 43.75", "energy_pj_per_byte = 0", "memories[0].energy_pj_per_byte"),
    ],
)
def test_figures_need_sources_and_sense(tmp_path: Path, old: str, new: str, position: str) -> None:
    text = (DATA_FOLDER / "A100-SXM-40GB.toml").read_text("utf-8")
    assert old in text
    path = tmp_path / "a100.toml"
    path.write_text(text.replace(old, new, 1), "utf-8")
    with pytest.raises(FormatError) as caught:
        load_device(path)
    assert caught.value.position == position
