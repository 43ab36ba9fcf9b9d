"""Fits as entries of device files: their errors and intervals, and the choice of default fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from math import inf

import numpy as np

from hespas.fitting.held_out import next_value_bound
from hespas.fitting.statistics import error_figures
from hespas.graph.columns import FloatArray
from hespas.hardware import Device, Fit, FitBand, FitError, FitParameter, FitRange
from hespas.measurements import Measurements

__all__ = [
    "Key",
    "Priority",
    "bands_of",
    "bare",
    "error_of",
    "fit_of",
    "merged",
    "rounded",
    "with_defaults",
    "with_fits",
]

Key = tuple[str, str, str, str]
"""Kind, operation, number format and variant of a fit."""
Priority = tuple[bool, tuple[int, ...], int]
"""Priority of a default: if it is from a vendor, its release, the number of its samples."""
_ROWS_PER_BAND = 120
_MOST_BANDS = 6
_NO_TIMES = np.empty(0), np.empty(0)


def fit_of(
    key: Key,
    form: str,
    parameters: Iterable[tuple[str, float, float]],
    measured: Measurements | None,
    held_out: tuple[FloatArray, FloatArray] = _NO_TIMES,
    *,
    dims: Iterable[str] = (),
    fitted: str = "",
    seed: int = 0,
) -> Fit:
    """Return the entry of a device file for a form with its ``parameters`` (name, value, standard error).

    The form was fitted to all rows of ``measured`` (None: to recordings in several tables). ``dims`` are the
    sizes whose range in these rows limits the validity of the fit. ``held_out`` are predictions of held-out
    rows and their times [ns]. ``fitted`` is the date of the fit (ISO; empty: today).
    """
    kind, op, scheme, variant = key
    support: list[FitRange] = []
    if measured is not None:
        sizes = {name: size[~np.isnan(size)] for name in dims if len(size := measured.ops.dim(name))}
        support = [
            FitRange(name=name, low=float(size.min()), high=float(size.max()))
            for name, size in sizes.items()
            if len(size)
        ]
    return Fit(
        kind=kind,
        op=op,
        scheme=scheme,
        variant=variant,
        form=form,
        parameters=tuple(
            FitParameter(name=name, value=rounded(value), std_error=rounded(error))
            for name, value, error in parameters
        ),
        support=tuple(support),
        samples=1 if measured is None else len(measured),
        error=error_of(*held_out),
        bands=bands_of(*held_out),
        table="recordings" if measured is None else measured.name,
        provenance="recordings" if measured is None else measured.provenance,
        fitted=fitted or datetime.now(UTC).date().isoformat(),
        seed=seed,
    )


def error_of(predicted: FloatArray, measured: FloatArray) -> FitError:
    """Return error statistics of predictions, rounded to the precision with which they are known."""
    figures = error_figures(predicted / measured - 1)
    return FitError(n=len(measured) or -1, **{name: rounded(value) for name, value in figures.items()})


def bands_of(predicted: FloatArray, measured: FloatArray) -> tuple[FitBand, ...]:
    """Return error bands: for ranges of predicted times, the factors between which 90 % of the measurements
    lie.
    """
    count = min(max(len(predicted) // _ROWS_PER_BAND, 1), _MOST_BANDS)
    if len(predicted) < 10:
        return ()
    order = np.argsort(predicted, kind="stable")
    bands: list[FitBand] = []
    for number, part in enumerate(np.array_split(order, count)):
        ratio = measured[part] / predicted[part]
        up_to_ns = inf if number == count - 1 else rounded(float(predicted[part[-1]]))
        if bands and up_to_ns <= bands[-1].up_to_ns:
            continue
        low_share, high_share = -next_value_bound(-ratio), next_value_bound(ratio)
        bands.append(FitBand(up_to_ns=up_to_ns, low=rounded(low_share), high=rounded(high_share)))
    return tuple(bands)


def rounded(value: float) -> float:
    """Return the value rounded to six significant digits. Further digits depend on the machine that runs the
    fit.
    """
    return float(f"{value:.6g}")


def bare(device: Device) -> Device:
    """Return the device without fits, only with the figures of its data sheet."""
    return replace(device, own_fits=(), fits_of="", efficiencies=(), own_lines=(), learned_models=())


def merged(fits: Sequence[Fit], before: Sequence[Fit]) -> tuple[Fit, ...]:
    """Return the new fits, followed by the earlier fits of classes that have no new fit.

    New fits are the defaults for operations without a variant.
    """
    new = {fit.key for fit in fits}
    replaced = {(fit.kind, fit.op, fit.scheme) for fit in fits}
    earlier = (
        replace(fit, default=fit.default and (fit.kind, fit.op, fit.scheme) not in replaced)
        for fit in before
        if fit.key not in new
    )
    return (*fits, *earlier)


def with_fits(device: Device, fits: Sequence[Fit]) -> Device:
    """Return the device with these fits in place of its own, as if they were in its file."""
    return replace(device, own_fits=merged(fits, device.fits), fits_of="")


def _by_samples(fit: Fit) -> Priority:
    return False, (), fit.samples


def with_defaults(
    fits: Iterable[Fit], priority: Callable[[Fit], Priority | None] = _by_samples
) -> tuple[Fit, ...]:
    """Return the fits sorted by key. For each operation and number format, the fit with the highest
    ``priority`` is marked as the default.

    Fits whose priority is None are never a default. If ``priority`` is not given, the fit with the most
    samples is the default.
    """
    ordered = sorted(fits, key=lambda fit: fit.key)
    ranked = [(rank, fit) for fit in ordered if (rank := priority(fit)) is not None]
    best: dict[tuple[str, str, str], Fit] = {}
    for _, fit in sorted(ranked, key=lambda pair: pair[0], reverse=True):
        best.setdefault((fit.kind, fit.op, fit.scheme), fit)
    chosen = {fit.key for fit in best.values()}
    return tuple(replace(fit, default=fit.key in chosen) for fit in ordered)
