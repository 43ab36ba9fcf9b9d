"""End-to-end time of a workload, and the JSON document about it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np

from hespas.api.documents import Json, diagnostics_rows, finite, header
from hespas.api.estimation import NodeEstimates, estimate
from hespas.api.preparation import DEFAULT_ESTIMATOR, Granularity, merged, refuse_global
from hespas.api.streams import put
from hespas.estimators import MissingPolicy
from hespas.graph import Diagnostics, Profile, Timeline, Workload
from hespas.graph.errors import FormatError, UnsupportedError, UsageError
from hespas.graph.passes import with_durations
from hespas.simulator import ClassResult, CriticalPath, Simulation, Simulator
from hespas.simulator import simulate as run

__all__ = ["simulate", "simulation_document", "step_of", "write_simulation_json"]

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
