"""Fits: formulas (forms) of operation time with fitted parameters and errors, and their rows in TOML files.

A fit of a known form must have the parameters of the form, so that a damaged file is detected when it is
read. Line forms describe systolic arrays. They may cover the same operations as another fit, because another
estimator uses them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import inf, isfinite, isnan, nan
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, structs

from hespas.graph.workload import StepPhase
from hespas.hardware.typed_toml import (
    Count,
    CountOrUnknown,
    FileKind,
    NotNegativeOrNan,
    Positive,
    Text,
    TomlRow,
    read_rows,
    refuse_repeats,
    toml_error,
)

__all__ = [
    "ANY",
    "DEVICE_FILE",
    "FITS_FOLDER",
    "FORM_PARAMETERS",
    "LATER_PARAMETERS",
    "LINE_FORMS",
    "SEGMENTS",
    "Fit",
    "FitBand",
    "FitError",
    "FitParameter",
    "FitRange",
    "FitRow",
    "SegmentName",
    "StepFactor",
    "check_step_factors",
    "decode_fits",
    "devices_with_fits",
    "fit_row",
    "fits_to_toml",
    "has_shipped_fits",
    "parameter_fault",
    "read_fits",
    "segment_name",
    "shipped_fits",
]


ANY = "*"
"""Wildcard for operation, scheme or variant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitParameter:
    """Parameter of a fit. Its name includes the unit; ``std_error`` is NaN if unknown."""

    name: str
    value: float
    std_error: float = nan


class FitError(TomlRow, frozen=True, kw_only=True):
    """Errors of a fit on ``n`` rows of shapes outside of the fit: (prediction - measurement) / measurement,
    as fractions.

    ``before_mape`` is the error of the package's learned models before the device was fitted.
    """

    n: CountOrUnknown
    mape: NotNegativeOrNan
    median_ape: NotNegativeOrNan
    p90_ape: NotNegativeOrNan
    bias: float
    before_mape: NotNegativeOrNan = nan


@dataclass(frozen=True, slots=True, kw_only=True)
class FitBand:
    """Error band of a fit: 90 % of the measurements are between ``low`` and ``high`` times the prediction.

    It applies to predictions above ``up_to_ns`` of the previous band and up to ``up_to_ns`` of this band.
    """

    up_to_ns: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRange:
    """Smallest and largest value of one size in the data of a fit."""

    name: str
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Fitted time of one class of operations. ``form`` is the name of a formula that an estimator implements.

    ``kind``, ``op``, ``scheme`` (number format) and ``variant`` are the labels of operations; the last three
    may be ``*``. ``default`` marks the usual variant of a device, for operations that do not name a variant.
    ``samples`` is the number of fitted rows of ``table``. The last error band has an infinite ``up_to_ns``.
    ``provenance`` is the origin of the table, ``fitted`` the date of the fit (ISO), ``seed`` its random seed.
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
        """Return the labels that identify a fit: kind, operation, number format and variant."""
        return self.kind, self.op, self.scheme, self.variant

    def value(self, name: str) -> float:
        """Return the value of a parameter; NaN if the fit does not have it."""
        return next((entry.value for entry in self.parameters if entry.name == name), nan)


_ROOFLINE = ("t0_ns", "compute", "memory", "overlap")
_EXPERTS = (
    *(*_ROOFLINE, "unit_load", "tile_edge", "wave_tail", "imbalance", "spread", "step_ns"),
    *("expert_start_ns", "token_passes", "inner_passes"),
)

