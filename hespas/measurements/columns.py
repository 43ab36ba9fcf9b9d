"""A table file as typed columns, some rows at a time: numbers with NaN for nothing, texts as labels."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
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
    reopenable_path,
)
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import FormatError, clipped
from hespas.operations import Labels

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = ["Columns", "column_batches", "parquet_batches", "text_batches"]

_BATCH_ROWS = 1 << 16
_BATCH_CELLS = 1 << 21
_ROW_BYTES = 256
"""What a row takes in memory when estimates are compared with it or fitted on it, about."""
_MOST_CHARACTERS = 1 << 20
_HINT = "CSV, CSV.gz or Parquet with one header row"

_TEXTS = frozenset(
    (
        *("hardware", "kind", "op", "dtype", "variant", "split", "framework", "framework_version", "version"),
        *("kernel_source", "kv_cache_dtype", "distribution", "library", "library_version", "system", "shape"),
        *("q_dtype_w", "q_dtype_a", "q_type", "layer"),
    )
)
"""Columns of CSV files that are texts whatever they hold, so that version 1.10 is not 1.1."""
_PLAIN_TEXTS = frozenset(("string", "large_string"))
"""Types of Parquet columns of texts."""


class Columns:
    """Some rows of one table; ``FormatError`` names a column that is absent or of another kind. The index of
    ``frame`` numbers the rows of the file from 0.
    """

    def __init__(self, path: Path, frame: pd.DataFrame) -> None:
        """Columns of a data frame read from ``path``."""
        self.path = path
        self._frame = frame

    def __len__(self) -> int:
        return len(self._frame)

    @property
    def names(self) -> frozenset[str]:
        """Names of all columns."""
        return frozenset(str(name) for name in self._frame.columns)

    def row(self, place: int) -> int:
        """The row of the file, from 1, that stands at ``place`` here."""
        return int(self._frame.index[place]) + 1

    def take(self, rows: IntArray) -> Columns:
        """Some rows."""
        return Columns(self.path, self._frame.iloc[rows])

    def with_rows_of(self, others: Iterable[Columns]) -> Columns:
        """These rows and those of others, as one table."""
        import pandas as pd

        return Columns(self.path, pd.concat([self._frame, *(each._frame for each in others)]))

    def folded(self) -> Columns:
        """The same columns, their names without case and outer blanks. Raises ``FormatError`` where two then
        have one name.
        """
        folded = self._frame.rename(columns=_folded)
        check_column_names([str(name) for name in folded.columns], self.path)
        return Columns(self.path, folded)

    def numbers(self, name: str, default: float | None = None) -> FloatArray:
        """A column of numbers; ``default`` where the table has no such column."""
        if name not in self.names:
            if default is None:
                raise self._absent(name)
            return np.full(len(self), default)
        column = self._frame[name]
        if column.dtype.kind == "b":
            raise self._no_numbers(name, "it says true and false")
        try:
            return np.asarray(column.astype("float64").to_numpy(), np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._no_numbers(name, str(error)) from error

    def sizes(self, **names: str) -> dict[str, FloatArray]:
        """Columns of numbers by what they are of an operation."""
        return {size: self.numbers(name) for size, name in names.items()}

    def _no_numbers(self, name: str, why: str) -> FormatError:
        """The error, with the first row that holds something else than a number."""
        return FormatError(
            f"column {clipped(name)!r} holds no numbers: {clipped(why)}",
            path=str(self.path),
            position=self._first(name, _is_no_number),
            hint="write numbers as 1024 or 1.5e3; leave unknown ones empty",
        )

    def _first(self, name: str, is_wrong: Callable[[object], bool]) -> str:
        found = (place for place, value in enumerate(self._frame[name].tolist()) if is_wrong(value))
        place = next(found, None)
        return f"column {name!r}" if place is None else f"row {self.row(place)}"

    def texts(self, name: str, default: str | None = None) -> Labels:
        """A column of texts; ``default`` where the table has no such column."""
        import pandas as pd

        if name not in self.names:
            if default is None:
                raise self._absent(name)
            return Labels.constant(default, len(self))
        column = self._frame[name]
        if isinstance(column.dtype, pd.CategoricalDtype):
            # By number: a long text is not compared row by row.
            places, used = pd.factorize(column.cat.codes.to_numpy())
            names: list[object] = [*column.cat.categories.tolist(), ""]
            listed: list[int] = used.tolist()
            return Labels(np.asarray(places, np.int32), self._bounded(name, [names[code] for code in listed]))
        try:
            codes, values = pd.factorize(column.astype("object"))
        except TypeError as error:
            raise FormatError(
                f"column {name!r} holds no texts: {error}",
                path=str(self.path),
                position=self._first(name, lambda value: isinstance(value, list | dict | np.ndarray)),
                hint="one text per row",
            ) from error
        texts = self._bounded(name, values)
        row = np.asarray(codes, np.int32)
        return Labels(np.where(row < 0, len(texts), row).astype(np.int32), (*texts, ""))

    def _bounded(self, name: str, values: Iterable[object]) -> tuple[str, ...]:
        """The distinct texts of a column: each is handed on through labels and messages."""
        texts = tuple(map(str, values))
        if max(map(len, texts), default=0) <= _MOST_CHARACTERS:
            return texts
        raise FormatError(
            f"column {name!r} holds a text of more than {_MOST_CHARACTERS:,} characters",
            path=str(self.path),
            position=self._first(name, lambda value: len(str(value)) > _MOST_CHARACTERS),
            hint="shorten it; does a quote stay open?",
        )

    def joined(self, *names: str) -> Labels:
        """Several columns of texts as one, a space between."""
        parts = [self.texts(name, "") for name in names]
        key = np.zeros(len(self), np.int64)
        for part in parts:
            key = key * len(part.names) + part.row
        _, first, place = np.unique(key, return_index=True, return_inverse=True)
        rows: list[int] = first.tolist()
        texts = tuple(" ".join(text for part in parts if (text := part[row])) for row in rows)
        return Labels(place.reshape(-1).astype(np.int32), texts)

    def _absent(self, name: str) -> FormatError:
        listed = ", ".join(sorted(self.names))
        return FormatError(
            f"no column {name!r}", path=str(self.path), position="header", hint=f"the table has {listed}"
        )


def _is_no_number(value: object) -> bool:
    if value is None or isinstance(value, float):
        return False
    try:
        number = float(str(value))
    except ValueError:
        return True
    return isinstance(value, bool) or (isinstance(value, int) and isinf(number))  # past every real number


def _folded(name: object) -> str:
    return str(name).strip().casefold()


def column_batches(path: Path) -> Iterator[Columns]:
    """The rows of a CSV(.gz) or Parquet file, some at a time; once without rows where there are none.

    What is held at once does not grow with the file. Raises ``FormatError`` for anything else than a table.
    """
    yield from _batches(path, _parquet_frames if _is_parquet(path) else _csv_frames)


def text_batches(path: Path) -> Iterator[pd.DataFrame]:
    """The same as they are written: nothing of a CSV file is read as a number and back."""
    for columns in _batches(path, _parquet_frames if _is_parquet(path) else _text_frames):
        yield columns._frame  # pyright: ignore[reportPrivateUsage]


def _is_parquet(path: Path) -> bool:
    """Return whether a table is a Parquet file: by its suffix, and where there is none by its first bytes."""
    return first_bytes(path, 4) == b"PAR1" if str(path) == STANDARD_STREAM else path.suffix == ".parquet"


def _batches(path: Path, read: Callable[[Path], Iterator[pd.DataFrame]]) -> Iterator[Columns]:
    from pyarrow import ArrowException

    open_regular(path).close()
    size = input_location(path).stat().st_size
    if size > limits().table_bytes:
        raise _too_large(path, f"{size:,} bytes, more than a table of operations may have")
    rows = 0
    try:
        for frame in read(path):
            yield Columns(path, frame)
            rows += len(frame)
    except MemoryError:  # Arrow's is one of its own errors, too
        raise
    except (ArrowException, ValueError, OSError, EOFError, OverflowError, RecursionError) as error:
        told = (str(error).splitlines() or ["unreadable"])[0]
        where = f"after row {rows}" if rows else "the first rows"
        raise FormatError(
            f"not a table: {clipped(told)}", path=str(path), position=where, hint=_HINT
        ) from error


def _rows_at_once(columns: int) -> int:
    return max(1, min(_BATCH_ROWS, _BATCH_CELLS // max(columns, 1)))


def parquet_batches(
    path: Path,
    choose: Callable[[pa.Schema], tuple[list[str], list[str]]],
    *,
    rows_at_once: Callable[[int], int],
    most_rows: int,
    most_bytes: int,
) -> Iterator[pa.RecordBatch]:
    """The rows of a Parquet file. ``choose`` names the columns that are read, and those of them whose texts
    are kept as numbers of distinct ones: a text that many rows repeat takes its space once, as in the file.

    Raises ``FormatError`` for what a few bytes blow up to, by rows or by bytes, and whatever Arrow raises.
    """
    from pyarrow.parquet import ParquetFile

    with open_input(path) as stream:
        source = reopenable_path(stream, path)
        with closing(ParquetFile(source, memory_map=False)) as file:
            stated: pq.FileMetaData = file.metadata
            columns, texts = choose(file.schema_arrow)
        if stated.num_rows > most_rows:
            size = input_location(path).stat().st_size
            raise _too_large(
                path, f"{stated.num_rows:,} rows in {size:,} bytes, at most {most_rows:,} are read"
            )
        # Not a column's own metadata, which end the process where they are damaged.
        groups = (stated.row_group(number) for number in range(stated.num_row_groups))
        _check_unpacked(path, sum(group.total_byte_size for group in groups), most_bytes)
        with closing(ParquetFile(source, memory_map=False, metadata=stated, read_dictionary=texts)) as file:
            count, read = rows_at_once(len(columns)), cast("Any", file).iter_batches
            for batch in read(batch_size=count, columns=columns, use_threads=False):
                _check_unpacked(path, batch.nbytes, most_bytes)  # it may be more than was stated
                yield batch


def _check_unpacked(path: Path, unpacked: int, most: int) -> None:
    if unpacked > most:
        raise _too_large(path, f"columns that unpack to {unpacked:,} bytes, at most {most:,} are read")


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


def _csv_frames(path: Path) -> Iterator[pd.DataFrame]:
    header = _header(path)
    texts = {name: str for name in header if _folded(name) in _TEXTS}
    yield from _csv_read(path, header, texts, finds_unknown=True)


def _text_frames(path: Path) -> Iterator[pd.DataFrame]:
    yield from _csv_read(path, _header(path), str, finds_unknown=False)


def _csv_read(
    path: Path, header: list[str], dtype: type[str] | dict[str, type[str]], *, finds_unknown: bool
) -> Iterator[pd.DataFrame]:
    """pandas takes the first of too many fields as names of rows, unless it is told that there are none."""
    import pandas as pd

    rows = _rows_at_once(len(header))
    try:
        with (
            _opened(path) as stream,
            pd.read_csv(
                stream,
                low_memory=False,
                index_col=False,
                chunksize=rows,
                dtype=dtype,
                keep_default_na=finds_unknown,
                na_filter=finds_unknown,
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
            hint="name every column, and quote what holds commas",
        ) from error


def _header(path: Path) -> list[str]:
    """The names of the columns: pandas renames the second of two that are called alike, and takes seconds for
    thousands.
    """
    with _opened(path) as stream, io.TextIOWrapper(stream, "utf-8-sig", newline="") as text:
        try:
            header = next((row for row in csv.reader(text) if row), list[str]())
        except csv.Error as error:
            raise FormatError(
                f"no names of columns: {error}", path=str(path), position="header", hint=_HINT
            ) from error
    _check_columns(header, path)
    return header


def _check_columns(names: list[str], path: Path) -> None:
    if len(names) > limits().table_columns:
        raise FormatError(
            f"{len(names):,} columns: not a table of operations",
            path=str(path),
            position="header",
            hint=_HINT,
        )
    check_column_names(names, path)


def _opened(path: Path) -> BinaryIO:
    if path.suffix != ".gz":
        return open_input(path)
    return io.BufferedReader(_Unpacked(path), _BATCH_ROWS)


class _Unpacked(io.RawIOBase):
    """A gzipped table as a stream that pandas reads."""

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


def _too_large(path: Path, what: str) -> FormatError:
    return FormatError(
        what,
        path=str(path),
        position="the whole file",
        hint="give a part of its rows; `max_input_bytes` where you trust it",
    )
