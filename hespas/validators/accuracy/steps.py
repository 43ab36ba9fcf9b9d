"""Which events of a profile are the step of a program: other programs run beside it."""

from __future__ import annotations

import numpy as np

from hespas.graph import Profile
from hespas.graph.columns import BoolArray, IntArray

__all__ = ["step_rows"]

_MATCHED_NS = 1e-9
"""What a matched event of no time weighs."""


def step_rows(profile: Profile, matched: BoolArray) -> IntArray:
    """Numbers of all events of the module that ran the program: on each rank, that with most matched time.
    ``matched`` has shape ``(events,)``. Runs are counted per module, so those of two are never one step; of
    a rank where nothing is matched, no event is in it. O(events log events).
    """
    time = np.where(matched, np.maximum(np.nan_to_num(profile.duration_ns), 0.0) + _MATCHED_NS, 0.0)
    keys, place = np.unique(
        profile.rank.astype(np.int64) << 32 | profile.module_row.astype(np.int64), return_inverse=True
    )
    total = np.bincount(place, time, len(keys))
    order = np.lexsort((total, keys >> 32))
    last = np.append(np.diff(keys[order] >> 32) != 0, np.ones(min(len(keys), 1), np.bool_))
    is_step = np.zeros(len(keys), np.bool_)
    is_step[order[last]] = True
    is_step &= total > 0
    return np.flatnonzero(is_step[place])
