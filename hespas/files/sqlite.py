"""Reading somebody else's SQLite database: never written to, its own SQL never run, its size believed.

A database can hold views, triggers and generated columns whose SQL runs when they are read; only columns that
are stored in real tables are read here. A page can be linked many times, so that a small file seems to hold
endless rows: rows, bytes of text and steps are bounded by the size of the file.
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

__all__ = ["MISSING", "SQLITE_MAGIC", "Database", "Table", "folded", "has_table", "opened", "report_unread"]

MISSING = -(1 << 63)
"""Stands for NULL, and for a column that is not there."""

_BATCH_ROWS = 16_384
_MIN_ROW_BYTES = 6
"""Two bytes of the page, two of the cell, and a header of at least two."""
_FREE_STEPS = 10_000_000
_STEPS_PER_BYTE = 100
_SLACK_BYTES = 1 << 20
_HINT = "export the profile again"

_Value = int | float | bytes | None


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Columns of one table, in the order of its rows.

    ``integers`` hold ``MISSING`` for NULL. ``texts`` hold a place in ``distinct``, -1 for NULL.
    """

    rows: int
    integers: dict[str, IntArray]
    texts: dict[str, IntArray]
    distinct: list[bytes]

    @property
    def words(self) -> list[str]:
        """The distinct texts, decoded."""
        return [text.decode("utf-8", "replace") for text in self.distinct]

    def by_key(self, keys: str, texts: str) -> dict[int, str]:
        """The texts of a column by the numbers in another; those that are NULL are left out."""
        words = self.words
        pairs = zip(self.integers[keys].tolist(), self.texts[texts].tolist(), strict=True)
        return {key: words[place] for key, place in pairs if place >= 0}

    def facts(self, names: str, values: str) -> dict[str, str]:
        """The texts of a column by those in another, where neither is NULL."""
        words = self.words
        pairs = zip(self.texts[names].tolist(), self.texts[values].tolist(), strict=True)
        return {words[name]: words[value] for name, value in pairs if name >= 0 and value >= 0}

    def __len__(self) -> int:
        return self.rows


