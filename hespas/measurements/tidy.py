"""Reader of tidy tables, with the columns ``hardware``, ``kind``, ``dtype``, a time, and the sizes of the
kind.

Convolutions have the columns ``images``, ``in_channels``, ``out_channels``, ``kernel``, ``in_size`` and
``out_size`` (square, one group); prompts have ``q_len`` and ``window`` (0: no window). Defaults: ``kv_heads``
is ``heads``; mixtures of experts are gated (3 ``matrices``) and run on one device; ``passes``, the number of
times that elements are read and written, counts each operand and the result once. The column of times with
the suffix ``_std`` is the standard deviation over repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hespas.graph.columns import BoolArray, FloatArray
from hespas.graph.errors import FormatError, clipped
from hespas.measurements import DURATIONS, OF_OPERATIONS
from hespas.measurements.columns import Columns
from hespas.operations import KINDS, Labels, Operations, build, canonical_op, chosen, element_bytes

__all__ = [
    "TIDY",
    "Dialect",
    "MeasuredRows",
    "check_amounts",
    "check_sizes",
    "measured_rows",
    "relabelled",
    "scheme_of",
    "size_faults",
    "tidy_operations",
    "usual_flops",
    "usual_passes",
]

_LARGEST = 2.0**63


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredRows:
    """Rows of a table, converted to operations with measured times.

    ``kept`` is False for rows that do not describe an operation. ``contradicts`` is True for rows with two
    different times, or with the time of another row's work (None: no such row).
    """

    ops: Operations
    duration_ns: FloatArray
    spread_ns: FloatArray
    kept: BoolArray
    contradicts: BoolArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Known format of a table. ``marks`` are columns that occur together in no other format.

    ``make`` converts its rows to operations. ``left_out`` is the reason for which rows without an operation
    are skipped. ``is_recording`` is True if rows are events of a recorded program; the table is then read as
    a whole.
    """

    title: str
    marks: frozenset[str]
    make: Callable[[Columns], MeasuredRows]
    provenance: str
    hardware_column: str = "hardware"
    left_out: str = "no operation of a known kind"
    is_recording: bool = False


_BINARY = frozenset({"add", "sub", "mul", "div", "pow", "max", "min"})
_DTYPES = {"bfloat16": "bf16", "float16": "f16", "half": "f16", "float32": "f32_full", "int8": "i8"}


def measured_rows(
    ops: Operations,
    duration_us: FloatArray,
    *,
    spread_us: FloatArray | None = None,
    kept: BoolArray | None = None,
) -> MeasuredRows:
    """Return operations with measured times, given in microseconds; all rows are kept by default."""
    spread = np.full(len(ops), np.nan) if spread_us is None else spread_us * 1e3
    return MeasuredRows(ops, duration_us * 1e3, spread, np.ones(len(ops), np.bool_) if kept is None else kept)


def check_sizes(ops: Operations, columns: Columns) -> None:
    """Raise ``FormatError`` for the first row with an impossible size. NaN is an unknown size and allowed."""
    for name, size in ops.dims.items():
        check_amounts(name, size, columns)


def check_amounts(name: str, amounts: FloatArray, columns: Columns) -> None:
    """Raise ``FormatError`` for the first impossible value of the size ``name``."""
    wrong = np.flatnonzero((amounts < 0) | (amounts > _LARGEST))
    if len(wrong):
        index = int(wrong[0])
        raise FormatError(
            f"{name} is {amounts[index]:g}",
            path=str(columns.path),
            position=f"row {columns.row(index)}",
            hint="use sizes from 0 to 2^63",
        )


def size_faults(ops: Operations, stated: frozenset[str]) -> Iterator[tuple[str, BoolArray]]:
    """Yield each reason for which the sizes of rows are invalid, with a mask of these rows.

    A size that the kind of operation needs must be known, positive, and at most 2^63. It must also be a whole
    number if the table states it (``stated``), or if it is not derived from other columns.
    """
    for name, kinds in _KINDS_OF.items():
        size = ops.dims.get(name)
        if size is None:
            size = np.full(len(ops), np.nan)
        has_size = np.isin(ops.kind.row, [row for row, kind in enumerate(ops.kind.names) if kind in kinds])
        yield f"{name} is missing, or not a number", has_size & np.isnan(size)
        yield f"{name} is 0", has_size & (size == 0)
        yield f"{name} is negative", has_size & (size < 0)
        yield f"{name} is above 2^63", has_size & (size > _LARGEST)
        if name not in _DERIVED or name in stated:
            fractional = (size > 0) & (size <= _LARGEST) & (size != np.floor(size))
            yield f"{name} is not a whole number", has_size & fractional


