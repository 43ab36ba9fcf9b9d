"""Few measurements of a new device.

    python -m benchmarks.carry_over.few_rows --tables DIR [--part NAME ...] [--siblings] [--draws N]
                                             [--device NAME ...] [--count N ...]

Each device of a table is taken for new: its architecture is left out of the shipped model (``--siblings``:
the device alone), then some of its ``calib`` rows are drawn at random, and its ``devval`` rows are predicted
by

    zero      the model of the others
    form      the form fitted to its own rows alone, nothing known beforehand
    adapted   the model of the others adapted to them (``calibrate --estimator learned``)

A line tells the MAPE of each, the error that the card of the adapted model promises, and what of the rows
lies in its 90 % intervals.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.carry_over.new_devices import without_devices
from hespas.estimators.forms import form_time_ns
from hespas.estimators.learned.inference import LoadedModels
from hespas.estimators.learned.serialization import (
    LearnedModel,
    cards_in,
    load_model,
    save_model,
    shipped_folder,
)
from hespas.fitting.device_forms import classes_of, fit_class
from hespas.fitting.learned_parts import PARTS, LearnedPart, rows_for, rows_of_part
from hespas.fitting.own_models import adaptable, adapted
from hespas.fitting.rows import known_variants
from hespas.graph.columns import FloatArray
from hespas.hardware import ANY, Device, named_device
from hespas.measurements import Measurements, read_measurements

__all__ = ["Curve", "curves", "main"]

_COUNTS = (20, 50, 200, 500, 2000)
_SCORED = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Errors (MAPE) with ``rows`` of a device; ``promised`` is the error on the card of the adapted model,
    ``coverage`` of its intervals.
    """

    device: str
    rows: int
    zero: float
    form: float
    adapted: float
    promised: float
    coverage: float


@dataclass(frozen=True, slots=True)
class _Others:
    """The model of the other devices, and the folder that it is in."""

    part: LearnedPart
    model: LearnedModel
    folder: Path


def curves(
    part: LearnedPart,
    table: Measurements,
    *,
    siblings: bool,
    seeds: Sequence[int],
    counts: Sequence[int] = _COUNTS,
    devices: Sequence[str] = (),
) -> Iterator[Curve]:
    """Every device of a table taken for new."""
    table = table.take(rows_of_part(part, table))
    shipped = load_model(shipped_folder() / f"{part.name}.json")
    fitted = rows_for(part, table.part("calib"))
    for new in shipped.card.devices:
        held_out = [
            other.name
            for other in shipped.card.devices
            if other.name == new.name or (other.arch == new.arch and not siblings)
        ]
        if len(held_out) == len(shipped.card.devices) or (devices and new.name not in devices):
            continue
        model = without_devices(shipped, fitted, held_out)
        with TemporaryDirectory() as folder:
            save_model(model, Path(folder))
            others = _Others(part, model, Path(folder))
            for seed in seeds:
                yield from _curve(others, table.on(new.name), named_device(new.name), seed, counts)


def _curve(
    others: _Others, table: Measurements, device: Device, seed: int, counts: Sequence[int]
) -> Iterator[Curve]:
    part, model, cards = others.part, others.model, cards_in(others.folder)
    draw = np.random.default_rng(seed)
    calib, scored = table.part("calib"), table.part("devval")
    scored = scored.take(np.sort(draw.permutation(len(scored))[:_SCORED]))
    order = draw.permutation(len(calib))
    zero = _said(model, scored, device)
    for count in counts:
        if count > len(calib):
            return
        some = calib.take(np.sort(order[:count]))
        found = adaptable(part, rows_for(part, some, {device.name: device}), device, cards, seed=0)
        errors = [_error(zero, scored), _error(_of_form(some, scored, device), scored), np.nan]
        promised = coverage = np.nan
        if found is not None:
            own = adapted(found, device, seed=0)
            said = LoadedModels([own]).predict(scored.ops, device)
            errors[2] = _error(said.duration_ns, scored)
            told = [(row.mape, row.n) for row in own.card.errors if row.mape is not None]
            promised = float(np.average([mape for mape, _ in told], weights=[n for _, n in told]))
            covered = ~np.isnan(said.duration_ns)
            within = (said.low_ns <= scored.duration_ns) & (scored.duration_ns <= said.high_ns)
            coverage = float(within[covered].mean())
        yield Curve(
            device=device.name,
            rows=count,
            zero=errors[0],
            form=errors[1],
            adapted=errors[2],
            promised=promised,
            coverage=coverage,
        )


def _said(model: LearnedModel, table: Measurements, device: Device) -> FloatArray:
    variants = {cell.variant for cell in model.card.cells}
    return LoadedModels([model]).predict(known_variants(table.ops, variants), device).duration_ns


def _of_form(some: Measurements, scored: Measurements, device: Device) -> FloatArray:
    """What fits of some rows say of others; NaN where too few."""
    said = np.full(len(scored), np.nan)
    for rows in classes_of(some):
        fit = fit_class(rows, rows.machine(device), {}, 0)
        if fit is None:
            continue
        kind, op, scheme, variant = rows.key
        for labels, at in scored.ops.classes():
            if (labels[0], labels[2], labels[3]) == (kind, scheme, variant) and op in (ANY, labels[1]):
                machine = rows.machine(device)
                said[at] = form_time_ns(fit.form, fit.solution.values, scored.ops.take(at), machine)
    return said


def _error(said_ns: FloatArray, table: Measurements) -> float:
    known = np.isfinite(said_ns)
    return float(np.abs(said_ns[known] / table.duration_ns[known] - 1).mean()) if known.any() else np.nan


def _line(name: str, curve: Curve) -> str:
    shares = (curve.zero, curve.form, curve.adapted, curve.promised)
    shown = "".join(f"{share:8.1%}" for share in shares)
    return f"{name:24s} {curve.device:20s} {curve.rows:6,d}{shown}{curve.coverage:8.0%}\n"


def main() -> None:
    """Print a line for each device and number of rows, then means over the devices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="folder of measured tables")
    parser.add_argument("--part", action="append", help="models (default: gemm-bf16)")
    parser.add_argument("--siblings", action="store_true", help="with the others of its architecture")
    parser.add_argument("--device", action="append", default=[], help="devices (default: all)")
    parser.add_argument("--count", action="append", type=int, help="numbers of rows")
    parser.add_argument("--draws", type=int, default=3, help="draws of rows (default: 3)")
    arguments = parser.parse_args()
    wanted = arguments.part or ["gemm-bf16"]
    titles = "".join(f"{title:>8s}" for title in ("zero", "form", "adapted", "promise", "cover"))
    sys.stdout.write(f"{'model':24s} {'device':20s} {'rows':>6s}{titles}\n")
    for part in (each for each in PARTS if each.name in wanted):
        [path] = sorted(arguments.tables.glob(f"{part.table}.*"))[:1]
        found: list[Curve] = []
        counts = arguments.count or _COUNTS
        for curve in curves(
            part,
            read_measurements(path),
            siblings=arguments.siblings,
            seeds=range(arguments.draws),
            counts=counts,
            devices=arguments.device,
        ):
            sys.stdout.write(_line(part.name, curve))
            sys.stdout.flush()
            found.append(curve)
        for count in counts:
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
        promised=mean("promised"),
        coverage=mean("coverage"),
    )


if __name__ == "__main__":
    main()
