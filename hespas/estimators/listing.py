"""All estimators with what they are and whether they can be used here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import cast

from hespas.estimators.availability import Availability, Probed
from hespas.estimators.registry import estimator_factory, estimator_names, guarded
from hespas.graph.errors import HespasError, UsageError

__all__ = ["ListedEstimator", "list_estimators"]

_NOT_SPELLED = frozenset({"progress", "num_ranks"})
"""Fields that callers set, not users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedEstimator:
    """One estimator: ``what`` it is in a line, its ``options``, whether it is there (``detail``: which
    version, or why not), and what to ``install`` otherwise.
    """

    name: str
    what: str
    options: tuple[str, ...]
    available: bool
    detail: str
    install: str


def list_estimators() -> tuple[ListedEstimator, ...]:
    """Every registered estimator; one that cannot be loaded is listed as not available."""
    return tuple(_listed(name) for name in estimator_names())


def _listed(name: str) -> ListedEstimator:
    try:
        factory = estimator_factory(name)
    except HespasError as error:
        return ListedEstimator(name=name, what="", options=(), available=False, detail=str(error), install="")
    found = _probed(name, factory)
    return ListedEstimator(
        name=name,
        what=_what(factory),
        options=_options(factory),
        available=found.is_available,
        detail=found.detail,
        install=found.install,
    )


def _probed(name: str, factory: Callable[..., object]) -> Availability:
    def probe() -> Availability:
        made = factory()
        return made.available() if isinstance(made, Probed) else Availability(True)

    try:
        return guarded(name, probe)
    except UsageError as error:  # it is there, and wants an option
        return Availability(True, f"{error.message}: {error.hint}" if error.hint else error.message)
    except HespasError as error:
        return Availability(False, error.message, error.hint or "")


def _what(factory: Callable[..., object]) -> str:
    """What it says of itself, or the first line of its module."""
    said: object = getattr(factory, "what", None)
    text = (
        said if isinstance(said, str) else getattr(sys.modules.get(factory.__module__), "__doc__", "") or ""
    )
    return text.strip().partition("\n")[0].replace("``", "")


def _options(factory: object) -> tuple[str, ...]:
    if not is_dataclass(factory):
        return ()
    names = (field.name for field in fields(cast("type", factory)) if field.init)
    return tuple(name for name in names if name not in _NOT_SPELLED)
