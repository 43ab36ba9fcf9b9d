"""Which rank classes are written: known before jaxlib is loaded, since the destination depends on it."""

from __future__ import annotations

from hespas.converters.format import WriteOptions
from hespas.graph import Workload

__all__ = ["chosen_classes"]


def chosen_classes(workload: Workload, options: WriteOptions) -> list[int]:
    """The classes of the chosen ranks, ascending."""
    ranks = options.ranks if options.ranks is not None else range(workload.num_ranks)
    return [row for row, size in enumerate(workload.sizes_within(ranks)) if size]
