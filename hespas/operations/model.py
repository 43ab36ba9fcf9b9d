"""Kinds of operations, and tables of operations as columns: kind, name, number format, sizes, FLOPs and
bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from hespas.graph.groups import salted

__all__ = [
    "CHANNELS",
    "CLASS_OF_KIND",
    "EXPANDED",
    "KINDS",
    "KIND_OF_CLASS",
    "MATRIX_CLASSES",
    "MATRIX_KINDS",
    "OF_LIBRARY",
    "REORDERED",
    "ROW_GATHER",
    "SCATTERED",
    "SCHEMES",
    "STRIDED",
    "LabelColumn",
    "Labels",
    "Operations",
    "Scheme",
    "canonical_op",
    "chosen",
    "element_bytes",
    "find_scheme",
    "numbered",
    "rows_by_label",
    "timed_with_events",
]

CHANNELS = "channels"
"""Dimension of convolutions: the input channels of one group. NaN if unknown."""

EXPANDED = "expanded"
"""Dimension of matmuls: floating-point weights of 4 bits that are expanded to the 16 bits of the activations,
as often as a tile of 128 rows loads them. NaN (not in tables) counts as 0.
"""

OF_LIBRARY = "of_library"
"""Dimension of attention: 1 for kernels of a serving library, 0 for kernels of a framework. NaN if
unknown.
"""

REORDERED = "reordered"
"""Dimension of convolutions: bytes of the images whose channels are not next to each other in memory, so that
matrix units cannot load them without a copy in another order. NaN (not in tables) counts as 0.
"""

ROW_GATHER = "row_gather"
"""Name of gathers that select whole rows by one index each, such as PyTorch's ``index_select``."""

SCATTERED = "scattered"
"""Dimension of any kind: number of elements that are read one by one, each from another line of the cache,
because the order of an operand runs across the rows of the result. NaN (not in tables) counts as 0.
"""

STRIDED = "strided"
"""Dimension of any kind: 1 where an operand has another memory order than the result, or is broadcast, and 0
where all tensors are traversed in the same order. NaN (not in tables) counts as 0.
"""


@dataclass(frozen=True, slots=True)
class _KindEntry:
    """Definition of one kind of operation.

    ``dims`` are the names of the sizes that determine the time of such an operation. ``op_class`` is its
    class in a graph and in the efficiencies of a hardware file. Graph nodes whose class is in ``classes``
    have this kind.
    """

    dims: tuple[str, ...]
    op_class: OpClass
    classes: tuple[OpClass, ...] = ()


_PRODUCT = ("batch", "m", "n", "k")
_STREAM = ("rows", "columns")
_TAXONOMY: Mapping[str, _KindEntry] = {
    "matmul": _KindEntry(_PRODUCT, OpClass.CONTRACTION),
    "convolution": _KindEntry((*_PRODUCT, "kernel", "spatial"), OpClass.CONVOLUTION),
    "attention.context": _KindEntry(
        ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim", "pairs"), OpClass.ATTENTION
    ),
    "attention.generation": _KindEntry(
        ("batch", "kv_len", "heads", "kv_heads", "head_dim"), OpClass.ATTENTION
    ),
    "attention.encoder": _KindEntry(("batch", "q_len", "heads", "head_dim"), OpClass.ATTENTION),
    "moe": _KindEntry(
        (
            *("tokens", "hidden", "inter", "topk", "experts"),
            *("tensor_parallel", "expert_parallel", "matrices"),
        ),
        OpClass.CONTRACTION,
    ),
    "vector": _KindEntry(
        _STREAM,
        OpClass.ELEMENTWISE,
        (OpClass.ELEMENTWISE, OpClass.TRANSCENDENTAL, OpClass.MAP, OpClass.FUSION),
    ),
    "reduction": _KindEntry(_STREAM, OpClass.REDUCTION, (OpClass.REDUCTION,)),
    "normalization": _KindEntry(_STREAM, OpClass.NORMALIZATION, (OpClass.NORMALIZATION,)),
    "quantize": _KindEntry(_STREAM, OpClass.QUANTIZE, (OpClass.QUANTIZE,)),
    "pooling": _KindEntry(_STREAM, OpClass.WINDOW, (OpClass.WINDOW,)),
    "gather": _KindEntry(_STREAM, OpClass.GATHER, (OpClass.GATHER, OpClass.SCATTER)),
    "move": _KindEntry(
        _STREAM,
        OpClass.MOVE,
        (OpClass.MOVE, OpClass.SLICE, OpClass.UPDATE, OpClass.BROADCAST, OpClass.GENERATE),
    ),
    "collective": _KindEntry(("ranks", "message_bytes", "ranks_per_node"), OpClass.COLLECTIVE),
    "other": _KindEntry((), OpClass.UNKNOWN),
}

