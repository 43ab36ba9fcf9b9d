"""``hespas simulate``: simulated step time, exposed communication, memory and critical path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hespas.api.lowering import STEP_ESTIMATOR, Mode
from hespas.cli import options
from hespas.cli.destinations import (
    check_apart,
    check_report_folder,
    check_reports,
    hardware_files,
    report_folder,
)
from hespas.cli.session import command_line
from hespas.cli.terminal import emit, progress_bar, report_diagnostics
from hespas.cli.text import mixed_lines, op_class_text, step_lines
from hespas.cli.what_if import WhatIf
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import UsageError
from hespas.report.tables import table_text
from hespas.report.texts import bytes_text, count_text, counted, time_text
from hespas.simulator.astra.configuration import Backend
from hespas.simulator.astra.external import DEFAULT_TIMEOUT_S
from hespas.simulator.job.matching import Protocol

if TYPE_CHECKING:
    from hespas.api import SimulationResult
    from hespas.graph import OpGraph, Profile
    from hespas.simulator import ClassResult, Simulator
    from hespas.simulator.memory import RankMemory

__all__ = ["simulate"]


_MAX_SEGMENTS = 8
_MAX_CLASSES = 8
"""Rank classes that are printed; the JSON document has all."""

# Headings of --help, in order of their first option
_NETWORK = "System and network"
_RANKS = "Ranks and order"
_ASTRA = "ASTRA-sim"
_WHAT_IF = "What if"

_Timeline = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write the simulated timeline: FILE.json, .pftrace or .csv.",
        rich_help_panel=options.OUTPUT,
    ),
]
_Report = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        parser=report_folder,
        help="Write a report: index.html, one CSV file per table and simulation.json.",
        rich_help_panel=options.OUTPUT,
    ),
]
_Mode = Annotated[
    Mode,
    typer.Option(
        help="Simulate with the Hespas engine, or with its exact model of ASTRA-sim's analytical simulator.",
        rich_help_panel=_ASTRA,
    ),
]
_System = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        help="Use the network of this system, and its device unless --hardware is given.",
        autocompletion=options.system_names,
        rich_help_panel=_NETWORK,
    ),
]
_SystemConfig = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Read ASTRA-sim's system.json (mode astra).", rich_help_panel=_ASTRA),
]
_NetworkConfig = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Read ASTRA-sim's network.yml (mode astra).", rich_help_panel=_ASTRA),
]
_MemoryConfig = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Read ASTRA-sim's remote memory file (mode astra).", rich_help_panel=_ASTRA
    ),
]
_Backend = Annotated[
    Backend,
    typer.Option(
        help="Use the congestion-unaware or -aware network backend (mode astra).", rich_help_panel=_ASTRA
    ),
]
_Queues = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        max=1024,
        help="Set the number of queues per network dimension (mode astra).",
        rich_help_panel=_ASTRA,
    ),
]
_Jitter = Annotated[
    float,
    typer.Option(
        metavar="SIGMA", min=0, max=10,
        help="Set the jitter of kernels and copies (coefficient of variation), drawn independently per rank.",
        rich_help_panel=_RANKS),
]  # fmt: skip
_Seed = Annotated[
    int, typer.Option(metavar="N", min=0, help="Set the random seed of --jitter.", rich_help_panel=_RANKS)
]
_Straggler = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RANK=FACTOR",
        help="Slow down rank RANK by FACTOR; repeatable.",
        rich_help_panel=_RANKS,
    ),
]
_Messages = Annotated[
    Protocol,
    typer.Option(
        help="Complete a send at once (eager) or on receipt (rendezvous).", rich_help_panel=_NETWORK
    ),
]
_OverlapTrips = Annotated[
    bool,
    typer.Option(
        "--overlap-trips",
        help="Start a loop iteration as soon as its inputs are ready (software pipelining), not after the "
        "previous iteration ends.",
        rich_help_panel=_RANKS,
    ),
]
_Interference = Annotated[
    bool,
    typer.Option(
        "--interference/--no-interference",
        help="Model contention between concurrent kernels and collectives.",
        rich_help_panel=_RANKS,
    ),
]
_Alone = Annotated[
    bool,
    typer.Option(
        "--alone",
        help="Simulate each rank class alone, without waits for other ranks.",
        rich_help_panel=_RANKS,
    ),
]
_Simulator = Annotated[
    Literal["hespas", "astra-sim"],
    typer.Option(
        help="astra-sim: also run your ASTRA-sim binary (--astra-bin) on the same traces.",
        rich_help_panel=_ASTRA,
    ),
]
_AstraBin = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Set the path of ASTRA-sim's analytical binary (--simulator astra-sim).",
        rich_help_panel=_ASTRA,
    ),
]
_AstraTimeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="Limit the run time of ASTRA-sim [s] (default: 3600).",
        show_default=False,
        rich_help_panel=_ASTRA,
    ),
]
_Launches = Annotated[
    bool,
    typer.Option(
        "--launches/--no-launches",
        help="Model the host that launches the kernels of a training step one by one; steps of XLA and whole "
        "CUDA graphs have no launch overhead.",
        rich_help_panel=_RANKS,
    ),
]
_Grid = Annotated[
    Path | None,
    typer.Option(
        metavar="GRID.toml",
        help="Sweep all combinations of the axes in this file (docs/simulation.md).",
        rich_help_panel=_WHAT_IF,
    ),
]
_Jobs = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, max=1024, help="Simulate N sweep points in parallel.", rich_help_panel=_WHAT_IF
    ),
]
_Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        metavar="A.json B.json",
        help="Compare two JSON documents written by --json.",
        rich_help_panel=_WHAT_IF,
    ),
]
_Overlay = Annotated[
    Path | None,
    typer.Option(
        metavar="PROFILE",
        help="Add this measured profile, or folder of rank profiles, to the timeline.",
        rich_help_panel=options.OUTPUT,
    ),
]


def simulate(
    context: typer.Context,
    source: Annotated[
        Path | None,
        typer.Argument(metavar="SRC", help="Workload in any readable format.", show_default=False),
    ] = None,
    hardware: Annotated[
        list[str] | None,
        options.hardware_option(
            "Estimate durations on this device (default: durations in SRC); repeat to compare."
        ),
    ] = None,
    estimator: options.Estimators = None,
    allow_programs: options.AllowPrograms = False,
    granularity: options.Granularity = None,
    missing: options.Missing = "warn",
    system: _System = "",
    messages: _Messages = "eager",
    jitter: _Jitter = 0.0,
    seed: _Seed = 0,
    straggler: _Straggler = None,
    alone: _Alone = False,
    overlap_trips: _OverlapTrips = False,
    interference: _Interference = True,
    launches: _Launches = True,
    grid: _Grid = None,
    jobs: _Jobs = 1,
    compare: _Compare = None,
    json_file: options.Json = None,
    report: _Report = None,
    timeline: _Timeline = None,
    overlay: _Overlay = None,
    overwrite: options.Overwrite = False,
    progress: options.Progress = None,
    loudness: options.Loudness = None,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
    source_format: options.SourceFormat = "",
    num_devices: options.NumDevices = None,
    num_replicas: options.NumReplicas = None,
    default_dtype: options.DefaultDtype = "",
    dim: options.Dim = None,
    comm_groups: options.CommGroups = None,
    run_time_unit: options.RunTimeUnit = "",
    max_input_bytes: options.MaxInputBytes = None,
    mode: _Mode = "hespas",
    system_config: _SystemConfig = None,
    network_config: _NetworkConfig = None,
    memory_config: _MemoryConfig = None,
    backend: _Backend = "unaware",
    queues_per_dim: _Queues = 1,
    simulator: _Simulator = "hespas",
    astra_bin: _AstraBin = None,
    astra_timeout: _AstraTimeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Simulate one step: compute, communication and copies in parallel, with memory and critical path.

    hespas simulate step.mlir --hardware H100-SXM

    hespas simulate step.mlir --num-devices 64 --system dgx-h100

    hespas simulate traces/ --mode astra --system-config system.json --network-config network.yml

    hespas simulate step.mlir --grid grid.toml --jobs 4 --report what-if/
    """
    several = {"hardware": hardware or [""], "estimator": estimator or [STEP_ESTIMATOR]}
    what_if = WhatIf(grid, compare, jobs, report, json_file, overwrite, progress, debug)
    source = what_if.run(source, context, several)
    if source is None:
        return
    (device,), (model_name,) = several.values()
    diagnostics = Diagnostics()
    configs = (system_config, network_config, memory_config)
    reads: list[Path | str | None] = [source, device, system, model_name, overlay, *configs]
    with command_line(
        debug, diagnostics, str(source), documents=[json_file], reads=reads, writes=[timeline, report]
    ):
        from hespas import api
        from hespas.converters import ReadOptions

        if simulator == "astra-sim" and astra_bin is None:
            raise UsageError("--simulator astra-sim requires --astra-bin", hint="--astra-bin PATH")
        if simulator != "astra-sim" and astra_bin is not None:
            raise UsageError("--astra-bin requires --simulator astra-sim", hint="add --simulator astra-sim")
        outputs = _SimulationOutputs(timeline, overlay, json_file, report, overwrite)
        outputs.check(source, device, [path for path in (*configs, *hardware_files(system)) if path])
        mode = "astra" if simulator == "astra-sim" else mode
        settings = (jitter, seed, straggler or [], messages, alone, overlap_trips, interference, launches)
        with progress_bar("simulating", progress) as callback:
            reading = ReadOptions(num_devices=num_devices, num_replicas=num_replicas, progress=callback)
            done = api.simulate(
                source,
                device or None,
                estimator=model_name,
                granularity=granularity,
                format=source_format or None,
                options=reading,
                simulator=_scheduler(mode, *settings),
                on_unknown=missing,
                timeline=timeline,
                overlay=outputs.overlay_profiles(callback),
                overwrite=overwrite,
                mode=mode,
                system=system or None,
                system_config=system_config,
                network_config=network_config,
                memory_config=memory_config,
                backend=backend,
                queues_per_dim=queues_per_dim,
                astra_bin=astra_bin,
                astra_timeout=astra_timeout,
                diagnostics=diagnostics,
                progress=callback,
            )
        outputs.write(done)
        report_diagnostics(diagnostics, source)
        _print_result(done)
        _print_references(done)


