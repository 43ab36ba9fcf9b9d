"""Fits as TOML: rows of a device file, and the files of fits that ship beside the devices.

A row is one inline table. Parameters are ``name = [value, standard error]``, ``support`` is
``dimension = [least, most]``, ``bands`` lists ``[up to ns, low, high]``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from math import inf, isfinite
from pathlib import Path

from hespas.graph.errors import clipped
from hespas.hardware.fit import Fit, FitBand, FitError, FitParameter, FitRange
from hespas.hardware.forms import LINE_FORMS, parameter_fault
from hespas.hardware.reader import TableReader, read_table

__all__ = [
    "FITS_FOLDER",
    "devices_with_fits",
    "fit_row",
    "fits_to_toml",
    "has_shipped_fits",
    "read_fit",
    "read_fits",
    "shipped_fits",
    "unique_fits",
]

FITS_FOLDER = Path(__file__).parent / "fits"
"""One file per shipped device that has fits, by the device's name."""

_HEADER = """\
# Fitted parameters of {name}, made by `python -m tools.fits`. Written by a command: edits are lost.
# Each row names the table, its source and licence; errors are of shapes outside the fit.
"""
_MOST = 1e60
"""Beyond, products of parameters overflow."""
_REMEDY = "state it as name = [value, standard error], or fit again with hespas-validate calibrate"


def devices_with_fits() -> tuple[str, ...]:
    """The names of the devices that fits ship for, sorted."""
    return tuple(sorted(_shipped_names()))


def has_shipped_fits(name: str) -> bool:
    """Whether fits ship for a device of that name."""
    return name in _shipped_names()


@cache
def _shipped_names() -> frozenset[str]:
    return frozenset(path.stem for path in FITS_FOLDER.glob("*.toml"))


@cache
def shipped_fits(name: str) -> tuple[Fit, ...]:
    """The fits that ship for a device; read once."""
    return read_fits(FITS_FOLDER / f"{name}.toml")


def read_fits(path: Path) -> tuple[Fit, ...]:
    """A file of fits. Raises ``FormatError`` naming file, key path and what was expected."""
    root = read_table(path)
    fits = tuple(read_fit(row) for row in root.tables("fits"))
    root.close()
    unique_fits(root, fits)
    return fits


def unique_fits(root: TableReader, fits: tuple[Fit, ...]) -> None:
    """Raise ``FormatError`` for the second fit of one class; lines of a systolic array are classes of their
    own.
    """
    seen: dict[tuple[bool, tuple[str, str, str, str]], int] = {}
    for index, fit in enumerate(fits):
        key = fit.form in LINE_FORMS, fit.key
        if key in seen:
            stated = f"'{clipped(' '.join(fit.key))}' is stated already in fits[{seen[key]}]"
            raise root.fault(f"fits[{index}]", stated, hint="keep one of the two fits")
        seen[key] = index


def read_fit(row: TableReader) -> Fit:
    """One row. Raises ``FormatError``."""
    form = row.text("form")
    fit = Fit(
        kind=row.text("kind"),
        op=row.text("op", empty=True),
        scheme=row.text("scheme", empty=True),
        variant=row.text("variant", empty=True),
        form=form,
        default=row.flag("default", default=False),
        samples=row.count("samples"),
        parameters=_parameters(row, form),
        support=_support(row),
        error=_error(row),
        bands=_bands(row),
        table=row.text("table"),
        provenance=row.text("provenance"),
        fitted=row.text("fitted"),
        seed=_seed(row),
    )
    row.close()
    return fit


def _seed(row: TableReader) -> int:
    (seed,) = row.reals("seed", 1)
    if not (isfinite(seed) and seed == int(seed) and seed >= 0):
        raise row.fault("seed", "expected a whole number that is 0 or more", hint="write it as 0")
    return int(seed)


