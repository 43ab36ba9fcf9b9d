"""The only module here that imports pyarrow, and the part of its interface that is used, typed.

pyarrow is imported when a file is read or written, never before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import BinaryIO, Protocol, cast

import numpy as np
from numpy.typing import NDArray

__all__ = ["Arrow", "ArrowArray", "ArrowBatch", "ArrowCsv", "ArrowParquet", "ArrowParquetMetadata",
           "ArrowSchema", "ArrowType",
           "Batches", "Memory", "Rows", "load_arrow", "load_csv", "load_parquet"]  # fmt: skip


class ArrowType(Protocol):
    """``pyarrow.DataType``."""


class ArrowArray(Protocol):
    """``pyarrow.Array``; ``indices`` and ``dictionary`` exist where texts are dictionary-encoded."""

    @property
    def indices(self) -> ArrowArray: ...  # noqa: D102 # as pyarrow names it
    @property
    def dictionary(self) -> ArrowArray: ...  # noqa: D102
    def cast(self, target_type: ArrowType, /) -> ArrowArray: ...  # noqa: D102
    def dictionary_encode(self) -> ArrowArray: ...  # noqa: D102
    def fill_null(self, value: float, /) -> ArrowArray: ...  # noqa: D102
    def take(self, indices: ArrowArray, /) -> ArrowArray: ...  # noqa: D102
    def to_pylist(self) -> list[object]: ...  # noqa: D102
    def to_numpy(self, *, zero_copy_only: bool) -> NDArray[np.generic]: ...  # noqa: D102


class ArrowSchema(Protocol):
    """``pyarrow.Schema``."""

    @property
    def names(self) -> list[str]: ...  # noqa: D102
    @property
    def types(self) -> list[ArrowType]: ...  # noqa: D102


class ArrowBatch(Protocol):
    """``pyarrow.RecordBatch``."""

    @property
    def schema(self) -> ArrowSchema: ...  # noqa: D102
    @property
    def num_rows(self) -> int: ...  # noqa: D102
    @property
    def nbytes(self) -> int: ...  # noqa: D102
    def column(self, index: int, /) -> ArrowArray: ...  # noqa: D102
    def validate(self, *, full: bool) -> None: ...  # noqa: D102


class Memory(Protocol):
    """``pyarrow.Buffer``, which is Arrow's own and can be written to."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class Rows(Protocol):
    """A writer of record batches."""

    def write_batch(self, batch: ArrowBatch, /) -> None: ...  # noqa: D102


class Batches(Protocol):
    """``pyarrow.csv.CSVStreamingReader``."""

    @property
    def schema(self) -> ArrowSchema: ...  # noqa: D102
    def __iter__(self) -> Iterator[ArrowBatch]: ...


class _Types(Protocol):
    def is_integer(self, found: ArrowType, /) -> bool: ...
    def is_floating(self, found: ArrowType, /) -> bool: ...
    def is_decimal(self, found: ArrowType, /) -> bool: ...
    def is_string(self, found: ArrowType, /) -> bool: ...
    def is_large_string(self, found: ArrowType, /) -> bool: ...
    def is_dictionary(self, found: ArrowType, /) -> bool: ...
    def is_null(self, found: ArrowType, /) -> bool: ...


class _MakeBatch(Protocol):
    def from_arrays(self, arrays: Sequence[ArrowArray], *, schema: ArrowSchema) -> ArrowBatch: ...


class Arrow(Protocol):
    """``pyarrow``."""

    @property
    def types(self) -> _Types: ...  # noqa: D102
    @property
    def ArrowException(self) -> type[Exception]: ...  # noqa: D102, N802
    @property
    def RecordBatch(self) -> _MakeBatch: ...  # noqa: D102, N802
    def allocate_buffer(self, size: int, /) -> Memory: ...  # noqa: D102
    def BufferReader(self, memory: Memory, /) -> object: ...  # noqa: D102, N802
    def string(self) -> ArrowType: ...  # noqa: D102
    def large_string(self) -> ArrowType: ...  # noqa: D102
    def int32(self) -> ArrowType: ...  # noqa: D102
    def int64(self) -> ArrowType: ...  # noqa: D102
    def float64(self) -> ArrowType: ...  # noqa: D102
    def dictionary(self, index: ArrowType, value: ArrowType, /) -> ArrowType: ...  # noqa: D102
    def field(self, name: str, kind: ArrowType, /) -> object: ...  # noqa: D102
    def schema(self, fields: Sequence[object], metadata: Mapping[str, str] | None = None) -> ArrowSchema: ...  # noqa: D102
    def array(  # noqa: D102
        self,
        values: Sequence[str] | NDArray[np.generic],
        type: ArrowType | None = None,  # noqa: A002
        mask: NDArray[np.bool_] | None = None,
    ) -> ArrowArray: ...


class _Options(Protocol):
    """An options object."""


class ArrowCsv(Protocol):
    """``pyarrow.csv``."""

    def ReadOptions(self, *, use_threads: bool, block_size: int) -> _Options: ...  # noqa: D102, N802
    def ParseOptions(self, *, newlines_in_values: bool) -> _Options: ...  # noqa: D102, N802
    def ConvertOptions(  # noqa: D102, N802
        self,
        *,
        column_types: Mapping[str, ArrowType],
        include_columns: Sequence[str],
        null_values: Sequence[str],
    ) -> _Options: ...
    def open_csv(  # noqa: D102
        self,
        source: object,
        *,
        read_options: _Options,
        parse_options: _Options,
        convert_options: _Options | None = None,
    ) -> Batches: ...
    def CSVWriter(self, sink: BinaryIO, schema: ArrowSchema) -> AbstractContextManager[Rows]: ...  # noqa: D102, N802


class _ParquetRowGroup(Protocol):
    """Not its ``column``, which ends the process where the metadata are damaged."""

    @property
    def total_byte_size(self) -> int: ...


class ArrowParquetMetadata(Protocol):
    """``pyarrow.parquet.FileMetaData``."""

    @property
    def num_rows(self) -> int: ...  # noqa: D102
    @property
    def num_row_groups(self) -> int: ...  # noqa: D102
    def row_group(self, index: int, /) -> _ParquetRowGroup: ...  # noqa: D102


class _ParquetFile(Protocol):
    @property
    def metadata(self) -> ArrowParquetMetadata: ...
    @property
    def schema_arrow(self) -> ArrowSchema: ...
    def iter_batches(
        self, *, batch_size: int, columns: Sequence[str], use_threads: bool
    ) -> Iterator[ArrowBatch]: ...
    def close(self) -> None: ...


class ArrowParquet(Protocol):
    """``pyarrow.parquet``."""

    def ParquetFile(  # noqa: D102, N802
        self,
        source: str,
        *,
        memory_map: bool,
        metadata: ArrowParquetMetadata | None = None,
        read_dictionary: Sequence[str] | None = None,
    ) -> _ParquetFile: ...
    def ParquetWriter(self, sink: BinaryIO, schema: ArrowSchema) -> AbstractContextManager[Rows]: ...  # noqa: D102, N802


def load_arrow() -> Arrow:
    """``pyarrow``."""
    return cast("Arrow", import_module("pyarrow"))


def load_csv() -> ArrowCsv:
    """``pyarrow.csv``."""
    return cast("ArrowCsv", import_module("pyarrow.csv"))


def load_parquet() -> ArrowParquet:
    """``pyarrow.parquet``."""
    return cast("ArrowParquet", import_module("pyarrow.parquet"))
