"""What a device is to an estimator or a simulator: rates, memories, links and fitted efficiencies.

Every figure is per device (one GPU, one TPU chip, one CPU socket set), in base units (FLOP/s, bytes, bytes/s,
ns), dense unless marked, and names its source. Unknown is NaN (real numbers) or -1 (counts).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, isnan, nan
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

__all__ = [
    "ANY",
    "FORM_PARAMETERS",
    "LATER_PARAMETERS",
    "LINE_FORMS",
    "SEGMENTS",
    "Count",
    "CountOrUnknown",
    "Density",
    "Device",
    "DeviceKind",
    "Efficiency",
    "Fit",
    "FitBand",
    "FitError",
    "FitParameter",
    "FitRange",
    "Link",
    "LinkKind",
    "Memory",
    "MemoryLevel",
    "NotNegativeOrNan",
    "Peak",
    "Positive",
    "PositiveOrNan",
    "Row",
    "SegmentName",
    "Source",
    "SubbyteStorage",
    "SystolicArray",
    "Text",
    "Topology",
    "Unit",
    "parameter_fault",
    "segment_name",
]

Unit = Literal["matrix", "vector"]
"""``matrix``: tensor core, matrix core, MXU, or BLAS on a CPU: contractions only. ``vector``: the rest."""

Density = Literal["dense", "sparse"]
DeviceKind = Literal["gpu", "tpu", "cpu", "accelerator"]
"""``accelerator``: with matrix units of its own, neither a GPU nor a TPU (Gaudi, Trainium)."""
MemoryLevel = Literal["main", "cache", "scratchpad"]
LinkKind = Literal["scale_up", "scale_out", "pcie"]
Topology = Literal["switch", "ring", "fully_connected", "torus2d", "torus3d"]
SubbyteStorage = Literal["packed", "byte"]

# What a hardware file may state under a key: ``description`` is what a fault says was expected. NaN is within
# no bounds, so what may be ``unknown`` is checked by ``within``.
_LEAST, _MOST = 1e-60, 1e60
"""Real figures lie well within; beyond, products of them overflow."""
_MOST_COUNT = 2**63 - 1


def _positive_or_nan(value: float) -> bool:
    return isnan(value) or _LEAST <= value <= _MOST


def _not_negative_or_nan(value: float) -> bool:
    return value == 0 or _positive_or_nan(value)


Text = Annotated[str, Meta(min_length=1, description="a string that is not empty")]
Positive = Annotated[float, Meta(ge=_LEAST, le=_MOST, description="a positive number (up to 1e60)")]
PositiveOrNan = Annotated[
    float,
    Meta(
        description="a positive number or nan (up to 1e60)",
        extra={"unknown": "nan", "within": _positive_or_nan},
    ),
]
NotNegativeOrNan = Annotated[
    float,
    Meta(
        description="a number that is 0 or more or nan (up to 1e60)",
        extra={"unknown": "nan", "within": _not_negative_or_nan},
    ),
]
Count = Annotated[int, Meta(ge=1, le=_MOST_COUNT, description="a positive whole number")]
CountOrUnknown = Annotated[
    int,
    Meta(
        ge=-1,
        le=_MOST_COUNT,
        description="a positive whole number or -1 (unknown)",
        extra={"unknown": "-1", "within": bool},
    ),
]


class Row(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a hardware file as it is stated there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where figures come from: ``key`` is what rows refer to, ``text`` names the document and its column."""

    key: str
    text: str


class Peak(Row, frozen=True, kw_only=True):
    """The highest rate of one unit for one operand type; a multiply and an add are two FLOPs.

    ``dtype`` is the operand type in MLIR's spelling: it decides the rate, not the result's type.
    ``rhs_dtype`` is the right-hand operand's where a unit multiplies two unlike types (2-bit weights by 8-bit
    activations), empty where both are ``dtype``.
    ``accumulator`` is empty where the rate does not depend on it or the source does not say. The energy is
    that of the arithmetic alone: no registers, no wires, no clock tree.
    """

    unit: Unit
    dtype: Text
    flops_per_s: Positive
    density: Density
    source: Text
    accumulator: Text = ""
    note: Text = ""
    energy_pj_per_flop: PositiveOrNan = nan
    energy_source: Text = ""
    rhs_dtype: Text = ""


