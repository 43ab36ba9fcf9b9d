"""``hespas estimate``: how long the operations of a workload or of a table take on a device."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hespas.api.preparation import STEP_ESTIMATOR, Granularity
from hespas.cli import options
from hespas.cli.session import (
    check_reports,
    command_line,
    emit,
    estimator_files,
    hardware_files,
    progress_bar,
    say_diagnostics,
)
from hespas.cli.text import (
    bytes_text,
    count_text,
    counted,
    energy_text,
    flops_text,
    mixed_lines,
    step_lines,
    table_text,
    time_text,
)
from hespas.cli.what_if import WhatIf
from hespas.graph.errors import UsageError

if TYPE_CHECKING:
    from hespas.api import ClassTotals, NodeEstimates, TableEstimates
    from hespas.estimators.rates import StepEnergy
    from hespas.graph import Diagnostics

__all__ = ["estimate"]


def estimate(
    context: typer.Context,
    source: Annotated[Path | None, typer.Argument(metavar="[SRC]", help="Any readable workload.")] = None,
    *,
    hardware: Annotated[
        list[str],
        options.hardware_option("A device: see 'hespas hardware list'; repeated: a column each."),
    ],
    table: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A table of operations (CSV or Parquet) instead of SRC.",
            rich_help_panel=options.INPUT,
        ),
    ] = None,
    estimator: options.Estimators = None,
    allow_programs: options.AllowPrograms = False,
    granularity: options.Granularity = None,
    array: Annotated[
        str,
        typer.Option(
            metavar="RxC",
            help="Shape of a systolic array, instead of the device's.",
            rich_help_panel=options.DEVICE,
        ),
    ] = "",
    dataflow: Annotated[
        str,
        typer.Option(
            metavar="os|ws|is",
            help="What stays in the array, instead of the device's.",
            rich_help_panel=options.DEVICE,
        ),
    ] = "",
    source_format: options.SourceFormat = "",
    num_devices: options.NumDevices = None,
    num_replicas: options.NumReplicas = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv|-", help="Write one row per operation.", rich_help_panel=options.OUTPUT
        ),
    ] = None,
    json_file: options.Json = None,
    overwrite: options.Overwrite = False,
    progress: options.Progress = None,
    default_dtype: options.DefaultDtype = "",
    dim: options.Dim = None,
    comm_groups: options.CommGroups = None,
    run_time_unit: options.RunTimeUnit = "",
    max_input_bytes: options.MaxInputBytes = None,
    loudness: options.Loudness = None,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """Time per operation class of one step on a device, or of each operation of a table."""
    from hespas.graph import Diagnostics

    diagnostics = Diagnostics()
    several = {"hardware": hardware, "estimator": estimator or [STEP_ESTIMATOR]}
    if source is not None and table is None:
        source = WhatIf(None, None, 1, None, json_file, overwrite, progress, debug).run(
            source, context, several
        )
        if source is None:
            return
    device, named = hardware[0], several["estimator"][0]
    reads, documents = [source, table, device, named], [out, json_file]
    with command_line(debug, diagnostics, str(table or source), documents=documents, reads=reads):
        if any(len(values) > 1 for values in several.values()):
            raise UsageError("a table is estimated on one device, by one estimator", hint="name each once")
        model = _with_array(named, array, dataflow)
        asked = _Asked(device, model, out, json_file, overwrite, diagnostics)
        if table is not None:
            _refuse_with_table(
                {
                    "SRC": source,
                    "--from": source_format,
                    "--num-devices": num_devices,
                    "--num-replicas": num_replicas,
                    "--granularity": granularity,
                }
            )
            _estimate_table(table, asked)
            return
        if source is None:
            raise UsageError("nothing to estimate", hint="name a workload (SRC) or a table (--table FILE)")
        reading = (source_format or None, num_devices, num_replicas)
        _estimate_program(source, reading, granularity, asked, progress)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked of any input, and where it is told."""

    hardware: str
    estimator: str
    out: Path | None
    json_file: Path | None
    overwrite: bool
    diagnostics: Diagnostics

    def check_reports(self, role: str, source: Path) -> None:
        """Raise where a document cannot be written, or would replace the input."""
        reads = {
            role: [source],
            "--hardware": hardware_files(self.hardware),
            "--estimator": estimator_files(self.estimator),
        }
        check_reports({"--out": self.out, "--json": self.json_file}, reads, overwrite=self.overwrite)


def _with_array(estimator: str, array: str, dataflow: str) -> str:
    """The estimator's spelling with the options of an array. Raises ``UsageError`` where it has none."""
    given = {"array": array, "dataflow": dataflow}
    asked = ",".join(f"{name}={text}" for name, text in given.items() if text)
    if not asked:
        return estimator
    name, _, stated = estimator.partition(":")
    if name != "systolic":
        listed = " and ".join(f"--{name}" for name, text in given.items() if text)
        raise UsageError(f"{listed}: estimator {name!r} has no such option", hint="add --estimator systolic")
    return f"{name}:{','.join(part for part in (stated, asked) if part)}"


def _refuse_with_table(given: dict[str, Path | str | int | None]) -> None:
    for option, value in given.items():
        if value:
            raise UsageError(f"{option} and --table exclude each other", hint="give one of them")


