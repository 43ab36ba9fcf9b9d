"""The attributes and bodies of an operation as its cost rule needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isnan, nan, prod
from types import ModuleType
from typing import TYPE_CHECKING, cast

from hespas.converters.stablehlo.communication import COMMUNICATION
from hespas.converters.stablehlo.dataflow import Lifetimes, TripCounter
from hespas.converters.stablehlo.mlir import (
    Attribute,
    Bindings,
    Block,
    Operation,
    Region,
    Type,
    Value,
    enum_name,
    int_of,
    int_tuple,
    is_true,
    members_of,
    string_in,
    text_of,
)
from hespas.converters.stablehlo.types import Memo, TypeTable, price, table_name
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

__all__ = ["CALLEES", "AttributeReader"]

_SINGLE_OP = 2
_MAX_DEPTH = 100
_UNKNOWN = Cost(OpClass.UNKNOWN, nan, nan, nan)
_DIALECTS = ("stablehlo", "mhlo")
CALLEES: dict[str, str] = {
    "func.call": "callee",
    **{f"{dialect}.composite": "decomposition" for dialect in _DIALECTS},
    **{f"{dialect}.async_start": "called_computation" for dialect in _DIALECTS},
}
"""Operations that run a function, and the attribute that names it."""

_STRUCTURE = frozenset(
    {
        *CALLEES,
        *(f"{dialect}.{name}" for dialect in _DIALECTS for name in ("while", "case", "if")),
        "sdy.manual_computation",
        "sdy.named_computation",
        "mhlo.fusion",
    }
)
"""Operations that cost what they run."""

_RETURNS = frozenset({"stablehlo.return", "mhlo.return", "func.return"})


class AttributeReader:
    """Decodes them; what depends on attributes alone is decoded once for equal attributes."""

    def __init__(
        self,
        bindings: Bindings,
        types: TypeTable,
        lifetimes: Lifetimes,
        function_body: Callable[[str], Block | None],
        trips: TripCounter,
    ) -> None:
        self._bindings = bindings
        self._function_body = function_body
        self._trips = trips
        self._functions: dict[str, Cost] = {}
        self._types = types
        self._lifetimes = lifetimes
        self._dots: dict[tuple[Attribute | None, ...], DotAttributes] = {}
        self._bodies: dict[tuple[str, tuple[Type, ...]], Body] = {}
        self._convolutions: dict[tuple[object, ...], ConvAttributes] = {}
        self.plans = Memo(self._plan)
        self._readers: dict[str, Callable[[Operation], Attributes]] = {
            "dot_general": self._dot,
            "dot": self._legacy_dot,
            "ragged_dot": self._ragged_dot,
            "einsum": self._einsum,
            "unary_einsum": self._einsum,
            "convolution": self.convolution,
            "dynamic_conv": self.convolution,
            "reduce": self._reduce,
            "reduce_window": self._reduce_window,
            "select_and_scatter": self._select_and_scatter,
            "map": lambda op: BodyAttributes(self.body(op.regions[0])),
            "scan": self._scan,
            "sort": self._sort,
            "top_k": lambda op: TopKAttributes(int_of(op, "k")),
            "topk": lambda op: TopKAttributes(int_of(op, "k")),
            "scatter": self._scatter,
            "dynamic_update_slice": lambda op: UpdateAttributes(self._lifetimes.dies_here(op, (0,))),
            "fft": self._fft,
            "triangular_solve": lambda op: SolveAttributes(is_true(op, "left_side", default=True)),
            "custom_call": self._custom_call,
        }

    def _plan(self, name: str) -> tuple[str, bool, bool]:
        """How to read an operation, by its full name: the table's name, whether its cost needs attributes,
        whether it talks to other devices.
        """
        canonical = table_name(name)
        return canonical, canonical in self._readers, canonical in COMMUNICATION

    @property
    def advance(self) -> object:
        """What a visitor of :meth:`Operation.walk` returns to go on."""
        return cast("object", self._bindings.ir.WalkResult.ADVANCE)

    def read(self, canonical: str, op: Operation) -> Attributes:
        """The attributes of one operation, None where types say it all."""
        reader = self._readers.get(canonical)
        return None if reader is None else reader(op)

    def body(self, region: Region) -> Body:
        """What one application of a scalar computation costs, with what it calls."""
        return self._block(region.blocks[0], 0) if len(region.blocks) else Body(nan, nan)

    def _block(self, block: Block, depth: int) -> Body:
        operations = [view.operation for view in block.operations]
        if len(operations) == _SINGLE_OP and operations[0].name not in _STRUCTURE:
            return self._single(operations[0])
        names: list[str] = []
        flops, transcendentals = 0.0, 0.0
        used: set[Value] = set()
        for op in operations:
            used.update(op.operands)
            if op.name in _RETURNS:
                continue
            cost = self.executed(op, depth)
            flops += cost.flops
            transcendentals += cost.transcendentals
            if op.name == "func.call":
                names.append(self._called_name(op, depth))
            elif cost.op_class is not OpClass.GENERATE:
                names.append(table_name(op.name) or "custom")
        name = names[0] if len(names) == 1 else "custom" if names else ""
        arguments = list(block.arguments)
        reads_first = not arguments or any(value in used for value in arguments[: len(arguments) // 2])
        return Body(flops, transcendentals, name, reads_first)

    def _called_name(self, call: Operation, depth: int) -> str:
        block = self._function_body(text_of(call, "callee"))
        return "custom" if block is None else self._block(block, depth + 1).name

    def executed(self, op: Operation, depth: int = 0) -> Cost:
        """The cost of one operation with all that it runs: functions it calls, loops, its costliest branch.

        Raises ``FormatError`` where that goes on without end.
        """
        if op.name not in _STRUCTURE:
            return self.cost(op)
        if depth > _MAX_DEPTH:
            raise FormatError(
                f"calls and regions within a computation go more than {_MAX_DEPTH} deep",
                hint="do functions call one another in a cycle?",
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
            return max(parts, key=_weight)
        total = _summed(parts)
        return _repeated(total, self._trips.trips(op)) if op.name.endswith(".while") else total

    def _all_of(self, block: Block, depth: int) -> Cost:
        operations = [view.operation for view in block.operations]
        return _summed([self.executed(op, depth) for op in operations if op.name not in _RETURNS])

    def _single(self, op: Operation) -> Body:
        """The body that is one operation and its return; equal ones are computed once."""
        types = tuple([value.type for value in op.operands])
        key = (op.name, types)
        body = self._bodies.get(key)
        if body is None:
            cost = self.cost(op)
            makes_nothing = cost.op_class is OpClass.GENERATE
            name = "" if makes_nothing else table_name(op.name) or "custom"
            body = self._bodies[key] = Body(cost.flops, cost.transcendentals, name, len(types) > 1)
        return body

    def cost(self, op: Operation) -> Cost:
        """The cost of one operation by itself."""
        operands = list(op.operands)
        repeated = tuple(place for place, value in enumerate(operands) if value in operands[:place])
        described = CostInput(
            tuple(tensor for value in operands for tensor in self._types.get(value.type).tensors),
            tuple(tensor for value in op.results for tensor in self._types.get(value.type).tensors),
            self.read(table_name(op.name), op),
            repeated,
        )
        return price(op.name, described)

    def _dialect(self, op: Operation) -> ModuleType:
        return self._bindings.dialect_of(op.name)

    def _precision(self, op: Operation) -> Precision:
        """How exactly an operation multiplies, and what it states beside the specification."""
        return with_macs(self._multiplying(op), _mac_attributes(op))

    def _multiplying(self, op: Operation) -> Precision:
        algorithm = op.attributes.get("algorithm")
        if algorithm is not None:
            found = cast("DotAlgorithm", self._bindings.stablehlo.DotAlgorithm(algorithm))
            return Precision(
                find_dtype(str(found.lhs_precision_type)),
                find_dtype(str(found.rhs_precision_type)),
                find_dtype(str(found.accumulation_type)),
                found.num_primitive_operations,
                "ALGORITHM",
            )
        levels = members_of(op, "precision_config")
        dialects = (self._bindings.stablehlo, self._bindings.mhlo)
        return config_precision(tuple(enum_name(level, "PrecisionAttr", *dialects) for level in levels))

    def _dot(self, op: Operation) -> Attributes:
        names = ("dot_dimension_numbers", "precision_config", "algorithm", *_MAC_ATTRIBUTES)
        key = tuple(op.attributes.get(name) for name in names)
        attributes = self._dots.get(key)
        if attributes is None:
            dims = cast("DotDimensionNumbers", self._dialect(op).DotDimensionNumbers(key[0]))
            attributes = self._dots[key] = _dot_attributes(dims, self._precision(op))
        return attributes

    def _legacy_dot(self, op: Operation) -> Attributes:
        rank = len(self._types.get(op.operands[0].type).tensors[0].shape)
        return DotAttributes((), (), (rank - 1,), (0,), self._precision(op))

    def _ragged_dot(self, op: Operation) -> Attributes:
        attribute = op.attributes.get("ragged_dot_dimension_numbers")
        decoder = self._bindings.chlo if op.name.startswith("chlo.") else self._bindings.mhlo
        if not hasattr(decoder, "RaggedDotDimensionNumbers"):
            return None
        dims = cast("RaggedDotDimensionNumbers", decoder.RaggedDotDimensionNumbers(attribute))
        ragged = dims.lhs_ragged_dimensions
        return RaggedDotAttributes(_dot_attributes(dims, self._precision(op)), ragged[0] if ragged else -1)

    def _einsum(self, op: Operation) -> Attributes:
        return EinsumAttributes(text_of(op, "einsum_config"))

    def convolution(self, op: Operation) -> ConvAttributes:
        """Dimension numbers and window of a convolution."""
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
            attributes = self._conv_attributes(op, dims, sizes)
            self._convolutions[(*key, op.operands[1].type)] = attributes
        return attributes

    def _conv_attributes(
        self, op: Operation, dims: ConvDimensionNumbers, sizes: Sequence[int]
    ) -> ConvAttributes:
        return ConvAttributes(
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

    def _reduce(self, op: Operation) -> Attributes:
        return BodyAttributes(self.body(op.regions[0]))

    def _reduce_window(self, op: Operation) -> Attributes:
        sizes = int_tuple(op, "window_dimensions")
        window = _window(op, sizes, "window_strides", "base_dilations", "window_dilations")
        return WindowAttributes(self.body(op.regions[0]), window)

    def _select_and_scatter(self, op: Operation) -> Attributes:
        window = prod(int_tuple(op, "window_dimensions"))
        return SelectScatterAttributes(self.body(op.regions[0]), self.body(op.regions[1]), window)

    def _sort(self, op: Operation) -> Attributes:
        shape = self._types.get(op.operands[0].type).tensors[0].shape
        dimension = int_of(op, "dimension", -1)
        return BodyAttributes(self.body(op.regions[0]), shape[dimension] if shape else 1)

    def _scan(self, op: Operation) -> Attributes:
        shape = self._types.get(op.operands[0].type).tensors[0].shape if len(op.operands) else ()
        dimension = int_of(op, "dimension", -1)
        trips = shape[dimension] if 0 <= dimension < len(shape) else int_of(op, "scan_dim_size", -1)
        return BodyAttributes(self.body(op.regions[0]), trips)

    def _scatter(self, op: Operation) -> Attributes:
        inputs = max((len(op.operands) - 1) // 2, 1)
        in_place = self._lifetimes.dies_here(op, tuple(range(inputs)))
        return ScatterAttributes(self.body(op.regions[0]), inputs, in_place)

    def _fft(self, op: Operation) -> Attributes:
        dialects = (self._bindings.stablehlo, self._bindings.mhlo)
        kind = enum_name(op.attributes.get("fft_type"), "FftTypeAttr", *dialects)
        return FftAttributes(kind, int_tuple(op, "fft_length"))

    def _custom_call(self, op: Operation) -> Attributes:
        name = "backend_config" if "backend_config" in op.attributes else "mhlo.backend_config"
        return CustomAttributes(text_of(op, "call_target_name"), text_of(op, name))


def _summed(costs: Sequence[Cost]) -> Cost:
    """Costs together, as of one operation; bytes too, which a fusion replaces by those of its operands."""
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


def _repeated(cost: Cost, times: float) -> Cost:
    """A cost several times; what a product is per trip is no single product of all of them."""
    figures = (cost.flops, cost.useful_flops, cost.transcendentals, cost.bytes_read, cost.bytes_written)
    flops, useful, transcendentals, read, written = (figure * times for figure in figures)
    return Cost(cost.op_class, flops, useful, transcendentals, read, written, cost.rate_dtype)


def _weight(cost: Cost) -> float:
    """What a branch counts as where the costliest is chosen; what is unknown counts most."""
    return inf if isnan(cost.flops) else branch_ns(cost, is_kernel=False)


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


def _window(op: Operation, sizes: Sequence[int], strides: str, lhs: str, rhs: str) -> tuple[WindowDim, ...]:
    """The window of a convolution or windowed reduction; absent attributes mean 1, padding 0.

    MLIR holds ``dynamic_conv`` to one value per dimension only where it knows the padding: what is beyond
    belongs to no dimension.
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


