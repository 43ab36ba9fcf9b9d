"""Launch settings of measured servers, from published scripts.

InferenceMAX (https://github.com/SemiAnalysisAI/InferenceX) publishes the scripts that start its servers:
maximum tokens and sequences of a step, KV-cache type, memory utilization, scheduler receive interval. They
differ from the defaults of the engines, and depend on the number of clients. Settings here are from the
scripts in ``benchmarks/`` from October 2025 to April 2026, at the date of each run. Other servers of the
table are assumed to use the defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hespas.generators.llm import Layout
from hespas.simulator.serving import Policy, policy_of

__all__ = ["ServerLaunch", "ServerStart", "has_data_parallel_ranks", "launch_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStart:
    """Facts about a measured server that determine its launch settings: the inputs from which a published
    launch script chooses settings, and the date.
    """

    model: str
    hardware: str
    engine: str
    release: str
    precision: str
    layout: Layout
    prompt: int
    output: int
    clients: int
    date: str
    is_published: bool
    is_disaggregated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLaunch:
    """Launch settings of a server.

    ``memory_share`` is a fraction of the device memory. If ``of_free`` is False, it is the fraction that the
    server uses. If ``of_free`` is True, it is the fraction of the memory left by weights that the KV cache
    uses. ``cache`` is the element type of the KV cache (empty: the precision of the model). ``drafts`` is the
    number of speculative tokens per step (MTP).
    """

    policy: Policy
    memory_share: float = 0.9
    of_free: bool = False
    cache: str = ""
    drafts: int = 0


_MANY_CLIENTS, _LONG_INTERVAL, _SHORT_INTERVAL = 16, 30, 10
"""Minimum number of clients with which SGLang's scripts set the longer scheduler-recv-interval [steps], and
both intervals.
"""
_MIN_TOKENS_DATE = "2026-01-20"
"""Since this date TensorRT-LLM's scripts set max_num_tokens to at least 8,192."""
_BALANCED = 60
"""Maximum steps that data-parallel ranks of TensorRT-LLM wait until each of them has a prompt."""
_MORE_CAPTURED = 2048
"""Largest step in tokens that vLLM captures as a CUDA graph in some scripts."""
_MAX_CLIENTS_WITHOUT_MTP = 64
"""With more clients, DeepSeek in 8 bits always ran with speculative tokens on SGLang; with fewer, the table
does not distinguish runs with and without them.
"""
_SPECULATIVE_RELEASES = frozenset({"1.1.0rc2.post2", "1.2.0rc6.post3"})
"""Releases whose runs of 2026 use speculative tokens."""


def has_data_parallel_ranks(precision: str, clients: int) -> bool:
    """Return True if vLLM ran with data-parallel attention: for 4-bit models with 512 clients or more. Only
    the launch scripts of MiniMax models use this rule.
    """
    return precision == "fp4" and clients >= 512


def launch_of(started: ServerStart) -> ServerLaunch:
    """Return the launch settings of a server according to the published scripts. A server without published
    scripts has the defaults of its engine, as have separate prefill and decode servers.
    """
    if started.is_disaggregated:
        policy = policy_of(started.engine, async_scheduling=started.is_published)
        return ServerLaunch(policy=policy, of_free=started.engine == "trtllm")
    if not started.is_published or started.engine not in _SCRIPTS:
        if started.engine == "trtllm":
            return ServerLaunch(policy=_balanced(started, {}), of_free=True)
        return ServerLaunch(policy=policy_of(started.engine))
    return _SCRIPTS[started.engine](started)


def _vllm(at: ServerStart) -> ServerLaunch:
    sequences, share, cache, captured = at.clients, 0.9, "bf16", policy_of("vllm").captured
    match at.model.partition("-")[0]:
        case "MiniMax":
            tokens, sequences = 8192, 1024
            page = 32 if at.hardware == "B200-SXM" and at.precision == "fp8" else 16
            if at.hardware != "B200-SXM":
                sequences = 256
            elif at.release.startswith("0.19"):
                tokens, cache, captured = 2 * at.prompt, "f8E4M3FN", _MORE_CAPTURED
            elif at.precision == "fp8":
                share = 0.95
            else:
                sequences = at.clients
            policy = policy_of(
                "vllm", tokens=tokens, sequences=sequences, page_tokens=page, async_scheduling=True,
                captured=captured,
            )  # fmt: skip
            return ServerLaunch(policy=policy, memory_share=share, cache=cache)
        case "GPT":
            captured = _MORE_CAPTURED
            if at.hardware == "B200-SXM":
                sequences, cache = 512, "f8E4M3FN" if at.date >= "2026" else "bf16"
        case "Llama":
            cache = "f8E4M3FN"
            if at.hardware == "B200-SXM":
                sequences = 512
        case _ if at.precision == "int4":
            share = 0.95
        case _:
            cache = "f8E4M3FN"
    policy = policy_of("vllm", sequences=sequences, async_scheduling=True, captured=captured)
    return ServerLaunch(policy=policy, memory_share=share, cache=cache)


