"""Simulated servers: requests, warnings, engine parameters, host times and separate servers."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

import hespas
from hespas.api import Server
from hespas.api.request_log import requests_of
from hespas.graph import Diagnostics, Severity
from hespas.graph.errors import FormatError, UnsupportedError, UsageError
from hespas.hardware import load_device, write_device
from hespas.simulator.serving import Correction, Requests
from hespas.simulator.serving.engine_parameters import engine_parameters

_LLAMA = Server(model="Llama-3-8B", hardware="H100-SXM")


def test_a_server_answers_all_requests() -> None:
    done = hespas.serve(_LLAMA, "poisson:rate=10,prompt=512,output=64,requests=60,seed=3", per_request=True)
    document = json.loads(done.to_json())
    assert document["schema"] == "hespas.serving/1"
    assert (document["requests"], document["output_tokens"]) == (60, 60 * 64)
    assert document["put_back"] == 0
    assert len(document["rows"]) == len(done.to_pandas()) == 60
    of = {each["what"]: each for each in document["times"]}
    rows = document["rows"]
    assert of["ttft"]["mean_ms"] == pytest.approx(np.mean([row["ttft_ms"] for row in rows]))
    assert of["latency"]["max_ms"] == pytest.approx(max(row["latency_ms"] for row in rows))
    assert of["inter-token"]["mean_ms"] == pytest.approx(of["tpot"]["mean_ms"], rel=0.05)
    # weights of 16 GB are read for each token: no faster than the memory
    assert of["tpot"]["p50_ms"] > 16e9 / 3.35e12 * 1e3
    assert "output tokens/s" in done.headline()


@pytest.mark.parametrize(("hardware", "is_warned"), [("H100-SXM", False), ("RTX-4090", True)])
def test_a_device_without_measurements_is_a_warning(hardware: str, is_warned: bool) -> None:
    found = Diagnostics()
    server = Server(model="Llama-3-8B", hardware=hardware)
    hespas.serve(server, "closed:concurrency=1,prompt=64,output=4,requests=1", diagnostics=found)
    warned = {entry.code for entry in found if entry.severity is Severity.WARNING}
    assert ("learned.unseen-device" in warned) == is_warned


_FEW = "closed:concurrency=2,prompt=256,output=8,requests=4"


@pytest.mark.parametrize(
    ("hardware", "estimator", "severities"),
    [
        ("H100-SXM", "composite", {}),
        ("RTX-4090", "composite", {"serving.engine-parameters": Severity.INFO}),
        ("H100-SXM", "roofline", {"serving.no-engine-parameters": Severity.WARNING}),
    ],
)
def test_an_engine_without_measured_runs_is_reported(
    hardware: str, estimator: str, severities: dict[str, Severity]
) -> None:
    found = Diagnostics()
    server = Server(model="Llama-3-8B", hardware=hardware, estimator=estimator)
    hespas.serve(server, _FEW, diagnostics=found)
    reported = {entry.code: entry.severity for entry in found if "engine-parameters" in entry.code}
    assert reported == severities
    found = Diagnostics()
    hespas.serve(replace(server, engine_parameters="none"), _FEW, diagnostics=found)
    assert not any("engine-parameters" in entry.code for entry in found)


def test_parameters_of_the_engine_correct_its_steps() -> None:
    done, plain = (
        hespas.serve(replace(_LLAMA, engine_parameters=choice), _FEW) for choice in ("shipped", "none")
    )
    shipped = engine_parameters()["H100-SXM vllm"]
    assert done.step_times.correction == shipped.correction
    assert done.basis_text.endswith(f"; engine: {shipped.rows} runs of H100-SXM vllm")
    assert plain.step_times.correction == Correction()
    assert "engine" not in plain.basis_text
    document = json.loads(done.to_json())
    assert document["engine_evidence"] == shipped.evidence
    assert document["correction"]["products"] == shipped.correction.products
    assert np.mean(plain.ttft_ns) != np.mean(done.ttft_ns)


def test_speculative_tokens_shorten_tpot() -> None:
    settings: dict[str, dict[str, Any]] = {
        "none": {},
        "layer": {"acceptance": 0.8},
        "ngram": {"acceptance": 0.8, "draft": "ngram"},
        "model": {"acceptance": 0.8, "draft": "Llama-3.2-1B"},
        "rates": {"acceptance": [0.8, 0.64, 0.512]},
        "rejected": {"acceptance": 0.0},
    }
    count = {name: 3 * (name != "none") for name in settings}
    done = {
        name: hespas.serve(replace(_LLAMA, num_speculative_tokens=count[name], **given), _FEW)
        for name, given in settings.items()
    }
    tpot_ns = {name: float(np.mean(result.tpot_ns)) for name, result in done.items()}
    assert tpot_ns["ngram"] < tpot_ns["layer"] < tpot_ns["model"] < tpot_ns["none"] < tpot_ns["rejected"]
    assert tpot_ns["rates"] == pytest.approx(tpot_ns["layer"])
    cache = {name: result.kv_cache_tokens for name, result in done.items()}
    assert cache["model"] < cache["layer"] < cache["none"] == cache["ngram"]
    assert sum(done["model"].basis.values()) == pytest.approx(1.0)
    assert done["rates"].document().tokens_per_step == pytest.approx(1 + 0.8 + 0.64 + 0.512)
    assert done["none"].document().tokens_per_step == 1.0


def test_verified_tokens_are_not_faster_than_the_roof_of_their_attention() -> None:
    """Latent attention of 128 heads, each with 576 + 512 products per query and cached token."""
    server = Server(
        model="DeepSeek-V3-L4-dense1",
        hardware="H200-SXM",
        engine_parameters="none",
        num_speculative_tokens=3,
        draft="ngram",
        acceptance=0.5,
    )
    batch, context = 32, 32_768
    done = hespas.serve(server, f"closed:concurrency={batch},prompt={context},output=4,requests={batch}")
    time_ns = float(done.step_times.decode_ns(batch, np.array([float(context)]))[0])
    flops = 4 * batch * context * 2 * 128 * (576 + 512) * 4  # layers
    assert time_ns > flops / 989.4e12 * 1e9


def test_an_additional_layer_reads_its_cache_and_processes_prompts() -> None:
    requests = "closed:concurrency=2,prompt=8000,output=4,requests=2"
    layer, ngram = (
        hespas.serve(replace(_LLAMA, num_speculative_tokens=4, acceptance=0.5, draft=draft), requests)
        for draft in ("layer", "ngram")
    )
    short, long = (
        layer.step_times.decode_ns(8, np.array([context]))[0]
        - ngram.step_times.decode_ns(8, np.array([context]))[0]
        for context in (1024.0, 8192.0)
    )
    assert 0 < short < long
    assert np.mean(layer.ttft_ns) > np.mean(ngram.ttft_ns)
    pools: dict[str, Any] = {
        "prefill_servers": 1, "decode_servers": 1, "num_speculative_tokens": 4, "acceptance": 0.5,
    }  # fmt: skip
    sent, less = (
        replace(_LLAMA, **pools, draft=draft).send_ns(np.array([8000])) for draft in ("layer", "ngram")
    )
    assert sent[0] == pytest.approx(less[0] * 33 / 32)


def test_a_dense_draft_of_a_model_with_experts_has_no_expert_ranks() -> None:
    server = Server(
        model="Qwen3-30B-A3B", hardware="H100-SXM", tp=2, ep=2, num_speculative_tokens=1, draft="Qwen2.5-7B"
    )
    draft = server.draft_step()
    assert draft is not None
    assert (draft.layout.tp, draft.layout.ep) == (2, 1)
    with pytest.raises(UsageError, match=r"draft model Qwen2\.5-7B: tp-divides-heads"):
        replace(server, tp=8).draft_step()


def test_a_device_of_unknown_memory_needs_a_stated_cache(tmp_path: Path) -> None:
    device = load_device("H100-SXM")
    memories = tuple(
        structs.replace(memory, capacity_bytes=-1) if memory.level == "main" else memory
        for memory in device.memories
    )
    path = tmp_path / "unknown.toml"
    write_device(replace(device, name="Unknown-1", memories=memories), path)
    server = replace(_LLAMA, hardware=str(path))
    with pytest.raises(UnsupportedError, match="the memory size of Unknown-1 is unknown"):
        hespas.serve(server, _FEW)
    assert hespas.serve(replace(server, kv_cache_tokens=10_000), _FEW).kv_cache_tokens == 10_000


def test_a_draft_model_with_another_vocabulary_is_a_warning() -> None:
    found = Diagnostics()
    server = replace(_LLAMA, num_speculative_tokens=2, acceptance=0.5, draft="Llama-2-7B")
    hespas.serve(server, _FEW, diagnostics=found)
    assert [entry.severity for entry in found if entry.code == "serving.draft-vocabulary"] == [
        Severity.WARNING
    ]


def test_an_acceptance_that_is_not_stated_is_a_warning() -> None:
    found = Diagnostics()
    server = replace(_LLAMA, num_speculative_tokens=2)
    done = hespas.serve(server, _FEW, diagnostics=found)
    assert [entry.severity for entry in found if entry.code == "serving.acceptance"] == [Severity.WARNING]
    accepts = done.step_times.correction.accepts
    stated = hespas.serve(replace(server, acceptance=accepts), _FEW)
    assert np.array_equal(stated.tpot_ns, done.tpot_ns)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"draft": "ngram"}, "`draft` requires speculative tokens"),
        ({"acceptance": 0.5}, "`acceptance` requires speculative tokens"),
        ({"num_speculative_tokens": 2, "acceptance": 1.5}, "expected 0 to 1"),
        ({"num_speculative_tokens": 2, "acceptance": nan}, "expected 0 to 1"),
        ({"num_speculative_tokens": 2, "acceptance": [0.5, 0.6]}, "rises"),
        ({"num_speculative_tokens": 3, "acceptance": [0.5, 0.4]}, "2 positions for 3 speculative tokens"),
        ({"num_speculative_tokens": 3, "acceptance": [0.5]}, "1 position for 3 speculative tokens"),
        ({"num_speculative_tokens": 3, "acceptance": []}, "0 positions for 3 speculative tokens"),
        ({"kv_transfer_gb_per_s": 0.0}, "requires separate prefill servers"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 3, "max_batched_tokens": 3}, "cannot verify 3 speculative tokens"),
    ],
)
def test_settings_of_drafts_that_contradict(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        replace(_LLAMA, **given)
    assert message in error.value.message


def test_stated_host_times_replace_those_of_the_engine() -> None:
    server = replace(_LLAMA, step_overhead_us=0.0, request_overhead_ms=20.0)
    shipped = engine_parameters()["H100-SXM vllm"].correction
    found = hespas.serve(server, _FEW).step_times.correction
    assert found == replace(shipped, step_ns=0.0, request_ns=20e6)
    plain = hespas.serve(replace(server, engine_parameters="none"), _FEW).step_times.correction
    assert plain == Correction(request_ns=20e6)


def test_host_times_carry_over_to_a_device_without_measured_servers() -> None:
    done = hespas.serve(replace(_LLAMA, hardware="MI300X"), _FEW)
    assert "; engine: host times of " in done.basis_text
    correction = done.step_times.correction
    assert correction.products == correction.attention == 1
    assert correction.request_ns > 0


def test_factors_on_kernels_hold_only_for_the_shipped_device(tmp_path: Path) -> None:
    same, changed = tmp_path / "same.toml", tmp_path / "changed.toml"
    device = load_device("H100-SXM")
    write_device(device, same)
    peaks = tuple(structs.replace(peak, flops_per_s=2 * peak.flops_per_s) for peak in device.peaks)
    write_device(replace(device, peaks=peaks), changed)
    texts = [hespas.serve(replace(_LLAMA, hardware=str(path)), _FEW).basis_text for path in (same, changed)]
    assert "runs of H100-SXM vllm" in texts[0]
    assert "; engine: host times of " in texts[1]


@pytest.mark.parametrize("rate", [1e-320, 1e-4])
def test_a_transfer_has_a_rate(rate: float) -> None:
    with pytest.raises(UsageError, match="kv_transfer_gb_per_s"):
        replace(_LLAMA, prefill_servers=1, decode_servers=1, kv_transfer_gb_per_s=rate)
    with pytest.raises(UsageError, match="requires separate prefill servers"):
        replace(_LLAMA, kv_transfer_gb_per_s=5.0)


def test_more_servers_than_requests_are_idle() -> None:
    few, many = (
        hespas.serve(replace(_LLAMA, prefill_servers=count, decode_servers=count), _FEW)
        for count in (4, 1_000_000)
    )
    assert few.makespan_ns == many.makespan_ns


def test_separate_servers_have_parameters_of_separate_servers() -> None:
    server = replace(_LLAMA, hardware="MI300X", engine="trtllm", prefill_servers=1, decode_servers=1)
    done = hespas.serve(server, _FEW)
    assert done.parameters is not None
    assert "trtllm disaggregated" in done.parameters.name
    assert done.prefill is not None
    assert done.prefill.parameters == done.parameters
    pools = done.tables_by_name()["pools"]
    assert list(pools.columns["pool"]) == ["prefill", "decode"]
    assert [row.busy_share for row in done.pools()] == list(pools.columns["busy_share"])
    assert "pools" not in hespas.serve(_LLAMA, _FEW).tables_by_name()


def test_a_prompt_is_no_time_between_tokens() -> None:
    done = hespas.serve(_LLAMA, "closed:concurrency=1,prompt=8192,output=2,requests=3")
    of = {each.what: each for each in done.times()}
    assert of["inter-token"].mean_ms == pytest.approx(of["tpot"].mean_ms)
    assert of["inter-token"].max_ms < of["ttft"].mean_ms / 10


def test_more_requests_at_once_give_more_tokens_and_wait_longer() -> None:
    few, many = (
        hespas.serve(_LLAMA, f"closed:concurrency={count},prompt=512,output=64,requests=128")
        for count in (2, 64)
    )
    assert many.output_tokens_per_s > 5 * few.output_tokens_per_s
    assert np.nanmean(many.tpot_ns) > np.nanmean(few.tpot_ns)


def test_a_small_cache_puts_requests_back() -> None:
    server = Server(model="Llama-3-8B", hardware="H100-SXM", kv_cache_tokens=4096)
    done = hespas.serve(server, "closed:concurrency=32,prompt=512,output=256,requests=64")
    document = done.document()
    assert document.put_back > 0
    assert [each.code for each in document.diagnostics if each.code == "serving.put-back"]
    assert document.cache_tokens == 4096


def test_replicas_share_requests() -> None:
    server = Server(model="Llama-3-8B", hardware="H100-SXM", dp=3)
    done = hespas.serve(server, "closed:concurrency=4,prompt=128,output=8,requests=10")
    assert [len(run.requests) for run in done.runs] == [4, 3, 3]
    assert [run.requests.concurrency for run in done.runs] == [2, 1, 1]
    assert done.document().replicas == 3


@pytest.mark.parametrize("concurrency", [1, 3, 8, 11])
def test_no_more_requests_are_under_way_than_stated(concurrency: int) -> None:
    server = Server(model="Llama-3-8B", hardware="H100-SXM", dp=8)
    done = hespas.serve(server, f"closed:concurrency={concurrency},prompt=128,output=8,requests=24")
    rows = done.to_pandas()
    arrival, end = rows["arrival_s"].to_numpy(), (rows["arrival_s"] + rows["latency_ms"] / 1e3).to_numpy()
    under_way = [int(((arrival <= at) & (end > at + 1e-9)).sum()) for at in arrival]
    assert max(under_way) == concurrency
    assert len(rows) == 24
    assert done.document().replicas == 8
    # those that have no request are idle
    assert done.document().busy_share <= min(concurrency, 8) / 8 + 1e-9


def test_separate_prefill_and_decode_servers() -> None:
    separate = replace(_LLAMA, prefill_servers=1, decode_servers=2, tp=2, prefill_tp=1)
    requests = "poisson:rate=10,prompt=512,output=64,requests=60,seed=3"
    done = hespas.serve(separate, requests)
    document = done.document()
    assert isinstance(document.pools, list)
    assert [(pool.pool, pool.servers, pool.ranks) for pool in document.pools] == [
        ("prefill", 1, 1), ("decode", 2, 4),
    ]  # fmt: skip
    assert (document.ranks, document.replicas, document.requests) == (5, 3, 60)
    assert document.output_tokens_per_s_per_rank == pytest.approx(document.output_tokens_per_s / 5)
    assert sum(pool.steps for pool in document.pools) == document.steps
    assert sum(share.share for share in document.basis) == pytest.approx(1)
    # decoding on two devices, without prompts in its steps
    assert np.nanmax(done.tpot_ns) < np.nanmean(hespas.serve(_LLAMA, requests).tpot_ns)
    # a slower link delays first tokens by the time to send 512 tokens of 64 KiB from each device
    slow = replace(separate, kv_transfer_gb_per_s=0.5, prefill_tp=2)
    prompts = np.array([512, 300])
    assert slow.send_ns(prompts) == pytest.approx(prompts * 65536 / 0.5)
    assert separate.send_ns(prompts) == pytest.approx(prompts * 131072 / 50)
    assert hespas.serve(slow, requests).ttft_ns.mean() > done.ttft_ns.mean()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"prefill_servers": 1}, "`decode_servers` is required"),
        ({"decode_servers": 1}, "`prefill_servers` is required"),
        ({"prefill_tp": 2}, "`prefill_tp` requires separate prefill servers"),
    ],
)
def test_both_kinds_of_separate_servers_are_required(changes: dict[str, int], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        Server(model="Llama-3-8B", hardware="H100-SXM", **changes)  # type: ignore[arg-type] # counts only


def test_experts_in_another_format() -> None:
    wide, narrow = (
        Server(model="GPT-OSS-20B", hardware="B200-SXM", expert_dtype=experts) for experts in ("", "mxfp4")
    )
    requests = "closed:concurrency=8,prompt=256,output=32,requests=16"
    assert (
        hespas.serve(narrow, requests).output_tokens_per_s > hespas.serve(wide, requests).output_tokens_per_s
    )


@pytest.mark.parametrize(
    ("server", "error", "match"),
    [
        (
            Server(model="Llama-3-70B", hardware="H100-SXM"),
            UnsupportedError,
            "leave no memory for a KV cache",
        ),
        (Server(model="Llama-3-8B", hardware="H100-SXM", ep=2), UsageError, "no experts to distribute"),
        (Server(model="Mamba2-130M", hardware="H100-SXM"), UnsupportedError, "Mamba layers"),
    ],
)
def test_what_cannot_be_served(server: Server, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        hespas.serve(server, "poisson:rate=1,requests=2,prompt=16,output=2")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"engine": "other"}, "`engine=other`: .other. is not one of .vllm., .sglang., .trtllm."),
        ({"precision": "bf17"}, "unknown precision 'bf17'"),
        ({"kv_cache_dtype": "zz"}, "`kv_cache_dtype=zz` is not an element type"),
        ({"expert_dtype": "zz"}, "`expert_dtype=zz` is not an element type"),
        ({"max_num_seqs": -3}, "`max_num_seqs=-3` is less than 0"),
    ],
)
def test_wrong_settings_of_a_server_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        Server(model="Llama-3-8B", hardware="H100-SXM", **settings)


def test_a_request_longer_than_the_cache() -> None:
    server = Server(model="Llama-3-8B", hardware="H100-SXM", kv_cache_tokens=256)
    with pytest.raises(UnsupportedError, match="does not fit into a cache"):
        hespas.serve(server, "poisson:rate=1,requests=2,prompt=512,output=2")


_LOGS = {
    "log.csv": "arrival_s,prompt_tokens,output_tokens\n2.5,30,4\n1.5,10,2\n",
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2.5,30,4\n1.5,10,2\n",
    "log.jsonl": '{"arrived_at": 2.5, "num_prefill_tokens": 30, "num_decode_tokens": 4}\n\n'
    '{"arrived_at": "1.5", "num_prefill_tokens": 10, "num_decode_tokens": 2}\n',
}


@pytest.mark.parametrize("name", sorted(_LOGS))
def test_logs_are_read_in_order_of_arrival(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(_LOGS[name], encoding="utf-8")
    found = requests_of(path)
    assert found.arrival_ns.tolist() == [0.0, 1e9]
    assert found.prompt.tolist() == [10, 30]
    assert found.output.tolist() == [2, 4]
    assert found.concurrency == 0


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("arrival_s,prompt_tokens,output_tokens\n", "no row below the header"),
        ("arrival_s,prompt_tokens\n1,2\n", "missing column output_tokens"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2,x\n", "output_tokens is 'x'"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2,nan\n", "output_tokens is 'nan'"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2,0\n", "output_tokens is '0'"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2.5,1\n", "prompt_tokens is '2.5'"),
        ("arrival_s,prompt_tokens,output_tokens\n1,1e300,1\n", "prompt_tokens is '1e300'"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2,1,7\n", "more cells than the header"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2," + "1" * 200_000 + "\n", "field larger"),
        ("arrival_s,prompt_tokens,output_tokens\n-1e308,2,1\n1e308,2,1\n", "inf s after the first"),
        ("arrival_s,prompt_tokens,output_tokens\n0,2,1\n1e300,2,1\n", r"1e\+300 s after the first"),
    ],
)
def test_what_is_no_log(text: str, match: str, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FormatError, match=match) as caught:
        requests_of(path)
    assert caught.value.hint


def test_lines_inside_of_cells_are_none_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(
        'arrival_s,prompt_tokens,output_tokens,note\n0,1,2,"a\nb"\n1,3,4,c\N{LINE SEPARATOR}d\n',
        encoding="utf-8",
    )
    assert requests_of(path).prompt.tolist() == [1, 3]


@pytest.mark.parametrize("value", ["1" + "0" * 400, "{" + '"a":{' * 100_000])
def test_what_is_no_number_of_json(value: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": {value}}}\n', encoding="utf-8")
    with pytest.raises(FormatError):
        requests_of(path)


def test_what_is_no_line_of_json(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"arrival_s": 1, "prompt_tokens": 1, "output_tokens": 1}\n[1]\n', encoding="utf-8")
    with pytest.raises(FormatError, match="not a JSON object") as caught:
        requests_of(path)
    assert caught.value.position == "line 2"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match="not UTF-8"):
        requests_of(path)


@pytest.mark.parametrize(
    "spelling",
    [
        "poisson:speed=3", "poisson:burst=3", "poisson:rate=x", "poisson:rate=nan", "poisson:rate=0",
        "closed:concurrency=0", "closed:requests=1.5", "closed:ratio=0", "bursts:burst=0", "poisson:prompt=0",
        "poisson:seed=-1", "poisson:rate=1e-320", "bursts:burst=1e30", "poisson:rate=1,rate=2",
    ],
)  # fmt: skip
def test_what_is_no_process(spelling: str) -> None:
    with pytest.raises(UsageError):
        requests_of(spelling)


@pytest.mark.parametrize(
    "setting",
    [
        {"kv_cache_dtype": "zzz"},
        {"expert_dtype": "zzz"},
        {"step_overhead_us": inf},
        {"sequence_us": 1e308},
        {"request_overhead_ms": -1.0},
        {"tp": 0},
        {"dp": -1},
        {"gpu_memory_utilization": nan},
        {"gpu_memory_utilization": 5.0},
    ],
)
def test_what_no_server_has(setting: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        hespas.serve(replace(_LLAMA, **setting), "closed:requests=1,output=2")


def test_the_document_names_the_files_that_were_read(tmp_path: Path) -> None:
    log = tmp_path / "poisson.csv"
    log.write_text(_LOGS["log.csv"], encoding="utf-8")
    device = tmp_path / "mine.toml"
    shipped = Path(hespas.__file__).parent / "hardware" / "data"
    device.write_bytes((shipped / "H100-SXM.toml").read_bytes())
    own = Server(model="Llama-3-8B", hardware=str(device))
    assert hespas.serve(own, log).document().inputs == [str(device), str(log)]
    assert hespas.serve(_LLAMA, "closed:requests=1,output=2").document().inputs == []


def test_processes() -> None:
    burst = requests_of("bursts:rate=10,burst=5,requests=10")
    assert np.unique(burst.arrival_ns).tolist() == [0.0, 5e8]
    closed = requests_of("closed:concurrency=3,requests=7,prompt=100,output=10,ratio=0.5")
    assert (closed.concurrency, len(closed)) == (3, 7)
    assert closed.prompt.min() >= 50
    same = [requests_of("poisson:rate=2,requests=5,seed=1") for _ in range(2)]
    assert isinstance(same[0], Requests)
    assert same[0].arrival_ns.tolist() == same[1].arrival_ns.tolist()
