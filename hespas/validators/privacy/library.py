"""Public models that an attacker holds, in several layouts, and victims in other layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hespas.estimators import apply_estimate, load_estimator
from hespas.generators.llm.layout import Layout
from hespas.generators.llm.model_file import load_model
from hespas.generators.llm.settings import Training
from hespas.generators.llm.step import LlmStep
from hespas.generators.obfuscate import Key, Level, Obfuscate
from hespas.graph import Diagnostics, Workload
from hespas.hardware import load_device
from hespas.validators.privacy.attacker import Reference
from hespas.validators.privacy.fingerprint import fingerprint

__all__ = ["HELD", "PUBLIC_MODELS", "UNSEEN", "references", "training_step"]

PUBLIC_MODELS = (
    "DeepSeek-V2-Lite",
    "Gemma-2-27B",
    "Gemma-2-9B",
    "GPT-OSS-20B",
    "Llama-2-13B",
    "Llama-2-70B",
    "Llama-2-7B",
    "Llama-3-70B",
    "Llama-3-8B",
    "Mistral-7B",
    "Mistral-Nemo-12B",
    "Mixtral-8x7B",
    "MPT-7b",
    "Nemotron-4-15B",
    "Qwen2.5-14B",
    "Qwen2.5-32B",
    "Qwen2.5-7B",
    "Qwen3-14B",
    "Qwen3-30B-A3B",
    "Yi-34B",
)
"""Models that the attacker holds. No two have the same sizes."""

HELD = (
    (Layout(dp=8), Training(seq=4096, global_batch=8)),
    (Layout(dp=2, tp=4), Training(seq=4096, global_batch=4)),
    (Layout(dp=2, tp=2, pp=2), Training(seq=4096, global_batch=8)),
    (Layout(dp=8, zero=3), Training(seq=8192, global_batch=16)),
)
"""Layouts in which the attacker holds each model."""

UNSEEN = (
    (Layout(dp=4, tp=2), Training(seq=2048, global_batch=24)),
    (Layout(dp=4, pp=2), Training(seq=8192, global_batch=12)),
)
"""Layouts of victims; the attacker holds neither them nor their numbers of tokens."""

_DEVICE, _ESTIMATOR = "H100-SXM", "roofline"
_OWN_KEYS = 2


def training_step(model: str, layout: Layout, training: Training) -> Workload:
    """Return a training step of a built-in model with the roofline times of an H100."""
    workload = LlmStep(model=load_model(model), layout=layout, training=training).workload()
    device, estimator, sink = load_device(_DEVICE), load_estimator(_ESTIMATOR), Diagnostics()
    classes = tuple(
        apply_estimate(graph, estimator.estimate(graph, device, sink), "warn", sink)
        for graph in workload.classes
    )
    return replace(workload, classes=classes)


def references(models: Sequence[str] = PUBLIC_MODELS, level: Level | None = None) -> Iterator[Reference]:
    """Yield what an attacker holds of some models: each in the layouts :data:`HELD`, and obfuscated at a
    level with two keys of the attacker (None: only as it is). About 0.3 CPU s per model and layout.
    """
    for model in models:
        for number, (layout, training) in enumerate(HELD):
            held = training_step(model, layout, training)
            keys = [Key(f"attacker {model} {number} {key}".encode()) for key in range(_OWN_KEYS)]
            yield Reference(
                model=model,
                plain=fingerprint(held),
                obfuscated=()
                if level is None
                else tuple(fingerprint(Obfuscate(key=key, level=level)(held, Diagnostics())) for key in keys),
            )
