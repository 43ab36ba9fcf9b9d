"""Files that are equal except for groups and peers are decoded once, with unchanged results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hespas
from hespas.converters.chakra.peers import Groups, RankPeers
from hespas.converters.chakra.templates import FileTemplates
from hespas.graph import NodeKind, Permutation, StridedGroups, Workload
from hespas.graph.equality import workloads_equal
from hespas.graph.errors import FormatError
from tests.validators.checker.small_jobs import Steps

RANKS = 24


def job() -> Workload:
    """Three stages of 8 ranks in groups of 4; groups and ranks are numbers of one digit and of two."""
    stages = [Steps(RANKS) for _ in range(3)]
    near = StridedGroups(((RANKS // 4, 4),), ((4, 1),))
    far = StridedGroups(((3, 8), (4, 1)), ((2, 4),))
    ahead = Permutation(RANKS, (3, 8), 1, wraps=False)
    for number, steps in enumerate(stages):
        deps = [steps.message(NodeKind.RECV, [], ahead, tag=7)] if number else []
        here = steps.coll(steps.compute(*deps, ns=4000.0), groups=near)
        steps.coll(steps.coll(here, groups=far))
        if number < 2:
            steps.message(NodeKind.SEND, [here], ahead, tag=7)
    rank_class = np.repeat(np.arange(3, dtype=np.int32), 8)
    return Workload(name="job", classes=tuple(each.build() for each in stages), rank_class=rank_class)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hespas.write(job(), tmp_path / "job", format="chakra")
    return tmp_path / "job"


def read(folder: Path) -> Workload:
    found = hespas.read(folder)
    assert isinstance(found, Workload)
    return found


def test_the_job_is_the_one_of_files_that_are_all_decoded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = FileTemplates.find
    decoded: list[Path] = []

    def told(self: FileTemplates, path: Path, rank: int, groups: Groups) -> tuple[bytes, RankPeers] | None:
        found = find(self, path, rank, groups)
        decoded.extend([path] * (found is None))
        return found

    monkeypatch.setattr(FileTemplates, "find", told)
    quick = read(folder)
    assert len(decoded) <= 9  # of each stage, one per length

    def nothing(*_: object) -> None:
        return None

    monkeypatch.setattr(FileTemplates, "find", nothing)
    slow = read(folder)
    assert workloads_equal(quick, slow) == []
    assert len(quick.classes) == 3


def test_a_rank_that_another_file_was_copied_to_is_still_told(folder: Path) -> None:
    """Messages say who sends them: rank 1 with the file of rank 0."""
    (folder / "job.1.et").write_bytes((folder / "job.0.et").read_bytes())
    with pytest.raises(FormatError, match=r"comm_src is not the rank of this file, 1"):
        read(folder)


def test_a_group_that_is_not_listed_is_still_told(folder: Path) -> None:
    """Group 3 becomes 0, all ranks, which files state as an attribute: no file of the same class."""
    path = folder / "job.9.et"
    data = path.read_bytes()
    assert data.count(b"pg_name\xea\x01\x013") == 1
    path.write_bytes(data.replace(b"pg_name\xea\x01\x013", b"pg_name\xea\x01\x010"))
    assert len(read(folder).classes) == 4


def test_a_byte_that_is_no_value_makes_another_class(folder: Path) -> None:
    path = folder / "job.9.et"
    data = path.read_bytes()
    assert b"compute" in data
    path.write_bytes(data.replace(b"compute", b"comqute"))
    found = read(folder)
    assert len(found.classes) == 4
    assert found.classes[int(found.rank_class[9])].node_name(1) == "comqute"