_DERIVED = frozenset({"rows", "columns", "message_bytes"})
_KINDS_OF: Mapping[str, frozenset[str]] = {
    name: frozenset(kind for kind, names in KINDS.items() if name in names)
    for name in dict.fromkeys(name for names in KINDS.values() for name in names)
}
"""Size -> kinds whose time depends on it."""


def relabelled(labels: Labels, names: dict[str, str]) -> Labels:
    """Return labels with some texts replaced; ``names`` maps old to new texts."""
    return Labels(labels.row, tuple(names.get(name, name) for name in labels.names))


def scheme_of(columns: Columns, name: str = "dtype") -> Labels:
    """Return the number format of each row; ``float32`` in tables is without TF32."""
    return relabelled(columns.texts(name), _DTYPES)


def usual_passes(op: Labels) -> FloatArray:
    """Return how many tensors of its size each operation reads or writes: the number of its operands and
    results, from its canonical name.
    """
    return np.array([3.0 if name in _BINARY else 2.0 for name in op.names])[op.row]


_HEAVY: Mapping[str, float] = {
    "layer_norm": 8.0,
    "batch_norm": 8.0,
    "rms_norm": 4.0,
    "softmax": 12.0,
    "gelu": 12.0,
    "tanh": 8.0,
}
"""FLOPs per element of operations with several steps: most of the time of norms on TPUs."""


def usual_flops(op: Labels) -> FloatArray:
    """Return the FLOPs per element of each operation, by its canonical name."""
    return np.array([_HEAVY.get(name, 1.0) for name in op.names])[op.row]


_TIME_TOLERANCE = 0.01
"""Largest relative difference of two columns of the same time, given with two or three digits."""
_LAYER = ("images", "in_channels", "out_channels", "kernel", "in_size", "out_size")


@dataclass(frozen=True, slots=True, eq=False)
class _TidyRows:
    """Rows of a tidy table, with their number formats and variants."""

    columns: Columns
    scheme: Labels
    variant: Labels

    def sizes(self, *names: str) -> dict[str, FloatArray]:
        """Return the sizes with the given names of all rows; sizes without a column are NaN, and 1 for
        ``batch``.
        """
        return {name: self.columns.numbers(name, 1.0 if name == "batch" else np.nan) for name in names}

    def op(self) -> Labels:
        """Return the canonical operation name of each row."""
        op = self.columns.texts("op", "")
        return Labels(op.row, tuple(canonical_op(name) for name in op.names))


_KindRule = Callable[[_TidyRows], Operations]
_KIND_RULES: dict[str, _KindRule] = {}


def _kind(name: str) -> Callable[[_KindRule], _KindRule]:
    """Return a decorator that registers a function as the maker of the operations of a kind."""

    def register(rule: _KindRule) -> _KindRule:
        _KIND_RULES[name] = rule
        return rule

    return register


@_kind("matmul")
def _matmuls(rows: _TidyRows) -> Operations:
    return build.matmuls(rows.scheme, variant=rows.variant, **rows.sizes(*KINDS["matmul"]))


@_kind("convolution")
def _convolutions(rows: _TidyRows) -> Operations:
    return build.convolutions(rows.scheme, variant=rows.variant, **rows.sizes(*_LAYER))


def _key_heads(rows: _TidyRows) -> FloatArray:
    """Return the number of key and value heads of each row; by default the number of query heads."""
    stated = rows.columns.numbers("kv_heads", np.nan)
    return np.where(np.isnan(stated), rows.columns.numbers("heads", np.nan), stated)


@_kind("moe")
def _experts(rows: _TidyRows) -> Operations:
    usual = {"tensor_parallel": 1.0, "expert_parallel": 1.0, "matrices": 3.0}
    stated = {name: rows.columns.numbers(name, np.nan) for name in KINDS["moe"]}
    sizes = {name: np.where(np.isnan(size), usual.get(name, np.nan), size) for name, size in stated.items()}
    return build.mixtures_of_experts(rows.scheme, op=rows.op(), variant=rows.variant, **sizes)


@_kind("attention.context")
def _context(rows: _TidyRows) -> Operations:
    return build.attention_context(
        rows.scheme,
        kv_heads=_key_heads(rows),
        length=rows.columns.numbers("q_len", np.nan),
        window=np.nan_to_num(rows.columns.numbers("window", 0.0)),
        kv_bytes=element_bytes(rows.scheme, "activation"),
        variant=rows.variant,
        **rows.sizes("batch", "heads", "head_dim"),
    )


