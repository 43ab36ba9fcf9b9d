"""How an operation of a replay waits for those before it: by data, so that no compiler may reorder them.

A producer's result of the operand's type is the operand; one of as many elements is reshaped. What fits no
operand hands over one element, written into an operand or argument: XLA drops barriers and removes twins and
dead code, but not that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from hespas.converters.stablehlo.replay_emit import F32, Emitter, Tensor, Value

__all__ = ["Binder"]

_Key = Callable[[Tensor], Hashable]
"""What results and operands must have in common."""

_FEW = 16
"""Operands of what may be repeated copies of smaller results."""

_POOL = 16
"""Arguments of one type before twins are told apart by an element of their own."""


class Binder:
    """Makes operands. ``whole`` holds the names of the values of which something uses all elements."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.whole: set[str] = set()
        self._pools: dict[Tensor, list[Value]] = {}
        self._wide: set[str] = set()
        self._origins: dict[str, str] = {}
        self._twins: dict[tuple[object, ...], int] = {}

    def filler(self, tensor: Tensor, place: int = 0) -> Value:
        """An argument of the given type; different places are different arguments."""
        pool = self._pools.setdefault(tensor, [])
        while len(pool) <= place:
            pool.append(self.emitter.argument(tensor))
        return pool[place]

    def bind(
        self,
        op: str,
        producers: Sequence[Sequence[Value]],
        wanted: Sequence[Tensor],
        *,
        stretch: bool = False,
    ) -> list[Value]:
        """Operands of the ``wanted`` types that together wait for every producer.

        Two of one ``op`` never get the same operands, nor do any two with a choice. With ``stretch`` smaller
        results are repeated to fill operands, but not all of them: work on copies of one number is none.
        ``wanted`` must not be empty where there are producers.
        """
        slots: list[Value | None] = [None] * len(wanted)
        waiting = [producer for producer in producers if producer]
        for key in (_itself, _content):
            free = _free(slots, wanted, key)
            waiting = [each for each in waiting if not self._place(each, slots, wanted, (free, key))]
        if stretch and len(wanted) <= _FEW:
            waiting = [each for each in waiting if not self._stretch(each, slots, wanted)]
        number = self._number_of_twins(op, slots, wanted)
        bound = self._filled(slots, wanted, number)
        late = [self.emitter.first(_smallest(each)) for each in waiting if _smallest(each).type.elements]
        needs_seed = number >= _POOL or (number > 0 and None not in slots)
        if needs_seed:
            late.append(self.emitter.seed())
        return self._tied(bound, slots, late)

    def tie(self, value: Value, scalars: Sequence[Value]) -> Value:
        """``value``, waiting for ``scalars``."""
        if not scalars:
            return value
        kinds = {scalar.type for scalar in scalars}
        alike = len(kinds) == 1 and not (scalars[0].type.is_bool or scalars[0].type.is_complex)
        element = scalars[0].type.element if alike else F32
        return self.emitter.put(value, self.emitter.joined(scalars, element))

    def release(self, values: Sequence[Value]) -> list[Value]:
        """Take back that operands were used whole. Returns an element of each that a producer made."""
        made = [value for value in values if value.name in self._origins]
        self.whole.difference_update(self._origins[value.name] for value in made)
        return [self.emitter.first(value) for value in made if value.type.elements]

    def _place(
        self,
        producer: Sequence[Value],
        slots: list[Value | None],
        wanted: Sequence[Tensor],
        places: tuple[dict[Hashable, list[int]], _Key],
    ) -> bool:
        """Put results of one producer into free slots of the same key; whether any did fit."""
        free, key = places
        found = False
        for value in producer:
            fitting = free.get(key(value.type))
            if fitting:
                place = fitting.pop()
                slots[place] = self._taken(value, self.emitter.reshape(value, wanted[place].shape))
                found = True
        return found

    def _stretch(
        self, producer: Sequence[Value], slots: list[Value | None], wanted: Sequence[Tensor]
    ) -> bool:
        """The same for one smaller result, as long as another operand stays as it is."""
        if slots.count(None) < 2 and all(slot is None or slot.name in self._wide for slot in slots):
            return False
        for value in producer:
            for place, tensor in enumerate(wanted):
                if slots[place] is None and _stretches(value.type, tensor):
                    wide = self._taken(value, self.emitter.stretched(value, tensor.shape))
                    self._wide.add(wide.name)
                    slots[place] = wide
                    return True
        return False

    def _taken(self, value: Value, adapted: Value) -> Value:
        """Note that all of ``value`` is used."""
        self.whole.add(value.name)
        self._origins[adapted.name] = value.name
        return adapted

    def _number_of_twins(self, op: str, slots: Sequence[Value | None], wanted: Sequence[Tensor]) -> int:
        """How many operations before had the same operands where they come from producers. Names do not tell
        operations apart, since many are written alike; where all operands are given,
        :meth:`Emitter.add` sees to those of other names.
        """
        given = tuple(slot.name if slot else None for slot in slots)
        key = (op if None not in given else "", given, tuple(wanted))
        number = self._twins.get(key, 0)
        self._twins[key] = number + 1
        return number

    def _filled(self, slots: Sequence[Value | None], wanted: Sequence[Tensor], number: int) -> list[Value]:
        """Arguments in the slots that no producer fills; those of one operation are different ones."""
        taken: dict[Tensor, int] = {}
        bound: list[Value] = []
        for slot, tensor in zip(slots, wanted, strict=True):
            if slot is not None:
                bound.append(slot)
                continue
            place = taken.get(tensor, 0)
            taken[tensor] = place + 1
            bound.append(self.filler(tensor, place + min(number, _POOL)))
        return bound

    def _tied(self, bound: list[Value], slots: Sequence[Value | None], late: Sequence[Value]) -> list[Value]:
        """Let the operand that costs least wait for what fits none: an argument before a result."""
        able = [place for place, value in enumerate(bound) if value.type.elements]
        if not late or not able:
            return bound
        place = min(able, key=lambda place: (slots[place] is not None, bound[place].type.size_bytes))
        tied = self.tie(bound[place], late)
        if bound[place].name in self._origins:
            self._origins[tied.name] = self._origins[bound[place].name]
        bound[place] = tied
        return bound


def _itself(tensor: Tensor) -> Hashable:
    return tensor


def _content(tensor: Tensor) -> Hashable:
    """Equal for types that differ in shape only."""
    return tensor.element.code, tensor.elements


def _free(slots: Sequence[Value | None], wanted: Sequence[Tensor], key: _Key) -> dict[Hashable, list[int]]:
    """Places nobody fills yet, by key, the first last."""
    free: dict[Hashable, list[int]] = {}
    for place in reversed(range(len(wanted))):
        if slots[place] is None:
            free.setdefault(key(wanted[place]), []).append(place)
    return free


def _stretches(made: Tensor, wanted: Tensor) -> bool:
    """Whether a result, repeated, fills an operand."""
    if made.element is not wanted.element or not made.elements:
        return False
    return wanted.elements > made.elements and wanted.elements % made.elements == 0


def _smallest(producer: Sequence[Value]) -> Value:
    return min(producer, key=lambda value: (not value.type.elements, value.type.size_bytes))