def _scheduler(
    mode: Mode,
    jitter: float,
    seed: int,
    straggler: Sequence[str],
    messages: Protocol,
    alone: bool,
    overlap_trips: bool,
    interference: bool,
    launches: bool,
) -> Simulator | None:
    """Return the scheduler for the options; None if no option is given."""
    from hespas.simulator import JobScheduler, ListScheduler

    values = {
        "--jitter": jitter, "--seed": seed, "--straggler": straggler, "--messages": messages != "eager",
        "--alone": alone, "--overlap-trips": overlap_trips, "--no-interference": not interference,
        "--no-launches": not launches,
    }  # fmt: skip
    given = [option for option, value in values.items() if value]
    if mode == "astra" and given:
        raise UsageError(
            f"{', '.join(given)}: not available in mode astra", hint="leave it out, or --mode hespas"
        )
    slow: dict[int, float] = {}
    for text in straggler:
        rank, _, factor = text.partition("=")
        try:
            rank_number, factor_value = int(rank), float(factor)
        except ValueError:
            raise UsageError(
                f"invalid --straggler {text}: expected RANK=FACTOR", hint="--straggler 3=1.2"
            ) from None
        if rank_number in slow:
            raise UsageError(f"--straggler names rank {rank_number} twice", hint="give each rank once")
        slow[rank_number] = factor_value
    if alone:
        if jitter or seed or slow or messages != "eager":
            raise UsageError(
                "--alone excludes --jitter, --seed, --straggler and --messages", hint="leave --alone out"
            )
        return ListScheduler(overlap_trips=overlap_trips, interference=interference, launches=launches)
    if seed and not jitter:
        raise UsageError("--seed requires --jitter, which draws with it", hint="add --jitter 0.05")
    if not given:
        return None
    return JobScheduler(
        jitter=jitter,
        seed=seed,
        stragglers=tuple(slow.items()),
        protocol=messages,
        overlap_trips=overlap_trips,
        interference=interference,
        launches=launches,
    )


