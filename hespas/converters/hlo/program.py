"""Properties of a module that its graph needs: tensor types, costs of instructions, buffers and source types.

XLA for CPUs converts values of 16 bits and less to f32 before a product; :func:`source_dtypes` finds the
narrow types. Conversions inserted by the compiler have no framework name, unlike the program's own
conversions.
"""

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
"""Maximum number of consecutive views of one buffer; compiled programs have fewer than five."""

_COST_NAMES = {"scaled-dot": "dot", "all-to-all": "all_to_all"}


@lru_cache(maxsize=4096)
def base_opcode(opcode: str) -> tuple[str, str]:
    """Split an opcode into its operation and its asynchronous suffix: ``all-gather-start`` gives
    (``all-gather``, ``-start``), ``add`` gives (``add``, ``""``).
    """
    for suffix in _SUFFIXES:
        if opcode.endswith(suffix):
            return opcode[: -len(suffix)], suffix
    return opcode, ""


class HloProgram:
    """Parsed module with caches of tensor types and of costs that depend on types only."""

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
        # Only TPUs have tiled layouts; for GPUs space 1 is main memory that collectives may use.
        self._is_tiled = any("T(" in leaf.layout for shape in module.shapes for leaf in shape.leaves)
        self._elements: dict[tuple[int, int], int] = {}
        self._costs: dict[tuple[object, ...], Cost] = {}
        self._last_uses: dict[str, list[int]] = {}
        self._line_ends: list[int] = []

    def line_of(self, computation: Computation, index: int) -> int:
        """Return the text line of one instruction. O(log lines) after the first call."""
        if not self._line_ends:
            lines = self.module.source.text.split("\n")
            self._line_ends = list(accumulate(len(line) + 1 for line in lines))
        return bisect_right(self._line_ends, computation.positions[index]) + 1

    def location(self, computation: Computation, index: int) -> str:
        """Return the location of an instruction for messages."""
        origin = self.module.source.origin
        return f"{origin}line {self.line_of(computation, index)}, %{computation.names[index][:_SHOWN_NAME]}"

    def error(
        self, computation: Computation, index: int, message: str, hint: str | None = None
    ) -> FormatError:
        """Build the error for one instruction."""
        where = f"{computation.opcodes[index][:_SHOWN_NAME]} %{computation.names[index][:_SHOWN_NAME]}"
        return FormatError(
            f"{where}: {message}",
            path=self.module.source.path,
            position=f"{self.module.source.origin}line {self.line_of(computation, index)}",
            hint=hint,
        )

    def tensors(self, row: int) -> tuple[Tensor, ...]:
        """Return the arrays of one shape, tuples flattened."""
        tensors = self._tensors.get(row)
        if tensors is None:
            leaves = self.shapes[row].leaves
            for leaf in leaves:
                if leaf not in self._by_array:
                    self._by_array[leaf] = Tensor(leaf.dtype, leaf.dims)
            tensors = self._tensors[row] = tuple([self._by_array[leaf] for leaf in leaves])
        return tensors

    def all_bytes(self, row: int) -> tuple[float, ...]:
        """Return the sizes [bytes] of the arrays of one shape."""
        return tuple(tensor.bytes for tensor in self.tensors(row))

    def main_bytes(self, row: int) -> tuple[float, ...]:
        """Return the sizes [bytes] of the arrays of one shape in main memory, 0 for arrays in on-chip
        memory.
        """
        main = self._main_bytes.get(row)
        if main is None:
            leaves, sizes = self.shapes[row].leaves, self.all_bytes(row)
            main = tuple(
                0.0 if self._is_tiled and leaf.is_on_chip else size
                for leaf, size in zip(leaves, sizes, strict=True)
            )
            self._main_bytes[row] = main
        return main

    def element_row(self, row: int, index: int) -> int:
        """Return the shape row of one element of a tuple. Raises ``IndexError``."""
        key = (row, index)
        if key not in self._elements:
            self.shapes.append(self.shapes[row].element(index))
            self._elements[key] = len(self.shapes) - 1
        return self._elements[key]

    def operand_rows(self, computation: Computation, index: int) -> tuple[int, ...]:
        """Return the shape rows of an instruction's operands."""
        shapes = computation.shapes
        return tuple([shapes[operand] for operand in computation.operands[index]])

    def result_row(self, computation: Computation, index: int) -> int:
        """Return the shape row of the data that an instruction produces. For an asynchronous start or a
        receive these are the results, without handles and copies of operands.
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
        """Return the cost of one instruction from the cost table. Fusions and control flow are not supported.

        An asynchronous start has the cost of its operation. Raises ``FormatError`` if attributes or operands
        do not fit the operation.
        """
        opcode, _ = base_opcode(computation.opcodes[index])
        rows = self.operand_rows(computation, index)
        result = self.result_row(computation, index)
        given = computation.operands[index]
        repeated: tuple[int, ...] = ()
        if len(set(given)) != len(given):  # the positions of operands that are passed again
            first = {operand: number for number, operand in reversed([*enumerate(given)])}
            repeated = tuple([number for number, operand in enumerate(given) if first[operand] != number])
        build = _ATTRIBUTES.get(opcode)
        key = (opcode, rows, result, repeated)
        if build is None and key in self._costs:
            return self._costs[key]
        operands = tuple([tensor for row in rows for tensor in self.tensors(row)])
        results = self.tensors(result)
        attributes = computation.attributes[index]
        try:
            context = _OperationContext(attributes, operands, results, self.bodies, in_place, materialised)
            cost_attributes = build(context) if build is not None else None
            cost = cost_of(
                _COST_NAMES.get(opcode, opcode), Operation(operands, results, cost_attributes, repeated)
            )
        except (IndexError, ValueError, KeyError, OverflowError, ZeroDivisionError) as error:
            what = str(error) if isinstance(error, ValueError) else ""
            raise self.error(
                computation, index, what or f"expected operands and attributes of a {opcode}"
            ) from error
        # Subtract the bytes that stay on the chip, unless nothing else is left.
        if self._is_tiled and cost.op_class is not OpClass.COLLECTIVE:
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
        if build is None:
            self._costs[key] = cost
        return cost

    def is_known(self, computation: Computation, index: int) -> bool:
        """Return True if the cost table has the operation of an instruction."""
        opcode, _ = base_opcode(computation.opcodes[index])
        return find_rule(_COST_NAMES.get(opcode, opcode)) is not None

    def callee(self, computation: Computation, index: int, key: str) -> Computation:
        """Return the computation in attribute ``key`` of an instruction. Raises ``FormatError`` without
        one.
        """
        named = names(computation.attributes[index].get(key))
        callee = self.module.computations.get(named[0]) if named else None
        if callee is None:
            raise self.error(computation, index, f"expected an attribute {key} that names a computation")
        return callee

    def parameter_number(self, computation: Computation, index: int) -> int:
        """Return the number of a ``parameter(n)``. Raises ``FormatError``."""
        try:
            return integer(computation.payloads[index])
        except ValueError as error:
            raise self.error(computation, index, f"expected the number of a parameter: {error}") from error

    def program_bytes(self) -> str:
        """Return the memory of the program as text for the metadata of the graph: the sizes [bytes] of the
        parameters, of the results, and of the parameters that results may overwrite.
        """
        entry = self.module.entry
        sizes = {
            self.parameter_number(entry, index): sum(self.all_bytes(entry.shapes[index]))
            for index, opcode in enumerate(entry.opcodes)
            if opcode == "parameter"
        }
        parameters = [sizes.get(number, 0.0) for number in range(max(sizes, default=-1) + 1)]
        return program_bytes(parameters, self.all_bytes(entry.shapes[entry.root]), self._donated)

    def result_over(self, parameter: int) -> int:
        """Return the index of the result that overwrites a parameter of the entry computation, -1 for none.
        Nested tuples of results are not supported.
        """
        return self._written_over.get(parameter, -1)

    def last_uses(self, computation: Computation) -> list[int]:
        """Return for each instruction the last instruction that reads its result. The root counts as read at
        the very end.
        """
        readers = self._last_uses.get(computation.name)
        if readers is None:
            readers = [-1] * len(computation)
            for index, operands in enumerate(computation.operands):
                for operand in operands:
                    readers[operand] = index
            readers[computation.root] = len(computation)
            self._last_uses[computation.name] = readers
        return readers

    def dies(self, computation: Computation, index: int, operand: int) -> bool:
        """Return True if the buffer of ``operand`` may be overwritten at instruction ``index``. It must have
        no later reader, and must not be a constant or an argument that the caller still needs.
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


