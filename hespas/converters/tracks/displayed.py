"""What can be shown on tracks: a measured profile, or a simulated run with the workload it is of."""

from __future__ import annotations

from dataclasses import dataclass

from hespas.converters.tracks.measured import scene_of_profile
from hespas.converters.tracks.scene import Scene
from hespas.converters.tracks.simulated import scene_of_timeline
from hespas.graph import Diagnostics, Profile, Timeline, Workload

__all__ = ["Displayed", "Simulated", "scene_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Simulated:
    """A timeline, and the workload whose nodes it numbers."""

    timeline: Timeline
    workload: Workload


Displayed = Profile | Simulated


def scene_of(value: Displayed, diagnostics: Diagnostics, *, arrows: bool = True) -> Scene:
    """The tracks of a value: one process per rank (and device), one track per stream or resource.

    Arrows go from host operations to the device work they caused, or along dependencies, messages and
    collectives; ``arrows`` false leaves them out. Raises ``UsageError`` where a timeline does not fit its
    workload. O(events log events), vectorised but for communication.
    """
    if isinstance(value, Profile):
        return scene_of_profile(value, diagnostics, arrows=arrows)
    return scene_of_timeline(value.timeline, value.workload, diagnostics, arrows=arrows)
