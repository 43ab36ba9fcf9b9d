"""Reader of untrusted SQLite databases. It never writes, never runs SQL of the database, and limits its size.

A database can contain views, triggers and generated columns whose SQL runs when they are read; only stored
columns of real tables are read here. A page can be linked many times, so that a small file seems to have
endless rows: rows, bytes of text and steps are limited by the size of the file.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np

from hespas.files.limits import limits
from hespas.files.streams import (
    PackedInput,
    damage_errors,
    first_bytes,
    open_input,
    open_regular,
    refuse_special_files,
)
from hespas.graph import Diagnostics
from hespas.graph.columns import IntArray
from hespas.graph.errors import FormatError, HespasError, clipped

__all__ = [
    "MISSING",
    "SQLITE_MAGIC",
    "SqliteDatabase",
    "SqliteTable",
    "fold_name",
    "has_table",
    "open_database",
    "report_unread",
]

MISSING = -(1 << 63)
"""Value of NULL, and of a missing column."""

_BATCH_ROWS = 16_384
_MIN_ROW_BYTES = 6
"""Least bytes of a row: two of the page, two of the cell, and a header of at least two."""
_FREE_STEPS = 10_000_000
_STEPS_PER_BYTE = 100
_SLACK_BYTES = 1 << 20
_HINT = "export the profile again"

_Value = int | float | bytes | None


@dataclass(frozen=True, slots=True, eq=False)
class SqliteTable:
    """Columns of one table by name; all have one entry per row of the table.

    ``integers`` have :data:`MISSING` for NULL. ``texts`` are indices into ``distinct``, -1 for NULL.
    """

    rows: int
    integers: dict[str, IntArray]
    texts: dict[str, IntArray]
    distinct: list[bytes]

    @property
    def words(self) -> list[str]:
        """Return the distinct texts, decoded."""
        return [text.decode("utf-8", "replace") for text in self.distinct]

    def by_key(self, keys: str, texts: str) -> dict[int, str]:
        """Return a dict from column ``keys`` (numbers) to column ``texts`` of the same row, without NULL
        texts.
        """
        words = self.words
        pairs = zip(self.integers[keys].tolist(), self.texts[texts].tolist(), strict=True)
        return {key: words[index] for key, index in pairs if index >= 0}

    def facts(self, names: str, values: str) -> dict[str, str]:
        """Return a dict from column ``names`` to column ``values`` of the same row (texts), without NULL."""
        words = self.words
        pairs = zip(self.texts[names].tolist(), self.texts[values].tolist(), strict=True)
        return {words[name]: words[value] for name, value in pairs if name >= 0 and value >= 0}

    def __len__(self) -> int:
        return self.rows


@dataclass(slots=True)
class SqliteDatabase:
    """An open SQLite database.

    ``tables`` are the names of tables with stored rows. ``computed`` are the names of views and virtual
    tables, which are not read. SQLite's names are case-insensitive. ``refused`` lists requested columns and
    tables that SQL of the file would compute. ``reading`` is the current position for error messages.
    """

    path: str
    size_bytes: int
    connection: sqlite3.Connection
    tables: tuple[str, ...] = ()
    computed: frozenset[str] = frozenset()
    refused: list[str] = field(default_factory=list[str])
    reading: str = "the list of tables"
    _columns: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    _folded: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Prepare case-insensitive look-up of names."""
        self._folded = frozenset(map(fold_name, self.tables))
        self.computed = frozenset(map(fold_name, self.computed))

    def columns(self, table: str) -> frozenset[str]:
        """Return the stored columns of a table, with folded names; empty for a missing table."""
        name = fold_name(table)
        if name not in self._columns:
            stored = frozenset[str]()
            if name in self._folded:
                cursor = self.connection.execute(f"PRAGMA table_info({_quoted(table)})")
                stored = frozenset(fold_name(_decoded(row[1])) for row in cursor)
            self._columns[name] = stored
            if name in self.computed:
                self.refused.append(f"{table}: it is a view or virtual")
        return self._columns[name]

    def has(self, table: str) -> bool:
        """Return True if there is a real table of this name."""
        return fold_name(table) in self._folded

    def read(self, table: str, integers: Sequence[str], texts: Sequence[str] = ()) -> SqliteTable:
        """Return the columns ``integers`` and ``texts`` of a table. O(rows).

        Raises ``FormatError`` for a value that is not an integer or text as requested, and for a damaged
        database.
        """
        stored = self.columns(table)
        numbers = [name for name in integers if fold_name(name) in stored]
        labels = [name for name in texts if fold_name(name) in stored]
        missing = [name for name in (*integers, *texts) if fold_name(name) not in stored]
        if missing and self.has(table):
            rows = self.connection.execute(f"PRAGMA table_xinfo({_quoted(table)})")
            present = {fold_name(_decoded(row[1])) for row in rows}
            generated = [name for name in missing if fold_name(name) in present]
            self.refused.extend(f"{table}.{name}: the column is generated" for name in generated)
        if not numbers and not labels:
            no_integers, no_texts = _missing_integers(0), _missing_texts(0)
            return SqliteTable(0, dict.fromkeys(integers, no_integers), dict.fromkeys(texts, no_texts), [])
        chosen = [f"ifnull({_quoted(name)}, ?1)" for name in numbers] + [_quoted(name) for name in labels]
        query = f"SELECT {', '.join(chosen)} FROM {_quoted(table)}"
        self.reading = f"table {table}"
        cursor = self.connection.execute(query, (MISSING,) if numbers else ())
        reader = _SqliteTableReader(self, table, numbers, labels)
        for batch in _batches(cursor, one_by_one=bool(labels), most_bytes=2 * self.size_bytes + _SLACK_BYTES):
            reader.add(batch)
            self.reading = f"table {table}, after row {reader.rows}"
            if reader.rows > self.size_bytes // _MIN_ROW_BYTES:
                message = f"table {table} has more rows than fit in the file"
                raise self.malformed(message, f"table {table}, row {reader.rows}")
        self.reading = f"after table {table}"
        return reader.table(integers, texts)

    def malformed(self, message: str, position: str) -> FormatError:
        """Return the error for invalid content."""
        return FormatError(message, path=self.path, position=position, hint=_HINT)