@dataclass(frozen=True, slots=True)
class _OperationContext:
    """Operation and its surroundings, from which the attributes for the cost table are built. ``bodies`` has
    the cost of each scalar computation that the operation applies, by the name of the computation.

    ``in_place`` is True if the first operand's buffer may be overwritten. ``materialised`` is True for a
    compiled program, in which every instruction outside fusions is a kernel.
    """

    attributes: Mapping[str, str]
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    bodies: Mapping[str, Body]
    in_place: bool = False
    materialised: bool = False

    def body(self, key: str = "to_apply") -> Body:
        """Return the cost of the scalar computation in attribute ``key``. Raises ``ValueError`` without
        one.
        """
        named = names(self.attributes.get(key))
        if not named or named[0] not in self.bodies:
            raise ValueError(f"expected an attribute {key} that names a computation")
        return self.bodies[named[0]]

    def number(self, key: str, default: int) -> int:
        """Return an integer attribute."""
        return integer(self.attributes[key]) if key in self.attributes else default


def _precision(op: _OperationContext) -> Precision:
    """Return the precision of a matmul or convolution, including attributes that are not in the HLO
    specification (``frontend_attributes``).
    """
    algorithm = op.attributes.get("algorithm", "dot_unset")
    if algorithm != "dot_unset":
        multiplying = named_algorithm(algorithm)
    else:
        levels = names(op.attributes.get("operand_precision"))
        multiplying = config_precision(levels) if levels else Precision()
    return with_macs(multiplying, fields(op.attributes.get("frontend_attributes", "")))


