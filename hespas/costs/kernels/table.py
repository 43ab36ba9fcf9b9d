"""THE table of kernels' names: who wrote the kernel, what it does, in which type, and how much a block of it.

A row declares and decodes; the first whose pattern is found answers. What a name does not say stays unknown:
most say what kind of work they do and how it is cut, few say how much of it there is.
"""

from __future__ import annotations

from functools import lru_cache

from hespas.costs.kernels.attention import ATTENTIONS
from hespas.costs.kernels.facts import KernelFacts, Row
from hespas.costs.kernels.libraries import COMMUNICATION, COPIES, GENERATED, SERVING, TRAINING
from hespas.costs.kernels.names import read_name
from hespas.costs.kernels.products import PRODUCTS
from hespas.costs.kernels.torch import TORCH

__all__ = ["ROWS", "kernel_facts"]

ROWS: tuple[Row, ...] = (
    *COPIES,
    *ATTENTIONS,
    *GENERATED,
    *COMMUNICATION,
    *TORCH,
    *PRODUCTS,
    *SERVING,
    *TRAINING,
)
"""In the order of asking: what is told by a whole phrase stands before what is told by a word."""

_NOTHING = KernelFacts()


@lru_cache(maxsize=1 << 16)
def kernel_facts(name: str) -> KernelFacts:
    """What the name of a kernel says, mangled or not; class UNKNOWN for a name that no row knows.

    O(rows x length of the name), which is cut; equal names are read once.
    """
    parsed = read_name(name)
    for row in ROWS:
        found = row.facts(parsed)
        if found is not None:
            return found
    return _NOTHING
