"""What is known of a module before it becomes a graph: tensor types per shape, users, buffers, body costs."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate

from hespas.converters.costs import Body, Cost, Operation, Tensor, cost_of, find_rule
from hespas.converters.hlo.attributes import donated_parameters, integer, names
from hespas.converters.hlo.facts import FACTS, Asked
from hespas.converters.hlo.module import Computation, HloModule
from hespas.converters.hlo.shapes import ArrayShape, Shape
from hespas.graph.errors import FormatError

__all__ = ["Program", "base_opcode"]

_SUFFIXES = ("-start", "-update", "-done")
_VIEWS = frozenset({"bitcast", "reshape"})
_SHOWN_NAME = 120
_MAX_VIEWS = 64
"""Views of one buffer followed before giving up; compiled programs have fewer than five in a row."""

_COST_NAMES = {"scaled-dot": "dot", "all-to-all": "all_to_all"}


@lru_cache(maxsize=4096)
def base_opcode(opcode: str) -> tuple[str, str]:
    """``all-gather-start`` -> (``all-gather``, ``-start``); ``add`` -> (``add``, ``""``)."""
    for suffix in _SUFFIXES:
        if opcode.endswith(suffix):
            return opcode[: -len(suffix)], suffix
    return opcode, ""


class Program:
    """A module with caches: each distinct type, and each distinct operation without attributes, is costed
    once.
    """

    def __init__(self, module: HloModule) -> None:
        self.module = module
        self.shapes: list[Shape] = list(module.shapes)
        self.bodies: dict[str, Body] = {}
        self.is_scheduled = module.attributes.get("is_scheduled") == "true"
        self._donated = donated_parameters(module.attributes)
        self._tensors: dict[int, tuple[Tensor, ...]] = {}
        self._by_array: dict[ArrayShape, Tensor] = {}
        self._elements: dict[tuple[int, int], int] = {}
        self._costs: dict[tuple[object, ...], Cost] = {}
        self._last_uses: dict[str, list[int]] = {}
        self._line_ends: list[int] = []

    def line_of(self, computation: Computation, index: int) -> int:
        """The text line of one instruction; O(log lines) after the first call."""
        if not self._line_ends:
            lines = self.module.source.text.split("\n")
            self._line_ends = list(accumulate(len(line) + 1 for line in lines))
        return bisect_right(self._line_ends, computation.positions[index]) + 1

    def location(self, computation: Computation, index: int) -> str:
        """Where an instruction stands, for messages."""
        origin = self.module.source.origin
        return f"{origin}line {self.line_of(computation, index)}, %{computation.names[index][:_SHOWN_NAME]}"

    def error(
        self, computation: Computation, index: int, message: str, hint: str | None = None
    ) -> FormatError:
        """A fault of one instruction."""
        where = f"{computation.opcodes[index][:_SHOWN_NAME]} %{computation.names[index][:_SHOWN_NAME]}"
        return FormatError(
            f"{where}: {message}",
            path=self.module.source.path,
            position=f"{self.module.source.origin}line {self.line_of(computation, index)}",
            hint=hint,
        )

    def tensors(self, row: int) -> tuple[Tensor, ...]:
        """The arrays of one shape, tuples flattened."""
        found = self._tensors.get(row)
        if found is None:
            found = self._tensors[row] = tuple(self._tensor(leaf) for leaf in self.shapes[row].leaves)
        return found

    def _tensor(self, leaf: ArrayShape) -> Tensor:
        tensor = self._by_array.get(leaf)
        if tensor is None:
            tensor = self._by_array[leaf] = Tensor(leaf.dtype, leaf.dims)
        return tensor

    def element_row(self, row: int, index: int) -> int:
        """The shape row of one element of a tuple. Raises ``IndexError``."""
        key = (row, index)
        if key not in self._elements:
            self.shapes.append(self.shapes[row].element(index))
            self._elements[key] = len(self.shapes) - 1
        return self._elements[key]

    def operand_rows(self, computation: Computation, index: int) -> tuple[int, ...]:
        """Shape rows of an instruction's operands."""
        shapes = computation.shapes
        return tuple([shapes[operand] for operand in computation.operands[index]])

    def result_row(self, computation: Computation, index: int) -> int:
        """The shape row of what an instruction really makes: without the bookkeeping of an asynchronous
        start or of a receive.
        """
        row = computation.shapes[index]
        base, suffix = base_opcode(computation.opcodes[index])
        elements = self.shapes[row].elements
        if base == "recv" and not suffix and elements:
            return self.element_row(row, 0)
        if suffix != "-start" or not elements or len(elements) < 2:
            return row
        if base == "all-reduce" and elements[0].elements is None:  # its own start form has the results only
            return row
        return self.element_row(row, 0 if base == "copy" else 1)

    def cost(
        self, computation: Computation, index: int, *, in_place: bool = False, materialised: bool = False
    ) -> Cost:
        """The cost of one instruction that is neither a fusion nor control flow, by the shared table.

        An asynchronous start costs what its operation does. Raises ``FormatError`` where attributes or
        operands do not fit the operation.
        """
        opcode, _ = base_opcode(computation.opcodes[index])
        rows = self.operand_rows(computation, index)
        result = self.result_row(computation, index)
        repeated = _repeated(computation.operands[index])
        ask = FACTS.get(opcode)
        key = (opcode, rows, result, repeated)
        if ask is None and key in self._costs:
            return self._costs[key]
        operands = tuple([tensor for row in rows for tensor in self.tensors(row)])
        results = self.tensors(result)
        attributes = computation.attributes[index]
        try:
            asked = Asked(attributes, operands, results, self.bodies, in_place, materialised)
            facts = ask(asked) if ask is not None else None
            cost = cost_of(_COST_NAMES.get(opcode, opcode), Operation(operands, results, facts, repeated))
        except (IndexError, ValueError, KeyError, OverflowError, ZeroDivisionError) as error:
            what = str(error) if isinstance(error, ValueError) else ""
            raise self.error(
                computation, index, what or "expected operands and attributes that fit the operation"
            ) from error
        if ask is None:
            self._costs[key] = cost
        return cost

    def is_known(self, computation: Computation, index: int) -> bool:
        """Whether the cost table has the operation."""
        opcode, _ = base_opcode(computation.opcodes[index])
        return find_rule(_COST_NAMES.get(opcode, opcode)) is not None

    def callee(self, computation: Computation, index: int, key: str) -> Computation:
        """The computation that attribute ``key`` of an instruction names. Raises ``FormatError``."""
        named = names(computation.attributes[index].get(key))
        found = self.module.computations.get(named[0]) if named else None
        if found is None:
            raise self.error(computation, index, f"expected an attribute {key} that names a computation")
        return found

    def parameter_number(self, computation: Computation, index: int) -> int:
        """The number of a ``parameter(n)``. Raises ``FormatError``."""
        try:
            return integer(computation.payloads[index])
        except ValueError as error:
            raise self.error(computation, index, f"expected the number of a parameter: {error}") from error

    def last_uses(self, computation: Computation) -> list[int]:
        """Per instruction, the last one that reads it; the root is read at the very end."""
        found = self._last_uses.get(computation.name)
        if found is None:
            found = [-1] * len(computation)
            for index, operands in enumerate(computation.operands):
                for operand in operands:
                    found[operand] = index
            found[computation.root] = len(computation)
            self._last_uses[computation.name] = found
        return found

    def dies(self, computation: Computation, index: int, operand: int) -> bool:
        """Whether the buffer of ``operand`` may be overwritten at ``index``: nobody reads it later, and it is
        neither a constant nor an argument the caller keeps.
        """
        uses = self.last_uses(computation)
        for _ in range(_MAX_VIEWS):
            if uses[operand] > index:
                return False
            opcode = computation.opcodes[operand]
            if opcode in _VIEWS and computation.operands[operand]:
                operand = computation.operands[operand][0]
            elif opcode == "parameter" and computation is self.module.entry:
                return self.parameter_number(computation, operand) in self._donated
            else:
                return opcode != "constant"
        return False


def _repeated(operands: tuple[int, ...]) -> tuple[int, ...]:
    """Places of operands that stand earlier in the list already."""
    if len(operands) < 2 or len(set(operands)) == len(operands):
        return ()
    seen: set[int] = set()
    places: list[int] = []
    for place, operand in enumerate(operands):
        if operand in seen:
            places.append(place)
        seen.add(operand)
    return tuple(places)
