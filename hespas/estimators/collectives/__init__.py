"""Time of collectives: fitted lines, and the algorithm that NCCL would take where nothing was fitted."""

from __future__ import annotations

from hespas.estimators.collectives.model import Collectives

__all__ = ["Collectives"]
