"""Time per operation and per collective: models that turn a graph and a device into durations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hespas.graph.plugins import lazy_names

if TYPE_CHECKING:
    from hespas.estimators.apply import (
        MissingPolicy,
        apply_estimate,
        as_run_on,
        kept_durations,
        refuse_converted,
        settle_missing,
        warn_of_tf32,
    )
    from hespas.estimators.interface import Estimator
    from hespas.estimators.registry import estimator_names, load_estimator

__all__ = [
    "Estimator",
    "MissingPolicy",
    "apply_estimate",
    "as_run_on",
    "estimator_names",
    "kept_durations",
    "load_estimator",
    "refuse_converted",
    "settle_missing",
    "warn_of_tf32",
]

__getattr__ = lazy_names(
    __name__,
    apply=(
        "MissingPolicy",
        "apply_estimate",
        "as_run_on",
        "kept_durations",
        "refuse_converted",
        "settle_missing",
        "warn_of_tf32",
    ),
    interface=("Estimator",),
    registry=(
        "estimator_names",
        "load_estimator",
    ),
)
