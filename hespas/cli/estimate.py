"""``hespas estimate``: durations of the operations of a workload or a table on a device."""

from __future__ import annotations

from dataclasses import replace
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hespas.api.estimation import estimate as estimate_program
from hespas.api.table_estimation import estimate_table
from hespas.cli.command import LISTING, Call, command
from hespas.cli.destinations import AsJson, ListFile, list_file
from hespas.cli.terminal import emit, flagged, mixed_lines, op_class_text, report_diagnostics, step_lines
from hespas.graph.errors import UsageError
from hespas.graph.hints import OUTPUT, Option
from hespas.report.tables import columns, table_from_rows
from hespas.report.texts import counted, energy_text, time_text

if TYPE_CHECKING:
    from hespas.api import ClassTotals
    from hespas.estimators.rates import StepEnergy

__all__ = ["estimate", "estimators"]

_Rows = Annotated[
    Path | None,
    Option(
        "Write one row per operation.", metavar="FILE.csv|FILE.parquet|-", panel=OUTPUT, access="document"
    ),
]

_ModelExplorer = Annotated[
    Path | None,
    Option(
        "Write the time in us of each operation of a StableHLO program as node data for Model Explorer.",
        metavar="FILE.json|-",
        panel=OUTPUT,
        access="document",
    ),
]


@command(estimate_program, estimate_table, progress="estimating")
def estimate(call: Call, *, out: _Rows = None, model_explorer: _ModelExplorer = None) -> None:
    """Estimate the time of each operation class of a step, or of each operation of a table, on a device."""
    columns = call.columns()
    if call["path"] is not None:
        if columns:
            raise UsageError("--table takes one --hardware and one --estimator", hint="give each once")
        for name in ("source", "format", "num_devices", "num_replicas", "granularity"):
            if call.texts[name]:
                flag = call.options[name].flag
                raise UsageError(f"{flag} and --table exclude each other", hint="give one of them")
        if model_explorer:
            raise UsageError("--model-explorer requires a program (SRC)", hint="leave out --table")
        _estimate_table(call, out)
    elif call["source"] is None:
        raise UsageError("SRC or --table is required", hint="name a workload (SRC) or a table (--table FILE)")
    elif columns:
        from hespas.cli.what_if import print_columns

        print_columns(call, columns)
    else:
        _estimate_program(call, out, model_explorer)


def _estimate_table(call: Call, out: Path | None) -> None:
    """Estimate the operations of a table, write the documents and print the totals by kind."""
    from hespas import api

    done = call.run(api.estimate_table)
    if out:
        api.write_table_estimates(done, out, call.diagnostics, overwrite=call.overwrite)
    call.write_json(done.to_json())
    report_diagnostics(call.diagnostics, done.path)
    rows = done.totals
    total_ns = sum(row.duration_ns for row in rows if row.duration_ns == row.duration_ns)
    unknown = sum(row.unknown for row in rows)
    total_ns = total_ns if sum(row.operations for row in rows) > unknown else nan
    emit(
        f"{done.path.name}: {counted(len(done.prediction.duration_ns), 'operation')}, "
        f"{_at_least(total_ns, unknown)}{time_text(total_ns)} on {done.hardware} in sequence "
        f"({', '.join(done.prediction.models)})"
    )
    if done.basis_text:
        emit(f"basis: {done.basis_text}")
    has_cycles = done.cycles is not None
    lines = [
        (
            row.kind,
            row.dtype or "-",
            row.operations,
            row.flops,
            row.bytes_moved,
            row.duration_ns,
            *((row.cycles,) if has_cycles else ()),
            ", ".join(row.estimators) or "-",
            row.unknown or None,
        )
        for row in rows
    ]
    header = (
        *columns("text", "kind", "type"),
        *columns("count", "operations"),
        *columns("flops", "FLOPs"),
        *columns("bytes", "bytes"),
        *columns("time", "time"),
        *columns("count", *(("cycles",) if has_cycles else ()), unknown="-"),
        *columns("text", "estimator"),
        *columns("count", "unknown", unknown=""),
    )
    emit(table_from_rows(header, lines).to_text())


