"""Collectives inside TPU fusions: the instructions and results of a fusion that belong to the collective.

XLA for TPUs starts a collective in one fusion, continues it in other fusions that overlap it with their own
work, and completes it in a last one. Each of these fusions has the whole collective in its body.
"""

from __future__ import annotations

from hespas.converters.hlo.module import Computation
from hespas.converters.hlo.program import HloProgram
from hespas.converters.hlo.scan import unquote
from hespas.costs.payloads import COLLECTIVE_KINDS
from hespas.costs.table import canonical_name

__all__ = ["carried_results", "hands_on", "keeps_a_slice"]

_HANDING_ON = frozenset({"AsyncCollectiveStart", "AsyncCollectiveDone"})
"""Targets of custom calls for the ends of a collective that overlaps with other work."""


def hands_on(computation: Computation, index: int) -> bool:
    """Return True if an instruction inside a fusion is a collective, or the buffer of a collective that has
    not completed. The memory traffic of such instructions belongs to the start of the collective.
    """
    opcode = computation.opcodes[index]
    if opcode == "custom-call":
        target = unquote(computation.attributes[index].get("custom_call_target", ""))
        return target in _HANDING_ON
    return canonical_name(opcode) in COLLECTIVE_KINDS or opcode == "collective-permute"


def carried_results(program: HloProgram, computation: Computation) -> frozenset[int]:
    """Return the indices of a fusion's results that do not come from its own work: results of a collective in
    the body, and parameters that are passed on unchanged.
    """
    root = computation.root
    if hands_on(computation, root):
        return frozenset(range(len(program.tensors(computation.shapes[root]))))
    if computation.opcodes[root] != "tuple":
        return frozenset()
    leaves = enumerate(computation.operands[root])
    return frozenset(
        leaf
        for leaf, index in leaves
        if computation.opcodes[index] == "parameter" or hands_on(computation, index)
    )


def keeps_a_slice(computation: Computation, index: int) -> bool:
    """Return True if an instruction's results are only used in slices at computed offsets."""
    sources = {index}
    sliced = False
    for user, operands in enumerate(computation.operands):
        if sources.isdisjoint(operands):
            continue
        if computation.opcodes[user] == "get-tuple-element":
            sources.add(user)
        elif computation.opcodes[user] == "dynamic-slice" and sources.isdisjoint(operands[1:]):
            sliced = True
        else:
            return False
    return sliced
