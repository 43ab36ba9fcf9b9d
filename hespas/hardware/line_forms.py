"""The forms of lines of systolic arrays, and the weights that a fit of each states.

They speak of the same classes of operations as fits of other forms do, for another estimator.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from types import MappingProxyType

__all__ = ["LINE_FORMS", "weights_fault"]

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


def weights_fault(form: str, values: Mapping[str, float]) -> tuple[str, str] | None:
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
