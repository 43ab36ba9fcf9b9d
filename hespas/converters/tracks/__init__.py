"""Timelines as slices on named tracks, in the form that all timeline formats write.

A :class:`TrackSet` is made from a measured profile or from a simulated run; several of them join to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from hespas.converters.comm_matching import match_profiles
from hespas.converters.format import Value, WriteOptions
from hespas.converters.tracks.simulated import SimulatedRun, tracks_of_timeline
from hespas.converters.tracks.slices import (
    Argument,
    Flows,
    TextColumn,
    Tracks,
    TrackSet,
    join_track_sets,
    slices_of_events,
    tracks_of_profile,
)
from hespas.graph import Diagnostics, Profile
from hespas.graph.columns import IntArray
from hespas.graph.errors import UsageError

__all__ = [
    "Argument",
    "Displayed",
    "Flows",
    "SimulatedRun",
    "TextColumn",
    "TrackSet",
    "Tracks",
    "join_track_sets",
    "joined_tracks",
    "tracks_of",
    "tracks_of_measurement",
]

Displayed = Profile | SimulatedRun


def tracks_of(value: Displayed, diagnostics: Diagnostics, *, arrows: bool = True) -> TrackSet:
    """Return the tracks of a profile or timeline: one process per rank (and device), one track per stream or
    resource.

    Arrows go from host operations to the device work that they caused, or along dependencies, messages and
    collectives; ``arrows=False`` omits them. Raises ``UsageError`` if a timeline does not fit its workload.
    O(events log events), vectorised except for communication.
    """
    if isinstance(value, Profile):
        return tracks_of_profile(value, diagnostics, arrows=arrows)
    return tracks_of_timeline(value.timeline, value.workload, diagnostics, arrows=arrows)


def tracks_of_measurement(
    value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics
) -> TrackSet:
    """Return the tracks of a profile that is written to ``path``. Raises ``UsageError`` for a workload."""
    if isinstance(value, Profile):
        return tracks_of(value, diagnostics)
    raise UsageError(
        "a workload has no times, so it cannot be written as a timeline",
        path=options.name or str(path),
        hint="run it first: hespas simulate SOURCE --timeline FILE",
    )


def joined_tracks(
    values: Sequence[tuple[str, Displayed]], diagnostics: Diagnostics, *, arrows: bool = True
) -> TrackSet:
    """Return the tracks of several values (profiles, timelines) in one set. The label of each value is a
    prefix of its process names.

    Arrows between profiles connect the members of each collective, and sender and receiver of each message;
    see :mod:`hespas.converters.comm_matching`. Raises the errors of :func:`tracks_of`.
    """
    track_sets = [(label, tracks_of(value, diagnostics, arrows=arrows)) for label, value in values]
    if not arrows:
        return join_track_sets(track_sets)
    first_slice = list(accumulate((len(track_set) for _, track_set in track_sets), initial=0))
    measured = [
        (value, first)
        for (_, value), first in zip(values, first_slice, strict=False)
        if isinstance(value, Profile)
    ]
    events = match_profiles([profile for profile, _ in measured])
    slices_of = [slices_of_events(profile) for profile, _ in measured]
    slices = np.array(
        [
            measured[profile][1] + slices_of[profile][event] if slices_of[profile][event] >= 0 else -1
            for profile, event in zip(events.profile.tolist(), events.event.tolist(), strict=True)
        ],
        np.int64,
    )
    between: list[tuple[str, IntArray, IntArray]] = []
    for kind, rows in zip(("collective", "message"), events.pairs(), strict=True):
        ends = slices[np.array(rows, np.int64).reshape(-1, 2)]
        ends = ends[(ends >= 0).all(axis=1)]
        between.append((kind, ends[:, 0], ends[:, 1]))
    return join_track_sets(track_sets, between)
