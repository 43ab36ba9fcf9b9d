"""Columns of a graph: tables, ragged rows (CSR), interned strings, tensor types and element types.

Ragged rows and strings have two flat arrays for any number of rows: a million rows cost bytes, not objects.
Each distinct tensor type (element type, shape, encoding) is stored once and nodes refer to its row, so a
program with a million operands and fifty types stores fifty shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from math import nan, prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from hespas.graph.errors import InvariantError

__all__ = [
    "DTYPES",
    "DYNAMIC",
    "UNKNOWN_DTYPE",
    "BoolArray",
    "ColumnTable",
    "DType",
    "DTypeKind",
    "FloatArray",
    "IntArray",
    "RaggedArray",
    "SmallIntArray",
    "StringTable",
    "StringTableBuilder",
    "TensorTypes",
    "TensorTypesBuilder",
    "at_rows",
    "check_lengths",
    "constant",
    "constant_if_equal",
    "distinct_rows",
    "dtype",
    "dtypes_of",
    "equal_rows",
    "find_dtype",
    "highest_rows",
    "is_every_row",
    "is_one_value",
    "mapped",
    "pareto_rows",
    "taken",
]

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
SmallIntArray = NDArray[np.int32]

_Scalar = TypeVar("_Scalar", bound=np.generic)


def constant(value: float, rows: int) -> FloatArray:
    """Return a float column of one repeated value that takes the memory of a single value."""
    return np.broadcast_to(np.float64(value), (rows,))


def highest_rows(values: FloatArray, most: int) -> IntArray:
    """Return at most ``most`` rows in order, for drawing a curve: the first and the last one, and the highest
    one of each interval. O(rows).
    """
    count = len(values)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(0, count, most - 1).astype(np.int64)
    highest = [start + int(np.argmax(values[start:end])) for start, end in pairwise(edges.tolist())]
    return np.unique([0, *highest, count - 1])


def pareto_rows(figures: Sequence[tuple[float, float]]) -> list[int]:
    """Return the rows of the Pareto frontier, in ascending order of the first figure: no other row has both
    figures as small. O(rows log rows).
    """
    frontier: list[int] = []
    for row in sorted(range(len(figures)), key=figures.__getitem__):
        if not frontier or figures[row][1] < figures[frontier[-1]][1]:
            frontier.append(row)
    return frontier


def is_one_value(column: NDArray[np.generic]) -> bool:
    """Return True if a column has stride 0, as columns of :func:`constant` have."""
    return column.strides == (0,)


def constant_if_equal(column: NDArray[_Scalar]) -> NDArray[_Scalar]:
    """Return the column, stored as one value if all its values are equal (or NaN). Zeros of both signs are
    not equal.
    """
    if len(column) < 2:
        return column
    first = column[0]
    same = np.isnan(column) if np.isnan(first) else column == first
    if first == 0 and column.dtype.kind == "f":
        same &= np.signbit(column) == np.signbit(first)
    return np.broadcast_to(first, column.shape) if same.all() else column


def taken(column: NDArray[_Scalar], rows: IntArray) -> NDArray[_Scalar]:
    """Return the values of a column at some rows. If the column is stored as one value, so is the result."""
    return np.broadcast_to(column[:1], rows.shape) if is_one_value(column) and len(column) else column[rows]


def at_rows(column: NDArray[_Scalar], rows: NDArray[np.integer], missing: float) -> NDArray[_Scalar]:
    """Return the value of a column at each row, ``missing`` for row -1."""
    values = np.full(len(rows), missing, column.dtype)
    present = rows >= 0
    values[present] = column[rows[present]]
    return values


def mapped(
    values: NDArray[np.integer], convert: Callable[[int], float], dtype: type[_Scalar]
) -> NDArray[_Scalar]:
    """Return ``convert(value)`` for each number; the function is called once per distinct number."""
    distinct, position = np.unique(values, return_inverse=True)
    results: NDArray[_Scalar] = np.array([convert(value) for value in distinct.tolist()], dtype)
    column: NDArray[_Scalar] = results[position.reshape(-1)]
    return column


def distinct_rows(*columns: NDArray[np.integer]) -> tuple[list[list[int]], IntArray]:
    """Return the distinct combinations of values in the rows of several columns, sorted. Also return for each
    row the index of its combination.
    """
    first, index = equal_rows(*columns)
    return np.stack([column[first] for column in columns], axis=1).astype(np.int64).tolist(), index


def equal_rows(*columns: NDArray[Any]) -> tuple[IntArray, IntArray]:
    """Return the first row of each distinct combination of values, in sorted order of the combinations, and
    the index of each row's combination. NaN equals NaN.
    """
    index: IntArray = np.zeros(len(columns[0]), np.int64)
    first: IntArray = index[:1]
    for column in columns:
        values, position = np.unique(column, return_inverse=True)
        # below the square of the number of rows, which fits in 63 bits
        key = index * len(values) + position.reshape(-1)
        _, first, index = np.unique(key, return_index=True, return_inverse=True)
    return first, index.reshape(-1).astype(np.int64, copy=False)


def is_every_row(rows: IntArray, count: int) -> bool:
    """Return True if ``rows`` are all ``count`` rows in order, so that no copy is needed."""
    if len(rows) != count:
        return False
    return not count or (rows[0] == 0 and rows[-1] == count - 1 and bool((rows[1:] > rows[:-1]).all()))


def check_lengths(owner: str, rows: int, columns: Mapping[str, Sized]) -> None:
    """Raise :class:`InvariantError` if a column does not have ``rows`` rows; ``owner`` names the table in the
    message.
    """
    for name, column in columns.items():
        if len(column) != rows:
            raise InvariantError(f"{owner}: column {name} does not have {rows} rows")


_NAMED_DTYPES: Mapping[str, type[np.generic]] = {
    "BoolArray": np.bool_,
    "FloatArray": np.float64,
    "IntArray": np.int64,
    "SmallIntArray": np.int32,
}


def dtypes_of(table: type) -> Mapping[str, type[np.generic]]:
    """Return the columns of a class in order, with the types that its annotations state."""
    dtypes = dict[str, type[np.generic]]()
    for name, annotation in table.__annotations__.items():
        if annotation in _NAMED_DTYPES:
            dtypes[name] = _NAMED_DTYPES[annotation]
        elif annotation.startswith("NDArray[np."):
            dtypes[name] = getattr(np, annotation.removeprefix("NDArray[np.").removesuffix("]"))
    return MappingProxyType(dtypes)


class ColumnTable:
    """Base class of tables: columns of equal length, declared by annotations; ``DTYPES`` has their types."""

    __slots__ = ()
    DTYPES: ClassVar[Mapping[str, type[np.generic]]]

    def __init_subclass__(cls) -> None:
        """Set ``DTYPES`` from the annotations."""
        cls.DTYPES = dtypes_of(cls)  # pyright: ignore[reportConstantRedefinition]

    def __post_init__(self) -> None:
        """Check that all columns have the same length."""
        check_lengths(type(self).__name__, len(self), {name: getattr(self, name) for name in self.DTYPES})

    if TYPE_CHECKING:

        def __init__(self, **columns: NDArray[Any]) -> None: ...

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[float, ...]]) -> Self:
        """Return a table of rows with their values in column order."""
        return cls(
            **{
                name: np.fromiter((row[position] for row in rows), dtype, len(rows))
                for position, (name, dtype) in enumerate(cls.DTYPES.items())
            }
        )

    @classmethod
    def of(cls, **columns: NDArray[Any]) -> Self:
        """Return a table of the given columns, cast to their types.

        Missing columns are filled with the value for unknown: NaN, id 0 of texts, else -1.
        """
        count = len(next(iter(columns.values())))

        def column(name: str, dtype: type[np.generic]) -> NDArray[Any]:
            if name in columns:
                return columns[name].astype(dtype, copy=False)
            missing = nan if np.dtype(dtype).kind == "f" else 0 if name.endswith("_id") else -1
            return np.full(count, missing, dtype)

        return cls(**{name: column(name, dtype) for name, dtype in cls.DTYPES.items()})

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the concatenated rows of all parts."""
        tables = (cls.empty(), *parts)
        return cls(
            **{name: np.concatenate([getattr(table, name) for table in tables]) for name in cls.DTYPES}
        )

    @classmethod
    def empty(cls) -> Self:
        """Return a table without rows."""
        return cls.from_rows(())

    def __len__(self) -> int:
        return len(getattr(self, next(iter(self.DTYPES))))

    def take(self, rows: NDArray[np.integer | np.bool_], node: SmallIntArray | None = None) -> Self:
        """Return the rows with the given numbers, or the rows that a mask selects. ``node`` replaces the
        column ``node``, if the rows are for another graph.
        """
        columns = {name: getattr(self, name)[rows] for name in self.DTYPES}
        return type(self)(**columns if node is None else {**columns, "node": node})


