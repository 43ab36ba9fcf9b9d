"""Shape inference of what holds others or leaves the device: tuples, calls, collectives, messages, copies and
their asynchronous halves. Rules as in :mod:`~hespas.converters.hlo.inference`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hespas.converters.hlo.attributes import Mesh, header_meshes, integer, is_true, names, parse_groups
from hespas.converters.hlo.inference import (
    ARRAY_RULES,
    ELEMENTWISE,
    Callee,
    Rule,
    TypedInstruction,
    array_of,
    check,
    one_or_tuple,
    same_extents,
    tuple_of,
    with_dims,
)
from hespas.converters.hlo.inference_moves import MOVING_RULES
from hespas.converters.hlo.module import ArrayShape, Computation, Shape, parse_shape, shown_shape
from hespas.converters.hlo.program import HloProgram, base_opcode
from hespas.converters.replica_groups import MAX_DEVICES, IdMode, group_mode
from hespas.costs.table import canonical_name
from hespas.graph import DYNAMIC, find_dtype
from hespas.graph.errors import UnsupportedError

__all__ = ["Inference", "check_shapes"]

_TOKEN = Shape(ArrayShape(find_dtype("token"), "token", ()))
_U32 = Shape(ArrayShape(find_dtype("u32"), "u32", ()))


def _first(op: TypedInstruction) -> Shape:
    return op.operands[0]


# --- tuples and calls ---


def _tuple(op: TypedInstruction) -> Shape:
    return tuple_of(op.operands)


def _element(op: TypedInstruction) -> Shape:
    if "index" not in op.attributes:
        raise ValueError("expected an attribute index")
    number = op.number("index", -1)
    elements = op.operands[0].elements
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


def _call(op: TypedInstruction) -> Shape:
    key = "to_apply" if "to_apply" in op.attributes else "calls"
    callee = op.callee(key)
    _check_arguments(callee, op.operands, "the computation")
    return callee.result


def _fusion(op: TypedInstruction) -> Shape:
    callee = op.callee("calls")
    _check_arguments(callee, op.operands, "the computation", all_used=False)
    return callee.result


def _while(op: TypedInstruction) -> Shape:
    state = op.operands[:1]
    body, condition = op.callee("body"), op.callee("condition")
    _check_arguments(body, state, "the body")
    _check_arguments(condition, state, "the condition")
    scalar = condition.result.array is not None and not condition.result.array.dims
    check(scalar, "a condition that makes one truth value", condition.result)
    return body.result


def _conditional(op: TypedInstruction) -> Shape:
    check(not op.array(0).dims, "a scalar to branch on", op.operands[0])
    keys = [("branch_computations", place) for place in range(len(op.operands) - 1)]
    if "branch_computations" not in op.attributes:
        keys = [("true_computation", 0), ("false_computation", 0)]
    if len(keys) != len(op.operands) - 1:
        raise ValueError(f"expected an operand for each of {len(keys)} branches")
    branches = [op.callee(key, place) for key, place in keys]
    for place, branch in enumerate(branches):
        _check_arguments(branch, op.operands[place + 1 : place + 2], f"branch {place}")
        fits = _fits(branches[0], -1, branches[0].result, branch.result)
        check(fits, "branches that make the same", branches[0].result, branch.result)
    return branches[0].result


# --- between devices ---


def _gathered(op: TypedInstruction, *, start: bool = False) -> Shape:
    """Operands joined along one dimension, as often as devices talk to one another."""
    result = op.stated()
    whole = result.element(1) if start and result.elements and len(result.elements) > 1 else result
    sharded = _shards(op, whole, joins=True)
    if sharded is None:
        return result
    along, shards = sharded
    joined: list[Shape] = []
    for place in range(len(op.operands)):
        array = op.array(place)
        check(along < len(array.dims), f"a dimension {along}", array)
        joined.append(_scaled(array, along, array.dims[along] * shards))
    return _started(op, one_or_tuple(joined)) if start else one_or_tuple(joined)


def _shards(op: TypedInstruction, made: Shape, *, joins: bool) -> tuple[int, int] | None:
    """Along which dimension operands are joined or cut, and how many shards there are, one of each device;
    None where an extent is known at run time only.
    """
    parts = [made] if len(op.operands) == 1 else list(made.elements or ())
    if len(parts) != len(op.operands):
        raise ValueError(f"expected {len(op.operands)} results, found {shown_shape(op.stated())}")
    along = op.dimension("dimensions", len(op.array(0).dims))
    given, found = op.array(0).dims, array_of(parts[0], "the result").dims
    check(len(found) == len(given), "equally many dimensions", op.operands[0], parts[0])
    if DYNAMIC in (given[along], found[along]):
        return None
    part, whole = (given[along], found[along]) if joins else (found[along], given[along])
    shards = -(-whole // part) if part else max(op.group_size, 1)
    expected = f"{op.group_size} shards along dimension {along}, one {'of' if joins else 'for'} each device"
    check(op.group_size in (1, shards), expected, op.operands[0], parts[0])
    return along, shards


def _scaled(array: ArrayShape, along: int, extent: int) -> Shape:
    dims = [*array.dims]
    dims[along] = DYNAMIC if dims[along] == DYNAMIC else extent
    return with_dims(array, dims)


def _started(op: TypedInstruction, made: Shape) -> Shape:
    """What the start of a collective makes: operands, results, and whatever the backend keeps."""
    result = op.stated()
    elements = result.elements
    if not elements:  # as text of older versions has it
        return made
    wrapped = len(op.operands) == 1 and elements[0].elements is not None
    given = tuple_of(op.operands) if wrapped else one_or_tuple(op.operands)
    return tuple_of((given, made, *elements[2:]))


def _all_gather_start(op: TypedInstruction) -> Shape:
    return _gathered(op, start=True)


def _reduce_scatter(op: TypedInstruction) -> Shape:
    """One shard of each operand."""
    result = op.stated()
    sharded = _shards(op, result, joins=False)
    if sharded is None:
        return result
    along, shards = sharded
    cut: list[Shape] = []
    for place in range(len(op.operands)):
        array = op.array(place)
        check(along < len(array.dims), f"a dimension {along}", array)
        fits = shards > 0 and (array.dims[along] == DYNAMIC or array.dims[along] % shards == 0)
        check(fits, f"{shards} equal shards along dimension {along}", array)
        cut.append(_scaled(array, along, array.dims[along] // max(shards, 1)))
    return one_or_tuple(cut)


def _each(op: TypedInstruction) -> Shape:
    """Every operand's own shape."""
    return one_or_tuple(op.operands)


