"""Cases to capture: a program, its arguments, and the row of its operation in the table."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Case", "Columns", "Scale", "Work", "split_of"]

Scale = Literal["tiny", "small", "full"]
"""Size of a sweep: for a test, for a CPU, for a data-centre GPU."""

Columns = Mapping[str, str | int]
"""Columns of an operation: ``kind``, ``op``, ``dtype``, and the sizes of the kind."""

_HELD_OUT = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A function that JAX can trace, and its abstract arguments. Integer values are drawn from ``[0,
    below)``.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    below: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program. ``name`` is unique and is the stem of its files. ``columns`` is empty if the program has
    more than one operation. ``build`` is called right before the capture. ``gpu_only`` cases are excluded on
    CPUs.
    """

    family: str
    name: str
    build: Callable[[], Work]
    columns: Columns = field(default_factory=dict[str, "str | int"])
    gpu_only: bool = False


def split_of(columns: Columns) -> str:
    """Return the split of a shape: ``devval`` for one shape in six, else ``calib``, for all element types
    alike; empty for programs of several operations.
    """
    if not columns:
        return ""
    shape = " ".join(
        f"{name}={columns[name]}" for name in sorted(columns) if name not in ("dtype", "variant")
    )
    number = int.from_bytes(hashlib.sha256(shape.encode()).digest()[:8], "big")
    return "calib" if number % _HELD_OUT else "devval"
