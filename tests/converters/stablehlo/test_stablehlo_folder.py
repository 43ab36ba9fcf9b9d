"""Folders of programs: rank classes are written and read again, each with its ranks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.converters import load_format, sniff
from hespas.converters.format import ReadOptions, WriteOptions
from hespas.converters.stablehlo.reader import parsed_ranks, ranks_text
from hespas.graph import CollectiveKind, Diagnostics, ExplicitGroups, NodeKind, Workload
from hespas.graph.errors import FormatError, UnsupportedError
from tests.converters.stablehlo.steps import RANKS, Steps

pytest.importorskip("jaxlib")


def _job(rank_class: list[int]) -> Workload:
    """Pipeline stages: an operation, a collective of the stage, a message to the next rank."""
    graphs = [Steps() for _ in range(max(rank_class) + 1)]
    for number, steps in enumerate(graphs):
        ranks = tuple(rank for rank, each in enumerate(rank_class) if each == number)
        first = steps.op("negate", shape=(64,), flops=64 * (number + 1))
        steps.collective(CollectiveKind.ALL_REDUCE, deps=[first], groups=ExplicitGroups((ranks,)), shape=(8,))
        steps.message(NodeKind.PERMUTE, [(0, RANKS - 1)], deps=[first])
    classes = tuple(steps.graph() for steps in graphs)
    return Workload(name="job", classes=classes, rank_class=np.array(rank_class, np.int32))


def _written(workload: Workload, path: Path, ranks: range | None = None) -> Path:
    write = load_format("stablehlo").write
    assert write is not None
    write(workload, path, WriteOptions(name="job", directory=True, ranks=ranks), Diagnostics())
    return path


def _read(path: Path, found: Diagnostics | None = None) -> Workload:
    read = load_format("stablehlo").read
    assert read is not None
    value = read(path, ReadOptions(), Diagnostics() if found is None else found)
    assert isinstance(value, Workload)
    return value


@pytest.mark.parametrize("rank_class", [[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 2, 1], [2, 0, 1, 0]])
def test_a_folder_that_was_written_is_the_job_again(rank_class: list[int], tmp_path: Path) -> None:
    workload, found = _job(rank_class), Diagnostics()
    folder = _written(workload, tmp_path / "job")
    assert sniff(folder).name == "stablehlo"
    again = _read(folder, found)
    assert again.rank_class.tolist() == rank_class
    assert again.metadata["num_replicas"] == str(RANKS)
    assert found.counts() == {}
    for before, after in zip(workload.classes, again.classes, strict=True):
        assert float(after.flops.sum()) == float(before.flops.sum())
        assert after.collectives.comm_bytes.tolist() == [32.0]
        assert sorted(after.permutations[0]) == [(0, RANKS - 1)]


def test_more_classes_than_ten_keep_their_order(tmp_path: Path) -> None:
    order = [*range(12)]
    workload = _job(order)
    again = _read(_written(workload, tmp_path / "job"))
    assert again.rank_class.tolist() == order
    flops = [float(graph.flops.sum()) for graph in again.classes]
    assert flops == [float(graph.flops.sum()) for graph in workload.classes]


def test_ranks_whose_program_is_absent_do_nothing(tmp_path: Path) -> None:
    folder, found = _written(_job([0, 1, 2, 2]), tmp_path / "job", range(1, 3)), Diagnostics()
    again = _read(folder, found)
    assert again.rank_class.tolist() == [2, 0, 1, 1]
    assert len(again.classes[2]) == 0
    assert found.counts() == {"stablehlo.absent-ranks": 1}


def test_one_program_of_the_folder_says_whose_it_is(tmp_path: Path) -> None:
    folder = _written(_job([0, 1, 0, 1]), tmp_path / "job")
    alone = _read(folder / "job.1.mlir")
    assert alone.metadata["ranks"] == "1,3"
    assert alone.num_ranks == RANKS


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("0-2", "rank 1 also runs another program"),
        ("0-99", "it runs on rank 99, but the job has 4 ranks"),
        ("3-0", "is not a run of ranks"),
        ("0-16777216", "is not a run of ranks"),
        ("0-3/0", "is not a run of ranks"),
        ("", "is not a run of ranks"),
        ("x", "is not a run of ranks"),
        (r"\FF\00", "is not a run of ranks"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(ranks: str, message: str, tmp_path: Path) -> None:
    folder = _written(_job([0, 1, 0, 1]), tmp_path / "job")
    program = folder / "job.0.mlir"
    program.write_text(program.read_text().replace('"0,2"', f'"{ranks}"'))
    with pytest.raises(FormatError, match=message) as raised:
        _read(folder)
    assert raised.value.path is not None


@pytest.mark.parametrize("marks", ["5", "[1]", '"0-3"', "{}", "{ranks = 5}", "{ranks = [0, 1]}", "unit"])
def test_marks_that_are_not_ours_say_nothing(marks: str, tmp_path: Path) -> None:
    folder = _written(_job([0, 1, 0, 1]), tmp_path / "job")
    program = folder / "job.0.mlir"
    text = re.sub(r"hespas\.replay = \{[^}]*\}", f"hespas.replay = {marks}", program.read_text())
    program.write_text(text)
    assert "ranks" not in _read(program).metadata
    with pytest.raises(FormatError, match="ranks = ''"):
        _read(folder)


def test_a_folder_of_other_programs_is_not_taken_for_a_job(tmp_path: Path) -> None:
    folder = _written(_job([0, 1, 0, 1]), tmp_path / "job")
    (folder / "notes.txt").write_text("")
    with pytest.raises(UnsupportedError, match="do not show which ranks") as caught:
        _read(folder)
    assert caught.value.position == "file job.0.mlir"
    with pytest.raises(FormatError, match="no known format"):
        sniff(folder)
    (folder / "notes.txt").unlink()
    (folder / "job.0.mlir").write_text("func.func @main() { return }")
    with pytest.raises(FormatError, match="no known format"):
        sniff(folder)
    with pytest.raises(FormatError, match="ranks = ''"):
        _read(folder)


@given(st.sets(st.integers(0, 300), min_size=1))
def test_ranks_as_text_are_the_same_ranks(ranks: set[int]) -> None:
    assert parsed_ranks(ranks_text(np.array(sorted(ranks), np.int64))).tolist() == sorted(ranks)


def test_regular_ranks_are_one_run() -> None:
    assert ranks_text(np.arange(0, 65_536, 8)) == "0-65528/8"
    assert ranks_text(np.array([0, 1, 2, 3, 8, 10, 12, 14])) == "0-3,8-14/2"
    assert ranks_text(np.array([5, 9])) == "5,9"
