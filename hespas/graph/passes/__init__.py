"""Passes that rewrite a graph. A pass is a frozen dataclass whose fields are its options; inputs are never
mutated.

Calling a pass with a graph and a diagnostics collector returns a new graph. The docstring of a pass states
what it conserves.
"""

from __future__ import annotations

from typing import Protocol

from hespas.graph.diagnostics import Diagnostics
from hespas.graph.opgraph import OpGraph, Totals, is_recorded_wait, known_sum, totals
from hespas.graph.passes.fuse import FuseElementwise, materialise
from hespas.graph.passes.merge import REGION, GroupRegions, regions_between_communications
from hespas.graph.passes.order import all_deps, find_cycle, is_topological, levels, topological_order
from hespas.graph.passes.precision import InPrecision
from hespas.graph.passes.rewrite import (
    FoldFree,
    bypass,
    dead_code,
    is_delay,
    is_free,
    is_runtime_copy,
    leaves_loop,
    runtime_copies,
    take_nodes,
    with_default_dtype,
    with_durations,
    without_waits,
)
from hespas.graph.passes.unroll import UnrollLoops
from hespas.graph.workload import of_own_ranks

__all__ = [
    "REGION",
    "FoldFree",
    "FuseElementwise",
    "GroupRegions",
    "InPrecision",
    "Pass",
    "Totals",
    "UnrollLoops",
    "all_deps",
    "bypass",
    "dead_code",
    "find_cycle",
    "is_delay",
    "is_free",
    "is_recorded_wait",
    "is_runtime_copy",
    "is_topological",
    "known_sum",
    "leaves_loop",
    "levels",
    "materialise",
    "of_own_ranks",
    "regions_between_communications",
    "runtime_copies",
    "take_nodes",
    "topological_order",
    "totals",
    "with_default_dtype",
    "with_durations",
    "without_waits",
]


class Pass(Protocol):
    """Interface of a pass: a function that returns a rewritten graph."""

    def __call__(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """Return the rewritten graph; report omissions and assumptions to ``diagnostics``."""
        ...
