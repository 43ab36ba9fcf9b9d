"""Estimators that know the job: the size of collectives over all ranks is that of the job."""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from typing import cast

from hespas.estimators import Estimator

__all__ = ["for_job"]


def for_job(model: Estimator, num_ranks: int) -> Estimator:
    """A model that takes collectives without stated groups for those of ``num_ranks`` (-1: unknown), if it
    has a column ``num_ranks`` and no user set it.
    """
    candidate: object = model
    if not is_dataclass(candidate) or isinstance(candidate, type) or getattr(model, "num_ranks", None) != -1:
        return model
    return cast("Estimator", replace(candidate, num_ranks=num_ranks))
