"""Reader of a table of measured operations as a profile; :mod:`hespas.measurements` defines the columns."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO, StringIO, TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from hespas.converters.format import ReadOptions
from hespas.files.documents import unescape_formula
from hespas.files.limits import limits
from hespas.files.streams import first_bytes, input_location, open_input, read_bytes, refuse_special_files
from hespas.files.tables import parquet_batches
from hespas.graph import Diagnostics, HostOps, OpClass, Profile, StringTableBuilder
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray
from hespas.graph.errors import FormatError
from hespas.measurements import COLUMNS, DURATIONS, OF_OPERATIONS, ColumnKind, read_measurements

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["read_ops_table"]

_EXPECTED = (
    "a duration (duration_ns, or duration_ or latency_ with _ns, _us, _ms, _s), op or kernel, and optionally "
    "hardware, op_class, rank, stream, start_ns, dtype, shapes, strides, values, operation"
)
"""Columns that a table may have, for messages."""

_PARQUET = b"PAR1"
_LARGEST_NS = float(1 << 61)
"""Largest time that is read, 73 years; sums of two such times fit 64 bits."""


@dataclass(frozen=True, slots=True)
class _ChosenColumns:
    """Names of the columns of a table that are read. ``duration`` is the name of the column with
    durations.
    """

    names: tuple[str, ...]
    duration: str


def read_ops_table(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read a table of device events, or a table of operations by kind and sizes, in which each operation
    becomes an event. The table may have several devices. Unknown columns are reported.

    Raises ``FormatError`` with the malformed line (CSV) or column (Parquet), and for a table without a column
    of durations or operations.
    """
    chosen: list[_ChosenColumns] = []

    def choose(names: Sequence[str]) -> tuple[str, ...]:
        chosen.append(_choose_columns(names, str(path), diagnostics))
        return chosen[0].names

    is_parquet = _is_parquet(path)
    collected = _TableColumns(str(path), str if is_parquet else unescape_formula)
    # Read the names of all columns; errors are reported below, when the table is read.
    if not is_parquet:
        column_names = set(
            _csv_names(first_bytes(path, _HEADER_BYTES).removeprefix(b"\xef\xbb\xbf"), str(path))
        )
    else:
        from pyarrow import ArrowException

        try:
            column_names = {
                str(name) for name in cast("Any", import_module("pyarrow.parquet")).read_schema(path).names
            }
        except (ArrowException, OSError, ValueError):
            column_names = set[str]()
    if column_names >= OF_OPERATIONS:
        import pyarrow as pa

        from hespas.measurements.events import event_columns

        measurements = read_measurements(path)  # operations by kind and sizes
        for problem in measurements.left_out:
            diagnostics.warning(
                "ops-table.left-out-row", str(path), f"rows left out: {problem}", count=problem.count
            )
        columns = event_columns(measurements)
        collected.add(pa.record_batch(list(map(pa.array, columns.values())), names=list(columns)))
        return _profile(path, _ChosenColumns((*columns, "values"), "duration_ns"), collected, diagnostics)
    batches = _parquet_batches if is_parquet else _csv_batches
    for batch in batches(path, options, choose):
        collected.add(batch)
    return _profile(path, chosen[0], collected, diagnostics)


def _is_parquet(path: Path) -> bool:
    try:
        with open_input(path) as stream:
            return stream.read(len(_PARQUET)) == _PARQUET
    except OSError as error:
        raise FormatError(error.strerror or str(error), path=str(path), hint="check the path") from error


