"""Errors of predicted transformer steps on one GPU: ``python -m benchmarks.single_gpu``.

Reads ``neusight_e2e.csv`` (``--data``): PyTorch, float32 without TF32, forward, or forward and backward,
eager or compiled (``fusion``), on eight devices. The table also has the predictions of NeuSight, which are
printed for comparison. :class:`hespas.generators.eager.EagerStep` generates the workload of each row. The
predicted time is the sum of the composite's estimates over the operators. This prediction is not fitted to
these rows.

A second prediction is calibrated per device with a factor for matrix products and a factor for all other
operators, fitted on rows of split ``calib`` alone. The fit has a ridge on the logarithms of the factors,
which keeps them near 1 if rows are few, and a robust loss, in which outliers count linearly. Rows of
``calib`` are predicted with factors from the other rows of their device.

A third prediction has the step factor of ``hespas-validate calibrate --end-to-end``, by device, framework and
phase, fitted on rows of split ``calib`` of other models. ``--rows`` prints each row. Exits with 1 if the mean
error is above ``--max-mape``, or step factors raise the mean error by more than one percentage point.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import nan
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hespas.estimators import load_estimator
from hespas.estimators.interface import estimate_with
from hespas.fitting.effects import fit_step_factor
from hespas.fitting.solvers import robust_least_squares
from hespas.fitting.statistics import error_figures
from hespas.generators.eager import EagerStep, eager_model
from hespas.graph import OpClass, OpGraph
from hespas.graph.columns import FloatArray
from hespas.graph.errors import FormatError, UsageError
from hespas.hardware import load_device

__all__ = ["Point", "calibrated", "factors_of", "main", "points_of", "step_of", "with_step_factors"]

_DATA = Path(__file__).parents[1].parent / "shared" / "data" / "groundtruth" / "neusight_e2e.csv"
_MODELS: Mapping[str, str] = {
    "bert_large": "bert-large",
    "gpt2_large": "gpt2-large",
    "gpt3_27": "gpt3-2.7b",
    "gpt3_xl": "gpt3-xl",
    "opt_13": "opt-1.3b",
    "switchxl4": "switch-xl-4",
}
_NOISE, _SPREAD = 0.05, 0.15
"""Standard deviations of logarithms: of measured times around the prediction, and of factors around 1."""


class Row(NamedTuple):
    """A row of the table: device, workload and measured time [ms]. ``peer_ms`` is the prediction of
    NeuSight.
    """

    hardware: str
    model: str
    mode: str
    option: str
    seqlen: int
    batch: int
    split: str
    measured_ms: float
    peer_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A row and its predictions [ms]: matrix products, all other operators, the step with the factors of the
    device, and the step with the step factor of ``others`` other models.
    """

    row: Row
    products_ms: float
    others_ms: float
    calibrated_ms: float = nan
    stepped_ms: float = nan
    others: int = 0

    @property
    def predicted_ms(self) -> float:
        """Time of the step [ms] without end-to-end calibration."""
        return self.products_ms + self.others_ms


def rows_of(path: Path) -> list[Row]:
    """Return the rows of the table. Raises ``FormatError`` for an absent column or a cell that is not a
    number.
    """
    with path.open(newline="", encoding="utf-8") as stream:
        found: list[Row] = []
        for number, cells in enumerate(csv.DictReader(stream)):
            try:
                found.append(_row(cells))
            except (KeyError, ValueError) as error:
                raise FormatError(
                    f"row {number}: {error}",
                    path=str(path),
                    hint="use a table with the columns of neusight_e2e.csv",
                ) from error
    return found


def _row(cells: Mapping[str, str]) -> Row:
    return Row(
        hardware=cells["hardware"],
        model=cells["model"],
        mode=cells["mode"],
        option=cells["option"],
        seqlen=int(cells["seqlen"]),
        batch=int(cells["batch"]),
        split=cells["split"],
        measured_ms=float(cells["measured_e2e_ms"]),
        peer_ms=float(cells["neusight_e2e_ms"] or nan),
    )


def step_of(row: Row) -> EagerStep:
    """Return the generator of the step of a row. Raises ``UsageError`` for an unknown model."""
    return EagerStep(
        model=eager_model(_MODELS.get(row.model, row.model)),
        batch=row.batch,
        length=row.seqlen,
        training=row.mode == "train",
        compiled=row.option == "fusion",
    )


@cache
def _graph_of(step: EagerStep) -> OpGraph:
    return step.workload().classes[0]


def points_of(rows: Iterable[Row], left_out: Counter[str] | None = None) -> Iterator[Point]:
    """Yield the predictions of the composite, for matrix products and all other operators.

    Rows of unknown models and devices are skipped; ``left_out`` receives their number by reason.
    """
    composite = load_estimator("composite")
    for row in rows:
        try:
            step, device = step_of(row), load_device(row.hardware)
        except UsageError as error:
            if left_out is not None:
                left_out[error.message] += 1
            continue
        graph = _graph_of(step)
        times = estimate_with(composite, graph, device).duration_ns / 1e6
        product = graph.op_class == OpClass.CONTRACTION
        yield Point(row=row, products_ms=float(times[product].sum()), others_ms=float(times[~product].sum()))


def factors_of(points: Sequence[Point]) -> tuple[float, float]:
    """Return the factors of matrix products and of all other operators that fit the measured times of one
    device best. Without points both are 1.
    """
    if not points:
        return 1.0, 1.0
    parts = np.array([[each.products_ms, each.others_ms] for each in points], np.float64)
    measured = np.log([each.row.measured_ms for each in points])

    def errors(logs: FloatArray) -> FloatArray:
        off = (np.log(parts @ np.exp(logs)) - measured) / _NOISE
        return np.concatenate((off, logs / _SPREAD))

    first, second = np.exp(robust_least_squares(errors, np.zeros(2), 1.0).values).tolist()
    return first, second