def _parameters(row: TableReader, form: str) -> tuple[FitParameter, ...]:
    table = _required(row, "parameters")
    found: list[FitParameter] = []
    for name in table.names():
        value, error = table.reals(name, 2, hint=_REMEDY)
        if not abs(value) <= _MOST or error < 0:
            expected = "expected [value, standard error], a finite number and one that is 0 or more"
            raise table.fault(name, expected, hint=_REMEDY)
        found.append(FitParameter(name=name, value=value, std_error=error))
    if not found:
        raise row.fault("parameters", "expected at least one parameter", hint=_REMEDY)
    fault = parameter_fault(form, {each.name: each.value for each in found})
    if fault:
        raise table.fault(*fault, hint=_REMEDY)
    return tuple(found)


def _support(row: TableReader) -> tuple[FitRange, ...]:
    table = _required(row, "support")
    found: list[FitRange] = []
    for name in table.names():
        low, high = table.reals(name, 2)
        if not low <= high:
            raise table.fault(name, "expected [least, most]", hint="write the smaller size first")
        found.append(FitRange(name=name, low=low, high=high))
    return tuple(found)


def _error(row: TableReader) -> FitError:
    table = _required(row, "error")
    (bias,) = table.reals("bias", 1)
    error = FitError(
        n=table.count("n", unknown=True),
        mape=table.real("mape", unknown=True, zero=True),
        median_ape=table.real("median_ape", unknown=True, zero=True),
        p90_ape=table.real("p90_ape", unknown=True, zero=True),
        bias=bias,
    )
    table.close()
    return error


def _bands(row: TableReader) -> tuple[FitBand, ...]:
    bands: list[FitBand] = []
    for values in row.real_rows("bands", 3):
        up_to_ns, low, high = values
        before = bands[-1].up_to_ns if bands else 0.0
        if not (up_to_ns > before and 0 <= low <= high):
            expected = "expected [up to ns (rising), low, high]"
            raise row.fault(f"bands[{len(bands)}]", expected, hint="write it as [1e6, 0.9, 1.1]")
        bands.append(FitBand(up_to_ns=up_to_ns, low=low, high=high))
    if bands and bands[-1].up_to_ns != inf:
        expected = "expected the last band to reach up to inf"
        raise row.fault("bands", expected, hint="end with [inf, low, high]")
    return tuple(bands)


def _required(row: TableReader, name: str) -> TableReader:
    table = row.table(name)
    if table is None:
        raise row.fault(name, "missing key", hint=f"add {name} = {{ ... }}; {_REMEDY}")
    return table


def fits_to_toml(name: str, fits: Iterable[Fit]) -> str:
    """The text of a file of fits of the device ``name``, ordered by class."""
    rows = [f"  {fit_row(fit, json.dumps)}," for fit in sorted(fits, key=lambda fit: fit.key)]
    return "\n".join((_HEADER.format(name=name) + "fits = [", *rows, "]", ""))


def fit_row(fit: Fit, quoted: Callable[[str], str]) -> str:
    """One fit as an inline table; ``quoted`` writes a text."""
    texts = [(name, getattr(fit, name)) for name in ("kind", "op", "scheme", "variant", "form")]
    parts = [f"{name} = {quoted(text)}" for name, text in texts]
    if fit.default:
        parts.append("default = true")
    parts.append(f"samples = {fit.samples}")
    pairs = ((each.name, each.value, each.std_error) for each in fit.parameters)
    parts.append(f"parameters = {_pairs(pairs, quoted)}")
    parts.append(f"support = {_pairs(((each.name, each.low, each.high) for each in fit.support), quoted)}")
    error = fit.error
    parts.append(
        f"error = {{ n = {error.n}, mape = {error.mape!r}, median_ape = {error.median_ape!r}, "
        f"p90_ape = {error.p90_ape!r}, bias = {error.bias!r} }}"
    )
    bands = ", ".join(f"[{band.up_to_ns!r}, {band.low!r}, {band.high!r}]" for band in fit.bands)
    parts.append(f"bands = [{bands}]")
    parts += [f"{name} = {quoted(getattr(fit, name))}" for name in ("table", "provenance", "fitted")]
    parts.append(f"seed = {fit.seed}")
    return "{ " + ", ".join(parts) + " }"


def _pairs(pairs: Iterable[tuple[str, float, float]], quoted: Callable[[str], str]) -> str:
    inner = ", ".join(f"{quoted(name)} = [{one!r}, {two!r}]" for name, one, two in pairs)
    return f"{{ {inner} }}" if inner else "{}"