KINDS: Mapping[str, tuple[str, ...]] = {name: kind.dims for name, kind in _TAXONOMY.items()}
"""Kind -> the dimensions that decide its time. ``pairs`` counts the (query, key) pairs of one head that are
computed, which masks and windows reduce; ``columns`` is the last extent, ``rows`` the product of the others.
"""
CLASS_OF_KIND: Mapping[str, OpClass] = {name: kind.op_class for name, kind in _TAXONOMY.items()}
"""Kind -> class of its nodes in a graph, and of its efficiencies in a hardware file."""
KIND_OF_CLASS: Mapping[OpClass, str] = {
    op_class: name for name, kind in _TAXONOMY.items() for op_class in kind.classes
}
"""Class of a node -> its kind, where the class alone decides the kind."""
MATRIX_CLASSES = (OpClass.CONTRACTION, OpClass.CONVOLUTION, OpClass.ATTENTION)
"""Classes whose arithmetic is matrix products, also where the graph does not list the products."""
MATRIX_KINDS = frozenset(name for name, kind in _TAXONOMY.items() if kind.op_class in MATRIX_CLASSES)
"""Kinds whose arithmetic is matrix products."""

_ITERATION_ROWS = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """Column of texts with few distinct values, such as kinds or number formats: ``row`` of shape ``(ops,)``
    indexes ``names``.
    """

    row: SmallIntArray
    names: tuple[str, ...]

    @classmethod
    def of(cls, texts: Sequence[str]) -> Labels:
        """Return labels from one text per row. Distinct texts are numbered in order of appearance."""
        rows: dict[str, int] = {}
        row = np.fromiter((rows.setdefault(text, len(rows)) for text in texts), np.int32, len(texts))
        return cls(row, tuple(rows))

    @classmethod
    def choice(cls, names: tuple[str, ...], row: IntArray) -> Labels:
        """Return labels from the index of each row into ``names``."""
        return cls(row.astype(np.int32), names)

    @classmethod
    def constant(cls, text: str, count: int) -> Labels:
        """Return labels with the same text in ``count`` rows."""
        return cls(np.broadcast_to(np.int32(0), (count,)), (text,))

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, number: int) -> str:
        return self.names[int(self.row[number])]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _ITERATION_ROWS):
            rows: list[int] = self.row[start : start + _ITERATION_ROWS].tolist()
            yield from (self.names[row] for row in rows)

    def used(self) -> tuple[str, ...]:
        """Names that occur in at least one row, in the order of ``names``."""
        present = np.bincount(self.row, minlength=len(self.names)) > 0
        return tuple(name for name, occurs in zip(self.names, present.tolist(), strict=True) if occurs)

    def take(self, rows: IntArray) -> Labels:
        """Return the labels of the given rows; ``names`` does not change."""
        return Labels(taken(self.row, rows), self.names)

    def where(self, *names: str) -> IntArray:
        """Return the rows whose label is one of the given names."""
        wanted = [number for number, name in enumerate(self.names) if name in names]
        return np.flatnonzero(np.isin(self.row, wanted))


class LabelColumn:
    """Column of labels that is filled in parts. Rows that are not filled have the empty label."""

    def __init__(self, count: int) -> None:
        self._row = np.zeros(count, np.int32)
        self._numbers = {"": 0}

    def fill(self, rows: IntArray, labels: Labels | str) -> None:
        """Set the labels of ``rows``: one label per row, or the same label for all."""
        names = (labels,) if isinstance(labels, str) else labels.names
        numbers = np.array([self._numbers.setdefault(name, len(self._numbers)) for name in names], np.int32)
        self._row[rows] = numbers[0] if isinstance(labels, str) else numbers[labels.row]

    def labels(self) -> Labels:
        """Return the labels of all rows."""
        return Labels(self._row, tuple(self._numbers))