def _all_to_all(op: TypedInstruction) -> Shape:
    first = op.array(0)
    if "dimensions" in op.attributes:
        along = op.dimension("dimensions", len(first.dims))
        fits = first.dims[along] == DYNAMIC or first.dims[along] % max(op.group_size, 1) == 0
        check(fits, f"{op.group_size} equal parts along dimension {along}", first)
        return one_or_tuple(op.operands)
    for place in range(1, len(op.operands)):
        check(same_extents(op.operands[0], op.operands[place]), "operands alike", *op.operands[:2])
    if op.group_size > 1 and len(op.operands) != op.group_size:
        raise ValueError(f"expected {op.group_size} operands, one per device, found {len(op.operands)}")
    result = op.stated()
    return op.operands[0] if result.elements is None else tuple_of(op.operands)


def _ragged_all_to_all(op: TypedInstruction) -> Shape:
    if len(op.operands) != 6:
        raise ValueError(f"expected 6 operands, found {len(op.operands)}")
    for place in (3, 4, 5):
        fits = same_extents(op.operands[2], op.operands[place])
        check(fits, "offsets and sizes alike", op.operands[2], op.operands[place])
    return op.operands[1]


def _in_place(op: TypedInstruction) -> bool:
    """Whether a permutation is written into a buffer it is given, at given offsets."""
    offsets = op.operands[2].elements if len(op.operands) == 4 else None
    return offsets is not None


def _permuted(op: TypedInstruction) -> Shape:
    return op.operands[1] if _in_place(op) else one_or_tuple(op.operands)


def _permute_start(op: TypedInstruction) -> Shape:
    stated = op.result.elements if op.result is not None and op.result.elements else ()
    if _in_place(op):
        return tuple_of((*op.operands[:2], *stated[2:]))
    return _started(op, one_or_tuple(op.operands))


