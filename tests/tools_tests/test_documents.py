"""Commands that write documents: help and ``--check`` write nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import concepts, generate, recorded, roundtrip, schemas
from tools.documents import document_command

MAINS: tuple[Callable[[], object], ...] = (
    concepts.main,
    generate.main,
    recorded.main,
    roundtrip.main,
    schemas.main,
)


def test_what_has_changed_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, stale, absent = (tmp_path / name for name in ("kept.md", "stale.md", "absent.md"))
    kept.write_text("one", "utf-8")
    stale.write_text("two", "utf-8")
    documents = {kept: "one", stale: "three", absent: "four"}

    def run(*words: str) -> tuple[int, list[str]]:
        code = document_command("Makes them.", lambda: documents, words)
        return code, [line.rpartition(": ")[2] for line in capsys.readouterr().out.splitlines()]

    assert run("--check") == (1, ["unchanged", "stale", "stale"])
    assert stale.read_text("utf-8") == "two"
    assert not absent.exists()
    assert run() == (0, ["unchanged", "updated", "updated"])
    assert {path: path.read_text("utf-8") for path in documents} == documents
    assert run("--check") == (0, ["unchanged"] * 3)


@pytest.mark.parametrize("main", MAINS, ids=lambda main: main.__module__)
def test_help_makes_nothing(
    main: Callable[[], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def written(path: Path, *_: object, **__: object) -> int:
        raise AssertionError(f"{path} is written")

    monkeypatch.setattr(Path, "write_text", written)
    monkeypatch.setattr(sys, "argv", ["tool", "--help"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    assert "--check" in capsys.readouterr().out


def test_check_of_the_schemas_finds_a_stale_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["schemas", "--check"])
    assert schemas.main() == 0
    monkeypatch.setattr(schemas, "FOLDER", tmp_path)
    assert schemas.main() == 1
    assert not list(tmp_path.iterdir())