@dataclass(frozen=True, slots=True)
class _SimulationOutputs:
    """Files that one simulation writes, and the measured profile for its timeline."""

    timeline: Path | None
    overlay: Path | None
    json_file: Path | None
    report: Path | None
    overwrite: bool

    def check(self, source: Path, hardware: str, configs: Sequence[Path]) -> None:
        """Raise an error, before any work, for a file that cannot be written or would replace an input."""
        from hespas import api

        taken: dict[str, Sequence[str | Path]] = {"SRC": [source], "--hardware": hardware_files(hardware)}
        if configs:
            taken["a configuration"] = configs
        if self.overlay:
            taken["--overlay"] = [self.overlay]
        if self.timeline:
            check_apart("--timeline", self.timeline, taken)
        api.check_timeline(self.timeline, overlay=self.overlay is not None, overwrite=self.overwrite)
        if self.timeline:
            taken["--timeline"] = [self.timeline]
        check_reports({"--json": self.json_file}, taken, overwrite=self.overwrite)
        check_report_folder(self.report, "simulation.json", self.json_file, taken, overwrite=self.overwrite)

    def overlay_profiles(self, progress: Callable[[int, int], None] | None) -> list[Profile]:
        """Read the profiles of ``--overlay`` and report their diagnostics."""
        from hespas import api
        from hespas.converters import ReadOptions

        if not self.overlay:
            return []
        diagnostics = Diagnostics()
        reading = ReadOptions(progress=progress)
        try:
            profiles = api.read_profiles(self.overlay, options=reading, diagnostics=diagnostics)
        except UsageError as error:
            raise UsageError(f"--overlay: {error.message}", path=error.path, hint=error.hint) from error
        report_diagnostics(diagnostics, self.overlay)
        return profiles

    def write(self, done: SimulationResult) -> None:
        """Write the JSON document and the report, if requested."""
        from hespas import api

        if self.json_file:
            api.write_simulation_json(done, self.json_file, overwrite=self.overwrite)
        if self.report:
            done.write(self.report, overwrite=self.overwrite)


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
    links = [
        (
            row.dimension,
            f"{row.bandwidth_gbytes_per_s:,g} GB/s",
            bytes_text(row.sent_bytes),
            time_text(row.in_use_ns),
            _percent(row.utilization_share),
            _percent(row.in_use_utilization_share),
        )
        for row in (done.network_utilization.links.rows() if done.network_utilization else [])
    ]
    if links:
        emit("")
        emit(table_text(("network", "per device", "sent", "in use", "utilization", "while in use"), links))
    parts = segments(done)
    if len(parts) < 2:
        return
    emit(("", f"critical path of the job, through {counted(len(parts), 'rank')} in sequence"))
    rows = [
        (
            f"{part.rank:,}",
            time_text(part.start_ns),
            time_text(part.end_ns - part.start_ns),
            node_label(done.workload.graph_of(part.rank), part.last_node),
        )
        for part in parts[-_MAX_SEGMENTS:]
    ]
    emit(table_text(("rank", "start", "duration", "last operation"), rows))
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
        (
            name,
            time_text(busy_ns),
            time_text(max(result.finish_ns - busy_ns, 0.0)),
            time_text(path.resource_ns[name]),
        )
        for name, busy_ns in result.busy_ns.items()
        if busy_ns
    ]
    if not rows:
        return
    emit(table_text(("resource", "busy", "idle", "on the critical path"), rows))
    emit("")
    emit(
        f"critical path: {counted(path.spans, 'operation')}, "
        f"{path.after_resource:,} after a wait for a busy resource"
    )
    lines = [
        (op_class_text(name), time_text(spent_ns), share(spent_ns))
        for name, spent_ns in path.class_ns.items()
    ]
    emit(table_text(("class", "time", "share"), lines))