@dataclass(frozen=True, slots=True, eq=False)
class RaggedArray:
    """Rows of different lengths: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``.

    ``offsets`` has shape ``(rows + 1,)``, starts at 0 and never decreases; ``values`` is int32 or int64.
    """

    offsets: IntArray
    values: SmallIntArray

    @classmethod
    def empty(cls, rows: int) -> RaggedArray:
        """Return ``rows`` empty rows in constant memory."""
        return cls(np.broadcast_to(np.int64(0), (rows + 1,)), np.empty(0, np.int32))

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]]) -> RaggedArray:
        """Return ragged rows from nested sequences. O(total)."""
        lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
        flat = np.fromiter((value for row in rows for value in row), np.int32, int(lengths.sum()))
        return cls.from_lengths(lengths, flat)

    @classmethod
    def from_lengths(cls, lengths: NDArray[np.integer], values: NDArray[np.integer]) -> RaggedArray:
        """Return ragged rows from the length of each row and all values in row order."""
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(offsets, values.astype(np.int32, copy=False))

    @classmethod
    def from_pairs(cls, rows: NDArray[np.integer], values: NDArray[np.integer], num_rows: int) -> RaggedArray:
        """Return ragged rows from (row, value) pairs; pairs of one row keep their order."""
        order = np.argsort(rows, kind="stable")
        return cls.from_lengths(np.bincount(rows, minlength=num_rows), values[order])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> SmallIntArray:
        """Return the values of one row."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> IntArray:
        """Number of values in each row."""
        return np.diff(self.offsets)

    @property
    def row_ids(self) -> IntArray:
        """The row of each value, shape ``(len(values),)``."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.lengths)

    def to_lists(self) -> list[list[int]]:
        """Return nested Python lists, for loops that must be sequential."""
        flat: list[int] = self.values.tolist()
        bounds: list[int] = self.offsets.tolist()
        return [flat[start:end] for start, end in pairwise(bounds)]

    def take(self, rows: NDArray[np.integer]) -> RaggedArray:
        """Return the given rows, in the given order."""
        lengths = self.lengths[rows]
        starts = self.offsets[:-1][rows]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        positions = np.arange(total, dtype=np.int64) - np.repeat(ends - lengths - starts, lengths)
        return RaggedArray.from_lengths(lengths, self.values[positions])

    def moved(self, rows: NDArray[np.integer], num_rows: int) -> RaggedArray:
        """Return ``num_rows`` rows where row ``i`` is moved to ``rows[i]``; the others are empty."""
        return RaggedArray.from_pairs(rows[self.row_ids], self.values, num_rows)

    def transpose(self, num_columns: int) -> RaggedArray:
        """Return the transpose, as from predecessors to successors. ``values`` must be < num_columns."""
        return RaggedArray.from_pairs(self.values, self.row_ids, num_columns)

    def segment_sum(self, column: FloatArray) -> FloatArray:
        """Return the sum of ``column[value]`` over the values of each row; 0 for an empty row."""
        sums = np.bincount(self.row_ids, weights=column[self.values], minlength=len(self))
        return sums.astype(np.float64, copy=False)

    def equals(self, other: RaggedArray) -> bool:
        """Return True if both have the same rows with the same values in the same order."""
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(self.values, other.values)


