"""Timeline files: a simulated step, with measured profiles as overlay, for viewers or spreadsheets."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import cast

import numpy as np

from hespas.converters import WriteOptions, is_recognised
from hespas.converters.comm_matching import clock_shifts, match_profiles
from hespas.converters.tracks import Displayed, SimulatedRun, TrackSet, joined_tracks
from hespas.files.output import check_destination, write_atomically
from hespas.files.streams import first_bytes
from hespas.graph import Diagnostics, Profile, Timeline, Workload
from hespas.graph.deprecation import renamed_arguments
from hespas.graph.errors import OutputError, UsageError

__all__ = ["aligned", "check_timeline", "write_timeline"]

_VIEWER_WRITERS = {
    ".json": "hespas.converters.chrome_trace.writer",
    ".pftrace": "hespas.converters.perfetto.writer",
    ".perfetto-trace": "hespas.converters.perfetto.writer",
    ".perfetto": "hespas.converters.perfetto.writer",
}
_TABLE = ".csv"
_HINT = "name it FILE.json or FILE.pftrace for a viewer, FILE.csv for a table (all of them also .gz)"
_SIMULATED_DEVICE = "simulated"
_TIMELINE_MARKS = (
    b'timeline":"simulated"',  # in the header of a Chrome trace
    b"timeline\x1a\x09simulated",  # an attribute of a Perfetto trace
)
_TIMELINE_TABLE = re.compile(rb'"hardware"[^\n]*\n"simulated')
"""Start of a table whose first row is of a simulated device."""
_HEAD_BYTES = 65_536

_WriteScene = Callable[[TrackSet, Path, WriteOptions], None]


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix


@renamed_arguments(beside="overlay")
def check_timeline(path: Path | None, *, overlay: bool = False, overwrite: bool = False) -> None:
    """Refuse a file that :func:`write_timeline` cannot write, before any work is done.

    Raises ``UsageError`` for an unknown suffix, and for an ``overlay`` in a table or without a file;
    ``OutputError`` if the file exists (without ``overwrite``), cannot be written, or holds a workload or a
    measured profile.
    """
    if path is None:
        if overlay:
            raise UsageError("`overlay` shows a profile in a timeline", hint="add `timeline=FILE.json`")
        return
    suffix = _suffix(path)
    if suffix != _TABLE and suffix not in _VIEWER_WRITERS:
        named = f"the suffix {suffix!r}" if suffix else "a name without a suffix"
        raise UsageError(f"{named} is not of a timeline format", path=str(path), hint=_HINT)
    if overlay and suffix == _TABLE:
        raise UsageError(
            "a table holds one run, without an overlay", path=str(path),
            hint="name it FILE.json or FILE.pftrace, or leave out `overlay`",
        )  # fmt: skip
    if path.is_dir():
        raise OutputError("exists and is a directory", path=str(path), hint="name a file in it")
    check_destination(path, overwrite=overwrite)
    if path.exists() and is_recognised(path):
        head = first_bytes(path, _HEAD_BYTES)
        is_timeline = any(mark in head for mark in _TIMELINE_MARKS) or _TIMELINE_TABLE.match(head) is not None
        if not is_timeline:
            raise OutputError(
                "holds a workload or a measured profile, not an earlier timeline", path=str(path),
                hint="choose another file",
            )  # fmt: skip


@renamed_arguments(beside="overlay")
def write_timeline(
    timeline: Timeline,
    workload: Workload,
    path: Path,
    *,
    overlay: Sequence[Profile] = (),
    hardware: str = "",
    overwrite: bool = False,
    diagnostics: Diagnostics | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write a simulated run atomically, with measured profiles as ``overlay``, whose first step starts when
    the run starts: see :func:`aligned`.

    The suffix selects the format: a Chrome trace, a Perfetto trace, or a table of the spans, whose device
    is ``simulated HARDWARE``. Returns the number of bytes written. Raises what :func:`check_timeline`
    raises, and ``UsageError`` if the timeline is not of this workload.
    """
    check_timeline(path, overlay=bool(overlay), overwrite=overwrite)
    sink = diagnostics if diagnostics is not None else Diagnostics()
    options = WriteOptions(name=path.name, progress=progress)
    run = SimulatedRun(timeline, workload)

    def fill(temporary: Path) -> None:
        suffix = _suffix(path)
        if suffix == _TABLE:
            from hespas.converters.ops_table.writer import write_ops_table
            from hespas.converters.tracks.simulated import profile_of_run

            profile = profile_of_run(run, f"{_SIMULATED_DEVICE} {hardware}".rstrip())
            write_ops_table(profile, temporary, options, sink)
            return
        values: list[tuple[str, Displayed]] = [("", run)]
        if overlay:
            values = [*(("measured", profile) for profile in aligned(overlay)), ("simulated", run)]
        write_scene = cast("_WriteScene", import_module(_VIEWER_WRITERS[suffix]).write_scene)
        write_scene(joined_tracks(values, sink), temporary, options)

    return write_atomically(path, fill, overwrite=overwrite, directory=False)


def aligned(profiles: Sequence[Profile]) -> list[Profile]:
    """Move profiles of one job to the clock of a simulated step: the device events of the first recorded
    step (without steps: all device events) start at 0.

    Recordings of several processes have different clocks. All ranks leave a collective at the same time, so
    a later profile is shifted until the ends of the collectives that it shares with an earlier one, by
    group and sequence number, agree in the median (see :mod:`hespas.converters.comm_matching`). A profile
    that shares none starts at 0.
    """
    events = match_profiles(profiles)
    owners: list[int] = events.profile.tolist()
    ends_ns = [
        float(profiles[owner].start_ns[event] + profiles[owner].duration_ns[event])
        for owner, event in zip(owners, events.event.tolist(), strict=True)
    ]
    starts_ns: list[float] = []
    for profile in profiles:
        has_start = ~np.isnan(profile.start_ns)
        in_step = has_start & (profile.run >= 0)
        chosen = in_step if bool(in_step.any()) else has_start
        starts_ns.append(float(profile.start_ns[chosen].min()) if bool(chosen.any()) else 0.0)
    # a message may be sent long before it is received: only collectives end at the same time
    collective = np.where(events.sends < 0, events.instance, -1)
    shifts = clock_shifts(owners, collective, ends_ns, starts_ns)
    return [profile.shifted(shifts[index]) for index, profile in enumerate(profiles)]
