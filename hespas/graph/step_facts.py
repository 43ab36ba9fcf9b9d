"""Facts of a step that its graph does not show: what it is, its model FLOPs and tokens, and its framework.

Generators know them, and simulators need them after a round trip through a file, so they travel as one text
in the metadata of a workload.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite, nan
from typing import Literal, get_args
from urllib.parse import quote, unquote

__all__ = ["LAUNCHES", "STEP_FACTS", "Launch", "StepFacts", "StepKind", "step_facts"]

_PLAIN = "+:/,"
"""Characters that values keep beside letters, digits and ``-._~``."""

STEP_FACTS = "step_facts"
"""Key of the metadata of a workload that holds the text of :class:`StepFacts`."""

StepKind = Literal["training", "serving", "eager", "vision", "recommendation"]
"""Kinds of generated steps: of language models in training and in serving, of models that PyTorch runs one
operator at a time, of vision models and of recommendation models in training.
"""
Launch = Literal["kernels", "partial-graphs", "whole"]
"""Ways to launch work: one kernel at a time, part of them as CUDA graphs, or the step as a whole (one
CUDA graph, or one program of XLA).
"""
LAUNCHES: tuple[Launch, ...] = get_args(Launch)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """Facts of a step; NaN and empty texts are unknown.

    ``model_flops`` are those of all ranks, as publishers count them; ``tokens`` is how many the step
    processes, on ``ranks`` ranks (0: unknown). ``dtype`` is the element type of the products of linear
    layers. ``reads_counts``: the host reads how many tokens reach each expert before it launches the products
    of experts. ``library`` names the fused attention, ``compiled`` is False where nothing fuses elementwise
    work. ``power_w`` and ``bandwidth`` (over that of the device file) are those of a board that differs from
    ``device``, and hold for it only.
    """

    kind: StepKind
    model_flops: float = nan
    tokens: float = nan
    ranks: int = 0
    dtype: str = ""
    launch: Launch = "whole"
    reads_counts: bool = False
    library: str = ""
    compiled: bool = True
    device: str = ""
    power_w: float = 0.0
    bandwidth: float = 1.0

    def text(self) -> str:
        """Return the facts as ``name=value`` pairs, without those that are unknown; values are
        percent-encoded, so that they hold no spaces.
        """
        stated = {each.name: quote(str(getattr(self, each.name)), safe=_PLAIN) for each in fields(self)}
        return " ".join(f"{name}={value}" for name, value in stated.items() if value not in {"", "nan"})

    def metadata(self) -> dict[str, str]:
        """Return the entry for the metadata of a workload."""
        return {STEP_FACTS: self.text()}


def step_facts(metadata: Mapping[str, str]) -> StepFacts | None:
    """Return the facts that the metadata of a workload states; None without them.

    Values that are not readable count as unknown.
    """
    pairs = (part.partition("=") for part in metadata.get(STEP_FACTS, "").split())
    stated = {name: unquote(value) for name, _, value in pairs}
    kind = next((each for each in get_args(StepKind) if each == stated.get("kind")), None)
    if kind is None:
        return None
    launches: dict[str, Launch] = {launch: launch for launch in LAUNCHES}
    return StepFacts(
        kind=kind,
        model_flops=_number(stated.get("model_flops", ""), nan),
        tokens=_number(stated.get("tokens", ""), nan),
        ranks=int(_number(stated.get("ranks", ""), 0.0)),
        dtype=stated.get("dtype", ""),
        launch=launches.get(stated.get("launch", ""), "whole"),
        reads_counts=stated.get("reads_counts") == "True",
        library=stated.get("library", ""),
        compiled=stated.get("compiled", "True") == "True",
        device=stated.get("device", ""),
        power_w=_number(stated.get("power_w", ""), 0.0),
        bandwidth=_number(stated.get("bandwidth", ""), 1.0),
    )


def _number(text: str, otherwise: float) -> float:
    """Return a number above 0, else ``otherwise``."""
    try:
        value = float(text)
    except ValueError:
        return otherwise
    return value if isfinite(value) and value > 0 else otherwise
