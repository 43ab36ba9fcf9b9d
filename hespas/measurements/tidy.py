"""A tidy table of one's own: ``hardware``, ``kind``, ``dtype``, a time, and the dimensions of the kind.

Convolutions state their layers (``images``, ``in_channels``, ``out_channels``, ``kernel``, ``in_size``,
``out_size``; square, one group), prompts their ``q_len`` and ``window`` (0: all before). There are as many
``kv_heads`` as ``heads`` where none are stated; a layer of experts is then gated (3 ``matrices``) and of one
device. ``passes`` is how often elements are read and written: empty, every operand and the result once. A
column called like that of the times with ``_std`` behind it is their deviation over repeats.
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
    "Made",
    "check_amounts",
    "check_sizes",
    "made_of",
    "relabelled",
    "scheme_of",
    "size_faults",
    "tidy_operations",
    "usual_flops",
    "usual_passes",
]

# What a dialect makes of a table.

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
    an operation are. ``is_recording``: rows are events of a program that ran, and belong together.
    """

    title: str
    marks: frozenset[str]
    make: Callable[[Columns], Made]
    provenance: str
    hardware_column: str = "hardware"
    left_out: str = "no operation of a known kind"
    is_recording: bool = False


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


_HEAVY: Mapping[str, float] = {
    "layer_norm": 8.0,
    "batch_norm": 8.0,
    "rms_norm": 4.0,
    "softmax": 12.0,
    "gelu": 12.0,
    "tanh": 8.0,
}
"""FLOPs per element where one operation is many: little where the memory decides, most of a TPU's norms."""


def usual_flops(op: Labels) -> FloatArray:
    """FLOPs that operations take per element, by canonical names."""
    return np.array([_HEAVY.get(name, 1.0) for name in op.names])[op.row]


_AGREEING = 0.01
"""Share by which two columns of times may differ and still mean the same: that of two or three digits."""
_ELEMENTWISE = tuple(kind for kind, dims in KINDS.items() if dims == ("rows", "columns"))
_LAYER = ("images", "in_channels", "out_channels", "kernel", "in_size", "out_size")


@dataclass(frozen=True, slots=True, eq=False)
class _Times:
    """Times and their deviation in microseconds (NaN: not stated), and which rows state another time, too."""

    time_us: FloatArray
    spread_us: FloatArray
    contradicts: BoolArray