def _choose_columns(names: Sequence[str], path: str, diagnostics: Diagnostics) -> _ChosenColumns:
    """Select the columns to read from a table's header. Raises ``FormatError`` if a required column is
    missing or repeated.
    """
    durations = [name for name in DURATIONS if name in names]
    shown = ", ".join(name[:40] for name in names[:20]) + (", ..." if len(names) > 20 else "")
    if len(names) > limits().table_columns:
        problem = f"{len(names):,} columns or more; at most {limits().table_columns:,} are read"
        raise _refused(problem, path, "remove the columns that are not needed")
    if len(set(names)) < len(names):
        counts = Counter(names)
        twice = next(name for name in names if counts[name] > 1)
        raise _refused(f"column {twice[:80]!r} appears twice", path, "rename one of the two columns")
    if len(durations) != 1:
        problem = (
            f"several columns of durations: {', '.join(durations)}"
            if durations
            else f"no column of durations; the columns are {shown}"
        )
        raise _refused(problem, path, f"name the columns as expected: {_EXPECTED}")
    if not {"op", "kernel"} & set(names):
        raise _refused(
            f"no column op or kernel; the columns are {shown}",
            path,
            f"name the columns as expected: {_EXPECTED}",
        )
    read = [name for name in names if name in COLUMNS or name in DURATIONS]
    others = [name for name in names if name not in read]
    listed = ", ".join(name[:40] for name in others[:20])
    diagnostics.warning(
        "ops-table.unknown-column",
        path,
        f"unknown columns are left out: {listed}; expected {_EXPECTED}",
        count=len(others),
    )
    return _ChosenColumns(tuple(read), durations[0])


def _refused(message: str, path: str, hint: str) -> FormatError:
    return FormatError(message, path=path, position="column names", hint=hint)


def _profile(path: Path, chosen: _ChosenColumns, table: _TableColumns, diagnostics: Diagnostics) -> Profile:
    rows = table.rows
    if not rows:
        raise FormatError(
            "the table has no rows",
            path=str(path),
            position="row 1",
            hint="check that the measurement was not interrupted",
        )
    column = table.number(chosen.duration)
    factor = DURATIONS[chosen.duration]
    if factor == 1:
        duration_ns = column
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            duration_ns = np.round(column * factor, 6)  # remove the rounding error of the product
    start_ns = table.number("start_ns")
    for name, column in ((chosen.duration, duration_ns), ("start_ns", start_ns)):
        wrong = np.flatnonzero(np.abs(column) > _LARGEST_NS)
        if len(wrong):
            raise FormatError(
                f"column {name} holds a time too large for 64 bits of nanoseconds",
                path=str(path),
                position=f"row {int(wrong[0]) + 1}",
                hint="check that the column has the unit in its name",
            )
    devices, device_index = table.devices()
    op_class, unknown = table.op_class()
    _report(duration_ns, unknown, diagnostics, str(path))
    operations = _operations_of(table, chosen.names)
    rank = table.whole("rank") if "rank" in chosen.names else np.zeros(rows, np.int64)
    if int(rank.max()) >= 1 << 31:
        raise FormatError(
            f"rank {int(rank.max())} is too large",
            path=str(path),
            position="column 'rank'",
            hint="number ranks from 0",
        )
    return Profile.of(
        path.name.removesuffix(".gz").rsplit(".", 1)[0],
        devices,
        table.strings.build(),
        start_ns=start_ns,
        duration_ns=duration_ns,
        op_id=table.text("op"),
        kernel_id=table.text("kernel"),
        dtype_id=table.text("dtype"),
        shapes_id=table.text("shapes"),
        op_class=op_class,
        device_index=device_index,
        rank=rank.astype(np.int32),
        stream=table.whole("stream"),
        host_event=operations.of_row,
        host=operations.host,
        metadata={"format": "ops-table"},
    )


def _report(duration_ns: FloatArray, unknown: int, diagnostics: Diagnostics, path: str) -> None:
    missing, negative = int(np.isnan(duration_ns).sum()), int((duration_ns < 0).sum())
    diagnostics.warning("ops-table.no-duration", path, "rows without a duration", count=missing)
    diagnostics.warning("ops-table.negative-duration", path, "rows with a negative duration", count=negative)
    diagnostics.warning(
        "ops-table.unknown-class",
        path,
        "rows with an unknown op_class, which is left out",
        count=unknown,
    )


_Choose = Callable[[Sequence[str]], tuple[str, ...]]
"""Function from the names of all columns to the names of the columns to read."""

