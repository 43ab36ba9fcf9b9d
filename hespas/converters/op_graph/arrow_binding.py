"""The only module that imports pyarrow, and the part of its interface that is used here, typed.

pyarrow is imported when a file is read or written, never before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Arrow",
    "ArrowArray",
    "ArrowBatch",
    "ArrowBuffer",
    "ArrowReader",
    "ArrowSchema",
    "ArrowType",
    "ArrowWriter",
    "load_arrow",
]


class ArrowType(Protocol):
    """``pyarrow.DataType``."""

    @property
    def id(self) -> int:
        """The code of the type."""
        ...


class ArrowBuffer(Protocol):
    """``pyarrow.Buffer``: memory that lives as long as anything made from it."""

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    def __buffer__(self, flags: int, /) -> memoryview: ...


class ArrowArray(Protocol):
    """``pyarrow.Array``; ``values`` exists on lists only."""

    @property
    def type(self) -> ArrowType:
        """What the items are."""
        ...

    @property
    def offset(self) -> int:
        """Where in the buffers the first item stands."""
        ...

    @property
    def null_count(self) -> int:
        """Missing items."""
        ...

    @property
    def values(self) -> ArrowArray:
        """The items of all lists."""
        ...

    def buffers(self) -> list[ArrowBuffer | None]:
        """Validity, then offsets or data, then those of the children."""
        ...

    def __len__(self) -> int: ...


class ArrowSchema(Protocol):
    """``pyarrow.Schema``."""

    @property
    def metadata(self) -> dict[bytes, bytes] | None:
        """What the file says of itself."""
        ...

    @property
    def names(self) -> list[str]:
        """Field names in order."""
        ...

    @property
    def types(self) -> list[ArrowType]:
        """Field types in order."""
        ...


class ArrowBatch(Protocol):
    """``pyarrow.RecordBatch``."""

    @property
    def num_rows(self) -> int:
        """Rows."""
        ...

    def column(self, i: int, /) -> ArrowArray:
        """One column."""
        ...

    def validate(self, *, full: bool) -> None:
        """Check offsets and buffer sizes; raises ``ArrowException``."""
        ...


class ArrowReader(Protocol):
    """``pyarrow.ipc.RecordBatchFileReader``."""

    @property
    def schema(self) -> ArrowSchema:
        """Fields and metadata."""
        ...

    @property
    def num_record_batches(self) -> int:
        """Record batches in the file."""
        ...

    def get_batch(self, i: int, /) -> ArrowBatch:
        """One record batch, referring to the file's memory."""
        ...


class ArrowWriter(Protocol):
    """``pyarrow.ipc.RecordBatchFileWriter``."""

    def write_batch(self, batch: ArrowBatch, /) -> None:
        """Append a record batch."""
        ...


class _ArrayFactory(Protocol):
    def from_buffers(
        self,
        type: ArrowType,  # noqa: A002 - pyarrow's name
        length: int,
        buffers: list[ArrowBuffer | None],
        *,
        children: list[ArrowArray] | None = None,
    ) -> ArrowArray: ...


class _BatchFactory(Protocol):
    def from_arrays(self, arrays: list[ArrowArray], *, schema: ArrowSchema) -> ArrowBatch: ...


class _Ipc(Protocol):
    def new_file(self, sink: object, schema: ArrowSchema) -> AbstractContextManager[ArrowWriter]: ...

    def open_file(self, source: ArrowBuffer) -> ArrowReader: ...


class Arrow(Protocol):
    """The module ``pyarrow``."""

    @property
    def ArrowException(self) -> type[Exception]:  # noqa: N802 - pyarrow's name
        """What pyarrow raises for a malformed file."""
        ...

    @property
    def Array(self) -> _ArrayFactory:  # noqa: N802 - pyarrow's name
        """Makes arrays of buffers."""
        ...

    @property
    def RecordBatch(self) -> _BatchFactory:  # noqa: N802 - pyarrow's name
        """Makes record batches of arrays."""
        ...

    @property
    def ipc(self) -> _Ipc:
        """Reads and writes files."""
        ...

    def int64(self) -> ArrowType:
        """64-bit integers."""
        ...

    def large_binary(self) -> ArrowType:
        """Byte strings with 64-bit offsets."""
        ...

    def large_list(self, items: ArrowType, /) -> ArrowType:
        """Lists with 64-bit offsets."""
        ...

    def from_numpy_dtype(self, dtype: object, /) -> ArrowType:
        """The type of NumPy items."""
        ...

    def field(self, name: str, type: ArrowType, *, nullable: bool) -> object:  # noqa: A002 - pyarrow's name
        """A field of a schema."""
        ...

    def schema(self, fields: Sequence[object], *, metadata: Mapping[str, str] | None) -> ArrowSchema:
        """A schema."""
        ...

    def py_buffer(self, data: bytes | memoryview[int] | NDArray[np.generic]) -> ArrowBuffer:
        """A buffer over memory of ours."""
        ...

    def OSFile(self, path: bytes, mode: str) -> AbstractContextManager[object]:  # noqa: N802 - pyarrow's name
        """A file to write."""
        ...


def load_arrow() -> Arrow:
    """The module pyarrow, imported now."""
    return cast("Arrow", import_module("pyarrow"))
