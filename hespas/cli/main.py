"""``hespas``: everything besides converting and validating."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hespas.cli.reports import check_reports
from hespas.cli.session import (
    DebugOption,
    ProgressOption,
    command_line,
    emit,
    progress_bar,
    say_diagnostics,
    version,
)
from hespas.cli.simulate import simulate
from hespas.cli.text import bytes_text, count_text, counted, flops_text, table_text, time_text
from hespas.cli.view import view

if TYPE_CHECKING:
    from hespas.api import NodeEstimates
    from hespas.hardware import Device

__all__ = [
    "app",
    "common",
    "estimate",
    "hardware_app",
    "hardware_list",
    "hardware_measure",
    "hardware_show",
    "main",
]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Look at workloads and devices, estimate and simulate. See also hespas-convert and hespas-validate.",
)
hardware_app = typer.Typer(no_args_is_help=True, help="List, show and measure devices.")
app.add_typer(hardware_app, name="hardware")
app.command()(view)
app.command()(simulate)


@app.callback()
def common(
    show_version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options that stand before any command."""


@app.command()
def estimate(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Any readable workload.")],
    hardware: Annotated[str, typer.Option(metavar="NAME|FILE", help="A device: see 'hespas hardware list'.")],
    estimator: Annotated[
        str, typer.Option(metavar="NAME", help="Which estimator says how long.")
    ] = "roofline",
    source_format: Annotated[
        str, typer.Option("--from", metavar="FORMAT", help="Read SRC as this format.")
    ] = "",
    num_devices: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of ranks where SRC does not say.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.csv", help="Write one row per operation.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the sums as JSON.")
    ] = None,
    progress: Annotated[bool | None, ProgressOption] = None,
    debug: Annotated[bool, DebugOption] = False,
) -> None:
    """Time per operation class of one step on a device."""
    from hespas.graph.diagnostics import Diagnostics

    diagnostics = Diagnostics()
    with command_line(debug, diagnostics, str(source)):
        from hespas import api
        from hespas.converters import ReadOptions

        check_reports({"--out": out, "--json": json_file}, {"SRC": [source]})
        with progress_bar("estimating", progress) as callback:
            options = ReadOptions(num_devices=num_devices, progress=callback)
            value = api.read(source, format=source_format or None, options=options, diagnostics=diagnostics)
            done = api.estimate(
                value, hardware, estimator=estimator, diagnostics=diagnostics, progress=callback
            )
        if out:
            api.write_estimates_csv(done, out)
        if json_file:
            api.write_json(
                api.estimate_document(done, str(source), hardware, estimator, diagnostics), json_file
            )
        say_diagnostics(diagnostics, source)
        _show_estimates(done)


def _show_estimates(done: NodeEstimates) -> None:
    from hespas.api import class_totals, total_duration_ns

    for index, (graph, estimated) in enumerate(zip(done.workload.classes, done.estimates, strict=True)):
        ranks = int((done.workload.rank_class == index).sum())
        rows = class_totals(graph, estimated)
        total_ns = total_duration_ns(rows)
        emit(
            f"{graph.name}: {counted(ranks, 'rank')}, "
            f"{time_text(total_ns)} of work per rank and step on {estimated.hardware} "
            f"({', '.join(estimated.estimators)}; overlap not considered)"
        )
        lines = [
            (
                row.op_class,
                count_text(row.nodes),
                flops_text(row.flops),
                bytes_text(row.bytes_moved),
                time_text(row.duration_ns),
                f"{row.duration_ns / total_ns:.1%}"
                if row.duration_ns == row.duration_ns and total_ns
                else "-",
                count_text(row.unknown) if row.unknown else "",
            )
            for row in rows
        ]
        emit(table_text(("class", "operations", "FLOPs", "bytes", "time", "share", "unknown"), lines))


@hardware_app.command("list")
def hardware_list(debug: Annotated[bool, DebugOption] = False) -> None:
    """The devices that ship with the package."""
    with command_line(debug):
        from hespas.hardware import device_names, load_device

        devices = [load_device(name) for name in device_names()]
        lines = [
            (
                device.name,
                device.vendor,
                _best_peak(device),
                f"{_main_memory(device)[0] / 1e9:,.0f} GB/s",
                f"{_main_memory(device)[1] / 1e9:,.0f} GB",
                ", ".join(device.aliases[:3]),
            )
            for device in devices
        ]
        emit(
            table_text(
                ("device", "vendor", "dense bf16/f16", "memory", "capacity", "also"), lines, left=(0, 1, 5)
            )
        )


def _best_peak(device: Device) -> str:
    rates = [
        peak.flops_per_s for peak in device.peaks if peak.dtype in {"bf16", "f16"} and peak.unit == "matrix"
    ]
    return f"{max(rates) / 1e12:,.1f} TFLOP/s" if rates else "-"


def _main_memory(device: Device) -> tuple[float, int]:
    memory = next(memory for memory in device.memories if memory.level == "main")
    return memory.bandwidth_bytes_per_s, memory.capacity_bytes


@hardware_app.command("show")
def hardware_show(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A device or a hardware file.")],
    debug: Annotated[bool, DebugOption] = False,
) -> None:
    """A device as the TOML file that describes it, sources included."""
    with command_line(debug):
        from hespas.hardware import device_to_toml, load_device

        emit(device_to_toml(load_device(name)).rstrip("\n"))


@hardware_app.command("measure")
def hardware_measure(
    out: Annotated[Path, typer.Option(metavar="FILE.toml", help="Where to write the hardware file.")],
    name: Annotated[str, typer.Option(help="The name of the device in the file.")] = "this-cpu",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE where it exists.")] = False,
    debug: Annotated[bool, DebugOption] = False,
) -> None:
    """Measure this machine's CPU (some ten seconds) and write it as a hardware file."""
    with command_line(debug):
        from hespas.converters.output import check_destination
        from hespas.hardware import write_device
        from hespas.hardware.measure import measure_cpu

        check_destination(out, overwrite=overwrite)
        device = measure_cpu(name=name)
        write_device(device, out, overwrite=overwrite)
        emit(f"{out}: {device.description}")


def main() -> None:
    """Entry point."""
    app()
