"""Traces of a pipeline that no writer of ours made: valid, simulated, and the same bytes after a way through
other formats.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fixtures.make import pipeline
from hespas import api
from hespas.cli import main, validate
from hespas.graph import Workload

FOLDER = pipeline.FOLDER


def test_the_traces_are_what_their_script_makes() -> None:
    for rank, data in pipeline.ranks().items():
        assert (FOLDER / f"pipeline.{rank}.et").read_bytes() == data


def test_ranks_of_a_stage_are_one_class() -> None:
    workload = api.read(FOLDER)
    assert isinstance(workload, Workload)
    assert workload.rank_class.tolist() == [0, 0, 1, 1]
    assert [len(graph) for graph in workload.classes] == [9, 9]


@pytest.mark.parametrize("form", ["graph.json", "graph.arrow", "again"])
def test_they_come_back_byte_for_byte(form: str, tmp_path: Path) -> None:
    api.convert(FOLDER, tmp_path / form, target_format="chakra-json" if form == "again" else None)
    api.convert(tmp_path / form, tmp_path / "back")
    back = {path.name.split(".")[-2]: path.read_bytes() for path in (tmp_path / "back").glob("*.et")}
    assert back == {str(rank): data for rank, data in pipeline.ranks().items()}


def test_they_are_valid_and_take_their_computation_and_what_is_exposed(tmp_path: Path) -> None:
    done = CliRunner().invoke(validate.app, ["check", str(FOLDER), "--profile", "astra-sim"])
    assert done.exit_code == 0, done.output
    words = ["simulate", str(FOLDER), "--hardware", "H100-SXM", "--json", str(tmp_path / "s.json")]
    done = CliRunner().invoke(main.app, words)
    assert done.exit_code == 0, done.output
    ranks = json.loads((tmp_path / "s.json").read_text())["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
    for rank in ranks:
        assert rank["compute_ns"] == pytest.approx(600_000)  # two microbatches, 100 us there and 200 us back
        waits = rank["collective_wait_ns"] + rank["message_wait_ns"]
        assert rank["finish_ns"] == pytest.approx(600_000 + rank["exposed_comm_ns"] + waits)
        assert 0 < rank["exposed_comm_ns"] < rank["comm_ns"]
