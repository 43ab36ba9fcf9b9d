"""Model FLOPs utilization and tokens per second of a step, where its workload states FLOPs or tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan, nan

from hespas.graph import Diagnostics, StepFacts, find_dtype, step_facts
from hespas.graph.errors import UnsupportedError
from hespas.hardware import Device
from hespas.hardware.peaks import peak_for

__all__ = ["Throughput", "rates_of", "throughput_of", "warn_of_rates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Rates of a step; NaN where the workload does not state what they need.

    ``mfu`` is model FLOPs over what all devices could do at the dense peak for ``peak_dtype``, the element
    type of the products of linear layers.
    """

    model_flops: float = nan
    tokens: float = nan
    mfu: float = nan
    peak_dtype: str = ""
    tokens_per_s: float = nan
    tokens_per_s_per_device: float = nan

    @property
    def is_known(self) -> bool:
        """Return True where there is a rate to report."""
        return not (isnan(self.mfu) and isnan(self.tokens_per_s))

    def __str__(self) -> str:
        """Return the rates as a clause of a summary line; empty where none is known."""
        parts: list[str] = []
        if not isnan(self.mfu):
            parts.append(f"MFU {self.mfu:.1%} of the {self.peak_dtype} peak")
        if not isnan(self.tokens_per_s):
            each = f"{self.tokens_per_s_per_device:,.4g} per device"
            parts.append(f"{self.tokens_per_s:,.6g} tokens/s ({each})")
        return ", ".join(parts)


def throughput_of(metadata: Mapping[str, str], step_ns: float, device: Device | None) -> Throughput:
    """Return the rates of a step, by the facts in the metadata of its workload; they are of the whole job."""
    facts = step_facts(metadata)
    return Throughput() if facts is None else rates_of(facts, step_ns, device)


def rates_of(facts: StepFacts, step_ns: float, device: Device | None) -> Throughput:
    """Return the rates of a step of known facts, over all its ranks. ``step_ns`` is the time of a step; for a
    recording, from the start of a step to that of the next.
    """
    if not step_ns > 0:
        return Throughput()
    step_s, num_ranks = step_ns / 1e9, facts.ranks or nan
    name, peak = _peak(facts.dtype, device)
    tokens_per_s = facts.tokens / step_s
    return Throughput(
        model_flops=facts.model_flops,
        tokens=facts.tokens,
        mfu=facts.model_flops / step_s / (peak * num_ranks),
        peak_dtype=name,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s / num_ranks,
    )


def warn_of_rates(rates: Throughput, where: str, diagnostics: Diagnostics) -> None:
    """Warn of a step that does more FLOPs than its devices can."""
    message = (
        f"MFU is {rates.mfu:.1%} of the {rates.peak_dtype} peak, more than 100 %: check the model FLOPs, the "
        "number of ranks, the element type and the steps that were recorded"
    )
    diagnostics.warning("rates.mfu-above-peak", where, message, count=int(rates.mfu > 1))


def _peak(name: str, device: Device | None) -> tuple[str, float]:
    """Return the element type whose peak a device has for a type, and the peak; NaN where it has none. GPUs
    multiply IEEE f32 on vector units, where they have no matrix units for it.
    """
    if device is None or find_dtype(name) is None:
        return name, nan
    try:
        choice = peak_for(device, "matrix", name)
        if name == "f32" and choice.peak.dtype != "f32" and device.kind == "gpu":
            choice = peak_for(device, "vector", name)
    except UnsupportedError:
        return name, nan
    return choice.peak.dtype, choice.flops_per_s
