"""Files of many ranks: equal bytes for any writer, partition and interruption."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hespas
from hespas.api.io import WriteSharding
from hespas.converters import WriteOptions
from hespas.files.output import place_together
from hespas.graph import (
    CollectiveKind,
    GraphBuilder,
    NodeKind,
    OpClass,
    OpGraph,
    Permutation,
    StridedGroups,
    Workload,
)
from hespas.graph.errors import FormatError, HespasError, OutputError, UsageError

RANKS = 128


def stage(number: int, *, talks: bool = True, bytes_read: float = 64.0) -> OpGraph:
    """Work, an all-reduce over 8 ranks and, where it ``talks``, messages over the stages of 64 ranks."""
    b = GraphBuilder(f"stage{number}")
    row = b.strings.add("matmul")
    last = b.add_node(
        name_id=row, op_id=row, op_class=OpClass.CONTRACTION, flops=10.0 + number, bytes_read=bytes_read
    )
    reduced = b.add_node(
        name_id=row, op_id=row, op_class=OpClass.COLLECTIVE, kind=NodeKind.COLLECTIVE, data_deps=[last]
    )
    groups = b.group_set(StridedGroups.from_mesh([2, 8, 8], [2]))
    b.add_collective(reduced, CollectiveKind.ALL_REDUCE, group_set=groups, comm_bytes=4096)
    if talks:
        kind = NodeKind.RECV if number else NodeKind.SEND
        sent = b.add_node(name_id=row, op_id=row, op_class=OpClass.COLLECTIVE, kind=kind, data_deps=[reduced])
        onward = b.permutation(Permutation(RANKS, (2, 64), 1, wraps=False))
        b.add_p2p(sent, permutation=onward, comm_bytes=4096, tag=7)
    return b.build()


def pipeline(*, talks: bool = True, bytes_read: float = 64.0) -> Workload:
    classes = tuple(stage(number, talks=talks, bytes_read=bytes_read) for number in range(2))
    rank_class = np.repeat(np.arange(2, dtype=np.int32), RANKS // 2)
    return Workload(name="job", classes=classes, rank_class=rank_class)


def tree(folder: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in sorted(folder.iterdir())}


def put(
    workload: Workload, folder: Path, options: WriteOptions | None = None, *, overwrite: bool = False
) -> Path:
    settings = replace(options or WriteOptions(), name="job")
    hespas.write(workload, folder, format="chakra", options=settings, overwrite=overwrite)
    return folder


def others(folder: Path) -> list[str]:
    """Return the names of the other entries in the parent of a folder."""
    return sorted(entry.name for entry in folder.parent.iterdir() if entry != folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    return tree(put(pipeline(), tmp_path_factory.mktemp("whole") / "out"))


def test_threads_change_nothing(whole: Mapping[str, bytes], tmp_path: Path) -> None:
    assert len(whole) == RANKS + 1
    assert tree(put(pipeline(), tmp_path / "out", WriteOptions(jobs=4))) == whole


@pytest.mark.parametrize("suffix", ["", ".et.gz"])
def test_ranks_of_equal_traces_are_names_of_one_file(suffix: str, tmp_path: Path) -> None:
    workload = pipeline(talks=False)
    options = WriteOptions(name=f"job{suffix}", jobs=2, directory=True)
    if suffix:
        hespas.write(workload, tmp_path / "out.gz", format="chakra", options=replace(options, name="job.gz"))
        files = list((tmp_path / "out.gz").glob("*.gz"))
    else:
        files = list(put(workload, tmp_path / "out").glob("*.et"))
    assert len(files) == RANKS
    assert len({file.stat().st_ino for file in files}) == RANKS // 8  # a file per class and group


def test_messages_make_every_rank_a_file_of_its_own(tmp_path: Path) -> None:
    files = list(put(pipeline(), tmp_path / "out").glob("*.et"))
    assert len({file.stat().st_ino for file in files}) == RANKS


@pytest.mark.parametrize("number", [errno.EPERM, errno.EMLINK])
def test_where_no_links_can_be_made_copies_are(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked = tree(put(pipeline(talks=False), tmp_path / "linked"))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(os, "link", refuse)
    copied = put(pipeline(talks=False), tmp_path / "copied")
    assert tree(copied) == linked
    assert all(entry.stat().st_nlink == 1 for entry in copied.iterdir())


def test_a_link_that_fails_otherwise_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OutputError, match="no space"):
        put(pipeline(talks=False), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# --- Shares


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_shares_together_are_what_one_process_writes(
    order: tuple[int, ...], whole: Mapping[str, bytes], tmp_path: Path
) -> None:
    for number in order:
        put(pipeline(), tmp_path / "out", WriteOptions(shard=(number, 3)))
    assert tree(tmp_path / "out") == whole
    assert others(tmp_path / "out") == []


def test_shares_may_be_written_at_once(whole: Mapping[str, bytes], tmp_path: Path) -> None:
    def write(number: int) -> None:
        put(pipeline(), tmp_path / "out", WriteOptions(shard=(number, 16)))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(1, 17)))
    assert tree(tmp_path / "out") == whole
    assert others(tmp_path / "out") == []


def test_a_folder_with_shares_missing_says_so(tmp_path: Path) -> None:
    out = put(pipeline(), tmp_path / "out", WriteOptions(shard=(1, 2)))
    assert len(list(out.glob("*.et"))) == RANKS // 2
    with pytest.raises(FormatError, match="ranks 64-127 has not been written") as caught:
        hespas.read(out)
    assert caught.value.code == "ET022"


def test_shares_of_machines_without_a_common_folder_can_be_gathered(
    whole: Mapping[str, bytes], tmp_path: Path
) -> None:
    for number in (1, 2):
        put(pipeline(), tmp_path / f"machine{number}", WriteOptions(shard=(number, 2)))
    gathered = tmp_path / "machine1"
    for entry in (tmp_path / "machine2").iterdir():
        entry.replace(gathered / entry.name)
    assert {name: data for name, data in tree(gathered).items() if name in whole} == whole
    assert hespas.read(gathered) is not None


def test_a_share_joins_no_other_job_and_is_not_written_twice(tmp_path: Path) -> None:
    out = put(pipeline(), tmp_path / "out", WriteOptions(shard=(1, 2)))
    before = tree(out)
    with pytest.raises(OutputError, match="another job"):
        put(pipeline(bytes_read=65.0), out, WriteOptions(shard=(2, 2)))
    with pytest.raises(OutputError, match="already contains share 1 of 2"):
        put(pipeline(), out, WriteOptions(shard=(1, 2)))
    assert tree(out) == before
    put(pipeline(), out, WriteOptions(shard=(1, 2)), overwrite=True)
    assert tree(out) == before
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="no mark of share"):
        put(pipeline(), stranger, WriteOptions(shard=(1, 2)), overwrite=True)
    assert tree(stranger) == {"notes.txt": b"mine"}


def test_a_share_that_was_interrupted_while_it_joined_joins_again(
    whole: Mapping[str, bytes], tmp_path: Path
) -> None:
    out = put(pipeline(), tmp_path / "out", WriteOptions(shard=(1, 2)))
    (out / "job.64.et").write_bytes(whole["job.64.et"])  # the first file had been moved
    put(pipeline(), out, WriteOptions(shard=(2, 2)))
    assert tree(out) == whole


# --- Interrupted runs


class _StoppedError(Exception):
    pass


def stop_after(count: int) -> WriteOptions:
    def progress(done: int, _: int) -> None:
        if done >= count:
            raise _StoppedError

    return WriteOptions(resume=True, jobs=1, progress=progress)  # threads finish what they have begun


def interrupted(folder: Path, workload: Workload, count: int = 60) -> Path:
    """The folder that is left by a run that was stopped."""
    with pytest.raises(_StoppedError):
        put(workload, folder, stop_after(count))
    assert not folder.exists()
    (kept,) = folder.parent.glob(".*.kept.partial")
    return kept


def test_a_run_that_resumes_writes_only_what_is_missing(whole: Mapping[str, bytes], tmp_path: Path) -> None:
    kept = interrupted(tmp_path / "out", pipeline())
    inodes = {entry.name: entry.stat().st_ino for entry in kept.glob("*.et")}
    assert 0 < len(inodes) < RANKS
    (kept / "job.0.et").write_bytes(whole["job.0.et"][:50])  # it was being written
    (kept / ".1-ab-cdef0123.part").write_bytes(b"left")
    put(pipeline(), tmp_path / "out", WriteOptions(resume=True))
    assert tree(tmp_path / "out") == whole
    assert others(tmp_path / "out") == []
    same = {name for name, inode in inodes.items() if (tmp_path / "out" / name).stat().st_ino == inode}
    assert same == inodes.keys() - {"job.0.et"}


def test_links_and_packed_files_resume_too(tmp_path: Path) -> None:
    linked = tree(put(pipeline(talks=False), tmp_path / "whole"))
    kept = interrupted(tmp_path / "out", pipeline(talks=False), count=10)
    assert len(list(kept.glob("*.et"))) < RANKS
    put(pipeline(talks=False), tmp_path / "out", WriteOptions(resume=True, jobs=3))
    assert tree(tmp_path / "out") == linked
    packed = WriteOptions(name="job.gz", directory=True)
    hespas.write(pipeline(), tmp_path / "whole.gz", format="chakra", options=packed)
    with pytest.raises(_StoppedError):
        hespas.write(
            pipeline(), tmp_path / "out.gz", format="chakra", options=replace(stop_after(60), name="job.gz")
        )
    (kept,) = tmp_path.glob(".out.gz*.kept.partial")
    cut = next(iter(sorted(kept.glob("*.gz"))))
    cut.write_bytes(cut.read_bytes()[:-4])
    hespas.write(pipeline(), tmp_path / "out.gz", format="chakra", options=replace(packed, resume=True))
    assert tree(tmp_path / "out.gz") == tree(tmp_path / "whole.gz")


def test_what_was_kept_of_another_job_goes(tmp_path: Path) -> None:
    kept = interrupted(tmp_path / "out", pipeline(bytes_read=65.0))
    put(pipeline(), tmp_path / "elsewhere", WriteOptions(resume=True))
    assert kept.exists()
    put(pipeline(), tmp_path / "out", WriteOptions(resume=True))
    assert others(tmp_path / "out") == ["elsewhere"]


def test_a_share_that_resumes_goes_on_with_its_own(whole: Mapping[str, bytes], tmp_path: Path) -> None:
    with pytest.raises(_StoppedError):
        put(pipeline(), tmp_path / "out", replace(stop_after(1), shard=(2, 2)))
    (kept,) = tmp_path.glob(".*-2-of-2.kept.partial")
    put(pipeline(), tmp_path / "out", WriteOptions(resume=True, shard=(1, 2)))
    assert kept.exists()
    put(pipeline(), tmp_path / "out", WriteOptions(resume=True, shard=(2, 2)))
    assert tree(tmp_path / "out") == whole
    assert others(tmp_path / "out") == []


def test_two_runs_do_not_resume_the_same(tmp_path: Path) -> None:
    def progress(done: int, _: int) -> None:
        if done < RANKS:
            put(pipeline(), tmp_path / "out", WriteOptions(resume=True))

    with pytest.raises(OutputError, match="another process is writing this"):
        put(pipeline(), tmp_path / "out", WriteOptions(resume=True, progress=progress))


def test_a_command_that_fails_behind_it_keeps_what_is_written(
    whole: Mapping[str, bytes], tmp_path: Path
) -> None:
    def command() -> None:
        with place_together():
            put(pipeline(), tmp_path / "out", WriteOptions(resume=True))
            raise _StoppedError

    with pytest.raises(_StoppedError):
        command()
    (kept,) = tmp_path.iterdir()
    assert tree(kept) == whole
    inodes = {entry.name: entry.stat().st_ino for entry in kept.glob("*.et")}
    put(pipeline(), tmp_path / "out", WriteOptions(resume=True))
    assert {entry.name: entry.stat().st_ino for entry in (tmp_path / "out").glob("*.et")} == inodes
    assert others(tmp_path / "out") == []


def test_without_resume_nothing_is_kept(tmp_path: Path) -> None:
    with pytest.raises(_StoppedError):
        put(pipeline(), tmp_path / "out", replace(stop_after(60), resume=False))
    assert list(tmp_path.iterdir()) == []


# --- What cannot be


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (WriteOptions(shard=(0, 4)), "counted from 1 to 4"),
        (WriteOptions(shard=(5, 4)), "counted from 1 to 4"),
        (WriteOptions(shard=(1, RANKS + 1)), "some would be empty"),
        (WriteOptions(only_classes=True, shard=(1, 2)), "one file per rank class for all ranks"),
        (WriteOptions(only_classes=True, ranks=range(4)), "one file per rank class for all ranks"),
        (WriteOptions(shard=(1, 1), ranks=range(1)), "is the file of one rank"),
    ],
)
def test_parts_that_make_no_sense_are_refused(options: WriteOptions, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        put(pipeline(), tmp_path / "out", options)
    assert list(tmp_path.iterdir()) == []


def test_other_formats_have_no_parts(tmp_path: Path) -> None:
    with pytest.raises(HespasError, match="requires a format with one file per rank"):
        hespas.write(pipeline(), tmp_path / "job.opgraph.json", options=WriteOptions(resume=True))


def test_convert_takes_parts(whole: Mapping[str, bytes], tmp_path: Path) -> None:
    for number in (1, 2):
        parts = WriteSharding(shard=(number, 2))
        hespas.convert(pipeline(), tmp_path / "job", target_format="chakra", parts=parts)
    assert tree(tmp_path / "job") == whole
