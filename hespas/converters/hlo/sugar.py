"""Short spelling of asynchronous operations: ``async-start`` that wraps one operation becomes
``OPERATION-start``.

XLA prints most of them so; where a file has the long spelling the two mean the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from hespas.converters.hlo.attributes import integer, names
from hespas.converters.hlo.module import Computation
from hespas.converters.hlo.traffic import STRUCTURE

__all__ = ["shorten_async"]

_KEPT_LONG = frozenset({"while", "conditional", "call", "async-start"})


def shorten_async(computations: Mapping[str, Computation]) -> None:
    """Respell in place every ``async-start`` whose computation holds one operation. O(instructions)."""
    wrapped = {name: root for name, body in computations.items() if (root := _single_operation(body)) >= 0}
    if not wrapped:
        return
    for computation in computations.values():
        for index, opcode in enumerate(computation.opcodes):
            if opcode != "async-start":
                continue
            named = names(computation.attributes[index].get("calls"))
            if named and named[0] in wrapped:
                _shorten(computation, index, computations[named[0]], wrapped[named[0]])


def _single_operation(body: Computation) -> int:
    """The root where it is the only operation and reads parameters only, else -1."""
    work = [index for index, opcode in enumerate(body.opcodes) if opcode not in STRUCTURE]
    if work != [body.root] or body.opcodes[body.root] in _KEPT_LONG:
        return -1
    reads_parameters = all(body.opcodes[operand] == "parameter" for operand in body.operands[body.root])
    return body.root if reads_parameters else -1


def _shorten(computation: Computation, index: int, body: Computation, root: int) -> None:
    given = computation.operands[index]
    try:
        places = [integer(body.payloads[operand]) for operand in body.operands[root]]
    except ValueError:
        return
    if any(not 0 <= place < len(given) for place in places):
        return
    own = {key: value for key, value in computation.attributes[index].items() if key != "calls"}
    computation.opcodes[index] = f"{body.opcodes[root]}-start"
    computation.operands[index] = tuple(given[place] for place in places)
    computation.attributes[index] = body.attributes[root] | own
