"""Fits in device files and in separate files: read back unchanged, checked strictly, merged by class."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest

from hespas.graph.errors import FormatError
from hespas.hardware import (
    Device,
    Fit,
    FitBand,
    FitError,
    FitParameter,
    FitRange,
    load_device,
    write_device,
)
from hespas.hardware.device_fits import FITS_FOLDER, fits_to_toml, read_fits

FIT = Fit(
    kind="matmul",
    op="",
    scheme="bf16",
    variant='a "quoted" library 1.0',
    form="mine",
    parameters=(
        FitParameter(name="t0_ns", value=2612.5, std_error=12.25),
        FitParameter(name="weight_copies", value=5.0, std_error=nan),
    ),
    support=(FitRange(name="m", low=1.0, high=65536.0),),
    samples=1200,
    error=FitError(n=300, mape=0.081, median_ape=0.06, p90_ape=0.2, bias=-0.004),
    bands=(FitBand(up_to_ns=1e4, low=0.8, high=1.25), FitBand(up_to_ns=inf, low=0.9, high=1.1)),
    table="gemm.parquet",
    provenance="somewhere at 0123abcd, MIT",
    fitted="2026-01-31",
    seed=7,
    default=True,
)


def a_device() -> Device:
    return replace(load_device("H100-SXM"), fits_of="", own_fits=())


def saved(device: Device, folder: Path) -> str:
    return write_device(device, folder / "mine.toml").read_text("utf-8")


def test_a_fit_is_written_and_read_back_unchanged(tmp_path: Path) -> None:
    device = replace(a_device(), own_fits=(FIT, replace(FIT, scheme="f16", bands=(), support=())))
    again = load_device(write_device(device, tmp_path / "mine.toml"))
    # NaN differs from itself: texts are compared.
    assert repr(again.own_fits) == repr(device.own_fits)
    assert repr(again.fits) == repr(device.own_fits)


def test_a_file_of_fits_is_read_back_ordered_by_class(tmp_path: Path) -> None:
    path = tmp_path / "X.toml"
    path.write_text(fits_to_toml("X", [FIT, replace(FIT, kind="gather")]), "utf-8")
    assert [fit.kind for fit in read_fits(path)] == ["gather", "matmul"]
    assert repr(read_fits(path)[1]) == repr(FIT)


@pytest.mark.parametrize(
    ("before", "after", "position", "message"),
    [
        ("form = ", "shape = ", "fits[0].shape", "unknown key"),
        ('form = "mine", ', "", "fits[0].form", "missing key"),
        ("seed = 7", "seed = 7, note = 1", "fits[0].note", "unknown key"),
        ("seed = 7", "seed = -1", "fits[0].seed", "0 or more"),
        ("seed = 7", "seed = nan", "fits[0].seed", "0 or more"),
        ("seed = 7", "seed = inf", "fits[0].seed", "0 or more"),
        ("[2612.5, 12.25]", "[1e300, 12.25]", "fits[0].parameters.t0_ns", "finite"),
        ("[2612.5, 12.25]", "[2612.5]", "fits[0].parameters.t0_ns", "a list of 2 numbers"),
        ("[2612.5, 12.25]", "[nan, 12.25]", "fits[0].parameters.t0_ns", "finite"),
        ("[2612.5, 12.25]", "[inf, 12.25]", "fits[0].parameters.t0_ns", "finite"),
        ("[2612.5, 12.25]", '"fast"', "fits[0].parameters.t0_ns", "'fast'"),
        ("[2612.5, 12.25]", '["fast", 1]', "fits[0].parameters.t0_ns", "a list of 2 numbers"),
        ("[2612.5, 12.25]", "[true, 12.25]", "fits[0].parameters.t0_ns", "a list of 2 numbers"),
        ("[1.0, 65536.0]", "[65536.0, 1.0]", "fits[0].support.m", "least"),
        ("[inf, 0.9, 1.1]", "[9e9, 0.9, 1.1]", "fits[0].bands", "inf"),
        ("[inf, 0.9, 1.1]", "[1e3, 0.9, 1.1]", "fits[0].bands[1]", "rising"),
        ("[inf, 0.9, 1.1]", "[inf, 1.9, 1.1]", "fits[0].bands[1]", "rising"),
        ("samples = 1200", "samples = 0", "fits[0].samples", "positive"),
        ("bias = -0.004", 'bias = "-"', "fits[0].error.bias", "a number"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, before: str, after: str, position: str, message: str) -> None:
    text = saved(replace(a_device(), own_fits=(FIT,)), tmp_path)
    assert before in text
    path = tmp_path / "broken.toml"
    path.write_text(text.replace(before, after), "utf-8")
    with pytest.raises(FormatError, match=message) as caught:
        load_device(path)
    assert caught.value.position == position


def test_a_class_may_be_fitted_once_only(tmp_path: Path) -> None:
    path = write_device(replace(a_device(), own_fits=(FIT, replace(FIT, seed=8))), tmp_path / "mine.toml")
    with pytest.raises(FormatError, match="is stated already"):
        load_device(path)


def test_fits_of_a_device_that_has_none_are_a_fault(tmp_path: Path) -> None:
    path = write_device(replace(a_device(), fits_of="../data/H100-SXM"), tmp_path / "mine.toml")
    with pytest.raises(FormatError, match="no fits ship"):
        load_device(path)


def test_shipped_fits_come_with_the_device_and_survive_a_copy(tmp_path: Path) -> None:
    device = load_device("H100-SXM")
    assert device.fits_of == "H100-SXM"
    assert any(fit.kind == "matmul" and fit.scheme == "bf16" for fit in device.fits)
    again = load_device(write_device(device, tmp_path / "mine.toml"))
    assert repr(again) == repr(device)
    assert repr(again.fits) == repr(device.fits)


def test_a_device_s_own_fit_stands_before_the_shipped_one_of_its_class() -> None:
    device = load_device("H100-SXM")
    shipped = next(fit for fit in device.fits if fit.kind == "matmul")
    mine = replace(shipped, samples=1)
    fits = replace(device, own_fits=(mine,)).fits
    assert [fit.samples for fit in fits if fit.key == shipped.key] == [1]
    assert len(fits) == len(device.fits)


@pytest.mark.parametrize("path", sorted(FITS_FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_fit_names_its_source_and_its_error(path: Path) -> None:
    fits = read_fits(path)
    load_device(path.stem)
    for fit in fits:
        assert fit.table
        assert any(mark in fit.provenance for mark in ("github.com", "arXiv")), fit.key
        assert fit.error.n > 0, fit.key
        assert fit.error.mape == fit.error.mape, fit.key
        assert all(each.std_error >= 0 or each.std_error != each.std_error for each in fit.parameters)
    assert fits_to_toml(path.stem, fits) == path.read_text("utf-8")


def test_one_variant_of_a_class_is_the_default() -> None:
    fits = [fit for fit in load_device("H100-SXM").fits if fit.kind != "collective"]
    classes = {(fit.kind, fit.op, fit.scheme) for fit in fits}
    assert len(classes) == sum(fit.default for fit in fits)