@_kind("attention.generation")
def _generation(rows: _TidyRows) -> Operations:
    sizes = rows.sizes("batch", "kv_len", "heads", "head_dim")
    return build.attention_generation(
        rows.scheme,
        kv_heads=_key_heads(rows),
        kv_bytes=element_bytes(rows.scheme, "activation"),
        variant=rows.variant,
        **sizes,
    )


@_kind("attention.encoder")
def _encoder(rows: _TidyRows) -> Operations:
    sizes = rows.sizes("batch", "heads", "head_dim")
    length = rows.columns.numbers("q_len", np.nan)
    return build.attention_encoder(rows.scheme, length=length, variant=rows.variant, **sizes)


@_kind("collective")
def _collectives(rows: _TidyRows) -> Operations:
    sizes = rows.sizes(*KINDS["collective"])
    return build.collectives(rows.scheme, op=rows.op(), variant=rows.variant, **sizes)


def _elementwise(kind: str, rows: _TidyRows) -> Operations:
    op, sizes = rows.op(), rows.sizes(*KINDS[kind])
    stated = rows.columns.numbers("passes", np.nan)
    # A reduction reads its operand once, and writes one element per row.
    usual = 1 + 1 / np.maximum(sizes["columns"], 1) if kind == "reduction" else usual_passes(op)
    return build.elementwise(
        kind,
        rows.scheme,
        op=op,
        passes=np.where(np.isnan(stated), usual, stated),
        flops_per_element=usual_flops(op),
        variant=rows.variant,
        **sizes,
    )


_KIND_RULES.update(
    {kind: partial(_elementwise, kind) for kind, dims in KINDS.items() if dims == ("rows", "columns")}
)


def tidy_operations(columns: Columns) -> Operations:
    """Return the operations of a table with columns ``kind`` and ``dtype``. Raises ``FormatError``."""
    kind = columns.texts("kind")
    for name in ("passes", "window"):
        check_amounts(name, columns.numbers(name, np.nan), columns)
    unknown = sorted(set(kind.used()) - set(_KIND_RULES))
    if unknown:
        raise FormatError(
            f"unknown kind in column 'kind': {clipped(', '.join(map(repr, unknown[:5])))}",
            path=str(columns.path),
            position=f"row {columns.row(int(kind.where(*unknown)[0]))}",
            hint=f"use one of: {', '.join(_KIND_RULES)}",
        )
    rows = _TidyRows(columns, scheme_of(columns), columns.texts("variant", ""))
    ops: Operations | None = None
    for name in kind.used():
        part = _KIND_RULES[name](rows)
        is_kind = np.zeros(len(columns), np.bool_)
        is_kind[kind.where(name)] = True
        ops = part if ops is None else chosen(ops, part, is_kind)
    if ops is None:
        raise FormatError(
            "the table has no rows",
            path=str(columns.path),
            position="row 1",
            hint="check that the file is complete",
        )
    return ops


def _read_tidy(columns: Columns) -> MeasuredRows:
    """Return the operations of a tidy table with their times. If a row has times in several columns, the
    column with the finest unit is used.
    """
    stated = [(name, factor_ns / 1e3) for name, factor_ns in DURATIONS.items() if name in columns.names]
    if not stated:
        raise FormatError(
            "no column of times",
            path=str(columns.path),
            position="header",
            hint="name it duration_ns, duration_us, duration_ms or duration_s",
        )
    time_us, spread_us = (np.full(len(columns), np.nan) for _ in range(2))
    contradicts = np.zeros(len(columns), np.bool_)
    for name, factor in stated:
        raw = columns.numbers(name)
        other, is_first = raw * factor, np.isnan(time_us)
        # A coarser column is rounded: whole numbers to its unit, others to some digits.
        rounding = factor * np.where(raw == np.floor(raw), 0.5, 1e-3)
        tolerance = _TIME_TOLERANCE * np.maximum(np.abs(other), np.abs(time_us)) + rounding
        differs = (np.abs(other - time_us) > tolerance) | (np.isinf(other) != np.isinf(time_us))
        contradicts |= ~np.isnan(other) & differs & ~is_first
        spread_us = np.where(is_first, columns.numbers(f"{name}_std", np.nan) * factor, spread_us)
        time_us = np.where(is_first, other, time_us)
    rows = measured_rows(tidy_operations(columns), time_us, spread_us=spread_us)
    return replace(rows, contradicts=contradicts)


TIDY = Dialect(title="a tidy table", marks=OF_OPERATIONS, make=_read_tidy, provenance="the table itself")
"""Format of a user's own measurements."""