FORM_PARAMETERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "roofline": _ROOFLINE,
        "streams": (*_ROOFLINE, "row_ns", "row_step_ns", "cache_share", "cache_reach", "cache_edge"),
        "tiles": (
            *(*_ROOFLINE, "step_ns", "unit_load", "tile_edge", "fill", "split_ns", "wave_tail"),
            *("activations_cached", "cache_reach", "cache_edge", "ragged_k", "ragged_n", "weight_copies"),
        ),
        "arrays": ("t0_ns", "compute", "memory", "store", "pipeline_ns"),
        "prefill": (
            *("t0_ns", "compute", "overlap", "score", "block_start_ns", "wave_tail", "chain"),
            *("query_passes", "key_passes", "fused", "token_ns", "cache_gain", "cache_reach"),
        ),
        "decode": (
            *("t0_ns", "group_t0_ns", "memory", "overlap", "piece_start_ns", "key_ns", "group_start_ns"),
            *("group_key_ns", "group_power", "group_limit", "size_share", "split_ns", "wave_tail"),
            *("io_passes", "cache_gain", "cache_reach"),
        ),
        "experts": _EXPERTS,
        "uncached_experts": _EXPERTS,
        "kernels": ("t0_ns", "memory", "element", "walked", "row_ns", "unit"),
        "products": ("start_ns", "scale", "ragged"),
        "nccl": ("ratio",),
    }
)
"""Form -> required parameters; all are positive and finite."""

LATER_PARAMETERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "decode": ("limit_key_ns",),
        "experts": ("cache_reach", "cache_share"),
        "uncached_experts": ("cache_reach", "cache_share"),
        "roofline": ("strided",),
        "streams": ("strided",),
        "tiles": ("cache_share", "quantizing_passes"),
    }
)
"""Form -> optional parameters, which older fits lack."""

SEGMENTS = "segments"
"""Form of piecewise lines, whose parameters are named by :class:`SegmentName`."""

_SEGMENT = re.compile(r"r(\d{1,9})_n(\d{1,9})_(t0_ns|knee\d{1,4}_bytes|ns_per_byte\d{1,4})")


class SegmentName(NamedTuple):
    """Parsed name of a fitted parameter of a collective. ``r8_n1_knee2_bytes`` is the parameter
    ``knee2_bytes`` (``part``) for 8 ``ranks`` on one node (``nodes``).
    """

    ranks: int
    nodes: int
    part: str


def segment_name(name: str) -> SegmentName | None:
    """Return the parsed name of a parameter of piecewise linear times; None for another name."""
    match = _SEGMENT.fullmatch(name)
    return SegmentName(int(match[1]), int(match[2]), match[3]) if match else None


def parameter_fault(form: str, values: Mapping[str, float]) -> tuple[str, str] | None:
    """Return the name of the first invalid parameter of a fit and a text about the expected value; None for a
    valid fit. Parameters are not checked for being numbers.
    """
    if form == SEGMENTS:
        lines: dict[str, dict[str, float]] = {}
        for name, value in values.items():
            segment = segment_name(name)
            if segment is None:
                return name, "expected a name like r8_n1_t0_ns, r8_n1_knee1_bytes or r8_n1_ns_per_byte1"
            if not (isfinite(value) and value >= 0):
                return name, f"expected a finite number that is 0 or more, got {value!r}"
            lines.setdefault(name.removesuffix(segment.part), {})[segment.part] = value
        return next((fault for stem, line in lines.items() if (fault := _line_fault(stem, line))), None)
    if form not in FORM_PARAMETERS:
        return _weights_fault(form, values) if form in LINE_FORMS else None
    wanted = FORM_PARAMETERS[form]
    for name in wanted:
        if name not in values:
            return name, f"missing: a fit of form '{form}' states {', '.join(wanted)}"
    for name, value in values.items():
        if name not in wanted and name not in LATER_PARAMETERS.get(form, ()):
            return name, f"unknown: a fit of form '{form}' states {', '.join(wanted)}"
        if not (isfinite(value) and value > 0):
            return name, f"expected a positive, finite number, got {value!r}"
    return None