def _finished(op: TypedInstruction) -> Shape:
    """The results that a start promised."""
    elements = op.operands[0].elements
    if elements is None or len(elements) < 2:
        raise ValueError(f"expected what a start makes, found {shown_shape(op.operands[0])}")
    return elements[1]


def _copy_start(op: TypedInstruction) -> Shape:
    return tuple_of((op.operands[0], op.operands[0], _U32))


def _copy_done(op: TypedInstruction) -> Shape:
    made = _finished(op)
    first = op.operands[0].element(0)
    check(same_extents(first, made), "a copy like its source", first, made)
    return first


def _handle(op: TypedInstruction) -> Shape:
    """The number by which a backend knows a message, of whatever type."""
    elements = op.stated().elements
    handle = elements[1] if elements is not None and len(elements) > 1 else _U32
    return handle if handle.array is not None and not handle.array.dims else _U32


def _send(op: TypedInstruction) -> Shape:
    return tuple_of((op.operands[0], _handle(op), _TOKEN))


def _recv(op: TypedInstruction) -> Shape:
    elements = op.stated().elements
    if not elements:
        raise ValueError(f"expected data, a number and a token, found {shown_shape(op.stated())}")
    return tuple_of((elements[0], _handle(op), _TOKEN))


def _recv_done(op: TypedInstruction) -> Shape:
    elements = op.operands[0].elements
    if not elements:
        raise ValueError(f"expected what a receive makes, found {shown_shape(op.operands[0])}")
    return tuple_of((elements[0], _TOKEN))


def _async_start(op: TypedInstruction) -> Shape:
    """A start that names its computation: what that takes, what it makes, and a context."""
    key = "calls" if "calls" in op.attributes else "to_apply"
    callee = op.callee(key)
    _check_arguments(callee, op.operands, "the computation")
    stated = op.result.elements if op.result is not None and op.result.elements else ()
    return tuple_of((tuple_of(op.operands), callee.result, *stated[2:]))


