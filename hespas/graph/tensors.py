"""Tensor types as a table: each distinct (element type, shape, encoding) is stored once.

Nodes refer to rows of the table, so a program with a million operands and fifty types keeps fifty shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.dtypes import DTYPES, UNKNOWN_DTYPE, DType

__all__ = ["DYNAMIC", "TensorTypes", "TensorTypesBuilder"]

DYNAMIC = -1
"""The extent of a dimension that is known at run time only."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorTypes:
    """Distinct tensor types; all columns have shape ``(types,)``.

    ``dtype`` holds codes of :data:`hespas.graph.dtypes.DTYPES` (-1 unknown). The extents of type ``i`` are
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
