"""End-to-end time of a workload, and the JSON document about it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import IO, Protocol, cast

import numpy as np

from hespas.api.documents import Json, diagnostics_rows, finite, header
from hespas.api.estimation import NodeEstimates, estimate
from hespas.api.io import put
from hespas.api.preparation import DEFAULT_ESTIMATOR, Granularity, merged, refuse_global
from hespas.converters import WriteOptions, is_recognised
from hespas.converters.tracks import Displayed, Simulated
from hespas.estimators import MissingPolicy
from hespas.files.output import check_destination, write_atomically
from hespas.files.streams import first_bytes
from hespas.graph import Diagnostics, Profile, Timeline, Workload
from hespas.graph.errors import FormatError, OutputError, UnsupportedError, UsageError
from hespas.graph.passes import with_durations
from hespas.simulator import ClassResult, CriticalPath, Simulation, Simulator
from hespas.simulator import simulate as run

__all__ = [
    "aligned",
    "check_timeline",
    "simulate",
    "simulation_document",
    "step_of",
    "write_simulation_json",
    "write_timeline",
]

_ROWS_AT_ONCE = 4096


def simulate(
    workload: Workload | Profile,
    hardware: str | None = None,
    *,
    estimator: str = DEFAULT_ESTIMATOR,
    granularity: Granularity | None = None,
    simulator: Simulator | None = None,
    missing: MissingPolicy = "warn",
    diagnostics: Diagnostics | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Simulation:
    """One step of every rank that is here: see :func:`hespas.simulator.simulate`.

    With ``hardware`` (a name or a TOML file), nodes take the time that ``estimator`` gives them there, else
    that of the workload itself. ``granularity`` is that of :func:`hespas.api.estimate`. Raises
    ``UsageError`` for an unknown name, and for a profile, which holds measurements and no program.
    """
    if isinstance(workload, Profile):
        raise UsageError("a profile holds measured times; there is no program in it to simulate")
    found = diagnostics if diagnostics is not None else Diagnostics()
    if missing == "error":
        refuse_global(workload)
    estimates = None
    if hardware is None:
        workload = merged(workload, granularity, found)
    else:
        done = estimate(
            workload,
            hardware,
            estimator=estimator,
            granularity=granularity,
            diagnostics=found,
            progress=progress,
        )
        workload, estimates = done.workload, done.estimates
    return run(workload, estimates, simulator=simulator, missing=missing, diagnostics=found)


def step_of(done: NodeEstimates) -> Simulation | None:
    """What the estimates alone add up to where operations overlap as the device lets them: times that the
    workload brings along do not count. None where they cannot be scheduled (a time without end, a cycle),
    which :func:`simulate` would say.
    """
    graphs = done.workload.classes
    bare = tuple(with_durations(graph, np.full(len(graph), np.nan)) for graph in graphs)
    try:
        return run(replace(done.workload, classes=bare), done.estimates)
    except (UnsupportedError, FormatError):
        return None


def simulation_document(
    done: Simulation, source: str, hardware: str, estimator: str, diagnostics: Diagnostics
) -> Mapping[str, Json]:
    """The figures of a simulation, ``hespas.simulate/1``, less the rows of its ranks: those may be many, so
    :func:`write_simulation_json` adds them as it writes.
    """
    document = header("simulate", [source])
    document["diagnostics"] = diagnostics_rows(diagnostics)
    document["hardware"] = hardware
    document["estimator"] = estimator if hardware else ""
    document["simulator"] = done.simulator
    document["num_ranks"] = sum(found.num_ranks for found in done.classes)
    document["step_ns"] = finite(done.step_ns)
    document["step_low_ns"], document["step_high_ns"] = finite(done.low_ns), finite(done.high_ns)
    document["is_lower_bound"] = done.is_lower_bound
    document["is_mixed"] = done.is_mixed
    document["rank_classes"] = [_class_row(found) for found in done.classes]
    return document


def _class_row(found: ClassResult) -> Mapping[str, Json]:
    return {
        "rank_class": found.rank_class,
        "name": found.name,
        "ranks": found.num_ranks,
        "first_rank": found.rank,
        "finish_ns": finite(found.finish_ns),
        "exposed_comm_ns": finite(found.exposed_comm_ns),
        "unknown": found.unknown,
        "kept": found.kept,
        "extrapolated_loops": found.extrapolated,
        "resources": [
            {
                "resource": resource,
                "busy_ns": finite(busy_ns),
                "idle_ns": finite(max(found.finish_ns - busy_ns, 0.0)),
            }
            for resource, busy_ns in found.busy_ns.items()
        ],
        "critical_path": _path_row(found.critical_path),
    }


def _path_row(path: CriticalPath) -> Mapping[str, Json]:
    return {
        "spans": path.spans,
        "after_resource": path.after_resource,
        "op_classes": [
            {"op_class": name, "duration_ns": finite(spent_ns)} for name, spent_ns in path.class_ns.items()
        ],
        "resources": [
            {"resource": name, "duration_ns": finite(spent_ns)} for name, spent_ns in path.resource_ns.items()
        ],
    }


def _rank_rows(timeline: Timeline) -> Iterator[str]:
    """One JSON object per rank that is here, in order of the ranks."""
    columns = (
        timeline.finish_ns,
        timeline.exposed_comm_ns,
        timeline.resource_ns("compute"),
        timeline.resource_ns("communication"),
    )
    figures = zip(timeline.shown_by.tolist(), *(column.tolist() for column in columns), strict=True)
    for rank, (shown_by, finish_ns, exposed_ns, compute_ns, comm_ns) in enumerate(figures):
        if shown_by < 0:
            continue
        row: Mapping[str, Json] = {
            "rank": rank,
            "finish_ns": finite(finish_ns),
            "exposed_comm_ns": finite(exposed_ns),
            "compute_ns": finite(compute_ns),
            "comm_ns": finite(comm_ns),
        }
        yield json.dumps(row, allow_nan=False)


def write_simulation_json(
    document: Mapping[str, Json], timeline: Timeline, path: Path, *, overwrite: bool = False
) -> None:
    """Write a document with ``ranks``, one row per rank, at once or not at all; ``-`` is standard output.
    Raises ``OutputError`` where it exists already, without ``overwrite``.
    """

    def fill(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8") as stream:
            _write(document, timeline, stream)

    put(path, fill, overwrite=overwrite)


def _write(document: Mapping[str, Json], timeline: Timeline, stream: IO[str]) -> None:
    head = json.dumps(document, indent=2, allow_nan=False)
    stream.write(head.removesuffix("\n}") + ',\n  "ranks": [')
    rows, separator = _rank_rows(timeline), "\n    "
    while part := list(islice(rows, _ROWS_AT_ONCE)):
        stream.write(separator + ",\n    ".join(part))
        separator = ",\n    "
    stream.write("\n  ]\n}\n")


# --- When everything ran, as a file that a viewer or a spreadsheet opens

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
