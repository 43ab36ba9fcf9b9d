"""Few measurements of a new device.

    python -m benchmarks.carry_over.few_rows --tables DIR [--part NAME ...] [--family] [--draws N]

Each device of a table is taken for new: models are fitted on the others' ``calib`` rows (``--family``: of
other families alone), then some of its own are drawn at random, and its ``devval`` rows are predicted by

    zero      the model of the others
    form      the form fitted to its own rows alone, nothing known beforehand
    adapted   the model of the others adapted to them (``calibrate --estimator learned``)
    chosen    whichever of these errs least on rows left out

A line tells the MAPE of each, and what of the rows lies in the adapted model's 90 % intervals.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from hespas.estimators.forms import form_time_ns
from hespas.estimators.learned.inference import LoadedModels
from hespas.estimators.learned.serialization import LearnedModel, cards_in, save_model
from hespas.fitting.device_forms import classes_of, fit_class
from hespas.fitting.learned import fit_rows
from hespas.fitting.learned_parts import (
    PARTS,
    LearnedPart,
    family_name,
    rows_for,
    rows_of_part,
)
from hespas.fitting.own_models import adaptable, adapted
from hespas.fitting.rows import known_variants
from hespas.graph.columns import FloatArray
from hespas.hardware import ANY, Device, device_names, named_device
from hespas.measurements import Measurements, read_measurements

__all__ = ["Curve", "curves", "main"]

_COUNTS = (20, 50, 200, 500, 2000)
_SCORED = 1500
_FITTED = 3000
"""TrainingRows of each other device in a fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Errors (MAPE) with ``rows`` of a device; ``coverage`` of the adapted model's intervals."""

    device: str
    rows: int
    zero: float
    form: float
    adapted: float
    chosen: float
    coverage: float


def curves(part: LearnedPart, table: Measurements, *, family: bool, seeds: Sequence[int]) -> Iterator[Curve]:
    """Every device of a table taken for new."""
    table = table.take(rows_of_part(part, table))
    known = [name for name in table.hardware.used() if name in set(device_names())]
    for name in known:
        others = [each for each in known if each != name]
        if family:
            mine = family_name(named_device(name))
            others = [each for each in others if family_name(named_device(each)) != mine]
        if others:
            model = _of_others(part, table.part("calib"), others)
            with TemporaryDirectory() as folder:
                save_model(model, Path(folder))
                others_know = _Others(part, model, Path(folder))
                for seed in seeds:
                    yield from _curve(others_know, table.on(name), named_device(name), seed)


@dataclass(frozen=True, slots=True)
class _Others:
    """The model of the other devices, and the folder that it is in."""

    part: LearnedPart
    model: LearnedModel
    folder: Path


def _of_others(part: LearnedPart, table: Measurements, names: Sequence[str]) -> LearnedModel:
    draw = np.random.default_rng(0)
    rows = np.concatenate([draw.permutation(table.hardware.where(name))[:_FITTED] for name in names])
    return fit_rows(part, rows_for(part, table.take(np.sort(rows))), seed=0)


def _curve(others: _Others, table: Measurements, device: Device, seed: int) -> Iterator[Curve]:
    part, model, cards = others.part, others.model, cards_in(others.folder)
    draw = np.random.default_rng(seed)
    calib, scored = table.part("calib"), table.part("devval")
    scored = scored.take(np.sort(draw.permutation(len(scored))[:_SCORED]))
    order = draw.permutation(len(calib))
    zero = _said(model, scored, device)
    for count in _COUNTS:
        if count > len(calib):
            return
        some = calib.take(np.sort(order[:count]))
        found = adaptable(part, rows_for(part, some, {device.name: device}), device, cards, seed=0)
        form, form_cv = _of_form(some, scored, device)
        ways = [(_error(_said(model, some, device), some), zero), (form_cv, form)]
        errors = [_error(zero, scored), _error(form, scored), np.nan]
        coverage = np.nan
        if found is not None:
            own = adapted(found, device, seed=0)
            said = LoadedModels([own]).predict(scored.ops, device)
            errors[2] = _error(said.duration_ns, scored)
            told = [np.nan if row.mape is None else row.mape for row in own.card.errors]
            ways.append((float(np.mean(told)), said.duration_ns))
            within = (said.low_ns <= scored.duration_ns) & (scored.duration_ns <= said.high_ns)
            coverage = float(within.mean())
        _, best = min(ways, key=lambda each: np.nan_to_num(each[0], nan=np.inf))
        yield Curve(
            device=device.name,
            rows=count,
            zero=errors[0],
            form=errors[1],
            adapted=errors[2],
            chosen=_error(best, scored),
            coverage=coverage,
        )


