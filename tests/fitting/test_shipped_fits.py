"""The command that writes the shipped fits: all files at the end, unchanged rows with their date."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from io import BytesIO
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tools.fits
from hespas.hardware import Fit, FitBand, FitError, FitParameter
from hespas.hardware.device_fits import read_fits
from tools.fits import FitInputs, differences, file_of_fits, tables_of

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


def write(folder: Path, fits: Iterable[Fit], kept: Collection[str] = ()) -> Path:
    path = folder / "X.toml"
    for name, content in file_of_fits(path, "X", fits, kept).items():
        name.write_bytes(content)
    return path


def dates(path: Path) -> dict[tuple[str, str], str]:
    return {(fit.kind, fit.scheme): fit.fitted for fit in read_fits(path)}


def test_kinds_without_data_stay_and_other_earlier_fits_go(tmp_path: Path) -> None:
    collective = replace(FIT, kind="collective", form="other")
    write(tmp_path, [FIT, collective, replace(FIT, scheme="f16")])
    found = read_fits(write(tmp_path, [replace(FIT, samples=200)], {"collective"}))
    assert [(fit.kind, fit.samples) for fit in found] == [("collective", 100), ("matmul", 200)]
    assert len(read_fits(write(tmp_path, [FIT]))) == 1


def test_an_unchanged_fit_keeps_its_date(tmp_path: Path) -> None:
    path = write(tmp_path, [FIT, replace(FIT, scheme="f16")])
    before = path.read_text("utf-8")
    later = replace(FIT, fitted="2026-02-02")
    write(tmp_path, [later, replace(later, scheme="f16")])
    assert path.read_text("utf-8") == before
    write(tmp_path, [later, replace(later, scheme="f16", samples=7)])
    assert dates(path) == {("matmul", "bf16"): "2026-01-01", ("matmul", "f16"): "2026-02-02"}


def test_equal_files_differ_in_dates_and_last_digits_only() -> None:
    text = b'{ kind = "a", t0_ns = [2000.0, nan], bands = [[inf, 0.9]], fitted = "2026-01-01" }'
    assert differences(text, text.replace(b"2026-01-01", b"2026-02-02")) == ""
    assert differences(text, text.replace(b"2000.0", b"2000.0000000001")) == ""
    assert differences(text, text.replace(b"2000.0", b"2002.0")) == "1 figures differ by up to 0.001"
    assert differences(text, text.replace(b"nan", b"1.0")) == "1 figures differ by up to nan"
    assert differences(text, text.replace(b'"a"', b'"b"')) == "other rows"
    assert differences(b"", text) == "other rows"


def test_trees_are_equal_if_their_arrays_are() -> None:
    def trees(compressed: bool, **arrays: Any) -> bytes:
        file = BytesIO()
        save = np.savez_compressed if compressed else np.savez
        save(file, **arrays)
        return file.getvalue()

    leaves = np.arange(5, dtype=np.int8)
    assert differences(trees(True, main=leaves), trees(False, main=leaves)) == ""
    assert differences(trees(True, main=leaves), trees(True, main=leaves + 1)) == "other arrays: main"
    assert differences(trees(True, main=leaves), trees(True, low=leaves)) == "other arrays: low, main"


def test_files_are_written_after_the_last_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "hespas"
    folder.mkdir()
    seen: list[bool] = []

    def step(number: int) -> Callable[[FitInputs], Iterator[Mapping[Path, bytes]]]:
        def fitted(inputs: FitInputs) -> Iterator[Mapping[Path, bytes]]:
            seen.append(any(folder.iterdir()))
            yield {folder / f"{number}.toml": b"fits = 1"}

        return fitted

    monkeypatch.setattr(tools.fits, "STEPS", {"devices": step(1), "lines": step(2)})
    monkeypatch.setattr(tools.fits, "ROOT", tmp_path)
    assert tools.fits.main(["--check"]) == 1
    assert not any(folder.iterdir())
    assert tools.fits.main([]) == 0
    assert seen == [False] * 4
    assert sorted(path.name for path in folder.iterdir()) == ["1.toml", "2.toml"]
    assert tools.fits.main(["--check"]) == 0


def test_absent_data_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        tools.fits.main(
            ["--data", str(tmp_path), "--only", "devices", "--only", "kernels", "--only", "learned"]
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"{step}: skipped: no data in {tmp_path}" for step in ("devices", "kernels")]
    assert "gemm-bf16: skipped: no table aiconfigurator_gemm" in lines


def test_what_is_no_known_table_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "mine.csv").write_text("hardware,kind,dtype,rows,columns,duration_ns\nT4,vector,f32,2,2,5\n")
    assert [table.name for table in tables_of(tmp_path)] == ["mine.csv"]
