"""``hespas capture``: capture of a live JAX or PyTorch program for any number of devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from hespas.captures.jax.lowering import Platform, skip_device_search
from hespas.captures.partition import TIMEOUT_S, Partitioner
from hespas.cli import options
from hespas.cli.destinations import check_reports
from hespas.cli.session import command_line
from hespas.cli.terminal import emit, progress_bar, report_diagnostics, stdout_redirected
from hespas.files.processes import killing_descendants
from hespas.graph.diagnostics import Diagnostics
from hespas.report.tables import table_text
from hespas.report.texts import bytes_text, count_text, flops_text

__all__ = ["capture"]

_PROGRAM, _PARTITION = "Program", "Partitioning"

_Target = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION", help="Function to capture; MODULE may be FILE.py.", show_default=False
    ),
]
_Mesh = Annotated[
    str, typer.Option(metavar="AXIS=N,...", help="Set the mesh, outermost axis first: data=64,model=8.")
]
_Args = Annotated[
    str,
    typer.Option(
        metavar="TYPES|NAME",
        help="JAX: set argument types ('bf16[8192,1024]@data,model; i32[8192]@data'), or a function that "
        "makes them from the mesh.",
        rich_help_panel=_PROGRAM,
    ),
]
_Framework = Annotated[
    Literal["auto", "jax", "torch"],
    typer.Option(help="Set the framework of the program.", rich_help_panel=_PROGRAM),
]
_Real = Annotated[
    bool,
    typer.Option(
        "--real-tensors",
        help="PyTorch: run on real data, if the model fits in memory.",
        rich_help_panel=_PROGRAM,
    ),
]
_Compiled = Annotated[
    bool,
    typer.Option(
        "--compiled",
        help="PyTorch: capture the graphs of torch.compile before fusion.",
        rich_help_panel=_PROGRAM,
    ),
]
_Platform = Annotated[
    Platform | None, typer.Option(help="JAX: lower for this platform.", rich_help_panel=_PROGRAM)
]
_Explicit = Annotated[
    str,
    typer.Option(
        metavar="AXIS,...",
        help="JAX: make these mesh axes explicit (AxisType.Explicit).",
        rich_help_panel=_PROGRAM,
    ),
]
_Partitioner = Annotated[
    Partitioner, typer.Option(help="Propagate shardings with this partitioner.", rich_help_panel=_PARTITION)
]
_CompileFor = Annotated[
    str,
    typer.Option(
        metavar="TARGET",
        help="JAX: capture the program as compiled for this target: gpu:h100:8, tpu:v5p:8x8x8, ... "
        "(extras jax-gpu, jax-tpu).",
        rich_help_panel=_PARTITION,
    ),
]
_Profile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="DIR",
        help="JAX: also run the program on devices of this host; write program, compiled HLO and profile to "
        "DIR.",
        rich_help_panel=options.OUTPUT,
    ),
]
_Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        min=1.0,
        metavar="S",
        help="Limit the time of partitioning [s].",
        rich_help_panel=_PARTITION,
    ),
]
_MissingValues = Annotated[
    Literal["warn", "error"],
    typer.Option(help="Handle control flow that depends on unknown values: warn, or fail (exit code 4)."),
]
_Program = Annotated[
    Path | None,
    typer.Option(
        "--program",
        metavar="FILE.mlir",
        help="Write the program of the whole mesh as StableHLO.",
        rich_help_panel=options.OUTPUT,
    ),
]
_Partitioned = Annotated[
    Path | None,
    typer.Option(
        "--partitioned",
        metavar="FILE.hlo",
        help="Write the partitioned program of one device as HLO.",
        rich_help_panel=options.OUTPUT,
    ),
]


def capture(
    target: _Target,
    mesh: _Mesh,
    args: _Args = "",
    framework: _Framework = "auto",
    platform: _Platform = None,
    explicit: _Explicit = "",
    real_tensors: _Real = False,
    compiled: _Compiled = False,
    partitioner: _Partitioner = "auto",
    compile_for: _CompileFor = "",
    timeout_s: _Timeout = TIMEOUT_S,
    missing: _MissingValues = "warn",
    out: options.Destination = None,
    to: options.DestinationFormat = "",
    program: _Program = None,
    partitioned: _Partitioned = None,
    profile: _Profile = None,
    only_classes: options.OnlyClasses = False,
    shard: options.Shard = "",
    jobs: options.Jobs = 2,
    json_file: options.Json = None,
    overwrite: options.Overwrite = False,
    progress: options.Progress = None,
    loudness: options.Loudness = None,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """Capture a JAX or PyTorch program for a mesh of devices, which this machine need not have.

    hespas capture train:build --mesh data=64,model=8 --out traces/
    """
    diagnostics = Diagnostics()
    written = [out, program, partitioned, profile]
    with command_line(debug, diagnostics, target, documents=[json_file], writes=written):
        from hespas import api

        skip_device_search()
        target_format = options.workload_format(out, to)
        outputs = {"--out": out, "--program": program, "--partitioned": partitioned, "--profile": profile}
        taken = {name: [path] for name, path in outputs.items() if path}
        check_reports({"--json": json_file}, taken, overwrite=overwrite)
        axes = tuple(part.strip() for part in explicit.split(",") if part.strip())
        with progress_bar("writing", progress) as callback, stdout_redirected(), killing_descendants():
            parts = options.parts_of(shard, "", only_classes=only_classes, resume=False)
            done = api.capture(
                target,
                mesh=mesh,
                args=args or None,
                framework=framework,
                platform=platform,
                explicit=axes,
                real_tensors=real_tensors,
                compiled=compiled,
                partitioner=partitioner,
                compile_for=compile_for,
                timeout_s=timeout_s,
                on_unknown=missing,
                destination=out,
                format=target_format,
                overwrite=overwrite,
                options=parts.options(jobs=jobs, progress=callback),
                diagnostics=diagnostics,
            )
        for path, save in ((program, done.write_program), (partitioned, done.write_partitioned)):
            if path:
                save(path, overwrite=overwrite)
        if json_file:
            api.write_json(done.to_json(), json_file, overwrite=overwrite)
        ran = None
        if profile:
            ran = api.profile_program(
                target,
                mesh=mesh,
                folder=profile,
                args=args,
                explicit=axes,
                timeout_s=timeout_s,
                overwrite=overwrite,
                diagnostics=diagnostics,
            )
        report_diagnostics(diagnostics, target)
        destination = f" -> {done.written} ({bytes_text(done.written_bytes)})" if done.written else ""
        emit(f"{done.headline()}{destination}")
        document = done.document()
        emit(f"per rank: {flops_text(document.flops)}, {bytes_text(document.bytes_moved)} moved")
        rows = [
            (
                row.kind,
                row.axes or "-",
                f"{row.groups:,} x {row.group_size:,}",
                count_text(row.times),
                bytes_text(row.size_bytes),
            )
            for row in done.collectives
        ]
        if rows:
            emit(
                table_text(
                    ("collective", "mesh axes", "groups x ranks", "times", "payload per rank"),
                    rows,
                    left=(0, 1),
                )
            )
        if ran:
            emit(f"{ran.headline()} -> {profile}")
