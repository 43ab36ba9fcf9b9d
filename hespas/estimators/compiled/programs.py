"""Small programs: what is compiled and timed, as StableHLO.

An estimator may import no converter, so the text is written here, from the types a graph holds; it needs no
more than an operation and the types it works on, and serves graphs of every format. A program runs its
operations ``%n`` times in a loop: the difference of two lengths is free of what it takes to start a program.
In each turn an element of the largest operand is new, and all operands pass a barrier (not for IREE 3, which
crashes on barriers of several values), so that no compiler may do the work once and for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hespas.estimators.compiled.values import Tensor, Value, dense
from hespas.graph import DTypeKind

__all__ = ["Unit", "baseline_of", "loop_text", "renewed_argument"]

_INDEX = "tensor<i32>"
_RENEWED = frozenset({DTypeKind.FLOAT, DTypeKind.SIGNED, DTypeKind.UNSIGNED})
_PACKED_BITS = 8


class Unit(NamedTuple):
    """What is timed as one: lines that make ``results`` of arguments ``%p0``, ``%p1``, ..."""

    lines: tuple[str, ...]
    arguments: tuple[Tensor, ...]
    results: tuple[Value, ...]


def renewed_argument(unit: Unit) -> int:
    """The argument an element of which is new in each turn: the largest that can be; -1 where none can."""
    able = [
        place
        for place, each in enumerate(unit.arguments)
        if each.elements and each.element.kind in _RENEWED and each.element.bits >= _PACKED_BITS
    ]
    return max(able, key=lambda place: unit.arguments[place].elements, default=-1)


def baseline_of(unit: Unit) -> Unit:
    """The loop of a unit without its work."""
    place = renewed_argument(unit)
    return Unit((), unit.arguments[place : place + 1] if place >= 0 else (), ())


def loop_text(unit: Unit, *, barrier: bool = True) -> str:
    """The program of a unit: ``@main`` takes the number of turns, then the arguments."""
    renewed = renewed_argument(unit)
    arguments = list(map(str, unit.arguments))
    results = [str(each.type) for each in unit.results]
    places = range(len(arguments))
    inside = ("%t", *(f"%q{place}" if place == renewed else f"%p{place}" for place in places))
    before = ("%i", *(f"%c{place}" for place in places)) if barrier else inside
    carried = [f"{name} = %a{place}" for place, name in enumerate(before[1:])]
    carried += [f"%r{place} = %z{place}" for place in range(len(results))]
    types = ", ".join((_INDEX, *arguments, *results))
    passed = f"{', '.join(inside)} = stablehlo.optimization_barrier {', '.join(before)} : "
    passed += ", ".join((_INDEX, *arguments))
    made = _counted(unit, renewed)
    back = ", ".join(("%t1", *(f"%p{place}" for place in places), *made.names))
    outputs = len(arguments) + len(results) + 1
    first = 1 + len(arguments) if results else 0
    returned = ", ".join(f"%o#{place}" for place in range(first, outputs)) if outputs > 1 else "%o"
    loop = f"%o:{outputs}" if outputs > 1 else "%o"
    kept = results or [_INDEX, *arguments]
    head = ", ".join(("%n: " + _INDEX, *(f"%a{place}: {each}" for place, each in enumerate(arguments))))
    lines = [
        f"func.func public @main({head}) -> ({', '.join(kept)}) {{",
        f"%zero = stablehlo.constant dense<0> : {_INDEX}",
        f"%one = stablehlo.constant dense<1> : {_INDEX}",
        *(f"%z{place} = stablehlo.constant {dense(each.type)}" for place, each in enumerate(unit.results)),
        f"{loop} = stablehlo.while({', '.join((f'{before[0]} = %zero', *carried))}) : {types}",
        "cond {",
        f"%more = stablehlo.compare LT, {before[0]}, %n : ({_INDEX}, {_INDEX}) -> tensor<i1>",
        "stablehlo.return %more : tensor<i1>",
        "} do {",
        *([passed] if barrier else ()),
        *_renewal(unit, renewed),
        *unit.lines,
        *made.lines,
        f"%t1 = stablehlo.add %t, %one : {_INDEX}",
        f"stablehlo.return {back} : {types}",
        "}",
        f"return {returned} : {', '.join(kept)}",
        "}",
    ]
    return "module {\n" + "\n".join(lines) + "\n}\n"


def _renewal(unit: Unit, place: int) -> list[str]:
    """The turn's number as the first element of an argument."""
    if place < 0:
        return []
    tensor = unit.arguments[place]
    scalar, one = tensor.of(), tensor.of(*([1] * tensor.rank))
    name = f"%p{place}"
    turn = name if not tensor.rank else "%turn"
    lines = [f"{turn} = stablehlo.convert %t : ({_INDEX}) -> {scalar}"]
    if tensor.rank:
        zeros = ", ".join(["%zero"] * tensor.rank)
        types = ", ".join((str(tensor), str(one), *[_INDEX] * tensor.rank))
        update = f"stablehlo.dynamic_update_slice %q{place}, %turns, {zeros}"
        lines += [
            f"%turns = stablehlo.reshape %turn : ({scalar}) -> {one}",
            f"{name} = {update} : ({types}) -> {tensor}",
        ]
    return lines


class _Made(NamedTuple):
    lines: Sequence[str]
    names: Sequence[str]


def _counted(unit: Unit, renewed: int) -> _Made:
    """The results; those made from nothing get the turn's number added, or every turn would be alike."""
    names = [each.name for each in unit.results]
    if renewed >= 0 or not unit.results or unit.results[0].type.element.kind not in _RENEWED:
        return _Made((), names)
    tensor = unit.results[0].type
    lines = [
        f"%turn = stablehlo.convert %t : ({_INDEX}) -> {tensor.of()}",
        f"%turns = stablehlo.broadcast_in_dim %turn, dims = [] : ({tensor.of()}) -> {tensor}",
        f"%counted = stablehlo.add {names[0]}, %turns : {tensor}",
    ]
    return _Made(lines, ["%counted", *names[1:]])