def rows_by_label(*columns: Labels) -> Iterator[tuple[tuple[str, ...], IntArray]]:
    """Yield each combination of labels in several columns, with its rows. O(rows log rows)."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        key = key * (len(column.names) + 1) + column.row
    order = np.argsort(key, kind="stable")
    ends = np.flatnonzero(np.diff(key[order])) + 1
    for rows in np.split(order, ends) if len(order) else ():
        yield tuple(column[int(rows[0])] for column in columns), rows.astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Operations:
    """Table of operations: columns of shape ``(ops,)``.

    ``kind`` is a name of :data:`KINDS`. ``op`` is the operation within the kind (``add``, ``softmax``, a
    collective's name; empty for kinds of one operation). ``scheme`` is a number format that
    :func:`~hespas.operations.model.find_scheme` accepts (empty: unknown). ``variant`` is the library and
    kernel family that runs the operation (empty: the usual one of a device). ``dims`` maps the name of a size
    to its column, NaN where an operation lacks that size. ``flops`` and ``bytes_moved`` are per execution,
    NaN where unknown; ``flops`` do not include ``transcendentals``.
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
            raise InvariantError(f"Operations: unknown kind: {', '.join(sorted(unknown))}")

    def __len__(self) -> int:
        return len(self.kind)

    def dim(self, name: str, default: FloatArray | float = np.nan) -> FloatArray:
        """Return the column of one size; ``default`` where it is NaN or missing."""
        column = self.dims.get(name)
        if column is None:
            return constant(default, len(self)) if isinstance(default, float | int) else default
        is_plain = isinstance(default, float) and np.isnan(default)
        return column if is_plain else np.where(np.isnan(column), default, column)

    def take(self, rows: IntArray) -> Operations:
        """Return the operations of the given rows, in that order."""
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
        """Yield each combination of kind, op, scheme and variant with its rows. O(ops log ops)."""
        for labels, rows in rows_by_label(self.kind, self.op, self.scheme, self.variant):
            kind, op, scheme, variant = labels
            yield (kind, op, scheme, variant), rows

    def content(self) -> tuple[object, ...]:
        """Return a hashable key of the contents. Tables with equal keys have equal operations."""
        labels = (self.kind, self.op, self.scheme, self.variant)
        costs = (self.flops, self.transcendentals, self.bytes_moved)
        return (
            *((column.names, column.row.tobytes()) for column in labels),
            *((name, column.tobytes()) for name, column in self.dims.items()),
            *(column.tobytes() for column in costs),
        )

    def distinct(self) -> tuple[Operations, IntArray]:
        """Return a table of the distinct operations, and for each row the index of its operation in that
        table. O(ops log ops).
        """
        first, index_of = self.distinct_rows()
        return self.take(first), index_of

    def distinct_rows(self) -> tuple[IntArray, IntArray]:
        """Return two arrays: the first row of each distinct operation, and for each row the index of its
        distinct operation.

        O(ops log ops).
        """
        if not len(self):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        labels = (column.row for column in (self.kind, self.op, self.scheme, self.variant))
        costs = (self.flops, self.transcendentals, self.bytes_moved)
        every: list[FloatArray | SmallIntArray] = [*labels, *self.dims.values(), *costs]
        columns = [column for column in every if not is_one_value(column)]
        index_of = _numbered_by_words(columns, len(self))
        first = np.full(int(index_of.max()) + 1, len(self), np.int64)
        np.minimum.at(first, index_of, np.arange(len(self)))
        return first, index_of


def _numbered_by_words(columns: Sequence[FloatArray | SmallIntArray], count: int) -> IntArray:
    """Return the numbers of rows as :func:`numbered` does, but faster. Rows are first grouped by a hash of
    all their values, so that only one row of each group is sorted.
    """
    words = np.zeros(count, np.uint64)
    for salt, column in enumerate(columns):
        values = np.where(np.isnan(column), np.nan, column + 0.0) if column.dtype.kind == "f" else column
        wide = values.astype(np.float64 if column.dtype.kind == "f" else np.int64)
        words = salted(words ^ wide.view(np.uint64), salt)
    first, group = np.unique(words, return_index=True, return_inverse=True)[1:]
    group = group.reshape(-1)
    for column in columns:
        same = column[first][group]
        if not ((column == same) | (np.isnan(column) & np.isnan(same))).all():
            return numbered(columns)  # rows with equal fingerprints differ
    number = numbered(column[first] for column in columns)
    return number[group] if len(number) else np.zeros(count, np.int64)


def numbered(columns: Iterable[FloatArray | SmallIntArray]) -> IntArray:
    """Return a number for each row of ``columns``. Rows with equal values in all columns have the same
    number. Numbers follow the order of the values.

    NaN is equal to itself, and last. Columns are read one by one, without a copy of all. O(columns x rows log
    rows).
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
            _, index = np.unique(number, return_inverse=True)
            number = index.reshape(-1).astype(np.int64, copy=False)
    return np.empty(0, np.int64) if number is None else number


def chosen(first: Operations, second: Operations, is_second: BoolArray) -> Operations:
    """Return a table that takes each row from ``first`` or, where ``is_second``, from ``second``. Both tables
    have the same length.

    A size that the selected table lacks becomes NaN.
    """
    dims: dict[str, FloatArray] = {}
    for table, is_selected in ((first, ~is_second), (second, is_second)):
        for name, column in table.dims.items():
            dims[name] = np.where(is_selected, column, dims.get(name, np.nan))
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
    index = {name: row for row, name in enumerate(names)}
    rows = [np.array([index[name] for name in labels.names], np.int32) for labels in (first, second)]
    return Labels(np.where(is_second, rows[1][second.row], rows[0][first.row]).astype(np.int32), names)


_EVENT_TIMES = "pytorch events"
"""Prefix of variants whose times were taken on the host with CUDA events."""

_SYNONYMS: Mapping[str, str] = {
    "addition": "add",
    "addu": "add_scalar",
    "subtract": "sub",
    "multiply": "mul",
    "mulu": "mul_scalar",
    "divide": "div",
    "divu": "div_scalar",
    "power": "pow",
    "powu": "pow_scalar",
    "pow_tensor_scalar": "pow_scalar",
    "exponential": "exp",
    "logistic": "sigmoid",
    "maximum": "max",
    "minimum": "min",
    "ln": "layer_norm",
    "native_layer_norm": "layer_norm",
    "input_layernorm": "rms_norm",
    "post_attention_layernorm": "rms_norm",
    "fused_rms_norm": "rms_norm",
    "emb": "embedding",
    "safe_softmax": "softmax",
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "alltoall": "all_to_all",
    "send_recv": "permute",
    "collective_permute": "permute",
}


def canonical_op(name: str) -> str:
    """Return an operation name without dialect, overload, in-place mark and case. Synonyms become one name.

    ``stablehlo.add``, ``aten::add_.Tensor`` and ``addition`` are all ``add``.
    """
    bare = name.rpartition("::")[2] if "::" in name else name.rpartition(".")[2]
    if "::" in name:
        bare = bare.partition(".")[0]
    bare = bare.strip("_").casefold()
    return _SYNONYMS.get(bare, bare)


def timed_with_events(variant: str) -> bool:
    """Return True if the times of a library variant were measured between two device events. Such times
    include 14 to 30 us of host work in addition to the kernel.
    """
    return variant.startswith(_EVENT_TIMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Number format of an operation, as tables and runtimes name it (``fp8_block``, ``int4_wo``).

    ``rate_dtype`` determines the arithmetic rate, with ``products`` hardware products per multiply (6: full
    float32 without TF32). Bits are per stored element and include block scales: one 8-bit scale per 32
    elements for MX formats and ``fp4_block``, one per 16 for NVFP4, one 32-bit scale per 128 x 128 weights
    and per 128 activations for ``fp8_block``. If ``quantizes``, the operation receives 16-bit activations and
    quantises them in separate kernels.
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
    _mixed("fp4_block", "f4E2M1FN", 16, 4.25, quantizes=True),
    _mixed("a4w4_mxfp4", "f4E2M1FN", 4.25, 4.25),
    _mixed("a8w8_fp8_block", "f8E4M3FN", 8 + 32 / 128, 8 + 32 / (128 * 128)),
)

SCHEMES: Mapping[str, Scheme] = MappingProxyType({row.name: row for row in _ROWS})
"""Schemes that differ from a plain element type, by the name that tables and runtimes use."""


def element_bytes(scheme: Labels, part: Literal["activation", "weight", "output"]) -> FloatArray:
    """Return the bytes per element of activations, weights or outputs (``part``), shape ``(ops,)``; NaN if
    unknown.
    """
    formats = [find_scheme(name) for name in scheme.names]
    bits = [np.nan if entry is None else float(getattr(entry, f"{part}_bits")) for entry in formats]
    return np.array(bits)[scheme.row] / 8


def find_scheme(name: str) -> Scheme | None:
    """Return the number format with a name of :data:`SCHEMES`, or of an element type in any spelling; else
    None.
    """
    if name in SCHEMES:
        return SCHEMES[name]
    entry = find_dtype(name)
    if entry is None or entry.kind in (DTypeKind.TOKEN, DTypeKind.OPAQUE):
        return None
    bits: float = 8 if entry.kind is DTypeKind.BOOL else entry.bits
    if entry.block_elements:
        bits += entry.block_scale_bits / entry.block_elements
    return _plain(entry.name, bits)
