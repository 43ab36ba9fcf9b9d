"""Columns the graph is made of: tables, ragged rows (CSR), interned strings, tensor types.

Ragged rows and strings hold two flat arrays whatever the number of rows: a million cost bytes, not objects.
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
    "is_every_row",
    "is_one_value",
    "mapped",
    "taken",
]

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
SmallIntArray = NDArray[np.int32]

_Scalar = TypeVar("_Scalar", bound=np.generic)


def constant(value: float, rows: int) -> FloatArray:
    """A float column that holds one value everywhere and takes no memory."""
    return np.broadcast_to(np.float64(value), (rows,))


def is_one_value(column: NDArray[np.generic]) -> bool:
    """Whether a column holds one value everywhere by its very form: see :func:`constant`."""
    return column.strides == (0,)


def constant_if_equal(column: NDArray[_Scalar]) -> NDArray[_Scalar]:
    """The same column, in constant memory where it holds one value (or only NaN)."""
    if len(column) < 2:
        return column
    first = column[0]
    same = np.isnan(column) if np.isnan(first) else column == first
    return np.broadcast_to(first, column.shape) if same.all() else column


def taken(column: NDArray[_Scalar], rows: IntArray) -> NDArray[_Scalar]:
    """Some rows of a column; of one that takes no memory, without memory."""
    return np.broadcast_to(column[:1], rows.shape) if is_one_value(column) and len(column) else column[rows]


def at_rows(column: NDArray[_Scalar], rows: NDArray[np.integer], missing: float) -> NDArray[_Scalar]:
    """The value of a column at each row, ``missing`` for row -1."""
    found = np.full(len(rows), missing, column.dtype)
    known = rows >= 0
    found[known] = column[rows[known]]
    return found


def mapped(
    values: NDArray[np.integer], convert: Callable[[int], float], dtype: type[_Scalar]
) -> NDArray[_Scalar]:
    """What a function makes of each number; it is called once for equal ones."""
    distinct, place = np.unique(values, return_inverse=True)
    found: NDArray[_Scalar] = np.array([convert(value) for value in distinct.tolist()], dtype)
    of_value: NDArray[_Scalar] = found[place.reshape(-1)]
    return of_value


def distinct_rows(*columns: NDArray[np.integer]) -> tuple[list[list[int]], IntArray]:
    """The different combinations of values that the rows of some columns have, sorted, and the place of each
    row's among them.
    """
    first, place = equal_rows(*columns)
    return np.stack([column[first] for column in columns], axis=1).astype(np.int64).tolist(), place


def equal_rows(*columns: NDArray[Any]) -> tuple[IntArray, IntArray]:
    """The first row of each combination of values that the rows of some columns have, in the order of the
    combinations, and the place of each row's among them. Unknown figures (NaN) are equal.
    """
    place: IntArray = np.zeros(len(columns[0]), np.int64)
    first: IntArray = place[:1]
    for column in columns:
        values, of_column = np.unique(column, return_inverse=True)
        # what is distinct so far comes first: at most the square of the rows, which is within 63 bits
        both = place * len(values) + of_column.reshape(-1)
        _, first, place = np.unique(both, return_index=True, return_inverse=True)
    return first, place.reshape(-1).astype(np.int64, copy=False)


def is_every_row(rows: IntArray, count: int) -> bool:
    """Whether ``rows`` are all ``count`` rows in their order: then nothing need be copied."""
    if len(rows) != count:
        return False
    return not count or (rows[0] == 0 and rows[-1] == count - 1 and bool((rows[1:] > rows[:-1]).all()))


def check_lengths(owner: str, rows: int, columns: Mapping[str, Sized]) -> None:
    """Raise :class:`InvariantError` for a column that does not have ``rows`` rows."""
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
    """The columns of a class in their order, with the types that its annotations state."""
    found = dict[str, type[np.generic]]()
    for name, stated in table.__annotations__.items():
        if stated in _NAMED_DTYPES:
            found[name] = _NAMED_DTYPES[stated]
        elif stated.startswith("NDArray[np."):
            found[name] = getattr(np, stated.removeprefix("NDArray[np.").removesuffix("]"))
    return MappingProxyType(found)


class ColumnTable:
    """Columns of one length, as the annotations of a table list them; ``DTYPES`` are their types."""

    __slots__ = ()
    DTYPES: ClassVar[Mapping[str, type[np.generic]]]

    def __init_subclass__(cls) -> None:
        """Take the types of the columns from their annotations."""
        cls.DTYPES = dtypes_of(cls)  # pyright: ignore[reportConstantRedefinition]

    def __post_init__(self) -> None:
        """Check that all columns have equally many rows."""
        check_lengths(type(self).__name__, len(self), {name: getattr(self, name) for name in self.DTYPES})

    if TYPE_CHECKING:

        def __init__(self, **columns: NDArray[Any]) -> None: ...

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[float, ...]]) -> Self:
        """A table of rows, each with its values in order of the columns."""
        return cls(
            **{
                name: np.fromiter((row[place] for row in rows), dtype, len(rows))
                for place, (name, dtype) in enumerate(cls.DTYPES.items())
            }
        )

    @classmethod
    def of(cls, **known: NDArray[Any]) -> Self:
        """A table of the columns a source has, in their types; in the others stands what says that nothing is
        known: NaN, row 0 of texts, else -1.
        """
        count = len(next(iter(known.values())))

        def column(name: str, dtype: type[np.generic]) -> NDArray[Any]:
            if name in known:
                return known[name].astype(dtype, copy=False)
            missing = nan if np.dtype(dtype).kind == "f" else 0 if name.endswith("_row") else -1
            return np.full(count, missing, dtype)

        return cls(**{name: column(name, dtype) for name, dtype in cls.DTYPES.items()})

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, one part after the other."""
        columns = {name: [getattr(part, name) for part in (cls.empty(), *parts)] for name in cls.DTYPES}
        return cls(**{name: np.concatenate(each) for name, each in columns.items()})

    @classmethod
    def empty(cls) -> Self:
        """A table without rows."""
        return cls.from_rows(())

    def __len__(self) -> int:
        return len(getattr(self, next(iter(self.DTYPES))))

    def take(self, rows: NDArray[np.integer | np.bool_], node: SmallIntArray | None = None) -> Self:
        """Some rows, by number or by mask; ``node`` says which nodes they are of in another graph."""
        columns = {name: getattr(self, name)[rows] for name in self.DTYPES}
        return type(self)(**columns if node is None else {**columns, "node": node})