def _line_fault(stem: str, line: Mapping[str, float]) -> tuple[str, str] | None:
    """Return the first invalid parameter of a piecewise line and a text about the expected value; None for a
    valid line. A line has a start, rates numbered from 1, and one knee fewer than rates. Knees are in
    ascending order.
    """
    rates = sum(part.startswith("ns_per_byte") for part in line)
    segments = max(rates, 1)
    wanted = (
        "t0_ns",
        *_numbered("ns_per_byte{}", segments),
        *_numbered("knee{}_bytes", segments - 1),
    )
    for part in wanted:
        if part not in line:
            return stem + part, f"missing: the line {stem} has {', '.join(sorted(line))}"
    for part in line:
        if part not in wanted:
            return stem + part, f"one knee too many: the line has {rates} rates"
    for low, high in pairwise(_numbered("knee{}_bytes", segments - 1)):
        if not line[low] < line[high]:
            return stem + high, f"expected more than {low} ({line[low]!r}), got {line[high]!r}"
    return None


def _numbered(name: str, count: int) -> Iterable[str]:
    return (name.format(index) for index in range(1, count + 1))


_BYTES = ("lhs_ns_per_byte", "rhs_ns_per_byte", "result_ns_per_byte")

LINE_FORMS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = MappingProxyType(
    {
        "cycles": (("t0_ns", "cycle_ns"), (*_BYTES, "odd_k_ns")),
        "elements": (("t0_ns",), ("element_ns", "row_ns", "ns_per_byte")),
    }
)
"""Form -> required and optional weights of each of its lines. All are finite and not negative.

A fit of products may have a second line, whose weights begin with ``long_``, and the shape of the array whose
cycles it counts.
"""

_TWOFOLD = "cycles"

_LONG = "long_"

_ARRAY = ("array_rows", "array_columns")

_LARGEST_ARRAY = 1 << 16


