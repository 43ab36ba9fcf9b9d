"""Recorded runs: compared figures, and tables without runs."""

from __future__ import annotations

import json
import warnings
from math import isnan
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from hespas.cli.validate import app
from hespas.graph import Diagnostics
from hespas.studies.serving import RunReplay, read_recorded, replay_runs
from hespas.studies.serving.predict import capacity_of

_RUN: dict[str, object] = {
    "trace": "t", "accelerator": "H100-SXM", "model": "Llama-3.1-8B", "engine": "vLLM 0.19.0", "tp": 1,
    "precision": "bf16", "max_num_seqs": 8, "max_num_batched_tokens": 512, "num_kv_tokens": 10_000,
}  # fmt: skip
_COUNT = 10


def _requests(**changes: object) -> pd.DataFrame:
    """Ten requests, one after another, the first two of which are the fifth that is done first."""
    queued = np.arange(_COUNT) * 0.1
    columns: dict[str, object] = {
        "trace": "t", "queued_s": queued, "first_token_s": queued + 0.02, "last_token_s": queued + 0.1,
        "input_tokens": 64, "output_tokens": 9,
    }  # fmt: skip
    return pd.DataFrame(columns | changes)


def _tables(folder: Path, requests: pd.DataFrame, *runs: dict[str, object]) -> tuple[Path, Path]:
    paths = folder / "runs.csv", folder / "requests.csv"
    pd.DataFrame([_RUN | run for run in runs or ({},)]).to_csv(paths[0], index=False)
    requests.to_csv(paths[1], index=False)
    return paths


def _replays(folder: Path, requests: pd.DataFrame, *runs: dict[str, object]) -> list[RunReplay]:
    return replay_runs(read_recorded(*_tables(folder, requests, *runs)))


def _validate(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["serving", "--recorded", *map(str, arguments)])


def test_requests_that_calibrate_are_not_compared(tmp_path: Path) -> None:
    """What the first fifth was measured to take moves the calibration, and is part of no error."""
    plain, calibrated = _replays(tmp_path, _requests())
    assert (plain.requests, calibrated.requests) == (8, 8)
    slow = _requests()
    slow.loc[:1, "first_token_s"] -= 0.01  # times per token of the first two, a seventh longer
    moved, recalibrated = _replays(tmp_path, slow)
    percentiles = (f"{name}_{of}_error" for name in ("ttft", "tpot") for of in ("p50", "p90", "p99"))
    means = ("ttft_error", "tpot_error", "latency_error", "makespan_error", "tokens_per_s_error")
    for name in (*means, *percentiles):
        assert getattr(moved, name) == getattr(plain, name)
    assert recalibrated.tpot_error > calibrated.tpot_error + 0.1


def test_answers_of_one_token_have_no_time_per_token(tmp_path: Path) -> None:
    some = _requests(output_tokens=[9, 9, 9, 1, 9, 9, 9, 9, 9, 9])
    diagnostics = Diagnostics()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(np.isfinite(each.tpot_error) for each in _replays(tmp_path, some))
        none = read_recorded(*_tables(tmp_path, _requests(output_tokens=1)))
        (plain,) = replay_runs(none, diagnostics=diagnostics)
    assert isnan(plain.tpot_error)
    assert np.isfinite(plain.ttft_error)
    assert [each.code for each in diagnostics] == ["serving.uncalibrated"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"engine": "TGI 3"}, "unknown serving engine"),
        ({"accelerator": "moon"}, "moon"),
        ({"model": "none"}, "none"),
        ({"precision": "fp7"}, "fp7"),
        ({"num_kv_tokens": 16}, "does not fit into a cache"),
    ],
)
def test_a_run_that_cannot_be_repeated_is_left_out_and_said(
    change: dict[str, object], reason: str, tmp_path: Path
) -> None:
    diagnostics = Diagnostics()
    both = pd.concat([_requests(), _requests(trace="u")])
    runs = read_recorded(*_tables(tmp_path, both, {}, {"trace": "u"} | change))
    assert [each.trace for each in replay_runs(runs, diagnostics=diagnostics)] == ["t", "t"]
    (found,) = diagnostics
    assert (found.code, found.location) == ("serving.not-repeated", "u")
    assert reason in found.message


def test_requests_of_no_run_are_counted(tmp_path: Path) -> None:
    diagnostics = Diagnostics()
    both = pd.concat([_requests(), _requests(trace="u")])
    assert len(read_recorded(*_tables(tmp_path, both), diagnostics=diagnostics)) == 1
    assert [each.code for each in diagnostics] == ["serving.other-requests"]
    assert diagnostics.counts() == {"serving.other-requests": _COUNT}


@pytest.mark.parametrize(
    ("run", "requests", "place"),
    [
        ({"tp": "x"}, {}, "runs.csv: row 0, column tp"),
        ({"tp": None}, {}, "runs.csv: row 0, column tp"),
        ({"trace": "other"}, {}, "column trace"),
        ({"max_num_seqs": 0}, {}, "runs.csv: row 0, column max_num_seqs"),
        ({}, {"output_tokens": 0}, "requests.csv: row 0, column output_tokens"),
        ({}, {"first_token_s": "soon"}, "requests.csv: row 0, column first_token_s"),
        ({}, {"last_token_s": 0.001}, "requests.csv: row 0, column last_token_s"),
        ({}, {"last_token_s": 1e308}, "requests.csv: row 0, column last_token_s"),
        ({}, {"queued_s": None}, "requests.csv: row 0, column queued_s"),
    ],
)
def test_a_malformed_cell_is_told_with_its_place(
    run: dict[str, object], requests: dict[str, object], place: str, tmp_path: Path
) -> None:
    done = _validate(*_tables(tmp_path, _requests(**requests), run))
    assert done.exit_code == 3, done.output
    assert place in done.output
    assert "try:" in done.output


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "the file is empty"),
        (b"\xff\xfe\x00\x01binary", "not a table"),
        (b"a,b\n1,2\n", "missing column trace"),
    ],
)
def test_what_is_no_table(which: int, content: bytes, text: str, tmp_path: Path) -> None:
    paths = _tables(tmp_path, _requests())
    paths[which].write_bytes(content)
    done = _validate(*paths)
    assert done.exit_code == 3, done.output
    assert paths[which].name in done.output
    assert text in done.output


