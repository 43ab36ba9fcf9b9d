"""Errors on recorded profiles with their model left out of the fits, shape by shape.

``python -m benchmarks.carry_over.traces PROFILES [--tables DIR]`` predicts each recording of a folder from
the recordings of other models. All fits to recordings are repeated without the recordings of that model on
any device. If the device has no other recording, the fits use other devices of its vendor. The shortest
kernel (1st percentile) in device files also comes from recordings and is not refitted; roofline and composite
both use it. Intervals come from held-out tests among the remaining recordings, so that the predicted
recording does not influence its own interval.

The model is the file name after the first ``_``: ``h100_timesformer_inf.json.gz`` and
``mi300x_timesformer_inf.json.gz`` are of the same model.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from hespas.fitting.fits import with_fits
from hespas.fitting.statistics import ShapeGroups, errors_of
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import Device, load_device, write_device
from hespas.validators.accuracy import accuracy
from hespas.validators.accuracy.baselines import FittingRows
from hespas.validators.accuracy.cases import Cases
from tools.kernels import Trace, fits_without, is_recorded, kernel_tables, recorded_traces

__all__ = [
    "BASELINE",
    "BASELINE_OF_OTHERS",
    "FITTED",
    "ROOFLINE",
    "UNRECORDED",
    "Row",
    "left_out",
    "main",
    "summary",
]

ROOFLINE, BASELINE, DATASHEET = "roofline", "overhead+two-efficiencies", "datasheet-roofline"
BASELINE_OF_OTHERS = "overhead+two-efficiencies, of other models"
"""The naive model has two variants. ``BASELINE`` is fitted to four fifths of the shapes of the trace (as in
reports if a device has one source). ``BASELINE_OF_OTHERS`` is fitted to the recordings that the composite
uses: other models on the device, or on other devices of its vendor if there are none.
"""
UNRECORDED, FITTED = "composite, device unrecorded", "composite"
"""The composite fitted to recordings of other models: on other devices only, and also on the device (like its
shipped calibration).
"""

_BOUNDED = (UNRECORDED, FITTED)
"""Estimators with intervals. Their width comes from devices or models that are left out of the recordings of
the fit.
"""

_SHOWN = (ROOFLINE, BASELINE, BASELINE_OF_OTHERS, UNRECORDED, FITTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A distinct shape of a trace: median measured time, prediction of each estimator, and interval of
    :data:`UNRECORDED` and :data:`FITTED` [ns]. NaN: no prediction.
    """

    trace: str
    op_class: str
    shape: str
    measured_ns: float
    predicted_ns: Mapping[str, float]
    interval_ns: Mapping[str, tuple[float, float]]

    def error(self, estimator: str) -> float:
        """Return (predicted - measured) / measured of an estimator."""
        return self.predicted_ns[estimator] / self.measured_ns - 1


def left_out(folder: Path, tables: Path | None = None) -> Iterator[Row]:
    """Yield every shape of every trace, predicted without recordings of its model. ``tables`` is a folder of
    tables of single operations, which fits of common kernels use in addition to recordings.
    """
    traces = recorded_traces(folder)
    measured = [] if tables is None else kernel_tables(tables)
    plain = {trace.name: _cases(trace, load_device(trace.hardware), (ROOFLINE,)) for trace, _ in traces}
    for trace, _ in traces:
        others = [(each, table) for each, table in traces if each.model != trace.model]
        device = load_device(trace.hardware)
        recorded = [(table, load_device(each.hardware)) for each, table in others]
        elsewhere = [each for each in recorded if each[1].name != device.name]
        unrecorded = with_fits(device, fits_without(elsewhere, measured, device))
        fitted = unrecorded
        if is_recorded(recorded, device):
            fitted = with_fits(device, fits_without(recorded, measured, device))
        sources = _sources_of(trace, [each for each, _ in others])
        naive = _Naive.of(plain[trace.name], [each for other in sources for each in plain[other.name]])
        yield from _rows(trace, unrecorded, fitted, naive)


def _sources_of(trace: Trace, others: Sequence[Trace]) -> list[Trace]:
    """Return the traces to which a naive model is fitted: of the device, else of its vendor, else all."""
    vendor = load_device(trace.hardware).vendor
    return (
        [each for each in others if each.hardware == trace.hardware]
        or [each for each in others if load_device(each.hardware).vendor == vendor]
        or list(others)
    )


@dataclass(frozen=True, slots=True)
class _Naive:
    """Times [ns] of the naive model for each case of each program of a trace, fitted to other recordings."""

    duration_ns: Sequence[FloatArray]

    @classmethod
    def of(cls, mine: Sequence[Cases], others: Sequence[Cases]) -> _Naive:
        """Fit the model to ``others`` and predict ``mine``. Equal shapes of other models are in the fit, as
        for the composite.
        """
        cases = [*mine, *others]
        classes, shapes = _Numbers(), _Numbers()
        rows = FittingRows(
            naive_ns=np.concatenate([_predicted_ns(each, DATASHEET) for each in cases]),
            measured_ns=np.concatenate([each.measured_ns for each in cases]),
            op_class=np.concatenate([classes.of(each.classes)[each.op_class] for each in cases]).astype(
                np.int32
            ),
            shape=np.concatenate([shapes.of(each.shapes)[each.shape] for each in cases]),
            group=np.arange(sum(map(len, cases))),
        )
        count = sum(map(len, mine))
        inside = np.arange(len(rows.shape)) < count
        found = np.full((2, len(rows.shape)), np.nan)
        rows.predict(~inside, inside, found)
        bounds = np.cumsum([0, *map(len, mine)]).tolist()
        return cls([found[1, low:high] for low, high in pairwise(bounds)])


