"""One traced model left out: ``python -m benchmarks.carry_over.traces PROFILES [--tables DIR]``.

Each recording of a folder is predicted from the recordings of other models on its device: everything that is
fitted on recordings is fitted again without any recording of that model, on whatever device. A model is what
a file is called behind its first ``_``: ``h100_timesformer_inf.json.gz`` and
``mi300x_timesformer_inf.json.gz`` hold the same.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from hespas.graph.columns import FloatArray
from hespas.hardware import Device, Fit, load_device, write_device
from hespas.validators.accuracy import accuracy
from hespas.validators.accuracy.cases import Cases
from hespas.validators.accuracy.statistics import ShapeGroups, errors_of
from hespas.validators.calibration.approaches import merged
from hespas.validators.calibration.kernels import common_kernels, kernel_fits
from hespas.validators.calibration.recordings import fit_recordings
from tools.kernels import Trace, kernel_tables, recorded_traces

__all__ = ["BASELINE", "FITTED", "ROOFLINE", "UNRECORDED", "Row", "left_out", "main", "summary"]

ROOFLINE, BASELINE = "roofline", "overhead+two-efficiencies"
UNRECORDED, FITTED = "composite, device unrecorded", "composite"
"""By recordings of other models: on other devices alone, and on the device, too (as its calibration
ships).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One distinct shape of a trace: median time, what each estimator says and between what (NaN:
    nothing).
    """

    trace: str
    op_class: str
    shape: str
    measured_ns: float
    predicted_ns: Mapping[str, float]
    interval_ns: tuple[float, float]

    def error(self, estimator: str) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_ns[estimator] / self.measured_ns - 1


def left_out(folder: Path, tables: Path | None = None) -> Iterator[Row]:
    """Every shape of every trace, predicted without any recording of its model. ``tables`` are those of
    single operations that fits of common kernels take beside recordings.
    """
    traces = recorded_traces(folder)
    measured = [] if tables is None else kernel_tables(tables)
    for trace, _ in traces:
        others = [(each, table) for each, table in traces if each.model != trace.model]
        mine = [table for each, table in others if each.hardware == trace.hardware]
        if not mine:
            continue
        device = load_device(trace.hardware)
        recorded = [(table, load_device(each.hardware)) for each, table in others]
        elsewhere = [each for each in recorded if each[1].name != device.name]
        common = common_kernels([*recorded, *measured], device.vendor)
        unrecorded = kernel_fits(common_kernels([*elsewhere, *measured], device.vendor))
        fits = fit_recordings(mine, device, common=common)
        yield from _rows(trace, _with(device, unrecorded), _with(device, fits))


def _with(device: Device, fits: Sequence[Fit]) -> Device:
    return replace(device, own_fits=merged(fits, device.fits), fits_of="")


def _rows(trace: Trace, shipped: Device, fitted: Device) -> Iterator[Row]:
    before = _cases(trace, shipped, (ROOFLINE, FITTED))
    for plain, calibrated in zip(before, _cases(trace, fitted, (FITTED,)), strict=True):
        yield from _rows_of_program(trace, plain, calibrated)


def _rows_of_program(trace: Trace, plain: Cases, calibrated: Cases) -> Iterator[Row]:
    said = {name: _of_shapes(plain, name)[0] for name in (ROOFLINE, BASELINE)}
    said[UNRECORDED] = _of_shapes(plain, FITTED)[0]
    said[FITTED], low, high = _of_shapes(calibrated, FITTED)
    groups = ShapeGroups.of(plain.shape)
    measured = groups.medians(plain.measured_ns)
    first = groups.firsts()
    for place, number in enumerate(groups.distinct.tolist()):
        yield Row(
            trace=trace.name,
            op_class=plain.classes[int(plain.op_class[first[place]])],
            shape=plain.shapes[number],
            measured_ns=float(measured[place]),
            predicted_ns={name: float(column[place]) for name, column in said.items()},
            interval_ns=(float(low[place]), float(high[place])),
        )


def _cases(trace: Trace, device: Device, estimators: Sequence[str]) -> Sequence[Cases]:
    """What is compared of each program that the trace holds."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "device.toml")
        write_device(device, path)
        return accuracy([trace.profile], [str(path)], estimators, inputs=[trace.name]).cases


