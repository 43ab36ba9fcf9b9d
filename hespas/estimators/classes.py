"""Operations by what they are, so that each model of a class is asked once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hespas.estimators.operations import Labels, Operations
from hespas.graph.columns import IntArray

__all__ = ["label_classes"]


def label_classes(ops: Operations) -> Iterator[tuple[tuple[str, str, str, str], IntArray]]:
    """Kind, operation, scheme and variant of each distinct class, and its rows. O(ops log ops)."""
    labels: tuple[Labels, ...] = (ops.kind, ops.op, ops.scheme, ops.variant)
    key = np.zeros(len(ops), np.int64)
    for each in labels:
        key = key * (len(each.names) + 1) + each.row
    order = np.argsort(key, kind="stable")
    ends = np.flatnonzero(np.diff(key[order])) + 1
    for rows in np.split(order, ends) if len(order) else ():
        kind, op, scheme, variant = (each[int(rows[0])] for each in labels)
        yield (kind, op, scheme, variant), rows.astype(np.int64)
