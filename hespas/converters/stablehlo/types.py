"""Conversion of MLIR types to rows of the graph's type table and to tensors for the cost rules.

Each distinct type is decoded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, TypeVar, cast

from hespas.converters.stablehlo.mlir import Bindings, MlirType, quoted
from hespas.costs.operation import Tensor
from hespas.graph import DYNAMIC, DType, dtype, find_dtype
from hespas.graph.columns import StringTableBuilder, TensorTypesBuilder
from hespas.graph.errors import UnsupportedError
from hespas.graph.quantised import QUANTISED, parse_quantised

if TYPE_CHECKING:
    from jaxlib.mlir._mlir_libs._mlir import ir

__all__ = ["Memo", "TypeInfo", "TypeTable"]

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
        self._quantised: dict[tuple[TypeInfo, str], TypeInfo] = {}
        self.rows = TensorTypesBuilder()

    def get(self, kind: MlirType) -> TypeInfo:
        """Return the rows in the type table and the tensors of a type."""
        return self.known[kind]

    def quantised(self, info: TypeInfo, text: str) -> TypeInfo:
        """Return the quantised type ``text`` whose storage a tensor type is. If the text is of another type
        or shape, return the tensor type unchanged.
        """
        if (info, text) not in self._quantised:
            kind, tensor = parse_quantised(text), info.tensors[0] if len(info.tensors) == 1 else None
            made = info
            if (
                kind is not None
                and tensor is not None
                and tensor.dtype is kind.dtype
                and kind.fits(tensor.shape)
            ):
                size, expressed = kind.parameter_bytes, kind.expressed_dtype
                encoding = self._strings.add(text)
                row = self.rows.add(kind.dtype, tensor.shape, encoding=encoding, extra_bytes=size)
                made = TypeInfo((row,), (Tensor(kind.dtype, tensor.shape, size, expressed),))
            self._quantised[info, text] = made
        return self._quantised[info, text]

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
        if element is None and name.startswith(QUANTISED):
            encodings.append(name)  # the bindings have no accessors for such types
            quantised = parse_quantised(name)
            if quantised is not None:
                element, extra_bytes = quantised.dtype, quantised.parameter_bytes
                expressed = None if quantised.kind == "calibrated" else quantised.expressed_dtype
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
