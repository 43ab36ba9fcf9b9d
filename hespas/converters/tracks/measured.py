"""The tracks of a measured profile: streams of devices, threads of the host, arrows of launches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.converters.tracks.scene import Argument, Flows, Scene, TextColumn, Tracks
from hespas.graph import Diagnostics, OpClass, Profile
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray

__all__ = ["HOST_CATEGORY", "scene_of_profile"]

HOST_CATEGORY = "host operation"
"""The category of slices that are no device work."""
_HALF_PAIR = re.compile(rb"\xed[\xa0-\xbf]")
_CLASSES = tuple("" if member is OpClass.UNKNOWN else member.name.lower() for member in OpClass)
_NOWHERE = -1


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """Slices in the order of a scene: ``event`` is the row each had, ``track`` its track."""

    event: IntArray
    track: SmallIntArray

    @classmethod
    def of(cls, track: IntArray, start_ns: FloatArray, duration_ns: FloatArray) -> _Placed:
        """By track, then by start, then the longest first; what has no start is left out."""
        known = np.flatnonzero(~np.isnan(start_ns))
        order = np.lexsort((-duration_ns[known], start_ns[known], track[known]))
        event = known[order]
        return cls(event, track[event].astype(np.int32))

    def place_of(self, rows: int) -> IntArray:
        """The slice of each row, -1 where it was left out."""
        place = np.full(rows, _NOWHERE, np.int64)
        place[self.event] = np.arange(len(self.event))
        return place


def scene_of_profile(profile: Profile, diagnostics: Diagnostics, *, arrows: bool) -> Scene:
    """Device tracks, then those of the host; an arrow from each host operation to the work it caused."""
    _report(profile, diagnostics)
    processes, process = _processes(profile)
    tracks, track = _streams(profile, process)
    placed = _Placed.of(track, profile.start_ns, profile.duration_ns)
    device = Tracks(
        processes=processes,
        track_process=tuple(owner for owner, _ in tracks),
        track_name=tuple(f"stream {stream}" if stream >= 0 else "no stream" for _, stream in tracks),
        track=placed.track,
        name=_names(profile, placed.event),
        category=TextColumn(profile.category_row[placed.event], profile.strings),
        start_ns=profile.start_ns[placed.event],
        duration_ns=profile.duration_ns[placed.event],
        arguments=_arguments(profile, placed.event),
    )
    if not len(profile.host):
        return Scene(profile.name, (device,), Flows.none(), profile.metadata)
    host, host_placed = _host(profile)
    flows = Flows.none()
    if arrows:
        caused = np.flatnonzero(profile.host_event >= 0)
        source = host_placed.place_of(len(profile.host))[profile.host_event[caused]]
        target = placed.place_of(len(profile))[caused]
        drawn = (source >= 0) & (target >= 0)
        flows = Flows.of([("launch", source[drawn] + len(device), target[drawn])])
    return Scene(profile.name, (device, host), flows, profile.metadata)


def _report(profile: Profile, diagnostics: Diagnostics) -> None:
    """Say what a viewer will not show, or shows in another way."""
    homeless = np.isnan(profile.start_ns)
    total_ns = float(np.nansum(profile.duration_ns[homeless]))
    diagnostics.warning(
        "tracks.no-start", profile.name,
        f"events have no start and stand on no track: {total_ns:,.0f} ns of device time",
        count=int(homeless.sum()),
    )  # fmt: skip
    negative = int((profile.duration_ns < 0).sum())
    diagnostics.warning(
        "tracks.negative-duration", profile.name, "events end before they start; viewers do not draw them",
        count=negative,
    )  # fmt: skip
    halves = len(_HALF_PAIR.findall(bytes(profile.strings.buffer)))
    diagnostics.warning(
        "tracks.invalid-text", profile.name, "halves of surrogate pairs are no text and are replaced",
        count=halves,
    )  # fmt: skip


def _processes(profile: Profile) -> tuple[tuple[str, ...], IntArray]:
    """One process for each rank and device that has events: their names, and that of each event."""
    both = np.stack([profile.rank.astype(np.int64), profile.device_index.astype(np.int64)])
    pairs, process = np.unique(both, axis=1, return_inverse=True)
    named = tuple(_process_name(profile, rank, device) for rank, device in pairs.T.tolist())
    return named, process.reshape(-1).astype(np.int64, copy=False)


def _process_name(profile: Profile, rank: int, device: int) -> str:
    name = profile.devices[device] if 0 <= device < len(profile.devices) else ""
    who = f"rank {rank}" if rank >= 0 else "unknown rank"
    return f"{who}: {name}" if name else who


def _streams(profile: Profile, process: IntArray) -> tuple[list[tuple[int, int]], IntArray]:
    both = np.stack([process, profile.stream])
    pairs, track = np.unique(both, axis=1, return_inverse=True)
    listed: list[list[int]] = pairs.T.tolist()
    return [(owner, stream) for owner, stream in listed], track.reshape(-1).astype(np.int64, copy=False)


def _names(profile: Profile, event: IntArray) -> TextColumn:
    """The kernel, else the operation, else the category."""
    kernel, op = profile.kernel_row[event], profile.op_row[event]
    return TextColumn(
        np.where(kernel > 0, kernel, np.where(op > 0, op, profile.category_row[event])), profile.strings
    )


def _arguments(profile: Profile, event: IntArray) -> Mapping[str, Argument]:
    """What else is known; ``kernel`` only where the operation is named alike, as the name says it."""
    op = profile.op_row[event]
    alike = (profile.kernel_row[event] == op) & (op > 0)
    texts: dict[str, NDArray[np.int32]] = {
        "op": op,
        "kernel": np.where(alike, op, 0).astype(np.int32),
        "module": profile.module_row[event],
        "shapes": profile.shapes_row[event],
        "dtype": profile.dtype_row[event],
    }
    numbers: dict[str, FloatArray] = {
        "run": _known(profile.run[event]),
        "bytes": profile.bytes_moved[event],
        "repeats": np.where(profile.repeats[event] == 1, np.nan, profile.repeats[event]),
        "spread_ns": profile.spread_ns[event],
    }
    arguments: dict[str, Argument] = {
        key: TextColumn(rows, profile.strings) for key, rows in texts.items() if rows.any()
    }
    if profile.op_class[event].any():
        arguments["op_class"] = TextColumn(profile.op_class[event].astype(np.int32), _CLASSES)
    return arguments | {key: column for key, column in numbers.items() if not np.isnan(column).all()}


def _known(column: SmallIntArray) -> FloatArray:
    return np.where(column >= 0, column, np.nan)


def _host(profile: Profile) -> tuple[Tracks, _Placed]:
    """The threads of the host, of the one process that there is or of one of their own."""
    host = profile.host
    threads, track = np.unique(host.thread_row, return_inverse=True)
    placed = _Placed.of(track.reshape(-1).astype(np.int64), host.start_ns, host.duration_ns)
    columns = {
        "shapes": host.shapes_row, "dtype": host.dtype_row, "strides": host.strides_row,
        "values": host.values_row,
    }  # fmt: skip
    texts = {key: rows[placed.event] for key, rows in columns.items()}
    ranks = np.unique(profile.rank)
    owner = f"rank {int(ranks[0])} host" if len(ranks) == 1 and int(ranks[0]) >= 0 else "host"
    tracks = Tracks(
        processes=(owner,),
        track_process=(0,) * len(threads),
        track_name=tuple(f"thread {profile.strings[row]}".rstrip() for row in threads.tolist()),
        track=placed.track,
        name=TextColumn(host.name_row[placed.event], profile.strings),
        category=TextColumn(np.ones(len(placed.event), np.int32), ("", HOST_CATEGORY)),
        start_ns=host.start_ns[placed.event],
        duration_ns=host.duration_ns[placed.event],
        arguments={key: TextColumn(rows, profile.strings) for key, rows in texts.items() if rows.any()},
    )
    return tracks, placed
