"""What is fitted together: rows of one kind, operation, scheme and variant; and which rows may be fitted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from hespas.graph.columns import IntArray
from hespas.hardware import ANY
from hespas.measurements import Measurements

__all__ = ["FITTED_SPLITS", "Rows", "classes_of", "may_be_fitted"]

FITTED_SPLITS = ("calib", "")
"""Splits that may be fitted on: the one made for it, and tables that state none."""

_FEWEST = 12
_FEWEST_LAYERS = 4
"""With fewer, leaving a layer out tells of that layer alone: single shapes are left out instead."""
_POOLED = frozenset({"vector", "normalization", "reduction", "pooling", "gather", "move", "moe"})
"""Kinds whose operations are near enough to each other for one fit of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of one class; ``op`` is ``*`` for all operations of a kind together. ``group`` numbers what is
    left out of a fit as a whole to test it: shapes, or layers whatever the number of tokens.
    """

    kind: str
    op: str
    scheme: str
    variant: str
    measured: Measurements
    group: IntArray

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What the fit will be of."""
        return self.kind, self.op, self.scheme, self.variant

    def take(self, rows: IntArray) -> Rows:
        """Some rows of the class."""
        return Rows(
            kind=self.kind,
            op=self.op,
            scheme=self.scheme,
            variant=self.variant,
            measured=self.measured.take(rows),
            group=self.group[rows],
        )


_TOKENS: Mapping[str, str] = {"matmul": "m", "convolution": "m", "moe": "tokens"}
"""The dimension in which one layer is swept: a layer is left out as a whole, or its neighbours tell all."""


def may_be_fitted(measured: Measurements) -> Measurements:
    """Without the rows that are kept for testing: the one gate that every fit goes through."""
    return measured.take(measured.split.where(*FITTED_SPLITS))


def classes_of(measured: Measurements) -> Iterator[Rows]:
    """The classes of some measurements that have rows enough, in a fixed order. ``op`` ``*`` where a kind has
    several operations.
    """
    ops = measured.ops
    layers, shapes = _layers(measured), measured.shape_group()
    seen = dict(ops.classes())
    pooled: dict[tuple[str, str, str, str], list[IntArray]] = {}
    for (kind, _, scheme, variant), rows in seen.items():
        if kind in _POOLED:
            pooled.setdefault((kind, ANY, scheme, variant), []).append(rows)
    seen |= {name: np.concatenate(parts) for name, parts in pooled.items() if len(parts) > 1}
    for (kind, op, scheme, variant), rows in sorted(seen.items()):
        if len(rows) >= _FEWEST and scheme:
            yield Rows(
                kind=kind,
                op=op,
                scheme=scheme,
                variant=variant,
                measured=measured.take(rows),
                group=layers[rows] if len(np.unique(layers[rows])) >= _FEWEST_LAYERS else shapes[rows],
            )


def _layers(measured: Measurements) -> IntArray:
    """A number per shape, or per layer in kinds that are swept over tokens."""
    ops = measured.ops
    swept = [_TOKENS.get(name, "") for name in ops.kind.names]
    dims = {
        name: np.where(np.array([each == name for each in swept])[ops.kind.row], np.nan, column)
        if name in swept
        else column
        for name, column in ops.dims.items()
    }
    return replace(measured, ops=replace(ops, dims=dims)).shape_group()