_BLOCK_BYTES = 4 << 20
_HEADER_BYTES = 1 << 20
_ROW = re.compile(r"Row #(\d+)")
_BATCH_ROWS = 1 << 16
_ROW_BYTES = 80
"""Approximate memory of a row."""


def _csv_batches(path: Path, options: ReadOptions, choose: _Choose) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a CSV file, gunzipped. Raises ``FormatError`` with the malformed line."""
    import pyarrow as pa
    from pyarrow import csv as reading

    data = read_bytes(path, options.max_bytes).removeprefix(b"\xef\xbb\xbf")
    chosen = choose(_csv_names(data, str(path)))
    # Copy the bytes to memory of Arrow. Its threads read ahead and may release their input while Python
    # shuts down; releasing memory of Python at that time would abort the process.
    memory = pa.allocate_buffer(len(data))
    memoryview(memory).cast("B")[:] = data
    del data
    types: dict[ColumnKind, pa.DataType] = {
        "text": pa.dictionary(pa.int32(), pa.string()),
        "whole number": pa.int64(),
        "number": pa.float64(),
    }
    try:
        yield from reading.open_csv(
            cast("IO[bytes]", pa.BufferReader(memory)),
            read_options=reading.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
            parse_options=reading.ParseOptions(newlines_in_values=True),
            convert_options=reading.ConvertOptions(
                column_types={name: types[COLUMNS.get(name, "number")] for name in chosen},
                include_columns=[*chosen],
                null_values=[""],
            ),
        )
    except MemoryError:  # ArrowMemoryError is an ArrowException, too
        raise
    except (pa.ArrowException, UnicodeDecodeError) as error:
        # The error refers to the last line of the row that it names, else to the first field of over 128
        # KiB.
        row = _ROW.search(str(error))
        reader = csv.reader(TextIOWrapper(BytesIO(bytes(memoryview(memory))), "utf-8", "replace", newline=""))
        try:
            for _ in islice(reader, int(row[1]) if row else None):
                pass
        except csv.Error:
            pass  # a field beyond the limit of the csv module
        raise FormatError(
            _first_line(error),
            path=str(path),
            position=f"line {max(1, reader.line_num)}",
            hint="check that every field of this line has the type of its column and is UTF-8",
        ) from error


def _csv_names(data: bytes, path: str) -> list[str]:
    """Return the names in the first line."""
    head = data[:_HEADER_BYTES].decode("utf-8", "replace")
    try:
        names = next(csv.reader(StringIO(head, newline="")), list[str]())
    except csv.Error as error:
        hint = "start with one row of names, none longer than 128 KiB"
        raise FormatError(f"no names of columns: {error}", path=path, position="line 1", hint=hint) from error
    return [name.replace("\ufffd", "?") for name in names]


def _first_line(error: Exception) -> str:
    reason = (str(error).splitlines() or ["unreadable"])[0]
    return f"not a table of measured operations: {reason[:300]}"


def _parquet_batches(path: Path, options: ReadOptions, choose: _Choose) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a Parquet file. Raises ``FormatError`` with the malformed column."""
    import pyarrow as pa

    del options  # the size of the file is the limit
    refuse_special_files(path)

    def chosen(schema: pa.Schema) -> tuple[list[str], list[str]]:
        kinds = dict(zip(schema.names, schema.types, strict=True))
        names = choose(schema.names)
        for name in names:
            _check_type(name, kinds[name], str(path))
        plain = (pa.types.is_string, pa.types.is_large_string)
        return [*names], [name for name in names if any(check(kinds[name]) for check in plain)]

    size, bounds = input_location(path).stat().st_size, limits()
    try:
        yield from parquet_batches(
            path,
            chosen,
            rows_at_once=lambda _: _BATCH_ROWS,
            most_rows=(bounds.profile_rows_bytes + 20 * size) // _ROW_BYTES,
            most_bytes=max(bounds.table_free_bytes, bounds.table_ratio * size),
        )
    except MemoryError:  # ArrowMemoryError is an ArrowException, too
        raise
    except (pa.ArrowException, OSError, ValueError, UnicodeDecodeError) as error:
        raise FormatError(
            _first_line(error),
            path=str(path),
            position="Parquet metadata or pages",
            hint="copy the file again",
        ) from error