def _estimate_program(
    source: Path,
    reading: tuple[str | None, int | None, int | None],
    granularity: Granularity | None,
    asked: _Asked,
    progress: bool | None,
) -> None:
    from hespas import api
    from hespas.converters import ReadOptions

    asked.check_reports("SRC", source)
    diagnostics = asked.diagnostics
    source_format, num_devices, num_replicas = reading
    with progress_bar("estimating", progress) as callback:
        done = api.estimate(
            source,
            asked.hardware,
            estimator=asked.estimator,
            granularity=granularity,
            format=source_format,
            options=ReadOptions(num_devices=num_devices, num_replicas=num_replicas, progress=callback),
            diagnostics=diagnostics,
            progress=callback,
        )
    step = api.step_of(done)
    if asked.out:
        api.write_estimates_csv(done, asked.out, overwrite=asked.overwrite)
    if asked.json_file:
        document = api.estimate_document(done, step)
        api.write_json(document, asked.json_file, overwrite=asked.overwrite)
    say_diagnostics(diagnostics, source)
    if step is not None:
        emit((*step_lines(step, asked.hardware), *mixed_lines(step)))
    _show_estimates(done)


def _estimate_table(table: Path, asked: _Asked) -> None:
    from hespas import api

    asked.check_reports("--table", table)
    diagnostics = asked.diagnostics
    done = api.estimate_table(table, asked.hardware, estimator=asked.estimator, diagnostics=diagnostics)
    if asked.out:
        api.write_table_estimates(done, asked.out, diagnostics, overwrite=asked.overwrite)
    if asked.json_file:
        api.write_json(done.to_json(), asked.json_file, overwrite=asked.overwrite)
    say_diagnostics(diagnostics, table)
    _show_table(done)


def _least(total_ns: float, unknown: float) -> str:
    """What stands before a sum that is not of all operations."""
    return "at least " if unknown and not isnan(total_ns) else ""


def _show_table(done: TableEstimates) -> None:
    rows = done.totals
    total_ns = sum(row.duration_ns for row in rows if row.duration_ns == row.duration_ns)
    unknown = sum(row.unknown for row in rows)
    total_ns = total_ns if sum(row.operations for row in rows) > unknown else nan
    emit(
        f"{done.path.name}: {counted(len(done.prediction.duration_ns), 'operation')}, "
        f"{_least(total_ns, unknown)}{time_text(total_ns)} on {done.hardware} one after another "
        f"({', '.join(done.prediction.models)})"
    )
    has_cycles = done.cycles is not None
    lines = [
        (
            row.kind,
            row.dtype or "-",
            count_text(row.operations),
            flops_text(row.flops),
            bytes_text(row.bytes_moved),
            time_text(row.duration_ns),
            *((count_text(row.cycles) if row.cycles == row.cycles else "-",) if has_cycles else ()),
            ", ".join(row.estimators) or "-",
            count_text(row.unknown) if row.unknown else "",
        )
        for row in rows
    ]
    heads = ["kind", "type", "operations", "FLOPs", "bytes", "time", "estimator", "unknown"]
    if has_cycles:
        heads.insert(6, "cycles")
    emit(table_text(heads, lines, left=(0, 1, len(heads) - 2)))


def _show_estimates(done: NodeEstimates) -> None:
    from hespas.api import class_totals, total_duration_ns

    for index, (graph, estimated) in enumerate(zip(done.workload.classes, done.estimates, strict=True)):
        ranks = int((done.workload.rank_class == index).sum())
        rows = class_totals(graph, estimated)
        total_ns = total_duration_ns(rows)
        least = _least(total_ns, sum(row.unknown for row in rows))
        contributing = {part.estimator for row in rows for part in row.estimators}
        names = [name for name in estimated.estimators if name in contributing] or estimated.estimators
        emit(
            f"{graph.name}: {counted(ranks, 'rank')}, "
            f"{least}{time_text(total_ns)} of work per rank and step on {estimated.hardware}, one operation "
            f"after another ({', '.join(names)})"
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
                *((_estimators_text(row),) if len(contributing) > 1 else ()),
                count_text(row.unknown) if row.unknown else "",
            )
            for row in rows
        ]
        heads = ["class", "operations", "FLOPs", "bytes", "time", "share", "unknown"]
        if len(contributing) > 1:
            heads.insert(6, "estimator")
        emit(table_text(heads, lines, left=(0, 6) if len(contributing) > 1 else (0,)))
        for energy in done.energies[index : index + 1]:
            _show_energy(energy)


def _estimators_text(row: ClassTotals) -> str:
    """Each estimator with its share of the class's time, the largest first."""
    known_ns = sum(part.duration_ns for part in row.estimators)
    parts = sorted(row.estimators, key=lambda part: -part.duration_ns)
    if len(parts) == 1:
        return parts[0].estimator
    return ", ".join(f"{part.estimator} {part.duration_ns / known_ns:.1%}" for part in parts) or "-"


def _show_energy(energy: StepEnergy) -> None:
    """What the device file has figures for; nothing where it has none."""
    told: list[str] = []
    if energy.at_least_j == energy.at_least_j:
        told.append(f"{energy_text(energy.at_least_j)} or more (arithmetic and main memory)")
    if energy.at_tdp_j == energy.at_tdp_j:
        told.append(f"{energy_text(energy.at_tdp_j)} at {energy.tdp_w:g} W")
    if told:
        emit(f"energy: {', '.join(told)}")
