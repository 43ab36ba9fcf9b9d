"""``hespas hardware``: list, show and measure devices; show systems and write them for ASTRA-sim."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

import typer

from hespas.cli.command import LISTING, Call, command
from hespas.cli.destinations import AsJson, ListFile, check_reports, check_suffix, list_file, report_folder
from hespas.cli.terminal import emit, progress_bar, report_diagnostics
from hespas.graph.errors import UsageError, clipped
from hespas.graph.hints import Option
from hespas.report.texts import counted

__all__ = [
    "app",
    "hardware_list",
    "hardware_measure",
    "hardware_show",
    "hardware_system",
    "parse_devices",
]

_ASTRA_SIM = "astra-sim"
_MAX_DIGITS = 9

app = typer.Typer(
    no_args_is_help=True, help="List, show and measure devices; show systems and write them for ASTRA-sim."
)


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


_Name = Annotated[
    str, Option("Device name or hardware file.", metavar="NAME|FILE", is_argument=True, access="reads")
]
_Out = Annotated[
    Path,
    Option(
        "Write the hardware file to FILE.toml; with --kit the table to FILE.parquet or FILE.csv.",
        metavar="FILE",
        access="writes",
    ),
]
_NewName = Annotated[str, Option("Set the name of the device in the file.")]
_OverwriteDevice = Annotated[bool, Option("Replace FILE if it exists.")]
_Kit = Annotated[
    bool,
    Option("Measure shapes that identify --device, for calibrate --table; fit nothing."),
]
_KitDevice = Annotated[
    str, Option("Device of this machine that --kit measures.", metavar="NAME|FILE", access="reads")
]
_KitFramework = Annotated[
    Literal["auto", "torch", "jax"],
    Option("Framework that runs the operations of --kit; auto is torch if it is installed."),
]
_SystemName = Annotated[
    str,
    Option(
        "System name or system file.",
        metavar="NAME|FILE",
        completes="systems",
        is_argument=True,
        label="a system file",
    ),
]
_Devices = Annotated[
    int | tuple[int, ...] | None,
    Option(
        "Set the number of devices, or the size of each dimension, inner first.",
        metavar="N|AxB",
        parse=parse_devices,
    ),
]
_Target = Annotated[
    tuple[str, Path] | None,
    Option(
        "Write system.json, network.yml and remote_memory.json to a folder.",
        flag="to",
        metavar="astra-sim DIR",
    ),
]


@app.command("list")
@command(without=LISTING)
def hardware_list(
    call: Call,
    *,
    json_file: ListFile = None,
    as_json: AsJson = False,
) -> None:
    """List the devices and systems, the user's own last."""
    destination = list_file(json_file, as_json=as_json, overwrite=call.overwrite)
    from hespas import api

    if destination:
        from hespas.hardware import all_device_names, all_system_names, load_device, load_system

        devices = [load_device(name) for name in all_device_names()]
        systems = [load_system(name) for name in all_system_names()]
        api.write_json(api.devices_document(devices, systems), destination, overwrite=call.overwrite)
        return
    emit(api.list_devices().to_text())
    emit("")
    emit(api.list_systems().to_text())


@app.command("show")
@command(without=(*LISTING, "overwrite"))
def hardware_show(call: Call, *, name: _Name) -> None:
    """Print a device as a TOML file with its sources."""
    from hespas.hardware import device_to_toml, load_device

    device = load_device(name)
    folder = Path(name).parent if device.learned_models else None  # only user files have learned models
    emit(device_to_toml(device, folder=folder).rstrip("\n").split("\n"))


@app.command("measure")
@command(without=LISTING, progress="measuring")
def hardware_measure(
    call: Call,
    *,
    out: _Out,
    name: _NewName = "this-cpu",
    kit: _Kit = False,
    device: _KitDevice = "",
    framework: _KitFramework = "auto",
    overwrite: _OverwriteDevice = False,
) -> None:
    """Measure the CPU of this machine (about ten seconds) and write it as a hardware file.

    With --kit, measure a table of operations of any device in PyTorch or JAX (a few minutes).

    hespas hardware measure --out my-cpu.toml
    hespas hardware measure --kit --device L40S --out kit.parquet
    """
    from hespas.files.output import check_destination
    from hespas.hardware import load_device, write_device
    from hespas.hardware.measure import measure_cpu

    excluded = ("name",) if kit else ("device", "framework")
    for option in excluded:
        if call.is_written(option):
            text = "--kit excludes --name" if kit else f"--{option} requires --kit"
            raise UsageError(text, hint="leave it out" if kit else "add --kit, or leave it out")
    if kit and not device:
        raise UsageError("--kit requires --device", hint="--device NAME, or a hardware file of this device")
    if kit:
        check_suffix(out, (".parquet", ".csv"), "kit.parquet")
    else:
        check_suffix(out, ".toml", "my-cpu.toml")
    check_destination(out, overwrite=overwrite)
    if not kit:
        measured = measure_cpu(name=name, diagnostics=call.diagnostics)
        write_device(measured, out, overwrite=overwrite)
        report_diagnostics(call.diagnostics, out)
        emit(f"{out}: {measured.description}")
        return
    from hespas.measurements.kit import measure_kit, write_kit
    from hespas.measurements.kit_frameworks import open_framework

    of_kit = load_device(device)
    with progress_bar("measuring", call.texts["progress"]) as callback:
        done = measure_kit(of_kit, open_framework(framework), progress=callback, diagnostics=call.diagnostics)
    write_kit(done, out, overwrite=overwrite)
    report_diagnostics(call.diagnostics, out)
    skipped = f", {done.skipped} skipped" if done.skipped else ""
    emit(
        f"{out}: {counted(len(done.frame), 'shape')} of {of_kit.name} measured{skipped}; next: "
        f"hespas-validate calibrate --hardware {quote(device)} --table {quote(str(out))} --out FILE.toml"
    )


@app.command("system")
@command(without=("max_input_bytes", "loudness"))
def hardware_system(
    call: Call, *, name: _SystemName, devices: _Devices = None, target: _Target = None
) -> None:
    """Print a system as a TOML file with its sources, or write it as configuration files of ASTRA-sim.

    hespas hardware system dgx-h100 --devices 64 --to astra-sim configs/
    """
    format_name, folder = target or ("", None)
    if target and format_name != _ASTRA_SIM:
        raise UsageError(
            f"--to: unknown format '{clipped(format_name)}', expected {_ASTRA_SIM}",
            hint="--to astra-sim DIR",
        )
    if folder:
        report_folder(str(folder))
    writes = {"--to": [folder]} if folder else {}
    check_reports({"--json": call.json_file}, call.files("reads") | writes, overwrite=call.overwrite)
    from hespas import api
    from hespas.hardware import system_to_toml

    system = api.load_system(name, devices, diagnostics=call.diagnostics)
    written = system.write_astra_sim(folder, overwrite=call.overwrite) if folder else []
    if call.json_file:
        call.write_json(system.document())
    report_diagnostics(call.diagnostics, name)
    for note in call.diagnostics if folder else ():
        emit(f"note: {note.location}: {note.message} [{note.code}]")
    if folder:
        emit(f"{name} -> {', '.join(map(str, written))}")
    elif not call.json_file:
        emit(system_to_toml(system.system).rstrip("\n").split("\n"))
