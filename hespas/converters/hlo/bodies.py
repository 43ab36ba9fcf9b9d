"""Cost of one run of a computation (fusion, reducer, comparator, branch), and trip counts of loops.

FLOPs are the sum over the computation and nested fusions. A loop counts times its trip count, and a
conditional has the cost of its most expensive branch. A fusion reads only the parts of its operands that its
result needs. These parts are derived from the root back to the parameters, so that only the selected elements
of a table count if it is read through ``gather`` or ``slice``. If the root is a ``dynamic-update-slice`` or
``scatter`` into a parameter that may be overwritten, only the changed elements count.

The trip count is recorded by the compiler or derived from condition and body. The condition must compare
(``LT LE GT GE NE``) an element of the loop state with a constant or with an element that the loop does not
change; the element must start at a constant, and the body must add a constant to it. Views, copies,
conversions and fusions on the way are followed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import isnan, nan

from hespas.converters.hlo.attributes import backend_config, integer, names
from hespas.converters.hlo.carried import carried_results, hands_on
from hespas.converters.hlo.module import Computation, HloModule
from hespas.converters.hlo.program import HloProgram, base_opcode
from hespas.costs.operation import Body, Contraction, Cost, branch_ns
from hespas.costs.table import canonical_name
from hespas.graph import OpClass
from hespas.graph.columns import DTypeKind

__all__ = [
    "STRUCTURE",
    "UPDATING",
    "Alias",
    "Bodies",
    "BodyCost",
    "InnerNeeds",
    "LoopTrips",
    "branch_names",
    "fusion_bytes",
    "loop_trips",
]


STRUCTURE = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"})
"""Opcodes that neither compute nor move."""

_RESHAPES = frozenset({"bitcast", "reshape"})
_PICKING = frozenset({"slice", "dynamic-slice", "gather"})
UPDATING = frozenset({"dynamic-update-slice", "scatter"})
"""Opcodes that may replace a part of their first operand in place."""

_WHOLE = frozenset({"dot", "convolution", "sort", "fft", "custom-call", "while", "conditional", "scaled-dot"})
"""Operations that read all of every operand for any part of their result."""


@dataclass(frozen=True, slots=True)
class Alias:
    """Result number ``leaf`` of a fusion that equals parameter ``parameter`` except for a replaced part. If
    the buffer is updated in place, only ``read_bytes`` of the parameter are read, and only ``written_bytes``
    of the result are written.
    """

    parameter: int
    leaf: int
    read_bytes: float
    written_bytes: float


InnerNeeds = Callable[[Computation, int], tuple[float, ...]]
"""Function that returns the needed fractions of the parameters of a nested fusion."""


def _body_needs(
    program: HloProgram, computation: Computation, inner: InnerNeeds, carried: frozenset[int]
) -> tuple[float, ...]:
    """Return, for each parameter of a fusion body, the fraction (0..1) of its elements that are read to
    compute the root. The results with the indices in ``carried`` are passed on unchanged and read nothing.
    O(nodes).

    Raises ``FormatError`` if parameters are not numbered 0, 1, 2, ....
    """
    needed = [0.0] * len(computation)
    needed[computation.root] = 1.0
    for index in range(len(computation) - 1, -1, -1):
        part = needed[index] = min(needed[index], 1.0)
        if part <= 0:
            continue
        inner_needs = inner(computation, index) if computation.opcodes[index] in {"fusion", "call"} else ()
        for number, operand in enumerate(computation.operands[index]):
            if index == computation.root and number in carried:
                continue
            factor = _need(program, computation, index, number, inner_needs)
            needed[operand] += 1.0 if isnan(factor) else part * factor
    parameters = [index for index, opcode in enumerate(computation.opcodes) if opcode == "parameter"]
    needs = [-1.0] * len(parameters)
    for index in parameters:
        parameter = program.parameter_number(computation, index)
        if parameter >= len(needs) or needs[parameter] >= 0:
            raise program.error(
                computation, index, f"expected parameters numbered 0 to {len(needs) - 1}, each once"
            )
        needs[parameter] = needed[index]
    return tuple(needs)


def _need(
    program: HloProgram, computation: Computation, index: int, place: int, inner_needs: tuple[float, ...]
) -> float:
    """Return the fraction (0..1) of operand number ``place`` that an instruction reads to compute its whole
    result. Return NaN if the whole operand is read to compute any part of the result.
    """
    opcode = computation.opcodes[index]
    if hands_on(computation, index):
        return 0.0
    if opcode in _WHOLE:
        return nan
    if opcode in {"fusion", "call"}:
        return inner_needs[place] if place < len(inner_needs) else nan
    if opcode in _PICKING and place == 0:
        picked = _elements(program, computation, index)
        stored = _elements(program, computation, computation.operands[index][0])
        return 1.0 if isnan(picked) or not stored > 0 else min(picked / stored, 1.0)
    return 1.0


def _elements(program: HloProgram, computation: Computation, index: int) -> float:
    return sum(tensor.elements for tensor in program.tensors(computation.shapes[index]))


def _alias(
    program: HloProgram, computation: Computation, leaf: int, index: int, readers: list[int]
) -> Alias | None:
    """Return the parameter that a result is made from by updates and views, as an :class:`Alias`, or None.

    Other instructions may read the part of the parameter that an update replaces, with the same start, but
    nothing else: the rule of XLA for GPUs (``CanEmitFusedDynamicUpdateSliceInPlaceForGpu``).
    """
    written, read, current, last = 0.0, 0.0, index, index
    replaced: set[tuple[tuple[int, ...], int]] = set()
    while computation.opcodes[current] in UPDATING or computation.opcodes[current] in _RESHAPES:
        if (current != index and readers[current] > 1) or not computation.operands[current]:
            return None
        if computation.opcodes[current] in UPDATING:
            # Bytes an update writes, and whether it reads what was there.
            operands = computation.operands[current]
            if computation.opcodes[current] == "dynamic-update-slice":
                touched, reads_old = _bytes(program, computation, operands[1:2]), False
                replaced.add((operands[2:], computation.shapes[operands[1]]))
            else:
                first_update = max((len(operands) - 1) // 2, 1) + 1
                named = names(computation.attributes[current].get("to_apply"))
                body = program.bodies.get(named[0]) if named else None
                touched, reads_old = (
                    _bytes(program, computation, operands[first_update:]),
                    body is None or body.reads_first,
                )
            written += touched
            read += touched if reads_old else 0.0
        last, current = current, computation.operands[current][0]
    if computation.opcodes[current] != "parameter" or current == index or not written:
        return None
    for reader in range(len(computation)) if readers[current] > 1 else ():
        operands = computation.operands[reader]
        if current not in operands or reader == last:
            continue
        part = operands[1:], computation.shapes[reader]
        if computation.opcodes[reader] != "dynamic-slice" or part not in replaced:
            return None
        read += _bytes(program, computation, (reader,))
    return Alias(program.parameter_number(computation, current), leaf, read, written)


def _bytes(program: HloProgram, computation: Computation, operands: tuple[int, ...]) -> float:
    return sum(
        tensor.bytes for operand in operands for tensor in program.tensors(computation.shapes[operand])
    )


def fusion_bytes(
    program: HloProgram,
    computation: Computation,
    index: int,
    body: BodyCost,
) -> tuple[float, float]:
    """Return the bytes that the fusion at ``index`` reads from and writes to main memory. An operand that is
    passed twice counts once.

    Arrays in on-chip memory do not count, unless the fusion only moves such arrays.
    """
    away = _fusion_bytes(program, computation, index, body, program.main_bytes)
    return (
        away
        if body.flops or body.transcendentals or any(away)
        else _fusion_bytes(program, computation, index, body, program.all_bytes)
    )


def _fusion_bytes(
    program: HloProgram,
    computation: Computation,
    index: int,
    body: BodyCost,
    bytes_of: Callable[[int], tuple[float, ...]],
) -> tuple[float, float]:
    """Return the bytes that a fusion reads and writes. ``bytes_of`` returns the sizes that count for the
    arrays of a shape.
    """
    operands = computation.operands[index]
    in_place = {
        alias.leaf: alias
        for alias in body.aliases
        if alias.parameter < len(operands) and program.dies(computation, index, operands[alias.parameter])
    }
    overwritten = {alias.parameter: alias for alias in in_place.values()}
    reads: dict[int, float] = {}
    for number, operand in enumerate(operands):
        stored = sum(bytes_of(computation.shapes[operand]))
        need = body.needs[number] if number < len(body.needs) else 1.0
        part = (
            min(overwritten[number].read_bytes, stored)
            if number in overwritten
            else stored * need
            if need
            else 0.0
        )
        reads[operand] = max(reads.get(operand, 0.0), part)
    results = bytes_of(program.result_row(computation, index))
    written = sum(
        min(in_place[leaf].written_bytes, size) if leaf in in_place else size
        for leaf, size in enumerate(results)
        if leaf not in body.carried
    )
    return sum(reads.values()), written


_VIEWS = frozenset({"bitcast", "copy", "convert", "reshape", "opt-barrier"})
_MAX_STEPS = 64
"""Maximum number of instructions that are followed; real loops need fewer than ten."""

_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


@dataclass(frozen=True, slots=True)
class LoopTrips:
    """Number of iterations of a loop; NaN if unknown. ``stated`` is True if the program states the number, so
    that it need not be inferred.
    """

    count: float
    stated: bool = False


@dataclass(frozen=True, slots=True)
class _Term:
    """Integer value of a loop: an element of the loop state plus a constant. ``element`` is the index of that
    element, and ``offset`` the constant. If ``element`` is None, the value is the constant.
    """

    element: int | None
    offset: int


_Frame = tuple[Computation, "_Frame | None", tuple[int, ...]]
"""Computation and, for the body of a fusion, the caller and the operands of the call."""


class _LoopTermReader:
    """Analysis of integer values in the condition or body of a loop, to find its trip count."""

    __slots__ = ("module", "steps")

    def __init__(self, module: HloModule) -> None:
        self.module = module
        self.steps = 0

    def settle(self, frame: _Frame, index: int) -> tuple[_Frame, int] | None:
        """Follow views, and boundaries of fusions and calls, back to the instruction that computes a
        value.
        """
        while self.steps < _MAX_STEPS:
            self.steps += 1
            computation, caller, arguments = frame
            opcode = computation.opcodes[index]
            if opcode in _VIEWS and computation.operands[index]:
                index = computation.operands[index][0]
            elif opcode == "parameter" and caller is not None:
                number = integer(computation.payloads[index])
                if not 0 <= number < len(arguments):
                    return None
                frame, index = caller, arguments[number]
            elif opcode in {"fusion", "call"}:
                attributes = computation.attributes[index]
                named = names(attributes.get("calls") or attributes.get("to_apply"))
                callee = self.module.computations.get(named[0]) if named else None
                if callee is None:
                    return None
                frame, index = (callee, frame, computation.operands[index]), callee.root
            else:
                return frame, index
        return None

    def term(self, frame: _Frame, index: int) -> _Term | None:
        """Return an integer value as a :class:`_Term`; None if it is neither a constant nor an element of the
        loop state plus a constant.
        """
        settled = self.settle(frame, index)
        if settled is None:
            return None
        frame, index = settled
        computation = frame[0]
        opcode, operands = computation.opcodes[index], computation.operands[index]
        if opcode == "constant":
            try:
                return _Term(None, integer(computation.payloads[index]))
            except ValueError:
                return None
        if opcode == "parameter":
            return _Term(-1, 0)
        if opcode == "get-tuple-element" and operands:
            source = self.settle(frame, operands[0])
            is_state = source is not None and source[0][0].opcodes[source[1]] == "parameter"
            return _Term(integer(computation.attributes[index].get("index", "")), 0) if is_state else None
        if opcode not in {"add", "subtract"} or len(operands) != 2 or self.steps >= _MAX_STEPS:
            return None
        return _combined(opcode, self.term(frame, operands[0]), self.term(frame, operands[1]))


def _combined(opcode: str, left: _Term | None, right: _Term | None) -> _Term | None:
    if left is None or right is None:
        return None
    if opcode == "subtract":
        return _Term(left.element, left.offset - right.offset) if right.element is None else None
    if left.element is not None and right.element is not None:
        return None
    element = right.element if left.element is None else left.element
    return _Term(element, left.offset + right.offset)


def _counted(direction: str, start: int, limit: int, step: int) -> float:
    """Return the trips of ``for (i = start; i <direction> limit; i += step)``, NaN for an infinite loop."""
    distance = limit - start
    if direction in {"GT", "GE"}:
        direction, distance, step = _MIRRORED[direction], -distance, -step
    if direction == "NE":
        ends = step != 0 and distance % step == 0 and distance // step >= 0
        return float(distance // step) if ends else nan
    if direction == "LE":
        distance += 1
    if distance <= 0:
        return 0.0
    return float(-(-distance // step)) if step > 0 else nan


def loop_trips(
    module: HloModule, computation: Computation, index: int, condition: Computation, body: Computation
) -> LoopTrips:
    """Return the trip count of the ``while`` at ``index`` of ``computation``."""
    recorded = backend_config(computation.attributes[index]).trips
    if recorded >= 0:
        return LoopTrips(float(recorded), stated=True)
    try:
        return LoopTrips(_inferred(module, (computation, index), condition, body))
    except (ValueError, IndexError):
        return LoopTrips(nan)


def _inferred(
    module: HloModule, loop: tuple[Computation, int], condition: Computation, body: Computation
) -> float:
    reader = _LoopTermReader(module)
    settled = reader.settle((condition, None, ()), condition.root)
    if settled is None or settled[0][0].opcodes[settled[1]] != "compare":
        return nan
    frame, index = settled
    direction = frame[0].attributes[index].get("direction", "")
    left, right = (reader.term(frame, operand) for operand in frame[0].operands[index][:2])
    if left is None or right is None or direction not in _MIRRORED:
        return nan
    if left.element is None:
        left, right, direction = right, left, _MIRRORED[direction]
    if left.element is None:
        return nan
    start = _initial(module, loop, left.element)
    limit = _limit(module, loop, body, right)
    step = _step(module, body, left.element)
    if start is None or limit is None or step is None:
        return nan
    trips = _counted(direction, start + left.offset, limit, step)
    # Do not infer trips of a counter that overflows its type.
    state = module.shape_of(*loop)
    array = (state if left.element < 0 else state.element(left.element)).array
    dtype = None if array is None else array.dtype
    if dtype is None or dtype.kind not in {DTypeKind.SIGNED, DTypeKind.UNSIGNED}:
        values = range(0)
    else:
        low = -(1 << dtype.bits - 1) if dtype.kind is DTypeKind.SIGNED else 0
        values = range(low, low + (1 << dtype.bits))
    held = not isnan(trips) and all(value in values for value in (start, start + int(trips) * step))
    return trips if held else nan


def _initial(module: HloModule, loop: tuple[Computation, int], element: int) -> int | None:
    """Return the value of a loop state element before the loop; None if it is not a constant."""
    computation, index = loop
    term = _element(_LoopTermReader(module), (computation, None, ()), computation.operands[index][0], element)
    return term.offset if term is not None and term.element is None else None


def _step(module: HloModule, body: Computation, element: int) -> int | None:
    """Return the constant that the body adds to an element of the loop state, None if it changes the element
    in another way.
    """
    term = _element(_LoopTermReader(module), (body, None, ()), body.root, element)
    return term.offset if term is not None and term.element == element else None


def _limit(module: HloModule, loop: tuple[Computation, int], body: Computation, right: _Term) -> int | None:
    if right.element is None:
        return right.offset
    if _step(module, body, right.element) != 0:
        return None
    start = _initial(module, loop, right.element)
    return None if start is None else start + right.offset


def _element(reader: _LoopTermReader, frame: _Frame, index: int, element: int) -> _Term | None:
    """Return element ``element`` of a tuple value as a :class:`_Term` (-1: the value itself); None if it is
    not such a term.
    """
    if element < 0:
        return reader.term(frame, index)
    settled = reader.settle(frame, index)
    if settled is None:
        return None
    frame, index = settled
    computation = frame[0]
    if computation.opcodes[index] == "parameter":
        return _Term(element, 0)
    if computation.opcodes[index] != "tuple" or element >= len(computation.operands[index]):
        return None
    return reader.term(frame, computation.operands[index][element])


_CALLERS = frozenset({"fusion", "call", "async-start", "fusion-start", "call-start"})


@dataclass(frozen=True, slots=True)
class BodyCost:
    """Cost of one execution of a computation.

    ``needs`` has the fraction of each parameter that is read. ``moved_bytes`` and ``about_ns`` are the memory
    traffic and the time if each operation were a kernel of its own; they are used only to compare branches.
    ``unknown`` lists operations with unknown arithmetic, and ``collectives`` the communicating operations, as
    (computation, instruction). ``rate_dtype`` is the type of most of the arithmetic. ``carried`` has the
    indices of results that a fusion around a collective passes on unchanged (:mod:`.carried`).
    """

    flops: float = 0.0
    useful_flops: float = 0.0
    transcendentals: float = 0.0
    moved_bytes: float = 0.0
    about_ns: float = 0.0
    rate_dtype: int = -1
    contractions: tuple[Contraction, ...] = ()
    contraction_class: OpClass | None = None
    needs: tuple[float, ...] = ()
    aliases: tuple[Alias, ...] = ()
    unknown: tuple[tuple[Computation, int], ...] = ()
    collectives: tuple[tuple[Computation, int], ...] = ()
    carried: frozenset[int] = frozenset()


_EMPTY = BodyCost()


def branch_names(computation: Computation, index: int) -> tuple[str, ...]:
    """Return the branches of a ``conditional``. In the form with a predicate the true branch comes first."""
    attributes = computation.attributes[index]
    if "branch_computations" in attributes:
        return names(attributes["branch_computations"])
    return (*names(attributes.get("true_computation")), *names(attributes.get("false_computation")))


def _scaled(body: BodyCost, times: float) -> BodyCost:
    """Return the cost of running a computation ``times`` times (NaN: unknown). Each matmul is scaled by
    multiplying its batch. With an unknown number of runs the cost has no matmuls.
    """
    if times == 1.0:
        return body
    contractions = () if isnan(times) else body.contractions
    return replace(
        body,
        flops=body.flops * times,
        useful_flops=body.useful_flops * times,
        transcendentals=body.transcendentals * times,
        moved_bytes=body.moved_bytes * times,
        about_ns=body.about_ns * (1.0 if isnan(times) else times),
        contractions=tuple(
            replace(
                part,
                batch=part.batch * int(times) if part.batch > 0 else part.batch,
                flops=part.flops * times,
                useful_flops=part.useful_flops * times,
            )
            for part in contractions
        ),
    )


@dataclass(slots=True)
class _BodyTotals:
    """Accumulator that sums the costs of the instructions of a computation. ``rates`` has the FLOPs by
    element type.
    """

    flops: float = 0.0
    useful_flops: float = 0.0
    transcendentals: float = 0.0
    moved_bytes: float = 0.0
    about_ns: float = 0.0
    rates: dict[int, float] = field(default_factory=dict[int, float])
    contractions: list[Contraction] = field(default_factory=list[Contraction])
    contraction_class: OpClass | None = None
    unknown: dict[tuple[Computation, int], None] = field(default_factory=dict[tuple[Computation, int], None])
    collectives: list[tuple[Computation, int]] = field(default_factory=list[tuple[Computation, int]])

    def add(self, part: Cost | BodyCost) -> None:
        """Add the costs that operations and called computations have in common: arithmetic and
        contractions.
        """
        self.flops += part.flops
        self.useful_flops += part.useful_flops
        self.transcendentals += part.transcendentals
        self.contractions += part.contractions
        if part.rate_dtype >= 0:
            weight = part.flops + part.transcendentals
            self.rates[part.rate_dtype] = self.rates.get(part.rate_dtype, 0.0) + weight

    def add_body(self, body: BodyCost) -> None:
        """Add the cost of a called computation."""
        self.add(body)
        self.moved_bytes += body.moved_bytes
        self.about_ns += body.about_ns
        self.unknown.update(dict.fromkeys(body.unknown))
        self.collectives += body.collectives
        self.contraction_class = self.contraction_class or body.contraction_class

    def rate_dtype(self) -> int:
        """Return the operand type of the largest contraction; without contractions, the type of most of the
        arithmetic.
        """
        if self.contractions:
            return max(self.contractions, key=lambda part: part.flops).lhs
        return max(self.rates, key=lambda code: self.rates[code], default=-1)


class Bodies:
    """Costs of the computations of a module by name. Call :meth:`add` for each computation, callees first."""

    def __init__(self, program: HloProgram) -> None:
        """Start without costs."""
        self.program = program
        self.costs: dict[str, BodyCost] = {}

    def add(self, computation: Computation) -> None:
        """Compute the cost of one computation. O(instructions)."""
        total = _BodyTotals()
        for index, opcode in enumerate(computation.opcodes):
            if opcode not in STRUCTURE:
                self._add_instruction(total, computation, index)
        carried = carried_results(self.program, computation) if total.collectives else frozenset[int]()
        needs = _body_needs(
            self.program, computation, lambda caller, at: self.callee(caller, at).needs, carried
        )
        # Find results that are a parameter with parts replaced; the parameter has no other reader.
        body_aliases: list[Alias] = []
        if any(opcode in UPDATING for opcode in computation.opcodes):
            root = computation.root
            leaves = computation.operands[root] if computation.opcodes[root] == "tuple" else (root,)
            readers = [0] * len(computation)
            for operands in computation.operands:
                for operand in operands:
                    readers[operand] += 1
            alias_of: dict[int, Alias | None] = {}
            for leaf, index in enumerate(leaves):
                if index not in alias_of:
                    alias_of[index] = _alias(self.program, computation, leaf, index, readers)
            aliases = ((leaf, alias_of[index]) for leaf, index in enumerate(leaves))
            body_aliases = [replace(alias, leaf=leaf) for leaf, alias in aliases if alias is not None]
        body = BodyCost(
            total.flops,
            total.useful_flops,
            total.transcendentals,
            total.moved_bytes,
            total.about_ns,
            total.rate_dtype(),
            tuple(total.contractions),
            total.contraction_class,
            needs,
            tuple(body_aliases),
            tuple(total.unknown),
            tuple(total.collectives),
            carried,
        )
        self.costs[computation.name] = body
        work = [opcode for opcode in computation.opcodes if opcode not in STRUCTURE]
        name = canonical_name(work[0]) if len(work) == 1 else "custom" if work else ""
        reads_first = not needs or needs[0] > 0
        self.program.bodies[computation.name] = Body(body.flops, body.transcendentals, name, reads_first)

    def callee(self, computation: Computation, index: int) -> BodyCost:
        """Return the cost of the computation of a fusion or call. Raises ``FormatError`` if it names none."""
        key = "to_apply" if "to_apply" in computation.attributes[index] else "calls"
        return self.costs.get(self.program.callee(computation, index, key).name, _EMPTY)

    def _add_instruction(self, total: _BodyTotals, computation: Computation, index: int) -> None:
        opcode = computation.opcodes[index]
        if base_opcode(opcode)[1] in {"-done", "-update"}:
            return
        if opcode in _CALLERS:
            total.add_body(self.callee(computation, index))
        elif opcode == "while":
            condition = self.program.callee(computation, index, "condition")
            body = self.program.callee(computation, index, "body")
            trips = loop_trips(self.program.module, computation, index, condition, body).count
            total.add_body(_scaled(self.costs.get(body.name, _EMPTY), trips))
        elif opcode == "conditional":
            branches = [self.costs.get(name, _EMPTY) for name in branch_names(computation, index)]
            total.add_body(max(branches, key=lambda branch: branch.about_ns, default=_EMPTY))
        else:
            cost = self.program.cost(computation, index, in_place=True)
            total.add(cost)
            total.moved_bytes += cost.bytes_read + cost.bytes_written
            total.about_ns += branch_ns(cost)
            if isnan(cost.flops):
                total.unknown[computation, index] = None
            if cost.op_class is OpClass.COLLECTIVE:
                total.collectives.append((computation, index))
            elif cost.contractions:
                total.contraction_class = total.contraction_class or cost.op_class
