"""Operations as models of time see them: what is computed, in which number format, how large."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from hespas.graph.columns import (
    BoolArray,
    FloatArray,
    IntArray,
    SmallIntArray,
    constant,
    is_every_row,
    is_one_value,
    taken,
)
from hespas.graph.errors import InvariantError

__all__ = ["KINDS", "STRIDED", "Labels", "Operations", "chosen", "numbered"]

STRIDED = "strided"
"""A dimension of any kind: 1 where an operand lies in memory in another order than the result, or is repeated
over it, 0 where all are walked alike. NaN (tables do not say) counts as 0.
"""

KINDS: Mapping[str, tuple[str, ...]] = {
    "matmul": ("batch", "m", "n", "k"),
    "convolution": ("batch", "m", "n", "k", "kernel", "spatial"),
    "attention.context": ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim", "pairs"),
    "attention.generation": ("batch", "kv_len", "heads", "kv_heads", "head_dim"),
    "attention.encoder": ("batch", "q_len", "heads", "head_dim"),
    "moe": ("tokens", "hidden", "inter", "topk", "experts", "tensor_parallel", "expert_parallel", "matrices"),
    "vector": ("rows", "columns"),
    "reduction": ("rows", "columns"),
    "normalization": ("rows", "columns"),
    "quantize": ("rows", "columns"),
    "pooling": ("rows", "columns"),
    "gather": ("rows", "columns"),
    "move": ("rows", "columns"),
    "collective": ("ranks", "message_bytes", "ranks_per_node"),
    "other": (),
}
"""Kind -> the dimensions that decide its time. ``pairs`` counts (query, key) pairs of one head that are
computed, so that masks and windows show; ``columns`` is the last dimension, ``rows`` all others multiplied.
"""

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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Operations:
    """Columns of shape ``(ops,)``.

    ``kind`` is a name of :data:`KINDS`; ``op`` the operation within it (``add``, ``softmax``, a collective's
    name; empty where the kind says all); ``scheme`` a name of
    :func:`~hespas.estimators.operations.schemes.find_scheme` (empty: unknown); ``variant`` the library and
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

    def dim(self, name: str) -> FloatArray:
        """One dimension; NaN throughout where no operation has it."""
        found = self.dims.get(name)
        return constant(np.nan, len(self)) if found is None else found

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
        labels: tuple[Labels, ...] = (self.kind, self.op, self.scheme, self.variant)
        key = np.zeros(len(self), np.int64)
        for each in labels:
            key = key * (len(each.names) + 1) + each.row
        order = np.argsort(key, kind="stable")
        ends = np.flatnonzero(np.diff(key[order])) + 1
        for rows in np.split(order, ends) if len(order) else ():
            kind, op, scheme, variant = (each[int(rows[0])] for each in labels)
            yield (kind, op, scheme, variant), rows.astype(np.int64)

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
