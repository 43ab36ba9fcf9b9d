"""MLIR types as rows of the graph's type table and as tensors of the cost rules; each distinct type is
decoded once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from hespas.converters.stablehlo.mlir import Bindings, Location, Type, quoted
from hespas.costs.operation import Attributes, Cost, CustomAttributes, Tensor, unknown_cost
from hespas.costs.operation import Operation as CostInput
from hespas.costs.table import canonical_name, cost_of, find_rule
from hespas.graph import DYNAMIC, DType, OpClass, dtype, find_dtype
from hespas.graph.columns import StringTableBuilder, TensorTypesBuilder
from hespas.graph.errors import UnsupportedError

if TYPE_CHECKING:
    from jaxlib.mlir._mlir_libs._mlir import ir

__all__ = [
    "Locations",
    "Memo",
    "Signature",
    "Signatures",
    "TypeInfo",
    "TypeTable",
    "has_rule",
    "price",
    "read_quantised",
    "table_name",
]

_MAX_ELEMENTS = 2**63 - 1
"""As in op graphs: no format of ours holds more."""
_MAX_PARTS = 1 << 20
"""Of a tuple: one within another, each named twice, doubles with every level."""


_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(slots=True, eq=False)
class TypeInfo:
    """There is one object per type, compared by identity. ``rows`` of the type table and the tensors behind
    one MLIR type: one each, several for a tuple.

    ``elements`` are the types of a tuple or future, None for any other type.
    """

    rows: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    is_bounded: bool = False
    elements: tuple[TypeInfo, ...] | None = None


class Memo(dict[_K, _V]):
    """What was made of keys so far; that of an unknown key is made when it is looked up."""

    def __init__(self, make: Callable[[_K], _V]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: _K) -> _V:
        self[key] = made = self._make(key)
        return made


class TypeTable:
    """Decodes types and keeps what it decoded: ``known[type]``."""

    def __init__(self, bindings: Bindings, strings: StringTableBuilder) -> None:
        self._ir = bindings.ir
        self._stablehlo = bindings.stablehlo
        self._mhlo = bindings.mhlo
        self._strings = strings
        self.known = Memo(self._decode)
        self.rows = TensorTypesBuilder()

    def get(self, kind: Type) -> TypeInfo:
        """The rows and tensors of a type."""
        return self.known[kind]

    def _decode(self, kind: Type) -> TypeInfo:
        if isinstance(kind, self._ir.RankedTensorType):
            return self._ranked(cast("ir.RankedTensorType", kind))
        if isinstance(kind, self._ir.TupleType):
            packed = cast("ir.TupleType", kind)
            return _joined([self.get(packed.get_type(index)) for index in range(packed.num_types)])
        if self._stablehlo.TokenType.isinstance(kind) or self._mhlo.TokenType.isinstance(kind):
            token = dtype("token")
            return TypeInfo((self.rows.add(token, ()),), (Tensor(token, ()),))
        if self._stablehlo.FutureType.isinstance(kind):
            types = cast("Sequence[Type]", self._stablehlo.FutureType(kind).types)
            return _joined([self.get(each) for each in types])
        return self._other(kind)

    def _other(self, kind: Type) -> TypeInfo:
        """A scalar outside a tensor, or a type without storage we know."""
        element = find_dtype(str(kind))
        if element is not None:
            return TypeInfo((self.rows.add(element, ()),), (Tensor(element, ()),))
        row = self.rows.add(None, (DYNAMIC,), encoding=self._strings.add(str(kind)))
        return TypeInfo((row,), (Tensor(None, (DYNAMIC,)),))

    def _ranked(self, kind: ir.RankedTensorType) -> TypeInfo:
        """A tensor; bounds of dynamic dimensions replace them, marked as bounds."""
        unknown = int(self._ir.ShapedType.get_dynamic_size())
        shape = [DYNAMIC if extent == unknown else extent for extent in kind.shape]
        name = str(kind.element_type)
        element, extra_bytes, is_bounded = find_dtype(name), 0, False
        expressed: DType | None = None
        encodings: list[str] = []
        quantised = read_quantised(name) if element is None else None
        if quantised is not None:
            element, extra_bytes, expressed = quantised
            encodings.append(name)
        if kind.encoding is not None:
            bounds = self._bounds(kind.encoding)
            if bounds is None:
                encodings.append(str(kind.encoding))
            elif DYNAMIC in shape:
                is_bounded = True
                shape = [
                    bound if extent == DYNAMIC and bound != unknown else extent
                    for extent, bound in zip(shape, bounds, strict=True)
                ]
        if prod(max(extent, 1) for extent in shape) > _MAX_ELEMENTS:
            raise UnsupportedError(
                f"a tensor of more than 2**63 elements: {quoted(str(kind))}", hint="correct the shape"
            )
        encoding = self._strings.add(" ".join(encodings))
        row = self.rows.add(element, shape, encoding=encoding, bounded=is_bounded, extra_bytes=extra_bytes)
        return TypeInfo((row,), (Tensor(element, tuple(shape), extra_bytes, expressed),), is_bounded)

    def _bounds(self, encoding: object) -> list[int] | None:
        for dialect in (self._stablehlo, self._mhlo):
            if dialect.TypeExtensions.isinstance(encoding):
                return cast("list[int]", dialect.TypeExtensions(encoding).bounds)
        return None


def _joined(parts: Sequence[TypeInfo]) -> TypeInfo:
    """A tuple's type. Raises ``UnsupportedError`` for one of more than a million values."""
    count = sum(len(part.rows) for part in parts)
    if count > _MAX_PARTS:
        raise UnsupportedError(
            f"a tuple of {count:,} values (limit {_MAX_PARTS:,})", hint="check the tuple types of the program"
        )
    return TypeInfo(
        tuple(row for part in parts for row in part.rows),
        tuple(tensor for part in parts for tensor in part.tensors),
        any(part.is_bounded for part in parts),
        tuple(parts),
    )


