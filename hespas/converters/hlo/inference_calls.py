"""Shape inference of what holds others or leaves the device: tuples, calls, collectives, messages, copies and
their asynchronous halves. Rules as in :mod:`~hespas.converters.hlo.inference`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hespas.converters.hlo.attributes import names
from hespas.converters.hlo.inference import (
    ARRAY_RULES,
    Asked,
    Callee,
    Rule,
    array_of,
    check,
    one_or_tuple,
    same_extents,
    tuple_of,
    with_dims,
)
from hespas.converters.hlo.inference_moves import MOVING_RULES
from hespas.converters.hlo.module import Computation
from hespas.converters.hlo.program import base_opcode
from hespas.converters.hlo.shapes import ArrayShape, Shape, shown_shape
from hespas.graph import DYNAMIC, find_dtype

__all__ = ["Inference"]

_TOKEN = Shape(ArrayShape(find_dtype("token"), "token", ()))
_U32 = Shape(ArrayShape(find_dtype("u32"), "u32", ()))


def _first(asked: Asked) -> Shape:
    return asked.operands[0]


# --- tuples and calls ---


def _tuple(asked: Asked) -> Shape:
    return tuple_of(asked.operands)


def _element(asked: Asked) -> Shape:
    if "index" not in asked.attributes:
        raise ValueError("expected an attribute index")
    number = asked.number("index", -1)
    elements = asked.operands[0].elements
    if elements is None or not 0 <= number < len(elements):
        count = 0 if elements is None else len(elements)
        raise ValueError(f"expected an index below {count}, the size of the tuple, found {number}")
    return elements[number]


def _check_arguments(callee: Callee, given: Sequence[Shape], what: str, *, all_used: bool = True) -> None:
    """What is passed fits what a computation takes."""
    count = len(callee.parameters)
    if count > len(given) or (all_used and count != len(given)):
        raise ValueError(f"expected {what} to take {len(given)} parameters, found {count}")
    for place, (parameter, operand) in enumerate(zip(callee.parameters, given, strict=False)):
        if parameter is not None:
            fits = _fits(callee, place, parameter, operand)
            check(fits, f"parameter {place} of {what} and its operand to be alike", parameter, operand)


def _fits(callee: Callee, place: int, wanted: Shape, given: Shape) -> bool:
    """Whether what is given is what a computation takes at a place or, at -1, makes."""
    if (place, given) in callee.known:
        return True
    if not same_extents(wanted, given):
        return False
    callee.known.add((place, given))
    return True


def _call(asked: Asked) -> Shape:
    key = "to_apply" if "to_apply" in asked.attributes else "calls"
    callee = asked.callee(key)
    _check_arguments(callee, asked.operands, "the computation")
    return callee.result


def _fusion(asked: Asked) -> Shape:
    callee = asked.callee("calls")
    _check_arguments(callee, asked.operands, "the computation", all_used=False)
    return callee.result


def _while(asked: Asked) -> Shape:
    state = asked.operands[:1]
    body, condition = asked.callee("body"), asked.callee("condition")
    _check_arguments(body, state, "the body")
    _check_arguments(condition, state, "the condition")
    scalar = condition.result.array is not None and not condition.result.array.dims
    check(scalar, "a condition that makes one truth value", condition.result)
    return body.result


def _conditional(asked: Asked) -> Shape:
    check(not asked.array(0).dims, "a scalar to branch on", asked.operands[0])
    keys = [("branch_computations", place) for place in range(len(asked.operands) - 1)]
    if "branch_computations" not in asked.attributes:
        keys = [("true_computation", 0), ("false_computation", 0)]
    if len(keys) != len(asked.operands) - 1:
        raise ValueError(f"expected an operand for each of {len(keys)} branches")
    branches = [asked.callee(key, place) for key, place in keys]
    for place, branch in enumerate(branches):
        _check_arguments(branch, asked.operands[place + 1 : place + 2], f"branch {place}")
        fits = _fits(branches[0], -1, branches[0].result, branch.result)
        check(fits, "branches that make the same", branches[0].result, branch.result)
    return branches[0].result


# --- between devices ---


def _gathered(asked: Asked, *, start: bool = False) -> Shape:
    """Operands joined along one dimension, as often as devices talk to one another."""
    result = asked.stated()
    whole = result.element(1) if start and result.elements and len(result.elements) > 1 else result
    parts = [whole] if len(asked.operands) == 1 else list(whole.elements or ())
    if len(parts) != len(asked.operands):
        raise ValueError(f"expected {len(asked.operands)} results, found {shown_shape(result)}")
    rank = len(asked.array(0).dims)
    along = asked.dimension("dimensions", rank)
    given, made = asked.array(0).dims, array_of(parts[0], "the result").dims
    check(len(made) == rank, "equally many dimensions", asked.operands[0], parts[0])
    if DYNAMIC in (given[along], made[along]):
        return result
    shards = -(-made[along] // given[along]) if given[along] else max(asked.group_size, 1)
    expected = f"{asked.group_size} shards along dimension {along}, one of each device"
    check(asked.group_size in (1, shards), expected, asked.operands[0], parts[0])
    joined: list[Shape] = []
    for place in range(len(asked.operands)):
        array = asked.array(place)
        check(along < len(array.dims), f"a dimension {along}", array)
        joined.append(_scaled(array, along, array.dims[along] * shards))
    return _started(asked, one_or_tuple(joined)) if start else one_or_tuple(joined)


def _scaled(array: ArrayShape, along: int, extent: int) -> Shape:
    dims = [*array.dims]
    dims[along] = DYNAMIC if dims[along] == DYNAMIC else extent
    return with_dims(array, dims)


def _started(asked: Asked, made: Shape) -> Shape:
    """What the start of a collective makes: operands, results, and whatever the backend keeps."""
    result = asked.stated()
    elements = result.elements
    if not elements:  # as text of older versions has it
        return made
    wrapped = len(asked.operands) == 1 and elements[0].elements is not None
    given = tuple_of(asked.operands) if wrapped else one_or_tuple(asked.operands)
    return tuple_of((given, made, *elements[2:]))


def _all_gather_start(asked: Asked) -> Shape:
    return _gathered(asked, start=True)


def _reduce_scatter(asked: Asked) -> Shape:
    """One shard of each operand."""
    result = asked.stated()
    parts = [result] if len(asked.operands) == 1 else list(result.elements or ())
    if len(parts) != len(asked.operands):
        raise ValueError(f"expected {len(asked.operands)} results, found {shown_shape(result)}")
    along = asked.dimension("dimensions", len(asked.array(0).dims))
    given, made = asked.array(0).dims, array_of(parts[0], "the result").dims
    check(len(made) == len(given), "equally many dimensions", asked.operands[0], parts[0])
    if DYNAMIC in (given[along], made[along]):
        return result
    shards = -(-given[along] // made[along]) if made[along] else max(asked.group_size, 1)
    expected = f"{asked.group_size} shards along dimension {along}, one for each device"
    check(asked.group_size in (1, shards), expected, asked.operands[0], parts[0])
    cut: list[Shape] = []
    for place in range(len(asked.operands)):
        array = asked.array(place)
        check(along < len(array.dims), f"a dimension {along}", array)
        fits = shards > 0 and (array.dims[along] == DYNAMIC or array.dims[along] % shards == 0)
        check(fits, f"{shards} equal shards along dimension {along}", array)
        cut.append(_scaled(array, along, array.dims[along] // max(shards, 1)))
    return one_or_tuple(cut)


def _each(asked: Asked) -> Shape:
    """Every operand's own shape."""
    return one_or_tuple(asked.operands)