def _weights_fault(form: str, values: Mapping[str, float]) -> tuple[str, str] | None:
    """Return the first invalid parameter of a line of the systolic estimator and a text about the expected
    value; None for a valid line.

    ``form`` is one of :data:`LINE_FORMS`.
    """
    wanted, others = LINE_FORMS[form]
    weights = (*wanted, *others)
    allowed = (*weights, *(_LONG + name for name in weights), *_ARRAY) if form == _TWOFOLD else weights
    has_second = any(name.startswith(_LONG) for name in values)
    has_array = any(name in values for name in _ARRAY)
    required = (*wanted, *(_LONG + name for name in wanted if has_second), *(_ARRAY if has_array else ()))
    for name in required:
        if name not in values:
            return name, f"missing: a fit of form '{form}' with {', '.join(values)} needs it"
    for name, value in values.items():
        if name not in allowed:
            return name, f"unknown: use one of {', '.join(allowed)}"
        if name in _ARRAY and not (1 <= value <= _LARGEST_ARRAY and value == value // 1):
            return name, f"expected a whole number from 1 to {_LARGEST_ARRAY}, got {value!r}"
        if not (isfinite(value) and value >= 0):
            return name, f"expected a finite number that is 0 or more, got {value!r}"
    for prefix in ("", _LONG):
        line = [values[prefix + name] for name in weights if prefix + name in values]
        if line and not any(line):
            return prefix + wanted[0], "expected at least one weight of the line above 0"
    return None


_MOST = 1e60
"""Bound of parameters: products of larger ones could overflow."""

DEVICE_FILE = FileKind(
    "a device file",
    where="check the path; `hespas hardware list` names the devices",
    example="`hespas hardware show H100-SXM` prints a whole file to start from",
)
"""Device files in messages."""

_REMEDY = "write it as name = [value, standard error], or fit again with hespas-validate calibrate"


class FitRow(TomlRow, frozen=True, kw_only=True):
    """Fit in the form of a row of a TOML file."""

    kind: Text
    op: str
    scheme: str
    variant: str
    form: Text
    default: bool = False
    samples: Count
    parameters: dict[
        str,
        Annotated[tuple[float, float], Meta(description="a list of 2 numbers", extra={"remedy": _REMEDY})],
    ]
    support: dict[str, tuple[float, float]]
    error: FitError
    bands: tuple[tuple[float, float, float], ...]
    table: Text
    provenance: Text
    fitted: Text
    seed: Annotated[
        float,
        Meta(
            ge=0,
            multiple_of=1,
            description="a whole number that is 0 or more",
            extra={"remedy": "write it as 0"},
        ),
    ]


class StepFactor(TomlRow, frozen=True, kw_only=True):
    """Factor on the predicted time of whole steps of one framework and phase, from measured steps.

    ``factor`` is the applied factor, ``std_error`` the standard error of its logarithm, and ``share`` the
    share of the fitted correction that held-out workloads justify (0: the factor is 1 and not applied).
    ``ratio`` is the measured over the predicted time, the geometric mean over ``workloads``; ``rows`` is the
    number of measured steps. The factor belongs to predictions by ``estimator``. ``table`` names the
    measurements, ``fitted`` is the date of the fit (ISO).
    """

    framework: Text
    phase: StepPhase
    estimator: Text
    factor: Annotated[float, Meta(ge=0.1, le=10.0, description="a number from 0.1 to 10")]
    std_error: Annotated[float, Meta(ge=0.0, le=10.0, description="a number from 0 to 10")]
    share: Annotated[float, Meta(ge=0.0, le=1.0, description="a number from 0 to 1")]
    ratio: Positive
    rows: Count
    workloads: Count
    table: Text
    fitted: Text

    @property
    def name(self) -> str:
        """Return the name of the factor in options: ``torch:training``."""
        return f"{self.framework}:{self.phase}"

    @property
    def evidence(self) -> str:
        """Return the name of the factor and the number of measured workloads, for a summary line."""
        return f"{self.name}, {self.workloads:,} measured workload{'' if self.workloads == 1 else 's'}"


def check_step_factors(factors: tuple[StepFactor, ...], path: Path) -> None:
    """Raise ``FormatError`` for two step factors of one framework and phase, and for a factor other than 1
    that no held-out workload justifies.
    """
    for index, row in enumerate(factors):
        if row.share == 0 and row.factor != 1:
            expected = f"expected 1, because the share is 0, got {row.factor!r}"
            hint = "fit again with hespas-validate calibrate --end-to-end"
            raise toml_error(path, f"step_factors[{index}].factor", expected, hint)
    refuse_repeats(path, "step_factors", ((row.name.casefold(),) for row in factors))


class _FitsFile(TomlRow, frozen=True, kw_only=True):
    fits: tuple[FitRow, ...]


FITS_FOLDER = Path(__file__).parent / "fits"
"""Folder with one file per shipped device that has fits, by the device's name."""

_HEADER = """\
# Fitted parameters of {name}, made by `python -m tools.fits`. Written by a command: edits are lost.
# Each row names the table, its source and licence; errors are of shapes outside the fit.
"""


def devices_with_fits() -> tuple[str, ...]:
    """Return the names of the devices with shipped fits, sorted."""
    return tuple(sorted(_shipped_names()))


def has_shipped_fits(name: str) -> bool:
    """Return True if the package ships fits for the device."""
    return name in _shipped_names()


@cache
def _shipped_names() -> frozenset[str]:
    return frozenset(path.stem for path in FITS_FOLDER.glob("*.toml"))


@cache
def shipped_fits(name: str) -> tuple[Fit, ...]:
    """Return the shipped fits of a device; each file is read once."""
    return read_fits(FITS_FOLDER / f"{name}.toml")


def read_fits(path: Path) -> tuple[Fit, ...]:
    """Return the fits of a file. Raises ``FormatError`` with file, key path and expectation."""
    return decode_fits(read_rows(path, _FitsFile, DEVICE_FILE)[1].fits, path)


def decode_fits(rows: tuple[FitRow, ...], path: Path) -> tuple[Fit, ...]:
    """Convert rows of a file to fits, one per class of operations; lines of a systolic array count as
    separate classes.
    """
    fits = tuple(_decode_fit(row, f"fits[{index}]", path) for index, row in enumerate(rows))
    refuse_repeats(path, "fits", ((*fit.key, fit.form in LINE_FORMS) for fit in fits))
    return fits


def _decode_fit(row: FitRow, where: str, path: Path) -> Fit:
    for name, (value, error) in row.parameters.items():
        if not abs(value) <= _MOST or error < 0:
            expected = "expected [value, standard error], a finite number and one that is 0 or more"
            raise toml_error(path, f"{where}.parameters.{name}", expected, _REMEDY)
    if not row.parameters:
        raise toml_error(path, f"{where}.parameters", "expected at least one parameter", _REMEDY)
    wrong = parameter_fault(row.form, {name: value for name, (value, _) in row.parameters.items()})
    if wrong:
        raise toml_error(path, f"{where}.parameters.{wrong[0]}", wrong[1], _REMEDY)
    for name, (low, high) in row.support.items():
        if not low <= high:
            hint = "write the smaller size first"
            raise toml_error(path, f"{where}.support.{name}", "expected [least, most]", hint)
    before = 0.0
    for index, (up_to_ns, low, high) in enumerate(row.bands):
        if not (up_to_ns > before and 0 <= low <= high):
            expected = "expected [up to ns (rising), low, high]"
            raise toml_error(path, f"{where}.bands[{index}]", expected, "write it as [1e6, 0.9, 1.1]")
        before = up_to_ns
    if row.bands and before != inf:
        expected = "expected the last band to reach up to inf"
        raise toml_error(path, f"{where}.bands", expected, "end with [inf, low, high]")
    values: dict[str, Any] = structs.asdict(row)
    values["parameters"] = tuple(
        FitParameter(name=name, value=value, std_error=error)
        for name, (value, error) in row.parameters.items()
    )
    values["support"] = tuple(FitRange(name=n, low=low, high=high) for n, (low, high) in row.support.items())
    values["bands"] = tuple(FitBand(up_to_ns=up_to, low=low, high=high) for up_to, low, high in row.bands)
    values["seed"] = int(row.seed)
    return Fit(**values)


def fits_to_toml(name: str, fits: Iterable[Fit]) -> str:
    """Return a file of fits of the device ``name`` as TOML text, ordered by class."""
    rows = [f"  {fit_row(fit, json.dumps)}," for fit in sorted(fits, key=lambda fit: fit.key)]
    return "\n".join((_HEADER.format(name=name) + "fits = [", *rows, "]", ""))


def fit_row(fit: Fit, quoted: Callable[[str], str]) -> str:
    """Return a fit as a TOML inline table; ``quoted`` is the function that encodes a text."""
    texts = [(name, getattr(fit, name)) for name in ("kind", "op", "scheme", "variant", "form")]
    parts = [f"{name} = {quoted(text)}" for name, text in texts]
    if fit.default:
        parts.append("default = true")
    parts.append(f"samples = {fit.samples}")
    pairs = ((entry.name, entry.value, entry.std_error) for entry in fit.parameters)
    parts.append(f"parameters = {_pairs(pairs, quoted)}")
    ranges = ((entry.name, entry.low, entry.high) for entry in fit.support)
    parts.append(f"support = {_pairs(ranges, quoted)}")
    errors = structs.asdict(fit.error)
    if isnan(fit.error.before_mape):
        del errors["before_mape"]
    parts.append(f"error = {{ {', '.join(f'{name} = {value!r}' for name, value in errors.items())} }}")
    bands = ", ".join(f"[{band.up_to_ns!r}, {band.low!r}, {band.high!r}]" for band in fit.bands)
    parts.append(f"bands = [{bands}]")
    parts += [f"{name} = {quoted(getattr(fit, name))}" for name in ("table", "provenance", "fitted")]
    parts.append(f"seed = {fit.seed}")
    return "{ " + ", ".join(parts) + " }"


def _pairs(pairs: Iterable[tuple[str, float, float]], quoted: Callable[[str], str]) -> str:
    inner = ", ".join(f"{quoted(name)} = [{one!r}, {two!r}]" for name, one, two in pairs)
    return f"{{ {inner} }}" if inner else "{}"
