"""Which rank runs which class, run-length encoded: ``[class, how many ranks]`` in rank order.

Ranks of the job whose program is not in the file have class -1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hespas.converters.replica_groups import MAX_DEVICES
from hespas.graph import ABSENT
from hespas.graph.columns import SmallIntArray

__all__ = ["decode_ranks", "encode_ranks"]

_Run = tuple[int, int]


def encode_ranks(rank_class: SmallIntArray) -> tuple[_Run, ...]:
    """The runs of a rank map. O(ranks), O(1) for a constant one."""
    if 0 in rank_class.strides or not len(rank_class):
        return ((int(rank_class[0]), len(rank_class)),) if len(rank_class) else ()
    starts = np.flatnonzero(np.diff(rank_class, prepend=rank_class[0] - 1))
    lengths = np.diff(starts, append=len(rank_class))
    return tuple(zip(rank_class[starts].tolist(), lengths.tolist(), strict=True))


def decode_ranks(runs: Sequence[_Run] | None, num_ranks: int | None, classes: int) -> SmallIntArray:
    """The rank map; raises ``ValueError`` where runs, number of ranks and classes disagree."""
    if runs is None:
        if classes != 1:
            raise ValueError(f"rank_class must say which ranks run which of the {classes} classes")
        runs = ((0, 1 if num_ranks is None else num_ranks),)
    total = sum(count for _, count in runs)
    if num_ranks is not None and total != num_ranks:
        raise ValueError(f"rank_class covers {total} ranks, num_ranks says {num_ranks}")
    if not 1 <= total <= MAX_DEVICES:
        raise ValueError(f"{total} ranks; from 1 to {MAX_DEVICES:,} are possible")
    wrong = [index for index, _ in runs if not ABSENT <= index < classes]
    if wrong:
        raise ValueError(f"rank_class names class {wrong[0]}; there are {classes}")
    if all(index == ABSENT or not count for index, count in runs):
        raise ValueError("rank_class names no class: no rank of the job is here")
    if len(runs) == 1:
        return np.broadcast_to(np.int32(runs[0][0]), (total,))
    return np.repeat(
        np.array([index for index, _ in runs], np.int32), np.array([count for _, count in runs], np.int64)
    )
