"""Notes on data that a recording lacks, with the option that records it."""

from __future__ import annotations

from pathlib import Path

import hespas
from tests.converters.pytorch.traces import Json, annotation, host, kernel, launch, write_kineto

SHAPES: Json = {"Input Dims": [[4, 8], [8, 2]], "Input type": ["float", "float"]}


def notes(path: Path) -> list[str]:
    return list(hespas.analyze(path).tables.notes)


def noted(path: Path, *words: str) -> bool:
    return any(all(word in text for word in words) for text in notes(path))


def test_shapes_modules_and_memory(tmp_path: Path) -> None:
    bare = [host("aten::mm", 0, 9), launch(1, 4), kernel("k", 20, 5, 4)]
    assert noted(write_kineto(tmp_path / "a.json", bare), "record_shapes=True")
    assert noted(tmp_path / "a.json", "with_stack=True", "profile_memory=True")
    module = {**annotation("nn.Module: Linear_0", 0, 10), "cat": "python_function"}
    described = [module, host("aten::mm", 0, 9, 0, SHAPES), launch(1, 4), kernel("k", 20, 5, 4)]
    path = write_kineto(tmp_path / "b.json", described)
    assert notes(path) == ["not recorded: memory (profile_memory=True)"]


def test_replays_of_graphs(tmp_path: Path) -> None:
    names = ("a", "b", "c", "d")
    replayed = [kernel(name, 20 + 10 * place, 5, 4) for place, name in enumerate(names)]
    events = [
        host("aten::mm", 0, 9, 0, SHAPES),
        launch(1, 3),
        kernel("k", 10, 5, 3),
        launch(30, 4),
        *replayed,
    ]
    text = next(each for each in notes(write_kineto(tmp_path / "t.json", events)) if "graphs" in each)
    assert text.startswith("80.0% of the device time was replayed")
    assert "`capture`" in text


def test_launches_and_ranks(tmp_path: Path) -> None:
    events = [host("aten::mm", 0, 9, 0, SHAPES), launch(1, 3), kernel("k", 10, 5, 3), kernel("k", 20, 5, 99)]
    path = write_kineto(tmp_path / "t.json", events, distributedInfo={"rank": 0, "world_size": 8})
    assert noted(path, "the launches of 50.0% of the device events are not recorded")
    assert noted(path, "one of 8 ranks")


def test_no_host_at_all(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "t.json", [kernel("k", 20, 5, 4)])
    assert noted(path, "no host operations were recorded")


def test_nothing_ran(tmp_path: Path) -> None:
    assert notes(write_kineto(tmp_path / "t.json", [host("aten::mm", 0, 9), launch(1, 3)])) == []
