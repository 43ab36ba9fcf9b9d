"""The command that writes the shipped fits: what others fitted stays, unchanged rows keep their date."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from pathlib import Path

from hespas.hardware import Fit, FitBand, FitError, FitParameter
from hespas.hardware.device_fits import read_fits
from tools.fits import tables_of, write_fits

FIT = Fit(
    kind="matmul",
    op="",
    scheme="bf16",
    variant="lib",
    form="mine",
    parameters=(FitParameter(name="t0_ns", value=2000.0, std_error=nan),),
    support=(),
    samples=100,
    error=FitError(n=10, mape=0.1, median_ape=0.1, p90_ape=0.2, bias=0.0),
    bands=(FitBand(up_to_ns=inf, low=0.9, high=1.1),),
    table="t.csv",
    provenance="p",
    fitted="2026-01-01",
    seed=0,
)


def dates(folder: Path) -> dict[tuple[str, str], str]:
    return {(fit.kind, fit.scheme): fit.fitted for fit in read_fits(folder / "X.toml")}


def test_fits_of_other_commands_stay_and_old_ones_of_this_go(tmp_path: Path) -> None:
    collective = replace(FIT, kind="collective", form="other")
    write_fits("X", [FIT, collective, replace(FIT, scheme="f16")], tmp_path)
    write_fits("X", [replace(FIT, samples=200)], tmp_path)
    found = read_fits(tmp_path / "X.toml")
    assert [(fit.kind, fit.samples) for fit in found] == [("collective", 100), ("matmul", 200)]


def test_an_unchanged_fit_keeps_its_date(tmp_path: Path) -> None:
    write_fits("X", [FIT, replace(FIT, scheme="f16")], tmp_path)
    before = (tmp_path / "X.toml").read_text("utf-8")
    later = replace(FIT, fitted="2026-02-02")
    write_fits("X", [later, replace(later, scheme="f16")], tmp_path)
    assert (tmp_path / "X.toml").read_text("utf-8") == before
    write_fits("X", [later, replace(later, scheme="f16", samples=7)], tmp_path)
    assert dates(tmp_path) == {("matmul", "bf16"): "2026-01-01", ("matmul", "f16"): "2026-02-02"}


def test_what_is_no_known_table_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "mine.csv").write_text("hardware,kind,dtype,rows,columns,duration_ns\nT4,vector,f32,2,2,5\n")
    assert [table.name for table in tables_of(tmp_path)] == ["mine.csv"]
