"""What a dialect makes of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hespas.graph.columns import BoolArray, FloatArray
from hespas.graph.errors import FormatError
from hespas.measurements.columns import Columns
from hespas.operations import KINDS, Labels, Operations

__all__ = [
    "Dialect",
    "Made",
    "check_amounts",
    "check_sizes",
    "made_of",
    "relabelled",
    "scheme_of",
    "size_faults",
    "usual_passes",
]

_LARGEST = 2.0**63


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """The rows of a table as operations; ``kept`` is false where a row stands for none, ``contradicts`` true
    where it states two times (None: nowhere).
    """

    ops: Operations
    duration_ns: FloatArray
    spread_ns: FloatArray
    kept: BoolArray
    contradicts: BoolArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One table. ``marks`` are columns that together no other table has; ``left_out`` says what rows without
    an operation are.
    """

    title: str
    marks: frozenset[str]
    make: Callable[[Columns], Made]
    provenance: str
    hardware_column: str = "hardware"
    left_out: str = "no operation of a known kind"


_BINARY = frozenset({"add", "sub", "mul", "div", "pow", "max", "min"})
_DTYPES = {"bfloat16": "bf16", "float16": "f16", "half": "f16", "float32": "f32_full", "int8": "i8"}


def made_of(
    ops: Operations,
    duration_us: FloatArray,
    *,
    spread_us: FloatArray | None = None,
    kept: BoolArray | None = None,
) -> Made:
    """Operations with times in microseconds; all kept where nothing else is said."""
    spread = np.full(len(ops), np.nan) if spread_us is None else spread_us * 1e3
    return Made(ops, duration_us * 1e3, spread, np.ones(len(ops), np.bool_) if kept is None else kept)


def check_sizes(ops: Operations, columns: Columns) -> None:
    """Raise ``FormatError`` naming the first row with a size that none can have; NaN is unknown."""
    for name, size in ops.dims.items():
        check_amounts(name, size, columns)


def check_amounts(name: str, amounts: FloatArray, columns: Columns) -> None:
    """The same for one column."""
    wrong = np.flatnonzero((amounts < 0) | (amounts > _LARGEST))
    if len(wrong):
        place = int(wrong[0])
        raise FormatError(
            f"{name} is {amounts[place]:g}",
            path=str(columns.path),
            position=f"row {columns.row(place)}",
            hint="sizes are 0 or more, and at most 2^63",
        )


def size_faults(ops: Operations, stated: frozenset[str]) -> Iterator[tuple[str, BoolArray]]:
    """Why rows have no time that depends on their sizes, with the rows: a size of their kind is unknown, 0,
    negative, beyond 2^63 or, unless it was worked out of others that are not ``stated``, not whole.
    """
    for name, kinds in _KINDS_OF.items():
        size = ops.dims.get(name)
        if size is None:
            size = np.full(len(ops), np.nan)
        mine = np.isin(ops.kind.row, [row for row, kind in enumerate(ops.kind.names) if kind in kinds])
        yield f"{name} is not stated, or no number", mine & np.isnan(size)
        yield f"{name} is 0", mine & (size == 0)
        yield f"{name} is negative", mine & (size < 0)
        yield f"{name} is beyond 2^63", mine & (size > _LARGEST)
        if name not in _WORKED_OUT or name in stated:
            yield (
                f"{name} is no whole number",
                mine & (size > 0) & (size <= _LARGEST) & (size != np.floor(size)),
            )


_WORKED_OUT = frozenset({"rows", "columns", "message_bytes"})
_KINDS_OF: Mapping[str, frozenset[str]] = {
    name: frozenset(kind for kind, names in KINDS.items() if name in names)
    for name in dict.fromkeys(name for names in KINDS.values() for name in names)
}
"""Which kinds have a size."""


def relabelled(labels: Labels, names: dict[str, str]) -> Labels:
    """The same labels, some of them called otherwise."""
    return Labels(labels.row, tuple(names.get(name, name) for name in labels.names))


def scheme_of(columns: Columns, name: str = "dtype") -> Labels:
    """The number format of each row. The tables' ``float32`` was measured without TF32."""
    return relabelled(columns.texts(name), _DTYPES)


def usual_passes(op: Labels) -> FloatArray:
    """How often operations read and write their elements: operands and result, by canonical names."""
    return np.array([3.0 if name in _BINARY else 2.0 for name in op.names])[op.row]
