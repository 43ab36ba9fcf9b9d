"""When everything ran, as a file that a viewer or a spreadsheet opens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import numpy as np

from hespas.converters import WriteOptions, is_recognised
from hespas.converters.tracks import Displayed, Simulated
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


class _WriteDisplayed(Protocol):
    def __call__(
        self,
        values: list[tuple[str, Displayed]],
        path: Path,
        options: WriteOptions,
        diagnostics: Diagnostics,
        /,
    ) -> None: ...


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix


def check_timeline(path: Path, *, beside: bool = False, overwrite: bool = False) -> None:
    """Refuse a file that :func:`write_timeline` cannot write, before any work is done.

    Raises ``UsageError`` where its name tells no format, or a table where a profile is to stand ``beside``;
    ``OutputError`` where it exists already (without ``overwrite``), cannot be written, or holds a workload
    or a measured profile.
    """
    suffix = _suffix(path)
    if suffix != _TABLE and suffix not in _VIEWED:
        named = f"the suffix {suffix!r}" if suffix else "a name without a suffix"
        raise UsageError(f"{named} tells no format of timelines", path=str(path), hint=_HINT)
    if beside and suffix == _TABLE:
        raise UsageError(
            "a table holds one run, nothing beside it", path=str(path),
            hint="name it FILE.json or FILE.pftrace, or leave out --beside",
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
    run = Simulated(timeline, workload)

    def fill(temporary: Path) -> None:
        suffix = _suffix(path)
        if suffix == _TABLE:
            _write_table(run, hardware, temporary, options, found)
            return
        values: list[tuple[str, Displayed]] = [("", run)]
        if beside:
            values = [*(("measured", each) for each in aligned(beside)), ("simulated", run)]
        write = cast("_WriteDisplayed", import_module(_VIEWED[suffix]).write_displayed)
        write(values, temporary, options, found)

    return write_atomically(path, fill, overwrite=overwrite, directory=False)


def aligned(profiles: Sequence[Profile]) -> list[Profile]:
    """Profiles of one job on the clock of a simulated step: device work of the first recorded step (without
    steps, all of it) begins at 0.

    Recordings of several processes have clocks of their own. All ranks leave a collective together: a later
    profile is moved so that the ends of those it shares with an earlier one, by group and number, agree in
    the median; one that shares none begins at 0 itself.
    """
    found: list[Profile] = []
    left_ns: dict[tuple[str, int], float] = {}
    for profile in profiles:
        ends_ns = _collective_ends(profile)
        apart = [left_ns[key] - end for key, end in ends_ns.items() if key in left_ns]
        shift_ns = float(np.median(apart)) if apart else -_step_start(profile)
        for key, end in ends_ns.items():
            left_ns.setdefault(key, end + shift_ns)
        host = replace(profile.host, start_ns=profile.host.start_ns + shift_ns)
        found.append(replace(profile, start_ns=profile.start_ns + shift_ns, host=host))
    return found


def _collective_ends(profile: Profile) -> dict[tuple[str, int], float]:
    """When each numbered collective of a group ended."""
    comms, strings = profile.comms, profile.strings
    rows = np.flatnonzero(comms.sequence >= 0)
    ends = (profile.start_ns + profile.duration_ns)[comms.event[rows]]
    groups = [strings[row] for row in comms.group_row[rows].tolist()]
    return dict(zip(zip(groups, comms.sequence[rows].tolist(), strict=True), ends.tolist(), strict=True))


def _step_start(profile: Profile) -> float:
    """When the device begins with the first recorded step; 0 where nothing has a start."""
    known = ~np.isnan(profile.start_ns)
    inside = known & (profile.run >= 0)
    chosen = inside if bool(inside.any()) else known
    return float(profile.start_ns[chosen].min()) if bool(chosen.any()) else 0.0


def _write_table(
    run: Simulated, hardware: str, path: Path, options: WriteOptions, diagnostics: Diagnostics
) -> None:
    from hespas.converters.ops_table.writer import write_ops_table
    from hespas.converters.tracks.listed import profile_of_run

    write_ops_table(
        profile_of_run(run, f"{_SIMULATED_DEVICE} {hardware}".rstrip()), path, options, diagnostics
    )
