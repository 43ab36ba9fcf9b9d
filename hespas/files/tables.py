"""Typed rows of small tables: CSV (gzipped or not), Parquet, and JSON lines.

The columns of a table are the fields of a ``msgspec.Struct``. A field of ``str``, ``int``, ``float`` or
``Literal`` has the name of its column; :class:`Column` adds other names, bounds and the unit. A field
without a default is required, in the header and in every row. Names of columns are compared without case
and surrounding blanks. Rows are numbered from 0, after the header.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from hespas.files.documents import check_column_names
from hespas.files.limits import limits
from hespas.files.streams import (
    STANDARD_STREAM,
    first_bytes,
    input_location,
    open_input,
    read_bytes,
    reopenable_path,
)
from hespas.graph.errors import FormatError, clipped

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = [
    "Column",
    "TableRow",
    "parquet_batches",
    "read_table",
    "read_typed_table",
    "too_large",
    "typed_row",
]

_Cells = TypeVar("_Cells", bound=msgspec.Struct)
_Lines = Iterator[tuple[int, list[str]]]
"""Lines of a table: line number and cells of the header, then of each row."""
_MAX_NUMBER = 1e15
"""Default limit of numbers: float64 does not represent every whole number beyond it."""
_ROW_BYTES = 256
"""Approximate memory of a row [bytes]."""
_PARQUET_ROWS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Column of a table: other ``names`` that its header may have, and the bounds and unit of its numbers. A
    table uses one of the names.

    Numbers must be at least ``low``, or above ``low`` if ``is_open``. With ``is_in_header`` the table must
    have the column, but its cells may be empty.
    """

    names: tuple[str, ...] = ()
    low: float = 0.0
    high: float = _MAX_NUMBER
    is_open: bool = False
    is_in_header: bool = False
    unit: str = ""


class TableRow(NamedTuple):
    """One row of a table. ``cells`` maps the column name to the text of the cell.

    ``line`` is the line of the file at which the row ends (0: not a text file). ``row`` is the number of the
    row, or -1 if ``path`` already states it.
    """

    path: str
    row: int
    line: int
    cells: Mapping[str, str]

    def fault(self, column: str, problem: str, expected: str) -> FormatError:
        """Return the error of a cell that should hold ``expected``, such as ``a number above 0``."""
        place = f"column {column}" if self.row < 0 else f"row {self.row}, column {column}"
        where = f"; row {self.row} is line {self.line} of the file" if self.line else ""
        return FormatError(
            f"{column} {problem}", path=self.path, position=place, hint=f"write {expected}{where}"
        )


def read_table(path: Path, needed: Sequence[str] = (), *, max_bytes: int | None = None) -> Iterator[TableRow]:
    """Yield the rows of a table, which must have the columns ``needed``. Memory grows with the file.

    Raises ``FormatError`` for a file that is not a table, a missing column, columns with equal names, and
    rows with more or fewer cells than the header. Empty cells beyond the header are ignored.
    """
    names, rows = _opened(path, max_bytes)
    if missing := sorted(set(needed) - set(names)):
        raise FormatError(
            f"missing column {', '.join(missing)}", path=str(path), position="header",
            hint=f"add the required columns: {', '.join(needed)}",
        )  # fmt: skip
    yield from rows


def read_typed_table(
    path: Path, kind: type[_Cells], *, max_bytes: int | None = None
) -> Iterator[tuple[TableRow, _Cells]]:
    """Yield the rows of a table, each with its cells converted to ``kind``, a struct with a field per column.

    Raises the errors of :func:`read_table`, and ``FormatError`` for a table without rows and for a cell of
    another type or out of its bounds.
    """
    names, rows = _opened(path, max_bytes)
    convert, is_empty = _Converter(kind, names, str(path)), True
    for row in rows:
        is_empty = False
        yield row, convert(row)
    if is_empty:
        raise FormatError("no row below the header", path=str(path), hint="write one row per run or request")


def typed_row(row: TableRow, kind: type[_Cells]) -> _Cells:
    """Return the cells of one row converted to ``kind``. Raises ``FormatError`` as
    :func:`read_typed_table`.
    """
    return _Converter(kind, row.cells, row.path)(row)