_RULES: dict[str, Rule] = {
    **ARRAY_RULES,
    **MOVING_RULES,
    "tuple": _tuple,
    "get-tuple-element": _element,
    "call": _call,
    "fusion": _fusion,
    "while": _while,
    "conditional": _conditional,
    "after-all": lambda _: _TOKEN,
    "partition-id": lambda _: _U32,
    "replica-id": lambda _: _U32,
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
    "send-done": lambda _: _TOKEN,
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
    """What the computations of a module take and make, and the size of groups of devices; each found once."""

    def __init__(self, computations: Mapping[str, Computation], shapes: Sequence[Shape]) -> None:
        """Start with nothing found. Both may grow later."""
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
            return rule(TypedInstruction(operands, attributes, callee, stated, group_size))
        base, suffix = base_opcode(opcode)
        if not suffix or stated is None:
            return None
        return self._asynchronous(
            _RULES.get(base), suffix, TypedInstruction(operands, attributes, callee, stated)
        )

    def _asynchronous(self, rule: Rule | None, suffix: str, op: TypedInstruction) -> Shape:
        """``slice-start``, ``-update``, ``-done``: what is wrapped, made of (operands), result, context."""
        if suffix != "-start":
            return _RULES[f"async{suffix}"](op)
        stated = op.stated().elements
        if stated is None or len(stated) < 2:
            raise ValueError(f"expected operands, a result and a context, found {shown_shape(op.stated())}")
        made = stated[1]
        if rule is not None:
            made = rule(TypedInstruction(op.operands, op.attributes, op.callee, made))
        return tuple_of((tuple_of(op.operands), made, *stated[2:]))


# --- Whether the shapes of a module fit one another: every instruction against its operands, every call
# against what it calls, the entry against the header. What XLA's verifier refuses of shapes is refused here.
#
# A program with one extent changed still reads as text, and all its costs would be wrong without a word.

_HINT = "was an extent edited by hand? dump the module again; XLA refuses these shapes too"
_GROUPS_HINT = (
    "was an extent edited by hand, or replica_groups, replica_count or num_partitions? dump the module "
    "again; XLA refuses shards that are not one for each device of a group"
)
_GROUPS = ("replica_groups", "channel_id", "use_global_device_ids", "dimensions")
_CALLED = ("to_apply", "calls", "dimensions", "window")
_NONE_READ = """
bitcast reshape convert bitcast-convert compare select clamp is-finite real imag complex abs tuple
dynamic-update-slice all-reduce all-reduce-start all-reduce-done all-gather-done copy-start copy-done
collective-permute collective-permute-start collective-permute-done after-all partition-id replica-id
"""
_READ: dict[str, tuple[str, ...]] = {
    "dot": ("lhs_batch_dims", "rhs_batch_dims", "lhs_contracting_dims", "rhs_contracting_dims", "sparsity"),
    "convolution": ("window", "dim_labels", "feature_group_count", "batch_group_count"),
    "broadcast": ("dimensions",),
    "transpose": ("dimensions",),
    "reverse": ("dimensions",),
    "concatenate": ("dimensions",),
    "slice": ("slice",),
    "dynamic-slice": ("dynamic_slice_sizes",),
    "pad": ("padding",),
    "iota": ("iota_dimension",),
    "get-tuple-element": ("index",),
    "reduce": _CALLED,
    "reduce-window": _CALLED,
    "all-gather": _GROUPS,
    "all-gather-start": _GROUPS,
    "reduce-scatter": _GROUPS,
    "all-to-all": _GROUPS,
    **dict.fromkeys(_NONE_READ.split(), ()),
}
"""Attributes that a rule reads, of operations that stand often and alike: such a one is checked once."""

_GROUPED = frozenset({"all-gather", "all-gather-start", "reduce-scatter", "all-to-all"})
_UNCHECKED = frozenset({"parameter", "constant", "custom-call", "infeed", "outfeed"})


class _Checker:
    """Checks one module. ``_numbers`` gives shapes of the same types and extents one number."""

    def __init__(self, program: HloProgram, inference: Inference) -> None:
        self.program = program
        self.module = program.module
        self.inference = inference
        self._signatures: dict[str, tuple[list[int], int]] = {}
        self._fitting: set[tuple[object, ...]] = set()
        self._sizes: dict[tuple[str | None, ...], int] = {}
        self._meshes: Mapping[str, Mesh] | None = None
        self._known: dict[Shape, int] = {}
        self._structures: dict[object, int] = {}
        self._numbers = [self._number(shape) for shape in self.module.shapes]

    def _number(self, shape: Shape) -> int:
        """The number of a shape's types and extents without its layouts. A tuple that others share is
        numbered once; recursion is as deep as tuples may be.
        """
        leaf, structures = shape.array, self._structures
        if leaf is not None:
            return structures.setdefault((leaf.element, leaf.dims), len(structures))
        number = self._known.get(shape)
        if number is None:
            parts = () if shape.elements is None else tuple([self._number(part) for part in shape.elements])
            number = self._known[shape] = structures.setdefault(parts, len(structures))
        return number

    def computation(self, computation: Computation) -> None:
        """Check every instruction. O(instructions)."""
        numbers, fitting = self._numbers, self._fitting
        made = [numbers[row] for row in computation.shapes]
        parts = zip(computation.opcodes, computation.operands, computation.attributes, made, strict=True)
        for index, (opcode, operands, texts, own) in enumerate(parts):
            if opcode in ELEMENTWISE:
                for operand in operands:
                    if made[operand] != own:
                        self._instruction(computation, index)
                        break
            elif opcode == "fusion":
                given = [made[operand] for operand in operands]
                if not self._is_called_right(texts, given, own):
                    self._instruction(computation, index)
            elif opcode not in _UNCHECKED:
                read = _READ.get(opcode)
                if read is None:
                    self._instruction(computation, index)
                    continue
                key = (
                    opcode,
                    own,
                    *[made[operand] for operand in operands],
                    *[texts.get(name) for name in read],
                )
                if key not in fitting:
                    self._instruction(computation, index)
                    fitting.add(key)

    def _is_called_right(self, attributes: Mapping[str, str], given: list[int], made: int) -> bool:
        """Whether what a fusion is given and makes is what its computation takes and makes, to the letter."""
        name = attributes.get("calls", "").lstrip("%")
        wanted = self._signatures.get(name)
        if wanted is None:
            body = self.module.computations.get(name)
            if body is None:
                return False
            places = [body.parameters.get(str(number), body.root) for number in range(len(body.parameters))]
            numbers = [self._numbers[body.shapes[place]] for place in [*places, body.root]]
            wanted = self._signatures[name] = (numbers[:-1], numbers[-1])
        return wanted == (given, made)

    def _instruction(self, computation: Computation, index: int) -> None:
        opcode, attributes = computation.opcodes[index], computation.attributes[index]
        all_shapes, rows = self.module.shapes, computation.shapes
        operands = tuple([all_shapes[rows[operand]] for operand in computation.operands[index]])
        stated = all_shapes[rows[index]]
        try:
            size = self._group_size(opcode, attributes) if opcode in _GROUPED else 1
            made = self.inference.result(opcode, operands, attributes, stated, size)
        except (ValueError, IndexError) as error:
            what = str(error) if isinstance(error, ValueError) else "expected operands that fit the operation"
            hint = _GROUPS_HINT if opcode in _GROUPED else _HINT
            raise self.program.error(computation, index, what, hint) from error
        except UnsupportedError as error:
            error.path, error.position = self.module.source.path, self.program.location(computation, index)
            raise
        if made is not None and not same_extents(made, stated):
            expected = f"expected the result {shown_shape(made)}, which its operands and attributes make"
            raise self.program.error(computation, index, f"{expected}, found {shown_shape(stated)}", _HINT)

    def _group_size(self, opcode: str, attributes: Mapping[str, str]) -> int:
        """How many devices an operation spans, 1 where the module does not say. Raises ``ValueError``."""
        base = base_opcode(opcode)[0]
        groups, channel, flat = [attributes.get(key) for key in _GROUPS[:3]]
        key = (base, groups, channel, flat)
        size = self._sizes.get(key)
        if size is None:
            number = -1 if channel is None else integer(channel)
            mode = group_mode(canonical_name(base), number, use_global_device_ids=is_true(flat))
            if self._meshes is None:
                self._meshes = header_meshes(self.module.attributes)
            written = parse_groups(groups, MAX_DEVICES, self._meshes)
            # Devices in a group of the stated size, or in one group of all.
            stated = None if written is None else written.group_size
            replicas, partitions = (self._count(key) for key in ("replica_count", "num_partitions"))
            everybody = partitions if mode is IdMode.CROSS_PARTITION else replicas
            size = everybody if stated is None else max(stated, 1)
            size = self._sizes[key] = (
                size * partitions if mode is IdMode.CROSS_REPLICA_AND_PARTITION else size
            )
        return size

    def _count(self, key: str) -> int:
        text = self.module.attributes.get(key, "1")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 1

    def entry(self) -> None:
        """The header's layout of the entry names the shapes of its parameters and of its result."""
        text = self.module.attributes.get("entry_computation_layout")
        if text is None:
            return
        taken, arrow, made = text.removeprefix("{").removesuffix("}").rpartition("->")
        entry = self.module.entry
        try:
            given = parse_shape(taken).elements
            result = parse_shape(made)
        except ValueError:
            return
        except UnsupportedError as error:
            error.path = self.module.source.path
            error.position = f"{self.module.source.origin}line 1, entry_computation_layout"
            raise
        if not arrow or given is None:
            return
        if len(given) != len(entry.parameters):
            message = f"expected {len(given)} parameters, as the header says, found {len(entry.parameters)}"
            raise self.program.error(entry, entry.root, message, _HINT)
        for number, index in [*entry.parameters.items(), (None, entry.root)]:
            wanted = result if number is None else given[int(number)] if int(number) < len(given) else None
            stated = self.module.shapes[entry.shapes[index]]
            if wanted is not None and not same_extents(wanted, stated):
                what = "the result" if number is None else f"parameter {number}"
                message = f"expected {what} to be {shown_shape(wanted)}, as the header says"
                raise self.program.error(entry, index, f"{message}, found {shown_shape(stated)}", _HINT)


def check_shapes(program: HloProgram, ordered: Sequence[Computation]) -> None:
    """Check the computations that run. Raises ``FormatError``. O(instructions)."""
    checker = _Checker(program, Inference(program.module.computations, program.module.shapes))
    for computation in ordered:
        checker.computation(computation)
    checker.entry()