@dataclass(frozen=True, slots=True, eq=False)
class RaggedArray:
    """Ragged rows: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``.

    ``offsets`` has shape ``(rows + 1,)``, starts at 0 and never falls; ``values`` is int32 or int64.
    """

    offsets: IntArray
    values: SmallIntArray

    @classmethod
    def empty(cls, rows: int) -> RaggedArray:
        """``rows`` empty rows in constant memory."""
        return cls(np.broadcast_to(np.int64(0), (rows + 1,)), np.empty(0, np.int32))

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]]) -> RaggedArray:
        """Ragged rows from nested sequences; O(total)."""
        lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
        flat = np.fromiter((value for row in rows for value in row), np.int32, int(lengths.sum()))
        return cls.from_lengths(lengths, flat)

    @classmethod
    def from_lengths(cls, lengths: NDArray[np.integer], values: NDArray[np.integer]) -> RaggedArray:
        """Ragged rows from each row's length and all values in row order."""
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(offsets, values.astype(np.int32, copy=False))

    @classmethod
    def from_pairs(cls, rows: NDArray[np.integer], values: NDArray[np.integer], num_rows: int) -> RaggedArray:
        """Ragged rows from (row, value) pairs; the order of pairs within a row is kept."""
        order = np.argsort(rows, kind="stable")
        return cls.from_lengths(np.bincount(rows, minlength=num_rows), values[order])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> SmallIntArray:
        """The values of one row."""
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
        """Nested Python lists, for loops that must be sequential."""
        flat: list[int] = self.values.tolist()
        bounds: list[int] = self.offsets.tolist()
        return [flat[start:end] for start, end in pairwise(bounds)]

    def take(self, rows: NDArray[np.integer]) -> RaggedArray:
        """The given rows, in the given order."""
        lengths = self.lengths[rows]
        starts = self.offsets[:-1][rows]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        positions = np.arange(total, dtype=np.int64) - np.repeat(ends - lengths - starts, lengths)
        return RaggedArray.from_lengths(lengths, self.values[positions])

    def moved(self, rows: NDArray[np.integer], num_rows: int) -> RaggedArray:
        """Each row at another place among ``num_rows``; the others are empty."""
        return RaggedArray.from_pairs(rows[self.row_ids], self.values, num_rows)

    def transpose(self, num_columns: int) -> RaggedArray:
        """Rows become values: from predecessors to successors and back. ``values`` must be < num_columns."""
        return RaggedArray.from_pairs(self.values, self.row_ids, num_columns)

    def segment_sum(self, column: FloatArray) -> FloatArray:
        """Per row, the sum of ``column[value]`` over its values; 0 for an empty row."""
        sums = np.bincount(self.row_ids, weights=column[self.values], minlength=len(self))
        return sums.astype(np.float64, copy=False)

    def equals(self, other: RaggedArray) -> bool:
        """Same rows with the same values in the same order."""
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(self.values, other.values)


