"""Typed values of MLIR attributes: what the bindings leave untyped gets its type here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Protocol, cast

import numpy as np

from hespas.converters.stablehlo.literals import unescaped
from hespas.converters.stablehlo.mlir import Attribute, Operation
from hespas.graph.columns import IntArray

__all__ = [
    "enum_name",
    "int_array",
    "int_of",
    "int_tuple",
    "is_true",
    "members_of",
    "splat_int",
    "string_in",
    "symbol_of",
    "text_of",
]


_MAX_ELEMENTS = 1 << 24


class _Valued(Protocol):
    @property
    def value(self) -> int | str | bool: ...


class _Elements(Protocol):
    @property
    def is_splat(self) -> bool: ...

    def get_splat_value(self) -> _Valued: ...

    def __len__(self) -> int: ...


def _value(operation: Operation, name: str) -> int | str | bool | None:
    attribute = operation.attributes.get(name)
    return None if attribute is None else cast("_Valued", attribute).value


def int_of(operation: Operation, name: str, default: int = 0) -> int:
    """An integer attribute."""
    value = _value(operation, name)
    return default if value is None else int(value)


def text_of(operation: Operation, name: str) -> str:
    """A string attribute, ``""`` where absent; a dictionary is printed."""
    attribute = operation.attributes.get(name)
    if attribute is None:
        return ""
    return string_in(attribute)


def symbol_of(operation: Operation, name: str) -> str:
    """A symbol reference or string attribute without its ``@``, ``""`` where absent."""
    attribute = operation.attributes.get(name)
    return "" if attribute is None else string_in(attribute)


def string_in(attribute: Attribute) -> str:
    """What a string or a symbol says, anything else as MLIR prints it. Bytes that are no UTF-8, as in the
    configurations of GPU kernels, become ``\\xff``.
    """
    content = getattr(attribute, "value_bytes", None)
    if isinstance(content, bytes):
        return content.decode("utf-8", "backslashreplace")
    try:
        value = getattr(attribute, "value", None)
    except (RuntimeError, UnicodeDecodeError):
        return _unescaped(str(attribute))
    return value if isinstance(value, str) else str(attribute)


def _unescaped(symbol: str) -> str:
    """The name of a symbol that MLIR prints as ``@"..."``, with bytes as hexadecimal digits."""
    printed = symbol.removeprefix("@").removeprefix('"').removesuffix('"').encode()
    return unescaped(printed).decode("utf-8", "backslashreplace")


def is_true(operation: Operation, name: str, *, default: bool = False) -> bool:
    """A boolean attribute, or the presence of a unit attribute."""
    attribute = operation.attributes.get(name)
    return default if attribute is None else bool(getattr(attribute, "value", True))


def int_tuple(operation: Operation, name: str) -> tuple[int, ...]:
    """A dense integer array (or elements) attribute flattened, empty where absent."""
    attribute = operation.attributes.get(name)
    if attribute is None:
        return ()
    if hasattr(attribute, "is_splat"):
        return tuple(int_array(attribute).reshape(-1).tolist())
    return tuple(cast("Sequence[int]", attribute))


def int_array(attribute: Attribute) -> IntArray:
    """Dense elements with their shape; blobs (hex) and splats decode alike.

    Raises ``ValueError`` for a splat of over 2**24 elements, which a short text can state.
    """
    count = len(cast("_Elements", attribute)) if hasattr(attribute, "is_splat") else 0
    if count > _MAX_ELEMENTS:
        raise ValueError(f"an attribute has {count:,} elements (limit {_MAX_ELEMENTS:,})")
    return np.array(attribute).astype(np.int64, copy=False)


def members_of(operation: Operation, name: str) -> list[Attribute]:
    """The members of an array attribute, empty where absent."""
    attribute = operation.attributes.get(name)
    return [] if attribute is None else list(cast("Iterable[Attribute]", attribute))


def enum_name(attribute: Attribute | None, kind: str, *dialects: ModuleType) -> str:
    """The name of an enum attribute such as ``PrecisionAttr`` of one of several dialects, ``""`` where
    absent.
    """
    if attribute is None:
        return ""
    for dialect in dialects:
        decoder = getattr(dialect, kind)
        if decoder.isinstance(attribute):
            return str(decoder(attribute).value)
    return ""


def splat_int(attribute: Attribute | None) -> int | None:
    """The one value of an integer constant whose elements are all equal, None for anything else."""
    if attribute is None or not hasattr(attribute, "is_splat"):
        return None
    elements = cast("_Elements", attribute)
    if not elements.is_splat:
        return None
    value = getattr(elements.get_splat_value(), "value", None)
    return value if isinstance(value, int) else None
