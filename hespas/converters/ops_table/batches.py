"""Tables as batches of rows, from CSV and from Parquet; what libraries say of broken ones as our errors."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from io import BytesIO, StringIO, TextIOWrapper
from itertools import islice
from pathlib import Path

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
from hespas.converters.ops_table.layout import COLUMNS, Kind
from hespas.files.limits import limits
from hespas.files.packed import open_input, same_file
from hespas.files.source import read_bytes, refuse_special_files
from hespas.graph.errors import FormatError

__all__ = ["Choose", "csv_batches", "parquet_batches"]

Choose = Callable[[Sequence[str]], tuple[str, ...]]
"""From the names of all columns to those that are read."""

_BLOCK_BYTES = 4 << 20
_HEADER_BYTES = 1 << 20
_ROW = re.compile(r"Row #(\d+)")
_BATCH_ROWS = 1 << 16
_ROW_BYTES = 80
"""What a row takes in memory, about."""


def csv_batches(path: Path, options: ReadOptions, choose: Choose) -> Iterator[ArrowBatch]:
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


def parquet_batches(path: Path, options: ReadOptions, choose: Choose) -> Iterator[ArrowBatch]:
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


def _parquet_batches(arrow: Arrow, path: Path, choose: Choose) -> Iterator[ArrowBatch]:
    """Rows with texts as dictionaries: equal ones take their space once, as in the file."""
    with open_input(path) as stream:
        yield from _batches_of(same_file(stream, path), arrow, path, choose)


def _batches_of(source: str, arrow: Arrow, path: Path, choose: Choose) -> Iterator[ArrowBatch]:
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
