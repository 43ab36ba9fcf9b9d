"""Which bytes a fusion moves: its operands and results, where only what is needed counts.

Need is followed from the root to the parameters, so a table read through ``gather`` or ``slice``, alone or
behind elementwise operations, counts what is picked. A root ``dynamic-update-slice`` or ``scatter`` over a
parameter that may be overwritten counts what it touches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isnan, nan

from hespas.converters.hlo.attributes import names
from hespas.converters.hlo.module import Computation
from hespas.converters.hlo.program import Program

__all__ = ["STRUCTURE", "UPDATING", "Alias", "InnerNeeds", "body_aliases", "body_needs", "fusion_bytes"]

STRUCTURE = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"})
"""Opcodes that neither compute nor move."""

_VIEWS = frozenset({"bitcast", "reshape"})
_PICKING = frozenset({"slice", "dynamic-slice", "gather"})
UPDATING = frozenset({"dynamic-update-slice", "scatter"})
"""Opcodes that may replace a part of their first operand in place."""

_WHOLE = frozenset({"dot", "convolution", "sort", "fft", "custom-call", "while", "conditional", "scaled-dot"})
"""Operations that read all of every operand for any part of their result."""


@dataclass(frozen=True, slots=True)
class Alias:
    """Result ``leaf`` is parameter ``parameter`` with a part replaced: in place, ``read_bytes`` of the
    parameter are read and ``written_bytes`` of the result written.
    """

    parameter: int
    leaf: int
    read_bytes: float
    written_bytes: float


InnerNeeds = Callable[[Computation, int], tuple[float, ...]]
"""What the body of a nested fusion needs of its parameters."""


def body_needs(program: Program, computation: Computation, inner: InnerNeeds) -> tuple[float, ...]:
    """The fraction (0 .. 1) of each parameter that the root needs. O(instructions).

    Raises ``FormatError`` where parameters are not numbered 0, 1, 2, ....
    """
    needed = [0.0] * len(computation)
    needed[computation.root] = 1.0
    for index in range(len(computation) - 1, -1, -1):
        part = needed[index] = min(needed[index], 1.0)
        if part <= 0:
            continue
        inner_needs = inner(computation, index) if computation.opcodes[index] in {"fusion", "call"} else ()
        for place, operand in enumerate(computation.operands[index]):
            factor = _need(program, computation, index, place, inner_needs)
            needed[operand] += 1.0 if isnan(factor) else part * factor
    parameters = [index for index, opcode in enumerate(computation.opcodes) if opcode == "parameter"]
    needs = [-1.0] * len(parameters)
    for index in parameters:
        number = program.parameter_number(computation, index)
        if number >= len(needs) or needs[number] >= 0:
            raise program.error(
                computation, index, f"expected parameters numbered 0 to {len(needs) - 1}, each once"
            )
        needs[number] = needed[index]
    return tuple(needs)


def _need(
    program: Program, computation: Computation, index: int, place: int, inner_needs: tuple[float, ...]
) -> float:
    """The fraction of one operand that a result needs in full; NaN: all of it for any part of the result."""
    opcode = computation.opcodes[index]
    if opcode in _WHOLE:
        return nan
    if opcode in {"fusion", "call"}:
        return inner_needs[place] if place < len(inner_needs) else nan
    if opcode in _PICKING and place == 0:
        picked = _elements(program, computation, index)
        stored = _elements(program, computation, computation.operands[index][0])
        return 1.0 if isnan(picked) or not stored > 0 else min(picked / stored, 1.0)
    return 1.0


def _elements(program: Program, computation: Computation, index: int) -> float:
    return sum(tensor.elements for tensor in program.tensors(computation.shapes[index]))


def body_aliases(program: Program, computation: Computation) -> tuple[Alias, ...]:
    """Results that are a parameter with parts replaced, the parameter having no other reader.
    O(instructions).
    """
    if not any(opcode in UPDATING for opcode in computation.opcodes):
        return ()
    root = computation.root
    leaves = computation.operands[root] if computation.opcodes[root] == "tuple" else (root,)
    readers = [0] * len(computation)
    for operands in computation.operands:
        for operand in operands:
            readers[operand] += 1
    found: dict[int, Alias | None] = {}
    for leaf, index in enumerate(leaves):
        if index not in found:
            found[index] = _alias(program, computation, leaf, index, readers)
    aliases = ((leaf, found[index]) for leaf, index in enumerate(leaves))
    return tuple(replace(alias, leaf=leaf) for leaf, alias in aliases if alias is not None)


def _alias(
    program: Program, computation: Computation, leaf: int, index: int, readers: list[int]
) -> Alias | None:
    """Follow updates and views from one result down to the parameter they change."""
    written, read, current = 0.0, 0.0, index
    while computation.opcodes[current] in UPDATING or computation.opcodes[current] in _VIEWS:
        if (current != index and readers[current] > 1) or not computation.operands[current]:
            return None
        if computation.opcodes[current] in UPDATING:
            touched, reads_old = _touched(program, computation, current)
            written += touched
            read += touched if reads_old else 0.0
        current = computation.operands[current][0]
    if computation.opcodes[current] != "parameter" or readers[current] != 1 or current == index:
        return None
    return Alias(program.parameter_number(computation, current), leaf, read, written) if written else None


def _touched(program: Program, computation: Computation, index: int) -> tuple[float, bool]:
    """Bytes an update writes, and whether it reads what was there."""
    operands = computation.operands[index]
    if computation.opcodes[index] == "dynamic-update-slice":
        return _bytes(program, computation, operands[1:2]), False
    first_update = max((len(operands) - 1) // 2, 1) + 1
    named = names(computation.attributes[index].get("to_apply"))
    body = program.bodies.get(named[0]) if named else None
    return _bytes(program, computation, operands[first_update:]), body is None or body.reads_first


def _bytes(program: Program, computation: Computation, operands: tuple[int, ...]) -> float:
    return sum(
        tensor.bytes for operand in operands for tensor in program.tensors(computation.shapes[operand])
    )


def fusion_bytes(
    program: Program,
    computation: Computation,
    index: int,
    needs: tuple[float, ...],
    aliases: tuple[Alias, ...],
) -> tuple[float, float]:
    """Bytes that the fusion at ``index`` reads and writes; an operand passed twice is read once."""
    operands = computation.operands[index]
    in_place = {
        alias.leaf: alias
        for alias in aliases
        if alias.parameter < len(operands) and program.dies(computation, index, operands[alias.parameter])
    }
    overwritten = {alias.parameter: alias for alias in in_place.values()}
    reads: dict[int, float] = {}
    for place, operand in enumerate(operands):
        stored = _bytes(program, computation, (operand,))
        need = needs[place] if place < len(needs) else 1.0
        part = overwritten[place].read_bytes if place in overwritten else stored * need if need else 0.0
        reads[operand] = max(reads.get(operand, 0.0), part)
    results = program.tensors(program.result_row(computation, index))
    written = sum(
        min(in_place[leaf].written_bytes, tensor.bytes) if leaf in in_place else tensor.bytes
        for leaf, tensor in enumerate(results)
    )
    return sum(reads.values()), written
