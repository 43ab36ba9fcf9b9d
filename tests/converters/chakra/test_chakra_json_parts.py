"""Folders of JSON rank files: one file per class, shares of the ranks, and resumed runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import hespas
from hespas.api.io import WriteSharding
from hespas.graph.errors import FormatError

SOURCE = Path(__file__).parents[3] / "fixtures" / "chakra" / "pipeline_2x2"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name.split(".", 1)[-1]: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, bytes]:
    hespas.convert(SOURCE, tmp_path / "expected", target_format="chakra")
    return content(tmp_path / "expected")


def test_one_file_per_class_holds_the_whole_job(tmp_path: Path, expected: dict[str, bytes]) -> None:
    hespas.convert(
        SOURCE, tmp_path / "some", target_format="chakra-json", parts=WriteSharding(only_classes=True)
    )
    assert {"0.json", "2.json"} == set(content(tmp_path / "some")) - {"json"}
    hespas.convert(tmp_path / "some", tmp_path / "all", target_format="chakra")
    assert content(tmp_path / "all") == expected


def test_shares_make_the_whole_job(tmp_path: Path, expected: dict[str, bytes]) -> None:
    folder = tmp_path / "shares"
    hespas.convert(SOURCE, folder, target_format="chakra-json", parts=WriteSharding(shard=(1, 2)))
    with pytest.raises(FormatError, match="has not been written yet"):
        hespas.read(folder)
    hespas.convert(SOURCE, folder, target_format="chakra-json", parts=WriteSharding(shard=(2, 2)))
    hespas.convert(folder, tmp_path / "all", target_format="chakra")
    assert content(tmp_path / "all") == expected


def test_a_resumable_run_writes_the_same_files(tmp_path: Path) -> None:
    for name, resume in (("plain", False), ("resumable", True)):
        hespas.convert(
            SOURCE, tmp_path / name, target_format="chakra-json", parts=WriteSharding(resume=resume)
        )
    assert content(tmp_path / "plain") == content(tmp_path / "resumable")
