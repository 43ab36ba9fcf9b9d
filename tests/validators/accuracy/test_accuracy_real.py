"""Real recordings: the naive roofline has the error that an independent evaluation found."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from hespas import api
from hespas.fitting.statistics import ErrorSummary
from hespas.graph import OpClass, Profile, Workload
from hespas.validators.accuracy import Accuracy, accuracy

DATA = Path(__file__).parents[3].parent / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.exists(), reason="the shared data are not here")

TRACES = (
    "h100_bert-small_inf",
    "h100_qwen1.5-0.5b_inf",
    "h100_timesformer_inf",
    "mi300x_qwen1.5-0.5b_inf",
    "mi300x_sglang_qwen3-8b_prefill",
    "mi300x_timesformer_inf",
)


def _profile(path: Path) -> Profile:
    value = api.read(path)
    assert isinstance(value, Profile)
    return value


@cache
def _gpus() -> Accuracy:
    profiles = [_profile(DATA / "profiles" / f"{name}.json.gz") for name in TRACES]
    return accuracy(profiles, ["H100-SXM", "MI300X"])


def _errors(done: Accuracy, estimator: str, hardware: str, level: str, op_class: str = "all") -> ErrorSummary:
    [found] = [
        row.errors
        for row in done.summary
        if (row.estimator, row.hardware, row.level, row.op_class, row.size)
        == (estimator, hardware, level, op_class, "all")
    ]
    return found


@pytest.mark.parametrize(
    ("hardware", "instance", "shape", "median", "total"),
    [("H100-SXM", 0.52, 0.66, 0.67, -0.62), ("MI300X", 0.59, 0.70, 0.66, -0.63)],
)
def test_the_naive_roofline_is_as_wrong_as_it_was_found_to_be(
    hardware: str, instance: float, shape: float, median: float, total: float
) -> None:
    """Figures of an evaluation with other code: close, as its classes and dropped copies differ a little."""
    done = _gpus()
    assert _errors(done, "datasheet-roofline", hardware, "instance").mape == pytest.approx(instance, abs=0.03)
    assert _errors(done, "datasheet-roofline", hardware, "shape").mape == pytest.approx(shape, abs=0.02)
    assert _errors(done, "datasheet-roofline", hardware, "shape").median_ape == pytest.approx(
        median, abs=0.03
    )
    assert _errors(done, "datasheet-roofline", hardware, "instance").sum_error == pytest.approx(
        total, abs=0.02
    )
    products = _errors(done, "datasheet-roofline", hardware, "instance", "contraction")
    assert products.mape == pytest.approx({"H100-SXM": 0.44, "MI300X": 0.64}[hardware], abs=0.06)


@pytest.mark.parametrize("hardware", ["H100-SXM", "MI300X"])
def test_fitted_baselines_beat_the_naive_one_on_models_they_have_not_seen(hardware: str) -> None:
    done = _gpus()
    naive, line, by_class = (
        _errors(done, name, hardware, "shape")
        for name in ("datasheet-roofline", "one-efficiency", "overhead+two-efficiencies")
    )
    assert line.mape < naive.mape - 0.1
    assert by_class.median_ape < naive.median_ape - 0.25
    assert abs(line.bias) < abs(naive.bias) / 2


@pytest.mark.parametrize(("hardware", "median"), [("H100-SXM", 0.010), ("MI300X", 0.037)])
def test_the_noise_floor_is_the_noise_of_the_devices(hardware: str, median: float) -> None:
    """The evaluation gave coefficients of variation; the distance from the median is up to 0.8 of these."""
    found = _gpus().noise[hardware]
    assert found.n > 1000
    assert 0.4 * median < found.median_ape < 1.2 * median
    assert found.mape < 0.06


def test_speed_ups_between_the_two_devices() -> None:
    found = {row.estimator: row for row in _gpus().speed_ups}
    assert (found["datasheet-roofline"].hardware, found["datasheet-roofline"].other) == ("H100-SXM", "MI300X")
    assert 65 <= found["datasheet-roofline"].n <= 80
    assert found["datasheet-roofline"].sign == pytest.approx(0.53, abs=0.05)
    assert found["datasheet-roofline"].sign_long == pytest.approx(0.65, abs=0.08)
    assert found["overhead+two-efficiencies"].sign > found["datasheet-roofline"].sign


def test_what_the_window_cut_off_is_told() -> None:
    found = {(each.source, each.code): each for each in _gpus().lint}
    assert found["h100_qwen1.5-0.5b_inf", "unlinked"].share == pytest.approx(0.301, abs=0.001)
    assert ("h100_timesformer_inf", "unlinked") not in found
    assert not any(code in ("physically-impossible", "overlap") for _, code in found)


def test_all_device_time_is_in_the_cases() -> None:
    done = _gpus()
    by_source = {cases.source: cases for cases in done.cases}
    for name in TRACES:
        profile = _profile(DATA / "profiles" / f"{name}.json.gz")
        measured = float(by_source[name].measured_ns.sum())
        assert measured <= float(profile.duration_ns.sum()) * (1 + 1e-12)
        assert measured == pytest.approx(float(profile.duration_ns.sum()), rel=0.002)


def test_a_program_of_jax_and_its_recording() -> None:
    pytest.importorskip("jaxlib")
    profile = _profile(DATA / "workloads" / "llama1.xplane.pb")
    program = api.read(DATA / "workloads" / "llama1.stablehlo.mlir.gz")
    assert isinstance(program, Workload)
    done = accuracy([profile], ["TPU-v4"], workload=program)
    [cases] = done.cases
    [(source, coverage)] = done.coverage.items()
    assert source.startswith("llama1.xplane (recorded on ")
    assert coverage.time_share == 1.0
    assert int(OpClass.FUSION) not in cases.op_class
    assert set(cases.repeats.tolist()) == {5}
    [span] = [run for run in done.end_to_end if run.basis == "span"]
    assert float(cases.measured_ns.sum()) < span.measured_ns < 2 * float(cases.measured_ns.sum())


def test_without_a_program_the_recording_brings_its_own() -> None:
    pytest.importorskip("jaxlib")
    done = accuracy([_profile(DATA / "workloads" / "llama1.xplane.pb")], ["TPU-v4"])
    [cases] = done.cases
    assert (len(cases), cases.workload) == (205, "jit_step")
    assert done.coverage[cases.source].by_rule.keys() == {"instruction"}
