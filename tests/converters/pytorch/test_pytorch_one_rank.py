"""The trace of one of several ranks: results are labelled, or represent all ranks on request."""

from __future__ import annotations

from pathlib import Path

import pytest

from hespas.api import convert
from hespas.converters import load_format
from hespas.converters.format import Format, ReadOptions
from hespas.converters.pytorch import FORMAT, FORMAT_ET
from hespas.graph import ABSENT, Diagnostics, Severity, Workload
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.validators.checker import check
from tests.converters.pytorch.traces import (
    Json,
    groups_node,
    host,
    kernel,
    launch,
    recorded,
    tensor,
    write_et,
    write_kineto,
)

SENT: Json = {
    "Collective name": "allreduce", "dtype": "Float", "In msg nelems": 16, "Out msg nelems": 16,
    "Group size": 4, "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2, 3]",
}  # fmt: skip


def _trace(folder: Path, facts: Json) -> Path:
    folder.mkdir()
    events = [
        host("c10d::allreduce_", 0, 9, 1),
        launch(2, 1),
        kernel("ncclDevKernel_AllReduce_Sum_f32", 20, 5, 1, facts),
    ]
    write_kineto(folder / "a.json", events, distributedInfo={"rank": 3, "world_size": 4})
    return folder


def _execution_trace(folder: Path, facts: Json) -> Path:
    """The one file of a rank, which nobody measured."""
    folder.mkdir()
    talk = recorded(10, (2, 2), [tensor(1, 16)], [tensor(1, 16)], {**SENT, "pg_name": "0", **facts})
    groups = groups_node({"pg_name": "0", "ranks": [], "group_size": 4})
    return write_et(folder / "job.rank3.json", [groups, talk])


def _read(path: Path, num_devices: int | None, form: Format = FORMAT) -> tuple[Workload, Diagnostics]:
    diagnostics = Diagnostics()
    assert form.read is not None
    value = form.read(path, ReadOptions(num_devices=num_devices), diagnostics)
    assert isinstance(value, Workload)
    return value, diagnostics


def _errors(path: Path) -> list[str]:
    found = check([path], profile="astra-sim")
    assert not found.unreadable
    return [each.code for each in found.violations if each.severity is Severity.ERROR]


def test_alone_it_is_no_job_and_says_so(tmp_path: Path) -> None:
    folder = _trace(tmp_path / "job", SENT)
    workload, found = _read(folder, None)
    assert (workload.rank_class.tolist(), workload.metadata["rank"]) == ([ABSENT, ABSENT, ABSENT, 0], "3")
    [told] = [each for each in found if each.code == "pytorch.one-rank"]
    assert told.severity is Severity.WARNING
    assert (
        "a simulator would wait forever for collectives and messages with them; `num_devices=4` replicates"
        in told.message
    )
    convert(folder, tmp_path / "out.et")
    again, _ = _read(tmp_path / "out.et", None, load_format("chakra"))
    assert again.rank_class.tolist() == workload.rank_class.tolist()
    assert not check([tmp_path / "out.et"]).inputs[0].complete


def test_on_request_all_ranks_do_what_it_did(tmp_path: Path) -> None:
    folder = _trace(tmp_path / "job", SENT)
    workload, found = _read(folder, 4)
    assert (workload.num_ranks, len(workload.classes)) == (4, 1)
    assert "pytorch.one-rank" not in found.counts()
    assert found.counts()["pytorch.one-rank-for-all"] == 1
    convert(folder, tmp_path / "out", target_format="chakra", num_devices=4)
    assert len(list((tmp_path / "out").glob("*.et"))) == 4
    assert _errors(tmp_path / "out") == []


@pytest.mark.parametrize("ranks", ["[1, 3]", "[0, 1, 2]"])
def test_what_it_did_with_some_ranks_only_is_not_what_all_do(ranks: str, tmp_path: Path) -> None:
    size = ranks.count(",") + 1
    folder = _trace(tmp_path / "job", {**SENT, "Process Group Ranks": ranks, "Group size": size})
    with pytest.raises(UnsupportedError, match="cannot represent 4 ranks"):
        _read(folder, 4)


@pytest.mark.parametrize("form", [FORMAT, FORMAT_ET], ids=lambda form: form.name)
def test_an_execution_trace_alone_is_no_job_either(form: Format, tmp_path: Path) -> None:
    file = _execution_trace(tmp_path / "job", {"collective_name": "allreduce"})
    path = file.parent if form is FORMAT else file
    alone, found = _read(path, None, form)
    assert alone.rank_class.tolist() == [ABSENT, ABSENT, ABSENT, 0]
    [told] = [each for each in found if each.code == "pytorch.one-rank"]
    assert "rank 3 of 4" in told.message
    assert "`num_devices=4` replicates" in told.message
    workload, found = _read(path, 4, form)
    assert (workload.num_ranks, len(workload.classes)) == (4, 1)
    assert found.counts()["pytorch.one-rank-for-all"] == 1


def test_where_all_cannot_do_the_same_that_is_no_advice(tmp_path: Path) -> None:
    folder = _trace(tmp_path / "job", {**SENT, "Process Group Ranks": "[1, 3]", "Group size": 2})
    _, found = _read(folder, None)
    [told] = [each for each in found if each.code == "pytorch.one-rank"]
    assert "num_devices" not in told.message
    assert "give the traces of all ranks" in told.message


def test_more_devices_than_any_job_has_are_refused_before_memory_is(tmp_path: Path) -> None:
    file = _execution_trace(tmp_path / "et", {"collective_name": "allreduce"})
    for path, form in ((_trace(tmp_path / "job", SENT), FORMAT), (file, FORMAT_ET)):
        with pytest.raises(UsageError, match="2,000,000,000 devices requested"):
            _read(path, 2_000_000_000, form)
