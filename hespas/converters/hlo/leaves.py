"""Single operations of an HLO module, listed for each instruction that runs under its own name. Fusions and
calls are expanded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, nan, prod
from typing import NamedTuple, TypeAlias

from hespas.converters.hlo.attributes import callee_names, fields, names
from hespas.converters.hlo.module import Computation, HloModule, Shape
from hespas.converters.hlo.parser import parse_module
from hespas.converters.hlo.reader import callees_first, device_count, source_of
from hespas.converters.hlo.scan import unquote
from hespas.costs.table import canonical_name
from hespas.graph.errors import FormatError

__all__ = ["PASSES_ON", "SHAPELESS", "Leaf", "Leaves", "kind_of", "leaves_of", "module_leaves"]

PASSES_ON = frozenset(
    {
        "bitcast",
        "bitcast_convert",
        "broadcast",
        "broadcast_in_dim",
        "convert",
        "copy",
        "copy_start",
        "async_done",
        "optimization_barrier",
        "reduce_precision",
        "reshape",
        "transpose",
    }
)
"""Operations that pass their operand on in another form; compilers add, remove and merge them freely."""

SHAPELESS = frozenset({"constant", "parameter", "tuple", "get_tuple_element", "after_all", "add_dependency"})
"""Instructions without work."""

_ENTERED = frozenset({"while", "conditional"})
_OPENED = frozenset({"fusion", "call", "async-start"})
_KINDS = {"dot": "dot_general", "broadcast": "broadcast_in_dim", "if": "case", "topk": "top_k"}
_LIBRARY = {"TopK": "top_k"}
"""Operations of StableHLO by the target of the custom call that replaces them."""

_PARTITIONER = frozenset({"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"})
_PARTS = "-start", "-done", "-update"


class Leaf(NamedTuple):
    """One operation of a module in which nested computations are expanded. ``kind`` is its StableHLO name.
    ``made`` has the element type and the extents of each result. ``name`` and ``frame`` describe the
    operation of the source program: the framework's name and the source position (``""`` if unknown).
    """

    kind: str
    made: tuple[tuple[str, tuple[int, ...]], ...]
    name: str
    frame: str


@dataclass(frozen=True, slots=True, eq=False)
class Leaves:
    """Operations of a module after the expansion of fusions and calls (*leaves*). Leaves of kind
    ``parameter`` are the arguments of the program.

    ``operands`` has, for each leaf, the indices of the leaves that it reads; operations in :data:`PASSES_ON`
    are skipped. ``depth`` is the number of loops around each leaf. ``carried`` maps each instruction that
    runs under its own name to its leaves. ``uses`` maps an instruction to the instructions whose results it
    reads, also from inside computations that it executes. The module runs on ``devices`` devices; on each its
    arguments have ``argument_bytes`` and its results ``result_bytes`` (NaN: unknown).
    """

    leaves: list[Leaf] = field(default_factory=list[Leaf])
    operands: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    depth: list[int] = field(default_factory=list[int])
    carried: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    uses: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    devices: int = 1
    argument_bytes: float = nan
    result_bytes: float = nan


def kind_of(op_name: str) -> str:
    """Return the name that an operation has in StableHLO: ``dot_general`` for HLO ``dot``."""
    name = canonical_name(op_name)
    if not op_name.startswith("copy"):
        for part in _PARTS:
            name = canonical_name(op_name.removesuffix(part)) if op_name.endswith(part) else name
    return _KINDS.get(name, name)


_Value: TypeAlias = "tuple[int, ...] | list[_Value]"
"""Leaves that make an array (negative numbers are unbound parameters), or a list of the values of a tuple."""


def module_leaves(data: bytes, name: str) -> Leaves:
    """Return the leaves (operations with nested computations expanded) of a module in memory; messages use
    ``name``. Raises the reader's errors.
    """
    module = parse_module(source_of(data, name))
    try:
        return leaves_of(module)
    except ValueError as error:
        raise FormatError(
            f"an attribute is malformed: {error}", path=name, hint="dump the module again"
        ) from error


def leaves_of(module: HloModule) -> Leaves:
    """Return the leaves of a module: the instructions that remain when fusions and calls are expanded.

    Every computation that runs is expanded once. Its parameters are replaced by the operands of its first
    caller. Parameters of loop bodies are replaced by the initial values of the loop. Computations of
    reductions are not expanded.

    Raises ``FormatError`` if a called computation is missing or calls itself, ``ValueError`` for a malformed
    attribute. O(instructions) plus shared computations; recursion on tuples only.
    """
    ordered = _run(module, callees_first(module))
    walk = _LeafWalk(module)
    for computation in ordered:
        walk.read(computation)
    result = Leaves(
        leaves=walk.leaves,
        operands=walk.bound(ordered),
        depth=walk.depths(ordered),
        devices=device_count(module),
        argument_bytes=sum(
            _bytes(module.shape_of(module.entry, index))
            for index, opcode in enumerate(module.entry.opcodes)
            if opcode == "parameter"
        ),
        result_bytes=_bytes(module.shape_of(module.entry, module.entry.root)) if len(module.entry) else nan,
    )
    inside: dict[str, tuple[int, ...]] = {}
    for computation in ordered:
        opened = [
            callee_names(attributes) if opcode in _OPENED else ()
            for opcode, attributes in zip(computation.opcodes, computation.attributes, strict=True)
        ]
        own = walk.own[computation.name]
        carried = [
            tuple(dict.fromkeys((*own[index], *(leaf for name in opened[index] for leaf in inside[name]))))
            for index in range(len(computation))
        ]
        inside[computation.name] = tuple(dict.fromkeys(leaf for row in carried for leaf in row))
        walk.carried[computation.name] = carried
    for computation in _entered(module, ordered):
        for index, name in enumerate(computation.names):
            result.carried[name] = walk.carried[computation.name][index]
            entered = computation.opcodes[index] in _ENTERED
            callees = callee_names(computation.attributes[index]) if entered else ()
            roots = [module.computations[callee] for callee in callees]
            result.uses[name] = (
                *(computation.names[operand] for operand in computation.operands[index]),
                *(callee.names[callee.root] for callee in roots),
            )
    return result


def _run(module: HloModule, ordered: Sequence[Computation]) -> list[Computation]:
    """Return the computations that run as parts of the program, without reducers and other computations on
    single elements.
    """
    names = {module.entry.name}
    for computation in reversed(ordered):
        if computation.name in names:
            for opcode, attributes in zip(computation.opcodes, computation.attributes, strict=True):
                if opcode in _OPENED or opcode in _ENTERED:
                    names.update(callee_names(attributes))
    return [computation for computation in ordered if computation.name in names]


def _entered(module: HloModule, ordered: Sequence[Computation]) -> list[Computation]:
    """Return the computations whose instructions run under their own names: the entry, loops, branches and
    calls, but not fusions.
    """
    names = {module.entry.name}
    for computation in reversed(ordered):
        if computation.name not in names:
            continue
        for opcode, attributes in zip(computation.opcodes, computation.attributes, strict=True):
            if opcode in _ENTERED or opcode in {"call", "async-start"}:
                names.update(callee_names(attributes))
    return [computation for computation in ordered if computation.name in names]


class _Symbol(NamedTuple):
    """Placeholder for a parameter of a computation in the operands of a leaf. With ``path`` it represents an
    element of a tuple parameter: the index at each level of nesting.
    """

    parameter: int
    path: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _LeafWalk:
    """State of the expansion of nested computations to leaves, callees first. Parameters are symbols
    (:class:`_Symbol`) until the operands of the callers are known.
    """

    module: HloModule
    leaves: list[Leaf] = field(default_factory=list[Leaf])
    operands: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    symbols: dict[_Symbol, int] = field(default_factory=dict[_Symbol, int])
    symbol_list: list[_Symbol] = field(default_factory=list[_Symbol])
    results: dict[str, _Value] = field(default_factory=dict[str, _Value])
    own: dict[str, list[tuple[int, ...]]] = field(default_factory=dict[str, list[tuple[int, ...]]])
    calls: dict[str, list[tuple[str, Sequence[_Value]]]] = field(
        default_factory=dict[str, list[tuple[str, Sequence[_Value]]]]
    )
    spans: dict[str, range] = field(default_factory=dict[str, range])
    carried: dict[str, list[tuple[int, ...]]] = field(default_factory=dict[str, list[tuple[int, ...]]])

    def read(self, computation: Computation) -> None:
        """Add the leaves of a computation. Its callees must have been read before."""
        first = len(self.leaves)
        values: list[_Value] = []
        own: list[tuple[int, ...]] = []
        self.calls[computation.name] = []
        for index in range(len(computation)):
            before = len(self.leaves)
            values.append(self._value(computation, index, values))
            own.append(tuple(range(before, len(self.leaves))))
        self.spans[computation.name] = range(first, len(self.leaves))
        self.own[computation.name] = own
        self.results[computation.name] = values[computation.root] if values else ()

    def _value(self, computation: Computation, index: int, values: Sequence[_Value]) -> _Value:
        opcode, attributes = computation.opcodes[index], computation.attributes[index]
        taken = [values[operand] for operand in computation.operands[index]]
        if opcode == "parameter" and computation is not self.module.entry:
            return (self._symbol(int(computation.payloads[index]), ()),)
        if opcode == "tuple":
            return taken
        if opcode == "get-tuple-element":
            return self._element(taken[0], int(attributes.get("index", "0")))
        if opcode in _OPENED or opcode in _ENTERED:
            # Return the results of expanded or entered computations; a loop or branch is a leaf, too.
            entered = opcode in _ENTERED
            if entered:
                self._leaf(computation, index, kind_of(opcode), ())
            callees = callee_names(attributes)
            result: _Value = ()
            for position, callee in enumerate(callees):
                given = (
                    [taken[1 + position]] if opcode == "conditional" and 1 + position < len(taken) else taken
                )
                self.calls[computation.name].append((callee, given))
                if not (opcode == "while" and callee in names(attributes.get("condition", ""))):
                    result = self._bind(self.results[callee], given)
            return result
        target = unquote(attributes.get("custom_call_target", ""))
        kind = _LIBRARY.get(target) or kind_of(opcode)
        arrays = tuple(dict.fromkeys(leaf for value in taken for leaf in _arrays(value)))
        if (kind in SHAPELESS and kind != "parameter") or opcode.endswith(("-done", "-update")):
            return taken[0] if taken else ()
        self._leaf(computation, index, kind, arrays)
        passes = kind in PASSES_ON or target in _PARTITIONER
        return arrays if passes else (len(self.leaves) - 1,)

    def _leaf(self, computation: Computation, index: int, kind: str, arrays: tuple[int, ...]) -> None:
        texts = fields(computation.attributes[index].get("metadata", ""))
        shape = self.module.shape_of(computation, index)
        frame = texts.get("stack_frame_id", "") or self.module.frames.stated(texts)
        self.leaves.append(
            Leaf(
                kind,
                tuple(
                    (leaf.dtype.name if leaf.dtype is not None else leaf.element, leaf.dims)
                    for leaf in shape.leaves
                ),
                texts.get("op_name", ""),
                frame,
            )
        )
        self.operands.append(arrays)

    def _symbol(self, parameter: int, path: tuple[int, ...]) -> int:
        key = _Symbol(parameter, path)
        number = self.symbols.get(key)
        if number is None:
            self.symbol_list.append(key)
            number = self.symbols[key] = -len(self.symbol_list)
        return number

    def _element(self, value: _Value, index: int) -> _Value:
        if isinstance(value, list):
            return value[index] if 0 <= index < len(value) else ()
        elements: list[int] = []
        for leaf in value:
            symbol = self.symbol_list[-leaf - 1] if leaf < 0 else None
            elements.append(leaf if symbol is None else self._symbol(symbol.parameter, (*symbol.path, index)))
        return tuple(elements)

    def _bind(self, value: _Value, arguments: Sequence[_Value]) -> _Value:
        """Replace the symbols in a value of a called computation by the arguments that the caller passes."""
        if isinstance(value, list):
            return [self._bind(part, arguments) for part in value]
        if all(leaf >= 0 for leaf in value):
            return value
        if len(value) == 1:
            return self._argument(value[0], arguments)
        bound = (self._argument(leaf, arguments) if leaf < 0 else (leaf,) for leaf in value)
        return tuple(dict.fromkeys(array_leaf for part in bound for array_leaf in _arrays(part)))

    def _argument(self, number: int, arguments: Sequence[_Value]) -> _Value:
        parameter = self.symbol_list[-number - 1]
        value: _Value = arguments[parameter.parameter] if parameter.parameter < len(arguments) else ()
        for index in parameter.path:
            value = self._element(value, index)
        return value

    def depths(self, ordered: Sequence[Computation]) -> list[int]:
        """Return the number of loops around each leaf."""
        inside = {self.module.entry.name: 0}
        depths = [0] * len(self.leaves)
        for computation in reversed(ordered):
            depth = inside[computation.name]
            for leaf in self.spans[computation.name]:
                depths[leaf] = depth
            for opcode, attributes in zip(computation.opcodes, computation.attributes, strict=True):
                if opcode in _OPENED or opcode in _ENTERED:
                    for callee in callee_names(attributes):
                        inside.setdefault(callee, depth + (opcode == "while"))
        return depths

    def bound(self, ordered: Sequence[Computation]) -> list[tuple[int, ...]]:
        """Return the operands of all leaves, with symbols replaced by the arguments of calls. Callers are
        processed first.
        """
        arguments: dict[str, Sequence[_Value]] = {self.module.entry.name: ()}
        operands = list(self.operands)
        for computation in reversed(ordered):
            given = arguments.get(computation.name, ())
            for leaf in self.spans[computation.name]:
                operands[leaf] = _arrays(self._bind(operands[leaf], given))
            for callee, taken in self.calls[computation.name]:
                if callee not in arguments:
                    arguments[callee] = [self._bind(value, given) for value in taken]
        return operands


def _arrays(value: _Value) -> tuple[int, ...]:
    """Return all leaves that produce a value; for a tuple, the leaves of all its elements."""
    if not isinstance(value, list):
        return value
    return tuple(dict.fromkeys(leaf for part in value for leaf in _arrays(part)))


def _bytes(shape: Shape) -> float:
    """Return the total size of the arrays of a shape [bytes], NaN if a size is unknown."""
    return sum(
        nan
        if leaf.dtype is None or min(leaf.dims, default=0) < 0
        else float(ceil(prod(leaf.dims) * leaf.dtype.bits / 8))
        for leaf in shape.leaves
    )
