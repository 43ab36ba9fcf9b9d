"""How measured servers were started, where that is published.

InferenceMAX (https://github.com/SemiAnalysisAI/InferenceX) publishes the scripts that started each of its
servers: tokens of a step, most sequences, the type of the cache, the memory it may fill, how often the
scheduler looks at the door. They differ from the defaults of serving stacks, and with the number of clients.
Scripts of ``benchmarks/`` from October 2025 to April 2026, those of the day of a run. Other servers of the
table ran with defaults, as far as anybody knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from hespas.generators.llm import Layout
from hespas.simulator.serving import Policy, policy_of

__all__ = ["Launch", "Started", "launch_of", "spreads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Which server of which day: what scripts choose their settings by."""

    model: str
    hardware: str
    stack: str
    release: str
    precision: str
    layout: Layout
    prompt: int
    output: int
    clients: int
    date: str
    is_published: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Settings of a server. ``memory_share`` is the part of memory that it fills, or (``of_free``) the part
    of what weights leave that its cache fills. ``cache``: the element type of keys and values (empty: that of
    the precision). ``drafts``: tokens that layers for further predictions guess at each step. ``captured``:
    steps of so many tokens are launched as graphs also where they work on prompts.
    """

    policy: Policy
    memory_share: float = 0.9
    of_free: bool = False
    cache: str = ""
    drafts: int = 0
    captured: int = 0


_FEW, _SLOW, _EAGER = 16, 30, 10
"""With this many clients SGLang's scripts have the scheduler look at the door less often: steps of both."""
_WARM = "2026-01-20"
"""Since this day TensorRT-LLM's scripts let a step work on 8,192 tokens at least."""
_BALANCED = 60
"""Steps that data-parallel ranks of TensorRT-LLM wait at most until each of them has a prompt."""


def spreads(precision: str, clients: int) -> bool:
    """Whether ranks of vLLM had requests of their own: MiniMax in 4 bits with the most clients only."""
    return precision == "fp4" and clients >= 512


def launch_of(started: Started) -> Launch:
    """The settings of a server."""
    match started.stack if started.is_published else "":
        case "vllm":
            return _vllm(started)
        case "sglang":
            return _sglang(started)
        case "trtllm":
            return _trtllm(started)
        case _:
            return _default(started)


def _default(at: Started) -> Launch:
    if at.stack == "trtllm":
        return Launch(policy=_balanced(at, {}), of_free=True)
    return Launch(policy=policy_of(at.stack))


def _vllm(at: Started) -> Launch:
    sequences, share, cache, captured = at.clients, 0.9, "bf16", _CAPTURED
    match at.model.partition("-")[0]:
        case "MiniMax":
            return _minimax(at)
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
    policy = policy_of("vllm", sequences=sequences, ahead=True)
    return Launch(policy=policy, memory_share=share, cache=cache, captured=captured)


def _minimax(at: Started) -> Launch:
    tokens, sequences, share, cache, captured = 8192, 1024, 0.9, "bf16", _CAPTURED
    page = 32 if at.hardware == "B200-SXM" and at.precision == "fp8" else 16
    if at.hardware != "B200-SXM":
        sequences = 256
    elif at.release.startswith("0.19"):
        tokens, cache, captured = 2 * at.prompt, "f8E4M3FN", _MORE_CAPTURED
    elif at.precision == "fp8":
        share = 0.95
    else:
        sequences = at.clients
    policy = policy_of("vllm", tokens=tokens, sequences=sequences, page_tokens=page, ahead=True)
    return Launch(policy=policy, memory_share=share, cache=cache, captured=captured)


_CAPTURED, _MORE_CAPTURED = 512, 2048
"""Tokens of the largest step for which vLLM makes a graph unless it is told, and what some scripts state."""


