"""LLM servers: engine, layout, number formats and limits of the scheduler, with the options that set them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from hespas.api.arguments import ChosenEstimator, hardware_option
from hespas.api.lowering import DEFAULT_ESTIMATOR
from hespas.api.serving_plan_result import LatencyFigure, ServingObjective
from hespas.generators.llm import Model, ServingStep, load_model, precision_of, serving_layout
from hespas.generators.llm.serving_lattice import (
    ADAPTER_GB_PER_S,
    LatticeGrids,
    cache_transfer_ns,
    cached_tokens,
    lattice_kernels,
)
from hespas.graph import Diagnostics, find_dtype
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.deprecation import renamed_fields
from hespas.graph.errors import UnsupportedError, UsageError, clipped
from hespas.graph.hints import AtLeast, AtMost, NonNegativeInt, Option, PositiveInt, check_fields
from hespas.hardware import canonical_name, is_path, load_device, named_device
from hespas.hardware.library import fits_of_user
from hespas.simulator.serving import Correction, Policy, StepTimes, models_of, policy_of, step_times
from hespas.simulator.serving.engine_parameters import EngineParameters, Stack, parameters_of

__all__ = [
    "LAYOUT",
    "MOST_SEARCHED",
    "SCHEDULER",
    "ChunkedPrompts",
    "ExpertDtype",
    "GpuMemoryUtilization",
    "KvCacheDtype",
    "KvCacheTokens",
    "LatencyLimits",
    "LimitedFigure",
    "PromptOverhead",
    "RequestOverhead",
    "SearchObjective",
    "SearchPrices",
    "SearchTop",
    "SearchedDevices",
    "SearchedDp",
    "SearchedEp",
    "SearchedHardware",
    "SearchedRequests",
    "SearchedSequences",
    "SearchedTokens",
    "SearchedTp",
    "SequenceOverhead",
    "ServedModel",
    "Server",
    "ServingEngine",
    "ServingPrecision",
    "StepOverhead",
    "UsedParameters",
]

_MAX_OVERHEAD = 1e9
"""Limit of overheads: a quarter of an hour per step [us], and more than a week per request [ms]."""

_MOST_OF_A_STEP = "these kernels are most of the time of a step"
_UNSEEN: Mapping[str, str] = {
    "learned.unseen-device": _MOST_OF_A_STEP,
    "composite.unseen-device": _MOST_OF_A_STEP,
}
"""Notes on the diagnostics about matmuls and attention that were not measured on the device."""


LAYOUT, SCHEDULER, _HOST = "Layout and number formats", "Scheduler and cache", "Host"
_POOLS = "Separate prefill and decode servers"
"""Headings of ``--help``."""
_NonNegative = Annotated[float, AtLeast(0)]


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
_Hardware = Annotated[str, hardware_option("Estimate durations on this device (see 'hespas hardware list').")]
ServingEngine = Annotated[
    Literal["vllm", "sglang", "trtllm"],
    Option("Model the scheduler and all-reduce of this serving engine.", panel=SCHEDULER),
]
_Dp = Annotated[PositiveInt, _number("Set data-parallel attention replicas (round-robin).", LAYOUT)]
_Tp = Annotated[PositiveInt, _number("Set tensor-parallel ranks.", LAYOUT)]
_Ep = Annotated[PositiveInt, _number("Set expert-parallel ranks.", LAYOUT)]
ServingPrecision = Annotated[
    str,
    Option("Set the precision: bf16, fp16, fp8, mxfp8, nvfp4, int8.", metavar="NAME", panel=LAYOUT),
]
ExpertDtype = Annotated[
    str,
    Option("Set the element type of experts (default: from `precision`).", metavar="TYPE", panel=LAYOUT),
]
KvCacheDtype = Annotated[str, Option("Set the element type of the KV cache.", metavar="TYPE", panel=LAYOUT)]
_Tokens = Annotated[
    NonNegativeInt,
    _number("Limit tokens per step (vLLM: max-num-batched-tokens; 0: the engine's default).", SCHEDULER),
]
_Sequences = Annotated[
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
_PrefillServers = Annotated[
    NonNegativeInt,
    _number("Process prompts on N separate servers (0: none; requires decode servers).", _POOLS),
]
_DecodeServers = Annotated[
    NonNegativeInt, _number("Generate answers on N servers of `dp` x `tp` devices.", _POOLS)
]
_PrefillDp = Annotated[
    NonNegativeInt, _number("Set data-parallel replicas per prefill server (0: `dp`).", _POOLS)
]
_PrefillTp = Annotated[
    NonNegativeInt, _number("Set tensor-parallel ranks per prefill server (0: `tp`).", _POOLS)
]
_PrefillEp = Annotated[
    NonNegativeInt, _number("Set expert-parallel ranks per prefill server (0: `ep`).", _POOLS)
]
_KvTransfer = Annotated[
    _NonNegative | None,
    _number(
        "Set the rate per device in GB/s at which KV caches are sent (default: 50; 0: no time).",
        _POOLS,
        "GB/S",
    ),
]
_LEAST_GB_PER_S = 1e-3
"""Lowest rate of a transfer that is accepted."""


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
        "list) and chunked or whole prompts.",
        metavar="ttft=500ms,tpot=30ms",
        panel=_SEARCH,
        is_required=False,
    ),
]
SearchedDevices = Annotated[_OneOrMore, _axis("Use `dp` x `tp` = N devices.", _SEARCH, "")]
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


@renamed_fields(
    stack="engine",
    experts="expert_dtype",
    cache="kv_cache_dtype",
    max_sequences="max_num_seqs",
    memory_share="gpu_memory_utilization",
    cache_tokens="kv_cache_tokens",
    host_us="step_overhead_us",
    request_ms="request_overhead_ms",
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """LLM server: an ``engine`` (vllm, sglang, trtllm) with ``tp`` tensor-parallel ranks and ``dp`` replicas
    of attention, which each serve a share of the requests. Experts are distributed over ``ep`` ranks.

    ``expert_dtype`` is the element type of experts (empty: from ``precision``), ``kv_cache_dtype`` the
    element type of the KV cache. The server uses at most the fraction ``gpu_memory_utilization`` of the
    memory of a device. ``kv_cache_tokens`` is the size of the KV cache per replica in tokens (0: all free
    memory).

    ``engine_parameters`` selects the corrections of the engine that ship with the package
    (:mod:`hespas.simulator.serving.engine_parameters`), or none. They hold for the default estimator.
    Overheads of the host replace theirs: ``step_overhead_us`` per step, ``sequence_us`` per sequence and
    ``prompt_us`` per prompt in the step, and ``request_overhead_ms`` per request before its first step (None:
    as the parameters of the engine state; 0 without them).

    With ``prefill_servers`` and ``decode_servers``, prompts and answers have separate servers (disaggregated
    serving). ``tp``, ``dp`` and ``ep`` are the layout of a decode server, and of a prefill server unless
    ``prefill_tp``, ``prefill_dp`` or ``prefill_ep`` are set. Each device sends or receives KV caches at
    ``kv_transfer_gb_per_s`` (None: 50, a network adapter of 400 Gb/s).
    """

    model: ServedModel
    hardware: _Hardware
    engine: ServingEngine = "vllm"
    dp: _Dp = 1
    tp: _Tp = 1
    ep: _Ep = 1
    precision: ServingPrecision = "bf16"
    expert_dtype: ExpertDtype = ""
    kv_cache_dtype: KvCacheDtype = "bf16"
    max_batched_tokens: _Tokens = 0
    max_num_seqs: _Sequences = 0
    chunked: ChunkedPrompts = None
    gpu_memory_utilization: GpuMemoryUtilization = 0.9
    kv_cache_tokens: KvCacheTokens = 0
    engine_parameters: UsedParameters = "shipped"
    step_overhead_us: StepOverhead = None
    sequence_us: SequenceOverhead = None
    prompt_us: PromptOverhead = None
    request_overhead_ms: RequestOverhead = None
    prefill_servers: _PrefillServers = 0
    decode_servers: _DecodeServers = 0
    prefill_dp: _PrefillDp = 0
    prefill_tp: _PrefillTp = 0
    prefill_ep: _PrefillEp = 0
    kv_transfer_gb_per_s: _KvTransfer = None
    estimator: ChosenEstimator = DEFAULT_ESTIMATOR

    def __post_init__(self) -> None:
        """Raise ``UsageError`` for values that are not allowed."""
        check_fields(self)
        precision_of(self.precision)
        for name in ("kv_cache_dtype", "expert_dtype"):
            if (dtype := getattr(self, name)) and find_dtype(dtype) is None:
                raise UsageError(
                    f"`{name}={clipped(dtype)}` is not an element type",
                    hint="use bf16, f16, f8E4M3FN, i8, ...",
                )
        for name in ("step_overhead_us", "sequence_us", "prompt_us", "request_overhead_ms"):
            if not 0 <= (getattr(self, name) or 0) <= _MAX_OVERHEAD:
                raise UsageError(
                    f"invalid `{name}={getattr(self, name):g}`",
                    hint=f"use a value from 0 to {_MAX_OVERHEAD:g}",
                )
        if bool(self.prefill_servers) != bool(self.decode_servers):
            missing = "prefill_servers" if self.decode_servers else "decode_servers"
            raise UsageError(
                f"`{missing}` is required for separate prefill and decode servers", hint=f"`{missing}=1`"
            )
        if 0 < (self.kv_transfer_gb_per_s or 0) < _LEAST_GB_PER_S:
            raise UsageError(
                f"invalid `kv_transfer_gb_per_s={self.kv_transfer_gb_per_s:g}`",
                hint=f"use 0, or {_LEAST_GB_PER_S:g} or more",
            )
        for name in ("prefill_dp", "prefill_tp", "prefill_ep", "kv_transfer_gb_per_s"):
            if getattr(self, name) and not self.prefill_servers:
                raise UsageError(
                    f"`{name}` requires separate prefill servers",
                    hint="add `prefill_servers=1` and `decode_servers=1`",
                )
        self.policy()

    @property
    def pools(self) -> tuple[Server, ...]:
        """Return a server of each pool: of prefill and decode, or this server alone."""
        if not self.prefill_servers:
            return (self,)
        decode = replace(
            self, prefill_servers=0, decode_servers=0, prefill_dp=0, prefill_tp=0, prefill_ep=0,
            kv_transfer_gb_per_s=None,
        )  # fmt: skip
        layout = {
            name: getattr(self, f"prefill_{name}") or getattr(self, name) for name in ("dp", "tp", "ep")
        }
        return replace(decode, **layout), decode

    @property
    def num_replicas(self) -> tuple[int, ...]:
        """Return the number of replicas of attention in each of :attr:`pools`."""
        counts = (self.prefill_servers, self.decode_servers) if self.prefill_servers else (1,)
        return tuple(count * pool.dp for count, pool in zip(counts, self.pools, strict=True))

    @property
    def num_devices(self) -> int:
        """Return the number of devices of all pools."""
        return sum(replicas * pool.tp for replicas, pool in zip(self.num_replicas, self.pools, strict=True))

    def send_ns(self, prompts: IntArray) -> FloatArray:
        """Return the times [ns] in which a prefill server sends the KV caches of ``prompts`` tokens to a
        decode server, shape ``(prompts,)``. The rank with the most bytes determines the time.
        """
        gb_per_s = self.kv_transfer_gb_per_s
        gb_per_s = ADAPTER_GB_PER_S if gb_per_s is None else gb_per_s
        return cache_transfer_ns((pool.step() for pool in self.pools), prompts, gb_per_s)

    def policy(self) -> Policy:
        """Return the scheduling policy of the server's engine, with the limits that the server sets. Raises
        ``UsageError``.
        """
        return policy_of(
            self.engine,
            tokens=self.max_batched_tokens or None,
            sequences=self.max_num_seqs or None,
            chunked=self.chunked,
        )

    def files(self) -> list[Path]:
        """Return the input files of the server: a model or device file of the user."""
        names = [Path(source) for source in (self.model, self.hardware) if not isinstance(source, Model)]
        return [path for path in names if path.suffix == ".toml" or path.name != str(path)]

    def step(self) -> ServingStep:
        """Return the serving step that generates the kernels of this server. Without ``ep``, experts are
        sharded over all ranks. Raises ``UsageError`` for an unknown model.
        """
        model = self.model if isinstance(self.model, Model) else load_model(str(self.model))
        return ServingStep(
            model=model,
            layout=serving_layout(model, tp=self.tp, dp=self.dp, ep=self.ep),
            precision=precision_of(self.precision),
            cache=self.kv_cache_dtype,
            experts=self.expert_dtype,
            fused=True,
        )

    def times(
        self,
        step: ServingStep,
        context: int,
        diagnostics: Diagnostics,
        parameters: EngineParameters | None = None,
    ) -> StepTimes:
        """Return the estimated times of the server's steps, for sequences of at most ``context`` tokens, with
        the ``parameters`` of its engine.
        """
        policy, device = self.policy(), load_device(self.hardware)
        if device.step_factors:
            diagnostics.warning(
                "serving.step-factors",
                device.name,
                "step factors of the device file are not applied: they include the host, which a server sets "
                "separately (`step_overhead_us`)",
            )
        grids = LatticeGrids.up_to(
            tokens=policy.tokens, sequences=min(policy.sequences, policy.tokens), context=max(context, 128)
        )
        estimated = Diagnostics()
        times = step_times(
            lattice_kernels(step, grids),
            device,
            models_of(self.engine, self.estimator),
            num_ranks=step.layout.ranks,
            diagnostics=estimated,
        )
        diagnostics.extend(estimated.as_warnings(_UNSEEN))
        stated_ns = {
            "step_ns": (self.step_overhead_us, 1e3),
            "sequence_ns": (self.sequence_us, 1e3),
            "prompt_ns": (self.prompt_us, 1e3),
            "request_ns": (self.request_overhead_ms, 1e6),
        }
        correction = replace(
            Correction() if parameters is None else parameters.correction,
            **{name: time * unit for name, (time, unit) in stated_ns.items() if time is not None},
        )
        return replace(times.corrected(correction), captured=policy.captured)

    def parameters(self, step: ServingStep, *, is_disaggregated: bool = False) -> EngineParameters | None:
        """Return the parameters of the engine that correct the times of ``step``; None without any."""
        if self.engine_parameters == "none":
            return None
        device = load_device(self.hardware)
        name = device.name
        if is_path(self.hardware):
            canonical = canonical_name(name)
            shipped = named_device(canonical) if canonical else None
            rates = device.peaks, device.memories
            if shipped is None or rates != (shipped.peaks, shipped.memories) or fits_of_user(device):
                name = f"changed {name}"  # factors on kernels hold for the shipped estimates
        stack = Stack(name, self.engine, step.expert_format, is_disaggregated)
        return parameters_of(stack, self.estimator)

    def cache_size(self, step: ServingStep) -> float:
        """Return the size of the KV cache of a replica in tokens. Raises ``UnsupportedError`` if the
        weights leave no memory for it.
        """
        if self.kv_cache_tokens:
            return float(self.kv_cache_tokens)
        device, policy = load_device(self.hardware), self.policy()
        memory = device.main_memory.capacity_bytes * self.gpu_memory_utilization
        sequences = min(policy.sequences, policy.tokens)
        tokens = cached_tokens(step, memory, tokens=policy.tokens, sequences=sequences)
        if tokens < 1:
            raise UnsupportedError(
                f"the weights of {step.model.name} leave no memory for a KV cache in {memory / 1e9:,.0f} GB",
                hint="use a larger `tp`, a narrower `precision`, or `kv_cache_tokens`",
            )
        return float(int(tokens))
