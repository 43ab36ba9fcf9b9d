"""Command that refits all shipped fits to measured data: ``python -m tools.fits [--data DIR] [--check]``.

| step | files | data |
|---|---|---|
| devices | hespas/hardware/fits | tables of operations and of collectives |
| lines | hespas/estimators/systolic/data | tables of TPU operations |
| kernels | hespas/hardware/kernels | recorded programs, tables of single operations |
| learned | hespas/estimators/learned/data | tables of operations |
| intervals | hespas/estimators/step_intervals.toml | published runs, measured steps, compiled programs |

Only rows of split ``calib`` or without a split are fitted. All files are written after the last fit, so that
no fit reads the output of another fit of the same run. A fit with unchanged figures keeps its date. Steps
without data are skipped and reported. ``--check`` writes nothing and compares with the shipped files.
``--only scores`` evaluates the learned models again, also on left-out devices, without fitting their trees.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BytesIO
from math import isclose, isnan
from pathlib import Path

import numpy as np

from hespas.estimators.learned.inference import LoadedModels
from hespas.estimators.learned.serialization import (
    LearnedModel,
    load_model,
    model_bytes,
    shipped_folder,
)
from hespas.estimators.step_intervals import DATA as STEP_INTERVALS
from hespas.estimators.systolic.lines import LINES_FOLDER
from hespas.fitting.collectives import fit_collectives
from hespas.fitting.device_forms import fit_device
from hespas.fitting.learned import fit_learned, with_errors, with_new_devices
from hespas.fitting.learned_parts import PARTS, rows_for, rows_of_part
from hespas.fitting.systolic import fit_lines
from hespas.graph.errors import FormatError
from hespas.hardware import Device, Fit, device_names, load_device
from hespas.hardware.device_fits import FITS_FOLDER, fits_to_toml, read_fits
from hespas.hardware.kernel_shares import KERNELS_FOLDER
from hespas.measurements import Measurements, read_measurements
from tools.documents import ROOT
from tools.kernels import kernel_fits_of_files, kernel_tables, recorded_traces
from tools.step_intervals import step_interval_file

__all__ = ["STEPS", "FitInputs", "differences", "file_of_fits", "main", "tables_of"]

_PRECISION = 1e-9
_NUMBER = re.compile(r"-?\b\d+\.?\d*(?:e[-+]?\d+)?\b|\bnan\b|\binf\b")
_ZIP = b"PK"
_DATE = re.compile(r'"\d{4}-\d{2}-\d{2}"')

Files = Mapping[Path, bytes]
"""Contents by path."""


def tables_of(folder: Path) -> list[Measurements]:
    """Return every table of operations in a folder, by name; other files are skipped."""
    found: list[Measurements] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.suffix not in {".parquet", ".gz", ".csv"}:
            continue
        try:
            found.append(read_measurements(path))
        except FormatError:
            continue
    return found


@dataclass(frozen=True)
class FitInputs:
    """Data and options of a run. ``data`` holds the folders of shared data by their usual names."""

    data: Path
    devices: Sequence[str] = ()
    models: Sequence[str] = ()
    seed: int = 0
    date: str = ""
    jobs: int = 2
    reported: list[str] = field(default_factory=list[str])

    @cached_property
    def tables(self) -> list[Measurements]:
        """Return the tables of measured operations."""
        return tables_of(self.data / "groundtruth")

    def measured_devices(self) -> Iterator[tuple[Device, list[Measurements]]]:
        """Yield each chosen device with the tables that have rows of it."""
        for name in self.devices or device_names():
            tables = [table for table in self.tables if len(table.hardware.where(name))]
            if tables:
                yield load_device(name), tables


def file_of_fits(path: Path, name: str, fits: Iterable[Fit], kept: Collection[str] = ()) -> Files:
    """Return a file with new fits, and with the earlier fits of the kinds ``kept``.

    An unchanged fit keeps its date.
    """
    before = read_fits(path) if path.exists() else ()
    old = {fit.key: fit for fit in before}
    dated = [_as_before(fit, old[fit.key]) if fit.key in old else fit for fit in fits]
    return {path: fits_to_toml(name, [*(fit for fit in before if fit.kind in kept), *dated]).encode()}


def _as_before(fit: Fit, before: Fit) -> Fit:
    """Return the earlier fit if only its date differs. Texts are compared, because NaN differs from NaN."""
    same = replace(fit, fitted=before.fitted)
    return before if repr(same) == repr(before) else fit


def _devices(inputs: FitInputs) -> Iterator[Files]:
    for device, tables in inputs.measured_devices():
        forms = fit_device(tables, device, seed=inputs.seed, fitted=inputs.date)
        collectives = fit_collectives(tables, device, seed=inputs.seed, fitted=inputs.date)
        fits = (*forms, *collectives)
        fitted = {fit.kind == "collective" for fit in fits}
        if fits:
            path = FITS_FOLDER / f"{device.name}.toml"
            yield file_of_fits(path, device.name, fits, {"collective"} if fitted == {False} else ())


def _lines(inputs: FitInputs) -> Iterator[Files]:
    for device, tables in inputs.measured_devices():
        if device.systolic is not None:
            fits = fit_lines(tables, device, seed=inputs.seed, fitted=inputs.date)
            yield file_of_fits(LINES_FOLDER / f"{device.name}.toml", device.name, fits)


def _kernels(inputs: FitInputs) -> Iterator[Files]:
    folder = inputs.data / "profiles"
    if not folder.is_dir():
        return
    recorded = [(table, load_device(trace.hardware)) for trace, table in recorded_traces(folder)]
    measured = kernel_tables(inputs.data / "groundtruth")
    for name, fits in kernel_fits_of_files(recorded, measured, inputs.date):
        yield file_of_fits(KERNELS_FOLDER / f"{name.lower()}.toml", name, fits)


def _learned(inputs: FitInputs, *, is_fitted: bool = True) -> Iterator[Files]:
    folder = shipped_folder()
    for part in PARTS:
        if inputs.models and part.name not in inputs.models:
            continue
        table = next((table for table in inputs.tables if table.name.startswith(f"{part.table}.")), None)
        if table is None:
            inputs.reported.append(f"{part.name}: skipped: no table {part.table}")
            continue
        model: LearnedModel
        if is_fitted:
            model = fit_learned(part, table, seed=inputs.seed)
        else:
            rows = rows_for(part, table.take(rows_of_part(part, table)).part("calib"))
            model = with_new_devices(load_model(folder / f"{part.name}.json"), rows, seed=inputs.seed)
        card, trees = model_bytes(with_errors(part, model, LoadedModels([model]), table))
        yield {folder / f"{part.name}.json": card, folder / f"{part.name}.npz": trees}


def _scores(inputs: FitInputs) -> Iterator[Files]:
    return _learned(inputs, is_fitted=False)


def _intervals(inputs: FitInputs) -> Iterator[Files]:
    yield {STEP_INTERVALS: step_interval_file(inputs.data, inputs.jobs).encode()}


STEPS: Mapping[str, Callable[[FitInputs], Iterator[Files]]] = {
    "devices": _devices,
    "lines": _lines,
    "kernels": _kernels,
    "learned": _learned,
    "intervals": _intervals,
    "scores": _scores,
}
"""Steps of a run by name; the last one only on request."""


def differences(before: bytes, after: bytes) -> str:
    """Return the largest relative difference of the figures of two files; empty if they are equal.

    Dates do not count. Trees are compared array by array, because their compression may differ.
    """
    if before.startswith(_ZIP) and after.startswith(_ZIP):
        trees, others = (np.load(BytesIO(content), allow_pickle=False) for content in (before, after))
        names = set(trees.files) | set(others.files)
        unlike = [name for name in names if name not in trees or name not in others]
        unlike += [name for name in names - set(unlike) if not np.array_equal(trees[name], others[name])]
        return f"other arrays: {', '.join(sorted(unlike))}" if unlike else ""
    texts = [_DATE.sub("", content.decode()) for content in (before, after)]
    figures = [list(map(float, _NUMBER.findall(text))) for text in texts]
    if _NUMBER.sub("", texts[0]) != _NUMBER.sub("", texts[1]) or len(figures[0]) != len(figures[1]):
        return "other rows"
    unequal = [
        pair
        for pair in zip(*figures, strict=True)
        if not isclose(*pair, rel_tol=_PRECISION) and not all(map(isnan, pair))
    ]
    if not unequal:
        return ""
    largest = max(abs(one - other) / max(abs(one), abs(other)) for one, other in unequal)
    return f"{len(unequal):,} figures differ by up to {largest:.2g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, then write or compare; return 1 if a compared file differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder of data")
    parser.add_argument("--only", action="append", choices=list(STEPS), help="steps to run (default: all)")
    parser.add_argument("--device", action="append", default=[], help="devices to fit (default: all)")
    parser.add_argument("--model", action="append", default=[], help="learned models to fit (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--date", default="", help="date written into the fits (default: today)")
    parser.add_argument("--jobs", type=int, default=2, help="processes of the step intervals")
    parser.add_argument("--check", action="store_true", help="write nothing; compare with the shipped files")
    asked = parser.parse_args(arguments)
    inputs = FitInputs(asked.data, asked.device, asked.model, asked.seed, asked.date, asked.jobs)
    files: dict[Path, bytes] = {}
    for step in asked.only or [name for name in STEPS if name != "scores"]:
        of_step = [file for part in STEPS[step](inputs) for file in part.items()]
        files.update(of_step)
        _print(f"{step}: {len(of_step)} files" if of_step else f"{step}: skipped: no data in {asked.data}")
    for line in inputs.reported:
        _print(line)
    unequal = 0
    for path, content in files.items():
        before = path.read_bytes() if path.exists() else b""
        difference = differences(before, content)
        unequal += bool(difference)
        _print(f"{path.relative_to(ROOT)}: {difference or 'equal'}")
        if not asked.check and before != content:
            temporary = path.with_suffix(".tmp")
            temporary.write_bytes(content)
            temporary.replace(path)
    return int(asked.check and unequal > 0)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
