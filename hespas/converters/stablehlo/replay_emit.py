"""Text of a replay: SSA values, arguments, and the operations every recipe is made of.

``Emitter.flops`` and ``Emitter.transcendentals`` count as XLA's HLO cost analysis does, so that recipes know
what is still to be done of the work a node stands for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from math import isnan, prod
from typing import NamedTuple

from hespas.files.streams import limits
from hespas.graph import DTYPES, DType, DTypeKind, OpGraph
from hespas.graph.columns import dtype
from hespas.graph.errors import UnsupportedError
from hespas.programs.operations import broadcast_axes
from hespas.programs.text import Tensor, Value, pretty, reduction

__all__ = [
    "F32",
    "Binder",
    "Contraction",
    "Emitter",
    "Node",
    "Recipe",
    "TensorList",
    "quoted_text",
    "stand_in",
    "too_large",
]

F32 = dtype("f32")
_SEEDS = 1024
_NAME = re.compile(r"%\w+(?:#\d+)?")


def too_large(what: str, position: str | None = None) -> UnsupportedError:
    """The refusal of a graph whose replay would have ``what``."""
    return UnsupportedError(
        f"a StableHLO replay of it has {what}",
        position=position,
        hint="merge operations with `granularity=region`, or choose another format",
    )


def quoted_text(text: str) -> str:
    """A string literal of MLIR, whatever bytes the text has."""
    encoded = text.encode("utf-8", "surrogatepass")
    plain = (chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:02X}" for byte in encoded)
    return f'"{"".join(plain)}"'


class Emitter:
    """Collects the body of ``@main`` line by line. ``location`` is put behind each operation;
    ``unknown_work`` names the operation of unknown FLOPs that the next copy is marked with.

    XLA makes one of operations that are alike but for their location: :meth:`add` never writes two such.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.arguments: list[Tensor] = []
        self.aliases: dict[str, str] = {}
        self.location = ""
        self.unknown_work: str | None = None
        self.flops = 0.0
        self.transcendentals = 0.0
        self._limits = limits()
        self._size = 0
        self._next = 0
        self._seeds = 0
        self._seed_argument: Value | None = None
        self._written: dict[str, Value] = {}
        self._values: dict[str, Value] = {}

    def mark(self, name: str | None) -> None:
        """Mark the next copy as an operation of unknown FLOPs of that name; None: no longer."""
        self.unknown_work = name

    def argument(self, tensor: Tensor) -> Value:
        """A new argument of the function."""
        self.arguments.append(tensor)
        return self._known(Value(f"%arg{len(self.arguments) - 1}", tensor))

    def alias(self, prefix: str, attribute: str) -> str:
        """The name of an attribute that is written once for the whole module."""
        return self.aliases.setdefault(attribute, f"#{prefix}{len(self.aliases)}")

    def add(self, text: str, result: Tensor) -> Value:
        """One operation with one result; ``text`` stands right of the equals sign. One that was written
        before gets an operand that differs in one element.
        """
        text = self._unlike(text)
        value = self._known(Value(f"%{self._next}", result))
        self._next += 1
        self._written[text] = value
        self._line(f"    {value} = {text}{self.location}")
        return value

    def add_many(self, text: str, results: Sequence[Tensor]) -> list[Value]:
        """One operation with several results."""
        text = self._unlike(text)
        name = f"%{self._next}"
        self._next += 1
        values = [self._known(Value(f"{name}#{place}", result)) for place, result in enumerate(results)]
        self._written[text] = values[0]
        self._line(f"    {name}:{len(results)} = {text}{self.location}")
        return values

    def share(self, text: str, result: Tensor, *, flops: float = 0.0) -> Value:
        """An operation that is no work of a node's, such as a view: the one written before, or a new one."""
        if text not in self._written:
            self.work(flops=flops)
            return self.add(text, result)
        return self._written[text]

    def _line(self, line: str) -> None:
        """Raises ``UnsupportedError`` where the program becomes larger than any that XLA compiles."""
        self.lines.append(line)
        self._size += len(line)
        if len(self.lines) > self._limits.replayed_operations:
            raise too_large(f"more than {self._limits.replayed_operations:,} operations")
        if self._size > self._limits.replayed_characters:
            raise too_large(f"more than {self._limits.replayed_characters:,} characters")

    def _known(self, value: Value) -> Value:
        self._values[value.name] = value
        return value

    def _unlike(self, text: str) -> str:
        """``text``, or where it was written before, the same of an operand that nothing else has."""
        if text not in self._written:
            return text
        named = (self._values.get(name) for name in dict.fromkeys(_NAME.findall(text)))
        able = [value for value in named if value is not None and value.type.elements]
        if not able:
            return text
        old = min(able, key=lambda value: value.type.size_bytes)
        new = self.put(old, self.seed())
        return _NAME.sub(lambda found: new.name if found[0] == old.name else found[0], text)

    def work(self, *, flops: float = 0.0, transcendentals: float = 0.0) -> None:
        """Note what XLA counts for the operations just added."""
        self.flops += flops
        self.transcendentals += transcendentals

    def seed(self) -> Value:
        """A number that no other value is known to equal: it tells twins apart."""
        place = self._seeds % _SEEDS
        if self._seed_argument is None or place == 0:
            self._seed_argument = self.argument(Tensor(F32, (_SEEDS,)))
        self._seeds += 1
        one = Tensor(F32, (1,))
        text = pretty("slice", [self._seed_argument], one, f" [{place}:{place + 1}]")
        return self.reshape(self.share(text, one), ())

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """The same elements in another shape."""
        result = value.type.reshaped(shape)
        if result == value.type:
            return value
        return self.share(pretty("reshape", [value], result), result)

    def front(self, value: Value, shape: Sequence[int]) -> Value:
        """The leading part of each dimension."""
        result = value.type.reshaped(shape)
        if result == value.type:
            return value
        ranges = ", ".join(f"0:{extent}" for extent in shape)
        return self.share(pretty("slice", [value], result, f" [{ranges}]"), result)

    def stretched(self, value: Value, shape: Sequence[int], *, shared: bool = True) -> Value:
        """All elements, repeated until they fill a shape whose size is a multiple of theirs; with ``shared``
        those of another operation may do.
        """
        axes, result = broadcast_axes(value.type.shape, shape), value.type.reshaped(shape)
        if axes is None:
            axes, value = [1], self.reshape(value, (value.type.elements,))
            result = value.type.reshaped((prod(shape) // value.type.elements, value.type.elements))
        text = pretty("broadcast_in_dim", [value], result, f", dims = {axes}")
        return self.reshape(self.share(text, result) if shared else self.add(text, result), shape)

    def first(self, value: Value) -> Value:
        """The first element, as a scalar."""
        return self.reshape(self.front(value, (1,) * len(value.type.shape)), ())

    def converted(self, value: Value, element: DType) -> Value:
        """The same values in another element type."""
        if value.type.element is element:
            return value
        count = value.type.elements
        if value.type.is_complex:
            part = Tensor(dtype("f32" if value.type.element.bits == 64 else "f64"), value.type.shape)
            real = self.share(pretty("real", [value], part), part, flops=count)
            return self.converted(real, element)
        result = Tensor(element, value.type.shape)
        if result.is_complex:
            both = self.converted(value, dtype("f32" if element.bits == 64 else "f64"))
            return self.share(f"stablehlo.complex {both}, {both} : {result}", result, flops=count)
        return self.share(pretty("convert", [value], result), result, flops=count)

    def unary(self, op: str, value: Value) -> Value:
        """An operation of one operand that keeps its type."""
        return self.add(f"stablehlo.{op} {value} : {value.type}", value.type)

    def binary(self, op: str, left: Value, right: Value) -> Value:
        """An operation of two operands of one type that keeps it."""
        return self.add(f"stablehlo.{op} {left}, {right} : {left.type}", left.type)

    def put(self, target: Value, number: Value) -> Value:
        """``target``, waiting for ``number``: one element of it is overwritten, in place where that may be.

        ``number`` is a scalar of any type. A target without elements is returned as it is.
        """
        if not target.type.elements:
            return target
        scalar = self.converted(number, target.type.element)
        if target.type.elements == 1:
            op = "or" if target.type.is_bool else "add" if target.type.is_complex else "maximum"
            one = self.reshape(scalar, target.type.shape)
            return self.share(f"stablehlo.{op} {target}, {one} : {target.type}", target.type, flops=1)
        update = self.reshape(scalar, (1,) * len(target.type.shape))
        return self.overwrite(target, update)

    def overwrite(self, target: Value, update: Value) -> Value:
        """``target`` with its leading part replaced."""
        places = [Value("%zero", Tensor(dtype("i32"), ()))] * target.type.rank
        text = pretty("dynamic_update_slice", [target, update, *places], target.type)
        return self.share(text, target.type)

    def largest(self, value: Value) -> Value:
        """A scalar that takes all elements to know. ``value`` is real and has elements."""
        count = value.type.elements
        flat = self.reshape(value, (count,))
        if count == 1:
            return self.reshape(flat, ())
        scalar = value.type.scalar
        start = self.reshape(self.front(flat, (1,)), ())
        return self.share(reduction("maximum", flat, start, [0], scalar), scalar, flops=count - 1)

    def joined(self, scalars: Iterable[Value], element: DType) -> Value:
        """One scalar that waits for all of ``scalars``."""
        parts = [self.converted(each, element) for each in scalars]
        if len(parts) == 1:
            return parts[0]
        ones = [self.reshape(part, (1,)) for part in parts]
        row = Tensor(element, (len(ones),))
        return self.largest(self.share(pretty("concatenate", ones, row, ", dim = 0"), row))


# What a recipe gets: one node of the graph in terms of a replay.


class Contraction(NamedTuple):
    """A product ``batch x (m x k by k x n)`` of element types ``lhs`` and ``rhs`` (codes, -1 unknown)."""

    batch: int
    m: int
    n: int
    k: int
    lhs: int
    rhs: int

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.m * self.n * self.k


class Node(NamedTuple):
    """An operation to replay. ``op`` is its name without dialect; costs are NaN where unknown.

    ``producers`` holds, for each operation this one waits for, the values it made.
    """

    op: str
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    producers: Sequence[Sequence[Value]]
    contractions: tuple[Contraction, ...]
    flops: float
    useful_flops: float
    transcendentals: float
    bytes_moved: float
    binder: Binder

    @property
    def emitter(self) -> Emitter:
        """Where operations go."""
        return self.binder.emitter

    @property
    def target_flops(self) -> float:
        """FLOPs as XLA counts them: without those on padding and dilation zeros, where that is known."""
        return self.flops if isnan(self.useful_flops) else self.useful_flops

    @property
    def result(self) -> Tensor | None:
        """The result type where there is exactly one."""
        return self.results[0] if len(self.results) == 1 else None

    def bound(self, wanted: Sequence[Tensor] | None = None, *, stretch: bool = False) -> list[Value]:
        """Operands of the node's own types, or those ``wanted``, that wait for all producers."""
        tensors = self.operands if wanted is None else wanted
        return self.binder.bind(self.op, self.producers, tensors, stretch=stretch)


Recipe = Callable[[Node], "list[Value] | None"]
"""Emits a node and returns its results; None (and nothing emitted) where the types do not fit."""


# How an operation of a replay waits for those before it: by data, so that no compiler may reorder them.
#
# A producer's result of the operand's type is the operand; one of as many elements is reshaped. What fits
# no operand hands over one element, written into an operand or argument: XLA drops barriers and removes
# twins and dead code, but not that.

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


# Tensor types of a graph as those of a program that runs: extents known, element types StableHLO has.

_LARGEST = 1 << 48
"""Elements of a tensor that any machine could hold."""

_STAND_INS: dict[str, str] = {
    "tf32": "f32",
    "f6E2M3FN": "f8E4M3FN",
    "f6E3M2FN": "f8E4M3FN",
    "mxfp8": "f8E4M3FN",
    "mxfp6": "f8E4M3FN",
    "mxfp4": "f4E2M1FN",
    "mxint8": "i8",
    "nvfp4": "f4E2M1FN",
}
"""Types that StableHLO lacks, and those of 6 bits, which XLA:CPU does not compile."""

_VALUELESS = {DTypeKind.TOKEN, DTypeKind.OPAQUE}


class TensorList:
    """The types of a graph by row. ``changed`` counts the uses of those that are not what the graph says."""

    def __init__(self, graph: OpGraph) -> None:
        self.changed: Counter[str] = Counter()
        self._graph = graph
        self._rows: dict[int, tuple[Tensor | None, tuple[str, ...]]] = {}

    def of(self, rows: Sequence[int]) -> tuple[Tensor, ...]:
        """The types of some rows without tokens. Raises ``UnsupportedError`` for one past all memory."""
        found: list[Tensor] = []
        for row in rows:
            if row not in self._rows:
                self._rows[row] = self._tensor(row)
            tensor, changes = self._rows[row]
            self.changed.update(changes)
            if tensor is not None:
                found.append(tensor)
        return tuple(found)

    def _tensor(self, row: int) -> tuple[Tensor | None, tuple[str, ...]]:
        types = self._graph.types
        changes: list[str] = []
        element = self._element(int(types.dtype[row]), changes)
        if element.kind in _VALUELESS:
            return None, ("tokens",)
        extents = types.shape(row)
        if any(extent < 0 for extent in extents):
            changes.append("extents known at run time only, taken as 1")
        if self._graph.strings[int(types.encoding[row])]:
            changes.append("layouts and encodings")
        tensor = Tensor(element, tuple(extent if extent >= 0 else 1 for extent in extents))
        if tensor.elements > _LARGEST:
            raise UnsupportedError(
                f"a tensor of {tensor.elements:,} elements", position=str(tensor), hint="correct the shape"
            )
        return tensor, tuple(changes)

    def _element(self, code: int, changes: list[str]) -> DType:
        element = stand_in(code)
        if code < 0:
            changes.append("unknown element types, taken as f32")
        elif element.code != code:
            changes.append(f"{DTYPES[code].name}, taken as {element.name}")
        return element


def stand_in(code: int) -> DType:
    """The element type that a program has for one of the hub's: itself where XLA compiles it."""
    if code < 0:
        return F32
    return dtype(_STAND_INS.get(DTYPES[code].name, DTYPES[code].name))