def _all_to_all(asked: Asked) -> Shape:
    first = asked.array(0)
    if "dimensions" in asked.attributes:
        along = asked.dimension("dimensions", len(first.dims))
        fits = first.dims[along] == DYNAMIC or first.dims[along] % max(asked.group_size, 1) == 0
        check(fits, f"{asked.group_size} equal parts along dimension {along}", first)
        return one_or_tuple(asked.operands)
    for place in range(1, len(asked.operands)):
        check(same_extents(asked.operands[0], asked.operands[place]), "operands alike", *asked.operands[:2])
    if asked.group_size > 1 and len(asked.operands) != asked.group_size:
        raise ValueError(f"expected {asked.group_size} operands, one per device, found {len(asked.operands)}")
    result = asked.stated()
    return asked.operands[0] if result.elements is None else tuple_of(asked.operands)


def _ragged_all_to_all(asked: Asked) -> Shape:
    if len(asked.operands) != 6:
        raise ValueError(f"expected 6 operands, found {len(asked.operands)}")
    for place in (3, 4, 5):
        fits = same_extents(asked.operands[2], asked.operands[place])
        check(fits, "offsets and sizes alike", asked.operands[2], asked.operands[place])
    return asked.operands[1]


def _in_place(asked: Asked) -> bool:
    """Whether a permutation is written into a buffer it is given, at given offsets."""
    offsets = asked.operands[2].elements if len(asked.operands) == 4 else None
    return offsets is not None


def _permuted(asked: Asked) -> Shape:
    return asked.operands[1] if _in_place(asked) else one_or_tuple(asked.operands)


def _permute_start(asked: Asked) -> Shape:
    stated = asked.result.elements if asked.result is not None and asked.result.elements else ()
    if _in_place(asked):
        return tuple_of((*asked.operands[:2], *stated[2:]))
    return _started(asked, one_or_tuple(asked.operands))


def _finished(asked: Asked) -> Shape:
    """The results that a start promised."""
    elements = asked.operands[0].elements
    if elements is None or len(elements) < 2:
        raise ValueError(f"expected what a start makes, found {shown_shape(asked.operands[0])}")
    return elements[1]


def _copy_start(asked: Asked) -> Shape:
    return tuple_of((asked.operands[0], asked.operands[0], _U32))


def _copy_done(asked: Asked) -> Shape:
    made = _finished(asked)
    first = asked.operands[0].element(0)
    check(same_extents(first, made), "a copy like its source", first, made)
    return first


