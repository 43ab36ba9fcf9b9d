"""Kernels of a published run, by the columns of its row, as options of the estimator of training steps."""

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
    """Return the estimator of training steps on ``base`` for a row: the attention of its framework, another
    power limit or memory bandwidth, fusion by a compiler. Options that ``base`` itself states stay.
    """
    named = load_estimator(base)
    power, memory = run.row.get("power_limit_w", ""), run.row.get("memory_bandwidth_gb_per_s", "")
    model = named if isinstance(named, Training) else Training(base=base)
    ratio = float(memory) * 1e9 / device.main_memory.bandwidth_bytes_per_s if memory else 1.0
    return replace(
        model,
        attention=model.attention or attention_library(run, device),
        power_w=model.power_w or (float(power) if power else 0.0),
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