class _Numbers:
    """Numbering of names that several lists share."""

    def __init__(self) -> None:
        self.by_name: dict[str, int] = {}

    def of(self, names: Iterable[str]) -> IntArray:
        """Return the number of each name; new names get the next numbers."""
        return np.array([self.by_name.setdefault(name, len(self.by_name)) for name in names], np.int64)


def _predicted_ns(cases: Cases, estimator: str) -> FloatArray:
    [predicted_ns] = [each.duration_ns for each in cases.predictions if each.estimator == estimator]
    return predicted_ns


def _rows(trace: Trace, unrecorded: Device, fitted: Device, naive: _Naive) -> Iterator[Row]:
    before = _cases(trace, unrecorded, (ROOFLINE, FITTED))
    after = _cases(trace, fitted, (FITTED,))
    for plain, calibrated, naive_ns in zip(before, after, naive.duration_ns, strict=True):
        yield from _rows_of_program(trace, plain, calibrated, naive_ns)


def _rows_of_program(trace: Trace, plain: Cases, calibrated: Cases, naive_ns: FloatArray) -> Iterator[Row]:
    groups = ShapeGroups.of(plain.shape)
    predicted = {name: _of_shapes(plain, name)[0] for name in (ROOFLINE, BASELINE)}
    predicted[BASELINE_OF_OTHERS] = groups.medians(naive_ns)
    bounds: dict[str, list[FloatArray]] = {}
    for name, cases in ((UNRECORDED, plain), (FITTED, calibrated)):
        predicted[name], *bounds[name] = _of_shapes(cases, FITTED)
    measured = groups.medians(plain.measured_ns)
    first = groups.firsts()
    for place, number in enumerate(groups.distinct.tolist()):
        yield Row(
            trace=trace.name,
            op_class=plain.classes[int(plain.op_class[first[place]])],
            shape=plain.shapes[number],
            measured_ns=float(measured[place]),
            predicted_ns={name: float(column[place]) for name, column in predicted.items()},
            interval_ns={
                name: (float(low[place]), float(high[place])) for name, (low, high) in bounds.items()
            },
        )


def _cases(trace: Trace, device: Device, estimators: Sequence[str]) -> Sequence[Cases]:
    """Return the cases of each program of the trace, with predictions of some estimators on a device."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "device.toml")
        write_device(device, path)
        return accuracy([trace.profile], [str(path)], estimators, inputs=[trace.name]).cases


def _of_shapes(cases: Cases, estimator: str) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return time and interval ends [ns] of each distinct shape, as medians of its cases."""
    [prediction] = [each for each in cases.predictions if each.estimator == estimator]
    groups = ShapeGroups.of(cases.shape)
    columns = (prediction.duration_ns, prediction.low_ns, prediction.high_ns)
    duration_ns, low_ns, high_ns = map(groups.medians, columns)
    return duration_ns, low_ns, high_ns


_HEADER = ("trace", "class", "estimator", "n", "of", "MAPE", "median", "P90", "bias", "sum", "in 90 %")


def summary(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield the table rows below :data:`_HEADER`: each trace, then each of its classes. Only shapes that both
    the calibrated composite and the roofline predict are compared.
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
            for estimator in _SHOWN if known else ():
                yield trace, op_class, estimator, *_figures(known, estimator, len(part))


def _figures(rows: Sequence[Row], estimator: str, count: int) -> tuple[str, ...]:
    predicted = np.array([row.predicted_ns[estimator] for row in rows])
    measured = np.array([row.measured_ns for row in rows])
    low, high = np.array([row.interval_ns.get(estimator, (np.nan, np.nan)) for row in rows]).T
    bounds = (low, high) if estimator in _BOUNDED else None
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
        sides = (f"{name}, {side} ns" for name in _BOUNDED for side in ("low", "high"))
        writer.writerow(("trace", "op_class", "shape", "measured_ns", *_SHOWN, *sides))
        for row in rows:
            times = (row.predicted_ns[name] for name in _SHOWN)
            bounds = (bound for name in _BOUNDED for bound in row.interval_ns[name])
            writer.writerow((row.trace, row.op_class, row.shape, row.measured_ns, *times, *bounds))


def main() -> None:
    """Print the figures per trace and class, and the shapes with the largest errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("profiles", type=Path, help="folder of recordings")
    parser.add_argument("--tables", type=Path, help="folder of tables of measured operations")
    parser.add_argument(
        "--worst",
        type=int,
        default=10,
        help="number of shapes with the largest errors to print (default: 10)",
    )
    parser.add_argument("--csv", type=Path, help="write every shape to this file")
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