def _handle(asked: Asked) -> Shape:
    """The number by which a backend knows a message, of whatever type."""
    elements = asked.stated().elements
    handle = elements[1] if elements is not None and len(elements) > 1 else _U32
    return handle if handle.array is not None and not handle.array.dims else _U32


def _send(asked: Asked) -> Shape:
    return tuple_of((asked.operands[0], _handle(asked), _TOKEN))


def _recv(asked: Asked) -> Shape:
    elements = asked.stated().elements
    if not elements:
        raise ValueError(f"expected data, a number and a token, found {shown_shape(asked.stated())}")
    return tuple_of((elements[0], _handle(asked), _TOKEN))


def _recv_done(asked: Asked) -> Shape:
    elements = asked.operands[0].elements
    if not elements:
        raise ValueError(f"expected what a receive makes, found {shown_shape(asked.operands[0])}")
    return tuple_of((elements[0], _TOKEN))


def _async_start(asked: Asked) -> Shape:
    """A start that names its computation: what that takes, what it makes, and a context."""
    key = "calls" if "calls" in asked.attributes else "to_apply"
    callee = asked.callee(key)
    _check_arguments(callee, asked.operands, "the computation")
    stated = asked.result.elements if asked.result is not None and asked.result.elements else ()
    return tuple_of((tuple_of(asked.operands), callee.result, *stated[2:]))


_RULES: dict[str, Rule] = {
    **ARRAY_RULES,
    **MOVING_RULES,
    "tuple": _tuple,
    "get-tuple-element": _element,
    "call": _call,
    "fusion": _fusion,
    "while": _while,
    "conditional": _conditional,
    "after-all": lambda _asked: _TOKEN,
    "partition-id": lambda _asked: _U32,
    "replica-id": lambda _asked: _U32,
    "all-gather": _gathered,
    "all-gather-start": _all_gather_start,
    "all-gather-done": _finished,
    "all-reduce": _each,
    "all-reduce-start": _each,
    "all-reduce-done": _first,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "ragged-all-to-all": _ragged_all_to_all,
    "collective-broadcast": _first,
    "collective-permute": _permuted,
    "collective-permute-start": _permute_start,
    "collective-permute-done": _finished,
    "copy-start": _copy_start,
    "copy-done": _copy_done,
    "send": _send,
    "send-done": lambda _asked: _TOKEN,
    "recv": _recv,
    "recv-done": _recv_done,
    "async-start": _async_start,
    "async-update": _first,
    "async-done": _finished,
}
"""Opcode -> the shape its result has to have. What is not here (``parameter``, ``constant``, ``custom-call``,
``infeed``) makes what the program says.
"""


class Inference:
    """What the computations of a module take and make, and the size of groups of devices; all asked once."""

    def __init__(self, computations: Mapping[str, Computation], shapes: Sequence[Shape]) -> None:
        """Start with nothing asked. Both may grow later."""
        self._computations = computations
        self._shapes = shapes
        self._callees: dict[str, Callee] = {}

    def callee(self, attributes: Mapping[str, str], key: str, place: int = 0) -> Callee:
        """A computation that an attribute names. Raises ``ValueError``."""
        named = names(attributes.get(key))
        name = named[place] if place < len(named) else ""
        found = self._callees.get(name)
        if found is None:
            body = self._computations.get(name)
            if body is None:
                raise ValueError(f"expected an attribute {key} that names a computation")
            count = max([int(number) for number in body.parameters], default=-1) + 1
            if count > len(body):
                raise ValueError(f"expected parameters of the computation numbered 0 to {len(body) - 1}")
            taken: list[Shape | None] = [None] * count
            for number, index in body.parameters.items():
                taken[int(number)] = self._shapes[body.shapes[index]]
            found = Callee(tuple(taken), self._shapes[body.shapes[body.root]])
            self._callees[name] = found
        return found

    def result(
        self,
        opcode: str,
        operands: tuple[Shape, ...],
        attributes: Mapping[str, str],
        stated: Shape | None = None,
        group_size: int = 1,
    ) -> Shape | None:
        """The shape an operation makes, None where any will do. Raises ``ValueError`` naming what was
        expected.
        """
        rule = _RULES.get(opcode)

        def callee(key: str, place: int = 0) -> Callee:
            return self.callee(attributes, key, place)

        if rule is not None:
            return rule(Asked(operands, attributes, callee, stated, group_size))
        base, suffix = base_opcode(opcode)
        if not suffix or stated is None:
            return None
        return self._asynchronous(_RULES.get(base), suffix, Asked(operands, attributes, callee, stated))

    def _asynchronous(self, rule: Rule | None, suffix: str, asked: Asked) -> Shape:
        """``slice-start``, ``-update``, ``-done``: what is wrapped, made of (operands), result, context."""
        if suffix != "-start":
            return _RULES[f"async{suffix}"](asked)
        stated = asked.stated().elements
        if stated is None or len(stated) < 2:
            raise ValueError(
                f"expected operands, a result and a context, found {shown_shape(asked.stated())}"
            )
        made = stated[1]
        if rule is not None:
            made = rule(Asked(asked.operands, asked.attributes, asked.callee, made))
        return tuple_of((tuple_of(asked.operands), made, *stated[2:]))