@dataclass(slots=True)
class Database:
    """An open database. ``tables`` are its real tables, by name: no views, no virtual ones, which are
    ``computed``. SQLite's names are the same in capitals and small letters. ``refused`` lists what was asked
    for and is there, but would have to be computed by the file's own SQL. ``reading`` is where reading is.
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
        """Look names up without regard to capitals."""
        self._folded = frozenset(map(folded, self.tables))
        self.computed = frozenset(map(folded, self.computed))

    def columns(self, table: str) -> frozenset[str]:
        """The stored columns of a table, :func:`folded`; none for a table that is not there."""
        name = folded(table)
        if name not in self._columns:
            self._columns[name] = self._stored(table) if name in self._folded else frozenset()
            if name in self.computed:
                self.refused.append(f"{table}: it is a view or virtual")
        return self._columns[name]

    def _stored(self, table: str) -> frozenset[str]:
        cursor = self.connection.execute(f"PRAGMA table_info({_quoted(table)})")
        return frozenset(folded(_decoded(row[1])) for row in cursor)

    def has(self, table: str) -> bool:
        """Whether there is a real table of this name."""
        return folded(table) in self._folded

    def read(self, table: str, integers: Sequence[str], texts: Sequence[str] = ()) -> Table:
        """The named columns. Raises ``FormatError`` for what is no integer, or no text, and for a damaged
        database. O(rows).
        """
        there = self.columns(table)
        numbers = [name for name in integers if folded(name) in there]
        labels = [name for name in texts if folded(name) in there]
        self._refuse_generated(table, [name for name in (*integers, *texts) if folded(name) not in there])
        if not numbers and not labels:
            return Table(0, {name: _nothing(0) for name in integers}, {name: _none(0) for name in texts}, [])
        chosen = [f"ifnull({_quoted(name)}, ?1)" for name in numbers] + [_quoted(name) for name in labels]
        query = f"SELECT {', '.join(chosen)} FROM {_quoted(table)}"
        self.reading = f"table {table}"
        cursor = self.connection.execute(query, (MISSING,) if numbers else ())
        collected = _Collected(self, table, numbers, labels)
        for batch in _batches(cursor, one_by_one=bool(labels), most_bytes=2 * self.size_bytes + _SLACK_BYTES):
            collected.add(batch)
            self.reading = f"table {table}, after row {collected.rows}"
            if collected.rows > self.size_bytes // _MIN_ROW_BYTES:
                message = f"table {table} has more rows than the file has room for"
                raise self.malformed(message, f"table {table}, row {collected.rows}")
        self.reading = f"after table {table}"
        return collected.table(integers, texts)

    def _refuse_generated(self, table: str, missing: Sequence[str]) -> None:
        """Note the missing columns that the table does have, but computes."""
        if not missing or not self.has(table):
            return
        cursor = self.connection.execute(f"PRAGMA table_xinfo({_quoted(table)})")
        every = {folded(_decoded(row[1])) for row in cursor}
        generated = [name for name in missing if folded(name) in every]
        self.refused.extend(f"{table}.{name}: the column is generated" for name in generated)

    def malformed(self, message: str, position: str) -> FormatError:
        """The error for content that makes no sense."""
        return FormatError(message, path=self.path, position=position, hint=_HINT)


@dataclass(slots=True)
class _Collected:
    """The columns of a table while it is read."""

    database: Database
    name: str
    numbers: list[str]
    labels: list[str]
    rows: int = 0
    parts: list[list[IntArray]] = field(default_factory=list[list[IntArray]])
    places: dict[bytes, int] = field(default_factory=dict[bytes, int])

    def add(self, batch: list[tuple[_Value, ...]]) -> None:
        columns = list(zip(*batch, strict=True))
        count = len(self.numbers)
        found = [self._integers(name, values) for name, values in zip(self.numbers, columns, strict=False)]
        found += [self._texts(name, each) for name, each in zip(self.labels, columns[count:], strict=True)]
        self.parts.append(found)
        self.rows += len(batch)

    def _integers(self, column: str, values: tuple[_Value, ...]) -> IntArray:
        if set(map(type, values)) == {int}:
            return np.array(values, np.int64)
        checked = [self._integer(column, place, value) for place, value in enumerate(values)]
        return np.array(checked, np.int64)

    def _integer(self, column: str, place: int, value: _Value) -> int:
        if isinstance(value, int):
            return value
        if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 62:
            return int(value)
        position = f"table {self.name}, row {self.rows + place + 1}, column {column}"
        raise self.database.malformed(f"{value!r:.40} is no integer", position)

    def _texts(self, column: str, values: tuple[_Value, ...]) -> IntArray:
        places = self.places
        found: list[int] = []
        for value in values:
            if value is None:
                found.append(-1)
            elif isinstance(value, bytes):
                found.append(places.setdefault(value, len(places)))
            else:
                found.append(places.setdefault(str(value).encode(), len(places)))
        return np.array(found, np.int64)

    def table(self, integers: Sequence[str], texts: Sequence[str]) -> Table:
        """All columns that were asked for; those that are not there hold ``MISSING`` or -1."""
        every = [
            np.concatenate([part[place] for part in self.parts]) if self.parts else _nothing(0)
            for place in range(len(self.numbers) + len(self.labels))
        ]
        self.parts.clear()
        known = dict(zip(self.numbers, every, strict=False))
        nothing, none = _nothing(self.rows), _none(self.rows)
        labelled = dict(zip(self.labels, every[len(self.numbers) :], strict=True))
        return Table(
            self.rows,
            {name: known.get(name, nothing) for name in integers},
            {name: labelled.get(name, none) for name in texts},
            list(self.places),
        )


def _batches(
    cursor: sqlite3.Cursor, *, one_by_one: bool, most_bytes: int
) -> Iterator[list[tuple[_Value, ...]]]:
    """Rows in batches. Texts are taken one by one, since a batch of long ones would not be bounded."""
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
                raise sqlite3.DatabaseError("it holds more text than the file has room for")
            batch.append(row)
        if not batch:
            return
        yield batch


def report_unread(database: Database, source: str, diagnostics: Diagnostics) -> None:
    """Say what a reader of the format ``source`` asked for and did not get, since SQL would compute it, and
    that a write-ahead log with content lies beside the database.
    """
    findings, log = diagnostics.about(database.path, source), Path(f"{database.path}-wal")
    for each in dict.fromkeys(database.refused):
        findings.warning("not-stored", f"not read, for the file's own SQL is not run: {each}")
    with suppress(OSError):
        unread = "a write-ahead log lies beside the database: what is in it is not read"
        findings.warning("write-ahead-log", unread, int(log.stat().st_size > 0))


@contextmanager
def opened(path: Path, max_bytes: int) -> Generator[Database]:
    """A database, unpacked into a temporary file where it is gzipped.

    What SQLite says against it, here or while it is read, is raised as ``FormatError``.
    """
    refuse_special_files(path)
    try:
        with open_input(path) as stream:
            start = stream.read(len(SQLITE_MAGIC))
    except OSError as error:
        raise FormatError(error.strerror or str(error), path=str(path), hint="check the path") from error
    if not start.startswith(b"\x1f\x8b"):
        with _opened_plainly(path) as database:
            yield database
        return
    with tempfile.TemporaryDirectory(prefix="hespas-") as folder:
        unpacked = Path(folder) / "database"
        _unpack_database(path, unpacked, max_bytes)
        with _opened_plainly(unpacked, name=str(path)) as database:
            yield database


@contextmanager
def _opened_plainly(path: Path, name: str = "") -> Generator[Database]:
    """As :func:`opened`, for a file that is not compressed; errors call it ``name``."""
    shown = name or str(path)
    database: Database | None = None
    try:
        size = path.stat().st_size
        with open_input(path) as stream:
            header = stream.read(_HEADER_BYTES)
        if not header.startswith(SQLITE_MAGIC):
            raise FormatError("this is no SQLite database", path=shown, position="byte 0", hint=_HINT)
        _refuse_cut_off(header, size, shown)
        # Immutable: neither locks nor a write-ahead log are looked for, so nothing is written beside it.
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as found:
            database = _guarded(found, shown, size)
            yield database
    except OSError as error:
        raise FormatError(error.strerror or str(error), path=shown, hint="check the path") from error
    except (sqlite3.Error, UnicodeDecodeError, OverflowError, MemoryError) as error:
        # SQLite quotes names of a damaged schema, which need not be UTF-8.
        raise FormatError(
            f"the database cannot be read: {clipped(str(error))}",
            path=shown,
            position="the list of tables" if database is None else database.reading,
            hint=_HINT,
        ) from error


def _guarded(connection: sqlite3.Connection, path: str, size: int) -> Database:
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
    connection.set_authorizer(_allowed)
    query = "SELECT name, type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%' FROM sqlite_master WHERE type IN "
    found = [(_decoded(row[0]), bool(row[1])) for row in connection.execute(f"{query} ('table', 'view')")]
    return Database(
        path,
        size,
        connection,
        tuple(sorted(name for name, is_real in found if is_real)),
        frozenset(name for name, is_real in found if not is_real),
    )


def _allowed(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Only reading, and what reading here needs."""
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


