"""Building blocks of a replay: the writer of operations, the binding of operands, and the nodes with their
types.

``ReplayEmitter.flops`` and ``ReplayEmitter.transcendentals`` count the written operations as XLA's HLO cost
analysis does. The difference from the node's costs is the work that still has to be added.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import isnan, prod
from typing import NamedTuple

from hespas.files.limits import limits
from hespas.graph import DTYPES, DType, DTypeKind, OpGraph
from hespas.graph.columns import dtype
from hespas.graph.errors import UnsupportedError
from hespas.graph.quantised import parse_quantised
from hespas.programs.operations import broadcast_axes
from hespas.programs.text import Tensor, Value, pretty, reduction

__all__ = [
    "F32",
    "MatmulShape",
    "OperandBinder",
    "Recipe",
    "ReplayEmitter",
    "ReplayNode",
    "ReplayTypes",
    "quoted_text",
    "supported_dtype",
    "too_large",
]

F32 = dtype("f32")
_SEEDS = 1024
_NAME = re.compile(r"%\w+(?:#\d+)?")
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|->|(?P<open>[({\[<])|(?P<shut>[)}\]>])|(?P<types> : )')
"""Parts of an operation's text: brackets, and the colon before its types, which is outside of brackets."""


def too_large(what: str, position: str | None = None) -> UnsupportedError:
    """Return the error for a graph that is too large for a replay; ``what`` describes the excess."""
    return UnsupportedError(
        f"a StableHLO replay of it has {what}",
        position=position,
        hint="merge operations with `granularity=region`, or choose another format",
    )


def quoted_text(text: str) -> str:
    """Return a text as an MLIR string literal, with escapes for bytes that are not printable."""
    encoded = text.encode("utf-8", "surrogatepass")
    plain = (chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:02X}" for byte in encoded)
    return f'"{"".join(plain)}"'