# Element types of MLIR's ``quant`` dialect: https://mlir.llvm.org/docs/Dialects/QuantDialect/.
#
# ``!quant.uniform<i8<-127:127>:f32:1, {1.0e-02:3, 2.0e-02}>`` stores i8 for f32, with a scale and a zero
# point for each index of dimension 1. Elements count at the width of the storage type. A scale counts at
# the width of the expressed type and a zero point at that of the storage type, stored or not: one of each
# per tensor, n per axis, one for each block of a sub-channel type. The bindings know no accessors, so the
# printed type is read.

_UNIFORM = re.compile(r"!quant\.uniform<(\w+)(?:<[^<>]*>)?:(\w+)(?::\d+|:\{[^{}]*\})?, (.*)>", re.DOTALL)
_ANY = re.compile(r"!quant\.any<(\w+)(?:<[^<>]*>)?(?::(\w+))?>")


class _Quantised(NamedTuple):
    """``element`` is the storage type, None where unknown; ``extra_bytes`` scales and zero points;
    ``expressed`` the type whose values are meant, None where unknown.
    """

    element: DType | None
    extra_bytes: int
    expressed: DType | None = None


def read_quantised(text: str) -> _Quantised | None:
    """A printed element type, None where it is not quantised."""
    if not text.startswith("!quant."):
        return None
    uniform = _UNIFORM.fullmatch(text)
    if uniform is None:
        other = _ANY.match(text)
        if other is None:
            return _Quantised(None, 0)
        return _Quantised(find_dtype(other[1]), 0, find_dtype(other[2] or ""))
    storage, expressed = find_dtype(uniform[1]), find_dtype(uniform[2])
    pairs = uniform[3].count(",") + 1
    if storage is None or expressed is None:
        return _Quantised(storage, 0, expressed)
    return _Quantised(storage, expressed.storage_bytes(pairs) + storage.storage_bytes(pairs), expressed)


# Operation names as the cost table spells them.
#
# An operation that bears a name of the table but no dialect is none of StableHLO's: it may stand in a
# program, and nothing is known of it.


def table_name(op_name: str) -> str:
    """The name in the cost table (any name where the table has none), ``""`` without a dialect."""
    return canonical_name(op_name) if "." in op_name else ""


def has_rule(op_name: str) -> bool:
    """Whether the cost table has the operation."""
    return "." in op_name and find_rule(op_name) is not None


def price(op_name: str, described: CostInput) -> Cost:
    """The cost of one operation: of class UNKNOWN where the table does not have it."""
    return cost_of(op_name, described) if "." in op_name else unknown_cost(described)


# What a node is and costs, interned: equal operations on equal types share one row, and one evaluation.


class Signature(NamedTuple):
    """One row: the operation's full name, rows of the type table, cost of one execution.

    ``is_bounded``: extents are upper bounds; ``is_dynamic``: some are unknown. ``needs_report``: figures
    are unknown or bounds. ``label`` names nodes: the operation without its dialect, or a custom call's
    target.
    """

    op_name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    cost: Cost
    is_bounded: bool
    is_dynamic: bool
    has_rule: bool
    needs_report: bool
    label: str


_Key = tuple[str, tuple[TypeInfo, ...], tuple[TypeInfo, ...], tuple[int, ...], Attributes]
"""Operation name, types of operands and of results, places of repeated operands, attributes."""


