"""A checksum of a value of the hub: equal for equal content, whoever made it and in which process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

__all__ = ["content_key"]

_DIGEST_BYTES = 8


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


def content_key(*values: object) -> str:
    """16 hexadecimal digits of frozen dataclasses, arrays, tuples, mappings, texts and numbers. O(bytes).

    Fields that do not take part in comparisons are left out. Raises ``TypeError`` for other types.
    """
    digest = blake2b(digest_size=_DIGEST_BYTES)
    waiting = list(reversed(values))
    while waiting:
        waiting += reversed(_parts(waiting.pop(), digest))
    return digest.hexdigest()


def _parts(value: object, digest: _Digest) -> list[object]:
    """Add what a value is itself; returns what it consists of."""
    parts: list[object] = []
    match value:
        case np.ndarray():
            array = cast("NDArray[np.generic]", value)
            digest.update(f"array {array.dtype.str} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        case bytes():
            digest.update(b"bytes %d\n" % len(value))
            digest.update(value)
        case memoryview():
            parts = [bytes(cast("memoryview[int]", value))]
        case str():
            parts = [value.encode("utf-8", "surrogatepass")]
        case bool() | int() | float() | None:
            digest.update(f"{type(value).__name__} {value!r}\n".encode())
        case np.generic():
            parts = [value.item()]
        case tuple() | list():
            parts = list(cast("list[object]", value))
            digest.update(b"row %d\n" % len(parts))
        case Mapping():
            rows = sorted(cast("Mapping[str, object]", value).items())
            digest.update(b"map %d\n" % len(rows))
            parts = [part for row in rows for part in row]
        case _ if is_dataclass(value):
            digest.update(f"{type(value).__name__}\n".encode())
            parts = [getattr(value, each.name) for each in fields(value) if each.compare]
        case _:
            raise TypeError(f"no checksum of a {type(value).__name__}")
    return parts
