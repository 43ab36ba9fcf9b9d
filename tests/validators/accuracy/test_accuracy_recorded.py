"""Folders of PyTorch traces: each rank is simulated and compared with the steps of its own recording."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hespas.graph import Workload
from hespas.graph.passes import with_durations
from hespas.validators.accuracy import Accuracy, Thresholds, accuracy
from tests.converters.pytorch.test_pytorch_sets import device_time_ns, events_of, nanoseconds, union_ns
from tests.converters.pytorch.traces import (
    Json,
    absent,
    annotation,
    dlrm,
    host,
    kernel,
    launch,
    read_folder,
    write_kineto,
)

MM: Json = {"Input Dims": [[256, 256], [256, 256]], "Input type": ["float", "float"]}


def _step(number: int, at_us: float, length_us: float) -> list[Json]:
    """A step of one matrix product on stream 7, and half as long on stream 8 at the same time."""
    one, other = 10 * number, 10 * number + 1
    return [
        annotation(f"ProfilerStep#{number}", at_us, 90),
        host("aten::mm", at_us + 1, 8, one, MM),
        launch(at_us + 2, one),
        kernel("gemm", at_us + 20, length_us, one),
        host("aten::mm", at_us + 11, 8, other, MM),
        launch(at_us + 12, other),
        kernel("gemm", at_us + 20 + length_us / 2, length_us, other, stream=8),
    ]


def _folder(path: Path, *ranks: list[Json]) -> Path:
    path.mkdir()
    for number, events in enumerate(ranks):
        info = {"backend": "nccl", "rank": number, "world_size": len(ranks)}
        write_kineto(path / f"job.rank{number}.json", events, distributedInfo=info)
    return path


def _rows(done: Accuracy, basis: str, estimator: str = "roofline") -> list[tuple[float, float]]:
    return [
        (run.predicted_ns, run.measured_ns)
        for run in done.end_to_end
        if (run.basis, run.estimator) == (basis, estimator)
    ]


def test_each_rank_has_the_span_and_the_busy_time_of_its_steps(tmp_path: Path) -> None:
    ranks = [_step(1, 0, 10) + _step(2, 100, 10), _step(1, 0, 30) + _step(2, 100, 30)]
    workload, _ = read_folder(_folder(tmp_path / "job", *ranks))
    done = accuracy([workload], ["H100-SXM"], ["roofline"])
    assert [measured for _, measured in _rows(done, "span")] == [15_000.0, 45_000.0]
    assert [measured for _, measured in _rows(done, "busy")] == [15_000.0, 45_000.0]
    for (step, _), (total, _) in zip(_rows(done, "span"), _rows(done, "sum of operations"), strict=True):
        assert step == pytest.approx(total / 2)  # two steps were recorded; products share one stream
    assert {(each.span_ns, each.is_simulated) for each in done.steps.values()} == {
        (15_000.0, True),
        (45_000.0, True),
    }


def test_recorded_times_are_no_estimate_of_themselves(tmp_path: Path) -> None:
    """What nobody can estimate counts as unknown in the simulated step, and not with its recorded time."""
    unknown = [host("my::op", 30, 8, 7), launch(31, 7), kernel("mine", 60, 1000, 7)]
    workload, _ = read_folder(_folder(tmp_path / "job", _step(1, 0, 10) + unknown))
    done = accuracy([workload], ["H100-SXM"], ["roofline"])
    [(predicted, measured)] = _rows(done, "span")
    assert predicted < 20_000 < measured == 1_040_000
    assert all(run.is_lower_bound for run in done.end_to_end if run.basis in {"span", "busy"})


def test_a_step_past_the_limit_is_told(tmp_path: Path) -> None:
    workload, _ = read_folder(_folder(tmp_path / "job", _step(1, 0, 40)))
    done = accuracy([workload], ["H100-SXM"], ["roofline"])
    told = done.exceeded(Thresholds(max_mape=float("nan"), max_e2e=0.1, min_coverage=float("nan")))
    assert any("(span)" in sentence for sentence in told)


def test_calls_around_the_work_of_a_host_are_no_cases(tmp_path: Path) -> None:
    shapes: Json = {"Input Dims": [[64], [64, 64], [64, 64]], "Input type": ["float"] * 3}
    calls = [host("aten::linear", 0, 10, 1), host("aten::addmm", 1, 8, 2, shapes), host("aten::t", 9, 1, 3)]
    workload, _ = read_folder(_folder(tmp_path / "job", calls))
    done = accuracy([workload], ["H100-SXM"], ["roofline"])
    [cases] = done.cases
    assert cases.measured_ns.tolist() == [8000.0]
    assert cases.share == pytest.approx(0.8)
    assert [(measured, done.steps[cases.source].busy_ns) for _, measured in _rows(done, "span")] == [
        (10_000.0, 10_000.0)
    ]


def test_estimates_written_over_the_times_are_not_set_against_the_steps(tmp_path: Path) -> None:
    workload, _ = read_folder(_folder(tmp_path / "job", _step(1, 0, 10)))
    [graph] = workload.classes
    told = {each.code for each in accuracy([workload], ["H100-SXM"], ["roofline"]).diagnostics}
    assert "accuracy.times-changed" not in told
    estimated = Workload.spmd(with_durations(graph, np.full(len(graph), 77.0)), 1)
    done = accuracy([estimated], ["H100-SXM"], ["roofline"])
    assert "accuracy.times-changed" in {each.code for each in done.diagnostics}
    assert _rows(done, "span") == _rows(done, "busy") == []
    assert [measured for _, measured in _rows(done, "sum of operations")] == [154.0]


@absent
def test_ranks_of_a_real_job_have_the_times_of_their_traces() -> None:
    folder = dlrm()
    workload, _ = read_folder(folder)
    done = accuracy([workload], ["V100-SXM2-32GB"], ["roofline"])
    wanted = {"kernel", "gpu_memcpy", "gpu_memset"}
    expected: list[tuple[int, int]] = []
    for path in sorted(folder.rglob("worker*")):
        spans = [
            (nanoseconds(event["ts"]), nanoseconds(event["ts"]) + nanoseconds(event["dur"]))
            for event in events_of(path)
            if event.get("ph") == "X" and event.get("cat") in wanted
        ]
        assert len(spans) == device_time_ns(path)[0]
        expected.append((max(end for _, end in spans) - min(start for start, _ in spans), union_ns(spans)))
    found = [(round(each.span_ns), round(each.busy_ns)) for each in done.steps.values()]
    assert len(found) == 8
    for (span, busy), (whole, union) in zip(found, expected, strict=True):
        assert span <= whole
        assert busy <= union
        assert busy > 0.9 * union
    assert len(_rows(done, "span")) == len(_rows(done, "busy")) == 8
