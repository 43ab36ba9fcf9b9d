"""Typed columns of table files, in batches: numbers with NaN where empty, texts as labels."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np

from hespas.files.documents import check_column_names
from hespas.files.limits import limits
from hespas.files.streams import (
    STANDARD_STREAM,
    PackedInput,
    damage_errors,
    first_bytes,
    input_location,
    open_input,
    open_regular,
)
from hespas.files.tables import parquet_batches, too_large
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import FormatError, clipped
from hespas.operations import Labels

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

__all__ = ["Columns", "column_batches", "text_batches"]

_BATCH_ROWS = 1 << 16
_BATCH_CELLS = 1 << 21
_ROW_BYTES = 256
"""Approximate memory of a row during evaluation or fitting [bytes]."""
_MOST_CHARACTERS = 1 << 20
_HINT = "use CSV, CSV.gz or Parquet with one header row"

_TEXTS = frozenset(
    (
        *("hardware", "kind", "op", "dtype", "variant", "split", "framework", "framework_version", "version"),
        *("kernel_source", "kv_cache_dtype", "distribution", "library", "library_version", "system", "shape"),
        *("q_dtype_w", "q_dtype_a", "q_type", "layer"),
    )
)
"""Columns of CSV files that are always texts, so that version 1.10 is not 1.1."""
_PLAIN_TEXTS = frozenset(("string", "large_string"))
"""Arrow types of text columns."""


class Columns:
    """Batch of rows of a measurement table. ``frame`` holds the rows; its index is the row number in the
    file, from 0. Methods raise ``FormatError`` for a column that is missing or has another type.
    """

    def __init__(self, path: Path, frame: pd.DataFrame) -> None:
        """Wrap a data frame read from ``path``."""
        self.path = path
        self._frame = frame

    def __len__(self) -> int:
        return len(self._frame)

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all columns."""
        return frozenset(str(name) for name in self._frame.columns)

    def row(self, index: int) -> int:
        """Return the row number in the file, from 1, of the row ``index`` of this batch."""
        return int(self._frame.index[index]) + 1

    def take(self, rows: IntArray) -> Columns:
        """Return a batch with only the given rows."""
        return Columns(self.path, self._frame.iloc[rows])

    def with_rows_of(self, others: Iterable[Columns]) -> Columns:
        """Return a batch with these rows followed by the rows of other batches."""
        import pandas as pd

        return Columns(self.path, pd.concat([self._frame, *(other._frame for other in others)]))

    def folded(self) -> Columns:
        """Return the columns with case-folded and stripped names. Raises ``FormatError`` for equal names."""
        folded = self._frame.rename(columns=_folded)
        check_column_names([str(name) for name in folded.columns], self.path)
        return Columns(self.path, folded)

    def numbers(self, name: str, default: float | None = None) -> FloatArray:
        """Return a column of numbers; ``default`` where the column is missing."""
        if name not in self.names:
            if default is None:
                raise self._absent(name)
            return np.full(len(self), default)
        column = self._frame[name]
        if column.dtype.kind == "b":
            raise self._not_numbers(name, "it contains booleans")
        try:
            return np.asarray(column.astype("float64").to_numpy(), np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._not_numbers(name, str(error)) from error

    def sizes(self, **names: str) -> dict[str, FloatArray]:
        """Return numeric columns, renamed to the names of sizes. Each keyword is the name of a size, and its
        value the name of the column.
        """
        return {size: self.numbers(name) for size, name in names.items()}

    def _not_numbers(self, name: str, reason: str) -> FormatError:
        """Return an error that names the first row of a column that is not a number."""

        def is_wrong(value: object) -> bool:
            if value is None or isinstance(value, float):
                return False
            try:
                number = float(str(value))
            except ValueError:
                return True
            return isinstance(value, bool) or (isinstance(value, int) and isinf(number))  # integer overflow

        return FormatError(
            f"column {clipped(name)!r} is not numeric: {clipped(reason)}",
            path=str(self.path),
            position=self._first(name, is_wrong),
            hint="write numbers as 1024 or 1.5e3; leave unknown ones empty",
        )

    def _first(self, name: str, is_wrong: Callable[[object], bool]) -> str:
        wrong = (index for index, value in enumerate(self._frame[name].tolist()) if is_wrong(value))
        first = next(wrong, None)
        return f"column {name!r}" if first is None else f"row {self.row(first)}"

    def texts(self, name: str, default: str | None = None) -> Labels:
        """Return a column of texts; ``default`` where the column is missing."""
        import pandas as pd

        if name not in self.names:
            if default is None:
                raise self._absent(name)
            return Labels.constant(default, len(self))
        column = self._frame[name]
        if isinstance(column.dtype, pd.CategoricalDtype):
            # By category code: long texts are not compared row by row.
            rows, used = pd.factorize(column.cat.codes.to_numpy())
            names: list[object] = [*column.cat.categories.tolist(), ""]
            listed: list[int] = used.tolist()
            return Labels(np.asarray(rows, np.int32), self._bounded(name, [names[code] for code in listed]))
        try:
            codes, values = pd.factorize(column.astype("object"))
        except TypeError as error:
            raise FormatError(
                f"column {name!r} is not text: {error}",
                path=str(self.path),
                position=self._first(name, lambda value: isinstance(value, list | dict | np.ndarray)),
                hint="use one text per row",
            ) from error
        texts = self._bounded(name, values)
        row = np.asarray(codes, np.int32)
        return Labels(np.where(row < 0, len(texts), row).astype(np.int32), (*texts, ""))

    def _bounded(self, name: str, values: Iterable[object]) -> tuple[str, ...]:
        """Return the distinct texts of a column. Raises ``FormatError`` for a text that is too long."""
        texts = tuple(map(str, values))
        if max(map(len, texts), default=0) <= _MOST_CHARACTERS:
            return texts
        raise FormatError(
            f"column {name!r} contains a text of more than {_MOST_CHARACTERS:,} characters",
            path=str(self.path),
            position=self._first(name, lambda value: len(str(value)) > _MOST_CHARACTERS),
            hint="shorten the text, or close an open quote",
        )

    def joined(self, *names: str) -> Labels:
        """Return several columns of texts as one, joined by spaces."""
        parts = [self.texts(name, "") for name in names]
        key = np.zeros(len(self), np.int64)
        for part in parts:
            key = key * len(part.names) + part.row
        _, first, index = np.unique(key, return_index=True, return_inverse=True)
        rows: list[int] = first.tolist()
        texts = tuple(" ".join(text for part in parts if (text := part[row])) for row in rows)
        return Labels(index.reshape(-1).astype(np.int32), texts)

    def _absent(self, name: str) -> FormatError:
        listed = ", ".join(sorted(self.names))
        return FormatError(
            f"no column {name!r}",
            path=str(self.path),
            position="header",
            hint=f"use one of its columns: {listed}",
        )


def _folded(name: object) -> str:
    return str(name).strip().casefold()


def column_batches(path: Path) -> Iterator[Columns]:
    """Yield the rows of a CSV(.gz) or Parquet file in batches. A file without rows yields one empty batch.

    Memory does not grow with the file. Raises ``FormatError`` for a file that is not a table.
    """
    yield from _batches(path, _parquet_frames if _is_parquet(path) else _csv_frames)


def text_batches(path: Path) -> Iterator[pd.DataFrame]:
    """Yield batches of rows without conversion: the fields of a CSV file stay texts."""
    for columns in _batches(
        path, _parquet_frames if _is_parquet(path) else partial(_csv_frames, as_texts=True)
    ):
        yield columns._frame  # pyright: ignore[reportPrivateUsage]


def _is_parquet(path: Path) -> bool:
    """Return True for a Parquet file, by the suffix or, on standard input, by the first bytes."""
    return first_bytes(path, 4) == b"PAR1" if str(path) == STANDARD_STREAM else path.suffix == ".parquet"


def _batches(path: Path, read: Callable[[Path], Iterator[pd.DataFrame]]) -> Iterator[Columns]:
    from pyarrow import ArrowException

    open_regular(path).close()
    size = input_location(path).stat().st_size
    if size > limits().table_bytes:
        raise too_large(path, f"{size:,} bytes, above the limit of a table of operations")
    rows = 0
    try:
        for frame in read(path):
            yield Columns(path, frame)
            rows += len(frame)
    except MemoryError:  # also a subclass of Arrow's errors
        raise
    except (ArrowException, ValueError, OSError, EOFError, OverflowError, RecursionError) as error:
        reason = (str(error).splitlines() or ["unreadable"])[0]
        position = f"after row {rows}" if rows else "the first rows"
        raise FormatError(
            f"not a table: {clipped(reason)}", path=str(path), position=position, hint=_HINT
        ) from error


def _rows_at_once(columns: int) -> int:
    return max(1, min(_BATCH_ROWS, _BATCH_CELLS // max(columns, 1)))


def _parquet_frames(path: Path) -> Iterator[pd.DataFrame]:
    import pandas as pd

    names: list[str] = []

    def choose(schema: pa.Schema) -> tuple[list[str], list[str]]:
        names.extend(map(str, schema.names))
        _check_columns(names, path)
        kinds = zip(names, map(str, schema.types), strict=True)
        return names, [name for name, kind in kinds if _folded(name) in _TEXTS and kind in _PLAIN_TEXTS]

    size, bounds, start = input_location(path).stat().st_size, limits(), 0
    for batch in parquet_batches(
        path,
        choose,
        rows_at_once=_rows_at_once,
        most_rows=(bounds.table_rows_bytes + 20 * size) // _ROW_BYTES,
        most_bytes=min(bounds.table_bytes, max(bounds.table_free_bytes, bounds.table_ratio * size)),
    ):
        frame: pd.DataFrame = cast("Any", batch).to_pandas(ignore_metadata=True)
        frame.index = pd.RangeIndex(start, start + len(frame))
        start += len(frame)
        yield frame
    if not start:
        yield pd.DataFrame({name: [] for name in names})


def _csv_frames(path: Path, *, as_texts: bool = False) -> Iterator[pd.DataFrame]:
    import pandas as pd

    # pandas would rename duplicates, and takes seconds for thousands of columns.
    with _opened(path) as stream, io.TextIOWrapper(stream, "utf-8-sig", newline="") as text:
        try:
            header = next((row for row in csv.reader(text) if row), list[str]())
        except csv.Error as error:
            raise FormatError(
                f"the header is not CSV: {error}", path=str(path), position="header", hint=_HINT
            ) from error
    _check_columns(header, path)
    dtype = str if as_texts else {name: str for name in header if _folded(name) in _TEXTS}
    rows = _rows_at_once(len(header))
    try:
        with (
            _opened(path) as stream,
            pd.read_csv(
                stream,
                low_memory=False,
                index_col=False,  # otherwise pandas uses an extra first field as the row name
                chunksize=rows,
                dtype=dtype,
                keep_default_na=not as_texts,
                na_filter=not as_texts,
            ) as reader,
        ):
            while True:
                with warnings.catch_warnings():
                    warnings.simplefilter("error", pd.errors.ParserWarning)
                    frame = next(reader, None)
                if frame is None:
                    return
                yield frame
    except pd.errors.ParserWarning as error:
        raise FormatError(
            f"rows have more fields than the {len(header)} of the header",
            path=str(path),
            position="row 1",
            hint="name every column, and quote fields with commas",
        ) from error


def _check_columns(names: list[str], path: Path) -> None:
    if len(names) > limits().table_columns:
        raise FormatError(
            f"{len(names):,} columns, at most {limits().table_columns:,} are allowed",
            path=str(path),
            position="header",
            hint=_HINT,
        )
    check_column_names(names, path)


def _opened(path: Path) -> BinaryIO:
    if path.suffix != ".gz":
        return open_input(path)
    return io.BufferedReader(_GzipStream(path), _BATCH_ROWS)


class _GzipStream(io.RawIOBase):
    """Readable stream of a gzipped table, for pandas."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = PackedInput(open_input(path), path, limits().table_bytes)

    def readable(self) -> bool:
        return True

    def readinto(self, into: object, /) -> int:
        view = memoryview(cast("bytearray", into))
        try:
            data = self._file.read(len(view))
        except damage_errors() as error:
            raise EOFError(f"broken gzip stream: {error}") from error
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()