def folded(name: str) -> str:
    """A name as SQLite compares it: ASCII capitals are small letters."""
    return "".join(each.lower() if each.isascii() else each for each in name)


def _decoded(name: object) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)


def _nothing(rows: int) -> IntArray:
    return np.full(rows, MISSING, np.int64)


def _none(rows: int) -> IntArray:
    return np.full(rows, -1, np.int64)


# The file of an SQLite database before it is opened: whether all of it is there, and unpacking it.

_HEADER_BYTES = 100
_CHUNK_BYTES = 4 << 20
_CUT_OFF_HINT = "copy the file again, or export the profile again"


def _refuse_cut_off(header: bytes, size: int, path: str) -> None:
    """SQLite reads zeros where the last page of a file is not whole, and so loses rows without a word.

    The header is described at https://sqlite.org/fileformat2.html; its count of pages holds where the file
    was last written by a version that keeps it.
    """
    if len(header) < _HEADER_BYTES:
        raise FormatError("the database is cut off", path=path, position=f"byte {size}", hint=_CUT_OFF_HINT)
    stated = int.from_bytes(header[16:18], "big")
    page_bytes = 1 << 16 if stated == 1 else stated
    pages = int.from_bytes(header[28:32], "big") if header[24:28] == header[92:96] else 0
    if pages * page_bytes > size or (page_bytes and size % page_bytes):
        expected = f"{pages * page_bytes:,} bytes" if pages else f"whole pages of {page_bytes:,} bytes"
        raise FormatError(
            f"the database is cut off: {size:,} bytes of {expected}",
            path=path,
            position=f"byte {size}",
            hint=_CUT_OFF_HINT,
        )


def _unpack_database(path: Path, into: Path, max_bytes: int) -> None:
    """Gunzip a chunk at a time, no further than :class:`hespas.files.streams.PackedInput` goes."""
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
    """Whether a file, of which the ``start`` is known, is an SQLite database with a table that is ``wanted``.

    A plain file is asked for its tables. A compressed or damaged one is searched for the ``signs``, which
    stand in the statements that made its tables: among its first pages in practice.
    """
    if not start.startswith(SQLITE_MAGIC):
        return False
    names = _names(path)
    if names is not None:
        return any(wanted(name) for name in names)
    return _holds(start, signs) or _holds(first_bytes(path, _PEEK_BYTES), signs)


def _names(path: Path) -> tuple[str, ...] | None:
    """The names of a plain file's tables; None where they cannot be told."""
    try:
        with open_input(path) as stream:
            if stream.read(len(SQLITE_MAGIC)) != SQLITE_MAGIC:
                return None
        with _opened_plainly(path) as database:
            return database.tables
    except (OSError, HespasError):
        return None


def _holds(data: bytes, signs: tuple[bytes, ...]) -> bool:
    return any(sign in data for sign in signs)