@dataclass(slots=True)
class _SqliteTableReader:
    """State of reading one table: the columns that were read so far."""

    database: SqliteDatabase
    name: str
    numbers: list[str]
    labels: list[str]
    rows: int = 0
    parts: list[list[IntArray]] = field(default_factory=list[list[IntArray]])
    index_of: dict[bytes, int] = field(default_factory=dict[bytes, int])

    def add(self, batch: list[tuple[_Value, ...]]) -> None:
        columns = list(zip(*batch, strict=True))
        count = len(self.numbers)
        arrays = [self._integers(name, values) for name, values in zip(self.numbers, columns, strict=False)]
        arrays += [self._texts(values) for values in columns[count:]]
        self.parts.append(arrays)
        self.rows += len(batch)

    def _integers(self, column: str, values: tuple[_Value, ...]) -> IntArray:
        if set(map(type, values)) == {int}:
            return np.array(values, np.int64)
        integers: list[int] = []
        for row, value in enumerate(values, start=self.rows + 1):
            is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 1 << 62
            if not isinstance(value, int) and not is_whole:
                position = f"table {self.name}, row {row}, column {column}"
                raise self.database.malformed(f"{value!r:.40} is not an integer", position)
            integers.append(int(cast("float", value)))
        return np.array(integers, np.int64)

    def _texts(self, values: tuple[_Value, ...]) -> IntArray:
        index_of = self.index_of
        indices: list[int] = []
        for value in values:
            if value is None:
                indices.append(-1)
            elif isinstance(value, bytes):
                indices.append(index_of.setdefault(value, len(index_of)))
            else:
                indices.append(index_of.setdefault(str(value).encode(), len(index_of)))
        return np.array(indices, np.int64)

    def table(self, integers: Sequence[str], texts: Sequence[str]) -> SqliteTable:
        """Return all requested columns; missing ones contain ``MISSING`` or -1."""
        arrays = [
            np.concatenate([part[index] for part in self.parts]) if self.parts else _missing_integers(0)
            for index in range(len(self.numbers) + len(self.labels))
        ]
        self.parts.clear()
        integer_columns = dict(zip(self.numbers, arrays, strict=False))
        missing_integers, missing_texts = _missing_integers(self.rows), _missing_texts(self.rows)
        text_columns = dict(zip(self.labels, arrays[len(self.numbers) :], strict=True))
        return SqliteTable(
            self.rows,
            {name: integer_columns.get(name, missing_integers) for name in integers},
            {name: text_columns.get(name, missing_texts) for name in texts},
            list(self.index_of),
        )


