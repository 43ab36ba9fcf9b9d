"""All fits of a device from tables of measurements: class by class, then the whole chip, then small classes
again, drawn towards the chip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isnan, nan

import numpy as np

from hespas.estimators.forms import CHIP_WIDE_KINDS, FORMS, Form, form_time_ns, machine_of
from hespas.graph.columns import FloatArray
from hespas.hardware import ANY, Device, Fit, FitParameter
from hespas.measurements import Measurements
from hespas.operations import find_scheme
from hespas.validators.calibration.fit_class import (
    FittedClass,
    Rows,
    Trial,
    bands_of,
    classes_of,
    drawn_rows,
    error_of,
    fit_class,
    may_be_fitted,
    rounded,
    solve,
    support_of,
)

__all__ = ["Progress", "fit_device"]

Progress = Callable[[int, int, str], None]
"""Told how many classes are done, of how many, and the name of the next."""

_SMALL = 1000
"""Classes of fewer rows are fitted again, with the whole chip as their prior."""
_CHIP_WIDTH = 0.7
_SHARED = ("t0_ns", "compute", "memory")
"""Parameters that mean the same in every form that has them."""
_CHIP_ROWS = 400

_Prior = Mapping[str, tuple[float, float]]


def fit_device(
    measured: Measurements | Sequence[Measurements],
    device: Device,
    *,
    seed: int = 0,
    fitted: str = "",
    progress: Progress | None = None,
) -> tuple[Fit, ...]:
    """The fits of every class of operations that the tables hold for ``device``, and of the whole chip.

    Only rows that may be fitted enter: those of split ``calib``, or of tables without splits. ``fitted`` is
    the date written into the fits (ISO; empty: today). Deterministic for one ``seed``.
    """
    tables = [measured] if isinstance(measured, Measurements) else list(measured)
    found: dict[tuple[str, str, str, str], Rows] = {}
    for table in tables:
        for rows in classes_of(may_be_fitted(table).on(device.name)):
            if rows.key not in found or len(rows.measured) > len(found[rows.key].measured):
                found[rows.key] = rows
    classes = [found[key] for key in sorted(found)]
    date = fitted or datetime.now(UTC).date().isoformat()
    run = _Run(device, seed, date, progress, 2 * len(classes))
    first = run.fit(classes, {})
    chip = _chip_wide(run, classes)
    small = [each.rows for each in first if chip and len(each.rows.measured) < _SMALL]
    again = {} if chip is None else {each.rows.key: each for each in run.fit(small, _prior_of(chip))}
    fits = [run.row(again.get(each.rows.key, each)) for each in first]
    return _with_defaults([*fits, *([chip] if chip else [])])


@dataclass(slots=True)
class _Run:
    """One run over a device."""

    device: Device
    seed: int
    date: str
    progress: Progress | None
    total: int
    done: int = 0

    def fit(self, classes: Iterable[Rows], prior: _Prior) -> list[FittedClass]:
        """The classes that can be fitted."""
        found: list[FittedClass] = []
        for rows in classes:
            if self.progress:
                self.progress(self.done, self.total, " ".join(part for part in rows.key if part))
            self.done += 1
            fit = fit_class(rows, machine_of(self.device, rows.kind, rows.scheme), prior, self.seed)
            if fit is not None:
                found.append(fit)
        return found

    def row(self, found: FittedClass) -> Fit:
        """A fitted class as a row of a device file."""
        rows, solution = found.rows, found.solution
        return Fit(
            kind=rows.kind,
            op=rows.op,
            scheme=rows.scheme,
            variant=rows.variant,
            form=found.form.name,
            parameters=tuple(
                FitParameter(
                    name=each.name,
                    value=rounded(solution.values[each.name]),
                    std_error=rounded(solution.std_errors[each.name]),
                )
                for each in found.form.parameters
            ),
            support=support_of(rows, found.form),
            samples=len(rows.measured),
            error=error_of(found.predicted_ns, found.measured_ns),
            bands=bands_of(found.predicted_ns, found.measured_ns),
            table=rows.measured.name,
            provenance=rows.measured.provenance,
            fitted=self.date,
            seed=self.seed,
        )


def _prior_of(chip: Fit) -> _Prior:
    return {name: (chip.value(name), _CHIP_WIDTH) for name in _SHARED}


def _with_defaults(fits: list[Fit]) -> tuple[Fit, ...]:
    """The variant with the most samples is what runs where none is named."""
    best: dict[tuple[str, str, str], Fit] = {}
    for fit in sorted(fits, key=lambda fit: (-fit.samples, fit.variant)):
        best.setdefault((fit.kind, fit.op, fit.scheme), fit)
    chosen = {fit.key for fit in best.values()}
    return tuple(replace(fit, default=fit.key in chosen) for fit in sorted(fits, key=lambda fit: fit.key))


def _chip_wide(run: _Run, classes: Sequence[Rows]) -> Fit | None:
    """Start, arithmetic and memory of a whole chip: the weighted middle of what its classes say, so that no
    two libraries or formats enter one fit.
    """
    form = FORMS["roofline"]
    mine = [rows for rows in classes if _is_plain(rows)]
    values: list[list[float]] = []
    kept: list[Rows] = []
    for rows in mine:
        part = rows.take(drawn_rows(rows, _CHIP_ROWS, run.seed))
        found = _plain_fit(part, form, run.device)
        if found is not None:
            kept.append(part)
            values.append([found[each.name] for each in form.parameters])
    if not kept:
        return None
    weights = np.sqrt([len(rows.measured) for rows in kept])
    middle = {
        each.name: rounded(_weighted_median(np.array(column), weights))
        for each, column in zip(form.parameters, zip(*values, strict=True), strict=True)
    }
    spread = {
        each.name: rounded(float(np.std(column) / np.sqrt(len(kept)))) if len(kept) > 1 else nan
        for each, column in zip(form.parameters, zip(*values, strict=True), strict=True)
    }
    predicted = [
        form_time_ns(form, middle, rows.measured.ops, machine_of(run.device, rows.kind, rows.scheme))
        for rows in kept
    ]
    times = np.concatenate([rows.measured.duration_ns for rows in kept])
    said = np.concatenate(predicted)
    return Fit(
        kind=ANY,
        op=ANY,
        scheme=ANY,
        variant=ANY,
        form=form.name,
        parameters=tuple(
            FitParameter(name=name, value=value, std_error=spread[name]) for name, value in middle.items()
        ),
        support=(),
        samples=int(sum(len(rows.measured) for rows in mine)),
        error=error_of(said, times),
        bands=bands_of(said, times),
        table=" ".join(sorted({rows.measured.name for rows in kept})),
        provenance="; ".join(sorted({rows.measured.provenance for rows in kept})),
        fitted=run.date,
        seed=run.seed,
    )


def _is_plain(rows: Rows) -> bool:
    """One kernel, nothing quantised on the way, one operation."""
    scheme = find_scheme(rows.scheme)
    return rows.kind in CHIP_WIDE_KINDS and rows.op != ANY and scheme is not None and not scheme.quantizes


def _plain_fit(rows: Rows, form: Form, device: Device) -> Mapping[str, float] | None:
    machine = machine_of(device, rows.kind, rows.scheme)
    start = {each.name: each.start for each in form.parameters}
    if isnan(float(form_time_ns(form, start, rows.measured.ops, machine).sum())):
        return None
    trial = Trial(
        form=form,
        columns=form.columns(rows.measured.ops, machine),
        duration_ns=rows.measured.duration_ns,
        fixed={},
        prior={},
    )
    return solve(trial, start, most_calls=30).values


def _weighted_median(values: FloatArray, weights: FloatArray) -> float:
    order = np.argsort(values)
    below = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(below, 0.5)])
