"""One trace: which extents an axis splits, followed from its collectives through the program."""

from __future__ import annotations

from hespas.generators.rescale.figures import Figures
from hespas.graph import OpGraph
from hespas.graph.columns import BoolArray
from hespas.graph.errors import UnsupportedError

__all__ = ["sharded"]


def sharded(
    graph: OpGraph, now: Figures, here: BoolArray, axis: str, before: int, after: int, *, by_products: bool
) -> Figures:
    raise UnsupportedError("one trace", hint="--with")