def _times(columns: Columns) -> _Times:
    """Of several columns of times the finest that a row states, if the others agree with it."""
    stated = [(name, factor_ns / 1e3) for name, factor_ns in DURATIONS.items() if name in columns.names]
    if not stated:
        raise FormatError(
            "no column of times",
            path=str(columns.path),
            position="header",
            hint="call it duration_ns, duration_us, duration_ms or duration_s",
        )
    time, spread = (np.full(len(columns), np.nan) for _ in range(2))
    contradicts = np.zeros(len(columns), np.bool_)
    for name, factor in stated:
        raw = columns.numbers(name)
        other, unstated = raw * factor, np.isnan(time)
        # A coarser column is rounded: a whole number to its unit, others to some digits.
        rounding = factor * np.where(raw == np.floor(raw), 0.5, 1e-3)
        apart = np.abs(other - time) > _AGREEING * np.maximum(np.abs(other), np.abs(time)) + rounding
        contradicts |= ~np.isnan(other) & (apart | (np.isinf(other) != np.isinf(time))) & ~unstated
        spread = np.where(unstated, columns.numbers(f"{name}_std", np.nan) * factor, spread)
        time = np.where(unstated, other, time)
    return _Times(time, spread, contradicts)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The columns of a table with what all kinds of rows have."""

    columns: Columns
    scheme: Labels
    variant: Labels

    def sizes(self, *names: str) -> dict[str, FloatArray]:
        """Dimensions by name: one batch where nothing is said, NaN for others that are not there."""
        return {name: self.columns.numbers(name, 1.0 if name == "batch" else np.nan) for name in names}

    def op(self) -> Labels:
        """Operations under one name, whoever wrote them."""
        op = self.columns.texts("op", "")
        return Labels(op.row, tuple(canonical_op(name) for name in op.names))


def _matmuls(rows: _Rows) -> Operations:
    return build.matmuls(rows.scheme, variant=rows.variant, **rows.sizes(*KINDS["matmul"]))


def _convolutions(rows: _Rows) -> Operations:
    return build.convolutions(rows.scheme, variant=rows.variant, **rows.sizes(*_LAYER))


def _key_heads(rows: _Rows) -> FloatArray:
    """Heads of keys and values: as many as of queries where nothing is said."""
    stated = rows.columns.numbers("kv_heads", np.nan)
    return np.where(np.isnan(stated), rows.columns.numbers("heads", np.nan), stated)


def _experts(rows: _Rows) -> Operations:
    usual = {"tensor_parallel": 1.0, "expert_parallel": 1.0, "matrices": 3.0}
    stated = {name: rows.columns.numbers(name, np.nan) for name in KINDS["moe"]}
    sizes = {name: np.where(np.isnan(size), usual.get(name, np.nan), size) for name, size in stated.items()}
    return build.mixtures_of_experts(rows.scheme, op=rows.op(), variant=rows.variant, **sizes)


def _context(rows: _Rows) -> Operations:
    sizes = rows.sizes("batch", "heads", "head_dim")
    return build.attention_context(
        rows.scheme,
        kv_heads=_key_heads(rows),
        length=rows.columns.numbers("q_len", np.nan),
        window=np.nan_to_num(rows.columns.numbers("window", 0.0)),
        kv_bytes=element_bytes(rows.scheme, "activation"),
        variant=rows.variant,
        **sizes,
    )


def _generation(rows: _Rows) -> Operations:
    sizes = rows.sizes("batch", "kv_len", "heads", "head_dim")
    return build.attention_generation(
        rows.scheme,
        kv_heads=_key_heads(rows),
        kv_bytes=element_bytes(rows.scheme, "activation"),
        variant=rows.variant,
        **sizes,
    )


def _encoder(rows: _Rows) -> Operations:
    sizes = rows.sizes("batch", "heads", "head_dim")
    length = rows.columns.numbers("q_len", np.nan)
    return build.attention_encoder(rows.scheme, length=length, variant=rows.variant, **sizes)


def _collectives(rows: _Rows) -> Operations:
    sizes = rows.sizes(*KINDS["collective"])
    return build.collectives(rows.scheme, op=rows.op(), variant=rows.variant, **sizes)


def _elementwise(kind: str, rows: _Rows) -> Operations:
    op, sizes = rows.op(), rows.sizes(*KINDS[kind])
    stated = rows.columns.numbers("passes", np.nan)
    # What is reduced is read once; of each row one element is written.
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


_MAKE: Mapping[str, Callable[[_Rows], Operations]] = {
    "matmul": _matmuls,
    "convolution": _convolutions,
    "attention.context": _context,
    "attention.generation": _generation,
    "attention.encoder": _encoder,
    "moe": _experts,
    **{kind: partial(_elementwise, kind) for kind in _ELEMENTWISE},
    "collective": _collectives,
}


def tidy_operations(columns: Columns) -> Operations:
    """The operations of a table with columns ``kind`` and ``dtype``. Raises ``FormatError``."""
    kind = columns.texts("kind")
    for name in ("passes", "window"):
        check_amounts(name, columns.numbers(name, np.nan), columns)
    unknown = sorted(set(kind.used()) - set(_MAKE))
    if unknown:
        raise FormatError(
            f"column 'kind' holds {clipped(', '.join(map(repr, unknown[:5])))}",
            path=str(columns.path),
            position=f"row {columns.row(int(kind.where(*unknown)[0]))}",
            hint=f"known are {', '.join(_MAKE)}",
        )
    rows = _Rows(columns, scheme_of(columns), columns.texts("variant", ""))
    made: Operations | None = None
    for name in kind.used():
        part = _MAKE[name](rows)
        is_mine = np.zeros(len(columns), np.bool_)
        is_mine[kind.where(name)] = True
        made = part if made is None else chosen(made, part, is_mine)
    if made is None:
        raise FormatError(
            "the table has no rows", path=str(columns.path), position="row 1", hint="was it cut off?"
        )
    return made


def _tidy(columns: Columns) -> Made:
    times = _times(columns)
    made = made_of(tidy_operations(columns), times.time_us, spread_us=times.spread_us)
    return replace(made, contradicts=times.contradicts)


TIDY = (
    Dialect(
        title="a tidy table",
        marks=OF_OPERATIONS,
        make=_tidy,
        provenance="the table itself",
    ),
)
"""One's own measurements."""
