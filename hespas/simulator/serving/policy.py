"""What a serving stack decides: how much a step may work on, and what comes first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from hespas.graph.errors import UsageError

__all__ = ["POLICIES", "Order", "Policy", "policy_of"]

Order = Literal["mixed", "prefill-first"]
"""Whether prompts are worked on in steps that decode, too, or in steps of their own, before others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The scheduler of a server. ``tokens``: most of a step; ``sequences``: most under way. ``chunked``:
    what does not fit of a prompt is worked on in the next step; else a prompt is worked on whole.
    ``page_tokens``: tokens of a page of the cache. ``order``: see :data:`Order`. ``reserves``: a request
    starts only where the cache has room for all it will ever hold (no request is ever put back);
    else one that finds no page puts the youngest back, whose tokens are worked on again. ``watermark``: part
    of the pages that stay free when a request starts. ``polls``: the scheduler looks who has come every so
    many steps that decode, and after steps that only work on prompts; ``ahead``: while the step before the
    next is run, so that the next is known when that one ends. ``holds``: so many steps at most those
    who wait are held back for others, while sequences decode and a step has less than ``holds_tokens``.
    """

    name: str = "vllm"
    tokens: int = 8192
    sequences: int = 256
    chunked: bool = True
    page_tokens: int = 16
    order: Order = "mixed"
    reserves: bool = False
    watermark: float = 0.0
    polls: int = 1
    ahead: bool = False
    holds: int = 0
    holds_tokens: int = 0

    def __post_init__(self) -> None:
        """Check the settings. Raises ``UsageError``."""
        for name in ("tokens", "sequences", "page_tokens", "polls"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} of a server: {getattr(self, name)}", hint=f"`{name}=1` or more")
        if not 0 <= self.watermark < 1:
            raise UsageError(f"watermark {self.watermark:g} is no part", hint="`watermark=0.01`")


POLICIES: Mapping[str, Policy] = {
    "vllm": Policy(name="vllm", tokens=8192, sequences=1024),
    "sglang": Policy(name="sglang", tokens=16384, sequences=1024, order="prefill-first", page_tokens=1),
    "trtllm": Policy(name="trtllm", tokens=8192, sequences=2048, page_tokens=32, reserves=True),
}
"""Defaults of serving stacks. vLLM's engine of 2025 (V1) decodes first and fills the step with prompts;
SGLang works on new prompts first, in steps of their own, with a chunk of so many tokens; TensorRT-LLM adds
prompts to the sequences in flight, and starts none that it could have to put back (its capacity policy
GUARANTEED_NO_EVICT).
"""


def policy_of(name: str, **changes: int | float | bool | str | None) -> Policy:
    """The policy of a stack with changes (None: none). Raises ``UsageError`` for an unknown name."""
    found = POLICIES.get(name)
    if found is None:
        raise UsageError(f"no such serving stack: {name!r}", hint=f"one of {', '.join(POLICIES)}")
    stated = {key: value for key, value in changes.items() if value is not None}
    return replace(found, **stated)  # type: ignore[arg-type] # names and types are those of the fields
