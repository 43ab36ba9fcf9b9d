"""Reads a table of measured operations as a profile; layout in :mod:`.layout`."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from io import BytesIO, StringIO, TextIOWrapper
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hespas.converters.format import ReadOptions
from hespas.converters.ops_table.arrow_binding import (
    Arrow,
    ArrowBatch,
    ArrowParquetMetadata,
    ArrowType,
    Memory,
    load_arrow,
    load_csv,
    load_parquet,
)
from hespas.converters.ops_table.layout import COLUMNS, DURATIONS, EXPECTED, Kind
from hespas.converters.ops_table.rows import Collected
from hespas.files.documents import original
from hespas.files.limits import limits
from hespas.files.streams import open_input, read_bytes, refuse_special_files, same_file
from hespas.graph import Diagnostics, HostOps, Profile
from hespas.graph.columns import FloatArray, SmallIntArray
from hespas.graph.errors import FormatError

__all__ = ["Chosen", "choose_columns", "parquet_batches", "read_ops_table"]

_PARQUET = b"PAR1"
_LARGEST_NS = float(1 << 61)
"""73 years; sums of two such times fit 64 bits."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The columns of a table that are read; ``duration`` is the one that holds durations."""

    names: tuple[str, ...]
    duration: str


def read_ops_table(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read a table, which may be of several devices. Columns that say nothing of ours are reported.

    Raises ``FormatError`` with the line (CSV) or column (Parquet) of what makes no sense, and where no column
    tells durations or operations.
    """
    chosen: list[Chosen] = []

    def choose(names: Sequence[str]) -> tuple[str, ...]:
        chosen.append(choose_columns(names, str(path), diagnostics))
        return chosen[0].names

    is_parquet = _is_parquet(path)
    collected = Collected(str(path), str if is_parquet else original)
    batches = parquet_batches if is_parquet else _csv_batches
    for batch in batches(path, options, choose):
        collected.add(batch)
    return _profile(path, chosen[0], collected, diagnostics)


def _is_parquet(path: Path) -> bool:
    try:
        with open_input(path) as stream:
            return stream.read(len(_PARQUET)) == _PARQUET
    except OSError as error:
        raise FormatError(error.strerror or str(error), path=str(path), hint="check the path") from error


def choose_columns(names: Sequence[str], path: str, diagnostics: Diagnostics) -> Chosen:
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
        problem = f"several columns tell durations: {', '.join(durations)}" if durations else (
            f"no column tells durations; the columns are {shown}"
        )  # fmt: skip
        raise _refused(problem, path, f"name the columns as expected: {EXPECTED}")
    if not {"op", "kernel"} & set(names):
        raise _refused(
            f"no column tells what was measured; the columns are {shown}", path,
            f"name the columns as expected: {EXPECTED}",
        )  # fmt: skip
    read = [name for name in names if name in COLUMNS or name in DURATIONS]
    others = [name for name in names if name not in read]
    listed = ", ".join(name[:40] for name in others[:20])
    diagnostics.warning(
        "ops-table.unknown-column", path,
        f"columns that are not understood are left out: {listed}; expected are {EXPECTED}", count=len(others),
    )  # fmt: skip
    return Chosen(tuple(read), durations[0])


def _refused(message: str, path: str, hint: str) -> FormatError:
    return FormatError(message, path=path, position="column names", hint=hint)


def _profile(path: Path, chosen: Chosen, found: Collected, diagnostics: Diagnostics) -> Profile:
    rows = found.rows
    if not rows:
        raise FormatError(
            "the table has no rows", path=str(path), position="row 1", hint="was the measurement interrupted?"
        )
    duration_ns = _nanoseconds(found.number(chosen.duration), DURATIONS[chosen.duration])
    start_ns = found.number("start_ns")
    for name, column in ((chosen.duration, duration_ns), ("start_ns", start_ns)):
        _check_times(name, column, str(path))
    devices, device_index = found.devices()
    op_class, unknown = found.op_class()
    _report(duration_ns, unknown, diagnostics, str(path))
    operations = _operations_of(found, chosen.names)
    rank = found.whole("rank") if "rank" in chosen.names else np.zeros(rows, np.int64)
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
        rank=_small(rank, str(path)),
        stream=found.whole("stream"),
        host_event=operations.of_row,
        host=operations.host,
        metadata={"format": "ops-table"},
    )


def _nanoseconds(column: FloatArray, factor: float) -> FloatArray:
    """Decimal units to ns without the last bits that the product of two floats makes up."""
    if factor == 1:
        return column
    with np.errstate(over="ignore", invalid="ignore"):  # what is too large is refused by name
        return np.round(column * factor, 6)


def _check_times(name: str, times_ns: FloatArray, path: str) -> None:
    wrong = np.flatnonzero(np.abs(times_ns) > _LARGEST_NS)
    if len(wrong):
        raise FormatError(
            f"column {name} holds a time too large for 64 bits of nanoseconds", path=path,
            position=f"row {int(wrong[0]) + 1}", hint="is the unit of the column as its name says?",
        )  # fmt: skip


def _small(rank: NDArray[np.int64], path: str) -> NDArray[np.int32]:
    if int(rank.max()) >= 1 << 31:
        raise FormatError(
            f"rank {int(rank.max())} is too large",
            path=path,
            position="column 'rank'",
            hint="ranks count from 0",
        )
    return rank.astype(np.int32)


def _report(duration_ns: FloatArray, unknown: int, diagnostics: Diagnostics, path: str) -> None:
    missing, negative = int(np.isnan(duration_ns).sum()), int((duration_ns < 0).sum())
    diagnostics.warning("ops-table.no-duration", path, "rows without a duration", count=missing)
    diagnostics.warning("ops-table.negative-duration", path, "rows of less than no time", count=negative)
    diagnostics.warning(
        "ops-table.unknown-class", path, "rows of an op_class that is none of ours; it is left out",
        count=unknown,
    )  # fmt: skip


# Tables as batches of rows, from CSV and from Parquet; what libraries say of broken ones as our errors.

_Choose = Callable[[Sequence[str]], tuple[str, ...]]
"""From the names of all columns to those that are read."""

_BLOCK_BYTES = 4 << 20
_HEADER_BYTES = 1 << 20
_ROW = re.compile(r"Row #(\d+)")
_BATCH_ROWS = 1 << 16
_ROW_BYTES = 80
"""What a row takes in memory, about."""


def _csv_batches(path: Path, options: ReadOptions, choose: _Choose) -> Iterator[ArrowBatch]:
    """The rows of a CSV file, gunzipped. Raises ``FormatError`` with the line of what makes no sense."""
    data = read_bytes(path, options.max_bytes).removeprefix(b"\xef\xbb\xbf")
    names = _csv_names(data, str(path))
    chosen = choose(names)
    arrow, reading = load_arrow(), load_csv()
    memory = _copied(arrow, data)
    del data
    types: dict[Kind, ArrowType] = {
        Kind.TEXT: arrow.dictionary(arrow.int32(), arrow.string()),
        Kind.WHOLE: arrow.int64(),
        Kind.NUMBER: arrow.float64(),
    }
    try:
        yield from reading.open_csv(
            arrow.BufferReader(memory),
            read_options=reading.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
            parse_options=reading.ParseOptions(newlines_in_values=True),
            convert_options=reading.ConvertOptions(
                column_types={name: types[COLUMNS.get(name, Kind.NUMBER)] for name in chosen},
                include_columns=chosen,
                null_values=[""],
            ),
        )
    except MemoryError:  # Arrow's is one of its own errors, too
        raise
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise FormatError(
            _first_line(error), path=str(path),
            position=f"line {_line(bytes(memoryview(memory)), str(error))}",
            hint="is every field of this line of the kind its column says, and in UTF-8?",
        ) from error  # fmt: skip


def _copied(arrow: Arrow, data: bytes) -> Memory:
    """The bytes in memory of Arrow's own. Its threads read ahead, and may let go of what they read when
    Python is about to end: of what is Python's they cannot then, and the process would end with that.
    """
    memory = arrow.allocate_buffer(len(data))
    memoryview(memory).cast("B")[:] = data
    return memory


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


def parquet_batches(path: Path, options: ReadOptions, choose: _Choose) -> Iterator[ArrowBatch]:
    """The rows of a Parquet file. Raises ``FormatError`` with the column of what makes no sense."""
    del options  # the size is bounded by that of the file
    refuse_special_files(path)
    arrow = load_arrow()
    try:
        yield from _parquet_batches(arrow, path, choose)
    except MemoryError:  # Arrow's is one of its own errors, too
        raise
    except (arrow.ArrowException, OSError, ValueError, UnicodeDecodeError) as error:
        raise FormatError(
            _first_line(error), path=str(path), position="Parquet metadata or pages",
            hint="copy the file again",
        ) from error  # fmt: skip


def _parquet_batches(arrow: Arrow, path: Path, choose: _Choose) -> Iterator[ArrowBatch]:
    """Rows with texts as dictionaries: equal ones take their space once, as in the file."""
    with open_input(path) as stream:
        yield from _batches_of(same_file(stream, path), arrow, path, choose)


def _batches_of(source: str, arrow: Arrow, path: Path, choose: _Choose) -> Iterator[ArrowBatch]:
    reading = load_parquet()
    with closing(reading.ParquetFile(source, memory_map=False)) as file:
        metadata, schema = file.metadata, file.schema_arrow
    _check_rows(path, metadata.num_rows)
    chosen = choose(schema.names)
    kinds = dict(zip(schema.names, schema.types, strict=True))
    for name in chosen:
        _check_type(arrow, name, kinds[name], str(path))
    most = max(limits().table_free_bytes, limits().table_ratio * path.stat().st_size)
    _check_unpacked(path, metadata, most)
    is_plain = (arrow.types.is_string, arrow.types.is_large_string)
    texts = [name for name in chosen if any(check(kinds[name]) for check in is_plain)]
    opened = reading.ParquetFile(source, memory_map=False, metadata=metadata, read_dictionary=texts)
    with closing(opened) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=chosen, use_threads=False):
            if batch.nbytes > most:  # more than its metadata said
                raise _too_large(path, batch.nbytes, most)
            yield batch


def _check_unpacked(path: Path, metadata: ArrowParquetMetadata, most: int) -> None:
    """Refuse a text that a few bytes blow up to."""
    total = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    if total > most:
        raise _too_large(path, total, most)


def _too_large(path: Path, size_bytes: int, most: int) -> FormatError:
    return FormatError(
        f"its columns unpack to {size_bytes:,} bytes", path=str(path), position="Parquet metadata or pages",
        hint=f"at most {most:,} are read from a file of this size; --max-input-bytes where you trust it",
    )  # fmt: skip


def _check_rows(path: Path, rows: int) -> None:
    """Refuse what a few bytes blow up to: equal rows take no space in a Parquet file."""
    most = (limits().profile_rows_bytes + 20 * path.stat().st_size) // _ROW_BYTES
    if rows > most:
        raise FormatError(
            f"{rows:,} rows in so small a file", path=str(path), position="Parquet metadata",
            hint=f"at most {most:,} are read; --max-input-bytes where you trust it",
        )  # fmt: skip


def _check_type(arrow: Arrow, name: str, found: ArrowType, path: str) -> None:
    types, kind = arrow.types, COLUMNS.get(name, Kind.NUMBER)
    is_text = types.is_string(found) or types.is_large_string(found) or types.is_dictionary(found)
    is_number = types.is_integer(found) or types.is_floating(found)
    if not types.is_null(found) and not (is_text if kind is Kind.TEXT else is_number):
        raise FormatError(
            f"column {name} holds {str(found)[:80]}, expected is a {kind.value}",
            path=path, position=f"column {name!r}", hint="convert the column",
        )  # fmt: skip


# Operations of the host as a table tells them: which rows one of them caused, and its inputs.


@dataclass(frozen=True, slots=True, eq=False)
class _Operations:
    """Operations in order of their first rows, and the one of each row (-1 none)."""

    host: HostOps
    of_row: SmallIntArray


def _operations_of(found: Collected, names: tuple[str, ...]) -> _Operations:
    """The operations of a table that has a column ``operation``, or inputs that belong to one; else none.

    An operation is what the first of its rows says; nothing is known of its time and of what is around it.
    """
    if not {"operation", "strides", "values"} & set(names):
        return _Operations(HostOps.empty(), np.full(found.rows, -1, np.int32))
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
    return _Operations(
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
