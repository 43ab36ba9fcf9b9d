"""What the text of a published row says of its kernels, as options of the estimator of training steps."""

from __future__ import annotations

import re
from dataclasses import replace

from hespas.estimators import load_estimator
from hespas.estimators.registry import Estimator
from hespas.estimators.training import Training
from hespas.generators.llm.published import PublishedRun
from hespas.hardware import Device
from hespas.hardware.training_file import Library

__all__ = ["attention_library", "estimator_of"]


def estimator_of(run: PublishedRun, device: Device, base: str) -> Estimator:
    """The estimator of training steps on ``base``, with what a row says: whose attention its framework runs,
    another power limit and memory (``accelerator_variant``), whether a compiler fuses. What ``base`` itself
    names of attention, power and memory stays.
    """
    named = load_estimator(base)
    text = run.row.get("accelerator_variant", "")
    power, memory = re.search(r"(\d+) W power limit", text), re.search(r"(\d+(?:\.\d+)?) TB/s", text)
    model = named if isinstance(named, Training) else Training(base=base)
    ratio = float(memory[1]) * 1e12 / device.main_memory.bandwidth_bytes_per_s if memory else 1.0
    return replace(
        model,
        attention=model.attention or attention_library(run, device),
        power_w=model.power_w or (float(power[1]) if power else 0.0),
        bandwidth=ratio if model.bandwidth == 1.0 else model.bandwidth,
        fused=run.training.compiled,
        num_ranks=run.layout.ranks,
    )


def attention_library(run: PublishedRun, device: Device) -> Library:
    """Whose attention a row's framework runs."""
    framework = run.row.get("framework", "").casefold()
    if device.kind == "tpu":
        return "splash"
    if device.vendor != "NVIDIA" or re.search(r"megatron-lm \(20(20|21|22)", framework):
        return "measured"
    if "llm-foundry" in framework:
        return "flash1"
    return "flash2" if run.training.style == "torchtitan" else "cudnn"
