"""Tokens to experts in two levels, as DeepEP's kernels for training send them (arXiv 2412.19437, 3.2).

A token crosses to each node that has experts of its choice once, to the rank there that stands where its own
does, and goes on inside of that node once to each rank that has some; results take the same way back, added
up on it. With experts chosen alike, a token reaches so many of n equal parts of E experts with k choices:
n (1 - C(E - E/n, k) / C(E, k)).
"""

from __future__ import annotations

from math import comb

from hespas.generators.llm.kernels import Kernels, Value
from hespas.generators.llm.model import Experts
from hespas.generators.llm.rank import Rank
from hespas.graph import CollectiveKind

__all__ = ["reached_parts", "two_levels"]


def reached_parts(experts: int, chosen: int, parts: int) -> float:
    """Of ``parts`` of as many experts each, those in the mean that have one of ``chosen`` different ones."""
    missed = comb(experts - experts // parts, chosen) / comb(experts, chosen)
    return parts * (1.0 - missed)


def two_levels(r: Rank, k: Kernels, name: str, block: Experts, x: Value, *, back: bool) -> Value:
    """Tokens to the ranks of their experts over nodes and inside of them, or back."""
    width = block.latent or r.hidden
    ways = [
        ("nodes", r.groups.expert_nodes, r.groups.expert_nodes.group_size),
        ("inside", r.groups.expert_inside, r.layout.ep),
    ]
    for called, groups, parts in reversed(ways) if back else ways:
        if groups.group_size == 1:
            continue
        rows = round(r.expert_rows * reached_parts(block.experts, block.topk, parts))
        sent = r.value(rows, width)
        x = k.collective(f"{name}.{called}.all_to_all", CollectiveKind.ALL_TO_ALL, groups, sent, after=[x])
    return x
