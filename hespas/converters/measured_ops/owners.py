"""Which host operation answers for a piece of device work: the innermost whose cost is known as a whole.

An operation of the cost table answers for all the work launched inside it, whatever it calls. So of two such
operations, one inside the other, of which both launched work themselves, the outer one answers for both:
nothing is costed twice. An operation that is costed by its parts answers only where none of them does. Work
of an operation without a rule belongs to an operation around it that has one, else to itself, at an unknown
cost.
A region is not an operation: work that it launches has no owner, and is known by its kernel alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from hespas.costs.aten import find_aten_rule, is_composite
from hespas.graph import HostOps, StringTable
from hespas.graph.columns import BoolArray, IntArray, at_rows, mapped

__all__ = ["Owners", "owners_of"]

_REGION = re.compile(
    r"Torch-Compiled Region.*|CompiledFunction(?:Backward)?\d*|(?:## )?(?:Call )?CompiledFxGraph.*|"
    r"autograd::engine::evaluate_function.*|ProfilerStep#.*|Optimizer\.\w+#.*|nn\.Module: .*|"
    r"(?:DistributedDataParallel|FullyShardedDataParallel|FSDP::|DDP)\b.*|torch::jit::.*|"
    r"(?:Pregraph|AOTDispatcher|DynamoRuntimeWrapper|TorchDynamo|CompiledAutograd).*",
    re.DOTALL,
)
"""Ranges around operations, compiled ones among them: no single kernel is the work of one."""

_DEEPEST = 256
"""Real operations nest a few dozen deep; what stands deeper answers for itself."""


@dataclass(frozen=True, slots=True, eq=False)
class Owners:
    """Of each piece of device work: the operation it belongs to (-1 none), and whether the cost of that
    operation is the cost of this work; else nobody knows it.
    """

    op: IntArray
    answers: BoolArray


class _Forest:
    """Host operations with what the table says of their names."""

    def __init__(self, host: HostOps, strings: StringTable) -> None:
        self.parents: list[int] = host.parent.tolist()
        known = mapped(host.name_row, lambda row: find_aten_rule(strings[row]) is not None, np.bool_)
        parts = mapped(host.name_row, lambda row: is_composite(strings[row]), np.bool_)
        known &= host.shapes_row != 0
        self.whole: list[bool] = (known & ~parts).tolist()
        self.by_parts: list[bool] = (known & parts).tolist()

    def chain(self, op: int) -> list[int]:
        """An operation and those around it, innermost first."""
        found: list[int] = []
        while 0 <= op < len(self.parents) and len(found) < _DEEPEST:
            found.append(op)
            op = self.parents[op]
        return found


def owners_of(host: HostOps, strings: StringTable, launched_by: IntArray) -> Owners:
    """The owners of pieces of device work. ``launched_by`` is the operation that launched each (-1 unknown).

    O(distinct launching operations x depth).
    """
    if not len(host):
        return Owners(np.full(len(launched_by), -1, np.int64), np.zeros(len(launched_by), np.bool_))
    forest = _Forest(host, strings)
    launchers, place = np.unique(launched_by, return_inverse=True)
    chains = {int(op): forest.chain(int(op)) for op in launchers if op >= 0}
    whole = _claimed(chains, forest.whole, frozenset())
    owner = {op: _outermost(chain, whole) for op, chain in chains.items()}
    answered = {above for op, chain in chains.items() if owner[op] >= 0 for above in chain}
    left = {op: chain for op, chain in chains.items() if owner[op] < 0}
    by_parts = _claimed(left, forest.by_parts, answered)
    for op, chain in left.items():
        owner[op] = _outermost(chain, by_parts)
    found = np.array([owner.get(int(op), -1) for op in launchers], np.int64)
    answers = found >= 0
    regions = mapped(host.name_row, lambda row: _REGION.fullmatch(strings[row]) is not None, np.bool_)
    own = np.where(at_rows(regions, launchers, False), -1, launchers)
    return Owners(np.where(answers, found, own)[place], answers[place])


def _claimed(
    chains: dict[int, list[int]], answers: list[bool], refused: frozenset[int] | set[int]
) -> frozenset[int]:
    """Per chain the innermost operation that answers, unless it is refused."""
    innermost = (next((op for op in chain if answers[op]), -1) for chain in chains.values())
    return frozenset(op for op in innermost if op >= 0 and op not in refused)


def _outermost(chain: list[int], claimed: frozenset[int]) -> int:
    return next((op for op in reversed(chain) if op in claimed), -1)
