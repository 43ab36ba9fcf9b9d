"""Operations as models of time see them: what is computed, in which number format, how large."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Literal

import numpy as np

from hespas.graph import OpClass, find_dtype
from hespas.graph.columns import (
    BoolArray,
    DTypeKind,
    FloatArray,
    IntArray,
    SmallIntArray,
    constant,
    is_every_row,
    is_one_value,
    taken,
)
from hespas.graph.errors import InvariantError

__all__ = [
    "CLASS_OF_KIND",
    "KINDS",
    "KIND_OF_CLASS",
    "MATRIX_CLASSES",
    "MATRIX_KINDS",
    "SCHEMES",
    "STRIDED",
    "Labels",
    "Operations",
    "Scheme",
    "chosen",
    "element_bytes",
    "find_scheme",
    "numbered",
    "rows_by_label",
]

STRIDED = "strided"
"""A dimension of any kind: 1 where an operand lies in memory in another order than the result, or is repeated
over it, 0 where all are walked alike. NaN (tables do not say) counts as 0.
"""


@dataclass(frozen=True, slots=True)
class _Kind:
    """One row of the taxonomy. ``dims`` decide the time; ``op_class`` is what a graph calls the kind, and by
    whose efficiencies in a hardware file it runs; nodes of ``classes`` are of this kind by their class alone.
    """

    dims: tuple[str, ...]
    op_class: OpClass
    classes: tuple[OpClass, ...] = ()


_PRODUCT = ("batch", "m", "n", "k")
_STREAM = ("rows", "columns")
_TAXONOMY: Mapping[str, _Kind] = {
    "matmul": _Kind(_PRODUCT, OpClass.CONTRACTION),
    "convolution": _Kind((*_PRODUCT, "kernel", "spatial"), OpClass.CONVOLUTION),
    "attention.context": _Kind(
        ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim", "pairs"), OpClass.ATTENTION
    ),
    "attention.generation": _Kind(("batch", "kv_len", "heads", "kv_heads", "head_dim"), OpClass.ATTENTION),
    "attention.encoder": _Kind(("batch", "q_len", "heads", "head_dim"), OpClass.ATTENTION),
    "moe": _Kind(
        (
            *("tokens", "hidden", "inter", "topk", "experts"),
            *("tensor_parallel", "expert_parallel", "matrices"),
        ),
        OpClass.CONTRACTION,
    ),
    "vector": _Kind(
        _STREAM,
        OpClass.ELEMENTWISE,
        (OpClass.ELEMENTWISE, OpClass.TRANSCENDENTAL, OpClass.MAP, OpClass.FUSION),
    ),
    "reduction": _Kind(_STREAM, OpClass.REDUCTION, (OpClass.REDUCTION,)),
    "normalization": _Kind(_STREAM, OpClass.NORMALIZATION, (OpClass.NORMALIZATION,)),
    "quantize": _Kind(_STREAM, OpClass.QUANTIZE, (OpClass.QUANTIZE,)),
    "pooling": _Kind(_STREAM, OpClass.WINDOW, (OpClass.WINDOW,)),
    "gather": _Kind(_STREAM, OpClass.GATHER, (OpClass.GATHER, OpClass.SCATTER)),
    "move": _Kind(
        _STREAM,
        OpClass.MOVE,
        (OpClass.MOVE, OpClass.SLICE, OpClass.UPDATE, OpClass.BROADCAST, OpClass.GENERATE),
    ),
    "collective": _Kind(("ranks", "message_bytes", "ranks_per_node"), OpClass.COLLECTIVE),
    "other": _Kind((), OpClass.UNKNOWN),
}

KINDS: Mapping[str, tuple[str, ...]] = {name: kind.dims for name, kind in _TAXONOMY.items()}
"""Kind -> the dimensions that decide its time. ``pairs`` counts (query, key) pairs of one head that are
computed, so that masks and windows show; ``columns`` is the last dimension, ``rows`` all others multiplied.
"""
CLASS_OF_KIND: Mapping[str, OpClass] = {name: kind.op_class for name, kind in _TAXONOMY.items()}
"""Kind -> the class of a graph's node of that kind, and of efficiencies in a hardware file."""
KIND_OF_CLASS: Mapping[OpClass, str] = {
    op_class: name for name, kind in _TAXONOMY.items() for op_class in kind.classes
}
"""Class of a graph's node -> its kind, where the class alone decides it."""
MATRIX_CLASSES = (OpClass.CONTRACTION, OpClass.CONVOLUTION, OpClass.ATTENTION)
"""Classes whose arithmetic is products of matrices, where a graph lists no product of its own."""
MATRIX_KINDS = frozenset(name for name, kind in _TAXONOMY.items() if kind.op_class in MATRIX_CLASSES)
"""Kinds whose arithmetic is products of matrices."""

