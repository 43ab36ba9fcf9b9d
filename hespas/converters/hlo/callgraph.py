"""Which computation calls which, callees first; a module whose computations call themselves is refused."""

from __future__ import annotations

from collections.abc import Mapping

from hespas.converters.hlo.attributes import callee_names
from hespas.converters.hlo.module import Computation, HloModule
from hespas.converters.hlo.scan import shown
from hespas.graph.errors import FormatError, UnsupportedError

__all__ = [
    "MAX_FUSED_OPERATIONS",
    "MAX_INLINED_NODES",
    "MAX_TUPLE_USES",
    "callees_first",
    "check_inlined_size",
]

_ON_PATH, _DONE = 1, 2
MAX_INLINED_NODES = 20_000_000
MAX_TUPLE_USES = 1 << 24
MAX_FUSED_OPERATIONS = 4_000_000
"""Of all fusions together; compilers make a computation for each fusion, so programs have one per line."""

_SCALAR_BODIES = frozenset({"reduce", "sort", "map", "scatter"})


def _callees(module: HloModule, computation: Computation) -> list[Computation]:
    found: list[Computation] = []
    for index, attributes in enumerate(computation.attributes):
        for name in callee_names(attributes) if attributes else ():
            callee = module.computations.get(name)
            if callee is None:
                raise module.source.error(
                    computation.positions[index], f"a computation of this module; {shown(name)} is none"
                )
            found.append(callee)
    return found


def callees_first(module: HloModule) -> list[Computation]:
    """The computations the entry reaches, each after everything it calls. No recursion; O(instructions).

    Raises ``FormatError`` for a name of no computation and for a computation that calls itself.
    """
    entry = module.entry
    state = {entry.name: _ON_PATH}
    ordered: list[Computation] = []
    stack = [(entry, iter(_callees(module, entry)))]
    while stack:
        computation, rest = stack[-1]
        callee = next(rest, None)
        if callee is None:
            stack.pop()
            state[computation.name] = _DONE
            ordered.append(computation)
        elif callee.name not in state:
            state[callee.name] = _ON_PATH
            stack.append((callee, iter(_callees(module, callee))))
        elif state[callee.name] == _ON_PATH:
            raise module.source.error(callee.position, f"no recursion, but {shown(callee.name)} calls itself")
    return ordered


def check_inlined_size(module: HloModule, ordered: list[Computation]) -> None:
    """Refuse a module whose calls, written out, make more nodes than fit in memory, or whose fusions, written
    out, hold more operations than can be added up, or which hands large tuples around too often.
    O(instructions).
    """
    nodes: dict[str, int] = {}
    fused: dict[str, int] = {}
    uses: dict[str, int] = {}
    values = {row: shape.values for row, shape in enumerate(module.shapes) if shape.array is None}
    stated = 0
    for computation in ordered:
        made, inside, used = len(computation), 0, _tuple_uses(computation, values)
        stated += used
        for opcode, attributes in zip(computation.opcodes, computation.attributes, strict=True):
            if not attributes or opcode in _SCALAR_BODIES:
                continue
            for name in callee_names(attributes):
                if opcode == "fusion":
                    inside += nodes[name] + fused[name]
                else:
                    made += nodes[name]
                    used += uses[name]
                    inside += fused[name]
        nodes[computation.name], fused[computation.name], uses[computation.name] = made, inside, used
    _check_limit(module, "calls", nodes[module.entry.name], MAX_INLINED_NODES)
    _check_limit(module, "fusions", fused[module.entry.name], MAX_FUSED_OPERATIONS)
    most = max(stated, uses[module.entry.name])
    if most > MAX_TUPLE_USES:
        raise UnsupportedError(
            f"instructions that take and make tuples of {most:,} values in all (limit {MAX_TUPLE_USES:,})",
            path=module.source.path,
            position=f"computation {shown(module.entry.name)}",
            hint="check the tuple types of the program",
        )


def _tuple_uses(computation: Computation, values: Mapping[int, int]) -> int:
    """Values in the tuples that instructions make and take, each as often as it is handed on whole."""
    made = {index: values[row] for index, row in enumerate(computation.shapes) if row in values}
    if not made:
        return 0
    return sum(made.values()) + sum(
        made.get(operand, 0)
        for opcode, operands in zip(computation.opcodes, computation.operands, strict=True)
        if opcode != "get-tuple-element"
        for operand in operands
    )


def _check_limit(module: HloModule, what: str, total: int, limit: int) -> None:
    if total > limit:
        raise FormatError(
            f"its {what} written out make {total:,} operations (limit {limit:,})",
            path=module.source.path,
            position=f"computation {shown(module.entry.name)}",
            hint="convert a smaller program, or compile it so that fewer calls repeat one another",
        )