def _sglang(at: ServerStart) -> ServerLaunch:
    drafts, interval = 0, _LONG_INTERVAL if at.clients >= _MANY_CLIENTS else _SHORT_INTERVAL
    if at.precision == "fp4":
        tokens, sequences, share = 16384, 256, 0.85
    elif at.clients > _MAX_CLIENTS_WITHOUT_MTP and at.layout.tp == 8:
        tokens, sequences, share, drafts = 16384, 512, 0.82, 2
    elif at.layout.tp == 8:
        tokens, sequences, share = 32768, 128, 0.82
    else:
        tokens, sequences, share, interval = 8192, 32, 0.95, _SHORT_INTERVAL
    policy = policy_of(
        "sglang", tokens=tokens, sequences=sequences, recv_interval=interval, async_scheduling=True
    )
    return ServerLaunch(policy=policy, memory_share=share, cache="f8E4M3FN", drafts=drafts)


def _trtllm(at: ServerStart) -> ServerLaunch:
    match at.model.partition("-")[0]:
        case "GPT":
            changes = {"tokens": 20000, "sequences": 512}
            share = 0.85
        case "Llama":
            changes = {"tokens": 16384}
            share = 0.9
            if at.prompt == at.output and at.layout.tp < 8:
                changes |= {"batch_wait_iters": 20, "batch_wait_tokens": round(0.9 * 16384)}
        case _:
            is_speculative = at.release in _SPECULATIVE_RELEASES and at.date >= "2026"
            return _speculative_deepseek(at) if is_speculative else _deepseek(at)
    return ServerLaunch(policy=_balanced(at, changes), memory_share=share, of_free=True, cache="f8E4M3FN")


def _deepseek(at: ServerStart) -> ServerLaunch:
    """Return the settings of DeepSeek's models on TensorRT-LLM."""
    tokens, share = -(-(at.clients + at.prompt + 64) // 64) * 64, 0.8
    short, long = at.prompt == at.output, at.prompt > at.output
    changes: dict[str, int] = {}
    is_graph = False
    if at.date >= _MIN_TOKENS_DATE:
        tokens = max(tokens, 8192)
        if at.precision == "fp8":
            is_graph = at.clients >= 64 and (short or long) and at.layout.dp == 1
            share = 0.7 if at.layout.dp > 1 else 0.75 if long and at.layout.tp == 4 else 0.8
            if is_graph and short:
                changes = {"batch_wait_iters": 40, "batch_wait_tokens": round(0.8 * tokens)}
        else:
            is_graph = short and at.layout.ep == 8
    policy = _balanced(at, {"tokens": tokens, "captured": tokens if is_graph else 0, **changes})
    return ServerLaunch(policy=policy, memory_share=share, of_free=True, cache="f8E4M3FN")


def _speculative_deepseek(at: ServerStart) -> ServerLaunch:
    """Return the settings of DeepSeek's models on TensorRT-LLM with speculative tokens."""
    is_data_parallel = at.layout.dp > 1
    drafts, sequences = (1, max(1, at.clients // at.layout.dp)) if is_data_parallel else (3, at.clients)
    tokens = -(-((drafts + 1) * sequences + at.prompt + 64) // 64) * 64
    if at.precision == "fp8":
        shape = (at.prompt > 1024, at.output > 1024)
        is_graph = not is_data_parallel and at.clients > {(False, False): 4, (False, True): 8}.get(shape, 16)
    else:
        is_graph = (
            at.prompt == at.output
            and at.clients in (32, 64, 128)
            and not (is_data_parallel and at.clients > 64)
        )
        is_graph |= at.output > at.prompt and at.clients == 64
    captured = tokens if is_graph else 0
    policy = _balanced(at, {"tokens": tokens, "sequences": sequences, "captured": captured})
    share = 0.7 if is_data_parallel and at.precision == "fp8" else 0.8
    return ServerLaunch(
        policy=policy,
        memory_share=share,
        of_free=True,
        cache="f8E4M3FN",
        drafts=drafts,
    )


def _balanced(at: ServerStart, changes: dict[str, int]) -> Policy:
    """Return the policy of TensorRT-LLM. Prompts are processed whole, unless they are longer than a step
    allows.

    Data-parallel ranks start prefill only when each of them has a prompt. The policy therefore receives
    requests at an interval: the mean number of steps until this is the case, and at most :data:`_BALANCED`
    steps.
    """
    ranks = at.layout.dp
    if ranks > 1:
        steps_per_prompt = at.output * ranks / at.clients
        until_all = steps_per_prompt * sum(1 / rank for rank in range(1, ranks + 1))
        changes |= {"recv_interval": max(1, min(_BALANCED, round(until_all)))}
    whole = at.prompt <= changes.get("tokens", policy_of("trtllm").tokens)
    return policy_of("trtllm", chunked=not whole, async_scheduling=at.is_published, **changes)


_SCRIPTS: Mapping[str, Callable[[ServerStart], ServerLaunch]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
}