class ReplayEmitter:
    """Writer of the body of ``@main``, line by line.

    ``location`` is appended to each operation. ``unknown_work`` is the name of an operation of unknown FLOPs.
    The next copy is marked with that name. XLA merges equal operations even if their locations differ, so
    :meth:`add` never writes the same operation twice.
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
        """Mark the next copy as an operation of unknown FLOPs with that name; None removes the mark."""
        self.unknown_work = name

    def argument(self, tensor: Tensor) -> Value:
        """Add an argument to the function and return its value."""
        self.arguments.append(tensor)
        return self._known(Value(f"%arg{len(self.arguments) - 1}", tensor))

    def alias(self, prefix: str, attribute: str) -> str:
        """Return an alias such as ``#groups0`` for an attribute, which is then written once for the whole
        module.
        """
        return self.aliases.setdefault(attribute, f"#{prefix}{len(self.aliases)}")

    def add(self, text: str, result: Tensor) -> Value:
        """Add an operation with one result. ``text`` is the MLIR text after ``=``.

        If an equal operation exists already, one element of an operand is changed first, so that XLA does not
        merge the two.
        """
        text = self._unlike(text)
        value = self._known(Value(f"%{self._next}", result))
        self._next += 1
        self._written[text] = value
        self._line(f"    {value} = {text}{self.location}")
        return value

    def add_many(self, text: str, results: Sequence[Tensor]) -> list[Value]:
        """Add one operation with several results."""
        text = self._unlike(text)
        name = f"%{self._next}"
        self._next += 1
        values = [self._known(Value(f"{name}#{position}", result)) for position, result in enumerate(results)]
        self._written[text] = values[0]
        self._line(f"    {name}:{len(results)} = {text}{self.location}")
        return values

    def find_line(self, first: int, op: str) -> int:
        """Return the last line from line ``first`` on that is an operation called ``op``, -1 without one."""
        pattern = re.compile(rf'\s*%\S+ = "?stablehlo\.{re.escape(op)}\b')
        own = range(len(self.lines) - 1, first - 1, -1)
        return next((line for line in own if pattern.match(self.lines[line])), -1)

    def annotate(self, line: int, attributes: Mapping[str, str]) -> None:
        """Add attributes to the operation in a line that was written for the current node."""
        text = self.lines[line].removesuffix(self.location)
        position, depth = -1, 0
        for match in _BRACKETS.finditer(text):
            depth += {"open": 1, "shut": -1}.get(match.lastgroup or "", 0)
            if depth == 0 and match.lastgroup == "types":
                position = match.start()
        listed = ", ".join(f"{name} = {value}" for name, value in attributes.items())
        head, types = text[:position], text[position:]
        head = f"{head[:-1]}, {listed}}}" if head.endswith("}") else f"{head} {{{listed}}}"
        self.lines[line] = f"{head}{types}{self.location}"

    def share(self, text: str, result: Tensor, *, flops: float = 0.0) -> Value:
        """Return the result of an earlier equal operation, or add the operation. Use it for operations such
        as views, which are not part of a node's work.
        """
        if text not in self._written:
            self.work(flops=flops)
            return self.add(text, result)
        return self._written[text]

    def _line(self, line: str) -> None:
        """Add a line. Raises ``UnsupportedError`` for a program larger than any that XLA compiles."""
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
        """Return ``text`` if no earlier operation equals it, else the same operation with one element of an
        operand changed.
        """
        if text not in self._written:
            return text
        named = (self._values.get(name) for name in dict.fromkeys(_NAME.findall(text)))
        able = [value for value in named if value is not None and value.type.elements]
        if not able:
            return text
        old = min(able, key=lambda value: value.type.size_bytes)
        new = self.put(old, self.seed())
        return _NAME.sub(lambda name: new.name if name[0] == old.name else name[0], text)

    def work(self, *, flops: float = 0.0, transcendentals: float = 0.0) -> None:
        """Add to the counts of FLOPs and transcendentals, for the operations just written."""
        self.flops += flops
        self.transcendentals += transcendentals

    def seed(self) -> Value:
        """Return a scalar that a compiler cannot prove equal to another value. It makes equal operations
        differ, so that none is removed as a duplicate.
        """
        position = self._seeds % _SEEDS
        if self._seed_argument is None or position == 0:
            self._seed_argument = self.argument(Tensor(F32, (_SEEDS,)))
        self._seeds += 1
        one = Tensor(F32, (1,))
        text = pretty("slice", [self._seed_argument], one, f" [{position}:{position + 1}]")
        return self.reshape(self.share(text, one), ())

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """Reshape a value."""
        result = value.type.reshaped(shape)
        if result == value.type:
            return value
        return self.share(pretty("reshape", [value], result), result)

    def front(self, value: Value, shape: Sequence[int]) -> Value:
        """Return the leading part of a value, cut to the extents ``shape``."""
        result = value.type.reshaped(shape)
        if result == value.type:
            return value
        ranges = ", ".join(f"0:{extent}" for extent in shape)
        return self.share(pretty("slice", [value], result, f" [{ranges}]"), result)

    def stretched(self, value: Value, shape: Sequence[int], *, shared: bool = True) -> Value:
        """Return a tensor of ``shape`` that repeats the elements of ``value``. The size of ``shape`` must be
        a multiple of the size of ``value``.

        With ``shared``, return the result of an earlier equal operation if there is one.
        """
        axes, result = broadcast_axes(value.type.shape, shape), value.type.reshaped(shape)
        if axes is None:
            axes, value = [1], self.reshape(value, (value.type.elements,))
            result = value.type.reshaped((prod(shape) // value.type.elements, value.type.elements))
        text = pretty("broadcast_in_dim", [value], result, f", dims = {axes}")
        return self.reshape(self.share(text, result) if shared else self.add(text, result), shape)

    def first(self, value: Value) -> Value:
        """Return the first element of a value as a scalar."""
        return self.reshape(self.front(value, (1,) * len(value.type.shape)), ())

    def converted(self, value: Value, element: DType) -> Value:
        """Convert a value to another element type."""
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
        """Add an operation with one operand; the result has its type."""
        return self.add(f"stablehlo.{op} {value} : {value.type}", value.type)

    def binary(self, op: str, left: Value, right: Value) -> Value:
        """Add an operation with two operands of one type; the result has that type."""
        return self.add(f"stablehlo.{op} {left}, {right} : {left.type}", left.type)

    def put(self, target: Value, number: Value) -> Value:
        """Return ``target`` with one element replaced by ``number``, so that the result depends on
        ``number``. The update is in place if possible.

        ``number`` is a scalar of any type. A target without elements is returned unchanged.
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
        """Return ``target`` with its leading part replaced by ``update``."""
        positions = [Value("%zero", Tensor(dtype("i32"), ()))] * target.type.rank
        text = pretty("dynamic_update_slice", [target, update, *positions], target.type)
        return self.share(text, target.type)

    def largest(self, value: Value) -> Value:
        """Return the largest element of a real, non-empty value: a scalar that depends on all elements."""
        count = value.type.elements
        flat = self.reshape(value, (count,))
        if count == 1:
            return self.reshape(flat, ())
        scalar = value.type.scalar
        start = self.reshape(self.front(flat, (1,)), ())
        return self.share(reduction("maximum", flat, start, [0], scalar), scalar, flops=count - 1)

    def joined(self, scalars: Iterable[Value], element: DType) -> Value:
        """Return one scalar that depends on all ``scalars``."""
        parts = [self.converted(scalar, element) for scalar in scalars]
        if len(parts) == 1:
            return parts[0]
        ones = [self.reshape(part, (1,)) for part in parts]
        row = Tensor(element, (len(ones),))
        return self.largest(self.share(pretty("concatenate", ones, row, ", dim = 0"), row))