_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """A column of few distinct texts: ``row`` of shape ``(ops,)`` numbers ``names``."""

    row: SmallIntArray
    names: tuple[str, ...]

    @classmethod
    def of(cls, texts: Sequence[str]) -> Labels:
        """Number texts in order of appearance."""
        rows: dict[str, int] = {}
        row = np.fromiter((rows.setdefault(text, len(rows)) for text in texts), np.int32, len(texts))
        return cls(row, tuple(rows))

    @classmethod
    def choice(cls, names: tuple[str, ...], row: IntArray) -> Labels:
        """Labels by number."""
        return cls(row.astype(np.int32), names)

    @classmethod
    def constant(cls, text: str, count: int) -> Labels:
        """The same text ``count`` times."""
        return cls(np.broadcast_to(np.int32(0), (count,)), (text,))

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, number: int) -> str:
        return self.names[int(self.row[number])]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _AT_ONCE):
            rows: list[int] = self.row[start : start + _AT_ONCE].tolist()
            yield from (self.names[row] for row in rows)

    def used(self) -> tuple[str, ...]:
        """The names that occur, in the order of their numbers."""
        present = np.bincount(self.row, minlength=len(self.names)) > 0
        return tuple(name for name, here in zip(self.names, present.tolist(), strict=True) if here)

    def take(self, rows: IntArray) -> Labels:
        """The labels of some operations; all names stay."""
        return Labels(taken(self.row, rows), self.names)

    def where(self, *names: str) -> IntArray:
        """Numbers of the operations whose label is one of ``names``."""
        wanted = [number for number, name in enumerate(self.names) if name in names]
        return np.flatnonzero(np.isin(self.row, wanted))


