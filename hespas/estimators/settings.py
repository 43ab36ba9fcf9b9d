"""Options of estimators that a caller decides where the user left them alone."""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from typing import cast

from hespas.estimators.protocol import Estimator

__all__ = ["for_job", "with_option"]


def for_job(model: Estimator, num_ranks: int) -> Estimator:
    """A model that knows how many ranks a collective without stated groups spans (-1: unknown), if it wants
    to know.
    """
    return with_option(model, "num_ranks", -1, num_ranks)


def with_option(model: Estimator, name: str, default: object, value: object) -> Estimator:
    """A model with an option that the caller decides, where it has one and the user left it alone."""
    candidate: object = model
    absent = object()
    if not is_dataclass(candidate) or isinstance(candidate, type):
        return model
    stated: object = getattr(model, name, absent)
    if stated is absent or stated != default:
        return model
    return cast("Estimator", replace(candidate, **{name: value}))
