"""Round trips of real traces and programs: every file of the corpus, through the common formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from hespas import api
from hespas.validators.roundtrip import ColumnStatus, roundtrip

ROOT = Path(__file__).parents[3]
DATA = ROOT.parent / "shared" / "data"
TRACES = sorted(path for path in (DATA / "astra_oracle").glob("*/") if list(path.glob("*.et")))
PROGRAMS = sorted((DATA / "workloads").glob("*.mlir.gz")) + sorted((DATA / "workloads").glob("*.hlo.txt.gz"))

absent = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not here")


def rank_files(folder: Path) -> dict[str, bytes]:
    """The content of each rank file, by rank."""
    return {path.name.split(".")[-2]: path.read_bytes() for path in folder.glob("*.et")}


@absent
@pytest.mark.parametrize("form", ["graph.json", "graph.arrow"])
@pytest.mark.parametrize("folder", TRACES, ids=lambda path: path.name)
def test_traces_of_a_simulator_come_back_byte_for_byte(folder: Path, form: str, tmp_path: Path) -> None:
    api.convert(folder, tmp_path / form)
    api.convert(tmp_path / form, tmp_path / "back")
    assert rank_files(tmp_path / "back") == rank_files(folder)


@absent
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_programs_lose_nothing_unreported(program: Path) -> None:
    done = roundtrip([program], ["op-graph", "op-graph-arrow", "chakra"])
    assert [(cell.source, cell.via, cell.unreported) for cell in done.cells if cell.unreported] == []
    exact = [cell for cell in done.cells if cell.via in {"op-graph", "op-graph-arrow"}]
    assert {each.kept for cell in exact for each in cell.columns} <= {ColumnStatus.EXACT, ColumnStatus.ABSENT}