def _check_type(name: str, column_type: pa.DataType, path: str) -> None:
    import pyarrow as pa

    types, kind = pa.types, COLUMNS.get(name, "number")
    is_text = (
        types.is_string(column_type) or types.is_large_string(column_type) or types.is_dictionary(column_type)
    )
    is_number = types.is_integer(column_type) or types.is_floating(column_type)
    if not types.is_null(column_type) and not (is_text if kind == "text" else is_number):
        raise FormatError(
            f"column {name} holds {str(column_type)[:80]}, expected a {kind}",
            path=path,
            position=f"column {name!r}",
            hint="convert the column",
        )


@dataclass(frozen=True, slots=True, eq=False)
class _HostOperationRows:
    """Host operations of a table, in the order of their first rows. ``of_row`` is the operation of each row
    of the table (-1: none).
    """

    host: HostOps
    of_row: SmallIntArray


def _operations_of(table: _TableColumns, names: tuple[str, ...]) -> _HostOperationRows:
    """Return the host operations that a table describes.

    A table has host operations if it has a column ``operation``, ``strides`` or ``values``. The first row of
    an operation defines it. Times, threads and parents of the operations are unknown.
    """
    if not {"operation", "strides", "values"} & set(names):
        return _HostOperationRows(HostOps.empty(), np.full(table.rows, -1, np.int32))
    op_id, shapes_id = table.text("op"), table.text("shapes")
    number = table.whole("operation")
    if "operation" not in names:
        number = np.where((op_id > 0) & (shapes_id > 0), np.arange(table.rows), -1)
    has_operation = np.flatnonzero(number >= 0)
    _, first, inverse = np.unique(number[has_operation], return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order))
    of_row = np.full(table.rows, -1, np.int32)
    of_row[has_operation] = rank[inverse.reshape(-1)]
    rows = has_operation[first[order]]
    unknown = np.full(len(rows), np.nan)
    return _HostOperationRows(
        HostOps(
            name_id=op_id[rows],
            thread_id=np.zeros(len(rows), np.int32),
            parent=np.full(len(rows), -1, np.int32),
            start_ns=unknown,
            duration_ns=unknown,
            sequence=np.full(len(rows), -1, np.int64),
            shapes_id=shapes_id[rows],
            dtype_id=table.text("dtype")[rows],
            strides_id=table.text("strides")[rows],
            values_id=table.text("values")[rows],
        ),
        of_row,
    )


_CLASSES = {member.name.lower(): int(member) for member in OpClass} | {"": 0}
_MOST_CHARACTERS = 1 << 20
"""Maximum number of characters of a text; the longest kernel names have about ten thousand."""