class Signatures:
    """The table of signatures of one program: ``known[key]`` is a row of ``rows``."""

    def __init__(self) -> None:
        self.rows: list[Signature] = []
        self.known = Memo(self._add)
        self._unknown: dict[tuple[str, tuple[TypeInfo, ...], tuple[TypeInfo, ...]], int] = {}

    def plain(self, name: str, operands: tuple[TypeInfo, ...], results: tuple[TypeInfo, ...]) -> int:
        """The row of an operation whose cost its name and types give."""
        return self.known[name, operands, results, (), None]

    def unknown(self, name: str, operands: tuple[TypeInfo, ...], results: tuple[TypeInfo, ...]) -> int:
        """Return the row of an operation of unknown FLOPs, whatever its name."""
        described = CostInput(
            tuple(tensor for info in operands for tensor in info.tensors),
            tuple(tensor for info in results for tensor in info.tensors),
            None,
        )
        op_class = OpClass.CUSTOM if canonical_name(name) == "custom_call" else OpClass.UNKNOWN
        key = (name, operands, results)
        if key not in self._unknown:
            self._unknown[key] = self.priced(name, operands, results, unknown_cost(described, op_class))
        return self._unknown[key]

    def _add(self, key: _Key) -> int:
        name, operands, results, repeated, attributes = key
        described = CostInput(
            tuple(tensor for info in operands for tensor in info.tensors),
            tuple(tensor for info in results for tensor in info.tensors),
            attributes,
            repeated,
        )
        label = attributes.target if isinstance(attributes, CustomAttributes) else ""
        return self.priced(name, operands, results, price(name, described), label)

    def priced(
        self,
        name: str,
        operands: tuple[TypeInfo, ...],
        results: tuple[TypeInfo, ...],
        cost: Cost,
        label: str = "",
    ) -> int:
        """A row with a cost of its own."""
        infos = (*operands, *results)
        is_bounded = any(info.is_bounded for info in infos)
        self.rows.append(
            Signature(
                name,
                tuple(row for info in operands for row in info.rows),
                tuple(row for info in results for row in info.rows),
                cost,
                is_bounded,
                any(DYNAMIC in tensor.shape for info in infos for tensor in info.tensors),
                has_rule(name),
                is_bounded or not cost.is_known,
                label or name.rpartition(".")[2],
            )
        )
        return len(self.rows) - 1


# MLIR locations as two strings: where in the source, and what the framework calls the operation.
#
# JAX nests them: ``loc("jit(step)/mlp/dot_general"("model.py":12:8))``. The outermost name is the framework's
# name, the first file position the source. Equal locations are decoded once.

_NAME = r'loc\((?:callsite\()?(?:fused(?:<[^>]*>)?\[)?"((?:[^"\\]|\\.)*)"(?!:\d)'
_FILE = r'"((?:[^"\\]|\\.)*)":(\d+):(\d+)'
_UNKNOWN_FILE = "-"


class Locations:
    """Interns locations. ``rows[i]`` is (source string row, framework string row); row 0 is nothing known.

    ``path`` stands for the input itself, whose own lines are locations where the program has no others;
    ``""`` where the input has no lines.
    """

    def __init__(self, strings: StringTableBuilder, path: str, *, enabled: bool) -> None:
        self.rows: list[tuple[int, int]] = [(0, 0)]
        self._strings = strings
        self._path = path
        self.enabled = enabled
        self._known: dict[Location, int] = {}
        self._names = [""]
        self._within: dict[tuple[int, int], int] = {}

    def row(self, location: Location) -> int:
        """The row of a location, 0 where it says nothing. Ask only where they are ``enabled``."""
        row = self._known.get(location)
        if row is None:
            source, name = self.describe(location)
            row = self._known[location] = self._add(self._strings.add(source), name)
        return row

    def _add(self, source_row: int, name: str) -> int:
        pair = (source_row, self._strings.add(name))
        if pair == (0, 0):
            return 0
        self.rows.append(pair)
        self._names.append(name)
        return len(self.rows) - 1

    def place(self, row: int) -> str:
        """What a location says, for an error; ``""`` where it says nothing."""
        strings = self._strings.build()
        source, name = (strings[part] for part in self.rows[row])
        line = source.removeprefix(f"{self._path}:")
        return " ".join(filter(None, (f"line {line}" if line != source else source, name)))

    def within(self, call: int, rows: list[int]) -> list[int]:
        """The rows of a function's operations as the call at row ``call`` runs them.

        Frameworks name the operations of a function from its own start (``select_n``); XLA puts the name of
        the call before it where it inlines one, so that profiles say ``jit(step)/jit(_where)/select_n``.
        """
        if not call or not self._names[call]:
            return rows
        known = self._within
        return [known.get((call, row)) or self._prefixed(call, row) for row in rows]

    def _prefixed(self, call: int, row: int) -> int:
        outer, inner = self._names[call], self._names[row]
        source = self.rows[row][0] or self.rows[call][0]
        if not inner:
            inner = outer
        elif inner.partition("/")[0] != outer.partition("/")[0]:
            inner = f"{outer}/{inner}"
        found = self._within[call, row] = self._add(source, inner)
        return found

    def describe(self, location: Location) -> tuple[str, str]:
        """Source position and framework name of a location, each ``""`` where absent."""
        text = str(location)
        name, file = re.match(_NAME, text), re.search(_FILE, text)
        source = ""
        name_of_file = file[1] if file is not None else ""
        if name_of_file == _UNKNOWN_FILE:
            name_of_file = self._path
        if file is not None and name_of_file:
            source = f"{name_of_file}:{file[2]}:{file[3]}"
        return source, name[1] if name else ""