@dataclass(frozen=True, slots=True, eq=False)
class StringTable:
    """Strings as one UTF-8 buffer (it may be a memory map) and offsets of shape ``(count + 1,)``.

    Row 0 is always ``""``. Builders intern; a table read from a file may hold a string twice.
    """

    buffer: bytes | memoryview[int]
    offsets: IntArray

    @classmethod
    def from_strings(cls, strings: Iterable[str]) -> StringTable:
        """A table holding exactly these strings in this order; the first must be empty."""
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
        """The row of a string, or -1. O(table size): for occasional look-ups."""
        wanted = text.encode("utf-8", "surrogatepass")
        rows = np.flatnonzero(np.diff(self.offsets) == len(wanted))
        for row in rows.tolist():
            if self.buffer[self.offsets[row] : self.offsets[row + 1]] == wanted:
                return int(row)
        return -1


class StringTableBuilder:
    """Interns strings: equal strings get one row. Row 0 is ``""``."""

    __slots__ = ("_rows", "_strings")

    def __init__(self, table: StringTable | None = None) -> None:
        """Start empty, or continue a finished ``table`` whose rows keep their numbers."""
        self._strings: list[str] = [""] if table is None else list(table)
        self._rows: dict[str, int] = {}
        for row, text in enumerate(self._strings):
            self._rows.setdefault(text, row)

    def add(self, text: str) -> int:
        """The row of ``text``, new or old."""
        row = self._rows.setdefault(text, len(self._strings))
        if row == len(self._strings):
            self._strings.append(text)
        return row

    def __getitem__(self, row: int) -> str:
        return self._strings[row]

    def build(self) -> StringTable:
        """The finished table."""
        return StringTable.from_strings(self._strings)


# --- Tensor types as a table: each distinct (element type, shape, encoding) is stored once. Nodes refer to
# its rows, so a program with a million operands and fifty types keeps fifty shapes.