def calibrated(points: Sequence[Point]) -> list[Point]:
    """Return the points with the factors of their device, fitted on its other rows of split ``calib``."""
    fitted = [each for each in points if each.row.split == "calib"]
    found: list[Point] = []
    for each in points:
        others = [one for one in fitted if one.row.hardware == each.row.hardware and one is not each]
        first, second = factors_of(others)
        found.append(replace(each, calibrated_ms=first * each.products_ms + second * each.others_ms))
    return found


def with_step_factors(points: Sequence[Point]) -> list[Point]:
    """Return the points with the step factor of their device, framework and phase, fitted on rows of split
    ``calib`` of other models.
    """
    stepped: list[Point] = []
    for point in points:
        cell = (point.row.hardware, point.row.option, point.row.mode)
        others = [
            other
            for other in points
            if other.row.split == "calib"
            and other.row.model != point.row.model
            and (other.row.hardware, other.row.option, other.row.mode) == cell
        ]
        models = [other.row.model for other in others]
        error = np.log([other.row.measured_ms / other.predicted_ms for other in others])
        factor = float(np.exp(fit_step_factor(models, error).mean)) if others else 1.0
        stepped.append(replace(point, stepped_ms=factor * point.predicted_ms, others=len(set(models))))
    return stepped


_GROUPS: Sequence[tuple[str, Callable[[Row], str]]] = (
    ("split", lambda row: row.split),
    ("device", lambda row: row.hardware),
    ("model", lambda row: row.model),
    ("mode", lambda row: f"{row.mode}{' compiled' if row.option else ''}"),
)
_HEAD = ("n", "mean", "median", "P90", "bias")


def _figures(points: Sequence[Point], of: Callable[[Point], float]) -> str:
    """Return the error figures [%] of the points with a prediction, as text."""
    error = np.array([of(each) / each.row.measured_ms - 1 for each in points], np.float64)
    error = error[np.isfinite(error)]
    statistics = error_figures(error)
    figures = (f"{100 * statistics[name]:7.1f}" for name in ("mape", "median_ape", "p90_ape"))
    return f"{len(error):4}{''.join(figures)}{100 * statistics['bias']:+7.1f}"


_PREDICTIONS: Mapping[str, Callable[[Point], float]] = {
    "not calibrated": lambda point: point.predicted_ms,
    "factors of a device": lambda point: point.calibrated_ms,
    "step factor": lambda point: point.stepped_ms,
    "NeuSight": lambda point: point.row.peer_ms,
}


def _print_groups(points: Sequence[Point]) -> None:
    head = "".join(f"{each:>{4 if each == 'n' else 7}}" for each in _HEAD)
    print(f"{'error [%]':28}" + "".join(f"  {name:^32}" for name in _PREDICTIONS))
    print(f"{'':28}" + f"  {head}" * len(_PREDICTIONS))
    groups = [("", list(points))]
    for title, of in _GROUPS:
        names = dict.fromkeys(of(each.row) for each in points)
        groups += [(f"{title} {name}", [one for one in points if of(one.row) == name]) for name in names]
    for count in sorted({point.others for point in points}):
        groups.append((f"other models {count}", [point for point in points if point.others == count]))
    for name, some in groups:
        print(f"{name or 'all':28}" + "".join(f"  {_figures(some, of)}" for of in _PREDICTIONS.values()))


def _print_rows(points: Sequence[Point]) -> None:
    print(f"{'row':58}{'measured':>10}" + "".join(f"{name:>20}" for name in _PREDICTIONS))
    for each in points:
        row = each.row
        name = f"{row.hardware} {row.model} {row.mode} {row.seqlen}x{row.batch} {row.option}"
        predictions = "".join(
            f"{of(each):11.1f} ({100 * of(each) / row.measured_ms - 100:+5.1f}%)"
            for of in _PREDICTIONS.values()
        )
        print(f"{name:58}{row.measured_ms:10.1f}{predictions}")


def main() -> int:
    """Print the table. Return 1 if the mean error without calibration is above ``--max-mape``, or step
    factors raise it by more than one percentage point.
    """
    parser = argparse.ArgumentParser(
        description="Compare predicted transformer steps on one GPU with measured times."
    )
    parser.add_argument("--data", type=Path, default=_DATA, help="path of neusight_e2e.csv")
    parser.add_argument("--rows", action="store_true", help="print each row")
    parser.add_argument(
        "--max-mape",
        type=float,
        default=12.0,
        metavar="PERCENT",
        help="bound of the mean error (default: %(default)s)",
    )
    options = parser.parse_args()
    path: Path = options.data
    if not path.is_file():
        print(f"{path} not found: nothing to compare; pass --data")
        return 0
    left_out = Counter[str]()
    points = with_step_factors(calibrated(list(points_of(rows_of(path), left_out))))
    for reason, count in left_out.items():
        print(f"{count} rows skipped: {reason}")
    if not points:
        print("no rows to compare")
        return 0
    if options.rows:
        _print_rows(points)
    _print_groups(points)
    mean, stepped = (
        100 * float(np.mean([abs(of(each) / each.row.measured_ms - 1) for each in points]))
        for of in (_PREDICTIONS["not calibrated"], _PREDICTIONS["step factor"])
    )
    return int(mean > options.max_mape or stepped > mean + 1.0)


if __name__ == "__main__":
    sys.exit(main())
