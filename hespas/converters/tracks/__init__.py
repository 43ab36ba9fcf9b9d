"""What ran when, as slices on named tracks: what every format of timelines writes.

A :class:`Scene` is made of a measured profile or of a simulated run; several scenes side by side are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from hespas.converters.format import Value, WriteOptions
from hespas.converters.meetings import meetings_of
from hespas.converters.tracks.scene import (
    Argument,
    Flows,
    Scene,
    TextColumn,
    Tracks,
    scene_of_profile,
    side_by_side,
    slices_of_events,
)
from hespas.converters.tracks.simulated import Simulated, scene_of_timeline
from hespas.graph import Diagnostics, Profile
from hespas.graph.columns import IntArray
from hespas.graph.errors import UsageError

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


def measured_scene(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> Scene:
    """The tracks of a profile that is written to ``path``. Raises ``UsageError`` for a workload."""
    if isinstance(value, Profile):
        return scene_of(value, diagnostics)
    raise UsageError(
        "a timeline shows when things ran, and a workload does not say",
        path=options.name or str(path),
        hint="run it first: hespas simulate SOURCE --timeline FILE",
    )


def scenes_beside(
    values: Sequence[tuple[str, Displayed]], diagnostics: Diagnostics, *, arrows: bool = True
) -> Scene:
    """Several values side by side, each under its label; raises as :func:`scene_of` does. Arrows between
    profiles join what their ranks did together, see :mod:`hespas.converters.meetings`.
    """
    scenes = [(label, scene_of(value, diagnostics, arrows=arrows)) for label, value in values]
    return side_by_side(scenes, _arrows_between(values, scenes) if arrows else ())


def _arrows_between(
    values: Sequence[tuple[str, Displayed]], scenes: Sequence[tuple[str, Scene]]
) -> list[tuple[str, IntArray, IntArray]]:
    """Along the members of each collective, and from sender to receiver."""
    first = list(accumulate((len(scene) for _, scene in scenes), initial=0))
    measured = [
        (value, at) for (_, value), at in zip(values, first, strict=False) if isinstance(value, Profile)
    ]
    found = meetings_of([profile for profile, _ in measured])
    places = [slices_of_events(profile) for profile, _ in measured]
    slices = np.array(
        [
            measured[which][1] + places[which][event] if places[which][event] >= 0 else -1
            for which, event in zip(found.profile.tolist(), found.event.tolist(), strict=True)
        ],
        np.int64,
    )
    arrows: list[tuple[str, IntArray, IntArray]] = []
    for kind, rows in zip(("collective", "message"), found.pairs(), strict=True):
        ends = slices[np.array(rows, np.int64).reshape(-1, 2)]
        drawn = ends[(ends >= 0).all(axis=1)]
        arrows.append((kind, drawn[:, 0], drawn[:, 1]))
    return arrows
