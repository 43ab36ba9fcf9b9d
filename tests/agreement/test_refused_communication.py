"""A conversion reports the communication that it writes and the checker rejects."""

from __future__ import annotations

from pathlib import Path

import pytest

import hespas
from hespas.graph import (
    CollectiveKind,
    Diagnostics,
    GraphBuilder,
    NodeKind,
    OpClass,
    Severity,
    StridedGroups,
    Workload,
)
from tests.agreement.test_communication import MM, Work, inputs, recording

TWO_SHOT = "void at::two_shot_all_reduce_kernel<c10::BFloat16, 16>(P)"
REFUSED = "chakra.refused-communication"


def errors(folder: Path) -> set[str]:
    found = hespas.check(folder, profile="chakra").violations
    return {each.code for each in found if each.severity is Severity.ERROR}


def written(source: Path | Workload, folder: Path) -> Diagnostics:
    diagnostics = Diagnostics()
    hespas.convert(source, folder, target_format="chakra", diagnostics=diagnostics)
    return diagnostics


@pytest.mark.parametrize("shape", [(0, 512), ()])
def test_measured_collectives_without_bytes_become_work(shape: tuple[int, ...], tmp_path: Path) -> None:
    args = inputs(shape, values=("sum", "0")) if shape else {}
    talk: Work = ("symm_mem::two_shot_all_reduce_", TWO_SHOT, args, 12.0, 20)
    path = recording(tmp_path / "rank0.pt.trace.json", [MM, talk, MM])
    found = written(path, tmp_path / "et").counts()
    assert found["chakra.collective-as-work"] == 1
    assert REFUSED not in found
    assert not {"ET011", "ET012"} & errors(tmp_path / "et")


@pytest.mark.parametrize("size", [0.0, float("nan")])
def test_collectives_without_bytes_and_time_are_reported(size: float, tmp_path: Path) -> None:
    builder = GraphBuilder("job")
    node = builder.add_node(
        name_id=builder.strings.add("reduce"),
        op_id=builder.strings.add("reduce"),
        kind=NodeKind.COLLECTIVE,
        op_class=OpClass.COLLECTIVE,
    )
    everyone = builder.group_set(StridedGroups.all_ranks(2))
    builder.add_collective(node, CollectiveKind.ALL_REDUCE, group_set=everyone, comm_bytes=size)
    found = written(Workload.spmd(builder.build(), 2), tmp_path / "et")
    assert found.counts()[REFUSED] == 1
    assert {"ET011", "ET012"} & errors(tmp_path / "et")
