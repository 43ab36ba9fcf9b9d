"""``hespas hardware``: list, show and measure devices; show systems and write them for ASTRA-sim."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hespas.cli.command import (
    AsJson,
    Debug,
    Json,
    ListFile,
    Overwrite,
    Untrusted,
    UntrustedLimit,
    system_names,
)
from hespas.cli.destinations import check_reports, hardware_files, list_file
from hespas.cli.session import command_line
from hespas.cli.terminal import emit, report_diagnostics
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import UsageError, clipped
from hespas.report.tables import columns, table_from_rows

if TYPE_CHECKING:
    from hespas.hardware import Device

__all__ = [
    "app",
    "hardware_list",
    "hardware_measure",
    "hardware_show",
    "hardware_system",
    "parse_devices",
]

_ASTRA_SIM = "astra-sim"
_MAX_ALIASES_WIDTH = 32
_MAX_DIGITS = 9

app = typer.Typer(
    no_args_is_help=True, help="List, show and measure devices; show systems and write them for ASTRA-sim."
)


@app.command("list")
def hardware_list(
    json_file: ListFile = None,
    *,
    as_json: AsJson = False,
    overwrite: Overwrite = False,
    untrusted: Untrusted = False,
    limit: UntrustedLimit = None,
    debug: Debug = False,
) -> None:
    """List the built-in devices and systems."""
    with command_line(debug, writes=[json_file]):
        destination = list_file(json_file, as_json=as_json, overwrite=overwrite)
        from hespas.hardware import device_names, load_device, load_system, system_names

        devices = [load_device(name) for name in device_names()]
        systems = [load_system(name) for name in system_names()]
        if destination:
            from hespas import api

            api.write_json(api.devices_document(devices, systems), destination, overwrite=overwrite)
            return
        header = (
            *columns("text", "device", "vendor"),
            *columns("number", "dense bf16/f16", write="{:,.1f} TFLOP/s".format, unknown="-"),
            *columns("number", "memory", write="{:,.0f} GB/s".format),
            *columns("number", "capacity", write="{:,.0f} GB".format),
            *columns("text", "aliases"),
        )
        emit(table_from_rows(header, map(_device_row, devices)).to_text())
        emit("")
        rows = [
            (
                system.name,
                system.device or "any",
                f"up to {system.most:,}" if system.most > 0 else "any",
                ", ".join(
                    f"{dimension.name} {dimension.bandwidth_bytes_per_s / 1e9:,.4g} GB/s"
                    for dimension in system.dimensions
                ),
            )
            for system in systems
        ]
        of_system = (
            *columns("text", "system", "device"),
            *columns("number", "devices", write=str),
            *columns("text", "dimensions, inner first"),
        )
        emit(table_from_rows(of_system, rows).to_text())


def _device_row(device: Device) -> tuple[object, ...]:
    # Rates with float32 accumulators, which frameworks use: GeForce is faster with float16 ones.
    rates = [
        peak.flops_per_s
        for peak in device.peaks
        if peak.dtype in {"bf16", "f16"} and peak.unit == "matrix" and peak.accumulator != "f16"
    ]
    memory = next(memory for memory in device.memories if memory.level == "main")
    aliases = ""
    for alias in device.aliases:
        longer = f"{aliases}, {alias}" if aliases else alias
        if len(longer) > _MAX_ALIASES_WIDTH:
            break
        aliases = longer
    return (
        device.name,
        device.vendor,
        max(rates) / 1e12 if rates else None,
        memory.bandwidth_bytes_per_s / 1e9,
        memory.capacity_bytes / 1e9,
        aliases,
    )


@app.command("show")
def hardware_show(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="Device name or hardware file.")],
    untrusted: Untrusted = False,
    limit: UntrustedLimit = None,
    debug: Debug = False,
) -> None:
    """Print a device as a TOML file with its sources."""
    with command_line(debug, source=name, reads=[name]):
        from hespas.hardware import device_to_toml, load_device

        device = load_device(name)
        folder = Path(name).parent if device.learned_models else None  # only user files have learned models
        emit(device_to_toml(device, folder=folder).rstrip("\n").split("\n"))


@app.command("measure")
def hardware_measure(
    out: Annotated[Path, typer.Option(metavar="FILE.toml", help="Write the hardware file to FILE.toml.")],
    name: Annotated[str, typer.Option(help="Set the name of the device in the file.")] = "this-cpu",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE.toml if it exists.")] = False,
    untrusted: Untrusted = False,
    limit: UntrustedLimit = None,
    debug: Debug = False,
) -> None:
    """Measure the CPU of this machine (about ten seconds) and write it as a hardware file."""
    with command_line(debug, writes=[out]):
        from hespas.files.output import check_destination
        from hespas.hardware import write_device
        from hespas.hardware.measure import measure_cpu

        check_destination(out, overwrite=overwrite)
        diagnostics = Diagnostics()
        device = measure_cpu(name=name, diagnostics=diagnostics)
        write_device(device, out, overwrite=overwrite)
        report_diagnostics(diagnostics, out)
        emit(f"{out}: {device.description}")


@app.command("system")
def hardware_system(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME|FILE", help="System name or system file.", autocompletion=system_names),
    ],
    devices: Annotated[
        str,
        typer.Option(
            metavar="N|AxB", help="Set the number of devices, or the size of each dimension, inner first."
        ),
    ] = "",
    target: Annotated[
        tuple[str, Path] | None,
        typer.Option(
            "--to",
            metavar="astra-sim DIR",
            help="Write system.json, network.yml and remote_memory.json to a folder.",
        ),
    ] = None,
    json_file: Json = None,
    overwrite: Overwrite = False,
    untrusted: Untrusted = False,
    limit: UntrustedLimit = None,
    debug: Debug = False,
) -> None:
    """Print a system as a TOML file with its sources, or write it as configuration files of ASTRA-sim.

    hespas hardware system dgx-h100 --devices 64 --to astra-sim configs/
    """
    format_name, folder = target or ("", None)
    diagnostics = Diagnostics()
    writes = [folder] if folder else []
    with command_line(debug, diagnostics, name, documents=[json_file], reads=[name], writes=writes):
        if target and format_name != _ASTRA_SIM:
            raise UsageError(
                f"--to: unknown format '{clipped(format_name)}', expected {_ASTRA_SIM}",
                hint="--to astra-sim DIR",
            )
        taken = {"a system file": hardware_files(name), "--to": writes}
        check_reports({"--json": json_file}, taken, overwrite=overwrite)
        from hespas import api
        from hespas.hardware import system_to_toml

        system = api.load_system(name, parse_devices(devices), diagnostics=diagnostics)
        written = system.write_astra_sim(folder, overwrite=overwrite) if folder else []
        if json_file:
            api.write_json(system.document(), json_file, overwrite=overwrite)
        report_diagnostics(diagnostics, name)
        for note in diagnostics if folder else ():
            emit(f"note: {note.location}: {note.message} [{note.code}]")
        if folder:
            emit(f"{name} -> {', '.join(map(str, written))}")
        elif not json_file:
            emit(system_to_toml(system.system).rstrip("\n").split("\n"))


def parse_devices(text: str) -> int | tuple[int, ...] | None:
    """Return the value of ``--devices``: a number, sizes such as 4x4x8, or None if empty.

    Raises ``UsageError`` for any other text.
    """
    if not text:
        return None
    parts = text.split("x")
    if not all(part.isascii() and part.isdigit() and len(part) <= _MAX_DIGITS for part in parts):
        raise UsageError(
            f"invalid --devices {clipped(text)}: expected N or AxB", hint="--devices 64, or --devices 4x4x8"
        )
    sizes = tuple(map(int, parts))
    return sizes[0] if len(sizes) == 1 else sizes
