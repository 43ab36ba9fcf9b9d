"""LLM servers: engine, layout, number formats and limits of the scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from hespas.api.arguments import ChosenEstimator
from hespas.api.lowering import DEFAULT_ESTIMATOR
from hespas.api.server_options import (
    Acceptance,
    ChunkedPrompts,
    DataParallel,
    DecodeServers,
    DraftSource,
    ExpertDtype,
    ExpertParallel,
    GpuMemoryUtilization,
    KvCacheDtype,
    KvCacheTokens,
    KvTransferRate,
    MaxBatchedTokens,
    MaxNumSeqs,
    PrefillDp,
    PrefillEp,
    PrefillServers,
    PrefillTp,
    PromptOverhead,
    RequestOverhead,
    SequenceOverhead,
    ServedHardware,
    ServedModel,
    ServingEngine,
    ServingPrecision,
    SpeculativeTokens,
    StepOverhead,
    TensorParallel,
    UsedParameters,
)
from hespas.generators.llm import Model, ServingStep, load_model, precision_of, serving_layout
from hespas.generators.llm.model import Experts
from hespas.generators.llm.serving_lattice import (
    ADAPTER_GB_PER_S,
    LatticeGrids,
    cache_transfer_ns,
    cached_tokens,
    draft_layer,
    lattice_kernels,
    with_draft_layer,
)
from hespas.graph import Diagnostics, find_dtype
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.deprecation import renamed_fields
from hespas.graph.errors import UnsupportedError, UsageError, clipped
from hespas.graph.hints import check_fields
from hespas.hardware import canonical_name, is_path, load_device, named_device
from hespas.hardware.library import fits_of_user
from hespas.report.texts import counted
from hespas.simulator.serving import (
    Correction,
    Drafts,
    Policy,
    StepTimes,
    models_of,
    policy_of,
    step_times,
)
from hespas.simulator.serving.engine_parameters import EngineParameters, Stack, parameters_of

__all__ = ["Server"]

_MAX_OVERHEAD = 1e9
"""Limit of overheads: a quarter of an hour per step [us], and more than a week per request [ms]."""

_MOST_OF_A_STEP = "these kernels are most of the time of a step"
_UNSEEN: Mapping[str, str] = {
    "learned.unseen-device": _MOST_OF_A_STEP,
    "composite.unseen-device": _MOST_OF_A_STEP,
}
"""Notes on the diagnostics about matmuls and attention that were not measured on the device."""
_LEAST_GB_PER_S = 1e-3
"""Lowest rate of a transfer that is accepted."""


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

    Each step verifies ``num_speculative_tokens`` tokens of each sequence that were generated before: by an
    additional layer of the model (``draft="layer"``), by a search in earlier tokens without cost
    (``"ngram"``), or by a draft model. ``acceptance`` is the probability that such a token is accepted if
    those before it are, or the probabilities per position, as engines log them (None: the engine's).

    With ``prefill_servers`` and ``decode_servers``, prompts and answers have separate servers (disaggregated
    serving). ``tp``, ``dp`` and ``ep`` are the layout of a decode server, and of a prefill server unless
    ``prefill_tp``, ``prefill_dp`` or ``prefill_ep`` are set. Each device sends or receives KV caches at
    ``kv_transfer_gb_per_s`` (None: 50, a network adapter of 400 Gb/s).
    """

    model: ServedModel
    hardware: ServedHardware
    engine: ServingEngine = "vllm"
    dp: DataParallel = 1
    tp: TensorParallel = 1
    ep: ExpertParallel = 1
    precision: ServingPrecision = "bf16"
    expert_dtype: ExpertDtype = ""
    kv_cache_dtype: KvCacheDtype = "bf16"
    max_batched_tokens: MaxBatchedTokens = 0
    max_num_seqs: MaxNumSeqs = 0
    chunked: ChunkedPrompts = None
    gpu_memory_utilization: GpuMemoryUtilization = 0.9
    kv_cache_tokens: KvCacheTokens = 0
    engine_parameters: UsedParameters = "shipped"
    step_overhead_us: StepOverhead = None
    sequence_us: SequenceOverhead = None
    prompt_us: PromptOverhead = None
    request_overhead_ms: RequestOverhead = None
    num_speculative_tokens: SpeculativeTokens = 0
    draft: DraftSource = "layer"
    acceptance: Acceptance = None
    prefill_servers: PrefillServers = 0
    decode_servers: DecodeServers = 0
    prefill_dp: PrefillDp = 0
    prefill_tp: PrefillTp = 0
    prefill_ep: PrefillEp = 0
    kv_transfer_gb_per_s: KvTransferRate = None
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
        self._check_drafts()
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
        pool_settings = {
            name: bool(getattr(self, name)) for name in ("prefill_dp", "prefill_tp", "prefill_ep")
        }
        pool_settings["kv_transfer_gb_per_s"] = self.kv_transfer_gb_per_s is not None
        for name, is_set in pool_settings.items():
            if is_set and not self.prefill_servers:
                raise UsageError(
                    f"`{name}` requires separate prefill servers",
                    hint="add `prefill_servers=1` and `decode_servers=1`",
                )
        self.policy()

    def _check_drafts(self) -> None:
        """Raise ``UsageError`` for settings of speculative decoding that contradict each other."""
        for name, default in (("draft", "layer"), ("acceptance", None)):
            if getattr(self, name) != default and not self.num_speculative_tokens:
                raise UsageError(
                    f"`{name}` requires speculative tokens", hint="add `num_speculative_tokens=3`"
                )
        is_list = isinstance(self.acceptance, Sequence)
        shares = self.acceptance if isinstance(self.acceptance, Sequence) else (self.acceptance or 0.0,)
        text = ",".join(f"{share:g}" for share in shares)
        if not all(0 <= share <= 1 for share in shares):
            raise UsageError(f"`acceptance={text}`: expected 0 to 1", hint="`acceptance=0.8`")
        if is_list and len(shares) != self.num_speculative_tokens:
            raise UsageError(
                f"`acceptance={text}` has {counted(len(shares), 'position')} for "
                f"{counted(self.num_speculative_tokens, 'speculative token')}",
                hint="give one value per position, or one value",
            )
        if 0 < self.max_batched_tokens <= self.num_speculative_tokens:
            raise UsageError(
                f"a step of {counted(self.max_batched_tokens, 'token')} cannot verify "
                f"{counted(self.num_speculative_tokens, 'speculative token')} of a sequence",
                hint=f"`max_batched_tokens={self.num_speculative_tokens + 1}` or more",
            )
        if any(later > share for share, later in pairwise(shares)):
            raise UsageError(
                f"`acceptance={text}` rises: a token is only accepted after those before it",
                hint="give the acceptance rate of each position over all steps, as engines log it",
            )

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
        decode server, shape ``(prompts,)``. The rank with the most bytes determines the time. The cache of
        the draft model or layer follows.
        """
        gb_per_s = self.kv_transfer_gb_per_s
        gb_per_s = ADAPTER_GB_PER_S if gb_per_s is None else gb_per_s
        time_ns = cache_transfer_ns((pool.step() for pool in self.pools), prompts, gb_per_s)
        drafts = [draft for pool in self.pools if (draft := pool.draft_step()) is not None]
        return time_ns + cache_transfer_ns(drafts, prompts, gb_per_s) if drafts else time_ns

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
        sources = self.model, self.hardware, self.draft
        names = [Path(source) for source in sources if not isinstance(source, Model)]
        return [path for path in names if path.suffix == ".toml" or path.name != str(path)]

    def step(self) -> ServingStep:
        """Return the serving step that generates the kernels of this server. Without ``ep``, experts are
        sharded over all ranks. Raises ``UsageError`` for an unknown model.
        """
        return self._step_of(self.model)

    def draft_step(self) -> ServingStep | None:
        """Return the serving step of the draft model, or of the additional layer; None without any."""
        if not self.num_speculative_tokens or self.draft == "ngram":
            return None
        if self.draft == "layer":
            return draft_layer(self.step())
        step = self._step_of(self.draft)
        try:
            step.account()
        except UsageError as error:
            raise UsageError(f"draft model {step.model.name}: {error.message}", hint=error.hint) from error
        return step

    def _step_of(self, source: str | Path | Model) -> ServingStep:
        model = source if isinstance(source, Model) else load_model(str(source))
        has_experts = any(isinstance(block, Experts) for block in model.blocks())
        ep = self.ep if has_experts or source is self.model else 1
        return ServingStep(
            model=model,
            layout=serving_layout(model, tp=self.tp, dp=self.dp, ep=ep),
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
        if self.engine_parameters != "none" and parameters is None:
            diagnostics.warning(
                "serving.no-engine-parameters",
                device.name,
                f"no parameters of {self.engine} with {self.estimator!r}: only stated host times are used",
            )
        elif parameters is not None and parameters.is_carried:
            diagnostics.info(
                "serving.engine-parameters",
                device.name,
                f"no measured runs of {self.engine} on the device: {parameters.evidence}",
            )
        grids = LatticeGrids.up_to(
            tokens=policy.tokens, sequences=min(policy.sequences, policy.tokens), context=max(context, 128)
        )
        estimated, models = Diagnostics(), models_of(self.engine, self.estimator)

        def estimate(part: ServingStep, queries: int = 1) -> StepTimes:
            ranks = part.layout.ranks
            kernels = lattice_kernels(part, grids, queries=queries)
            return step_times(kernels, device, models, num_ranks=ranks, diagnostics=estimated)

        count, acceptance, draft = self.num_speculative_tokens, self.acceptance, self.draft_step()
        times = estimate(step, 1 + count)
        drafted = None if draft is None else estimate(draft)
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
        if isinstance(acceptance, float | int):
            acceptance = tuple(acceptance ** (position + 1) for position in range(count))
        elif count and acceptance is None:
            diagnostics.warning(
                "serving.acceptance",
                step.model.name,
                "the acceptance of speculative tokens is not stated; each token is accepted with probability "
                f"{correction.accepts:.2g} if those before it are (`acceptance`)",
            )
        if draft is not None and draft.model.vocab != step.model.vocab:
            diagnostics.warning(
                "serving.draft-vocabulary",
                draft.model.name,
                f"the vocabulary of the draft model has {draft.model.vocab:,} tokens, and the one of "
                f"{step.model.name} {step.model.vocab:,}; engines accept equal vocabularies only",
            )
        drafts = Drafts(tokens=count, times=drafted, acceptance=tuple(acceptance or ()))
        return replace(times, captured=policy.captured, drafts=drafts).corrected(correction)

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
        weights, activations and libraries leave no memory for it.
        """
        if self.kv_cache_tokens:
            return float(self.kv_cache_tokens)
        device, policy = load_device(self.hardware), self.policy()
        if device.main_memory.capacity_bytes < 0:
            raise UnsupportedError(
                f"the memory size of {device.name} is unknown",
                hint="state `kv_cache_tokens`, or capacity_bytes in the device file",
            )
        sequences = min(policy.sequences, policy.tokens)
        draft = self.draft_step()
        if draft is not None and self.draft == "layer":  # it shares the embedding and the head
            step, draft = with_draft_layer(step), None
        tokens = cached_tokens(
            step, device, self.gpu_memory_utilization, tokens=policy.tokens, sequences=sequences, draft=draft
        )
        if tokens < 1:
            memory = device.main_memory.capacity_bytes * self.gpu_memory_utilization
            models = step.model.name if draft is None else f"{step.model.name} and {draft.model.name}"
            raise UnsupportedError(
                f"the weights of {models}, activations and libraries leave no memory for a KV cache in "
                f"{memory / 1e9:,.0f} GB",
                hint="use a larger `tp`, a narrower `precision`, or `kv_cache_tokens`",
            )
        return float(int(tokens))