class Memory(Row, frozen=True, kw_only=True):
    """One level. ``capacity_bytes`` is the device's total (-1 unknown); bandwidth NaN where unpublished.

    A cache's bandwidth is of reads that hit, all units of the device together: a peak where one is published
    or follows from bytes per clock, else what a micro-benchmark reaches, which the note says.
    The energy is that of moving a byte between this level and the chip.
    """

    level: MemoryLevel
    name: Text
    capacity_bytes: CountOrUnknown
    bandwidth_bytes_per_s: PositiveOrNan
    source: Text
    note: Text = ""
    energy_pj_per_byte: PositiveOrNan = nan
    energy_source: Text = ""


class Link(Row, frozen=True, kw_only=True):
    """One way out of the device.

    ``bandwidth_bytes_per_s`` is one direction, all ``links_per_device`` of the device together, so a single
    torus link has that divided by ``links_per_device``. ``devices_per_domain`` counts the devices reached
    without leaving this kind of link (-1: no fixed bound). ``pcie`` is the link to the host, whatever it is.
    """

    name: Text
    kind: LinkKind
    bandwidth_bytes_per_s: Positive
    latency_ns: NotNegativeOrNan
    topology: Topology
    links_per_device: CountOrUnknown
    devices_per_domain: CountOrUnknown
    source: Text
    latency_source: Text
    note: Text = ""

    @property
    def link_bandwidth_bytes_per_s(self) -> float:
        """One direction of one link; NaN where the number of links is unknown."""
        return self.bandwidth_bytes_per_s / self.links_per_device if self.links_per_device > 0 else nan


class Efficiency(Row, frozen=True, kw_only=True):
    """Fitted reach of the peaks: time = t0_ns + max(flops / (compute x peak), bytes / (memory x bandwidth)).

    ``op_class`` and ``dtype`` may be ``*``. Values above 1 are legal: a warm cache beats the memory.
    ``provenance`` names data, version and date of the fit; ``samples`` and ``mape`` (a fraction, on data
    outside the fit) say how far to trust it.
    """

    op_class: Text
    dtype: Text
    compute: PositiveOrNan
    memory: PositiveOrNan
    t0_ns: NotNegativeOrNan
    provenance: Text
    samples: CountOrUnknown = -1
    mape: NotNegativeOrNan = nan


class SystolicArray(Row, frozen=True, kw_only=True):
    """Shape of the matrix units: ``arrays`` grids of ``rows`` x ``columns`` multiply-accumulate cells."""

    rows: Count
    columns: Count
    arrays: Count
    clock_hz: PositiveOrNan
    dataflow: Literal["os", "ws", "is"]
    source: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device as data. ``units`` counts its ``unit_name`` (SM, CU, TensorCore, core).

    ``launch_overhead_ns`` is the shortest time any kernel takes, however little it does. ``subbyte_storage``
    says whether element types under 8 bits are packed in memory or take a byte each. ``own_fits`` are the
    file's; ``fits_of`` names the shipped device whose fits hold for this one too (empty: none). ``own_lines``
    are the file's fits of a systolic array's forms, which speak of the same classes and are kept apart.
    ``learned_models`` are the absolute paths of the cards of its own learned models. ``tdp_w`` is the power
    the board may draw without end, in watts.
    """

    name: str
    vendor: str
    family: str
    kind: DeviceKind
    description: str
    aliases: tuple[str, ...]
    units: int
    unit_name: str
    launch_overhead_ns: float
    launch_overhead_source: str
    subbyte_storage: SubbyteStorage
    sources: tuple[Source, ...]
    peaks: tuple[Peak, ...]
    memories: tuple[Memory, ...]
    links: tuple[Link, ...] = ()
    efficiencies: tuple[Efficiency, ...] = ()
    systolic: SystolicArray | None = None
    own_fits: tuple[Fit, ...] = ()
    fits_of: str = ""
    own_lines: tuple[Fit, ...] = ()
    learned_models: tuple[str, ...] = ()
    tdp_w: float = nan
    tdp_source: str = ""

    @property
    def fits(self) -> tuple[Fit, ...]:
        """The device's own fits, then the shipped ones of other classes. The shipped are read when asked for:
        decoding hundreds takes longer than all else of a device.
        """
        if not self.fits_of:
            return self.own_fits
        from hespas.hardware.device_file import shipped_fits

        mine = {fit.key for fit in self.own_fits}
        return (*self.own_fits, *(fit for fit in shipped_fits(self.fits_of) if fit.key not in mine))

    @property
    def main_memory(self) -> Memory:
        """The memory that holds tensors (HBM, GDDR, DRAM); the loader guarantees exactly one."""
        return next(memory for memory in self.memories if memory.level == "main")

    def link(self, kind: LinkKind) -> Link | None:
        """The first link of a kind (files list the innermost first), or None."""
        return next((link for link in self.links if link.kind == kind), None)

    def source_text(self, key: str) -> str:
        """What a row's ``source`` key stands for; raises ``KeyError`` for a key the device does not have."""
        for source in self.sources:
            if source.key == key:
                return source.text
        raise KeyError(key)

    def efficiency(self, op_class: str, dtype: str) -> Efficiency | None:
        """The most specific fit: class and type, then class, then type, then ``*``; None if nothing fits."""
        wanted = ((op_class, dtype), (op_class, "*"), ("*", dtype), ("*", "*"))
        table = {(row.op_class, row.dtype): row for row in self.efficiencies}
        return next((table[key] for key in wanted if key in table), None)


