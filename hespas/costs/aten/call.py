"""One PyTorch operation as a trace records it: name, and the shapes, types, strides and values of its inputs.

Kineto writes each of the four as a JSON list with one entry per argument, in the order of the schema. A
tensor has its extents and its element type, a list of tensors a list of extents and the type ``TensorList``,
anything else empty extents and a type such as ``Scalar``, with its value as a text. Traces before 2024
leave strides and values out, and the tensors of lists too. Texts are hostile: what makes no sense becomes an
unknown argument, and no number is larger than an address space.
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
"""``c10::ScalarType``: how an element type is written as a value."""


def scalar_type(code: int | None) -> DType | None:
    """The element type that ``c10::ScalarType`` numbers ``code``."""
    return find_dtype(_SCALAR_TYPES[code]) if code in _SCALAR_TYPES else None


class Strided(NamedTuple):
    """A tensor. ``strides`` count elements; None where the trace has none: taken as dense."""

    dtype: DType | None
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def stored(self) -> int:
        """Distinct elements in memory: an expanded dimension (stride 0) counts once, overlaps too."""
        if self.strides is None or len(self.strides) != len(self.shape) or not self.elements:
            return self.elements
        moved = prod(n for n, stride in zip(self.shape, self.strides, strict=True) if stride)
        span = 1 + sum((n - 1) * abs(stride) for n, stride in zip(self.shape, self.strides, strict=True))
        return min(moved, span)

    @property
    def bytes(self) -> float:
        """Storage of the distinct elements; NaN where the element type is unknown."""
        return nan if self.dtype is None else float(self.dtype.storage_bytes(self.stored))

    @property
    def width(self) -> float:
        """Bytes of one element, NaN unknown."""
        return nan if self.dtype is None else float(self.dtype.storage_bytes(1))

    @property
    def dense(self) -> Strided:
        """A result of this type, in memory of its own."""
        return self._replace(strides=None)

    @property
    def plain(self) -> Tensor:
        """Shape, element type and order in memory."""
        return Tensor(self.dtype, self.shape, layout=self.layout)

    @property
    def layout(self) -> str:
        """The order in memory as :class:`Tensor` names it."""
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
        """Elements from one to the next along a dimension; 0 where unknown."""
        return self.strides[dim] if self.strides else 0


class Argument(NamedTuple):
    """One input: the tensors it is made of (None: a list that the trace does not spell out) and its text."""

    kind: str = ""
    tensors: tuple[Strided, ...] | None = ()
    value: str = ""

    @property
    def is_tensor(self) -> bool:
        """Whether it is one tensor."""
        return self.kind != "TensorList" and self.tensors is not None and len(self.tensors) == 1


_NOTHING = Argument()


class Call(NamedTuple):
    """One operation. ``hint`` is the element type of lists of tensors, which no trace states: from elsewhere.

    ``has_values`` says whether the trace records values at all: an empty text is then a default. ``step`` is
    the name of the step around it, ``parts`` are operations inside it, where a rule asks for those.
    """

    name: str
    args: tuple[Argument, ...]
    has_values: bool = False
    hint: DType | None = None
    step: str = ""
    parts: tuple[Call, ...] = ()

    def arg(self, place: int) -> Argument:
        """An argument; an empty one behind the last."""
        return self.args[place] if 0 <= place < len(self.args) else _NOTHING

    def tensor(self, place: int) -> Strided | None:
        """The tensor at a place, None for anything else."""
        found = self.arg(place)
        return found.tensors[0] if found.is_tensor and found.tensors else None

    def present(self, *places: int) -> list[Strided]:
        """The tensors among those places."""
        return [each for each in map(self.tensor, places) if each is not None]

    def listed(self, place: int) -> tuple[Strided, ...] | None:
        """The tensors of a list, with the hinted element type; None where the trace does not tell."""
        found = self.arg(place)
        if found.kind != "TensorList" or not found.tensors:
            return None
        return tuple(each._replace(dtype=each.dtype or self.hint) for each in found.tensors)

    @property
    def tensors(self) -> tuple[Strided, ...]:
        """All single tensors."""
        found = (self.tensor(place) for place in range(len(self.args)))
        return tuple(each for each in found if each is not None)

    def last_output(self, first: int) -> Strided | None:
        """The tensor given as ``out=``: the last one from place ``first`` on."""
        found = [self.tensor(place) for place in range(first, len(self.args))]
        return next((each for each in reversed(found) if each is not None), None)

    def integers(self, place: int) -> tuple[int, ...] | None:
        """A list of at most 64 whole numbers (or one); None where there is no value."""
        text = self.arg(place).value.strip("[]() ")
        if not text:
            return None
        parts = [_whole(part) for part in text.split(",", _MOST_DIMENSIONS)]
        known = tuple(part for part in parts if part is not None)
        return known if len(known) == len(parts) else None

    def integer(self, place: int) -> int | None:
        """One whole number."""
        found = self.integers(place)
        return found[0] if found and len(found) == 1 else None

    def flag(self, place: int) -> bool | None:
        """``True`` or ``False``."""
        return {"True": True, "False": False, "1": True, "0": False}.get(self.arg(place).value)

    def flags(self, place: int) -> tuple[bool, ...] | None:
        """A list of truth values."""
        parts = [part.strip() for part in self.arg(place).value.strip("[] ").split(",")]
        if not all(part in ("True", "False") for part in parts):
            return None
        return tuple(part == "True" for part in parts)

    def real(self, place: int) -> float | None:
        """One number."""
        try:
            return float(self.arg(place).value)
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
    """Extents (or strides) of each argument; an entry that is something else becomes empty."""
    found: list[_Extents] = []
    try:
        entries = _entries.decode(text) if text else []
    except _UNREADABLE:
        return []
    for raw in entries[:_MOST_ARGUMENTS]:
        try:
            found.append(_extents.decode(raw))
        except _UNREADABLE:
            found.append([])
    return found


def _numbers(entry: _Extents) -> tuple[int, ...] | None:
    """Plain numbers, None for a nested list or ones that no tensor has."""
    numbers = tuple(each for each in entry if isinstance(each, int))
    if len(numbers) != len(entry) or len(numbers) > _MOST_DIMENSIONS:
        return None
    return numbers


def _tensor(
    dtype: DType | None, extents: tuple[int, ...] | None, strides: tuple[int, ...] | None
) -> Strided | None:
    """A tensor of sane size."""
    if extents is None or len(extents) > _MOST_DIMENSIONS:
        return None
    if not 0 <= min(extents, default=0) <= max(extents, default=0) <= _LARGEST_VALUE:
        return None
    if prod(extents) > _MOST_ELEMENTS:
        return None
    if strides is not None and len(strides) != len(extents):
        strides = None
    return Strided(dtype, extents, strides)


def _nested(entry: _Extents, place: int) -> tuple[int, ...] | None:
    inner = entry[place] if place < len(entry) else None
    return None if inner is None or isinstance(inner, int) else tuple(inner)


def _listed(extents: _Extents, strides: _Extents | None, types: tuple[DType | None, ...]) -> Argument:
    """A list of tensors; one that the trace does not spell out has no tensors."""
    found = [
        _tensor(
            types[place] if place < len(types) else None,
            _nested(extents, place),
            None if strides is None else _nested(strides, place),
        )
        for place in range(len(extents))
    ]
    known = tuple(each for each in found if each is not None)
    return Argument(_LIST, known if known and len(known) == len(found) else None)


_LIST = "TensorList"
_UNSIGNED = {"unsigned short": "ui16", "unsigned int": "ui32", "unsigned long": "ui64"}
_NUMBERS = frozenset({"Int", "Double", "Float", "Bool", "Complex"})
"""Numbers in execution traces, whose names are those of element types but for the capital."""


def _element(kind: str) -> DType | None:
    """The element type of a tensor, also as execution traces write it: ``Tensor(float)``."""
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


def _value(value: object) -> str:
    return "" if value is None else str(value)


def read_call(
    name: str, shapes: str, types: str, *, strides: str = "", values: str = "", hint: DType | None = None
) -> Call:
    """The operation that these JSON texts describe; the empty text where a trace says nothing."""
    extents, steps = _per_argument(shapes), _per_argument(strides)
    try:
        kinds = _types.decode(types) if types else []
    except _UNREADABLE:
        kinds = []
    try:
        texts = [_value(each) for each in _values.decode(values)] if values else []
    except _UNREADABLE:
        texts = []
    args = [
        _argument(
            kind,
            extents[place] if place < len(extents) else [],
            steps[place] if place < len(steps) else None,
            texts[place] if place < len(texts) else "",
        )
        for place, kind in enumerate(kinds[:_MOST_ARGUMENTS])
    ]
    return Call(name, tuple(args), bool(texts), hint)


# --- what a rule says of one PyTorch operation, and the shapes most answers have.
#
# Conventions are those of :mod:`hespas.costs.operation`: add and multiply are one FLOP each,
# transcendentals apart, bytes the compulsory traffic: each distinct element of an input read once, each
# element of a result written once. A number passed by value, which Kineto shows as a tensor without
# dimensions beside one with dimensions, is no traffic. Unknown is NaN.


class AtenCost(NamedTuple):
    """Cost, inputs and results of one execution; results have unknown extents where a trace cannot tell.
    ``guessed`` marks costs that rest on a guess of the tensors that are written.
    """

    cost: Cost
    operands: tuple[Tensor, ...] = ()
    results: tuple[Tensor, ...] = ()
    guessed: bool = False


AtenRule = Callable[[Call], AtenCost]
"""One row of the table."""

FLOAT32, INT64 = find_dtype("f32"), find_dtype("i64")


def unknown(call: Call, op_class: OpClass = OpClass.UNKNOWN) -> AtenCost:
    """Nothing is known but the inputs."""
    return AtenCost(Cost(op_class, nan, nan, nan, nan, nan), tuple(each.plain for each in call.tensors))


def needs(
    op_class: OpClass, *places: int
) -> Callable[[Callable[..., AtenCost | None]], Callable[..., AtenCost]]:
    """A rule of the call and its tensors at ``places``, whose costs are of this class unless it says another.
    Where a tensor is missing, or the rule finds None, the operation is unknown. Options of a rule are bound
    with ``partial``.
    """

    def wrap(rule: Callable[..., AtenCost | None]) -> Callable[..., AtenCost]:
        @wraps(rule)
        def checked(call: Call, **options: object) -> AtenCost:
            tensors = [call.tensor(place) for place in places]
            found = None if None in tensors else rule(call, *tensors, **options)
            if found is None:
                return unknown(call, op_class)
            if found.cost.op_class is OpClass.UNKNOWN:
                return found._replace(cost=replace(found.cost, op_class=op_class))
            return found

        return checked

    return wrap


def free(call: Call) -> AtenCost:
    """A view or bookkeeping."""
    return AtenCost(FREE, tuple(each.plain for each in call.tensors))


def dense(dtype: DType | None, shape: Iterable[int]) -> Strided:
    """A result in memory of its own."""
    return Strided(dtype, tuple(shape))


def read_bytes(inputs: Iterable[Strided]) -> float:
    """Bytes of inputs; numbers beside tensors are passed by value."""
    tensors = list(inputs)
    has_shape = any(each.shape for each in tensors)
    return sum(each.bytes for each in tensors if each.shape or not has_shape)


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
    """Inputs read, results written, unless ``read`` or ``written`` [bytes] say otherwise."""
    sources, targets = list(inputs), list(results)
    first = rate or next((each.dtype for each in sources if each.shape), None)
    if first is None and sources:
        first = sources[0].dtype
    cost = Cost(
        op_class,
        flops,
        flops if useful_flops is None else useful_flops,
        transcendentals,
        read_bytes(sources) if read is None else read,
        sum(each.bytes for each in targets) if written is None else written,
        -1 if first is None else first.code,
        contractions,
    )
    return AtenCost(cost, tuple(each.plain for each in sources), tuple(each.plain for each in targets))


def matrix_product(
    extents: tuple[int, int, int, int],
    types: tuple[DType | None, DType | None, DType | None],
    useful: float | None = None,
) -> Contraction:
    """``batch`` products of M x K by K x N: 2 x batch x M x N x K FLOPs, of which ``useful`` (None: all)."""
    codes = [-1 if each is None else each.code for each in types]
    flops = 2.0 * prod(extents)
    if types[2] is not None and types[2].kind is DTypeKind.COMPLEX:
        flops *= 4
    kept = flops if useful is None else useful
    return Contraction(
        *extents, flops=flops, useful_flops=kept, lhs=codes[0], rhs=codes[1], accumulator=codes[2]
    )


_CATEGORY = {
    DTypeKind.BOOL: 0,
    DTypeKind.SIGNED: 1,
    DTypeKind.UNSIGNED: 1,
    DTypeKind.FLOAT: 2,
    DTypeKind.COMPLEX: 3,
}


def is_integral(dtype: DType | None) -> bool:
    """Whether a type holds whole numbers or truth values."""
    return dtype is not None and _CATEGORY.get(dtype.kind, 2) < 2


def promoted(inputs: Iterable[Strided], *, to_float: bool = False) -> DType | None:
    """The element type PyTorch computes in (torch.result_type); None where an input's is unknown.

    Tensors with dimensions decide; numbers, which Kineto shows as 64-bit tensors without dimensions, only by
    their category, and then in the default type (float32). ``to_float``: whole numbers become float32.
    """
    tensors = list(inputs)
    ranked = [each.dtype for each in tensors if each.shape] or [each.dtype for each in tensors]
    numbers = [each.dtype for each in tensors if not each.shape]
    if not ranked or None in ranked:
        return None
    found = _widest([each for each in ranked if each is not None])
    for number in numbers:
        if number is not None and _CATEGORY.get(number.kind, 0) > _CATEGORY.get(found.kind, 0):
            found = (INT64 if is_integral(number) else FLOAT32) or found
    return FLOAT32 if to_float and is_integral(found) else found


def _widest(types: list[DType]) -> DType:
    highest = max(_CATEGORY.get(each.kind, 0) for each in types)
    same = [each for each in types if _CATEGORY.get(each.kind, 0) == highest]
    widest = max(same, key=lambda each: each.bits)
    different_halves = {each.name for each in same} >= {"bf16", "f16"} and widest.bits == 16
    return FLOAT32 if different_halves and FLOAT32 else widest