def _of_shapes(cases: Cases, estimator: str) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Time and interval of each distinct shape: medians of its cases [ns]."""
    [said] = [each for each in cases.predictions if each.estimator == estimator]
    groups = ShapeGroups.of(cases.shape)
    return groups.medians(said.duration_ns), groups.medians(said.low_ns), groups.medians(said.high_ns)


# The tables: figures per trace, per class, the worst shapes.

_HEADER = ("trace", "class", "estimator", "n", "of", "MAPE", "median", "P90", "bias", "sum", "in 90 %")


def summary(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Lines of :data:`_HEADER`: each trace, then each of its classes. Compared are the shapes for which the
    calibrated composite and the roofline say something.
    """
    for trace in dict.fromkeys(row.trace for row in rows):
        mine = [row for row in rows if row.trace == trace]
        classes = sorted({row.op_class for row in mine})
        for op_class in ("all", *classes):
            part = [row for row in mine if op_class in ("all", row.op_class)]
            known = [
                row
                for row in part
                if np.isfinite([row.predicted_ns[FITTED], row.predicted_ns[ROOFLINE]]).all()
            ]
            for estimator in (ROOFLINE, BASELINE, UNRECORDED, FITTED) if known else ():
                yield trace, op_class, estimator, *_figures(known, estimator, len(part))


def _figures(rows: Sequence[Row], estimator: str, count: int) -> tuple[str, ...]:
    predicted = np.array([row.predicted_ns[estimator] for row in rows])
    measured = np.array([row.measured_ns for row in rows])
    low, high = np.array([row.interval_ns for row in rows]).T
    bounds = (low, high) if estimator == FITTED else None
    found = errors_of(predicted, measured, np.arange(len(rows)), bounds)
    shares = (found.mape, found.median_ape, found.p90_ape)
    return (
        str(found.n),
        str(count),
        *(f"{share:.1%}" for share in shares),
        f"{found.bias:+.1%}",
        f"{found.sum_error:+.1%}",
        f"{found.interval_coverage:.1%}" if found.interval_n else "-",
    )


def _worst(rows: Sequence[Row], count: int) -> Iterator[str]:
    known = [row for row in rows if np.isfinite(row.predicted_ns[FITTED])]
    for row in sorted(known, key=lambda row: -abs(row.error(FITTED)))[:count]:
        yield f"{row.error(FITTED):+8.1%} {row.measured_ns / 1e3:10.2f} us  {row.trace:42s} {row.shape[:110]}"


def _write(rows: Sequence[Row], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        names = (ROOFLINE, BASELINE, UNRECORDED, FITTED)
        writer.writerow(("trace", "op_class", "shape", "measured_ns", *names, "low_ns", "high_ns"))
        for row in rows:
            times = (row.predicted_ns[name] for name in names)
            writer.writerow((row.trace, row.op_class, row.shape, row.measured_ns, *times, *row.interval_ns))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("profiles", type=Path, help="folder of recordings")
    parser.add_argument("--tables", type=Path, help="folder of tables of measured operations")
    parser.add_argument("--worst", type=int, default=10, help="shapes that are told one by one")
    parser.add_argument("--csv", type=Path, help="every shape")
    arguments = parser.parse_args()
    rows = list(left_out(arguments.profiles, arguments.tables))
    print("| " + " | ".join(_HEADER) + " |\n" + "| --- " * len(_HEADER) + "|")
    for line in summary(rows):
        print("| " + " | ".join(line) + " |")
    print(*_worst(rows, arguments.worst), sep="\n")
    if arguments.csv:
        _write(rows, arguments.csv)


if __name__ == "__main__":
    main()
