"""Intervals of predicted steps, which ``python -m tools.fits --only intervals`` writes, and their scores.

Steps that were measured end to end are predicted: published training runs, PyTorch steps on one GPU, compiled
programs and recorded profiles. The residuals ln(measured / predicted) give the 90 % intervals by kind of
workload and extrapolation level, with the coverage, width and interval score of groups that are left out.
``python -m tools.accuracy`` copies the table to its page.
"""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, log, pi, sqrt
from pathlib import Path
from statistics import median

import numpy as np
from scipy import stats

from benchmarks.single_gpu import points_of, rows_of
from hespas import api
from hespas.estimators.configuration import WorkloadKind
from hespas.estimators.step_intervals import (
    DATA,
    StepInterval,
    step_intervals,
)
from hespas.fitting.held_out import weighted_quantiles
from hespas.graph.columns import FloatArray
from hespas.hardware import load_device
from hespas.studies.league.predict import predicted_rows
from tools.goals import architecture_left_out, shipped_cards
from tools.published_settings import prepared_table

__all__ = [
    "Form",
    "Residual",
    "Scores",
    "chosen_form",
    "new_group",
    "quantiles",
    "scored",
    "step_interval_file",
    "step_interval_table",
]

ROOT = Path(__file__).parents[1]
_ALPHA = 0.1
_LEAST_COVERAGE = 0.85
_OTHER_MODELS = ("calibrated on the other profiles", "calibrated on other devices' profiles")


@dataclass(frozen=True, slots=True)
class Residual:
    """ln(measured / predicted) of one step, the group that it shares errors with, and its weight."""

    group: str
    value: float
    weight: float = 1.0


def _weights(rows: Sequence[Residual]) -> FloatArray:
    """Return weights that count each group once; their sum is 1."""
    totals: dict[str, float] = {}
    for row in rows:
        totals[row.group] = totals.get(row.group, 0.0) + row.weight
    return np.array([row.weight / totals[row.group] / len(totals) for row in rows])


Form = Callable[[Sequence[Residual]], tuple[float, float]]
"""Function from residuals to the ends of the 90 % interval of the logarithm."""


def quantiles(rows: Sequence[Residual]) -> tuple[float, float]:
    """Return quantiles of groups with equal weights, widened by the weight of one unknown row."""
    values, weights = np.array([row.value for row in rows]), _weights(rows)
    return weighted_quantiles(values, weights)


def new_group(rows: Sequence[Residual]) -> tuple[float, float]:
    """Return the interval of a new group of a normal population with an unknown spread."""
    values, weights = np.array([row.value for row in rows]), _weights(rows)
    groups = len({row.group for row in rows})
    middle = float((weights * values).sum())
    spread = sqrt(float((weights * (values - middle) ** 2).sum()) * groups / (groups - 1))
    wide = float(stats.t.ppf(1 - _ALPHA / 2, groups - 1)) * spread * sqrt(1 + 1 / groups)
    return middle - wide, middle + wide


@dataclass(frozen=True, slots=True)
class Scores:
    """Figures of groups that are left out one by one: the share of residuals inside the interval, its mean
    width, and its mean interval score (Gneiting and Raftery 2007, equation 43), of the logarithm.
    """

    coverage: float
    width: float
    score: float


def scored(rows: Sequence[Residual], form: Form) -> Scores:
    """Return the scores of a form. O(groups rows)."""
    inside: list[bool] = []
    widths: list[float] = []
    scores: list[float] = []
    for group in sorted({row.group for row in rows}):
        low, high = form([row for row in rows if row.group != group])
        for row in rows:
            if row.group == group:
                missed = max(low - row.value, row.value - high, 0.0)
                inside.append(missed == 0.0)
                widths.append(high - low)
                scores.append(high - low + 2 / _ALPHA * missed)
    return Scores(float(np.mean(inside)), float(np.mean(widths)), float(np.mean(scores)))


def chosen_form(rows: Sequence[Residual]) -> tuple[Form, Scores]:
    """Return the form with the better score among those that cover enough, or else the wider form."""
    found = [(form, scored(rows, form)) for form in (quantiles, new_group)]
    enough = [each for each in found if each[1].coverage >= _LEAST_COVERAGE]
    if enough:
        return min(enough, key=lambda each: each[1].score)
    return max(found, key=lambda each: each[1].width)