def test_the_document_says_how_long_a_run_and_its_simulation_took(tmp_path: Path) -> None:
    document = tmp_path / "serving.json"
    done = _validate(*_tables(tmp_path, _requests()), "--json", document)
    assert done.exit_code == 0, done.output
    plain, calibrated = json.loads(document.read_bytes())["recorded"]
    assert plain["measured_s"] == pytest.approx(1.0)
    assert plain["computed_s"] > 0
    assert plain["calibrating_s"] is None
    assert calibrated["calibrating_s"] > 0
    assert f"{plain['measured_s'] / plain['computed_s']:,.0f}" in done.output


def test_percentiles_of_equal_requests_are_their_mean(tmp_path: Path) -> None:
    queued = np.arange(_COUNT) * 100.0  # requests that do not overlap have equal times
    alone = _requests(queued_s=queued, first_token_s=queued + 0.02, last_token_s=queued + 0.1)
    plain, _ = _replays(tmp_path, alone)
    for percentile in ("p50", "p90", "p99"):
        assert getattr(plain, f"ttft_{percentile}_error") == pytest.approx(plain.ttft_error)
        assert getattr(plain, f"tpot_{percentile}_error") == pytest.approx(plain.tpot_error)
    # one of eight is measured at twice the time
    alone["first_token_s"] = queued + np.where(queued == queued[-1], 0.04, 0.02)
    skewed, _ = _replays(tmp_path, alone)
    assert skewed.ttft_p50_error == pytest.approx(plain.ttft_p50_error)
    assert 1 + skewed.ttft_p99_error < 0.6 * (1 + plain.ttft_p99_error)


def _crowd(count: int, **changes: object) -> pd.DataFrame:
    """Requests that arrive together and are done one after another."""
    done = 1.0 + 0.01 * np.arange(count)
    columns: dict[str, object] = {
        "trace": "t", "queued_s": 0.0, "first_token_s": 0.5, "last_token_s": done, "input_tokens": 64,
        "output_tokens": 9,
    }  # fmt: skip
    return pd.DataFrame(columns | changes)


def test_replicas_of_attention_share_the_requests(tmp_path: Path) -> None:
    """Two replicas of a dense model answer sixteen requests as one answers eight of them."""
    (one, *_) = _replays(tmp_path, _crowd(8), {"max_num_seqs": 4})
    (two, *_) = _replays(tmp_path, _crowd(16), {"max_num_seqs": 4, "dp": 2})
    (queued, *_) = _replays(tmp_path, _crowd(16), {"max_num_seqs": 4})
    assert two.load_share == pytest.approx(one.load_share)
    assert queued.load_share == pytest.approx(2 * one.load_share)
    assert two.ttft_error < 0.8 * (1 + queued.ttft_error) - 1


def test_experts_are_spread_over_the_stated_ranks(tmp_path: Path) -> None:
    run: dict[str, object] = {"model": "Qwen3-30B-A3B", "tp": 4, "num_kv_tokens": 10_000}
    (spread, *_) = _replays(tmp_path, _crowd(8), run | {"ep": 4})
    (shared, *_) = _replays(tmp_path, _crowd(8), run | {"ep": 1})
    assert spread.tpot_error != shared.tpot_error
    diagnostics = Diagnostics()
    dense = read_recorded(*_tables(tmp_path, _crowd(8), {"ep": 2}))
    assert replay_runs(dense, diagnostics=diagnostics) == []
    (found,) = diagnostics
    assert "no experts" in found.message


@pytest.mark.parametrize("spelling", ["h100_sxm", "H100-SXM5-80GB", "NVIDIA H100 80GB HBM3"])
def test_a_device_has_one_name_however_it_is_spelled(spelling: str, tmp_path: Path) -> None:
    (run,) = read_recorded(*_tables(tmp_path, _requests(), {"accelerator": spelling}))
    assert run.hardware == "H100-SXM"


@pytest.mark.parametrize(
    ("run", "state"),
    [
        ({"max_num_seqs": 100, "num_kv_tokens": 100_000}, "below"),
        ({"max_num_seqs": 11, "num_kv_tokens": 100_000}, "near"),
        ({"max_num_seqs": 4, "num_kv_tokens": 100_000}, "beyond"),
        ({"max_num_seqs": 100, "num_kv_tokens": 500}, "beyond"),
    ],
)
def test_a_run_near_or_beyond_capacity_is_marked(run: dict[str, object], state: str, tmp_path: Path) -> None:
    diagnostics = Diagnostics()
    tables = _tables(tmp_path, _crowd(_COUNT), run)
    (plain, *_) = replay_runs(read_recorded(*tables), diagnostics=diagnostics)
    assert capacity_of(plain.load_share) == state
    assert ("serving.near-capacity" in diagnostics.counts()) == (state != "below")
    done = _validate(*tables, "--json", tmp_path / "done.json")
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "done.json").read_text())
    assert {each["capacity"] for each in document["recorded"]} == {state}