def _opened(path: Path, max_bytes: int | None) -> tuple[list[str], Iterator[TableRow]]:
    """Return the names of the columns of a table, and its rows."""
    is_pipe = str(path) == STANDARD_STREAM
    if first_bytes(path, 4) == b"PAR1" if is_pipe else path.suffix == ".parquet":
        lines = _parquet_rows(path)
    else:
        content = read_bytes(path, limits().table_bytes if max_bytes is None else max_bytes)
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise FormatError(
                "not a table: it is not UTF-8 text", path=str(path), position=f"byte {error.start}",
                hint="save the table as UTF-8",
            ) from error  # fmt: skip
        is_json = path.name.removesuffix(".gz").endswith((".jsonl", ".ndjson"))
        lines = (_json_rows if is_json else _csv_rows)(path, text)
    names = [name.strip().casefold() for name in next(lines, (0, list[str]()))[1]]
    check_column_names(names, path)
    return names, _table_rows(path, names, lines)


def _table_rows(path: Path, names: Sequence[str], lines: _Lines) -> Iterator[TableRow]:
    for number, (line, cells) in enumerate(lines):
        if len(cells) != len(names):
            if len(cells) < len(names) or any(cells[len(names) :]):
                raise FormatError(
                    f"{'more' if len(cells) > len(names) else 'fewer'} cells than the header",
                    path=str(path), position=f"row {number}",
                    hint=f"quote cells with commas, and write empty cells too; row {number} is line {line}",
                )  # fmt: skip
            del cells[len(names) :]
        yield TableRow(str(path), number, line, dict(zip(names, map(str.strip, cells), strict=True)))


@dataclass(frozen=True, slots=True)
class _Field:
    """Field of a struct that describes one column of a table.

    ``default`` is the value of an empty cell (``NODEFAULT``: empty cells are refused). ``choices`` are the
    allowed texts (empty: any text is allowed).
    """

    name: str
    kind: type
    column: Column
    default: object
    choices: tuple[str, ...]

    @property
    def expected(self) -> str:
        """Return text about the values that a cell may have, for error messages."""
        return self._values if self.default is msgspec.NODEFAULT else f"{self._values}, or an empty cell"

    @property
    def _values(self) -> str:
        if self.choices:
            return " or ".join((", ".join(self.choices[:-1]), self.choices[-1]))
        if self.kind is str:
            return "a text"
        column = self.column
        text = "a whole number" if self.kind is int else "a number"
        if column.low > -inf:
            text += f" above {column.low:g}" if column.is_open else f" of {column.low:g} or more"
        if column.high != _MAX_NUMBER:
            text += f", at most {column.high:,.0f}"
        return f"{text} [{column.unit}]" if column.unit else text

    def parse(self, row: TableRow, name: str) -> object:
        """Return the value of a cell. Raises ``FormatError`` for another type or a value out of bounds."""
        text = row.cells[name]
        if not text:
            if self.default is msgspec.NODEFAULT:
                raise row.fault(name, "is empty", self.expected)
            return self.default
        kind, column = self.kind, self.column
        if kind is str:
            if not self.choices or text in self.choices:
                return text
            raise row.fault(name, f"is {clipped(text)!r}", self.expected)
        try:
            value = float(text)
        except ValueError:
            value = nan
        if column.low <= value <= column.high and -inf < value < inf:
            if kind is int and value.is_integer():
                return int(value)
            if kind is float and not (column.is_open and value == column.low):
                return value
        raise row.fault(name, f"is {clipped(text)!r}", self.expected)


class _Converter(Generic[_Cells]):
    """Converter of the rows of a table to structs. ``header`` has the names of the columns of the table."""

    def __init__(self, kind: type[_Cells], header: Container[str], path: str) -> None:
        self._kind = kind
        self._columns: list[tuple[_Field, str]] = []
        hints = get_type_hints(kind, include_extras=True)
        columns: list[_Field] = []
        for declared in msgspec.structs.fields(kind):
            hint, column = hints[declared.name], Column()
            if get_origin(hint) is Annotated:
                hint, column = get_args(hint)
            choices: tuple[str, ...] = (
                tuple(filter(None, get_args(hint))) if get_origin(hint) is Literal else ()
            )
            columns.append(_Field(declared.name, str if choices else hint, column, declared.default, choices))
        needed = [
            entry for entry in columns if entry.default is msgspec.NODEFAULT or entry.column.is_in_header
        ]
        for entry in columns:
            allowed = (entry.name, *entry.column.names)
            name = next((name for name in allowed if name in header), "")
            if name:
                self._columns.append((entry, name))
            elif entry in needed:
                raise FormatError(
                    f"missing column {entry.name}",
                    path=path,
                    position="header",
                    hint=f"name it {' or '.join(allowed)}; required columns: "
                    f"{', '.join(entry.name for entry in needed)}",
                )

    def __call__(self, row: TableRow) -> _Cells:
        return self._kind(**{entry.name: entry.parse(row, name) for entry, name in self._columns})


