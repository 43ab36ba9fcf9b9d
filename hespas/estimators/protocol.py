"""What an estimator is."""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from typing import Protocol, cast, runtime_checkable

from hespas.graph import Diagnostics, Estimate, OpGraph
from hespas.hardware import Device

__all__ = ["Estimator", "for_job", "with_option"]


@runtime_checkable
class Estimator(Protocol):
    """A model of time: a frozen dataclass whose fields are its options.

    A node it does not cover gets NaN, never 0; a node that costs nothing gets 0, and no other does.
    """

    @property
    def name(self) -> str:
        """What the registry and reports call the model."""
        ...

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """The time of one execution of each node on ``device``; ``graph`` is not changed.

        ``diagnostics`` is told which nodes have no estimate, why, and what was assumed for the others.
        """
        ...


# Options of estimators that a caller decides where the user left them alone.


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
