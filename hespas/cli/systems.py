"""``hespas hardware system``: a system as the file that describes it, or as ASTRA-sim's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hespas.cli import options
from hespas.cli.session import check_reports, command_line, emit, hardware_files, say_diagnostics
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import UsageError, clipped

__all__ = ["devices_of", "hardware_system"]

_ASTRA_SIM = "astra-sim"
_MOST_DIGITS = 9


def hardware_system(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE", help="A system or a system file.", autocompletion=options.system_names
        ),
    ],
    devices: Annotated[
        str,
        typer.Option(metavar="N|AxB", help="How many devices, or the sizes of its dimensions, inner first."),
    ] = "",
    target: Annotated[
        tuple[str, Path] | None,
        typer.Option(
            "--to",
            metavar="astra-sim DIR",
            help="Write system.json, network.yml and remote_memory.json into a folder.",
        ),
    ] = None,
    json_file: options.Json = None,
    overwrite: options.Overwrite = False,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """A system as the TOML file that describes it, sources included; or as ASTRA-sim's configuration files.

    hespas hardware system dgx-h100 --devices 64 --to astra-sim configs/
    """
    format_name, folder = target or ("", None)
    diagnostics = Diagnostics()
    with command_line(
        debug, diagnostics, name, documents=[json_file], reads=[name], writes=[folder] if folder else []
    ):
        if target and format_name != _ASTRA_SIM:
            raise UsageError(f"unknown format '{clipped(format_name)}'", hint="--to astra-sim DIR")
        taken = {"a system file": hardware_files(name), "--to": [folder] if folder else []}
        check_reports({"--json": json_file}, taken, overwrite=overwrite)
        from hespas import api
        from hespas.hardware import system_to_toml

        found = api.system(name, devices_of(devices), diagnostics=diagnostics)
        written = found.write_astra_sim(folder, overwrite=overwrite) if folder else []
        if json_file:
            api.write_json(found.document(), json_file, overwrite=overwrite)
        say_diagnostics(diagnostics, name)
        for note in diagnostics if folder else ():
            emit(f"note: {note.location}: {note.message} [{note.code}]")
        if folder:
            emit(f"{name} -> {', '.join(map(str, written))}")
        elif not json_file:
            emit(system_to_toml(found.system).rstrip("\n").split("\n"))


def devices_of(text: str) -> int | tuple[int, ...] | None:
    """What ``--devices`` says: a number, or sizes as in 4x4x8; None where it says nothing.

    Raises ``UsageError`` for anything else.
    """
    if not text:
        return None
    parts = text.split("x")
    if not all(part.isascii() and part.isdigit() and len(part) <= _MOST_DIGITS for part in parts):
        raise UsageError(f"--devices {clipped(text)} is no number", hint="--devices 64, or --devices 4x4x8")
    sizes = tuple(map(int, parts))
    return sizes[0] if len(sizes) == 1 else sizes