# Attributes of multiply-accumulate units: see :mod:`hespas.costs.contraction`.
#
# They stand at the operation, with or without the prefix ``hespas.``, or as texts among its
# ``mhlo.frontend_attributes``, which compilers keep.

_FRONTEND = "mhlo.frontend_attributes"
_SPELLINGS = {name: (name, f"hespas.{name}") for name in (ACCUMULATOR_BITS, MAC_NOISE_SIGMA)}

_MAC_ATTRIBUTES: tuple[str, ...] = (*(each for names in _SPELLINGS.values() for each in names), _FRONTEND)
"""Attributes that may say so."""


def _mac_attributes(op: Operation) -> dict[str, str]:
    """What an operation states, as texts; the operation's own attributes come first."""
    attributes = op.attributes
    frontend = attributes.get(_FRONTEND)
    entries = None if frontend is None else cast("ir.DictAttr", frontend)
    found: dict[str, str] = {}
    for name, spellings in _SPELLINGS.items():
        if entries is not None and name in entries:
            found[name] = _text(entries[name])
        for spelling in spellings:
            attribute = attributes.get(spelling)
            if attribute is not None:
                found[name] = _text(attribute)
    return found


def _text(attribute: Attribute) -> str:
    """A number without its type (``12``, not ``12 : i64``), or a text."""
    value = getattr(attribute, "value", None)
    return str(value) if isinstance(value, int | float) else string_in(attribute)
