"""``hespas capture``: a live program as a workload, for any number of devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hespas.captures.jax.lowering import Platform, skip_device_search
from hespas.captures.partition import TIMEOUT_S, Partitioner
from hespas.cli import options
from hespas.cli.destinations import check_reports
from hespas.cli.session import command_line
from hespas.cli.terminal import emit, progress_bar, report_diagnostics, stdout_redirected
from hespas.cli.text import bytes_text, count_text, flops_text, table_text
from hespas.files.processes import ending_what_it_starts
from hespas.graph.diagnostics import Diagnostics

if TYPE_CHECKING:
    from hespas.api import CaptureResult

__all__ = ["capture"]

_PROGRAM, _PARTITION = "Program", "Partitioning"

_Target = Annotated[
    str,
    typer.Argument(metavar="MODULE:FUNCTION", help="A function, or FILE.py:FUNCTION.", show_default=False),
]
_Mesh = Annotated[
    str, typer.Option(metavar="AXIS=N,...", help="The mesh, outermost axis first: data=64,model=8.")
]
_Args = Annotated[
    str,
    typer.Option(
        metavar="TYPES|NAME",
        help="JAX: 'bf16[8192,1024]@data,model; i32[8192]@data', or what makes arguments, given the mesh.",
        rich_help_panel=_PROGRAM,
    ),
]
_Framework = Annotated[
    Literal["auto", "jax", "torch"], typer.Option(help="Whose program it is.", rich_help_panel=_PROGRAM)
]
_Real = Annotated[
    bool,
    typer.Option(
        "--real-tensors", help="PyTorch: compute with data, where the model fits.", rich_help_panel=_PROGRAM
    ),
]
_Compiled = Annotated[
    bool,
    typer.Option(
        "--compiled", help="PyTorch: the graphs of torch.compile, not fused.", rich_help_panel=_PROGRAM
    ),
]
_Platform = Annotated[
    Platform | None, typer.Option(help="JAX: whose variant of the program.", rich_help_panel=_PROGRAM)
]
_Explicit = Annotated[
    str, typer.Option(metavar="AXIS,...", help="JAX: axes that are part of types.", rich_help_panel=_PROGRAM)
]
_Who = Annotated[Partitioner, typer.Option(help="Who propagates shardings.", rich_help_panel=_PARTITION)]
_CompileFor = Annotated[
    str,
    typer.Option(
        metavar="TARGET",
        help="JAX: what the compiler for gpu:h100:8, tpu:v5p:8x8x8, ... schedules (extras jax-gpu, jax-tpu).",
        rich_help_panel=_PARTITION,
    ),
]
_Profile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="DIR",
        help="JAX: also run it on devices of this host, and keep program, profile and what joins.",
        rich_help_panel=options.OUTPUT,
    ),
]
_Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        min=1.0,
        metavar="S",
        help="Seconds that partitioning may take.",
        rich_help_panel=_PARTITION,
    ),
]
_MissingValues = Annotated[
    Literal["warn", "error"],
    typer.Option(help="Warn of control flow that depends on guessed values, or fail (exit code 4)."),
]
_Program = Annotated[
    Path | None,
    typer.Option(
        "--program",
        metavar="FILE.mlir",
        help="Write the program of the whole mesh, StableHLO.",
        rich_help_panel=options.OUTPUT,
    ),
]
_Partitioned = Annotated[
    Path | None,
    typer.Option(
        "--partitioned",
        metavar="FILE.hlo",
        help="Write what every device runs, HLO.",
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
    partitioner: _Who = "auto",
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
    """Capture a program of JAX or PyTorch for a mesh of devices that need not be there.

    hespas capture train:build --mesh data=64,model=8 --out traces/
    """
    diagnostics = Diagnostics()
    written = [out, program, partitioned, profile]
    with command_line(debug, diagnostics, target, documents=[json_file], writes=written):
        from hespas import api

        skip_device_search()
        form = options.workload_format(out, to)
        named = {"--out": out, "--program": program, "--partitioned": partitioned, "--profile": profile}
        others = {name: [path] for name, path in named.items() if path}
        check_reports({"--json": json_file}, others, overwrite=overwrite)
        axes = tuple(part.strip() for part in explicit.split(",") if part.strip())
        with progress_bar("writing", progress) as callback, stdout_redirected(), ending_what_it_starts():
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
                format=form,
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
        _tell(done)
        if ran:
            emit(f"{ran.headline()} -> {profile}")


def _tell(done: CaptureResult) -> None:
    where = f" -> {done.written} ({bytes_text(done.written_bytes)})" if done.written else ""
    emit(f"{done.headline()}{where}")
    document = done.document()
    emit(f"a rank: {flops_text(document.flops)}, {bytes_text(document.bytes_moved)} moved")
    rows = [
        (each.kind, each.axes or "-", f"{each.groups:,} x {each.group_size:,}", count_text(each.times), size)
        for each in done.collectives
        for size in [bytes_text(each.size_bytes)]
    ]
    if rows:
        emit(
            table_text(
                ("collective", "over", "groups x ranks", "times", "payload of a rank"), rows, left=(0, 1)
            )
        )