def _of_training(table: Path, jobs: int) -> Iterator[Residual]:
    """Yield published training runs; a group is a source, a model and an accelerator."""
    with tempfile.TemporaryDirectory() as folder:
        rows = predicted_rows(prepared_table(table, Path(folder)), jobs=jobs)
    for row in rows:
        measured = row.number_of("step_time_ms")
        if not row.predicted.refused and measured > 0:
            group = " | ".join(row.cells.get(name, "") for name in ("source", "model", "accelerator"))
            same = row.number_of("rows_with_same_config")
            weight = 1.0 / same if same >= 1 else 1.0
            yield Residual(group, log(measured / (row.predicted.time_ns / 1e6)), weight)


def _of_eager(table: Path) -> Iterator[Residual]:
    """Yield steps of PyTorch on one GPU; a group is a device."""
    for point in points_of(rows_of(table)):
        yield Residual(point.row.hardware, log(point.row.measured_ms / point.predicted_ms))


_TRAIN = "resnet_50_train_step_4_devices_1024_batch.mlir.gz"
_INFER = "resnet_50_inference_step_4_devices_1024_batch.mlir.gz"
_GPUS = {"A100": "A100-SXM-40GB", "H100": "H100-SXM", "H200": "H200-SXM", "B200": "B200-SXM"}
_RECORDED = ROOT / "fixtures" / "recorded"


def _of_recorded_step() -> Residual:
    """Return the residual of the recorded CPU step that README shows, predicted from another recording."""
    with tempfile.TemporaryDirectory() as folder:
        fitted = api.calibrate(
            _RECORDED / "recorded-cpu.toml", profiles=_RECORDED / "train-small.xplane.pb.gz"
        ).write(Path(folder) / "fitted.toml")
        report = api.accuracy(_RECORDED / "train-larger.xplane.pb.gz", hardware=str(fitted))
    step = next(run for run in report.end_to_end if run.estimator == "composite")
    return Residual("fixtures/recorded", -log(1 + step.relative_error))


def _of_programs(folder: Path) -> Iterator[Residual]:
    """Yield programs that were compiled and measured (imec-int/hespas_workloads, MIT): a training step on
    four A100, steps of inference on one GPU. A group is a program and the family of its device.
    """
    published = folder.parent / "published"
    runs = [
        (_TRAIN, "A100-SXM-40GB", float(row["mean_ms"]))
        for row in _rows(published / "resnet_train_bench.csv")
        if row["workload"] == "resnet50_train"
    ]
    runs += [
        (_INFER, _GPUS[row["gpu"]], float(row["compute_us"]) / 1e3)
        for row in _rows(published / "xla_profiled_totals.csv")
        if row["workload"] == "resnet50_inference" and row["gpu"] in _GPUS
    ]
    for program, hardware, measured_ms in runs:
        done = api.simulate(folder / program, hardware)
        group = f"{program} | {load_device(hardware).family}"
        yield Residual(group, log(measured_ms / (done.step_ns / 1e6)))
    yield _of_recorded_step()


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def _of_profiles() -> Iterator[Residual]:
    """Yield recorded profiles, predicted after calibration on others: docs/accuracy/accuracy.json."""
    figures = json.loads((ROOT / "docs" / "accuracy" / "accuracy.json").read_bytes())
    for profile in figures["profiles"]:
        for row in profile["rows"]:
            errors = next((row["errors"][name] for name in _OTHER_MODELS if name in row["errors"]), None)
            if row["op_class"] == "all" and errors is not None:
                yield Residual(profile["name"], -log(1 + errors["sum_error"]))


_SOURCES: dict[WorkloadKind, str] = {
    "training": "published training runs (docs/accuracy/training.md); groups: source, model, accelerator",
    "eager": "PyTorch steps on one GPU (python -m benchmarks.single_gpu); groups: device",
    "program": "compiled ResNet-50 on GPUs, a recorded step on a CPU; groups: program, family of devices",
    "serving": "no measured step of serving alone: residuals of compiled programs",
    "recorded": "recorded profiles, calibrated on others (docs/accuracy/accuracy.json); groups: profile",
}