def rows_by_label(*columns: Labels) -> Iterator[tuple[tuple[str, ...], IntArray]]:
    """Each combination of labels that occurs, with the rows that have it. O(rows log rows)."""
    key = np.zeros(len(columns[0]), np.int64)
    for each in columns:
        key = key * (len(each.names) + 1) + each.row
    order = np.argsort(key, kind="stable")
    ends = np.flatnonzero(np.diff(key[order])) + 1
    for rows in np.split(order, ends) if len(order) else ():
        yield tuple(each[int(rows[0])] for each in columns), rows.astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Operations:
    """Columns of shape ``(ops,)``.

    ``kind`` is a name of :data:`KINDS`; ``op`` the operation within it (``add``, ``softmax``, a collective's
    name; empty where the kind says all); ``scheme`` a name of
    :func:`~hespas.operations.model.find_scheme` (empty: unknown); ``variant`` the library and
    kernel family that runs it (empty: whatever a device usually runs). ``dims`` holds the dimensions by name,
    NaN where an operation has none. ``flops`` and ``bytes_moved`` are of one execution, NaN unknown;
    ``transcendentals`` are counted among no FLOPs.
    """

    kind: Labels
    op: Labels
    scheme: Labels
    variant: Labels
    dims: Mapping[str, FloatArray]
    flops: FloatArray
    transcendentals: FloatArray
    bytes_moved: FloatArray

    def __post_init__(self) -> None:
        """Check that all columns have one row per operation and that kinds and dimensions are known."""
        lengths = {len(labels) for labels in (self.kind, self.op, self.scheme, self.variant)}
        lengths |= {len(column) for column in (self.flops, self.transcendentals, self.bytes_moved)}
        lengths |= {len(column) for column in self.dims.values()}
        if len(lengths) > 1:
            raise InvariantError("Operations: columns differ in length")
        unknown = set(self.kind.names) - set(KINDS)
        if unknown:
            raise InvariantError(f"Operations: no such kind: {', '.join(sorted(unknown))}")

    def __len__(self) -> int:
        return len(self.kind)

    def dim(self, name: str, default: FloatArray | float = np.nan) -> FloatArray:
        """One dimension; ``default`` where it is not stated."""
        found = self.dims.get(name)
        if found is None:
            return constant(default, len(self)) if isinstance(default, float | int) else default
        is_plain = isinstance(default, float) and np.isnan(default)
        return found if is_plain else np.where(np.isnan(found), default, found)

    def take(self, rows: IntArray) -> Operations:
        """Some operations, in the order given."""
        if is_every_row(rows, len(self)):
            return self
        return Operations(
            kind=self.kind.take(rows),
            op=self.op.take(rows),
            scheme=self.scheme.take(rows),
            variant=self.variant.take(rows),
            dims={name: taken(column, rows) for name, column in self.dims.items()},
            flops=taken(self.flops, rows),
            transcendentals=taken(self.transcendentals, rows),
            bytes_moved=taken(self.bytes_moved, rows),
        )

    def classes(self) -> Iterator[tuple[tuple[str, str, str, str], IntArray]]:
        """Kind, operation, scheme and variant of each class that occurs, with its rows. O(ops log ops)."""
        for labels, rows in rows_by_label(self.kind, self.op, self.scheme, self.variant):
            kind, op, scheme, variant = labels
            yield (kind, op, scheme, variant), rows

    def distinct(self) -> tuple[Operations, IntArray]:
        """Equal operations once, and the place of each operation among them. O(ops log ops)."""
        first, place_of = self.distinct_rows()
        return self.take(first), place_of

    def distinct_rows(self) -> tuple[IntArray, IntArray]:
        """The first of equal operations, and the place of each operation among these. O(ops log ops)."""
        if not len(self):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        labels = (each.row for each in (self.kind, self.op, self.scheme, self.variant))
        place_of = numbered(
            chain(labels, self.dims.values(), (self.flops, self.transcendentals, self.bytes_moved))
        )
        first = np.full(int(place_of.max()) + 1, len(self), np.int64)
        np.minimum.at(first, place_of, np.arange(len(self)))
        return first, place_of


def numbered(columns: Iterable[FloatArray | SmallIntArray]) -> IntArray:
    """A number per distinct row of some columns of one length, in the order of the rows' values; NaN is equal
    to itself, and last. One column after another, so that no row is copied whole. O(columns x rows log rows).
    """
    number: IntArray | None = None
    for column in columns:
        if is_one_value(column):
            number = np.zeros(len(column), np.int64) if number is None else number
            continue
        values, code = np.unique(column, return_inverse=True)
        count = len(values)
        del values
        code = code.reshape(-1).astype(np.int64, copy=False)
        if number is None:
            number = code
        elif count > 1:
            number = number * count
            number += code
            del code
            _, place = np.unique(number, return_inverse=True)
            number = place.reshape(-1).astype(np.int64, copy=False)
    return np.empty(0, np.int64) if number is None else number


def chosen(first: Operations, second: Operations, is_second: BoolArray) -> Operations:
    """Row by row one of two tables of the same length. Dimensions that only the other has become NaN."""
    dims: dict[str, FloatArray] = {}
    for table, mine in ((first, ~is_second), (second, is_second)):
        for name, column in table.dims.items():
            dims[name] = np.where(mine, column, dims.get(name, np.nan))
    return Operations(
        kind=_either(first.kind, second.kind, is_second),
        op=_either(first.op, second.op, is_second),
        scheme=_either(first.scheme, second.scheme, is_second),
        variant=_either(first.variant, second.variant, is_second),
        dims=dims,
        flops=np.where(is_second, second.flops, first.flops),
        transcendentals=np.where(is_second, second.transcendentals, first.transcendentals),
        bytes_moved=np.where(is_second, second.bytes_moved, first.bytes_moved),
    )


