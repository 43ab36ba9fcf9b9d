"""Recorded PyTorch operation: its name, and the shapes, types, strides and values of its inputs.

Kineto writes each of the four as a JSON list with one entry per argument, in the order of the schema. A
tensor has its extents and its element type, a list of tensors a list of extents and the type ``TensorList``,
anything else empty extents and a type such as ``Scalar``, with its value as a text. Traces before 2024 lack
strides, values and the tensors of lists. Texts are untrusted: invalid ones become unknown arguments, and
numbers are limited to the size of an address space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from math import nan, prod
from typing import NamedTuple

import msgspec

from hespas.costs.operation import FREE, Contraction, Cost, Tensor
from hespas.graph import DType, DTypeKind, OpClass, find_dtype

__all__ = [
    "FLOAT32",
    "INT64",
    "Argument",
    "AtenCost",
    "AtenRule",
    "Call",
    "Strided",
    "dense",
    "free",
    "is_integral",
    "matrix_product",
    "needs",
    "promoted",
    "read_bytes",
    "read_call",
    "scalar_type",
    "simple",
    "unknown",
]

_MOST_ELEMENTS = 1 << 62
_LARGEST_VALUE = 1 << 48
_MOST_ARGUMENTS = 4096
_MOST_DIMENSIONS = 64

_SCALAR_NAMES = """
    ui8 i8 i16 i32 i64 f16 f32 f64 complex<f32> complex<f64> i1 bf16
    f8E5M2 f8E4M3FN f8E5M2FNUZ f8E4M3FNUZ ui16 ui32 ui64
