"""What is captured: a program, how to make its arguments, and the operation it stands for in the table."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Case", "Columns", "Scale", "Work", "split_of"]

Scale = Literal["tiny", "small", "full"]
"""How large a sweep is: a test's, a CPU's, a data-centre GPU's."""

Columns = Mapping[str, str | int]
"""The operation of a row: ``kind``, ``op``, ``dtype``, and the sizes of the kind."""

_HELD_OUT = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A function that JAX can trace and its abstract arguments; integers among them lie in ``[0, below)``."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    below: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One program. ``name`` is unique and names its files; ``columns`` are empty where it is more than one
    operation. ``build`` is called when its turn has come. ``gpu_only`` is left out elsewhere.
    """

    family: str
    name: str
    build: Callable[[], Work]
    columns: Columns = field(default_factory=dict[str, "str | int"])
    gpu_only: bool = False


def split_of(columns: Columns) -> str:
    """``devval`` for one shape in six, ``calib`` for the others, whatever the element type; empty for what
    is no single operation.
    """
    if not columns:
        return ""
    shape = " ".join(
        f"{name}={columns[name]}" for name in sorted(columns) if name not in ("dtype", "variant")
    )
    number = int.from_bytes(hashlib.sha256(shape.encode()).digest()[:8], "big")
    return "calib" if number % _HELD_OUT else "devval"
