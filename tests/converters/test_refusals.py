"""Errors for damaged recordings name the file, a position in it and a fix."""

from __future__ import annotations

import gzip
import json
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from hespas import api
from hespas.graph.errors import FormatError, HespasError, UnsupportedError

PROFILES = Path(__file__).parents[2] / "fixtures" / "profiles"
FIXTURES = sorted(path.name for path in PROFILES.iterdir() if path.stat().st_size < 400_000)
CELLS = (None, "x", 1.5, b"\xff", 1 << 62, -(1 << 62), "9" * 99, -1)
VALUES: tuple[object, ...] = (None, 0, -1, "x", [], {}, 1e308, 1 << 64, True, [[1]])
BYTES = (0, 255, 34, 91, 123, 45)
KINDS = 24


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def overwritten(data: bytes, draw: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(draw.choice((1, 3, 20))):
        found[draw.randrange(len(found))] = draw.choice(BYTES)
    return bytes(found)


def changed_json(data: bytes, draw: random.Random) -> bytes:
    """One value of another kind somewhere."""
    document: object = json.loads(data)
    place: object = document
    while isinstance(place, dict | list) and place:
        table = cast("dict[object, object]", place)  # a list is indexed alike
        key = draw.choice(list(table) if isinstance(place, dict) else list(range(len(table))))
        place = table[key]
        if draw.random() < 0.2 or not isinstance(place, dict | list):
            table[key] = draw.choice(VALUES)
            break
    return json.dumps(document).encode()


def changed_cells(path: Path, draw: random.Random) -> None:
    """One column of every second row of one table holds something else."""
    with closing(sqlite3.connect(path)) as connection:
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        table = draw.choice(names)
        columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]
        try:
            query = f'UPDATE "{table}" SET "{draw.choice(columns)}" = ? WHERE rowid % 2 = 0'
            connection.execute(query, (draw.choice(CELLS),))
        except sqlite3.Error:  # a key that may not repeat
            connection.rollback()
        connection.commit()


def damaged(name: str, folder: Path) -> Iterator[Path]:
    raw = (PROFILES / name).read_bytes()
    plain = gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw
    path = folder / name.removesuffix(".gz")
    for seed in range(KINDS):
        draw = random.Random(f"{name} {seed}")
        if seed % 3 == 0:
            path.write_bytes(cut(plain, draw))
        elif seed % 3 == 1:
            path.write_bytes(overwritten(plain, draw))
        elif plain.startswith(b"SQLite"):
            path.write_bytes(plain)
            changed_cells(path, draw)
        else:
            path.write_bytes((changed_json if plain.startswith(b"{") else overwritten)(plain, draw))
        yield path


@pytest.mark.parametrize("name", FIXTURES)
def test_every_refusal_says_where_and_what_to_do(name: str, tmp_path: Path) -> None:
    refused: list[HespasError] = []
    for path in damaged(name, tmp_path):
        try:
            api.read(path)
        except (FormatError, UnsupportedError) as error:
            refused.append(error)
    assert refused
    assert [str(each) for each in refused if not (each.path and each.position and each.hint)] == []
