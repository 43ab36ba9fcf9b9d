"""Saved results: complete or absent, with a single writer."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from hespas.estimators.result_cache import ResultCache, content_key
from hespas.files.user_folders import cache_folder
from hespas.graph.errors import OutputError


class Answer(msgspec.Struct, frozen=True):
    value: float


def kept(folder: Path) -> ResultCache[Answer]:
    return ResultCache(folder, Answer)


def test_what_is_put_is_got_and_nothing_else(tmp_path: Path) -> None:
    cache = kept(tmp_path / "deep" / "er")
    key = content_key(("a", "b"))
    assert cache.get(key) is None
    cache.put(key, Answer(1.5))
    assert cache.get(key) == Answer(1.5)
    assert cache.get(content_key(("ab", ""))) is None
    assert [path.name for path in (tmp_path / "deep" / "er").rglob("*") if path.is_file()] == [f"{key}.json"]


@pytest.mark.parametrize("content", [b"", b'{"value":', b'{"value":"x"}', b"\xff\xfe", b" " * 2_000_000])
def test_a_file_that_cannot_be_read_counts_as_absent(tmp_path: Path, content: bytes) -> None:
    cache = kept(tmp_path)
    key = content_key(("a",))
    cache.put(key, Answer(1.0))
    (file,) = tmp_path.rglob("*.json")
    file.write_bytes(content)
    assert cache.get(key) is None
    cache.put(key, Answer(2.0))
    assert cache.get(key) == Answer(2.0)


def test_a_pipe_among_them_is_not_waited_for(tmp_path: Path) -> None:
    cache, key = kept(tmp_path), content_key(("a",))
    cache.put(key, Answer(1.0))
    (file,) = tmp_path.rglob("*.json")
    file.unlink()
    os.mkfifo(file)
    found: list[Answer | None] = []
    reader = Thread(target=lambda: found.append(cache.get(key)), daemon=True)
    reader.start()
    reader.join(5.0)
    assert found == [None]


def test_keys_differ_where_parts_are_cut_differently() -> None:
    assert content_key(("ab", "c")) != content_key(("a", "bc"))
    assert content_key(("a", "b")) == content_key(("a", "b"))


def test_the_folder_is_the_standard_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("compiled") == tmp_path / "hespas" / "compiled"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path.home() / ".cache" / "hespas"


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="results cannot be saved"):
        kept(tmp_path / "file").put(content_key(("a",)), Answer(1.0))


def test_only_one_works_and_the_lock_goes_with_it(tmp_path: Path) -> None:
    cache = kept(tmp_path)
    with cache.alone(1.0, 60.0):
        with pytest.raises(OutputError, match="another run holds the lock"), cache.alone(0.0, 60.0):
            pass
        assert (tmp_path / "lock").exists()
    assert not (tmp_path / "lock").exists()


def test_a_lock_left_behind_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("1 0")
    os.utime(tmp_path / "lock", (0, 0))
    with kept(tmp_path).alone(0.0, 60.0):
        assert (tmp_path / "lock").read_text().startswith(f"{os.getpid()} ")
    assert list(tmp_path.iterdir()) == []