def _dot(op: _OperationContext) -> DotAttributes:
    keys = ("lhs_batch_dims", "rhs_batch_dims", "lhs_contracting_dims", "rhs_contracting_dims")
    dim_lists = [ints(op.attributes.get(key)) for key in keys]
    for position, (dims, operand) in enumerate(zip(dim_lists, (0, 1, 0, 1), strict=True)):
        if any(not 0 <= dim < len(op.operands[operand].shape) for dim in dims):
            raise ValueError(f"expected dimensions of the operand in {keys[position]}")
    return DotAttributes(dim_lists[0], dim_lists[1], dim_lists[2], dim_lists[3], _precision(op))


def _spatial(labels: Mapping[str, int]) -> tuple[int, ...]:
    """Return the positions of the spatial dimensions 0, 1, ... of one operand."""
    return tuple(
        labels[label] for label in sorted(labels, key=lambda text: (len(text), text)) if label.isdigit()
    )


def _convolution(op: _OperationContext) -> ConvAttributes:
    source, kernel, output = dim_labels(op.attributes.get("dim_labels", ""))
    dims = window(op.attributes.get("window"))
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
        feature_groups=op.number("feature_group_count", 1),
        batch_groups=op.number("batch_group_count", 1),
        precision=_precision(op),
    )


def _select_and_scatter(op: _OperationContext) -> SelectScatterAttributes:
    elements = prod(dim.size for dim in window(op.attributes.get("window")))
    return SelectScatterAttributes(op.body("select"), op.body("scatter"), elements)


def _sort(op: _OperationContext) -> BodyAttributes:
    along = ints(op.attributes.get("dimensions"))
    shape = op.operands[0].shape
    extent = shape[along[0]] if along else shape[-1]
    return BodyAttributes(op.body(), extent)


def _custom_call(op: _OperationContext) -> CustomAttributes:
    target = unquote(op.attributes.get("custom_call_target", ""))
    config = unquote(op.attributes.get("backend_config", ""))
    conv = _convolution(op) if "dim_labels" in op.attributes else None
    return CustomAttributes(target, config, conv)


