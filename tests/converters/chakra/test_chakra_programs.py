"""Every program of the fixtures becomes traces that ASTRA-sim can run, and no work takes no time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hespas.api import convert
from hespas.converters.chakra.contract import AttributeFacts
from hespas.converters.chakra.wire.codec import read_columns
from hespas.graph import Diagnostics, Severity, Workload
from hespas.schemas.chakra.tables import NodeType
from hespas.validators.checker import check

pytest.importorskip("jaxlib")  # reads the programs

_ROOT = Path(__file__).parents[3]
_PROGRAMS = sorted(
    path
    for folder in ("stablehlo", "hlo", "binary")
    for path in (_ROOT / "fixtures" / folder).iterdir()
    if path.is_file() and "N1024" not in path.name
)
_LARGE = _ROOT / "fixtures" / "binary" / "llama_fsdp_tp_local_N1024.mlirbc"
_RESNET = _ROOT.parent / "shared" / "data" / "workloads" / "resnet_50_train_step_4_devices_1024_batch.mlir.gz"
_HARDWARE = "A100-SXM-40GB"


def _errors(*paths: Path) -> list[str]:
    found = check(paths, "astra-sim").violations
    return [f"{entry.code} {entry.message}" for entry in found if entry.severity is Severity.ERROR]


def test_there_are_programs() -> None:
    assert len(_PROGRAMS) > 70


@pytest.mark.parametrize("program", _PROGRAMS, ids=[f"{path.parent.name}/{path.name}" for path in _PROGRAMS])
def test_converted_traces_can_be_simulated(program: Path, tmp_path: Path) -> None:
    convert(program, tmp_path / "out", target_format="chakra", hardware=_HARDWARE)
    assert _errors(tmp_path / "out") == []


def test_a_thousand_ranks_can_be_simulated(tmp_path: Path) -> None:
    done = convert(_LARGE, tmp_path / "out", target_format="chakra", hardware=_HARDWARE)
    assert isinstance(done.value, Workload)
    assert done.value.num_ranks == 1024
    assert _errors(tmp_path / "out") == []


def test_ranks_of_a_thousand_can_be_checked_alone(tmp_path: Path) -> None:
    """Find no error in the trace of one rank but that the other ranks are not here."""
    for rank in (0, 517):
        convert(_LARGE, tmp_path / f"{rank}.et", ranks=range(rank, rank + 1), hardware=_HARDWARE)
    absent = "ET022 only 1 of 1,024 ranks are given: ASTRA-sim runs whole jobs only"
    assert _errors(tmp_path / "0.et", tmp_path / "517.et") == [absent, absent]


@pytest.mark.skipif(not _RESNET.exists(), reason="the sample workloads are not here")
def test_no_work_of_a_training_step_takes_no_time(tmp_path: Path) -> None:
    convert(_RESNET, tmp_path / "out.et", ranks=range(1), hardware=_HARDWARE, granularity="op")
    columns = read_columns(tmp_path / "out.et", Diagnostics())
    facts = AttributeFacts.of(columns.attrs)
    works, timed = np.zeros(len(columns), np.bool_), columns.duration_micros > 0
    for name in ("num_ops", "tensor_size"):
        stated = facts.integers(name)
        works[stated.node[stated.value > 0]] = True
    nanos = facts.integers("duration_nanos")
    timed[nanos.node[nanos.value > 0]] = True
    works &= columns.type == NodeType.COMP
    assert int(works.sum()) > 5000
    assert not (works & ~timed).any()
