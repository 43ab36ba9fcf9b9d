"""``hespas simulate``: simulated step time, exposed communication, memory and critical path."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hespas.api.simulation import simulate as simulate_step
from hespas.api.what_if import simulate_grid
from hespas.cli.command import Call, command
from hespas.cli.destinations import check_apart
from hespas.cli.terminal import emit, mixed_lines, op_class_text, report_diagnostics, step_lines
from hespas.cli.what_if import print_columns, print_comparison, print_sweep
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import UsageError
from hespas.graph.hints import DEVICE, INPUT, OUTPUT, Option
from hespas.report.tables import Column, columns, table_from_rows
from hespas.report.texts import bytes_text, count_text, counted, fits_text, time_text

if TYPE_CHECKING:
    from hespas.api import SimulationResult
    from hespas.graph import OpGraph, Profile
    from hespas.simulator import ClassResult
    from hespas.simulator.memory import RankMemory

__all__ = ["simulate"]


_PANELS = (DEVICE, "System and network", "Ranks and order", "What if", OUTPUT, INPUT, "ASTRA-sim")
_MAX_SEGMENTS = 8
_MAX_CLASSES = 8
"""Rank classes that are printed; the JSON document has all."""

_Compare = Annotated[
    tuple[Path, Path] | None,
    Option(
        "Compare two JSON documents written by --json.",
        metavar="A.json B.json",
        panel="What if",
        access="reads",
    ),
]


@command(simulate_step, simulate_grid, progress="simulating", panels=_PANELS, has_page=True)
def simulate(call: Call, *, compare: _Compare = None) -> None:
    """Simulate one step: compute, communication and copies in parallel, with memory and critical path.

    hespas simulate step.mlir --hardware H100-SXM

    hespas simulate step.mlir --num-devices 64 --system dgx-h100

    hespas simulate traces/ --mode astra --system-config system.json --network-config network.yml

    hespas simulate step.mlir --grid grid.toml --jobs 4 --report what-if/
    """
    columns = call.columns()
    if compare is not None:
        print_comparison(call, compare)
        return
    if call["path"] is not None:
        print_sweep(call, call.several("estimator"))
        return
    if call["source"] is None:
        raise typer.BadParameter("Missing argument 'SRC'.")
    if columns:
        print_columns(call, columns)
        return
    from hespas import api
    from hespas.api.simulation_result import REPORT_FILES

    if call.is_written("jobs"):
        raise UsageError("--jobs applies to sweeps only", hint="add --grid FILE, or leave it out")
    if call["astra_bin"] is not None and call["simulator"] != "astra-sim":
        raise UsageError("--astra-bin requires --simulator astra-sim", hint="add --simulator astra-sim")
    timeline, overlay, report = call["timeline"], call.several("overlay"), call["folder"]
    if timeline:
        check_apart("--timeline", timeline, call.files("reads"))
    api.check_timeline(timeline, overlay=bool(overlay), overwrite=call.overwrite)
    call.check_report(REPORT_FILES)
    changes: dict[str, Any] = {"overlay": _overlay_profiles(overlay)} if overlay else {}
    done = call.run(api.simulate, **changes)
    if call.json_file:
        api.write_simulation_json(done, call.json_file, overwrite=call.overwrite)
    call.write_html(done)
    if report:
        done.write(report, overwrite=call.overwrite)
    report_diagnostics(call.diagnostics, call["source"])
    _print_result(done)
    _print_references(done)


def _overlay_profiles(paths: Sequence[Path]) -> list[Profile]:
    """Read the profiles of ``--overlay`` and report their diagnostics."""
    from hespas import api

    profiles: list[Profile] = []
    for path in paths:
        diagnostics = Diagnostics()
        try:
            profiles += api.read_profiles(path, diagnostics=diagnostics)
        except UsageError as error:
            raise UsageError(f"--overlay: {error.message}", path=error.path, hint=error.hint) from error
        report_diagnostics(diagnostics, path)
    return profiles


def _print_result(done: SimulationResult) -> None:
    """Print the step, its rank classes with memory, the network use and the job's critical path."""
    from hespas.simulator import node_label, segments

    emit(step_lines(done, done.where, mode=done.mode))
    emit(mixed_lines(done))
    memory = {entry.rank_class: entry for entry in done.memory}
    for rank_class in done.classes[:_MAX_CLASSES]:
        _print_class(rank_class)
        if rank_class.rank_class in memory:
            graph = done.workload.classes[rank_class.rank_class]
            _print_memory(memory[rank_class.rank_class], graph)
    left = len(done.classes) - _MAX_CLASSES
    if left > 0:
        emit(("", f"and {counted(left, 'class')} more: --json writes all"))
    if done.network_utilization and len(done.network_utilization.links):
        titles: dict[str, str | Column] = {
            "dimension": "network",
            "bandwidth_gbytes_per_s": Column("per device", kind="number", write="{:,g} GB/s".format),
            "sent_bytes": "sent",
            "in_use_ns": "in use",
            "utilization_share": Column("utilization", kind="share", unknown=""),
            "in_use_utilization_share": Column("while in use", kind="share", unknown=""),
        }
        emit("")
        emit(done.network_utilization.links.select(titles).to_text())
    parts = segments(done)
    if len(parts) < 2:
        return
    emit(("", f"critical path of the job, through {counted(len(parts), 'rank')} in sequence"))
    rows = [
        (
            f"{part.rank:,}",
            part.start_ns,
            part.end_ns - part.start_ns,
            node_label(done.workload.graph_of(part.rank), part.last_node),
        )
        for part in parts[-_MAX_SEGMENTS:]
    ]
    header = (
        Column("rank"),
        *columns("time", "start", "duration"),
        *columns("number", "last operation", write=str),
    )
    emit(table_from_rows(header, rows).to_text())
    if len(parts) > _MAX_SEGMENTS:
        emit(f"the last {_MAX_SEGMENTS} of {len(parts):,}: --json writes all")


