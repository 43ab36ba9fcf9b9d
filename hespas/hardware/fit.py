"""A fitted form of time: the operations it speaks of, its parameters, how wrong it is outside its data."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

__all__ = ["ANY", "Fit", "FitBand", "FitError", "FitParameter", "FitRange"]

ANY = "*"
"""Stands for every operation, scheme or variant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitParameter:
    """One parameter by name, with its unit in the name; ``std_error`` is NaN where it is not known."""

    name: str
    value: float
    std_error: float = nan


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """Relative errors (p - m) / m as fractions, on ``n`` rows of shapes that the fit did not see."""

    n: int
    mape: float
    median_ape: float
    p90_ape: float
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FitBand:
    """Between ``low`` and ``high`` times the prediction lie 90 % of the measurements, for predictions up to
    ``up_to_ns`` (and above the band before).
    """

    up_to_ns: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRange:
    """The sizes of one dimension that were fitted on."""

    name: str
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The time of one class of operations as ``form`` (a name that an estimator knows) of its parameters.

    ``kind``, ``op``, ``scheme`` and ``variant`` are the labels of operations; the last three may be ``*``.
    ``default`` marks the variant that a device usually runs: what an operation that names none is given.
    ``samples`` rows of ``table`` entered, the bands' last ``up_to_ns`` is infinite. ``provenance`` says where
    the table is from, ``fitted`` when it was fitted (ISO date), ``seed`` how the fit can be repeated.
    """

    kind: str
    op: str
    scheme: str
    variant: str
    form: str
    parameters: tuple[FitParameter, ...]
    support: tuple[FitRange, ...]
    samples: int
    error: FitError
    bands: tuple[FitBand, ...]
    table: str
    provenance: str
    fitted: str
    seed: int
    default: bool = False

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What there is one fit of."""
        return self.kind, self.op, self.scheme, self.variant

    def value(self, name: str) -> float:
        """A parameter by name; NaN where the fit has none of that name."""
        return next((each.value for each in self.parameters if each.name == name), nan)