class MatmulShape(NamedTuple):
    """Batched matmul ``batch x (m x k by k x n)``. ``lhs`` and ``rhs`` are codes of element types (-1:
    unknown).
    """

    batch: int
    m: int
    n: int
    k: int
    lhs: int
    rhs: int

    @property
    def flops(self) -> float:
        """Return the number of multiplications and additions."""
        return 2.0 * self.batch * self.m * self.n * self.k


class ReplayNode(NamedTuple):
    """Graph node to replay. ``op`` is its operation without dialect; unknown costs are NaN.

    ``producers`` has, for each node that this one waits for, the values of that node in the replay.
    """

    op: str
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    producers: Sequence[Sequence[Value]]
    contractions: tuple[MatmulShape, ...]
    flops: float
    useful_flops: float
    transcendentals: float
    bytes_moved: float
    binder: OperandBinder

    @property
    def emitter(self) -> ReplayEmitter:
        """Return the writer of the node's operations."""
        return self.binder.emitter

    @property
    def target_flops(self) -> float:
        """FLOPs that XLA must count in the replay. If they are known, multiplications with padding and
        dilation zeros are excluded.
        """
        return self.flops if isnan(self.useful_flops) else self.useful_flops

    @property
    def result(self) -> Tensor | None:
        """Return the type of the only result; None if there are several."""
        return self.results[0] if len(self.results) == 1 else None

    def bound(self, wanted: Sequence[Tensor] | None = None, *, stretch: bool = False) -> list[Value]:
        """Return operand values that together depend on all producers of the node. They have the node's
        operand types, or the ``wanted`` types.
        """
        tensors = self.operands if wanted is None else wanted
        return self.binder.bind(self.op, self.producers, tensors, stretch=stretch)


Recipe = Callable[[ReplayNode], "list[Value] | None"]
"""Function that emits a node and returns its results; None, without output, if the types do not fit."""

_MatchKey = Callable[[Tensor], Hashable]
"""Property that results and operands must have in common."""

_FEW = 16
"""Number of operands up to which operands may be repeated copies of smaller results."""

_POOL = 16
"""Number of arguments of one type before an element makes twins differ."""


