"""When everything ran, as a file that a viewer or a spreadsheet opens."""

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
from hespas.graph.errors import OutputError, UsageError

__all__ = ["aligned", "check_timeline", "write_timeline"]

_VIEWED = {
    ".json": "hespas.converters.chrome_trace.writer",
    ".pftrace": "hespas.converters.perfetto.writer",
    ".perfetto-trace": "hespas.converters.perfetto.writer",
    ".perfetto": "hespas.converters.perfetto.writer",
}
_TABLE = ".csv"
_HINT = "name it FILE.json or FILE.pftrace for a viewer, FILE.csv for a table (all of them also .gz)"
_SIMULATED_DEVICE = "simulated"
_OURS = (
    b'timeline":"simulated"',  # in the header of a Chrome trace
    b"timeline\x1a\x09simulated",  # an attribute of a Perfetto trace
)
_OUR_TABLE = re.compile(rb'"hardware"[^\n]*\n"simulated')
"""A table whose first row is of a simulated device."""
_HEAD_BYTES = 65_536


_WriteScene = Callable[[TrackSet, Path, WriteOptions], None]


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix


def check_timeline(path: Path | None, *, beside: bool = False, overwrite: bool = False) -> None:
    """Refuse a file that :func:`write_timeline` cannot write, before any work is done.

    Raises ``UsageError`` where its name tells no format, and where a profile is to stand ``beside`` a run in
    a table or in no file at all; ``OutputError`` where it exists already (without ``overwrite``), cannot be
    written, or holds a workload or a measured profile.
    """
    if path is None:
        if beside:
            raise UsageError("`beside` shows a profile in a timeline", hint="add `timeline=FILE.json`")
        return
    suffix = _suffix(path)
    if suffix != _TABLE and suffix not in _VIEWED:
        named = f"the suffix {suffix!r}" if suffix else "a name without a suffix"
        raise UsageError(f"{named} tells no format of timelines", path=str(path), hint=_HINT)
    if beside and suffix == _TABLE:
        raise UsageError(
            "a table holds one run, nothing beside it", path=str(path),
            hint="name it FILE.json or FILE.pftrace, or leave out `beside`",
        )  # fmt: skip
    if path.is_dir():
        raise OutputError("exists and is a directory", path=str(path), hint="name a file in it")
    check_destination(path, overwrite=overwrite)
    if path.exists() and is_recognised(path) and not _is_timeline(path):
        raise OutputError(
            "holds a workload or a measured profile, and no earlier timeline", path=str(path),
            hint="choose another file",
        )  # fmt: skip


def _is_timeline(path: Path) -> bool:
    """Whether a file was written by :func:`write_timeline`."""
    data = first_bytes(path, _HEAD_BYTES)
    return any(sign in data for sign in _OURS) or _OUR_TABLE.match(data) is not None


def write_timeline(
    timeline: Timeline,
    workload: Workload,
    path: Path,
    *,
    beside: Sequence[Profile] = (),
    hardware: str = "",
    overwrite: bool = False,
    diagnostics: Diagnostics | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write a simulated run, and measured profiles ``beside`` it, at once or not at all: their first step
    begins where the run does, see :func:`aligned`.

    The name tells the format: Chrome trace, Perfetto trace, or a table of the spans, whose device is
    ``simulated HARDWARE``. Returns the bytes written. Raises as :func:`check_timeline` does, and
    ``UsageError`` where the timeline is not of this workload.
    """
    check_timeline(path, beside=bool(beside), overwrite=overwrite)
    found = diagnostics if diagnostics is not None else Diagnostics()
    options = WriteOptions(name=path.name, progress=progress)
    run = SimulatedRun(timeline, workload)

    def fill(temporary: Path) -> None:
        suffix = _suffix(path)
        if suffix == _TABLE:
            _write_table(run, hardware, temporary, options, found)
            return
        values: list[tuple[str, Displayed]] = [("", run)]
        if beside:
            values = [*(("measured", each) for each in aligned(beside)), ("simulated", run)]
        write = cast("_WriteScene", import_module(_VIEWED[suffix]).write_scene)
        write(joined_tracks(values, found), temporary, options)

    return write_atomically(path, fill, overwrite=overwrite, directory=False)


def aligned(profiles: Sequence[Profile]) -> list[Profile]:
    """Profiles of one job on the clock of a simulated step: device work of the first recorded step (without
    steps, all of it) begins at 0.

    Recordings of several processes have clocks of their own. All ranks leave a collective together: a later
    profile is moved so that the ends of those it shares with an earlier one, by group and number, agree in
    the median (see :mod:`hespas.converters.comm_matching`); one that shares none begins at 0 itself.
    """
    found = match_profiles(profiles)
    owners: list[int] = found.profile.tolist()
    ends_ns = [
        float(profiles[which].start_ns[event] + profiles[which].duration_ns[event])
        for which, event in zip(owners, found.event.tolist(), strict=True)
    ]
    starts_ns = [_step_start(profile) for profile in profiles]
    # a message may be sent long before it is received: only collectives are left together
    together = np.where(found.sends < 0, found.instance, -1)
    shifts = clock_shifts(owners, together, ends_ns, starts_ns)
    return [profile.shifted(shifts[which]) for which, profile in enumerate(profiles)]


def _step_start(profile: Profile) -> float:
    """When the device begins with the first recorded step; 0 where nothing has a start."""
    known = ~np.isnan(profile.start_ns)
    inside = known & (profile.run >= 0)
    chosen = inside if bool(inside.any()) else known
    return float(profile.start_ns[chosen].min()) if bool(chosen.any()) else 0.0


def _write_table(
    run: SimulatedRun, hardware: str, path: Path, options: WriteOptions, diagnostics: Diagnostics
) -> None:
    from hespas.converters.ops_table.writer import write_ops_table
    from hespas.converters.tracks.simulated import profile_of_run

    write_ops_table(
        profile_of_run(run, f"{_SIMULATED_DEVICE} {hardware}".rstrip()), path, options, diagnostics
    )
