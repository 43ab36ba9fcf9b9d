"""Arguments of dispatched operations as plain values, written as PyTorch's profiler writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from hespas.captures.torch.calls import Argument, TensorRecord
from hespas.captures.torch.library import torch_module

__all__ = ["Signature", "arguments_of", "number_text", "record_of", "signature_of", "tensors_in"]

_SCALAR_NAMES = """
    uint8 int8 int16 int32 int64 float16 float32 float64 complex64 complex128 bool bfloat16
    float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz uint16 uint32 uint64
"""
_SCALAR_CODES: dict[str, int] = dict(
    zip(_SCALAR_NAMES.split(), (*range(8), 9, 10, 11, 15, *range(23, 30)), strict=True)
)
"""``c10::ScalarType``: how element types are written as values."""

_Number = Callable[[Any], int]
"""The storage behind a tensor, as a number."""


class Signature(NamedTuple):
    """What the schema of an operation says of its arguments: names, defaults, and which are written."""

    names: tuple[str, ...]
    defaults: tuple[object, ...]
    written: frozenset[int]
    is_view: bool


def signature_of(schema: Any) -> Signature:
    """The signature of an operation's schema. ``is_view``: a result shares memory with an argument that is
    not written.
    """
    arguments = list(schema.arguments)
    written = [place for place, each in enumerate(arguments) if _writes(each)]
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    return Signature(
        tuple(each.name for each in arguments),
        tuple(each.default_value if each.has_default_value() else None for each in arguments),
        frozenset(written),
        is_view,
    )


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def tensors_in(value: object) -> list[Any]:
    """All tensors of nested lists, tuples and mappings, in order."""
    tensor = torch_module().Tensor
    return list(_leaves(value, tensor))


def _leaves(value: object, tensor: Any) -> Iterator[Any]:
    if isinstance(value, tensor):
        yield value
    elif isinstance(value, dict):
        yield from _leaves(list(cast("dict[str, object]", value).values()), tensor)
    elif isinstance(value, list | tuple):
        for each in cast("list[object]", value):
            yield from _leaves(each, tensor)


def record_of(tensor: Any, number: _Number) -> TensorRecord:
    """What is kept of a tensor."""
    strides = tuple(map(int, tensor.stride())) if _is_strided(tensor) else ()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorRecord(dtype, tuple(map(int, tensor.shape)), strides, number(tensor))


def _is_strided(tensor: Any) -> bool:
    return str(tensor.layout) == "torch.strided"


def arguments_of(
    signature: Signature, args: Sequence[object], kwargs: Mapping[str, object], number: _Number
) -> tuple[Argument, ...]:
    """One entry for each argument of the schema; those that are not given have their defaults."""
    given = [
        args[place] if place < len(args) else kwargs.get(name, default)
        for place, (name, default) in enumerate(zip(signature.names, signature.defaults, strict=True))
    ]
    return tuple(_argument(value, number) for value in given)


def _argument(value: Any, number: _Number) -> Argument:
    tensor = torch_module().Tensor
    if isinstance(value, tensor):
        return record_of(value, number)
    found = tensors_in(cast("list[Any]", value)) if isinstance(value, list | tuple) else []
    return tuple(record_of(each, number) for each in found) if found else number_text(value)


def number_text(value: Any) -> str:
    """A value as its text; empty for what the profiler does not write either."""
    if isinstance(value, bool | int | float | str):
        return str(value)
    if isinstance(value, list | tuple):
        entries = map(number_text, cast("list[Any]", value))
        return f"[{', '.join(entries)}]"
    code = _SCALAR_CODES.get(str(value).removeprefix("torch."))
    return "" if code is None else str(code)
