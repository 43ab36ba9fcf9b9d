"""Levels of obfuscation, and what a report lists of the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Level", "VisibleFact"]

Level = Literal["names", "shapes", "layers"]
"""What an obfuscation hides: names; also exact shapes and costs; also the layers of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleFact:
    """Fact that a workload shows: the number of distinct values, some of them as text, and the number of
    built-in models that agree with it (-1: it does not depend on the model).
    """

    fact: str
    distinct: int
    examples: str
    models: int = -1