def _intervals(kind: WorkloadKind, rows: Sequence[Residual]) -> Iterator[StepInterval]:
    """Yield the interval of each extrapolation level of a kind."""
    form, scores = chosen_form(rows)
    low, high = form(rows)
    counts = {"rows": len(rows), "groups": len({row.group for row in rows})}
    yield StepInterval(
        kind=kind, level="measured", low=exp(low), high=exp(high), **counts,
        coverage=scores.coverage, width=exp(scores.width), score=scores.score, source=_SOURCES[kind],
    )  # fmt: skip
    more = _new_device_deviation() * float(stats.norm.ppf(1 - _ALPHA / 2))
    middle = (low + high) / 2
    ends = (middle + side * sqrt(((high - low) / 2) ** 2 + more**2) for side in (-1, 1))
    wide_low, wide_high = (exp(end) for end in ends)
    yield StepInterval(
        kind=kind, level="new device", low=wide_low, high=wide_high, **counts,
        source="the same, and the error of kernels on a family that was left out (docs/accuracy/index.md)",
    )  # fmt: skip


def _new_device_deviation() -> float:
    """Return the standard deviation of the logarithm of kernel times on devices whose family was left out of
    the learned models: the median over devices of the mean size of the error, over that of a standard normal
    error.
    """
    return median(architecture_left_out(shipped_cards())) / sqrt(2 / pi)


def _toml(intervals: Iterable[StepInterval]) -> str:
    lines = ["# Made by: python -m tools.fits. Factors on the predicted time of a step.\n"]
    for each in intervals:
        lines.append("\n[[interval]]\n")
        lines.append(f'kind = "{each.kind}"\nlevel = "{each.level}"\n')
        lines.append(
            f"low = {each.low:.3f}\nhigh = {each.high:.3f}\nrows = {each.rows}\ngroups = {each.groups}\n"
        )
        scores = {"coverage": each.coverage, "width": each.width, "score": each.score}
        lines += [f"{name} = {value:.3f}\n" for name, value in scores.items() if value == value]  # noqa: PLR0124
        lines.append(f'source = "{each.source}"\n')
    return "".join(lines)


_TITLE = "## Intervals of whole steps\n"
_ABOUT = """
The first line of `simulate`, `estimate`, `generate` and the league has a 90 % interval of the step time.
Its ends are the predicted time, multiplied by the factors *from* and *to* of this table. There is a row for
each kind of workload and extrapolation level (in the measured range, beyond it, or a new device). The
factors come from the errors of steps that were measured end to end. `python -m tools.fits` writes them to
`hespas/estimators/step_intervals.toml`.

*held*, *width* and *score* test the intervals on groups that are left out one by one: the share of measured
times inside, the ratio of the two ends, and the interval score (the width plus 20 times the distance
outside, of the logarithm; smaller is better). Two forms are tried: quantiles of the errors, and the
interval of a new group of a normal population. Each kind uses the form with the better score among those
that hold at least 85 %, else the wider form.

A *new device* has no measured kernels (for training steps: its family has none). Its interval also includes
the error of kernels of a family that was left out of the fits, and is not scored. Serving uses the interval
of programs, because only whole runs of servers were measured.

"""


def step_interval_table(intervals: Iterable[StepInterval]) -> str:
    """Return the section of docs/accuracy/index.md."""
    lines = [
        "| workload | level | from | to | rows | groups | held | width | score |\n",
        f"|{' --- |' * 9}\n",
    ]
    for each in intervals:
        known = each.coverage == each.coverage
        scores = f"{each.coverage:.1%} | x{each.width:.2f} | {each.score:.2f}" if known else "- | - | -"
        ends = f"x{each.low:.2f} | x{each.high:.2f}"
        lines.append(f"| {each.kind} | {each.level} | {ends} | {each.rows} | {each.groups} | {scores} |\n")
    return f"{_TITLE}{_ABOUT}{''.join(lines)}"


def _residuals(data: Path, jobs: int) -> Iterator[tuple[WorkloadKind, list[Residual]]]:
    """Yield the residuals of each kind whose input exists."""
    table, eager = (
        data / "published_e2e" / "published_training.csv",
        data / "groundtruth" / "neusight_e2e.csv",
    )
    if table.is_file():
        yield "training", list(_of_training(table, jobs))
    if eager.is_file():
        yield "eager", list(_of_eager(eager))
    if (data / "workloads").is_dir():
        programs = list(_of_programs(data / "workloads"))
        yield "program", programs
        yield "serving", programs
    yield "recorded", list(_of_profiles())


def step_interval_file(data: Path, jobs: int) -> str:
    """Return the data file from the measured steps in ``data``, the folder of shared data.

    Rows of missing inputs are not changed. ``jobs`` is the number of processes.
    """
    found = dict(step_intervals()) if DATA.is_file() else {}
    for kind, rows in _residuals(data, jobs):
        for each in _intervals(kind, rows):
            found[each.kind, each.level] = each
    return _toml(found.values())
