"""What a prediction leaves open or assumes, counted by reason and told once each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from hespas.graph import Diagnostics

__all__ = ["Findings", "Note"]

Note = tuple[str, str]
"""Code and text of something assumed."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Operations by finding."""

    _counts: Counter[Note] = field(default_factory=Counter[Note])

    def uncovered(self, code: str, reason: str, count: int) -> None:
        """``count`` operations have no time."""
        self._counts[f"systolic.{code}", f"no duration, {reason}"] += count

    def assumed(self, notes: Iterable[Note], count: int) -> None:
        """``count`` operations have one that rests on each of these."""
        for code, text in notes:
            self._counts[f"systolic.{code}", text] += count

    def tell(self, device: str, diagnostics: Diagnostics | None) -> None:
        """A warning per finding."""
        if diagnostics is None:
            return
        for (code, text), count in self._counts.items():  # nothing is told of a count of 0
            diagnostics.warning(code, device, text, count=count)
