"""Errors of models for a new device that has few measured rows.

    python -m benchmarks.carry_over.few_rows --tables DIR [--part NAME ...] [--siblings] [--draws N]
                                             [--device NAME ...] [--count N ...] [--kit]

Each device of a table is treated as new: its architecture is removed from the shipped model (``--siblings``:
only the device). Then some of its ``calib`` rows are drawn at random, and its ``devval`` rows are predicted
by

    zero      the model of the other devices
    form      the form fitted to the drawn rows alone, without other knowledge
    adapted   the model of the other devices adapted to the drawn rows (``calibrate --estimator learned``)

A line has the MAPE of each, the error on the card of the adapted model (promise), and the share of rows in
its 90 % intervals (cover). ``zero`` and ``adapted`` are compared on the rows that both cover.

With ``--kit``, the last line of a device uses the rows nearest to the shapes of the measurement kit (``hespas
hardware measure --kit``) instead of random rows. All lines then use only rows that the kit could measure:
rows in its number format, and of the library that most rows of the device are from.
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
from hespas.fitting.device_forms import classes_of, fit_classes
from hespas.fitting.learned_parts import PARTS, LearnedPart, rows_for, rows_of_part
from hespas.fitting.own_models import adaptable, adapted
from hespas.fitting.rows import known_variants
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import ANY, Device, named_device
from hespas.measurements import Measurements, read_measurements
from hespas.measurements.kit import kit_operations, kit_shapes
from hespas.operations import KINDS, Operations

__all__ = ["Curve", "curves", "main"]

_COUNTS = (20, 50, 200, 500, 2000)
_SCORED = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Errors (MAPE) with ``rows`` rows of a device, which are random or (``is_kit``) nearest to the shapes of
    the kit. ``promised`` is the error on the card of the adapted model, ``coverage`` the share of rows in its
    90 % intervals.
    """

    device: str
    rows: int
    is_kit: bool
    zero: float
    form: float
    adapted: float
    promised: float
    coverage: float


@dataclass(frozen=True, slots=True)
class _Others:
    """Model of the other devices, and the folder that contains it."""

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
    kit: bool = False,
) -> Iterator[Curve]:
    """Yield the errors of every device of a table, each treated as new. Devices are skipped if no other
    remains.
    """
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
            rows, device = table.on(new.name), named_device(new.name)
            shapes: Operations | None = None
            if kit:
                shapes, rows = _kit_and_its_class(device, rows)
                if not len(shapes):
                    continue
            for seed in seeds:
                yield from _curve(others, rows, shapes, seed, counts)


def _kit_and_its_class(device: Device, rows: Measurements) -> tuple[Operations, Measurements]:
    """Return the shapes of the kit in the kinds and number formats of the rows, and the rows in these
    formats, of the library that has most rows.
    """
    shapes = kit_operations(kit_shapes(device), device)
    shapes = shapes.take(
        np.intersect1d(shapes.kind.where(*rows.ops.kind.used()), shapes.scheme.where(*rows.ops.scheme.used()))
    )
    rows = rows.take(rows.ops.scheme.where(*shapes.scheme.used()))
    variant = rows.ops.variant
    library = max(variant.used(), key=lambda name: len(variant.where(name)), default="")
    return shapes, rows.take(variant.where(library))


def nearest_rows(table: Measurements, shapes: Operations) -> IntArray:
    """Return the sorted indices of the row nearest to each shape, by distance of log2 of sizes; no row
    twice.
    """
    names = [name for name in KINDS[shapes.kind[0]] if name != "pairs"]

    def position(ops: Operations) -> FloatArray:
        sizes = np.stack([np.nan_to_num(ops.dim(name), nan=1.0) for name in names], axis=1)
        return np.log2(np.maximum(sizes, 1.0))

    rows, found = position(table.ops), list[int]()
    for shape in position(shapes):
        distance = ((rows - shape) ** 2).sum(axis=1)
        distance[found] = np.inf
        found.append(int(np.argmin(distance)))
    return np.sort(np.array(found, np.int64))


