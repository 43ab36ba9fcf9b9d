"""``hespas serve --sla``: rows equal single runs, the best row is right, unreachable limits are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import hespas
from hespas.api import Server, ServingPlanResult
from hespas.cli.main import app
from hespas.graph import Diagnostics
from hespas.graph.errors import UnsupportedError, UsageError

_SPACES: dict[str, dict[str, Any]] = {
    "open": {
        "model": "Llama-3-8B", "requests": "poisson:prompt=600,output=60,ratio=0.5,requests=500",
        "hardware": ["H100-SXM", "MI300X"], "devices": 2, "sla": "ttft=300ms,tpot=12ms",
        "max_batched_tokens": [512, 2048], "max_num_seqs": [4, 64],
    },
    "full cache": {
        "model": "Llama-3-8B", "requests": "closed:prompt=500,output=300,ratio=0.4,requests=200",
        "hardware": "H100-SXM", "devices": 1, "sla": "ttft=2s,tpot=11ms", "engine": "sglang",
        "kv_cache_tokens": 9000, "max_batched_tokens": [1024], "max_num_seqs": [8, 32], "percentile": "mean",
    },
    "experts": {
        "model": "Qwen3-30B-A3B", "requests": "bursts:prompt=256,output=40,requests=600,burst=4",
        "hardware": "B200-SXM", "devices": 2, "sla": "latency=300ms", "engine": "trtllm", "precision": "fp8",
        "max_batched_tokens": 2048, "max_num_seqs": [16, 0], "percentile": "p99", "chunked": True,
        "engine_parameters": "none",
    },
    "separate": {
        "model": "Llama-3-8B", "requests": "poisson:prompt=900,output=40,ratio=0.6,requests=250",
        "hardware": "H100-SXM", "devices": 4, "sla": "ttft=150ms,tpot=9ms", "tp": [1, 2],
        "prefill_servers": [0, 1], "prefill_tp": [0, 1], "max_num_seqs": [8, 0], "kv_transfer_gb_per_s": 5,
        "max_batched_tokens": 2048, "chunked": True,
    },
    "drafts": {
        "model": "Llama-3-8B", "requests": "closed:prompt=300,output=60,requests=120", "hardware": "H100-SXM",
        "devices": 2, "sla": "tpot=3ms", "num_speculative_tokens": 3, "acceptance": 0.8,
        "draft": "Llama-3.2-1B", "prefill_servers": [0, 1], "max_num_seqs": [0], "max_batched_tokens": 4096,
    },
}  # fmt: skip
_LIMITED = ("ttft_ms", "tpot_ms", "latency_ms")


@pytest.fixture(scope="module", params=sorted(_SPACES))
def plan(request: pytest.FixtureRequest) -> tuple[dict[str, Any], ServingPlanResult]:
    space = _SPACES[request.param]
    return space, hespas.plan_serving(**space)


def _served(space: dict[str, Any], row: Any, requests: str = "") -> dict[str, Any]:
    """Return the figures of a single run with the settings of a row."""
    shared = (
        "model", "engine", "precision", "kv_cache_tokens", "engine_parameters", "num_speculative_tokens",
        "acceptance", "draft",
    )  # fmt: skip
    names = ["hardware", "dp", "tp", "ep", "max_batched_tokens", "max_num_seqs", "chunked"]
    settings = {name: space[name] for name in shared if name in space}
    if row.prefill_servers:
        names += ["prefill_servers", "decode_servers", "prefill_dp", "prefill_tp", "prefill_ep"]
        settings["kv_transfer_gb_per_s"] = space.get("kv_transfer_gb_per_s")
    server = Server(**settings, **{name: getattr(row, name) for name in names})
    done = hespas.serve(server, requests or row.requests)
    document, figure = done.document(), space.get("percentile", "p90")
    times = {f"{entry.what}_ms": getattr(entry, f"{figure}_ms") for entry in document.times}
    return {name: times[name] for name in _LIMITED} | {
        "requests_per_s": document.requests_per_s,
        "output_tokens_per_s": document.output_tokens_per_s,
        "output_tokens_per_s_per_device": document.output_tokens_per_s_per_rank,
        "kv_cache_tokens": document.cache_tokens,
        "put_back": document.put_back,
        "devices": document.ranks,
        "basis": done.basis_text,
    }


def test_every_row_equals_a_single_run(plan: tuple[dict[str, Any], ServingPlanResult]) -> None:
    space, done = plan
    frontier = [row for row in done.frontier if row not in done.rows]
    for row in (*done.rows, *frontier[:4]):
        for name, value in _served(space, row).items():
            found = getattr(row, name)
            assert found == (value if isinstance(value, str) else pytest.approx(value, rel=1e-9)), name


def test_the_next_load_does_not_hold(plan: tuple[dict[str, Any], ServingPlanResult]) -> None:
    space, done = plan
    row = done.best
    assert row.is_within
    assert not row.is_lower_bound
    following = row.limited_by.rpartition(f"{done.setting}=")[2]
    assert 1 < float(following) / row.load <= max(1.04, 1 + 1 / row.load)
    text = row.requests.replace(f"{done.setting}={row.load:.10g}", f"{done.setting}={following}")
    assert text != row.requests
    figures = _served(space, row, text)
    missed = [name for name, limit in done.sla_ms.items() if figures[f"{name}_ms"] > limit]
    assert missed
    assert all(f"{name} {figures[f'{name}_ms']:,.1f} ms" in row.limited_by for name in missed)


def test_the_account_adds_up_and_the_best_is_first(plan: tuple[dict[str, Any], ServingPlanResult]) -> None:
    _, done = plan
    account = done.account
    assert account.configurations == account.against_rules + account.beyond_memory + account.compared
    assert sum(row.equal for row in done.rows) == account.compared
    within = [row for row in done.rows if row.is_within]
    assert list(done.rows[: len(within)]) == within
    limits = {f"{name}_ms": limit for name, limit in done.sla_ms.items()}
    assert all(getattr(row, name) <= limit for row in within for name, limit in limits.items())
    if done.setting == "rate":
        values = [row.load / row.devices for row in within]
    else:
        values = [row.output_tokens_per_s_per_device for row in within]
    assert values == sorted(values, reverse=True)
    for first, second in zip(done.frontier, done.frontier[1:], strict=False):
        assert first.latency_ms < second.latency_ms
        assert first.output_tokens_per_s_per_device < second.output_tokens_per_s_per_device
    for point in done.frontier:
        assert point.is_within == all(getattr(point, name) <= limit for name, limit in limits.items())
    for row in within:
        assert any(
            point.latency_ms <= row.latency_ms
            and point.output_tokens_per_s_per_device >= row.output_tokens_per_s_per_device
            for point in done.frontier
        )
    frame = done.to_pandas()
    assert len(frame) == len(done.rows)
    assert {"loses_by", "basis", "price_per_million_tokens"} <= set(frame.columns)


_FEW: dict[str, Any] = {
    "model": "Llama-3-8B", "hardware": "H100-SXM", "devices": 8, "tp": 1, "max_batched_tokens": 8192,
    "max_num_seqs": [64, 0], "chunked": True,
}  # fmt: skip


def test_a_search_grows_runs_that_are_too_short() -> None:
    space: dict[str, Any] = {**_FEW, "sla": "ttft=500ms,tpot=15ms"}
    process = "poisson:prompt=128,output=64"
    done = hespas.plan_serving(requests=process, **space)
    best = done.best
    assert best.is_within
    assert not best.is_lower_bound
    longest = max(
        int(row.requests.rpartition("requests=")[2]) for row in done.rows if "requests=" in row.requests
    )
    assert longest > 1000
    for row in done.rows:
        assert _served(space, row)["ttft_ms"] == pytest.approx(row.ttft_ms, rel=1e-9)
        assert _served(space, row)["tpot_ms"] == pytest.approx(row.tpot_ms, rel=1e-9)

    found = Diagnostics()
    stated = hespas.plan_serving(requests=f"{process},requests=1000", diagnostics=found, **space)
    assert stated.best.is_lower_bound
    assert stated.best.load < best.load
    assert "requests=1000" in stated.best.requests
    assert "a run of 1,000 requests is too short" in stated.best.limited_by
    assert "at least " in stated.headline()
    assert "serving.lower-bound" in {finding.code for finding in found}


def test_layouts_that_violate_a_rule_are_counted() -> None:
    space: dict[str, Any] = {**_FEW, "model": "Qwen2.5-7B", "tp": [1, 8], "max_num_seqs": 32}  # 28 heads
    done = hespas.plan_serving(requests="closed:prompt=128,output=8,requests=16", sla="ttft=1s", **space)
    assert done.account.against_rules == 1
    assert {row.tp for row in done.rows} == {1}


def test_runs_that_show_nothing_are_no_configurations_within_the_limits() -> None:
    done = _serve(*_SMALL, "--requests", "closed:requests=1", "--sla", "ttft=500ms")
    assert done.exit_code == 1
    assert "a run of 1 request is too short to show TTFT p90 <= 500 ms" in done.stderr
    assert "state more requests=" in done.stderr


def test_prices_of_several_devices_and_aliases(tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    rows = {"H100-SXM": 2.0, "B200-SXM": 40.0}
    texts = [f'[[device]]\nname = "{name}"\nprice_per_hour = {price}\n' for name, price in rows.items()]
    prices.write_text("".join(texts), encoding="utf-8")
    done = hespas.plan_serving(
        "Llama-3-8B", "closed:prompt=128,output=16,requests=32", hardware=["H100-SXM", "H100", "B200-SXM"],
        devices=1, sla="ttft=500ms", objective="price", prices=prices, max_batched_tokens=2048,
        max_num_seqs=8, chunked=True,
    )  # fmt: skip
    assert done.account.configurations == 2
    assert {row.hardware for row in done.rows} == set(rows)
    for row in (*done.rows, *done.frontier):
        price = rows[row.hardware] / (row.output_tokens_per_s * 3600) * 1e6
        assert row.price_per_million_tokens == pytest.approx(price)
    assert [row.hardware for row in done.rows] == list(rows)


def _serve(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["serve", "Llama-3-8B", *map(str, arguments)], env={"COLUMNS": "400"})


_SMALL = ("--hardware", "H100-SXM", "--devices", 1, "--max-num-seqs", 32, "--max-batched-tokens", 2048)
_PROCESS = ("--requests", "closed:prompt=128,output=16,requests=16")


def test_the_command_prints_and_writes_the_search(tmp_path: Path) -> None:
    document, rows, page, prices = (tmp_path / name for name in ("a.json", "a.csv", "a.html", "prices.toml"))
    prices.write_text('[[device]]\nname = "H100-SXM"\nprice_per_hour = 3.6\n', encoding="utf-8")
    files = ("--json", document, "--out", rows, "--html", page, "--prices", prices, "--objective", "price")
    done = _serve(*_SMALL, *_PROCESS, "--sla", "ttft=500ms,tpot=30ms", *files)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert "TTFT p90 <= 500 ms, TPOT p90 <= 30 ms" in lines[0]
    assert lines[1].startswith("basis: ")
    assert lines[2].startswith("2 configurations: 0 violate rules of layouts, 0 exceed the memory")
    assert "Pareto frontier" in done.stdout
    found = json.loads(document.read_bytes())
    assert found["schema"] == "hespas.serving-plan/1"
    assert found["inputs"] == [str(prices)]
    best = found["rows"][0]
    assert best["price_per_million_tokens"] == pytest.approx(1e9 / (best["output_tokens_per_s"] * 1e6))
    assert rows.read_text(encoding="utf-8").count("\n") == 1 + len(found["rows"])
    assert "chart-pareto" in page.read_text(encoding="utf-8")


def test_limits_that_nothing_holds_name_the_nearest() -> None:
    done = _serve(*_SMALL, *_PROCESS, "--sla", "ttft=500ms,tpot=1ms")
    assert done.exit_code == 1
    assert "no configuration holds TTFT p90 <= 500 ms, TPOT p90 <= 1 ms; the nearest has tpot " in done.stderr
    assert "at 1 concurrent request with tp1" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--sla", "ttft=500"), "invalid limit 'ttft=500'"),
        (("--sla", ""), "invalid limit ''"),
        (("--sla", "tpot=5ms", "--requests", "closed:output=1"), "no request has a second output token"),
        (("--sla", "ttft=1s", "--devices", "100000000000000"), "'100000000000000' is too large"),
        (("--sla", "ttft=1s", "--out", "rows.txt"), "expected a .csv or .parquet file"),
        (("--sla", "speed=5ms"), "expected one of ttft, tpot, latency"),
        (("--sla", "ttft=1s,ttft=2s"), "each once"),
        (("--sla", "ttft=0ms"), "a time above 0"),
        (("--sla", "tpot=30ms"), "no maximum without a limit of the waiting time"),
        (("--sla", "ttft=1s", "--requests", "poisson:rate=3"), "--sla searches rate="),
        (("--sla", "ttft=1s", "--requests", "log.csv"), "a search needs an arrival process"),
        (("--sla", "ttft=1s", "--requests", "poisson:speed=3"), "has no setting 'speed'"),
        (("--sla", "ttft=1s", "--tp", "0"), "--tp 0: expected 1 or more"),
        (("--sla", "ttft=1s", "--tp", "x"), "invalid list 'x'"),
        (("--sla", "ttft=1s", "--tp", "3"), "no layout has the wanted number of devices"),
        (("--sla", "ttft=1s", "--objective", "price"), "the price per device-hour of H100-SXM is unknown"),
        (("--sla", "ttft=1s", "--per-request"), "exclude each other"),
        (("--sla", "ttft=1s", "--prefill-tp", "1"), "--prefill-tp requires separate prefill servers"),
        (("--sla", "ttft=1s", "--kv-transfer-gb-per-s", "5"), "requires separate prefill servers"),
        (("--sla", "ttft=1s", "--prefill-servers", "2"), "the sum over all of them"),
        (("--sla", "ttft=1s", "--prefill-servers", "1", "--decode-servers", "0"), "the sum over all of them"),
        (("--sla", "ttft=1s", "--prefill-servers", "1", "--decode-servers", "2"), "the sum over all of them"),
        (("--requests", "closed:requests=2"), "--devices requires --sla"),
    ],
)
def test_wrong_searches_are_refused(arguments: tuple[str, ...], text: str) -> None:
    done = _serve("--hardware", "H100-SXM", "--devices", 2, *arguments)
    assert done.exit_code == 2, done.output
    assert text in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--sla", "ttft=1s"), "--devices is required with --sla"),
        (("--tp", "1,2", "--requests", "closed:requests=2"), "several values of --tp require --sla"),
        ((), "--requests is required"),
    ],
)
def test_single_runs_and_searches_have_their_options(arguments: tuple[str, ...], text: str) -> None:
    done = _serve("--hardware", "H100-SXM", *arguments)
    assert done.exit_code == 2, done.output
    assert text in done.stderr


def test_errors_of_all_configurations() -> None:
    with pytest.raises(UnsupportedError, match="leave no memory for a KV cache"):
        hespas.plan_serving("Llama-3-70B", hardware="H100-SXM", devices=1, sla="ttft=1s")
    with pytest.raises(UnsupportedError, match="Mamba layers"):
        hespas.plan_serving("Mamba2-130M", hardware="H100-SXM", devices=1, sla="ttft=1s")
    with pytest.raises(UsageError, match="names no device"):
        hespas.plan_serving("Llama-3-8B", hardware=[], devices=1, sla="ttft=1s")
    with pytest.raises(UsageError, match="no experts to distribute"):
        hespas.plan_serving("Llama-3-8B", hardware="H100-SXM", devices=2, tp=2, ep=2, sla="ttft=1s")
