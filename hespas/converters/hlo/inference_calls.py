"""Shape inference of tuples, calls, collectives, copies and asynchronous pairs, and verification of whole
modules.

The rules are as in :mod:`~hespas.converters.hlo.inference`. :func:`check_shapes` checks every instruction
against its operands, every call against its computation, and the entry against the header. It rejects the
shapes that XLA's verifier rejects. Without it, a program with an edited extent would be read with wrong
costs.
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
    """Raise ``ValueError`` unless the operands ``given`` match the parameters of a computation."""
    count = len(callee.parameters)
    if count > len(given) or (all_used and count != len(given)):
        raise ValueError(f"expected {what} to take {len(given)} parameters, found {count}")
    for number, (parameter, operand) in enumerate(zip(callee.parameters, given, strict=False)):
        if parameter is not None:
            fits = _fits(callee, number, parameter, operand)
            check(fits, f"parameter {number} of {what} and its operand to be alike", parameter, operand)


def _fits(callee: Callee, number: int, wanted: Shape, given: Shape) -> bool:
    """Return True if the shape ``given`` matches ``wanted``, which the computation ``callee`` declares for
    parameter ``number`` (-1: for its result).
    """
    if (number, given) in callee.matches:
        return True
    if not same_extents(wanted, given):
        return False
    callee.matches.add((number, given))
    return True


def _call(op: TypedInstruction) -> Shape:
    callee = op.callee("to_apply" if "to_apply" in op.attributes else "calls")
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
    keys = [("branch_computations", number) for number in range(len(op.operands) - 1)]
    if "branch_computations" not in op.attributes:
        keys = [("true_computation", 0), ("false_computation", 0)]
    if len(keys) != len(op.operands) - 1:
        raise ValueError(
            f"expected an operand for each of {len(keys)} branches, found {len(op.operands) - 1}"
        )
    branches = [op.callee(key, number) for key, number in keys]
    for number, branch in enumerate(branches):
        _check_arguments(branch, op.operands[number + 1 : number + 2], f"branch {number}")
        fits = _fits(branches[0], -1, branches[0].result, branch.result)
        check(fits, "branches that make the same", branches[0].result, branch.result)
    return branches[0].result


def _gathered(op: TypedInstruction, *, start: bool = False) -> Shape:
    """Infer the result shape of an all-gather: each operand is concatenated along one dimension over the
    devices of a group.
    """
    result = op.stated()
    whole = result.element(1) if start and result.elements and len(result.elements) > 1 else result
    sharded = _shards(op, whole, joins=True)
    if sharded is None:
        return result
    along, shards = sharded
    joined: list[Shape] = []
    for index in range(len(op.operands)):
        array = op.array(index)
        check(along < len(array.dims), f"a dimension {along}", array)
        joined.append(_scaled(array, along, array.dims[along] * shards))
    return _started(op, one_or_tuple(joined)) if start else one_or_tuple(joined)


def _shards(op: TypedInstruction, made: Shape, *, joins: bool) -> tuple[int, int] | None:
    """Return the dimension along which a collective joins (``joins``) or splits its operands, and the number
    of shards, one per device. Return None for a dynamic extent. ``made`` is the result shape.
    """
    parts = [made] if len(op.operands) == 1 else list(made.elements or ())
    if len(parts) != len(op.operands):
        raise ValueError(f"expected {len(op.operands)} results, found {shown_shape(op.stated())}")
    along = op.dimension("dimensions", len(op.array(0).dims))
    given, result = op.array(0).dims, array_of(parts[0], "the result").dims
    check(len(result) == len(given), "equally many dimensions", op.operands[0], parts[0])
    if DYNAMIC in (given[along], result[along]):
        return None
    part, whole = (given[along], result[along]) if joins else (result[along], given[along])
    shards = -(-whole // part) if part else max(op.group_size, 1)
    expected = f"{op.group_size} shards along dimension {along}, one {'of' if joins else 'for'} each device"
    check(op.group_size in (1, shards), expected, op.operands[0], parts[0])
    return along, shards


def _scaled(array: ArrayShape, along: int, extent: int) -> Shape:
    dims = [*array.dims]
    dims[along] = DYNAMIC if dims[along] == DYNAMIC else extent
    return with_dims(array, dims)


def _started(op: TypedInstruction, made: Shape) -> Shape:
    """Return the result shape of a collective's start: operands, results, and further elements that depend on
    the backend.
    """
    result = op.stated()
    elements = result.elements
    if not elements:  # text of older versions
        return made
    wrapped = len(op.operands) == 1 and elements[0].elements is not None
    given = tuple_of(op.operands) if wrapped else one_or_tuple(op.operands)
    return tuple_of((given, made, *elements[2:]))


def _reduce_scatter(op: TypedInstruction) -> Shape:
    """Infer the result shape of a reduce-scatter: one shard of each operand."""
    result = op.stated()
    sharded = _shards(op, result, joins=False)
    if sharded is None:
        return result
    along, shards = sharded
    cut: list[Shape] = []
    for index in range(len(op.operands)):
        array = op.array(index)
        check(along < len(array.dims), f"a dimension {along}", array)
        fits = shards > 0 and (array.dims[along] == DYNAMIC or array.dims[along] % shards == 0)
        check(fits, f"{shards} equal shards along dimension {along}", array)
        cut.append(_scaled(array, along, array.dims[along] // max(shards, 1)))
    return one_or_tuple(cut)


def _all_to_all(op: TypedInstruction) -> Shape:
    first = op.array(0)
    if "dimensions" in op.attributes:
        along = op.dimension("dimensions", len(first.dims))
        fits = first.dims[along] == DYNAMIC or first.dims[along] % max(op.group_size, 1) == 0
        check(fits, f"{op.group_size} equal parts along dimension {along}", first)
        return one_or_tuple(op.operands)
    for index in range(1, len(op.operands)):
        check(same_extents(op.operands[0], op.operands[index]), "operands alike", *op.operands[:2])
    if op.group_size > 1 and len(op.operands) != op.group_size:
        raise ValueError(f"expected {op.group_size} operands, one per device, found {len(op.operands)}")
    result = op.stated()
    return op.operands[0] if result.elements is None else tuple_of(op.operands)


def _ragged_all_to_all(op: TypedInstruction) -> Shape:
    if len(op.operands) != 6:
        raise ValueError(f"expected 6 operands, found {len(op.operands)}")
    for index in (3, 4, 5):
        fits = same_extents(op.operands[2], op.operands[index])
        check(fits, "offsets and sizes alike", op.operands[2], op.operands[index])
    return op.operands[1]


def _in_place(op: TypedInstruction) -> bool:
    """Return True if a permute writes its data into a buffer operand at given offsets."""
    offsets = op.operands[2].elements if len(op.operands) == 4 else None
    return offsets is not None


def _permute_start(op: TypedInstruction) -> Shape:
    elements = op.result.elements if op.result is not None and op.result.elements else ()
    if _in_place(op):
        return tuple_of((*op.operands[:2], *elements[2:]))
    return _started(op, one_or_tuple(op.operands))


def _finished(op: TypedInstruction) -> Shape:
    """Return the result shape of a ``-done``: the second element of its operand, which is the tuple of the
    start.
    """
    elements = op.operands[0].elements
    if elements is None or len(elements) < 2:
        raise ValueError(
            f"expected the tuple that a start operation returns, found {shown_shape(op.operands[0])}"
        )
    return elements[1]


def _copy_done(op: TypedInstruction) -> Shape:
    made = _finished(op)
    first = op.operands[0].element(0)
    check(same_extents(first, made), "a copy like its source", first, made)
    return first


def _handle(op: TypedInstruction) -> Shape:
    """Return the shape of the handle that a send or receive returns: a scalar whose type depends on the
    backend.
    """
    elements = op.stated().elements
    handle = elements[1] if elements is not None and len(elements) > 1 else _U32
    return handle if handle.array is not None and not handle.array.dims else _U32


def _recv(op: TypedInstruction) -> Shape:
    elements = op.stated().elements
    if not elements:
        raise ValueError(f"expected a tuple of data, handle and token, found {shown_shape(op.stated())}")
    return tuple_of((elements[0], _handle(op), _TOKEN))


def _recv_done(op: TypedInstruction) -> Shape:
    elements = op.operands[0].elements
    if not elements:
        raise ValueError(f"expected the tuple that a recv returns, found {shown_shape(op.operands[0])}")
    return tuple_of((elements[0], _TOKEN))


def _async_start(op: TypedInstruction) -> Shape:
    """Infer the result shape of an ``async-start``. It is a tuple of the operands, the result of the
    asynchronous operation, and further elements that depend on the backend.
    """
    callee = op.callee("calls" if "calls" in op.attributes else "to_apply")
    _check_arguments(callee, op.operands, "the computation")
    elements = op.result.elements if op.result is not None and op.result.elements else ()
    return tuple_of((tuple_of(op.operands), callee.result, *elements[2:]))


_RULES: dict[str, Rule] = {
    **ARRAY_RULES,
    **MOVING_RULES,
    "tuple": lambda op: tuple_of(op.operands),
    "get-tuple-element": _element,
    "call": _call,
    "fusion": _fusion,
    "while": _while,
    "conditional": _conditional,
    "after-all": lambda _: _TOKEN,
    "partition-id": lambda _: _U32,
    "replica-id": lambda _: _U32,
    "all-gather": _gathered,
    "all-gather-start": lambda op: _gathered(op, start=True),
    "all-gather-done": _finished,
    "all-reduce": lambda op: one_or_tuple(op.operands),
    "all-reduce-start": lambda op: one_or_tuple(op.operands),
    "all-reduce-done": lambda op: op.operands[0],
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "ragged-all-to-all": _ragged_all_to_all,
    "collective-broadcast": lambda op: op.operands[0],
    "collective-permute": lambda op: op.operands[1] if _in_place(op) else one_or_tuple(op.operands),
    "collective-permute-start": _permute_start,
    "collective-permute-done": _finished,
    "copy-start": lambda op: tuple_of((op.operands[0], op.operands[0], _U32)),
    "copy-done": _copy_done,
    "send": lambda op: tuple_of((op.operands[0], _handle(op), _TOKEN)),
    "send-done": lambda _: _TOKEN,
    "recv": _recv,
    "recv-done": _recv_done,
    "async-start": _async_start,
    "async-update": lambda op: op.operands[0],
    "async-done": _finished,
}
"""Rules for the result shape by opcode. Opcodes without a rule (``parameter``, ``constant``, ``custom-call``,
``infeed``) have the stated shape.
"""


class Inference:
    """Shape inference in one module, with a cache of the parameter and result shapes of computations."""

    def __init__(self, computations: Mapping[str, Computation], shapes: Sequence[Shape]) -> None:
        """Start with an empty cache. Both arguments may grow later."""
        self._computations = computations
        self._shapes = shapes
        self._callees: dict[str, Callee] = {}

    def callee(self, attributes: Mapping[str, str], key: str, position: int = 0) -> Callee:
        """Return the computation at index ``position`` of the attribute ``key``. Raises ``ValueError`` if it
        does not exist.
        """
        named = names(attributes.get(key))
        name = named[position] if position < len(named) else ""
        callee = self._callees.get(name)
        if callee is None:
            body = self._computations.get(name)
            if body is None:
                raise ValueError(f"expected an attribute {key} that names a computation")
            count = max([int(number) for number in body.parameters], default=-1) + 1
            if count > len(body):
                raise ValueError(f"expected parameters of the computation numbered 0 to {len(body) - 1}")
            taken: list[Shape | None] = [None] * count
            for number, index in body.parameters.items():
                taken[int(number)] = self._shapes[body.shapes[index]]
            callee = Callee(tuple(taken), self._shapes[body.shapes[body.root]])
            self._callees[name] = callee
        return callee

    def result(
        self,
        opcode: str,
        operands: tuple[Shape, ...],
        attributes: Mapping[str, str],
        stated: Shape | None = None,
        group_size: int = 1,
    ) -> Shape | None:
        """Infer the result shape of an operation. Return None if the operation allows any shape. Raises
        ``ValueError`` with the expected value if operands or attributes are invalid.
        """

        def callee(key: str, index: int = 0) -> Callee:
            return self.callee(attributes, key, index)

        if opcode in _RULES:
            return _RULES[opcode](TypedInstruction(operands, attributes, callee, stated, group_size))
        base, suffix = base_opcode(opcode)
        if not suffix or stated is None:
            return None
        op = TypedInstruction(operands, attributes, callee, stated)
        if suffix != "-start":
            return _RULES[f"async{suffix}"](op)
        # The short form of an asynchronous start, such as ``slice-start``: operands, result, context.
        elements = stated.elements
        if elements is None or len(elements) < 2:
            raise ValueError(f"expected operands, a result and a context, found {shown_shape(stated)}")
        made, rule = elements[1], _RULES.get(base)
        if rule is not None:
            made = rule(TypedInstruction(operands, attributes, callee, made))
        return tuple_of((tuple_of(operands), made, *elements[2:]))


_HINT = "dump the module again; an extent may have been edited, and XLA refuses these shapes too"
_GROUPS_HINT = (
    "dump the module again; an extent, replica_groups, replica_count or num_partitions may have been edited, "
    "and XLA refuses shards that are not one for each device of a group"
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
"""Attributes that a rule reads, for operations that are often repeated; equal operations are checked once."""

_GROUPED = frozenset({"all-gather", "all-gather-start", "reduce-scatter", "all-to-all"})
_UNCHECKED = frozenset({"parameter", "constant", "custom-call", "infeed", "outfeed"})


class _Checker:
    """Checker of the shapes in one module. ``_numbers`` maps each shape to a number; shapes that differ only
    in layout have the same number.
    """

    def __init__(self, program: HloProgram, inference: Inference) -> None:
        self.program = program
        self.module = program.module
        self.inference = inference
        self._signatures: dict[str, tuple[list[int], int]] = {}
        self._fitting: set[tuple[object, ...]] = set()
        self._sizes: dict[tuple[str | None, ...], int] = {}
        self._meshes: Mapping[str, Mesh] | None = None
        self._tuple_numbers: dict[Shape, int] = {}
        self._structures: dict[object, int] = {}
        self._numbers = [self._number(shape) for shape in self.module.shapes]

    def _number(self, shape: Shape) -> int:
        """Return the number of a shape, which ignores layouts. A tuple that occurs in several shapes is
        processed once; the parser limits the depth of the recursion.
        """
        leaf, structures = shape.array, self._structures
        if leaf is not None:
            return structures.setdefault((leaf.element, leaf.dims), len(structures))
        number = self._tuple_numbers.get(shape)
        if number is None:
            parts = () if shape.elements is None else tuple([self._number(part) for part in shape.elements])
            number = self._tuple_numbers[shape] = structures.setdefault(parts, len(structures))
        return number

    def computation(self, computation: Computation) -> None:
        """Check every instruction of a computation. O(instructions)."""
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
        """Return True if the operands and the result of a fusion have exactly the shapes that its computation
        declares. ``given`` and ``made`` are these shapes as numbers from :meth:`_number`.
        """
        name = attributes.get("calls", "").lstrip("%")
        wanted = self._signatures.get(name)
        if wanted is None:
            body = self.module.computations.get(name)
            if body is None:
                return False
            rows = [body.parameters.get(str(number), body.root) for number in range(len(body.parameters))]
            numbers = [self._numbers[body.shapes[row]] for row in [*rows, body.root]]
            wanted = self._signatures[name] = (numbers[:-1], numbers[-1])
        return wanted == (given, made)

    def _instruction(self, computation: Computation, index: int) -> None:
        opcode, attributes = computation.opcodes[index], computation.attributes[index]
        all_shapes, rows = self.module.shapes, computation.shapes
        operands = tuple([all_shapes[rows[operand]] for operand in computation.operands[index]])
        result_shape = all_shapes[rows[index]]
        try:
            size = self._group_size(opcode, attributes) if opcode in _GROUPED else 1
            made = self.inference.result(opcode, operands, attributes, result_shape, size)
        except (ValueError, IndexError) as error:
            what = str(error) if isinstance(error, ValueError) else "expected operands that fit the operation"
            hint = _GROUPS_HINT if opcode in _GROUPED else _HINT
            raise self.program.error(computation, index, what, hint) from error
        except UnsupportedError as error:
            error.path, error.position = self.module.source.path, self.program.location(computation, index)
            raise
        if made is not None and not same_extents(made, result_shape):
            expected = f"expected the result {shown_shape(made)}, which its operands and attributes make"
            raise self.program.error(
                computation, index, f"{expected}, found {shown_shape(result_shape)}", _HINT
            )

    def _group_size(self, opcode: str, attributes: Mapping[str, str]) -> int:
        """Return the number of devices in a group of a collective, 1 if not stated. Raises ``ValueError``."""
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
            texts = (self.module.attributes.get(name, "1") for name in ("replica_count", "num_partitions"))
            replicas, partitions = (
                int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 1 for text in texts
            )
            all_ids = partitions if mode is IdMode.CROSS_PARTITION else replicas
            size = all_ids if written is None else max(written.group_size, 1)
            size *= partitions if mode is IdMode.CROSS_REPLICA_AND_PARTITION else 1
            self._sizes[key] = size
        return size

    def entry(self) -> None:
        """Check that the parameters and the result of the entry computation have the layout in the module's
        header.
        """
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
            own_shape = self.module.shapes[entry.shapes[index]]
            if wanted is not None and not same_extents(wanted, own_shape):
                what = "the result" if number is None else f"parameter {number}"
                message = f"expected {what} to be {shown_shape(wanted)}, as the header says"
                raise self.program.error(entry, index, f"{message}, found {shown_shape(own_shape)}", _HINT)


def check_shapes(program: HloProgram, ordered: Sequence[Computation]) -> None:
    """Check the shapes in all computations that run. Raises ``FormatError``. O(instructions)."""
    checker = _Checker(program, Inference(program.module.computations, program.module.shapes))
    for computation in ordered:
        checker.computation(computation)
    checker.entry()
