"""``hespas``: everything besides converting and validating."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hespas.cli import options
from hespas.cli.analyze import analyze
from hespas.cli.capture import capture
from hespas.cli.estimate import estimate
from hespas.cli.generate import app as generate_app
from hespas.cli.serve import serve
from hespas.cli.session import command_line, emit, list_file, point_elsewhere, say_diagnostics
from hespas.cli.session import run as run_app
from hespas.cli.simulate import simulate
from hespas.cli.systems import hardware_system
from hespas.cli.text import flagged, table_text
from hespas.cli.view import view
from hespas.graph.diagnostics import Diagnostics

if TYPE_CHECKING:
    from hespas.hardware import Device, System

__all__ = [
    "app",
    "common",
    "estimators",
    "hardware_app",
    "hardware_list",
    "hardware_measure",
    "hardware_show",
    "main",
]

_ROOM_FOR_ALIASES = 32

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Look at workloads and devices, estimate, simulate, analyse what ran. "
    "See also hespas-convert and hespas-validate.",
)
hardware_app = typer.Typer(
    no_args_is_help=True, help="List, show and measure devices; show systems, write them for ASTRA-sim."
)
app.add_typer(hardware_app, name="hardware")
app.add_typer(generate_app, name="generate")
app.command()(estimate)


@app.command()
def estimators(
    json_file: options.ListFile = None,
    *,
    as_json: options.AsJson = False,
    overwrite: options.Overwrite = False,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """The estimators: what each is, whether it can be used here, and what to install."""
    with command_line(debug, writes=[json_file]):
        place = list_file(json_file, as_json=as_json, overwrite=overwrite)
        from hespas.estimators.registry import list_estimators

        rows = list_estimators()
        if place:
            from hespas import api

            api.write_json(api.estimators_document(rows), place, overwrite=overwrite)
            return
        lines = [(row.name, "yes" if row.available else "no", row.what, flagged(row.detail)) for row in rows]
        emit(table_text(("estimator", "usable", "what", "detail"), lines, left=(0, 1, 2, 3)))
        for row in rows:
            if row.install and not row.available:
                emit(f"{row.name}: {flagged(row.install)}")


app.command()(view)
app.command()(simulate)
app.command()(analyze)
app.command()(capture)
app.command()(serve)
point_elsewhere(
    app,
    "hespas",
    {"convert": "hespas-convert"}
    | {name: f"hespas-validate {name}" for name in ("check", "roundtrip", "accuracy", "calibrate", "compare")}
    | {"validate": "hespas-validate"},
)


@app.callback()
def common(
    show_version: options.Version = False,
) -> None:
    """Options that stand before any command."""


@hardware_app.command("list")
def hardware_list(
    json_file: options.ListFile = None,
    *,
    as_json: options.AsJson = False,
    overwrite: options.Overwrite = False,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """The devices, and the systems of them, that ship with the package."""
    with command_line(debug, writes=[json_file]):
        place = list_file(json_file, as_json=as_json, overwrite=overwrite)
        from hespas.hardware import device_names, load_device, load_system, system_names

        devices = [load_device(name) for name in device_names()]
        systems = [load_system(name) for name in system_names()]
        if place:
            from hespas import api

            api.write_json(api.devices_document(devices, systems), place, overwrite=overwrite)
            return
        lines = [
            (
                device.name,
                device.vendor,
                _best_peak(device),
                f"{_main_memory(device)[0] / 1e9:,.0f} GB/s",
                f"{_main_memory(device)[1] / 1e9:,.0f} GB",
                _aliases(device),
            )
            for device in devices
        ]
        emit(
            table_text(
                ("device", "vendor", "dense bf16/f16", "memory", "capacity", "also"), lines, left=(0, 1, 5)
            )
        )
        emit("")
        shown = [(each.name, each.device or "any", _most(each), _dimensions(each)) for each in systems]
        emit(table_text(("system", "device", "devices", "dimensions, inner first"), shown, left=(0, 1, 3)))


def _most(system: System) -> str:
    return f"up to {system.most:,}" if system.most > 0 else "any"


def _dimensions(system: System) -> str:
    """Each with what a device sends into it."""
    return ", ".join(
        f"{each.name} {each.bandwidth_bytes_per_s / 1e9:,.4g} GB/s" for each in system.dimensions
    )


def _aliases(device: Device) -> str:
    """As many other names as a line has room for."""
    shown = ""
    for alias in device.aliases:
        longer = f"{shown}, {alias}" if shown else alias
        if len(longer) > _ROOM_FOR_ALIASES:
            break
        shown = longer
    return shown


def _best_peak(device: Device) -> str:
    """With accumulators of float32, as frameworks ask for: GeForce has a higher rate without."""
    rates = [
        peak.flops_per_s
        for peak in device.peaks
        if peak.dtype in {"bf16", "f16"} and peak.unit == "matrix" and peak.accumulator != "f16"
    ]
    return f"{max(rates) / 1e12:,.1f} TFLOP/s" if rates else "-"


def _main_memory(device: Device) -> tuple[float, int]:
    memory = next(memory for memory in device.memories if memory.level == "main")
    return memory.bandwidth_bytes_per_s, memory.capacity_bytes


@hardware_app.command("show")
def hardware_show(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A device or a hardware file.")],
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """A device as the TOML file that describes it, sources included."""
    with command_line(debug, source=name, reads=[name]):
        from hespas.hardware import device_to_toml, load_device

        device = load_device(name)
        folder = Path(name).parent if device.learned_models else None  # only a user's own file names any
        emit(device_to_toml(device, folder=folder).rstrip("\n").split("\n"))


@hardware_app.command("measure")
def hardware_measure(
    out: Annotated[Path, typer.Option(metavar="FILE.toml", help="Where to write the hardware file.")],
    name: Annotated[str, typer.Option(help="The name of the device in the file.")] = "this-cpu",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE where it exists.")] = False,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """Measure this machine's CPU (some ten seconds) and write it as a hardware file."""
    with command_line(debug, writes=[out]):
        from hespas.files.output import check_destination
        from hespas.hardware import write_device
        from hespas.hardware.measure import measure_cpu

        check_destination(out, overwrite=overwrite)
        found = Diagnostics()
        device = measure_cpu(name=name, diagnostics=found)
        write_device(device, out, overwrite=overwrite)
        say_diagnostics(found, out)
        emit(f"{out}: {device.description}")


hardware_app.command("system")(hardware_system)


def main() -> None:
    """Entry point."""
    run_app(app)
