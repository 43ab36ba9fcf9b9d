"""What a recipe gets: one node of the graph in terms of a replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan
from typing import NamedTuple

from hespas.converters.stablehlo.replay_bind import Binder
from hespas.converters.stablehlo.replay_emit import Emitter, Tensor, Value

__all__ = ["Contraction", "Node", "Recipe"]


class Contraction(NamedTuple):
    """A product ``batch x (m x k by k x n)`` of element types ``lhs`` and ``rhs`` (codes, -1 unknown)."""

    batch: int
    m: int
    n: int
    k: int
    lhs: int
    rhs: int

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.m * self.n * self.k


class Node(NamedTuple):
    """An operation to replay. ``op`` is its name without dialect; costs are NaN where unknown.

    ``producers`` holds, for each operation this one waits for, the values it made.
    """

    op: str
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    producers: Sequence[Sequence[Value]]
    contractions: tuple[Contraction, ...]
    flops: float
    useful_flops: float
    transcendentals: float
    bytes_moved: float
    binder: Binder

    @property
    def emitter(self) -> Emitter:
        """Where operations go."""
        return self.binder.emitter

    @property
    def target_flops(self) -> float:
        """FLOPs as XLA counts them: without those on padding and dilation zeros, where that is known."""
        return self.flops if isnan(self.useful_flops) else self.useful_flops

    @property
    def result(self) -> Tensor | None:
        """The result type where there is exactly one."""
        return self.results[0] if len(self.results) == 1 else None

    def bound(self, wanted: Sequence[Tensor] | None = None, *, stretch: bool = False) -> list[Value]:
        """Operands of the node's own types, or those ``wanted``, that wait for all producers."""
        tensors = self.operands if wanted is None else wanted
        return self.binder.bind(self.op, self.producers, tensors, stretch=stretch)


Recipe = Callable[[Node], "list[Value] | None"]
"""Emits a node and returns its results; None (and nothing emitted) where the types do not fit."""
