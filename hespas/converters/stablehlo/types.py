"""Conversion of MLIR types to rows of the graph's type table and to tensors for the cost rules.

Each distinct type is decoded once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from hespas.converters.stablehlo.mlir import Bindings, MlirType, quoted
from hespas.costs.operation import Tensor
from hespas.graph import DYNAMIC, DType, dtype, find_dtype
from hespas.graph.columns import StringTableBuilder, TensorTypesBuilder
from hespas.graph.errors import UnsupportedError

if TYPE_CHECKING:
    from jaxlib.mlir._mlir_libs._mlir import ir

__all__ = ["Memo", "TypeInfo", "TypeTable", "read_quantised"]

_MAX_ELEMENTS = 2**63 - 1
"""Limit of elements of a tensor in all formats of Hespas."""
_MAX_PARTS = 1 << 20
"""Limit of values of a tuple: nested tuples that name each element twice double with every level."""

_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(slots=True, eq=False)
class TypeInfo:
    """Decoded MLIR type. ``rows`` are its rows in the type table, and ``tensors`` the decoded tensors. A
    tuple type has one of each per element, any other type has one.

    Equal types are one object, so they are compared by identity. ``elements`` are the types in a tuple or
    future, None for any other type.
    """

    rows: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    is_bounded: bool = False
    elements: tuple[TypeInfo, ...] | None = None


class Memo(dict[_K, _V]):
    """Dictionary that computes a missing value from its key and stores it, as a cache."""

    def __init__(self, make: Callable[[_K], _V]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: _K) -> _V:
        self[key] = made = self._make(key)
        return made


class TypeTable:
    """Table of the decoded tensor types of a module: ``known[type]`` is its :class:`TypeInfo`."""

    def __init__(self, bindings: Bindings, strings: StringTableBuilder) -> None:
        self._ir = bindings.ir
        self._stablehlo = bindings.stablehlo
        self._mhlo = bindings.mhlo
        self._strings = strings
        self.known = Memo(self._decode)
        self.rows = TensorTypesBuilder()

    def get(self, kind: MlirType) -> TypeInfo:
        """Return the rows in the type table and the tensors of a type."""
        return self.known[kind]

    def _decode(self, kind: MlirType) -> TypeInfo:
        if isinstance(kind, self._ir.RankedTensorType):
            return self._ranked(cast("ir.RankedTensorType", kind))
        if isinstance(kind, self._ir.TupleType):
            packed = cast("ir.TupleType", kind)
            return _joined([self.get(packed.get_type(index)) for index in range(packed.num_types)])
        if self._stablehlo.TokenType.isinstance(kind) or self._mhlo.TokenType.isinstance(kind):
            token = dtype("token")
            return TypeInfo((self.rows.add(token, ()),), (Tensor(token, ()),))
        if self._stablehlo.FutureType.isinstance(kind):
            types = cast("Sequence[MlirType]", self._stablehlo.FutureType(kind).types)
            return _joined([self.get(element) for element in types])
        element = find_dtype(str(kind))
        if element is not None:
            return TypeInfo((self.rows.add(element, ()),), (Tensor(element, ()),))
        row = self.rows.add(None, (DYNAMIC,), encoding=self._strings.add(str(kind)))
        return TypeInfo((row,), (Tensor(None, (DYNAMIC,)),))

    def _ranked(self, kind: ir.RankedTensorType) -> TypeInfo:
        """Decode a tensor type. If a dynamic dimension has a bound, the bound is its extent and is marked as
        such.
        """
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
            extensions = (dialect.TypeExtensions for dialect in (self._stablehlo, self._mhlo))
            decoder = next((kind_of for kind_of in extensions if kind_of.isinstance(kind.encoding)), None)
            bounds = None if decoder is None else cast("list[int]", decoder(kind.encoding).bounds)
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


def _joined(parts: Sequence[TypeInfo]) -> TypeInfo:
    """Return the tuple type of the given parts. Raises ``UnsupportedError`` for more than a million
    values.
    """
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


_UNIFORM = re.compile(r"!quant\.uniform<(\w+)(?:<[^<>]*>)?:(\w+)(?::\d+|:\{[^{}]*\})?, (.*)>", re.DOTALL)
_ANY = re.compile(r"!quant\.any<(\w+)(?:<[^<>]*>)?(?::(\w+))?>")


class _QuantisedType(NamedTuple):
    """Quantised element type.

    ``element`` is the storage type, None if unknown. ``extra_bytes`` is the size of scales and zero points.
    ``expressed`` is the type of the represented numbers, None if unknown.
    """

    element: DType | None
    extra_bytes: int
    expressed: DType | None = None


def read_quantised(text: str) -> _QuantisedType | None:
    """Decode a printed element type of the ``quant`` dialect; return None for any other type. The printed
    text is parsed because the bindings have no accessors for such types.

    https://mlir.llvm.org/docs/Dialects/QuantDialect/: ``!quant.uniform<i8<-127:127>:f32:1, {1.0e-02:3,
    2.0e-02}>`` stores i8 for f32, with a scale and a zero point for each index of dimension 1. Elements and
    zero points have the width of the storage type, and scales the width of the expressed type. Scales and
    zero points count even if the program does not store them. There is one of each per tensor, per index of a
    quantised dimension, or per block of a sub-channel type.
    """
    if not text.startswith("!quant."):
        return None
    uniform = _UNIFORM.fullmatch(text)
    if uniform is None:
        other = _ANY.match(text)
        if other is None:
            return _QuantisedType(None, 0)
        return _QuantisedType(find_dtype(other[1]), 0, find_dtype(other[2] or ""))
    storage, expressed = find_dtype(uniform[1]), find_dtype(uniform[2])
    pairs = uniform[3].count(",") + 1
    if storage is None or expressed is None:
        return _QuantisedType(storage, 0, expressed)
    return _QuantisedType(storage, expressed.storage_bytes(pairs) + storage.storage_bytes(pairs), expressed)