_ATTRIBUTES: dict[str, Callable[[_OperationContext], Attributes]] = {
    "dot": _dot,
    "scaled-dot": _dot,
    "ragged-dot": lambda op: RaggedDotAttributes(
        _dot(op), next(iter(ints(op.attributes.get("lhs_ragged_dims"))), 0)
    ),
    "convolution": _convolution,
    "reduce": lambda op: BodyAttributes(op.body()),
    "reduce-window": lambda op: WindowAttributes(op.body(), window(op.attributes.get("window"))),
    "select-and-scatter": _select_and_scatter,
    "scatter": lambda op: ScatterAttributes(op.body(), max((len(op.operands) - 1) // 2, 1), op.in_place),
    "sort": _sort,
    "map": lambda op: BodyAttributes(op.body()),
    "fft": lambda op: FftAttributes(
        op.attributes.get("fft_type", "FFT"), ints(op.attributes.get("fft_length"))
    ),
    "topk": lambda op: TopKAttributes(op.number("k", op.results[0].shape[-1])),
    "triangular-solve": lambda op: SolveAttributes(is_true(op.attributes.get("left_side", "true"))),
    "dynamic-update-slice": lambda op: UpdateAttributes(op.in_place),
    "broadcast": lambda op: BroadcastAttributes(op.materialised),
    "custom-call": _custom_call,
}
"""Cost attributes by opcode. The costs of other opcodes follow from their tensor types."""


_MOVING = frozenset({"bitcast", "reshape", "copy", "transpose", "broadcast", "slice"})
_CALLS = frozenset({"fusion", "call"})
_CONTRACTIONS = frozenset({"dot", "convolution"})
_MAX_STEPS = 64
_WIDE, _NARROW_BITS = (DTypeKind.FLOAT, 32), 16

_Place = tuple[Computation, int]


def source_dtypes(program: HloProgram, computation: Computation, index: int) -> tuple[DType, DType] | None:
    """Return the operand types that a matmul or convolution had before the compiler converted its operands to
    f32. The instruction may also be a fusion with one matmul or convolution. Return None for others, and if
    an operand was not converted.
    """
    inside, product, callers = computation, index, list[_Place]()
    if computation.opcodes[index] in _CALLS:
        callers.append((computation, index))
        body = _callee(program, (computation, index))
        products = (
            [number for number, opcode in enumerate(body.opcodes) if opcode in _CONTRACTIONS] if body else []
        )
        if body is None or len(products) != 1:
            return None
        inside, product = body, products[0]
    if inside.opcodes[product] not in _CONTRACTIONS:
        return None
    sources = [_narrow(program, (inside, operand), callers) for operand in inside.operands[product][:2]]
    lhs, rhs = sources if len(sources) == 2 else (None, None)
    return None if lhs is None or rhs is None else (lhs, rhs)


def widens(program: HloProgram, computation: Computation, index: int) -> bool:
    """Return True if an instruction is a conversion between narrow types and f32 that the compiler inserted
    for its own use.
    """
    if computation.opcodes[index] == "fusion":
        body = _callee(program, (computation, index))
        work = [number for number, opcode in enumerate(body.opcodes) if opcode != "parameter"] if body else []
        if body is None or not work or any(body.opcodes[at] not in {*_MOVING, "convert"} for at in work):
            return False
        converts = [(body, at) for at in work if body.opcodes[at] == "convert"]
        return bool(converts) and all(_is_compilers(program, convert) for convert in converts)
    return computation.opcodes[index] == "convert" and _is_compilers(program, (computation, index))


def _narrow(program: HloProgram, at: _Place, callers: list[_Place]) -> DType | None:
    """Return the type of a value before the compiler converted it to f32. The conversion is searched
    backwards through views and fusions. Return None if there is none.
    """
    callers = list(callers)
    kind = _dtype(program, at)
    if kind is None or (kind.kind, kind.bits) != _WIDE:
        return None
    for _ in range(_MAX_STEPS):
        if at[0].opcodes[at[1]] == "convert":
            source = (at[0], at[0].operands[at[1]][0])
            return _dtype(program, source) if _is_compilers(program, at) else None
        # Follow instructions that pass a value on unchanged; stop at one that computes.
        computation, index = at
        opcode, operands = computation.opcodes[index], computation.operands[index]
        onward: _Place | None
        if opcode in _MOVING and operands:
            onward = computation, operands[0]
        elif opcode == "parameter" and callers:
            caller, caller_at = callers.pop()
            number = program.parameter_number(computation, index)
            given = caller.operands[caller_at]
            onward = (caller, given[number]) if 0 <= number < len(given) else None
        elif opcode == "get-tuple-element" and operands:
            onward = _element(program, at, callers)
        else:
            body = _callee(program, at) if opcode in _CALLS else None
            if body is None:
                onward = None
            else:
                callers.append(at)
                onward = body, body.root
        if onward is None:
            return None
        at = onward
    return None


def _element(program: HloProgram, place: _Place, callers: list[_Place]) -> _Place | None:
    """Return the instruction inside a fusion or call that produces the element read by a
    ``get-tuple-element``.
    """
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
    """Return True if the compiler inserted a conversion between a 16-bit or smaller float and f32."""
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