def _either(first: Labels, second: Labels, is_second: BoolArray) -> Labels:
    names = tuple(dict.fromkeys((*first.names, *second.names)))
    place = {name: row for row, name in enumerate(names)}
    rows = [np.array([place[name] for name in labels.names], np.int32) for labels in (first, second)]
    return Labels(np.where(is_second, rows[1][second.row], rows[0][first.row]).astype(np.int32), names)


# Number formats of a whole operation: what is multiplied, what is stored, what is quantised on the way.
#
# Tables and runtimes name such a *scheme* (``fp8_block``, ``int4_wo``), programs state element types. Bits
# per element include block scales: MX formats one 8-bit scale per 32 elements, NVFP4 one per 16,
# ``fp8_block`` one 32-bit scale per 128 x 128 of the weights and per 128 of the activations.


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """``rate_dtype`` sets the arithmetic rate, with ``products`` primitive products per multiply (6: full
    float32, never TF32). Bits are per stored element, scales included. ``quantizes``: the operation takes
    16-bit activations and quantises them itself, in kernels of its own.
    """

    name: str
    rate_dtype: str
    activation_bits: float
    weight_bits: float
    output_bits: float
    products: int = 1
    quantizes: bool = False


def _plain(name: str, bits: float, *, products: int = 1, rate: str = "") -> Scheme:
    return Scheme(
        name=name,
        rate_dtype=rate or name,
        activation_bits=bits,
        weight_bits=bits,
        output_bits=bits,
        products=products,
    )


def _mixed(name: str, rate: str, activation: float, weight: float, *, quantizes: bool = False) -> Scheme:
    return Scheme(
        name=name,
        rate_dtype=rate,
        activation_bits=activation,
        weight_bits=weight,
        output_bits=16,
        quantizes=quantizes,
    )


_ROWS = (
    _plain("f32_full", 32, products=6, rate="f32"),
    _mixed("fp8", "f8E4M3FN", 16, 8, quantizes=True),
    _mixed("fp8_block", "f8E4M3FN", 16, 8 + 32 / (128 * 128), quantizes=True),
    _mixed("nvfp4", "f4E2M1FN", 16, 4.5, quantizes=True),
    _mixed("sq", "i8", 16, 8, quantizes=True),
    _mixed("int8_wo", "bf16", 16, 8),
    _mixed("int4_wo", "bf16", 16, 4),
    _mixed("w4a16_mxfp4", "bf16", 16, 4.25),
    _mixed("w4a8_mxfp4_mxfp8", "f8E4M3FN", 8.25, 4.25),
    _mixed("a8w8", "i8", 8, 8),
    _mixed("a8w8_fp8", "f8E4M3FN", 8, 8),
    _mixed("a8w8_fp8_block", "f8E4M3FN", 8 + 32 / 128, 8 + 32 / (128 * 128)),
)

SCHEMES: Mapping[str, Scheme] = MappingProxyType({row.name: row for row in _ROWS})
"""Schemes that are no single element type, by the name tables and runtimes use."""


def element_bytes(scheme: Labels, part: Literal["activation", "weight", "output"]) -> FloatArray:
    """Bytes per element of what each operation reads, weighs or writes; NaN unknown. Shape ``(ops,)``."""
    found = [find_scheme(name) for name in scheme.names]
    bits = [np.nan if each is None else float(getattr(each, f"{part}_bits")) for each in found]
    return np.array(bits)[scheme.row] / 8


def find_scheme(name: str) -> Scheme | None:
    """The scheme of that name, of :data:`SCHEMES` or an element type in any spelling; None if neither."""
    if name in SCHEMES:
        return SCHEMES[name]
    entry = find_dtype(name)
    if entry is None or entry.kind in (DTypeKind.TOKEN, DTypeKind.OPAQUE):
        return None
    bits: float = 8 if entry.kind is DTypeKind.BOOL else entry.bits
    if entry.block_elements:
        bits += entry.block_scale_bits / entry.block_elements
    return _plain(entry.name, bits)