def _batches(
    cursor: sqlite3.Cursor, *, one_by_one: bool, most_bytes: int
) -> Iterator[list[tuple[_Value, ...]]]:
    """Yield rows in batches. Rows with texts are fetched one by one, because a batch of long texts would not
    be limited.
    """
    batch: list[tuple[_Value, ...]]
    if not one_by_one:
        while batch := cursor.fetchmany(_BATCH_ROWS):
            yield batch
        return
    total = 0
    rows = cast("Iterator[tuple[_Value, ...]]", cursor)
    while True:
        batch = []
        for row in islice(rows, _BATCH_ROWS):
            for value in row:
                if type(value) is bytes:
                    total += len(value)
            if total > most_bytes:
                raise sqlite3.DatabaseError("it contains more text than fits in the file")
            batch.append(row)
        if not batch:
            return
        yield batch


def report_unread(database: SqliteDatabase, source: str, diagnostics: Diagnostics) -> None:
    """Report data that a reader of the format ``source`` requested but did not get.

    These are columns and tables that SQL of the file would compute, and a write-ahead log next to the
    database.
    """
    findings, log = diagnostics.about(database.path, source), Path(f"{database.path}-wal")
    for name in dict.fromkeys(database.refused):
        findings.warning("not-stored", f"not read, because SQL of the file is not run: {name}")
    with suppress(OSError):
        unread = "the write-ahead log next to the database is not read"
        findings.warning("write-ahead-log", unread, int(log.stat().st_size > 0))


@contextmanager
def open_database(path: Path, max_bytes: int) -> Generator[SqliteDatabase]:
    """Open a database inside the block. A gzipped database is decompressed into a temporary file.

    Errors of SQLite, here or while the database is read, are raised as ``FormatError``.
    """
    refuse_special_files(path)
    try:
        with open_input(path) as stream:
            start = stream.read(len(SQLITE_MAGIC))
    except OSError as error:
        raise FormatError(error.strerror or str(error), path=str(path), hint="check the path") from error
    if not start.startswith(b"\x1f\x8b"):
        with _open_plain(path) as database:
            yield database
        return
    with tempfile.TemporaryDirectory(prefix="hespas-") as folder:
        unpacked = Path(folder) / "database"
        _unpack_database(path, unpacked, max_bytes)
        with _open_plain(unpacked, name=str(path)) as database:
            yield database


@contextmanager
def _open_plain(path: Path, name: str = "") -> Generator[SqliteDatabase]:
    """Open a database file that is not compressed; errors call it ``name``."""
    shown = name or str(path)
    database: SqliteDatabase | None = None
    try:
        size = path.stat().st_size
        with open_input(path) as stream:
            header = stream.read(_HEADER_BYTES)
        if not header.startswith(SQLITE_MAGIC):
            raise FormatError("this is not an SQLite database", path=shown, position="byte 0", hint=_HINT)
        # SQLite reads a partial last page as zeros and loses rows silently. The page count of the header
        # (https://sqlite.org/fileformat2.html) is valid if the file was last written by a version that
        # maintains it.
        if len(header) < _HEADER_BYTES:
            raise FormatError(
                "the database is cut off", path=shown, position=f"byte {size}", hint=_CUT_OFF_HINT
            )
        field = int.from_bytes(header[16:18], "big")
        page_bytes = 1 << 16 if field == 1 else field
        pages = int.from_bytes(header[28:32], "big") if header[24:28] == header[92:96] else 0
        if pages * page_bytes > size or (page_bytes and size % page_bytes):
            expected = f"{pages * page_bytes:,} bytes" if pages else f"whole pages of {page_bytes:,} bytes"
            raise FormatError(
                f"the database is cut off: {size:,} bytes of {expected}",
                path=shown,
                position=f"byte {size}",
                hint=_CUT_OFF_HINT,
            )
        # Immutable: SQLite uses neither locks nor a write-ahead log, so it writes no files.
        with closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        ) as connection:
            database = _restricted(connection, shown, size)
            yield database
    except OSError as error:
        raise FormatError(error.strerror or str(error), path=shown, hint="check the path") from error
    except (sqlite3.Error, UnicodeDecodeError, OverflowError, MemoryError) as error:
        # Messages of SQLite quote names of a damaged schema, which may not be UTF-8.
        raise FormatError(
            f"the database cannot be read: {clipped(str(error))}",
            path=shown,
            position="the list of tables" if database is None else database.reading,
            hint=_HINT,
        ) from error