class _TableColumns:
    """Columns of a table, collected from all batches. A column that the table does not have is unknown
    everywhere.
    """

    def __init__(self, path: str, read: Callable[[str], str] = str) -> None:
        """Start without rows; ``read`` converts the text of a cell to its value."""
        self.rows = 0
        self._read = read
        self.strings = StringTableBuilder()
        self._path = path
        self._parts: dict[str, list[NDArray[np.generic]]] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        """Add one batch. Raises ``FormatError`` for fractions in a column of whole numbers and for bytes that
        are not UTF-8.
        """
        import pyarrow as pa

        try:
            batch.validate(full=True)
        except MemoryError:  # ArrowMemoryError is an ArrowException, too
            raise
        except pa.ArrowException as error:
            raise FormatError(
                f"broken table: {str(error)[:300]}",
                path=self._path,
                position=f"row {self.rows} or later",
                hint="copy the file again",
            ) from error
        for index, name in enumerate(batch.schema.names):
            column: pa.Array[Any] = cast("Any", batch).column(index)
            if pa.types.is_null(column.type):
                continue
            try:
                kind = COLUMNS.get(name, "number")
                values: NDArray[np.generic]
                if kind == "text":
                    values = self._texts(name, column)
                elif kind == "number" or not pa.types.is_integer(column.type):
                    numbers = _numpy(column).astype(np.float64)
                    values = numbers if kind == "number" else self._wholes(name, numbers)
                else:
                    values = np.maximum(_numpy(column.cast(pa.int64()).fill_null(-1)).astype(np.int64), -1)
            except MemoryError:  # ArrowMemoryError is an ArrowException, too
                raise
            except (pa.ArrowException, UnicodeDecodeError) as error:
                raise self._refused(name, f"is malformed: {error}") from error
            self._parts.setdefault(name, []).append(values)
        self.rows += batch.num_rows

    def _texts(self, name: str, column: Any) -> SmallIntArray:
        encoded = column if hasattr(column, "indices") else column.dictionary_encode()
        texts = [text or "" for text in encoded.dictionary.to_pylist()]
        strings = [text for text in texts if isinstance(text, str)]
        if len(strings) < len(texts):
            other = next(text for text in texts if not isinstance(text, str))
            raise self._refused(name, f"holds {str(other)[:40]!r}, which is not a text")
        if max(map(len, strings), default=0) > _MOST_CHARACTERS:
            raise self._refused(name, f"holds a text of more than {_MOST_CHARACTERS:,} characters")
        rows = np.array([self.strings.add(self._read(text)) for text in strings] or [0], np.int32)
        codes = _numpy(encoded.indices.fill_null(-1)).astype(np.int64)
        return np.where(codes < 0, 0, rows[codes]).astype(np.int32)

    def _wholes(self, name: str, numbers: FloatArray) -> IntArray:
        """Convert whole numbers that were read as floats; -1 for missing or negative ones."""
        present = numbers[~np.isnan(numbers)]
        wrong = present[(present != np.floor(present)) | (np.abs(present) >= 2**53)]
        if len(wrong):
            raise self._refused(name, f"holds {wrong[0]:.17g}, expected whole numbers below 2**53")
        return np.maximum(np.nan_to_num(numbers, nan=-1.0), -1).astype(np.int64)

    def _refused(self, name: str, what: str) -> FormatError:
        return FormatError(
            f"column {name} {what}", path=self._path, position=f"column {name!r}", hint="convert the column"
        )

    def _column(self, name: str) -> NDArray[np.generic] | None:
        parts = self._parts.get(name)
        return np.concatenate(parts) if parts else None

    def text(self, name: str) -> SmallIntArray:
        """Return a column of texts as rows of the string table, 0 where unknown."""
        column = self._column(name)
        return np.zeros(self.rows, np.int32) if column is None else column.astype(np.int32)

    def whole(self, name: str) -> IntArray:
        """Return a column of whole numbers, -1 where unknown."""
        column = self._column(name)
        return np.full(self.rows, -1, np.int64) if column is None else column.astype(np.int64)

    def number(self, name: str) -> FloatArray:
        """Return a column of numbers, NaN where unknown."""
        column = self._column(name)
        return np.full(self.rows, np.nan) if column is None else column.astype(np.float64)

    def devices(self) -> tuple[tuple[str, ...], SmallIntArray]:
        """Return the devices in the order of appearance, and the device of each row."""
        rows = self.text("hardware")
        used, first, code = np.unique(rows, return_index=True, return_inverse=True)
        order = np.argsort(first)
        number = np.empty(len(order), np.int32)
        number[order] = np.arange(len(order))
        table = self.strings.build()
        return tuple(table[int(row)] for row in used[order].tolist()), number[code.reshape(-1)]

    def op_class(self) -> tuple[NDArray[np.int8], int]:
        """Return codes of operation classes, and the number of rows with an unknown class."""
        rows = self.text("op_class")
        used, inverse = np.unique(rows, return_inverse=True)
        table = self.strings.build()
        class_of = [_CLASSES.get(table[int(row)].lower(), -1) for row in used.tolist()]
        codes = np.array(class_of, np.int8)[inverse.reshape(-1)]
        return np.maximum(codes, 0), int((codes < 0).sum())


def _numpy(column: pa.Array[Any]) -> NDArray[np.generic]:
    return column.to_numpy(zero_copy_only=False)
