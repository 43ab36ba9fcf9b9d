"""Tensor types as a table: each distinct (element type, shape, encoding) is stored once.

Nodes refer to rows of the table, so a program with a million operands and fifty types keeps fifty shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import FloatArray, IntArray

__all__ = [
    "DTYPES",
    "DYNAMIC",
    "UNKNOWN_DTYPE",
    "DType",
    "DTypeKind",
    "TensorTypes",
    "TensorTypesBuilder",
    "dtype",
    "find_dtype",
]

DYNAMIC = -1
"""The extent of a dimension that is known at run time only."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorTypes:
    """Distinct tensor types; all columns have shape ``(types,)``.

    ``dtype`` holds codes of :data:`hespas.graph.tensors.DTYPES` (-1 unknown). The extents of type ``i`` are
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
