"""Learned estimators: gradient-boosted trees, fitted on measured tables, stored as arrays with a card."""

from __future__ import annotations

from hespas.estimators.learned.inference import Learned

__all__ = ["Learned"]
