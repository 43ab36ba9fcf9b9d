"""Which computation calls which, callees first; a module whose computations call themselves is refused."""

from __future__ import annotations

from hespas.converters.hlo.attributes import callee_names
from hespas.converters.hlo.module import Computation, HloModule
from hespas.converters.hlo.scan import shown
from hespas.graph.errors import FormatError

__all__ = ["MAX_INLINED_NODES", "callees_first", "check_inlined_size"]

_ON_PATH, _DONE = 1, 2
MAX_INLINED_NODES = 20_000_000


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
    """Refuse a module whose calls, written out, make more nodes than fit in memory. O(instructions)."""
    sizes: dict[str, int] = {}
    for computation in ordered:
        inlined = sum(
            sizes[name]
            for opcode, attributes in zip(computation.opcodes, computation.attributes, strict=True)
            if attributes and opcode not in {"fusion", "reduce", "sort", "map", "scatter"}
            for name in callee_names(attributes)
        )
        sizes[computation.name] = len(computation) + inlined
    total = sizes[module.entry.name]
    if total > MAX_INLINED_NODES:
        raise FormatError(
            f"its calls written out make {total:,} operations (limit {MAX_INLINED_NODES:,})",
            path=module.source.path,
            position=f"computation {shown(module.entry.name)}",
            hint="convert a smaller program, or compile it so that fewer calls repeat one another",
        )
