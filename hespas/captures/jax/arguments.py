"""Abstract arguments as text: ``bf16[8192,1024]@data,model; i32[8192]@data``."""

from __future__ import annotations

import re
from typing import NamedTuple

from hespas.graph.errors import UsageError

__all__ = ["Argument", "parse_arguments"]

_ARGUMENT = re.compile(r"(?P<dtype>[a-z][a-z0-9_]*)\[(?P<shape>[0-9, ]*)\](?:@(?P<axes>.*))?", re.DOTALL)
_SHORT = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "pred": "bool",
    "i1": "bool",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}
_NONE = frozenset({"", "-", "None"})
_FORM = "DTYPE[SIZES]@AXES, with semicolons between arguments: bf16[8192,1024]@data,model; i32[8192]@data"


class Argument(NamedTuple):
    """The type of an array, and for each dimension the mesh axes that split it; ``axes`` None: not stated."""

    dtype: str
    shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...] | None


def parse_arguments(text: str) -> list[Argument]:
    """Types with shardings. A dimension without axes is ``-``, one over several has them with ``+``.

    Raises ``UsageError`` for anything else.
    """
    return [_argument(part.strip()) for part in text.split(";") if part.strip()]


def _argument(text: str) -> Argument:
    found = _ARGUMENT.fullmatch(text)
    if found is None:
        raise UsageError(f"{text[:80]!r} is no type of an argument", hint=_FORM)
    sizes = [size.strip() for size in found["shape"].split(",") if size.strip()]
    if any(len(size) > 18 for size in sizes):
        raise UsageError(f"{text[:80]!r}: a dimension is that large?", hint=_FORM)
    shape = tuple(map(int, sizes))
    if found["axes"] is None:
        return Argument(_SHORT.get(found["dtype"], found["dtype"]), shape, None)
    stated = [part.strip() for part in found["axes"].split(",")]
    axes = tuple(() if part in _NONE else tuple(part.split("+")) for part in stated)
    if len(axes) > len(shape):
        raise UsageError(
            f"{text[:80]!r}: {len(axes)} dimensions are split and there are {len(shape)}", hint=_FORM
        )
    return Argument(_SHORT.get(found["dtype"], found["dtype"]), shape, axes)
