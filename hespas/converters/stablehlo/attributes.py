"""Reader of an operation's attributes and regions, for the cost rules.

Attributes of multiply-accumulate units (:mod:`hespas.costs.contraction`) are attributes of the operation,
with or without the prefix ``hespas.``, or texts in its ``mhlo.frontend_attributes``, which compilers
preserve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, isnan, nan, prod
from types import ModuleType
from typing import TYPE_CHECKING, cast

from hespas.converters.stablehlo.communication import COMMUNICATION
from hespas.converters.stablehlo.mlir import (
    Bindings,
    MlirAttribute,
    MlirBlock,
    MlirOperation,
    MlirRegion,
    MlirType,
    MlirValue,
    argument_block,
    defining_op,
    enum_name,
    int_of,
    int_tuple,
    is_true,
    members_of,
    string_in,
    text_of,
)
from hespas.converters.stablehlo.node_rows import price, table_name
from hespas.converters.stablehlo.trips import TripCounter
from hespas.converters.stablehlo.types import Memo, TypeTable
from hespas.costs.contraction import config_precision, with_macs
from hespas.costs.operation import (
    Attributes,
    Body,
    BodyAttributes,
    ConvAttributes,
    Cost,
    CustomAttributes,
    DotAttributes,
    EinsumAttributes,
    FftAttributes,
    Precision,
    RaggedDotAttributes,
    ScatterAttributes,
    SelectScatterAttributes,
    SolveAttributes,
    TopKAttributes,
    UpdateAttributes,
    WindowAttributes,
    WindowDim,
    branch_ns,
)
from hespas.costs.operation import Operation as CostInput
from hespas.graph import ACCUMULATOR_BITS, MAC_NOISE_SIGMA, OpClass, find_dtype
from hespas.graph.errors import FormatError

if TYPE_CHECKING:
    from jaxlib.mlir._mlir_libs._chlo import RaggedDotDimensionNumbers
    from jaxlib.mlir._mlir_libs._mlir import ir
    from jaxlib.mlir._mlir_libs._stablehlo import ConvDimensionNumbers, DotAlgorithm, DotDimensionNumbers

__all__ = ["CALLEES", "CONSTANTS", "BufferLifetimes", "CostAttributeReader"]

_SINGLE_OP = 2
_MAX_DEPTH = 100
_UNKNOWN = Cost(OpClass.UNKNOWN, nan, nan, nan)
_DIALECTS = ("stablehlo", "mhlo")
CALLEES: dict[str, str] = {
    "func.call": "callee",
    **{f"{dialect}.composite": "decomposition" for dialect in _DIALECTS},
    **{f"{dialect}.async_start": "called_computation" for dialect in _DIALECTS},
}
"""Operations that run a function, and the attribute with its name."""

_STRUCTURE = frozenset(
    {
        *CALLEES,
        *(f"{dialect}.{name}" for dialect in _DIALECTS for name in ("while", "case", "if")),
        "sdy.manual_computation",
        "sdy.named_computation",
        "mhlo.fusion",
    }
)
"""Operations whose cost is the cost of the operations they run."""

_RETURNS = frozenset({"stablehlo.return", "mhlo.return", "func.return"})


class CostAttributeReader:
    """Reader of the attributes that cost rules need. Equal attributes are decoded once, if the result depends
    on nothing else.
    """

    def __init__(
        self,
        bindings: Bindings,
        types: TypeTable,
        lifetimes: BufferLifetimes,
        function_body: Callable[[str], MlirBlock | None],
        trips: TripCounter,
    ) -> None:
        self._bindings = bindings
        self._function_body = function_body
        self._trips = trips
        self._functions: dict[str, Cost] = {}
        self._types = types
        self._lifetimes = lifetimes
        self._dots: dict[tuple[MlirAttribute | None, ...], DotAttributes] = {}
        self._bodies: dict[tuple[str, tuple[MlirType, ...]], Body] = {}
        self._convolutions: dict[tuple[object, ...], ConvAttributes] = {}
        self.plans = Memo(self._plan)
        self._readers: dict[str, Callable[[MlirOperation], Attributes]] = {
            "dot_general": self._dot,
            "dot": self._legacy_dot,
            "ragged_dot": self._ragged_dot,
            "einsum": self._einsum,
            "unary_einsum": self._einsum,
            "convolution": self.convolution,
            "dynamic_conv": self.convolution,
            "reduce": lambda op: BodyAttributes(self.body(op.regions[0])),
            "reduce_window": self._reduce_window,
            "select_and_scatter": lambda op: SelectScatterAttributes(
                self.body(op.regions[0]), self.body(op.regions[1]), prod(int_tuple(op, "window_dimensions"))
            ),
            "map": lambda op: BodyAttributes(self.body(op.regions[0])),
            "scan": self._scan,
            "sort": self._sort,
            "top_k": lambda op: TopKAttributes(int_of(op, "k")),
            "topk": lambda op: TopKAttributes(int_of(op, "k")),
            "scatter": self._scatter,
            "dynamic_update_slice": lambda op: UpdateAttributes(self._lifetimes.dies_here(op, (0,))),
            "fft": self._fft,
            "triangular_solve": lambda op: SolveAttributes(is_true(op, "left_side", default=True)),
            "custom_call": lambda op: CustomAttributes(
                text_of(op, "call_target_name"),
                text_of(op, "backend_config")
                if "backend_config" in op.attributes
                else text_of(op, "mhlo.backend_config"),
            ),
        }

    def _plan(self, name: str) -> tuple[str, bool, bool]:
        """Return three properties of the operation ``name``: the name in the cost table, True if the cost
        depends on attributes, and True if the operation communicates.
        """
        canonical = table_name(name)
        return canonical, canonical in self._readers, canonical in COMMUNICATION

    @property
    def advance(self) -> object:
        """Return the constant that a visitor of :meth:`MlirOperation.walk` returns to continue the walk."""
        return cast("object", self._bindings.ir.WalkResult.ADVANCE)

    def read(self, canonical: str, op: MlirOperation) -> Attributes:
        """Return the attributes of one operation, None if its types determine the cost."""
        reader = self._readers.get(canonical)
        return None if reader is None else reader(op)

    def body(self, region: MlirRegion) -> Body:
        """Return the cost of one application of a scalar region, such as the reducer of a reduction.
        Functions that the region calls are included.
        """
        return self._block(region.blocks[0], 0) if len(region.blocks) else Body(nan, nan)

    def _block(self, block: MlirBlock, depth: int) -> Body:
        operations = [view.operation for view in block.operations]
        if len(operations) == _SINGLE_OP and operations[0].name not in _STRUCTURE:
            operation = operations[0]
            operand_types = tuple([value.type for value in operation.operands])
            key = (operation.name, operand_types)
            single = self._bodies.get(key)
            if single is None:
                single_cost = self.cost(operation)
                makes_nothing = single_cost.op_class is OpClass.GENERATE
                single_name = "" if makes_nothing else table_name(operation.name) or "custom"
                single = self._bodies[key] = Body(
                    single_cost.flops, single_cost.transcendentals, single_name, len(operand_types) > 1
                )
            return single
        names: list[str] = []
        flops, transcendentals = 0.0, 0.0
        used: set[MlirValue] = set()
        for op in operations:
            used.update(op.operands)
            if op.name in _RETURNS:
                continue
            cost = self.executed(op, depth)
            flops += cost.flops
            transcendentals += cost.transcendentals
            if op.name == "func.call":
                callee_body = self._function_body(text_of(op, "callee"))
                names.append("custom" if callee_body is None else self._block(callee_body, depth + 1).name)
            elif cost.op_class is not OpClass.GENERATE:
                names.append(table_name(op.name) or "custom")
        name = names[0] if len(names) == 1 else "custom" if names else ""
        arguments = list(block.arguments)
        reads_first = not arguments or any(value in used for value in arguments[: len(arguments) // 2])
        return Body(flops, transcendentals, name, reads_first)

    def executed(self, op: MlirOperation, depth: int = 0) -> Cost:
        """Return the cost of one operation and of everything that it executes: called functions, all loop
        iterations, or the most expensive branch.

        Raises ``FormatError`` for endless recursion.
        """
        if op.name not in _STRUCTURE:
            return self.cost(op)
        if depth > _MAX_DEPTH:
            raise FormatError(
                f"calls and regions within a computation go more than {_MAX_DEPTH} deep",
                hint="check that functions do not call one another in a cycle",
            )
        callee = text_of(op, CALLEES[op.name]) if op.name in CALLEES else ""
        if callee:
            if callee not in self._functions:
                block = self._function_body(callee)
                self._functions[callee] = _UNKNOWN if block is None else self._all_of(block, depth + 1)
            return self._functions[callee]
        parts = [self._all_of(region.blocks[0], depth + 1) for region in op.regions if len(region.blocks)]
        if not parts:
            return _UNKNOWN
        if op.name.endswith((".case", ".if")):
            # Unknown branches are the most expensive ones.
            return max(
                parts,
                key=lambda cost: inf if isnan(cost.flops) else branch_ns(cost, is_kernel=False),
            )
        total = _summed(parts)
        if not op.name.endswith(".while"):
            return total
        trips = self._trips.trips(op)  # the matmuls of one iteration are not kept
        return Cost(
            total.op_class,
            total.flops * trips,
            total.useful_flops * trips,
            total.transcendentals * trips,
            total.bytes_read * trips,
            total.bytes_written * trips,
            total.rate_dtype,
        )

    def _all_of(self, block: MlirBlock, depth: int) -> Cost:
        operations = [view.operation for view in block.operations]
        return _summed([self.executed(op, depth) for op in operations if op.name not in _RETURNS])

    def cost(self, op: MlirOperation) -> Cost:
        """Return the cost of one operation, without the functions and regions that it executes."""
        operands = list(op.operands)
        repeated = tuple(position for position, value in enumerate(operands) if value in operands[:position])
        described = CostInput(
            tuple(tensor for value in operands for tensor in self._types.get(value.type).tensors),
            tuple(tensor for value in op.results for tensor in self._types.get(value.type).tensors),
            self.read(table_name(op.name), op),
            repeated,
        )
        return price(op.name, described)

    def _dialect(self, op: MlirOperation) -> ModuleType:
        return self._bindings.dialect_of(op.name)

    def _precision(self, op: MlirOperation) -> Precision:
        """Return the precision of a matmul or convolution, and its attributes about narrow or analogue
        accumulators.
        """
        own = op.attributes
        frontend = own.get(_FRONTEND)
        entries = None if frontend is None else cast("ir.DictAttr", frontend)
        statements: dict[str, str] = {}
        for name, spellings in _SPELLINGS.items():
            if entries is not None and name in entries:
                statements[name] = _text(entries[name])
            for spelling in spellings:
                attribute = own.get(spelling)
                if attribute is not None:
                    statements[name] = _text(attribute)
        return with_macs(self._multiplying(op), statements)

    def _multiplying(self, op: MlirOperation) -> Precision:
        algorithm = op.attributes.get("algorithm")
        if algorithm is not None:
            decoded = cast("DotAlgorithm", self._bindings.stablehlo.DotAlgorithm(algorithm))
            return Precision(
                find_dtype(str(decoded.lhs_precision_type)),
                find_dtype(str(decoded.rhs_precision_type)),
                find_dtype(str(decoded.accumulation_type)),
                decoded.num_primitive_operations,
                "ALGORITHM",
            )
        levels = members_of(op, "precision_config")
        dialects = (self._bindings.stablehlo, self._bindings.mhlo)
        return config_precision(tuple(enum_name(level, "PrecisionAttr", *dialects) for level in levels))

    def _dot(self, op: MlirOperation) -> Attributes:
        names = ("dot_dimension_numbers", "precision_config", "algorithm", *_MAC_ATTRIBUTES)
        key = tuple(op.attributes.get(name) for name in names)
        attributes = self._dots.get(key)
        if attributes is None:
            dims = cast("DotDimensionNumbers", self._dialect(op).DotDimensionNumbers(key[0]))
            attributes = self._dots[key] = _dot_attributes(dims, self._precision(op))
        return attributes

    def _legacy_dot(self, op: MlirOperation) -> Attributes:
        rank = len(self._types.get(op.operands[0].type).tensors[0].shape)
        return DotAttributes((), (), (rank - 1,), (0,), self._precision(op))

    def _ragged_dot(self, op: MlirOperation) -> Attributes:
        attribute = op.attributes.get("ragged_dot_dimension_numbers")
        decoder = self._bindings.chlo if op.name.startswith("chlo.") else self._bindings.mhlo
        if not hasattr(decoder, "RaggedDotDimensionNumbers"):
            return None
        dims = cast("RaggedDotDimensionNumbers", decoder.RaggedDotDimensionNumbers(attribute))
        ragged = dims.lhs_ragged_dimensions
        return RaggedDotAttributes(_dot_attributes(dims, self._precision(op)), ragged[0] if ragged else -1)

    def _einsum(self, op: MlirOperation) -> Attributes:
        return EinsumAttributes(text_of(op, "einsum_config"))

    def convolution(self, op: MlirOperation) -> ConvAttributes:
        """Return dimension numbers and window of a convolution."""
        names = (
            "dimension_numbers window_strides padding lhs_dilation rhs_dilation feature_group_count "
            "batch_group_count precision_config"
        )
        key = tuple(op.attributes.get(name) for name in (*names.split(), *_MAC_ATTRIBUTES))
        kernel = self._types.get(op.operands[1].type).tensors[0].shape
        attributes = self._convolutions.get((*key, op.operands[1].type))
        if attributes is None:
            dims = cast("ConvDimensionNumbers", self._dialect(op).ConvDimensionNumbers(key[0]))
            sizes = [kernel[dim] for dim in dims.kernel_spatial_dimensions]
            attributes = ConvAttributes(
                dims.input_batch_dimension,
                dims.input_feature_dimension,
                tuple(dims.input_spatial_dimensions),
                dims.kernel_input_feature_dimension,
                dims.kernel_output_feature_dimension,
                tuple(dims.kernel_spatial_dimensions),
                dims.output_batch_dimension,
                dims.output_feature_dimension,
                tuple(dims.output_spatial_dimensions),
                _window(op, sizes, "window_strides", "lhs_dilation", "rhs_dilation"),
                int_of(op, "feature_group_count", 1),
                int_of(op, "batch_group_count", 1),
                self._precision(op),
            )
            self._convolutions[(*key, op.operands[1].type)] = attributes
        return attributes

    def _reduce_window(self, op: MlirOperation) -> Attributes:
        sizes = int_tuple(op, "window_dimensions")
        window = _window(op, sizes, "window_strides", "base_dilations", "window_dilations")
        return WindowAttributes(self.body(op.regions[0]), window)

    def _sort(self, op: MlirOperation) -> Attributes:
        shape = self._types.get(op.operands[0].type).tensors[0].shape
        dimension = int_of(op, "dimension", -1)
        return BodyAttributes(self.body(op.regions[0]), shape[dimension] if shape else 1)

    def _scan(self, op: MlirOperation) -> Attributes:
        shape = self._types.get(op.operands[0].type).tensors[0].shape if len(op.operands) else ()
        dimension = int_of(op, "dimension", -1)
        trips = shape[dimension] if 0 <= dimension < len(shape) else int_of(op, "scan_dim_size", -1)
        return BodyAttributes(self.body(op.regions[0]), trips)

    def _scatter(self, op: MlirOperation) -> Attributes:
        inputs = max((len(op.operands) - 1) // 2, 1)
        in_place = self._lifetimes.dies_here(op, tuple(range(inputs)))
        return ScatterAttributes(self.body(op.regions[0]), inputs, in_place)

    def _fft(self, op: MlirOperation) -> Attributes:
        dialects = (self._bindings.stablehlo, self._bindings.mhlo)
        kind = enum_name(op.attributes.get("fft_type"), "FftTypeAttr", *dialects)
        return FftAttributes(kind, int_tuple(op, "fft_length"))


def _summed(costs: Sequence[Cost]) -> Cost:
    """Return the sum of ``costs`` as the cost of one fusion.

    The byte counts include values inside the fusion. Callers replace them by the bytes of the fusion's
    operands and results.
    """
    total = Cost(OpClass.FUSION)
    for cost in costs:
        keeps_rate = bool(total.contractions) or cost.rate_dtype < 0
        total = Cost(
            OpClass.FUSION,
            total.flops + cost.flops,
            total.useful_flops + cost.useful_flops,
            total.transcendentals + cost.transcendentals,
            total.bytes_read + cost.bytes_read,
            total.bytes_written + cost.bytes_written,
            total.rate_dtype if keeps_rate else cost.rate_dtype,
            (*total.contractions, *cost.contractions),
        )
    return total


def _dot_attributes(
    dims: DotDimensionNumbers | RaggedDotDimensionNumbers, precision: Precision
) -> DotAttributes:
    return DotAttributes(
        tuple(dims.lhs_batching_dimensions),
        tuple(dims.rhs_batching_dimensions),
        tuple(dims.lhs_contracting_dimensions),
        tuple(dims.rhs_contracting_dimensions),
        precision,
    )


def _window(
    op: MlirOperation, sizes: Sequence[int], strides: str, lhs: str, rhs: str
) -> tuple[WindowDim, ...]:
    """Return the window of a convolution or windowed reduction. Absent strides and dilations are 1, absent
    padding is 0.

    MLIR checks that ``dynamic_conv`` has one value per dimension only if it knows the padding. Excess values
    are ignored.
    """
    pads = int_tuple(op, "padding")
    columns = (
        (int_tuple(op, strides), 1),
        (pads[::2], 0),
        (pads[1::2], 0),
        (int_tuple(op, lhs), 1),
        (int_tuple(op, rhs), 1),
    )
    rows = zip(sizes, *((*values, *[absent] * len(sizes)) for values, absent in columns), strict=False)
    return tuple(WindowDim(*row) for row in rows)


_FRONTEND = "mhlo.frontend_attributes"
_SPELLINGS = {name: (name, f"hespas.{name}") for name in (ACCUMULATOR_BITS, MAC_NOISE_SIGMA)}

_MAC_ATTRIBUTES: tuple[str, ...] = (*(name for names in _SPELLINGS.values() for name in names), _FRONTEND)
"""Attributes that may describe multiply-accumulate units."""


def _text(attribute: MlirAttribute) -> str:
    """Return the text of an attribute: a number without its type (``12``, not ``12 : i64``), or a string."""
    value = getattr(attribute, "value", None)
    return str(value) if isinstance(value, int | float) else string_in(attribute)


_MAX_CALL_DEPTH = 32

CONSTANTS = frozenset({"stablehlo.constant", "mhlo.constant", "stablehlo.iota", "mhlo.iota"})
"""Operations whose results are part of the program text."""

_FUNCTION = "func.func"


class BufferLifetimes:
    """Analysis of a module that decides if an operation can update an operand in place.

    It can if the buffer of the operand dies at the operation. That means that nothing reads the value later,
    and that the value is produced by the program, carried by a loop, or a donated argument. An argument of a
    private function dies if it dies at every call of the function. ``call_sites`` lists the call operations
    of each function.
    """

    def __init__(
        self,
        donated: frozenset[int],
        call_sites: Callable[[], Mapping[str, Sequence[MlirOperation]]],
        entry: str,
    ) -> None:
        self._donated = donated
        self._call_sites = call_sites
        self._entry = entry
        self._arguments: dict[tuple[str, int], bool] = {}

    def dies_here(self, op: MlirOperation, positions: Sequence[int]) -> bool:
        """Return True if the buffers of the operands at ``positions`` die at ``op``."""
        return all(self._dies(op, op.operands[position], 0) for position in positions)

    def _dies(self, op: MlirOperation, value: MlirValue, depth: int) -> bool:
        if _is_read_later(op, value):
            return False
        maker = defining_op(value)
        if maker is not None:
            return maker.name not in CONSTANTS
        parent = argument_block(value).owner.operation
        if parent.name != _FUNCTION:
            return True
        number = cast("ir.BlockArgument[ir.Type]", value).arg_number
        name = text_of(parent, "sym_name")
        if name == self._entry:
            return number in self._donated
        key = (name, number)
        if key not in self._arguments:
            self._arguments[key] = False
            self._arguments[key] = depth < _MAX_CALL_DEPTH and all(
                self._dies(call, call.operands[number], depth + 1)
                for call in self._call_sites().get(name, ())
            )
        return self._arguments[key]


def _is_read_later(op: MlirOperation, value: MlirValue) -> bool:
    """Return True if another operation may read a value after ``op`` has run. Uses in other blocks count as
    later.
    """
    uses_here = 0
    for use in value.uses:
        user = use.owner.operation
        if user == op:
            uses_here += 1
            continue
        if user.block != op.block or not user.is_before_in_block(op):
            return True
    return uses_here > 1
