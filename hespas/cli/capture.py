"""``hespas capture``: capture of a live JAX or PyTorch program for any number of devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from hespas.api.capturing import capture as capture_function
from hespas.captures.jax.lowering import skip_device_search
from hespas.cli.command import Call, command
from hespas.cli.destinations import workload_format
from hespas.cli.terminal import emit, report_diagnostics, stdout_redirected
from hespas.files.processes import killing_descendants
from hespas.graph.hints import OUTPUT, Option
from hespas.report.tables import columns, table_from_rows
from hespas.report.texts import bytes_text, flops_text

__all__ = ["capture"]

_Program = Annotated[
    Path | None,
    Option(
        "Write the program of the whole mesh as StableHLO.",
        metavar="FILE.mlir",
        panel=OUTPUT,
        access="writes",
    ),
]
_Partitioned = Annotated[
    Path | None,
    Option(
        "Write the partitioned program of one device as HLO.",
        metavar="FILE.hlo",
        panel=OUTPUT,
        access="writes",
    ),
]
_Profile = Annotated[
    Path | None,
    Option(
        "JAX: also run the program on devices of this host; write program, compiled HLO and profile to DIR.",
        metavar="DIR",
        panel=OUTPUT,
        access="writes",
    ),
]


@command(capture_function, progress="writing", without=("max_input_bytes",))
def capture(
    call: Call,
    *,
    program: _Program = None,
    partitioned: _Partitioned = None,
    profile: _Profile = None,
) -> None:
    """Capture a JAX or PyTorch program for a mesh of devices, which this machine need not have.

    hespas capture train:build --mesh data=64,model=8 --out traces/
    """
    from hespas import api

    skip_device_search()
    target_format = workload_format(call["destination"], call["format"])
    with stdout_redirected(), killing_descendants():
        done = call.run(api.capture, format=target_format)
    for path, save in ((program, done.write_program), (partitioned, done.write_partitioned)):
        if path:
            save(path, overwrite=call.overwrite)
    call.write_json(done.to_json())
    ran = None
    if profile:
        ran = api.profile_program(
            call["function"],
            mesh=call["mesh"],
            folder=profile,
            args=call["args"] or "",
            explicit=call["explicit"],
            timeout_s=call["timeout_s"],
            overwrite=call.overwrite,
            diagnostics=call.diagnostics,
        )
    report_diagnostics(call.diagnostics, call["function"])
    destination = f" -> {done.written} ({bytes_text(done.written_bytes)})" if done.written else ""
    emit(f"{done.headline()}{destination}")
    document = done.document()
    emit(f"per rank: {flops_text(document.flops)}, {bytes_text(document.bytes_moved)} moved")
    rows = [
        (
            row.kind,
            row.axes or "-",
            f"{row.groups:,} x {row.group_size:,}",
            row.times,
            row.size_bytes,
        )
        for row in done.collectives
    ]
    if rows:
        header = (
            *columns("text", "collective", "mesh axes"),
            *columns("number", "groups x ranks", write=str),
            *columns("count", "times"),
            *columns("bytes", "payload per rank"),
        )
        emit(table_from_rows(header, rows).to_text())
    if ran:
        emit(f"{ran.headline()} -> {profile}")