def _estimate_program(call: Call, out: Path | None, model_explorer: Path | None) -> None:
    """Estimate the operations of a workload, write the documents and print the totals by class."""
    from hespas import api

    if model_explorer and call["dims"]:
        raise UsageError(
            "--model-explorer shows the program as it is written, without --dim",
            hint="estimate the program with its dimensions (hespas-convert SRC BOUND.mlir --dim ...)",
        )
    done = call.run(api.estimate)
    step = api.simulated_step(done)
    if out:
        api.write_estimates_csv(done, out, overwrite=call.overwrite)
    node_data = model_explorer and api.write_node_data(done, model_explorer, overwrite=call.overwrite)
    if call.json_file:
        call.write_json(api.estimate_document(done, step))
    report_diagnostics(call.diagnostics, call["source"])
    if step is not None:
        emit((*step_lines(step, done.hardware), *mixed_lines(step)))
        energy = None if done.costs else api.device_energy(step, done.hardware)
        if energy is not None:
            interval = f"{energy_text(energy.low_j)} to {energy_text(energy.high_j)}"
            figure = f"{energy_text(energy.energy_j)} per device ({interval})"
            if step.is_lower_bound:
                figure = f"at least {energy_text(energy.low_j)} per device"
            emit(f"energy: {figure}")
            emit(f"power: {energy.source}")
    for index, (graph, estimated) in enumerate(zip(done.workload.classes, done.estimates, strict=True)):
        ranks = int((done.workload.rank_class == index).sum())
        rows = api.op_class_summary(graph, estimated)
        total_ns = api.total_duration_ns(rows)
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
                row.op_class,
                row.nodes,
                row.flops,
                row.bytes_moved,
                row.duration_ns,
                row.duration_ns / total_ns if total_ns else nan,
                *((_estimators_text(row),) if len(contributing) > 1 else ()),
                row.unknown or None,
            )
            for row in rows
        ]
        header = (
            *columns("text", "class", write=op_class_text),
            *columns("count", "operations"),
            *columns("flops", "FLOPs"),
            *columns("bytes", "bytes"),
            *columns("time", "time"),
            *columns("share", "share", unknown="-"),
            *columns("text", *(("estimator",) if len(contributing) > 1 else ())),
            *columns("count", "unknown", unknown=""),
        )
        emit(table_from_rows(header, lines).to_text())
        for class_energy in done.energies[index : index + 1]:
            _print_class_energy(class_energy)
    if node_data:
        others = (
            (node_data.fused, "fused into these"),
            (node_data.free, "without cost (views, constants, branches not taken)"),
            (node_data.unknown, "with an unknown time"),
        )
        place = "node data" if str(model_explorer) == "-" else model_explorer
        emit(
            f"{place}: {node_data.timed:,} of {counted(node_data.operations, 'operation')} with a time"
            + "".join(f", {count:,} {text}" for count, text in others if count)
        )


def _print_class_energy(energy: StepEnergy) -> None:
    """Print the energy of the operations of a rank class: by part of the device, or else a lower bound."""
    if energy.parts:
        if not isnan(energy.array_cycles):
            used = f"{energy.array_utilization:.1%} of the multipliers used"
            emit(f"array: {energy.array_cycles:,.0f} cycles per step, {used}")
        emit(f"energy: {energy_text(energy.at_least_j)} per rank and step, without leakage")
        header = (
            *columns("text", "part", write=lambda part: part.replace("_", " ")),
            *columns("number", "energy", write=energy_text),
            *columns("share", "share", unknown="-"),
        )
        lines = [
            (row.part, row.energy_j, row.energy_j / energy.at_least_j)
            for row in sorted(energy.parts, key=lambda row: -row.energy_j)
            if row.energy_j
        ]
        emit(table_from_rows(header, lines).to_text())
    elif not isnan(energy.at_least_j):
        emit(f"energy of arithmetic and main memory: {energy_text(energy.at_least_j)} per rank and step")


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


@command(without=LISTING)
def estimators(
    call: Call,
    *,
    json_file: ListFile = None,
    as_json: AsJson = False,
) -> None:
    """List the estimators, their availability on this machine and the packages that they need."""
    destination = list_file(json_file, as_json=as_json, overwrite=call.overwrite)
    from hespas import api

    if destination:
        from hespas.estimators.registry import list_estimators

        api.write_json(api.estimators_document(list_estimators()), destination, overwrite=call.overwrite)
        return
    table = api.list_estimators()
    details = [flagged(detail) for detail in table.columns["detail"]]
    emit(replace(table, columns={**table.columns, "detail": details}).to_text())
    for row in table.to_records():
        if row["install"]:
            emit(f"{row['estimator']}: {flagged(str(row['install']))}")