"""
_SCALAR_TYPES: dict[int, str] = dict(
    zip((*range(8), 9, 10, 11, 15, *range(23, 30)), _SCALAR_NAMES.split(), strict=True)
)
"""Code of ``c10::ScalarType`` -> element type."""


def scalar_type(code: int | None) -> DType | None:
    """Return the element type of a ``c10::ScalarType`` code."""
    return find_dtype(_SCALAR_TYPES[code]) if code in _SCALAR_TYPES else None


class Strided(NamedTuple):
    """Tensor with strides in elements. If the trace does not record strides, they are None and the tensor
    counts as dense.
    """

    dtype: DType | None
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def stored(self) -> int:
        """Return the number of distinct elements in memory: expanded dimensions (stride 0) and overlapping
        elements count once.
        """
        if self.strides is None or len(self.strides) != len(self.shape) or not self.elements:
            return self.elements
        moved = prod(n for n, stride in zip(self.shape, self.strides, strict=True) if stride)
        span = 1 + sum((n - 1) * abs(stride) for n, stride in zip(self.shape, self.strides, strict=True))
        return min(moved, span)

    @property
    def bytes(self) -> float:
        """Return the bytes of the distinct elements in memory; NaN if the element type is unknown."""
        return nan if self.dtype is None else float(self.dtype.storage_bytes(self.stored))

    @property
    def width(self) -> float:
        """Return the bytes of one element; NaN if the element type is unknown."""
        return nan if self.dtype is None else float(self.dtype.storage_bytes(1))

    @property
    def dense(self) -> Strided:
        """Return a dense tensor of the same type and shape, as for a new result."""
        return self._replace(strides=None)

    @property
    def plain(self) -> Tensor:
        """Return the shape, element type and memory order as a :class:`Tensor`, without strides."""
        return Tensor(self.dtype, self.shape, layout=self.layout)

    @property
    def layout(self) -> str:
        """Return the memory order in the notation of :class:`Tensor`."""
        if self.strides is None or len(self.strides) != len(self.shape) or self.elements <= 1:
            return ""
        order = sorted(range(len(self.shape)), key=lambda d: (self.strides_of(d), self.shape[d], -d))
        step = 1
        for dim in order:
            if self.shape[dim] != 1 and self.strides_of(dim) != step:
                return "strides " + ",".join(map(str, self.strides))
            step *= self.shape[dim]
        wide = [dim for dim in order if self.shape[dim] != 1]
        return "" if wide == sorted(wide, reverse=True) else ",".join(map(str, order))

    def strides_of(self, dim: int) -> int:
        """Return the stride of a dimension in elements; 0 where unknown."""
        return self.strides[dim] if self.strides else 0


class Argument(NamedTuple):
    """Argument of an operation. ``kind`` is its type in the trace, and ``value`` its value as text.
    ``tensors`` are its tensors; None means a list of tensors that the trace does not record.
    """

    kind: str = ""
    tensors: tuple[Strided, ...] | None = ()
    value: str = ""

    @property
    def is_tensor(self) -> bool:
        """Return True if the argument is a single tensor."""
        return self.kind != "TensorList" and self.tensors is not None and len(self.tensors) == 1


_NOTHING = Argument()


class Call(NamedTuple):
    """Recorded operation with its arguments.

    ``hint`` is the element type of lists of tensors, which traces do not record. ``has_values`` is True if
    the trace records values; an argument with an empty text then has its default value. ``step`` is the name
    of the enclosing profiler step. ``parts`` are the operations that this one calls and that its cost rule
    needs.
    """

    name: str
    args: tuple[Argument, ...]
    has_values: bool = False
    hint: DType | None = None
    step: str = ""
    parts: tuple[Call, ...] = ()

    def arg(self, position: int) -> Argument:
        """Return the argument at a position; an empty argument beyond the last one."""
        return self.args[position] if 0 <= position < len(self.args) else _NOTHING

    def tensor(self, position: int) -> Strided | None:
        """Return the tensor at a position; None if that argument is not a tensor."""
        result = self.arg(position)
        return result.tensors[0] if result.is_tensor and result.tensors else None

    def present(self, *positions: int) -> list[Strided]:
        """Return those arguments at ``positions`` that are tensors."""
        return [tensor for tensor in map(self.tensor, positions) if tensor is not None]

    def listed(self, position: int) -> tuple[Strided, ...] | None:
        """Return the tensors of a list argument, with the element type ``hint``; None if the trace does not
        record them.
        """
        result = self.arg(position)
        if result.kind != "TensorList" or not result.tensors:
            return None
        return tuple(tensor._replace(dtype=tensor.dtype or self.hint) for tensor in result.tensors)

    @property
    def tensors(self) -> tuple[Strided, ...]:
        """Return the arguments that are single tensors."""
        result = (self.tensor(position) for position in range(len(self.args)))
        return tuple(tensor for tensor in result if tensor is not None)

    def last_output(self, first: int) -> Strided | None:
        """Return the ``out=`` tensor: the last tensor argument from position ``first`` on."""
        result = [self.tensor(position) for position in range(first, len(self.args))]
        return next((tensor for tensor in reversed(result) if tensor is not None), None)

    def integers(self, position: int) -> tuple[int, ...] | None:
        """Return the integers of a list argument (or a single one), at most 64; None without a value."""
        text = self.arg(position).value.strip("[]() ")
        if not text:
            return None
        parts = [_whole(part) for part in text.split(",", _MOST_DIMENSIONS)]
        valid = tuple(part for part in parts if part is not None)
        return valid if len(valid) == len(parts) else None

    def integer(self, position: int) -> int | None:
        """Return the integer argument at a position; None without a value."""
        result = self.integers(position)
        return result[0] if result and len(result) == 1 else None

    def flag(self, position: int) -> bool | None:
        """Return the boolean argument at a position; None without a value."""
        return {"True": True, "False": False, "1": True, "0": False}.get(self.arg(position).value)

    def flags(self, position: int) -> tuple[bool, ...] | None:
        """Return the booleans of a list argument; None without a value."""
        parts = [part.strip() for part in self.arg(position).value.strip("[] ").split(",")]
        if not all(part in ("True", "False") for part in parts):
            return None
        return tuple(part == "True" for part in parts)

    def real(self, position: int) -> float | None:
        """Return the number argument at a position; None without a value."""
        try:
            return float(self.arg(position).value)
        except ValueError:
            return None


def _whole(text: str) -> int | None:
    try:
        value = int(text)
    except ValueError:
        return None
    return value if abs(value) <= _LARGEST_VALUE else None


_Extents = list[int | list[int]]
_entries = msgspec.json.Decoder(list[msgspec.Raw])
_extents = msgspec.json.Decoder(_Extents)
_types = msgspec.json.Decoder(list[str | list[str]])
_values = msgspec.json.Decoder(list[str | float | bool | list[str | float | bool | None] | None])
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError)


def _per_argument(text: str) -> list[_Extents]:
    """Parse the extents (or strides) of each argument; invalid entries become empty."""
    result: list[_Extents] = []
    try:
        entries = _entries.decode(text) if text else []
    except _UNREADABLE:
        return []
    for raw in entries[:_MOST_ARGUMENTS]:
        try:
            result.append(_extents.decode(raw))
        except _UNREADABLE:
            result.append([])
    return result


def _numbers(entry: _Extents) -> tuple[int, ...] | None:
    """Return the entry as a tuple of integers; None for a nested or too long list."""
    numbers = tuple(number for number in entry if isinstance(number, int))
    if len(numbers) != len(entry) or len(numbers) > _MOST_DIMENSIONS:
        return None
    return numbers


def _tensor(
    dtype: DType | None, extents: tuple[int, ...] | None, strides: tuple[int, ...] | None
) -> Strided | None:
    """Return a tensor with these extents and strides; None for impossible sizes."""
    if extents is None or len(extents) > _MOST_DIMENSIONS:
        return None
    if not 0 <= min(extents, default=0) <= max(extents, default=0) <= _LARGEST_VALUE:
        return None
    if prod(extents) > _MOST_ELEMENTS:
        return None
    if strides is not None and len(strides) != len(extents):
        strides = None
    return Strided(dtype, extents, strides)


def _nested(entry: _Extents, position: int) -> tuple[int, ...] | None:
    inner = entry[position] if position < len(entry) else None
    return None if inner is None or isinstance(inner, int) else tuple(inner)


def _listed(extents: _Extents, strides: _Extents | None, types: tuple[DType | None, ...]) -> Argument:
    """Return the argument for a list of tensors. Its tensors are None if the trace does not record all of
    them.
    """
    result = [
        _tensor(
            types[position] if position < len(types) else None,
            _nested(extents, position),
            None if strides is None else _nested(strides, position),
        )
        for position in range(len(extents))
    ]
    valid = tuple(tensor for tensor in result if tensor is not None)
    return Argument(_LIST, valid if valid and len(valid) == len(result) else None)


_LIST = "TensorList"
_UNSIGNED = {"unsigned short": "ui16", "unsigned int": "ui32", "unsigned long": "ui64"}
_NUMBERS = frozenset({"Int", "Double", "Float", "Bool", "Complex"})
"""Types of numbers in execution traces, which differ from element types only in case."""


def _element(kind: str) -> DType | None:
    """Return the element type of a tensor from a type text of Kineto or of execution traces
    (``Tensor(float)``).
    """
    if kind.startswith("Tensor(") and kind.endswith(")"):
        return find_dtype(kind[len("Tensor(") : -1])
    if not kind or kind in _NUMBERS:
        return None
    return find_dtype(kind) or find_dtype(kind.removeprefix("c10::")) or find_dtype(_UNSIGNED.get(kind, ""))


def _argument(kind: str | list[str], extents: _Extents, strides: _Extents | None, value: str) -> Argument:
    if isinstance(kind, list):
        return _listed(extents, strides, tuple(map(_element, kind)))
    if kind == _LIST:
        return _listed(extents, strides, ())
    if kind.startswith("GenericList[Tensor("):
        parts = kind[len("GenericList[") :].rstrip("]").split(",")
        return _listed(extents, strides, tuple(map(_element, parts)))
    dtype = _element(kind)
    if dtype is None:
        return Argument(kind, (), value)
    steps = None if strides is None else _numbers(strides)
    tensor = _tensor(dtype, _numbers(extents), steps)
    return Argument(kind, None if tensor is None else (tensor,), value)


def read_call(
    name: str, shapes: str, types: str, *, strides: str = "", values: str = "", hint: DType | None = None
) -> Call:
    """Return the operation that the JSON texts of a trace describe. Texts that the trace lacks are empty."""
    extents, steps = _per_argument(shapes), _per_argument(strides)
    try:
        kinds = _types.decode(types) if types else []
    except _UNREADABLE:
        kinds = []
    try:
        decoded = _values.decode(values) if values else []
        texts = ["" if value is None else str(value) for value in decoded]
    except _UNREADABLE:
        texts = []
    args = [
        _argument(
            kind,
            extents[position] if position < len(extents) else [],
            steps[position] if position < len(steps) else None,
            texts[position] if position < len(texts) else "",
        )
        for position, kind in enumerate(kinds[:_MOST_ARGUMENTS])
    ]
    return Call(name, tuple(args), bool(texts), hint)


class AtenCost(NamedTuple):
    """Cost, inputs and results of one execution of a PyTorch operation; extents of results may be unknown.

    :mod:`hespas.costs.operation` defines the conventions. Bytes are compulsory traffic: each distinct element
    of an input is read once, each element of a result is written once. A number that is passed by value is
    not traffic; Kineto records it as a tensor without dimensions. ``guessed`` is True if it is not certain
    which tensors are written.
    """

    cost: Cost
    operands: tuple[Tensor, ...] = ()
    results: tuple[Tensor, ...] = ()
    guessed: bool = False


AtenRule = Callable[[Call], AtenCost]
"""Cost rule of an operation."""

FLOAT32, INT64, _COMPLEX64 = find_dtype("f32"), find_dtype("i64"), find_dtype("c64")


def unknown(call: Call, op_class: OpClass = OpClass.UNKNOWN) -> AtenCost:
    """Return a cost whose figures are all unknown (NaN). The inputs of the operation are still listed."""
    return AtenCost(Cost(op_class, nan, nan, nan, nan, nan), tuple(tensor.plain for tensor in call.tensors))


def needs(
    op_class: OpClass, *positions: int
) -> Callable[[Callable[..., AtenCost | None]], Callable[..., AtenCost]]:
    """Return a decorator for a cost rule whose arguments are the call and the tensors at ``positions`` of its
    arguments.

    If one of the tensors is missing, the rule returns None or a figure is negative (recorded numbers can be
    invalid), the cost is unknown, with the class ``op_class``. Bind options of the rule with ``partial``.
    """

    def wrap(rule: Callable[..., AtenCost | None]) -> Callable[..., AtenCost]:
        @wraps(rule)
        def checked(call: Call, **options: object) -> AtenCost:
            tensors = [call.tensor(position) for position in positions]
            result = None if None in tensors else rule(call, *tensors, **options)
            if result is None:
                return unknown(call, op_class)
            cost = result.cost
            figures = (cost.flops, cost.useful_flops, cost.transcendentals)
            if any(figure < 0 for figure in (*figures, cost.bytes_read, cost.bytes_written)):
                return unknown(call, op_class)
            if result.cost.op_class is OpClass.UNKNOWN:
                return result._replace(cost=replace(result.cost, op_class=op_class))
            return result

        return checked

    return wrap


def free(call: Call) -> AtenCost:
    """Return the cost of a zero-cost operation, such as a view or bookkeeping."""
    return AtenCost(FREE, tuple(tensor.plain for tensor in call.tensors))


def dense(dtype: DType | None, shape: Iterable[int]) -> Strided:
    """Return a dense tensor of a shape and element type, as for a new result."""
    return Strided(dtype, tuple(shape))


def read_bytes(inputs: Iterable[Strided]) -> float:
    """Return the bytes of the inputs. Numbers that are passed by value are not counted."""
    tensors = list(inputs)
    has_shape = any(tensor.shape for tensor in tensors)
    return sum(tensor.bytes for tensor in tensors if tensor.shape or not has_shape)


def simple(
    inputs: Iterable[Strided],
    results: Iterable[Strided],
    *,
    op_class: OpClass = OpClass.UNKNOWN,
    flops: float = 0.0,
    transcendentals: float = 0.0,
    read: float | None = None,
    written: float | None = None,
    rate: DType | None = None,
    useful_flops: float | None = None,
    contractions: tuple[Contraction, ...] = (),
) -> AtenCost:
    """Return the cost of an operation that reads all ``inputs`` and writes all ``results``. ``read`` and
    ``written`` [bytes] replace the sizes of these tensors as memory traffic.
    """
    sources, targets = list(inputs), list(results)
    first = rate or next((tensor.dtype for tensor in sources if tensor.shape), None)
    if first is None and sources:
        first = sources[0].dtype
    cost = Cost(
        op_class,
        flops,
        flops if useful_flops is None else useful_flops,
        transcendentals,
        read_bytes(sources) if read is None else read,
        sum(tensor.bytes for tensor in targets) if written is None else written,
        -1 if first is None else first.code,
        contractions,
    )
    return AtenCost(
        cost, tuple(tensor.plain for tensor in sources), tuple(tensor.plain for tensor in targets)
    )


def matrix_product(
    extents: tuple[int, int, int, int],
    types: tuple[DType | None, DType | None, DType | None],
    useful: float | None = None,
) -> Contraction:
    """Return ``batch`` matmuls M x K by K x N as one contraction: 2 x batch x M x N x K FLOPs.

    ``extents`` are (batch, M, N, K). ``useful`` is the number of useful FLOPs (None: all).
    """
    codes = [-1 if dtype is None else dtype.code for dtype in types]
    flops = 2.0 * prod(extents)
    if types[2] is not None and types[2].kind is DTypeKind.COMPLEX:
        flops *= 4
    useful_part = flops if useful is None else useful
    return Contraction(
        *extents, flops=flops, useful_flops=useful_part, lhs=codes[0], rhs=codes[1], accumulator=codes[2]
    )


_CATEGORY = {
    DTypeKind.BOOL: 0,
    DTypeKind.SIGNED: 1,
    DTypeKind.UNSIGNED: 1,
    DTypeKind.FLOAT: 2,
    DTypeKind.COMPLEX: 3,
}


def is_integral(dtype: DType | None) -> bool:
    """Return True for integer and boolean types."""
    return dtype is not None and _CATEGORY.get(dtype.kind, 2) < 2


def promoted(inputs: Iterable[Strided], *, to_float: bool = False) -> DType | None:
    """Return the element type in which PyTorch computes (torch.result_type); None if an input type is
    unknown.

    Tensors with dimensions determine the type. Kineto records numbers as 64-bit tensors without dimensions. A
    number changes the type only if it has a higher category (truth value, whole number, float, complex);
    whole numbers then give int64, real numbers float32, complex numbers complex64 (with float64: complex128).
    With ``to_float`` a whole-number type becomes float32.
    """
    tensors = list(inputs)
    ranked = [tensor.dtype for tensor in tensors if tensor.shape] or [tensor.dtype for tensor in tensors]
    numbers = [tensor.dtype for tensor in tensors if not tensor.shape]
    if not ranked or None in ranked:
        return None
    dtypes = [dtype for dtype in ranked if dtype is not None]
    highest = max(_CATEGORY.get(dtype.kind, 0) for dtype in dtypes)
    same = [dtype for dtype in dtypes if _CATEGORY.get(dtype.kind, 0) == highest]
    widest = max(same, key=lambda dtype: dtype.bits)
    different_halves = {dtype.name for dtype in same} >= {"bf16", "f16"} and widest.bits == 16
    result = FLOAT32 if different_halves and FLOAT32 else widest
    for number in numbers:
        if number is not None and _CATEGORY.get(number.kind, 0) > _CATEGORY.get(result.kind, 0):
            if number.kind is DTypeKind.COMPLEX:
                wide = find_dtype("c128") if result.name == "f64" else _COMPLEX64
            else:
                wide = INT64 if is_integral(number) else FLOAT32
            result = wide or result
    return FLOAT32 if to_float and is_integral(result) else result