def _curve(
    others: _Others, table: Measurements, shapes: Operations | None, seed: int, counts: Sequence[int]
) -> Iterator[Curve]:
    device = named_device(table.hardware[0])
    part, model, cards = others.part, others.model, cards_in(others.folder)
    draw = np.random.default_rng(seed)
    calib, scored = table.part("calib"), table.part("devval")
    scored = scored.take(np.sort(draw.permutation(len(scored))[:_SCORED]))
    order = draw.permutation(len(calib))
    zero = _predicted_ns(model, scored, device)
    choices = [(np.sort(order[:count]), False) for count in counts if count <= len(calib)]
    if shapes is not None:
        choices.append((nearest_rows(calib, shapes), True))
    for rows, is_kit in choices:
        some = calib.take(rows)
        found = adaptable(part, rows_for(part, some, {device.name: device}), device, cards, seed=0)
        errors = [_error(zero, scored), _error(_of_form(some, scored, device), scored), np.nan]
        promised = coverage = np.nan
        if found is not None:
            own = adapted(found, device, seed=0)
            predictions = LoadedModels([own]).predict(scored.ops, device)
            both = np.isfinite(zero) & np.isfinite(predictions.duration_ns)
            errors[0] = _error(np.where(both, zero, np.nan), scored)
            errors[2] = _error(np.where(both, predictions.duration_ns, np.nan), scored)
            card_errors = [(row.mape, row.n) for row in own.card.errors if row.mape is not None]
            promised = float(
                np.average([mape for mape, _ in card_errors], weights=[n for _, n in card_errors])
            )
            covered = ~np.isnan(predictions.duration_ns)
            within = (predictions.low_ns <= scored.duration_ns) & (scored.duration_ns <= predictions.high_ns)
            coverage = float(within[covered].mean())
        yield Curve(
            device=device.name,
            rows=len(rows),
            is_kit=is_kit,
            zero=errors[0],
            form=errors[1],
            adapted=errors[2],
            promised=promised,
            coverage=coverage,
        )


def _predicted_ns(model: LearnedModel, table: Measurements, device: Device) -> FloatArray:
    variants = {cell.variant for cell in model.card.cells}
    return LoadedModels([model]).predict(known_variants(table.ops, variants), device).duration_ns


def _of_form(some: Measurements, scored: Measurements, device: Device) -> FloatArray:
    """Return times [ns] of ``scored`` by forms fitted to ``some``; NaN for classes with too few rows."""
    predicted_ns = np.full(len(scored), np.nan)
    for fit in fit_classes(((rows, rows.machine(device)) for rows in classes_of(some)), {}, 0):
        kind, op, scheme, variant = fit.rows.key
        for labels, at in scored.ops.classes():
            if (labels[0], labels[2], labels[3]) == (kind, scheme, variant) and op in (ANY, labels[1]):
                machine = fit.rows.machine(device)
                predicted_ns[at] = form_time_ns(fit.form, fit.solution.values, scored.ops.take(at), machine)
    return predicted_ns


def _error(predicted_ns: FloatArray, table: Measurements) -> float:
    known = np.isfinite(predicted_ns)
    return float(np.abs(predicted_ns[known] / table.duration_ns[known] - 1).mean()) if known.any() else np.nan


def _line(name: str, curve: Curve) -> str:
    shares = (curve.zero, curve.form, curve.adapted, curve.promised)
    shown = "".join(f"{share:8.1%}" for share in shares)
    rows = f"kit {curve.rows}" if curve.is_kit else f"{curve.rows:,d}"
    return f"{name:24s} {curve.device:20s} {rows:>6s}{shown}{curve.coverage:8.0%}\n"


def main() -> None:
    """Print a line for each device, draw and number of rows, then means over all devices and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="folder of measured tables")
    parser.add_argument("--part", action="append", help="parts of the learned models (default: gemm-bf16)")
    parser.add_argument("--siblings", action="store_true", help="keep other devices of its architecture")
    parser.add_argument("--device", action="append", default=[], help="devices (default: all)")
    parser.add_argument(
        "--count",
        action="append",
        type=int,
        help=f"numbers of rows (default: {', '.join(map(str, _COUNTS))})",
    )
    parser.add_argument("--kit", action="store_true", help="compare with rows nearest to the kit's shapes")
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
            kit=arguments.kit,
        ):
            sys.stdout.write(_line(part.name, curve))
            sys.stdout.flush()
            found.append(curve)
        for kind in dict.fromkeys((curve.is_kit, 0 if curve.is_kit else curve.rows) for curve in found):
            some = [each for each in found if (each.is_kit, 0 if each.is_kit else each.rows) == kind]
            sys.stdout.write(_line(part.name, _mean(some)))


def _mean(some: Sequence[Curve]) -> Curve:
    def mean(name: str) -> float:
        return float(np.nanmean([getattr(each, name) for each in some]))

    return Curve(
        device="all",
        rows=some[0].rows,
        is_kit=some[0].is_kit,
        zero=mean("zero"),
        form=mean("form"),
        adapted=mean("adapted"),
        promised=mean("promised"),
        coverage=mean("coverage"),
    )


if __name__ == "__main__":
    main()
