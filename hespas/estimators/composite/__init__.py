"""Several estimators in one: the first that covers an operation speaks."""

from __future__ import annotations

from hespas.estimators.composite.model import DEFAULT_ORDER, Composite
from hespas.estimators.composite.order import Order, read_order

__all__ = ["DEFAULT_ORDER", "Composite", "Order", "read_order"]
