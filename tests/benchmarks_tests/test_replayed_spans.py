"""Simulated spans of the fixture profiles, and the comparison with measured spans."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.replayed_spans import Replayed, main

DATA = Path(__file__).parents[2].parent / "shared" / "data" / "profiles"
FIXTURES = Path(__file__).parents[2] / "fixtures" / "profiles"


def test_every_fixture_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(FIXTURES)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 1 + sum(each.is_file() for each in FIXTURES.iterdir())
    assert all(row.endswith("valid") for row in rows[1:])


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        (Replayed("p", (100.0, 101.0, 99.0), (50.0, 50.0, 51.0), 3, ()), True),
        (Replayed("p", (100.0, 103.0, 99.0), (50.0, 50.0, 50.0), 3, ()), False),
        (Replayed("p", (100.0, 100.0, 100.0), (50.0, 48.0, 50.0), 3, ()), False),
        (Replayed("p", (100.0, 100.0, 100.0), (50.0, 50.0, 50.0), 3, ("ET011",)), False),
    ],
)
def test_what_is_kept(found: Replayed, kept: bool) -> None:
    assert found.is_kept is kept


@pytest.mark.skipif(not DATA.is_dir(), reason=f"the traces are not here: {DATA}")
def test_real_traces_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(DATA)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 15
    assert all(row.endswith("valid") for row in rows[1:])
