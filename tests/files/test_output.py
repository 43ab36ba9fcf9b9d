"""Atomic output: old, absent or complete, never partial; other files are unchanged."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from hespas.files import output
from hespas.files.output import after_placing, check_destination, exchange, place_together, write_atomically
from hespas.graph.errors import OutputError


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def _fill(path: Path) -> None:
    path.write_text("new")


def _fill_set(path: Path) -> None:
    path.mkdir()
    for rank in range(2):
        (path / f"job.{rank}.et").write_text(f"new {rank}")


def _fail(path: Path) -> None:
    path.write_text("half")
    raise RuntimeError("the writer broke")


def test_a_file_appears_with_its_size(tmp_path: Path) -> None:
    target = tmp_path / "out file ü.json"
    assert write_atomically(target, _fill, overwrite=False, directory=False) == 3
    assert target.read_text() == "new"
    assert _names(tmp_path) == [target.name]


def test_a_failing_writer_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="broke"):
        write_atomically(tmp_path / "out", _fail, overwrite=False, directory=False)
    assert _names(tmp_path) == []


def test_a_failing_writer_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")
    with pytest.raises(RuntimeError):
        write_atomically(tmp_path / "out", _fail, overwrite=True, directory=False)
    assert (tmp_path / "out").read_text() == "old"


def test_existing_output_needs_overwrite(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")
    with pytest.raises(OutputError, match="`overwrite`"):
        write_atomically(tmp_path / "out", _fill, overwrite=False, directory=False)
    write_atomically(tmp_path / "out", _fill, overwrite=True, directory=False)
    assert (tmp_path / "out").read_text() == "new"


def test_a_directory_appears_whole_and_replaces_only_an_empty_one_unasked(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert write_atomically(tmp_path / "out", _fill_set, overwrite=False, directory=True) == 10
    assert _names(tmp_path / "out") == ["job.0.et", "job.1.et"]
    with pytest.raises(OutputError, match="exists already"):
        write_atomically(tmp_path / "out", _fill_set, overwrite=False, directory=True)


def test_overwriting_a_directory_touches_only_its_own_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / "job.0.et").write_text("old")
    write_atomically(out, _fill_set, overwrite=True, directory=True)
    assert {name: (out / name).read_text() for name in _names(out)} == {
        "notes.txt": "mine",
        "job.0.et": "new 0",
        "job.1.et": "new 1",
    }


def test_rank_files_of_a_larger_set_are_not_mixed_with_the_new_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "job.7.et").write_text("old")
    with pytest.raises(OutputError, match=r"job\.7\.et"):
        write_atomically(out, _fill_set, overwrite=True, directory=True)
    assert _names(out) == ["job.7.et"]


def _no_exchange(one: Path, other: Path) -> bool:
    return one == other


@pytest.mark.parametrize("exchanges", [True, False])
def test_process_groups_of_the_replaced_set_go_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(output, "exchange", _no_exchange)
    out = tmp_path / "out"
    for old in ("job.0.et", "notes.json"):
        out.mkdir(exist_ok=True)
        (out / old).write_text("old")
        (out / "comm_group.json").write_text("old")
        write_atomically(out, _fill_set, overwrite=True, directory=True)
        if old == "job.0.et":  # of the set that is replaced
            assert _names(out) == ["job.0.et", "job.1.et"]
            for entry in out.iterdir():
                entry.unlink()
        else:
            assert _names(out) == ["comm_group.json", "job.0.et", "job.1.et", "notes.json"]
            assert (out / "comm_group.json").read_text() == "old"


def test_a_link_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_atomically(tmp_path / "link", _fill, overwrite=True, directory=False)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_file_does_not_replace_a_directory(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").write_text("old")
    with pytest.raises(OutputError, match="is a directory"):
        write_atomically(tmp_path / "out", _fill, overwrite=True, directory=False)
    assert (tmp_path / "out" / "kept").read_text() == "old"


def test_a_missing_folder_is_told_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="mkdir -p"):
        check_destination(tmp_path / "no" / "out", overwrite=False)


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    def no_space(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match="No space left"):
        write_atomically(tmp_path / "out", no_space, overwrite=False, directory=False)
    assert _names(tmp_path) == []


def _fill_many(path: Path) -> None:
    path.mkdir()
    for rank in range(40):
        (path / f"job.{rank}.et").write_bytes(bytes(rank))


def test_every_file_of_a_large_set_is_flushed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    flush = os.fsync

    def record(handle: int) -> None:
        flushed.append(os.fstat(handle).st_ino)
        flush(handle)

    monkeypatch.setattr(os, "fsync", record)
    size = write_atomically(tmp_path / "out", _fill_many, overwrite=False, directory=True)
    assert size == sum(range(40))
    inodes = {entry.stat().st_ino for entry in (tmp_path / "out").iterdir()}
    assert inodes <= set(flushed)
    assert len(flushed) == 40 + 2  # the folder itself, and the one it stands in


def test_a_file_of_a_large_set_that_cannot_be_flushed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int) -> None:
        if os.fstat(handle).st_size == 17:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OutputError, match="Input/output error"):
        write_atomically(tmp_path / "out", _fill_many, overwrite=False, directory=True)
    assert _names(tmp_path) == []


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_what_is_replaced_keeps_its_permissions(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")
    (tmp_path / "out").chmod(0o600)
    write_atomically(tmp_path / "out", _fill, overwrite=True, directory=False)
    assert (_mode(tmp_path / "out"), (tmp_path / "out").read_text()) == (0o600, "new")


def _cannot_exchange(one: Path, other: Path) -> bool:
    """As on a system that lacks the call."""
    del one, other
    return False


@pytest.mark.parametrize("atomic", [True, False])
def test_what_is_replaced_in_a_folder_keeps_its_permissions(
    atomic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not atomic:
        monkeypatch.setattr(output, "exchange", _cannot_exchange)
    out = tmp_path / "out"
    _fill_set(out)
    (out / "job.0.et").chmod(0o640)
    out.chmod(0o700)
    write_atomically(out, _fill_set, overwrite=True, directory=True)
    assert (_mode(out), _mode(out / "job.0.et")) == (0o700, 0o640)
    assert _mode(out / "job.1.et") != 0o640


def test_a_folder_that_holds_links_is_exchanged_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    _fill_set(out)
    (tmp_path / "elsewhere").mkdir()
    (out / "near").symlink_to("job.0.et")
    (out / "far").symlink_to("../elsewhere")
    (out / "broken").symlink_to("nowhere")

    def refuse(one: Path, other: Path) -> Path:
        raise AssertionError(f"{one} replaces {other} alone")

    monkeypatch.setattr(Path, "replace", refuse)
    write_atomically(out, _fill_set, overwrite=True, directory=True)
    assert {name: str((out / name).readlink()) for name in ("near", "far", "broken")} == {
        "near": "job.0.et",
        "far": "../elsewhere",
        "broken": "nowhere",
    }
    assert (out / "near").read_text() == "new 0"


def test_a_folder_that_holds_folders_is_refused_before_any_work(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _fill_set(out)
    (out / "plots").mkdir()
    (out / "plots" / "mine.png").write_text("mine")
    with pytest.raises(OutputError, match=r"contains folders.*plots"):
        check_destination(out, overwrite=True)
    with pytest.raises(OutputError, match=r"contains folders.*plots"):
        write_atomically(out, _fill_set, overwrite=True, directory=True)
    assert (out / "plots" / "mine.png").read_text() == "mine"


def test_a_file_that_comes_while_a_folder_is_exchanged_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    _fill_set(out)

    def late(one: Path, other: Path) -> bool:
        (out / "late.txt").write_text("mine")
        return exchange(one, other)

    monkeypatch.setattr(output, "exchange", late)
    write_atomically(out, _fill_set, overwrite=True, directory=True)
    assert (out / "late.txt").read_text() == "mine"


def test_what_is_no_file_is_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(OutputError, match="not a regular file"):
            write_atomically(tmp_path / name, _fill, overwrite=True, directory=False)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_names_that_lead_nowhere_are_told(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for name, why in (
        ("a", "symbolic links"),
        ("x" * 256, "too long"),
        ("t.{rank}.et", "stands for many files"),
    ):
        with pytest.raises(OutputError, match=why):
            check_destination(tmp_path / name, overwrite=True)


def test_several_ranks_do_not_replace_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")
    with pytest.raises(OutputError, match="several ranks need a folder") as caught:
        write_atomically(tmp_path / "out", _fill_set, overwrite=True, directory=True)
    assert "`ranks`" in (caught.value.hint or "")


def _together(write_all: Callable[[], None]) -> None:
    with place_together():
        write_all()


@pytest.mark.parametrize("linked", [True, False])
def test_results_go_back_where_one_of_them_cannot_be_placed(
    linked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not linked:
        monkeypatch.setattr(os, "link", _cannot_link)
    old, new, last = tmp_path / "old.csv", tmp_path / "new.csv", tmp_path / "last.csv"
    filled, fresh = tmp_path / "filled", tmp_path / "fresh"
    old.write_text("old")
    old.chmod(0o640)
    filled.mkdir()
    for name in ("job.0.et", "notes"):
        (filled / name).write_text("old")
    afterwards: list[str] = []

    def write_all() -> None:
        for file in (old, new, last):
            write_atomically(file, _fill, overwrite=True, directory=False)
        for folder in (filled, fresh):
            write_atomically(folder, _fill_set, overwrite=True, directory=True)
        after_placing(lambda: afterwards.append("done"))
        write_atomically(tmp_path / "taken", _fill, overwrite=True, directory=False)
        (tmp_path / "taken" / "of others").mkdir(parents=True)  # in the meantime

    with pytest.raises(OutputError, match="Is a directory"):
        _together(write_all)
    assert (old.read_text(), stat.S_IMODE(old.stat().st_mode)) == ("old", 0o640)
    assert {path.name: path.read_text() for path in filled.iterdir()} == {"job.0.et": "old", "notes": "old"}
    assert _names(tmp_path) == ["filled", "old.csv", "taken"]
    assert afterwards == []


def test_what_others_write_in_the_meantime_stays_where_results_go_back(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"

    def write_all() -> None:
        for file in (first, second):
            write_atomically(file, _fill, overwrite=False, directory=False)
        second.write_text("theirs")

    with pytest.raises(OutputError, match="another program has just written it"):
        _together(write_all)
    assert _names(tmp_path) == ["second"]
    assert second.read_text() == "theirs"


def test_what_waits_for_the_results_is_done_once_they_are_placed(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    with place_together():
        for name in ("a", "b"):
            write_atomically(tmp_path / name, _fill, overwrite=False, directory=False)
        after_placing(lambda: seen.append(_names(tmp_path)))
        assert seen == []
    assert len(seen) == 1
    assert {"a", "b"} <= set(seen[0])


def _cannot_link(*_: object, **__: object) -> None:
    raise OSError(1, "no hard links here")
