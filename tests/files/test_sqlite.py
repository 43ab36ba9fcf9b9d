"""Databases of other programs: only stored values are read, and no file costs more than its size."""

from __future__ import annotations

import gzip
import random
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from fixtures.make import nsys_export, rocprof
from hespas.converters import load_format
from hespas.converters.format import ReadOptions
from hespas.files.sqlite import MISSING, open_database, report_unread
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError, HespasError

LIMIT = 1 << 30
SAMPLES = {"nsys": nsys_export.GRAPHS, "rocpd": rocprof.DATABASE}


def make(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    return path


def test_columns_are_read_in_order_with_what_is_missing(tmp_path: Path) -> None:
    path = make(
        tmp_path / "a",
        'CREATE TABLE "odd ""name" (a INTEGER, b TEXT, c REAL)',
        """INSERT INTO "odd ""name" VALUES (1, 'x', 2.0), (NULL, NULL, -5.0)""",
        """INSERT INTO "odd ""name" VALUES (-7, 'x', 1e15), (3, '', NULL)""",
    )
    with open_database(path, LIMIT) as database:
        table = database.read('odd "name', ("a", "c", "none"), ("b", "nothing"))
    assert table.integers["a"].tolist() == [1, MISSING, -7, 3]
    assert table.integers["c"].tolist() == [2, -5, 10**15, MISSING]
    assert table.integers["none"].tolist() == [MISSING] * 4
    assert table.texts["b"].tolist() == [0, -1, 0, 1]
    assert table.texts["nothing"].tolist() == [-1] * 4
    assert table.distinct == [b"x", b""]


def test_a_table_that_is_not_there_has_no_rows(tmp_path: Path) -> None:
    with open_database(make(tmp_path / "a", "CREATE TABLE t (a)"), LIMIT) as database:
        assert len(database.read("nothing", ("a",), ("b",)).integers["a"]) == 0


def test_views_and_generated_columns_are_not_run(tmp_path: Path) -> None:
    path = make(
        tmp_path / "a",
        "CREATE TABLE real (a INTEGER, b INTEGER AS (a * 2))",
        "INSERT INTO real (a) VALUES (1)",
        "CREATE VIEW endless AS "
        "WITH RECURSIVE n(a) AS (SELECT 1 UNION ALL SELECT a + 1 FROM n) SELECT a FROM n",
    )
    with open_database(path, LIMIT) as database:
        assert database.tables == ("real",)
        assert database.columns("real") == {"a"}
        assert len(database.read("endless", ("a",))) == 0


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE other (a)",
        "INSERT INTO t VALUES (1)",
        "ATTACH ':memory:' AS more",
        "SELECT load_extension('x')",
        "SELECT randomblob(8)",
        "PRAGMA writable_schema = ON",
    ],
)
def test_a_database_is_only_read(statement: str, tmp_path: Path) -> None:
    path = make(tmp_path / "a", "CREATE TABLE t (a)")
    before = path.read_bytes()
    with pytest.raises(FormatError), open_database(path, LIMIT) as database:
        database.connection.execute(statement)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def endless_tree(path: Path) -> Path:
    """A tree whose every inner page names one child 500 times: four of them hold 62 milliard leaves."""
    make(path, "PRAGMA page_size = 4096", "CREATE TABLE t (a INTEGER)", "INSERT INTO t VALUES (7)")
    data = bytearray(path.read_bytes())
    with closing(sqlite3.connect(path)) as connection:
        root: int = connection.execute("SELECT rootpage FROM sqlite_master").fetchone()[0]
    pages, leaf = len(data) // 4096, bytes(data[(root - 1) * 4096 : root * 4096])
    chain = [root, *range(pages + 1, pages + 5)]
    data += bytes(4096 * 4)
    for page, child in pairwise(chain):
        cells = b"".join(struct.pack(">IB", child, 1) for _ in range(500))
        content = 4096 - len(cells)
        header = struct.pack(">BHHHBI", 5, 0, 500, content, 0, child)
        places = b"".join(struct.pack(">H", content + 5 * cell) for cell in range(500))
        inner = (header + places).ljust(content, b"\x00") + cells
        data[(page - 1) * 4096 : page * 4096] = inner
    data[(chain[-1] - 1) * 4096 : chain[-1] * 4096] = leaf
    struct.pack_into(">I", data, 28, len(data) // 4096)
    path.write_bytes(bytes(data))
    return path


def test_a_tree_that_holds_more_rows_than_the_file_can_is_refused(tmp_path: Path) -> None:
    with (
        open_database(endless_tree(tmp_path / "a"), LIMIT) as database,
        pytest.raises(FormatError, match="more rows than fit in the file"),
    ):
        database.read("t", ("a",))


def test_a_query_that_finds_nothing_for_long_is_interrupted(tmp_path: Path) -> None:
    with (
        pytest.raises(FormatError, match="interrupted"),
        open_database(endless_tree(tmp_path / "a"), LIMIT) as database,
    ):
        database.connection.execute("SELECT a FROM t WHERE a = 8").fetchall()


def test_text_that_is_stored_once_and_linked_often_is_bounded(tmp_path: Path) -> None:
    """Cells whose overflow pages are the same ones hold more text than the file has bytes."""
    path = make(tmp_path / "a", "PRAGMA page_size = 4096", "CREATE TABLE t (a TEXT)")
    with closing(sqlite3.connect(path)) as connection:
        connection.executemany("INSERT INTO t VALUES (?)", [("x" * 400_000,)])
        connection.executemany("INSERT INTO t VALUES (?)", [(f"{row:03d}",) for row in range(30)])
        connection.commit()
        root: int = connection.execute("SELECT rootpage FROM sqlite_master").fetchone()[0]
    data = bytearray(path.read_bytes())
    base = (root - 1) * 4096
    assert data[base] == 13, "one leaf"
    count = struct.unpack_from(">H", data, base + 3)[0]
    first = struct.unpack_from(">H", data, base + 8)[0]
    for cell in range(count):
        struct.pack_into(">H", data, base + 8 + 2 * cell, first)
    path.write_bytes(bytes(data))
    with (
        pytest.raises(FormatError, match="more text than fits in the file"),
        open_database(path, LIMIT) as database,
    ):
        database.read("t", (), ("a",))


def test_a_gzip_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"SQLite format 3\x00" + bytes(80 << 20)))
    with pytest.raises(FormatError, match="decompresses to more than"), open_database(path, LIMIT):
        pass


