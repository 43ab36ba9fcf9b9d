"""``hespas estimate``: durations of the operations of a workload or a table on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hespas.api.lowering import STEP_ESTIMATOR, Granularity
from hespas.cli import options
from hespas.cli.destinations import check_reports, estimator_files, hardware_files, list_file
from hespas.cli.session import command_line
from hespas.cli.terminal import emit, progress_bar, report_diagnostics
from hespas.cli.text import flagged, mixed_lines, op_class_text, step_lines
from hespas.cli.what_if import WhatIf
from hespas.graph.errors import UsageError
from hespas.report.tables import table_text
from hespas.report.texts import bytes_text, count_text, counted, energy_text, flops_text, time_text

if TYPE_CHECKING:
    from hespas.api import ClassTotals
    from hespas.graph import Diagnostics

__all__ = ["estimate", "estimators"]


def estimate(
    context: typer.Context,
    source: Annotated[
        Path | None, typer.Argument(metavar="[SRC]", help="Workload in any readable format.")
    ] = None,
    *,
    hardware: Annotated[
        list[str],
        options.hardware_option(
            "Estimate durations on this device (see 'hespas hardware list'); repeat to compare."
        ),
    ],
    table: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Read a table of operations (CSV or Parquet) instead of SRC.",
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
            help="Set the shape of the systolic array (default: the device's).",
            rich_help_panel=options.DEVICE,
        ),
    ] = "",
    dataflow: Annotated[
        str,
        typer.Option(
            metavar="os|ws|is",
            help="Set the dataflow: output-, weight- or input-stationary (default: the device's).",
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
    """Estimate the time of each operation class of a step, or of each operation of a table, on a device."""
    from hespas.graph import Diagnostics

    diagnostics = Diagnostics()
    several = {"hardware": hardware, "estimator": estimator or [STEP_ESTIMATOR]}
    if source is not None and table is None:
        source = WhatIf(None, None, 1, None, json_file, overwrite, progress, debug).run(
            source, context, several
        )
        if source is None:
            return
    device, model = hardware[0], several["estimator"][0]
    reads, documents = [source, table, device, model], [out, json_file]
    with command_line(debug, diagnostics, str(table or source), documents=documents, reads=reads):
        if any(len(values) > 1 for values in several.values()):
            raise UsageError("--table takes one --hardware and one --estimator", hint="give each once")
        if array or dataflow:
            parts = {"array": array, "dataflow": dataflow}
            model = _with_array(model, {name: value for name, value in parts.items() if value})
        settings = _EstimateOptions(device, model, out, json_file, overwrite, diagnostics)
        if table is not None:
            excluded = {
                "SRC": source,
                "--from": source_format,
                "--num-devices": num_devices,
                "--num-replicas": num_replicas,
                "--granularity": granularity,
            }
            for option, value in excluded.items():
                if value:
                    raise UsageError(f"{option} and --table exclude each other", hint="give one of them")
            _estimate_table(table, settings)
            return
        if source is None:
            raise UsageError(
                "SRC or --table is required", hint="name a workload (SRC) or a table (--table FILE)"
            )
        reading = (source_format or None, num_devices, num_replicas)
        _estimate_program(source, reading, granularity, settings, progress)


@dataclass(frozen=True, slots=True)
class _EstimateOptions:
    """Options of an estimate that do not depend on the kind of input."""

    hardware: str
    estimator: str
    out: Path | None
    json_file: Path | None
    overwrite: bool
    diagnostics: Diagnostics

    def check_reports(self, role: str, source: Path) -> None:
        """Raise an error for a document that cannot be written or would replace the input."""
        reads = {
            role: [source],
            "--hardware": hardware_files(self.hardware),
            "--estimator": estimator_files(self.estimator),
        }
        check_reports({"--out": self.out, "--json": self.json_file}, reads, overwrite=self.overwrite)


def _with_array(estimator: str, parts: Mapping[str, str]) -> str:
    """Add options of a systolic array to the spelling of an estimator. Raises ``UsageError`` if the estimator
    has no array.
    """
    name, _, given = estimator.partition(":")
    if name != "systolic":
        listed = " and ".join(f"--{option}" for option in parts)
        raise UsageError(f"{listed}: estimator {name!r} has no such option", hint="add --estimator systolic")
    added = [f"{option}={value}" for option, value in parts.items()]
    return f"{name}:{','.join([given, *added] if given else added)}"


def _estimate_table(table: Path, settings: _EstimateOptions) -> None:
    """Estimate the operations of a table, write the documents and print the totals by kind."""
    from hespas import api

    settings.check_reports("--table", table)
    done = api.estimate_table(
        table, settings.hardware, estimator=settings.estimator, diagnostics=settings.diagnostics
    )
    if settings.out:
        api.write_table_estimates(done, settings.out, settings.diagnostics, overwrite=settings.overwrite)
    if settings.json_file:
        api.write_json(done.to_json(), settings.json_file, overwrite=settings.overwrite)
    report_diagnostics(settings.diagnostics, table)
    rows = done.totals
    total_ns = sum(row.duration_ns for row in rows if row.duration_ns == row.duration_ns)
    unknown = sum(row.unknown for row in rows)
    total_ns = total_ns if sum(row.operations for row in rows) > unknown else nan
    emit(
        f"{done.path.name}: {counted(len(done.prediction.duration_ns), 'operation')}, "
        f"{_at_least(total_ns, unknown)}{time_text(total_ns)} on {done.hardware} in sequence "
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


def _estimate_program(
    source: Path,
    reading: tuple[str | None, int | None, int | None],
    granularity: Granularity | None,
    settings: _EstimateOptions,
    progress: bool | None,
) -> None:
    from hespas import api
    from hespas.converters import ReadOptions

    settings.check_reports("SRC", source)
    diagnostics = settings.diagnostics
    source_format, num_devices, num_replicas = reading
    with progress_bar("estimating", progress) as callback:
        done = api.estimate(
            source,
            settings.hardware,
            estimator=settings.estimator,
            granularity=granularity,
            format=source_format,
            options=ReadOptions(num_devices=num_devices, num_replicas=num_replicas, progress=callback),
            diagnostics=diagnostics,
            progress=callback,
        )
    step = api.simulated_step(done)
    if settings.out:
        api.write_estimates_csv(done, settings.out, overwrite=settings.overwrite)
    if settings.json_file:
        document = api.estimate_document(done, step)
        api.write_json(document, settings.json_file, overwrite=settings.overwrite)
    report_diagnostics(diagnostics, source)
    if step is not None:
        emit((*step_lines(step, settings.hardware), *mixed_lines(step)))
    from hespas.api import op_class_summary, total_duration_ns

    for index, (graph, estimated) in enumerate(zip(done.workload.classes, done.estimates, strict=True)):
        ranks = int((done.workload.rank_class == index).sum())
        rows = op_class_summary(graph, estimated)
        total_ns = total_duration_ns(rows)
        at_least = _at_least(total_ns, sum(row.unknown for row in rows))
        contributing = {part.estimator for row in rows for part in row.estimators}
        names = [name for name in estimated.estimators if name in contributing] or estimated.estimators
        emit(
            f"{graph.name}: {counted(ranks, 'rank')}, "
            f"{at_least}{time_text(total_ns)} of work per rank and step on {estimated.hardware}, in sequence "
            f"({', '.join(names)})"
        )
        lines = [
            (
                op_class_text(row.op_class),
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
            figures: list[str] = []
            if not isnan(energy.at_least_j):
                figures.append(f"{energy_text(energy.at_least_j)} or more (arithmetic and main memory)")
            if not isnan(energy.at_tdp_j):
                figures.append(f"{energy_text(energy.at_tdp_j)} at {energy.tdp_w:g} W")
            if figures:
                emit(f"energy: {', '.join(figures)}")


def _at_least(total_ns: float, unknown: float) -> str:
    """Return the prefix of a sum that lacks operations of unknown duration."""
    return "at least " if unknown and not isnan(total_ns) else ""


def _estimators_text(row: ClassTotals) -> str:
    """Return each estimator with its share of the class's time, largest first."""
    known_ns = sum(part.duration_ns for part in row.estimators)
    parts = sorted(row.estimators, key=lambda part: -part.duration_ns)
    if len(parts) == 1:
        return parts[0].estimator
    return ", ".join(f"{part.estimator} {part.duration_ns / known_ns:.1%}" for part in parts) or "-"


def estimators(
    json_file: options.ListFile = None,
    *,
    as_json: options.AsJson = False,
    overwrite: options.Overwrite = False,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """List the estimators, their availability on this machine and the packages that they need."""
    with command_line(debug, writes=[json_file]):
        destination = list_file(json_file, as_json=as_json, overwrite=overwrite)
        from hespas.estimators.registry import list_estimators

        rows = list_estimators()
        if destination:
            from hespas import api

            api.write_json(api.estimators_document(rows), destination, overwrite=overwrite)
            return
        lines = [(row.name, "yes" if row.available else "no", row.what, flagged(row.detail)) for row in rows]
        emit(table_text(("estimator", "available", "description", "detail"), lines, left=(0, 1, 2, 3)))
        for row in rows:
            if row.install and not row.available:
                emit(f"{row.name}: {flagged(row.install)}")
