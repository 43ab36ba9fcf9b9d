"""Tensors among the recorded values of an operation: which storage, how many bytes, what type.

A tensor is written as ``[tensor, storage, offset, elements, element bytes, device]``, its shape beside it,
its element type as ``Tensor(float)``; lists of tensors nest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

from hespas.converters.pytorch.et_records import Values, is_list

__all__ = ["Tensor", "argument", "mutated_arguments", "storages_of", "tensors_of"]

_TENSOR_TYPE = re.compile(r"Tensor\(([^()]*)\)")
_MOST_BYTES = 1 << 62
_FIELDS = 6


class Tensor(NamedTuple):
    """One tensor; ``shape`` is None where it is not recorded, or not possible."""

    storage: int
    bytes: int
    dtype: str
    shape: tuple[int, ...] | None


def _is_tensor(value: list[Any]) -> bool:
    return (
        len(value) == _FIELDS
        and type(value[5]) is str
        and type(value[1]) is int
        and type(value[3]) is int
        and type(value[4]) is int
    )


def _tensor(value: list[Any], shape: object, dtype: str) -> Tensor:
    size = value[3] * value[4]
    extents = _shape(shape)
    return Tensor(value[1], size if 0 <= size < _MOST_BYTES else 0, dtype, extents)


def _shape(shape: object) -> tuple[int, ...] | None:
    if not is_list(shape) or len(shape) > 64:
        return None
    if not all(type(extent) is int and 0 <= extent < _MOST_BYTES for extent in shape):
        return None
    return tuple(shape) if prod(shape) < _MOST_BYTES else None


def _item(values: Sequence[Any], place: int) -> object:
    return values[place] if place < len(values) else None


def argument(values: Values, place: int) -> list[Tensor]:
    """The tensors of one argument, in order, however lists nest."""
    if not 0 <= place < len(values.values):
        return []
    value = values.values[place]
    kind = values.types[place] if place < len(values.types) else ""
    if not is_list(value) or not value:
        return []
    if _is_tensor(value):
        return [_tensor(value, _item(values.shapes, place), kind[7:-1] if kind.startswith("Tensor(") else "")]
    return _nested(value, _item(values.shapes, place), kind) if "Tensor" in kind else []


def _nested(value: list[Any], shape: object, kind: str) -> list[Tensor]:
    dtypes = _TENSOR_TYPE.findall(kind)
    found: list[Tensor] = []
    stack: list[tuple[object, object]] = [(value, shape)]
    while stack:
        inner, extents = stack.pop()
        if not is_list(inner):
            continue
        if _is_tensor(inner):
            found.append(_tensor(inner, extents, dtypes[len(found)] if len(found) < len(dtypes) else ""))
            continue
        shapes = extents if is_list(extents) and len(extents) == len(inner) else [None] * len(inner)
        stack.extend(zip(reversed(inner), reversed(shapes), strict=True))
    return found


def tensors_of(values: Values) -> list[Tensor]:
    """All tensors of all arguments."""
    return [tensor for place in range(len(values.values)) for tensor in argument(values, place)]


@cache
def mutated_arguments(op_schema: str, name: str) -> frozenset[int]:
    """The places of arguments that an operation changes: marked ``!`` in its schema; without a schema, the
    first of an operation whose name ends in ``_``.
    """
    if "(" not in op_schema:
        return frozenset({0}) if name.endswith("_") and not name.endswith("__") else frozenset()
    depth, place = 0, 0
    found: set[int] = set()
    for character in op_schema[op_schema.index("(") :]:
        depth += (character in "([") - (character in ")]")
        if depth == 0:
            break
        if character == "," and depth == 1:
            place += 1
        elif character == "*" and depth == 1:  # what follows is passed by name; the mark is no argument
            place -= 1
        elif character == "!":
            found.add(place)
    return frozenset(found)


def storages_of(
    inputs: Values, outputs: list[Tensor], changed: frozenset[int]
) -> tuple[list[int], list[int]]:
    """Storages an operation reads and writes. A result that shares its storage with an argument is a view,
    and what makes nothing but views touches no data.
    """
    reads: dict[int, None] = {}
    writes: dict[int, None] = {}
    for place in range(len(inputs.values)):
        for tensor in argument(inputs, place):
            reads[tensor.storage] = None
            if place in changed:
                writes[tensor.storage] = None
    for tensor in outputs:
        if tensor.storage not in reads:
            writes[tensor.storage] = None
    only_views = bool(outputs) and not writes
    return [] if only_views else list(reads), list(writes)