class OperandBinder:
    """Selection of operands so that an operation depends on its producers through data. Compilers may not
    reorder such operations.

    A producer's result becomes an operand if it has the same type, possibly after a reshape. Otherwise one
    element of the result is written into another operand. XLA removes barriers, duplicate operations and dead
    code, but it preserves such writes. ``whole`` has the names of values whose elements are all used.
    """

    def __init__(self, emitter: ReplayEmitter) -> None:
        self.emitter = emitter
        self.whole: set[str] = set()
        self._pools: dict[Tensor, list[Value]] = {}
        self._wide: set[str] = set()
        self._origins: dict[str, str] = {}
        self._twins: dict[tuple[object, ...], int] = {}

    def filler(self, tensor: Tensor, position: int = 0) -> Value:
        """Return an argument of the program with the type ``tensor``, for an operand without a producer.
        Different positions give different arguments.
        """
        pool = self._pools.setdefault(tensor, [])
        while len(pool) <= position:
            pool.append(self.emitter.argument(tensor))
        return pool[position]

    def bind(
        self,
        op: str,
        producers: Sequence[Sequence[Value]],
        wanted: Sequence[Tensor],
        *,
        stretch: bool = False,
    ) -> list[Value]:
        """Return operands of the ``wanted`` types that together depend on every producer.

        Two operations with the same ``op`` never get the same operands. Operations with different ``op`` get
        different operands if there is a choice. With ``stretch`` smaller results are repeated to the size of
        some operands, but not of all, because XLA removes arithmetic on copies of one number. ``wanted`` must
        not be empty if there are producers.
        """
        slots: list[Value | None] = [None] * len(wanted)
        waiting = [producer for producer in producers if producer]
        keys: tuple[_MatchKey, ...] = (
            lambda tensor: tensor,
            lambda tensor: (tensor.element.code, tensor.elements),  # types that differ only in shape
        )
        for key in keys:
            free: dict[Hashable, list[int]] = {}  # unfilled positions by key, the first last
            for position in reversed(range(len(wanted))):
                if slots[position] is None:
                    free.setdefault(key(wanted[position]), []).append(position)
            waiting = [
                producer for producer in waiting if not self._place(producer, slots, wanted, (free, key))
            ]
        if stretch and len(wanted) <= _FEW:
            waiting = [producer for producer in waiting if not self._stretch(producer, slots, wanted)]
        given = tuple(slot.name if slot else None for slot in slots)
        twin_key = (op if None not in given else "", given, tuple(wanted))
        # Names do not distinguish operations, since many are written alike. If all operands are given,
        # ReplayEmitter.add makes operations of other names differ.
        number = self._twins.get(twin_key, 0)
        self._twins[twin_key] = number + 1
        num_fillers = Counter[Tensor]()
        bound: list[Value] = []
        for slot, tensor in zip(slots, wanted, strict=True):
            bound.append(slot or self.filler(tensor, num_fillers[tensor] + min(number, _POOL)))
            num_fillers[tensor] += slot is None
        late = [
            self.emitter.first(_smallest(producer))
            for producer in waiting
            if _smallest(producer).type.elements
        ]
        needs_seed = number >= _POOL or (number > 0 and None not in slots)
        if needs_seed:
            late.append(self.emitter.seed())
        # The cheapest operand waits for the rest: an argument before a result.
        able = [position for position, value in enumerate(bound) if value.type.elements]
        if not late or not able:
            return bound
        position = min(
            able, key=lambda position: (slots[position] is not None, bound[position].type.size_bytes)
        )
        tied = self.tie(bound[position], late)
        if bound[position].name in self._origins:
            self._origins[tied.name] = self._origins[bound[position].name]
        bound[position] = tied
        return bound

    def tie(self, value: Value, scalars: Sequence[Value]) -> Value:
        """Make ``value`` depend on ``scalars``; return the new value."""
        if not scalars:
            return value
        kinds = {scalar.type for scalar in scalars}
        alike = len(kinds) == 1 and not (scalars[0].type.is_bool or scalars[0].type.is_complex)
        element = scalars[0].type.element if alike else F32
        return self.emitter.put(value, self.emitter.joined(scalars, element))

    def release(self, values: Sequence[Value]) -> list[Value]:
        """Record that not all elements of the operands ``values`` are used. Return one element of each
        operand that comes from a producer. An operation on this element preserves the dependency.
        """
        made = [value for value in values if value.name in self._origins]
        self.whole.difference_update(self._origins[value.name] for value in made)
        return [self.emitter.first(value) for value in made if value.type.elements]

    def _place(
        self,
        producer: Sequence[Value],
        slots: list[Value | None],
        wanted: Sequence[Tensor],
        positions: tuple[dict[Hashable, list[int]], _MatchKey],
    ) -> bool:
        """Use results of one producer as operands in free ``slots`` of the same type and size; return True if
        any fits.
        """
        free, key = positions
        fits = False
        for value in producer:
            fitting = free.get(key(value.type))
            if fitting:
                position = fitting.pop()
                slots[position] = self._taken(value, self.emitter.reshape(value, wanted[position].shape))
                fits = True
        return fits

    def _stretch(
        self, producer: Sequence[Value], slots: list[Value | None], wanted: Sequence[Tensor]
    ) -> bool:
        """Repeat one smaller result of a producer to the size of an operand. At least one other operand must
        stay without repetition. Return True if this was possible.
        """
        if slots.count(None) < 2 and all(slot is None or slot.name in self._wide for slot in slots):
            return False
        for value in producer:
            for position, tensor in enumerate(wanted):
                made = value.type
                is_multiple = made.elements > 0 and tensor.elements % made.elements == 0
                is_larger = made.element is tensor.element and tensor.elements > made.elements
                if slots[position] is None and is_multiple and is_larger:
                    wide = self._taken(value, self.emitter.stretched(value, tensor.shape))
                    self._wide.add(wide.name)
                    slots[position] = wide
                    return True
        return False

    def _taken(self, value: Value, adapted: Value) -> Value:
        """Record that ``adapted``, which was made from ``value``, uses all of its elements. Return
        ``adapted``.
        """
        self.whole.add(value.name)
        self._origins[adapted.name] = value.name
        return adapted