def _said(model: LearnedModel, table: Measurements, device: Device) -> FloatArray:
    variants = {cell.variant for cell in model.card.cells}
    return LoadedModels([model]).predict(known_variants(table.ops, variants), device).duration_ns


def _of_form(some: Measurements, scored: Measurements, device: Device) -> tuple[FloatArray, float]:
    """What fits of some rows say of others, and their error on rows left out; NaN where too few."""
    said = np.full(len(scored), np.nan)
    errors: list[float] = []
    weights: list[int] = []
    for rows in classes_of(some):
        fit = fit_class(rows, rows.machine(device), {}, 0)
        if fit is None:
            continue
        kind, op, scheme, variant = rows.key
        errors.append(float(np.abs(fit.predicted_ns / fit.measured_ns - 1).mean()))
        weights.append(len(rows.measured))
        for labels, at in scored.ops.classes():
            if (labels[0], labels[2], labels[3]) == (kind, scheme, variant) and op in (ANY, labels[1]):
                machine = rows.machine(device)
                said[at] = form_time_ns(fit.form, fit.solution.values, scored.ops.take(at), machine)
    return said, float(np.average(errors, weights=weights)) if errors else np.nan


def _error(said_ns: FloatArray, table: Measurements) -> float:
    known = np.isfinite(said_ns)
    return float(np.abs(said_ns[known] / table.duration_ns[known] - 1).mean()) if known.any() else np.nan


def _line(name: str, curve: Curve) -> str:
    shares = (curve.zero, curve.form, curve.adapted, curve.chosen)
    shown = "".join(f"{share:8.1%}" for share in shares)
    return f"{name:24s} {curve.device:20s} {curve.rows:6,d}{shown}{curve.coverage:8.0%}\n"


def main() -> None:
    """Print a line for each device and number of rows, then means over the devices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="folder of measured tables")
    parser.add_argument("--part", action="append", help="models (default: gemm-bf16)")
    parser.add_argument("--family", action="store_true", help="without the device's family")
    parser.add_argument("--draws", type=int, default=3, help="draws of rows (default: 3)")
    arguments = parser.parse_args()
    wanted = arguments.part or ["gemm-bf16"]
    titles = "".join(f"{title:>8s}" for title in ("zero", "form", "adapted", "chosen", "cover"))
    sys.stdout.write(f"{'model':24s} {'device':20s} {'rows':>6s}{titles}\n")
    for part in (each for each in PARTS if each.name in wanted):
        [path] = sorted(arguments.tables.glob(f"{part.table}.*"))[:1]
        found: list[Curve] = []
        for curve in curves(
            part, read_measurements(path), family=arguments.family, seeds=range(arguments.draws)
        ):
            sys.stdout.write(_line(part.name, curve))
            sys.stdout.flush()
            found.append(curve)
        for count in _COUNTS:
            if some := [each for each in found if each.rows == count]:
                sys.stdout.write(_line(part.name, _mean(some)))


def _mean(some: Sequence[Curve]) -> Curve:
    def mean(name: str) -> float:
        return float(np.nanmean([getattr(each, name) for each in some]))

    return Curve(
        device="all",
        rows=some[0].rows,
        zero=mean("zero"),
        form=mean("form"),
        adapted=mean("adapted"),
        chosen=mean("chosen"),
        coverage=mean("coverage"),
    )


if __name__ == "__main__":
    main()
