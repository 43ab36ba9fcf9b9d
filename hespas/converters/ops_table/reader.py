"""Reads a table of measured operations as a profile; columns in :mod:`hespas.measurements`."""

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
from hespas.graph import Diagnostics, HostOps, OpClass, Profile, StringTableBuilder
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray
from hespas.graph.errors import FormatError
from hespas.measurements import COLUMNS, DURATIONS, OF_OPERATIONS, ColumnKind, read_measurements
from hespas.measurements.columns import parquet_batches

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["read_ops_table"]

_EXPECTED = (
    "a duration (duration_ns, or duration_ or latency_ with _ns, _us, _ms, _s), op or kernel, and optionally "
    "hardware, op_class, rank, stream, start_ns, dtype, shapes, strides, values, operation"
)
"""The columns a table may have, for messages."""

_PARQUET = b"PAR1"
_LARGEST_NS = float(1 << 61)
"""73 years; sums of two such times fit 64 bits."""


@dataclass(frozen=True, slots=True)
class _ChosenColumns:
    """The columns of a table that are read; ``duration`` is the one that holds durations."""

    names: tuple[str, ...]
    duration: str


def read_ops_table(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read a table, which may be of several devices: of events, or of operations by kind and sizes, which are
    then an event each. Columns that say nothing of ours are reported.

    Raises ``FormatError`` with the line (CSV) or column (Parquet) of what makes no sense, and where no column
    tells durations or operations.
    """
    chosen: list[_ChosenColumns] = []

    def choose(names: Sequence[str]) -> tuple[str, ...]:
        chosen.append(_choose_columns(names, str(path), diagnostics))
        return chosen[0].names

    is_parquet = _is_parquet(path)
    collected = _TableColumns(str(path), str if is_parquet else original)
    # The names of all columns; none where they cannot be told, which whoever reads the table says.
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
            column_names = set()
    if column_names >= OF_OPERATIONS:
        # A table of operations by kind and sizes; rows that are none are reported.
        import pyarrow as pa

        from hespas.measurements.events import event_columns

        found = read_measurements(path)
        for each in found.left_out:
            diagnostics.warning(
                "ops-table.left-out-row", str(path), f"rows left out: {each}", count=each.count
            )
        columns = event_columns(found)
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
    """Which columns to read. Raises ``FormatError`` where a table does not tell what it must, or twice."""
    durations = [name for name in DURATIONS if name in names]
    shown = ", ".join(name[:40] for name in names[:20]) + (", ..." if len(names) > 20 else "")
    if len(names) > limits().table_columns:
        problem = f"{len(names):,} columns or more, at most {limits().table_columns:,} are read"
        raise _refused(problem, path, "leave out what is not needed")
    if len(set(names)) < len(names):
        counts = Counter(names)
        twice = next(name for name in names if counts[name] > 1)
        raise _refused(f"column {twice[:80]!r} stands twice", path, "rename one of them")
    if len(durations) != 1:
        problem = (
            f"several columns tell durations: {', '.join(durations)}"
            if durations
            else (f"no column tells durations; the columns are {shown}")
        )
        raise _refused(problem, path, f"name the columns as expected: {_EXPECTED}")
    if not {"op", "kernel"} & set(names):
        raise _refused(
            f"no column tells what was measured; the columns are {shown}",
            path,
            f"name the columns as expected: {_EXPECTED}",
        )
    read = [name for name in names if name in COLUMNS or name in DURATIONS]
    others = [name for name in names if name not in read]
    listed = ", ".join(name[:40] for name in others[:20])
    diagnostics.warning(
        "ops-table.unknown-column",
        path,
        f"columns that are not understood are left out: {listed}; expected are {_EXPECTED}",
        count=len(others),
    )
    return _ChosenColumns(tuple(read), durations[0])


def _refused(message: str, path: str, hint: str) -> FormatError:
    return FormatError(message, path=path, position="column names", hint=hint)


def _profile(path: Path, chosen: _ChosenColumns, found: _TableColumns, diagnostics: Diagnostics) -> Profile:
    rows = found.rows
    if not rows:
        raise FormatError(
            "the table has no rows", path=str(path), position="row 1", hint="was the measurement interrupted?"
        )
    # Decimal units to ns without the last bits that the product of two floats makes up.
    column = found.number(chosen.duration)
    factor = DURATIONS[chosen.duration]
    if factor == 1:
        duration_ns = column
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            duration_ns = np.round(column * factor, 6)
    start_ns = found.number("start_ns")
    for name, column in ((chosen.duration, duration_ns), ("start_ns", start_ns)):
        wrong = np.flatnonzero(np.abs(column) > _LARGEST_NS)
        if len(wrong):
            raise FormatError(
                f"column {name} holds a time too large for 64 bits of nanoseconds",
                path=str(path),
                position=f"row {int(wrong[0]) + 1}",
                hint="is the unit of the column as its name says?",
            )
    devices, device_index = found.devices()
    op_class, unknown = found.op_class()
    _report(duration_ns, unknown, diagnostics, str(path))
    operations = _operations_of(found, chosen.names)
    rank = found.whole("rank") if "rank" in chosen.names else np.zeros(rows, np.int64)
    if int(rank.max()) >= 1 << 31:
        raise FormatError(
            f"rank {int(rank.max())} is too large",
            path=str(path),
            position="column 'rank'",
            hint="ranks count from 0",
        )
    small = rank.astype(np.int32)
    return Profile.of(
        path.name.removesuffix(".gz").rsplit(".", 1)[0],
        devices,
        found.strings.build(),
        start_ns=start_ns,
        duration_ns=duration_ns,
        op_row=found.text("op"),
        kernel_row=found.text("kernel"),
        dtype_row=found.text("dtype"),
        shapes_row=found.text("shapes"),
        op_class=op_class,
        device_index=device_index,
        rank=small,
        stream=found.whole("stream"),
        host_event=operations.of_row,
        host=operations.host,
        metadata={"format": "ops-table"},
    )


def _report(duration_ns: FloatArray, unknown: int, diagnostics: Diagnostics, path: str) -> None:
    missing, negative = int(np.isnan(duration_ns).sum()), int((duration_ns < 0).sum())
    diagnostics.warning("ops-table.no-duration", path, "rows without a duration", count=missing)
    diagnostics.warning("ops-table.negative-duration", path, "rows of less than no time", count=negative)
    diagnostics.warning(
        "ops-table.unknown-class",
        path,
        "rows of an op_class that is none of ours; it is left out",
        count=unknown,
    )


# Tables as batches of rows, from CSV and from Parquet; what libraries say of broken ones as our errors.

_Choose = Callable[[Sequence[str]], tuple[str, ...]]
"""From the names of all columns to those that are read."""

_BLOCK_BYTES = 4 << 20
_HEADER_BYTES = 1 << 20
_ROW = re.compile(r"Row #(\d+)")
_BATCH_ROWS = 1 << 16
_ROW_BYTES = 80
"""What a row takes in memory, about."""


def _csv_batches(path: Path, options: ReadOptions, choose: _Choose) -> Iterator[pa.RecordBatch]:
    """The rows of a CSV file, gunzipped. Raises ``FormatError`` with the line of what makes no sense."""
    import pyarrow as pa
    from pyarrow import csv as reading

    data = read_bytes(path, options.max_bytes).removeprefix(b"\xef\xbb\xbf")
    chosen = choose(_csv_names(data, str(path)))
    # The bytes in memory of Arrow's own. Its threads read ahead, and may let go of what they read when
    # Python is about to end: of what is Python's they cannot then, and the process would end with that.
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
    except MemoryError:  # Arrow's is one of its own errors, too
        raise
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise FormatError(
            _first_line(error),
            path=str(path),
            position=f"line {_line(bytes(memoryview(memory)), str(error))}",
            hint="is every field of this line of the kind its column says, and in UTF-8?",
        ) from error


def _csv_names(data: bytes, path: str) -> list[str]:
    """The names in the first line."""
    head = data[:_HEADER_BYTES].decode("utf-8", "replace")
    try:
        names = next(csv.reader(StringIO(head, newline="")), list[str]())
    except csv.Error as error:
        hint = "start with one row of names, none longer than 128 KiB"
        raise FormatError(f"no names of columns: {error}", path=path, position="line 1", hint=hint) from error
    return [name.replace("\ufffd", "?") for name in names]


def _line(data: bytes, message: str) -> int:
    """The line where the row that a message names ends, or that of the first field of more than 128 KiB."""
    told = _ROW.search(message)
    reader = csv.reader(TextIOWrapper(BytesIO(data), "utf-8", "replace", newline=""))
    try:
        for _ in islice(reader, int(told[1]) if told else None):
            pass
    except csv.Error:
        pass  # a field larger than any
    return max(1, reader.line_num)


def _first_line(error: Exception) -> str:
    told = (str(error).splitlines() or ["unreadable"])[0]
    return f"no table of measured operations: {told[:300]}"


def _parquet_batches(path: Path, options: ReadOptions, choose: _Choose) -> Iterator[pa.RecordBatch]:
    """The rows of a Parquet file. Raises ``FormatError`` with the column of what makes no sense."""
    import pyarrow as pa

    del options  # the size is bounded by that of the file
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
    except MemoryError:  # Arrow's is one of its own errors, too
        raise
    except (pa.ArrowException, OSError, ValueError, UnicodeDecodeError) as error:
        raise FormatError(
            _first_line(error),
            path=str(path),
            position="Parquet metadata or pages",
            hint="copy the file again",
        ) from error


def _check_type(name: str, found: pa.DataType, path: str) -> None:
    import pyarrow as pa

    types, kind = pa.types, COLUMNS.get(name, "number")
    is_text = types.is_string(found) or types.is_large_string(found) or types.is_dictionary(found)
    is_number = types.is_integer(found) or types.is_floating(found)
    if not types.is_null(found) and not (is_text if kind == "text" else is_number):
        raise FormatError(
            f"column {name} holds {str(found)[:80]}, expected is a {kind}",
            path=path,
            position=f"column {name!r}",
            hint="convert the column",
        )


# Operations of the host as a table tells them: which rows one of them caused, and its inputs.


@dataclass(frozen=True, slots=True, eq=False)
class _OperationRows:
    """Operations in order of their first rows, and the one of each row (-1 none)."""

    host: HostOps
    of_row: SmallIntArray


def _operations_of(found: _TableColumns, names: tuple[str, ...]) -> _OperationRows:
    """The operations of a table that has a column ``operation``, or inputs that belong to one; else none.

    An operation is what the first of its rows says; nothing is known of its time and of what is around it.
    """
    if not {"operation", "strides", "values"} & set(names):
        return _OperationRows(HostOps.empty(), np.full(found.rows, -1, np.int32))
    op_row, shapes_row = found.text("op"), found.text("shapes")
    number = found.whole("operation")
    if "operation" not in names:
        number = np.where((op_row > 0) & (shapes_row > 0), np.arange(found.rows), -1)
    known = np.flatnonzero(number >= 0)
    _, first, place = np.unique(number[known], return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order))
    of_row = np.full(found.rows, -1, np.int32)
    of_row[known] = rank[place.reshape(-1)]
    rows = known[first[order]]
    unknown = np.full(len(rows), np.nan)
    return _OperationRows(
        HostOps(
            name_row=op_row[rows],
            thread_row=np.zeros(len(rows), np.int32),
            parent=np.full(len(rows), -1, np.int32),
            start_ns=unknown,
            duration_ns=unknown,
            sequence=np.full(len(rows), -1, np.int64),
            shapes_row=shapes_row[rows],
            dtype_row=found.text("dtype")[rows],
            strides_row=found.text("strides")[rows],
            values_row=found.text("values")[rows],
        ),
        of_row,
    )


# The rows of a table as columns, while batches are read.

_CLASSES = {member.name.lower(): int(member) for member in OpClass} | {"": 0}
_MOST_CHARACTERS = 1 << 20
"""Of one text; the longest names of kernels have some ten thousand."""


class _TableColumns:
    """Columns of all batches; a column that the table does not have is unknown everywhere."""

    def __init__(self, path: str, read: Callable[[str], str] = str) -> None:
        """``read`` gives the text of a cell."""
        self.rows = 0
        self._read = read
        self.strings = StringTableBuilder()
        self._path = path
        self._parts: dict[str, list[NDArray[np.generic]]] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        """Take one batch. Raises ``FormatError`` for numbers that are not whole where they should be, and
        for bytes that are no text.
        """
        import pyarrow as pa

        try:
            batch.validate(full=True)
        except MemoryError:  # Arrow's is one of its own errors, too
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
            except MemoryError:  # Arrow's is one of its own errors, too
                raise
            except (pa.ArrowException, UnicodeDecodeError) as error:
                raise self._refused(name, f"makes no sense: {error}") from error
            self._parts.setdefault(name, []).append(values)
        self.rows += batch.num_rows

    def _texts(self, name: str, column: Any) -> SmallIntArray:
        encoded = column if hasattr(column, "indices") else column.dictionary_encode()
        texts = [text or "" for text in encoded.dictionary.to_pylist()]
        strings = [text for text in texts if isinstance(text, str)]
        if len(strings) < len(texts):
            raise self._refused(name, "holds other things than texts")
        if max(map(len, strings), default=0) > _MOST_CHARACTERS:
            raise self._refused(name, f"holds a text of more than {_MOST_CHARACTERS:,} characters")
        rows = np.array([self.strings.add(self._read(text)) for text in strings] or [0], np.int32)
        places = _numpy(encoded.indices.fill_null(-1)).astype(np.int64)
        return np.where(places < 0, 0, rows[places]).astype(np.int32)

    def _wholes(self, name: str, numbers: FloatArray) -> IntArray:
        """Whole numbers written as floats, -1 for what is missing or negative."""
        known = ~np.isnan(numbers)
        if (numbers[known] != np.floor(numbers[known])).any() or (np.abs(numbers[known]) >= 2**53).any():
            raise self._refused(name, "holds numbers that are not whole")
        return np.maximum(np.nan_to_num(numbers, nan=-1.0), -1).astype(np.int64)

    def _refused(self, name: str, what: str) -> FormatError:
        return FormatError(
            f"column {name} {what}", path=self._path, position=f"column {name!r}", hint="convert the column"
        )

    def _column(self, name: str) -> NDArray[np.generic] | None:
        parts = self._parts.get(name)
        return np.concatenate(parts) if parts else None

    def text(self, name: str) -> SmallIntArray:
        """String rows, 0 where unknown."""
        column = self._column(name)
        return np.zeros(self.rows, np.int32) if column is None else column.astype(np.int32)

    def whole(self, name: str) -> IntArray:
        """Whole numbers, -1 where unknown."""
        column = self._column(name)
        return np.full(self.rows, -1, np.int64) if column is None else column.astype(np.int64)

    def number(self, name: str) -> FloatArray:
        """Numbers, NaN where unknown."""
        column = self._column(name)
        return np.full(self.rows, np.nan) if column is None else column.astype(np.float64)

    def devices(self) -> tuple[tuple[str, ...], SmallIntArray]:
        """The devices in order of appearance, and the one of each row."""
        rows = self.text("hardware")
        used, first, place = np.unique(rows, return_index=True, return_inverse=True)
        order = np.argsort(first)
        number = np.empty(len(order), np.int32)
        number[order] = np.arange(len(order))
        table = self.strings.build()
        return tuple(table[int(row)] for row in used[order].tolist()), number[place.reshape(-1)]

    def op_class(self) -> tuple[NDArray[np.int8], int]:
        """Codes of operation classes, and for how many rows the class is none of ours."""
        rows = self.text("op_class")
        used, place = np.unique(rows, return_inverse=True)
        table = self.strings.build()
        codes = [_CLASSES.get(table[int(row)].lower(), -1) for row in used.tolist()]
        found = np.array(codes, np.int8)[place.reshape(-1)]
        return np.maximum(found, 0), int((found < 0).sum())


def _numpy(column: pa.Array[Any]) -> NDArray[np.generic]:
    return column.to_numpy(zero_copy_only=False)
