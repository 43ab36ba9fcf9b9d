"""Transformers on one GPU against measured times: ``python -m benchmarks.single_gpu``.

Reads ``neusight_e2e.csv`` (``--data`` says where): PyTorch, float32 without TF32, forward, or forward and
backward, eager or compiled (``fusion``), on eight devices; NeuSight's own predictions stand in the table and
are printed beside ours. Each row is the workload that :class:`hespas.generators.eager.EagerStep` makes, its
time the sum over its operators of what the composite says of the device. Nothing is fitted to these rows.

A second figure of each row is calibrated: a factor for products and one for all else for each device, fitted
on rows of split ``calib`` alone. Factors are held near 1 as far as few rows cannot tell (ridge on their
logarithms), and rows far off count by their size, not its square. Rows of ``calib`` are predicted with
factors from the other rows of their device.

A third figure has the step factor of ``hespas-validate calibrate --end-to-end``, by device, framework and
phase, fitted on rows of split ``calib`` of other models than that of the row. ``--rows`` prints each row.
``--max-mape`` makes it exit 1, and so do step factors that raise the mean error by more than a point.
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
"""Standard deviations of logarithms: of rows about a device's factors, of factors about 1."""


class Row(NamedTuple):
    """A row of the table: what ran where, and how long [ms]; ``peer_ms`` is NeuSight's own prediction."""

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
    """A row and what is predicted [ms]: products, everything else, both with a device's factors, and both
    with the step factor of ``others`` other models.
    """

    row: Row
    products_ms: float
    others_ms: float
    calibrated_ms: float = nan
    stepped_ms: float = nan
    others: int = 0

    @property
    def predicted_ms(self) -> float:
        """With no calibration end to end."""
        return self.products_ms + self.others_ms


def rows_of(path: Path) -> list[Row]:
    """The rows of the table. Raises ``FormatError`` for an absent column or a cell that is no number."""
    with path.open(newline="", encoding="utf-8") as stream:
        found: list[Row] = []
        for number, cells in enumerate(csv.DictReader(stream)):
            try:
                found.append(_row(cells))
            except (KeyError, ValueError) as error:
                raise FormatError(
                    f"row {number}: {error}", path=str(path), hint="the columns of neusight_e2e.csv"
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
    """What a row ran. Raises ``UsageError`` for a model that is not known."""
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
    """Yield the predictions of the composite; products apart from the rest.

    Rows of unknown models and devices are left out; ``left_out`` receives their number by reason.
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
    """Factors of products and of all else with which measured times of one device are met best; 1 and 1 of
    no points.
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
    """The points with the factors of their device, which know nothing of the row itself nor of ``devval``."""
    fitted = [each for each in points if each.row.split == "calib"]
    found: list[Point] = []
    for each in points:
        others = [one for one in fitted if one.row.hardware == each.row.hardware and one is not each]
        first, second = factors_of(others)
        found.append(replace(each, calibrated_ms=first * each.products_ms + second * each.others_ms))
    return found


def with_step_factors(points: Sequence[Point]) -> list[Point]:
    """Return the points with the step factor of their device, framework and phase that rows of split
    ``calib`` of other models give.
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


# What is printed.

_GROUPS: Sequence[tuple[str, Callable[[Row], str]]] = (
    ("split", lambda row: row.split),
    ("device", lambda row: row.hardware),
    ("model", lambda row: row.model),
    ("mode", lambda row: f"{row.mode}{' compiled' if row.option else ''}"),
)
_HEAD = ("n", "mean", "median", "P90", "bias")


def _figures(points: Sequence[Point], of: Callable[[Point], float]) -> str:
    """Errors in percent of the points that have a prediction."""
    error = np.array([of(each) / each.row.measured_ms - 1 for each in points], np.float64)
    error = error[np.isfinite(error)]
    said = error_figures(error)
    figures = (f"{100 * said[name]:7.1f}" for name in ("mape", "median_ape", "p90_ape"))
    return f"{len(error):4}{''.join(figures)}{100 * said['bias']:+7.1f}"


_SAID: Mapping[str, Callable[[Point], float]] = {
    "not calibrated": lambda point: point.predicted_ms,
    "factors of a device": lambda point: point.calibrated_ms,
    "step factor": lambda point: point.stepped_ms,
    "NeuSight": lambda point: point.row.peer_ms,
}


def _tell(points: Sequence[Point]) -> None:
    head = "".join(f"{each:>{4 if each == 'n' else 7}}" for each in _HEAD)
    print(f"{'error [%]':28}" + "".join(f"  {name:^32}" for name in _SAID))
    print(f"{'':28}" + f"  {head}" * len(_SAID))
    groups = [("", list(points))]
    for title, of in _GROUPS:
        names = dict.fromkeys(of(each.row) for each in points)
        groups += [(f"{title} {name}", [one for one in points if of(one.row) == name]) for name in names]
    for count in sorted({point.others for point in points}):
        groups.append((f"other models {count}", [point for point in points if point.others == count]))
    for name, some in groups:
        print(f"{name or 'all':28}" + "".join(f"  {_figures(some, of)}" for of in _SAID.values()))


def _tell_rows(points: Sequence[Point]) -> None:
    print(f"{'row':58}{'measured':>10}" + "".join(f"{name:>20}" for name in _SAID))
    for each in points:
        row = each.row
        name = f"{row.hardware} {row.model} {row.mode} {row.seqlen}x{row.batch} {row.option}"
        said = "".join(
            f"{of(each):11.1f} ({100 * of(each) / row.measured_ms - 100:+5.1f}%)" for of in _SAID.values()
        )
        print(f"{name:58}{row.measured_ms:10.1f}{said}")


def main() -> int:
    """Print the table; 1 where the mean error with no calibration is above ``--max-mape``, or step factors
    raise it by more than a point.
    """
    parser = argparse.ArgumentParser(description="Transformers on one GPU against measured times.")
    parser.add_argument("--data", type=Path, default=_DATA, help="neusight_e2e.csv")
    parser.add_argument("--rows", action="store_true", help="print each row")
    parser.add_argument(
        "--max-mape", type=float, default=12.0, metavar="PERCENT", help="what the mean may be"
    )
    options = parser.parse_args()
    path: Path = options.data
    if not path.is_file():
        print(f"no {path}: nothing to compare with")
        return 0
    left_out = Counter[str]()
    points = with_step_factors(calibrated(list(points_of(rows_of(path), left_out))))
    for reason, count in left_out.items():
        print(f"{count} rows left out: {reason}")
    if not points:
        print("no row left to compare")
        return 0
    if options.rows:
        _tell_rows(points)
    _tell(points)
    mean, stepped = (
        100 * float(np.mean([abs(of(each) / each.row.measured_ms - 1) for each in points]))
        for of in (_SAID["not calibrated"], _SAID["step factor"])
    )
    return int(mean > options.max_mape or stepped > mean + 1.0)


if __name__ == "__main__":
    sys.exit(main())