# --- A fitted form of time: the operations it speaks of, its parameters, how wrong it is outside its data

ANY = "*"
"""Stands for every operation, scheme or variant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitParameter:
    """One parameter by name, with its unit in the name; ``std_error`` is NaN where it is not known."""

    name: str
    value: float
    std_error: float = nan


class FitError(Row, frozen=True, kw_only=True):
    """Relative errors (p - m) / m as fractions, on ``n`` rows of shapes that the fit did not see.
    ``before_mape`` is that of the package's learned models, before the device was fitted.
    """

    n: CountOrUnknown
    mape: NotNegativeOrNan
    median_ape: NotNegativeOrNan
    p90_ape: NotNegativeOrNan
    bias: float
    before_mape: NotNegativeOrNan = nan


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


# --- Parameters that a fit of each known form must state, so that a damaged file is told when it is read

_ROOFLINE = ("t0_ns", "compute", "memory", "overlap")

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
        "experts": (
            *(*_ROOFLINE, "unit_load", "tile_edge", "wave_tail", "imbalance", "spread", "step_ns"),
            *("expert_start_ns", "token_passes", "inner_passes"),
        ),
        "kernels": ("t0_ns", "memory", "element", "walked", "row_ns", "unit"),
        "products": ("start_ns", "scale", "ragged"),
        "nccl": ("ratio",),
    }
)
"""Form -> the names of the parameters that each of its fits states; all are positive and finite."""

LATER_PARAMETERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "roofline": ("strided",),
        "streams": ("strided",),
        "tiles": ("cache_share", "quantizing_passes"),
    }
)
"""Form -> parameters that fits may lack that were made before these were known."""

SEGMENTS = "segments"
"""The form of lines, whose parameters are called after layouts: see :func:`segment_name`."""

_SEGMENT = re.compile(r"r(\d{1,9})_n(\d{1,9})_(t0_ns|knee\d{1,4}_bytes|ns_per_byte\d{1,4})")


class SegmentName(NamedTuple):
    """``r8_n1_knee2_bytes``: 8 ranks on one node, the parameter ``knee2_bytes`` of their line."""

    ranks: int
    nodes: int
    part: str


def segment_name(name: str) -> SegmentName | None:
    """What a parameter of the form of lines speaks of; None for another name."""
    match = _SEGMENT.fullmatch(name)
    return SegmentName(int(match[1]), int(match[2]), match[3]) if match else None


def parameter_fault(form: str, values: Mapping[str, float]) -> tuple[str, str] | None:
    """The first parameter that keeps a fit from being used and what is expected of it; None where none does.

    Raises nothing; values are numbers already.
    """
    if form == SEGMENTS:
        return _segments_fault(values)
    return _weights_fault(form, values) if form in LINE_FORMS else _named_fault(form, values)


def _named_fault(form: str, values: Mapping[str, float]) -> tuple[str, str] | None:
    wanted = FORM_PARAMETERS.get(form)
    if wanted is None:
        return None
    for name in wanted:
        if name not in values:
            return name, f"missing: a fit of form '{form}' states {', '.join(wanted)}"
    for name, value in values.items():
        if name not in wanted and name not in LATER_PARAMETERS.get(form, ()):
            return name, f"unknown: a fit of form '{form}' states {', '.join(wanted)}"
        if not (isfinite(value) and value > 0):
            return name, f"expected a positive, finite number, got {value!r}"
    return None


def _segments_fault(values: Mapping[str, float]) -> tuple[str, str] | None:
    lines: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        found = segment_name(name)
        if found is None:
            return name, "expected a name like r8_n1_t0_ns, r8_n1_knee1_bytes or r8_n1_ns_per_byte1"
        if not (isfinite(value) and value >= 0):
            return name, f"expected a finite number that is 0 or more, got {value!r}"
        lines.setdefault(name.removesuffix(found.part), {})[found.part] = value
    return next((fault for stem, line in lines.items() if (fault := _line_fault(stem, line))), None)


def _line_fault(stem: str, line: Mapping[str, float]) -> tuple[str, str] | None:
    """What is wrong with one line: a start, rates counted from 1, and rising knees, one fewer than rates."""
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
    return (name.format(place) for place in range(1, count + 1))


# The forms of lines of systolic arrays, and the weights that a fit of each states.
#
# They speak of the same classes of operations as fits of other forms do, for another estimator.

_BYTES = ("lhs_ns_per_byte", "rhs_ns_per_byte", "result_ns_per_byte")

LINE_FORMS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = MappingProxyType(
    {
        "cycles": (("t0_ns", "cycle_ns"), (*_BYTES, "odd_k_ns")),
        "elements": (("t0_ns",), ("element_ns", "row_ns", "ns_per_byte")),
    }
)
"""Form -> the weights that each of its lines states, and those that it may. All are finite and not negative.
A fit of products may hold a second line, whose weights begin with ``long_``, and the shape of the array whose
cycles it counts.
"""

_TWOFOLD = "cycles"
_LONG = "long_"
_ARRAY = ("array_rows", "array_columns")
_LARGEST_ARRAY = 1 << 16


def _weights_fault(form: str, values: Mapping[str, float]) -> tuple[str, str] | None:
    """The first weight that keeps a line from being used and what is expected of it; None where none does.

    ``form`` is one of :data:`LINE_FORMS`.
    """
    wanted, others = LINE_FORMS[form]
    known = (*wanted, *others)
    every = (*known, *(_LONG + name for name in known), *_ARRAY) if form == _TWOFOLD else known
    for name in (*wanted, *_also_wanted(wanted, values)):
        if name not in values:
            return name, f"missing: a fit of form '{form}' with {', '.join(values)} states it too"
    for name, value in values.items():
        fault = _value_fault(name, value) if name in every else f"unknown: known are {', '.join(every)}"
        if fault:
            return name, fault
    for prefix in ("", _LONG):
        stated = [values[prefix + name] for name in known if prefix + name in values]
        if stated and not any(stated):
            return prefix + wanted[0], "expected one weight of the line at least that is above 0"
    return None


def _also_wanted(wanted: tuple[str, ...], values: Mapping[str, float]) -> tuple[str, ...]:
    """What the presence of others asks for: the whole second line, both sides of an array."""
    long = [_LONG + name for name in wanted] if any(name.startswith(_LONG) for name in values) else []
    array = _ARRAY if any(name in values for name in _ARRAY) else ()
    return (*long, *array)


def _value_fault(name: str, value: float) -> str:
    if name in _ARRAY and not (1 <= value <= _LARGEST_ARRAY and value == value // 1):
        return f"expected a whole number from 1 to {_LARGEST_ARRAY}, got {value!r}"
    if not (isfinite(value) and value >= 0):
        return f"expected a finite number that is 0 or more, got {value!r}"
    return ""
