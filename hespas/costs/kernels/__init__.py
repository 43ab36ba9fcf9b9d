"""Table of library kernel names, for profiles without host operations.

The first pattern that matches a kernel name gives its library, kind of work, element type and tile. Most
names state the kind of work and the tile of a block. Few state the amount of work, which is then unknown.
"""

from __future__ import annotations

from functools import lru_cache

from hespas.costs.kernels.attention import ATTENTIONS
from hespas.costs.kernels.bounds import UNBOUNDED, WorkBounds, launch_of, work_bounds
from hespas.costs.kernels.facts import Cover, KernelFacts, KernelPattern
from hespas.costs.kernels.libraries import COMMUNICATION, COPIES, GENERATED, SERVING, TRAINING
from hespas.costs.kernels.names import read_name
from hespas.costs.kernels.products import PRODUCTS
from hespas.costs.kernels.torch import TORCH

__all__ = [
    "PATTERNS",
    "UNBOUNDED",
    "Cover",
    "KernelFacts",
    "WorkBounds",
    "kernel_facts",
    "launch_of",
    "work_bounds",
]

PATTERNS: tuple[KernelPattern, ...] = (
    *COPIES,
    *ATTENTIONS,
    *GENERATED,
    *COMMUNICATION,
    *TORCH,
    *PRODUCTS,
    *SERVING,
    *TRAINING,
)
"""Patterns in the order in which they are tried: specific ones before single words."""


@lru_cache(maxsize=1 << 16)
def kernel_facts(name: str) -> KernelFacts:
    """Return the facts that the name of a kernel states (element types, tile, ...). The name may be mangled.
    The class is UNKNOWN if no pattern matches.

    O(patterns x length of the name). The length is limited; results are cached.
    """
    parsed = read_name(name)
    for pattern in PATTERNS:
        facts = pattern.facts(parsed)
        if facts is not None:
            return facts
    return KernelFacts()