def _restricted(connection: sqlite3.Connection, path: str, size: int) -> SqliteDatabase:
    connection.text_factory = bytes
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(limits().cell_bytes, (1 << 31) - 1))
    connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, 1 << 20)
    connection.setlimit(sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0)
    for pragma in ("trusted_schema=OFF", "cell_size_check=ON", "query_only=ON", "mmap_size=0"):
        connection.execute(f"PRAGMA {pragma}").close()
    step = 100_000
    left = (_FREE_STEPS + _STEPS_PER_BYTE * size) // step

    def out_of_steps() -> int:
        nonlocal left
        left -= 1
        return left < 0

    connection.set_progress_handler(out_of_steps, step)
    connection.set_authorizer(_authorize)
    query = "SELECT name, type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%' FROM sqlite_master WHERE type IN "
    objects = [(_decoded(row[0]), bool(row[1])) for row in connection.execute(f"{query} ('table', 'view')")]
    return SqliteDatabase(
        path,
        size,
        connection,
        tuple(sorted(name for name, is_real in objects if is_real)),
        frozenset(name for name, is_real in objects if not is_real),
    )


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Permit SQLite to read, and to use the functions and pragmas that this module needs; deny everything
    else.
    """
    match action:
        case sqlite3.SQLITE_SELECT | sqlite3.SQLITE_READ:
            return sqlite3.SQLITE_OK
        case sqlite3.SQLITE_FUNCTION if second in {"ifnull", "like"}:
            return sqlite3.SQLITE_OK
        case sqlite3.SQLITE_PRAGMA if first in {"table_info", "table_xinfo"}:
            return sqlite3.SQLITE_OK
        case _:
            return sqlite3.SQLITE_DENY


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def fold_name(name: str) -> str:
    """Return a name as SQLite compares it: ASCII letters in lower case."""
    return "".join(letter.lower() if letter.isascii() else letter for letter in name)


def _decoded(name: object) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)


def _missing_integers(rows: int) -> IntArray:
    return np.full(rows, MISSING, np.int64)


def _missing_texts(rows: int) -> IntArray:
    return np.full(rows, -1, np.int64)


_HEADER_BYTES = 100
_CHUNK_BYTES = 4 << 20
_CUT_OFF_HINT = "copy the file again, or export the profile again"


def _unpack_database(path: Path, into: Path, max_bytes: int) -> None:
    """Decompress chunk by chunk, within the limits of :class:`hespas.files.streams.PackedInput`."""
    with PackedInput(open_regular(path), path, max_bytes) as packed, into.open("wb") as plain:
        while True:
            try:
                chunk = packed.read(_CHUNK_BYTES)
            except damage_errors() as error:
                why = "gzip stream ends early" if isinstance(error, EOFError) else f"cannot be read: {error}"
                raise FormatError(
                    why, path=str(path), position=f"byte {packed.done}", hint="copy the file again"
                ) from error
            if not chunk:
                return
            plain.write(chunk)


SQLITE_MAGIC = b"SQLite format 3\x00"
_PEEK_BYTES = 8 << 20


def has_table(path: Path, start: bytes, wanted: Callable[[str], bool], signs: tuple[bytes, ...]) -> bool:
    """Return True if a file is an SQLite database with a table for whose name ``wanted(name)`` is True.

    ``start`` has the first bytes of the file, decompressed. For an uncompressed file the tables are listed. A
    compressed or damaged file has such a table if one of the texts ``signs`` occurs near its start, where
    SQLite stores the statements that created the tables.
    """
    if not start.startswith(SQLITE_MAGIC):
        return False
    try:
        with open_input(path) as stream:
            is_plain = stream.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC
        if is_plain:
            with _open_plain(path) as database:
                return any(map(wanted, database.tables))
    except (OSError, HespasError):
        pass  # a damaged file
    return any(sign in data for data in (start, first_bytes(path, _PEEK_BYTES)) for sign in signs)
