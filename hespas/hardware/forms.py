"""Parameters that a fit of each known form must state, so that a damaged file is told when it is read.

Forms themselves are functions and belong to the estimators that know them. A form that is not here belongs to
somebody else's estimator: its parameters are taken as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import isfinite
from types import MappingProxyType
from typing import NamedTuple

__all__ = [
    "FORM_PARAMETERS",
    "LATER_PARAMETERS",
    "LINE_FORMS",
    "SEGMENTS",
    "SegmentName",
    "parameter_fault",
    "segment_name",
]

_ROOFLINE = ("t0_ns", "compute", "memory", "overlap")

FORM_PARAMETERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "roofline": _ROOFLINE,
        "streams": (*_ROOFLINE, "row_ns", "row_step_ns", "cache_gain", "cache_reach", "cache_edge"),
        "tiles": (
            *(*_ROOFLINE, "step_ns", "unit_load", "tile_edge", "fill", "split_ns", "wave_tail"),
            *("activations_cached", "cache_reach", "cache_edge", "ragged_k", "ragged_n", "weight_copies"),
        ),
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
        "nccl": ("ratio",),
    }
)
"""Form -> the names of the parameters that each of its fits states; all are positive and finite."""

LATER_PARAMETERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"roofline": ("strided",), "streams": ("strided",)}
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
