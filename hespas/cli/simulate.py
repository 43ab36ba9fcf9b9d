"""``hespas simulate``: how long one step takes, and what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hespas.api.preparation import STEP_ESTIMATOR, Mode
from hespas.cli import options
from hespas.cli.others import check_binary, show_others
from hespas.cli.session import (
    check_apart,
    check_report_folder,
    check_reports,
    command_line,
    emit,
    hardware_files,
    progress_bar,
    report_folder,
    say_diagnostics,
)
from hespas.cli.text import bytes_text, counted, mixed_lines, step_lines, table_text, time_text
from hespas.cli.what_if import WhatIf
from hespas.graph.diagnostics import Diagnostics
from hespas.simulator.astra.external import DEFAULT_TIMEOUT_S
from hespas.simulator.astra.options import Backend
from hespas.simulator.job.options import Protocol

if TYPE_CHECKING:
    from hespas.api import SimulationResult
    from hespas.graph import OpGraph, Profile
    from hespas.simulator import ClassResult, Simulation, Simulator
    from hespas.simulator.memory import RankMemory

__all__ = ["simulate"]


_MOST_SEGMENTS = 8
_MOST_CLASSES = 8
"""Rank classes told in full; the JSON document has all."""

# Headings of --help, in the order in which options of theirs come first.
_NETWORK = "System and network"
_RANKS = "Ranks and order"
_ASTRA = "ASTRA-sim"
_WHAT_IF = "What if"

_Timeline = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write what ran when: FILE.json, .pftrace or .csv.",
        rich_help_panel=options.OUTPUT,
    ),
]
_Report = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        parser=report_folder,
        help="Write index.html, a CSV file per table and simulation.json.",
        rich_help_panel=options.OUTPUT,
    ),
]
_Mode = Annotated[
    Mode,
    typer.Option(
        help="hespas, or astra: what ASTRA-sim's analytical simulator says, to the nanosecond.",
        rich_help_panel=_ASTRA,
    ),
]
_System = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        help="Communication as on this system, whose device is --hardware unless that is given.",
        autocompletion=options.system_names,
        rich_help_panel=_NETWORK,
    ),
]
_SystemConfig = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="ASTRA-sim's system.json (mode astra).", rich_help_panel=_ASTRA),
]
_NetworkConfig = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="ASTRA-sim's network.yml (mode astra).", rich_help_panel=_ASTRA),
]
_MemoryConfig = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="ASTRA-sim's remote memory file (mode astra).", rich_help_panel=_ASTRA),
]
_Backend = Annotated[
    Backend,
    typer.Option(help="The network without congestion, or with it (mode astra).", rich_help_panel=_ASTRA),
]
_Queues = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        max=1024,
        help="Queues of each network dimension (mode astra).",
        rich_help_panel=_ASTRA,
    ),
]
_Jitter = Annotated[
    float,
    typer.Option(
        metavar="SIGMA", min=0, max=10,
        help="Computations and copies vary by so much: standard deviation over mean, each rank by itself.",
        rich_help_panel=_RANKS),
]  # fmt: skip
_Seed = Annotated[
    int, typer.Option(metavar="N", min=0, help="What --jitter draws with.", rich_help_panel=_RANKS)
]
_Straggler = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RANK=FACTOR",
        help="A rank that takes so many times as long; repeatable.",
        rich_help_panel=_RANKS,
    ),
]
_Messages = Annotated[
    Protocol,
    typer.Option(
        help="Who sends is done when it is sent, or waits for the receiver too.", rich_help_panel=_NETWORK
    ),
]
_OverlapTrips = Annotated[
    bool,
    typer.Option(
        "--overlap-trips",
        help="Trips of a loop begin when their values are there, as where a compiler pipelines loops; "
        "else when the trip before has ended.",
        rich_help_panel=_RANKS,
    ),
]
_Interference = Annotated[
    bool,
    typer.Option(
        "--interference/--no-interference",
        help="Collectives and kernels beside each other slow each other down.",
        rich_help_panel=_RANKS,
    ),
]
_Alone = Annotated[bool, typer.Option("--alone", help="No rank waits for another.", rich_help_panel=_RANKS)]
_Simulator = Annotated[
    Literal["hespas", "astra-sim"],
    typer.Option(
        help="astra-sim: run your own ASTRA-sim (--astra-bin) on the same traces too.", rich_help_panel=_ASTRA
    ),
]
_AstraBin = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="The analytical binary of ASTRA-sim, for --simulator astra-sim.",
        rich_help_panel=_ASTRA,
    ),
]
_AstraTimeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="How long your ASTRA-sim may take (default: an hour).",
        show_default=False,
        rich_help_panel=_ASTRA,
    ),
]
_Launches = Annotated[
    bool,
    typer.Option(
        "--launches/--no-launches",
        help="Kernels of a training step wait for a host that launches them one by one, unless it is a whole "
        "CUDA graph or a program of XLA.",
        rich_help_panel=_RANKS,
    ),
]
_Grid = Annotated[
    Path | None,
    typer.Option(
        metavar="GRID.toml",
        help="A row per combination of the file's axes (docs/simulation.md).",
        rich_help_panel=_WHAT_IF,
    ),
]
_Jobs = Annotated[
    int,
    typer.Option(metavar="N", min=1, max=1024, help="Rows of a grid at a time.", rich_help_panel=_WHAT_IF),
]
_Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        metavar="A.json B.json",
        help="What differs between two documents of --json.",
        rich_help_panel=_WHAT_IF,
    ),
]
_Beside = Annotated[
    Path | None,
    typer.Option(
        metavar="PROFILE",
        help="Show it, or a folder of ranks, in the same timeline.",
        rich_help_panel=options.OUTPUT,
    ),
]


def simulate(
    context: typer.Context,
    source: Annotated[
        Path | None, typer.Argument(metavar="SRC", help="Any readable workload.", show_default=False)
    ] = None,
    hardware: Annotated[
        list[str] | None,
        options.hardware_option("Times of this device (default: those in SRC); repeated: a column each."),
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
    beside: _Beside = None,
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
    """How long one step takes: compute, communication and copies side by side, and the critical path.

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
    reads: list[Path | str | None] = [source, device, system, model_name, beside, *configs]
    with command_line(
        debug, diagnostics, str(source), documents=[json_file], reads=reads, writes=[timeline, report]
    ):
        from hespas import api
        from hespas.converters import ReadOptions

        check_binary(simulator, astra_bin)
        drawn = _Drawn(timeline, beside, json_file, report, overwrite)
        drawn.check(source, device, [path for path in (*configs, *hardware_files(system)) if path])
        mode = "astra" if simulator == "astra-sim" else mode
        asked = (jitter, seed, straggler or [], messages, alone, overlap_trips, interference, launches)
        with progress_bar("simulating", progress) as callback:
            reading = ReadOptions(num_devices=num_devices, num_replicas=num_replicas, progress=callback)
            done = api.simulate(
                source,
                device or None,
                estimator=model_name,
                granularity=granularity,
                format=source_format or None,
                options=reading,
                simulator=_simulator(mode, *asked),
                missing=missing,
                timeline=timeline,
                beside=drawn.measured(callback),
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
        drawn.write(done)
        say_diagnostics(diagnostics, source)
        _show(done)
        show_others(done)


def _simulator(
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
    """What the options ask for; None where they ask for nothing."""
    from hespas.graph.errors import UsageError
    from hespas.simulator import JobScheduler, ListScheduler

    given = {
        "--jitter": jitter, "--seed": seed, "--straggler": straggler, "--messages": messages != "eager",
        "--alone": alone, "--overlap-trips": overlap_trips, "--no-interference": not interference,
        "--no-launches": not launches,
    }  # fmt: skip
    asked = [option for option, value in given.items() if value]
    if mode == "astra" and asked:
        raise UsageError(f"{', '.join(asked)}: of mode hespas only", hint="leave it out, or --mode hespas")
    slow = tuple(_straggler(text) for text in straggler)
    if len(dict(slow)) < len(slow):
        raise UsageError("--straggler names a rank twice", hint="give each rank once")
    if alone:
        if jitter or seed or slow or messages != "eager":
            raise UsageError("--alone has no --jitter, --seed, --straggler or --messages")
        return ListScheduler(overlap_trips=overlap_trips, interference=interference, launches=launches)
    if seed and not jitter:
        raise UsageError("--seed without --jitter draws nothing")
    if not asked:
        return None
    return JobScheduler(
        jitter=jitter,
        seed=seed,
        stragglers=slow,
        protocol=messages,
        overlap_trips=overlap_trips,
        interference=interference,
        launches=launches,
    )


def _straggler(text: str) -> tuple[int, float]:
    from hespas.graph.errors import UsageError

    rank, _, factor = text.partition("=")
    try:
        return int(rank), float(factor)
    except ValueError:
        raise UsageError(f"--straggler {text} is no RANK=FACTOR", hint="--straggler 3=1.2") from None


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The timeline that is asked for, the profile beside it, and the document."""

    file: Path | None
    beside: Path | None
    json_file: Path | None
    report: Path | None
    overwrite: bool

    def check(self, source: Path, hardware: str, configs: Sequence[Path]) -> None:
        """Refuse files that cannot be written, or would replace what is read, before any work is done."""
        from hespas import api

        taken: dict[str, Sequence[str | Path]] = {"SRC": [source], "--hardware": hardware_files(hardware)}
        if configs:
            taken["a configuration"] = configs
        if self.beside:
            taken["--beside"] = [self.beside]
        if self.file:
            check_apart("--timeline", self.file, taken)
        api.check_timeline(self.file, beside=self.beside is not None, overwrite=self.overwrite)
        if self.file:
            taken["--timeline"] = [self.file]
        check_reports({"--json": self.json_file}, taken, overwrite=self.overwrite)
        check_report_folder(self.report, "simulation.json", self.json_file, taken, overwrite=self.overwrite)

    def measured(self, progress: Callable[[int, int], None] | None) -> list[Profile]:
        """The profiles beside the run, if any; what is found in them is told at once, under their name."""
        from hespas import api
        from hespas.converters import ReadOptions
        from hespas.graph import Diagnostics
        from hespas.graph.errors import UsageError

        if not self.beside:
            return []
        diagnostics = Diagnostics()
        reading = ReadOptions(progress=progress)
        try:
            found = api.read_profiles(self.beside, options=reading, diagnostics=diagnostics)
        except UsageError as error:
            raise UsageError(f"--beside: {error.message}", path=error.path, hint=error.hint) from error
        say_diagnostics(diagnostics, self.beside)
        return found

    def write(self, done: SimulationResult) -> None:
        """Write the document and the report, if they are asked for."""
        from hespas import api

        if self.json_file:
            api.write_simulation_json(done, self.json_file, overwrite=self.overwrite)
        if self.report:
            done.write(self.report, overwrite=self.overwrite)


def _show(done: SimulationResult) -> None:
    emit(step_lines(done, done.where, mode=done.mode))
    emit(mixed_lines(done))
    memory = {found.rank_class: found for found in done.memory}
    for found in done.classes[:_MOST_CLASSES]:
        _show_class(found)
        if found.rank_class in memory:
            _show_memory(memory[found.rank_class], done.workload.classes[found.rank_class])
    left = len(done.classes) - _MOST_CLASSES
    if left > 0:
        emit(("", f"and {counted(left, 'class')} more: --json writes all"))
    _show_links(done)
    _show_path(done)


def _show_links(done: SimulationResult) -> None:
    """How far each dimension of the system is used."""
    found = done.links.links.rows() if done.links else []
    if not found:
        return
    rows = [
        (
            row.dimension,
            f"{row.bandwidth_gbytes_per_s:,g} GB/s",
            bytes_text(row.sent_bytes),
            time_text(row.in_use_ns),
            _part(row.utilization_share),
            _part(row.in_use_utilization_share),
        )
        for row in found
    ]
    emit("")
    emit(table_text(("network", "of a device", "sent", "in use", "utilization", "while in use"), rows))


def _part(share: float) -> str:
    return "" if isnan(share) else f"{share:.1%}"


def _show_path(done: Simulation) -> None:
    """The critical path of the job, where it leads through several ranks."""
    from hespas.simulator import node_label, segments

    found = segments(done)
    if len(found) < 2:
        return
    emit(("", f"critical path of the job, through {counted(len(found), 'rank')} one after the other"))
    rows = [
        (
            f"{part.rank:,}",
            time_text(part.start_ns),
            time_text(part.end_ns - part.start_ns),
            node_label(done.workload.graph_of(part.rank), part.last_node),
        )
        for part in found[-_MOST_SEGMENTS:]
    ]
    emit(table_text(("rank", "from", "for", "until"), rows))
    if len(found) > _MOST_SEGMENTS:
        emit(f"the last {_MOST_SEGMENTS} of {len(found):,}: --json writes all")


def _show_class(found: ClassResult) -> None:
    emit("")
    least = "at least " if found.unknown else ""
    emit(
        f"{found.name}: {counted(found.num_ranks, 'rank')}, {least}{time_text(found.finish_ns)}, "
        f"communication exposed {time_text(found.exposed_comm_ns)}{_share(found.exposed_comm_ns, found)}"
    )
    if found.interference_ns:
        emit(f"collectives and kernels beside each other take {time_text(found.interference_ns)} longer")
    for cause, wait_ns in found.wait_ns.items():
        if wait_ns:
            emit(f"waits for other ranks in {cause} for {time_text(wait_ns)}{_share(wait_ns, found)}")
    if found.ways > 1:
        emit(f"its ranks behave in {found.ways:,} ways; rank {found.rank:,} is the last of them")
    rows = [
        (
            name,
            time_text(busy_ns),
            time_text(max(found.finish_ns - busy_ns, 0.0)),
            time_text(found.critical_path.resource_ns[name]),
        )
        for name, busy_ns in found.busy_ns.items()
        if busy_ns
    ]
    if not rows:
        return
    emit(table_text(("resource", "busy", "idle", "on the critical path"), rows))
    path = found.critical_path
    emit("")
    emit(
        f"critical path: {counted(path.spans, 'operation')}, "
        f"{path.after_resource:,} of them waited for a busy resource"
    )
    lines = [
        (name, time_text(spent_ns), _share(spent_ns, found).strip(" ()"))
        for name, spent_ns in path.class_ns.items()
    ]
    emit(table_text(("class", "time", "share"), lines))


def _show_memory(found: RankMemory, graph: OpGraph) -> None:
    use = found.use
    least = "at least " if use.is_lower_bound else ""
    when = "" if isnan(use.at_ns) else f" at {time_text(use.at_ns)}"
    node = f", {graph.node_name(use.at_node)}" if use.at_node >= 0 and graph.node_name(use.at_node) else ""
    emit("")
    emit(f"memory: {least}{bytes_text(use.peak_bytes)}{when}{node}{_fit_text(found)}")
    parts = [
        ("parameters", use.parameters_bytes),
        ("constants", use.constants_bytes),
        ("results", use.outputs_bytes),
        *((f"temporaries: {name}", size) for name, size in use.class_bytes.items()),
        ("buffers that are not nodes", use.unlisted_bytes),
    ]
    rows = [(name, bytes_text(size), f"{size / use.peak_bytes:.1%}") for name, size in parts if size]
    if rows:
        emit(table_text(("memory", "size", "share"), rows))
    if use.unknown:
        emit(f"{counted(use.unknown, 'tensor')} of unknown size: not included")


def _fit_text(found: RankMemory) -> str:
    if found.is_whole_job:
        return ", of the whole job before it is partitioned"
    if isnan(found.capacity_bytes):
        return ""
    room = bytes_text(found.capacity_bytes)
    if found.fits is None:
        return f" of {room}: cannot tell whether it fits"
    return f", fits the {room} of the device" if found.fits else f", does not fit the {room} of the device"


def _share(part_ns: float, found: ClassResult) -> str:
    return f" ({part_ns / found.finish_ns:.1%})" if found.finish_ns else ""
