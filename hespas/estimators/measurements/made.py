"""What a dialect makes of a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hespas.estimators.measurements.columns import Columns
from hespas.estimators.operations import Labels, Operations
from hespas.graph.columns import BoolArray, FloatArray

__all__ = ["Dialect", "Made", "made_of", "relabelled", "scheme_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """The rows of a table as operations; ``kept`` is false where a row stands for none."""

    ops: Operations
    duration_ns: FloatArray
    spread_ns: FloatArray
    kept: BoolArray


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


def relabelled(labels: Labels, names: dict[str, str]) -> Labels:
    """The same labels, some of them called otherwise."""
    return Labels(labels.row, tuple(names.get(name, name) for name in labels.names))


def scheme_of(columns: Columns, name: str = "dtype") -> Labels:
    """The number format of each row. The tables' ``float32`` was measured without TF32."""
    return relabelled(columns.texts(name), _DTYPES)
