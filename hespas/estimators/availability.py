"""Whether an estimator can be used here, and what to install where it cannot."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

__all__ = ["Availability", "Probed"]


class Availability(NamedTuple):
    """What a probe finds. ``detail`` says which version is there, or why none; ``install`` what to do."""

    is_available: bool
    detail: str = ""
    install: str = ""


@runtime_checkable
class Probed(Protocol):
    """An estimator that needs more than the package: its factory says whether that is there."""

    def available(self) -> Availability:
        """Look, without running anything for long."""
        ...
