"""When the recordings of ranks began, told by what they ended together."""

from __future__ import annotations

import numpy as np

from hespas.graph.columns import FloatArray, IntArray
from hespas.simulator.job.actors import Cast
from hespas.simulator.job.meetings import Meetings
from hespas.simulator.schedule import Priority, list_schedule

__all__ = ["recorded_starts"]


def recorded_starts(cast: Cast, meetings: Meetings, priority: Priority) -> FloatArray:
    """When each actor starts after the first one [ns], shape ``(actors,)``.

    Alone and with the times that were recorded, waits for others among them, each rank does what it did,
    after its own start. Members of a collective end it together: starts are chosen so that they do, in the
    median of what each rank shares with those before it. 0 where it shares nothing. O(tasks log tasks).
    """
    starts = np.zeros(len(cast.actors))
    ended = np.full(meetings.count, np.nan)
    for place, actor in enumerate(cast.actors):
        mine: IntArray = np.arange(cast.first[place], cast.first[place + 1], dtype=np.int64)
        mine = mine[(meetings.ended_by[mine] >= 0) & ~meetings.is_message[mine]]
        end_ns = list_schedule(actor.program.tasks, priority).end_ns[mine - cast.first[place]]
        met = meetings.ended_by[mine]
        apart = ended[met] - end_ns
        known = ~np.isnan(apart)
        if known.any():
            starts[place] = np.median(apart[known])
        fresh = np.isnan(ended[met])
        ended[met[fresh]] = end_ns[fresh] + starts[place]
    earliest: FloatArray = starts - starts.min(initial=np.inf)
    return earliest