def _csv_rows(path: Path, text: str) -> _Lines:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for cells in reader:
            if cells:
                yield reader.line_num, cells
    except csv.Error as error:
        raise FormatError(
            f"not a row of CSV: {error}", path=str(path), position=f"line {reader.line_num + 1}",
            hint="write one row per line, with cells separated by commas",
        ) from error  # fmt: skip


def _json_rows(path: Path, text: str) -> _Lines:
    """Yield the keys of the first object, and the values of all objects in that order."""
    header: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=dict[str, object])
        except (msgspec.DecodeError, RecursionError) as error:
            raise FormatError(
                f"not a JSON object: {error}", path=str(path), position=f"line {number}",
                hint="write one object per line",
            ) from error  # fmt: skip
        if not header:
            header = list(row)
            yield 0, header
        yield number, [_text(row.get(name)) for name in header]


def _text(value: object) -> str:
    return "" if value is None or value != value else str(value)  # noqa: PLR0124 # NaN: empty


def _parquet_rows(path: Path) -> _Lines:
    """Yield the names of columns, and the texts of all rows of a Parquet file."""
    from pyarrow import ArrowException

    size, bounds = input_location(path).stat().st_size, limits()
    header: list[str] = []

    def choose(schema: pa.Schema) -> tuple[list[str], list[str]]:
        header.extend(map(str, schema.names))
        return header, []

    is_first = True
    try:
        for batch in parquet_batches(
            path,
            choose,
            rows_at_once=lambda columns: _PARQUET_ROWS,
            most_rows=(bounds.table_rows_bytes + 20 * size) // _ROW_BYTES,
            most_bytes=min(bounds.table_bytes, max(bounds.table_free_bytes, bounds.table_ratio * size)),
        ):
            if is_first:
                yield 0, header
            is_first = False
            columns = [
                map(_text, cast("list[object]", batch.column(number).to_pylist()))
                for number in range(batch.num_columns)
            ]
            yield from ((0, list(cells)) for cells in zip(*columns, strict=True))
    except (ArrowException, OSError, ValueError) as error:
        raise FormatError(
            f"not a Parquet table: {error}", path=str(path), position="the whole file",
            hint="write the table again",
        ) from error  # fmt: skip
    if is_first:
        yield 0, header


def parquet_batches(
    path: Path,
    choose: Callable[[pa.Schema], tuple[list[str], list[str]]],
    *,
    rows_at_once: Callable[[int], int],
    most_rows: int,
    most_bytes: int,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a Parquet file in batches.

    ``choose`` takes the schema. It returns the names of the columns to read, and the names of the text
    columns to read as dictionaries, in which a repeated text is stored once. ``rows_at_once`` takes the
    number of columns and returns the rows per batch.

    Raises ``FormatError`` for files that unpack to too many rows or bytes, and Arrow's errors.
    """
    from pyarrow.parquet import ParquetFile

    with open_input(path) as stream:
        source = reopenable_path(stream, path)
        with closing(ParquetFile(source, memory_map=False)) as file:
            metadata: pq.FileMetaData = file.metadata
            columns, texts = choose(file.schema_arrow)
        if metadata.num_rows > most_rows:
            size = input_location(path).stat().st_size
            raise too_large(
                path, f"{metadata.num_rows:,} rows in {size:,} bytes, at most {most_rows:,} are allowed"
            )
        # Metadata of columns are not read: damaged ones end the process.
        groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
        _check_unpacked(path, sum(group.total_byte_size for group in groups), most_bytes)
        with closing(ParquetFile(source, memory_map=False, metadata=metadata, read_dictionary=texts)) as file:
            count, read = rows_at_once(len(columns)), cast("Any", file).iter_batches
            for batch in read(batch_size=count, columns=columns, use_threads=False):
                _check_unpacked(path, batch.nbytes, most_bytes)  # the file may state too little
                yield batch


def _check_unpacked(path: Path, unpacked: int, most: int) -> None:
    if unpacked > most:
        raise too_large(path, f"columns that unpack to {unpacked:,} bytes, at most {most:,} are allowed")


def too_large(path: Path, what: str) -> FormatError:
    """Return the error of a table beyond a limit."""
    return FormatError(
        what,
        path=str(path),
        position="the whole file",
        hint="use fewer rows, or raise `max_input_bytes` for a trusted file",
    )
