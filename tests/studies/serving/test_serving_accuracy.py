"""Measured runs of servers, made by the simulator itself, are found again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from hespas.api import Server
from hespas.cli.validate import app
from hespas.graph.errors import FormatError
from hespas.simulator.serving import SHARES, Correction, Requests, policy_of, serve
from hespas.simulator.serving.engine_parameters import EngineParameters, engine_parameters
from hespas.studies.serving import (
    EvaluatedRun,
    ServingPredictor,
    ServingRow,
    evaluate_runs,
    read_recorded,
    read_rows,
    replay_runs,
)
from hespas.studies.serving.curves import load_curves
from hespas.studies.serving.fit import (
    PRIORS,
    EngineFit,
    fit_engine,
    one_point,
    point_of,
)
from hespas.studies.serving.predict import MeanTimes, implied_rate
from hespas.studies.serving.rows import deployment_of, library_of

_HEAD = {
    "model_path": "meta-llama/Llama-3.1-8B-Instruct", "system": "h100_sxm", "backend": "vllm",
    "backend_version": "1", "precision": None, "mode": "agg", "isl": 256, "osl": 64, "tp_size": 1,
    "attention_dp_size": None, "moe_tp_size": 1, "moe_ep_size": 1, "batch_size": 4,
    "silicon_data_source": "", "split": "calib", "silicon_ttft_ms": 1.0, "silicon_tpot_ms": 1.0,
}  # fmt: skip


def _table(folder: Path, *changes: dict[str, object]) -> Path:
    path = folder / "runs.csv"
    pd.DataFrame([_HEAD | change for change in changes]).to_csv(path, index=False)
    return path


def _loads() -> list[dict[str, object]]:
    return [{"isl": isl, "batch_size": batch} for isl in (128, 1024) for batch in (1, 4, 16)]


@pytest.fixture(scope="module")
def predictor() -> ServingPredictor:
    return ServingPredictor()


def _measured(folder: Path, predictor: ServingPredictor, truth: Correction) -> list[ServingRow]:
    """Rows whose times are those of a stack that differs from its kernels as ``truth`` says."""
    rows: list[ServingRow] = []
    for row in read_rows(_table(folder, *_loads())):
        times = predictor.times(row, truth)
        assert isinstance(times, MeanTimes)
        rows.append(replace(row, ttft_ms=times.ttft_ms, tpot_ms=times.tpot_ms))
    return rows


def test_rows_say_what_was_served(tmp_path: Path) -> None:
    path = _table(
        tmp_path,
        {"silicon_data_source": "2026-03-25.csv; silicon_concurrency=48; x", "precision": "fp8"},
        {"model_path": "deepseek-ai/DeepSeek-R1", "precision": "fp4", "tp_size": 64, "moe_tp_size": 8,
         "moe_ep_size": 8},
        {"model_path": "deepseek-ai/DeepSeek-R1", "tp_size": 1, "attention_dp_size": 8, "moe_ep_size": 8},
        {"mode": "disagg"},
        {"model_path": "some/Other"}, {"system": "moon"},
        {"tp_size": 72, "moe_tp_size": 72},
    )  # fmt: skip
    first, twice, data, *others = read_rows(path)
    assert (first.concurrency, first.ratio, first.hardware) == (48, 0.8, "H100-SXM")
    assert first.step is not None
    assert (first.step.precision.matmul, first.step.cache) == ("f8E4M3FN", "f8E4M3FN")
    assert (twice.layout.tp, twice.layout.ep, twice.ranks) == (8, 8, 8)
    assert "degrees counted twice" in twice.assumed
    assert twice.step is not None
    assert (twice.step.precision.matmul, twice.step.experts) == ("bf16", "nvfp4")
    assert (data.layout.dp, data.layout.tp, data.concurrency, data.ratio) == (8, 1, 32, 1.0)
    for row, reason in zip(
        others,
        (
            "numbers of servers are not recorded",
            "unknown model",
            "unknown device",
            "tensor-parallel ranks",
        ),
        strict=True,
    ):
        assert reason in row.reason
        assert row.step is None
    (tmp_path / "other.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(FormatError, match="missing column model_path"):
        read_rows(tmp_path / "other.csv")


def test_speculative_tokens_are_a_column(tmp_path: Path, predictor: ServingPredictor) -> None:
    none, two = read_rows(_table(tmp_path, {"num_speculative_tokens": 0}, {"num_speculative_tokens": 2}))
    assert (none.launch.drafts, two.launch.drafts) == (0, 2)
    plain, guessed = (predictor.times(row, Correction()) for row in (none, two))
    assert isinstance(plain, MeanTimes)
    assert isinstance(guessed, MeanTimes)
    assert guessed.tpot_ms < plain.tpot_ms
    assert deployment_of(none) != deployment_of(two)


def test_separate_servers_are_predicted(tmp_path: Path, predictor: ServingPredictor) -> None:
    separate: dict[str, object] = {
        "mode": "disagg", "tp_size": None, "batch_size": None, "prefill_num_workers": 2, "prefill_tp_size": 1,
        "decode_num_workers": 1, "decode_batch_size": 6, "decode_tp_size": 2,
    }  # fmt: skip
    more: dict[str, object] = {**separate, "prefill_num_workers": 4, "decode_num_workers": 2}
    row, doubled, one = read_rows(_table(tmp_path, separate, more, {"batch_size": 6}))
    assert (row.ranks, row.servers, row.layout.tp, row.concurrency) == (4, 1, 2, 6)
    assert row.prefill is not None
    assert (row.prefill.servers, row.prefill.layout.tp) == (2, 1)
    (unknown,) = read_rows(_table(tmp_path, {**separate, "prefill_tp_size": None}))
    assert unknown.reason == "the source does not state prefill_tp_size"
    (short,) = read_rows(_table(tmp_path, {"osl": 1}))
    assert short.reason == "answers of one token have no time per output token"
    (split,) = read_rows(_table(tmp_path, {**separate, "prefill_tp_size": 3}))
    assert "3 tensor ranks" in str(predictor.steps(split))
    assert "concurrency" in row.assumed
    assert library_of(row) == "H100-SXM vllm disaggregated"
    assert library_of(one) == "H100-SXM vllm"
    times = [predictor.times(each, Correction()) for each in (row, doubled, one)]
    first, second, whole = (each for each in times if isinstance(each, MeanTimes))
    # twice the servers with twice the clients have the same times; no step has prompts and answers
    assert second == first
    assert first.tpot_ms < whole.tpot_ms
    wide: dict[str, object] = {
        "model_path": "deepseek-ai/DeepSeek-R1",
        "system": "gb200",
        "decode_tp_size": 16,
    }
    (large,) = read_rows(_table(tmp_path, separate | wide | {"prefill_tp_size": 4, "precision": "fp4"}))
    assert (large.reason, large.ranks) == ("", 24)


def test_a_fit_finds_what_a_stack_does(tmp_path: Path, predictor: ServingPredictor) -> None:
    truth = Correction(
        products=1.3, attention=1.1, others=1.2, step_ns=8e5, prompt_ns=3e6, request_ns=4e7, launch_ns=6e4
    )
    rows = _measured(tmp_path, predictor, truth)
    fitted = fit_engine(rows, predictor)
    assert fitted is not None
    assert fitted.rows == len(rows)
    errors = [
        EvaluatedRun(row=row, status="", predicted=_times(predictor, row, fitted.correction)) for row in rows
    ]
    assert max(abs(each.error("tpot")) for each in errors) < 0.04
    assert max(abs(each.error("ttft")) for each in errors) < 0.08
    assert fitted.correction.products > 1.1
    assert fitted.standard_errors["collectives"] == PRIORS["collectives"].scale  # one rank says nothing of it
    assert all(0 < fitted.standard_errors[name] <= PRIORS[name].scale for name in PRIORS)
    assert fitted.standard_errors["request_ns"] < 0.5 * PRIORS["request_ns"].scale
    plain = [EvaluatedRun(row=row, status="", predicted=_times(predictor, row, Correction())) for row in rows]
    assert min(abs(each.error("tpot")) for each in plain) > 0.1


def test_a_curve_has_the_loads_of_one_deployment_and_request_shape(
    tmp_path: Path, predictor: ServingPredictor
) -> None:
    rows = _measured(tmp_path, predictor, Correction())
    runs = [
        EvaluatedRun(row=row, status="predicted", predicted=_times(predictor, row, Correction()))
        for row in rows
    ]
    short, long = load_curves(runs)
    for chart, prompt in ((short, 128), (long, 1024)):
        measured, predicted = chart.series
        loads = [row for row in rows if row.prompt == prompt]
        assert (measured.label, predicted.label) == ("measured", "predicted")
        assert list(measured.y) == pytest.approx([row.tpot_ms * 1e6 for row in loads])
        rates = [implied_rate(row, MeanTimes(row.ttft_ms, row.tpot_ms)) for row in loads]
        assert list(measured.x) == pytest.approx(rates)
        assert list(predicted.x) == pytest.approx(rates)
        assert list(measured.texts)[-1] == "measured, 16 concurrent requests"
    assert list(load_curves(runs[:2])) == []


def _times(predictor: ServingPredictor, row: ServingRow, correction: Correction) -> MeanTimes:
    found = predictor.times(row, correction)
    assert isinstance(found, MeanTimes)
    return found


def test_one_point_comes_nearer_to_its_own_run(tmp_path: Path, predictor: ServingPredictor) -> None:
    truth = Correction(
        products=1.2, attention=1.2, collectives=1.2, others=1.2, request_ns=6e7, launch_ns=6e4
    )
    row = _measured(tmp_path, predictor, truth)[1]
    found = one_point(row, predictor)
    assert found is not None
    before, after = (_times(predictor, row, each) for each in (Correction(launch_ns=6e4), found))
    # half of what a run says is taken to be its own
    assert abs(after.ttft_ms - row.ttft_ms) < 0.6 * abs(before.ttft_ms - row.ttft_ms)
    assert abs(after.tpot_ms - row.tpot_ms) < 0.6 * abs(before.tpot_ms - row.tpot_ms)
    beside = one_point(row, predictor, truth)
    assert beside is not None
    assert beside.products == pytest.approx(1.2, rel=0.01)
    assert beside.request_ns == pytest.approx(6e7, rel=0.02)


def test_a_fit_to_one_run_starts_from_its_engine(tmp_path: Path, predictor: ServingPredictor) -> None:
    truth = {key: prior.at for key, prior in PRIORS.items()} | {"products": 1.5, "request_ns": 8e7}
    rows = _measured(tmp_path, predictor, Correction(**truth))
    prior = EngineParameters(name="H100-SXM vllm", rows=6, apart=0.2, parameters=truth)
    other = EngineParameters(name="H100-SXM sglang", rows=6, apart=0.2, parameters=truth)
    known, unknown = (
        evaluate_runs(rows, calibrate="one-per-deployment", predictor=predictor, priors={one.name: one})
        for one in (prior, other)
    )
    errors = [
        [abs(run.error("ttft")) for run in done.rows if run.status == "predicted"]
        for done in (known, unknown)
    ]
    assert len(errors[0]) == len(errors[1]) == 5
    assert max(errors[0]) < 0.01
    assert max(errors[1]) > 0.05


def test_runs_are_predicted_with_the_parameters_of_the_server(
    tmp_path: Path, predictor: ServingPredictor
) -> None:
    rows = read_rows(_table(tmp_path, *_loads()))
    done = evaluate_runs(rows, predictor=predictor)
    shipped, predicted = engine_parameters(), 0
    for row, found in zip(rows, done.rows, strict=True):
        if found.status == "predicted":
            server = Server(model=row.model, hardware=row.hardware, engine="vllm", tp=row.layout.tp)
            assert server.parameters(server.step()) == shipped["H100-SXM vllm"]
            assert found.predicted == predictor.times(row, shipped["H100-SXM vllm"].correction)
            predicted += 1
    assert predicted


def test_engines_of_the_package_have_all_parameters() -> None:
    shipped = engine_parameters()
    assert {"H100-SXM vllm", "H100-SXM sglang", "B200-SXM trtllm nvfp4 experts"} <= shipped.keys()
    for name, prior in shipped.items():
        assert prior.name == name
        assert prior.parameters.keys() == PRIORS.keys()
        for key, value in prior.parameters.items():
            assert PRIORS[key].low <= value <= PRIORS[key].high


def _two_releases(folder: Path, predictor: ServingPredictor, *truths: Correction) -> list[ServingRow]:
    """Six rows of each release, which differs from its kernels in its own way."""
    return [
        replace(row, release=f"{number}", row=row.row + 10 * number)
        for number, truth in enumerate(truths)
        for row in _measured(folder, predictor, truth)
    ]


@pytest.fixture(scope="module")
def releases(
    tmp_path_factory: pytest.TempPathFactory, predictor: ServingPredictor
) -> tuple[list[ServingRow], EngineFit]:
    """Rows of two releases whose products differ, and the fit of them."""
    truths = (Correction(products=1.1, launch_ns=6e4), Correction(products=1.6, launch_ns=6e4))
    rows = _two_releases(tmp_path_factory.mktemp("releases"), predictor, *truths)
    fitted = fit_engine(rows, predictor)
    assert fitted is not None
    return rows, fitted


def test_deployments_have_parameters_of_their_own(
    releases: tuple[list[ServingRow], EngineFit], predictor: ServingPredictor
) -> None:
    rows, fitted = releases
    assert len(fitted.deployments) == 2
    slow, fast = (fitted.deployments[deployment_of(row)].products for row in (rows[-1], rows[0]))
    assert fast < fitted.correction.products < slow
    judged = [replace(row, split="devval" if place % 3 == 1 else "calib") for place, row in enumerate(rows)]
    errors = {
        calibrate: max(
            abs(each.error("tpot"))
            for each in evaluate_runs(judged, calibrate=calibrate, split="devval", predictor=predictor).rows
        )
        for calibrate in ("stack", "stack-and-one", "stack-and-deployment")
    }
    assert errors["stack"] > 0.1
    assert max(errors["stack-and-deployment"], errors["stack-and-one"]) < 0.05


def test_a_point_is_trusted_as_far_as_points_were_right(
    tmp_path: Path, releases: tuple[list[ServingRow], EngineFit], predictor: ServingPredictor
) -> None:
    alike, fitted = releases
    assert fitted.apart <= 0.1
    # the middle run alone is off, so that it says nothing of its like
    middle = {point_of(alike[:6]).row, point_of(alike[6:]).row}
    plain = _two_releases(tmp_path, predictor, *[Correction(launch_ns=6e4)] * 2)
    unlike = [
        replace(row, ttft_ms=1.5 * row.ttft_ms, tpot_ms=1.5 * row.tpot_ms) if row.row in middle else row
        for row in plain
    ]
    apart = fit_engine(unlike, predictor)
    assert apart is not None
    assert apart.apart >= 0.8
    row = unlike[0]
    told = one_point(row, predictor, apart.correction, 1e3)
    assert told is not None
    assert told.products == pytest.approx(apart.correction.products, rel=1e-3)


def test_products_of_experts_are_a_share(tmp_path: Path, predictor: ServingPredictor) -> None:
    mixture, dense = read_rows(_table(tmp_path, {"model_path": "openai/gpt-oss-120b"}, {}))
    place = SHARES.index("experts")
    for row, has_experts in ((mixture, True), (dense, False)):
        steps = predictor.steps(row)
        assert not isinstance(steps, str)
        assert bool((steps.of_tokens[place] > 0).all()) is has_experts


def test_a_point_is_the_middle_of_the_loads(tmp_path: Path) -> None:
    changes: list[dict[str, object]] = [{"isl": isl, "batch_size": batch} for isl in (128, 256, 4096)
                                        for batch in (1, 8, 64)]  # fmt: skip
    rows = read_rows(_table(tmp_path, *changes))
    point = point_of(rows)
    assert (point.prompt, point.concurrency) == (256, 8)
    assert point_of(rows[::-1]) is point


def test_experts_of_another_format_are_other_kernels(tmp_path: Path) -> None:
    mixture: dict[str, object] = {"model_path": "openai/gpt-oss-120b", "precision": "fp4"}
    dense, experts = read_rows(_table(tmp_path, {}, mixture))
    assert library_of(dense) == "H100-SXM vllm"
    assert library_of(experts) == "H100-SXM vllm mxfp4 experts"


def test_rows_that_calibrate_are_not_judged(tmp_path: Path, predictor: ServingPredictor) -> None:
    rows = _measured(tmp_path, predictor, Correction(products=1.4, launch_ns=6e4))
    rows = [replace(row, split="devval" if place % 2 else "calib") for place, row in enumerate(rows)]
    judged = evaluate_runs(rows, calibrate="one-per-stack", predictor=predictor)
    states = [each.status for each in judged.rows]
    assert states.count("calibrating") == 1
    assert rows[states.index("calibrating")].split == "calib"
    fitted = evaluate_runs(rows, calibrate="stack", predictor=predictor)
    assert {each.row.split for each in fitted.rows if each.status == "calibrating"} == {"calib"}
    assert {each.row.split for each in fitted.rows if each.status == "predicted"} == {"devval"}
    whole = evaluate_runs(rows, calibrate="stack", split="devval", predictor=predictor)
    assert {each.row.split for each in whole.rows} == {"devval"}
    assert list(whole.fits) == ["H100-SXM vllm"]
    of = {(each.by, each.metric): each for each in whole.summaries() if each.by == "all"}
    assert of["all", "tpot"].n == 3
    assert of["all", "tpot"].median_ape < 0.03
    assert of["all", "tpot"].baseline_mean_ape > of["all", "tpot"].mean_ape


def test_a_rate_follows_from_both_times(tmp_path: Path) -> None:
    row = replace(read_rows(_table(tmp_path, {}))[0], concurrency=4, output=11, ratio=1.0)
    assert implied_rate(row, MeanTimes(100.0, 10.0)) == pytest.approx(4 * 11 / 0.2)


def test_weights_that_leave_no_room_are_told(tmp_path: Path, predictor: ServingPredictor) -> None:
    row = read_rows(_table(tmp_path, {"model_path": "Qwen/Qwen3-32B", "system": "l40s"}))[0]
    said = predictor.times(row, Correction())
    assert said == "the weights leave no memory for a KV cache in 1 x L40S"


def test_recorded_runs_are_found_again(tmp_path: Path, predictor: ServingPredictor) -> None:
    row = read_rows(_table(tmp_path, {}))[0]
    steps = predictor.steps(row)
    assert not isinstance(steps, str)
    generator = np.random.default_rng(1)
    requests = Requests(
        arrival_ns=np.sort(generator.uniform(0, 2e9, 60)),
        prompt=generator.integers(50, 500, 60),
        output=generator.integers(20, 200, 60),
    )
    truth = Correction(products=1.5, attention=1.5, collectives=1.5, others=1.5)
    run = serve(
        requests, steps.corrected(truth), policy_of("vllm", tokens=2048, sequences=16), cache_tokens=1e5
    )
    pd.DataFrame({
        "trace": "t", "queued_s": requests.arrival_ns / 1e9, "first_token_s": run.first_token_ns / 1e9,
        "last_token_s": run.last_token_ns / 1e9, "input_tokens": requests.prompt,
        "output_tokens": requests.output,
    }).to_csv(tmp_path / "requests.csv", index=False)  # fmt: skip
    pd.DataFrame([{
        "trace": "t", "accelerator": "H100-SXM", "model": "Llama-3.1-8B", "engine": "vLLM 0.19.0", "tp": 1,
        "precision": "bf16", "max_num_seqs": 16, "max_num_batched_tokens": 2048, "num_kv_tokens": 100_000,
    }]).to_csv(tmp_path / "recorded.csv", index=False)  # fmt: skip
    plain, calibrated = replay_runs(read_recorded(tmp_path / "recorded.csv", tmp_path / "requests.csv"))
    assert plain.tpot_error < -0.2
    assert abs(calibrated.tpot_error) < 0.02
    assert abs(calibrated.makespan_error) < 0.02
    document = tmp_path / "accuracy.json"
    done = CliRunner().invoke(
        app,
        ["serving", "--recorded", str(tmp_path / "recorded.csv"), str(tmp_path / "requests.csv"), "--table",
         str(_table(tmp_path, {"silicon_tpot_ms": 7.0}, {"mode": "disagg"})), "--json", str(document)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "1 of 2 runs are evaluated" in done.output
    found = json.loads(document.read_bytes())
    assert found["schema"] == "hespas.serving_accuracy/1"
    assert [each["calibrated"] for each in found["recorded"]] == [False, True]
    assert {each["metric"] for each in found["summary"]} == {"ttft", "tpot", "tokens_per_s"}
    assert CliRunner().invoke(app, ["serving"]).exit_code == 2
