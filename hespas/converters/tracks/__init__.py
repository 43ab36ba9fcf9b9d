"""What ran when, as slices on named tracks: what every format of timelines writes.

A :class:`Scene` is made of a measured profile or of a simulated run; several scenes side by side are one.
"""

from __future__ import annotations

from hespas.converters.tracks.displayed import Displayed, Simulated, measured_scene, scene_of, scenes_beside
from hespas.converters.tracks.scene import Argument, Flows, Scene, TextColumn, Tracks, side_by_side

__all__ = [
    "Argument",
    "Displayed",
    "Flows",
    "Scene",
    "Simulated",
    "TextColumn",
    "Tracks",
    "measured_scene",
    "scene_of",
    "scenes_beside",
    "side_by_side",
]
