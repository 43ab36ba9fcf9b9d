"""Products of values of 16 bits and less that a compiler widened to f32, as XLA does for CPUs.

The conversions it writes itself carry no name of the framework, unlike those of a program that wants f32.
"""

from __future__ import annotations

from hespas.converters.hlo.attributes import fields, integer
from hespas.converters.hlo.module import Computation
from hespas.converters.hlo.program import Program
from hespas.graph import DType, DTypeKind

__all__ = ["source_dtypes", "widens"]

_VIEWS = frozenset({"bitcast", "reshape", "copy", "transpose", "broadcast", "slice"})
_CALLS = frozenset({"fusion", "call"})
_PRODUCTS = frozenset({"dot", "convolution"})
_MAX_STEPS = 64
_WIDE, _NARROW_BITS = (DTypeKind.FLOAT, 32), 16

_Place = tuple[Computation, int]


def source_dtypes(program: Program, computation: Computation, index: int) -> tuple[DType, DType] | None:
    """The types whose values an instruction multiplies as f32, None where it does not.

    It is a product, or a fusion around one.
    """
    place, callers = (computation, index), list[_Place]()
    if computation.opcodes[index] in _CALLS:
        callers.append(place)
        body = _callee(program, place)
        found = [number for number, opcode in enumerate(body.opcodes) if opcode in _PRODUCTS] if body else []
        if body is None or len(found) != 1:
            return None
        place = (body, found[0])
    inside, product = place
    if inside.opcodes[product] not in _PRODUCTS:
        return None
    sources = [_narrow(program, (inside, each), callers) for each in inside.operands[product][:2]]
    lhs, rhs = sources if len(sources) == 2 else (None, None)
    return None if lhs is None or rhs is None else (lhs, rhs)


def widens(program: Program, computation: Computation, index: int) -> bool:
    """Whether an instruction does nothing but change narrow values to f32 or back, for the compiler."""
    place = (computation, index)
    if computation.opcodes[index] == "fusion":
        body = _callee(program, place)
        work = [number for number, opcode in enumerate(body.opcodes) if opcode != "parameter"] if body else []
        if body is None or not work or any(body.opcodes[each] not in {*_VIEWS, "convert"} for each in work):
            return False
        converts = [(body, each) for each in work if body.opcodes[each] == "convert"]
        return bool(converts) and all(_is_compilers(program, each) for each in converts)
    return computation.opcodes[index] == "convert" and _is_compilers(program, place)


def _narrow(program: Program, place: _Place, callers: list[_Place]) -> DType | None:
    """The narrow type that an f32 had before the compiler widened it, followed through views and fusions."""
    callers = list(callers)
    kind = _dtype(program, place)
    if kind is None or (kind.kind, kind.bits) != _WIDE:
        return None
    for _ in range(_MAX_STEPS):
        if place[0].opcodes[place[1]] == "convert":
            source = (place[0], place[0].operands[place[1]][0])
            return _dtype(program, source) if _is_compilers(program, place) else None
        onward = _behind(program, place, callers)
        if onward is None:
            return None
        place = onward
    return None


def _behind(program: Program, place: _Place, callers: list[_Place]) -> _Place | None:
    """What an instruction hands on as it is, None for one that computes."""
    computation, index = place
    opcode, operands = computation.opcodes[index], computation.operands[index]
    if opcode in _VIEWS and operands:
        return computation, operands[0]
    if opcode == "parameter" and callers:
        caller, at = callers.pop()
        number = program.parameter_number(computation, index)
        given = caller.operands[at]
        return (caller, given[number]) if 0 <= number < len(given) else None
    if opcode == "get-tuple-element" and operands:
        return _element(program, place, callers)
    body = _callee(program, place) if opcode in _CALLS else None
    if body is None:
        return None
    callers.append(place)
    return body, body.root


def _element(program: Program, place: _Place, callers: list[_Place]) -> _Place | None:
    """What a fusion of several results makes of one."""
    computation, index = place
    tuple_at = computation.operands[index][0]
    body = _callee(program, (computation, tuple_at)) if computation.opcodes[tuple_at] in _CALLS else None
    if body is None or body.opcodes[body.root] != "tuple":
        return None
    try:
        number = integer(computation.attributes[index].get("index", ""))
    except ValueError:
        return None
    elements = body.operands[body.root]
    if not 0 <= number < len(elements):
        return None
    callers.append((computation, tuple_at))
    return body, elements[number]


def _callee(program: Program, place: _Place) -> Computation | None:
    attributes = place[0].attributes[place[1]]
    key = "to_apply" if "to_apply" in attributes else "calls"
    return program.callee(*place, key) if key in attributes else None


def _is_compilers(program: Program, place: _Place) -> bool:
    """Whether a conversion between 16 bits and f32 is the compiler's own."""
    computation, index = place
    ends = [_dtype(program, place), _dtype(program, (computation, computation.operands[index][0]))]
    kinds = [(kind.kind, kind.bits) for kind in ends if kind is not None]
    narrow = [kind for kind, bits in kinds if bits <= _NARROW_BITS]
    if _WIDE not in kinds or narrow != [DTypeKind.FLOAT]:
        return False
    metadata = computation.attributes[index].get("metadata")
    name = fields(metadata).get("op_name", "") if metadata else ""
    return not name.endswith("convert_element_type")


def _dtype(program: Program, place: _Place) -> DType | None:
    tensors = program.tensors(place[0].shapes[place[1]])
    return tensors[0].dtype if len(tensors) == 1 else None