def _sglang(at: Started) -> Launch:
    drafts, polls = 0, _SLOW if at.clients >= _FEW else _EAGER
    if at.precision == "fp4":
        tokens, sequences, share = 16384, 256, 0.85
    elif at.clients > _MOST_UNGUESSED and at.layout.tp == 8:
        tokens, sequences, share, drafts = 16384, 512, 0.82, 2
    elif at.layout.tp == 8:
        tokens, sequences, share = 32768, 128, 0.82
    else:
        tokens, sequences, share, polls = 8192, 32, 0.95, _EAGER
    policy = policy_of("sglang", tokens=tokens, sequences=sequences, polls=polls, ahead=True)
    return Launch(policy=policy, memory_share=share, cache="f8E4M3FN", drafts=drafts)


_MOST_UNGUESSED = 64
"""With more clients than this, DeepSeek in 8 bits ran on SGLang with guesses only; with fewer, nothing tells
runs with them from those without.
"""


def _trtllm(at: Started) -> Launch:
    match at.model.partition("-")[0]:
        case "GPT":
            changes = {"tokens": 20000, "sequences": 512}
            share = 0.85
        case "Llama":
            changes = {"tokens": 16384}
            share = 0.9
            if at.prompt == at.output and at.layout.tp < 8:
                changes |= {"holds": 20, "holds_tokens": round(0.9 * 16384)}
        case _:
            return _guessing(at) if at.release in _GUESSING and at.date >= "2026" else _deepseek(at)
    return Launch(policy=_balanced(at, changes), memory_share=share, of_free=True, cache="f8E4M3FN")


def _deepseek(at: Started) -> Launch:
    """DeepSeek's models on TensorRT-LLM."""
    tokens, share = -(-(at.clients + at.prompt + 64) // 64) * 64, 0.8
    short, long = at.prompt == at.output, at.prompt > at.output
    changes: dict[str, int] = {}
    is_graph = False
    if at.date >= _WARM:
        tokens = max(tokens, 8192)
        if at.precision == "fp8":
            is_graph = at.clients >= 64 and (short or long) and at.layout.dp == 1
            share = 0.7 if at.layout.dp > 1 else 0.75 if long and at.layout.tp == 4 else 0.8
            if is_graph and short:
                changes = {"holds": 40, "holds_tokens": round(0.8 * tokens)}
        else:
            is_graph = short and at.layout.ep == 8
    policy = _balanced(at, {"tokens": tokens, **changes})
    return Launch(
        policy=policy, memory_share=share, of_free=True, cache="f8E4M3FN", captured=tokens if is_graph else 0
    )


_GUESSING = frozenset({"1.1.0rc2.post2", "1.2.0rc6.post3"})
"""Releases of which runs of 2026 guess tokens."""


def _guessing(at: Started) -> Launch:
    """The same in releases that guess tokens."""
    spread = at.layout.dp > 1
    drafts, most = (1, max(1, at.clients // at.layout.dp)) if spread else (3, at.clients)
    tokens = -(-((drafts + 1) * most + at.prompt + 64) // 64) * 64
    if at.precision == "fp8":
        shape = (at.prompt > 1024, at.output > 1024)
        is_graph = not spread and at.clients > {(False, False): 4, (False, True): 8}.get(shape, 16)
    else:
        is_graph = at.prompt == at.output and at.clients in (32, 64, 128) and not (spread and at.clients > 64)
        is_graph |= at.output > at.prompt and at.clients == 64
    policy = _balanced(at, {"tokens": tokens, "sequences": most})
    share = 0.7 if spread and at.precision == "fp8" else 0.8
    return Launch(
        policy=policy,
        memory_share=share,
        of_free=True,
        cache="f8E4M3FN",
        drafts=drafts,
        captured=tokens if is_graph else 0,
    )


def _balanced(at: Started, changes: dict[str, int]) -> Policy:
    """Prompts are worked on whole. Data-parallel ranks work on prompts when each of them has one: as long as
    that takes in the mean, and :data:`_BALANCED` steps at most.
    """
    ranks = at.layout.dp
    if ranks > 1:
        each = at.output * ranks / at.clients
        until_all = each * sum(1 / rank for rank in range(1, ranks + 1))
        changes |= {"polls": max(1, min(_BALANCED, round(until_all)))}
    whole = at.prompt <= changes.get("tokens", policy_of("trtllm").tokens)
    return policy_of("trtllm", chunked=not whole, ahead=at.is_published, **changes)