def _print_class(result: ClassResult) -> None:
    """Print the time of a rank class, its waits, its resources and its critical path."""

    def share(part_ns: float) -> str:
        return f"{part_ns / result.finish_ns:.1%}" if result.finish_ns else ""

    def with_share(part_ns: float) -> str:
        return f"{time_text(part_ns)} ({share(part_ns)})" if result.finish_ns else time_text(part_ns)

    at_least = "at least " if result.unknown else ""
    emit("")
    emit(
        f"{result.name}: {counted(result.num_ranks, 'rank')}, {at_least}{time_text(result.finish_ns)}, "
        f"communication exposed {with_share(result.exposed_comm_ns)}"
    )
    if result.interference_ns:
        emit(f"contention between kernels and collectives: +{time_text(result.interference_ns)}")
    emit(
        f"waits for other ranks in {cause}: {with_share(wait_ns)}"
        for cause, wait_ns in result.wait_ns.items()
        if wait_ns
    )
    if result.ways > 1:
        emit(f"{result.ways:,} distinct rank behaviours; rank {result.rank:,} finishes last")
    path = result.critical_path
    rows = [
        (name, busy_ns, max(result.finish_ns - busy_ns, 0.0), path.resource_ns[name])
        for name, busy_ns in result.busy_ns.items()
        if busy_ns
    ]
    if not rows:
        return
    resources = (Column("resource"), *columns("time", "busy", "idle", "on the critical path"))
    emit(table_from_rows(resources, rows).to_text())
    emit("")
    emit(
        f"critical path: {counted(path.spans, 'operation')}, "
        f"{path.after_resource:,} after a wait for a busy resource"
    )
    classes = (
        *columns("text", "class", write=op_class_text),
        *columns("time", "time"),
        *columns("share", "share", write=str),
    )
    lines = [(name, spent_ns, share(spent_ns)) for name, spent_ns in path.class_ns.items()]
    emit(table_from_rows(classes, lines).to_text())


def _print_memory(memory: RankMemory, graph: OpGraph) -> None:
    """Print the peak memory of a rank class, its parts, and whether it fits the device."""
    use = memory.use
    at_least = "at least " if use.is_lower_bound else ""
    time = "" if isnan(use.at_ns) else f" at {time_text(use.at_ns)}"
    node = f", {graph.node_name(use.at_node)}" if use.at_node >= 0 and graph.node_name(use.at_node) else ""
    whole = "of the whole job before partitioning" if memory.is_whole_job else ""
    fit = whole or fits_text(memory.fits, memory.capacity_bytes)
    if memory.outside_bytes:
        fit = f"{fit}, {bytes_text(memory.device_bytes)} with the GPU context and libraries".removeprefix(
            ", "
        )
    note = f", {fit}" if fit else ""
    emit("")
    emit(f"memory: {at_least}{bytes_text(use.peak_bytes)}{time}{node}{note}")
    parts = [
        ("parameters", use.parameters_bytes),
        ("constants", use.constants_bytes),
        ("results", use.outputs_bytes),
        *((f"temporaries: {op_class_text(name)}", size) for name, size in use.class_bytes.items()),
        ("buffers without a node", use.unlisted_bytes),
    ]
    rows = [(name, size, size / use.peak_bytes) for name, size in parts if size]
    if rows:
        header = (Column("memory"), *columns("bytes", "size"), *columns("share", "share"))
        emit(table_from_rows(header, rows).to_text())
    if use.unknown:
        emit(f"{counted(use.unknown, 'tensor')} of unknown size not included")


def _print_references(done: SimulationResult) -> None:
    """Print the step next to the user's ASTRA-sim and the measured profile, if there are any."""

    def difference(reference_ns: float) -> float | None:
        return done.step_ns / reference_ns - 1.0 if reference_ns else None

    rows: list[tuple[object, ...]] = [(f"hespas, mode {done.mode}", done.step_ns, None, "")]
    if done.astra_reference is not None and done.astra_statistics is not None:
        from hespas.api.simulation_result import external_document

        astra = external_document(done.astra_reference, done.astra_statistics)
        rows.append(
            (
                f"ASTRA-sim ({Path(astra.binary).name})",
                astra.step_ns,
                difference(astra.step_ns),
                f"{count_text(astra.differing_ranks)} of {count_text(len(astra.ranks))}",
            )
        )
    if isfinite(done.measured_ns):
        rows.append(("measured", done.measured_ns, difference(done.measured_ns), ""))
    if len(rows) > 1:
        emit("")
        header = (
            Column("step"),
            *columns("time", "time"),
            *columns("share", "error of hespas", write="{:+.2%}".format, unknown=""),
            *columns("number", "ranks that differ", write=str),
        )
        emit(table_from_rows(header, rows).to_text())
