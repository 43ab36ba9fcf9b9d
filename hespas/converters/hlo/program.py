"""What is known of a module before it becomes a graph: tensor types per shape, users, buffers, body costs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import prod

from hespas.converters.hlo.attributes import (
    dim_labels,
    donated_parameters,
    fields,
    integer,
    ints,
    is_true,
    names,
    window,
    written_over,
)
from hespas.converters.hlo.module import ArrayShape, Computation, HloModule, Shape
from hespas.converters.hlo.scan import unquote
from hespas.converters.program_bytes import program_bytes
from hespas.costs.contraction import config_precision, named_algorithm, with_macs
from hespas.costs.operation import (
    Attributes,
    Body,
    BodyAttributes,
    BroadcastAttributes,
    ConvAttributes,
    Cost,
    CustomAttributes,
    DotAttributes,
    FftAttributes,
    Operation,
    Precision,
    RaggedDotAttributes,
    ScatterAttributes,
    SelectScatterAttributes,
    SolveAttributes,
    Tensor,
    TopKAttributes,
    UpdateAttributes,
    WindowAttributes,
)
from hespas.costs.table import cost_of, find_rule
from hespas.graph import DType, DTypeKind, OpClass
from hespas.graph.errors import FormatError

__all__ = ["HloProgram", "base_opcode", "source_dtypes", "widens"]

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


class HloProgram:
    """A module with caches: each distinct type, and each distinct operation without attributes, is costed
    once.
    """

    def __init__(self, module: HloModule) -> None:
        self.module = module
        self.shapes: list[Shape] = list(module.shapes)
        self.bodies: dict[str, Body] = {}
        self.is_scheduled = module.attributes.get("is_scheduled") == "true"
        self._donated = donated_parameters(module.attributes)
        self._written_over = written_over(module.attributes)
        self._tensors: dict[int, tuple[Tensor, ...]] = {}
        self._by_array: dict[ArrayShape, Tensor] = {}
        self._main_bytes: dict[int, tuple[float, ...]] = {}
        # Layouts in tiles are those of TPUs; for GPUs space 1 is main memory that collectives may use.
        self._is_tiled = any("T(" in leaf.layout for shape in module.shapes for leaf in shape.leaves)
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

    def all_bytes(self, row: int) -> tuple[float, ...]:
        """Bytes of the arrays of one shape."""
        return tuple(tensor.bytes for tensor in self.tensors(row))

    def main_bytes(self, row: int) -> tuple[float, ...]:
        """The same, where what lies in memory on the chip counts 0."""
        found = self._main_bytes.get(row)
        if found is None:
            leaves, sizes = self.shapes[row].leaves, self.all_bytes(row)
            found = tuple(
                0.0 if self._is_tiled and leaf.is_on_chip else size
                for leaf, size in zip(leaves, sizes, strict=True)
            )
            self._main_bytes[row] = found
        return found

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
        given = computation.operands[index]
        repeated: tuple[int, ...] = ()
        if len(set(given)) != len(given):  # the positions of operands that are passed again
            first = {operand: number for number, operand in reversed([*enumerate(given)])}
            repeated = tuple([number for number, operand in enumerate(given) if first[operand] != number])
        ask = _ATTRIBUTES.get(opcode)
        key = (opcode, rows, result, repeated)
        if ask is None and key in self._costs:
            return self._costs[key]
        operands = tuple([tensor for row in rows for tensor in self.tensors(row)])
        results = self.tensors(result)
        attributes = computation.attributes[index]
        try:
            asked = _OperationContext(attributes, operands, results, self.bodies, in_place, materialised)
            stated = ask(asked) if ask is not None else None
            cost = cost_of(_COST_NAMES.get(opcode, opcode), Operation(operands, results, stated, repeated))
        except (IndexError, ValueError, KeyError, OverflowError, ZeroDivisionError) as error:
            what = str(error) if isinstance(error, ValueError) else ""
            raise self.error(
                computation, index, what or "expected operands and attributes that fit the operation"
            ) from error
        # A cost without the bytes that stay on the chip, unless those are all that it has.
        if not (not self._is_tiled or cost.op_class is OpClass.COLLECTIVE):
            on_chip = sum(sum(self.all_bytes(row)) - sum(self.main_bytes(row)) for row in rows)
            written = sum(self.main_bytes(result))
            away = replace(
                cost,
                bytes_read=max(cost.bytes_read - on_chip, 0.0),
                bytes_written=min(cost.bytes_written, written),
            )
            cost = (
                away if away.flops or away.transcendentals or away.bytes_read or away.bytes_written else cost
            )
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

    def program_bytes(self) -> str:
        """Bytes of the parameters, of the results and of parameters over which results are written."""
        entry = self.module.entry
        sizes = {
            self.parameter_number(entry, index): sum(self.all_bytes(entry.shapes[index]))
            for index, opcode in enumerate(entry.opcodes)
            if opcode == "parameter"
        }
        parameters = [sizes.get(number, 0.0) for number in range(max(sizes, default=-1) + 1)]
        return program_bytes(parameters, self.all_bytes(entry.shapes[entry.root]), self._donated)

    def result_over(self, parameter: int) -> int:
        """The place of the result that is written over a parameter of the entry, -1: none is. Of a program
        that returns tuples of tuples nothing is told.
        """
        return self._written_over.get(parameter, -1)

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


# HLO attributes -> those that the shared cost table asks for, one entry per opcode that has any.


@dataclass(frozen=True, slots=True)
class _OperationContext:
    """What such an entry may use. ``bodies`` are the scalar costs of the module's computations.

    ``in_place``: the first operand's buffer dies here. ``materialised``: the program is compiled, so what
    stands outside fusions is a kernel of its own.
    """

    attributes: Mapping[str, str]
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    bodies: Mapping[str, Body]
    in_place: bool = False
    materialised: bool = False

    def body(self, key: str = "to_apply") -> Body:
        """The scalar computation an attribute names. Raises ``ValueError`` where it is absent."""
        named = names(self.attributes.get(key))
        if not named or named[0] not in self.bodies:
            raise ValueError(f"expected an attribute {key} that names a computation")
        return self.bodies[named[0]]

    def number(self, key: str, default: int) -> int:
        """An integer attribute."""
        return integer(self.attributes[key]) if key in self.attributes else default


def _precision(asked: _OperationContext) -> Precision:
    """How exactly an instruction multiplies, and what its frontend states beside the specification."""
    algorithm = asked.attributes.get("algorithm", "dot_unset")
    if algorithm != "dot_unset":
        multiplying = named_algorithm(algorithm)
    else:
        levels = names(asked.attributes.get("operand_precision"))
        multiplying = config_precision(levels) if levels else Precision()
    return with_macs(multiplying, fields(asked.attributes.get("frontend_attributes", "")))


def _dot(asked: _OperationContext) -> DotAttributes:
    keys = ("lhs_batch_dims", "rhs_batch_dims", "lhs_contracting_dims", "rhs_contracting_dims")
    places = [ints(asked.attributes.get(key)) for key in keys]
    for place, (dims, operand) in enumerate(zip(places, (0, 1, 0, 1), strict=True)):
        if any(not 0 <= dim < len(asked.operands[operand].shape) for dim in dims):
            raise ValueError(f"expected dimensions of the operand in {keys[place]}")
    return DotAttributes(places[0], places[1], places[2], places[3], _precision(asked))


def _ragged_dot(asked: _OperationContext) -> RaggedDotAttributes:
    ragged = ints(asked.attributes.get("lhs_ragged_dims"))
    return RaggedDotAttributes(_dot(asked), ragged[0] if ragged else 0)


def _spatial(places: Mapping[str, int]) -> tuple[int, ...]:
    """Places of the spatial dimensions 0, 1, ... of one operand."""
    return tuple(
        places[label] for label in sorted(places, key=lambda text: (len(text), text)) if label.isdigit()
    )


def _convolution(asked: _OperationContext) -> ConvAttributes:
    source, kernel, output = dim_labels(asked.attributes.get("dim_labels", ""))
    dims = window(asked.attributes.get("window"))
    if len(dims) != len(_spatial(kernel)):
        raise ValueError(f"expected a window of {len(_spatial(kernel))} dimensions")
    return ConvAttributes(
        input_batch=source["b"],
        input_feature=source["f"],
        input_spatial=_spatial(source),
        kernel_in=kernel["i"],
        kernel_out=kernel["o"],
        kernel_spatial=_spatial(kernel),
        output_batch=output["b"],
        output_feature=output["f"],
        output_spatial=_spatial(output),
        window=dims,
        feature_groups=asked.number("feature_group_count", 1),
        batch_groups=asked.number("batch_group_count", 1),
        precision=_precision(asked),
    )


def _reduce(asked: _OperationContext) -> BodyAttributes:
    return BodyAttributes(asked.body())


def _reduce_window(asked: _OperationContext) -> WindowAttributes:
    return WindowAttributes(asked.body(), window(asked.attributes.get("window")))


def _select_and_scatter(asked: _OperationContext) -> SelectScatterAttributes:
    elements = prod(dim.size for dim in window(asked.attributes.get("window")))
    return SelectScatterAttributes(asked.body("select"), asked.body("scatter"), elements)


def _scatter(asked: _OperationContext) -> ScatterAttributes:
    return ScatterAttributes(asked.body(), max((len(asked.operands) - 1) // 2, 1), asked.in_place)


def _sort(asked: _OperationContext) -> BodyAttributes:
    along = ints(asked.attributes.get("dimensions"))
    shape = asked.operands[0].shape
    extent = shape[along[0]] if along else shape[-1]
    return BodyAttributes(asked.body(), extent)


def _fft(asked: _OperationContext) -> FftAttributes:
    return FftAttributes(asked.attributes.get("fft_type", "FFT"), ints(asked.attributes.get("fft_length")))


def _custom_call(asked: _OperationContext) -> CustomAttributes:
    target = unquote(asked.attributes.get("custom_call_target", ""))
    config = unquote(asked.attributes.get("backend_config", ""))
    conv = _convolution(asked) if "dim_labels" in asked.attributes else None
    return CustomAttributes(target, config, conv)


_ATTRIBUTES: dict[str, Callable[[_OperationContext], Attributes]] = {
    "dot": _dot,
    "scaled-dot": _dot,
    "ragged-dot": _ragged_dot,
    "convolution": _convolution,
    "reduce": _reduce,
    "reduce-window": _reduce_window,
    "select-and-scatter": _select_and_scatter,
    "scatter": _scatter,
    "sort": _sort,
    "map": lambda asked: BodyAttributes(asked.body()),
    "fft": _fft,
    "topk": lambda asked: TopKAttributes(asked.number("k", asked.results[0].shape[-1])),
    "triangular-solve": lambda asked: SolveAttributes(is_true(asked.attributes.get("left_side", "true"))),
    "dynamic-update-slice": lambda asked: UpdateAttributes(asked.in_place),
    "broadcast": lambda asked: BroadcastAttributes(asked.materialised),
    "custom-call": _custom_call,
}
"""Opcode -> attributes. Opcodes that are not here cost what their tensor types say."""


# --- Products of values of 16 bits and less that a compiler widened to f32, as XLA does for CPUs.
#
# The conversions it writes itself carry no name of the framework, unlike those of a program that wants f32.

_MOVING = frozenset({"bitcast", "reshape", "copy", "transpose", "broadcast", "slice"})
_CALLS = frozenset({"fusion", "call"})
_CONTRACTIONS = frozenset({"dot", "convolution"})
_MAX_STEPS = 64
_WIDE, _NARROW_BITS = (DTypeKind.FLOAT, 32), 16

_Place = tuple[Computation, int]


def source_dtypes(program: HloProgram, computation: Computation, index: int) -> tuple[DType, DType] | None:
    """The types whose values an instruction multiplies as f32, None where it does not.

    It is a product, or a fusion around one.
    """
    place, callers = (computation, index), list[_Place]()
    if computation.opcodes[index] in _CALLS:
        callers.append(place)
        body = _callee(program, place)
        found = (
            [number for number, opcode in enumerate(body.opcodes) if opcode in _CONTRACTIONS] if body else []
        )
        if body is None or len(found) != 1:
            return None
        place = (body, found[0])
    inside, product = place
    if inside.opcodes[product] not in _CONTRACTIONS:
        return None
    sources = [_narrow(program, (inside, each), callers) for each in inside.operands[product][:2]]
    lhs, rhs = sources if len(sources) == 2 else (None, None)
    return None if lhs is None or rhs is None else (lhs, rhs)


def widens(program: HloProgram, computation: Computation, index: int) -> bool:
    """Whether an instruction does nothing but change narrow values to f32 or back, for the compiler."""
    place = (computation, index)
    if computation.opcodes[index] == "fusion":
        body = _callee(program, place)
        work = [number for number, opcode in enumerate(body.opcodes) if opcode != "parameter"] if body else []
        if body is None or not work or any(body.opcodes[each] not in {*_MOVING, "convert"} for each in work):
            return False
        converts = [(body, each) for each in work if body.opcodes[each] == "convert"]
        return bool(converts) and all(_is_compilers(program, each) for each in converts)
    return computation.opcodes[index] == "convert" and _is_compilers(program, place)


def _narrow(program: HloProgram, place: _Place, callers: list[_Place]) -> DType | None:
    """The narrow type that an f32 had before the compiler widened it, followed through views and fusions."""
    callers = list(callers)
    kind = _dtype(program, place)
    if kind is None or (kind.kind, kind.bits) != _WIDE:
        return None
    for _ in range(_MAX_STEPS):
        if place[0].opcodes[place[1]] == "convert":
            source = (place[0], place[0].operands[place[1]][0])
            return _dtype(program, source) if _is_compilers(program, place) else None
        # Follow instructions that pass a value on unchanged; stop at one that computes.
        computation, index = place
        opcode, operands = computation.opcodes[index], computation.operands[index]
        onward: _Place | None
        if opcode in _MOVING and operands:
            onward = computation, operands[0]
        elif opcode == "parameter" and callers:
            caller, at = callers.pop()
            number = program.parameter_number(computation, index)
            given = caller.operands[at]
            onward = (caller, given[number]) if 0 <= number < len(given) else None
        elif opcode == "get-tuple-element" and operands:
            onward = _element(program, place, callers)
        else:
            body = _callee(program, place) if opcode in _CALLS else None
            if body is None:
                onward = None
            else:
                callers.append(place)
                onward = body, body.root
        if onward is None:
            return None
        place = onward
    return None


def _element(program: HloProgram, place: _Place, callers: list[_Place]) -> _Place | None:
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


def _callee(program: HloProgram, place: _Place) -> Computation | None:
    attributes = place[0].attributes[place[1]]
    key = "to_apply" if "to_apply" in attributes else "calls"
    return program.callee(*place, key) if key in attributes else None


def _is_compilers(program: HloProgram, place: _Place) -> bool:
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


def _dtype(program: HloProgram, place: _Place) -> DType | None:
    tensors = program.tensors(place[0].shapes[place[1]])
    return tensors[0].dtype if len(tensors) == 1 else None
