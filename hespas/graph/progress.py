"""Progress of long work: a callback with the number of finished parts and the total."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["Bar", "Progress", "ProgressBar"]

Progress = Callable[[int, int], None]
"""Callback ``progress(done, total)``; ``total`` may grow while work is found."""


class Bar(Protocol):
    """Progress bar with the interface of ``tqdm``."""

    n: float
    total: float | None

    def update(self, n: float) -> object:
        """Move the bar forward by ``n`` parts."""

    def refresh(self) -> object:
        """Draw the bar."""

    def close(self) -> object:
        """Draw the bar for the last time."""


class ProgressBar:
    """Progress callback that draws a bar of ``tqdm``, or of a class with its interface.

    The bar is made at the first call, as ``make(total=total, **settings)``, and closed at the last part. With
    ``tqdm``: ``hespas.simulate(traces, progress=hespas.ProgressBar(tqdm.auto.tqdm, desc="simulate"))``.

    Examples:
        >>> class Printed:
        ...     n = 0
        ...     def __init__(self, total):
        ...         self.total = total
        ...     def update(self, n):
        ...         self.n += n
        ...     def refresh(self): ...
        ...     def close(self):
        ...         print(f"{self.n} of {self.total}")
        >>> progress = hespas.ProgressBar(Printed)
        >>> progress(1, 2)
        >>> progress(2, 2)
        2 of 2
    """

    def __init__(self, make: Callable[..., Bar], **settings: object) -> None:
        self._make, self._settings = make, settings
        self._bar: Bar | None = None

    def __call__(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` parts are finished."""
        bar = self._bar
        if bar is None:
            bar = self._bar = self._make(total=total, **self._settings)
        if bar.total != total:
            bar.total = total
            bar.refresh()
        bar.update(done - bar.n)
        if done >= total:
            bar.close()
            self._bar = None