DYNAMIC = -1
"""The extent of a dimension that is known at run time only."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorTypes:
    """Distinct tensor types; all columns have shape ``(types,)``.

    ``dtype`` holds codes of :data:`hespas.graph.columns.DTYPES` (-1 unknown). The extents of type ``i`` are
    ``dims[dim_offsets[i]:dim_offsets[i + 1]]`` (:data:`DYNAMIC` where unknown), ``bytes`` is the
    storage (NaN where a dimension is unknown),
    ``bounded`` says that extents are upper bounds, ``encoding`` is a string row with what the format says
    beside shape and element type (layout, tiling, quantisation), 0 for nothing.
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
        """The extents of one type."""
        return tuple(self.dims[self.dim_offsets[index] : self.dim_offsets[index + 1]].tolist())

    def dtype_of(self, index: int) -> DType | None:
        """The element type of one row, None where unknown."""
        code = int(self.dtype[index])
        return None if code == UNKNOWN_DTYPE else DTYPES[code]

    def elements(self, index: int) -> int:
        """Number of elements, -1 where a dimension is unknown."""
        shape = self.shape(index)
        return -1 if DYNAMIC in shape else prod(shape)


class TensorTypesBuilder:
    """Interns tensor types while a program is read."""

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
        """The row of a type. ``extra_bytes`` is storage beside the elements: quantisation scales, padding."""
        key = (UNKNOWN_DTYPE if element is None else element.code, tuple(shape), bounded, encoding)
        row = self._keys.setdefault(key, len(self._bytes))
        if row == len(self._bytes):
            if element is None or DYNAMIC in key[1]:
                self._bytes.append(float("nan"))
            else:
                self._bytes.append(element.storage_bytes(prod(key[1])) + extra_bytes)
        return row

    def bytes_of(self, row: int) -> float:
        """Storage bytes of one type, NaN where a dimension is unknown."""
        return self._bytes[row]

    def build(self) -> TensorTypes:
        """The finished table."""
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


# Element types and the bytes they really take.
#
# Names are MLIR's spelling (StableHLO specification, section "Types"); aliases cover HLO, NumPy, PyTorch
# and NCCL. Storage rule: ``i1`` takes one byte; other sub-byte types are packed, ``ceil(elements * bits /
# 8)`` per tensor; block-scaled (MX, NVFP4) types add one scale per block (OCP Microscaling specification
# 1.0).


class DTypeKind(Enum):
    """Which arithmetic unit an element type needs."""

    BOOL = "bool"
    SIGNED = "signed"
    UNSIGNED = "unsigned"
    FLOAT = "float"
    COMPLEX = "complex"
    TOKEN = "token"
    OPAQUE = "opaque"


@dataclass(frozen=True, slots=True)
class DType:
    """One element type. ``code`` is its row in :data:`DTYPES` and what columns store."""

    code: int
    name: str
    kind: DTypeKind
    bits: int
    block_elements: int = 0
    block_scale_bits: int = 0
    aliases: tuple[str, ...] = ()

    def storage_bytes(self, elements: int) -> int:
        """Bytes that ``elements`` of this type take in memory, block scales included."""
        if self.kind is DTypeKind.BOOL:
            return elements
        packed = (elements * self.bits + 7) // 8
        if not self.block_elements:
            return packed
        blocks = -(-elements // self.block_elements)
        return packed + (blocks * self.block_scale_bits + 7) // 8


# name, kind, bits, block elements, bits of a block's scale, aliases
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
)

DTYPES: tuple[DType, ...] = tuple(DType(code, *row) for code, row in enumerate(_ROWS))

UNKNOWN_DTYPE = -1
"""The code of an element type nobody stated."""

_BY_NAME: dict[str, DType] = {
    spelling.lower(): entry for entry in DTYPES for spelling in (entry.name, *entry.aliases)
}


def find_dtype(spelling: str) -> DType | None:
    """The type a spelling names (case does not matter), or None."""
    return _BY_NAME.get(spelling.lower())


def dtype(spelling: str) -> DType:
    """The type a spelling names; raises ``KeyError`` for one that is not in the table."""
    return _BY_NAME[spelling.lower()]