@dataclass(frozen=True, slots=True, eq=False)
class StringTable:
    """Strings as one UTF-8 buffer (possibly a memory map) and offsets of shape ``(count + 1,)``.

    Row 0 is always ``""``. Builders store each string once; a table read from a file may have a string twice.
    """

    buffer: bytes | memoryview[int]
    offsets: IntArray

    @classmethod
    def from_strings(cls, strings: Iterable[str]) -> StringTable:
        """Return a table of exactly these strings in this order; the first must be empty."""
        encoded = [text.encode("utf-8", "surrogatepass") for text in strings]
        offsets = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=offsets[1:])
        return cls(b"".join(encoded), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        return f"<StringTable: {len(self):,} texts, {len(self.buffer):,} bytes>"

    def __getitem__(self, index: int) -> str:
        row = self.buffer[self.offsets[index] : self.offsets[index + 1]]
        return bytes(row).decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        bounds: list[int] = self.offsets.tolist()
        for start, end in pairwise(bounds):
            yield bytes(self.buffer[start:end]).decode("utf-8", "surrogatepass")

    def find(self, text: str) -> int:
        """Return the row of a string, or -1. O(table size): for occasional look-ups."""
        wanted = text.encode("utf-8", "surrogatepass")
        rows = np.flatnonzero(np.diff(self.offsets) == len(wanted))
        for row in rows.tolist():
            if self.buffer[self.offsets[row] : self.offsets[row + 1]] == wanted:
                return int(row)
        return -1


class StringTableBuilder:
    """Builder that interns strings: equal strings get one row. Row 0 is ``""``."""

    __slots__ = ("_rows", "_strings")

    def __init__(self, table: StringTable | None = None) -> None:
        """Start empty, or continue a finished ``table`` whose rows keep their numbers."""
        self._strings: list[str] = [""] if table is None else list(table)
        self._rows: dict[str, int] = {}
        for row, text in enumerate(self._strings):
            self._rows.setdefault(text, row)

    def add(self, text: str) -> int:
        """Return the row of ``text``, which is added if new."""
        row = self._rows.setdefault(text, len(self._strings))
        if row == len(self._strings):
            self._strings.append(text)
        return row

    def __getitem__(self, row: int) -> str:
        return self._strings[row]

    def build(self) -> StringTable:
        """Return the finished table."""
        return StringTable.from_strings(self._strings)


DYNAMIC = -1
"""The extent of a dimension that is only known at run time."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorTypes:
    """Distinct tensor types; all columns have shape ``(types,)``.

    ``dtype`` has codes of :data:`hespas.graph.columns.DTYPES` (-1 unknown). The extents of type ``i`` are
    ``dims[dim_offsets[i]:dim_offsets[i + 1]]`` (:data:`DYNAMIC` if unknown). ``bytes`` is the storage (NaN if
    a dimension is unknown). ``bounded`` is True for extents that are upper bounds. ``encoding`` is a string
    row with the layout, tiling or quantisation in the words of the format (0: none).
    """

    dtype: NDArray[np.int16]
    dim_offsets: IntArray
    dims: IntArray
    bytes: FloatArray
    bounded: NDArray[np.bool_]
    encoding: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.dtype)

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the extents of one type."""
        return tuple(self.dims[self.dim_offsets[index] : self.dim_offsets[index + 1]].tolist())

    def dtype_of(self, index: int) -> DType | None:
        """Return the element type of one row, None if unknown."""
        code = int(self.dtype[index])
        return None if code == UNKNOWN_DTYPE else DTYPES[code]

    def elements(self, index: int) -> int:
        """Return the number of elements, -1 if a dimension is unknown."""
        shape = self.shape(index)
        return -1 if DYNAMIC in shape else prod(shape)


class TensorTypesBuilder:
    """Builder that interns tensor types while a program is read."""

    __slots__ = ("_bytes", "_keys")

    def __init__(self) -> None:
        """Start with no types."""
        self._keys: dict[tuple[int, tuple[int, ...], bool, int], int] = {}
        self._bytes: list[float] = []

    def add(
        self,
        element: DType | None,
        shape: Sequence[int],
        *,
        encoding: int = 0,
        bounded: bool = False,
        extra_bytes: int = 0,
    ) -> int:
        """Return the row of a type, which is added if new.

        ``extra_bytes`` is storage in addition to the elements: quantisation scales, padding.
        """
        key = (UNKNOWN_DTYPE if element is None else element.code, tuple(shape), bounded, encoding)
        row = self._keys.setdefault(key, len(self._bytes))
        if row == len(self._bytes):
            if element is None or DYNAMIC in key[1]:
                self._bytes.append(float("nan"))
            else:
                self._bytes.append(element.storage_bytes(prod(key[1])) + extra_bytes)
        return row

    def bytes_of(self, row: int) -> float:
        """Return the storage bytes of one type, NaN if a dimension is unknown."""
        return self._bytes[row]

    def build(self) -> TensorTypes:
        """Return the finished table."""
        keys = list(self._keys)
        offsets = np.zeros(len(keys) + 1, np.int64)
        np.cumsum([len(key[1]) for key in keys], out=offsets[1:])
        return TensorTypes(
            dtype=np.array([key[0] for key in keys], np.int16),
            dim_offsets=offsets,
            dims=np.array([extent for key in keys for extent in key[1]], np.int64),
            bytes=np.array(self._bytes, np.float64),
            bounded=np.array([key[2] for key in keys], np.bool_),
            encoding=np.array([key[3] for key in keys], np.int32),
        )


class DTypeKind(Enum):
    """Kinds of element types, by the arithmetic unit that they need."""

    BOOL = "bool"
    SIGNED = "signed"
    UNSIGNED = "unsigned"
    FLOAT = "float"
    COMPLEX = "complex"
    TOKEN = "token"
    OPAQUE = "opaque"


@dataclass(frozen=True, slots=True)
class DType:
    """One element type. ``code`` is its index in :data:`DTYPES`, and represents the type in columns.

    ``i1`` takes one byte per element. Other types below 8 bits are packed, ``ceil(elements * bits / 8)``
    bytes per tensor. Block-scaled (MX, NVFP4) types add one scale per block (OCP Microscaling specification
    1.0).
    """

    code: int
    name: str
    kind: DTypeKind
    bits: int
    block_elements: int = 0
    block_scale_bits: int = 0
    aliases: tuple[str, ...] = ()

    def storage_bytes(self, elements: int) -> int:
        """Return the bytes of ``elements`` elements in memory, block scales included."""
        if self.kind is DTypeKind.BOOL:
            return elements
        packed = (elements * self.bits + 7) // 8
        if not self.block_elements:
            return packed
        blocks = -(-elements // self.block_elements)
        return packed + (blocks * self.block_scale_bits + 7) // 8


_ROWS: tuple[tuple[str, DTypeKind, int, int, int, tuple[str, ...]], ...] = (
    ("i1", DTypeKind.BOOL, 1, 0, 0, ("pred", "bool", "b8")),
    ("i2", DTypeKind.SIGNED, 2, 0, 0, ("s2", "int2")),
    ("i4", DTypeKind.SIGNED, 4, 0, 0, ("s4", "int4")),
    ("i8", DTypeKind.SIGNED, 8, 0, 0, ("s8", "int8", "char", "signed char")),
    ("i16", DTypeKind.SIGNED, 16, 0, 0, ("s16", "int16", "short", "short int")),
    ("i32", DTypeKind.SIGNED, 32, 0, 0, ("s32", "int32", "int")),
    ("i64", DTypeKind.SIGNED, 64, 0, 0, ("s64", "int64", "long", "long int", "index")),
    ("ui2", DTypeKind.UNSIGNED, 2, 0, 0, ("u2", "uint2")),
    ("ui4", DTypeKind.UNSIGNED, 4, 0, 0, ("u4", "uint4")),
    ("ui8", DTypeKind.UNSIGNED, 8, 0, 0, ("u8", "uint8", "byte", "unsigned char")),
    ("ui16", DTypeKind.UNSIGNED, 16, 0, 0, ("u16", "uint16")),
    ("ui32", DTypeKind.UNSIGNED, 32, 0, 0, ("u32", "uint32")),
    ("ui64", DTypeKind.UNSIGNED, 64, 0, 0, ("u64", "uint64")),
    ("f64", DTypeKind.FLOAT, 64, 0, 0, ("float64", "double", "fp64")),
    ("f32", DTypeKind.FLOAT, 32, 0, 0, ("float32", "float", "fp32")),
    ("tf32", DTypeKind.FLOAT, 32, 0, 0, ("tensorfloat32",)),
    ("bf16", DTypeKind.FLOAT, 16, 0, 0, ("bfloat16", "c10::bfloat16")),
    ("f16", DTypeKind.FLOAT, 16, 0, 0, ("float16", "half", "fp16", "c10::half")),
    ("f8E4M3FN", DTypeKind.FLOAT, 8, 0, 0, ("f8e4m3fn", "float8_e4m3fn", "fp8", "fp8_e4m3")),
    ("f8E5M2", DTypeKind.FLOAT, 8, 0, 0, ("f8e5m2", "float8_e5m2", "fp8_e5m2")),
    ("f8E4M3", DTypeKind.FLOAT, 8, 0, 0, ("f8e4m3", "float8_e4m3")),
    ("f8E3M4", DTypeKind.FLOAT, 8, 0, 0, ("f8e3m4", "float8_e3m4")),
    ("f8E4M3FNUZ", DTypeKind.FLOAT, 8, 0, 0, ("f8e4m3fnuz", "float8_e4m3fnuz")),
    ("f8E5M2FNUZ", DTypeKind.FLOAT, 8, 0, 0, ("f8e5m2fnuz", "float8_e5m2fnuz")),
    ("f8E4M3B11FNUZ", DTypeKind.FLOAT, 8, 0, 0, ("f8e4m3b11fnuz", "float8_e4m3b11fnuz")),
    ("f8E8M0FNU", DTypeKind.FLOAT, 8, 0, 0, ("f8e8m0fnu", "float8_e8m0fnu", "e8m0")),
    ("f6E2M3FN", DTypeKind.FLOAT, 6, 0, 0, ("f6e2m3fn", "float6_e2m3fn")),
    ("f6E3M2FN", DTypeKind.FLOAT, 6, 0, 0, ("f6e3m2fn", "float6_e3m2fn")),
    ("f4E2M1FN", DTypeKind.FLOAT, 4, 0, 0, ("f4e2m1fn", "float4_e2m1fn", "fp4")),
    ("mxfp8", DTypeKind.FLOAT, 8, 32, 8, ("mxfp8_e4m3", "mxfp8_e5m2")),
    ("mxfp6", DTypeKind.FLOAT, 6, 32, 8, ("mxfp6_e2m3", "mxfp6_e3m2")),
    ("mxfp4", DTypeKind.FLOAT, 4, 32, 8, ("mxfp4_e2m1",)),
    ("mxint8", DTypeKind.SIGNED, 8, 32, 8, ()),
    ("nvfp4", DTypeKind.FLOAT, 4, 16, 8, ()),
    ("complex<f32>", DTypeKind.COMPLEX, 64, 0, 0, ("c64", "complex64", "c10::complex<float>")),
    ("complex<f64>", DTypeKind.COMPLEX, 128, 0, 0, ("c128", "complex128", "c10::complex<double>")),
    ("token", DTypeKind.TOKEN, 0, 0, 0, ("!stablehlo.token",)),
    ("opaque", DTypeKind.OPAQUE, 0, 0, 0, ()),
    *(
        (f"{sign}i{bits}", kind, bits, 0, 0, (f"{sign or 's'}{bits}", f"{sign}int{bits}"))
        for bits in (3, 5, 6, 7)
        for sign, kind in (("", DTypeKind.SIGNED), ("u", DTypeKind.UNSIGNED))
    ),
)
"""Name, kind, bits, block elements, bits of the scale of a block, aliases.

Names have MLIR's spelling (StableHLO specification, section "Types"); aliases cover HLO, NumPy, PyTorch and
NCCL. Integers of 3, 5, 6 and 7 bits are storage types of quantised types only. Files hold codes, so new types
are added at the end.
"""

DTYPES: tuple[DType, ...] = tuple(DType(code, *row) for code, row in enumerate(_ROWS))

UNKNOWN_DTYPE = -1
"""Code of an unknown element type."""

_BY_NAME: dict[str, DType] = {
    spelling.lower(): entry for entry in DTYPES for spelling in (entry.name, *entry.aliases)
}


def find_dtype(spelling: str) -> DType | None:
    """Return the element type of that name or alias (case does not matter), or None."""
    return _BY_NAME.get(spelling.lower())


def dtype(spelling: str) -> DType:
    """Return the element type of that name or alias. Raises ``KeyError`` for an unknown one."""
    return _BY_NAME[spelling.lower()]