@pytest.mark.parametrize(
    "content", [b"SQLite format 3\x00", b"SQLite format 3\x00" + bytes(4096), b"no database"]
)
def test_what_is_no_database_is_told(content: bytes, tmp_path: Path) -> None:
    for data in (content, gzip.compress(content)):
        (tmp_path / "a").write_bytes(data)
        with pytest.raises(FormatError), open_database(tmp_path / "a", LIMIT) as database:
            database.read("t", ("a",))


def _read(name: str, path: Path) -> None:
    entry = load_format(name)
    assert entry.read is not None
    assert entry.sniff is not None
    try:
        entry.read(path, ReadOptions(), Diagnostics())
    except HespasError:
        return


def _cut(data: bytes, random_: random.Random) -> bytes:
    return data[: random_.randrange(len(data))]


def _flipped(data: bytes, random_: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(random_.choice((1, 3, 20))):
        changed[random_.randrange(len(changed))] = random_.randrange(256)
    return bytes(changed)


def _swapped(data: bytes, random_: random.Random) -> bytes:
    """Two pages change places, or one stands for another."""
    size, changed = 4096, bytearray(data)
    one, two = (random_.randrange(len(data) // size) * size for _ in range(2))
    changed[one : one + size] = data[two : two + size]
    return bytes(changed)


@pytest.mark.parametrize("damage", [_cut, _flipped, _swapped])
@pytest.mark.parametrize("name", SAMPLES)
def test_a_damaged_database_is_an_error_of_ours_or_read(
    name: str, damage: Callable[[bytes, random.Random], bytes], tmp_path: Path
) -> None:
    data, dice = gzip.decompress(SAMPLES[name].read_bytes()), random.Random(11)
    path = tmp_path / "damaged"
    for _ in range(120):
        path.write_bytes(damage(data, dice))
        _read(name, path)


def test_names_are_the_same_in_capitals_and_small_letters(tmp_path: Path) -> None:
    path = make(
        tmp_path / "a", "CREATE TABLE Events (Start INTEGER, NAME TEXT)", "INSERT INTO Events VALUES (3, 'x')"
    )
    with open_database(path, LIMIT) as database:
        assert database.has("EVENTS")
        table = database.read("EVENTS", ("start",), ("name",))
    assert table.integers["start"].tolist() == [3]
    assert table.texts["name"].tolist() == [0]


def test_what_would_be_computed_and_was_asked_for_is_told(tmp_path: Path) -> None:
    path = make(
        tmp_path / "a",
        "CREATE TABLE real (a INTEGER, b INTEGER AS (a * 2), c INTEGER AS (a * 3) STORED)",
        "CREATE VIEW Shown AS SELECT a FROM real",
        "CREATE VIEW other AS SELECT a FROM real",
        "CREATE VIRTUAL TABLE searched USING fts5(a)",
    )
    diagnostics = Diagnostics()
    with open_database(path, LIMIT) as database:
        database.read("shown", ("a",))
        database.read("searched", (), ("a",))
        for _ in range(2):
            database.read("real", ("a", "b", "none"))
        report_unread(database, "nsys", diagnostics)
    told = [each.message.rpartition("not run: ")[2] for each in diagnostics]
    assert told == [
        "shown: it is a view or virtual",
        "searched: it is a view or virtual",
        "real.b: the column is generated",
    ]


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("lost", [1, 600, 2_000, 9_000])
@pytest.mark.parametrize("packed", [False, True])
def test_a_database_whose_end_is_missing_is_refused(
    name: str, lost: int, packed: bool, tmp_path: Path
) -> None:
    data = gzip.decompress(SAMPLES[name].read_bytes())[:-lost]
    path = tmp_path / "a"
    path.write_bytes(gzip.compress(data) if packed else data)
    entry = load_format(name)
    assert entry.read is not None
    with pytest.raises(FormatError, match=f"cut off: {len(data):,} bytes"):
        entry.read(path, ReadOptions(), Diagnostics())


def test_a_part_of_a_page_is_cut_off_whatever_the_header_counts(tmp_path: Path) -> None:
    path = make(tmp_path / "a", "CREATE TABLE t (a)")
    data = bytearray(path.read_bytes())
    data[92:96] = b"\xff" * 4  # the count of pages is of an older version, and not to be believed
    data[28:32] = b"\xff" * 4
    path.write_bytes(data)
    with open_database(path, LIMIT) as database:
        assert database.tables == ("t",)
    path.write_bytes(data[:-1])
    with pytest.raises(FormatError, match="of whole pages"), open_database(path, LIMIT):
        pass