def _smallest(producer: Sequence[Value]) -> Value:
    return min(producer, key=lambda value: (not value.type.elements, value.type.size_bytes))


_LARGEST = 1 << 48
"""Largest number of elements of a tensor that a machine can hold."""

_DTYPE_REPLACEMENTS: dict[str, str] = {
    "tf32": "f32",
    "f6E2M3FN": "f8E4M3FN",
    "f6E3M2FN": "f8E4M3FN",
    "mxfp8": "f8E4M3FN",
    "mxfp6": "f8E4M3FN",
    "mxfp4": "f4E2M1FN",
    "mxint8": "i8",
    "nvfp4": "f4E2M1FN",
    "i3": "i4",
    "ui3": "ui4",
    **dict.fromkeys(("i5", "i6", "i7"), "i8"),
    **dict.fromkeys(("ui5", "ui6", "ui7"), "ui8"),
}
"""Replacements of types that StableHLO lacks, and of 6-bit types, which XLA:CPU does not compile."""

_VALUELESS = {DTypeKind.TOKEN, DTypeKind.OPAQUE}


class ReplayTypes:
    """Tensor types of a graph by row. Types that StableHLO cannot express are replaced by others. ``changed``
    counts the uses of replaced types.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.changed: Counter[str] = Counter()
        self._graph = graph
        self._rows: dict[int, tuple[Tensor | None, tuple[str, ...]]] = {}

    def of(self, rows: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the types in the given rows; tokens are left out. Raises ``UnsupportedError`` for a type
        that is larger than any memory.
        """
        tensors: list[Tensor] = []
        for row in rows:
            if row not in self._rows:
                self._rows[row] = self._tensor(row)
            tensor, changes = self._rows[row]
            self.changed.update(changes)
            if tensor is not None:
                tensors.append(tensor)
        return tuple(tensors)

    def _tensor(self, row: int) -> tuple[Tensor | None, tuple[str, ...]]:
        types = self._graph.types
        changes: list[str] = []
        code = int(types.dtype[row])
        element = supported_dtype(code)
        if code < 0:
            changes.append("unknown element types, taken as f32")
        elif element.code != code:
            changes.append(f"{DTYPES[code].name}, taken as {element.name}")
        if element.kind in _VALUELESS:
            return None, ("tokens",)
        extents = types.shape(row)
        if any(extent < 0 for extent in extents):
            changes.append("extents known at run time only, taken as 1")
        encoding = self._graph.strings[int(types.encoding[row])]
        if encoding and parse_quantised(encoding) is None:  # quantised types are stated by annotations
            changes.append("layouts and encodings")
        tensor = Tensor(element, tuple(extent if extent >= 0 else 1 for extent in extents))
        if tensor.elements > _LARGEST:
            raise UnsupportedError(
                f"a tensor of {tensor.elements:,} elements", position=str(tensor), hint="correct the shape"
            )
        return tensor, tuple(changes)


def supported_dtype(code: int) -> DType:
    """Return the element type that a replay uses for a type of the graph: the same if XLA compiles it, else a
    similar one.
    """
    if code < 0:
        return F32
    return dtype(_DTYPE_REPLACEMENTS.get(DTYPES[code].name, DTYPES[code].name))
