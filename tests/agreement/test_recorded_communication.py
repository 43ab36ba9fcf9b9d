"""Analysis and simulation of each recording of one rank agree with each other and with the raw file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import hespas
from hespas.graph import OpClass
from tests.agreement.cases import FIXTURES
from tests.agreement.raw_kineto import read_raw
from tests.agreement.test_communication import figures, inputs, simulated, workload
from tests.converters.pytorch.traces import Json, annotation, host, write_kineto

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
ONE_RANK = [
    *("profiles/h100_streams.xplane.pb", "profiles/tpu_v4_megacore.xplane.pb"),
    *("profiles/tpu_v4_megacore.trace.json.gz", "profiles/nsys_graph_trace.sqlite.gz"),
    *("profiles/nsys_sparse.sqlite.gz", "recorded/train-small.xplane.pb.gz"),
    *("graph_replay/decode_mi300x", "graph_replay/piecewise_h100"),
]
KINETO = [
    "profiles/ffn_train_rank0of2.pt.trace.json.gz",
    *(f"rescale/gloo{job}/kineto.{rank}.json.gz" for job in (2, 4, 8) for rank in (0, job - 1)),
]
CPU_JOBS = [f"gloo2_{name}.rank{rank}" for name in ("fsdp2", "coll", "ddp") for rank in (0, 1)]
SHARED_KINETO = [
    *(f"pytorch_cpu/{name}.kineto.json.gz" for name in (*CPU_JOBS, "nosched", "transformer2l")),
    "profiles/h100_bert-small_inf.json.gz",
    "profiles/mi300x_qwen1.5-0.5b_inf.json.gz",
    "profiles/h100_timesformer_inf.json.gz",
    "profiles/mi300x_sglang_qwen3-8b_prefill.json.gz",
]


def analyzed(path: Path) -> tuple[float, float, float]:
    whole = hespas.analyze(path).tables.breakdown.rows()[0]
    return whole.compute_ns, whole.communication_ns, whole.exposed_communication_ns


def check_against_file(path: Path) -> None:
    """Compare both accounts with interval unions of the file."""
    raw = read_raw(path)
    found = hespas.analyze(path).tables
    whole = found.breakdown.rows()[0]
    assert (whole.compute_ns, whole.communication_ns, whole.exposed_communication_ns) == figures(raw)
    done = hespas.simulate(path)
    (rank,) = json.loads(done.to_json())["ranks"]
    simulated = tuple(rank[name] for name in ("compute_ns", "comm_ns", "exposed_comm_ns", "finish_ns"))
    assert simulated == pytest.approx((*figures(raw), raw.span_ns), rel=1e-9)
    talks = np.isin(done.workload.classes[0].op_class, (OpClass.COLLECTIVE, OpClass.P2P))
    assert sum(row.count for row in found.collectives.rows()) == int(talks.sum())


@pytest.mark.parametrize("name", ONE_RANK)
def test_analysis_and_simulation_agree(name: str) -> None:
    assert simulated(FIXTURES / name) == pytest.approx(analyzed(FIXTURES / name), rel=1e-9)


@pytest.mark.parametrize("name", KINETO)
def test_fixtures_equal_their_files(name: str) -> None:
    check_against_file(FIXTURES / name)


@pytest.mark.parametrize("name", SHARED_KINETO)
def test_shared_recordings_equal_their_files(name: str) -> None:
    if not (SHARED / name).exists():
        pytest.skip("../shared/data is not here")
    check_against_file(SHARED / name)


def test_a_shared_recording_of_xla_agrees() -> None:
    path = SHARED / "profiles" / "mi300x_jax_conv3d.xplane.pb"
    if not path.exists():
        pytest.skip("../shared/data is not here")
    assert simulated(path) == pytest.approx(analyzed(path), rel=1e-9)


def nested(path: Path) -> Path:
    """Two steps with sharded parameters on a CPU: operations inside works of Gloo, calls inside operations
    that take time themselves, a work that starts before its call returns, one without a call, and a call
    that blocks.
    """
    events: list[Json] = []
    for step in range(2):
        at_us, first = 2000.0 * step, 100 * step
        tensor = inputs((64, 64))
        events += [
            host("FSDP::gather", at_us, 400, first + 1),
            host("aten::empty", at_us + 20, 30, first + 2, inputs((64, 64))),
            host("c10d::_allgather_base_", at_us + 100, 120, first + 3, inputs((128, 64), (64, 64))),
            annotation("gloo:all_gather", at_us + 150, 500, first + 4, tid=2),
            host("aten::copy_", at_us + 500, 60, first + 5, inputs((64, 64), (64, 64)), tid=2),
            host("aten::view", at_us + 510, 20, first + 6, tensor, tid=2),
            host("aten::linear", at_us + 600, 300, first + 7, inputs((64, 64), (64, 64))),
            host("aten::addmm", at_us + 640, 200, first + 8, inputs((64,), (64, 64), (64, 64))),
            host("c10d::_reduce_scatter_base_", at_us + 910, 30, first + 9, inputs((32, 64), (64, 64))),
            annotation("gloo:all_reduce", at_us + 950, 400, first + 10, tid=2),
            annotation("gloo:all_reduce", at_us + 1300, 100, first + 11, tid=3),
            host("aten::div_", at_us + 1000, 150, first + 12, tensor, tid=3),
            host("c10d::allreduce_", at_us + 1500, 90, first + 13, tensor),
            annotation("gloo:all_reduce", at_us + 1510, 100, first + 14),
            host("aten::add_", at_us + 1650, 100, first + 15, inputs((64, 64), (64, 64))),
        ]
    return write_kineto(path, events, distributedInfo={"rank": 0, "world_size": 2, "backend": "gloo"})


def test_operations_inside_communication_and_around_it(tmp_path: Path) -> None:
    path = nested(tmp_path / "rank0.pt.trace.json")
    raw = read_raw(path)
    assert 0 < raw.exposed_ns < raw.communication_ns
    assert analyzed(path) == figures(raw)
    assert simulated(path) == pytest.approx(figures(raw), rel=1e-9)
    traces = tmp_path / "et"
    hespas.convert(path, traces, target_format="chakra", num_devices=2)
    assert simulated(traces) == pytest.approx(figures(raw), rel=1e-9)
    for source in (path, traces):  # a communication of unknown size is work in a trace
        sizes = workload(source).classes[0].collectives.comm_bytes
        assert sizes[~np.isnan(sizes)].tolist() == [64 * 64 * 2] * 6
    assert sum(row.count for row in hespas.analyze(path).tables.collectives.rows()) == 8
