"""The account of a conversion to StableHLO describes the written file."""

from __future__ import annotations

from math import isnan
from pathlib import Path

import numpy as np
import pytest

from hespas import api
from hespas.graph import CollectiveKind, Workload
from hespas.graph.passes import totals
from tests.converters.stablehlo.replays import FIXTURES
from tests.converters.stablehlo.steps import RANKS, Steps

pytest.importorskip("jaxlib")

LLAMA = FIXTURES / "stablehlo" / "llama_fsdp_tp_local_N8.mlir.gz"


def _stored(workload: Workload, folder: Path) -> Path:
    api.write(workload, folder / "graph.json", format="op-graph")
    return folder / "graph.json"


def test_the_account_of_a_replay_is_that_of_the_file(tmp_path: Path) -> None:
    api.convert(LLAMA, tmp_path / "trace", hardware="H100-SXM", target_format="chakra")
    account = api.convert(tmp_path / "trace", tmp_path / "replay.mlir").conservation
    assert account is not None
    assert account.before.device_time_ns > 0
    assert isnan(account.after.device_time_ns)
    again = api.read(tmp_path / "replay.mlir")
    assert isinstance(again, Workload)
    held = totals(again.classes[0])
    assert account.after.ops == 8 * held.ops > account.before.ops
    assert account.after.bytes_moved == 8 * held.bytes_moved > account.before.bytes_moved
    assert account.after.flops == 8 * held.flops == pytest.approx(account.before.flops, rel=0.01)
    assert account.after.collective_bytes == account.before.collective_bytes
    assert {"stablehlo.durations", "stablehlo.replay-bytes"} <= {each.reason for each in account.dropped}


def test_a_program_keeps_no_times_either(tmp_path: Path) -> None:
    account = api.convert(LLAMA, tmp_path / "same.mlir", hardware="H100-SXM").conservation
    assert account is not None
    assert account.before.flops == account.after.flops
    assert isnan(account.after.device_time_ns)
    assert {each.reason for each in account.dropped} >= {"stablehlo.durations"}


def test_an_exact_copy_needs_no_second_reading(tmp_path: Path) -> None:
    account = api.convert(LLAMA, tmp_path / "same.mlir").conservation
    assert account is not None
    assert account.dropped == ()
    assert account.after.bytes_moved == account.before.bytes_moved


def test_facts_about_the_job_that_no_program_holds_are_reported(tmp_path: Path) -> None:
    steps = Steps()
    steps.op("negate", shape=(64,), flops=64)
    facts = {"format": "op-graph", "model": "llama", "num_partitions": "1"}
    source = _stored(Workload.spmd(steps.graph(), RANKS, facts), tmp_path)
    found = api.convert(source, tmp_path / "a.mlir").diagnostics
    assert [each.message for each in found if each.code == "stablehlo.metadata"] == [
        "metadata is not in a StableHLO program: model"
    ]


def test_the_producer_of_bytecode_is_not_in_its_text(tmp_path: Path) -> None:
    program = FIXTURES / "binary" / "llama_fsdp_tp_local_N8.mlirbc"
    same = api.convert(program, tmp_path / "same.mlirbc").diagnostics
    assert "stablehlo.metadata" not in same.counts()
    text = api.convert(program, tmp_path / "text.mlir").diagnostics
    assert text.counts()["stablehlo.metadata"] == 1


def test_payloads_that_are_made_up_are_in_the_account(tmp_path: Path) -> None:
    steps = Steps()
    steps.collective(CollectiveKind.ALL_TO_ALL, size=1001.0)
    source = _stored(Workload.spmd(steps.graph(), RANKS), tmp_path)
    account = api.convert(source, tmp_path / "a.mlir").conservation
    assert account is not None
    assert (account.before.collective_bytes, account.after.collective_bytes) == (4004.0, 4016.0)


@pytest.mark.parametrize("ranks", [None, range(1, 3)])
def test_the_account_of_a_folder_sums_its_programs(ranks: range | None, tmp_path: Path) -> None:
    one, two = Steps(), Steps()
    one.op("negate", shape=(64,), flops=64)
    two.op("negate", shape=(64,), flops=64)
    two.op("mystery", flops=1e6, deps=[0])
    classes = (one.graph(), two.graph())
    job = Workload(name="job", classes=classes, rank_class=np.array([0, 1, 1, 1], np.int32))
    job_ranks = range(RANKS) if ranks is None else ranks
    done = api.convert(_stored(job, tmp_path), tmp_path / "out", target_format="stablehlo", ranks=ranks)
    account = done.conservation
    assert account is not None
    assert account.num_ranks == len(job_ranks)
    assert account.after.flops == pytest.approx(account.before.flops, rel=0.01)
    assert account.after.ops > account.before.ops