def _print_memory(memory: RankMemory, graph: OpGraph) -> None:
    """Print the peak memory of a rank class, its parts, and whether it fits the device."""
    use = memory.use
    at_least = "at least " if use.is_lower_bound else ""
    time = "" if isnan(use.at_ns) else f" at {time_text(use.at_ns)}"
    node = f", {graph.node_name(use.at_node)}" if use.at_node >= 0 and graph.node_name(use.at_node) else ""
    capacity = bytes_text(memory.capacity_bytes)
    if memory.is_whole_job:
        fit = ", of the whole job before partitioning"
    elif isnan(memory.capacity_bytes):
        fit = ""
    elif memory.fits is None:
        fit = f" of {capacity}: cannot tell whether it fits"
    else:
        fit = f", {'fits' if memory.fits else 'does not fit'} the {capacity} of the device"
    emit("")
    emit(f"memory: {at_least}{bytes_text(use.peak_bytes)}{time}{node}{fit}")
    parts = [
        ("parameters", use.parameters_bytes),
        ("constants", use.constants_bytes),
        ("results", use.outputs_bytes),
        *((f"temporaries: {op_class_text(name)}", size) for name, size in use.class_bytes.items()),
        ("buffers without a node", use.unlisted_bytes),
    ]
    rows = [(name, bytes_text(size), f"{size / use.peak_bytes:.1%}") for name, size in parts if size]
    if rows:
        emit(table_text(("memory", "size", "share"), rows))
    if use.unknown:
        emit(f"{counted(use.unknown, 'tensor')} of unknown size not included")


def _print_references(done: SimulationResult) -> None:
    """Print the step next to the user's ASTRA-sim and the measured profile, if there are any."""

    def difference(reference_ns: float) -> str:
        return f"{done.step_ns / reference_ns - 1.0:+.2%}" if reference_ns else ""

    rows = [(f"hespas, mode {done.mode}", time_text(done.step_ns), "", "")]
    if done.astra_reference is not None and done.astra_statistics is not None:
        from hespas.api.simulation_result import external_document

        astra = external_document(done.astra_reference, done.astra_statistics)
        rows.append(
            (
                f"ASTRA-sim ({Path(astra.binary).name})",
                time_text(astra.step_ns),
                difference(astra.step_ns),
                f"{count_text(astra.differing_ranks)} of {count_text(len(astra.ranks))}",
            )
        )
    if isfinite(done.measured_ns):
        rows.append(("measured", time_text(done.measured_ns), difference(done.measured_ns), ""))
    if len(rows) > 1:
        emit("")
        emit(table_text(("step", "time", "error of hespas", "ranks that differ"), rows))


def _percent(share: float) -> str:
    return "" if isnan(share) else f"{share:.1%}"
