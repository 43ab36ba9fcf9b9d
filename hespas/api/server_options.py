"""Options of LLM servers, and of the search for the best one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from hespas.api.arguments import hardware_option
from hespas.api.serving_plan_result import LatencyFigure, ServingObjective
from hespas.generators.llm import Model
from hespas.graph.errors import UsageError, clipped
from hespas.graph.hints import AtLeast, AtMost, NonNegativeInt, Option, PositiveInt

__all__ = [
    "LAYOUT",
    "MOST_SEARCHED",
    "SCHEDULER",
    "Acceptance",
    "ChunkedPrompts",
    "DataParallel",
    "DecodeServers",
    "DraftSource",
    "ExpertDtype",
    "ExpertParallel",
    "GpuMemoryUtilization",
    "KvCacheDtype",
    "KvCacheTokens",
    "KvTransferRate",
    "LatencyLimits",
    "LimitedFigure",
    "MaxBatchedTokens",
    "MaxNumSeqs",
    "PrefillDp",
    "PrefillEp",
    "PrefillServers",
    "PrefillTp",
    "PromptOverhead",
    "RequestOverhead",
    "SearchObjective",
    "SearchPrices",
    "SearchTop",
    "SearchedDecodeServers",
    "SearchedDevices",
    "SearchedDp",
    "SearchedEp",
    "SearchedHardware",
    "SearchedPrefillDp",
    "SearchedPrefillEp",
    "SearchedPrefillServers",
    "SearchedPrefillTp",
    "SearchedRequests",
    "SearchedSequences",
    "SearchedTokens",
    "SearchedTp",
    "SequenceOverhead",
    "ServedHardware",
    "ServedModel",
    "ServingEngine",
    "ServingPrecision",
    "SpeculativeTokens",
    "StepOverhead",
    "TensorParallel",
    "UsedParameters",
]

LAYOUT, SCHEDULER, _HOST = "Layout and number formats", "Scheduler and cache", "Host"
_SPECULATION, _POOLS = "Speculative decoding", "Separate prefill and decode servers"
"""Headings of ``--help``."""
_NonNegative = Annotated[float, AtLeast(0)]


def _shares(text: str) -> float | tuple[float, ...]:
    """Parse one share, or a list of them: ``0.8`` or ``0.8,0.6,0.5``."""
    try:
        shares = tuple(map(float, str(text).split(",")))
    except ValueError:
        raise UsageError(
            f"invalid list '{clipped(text)}': expected numbers separated by commas", hint="write 0.8,0.6"
        ) from None
    return shares[0] if len(shares) == 1 else shares


def _number(help_text: str, panel: str, metavar: str = "N") -> Option:
    return Option(help_text, panel=panel, metavar=metavar)


ServedModel = Annotated[
    str | Path | Model,
    Option(
        "Built-in model or model file.",
        metavar="MODEL|FILE.toml",
        completes="models",
        is_argument=True,
        is_text=True,
    ),
]
ServedHardware = Annotated[
    str, hardware_option("Estimate durations on this device (see 'hespas hardware list').")
]
ServingEngine = Annotated[
    Literal["vllm", "sglang", "trtllm"],
    Option("Model the scheduler and all-reduce of this serving engine.", panel=SCHEDULER),
]
DataParallel = Annotated[PositiveInt, _number("Set data-parallel attention replicas (round-robin).", LAYOUT)]
TensorParallel = Annotated[PositiveInt, _number("Set tensor-parallel ranks.", LAYOUT)]
ExpertParallel = Annotated[PositiveInt, _number("Set expert-parallel ranks.", LAYOUT)]
ServingPrecision = Annotated[
    str,
    Option("Set the precision: bf16, fp16, fp8, mxfp8, nvfp4, int8.", metavar="NAME", panel=LAYOUT),
]
ExpertDtype = Annotated[
    str,
    Option("Set the element type of experts (default: from `precision`).", metavar="TYPE", panel=LAYOUT),
]
KvCacheDtype = Annotated[str, Option("Set the element type of the KV cache.", metavar="TYPE", panel=LAYOUT)]
MaxBatchedTokens = Annotated[
    NonNegativeInt,
    _number("Limit tokens per step (vLLM: max-num-batched-tokens; 0: the engine's default).", SCHEDULER),
]
MaxNumSeqs = Annotated[
    NonNegativeInt,
    _number("Limit concurrent sequences (vLLM: max-num-seqs; 0: the engine's default).", SCHEDULER),
]
ChunkedPrompts = Annotated[
    bool | None,
    Option(
        "Split a prompt that exceeds a step, or schedule it whole (default: the engine's).",
        flag="chunked/whole-prompts",
        panel=SCHEDULER,
    ),
]
GpuMemoryUtilization = Annotated[
    float,
    AtLeast(0.01),
    AtMost(1),
    _number("Set the fraction of device memory to use.", SCHEDULER, "X"),
]
KvCacheTokens = Annotated[
    NonNegativeInt,
    _number("Set the KV-cache size per replica in tokens (0: all free memory).", SCHEDULER),
]
UsedParameters = Annotated[
    Literal["shipped", "none"],
    Option(
        "Correct kernels and host times with the parameters of the engine that ship with Hespas, fitted to "
        "measured servers, or simulate kernels alone.",
        panel=_HOST,
    ),
]
StepOverhead = Annotated[
    _NonNegative | None,
    _number("Set the CPU overhead per step in microseconds (default: the engine's).", _HOST, "US"),
]
SequenceOverhead = Annotated[
    _NonNegative | None,
    _number(
        "Set the CPU overhead per sequence of a step in microseconds (default: the engine's).", _HOST, "US"
    ),
]
PromptOverhead = Annotated[
    _NonNegative | None,
    _number(
        "Set the CPU overhead per prompt of a step in microseconds (default: the engine's).", _HOST, "US"
    ),
]
RequestOverhead = Annotated[
    _NonNegative | None,
    _number(
        "Set the fixed latency per request before queueing in milliseconds (default: the engine's).",
        _HOST,
        "MS",
    ),
]
SpeculativeTokens = Annotated[
    NonNegativeInt,
    AtMost(64),
    _number("Generate N speculative tokens per sequence and step.", _SPECULATION),
]
DraftSource = Annotated[
    str | Path | Model,
    Option(
        "Generate speculative tokens with an additional layer (MTP, EAGLE), at no cost (ngram), or with this "
        "draft model.",
        metavar="layer|ngram|MODEL|FILE.toml",
        panel=_SPECULATION,
        is_text=True,
        completes="models",
    ),
]
Acceptance = Annotated[
    float | Sequence[float] | None,
    Option(
        "Set the probability that a speculative token is accepted if those before it are, or the acceptance "
        "rates per position (default: the engine's).",
        metavar="X[,X...]",
        panel=_SPECULATION,
        parse=_shares,
    ),
]
PrefillServers = Annotated[
    NonNegativeInt,
    _number("Process prompts on N separate servers (0: none; requires decode servers).", _POOLS),
]
DecodeServers = Annotated[
    NonNegativeInt, _number("Generate answers on N servers of `dp` x `tp` devices.", _POOLS)
]
PrefillDp = Annotated[
    NonNegativeInt, _number("Set data-parallel replicas per prefill server (0: `dp`).", _POOLS)
]
PrefillTp = Annotated[
    NonNegativeInt, _number("Set tensor-parallel ranks per prefill server (0: `tp`).", _POOLS)
]
PrefillEp = Annotated[
    NonNegativeInt, _number("Set expert-parallel ranks per prefill server (0: `ep`).", _POOLS)
]
KvTransferRate = Annotated[
    _NonNegative | None,
    _number(
        "Set the rate per device in GB/s at which KV caches are sent (default: 50; 0: no time).",
        _POOLS,
        "GB/S",
    ),
]
MOST_SEARCHED = 1_000_000_000
"""Largest value of a setting that is searched."""
_SEARCH = "Search under latency limits"
"""Heading of ``--help``."""


def _one_or_more(text: str) -> int | tuple[int, ...]:
    """Parse one whole number, or a list of them: ``8`` or ``1,2,4``."""
    parts = [part.strip() for part in str(text).split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(
            f"invalid list '{clipped(text)}': expected whole numbers separated by commas", hint="write 1,2,4"
        )
    if longest := next((part for part in parts if len(part) > len(str(MOST_SEARCHED))), ""):
        raise UsageError(
            f"the number '{clipped(longest)}' is too large", hint=f"use at most {MOST_SEARCHED} per value"
        )
    numbers = tuple(map(int, parts))
    return numbers[0] if len(numbers) == 1 else numbers


def _axis(help_text: str, panel: str, default_text: str) -> Option:
    return Option(help_text, metavar="N[,N...]", panel=panel, parse=_one_or_more, default_text=default_text)


_OneOrMore = int | Sequence[int] | None
SearchedHardware = Annotated[
    str | Sequence[str],
    hardware_option("Estimate durations on this device (see 'hespas hardware list'); `sla` accepts a list."),
]
SearchedRequests = Annotated[
    str,
    Option(
        "Read a log with arrival_s, prompt_tokens and output_tokens, or draw requests from a process: "
        "poisson:rate=4, bursts:rate=4,burst=8, closed:concurrency=16; each with requests=, prompt=, "
        "output=, ratio=, seed=. With `sla`, a process without rate= or concurrency=, which is searched.",
        metavar="LOG.csv|LOG.jsonl|PROCESS",
        is_text=True,
        access="reads",
        default_text="with `sla`: poisson",
    ),
]
LatencyLimits = Annotated[
    str,
    Option(
        "Find the highest load within these limits of ttft, tpot and latency, over all combinations of "
        "`hardware`, `devices`, `tp`, `dp`, `ep`, `max_batched_tokens`, `max_num_seqs` (each accepts a "
        "list), chunked or whole prompts, and separate prefill and decode servers.",
        metavar="ttft=500ms,tpot=30ms",
        panel=_SEARCH,
        is_required=False,
    ),
]
SearchedDevices = Annotated[_OneOrMore, _axis("Use N devices in all servers.", _SEARCH, "")]
LimitedFigure = Annotated[LatencyFigure, Option("Limit this figure of the requests.", panel=_SEARCH)]
SearchObjective = Annotated[
    ServingObjective,
    Option(
        "`throughput`: maximize the rate per device (closed arrivals: output tokens/s per device); `price`: "
        "minimize the price per output token.",
        panel=_SEARCH,
    ),
]
SearchPrices = Annotated[
    str | Path | None,
    Option("Read prices per device-hour from a TOML file.", metavar="FILE", panel=_SEARCH, access="reads"),
]
SearchTop = Annotated[
    int, AtLeast(1), AtMost(1000), Option("Print the N best configurations.", metavar="N", panel=_SEARCH)
]
SearchedDp = Annotated[
    _OneOrMore,
    _axis("Set data-parallel attention replicas (round-robin).", LAYOUT, "1; with `sla`: all that fit"),
]
SearchedTp = Annotated[_OneOrMore, _axis("Set tensor-parallel ranks.", LAYOUT, "1; with `sla`: 1, 2, 4, 8")]
SearchedEp = Annotated[
    _OneOrMore, _axis("Set expert-parallel ranks.", LAYOUT, "1; with `sla`: 1 and all devices")
]
SearchedPrefillServers = Annotated[
    _OneOrMore,
    _axis(
        "Process prompts on N separate servers (0: none; requires decode servers).",
        _POOLS,
        "0; with `sla` and decode servers: all that fit",
    ),
]
SearchedDecodeServers = Annotated[
    _OneOrMore,
    _axis(
        "Generate answers on N servers of `dp` x `tp` devices.",
        _POOLS,
        "0; with `sla` and prefill servers: all that fit",
    ),
]
SearchedPrefillDp = Annotated[
    _OneOrMore, _axis("Set data-parallel replicas per prefill server (0: `dp`).", _POOLS, "0; with `sla`: 1")
]
SearchedPrefillTp = Annotated[
    _OneOrMore,
    _axis("Set tensor-parallel ranks per prefill server (0: `tp`).", _POOLS, "0; with `sla`: 1, 2, 4, 8"),
]
SearchedPrefillEp = Annotated[
    _OneOrMore,
    _axis(
        "Set expert-parallel ranks per prefill server (0: `ep`).",
        _POOLS,
        "0; with `sla`: 1 and all devices of a server",
    ),
]
SearchedTokens = Annotated[
    _OneOrMore,
    _axis(
        "Limit tokens per step (vLLM: max-num-batched-tokens; 0: the engine's default).",
        SCHEDULER,
        "0; with `sla`: 2048, 8192, 16384 and 0",
    ),
]
SearchedSequences = Annotated[
    _OneOrMore,
    _axis(
        "Limit concurrent sequences (vLLM: max-num-seqs; 0: the engine's default).",
        SCHEDULER,
        "0; with `sla`: 64, 256 and 0",
    ),
]
