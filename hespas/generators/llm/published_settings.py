"""Columns of settings that a table of published runs may have, and the one place that reads them from notes.

Everything that depends on how a run was set up reads these columns. A table that lacks a column gets it from
the fixed phrases of its free text, once, when it is read; a table that has the column keeps it, and its notes
change nothing. ``python -m tools.published_settings IN.csv OUT.csv`` writes a table with all columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

__all__ = ["CHOICES", "NUMBERS", "SETTINGS", "from_notes"]

SETTINGS: Mapping[str, str] = {
    "cuda_graphs": "none, parts or all: which kernels of a pass are issued as CUDA graphs",
    "communication_overlap": "off: communication never overlaps computation; empty: as the framework does",
    "tensor_overlap": "yes: collectives of tensor parallelism overlap products",
    "expert_overlap": "yes: tokens travel to experts while other kernels compute",
    "context_communication": "all-to-all or ring: how context ranks exchange",
    "capacity_factor": "capacity of experts as a factor; dropped: tokens are dropped at an unstated one",
    "compiled": "no: no compiler fuses kernels",
    "attention_flops": "full or half: how much of the square of attention the printed FLOPs count",
    "power_limit_w": "power limit of the accelerator [W], where it is not the usual one",
    "memory_bandwidth_gb_per_s": "memory bandwidth of the accelerator [GB/s], where it is not the usual one",
}
"""Columns by name, with their values. An empty cell means that the source states nothing."""


CHOICES: Mapping[str, tuple[str, ...]] = {
    "cuda_graphs": ("none", "parts", "all"),
    "communication_overlap": ("off", "on"),
    "tensor_overlap": ("yes", "no"),
    "expert_overlap": ("yes", "no"),
    "context_communication": ("all-to-all", "ring"),
    "compiled": ("yes", "no"),
    "attention_flops": ("full", "half"),
}
"""Values of columns that hold words."""
NUMBERS = ("capacity_factor", "power_limit_w", "memory_bandwidth_gb_per_s")
"""Columns that hold a number above 0; ``capacity_factor`` may be ``dropped``."""


def from_notes(row: Mapping[str, str]) -> dict[str, str]:
    """Return the row with every column of :data:`SETTINGS`: those that it lacks are read from its text."""
    lacking = [name for name in SETTINGS if name not in row]
    if not lacking:
        return dict(row)
    notes, variant = row.get("notes", "").casefold(), row.get("accelerator_variant", "")
    return {**row, **{name: _READERS[name](notes, variant) for name in lacking}}


def _cuda_graphs(notes: str, _: str) -> str:
    if not re.search(r"cuda graphs(?! none)", notes):
        return "none" if "cuda graphs none" in notes else ""
    return "parts" if "transformer_engine" in notes and "full_iteration" not in notes else "all"


def _capacity(notes: str, _: str) -> str:
    stated = re.search(r"capacity[ _]factor (\d+(?:\.\d+)?)", notes)
    if stated:
        return stated[1]
    return "dropped" if "over capacity dropped" in notes else ""


def _power(_: str, variant: str) -> str:
    stated = re.search(r"(\d+) W power limit", variant)
    return stated[1] if stated else ""


def _bandwidth(_: str, variant: str) -> str:
    stated = re.search(r"(\d+(?:\.\d+)?) TB/s", variant)
    return f"{float(stated[1]) * 1e3:g}" if stated else ""


def _words(value: str, *phrases: str) -> Callable[[str, str], str]:
    """Return a reader that gives ``value`` where notes have one of some phrases."""
    return lambda notes, _: value if any(phrase in notes for phrase in phrases) else ""


_READERS: Mapping[str, Callable[[str, str], str]] = {
    "cuda_graphs": _cuda_graphs,
    "communication_overlap": _words("off", "communication overlap off"),
    "tensor_overlap": _words("yes", "tp overlap", "async tp", "overlap for dp, tp"),
    "expert_overlap": _words("yes", "moe a2a overlap true"),
    "context_communication": _words("all-to-all", "cp communication: all-to-all"),
    "capacity_factor": _capacity,
    "compiled": _words("no", "no torch.compile"),
    "attention_flops": _words("full", "without the causal half"),
    "power_limit_w": _power,
    "memory_bandwidth_gb_per_s": _bandwidth,
}
